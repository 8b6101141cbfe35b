"""One task after another by each method: what C31, C32 and C33 share.

An arm is a method with its structure; its strength is the multiplier of the curvature (5.25), or SI's c. A run trains
on every task in its turn and asks, after each of them, how well every task seen so far is still done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import cos, pi
from statistics import fmean
from typing import Any

import torch
from common import Figures, plain, spread
from torch import Tensor, nn

from lapwing.training import Continual

KRON = {"structure": "kron", "estimator": "exact"}
ARMS: dict[str, dict[str, Any]] = {
    "online, Kronecker": {"method": "online", **KRON},
    "online, factors added": {"method": "online", "terms": "factors", **KRON},
    "online, diagonal": {"method": "online", "structure": "diag"},
    "non-online, Kronecker": {"method": "non_online", **KRON},
    "non-online, diagonal": {"method": "non_online", "structure": "diag"},
    "EWC, Kronecker": {"method": "ewc", **KRON},
    "EWC, diagonal": {"method": "ewc", "structure": "diag"},
    "SI": {"method": "si"},
    "no penalty": {"method": "sequential"},
}
WITHOUT = ("no penalty",)
"""Arms that have no strength."""


@dataclass(frozen=True, eq=False)
class Split:
    """Images and labels of a task: to train on, to choose a strength by, and to report."""

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Batches:
    """In a new order in every pass."""

    x: Tensor
    y: Tensor
    size: int
    generator: torch.Generator

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for rows in torch.randperm(len(self.x), generator=self.generator).split(self.size):
            yield self.x[rows], self.y[rows]


@torch.no_grad()
def accuracy(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> float:
    """In percent."""
    return 100 * float((torch.cat([model(part) for part in x.split(1000)]).argmax(1) == y).float().mean())


def learner(arm: str, strength: float, model: nn.Module, config: dict[str, Any], **more: Any) -> Continual:
    generator = torch.Generator().manual_seed(config["seed"])
    given = {**ARMS[arm], **more, "prior_precision": config["prior_precision"], "generator": generator}
    if arm not in WITHOUT:
        given["multiplier"] = strength
    return Continual(model, "classification", **given)


def course(
    continual: Continual,
    networks: Callable[[int], Callable[[Tensor], Tensor]],
    tasks: Sequence[Split],
    config: dict[str, Any],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
) -> dict[str, list[list[float]]]:
    """Accuracies on the tasks seen, after each task: a list for each; of the validation and of the test images."""
    generator = torch.Generator().manual_seed(config["seed"])
    found: dict[str, list[list[float]]] = {"validation": [], "test": []}
    for number, task in enumerate(tasks):
        batches = Batches(*task.train, config["batch"], generator)
        continual.learn(batches, epochs=config["epochs"], optimizer=optimizer, scheduler=scheduler)
        for part, rows in found.items():
            rows.append([accuracy(networks(k), *getattr(tasks[k], part)) for k in range(number + 1)])
    return found


def falling(epochs: int) -> Callable[[torch.optim.Optimizer], Any]:
    """A rate that falls from epoch to epoch along half a cosine, from what it is at first to almost nothing."""
    return lambda optimiser: torch.optim.lr_scheduler.LambdaLR(optimiser, lambda e: (1 + cos(pi * e / epochs)) / 2)


def last(rows: Sequence[Sequence[float]]) -> float:
    """The mean over tasks after the last of them."""
    return fmean(rows[-1])


def outcome(best: dict[str, Any], tried: dict[str, list[Figures]], by_seed: dict[int, Figures]) -> dict[str, Any]:
    """What is written of arms whose strengths and rates were chosen on a seed of their own."""
    shown = "strength", "rate", "mean", "chosen_by", "first_task_in_the_end", "last_task_in_the_end"
    return {
        "best": best,
        "tried": {arm: [{key: row[key] for key in shown if key in row} for row in rows] for arm, rows in tried.items()},
        "over_seeds": spread([plain(each) for each in by_seed.values()]),
        "by_seed": {str(seed): plain(each) for seed, each in by_seed.items()},
    }
