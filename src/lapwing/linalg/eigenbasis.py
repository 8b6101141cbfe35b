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
    apply,
    cut,
    diagonal_of,
    eigen,
    factored_eigenvalues,
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
    check_scale,
    normal,
    same_kind,
)
from lapwing.linalg.rotation import EigenPart, rotated
from lapwing.linalg.rows import DEFAULT_BUDGET, MatrixLayout, Piece, rows_of
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
        if len(self.terms) != len(other.terms):
            raise CurvatureError(
                f"cannot add {len(other.terms)} Kronecker terms to {len(self.terms)}; expected a weight in the same "
                "roles. Fit both with one estimator and one model."
            )
        if (self.joint_bias, self.factored_damping) != (other.joint_bias, other.factored_damping):
            raise CurvatureError(
                "cannot add Kronecker blocks that differ in joint_bias or factored_damping; expected the same. Fit "
                "both with the same options."
            )
        terms = tuple(a + b for a, b in zip(self.terms, other.terms, strict=True))
        return replace(self, terms=terms, multiple=None)

    def __mul__(self, scale: float | int | Tensor) -> Kronecker:
        scale, root = check_scale(scale), self.multiple or Multiple(self, 1)
        terms = tuple(replace(term, rows=term.rows * scale) for term in self.terms)
        return replace(self, terms=terms, multiple=Multiple(root.of, root.scale * scale))

    @cached_property
    def factors(self) -> tuple[Factor, Factor]:
        """A and G with the curvature G (x) A: the count is divided out of A."""
        if len(self.terms) == 1:
            (term,) = self.terms
            return term.cols / max(term.count, 1), term.rows
        return nearest_kronecker(self.terms)

    def mv(self, v: Float[Tensor, "*batch params"]) -> Float[Tensor, "*batch params"]:
        cols, rows = self.factors
        matrix = self.layout.gather(v)
        out = torch.empty_like(matrix)
        for part in self._parts(self.joint_bias):
            out[..., part] = apply(matrix[..., part], cut(cols, part), rows)
        return self._flat(out)

    def diagonal(self) -> Float[Tensor, " params"]:
        cols, rows = self.factors
        return self._flat(diagonal_of(rows)[:, :, None] * diagonal_of(cols)[:, None, :])

    def dense(self) -> Float[Tensor, "params params"]:
        return self.mv(torch.eye(self.size, dtype=self.terms[0].rows.dtype, device=self.terms[0].rows.device))

    def _parts(self, joint: bool) -> list[slice]:
        if joint or self.layout.bias is None:
            return [slice(0, self.layout.width)]
        return [slice(0, self.layout.cols), slice(self.layout.cols, self.layout.width)]

    def _flat(self, matrix: Float[Tensor, "*batch groups rows width"]) -> Float[Tensor, "*batch params"]:
        out = matrix.new_zeros(*matrix.shape[:-3], self.size)
        self.layout.scatter_add(matrix, out)
        return out

    @cached_property
    def _eigen_rows(self) -> tuple[Tensor, Tensor | None]:
        if self.multiple is not None:
            values, vectors = self.multiple.of._eigen_rows
            return values * self.multiple.scale, vectors
        return eigen(self.factors[1], "the output factor of a Kronecker block")

    @cached_property
    def _eigen_joint(self) -> list[tuple[Tensor, Tensor | None]]:
        if self.multiple is not None:
            return self.multiple.of._eigen_joint
        return [eigen(cut(self.factors[0], part), "an input factor") for part in self._parts(joint=True)]

    @cached_property
    def _eigen_separate(self) -> list[tuple[Tensor, Tensor | None]]:
        if self.multiple is not None:
            return self.multiple.of._eigen_separate
        return [eigen(cut(self.factors[0], part), "an input factor") for part in self._parts(joint=False)]

    def with_prior(self, precision: float | int | Tensor) -> KroneckerPrecision:
        """Exact for one precision, or one for the weight and one for the bias (which then decouples the two)."""
        deltas, equal = self._priors(check_prior(precision, self.size, self.terms[0].rows))
        joint = self.joint_bias and equal
        row_values, row_vectors = self._eigen_rows
        parts = []
        for i, (part, (col_values, col_vectors)) in enumerate(
            zip(self._parts(joint), self._eigen_joint if joint else self._eigen_separate, strict=True)
        ):
            delta = deltas[min(i, len(deltas) - 1)]
            if joint and len(deltas) == 2:  # equal numbers, but perhaps two variables
                delta = self._both(deltas, col_values, col_vectors)
            if self.factored_damping:
                values = factored_eigenvalues(row_values, col_values, delta.mean())
            else:
                values = row_values[:, :, None] * col_values[:, None, :] + delta
            check_positive(values.detach(), "Kronecker curvature + prior")
            parts.append(EigenPart(part, row_vectors, col_vectors, values))
        return KroneckerPrecision(self.layout, tuple(parts))

    def sweep(self, pieces: Sequence[Piece], precisions: Float[Tensor, " k"]) -> Float[Tensor, "k n r"]:
        """Exact where rows are formed; without sharing to a relative 1e-6, by interpolation (see `sweep.py`)."""
        if self.factored_damping:
            return super().sweep(pieces, precisions)
        row_values, row_vectors = self._eigen_rows
        precisions = check_precisions(precisions).to(row_values)
        eigen_cols = self._eigen_joint if self.joint_bias else self._eigen_separate
        parts, cols = [], {}
        for part, (col_values, col_vectors) in zip(self._parts(self.joint_bias), eigen_cols, strict=True):
            values = row_values[:, :, None] * col_values[:, None, :]
            check_positive((values.min() + precisions.min()).detach(), "Kronecker curvature + prior")
            parts.append(EigenPart(part, row_vectors, col_vectors, values))
            cols[part.start] = col_values
        count, batch = rows_of(pieces[0])
        total = row_values.new_zeros(len(precisions), batch, count)
        for points, form, part in rotated(self.layout, parts, pieces, DEFAULT_BUDGET // 4):
            if isinstance(form, Outer):
                total[:, points] += outer_sweep(form, row_values, cols[part.part.start], precisions)
            else:
                values = part.values[0] if isinstance(form, Lookup) else part.values
                total[:, points] += form.sweep(values, precisions)
        return total

    def _both(self, deltas: list[Tensor], col_values: Tensor, col_vectors: Tensor | None) -> Tensor:
        """The prior of weight and bias, each by its share of an eigenvector: the derivative of logdet is then exact."""
        bias = last_entry(col_values, col_vectors).square().unsqueeze(1)
        return deltas[0] + (deltas[1] - deltas[0]) * bias

    def _priors(self, delta: Tensor) -> tuple[list[Tensor], bool]:
        """One prior precision for the block, or one each for weight and bias; and whether these are equal."""
        if delta.dim() == 0:
            return [delta], True
        matrix = self.layout.gather(delta)
        parts = [matrix[..., part] for part in self._parts(joint=False)]
        for values in parts:
            if bool((values != values.reshape(-1)[0]).any()):
                raise CurvatureError(
                    "the prior precision differs within one weight; a Kronecker block carries one value per weight and "
                    "one per bias. Use a layerwise or per-tensor prior, or a diagonal, block or full structure."
                )
        equal = bool(parts[0].reshape(-1)[0] == parts[-1].reshape(-1)[0])
        return [values.mean() for values in parts], equal


@dataclass(frozen=True, eq=False)
class KroneckerPrecision(Precision):
    """Q diag(values) Q^T with Q = Q_G (x) Q_A."""

    layout: MatrixLayout
    parts: tuple[EigenPart, ...]

    @property
    def size(self) -> int:
        return self.layout.groups * self.layout.rows * self.layout.width

    def _map(self, matrix: Tensor, function) -> Tensor:
        out = torch.cat([function(part, matrix[..., part.part]) for part in self.parts], dim=-1)
        flat = out.new_zeros(*out.shape[:-3], self.size)
        self.layout.scatter_add(out, flat)
        return flat

    def mv(self, v: Float[Tensor, "*batch params"]) -> Float[Tensor, "*batch params"]:
        return self._map(self.layout.gather(v), lambda part, m: part.rotate_back(part.rotate(m) * part.values))

    def solve(self, v: Float[Tensor, "*batch params"]) -> Float[Tensor, "*batch params"]:
        return self._map(self.layout.gather(v), lambda part, m: part.rotate_back(part.rotate(m) / part.values))

    def draw(self, n: int, generator: torch.Generator | None = None) -> Float[Tensor, "n params"]:
        shape = (n, self.layout.groups, self.layout.rows, self.layout.width)
        noise = normal(shape, self.parts[0].values, generator)
        return self._map(noise, lambda part, z: part.rotate_back(z * part.values.rsqrt()))

    def logdet(self) -> Float[Tensor, ""]:
        return torch.stack([part.values.log().sum() for part in self.parts]).sum()

    def variance(self) -> Float[Tensor, " params"]:
        def squared(vectors: Tensor | None) -> Tensor | None:
            return None if vectors is None else vectors.square()

        def diagonal(part: EigenPart, _: Tensor) -> Tensor:
            rotation = replace(part, row_vectors=squared(part.row_vectors), col_vectors=squared(part.col_vectors))
            return rotation.rotate_back(part.values.reciprocal())

        shape = (self.layout.groups, self.layout.rows, self.layout.width)
        return self._map(self.parts[0].values.new_empty(shape), diagonal)

    def quadratic(self, pieces: Sequence[Piece]) -> Float[Tensor, "n r r"]:
        """Without sharing sum_j (g Q_G)_j (g' Q_G)_j [(a Q_A)^2 D^T]_j, with D the inverse eigenvalues."""
        return add_grams(self._weighted(pieces), *rows_of(pieces[0]))

    def squares(self, pieces: Sequence[Piece]) -> Float[Tensor, "n r"]:
        return add_squares(self._weighted(pieces), *rows_of(pieces[0]))

    def _weighted(self, pieces: Sequence[Piece]) -> Iterator[tuple[slice, Form, Tensor]]:
        for points, form, part in rotated(self.layout, self.parts, pieces):
            # a lookup has one weight per entry of the table, and the table is one group
            weight = part.values.reciprocal()
            yield points, form, weight[0] if isinstance(form, Lookup) else weight
