"""Memory: what is kept of the tasks so far, and how that of a new one is added to it.

Tensors of the weights' size and curvatures; no data. Sums of Kronecker products are kept as terms, or merged into one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.errors import OptionError
from lapwing.linalg import (
    Block,
    Blocks,
    Curvature,
    Dense,
    Diagonal,
    Kronecker,
    KroneckerSum,
    Segments,
    merged_factors,
    total,
)
from lapwing.serialize import compact, register
from lapwing.training.quadratic_term import Anchor

MERGED: dict[str, Callable[[KroneckerSum], Kronecker] | None] = {
    "keep": None,
    "factors": lambda kept: merged_factors(kept.parts),
    "nearest": lambda kept: kept.nearest,
}
"""What becomes of a sum of Kronecker products: its terms, the product with its partial traces, or the nearest one."""


@dataclass(frozen=True, eq=False)
class Memory:
    """`mean` are the shared weights, `curvature` is that of all tasks, with their multiplier, where it is added up.

    `anchors` are one quadratic per task, where each is around weights of its own. `heads` have weights and curvature.
    `lost` is a bound of the Frobenius distance of a merged curvature from the sum of the tasks' own.
    """

    mean: Float[Tensor, " params"]
    anchors: tuple[Anchor, ...] = ()
    curvature: Curvature | None = None
    heads: tuple[Anchor, ...] = ()
    points: tuple[int, ...] = ()
    lost: float = 0.0

    @property
    def merge_error(self) -> float:
        """`lost`, relative to the norm of the merged curvature."""
        return 0.0 if not self.lost or self.curvature is None else self.lost / norm(self.curvature)


register(Anchor, Memory)


def added(before: Curvature | None, new: Curvature, terms: str) -> tuple[Curvature, float]:
    """The sum, with its Kronecker products as `terms` says, and what merging them has lost: a Frobenius distance."""
    whole = new if before is None else total(before, new)
    merge = MERGED[terms]
    if merge is None:
        return compact(whole), 0.0
    squares = 0.0
    if not isinstance(whole, Blocks):
        return compact(whole), 0.0
    blocks = []
    for block in whole.blocks:
        kept = block.curvature
        if isinstance(kept, KroneckerSum):
            one = merge(kept)
            squares += kept.distance(one) ** 2
            kept = one
        blocks.append(replace(block, curvature=kept))
    return compact(Blocks(whole.size, tuple(blocks))), squares**0.5


def norm(curvature: Curvature) -> float:
    """The Frobenius norm of curvatures that can be merged, and of what stands beside them."""
    if isinstance(curvature, Blocks):
        return sum(norm(block.curvature) ** 2 for block in curvature.blocks) ** 0.5
    if isinstance(curvature, Diagonal):
        return float(curvature.values.double().norm())
    if isinstance(curvature, Kronecker):
        return KroneckerSum((curvature,)).norm
    if isinstance(curvature, KroneckerSum):
        return curvature.norm
    return float((curvature.matrix if isinstance(curvature, Dense) else curvature.dense()).double().norm())


# -- the weights that tasks share, and those of a head -----------------------------------------------------------------


def split(curvature: Curvature, size: int) -> tuple[Curvature, Curvature]:
    """The curvature of the first `size` parameters, and that of the others, where nothing is between the two."""
    if isinstance(curvature, Diagonal):
        return Diagonal(curvature.values[:size].clone()), Diagonal(curvature.values[size:].clone())
    if isinstance(curvature, Blocks):
        sides: tuple[list[Block], list[Block]] = ([], [])
        for block in curvature.blocks:
            ends = block.segments.intervals[0][0], block.segments.intervals[-1][1]
            if ends[0] < size < ends[1]:
                raise _between(curvature)
            sides[ends[0] >= size].append(block)
        return _placed(sides[0], 0, size), _placed(sides[1], -size, curvature.size - size)
    raise _between(curvature)


def joined(shared: Curvature, head: Curvature) -> Curvature:
    """The curvature of both, side by side."""
    if isinstance(shared, Diagonal) and isinstance(head, Diagonal):
        return Diagonal(torch.cat([shared.values, head.values]))
    blocks = [*_blocks(shared), *_moved(_blocks(head), shared.size)]
    return Blocks(shared.size + head.size, tuple(blocks))


def _blocks(curvature: Curvature) -> list[Block]:
    if isinstance(curvature, Blocks):
        return list(curvature.blocks)
    return [Block("all", Segments(((0, curvature.size),)), curvature)]


def _placed(blocks: list[Block], by: int, size: int) -> Blocks:
    return Blocks(size, tuple(_moved(blocks, by)))


def _moved(blocks: list[Block], by: int) -> list[Block]:
    return [
        replace(b, segments=Segments(tuple((start + by, stop + by) for start, stop in b.segments.intervals)))
        for b in blocks
    ]


def _between(curvature: Curvature) -> OptionError:
    return OptionError(
        f"the curvature is a {type(curvature).__name__} with covariances between shared weights and a head, which no "
        "other task has; expected none where there are heads. Use structure='kron', 'ekfac', 'diag' or 'blocks', or "
        "one network for all tasks."
    )
