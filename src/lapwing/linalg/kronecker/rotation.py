"""Rows of a Jacobian in the eigenbasis Q_G (x) Q_A of a Kronecker block, as pieces to be squared.

`Q diag(values) Q^T` itself is a list of `EigenPart`: products with it, its diagonal, and squares of rows in its basis.
Without sharing each side is rotated on its own, N I^2 + R N O^2, or R O^2 where the left side is the same for all data
points. With sharing the rows are formed, a few data points at a time, and each side is rotated before or after that,
whichever is less. Rows in any other form are spelled out, within the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.linalg.budget import cache_bytes, chunks, intermediate_bytes
from lapwing.linalg.layout import MatrixLayout
from lapwing.linalg.rows import DenseRows, LookupRows, OuterRows, Piece, assemble, contract_bytes, contract_folded, once


@dataclass(frozen=True, eq=False)
class EigenPart:
    """Columns `part` of the matrix: Q_G [.] Q_A^T with eigenvalues [K, O, width of part]."""

    part: slice
    row_vectors: Tensor | None
    col_vectors: Tensor | None
    values: Float[Tensor, "groups rows cols"]

    def rotate(self, matrix: Tensor) -> Tensor:
        """Q_G^T M Q_A."""
        matrix = matrix if self.row_vectors is None else self.row_vectors.mT @ matrix
        return matrix if self.col_vectors is None else matrix @ self.col_vectors

    def rotate_back(self, matrix: Tensor) -> Tensor:
        matrix = matrix if self.row_vectors is None else self.row_vectors @ matrix
        return matrix if self.col_vectors is None else matrix @ self.col_vectors.mT

    def multiplied(self, matrix: Tensor) -> Tensor:
        """Q (values * Q^T M), for the columns of this part."""
        return self.rotate_back(self.rotate(matrix) * self.values)

    def diagonal(self) -> Tensor:
        """The diagonal of Q diag(values) Q^T as a matrix [K, O, width of part]."""
        rows, cols = (None if q is None else q.square() for q in (self.row_vectors, self.col_vectors))
        return replace(self, row_vectors=rows, col_vectors=cols).rotate_back(self.values)


def each_part(
    layout: MatrixLayout, parts: Sequence[EigenPart], function: Callable[[EigenPart], Tensor]
) -> Float[Tensor, "*batch params"]:
    """`function(part)` [*batch, K, O, width of part] of all parts, side by side and in flat order."""
    out = torch.cat([function(part) for part in parts], dim=-1)
    flat = out.new_zeros(*out.shape[:-3], layout.groups * layout.rows * layout.width)
    layout.scatter_add(out, flat)
    return flat


def square_sums(layout: MatrixLayout, parts: Sequence[EigenPart], pieces: Sequence[Piece]) -> list[Tensor]:
    """sum over rows of (Q_G^T row Q_A)^2 for every part: the diagonal, in its basis, of the curvature of the rows."""
    totals = [torch.zeros_like(part.values) for part in parts]
    for _, rows, part in rotated(layout, parts, pieces):
        totals[next(i for i, each in enumerate(parts) if each is part)] += rows.total(part.values.shape)
    return totals


def swept(
    layout: MatrixLayout,
    parts: Sequence[EigenPart],
    pieces: Sequence[Piece],
    precisions: Float[Tensor, " k"],
    outer: Callable[[OuterRows, EigenPart], Float[Tensor, "k n r"]] | None = None,
) -> Float[Tensor, "k n r"]:
    """Squares of rows under 1 / (values + precision), for each precision; `outer` is a faster way without sharing."""
    count, batch = pieces[0].shape
    total = parts[0].values.new_zeros(len(precisions), batch, count)
    for points, rows, part in rotated(layout, parts, pieces, intermediate_bytes() // 4):
        if outer is not None and isinstance(rows, OuterRows):
            total[:, points] += outer(rows, part)
        else:
            total[:, points] += rows.sweep(part.values, precisions)
    return total


def rotated(
    layout: MatrixLayout, parts: Sequence[EigenPart], pieces: Sequence[Piece], budget: int | None = None
) -> Iterator[tuple[slice, Piece, EigenPart]]:
    """(data points, their rows in the eigenbasis, the part of the matrix they belong to); the sum is over all."""
    only = pieces[0] if len(pieces) == 1 else None
    if isinstance(only, OuterRows) and (only.layout is layout or only.layout == layout):
        return _outer(parts, only) if only.shared == 1 else _shared(layout, parts, only, budget or cache_bytes())
    if isinstance(only, LookupRows) and only.layout == layout and len(parts) == 1 and parts[0].row_vectors is None:
        return _table(parts[0], only)
    return _formed(layout, parts, pieces)


def _outer(parts: Sequence[EigenPart], piece: OuterRows) -> Iterator[tuple[slice, Piece, EigenPart]]:
    left = turned = once(piece.left)
    everything, by = slice(0, piece.right.shape[0]), None
    for part in parts:
        if part.row_vectors is not None and part.row_vectors is not by:  # parts share it: a block has one output side
            turned, by = _rotate_vectors(left, part.row_vectors), part.row_vectors
        inputs = piece.right if len(parts) == 1 else piece.right[..., part.part]
        yield everything, OuterRows(piece.layout, turned, _rotate_vectors(inputs, part.col_vectors)), part


def _shared(
    layout: MatrixLayout, parts: Sequence[EigenPart], piece: OuterRows, budget: int
) -> Iterator[tuple[slice, Piece, EigenPart]]:
    """Both sides of some data points are made, and the left one is turned, once for all parts."""
    count, batch = piece.shape
    rows_before = piece.shared < layout.width
    cols_before = piece.shared < count * layout.rows
    widest = max(part.part.stop - part.part.start for part in parts)
    for points in chunks(batch, contract_bytes(piece.left, widest), budget):
        inputs, by = piece.right_of(points), None
        left = piece.left[:, points]
        folded = turned = left.permute(1, 3, 0, 4, 2)  # [n, k, r, o, t]
        for part in parts:
            right = _rotate_vectors(inputs[..., part.part], part.col_vectors if cols_before else None)
            if rows_before and part.row_vectors is not None and part.row_vectors is not by:
                turned, by = _turned(left, folded, part.row_vectors), part.row_vectors
            matrix = contract_folded(turned, right)
            matrix = _rotate_last(matrix, None if cols_before else part.col_vectors)
            matrix = _rotate_last(matrix.mT, None if rows_before else part.row_vectors).mT
            yield points, DenseRows(0, matrix.flatten(2).transpose(0, 1)), part


def _turned(
    left: Float[Tensor, "r n t groups rows"], folded: Float[Tensor, "n groups r rows t"], rotation: Tensor
) -> Float[Tensor, "n groups r rows t"]:
    """Q^T g at every position, folded: all of them in one product where features come last in memory.

    Where positions do, as after a convolution, one product for each data point and cotangent spares a transposing copy.
    """
    if rotation.shape[0] == 1 and left.stride(-1) == 1:
        return _rotate_vectors(left, rotation).permute(1, 3, 0, 4, 2)
    return rotation.mT.unsqueeze(1) @ folded


def _table(part: EigenPart, piece: LookupRows) -> Iterator[tuple[slice, Piece, EigenPart]]:
    """A table is diagonal along its rows, so that only its columns are rotated; it has no bias and no groups."""
    left = _rotate_vectors(piece.left.unsqueeze(-2), part.col_vectors).squeeze(-2)
    yield slice(0, left.shape[1]), LookupRows(piece.layout, left, piece.index), part


def _formed(
    layout: MatrixLayout, parts: Sequence[EigenPart], pieces: Sequence[Piece]
) -> Iterator[tuple[slice, Piece, EigenPart]]:
    count, batch = pieces[0].shape
    size = layout.groups * layout.rows * layout.width
    for points in chunks(batch, 4 * 8 * count * size, intermediate_bytes()):
        matrix = layout.gather(assemble(pieces, size, points))
        for part in parts:
            yield points, DenseRows(0, part.rotate(matrix[..., part.part]).flatten(2)), part


def _rotate_vectors(vectors: Float[Tensor, "*batch groups d"], rotation: Tensor | None) -> Tensor:
    if rotation is None:
        return vectors
    if rotation.shape[0] == 1:
        return (vectors.flatten(0, -2) @ rotation[0]).reshape(vectors.shape)
    return (vectors.unsqueeze(-2) @ rotation).squeeze(-2)


def _rotate_last(matrix: Float[Tensor, "*batch groups rows d"], rotation: Tensor | None) -> Tensor:
    if rotation is None:
        return matrix
    return matrix @ (rotation[0] if rotation.shape[0] == 1 else rotation)
