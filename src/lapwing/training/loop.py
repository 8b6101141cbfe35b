"""The training loop: epochs of steps on the weights, with looks at the evidence in between, keeping the best weights.

    epoch   a step per batch, on a gradient under the present prior and noise
    look    the evidence at the weights as they are, and the prior and noise that it leads to

What is minimised, what a look costs and when there is one are the caller's. The loop keeps one copy of parameters and
buffers: those of the look with the largest log Z.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.errors import DataError
from lapwing.estimate.data_pass import named, pairs
from lapwing.evidence import Evidence, Tuned
from lapwing.priors import Prior
from lapwing.tangent.inputs import batch_size
from lapwing.training.train_mode import copied, restore

Gradient = Callable[[Any, Any], tuple[float, float]]
"""(x, y) -> (loss per data point, what was differentiated): leaves the gradient in the parameters."""


@dataclass(frozen=True, eq=False)
class Epoch:
    """What a callback is told after an epoch; `tuned` is None where the evidence was not evaluated."""

    number: int
    loss: float
    tuned: Tuned | None
    best: bool


@dataclass(frozen=True, eq=False)
class Best:
    """Weights with the largest evidence, at the end of epoch `number`; the prior and noise that they led to."""

    tuned: Tuned
    number: int
    weights: dict[str, Tensor]

    @property
    def log_marginal(self) -> float:
        return float(self.tuned.log_marginal)


@dataclass(eq=False)
class Looks:
    """The prior and noise that the evidence has led to so far, and the best weights."""

    prior: Prior
    sigma: Tensor
    best: Best | None = None

    def note(self, number: int, tuned: Tuned, model: nn.Module) -> bool:
        """After a look; says whether the weights are the best so far."""
        self.prior, self.sigma = tuned.prior, tuned.sigma
        better = self.best is None or float(tuned.log_marginal) > self.best.log_marginal
        if better:
            self.best = Best(tuned, number, copied(model))
        return better


@dataclass(frozen=True, eq=False)
class TrainingLoop:
    """What does not change while a model is trained.

    `objective` makes the gradient of the epochs up to the next look from the prior and the noise level. A scheduler
    takes a step per epoch, or per batch.
    """

    model: nn.Module
    batches: Iterable[Any]
    optimiser: torch.optim.Optimizer
    objective: Callable[[Prior, float], Gradient]
    evidence: Callable[[], Evidence]
    tune: Callable[[Evidence, Prior, Tensor], Tuned]
    scheduler: Any = None
    scheduler_per_batch: bool = False

    def run(
        self,
        looks: Looks,
        epochs: int,
        due: Callable[[int], bool],
        callback: Callable[[Epoch, Evidence | None], object],
        done: int = 0,
    ) -> Best:
        """Trains from where the model is, and leaves it with the best weights.

        There is a look after each epoch that is `due`, and after the last. The callback is told of every epoch, with
        the evidence of its look. `done` epochs of a run that goes on are behind it.
        """
        gradient = self.objective(looks.prior, float(looks.sigma))
        for number in range(done + 1, epochs + 1):
            loss = self.epoch(number, gradient)
            if not self.scheduler_per_batch:
                advance(self.scheduler, loss)
            evidence, tuned, better = None, None, False
            if number == epochs or due(number):
                evidence = self.evidence()
                tuned = self.tune(evidence, looks.prior, looks.sigma)
                better = looks.note(number, tuned, self.model)
                gradient = self.objective(looks.prior, float(looks.sigma))
            callback(Epoch(number, loss, tuned, better), evidence)
        assert looks.best is not None
        self.optimiser.zero_grad(set_to_none=True)
        restore(self.model, looks.best.weights)
        return looks.best

    def epoch(self, number: int, gradient: Gradient) -> float:
        """One pass of steps; the mean of the loss over data points."""

        def stepped(loss: float) -> None:
            if self.scheduler_per_batch:
                advance(self.scheduler, loss)

        return one_epoch(number, self.batches, self.optimiser, gradient, stepped)


@dataclass(eq=False)
class Progress:
    """How far an epoch is: its batches so far, their points, and the sum of the loss over these."""

    batches: int = 0
    points: int = 0
    loss: float = 0.0


def one_epoch(
    number: int,
    batches: Iterable[Any],
    optimiser: torch.optim.Optimizer,
    gradient: Gradient,
    stepped: Callable[[float], None],
    progress: Progress | None = None,
) -> float:
    """A step of the optimiser per batch; the mean of the loss over data points. `stepped` is told each step's loss.

    `progress` is kept up to date; in an epoch that goes on, `batches` are those that are left of it.
    """
    progress = Progress() if progress is None else progress
    for x, y in pairs(batches):
        losses: list[float] = []

        def closure(x: Any = x, y: Any = y, losses: list[float] = losses) -> float:
            optimiser.zero_grad()
            with torch.enable_grad():
                loss, value = gradient(x, y)
            losses.append(loss)
            return value

        with named(f"epoch {number}, batch {progress.batches}"):
            weight = batch_size(x)
            optimiser.step(closure)
        progress.batches, progress.points = progress.batches + 1, progress.points + weight
        progress.loss += weight * losses[0]
        stepped(losses[0])
    if not progress.points:
        raise DataError(f"the loader yields no batch in epoch {number}; expected it to start again in each epoch.")
    return progress.loss / progress.points


def advance(scheduler: Any, loss: float) -> None:
    """A step of the scheduler, if there is one; a kind that looks at the loss is told the loss."""
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        scheduler.step(loss)
    elif scheduler is not None:
        scheduler.step()
