"""Which rows of an operation's output belong to which data point, found by a probe instead of a guess.

The sample axis is not always first: attention uses [T, N, E] and flattens it to [T N, E]. The model is run once more
with one sample changed; what changes belongs to that sample. What changes elsewhere shows that samples are coupled
(BatchNorm in train mode, normalisation over the batch), which no per-sample quantity survives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor

from lapwing.tangent.inputs import batch_size, map_tensors, tensors


@dataclass(frozen=True)
class SampleAxis:
    """Axis `axis` of the positions has size outer * batch * inner, and the sample is the middle index."""

    axis: int
    outer: int
    batch: int
    inner: int

    @property
    def plain(self) -> bool:
        """Whether the first axis of the positions counts the samples, and nothing else."""
        return self.axis == 0 and self.outer == self.inner == 1

    def split(self, values: Shaped[Tensor, "..."], lead: int, features: int) -> Tensor:
        """[*lead, *positions, *features] -> [*lead, N, T, *features]."""
        count = values.dim() - lead - features
        if count == 1 and self.outer == self.inner == 1:
            return values.unsqueeze(lead + 1)
        values = values.unflatten(lead + self.axis, (self.outer, self.batch, self.inner))
        values = values.movedim(lead + self.axis + 1, lead)
        return values.flatten(lead + 1, lead + 1 + count)

    def split_only(self, values: Shaped[Tensor, "r *positions"]) -> Tensor:
        """[R, *positions] -> [R, N, *positions with the sample axis summed to 1]."""
        values = values.unflatten(1 + self.axis, (self.outer, self.batch, self.inner))
        values = values.sum((1 + self.axis, 3 + self.axis))
        return values.movedim(1 + self.axis, 1).unsqueeze(2 + self.axis)

    def member(self, sizes: Sequence[int], sample: int) -> Bool[Tensor, "..."]:
        """Which positions belong to `sample`, broadcastable to the positions' shape."""
        index = torch.arange(sizes[self.axis])
        mine = (index // self.inner) % self.batch == sample
        return mine.reshape([-1 if axis == self.axis else 1 for axis in range(len(sizes))])


def candidates(sizes: Sequence[int], batch: int) -> list[SampleAxis]:
    """Every way the samples could lie along one axis; the usual ones (first axis, samples outermost) first."""
    found = []
    for axis, size in enumerate(sizes):
        if size % batch:
            continue
        rest = size // batch
        found += [SampleAxis(axis, rest // inner, batch, inner) for inner in range(rest, 0, -1) if rest % inner == 0]
    return found


def changed_sample(x: Any, sample: int) -> Any:
    """The input with one sample replaced by something else and the rest as it was; None if nothing else is known."""
    batch = batch_size(x)
    batched = [t for t in tensors(x) if t.dim() and t.shape[0] == batch]
    donor = next(
        (
            (sample + shift) % batch
            for shift in range(1, batch)
            if any(bool((t[sample] != t[(sample + shift) % batch]).any()) for t in batched)
        ),
        None,
    )
    if donor is None and not any(t.is_floating_point() for t in batched):
        return None

    def replaced(t: Tensor) -> Tensor:
        if not t.dim() or t.shape[0] != batch:
            return t
        t = t.clone()
        if donor is not None:
            t[sample] = t[donor]
        if t.is_floating_point():  # also moved, so that inputs which agree with the donor's in a part change there too
            t[sample] = 0.75 * t[sample] + 0.25 * t[sample].abs().mean() + 0.125
        return t

    return map_tensors(replaced, x)


def differs(before: Tensor, after: Tensor) -> Bool[Tensor, "..."]:
    """Where two runs differ by more than rounding."""
    if not before.is_floating_point() or not before.numel():
        return before != after
    eps = 16 * torch.finfo(before.dtype).eps
    largest = torch.maximum(before.abs().max(), after.abs().max())
    if isfinite(largest.item()):  # nearly always: no NaN and no infinity among them
        return (before - after).abs_() > eps * largest
    scale = torch.maximum(before.abs(), after.abs())
    scale = scale[torch.isfinite(scale)].max() if bool(torch.isfinite(scale).any()) else torch.ones(())
    tolerance = eps * scale
    both_nan = (before != before) & (after != after)
    return ~((before - after).abs() <= tolerance) & ~both_nan & ~(before == after)


def not_zero(values: Tensor) -> Bool[Tensor, "..."]:
    """Where values are more than the rounding of the largest of them."""
    if not values.is_floating_point() or not values.numel():
        return values != 0
    size = values.abs()
    largest = size.max()
    if isfinite(largest.item()):
        return size > 16 * torch.finfo(values.dtype).eps * largest
    return differs(values, torch.zeros_like(values))
