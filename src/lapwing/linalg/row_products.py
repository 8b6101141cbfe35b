"""Stack: the rows of a set restricted to one block of parameters, [M, size], and products of two stacks.

Where both hold one factor per row and of the same kind, the product is one of factors, O(M M' (O + I)); otherwise, and
where parameters are weighted, columns are spelled out, as many at a time as the budget allows, O(M M' O I).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lapwing.linalg.rows import (
    DenseRows,
    LookupRows,
    MatrixLayout,
    OuterRows,
    Piece,
    assemble,
    chunks,
    contract,
    contract_bytes,
)

Cut = tuple[slice, slice, slice]
"""Groups, rows and columns of a matrix [K, O, I]."""


@dataclass(frozen=True, eq=False)
class Stack:
    """Pieces in the coordinates of the block; `shapes` are (R, N) of every part, also of those without a piece."""

    size: int
    parts: list[list[Piece]]
    shapes: list[tuple[int, int]]
    device: torch.device

    @cached_property
    def count(self) -> int:
        return sum(count * batch for count, batch in self.shapes)

    @cached_property
    def layout(self) -> MatrixLayout:
        """How the block is read as a matrix: as the first piece does that covers it, or as one row."""
        for part in self.parts:
            for piece in part:
                if not isinstance(piece, DenseRows) and prod(piece.layout.stored) == self.size:
                    return piece.layout
        return MatrixLayout(0, (self.size,), (0,), 1, 1, self.size)

    def columns(self, layout: MatrixLayout, cut: Cut, budget: int) -> Float[Tensor, "m cut"]:
        """The rows in the entries of a cut, spelled out in float64."""
        found = []
        for (count, batch), pieces in zip(self.shapes, self.parts, strict=True):
            total = torch.zeros(batch, count, 1, dtype=torch.float64, device=self.device)
            total = total.expand(-1, -1, _numel(cut))
            for number, piece in enumerate(pieces):
                own = _piece_columns(piece, self.size, layout, cut, budget)
                total = own if number == 0 else total + own
            found.append(total.flatten(0, 1))
        return found[0] if len(found) == 1 else torch.cat(found)


def _numel(cut: Cut) -> int:
    return prod(part.stop - part.start for part in cut)


def _cuts(layout: MatrixLayout, rows: int, budget: int) -> Iterator[Cut]:
    """Cuts whose columns fit the budget: whole groups if possible, else rows of one group, else parts of a row."""
    column = 3 * 8 * max(1, rows)
    for k in chunks(layout.groups, column * layout.rows * layout.cols, budget):
        for o in chunks(layout.rows, column * layout.cols, budget):
            for i in chunks(layout.cols, column, budget):
                yield k, o, i


def _piece_columns(piece: Piece, size: int, layout: MatrixLayout, cut: Cut, budget: int) -> Float[Tensor, "n r cut"]:
    k, o, i = cut
    one_row = layout.stored == (size,) and layout.cols == size
    if isinstance(piece, DenseRows) and piece.values.shape[-1] == size and one_row:
        return piece.values[..., i].transpose(0, 1).double()
    if isinstance(piece, OuterRows) and piece.layout == layout:
        left, right = piece.left[..., k, o], piece.right[..., k, i]
        parts = chunks(left.shape[1], 2 * contract_bytes(left, right.shape[-1]), budget)
        found = [contract(left[:, part].double(), right[part].double()).flatten(2) for part in parts]
        return torch.cat(found)
    if isinstance(piece, LookupRows) and piece.layout == layout:
        index, height = piece.index - o.start, o.stop - o.start
        inside = (index >= 0) & (index < height)
        left = (piece.left[..., i] * inside.unsqueeze(-1)).double()
        table = left.new_zeros(*left.shape[:2], height, left.shape[-1])
        where = index.clamp(0, height - 1)[None, :, :, None].expand_as(left)
        return table.scatter_add_(2, where, left).flatten(2).transpose(0, 1)
    count, batch = (piece.values if isinstance(piece, DenseRows) else piece.left).shape[:2]
    found = []
    for part in chunks(batch, 3 * 8 * count * size, budget):
        matrix = layout.gather(assemble([piece], size, part).transpose(0, 1))
        found.append(matrix[:, :, k, o, i].flatten(2).double())
    return torch.cat(found)


# -- products ----------------------------------------------------------------------------------------------------------


def block_cross(
    ours: Stack, theirs: Stack, weight: Float[Tensor, " size"] | None, budget: int
) -> Float[Tensor, "m other"]:
    """R diag(weight) R'^T on one block; without a weight, by factors where possible."""
    if weight is None and _factored(ours, theirs):
        return _factor_cross(ours, theirs, budget)
    layout = ours.layout
    gathered = None if weight is None else layout.gather(weight)
    total = torch.zeros(ours.count, theirs.count, dtype=torch.float64, device=ours.device)
    for cut in _cuts(layout, ours.count + theirs.count, budget):
        left = ours.columns(layout, cut, budget)
        right = left if theirs is ours else theirs.columns(layout, cut, budget)
        if gathered is not None:
            left = left * gathered[cut].flatten()
        total.addmm_(left, right.mT)
    return total


def block_traced(
    ours: Stack, theirs: Stack, core: Float[Tensor, "m other"] | Float[Tensor, " m"], budget: int
) -> Float[Tensor, " size"]:
    """diag(R^T core R') on one block; a vector stands for a diagonal core."""
    layout = ours.layout
    matrix = core.new_zeros(layout.groups, layout.rows, layout.cols)
    for cut in _cuts(layout, ours.count + theirs.count, budget):
        left = ours.columns(layout, cut, budget)
        right = left if theirs is ours else theirs.columns(layout, cut, budget)
        moved = core @ right if core.dim() == 2 else core.unsqueeze(1) * right
        matrix[cut] = (left * moved).sum(0).reshape(matrix[cut].shape)
    out = core.new_zeros(ours.size)
    layout.scatter_add(matrix, out)
    return out


def _factored(ours: Stack, theirs: Stack) -> bool:
    if any(len(part) > 1 for part in (*ours.parts, *theirs.parts)):
        return False
    return all(_alike(a, b) for left in ours.parts for a in left for right in theirs.parts for b in right)


def _alike(a: Piece, b: Piece) -> bool:
    """Whether the product of two pieces is one of their factors, and that is the cheaper way."""
    if isinstance(a, DenseRows) and isinstance(b, DenseRows):
        return a.segments == b.segments
    if isinstance(a, LookupRows) and isinstance(b, LookupRows):
        return a.layout == b.layout
    if isinstance(a, OuterRows) and isinstance(b, OuterRows) and a.layout == b.layout:
        pairs, layout = a.shared * b.shared, a.layout
        return pairs == 1 or pairs * (layout.rows + layout.cols) <= layout.rows * layout.cols
    return False


def _factor_cross(ours: Stack, theirs: Stack, budget: int) -> Float[Tensor, "m other"]:
    total = torch.zeros(ours.count, theirs.count, dtype=torch.float64, device=ours.device)
    row = 0
    for (count, batch), left in zip(ours.shapes, ours.parts, strict=True):
        column = 0
        for (other, points), right in zip(theirs.shapes, theirs.parts, strict=True):
            for a in left:
                for b in right:
                    tile = total[row : row + batch * count, column : column + points * other]
                    _fill(tile, a, b, (count, batch), (other, points), budget)
            column += points * other
        row += batch * count
    return total


def _fill(
    tile: Float[Tensor, "m other"], a: Piece, b: Piece, ours: tuple[int, int], theirs: tuple[int, int], budget: int
) -> None:
    """The product of two pieces, cut along both of their data points."""
    (count, batch), (other, points) = ours, theirs
    pair = 3 * 8 * count * _positions(a) * other * _positions(b)
    for right in chunks(points, pair, budget):
        ready = taken(b, right)
        columns = slice(right.start * other, right.stop * other)
        for left in chunks(batch, pair * (right.stop - right.start), budget):
            tile[left.start * count : left.stop * count, columns] = _product(taken(a, left), ready)


def _positions(piece: Piece) -> int:
    return 1 if isinstance(piece, DenseRows) else piece.left.shape[2]


def _product(a: Piece, b: Piece) -> Float[Tensor, "m other"]:
    if isinstance(a, DenseRows) and isinstance(b, DenseRows):
        return a.values.transpose(0, 1).flatten(0, 1) @ b.values.transpose(0, 1).flatten(0, 1).mT
    if isinstance(a, LookupRows) and isinstance(b, LookupRows):
        return _woven(a.left, b.left, a.index[:, :, None, None] == b.index[None, None])
    assert isinstance(a, OuterRows)
    assert isinstance(b, OuterRows)
    groups = [
        _woven(a.left[..., k, :], b.left[..., k, :], torch.einsum("n t i, m u i -> n t m u", x, y))
        for k, (x, y) in enumerate(zip(a.right.unbind(2), b.right.unbind(2), strict=True))
    ]
    return groups[0] if len(groups) == 1 else torch.stack(groups).sum(0)


def _woven(
    left: Float[Tensor, "r n t o"],
    right: Float[Tensor, "s m u o"],
    between: Float[Tensor, "n t m u"] | Bool[Tensor, "n t m u"],
) -> Float[Tensor, "rows others"]:
    """sum over t, u of (left[r,n,t] . right[s,m,u]) between[n,t,m,u], rows by data point and then by cotangent."""
    first, second = left.transpose(0, 1), right.transpose(0, 1)
    dots = (first.flatten(0, 2) @ second.flatten(0, 2).mT).reshape(*first.shape[:3], *second.shape[:3])
    if left.shape[2] == right.shape[2] == 1:
        found = dots[:, :, 0, :, :, 0] * between[:, None, 0, :, None, 0]
    else:
        found = torch.einsum("n r t m s u, n t m u -> n r m s", dots, between.to(dots.dtype))
    return found.flatten(2).flatten(0, 1)


def taken(piece: Piece, points: slice) -> Piece:
    """The rows of some data points, in float64."""
    if isinstance(piece, DenseRows):
        return replace(piece, values=piece.values[:, points].double())
    if isinstance(piece, LookupRows):
        return replace(piece, left=piece.left[:, points].double(), index=piece.index[points])
    return replace(piece, left=piece.left[:, points].double(), right=piece.right[points].double())


def piece_bytes(piece: Piece) -> int:
    """What the factors take in float64."""
    if isinstance(piece, DenseRows):
        return 8 * piece.values.numel()
    return 8 * piece.left.numel() + (8 * piece.right.numel() if isinstance(piece, OuterRows) else 0)
