"""Steps over the batches of a loader that go on where they were broken off, also in the middle of an epoch.

    Step          what one step did
    SteppedRun    the steps of a run, and the file that keeps it: weights, optimiser, random numbers, records

An epoch is begun again with the random numbers it began with, and the batches that were taken are passed over: a loader
that draws from torch's generators, its own or the global one, then gives the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from lapwing.errors import DataError, OptionError, StorageError
from lapwing.estimate.data_pass import named, no_batch, one_shot, pairs
from lapwing.serialize import pack_tree, read, unpack_tree, write
from lapwing.serialize.files import AnyPath, check_writable
from lapwing.tangent import Tangent
from lapwing.training.resume import generators
from lapwing.training.train_mode import copied, restore

KIND = "steps"


@dataclass(frozen=True)
class Step:
    """What a step did. `loss` is that of the batch before it, `after` behind it (NaN where it was not verified).

    `ratio` is rho, the decrease that was seen over the one that the quadratic promised (NaN where there was none to
    see), `length` is that of the step in units of its direction, `gradient` the norm of the gradient before it, and
    `refused` how often tau was raised. A step that is not `accepted` left the weights alone.
    """

    number: int
    loss: float
    after: float
    ratio: float
    length: float
    tau: float
    zeta: float
    accepted: bool
    refused: int
    gradient: float


@runtime_checkable
class Stepper(Protocol):
    """An optimiser that takes a step on some batches."""

    tangent: Tangent
    generator: torch.Generator | None

    def step_over(self, batches: Iterable[Any]) -> Step: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None: ...


@dataclass(eq=False)
class SteppedRun:
    """A run and where it is: `epoch` epochs and `batch` batches of the next are behind it."""

    optimiser: Stepper
    loader: Iterable[Any]
    epochs: int | None
    total: int | None
    full_batch: bool
    tolerance: float | int
    path: Path | None
    every: int
    ended: Callable[[], object] = lambda: None
    done: list[Step] = field(default_factory=list)
    epoch: int = 0
    batch: int = 0

    @staticmethod
    def of(
        optimiser: Stepper,
        loader: Iterable[Any],
        epochs: int | None,
        steps: int | None,
        full_batch: bool,
        tolerance: float | int,
        checkpoint: AnyPath | None,
        every: int,
        ended: Callable[[], object] = lambda: None,
    ) -> SteppedRun:
        """A run from its beginning, or from where its file is; `ended` is called after every epoch."""
        if (epochs is None) == (steps is None):
            raise OptionError(f"epochs is {epochs} and steps is {steps}; expected exactly one of them.")
        for name, value in (("epochs", epochs), ("steps", steps), ("checkpoint_every", every)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise OptionError(f"{name} is {value!r}; expected a whole number >= 1.")
        if not 0 <= tolerance < 1:
            raise OptionError(f"tolerance is {tolerance!r}; expected a share of the first gradient's norm, below 1.")
        if one_shot(loader) and (full_batch or epochs != 1):  # `iter` of a DataLoader would draw random numbers
            raise DataError(
                f"the loader is a {type(loader).__name__} that can be read only once; expected one that starts again. "
                "Give a DataLoader, or a list of pairs."
            )
        path = None if checkpoint is None else check_writable(checkpoint)
        run = SteppedRun(optimiser, loader, epochs, steps, full_batch, tolerance, path, every, ended)
        if path is not None and path.exists():
            run._load(path)
        return run

    def steps(self) -> Iterator[Step]:
        """Takes what steps are left; the file is removed in the end."""
        yield from self.done  # of a run that goes on, told again
        while not self._finished():
            before = len(self.done)
            for step in self._epoch():
                self.done.append(step)
                if self.path is not None and len(self.done) % self.every == 0:
                    self._save(self.path)
                yield step
                if self._finished():
                    break
            else:
                self.epoch, self.batch = self.epoch + 1, 0
                if len(self.done) == before and not self._skipped:
                    raise no_batch()
                self.ended()
                continue
            break
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _finished(self) -> bool:
        if self.total is not None and len(self.done) >= self.total:
            return True
        if self.epochs is not None and self.epoch >= self.epochs:
            return True
        if not self.done:
            return False
        last = self.done[-1]
        return last.gradient <= self.tolerance * self.done[0].gradient or (self.full_batch and not last.accepted)

    def _epoch(self) -> Iterator[Step]:
        """Steps of an epoch from batch number `batch` on."""
        self._skipped = self.batch
        drawn = generators(self.loader, self.optimiser.generator, self.optimiser.tangent.space.device)
        if not self.batch:
            self._began = [each.get_state() for each in drawn]
        else:
            for each, state in zip(drawn, self._began, strict=True):
                each.set_state(state)
        if self.full_batch:
            yield self.optimiser.step_over(pairs(self.loader))
            return
        for number, pair in enumerate(pairs(self.loader)):
            if number < self._skipped:
                if number == self._skipped - 1:  # before the loader is asked again: it may draw at its end, too
                    for each, state in zip(drawn, self._now, strict=True):
                        each.set_state(state)
                continue
            with named(f"epoch {self.epoch}, batch {number}"):
                step = self.optimiser.step_over([pair])
            self.batch = number + 1
            yield step

    # -- the file --------------------------------------------------------------------------------------------------

    _began: list[torch.Tensor] = field(default_factory=list)
    _now: list[torch.Tensor] = field(default_factory=list)
    _skipped: int = 0

    def _same(self) -> dict[str, Any]:
        """What must not differ between two attempts."""
        model = self.optimiser.tangent.model
        sizes = {name: f"{tuple(value.shape)} {value.dtype}" for name, value in copied(model).items()}
        limits = {
            "epochs": self.epochs,
            "steps": self.total,
            "full_batch": self.full_batch,
            "tolerance": self.tolerance,
        }
        return limits | {f"tensor {name}": size for name, size in sizes.items()}

    def _save(self, path: Path) -> None:
        drawn = generators(self.loader, self.optimiser.generator, self.optimiser.tangent.space.device)
        snapshot = {
            "epoch": self.epoch,
            "batch": self.batch,
            "weights": copied(self.optimiser.tangent.model),
            "optimiser": self.optimiser.state_dict(),
            "began": self._began,
            "now": [each.get_state() for each in drawn],
            "done": [asdict(step) for step in self.done],
        }
        description, tensors = pack_tree(snapshot)
        write(path, tensors, {"kind": KIND, "same": self._same(), "snapshot": description})

    def _load(self, path: Path) -> None:
        try:
            tensors, metadata = read(path)
        except StorageError as error:
            raise StorageError(f"the checkpoint cannot be used. {error} Delete it to begin anew.") from error
        if metadata.get("kind") != KIND or not isinstance(metadata.get("same"), dict):
            raise StorageError(
                f"{path} holds {metadata.get('kind')!r}; expected a checkpoint of this run, or no file. Choose another "
                "path."
            )
        saved, ours = metadata["same"], self._same()
        other = [name for name in {**ours, **saved} if ours.get(name) != saved.get(name)]
        if other:
            raise StorageError(
                f"{path} is a checkpoint of another run: {other[0]} was {saved.get(other[0])} and is "
                f"{ours.get(other[0])}. Expected the same model and options. Restore them, or delete the file."
            )
        try:
            kept = unpack_tree(metadata["snapshot"], tensors)
            self.optimiser.load_state_dict(kept["optimiser"])
            restore(self.optimiser.tangent.model, kept["weights"])
            self.epoch, self.batch = kept["epoch"], kept["batch"]
            self._began, self._now = list(kept["began"]), list(kept["now"])
            self.done = [Step(**step) for step in kept["done"]]
        except StorageError:  # it says itself in what the file differs
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise StorageError(f"the checkpoint {path} is incomplete ({error}). Delete it to begin anew.") from error
