"""E15: Levenberg-Marquardt on small least-squares problems, beside L-BFGS and a tuned Adam.

Each method starts from the same weights, in float64 on one thread, and minimises the same loss on all the data. What
is counted are iterations and processor seconds until the loss is within 1e-6 of the way from its start to the lowest
that any method found. Adam has the best of several rates, by its final loss; its time is that of this rate alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from math import inf, log, pi
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from problems import PROBLEMS, Problem

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import COLOURS, Checks, Experiment, Figures

from lapwing.likelihoods import Gaussian
from lapwing.training import GaussNewton

METHODS = {"lm": ("Levenberg-Marquardt", "laplace"), "lbfgs": ("L-BFGS", "exact"), "adam": ("Adam, tuned", "sampled")}
TITLES = {
    "rosenbrock": "Rosenbrock's valley",
    "regression": "1-50-1 regression",
    "poisson": "Poisson's equation",
}
CLOSE = 1e-6
Trace = list[tuple[float, float]]
"""Processor seconds and loss after every iteration, from the start on."""


def loss_of(problem: Problem) -> Tensor:
    squares = (problem.model(problem.x) - problem.y).square().mean() / 2
    weights = torch.stack([each.square().sum() for each in problem.model.parameters()]).sum()
    return squares + problem.decay / 2 * weights


def value_of(problem: Problem) -> float:
    with torch.no_grad():
        return float(loss_of(problem))


def lm(problem: Problem, config: dict[str, Any]) -> Trace:
    """Every option as it comes."""
    optimiser = GaussNewton.levenberg_marquardt(problem.model, Gaussian(), weight_decay=problem.decay)
    trace, began = [(0.0, value_of(problem))], time.process_time()
    for _ in range(config["lm_iterations"]):
        step = optimiser.step(problem.x, problem.y)
        trace.append((time.process_time() - began, step.after - log(2 * pi) / 2 if step.accepted else trace[-1][1]))
        if not step.accepted:
            break
    return trace


def of_torch(
    problem: Problem, optimiser: torch.optim.Optimizer, iterations: int, seconds: float, rest: float = 0.0
) -> Trace:
    """Until the iterations or seconds are over, or a gradient is exactly as small as `rest`."""
    trace, began = [(0.0, value_of(problem))], time.process_time()

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = loss_of(problem)
        loss.backward()
        return loss

    for _ in range(iterations):
        before = float(torch.as_tensor(optimiser.step(closure)).detach())  # type: ignore[arg-type]
        now = time.process_time() - began
        trace[-1] = trace[-1][0], before
        trace.append((now, before))
        largest = max(float(each.grad.abs().max()) for each in problem.model.parameters() if each.grad is not None)
        if now > seconds or largest <= rest:
            break
    trace[-1] = trace[-1][0], value_of(problem)
    return trace


def lbfgs(problem: Problem, config: dict[str, Any]) -> Trace:
    optimiser = torch.optim.LBFGS(
        problem.model.parameters(),
        max_iter=1,
        max_eval=25,
        history_size=100,
        tolerance_grad=1e-14,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )
    return of_torch(problem, optimiser, config["lbfgs_iterations"], config["seconds"], 1e-14)


def adam(problem: Callable[[], Problem], config: dict[str, Any]) -> tuple[float, Trace]:
    """The rate with the lowest final loss, and its trace."""
    found = []
    for rate in config["rates"]:
        here = problem()
        optimiser = torch.optim.Adam(here.model.parameters(), rate)
        found.append((rate, of_torch(here, optimiser, config["adam_iterations"], config["seconds"])))
    return min(found, key=lambda each: each[1][-1][1])


def reached(trace: Trace, goal: float) -> dict[str, Any]:
    """Iterations and seconds until the loss is at or below the goal; infinite where it never is."""
    for number, (seconds, loss) in enumerate(trace):
        if loss <= goal:
            return {"iterations": number, "seconds": seconds, "reached": True}
    return {"iterations": inf, "seconds": inf, "reached": False}


def solved(name: str, config: dict[str, Any]) -> tuple[Figures, dict[str, Trace]]:
    def problem() -> Problem:
        return PROBLEMS[name](config["seed"], config[name])

    rate, by_adam = adam(problem, config)
    traces = {"lm": lm(problem(), config), "lbfgs": lbfgs(problem(), config), "adam": by_adam}
    first = traces["lm"][0][1]
    lowest = min(loss for trace in traces.values() for _, loss in trace)
    goal = lowest + CLOSE * (first - lowest)
    figures: Figures = {"weights": sum(each.numel() for each in problem().model.parameters())}
    figures |= {"rate_of_adam": rate, "first": first, "lowest": lowest}
    for method, trace in traces.items():
        count = reached(trace, goal)
        figures[method] = count | {"final": trace[-1][1], "share_left": (trace[-1][1] - lowest) / (first - lowest)}
    return figures, traces


def checks(ours: Figures) -> Checks:
    held = {}
    for name, title in TITLES.items():
        found, lm_found = ours[name], ours[name]["lm"]
        held[f"{title}: Levenberg-Marquardt comes within 1e-6 of the lowest loss"] = lm_found["reached"]
        fewer = all(lm_found["iterations"] < found[other]["iterations"] for other in ("lbfgs", "adam"))
        held[f"{title}: in fewer iterations than L-BFGS and Adam"] = lm_found["reached"] and fewer
        for other, label in (("adam", "Adam"), ("lbfgs", "L-BFGS")):
            sooner = lm_found["seconds"] < found[other]["seconds"]
            held[f"{title}: in fewer seconds than {label}"] = lm_found["reached"] and sooner
    return held


def one_seed(experiment: Experiment) -> tuple[Figures, Checks]:
    config = experiment.config
    ours, traces = {}, {}
    for name in PROBLEMS:
        ours[name], traces[name] = solved(name, config)
    if config["seed"] == config["seeds"][0]:
        draw(experiment, ours, traces)
    return ours, checks(ours)


def draw(experiment: Experiment, ours: Figures, traces: dict[str, dict[str, Trace]]) -> None:
    figure, axes = plt.subplots(2, len(traces), figsize=(11, 6.2), sharey="col")
    for column, (name, by_method) in enumerate(traces.items()):
        first, lowest = ours[name]["first"], ours[name]["lowest"]
        for method, trace in by_method.items():
            label, colour = METHODS[method]
            left = [max((loss - lowest) / (first - lowest), 1e-9) for _, loss in trace]
            axes[0, column].plot(range(1, len(trace) + 1), left, color=COLOURS[colour], label=label)
            axes[1, column].plot([1e-3 + seconds for seconds, _ in trace], left, color=COLOURS[colour], label=label)
        for row, label in enumerate(("iterations", "processor seconds")):
            axes[row, column].set(xscale="log", yscale="log", xlabel=label)
            axes[row, column].axhline(CLOSE, color=COLOURS["data"], linewidth=0.8, linestyle=":")
            axes[row, column].grid(alpha=0.3)
        axes[0, column].set_title(f"{TITLES[name]} ({ours[name]['weights']} weights)")
    for row in axes:
        row[0].set_ylabel("share of the loss that is left")
    axes[0, 0].legend(loc="lower left")
    experiment.save(figure)


def said(values: list[float], form: str) -> str:
    """Median, smallest and largest of the seeds on which the goal was reached."""
    if not values:
        return "-"
    middle, low, high = (format(each, form) for each in (median(values), min(values), max(values)))
    return f"{middle} ({low} to {high})"


def table(by_seed: dict[str, Any]) -> Figures:
    rows: Figures = {}
    for name in PROBLEMS:
        rows[name] = {"weights": next(iter(by_seed.values()))[name]["weights"]}
        for method in METHODS:
            found = [each[name][method] for each in by_seed.values()]
            there = [each for each in found if each["reached"]]
            rows[name][method] = {
                "reached": f"{len(there)} of {len(found)}",
                "iterations": said([each["iterations"] for each in there], ".0f"),
                "seconds": said([each["seconds"] for each in there], ".3g"),
                "left": said([each["share_left"] for each in found], ".1g"),
            }
    return rows


def main(experiment: Experiment) -> None:
    ours, held = experiment.over_seeds(one_seed)
    experiment.write({"table": table(ours["by_seed"]), "by_seed": ours["by_seed"]}, {}, held)


if __name__ == "__main__":
    main(Experiment.of(__file__))
