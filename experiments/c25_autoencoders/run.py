"""C25: autoencoders by KFAC and KFRA with nothing tuned, against tuned Adam, L-BFGS and SOAP: per update, per second.

Three data sets. Each arm of a seed has the same images, initial weights and batches, and as many processor seconds on
one thread; it goes on to the last mark of updates where the seconds end before. Adam's and SOAP's settings are those of
the lowest training loss on a seed of their own, as in the source. What is reported is the loss of a fixed set of
training images. SOAP is that of pytorch-optimizer, which is no part of our environment: `make peers` has it.
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
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss

sys.path.insert(0, str(Path(__file__).parents[1]))
from arms import (
    FirstOrder,
    FullBatch,
    Loss,
    SecondOrder,
    Stepper,
    autoencoder,
    cells,
    drawn,
    in_processes,
    medians,
    race,
    soap,
)
from common import COLOURS, Checks, Experiment, Figures
from images import IMAGES

from lapwing.likelihoods import Bernoulli, Gaussian, Likelihood

TITLES = {"mnist": "MNIST", "curves": "CURVES", "faces": "FACES"}
SECOND: dict[str, tuple[str, dict[str, Any]]] = {
    "KFAC": ("mc", {}),
    "KFAC, no average": ("mc", {"moving_average": 0.0}),
    "KFRA": ("recursive", {}),
    "KFRA, no average": ("recursive", {"moving_average": 0.0}),
}
TUNED, PER_UPDATE, DEFAULT, SOAP, LBFGS = "Adam, tuned", "Adam, tuned per update", "Adam, 1e-3", "SOAP, tuned", "L-BFGS"
STYLE: dict[str, dict[str, Any]] = {
    "KFAC": {"color": COLOURS["laplace"], "linestyle": "--"},
    "KFAC, no average": {"color": COLOURS["laplace"]},
    "KFRA": {"color": COLOURS["sampled"], "linestyle": "--"},
    "KFRA, no average": {"color": COLOURS["sampled"]},
    TUNED: {"color": COLOURS["map"]},
    PER_UPDATE: {"color": COLOURS["map"], "linestyle": ":"},
    DEFAULT: {"color": COLOURS["data"], "linestyle": "-."},
    SOAP: {"color": COLOURS["exact"]},
    LBFGS: {"color": COLOURS["other"]},
}
SOURCE = {
    "claim": "with no tuning, KFRA and KFAC reach a lower loss than tuned Adam on all three data sets, per update and "
    "per second; KFRA is faster than KFAC in both; Adam at 1e-3 diverges on FACES",
    "note": "figure 4.1, without numbers in the text; 5,000 (FACES 20,000) updates against Adam's 40,000 (160,000), on "
    "a GPU; D-1000-500-250-30-250-500-1000-D; SOAP is of 2024, and not in the source",
}


def bernoulli(f: Tensor, x: Tensor) -> Tensor:
    """Cross-entropy, summed over pixels; mean over images."""
    return binary_cross_entropy_with_logits(f, x, reduction="sum") / len(x)


def square(f: Tensor, x: Tensor) -> Tensor:
    """Half the square error, summed over pixels; mean over images."""
    return mse_loss(f, x, reduction="sum") / (2 * len(x))


LIKELIHOODS: dict[str, tuple[Likelihood, Loss]] = {
    "mnist": (Bernoulli(), bernoulli),
    "curves": (Bernoulli(), bernoulli),
    "faces": (Gaussian(), square),
}


@cache
def images_of(data: str, count: int, seed: int) -> Tensor:
    return IMAGES[data](count, torch.Generator().manual_seed(seed))


def initial(x: Tensor, config: dict[str, Any]) -> nn.Sequential:
    torch.manual_seed(config["seed"])
    return autoencoder(x.shape[1], config["hidden"])


def stepper_of(arm: str, data: str, model: nn.Module, x: Tensor, config: dict[str, Any], tuned: Figures) -> Stepper:
    likelihood, loss = LIKELIHOODS[data]
    if arm in SECOND:
        estimator, options = SECOND[arm]
        return SecondOrder(model, likelihood, estimator, config["seed"], options)
    if arm == LBFGS:
        return FullBatch(model, loss, x, x)
    rate, period = (1e-3, 1.0) if arm == DEFAULT else (tuned[arm]["rate"], tuned[arm]["period"])
    optimiser = soap(model.parameters(), rate) if arm == SOAP else torch.optim.Adam(model.parameters(), lr=rate)
    assert optimiser is not None
    return FirstOrder(model, loss, optimiser, period)


def course(arm: str, data: str, x: Tensor, config: dict[str, Any], tuned: Figures) -> Figures:
    """One arm on one data set."""
    model, (_, loss) = initial(x, config), LIKELIHOODS[data]
    shown = x[: config["evaluated"]]
    twice = 2 if data == "faces" else 1  # the square error itself is reported

    @torch.no_grad()
    def figure() -> float:
        return twice * float(loss(model(shown), shown))

    stepper = stepper_of(arm, data, model, x, config, tuned)
    seconds = 0.0 if arm == PER_UPDATE else config["seconds"]
    shares = [] if arm == PER_UPDATE else [k / config["marks"] for k in range(1, config["marks"] + 1)]
    found = race(stepper, drawn(x, x, config["batch"], config["seed"]), figure, seconds, shares, config["updates"])
    print(config["seed"], data, arm, {key: value for key, value in found.items() if "at_" not in key}, flush=True)
    for key in ("at_seconds", "at_updates"):
        print("   ", key, [float(f"{each:.4g}") for each in found[key]], flush=True)
    return found


# -- tuning -----------------------------------------------------------------------------------------------------------


def settings(config: dict[str, Any]) -> list[tuple[str, float, float]]:
    found = [(TUNED, 2.0**power, period) for power in config["powers"] for period in config["periods"]]
    if soap([nn.Parameter(torch.zeros(1))], 1e-3) is not None:
        found += [(SOAP, rate, 1.0) for rate in config["soap_rates"]]
    return found


def tried(job: tuple[str, tuple[str, float, float]], config: dict[str, Any]) -> Figures:
    """One setting on one data set: its losses when seconds are over, and after the last mark of updates."""
    data, (arm, rate, period) = job
    setting = {"rate": rate, "period": period}
    found = course(arm, data, images_of(data, config["train"], config["seed"]), config, {arm: setting})
    ends = {"loss": found["at_seconds"][-1], "loss_per_update": found["at_updates"][-1]}
    return {"arm": arm, **setting, **{key: value if value == value else inf for key, value in ends.items()}}


def tuning(experiment: Experiment) -> Figures:
    """Every setting, and the best of each arm: Adam's by seconds and by updates."""
    config = experiment.config | {"seed": experiment.config["tuning_seed"]}
    jobs = [(data, setting) for data in TITLES for setting in settings(config)]
    results = in_processes(partial(tried, config=config), jobs, experiment.smoke)
    found: Figures = {}
    for data in TITLES:
        rows = [row for (name, _), row in zip(jobs, results, strict=True) if name == data]
        adam, others = ([row for row in rows if row["arm"] == arm] for arm in (TUNED, SOAP))
        best = {TUNED: min(adam, key=lambda row: row["loss"])}
        best[PER_UPDATE] = min(adam, key=lambda row: row["loss_per_update"])
        if others:
            best[SOAP] = min(others, key=lambda row: row["loss"])
        found[data] = {"best": best, "tried": rows}
    return found


# -- the comparison ---------------------------------------------------------------------------------------------------


def one_seed(experiment: Experiment) -> tuple[Figures, Checks]:
    config, found, held = experiment.config, {}, {}
    for data, title in TITLES.items():
        x, tuned = images_of(data, config["train"], config["seed"]), config["tuned"][data]["best"]
        arms = [arm for arm in STYLE if arm != SOAP or arm in tuned]
        found[data] = {arm: course(arm, data, x, config, tuned) for arm in arms}
        held |= {f"{title}: {name}": value for name, value in claims(found[data], config).items()}
        if data == "faces":
            held[f"{title}: Adam at 1e-3 does not end below its first loss"] = not (
                found[data][DEFAULT]["at_seconds"][-1] < found[data][DEFAULT]["at_updates"][0]
            )
    return found, held


def claims(found: Figures, config: dict[str, Any]) -> Checks:
    """Of one seed and data set."""
    end = {arm: each["at_seconds"][-1] for arm, each in found.items() if each["at_seconds"]}
    after = {arm: each["at_updates"][-1] for arm, each in found.items() if each["at_updates"]}
    count, seconds = config["updates"][-1], config["seconds"]
    held: Checks = {}
    for arm in ("KFAC", "KFRA"):
        held[f"{arm} is below Adam after {count} updates, those that Adam was tuned for"] = (
            after[arm] < after[PER_UPDATE]
        )
        held[f"{arm} is below tuned Adam after {seconds} seconds"] = end[arm] < end[TUNED]
        if SOAP in end:
            held[f"{arm} is below tuned SOAP after {seconds} seconds"] = end[arm] < end[SOAP]
    held[f"KFRA is below KFAC after {count} updates"] = after["KFRA"] < after["KFAC"]
    held[f"KFRA is below KFAC after {seconds} seconds"] = end["KFRA"] < end["KFAC"]
    return held


def tables(seeds: list[Figures], config: dict[str, Any]) -> Figures:
    """Rows for the README, by data set and arm."""
    missing = "not installed" + " |" * (len(config["shown_shares"]) + len(config["shown_updates"]))
    return {
        data: {
            arm: cells([seed[data][arm] for seed in seeds], config) if arm in seeds[0][data] else missing
            for arm in STYLE
        }
        for data in TITLES
    }


def order(seeds: list[Figures]) -> Figures:
    """Arms by their median loss when the seconds are over, the lowest first."""
    found: Figures = {}
    for data in TITLES:
        arms = [arm for arm in seeds[0][data] if arm != PER_UPDATE]
        ends = {arm: medians([seed[data][arm] for seed in seeds], "at_seconds")[-1] for arm in arms}
        found[data] = ", ".join(f"{arm} {ends[arm]:.4g}" for arm in sorted(arms, key=lambda arm: ends[arm]))
    return found


def picture(seeds: list[Figures], config: dict[str, Any]) -> Figure:
    """Medians over seeds: losses per update above, per second below."""
    figure, axes = plt.subplots(2, 3, figsize=(13, 7.5))
    times = [config["seconds"] * k / config["marks"] for k in range(1, config["marks"] + 1)]
    for column, (data, title) in enumerate(TITLES.items()):
        for row, (key, places) in enumerate((("at_updates", config["updates"]), ("at_seconds", times))):
            axis = axes[row, column]
            for arm, style in STYLE.items():
                if arm in seeds[0][data] and seeds[0][data][arm][key]:
                    axis.plot(places, medians([seed[data][arm] for seed in seeds], key), label=arm, **style)
            axis.set_yscale("log")
            start = seeds[0][data]["KFAC"]["at_updates"][0]
            axis.set_ylim(top=1.1 * start)
            axis.set(title=title, xlabel=("updates", "processor seconds")[row])
            axis.grid(alpha=0.3, which="both")
    for axis in axes[:, 0]:
        axis.set_ylabel("training loss")
    handles = {name: line for axis in axes[:, 0] for line, name in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend([handles[arm] for arm in STYLE if arm in handles], [arm for arm in STYLE if arm in handles],
                  loc="outside upper center", ncols=5)  # fmt: skip
    return figure


def main(experiment: Experiment) -> None:
    torch.set_num_threads(1)
    config = experiment.config
    tuned = tuning(experiment)
    ours, held = replace(experiment, config=config | {"tuned": tuned}).over_seeds(one_seed)
    seeds = list(ours["by_seed"].values())
    experiment.save(picture(seeds, config))
    experiment.write(
        {
            "lowest_first": order(seeds),
            "table": tables(seeds, config),
            "soap": "pytorch-optimizer" if SOAP in tuned["mnist"]["best"] else "not installed",
            "tuning": tuned,
            **ours,
        },
        SOURCE,
        held,
        reduced=f"hidden layers {config['hidden']} and back, {config['train']:,} images of each data set, batches of "
        f"{config['batch']}, {config['seconds']} processor seconds a run on one thread of a CPU, a coarser grid",
        notes="losses are those of a fixed set of training images: cross-entropy, for FACES the square error, summed "
        "over pixels; tanh is assumed, as the source names no activation",
    )


if __name__ == "__main__":
    main(Experiment.of(__file__))
