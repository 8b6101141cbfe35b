"""Which parameters the outputs depend on by a way that was not recorded, read off autograd's graph.

The recorder sees torch functions. A custom autograd function, scripted code or an operator of an extension is none, and
what happens there can only be seen in the graph: it is walked from the outputs down, and wherever a recorded use is
met, the parameters that the use accounts for are left aside. A parameter that is reached all the same has an unrecorded
path. No value is looked at, so that a gradient which happens to be zero hides nothing; no backward pass is made. Cost:
about a microsecond per node of the graph, in every batch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from lapwing.tangent.sources import Derived

Key = tuple[Any, int]
_OWN = re.compile(r"Backward\d+$|::(AccumulateGrad|CopySlices|CopyBackwards)$")
"""How torch names the nodes of its own operations; those of others end without a number."""


@dataclass
class Paths:
    """For the output of each recorded use: where the graph goes on besides the parameters that the use accounts for.

    `derived` are the sources of uses that were computed from parameters; autograd differentiates them in the
    parameters they name, and in no other.
    """

    onward: dict[Key, list[Key]] = field(default_factory=dict)
    derived: list[Derived] = field(default_factory=list)

    def add(self, edge: GradientEdge, onward: list[Key], sources: Iterable[Any]) -> None:
        self.onward[edge.node, edge.output_nr] = onward
        for source in sources:
            if isinstance(source, Derived):
                self.derived.append(source)

    def unseen(self, output: Tensor, parameters: Mapping[str, Tensor]) -> set[str]:
        """The names of the parameters that the output reaches by a way that no recorded use accounts for."""
        leaves = dict(zip(map(id, parameters.values()), parameters, strict=True))
        inner = {}
        for name, parameter in parameters.items():
            if parameter.grad_fn is not None:
                inner[edge_key(parameter)] = name
        found = {leaves[id(output)]} if id(output) in leaves else set()
        found |= _reached(edge_key(output), leaves, inner, self.onward)
        if self.derived:
            for source in {(s.edge.node, s.edge.output_nr): s for s in self.derived}.values():
                found |= _reached((source.edge.node, source.edge.output_nr), leaves, inner, {}) - source.names
        return found


def custom_function(output: Tensor) -> bool:
    """Whether operations that are not torch's own lie behind an output: a custom autograd function, scripted code."""
    seen, stack = set(), [output.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        if _OWN.search(node.name()) is None:
            return True
        seen.add(node)
        stack += [following for following, _ in node.next_functions]
    return False


def edge_key(tensor: Tensor) -> Key:
    """A tensor's place in autograd's graph; (None, 0) for a leaf."""
    return tensor.grad_fn, tensor.output_nr


def _reached(
    start: Key, leaves: Mapping[int, str], inner: Mapping[Key, str], onward: Mapping[Key, list[Key]]
) -> set[str]:
    """The parameters below `start`; at the outputs of recorded uses the walk goes on as `onward` says."""
    found, seen, stack = set(), set(), [start]
    while stack:
        key = stack.pop()
        node = key[0]
        if node is None or key in seen or node in seen:
            continue
        if key in onward:
            seen.add(key)
            stack += onward[key]
        elif key in inner:
            found.add(inner[key])
        else:
            seen.add(node)
            if following := node.next_functions:
                stack += following
            elif (name := leaves.get(id(getattr(node, "variable", None)))) is not None:
                found.add(name)
    return found
