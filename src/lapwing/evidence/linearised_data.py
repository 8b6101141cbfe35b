"""LinearisedData: the data as a network sees them that is linearised at its trained weights theta~.

    f_n + J_n (theta - theta~)    outputs at the weights theta, f_n and J_n those of the trained network

A pass over the data gives the fit and the gradient [P] of the log-likelihood at any theta, the product of
sum_n J_n^T H_n J_n with a vector [P], or the loss along a line. J is a linear map and is never spelled out. Memory: a
few vectors [P], and the graph of one batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.errors import DataError
from lapwing.estimate.data_pass import Batches, check_loss, named, numbered, pair
from lapwing.evidence.marginal import Evidence, GaussianFit
from lapwing.evidence.seen import Seen
from lapwing.likelihoods import Likelihood
from lapwing.linalg import LinearMap
from lapwing.tangent import Tangent
from lapwing.tangent.features import FeatureTangent

SIZES = tuple(0.5**k for k in range(24))
"""Lengths of a step that a line search tries, all in one pass."""


@dataclass(frozen=True, eq=False)
class Point:
    """theta~ + `away`: how it fits the data, and the gradient of -log p there, at unit noise and temperature.

    In float64: a large precision multiplies what is left of theta - m, a small difference.
    """

    away: Float[Tensor, " params"]
    fit: Float[Tensor, ""] | GaussianFit
    gradient: Float[Tensor, " params"]

    @property
    def loss(self) -> float:
        """The negative log-likelihood, without the constants of Gaussian noise that is free."""
        return float(self.fit.squares) / 2 if isinstance(self.fit, GaussianFit) else -float(self.fit)

    def moved(self, step: Float[Tensor, " params"], image: Float[Tensor, " params"], least: float) -> Point:
        """The point one step further, if -log p is quadratic and `image` is its matrix times the step.

        `least` is the smallest sum of squares that residuals can have.
        """
        change = torch.dot(step.double(), (self.gradient + image / 2).double())
        if isinstance(self.fit, GaussianFit):
            squares = (self.fit.squares.double() + 2 * change).clamp_min(least).to(self.fit.squares)
            fit = replace(self.fit, squares=squares)
        else:
            fit = (self.fit.double() - change).to(self.fit)
        return Point(self.away + step, fit, self.gradient + image)


@dataclass(eq=False)
class LinearisedData:
    """`at`, `product` and `along` are one pass each over `batches`; `passes` counts them, and may go up to `limit`.

    Every pass must see the same data, in any order: their number, and the likelihood of the trained network, are
    compared.
    """

    tangent: Tangent | FeatureTangent
    likelihood: Likelihood
    batches: Batches
    regression: bool
    limit: int
    passes: int = 0
    least: float = 0.0
    """The sum of squares of residuals that are nothing but the rounding of their targets."""
    _first: tuple[int, float] | None = field(default=None, repr=False)

    @property
    def left(self) -> int:
        """Passes that are left."""
        return self.limit - self.passes

    def at(self, away: Float[Tensor, " params"]) -> Point:
        """Fit and gradient at theta~ + away."""
        sums, moved, near = _Sums.of(self, away), bool(away.any()), away.to(self.tangent.space.dtype)
        for linear, y in self.passed():
            sums.add(linear, linear.value + linear.mv(near) if moved else linear.value, y)
        return sums.point(away)

    def product(self, away: Float[Tensor, " params"], v: Float[Tensor, " params"]) -> Float[Tensor, " params"]:
        """sum_n J_n^T H_n J_n v, with H_n the Hessian of -log p at theta~ + away."""
        total = torch.zeros_like(v, dtype=torch.float64)
        moved = not self.likelihood.adds_noise and bool(away.any())
        away, short = (each.to(self.tangent.space.dtype) for each in (away, v))
        for linear, y in self.passed():
            value = linear.value + linear.mv(away) if moved else linear.value
            total += linear.rmv(self.likelihood.hessian_mv(value, y, linear.mv(short)).to(short)).double()
        return total.to(v)

    def along(self, away: Float[Tensor, " params"], step: Float[Tensor, " params"]) -> tuple[list[float], Point]:
        """-log p at theta~ + away + t step for each t of `SIZES`, and the whole point at the first of them, t = 1."""
        sums, losses = _Sums.of(self, away), torch.zeros(len(SIZES), dtype=torch.float64)
        for linear, y in self.passed():
            start, change = (linear.mv(each.to(self.tangent.space.dtype)) for each in (away, step))
            start = linear.value + start
            losses -= torch.tensor([float(self._log_prob(start + t * change, y)) for t in SIZES], dtype=torch.float64)
            sums.add(linear, start + change, y)
        return losses.tolist(), sums.point(away + step)

    def check(self, trained: Point, evidence: Evidence, points: int) -> None:
        """Refuses data other than the `points` that the evidence has seen."""
        assert self._first is not None
        found, expected = (
            float(fit.squares if isinstance(fit, GaussianFit) else fit) for fit in (trained.fit, evidence.fit)
        )
        if self._first[0] != points or abs(found - expected) > self._tolerance * (1 + abs(expected)):
            what = "sum of squared residuals" if self.regression else "log-likelihood"
            raise DataError(
                f"the loader holds {self._first[0]} data points with a {what} of {found:.6g} at the trained weights, "
                f"and the posterior was fitted to {points} with {expected:.6g}; expected the same data. Give all data "
                "of the fit, without augmentation and drop_last; shuffling is fine."
            )

    def _log_prob(self, value: Tensor, y: Tensor) -> Tensor:
        return self.likelihood.log_prob(value, y).double().sum()

    @property
    def _tolerance(self) -> float:
        """How far apart sums over the same data in another order may be, relatively."""
        return torch.finfo(self.tangent.space.dtype).eps ** 0.5

    def passed(self) -> Iterator[tuple[LinearMap, Tensor]]:
        """(linear map, targets) of every batch, checked; errors name the batch."""
        tangent: Any = replace(self.tangent, differentiable=False) if self.tangent.differentiable else self.tangent
        self.passes += 1
        points, total, size = 0, 0.0, 0.0
        for number, batch in numbered(self.batches):
            with named(number):
                x, y = pair(batch)
                linear = tangent.at(x)
                log_prob = check_loss(self.likelihood, linear.value, y).double()
            points, total, size = (
                points + linear.batch,
                total + float(log_prob.sum()),
                size + float(log_prob.abs().sum()),
            )
            yield linear, y
        first = self._first = self._first or (points, total)
        if points != first[0] or abs(total - first[1]) > self._tolerance * (1 + size):
            raise DataError(
                f"pass {self.passes} over the data had {points} points with a log-likelihood of {total:.6g} at the "
                f"trained weights, and the first {first[0]} with {first[1]:.6g}; expected the same data in every pass. "
                "Give a loader without augmentation and drop_last; shuffling is fine."
            )


@dataclass(eq=False)
class _Sums:
    """What one pass adds up."""

    data: LinearisedData
    seen: Seen
    rounding: Seen
    gradient: Tensor

    @staticmethod
    def of(data: LinearisedData, like: Tensor) -> _Sums:
        return _Sums(data, Seen(data.regression), Seen(data.regression), torch.zeros_like(like, dtype=torch.float64))

    def add(self, linear: LinearMap, value: Tensor, y: Tensor) -> None:
        likelihood = self.data.likelihood
        self.seen.saw(value, y, likelihood.log_prob(value, y))
        if self.data.regression:
            self.rounding.saw(y.to(value), y, value)
        self.gradient += linear.rmv(likelihood.grad(value, y).to(value)).double()

    def point(self, away: Tensor) -> Point:
        if self.data.regression:
            self.data.least = float(self.rounding.total)
        return Point(away, self.seen.fit(self.data.tangent.space.dtype), self.gradient)
