"""Rules of the tape for averages and resampling: one small matrix per axis, read off the operation itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lapwing.tangent.rules import methods
from lapwing.tape.nodes import Node, Rule
from lapwing.tape.rules.kinds import Selection, Squares, functional, register


class Mean(Rule):
    """Every entry of J is 0 or 1 / count."""

    fixed = True

    def keeps(self, node: Node) -> bool:
        return False

    def squares(self, node: Node, given: Sequence[Tensor | None]) -> Squares:
        (m,), (source,), (out,) = given, node.sources, node.outs
        assert m is not None
        assert out is not None
        return node.pull([m * (out.shape.numel() / source.shape.numel())])


class Resampling(Rule):
    """A product of one matrix per axis of space: averages over windows, linear and cubic interpolation.

    The matrices are read off the operation itself, so that padding, ceil_mode, divisors and alignment need no words.
    """

    fixed = True

    def squares(self, node: Node, given: Sequence[Tensor | None]) -> Squares:
        (m,), (source,), (out,) = given, node.sources, node.outs
        assert m is not None
        assert out is not None
        dims = _space(node)
        kwargs = {key: value for key, value in node.kwargs.items() if key != "input"}
        key = tuple(node.args[1:]), tuple(sorted(kwargs.items()))
        for axis, matrix in enumerate(_matrices(node.function, _hashable(key), tuple(source.shape[-dims:]))):
            at = axis - dims
            m = (m.movedim(at, -1) @ matrix.to(m)).movedim(-1, at)
        return [(source, m)]


def _space(node: Node) -> int:
    """The number of axes that are resampled."""
    digits = [int(c) for c in node.name if c.isdigit()]
    source = node.sources[0]
    return digits[0] if digits else len(source.shape) - 2


def _hashable(value: Any) -> Any:
    return tuple(_hashable(v) for v in value) if isinstance(value, (tuple, list)) else value


@lru_cache(maxsize=64)
def _matrices(function: Callable, key: tuple, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """[out_k, in_k] with squared entries, for each axis k. y(unit along k, ones elsewhere) is U_k times row sums of
    the other axes, which a response to ones divides out."""
    args, kwargs = key[0], dict(key[1])
    response = function(torch.ones(1, 1, *sizes, dtype=torch.float64), *args, **kwargs)[0, 0]
    middle = [size // 2 for size in response.shape]
    whole = float(response[tuple(middle)])
    found = []
    for axis, size in enumerate(sizes):
        view = [1] * len(sizes)
        view[axis] = size
        units = torch.eye(size, dtype=torch.float64).reshape(size, 1, *view).expand(size, 1, *sizes).contiguous()
        at: list[Any] = [slice(None), 0, *middle]
        at[2 + axis] = slice(None)
        found.append(function(units, *args, **kwargs)[tuple(at)].T.square())
    found[0] = found[0] / whole ** (2 * (len(sizes) - 1))
    return tuple(found)


register(Mean(), *methods("mean"))
register(
    Resampling(),
    *functional("avg_pool1d", "avg_pool2d", "avg_pool3d"),
    *functional("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"),
    *(F.interpolate, F.upsample, F.upsample_bilinear),
)
register(Selection(), F.upsample_nearest)
