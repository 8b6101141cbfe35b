"""Sums of symmetric products, accumulated in place in the upper triangle: little more than half the work.

`SymmetricSum` adds up row^T row over factored rows; `GramSum` one factor of a Kronecker product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.linalg.rows import Piece, assemble, chunks, rows_of


@dataclass
class SymmetricSum:
    """sum over rows of row^T row, [size, size]; rows are spelled out within the budget."""

    upper: Float[Tensor, "size size"]
    budget: int

    @staticmethod
    def zeros(size: int, like: Tensor, budget: int) -> SymmetricSum:
        return SymmetricSum(like.new_zeros(size, size), budget)

    def add(self, pieces: Sequence[Piece]) -> None:
        """`pieces` in the coordinates of this matrix."""
        size = len(self.upper)
        count, batch = rows_of(pieces[0])
        for rows in chunks(batch, 2 * count * size * self.upper.element_size(), self.budget):
            flat = assemble(pieces, size, rows).flatten(0, 1)
            add_product(self.upper.unsqueeze(0), flat.mT.unsqueeze(0))

    def matrix(self) -> Float[Tensor, "size size"]:
        return mirrored(self.upper)


FEW_ROWS = 1024
"""Products of fewer rows wait until there are so many: each reads and writes the whole sum, which is slow to reach."""


@dataclass
class GramSum:
    """sum over m, t of v v^T for values [m, t, k, d], whichever way they lie in memory: [k, d, d]."""

    upper: Float[Tensor, "k d d"]
    waiting: list[Tensor] = field(default_factory=list)

    def add(self, values: Float[Tensor, "m t k d"], borrowed: bool = False) -> None:
        """`borrowed` values may change after this call: a loader may fill one tensor again and again."""
        count, shared, groups, width = values.shape
        last = values.permute(2, 3, 0, 1)
        if last.is_contiguous() and not values.is_contiguous():
            add_product(self.upper, last.flatten(2))  # patches of a convolution: positions are last in memory
        elif shared > width and not values.is_contiguous():
            # gradients of a convolution: small products per data point spare a transposing copy
            last = values.permute(0, 2, 3, 1)
            self.upper += (last @ last.mT).sum(0)
        else:
            self.waiting.append(values.reshape(count * shared, groups, width))
            if sum(map(len, self.waiting)) >= FEW_ROWS:
                self._flush()
            elif borrowed:
                self.waiting[-1] = self.waiting[-1].clone()

    def _flush(self) -> None:
        if self.waiting:
            rows = self.waiting[0] if len(self.waiting) == 1 else torch.cat(self.waiting)
            self.waiting.clear()
            add_product(self.upper, rows.permute(1, 2, 0))

    def matrix(self) -> Float[Tensor, "k d d"]:
        self._flush()
        return mirrored(self.upper)


def merged(left: Float[Tensor, "r n *rest"]) -> Float[Tensor, "m *rest"]:
    """Cotangents and data points as one axis, in whichever order needs no copy."""
    by_point = left.transpose(0, 1)
    return by_point.flatten(0, 1) if by_point.stride(0) == by_point.stride(1) * left.shape[0] else left.flatten(0, 1)


def add_product(total: Float[Tensor, "k d d"], last: Float[Tensor, "k d m"]) -> None:
    """total += upper triangle of v v^T, in bands of rows; the number of bands was measured on two cores."""
    width, count = last.shape[1:]
    bands = 4 if width >= 512 else 2 if width >= 192 and count >= 512 else 1
    edges = [width * i // bands for i in range(bands + 1)]
    for start, stop in pairwise(edges):
        total[:, start:stop, start:].baddbmm_(last[:, start:stop], last[:, start:].mT)


def mirrored(upper: Float[Tensor, "*k d d"]) -> Float[Tensor, "*k d d"]:
    """The symmetric matrix of an upper triangle; what is below is ignored."""
    return torch.triu(upper) + torch.triu(upper, 1).mT
