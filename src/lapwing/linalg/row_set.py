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
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.errors import CurvatureError
from lapwing.linalg.row_products import Stack, block_cross, block_traced, piece_bytes, taken
from lapwing.linalg.rows import (
    DEFAULT_BUDGET,
    DenseRows,
    LookupRows,
    MatrixLayout,
    OuterRows,
    Piece,
    Segment,
    Segments,
    chunks,
    merge_segments,
    push,
    route,
    rows_of,
    spelled_out,
)


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
        kept = [[part for piece in pieces for part in _kept(piece)] for pieces in parts]
        if not kept:
            raise CurvatureError("a set of no rows; expected at least one. Check the data.")
        return RowSet(size, tuple(tuple(separated(part)) for part in _merged(kept)))

    def __add__(self, other: RowSet) -> RowSet:
        return RowSet(self.size, self.parts + other.parts)

    @property
    def dtype(self) -> torch.dtype:
        return _values(self.parts[0][0]).dtype

    @property
    def device(self) -> torch.device:
        return _values(self.parts[0][0]).device

    @cached_property
    def shapes(self) -> list[tuple[int, int]]:
        """(R, N) of every part."""
        return [rows_of(part[0]) for part in self.parts]

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
        return self._located([separated(pieces)], [rows_of(pieces[0])])

    def _located(self, parts: Sequence[Sequence[Piece]], shapes: list[tuple[int, int]]) -> list[Stack]:
        places = [Segments((block,)) for block in self.blocks]
        found: list[list[list[Piece]]] = [[[] for _ in parts] for _ in places]
        for number, part in enumerate(parts):
            for piece in part:
                for block, local in route(piece, places):
                    found[block][number].append(local)
        return [Stack(place.size, own, shapes, self.device) for place, own in zip(places, found, strict=True)]

    # -- products with vectors ---------------------------------------------------------------------------------------

    def push(self, v: Float[Tensor, "s params"]) -> Float[Tensor, "s m"]:
        """R v, in float64."""
        return Adjoint.apply(v, self._push, self._pull)  # pyright: ignore[reportReturnType]

    def pull(self, u: Float[Tensor, "s m"]) -> Float[Tensor, "s params"]:
        """R^T u, in float64."""
        return Adjoint.apply(u, self._pull, self._push)  # pyright: ignore[reportReturnType]

    def _push(self, v: Tensor) -> Tensor:
        found = [push(pieces, v, DEFAULT_BUDGET).flatten(1) for _, pieces in self._chunks()]
        return torch.cat(found, dim=1)

    def _pull(self, u: Tensor) -> Tensor:
        out = u.new_zeros(len(u), self.size)
        for rows, pieces in self._chunks():
            count, batch = rows_of(pieces[0])
            each = max(piece_bytes(piece) for piece in pieces)
            for part in chunks(len(u), 2 * each, DEFAULT_BUDGET):
                weights = u[part, rows].unflatten(1, (batch, count))
                for piece in pieces:
                    _pull_piece(piece, weights, out[part])
        return out

    def _chunks(self) -> Iterator[tuple[slice, list[Piece]]]:
        """Consecutive rows in float64, within the budget."""
        at = 0
        for (count, batch), part in zip(self.shapes, self.parts, strict=True):
            each = 2 * sum(piece_bytes(piece) for piece in part) // max(1, batch)
            for points in chunks(batch, each, DEFAULT_BUDGET):
                start, at = at, at + count * (points.stop - points.start)
                yield slice(start, at), [taken(piece, points) for piece in part]

    # -- products of rows ----------------------------------------------------------------------------------------------

    def block_grams(self, other: Sequence[Stack]) -> Iterator[Float[Tensor, "m other"]]:
        """R_b R'_b^T, block by block."""
        for ours, theirs in zip(self.stacks, other, strict=True):
            yield block_cross(ours, theirs, None, DEFAULT_BUDGET)

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
            total += block_cross(ours, theirs, weight[start:stop], DEFAULT_BUDGET)
        return total

    def _traced(self, other: Sequence[Stack], core: Tensor) -> Tensor:
        out = core.new_zeros(self.size)
        for (start, stop), ours, theirs in zip(self.blocks, self.stacks, other, strict=True):
            out[start:stop] = block_traced(ours, theirs, core, DEFAULT_BUDGET)
        return out

    def squares(self, weight: Float[Tensor, " m"]) -> Float[Tensor, " params"]:
        """diag(R^T diag(weight) R), O(M P)."""
        out = weight.new_zeros(self.size)
        for (start, stop), stack in zip(self.blocks, self.stacks, strict=True):
            out[start:stop] = block_traced(stack, stack, weight, DEFAULT_BUDGET)
        return out


# -- keeping pieces --------------------------------------------------------------------------------------------------


def _values(piece: Piece) -> Tensor:
    return piece.values if isinstance(piece, DenseRows) else piece.left


def _kept(piece: Piece) -> list[Piece]:
    """A copy of its own, in whichever form takes less memory."""
    if isinstance(piece, DenseRows):
        return [replace(piece, values=_copy(piece.values))]
    if isinstance(piece, LookupRows):
        return [replace(piece, left=_copy(piece.left), index=_copy(piece.index))]
    if piece.shared == 1:
        return [replace(piece, left=_copy(piece.left), right=_copy(piece.right))]
    weight, *bias = piece.split()
    assert isinstance(weight, OuterRows)
    spelled = prod(rows_of(weight)) * prod(weight.layout.stored)
    if spelled <= weight.left.numel() + weight.right.numel():
        weight = spelled_out(weight)
        return [replace(weight, values=weight.values.detach()), *bias]
    return [replace(weight, left=_copy(weight.left), right=_copy(weight.right)), *bias]


def _copy(values: Tensor) -> Tensor:
    return values.detach().clone(memory_format=torch.contiguous_format)


def separated(pieces: Iterable[Piece]) -> list[Piece]:
    """Pieces that lie in one interval each; without sharing, the bias' rows use the cotangents of the weight's."""
    found: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, OuterRows) and piece.layout.bias is not None and piece.shared == 1:
            layout = piece.layout
            own = (layout.groups, layout.rows, 1)
            bias = MatrixLayout(piece.layout.bias, own, (0, 1, 2), *own)
            found.append(replace(piece, layout=replace(layout, bias=None), right=piece.right[..., :-1]))
            found.append(OuterRows(bias, piece.left, piece.right[..., -1:]))
        else:
            found += piece.split()
    return found


def _merged(parts: list[list[Piece]]) -> list[list[Piece]]:
    """Parts of the same form joined along their data points, so that products are few and large."""
    alike: dict[tuple, list[list[Piece]]] = {}
    for part in parts:
        alike.setdefault(tuple(_form(piece) for piece in part), []).append(part)
    return [[_joined(pieces) for pieces in zip(*group, strict=True)] for group in alike.values()]


def _form(piece: Piece) -> tuple:
    """All but the number of data points."""
    if isinstance(piece, DenseRows):
        return piece.start, piece.values.shape[0], piece.values.shape[2]
    positions = piece.left.shape[2]
    return type(piece), piece.layout, piece.left.shape[0], positions


def _joined(pieces: Sequence[Piece]) -> Piece:
    first = pieces[0]
    if len(pieces) == 1:
        return first
    values = torch.cat([_values(piece) for piece in pieces], dim=1)
    if isinstance(first, DenseRows):
        return replace(first, values=values)
    if isinstance(first, LookupRows):
        return replace(first, left=values, index=torch.cat([p.index for p in pieces if isinstance(p, LookupRows)]))
    return replace(first, left=values, right=torch.cat([p.right for p in pieces if isinstance(p, OuterRows)]))


def _pull_piece(piece: Piece, weights: Float[Tensor, "s n r"], out: Float[Tensor, "s params"]) -> None:
    """out += sum of weights[s,n,r] row[r,n]."""
    if isinstance(piece, DenseRows):
        start, stop = piece.segments[0]
        out[:, start:stop] += torch.einsum("s n r, r n p -> s p", weights, piece.values)
    elif isinstance(piece, LookupRows):
        moved = torch.einsum("s n r, r n t e -> s n t e", weights, piece.left).flatten(1, 2)
        table = moved.new_zeros(len(weights), piece.layout.rows, piece.layout.cols)
        piece.layout.scatter_add(table.index_add(1, piece.index.flatten(), moved).unsqueeze(1), out)
    else:
        moved = torch.einsum("s n r, r n t k o -> s n t k o", weights, piece.left)
        piece.layout.scatter_add(torch.einsum("s n t k o, n t k i -> s k o i", moved, piece.right), out)
