"""Weighted Gram matrices of factored rows: sum_p row[r,n,p] weight[p] row[s,n,p], one [R, R] matrix per data point.

Without weight sharing the row of a layer is g (x) a, and the sum is (g * (a^2 W^T)) g^T: O(N O I + N R^2 O) work
and no row is ever formed. With sharing the rows are formed one group of parameters at a time, within the budget.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lapwing.linalg.rows import (
    CACHE,
    DEFAULT_BUDGET,
    DenseRows,
    LookupRows,
    OuterRows,
    Piece,
    assemble,
    chunks,
    connected,
    contract,
    contract_bytes,
    rows_of,
)


def outer_gram(
    left: Float[Tensor, "r n groups rows"],
    right: Float[Tensor, "n groups width"],
    weight: Float[Tensor, "groups rows width"],
) -> Float[Tensor, "n r r"]:
    """Rows left (x) right without sharing: sum over (k, o, i) of l_r l_s right^2 weight."""
    inner = torch.einsum("n k i, k o i -> n k o", right.square(), weight).flatten(1)
    flat = left.flatten(2).transpose(0, 1)
    return (flat * inner.unsqueeze(1)) @ flat.mT


def matrix_gram(rows: Float[Tensor, "n r size"], weight: Float[Tensor, " size"]) -> Float[Tensor, "n r r"]:
    """Rows spelled out, data points first, one group of parameters."""
    return (rows * weight) @ rows.mT


def shared_gram(piece: OuterRows, weight: Float[Tensor, "groups rows width"]) -> Float[Tensor, "n r r"]:
    """Rows with sharing: formed for a few data points at a time."""
    grams = [
        matrix_gram(contract(piece.left[:, part], piece.right[part]).flatten(2), weight.flatten())
        for part in chunks(piece.left.shape[1], contract_bytes(piece.left, weight.shape[-1]), CACHE)
    ]
    return torch.cat(grams)


def lookup_gram(
    left: Float[Tensor, "r n t features"],
    index: Int[Tensor, "n t"],
    weight: Float[Tensor, "table features"],
) -> Float[Tensor, "n r r"]:
    """Rows of a lookup table: only the entries that a data point looks up take part, each counted once."""
    same = (index.unsqueeze(2) == index.unsqueeze(1)).to(left.dtype)
    merged = same @ left  # every occurrence of a token holds the sum over its occurrences ...
    share = weight[index] / same.sum(2, keepdim=True)  # ... and an equal share of the weight
    flat = merged.flatten(2).transpose(0, 1)
    return (flat * share.flatten(1).unsqueeze(1)) @ flat.mT


def weighted_gram(pieces: Sequence[Piece], weight: Float[Tensor, " size"]) -> Float[Tensor, "n r r"]:
    """The weighted Gram matrix of rows given by pieces in the coordinates of `weight`."""
    count, batch = rows_of(pieces[0])
    total = weight.new_zeros(batch, count, count)
    for segments, group in connected(pieces):
        local = segments.gather(weight)
        only = group[0].moved(segments)
        if len(group) == 1 and isinstance(only, DenseRows):
            gram = matrix_gram(only.values.transpose(0, 1), local)
        elif len(group) == 1 and isinstance(only, LookupRows):
            gram = lookup_gram(only.left, only.index, only.layout.gather(local)[0])
        elif len(group) == 1 and isinstance(only, OuterRows) and only.shared == 1:
            gram = outer_gram(only.left[:, :, 0], only.right[:, 0], only.layout.gather(local))
        elif len(group) == 1 and isinstance(only, OuterRows):
            gram = shared_gram(only, only.layout.gather(local))
        else:
            moved = [piece.moved(segments) for piece in group]
            parts = chunks(batch, 3 * 8 * count * segments.size, DEFAULT_BUDGET)
            rows = (assemble(moved, segments.size, part).transpose(0, 1) for part in parts)
            gram = torch.cat([matrix_gram(each, local) for each in rows])
        total = total + gram
    return total
