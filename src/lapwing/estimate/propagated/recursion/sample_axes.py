"""Where samples lie in the values of a tape, for `kfra`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.estimate.propagated.recursion.refusal import refuse
from lapwing.estimate.propagated.recursion.uses import Sources
from lapwing.tape.nodes import Value
from lapwing.tape.tape import Tape


@dataclass(frozen=True)
class Place:
    """How samples lie in a tensor: along `axis`, None where it depends on parameters alone; `size` entries of each.

    `folded` marks an axis that also holds something else.
    """

    shape: torch.Size
    axis: int | None
    folded: bool = False

    @property
    def size(self) -> int:
        return self.shape.numel()

    def batched(self, batch: int) -> torch.Size:
        """The shape for a batch."""
        if self.axis is None:
            return self.shape
        return torch.Size(n * batch if i == self.axis else n for i, n in enumerate(self.shape))

    def rows(self, values: Tensor, batch: int, name: str) -> Tensor:
        """[B, d], or [1, d] for what is the same for all."""
        values = values.expand(self.batched(batch))
        if self.axis is None or batch == 1:
            return values.reshape(1, -1)
        self.check(batch, name)
        return values.movedim(self.axis, 0).reshape(batch, -1)

    def check(self, batch: int, name: str) -> None:
        if self.folded and batch > 1:
            raise refuse(
                name, f"samples share axis {self.axis} of a tensor with other positions (batches of one are possible)"
            )

    def repeated(self, one: Tensor, batch: int, name: str) -> Tensor:
        """One sample's values, the same for all."""
        self.check(batch, name)
        return one.reshape(self.shape).expand(self.batched(batch))


@dataclass(frozen=True, eq=False)
class Frame:
    """What all steps share: places of the values of the structural tape, a number with the dtype and device of sums,
    the budget, and the parameters."""

    place: Mapping[Value, Place]
    like: Tensor
    budget: int
    sources: Sources


@dataclass(frozen=True, eq=False)
class TapedBatch:
    """A recorded batch beside the structural tape: `value[v]` is what v is here."""

    tape: Tape
    size: int
    value: Mapping[Value, Value]
