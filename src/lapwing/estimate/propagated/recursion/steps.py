"""One operation on the way back of `kfra`: what it passes on, E[J^T G J], with all expectations over the whole data.

    Smooth    inputs with a fixed J (linear, convolution, reshape, average) and with a diagonal one, y_o = b_o x_o
    MaxPool   y = sum_k mask[o, k] unfold(x)[o, k]: a diagonal J between two fixed ones

No statistic needs G, so that one pass over the data gathers them all: for a diagonal J sums of b b^T [d, d] and of b
(E[B G B] = G * E[b b^T], entry by entry), for a fixed J nothing but a proof that it is fixed. Memory d^2 for each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from lapwing.estimate.propagated.recursion.refusal import refuse
from lapwing.estimate.propagated.recursion.sample_axes import Frame, TapedBatch
from lapwing.estimate.symmetric_sums import GramSum
from lapwing.linalg.budget import chunks
from lapwing.tangent.quiet import quiet
from lapwing.tape.nodes import Node, Value


class Step(ABC):
    node: Node

    @property
    @abstractmethod
    def inputs(self) -> list[Value]:
        """The values that curvature is passed on to, each once."""

    @abstractmethod
    def watch(self, node: Node, batch: TapedBatch) -> None:
        """Takes the statistics of one batch; `node` is this operation there."""

    @abstractmethod
    def mean(self, rows: Mapping[Value, Tensor], count: int) -> list[Tensor]:
        """E[J_i]^T applied to rows [m, d_out] of each output: [m, d_i] for every input."""

    @abstractmethod
    def second(self, block: Callable[[Value, Value], Tensor], outs: Sequence[Value], count: int) -> Second:
        """E[J_i^T G J_j] for every pair of inputs."""


Second = dict[tuple[int, int], Tensor]


CONVOLUTIONS = frozenset((F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d))


# -- fixed and diagonal Jacobians -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scaled:
    """An input x of y_o = b_o x_o, with x broadcast to y as `view` says (for a single sample)."""

    value: Value
    view: tuple[int, ...]

    def summed(self, rows: Tensor, shape: Sequence[int]) -> Tensor:
        """[m, d_out] -> [m, d_in]: where x was broadcast, its shares are added."""
        if prod(self.view) == prod(shape):
            return rows
        return rows.reshape(len(rows), *shape).sum_to_size(len(rows), *self.padded(shape)).flatten(1)

    def padded(self, shape: Sequence[int]) -> tuple[int, ...]:
        return (1,) * (len(shape) - len(self.view)) + tuple(self.view)


Slopes = Callable[[Node, TapedBatch], list[Tensor | None]]
"""b of every scaled input, of the shape of the output; None for ones."""


@dataclass
class Smooth(Step):
    """`trusted` where the form of the operation proves that J is fixed, otherwise every batch is asked."""

    node: Node
    frame: Frame
    fixed: list[Value]
    scaled: list[Scaled] = field(default_factory=list)
    slopes: Slopes = lambda node, batch: []
    trusted: bool = False
    sums: dict[int, Tensor] = field(default_factory=dict)
    grams: dict[tuple[int, int], GramSum | Tensor] = field(default_factory=dict)

    @property
    def inputs(self) -> list[Value]:
        return self.fixed + [each.value for each in self.scaled]

    @property
    def out(self) -> Value:
        (out,) = self.node.outs
        assert out is not None
        return out

    # -- statistics

    def watch(self, node: Node, batch: TapedBatch) -> None:
        if self.fixed and not self.trusted:
            self._prove_fixed(node, batch)
        if not self.scaled:
            return
        place = self.frame.place[self.out]
        found = {
            i: place.rows(slope.detach(), batch.size, node.name).to(self.frame.like)
            for i, slope in enumerate(self.slopes(node, batch))
            if slope is not None
        }
        for i, b in found.items():
            weight = batch.size / len(b)
            _add(self.sums, i, weight * b.sum(0))
            for j, c in found.items():
                if i == j:
                    self.grams.setdefault((i, i), GramSum(b.new_zeros(1, place.size, place.size)))
                    self.grams[i, i].add((b * weight**0.5)[:, None, None])  # pyright: ignore[reportAttributeAccessIssue]
                elif i < j:
                    rows = max(len(b), len(c))
                    b_all, c_all = b.expand(rows, -1), c.expand(rows, -1)
                    _add(self.grams, (i, j), batch.size / rows * (b_all.mT @ c_all))

    def _prove_fixed(self, node: Node, batch: TapedBatch) -> None:
        """J_n^T u = J^T u for one u, which is J_n = J but for u in a set of measure zero."""
        ones: dict[Value, Tensor] = {}
        for k, out in enumerate(self.node.outs):
            if out is not None:
                ones[out] = probe(self.frame.place[out].size, k, self.frame.like.device)
        here = [
            None if v is None else self.frame.place[v].repeated(ones[v].to(v.dtype), batch.size, node.name)
            for v in self.node.outs
        ]
        pulled = _by_value(node.pull(here))
        expected = dict(zip(self.fixed, self._pull({v: u[None] for v, u in ones.items()}), strict=True))
        for value in self.fixed:
            place, found = self.frame.place[value], pulled.get(batch.value[value])
            one = expected[value]
            if place.axis is None and any(self.frame.place[v].axis is not None for v in ones):
                one = one * batch.size  # all data points pass on to what has none
            want = place.repeated(one.to(value.dtype), batch.size, node.name)
            found = torch.zeros_like(want) if found is None else found
            atol = torch.finfo(value.dtype).eps ** 0.5 * float(want.abs().max() + found.abs().max())
            if not torch.allclose(found, want, rtol=0, atol=atol):
                raise refuse(node.name, "its Jacobian differs between data points")

    # -- on the way back

    def mean(self, rows: Mapping[Value, Tensor], count: int) -> list[Tensor]:
        found = self._pull(rows) if self.fixed else []
        for i, each in enumerate(self.scaled):
            values, shape = rows[self.out], self.frame.place[self.out].shape
            values = values * (self.sums[i] / count).to(values.dtype) if i in self.sums else values
            found.append(each.summed(values, shape))
        return found

    def second(self, block: Callable[[Value, Value], Tensor], outs: Sequence[Value], count: int) -> Second:
        found: Second = {}
        if self.fixed:
            half = {y: self.mean({z: block(y, z) for z in outs}, count) for y in outs}
            for i in range(len(self.fixed)):
                whole = self.mean({y: half[y][i].mT for y in outs}, count)
                for j in range(i, len(self.inputs)):
                    found[i, j] = whole[j]
        for i in range(len(self.scaled)):
            for j in range(i, len(self.scaled)):
                at = len(self.fixed) + i, len(self.fixed) + j
                found[at] = self._scaled_pair(block(self.out, self.out), i, j, count)
        return found

    def _scaled_pair(self, G: Tensor, i: int, j: int, count: int) -> Tensor:
        if (i, j) in self.grams:
            gram = self.grams[i, j]
            if isinstance(gram, GramSum):
                gram = gram.matrix()[0]
            G = (G * gram.to(G.dtype)).div_(count)
        else:  # one of them is constant
            for k, axis in ((i, 1), (j, 0)):
                if k in self.sums:
                    G = G * (self.sums[k] / count).to(G.dtype).unsqueeze(axis)
        shape = self.frame.place[self.out].shape
        a, b = self.scaled[i], self.scaled[j]
        return b.summed(a.summed(G.mT, shape).mT, shape)

    def _pull(self, rows: Mapping[Value, Tensor]) -> list[Tensor]:
        """J^T of every fixed input, on rows [m, d_out]."""
        (first, *_) = rows.values()
        plain = self.node.args and self.node.inputs.get(0) is self.fixed[0]  # the data come first, as ever
        if plain and self.node.function is F.linear:
            weight = self.node.given[1].to(first.dtype)
            return [(first.reshape(-1, weight.shape[0]) @ weight).reshape(len(first), -1)]
        alone = self._convolved if plain and self.node.function in CONVOLUTIONS else self._pulled
        sizes = [self.frame.place[v].size for v in (*rows, *self.fixed)]
        parts = [
            alone({v: r[part] for v, r in rows.items()})
            for part in chunks(len(first), 4 * sum(sizes) * first.element_size(), self.frame.budget)
        ]
        return [torch.cat(each) for each in zip(*parts, strict=True)]

    def _convolved(self, rows: Mapping[Value, Tensor]) -> list[Tensor]:
        """A convolution takes rows for a batch, and need not be asked for what goes to its weights."""
        (u,), (x, weight, *rest) = rows.values(), self.node.given
        if x.dim() != weight.dim():
            return self._pulled(rows)
        x = x.expand(len(u), *x.shape[1:]).requires_grad_()
        with torch.enable_grad():
            (y,) = self.node.again([x, weight, *rest])
        (grad,) = torch.autograd.grad([y], [x], [u.reshape(y.shape).to(y.dtype)])
        return [grad.flatten(1).to(u.dtype)]

    def _pulled(self, rows: Mapping[Value, Tensor]) -> list[Tensor]:
        (first, *_) = rows.values()
        cotangents = [
            None if v is None or v not in rows else rows[v].reshape(-1, *v.shape).to(v.dtype) for v in self.node.outs
        ]
        with quiet():
            found = _by_value(self.node.pull(cotangents, batched=True))
        return [
            found[v].flatten(1).to(first.dtype) if v in found else first.new_zeros(len(first), self.frame.place[v].size)
            for v in self.fixed
        ]


def _add(total: dict, key: int | tuple[int, int], values: Tensor) -> None:
    total[key] = total[key] + values if key in total else values


def _by_value(pulled: Sequence[tuple[Value, Tensor]]) -> dict[Value, Tensor]:
    found: dict[Value, Tensor] = {}
    for value, grad in pulled:
        found[value] = found[value] + grad if value in found else grad
    return found


def probe(size: int, seed: int, device: torch.device) -> Tensor:
    """Numbers without a pattern, the same every time."""
    return torch.cos(3 + seed + torch.arange(size, dtype=torch.float64, device=device) ** 1.5)


def slope_in(node: Node, source: Value, device: torch.device) -> Tensor:
    """J^T 1 of an operation, or a chain of them, that works entry by entry."""
    (out,) = node.outs
    assert out is not None
    ones = torch.ones(out.shape, dtype=out.dtype, device=device)
    (slope,) = torch.autograd.grad([out.edge], [source.edge], [ones], retain_graph=True)
    return slope
