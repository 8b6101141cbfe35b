"""Sums of symmetric products, accumulated in place in the upper triangle: little more than half the work.

`SymmetricSum` adds up row^T row over factored rows; `GramSum` one factor of a Kronecker product, and `DiagonalSum` the
diagonal of one that is too wide to be held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.linalg.budget import CACHE, chunks, intermediate_bytes
from lapwing.linalg.rows import Piece, ProductSum, assemble


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
        count, batch = pieces[0].shape
        for rows in chunks(batch, 2 * count * size * self.upper.element_size(), self.budget):
            flat = assemble(pieces, size, rows).flatten(0, 1)
            add_product(self.upper.unsqueeze(0), flat.mT.unsqueeze(0))

    def matrix(self) -> Float[Tensor, "size size"]:
        return mirrored(self.upper)


CANCELLED = 64
"""A sum over positions that is this many roundings of its terms' length counts as zero."""
WIDE, ALIGNED = 192, 16
"""Sums of this width have rows, and bands of them, at multiples of so many entries."""
FEW_ROWS = 1024
"""Products of fewer rows wait until there are so many: each reads and writes the whole sum, which is slow to reach."""
WAITING = 16
"""Every factor may keep rows that wait, up to this part of what an intermediate may take."""


def enough_rows(width: int) -> int:
    """Rows that are worth a product at once: the sum has width^2 entries, and waiting costs a copy of the rows."""
    return max(1, min(FEW_ROWS, 2 * width, intermediate_bytes() // WAITING // (8 * width)))


@dataclass
class GramSum:
    """sum over m, t of v v^T for values [m, t, k, d], whichever way they lie in memory: [k, d, d]."""

    upper: Float[Tensor, "k d d"]
    waiting: Float[Tensor, "m k d"] | None = None
    count: int = 0
    parts: ProductSum | None = None

    @staticmethod
    def zeros(groups: int, width: int, like: Tensor) -> GramSum:
        """Rows of a wide sum begin at multiples of `ALIGNED` entries, which products into it are a tenth faster for."""
        room = -(-width // ALIGNED) * ALIGNED if width >= WIDE else width
        return GramSum(like.new_zeros(groups, width, room)[..., :width])

    def add(self, values: Float[Tensor, "m t k d"]) -> None:
        count, shared, groups, width = values.shape
        last = values.permute(2, 3, 0, 1)
        if last.is_contiguous() and not values.is_contiguous():
            add_product(self.upper, last.flatten(2))  # patches of a convolution: positions are last in memory
        elif shared > width and not values.is_contiguous():
            # gradients of a convolution: small products per data point spare a transposing copy
            last = values.permute(0, 2, 3, 1)
            self.upper += (last @ last.mT).sum(0)
        else:
            self._add_rows(values.reshape(count * shared, groups, width))

    def add_sum(self, found: Float[Tensor, "k d d"]) -> None:
        """Takes a sum that was made elsewhere."""
        self.upper += found.to(self.upper.dtype)

    def add_parts(self, found: ProductSum) -> None:
        """Takes one in parts. Small ones stay so: putting them together takes longer than adding the next ones."""
        if self.parts is not None and self.parts.add(found):
            return
        self._put_together()
        if found.bytes <= CACHE:
            self.parts = found
        else:
            self.add_sum(found.matrix())

    def _put_together(self) -> None:
        if self.parts is not None:
            self.add_sum(self.parts.matrix())
            self.parts = None

    def _add_rows(self, rows: Float[Tensor, "m k d"]) -> None:
        enough = enough_rows(rows.shape[-1])
        if 2 * len(rows) > enough:  # a second batch as large would not fit beside it
            add_product(self.upper, rows.permute(1, 2, 0))
            return
        if self.waiting is None:
            self.waiting = rows.new_empty(enough, *rows.shape[1:])
        if self.count + len(rows) > enough:
            self._flush()
        self.waiting[self.count : self.count + len(rows)] = rows
        self.count += len(rows)

    def _flush(self) -> None:
        if self.waiting is not None and self.count:
            add_product(self.upper, self.waiting[: self.count].permute(1, 2, 0))
            self.count = 0

    def matrix(self) -> Float[Tensor, "k d d"]:
        """The sum itself, not a copy of it, unless its rows had to be moved together."""
        self._flush()
        self._put_together()
        self.waiting = None
        self.upper = mirrored(self.upper).contiguous()
        return self.upper


@dataclass
class DiagonalSum:
    """sum over m, t of v * v for values [m, t, k, d]: the diagonal of what `GramSum` adds up, [k, d]."""

    total: Float[Tensor, "k d"]

    def add(self, values: Float[Tensor, "m t k d"]) -> None:
        self.total += torch.einsum("m t k d, m t k d -> k d", values, values)

    def add_sum(self, found: Float[Tensor, "k d d"]) -> None:
        self.total += found.diagonal(dim1=1, dim2=2).to(self.total.dtype)

    def matrix(self) -> Float[Tensor, "k d"]:
        return self.total


def factor_sum(groups: int, width: int, like: Tensor, limit: int) -> GramSum | DiagonalSum:
    """The sum of a factor of `width`, which is diagonal where it is wider than `limit`."""
    return GramSum.zeros(groups, width, like) if width <= limit else DiagonalSum(like.new_zeros(groups, width))


def merged(left: Float[Tensor, "r n *rest"]) -> Float[Tensor, "m *rest"]:
    """Cotangents and data points as one axis, in whichever order needs no copy."""
    by_point = left.transpose(0, 1)
    return by_point.flatten(0, 1) if by_point.stride(0) == by_point.stride(1) * left.shape[0] else left.flatten(0, 1)


def over_positions(left: Float[Tensor, "r n t *groups o"]) -> Float[Tensor, "r n 1 *groups o"]:
    """Sums over positions; those that cancel, as the keys of attention do, are zero and not their rounding."""
    total = left.sum(2, keepdim=True)
    length = torch.linalg.vector_norm(left, dim=(2, -1), keepdim=True)
    rounding = CANCELLED * torch.finfo(left.dtype).eps * length
    return total.masked_fill(torch.linalg.vector_norm(total, dim=-1, keepdim=True) <= rounding, 0.0)


def add_product(total: Float[Tensor, "k d d"], last: Float[Tensor, "k d m"]) -> None:
    """total += upper triangle of v v^T, in bands of rows; the number of bands was measured on one and two cores."""
    width, count = last.shape[1:]
    bands = 8 if width >= 512 else 2 if width >= WIDE and count >= 512 else 1
    edges = [*(width * i // bands // ALIGNED * ALIGNED for i in range(bands)), width]
    for start, stop in pairwise(edges):
        total[:, start:stop, start:].baddbmm_(last[:, start:stop], last[:, start:].mT)


def mirrored(upper: Float[Tensor, "*k d d"]) -> Float[Tensor, "*k d d"]:
    """The symmetric matrix of an upper triangle, in its place; what is below is overwritten."""
    width = upper.shape[-1]
    for start in range(0, width, TILE):
        stop = min(start + TILE, width)
        corner = upper[..., start:stop, start:stop]
        corner.copy_(torch.triu(corner) + torch.triu(corner, 1).mT)
        upper[..., stop:, start:stop] = upper[..., start:stop, stop:].mT
    return upper


TILE = 192
"""Rows that are mirrored at a time: few enough to stay in a cache."""
