"""One rule per operation: how variances of its output become variances of its inputs, m_i = sum_o J[o, i]^2 m_o.

    Selection     J holds zeros and ones: reshapes, slices, concatenation, padding, sums, max-pooling
    Entrywise     J is diagonal: activations, sums and products with broadcasting; J comes from autograd
    Reduction     an entry goes into one entry of the output: norms, variances, maxima, products, gates
    Multilinear   linear, convolutions, matmul: with the arguments squared (`products`)
    ...           averages and resampling axis by axis (`resampling`), softmax and normalisations in closed
                  form (`norms`)

Off-diagonal entries of the propagated matrix are dropped, and nothing else: J^2 is exact for every rule. (A product of
a tensor with itself counts it as two tensors.) Cost of a rule: about that of the operation's own backward pass. A new
operation needs one rule (docs/extending.md). What is made of parameters alone needs none: its J is spelled out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
import torch.nn.functional as F
from torch import Tensor

from lapwing.errors import UnsupportedOperationError
from lapwing.linalg.budget import chunks, intermediate_bytes
from lapwing.tangent.operations import RECURRENT, WRITING, flat, traits
from lapwing.tangent.quiet import quiet
from lapwing.tangent.rules import ELEMENTWISE, methods
from lapwing.tape.nodes import Node, Rule, Squares, Value

RULES: dict[Callable, Rule] = {}


def register(rule: Rule, *functions: Callable) -> None:
    """Gives functions (of torch, and the Tensor methods) a rule."""
    RULES.update(dict.fromkeys(functions, rule))


def functional(*names: str) -> list[Callable]:
    """The functions of these names in torch, torch.nn.functional, and on Tensor."""
    return methods(*names) + [getattr(F, name) for name in names if hasattr(F, name)]


def propagate(node: Node, given: Sequence[Tensor | None]) -> Squares:
    """The rule of a node, applied; without a rule, the operation has to prove that it works entry by entry."""
    if node.rule is not None:
        return node.rule.squares(node, given)
    only = _proved_entrywise(node, given)
    if only is not None:
        return only
    size = max(0 if out is None else out.shape.numel() for out in node.outs)
    if node.derived and node.function not in RECURRENT and size <= SPELLED_OUT:
        return spelled_out(node, given)
    raise UnsupportedOperationError(
        f"'{node.name}' has no rule for propagated curvature; expected linear, convolution, pooling, resampling, "
        "normalisation, attention, reshaping or entrywise operations. Register a rule (docs/extending.md, 'A rule "
        "of the tape'), or use a structure that propagates nothing: 'diag', 'kron' or 'full'."
    )


SPELLED_OUT = 2**12
"""Entries of a tensor made of parameters alone up to which its J is spelled out, in every batch: 64 x 64 weights."""


def _proved_entrywise(node: Node, given: Sequence[Tensor | None]) -> Squares | None:
    """An activation that nobody registered: J^T u = (J^T 1) * u for any u, so that J is diagonal."""
    sources = node.sources
    if len(sources) != 1 or len(node.outs) != 1 or given[0] is None:
        return None
    (source,), (out,) = sources, node.outs
    if out is None or source.shape != out.shape or out.dtype.is_complex:
        return None
    ones = torch.ones(out.shape, dtype=out.dtype, device=given[0].device)
    probe = torch.cos(3 + torch.arange(ones.numel(), device=ones.device).to(ones.dtype) ** 1.5).reshape(ones.shape)
    slope, pulled = ((node.pull([u]) or [(source, torch.zeros_like(ones))])[0][1] for u in (ones, probe))
    close = torch.allclose(pulled, slope * probe, rtol=1e-4, atol=1e-6 * float(slope.abs().max() + 1e-30))
    return [(source, given[0] * slope.square().to(given[0].dtype))] if close else None


def spelled_out(node: Node, given: Sequence[Tensor | None]) -> Squares:
    """Any operation, by one backward pass per entry of its output; for what is made of parameters alone."""
    held: dict[Value, Tensor] = {}
    for number, m in enumerate(given):
        if m is None:
            continue
        each = 2 * m.element_size() * (m.numel() + sum(source.shape.numel() for source in node.sources))
        for part in chunks(m.numel(), each, intermediate_bytes() // 4):
            index = torch.arange(part.start, part.stop, device=m.device)
            units = m.new_zeros(len(index), m.numel())
            units[index - part.start, index] = 1
            for value, rows in _rows(node, units.reshape(-1, *m.shape), number):
                share = torch.einsum("r, r ... -> ...", m.flatten()[part], rows.to(m.dtype).square())
                held[value] = held[value] + share if value in held else share
    return list(held.items())


def _rows(node: Node, units: Tensor, number: int) -> Squares:
    """J^T u for a leading axis of cotangents of one output, summed over the slots that a value was given in."""
    empty: list[Tensor | None] = [None] * len(node.outs)
    pulled = None
    if not torch.is_anomaly_enabled():  # see batched_grad
        with suppress(RuntimeError), quiet():
            pulled = node.pull([*empty[:number], units, *empty[number + 1 :]], batched=True)
    if pulled is None:
        each = [node.pull([*empty[:number], unit, *empty[number + 1 :]]) for unit in units]
        pulled = [(values[0][0], torch.stack([grad for _, grad in values])) for values in zip(*each, strict=True)]
    held: dict[Value, Tensor] = {}
    for value, grad in pulled:
        held[value] = held[value] + grad if value in held else grad
    return list(held.items())


# -- zeros and ones -------------------------------------------------------------------------------------------------


class Selection(Rule):
    """Each entry of J is 0 or 1, so J^2 = J and m is pulled back like any cotangent."""

    def __init__(self, fixed: bool = True) -> None:
        self.fixed = fixed

    def keeps(self, node: Node) -> bool:
        return len(node.sources) > 1 or not self.fixed  # kfra asks which entries were chosen

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
    "adjoint", "positive", "alias", "atleast_1d", "atleast_2d", "atleast_3d", "__getitem__",
    "__setitem__", "copy_", "tril", "triu", "masked_scatter", "masked_scatter_", "scatter", "scatter_", "scatter_add",
    "scatter_add_", "index_copy", "index_copy_", "nansum", "trace", "block_diag", "broadcast_tensors",
)  # fmt: skip
_DATA_DEPENDENT = (
    "max_pool1d", "max_pool2d", "max_pool3d", "max_pool1d_with_indices", "max_pool2d_with_indices",
    "max_pool3d_with_indices", "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d",
    "adaptive_max_pool1d_with_indices", "adaptive_max_pool2d_with_indices", "adaptive_max_pool3d_with_indices",
    "fractional_max_pool2d", "max_unpool1d", "max_unpool2d", "max_unpool3d", "sort", "topk", "msort",
)  # fmt: skip
_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")

register(Selection(), *functional(*_SELECTIONS, *_DROPOUTS))
register(Selection(), *(getattr(Tensor, name).__get__ for name in ("T", "mT", "data", "real")))
register(Selection(fixed=False), *functional(*_DATA_DEPENDENT))


class Embedding(Selection):
    """Rows of a table; gradients by frequency are no derivatives."""

    def keeps(self, node: Node) -> bool:
        return True

    def squares(self, node: Node, given: Sequence[Tensor | None]) -> Squares:
        names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq")
        if (dict(zip(names, node.args, strict=False)) | node.kwargs).get("scale_grad_by_freq"):
            raise UnsupportedOperationError(
                "'embedding' divides its gradients by the frequency of a token, so that they are not those of its "
                "output; expected scale_grad_by_freq=False. Build the layer without it."
            )
        return super().squares(node, given)


register(Embedding(), F.embedding)


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
    function = node.function
    if out.origin is not None:
        ones = torch.ones(out.shape, dtype=out.dtype, device=like.device)
        (slope,) = torch.autograd.grad([out.edge], [out.origin.edge], [ones], retain_graph=True)
        return [(out.origin, slope)]
    if function in _SUMS and "alpha" not in node.kwargs:
        one = torch.ones((), dtype=out.dtype, device=like.device)
        return [(value, one) for value in node.inputs.values()]
    tensors = node.given
    leaves = {number: tensors[number].expand(out.shape).clone().requires_grad_() for number in node.inputs}
    if traits(function)[1] is WRITING:  # the copy is written to, and not what is on the tape
        tensors[0] = tensors[0].clone()
    with torch.enable_grad():
        given = [leaves[i].clone() if i in leaves else tensor for i, tensor in enumerate(tensors)]
        # the value of masked_fill may not have a shape
        (y,) = [torch.where(given[1], given[2], given[0])] if function in _FILLS else node.again(given)
        grads = torch.autograd.grad(y.sum(), list(leaves.values()), allow_unused=True)
    return [(node.inputs[i], grad) for i, grad in zip(leaves, grads, strict=True) if grad is not None]


_SUMS = frozenset(methods("add", "add_", "__add__", "__radd__", "__iadd__"))
_FILLS = frozenset(methods("masked_fill", "masked_fill_"))
_ACTIVATIONS = (
    "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "softplus", "softshrink",
    "hardshrink", "hardtanh", "hardswish", "hardsigmoid", "logsigmoid", "softsign", "tanh", "sigmoid", "tanhshrink",
    "threshold", "rrelu", "abs", "neg", "negative", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin",
    "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "sinc", "sqrt", "rsqrt",
    "square", "reciprocal", "erf", "erfc", "erfinv", "logit", "lgamma", "digamma", "clamp", "clamp_min", "clamp_max",
    "clip", "nan_to_num", "masked_fill", "frac", "remainder", "fmod", "sign", "floor", "ceil",
    "round", "trunc",
)  # fmt: skip
_OPERATORS = ("add", "sub", "mul", "truediv", "div", "pow")
_BOTH = (*_ACTIVATIONS, *ELEMENTWISE)
register(
    Entrywise(),
    *functional(*_BOTH, *(f"{name}_" for name in _BOTH)),
    *methods(*(f"__{side}{name}__" for name in _OPERATORS for side in ("", "r", "i")), "__neg__", "__abs__"),
)


class Reduction(Rule):
    """Each entry of the input goes into one entry of each output, so that J^2 m = (J^T 1) * (J^T m)."""

    def keeps(self, node: Node) -> bool:
        return len(flat(node.args, node.kwargs)) > 1

    def squares(self, node: Node, given: Sequence[Tensor | None]) -> Squares:
        if self.keeps(node):
            return self._broadcast(node, given)
        found: Squares = []
        for number, m in enumerate(given):
            if m is not None:
                alone: list[Tensor | None] = [None] * len(given)
                alone[number] = torch.ones_like(m)
                slopes = node.pull(alone)
                alone[number] = m
                found += [
                    (value, slope.to(m.dtype) * grad)
                    for (value, slope), (_, grad) in zip(slopes, node.pull(alone), strict=True)
                ]
        return found

    def _broadcast(self, node: Node, given: Sequence[Tensor | None]) -> Squares:
        """Several arguments: entry by entry in what each becomes when it is broadcast."""
        (m,), tensors = given, node.given
        assert m is not None
        shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
        leaves = {number: tensors[number].expand(shape).clone().requires_grad_() for number in node.inputs}
        with torch.enable_grad():
            (y,) = node.again([leaves.get(number, tensor) for number, tensor in enumerate(tensors)])
        starts = list(leaves.values())
        slopes = torch.autograd.grad([y], starts, [torch.ones_like(y)], retain_graph=True)
        grads = torch.autograd.grad([y], starts, [m.to(y.dtype)])
        return [
            (value, (slope * grad).to(m.dtype).sum_to_size(value.shape))
            for value, slope, grad in zip(node.inputs.values(), slopes, grads, strict=True)
        ]


class Extremum(Reduction):
    """max and min of one tensor, or entry by entry of two."""

    def squares(self, node: Node, given: Sequence[Tensor | None]) -> Squares:
        return Entrywise().squares(node, given) if self.keeps(node) else super().squares(node, given)


register(Extremum(), *methods("max", "min"))
register(
    Reduction(),
    *methods("amax", "amin", "aminmax", "median", "nanmedian", "mode", "kthvalue", "prod", "nanmean", "logsumexp"),
    *methods("var", "std", "var_mean", "std_mean", "norm", "dist", "det", "logdet", "slogdet"),
    *(torch.linalg.norm, torch.linalg.vector_norm, torch.linalg.matrix_norm, torch.linalg.det, torch.linalg.slogdet),
    *(torch.special.logsumexp, F.glu, F.cosine_similarity, F.pairwise_distance),
)
