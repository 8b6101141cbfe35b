"""What `kfra` makes of a tape: a step for every operation on the way back, and the uses of weights as matrices.

Two tapes of one data point, alone and repeated, show where samples lie in every value, and which values depend on
parameters alone. Batches must show the same operations.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lapwing.errors import UnsupportedOperationError
from lapwing.estimate.propagated.recursion.pool import POOLS, max_pool
from lapwing.estimate.propagated.recursion.refusal import ALTERNATIVES, refuse
from lapwing.estimate.propagated.recursion.sample_axes import Frame, Place, TapedBatch
from lapwing.estimate.propagated.recursion.steps import CONVOLUTIONS, Scaled, Slopes, Smooth, Step, probe, slope_in
from lapwing.estimate.propagated.recursion.uses import Sources, roots, running, terms, without_bias
from lapwing.tangent import Tangent, rules
from lapwing.tangent.inputs import batch_size, map_tensors, take
from lapwing.tangent.sources import Alias
from lapwing.tangent.uses import Contraction, Lookup
from lapwing.tape.nodes import Node, Value
from lapwing.tape.rules.kinds import Entrywise, slopes
from lapwing.tape.tape import Tape, record

_PRELUS = frozenset((F.prelu, torch.prelu, Tensor.prelu))
_NORMS = frozenset((F.batch_norm, F.layer_norm, F.group_norm, F.instance_norm, F.rms_norm))
_PRODUCTS = frozenset((rules.linear, rules.matmul, rules.addmm, rules.einsum, rules.bilinear))


@dataclass
class TapePlan:
    """The structural tape (one data point), its steps by node, and the weights' uses by node."""

    tape: Tape
    frame: Frame
    steps: dict[int, Step]
    uses: dict[int, Contraction | Lookup]
    tangent: Tangent

    def batch(self, tape: Tape, size: int) -> TapedBatch:
        """A batch beside the structure; refused where it does something else."""
        value = _paired(self.tape, tape)
        if value is None or any(value[v].shape != place.batched(size) for v, place in self.frame.place.items()):
            raise UnsupportedOperationError(
                "the network takes another way through its operations for this batch than for the first data point; "
                f"expected the same operations and shapes for all data. {ALTERNATIVES}"
            )
        return TapedBatch(tape, size, value)


def structure(tangent: Tangent, x: Any, split: Callable[[TapePlan], Collection[int]]) -> TapePlan:
    """From the first data point of x. `split` names uses whose bias is to be a block of its own."""
    size = batch_size(x)
    alone = take(x, slice(0, 1))
    twice = map_tensors(lambda t: t[[0, 0]] if t.dim() and t.shape[0] == size else t, x)
    tape, double = record(tangent, alone), record(tangent, twice)
    value = _paired(tape, double)
    if value is None:
        raise UnsupportedOperationError(
            "the network takes another way through its operations for two data points than for one; expected the same "
            f"operations for every batch. {ALTERNATIVES}"
        )
    place = {v: _place(v, value[v]) for v in value}
    like = torch.zeros((), dtype=tangent.space.dtype, device=tangent.space.device)
    builder = _Builder(
        tangent, tape, double, Frame(place, like, tangent.budget, Sources.of(tangent)), {w: v for v, w in value.items()}
    )
    found = builder.build(())
    apart = split(found)
    return builder.build(apart) if apart else found


def _place(one: Value, two: Value) -> Place:
    if one.shape == two.shape:
        return Place(one.shape, None)
    axes = [i for i, (a, b) in enumerate(zip(one.shape, two.shape, strict=True)) if a != b]
    if len(axes) != 1 or two.shape[axes[0]] != 2 * one.shape[axes[0]]:
        name = "the input" if one.node is None else one.node.name
        raise refuse(name, f"its output has shape {list(one.shape)} for one data point and {list(two.shape)} for two")
    return Place(one.shape, axes[0], one.shape[axes[0]] > 1)


def _paired(tape: Tape, other: Tape) -> dict[Value, Value] | None:
    """Values of one tape -> those of another; None unless both hold the same operations on the same values."""
    if len(tape.nodes) != len(other.nodes) or (tape.output is None) != (other.output is None):
        return None
    value = {v: other.parameters[name] for name, v in tape.parameters.items()}
    for a, b in zip(tape.nodes, other.nodes, strict=True):
        if a.function != b.function or a.inputs.keys() != b.inputs.keys() or len(a.outs) != len(b.outs):
            return None
        if any(value[v] is not b.inputs[i] for i, v in a.inputs.items()):
            return None
        for v, w in zip(a.outs, b.outs, strict=True):
            if (v is None) != (w is None):
                return None
            if v is not None and w is not None:
                if len(v.shape) != len(w.shape):
                    return None
                value[v] = w
    if tape.output is not None and value[tape.output] is not other.output:
        return None
    return value


# -- from nodes to steps --------------------------------------------------------------------------------------------


@dataclass
class _Builder:
    tangent: Tangent
    tape: Tape
    double: Tape
    frame: Frame
    single: dict[Value, Value]
    """A value of the tape of two data points -> the same value for one."""

    def build(self, apart: Collection[int]) -> TapePlan:
        steps: dict[int, Step] = {}
        uses: dict[int, Contraction | Lookup] = {}
        reached = {self.tape.output}
        for number in reversed(range(len(self.tape.nodes))):
            node = self.tape.nodes[number]
            if not any(out in reached for out in node.outs if out is not None):
                continue
            steps[number] = self._step(number, node, number in apart, uses)
            reached |= set(steps[number].inputs)
        return TapePlan(self.tape, self.frame, steps, uses, self.tangent)

    def _step(self, number: int, node: Node, apart: bool, uses: dict[int, Contraction | Lookup]) -> Step:
        rule, function = node.rule, node.function
        if rules.RULES.get(function) in _PRODUCTS or function in CONVOLUTIONS:
            return self._product(number, node, apart, uses)
        if function is F.embedding and self._samples(node):
            use = self.frame.sources.use(node)
            if isinstance(use, Lookup):
                uses[number] = use
                return self._fixed(node, [])
            raise refuse(node.name, "its table is made from parameters by another operation")
        if function in _PRELUS or function in _NORMS:
            return self._channelwise(node)
        if isinstance(rule, Entrywise):
            return self._entrywise(number, node)
        if function in POOLS:
            return max_pool(node, self.frame)
        if rule is None:
            return self._unknown(node)
        if not rule.fixed:
            raise refuse(node.name, "its Jacobian mixes entries and differs between data points")
        return self._fixed(node, node.sources)

    def _samples(self, node: Node) -> bool:
        return any(out is not None and self.frame.place[out].axis is not None for out in node.outs)

    def _fixed(self, node: Node, inputs: list[Value], trusted: bool = False) -> Smooth:
        return Smooth(node, self.frame, inputs, trusted=trusted)

    def _product(self, number: int, node: Node, apart: bool, uses: dict[int, Contraction | Lookup]) -> Step:
        given = node.given
        weights = {i: v for i, v in node.inputs.items() if self.frame.sources.alias(given[i], v) is not None}
        data = list(dict.fromkeys(v for i, v in node.inputs.items() if i not in weights))
        made = next((v for v in data if self.frame.place[v].axis is None), None)
        if made is not None:
            names = sorted(roots(made))
            raise refuse(
                node.name,
                f"its weight is made from {names} by another operation before it meets the data, so that its "
                "curvature is no Kronecker product",
            )
        if len(data) > 1:
            raise refuse(node.name, f"it multiplies {len(data)} tensors that depend on parameters")
        use = self.frame.sources.use(node) if weights else None
        if not weights:
            return self._fixed(node, data)
        covered = set() if use is None else {name for source in use.sources for name in source.names}
        missed = sorted({v.parameter or node.name for v in weights.values() if not roots(v) <= covered})
        if not isinstance(use, Contraction) or missed:
            raise refuse(node.name, f"no rule says how it uses {missed or 'its weights'}")
        bias = None if use.bias is None else self._bias(node, given, use)
        joined = use.weight is not None and self._joined(use)
        if use.weight is not None:
            uses[number] = without_bias(use) if apart else use
        scaled = [bias] if bias is not None and (apart or not joined) else []
        step = self._fixed(node, data, trusted=use.weight is not None)
        step.scaled, step.slopes = scaled, lambda node, batch: [None] * len(scaled)
        return step

    def _joined(self, use: Contraction) -> bool:
        viewed = isinstance(use.weight, Alias) and use.weight.factorised(use.split, use.perm) is not None
        return viewed and isinstance(use.bias, Alias) and use.bias.in_order

    def _bias(self, node: Node, given: Sequence[Tensor], use: Contraction) -> Scaled:
        number = next(
            i
            for i, v in node.inputs.items()
            if self.frame.sources.alias(given[i], v) == use.bias and given[i].dim() == 1
        )
        value, (out,) = node.inputs[number], node.outs
        assert out is not None
        last = (1,) * (len(out.shape) - 2) if node.function in CONVOLUTIONS else ()
        return Scaled(value, (value.shape.numel(), *last))

    # -- entry by entry

    def _entrywise(self, number: int, node: Node) -> Step:
        (two,) = self.double.nodes[number].outs
        assert two is not None
        device = self.frame.like.device
        if two.origin is not None:
            base = self.single[two.origin]
            return self._scaled(node, [base], lambda node, batch: [slope_in(node, batch.value[base], device)])
        values = node.sources

        def found(node: Node, batch: TapedBatch) -> list[Tensor | None]:
            (out,) = node.outs
            if out is not None and out.origin is not None:  # a parameter that only a batch of one does not broadcast
                if len(values) > 1:
                    raise refuse(node.name, "its arguments look alike in a batch of one; give larger ones")
                return [slope_in(node, batch.value[values[0]], device)]
            total: dict[Value, Tensor] = {}
            for value, slope in slopes(node, self.frame.like):
                total[value] = total[value] + slope if value in total else slope
            # a plain sum has a number for its slope
            ones = [total.get(batch.value[v], torch.zeros(())) for v in values]
            return [None if one.dim() == 0 and bool(one == 1) else one for one in ones]

        return self._scaled(node, values, found)

    def _scaled(self, node: Node, values: Sequence[Value], found: Slopes) -> Smooth:
        scaled = [Scaled(value, tuple(value.shape)) for value in values]
        return Smooth(node, self.frame, [], scaled, found)

    def _unknown(self, node: Node) -> Step:
        """An activation that nobody registered has to prove that it works entry by entry: J^T u = (J^T 1) * u."""
        sources, outs = node.sources, node.outs
        if len(sources) != 1 or len(outs) != 1 or outs[0] is None or sources[0].shape != outs[0].shape:
            raise refuse(node.name, "nothing is known of it")
        device, (source,) = self.frame.like.device, sources

        def found(node: Node, batch: TapedBatch) -> list[Tensor | None]:
            (out,) = node.outs
            assert out is not None
            slope = slope_in(node, batch.value[source], device)
            u = probe(out.shape.numel(), 0, device).reshape(out.shape).to(out.dtype)
            ((_, pulled),) = node.pull([u])
            atol = torch.finfo(out.dtype).eps ** 0.5 * float(slope.abs().max() + 1e-30)
            if not torch.allclose(pulled, slope * u, rtol=0, atol=atol):
                raise refuse(node.name, "nothing is known of it, and it mixes entries")
            return [slope]

        return self._scaled(node, [source], found)

    # -- scales and shifts

    def _channelwise(self, node: Node) -> Step:
        """Normalisations and PReLU: a weight and a bias that are broadcast over y."""
        data = [node.inputs[0]] if 0 in node.inputs else []
        fixed = node.function is F.batch_norm or running(node)
        if data and not fixed and node.function not in _PRELUS:
            raise refuse(node.name, "it divides by a deviation of its own entries")
        scaled = [Scaled(value, view) for value, view, _ in terms(node)]
        through = data if node.function in _PRELUS else []
        scaled = [Scaled(v, tuple(v.shape)) for v in through] + scaled

        def found(node: Node, batch: TapedBatch) -> list[Tensor | None]:
            (out,) = node.outs
            assert out is not None
            ones = [torch.ones(out.shape, dtype=out.dtype, device=self.frame.like.device)] if through else []
            direct = [dict(node.pull(ones))[batch.value[v]] for v in through]
            return [*direct, *(None if factor is None else factor() for _, _, factor in terms(node))]

        return Smooth(node, self.frame, [] if through else data, scaled, found)
