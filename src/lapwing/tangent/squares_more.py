"""Rules of the tape for operations that mix entries in closed form: averages, resampling, softmax, normalisations.

Each gives sum_o J[o, i]^2 m_o exactly, in time linear in the entries (resampling: one small product per axis).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lapwing.errors import UnsupportedOperationError
from lapwing.tangent.rules import methods
from lapwing.tangent.squares import RULES, Rule, Selection, Squares, functional, register

if TYPE_CHECKING:
    from lapwing.tangent.tape import Node

__all__ = ["RULES"]  # complete once this module is loaded

# -- averages and resampling ----------------------------------------------------------------------------------------


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
        if node.kwargs.get("mode", node.args[3] if node.function is F.interpolate and len(node.args) > 3 else "") in (
            "nearest", "nearest-exact",
        ):  # fmt: skip
            return node.pull(given)
        key = tuple(node.args[1:]), tuple(sorted(node.kwargs.items()))
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
    kwargs.pop("input", None)
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


# -- softmax --------------------------------------------------------------------------------------------------------


class Softmax(Rule):
    """J = diag(p) - p p^T:  m_i -> p_i^2 (m_i (1 - 2 p_i) + sum_o p_o^2 m_o)."""

    def squares(self, node: Node, given: Sequence[Tensor | None]) -> Squares:
        (m,), (source,) = given, node.sources
        assert m is not None
        p, dim = _probabilities(node, m.dtype)
        weighted = (p.square() * m).sum(dim, keepdim=True)
        return [(source, p.square() * (m * (1 - 2 * p) + weighted))]


class LogSoftmax(Rule):
    """J = I - 1 p^T:  m_i -> m_i (1 - 2 p_i) + p_i^2 sum_o m_o."""

    def squares(self, node: Node, given: Sequence[Tensor | None]) -> Squares:
        (m,), (source,) = given, node.sources
        assert m is not None
        p, dim = _probabilities(node, m.dtype)
        return [(source, m * (1 - 2 * p) + p.square() * m.sum(dim, keepdim=True))]


def _probabilities(node: Node, dtype: torch.dtype) -> tuple[Tensor, int]:
    (x,) = node.given
    bound = dict(zip(("input", "dim"), node.args, strict=False)) | node.kwargs
    dim = bound.get("dim")
    if not isinstance(dim, int):
        raise UnsupportedOperationError(f"'{node.name}' is called without an axis; expected dim=... to be given.")
    return torch.softmax(x.to(dtype), dim), dim


register(Softmax(), *functional("softmax"), torch.special.softmax)
register(LogSoftmax(), *functional("log_softmax"), torch.special.log_softmax)


# -- normalisations -------------------------------------------------------------------------------------------------


class BatchNorm(Rule):
    """With running statistics: a scale and a shift per channel."""

    fixed = True

    def squares(self, node: Node, given: Sequence[Tensor | None]) -> Squares:
        bound = _bound(node, "input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
        (m,) = given
        assert m is not None
        x, weight = bound["input"], bound["weight"]
        view = (1, -1, *(1,) * (x.dim() - 2))
        rest = [axis for axis in range(x.dim()) if axis != 1]
        scale = (bound["running_var"] + (1e-5 if bound["eps"] is None else bound["eps"])).rsqrt()
        plain = (x - bound["running_mean"].reshape(view)) * scale.reshape(view)
        scale = scale if weight is None else scale * weight
        return _affine(
            node, bound, lambda: m * scale.square().reshape(view), lambda: (m * plain.square()).sum(rest), m.sum(rest)
        )


class LayerNorm(Rule):
    """Over the last axes, with n = weight^2 m / var, d entries and z the normalised input:

    m_i -> n_i (1 - 2 (1 + z_i^2) / d) + (sum n + 2 z_i sum n z + z_i^2 sum n z^2) / d^2
    """

    def squares(self, node: Node, given: Sequence[Tensor | None]) -> Squares:
        names = ("input", "normalized_shape", "weight", "bias", "eps")
        bound = _bound(node, *names)
        (m,) = given
        assert m is not None
        x, weight = bound["input"], bound["weight"]
        inner = len(bound["normalized_shape"])
        lead = list(range(x.dim() - inner))
        flat = x.flatten(-inner)
        variance, mean = torch.var_mean(flat, -1, correction=0, keepdim=True)
        scale = (variance + (1e-5 if bound["eps"] is None else bound["eps"])).rsqrt()
        z = (flat - mean) * scale
        n = (m if weight is None else m * weight.square()).flatten(-inner)
        plain = (m.flatten(-inner) * z.square()).reshape(m.shape)
        return _affine(
            node, bound, lambda: _normalised(n * scale.square(), z).reshape(x.shape),
            lambda: plain.sum(lead), m.sum(lead),
        )  # fmt: skip


class GroupNorm(Rule):
    """The same over the channels of a group and all positions; instance_norm has one group per channel."""

    def squares(self, node: Node, given: Sequence[Tensor | None]) -> Squares:
        (m,) = given
        assert m is not None
        if node.function is F.instance_norm:
            names = ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps")
            bound = _bound(node, *names)
            if bound["use_input_stats"] is False:
                return BatchNorm().squares(node, given)
            groups = bound["input"].shape[1]
        else:
            bound = _bound(node, "input", "num_groups", "weight", "bias", "eps")
            groups = bound["num_groups"]
        x, weight = bound["input"], bound["weight"]
        view = (1, -1, *(1,) * (x.dim() - 2))
        rest = [axis for axis in range(x.dim()) if axis != 1]
        grouped = x.reshape(x.shape[0], groups, -1)
        variance, mean = torch.var_mean(grouped, -1, correction=0, keepdim=True)
        scale = (variance + (1e-5 if bound["eps"] is None else bound["eps"])).rsqrt()
        z = (grouped - mean) * scale
        n = (m if weight is None else m * weight.square().reshape(view)).reshape(grouped.shape)
        return _affine(
            node, bound, lambda: _normalised(n * scale.square(), z).reshape(x.shape),
            lambda: (m * z.reshape(x.shape).square()).sum(rest), m.sum(rest),
        )  # fmt: skip


class RmsNorm(Rule):
    """z = x / rms:  m_i -> n_i (1 - 2 z_i^2 / d) + z_i^2 sum n z^2 / d^2."""

    def squares(self, node: Node, given: Sequence[Tensor | None]) -> Squares:
        bound = _bound(node, "input", "normalized_shape", "weight", "eps")
        (m,) = given
        assert m is not None
        x, weight = bound["input"], bound["weight"]
        inner = len(bound["normalized_shape"])
        flat = x.flatten(-inner)
        eps = torch.finfo(x.dtype).eps if bound["eps"] is None else bound["eps"]
        scale = (flat.square().mean(-1, keepdim=True) + eps).rsqrt()
        z, d = flat * scale, flat.shape[-1]
        n = (m if weight is None else m * weight.square()).flatten(-inner) * scale.square()
        plain = (m.flatten(-inner) * z.square()).reshape(m.shape).sum(list(range(x.dim() - inner)))
        back = n * (1 - 2 * z.square() / d) + z.square() * (n * z.square()).sum(-1, keepdim=True) / d**2
        return _affine(node, bound, lambda: back.reshape(x.shape), lambda: plain, m)


def _normalised(n: Tensor, z: Tensor) -> Tensor:
    """J^2 of (x - mean) / deviation over the last axis; see `LayerNorm`."""
    d = n.shape[-1]
    first, second = (n * z).sum(-1, keepdim=True), (n * z.square()).sum(-1, keepdim=True)
    spread = n.sum(-1, keepdim=True) + 2 * z * first + z.square() * second
    return n * (1 - 2 * (1 + z.square()) / d) + spread / d**2


def _bound(node: Node, *names: str) -> dict[str, Any]:
    """Arguments by name, tensors as the operation saw them."""
    left = iter(node.given)
    args = [next(left) if isinstance(value, Tensor) else value for value in node.args]
    kwargs = {key: next(left) if isinstance(value, Tensor) else value for key, value in node.kwargs.items()}
    found = dict(zip(names, args, strict=False)) | kwargs
    return dict.fromkeys(names) | found


def _affine(
    node: Node, bound: dict[str, Any], back: Callable[[], Tensor], weight: Callable[[], Tensor], bias: Tensor
) -> Squares:
    """Which of input, weight and bias the tracked arguments are, and what goes back to them."""
    order = [key for key in _order(node, bound) if isinstance(bound[key], Tensor)]
    found: Squares = []
    for number, value in node.inputs.items():
        role = order[number]
        if role not in ("input", "weight", "bias"):
            raise UnsupportedOperationError(
                f"the {role} of '{node.name}' depends on parameters; expected the input, weight or bias to."
            )
        m = back() if role == "input" else weight() if role == "weight" else bias
        found.append((value, m))
    return found


def _order(node: Node, bound: dict[str, Any]) -> list[str]:
    positional = list(bound)[: len(node.args)]
    return positional + [key for key in node.kwargs if key not in positional]


register(BatchNorm(), F.batch_norm)
register(LayerNorm(), *functional("layer_norm"))
register(GroupNorm(), *functional("group_norm"), F.instance_norm)
register(RmsNorm(), *functional("rms_norm"))
