"""Tape: every operation between parameters and outputs in one forward pass, to be walked backwards one at a time.

A node holds one call, the tensors it read that depend on parameters, and what it returned. Completeness rests on
autograd: a tensor that requires a gradient and was returned by no recorded call came from code that hides its
operations (a custom autograd function), which is an error, not a gap.

Consecutive entrywise operations are one function of their common *base*: x * sigmoid(x) is known by its derivative in
x, not by two paths whose products would be lost.

Memory: the graph of one forward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from lapwing.errors import UnsupportedOperationError
from lapwing.tangent.checks import check_output, check_trainable
from lapwing.tangent.inputs import batch_size, call, check_input, map_tensors, tensors
from lapwing.tangent.model import Tangent
from lapwing.tangent.operations import (
    REFUSABLE,
    WRITING,
    TensorSet,
    flat,
    inlined,
    owned,
    recomputed,
    refuse_train_mode,
    traits,
    written_to,
)
from lapwing.tangent.recurrent import can_unroll, unrolled
from lapwing.tangent.squares import Rule
from lapwing.tangent.squares_more import RULES
from lapwing.tangent.tape_plain import attention, composite

# -- what is on the tape --------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Value:
    """A tensor that depends on parameters: `parameter` names it if it is one, else `node` returned it.

    `base` is the value of which it is an entrywise function; itself where an operation mixes entries, or several.
    `derived` says that no data went into it.
    """

    edge: GradientEdge
    shape: torch.Size
    dtype: torch.dtype
    parameter: str | None = None
    node: Node | None = field(default=None, repr=False)
    origin: Value | None = field(default=None, repr=False)
    derived: bool = False

    @property
    def base(self) -> Value:
        return self if self.origin is None else self.origin


@dataclass(eq=False)
class Node:
    """One call: what it read (tracked tensors by their number among all tensors given), and the values it returned.

    `args` are kept only where the rule for the operation asks for them.
    """

    function: Callable
    name: str
    rule: Rule | None
    args: tuple
    kwargs: dict
    inputs: dict[int, Value]
    outs: list[Value | None] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    derived: bool = False

    @property
    def sources(self) -> list[Value]:
        """The values that were read, each once."""
        return list(dict.fromkeys(self.inputs.values()))

    @property
    def given(self) -> list[Tensor]:
        """Every tensor among the arguments, as the operation saw it."""
        given = flat(self.args, self.kwargs)
        for tensor, version in zip(given, self.versions, strict=True):
            if _version(tensor) != version:
                raise UnsupportedOperationError(
                    f"'{self.name}' read a tensor of shape {list(tensor.shape)} that is written to later on, so that "
                    "what it saw is lost; expected operations that leave their inputs alone. Replace the in-place "
                    "operation."
                )
        return [tensor.detach() for tensor in given]

    def again(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The same call with other tensors in place of those given; the tensors it returns, in order."""
        left = iter(tensors)
        args, kwargs = _swap(self.args, left), _swap(self.kwargs, left)
        out = self.function(*args, **kwargs)
        return _tensors(args[0] if out is None else out)

    def pull(self, cotangents: Sequence[Tensor | None], batched: bool = False) -> list[tuple[Value, Tensor]]:
        """J^T u in each input, by this operation alone; with `batched`, for a leading axis of cotangents."""
        given = [(value, u) for value, u in zip(self.outs, cotangents, strict=True) if value is not None]
        given = [(value, u.to(value.dtype)) for value, u in given if u is not None]
        sources = self.sources
        if not given:
            return []
        if len(sources) == 1:  # nothing else lies between: the recorded graph is this operation
            ends = [value.edge for value, _ in given]
            return _paired(sources, ends, [sources[0].edge], [u for _, u in given], batched)
        # one input may come before another, so the operation is repeated on its own
        tensors = self.given
        leaves = {number: tensors[number].requires_grad_() for number in self.inputs}
        in_place = traits(self.function)[1] is WRITING
        with torch.enable_grad():
            outs = self.again([t.clone() if in_place and number == 0 else t for number, t in enumerate(tensors)])
        ends = [outs[self.outs.index(value)] for value, _ in given]
        return _paired(list(self.inputs.values()), ends, list(leaves.values()), [u for _, u in given], batched)


def _paired(
    values: Sequence[Value], ends: Sequence[Any], starts: Sequence[Any], cotangents: Sequence[Tensor], batched: bool
) -> list[tuple[Value, Tensor]]:
    grads = torch.autograd.grad(
        ends, starts, cotangents, retain_graph=True, allow_unused=True, is_grads_batched=batched
    )
    return [
        (value, grad.to_dense() if grad.is_sparse else grad)
        for value, grad in zip(values, grads, strict=True)
        if grad is not None
    ]


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


@dataclass(eq=False)
class Tape:
    """Nodes in the order of the forward pass; `output` is None where the outputs depend on no parameter."""

    nodes: list[Node]
    parameters: dict[str, Value]
    value: Tensor
    output: Value | None

    @property
    def signature(self) -> tuple:
        """What two batches must share for one to stand for the other: operations, and shapes of single samples."""
        return tuple(
            (node.name, *(None if value is None else value.shape[1:] for value in node.outs)) for node in self.nodes
        )


def record(tangent: Tangent, x: Any) -> Tape:
    """One forward pass at the inputs x, with everything between the parameters and the outputs recorded."""
    with torch.inference_mode(False), torch.enable_grad():
        x = map_tensors(lambda t: t.detach().clone() if t.is_inference() else t.detach(), x)
        check_input(x, tangent.space.device)
        parameters = tangent.parameters
        check_trainable(parameters)
        recorder = TapeRecorder(parameters, x)
        network = tangent.network()
        with recorder:
            out = call(network, x)
    check_output(out, batch_size(x))
    return recorder.tape(out)


# -- the recorder ---------------------------------------------------------------------------------------------------


class TapeRecorder(TorchFunctionMode):
    """Records calls that read a tensor which depends on `parameters`; `inputs` are the data."""

    def __init__(self, parameters: Mapping[str, Tensor], inputs: Any = ()) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.parameters: dict[str, Value] = {}
        self._known: dict[int, tuple[weakref.ref, Value | None, int]] = {}
        self._inside: list[Callable] = []
        self._data = TensorSet()
        self._data.add(*tensors(inputs))
        for name, tensor in parameters.items():
            value = Value(get_gradient_edge(tensor), tensor.shape, tensor.dtype, parameter=name, derived=True)
            self.parameters[name] = value
            self._register(tensor, value)

    def tape(self, out: Tensor) -> Tape:
        """What led to these outputs; calls that did not are left out."""
        output = self.value(out, "the model")
        reached = {output}
        kept: list[Node] = []
        for node in reversed(self.nodes):
            if not reached.isdisjoint(node.outs):
                reached.update(value for source in node.sources for value in (source, source.base))
                kept.append(node)
        return Tape(kept[::-1], self.parameters, out.detach(), output)

    def _register(self, tensor: Tensor, value: Value | None) -> None:
        self._known[id(tensor)] = weakref.ref(tensor), value, _version(tensor)

    def value(self, tensor: Tensor, reader: str) -> Value | None:
        """What is known of a tensor that an operation reads; None for one that no parameter in question went into."""
        if not tensor.requires_grad:
            return None
        reference, value, version = self._known.get(id(tensor), (None, None, 0))
        if reference is None or reference() is not tensor:
            if tensor.is_leaf:  # a parameter outside the space
                self._register(tensor, None)
                return None
            raise UnsupportedOperationError(
                f"'{reader}' reads a tensor of shape {list(tensor.shape)} that depends on parameters and was made by "
                "an operation that cannot be seen (a custom autograd function, say); expected torch operations. Use a "
                "structure that propagates nothing: 'diag', 'kron' or 'full'."
            )
        if _version(tensor) != version:
            raise UnsupportedOperationError(
                f"'{reader}' reads a tensor of shape {list(tensor.shape)} that was written to through a view of it; "
                "expected operations that leave their inputs alone. Replace the in-place operation."
            )
        return value

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward and not recomputed():
            with self:
                return inlined(func)(*args, **kwargs)
        name, kind = traits(func)
        if kind is REFUSABLE:
            refuse_train_mode(func, args, kwargs)
        if func is F.scaled_dot_product_attention and not recomputed():
            with self:
                return attention(*args, **kwargs)
        if func is torch._scaled_dot_product_attention_math:  # what a recorder of uses, inside this one, calls instead
            with self:
                return attention(*args, **kwargs), None
        if can_unroll(func, args) and not recomputed():
            with self:
                return unrolled(func, args, kwargs, _as_it_is)
        given = flat(args, kwargs)
        if not torch.is_grad_enabled():  # nothing that is made here leads back to a parameter
            out = func(*args, **kwargs)
            if any(tensor in self._data or tensor.requires_grad for tensor in given):
                self._data.add(*_tensors(out))
            return out
        found = {number: self.value(tensor, name) for number, tensor in enumerate(given) if tensor.requires_grad}
        inputs = {number: value for number, value in found.items() if value is not None}
        if inputs and func not in self._inside and composite(func) and func not in RULES:
            self._inside.append(func)
            try:
                with self:
                    return inlined(func)(*args, **kwargs)
            finally:
                self._inside.pop()
        data = any(tensor in self._data for tensor in given) or any(not value.derived for value in inputs.values())
        before = args
        if inputs and kind is WRITING and args and isinstance(args[0], Tensor):
            before = (args[0].detach().clone(), *args[1:])
        out = owned(func, func(*args, **kwargs), given)
        target = written_to(kind, args, kwargs)
        made = [target] if target is not None else _tensors(out)
        if data:
            self._data.add(*made)
        if not any(tensor.requires_grad for tensor in made):
            return out
        if inputs:
            self._note(func, name, before, kwargs, inputs, made, not data)
        elif found:  # made of parameters outside the space alone
            for tensor in made:
                self._register(tensor, None)
        return out

    def _note(self, func, name: str, args, kwargs, inputs: dict[int, Value], made: list[Tensor], derived: bool) -> None:
        rule = RULES.get(func)
        node = Node(func, name, rule, args, kwargs, inputs, derived=derived)
        bases = {value.base for value in inputs.values()}
        for tensor in made:
            if not tensor.requires_grad:
                node.outs.append(None)
                continue
            value = Value(get_gradient_edge(tensor), tensor.shape, tensor.dtype, node=node, derived=derived)
            if rule is not None and rule.entrywise and len(bases) == 1:
                (base,) = bases
                same = all(each.shape == tensor.shape for each in (base, *inputs.values()))
                value.origin = base if same else None
            node.outs.append(value)
            self._register(tensor, value)
        if rule is not None and not rule.keeps(node):
            node.args, node.kwargs = (), {}
        node.versions = [_version(tensor) for tensor in flat(node.args, node.kwargs)]
        self.nodes.append(node)


def _tensors(out: Any) -> list[Tensor]:
    return flat((out,), {})


def _swap(value: Any, left: Iterator[Tensor]) -> Any:
    """The same arguments with tensors replaced, in the order of `flat`."""
    if isinstance(value, Tensor):
        return next(left)
    if isinstance(value, (tuple, list)):
        parts = [_swap(part, left) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return {key: _swap(part, left) for key, part in value.items()}
    return value


def _as_it_is(func: Callable, *args: Any) -> Any:
    """The operations of a layer that is unrolled are seen like all others."""
    return func(*args)
