"""Stages: a fit as passes over the data, the parts of each of which add up. What a checkpoint cuts a fit into.

    OnePass     the curvature itself
    InBasis     ekfac: the Kronecker factors of all data, then the diagonal in their eigenbasis
    Iterated    lowrank: the rows, if they are few; else a pass of subspace iteration after the other

A stage is known by its number, and by the sum so far, which has the basis in it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch

from lapwing.estimate import leading_eigenpairs
from lapwing.estimate.data_pass import Batches
from lapwing.estimate.leading_eigenpairs import first_subspace, from_gram, gram_part, pieces_of, times_basis
from lapwing.laplace.structures import AnyTangent, Recipe
from lapwing.likelihoods import Likelihood
from lapwing.linalg import Curvature, Dual, Subspace
from lapwing.linalg.addends import Sum
from lapwing.tangent import Tangent


@dataclass(frozen=True, eq=False)
class Stage(ABC):
    """One pass. `base` is what the pass before has found, or the curvature that this one will be added to."""

    recipe: Recipe
    number: int = 0
    base: Sum | None = None

    @abstractmethod
    def part(
        self,
        tangent: AnyTangent,
        likelihood: Likelihood,
        batches: Batches,
        generator: torch.Generator | None,
        total: Sum | None,
    ) -> Sum:
        """Of some batches; `total` is that of those before."""

    @abstractmethod
    def following(self, total: Sum, tangent: AnyTangent) -> Stage | None:
        """The next pass, if there is one."""

    def ended(self, total: Sum | None) -> bool:
        """Whether the rest of the data need not be read."""
        return False

    def result(self, total: Sum, tangent: AnyTangent) -> Curvature:
        """What the last pass has found."""
        assert isinstance(total, Curvature)
        return total


@dataclass(frozen=True, eq=False)
class OnePass(Stage):
    """A curvature that adds up as it is."""

    @property
    def taken(self) -> Recipe:
        """What this pass estimates."""
        return self.recipe

    def part(
        self,
        tangent: AnyTangent,
        likelihood: Likelihood,
        batches: Batches,
        generator: torch.Generator | None,
        total: Sum | None,
    ) -> Sum:
        before = self.base if total is None else total
        assert before is None or isinstance(before, Curvature)
        return self.taken(tangent, likelihood, batches, generator, before)

    def following(self, total: Sum, tangent: AnyTangent) -> Stage | None:
        return None


@dataclass(frozen=True, eq=False)
class InBasis(OnePass):
    """Kronecker factors (0), and the diagonal in their eigenbasis (1)."""

    @property
    def taken(self) -> Recipe:
        return self.recipe if self.number else replace(self.recipe, structure="kron")

    def following(self, total: Sum, tangent: AnyTangent) -> Stage | None:
        return None if self.number else replace(self, number=1, base=total)


@dataclass(frozen=True, eq=False)
class Iterated(Stage):
    """Rows (0), and where they are more than a Gram matrix is made of, products with a basis (1, 2, ...)."""

    @property
    def rank(self) -> int:
        return self.recipe.options["rank"]

    def part(
        self,
        tangent: AnyTangent,
        likelihood: Likelihood,
        batches: Batches,
        generator: torch.Generator | None,
        total: Sum | None,
    ) -> Sum:
        assert isinstance(tangent, Tangent)
        rows = pieces_of(tangent, likelihood, batches, self.recipe.cotangents, generator)
        if self.number == 0:
            return gram_part(tangent.space.size, rows, leading_eigenpairs.GRAM_ROWS)
        before = self.base if total is None else total
        assert isinstance(before, Subspace)
        return Subspace(before.basis, times_basis(rows, before.basis))

    def ended(self, total: Sum | None) -> bool:
        return isinstance(total, Dual) and total.rows.count > leading_eigenpairs.GRAM_ROWS

    def following(self, total: Sum, tangent: AnyTangent) -> Stage | None:
        if isinstance(total, Dual):
            start = first_subspace(tangent.space, self.rank)
            return replace(self, number=1, base=start) if self.ended(total) else None
        assert isinstance(total, Subspace)
        last = self.number == leading_eigenpairs.PASSES
        return None if last else replace(self, number=self.number + 1, base=Subspace.spanned(total.product))

    def result(self, total: Sum, tangent: AnyTangent) -> Curvature:
        if isinstance(total, Dual):
            return from_gram(total, self.rank)
        assert isinstance(total, Subspace)
        return total.leading(self.rank, tangent.space.dtype)


SEVERAL: dict[str, type[Stage]] = {"ekfac": InBasis, "lowrank": Iterated}
"""Structures that are no sum over data, but end in one after several passes that are."""


def stage_of(recipe: Recipe, before: Curvature | None, number: int | None = None) -> Stage:
    """The stage of a number, or the first; of data that are added to others (`before`), in the basis of those."""
    kind = SEVERAL.get(recipe.structure, OnePass)
    if number is None:
        number = 1 if kind is InBasis and before is not None else 0
    return kind(recipe, number, before)
