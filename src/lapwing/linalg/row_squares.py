"""Weighted squares of factored rows: sum_p row[r,n,p] weight[p] row[s,n,p] of every data point, or only r = s.

Rows come in three forms, each with `gram` -> [N, R, R], `squares` -> [N, R], the diagonal of it without the rest, and
`sweep` -> [K, N, R], the squares under the weights 1 / (values + precision) of K precisions at once, and `total`, the
squares of every entry, summed over data points and rows:

    Outer    g (x) a, without sharing     gram (g * (a^2 W^T)) g^T: O(N O I + N R^2 O), no row is ever formed
    Lookup   rows of a table              only the entries that are looked up take part
    Formed   spelled out                  one group of parameters, a few data points at a time, within the budget

Where g is the same for all data points (a last layer, whose outputs are its own) it is held once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lapwing.linalg.rows import (
    CACHE,
    DEFAULT_BUDGET,
    DenseRows,
    LookupRows,
    OuterRows,
    Piece,
    assemble,
    chunks,
    connected,
    contract,
    contract_bytes,
    rows_of,
)


def once(left: Float[Tensor, "r n *rest"]) -> Float[Tensor, "r #n *rest"]:
    """[R, 1, ...] where the data points share one memory, so that what follows is done once; else as it is."""
    return left[:, :1] if left.shape[1] == 1 or left.stride(1) == 0 else left


@dataclass(frozen=True, eq=False)
class Outer:
    """Rows left (x) right without sharing; left has one data point where it is the same for all."""

    left: Float[Tensor, "r #n groups rows"]
    right: Float[Tensor, "n groups width"]

    @cached_property
    def squared_left(self) -> Tensor:
        return self.left.square().flatten(2)

    @cached_property
    def squared_right(self) -> Tensor:
        return self.right.square()

    def _inner(self, weight: Tensor) -> Float[Tensor, "n outputs"]:
        return torch.einsum("n k i, k o i -> n k o", self.squared_right, weight).flatten(1)

    def gram(self, weight: Float[Tensor, "groups rows width"]) -> Float[Tensor, "n r r"]:
        """Sum over (k, o, i) of l_r l_s right^2 weight."""
        inner = self._inner(weight).unsqueeze(1)
        if self.left.shape[1] == 1:
            flat = self.left[:, 0].flatten(1)
            return (flat * inner) @ flat.mT
        flat = self.left.flatten(2).transpose(0, 1)
        return (flat * inner) @ flat.mT

    def squares(self, weight: Float[Tensor, "groups rows width"]) -> Float[Tensor, "n r"]:
        inner = self._inner(weight)
        if self.left.shape[1] == 1:
            return inner @ self.squared_left[:, 0].mT
        return torch.einsum("r n o, n o -> n r", self.squared_left, inner)

    def sweep(
        self, values: Float[Tensor, "groups rows width"], precisions: Float[Tensor, " k"]
    ) -> Float[Tensor, "k n r"]:
        found = []
        each = (values.numel() + len(self.right) * values[..., 0].numel()) * values.element_size()
        for part in chunks(len(precisions), each, CACHE):
            weight = (values + precisions[part, None, None, None]).reciprocal()
            inner = torch.einsum("n k i, p k o i -> n p k o", self.squared_right, weight).flatten(2)
            if self.left.shape[1] == 1:
                found.append(inner @ self.squared_left[:, 0].mT)
            else:
                found.append(inner @ self.squared_left.permute(1, 2, 0))
        return torch.cat(found, dim=1).transpose(0, 1)

    def total(self, shape: torch.Size) -> Float[Tensor, "groups rows width"]:
        """(sum_r G*G)^T (A*A): no row is formed."""
        left = self.left.square().sum(0)
        if len(left) == 1:
            return torch.einsum("k o, k i -> k o i", left[0], self.squared_right.sum(0))
        return torch.einsum("n k o, n k i -> k o i", left, self.squared_right)


@dataclass(frozen=True, eq=False)
class Lookup:
    """Rows of a lookup table: only the entries that a data point looks up take part, each counted once."""

    left: Float[Tensor, "r n t features"]
    index: Int[Tensor, "n t"]

    @cached_property
    def _merged(self) -> tuple[Tensor, Tensor]:
        """Every occurrence of a token holds the sum over its occurrences, and counts for its share of them."""
        same = (self.index.unsqueeze(2) == self.index.unsqueeze(1)).to(self.left.dtype)
        return same @ self.left, same.sum(2, keepdim=True)

    def gram(self, weight: Float[Tensor, "table features"]) -> Float[Tensor, "n r r"]:
        merged, occurrences = self._merged
        flat = merged.flatten(2).transpose(0, 1)
        return (flat * (weight[self.index] / occurrences).flatten(1).unsqueeze(1)) @ flat.mT

    def squares(self, weight: Float[Tensor, "table features"]) -> Float[Tensor, "n r"]:
        return self._squares(weight[self.index])

    def _squares(self, weight: Float[Tensor, "n t features"]) -> Float[Tensor, "n r"]:
        merged, occurrences = self._merged
        return torch.einsum("r n t e, n t e -> n r", merged.square(), weight / occurrences)

    def sweep(self, values: Float[Tensor, "table features"], precisions: Float[Tensor, " k"]) -> Float[Tensor, "k n r"]:
        looked_up = values[self.index]
        return torch.stack([self._squares((looked_up + precision).reciprocal()) for precision in precisions])

    def total(self, shape: torch.Size) -> Float[Tensor, "1 table features"]:
        merged, occurrences = self._merged
        squares = merged.square().sum(0) / occurrences
        return squares.new_zeros(shape[1:]).index_add_(0, self.index.flatten(), squares.flatten(0, 1)).unsqueeze(0)


@dataclass(frozen=True, eq=False)
class Formed:
    """Rows spelled out, data points first."""

    rows: Float[Tensor, "n r size"]

    def gram(self, weight: Float[Tensor, "*shape"]) -> Float[Tensor, "n r r"]:
        return (self.rows * weight.flatten()) @ self.rows.mT

    def squares(self, weight: Float[Tensor, "*shape"]) -> Float[Tensor, "n r"]:
        return self.rows.square() @ weight.flatten()

    def sweep(self, values: Float[Tensor, "*shape"], precisions: Float[Tensor, " k"]) -> Float[Tensor, "k n r"]:
        squared, values = self.rows.square(), values.flatten()
        found = [
            squared @ (values.unsqueeze(1) + precisions[part]).reciprocal()
            for part in chunks(len(precisions), 2 * values.numel() * values.element_size(), DEFAULT_BUDGET)
        ]
        return torch.cat(found, dim=-1).movedim(-1, 0)

    def total(self, shape: torch.Size) -> Float[Tensor, "*shape"]:
        return self.rows.square().sum((0, 1)).reshape(shape)


Form = Outer | Lookup | Formed
Placed = tuple[slice, Form, Callable[[Tensor], Tensor]]
"""Data points, their rows, and how to bring a flat vector into the shape of these."""


def forms(pieces: Sequence[Piece], budget: int | None = None) -> Iterator[Placed]:
    """Rows in flat coordinates, group by group of connected parameters; formed rows within the budget."""
    count, batch = rows_of(pieces[0])
    everything = slice(0, batch)
    for segments, group in connected(pieces):
        only = group[0].moved(segments)
        if len(group) > 1:
            moved = [piece.moved(segments) for piece in group]
            for points in chunks(batch, 3 * 8 * count * segments.size, DEFAULT_BUDGET):
                yield points, Formed(assemble(moved, segments.size, points).transpose(0, 1)), segments.gather
        elif isinstance(only, DenseRows):
            yield everything, Formed(only.values.transpose(0, 1)), segments.gather
        elif isinstance(only, LookupRows):
            table = only.layout
            yield everything, Lookup(only.left, only.index), lambda v, s=segments, t=table: t.gather(s.gather(v))[0]
        else:
            matrix = only.layout
            for points, form in outer_forms(only, budget):
                yield points, form, lambda v, s=segments, m=matrix: m.gather(s.gather(v))


def outer_forms(piece: OuterRows, budget: int | None = None) -> Iterator[tuple[slice, Outer | Formed]]:
    """Rows of a weight; with sharing they are formed, for a few data points at a time."""
    batch = piece.left.shape[1]
    if piece.shared == 1:
        yield slice(0, batch), Outer(once(piece.left[:, :, 0]), piece.right[:, 0])
        return
    for points in chunks(batch, contract_bytes(piece.left, piece.right.shape[-1]), budget or CACHE):
        yield points, Formed(contract(piece.left[:, points], piece.right[points]).flatten(2))


def add_grams(found: Iterable[tuple[slice, Form, Tensor]], count: int, batch: int) -> Float[Tensor, "n r r"]:
    """The sum over (data points, rows, weight)."""
    total = None
    for points, form, weight in found:
        if total is None and points == slice(0, batch):  # the usual case, and [N, R, R] may be the largest tensor
            total = form.gram(weight)
            continue
        total = weight.new_zeros(batch, count, count) if total is None else total
        total[points] += form.gram(weight)
    assert total is not None
    return total


def add_squares(found: Iterable[tuple[slice, Form, Tensor]], count: int, batch: int) -> Float[Tensor, "n r"]:
    total = None
    for points, form, weight in found:
        total = weight.new_zeros(batch, count) if total is None else total
        total[points] += form.squares(weight)
    assert total is not None
    return total


def weighted_gram(pieces: Sequence[Piece], weight: Float[Tensor, " size"]) -> Float[Tensor, "n r r"]:
    """The weighted Gram matrix of rows given by pieces in the coordinates of `weight`."""
    found = ((points, form, shaped(weight)) for points, form, shaped in forms(pieces))
    return add_grams(found, *rows_of(pieces[0]))


def weighted_squares(pieces: Sequence[Piece], weight: Float[Tensor, " size"]) -> Float[Tensor, "n r"]:
    """Its diagonal."""
    found = ((points, form, shaped(weight)) for points, form, shaped in forms(pieces))
    return add_squares(found, *rows_of(pieces[0]))
