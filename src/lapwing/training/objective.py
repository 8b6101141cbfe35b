"""What training by the marginal likelihood asks of the data: gradients for the weights, and the evidence.

    under      gradients of sum_n -log p(y_n | f_n) / T + 1/2 (theta - mean)^T prior (theta - mean), at unit noise
    evidence   curvature and fit at the weights [P] as they are, in one pass of the estimator

Nothing of a batch is kept after it; an evaluation has the memory of one curvature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.errors import DataError
from lapwing.estimate.data_pass import no_batch, pairs
from lapwing.estimate.naming import Estimator
from lapwing.evidence import Evidence
from lapwing.evidence.seen import Seen
from lapwing.likelihoods import Likelihood
from lapwing.priors import Prior
from lapwing.tangent import Tangent
from lapwing.tangent.inputs import batch_size, call
from lapwing.training.loop import Gradient
from lapwing.training.prior_term import PriorTerm


@runtime_checkable
class Term(Protocol):
    """A function of the weights beside the loss of the data, per data point."""

    def at(self, tensors: Sequence[Tensor]) -> tuple[Float[Tensor, ""], Callable[[float], None]]:
        """The value at these tensors, and what adds so many times the gradient to those that they hold."""
        ...


@dataclass(frozen=True, eq=False)
class Objective:
    """The negative log joint density of N = `points` data points. `has_noise`: whether there is a sigma."""

    loader: Iterable[Any]
    likelihood: Likelihood
    tangent: Tangent
    estimator: Estimator
    has_noise: bool
    temperature: float | int
    points: int
    noise_power: int

    def at(self, sigma: float) -> Likelihood:
        """The likelihood at a noise level, where there is one."""
        return self.likelihood.at_noise(sigma) if self.has_noise else self.likelihood

    def under(self, prior: Prior, sigma: float) -> Gradient:
        """Losses and gradients of batches. The gradient is scaled by T sigma^2; the loss that is returned is not."""
        return self.with_term(self.prior_term(prior), sigma)

    def with_term(
        self, term: Term, sigma: float = 1.0, watch: Callable[[Sequence[Tensor]], None] | None = None
    ) -> Gradient:
        """The same with any term of the weights beside the loss of the data, whose gradient alone `watch` is shown."""
        likelihood, scale = self.at(sigma), self.temperature * sigma**2
        tensors = self.tensors

        def gradient(x: Any, y: Any) -> tuple[float, float]:
            f = call(self.tangent.model, x)
            likelihood.check(f, y)
            loss = self.loss(likelihood, f, y, batch_size(x))
            with torch.no_grad():
                of_weights, add_gradient = term.at(tensors)
                value = float(loss.detach() + of_weights)
            if not isfinite(value):
                raise DataError(
                    f"the loss is {value}; expected a finite number. Use a smaller learning rate, or check the data."
                )
            if loss.requires_grad:  # not where a batch uses no weight at all
                (loss if scale == 1 else loss * scale).backward()
            if watch is not None:
                watch(tensors)
            add_gradient(scale)
            return value, value * scale

        return gradient

    def loss(self, likelihood: Likelihood, f: Tensor, y: Tensor, size: int) -> Float[Tensor, ""]:
        """-log p(y | f) per data point of a batch of `size`, over the temperature."""
        return likelihood.total_loss(f, y) / (size * self.temperature)

    @property
    def tensors(self) -> list[Tensor]:
        """The weights that are trained, as the model holds them now."""
        return list(self.tangent.parameters.values())

    def prior_term(self, prior: Prior) -> PriorTerm:
        """1/2 (theta - mean)^T prior (theta - mean) per data point, as a function of the tensors."""
        return PriorTerm.of(prior, self.tangent.space, self.points)

    def penalty(self, prior: Prior) -> Float[Tensor, ""]:
        """The prior's term at the present weights, differentiable in them."""
        return self.prior_term(prior).value(self.tensors)

    def check(self, batch: tuple[Any, Any], prior: Prior, generator: torch.Generator | None) -> None:
        """Refuses, before any step, a model that the estimator has no rule for or a prior that it cannot carry."""
        different = 1 + torch.arange(len(prior.precisions)) / len(prior.precisions)
        evidence = replace(self, loader=[batch]).evidence(generator)
        evidence.precision(prior.with_precisions(different.to(prior.precisions)))

    def evidence(self, generator: torch.Generator | None) -> Evidence:
        """Curvature and fit at the present weights, in eval mode, at unit noise where there is a noise level."""
        tangent, likelihood = replace(self.tangent, evaluate=True), self.at(1.0)
        seen = Seen(self.has_noise, exact=True, printing=False)
        curvature = self.estimator(tangent, likelihood, seen.watching(self.loader), generator=generator)
        mean = tangent.space.values(tangent.model)
        return Evidence(curvature, mean, seen.fit(mean.dtype), self.noise_power if self.has_noise else 2)


def count(loader: Iterable[Any], points: int | None) -> tuple[tuple[Any, Any], int]:
    """The first batch, and N: counted, as the length of a dataset is another number where the last batch is dropped."""
    if iter(loader) is loader:
        raise DataError(
            f"the loader is a {type(loader).__name__} that can be read only once; expected one that starts again in "
            "each epoch. Give a DataLoader, or a list of pairs."
        )
    first, counted = None, 0
    for x, y in pairs(loader):
        first = (x, y) if first is None else first
        counted += batch_size(x)
        if points is not None:
            break
    if first is None:
        raise no_batch()
    return first, counted if points is None else points
