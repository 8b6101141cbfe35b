"""plan: every structure with the time and memory that it would take here, and the one to choose, with the reason.

    found = lapwing.plan(model, "classification", train_loader, memory_budget="2 GB")
    print(found)
    la = Laplace(model, "classification", "all", found.chosen)

One recorded pass over one batch says what the network is made of (`counts`), and a few hundred milliseconds of timing
what operations cost on this machine (`machine_rates`). Nothing is fitted. "fit" is from the data to a posterior that is
ready, decompositions included, and "predict" one batch of the loader's size after that; both without what is looked at
once per network. Memory is the largest sum of what is kept and what is at work, the model and the data left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lapwing.errors import DataError, OptionError
from lapwing.estimate.cotangents import exact
from lapwing.estimate.data_pass import one_shot, pair
from lapwing.laplace.counts import Counts, Layer, fit_work, prediction_work
from lapwing.laplace.machine_rates import Rates, best, machine_of
from lapwing.laplace.structures import STRUCTURES, AnyTangent
from lapwing.likelihoods import Likelihood
from lapwing.linalg import LookupRows, OuterRows, Piece
from lapwing.linalg.budget import MemoryBudget, available_memory, size_text
from lapwing.tangent import Tangent
from lapwing.tangent.inputs import batch_size, take, tensors
from lapwing.tangent.model import FEW_SAMPLES

FULL_LIMIT = 3000
"""Weights up to which `auto` keeps every covariance: [P, P] and one eigendecomposition, some seconds at most."""
FEW_ROWS = 1000
"""Rows of the data, N C, up to which `auto` keeps every covariance by them, whatever the number of weights."""
EPOCHS = 200
"""Gradient passes over the data that a fit may cost where no time budget says otherwise."""
TIMED = 0.1
"""Seconds of the forward pass that is timed, at most, if a batch can be cut."""


@dataclass(frozen=True)
class Alternative:
    """One structure: seconds of a fit and of a prediction, bytes at the peak, and whether it fits the budgets."""

    structure: str
    fit_seconds: float | int
    prediction_seconds: float | int
    memory: int
    fits: bool
    note: str = ""


@dataclass(frozen=True)
class Plan:
    """The alternatives, in the order of the table of structures; `chosen` is one of them, and `reason` says why."""

    alternatives: tuple[Alternative, ...]
    chosen: str
    reason: str
    counts: Counts
    memory_budget: int | None
    time_budget: float | int | None

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The table as data."""
        return [{**vars(each), "chosen": each.structure == self.chosen} for each in self.alternatives]

    def __getitem__(self, structure: str) -> Alternative:
        return next(each for each in self.alternatives if each.structure == structure)

    def __str__(self) -> str:
        head = ("", "structure", "fit", "predict", "memory", "fits", "")
        lines: list[tuple[str, ...]] = [head]
        for each in self.alternatives:
            mark = "*" if each.structure == self.chosen else ""
            times = seconds_text(each.fit_seconds), seconds_text(each.prediction_seconds)
            lines.append(
                (mark, each.structure, *times, size_text(each.memory), "yes" if each.fits else "no", each.note)
            )
        widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
        left = (0, 1, 5, 6)
        shown = [
            "  ".join(
                t.ljust(w) if i in left else t.rjust(w) for i, (t, w) in enumerate(zip(line, widths, strict=True))
            )
            for line in lines
        ]
        size = f"{self.counts.weights:,} weights, {self.counts.points:,} points, {self.counts.outputs:,} outputs"
        return "\n".join([size, *(line.rstrip() for line in shown), f"{self.reason}."])


def seconds_text(seconds: float | int) -> str:
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 6000 else f"{seconds / 3600:.3g} h"


# -- counting ----------------------------------------------------------------------------------------------------------


def counted(
    tangent: AnyTangent, likelihood: Likelihood, x: Any, y: Any, points: int, batch_points: int | None = None
) -> tuple[Counts, Rates]:
    """What the network and the data are made of, and what they cost here, from one batch."""
    batch = batch_size(x)
    few = take(x, slice(0, min(FEW_SAMPLES, batch)))
    device, space = tangent.space.device, tangent.space
    tangent.at(few)  # looks at operations and samples, which is done once
    short = best(lambda: tangent.at(few), device, rounds=1)
    size = max(min(FEW_SAMPLES, batch), min(batch, int(TIMED * min(FEW_SAMPLES, batch) / max(short, 1e-9))))
    x, y = take(x, slice(0, size)), y[:size] if isinstance(y, Tensor) and y.dim() else y
    graph = _graph_bytes(tangent, x)
    linear: Any = tangent.at(x)
    forward = best(lambda: tangent.at(x), device) / size
    value = linear.value
    columns = value.shape[1:].numel()
    if isinstance(y, Tensor):
        columns = exact(likelihood, value, y, None).count
    machine, batch = machine_of(space.dtype, device), batch_points or batch
    outputs = value.shape[1:].numel()
    if not isinstance(tangent, Tangent):
        (piece,) = linear.pull(torch.ones_like(value).unsqueeze(0))
        layers = (_layer(piece),)
        counts = Counts(
            space.size, points, batch, outputs, columns, layers, 0, graph // size, space.dtype.itemsize, True
        )
        return counts, Rates(machine, forward, 0.0)
    at_once = max(1, min(columns, 8, tangent.budget // 8 // max(1, linear.cotangent_bytes)))
    units = torch.ones_like(value).unsqueeze(0).expand(at_once, *value.shape).contiguous()
    with torch.no_grad():
        pieces = linear.pull(units)
        backward = best(lambda: linear.pull(units), device) / size / at_once
    layers = tuple(map(_layer, pieces))
    entries = sum(use.shape.numel() for use, _ in linear.uses) // size
    counts = Counts(space.size, points, batch, outputs, columns, layers, entries, graph // size, space.dtype.itemsize)
    return counts, Rates(machine, forward, backward)


def _layer(piece: Piece) -> Layer:
    if isinstance(piece, OuterRows):
        layout = piece.layout
        return Layer("matrix", layout.rows, layout.width, layout.groups, piece.shared)
    if isinstance(piece, LookupRows):
        return Layer("table", piece.layout.rows, piece.layout.cols, 1, piece.positions)
    return Layer("vector", sum(stop - start for start, stop in piece.segments), 1)


def _graph_bytes(tangent: AnyTangent, x: Any) -> int:
    """What the graph of a forward pass keeps, parameters and inputs left out."""
    known = {t.untyped_storage()._cdata for t in (*tangent.parameters.values(), *tensors(x))}
    held: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            held[storage._cdata] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        linear = tangent.at(x)
    return sum(held.values()) + linear.value.numel() * linear.value.element_size()


def points_of(loader: Iterable[Any]) -> int:
    """How many data points a loader has: its data set's, or those of its batches."""
    if one_shot(loader):
        raise DataError(
            "the data are an iterator, of which a plan would take the first batch away; expected data that can be gone "
            "through again. Give a list of batches or a DataLoader."
        )
    dataset = getattr(loader, "dataset", None)
    if isinstance(dataset, Sized):
        return len(dataset)
    return sum(batch_size(batch) for batch in loader)


# -- choosing ----------------------------------------------------------------------------------------------------------


def planned(
    counts: Counts,
    rates: Rates,
    subset: str,
    options: Mapping[str, Mapping[str, Any]],
    memory: MemoryBudget,
    free: int | None,
    time_budget: float | int | None = None,
    whole_tensors: bool = True,
) -> Plan:
    """The table, and the choice. `options` by structure; `memory` is the budget, and `free` what the machine has."""
    limit = free if memory.total is None else memory.total
    batch, found = counts.of_batch(min(counts.batch, counts.points)), []
    for name, row in STRUCTURES.items():
        if subset not in row.subsets or not (whole_tensors or row.parts_of_tensors):
            continue
        given = options.get(name, {})
        fit = fit_work(name, counts, given, memory.intermediate)
        prediction = prediction_work(name, batch, given, memory.intermediate, counts)
        peak = int(fit.kept + max(fit.peak, prediction.peak))
        seconds = rates.seconds(fit), rates.seconds(prediction)
        note = fit.refused
        if not note and limit is not None and peak > limit:
            note = f"more than the {size_text(limit)} of {'the budget' if memory.total is not None else 'free memory'}"
        if not note and time_budget is not None and seconds[0] > time_budget:
            note = f"more than the {seconds_text(time_budget)} of the time budget"
        found.append(Alternative(name, *seconds, peak, not note, note))
    chosen, reason = _choice(counts, rates, {each.structure: each for each in found}, time_budget)
    return Plan(tuple(found), chosen, reason, counts, memory.total, time_budget)


def _choice(
    counts: Counts, rates: Rates, table: Mapping[str, Alternative], time_budget: float | int | None
) -> tuple[str, str]:
    """The most exact structure that fits: full, gp, (with a time budget) ekfac, kron, diagonals, matrix_free."""
    p, rows = counts.weights, counts.rows
    epoch = counts.points * (rates.forward + rates.backward)

    def fits(name: str) -> bool:
        return name in table and table[name].fits

    def quick(name: str) -> bool:
        return fits(name) and (time_budget is not None or table[name].fit_seconds <= max(1.0, EPOCHS * epoch))

    if p <= FULL_LIMIT and fits("full"):
        return "full", f"full: {p:,} weights, so every covariance fits (up to {FULL_LIMIT:,})"
    if time_budget is not None and fits("full"):
        cost = f"{seconds_text(table['full'].fit_seconds)} and {size_text(table['full'].memory)}"
        return "full", f"full: every covariance of {p:,} weights fits the budgets, with {cost}"
    if fits("gp") and (rows <= FEW_ROWS or time_budget is not None):
        return "gp", f"gp: every covariance of {p:,} weights, by {rows:,} rows of the data"
    without = f"{p:,} weights are more than full and {rows:,} rows more than gp is kept for"
    if time_budget is not None and fits("ekfac"):
        return "ekfac", f"ekfac: the most exact that fits the budgets; {without}"
    if quick("kron"):
        return "kron", f"kron: {without}"
    slow = "the others take more time or memory than there is"
    if counts.columns > 1 and quick("propagated_diag"):
        return (
            "propagated_diag",
            f"propagated_diag: its cost does not grow with the {counts.columns:,} outputs; {slow}",
        )
    if quick("diag"):
        return "diag", f"diag: {slow}"
    if fits("matrix_free"):
        return "matrix_free", f"matrix_free: it keeps nothing but the data and the network; {slow}"
    possible = [each for each in table.values() if each.fits]
    if possible:
        quickest = min(possible, key=lambda each: each.fit_seconds)
        return quickest.structure, f"{quickest.structure}: the quickest of those that fit; {slow}"
    smallest = min(table.values(), key=lambda each: each.memory)
    return smallest.structure, f"{smallest.structure}: nothing fits the budgets, and this takes the least memory"


def plan_of(
    tangent: AnyTangent,
    likelihood: Likelihood,
    batch: Any,
    points: int,
    subset: str,
    options: Mapping[str, Mapping[str, Any]],
    memory: MemoryBudget,
    time_budget: float | int | None,
    batch_points: int | None = None,
) -> Plan:
    """The plan of a network as a function of its random weights, from one batch of (inputs, targets or None).

    `batch_points` is how many data points batches have, where that is another number than in this one.
    """
    if time_budget is not None and not time_budget > 0:
        raise OptionError(f"time_budget is {time_budget!r}; expected a number of seconds > 0, or None for no limit.")
    x, y = pair(batch)
    counts, rates = counted(tangent, likelihood, x, y, points, batch_points)
    whole = tangent.space.index is None
    return planned(counts, rates, subset, options, memory, available_memory(tangent.space.device), time_budget, whole)
