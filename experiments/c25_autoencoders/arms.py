"""Optimisers in a race: the same weights and batches for each, and the same processor seconds on one thread.

    race(stepper, batches, figure, seconds, ...)      losses at marks of seconds and of updates

A stepper takes a batch and makes an update of the model's weights. The clock runs only while it does; the loss at a
mark of seconds is that of the last update that was complete by then.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from math import floor, nan
from multiprocessing import get_context
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.likelihoods import Likelihood
from lapwing.training import GaussNewton

Batch = tuple[Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


def stacked(sizes: Sequence[int]) -> nn.Sequential:
    """Linear layers with tanh between. Glorot's uniform weights, zero biases."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layer = nn.Linear(inputs, outputs)
        nn.init.xavier_uniform_(layer.weight)
        nn.init.zeros_(layer.bias)
        layers += [layer, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def autoencoder(pixels: int, hidden: Sequence[int]) -> nn.Sequential:
    """pixels, hidden, hidden reversed, pixels."""
    return stacked([pixels, *hidden, *hidden[-2::-1], pixels])


def drawn(x: Tensor, y: Tensor, batch: int, seed: int) -> Iterator[Batch]:
    """Batches without end, the same for every optimiser of a seed."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        index = torch.randint(len(x), (batch,), generator=generator)
        yield x[index], y[index]


# -- steppers ---------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class SecondOrder:
    """GaussNewton with what it has by default, besides the curvature's name and its moving average."""

    model: nn.Module
    likelihood: Likelihood
    estimator: str
    seed: int
    options: dict[str, Any] = field(default_factory=dict)
    refused: int = 0
    given_up: int = 0
    updates: int = 0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.optimiser = GaussNewton(
            self.model, self.likelihood, estimator=self.estimator, generator=generator, **self.options
        )

    def __call__(self, batch: Batch, share: float) -> None:
        step = self.optimiser.step(*batch)
        self.refused += step.refused
        self.given_up += not step.accepted
        self.updates += 1

    def said(self) -> dict[str, float]:
        damping = self.optimiser.damping
        return {
            "tau": damping.tau,
            "zeta": damping.of_curvature,
            "refused": self.refused,
            "given_up": self.given_up,
        }


@dataclass(eq=False)
class FirstOrder:
    """A rate that is halved whenever another `period` of the seconds is over; 1 is never."""

    model: nn.Module
    loss: Loss
    optimiser: torch.optim.Optimizer
    period: float = 1.0
    updates: int = 0

    def __post_init__(self) -> None:
        self.rate = self.optimiser.param_groups[0]["lr"]

    def __call__(self, batch: Batch, share: float) -> None:
        for group in self.optimiser.param_groups:
            group["lr"] = self.rate * 0.5 ** floor(share / self.period)
        x, y = batch
        self.optimiser.zero_grad()
        self.loss(self.model(x), y).backward()
        self.optimiser.step()
        self.updates += 1

    def said(self) -> dict[str, float]:
        return {}


@dataclass(eq=False)
class FullBatch:
    """L-BFGS on all images at once, two iterations a call; the batch is not looked at."""

    model: nn.Module
    loss: Loss
    x: Tensor
    y: Tensor

    def __post_init__(self) -> None:
        self.optimiser = torch.optim.LBFGS(
            self.model.parameters(), max_iter=2, history_size=20, line_search_fn="strong_wolfe"
        )

    def __call__(self, batch: Batch, share: float) -> None:
        self.optimiser.step(self._closure)

    def _closure(self) -> float:
        self.optimiser.zero_grad()
        value = self.loss(self.model(self.x), self.y)
        value.backward()
        return float(value.detach())

    @property
    def updates(self) -> int:
        return next((each["n_iter"] for each in self.optimiser.state.values() if "n_iter" in each), 0)

    def said(self) -> dict[str, float]:
        return {}


Stepper = SecondOrder | FirstOrder | FullBatch


def soap(parameters: Any, rate: float) -> torch.optim.Optimizer | None:
    """SOAP of the package pytorch-optimizer, or None where that is not installed."""
    try:
        from pytorch_optimizer import SOAP  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    return SOAP(parameters, lr=rate, weight_decay=0.0)


# -- the race ---------------------------------------------------------------------------------------------------------


def race(
    stepper: Stepper,
    batches: Iterator[Batch],
    figure: Callable[[], float],
    seconds: float,
    at_seconds: Sequence[float],
    at_updates: Sequence[int],
) -> dict[str, Any]:
    """Until the seconds are over and the last of the updates is made; `at_seconds` are parts of the seconds.

    `figure` is the loss that is reported, found outside the clock. L-BFGS has no marks of updates.
    """
    model, spent = stepper.model, 0.0
    begin = figure()
    counted = () if isinstance(stepper, FullBatch) else tuple(at_updates)
    found: dict[str, Any] = {"at_seconds": [], "at_updates": [begin if mark == 0 else nan for mark in counted]}
    marks = [seconds * share for share in at_seconds]
    last, within = max(counted, default=0), 0
    while spent < seconds or stepper.updates < last:
        before = [each.detach().clone() for each in model.parameters()] if marks else []
        batch, done = next(batches), stepper.updates
        started = time.process_time()
        stepper(batch, spent / seconds if seconds else 0.0)
        spent += time.process_time() - started
        within = stepper.updates if spent <= seconds else within
        if stepper.updates in counted:
            found["at_updates"][counted.index(stepper.updates)] = figure()
        if marks and spent > marks[0]:
            now = [each.detach().clone() for each in model.parameters()]
            _put(model, before)
            value = figure() if done else begin
            _put(model, now)
            while marks and spent > marks[0]:
                found["at_seconds"].append(value)
                marks.pop(0)
    found["at_seconds"] += [figure()] * len(marks)
    return found | {"updates_in_time": within, **stepper.said()}


@torch.no_grad()
def _put(model: nn.Module, values: list[Tensor]) -> None:
    for parameter, value in zip(model.parameters(), values, strict=True):
        parameter.copy_(value)


# -- many of them -----------------------------------------------------------------------------------------------------


def in_processes(task: Callable[[Any], Any], jobs: Sequence[Any], smoke: bool) -> list[Any]:
    """Each job in a process of one thread, as many at a time as there are cores; one after the other in a smoke run."""
    if smoke:
        return [task(job) for job in jobs]
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        return list(pool.map(task, jobs))


def columns(runs: Sequence[dict[str, Any]], key: str) -> list[list[float]]:
    """Losses of several seeds at each mark, as results.json has them: one that is not finite is there by its name."""
    return [[float(each) for each in column] for column in zip(*(run[key] for run in runs), strict=True)]


def medians(runs: Sequence[dict[str, Any]], key: str) -> list[float]:
    return [median(column) for column in columns(runs, key)]


def cells(runs: Sequence[dict[str, Any]], config: dict[str, Any]) -> str:
    """A row for the README: losses at config["shown_shares"] of the seconds, after "shown_updates", and updates made.

    Medians with the smallest and the largest; empty where a run has no such marks.
    """
    places = [("at_seconds", round(share * config["marks"]) - 1) for share in config["shown_shares"]]
    places += [("at_updates", config["updates"].index(count)) for count in config["shown_updates"]]
    found = [shown_range(columns(runs, key)[at]) if runs[0][key] else "" for key, at in places]
    made = f"{median(run['updates_in_time'] for run in runs):.0f}" if runs[0]["at_seconds"] else ""
    return " | ".join([*found, made])


def shown_range(values: Sequence[float]) -> str:
    return f"{median(values):.3g} ({min(values):.3g} to {max(values):.3g})"
