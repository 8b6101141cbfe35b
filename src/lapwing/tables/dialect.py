"""How a CSV file is written: encoding, separator, decimal comma, and lines above the names, detected from its text.

Cost: one pass over the bytes for the encoding; the rest looks at the first rows only.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lapwing.errors import DataError

SEPARATORS = ",;\t|"
LONGEST = 1 << 26
"""Longest line that is read, in bytes: a small compressed file may hold a cell of gigabytes."""
GROUPED = r"[1-9]\d{0,2}(?:[. '\u00a0\u202f]\d{3})+"
"""Whole numbers with thousands separators, where the comma is the decimal one."""


def unclosed(name: str, where: str = "") -> DataError:
    return DataError(
        f"{name} cannot be read: a double quote is opened{where} and not closed; expected a second one after the "
        "text. Add or delete it. A quote within quoted text is written twice."
    )


def open_bytes(path: Path, gzipped: bool) -> Any:
    return gzip.open(path, "rb") if gzipped else path.open("rb")


def encoding_of(path: Path, gzipped: bool) -> tuple[str, list[str]]:
    """UTF-8 where the whole file is; UTF-16 by its mark; else Windows' western European, with a note."""
    name = "utf-8"
    try:
        with open_bytes(path, gzipped) as file:
            block = file.read(1 << 20)
            if block.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                name = "utf-16"
            decoder, without = codecs.getincrementaldecoder(name)(), 0
            while block:
                without = len(block) - block.rfind(b"\n") - 1 if b"\n" in block else without + len(block)
                if without > LONGEST:
                    raise DataError(
                        f"{path} has a line of more than {LONGEST >> 20} MB; expected rows of a table, each on a line "
                        "of its own. Is it a table, and are its lines ended?"
                    )
                decoder.decode(block)
                block = file.read(1 << 20)
            decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        if name == "utf-16":
            raise DataError(f"{path} cannot be read as UTF-16, which it claims to be. Is the file complete?") from error
        return "cp1252", ["The file is not in UTF-8; it was read as Windows text (cp1252). Check letters with accents."]
    except (EOFError, zlib.error, OSError) as error:
        raise DataError(f"{path} cannot be read: {error}. Is the file complete?") from error
    return "utf-8-sig" if name == "utf-8" else name, []


def lines_of(text: str) -> list[str]:
    """Lines with their ends, where CSV has them; `str.splitlines` would cut at a form feed within a cell, too."""
    return list(io.StringIO(text, newline=""))


def fields(text: str, separator: str) -> Iterator[list[str]]:
    """Rows that are not blank, up to the first cell of more than the 131,072 letters that `csv` takes."""
    try:
        yield from (row for row in csv.reader(lines_of(text), delimiter=separator) if any(row))
    except csv.Error:
        return


def above_the_names(text: str) -> tuple[int, str | None]:
    """How many lines come before the names, blank but for separators; and the separator of a first line `sep=;`."""
    lines = lines_of(text)
    said = re.fullmatch(rf'"?sep=([{SEPARATORS}])"?\s*', lines[0], re.IGNORECASE) if lines else None
    count = 1 if said else 0
    while count < len(lines) and not lines[count].strip(SEPARATORS + '" \r\n'):
        count += 1
    return count, said[1] if said else None


def trailing(first: Sequence[str], width: int) -> bool:
    """Whether rows have more fields than there are names, all of them empty; an error where one is not."""
    if len(first) > width and any(cell.strip() for cell in first[width:]):
        raise DataError(
            f"the first row has {len(first)} fields, and there are {width} column names; expected as many. Text that "
            "holds the separator must stand in double quotes."
        )
    return len(first) > width


def separator_of(text: str, whole: bool) -> str:
    """The separator that cuts the first rows into equally many fields, and into as many as possible."""
    lines = lines_of(text)[:200]
    best, most = ",", 1.0
    for candidate in SEPARATORS:
        try:
            widths = [len(row) for row in csv.reader(lines, delimiter=candidate) if row]
        except csv.Error:
            continue
        widths = widths if whole or len(widths) < 3 else widths[:-1]  # a sample may end within a row
        score = widths[0] * (sum(width == widths[0] for width in widths) / len(widths)) ** 4
        if widths[0] > 1 and score > most:
            best, most = candidate, score
    return best


def decimal_comma(rows: Sequence[Sequence[str]]) -> bool:
    """Whether some cells are written 1,5 or 1.234,5, and none 1.5 or 1,234,567; dates (31.12.2020) do not count."""
    comma = False
    for cell in (cell.strip() for row in rows for cell in row):
        comma = comma or bool(re.fullmatch(rf"[-+]?(\d+|{GROUPED}),\d+([eE][-+]?\d+)?", cell))
        point = re.fullmatch(r"[-+]?(\d*\.\d+([eE][-+]?\d+)?|\d{1,3}(,\d{3})+\.\d+|\d{1,3}(,\d{3}){2,})", cell)
        if point and not re.fullmatch(rf"[-+]?{GROUPED}", cell):
            return False
    return comma


def with_point(value: Any) -> Any:
    """A number with a decimal comma, as text, with a point and without thousands separators; else the value itself."""
    match = re.fullmatch(rf"\s*([-+]?(?:\d+|{GROUPED}))(?:,(\d+))?\s*", value) if isinstance(value, str) else None
    if not match:
        return value
    whole, part = re.sub(r"[^-+\d]", "", match[1]), match[2]
    return whole if part is None else f"{whole}.{part}"


def is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
