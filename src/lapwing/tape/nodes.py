"""What a tape is made of: values, nodes, and the rule that each node's operation has.

A node is one call: it can be made again with other tensors, and pulled back through. A rule says how variances of its
output become variances of its inputs.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lapwing.errors import UnsupportedOperationError
from lapwing.tangent.operations import WRITING, flat, traits


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
    returned: weakref.ref[Node] | None = field(default=None, repr=False)
    origin: Value | None = field(default=None, repr=False)
    derived: bool = False

    @property
    def node(self) -> Node | None:
        """Held by the tape: a value that held it too would be part of a cycle, which stays in memory for long."""
        return None if self.returned is None else self.returned()

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
            if version_of(tensor) != version:
                raise UnsupportedOperationError(
                    f"'{self.name}' read a tensor of shape {list(tensor.shape)} that is written to later on, so that "
                    "what it saw is lost; expected operations that leave their inputs alone. Replace the in-place "
                    "operation."
                )
        return [tensor.detach() for tensor in given]

    def again(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The same call with other tensors in place of those given; the tensors it returns, in order."""
        left = iter(tensors)
        args, kwargs = swap(self.args, left), swap(self.kwargs, left)
        out = self.function(*args, **kwargs)
        return tensors_of(args[0] if out is None else out)

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


def version_of(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


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


def tensors_of(out: Any) -> list[Tensor]:
    return flat((out,), {})


def swap(value: Any, left: Iterator[Tensor]) -> Any:
    """The same arguments with tensors replaced, in the order of `flat`."""
    if isinstance(value, Tensor):
        return next(left)
    if isinstance(value, (tuple, list)):
        parts = [swap(part, left) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return {key: swap(part, left) for key, part in value.items()}
    return value
