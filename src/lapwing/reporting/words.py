"""The sentences beside the pictures: what each shows, and what it says here. Plain text, which the page escapes."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

Figures = dict[str, Any]
"""What a report says, or a part of it, by name: numbers, texts, lists and dictionaries of them, as in JSON."""


def number(value: float) -> str:
    """Four significant digits, without a power of ten where it reads well."""
    if not isfinite(value):
        return "-"
    size = abs(value)
    if size >= 1e6 or 0 < size < 1e-4:
        return f"{value:.3g}"
    return f"{value:,.0f}" if size >= 1e4 else f"{value:.4g}"


def better(values: Sequence[float], shown: Sequence[str], goal: str | float) -> int | None:
    """Which value is the best one; None where another is shown alike. `goal`: "low", "high", or a number.

    >>> better((0.85, 0.97), ("85%", "97%"), 0.9), better((0.851, 0.853), ("85%", "85%"), "high")
    (0, None)
    >>> better((0.3, 0.1, 0.2), ("0.3", "0.1", "0.2"), "low")
    1
    """
    away = [abs(v - goal) if isinstance(goal, float) else -v if goal == "high" else v for v in values]
    best = min(range(len(away)), key=away.__getitem__)
    alike = away.count(away[best]) > 1 or shown.count(shown[best]) > 1
    return None if alike else best


def headline(figures: Figures) -> list[str]:
    """What the page says, in two or three sentences."""
    first = figures["summary"][0]
    gain = first["network"] - first["laplace"]
    data = "held-out data" if figures["held_out"] else "these data (which may have been used for training)"
    if abs(gain) < 0.005:
        fit = f"Error bars leave the likelihood of {data} as it was"
    elif gain > 0:
        fit = f"Error bars make {data} more likely"
    else:
        fit = f"Error bars make {data} less likely here, so read the intervals with care"
    fit += f" (mean negative log-likelihood {first['network']:.3f} without, {first['laplace']:.3f} with them)."
    at = figures["coverage"]["levels"].index(0.9)
    network, laplace, conformal = (figures["coverage"][n]["covered"][at] for n in ("network", "laplace", "conformal"))
    kind = "sets" if figures["task"] == "classification" else "intervals"
    covered = f"Of the 90% {kind}, {laplace:.1%} contain the true value; from the network alone it is {network:.1%}"
    covered += f", with conformal {kind} {conformal:.1%}." if conformal is not None else "."
    return [fit, covered]


def reliability(figures: Figures) -> tuple[str, str]:
    shows = (
        "Rows are grouped by how sure the prediction was. On the dashed line, answers given with 80% confidence are "
        "right 80% of the time. Below the line is too sure, above it too careful. Larger dots hold more rows."
    )
    network, laplace = figures["network"], figures["laplace"]
    better = "closer to the line" if laplace["ece"] < network["ece"] else "no closer to the line"
    here = (
        f"The mean gap to the line (expected calibration error) is {network['ece']:.1%} for the network alone and "
        f"{laplace['ece']:.1%} with error bars, which is {better}."
    )
    return shows, here


def transform(figures: Figures) -> tuple[str, str]:
    shows = (
        "For every row, where did the true value fall in the predicted distribution: far below the middle, in the "
        "middle, far above it? If the predictions are honest all places are equally common and the bars are level. "
        "Tall bars at both ends mean intervals that are too narrow, a hump in the middle intervals that are too wide, "
        "a slope a bias."
    )
    ends = {name: (figures[name][0] + figures[name][-1]) / 2 for name in ("network", "laplace")}
    verdict = "too narrow" if ends["laplace"] > 1.3 else "too wide" if ends["laplace"] < 0.6 else "about right"
    here = (
        f"The two outermost bars hold {ends['network']:.1f} times the rows they should for the network alone and "
        f"{ends['laplace']:.1f} times with error bars: in the tails the intervals are {verdict}."
    )
    return shows, here


def coverage(figures: Figures, classes: bool, counts: bool = False) -> tuple[str, str]:
    kind, whole = ("set", "a set of classes") if classes else ("interval", "an interval")
    shows = (
        f"Every prediction can be given as {whole} with a promised coverage. The picture compares the promise with "
        "the share of true values that were inside. Below the dashed line the promise is broken, above it the "
        f"{kind}s are larger than they had to be."
    )
    if classes:
        shows += " A set has one class at least, so where nearly all answers are right, so are nearly all sets."
    if counts:
        shows += " Counts go by whole steps, so intervals of small ones hold more than they promise."
    at = figures["levels"].index(0.9)
    sizes = {name: figures[name]["width"][at] for name in ("network", "laplace", "conformal")}
    known = [(size, label) for n, label in _LABELS.items() if (size := sizes[n]) not in (None, float("inf"))]
    said = [f"{f'{size:.3g} classes' if classes else number(size)} ({label})" for size, label in known]
    return shows, f"Mean {'size' if classes else 'width'} of a 90% {kind}: {', '.join(said)}."


_LABELS = {"network": "network alone", "laplace": "Laplace", "conformal": "conformal"}

PROMISES = (
    (
        "The Bayesian one (Laplace)",
        "promises that, if the model and its prior are right, the true value lies inside with the stated probability "
        "for this very input. It knows what was not seen, so it grows away from the data. If the model is wrong, so "
        "may be the promise.",
    ),
    (
        "The conformal one",
        "promises that of many new rows like those it was calibrated on, at least the stated share lie inside, "
        "whatever the model. It says nothing about one particular input, and nothing about data of another kind.",
    ),
)


def errors(figures: Figures, classes: bool, noise: Figures | None = None) -> tuple[str, str]:
    if classes:
        shows = (
            "Rows in groups of equal size, from those the model is surest of (smallest entropy) to those it is least "
            "sure of. A useful uncertainty puts the mistakes on the right."
        )
        total, last = sum(figures["error"]), figures["error"][-1]
        half = figures["risk"][len(figures["risk"]) // 2]
        share = f"{last / total:.0%} of all mistakes are in the least sure group" if total else "There are no mistakes"
        return (
            shows,
            f"{share}. Answering only the surer half, {half:.1%} of the answers are wrong instead of "
            f"{figures['risk'][-1]:.1%}.",
        )
    shows = (
        "Each grey dot is a row: the error that came, against the standard deviation that was predicted for it. The "
        "squares are the typical (root mean square) error of groups of rows; on the dashed line it is as large as "
        "predicted."
    )
    if noise and noise["varies"]:
        shows += " How large the noise is was learnt as well: it is predicted for every row, from its inputs."
    ratio = [e / p for e, p in zip(figures["error"], figures["predicted"], strict=True)]
    half = len(ratio) // 2
    low, high = (sum(part) / max(1, len(part)) for part in (figures["error"][:half], figures["error"][-half:]))
    rises = high > 1.1 * low
    here = (
        f"In the surest group the error is {ratio[0]:.2f} times the predicted deviation, in the least sure one "
        f"{ratio[-1]:.2f} times. "
    )
    if rises:
        return shows, here + "Rows with larger predicted deviations do have larger errors."
    here += "Here the predicted deviation hardly tells large errors from small ones"
    if noise and noise["varies"]:
        here += ", although the noise in it is not the same for all rows"
    elif noise and noise["share"] > 0.5:
        here += ": most of it is noise that is the same for all rows"
    return shows, here + "."


def unfamiliar(figures: Figures, classes: bool) -> tuple[str, str]:
    what = (
        "entropy of the predicted probabilities"
        if classes
        else "part of the standard deviation that more data would remove"
    )
    shows = f"A model should be less sure of inputs unlike its data. Compared is the {what}. "
    if figures["made"]:
        shows += (
            "No unfamiliar inputs were given, so they were made: every input column was shuffled on its own and "
            "stretched to three times its spread. They are only a stand-in for what may come."
        )
    else:
        shows += f"The unfamiliar inputs, {figures['count']:,} of them, were given for this report."
    here = (
        f"An unfamiliar input has the larger uncertainty in {figures['auroc']:.0%} of comparisons with a familiar one "
        "(50% is chance)"
    )
    if "auroc_network" in figures:
        here += f"; by the network alone in {figures['auroc_network']:.0%}"
        here += f", by the standard deviation of the logits in {figures['auroc_epistemic']:.0%}"
    here += "."
    if "flagged" in figures:
        inside, outside = figures["flagged"]
        here += f" The flag for unfamiliar rows goes up for {outside:.0%} of them, and for {inside:.1%} of these data."
    return shows, here


def evidence(figures: Figures) -> tuple[str, str]:
    shows = (
        "The evidence says how probable the training data are under a prior precision, all weights considered. A small "
        "precision (left) lets weights roam, a large one (right) holds them near zero; the top of the curve is the "
        "balance that the training data themselves prefer."
    )
    best = max(value for value in figures["log_evidence"] if value == value)
    loss = best - figures["chosen_log_evidence"]
    value = (
        "the precisions used here" if figures["common_factor"] else f"the precision used here, {figures['chosen']:.3g},"
    )
    if loss < 0.5:
        here = f"With {value} the evidence is at its top."
    else:
        here = f"With {value} the evidence is {loss:,.1f} below its top: the prior was set by other data, or not tuned."
    if figures["temperature"] != 1:
        here += f" The posterior has temperature {figures['temperature']:.3g}, which moves the top."
    return shows, here


def effective(figures: Figures) -> tuple[str, str]:
    shows = (
        "Not every parameter is fixed by the data; the rest stay where the prior holds them. For each group of "
        "parameters the dark bar counts how many the data determine, the light bar how many there are."
    )
    gamma, size = sum(figures["gamma"]), sum(figures["size"])
    here = f"In all, the data determine about {gamma:,.0f} of {size:,} parameters ({gamma / size:.0%})."
    return shows, here


def uncertain(classes: bool, noise: Figures | None = None) -> str:
    if classes:
        return (
            "The rows whose predicted probabilities are most spread out, worst first: candidates for a second look, a "
            "better label, or more data of their kind. Rows count from 0 in the order of the data."
        )
    varies = noise is not None and noise["varies"]
    stays = "the noise becomes better known, but stays" if varies else "the noise does not"
    return (
        "The rows with the largest predicted standard deviation, worst first. The part from the weights shrinks with "
        f"more data of that kind; {stays}. Rows count from 0 in the order of the data."
    )
