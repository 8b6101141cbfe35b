"""From a table to calibrated predictions in one call: read, encode, train, fit the posterior, calibrate, score.

    bundle = fit_table("houses.csv", "price", seed=0)
    bundle.summary.table()             # MAP against Laplace on rows that were held out
    bundle.save("houses.lapwing")

The table is read four times in chunks: kinds of columns; the target; statistics of the training rows; their inputs.
What stays in memory is the inputs, [rows, inputs] float32, of at most `NUMBERS` numbers: of a larger table that many
are drawn at random. A part of the rows is held out to calibrate, another to score; neither is seen in training, nor by
the statistics of the columns.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lapwing.errors import DataError, LapwingWarning, OptionError
from lapwing.serialize.files import sha256
from lapwing.tables.bundle import Bundle, score
from lapwing.tables.columns import infer
from lapwing.tables.conformal import Conformal, Unfamiliar, amount_scores, class_scores, rows_needed
from lapwing.tables.encoder import Encoder, learn
from lapwing.tables.network import Spec, as_trained
from lapwing.tables.reading import Table, find_column, open_table
from lapwing.tables.scoring import Summary
from lapwing.tables.stretch import FitProgress
from lapwing.tables.targets import (
    CALIBRATION,
    MARKS,
    TEST,
    TRAIN,
    UNUSED,
    Target,
    present,
    read_target,
    split,
)
from lapwing.tables.temperature import Scaled
from lapwing.tables.training import check_noise, train

NUMBERS = 2**27
"""Inputs that are kept in memory at a time: half a gigabyte."""
FEW = 50
FEW_FOR_THREADS = 50_000
PARTS = {"train": TRAIN, "calibration": CALIBRATION, "test": TEST}

Report = Callable[[str, float], object]


def fit_table(
    source: Any,
    target: str,
    *,
    task: str = "auto",
    seed: int = 0,
    progress: Report | None = None,
    epochs: int | None = None,
    spec: Spec | None = None,
    noise: str = "auto",
) -> Bundle:
    """A network with a posterior, fitted to a CSV or Parquet file or a data frame, to predict the column `target`.

    `task` is "regression", "classification" or "auto", which decides by what the column holds and says why in
    `bundle.target.reason`. `progress(stage, share)` is called with a name and a number from 0 to 1 as the work goes on.
    `spec` chooses the network; its numbers of inputs and outputs are set here. `noise` of amounts is "constant",
    "varying" with the inputs, or "auto", which lets the evidence choose. The same seed gives the same result.
    """
    check_seed(seed)
    tell = progress or (lambda stage, share: None)
    clock = perf_counter()
    tell("reading the table", 0.0)
    table = open_table(source)
    target = find_column(str(target), table.columns, table.name)
    kinds = infer(table.chunks())
    if not kinds:
        raise DataError(f"{table.name} has column names but no rows; expected rows to learn from.")
    wanted, values = read_target(table, target, kinds[target], task)
    check_noise(noise, wanted.task)
    tell("reading the table", 0.5)
    most = max(1000, NUMBERS // max(1, len(table.columns)))
    parts = split(values, wanted, seed, most)
    encoder = learn(table, kinds, leave_out=[target], rows=parts == TRAIN)
    while len(encoder.inputs) * int((parts != UNUSED).sum()) > NUMBERS:  # categories have more inputs than columns
        parts = split(values, wanted, seed, NUMBERS // len(encoder.inputs))
        encoder = learn(table, kinds, leave_out=[target], rows=parts == TRAIN)
    wanted = _standardised(wanted, values[parts == TRAIN])
    x = encode(table, encoder, parts)
    y = {name: values[parts == part] for name, part in PARTS.items()}
    tell("reading the table", 1.0)
    seconds = {"reading": perf_counter() - clock}

    clock = perf_counter()
    spec = spec or Spec(1, 1)
    spec = replace(spec, inputs=len(encoder.inputs), outputs=wanted.outputs)

    def trained(now: FitProgress) -> None:
        tell("training", now.epoch / now.epochs)

    with _threads(len(x["train"])):
        goal = wanted.tensor(y["train"])
        found = train(x["train"], goal, wanted.task, spec, seed=seed, epochs=epochs, noise=noise, callback=trained)
    model, la, shift = found
    spec = as_trained(spec, model)
    seconds["training"] = perf_counter() - clock

    clock = perf_counter()
    tell("calibrating", 0.0)
    one = Conformal(torch.ones(1, dtype=torch.float64))
    counts = {name: len(part) for name, part in y.items()}
    summary = Summary(wanted.task, (), counts, seconds)
    bundle = Bundle(encoder, wanted, spec, model, la, one, one, Unfamiliar(0.0, 0.99, 1), summary, shift=shift)
    bundle = calibrated(bundle, x["calibration"], torch.from_numpy(y["calibration"]))
    tell("calibrating", 0.5)
    rows = score(bundle, x["test"], torch.from_numpy(y["test"]))
    better = _better(bundle, x["test"], y["test"], y["train"])
    seconds["calibration"] = perf_counter() - clock
    notes = [*table.notes, *_notes(wanted, encoder, values, parts, counts), *la.choices]
    notes += [better] if better else []
    notes += [kinds[target].note] if kinds[target].name == "number" and kinds[target].note else []
    tell("calibrating", 1.0)
    if sum(counts.values()) < FEW:
        warnings.warn(_few(sum(counts.values())), LapwingWarning, stacklevel=2)
    summary = replace(summary, rows=rows)
    return replace(bundle, summary=summary, notes=tuple(notes), seed=seed, tested=sha256(x["test"]))


def check_seed(seed: object) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise OptionError(f"the seed is {seed!r}; expected a whole number from 0 to {2**64 - 1}.")


def calibrated(bundle: Bundle, x: Tensor, y: Tensor) -> Bundle:
    """The bundle with conformal scores, the threshold of the flag, and a temperature of the network alone for classes,
    from rows that were held out."""
    raw = bundle.raw(x)
    if bundle.task == "regression":
        both = bundle.amounts_map(raw), bundle.amounts(raw)
        plain, scores = (amount_scores(amounts.mean, amounts.deviation, y) for amounts in both)
    else:
        plain, scores = class_scores(raw.plain, y), class_scores(bundle.probabilities(raw), y)
        bundle = replace(bundle, scaled=Scaled.of(raw.value, y))
    known = bundle.familiarity(raw)
    # rows that are flagged anyway do not say where the flag should go up for others
    ood = Unfamiliar.of(known if bool(raw.strange.all()) else known[~raw.strange])
    return replace(bundle, conformal=Conformal(scores), conformal_map=Conformal(plain), ood=ood)


def encode(table: Table, encoder: Encoder, parts: np.ndarray) -> dict[str, Tensor]:
    """Inputs of the rows of each part, [rows, inputs] float32, filled chunk by chunk."""
    width = len(encoder.inputs)
    out = {name: torch.empty(int((parts == part).sum()), width) for name, part in PARTS.items()}
    filled = dict.fromkeys(out, 0)
    start = 0
    for frame in table.chunks([column.name for column in encoder.used], text=encoder.text):
        here = parts[start : start + len(frame)]
        start += len(frame)
        for name, part in PARTS.items():
            chosen = here == part
            count = int(chosen.sum())
            if count:
                out[name][filled[name] : filled[name] + count] = encoder(frame[chosen])
                filled[name] += count
    if start != len(parts) or any(filled[name] != len(out[name]) for name in out):
        raise DataError(
            f"{table.name} had {len(parts):,} rows and now has {start:,}; expected a file that stays the same."
        )
    return out


@contextmanager
def _threads(rows: int) -> Iterator[None]:
    """One thread for few rows: batches are small, and on a busy machine two threads took ten times as long as one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if rows < FEW_FOR_THREADS else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _standardised(target: Target, values: np.ndarray) -> Target:
    """Mean and deviation of the training rows, for amounts."""
    if target.task == "classification":
        return target
    mean, deviation = float(values.mean()), float(values.std())
    if deviation < max(1e-100, 1e-14 * abs(mean)):
        raise DataError(
            f"values of the target {target.name!r} differ by only {np.ptp(values):.1g}, which is lost in rounding; "
            "expected larger differences. Subtract what is common to all of them, and multiply the rest."
        )
    return replace(target, mean=mean, deviation=deviation)


def _notes(
    target: Target, encoder: Encoder, values: np.ndarray, parts: np.ndarray, counts: dict[str, int]
) -> list[str]:
    """What a user should know about how the table was used, in words."""
    notes = [target.reason]
    without = int((~present(values)).sum())
    if without:
        notes.append(
            f"{without:,} of {len(values):,} rows have no usable value of {target.name!r} ({MARKS}) and were not used."
        )
    used = sum(counts.values())
    if used + without < len(values):
        notes.append(f"Of {len(values):,} rows, {used:,} were drawn at random, as more would not fit in memory.")
    left = [column.note for column in encoder.columns if column.kind == "left out"]
    notes += [f"Left out: {note}" for note in left[:20]]
    if len(left) > 20:
        notes.append(f"Left out: {len(left) - 20} more columns.")
    notes += [column.note for column in encoder.used if column.note]
    if target.task == "classification":
        amounts = np.bincount(values[parts == TRAIN], minlength=len(target.classes))
        rare = [name for name, amount in zip(target.classes, amounts, strict=True) if amount < 5]
        if rare:
            listed = ", ".join(repr(name) for name in rare[:5])
            notes.append(f"Classes with fewer than 5 rows to learn from: {listed}. Do not trust predictions of them.")
    if used < FEW:
        notes.append(_few(used))
    if counts["calibration"] < rows_needed(0.95):
        notes.append(
            f"Only {counts['calibration']} rows could be held out for calibration: conformal intervals and sets at "
            f"95 % need {rows_needed(0.95)}, at 90 % {rows_needed(0.9)}."
        )
    return notes


def _better(bundle: Bundle, x: Tensor, y: np.ndarray, learnt: np.ndarray) -> str:
    """A note if predictions are not shown to beat ones that ignore the columns; else nothing.

    They are shown to if the log-likelihood of the test rows gains, on average, more than two standard errors.
    """
    raw, targets = bundle.raw(x), torch.from_numpy(y)
    if bundle.task == "regression":
        mean, deviation = torch.from_numpy(np.stack([learnt.mean(), learnt.std()]))  # float64: amounts of any scale
        normal = torch.distributions.Normal(mean, deviation)
        gain = bundle.amounts(raw).log_prob(targets) - normal.log_prob(targets)
        same = "their mean and deviation for every row"
    else:
        shares = torch.from_numpy(np.bincount(learnt, minlength=len(bundle.classes)) / len(learnt)).clamp_min(1e-12)
        known = bundle.probabilities(raw).gather(1, targets.unsqueeze(1)).squeeze(1).clamp_min(1e-300)
        gain = known.log() - shares[targets].log()
        same = "the share of each class for every row"
    error = float(gain.std() / len(gain) ** 0.5) if len(gain) > 1 else float("inf")
    if float(gain.mean()) > 2 * error:
        return ""
    return (
        f"On the {len(y):,} rows held out to test, the model is not shown to predict better than {same}: the columns "
        "may say nothing of the target, or the rows are too few to learn it from."
    )


def _few(rows: int) -> str:
    return (
        f"The table has only {rows} usable rows: predictions will be poor, and the scores on the few that were held "
        "out say little. Some hundred rows would be better."
    )
