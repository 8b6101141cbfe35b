"""Loaders as users have them: pairs, or mappings with the targets among them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from rich.progress import track
from torch import Tensor

from lapwing.errors import MissingKeyError
from lapwing.estimate.data_pass import Wrapped, no_batch, one_shot
from lapwing.evidence import GaussianFit
from lapwing.tangent.inputs import moved


@dataclass(frozen=True)
class Pairs(Wrapped):
    """A loader as pairs (x, y) on the model's device; of a mapping, y is the entry `key_y` and x the others."""

    loader: Iterable[Any]
    key_y: str
    device: torch.device

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


def peek(loader: Iterable[Any]) -> tuple[Any, Iterable[Any]]:
    """The first batch, and a loader that still has it."""
    iterator = iter(loader)
    for first in iterator:
        return first, chain([first], iterator) if one_shot(loader) else loader
    raise no_batch()


@dataclass
class Seen:
    """What a pass over the data has seen: points, the log-likelihood or the squared residuals, the outputs' shape."""

    regression: bool
    points: int = 0
    targets: int = 0
    total: Tensor | float = 0.0
    shape: torch.Size | None = field(default=None)

    def start(self) -> None:
        self.points, self.targets, self.total, self.shape = 0, 0, 0.0, None

    def saw(self, value: Tensor, y: Tensor, log_prob: Tensor) -> None:
        self.points += len(value)
        self.targets += value.numel()
        # sequences may have another length in every batch; the shape of the first says how many outputs there are
        self.shape = value.shape[1:] if self.shape is None else self.shape
        self.total = self.total + (squares(value, y) if self.regression else log_prob.double().sum())

    def fit(self, dtype: torch.dtype) -> Tensor | GaussianFit:
        assert isinstance(self.total, Tensor)
        total = self.total.detach().to(dtype)
        return GaussianFit(self.targets, total) if self.regression else total


def squares(value: Tensor, y: Tensor) -> Tensor:
    """The sum of squared residuals; none counts as less than 1.2e-7 of its target, the rounding of float32.

    Also in float64: a noise level below that would multiply the curvature, and its rounding, by more than 1e14.
    """
    rounding = max(torch.finfo(value.dtype).eps, torch.finfo(torch.float32).eps) * y.double()
    return torch.maximum((value - y).double().square(), rounding.square()).sum()
