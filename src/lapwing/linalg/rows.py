"""Rows of a Jacobian in factored form.

A *row* belongs to one cotangent r and one data point n. A `Piece` holds a batch of rows [R, N] restricted to some
parameters, without spelling them out:

    OuterRows   row = sum_t left[r,n,t] (x) right[n,t]     memory R N T O + N T I   instead of R N O I
    LookupRows  row = sum_t onehot(index[n,t]) (x) left[r,n,t]     (an embedding table)
    DenseRows   row spelled out                                    (vectors, and whatever has no structure)

A `MatrixLayout` (`lapwing.linalg.layout`) says where the entries of the matrix lie in the flat vector.

What can be computed from rows is a method of `Piece`: products with directions (`push`, `pull`), with other rows
(`product`), and their weighted squares, sum_p row[r,n,p] weight[p] row[s,n,p], for a weight in the shape of the piece:

    gram      [N, R, R]
    squares   [N, R], its diagonal, without the rest; of a weight that is one number, both may need no rows (`even`)
    sweep     [K, N, R], the squares under the weights 1 / (values + precision) of K precisions at once
    total     the squares of every entry, unweighted, summed over data points and rows
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lapwing.linalg.budget import CACHE, cache_bytes, chunks, intermediate_bytes
from lapwing.linalg.layout import Cut, MatrixLayout, Segment, Segments, merge_segments


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


class ProductSum(ABC):
    """A sum of symmetric products in parts, which those of other data points are added to before it is put together."""

    @property
    @abstractmethod
    def bytes(self) -> int: ...

    @abstractmethod
    def add(self, other: ProductSum) -> bool:
        """Whether the other one has the same parts, and was added."""

    @abstractmethod
    def matrix(self) -> Float[Tensor, "groups width width"]: ...


@dataclass(frozen=True, eq=False)
class Piece(ABC):
    """A batch of rows [R, N], restricted to some parameters.

    One of its tensors is [R, N, ...], `by_row`; the others have one entry per data point, [N, ...].
    """

    _by_row: ClassVar[str] = "left"
    _by_point: ClassVar[tuple[str, ...]] = ()
    factored: ClassVar[bool] = True
    """Whether the rows are held as factors of a matrix, which has a layout."""

    # -- what it is --------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def segments(self) -> tuple[Segment, ...]:
        """The entries of the flat vector that the rows have."""

    @property
    @abstractmethod
    def place(self) -> MatrixLayout | Segment:
        """Where each entry lies."""

    @abstractmethod
    def at(self, place: MatrixLayout | Segment) -> Piece:
        """The same rows elsewhere."""

    @property
    def by_row(self) -> Float[Tensor, "r n ..."]:
        return getattr(self, self._by_row)

    @property
    def shape(self) -> tuple[int, int]:
        """(R, N)."""
        return self.by_row.shape[0], self.by_row.shape[1]

    @property
    def positions(self) -> int:
        """T, the number of factors that a row is the sum of."""
        return self.by_row.shape[2]

    @property
    def form(self) -> tuple:
        """All but the number of data points."""
        shape = self.by_row.shape
        return type(self), self.place, shape[0], shape[2:]

    @property
    def factors(self) -> dict[str, Tensor]:
        """The numbers that the rows are made of, by the names of the fields."""
        held = {name: getattr(self, name) for name in (self._by_row, *self._by_point)}
        return {name: tensor for name, tensor in held.items() if tensor.is_floating_point()}

    @property
    def double_bytes(self) -> int:
        """What the factors take in float64."""
        return sum(8 * tensor.numel() for tensor in self.factors.values())

    # -- some of it, or more -----------------------------------------------------------------------------------------

    def _with(self, rows: Callable[[Tensor], Tensor], points: Callable[[Tensor], Tensor]) -> Piece:
        """With functions applied to the tensor [R, N, ...] and to those [N, ...]."""
        changed = {name: points(getattr(self, name)) for name in self._by_point}
        return replace(self, **{self._by_row: rows(self.by_row)}, **changed)  # pyright: ignore[reportArgumentType]

    def of_cotangent(self, number: int) -> Piece:
        """The rows of one cotangent, R = 1: a view."""
        return self._with(lambda t: t[number : number + 1], lambda t: t)

    def of_points(self, points: slice) -> Piece:
        """The rows of some data points, in float64."""
        return self._with(
            lambda t: t[:, points].double(), lambda t: t[points].double() if t.is_floating_point() else t[points]
        )

    def copied(self) -> list[Piece]:
        """A copy with memory of its own, in whichever form takes less of it."""
        return [self._with(_copy, _copy)]

    def with_points(self, others: Sequence[Piece]) -> Piece:
        """These rows and those of other pieces of the same form, one data point after the other."""
        if not others:
            return self
        values = torch.cat([self.by_row, *(other.by_row for other in others)], dim=1)
        names = self._by_point
        joined = {name: torch.cat([getattr(self, name), *(getattr(other, name) for other in others)]) for name in names}
        return replace(self, **{self._by_row: values}, **joined)  # pyright: ignore[reportArgumentType]

    def with_cotangents(self, others: Sequence[Piece]) -> Piece:
        """These rows and those of the same data points for further cotangents."""
        if not others:
            return self
        return self._with(lambda t: torch.cat([t, *(other.by_row for other in others)]), lambda t: t)

    def forget(self) -> None:
        """Lets go of what can be made again: of nothing, unless a form of rows says otherwise."""
        return

    def moved(self, to: Segments) -> Piece:
        """In the local coordinates of `to`."""
        place = self.place
        return self.at(
            place.moved(to) if isinstance(place, MatrixLayout) else _shifted(place, to.local(place[0]) - place[0])
        )

    def split(self) -> list[Piece]:
        """The weight's rows and the bias' rows apart."""
        return [self]

    def separated(self) -> list[Piece]:
        """As `split`; without sharing, the bias' rows use the cotangents of the weight's."""
        return self.split()

    def spelled_out(self) -> DenseRows:
        """Dense rows, of a piece over one interval."""
        ((start, stop),) = self.segments
        local = self.moved(Segments(((start, stop),)))
        return DenseRows(start, assemble([local], stop - start, slice(0, self.shape[1])))

    def cut(self, segment: Segment) -> DenseRows | None:
        """The part that lies in `segment`, of a piece over one interval."""
        return self.spelled_out().cut(segment)

    def role(self, upright: MatrixLayout) -> str | None:
        """How the rows relate to a block's matrix: "upright", "transposed", "lookup", or not at all."""
        return None

    # -- products ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def add_to(self, out: Float[Tensor, "r n flat"], rows: slice) -> None:
        """Adds the rows of some data points, spelled out."""

    def at_entries(self, index: Int[Tensor, " q"], budget: int) -> Float[Tensor, "r n q"]:
        """The rows at some entries of the flat vector, in any order; zero where they have none."""
        count, batch = self.shape
        out = self.by_row.new_zeros(count, batch, len(index))
        for start, stop in self.segments:
            chosen = ((index >= start) & (index < stop)).nonzero().flatten()
            if len(chosen):
                out.index_copy_(2, chosen, self._entries((start, stop), index[chosen], budget))
        return out

    def _entries(self, segment: Segment, index: Int[Tensor, " q"], budget: int) -> Float[Tensor, "r n q"]:
        """The rows at some entries of one of their intervals."""
        whole, (count, batch) = Segments(self.segments), self.shape
        local, at = self.moved(whole), index - segment[0] + whole.local(segment[0])
        parts = chunks(batch, 2 * 8 * count * whole.size, budget)
        return torch.cat([assemble([local], whole.size, points)[..., at] for points in parts], dim=1)

    @abstractmethod
    def push(self, deltas: Float[Tensor, "s size"], out: Float[Tensor, "s n r"], budget: int) -> None:
        """out += row[r,n] . delta[s] for many directions at once."""

    @abstractmethod
    def pull(self, weights: Float[Tensor, "s n r"], out: Float[Tensor, "s params"]) -> None:
        """out += sum of weights[s,n,r] row[r,n]."""

    @abstractmethod
    def alike(self, other: Piece) -> bool:
        """Whether `product` has factors of the same kind to multiply, and that is the cheaper way."""

    @abstractmethod
    def product(self, other: Piece) -> Float[Tensor, "rows others"]:
        """row[r,n] . other[s,m], rows by data point and then by cotangent."""

    def columns(self, size: int, layout: MatrixLayout, cut: Cut, budget: int) -> Float[Tensor, "n r cut"]:
        """The entries in a cut of the matrix that `layout` makes of all `size` entries, spelled out in float64."""
        found = []
        for part in chunks(self.shape[1], 3 * 8 * self.shape[0] * size, budget):
            matrix = layout.gather(assemble([self], size, part).transpose(0, 1))
            found.append(matrix[(slice(None), slice(None), *cut)].flatten(2).double())
        return torch.cat(found)

    def times(self, matrix: Float[Tensor, "params other"]) -> Iterator[Float[Tensor, "n r other"]] | None:
        """Rows times a matrix, where no row has to be formed for it; None elsewhere."""
        return None

    # -- weighted squares --------------------------------------------------------------------------------------------

    @abstractmethod
    def gather(self, v: Float[Tensor, " flat"]) -> Tensor:
        """A flat vector in the shape of the piece."""

    def squarable(self, budget: int | None = None) -> Iterator[tuple[slice, Piece]]:
        """Data points and their rows in a form that can be squared: sums over positions are formed, a few at a time."""
        yield slice(0, self.shape[1]), self

    def even(self, whole: bool) -> bool:
        """Whether `gram` (`whole`) or `squares` under a weight that is one number, [], take less than forming rows."""
        return False

    @abstractmethod
    def gram(self, weight: Tensor) -> Float[Tensor, "n r r"]: ...

    @abstractmethod
    def squares(self, weight: Tensor) -> Float[Tensor, "n r"]: ...

    @abstractmethod
    def sweep(self, values: Tensor, precisions: Float[Tensor, " k"]) -> Float[Tensor, "k n r"]: ...

    @abstractmethod
    def total(self, shape: torch.Size) -> Tensor: ...

    @abstractmethod
    def add_squares_to(self, out: Float[Tensor, " flat"], budget: int) -> None:
        """Adds the square of every entry, summed over data points and rows."""


def _copy(values: Tensor) -> Tensor:
    return values.detach().clone(memory_format=torch.contiguous_format)


def _shifted(segment: Segment, by: int) -> Segment:
    return segment[0] + by, segment[1] + by


def once(left: Float[Tensor, "r n *rest"]) -> Float[Tensor, "r #n *rest"]:
    """[R, 1, ...] where the data points share one memory, so that what follows is done once; else as it is."""
    return left[:, :1] if left.shape[1] == 1 or left.stride(1) == 0 else left


@dataclass(frozen=True, eq=False)
class MatrixRows(Piece):
    """Rows in the entries of a matrix, as factors of it."""

    layout: MatrixLayout

    @property
    def segments(self) -> tuple[Segment, ...]:
        return self.layout.segments

    @property
    def place(self) -> MatrixLayout:
        return self.layout

    def gather(self, v: Float[Tensor, " flat"]) -> Float[Tensor, "groups rows width"]:
        return self.layout.gather(v)

    def push(self, deltas: Float[Tensor, "s size"], out: Float[Tensor, "s n r"], budget: int) -> None:
        left = self.by_row
        each = left[0].numel() * left.element_size() + self.layout.width * self.layout.rows * 8
        for part in chunks(len(deltas), 2 * each, budget):
            out[part] += self._push(self.layout.gather(deltas[part]))

    @abstractmethod
    def _push(self, matrix: Float[Tensor, "s groups rows width"]) -> Float[Tensor, "s n r"]:
        """row[r,n] . matrix[s]."""


@dataclass(frozen=True, eq=False)
class OuterRows(MatrixRows):
    """row[r,n] = sum_t left[r,n,t,k] (x) right[n,t,k] in the matrix [K, O, width] of `layout`.

    Without sharing, T = 1, no row is ever formed for its squares: (g * (a^2 W^T)) g^T, O(N O I + N R^2 O). Where g is
    the same for all data points (a last layer, whose outputs are its own) it may be held once.
    """

    left: Float[Tensor, "r #n t groups rows"]
    right: Float[Tensor, "n t groups width"]

    _by_point: ClassVar[tuple[str, ...]] = ("right",)

    @staticmethod
    def late(
        layout: MatrixLayout,
        left: Float[Tensor, "r n t groups rows"],
        make: Callable[[], Tensor],
        some: Callable[[slice], Tensor] | None = None,
        products: Callable[[int], ProductSum | None] | None = None,
    ) -> OuterRows:
        """With a right side that is made when it is first asked for: patches take many times the layer's input.

        Estimators that see many cotangents of the same data points need it once, or not at all. `some` makes it for a
        few data points, where that can be done: they stay in a cache until they are used. `products` are those of
        `right_products`, within a budget.
        """
        rows = object.__new__(OuterRows)
        vars(rows).update(layout=layout, left=left, _make=make, _part=some, _products=products)
        return rows

    def __getattr__(self, name: str) -> Tensor:
        """Only called for what is not there yet."""
        if name != "right" or "_make" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        vars(self)["right"] = made = vars(self)["_make"]()
        return made

    def forget(self) -> None:
        if "_make" in vars(self):
            vars(self).pop("right", None)

    @property
    def _some(self) -> tuple[Callable[[slice], Tensor] | None, int]:
        """What makes the right side of a few data points, and its bytes for one; None where it is there, or whole."""
        some = None if "right" in vars(self) else vars(self).get("_part")
        each = self.shared * self.layout.groups * self.layout.width * self.left.element_size()
        return some, each

    def rights(self, budget: int) -> Iterator[Float[Tensor, "m t groups width"]]:
        """The right side, in parts within the budget if it can be made so, else whole."""
        some, each = self._some
        if some is None:
            yield self.right
        else:
            yield from map(some, chunks(self.shape[1], each, budget))

    def right_products(self, budget: int) -> ProductSum | None:
        """sum over n, t of right right^T where that is had without the right side, within the budget; else None."""
        products = vars(self).get("_products")
        return None if products is None else products(budget)

    def _by_points(self, budget: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Both sides, a few data points at a time, whose rows (and patches, if made for them alone) fit the budget."""
        some, each = self._some
        rows = contract_bytes(self.left, self.layout.width)
        for points in chunks(self.shape[1], rows if some is None else rows + each, budget):
            yield points, self.left[:, points], self.right_of(points)

    def right_of(self, points: slice) -> Float[Tensor, "m t groups width"]:
        """The right side of some data points, made for them alone where that can be done."""
        some, _ = self._some
        return self.right[points] if some is None else some(points)

    def at(self, place: MatrixLayout | Segment) -> OuterRows:
        """What has not been made yet is not made here."""
        assert isinstance(place, MatrixLayout)
        rows = object.__new__(OuterRows)
        vars(rows).update(vars(self) | {"layout": place})
        return rows

    def _entries(self, segment: Segment, index: Int[Tensor, " q"], budget: int) -> Float[Tensor, "r n q"]:
        """One factor times the other at each entry, unless there are so many that whole matrices are faster."""
        if 4 * len(index) > segment[1] - segment[0]:
            return super()._entries(segment, index, budget)
        groups, rows, cols = self.layout.places(index)
        (count, batch), found = self.shape, []
        for part in chunks(len(index), 3 * 8 * count * batch * self.shared, budget):
            left = self.left[..., groups[part], rows[part]]
            found.append(torch.einsum("r n t q, n t q -> r n q", left, self.right[..., groups[part], cols[part]]))
        return torch.cat(found, dim=2)

    @property
    def shape(self) -> tuple[int, int]:
        count, batch = self.left.shape[:2]
        return count, batch if batch > 1 else self.right.shape[0]

    @property
    def shared(self) -> int:
        """T, the number of positions that share the weight within one data point."""
        return self.left.shape[2]

    def copied(self) -> list[Piece]:
        if self.shared == 1:
            return super().copied()
        weight, *bias = self.split()
        assert isinstance(weight, OuterRows)
        if prod(weight.shape) * prod(weight.layout.stored) <= weight.left.numel() + weight.right.numel():
            weight = weight.spelled_out()
            return [DenseRows(weight.start, weight.values.detach()), *bias]
        return [*Piece.copied(weight), *bias]

    def split(self) -> list[Piece]:
        if self.layout.bias is None:
            return [self]
        bias = torch.einsum("r n t k o, n t k -> r n k o", self.left, self.right[..., -1])
        return [self._weight(), DenseRows(self.layout.bias, bias.flatten(2))]

    def separated(self) -> list[Piece]:
        if self.layout.bias is None or self.shared > 1:
            return self.split()
        own = (self.layout.groups, self.layout.rows, 1)
        bias = MatrixLayout(self.layout.bias, own, (0, 1, 2), *own)
        return [self._weight(), OuterRows(bias, self.left, self.right[..., -1:])]

    def _weight(self) -> OuterRows:
        return OuterRows(replace(self.layout, bias=None), self.left, self.right[..., :-1])

    def role(self, upright: MatrixLayout) -> str | None:
        if self.layout == upright:
            return "upright"
        plain, other = replace(upright, bias=None), replace(self.layout, bias=None)
        if plain == other:
            return "upright"
        turned = replace(plain, order=plain.order[::-1], rows=plain.cols, cols=plain.rows)
        two_axes = len(plain.stored) == 2 and plain.groups == 1
        return "transposed" if two_axes and turned == other and self.layout.bias is None else None

    def add_to(self, out: Float[Tensor, "r n flat"], rows: slice) -> None:
        self.layout.scatter_add(contract(self.left[:, rows], self.right[rows]).transpose(0, 1), out)

    def _push(self, matrix: Float[Tensor, "s groups rows width"]) -> Float[Tensor, "s n r"]:
        moved = torch.einsum("n t k i, s k o i -> s n t k o", self.right, matrix)
        return torch.einsum("r n t k o, s n t k o -> s n r", self.left, moved)

    def pull(self, weights: Float[Tensor, "s n r"], out: Float[Tensor, "s params"]) -> None:
        moved = torch.einsum("s n r, r n t k o -> s n t k o", weights, self.left)
        self.layout.scatter_add(torch.einsum("s n t k o, n t k i -> s k o i", moved, self.right), out)

    def alike(self, other: Piece) -> bool:
        if not isinstance(other, OuterRows) or self.layout != other.layout:
            return False
        pairs, layout = self.shared * other.shared, self.layout
        return pairs == 1 or pairs * (layout.rows + layout.cols) <= layout.rows * layout.cols

    def product(self, other: Piece) -> Float[Tensor, "rows others"]:
        assert isinstance(other, OuterRows)
        groups = [
            _woven(self.left[..., k, :], other.left[..., k, :], torch.einsum("n t i, m u i -> n t m u", x, y))
            for k, (x, y) in enumerate(zip(self.right.unbind(2), other.right.unbind(2), strict=True))
        ]
        return groups[0] if len(groups) == 1 else torch.stack(groups).sum(0)

    def columns(self, size: int, layout: MatrixLayout, cut: Cut, budget: int) -> Float[Tensor, "n r cut"]:
        if self.layout != layout:
            return super().columns(size, layout, cut, budget)
        k, o, i = cut
        left, right = self.left[..., k, o], self.right[..., k, i]
        parts = chunks(left.shape[1], 2 * contract_bytes(left, right.shape[-1]), budget)
        return torch.cat([contract(left[:, part].double(), right[part].double()).flatten(2) for part in parts])

    def times(self, matrix: Float[Tensor, "params other"]) -> Iterator[Float[Tensor, "n r other"]] | None:
        """For a left factor that all data points share: the matrix is met by the inputs first."""
        left = once(self.left)
        return self._times(left[:, 0, 0], matrix) if self.shared == 1 and left.shape[1] == 1 else None

    def _times(self, left: Float[Tensor, "r groups rows"], matrix: Tensor) -> Iterator[Float[Tensor, "n r other"]]:
        apart = self.layout.gather(matrix.mT)  # [other, k, o, i]
        each = 2 * apart[..., 0].numel() * (1 + len(left) // left[0].numel()) * matrix.element_size()
        for points in chunks(len(self.right), each, intermediate_bytes()):
            met = torch.einsum("n k i, p k o i -> n p k o", self.right[points, 0], apart)
            yield torch.einsum("r k o, n p k o -> n r p", left, met)

    def squarable(self, budget: int | None = None) -> Iterator[tuple[slice, Piece]]:
        count = self.shape[1]
        if self.shared == 1:
            yield slice(0, count), OuterRows(self.layout, once(self.left), self.right)
            return
        for points in chunks(count, contract_bytes(self.left, self.layout.width), budget or cache_bytes()):
            rows = contract(self.left[:, points], self.right_of(points)).flatten(2)
            yield points, DenseRows(0, rows.transpose(0, 1))

    @property
    def large(self) -> bool:
        """Whether the rows of one data point, all cotangents, are more than a cache holds: tiles of them are not."""
        return self.shared > 1 and contract_bytes(self.left, self.layout.width) > CACHE

    def _tiles(self, budget: int) -> Iterator[tuple[slice, slice, Float[Tensor, "n r groups rows width"]]]:
        """(data points, rows of the matrix, the squares of what is there): a few points, or a part of one's matrix."""
        rows, budget = self.layout.rows, min(CACHE, budget)
        for points, left, right in self._by_points(budget):
            for some in chunks(rows, len(right) * contract_bytes(left, self.layout.width) // rows, budget):
                formed = contract(left[..., some], right)
                yield points, some, formed.square() if formed.requires_grad else formed.square_()

    def _inner(self, weight: Tensor) -> Float[Tensor, "n outputs"]:
        squared = self.right[:, 0].square()
        if weight.shape[0] == 1:  # a small product, which einsum takes longer to prepare than to do
            return squared[:, 0] @ weight[0].mT
        return torch.einsum("n k i, k o i -> n k o", squared, weight).flatten(1)

    def even(self, whole: bool) -> bool:
        """In float64 alone: positions that cancel leave the rounding of what they cancel."""
        count, shared, rows = self.shape[0], self.shared, self.layout.rows
        meeting = count * count if whole else count
        needed = shared * shared * (meeting * rows + self.layout.width)
        return self.left.dtype == torch.float64 and needed < (count * shared + meeting) * rows * self.layout.width

    def _even(self, whole: bool) -> Float[Tensor, "n *r"]:
        """sum over t, u of (left_t . left_u) (right_t . right_u)."""
        left, found = once(self.left), []
        meeting = self.shape[0] ** (2 if whole else 1)
        each = 2 * 8 * self.layout.groups * self.shared**2 * meeting
        for points in chunks(self.shape[1], each, intermediate_bytes()):
            right = self.right_of(points)
            own = left if left.shape[1] == 1 else left[:, points]
            among = torch.einsum("n t k i, n u k i -> n k t u", right, right)
            if whole:
                met = torch.einsum("r n t k o, s n u k o -> n k r s t u", own, own)
                found.append(
                    torch.einsum("n k r s t u, n k t u -> n r s", met.expand(len(right), *met.shape[1:]), among)
                )
            else:
                met = torch.einsum("r n t k o, r n u k o -> n k r t u", own, own)
                found.append(torch.einsum("n k r t u, n k t u -> n r", met.expand(len(right), *met.shape[1:]), among))
        return torch.cat(found)

    def gram(self, weight: Float[Tensor, "groups rows width"] | Float[Tensor, ""]) -> Float[Tensor, "n r r"]:
        """Sum over (k, o, i) of l_r l_s right^2 weight."""
        if weight.dim() == 0:
            return weight * self._even(whole=True)
        inner = self._inner(weight).unsqueeze(1)
        flat = self.left[:, 0].flatten(1) if self.left.shape[1] == 1 else self.left.flatten(2).transpose(0, 1)
        return (flat * inner) @ flat.mT

    def squares(self, weight: Float[Tensor, "groups rows width"] | Float[Tensor, ""]) -> Float[Tensor, "n r"]:
        if weight.dim() == 0:
            return weight * self._even(whole=False)
        if self.shared > 1:
            total = weight.new_zeros(self.shape[1], self.shape[0])
            for points, some, squares in self._tiles(intermediate_bytes()):
                total[points] += squares.flatten(2) @ weight[:, some].flatten()
            return total
        inner, left = self._inner(weight), self.left.square().flatten(2)
        if left.shape[1] == 1:
            return inner @ left[:, 0].mT
        return (left.transpose(0, 1) @ inner.unsqueeze(-1)).squeeze(-1)

    def sweep(
        self, values: Float[Tensor, "groups rows width"], precisions: Float[Tensor, " k"]
    ) -> Float[Tensor, "k n r"]:
        found = []
        left, right = self.left.square().flatten(2), self.right[:, 0].square()
        each = (values.numel() + len(right) * values[..., 0].numel()) * values.element_size()
        for part in chunks(len(precisions), each, cache_bytes()):
            weight = (values + precisions[part, None, None, None]).reciprocal()
            inner = torch.einsum("n k i, p k o i -> n p k o", right, weight).flatten(2)
            found.append(inner @ (left[:, 0].mT if left.shape[1] == 1 else left.permute(1, 2, 0)))
        return torch.cat(found, dim=1).transpose(0, 1)

    def total(self, shape: torch.Size) -> Float[Tensor, "groups rows width"]:
        """(sum_r G*G)^T (A*A): no row is formed."""
        left, right = self.left[:, :, 0].square().sum(0), self.right[:, 0].square()
        if len(left) == 1:
            return torch.einsum("k o, k i -> k o i", left[0], right.sum(0))
        return torch.einsum("n k o, n k i -> k o i", left, right)

    def add_squares_to(self, out: Float[Tensor, " flat"], budget: int) -> None:
        layout = self.layout
        squares = self.left.new_zeros(layout.groups, layout.rows, layout.width)
        for _, some, found in self._tiles(budget):
            squares[:, some] += found.sum((0, 1))
        layout.scatter_add(squares, out)


@dataclass(frozen=True, eq=False)
class LookupRows(MatrixRows):
    """row[r,n] = sum_t onehot(index[n,t]) (x) left[r,n,t] in the table [V, E] of `layout` (groups = 1).

    Positions with the index `padding` do not use the table; their `left` is zero. Only the entries that a data point
    looks up take part in its squares, each counted once.
    """

    left: Float[Tensor, "r n t features"]
    index: Int[Tensor, "n t"]
    padding: int | None = None

    _by_point: ClassVar[tuple[str, ...]] = ("index",)

    def at(self, place: MatrixLayout | Segment) -> LookupRows:
        assert isinstance(place, MatrixLayout)
        return LookupRows(place, self.left, self.index, self.padding)

    def _entries(self, segment: Segment, index: Int[Tensor, " q"], budget: int) -> Float[Tensor, "r n q"]:
        """A feature at the positions that look its row up, unless there are so many that the table is faster."""
        if 4 * len(index) > segment[1] - segment[0]:
            return super()._entries(segment, index, budget)
        _, rows, features = self.layout.places(index)
        (count, batch), found = self.shape, []
        for part in chunks(len(index), 3 * 8 * count * batch * self.positions, budget):
            looked_up = (self.index.unsqueeze(-1) == rows[part]).to(self.left.dtype)
            found.append(torch.einsum("r n t q, n t q -> r n q", self.left[..., features[part]], looked_up))
        return torch.cat(found, dim=2)

    def role(self, upright: MatrixLayout) -> str | None:
        return "lookup" if replace(upright, bias=None) == self.layout else None

    def add_to(self, out: Float[Tensor, "r n flat"], rows: slice) -> None:
        left, index = self.left[:, rows], self.index[rows]
        table = left.new_zeros(left.shape[0], left.shape[1], self.layout.rows, self.layout.cols)
        table.scatter_add_(2, index[None, :, :, None].expand_as(left), left)
        self.layout.scatter_add(table.unsqueeze(2), out)

    def _push(self, matrix: Float[Tensor, "s 1 table features"]) -> Float[Tensor, "s n r"]:
        return torch.einsum("r n t e, s n t e -> s n r", self.left, matrix[:, 0, self.index])

    def pull(self, weights: Float[Tensor, "s n r"], out: Float[Tensor, "s params"]) -> None:
        moved = torch.einsum("s n r, r n t e -> s n t e", weights, self.left).flatten(1, 2)
        table = moved.new_zeros(len(weights), self.layout.rows, self.layout.cols)
        self.layout.scatter_add(table.index_add(1, self.index.flatten(), moved).unsqueeze(1), out)

    def alike(self, other: Piece) -> bool:
        return isinstance(other, LookupRows) and self.layout == other.layout

    def product(self, other: Piece) -> Float[Tensor, "rows others"]:
        assert isinstance(other, LookupRows)
        return _woven(self.left, other.left, self.index[:, :, None, None] == other.index[None, None])

    def columns(self, size: int, layout: MatrixLayout, cut: Cut, budget: int) -> Float[Tensor, "n r cut"]:
        if self.layout != layout:
            return super().columns(size, layout, cut, budget)
        _, o, i = cut
        index, height = self.index - o.start, o.stop - o.start
        inside = (index >= 0) & (index < height)
        left = (self.left[..., i] * inside.unsqueeze(-1)).double()
        table = left.new_zeros(*left.shape[:2], height, left.shape[-1])
        where = index.clamp(0, height - 1)[None, :, :, None].expand_as(left)
        return table.scatter_add_(2, where, left).flatten(2).transpose(0, 1)

    @cached_property
    def _merged(self) -> tuple[Tensor, Tensor]:
        """Every occurrence of a token holds the sum over its occurrences, and counts for its share of them."""
        same = (self.index.unsqueeze(2) == self.index.unsqueeze(1)).to(self.left.dtype)
        return same @ self.left, same.sum(2, keepdim=True)

    def gram(self, weight: Float[Tensor, "1 table features"]) -> Float[Tensor, "n r r"]:
        merged, occurrences = self._merged
        flat = merged.flatten(2).transpose(0, 1)
        return (flat * (weight[0, self.index] / occurrences).flatten(1).unsqueeze(1)) @ flat.mT

    def squares(self, weight: Float[Tensor, "1 table features"]) -> Float[Tensor, "n r"]:
        return self._squares(weight[0, self.index])

    def _squares(self, weight: Float[Tensor, "n t features"]) -> Float[Tensor, "n r"]:
        merged, occurrences = self._merged
        return torch.einsum("r n t e, n t e -> n r", merged.square(), weight / occurrences)

    def sweep(
        self, values: Float[Tensor, "1 table features"], precisions: Float[Tensor, " k"]
    ) -> Float[Tensor, "k n r"]:
        looked_up = values[0, self.index]
        return torch.stack([self._squares((looked_up + precision).reciprocal()) for precision in precisions])

    def total(self, shape: torch.Size) -> Float[Tensor, "1 table features"]:
        merged, occurrences = self._merged
        squares = merged.square().sum(0) / occurrences
        return squares.new_zeros(shape[1:]).index_add_(0, self.index.flatten(), squares.flatten(0, 1)).unsqueeze(0)

    def add_squares_to(self, out: Float[Tensor, " flat"], budget: int) -> None:
        """Occurrences of one token in one data point are summed before they are squared."""
        table, batch = self.layout.rows, self.left.shape[1]
        owner = torch.arange(batch, device=self.index.device).unsqueeze(1) * table + self.index
        met, inverse = owner.flatten().unique(return_inverse=True)
        summed = self.left.new_zeros(self.left.shape[0], len(met), self.left.shape[-1])
        summed.index_add_(1, inverse, self.left.flatten(1, 2))
        squares = self.left.new_zeros(table, self.left.shape[-1])
        squares.index_add_(0, met % table, summed.square().sum(0))
        self.layout.scatter_add(squares.unsqueeze(0), out)


@dataclass(frozen=True, eq=False)
class DenseRows(Piece):
    """row[r,n] spelled out, for the entries start..start+size."""

    start: int
    values: Float[Tensor, "r n size"]

    _by_row: ClassVar[str] = "values"
    factored: ClassVar[bool] = False

    @property
    def segments(self) -> tuple[Segment, ...]:
        return ((self.start, self.start + self.values.shape[-1]),)

    @property
    def place(self) -> Segment:
        return self.start, self.start + self.values.shape[-1]

    def _entries(self, segment: Segment, index: Int[Tensor, " q"], budget: int) -> Float[Tensor, "r n q"]:
        return self.values[..., index - self.start]

    def at(self, place: MatrixLayout | Segment) -> DenseRows:
        assert isinstance(place, tuple)
        return DenseRows(place[0], self.values)

    @property
    def positions(self) -> int:
        return 1

    def spelled_out(self) -> DenseRows:
        return self

    def cut(self, segment: Segment) -> DenseRows | None:
        start, stop = max(self.start, segment[0]), min(self.segments[0][1], segment[1])
        return DenseRows(start, self.values[..., start - self.start : stop - self.start]) if start < stop else None

    def add_to(self, out: Float[Tensor, "r n flat"], rows: slice) -> None:
        out[..., self.start : self.start + self.values.shape[-1]] += self.values[:, rows]

    def push(self, deltas: Float[Tensor, "s size"], out: Float[Tensor, "s n r"], budget: int) -> None:
        out += torch.einsum("r n p, s p -> s n r", self.values, deltas[:, slice(*self.place)])

    def pull(self, weights: Float[Tensor, "s n r"], out: Float[Tensor, "s params"]) -> None:
        out[:, slice(*self.place)] += torch.einsum("s n r, r n p -> s p", weights, self.values)

    def alike(self, other: Piece) -> bool:
        return isinstance(other, DenseRows) and self.place == other.place

    def product(self, other: Piece) -> Float[Tensor, "rows others"]:
        assert isinstance(other, DenseRows)
        return self._by_data_point.flatten(0, 1) @ other._by_data_point.flatten(0, 1).mT

    def columns(self, size: int, layout: MatrixLayout, cut: Cut, budget: int) -> Float[Tensor, "n r cut"]:
        one_row = layout.stored == (size,) and layout.cols == size
        if self.values.shape[-1] != size or not one_row:
            return super().columns(size, layout, cut, budget)
        return self.values[..., cut[2]].transpose(0, 1).double()

    def gather(self, v: Float[Tensor, " flat"]) -> Float[Tensor, " size"]:
        return v[slice(*self.place)]

    @property
    def _by_data_point(self) -> Float[Tensor, "n r size"]:
        return self.values.transpose(0, 1)

    def gram(self, weight: Float[Tensor, "*shape"]) -> Float[Tensor, "n r r"]:
        rows = self._by_data_point
        return (rows * weight.flatten()) @ rows.mT

    def squares(self, weight: Float[Tensor, "*shape"]) -> Float[Tensor, "n r"]:
        return self._by_data_point.square() @ weight.flatten()

    def sweep(self, values: Float[Tensor, "*shape"], precisions: Float[Tensor, " k"]) -> Float[Tensor, "k n r"]:
        squared, values = self._by_data_point.square(), values.flatten()
        found = [
            squared @ (values.unsqueeze(1) + precisions[part]).reciprocal()
            for part in chunks(len(precisions), 2 * values.numel() * values.element_size(), intermediate_bytes())
        ]
        return torch.cat(found, dim=-1).movedim(-1, 0)

    def total(self, shape: torch.Size) -> Float[Tensor, "*shape"]:
        return self._by_data_point.square().sum((0, 1)).reshape(shape)

    def add_squares_to(self, out: Float[Tensor, " flat"], budget: int) -> None:
        out[slice(*self.place)] += self.values.square().sum((0, 1))


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


# -- several pieces ----------------------------------------------------------------------------------------------------


def assemble(pieces: Sequence[Piece], size: int, rows: slice) -> Float[Tensor, "r n size"]:
    """The rows spelled out: [R, n, size] for the data points in `rows`. The caller keeps n within a budget."""
    first = pieces[0].by_row
    out = first.new_zeros(first.shape[0], rows.stop - rows.start, size)
    for piece in pieces:
        piece.add_to(out, rows)
    return out


def side_by_side(pieces: Sequence[Piece]) -> list[Piece]:
    """Products that use one weight in the same way, as further positions of one piece: the steps of a recurrence."""
    starts = [piece.layout.start for piece in pieces if isinstance(piece, OuterRows)]
    if len(starts) == len(set(starts)):  # nearly always: every weight is used once
        return list(pieces)
    alike: dict[MatrixLayout | int, list[Piece]] = {}
    for number, piece in enumerate(pieces):
        alike.setdefault(piece.layout if isinstance(piece, OuterRows) else number, []).append(piece)
    return [_joined_positions(same) for same in alike.values()]


def _joined_positions(same: Sequence[Piece]) -> Piece:
    outers = [piece for piece in same if isinstance(piece, OuterRows)]
    if len(outers) < 2:
        return same[0]
    left = torch.cat([piece.left for piece in outers], dim=2)
    return OuterRows(outers[0].layout, left, torch.cat([piece.right for piece in outers], dim=1))


def connected(pieces: Sequence[Piece]) -> list[tuple[Segments, list[Piece]]]:
    """Pieces grouped so that pieces of different groups share no parameter, with the parameters of each group."""
    intervals = [piece.segments for piece in pieces]
    end, overlap = 0, False
    for start, stop in sorted([interval for own in intervals for interval in own]):
        overlap, end = overlap or start < end, stop
    if not overlap:  # nearly always
        return [(Segments(tuple(sorted(own))), [piece]) for own, piece in zip(intervals, pieces, strict=True)]
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


class Places:
    """Disjoint parts of the flat vector, and where in them pieces belong: remembered, as all batches are alike."""

    def __init__(self, segments: Sequence[Segments]) -> None:
        self.segments = list(segments)
        self._homes: dict[MatrixLayout | Segment, tuple[int, MatrixLayout | Segment] | None] = {}

    def assigned(self, pieces: Sequence[Piece]) -> list[tuple[int, list[Piece]]]:
        """The pieces of every place that has any, in its own coordinates."""
        found: dict[int, list[Piece]] = {}
        for piece in pieces:
            for number, local in self.route(piece):
                found.setdefault(number, []).append(local)
        return [(number, found[number]) for number in sorted(found)]

    def route(self, piece: Piece) -> list[tuple[int, Piece]]:
        """The places a piece belongs to, in their local coordinates; a piece over several places is taken apart."""
        place = piece.place
        home = self._homes.get(place)
        if home is None:
            for number, segments in enumerate(self.segments):
                if all(segments.contains(segment) for segment in piece.segments):
                    home = self._homes[place] = number, piece.moved(segments).place
                    break
        if home is not None:
            return [(home[0], piece.at(home[1]))]
        apart = piece.split()
        if len(apart) > 1:
            return [routed for part in apart for routed in self.route(part)]
        dense, routed = piece.spelled_out(), []
        for number, segments in enumerate(self.segments):
            cuts = [dense.cut(interval) for interval in segments.intervals]
            routed += [(number, cut.moved(segments)) for cut in cuts if cut is not None]
        return routed


def push(pieces: Sequence[Piece], deltas: Float[Tensor, "s size"], budget: int) -> Float[Tensor, "s n r"]:
    """row[r,n] . delta[s] for many directions at once, in factored form: no row is spelled out."""
    count, batch = pieces[0].shape
    out = deltas.new_zeros(len(deltas), batch, count)
    for piece in pieces:
        piece.push(deltas, out, budget)
    return out


# -- weighted squares of rows over several groups of parameters ------------------------------------------------------

Weighed = tuple[slice, Piece, Tensor]
"""Data points, their rows, and a weight in the shape of these, or one number."""


def weighed(
    pieces: Sequence[Piece],
    weight: Float[Tensor, " size"],
    budget: int | None = None,
    even: Callable[[Piece], bool] = lambda piece: False,
    tiled: bool = False,
) -> Iterator[Weighed]:
    """Group by group of connected parameters; rows that have to be formed, within the budget.

    Pieces that are `even` come as they are, where their weight is one number; `tiled`, those that are large do.
    """
    for segments, group in connected(pieces):
        if len(group) == 1:
            number = _one_number(weight, segments) if even(group[0]) else None
            if number is not None:
                yield slice(0, group[0].shape[1]), group[0], number
                continue
            shaped = group[0].gather(weight)
            if tiled and isinstance(group[0], OuterRows) and group[0].large:
                yield slice(0, group[0].shape[1]), group[0], shaped
                continue
            for points, rows in group[0].squarable(budget):
                yield points, rows, shaped
            continue
        count, batch = group[0].shape
        moved = [piece.moved(segments) for piece in group]
        for points in chunks(batch, 3 * 8 * count * segments.size, intermediate_bytes()):
            yield points, DenseRows(0, assemble(moved, segments.size, points)), segments.gather(weight)


def _one_number(weight: Float[Tensor, " size"], segments: Segments) -> Float[Tensor, ""] | None:
    """The weight of all entries in some intervals, if it is the same."""
    first = weight[segments.intervals[0][0]]
    if weight.stride(0) == 0 or len(weight) == 1:
        return first
    if weight.requires_grad:  # its entries may be one number and have derivatives of their own
        return None
    parts = [weight[start:stop] for start, stop in segments.intervals]
    return first if all(bool((part == first).all()) for part in parts) else None


def add_grams(found: Iterator[Weighed], count: int, batch: int) -> Float[Tensor, "n r r"]:
    """sum_p row[r,n,p] weight[p] row[s,n,p], over all groups."""
    total = None
    for points, rows, weight in found:
        if total is None and points == slice(0, batch):  # the usual case, and [N, R, R] may be the largest tensor
            total = rows.gram(weight)
            continue
        total = weight.new_zeros(batch, count, count) if total is None else total
        total[points] += rows.gram(weight)
    assert total is not None
    return total


def add_squares(found: Iterator[Weighed], count: int, batch: int) -> Float[Tensor, "n r"]:
    """The diagonal of `add_grams`, without the rest."""
    total = None
    for points, rows, weight in found:
        if total is None and points == slice(0, batch):
            total = rows.squares(weight)
            continue
        total = weight.new_zeros(batch, count) if total is None else total
        total[points] += rows.squares(weight)
    assert total is not None
    return total
