"""Diagonal: one number per parameter. Memory and every operation O(P).

>>> import torch
>>> Diagonal(torch.tensor([3.0, 1.0])).with_prior(1.0).variance()
tensor([0.2500, 0.5000])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.linalg.budget import intermediate_bytes
from lapwing.linalg.checks import check_finite, check_positive, check_precisions, check_prior, check_scale, normal
from lapwing.linalg.contracts import Curvature, Precision, same_kind
from lapwing.linalg.rows import Piece, add_grams, add_squares, weighed


@dataclass(frozen=True, eq=False)
class Diagonal(Curvature):
    """The diagonal of a curvature."""

    values: Float[Tensor, " params"]

    @property
    def size(self) -> int:
        return self.values.shape[-1]

    def __add__(self, other: Curvature) -> Diagonal:
        return Diagonal(self.values + same_kind(self, other).values)

    def __mul__(self, scale: float | int | Tensor) -> Diagonal:
        return Diagonal(self.values * check_scale(scale))

    def mv(self, v: Float[Tensor, "*batch params"]) -> Float[Tensor, "*batch params"]:
        return v * self.values

    def diagonal(self) -> Float[Tensor, " params"]:
        return self.values

    def dense(self) -> Float[Tensor, "params params"]:
        return self.values.diag()

    def with_prior(self, precision: float | int | Tensor) -> DiagonalPrecision:
        check_finite(self.values, "the diagonal")
        total = self.values + check_prior(precision, self.size, self.values)
        check_positive(total.detach(), "curvature + prior")
        return DiagonalPrecision(total)

    def sweep(self, pieces: Sequence[Piece], precisions: Float[Tensor, " k"]) -> Float[Tensor, "k n r"]:
        precisions = check_precisions(precisions).to(self.values)
        check_finite(self.values, "the diagonal")
        check_positive((self.values.min() + precisions.min()).detach(), "curvature + prior")
        count, batch = pieces[0].shape
        total = self.values.new_zeros(len(precisions), batch, count)
        for points, rows, values in weighed(pieces, self.values, intermediate_bytes() // 4):
            total[:, points] += rows.sweep(values, precisions)
        return total


@dataclass(frozen=True, eq=False)
class DiagonalPrecision(Precision):
    values: Float[Tensor, " params"]

    @property
    def size(self) -> int:
        return self.values.shape[-1]

    def mv(self, v: Float[Tensor, "*batch params"]) -> Float[Tensor, "*batch params"]:
        return v * self.values

    def solve(self, v: Float[Tensor, "*batch params"]) -> Float[Tensor, "*batch params"]:
        return v / self.values

    def draw(self, n: int, generator: torch.Generator | None = None) -> Float[Tensor, "n params"]:
        return normal((n, self.size), self.values, generator) * self.values.rsqrt()

    def logdet(self) -> Float[Tensor, ""]:
        return self.values.log().sum()

    def variance(self) -> Float[Tensor, " params"]:
        return self.values.reciprocal()

    @property
    def _weight(self) -> Float[Tensor, " params"]:
        """As `variance`, but a number that stands for all entries stays one number in memory."""
        if self.size > 1 and self.values.stride(0) == 0:
            return self.values[0].reciprocal().expand(self.size)
        return self.variance()

    def quadratic(self, pieces: Sequence[Piece]) -> Float[Tensor, "n r r"]:
        found = weighed(pieces, self._weight, even=lambda piece: piece.even(whole=True))
        return add_grams(found, *pieces[0].shape)

    def squares(self, pieces: Sequence[Piece]) -> Float[Tensor, "n r"]:
        found = weighed(pieces, self._weight, even=lambda piece: piece.even(whole=False), tiled=True)
        return add_squares(found, *pieces[0].shape)
