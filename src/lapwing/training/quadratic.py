"""The loss at the present weights and its quadratic, over one or more batches: value, gradient [P], products.

    E(theta) = mean_n -log p(y_n | f_n) + 1/2 (theta - m)^T P (theta - m)
    q(d)     = E + g^T d + 1/2 d^T (G + P + tau I) d,      G = mean_n J_n^T H_n J_n      (thesis 4.14, 4.20)

P is diag(decay), with the curvature of earlier data where the prior is a previous posterior.
G is never formed: a direction costs one product J d of every batch. The graph of a single batch is kept from the
gradient for the products; several batches are linearised again, so that memory is that of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from math import inf, isfinite
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.errors import DataError
from lapwing.estimate.data_pass import check_loss, named
from lapwing.likelihoods import Likelihood
from lapwing.linalg import Curvature, total
from lapwing.priors import AnyPrior, Gaussian
from lapwing.tangent import Linearisation, Tangent
from lapwing.tangent.inputs import Called, all_finite, batch_size

Pair = tuple[Any, Any]
Vectors = Sequence[Float[Tensor, " n"]] | Float[Tensor, "_ n"]


@dataclass(frozen=True, eq=False)
class Penalty:
    """1/2 (theta - mean)^T (diag(decay) + curvature) (theta - mean): the prior's part, per data point.

    `curvature` is that of earlier data, where the prior is a previous posterior.
    """

    decay: float | Float[Tensor, " params"] = 0.0
    mean: float | Float[Tensor, ""] | Float[Tensor, " params"] = 0.0
    curvature: Curvature | None = None

    @staticmethod
    def of(prior: AnyPrior, points: int) -> Penalty:
        """A prior for so many data points."""
        base = prior.base if isinstance(prior, Gaussian) else prior
        precision = base.precision().detach()
        decay = (float(precision) if precision.dim() == 0 else precision) / points
        return Penalty(decay, prior.mean, prior.curvature * (1 / points) if isinstance(prior, Gaussian) else None)

    @property
    def nothing(self) -> bool:
        """Whether it is zero at all weights."""
        return isinstance(self.decay, float) and not self.decay and self.curvature is None

    def value(self, theta: Tensor) -> float:
        if self.nothing:
            return 0.0
        away = theta - self.mean
        found = float((self.decay * away.double() * away.double()).sum())
        if self.curvature is not None:
            found += float((away.double() * self.curvature.mv(away).double()).sum())
        return found / 2

    def added_to(self, gradient: Tensor, theta: Tensor) -> Tensor:
        """The gradient of a loss and of this: a number alone takes one pass over the weights, and none if zero."""
        if self.curvature is not None:
            away = theta - self.mean
            return gradient + self.decay * away + self.curvature.mv(away)
        if isinstance(self.decay, float) and isinstance(self.mean, (int, float)) and not self.mean:
            return gradient.add(theta, alpha=self.decay) if self.decay else gradient
        return gradient + self.decay * (theta - self.mean)

    def joined(self, curvature: Curvature, points: float) -> Curvature:
        """The curvature of so many data points with as many points' share of the earlier data's."""
        return curvature if self.curvature is None else total(curvature, self.curvature * points)

    def products(self, directions: Float[Tensor, "k params"]) -> Float[Tensor, "k k"]:
        """d_i^T (diag(decay) + curvature) d_j."""
        if not isinstance(self.decay, float):
            found = products(directions * self.decay, directions)
        elif self.decay:
            found = self.decay * products(directions, directions)
        else:
            found = directions.new_zeros(len(directions), len(directions), dtype=torch.float64)
        if self.curvature is not None:
            found = found + products(directions, self.curvature.mv(directions))
        return found


@dataclass(frozen=True, eq=False)
class Here:
    """E at the weights as they are now, its gradient, and what the quadratic needs."""

    tangent: Tangent
    likelihood: Likelihood
    penalty: Penalty
    batches: Sequence[Pair]
    points: int
    value: float
    gradient: Float[Tensor, " params"]
    norm: float
    """Of the gradient."""
    kept: tuple[Linearisation, Any] | None

    @staticmethod
    def of(tangent: Tangent, likelihood: Likelihood, penalty: Penalty, batches: Sequence[Pair]) -> Here:
        """One forward and one backward pass over the batches."""
        points = sum(batch_size(x) for x, _ in batches)
        total, gradient, kept = 0.0, None, None
        for number, (x, y) in enumerate(batches):
            with _part(batches, number):
                each = tangent.at(x)
                total -= float(check_loss(likelihood, each.value, y).double().sum())
            part = each.rmv(likelihood.grad(each.value, y) / points)
            gradient = part if gradient is None else gradient + part
            kept = each, y
        assert gradient is not None, "there is at least one batch"
        value = total / points
        if not penalty.nothing:
            theta = tangent.space.values(tangent.model)
            gradient, value = penalty.added_to(gradient, theta), value + penalty.value(theta)
        norm = float(gradient.norm())
        if not (isfinite(norm) or all_finite(gradient)):
            raise DataError(
                "the gradient of the loss holds NaN or infinite entries; expected finite ones. Check the data and the "
                "model at these weights."
            )
        single = kept if len(batches) == 1 else None
        return Here(tangent, likelihood, penalty, batches, points, value, gradient, norm, single)

    @cached_property
    def theta(self) -> Float[Tensor, " params"]:
        """The weights as they are when this is first asked for: a copy that not every step needs."""
        return self.tangent.space.values(self.tangent.model)

    def slopes(self, directions: Float[Tensor, "k params"]) -> Float[Tensor, " k"]:
        return products(directions, self.gradient.unsqueeze(0)).squeeze(1)

    def bends(self, directions: Float[Tensor, "k params"]) -> Float[Tensor, "k k"]:
        """d_i^T (G + P) d_j, in float64; tau is not in it."""
        total = self.penalty.products(directions)
        for each, y in self._linearisations():
            along = [each.mv(direction) for direction in directions]
            curved = [self.likelihood.hessian_mv(each.value, y, image) for image in along]
            left, right = ([image.flatten().double() for image in images] for images in (along, curved))
            total = total + products(left, right) / self.points
        return (total + total.mT) / 2

    def loss(self, theta: Float[Tensor, " params"]) -> float:
        """E of the same batches at other weights, which are not written into the model; NaN or infinite where f is."""
        space, total = self.tangent.space, 0.0
        network = Called(self.tangent.network())
        named = {f"model.{name}": value for name, value in self.tangent.tensors(theta).items()}
        with torch.no_grad():
            for x, y in self.batches:
                f = torch.func.functional_call(network, named, (x,)).to(space.dtype)
                total -= float(self.likelihood.log_prob(f, y).double().sum())
        return total / self.points + self.penalty.value(theta)

    def _linearisations(self) -> Iterator[tuple[Linearisation, Any]]:
        if self.kept is not None:
            yield self.kept
            return
        for x, y in self.batches:
            yield self.tangent.at(x), y


@dataclass(frozen=True, eq=False)
class Plan:
    """Directions out of a point and the quadratic along them: what a step needs, at any tau without another product."""

    directions: Float[Tensor, "k params"]
    slopes: Float[Tensor, " k"]
    bends: Float[Tensor, "k k"]
    norms: Float[Tensor, "k k"]
    zeta: float
    unit: float = 1.0
    """What the first direction is to be multiplied by before a coefficient is called the length of the step."""

    @staticmethod
    def of(here: Here, directions: Float[Tensor, "k params"], zeta: float, unit: float = 1.0) -> Plan:
        norms = products(directions, directions)
        return Plan(directions, here.slopes(directions), here.bends(directions), norms, zeta, unit)

    def best(self, tau: float) -> tuple[Float[Tensor, " k"], float]:
        """Coefficients of the directions that minimise q, and q there without its constant; infinite where none do."""
        matrix = self.bends + tau * self.norms
        for count in range(len(matrix), 0, -1):  # a last step along the direction itself adds nothing
            root, info = torch.linalg.cholesky_ex(matrix[:count, :count])
            if int(info) == 0 and bool(torch.isfinite(root).all()):
                found = torch.cholesky_solve(-self.slopes[:count, None], root).squeeze(1)
                value = float(self.slopes[:count] @ found) / 2
                return torch.cat([found, found.new_zeros(len(matrix) - count)]), value
        return torch.zeros_like(self.slopes), inf

    def moved(self, theta: Float[Tensor, " params"], coefficients: Float[Tensor, " k"]) -> Float[Tensor, " params"]:
        """Where so much of every direction leads from theta."""
        for direction, coefficient in zip(self.directions, coefficients.tolist(), strict=True):
            theta = torch.add(theta, direction, alpha=coefficient)
        return theta

    def reach(self, coefficients: Float[Tensor, " k"]) -> float:
        """No weight moves farther than this; NaN where directions are not finite."""
        return float(coefficients.abs() @ self.norms.diagonal().sqrt())

    def step(self, coefficients: Float[Tensor, " k"]) -> Float[Tensor, " params"]:
        """So much of every direction: what `moved` adds, before rounding to theta's."""
        return coefficients.to(self.directions.dtype) @ self.directions


def products(a: Vectors, b: Vectors) -> Float[Tensor, "k m"]:
    """All a_i^T b_j, in float64: a few long vectors, for which `dot` is faster than a matrix product."""
    return torch.stack([torch.stack([torch.dot(left, right) for right in b]) for left in a]).double()


def _part(batches: Sequence[Pair], number: int) -> AbstractContextManager[None]:
    """Errors name the part; whoever gave a single one knows which it is."""
    return nullcontext() if len(batches) == 1 else named(f"part {number}")
