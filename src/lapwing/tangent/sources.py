"""Where a tensor that holds parameters came from: a view of one parameter, or something computed from several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge


class Alias(NamedTuple):
    """A view of (part of) one parameter that is dense in memory.

    The entries are start..start+numel of the flat vector, row-major over `stored`; axis j of the view is axis
    `order[j]` of `stored`. A transpose, a chunk along axis 0, a reshape or an added axis are all aliases.
    """

    name: str
    start: int
    stored: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def names(self) -> frozenset[str]:
        return frozenset((self.name,))

    @property
    def size(self) -> int:
        return prod(self.stored)

    @property
    def in_order(self) -> bool:
        """Whether the view is row-major itself."""
        return self.order == tuple(range(len(self.order)))

    def factorised(self, split: tuple[int, ...], perm: tuple[int, ...]) -> tuple[tuple, tuple] | None:
        """(stored, order) of the view reshaped to `split` and permuted by `perm`; None if it is not a dense view."""
        if self.in_order:
            return split, perm
        if split == tuple(self.stored[axis] for axis in self.order):
            return self.stored, tuple(self.order[axis] for axis in perm)
        return None


class Repeated(NamedTuple):
    """A view, its shape before it was repeated, and the operation that did so first."""

    view: Alias
    shape: tuple[int, ...]
    operation: str


@dataclass(frozen=True, eq=False)
class Derived:
    """A tensor computed from parameters alone (weight norm, low-rank updates, positional tables): no data in it.

    Rows in its entries are pulled back to the parameters by autograd, from the edge that it had when it was used. One
    that only repeats a view along new axes or axes of one (a class token for every sample) has that view as its
    `origin`, which rules for broadcast parameters take instead.
    """

    names: frozenset[str]
    edge: GradientEdge
    shape: torch.Size
    dtype: torch.dtype
    origin: Repeated | None = None


Source = Alias | Derived


def unrepeated(source: Source, shape: Sequence[int]) -> tuple[Source, tuple[int, ...]]:
    """What is broadcast to `shape`, and its own shape: the view that was repeated, where nothing else was done."""
    origin = source.origin if isinstance(source, Derived) else None
    return (source, tuple(shape)) if origin is None else (origin.view, origin.shape)


def repeats(before: Sequence[int], after: Sequence[int]) -> bool:
    """Whether a tensor of shape `before` is broadcast to `after`."""
    new = len(after) - len(before)
    return new >= 0 and all(size in (1, out) for size, out in zip(before, after[new:], strict=True))


def parameter_alias(name: str, start: int, shape: torch.Size) -> Alias:
    return Alias(name, start, tuple(shape), tuple(range(len(shape))))


def looked_up(table: Alias, index: Tensor) -> tuple[Alias, tuple[int, ...]] | None:
    """Rows of a table [V, E] at an index, one after the other and perhaps repeated: the view, and its shape before.

    Positions from 0 on, the same for every sample, or one type for all tokens: what language models do with tables
    that their words have no part in.
    """
    if index.is_floating_point() or index.dtype == torch.bool or not index.numel():
        return None
    if len(table.stored) != 2 or not table.in_order:
        return None
    for axis in range(index.dim()):
        first = index.narrow(axis, 0, 1)
        if torch.equal(first.expand_as(index), index):
            index = first
    start, stop = int(index.min()), int(index.max()) + 1
    if start < 0 or not torch.equal(index.flatten(), torch.arange(start, stop).to(index)):
        return None
    shape = (*index.shape, table.stored[1])
    return Alias(table.name, table.start + start * table.stored[1], shape, tuple(range(len(shape)))), shape


def view_alias(out: Tensor, parameter: Tensor, whole: Alias) -> Alias | None:
    """The alias that `out` is, if it is a dense view of the contiguous `parameter`."""
    if not parameter.is_contiguous() or out.numel() == 0 or out.dtype != parameter.dtype:
        return None
    if out.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr():
        return None
    offset = int(out.storage_offset()) - int(parameter.storage_offset())
    if offset < 0 or offset + out.numel() > parameter.numel():
        return None
    if out.is_contiguous():
        return Alias(whole.name, whole.start + offset, tuple(out.shape), tuple(range(out.dim())))
    axes = sorted(range(out.dim()), key=lambda axis: (out.shape[axis] == 1, -out.stride(axis)))
    expected = 1
    for axis in reversed(axes):
        if out.shape[axis] > 1 and out.stride(axis) != expected:
            return None
        expected *= out.shape[axis]
    order = tuple(axes.index(axis) for axis in range(out.dim()))
    return Alias(whole.name, whole.start + offset, tuple(out.shape[axis] for axis in axes), order)
