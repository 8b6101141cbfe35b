"""diagonal: the exact diagonal of the GGN or Fisher, layer by layer, without the rows it is made of.

Without weight sharing a layer's share is (sum_r G*G)^T (A*A), one product; with sharing the rows of one layer are
formed for one cotangent at a time. Memory O(P) and a chunk; an embedding touches only the tokens it meets.
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
from lapwing.linalg.rows import assemble, connected
from lapwing.tangent import Tangent


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
    for batch in pulled(tangent, likelihood, batches, cotangents, generator):
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
        layout.scatter_add(torch.einsum("n k o, n k i -> k o i", torch.cat(lefts), torch.cat(rights)), self.total)

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
