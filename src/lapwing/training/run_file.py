"""RunFile: training that survives a kill. One file holds a run, and another attempt goes on from it.

What is in a snapshot is the run's own (`resume`): tensors, numbers and strings. Nothing that is read can run code. A
file of another run is refused, and says in what it differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lapwing.errors import OptionError, StorageError
from lapwing.serialize import pack_tree, read, unpack_tree, write
from lapwing.serialize.files import AnyPath, check_writable

KIND = "training"


@dataclass(frozen=True)
class RunFile:
    """A `training.Keeper` in a file. `same` is what must not differ between two attempts, as JSON gives it back."""

    path: Path
    same: Mapping[str, Any]

    @staticmethod
    def of(path: AnyPath, every: int, same: Mapping[str, Any]) -> RunFile:
        """Checks that the path can be written, and how often it shall be."""
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise OptionError(f"checkpoint_every is {every!r}; expected a number of epochs >= 1.")
        return RunFile(check_writable(path), same)

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
