"""Training by the marginal likelihood (Immer et al. 2021): weights and hyper-parameters in one run, no validation set.

    weights           minimise sum_n -log p(y_n | f_n) / T + 1/2 (theta - mean)^T prior (theta - mean): an epoch each
    hyper-parameters  maximise log Z(prior, sigma) of the Laplace approximation at these weights: `hyper_steps` of Adam

An evaluation of log Z costs one curvature pass (KFLR unless told otherwise) and one decomposition; its steps are cheap.
The weights with the largest log Z are kept: a copy of parameters and buffers, and one curvature, in memory.

    >>> import torch
    >>> from torch import nn
    >>> from lapwing.likelihoods import Gaussian
    >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
    >>> found = train(nn.Linear(1, 1), [(x, 3 * x)], Gaussian(), epochs=2, hyper_steps=5)
    >>> len(found.losses), len(found.log_marginals), found.prior.structure
    (2, 2, 'per_tensor')
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lapwing.errors import ParameterError
from lapwing.estimate import kflr
from lapwing.evidence import Evidence, Tuned
from lapwing.likelihoods import Likelihood
from lapwing.linalg import Curvature
from lapwing.params import ParamSpace
from lapwing.priors import Prior
from lapwing.tangent import Tangent
from lapwing.training.evidence_ascent import Hyper, adam
from lapwing.training.loop import Epoch, TrainingLoop
from lapwing.training.objective import Estimator, Objective, count
from lapwing.training.options import built, check_numbers, starting_noise, starting_prior
from lapwing.training.train_mode import following, training_mode


@dataclass(frozen=True, eq=False)
class Trained:
    """The hyper-parameters, evidence and weights of the best epoch, and how the run went.

    `losses` holds the mean over an epoch of the negative log joint density per data point, `log_marginals` log Z after
    each evaluation's hyper-steps (at the epochs `evaluated`), `steps` log Z before each single hyper-step. `state` has
    the parameters and buffers by name; the model holds the same values.
    """

    prior: Prior
    sigma: Float[Tensor, ""]
    log_marginals: tuple[float, ...]
    losses: tuple[float, ...]
    evidence: Evidence
    best_epoch: int
    state: dict[str, Tensor]
    evaluated: tuple[int, ...]
    steps: tuple[float, ...]

    @property
    def curvature(self) -> Curvature:
        """At the best weights; for regression at unit noise."""
        return self.evidence.curvature


def train(
    model: nn.Module,
    loader: Iterable[Any],
    likelihood: Likelihood,
    *,
    estimator: Estimator = kflr,
    prior: Prior | str = "per_tensor",
    precision: float | int | Tensor = 1.0,
    sigma: float | int | Tensor | None = None,
    optimizer_cls: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
    optimizer_kwargs: Mapping[str, Any] | None = None,
    scheduler_cls: Callable[..., Any] | None = None,
    scheduler_kwargs: Mapping[str, Any] | None = None,
    scheduler_per_batch: bool = False,
    epochs: int = 300,
    burn_in: int = 0,
    every: int = 1,
    hyper_steps: int = 100,
    hyper_lr: float | int = 0.1,
    temperature: float | int = 1.0,
    fixed_noise: bool = False,
    points: int | None = None,
    noise_power: int = 2,
    generator: torch.Generator | None = None,
    callback: Callable[[Epoch], object] | None = None,
) -> Trained:
    """Trains the model in place, and leaves it with the weights of largest evidence.

    The evidence is evaluated, in eval mode, after each epoch past `burn_in` whose number divides by `every`, and after
    the last. `prior` is a `Prior` over all trainable weights, or the name of a structure that starts at `precision`.
    `sigma` is the noise level that regression starts from (that of the likelihood unless given), and stays at with
    `fixed_noise`. The gradient of a regression is taken at unit noise, so that a learning rate means the same whatever
    sigma is. `points` is N; without it the loader is counted in one pass over it. `noise_power` is that of `Evidence`.
    A scheduler takes a step per epoch, or per batch; `optimizer_kwargs` are {'lr': 1e-3} unless given.

    A model in train mode is trained with each module in its own mode, so that a frozen BatchNorm stays frozen; one in
    eval mode is put into train mode. On the way out every module has the mode it came with. After an exception or an
    interruption the model keeps its last weights.

    With a `generator`, all randomness (dropout, the order of a loader without a generator of its own, drawn curvature)
    follows it and torch's global generator stays as it was; without one, the global generator is used.
    """
    check_numbers(epochs=epochs, every=every, burn_in=burn_in, steps=hyper_steps, lr=hyper_lr, temperature=temperature)
    if burn_in >= epochs:
        raise ParameterError(
            f"burn_in is {burn_in} with {epochs} epochs, so the evidence would never be evaluated; expected a smaller "
            "burn_in, or more epochs."
        )
    if points is not None:
        check_numbers(points=points)
    space = ParamSpace.of(model)
    noise = starting_noise(likelihood, sigma, space, fixed_noise)
    start, has_noise = starting_prior(prior, precision, space), noise is not None
    level = torch.ones_like(start.precisions[0]) if noise is None else noise
    hyper = Hyper.of(start, has_noise and not fixed_noise)
    losses, values, evaluated, best_evidence = [], [], [], []

    def tune(evidence: Evidence, prior: Prior, sigma: Tensor) -> Tuned:
        options = {"temperature": temperature, "fixed_noise": fixed_noise, "state": hyper}
        return adam(evidence, prior, sigma, hyper_steps, hyper_lr, **options)

    def told(epoch: Epoch, evidence: Evidence | None) -> None:
        losses.append(epoch.loss)
        if epoch.tuned is not None:
            values.append(float(epoch.tuned.log_marginal))
            evaluated.append(epoch.number)
        if epoch.best:
            best_evidence[:] = [evidence]
        if callback is not None:
            callback(epoch)

    with training_mode(model), following(generator, space.device):
        first, counted = count(loader, points)
        tangent = Tangent(model, space)
        objective = Objective(loader, likelihood, tangent, estimator, has_noise, temperature, counted, noise_power)
        objective.check(first, start, generator)
        optimiser = built(optimizer_cls, list(tangent.parameters.values()), optimizer_kwargs or {"lr": 1e-3})
        scheduler = None if scheduler_cls is None else built(scheduler_cls, optimiser, scheduler_kwargs or {})
        loop = TrainingLoop(
            model,
            loader,
            optimiser,
            objective.under,
            lambda: objective.evidence(generator),
            tune,
            scheduler,
            scheduler_per_batch,
        )
        best = loop.run(start, level, epochs, lambda number: number > burn_in and number % every == 0, told)
    return Trained(
        prior=best.tuned.prior,
        sigma=best.tuned.sigma,
        log_marginals=tuple(values),
        losses=tuple(losses),
        evidence=best_evidence[0],
        best_epoch=best.number,
        state=best.weights,
        evaluated=tuple(evaluated),
        steps=tuple(hyper.values),
    )
