"""The page: figures, pictures and words as one HTML file that needs nothing else.

The layout is in templates/page.html and templates/page.css; jinja2 fills it in, and escapes every string.
"""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any

from lapwing.errors import DataError
from lapwing.reporting import pictures, words
from lapwing.reporting.words import Figures
from lapwing.serialize import replacing
from lapwing.serialize.files import check_writable

COLUMNS = {
    "network": "Network alone (MAP)",
    "scaled": "MAP with a temperature",
    "laplace": "With error bars (Laplace)",
}
"""Of the table of scores, those that are known."""


@dataclass(frozen=True)
class Section:
    """A picture (SVG, in base64) with words beside it, and below it what the kinds of intervals promise."""

    heading: str
    alt: str
    base64: str
    shows: str
    here: str
    has_promises: bool = False


def render(figures: Figures) -> str:
    """The whole page."""
    summary = [_summary_row(row) for row in figures["summary"]]
    columns = [title for source, title in COLUMNS.items() if source in figures["summary"][0]]
    return template().render(
        figures=figures, sections=sections(figures), summary=summary, columns=columns, words=words, plain=plain_values
    )


@cache
def template() -> Any:
    """The template of the page, read once."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # only a page needs it

    environment = Environment(
        loader=PackageLoader("lapwing.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}
    return environment.get_template("page.html")


def _summary_row(row: Figures) -> Figures:
    goal = row["goal"]
    percent = isinstance(goal, float) or row["measure"] == "Accuracy"
    values = [row[source] for source in COLUMNS if source in row]
    shown = [f"{value:.1%}" if percent else words.number(value) for value in values]
    wanted = f"should be {goal:.0%}" if isinstance(goal, float) else f"{goal}er is better"
    return {"measure": row["measure"], "shown": shown, "best": words.better(values, shown, goal), "wanted": wanted}


def sections(figures: Figures) -> list[Section]:
    """The pictures, with their words, in the order of the page."""
    classes = figures["task"] == "classification"
    listed = []

    def add(heading: str, caption: str, said: tuple[str, str], draw: Callable, shown: Figures, **size: Any) -> None:
        picture = b64encode(pictures.svg(draw, shown, **size).encode()).decode()
        listed.append(Section(heading, f"{caption}. {said[1]}", picture, *said, shown is figures["coverage"]))

    if classes:
        shown = figures["reliability"]
        caption = "Reliability diagram: accuracy against confidence"
        add("Is it right as often as it says?", caption, words.reliability(shown), pictures.reliability, shown)
    else:
        shown = figures["transform"]
        caption = "Histogram of where true values fell in the predicted distributions"
        add("Do the predictions tell the truth?", caption, words.transform(shown), pictures.transform, shown)
    shown, kind = figures["coverage"], "prediction sets" if classes else "intervals"
    caption = "Share of true values covered, against the promised coverage"
    said = words.coverage(shown, classes, figures["counts"])
    add(f"Do the {kind} keep their promise?", caption, said, pictures.coverage, shown)
    shown, draw = figures["errors"], pictures.class_errors if classes else pictures.number_errors
    said = words.errors(shown, classes, figures["noise"])
    add("Does it know when it errs?", "Error against predicted uncertainty", said, draw, shown)
    if figures["unfamiliar"] is not None:
        scale = " of the log-rate" if figures["counts"] else ""
        label = "entropy of the prediction (nats)" if classes else f"epistemic standard deviation{scale}"
        shown = figures["unfamiliar"] | {"label": label}
        caption = "Histograms of uncertainty for familiar and unfamiliar inputs"
        said = words.unfamiliar(shown, classes)
        add("Is it less sure of what it has not seen?", caption, said, pictures.unfamiliar, shown)
    if figures["evidence"] is not None:
        shown, caption = figures["evidence"], "Log evidence against prior precision"
        add("How strong a prior do the data want?", caption, words.evidence(shown), pictures.evidence, shown)
    shown, caption = figures["effective"], "Effective parameters per group"
    size = 5.4, min(9.0, 1.5 + 0.34 * len(shown["name"]))
    add("How much of the network is used?", caption, words.effective(shown), pictures.effective, shown, size=size)
    return listed


def plain_values(value: Any) -> Any:
    """As JSON has it: keys are text, and numbers that are not finite become null."""
    if isinstance(value, dict):
        return {str(key): plain_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_values(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def check_early(path: str | os.PathLike[str]) -> None:
    """Before the work: whether the page can be written, as far as its folder is there."""
    if Path(path).parent.is_dir():
        check_writable(path)


def write(path: str | os.PathLike[str], figures: Figures) -> None:
    """Writes the page, and makes its folder where there is none; the file appears whole or not at all."""
    text, target = render(figures), Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"cannot write {target}: {error.strerror}; expected a folder that can be written to."
        ) from error
    with replacing(target) as partial:
        partial.write_text(text, encoding="utf-8")
