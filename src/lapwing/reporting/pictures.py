"""The pictures of a report: each function turns figures into one SVG, as text. matplotlib is imported on first use.

No picture needs anything from outside the file: text is drawn as paths, and the same figures give the same bytes.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from lapwing.errors import OptionError
from lapwing.reporting.words import Figures

NETWORK, LAPLACE, CONFORMAL, GREY = "#c8553d", "#1f5c7a", "#6b8e23", "#8a8f94"
NAMES = {"network": "network alone (MAP)", "laplace": "with error bars (Laplace)", "conformal": "conformal"}
COLOURS = {"network": NETWORK, "laplace": LAPLACE, "conformal": CONFORMAL}
STYLE: Any = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#5b6166",
    "axes.labelcolor": "#2b2f33",
    "axes.grid": True,
    "grid.color": "#e6e8ea",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "xtick.color": "#5b6166",
    "ytick.color": "#5b6166",
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 2,
    "svg.fonttype": "path",
    "svg.hashsalt": "lapwing",
    "figure.dpi": 150,
}


def style() -> AbstractContextManager[Any]:
    """The look of all pictures, for the length of a with block; an error with its remedy without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise OptionError(
            "pictures need matplotlib, which is not installed; expected it. Install it with pip install "
            "'lapwing[plots]'."
        ) from error
    return matplotlib.rc_context(STYLE)


def svg(draw: Callable[[Any, Figures], None], figures: Figures, size: tuple[float, float] = (5.4, 3.7)) -> str:
    """The SVG of `draw(axes, figures)`; no window and no state of pyplot is involved."""
    with style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=size, layout="constrained")
        draw(figure.add_subplot(), figures)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()


def reliability(axes: Any, figures: Figures) -> None:
    axes.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=1, label="as sure as it is right")
    for name in ("network", "laplace"):
        found = figures[name]
        most = max(found["count"])
        axes.plot(found["confidence"], found["accuracy"], color=COLOURS[name], label=NAMES[name])
        axes.scatter(
            found["confidence"],
            found["accuracy"],
            s=[16 + 90 * count / most for count in found["count"]],
            color=COLOURS[name],
            alpha=0.85,
            zorder=3,
        )
    axes.set(xlabel="how sure it was (confidence)", ylabel="how often it was right", ylim=(-0.03, 1.03))
    axes.set_xlim(min(0.5, min(min(figures[n]["confidence"]) for n in ("network", "laplace"))) - 0.03, 1.03)
    axes.legend(loc="lower right")


def transform(axes: Any, figures: Figures) -> None:
    bins = figures["bins"]
    edges = [i / bins for i in range(bins + 1)]
    axes.stairs(figures["laplace"], edges, fill=True, color=LAPLACE, alpha=0.35, label=NAMES["laplace"])
    axes.stairs(figures["laplace"], edges, color=LAPLACE, linewidth=1.5)
    axes.stairs(figures["network"], edges, color=NETWORK, linewidth=1.5, label=NAMES["network"])
    axes.axhline(1, color=GREY, linestyle="--", linewidth=1, label="perfectly calibrated")
    top = max(*figures["laplace"], *figures["network"], 1.0)
    axes.set(xlabel="where the true value fell in the prediction", ylabel="share of rows (1 = as many as it should)")
    axes.set(xlim=(0, 1), ylim=(0, 1.45 * top), xticks=[0, 0.25, 0.5, 0.75, 1])
    axes.set_xticklabels(["lowest", "25%", "middle", "75%", "highest"])
    axes.legend(loc="upper center")


def coverage(axes: Any, figures: Figures) -> None:
    levels = figures["levels"]
    axes.plot([0.45, 1], [0.45, 1], color=GREY, linestyle="--", linewidth=1, label="kept exactly")
    markers = {"network": "o", "laplace": "s", "conformal": "^"}
    lowest = 0.45
    for name, marker in markers.items():
        pairs = [(x, y) for x, y in zip(levels, figures[name]["covered"], strict=True) if y is not None]
        if pairs:
            x, y = zip(*pairs, strict=True)
            lowest = min(lowest, *y)
            axes.plot(x, y, color=COLOURS[name], marker=marker, markersize=5, label=NAMES[name])
    axes.set(xlabel="promised coverage", ylabel="share of true values inside", xlim=(0.47, 1.01))
    axes.set_ylim(max(0, lowest - 0.04), 1.03)
    _percent(axes.xaxis)
    _percent(axes.yaxis)
    axes.legend(loc="lower right" if lowest >= 0.4 else "best")


def number_errors(axes: Any, figures: Figures) -> None:
    points = figures["points"]
    axes.scatter(points["predicted"], points["error"], s=11, color=GREY, alpha=0.5, linewidths=0, rasterized=True)
    axes.plot(
        figures["predicted"],
        figures["error"],
        color=LAPLACE,
        marker="s",
        label="typical error (RMS) of a group of rows",
    )
    ends = [min(figures["predicted"]), max(figures["predicted"])]
    margin = 0.15 * (ends[1] - ends[0]) or 0.1 * ends[1]
    line = [max(0.0, ends[0] - margin), ends[1] + margin]
    axes.plot(line, line, color=GREY, linestyle="--", linewidth=1, label="error as large as predicted")
    ordered = sorted(points["error"])
    top = max(1.35 * max(figures["error"]), 1.25 * ordered[int(0.97 * (len(ordered) - 1))], 1.1 * line[1])
    axes.set(xlabel="predicted standard deviation", ylabel="error |true - predicted|", xlim=line, ylim=(0, 1.2 * top))
    axes.legend(loc="upper left")


def class_errors(axes: Any, figures: Figures) -> None:
    count = len(figures["error"])
    axes.bar(range(count), figures["error"], color=LAPLACE, alpha=0.85, width=0.75)
    axes.set(xlabel="rows, from surest to least sure", ylabel="share of wrong answers")
    axes.set_xticks([0, count - 1] if count > 1 else [0])
    axes.set_xticklabels(["surest", "least sure"] if count > 1 else ["all"])
    axes.grid(visible=False, axis="x")
    top = max(figures["error"])
    axes.set_ylim(0, max(1.15 * top, 0.02))
    _percent(axes.yaxis, 1 if top < 0.04 else 0)


def unfamiliar(axes: Any, figures: Figures) -> None:
    edges = figures["edges"]
    for name, colour, label in (("inside", LAPLACE, "these data"), ("outside", NETWORK, "unfamiliar inputs")):
        axes.stairs(figures[name], edges, fill=True, color=colour, alpha=0.4, label=label)
        axes.stairs(figures[name], edges, color=colour, linewidth=1.3)
    axes.set(xlabel=figures["label"], ylabel="share of inputs", xlim=(0, edges[-1]))
    axes.set_ylim(0, 1.25 * max(*figures["inside"], *figures["outside"]))
    _percent(axes.yaxis)
    axes.legend(loc="upper right")


def evidence(axes: Any, figures: Figures) -> None:
    axes.semilogx(figures["precision"], figures["log_evidence"], color=LAPLACE)
    axes.plot(
        [figures["chosen"]], [figures["chosen_log_evidence"]], "o", color=NETWORK, markersize=8, label="used here"
    )
    name = "factor on all prior precisions" if figures["common_factor"] else "prior precision"
    axes.set(xlabel=name, ylabel="log evidence")
    # to the right the curve falls without end; the left end says how far down is of interest
    shown = [value for value in figures["log_evidence"] if value == value]
    best, left = max(shown), shown[0]
    drop = max(best - left, best - figures["chosen_log_evidence"], 1.0)
    axes.set_ylim(best - 1.3 * drop, best + 0.12 * drop)
    axes.legend(loc="lower center")


def effective(axes: Any, figures: Figures) -> None:
    names, sizes, gammas = figures["name"], figures["size"], figures["gamma"]
    rows = range(len(names))
    axes.barh(rows, sizes, color="#dfe3e6", height=0.7, label="parameters there are")
    axes.barh(rows, [max(g, 1e-3) for g in gammas], color=LAPLACE, height=0.7, label="determined by the data")
    axes.set_xscale("log")
    axes.set_xlim(0.5 if min(gammas) >= 0.5 else 0.1, 12 * max(sizes))
    for row, size, gamma in zip(rows, sizes, gammas, strict=True):
        axes.text(1.15 * size, row, f"{gamma:,.1f} of {size:,}", va="center", fontsize=8.5, color="#2b2f33")
    axes.set_yticks(list(rows), [_short(name) for name in names])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("number of parameters (logarithmic)")
    axes.legend(loc="upper center", bbox_to_anchor=(0.45, 1.0 + 0.42 / (0.34 * len(names) + 0.6)), ncols=2)


def _percent(axis: Any, decimals: int = 0) -> None:
    from matplotlib.ticker import PercentFormatter

    axis.set_major_formatter(PercentFormatter(1, decimals=decimals))


def _short(name: str) -> str:
    shown = name if len(name) <= 24 else f"...{name[-21:]}"
    return shown.replace("$", r"\$")  # a dollar begins a formula
