"""One rule per operation: how variances of its output become variances of its inputs, m_i = sum_o J[o, i]^2 m_o.

    Selection     J holds zeros and ones: reshapes, slices, concatenation, padding, sums, max-pooling
    Entrywise     J is diagonal: activations, sums and products with broadcasting; J comes from autograd
    Multilinear   y sums products of entries of its arguments: linear, convolutions, matmul; arguments are squared
    ...           softmax and normalisations in closed form, averages and resampling axis by axis (`squares_more`)

Off-diagonal entries of the propagated matrix are dropped, and nothing else: J^2 is exact for every rule. Cost of a
rule: about that of the operation's own backward pass. A new operation needs one rule (docs/extending.md).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from lapwing.errors import UnsupportedOperationError
from lapwing.tangent.convolution import as_tuple
from lapwing.tangent.operations import flat
from lapwing.tangent.rules import ELEMENTWISE, methods

if TYPE_CHECKING:
    from lapwing.tangent.tape import Node, Value

Squares = list[tuple["Value", Tensor]]


class Rule(ABC):
    """`fixed` says that J is the same for every data point, `entrywise` that it is diagonal."""

    entrywise = False
    fixed = False

    def keeps(self, node: Node) -> bool:
        """Whether the arguments of the call are needed on the way back."""
        return True

    @abstractmethod
    def squares(self, node: Node, given: Sequence[Tensor | None]) -> Squares:
        """sum_o J[o, i]^2 m_o for every input that depends on parameters; `given` holds m of each output."""


RULES: dict[Callable, Rule] = {}


def register(rule: Rule, *functions: Callable) -> None:
    """Gives functions (of torch, and the Tensor methods) a rule."""
    RULES.update(dict.fromkeys(functions, rule))


def functional(*names: str) -> list[Callable]:
    """The functions of these names in torch, torch.nn.functional, and on Tensor."""
    found = methods(*names)
    return found + [getattr(F, name) for name in names if hasattr(F, name)]


def propagate(node: Node, given: Sequence[Tensor | None]) -> Squares:
    """The rule of a node, applied; without a rule, the operation has to prove that it works entry by entry."""
    if node.rule is not None:
        return node.rule.squares(node, given)
    only = _proved_entrywise(node, given)
    if only is None:
        raise UnsupportedOperationError(
            f"'{node.name}' has no rule for propagated curvature; expected linear, convolution, pooling, resampling, "
            "normalisation, attention, reshaping or entrywise operations. Register a rule (docs/extending.md, 'A rule "
            "of the tape'), or use a structure that propagates nothing: 'diag', 'kron' or 'full'."
        )
    return only


def _proved_entrywise(node: Node, given: Sequence[Tensor | None]) -> Squares | None:
    """An activation that nobody registered: J^T u = (J^T 1) * u for any u, so that J is diagonal."""
    sources = node.sources
    if len(sources) != 1 or len(node.outs) != 1 or given[0] is None:
        return None
    (source,), (out,) = sources, node.outs
    if out is None or source.shape != out.shape:
        return None
    ones = torch.ones(out.shape, dtype=out.dtype, device=given[0].device)
    probe = torch.cos(3 + torch.arange(ones.numel(), device=ones.device).to(ones.dtype) ** 1.5).reshape(ones.shape)
    (_, slope), *_ = node.pull([ones]) or [(source, torch.zeros_like(ones))]
    (_, pulled), *_ = node.pull([probe]) or [(source, torch.zeros_like(ones))]
    close = torch.allclose(pulled, slope * probe, rtol=1e-4, atol=1e-6 * float(slope.abs().max() + 1e-30))
    return [(source, given[0] * slope.square())] if close else None


# -- zeros and ones -------------------------------------------------------------------------------------------------


class Selection(Rule):
    """Each entry of J is 0 or 1, so J^2 = J and m is pulled back like any cotangent."""

    def __init__(self, fixed: bool = True) -> None:
        self.fixed = fixed

    def keeps(self, node: Node) -> bool:
        return len(node.sources) > 1

    def squares(self, node: Node, given: Sequence[Tensor | None]) -> Squares:
        return node.pull(given)


_SELECTIONS = (
    "reshape", "view", "view_as", "reshape_as", "flatten", "unflatten", "ravel", "permute", "transpose", "t",
    "swapaxes", "swapdims", "movedim", "moveaxis", "squeeze", "unsqueeze", "expand", "expand_as", "broadcast_to",
    "repeat", "tile", "repeat_interleave", "chunk", "split", "split_with_sizes", "tensor_split", "hsplit", "vsplit",
    "unbind", "select", "narrow", "index_select", "gather", "take", "take_along_dim", "masked_select", "cat",
    "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "roll", "flip", "fliplr", "flipud", "rot90",
    "contiguous", "clone", "to", "type", "type_as", "float", "double", "half", "bfloat16", "diagonal", "diag",
    "diag_embed", "unfold", "fold", "sum", "cumsum", "pad", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle",
    "embedding", "adjoint", "positive", "alias", "atleast_1d", "atleast_2d", "atleast_3d", "__getitem__",
    "__setitem__", "copy_", "tril", "triu",
)  # fmt: skip
_DATA_DEPENDENT = (
    "max_pool1d", "max_pool2d", "max_pool3d", "max_pool1d_with_indices", "max_pool2d_with_indices",
    "max_pool3d_with_indices", "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d",
    "adaptive_max_pool1d_with_indices", "adaptive_max_pool2d_with_indices", "adaptive_max_pool3d_with_indices",
    "fractional_max_pool2d", "max_unpool1d", "max_unpool2d", "max_unpool3d", "sort", "topk", "max", "min",
)  # fmt: skip
_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")

register(Selection(), *functional(*_SELECTIONS, *_DROPOUTS))
register(Selection(), *(getattr(Tensor, name).__get__ for name in ("T", "mT", "data", "real")))
register(Selection(fixed=False), *functional(*_DATA_DEPENDENT))


# -- entry by entry -------------------------------------------------------------------------------------------------


class Entrywise(Rule):
    """y[i] = f(x[i], ...): m_i = f'(x_i)^2 m_i for each argument, summed where it was broadcast."""

    entrywise = True

    def keeps(self, node: Node) -> bool:
        return any(out is not None and out.origin is None for out in node.outs)

    def squares(self, node: Node, given: Sequence[Tensor | None]) -> Squares:
        (m,) = given
        assert m is not None
        return [(value, (m * slope.square().to(m.dtype)).sum_to_size(value.shape)) for value, slope in slopes(node, m)]


def slopes(node: Node, like: Tensor) -> list[tuple[Value, Tensor]]:
    """dy/dx entry by entry, of the shape of y, in the base of an entrywise function or in each of its arguments."""
    (out,) = node.outs
    assert out is not None
    if out.origin is not None:
        ones = torch.ones(out.shape, dtype=out.dtype, device=like.device)
        (slope,) = torch.autograd.grad([out.edge], [out.origin.edge], [ones], retain_graph=True)
        return [(out.origin, slope)]
    if node.function in _SUMS and not node.kwargs.get("alpha"):
        one = torch.ones((), dtype=out.dtype, device=like.device)
        return [(value, one) for value in node.inputs.values()]
    tensors = node.given
    leaves = {number: tensors[number].expand(out.shape).clone().requires_grad_() for number in node.inputs}
    with torch.enable_grad():
        # of an operation in place, the first argument is written to
        (y,) = node.again([leaves[i].clone() if i in leaves else tensor for i, tensor in enumerate(tensors)])
        grads = torch.autograd.grad(y.sum(), list(leaves.values()), allow_unused=True)
    return [(node.inputs[i], grad) for i, grad in zip(leaves, grads, strict=True) if grad is not None]


_SUMS = frozenset(methods("add", "add_", "__add__", "__radd__", "__iadd__"))
_ACTIVATIONS = (
    "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "softplus", "softshrink",
    "hardshrink", "hardtanh", "hardswish", "hardsigmoid", "logsigmoid", "softsign", "tanh", "sigmoid", "tanhshrink",
    "threshold", "rrelu", "abs", "neg", "negative", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin",
    "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "sinc", "sqrt", "rsqrt",
    "square", "reciprocal", "erf", "erfc", "erfinv", "logit", "lgamma", "digamma", "clamp", "clamp_min", "clamp_max",
    "clip", "nan_to_num", "masked_fill", "frac", "remainder", "fmod", "special_expit",
)  # fmt: skip
_OPERATORS = ("add", "sub", "mul", "truediv", "div", "pow")
_BOTH = (*_ACTIVATIONS, *ELEMENTWISE)
register(
    Entrywise(),
    *functional(*_BOTH, *(f"{name}_" for name in _BOTH)),
    *methods(*(f"__{side}{name}__" for name in _OPERATORS for side in ("", "r", "i")), "__neg__", "__abs__"),
)


class Prelu(Rule):
    """x where it is positive, else a slope per channel times x."""

    def squares(self, node: Node, given: Sequence[Tensor | None]) -> Squares:
        (m,), (x, weight) = given, node.given
        assert m is not None
        view = (1, -1, *(1,) * (x.dim() - 2)) if x.dim() > 1 else (-1,)
        found: Squares = []
        for number, value in node.inputs.items():
            if number == 0:
                found.append((value, m * torch.where(x > 0, 1.0, weight.reshape(view)).square().to(m.dtype)))
            else:
                per_channel = (m * x.clamp_max(0).square().to(m.dtype)).sum([i for i in range(x.dim()) if i != 1])
                found.append((value, per_channel.sum_to_size(weight.shape)))
        return found


register(Prelu(), *functional("prelu"))


# -- sums of products -----------------------------------------------------------------------------------------------


class Multilinear(Rule):
    """y_o = sum of products of one entry from each argument: with the arguments squared, its vjp holds J^2."""

    def squares(self, node: Node, given: Sequence[Tensor | None]) -> Squares:
        (m,) = given
        assert m is not None
        squared = [t.square().to(m.dtype) if t.is_floating_point() else t for t in node.given]
        leaves = [squared[number].requires_grad_() for number in node.inputs]
        scales = {key: node.kwargs[key] ** 2 for key in ("alpha", "beta") if key in node.kwargs}
        with torch.enable_grad():
            (y,) = replace(node, kwargs=node.kwargs | scales).again(squared)
        grads = torch.autograd.grad([y], leaves, [m])
        return list(zip(node.inputs.values(), grads, strict=True))


class Linear(Multilinear):
    """F.linear, without a second forward pass."""

    def squares(self, node: Node, given: Sequence[Tensor | None]) -> Squares:
        (m,), (x, weight, *_) = given, node.given
        if node.kwargs or x.dim() < 2:  # arguments in an order of their own, a single vector
            return super().squares(node, given)
        assert m is not None
        found: Squares = []
        for number, value in node.inputs.items():
            if number == 0:
                found.append((value, m @ weight.square().to(m.dtype)))
            elif number == 1:
                found.append((value, m.flatten(0, -2).mT @ x.square().to(m.dtype).flatten(0, -2)))
            else:
                found.append((value, m.flatten(0, -2).sum(0)))
        return found


class Convolution(Multilinear):
    """Convolutions and their transposes, by the backward kernel alone."""

    def __init__(self, dims: int, transposed: bool) -> None:
        self.dims, self.transposed = dims, transposed

    def squares(self, node: Node, given: Sequence[Tensor | None]) -> Squares:
        names = ("input", "weight", "bias", "stride", "padding")
        names += ("output_padding", "groups", "dilation") if self.transposed else ("dilation", "groups")
        defaults = {"stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1}
        options = defaults | dict(zip(names, node.args, strict=False)) | node.kwargs
        (m,), (x, weight, *_) = given, node.given
        if isinstance(options["padding"], str) or x.dim() != self.dims + 2 or flat((), node.kwargs):
            return super().squares(node, given)
        assert m is not None
        stride, padding, dilation, extra = (
            list(as_tuple(options[name], self.dims)) for name in ("stride", "padding", "dilation", "output_padding")
        )
        wanted = [number in node.inputs for number in range(3)]
        sizes = [m.shape[1]] if wanted[2] else None
        grads = torch.ops.aten.convolution_backward(
            m.contiguous(), x.square().to(m.dtype), weight.square().to(m.dtype), sizes, stride, padding, dilation,
            self.transposed, extra, options["groups"], wanted,
        )  # fmt: skip
        return [(value, grads[number]) for number, value in node.inputs.items()]


register(Linear(), F.linear)
register(
    Multilinear(),
    *methods("matmul", "mm", "bmm", "mv", "dot", "inner", "outer", "__matmul__", "__rmatmul__", "tensordot"),
    *methods("addmm", "baddbmm", "addbmm", "addmv"),
    *(torch.einsum, torch.linalg.matmul, F.bilinear),
)
for _dims, _forward, _back in (
    (1, F.conv1d, F.conv_transpose1d),
    (2, F.conv2d, F.conv_transpose2d),
    (3, F.conv3d, F.conv_transpose3d),
):
    register(Convolution(_dims, transposed=False), _forward)
    register(Convolution(_dims, transposed=True), _back)
