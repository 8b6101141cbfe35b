"""RecomputedRows: M rows of a Jacobian, R [M, P], that are made anew whenever they are needed, a batch at a time.

    gram, cross   R R^T [M, M] and R R'^T, by products of factors: as often over the data as `kept` bytes ask for
    push, pull    R v and R^T u for s vectors, once over the data; R^T u is added to what the caller holds
    memory        factors of rows within `kept` bytes, and what is returned: nothing of length P is made here

A `RowSet` keeps the factors of all rows instead. Here it is what makes them that is kept, and vectors have M entries.

>>> import torch
>>> from lapwing.linalg.rows import DenseRows
>>> batches = torch.tensor([[1.0, 2.0, 2.0], [0.0, 3.0, 4.0]])
>>> rows = RecomputedRows(3, (1, 1), lambda number: [DenseRows(0, batches[number, None, None])])
>>> rows.gram()
tensor([[ 9., 14.],
        [14., 25.]], dtype=torch.float64)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.errors import CurvatureError
from lapwing.linalg.budget import intermediate_bytes
from lapwing.linalg.row_set import RowSet
from lapwing.linalg.rows import Piece, push

KEPT = 2**29
"""Bytes that the factors of rows may take which are there at the same time."""


@dataclass(frozen=True, eq=False)
class RecomputedRows:
    """`counts` are the rows of every batch, and `of_batch` makes them, always the same in the same order."""

    size: int
    counts: tuple[int, ...]
    of_batch: Callable[[int], Sequence[Piece]]
    kept: int = KEPT

    @property
    def count(self) -> int:
        """M."""
        return sum(self.counts)

    def __add__(self, other: RecomputedRows) -> RecomputedRows:
        first = len(self.counts)

        def of_batch(number: int) -> Sequence[Piece]:
            return self.of_batch(number) if number < first else other.of_batch(number - first)

        return RecomputedRows(self.size, self.counts + other.counts, of_batch, min(self.kept, other.kept))

    # -- products of rows ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def gram(self) -> Float[Tensor, "m m"]:
        """R R^T in float64. Batches whose factors fit side by side meet all others that come after them."""
        total = None
        for batches, strip in self._strips():
            own = _summed(strip, strip.stacks)
            if total is None:
                total = own.new_zeros(self.count, self.count)
            here = slice(self._starts[batches.start], self._starts[batches.stop])
            total[here, here] = (own + own.mT) / 2
            for number in range(batches.stop, len(self.counts)):
                there = slice(self._starts[number], self._starts[number + 1])
                between = _summed(strip, strip.among(self._made(number)))
                total[here, there], total[there, here] = between, between.mT
        assert total is not None
        return total

    def cross(self, pieces: Sequence[Piece]) -> Float[Tensor, "m rows"]:
        """R R'^T in float64 for other rows R', these by data point and then by cotangent."""
        return torch.cat([_summed(strip, strip.among(pieces)) for _, strip in self._strips()])

    def _strips(self) -> Iterator[tuple[slice, RowSet]]:
        """Consecutive batches whose factors fit `kept`, and at least one."""
        first, found, taken = 0, [], 0
        for number in range(len(self.counts)):
            part = [kept for piece in self._made(number) for kept in piece.copied()]
            held = sum(each.numel() * each.element_size() for piece in part for each in piece.factors.values())
            if found and taken + held > self.kept:
                yield slice(first, number), RowSet.in_order(self.size, found)
                first, found, taken = number, [], 0
            found.append(part)
            taken += held
        yield slice(first, len(self.counts)), RowSet.in_order(self.size, found)

    # -- products with vectors -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def push(self, v: Float[Tensor, "s params"]) -> Float[Tensor, "s m"]:
        """R v, summed in the dtype of v."""
        numbers = range(len(self.counts))
        return torch.cat([push(self._made(number), v, intermediate_bytes()).flatten(1) for number in numbers], dim=1)

    @torch.no_grad()
    def pull(self, u: Float[Tensor, "s m"], out: Float[Tensor, "s params"]) -> None:
        """out += R^T u, in the dtype of out."""
        for number in range(len(self.counts)):
            pieces = self._made(number)
            count, batch = pieces[0].shape
            weights = u[:, self._starts[number] : self._starts[number + 1]].unflatten(1, (batch, count)).to(out)
            for piece in pieces:
                piece.pull(weights, out)

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *accumulate(self.counts)]

    def _made(self, number: int) -> Sequence[Piece]:
        with torch.no_grad():
            pieces = self.of_batch(number)
        count, batch = pieces[0].shape
        if count * batch != self.counts[number]:
            raise CurvatureError(
                f"batch {number} has {count * batch} rows now and had {self.counts[number]}; expected the same rows "
                "in every pass."
            )
        return pieces


def _summed(rows: RowSet, other: Sequence) -> Float[Tensor, "m other"]:
    """R R'^T, all blocks together."""
    grams = rows.block_grams(other)
    total = next(grams)
    for gram in grams:
        total = total + gram
    return total
