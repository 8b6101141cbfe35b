"""C33: five data sets, one after the other, by one convolutional network with a head for each of them.

MNIST, notMNIST, Fashion-MNIST, SVHN and CIFAR10, all as images [3, 32, 32]: small ones have a border of zeros, grey
ones the same values in three channels. Strengths and rates are chosen by validation images on a seed of its own; test
images are reported on the others. The two ends: the same network without a penalty, and on all data sets at once.
"""

from __future__ import annotations

import sys
from functools import cache, partial
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
from common import COLOURS, Checks, Experiment, Figures, colour_images, idx_images
from sequence import WITHOUT, Batches, Split, accuracy, course, falling, last, learner, outcome

SETS = {"mnist": "MNIST", "notmnist": "notMNIST", "fashion-mnist": "Fashion", "svhn": "SVHN", "cifar10": "CIFAR10"}
METHODS = ("online", "non-online", "EWC")
STYLE: dict[str, dict[str, Any]] = {
    "online, Kronecker": {"color": COLOURS["laplace"]},
    "online, diagonal": {"color": COLOURS["laplace"], "linestyle": "--"},
    "non-online, Kronecker": {"color": COLOURS["exact"]},
    "non-online, diagonal": {"color": COLOURS["exact"], "linestyle": "--"},
    "EWC, Kronecker": {"color": COLOURS["sampled"]},
    "EWC, diagonal": {"color": COLOURS["sampled"], "linestyle": "--"},
    "SI": {"color": COLOURS["other"]},
    "no penalty": {"color": COLOURS["data"], "linestyle": "-."},
}
JOINT = "all at once"
TUNED = tuple(arm for arm in STYLE if not arm.startswith("non-online"))
"""The non-online arms have the strength and rate of the online ones."""
SPREAD = 1.5
"""Points within which the three Kronecker arms are taken to be alike."""
SOURCE = {
    "claim": "with a head per task, Kronecker factors are above a diagonal with each of the three methods, and all are "
    "above SI; the three methods differ little",
    "average accuracy": {
        "SI": 77.21,
        "EWC, diagonal": 82.96,
        "EWC, Kronecker": 85.32,
        "online, diagonal": 82.71,
        "online, Kronecker": 85.40,
        "non-online, diagonal": 82.55,
        "non-online, Kronecker": 85.35,
    },
    "note": "table 5.3; about 50,000 images a task, 20 epochs of Adam, or momentum until validation stands still",
}


# -- data and networks -------------------------------------------------------------------------------------------------


@cache
def images_of(name: str) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Images to train on, to choose by and to report, [N, 3, 32, 32]; the same for every seed."""
    if name in ("svhn", "cifar10"):
        (x, y), test = colour_images(name), colour_images(name, "test")
        held = len(x) - 1000
        return (x[:held], y[:held]), (x[held:], y[held:]), test

    def coloured(x: Tensor) -> Tensor:
        return nn.functional.pad(x, (2, 2, 2, 2)).expand(-1, 3, -1, -1)

    if name == "notmnist":  # one file, ordered by nothing that is known
        x, y = idx_images(name, "test")
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        parts = order[:7000], order[7000:8000], order[8000:]
        train, validation, test = ((coloured(x[part]), y[part]) for part in parts)
        return train, validation, test
    (x, y), (u, v) = idx_images(name), idx_images(name, "test")
    return (coloured(x[:50000]), y[:50000]), (coloured(x[50000:51000]), y[50000:51000]), (coloured(u), v)


def data_sets(config: dict[str, Any]) -> list[Split]:
    """The images of a seed: so many of each set to train on."""
    generator = torch.Generator().manual_seed(config["seed"])
    found = []
    for name in SETS:
        (x, y), validation, test = images_of(name)
        chosen = torch.randperm(len(x), generator=generator)[: config["train"]]
        held = ((part[: config[what]] for part in each) for what, each in (("validation", validation), ("test", test)))
        found.append(Split((x[chosen].contiguous(), y[chosen]), *(tuple(each) for each in held)))
    return found


def networks(config: dict[str, Any]) -> tuple[nn.Sequential, list[nn.Module]]:
    """Two convolutions of 5 x 5 and a hidden layer that tasks share, and a head for each."""
    torch.manual_seed(config["seed"])
    first, second, hidden = config["widths"]
    shared = nn.Sequential(
        *(nn.Conv2d(3, first, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(first, second, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(25 * second, hidden), nn.ReLU()),
    )
    return shared, [nn.Linear(hidden, 10) for _ in SETS]


# -- runs --------------------------------------------------------------------------------------------------------------


def sequence(job: tuple[str, float, float, int], config: dict[str, Any]) -> Figures:
    """Accuracies of one arm at one strength and rate on one seed."""
    arm, strength, rate, seed = job
    config = config | {"seed": seed}
    shared, heads = networks(config)
    sampled = {} if arm in (*WITHOUT, "SI") else {"estimator": "mc"}
    continual = learner(arm, strength, shared, config, heads=heads, **sampled)
    found: Figures = course(
        continual,
        lambda k: nn.Sequential(shared, heads[k]),
        data_sets(config),
        config,
        partial(torch.optim.Adam, lr=rate),
        falling(config["epochs"]),
    )
    found |= {"strength": strength, "rate": rate}
    found |= {"mean": last(found["test"]), "chosen_by": last(found["validation"])}
    print(
        seed, arm, strength, rate, [round(each, 1) for each in found["test"][-1]], round(found["mean"], 2), flush=True
    )
    return found


def together(rate: float, seed: int, config: dict[str, Any]) -> Figures:
    """Test accuracies of a network that is trained on all sets at once, a batch of each in turn."""
    config = config | {"seed": seed}
    shared, heads = networks(config)
    sets = data_sets(config)
    generator = torch.Generator().manual_seed(seed)
    batches = [Batches(*each.train, config["batch"], generator) for each in sets]
    optimiser = torch.optim.Adam([*shared.parameters(), *(w for head in heads for w in head.parameters())], lr=rate)
    schedule = falling(config["epochs"])(optimiser)
    for _ in range(config["epochs"]):
        for turn in zip(*batches, strict=True):
            for head, (x, y) in zip(heads, turn, strict=True):
                optimiser.zero_grad()
                nn.functional.cross_entropy(head(shared(x)), y).backward()
                optimiser.step()
        schedule.step()
    test = [accuracy(nn.Sequential(shared, head), *each.test) for head, each in zip(heads, sets, strict=True)]
    return {"test": [test], "mean": fmean(test)}


def one(job: tuple[str, float, float, int], config: dict[str, Any]) -> Figures:
    return together(*job[2:], config) if job[0] == JOINT else sequence(job, config)


def tried_of(arm: str, config: dict[str, Any]) -> list[tuple[float, float]]:
    """Strengths and rates."""
    kind = arm.split(", ")[-1]
    strengths = [1.0] if arm in WITHOUT else config["strengths"][kind]
    return [(strength, rate) for strength in strengths for rate in config["rates"][kind]]


# -- what is written ---------------------------------------------------------------------------------------------------


def claims(found: Figures) -> Checks:
    mean = {arm: found[arm]["mean"] for arm in STYLE}
    ours = mean["online, Kronecker"]
    kronecker = [mean[f"{method}, Kronecker"] for method in METHODS]
    held = {
        f"{method}: Kronecker factors are above a diagonal": mean[f"{method}, Kronecker"] > mean[f"{method}, diagonal"]
        for method in METHODS
    }
    held["online, Kronecker is above SI"] = ours > mean["SI"]
    held["online, Kronecker is above no penalty"] = ours > mean["no penalty"]
    held[f"the three Kronecker arms are within {SPREAD} points of each other"] = (
        max(kronecker) - min(kronecker) < SPREAD
    )
    return held


def picture(seeds: list[Figures]) -> Figure:
    """Each set from its own task on, as in figure 5.10, and the averages in the end beside the source's."""
    figure, axes = plt.subplots(2, 3, figsize=(14, 7.6))
    names = list(SETS.values())
    for k, axis in enumerate(axes.flat[:5]):
        for arm in ("online, Kronecker", "online, diagonal", "SI", "no penalty"):
            curves = torch.tensor([[row[k] for row in seed[arm]["test"][k:]] for seed in seeds])
            axis.plot(range(k, 5), curves.mean(0), marker="o", ms=3, label=arm, **STYLE[arm])
            axis.fill_between(range(k, 5), curves.amin(0), curves.amax(0), color=STYLE[arm]["color"], alpha=0.12, lw=0)
        whole = fmean(seed[JOINT]["test"][0][k] for seed in seeds)
        axis.axhline(whole, color="black", linestyle=":", lw=1, label=JOINT)
        axis.set(title=names[k], xticks=range(5), xlim=(-0.2, 4.2), ylabel="test accuracy (%)")
        axis.set_xticklabels(names)
        axis.set_xlabel("after the task")
        axis.grid(alpha=0.3)
    axes.flat[0].legend(loc="lower left")
    axis, arms = axes.flat[5], [*STYLE, JOINT]
    for place, arm in enumerate(reversed(arms)):
        values = [seed[arm]["mean"] for seed in seeds]
        axis.plot(values, [place] * len(values), "o", ms=4, color=COLOURS["laplace"], label="ours, five seeds")
        if arm in SOURCE["average accuracy"]:
            axis.plot(SOURCE["average accuracy"][arm], place, "x", color="black", label="source")
    axis.set(yticks=range(len(arms)), xlabel="average test accuracy in the end (%)", title="All five sets")
    axis.set_yticklabels(list(reversed(arms)))
    axis.grid(alpha=0.3)
    shown = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    axis.legend(shown.values(), shown.keys())
    return figure


def main(experiment: Experiment) -> None:
    torch.set_num_threads(1)
    config = experiment.config
    grid = [(arm, *each, config["tuning_seed"]) for arm in TUNED for each in tried_of(arm, config)]
    rows = in_processes(partial(sequence, config=config), grid, experiment.smoke)
    tried = {arm: [row for job, row in zip(grid, rows, strict=True) if job[0] == arm] for arm in TUNED}
    chosen = {arm: max(each, key=lambda row: row["chosen_by"]) for arm, each in tried.items()}
    best = {arm: {key: row[key] for key in ("strength", "rate")} for arm, row in chosen.items()}
    best |= {f"non-{arm}": each for arm, each in best.items() if arm.startswith("online")}
    best[JOINT] = {"strength": 1.0, "rate": config["rates"][JOINT][0]}
    jobs = [(arm, *best[arm].values(), seed) for arm in [*STYLE, JOINT] for seed in config["seeds"]]
    found = in_processes(partial(one, config=config), jobs, experiment.smoke)
    by_seed: dict[int, Figures] = {seed: {} for seed in config["seeds"]}
    for (arm, _, _, seed), each in zip(jobs, found, strict=True):
        by_seed[seed][arm] = each | {"end": dict(zip(SETS, each["test"][-1], strict=True))}
    seeds = list(by_seed.values())
    checks = [claims(each) for each in seeds]
    experiment.save(picture(seeds))
    experiment.write(
        outcome(best, tried, by_seed),
        SOURCE,
        {name: [each[name] for each in checks] for name in checks[0]},
        reduced=f"{config['train']:,} images of each set of about 50,000, {config['epochs']} epochs; notMNIST, SVHN "
        "and CIFAR10 are subsets; strengths and rates chosen on one seed, those of the non-online arms not at all",
        notes="the picture shows the mean over seeds, and from the smallest to the largest",
    )


if __name__ == "__main__":
    main(Experiment.of(__file__))
