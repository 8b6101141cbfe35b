"""Kronecker: one layer's curvature G (x) A / count, with its eigenbasis Q_G (x) Q_A. Memory O(O^2 + I^2).

The weight [O, I] is flat row-major, so the matrix is G (x) A in flat order; a bias is the last column, [a; 1].
K independent groups (grouped convolution) are K such products. The two sums and the count are stored and the
product is formed last, so any split of the data into batches gives the same curvature. An embedding's input side is
diagonal (token counts) and stored as such.

    >>> import torch
    >>> layout = MatrixLayout(0, (1, 2), (0, 1), groups=1, rows=1, cols=2)
    >>> A, G = torch.diag(torch.tensor([4.0, 2.0])), torch.tensor([[3.0]])
    >>> Kronecker(layout, (Term(A[None], G[None], 2.0),)).diagonal()
    tensor([6., 3.])
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.errors import CurvatureError
from lapwing.linalg.factors import (
    Factor,
    Term,
    add_terms,
    apply,
    block_priors,
    column_parts,
    cut,
    diagonal_of,
    eigen,
    factored_eigenvalues,
    joint_prior,
    last_entry,
    nearest_kronecker,
)
from lapwing.linalg.gram import Form, Lookup, Outer, add_grams, add_squares
from lapwing.linalg.psd import (
    Curvature,
    Multiple,
    Precision,
    check_positive,
    check_precisions,
    check_prior,
    check_rank,
    check_scale,
    normal,
    same_kind,
)
from lapwing.linalg.rotation import EigenPart, each_part, rotated, swept
from lapwing.linalg.rows import MatrixLayout, Piece, rows_of
from lapwing.linalg.sweep import outer_sweep


@dataclass(frozen=True, eq=False)
class Kronecker(Curvature):
    """G (x) A / count for one weight and its bias.

    `terms` has one entry per role the weight plays: one, except where it is also used transposed or as a lookup
    table (tied weights). Several roles are combined into the nearest single Kronecker product in Frobenius norm.
    `joint_bias=False` drops the correlation of weight and bias. `factored_damping` adds the prior to the factors,
    (A + w sqrt(d)) (x) (G + sqrt(d) / w) with w = sqrt(tr A dim G / (tr G dim A)) (thesis 4.25, trace norm), instead
    of to the product.
    """

    layout: MatrixLayout
    terms: tuple[Term, ...]
    joint_bias: bool = True
    factored_damping: bool = False
    multiple: Multiple[Kronecker] | None = field(default=None, repr=False)

    @property
    def size(self) -> int:
        return self.layout.groups * self.layout.rows * self.layout.width

    def __add__(self, other: Curvature) -> Kronecker:
        """Adds the sums and the counts: the curvature of both data sets, as if estimated in one pass."""
        other = same_kind(self, other)
        if self.layout != other.layout:
            raise CurvatureError(
                f"cannot add a Kronecker block with layout {other.layout} to one with {self.layout}; expected the same "
                "weight, used the same way. Fit both with one estimator and one model."
            )
        if (self.joint_bias, self.factored_damping) != (other.joint_bias, other.factored_damping):
            raise CurvatureError(
                "cannot add Kronecker blocks that differ in joint_bias or factored_damping; expected the same. Fit "
                "both with the same options."
            )
        return replace(self, terms=add_terms(self.terms, other.terms), multiple=None)

    def __mul__(self, scale: float | int | Tensor) -> Kronecker:
        scale, root = check_scale(scale), self.multiple or Multiple(self, 1)
        terms = tuple(replace(term, rows=term.rows * scale) for term in self.terms)
        return replace(self, terms=terms, multiple=Multiple(root.of, root.scale * scale))

    @cached_property
    def factors(self) -> tuple[Factor, Factor]:
        """A and G with the curvature G (x) A: the count is divided out of A."""
        if len(self.terms) == 1:
            (term,) = self.terms
            return term.cols * term.share, term.rows
        return nearest_kronecker(self.terms)

    def mv(self, v: Float[Tensor, "*batch params"]) -> Float[Tensor, "*batch params"]:
        cols, rows = self.factors
        matrix = self.layout.gather(v)
        out = torch.empty_like(matrix)
        for part in column_parts(self.layout, self.joint_bias):
            out[..., part] = apply(matrix[..., part], cut(cols, part), rows)
        return self._flat(out)

    def diagonal(self) -> Float[Tensor, " params"]:
        cols, rows = self.factors
        return self._flat(diagonal_of(rows)[:, :, None] * diagonal_of(cols)[:, None, :])

    def dense(self) -> Float[Tensor, "params params"]:
        return self.mv(torch.eye(self.size, dtype=self.terms[0].rows.dtype, device=self.terms[0].rows.device))

    def _flat(self, matrix: Float[Tensor, "*batch groups rows width"]) -> Float[Tensor, "*batch params"]:
        out = matrix.new_zeros(*matrix.shape[:-3], self.size)
        self.layout.scatter_add(matrix, out)
        return out

    @cached_property
    def eigen_rows(self) -> tuple[Tensor, Tensor | None]:
        """Eigenvalues of the output factor, and its eigenvectors (None: the unit vectors)."""
        if self.multiple is not None:
            values, vectors = self.multiple.of.eigen_rows
            return values * self.multiple.scale, vectors
        return eigen(self.factors[1], "the output factor of a Kronecker block")

    @cached_property
    def _eigen_joint(self) -> list[tuple[Tensor, Tensor | None]]:
        if self.multiple is not None:
            return self.multiple.of._eigen_joint
        return [eigen(cut(self.factors[0], part), "an input factor") for part in column_parts(self.layout, joint=True)]

    @cached_property
    def _eigen_separate(self) -> list[tuple[Tensor, Tensor | None]]:
        if self.multiple is not None:
            return self.multiple.of._eigen_separate
        return [eigen(cut(self.factors[0], part), "an input factor") for part in column_parts(self.layout, joint=False)]

    def with_prior(self, precision: float | int | Tensor) -> KroneckerPrecision:
        """Exact for one precision, or one for the weight and one for the bias (which then decouples the two)."""
        deltas, equal = block_priors(self.layout, check_prior(precision, self.size, self.terms[0].rows))
        joint = self.joint_bias and equal
        row_values, parts = self.eigen_rows[0], []
        for i, (part, col_values) in enumerate(self.eigenparts(joint)):
            delta = deltas[min(i, len(deltas) - 1)]
            if joint:  # equal numbers, but perhaps two variables
                delta = joint_prior(deltas, last_entry(col_values, part.col_vectors))
            if self.factored_damping:
                values = factored_eigenvalues(row_values, col_values, delta.mean())
            else:
                values = part.values + delta
            check_positive(values.detach(), "Kronecker curvature + prior")
            self._check_ranks(col_values, part, delta)
            parts.append(replace(part, values=values))
        return KroneckerPrecision(self.layout, tuple(parts))

    def sweep(self, pieces: Sequence[Piece], precisions: Float[Tensor, " k"]) -> Float[Tensor, "k n r"]:
        """Exact where rows are formed; without sharing to a relative 1e-6, by interpolation (see `sweep.py`)."""
        if self.factored_damping:
            return super().sweep(pieces, precisions)
        row_values = self.eigen_rows[0]
        precisions = check_precisions(precisions).to(row_values)
        found = self.eigenparts(self.joint_bias)
        cols = {part.part.start: col_values for part, col_values in found}
        for part, _ in found:
            check_positive((part.values.min() + precisions.min()).detach(), "Kronecker curvature + prior")
            self._check_ranks(cols[part.part.start], part, precisions)

        def outer(form: Outer, part: EigenPart) -> Tensor:
            return outer_sweep(form, row_values, cols[part.part.start], precisions)

        return swept(self.layout, [part for part, _ in found], pieces, precisions, outer)

    def _check_ranks(self, col_values: Tensor, part: EigenPart, delta: Tensor) -> None:
        """Each factor by its own rounding; counts of tokens, which stand for themselves, have none."""
        if part.row_vectors is not None:
            check_rank(self.eigen_rows[0], delta, "the output factor of a Kronecker block")
        if part.col_vectors is not None:
            check_rank(col_values, delta, "the input factor of a Kronecker block")

    def eigenparts(self, joint: bool) -> list[tuple[EigenPart, Tensor]]:
        """Eigenvectors and eigenvalues of the block, or (`joint=False`) of weight and bias apart, each with the
        eigenvalues of its input factor.
        """
        row_values, row_vectors = self.eigen_rows
        return [
            (EigenPart(part, row_vectors, col_vectors, row_values[:, :, None] * col_values[:, None, :]), col_values)
            for part, (col_values, col_vectors) in zip(
                column_parts(self.layout, joint), self._eigen_joint if joint else self._eigen_separate, strict=True
            )
        ]


@dataclass(frozen=True, eq=False)
class KroneckerPrecision(Precision):
    """Q diag(values) Q^T with Q = Q_G (x) Q_A and any eigenvalues, those of a product or corrected ones."""

    layout: MatrixLayout
    parts: tuple[EigenPart, ...]

    @property
    def size(self) -> int:
        return self.layout.groups * self.layout.rows * self.layout.width

    def mv(self, v: Float[Tensor, "*batch params"]) -> Float[Tensor, "*batch params"]:
        matrix = self.layout.gather(v)
        return each_part(self.layout, self.parts, lambda part: part.multiplied(matrix[..., part.part]))

    def solve(self, v: Float[Tensor, "*batch params"]) -> Float[Tensor, "*batch params"]:
        matrix = self.layout.gather(v)
        return each_part(self.layout, self._inverse, lambda part: part.multiplied(matrix[..., part.part]))

    def draw(self, n: int, generator: torch.Generator | None = None) -> Float[Tensor, "n params"]:
        shape = (n, self.layout.groups, self.layout.rows, self.layout.width)
        noise = normal(shape, self.parts[0].values, generator)
        return each_part(
            self.layout, self.parts, lambda part: part.rotate_back(noise[..., part.part] * part.values.rsqrt())
        )

    def logdet(self) -> Float[Tensor, ""]:
        return torch.stack([part.values.log().sum() for part in self.parts]).sum()

    def variance(self) -> Float[Tensor, " params"]:
        return each_part(self.layout, self._inverse, EigenPart.diagonal)

    @property
    def _inverse(self) -> list[EigenPart]:
        return [replace(part, values=part.values.reciprocal()) for part in self.parts]

    def quadratic(self, pieces: Sequence[Piece]) -> Float[Tensor, "n r r"]:
        """Without sharing sum_j (g Q_G)_j (g' Q_G)_j [(a Q_A)^2 D^T]_j, with D the inverse eigenvalues."""
        return add_grams(self._weighted(pieces), *rows_of(pieces[0]))

    def squares(self, pieces: Sequence[Piece]) -> Float[Tensor, "n r"]:
        return add_squares(self._weighted(pieces), *rows_of(pieces[0]))

    def _weighted(self, pieces: Sequence[Piece]) -> Iterator[tuple[slice, Form, Tensor]]:
        for points, form, part in rotated(self.layout, self._inverse, pieces):
            # a lookup has one weight per entry of the table, and the table is one group
            yield points, form, part.values[0] if isinstance(form, Lookup) else part.values
