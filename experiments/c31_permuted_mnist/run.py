"""C31: permuted MNIST, one task after another: online Laplace with Kronecker factors, against EWC, SI and the two ends.

Every task is the same digits with the pixels in an order of its own; one network of ten outputs learns all of them.
Strengths and rates are chosen by the validation images of the first tasks, on a seed of its own. What is reported are
test images on the other seeds. At the end the network of the Kronecker posterior is asked for its probabilities of the
first task: those of its weights, and those of the linearised posterior.
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
from arms import in_processes
from common import COLOURS, Checks, Experiment, Figures, idx_images
from sequence import WITHOUT, Batches, Split, accuracy, course, falling, last, learner, outcome

from lapwing.metrics import calibration_error, nll
from lapwing.training import Continual

OURS, MERGED, DIAGONAL = "online, Kronecker", "online, factors added", "online, diagonal"
STYLE: dict[str, dict[str, Any]] = {
    OURS: {"color": COLOURS["laplace"]},
    MERGED: {"color": COLOURS["laplace"], "linestyle": ":"},
    DIAGONAL: {"color": COLOURS["laplace"], "linestyle": "--"},
    "EWC, Kronecker": {"color": COLOURS["sampled"]},
    "EWC, diagonal": {"color": COLOURS["sampled"], "linestyle": "--"},
    "SI": {"color": COLOURS["other"]},
    "no penalty": {"color": COLOURS["data"], "linestyle": "-."},
}
JOINT = "all at once"
LAPLACE = (OURS, DIAGONAL)
"""Arms whose posterior is asked for probabilities."""
SOURCE = {
    "claim": "after 50 tasks online Laplace with Kronecker factors is above 90 %, near the network trained on all "
    "tasks together, and above diagonal curvature, EWC (diagonal and Kronecker) and SI; its best multiplier is 3",
    "note": "figures 5.7 and 5.8, without numbers in the text; 20 epochs of 60,000 images a task",
}


@cache
def digits(seed: int, train: int, validation: int, test: int) -> Split:
    images, labels = idx_images("mnist", "train")
    chosen = torch.randperm(50000, generator=torch.Generator().manual_seed(seed))[:train]
    others, held = slice(50000, 50000 + validation), idx_images("mnist", "test", test)
    flat = images.flatten(1)
    return Split((flat[chosen], labels[chosen]), (flat[others], labels[others]), (held[0].flatten(1), held[1]))


def permuted(config: dict[str, Any]) -> list[Split]:
    """A task for every order of the pixels; the first is as they are."""
    whole = digits(config["seed"], config["train"], config["validation"], config["test"])
    generator = torch.Generator().manual_seed(1000 + config["seed"])
    orders = [torch.arange(784), *(torch.randperm(784, generator=generator) for _ in range(config["tasks"] - 1))]

    def seen(part: tuple[Tensor, Tensor], order: Tensor) -> tuple[Tensor, Tensor]:
        return part[0][:, order], part[1]

    return [Split(seen(whole.train, o), seen(whole.validation, o), seen(whole.test, o)) for o in orders]


def network(config: dict[str, Any]) -> nn.Sequential:
    torch.manual_seed(config["seed"])
    width = config["hidden"]
    return nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def sequence(job: tuple[str, float, float], config: dict[str, Any], calibrated: bool = False) -> Figures:
    """Accuracies of one arm at one strength and rate, and what its posterior says of the first task."""
    arm, strength, rate = job
    tasks, model = permuted(config), network(config)
    continual = learner(arm, strength, model, config)
    adam, schedule = partial(torch.optim.Adam, lr=rate), falling(config["epochs"])
    found: Figures = course(continual, lambda _: model, tasks, config, adam, schedule)
    found |= {"strength": strength, "rate": rate}
    found |= {"mean": last(found["test"]), "chosen_by": last(found["validation"])}
    found |= {"first_task_in_the_end": found["test"][-1][0], "last_task_in_the_end": found["test"][-1][-1]}
    if calibrated:
        found |= calibration(continual, tasks, config)
    print(config["seed"], arm, strength, rate, [round(fmean(row), 2) for row in found["test"]], flush=True)
    return found


def calibration(continual: Continual, tasks: list[Split], config: dict[str, Any]) -> Figures:
    """The first task after the last one: NLL and ECE of the weights alone, and of the linearised posterior.

    With the base precision of training, and with the one of a grid that is best for the last task's validation images:
    those of earlier tasks are not there any more when tasks come one after the other.
    """

    def scored(part: tuple[Tensor, Tensor], **options: Any) -> Figures:
        x, y = part
        p = torch.cat([as_tensor(continual.predict(each, **options)) for each in x.split(500)])
        return {"nll": nll(p, y), "ece": calibration_error(p, y)}

    last_one = tasks[-1].validation
    grid = {each: scored(last_one, prior_precision=each)["nll"] for each in config["prior_precisions"]}
    chosen = min(grid, key=lambda each: grid[each])
    x, y = tasks[0].test
    some = x[: config["calibrated_on"]], y[: config["calibrated_on"]]
    first = {
        "map": scored(some, pred="map"),
        "laplace": scored(some),
        "laplace_chosen": scored(some, prior_precision=chosen),
    }
    return {"first_task": first, "prior_precision_of_predictions": chosen}


def as_tensor(found: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """Classes have probabilities alone."""
    assert isinstance(found, Tensor)
    return found


def together(config: dict[str, Any], rate: float) -> float:
    """Mean test accuracy over the tasks of a network that is trained on all of them at once."""
    tasks, model = permuted(config), network(config)
    x, y = (torch.cat(each) for each in zip(*(task.train for task in tasks), strict=True))
    batches = Batches(x, y, config["batch"], torch.Generator().manual_seed(config["seed"]))
    adam = torch.optim.Adam(model.parameters(), lr=rate)
    schedule = falling(config["epochs"])(adam)
    for _ in range(config["epochs"]):
        for inputs, targets in batches:
            adam.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            adam.step()
        schedule.step()
    return fmean(accuracy(model, *task.test) for task in tasks)


def one(job: tuple[str, float, float, int], config: dict[str, Any]) -> Any:
    arm, strength, rate, seed = job
    config = config | {"seed": seed}
    return together(config, rate) if arm == JOINT else sequence((arm, strength, rate), config, arm in LAPLACE)


def strengths(arm: str, config: dict[str, Any]) -> list[float]:
    return [1.0] if arm in WITHOUT else config["strengths"][arm.split(", ")[-1]]


def claims(found: Figures) -> Checks:
    mean = {arm: found[arm]["mean"] for arm in STYLE}
    held = {
        f"{OURS} is above {arm} after the last task": mean[OURS] > mean[arm]
        for arm in STYLE
        if arm not in (OURS, MERGED)
    }
    held[f"{OURS} is above 90 % after the last task"] = mean[OURS] > 90
    held[f"{OURS} is within 3 points of a network trained on all tasks at once"] = mean[OURS] > found[JOINT] - 3
    held["EWC with Kronecker factors is above EWC with a diagonal"] = mean["EWC, Kronecker"] > mean["EWC, diagonal"]
    first = found[OURS]["first_task"]
    held["on the first task, the NLL of the linearised posterior is below that of the weights alone"] = (
        first["laplace_chosen"]["nll"] < first["map"]["nll"]
    )
    return held


def picture(seeds: list[Figures], tried: dict[str, list[Figures]]) -> Figure:
    """Mean accuracy against tasks, as in figure 5.7; first and last task against the strength, as in 5.8."""
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.6))
    for arm, style in STYLE.items():
        curves = torch.tensor([[fmean(row) for row in seed[arm]["test"]] for seed in seeds])
        count = torch.arange(1, curves.shape[1] + 1)
        axes[0].plot(count, curves.mean(0), label=arm, **style)
        axes[0].fill_between(count, curves.amin(0), curves.amax(0), color=style["color"], alpha=0.12, lw=0)
    axes[0].axhline(fmean(seed[JOINT] for seed in seeds), color="black", linestyle=":", lw=1, label=JOINT)
    axes[0].set(xlabel="tasks seen", ylabel="mean test accuracy over them (%)", title="At each method's best strength")
    axes[0].legend(loc="lower left", bbox_to_anchor=(0.31, 0.3), fontsize=7.5, ncols=2)
    for axis, arm in zip(axes[1:], LAPLACE, strict=True):
        rows = [row for row in tried[arm] if row["rate"] == seeds[0][arm]["rate"]]
        at = [row["strength"] for row in rows]
        for name, colour in (("first task", "sampled"), ("last task", "exact")):
            key = f"{name.replace(' ', '_')}_in_the_end"
            if key in rows[0]:
                axis.plot(at, [row[key] for row in rows], "o-", label=name, color=COLOURS[colour])
        axis.plot(at, [row["mean"] for row in rows], "o-", label="mean", color=COLOURS["map"])
        axis.set(xscale="log", xlabel="multiplier of the curvature", title=arm, ylabel="test accuracy in the end (%)")
        axis.set_xticks(at, [f"{each:g}" for each in at])
        axis.minorticks_off()
        axis.legend()
    low = min(axis.get_ylim()[0] for axis in axes[1:])
    for axis in axes[1:]:
        axis.set_ylim(low - 0.5, 100)
        axis.grid(alpha=0.3)
    axes[0].grid(alpha=0.3)
    return figure


def main(experiment: Experiment) -> None:
    torch.set_num_threads(1)
    config = experiment.config
    by_cost = [arm for arm in STYLE if "Kronecker" in arm] + [arm for arm in STYLE if "Kronecker" not in arm]
    grid = [(arm, strength, rate) for arm in by_cost for strength in strengths(arm, config) for rate in config["rates"]]
    tuning = config | {"seed": config["tuning_seed"], "tasks": config["tuning_tasks"]}
    rows = in_processes(partial(sequence, config=tuning), grid, experiment.smoke)
    tried = {arm: [row for job, row in zip(grid, rows, strict=True) if job[0] == arm] for arm in STYLE}
    chosen = {arm: max(each, key=lambda row: row["chosen_by"]) for arm, each in tried.items()}
    best = {arm: {key: row[key] for key in ("strength", "rate")} for arm, row in chosen.items()}
    arms = [(arm, best[arm]["strength"], best[arm]["rate"]) for arm in by_cost]
    jobs = [(*arm, seed) for arm in [*arms, (JOINT, 1.0, config["rates"][0])] for seed in config["seeds"]]
    found = in_processes(partial(one, config=config), jobs, experiment.smoke)
    by_seed: dict[int, Figures] = {seed: {} for seed in config["seeds"]}
    for (arm, _, _, seed), each in zip(jobs, found, strict=True):
        by_seed[seed][arm] = each
    seeds = list(by_seed.values())
    checks = [claims(each) for each in seeds]
    experiment.save(picture(seeds, tried))
    experiment.write(
        outcome(best, tried, by_seed),
        SOURCE,
        {name: [each[name] for each in checks] for name in checks[0]},
        reduced=f"{config['tasks']} tasks of 50, {config['train']:,} images of 60,000, {config['epochs']} epochs of "
        f"20, Adam alone; strengths and rates chosen on one seed after {config['tuning_tasks']} tasks",
        notes="the second and third picture are of the seed that strengths were chosen on",
    )


if __name__ == "__main__":
    main(Experiment.of(__file__))
