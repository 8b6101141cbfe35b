"""C27: odd and even digits by a mixture of two Bernoulli classifiers, whose GGN is not its Fisher: KFLR, KFAC, Adam.

Each arm of a seed has the same images, initial weights and batches, and as many processor seconds on one thread. KFLR
has the exact Hessian of the three outputs, its positive part; KFAC one drawn target an image, hence the Fisher. Adam's
rate and period are those of the lowest training loss on a seed of its own. What is reported is the loss of a fixed set
of training images.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache, partial
from math import inf
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import logsigmoid

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "c25_autoencoders"))
from arms import FirstOrder, SecondOrder, cells, columns, drawn, in_processes, medians, race, stacked
from common import COLOURS, Checks, Experiment, Figures, idx_images

from lapwing.likelihoods import BernoulliMixture

SECOND = {"KFLR": "exact", "KFAC": "mc"}
TUNED, PER_UPDATE, DEFAULT = "Adam, tuned", "Adam, tuned per update", "Adam, 1e-3"
STYLE: dict[str, dict[str, Any]] = {
    "KFLR": {"color": COLOURS["exact"]},
    "KFAC": {"color": COLOURS["laplace"]},
    TUNED: {"color": COLOURS["map"]},
    PER_UPDATE: {"color": COLOURS["map"], "linestyle": ":"},
    DEFAULT: {"color": COLOURS["data"], "linestyle": "-."},
}
FACTOR = 2.0
SOURCE = {
    "claim": "KFAC almost identical to KFLR; both faster than Adam per update, and on a CPU per second; on a GPU Adam "
    "is faster per second; in the end Adam's loss is the lower one, all are about 1e-8",
    "note": "figure 4.4, without numbers in the text; 784-1000-500-250-30-3, 5,000 updates against Adam's 40,000",
}


def loss(f: Tensor, y: Tensor) -> Tensor:
    """Mean of -log p(y | h) (4.28)."""
    sign = (2 * y - 1).to(f.dtype)
    first, second = (logsigmoid(sign * f[:, k]) for k in (1, 2))
    return -torch.logaddexp(logsigmoid(f[:, 0]) + first, logsigmoid(-f[:, 0]) + second).mean()


@cache
def digits(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Of the first 50,000, as in the source; 1 is odd."""
    images, labels = idx_images("mnist", "train", 50000)
    chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[:count]
    return images[chosen].flatten(1), labels[chosen] % 2


def course(arm: str, config: dict[str, Any], tuned: Figures) -> Figures:
    x, y = digits(config["train"], config["seed"])
    torch.manual_seed(config["seed"])
    model = stacked([x.shape[1], *config["hidden"], 3])
    some = slice(config["evaluated"])

    @torch.no_grad()
    def figure() -> float:
        return float(loss(model(x[some]), y[some]))

    if arm in SECOND:
        stepper = SecondOrder(model, BernoulliMixture(), SECOND[arm], config["seed"])
    else:
        rate, period = (1e-3, 1.0) if arm == DEFAULT else (tuned[arm]["rate"], tuned[arm]["period"])
        stepper = FirstOrder(model, loss, torch.optim.Adam(model.parameters(), lr=rate), period)
    shares = [] if arm == PER_UPDATE else [k / config["marks"] for k in range(1, config["marks"] + 1)]
    seconds = config["seconds"] if shares else 0.0
    batches = drawn(x, y, config["batch"], config["seed"])
    found = race(stepper, batches, figure, seconds, shares, config["updates"])
    print(config["seed"], arm, {key: value for key, value in found.items() if "at_" not in key}, flush=True)
    for key in ("at_seconds", "at_updates"):
        print("   ", key, [float(f"{each:.3g}") for each in found[key]], flush=True)
    return found


def tried(setting: tuple[float, float], config: dict[str, Any]) -> Figures:
    named = dict(zip(("rate", "period"), setting, strict=True))
    found = course(TUNED, config, {TUNED: named})
    ends = {"loss": found["at_seconds"][-1], "loss_per_update": found["at_updates"][-1]}
    return named | {key: value if value == value else inf for key, value in ends.items()}


def tuning(experiment: Experiment) -> Figures:
    """Every setting of Adam; the best by seconds and the best by updates."""
    config = experiment.config | {"seed": experiment.config["tuning_seed"]}
    grid = [(2.0**power, period) for power in config["powers"] for period in config["periods"]]
    rows = in_processes(partial(tried, config=config), grid, experiment.smoke)
    best = {
        TUNED: min(rows, key=lambda row: row["loss"]),
        PER_UPDATE: min(rows, key=lambda row: row["loss_per_update"]),
    }
    return {"best": best, "tried": rows}


def one_seed(experiment: Experiment) -> tuple[Figures, Checks]:
    config = experiment.config
    found = {arm: course(arm, config, config["tuned"]["best"]) for arm in STYLE}
    return found, claims(found, config)


def claims(found: Figures, config: dict[str, Any]) -> Checks:
    after = {arm: each["at_updates"][-1] for arm, each in found.items()}
    end = {arm: each["at_seconds"][-1] for arm, each in found.items() if each["at_seconds"]}
    count, seconds = config["updates"][-1], config["seconds"]
    ratio = after["KFLR"] / after["KFAC"]
    held = {
        f"losses of KFLR and KFAC after {count} updates differ by a factor of at most {FACTOR:g}": 1 / FACTOR
        <= ratio
        <= FACTOR
    }
    for arm in SECOND:
        held[f"{arm} is below Adam after {count} updates, those that Adam was tuned for"] = (
            after[arm] < after[PER_UPDATE]
        )
        held[f"{arm} is below tuned Adam after {seconds} seconds"] = end[arm] < end[TUNED]
    return held


def picture(seeds: list[Figures], config: dict[str, Any]) -> Figure:
    """Medians over seeds with the range: per update on the left, per second on the right."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.6), sharey=True)
    times = [config["seconds"] * k / config["marks"] for k in range(1, config["marks"] + 1)]
    for axis, key, places in ((axes[0], "at_updates", config["updates"]), (axes[1], "at_seconds", times)):
        for arm, style in STYLE.items():
            runs = [seed[arm] for seed in seeds]
            if runs[0][key]:
                axis.plot(places, medians(runs, key), label=arm, **style)
                low, high = ([pick(column) for column in columns(runs, key)] for pick in (min, max))
                axis.fill_between(places, low, high, color=style["color"], alpha=0.12, lw=0)
        axis.set_yscale("log")
        axis.set_xlabel("updates" if key == "at_updates" else "processor seconds")
        axis.grid(alpha=0.3, which="both")
    axes[0].set_ylabel("training loss")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(STYLE))
    return figure


def main(experiment: Experiment) -> None:
    torch.set_num_threads(1)
    config = experiment.config
    tuned = tuning(experiment)
    ours, held = replace(experiment, config=config | {"tuned": tuned}).over_seeds(one_seed)
    seeds = list(ours["by_seed"].values())
    table = {arm: cells([seed[arm] for seed in seeds], config) for arm in STYLE}
    experiment.save(picture(seeds, config))
    experiment.write(
        {"table": table, "tuning": tuned, **ours},
        SOURCE,
        held,
        reduced=f"hidden layers {config['hidden']}, {config['train']:,} images, batches of {config['batch']}, "
        f"{config['seconds']} processor seconds a run on one thread of a CPU, a coarser grid",
        notes="losses are those of a fixed set of training images; tanh is assumed, as the source names no activation",
    )


if __name__ == "__main__":
    main(Experiment.of(__file__))
