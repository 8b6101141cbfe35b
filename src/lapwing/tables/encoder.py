"""A table as numbers for a network: an encoder learned in one streaming pass, applied to any table of the same kind.

    number, boolean   (value - mean) / deviation; a missing one is the mean, with an indicator 0/1 that it is missing
    date              days since 1970 and the place in the year (sine, cosine), each as a number
    category          0/1 for each of the frequent levels, and for "other": rare levels and new ones

    encoder = learn(table, kinds, leave_out=[target], rows=training)   # one pass; O(columns) + O(levels) memory
    x = encoder(frame)                                                 # [rows, inputs] float32
    encoder.versions(x[:1])                                            # [1, versions, inputs], nothing unknown
    encoder.strange(x)                                                 # [rows] bool

A value is unknown if it is missing in a column that was complete in training, or cannot be read (a word among numbers,
an infinite number) in one where all values could be. Its inputs are NaN. `versions` gives the row once for each of
`EXAMPLES` training rows, with the unknown values taken from that row.

An encoder is frozen and goes through JSON: `Encoder.from_dict(json.loads(json.dumps(encoder.to_dict())))`. A million
rows of twenty numbers take a few seconds; nothing that grows with the number of rows is kept.
docs/decisions/0012-tables-encoder.md compares it with those of scikit-learn and skrub.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lapwing.errors import DataError
from lapwing.tables.columns import DISTINCT, Kind, as_days, as_numbers, as_text, as_truth, date_in
from lapwing.tables.plain_values import typed
from lapwing.tables.reading import Frame, Series, Table, pd

LEVELS = 30
"""How many levels of a category have an input of their own: the most frequent ones, of at least two rows each."""
INPUTS = 1_000
"""With more inputs than this, categories get fewer levels; twice as many are refused."""
FARTHEST = 1e4
"""Standardised numbers are clipped to this, so that nothing overflows in float32."""
EXAMPLES = 32
"""How many training rows are kept, at most, to stand in for unknown values."""
OTHER, ABSENT = "other", "missing"
YEAR = 365.2425


@dataclass(frozen=True)
class Column:
    """How one column becomes inputs. Where `kind` is "left out", it does not, and `note` says why."""

    name: str
    kind: str
    note: str = ""
    format: str = ""
    means: tuple[float, ...] = ()
    deviations: tuple[float, ...] = ()
    """One for each number that the column gives; 0 where it is constant, and therefore not an input."""
    levels: tuple[str, ...] = ()
    indicator: bool = False
    """Whether an input says that the value is missing."""
    rare: tuple[str, ...] = ()
    """Levels of training that are too rare for an input of their own."""
    unread: bool = False
    """Whether training had values that could not be read, and were taken as missing."""

    @property
    def inputs(self) -> list[str]:
        """Names of the inputs that the column becomes."""
        if self.kind == "category":
            return [f"{self.name}={level}" for level in (*self.levels, OTHER, *([ABSENT] * self.indicator))]
        parts = ("", " (place in the year, sine)", " (place in the year, cosine)")
        kept = [self.name + part for part, scale in zip(parts, self.deviations, strict=False) if scale > 0]
        return kept + [f"{self.name} is missing"] * (self.indicator and self.kind != "left out")

    def encode(self, column: Series, notes: Notes) -> Float[np.ndarray, "rows inputs"]:
        if self.kind == "category":
            return self._encode_levels(as_text(column), notes)
        raw = _values(self.kind, self.format, column)
        missing = np.isnan(raw[:, 0])
        unread = missing & ~_blank(column)
        unknown = missing if not self.indicator else unread & (not self.unread)
        taken = "as missing" if self.indicator and self.unread else "as unknown"
        if unread.any():
            what = {"number": "a number", "boolean": "yes or no", "date": f"a date such as {date_in(self.format)}"}
            notes.count(f"values of {self.name!r} cannot be read as {what[self.kind]}: taken {taken}", unread)
        if (unknown & ~unread).any():
            notes.count(f"values of {self.name!r} are missing, which none were in training: unknown", unknown & ~unread)
        kept = [i for i, scale in enumerate(self.deviations) if scale > 0]
        scaled = (raw[:, kept] - np.array(self.means)[kept]) / np.array(self.deviations)[kept]
        scaled[missing] = 0.0
        far = np.abs(scaled) > FARTHEST
        if far.any():
            notes.count(f"values of {self.name!r} are extremely far from those in training", far.any(1))
        scaled = np.clip(scaled, -FARTHEST, FARTHEST)
        inputs = np.concatenate([scaled, missing[:, None]], axis=1) if self.indicator else scaled
        inputs[unknown] = np.nan
        return inputs

    def _encode_levels(self, words: Series, notes: Notes) -> np.ndarray:
        other = len(self.levels)
        missing = words.isna().to_numpy()
        codes = pd.Index(self.levels, dtype=object).get_indexer(words)
        codes[codes < 0] = other
        new = ~missing & (codes == other) & ~words.isin(self.rare).to_numpy()
        if new.any():
            some = sorted(set(words[new].tolist()))[:3]
            notes.count(
                f"values of {self.name!r} are new (such as {', '.join(map(repr, some))}): taken as 'other'", new
            )
        codes[missing] = other + self.indicator
        inputs = np.eye(len(self.inputs))[codes]
        if missing.any() and not self.indicator:
            notes.count(f"values of {self.name!r} are missing, which none were in training: unknown", missing)
            inputs[missing] = np.nan
        return inputs


@dataclass(eq=False)
class Notes:
    """Remarks on a table, and for each how many rows it concerns, over all chunks; the first wording is kept."""

    counts: Counter[str] = field(default_factory=Counter)
    said: dict[str, None] = field(default_factory=dict)

    def count(self, remark: str, rows: Any) -> None:
        key = remark.split(" (such as")[0]
        first = next((known for known in self.counts if known.split(" (such as")[0] == key), remark)
        self.counts[first] += int(np.sum(rows))

    def say(self, remark: str) -> None:
        self.said[remark] = None

    def listed(self) -> list[str]:
        return [*self.said, *(f"{count:,} {remark}." for remark, count in self.counts.items())]


@dataclass(frozen=True, eq=False)
class Encoder:
    """Columns of a table to inputs of a network."""

    columns: tuple[Column, ...]
    examples: tuple[tuple[float, ...], ...] = ()
    """Inputs of some training rows, at most `EXAMPLES`."""

    @property
    def used(self) -> list[Column]:
        return [column for column in self.columns if column.kind != "left out"]

    @property
    def inputs(self) -> list[str]:
        """Names of the inputs, in order."""
        return [name for column in self.used for name in column.inputs]

    @property
    def text(self) -> list[str]:
        """Columns that are to be read as written."""
        return [column.name for column in self.used if column.kind != "number" or column.note]

    def check(self, columns: Collection[str], where: str) -> list[str]:
        """Columns to read; an error where one is missing."""
        missing = [column.name for column in self.used if column.name not in columns]
        if missing:
            listed = ", ".join(repr(name) for name in missing[:8]) + (", ..." if len(missing) > 8 else "")
            raise DataError(
                f"{where} lacks {len(missing)} of the {len(self.used)} columns that the model was fitted with: "
                f"{listed}. Add them (cells may be empty), under the same names."
            )
        return [column.name for column in self.used]

    def extra(self, columns: Collection[str], target: str) -> list[str]:
        """Columns that the model does not know."""
        return [name for name in columns if name != target and name not in {column.name for column in self.columns}]

    def __call__(self, frame: Frame, notes: Notes | None = None) -> Float[Tensor, "rows inputs"]:
        notes = Notes() if notes is None else notes
        parts = [column.encode(frame[column.name], notes) for column in self.used]
        return torch.from_numpy(np.concatenate(parts, axis=1).astype(np.float32))

    def versions(self, x: Float[Tensor, "rows inputs"]) -> Float[Tensor, "rows versions inputs"]:
        """Each row once for every example, with its unknown inputs taken from that example."""
        examples = torch.tensor(self.examples, dtype=x.dtype)
        return torch.where(x.isnan().unsqueeze(1), examples, x.unsqueeze(1))

    def strange(self, x: Float[Tensor, "rows inputs"]) -> Bool[Tensor, " rows"]:
        """Rows with a value that is unknown, extremely far from training, or of a new level where none was rare.

        The network may not notice: its units saturate far out, and it never sees that a value is unknown.
        """
        never = [column.kind == "category" and not column.rare for column in self.used]
        unseen = [
            off and name == f"{column.name}={OTHER}" and place == len(column.levels)
            for column, off in zip(self.used, never, strict=True)
            for place, name in enumerate(column.inputs)
        ]
        return (x.isnan() | (x.abs() >= FARTHEST) | (torch.tensor(unseen) & (x > 0))).any(1)

    def to_dict(self) -> dict[str, Any]:
        columns = [asdict(column) for column in self.columns]
        return {"columns": columns, "examples": [list(row) for row in self.examples]}

    @staticmethod
    def from_dict(stored: Mapping[str, Any]) -> Encoder:
        columns = tuple(typed(Column, fields) for fields in stored["columns"])
        inputs = len(Encoder(columns).inputs)
        # older files have no examples: an unknown value is the mean there, as it was when they were written
        rows = stored["examples"] if "examples" in stored else [[0.0] * inputs]
        if {len(row) for row in rows} != {inputs}:
            raise DataError(f"examples of training rows are missing, or not of {inputs} inputs each.")
        return Encoder(columns, tuple(tuple(map(float, row)) for row in rows))


# -- learning --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Moments:
    """Count, mean and sum of squared deviations of each number, merged chunk by chunk (Chan).

    They are those of the differences from the first value present, which are exact for nearby numbers, however large,
    and zero for equal ones.
    """

    count: np.ndarray
    first: np.ndarray
    shift: np.ndarray
    squares: np.ndarray

    @staticmethod
    def none(numbers: int) -> Moments:
        return Moments(np.zeros(numbers), np.full(numbers, np.nan), np.zeros(numbers), np.zeros(numbers))

    @property
    def mean(self) -> np.ndarray:
        return np.where(self.count > 0, self.first, 0.0) + self.shift

    def add(self, values: Float[np.ndarray, "rows numbers"]) -> None:
        """Adds rows; NaN is skipped."""
        present = ~np.isnan(values)
        count = present.sum(0)
        if not count.any():
            return
        first = values[present.argmax(0), np.arange(values.shape[1])]
        self.first = np.where(np.isnan(self.first), first, self.first)
        moved = np.where(present, values - self.first, 0.0)
        mean = moved.sum(0) / np.maximum(count, 1)
        squares = (np.where(present, moved - mean, 0.0) ** 2).sum(0)
        total = self.count + count
        step = mean - self.shift
        share = count / np.maximum(total, 1)
        self.squares = self.squares + squares + step**2 * self.count * share
        self.shift = self.shift + step * share
        self.count = total

    def deviation(self) -> np.ndarray:
        """Standard deviations; exactly 0 where values differ only by rounding."""
        deviation = np.sqrt(self.squares / np.maximum(self.count, 1))
        return np.where(deviation > 2 * np.finfo(np.float64).eps * np.abs(self.mean), deviation, 0.0)


@dataclass(eq=False)
class _Learner:
    """Statistics of one column."""

    name: str
    kind: Kind
    moments: Moments
    levels: Counter[str] = field(default_factory=Counter)
    missing: int = 0
    rows: int = 0
    unread: bool = False

    def see(self, column: Series) -> None:
        self.rows += len(column)
        if self.kind.name == "category":
            words = as_text(column)
            self.missing += int(words.isna().sum())
            for word, count in words.value_counts().items():
                if word in self.levels or len(self.levels) < DISTINCT:
                    self.levels[str(word)] += int(count)
            return
        values = _values(self.kind.name, self.kind.format, column)
        missing = np.isnan(values[:, 0])
        self.missing += int(missing.sum())
        self.unread = self.unread or bool((missing & ~_blank(column)).any())
        self.moments.add(values)

    def column(self, most: int) -> Column:
        """The column as learned, with at most that many levels."""
        name, kind, note = self.name, self.kind.name, self.kind.note
        indicator = 0 < self.missing < self.rows
        if self.missing == self.rows:
            return Column(name, "left out", f"{name!r} is empty in the rows to learn from.")
        if kind == "category":
            ranked = sorted(self.levels.items(), key=lambda item: (-item[1], item[0]))
            levels = tuple(sorted(level for level, count in ranked[:most] if count > 1))
            rare = tuple(sorted(set(self.levels) - set(levels)))
            if len(self.levels) == 1 and not indicator:
                return Column(name, "left out", f"{name!r} is the same in all rows.")
            if not levels:
                return Column(name, "left out", f"no value of {name!r} occurs twice.")
            if rare:
                note = f"{len(rare)} rare levels of {name!r} are taken together as 'other'."
            return Column(name, kind, note, levels=levels, indicator=indicator, rare=rare)
        means, deviations = self.moments.mean, self.moments.deviation()
        column = Column(
            name,
            kind,
            note,
            self.kind.format,
            tuple(means.tolist()),
            tuple(deviations.tolist()),
            indicator=indicator,
            unread=self.unread,
        )
        return column if column.inputs else Column(name, "left out", f"{name!r} is the same in all rows.")


def learn(
    table: Table,
    kinds: Mapping[str, Kind],
    *,
    leave_out: Collection[str] = (),
    rows: np.ndarray | None = None,
) -> Encoder:
    """The encoder of a table, from the rows where `rows` (one truth value per row) is true, or from all."""
    learners: dict[str, _Learner] = {}
    columns: dict[str, Column | None] = {}
    for name, kind in kinds.items():
        if name in leave_out:
            continue
        columns[name] = Column(name, "left out", kind.note) if kind.name == "left out" else None
        if kind.name != "left out":
            learners[name] = _Learner(name, kind, Moments.none(3 if kind.name == "date" else 1))
    kept = _Drawn(EXAMPLES)
    for frame in chosen_rows(table.chunks(list(learners), text=text_columns(kinds)) if learners else [], rows):
        kept.see(frame)
        for name, learner in learners.items():
            learner.see(frame[name])
    categories = sum(learner.kind.name == "category" for learner in learners.values())
    most = max(2, min(LEVELS, (INPUTS - len(learners)) // max(1, categories)))
    encoder = Encoder(tuple(columns[name] or learners[name].column(most) for name in columns))
    if len(encoder.inputs) > 2 * INPUTS:
        raise DataError(
            f"{table.name} gives {len(encoder.inputs):,} inputs from {len(encoder.used):,} columns; expected at most "
            f"{2 * INPUTS:,}. Leave out columns that say little about the target."
        )
    if not encoder.used:
        reasons = " ".join(column.note for column in encoder.columns[:8])
        raise DataError(f"{table.name} has no column to learn from besides the target. {reasons}".strip())
    return replace(encoder, examples=tuple(map(tuple, encoder(kept.frame()).tolist())))


@dataclass(eq=False)
class _Drawn:
    """A random sample of the rows of a table that is seen chunk by chunk, the same however it is cut into chunks: every
    row gets a random number, and those with the smallest are kept."""

    most: int
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    keys: np.ndarray = field(default_factory=lambda: np.zeros(0))
    frames: list[Frame] = field(default_factory=list)

    def see(self, frame: Frame) -> None:
        keys = np.concatenate([self.keys, self.random.random(len(frame))])
        chosen = np.sort(np.argsort(keys)[: self.most])
        new = chosen[chosen >= len(self.keys)] - len(self.keys)
        old = pd.concat(self.frames) if self.frames else frame.iloc[:0]
        self.frames = [part for part in (old.iloc[chosen[chosen < len(self.keys)]], frame.iloc[new]) if len(part)]
        self.keys = keys[chosen]

    def frame(self) -> Frame:
        return pd.concat(self.frames)


def text_columns(kinds: Mapping[str, Kind]) -> list[str]:
    """Columns that are to be read as written: all that are not plainly numbers."""
    return [name for name, kind in kinds.items() if kind.name != "number" or kind.note]


def chosen_rows(chunks: Iterable[Frame], rows: np.ndarray | None) -> Iterable[Frame]:
    """The rows of a table where `rows` is true."""
    start = 0
    for frame in chunks:
        stop = start + len(frame)
        yield frame if rows is None else frame[rows[start:stop]]
        start = stop


def _blank(column: Series) -> np.ndarray:
    """Which cells are empty or hold a mark such as NA; not those with a value that cannot be read."""
    words = column if pd.api.types.is_numeric_dtype(column.dtype) else as_text(column)
    return words.isna().to_numpy()


def _values(kind: str, form: str, column: Series) -> Float[np.ndarray, "rows numbers"]:
    """The numbers that a column gives before they are standardised, NaN where missing."""
    if kind == "number":
        return as_numbers(column)[:, None]
    if kind == "boolean":
        return as_truth(column)[:, None]
    days = as_days(column, form)
    turn = 2 * np.pi * days / YEAR
    return np.stack([days, np.sin(turn), np.cos(turn)], axis=1)
