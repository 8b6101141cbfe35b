"""Max-pooling on the way back of `kfra`: y_o = sum_k mask[o, k] x[at(o, k)], k over the places of a window.

Unfolding and summing are fixed, and the mask is a diagonal Jacobian between them, so that overlapping windows are exact
too. Memory (O K)^2 for O outputs and K places of a window: that of the input where windows do not overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lapwing.estimate.propagated.recursion.refusal import refuse
from lapwing.estimate.propagated.recursion.sample_axes import Frame, TapedBatch
from lapwing.estimate.propagated.recursion.steps import Second, Step
from lapwing.estimate.symmetric_sums import GramSum
from lapwing.tangent.convolution import as_tuple
from lapwing.tape.nodes import Node, Value

POOLS: dict[Callable, tuple[int, bool]] = {
    getattr(owner, f"{kind}max_pool{dims}d{suffix}"): (dims, bool(kind))
    for owner in (F, torch)
    for dims in (1, 2, 3)
    for kind in ("", "adaptive_")
    for suffix in ("", "_with_indices")
    if hasattr(owner, f"{kind}max_pool{dims}d{suffix}")
}
"""Function -> (number of axes, whether it is adaptive)."""


@dataclass
class MaxPool(Step):
    """`at` [O, K] is the input entry at each place of each window (any entry where a window reaches beyond)."""

    node: Node
    frame: Frame
    source: Value
    out: Value
    at: Tensor
    places: Callable[[Node], Tensor]
    gram: GramSum | None = None

    @property
    def inputs(self) -> list[Value]:
        return [self.source]

    def watch(self, node: Node, batch: TapedBatch) -> None:
        if self.gram is None:
            self.gram = GramSum(self.frame.like.new_zeros(1, self.at.numel(), self.at.numel()))
        chosen = self.frame.place[self.out].rows(self.places(node), batch.size, node.name)
        self.gram.add(self._masks(chosen)[:, None, None])

    def _moments(self, count: int) -> Tensor:
        """E[m m^T] [O K, O K]"""
        assert self.gram is not None, "no batch was watched"
        return self.gram.matrix()[0] / count

    def _masks(self, chosen: Tensor) -> Tensor:
        return F.one_hot(chosen, self.at.shape[1]).flatten(1).to(self.frame.like)

    def mean(self, rows: Mapping[Value, Tensor], count: int) -> list[Tensor]:
        mask = self._moments(count).diagonal().reshape(self.at.shape)
        values = rows[self.out].unsqueeze(-1) * mask.to(rows[self.out].dtype)
        return [self._folded(values.flatten(1))]

    def second(self, block: Callable[[Value, Value], Tensor], outs: Sequence[Value], count: int) -> Second:
        G, window = block(self.out, self.out), self.at.shape[1]
        spread = G.repeat_interleave(window, 0).repeat_interleave(window, 1)
        spread *= self._moments(count).to(G.dtype)
        return {(0, 0): self._folded(self._folded(spread).mT)}

    def _folded(self, rows: Tensor) -> Tensor:
        """[m, O K] -> [m, d_in]: overlapping windows are added."""
        out = rows.new_zeros(len(rows), self.frame.place[self.source].size)
        return out.index_add_(1, self.at.flatten(), rows)


def max_pool(node: Node, frame: Frame) -> MaxPool:
    dims, adaptive = POOLS[node.function]
    (source,), out = node.sources, node.outs[0]
    assert out is not None
    if any(v is not None for v in node.outs[1:]) or len(source.shape) < dims + 1:
        raise refuse(node.name, "it has an unusual shape")
    sizes, windows = tuple(source.shape[-dims:]), tuple(out.shape[-dims:])
    starts, steps, kernel = _geometry(node, dims, adaptive, sizes, windows)
    device = frame.like.device
    offsets = torch.tensor(list(product(*map(range, kernel))), device=device)  # [K, dims]
    corners = torch.tensor(list(product(*starts)), device=device)  # [windows, dims]
    at = corners[:, None] + offsets * torch.tensor(steps, device=device)
    at = torch.minimum(at.clamp_min(0), torch.tensor(sizes, device=device) - 1)
    strides = torch.tensor([prod(sizes[i + 1 :]) for i in range(dims)], device=device)
    flat = (at * strides).sum(-1)
    planes = prod(source.shape[:-dims])
    whole = torch.arange(planes, device=device)[:, None, None] * prod(sizes) + flat

    def places(node: Node) -> Tensor:
        """Which place of its window each output took its value from."""
        found = _indices(node, dims, adaptive)
        coordinates = torch.stack([found // strides[i] % sizes[i] for i in range(dims)], -1).flatten(-1 - dims, -2)
        inside = (coordinates - corners) // torch.tensor(steps, device=device)
        weights = torch.tensor([prod(kernel[i + 1 :]) for i in range(dims)], device=device)
        return (inside * weights).sum(-1).unflatten(-1, windows)

    return MaxPool(node, frame, source, out, whole.flatten(0, 1), places)


def _options(node: Node, dims: int) -> dict[str, Any]:
    names = ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode")
    options = dict(zip(names, node.args, strict=False)) | node.kwargs
    kernel = as_tuple(options["kernel_size"], dims)
    return {
        "kernel_size": kernel,
        "stride": as_tuple(options.get("stride") or kernel, dims),
        "padding": as_tuple(options.get("padding", 0), dims),
        "dilation": as_tuple(options.get("dilation", 1), dims),
        "ceil_mode": bool(options.get("ceil_mode", False)),
    }


def _geometry(
    node: Node, dims: int, adaptive: bool, sizes: tuple[int, ...], windows: tuple[int, ...]
) -> tuple[list[list[int]], list[int], list[int]]:
    """First entry of every window along each axis, the step between its entries, and how many it has at most."""
    if adaptive:
        starts = [[o * n // m for o in range(m)] for n, m in zip(sizes, windows, strict=True)]
        longest = [
            max(-(-(o + 1) * n // m) - o * n // m for o in range(m)) for n, m in zip(sizes, windows, strict=True)
        ]
        return starts, [1] * dims, longest
    options = _options(node, dims)
    starts = [
        [o * step - pad for o in range(m)]
        for m, step, pad in zip(windows, options["stride"], options["padding"], strict=True)
    ]
    return starts, list(options["dilation"]), list(options["kernel_size"])


def _indices(node: Node, dims: int, adaptive: bool) -> Tensor:
    """Flat indices of the largest entries in the last `dims` axes."""
    x = node.given[0]
    if adaptive:
        (out, *_) = node.outs
        assert out is not None
        return getattr(F, f"adaptive_max_pool{dims}d")(x, tuple(out.shape[-dims:]), return_indices=True)[1]
    return getattr(F, f"max_pool{dims}d")(x, **_options(node, dims), return_indices=True)[1]
