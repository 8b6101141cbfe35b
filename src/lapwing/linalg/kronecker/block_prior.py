"""BlockPrior: a Kronecker block whose prior is one number for the weight and one for the bias, or one for both.

The prior is never spelled out over the O I entries where its numbers are known by group: a log-determinant then costs
the O I eigenvalues alone.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from lapwing.linalg.checks import check_prior
from lapwing.linalg.contracts import Curvature, GroupedLogdet, Precision, one_group, scaled
from lapwing.linalg.kronecker.factors import block_priors, column_parts
from lapwing.linalg.layout import MatrixLayout


class BlockPrior(Curvature):
    """One weight and its bias; what is to be written is `with_block_priors`."""

    layout: MatrixLayout

    @property
    @abstractmethod
    def like(self) -> Tensor:
        """A tensor of the dtype and on the device of the block."""

    @abstractmethod
    def with_block_priors(self, deltas: Sequence[Float[Tensor, ""]], equal: bool) -> Precision:
        """With one prior precision for the block, or one each for weight and bias; and whether these are equal."""

    def with_prior(self, precision: float | int | Tensor) -> Precision:
        """Exact for one precision, or one for the weight and one for the bias (which then decouples the two)."""
        return self.with_block_priors(*block_priors(self.layout, check_prior(precision, self.size, self.like)))

    def grouped_logdet(self, groups: Int[Tensor, " params"] | None) -> GroupedLogdet:
        numbers = block_groups(self.layout, groups)
        return super().grouped_logdet(groups) if numbers is None else BlockLogdet(self, numbers)


@dataclass(frozen=True, eq=False)
class BlockLogdet(GroupedLogdet):
    """Of a block whose weight and bias have one group each, of these numbers, or one in common."""

    block: BlockPrior
    numbers: tuple[int, ...]

    def __call__(self, precisions: Float[Tensor, " groups"], scale: float | int | Tensor = 1) -> Float[Tensor, ""]:
        deltas = [check_prior(precisions[number], 1, self.block.like) for number in self.numbers]
        return scaled(self.block, scale).with_block_priors(deltas, bool(deltas[0] == deltas[-1])).logdet()


def block_groups(layout: MatrixLayout, groups: Int[Tensor, " params"] | None) -> tuple[int, ...] | None:
    """The group of the block, or those of weight and bias; None if one of the two is in several."""
    only = one_group(groups)
    if groups is None or only is not None:
        return None if only is None else (only,)
    matrix = layout.gather(groups)
    found = [one_group(matrix[..., part].flatten()) for part in column_parts(layout, joint=False)]
    return None if None in found else tuple(each for each in found if each is not None)
