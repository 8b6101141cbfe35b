"""TaskRun: the training of one task, which goes on where it was broken off, after an epoch or inside of one.

A snapshot has all that the next step depends on: weights and buffers, optimiser, schedule, random numbers, the losses,
and what Synaptic Intelligence has gathered. Inside an epoch it also has the random numbers that the epoch began with:
the loader begins there once more, and gives the batches that were done without a step. Memory: a copy of the weights
and the moments of the optimiser.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.errors import StorageError
from lapwing.estimate.data_pass import pairs
from lapwing.training.importance import Importance
from lapwing.training.loop import Epoch, Gradient, Progress, advance, one_epoch
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
        every_batches: int | None = None,
    ) -> None:
        """Trains until `epochs` epochs are behind it; keeps it after `every` of them, and so many batches within."""
        kept = None if keeper is None else keeper.load()
        done = 0 if kept is None else self._put_back(kept)
        within = None if kept is None else kept["within"]
        importance, tensors = self.importance, self.objective.tensors
        gradient: Gradient = self.objective.with_term(term, watch=None if importance is None else importance.watch)

        for number in range(done + 1, epochs + 1):
            progress, begun, batches = Progress(), self._random(), self.batches
            if within is not None:
                progress, begun = Progress(**within["progress"]), within["begun"]
                batches, within = self._left(progress.batches, begun), None

            def stepped(_: float, number: int = number, progress: Progress = progress, begun: Any = begun) -> None:
                if importance is not None:
                    importance.stepped(tensors)
                if keeper is not None and every_batches is not None and progress.batches % every_batches == 0:
                    inside = {"progress": asdict(progress), "begun": begun}
                    keeper.save(self._snapshot(number - 1) | {"within": inside})

            loss = one_epoch(number, batches, self.optimiser, gradient, stepped, progress)
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
            "random": self._random(),
            "within": None,
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
        self._set_random(kept["random"])
        self.losses[:] = kept["losses"]
        if self.importance is not None:
            self.importance.start, self.importance.omega = kept["importance"]
        return kept["epoch"]

    def _left(self, done: int, begun: Sequence[Tensor]) -> Iterator[Any]:
        """The batches of an epoch that began with these random numbers, after the first `done`."""
        now = self._random()
        self._set_random(begun)
        batches = iter(pairs(self.batches))
        for _ in range(done):
            if next(batches, None) is None:
                raise StorageError(
                    f"the checkpoint was written after {done} batches of an epoch, and the loader has fewer; expected "
                    "the same data. Restore them, or delete the file to begin anew."
                )
        self._set_random(now)
        yield from batches

    def _random(self) -> list[Tensor]:
        return [each.get_state() for each in self._generators()]

    def _set_random(self, states: Sequence[Tensor]) -> None:
        for each, state in zip(self._generators(), states, strict=True):
            each.set_state(state)

    def _generators(self) -> list[torch.Generator]:
        device = self.objective.tangent.space.device
        found = [each for loader in self.loaders for each in generators(loader, self.generator, device)]
        return list({id(each): each for each in found}.values())
