"""J v by tangents, from the inputs of a recorded pass to its output, on what autograd's graph has kept. [B, *out]

    y = x W^T + b          dy = dx W^T + x dW^T + db           two products a layer, and no second forward pass
    y = s(z) elementwise   dy = s'(z) dz                       a diagonal Jacobian is its own transpose: its backward

Each node of the graph holds what its derivative needs, and nothing is run again: two thirds of a gradient, half of what
J v costs as the derivative of J^T u. Only operations with a rule here are followed; at any other `pushed` gives None,
and the caller goes another way.

>>> import torch
>>> weight = torch.tensor([[1.0, 2.0]], requires_grad=True)
>>> output = torch.nn.functional.linear(torch.tensor([[3.0, 4.0]]), weight)
>>> pushed(output, [weight], [torch.tensor([[10.0, 1.0]])])
tensor([[34.]])
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Tangents = list[Tensor | None]
"""Of the inputs of a node; None is zero."""
Rule = Callable[[Any, Tangents], Tensor]

ELEMENTWISE = (
    "Tanh", "Sigmoid", "Relu", "Gelu", "Silu", "Elu", "LeakyRelu", "Softplus", "Mish", "Hardtanh", "Hardswish",
    "LogSigmoid", "Sin", "Cos", "Exp", "Log", "Sqrt", "Erf", "Neg", "Pow", "Softmax",
)  # fmt: skip
"""Operations of one tensor with a symmetric Jacobian: the elementwise ones, and softmax, diag(p) - p p^T."""
RESHAPES = (
    "ViewBackward0", "UnsafeViewBackward0", "UnsqueezeBackward0", "SqueezeBackward0", "SqueezeBackward1",
    "CloneBackward0",
)  # fmt: skip
"""The same entries in the same order, in another shape."""


def pushed(output: Tensor, parameters: Sequence[Tensor], directions: Sequence[Tensor]) -> Tensor | None:
    """d output along `directions`, one for each of `parameters`; None where an operation on the way has no rule."""
    if output.grad_fn is None or any(each.grad_fn is not None for each in parameters):
        return None
    if torch._C._current_graph_task_id() != NO_TASK:  # inside a backward pass nodes give only what that pass asks for
        return None
    order = _in_order(output.grad_fn)
    if output.output_nr or order is None:
        return None
    leaves = {id(each): direction for each, direction in zip(parameters, directions, strict=True)}
    readers = Counter(given for node in order for given, _ in node.next_functions)
    found: dict[Any, Tensor | None] = {None: None}
    with torch.no_grad():
        for node in order:
            if node.name() == LEAF:
                found[node] = leaves.get(id(node.variable))
                continue
            given = [found[each] for each, _ in node.next_functions]
            found[node] = None
            if any(each is not None for each in given):
                found[node] = RULES[node.name()](node, given)
            for each, _ in node.next_functions:  # tangents that nobody reads any more are let go
                readers[each] -= 1
                if each is not None and not readers[each]:
                    del found[each]
    total = found[output.grad_fn]
    return torch.zeros_like(output) if total is None else total


def _in_order(last: Any) -> list[Any] | None:
    """Every node after those it reads; None where one has no rule, or is read by another than its first output."""
    order: list[Any] = []
    seen, stack = set(), [(last, False)]
    while stack:
        node, ready = stack.pop()
        if ready:
            order.append(node)
        elif node not in seen:
            if node.name() != LEAF and node.name() not in RULES:
                return None
            seen.add(node)
            stack.append((node, True))
            for given, number in node.next_functions:
                if number:
                    return None
                if given is not None:
                    stack.append((given, False))
    return order


LEAF = "torch::autograd::AccumulateGrad"
NO_TASK = -1


def _shape(node: Any) -> torch.Size:
    return torch.Size(node._input_metadata[0].shape)


def _added(node: Any, total: Tensor | None, more: Tensor | None) -> Tensor:
    """The sum of two tangents of which one may be zero, each broadcast to the node's output."""
    if total is None or more is None:
        only = more if total is None else total
        assert only is not None
        return only.expand(_shape(node))
    return total + more


def _transposed(node: Any, given: Tangents) -> Tensor:
    (only,) = given
    assert only is not None
    return only.t()


def _reshaped(node: Any, given: Tangents) -> Tensor:
    (only,) = given
    assert only is not None
    return only.reshape(_shape(node))


def _elementwise(node: Any, given: Tangents) -> Tensor:
    return node(given[0])


def _addmm(node: Any, given: Tangents) -> Tensor:
    bias, left, right = given
    beta, alpha = node._saved_beta, node._saved_alpha
    if right is not None:
        start = torch.zeros((), dtype=right.dtype, device=right.device) if bias is None else bias
        total = torch.addmm(start, node._saved_mat1, right, beta=beta, alpha=alpha)
        return total if left is None else total.addmm_(left, node._saved_mat2, alpha=alpha)
    bias = None if bias is None else bias * beta
    return _added(node, None if left is None else alpha * (left @ node._saved_mat2), bias)


def _mm(node: Any, given: Tangents) -> Tensor:
    left, right = given
    if right is None:
        assert left is not None
        return left @ node._saved_mat2
    total = node._saved_self @ right
    return total if left is None else total.addmm_(left, node._saved_mat2)


def _convolution(node: Any, given: Tangents) -> Tensor:
    x, weight, bias = given
    how = (
        node._saved_stride, node._saved_padding, node._saved_dilation, node._saved_transposed,
        node._saved_output_padding, node._saved_groups,
    )  # fmt: skip
    total = None if x is None else torch.convolution(x, node._saved_weight, None, *how)
    if weight is not None:
        more = torch.convolution(node._saved_input, weight, None, *how)
        total = more if total is None else total.add_(more)
    if bias is None:
        assert total is not None
        return total
    return _added(node, total, bias.reshape(-1, *[1] * (len(_shape(node)) - 2)))


def _max_pool(node: Any, given: Tangents) -> Tensor:
    (only,) = given
    assert only is not None
    where = node._saved_result1
    return only.flatten(-2).gather(-1, where.flatten(-2)).reshape(where.shape)


def _add(node: Any, given: Tangents) -> Tensor:
    first, second = given
    return _added(node, first, None if second is None else second * node._saved_alpha)


def _sub(node: Any, given: Tangents) -> Tensor:
    first, second = given
    return _added(node, first, None if second is None else -second * node._saved_alpha)


def _mul(node: Any, given: Tangents) -> Tensor:
    first, second = given
    first = None if first is None else first * node._saved_other
    return _added(node, first, None if second is None else second * node._saved_self)


RULES: dict[str, Rule] = {
    **{f"{name}Backward0": _elementwise for name in ELEMENTWISE},
    **dict.fromkeys(RESHAPES, _reshaped),
    "TBackward0": _transposed,
    "AddmmBackward0": _addmm,
    "MmBackward0": _mm,
    "ConvolutionBackward0": _convolution,
    "MaxPool2DWithIndicesBackward0": _max_pool,
    "AddBackward0": _add,
    "SubBackward0": _sub,
    "MulBackward0": _mul,
}
"""What a node of autograd's graph, by its name, does to the tangents of its inputs."""
