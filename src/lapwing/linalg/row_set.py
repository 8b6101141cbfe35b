"""RowSet: M rows of a Jacobian over P parameters, the matrix R [M, P], kept in factored form and never spelled out.

    memory          the factors: M O + N I per layer without sharing, instead of M O I
    push, pull      R v and R^T u, O(M (O + I)) and O(M O I) per layer
    block_grams     R_b R'_b^T of every block of parameters: (G G'^T) o (A A'^T) per layer, O(M M' (O + I))
    weighted        R diag(w) R'^T for any w [P]: columns of R are spelled out, a few at a time; O(M M' P)
    traced          diag(R^T C R'), the adjoint of `weighted` at the same cost

A *block* is an interval of the flat vector, mostly one tensor, such that no row factor reaches over its ends. Sums are
in float64, whatever the factors are: what is computed from them are differences of nearly equal numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.errors import CurvatureError
from lapwing.linalg.budget import chunks, intermediate_bytes
from lapwing.linalg.layout import Segment, Segments, merge_segments
from lapwing.linalg.row_products import Stack, add_gram, block_cross, block_traced
from lapwing.linalg.rows import DenseRows, Piece, Places, push


class Adjoint(torch.autograd.Function):
    """A linear function whose derivative is another one: nothing is kept for it but the two functions."""

    @staticmethod
    def forward(ctx, x: Tensor, function: Callable[[Tensor], Tensor], adjoint: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.pair = adjoint, function
        return function(x)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return Adjoint.apply(grad, *ctx.pair), None, None


@dataclass(frozen=True, eq=False)
class RowSet:
    """`parts` are pieces of the same rows; the rows of a part are numbered by data point, then by cotangent."""

    size: int
    parts: tuple[tuple[Piece, ...], ...]

    @staticmethod
    def of(size: int, parts: Iterable[Sequence[Piece]]) -> RowSet:
        """Rows as `Tangent` pulls them back, copied: nothing that the caller changes later changes them."""
        kept = [[part for piece in pieces for part in piece.copied()] for pieces in parts]
        if not kept:
            raise CurvatureError("a set of no rows; expected at least one. Check the data.")
        return RowSet(size, tuple(tuple(_separated(part)) for part in _merged(kept)))

    @staticmethod
    def in_order(size: int, parts: Iterable[Sequence[Piece]]) -> RowSet:
        """Rows part after part as they come, where their order matters; nothing is joined or copied."""
        return RowSet(size, tuple(tuple(_separated(part)) for part in parts))

    def __add__(self, other: RowSet) -> RowSet:
        return RowSet(self.size, self.parts + other.parts)

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0][0].by_row.dtype

    @property
    def device(self) -> torch.device:
        return self.parts[0][0].by_row.device

    @cached_property
    def shapes(self) -> list[tuple[int, int]]:
        """(R, N) of every part."""
        return [part[0].shape for part in self.parts]

    @cached_property
    def count(self) -> int:
        """M, the number of rows."""
        return sum(count * batch for count, batch in self.shapes)

    @cached_property
    def blocks(self) -> tuple[Segment, ...]:
        return merge_segments([segment for part in self.parts for p in part for segment in p.segments]).intervals

    @cached_property
    def stacks(self) -> list[Stack]:
        """The rows by block."""
        return self._located(self.parts, self.shapes)

    def among(self, pieces: Sequence[Piece]) -> list[Stack]:
        """Other rows, cut into the blocks of these; what lies in none of them is left out."""
        return self._located([_separated(pieces)], [pieces[0].shape])

    def _located(self, parts: Sequence[Sequence[Piece]], shapes: list[tuple[int, int]]) -> list[Stack]:
        places = Places([Segments((block,)) for block in self.blocks])
        found: list[list[list[Piece]]] = [[[] for _ in parts] for _ in self.blocks]
        for number, part in enumerate(parts):
            for block, local in places.assigned(part):
                found[block][number] = local
        sizes = [place.size for place in places.segments]
        return [Stack(size, own, shapes, self.device) for size, own in zip(sizes, found, strict=True)]

    # -- products with vectors ---------------------------------------------------------------------------------------

    def push(self, v: Float[Tensor, "s params"]) -> Float[Tensor, "s m"]:
        """R v, in float64."""
        return Adjoint.apply(v, self._push, self._pull)  # pyright: ignore[reportReturnType]

    def pull(self, u: Float[Tensor, "s m"]) -> Float[Tensor, "s params"]:
        """R^T u, in float64."""
        return Adjoint.apply(u, self._pull, self._push)  # pyright: ignore[reportReturnType]

    def _push(self, v: Tensor) -> Tensor:
        found = [push(pieces, v, intermediate_bytes()).flatten(1) for _, pieces in self._chunks()]
        return torch.cat(found, dim=1)

    def _pull(self, u: Tensor) -> Tensor:
        out = u.new_zeros(len(u), self.size)
        for rows, pieces in self._chunks():
            count, batch = pieces[0].shape
            each = max(piece.double_bytes for piece in pieces)
            for part in chunks(len(u), 2 * each, intermediate_bytes()):
                weights = u[part, rows].unflatten(1, (batch, count))
                for piece in pieces:
                    piece.pull(weights, out[part])
        return out

    def _chunks(self) -> Iterator[tuple[slice, list[Piece]]]:
        """Consecutive rows in float64, within the budget."""
        at = 0
        for (count, batch), part in zip(self.shapes, self.parts, strict=True):
            each = 2 * sum(piece.double_bytes for piece in part) // max(1, batch)
            for points in chunks(batch, each, intermediate_bytes()):
                start, at = at, at + count * (points.stop - points.start)
                yield slice(start, at), [piece.of_points(points) for piece in part]

    # -- products of rows ----------------------------------------------------------------------------------------------

    def block_grams(self, other: Sequence[Stack]) -> Iterator[Float[Tensor, "m other"]]:
        """R_b R'_b^T, block by block."""
        for ours, theirs in zip(self.stacks, other, strict=True):
            yield block_cross(ours, theirs, None, intermediate_bytes())

    @property
    def spelled_out(self) -> bool:
        """Whether the rows are kept as one matrix [M, P]."""
        ((first, *more), *others) = self.parts
        return not more and not others and isinstance(first, DenseRows) and first.segments == ((0, self.size),)

    def crossed(
        self, pieces: Sequence[Piece], weight: Float[Tensor, ""] | Float[Tensor, " params"]
    ) -> Float[Tensor, "m other"]:
        """R diag(weight) R'^T for rows R that are spelled out, as directions to R', which is not."""
        ((first,),) = self.parts
        assert isinstance(first, DenseRows)
        rows = first.values.transpose(0, 1).flatten(0, 1)
        found = [
            push(pieces, rows[part].double() * weight, intermediate_bytes()).flatten(1)
            for part in chunks(len(rows), 3 * 8 * self.size, intermediate_bytes())
        ]
        return torch.cat(found)

    def gram(self, blocks: Sequence[int], dtype: torch.dtype) -> Float[Tensor, "m m"]:
        """R R^T in the entries of some blocks, by their numbers, with products in `dtype`."""
        total = torch.zeros(self.count, self.count, dtype=dtype, device=self.device)
        for number in blocks:
            add_gram(total, self.stacks[number], intermediate_bytes())
        return total.tril_() + total.tril(-1).mT

    def weighted(self, other: Sequence[Stack], weight: Float[Tensor, " params"]) -> Float[Tensor, "m other"]:
        """R diag(weight) R'^T."""
        adjoint = lambda core: self._traced(other, core)  # noqa: E731
        return Adjoint.apply(weight, lambda w: self._weighted(other, w), adjoint)  # pyright: ignore[reportReturnType]

    def traced(self, other: Sequence[Stack], core: Float[Tensor, "m other"]) -> Float[Tensor, " params"]:
        """diag(R^T core R')."""
        adjoint = lambda weight: self._weighted(other, weight)  # noqa: E731
        return Adjoint.apply(core, lambda c: self._traced(other, c), adjoint)  # pyright: ignore[reportReturnType]

    def _weighted(self, other: Sequence[Stack], weight: Tensor) -> Tensor:
        total = weight.new_zeros(self.count, sum(count * batch for count, batch in other[0].shapes))
        for (start, stop), ours, theirs in zip(self.blocks, self.stacks, other, strict=True):
            total += block_cross(ours, theirs, weight[start:stop], intermediate_bytes())
        return total

    def _traced(self, other: Sequence[Stack], core: Tensor) -> Tensor:
        out = core.new_zeros(self.size)
        for (start, stop), ours, theirs in zip(self.blocks, self.stacks, other, strict=True):
            out[start:stop] = block_traced(ours, theirs, core, intermediate_bytes())
        return out

    def squares(self, weight: Float[Tensor, " m"]) -> Float[Tensor, " params"]:
        """diag(R^T diag(weight) R), O(M P)."""
        out = weight.new_zeros(self.size)
        for (start, stop), stack in zip(self.blocks, self.stacks, strict=True):
            out[start:stop] = block_traced(stack, stack, weight, intermediate_bytes())
        return out


# -- keeping pieces --------------------------------------------------------------------------------------------------


def _separated(pieces: Iterable[Piece]) -> list[Piece]:
    """Pieces that lie in one interval each."""
    return [part for piece in pieces for part in piece.separated()]


def _merged(parts: list[list[Piece]]) -> list[list[Piece]]:
    """Parts of the same form joined along their data points, so that products are few and large."""
    alike: dict[tuple, list[list[Piece]]] = {}
    for part in parts:
        alike.setdefault(tuple(piece.form for piece in part), []).append(part)
    return [[first.with_points(others) for first, *others in zip(*group, strict=True)] for group in alike.values()]
