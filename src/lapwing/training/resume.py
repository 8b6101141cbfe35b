"""Runs that go on where they were broken off: all that the next epoch depends on, as one mapping, and back.

    snapshot    weights, optimiser, schedule, tuner (with the best weights), random numbers, records: after an epoch
    put_back    the same into a run that was set up in the same way

The mapping holds tensors, numbers, strings, lists and mappings; how it is written is the caller's. Memory: two copies
of the weights, and the moments of the optimisers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch

from lapwing.errors import StorageError
from lapwing.estimate.data_pass import Wrapped
from lapwing.training.train_mode import copied, restore
from lapwing.training.tuner import EvidenceTuner


@runtime_checkable
class Keeper(Protocol):
    """Where snapshots are kept."""

    def load(self) -> Mapping[str, Any] | None:
        """The latest snapshot of this run, if there is one."""

    def save(self, snapshot: Mapping[str, Any]) -> None:
        """Keeps a snapshot instead of the one before."""


@dataclass(eq=False)
class Run:
    """The parts of a run that change while it goes on."""

    tuner: EvidenceTuner
    optimiser: torch.optim.Optimizer
    scheduler: Any
    loader: Iterable[Any]
    generator: torch.Generator | None
    losses: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    evaluated: list[int] = field(default_factory=list)

    def snapshot(self, done: int) -> dict[str, Any]:
        """After `done` epochs."""
        return {
            "epoch": done,
            "weights": copied(self.tuner.objective.tangent.model),
            "optimiser": self.optimiser.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "tuner": self.tuner.state_dict(),
            "random": [each.get_state() for each in self._generators()],
            "records": {"losses": list(self.losses), "values": list(self.values), "evaluated": list(self.evaluated)},
        }

    def put_back(self, kept: Mapping[str, Any]) -> int:
        """How many epochs are behind the run; everything is as it was after them."""
        generators = self._generators()
        model = self.tuner.objective.tangent.model
        if len(kept["random"]) != len(generators) or set(kept["weights"]) != set(copied(model)):
            raise StorageError(
                "the checkpoint has the state of other generators of random numbers, or of another model; expected a "
                "run that is set up as it was. Restore that, or delete the file to begin anew."
            )
        restore(model, kept["weights"])
        self.optimiser.load_state_dict(dict(kept["optimiser"]))
        if self.scheduler is not None:
            self.scheduler.load_state_dict(dict(kept["scheduler"]))
        self.tuner.load_state_dict(kept["tuner"])
        for each, state in zip(generators, kept["random"], strict=True):
            each.set_state(state)
        for name, values in kept["records"].items():
            getattr(self, name)[:] = values
        return kept["epoch"]

    def _generators(self) -> list[torch.Generator]:
        return generators(self.loader, self.generator, self.tuner.objective.tangent.space.device)


def generators(loader: Iterable[Any], generator: torch.Generator | None, device: torch.device) -> list[torch.Generator]:
    """torch's own, the run's, and those of the loader: all that an epoch draws from, each once."""
    found = [torch.default_generator]
    if device.type == "cuda":
        found.append(torch.cuda.default_generators[device.index or 0])
    while isinstance(loader, Wrapped):
        loader = loader.source
    batches = getattr(loader, "batch_sampler", None)
    places = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    drawn = (generator, *(getattr(place, "generator", None) for place in places))
    found += [each for each in drawn if isinstance(each, torch.Generator)]
    return list({id(each): each for each in found}.values())
