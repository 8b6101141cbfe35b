"""diagonal: the exact diagonal of the GGN or Fisher, layer by layer, without the rows it is made of.

Without weight sharing a layer's share is (sum_r G*G)^T (A*A), one product; with sharing the rows of one layer are
formed for one cotangent at a time. Memory O(P) and a chunk; an embedding touches only the tokens it meets.
`SquareSum` adds up over a pass; `RowSquares` are those of one batch, for a sum that someone else keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.estimate.cotangents import Cotangents, exact
from lapwing.estimate.data_pass import Batches, pulled
from lapwing.estimate.symmetric_sums import FEW_ROWS, WAITING
from lapwing.likelihoods import Likelihood
from lapwing.linalg import Diagonal, MatrixLayout, OuterRows, Piece, Segments
from lapwing.linalg.budget import chunks
from lapwing.linalg.layout import Segment
from lapwing.linalg.rows import assemble, connected
from lapwing.tangent import Tangent
from lapwing.tangent.inputs import all_finite


def diagonal(
    tangent: Tangent,
    likelihood: Likelihood,
    batches: Batches,
    *,
    cotangents: Cotangents = exact,
    generator: torch.Generator | None = None,
) -> Diagonal:
    """diag(sum_n J_n^T H_n J_n), exact."""
    space = tangent.space
    total = SquareSum(torch.zeros(space.size, dtype=space.dtype, device=space.device), tangent.budget)
    for batch in pulled(tangent, likelihood, batches, cotangents, generator, joining=1, together=True):
        total.add(batch.pieces)
    return Diagonal(total.vector())


@dataclass
class SquareSum:
    """sum over rows of row^2, entry by entry, for rows in factored form."""

    total: Float[Tensor, " size"]
    budget: int
    waiting: dict[MatrixLayout, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)

    def add(self, pieces: Sequence[Piece]) -> None:
        for segments, group in connected(pieces):
            piece = group[0]
            if len(group) > 1:
                self._add_formed(segments, group)
            elif isinstance(piece, OuterRows) and piece.shared == 1:
                self._add_outer(piece)
            else:
                piece.add_squares_to(self.total, self.budget)
            for piece in group:
                piece.forget()

    def vector(self) -> Float[Tensor, " size"]:
        for layout in list(self.waiting):
            self._flush(layout)
        return self.total

    def _add_outer(self, piece: OuterRows) -> None:
        """Without sharing: (sum_r G*G)^T (A*A), one product for the rows of several batches."""
        waiting = self.waiting.setdefault(piece.layout, [])
        waiting.append((piece.left[:, :, 0].square().sum(0), piece.right[:, 0].square()))
        held = sum(left.numel() + right.numel() for left, right in waiting) * self.total.element_size()
        if sum(len(right) for _, right in waiting) >= FEW_ROWS or held > self.budget // WAITING:
            self._flush(piece.layout)

    def _flush(self, layout: MatrixLayout) -> None:
        lefts, rights = zip(*self.waiting.pop(layout), strict=True)
        layout.add_products(torch.cat(lefts), torch.cat(rights), self.total)

    def _add_formed(self, segments: Segments, group: Sequence[Piece]) -> None:
        """Several uses of one parameter: their rows are added before they are squared."""
        local = [member.moved(segments) for member in group]
        count, batch = group[0].shape
        squares = self.total.new_zeros(segments.size)
        for rows in chunks(batch, 2 * count * segments.size * squares.element_size(), self.budget):
            squares += assemble(local, segments.size, rows).square().sum((0, 1))
        spread = torch.zeros_like(self.total)
        segments.scatter(squares, spread)
        self.total += spread


@dataclass(frozen=True, eq=False)
class RowSquares:
    """sum over rows of row^2 of one batch, in factors (sum_r G*G, A*A) for layers without sharing, elsewhere formed.

    For sums that go on from batch to batch: what is new goes into the sum in one pass over its entries.
    """

    size: int
    budget: int
    factors: dict[MatrixLayout, tuple[Float[Tensor, "n groups rows"], Float[Tensor, "n groups width"]]]
    formed: dict[Segments, SquareSum]
    like: Float[Tensor, ""]

    @staticmethod
    def none(size: int, like: Tensor, budget: int) -> RowSquares:
        return RowSquares(size, budget, {}, {}, like.new_zeros(()))

    def add(self, pieces: Sequence[Piece]) -> None:
        """Further rows of the same data points, in factors that they share with those before."""
        for segments, group in connected(pieces):
            piece = group[0]
            if len(group) == 1 and isinstance(piece, OuterRows) and piece.shared == 1 and piece.layout.in_order:
                left, known = piece.left[:, :, 0].square().sum(0), self.factors.get(piece.layout)
                right = piece.right[:, 0].square() if known is None else known[1]
                self.factors[piece.layout] = (left if known is None else known[0] + left), right
            else:
                if segments not in self.formed:
                    self.formed[segments] = SquareSum(self.like.new_zeros(segments.size), self.budget)
                self.formed[segments].add([member.moved(segments) for member in group])

    @property
    def finite(self) -> bool:
        """Whether every entry is: nearly always a bound on the largest says so, and none is formed."""
        limit = torch.finfo(self.like.dtype).max / 2
        bounded = all(
            float((left.flatten(1).amax(1).double() * right.flatten(1).amax(1).double()).sum()) <= limit
            for left, right in self.factors.values()
        )
        return all_finite(self.diagonal()) if not bounded else all(all_finite(s.vector()) for s in self.formed.values())

    def diagonal(self) -> Float[Tensor, " size"]:
        total = self.like.new_zeros(self.size)
        self.add_to(total)
        return total

    def add_to(self, out: Float[Tensor, " size"], kept: float = 1.0, factor: float = 1.0) -> None:
        """out <- kept out + factor squares."""
        met: list[Segment] = []
        for layout, (left, right) in self.factors.items():
            layout.add_products(left, right, out, kept, factor)
            met += layout.segments
        for segments, squares in self.formed.items():
            lengths = [stop - start for start, stop in segments.intervals]
            for (start, stop), part in zip(segments.intervals, squares.vector().split(lengths), strict=True):
                out[start:stop].mul_(kept).add_(part, alpha=factor)
            met += segments.intervals
        at = 0
        for start, stop in [*sorted(met), (self.size, self.size)]:  # parameters that the batch did not use
            out[at:start].mul_(kept)
            at = stop
