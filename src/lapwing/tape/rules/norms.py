"""Rules of the tape in closed form: softmax and normalisations, in time linear in the entries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lapwing.errors import UnsupportedOperationError
from lapwing.tape.nodes import Node, Rule
from lapwing.tape.rules.kinds import Squares, functional, register

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
            lambda: _summed(plain, lead), _summed(m, lead),
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
        plain = (m.flatten(-inner) * z.square()).reshape(m.shape)
        back = n * (1 - 2 * z.square() / d) + z.square() * (n * z.square()).sum(-1, keepdim=True) / d**2
        return _affine(node, bound, lambda: back.reshape(x.shape), lambda: _summed(plain, range(x.dim() - inner)), m)


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


def _summed(values: Tensor, axes: Sequence[int]) -> Tensor:
    return values.sum(list(axes)) if axes else values


register(BatchNorm(), F.batch_norm)
register(LayerNorm(), *functional("layer_norm"))
register(GroupNorm(), *functional("group_norm"), F.instance_norm)
register(RmsNorm(), *functional("rms_norm"))


# -- unit length, and slopes per channel -----------------------------------------------------------------------------


class Normalize(Rule):
    """y = x / r with r a norm of x and g its gradient:  m_i -> (m_i (1 - 2 y_i g_i) + g_i^2 sum_o y_o^2 m_o) / r^2."""

    def squares(self, node: Node, given: Sequence[Tensor | None]) -> Squares:
        bound = _bound(node, "input", "p", "dim", "eps")
        (m,), (source,), x = given, node.sources, bound["input"]
        assert m is not None
        p, dim, eps = (default if bound[key] is None else bound[key] for key, default in _NORMALIZE)
        return [(source, _unit_length(x.to(m.dtype), m, dim, p, eps))]


_NORMALIZE = (("p", 2.0), ("dim", 1), ("eps", 1e-12))


class WeightNorm(Rule):
    """w = g v / |v|, norms over all axes but one."""

    def squares(self, node: Node, given: Sequence[Tensor | None]) -> Squares:
        bound = _bound(node, "v", "g", "dim")
        (m,), v, g = given, bound["v"], bound["g"]
        assert m is not None
        dim = 0 if bound["dim"] is None else bound["dim"]
        rest = [axis for axis in range(v.dim()) if dim == -1 or axis != dim % v.dim()]
        unit = v / torch.linalg.vector_norm(v, dim=rest, keepdim=True)
        found: Squares = []
        for number, value in node.inputs.items():
            if number == 0:
                found.append((value, _unit_length(v, m * g.square(), rest, 2.0, 0.0)))
            else:
                found.append((value, (m * unit.square()).sum_to_size(g.shape)))
        return found


def _unit_length(x: Tensor, m: Tensor, dim: Any, p: float, eps: float) -> Tensor:
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        r = torch.linalg.vector_norm(leaf, p, dim=dim, keepdim=True).clamp_min(eps)
        (slope,) = torch.autograd.grad(r.sum(), leaf)
    r = r.detach()
    y = x / r
    return (m * (1 - 2 * y * slope) + slope.square() * (y.square() * m).sum(dim, keepdim=True)) / r.square()


class Prelu(Rule):
    """x where it is positive, else a slope per channel times x."""

    def squares(self, node: Node, given: Sequence[Tensor | None]) -> Squares:
        bound = _bound(node, "input", "weight")
        (m,), x, weight = given, bound["input"], bound["weight"]
        assert m is not None
        view = (1, -1, *(1,) * (x.dim() - 2)) if x.dim() > 1 else (-1,)
        wide = weight.reshape(view)
        return _affine(
            node, bound, lambda: m * torch.where(x > 0, 1.0, wide).square().to(m.dtype),
            lambda: (m * x.clamp_max(0).square().to(m.dtype)).sum_to_size(wide.shape).reshape(weight.shape), m,
        )  # fmt: skip


register(Normalize(), F.normalize)
register(WeightNorm(), torch._weight_norm)
register(Prelu(), *functional("prelu"))
