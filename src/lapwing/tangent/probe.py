"""The probe: what is found out about a model once per shape of its input, so that nothing has to be assumed.

- The model is run with one sample changed, and differentiated: what moves belongs to that sample, which gives the
  sample axis of every use. Cotangents that are scaled by another power of two for every sample verify it for all.
- A sample run alone must give what it gives in its batch: coupled samples are refused, and so are random models.
- A parameter that was used where the recorder does not see it (inside a custom autograd function, say; `paths` finds
  it in the graph) is left to the slow path, and so is one whose rows at one sample are not autograd's own gradient.

A few forward and backward passes on a few samples; the result is kept by the `Tangent` and carried over to larger
batches.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from lapwing.errors import ModelError
from lapwing.params import ParamSpace
from lapwing.tangent.fallback import gradients, pull_back
from lapwing.tangent.inputs import batch_size, call, take
from lapwing.tangent.record import Event, Record, Recorder
from lapwing.tangent.samples import SampleAxis, candidates, changed_sample, differs, not_zero
from lapwing.tangent.uses import Use


@dataclass(frozen=True, eq=False)
class Probe:
    """For inputs of one shape: the sample axis of each use (by event number), and events that depend on the data.

    `opaque` names parameters that the record does not explain, with the operation; `settled` is False when the data
    left something open, so that the next batch is probed again; `routed` says that it always will be, because the data
    decide which way they take through the network. `operations` and `sizes` (of the positions of each use)
    say what was seen, so that a probe of a few samples can be carried over to many.
    """

    axes: dict[int, SampleAxis] = field(default_factory=dict)
    dependent: frozenset[int] = frozenset()
    opaque: dict[str, str] = field(default_factory=dict)
    signature: tuple = ()
    settled: bool = True
    operations: tuple[str, ...] = ()
    sizes: dict[int, list[int]] = field(default_factory=dict)
    routed: bool = False

    def carried_over(self, record: Record, batch: int) -> Probe | None:
        """This probe for the record of another batch size, or None if not just the sample axes have grown."""
        if self.operations != tuple(event.name for event in record.events):
            return None
        axes = {}
        for number, axis in self.axes.items():
            use = record.events[number].use
            if use is None:
                return None
            sizes = [size for place, size in enumerate(self.sizes[number]) if place != axis.axis]
            now = _position_sizes(use)
            if now.pop(axis.axis) != axis.outer * batch * axis.inner or now != sizes:
                return None
            axes[number] = SampleAxis(axis.axis, axis.outer, batch, axis.inner)
        return Probe(axes, self.dependent, self.opaque, record.signature)


def probe(model: nn.Module, space: ParamSpace, parameters: dict[str, Tensor], x: Any) -> Probe:
    """Finds where the samples are. Raises ModelError if samples are coupled or the model is random."""
    batch = batch_size(x)
    middle = batch // 2

    def run(inputs: Any, dependent: frozenset[int]) -> tuple[Record, Tensor]:
        recorder = Recorder(space, parameters, inputs, dependent, snapshot=torch.clone)
        with recorder:
            value = call(model, inputs)
        return recorder.record, value

    base, value = run(x, frozenset())
    if value.dim() < 2 or value.shape[0] != batch:
        return Probe()  # a wrong output shape is reported by the caller
    _refuse_reentrant(value)
    alone = _check_alone(model, x, value, sorted({0, middle}))

    # events that depend on the data although nothing that went in was known to: found one round at a time
    dependent: frozenset[int] = frozenset()
    changed = changed_sample(x, middle)
    other, other_value, choice = base, value, False
    while changed is not None:
        other, other_value = run(changed, dependent)
        if _other_ways(base, other):
            choice, changed = _check_ways(model, x, value, alone), None
            break
        hidden = _changed_events(base, other) - dependent - {n for n, e in enumerate(base.events) if e.dependent}
        if not hidden:
            break
        dependent |= {min(hidden)}
        base, value = run(x, dependent)

    unseen = base.unseen(value, parameters)
    base.opaque.update(unseen)
    uses = base.uses
    sizes = {number: _position_sizes(use) for number, use in uses}
    open_axes = {number: _possible(use, sizes[number], batch) for number, use in uses}
    names = [name for name in space.names if name not in base.opaque]
    # one backward pass serves both questions: which positions belong to the sample, and what the record leaves out
    of_middle = _gradients(
        value, [*(use.edge for _, use in uses), *(parameters[n] for n in names)], _one(value, middle)
    )
    for (number, use), grad in zip(uses, of_middle[: len(uses)], strict=True):
        open_axes[number] = _backward_consistent(use, grad, open_axes[number], middle)
    _keep_consistent(uses, open_axes, value)
    wanted = (middle,) if alone else (middle, 0, batch - 1)
    for sample in dict.fromkeys((middle, 0, batch - 1)):
        if sample not in wanted and all(len(found) < 2 for found in open_axes.values()):
            break
        if sample != middle:
            changed = None if choice else changed_sample(x, sample)
            other, other_value = (base, value) if changed is None else run(changed, dependent)
            if _other_ways(base, other):
                choice, changed = _check_ways(model, x, value, alone), None
        if changed is None:
            continue
        if batch > 1:
            _check_independent(value, other_value, sample)
        for number, use in uses:
            event, again = base.events[number], other.events[number]
            open_axes[number] = _forward_consistent(use, event, again, open_axes[number], sample)

    opaque = unseen | {
        name: use.operation
        for number, use in uses
        if not open_axes[number]
        for source in use.sources
        for name in source.names
    }
    axes = {number: found[0] for number, found in open_axes.items() if found}
    base.opaque.update(opaque)
    by_use = dict(zip((number for number, _ in uses), of_middle[: len(uses)], strict=True))
    by_name = dict(zip(names, of_middle[len(uses) :], strict=True))
    opaque |= _unexplained(space, parameters, base, axes, by_use, by_name, middle)
    routed = choice or base.routed
    settled = not routed and all(len(found) < 2 for found in open_axes.values())
    operations = tuple(event.name for event in base.events)
    return Probe(axes, dependent, opaque, base.signature, settled, operations, sizes, routed)


# -- sample axes ----------------------------------------------------------------------------------------------------


def _position_sizes(use: Use) -> list[int]:
    sizes = use.positions(torch.empty(1, *use.shape, device="meta")).shape[1:]
    return list(sizes[: len(sizes) - use.features])


def _possible(use: Use, sizes: list[int], batch: int) -> list[SampleAxis]:
    """Every axis the samples may lie along; none if the operation sees them one by one, in parts, or not at all."""
    if 0 in sizes:
        return []
    if batch == 1:  # every position belongs to the one sample, and any axis along which no parameter varies will do
        found = [SampleAxis(axis, 1, 1, size) for axis, size in enumerate(sizes)]
        return [axis for axis in found if not use.blocked(axis.axis)][:1]
    return [axis for axis in candidates(sizes, batch) if not use.blocked(axis.axis)]


def _forward_consistent(use: Use, base: Event, other: Event, found: list[SampleAxis], sample: int) -> list[SampleAxis]:
    if base.out is None or other.out is None:
        return found
    if base.out.shape != other.out.shape:
        return []
    return _consistent(use, differs(base.out, other.out), found, sample)


def _backward_consistent(use: Use, grad: Tensor | None, found: list[SampleAxis], sample: int) -> list[SampleAxis]:
    return found if grad is None else _consistent(use, not_zero(grad), found, sample)


def _consistent(use: Use, moved: Bool[Tensor, "..."], found: list[SampleAxis], sample: int) -> list[SampleAxis]:
    moved = use.positions(moved.unsqueeze(0)).squeeze(0)
    moved = moved.flatten(moved.dim() - use.features).any(-1) if use.features else moved
    return [axis for axis in found if not bool((moved & ~axis.member(moved.shape, sample).to(moved.device)).any())]


def _weights(value: Tensor) -> Tensor:
    """Different weights for the outputs of a sample, the same for every sample; no random numbers are drawn."""
    count = torch.arange(value[0].numel(), device=value.device, dtype=torch.float64)
    return (1.25 + torch.cos(1 + 2 * count)).reshape(value[0].shape).to(value.dtype).expand(value.shape)


def _one(value: Tensor, sample: int) -> Tensor:
    """The weights for one sample, zero for the others."""
    u = torch.zeros_like(value)
    u[sample] = _weights(value)[sample]
    return u


def _gradients(value: Tensor, inputs: list[Any], cotangent: Tensor) -> list[Tensor | None]:
    if not value.requires_grad or not inputs:
        return [None] * len(inputs)
    return gradients(value, inputs, cotangent, retain_graph=True)


_DIGITS = 8
"""Codes of one pass: powers of two, by which numbers are multiplied without rounding, in any precision."""


def _keep_consistent(uses: list[tuple[int, Use]], open_axes: dict[int, list[SampleAxis]], value: Tensor) -> None:
    """Drops every axis that some sample contradicts: what is linear in u_n alone is multiplied by the code of n."""
    left = [(number, use) for number, use in uses if open_axes[number]]
    if len(value) == 1 or not left:
        return
    weights, edges = _weights(value), [use.edge for _, use in left]
    plain = _gradients(value, edges, weights)
    index = torch.arange(len(value), device=value.device)
    for place in range(len(value)):
        digit = index // _DIGITS**place % _DIGITS
        if place and not bool(digit.any()):
            break
        code = torch.pow(2.0, digit).to(value.dtype)
        coded = _gradients(value, edges, weights * code.reshape(-1, *(1,) * (value.dim() - 1)))
        for (number, use), before, after in zip(left, plain, coded, strict=True):
            if before is not None and after is not None:
                open_axes[number] = [a for a in open_axes[number] if _coded(use, before, after, a, code)]


def _coded(use: Use, before: Tensor, after: Tensor, axis: SampleAxis, code: Tensor) -> bool:
    before, after = (use.positions(grad.unsqueeze(0)).squeeze(0) for grad in (before, after))
    along = code.to(before.dtype).repeat_interleave(axis.inner).repeat(axis.outer)
    expected = before * along.reshape([-1 if place == axis.axis else 1 for place in range(before.dim())])
    eps = torch.finfo(before.dtype).eps
    off = (after - expected).abs() > eps**0.5 * expected.abs() + 16 * eps * after.abs().max()
    return not bool(off.any())


# -- independence ---------------------------------------------------------------------------------------------------


def _check_alone(model: nn.Module, x: Any, value: Tensor, samples: list[int]) -> bool:
    """Whether samples give alone what they give in the batch; False if the model cannot be run on one."""
    value = value.detach()
    finite = value[torch.isfinite(value)]
    scale = float(finite.abs().max()) if len(finite) else 1.0
    for sample in samples:
        try:
            with torch.no_grad():
                alone = call(model, take(x, slice(sample, sample + 1))).detach()
        except ModelError:
            return False
        if alone.shape != value[sample : sample + 1].shape:
            return False
        off = (alone[0] - value[sample]).abs() > torch.finfo(value.dtype).eps ** 0.5 * scale
        if bool(off.any()):
            raise ModelError(
                f"data point {sample} gives another output alone than in its batch of {value.shape[0]}; expected "
                "independent samples and a deterministic model. Call model.eval(); a layer that normalises or attends "
                "over the batch axis, or draws random numbers, cannot be linearised per sample."
            )
    return True


def _check_independent(value: Tensor, other: Tensor, sample: int) -> None:
    moved = differs(value.detach(), other.detach()).flatten(1).any(1)
    moved[sample] = False
    if bool(moved.any()):
        raise ModelError(
            f"changing data point {sample} alone changes the model's output for other data points too; expected "
            "independent samples and a deterministic model. Call model.eval(); a layer that normalises or attends over "
            "the batch axis, or draws random numbers, cannot be linearised per sample."
        )


def _refuse_reentrant(value: Tensor) -> None:
    """A reentrant checkpoint computes parameters' gradients where `torch.autograd.grad` cannot see them."""
    seen, stack = set(), [value.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "CheckpointFunctionBackward":
            raise ModelError(
                "the model uses torch.utils.checkpoint with use_reentrant=True, whose gradients are hidden from "
                "torch.autograd.grad; expected use_reentrant=False. Pass that to checkpoint, or switch it off."
            )
        stack += [function for function, _ in node.next_functions]


def _other_ways(base: Record, other: Record) -> bool:
    """Whether other operations were called: a choice in Python that depends on the data."""
    return [event.name for event in base.events] != [event.name for event in other.events]


def _check_ways(model: nn.Module, x: Any, value: Tensor, alone: bool) -> bool:
    """Samples may choose their ways, each for itself: then each gives the same alone. Refused if not."""
    if not alone or not _check_alone(model, x, value, list(range(len(value)))):
        raise ModelError(
            "the operations of the forward pass change with the data (control flow in Python), and the model cannot be "
            "run on one data point to see what it does with it; expected the same operations for every input of one "
            "shape. Write the choice with torch.where."
        )
    return True


def _changed_events(base: Record, other: Record) -> frozenset[int]:
    return frozenset(
        number
        for number, (a, b) in enumerate(zip(base.events, other.events, strict=True))
        if a.out is not None and b.out is not None and (a.out.shape != b.out.shape or bool(differs(a.out, b.out).any()))
    )


# -- what the record does not explain -------------------------------------------------------------------------------


@torch.no_grad()
def _unexplained(
    space: ParamSpace,
    parameters: dict[str, Tensor],
    base: Record,
    axes: dict[int, SampleAxis],
    by_use: dict[int, Tensor | None],
    by_name: dict[str, Tensor | None],
    sample: int,
) -> dict[str, str]:
    """Parameters whose rows, for one sample, are not the gradient `by_name` that autograd finds for it."""
    pieces, largest = [], 0.0

    def pull(derived, rows):
        return pull_back(derived, rows, parameters, space, frozenset(base.opaque))

    coarsest = {name: torch.finfo(parameter.dtype).eps for name, parameter in parameters.items()}
    for number, use in base.uses:
        grad = by_use[number]
        if grad is not None:
            for name in (name for source in use.sources for name in source.names):  # coarser under autocast
                coarsest[name] = max(coarsest[name], torch.finfo(grad.dtype).eps)
            largest = max(largest, float(grad.abs().max()))
            # a rule that fails leaves rows out, and its parameters are found to be unexplained below
            with suppress(RuntimeError):
                pieces += use.pieces(grad.unsqueeze(0), axes[number], space.dtype, pull)
    expected = [by_name.get(name) for name in space.names]
    scales = [0.0 if grad is None or not grad.numel() else float(grad.abs().max()) for grad in expected]
    largest = max([largest, *scales])
    # the rows are added to minus the gradient: what is left over is what the record does not explain
    left = [
        torch.zeros(shape.numel(), dtype=space.dtype, device=space.device)
        if grad is None
        else grad.detach().flatten().to(space.dtype).neg()
        for grad, shape in zip(expected, space.shapes, strict=True)
    ]
    over = torch.cat(left)
    for piece in pieces:
        piece.add_to(over[None, None], slice(sample, sample + 1))
    over.abs_()
    found = {}
    for name, scale in zip(space.names, scales, strict=True):
        eps = coarsest[name]
        tolerance = eps**0.5 * scale + min(1e3 * eps, eps**0.5) * largest
        if name not in base.opaque and bool((over[space.segment(name)] > tolerance).any()):
            found[name] = base.seen(name)
    return found
