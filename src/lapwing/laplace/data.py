"""Loaders as users have them: pairs, or mappings with the targets among them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from rich.progress import track

from lapwing.errors import MissingKeyError
from lapwing.estimate.data_pass import Wrapped, no_batch, one_shot
from lapwing.laplace.sampler import refuse_shard
from lapwing.tangent.inputs import batch_size, map_tensors, moved, take, tensors


@dataclass(frozen=True)
class Pairs(Wrapped):
    """A loader as pairs (x, y) on the model's device; of a mapping, y is the entry `key_y` and x the others."""

    loader: Iterable[Any]
    key_y: str
    device: torch.device
    shard: bool = False
    """Whether a shard of the data will do."""

    def __post_init__(self) -> None:
        if not self.shard:
            refuse_shard(self.loader)

    @property
    def source(self) -> Iterable[Any]:
        return self.loader

    def __iter__(self) -> Iterator[Any]:
        return map(self.pair, self.loader)

    def pair(self, batch: Any) -> Any:
        if isinstance(batch, Mapping):
            if self.key_y not in batch:
                raise MissingKeyError(
                    f"a batch has the entries {list(batch)}; expected the targets under {self.key_y!r}. Set dict_key_y "
                    "to the name they have."
                )
            batch = {key: value for key, value in batch.items() if key != self.key_y}, batch[self.key_y]
        return moved(batch, self.device)


@dataclass(frozen=True)
class Tracked(Wrapped):
    """A loader with a progress bar for every pass over it."""

    loader: Iterable[Any]
    description: str

    @property
    def source(self) -> Iterable[Any]:
        return self.loader

    def __iter__(self) -> Iterator[Any]:
        return iter(track(self.loader, description=self.description))  # pyright: ignore[reportArgumentType]


@dataclass
class FirstInputs(Wrapped):
    """Batches, of the first of which a few inputs are kept: what the operations of the network can be seen at again."""

    batches: Iterable[Any]
    few: Any = None
    size: int = 0
    """Of the first batch."""

    @property
    def source(self) -> Iterable[Any]:
        return self.batches

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            if self.few is None and isinstance(batch, (tuple, list)) and len(batch) == 2 and tensors(batch[0]):
                self.size = batch_size(batch[0])
                self.few = map_tensors(lambda t: t.detach().clone(), take(batch[0], slice(0, FEW)))
            yield batch


FEW = 4


def peek(loader: Iterable[Any]) -> tuple[Any, Iterable[Any]]:
    """The first batch, and a loader that still has it."""
    iterator = iter(loader)
    for first in iterator:
        return first, chain([first], iterator) if one_shot(loader) else loader
    raise no_batch()
