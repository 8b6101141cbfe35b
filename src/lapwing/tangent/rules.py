"""Rules: from one call of an operation that reads parameters and data to a `Use`.

`RULES[function]` takes a `Call` and returns the use, or None when the arguments are outside what the rule covers (the
parameters are then differentiated sample by sample, where the structure allows it). To support a new operation, write
one function and register it; docs/extending.md walks through an example.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lapwing.linalg.budget import CACHE
from lapwing.tangent.convolution import (
    as_tuple,
    channels_last,
    padded,
    patches,
    spread_out,
    transposed_patches,
    weight_axes,
)
from lapwing.tangent.patch_products import Kernel, PatchProducts, patch_products
from lapwing.tangent.sources import Source, unrepeated
from lapwing.tangent.uses import Broadcast, Contraction, Lookup, Use


@dataclass
class Call:
    """One call as the recorder saw it. `source(t)` is where a tensor's parameters came from, None for data.

    What a rule keeps for later keeps what it needs of the call, and not the call, which holds the output.
    """

    function: Callable
    args: tuple
    kwargs: dict
    out: Tensor
    source: Callable[[Any], Source | None]

    def bind(self, *names: str, **defaults: Any) -> list:
        """Arguments by name, for operations without a Python signature."""
        values = defaults | dict(zip(names, self.args, strict=False)) | self.kwargs
        return list(map(values.get, names))


Rule = Callable[[Call], Use | None]
RULES: dict[Callable, Rule] = {}


def rule(*functions: Callable) -> Callable[[Rule], Rule]:
    """Registers a rule for functions (the torch function, and its Tensor methods)."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(functions, function))
        return function

    return register


def methods(*names: str) -> list[Callable]:
    """The functions of these names in torch and on Tensor."""
    found = [getattr(owner, name, None) for name in names for owner in (torch, Tensor)]
    return [function for function in found if callable(function)]  # torch.float is none


# -- contractions ---------------------------------------------------------------------------------------------------


def with_ones(values: Tensor, ones: bool) -> Tensor:
    """[..., i] -> [..., i + 1] with ones in the last column, which meet the bias."""
    return torch.cat([values, values.new_ones(*values.shape[:-1], 1)], dim=-1) if ones else values


def contraction(
    name: str, x: Tensor, weight: Tensor, labels: tuple[Sequence, Sequence, Sequence], call: Call, bias: Tensor | None
) -> Use | None:
    """y = sum over shared labels of x and weight, each axis named by a label (x, weight, y in this order)."""
    in_x, in_w, in_y = (list(axis_labels) for axis_labels in labels)
    if any(len(set(axis_labels)) < len(axis_labels) for axis_labels in (in_x, in_w, in_y)):
        return None  # a repeated label is a diagonal
    size = dict(zip(in_w, weight.shape, strict=True)) | dict(zip(in_y, call.out.shape, strict=True))
    position = [label for label in in_y if label not in in_w]
    group = [label for label in in_y if label in in_w and label in in_x]
    row = [label for label in in_y if label in in_w and label not in in_x]
    col = [label for label in in_w if label in in_x and label not in in_y]
    idle = [label for label in in_w if label not in in_x and label not in in_y]
    if any(label not in in_x for label in position) or any(size[label] > 1 for label in idle):
        return None
    summed = [axis for axis, label in enumerate(in_x) if label not in in_y and label not in in_w]
    size |= {label: n for label, n in zip(in_x, x.shape, strict=True) if label in col}
    k, o, i = (prod(size[label] for label in part) for part in (group, row, col))
    count = len(position)

    def right(ones: bool) -> Tensor:
        values = x.sum(summed) if summed else x
        kept = [label for label in in_x if label in in_y or label in in_w]
        values = values.permute([kept.index(label) for label in position + group + col])
        sizes = [size[label] for label in position + group]
        values = values.expand(*sizes, *values.shape[len(sizes) :])
        return with_ones(values.reshape(*sizes[:count], k, i), ones)

    def left(y: Tensor) -> Tensor:
        y = y.permute(0, *(1 + in_y.index(label) for label in position + group + row))
        return y.reshape(*y.shape[: 1 + count], k, o)

    perm = tuple(in_w.index(label) for label in idle + group + row + col)
    weight_source = call.source(weight)
    bias_source = None if bias is None else call.source(bias)
    if (
        bias_source is not None
        and bias is not None
        and (bias.numel() != k * o or in_y[-len(group + row) :] != group + row)
    ):
        return None
    return Contraction(name, weight_source, bias_source, tuple(weight.shape), perm, k, o, i, right, left)


@rule(F.linear)
def linear(call: Call) -> Use | None:
    x, weight, bias = call.bind("input", "weight", "bias")
    if weight.dim() != 2 or call.source(x) is not None:
        return None
    bias_source = None if bias is None else call.source(bias)
    o, i = weight.shape
    return Contraction(
        "linear", call.source(weight), bias_source, (o, i), (0, 1), 1, o, i,
        lambda ones: with_ones(x.unsqueeze(-2), ones), lambda y: y.unsqueeze(-2),
    )  # fmt: skip


def product(call: Call, a: Tensor, b: Tensor, name: str, bias: Tensor | None = None) -> Use | None:
    """a @ b with the parameter on either side, batch axes broadcast."""
    on_left, on_right = call.source(a) is not None, call.source(b) is not None
    if on_left == on_right:
        return None
    lead_a, lead_b = max(a.dim() - 2, 0), max(b.dim() - 2, 0)
    lead = max(lead_a, lead_b)
    batch = [f"b{axis}" for axis in range(lead)]
    in_a = [*batch[lead - lead_a :], *(["s", "i"] if a.dim() > 1 else ["i"])]
    in_b = [*batch[lead - lead_b :], *(["i", "o"] if b.dim() > 1 else ["i"])]
    in_y = [*batch, *(["s"] if a.dim() > 1 else []), *(["o"] if b.dim() > 1 else [])]
    weight, x, in_w, in_x = (a, b, in_a, in_b) if on_left else (b, a, in_b, in_a)
    # a batch axis of size one in the weight is broadcast, not a group: it gets a label of its own
    in_w = [f"{label}w" if label in batch and n == 1 else label for label, n in zip(in_w, weight.shape, strict=True)]
    return contraction(name, x, weight, (in_x, in_w, in_y), call, bias)


@rule(*methods("matmul", "mm", "bmm", "mv", "__matmul__", "__rmatmul__"), torch.linalg.matmul)
def matmul(call: Call) -> Use | None:
    operands = dict(enumerate(call.args)) | call.kwargs
    a = operands.get(0, operands.get("input"))
    b = next((operands[key] for key in (1, "other", "mat2", "vec", "tensor2") if key in operands), None)
    if a is None or b is None:
        return None
    if getattr(call.function, "__name__", "") == "__rmatmul__":
        a, b = b, a
    return product(call, a, b, "matmul")


@rule(*methods("addmm", "baddbmm", "addbmm"))
def addmm(call: Call) -> Use | None:
    bias, a, b = call.bind("input", "mat1", "mat2")
    name = getattr(call.function, "__name__", "addmm")
    if a is None:
        bias, a, b = call.bind("input", "batch1", "batch2")
    if any(call.kwargs.get(scale, 1) != 1 for scale in ("alpha", "beta")) or name == "addbmm" or len(call.args) > 3:
        return None
    if call.source(a) is not None and call.source(bias) is not None:
        return None
    is_bias = call.source(bias) is not None
    if is_bias and call.source(a) is None and call.source(b) is None:
        return None
    if is_bias and bias.dim() != 1:
        return None
    return product(call, a, b, name, bias if is_bias else None)


@rule(torch.einsum)
def einsum(call: Call) -> Use | None:
    equation, *operands = call.args
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    if not isinstance(equation, str) or len(operands) != 2:
        return None
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not arrow or len(terms) != 2:
        return None
    shared = max(t.dim() - len(term.replace("...", "")) for t, term in zip(operands, terms, strict=True))
    named = []
    for term, tensor in [*zip(terms, operands, strict=True), (result, call.out)]:
        before, dots, after = term.partition("...")
        extra = tensor.dim() - len(before) - len(after) if dots else 0
        named.append([*before, *(f"...{shared - extra + j}" for j in range(extra)), *after])
    a, b = operands
    if (call.source(a) is None) == (call.source(b) is None):
        return None
    sizes = dict(zip(named[0], a.shape, strict=True))
    if any(sizes.get(name, size) != size for name, size in zip(named[1], b.shape, strict=True)):
        return None  # an axis of one that is broadcast
    if call.source(a) is not None:
        return contraction("einsum", b, a, (named[1], named[0], named[2]), call, None)
    return contraction("einsum", a, b, (named[0], named[1], named[2]), call, None)


@rule(F.bilinear)
def bilinear(call: Call) -> Use | None:
    a, b, weight, bias = call.bind("input1", "input2", "weight", "bias")
    if call.source(a) is not None or call.source(b) is not None:
        return None
    x = (a.unsqueeze(-1) * b.unsqueeze(-2)).flatten(-2)
    o, i, j = weight.shape
    bias_source = None if bias is None else call.source(bias)
    return Contraction(
        "bilinear", call.source(weight), bias_source, (1, o, i * j), (0, 1, 2), 1, o, i * j,
        lambda ones: with_ones(x.unsqueeze(-2), ones), lambda y: y.unsqueeze(-2),
    )  # fmt: skip


def _convolution(call: Call, dims: int, transposed: bool) -> Use | None:
    if transposed:
        names = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
        defaults = {"stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1}
        x, weight, bias, stride, padding, extra, groups, dilation = call.bind(*names, **defaults)
    else:
        names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
        defaults = {"stride": 1, "padding": 0, "groups": 1, "dilation": 1}
        x, weight, bias, stride, padding, dilation, groups = call.bind(*names, **defaults)
        extra = 0
    if call.source(x) is not None or x.dim() not in (dims + 1, dims + 2):
        return None
    alone = x.dim() == dims + 1  # an input without a batch axis
    kernel, positions = tuple(weight.shape[2:]), tuple(call.out.shape[2:])

    def some(ones: bool, which: slice) -> Tensor:
        batch = x.unsqueeze(0) if alone else x[which]
        if transposed:
            return transposed_patches(batch, kernel, stride, padding, extra, groups, dilation, ones)
        return patches(batch, kernel, stride, padding, dilation, groups, ones)

    def right(ones: bool) -> Tensor:
        return some(ones, slice(None))

    def images(which: slice) -> Tensor:
        part, steps = x[which].detach(), as_tuple(dilation, dims)
        if transposed:
            return spread_out(part, kernel, stride, padding, extra, steps)
        return padded(part, padding, kernel, steps)

    def products(ones: bool, like: Tensor, budget: int) -> PatchProducts | None:
        steps = (1,) * dims if transposed else as_tuple(stride, dims)
        meets = Kernel(kernel, steps, as_tuple(dilation, dims), groups, positions)
        if not 0 < meets.needed(x.shape[1]) <= budget // 4:
            return None
        return patch_products(images, len(x), x.shape[1], meets, ones, like, min(CACHE, budget), reverse=transposed)

    def left(y: Tensor) -> Tensor:
        return channels_last(y.unsqueeze(1) if alone else y, groups)

    split, perm, rows, cols = weight_axes(weight.shape, groups, transposed)
    bias_source = None if bias is None else call.source(bias)
    name = f"conv_transpose{dims}d" if transposed else f"conv{dims}d"
    parts, whole = (None, None) if alone else (some, products)
    source = call.source(weight)
    return Contraction(name, source, bias_source, split, perm, groups, rows, cols, right, left, parts, whole)


for _dims, _conv, _transposed in (
    (1, F.conv1d, F.conv_transpose1d),
    (2, F.conv2d, F.conv_transpose2d),
    (3, F.conv3d, F.conv_transpose3d),
):
    RULES[_conv] = lambda call, dims=_dims: _convolution(call, dims, transposed=False)
    RULES[_transposed] = lambda call, dims=_dims: _convolution(call, dims, transposed=True)


# -- broadcast ------------------------------------------------------------------------------------------------------


def _affine(name: str, call: Call, weight: Tensor | None, bias: Tensor | None, view: Callable, plain: Callable) -> Use:
    """A normalisation y = plain * weight + bias, the parameters broadcast as `view` says."""
    terms = []
    if weight is not None and (source := call.source(weight)) is not None:
        terms.append((source, view(weight), plain))
    if bias is not None and (source := call.source(bias)) is not None:
        terms.append((source, view(bias), None))
    return Broadcast(name, terms)


_signature = lru_cache(maxsize=256)(inspect.signature)


def _bound(call: Call) -> dict[str, Any]:
    bound = _signature(call.function).bind(*call.args, **call.kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def _data_only(call: Call, arguments: dict[str, Any]) -> bool:
    """Whether every parameter sits in the weight or bias slot."""
    return all(call.source(value) is None for key, value in arguments.items() if key not in ("weight", "bias"))


@rule(F.layer_norm, F.rms_norm)
def layer_norm(call: Call) -> Use | None:
    bound = _bound(call)
    if not _data_only(call, bound):
        return None
    plain = bound | {key: None for key in ("weight", "bias") if key in bound}
    function = call.function
    return _affine(
        function.__name__, call, bound["weight"], bound.get("bias"), lambda p: tuple(p.shape), lambda: function(**plain)
    )


@rule(F.batch_norm, F.group_norm, F.instance_norm)
def channel_norm(call: Call) -> Use | None:
    bound = _bound(call)
    x = bound["input"]
    if not _data_only(call, bound) or x.dim() < 2:
        return None
    plain, function = bound | {"weight": None, "bias": None}, call.function

    def view(parameter: Tensor) -> tuple[int, ...]:
        return (1, parameter.numel(), *(1,) * (x.dim() - 2))

    return _affine(function.__name__, call, bound["weight"], bound["bias"], view, lambda: function(**plain))


@rule(*methods("prelu"), F.prelu)
def prelu(call: Call) -> Use | None:
    x, weight = call.bind("input", "weight")
    source = call.source(weight)
    if source is None or call.source(x) is not None:
        return None
    view = (1, weight.numel(), *(1,) * (x.dim() - 2)) if x.dim() > 1 else (weight.numel(),)
    return Broadcast("prelu", [(source, view, lambda: x.clamp_max(0))])


ELEMENTWISE = (
    "add", "sub", "mul", "div", "rsub", "subtract", "multiply", "divide", "true_divide", "pow", "float_power",
    "maximum", "minimum", "fmax", "fmin", "where", "lerp", "addcmul", "addcdiv", "atan2", "hypot", "logaddexp", "xlogy",
)  # fmt: skip
_OPERATORS = ("add", "sub", "mul", "truediv", "pow")
IN_PLACE = frozenset(methods(*(f"{name}_" for name in ELEMENTWISE)) + methods(*(f"__i{name}__" for name in _OPERATORS)))
_PLAIN_SUM = frozenset(methods("add", "add_", "__add__", "__radd__", "__iadd__"))


@rule(
    *methods(*ELEMENTWISE, *(f"{name}_" for name in ELEMENTWISE)),
    *methods(*(f"__{prefix}{name}__" for name in _OPERATORS for prefix in ("", "r", "i"))),
)
def elementwise(call: Call) -> Use | None:
    """Any elementwise operation: the factor is its derivative in the parameter, entry by entry, taken by autograd."""
    terms = []
    function, positional, named, shape = call.function, list(call.args), call.kwargs, call.out.shape

    def held(value: Any, graph: bool) -> Any:  # a copy where the operation would write into it
        if not isinstance(value, Tensor):
            return value
        value = value if graph else value.detach()
        return value.clone() if function in IN_PLACE else value

    slots = [*((i, value) for i, value in enumerate(positional)), *named.items()]
    for slot, value in slots:
        if not isinstance(value, Tensor) or (source := call.source(value)) is None:
            continue
        source, view = unrepeated(source, value.shape)
        if function in _PLAIN_SUM and "alpha" not in named:
            terms.append((source, view, None))
            continue

        def factor(slot=slot, value=value) -> Tensor:
            graph = torch.is_grad_enabled()
            with torch.enable_grad():
                point = value.detach().expand(shape).clone().requires_grad_()
                moved = point.clone() if function in IN_PLACE else point
                args = [moved if i == slot else held(v, graph) for i, v in enumerate(positional)]
                kwargs = {key: moved if key == slot else held(v, graph) for key, v in named.items()}
                out = function(*args, **kwargs).sum()
                return torch.autograd.grad(out, point, create_graph=graph)[0]

        terms.append((source, view, factor))
    return Broadcast(getattr(function, "__name__", "elementwise").strip("_"), terms) if terms else None


@rule(torch.cat, torch.concat, torch.concatenate)
def cat(call: Call) -> Use | None:
    """Parameters beside data along an axis: a class token, learned prompts."""
    members, dim = call.bind("tensors", "dim", dim=0)
    dim = call.kwargs.get("axis", dim)
    if not isinstance(members, (list, tuple)) or not isinstance(dim, int):
        return None
    terms, parts, start, dim = [], [], 0, dim % call.out.dim()
    for member in members:
        if member.dim() != call.out.dim():
            return None  # an empty tensor, which torch leaves out
        if (source := call.source(member)) is not None:
            terms.append((*unrepeated(source, member.shape), None))
            parts.append((dim, start, start + member.shape[dim]))
        start += member.shape[dim]
    return Broadcast("cat", terms, parts)


# -- lookup ---------------------------------------------------------------------------------------------------------


def embedding_arguments(args: tuple, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, int | None, bool]:
    """Of `F.embedding`: the index, the table, the row that passes no gradient, and whether rows are scaled by count."""
    bound = _signature(F.embedding).bind(*args, **kwargs)
    bound.apply_defaults()
    index, table, padding, *_, by_count, _ = bound.arguments.values()
    if padding is not None and padding < 0:
        padding += len(table)
    return index, table, padding, by_count


@rule(F.embedding)
def embedding(call: Call) -> Use | None:
    index, weight, padding, by_count = embedding_arguments(call.args, call.kwargs)
    source = call.source(weight)
    if by_count or source is None:
        return None
    return Lookup("embedding", source, index.detach().clone(), (weight.shape[0], weight.shape[1]), padding)
