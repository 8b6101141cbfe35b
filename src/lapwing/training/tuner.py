"""EvidenceTuner: prior precisions and noise by the evidence, for a training loop of one's own.

    loss(f, y)    what to minimise in the weights: -log p(y | f) per data point, and the prior's part
    step()        after every epoch: where one is due, a look at the evidence, and hyper-steps up it
    restore()     in the end: the weights of the look with the largest evidence

A look costs one curvature pass over the loader and one decomposition. `train` is a loop around this object.

>>> import torch
>>> from torch import nn
>>> from lapwing.likelihoods import Gaussian
>>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
>>> loader = [(x, 3 * x)]
>>> model = nn.Linear(1, 1)
>>> optimiser = torch.optim.Adam(model.parameters(), lr=0.1)
>>> tuner = EvidenceTuner(model, loader, Gaussian(), every=5)
>>> for epoch in range(20):
...     for inputs, targets in loader:
...         optimiser.zero_grad()
...         tuner.loss(model(inputs), targets).backward()
...         _ = optimiser.step()
...     _ = tuner.step()
>>> tuner.restore()
>>> tuner.epoch, len(tuner.log_marginals), tuner.prior.structure
(20, 4, 'per_tensor')
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lapwing.errors import NotFittedError, ParameterError
from lapwing.estimate import kflr
from lapwing.evidence import Evidence, Tuned
from lapwing.likelihoods import Likelihood
from lapwing.params import ParamSpace
from lapwing.priors import Prior
from lapwing.tangent import Tangent
from lapwing.training.evidence_ascent import Hyper, adam
from lapwing.training.loop import Best, Looks
from lapwing.training.objective import Estimator, Objective, count
from lapwing.training.options import check_numbers, starting_noise, starting_prior
from lapwing.training.prior_term import PriorTerm
from lapwing.training.train_mode import restore


class EvidenceTuner:
    """The hyper-parameters of `model` while it is trained; arguments as for `training.train`.

    The evidence is evaluated in eval mode, whatever mode the model is in, after each epoch past `burn_in` whose number
    divides by `every`. The model is changed by `restore` and `load_state_dict` alone.
    """

    def __init__(
        self,
        model: nn.Module,
        loader: Iterable[Any],
        likelihood: Likelihood,
        *,
        estimator: Estimator = kflr,
        prior: Prior | str = "per_tensor",
        precision: float | int | Tensor = 1.0,
        sigma: float | int | Tensor | None = None,
        burn_in: int = 0,
        every: int = 1,
        hyper_steps: int = 100,
        hyper_lr: float | int = 0.1,
        temperature: float | int = 1.0,
        fixed_noise: bool = False,
        points: int | None = None,
        noise_power: int = 2,
        generator: torch.Generator | None = None,
    ) -> None:
        check_numbers(every=every, burn_in=burn_in, steps=hyper_steps, lr=hyper_lr, temperature=temperature)
        if points is not None:
            check_numbers(points=points)
        space = ParamSpace.of(model)
        noise = starting_noise(likelihood, sigma, space, fixed_noise)
        start, has_noise = starting_prior(prior, precision, space), noise is not None
        self.looks = Looks(start, torch.ones_like(start.precisions[0]) if noise is None else noise)
        self.hyper = Hyper.of(start, has_noise and not fixed_noise)
        self.epoch = 0
        self.log_marginals: list[float] = []
        self._burn_in, self._every, self._steps, self._lr = burn_in, every, hyper_steps, hyper_lr
        self._fixed, self._generator = fixed_noise, generator
        self._term: tuple[Prior, PriorTerm] | None = None
        first, counted = count(loader, points)
        tangent = Tangent(model, space)
        self.objective = Objective(loader, likelihood, tangent, estimator, has_noise, temperature, counted, noise_power)
        self.objective.check(first, start, generator)

    @property
    def prior(self) -> Prior:
        """As the evidence has led to it so far."""
        return self.looks.prior

    @property
    def sigma(self) -> Float[Tensor, ""]:
        """The noise level of a regression; 1 for every other likelihood."""
        return self.looks.sigma

    @property
    def best(self) -> Best:
        """The prior, noise, evidence and weights of the best look."""
        if self.looks.best is None:
            raise NotFittedError("there was no look at the evidence yet; expected step() after an epoch that is due.")
        return self.looks.best

    @property
    def _scale(self) -> float:
        """Gradients are taken at unit noise, so that a learning rate means the same whatever sigma is."""
        return float(self.objective.temperature * self.sigma**2)

    def loss(self, f: Float[Tensor, "batch *out"], y: Tensor) -> Float[Tensor, ""]:
        """The negative log joint density per data point of a batch, times sigma^2 T: for `backward`.

        It is -log p(y | f) per data point at unit noise and temperature, plus `penalty()`.
        """
        likelihood = self.objective.at(float(self.sigma))
        likelihood.check(f, y)
        return self.objective.loss(likelihood, f, y, len(f)) * self._scale + self.penalty()

    def penalty(self) -> Float[Tensor, ""]:
        """The prior's part of the loss, for a mean -log p(y | f) of one's own at unit noise: `cross_entropy(f, y)`,
        or the half squared error, summed over outputs and averaged over data points."""
        return self._prior_term().value(self.objective.tensors) * self._scale

    def add_penalty_gradient(self, scale: float | int = 1.0) -> None:
        """Adds the gradient of `scale * penalty()` to those that the weights hold: after `backward`, before a step."""
        self._prior_term().add_gradient(self.objective.tensors, scale * self._scale)

    def _prior_term(self) -> PriorTerm:
        """Made anew where a look has changed the prior."""
        if self._term is None or self._term[0] is not self.prior:
            self._term = self.prior, self.objective.prior_term(self.prior)
        return self._term[1]

    def due(self, number: int) -> bool:
        """Whether there is a look after this epoch, counted from 1."""
        return number > self._burn_in and number % self._every == 0

    def step(self) -> Tuned | None:
        """Counts an epoch; where one is due, looks at the evidence, and says what it found."""
        self.epoch += 1
        return self.look() if self.due(self.epoch) else None

    def look(self) -> Tuned:
        """Evaluates the evidence at the present weights, and takes hyper-steps up it."""
        tuned = self.tune(self.evidence(), self.prior, self.sigma)
        self.looks.note(self.epoch, tuned, self.objective.tangent.model)
        self.log_marginals.append(float(tuned.log_marginal))
        return tuned

    def restore(self) -> None:
        """Gives the model the best weights and buffers."""
        restore(self.objective.tangent.model, self.best.weights)

    def evidence(self) -> Evidence:
        return self.objective.evidence(self._generator)

    def tune(self, evidence: Evidence, prior: Prior, sigma: Tensor) -> Tuned:
        options = {"temperature": self.objective.temperature, "fixed_noise": self._fixed, "state": self.hyper}
        return adam(evidence, prior, sigma, self._steps, self._lr, **options)

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers, lists and mappings: hyper-parameters, their optimiser, and the best weights so far.

        The model's present weights and the generator are the caller's to keep.
        """
        best = self.looks.best
        return {
            "epoch": self.epoch,
            "log_marginals": list(self.log_marginals),
            "hyper": {
                "free": self.hyper.free.detach().clone(),
                "optimiser": self.hyper.optimiser.state_dict(),
                "values": list(self.hyper.values),
            },
            "precisions": self.prior.precisions.detach().clone(),
            "sigma": self.sigma.detach().clone(),
            "best": None
            if best is None
            else {
                "precisions": best.tuned.prior.precisions.clone(),
                "sigma": best.tuned.sigma.clone(),
                "log_marginal": best.tuned.log_marginal.clone(),
                "converged": best.tuned.converged,
                "rounds": best.tuned.rounds,
                "number": best.number,
                "weights": dict(best.weights),
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the state of a tuner of the same model and options."""
        precisions, free = state["precisions"], state["hyper"]["free"]
        if precisions.shape != self.prior.precisions.shape or free.shape != self.hyper.free.shape:
            raise ParameterError(
                f"the state has {precisions.numel()} prior precisions and {free.numel()} hyper-parameters; expected "
                f"{self.prior.precisions.numel()} and {self.hyper.free.numel()}. Build the tuner as it was."
            )
        self.epoch, self.log_marginals[:] = state["epoch"], state["log_marginals"]
        self.looks.prior = self._prior(precisions)
        self.looks.sigma = state["sigma"].to(self.sigma)
        with torch.no_grad():
            self.hyper.free.copy_(free)
        self.hyper.optimiser.load_state_dict(state["hyper"]["optimiser"])
        self.hyper.values[:] = state["hyper"]["values"]
        best = state["best"]
        if best is None:
            self.looks.best = None
            return
        value = best["log_marginal"].to(self.sigma)
        prior, sigma = self._prior(best["precisions"]), best["sigma"].to(self.sigma)
        tuned = Tuned(prior, sigma, value, best["converged"], best["rounds"])
        device = self.objective.tangent.space.device
        self.looks.best = Best(tuned, best["number"], {n: each.to(device) for n, each in best["weights"].items()})

    def _prior(self, precisions: Tensor) -> Prior:
        return self.prior.with_precisions(precisions.to(self.prior.precisions))
