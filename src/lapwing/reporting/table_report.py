"""report_table: the page for a fitted table, in the unit of its target and with its own conformal calibration.

Rows that the fit trained on say little about new ones. If the table is the one that was fitted, the split is made again
from its seed, and only the rows held out to test are used; a hash of their inputs and their score prove that they are
the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from lapwing.errors import DataError
from lapwing.metrics import entropy
from lapwing.reporting.figures import collect
from lapwing.reporting.observations import OUTSIDE_ROWS, SHOWN_COLUMNS, Observations, disturbed
from lapwing.reporting.page import check_early, write
from lapwing.reporting.predictions import Classes, Numbers
from lapwing.reporting.statistics import LEVELS
from lapwing.reporting.words import Figures, number
from lapwing.serialize.files import sha256
from lapwing.tables.bundle import Bundle, Raw, score
from lapwing.tables.conformal import quantile
from lapwing.tables.reading import Table, open_table, pd
from lapwing.tables.targets import TEST, present, split

Tell = Callable[[str, float], object]
ROWS = 100_000
"""A report uses at most this many rows, the first ones."""


@dataclass(frozen=True, eq=False)
class Held:
    """Rows with targets: inputs, targets in their unit, numbers of the rows in the table, first columns as written."""

    x: Float[Tensor, "rows inputs"]
    y: Tensor
    rows: Int[np.ndarray, " rows"]
    shown: Any
    is_test: bool
    complete: bool


def report_table(
    bundle: Bundle,
    source: Any,
    path: str | os.PathLike[str],
    *,
    out_of_distribution: Any = None,
    title: str | None = None,
    progress: Tell | None = None,
) -> Figures:
    """Writes the page for a fitted table and rows with known targets. Returns its figures, and in `looked_at` which
    rows they are about. `out_of_distribution` is a table of unfamiliar rows."""
    check_early(path)
    tell = progress or (lambda stage, share: None)
    tell("reading the table", 0.0)
    table = open_table(source)
    held = _held(bundle, table, test_rows(bundle, table))
    if held.is_test and not _same_rows(bundle, held):  # another table with as many rows
        held = _held(bundle, table, None)
    made = out_of_distribution is None
    outside = _disturbed(held.x) if made else _inputs(bundle, open_table(out_of_distribution))

    def predicted(x: Tensor) -> Raw:
        parts = []
        for start in range(0, len(x), 10 * bundle.batch):
            tell("predicting", start / len(x))
            parts.append(bundle.raw(x[start : start + 10 * bundle.batch]))
        return Raw.joined(parts)

    raw, other = predicted(held.x), None if outside is None else predicted(outside)
    observed = _observed(bundle, held, raw, other, made)
    tell("drawing", 0.0)
    figures = collect(
        bundle.la,
        observed,
        classes=bundle.classes or None,
        title=title or f"{bundle.target.name}, predicted from {table.name}",
        conformal=_conformal(bundle, observed),
        facts=[f"target {bundle.target.name}"],
        noise=bundle.noise,
        choices=_choices(bundle, held),
        held_out=held.is_test,
    )
    if other is not None:
        figures["unfamiliar"]["flagged"] = [float(bundle.flags(rows).double().mean()) for rows in (raw, other)]
    figures |= {"threshold": bundle.ood.threshold, "fit": bundle.summary.to_dict(), "rows_are_test": held.is_test}
    figures["columns"] = [str(name) for name in held.shown.columns]
    for row in figures["uncertain"]:
        at = row["row"]
        row["columns"] = [_shown(value) for value in held.shown.iloc[at].tolist()]
        row["row"] = int(held.rows[at])
    tell("drawing", 0.3)
    write(path, figures)
    tell("drawing", 1.0)
    return figures | {"looked_at": held.rows.tolist()}


def _observed(bundle: Bundle, held: Held, raw: Raw, outside: Raw | None, made: bool) -> Observations:
    """The predictions of the bundle, in the target's unit."""
    known = bundle.familiarity(raw)
    uncertainty = network = deviation = None if outside is None else bundle.familiarity(outside)
    if bundle.task == "regression":
        data, network = Numbers(held.y, bundle.amounts(raw), bundle.amounts_map(raw)), None
    else:
        scaled = None if bundle.scaled is None else bundle.scaled.probabilities(raw.value)
        data = Classes(held.y, raw.plain, bundle.probabilities(raw), known, scaled)
        if outside is not None:
            uncertainty, network = (entropy(p) for p in (bundle.probabilities(outside), outside.plain))
    return Observations(data, torch.arange(len(held.y)), uncertainty, network, deviation, made, None)


def _disturbed(x: Float[Tensor, "rows inputs"]) -> Float[Tensor, "made inputs"] | None:
    """Unfamiliar rows, made from rows without unknown values; None if there are fewer than two such rows."""
    some = x[~x.isnan().any(1)][:OUTSIDE_ROWS]
    return disturbed(some, torch.Generator().manual_seed(0)) if len(some) > 1 else None


def _held(bundle: Bundle, table: Table, wanted: Int[np.ndarray, " test"] | None) -> Held:
    """Rows that have a target, at most `ROWS`: those that are wanted, or all."""
    xs, ys, shown, count, taken, complete = [], [], [], 0, 0, True
    names = [column.name for column in bundle.encoder.used[:SHOWN_COLUMNS]]
    for frame, x in bundle.encoded(table, target=True):
        values = bundle.target.encode(frame[bundle.target.name])
        rows = np.arange(count, count + len(frame))
        kept = np.flatnonzero(present(values) & (True if wanted is None else np.isin(rows, wanted)))
        if len(kept) > ROWS - taken:
            kept, complete = kept[: ROWS - taken], False
        xs.append(x[torch.from_numpy(kept)])
        ys.append(torch.from_numpy(values[kept]))
        shown.append((rows[kept], frame.iloc[kept][names]))
        count, taken = count + len(frame), taken + len(kept)
        if not complete:
            break
    if not taken:
        raise DataError(
            f"no row of {table.name} has a known value of {bundle.target.name!r}; expected some, as a report compares "
            "predictions with what is true."
        )
    x, y = torch.cat(xs), torch.cat(ys)
    rows = np.concatenate([rows for rows, _ in shown])
    return Held(x, y, rows, pd.concat([frame for _, frame in shown]), wanted is not None, complete)


def test_rows(bundle: Bundle, table: Table) -> Int[np.ndarray, " test"] | None:
    """The rows that the fit held out to test, if this may be its table; None if the numbers of rows differ."""
    used = bundle.summary.rows_used
    name = bundle.target.name
    text = [name] if bundle.target.as_written else []
    if name not in table.columns:
        return None  # reading the rows says so
    values = np.concatenate([bundle.target.encode(frame[name]) for frame in table.chunks([name], text=text)] or [[]])
    if int(present(values).sum()) < sum(used.values()):
        return None
    try:
        parts = split(values, bundle.target, bundle.seed, sum(used.values()))
    except DataError:
        return None
    rows = np.flatnonzero(parts == TEST)
    return rows if len(rows) == used.get("test") else None


def _same_rows(bundle: Bundle, held: Held) -> bool:
    """Whether these are the rows that the fit tested on. The score alone would not tell: similar rows have the same."""
    if sha256(held.x) != bundle.tested:
        return False
    now, stored = score(bundle, held.x, held.y)[-1].nll, bundle.summary.rows[-1].nll
    return abs(now - stored) <= 1e-5 * (1 + abs(stored))


def _inputs(bundle: Bundle, table: Table) -> Float[Tensor, "rows inputs"]:
    parts, count = [], 0
    for _, x in bundle.encoded(table):
        parts.append(x[: ROWS - count])
        count += len(x)
        if count >= ROWS:
            break
    if not count:
        raise DataError(f"{table.name} has no rows; expected at least one unfamiliar row.")
    return torch.cat(parts)


def _conformal(bundle: Bundle, observed: Observations) -> Figures:
    """Coverage and size of the bundle's own conformal intervals or sets; None where rows were too few for the level."""
    data, scores = observed.data, bundle.conformal.scores
    covered: list[float | None] = []
    width: list[float | None] = []
    for level in LEVELS:
        bound = quantile(scores, level)
        if bound == float("inf"):
            covered.append(None)
            width.append(None)
        elif isinstance(data, Classes):
            sets = bundle.conformal.sets(data.probabilities, level)
            covered.append(float(sets.gather(1, data.targets.unsqueeze(1)).double().mean()))
            width.append(float(sets.sum(1).double().mean()))
        else:
            error = (data.targets - data.mean).abs()
            covered.append(float((error <= bound * data.deviation).double().mean()))
            width.append(float(2 * bound * data.deviation.mean()))
    return {"covered": covered, "width": width, "how": f"calibrated on {len(scores):,} rows that the fit held out"}


def _choices(bundle: Bundle, held: Held) -> list[str]:
    used = bundle.summary.rows_used
    seconds = sum(bundle.summary.seconds.values())
    some = "All" if held.complete else f"The first {ROWS:,}"
    said = [
        "These are the rows that the fit held out to test: it neither trained nor calibrated on them."
        if held.is_test
        else f"{some} rows of the table with a known target were looked at. They may have been used for training, and "
        "of rows that were, the figures would be too good.",
        f"Fitted to {used.get('train', 0):,} rows, calibrated on {used.get('calibration', 0):,} and tested on "
        f"{used.get('test', 0):,}, in {seconds:.1f} seconds.",
    ]
    return [*said, *bundle.notes, bundle.ood.explain(bundle.task == "classification")]


def _shown(value: Any) -> str:
    if isinstance(value, (float, np.floating)):
        return "missing" if np.isnan(value) else number(float(value))
    return "missing" if value is None or value is pd.NA else str(value)
