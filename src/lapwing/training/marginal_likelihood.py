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
from lapwing.estimate.naming import Estimator
from lapwing.evidence import Evidence
from lapwing.likelihoods import Likelihood
from lapwing.linalg import Curvature
from lapwing.params import ParamSpace
from lapwing.priors import Prior
from lapwing.training.loop import Epoch, TrainingLoop
from lapwing.training.options import built, check_numbers
from lapwing.training.resume import Keeper, Run
from lapwing.training.train_mode import following, training_mode
from lapwing.training.tuner import EvidenceTuner


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
    keeper: Keeper | None = None,
    keep_every: int = 1,
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

    A `keeper` is given a snapshot after every `keep_every` epochs; where it has one, the run goes on from there, bit
    for bit as if it had not been broken off (random numbers that are not torch's apart).
    """
    check_numbers(epochs=epochs, every=every, burn_in=burn_in, steps=hyper_steps, lr=hyper_lr, temperature=temperature)
    if burn_in >= epochs:
        raise ParameterError(
            f"burn_in is {burn_in} with {epochs} epochs, so the evidence would never be evaluated; expected a smaller "
            "burn_in, or more epochs."
        )
    best_evidence: list[Evidence | None] = []

    with training_mode(model), following(generator, ParamSpace.of(model).device):
        tuner = EvidenceTuner(
            model,
            loader,
            likelihood,
            estimator=estimator,
            prior=prior,
            precision=precision,
            sigma=sigma,
            burn_in=burn_in,
            every=every,
            hyper_steps=hyper_steps,
            hyper_lr=hyper_lr,
            temperature=temperature,
            fixed_noise=fixed_noise,
            points=points,
            noise_power=noise_power,
            generator=generator,
        )
        parameters = list(tuner.objective.tangent.parameters.values())
        optimiser = built(optimizer_cls, parameters, optimizer_kwargs or {"lr": 1e-3})
        scheduler = None if scheduler_cls is None else built(scheduler_cls, optimiser, scheduler_kwargs or {})
        run = Run(tuner, optimiser, scheduler, loader, generator)
        kept = None if keeper is None else keeper.load()
        done = 0 if kept is None else run.put_back(kept)

        def told(epoch: Epoch, evidence: Evidence | None) -> None:
            run.losses.append(epoch.loss)
            if epoch.tuned is not None:
                run.values.append(float(epoch.tuned.log_marginal))
                run.evaluated.append(epoch.number)
            if epoch.best:
                best_evidence[:] = [evidence]
            if callback is not None:
                callback(epoch)
            if keeper is not None and (epoch.number % keep_every == 0 or epoch.number == epochs):
                keeper.save(run.snapshot(epoch.number))

        loop = TrainingLoop(
            model, loader, optimiser, tuner.objective.under, tuner.evidence, tuner.tune, scheduler, scheduler_per_batch
        )
        best = loop.run(tuner.looks, epochs, tuner.due, told, done)
        found = best_evidence[0] if best_evidence else _again(tuner, generator)
    assert found is not None
    return Trained(
        prior=best.tuned.prior,
        sigma=best.tuned.sigma,
        log_marginals=tuple(run.values),
        losses=tuple(run.losses),
        evidence=found,
        best_epoch=best.number,
        state=best.weights,
        evaluated=tuple(run.evaluated),
        steps=tuple(tuner.hyper.values),
    )


def _again(tuner: EvidenceTuner, generator: torch.Generator | None) -> Evidence:
    """The evidence at the best weights, of a look before the run was broken off; draws of it count for nothing."""
    state = None if generator is None else generator.get_state()
    found = tuner.evidence()
    if generator is not None and state is not None:
        generator.set_state(state)
    return found
