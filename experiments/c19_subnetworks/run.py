"""C19: full covariance over few weights against a diagonal over all, in 1-d regression and on rotated digits.

The sub-network has the weights of largest variance under a factorised posterior, diagonal SWAG as in the source or
diagonal Laplace; all others stay at their trained values. Predictions are linearised. Every seed has data, initial
weights and draws of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import digits
import regression
from common import COLOURS, Checks, Experiment, Figures

NAMES = {
    "full": "full, all {all:,} weights",
    "by_swag": "full, {few} by SWAG variance",
    "by_laplace": "full, {few} by Laplace variance",
    "random": "full, {few} at random",
    "diagonal": "diagonal, all {all:,} weights",
}
LINES: dict[str, tuple[str, str, str]] = {
    "map": ("MAP", COLOURS["map"], "-"),
    "map_temperature": ("MAP, temperature scaled", COLOURS["map"], ":"),
    "diagonal": ("diagonal, all weights", COLOURS["sampled"], "-"),
    "by_swag": ("sub-network by SWAG variance", COLOURS["laplace"], "-"),
    "by_laplace": ("sub-network by Laplace variance", COLOURS["exact"], "-"),
    "random": ("sub-network at random", COLOURS["other"], "--"),
}


def one_seed(experiment: Experiment) -> tuple[Figures, Checks]:
    config = experiment.config
    ours: Figures = {}
    held: Checks = {}
    curves = []
    for activation in config["activations"]:
        ours[activation], found = regression.study(activation, config)
        curves.append(found)
        held |= regression.claims(activation, ours[activation])
    ours["digits"] = digits.study(config)
    held |= digits.claims(ours["digits"], config["rotated_from"])
    if config["seed"] == config["seeds"][0]:
        experiment.save(picture(curves, ours, config))
    return ours, held


def picture(curves: list[dict[str, Any]], ours: Figures, config: dict[str, Any]) -> Figure:
    figure = plt.figure(figsize=(14, 3.1 * len(curves) + 4))
    above, below = figure.subfigures(2, 1, height_ratios=[3.1 * len(curves), 4])
    rows = above.subplots(len(curves), len(NAMES), sharex=True, sharey=True, squeeze=False)
    for row, found in zip(rows, curves, strict=True):
        counts = {"all": ours[found["activation"]]["weights"], "few": config["chosen_weights"]}
        for axes, (name, title) in zip(row, NAMES.items(), strict=True):
            panel(axes, found, name)
            relative = ours[found["activation"]]["same_prior"][name]["deviation_gap_of_full"]
            axes.set_title(f"{title.format(**counts)}\n{found['activation']}, gap: {relative:.0%} of full", fontsize=9)
        row[0].set_ylabel("y")
    for axes in rows[-1]:
        axes.set_xlabel("x")
    rows[0, 0].set(ylim=(-5, 5))
    rows[0, 2].legend(loc="lower left", fontsize=7)
    both = below.subplots(1, 2, sharey=True)
    for axes, suffix in zip(both, ("", "_evidence"), strict=True):
        for name, (label, colour, style) in LINES.items():
            found = ours["digits"]["methods"][name if name.startswith("map") else name + suffix]
            axes.plot(config["angles"], found["nll_by_angle"], style, color=colour, label=label)
        axes.set_xticks(config["angles"])
        by = "the evidence" if suffix else "validation images"
        axes.set(title=f"rotated digits, prior precision by {by}", xlabel="angle in degrees")
    both[0].set_ylabel("NLL")
    both[0].legend(loc="lower right")
    return figure


def panel(axes: Axes, found: dict[str, Any], name: str) -> None:
    x = found["x"].squeeze(1)
    mean, variance = (each.squeeze(1) for each in found[name])
    deviation = (variance + found["sigma"] ** 2).sqrt()
    for count in (2, 1):
        low, high = mean - count * deviation, mean + count * deviation
        axes.fill_between(x, low, high, color=COLOURS["laplace"], alpha=0.2, lw=0)
    axes.plot(x, mean, color=COLOURS["map"], label="mean, 1 and 2 deviations")
    axes.plot(x, found["truth"], ":", color=COLOURS["exact"], label="truth")
    axes.scatter(*found["data"], s=5, color=COLOURS["data"], zorder=3, label="data")


def main(experiment: Experiment) -> None:
    ours, held = experiment.over_seeds(one_seed)
    source = {
        "regression": "Expressive inference over a small subnetwork preserves more uncertainty than crude inference "
        "over the full network",
        "rotated digits": "pictures only: ResNet-18 with 11M weights, sub-network of 42K (0.38 %)",
    }
    experiment.write(
        ours,
        source,
        held,
        reduced="Rotated digits: a convolutional network of 11,978 weights and a sub-network of 1,000, 4,000 training "
        "images and 300 test images a seed. No dropout, ensembles, SWAG or VOGN to compare with; no corrupted CIFAR10.",
        notes="The source names neither the data of the regression, nor its activation, nor how priors were chosen.",
    )


if __name__ == "__main__":
    main(Experiment.of(__file__))
