"""The contract of a predictive distribution: one law for each of n targets, from tensors [n] in float64.

mean, deviation      [n]          of a new observation
epistemic            [n]          what more data would settle, on the scale on which outputs are Gaussian
parts                [n] and [n]  the deviation as two, by the weights and by chance given the weights
log_prob, cdf        [n]          log-density (or log-probability) of targets, and P(target <= y)
interval             [n] and [n]  lower and upper end of the central interval of a probability
draw                 [k, n]
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lapwing.errors import DataError

AnyDistribution = TypeVar("AnyDistribution", bound="Distribution")


@dataclass(frozen=True, eq=False)
class Distribution(ABC):
    """Predictions for n targets, one by one; finals are frozen dataclasses of tensors [n]."""

    discrete: ClassVar[bool] = False
    """Whether targets are whole numbers."""

    if TYPE_CHECKING:  # a property of some, a field of others, whose default a property here would become

        @property
        def mean(self) -> Float[Tensor, " n"]: ...

    @property
    @abstractmethod
    def deviation(self) -> Float[Tensor, " n"]: ...

    @property
    @abstractmethod
    def epistemic(self) -> Float[Tensor, " n"]: ...

    @property
    @abstractmethod
    def parts(self) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]: ...

    @abstractmethod
    def log_prob(self, y: Float[Tensor, " n"]) -> Float[Tensor, " n"]: ...

    @abstractmethod
    def cdf(self, y: Float[Tensor, " n"]) -> Float[Tensor, " n"]: ...

    @abstractmethod
    def interval(self, level: float) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]: ...

    def width(self, level: float) -> Float[Tensor, " n"]:
        """Of the central interval."""
        low, high = self.interval(level)
        return high - low

    @abstractmethod
    def draw(self, count: int, generator: torch.Generator | None = None) -> Float[Tensor, "count n"]: ...

    @classmethod
    def joined(cls: type[AnyDistribution], parts: Sequence[AnyDistribution]) -> AnyDistribution:
        """One after the other; at least one."""
        return cls(*(torch.cat([getattr(part, one.name) for part in parts]) for one in fields(cls)))

    def rescaled(self, scale: float, shift: float) -> Distribution:
        """In other units, y * scale + shift; scale > 0."""
        raise DataError(f"predictions by {type(self).__name__} have no other unit; expected numbers on a line.")

    def rows(self: AnyDistribution, chosen: Int[Tensor, " k"]) -> AnyDistribution:
        """The predictions with these numbers."""
        return type(self)(*(getattr(self, one.name)[chosen] for one in fields(self)))
