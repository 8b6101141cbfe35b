"""TaskRun: the training of one task, epoch by epoch, which goes on where it was broken off.

A snapshot after an epoch has all that the next one depends on: weights and buffers, optimiser, schedule, random
numbers, the losses, and what Synaptic Intelligence has gathered. Memory: a copy of the weights and the moments of the
optimiser.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lapwing.errors import StorageError
from lapwing.training.importance import Importance
from lapwing.training.loop import Epoch, Gradient, advance, one_epoch
from lapwing.training.objective import Objective, Term
from lapwing.training.resume import Keeper, generators
from lapwing.training.train_mode import copied, restore


@dataclass(eq=False)
class TaskRun:
    """`loaders` are those that `batches` are drawn from: their generators of random numbers belong to the run."""

    network: nn.Module
    objective: Objective
    batches: Iterable[Any]
    loaders: tuple[Iterable[Any], ...]
    optimiser: torch.optim.Optimizer
    scheduler: Any
    generator: torch.Generator | None
    importance: Importance | None
    losses: list[float] = field(default_factory=list)

    def go(
        self,
        term: Term,
        epochs: int,
        callback: Callable[[Epoch], object] | None,
        keeper: Keeper | None,
        every: int,
    ) -> None:
        """Trains until `epochs` epochs are behind it."""
        kept = None if keeper is None else keeper.load()
        done = 0 if kept is None else self._put_back(kept)
        importance, tensors = self.importance, self.objective.tensors
        gradient: Gradient = self.objective.with_term(term, watch=None if importance is None else importance.watch)

        def stepped(_: float) -> None:
            if importance is not None:
                importance.stepped(tensors)

        for number in range(done + 1, epochs + 1):
            loss = one_epoch(number, self.batches, self.optimiser, gradient, stepped)
            advance(self.scheduler, loss)
            self.losses.append(loss)
            if callback is not None:
                callback(Epoch(number, loss, None, False))
            if keeper is not None and (number % every == 0 or number == epochs):
                keeper.save(self._snapshot(number))

    def _snapshot(self, done: int) -> dict[str, Any]:
        return {
            "epoch": done,
            "weights": copied(self.network),
            "optimiser": self.optimiser.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "random": [each.get_state() for each in self._generators()],
            "losses": list(self.losses),
            "importance": None if self.importance is None else [self.importance.start, self.importance.omega],
        }

    def _put_back(self, kept: Mapping[str, Any]) -> int:
        drawn = self._generators()
        if len(kept["random"]) != len(drawn) or set(kept["weights"]) != set(copied(self.network)):
            raise StorageError(
                "the checkpoint has the state of other generators of random numbers, or of another model; expected a "
                "run that is set up as it was. Restore that, or delete the file to begin anew."
            )
        restore(self.network, kept["weights"])
        self.optimiser.load_state_dict(dict(kept["optimiser"]))
        if self.scheduler is not None:
            self.scheduler.load_state_dict(dict(kept["scheduler"]))
        for each, state in zip(drawn, kept["random"], strict=True):
            each.set_state(state)
        self.losses[:] = kept["losses"]
        if self.importance is not None:
            self.importance.start, self.importance.omega = kept["importance"]
        return kept["epoch"]

    def _generators(self) -> list[torch.Generator]:
        device = self.objective.tangent.space.device
        found = [each for loader in self.loaders for each in generators(loader, self.generator, device)]
        return list({id(each): each for each in found}.values())
