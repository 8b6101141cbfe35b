"""V^T J for many cotangents at once, from the output of a recorded pass to any places of its graph. [R, *place] each

    y = x W^T             dx = dy W                 one product for all cotangents
    y = s(z) elementwise  dz = s'(z) dy             s'(z) once, and then in the memory of dy where nobody else has it
    anything of torch's   the node's own backward   one cotangent at a time, that operation alone

Autograd goes back with one cotangent at a time, or with all of them under `vmap`, which copies what operations keep
as often as there are cotangents. Here the graph's nodes are walked with all cotangents in one tensor, in the order of
autograd, on what the nodes have kept. Where the graph has something that is not torch's own nothing is done, and the
caller goes autograd's way.

>>> import torch
>>> x = torch.tensor([[1.0, -2.0]], requires_grad=True)
>>> hidden = 3 * x
>>> place = torch.autograd.graph.get_gradient_edge(hidden)
>>> pulled_back(hidden.relu(), [place], torch.ones(1, 1, 2), lambda number, values: print(values))
tensor([[[1., 0.]]])
True
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lapwing.linalg.budget import CACHE, chunks
from lapwing.tangent.pushforward import ELEMENTWISE, NO_TASK, RESHAPES

aten = torch.ops.aten
_TORCHS = re.compile(r"^\w+Backward\d+$")
"""Nodes of torch's own differentiable operations; not those of writing into a part of a tensor, or of custom ones."""


def pulled_back(
    output: Tensor,
    places: Sequence[GradientEdge],
    cotangents: Float[Tensor, "r *out"],
    take: Callable[[int, Tensor], bool | None],
) -> bool:
    """d(cotangent . output) / d place for every cotangent: `take` is given the number of the place, and [r, *place].

    In the order in which they are met; not for places that the output does not depend on. What `take` keeps, in whole
    or as a view, it says by True: its memory is left alone then. False if nothing was done, where autograd is to go.
    """
    if output.grad_fn is None or torch._C._current_graph_task_id() != NO_TASK:  # nodes give only what a pass asks for
        return False
    wanted: dict[Any, dict[int, list[int]]] = {}
    for number, place in enumerate(places):
        wanted.setdefault(place.node, {}).setdefault(place.output_nr, []).append(number)
    order = _in_order(output.grad_fn, wanted)
    if order is None:
        return False
    arriving = _Arriving()
    arriving.hold(cotangents)
    arriving.add(output.grad_fn, output.output_nr, cotangents)
    with torch.no_grad():
        for node, needed in order:
            given = arriving.take(node)
            for number, places_here in wanted.get(node, {}).items():
                for place in places_here if number in given else ():
                    if take(place, given[number]):
                        arriving.hold(given[number])
            if given and any(needed):
                _pass_on(node, needed, given, arriving)
    return True


def _pass_on(node: Any, needed: tuple[bool, ...], given: dict[int, Tensor], arriving: _Arriving) -> None:
    """The cotangents of a node's outputs to what it reads."""
    rule = RULES.get(node.name(), _each)
    free = len(given) == 1 and arriving.free(*given.values())
    passed = [
        None if values is None or not need else _fitted(values, below._input_metadata[number])
        for (below, number), need, values in zip(
            node.next_functions, needed, rule(_Step(node, given, needed, free)), strict=True
        )
    ]
    for values in passed:  # several may be one piece of memory, to which none is added before all are
        if values is not None:
            arriving.hold(values)
    for (below, number), values in zip(node.next_functions, passed, strict=True):
        if values is not None:
            arriving.add(below, number, values)
            arriving.release(values)


def _in_order(first: Any, wanted: dict[Any, Any]) -> list[tuple[Any, tuple[bool, ...]]] | None:
    """Every node on the way to a place before those it reads, and which of these are needed; None without a rule."""
    order: list[tuple[Any, tuple[bool, ...]]] = []
    leads: dict[Any, bool] = {None: False}
    stack = [(first, False)]
    while stack:
        node, ready = stack.pop()
        if ready:
            needed = tuple([leads[below] for below, _ in node.next_functions])
            leads[node] = any(needed) or node in wanted
            if leads[node]:
                if any(needed) and not _known(node, needed):
                    return None
                order.append((node, needed))
        elif node not in leads:
            leads[node] = False
            stack.append((node, True))
            stack += [(below, False) for below, _ in node.next_functions if below is not None]
    return order[::-1]


def _known(node: Any, needed: Sequence[bool]) -> bool:
    name = node.name()
    if _TORCHS.match(name) is None or any(place.dtype.is_complex for place in node._input_metadata):
        return False
    only = ONLY.get(name)
    return only is None or not any(need for number, need in enumerate(needed) if number not in only)


@dataclass
class _Arriving:
    """Cotangents on their way, by node and output, and how often each piece of memory is in use."""

    values: dict[Any, dict[int, Tensor]] = field(default_factory=dict)
    in_use: Counter[int] = field(default_factory=Counter)

    def add(self, node: Any, number: int, values: Tensor) -> None:
        given = self.values.setdefault(node, {})
        before = given.get(number)
        if before is not None:
            self.release(before)
            values = before.add_(values) if self.free(before) else before + values
        given[number] = values
        self.hold(values)

    def hold(self, values: Tensor) -> None:
        self.in_use[_memory(values)] += 1

    def release(self, values: Tensor) -> None:
        self.in_use[_memory(values)] -= 1

    def take(self, node: Any) -> dict[int, Tensor]:
        given = self.values.pop(node, {})
        for values in given.values():
            self.release(values)
        return given

    def free(self, values: Tensor) -> bool:
        """Whether it may be written to: nobody else has this memory, and each entry has its own."""
        expanded = any(not step and size > 1 for step, size in zip(values.stride(), values.shape, strict=True))
        return not expanded and not self.in_use[_memory(values)]


def _memory(values: Tensor) -> int:
    return values.untyped_storage().data_ptr()


def _fitted(values: Tensor, place: Any) -> Tensor:
    """As autograd does between nodes: summed where the operation had repeated its input, in the input's dtype."""
    shape = tuple(place.shape)
    if tuple(values.shape[1:]) != shape:
        extra = values.dim() - 1 - len(shape)
        values = values.sum(tuple(range(1, 1 + extra))) if extra else values
        repeated = [1 + axis for axis, size in enumerate(shape) if size == 1 and values.shape[1 + axis] != 1]
        values = values.sum(repeated, keepdim=True) if repeated else values
    return values if values.dtype == place.dtype else values.to(place.dtype)


# -- rules -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Step:
    """A node, the cotangents of its outputs, which inputs need theirs, and whether the memory given may be reused."""

    node: Any
    given: dict[int, Tensor]
    needed: tuple[bool, ...]
    free: bool

    @property
    def values(self) -> Tensor:
        """Of a node with one output."""
        (only,) = self.given.values()
        return only

    def shape(self, number: int = 0) -> tuple[int, ...]:
        """Of an input."""
        below, at = self.node.next_functions[number]
        return tuple(below._input_metadata[at].shape)

    def zeros(self) -> Tensor:
        """For an operation that reads a part of its input."""
        some = next(iter(self.given.values()))
        return some.new_zeros(len(some), *self.shape())


Passed = Sequence[Tensor | None]
Rule = Callable[[_Step], Passed]


def _each(step: _Step) -> Passed:
    """The node itself, for one cotangent after the other.

    In the usual order of memory: torch's kernel of instance_norm is wrong for one image whose channels are last.
    """
    count = len(next(iter(step.given.values())))
    numbers = range(len(step.node._input_metadata))
    out: list[Tensor | None] = [None] * len(step.needed)
    for r in range(count):
        passed = step.node(*[step.given[k][r].contiguous() if k in step.given else None for k in numbers])
        for j, values in enumerate(passed if isinstance(passed, tuple) else (passed,)):
            if values is None or not step.needed[j]:
                continue
            into = out[j]
            if into is None:
                into = out[j] = values.new_zeros(count, *values.shape) if r else values.new_empty(count, *values.shape)
            into[r] = values
    return out


def _times(step: _Step, factor: Tensor | float) -> Tensor:
    """values * factor, in the same memory where that is free and has the shape."""
    values = step.values
    return values.mul_(factor) if step.free and _within(factor, values) else values * factor


def _within(factor: Tensor | float, values: Tensor) -> bool:
    """Whether a product with `factor` has the shape and the dtype of `values`."""
    if not isinstance(factor, Tensor) or not factor.dim():
        return True
    if factor.dtype != values.dtype or factor.dim() > values.dim():
        return False
    return all(size in (1, own) for size, own in zip(factor.shape[::-1], values.shape[::-1], strict=False))


def _elementwise(step: _Step) -> Passed:
    return [_times(step, step.node(step.values.new_ones(step.values.shape[1:])))]


def _relu(step: _Step) -> Passed:
    result, values = step.node._saved_result, step.values
    into = values if step.free else torch.empty_like(values, memory_format=torch.contiguous_format)
    return [aten.threshold_backward(values, result.expand_as(values), 0, grad_input=into)]


def _passed(step: _Step) -> Passed:
    return [step.values]


def _reshaped(step: _Step) -> Passed:
    return [step.values.reshape(len(step.values), *step.shape())]


def _transposed(step: _Step) -> Passed:
    return [step.values.mT if step.values.dim() == 3 else step.values]


def _axes_swapped(step: _Step) -> Passed:
    dims = step.values.dim() - 1
    return [step.values.transpose(1 + _axis(step.node._saved_dim0, dims), 1 + _axis(step.node._saved_dim1, dims))]


def _permuted(step: _Step) -> Passed:
    dims = step.values.dim() - 1
    order = [_axis(dim, dims) for dim in step.node._saved_dims]
    return [step.values.permute(0, *[1 + order.index(axis) for axis in range(dims)])]


def _signed(saved: int) -> int:
    """A number as nodes keep it, where a negative one has become a very large one."""
    return saved - 2**64 if saved >= 2**63 else saved


def _axis(saved: int, dims: int) -> int:
    return _signed(saved) % max(1, dims)


def _selected(step: _Step) -> Passed:
    out, shape = step.zeros(), step.shape()
    out.select(1 + _axis(step.node._saved_dim, len(shape)), _signed(step.node._saved_index)).copy_(step.values)
    return [out]


def _sliced(step: _Step) -> Passed:
    out, node = step.zeros(), step.node
    axis = _axis(node._saved_dim, out.dim() - 1)
    start, end = (None if at is None else _signed(at) for at in (node._saved_start, node._saved_end))
    part = slice(start, end, node._saved_step)
    out[(slice(None),) * (1 + axis) + (part,)] = step.values
    return [out]


def _added(step: _Step) -> Passed:
    return _with_second(step, lambda: step.node._saved_alpha)


def _subtracted(step: _Step) -> Passed:
    return _with_second(step, lambda: -step.node._saved_alpha)


def _with_second(step: _Step, factor: Callable[[], float]) -> Passed:
    """Of a sum: as they are for the first term, and times a factor for the second, if that is no number."""
    if len(step.needed) == 1 or not step.needed[1]:
        return [step.values, None][: len(step.needed)]
    times = factor()
    return [step.values, step.values if times == 1 else step.values * times]


def _multiplied(step: _Step) -> Passed:
    if len(step.needed) == 1:
        return [_times(step, step.node._saved_other)]
    if all(step.needed):
        return [step.values * step.node._saved_other, step.values * step.node._saved_self]
    if step.needed[0]:
        return [_times(step, step.node._saved_other), None]
    return [None, _times(step, step.node._saved_self)]


def _summed(step: _Step) -> Passed:
    return [_spread(step, step.values)]


def _averaged(step: _Step) -> Passed:
    terms = max(1, torch.Size(step.shape()).numel()) / max(1, step.values[0].numel())
    return [_spread(step, step.values / terms)]


def _spread(step: _Step, values: Tensor) -> Tensor:
    shape = step.shape()
    if shape and not getattr(step.node, "_saved_keepdim", False):
        kept = getattr(step.node, "_saved_dim", None)
        dims = sorted(_axis(dim, len(shape)) for dim in kept) if kept else range(len(shape))
        for dim in dims:
            values = values.unsqueeze(1 + dim)
    return values.expand(len(values), *shape)


def _joined(step: _Step) -> Passed:
    """Of a concatenation, the part of each tensor: sizes of those without a graph are not kept."""
    axis = _axis(step.node._saved_dim, step.values.dim() - 1)
    belows = step.node.next_functions
    shapes = [None if below is None else below._input_metadata[at].shape for below, at in belows]
    if shapes.count(None) > 1 or any(shape is not None and len(shape) <= axis for shape in shapes):
        return _each(step)
    sizes = [None if shape is None else shape[axis] for shape in shapes]
    rest = step.values.shape[1 + axis] - sum(size for size in sizes if size is not None)
    return step.values.split([rest if size is None else size for size in sizes], 1 + axis)


def _parted(step: _Step) -> Passed:
    """Of a tensor that was split into parts along an axis, or into its entries along it."""
    out, shape, node = step.zeros(), step.shape(), step.node
    axis = _axis(node._saved_dim, len(shape))
    if node.name() == "UnbindBackward0":
        parts = out.unbind(1 + axis)
    else:
        parts = out.split(node._saved_split_sizes if "Sizes" in node.name() else node._saved_split_size, 1 + axis)
    for number, values in step.given.items():
        parts[number].copy_(values)
    return [out]


def _addmm(step: _Step) -> Passed:
    node = step.node
    start = step.values * node._saved_beta if step.needed[0] else None
    factors = _factors(step, node._saved_mat1, node._saved_mat2, step.needed[1:])
    return [
        start,
        *[each if each is None or node._saved_alpha == 1 else each.mul_(node._saved_alpha) for each in factors],
    ]


def _mm(step: _Step) -> Passed:
    return _factors(step, step.node._saved_self, step.node._saved_mat2, step.needed)


def _factors(step: _Step, left: Tensor | None, right: Tensor | None, needed: Sequence[bool]) -> list[Tensor | None]:
    """Of a product of two matrices."""
    out: list[Tensor | None] = [None, None]
    if needed[0]:
        assert right is not None
        out[0] = step.values @ right.t()
    if needed[1]:
        assert left is not None
        out[1] = torch.stack([left.t() @ values for values in step.values])
    return out


def _bmm(step: _Step) -> Passed:
    """One cotangent at a time: a product of all would have copies of the other side."""
    out: list[Tensor | None] = [None, None]
    if step.needed[0]:
        right = step.node._saved_mat2.mT
        out[0] = step.values.new_empty(len(step.values), *step.shape(0))
        for into, values in zip(out[0], step.values, strict=True):
            torch.bmm(values, right, out=into)
    if step.needed[1]:
        left = step.node._saved_self.mT
        out[1] = step.values.new_empty(len(step.values), *step.shape(1))
        for into, values in zip(out[1], step.values, strict=True):
            torch.bmm(left, values, out=into)
    return out


def _convolution(step: _Step) -> Passed:
    """All cotangents as further data points, a few at a time; only the shape of the input matters."""
    node, folded, shape = step.node, step.values.flatten(0, 1), step.shape()

    def back(some: Tensor) -> Tensor:
        like = some if some.shape[1:] == shape[1:] else some.new_empty(len(some), *shape[1:])
        return aten.convolution_backward(
            some, like, node._saved_weight, None, node._saved_stride, node._saved_padding, node._saved_dilation,
            node._saved_transposed, node._saved_output_padding, node._saved_groups, [True, False, False],
        )[0]  # fmt: skip

    each = max(prod(folded.shape[1:]), prod(shape[1:])) * folded.element_size()
    parts = list(chunks(len(folded), each, CACHE // 2))
    if len(parts) == 1:
        values = back(folded)
    else:
        values = folded.new_empty(len(folded), *shape[1:])
        for part in parts:
            values[part] = back(folded[part])
    return [values.unflatten(0, step.values.shape[:2]), None, None]


def _max_pool(step: _Step) -> Passed:
    """To the largest entry of every window, at once where no entry is in two."""
    node, read, chosen = step.node, step.node._saved_self, step.node._saved_result1
    kernel, stride = node._saved_kernel_size, node._saved_stride or node._saved_kernel_size
    sizes, steps = ((given * 2)[:2] for given in (kernel, stride))  # one number stands for both
    out = step.values.new_empty(len(step.values), *read.shape)
    if max(node._saved_dilation) == 1 and all(size <= by for size, by in zip(sizes, steps, strict=True)):
        for into, values in zip(out.zero_().flatten(-2), step.values.flatten(-2), strict=True):
            into.scatter_(-1, chosen.flatten(-2), values)
        return [out]
    for into, values in zip(out, step.values, strict=True):
        aten.max_pool2d_with_indices_backward(
            values.contiguous(), read, kernel, stride, node._saved_padding, node._saved_dilation,
            node._saved_ceil_mode, chosen, grad_input=into,
        )  # fmt: skip
    return [out]


def _softmax(step: _Step) -> Passed:
    result = step.node._saved_result
    axis = _axis(step.node._saved_dim, result.dim())
    out = torch.empty_like(step.values, memory_format=torch.contiguous_format)
    for into, values in zip(out, step.values, strict=True):
        aten._softmax_backward_data(values, result, axis, result.dtype, grad_input=into)
    return [out]


def _layer_norm(step: _Step) -> Passed:
    node = step.node
    out = torch.empty_like(step.values, memory_format=torch.contiguous_format)
    kept = (node._saved_input, node._saved_normalized_shape, node._saved_result1, node._saved_result2)
    for into, values in zip(out, step.values, strict=True):
        found, _, _ = aten.native_layer_norm_backward(
            values, *kept, node._saved_weight, node._saved_bias, [True, False, False]
        )
        into.copy_(found)
    return [out, None, None]


def _batch_norm(step: _Step) -> Passed:
    """With fixed statistics: one factor a channel."""
    node = step.node
    if node._saved_training:
        return _each(step)
    factor = (node._saved_running_var + node._saved_eps).rsqrt()
    factor = factor if node._saved_weight is None else factor * node._saved_weight
    factor = factor.to(step.values.dtype)
    return [_times(step, factor.reshape(-1, *[1] * (step.values.dim() - 3))), None, None]


RULES: dict[str, Rule] = {
    **{f"{name}Backward0": _elementwise for name in ELEMENTWISE if name not in ("Relu", "Softmax")},
    "ReluBackward0": _relu,
    **dict.fromkeys((*RESHAPES, "ReshapeAliasBackward0"), _reshaped),
    **dict.fromkeys(("CloneBackward0", "AliasBackward0", "ExpandBackward0", "ToCopyBackward0"), _passed),
    **dict.fromkeys(("AddBackward0", "AddBackward1"), _added),
    **dict.fromkeys(("SubBackward0", "SubBackward1"), _subtracted),
    **dict.fromkeys(("MulBackward0", "MulBackward1"), _multiplied),
    **dict.fromkeys(("SumBackward0", "SumBackward1"), _summed),
    **dict.fromkeys(("MeanBackward0", "MeanBackward1"), _averaged),
    **dict.fromkeys(("SoftmaxBackward0", "SafeSoftmaxBackward0"), _softmax),
    **dict.fromkeys(("SplitBackward0", "SplitWithSizesBackward0", "UnbindBackward0"), _parted),
    "TBackward0": _transposed,
    "TransposeBackward0": _axes_swapped,
    "PermuteBackward0": _permuted,
    "SelectBackward0": _selected,
    "SliceBackward0": _sliced,
    "CatBackward0": _joined,
    "AddmmBackward0": _addmm,
    "MmBackward0": _mm,
    "BmmBackward0": _bmm,
    "ConvolutionBackward0": _convolution,
    "MaxPool2DWithIndicesBackward0": _max_pool,
    "NativeLayerNormBackward0": _layer_norm,
    "NativeBatchNormBackward0": _batch_norm,
}
"""What a node of autograd's graph, by its name, does to the cotangents of its output; others one at a time."""
ONLY = {
    "ConvolutionBackward0": (0,),
    "NativeLayerNormBackward0": (0,),
    "NativeBatchNormBackward0": (0,),
}
"""The inputs that a rule has cotangents for, where not all: the others are parameters."""
