"""Rows of a Jacobian in factored form, and where their entries live in the flat vector.

A *row* belongs to one cotangent r and one data point n. A `Piece` holds a batch of rows [R, N] restricted to some
parameters, without spelling them out:

    OuterRows   row = sum_t left[r,n,t] (x) right[n,t]     memory R N T O + N T I   instead of R N O I
    LookupRows  row = sum_t onehot(index[n,t]) (x) left[r,n,t]     (an embedding table)
    DenseRows   row spelled out                                    (vectors, and whatever has no structure)

`MatrixLayout` says which entries of the flat vector make up the matrix [K, O, I], K independent groups of rows
(grouped convolutions; K = 1 otherwise), with the bias as last column when there is one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

Segment = tuple[int, int]
DEFAULT_BUDGET = 2**28
"""Bytes that one intermediate of a fit or a prediction may take; work is cut into chunks that fit."""

CACHE = 2**22
"""Bytes of an intermediate that is read again at once: small enough to stay in a processor's cache."""


def chunks(total: int, bytes_per_item: int, budget: int) -> Iterator[slice]:
    """Consecutive slices of range(total), each within the budget (at least one item)."""
    step = max(1, min(total, budget // max(1, bytes_per_item)))
    for start in range(0, total, step):
        yield slice(start, min(start + step, total))


@dataclass(frozen=True)
class Segments:
    """Disjoint intervals of the flat vector, glued together into local coordinates 0..size."""

    intervals: tuple[Segment, ...]

    @property
    def size(self) -> int:
        return sum(stop - start for start, stop in self.intervals)

    def gather(self, v: Shaped[Tensor, "*batch flat"]) -> Shaped[Tensor, "*batch local"]:
        parts = [v[..., start:stop] for start, stop in self.intervals]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def scatter(self, local: Float[Tensor, "*batch local"], out: Float[Tensor, "*batch flat"]) -> None:
        at = 0
        for start, stop in self.intervals:
            out[..., start:stop] = local[..., at : at + stop - start]
            at += stop - start

    def contains(self, segment: Segment) -> bool:
        return any(start <= segment[0] and segment[1] <= stop for start, stop in self.intervals)

    def local(self, position: int) -> int:
        at = 0
        for start, stop in self.intervals:
            if start <= position < stop:
                return at + position - start
            at += stop - start
        raise IndexError(f"position {position} lies in none of {self.intervals}")

    def flat(self, local: int) -> int:
        """Where a local position lies in the flat vector."""
        for start, stop in self.intervals:
            if local < stop - start:
                return start + local
            local -= stop - start
        raise IndexError(f"local position {local} lies beyond {self.intervals}")


def merge_segments(segments: Sequence[Segment]) -> Segments:
    """The union of intervals, as sorted disjoint ones."""
    merged: list[Segment] = []
    for start, stop in sorted(set(segments)):
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return Segments(tuple(merged))


@dataclass(frozen=True)
class MatrixLayout:
    """Entries start..start+numel, stored as `stored` axes, permuted by `order` and read as [groups, rows, cols].

    `bias`, when given, is the start of groups*rows entries that form the last column. A weight used transposed or a
    transposed convolution differs only in `order`: the flat order of the parameter is never changed.
    """

    start: int
    stored: tuple[int, ...]
    order: tuple[int, ...]
    groups: int
    rows: int
    cols: int
    bias: int | None = None

    @property
    def segments(self) -> tuple[Segment, ...]:
        weight = (self.start, self.start + prod(self.stored))
        return (weight,) if self.bias is None else (weight, (self.bias, self.bias + self.groups * self.rows))

    @property
    def width(self) -> int:
        """Number of columns, the bias included."""
        return self.cols + (self.bias is not None)

    def gather(self, v: Float[Tensor, "*batch flat"]) -> Float[Tensor, "*batch groups rows width"]:
        lead = v.shape[:-1]
        weight = v[..., self.start : self.start + prod(self.stored)].reshape(*lead, *self.stored)
        weight = weight.permute(*range(len(lead)), *(len(lead) + axis for axis in self.order))
        weight = weight.reshape(*lead, self.groups, self.rows, self.cols)
        if self.bias is None:
            return weight
        bias = v[..., self.bias : self.bias + self.groups * self.rows].reshape(*lead, self.groups, self.rows, 1)
        return torch.cat([weight, bias], dim=-1)

    def scatter_add(self, matrix: Float[Tensor, "*batch groups rows width"], out: Float[Tensor, "*batch flat"]) -> None:
        lead = matrix.shape[:-3]
        weight = matrix[..., : self.cols].reshape(*lead, *(self.stored[axis] for axis in self.order))
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        weight = weight.permute(*range(len(lead)), *(len(lead) + axis for axis in back))
        out[..., self.start : self.start + prod(self.stored)] += weight.reshape(*lead, prod(self.stored))
        if self.bias is not None:
            bias = matrix[..., self.cols].reshape(*lead, self.groups * self.rows)
            out[..., self.bias : self.bias + self.groups * self.rows] += bias

    def moved(self, to: Segments) -> MatrixLayout:
        """The same layout in the local coordinates of `to`."""
        return replace(self, start=to.local(self.start), bias=None if self.bias is None else to.local(self.bias))

    def placed(self, at: Segments) -> MatrixLayout:
        """A layout in the local coordinates of `at`, in flat ones."""
        return replace(self, start=at.flat(self.start), bias=None if self.bias is None else at.flat(self.bias))


def contract(
    left: Float[Tensor, "r n t groups rows"], right: Float[Tensor, "n t groups width"]
) -> Float[Tensor, "n r groups rows width"]:
    """sum_t left (x) right, data points first: one product per data point and group, all cotangents at once."""
    if left.shape[2] == 1:
        return left[:, :, 0, :, :, None].transpose(0, 1) * right[:, 0, None, :, None, :]
    return contract_folded(left.permute(1, 3, 0, 4, 2), right)


def contract_folded(
    left: Float[Tensor, "n groups r rows t"], right: Float[Tensor, "n t groups width"]
) -> Float[Tensor, "n r groups rows width"]:
    """As `contract`, for cotangents whose positions come last, as those of a convolution lie in memory."""
    count, rows = left.shape[2:4]
    return (left.flatten(2, 3) @ right.permute(0, 2, 1, 3)).unflatten(2, (count, rows)).transpose(1, 2)


def contract_bytes(left: Float[Tensor, "r n t groups rows"], width: int) -> int:
    """What `contract` needs for one data point: the folded cotangents, and the rows themselves."""
    count, _, shared, groups, rows = left.shape
    return count * groups * rows * (shared + width) * left.element_size()


@dataclass(frozen=True)
class OuterRows:
    """row[r,n] = sum_t left[r,n,t,k] (x) right[n,t,k] in the matrix [K, O, width] of `layout`."""

    layout: MatrixLayout
    left: Float[Tensor, "r n t groups rows"]
    right: Float[Tensor, "n t groups width"]

    @property
    def segments(self) -> tuple[Segment, ...]:
        return self.layout.segments

    @property
    def shared(self) -> int:
        """T, the number of positions that share the weight within one data point."""
        return self.left.shape[2]

    def matrix(self, rows: slice) -> Float[Tensor, "r n groups rows width"]:
        return contract(self.left[:, rows], self.right[rows]).transpose(0, 1)

    def add_to(self, out: Float[Tensor, "r n flat"], rows: slice) -> None:
        self.layout.scatter_add(self.matrix(rows), out)

    def moved(self, to: Segments) -> OuterRows:
        return replace(self, layout=self.layout.moved(to))

    def split(self) -> list[Piece]:
        """The weight's rows and the bias' rows apart."""
        if self.layout.bias is None:
            return [self]
        weight = replace(self, layout=replace(self.layout, bias=None), right=self.right[..., :-1])
        bias = torch.einsum("r n t k o, n t k -> r n k o", self.left, self.right[..., -1])
        return [weight, DenseRows(self.layout.bias, bias.flatten(2))]


@dataclass(frozen=True)
class LookupRows:
    """row[r,n] = sum_t onehot(index[n,t]) (x) left[r,n,t] in the table [V, E] of `layout` (groups = 1).

    Positions with the index `padding` do not use the table; their `left` is zero.
    """

    layout: MatrixLayout
    left: Float[Tensor, "r n t features"]
    index: Int[Tensor, "n t"]
    padding: int | None = None

    @property
    def segments(self) -> tuple[Segment, ...]:
        return self.layout.segments

    def add_to(self, out: Float[Tensor, "r n flat"], rows: slice) -> None:
        left, index = self.left[:, rows], self.index[rows]
        table = left.new_zeros(left.shape[0], left.shape[1], self.layout.rows, self.layout.cols)
        table.scatter_add_(2, index[None, :, :, None].expand_as(left), left)
        self.layout.scatter_add(table.unsqueeze(2), out)

    def moved(self, to: Segments) -> LookupRows:
        return replace(self, layout=self.layout.moved(to))

    def split(self) -> list[Piece]:
        return [self]


@dataclass(frozen=True)
class DenseRows:
    """row[r,n] spelled out, for the entries start..start+size."""

    start: int
    values: Float[Tensor, "r n size"]

    @property
    def segments(self) -> tuple[Segment, ...]:
        return ((self.start, self.start + self.values.shape[-1]),)

    def add_to(self, out: Float[Tensor, "r n flat"], rows: slice) -> None:
        out[..., self.start : self.start + self.values.shape[-1]] += self.values[:, rows]

    def moved(self, to: Segments) -> DenseRows:
        return replace(self, start=to.local(self.start))

    def split(self) -> list[Piece]:
        return [self]

    def cut(self, segment: Segment) -> DenseRows | None:
        """The part that lies in `segment`."""
        start, stop = max(self.start, segment[0]), min(self.segments[0][1], segment[1])
        return DenseRows(start, self.values[..., start - self.start : stop - self.start]) if start < stop else None


Piece = OuterRows | LookupRows | DenseRows


def rows_of(piece: Piece) -> tuple[int, int]:
    """(R, N) of a piece."""
    values = piece.values if isinstance(piece, DenseRows) else piece.left
    return values.shape[0], values.shape[1]


def of_cotangent(piece: Piece, number: int) -> Piece:
    """The rows of one cotangent, R = 1: a view."""
    own = slice(number, number + 1)
    if isinstance(piece, DenseRows):
        return replace(piece, values=piece.values[own])
    return replace(piece, left=piece.left[own])


def joined_cotangents(chunks: Sequence[Sequence[Piece]]) -> list[Piece]:
    """Rows of the same data points for several chunks of cotangents, as one."""
    if len(chunks) == 1:
        return list(chunks[0])
    found: list[Piece] = []
    for same in zip(*chunks, strict=True):
        first = same[0]
        values = torch.cat([piece.values if isinstance(piece, DenseRows) else piece.left for piece in same])
        found.append(replace(first, **{"values" if isinstance(first, DenseRows) else "left": values}))
    return found


def assemble(pieces: Sequence[Piece], size: int, rows: slice) -> Float[Tensor, "r n size"]:
    """The rows spelled out: [R, n, size] for the data points in `rows`. The caller keeps n within a budget."""
    first = pieces[0]
    like = first.values if isinstance(first, DenseRows) else first.left
    out = like.new_zeros(like.shape[0], rows.stop - rows.start, size)
    for piece in pieces:
        piece.add_to(out, rows)
    return out


def side_by_side(pieces: Sequence[Piece]) -> list[Piece]:
    """Products that use one weight in the same way, as further positions of one piece: the steps of a recurrence."""
    alike: dict[MatrixLayout | int, list[OuterRows]] = {}
    found: dict[MatrixLayout | int, Piece] = {}
    for number, piece in enumerate(pieces):
        key = piece.layout if isinstance(piece, OuterRows) else number
        found.setdefault(key, piece)
        if isinstance(piece, OuterRows):
            alike.setdefault(key, []).append(piece)
    for key, same in alike.items():
        if len(same) > 1:
            left = torch.cat([piece.left for piece in same], dim=2)
            found[key] = replace(same[0], left=left, right=torch.cat([piece.right for piece in same], dim=1))
    return list(found.values())


def connected(pieces: Sequence[Piece]) -> list[tuple[Segments, list[Piece]]]:
    """Pieces grouped so that pieces of different groups share no parameter, with the parameters of each group."""
    groups: list[tuple[list[Segment], list[Piece]]] = []
    for piece in pieces:
        segments, members = list(piece.segments), [piece]
        apart = []
        for other_segments, others in groups:
            if any(a[0] < b[1] and b[0] < a[1] for a in segments for b in other_segments):
                segments, members = other_segments + segments, others + members
            else:
                apart.append((other_segments, others))
        groups = [*apart, (segments, members)]
    return [(merge_segments(segments), members) for segments, members in groups]


def route(piece: Piece, places: Sequence[Segments]) -> list[tuple[int, Piece]]:
    """The places a piece belongs to, in their local coordinates; a piece over several places is taken apart."""
    for i, segments in enumerate(places):
        if all(segments.contains(segment) for segment in piece.segments):
            return [(i, piece.moved(segments))]
    apart = piece.split()
    if len(apart) > 1:
        return [routed for part in apart for routed in route(part, places)]
    if not isinstance(piece, DenseRows):
        piece = spelled_out(piece)
    routed: list[tuple[int, Piece]] = []
    for i, segments in enumerate(places):
        cuts = [piece.cut(interval) for interval in segments.intervals]
        routed += [(i, cut.moved(segments)) for cut in cuts if cut is not None]
    return routed


def spelled_out(piece: Piece) -> DenseRows:
    """A piece over one interval as dense rows."""
    ((start, stop),) = piece.segments
    return DenseRows(
        start, assemble([piece.moved(Segments(((start, stop),)))], stop - start, slice(0, rows_of(piece)[1]))
    )


def push(pieces: Sequence[Piece], deltas: Float[Tensor, "s size"], budget: int) -> Float[Tensor, "s n r"]:
    """row[r,n] . delta[s] for many directions at once, in factored form: no row is spelled out."""
    count, batch = rows_of(pieces[0])
    out = deltas.new_zeros(len(deltas), batch, count)
    for piece in pieces:
        if isinstance(piece, DenseRows):
            out += torch.einsum("r n p, s p -> s n r", piece.values, deltas[:, slice(*piece.segments[0])])
            continue
        values = piece.left if isinstance(piece, LookupRows) else piece.left.flatten(3)
        each = values[0].numel() * values.element_size() + piece.layout.width * piece.layout.rows * 8
        for part in chunks(len(deltas), 2 * each, budget):
            out[part] += _push(piece, piece.layout.gather(deltas[part]))
    return out


def _push(piece: OuterRows | LookupRows, moved: Float[Tensor, "s groups rows width"]) -> Float[Tensor, "s n r"]:
    if isinstance(piece, LookupRows):
        return torch.einsum("r n t e, s n t e -> s n r", piece.left, moved[:, 0][:, piece.index])
    outputs = torch.einsum("n t k i, s k o i -> s n t k o", piece.right, moved)
    return torch.einsum("r n t k o, s n t k o -> s n r", piece.left, outputs)
