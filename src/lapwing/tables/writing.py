"""Predictions for a table as a file, chunk by chunk: CSV, or what its name says (.tsv, .csv.gz, .parquet).

The file appears when it is complete. Memory is that of one chunk; for Parquet, of all predictions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lapwing.errors import DataError
from lapwing.serialize import replacing
from lapwing.tables.bundle import Bundle
from lapwing.tables.dialect import is_number
from lapwing.tables.encoder import Notes
from lapwing.tables.reading import Frame, open_table, pd


@dataclass(frozen=True)
class Written:
    """What was written: rows, how many of them are flagged as unlike the data, and remarks in words."""

    rows: int
    flagged: int
    notes: list[str]


def write_predictions(
    bundle: Bundle,
    source: Any,
    out: str | Path,
    chunk: int | None = None,
    level: float = 0.9,
    progress: Callable[[int], object] | None = None,
    raw: bool = False,
) -> Written:
    """The columns of `Bundle.predict` for every row of a path or data frame; `progress` is told the rows so far.

    In text files, labels that a spreadsheet would run as formulas get a ' before them, and a remark, unless `raw`.
    """
    out, remarks, rows, flagged, frames = Path(out), Notes(), 0, 0, []
    parquet = out.suffix.lower() in (".parquet", ".pq")
    style: Any = {
        "sep": "\t" if ".tsv" in out.name.lower() else ",",
        "compression": "gzip" if out.suffix.lower() == ".gz" else None,
    }
    with replacing(out) as partial:
        for frame in bundle.predict_chunks(source, chunk, level, remarks):
            if parquet:
                frames.append(frame)
            else:
                frame = frame if raw else _inert(frame, remarks)
                frame.to_csv(partial, mode="a" if rows else "w", header=not rows, index=False, **style)
            rows, flagged = rows + len(frame), flagged + int(frame["ood"].sum())
            if progress is not None:
                progress(rows)
        if not rows:
            raise DataError(f"{open_table(source).name} has no rows; expected at least one to predict.")
        if parquet:
            pd.concat(frames).to_parquet(partial, index=False)
    return Written(rows, flagged, remarks.listed())


def _inert(frame: Frame, remarks: Notes) -> Frame:
    """Words that begin as formulas do, and are no numbers, with a ' before them."""
    names = [name for name in ("prediction", "prediction_set") if name in frame.columns]
    found: set[str] = set()

    def inert(word: str) -> str:
        if not word.lstrip(" ").startswith(("=", "+", "-", "@", "\t", "\r")) or is_number(word):
            return word
        found.add(word)
        return "'" + word

    out = frame.assign(**{name: frame[name].map(inert) for name in names})
    if found:
        remarks.say(
            f"Labels that a spreadsheet would take for formulas are written with a ' before them: "
            f"{', '.join(map(repr, sorted(found)[:3]))}. With --raw they are written as they are."
        )
    return out
