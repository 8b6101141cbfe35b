"""Passes of a training run over its data: an epoch of steps on the weights, and an evaluation of the evidence.

    epoch      minimises sum_n -log p(y_n | f_n) / T + 1/2 (theta - mean)^T prior (theta - mean), a step per batch
    evidence   curvature and fit at the weights [P] as they are: one pass of the estimator, and a forward pass

Nothing of a batch is kept after it; an evaluation has the memory of one curvature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import torch

from lapwing.errors import DataError, LapwingError
from lapwing.estimate.data_pass import no_batch
from lapwing.evidence import Evidence, GaussianFit
from lapwing.likelihoods import Gaussian, Likelihood
from lapwing.linalg import Curvature
from lapwing.priors import Prior
from lapwing.tangent import Tangent
from lapwing.tangent.inputs import batch_size, call

Estimator = Callable[..., Curvature]
"""(tangent, likelihood, batches, generator=...) -> Curvature: any function of `lapwing.estimate`."""


@dataclass(frozen=True, eq=False)
class Run:
    """What does not change while a model is trained; its methods are passes. `has_noise`: whether there is a sigma."""

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
        if isinstance(self.likelihood, Gaussian) and self.has_noise:
            return replace(self.likelihood, sigma=sigma)
        return self.likelihood

    def epoch(
        self, number: int, optimiser: torch.optim.Optimizer, prior: Prior, sigma: float, scheduler: Any = None
    ) -> float:
        """One pass of steps, of a scheduler too where one is given; the mean of the loss over data points."""
        space, likelihood, scale = self.tangent.space, self.at(sigma), self.temperature * sigma**2
        total = taken = 0
        for batch, (x, y) in enumerate(pairs(self.loader)):
            seen: list[float] = []
            weight = batch_size(x)

            def closure(x: Any = x, y: Any = y, weight: int = weight, seen: list[float] = seen) -> float:
                optimiser.zero_grad()
                with torch.enable_grad():
                    f = call(self.tangent.model, x)
                    likelihood.check(f, y)
                    fit = likelihood.log_prob(f, y).sum() / (weight * self.temperature)
                    loss = prior.scatter(space.ravel(self.tangent.parameters)) / (2 * self.points) - fit
                    seen.append(float(loss.detach()))
                    if not isfinite(seen[-1]):
                        raise DataError(
                            f"the loss is {seen[-1]}; expected a finite number. Use a smaller learning rate, or check "
                            "the data."
                        )
                    (loss * scale).backward()
                return seen[-1] * scale

            with _named(number, batch):
                optimiser.step(closure)
            advance(scheduler, seen[0])
            total, taken = total + weight * seen[0], taken + weight
        if not taken:
            raise DataError(f"the loader yields no batch in epoch {number}; expected it to start again in each epoch.")
        return total / taken

    def check(self, batch: tuple[Any, Any], prior: Prior, generator: torch.Generator | None) -> None:
        """Refuses, before any step, a model that the estimator has no rule for or a prior that it cannot carry."""
        different = 1 + torch.arange(len(prior.precisions)) / len(prior.precisions)
        evidence = replace(self, loader=[batch]).evidence(generator)
        evidence.precision(prior.with_precisions(different.to(prior.precisions)))

    def evidence(self, generator: torch.Generator | None) -> Evidence:
        """Curvature and fit at the present weights, in eval mode, at unit noise where there is a noise level."""
        tangent, likelihood = replace(self.tangent, evaluate=True), self.at(1.0)
        observed = Observed(self.loader, tangent, likelihood)
        curvature = self.estimator(tangent, likelihood, observed, generator=generator)
        mean = tangent.space.values(tangent.model)
        if self.has_noise:
            fit = GaussianFit(observed.targets, mean.new_tensor(observed.squares))
            return Evidence(curvature, mean, fit, self.noise_power)
        return Evidence(curvature, mean, mean.new_tensor(observed.log_likelihood))


@dataclass(eq=False)
class Observed:
    """The loader's batches; once they have all been taken, how well the model fits those very batches."""

    loader: Iterable[Any]
    tangent: Tangent
    likelihood: Likelihood
    targets: int = 0
    squares: float = 0.0
    log_likelihood: float = 0.0

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        self.targets, self.squares, self.log_likelihood = 0, 0.0, 0.0
        for x, y in pairs(self.loader):
            yield x, y  # first: the estimator names what is wrong with a batch
            with torch.no_grad():
                f = call(self.tangent.network(), x)
                self.log_likelihood += float(self.likelihood.log_prob(f, y).sum())
                if isinstance(self.likelihood, Gaussian):
                    self.targets += y.numel()
                    self.squares += float((y - f).double().square().sum())


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


def pairs(loader: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """(inputs, targets) of every batch; an error names the batch that is no pair."""
    for number, batch in enumerate(loader):
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise DataError(
                f"batch {number} is a {type(batch).__name__}; expected a pair (inputs, targets). Give a loader of "
                "pairs, or a list of them: [(x, y)]."
            )
        yield batch[0], batch[1]


def advance(scheduler: Any, loss: float) -> None:
    """A step of the scheduler, if there is one; of a kind that looks at the loss, told the loss."""
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        scheduler.step(loss)
    elif scheduler is not None:
        scheduler.step()


@contextmanager
def _named(epoch: int, batch: int) -> Iterator[None]:
    try:
        yield
    except LapwingError as error:
        raise type(error)(f"epoch {epoch}, batch {batch}: {error}") from error
