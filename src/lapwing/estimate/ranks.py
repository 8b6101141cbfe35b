"""Ranks: the processes that estimate one curvature together, each from its own shard of the data.

An estimator whose result adds up over data (`Curvature.pooled`) needs nothing of it: its shards are pooled at the end.
One that goes over the data several times (ekfac, low_rank) asks for the sums that it needs in between. In one process,
`ONE`, a sum is what was given.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from lapwing.linalg import Curvature
from lapwing.linalg.addends import Sum

AnySum = TypeVar("AnySum", bound=Sum)


class Ranks(ABC):
    """Every rank calls the same methods in the same order, and gets the same results."""

    @property
    @abstractmethod
    def size(self) -> int:
        """How many there are."""

    @abstractmethod
    def summed(self, tensor: Tensor) -> Tensor:
        """The sum over ranks of a tensor that has the same shape on all of them."""

    @abstractmethod
    def pooled(self, curvature: AnySum | None) -> AnySum:
        """The curvature of the data of all ranks, from that of this rank's; None from a rank without any.

        What was given is used up: sums take its place in memory.
        """

    @abstractmethod
    def decomposed(self, curvature: Curvature, apart: bool = False) -> Curvature:
        """The same curvature, with eigendecompositions that were made by one rank each and sent to the others.

        `apart` asks for those of weights without their biases as well.
        """


@dataclass(frozen=True)
class OneProcess(Ranks):
    """One process that has all data; decompositions are left until they are asked for."""

    @property
    def size(self) -> int:
        return 1

    def summed(self, tensor: Tensor) -> Tensor:
        return tensor

    def pooled(self, curvature: AnySum | None) -> AnySum:
        assert curvature is not None, "one process has data, or has raised an error"
        return curvature

    def decomposed(self, curvature: Curvature, apart: bool = False) -> Curvature:
        return curvature


ONE = OneProcess()
