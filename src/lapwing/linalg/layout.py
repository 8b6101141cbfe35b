"""Where the entries of a matrix, or of a part of the parameters, lie in the flat vector.

`Segments` are intervals of it, glued together. `MatrixLayout` says which entries make up a matrix [K, O, I], K
independent groups of rows (grouped convolutions; K = 1 otherwise), with the bias as last column when there is one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import prod

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

Segment = tuple[int, int]
Cut = tuple[slice, slice, slice]
"""Groups, rows and columns of a matrix [K, O, I]."""


@dataclass(frozen=True)
class Segments:
    """Disjoint intervals of the flat vector, glued together into local coordinates 0..size."""

    intervals: tuple[Segment, ...]

    @property
    def size(self) -> int:
        return sum(stop - start for start, stop in self.intervals)

    @cached_property
    def span(self) -> slice | None:
        """All of them as one interval, where each begins at the end of the one before; else None."""
        if any(stop != start for (_, stop), (start, _) in pairwise(self.intervals)):
            return None
        return slice(self.intervals[0][0], self.intervals[-1][1])

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

    def gather(self, v: Shaped[Tensor, "*batch flat"]) -> Shaped[Tensor, "*batch groups rows width"]:
        weight, bias = self.gather_apart(v)
        return weight if bias is None else torch.cat([weight, bias], dim=-1)

    def gather_apart(
        self, v: Shaped[Tensor, "*batch flat"]
    ) -> tuple[Shaped[Tensor, "*batch groups rows cols"], Shaped[Tensor, "*batch groups rows 1"] | None]:
        """The weight, a view of v where its order allows, and its bias if there is one."""
        lead = v.shape[:-1]
        weight = v[..., self.start : self.start + prod(self.stored)].reshape(*lead, *self.stored)
        order = [len(lead) + axis for axis in self.order] if lead else self.order
        weight = weight.permute(*range(len(lead)), *order)
        weight = weight.reshape(*lead, self.groups, self.rows, self.cols)
        if self.bias is None:
            return weight, None
        bias = v[..., self.bias : self.bias + self.groups * self.rows].reshape(*lead, self.groups, self.rows, 1)
        return weight, bias

    @property
    def in_order(self) -> bool:
        """Whether the matrix has the entries of the weight in their own order, so that it is a view of them."""
        return self.order == tuple(range(len(self.order)))

    def flat(
        self,
        weight: Float[Tensor, "*batch groups rows cols"],
        bias: Float[Tensor, "*batch groups rows 1"] | None,
    ) -> Float[Tensor, "*batch flat"]:
        """The reverse of `gather_apart`, where the two are all there is."""
        parts = {self.start: self._stored(weight)}
        if bias is not None and self.bias is not None:
            parts[self.bias] = bias.flatten(-3)
        return torch.cat([parts[start] for start in sorted(parts)], dim=-1)

    def _stored(self, weight: Float[Tensor, "*batch groups rows cols"]) -> Float[Tensor, "*batch entries"]:
        """A weight in the order of its parameter."""
        lead = weight.shape[:-3]
        weight = weight.reshape(*lead, *(self.stored[axis] for axis in self.order))
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        weight = weight.permute(*range(len(lead)), *(len(lead) + axis for axis in back))
        return weight.reshape(*lead, prod(self.stored))

    def scatter_add(self, matrix: Float[Tensor, "*batch groups rows width"], out: Float[Tensor, "*batch flat"]) -> None:
        for place, part in self._parts(matrix):
            out[..., place] += part

    def scatter(self, matrix: Float[Tensor, "*batch groups rows width"], out: Float[Tensor, "*batch flat"]) -> None:
        """In the place of what is there."""
        for place, part in self._parts(matrix):
            out[..., place] = part

    def add_products(
        self,
        left: Float[Tensor, "n groups rows"],
        right: Float[Tensor, "n groups width"],
        out: Float[Tensor, " flat"],
        kept: float = 1.0,
        factor: float = 1.0,
    ) -> None:
        """out <- kept out + factor sum_n left[n] (x) right[n], in the entries of the matrix.

        Where the weight lies in its own order, its entries are read and written once: of a large weight and few n, a
        matrix in fresh memory that is copied and added takes longer than the product.
        """
        if not self.in_order:
            matrix = torch.einsum("n k o, n k i -> k o i", left, right)
            for place, part in self._parts(matrix):
                out[place].mul_(kept).add_(part, alpha=factor)
            return
        weight, bias = self.gather_apart(out)
        if self.groups == 1:
            weight[0].addmm_(left[:, 0].mT, right[:, 0, : self.cols], beta=kept, alpha=factor)
        else:
            inputs = right[..., : self.cols].transpose(0, 1)
            weight.baddbmm_(left.permute(1, 2, 0), inputs, beta=kept, alpha=factor)
        if bias is not None:
            bias.mul_(kept).add_(torch.einsum("n k o, n k -> k o", left, right[..., -1]).unsqueeze(-1), alpha=factor)

    def _parts(self, matrix: Float[Tensor, "*batch groups rows width"]) -> Iterator[tuple[slice, Tensor]]:
        """The entries of the weight, and of the bias, in flat order."""
        yield slice(self.start, self.start + prod(self.stored)), self._stored(matrix[..., : self.cols])
        if self.bias is not None:
            yield slice(self.bias, self.bias + self.groups * self.rows), matrix[..., self.cols].flatten(-2)

    def places(self, positions: Int[Tensor, " q"]) -> tuple[Int[Tensor, " q"], Int[Tensor, " q"], Int[Tensor, " q"]]:
        """Group, row and column of entries of the flat vector, all of the weight or all of the bias."""
        (start, stop), *_ = self.segments
        if self.bias is not None and not bool(((positions >= start) & (positions < stop)).any()):
            at = positions - self.bias
            return at // self.rows, at % self.rows, torch.full_like(at, self.cols)
        axes = torch.unravel_index(positions - start, self.stored)
        at = torch.zeros_like(positions)
        for axis in self.order:
            at = at * self.stored[axis] + axes[axis]
        return at // (self.rows * self.cols), at // self.cols % self.rows, at % self.cols

    def moved(self, to: Segments) -> MatrixLayout:
        """The same layout in the local coordinates of `to`."""
        return replace(self, start=to.local(self.start), bias=None if self.bias is None else to.local(self.bias))

    def placed(self, at: Segments) -> MatrixLayout:
        """A layout in the local coordinates of `at`, in flat ones."""
        return replace(self, start=at.flat(self.start), bias=None if self.bias is None else at.flat(self.bias))
