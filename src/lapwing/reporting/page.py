"""The page: figures and words as one HTML file that needs nothing else. Every string of the user is escaped."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from math import isfinite
from typing import Any

from lapwing.reporting import pictures, words
from lapwing.reporting.words import number

Figures = dict[str, Any]

CSS = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; background: #f6f7f8; color: #23282c; font: 16px/1.6 system-ui, -apple-system, "Segoe UI", Roboto,
  "Helvetica Neue", "Noto Sans", "DejaVu Sans", sans-serif; -webkit-text-size-adjust: 100%; }
main { max-width: 1080px; margin: 0 auto; padding: 2.5rem 1.5rem 3rem; }
header { margin-bottom: 2rem; }
h1 { font-size: 1.9rem; line-height: 1.25; margin: 0 0 .4rem; font-weight: 650; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; line-height: 1.3; margin: 0 0 .6rem; font-weight: 650; }
p { margin: 0 0 .8rem; max-width: 68ch; }
.facts { color: #5b6166; margin: 0; max-width: none; overflow-wrap: anywhere; }
.card { background: #fff; border: 1px solid #e3e6e8; border-radius: 10px; padding: 1.5rem; margin: 0 0 1.25rem; }
.lead p { font-size: 1.06rem; }
.pair { display: grid; grid-template-columns: minmax(0, 1.15fr) minmax(0, 1fr); gap: 1.75rem; align-items: center; }
.pair img { width: 100%; height: auto; display: block; }
.here { border-left: 3px solid #1f5c7a; padding-left: .8rem; margin-bottom: 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .93rem; }
th, td { padding: .45rem .6rem; text-align: right; border-bottom: 1px solid #eceef0; white-space: nowrap; }
th { font-weight: 600; color: #454b50; white-space: normal; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
td.text, th.text { text-align: left; max-width: 16rem; overflow: hidden; text-overflow: ellipsis; }
td.best { font-weight: 650; color: #1f5c7a; }
td.wrong { color: #b23c26; font-weight: 600; }
.note { color: #5b6166; font-size: .92rem; margin: .8rem 0 0; }
dl { margin: 1.1rem 0 0; display: grid; grid-template-columns: 1fr 1fr; gap: .4rem 1.75rem; }
dl > div { border-top: 1px solid #eceef0; padding-top: .7rem; }
dt { font-weight: 650; } dd { margin: 0; }
ul { margin: 0; padding-left: 1.2rem; } li { margin-bottom: .35rem; overflow-wrap: anywhere; }
footer { color: #5b6166; font-size: .9rem; margin-top: 2rem; }
@media (max-width: 760px) {
  main { padding: 1.5rem 1rem 2rem; } .pair, dl { grid-template-columns: 1fr; } .card { padding: 1.1rem; }
}
@media print {
  body { background: #fff; font-size: 10.5pt; } main { max-width: none; padding: 0; }
  .card { break-inside: avoid; border-color: #ccc; padding: 1rem; } .scroll { overflow: visible; }
  th, td { padding: .3rem .4rem; }
}
"""


@dataclass(frozen=True)
class Section:
    """A picture with words beside it; `below` is HTML already."""

    heading: str
    alt: str
    picture: str
    shows: str
    here: str
    below: str = ""

    def html(self) -> str:
        source = base64.b64encode(self.picture.encode()).decode()
        image = f'<img alt="{escape(self.alt)}" src="data:image/svg+xml;base64,{source}">'
        text = f'<h2>{escape(self.heading)}</h2><p>{escape(self.shows)}</p><p class="here">{escape(self.here)}</p>'
        return (
            f'<section class="card"><div class="pair"><div>{image}</div><div>{text}</div></div>{self.below}</section>'
        )


def render(figures: Figures) -> str:
    """The whole page."""
    title = escape(figures["title"])
    facts = " · ".join(escape(fact) for fact in figures["facts"])
    lead = "".join(f"<p>{escape(text)}</p>" for text in words.headline(figures))
    body = [
        f'<header><h1>{title}</h1><p class="facts">{facts}</p></header>',
        f'<section class="card lead"><h2>In short</h2>{lead}{_summary(figures)}</section>',
        *(section.html() for section in sections(figures)),
        _uncertain(figures),
        *_choices(figures),
        f"<footer>Written by lapwing {escape(figures['version'])}. All figures are in this file as JSON, in the "
        "element <code>lapwing-report</code>.</footer>",
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + f'\n</main>\n<script type="application/json" id="lapwing-report">{as_json(figures)}</script>\n'
        + "</body>\n</html>\n"
    )


def sections(figures: Figures) -> list[Section]:
    classes = figures["task"] == "classification"
    draw = pictures.svg
    found = []
    if classes:
        said = words.reliability(figures["reliability"])
        alt = f"Reliability diagram: accuracy against confidence. {said[1]}"
        found.append(
            Section("Is it right as often as it says?", alt, draw(pictures.reliability, figures["reliability"]), *said)
        )
    else:
        said = words.transform(figures["transform"])
        alt = f"Histogram of where true values fell in the predicted distributions. {said[1]}"
        found.append(
            Section("Do the predictions tell the truth?", alt, draw(pictures.transform, figures["transform"]), *said)
        )
    said = words.coverage(figures["coverage"], classes, figures["counts"])
    alt = f"Share of true values covered, against the promised coverage. {said[1]}"
    picture = draw(pictures.coverage, figures["coverage"])
    found.append(
        Section(
            "Do the intervals keep their promise?" if not classes else "Do the prediction sets keep their promise?",
            alt,
            picture,
            *said,
            _promises(figures),
        )
    )
    said = words.errors(figures["errors"], classes, figures["noise"])
    alt = f"Error against predicted uncertainty. {said[1]}"
    picture = draw(pictures.class_errors if classes else pictures.number_errors, figures["errors"])
    found.append(Section("Does it know when it errs?", alt, picture, *said))
    if figures["unfamiliar"] is not None:
        said = words.unfamiliar(figures["unfamiliar"], classes)
        alt = f"Histograms of uncertainty for familiar and unfamiliar inputs. {said[1]}"
        scale = " of the log-rate" if figures["counts"] else ""
        label = "entropy of the prediction (nats)" if classes else f"epistemic standard deviation{scale}"
        picture = draw(pictures.unfamiliar, figures["unfamiliar"] | {"label": label})
        found.append(Section("Is it less sure of what it has not seen?", alt, picture, *said))
    if figures["evidence"] is not None:
        said = words.evidence(figures["evidence"])
        alt = f"Log evidence against prior precision. {said[1]}"
        found.append(
            Section("How strong a prior do the data want?", alt, draw(pictures.evidence, figures["evidence"]), *said)
        )
    said = words.effective(figures["effective"])
    alt = f"Effective parameters per group. {said[1]}"
    height = min(9.0, 1.5 + 0.34 * len(figures["effective"]["name"]))
    picture = draw(pictures.effective, figures["effective"], (5.4, height))
    found.append(Section("How much of the network is used?", alt, picture, *said))
    return found


def _promises(figures: Figures) -> str:
    how = figures["coverage"]["conformal"].get("how")
    pairs = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>" for name, text in words.PROMISES)
    note = f'<p class="note">The conformal ones here were {escape(how)}.</p>' if how else ""
    return f"<dl>{pairs}</dl>{note}"


def _summary(figures: Figures) -> str:
    lines = []
    for row in figures["summary"]:
        network, laplace, goal = row["network"], row["laplace"], row["goal"]
        percent = isinstance(goal, float) or row["measure"] == "Accuracy"
        show = (lambda v: f"{v:.1%}") if percent else number
        badness: Callable[[float], float] = (
            (lambda v, g=goal: abs(v - g))
            if isinstance(goal, float)
            else (lambda v, s=-1 if goal == "high" else 1: s * v)
        )
        equal = show(network) == show(laplace)
        first = ' class="best"' if not equal and badness(network) < badness(laplace) else ""
        second = ' class="best"' if not equal and badness(laplace) < badness(network) else ""
        wanted = {"low": "lower is better", "high": "higher is better"}.get(str(goal), "")
        wanted = wanted or f"should be {goal:.0%}"
        lines.append(
            f"<tr><td>{escape(row['measure'])}</td><td{first}>{show(network)}</td><td{second}>{show(laplace)}</td>"
            f'<td class="text">{wanted}</td></tr>'
        )
    which = "On held-out rows" if figures["held_out"] else "On rows that may have been used for training"
    heads = [(which, ""), ("Network alone (MAP)", ""), ("With error bars (Laplace)", ""), ("", "text")]
    return _table(heads, lines)


def _uncertain(figures: Figures) -> str:
    classes = figures["task"] == "classification"
    head: list[tuple[str, str]] = [("Row", "")]
    if classes:
        head += [
            ("True class", "text"),
            ("Predicted", "text"),
            ("Probability", ""),
            ("Network alone", ""),
            ("Entropy", ""),
        ]
    else:
        head += [("True value", ""), ("Predicted", ""), ("Std. dev.", ""), ("of it, weights", ""), ("of it, noise", "")]
    head += [(name, "text") for name in figures["columns"]]
    lines = []
    for row in figures["uncertain"]:
        cells: list[tuple[str, str]] = [(str(row["row"]), "")]
        if classes:
            names = figures["classes"]
            wrong = row["predicted"] != row["target"]
            cells += [
                (_named(names, row["target"]), "text"),
                (_named(names, row["predicted"]), "text wrong" if wrong else "text"),
            ]
            cells += [
                (f"{row['probability']:.0%}", ""),
                (f"{row['network_probability']:.0%}", ""),
                (f"{row['entropy']:.2f}", ""),
            ]
        else:
            cells += [(number(row[k]), "") for k in ("target", "mean", "deviation", "epistemic", "noise")]
        cells += [(str(value), "text") for value in row.get("columns", ())]
        lines.append(f"<tr>{_cells(cells, 'td')}</tr>")
    said = words.uncertain(classes, figures["noise"])
    return f'<section class="card"><h2>The most uncertain rows</h2><p>{escape(said)}</p>{_table(head, lines)}</section>'


def _table(head: Iterable[tuple[str, str]], lines: Iterable[str]) -> str:
    rows = f"<thead><tr>{_cells(head, 'th')}</tr></thead><tbody>{''.join(lines)}</tbody>"
    return f'<div class="scroll"><table>{rows}</table></div>'


def _cells(cells: Iterable[tuple[str, str]], tag: str) -> str:
    return "".join(f"<{tag}{_attribute(kind)}>{escape(text)}</{tag}>" for text, kind in cells)


def _attribute(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def _choices(figures: Figures) -> list[str]:
    if not figures["choices"]:
        return []
    items = "".join(f"<li>{escape(text)}</li>" for text in figures["choices"])
    return [f'<section class="card"><h2>How it was made</h2><ul>{items}</ul></section>']


def _named(names: Sequence[str] | None, index: int) -> str:
    return names[index] if names and index < len(names) else str(index)


def as_json(figures: Figures) -> str:
    """JSON that cannot end the script element it stands in; numbers that JSON has not become null."""
    return (
        json.dumps(_plain(figures), allow_nan=False, ensure_ascii=True).replace("<", "\\u003c").replace("&", "\\u0026")
    )


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value
