"""Operations of a tape as uses of parameters: which arguments are weights, and what a scale is multiplied with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from lapwing.estimate.propagated.recursion.refusal import refuse
from lapwing.tangent import Tangent
from lapwing.tangent.record import whole_aliases
from lapwing.tangent.rules import RULES, Call
from lapwing.tangent.sources import Alias, Derived, Source, view_alias
from lapwing.tangent.uses import Broadcast, Contraction, Use
from lapwing.tape.nodes import Node, Value, swap

Factor = Callable[[], Tensor]


@dataclass(frozen=True, eq=False)
class Sources:
    """Parameters by where they lie in memory, so that a view of one is known for what it is."""

    whole: Mapping[str, Alias]
    stored: Mapping[int, list[tuple[str, Tensor]]]

    @staticmethod
    def of(tangent: Tangent) -> Sources:
        stored: dict[int, list[tuple[str, Tensor]]] = {}
        for name, parameter in tangent.parameters.items():
            stored.setdefault(parameter.untyped_storage().data_ptr(), []).append((name, parameter))
        return Sources(whole_aliases(tangent.space), stored)

    def alias(self, tensor: Tensor, value: Value) -> Alias | None:
        """The parameter, or the view of one, that a tensor is."""
        if value.parameter is not None:
            return self.whole[value.parameter]
        for name, parameter in self.stored.get(tensor.untyped_storage().data_ptr(), []):
            found = view_alias(tensor, parameter, self.whole[name])
            if found is not None:
                return found
        return None

    def use(self, node: Node) -> Use | None:
        """The use that an operation makes of parameters as weights."""
        given = node.given
        known = {id(given[i]): found for i, v in node.inputs.items() if (found := self.alias(given[i], v))}
        return _use(node, given, known)


def terms(node: Node) -> list[tuple[Value, tuple[int, ...], Factor | None]]:
    """(parameter, how it is broadcast over the output, what it is multiplied with) of every argument but the first."""
    given = node.given
    held = {i: Derived(frozenset(roots(v)), v.edge, v.shape, v.dtype) for i, v in node.inputs.items() if i > 0}
    if not held:
        return []
    use = _use(node, given, {id(given[i]): source for i, source in held.items()})
    if not isinstance(use, Broadcast) or len(use.terms) != len(held):
        raise refuse(node.name, "no rule says how it uses its parameters")
    owner = {id(source): node.inputs[i] for i, source in held.items()}
    return [(owner[id(source)], tuple(view), factor) for source, view, factor in use.terms]


def _use(node: Node, given: list[Tensor], known: Mapping[int, Source]) -> Use | None:
    (out,) = node.outs
    assert out is not None
    left = iter(given)
    args, kwargs = swap(node.args, left), swap(node.kwargs, left)
    shape = torch.empty(out.shape, dtype=out.dtype, device="meta")
    use = RULES[node.function](Call(node.function, args, kwargs, shape, lambda t: known.get(id(t))))
    if use is not None:
        use.shape, use.edge = out.shape, out.edge
    return use


def without_bias(use: Contraction) -> Contraction:
    found = replace(use, bias=None)
    found.shape, found.edge = use.shape, use.edge
    return found


def roots(value: Value) -> set[str]:
    """The parameters that a value was made from."""
    if value.parameter is not None:
        return {value.parameter}
    assert value.node is not None
    return {name for source in value.node.sources for name in roots(source)}


def running(node: Node) -> bool:
    """Whether instance_norm uses running statistics, as batch_norm does."""
    names = ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats")
    bound = dict(zip(names, node.args, strict=False)) | node.kwargs
    return node.function is F.instance_norm and bound.get("use_input_stats") is False
