"""One use of parameters by one operation, in the form that turns cotangents of its output into rows.

    Contraction   y[pos, k, o] = sum_i x[pos, k, i] w[k, o, i] + b[k, o]     linear, matmul, einsum, convolutions
    Broadcast     y = factor * w + ... with w broadcast over y              norms, scales, shifts, PReLU
    Lookup        y[pos] = w[index[pos]]                                    embedding

A use knows nothing of samples; `samples.SampleAxis` says how its positions divide into data points.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import compress
from math import prod
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.linalg.autocast import outside_modes
from lapwing.linalg.budget import CACHE, chunks
from lapwing.linalg.layout import MatrixLayout
from lapwing.linalg.rows import DenseRows, LookupRows, OuterRows, Piece, ProductSum
from lapwing.tangent.samples import SampleAxis
from lapwing.tangent.sources import Alias, Derived, Source

PullBack = Callable[[Derived, Tensor], list[Piece]]


@dataclass
class Use(ABC):
    """What every use has: the name of its operation, its output's shape, and the edge to differentiate."""

    operation: str
    shape: torch.Size = field(init=False)
    edge: Any = field(init=False, default=None)
    signature: tuple = field(init=False, default=())
    """The shape of the output, and which entries of which parameters went in."""

    @property
    @abstractmethod
    def sources(self) -> list[Source]:
        """Where the parameters of this use came from."""

    @abstractmethod
    def without(self, names: frozenset[str]) -> Use | None:
        """The use with some parameters left out; None if nothing is left."""

    @abstractmethod
    def positions(self, y: Float[Tensor, "r *out"]) -> Tensor:
        """y as [R, *positions, *features]; the sample axis is one of the positions."""

    @property
    @abstractmethod
    def features(self) -> int:
        """Number of trailing feature axes of `positions`."""

    def blocked(self, axis: int) -> bool:
        """Whether a parameter varies along this axis of y (which then cannot be the sample axis)."""
        return False

    @abstractmethod
    def pieces(
        self, grad: Float[Tensor, "r *out"], samples: SampleAxis, dtype: torch.dtype, pull: PullBack
    ) -> list[Piece]:
        """Rows for cotangents `grad` of the output, in whole flat coordinates.

        Called with gradients disabled, except where the rows are to be differentiated in their turn.
        """


def _held(value: Tensor) -> Tensor:
    """What a row is made of: with its history only where gradients are enabled (a view may keep it without)."""
    return value if torch.is_grad_enabled() else value.detach()


def _later(make: Callable[..., Any]) -> Callable[..., Any]:
    """For a call when nobody knows which modes are on. Several for each layer, so that wrappers would cost more."""

    def made(*args: Any) -> Any:
        with torch.no_grad():
            return _outside(make, *args)

    return made


@outside_modes
def _outside(make: Callable[..., Any], *args: Any) -> Any:
    return make(*args)


def _dropped(source: Source | None, names: frozenset[str]) -> Source | None:
    """None for a source of nothing but `names`; rows of one of several are dropped where they are pulled back."""
    return None if source is None or source.names <= names else source


@dataclass
class Contraction(Use):
    """y = x w + b in canonical axes. `split` and `perm` bring the weight to [K, O, I].

    `some` is `right` for some entries of the first axis of x, where there is one that runs through both.
    `products` is the sum of right right^T over all positions, in parts, like a tensor and within a budget, where that
    can be had without `right`.
    """

    weight: Source | None
    bias: Source | None
    split: tuple[int, ...]
    perm: tuple[int, ...]
    groups: int
    rows: int
    cols: int
    right: Callable[[bool], Tensor]
    left: Callable[[Tensor], Tensor]
    some: Callable[[bool, slice], Tensor] | None = None
    products: Callable[[bool, Tensor, int], ProductSum | None] | None = None

    @property
    def sources(self) -> list[Source]:
        if self.weight is None:
            return [] if self.bias is None else [self.bias]
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    @property
    def patches(self) -> int:
        """Entries of `right`, where that is not the input itself."""
        return 0 if self.some is None else self.shape.numel() // self.rows * self.cols

    def without(self, names: frozenset[str]) -> Contraction | None:
        use = replace(self, weight=_dropped(self.weight, names), bias=_dropped(self.bias, names))
        use.shape, use.edge = self.shape, self.edge
        return use if use.sources else None

    def positions(self, y: Tensor) -> Tensor:
        return self.left(y)

    @property
    def features(self) -> int:
        return 2

    def pieces(self, grad: Tensor, samples: SampleAxis, dtype: torch.dtype, pull: PullBack) -> list[Piece]:
        left = samples.split(self.left(grad.to(dtype)), lead=1, features=2)
        if self.weight is None:
            return self._bias_rows(left, pull)
        layout = None
        if isinstance(self.weight, Alias):
            bias = self.bias if isinstance(self.bias, Alias) else None
            layout = _layout(self.weight, bias, self.split, self.perm, self.groups, self.rows, self.cols)
        joint = layout is not None and layout.bias is not None

        def right() -> Tensor:
            return samples.split(_held(self.right(joint)).to(dtype), lead=0, features=2)

        def some(points: slice) -> Tensor:
            assert self.some is not None
            found = _held(self.some(joint, points)).to(dtype)
            return replace(samples, batch=len(found)).split(found, lead=0, features=2)

        def products(budget: int) -> ProductSum | None:
            assert self.products is not None
            return self.products(joint, left, budget)

        if layout is not None and torch.is_grad_enabled():
            pieces: list[Piece] = [OuterRows(layout, left, right())]
        elif layout is not None:
            few = _later(some) if self.some is not None and samples.plain else None
            pieces = [OuterRows.late(layout, left, _later(right), few, self.products and _later(products))]
        else:
            local = MatrixLayout(0, self.split, self.perm, self.groups, self.rows, self.cols)
            dense = left.new_zeros(*left.shape[:2], prod(self.split))
            OuterRows(local, left, right()).add_to(dense, slice(0, left.shape[1]))
            pieces = spread(self.weight, dense, pull)
        return pieces if joint else pieces + self._bias_rows(left, pull)

    def _bias_rows(self, left: Tensor, pull: PullBack) -> list[Piece]:
        return [] if self.bias is None else spread(self.bias, left.sum(2).flatten(2), pull)


@lru_cache(maxsize=4096)
def _layout(
    weight: Alias, bias: Alias | None, split: tuple[int, ...], perm: tuple[int, ...], groups: int, rows: int, cols: int
) -> MatrixLayout | None:
    """Where the entries of a weight lie, joined with its bias if that is in order; None if it is no dense view."""
    viewed = weight.factorised(split, perm)
    start = bias.start if bias is not None and bias.in_order else None
    return None if viewed is None else MatrixLayout(weight.start, *viewed, groups, rows, cols, start)


@dataclass
class Broadcast(Use):
    """y depends on each parameter elementwise: dy = factor * d(parameter viewed as `view`, broadcast to y).

    `parts`, where given, holds (axis, start, stop) for every term: the part of y that it is broadcast to.
    """

    terms: list[tuple[Source, tuple[int, ...], Callable[[], Tensor] | None]]
    parts: list[tuple[int, int, int] | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.parts = self.parts or [None] * len(self.terms)

    @property
    def sources(self) -> list[Source]:
        return [source for source, _, _ in self.terms]

    def without(self, names: frozenset[str]) -> Broadcast | None:
        kept = [not term[0].names <= names for term in self.terms]
        use = replace(self, terms=list(compress(self.terms, kept)), parts=list(compress(self.parts, kept)))
        use.shape, use.edge = self.shape, self.edge
        return use if use.terms else None

    def positions(self, y: Tensor) -> Tensor:
        return y

    @property
    def features(self) -> int:
        return 0

    def pieces(self, grad: Tensor, samples: SampleAxis, dtype: torch.dtype, pull: PullBack) -> list[Piece]:
        out: list[Piece] = []
        for (source, view, factor), part in zip(self.terms, self.parts, strict=True):
            values = grad if part is None else grad.narrow(1 + part[0], part[1], part[2] - part[1])
            values = values.to(dtype)
            view = (1,) * (values.dim() - 1 - len(view)) + tuple(view)
            summed = [1 + axis for axis, size in enumerate(view) if size == 1 and axis != samples.axis]
            if factor is not None:
                values = _met(values, _held(factor()).to(dtype), summed)
            elif summed:
                values = values.sum(summed, keepdim=True)
            values = samples.split_only(values)  # [R, N, *view]
            out += spread(source, values.flatten(2), pull)
        return out

    def blocked(self, axis: int) -> bool:
        for (_, view, _), part in zip(self.terms, self.parts, strict=True):
            full = (1,) * (len(self.shape) - len(view)) + tuple(view)
            if full[axis] != 1 or (part is not None and part[0] == axis):
                return True
        return False


def _met(values: Float[Tensor, "r *out"], factor: Tensor, summed: list[int]) -> Tensor:
    """values * factor, summed over some axes, which stay as 1: for a few cotangents at a time, in a cache."""
    if not summed:
        return values * factor
    parts = chunks(len(values), values[0].numel() * values.element_size(), CACHE)
    return torch.cat([(values[part] * factor).sum(summed, keepdim=True) for part in parts])


@dataclass
class Lookup(Use):
    """y[pos] = w[index[pos]]; positions equal to `padding` pass no gradient."""

    weight: Source
    index: Tensor
    table: tuple[int, int]
    padding: int | None

    @property
    def sources(self) -> list[Source]:
        return [self.weight]

    def without(self, names: frozenset[str]) -> Lookup | None:
        return None if self.weight.names <= names else self

    def positions(self, y: Tensor) -> Tensor:
        return y

    @property
    def features(self) -> int:
        return 1

    def pieces(self, grad: Tensor, samples: SampleAxis, dtype: torch.dtype, pull: PullBack) -> list[Piece]:
        left = samples.split(grad.to(dtype), lead=1, features=1)
        index = samples.split(self.index, lead=0, features=0)
        if self.padding is not None:
            left = left * (index != self.padding).unsqueeze(-1)
        layout = MatrixLayout(0, self.table, (0, 1), 1, *self.table)
        if isinstance(self.weight, Alias) and self.weight.in_order:
            return [LookupRows(replace(layout, start=self.weight.start), left, index, self.padding)]
        dense = left.new_zeros(*left.shape[:2], prod(self.table))
        LookupRows(layout, left, index).add_to(dense, slice(0, left.shape[1]))
        return spread(self.weight, dense, pull)


def spread(source: Source, rows: Float[Tensor, "r n size"], pull: PullBack) -> list[Piece]:
    """Rows in the entries of a source, in flat coordinates: put in stored order, or pulled back by autograd."""
    if isinstance(source, Derived):
        return pull(source, rows)
    if not source.in_order:
        shape = tuple(source.stored[axis] for axis in source.order)
        back = sorted(range(len(source.order)), key=source.order.__getitem__)
        rows = rows.unflatten(2, shape).permute(0, 1, *(2 + axis for axis in back)).flatten(2)
    return [DenseRows(source.start, rows)]
