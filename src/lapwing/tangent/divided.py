"""DividedMap: a network linearised at a few inputs at a time, so that no graph of all of them is ever held.

`footprint` says what one data point takes: the tensors that a forward pass, and the way back of one cotangent, make for
a few of them. It is an upper bound, as a graph keeps some of these tensors only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lapwing.errors import ModelError
from lapwing.linalg.contracts import LinearMap
from lapwing.linalg.rows import Piece
from lapwing.tangent.features import FeatureTangent
from lapwing.tangent.inputs import batch_size, take
from lapwing.tangent.model import FEW_SAMPLES, Tangent

AnyTangent = Tangent | FeatureTangent


class _Made(TorchDispatchMode):
    """Bytes of the tensors that operations make; views, and what is written in place, make none."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, Tensor) and value.untyped_storage()._cdata not in given:
                self.bytes += value.untyped_storage().nbytes()
        return out


def footprint(tangent: AnyTangent, x: Any) -> int | None:
    """Bytes that a linearisation takes for each data point, at most; None for a model that takes one batch size."""
    few = take(x, slice(0, FEW_SAMPLES))
    with suppress(ModelError):
        tangent.at(few)  # looks at operations and samples, which is done once
        made = _Made()
        with made:
            linear = tangent.at(few)
            if isinstance(tangent, Tangent):
                linear.pull(torch.ones_like(linear.value).unsqueeze(0))
        return max(1, made.bytes // batch_size(few))
    return None


@dataclass(frozen=True, eq=False)
class DividedMap:
    """J at a batch of inputs, `most` of them at a time; meets the `LinearMap` contract.

    The network runs once for its outputs, and again for each part of what is asked of J.
    """

    tangent: AnyTangent
    x: Any
    most: int

    @property
    def batch(self) -> int:
        return batch_size(self.x)

    @property
    def outputs(self) -> int:
        return self.value.shape[1:].numel()

    @property
    def value(self) -> Float[Tensor, "batch *out"]:
        return self._value

    @cached_property
    def _value(self) -> Tensor:
        return torch.cat([part.value for part in self._maps()])

    def _maps(self) -> Iterator[LinearMap]:
        for start in range(0, self.batch, self.most):
            yield self.tangent.at(take(self.x, slice(start, start + self.most)))

    def mv(self, v: Float[Tensor, " params"]) -> Float[Tensor, "batch *out"]:
        return torch.cat([part.mv(v) for part in self._maps()])

    def rmv(self, u: Float[Tensor, "batch *out"]) -> Float[Tensor, " params"]:
        parts = zip(self._maps(), u.split(self.most), strict=True)
        total = None
        for part, own in parts:
            total = part.rmv(own) if total is None else total + part.rmv(own)
        assert total is not None
        return total

    def rows(self) -> Float[Tensor, "batch outputs params"]:
        return torch.cat([part.rows() for part in self._maps()])

    def pieces(self) -> list[Piece]:
        """Of all inputs at once, as they are asked for."""
        return self.tangent.at(self.x).pieces()

    def columns(self) -> Iterator[list[Piece]]:
        return self.tangent.at(self.x).columns()

    def parts(self) -> Iterator[LinearMap]:
        for part in self._maps():
            yield from part.parts()
