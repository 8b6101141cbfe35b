"""diagonal: the exact diagonal of the GGN or Fisher, layer by layer, without the rows it is made of.

Without weight sharing a layer's share is (sum_r G*G)^T (A*A), one product; with sharing the rows of one layer are
formed for one cotangent at a time. Memory O(P) and a chunk; an embedding touches only the tokens it meets.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.estimate.cotangents import Cotangents, exact
from lapwing.estimate.passes import Batches, pulled
from lapwing.likelihoods import Likelihood
from lapwing.linalg import DenseRows, Diagonal, LookupRows, OuterRows, Piece
from lapwing.linalg.rows import CACHE, assemble, chunks, connected, contract, contract_bytes, rows_of
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
    total = torch.zeros(space.size, dtype=space.dtype, device=space.device)
    for batch in pulled(tangent, likelihood, batches, cotangents, generator):
        add_squares(batch.pieces, total, tangent.budget)
    return Diagonal(total)


def add_squares(pieces: Sequence[Piece], total: Float[Tensor, " size"], budget: int) -> None:
    """total += sum over rows of row^2, entry by entry."""
    for segments, group in connected(pieces):
        piece = group[0]
        if len(group) == 1 and isinstance(piece, DenseRows):
            total[piece.start : piece.start + piece.values.shape[-1]] += piece.values.square().sum((0, 1))
        elif len(group) == 1 and isinstance(piece, OuterRows):
            piece.layout.scatter_add(_outer_squares(piece, budget), total)
        elif len(group) == 1 and isinstance(piece, LookupRows):
            piece.layout.scatter_add(_lookup_squares(piece).unsqueeze(0), total)
        else:
            local = [member.moved(segments) for member in group]
            count, batch = rows_of(piece)
            squares = total.new_zeros(segments.size)
            for rows in chunks(batch, 2 * count * segments.size * total.element_size(), budget):
                squares += assemble(local, segments.size, rows).square().sum((0, 1))
            spread = torch.zeros_like(total)
            segments.scatter(squares, spread)
            total += spread


def _outer_squares(piece: OuterRows, budget: int) -> Float[Tensor, "groups rows width"]:
    left, right = piece.left, piece.right
    _, batch, shared, groups, rows = left.shape
    if shared == 1:
        g = left.square().sum(0)[:, 0]
        return torch.einsum("n k o, n k i -> k o i", g, right[:, 0].square())
    width = right.shape[-1]
    squares = right.new_zeros(groups, rows, width)
    for part in chunks(batch, contract_bytes(left, width), min(CACHE, budget)):
        squares += contract(left[:, part], right[part]).square().sum((0, 1))
    return squares


def _lookup_squares(piece: LookupRows) -> Float[Tensor, "table features"]:
    """Occurrences of one token in one data point are summed before they are squared."""
    left, index = piece.left, piece.index
    table, batch = piece.layout.rows, left.shape[1]
    owner = torch.arange(batch, device=index.device).unsqueeze(1) * table + index
    met, inverse = owner.flatten().unique(return_inverse=True)
    summed = left.new_zeros(left.shape[0], len(met), left.shape[-1]).index_add_(1, inverse, left.flatten(1, 2))
    return left.new_zeros(table, left.shape[-1]).index_add_(0, met % table, summed.square().sum(0))
