"""Blocks: a block-diagonal curvature whose blocks are any of the other structures, each on its own parameters.

Every operation is the blocks' own; memory and cost are their sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lapwing.errors import CurvatureError
from lapwing.linalg.checks import check_prior
from lapwing.linalg.contracts import Curvature, GroupedLogdet, Precision, same_kind
from lapwing.linalg.diagonal import Diagonal
from lapwing.linalg.layout import Segments
from lapwing.linalg.rows import Piece, Places


@dataclass(frozen=True, eq=False)
class Block:
    """A curvature in the local coordinates of `segments`; `name` is for people.

    `reason` says why a block has the structure it has, where the others have another.
    """

    name: str
    segments: Segments
    curvature: Curvature
    reason: str = ""

    @property
    def empty(self) -> bool:
        """Whether no data have reached these parameters."""
        return isinstance(self.curvature, Diagonal) and not bool(self.curvature.values.any())


@dataclass(frozen=True, eq=False)
class Blocks(Curvature):
    """Block-diagonal; the segments of the blocks cover 0..params without overlap."""

    params: int
    blocks: tuple[Block, ...]

    def __post_init__(self) -> None:
        covered = sorted(interval for block in self.blocks for interval in block.segments.intervals)
        at = 0
        for start, stop in covered:
            if start != at:
                raise CurvatureError(f"blocks leave out or repeat position {min(at, start)}; expected each once.")
            at = stop
        for block in self.blocks:
            if block.curvature.size != block.segments.size:
                raise CurvatureError(
                    f"block '{block.name}' has a curvature of size {block.curvature.size}; expected that of its "
                    f"segments, {block.segments.size}."
                )
        if at != self.params:
            raise CurvatureError(f"blocks cover {at} positions; expected {self.params} (= P).")

    @property
    def size(self) -> int:
        return self.params

    def __add__(self, other: Curvature) -> Blocks:
        """Block by block; parameters that the data of one of the two did not reach have the blocks of the other."""
        return self.joined(other, lambda a, b: a + b)

    def pooled(self, other: Curvature) -> Blocks:
        return self.joined(other, lambda a, b: a.pooled(b))

    def discounted(self, share: float) -> Blocks:
        return Blocks(self.size, tuple(replace(b, curvature=b.curvature.discounted(share)) for b in self.blocks))

    def fits(self, other: Blocks) -> bool:
        """Whether every block of the other is one of these, or has parameters that are in none: empty ones aside."""
        ours, theirs = ({b.segments for b in each.blocks if not b.empty} for each in (self, other))
        taken = sorted(interval for segments in ours | theirs for interval in segments.intervals)
        return all(stop <= start for (_, stop), (start, _) in pairwise(taken))

    def joined(self, other: Curvature, both: Callable[[Curvature, Curvature], Curvature]) -> Blocks:
        """Block by block, `both` of two that have the same place; where one of them is empty, the other."""
        other = same_kind(self, other)
        found = {block.segments: block for block in self.blocks}
        if list(found) != [block.segments for block in other.blocks]:
            found = {segments: block for segments, block in found.items() if not block.empty}
        for block in other.blocks:
            ours = found.get(block.segments)
            if ours is not None and not ours.empty and not block.empty:
                total = both(ours.curvature, block.curvature)
                found[block.segments] = replace(ours, curvature=total, reason=ours.reason or block.reason)
            elif not block.empty:
                found[block.segments] = block
        taken = sorted(interval for segments in found for interval in segments.intervals)
        if any(stop > start for (_, stop), (start, _) in pairwise(taken)):
            raise CurvatureError("cannot add block-diagonal curvatures with different blocks; fit both the same way.")
        like = self.blocks[0].curvature.diagonal()
        return covering(self.size, list(found.values()), like, self._name_at)

    def _name_at(self, position: int) -> str:
        return next(block.name for block in self.blocks if block.segments.contains((position, position + 1)))

    def __mul__(self, scale: float | int | Tensor) -> Blocks:
        return Blocks(self.size, tuple(replace(b, curvature=b.curvature * scale) for b in self.blocks))

    def mv(self, v: Float[Tensor, "*batch params"]) -> Float[Tensor, "*batch params"]:
        out = torch.empty_like(v)
        for block in self.blocks:
            block.segments.scatter(block.curvature.mv(block.segments.gather(v)), out)
        return out

    def diagonal(self) -> Float[Tensor, " params"]:
        parts = [block.curvature.diagonal() for block in self.blocks]
        out = parts[0].new_empty(self.size)
        for block, part in zip(self.blocks, parts, strict=True):
            block.segments.scatter(part, out)
        return out

    def dense(self) -> Float[Tensor, "params params"]:
        parts = [block.curvature.dense() for block in self.blocks]
        out = parts[0].new_zeros(self.size, self.size)
        position = torch.arange(self.size, device=out.device)
        for block, part in zip(self.blocks, parts, strict=True):
            where = block.segments.gather(position)
            out[where[:, None], where[None, :]] = part
        return out

    def with_prior(self, precision: float | int | Tensor) -> BlocksPrecision:
        # every block has it in a dtype and on a device of its own
        like = precision if isinstance(precision, Tensor) else torch.empty((), dtype=torch.float64)
        delta = check_prior(precision, self.size, like)
        parts = []
        for block in self.blocks:
            local = delta if delta.dim() == 0 else block.segments.gather(delta)
            parts.append((block.segments, block.curvature.with_prior(local)))
        return BlocksPrecision(self.size, tuple(parts))

    def grouped_logdet(self, groups: Int[Tensor, " params"] | None) -> BlocksLogdet:
        parts = [(block, None if groups is None else block.segments.gather(groups)) for block in self.blocks]
        return BlocksLogdet(tuple(block.curvature.grouped_logdet(local) for block, local in parts))

    def sweep(self, pieces: Sequence[Piece], precisions: Float[Tensor, " k"]) -> Float[Tensor, "k n r"]:
        assigned = Places([block.segments for block in self.blocks]).assigned(pieces)
        return _sum(self.blocks[i].curvature.sweep(local, precisions) for i, local in assigned)


@dataclass(frozen=True, eq=False)
class BlocksLogdet(GroupedLogdet):
    """The sum over blocks."""

    parts: tuple[GroupedLogdet, ...]

    def __call__(self, precisions: Float[Tensor, " groups"], scale: float | int | Tensor = 1) -> Float[Tensor, ""]:
        return torch.stack([part(precisions, scale) for part in self.parts]).sum()


@dataclass(frozen=True, eq=False)
class BlocksPrecision(Precision):
    params: int
    parts: tuple[tuple[Segments, Precision], ...]

    @property
    def size(self) -> int:
        return self.params

    @cached_property
    def _places(self) -> Places:
        return Places([segments for segments, _ in self.parts])

    def _gathered(self, values: Sequence[Tensor]) -> Tensor:
        """Parts in flat order, out of place so that gradients in the prior flow."""
        pieces = []
        for (segments, _), value in zip(self.parts, values, strict=True):
            lengths = [stop - start for start, stop in segments.intervals]
            pieces += zip(segments.intervals, value.split(lengths, dim=-1), strict=True)
        return torch.cat([piece for _, piece in sorted(pieces, key=lambda each: each[0])], dim=-1)

    def mv(self, v: Float[Tensor, "*batch params"]) -> Float[Tensor, "*batch params"]:
        return self._gathered([part.mv(segments.gather(v)) for segments, part in self.parts])

    def solve(self, v: Float[Tensor, "*batch params"]) -> Float[Tensor, "*batch params"]:
        if torch.is_grad_enabled() or v.dim() > 1:
            return self._gathered([part.solve(segments.gather(v)) for segments, part in self.parts])
        out = torch.empty_like(v)
        self.solve_into(v, out)
        return out

    def solve_into(self, v: Float[Tensor, " params"], out: Float[Tensor, " params"]) -> None:
        for segments, part in self.parts:
            if segments.span is None:
                segments.scatter(part.solve(segments.gather(v)), out)
            else:
                part.solve_into(v[segments.span], out[segments.span])

    def draw(self, n: int, generator: torch.Generator | None = None) -> Float[Tensor, "n params"]:
        return self._gathered([part.draw(n, generator) for _, part in self.parts])

    def logdet(self) -> Float[Tensor, ""]:
        return torch.stack([part.logdet() for _, part in self.parts]).sum()

    def variance(self) -> Float[Tensor, " params"]:
        return self._gathered([part.variance() for _, part in self.parts])

    def quadratic(self, pieces: Sequence[Piece]) -> Float[Tensor, "n r r"]:
        return _sum(self.parts[i][1].quadratic(local) for i, local in self._places.assigned(pieces))

    def squares(self, pieces: Sequence[Piece]) -> Float[Tensor, "n r"]:
        return _sum(self.parts[i][1].squares(local) for i, local in self._places.assigned(pieces))


def covering(size: int, found: Sequence[Block], like: Tensor, name: Callable[[int], str]) -> Blocks:
    """Blocks in parameter order; parameters in none of them have zero curvature, and a name by where they start."""
    blocks, at = list(found), 0
    used = sorted(interval for block in found for interval in block.segments.intervals)
    for start, stop in [*used, (size, size)]:
        if start > at:
            blocks.append(Block(name(at), Segments(((at, start),)), Diagonal(like.new_zeros(start - at))))
        at = stop
    return Blocks(size, tuple(sorted(blocks, key=lambda block: block.segments.intervals[0])))


def _sum(values: Iterable[Tensor]) -> Tensor:
    """One block after the other, so that no more than two are held."""
    return reduce(torch.add, values)
