"""Tables from CSV, Parquet or a data frame, read again and again in chunks of rows; never a whole file in memory.

    table = open_table("houses.csv")            # or a pandas.DataFrame
    table.columns                               # names, in order
    for frame in table.chunks(["price"]): ...   # pandas frames of at most `size` rows

The separator (comma, semicolon, tab, bar), decimal comma, encoding and compression (gzip) of a CSV file are detected. A
chunk holds about `CELLS` cells, however wide the table is; memory use is that of one chunk.
"""

from __future__ import annotations

import codecs
import re
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lapwing.errors import DataError
from lapwing.tables.dialect import (
    above_the_names,
    decimal_comma,
    encoding_of,
    fields,
    is_number,
    lines_of,
    open_bytes,
    separator_of,
    trailing,
    unclosed,
    with_point,
)

if TYPE_CHECKING:  # by pandas' own annotations a column may be a table, and the other way round
    from typing import Any as Frame
    from typing import Any as Series

    pd: Any
else:
    try:
        import pandas as pd
    except ImportError as error:  # an extra of the package: everything else in lapwing works without it
        raise ImportError("tables need pandas, which is not installed. Use: pip install 'lapwing[tabular]'") from error
    Frame, Series = pd.DataFrame, pd.Series

CELLS = 1_000_000
MISSING = ("?", "-", "--", "#DIV/0!", "#REF!", "#VALUE!", "#NAME?")
"""What stands for a missing value, besides what pandas takes for one (empty, NA, N/A, null, NaN, None, ...)."""
Chunks = Callable[[Sequence[str], Collection[str], int], Iterator[Frame]]


@dataclass(frozen=True, eq=False)
class Table:
    """A table that can be read many times. `notes` are remarks for the user on how it was read."""

    name: str
    columns: tuple[str, ...]
    read: Chunks
    notes: tuple[str, ...] = ()
    commas: bool = False
    """Whether numbers are written with a decimal comma."""

    def chunks(
        self, columns: Sequence[str] | None = None, *, text: Collection[str] = (), size: int | None = None
    ) -> Iterator[Frame]:
        """Frames of at most `size` rows; the columns named in `text` come as text, numbers in it with a point."""
        return map(self.pointed, self.written(columns, text=text, size=size))

    def written(
        self, columns: Sequence[str] | None = None, *, text: Collection[str] = (), size: int | None = None
    ) -> Iterator[Frame]:
        """The same, with text exactly as it is written."""
        chosen = self.columns if columns is None else columns
        size = max(256, CELLS // max(1, len(chosen))) if size is None else size
        if isinstance(size, bool) or size < 1:
            raise DataError(f"chunks of {size} rows were asked for; expected at least 1.")
        return self.read(chosen, text, size)

    def pointed(self, frame: Frame) -> Frame:
        """Decimal commas as points, without thousands separators, in the columns that the parser left as text."""
        if not self.commas:
            return frame
        words = [name for name in frame.columns if not pd.api.types.is_numeric_dtype(frame[name].dtype)]
        return frame.assign(**{name: frame[name].map(with_point, na_action="ignore") for name in words})


def open_table(source: Any) -> Table:
    """A table from a path (CSV, also .gz; Parquet), a data frame, or a table that is open already."""
    if isinstance(source, Table):
        return source
    if isinstance(source, pd.DataFrame):
        return _from_frame(source)
    if not isinstance(source, (str, Path)):
        raise DataError(f"the table is a {type(source).__name__}; expected the path of a file, or a pandas.DataFrame.")
    path = Path(source)
    if str(path) == "-":
        raise DataError(
            "'-' is no file, and a table is read several times; expected a CSV or Parquet file. Save it first."
        )
    if path.is_dir():
        raise DataError(f"{path} is a folder; expected a CSV or Parquet file.")
    if not path.exists():
        near = (
            get_close_matches(path.name, [p.name for p in path.parent.glob("*")], n=1) if path.parent.is_dir() else []
        )
        raise DataError(f"there is no file {path}." + (f" Did you mean {near[0]!r}?" if near else " Check the path."))
    if not path.is_file():
        raise DataError(
            f"{path} is a pipe or a device, and a table is read several times; expected a CSV or Parquet file. Save it "
            "first."
        )
    with path.open("rb") as file:
        magic = file.read(8)
    if not magic:
        raise DataError(f"{path} is empty (0 bytes); expected a table with a line of column names and rows below it.")
    if magic.startswith(b"PAR1"):
        return _from_parquet(path)
    if magic.startswith((b"PK\x03\x04", b"\xd0\xcf\x11\xe0")):
        raise DataError(f"{path} is an Excel or zip file; expected CSV or Parquet. In Excel: Save as, CSV UTF-8.")
    return _from_csv(path, gzipped=magic.startswith(b"\x1f\x8b"))


def find_column(name: str, columns: Sequence[str], where: str) -> str:
    """`name` if it is a column; an error that names the nearest ones otherwise."""
    if name in columns:
        return name
    folded = {column.casefold().strip(): column for column in columns}
    near = [folded[key] for key in get_close_matches(name.casefold().strip(), list(folded), n=1, cutoff=0.6)]
    listed = ", ".join(repr(c) for c in columns[:12]) + (", ..." if len(columns) > 12 else "")
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise DataError(f"{where} has no column {name!r}.{hint} Its columns are: {listed}.")


# -- data frames -----------------------------------------------------------------------------------------------------


def _from_frame(frame: Frame) -> Table:
    names = _names([str(column) for column in frame.columns], "the data frame")
    frame = frame.set_axis(list(names), axis=1)

    def read(columns: Sequence[str], text: Collection[str], size: int) -> Iterator[Frame]:
        for start in range(0, len(frame), size):
            yield frame.iloc[start : start + size][list(columns)]

    return Table("the data frame", names, read)


# -- Parquet ---------------------------------------------------------------------------------------------------------


def _from_parquet(path: Path) -> Table:
    import pyarrow
    from pyarrow import parquet

    def opened() -> Any:
        try:
            return parquet.ParquetFile(path)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{path} cannot be read as Parquet: {error}. Is the file complete?") from error

    # a range index that pandas stored is no column; a named one is, and is left out when the columns are chosen
    with opened() as file:
        raw = [name for name in file.schema_arrow.names if not re.fullmatch(r"__index_level_\d+__", name)]
    names = _names(raw, path.name)
    original = dict(zip(names, raw, strict=True))

    def read(columns: Sequence[str], text: Collection[str], size: int) -> Iterator[Frame]:
        start = 0
        with opened() as file:
            for batch in file.iter_batches(batch_size=size, columns=[original[name] for name in columns]):
                frame = pyarrow.Table.from_batches([batch]).to_pandas(ignore_metadata=True)
                frame = frame[[original[name] for name in columns]].set_axis(list(columns), axis=1)
                yield frame.set_axis(pd.RangeIndex(start, start + len(frame)), axis=0)
                start += len(frame)

    return Table(path.name, names, read)


# -- CSV -------------------------------------------------------------------------------------------------------------


def _from_csv(path: Path, *, gzipped: bool) -> Table:
    encoding, notes = encoding_of(path, gzipped)
    with open_bytes(path, gzipped) as file:
        sample = file.read(1 << 18)
        whole = not file.read(1)
    text = codecs.getincrementaldecoder(encoding)(errors="replace").decode(sample, final=whole)
    if "\x00" in text:
        raise DataError(f"{path} is not a text file; expected CSV (text with separators) or Parquet.")
    skipped, given = above_the_names(text.lstrip("\ufeff"))
    text = "".join(lines_of(text)[skipped:])
    if not text.strip():
        raise DataError(f"{path} holds only blank lines; expected a line of column names and rows below it.")
    separator = given or separator_of(text, whole)
    rows = fields(text, separator)
    raw = next(rows, None)
    if raw is None:
        raise unclosed(path.name)
    head = list(islice(rows, 200))
    if head and all(is_number(cell) for cell in raw):
        raise DataError(
            f"the first line of {path.name} holds numbers ({', '.join(raw[:4])}, ...); expected column names. Add a "
            "line with a name for every column at the top."
        )
    names = _names(raw, path.name)
    decimal = "," if separator != "," and decimal_comma(head) else "."
    if decimal == ",":
        notes.append("Numbers are written with a decimal comma (1,5).")
    settings: dict[str, Any] = {
        "sep": separator,
        "encoding": encoding,
        "encoding_errors": "replace",  # Windows text has bytes without a meaning; the note says to check letters
        "skiprows": skipped,
        "decimal": decimal,
        "names": list(names),
        "header": 0,
        # a separator at the end of every line makes no column; any other field too many is to be refused
        "index_col": False if trailing(head[0] if head else [], len(raw)) else None,
        "na_values": list(MISSING),
        "skipinitialspace": True,
        "skip_blank_lines": len(names) > 1,  # of one column, a blank line is an empty cell
        "low_memory": False,
        "compression": "gzip" if gzipped else None,
    }

    checked = False

    def read(columns: Sequence[str], text: Collection[str], size: int) -> Iterator[Frame]:
        nonlocal checked
        chosen = list(columns)
        types = {name: str for name in chosen if name in text}
        # the parser counts the fields of a line only where it keeps all of them: the first time
        kept = chosen if checked else None
        with _explained(path.name):
            reader = pd.read_csv(path, usecols=kept, dtype=types, chunksize=size, **settings)
        with reader:
            while True:
                with _explained(path.name):
                    frame = next(reader, None)
                if frame is None:
                    checked = True
                    return
                if len(frame):
                    yield frame[chosen]

    return Table(path.name, names, read, tuple(notes), decimal == ",")


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Errors of the CSV parser in words that name the line and the remedy."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)
            yield
    except (pd.errors.ParserError, pd.errors.ParserWarning) as error:
        too_many = re.search(r"Expected (\d+) fields in line (\d+), saw (\d+)", str(error))
        opened = re.search(r"EOF inside string starting at row (\d+)", str(error))
        if opened:
            raise unclosed(name, f" in about line {int(opened[1]) + 1}") from error
        if too_many:
            expected, line, saw = too_many.groups()
            reason = f"line {line} has {saw} fields; expected {expected}, as many as there are column names"
        else:
            reason = f"a row has more fields than there are column names ({str(error).strip()})"
        raise DataError(
            f"{name} cannot be read: {reason}. Text that holds the separator must stand in double quotes."
        ) from error


def _names(raw: Sequence[str], where: str) -> tuple[str, ...]:
    """Column names without blanks around them; a number in place of an empty one; no two alike."""
    if not raw:
        raise DataError(f"{where} has no columns; expected at least one to learn from and one to predict.")
    names = tuple(name.strip() or f"unnamed column {number}" for number, name in enumerate(raw, 1))
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        listed = ", ".join(repr(name) for name in twice[:5])
        raise DataError(
            f"{where} has more than one column named {listed}; expected different names. Rename or delete one of them."
        )
    return names
