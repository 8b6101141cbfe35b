"""DualPrecision: scale R^T R + D [P, P] by its M rows R, in factored form, and the decomposed I + K [M, M].

solve, draw             O(M P)
quadratic, squares      O(M (O + I)) per row and layer without sharing, and O(M^2) per row
variance                O(M^2 P): columns of R are spelled out, a few at a time
inverse_trace           O(M^2 (O + I)) per layer where the prior and the groups are constant on tensors
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lapwing.linalg.checks import normal
from lapwing.linalg.contracts import Precision
from lapwing.linalg.dense import DensePrecision
from lapwing.linalg.diagonal import DiagonalPrecision
from lapwing.linalg.row_products import taken
from lapwing.linalg.row_set import RowSet
from lapwing.linalg.rows import DEFAULT_BUDGET, Piece, chunks, rows_of


@dataclass(frozen=True, eq=False)
class DualPrecision(Precision):
    """scale R^T R + D, by R, D^-1 (a number or [P]) and the decomposed I + K; `blocks` is D^-1 if constant on blocks.

    `blocks` is None for any other vector; then products with other rows cost O(M P) per row.
    """

    rows: RowSet
    roots: Float[Tensor, " m"]
    scale: Float[Tensor, ""]
    weight: Float[Tensor, ""] | Float[Tensor, " params"]
    blocks: Float[Tensor, " blocks"] | None
    core: DensePrecision

    @property
    def size(self) -> int:
        return self.rows.size

    def mv(self, v: Float[Tensor, "*batch params"]) -> Float[Tensor, "*batch params"]:
        flat = v.reshape(-1, self.size).double()
        moved = self.rows.pull(self.rows.push(flat) * self.roots.square())
        return (self.scale * moved + flat / self.weight).to(v.dtype).reshape(v.shape)

    def solve(self, v: Float[Tensor, "*batch params"]) -> Float[Tensor, "*batch params"]:
        flat = v.reshape(-1, self.size).double() * self.weight
        inner = self.core.solve(self.rows.push(flat) * self.roots) * self.roots
        return (flat - self.scale * self.weight * self.rows.pull(inner)).to(v.dtype).reshape(v.shape)

    def draw(self, n: int, generator: torch.Generator | None = None) -> Float[Tensor, "n params"]:
        """A draw of the prior, moved by what the data, with noise of their own, say of it: exact, not approximate."""
        theta = normal((n, self.size), self._like(), generator).double() * self.weight.sqrt()
        noise = normal((n, self.rows.count), self.roots, generator)
        root = self.scale.sqrt() * self.roots
        seen = self.core.solve(self.rows.push(theta) * root + noise)
        return (theta - self.weight * self.rows.pull(seen * root)).to(self.rows.dtype)

    def logdet(self) -> Float[Tensor, ""]:
        return (self.core.logdet() + self.prior_logdet()).to(self.rows.dtype)

    def prior_logdet(self) -> Float[Tensor, ""]:
        """log det D, in float64."""
        return -self.weight.log().sum() * (self.size if self.weight.dim() == 0 else 1)

    def variance(self) -> Float[Tensor, " params"]:
        inverse = self.core.solve(torch.diag(self.roots)) * self.roots
        seen = self.rows.traced(self.rows.stacks, inverse)
        return (self.weight - self.scale * self.weight.square() * seen).to(self.rows.dtype)

    def inverse_trace(self, groups: Int[Tensor, " params"] | None = None) -> Float[Tensor, " groups"]:
        """By block, tr(D_b^-1) - tr(D_b^-1 R_b^T (I + K)^-1 R_b D_b^-1): O(M^2) per block beside its Gram matrix."""
        numbers = self._group_of_blocks(groups)
        if self.blocks is None or numbers is None:
            return super().inverse_trace(groups)
        inverse = self.core.solve(torch.diag(self.roots)) * self.roots
        grams = self.rows.block_grams(self.rows.stacks)
        seen = [weight.square() * (inverse * gram).sum() for weight, gram in zip(self.blocks, grams, strict=True)]
        weight = self.weight.expand(self.size)
        if groups is None:
            groups = torch.zeros(self.size, dtype=torch.int64, device=weight.device)
        total = weight.new_zeros(int(groups.max()) + 1).index_add(0, groups, weight)
        return (total - self.scale * torch.zeros_like(total).index_add(0, numbers, torch.stack(seen))).to(
            self.rows.dtype
        )

    def _group_of_blocks(self, groups: Tensor | None) -> Int[Tensor, " blocks"] | None:
        """The group of every block; None if one holds several, or if the groups are to be refused."""
        starts = torch.tensor([start for start, _ in self.rows.blocks], device=self.roots.device)
        if groups is None:
            return torch.zeros_like(starts)
        if groups.shape != (self.size,) or bool((groups < 0).any()):
            return None
        if any(bool((groups[start:stop] != groups[start]).any()) for start, stop in self.rows.blocks):
            return None
        return groups[starts]

    def quadratic(self, pieces: Sequence[Piece]) -> Float[Tensor, "n r r"]:
        prior = DiagonalPrecision(self.weight.reciprocal().expand(self.size))
        found = []
        for own, cross in self.crossed(pieces):
            white = self.core.whiten(cross)
            found.append(prior.quadratic(own) - self.scale * (white @ white.mT))
        return torch.cat(found).to(self.rows.dtype)

    def squares(self, pieces: Sequence[Piece]) -> Float[Tensor, "n r"]:
        prior = DiagonalPrecision(self.weight.reciprocal().expand(self.size))
        found = []
        for own, cross in self.crossed(pieces):
            found.append(prior.squares(own) - self.scale * self.core.whiten(cross).square().sum(-1))
        return torch.cat(found).to(self.rows.dtype)

    def crossed(self, pieces: Sequence[Piece]) -> Iterator[tuple[list[Piece], Float[Tensor, "n r m"]]]:
        """Other rows in float64, a few data points at a time, and their products R' D^-1 R^T with these rows."""
        count, batch = rows_of(pieces[0])
        for points in chunks(batch, 4 * 8 * count * self.rows.count, DEFAULT_BUDGET):
            own = [taken(piece, points) for piece in pieces]
            yield own, (self._cross(own).mT * self.roots).unflatten(0, (-1, count))

    def _cross(self, pieces: Sequence[Piece]) -> Float[Tensor, "m rows"]:
        """R D^-1 R'^T for other rows R'."""
        other = self.rows.among(pieces)
        if self.blocks is None:
            return self.rows.weighted(other, self.weight)
        grams = zip(self.blocks, self.rows.block_grams(other), strict=True)
        weight, first = next(grams)
        total = weight * first
        for weight, gram in grams:
            total = total + weight * gram
        return total

    def _like(self) -> Tensor:
        return torch.empty((), dtype=self.rows.dtype, device=self.rows.device)
