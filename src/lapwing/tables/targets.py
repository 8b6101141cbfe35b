"""The target of a fit, amounts or classes as its column suggests; and the split of rows for training and checks.

    target = read_target(table, "price", kinds["price"])      # Target, and values [rows] (NaN or -1 where missing)
    parts = split(values, target, seed=0)                     # [rows] int8: UNUSED, TRAIN, CALIBRATION, TEST

Reads one column: memory O(rows) of one number each, at most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lapwing.errors import DataError, OptionError
from lapwing.tables.columns import Kind, as_numbers, as_text, as_truth
from lapwing.tables.plain_values import typed
from lapwing.tables.reading import Series, Table, pd

FEW_WHOLE = 10
"""Whole numbers with at most this many different values are taken for classes."""
CLASSES = 100
FEWEST = 8
MARKS = "cells that are empty, or hold a mark such as NA, None, null or -"
"""What counts as missing, in words."""
UNUSED, TRAIN, CALIBRATION, TEST = 0, 1, 2, 3
SHARE, HELD_LEAST, HELD_MOST = 0.15, 20, 10_000
"""Share of the rows that is held out for calibration, and again for the test; bounds of their number."""


@dataclass(frozen=True)
class Target:
    """The target of a fit. `reason` says in words why the task is what it is."""

    name: str
    task: str
    reason: str
    kind: str
    classes: tuple[str, ...] = ()
    """Names as they were given; of several ways to write the same one (yes and Yes, 2 and 2.0) the most frequent."""
    mean: float = 0.0
    deviation: float = 1.0
    words: tuple[str, ...] = ()
    """What each class is known by, the same for every way to write it; not in files from before."""

    @property
    def as_written(self) -> bool:
        """Whether the column is to be read as it is written: names of classes come back as they were given."""
        return self.task == "classification" or self.kind != "number"

    def encode(self, column: Series) -> np.ndarray:
        """Amounts as float64 with NaN where missing; classes as numbers with -1 where missing or unknown."""
        if self.task == "regression":
            return as_truth(column) if self.kind == "boolean" else as_numbers(column)
        words = self.words or _names(pd.Series(list(self.classes), dtype=object), self.kind).tolist()
        return _codes(_names(column, self.kind), {word: number for number, word in enumerate(words)})

    def tensor(self, values: np.ndarray) -> Tensor:
        """What a network is trained on: standardised amounts [N, 1] float32, or class numbers [N]."""
        if self.task == "classification":
            return torch.from_numpy(values.astype(np.int64))
        return torch.from_numpy(((values - self.mean) / self.deviation).astype(np.float32)).unsqueeze(1)

    @property
    def outputs(self) -> int:
        return len(self.classes) or 1

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(stored: Mapping[str, Any]) -> Target:
        return typed(Target, stored)


def present(values: np.ndarray) -> np.ndarray:
    """Which rows have a target."""
    return values >= 0 if values.dtype.kind == "i" else np.isfinite(values)


def read_target(table: Table, name: str, kind: Kind, task: str = "auto") -> tuple[Target, np.ndarray]:
    """The target and its values; standardisation is left at 0 and 1, as it belongs to the training rows."""
    task, reason = choose_task(name, kind, task)
    as_written = task == "classification" or kind.name != "number" or kind.note
    text = [name] if as_written else []
    if task == "regression":
        target = Target(name, task, reason, kind.name)
        columns = table.chunks([name], text=text)
        return target, np.concatenate([np.zeros(0), *(target.encode(frame[name]) for frame in columns)])
    place: dict[str, int] = {}
    spelt: dict[str, Counter[str]] = {}
    parts = [np.zeros(0, dtype=np.int64)]
    for frame in table.written([name], text=text):
        words = _names(table.pointed(frame)[name], kind.name)
        for (word, given), count in Counter(zip(words.tolist(), frame[name].tolist(), strict=True)).items():
            if word is not None:
                place.setdefault(word, len(place))
                spelt.setdefault(word, Counter())[str(given)] += count
        if len(place) > CLASSES:
            raise _too_many(name)
        parts.append(_codes(words, place))
    values = np.concatenate(parts)
    classes = sorted(place, key=_natural)
    names = tuple(spelt[word].most_common(1)[0][0] for word in classes)
    new = np.empty(len(place) + 1, dtype=np.int64)
    new[-1] = -1
    for number, word in enumerate(classes):
        new[place[word]] = number
    if len(classes) == 1:
        raise _constant(name, names[0])
    return Target(name, task, reason, kind.name, names, words=tuple(classes)), new[values]


def choose_task(name: str, kind: Kind, task: str = "auto") -> tuple[str, str]:
    """Regression or classification, and why; an error where the target can be neither."""
    if task not in ("auto", "regression", "classification"):
        raise OptionError(f"unknown task {task!r}; expected 'auto', 'regression' or 'classification'.")
    if not kind.present:
        raise DataError(f"the target {name!r} is empty in every row; expected values to learn from.")
    if kind.name == "date":
        raise DataError(
            f"the target {name!r} holds dates; expected amounts or classes. Turn it into a number, such as days since "
            "the start."
        )
    if kind.name == "left out" and task != "classification":
        raise DataError(
            f"the target cannot be used: {kind.note} Expected amounts (numbers without signs such as $ or %), or "
            "classes (words that repeat)."
        )
    if kind.distinct == 1:
        raise _constant(name)
    numeric = kind.name in ("number", "boolean")
    if task == "regression":
        if not numeric:
            raise DataError(
                f"regression was asked for, but {name!r} holds words; expected numbers. Ask for classification."
            )
        return task, "Regression, as asked for."
    if task == "classification":
        if kind.distinct > CLASSES:
            raise _too_many(name)
        return task, f"Classification with {kind.distinct} classes, as asked for."
    if kind.name == "number" and not (kind.whole and kind.distinct <= FEW_WHOLE):
        what = "numbers with many different values" if kind.distinct > FEW_WHOLE else "numbers that are not all whole"
        return "regression", f"Regression, because {name!r} holds {what}."
    if kind.name != "number" and kind.distinct > CLASSES:
        raise _too_many(name)
    what = "whole numbers" if kind.name == "number" else "true and false" if kind.name == "boolean" else "words"
    reason = f"Classification, because {name!r} holds {what} with only {kind.distinct} different values."
    return "classification", reason + (" Ask for regression if they are amounts." if kind.name == "number" else "")


def split(values: np.ndarray, target: Target, seed: int, most: int | None = None) -> np.ndarray:
    """The part of every row, drawn by the seed; every part has about the same share of each class.

    Of more than `most` usable rows that many are drawn at random; rows without a target are not used.
    """
    random = np.random.default_rng(seed)
    parts = np.full(len(values), UNUSED, dtype=np.int8)
    rows = np.flatnonzero(present(values))
    if len(rows) < FEWEST:
        raise DataError(
            f"only {len(rows)} rows have a value of {target.name!r}; expected at least {FEWEST} to learn from and to "
            "check with, better some hundred. Collect more rows."
        )
    random.shuffle(rows)
    rows = rows[:most]
    if len(np.unique(values[rows])) == 1:
        raise _constant(target.name)
    held = round(min(HELD_MOST, max(SHARE * len(rows), min(HELD_LEAST, len(rows) // 5))))
    if target.task == "classification":
        order = _spread(values[rows])
        rows = rows[order]
        place = (np.arange(len(rows)) * 2 * held) // len(rows)  # every 2 held-th part of the sorted rows gives one row
        first = np.flatnonzero(np.diff(place, prepend=-1))
        # the row is drawn within its part, so that no class is favoured by where its rows begin
        last = np.append(first[1:], len(rows))
        chosen = random.integers(first, last)
        calibration, test = chosen[0::2], chosen[1::2]
        swap = random.random(len(test)) < 0.5
        calibration, test = np.where(swap, test, calibration), np.where(swap, calibration, test)
        parts[rows] = TRAIN
        parts[rows[calibration]], parts[rows[test]] = CALIBRATION, TEST
    else:
        parts[rows] = TRAIN
        parts[rows[:held]], parts[rows[held : 2 * held]] = CALIBRATION, TEST
    if len(np.unique(values[parts == TRAIN])) == 1:
        raise DataError(
            f"the {int((parts == TRAIN).sum())} rows to learn from all have the same value of {target.name!r}; "
            "expected at least two. Collect more rows of the rarer ones, or try another seed."
        )
    return parts


def _names(column: Series, kind: str) -> Series:
    """The class of every row as a word, None where there is none; the same for every way to write it."""
    if kind == "number":  # what is no finite number is missing, also where numbers are names of classes
        return as_text(pd.Series(as_numbers(column), index=column.index))
    words = as_text(column)
    return words.map(str.casefold, na_action="ignore") if kind == "boolean" else words


def _codes(words: Series, place: Mapping[str, int]) -> np.ndarray:
    return np.array([place.get(word, -1) for word in words.tolist()], dtype=np.int64)


def _spread(values: np.ndarray) -> np.ndarray:
    """Rows (already in random order) sorted by class, so that equally spaced ones hold every class in proportion."""
    return np.argsort(values, kind="stable")


def _natural(word: str) -> tuple[int, float, str]:
    try:
        return 0, float(word), word
    except ValueError:
        return 1, 0.0, word


def _constant(name: str, value: str | None = None) -> DataError:
    shown = f" ({value!r})" if value is not None else ""
    return DataError(
        f"the target {name!r} has the same value{shown} in every row, so that there is nothing to learn; expected at "
        f"least two different ones, besides {MARKS}. Was the right column chosen?"
    )


def _too_many(name: str) -> DataError:
    return DataError(
        f"the target {name!r} has more than {CLASSES} different values, too many for classes; expected fewer, or "
        "numbers and regression. Group rare ones together. Was the right column chosen?"
    )
