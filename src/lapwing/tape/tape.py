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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
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
from lapwing.tape.nodes import Node, Value, tensors_of, version_of
from lapwing.tape.plain import attention, composite
from lapwing.tape.rules import RULES


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
        self._known[id(tensor)] = weakref.ref(tensor), value, version_of(tensor)

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
        if version_of(tensor) != version:
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
            self._refuse(func, args, kwargs)
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
            if self._data.meets(given) or any(tensor.requires_grad for tensor in given):
                self._data.add(*tensors_of(out))
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
        data = self._data.meets(given) or any(not value.derived for value in inputs.values())
        before = args
        if inputs and kind is WRITING and args and isinstance(args[0], Tensor):
            before = (args[0].detach().clone(), *args[1:])
        out = owned(func, func(*args, **kwargs), given)
        target = written_to(kind, args, kwargs)
        made = [target] if target is not None else tensors_of(out)
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

    def _refuse(self, func, args, kwargs) -> None:
        refuse_train_mode(func, args, kwargs)

    def _note(self, func, name: str, args, kwargs, inputs: dict[int, Value], made: list[Tensor], derived: bool) -> None:
        rule = RULES.get(func)
        node = Node(func, name, rule, args, kwargs, inputs, derived=derived)
        bases = {value.base for value in inputs.values()}
        for tensor in made:
            if not tensor.requires_grad:
                node.outs.append(None)
                continue
            edge = get_gradient_edge(tensor)
            value = Value(edge, tensor.shape, tensor.dtype, returned=weakref.ref(node), derived=derived)
            if rule is not None and rule.entrywise and len(bases) == 1:
                (base,) = bases
                same = all(each.shape == tensor.shape for each in (base, *inputs.values()))
                value.origin = base if same else None
            node.outs.append(value)
            self._register(tensor, value)
        if rule is not None and not rule.keeps(node):
            node.args, node.kwargs = (), {}
        node.versions = [version_of(tensor) for tensor in flat(node.args, node.kwargs)]
        self.nodes.append(node)


def _as_it_is(func: Callable, *args: Any) -> Any:
    """The operations of a layer that is unrolled are seen like all others."""
    return func(*args)
