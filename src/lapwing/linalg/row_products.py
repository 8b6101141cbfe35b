"""Stack: the rows of a set restricted to one block of parameters, [M, size], and products of two stacks.

Where both hold one factor per row and of the same kind, the product is one of factors, O(M M' (O + I)); otherwise, and
where parameters are weighted, columns are spelled out, as many at a time as the budget allows, O(M M' O I).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.linalg.budget import chunks
from lapwing.linalg.layout import Cut, MatrixLayout
from lapwing.linalg.rows import Piece

TILES = 8
"""Parts of the rows of a symmetric product; what lies above the diagonal is left out but for a tile in each."""


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
                if isinstance(piece.place, MatrixLayout) and prod(piece.place.stored) == self.size:
                    return piece.place
        return MatrixLayout(0, (self.size,), (0,), 1, 1, self.size)

    def columns(self, layout: MatrixLayout, cut: Cut, budget: int) -> Float[Tensor, "m cut"]:
        """The rows in the entries of a cut, spelled out in float64."""
        found = []
        for (count, batch), pieces in zip(self.shapes, self.parts, strict=True):
            total = torch.zeros(batch, count, 1, dtype=torch.float64, device=self.device)
            total = total.expand(-1, -1, _numel(cut))
            for number, piece in enumerate(pieces):
                own = piece.columns(self.size, layout, cut, budget)
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


def add_gram(total: Float[Tensor, "m m"], stack: Stack, budget: int) -> None:
    """Adds R R^T on one block to the lower triangle of `total`, with products in its dtype."""
    if _factored(stack, stack) and all(piece.factored for part in stack.parts for piece in part):
        total += _factor_cross(stack, stack, budget).to(total)
        return
    tiles = torch.arange(stack.count).tensor_split(TILES)
    for cut in _cuts(stack.layout, 2 * stack.count, budget):
        columns = stack.columns(stack.layout, cut, budget).to(total)
        for tile in tiles:
            if len(tile):
                rows, left = slice(int(tile[0]), int(tile[-1]) + 1), slice(0, int(tile[-1]) + 1)
                total[rows, left].addmm_(columns[rows], columns[left].mT)


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
    return all(a.alike(b) for left in ours.parts for a in left for right in theirs.parts for b in right)


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
    pair = 3 * 8 * count * a.positions * other * b.positions
    for right in chunks(points, pair, budget):
        ready = b.of_points(right)
        columns = slice(right.start * other, right.stop * other)
        for left in chunks(batch, pair * (right.stop - right.start), budget):
            tile[left.start * count : left.stop * count, columns] = a.of_points(left).product(ready)
