"""What the columns of a table hold: numbers, booleans, dates, categories, or something that is left out.

    kinds = infer(table.chunks())        # {name: Kind}: one pass; memory O(columns x DISTINCT)

A column holds numbers if nine tenths of its values can be read as such; the others count as missing, with a note.
Numbers may have thousands separators (1,234.5; 1 234.5; 1'234.5), also with a note.
Words that repeat are categories; where most words are different (names, remarks) the column is text, and left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np

from lapwing.tables.reading import MISSING, Frame, Series, pd

DISTINCT = 1_000
"""A column with more different words than this is text, however many rows there are."""
NUMBERS = 0.9
LARGEST = 1e100
"""Larger numbers are taken for mistakes in the data; their squares might overflow."""
TRUTH = ({"true": 1.0, "false": 0.0}, {"yes": 1.0, "no": 0.0}, {"y": 1.0, "n": 0.0}, {"t": 1.0, "f": 0.0})
TIMES = ("", " %H:%M", " %H:%M:%S")
FORMATS = ("ISO8601", *(day + time for day in ("%Y/%m/%d", "%d.%m.%Y", "%m/%d/%Y", "%d/%m/%Y") for time in TIMES))
NEAR = 1677, 2262
"""Years between which nanoseconds since 1970 fit into 64 bits."""
BLANK = {"", "NA", "N/A", "n/a", "NaN", "nan", "NULL", "null", "None", "<NA>", "#N/A", *MISSING}
THOUSANDS = r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?|[-+]?\d{1,3}(?:[ '\u00a0\u202f]\d{3})+(?:\.\d+)?"
IDENTIFIERS = {"id", "index", "idx", "row", "rowid", "row id", "nr", "no", "number", "#", "key"}


@dataclass(frozen=True)
class Kind:
    """`name` is number, boolean, date, category or "left out"; `note` says why, or what is odd, in words."""

    name: str
    note: str = ""
    format: str = ""
    """How dates are written."""
    whole: bool = False
    """All numbers are whole."""
    distinct: int = 0
    """How many different values there are, at most DISTINCT + 1."""
    present: int = 0
    """How many values are not missing."""


def infer(chunks: Iterable[Frame]) -> dict[str, Kind]:
    """The kind of every column, from all rows."""
    tallies: dict[str, Tally] = {}
    for frame in chunks:
        for name in frame.columns:
            tallies.setdefault(name, Tally(name)).see(frame[name])
    return {name: tally.kind() for name, tally in tallies.items()}


# -- values ----------------------------------------------------------------------------------------------------------


def as_text(column: Series) -> Series:
    """Values as words, without blanks around them, missing ones as None; 1.0, "1.0" and 1 are all "1"."""
    if pd.api.types.infer_dtype(column, skipna=True) == "string":  # each different word is looked at once
        codes, different = pd.factorize(column)
        words = np.array([*map(_word, different), None], dtype=object)[codes]  # the last one, at -1, is missing
    else:
        present = column.notna().to_numpy()
        words = np.full(len(column), None, dtype=object)
        words[present] = [_word(value) for value in column[present].tolist()]
    return pd.Series(words, index=column.index, dtype=object)


def _word(value: Any) -> str | None:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    word = str(value).strip()
    if word.endswith("0") and re.fullmatch(r"-?\d+\.0+", word):
        word = word.split(".")[0]
    return None if word in BLANK else word


def as_numbers(column: Series) -> np.ndarray:
    """Values as float64, NaN for what is not a number, not finite or beyond LARGEST."""
    if column.dtype.kind == "m":
        values = column.dt.total_seconds().to_numpy(dtype=np.float64, na_value=np.nan)
    elif pd.api.types.is_numeric_dtype(column.dtype) and column.dtype.kind != "c":
        values = column.to_numpy(dtype=np.float64, na_value=np.nan)
    else:
        values = read_numbers(as_text(column))
    return np.where(np.abs(values) <= LARGEST, values, np.nan)


def read_numbers(words: Series) -> np.ndarray:
    """Words as float64, also with thousands separators; NaN for what is not a number."""
    values = pd.to_numeric(words, errors="coerce").to_numpy(dtype=np.float64, na_value=np.nan, copy=True)
    for place in np.flatnonzero(np.isnan(values) & words.notna().to_numpy()):
        word = words.iloc[place]
        if re.fullmatch(THOUSANDS, word):
            values[place] = float(re.sub(r"[^-+.\d]", "", word))
    return values


def as_truth(column: Series) -> np.ndarray:
    """1 for true, 0 for false, in any of the spellings; NaN for everything else."""
    spelling = {word: value for pair in TRUTH for word, value in pair.items()} | {"1": 1.0, "0": 0.0}
    return as_text(column).str.casefold().map(spelling).to_numpy(dtype=np.float64, na_value=np.nan)


def as_days(column: Series, form: str) -> np.ndarray:
    """Days since 1970 as float64, NaN for what is not a date in that format."""
    if column.dtype.kind == "M" or isinstance(column.dtype, pd.DatetimeTZDtype):
        return _days(column if column.dt.tz is not None else column.dt.tz_localize("UTC"))
    codes, different = pd.factorize(as_text(column))
    words = pd.Series(different, dtype=object)
    dates = _dates(words, form).fillna(_dates(words, "ISO8601"))  # which cannot be mistaken, however others are written
    days = _days(dates).copy()  # pandas may lend its own, which cannot be written to
    for number in np.flatnonzero(np.isnan(days)):
        days[number] = _far_day(str(words[number]), form)
    return np.append(days, np.nan)[codes]


def _far_day(word: str, form: str) -> float:
    """Days to a date beyond the nanoseconds of 64 bits, which pandas before 3 takes for none; NaN for anything else."""
    for read in (lambda: datetime.fromisoformat(word), lambda: datetime.strptime(word, form)):
        try:
            date = read()
        except ValueError:
            continue
        if NEAR[0] < date.year < NEAR[1]:
            return float("nan")
        return (date.replace(tzinfo=date.tzinfo or UTC) - datetime(1970, 1, 1, tzinfo=UTC)) / timedelta(days=1)
    return float("nan")


def _days(dates: Series) -> np.ndarray:
    dates = dates.dt.as_unit("us")  # the year 9999, which stands for "never", is beyond nanoseconds
    origin = pd.Timestamp(0, tz="UTC").as_unit("us")
    return ((dates - origin) / pd.Timedelta(days=1)).to_numpy(dtype=np.float64, na_value=np.nan)


def date_in(form: str) -> str:
    """31 December 2020 in that format, as an example."""
    return pd.Timestamp(2020, 12, 31, 23, 59).strftime("%Y-%m-%d" if form in ("", "ISO8601") else form)


def _dates(words: Series, form: str) -> Series:
    return pd.to_datetime(words, format=form or "ISO8601", errors="coerce", utc=True)


# -- inference -------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Tally:
    """What has been seen of a column so far."""

    name: str
    rows: int = 0
    present: int = 0
    numbers: int = 0
    infinite: int = 0
    truths: int = 0
    dates: int = 0
    whole: bool = True
    counter: bool = True
    last: float = float("nan")
    values: set[Any] = field(default_factory=set)
    words: set[str] = field(default_factory=set)
    formats: list[str] = field(default_factory=lambda: list(FORMATS))
    odd: str = ""
    marked: str = ""
    """An example of a number with thousands separators."""

    def see(self, column: Series) -> None:
        present = column.notna()
        self.rows += len(column)
        self.present += int(present.sum())
        column = column[present]
        if not len(column):
            return
        kind = column.dtype.kind
        if kind == "M" or isinstance(column.dtype, pd.DatetimeTZDtype):
            self.dates += len(column)
            self.note(self.values, column.unique().tolist())
        elif kind == "m" or (kind in "iuf" and pd.api.types.is_numeric_dtype(column.dtype)):
            self.see_numbers(as_numbers(column))
        else:
            words = as_text(column).dropna()
            self.present -= len(column) - len(words)
            if len(words):
                self.see_words(words)

    def see_numbers(self, values: np.ndarray) -> None:
        self.numbers += len(values)
        finite = values[np.isfinite(values)]
        self.infinite += len(values) - len(finite)
        self.whole = self.whole and bool((finite == np.round(finite)).all())
        if self.counter:
            steps = np.diff(np.concatenate([[self.last], values])) if self.last == self.last else np.diff(values)
            self.counter = bool((steps == 1).all())
            self.last = float(values[-1])
        if len(self.values) <= DISTINCT:
            self.note(self.values, np.unique(finite).tolist())

    def see_words(self, words: Series) -> None:
        counts = words.value_counts()
        unique = pd.Series(counts.index.to_numpy(), dtype=object)
        numbers = read_numbers(unique)
        number = ~np.isnan(numbers)
        self.marked = self.marked or next((word for word in unique[number] if re.fullmatch(THOUSANDS, word)), "")
        amounts = counts.to_numpy()
        if number.any():
            order = np.repeat(numbers[number], amounts[number])
            self.counter = False
            self.see_numbers(np.where(np.abs(order) <= LARGEST, order, np.nan))
        rest = unique[~number]
        if not len(rest):
            return
        self.odd = self.odd or str(rest.iloc[0])
        self.note(self.words, rest.tolist())
        self.note(self.values, rest.tolist())
        truth = rest.str.casefold().isin({word for pair in TRUTH for word in pair}).to_numpy()
        self.truths += int(amounts[~number][truth].sum())
        if self.formats:
            head = rest.iloc[:50]
            self.formats = [form for form in self.formats if _dates(head, form).notna().all()]
            self.formats = [form for form in self.formats if _dates(rest, form).notna().all()]

    @staticmethod
    def note(seen: set[Any], values: list[Any]) -> None:
        if len(seen) <= DISTINCT:
            seen.update(values[: DISTINCT + 1])

    def kind(self) -> Kind:
        said = {"whole": self.whole, "distinct": min(len(self.values), DISTINCT + 1), "present": self.present}
        if not self.present:
            return Kind("left out", f"{self.name!r} is empty.", **said)
        if self.name.startswith("unnamed column "):
            return Kind("left out", f"{self.name!r} has no name (row numbers?).", **said)
        if self.dates == self.present:
            return Kind("date", **said)
        lower = {word.casefold() for word in self.words}
        if self.truths == self.present and any(lower <= set(pair) for pair in TRUTH):
            return Kind("boolean", **said)
        if self.numbers >= NUMBERS * self.present:
            return self.number(said)
        if self.formats and not self.numbers:
            return Kind("date", format=self.formats[0], **said)
        if len(self.words) > DISTINCT or (len(self.values) > 5 and len(self.values) > 0.5 * self.present):
            return Kind(
                "left out", f"{self.name!r} holds text with many different values (such as {self.odd[:30]!r}).", **said
            )
        return Kind("category", **said)

    def number(self, said: dict[str, Any]) -> Kind:
        name = re.sub(r"[_\-.]+", " ", self.name.casefold()).strip()
        if (
            self.counter
            and self.whole
            and self.numbers == self.rows >= 10
            and (name in IDENTIFIERS or name.endswith(" id"))
        ):
            return Kind("left out", f"{self.name!r} counts the rows.", **said)
        notes = []
        if self.numbers < self.present:
            count = self.present - self.numbers
            notes.append(f"{count} values of {self.name!r} are no numbers (such as {self.odd[:30]!r})")
        if self.infinite:
            notes.append(f"{self.infinite} values of {self.name!r} are infinite, or beyond {LARGEST:g}")
        if self.infinite == self.numbers:
            return Kind("left out", f"{self.name!r} holds no number within {LARGEST:g} of zero.", **said)
        said_of = "; ".join(notes) + ": taken as missing." if notes else ""
        if self.marked:
            mark = re.sub(r"[-+\d]", "", self.marked)[0]
            said_of += f" Each {mark!r} in {self.name!r} (such as {self.marked!r}) is taken as a mark of thousands."
        return Kind("number", said_of.strip(), **said)
