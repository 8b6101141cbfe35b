"""Training that survives a kill: after every few epochs one file holds the run, and another attempt goes on from it.

The file has weights, optimiser, schedule, prior and noise with their own optimiser, the best weights so far, and the
state of every generator of torch's random numbers (the run's, the loader's, the global one), as `training.resume`
gathers them. It is tensors and JSON: nothing that is read can run code. A file of another run is refused, and says in
what it differs. It is removed in the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from lapwing.errors import OptionError, StorageError
from lapwing.laplace.descriptions import text
from lapwing.laplace.identity import structure
from lapwing.laplace.persistence import described
from lapwing.laplace.setup import Setup
from lapwing.serialize import pack_tree, read, unpack_tree, write
from lapwing.serialize.files import AnyPath, check_writable

KIND = "training"


@dataclass(frozen=True)
class TrainingFile:
    """A `training.Keeper` in a file. `same` is what must not differ between two attempts, as JSON gives it back."""

    path: Path
    same: Mapping[str, Any]

    @staticmethod
    def of(path: AnyPath, setup: Setup, every: int, **options: Any) -> TrainingFile:
        """For a run of this posterior with these options; checks that the path can be written."""
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise OptionError(f"checkpoint_every is {every!r}; expected a number of epochs >= 1.")
        return TrainingFile(check_writable(path), {**_identity(setup), **{n: text(v) for n, v in options.items()}})

    def load(self) -> Mapping[str, Any] | None:
        """The latest snapshot; None where there is no file."""
        if not self.path.exists():
            return None
        try:
            tensors, metadata = read(self.path)
        except StorageError as error:
            raise StorageError(f"the checkpoint cannot be used. {error} Delete it to begin anew.") from error
        if metadata.get("kind") != KIND or not isinstance(metadata.get("same"), dict):
            raise StorageError(
                f"{self.path} holds {metadata.get('kind')!r}; expected a checkpoint of this training, or no file. "
                "Choose another path."
            )
        saved = metadata["same"]
        other = [name for name in {**self.same, **saved} if self.same.get(name) != saved.get(name)]
        if other:
            was, now = saved.get(other[0]), self.same.get(other[0])
            raise StorageError(
                f"{self.path} is a checkpoint of another run: {other[0]} was {was} and is {now}. Expected the same "
                "model and options. Restore them, or delete the file to begin anew."
            )
        try:
            return unpack_tree(metadata["snapshot"], tensors)
        except (KeyError, TypeError, ValueError) as error:
            raise StorageError(
                f"the checkpoint {self.path} is incomplete ({error}). Delete it to begin anew."
            ) from error

    def save(self, snapshot: Mapping[str, Any]) -> None:
        description, tensors = pack_tree(snapshot)
        write(self.path, tensors, {"kind": KIND, "same": dict(self.same), "snapshot": description})

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def _identity(setup: Setup) -> dict[str, Any]:
    """The network by its modules, tensors and types, the likelihood, and how curvature is estimated."""
    made, _ = described(setup)
    model: nn.Module = setup.model
    entries = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found = {f"tensor {name}": f"{tuple(value.shape)} {value.dtype}" for name, value in entries.items()}
    found |= {f"module {name}": str(facts) for name, facts in structure(model).items()}
    found |= {"posterior": text(tuple(sorted(setup.options.items()))), "class": str(made["class"])}
    return found | {"likelihood": str(made["likelihood"])}
