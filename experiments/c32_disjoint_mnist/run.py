"""C32: disjoint MNIST: the digits 0 to 4, then 5 to 9, by one network of ten outputs.

With two tasks online Laplace, EWC and the non-online one are the same; what differs is the curvature. Each task is
taken to its mode by L-BFGS on all images, so that no rate has to go with the strength. Every method has a wide grid of
these; the best is chosen by the validation images of both tasks, on seeds of its own. Test images are reported on the
others.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "c25_autoencoders"))
sys.path.insert(0, str(Path(__file__).parents[1] / "c31_permuted_mnist"))
from arms import in_processes
from common import COLOURS, Checks, Experiment, Figures, idx_images, plain, spread
from sequence import Split, course, last, learner

KRONECKER, DIAGONAL, SI = "online, Kronecker", "online, diagonal", "SI"
STYLE = {KRONECKER: COLOURS["laplace"], DIAGONAL: COLOURS["sampled"], SI: COLOURS["other"]}
SOURCE = {
    "claim": "Kronecker factors are a little better than a diagonal and need a smaller multiplier; both are better "
    "than SI, each at its best strength",
    "note": "figure 5.9, without numbers in the text; ten runs; Nesterov's gradient, rates that fall with the strength",
}


def halves(config: dict[str, Any]) -> list[Split]:
    """The lower five digits, then the upper five."""
    images, labels = idx_images("mnist", "train")
    chosen = torch.randperm(50000, generator=torch.Generator().manual_seed(config["seed"]))[: config["train"]]
    others, held = slice(50000, 50000 + config["validation"]), idx_images("mnist", "test", config["test"])

    def part(x: Tensor, y: Tensor, upper: bool) -> tuple[Tensor, Tensor]:
        kept = (y >= 5) == upper
        return x[kept].flatten(1), y[kept]

    sets = ((images[chosen], labels[chosen]), (images[others], labels[others]), held)
    return [Split(*(part(*each, upper) for each in sets)) for upper in (False, True)]


def sequence(job: tuple[str, float, int], config: dict[str, Any]) -> Figures:
    arm, strength, seed = job
    config = config | {"seed": seed}
    torch.manual_seed(seed)
    width = config["hidden"]
    model = nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    continual = learner(arm, strength, model, config)
    found: Figures = course(
        continual,
        lambda _: model,
        halves(config),
        config,
        lambda weights: torch.optim.LBFGS(
            weights, max_iter=config["iterations"], history_size=20, line_search_fn="strong_wolfe"
        ),
    )
    print(seed, arm, strength, [round(each, 2) for each in found["test"][-1]], flush=True)
    return {
        "strength": strength,
        "mean": last(found["test"]),
        "chosen_by": last(found["validation"]),
        "test": found["test"][-1],
    }


def strengths(arm: str, config: dict[str, Any]) -> list[float]:
    return config["strengths_of_si"] if arm == SI else config["strengths"]


def claims(found: Figures) -> Checks:
    mean = {arm: found[arm]["mean"] for arm in STYLE}
    return {
        f"{KRONECKER} is above {DIAGONAL}": mean[KRONECKER] > mean[DIAGONAL],
        f"{KRONECKER} is above {SI}": mean[KRONECKER] > mean[SI],
        f"{DIAGONAL} is above {SI}": mean[DIAGONAL] > mean[SI],
        f"{KRONECKER} is well above the 50 % of one half: 70 %": mean[KRONECKER] > 70,
    }


def picture(curves: dict[str, list[list[Figures]]]) -> Figure:
    """Accuracy in the end against the strength, on the seeds that it is chosen by: their mean, and each."""
    figure, axis = plt.subplots(figsize=(7.5, 4.6))
    for arm, colour in STYLE.items():
        rows = curves[arm]
        at = [each[0]["strength"] for each in rows]
        values = torch.tensor([[run["mean"] for run in each] for each in rows])
        axis.plot(at, values.mean(1), "o-", ms=3, color=colour, label=arm)
        axis.fill_between(at, values.amin(1), values.amax(1), color=colour, alpha=0.15, lw=0)
        first = torch.tensor([[run["test"][0] for run in each] for each in rows]).mean(1)
        axis.plot(at, first, ":", color=colour, lw=1)
    axis.axhline(50, color=COLOURS["data"], lw=1, linestyle=":")
    axis.set(xscale="log", xlabel="multiplier of the curvature, c of SI", ylabel="mean test accuracy of both tasks (%)")
    axis.legend()
    axis.grid(alpha=0.3)
    return figure


def main(experiment: Experiment) -> None:
    torch.set_num_threads(1)
    config = experiment.config
    tuning = config["tuning_seeds"]
    grid = [(arm, strength, seed) for arm in STYLE for strength in strengths(arm, config) for seed in tuning]
    rows = dict(zip(grid, in_processes(partial(sequence, config=config), grid, experiment.smoke), strict=True))
    curves = {arm: [[rows[arm, s, seed] for seed in tuning] for s in strengths(arm, config)] for arm in STYLE}

    def chosen(arm: str) -> float:
        return max(curves[arm], key=lambda each: fmean(run["chosen_by"] for run in each))[0]["strength"]

    best = {arm: chosen(arm) for arm in STYLE}
    jobs = [(arm, best[arm], seed) for seed in config["seeds"] for arm in STYLE]
    found = in_processes(partial(sequence, config=config), jobs, experiment.smoke)
    by_seed: dict[int, Figures] = {seed: {} for seed in config["seeds"]}
    for (arm, _, seed), each in zip(jobs, found, strict=True):
        by_seed[seed][arm] = each
    checks = [claims(each) for each in by_seed.values()]
    held: dict[str, list[bool]] = {name: [each[name] for each in checks] for name in checks[0]}
    held["the best multiplier is smaller for Kronecker factors than for the diagonal"] = [
        best[KRONECKER] < best[DIAGONAL]
    ]
    experiment.save(picture(curves))
    experiment.write(
        {
            "best": best,
            "over_seeds": spread([plain(each) for each in by_seed.values()]),
            "by_seed": {str(seed): plain(each) for seed, each in by_seed.items()},
            "curves": {
                arm: [{"strength": each[0]["strength"], "means": [run["mean"] for run in each]} for each in found]
                for arm, found in curves.items()
            },
        },
        SOURCE,
        held,
        reduced=f"{config['train']:,} images of 60,000, {config['epochs'] * config['iterations']} iterations of L-BFGS "
        "a task, five seeds of ten",
        notes="the picture is of the seeds that strengths were chosen on; dotted: the first task alone",
    )


if __name__ == "__main__":
    main(Experiment.of(__file__))
