"""The probe: the model run with one sample changed, to find the sample axis of every use and refuse coupled samples.

Two or three forward passes per new input shape; the result is kept by the `Tangent`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.errors import ModelError, UnsupportedOperationError
from lapwing.params import ParamSpace
from lapwing.tangent.inputs import batch_size, call
from lapwing.tangent.record import Event, Record, Recorder
from lapwing.tangent.samples import SampleAxis, candidates, changed_sample, differs
from lapwing.tangent.uses import Broadcast, Use


@dataclass(frozen=True, eq=False)
class Probe:
    """For inputs of one shape: the sample axis of each use (by event number), and events that depend on the data."""

    axes: dict[int, SampleAxis] = field(default_factory=dict)
    dependent: frozenset[int] = frozenset()


def probe(model: nn.Module, space: ParamSpace, parameters: dict[str, Tensor], x: Any) -> Probe:
    """Finds where the samples are. Raises ModelError if samples are coupled or the model is random."""
    batch = batch_size(x)

    def run(inputs: Any, dependent: frozenset[int]) -> tuple[Record, Tensor]:
        recorder = Recorder(space, parameters, inputs, dependent, snapshot=torch.clone)
        with recorder:
            value = call(model, inputs)
        return recorder.record, value

    base, value = run(x, frozenset())
    if batch == 1:
        axes = {number: _only_sample(use) for number, use in base.uses}
        return Probe(axes)

    # events that depend on the data although nothing that went in was known to: found one round at a time
    dependent: frozenset[int] = frozenset()
    while True:
        other, other_value = run(changed_sample(x, batch // 2), dependent)
        hidden = _changed_events(base, other) - dependent - {n for n, e in enumerate(base.events) if e.dependent}
        if not hidden:
            break
        dependent |= {min(hidden)}
        base, value = run(x, dependent)

    open_axes = {number: _possible(use, batch) for number, use in base.uses}
    for sample in dict.fromkeys((batch // 2, 0, batch - 1)):
        if sample != batch // 2:
            if all(len(found) == 1 for found in open_axes.values()):
                break
            other, other_value = run(changed_sample(x, sample), dependent)
        _check_independent(value, other_value, sample, batch)
        for number, use in base.uses:
            event, changed = base.events[number], other.events[number]
            open_axes[number] = _consistent(use, event, changed, open_axes[number], sample)
    return Probe({number: found[0] for number, found in open_axes.items()}, dependent)


def _only_sample(use: Use) -> SampleAxis:
    """A batch of one: every position belongs to it, and any axis along which no parameter varies will do."""
    sizes = _position_sizes(use)
    axes = [axis for axis in range(len(sizes)) if not (isinstance(use, Broadcast) and use.blocked(axis))]
    if not axes:
        raise _no_axis(use)
    return SampleAxis(axes[0], 1, 1, sizes[axes[0]])


def _position_sizes(use: Use) -> list[int]:
    sizes = use.positions(torch.empty(1, *use.shape, device="meta")).shape[1:]
    return list(sizes[: len(sizes) - use.features])


def _possible(use: Use, batch: int) -> list[SampleAxis]:
    found = candidates(_position_sizes(use), batch)
    if isinstance(use, Broadcast):
        found = [axis for axis in found if not use.blocked(axis.axis)]
    if not found:
        raise _no_axis(use)
    return found


def _no_axis(use: Use) -> UnsupportedOperationError:
    names = sorted(frozenset().union(*(source.names for source in use.sources)))
    return UnsupportedOperationError(
        f"parameter '{names[0]}' is used by '{use.operation}' with an output of shape {tuple(use.shape)}, in which no axis "
        "can be the sample axis; expected one axis that counts the data points. Apply the operation to one sample's "
        "features at a time, or leave the parameter out of the space (requires_grad=False, subset_of_weights)."
    )


def _consistent(use: Use, base: Event, other: Event, found: list[SampleAxis], sample: int) -> list[SampleAxis]:
    if base.out is None or other.out is None:
        return found
    moved = use.positions(differs(base.out, other.out).unsqueeze(0)).squeeze(0)
    moved = moved.flatten(moved.dim() - use.features).any(-1) if use.features else moved
    kept = [axis for axis in found if not bool((moved & ~axis.member(moved.shape, sample).to(moved.device)).any())]
    if not kept:
        raise _coupled(f"the output of '{use.operation}'", sample, len(found))
    return kept


def _check_independent(value: Tensor, other: Tensor, sample: int, batch: int) -> None:
    moved = differs(value.detach(), other.detach()).flatten(1).any(1) if value.dim() > 1 else torch.zeros(0)
    if len(moved) != batch:
        return  # a wrong output shape is reported by the caller
    moved[sample] = False
    if bool(moved.any()):
        raise _coupled("the model's output", sample, batch)


def _coupled(what: str, sample: int, _: int) -> ModelError:
    return ModelError(
        f"changing data point {sample} alone changes {what} for other data points too; expected independent samples and a "
        "deterministic model. Call model.eval(); a layer that normalises or attends over the batch axis, or draws "
        "random numbers, cannot be linearised per sample."
    )


def _changed_events(base: Record, other: Record) -> frozenset[int]:
    names = [event.name for event in base.events], [event.name for event in other.events]
    if names[0] != names[1]:
        raise ModelError(
            "the operations of the forward pass change with the data (control flow in Python); expected the same operations "
            "for every input of one shape. Write the choice with torch.where."
        )
    return frozenset(
        number
        for number, (a, b) in enumerate(zip(base.events, other.events, strict=True))
        if a.out is not None and b.out is not None and bool(differs(a.out, b.out).any())
    )
