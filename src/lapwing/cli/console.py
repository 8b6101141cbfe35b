"""What the command line prints: tables and notes on stdout, progress and errors on stderr, JSON for machines.

With `--json`, stdout holds one JSON document and nothing else: after an error {"error": message, "exit_code": code},
with the message on stderr as well. Progress bars are drawn on a terminal only, once the work has lasted a second. Exit
codes: 0 done, 1 failed, 2 bad input, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import json
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
import typer
from rich.box import ROUNDED
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from lapwing.errors import LapwingError, LapwingWarning
from lapwing.reporting.page import plain_values
from lapwing.reporting.words import better

DELAY = 1.0
"""Seconds of work before a bar is drawn."""
FAILED, BAD_INPUT, STOPPED = 1, 2, 130
SMALL = 20_000_000
"""Bytes of a table up to which one thread is enough."""


CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Characters that move the cursor, set colours, end a line or turn its direction; not tabs and newlines."""


def visible(text: str, lines: bool = False) -> str:
    r"""Text of the user with its control characters written out; with `lines` newlines and tabs are kept.

    >>> print(visible("\x1b[2Jred\nalert"))
    \x1b[2Jred\nalert
    """
    text = CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
    return text if lines else text.replace("\n", "\\n").replace("\t", "\\t")


@contextmanager
def handled(debug: bool = False, as_json: bool = False) -> Iterator[None]:
    """Errors as one clean message on stderr and an exit code; with `debug` the traceback before it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LapwingWarning)  # what they say is among the notes
            yield
    except (typer.Exit, typer.Abort):
        raise
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            sys.stderr.write(visible(traceback.format_exc(), lines=True))
        message, code = _explained(error, debug)
        complain(message)
        if as_json:
            say_json({"error": message, "exit_code": code})
        raise typer.Exit(code) from error


def _explained(error: BaseException, debug: bool) -> tuple[str, int]:
    """What went wrong, and the exit code."""
    if isinstance(error, KeyboardInterrupt):
        return "stopped before the end; no unfinished file is left.", STOPPED
    if isinstance(error, LapwingError):
        return str(error), BAD_INPUT if isinstance(error, ValueError) else FAILED
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        missing = isinstance(error, (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError))
        return f"{where}{error.strerror or error}.", BAD_INPUT if missing else FAILED
    if isinstance(error, ImportError):
        return str(error), FAILED
    hint = "" if debug else " Run it again with --debug to see where."
    return f"{type(error).__name__}: {error}.{hint}", FAILED


def complain(message: str) -> None:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(Text.assemble(("Error: ", "bold red"), visible(message, lines=True)))


@contextmanager
def one_thread(when: bool = True) -> Iterator[None]:
    """Torch on one thread: for small networks more threads are slower, above all on a busy machine."""
    threads = torch.get_num_threads()
    try:
        if when:
            torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(threads)


class Stages:
    """`stages(name, share)` shows how far a stage is; nothing before a second has passed, nothing off a terminal."""

    def __init__(self, quiet: bool = False) -> None:
        self._console = Console(stderr=True)
        self._on = self._console.is_terminal and not quiet
        self._start = perf_counter()
        self._bars: Progress | None = None
        self._stage, self._task = "", TaskID(0)

    def __enter__(self) -> Stages:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def __call__(self, stage: str, share: float) -> None:
        if not self._on or (self._bars is None and perf_counter() - self._start < DELAY):
            return
        if self._bars is None:
            columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%")
            self._bars = Progress(*columns, TimeElapsedColumn(), console=self._console, transient=True)
            self._bars.start()
        if stage != self._stage:
            for task in self._bars.task_ids:
                self._bars.remove_task(task)
            self._stage, self._task = stage, self._bars.add_task(stage, total=1.0)
        self._bars.update(self._task, completed=share)


def say(*lines: str | Table | Text) -> None:
    """Lines and tables for people."""
    console = Console(highlight=False, soft_wrap=True)
    for line in lines:
        console.print(visible(line, lines=True), markup=False) if isinstance(line, str) else console.print(line)


def say_json(value: Any) -> None:
    """One JSON document."""
    sys.stdout.write(json.dumps(plain_values(value), indent=2, allow_nan=False) + "\n")


def notes(lines: Sequence[str], title: str = "Notes") -> list[Text]:
    if not lines:
        return []
    return [Text(f"\n{title}", style="bold"), *(Text.assemble("  - ", visible(line)) for line in lines)]


def comparison(summary: Any) -> Table:
    """MAP against Laplace, a line for each score; the best one stands out."""
    counts = summary.rows_used.get("test", 0)
    table = Table(title=f"On {counts:,} rows that were held out", title_justify="left", title_style="bold", box=ROUNDED)
    table.add_column("")
    for row in summary.rows:
        table.add_column(row.method, justify="right")
    table.add_column("wanted")
    lines = [("Negative log-likelihood", "nll", "low")]
    lines += [("Root mean squared error", "rmse", "low")] if summary.task == "regression" else []
    lines += [("Accuracy", "accuracy", "high")] if summary.task == "classification" else []
    lines += [("Calibration error (ECE)", "ece", "low")]
    kind = "interval" if summary.task == "regression" else "set"
    lines += [(f"Coverage of the {n}% {kind}", f"coverage_{n}", n / 100) for n in (50, 90, 95)]
    lines += [(f"  the same, conformal {n}%", f"conformal_{n}", n / 100) for n in (90, 95)]
    for name, field, goal in lines:
        table.add_row(name, *_scores([getattr(row, field) for row in summary.rows], goal, field), _wanted(goal))
    table.add_row("Seconds to predict them", *(f"{row.seconds:.3f}" for row in summary.rows), "")
    return table


def _wanted(goal: str | float) -> str:
    return f"{goal:.0%}" if isinstance(goal, float) else str(goal)


def _scores(values: Sequence[float | None], goal: str | float, field: str) -> list[Text]:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return [Text("too few rows", style="dim")] * len(values)
    percent = isinstance(goal, float) or field in ("accuracy", "ece")
    shown = [f"{value:.1%}" if percent else f"{value:.4g}" for value in known]
    best = better(known, shown, goal)
    return [Text(text, style="bold green" if number == best else "") for number, text in enumerate(shown)]
