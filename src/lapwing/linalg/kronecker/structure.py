"""Kronecker: one layer's curvature G (x) A / count, with its eigenbasis Q_G (x) Q_A. Memory O(O^2 + I^2).

The weight [O, I] is flat row-major, so the matrix is G (x) A in flat order; a bias is the last column, [a; 1].
K independent groups (grouped convolution) are K such products. The two sums and the count are stored and the
product is formed last: `pooled` adds sums and counts, so that any split of one data set gives the same curvature. `+`
is the sum of two matrices, as of two tasks, which is no product: `KroneckerSum` keeps its terms. An embedding's input
side is diagonal (token counts) and stored as such.

    >>> import torch
    >>> layout = MatrixLayout(0, (1, 2), (0, 1), groups=1, rows=1, cols=2)
    >>> A, G = torch.diag(torch.tensor([4.0, 2.0])), torch.tensor([[3.0]])
    >>> Kronecker(layout, (Term(A[None], G[None], 2.0),)).diagonal()
    tensor([6., 3.])
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from itertools import combinations, product
from typing import Generic, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lapwing.errors import CurvatureError, LapwingWarning
from lapwing.linalg.checks import check_finite, check_positive, check_precisions, check_rank, check_scale
from lapwing.linalg.contracts import Curvature, GroupedLogdet, Multiple, Precision, same_kind
from lapwing.linalg.dense import Dense
from lapwing.linalg.kronecker.block_prior import BlockPrior
from lapwing.linalg.kronecker.corrected import CorrectedKronecker, EigenColumns, ties_of
from lapwing.linalg.kronecker.factored import DampedPart, FactoredPrecision, damped
from lapwing.linalg.kronecker.factors import (
    Factor,
    Term,
    add_terms,
    apply,
    column_parts,
    cut,
    diagonal_of,
    eigen,
    factored_eigenvalues,
    factored_shares,
    inner,
    joint_prior,
    last_entry,
    nearest_kronecker,
    rotated_diagonal,
)
from lapwing.linalg.kronecker.precision import KroneckerPrecision
from lapwing.linalg.kronecker.rotation import EigenPart, swept
from lapwing.linalg.kronecker.sweep import outer_sweep
from lapwing.linalg.layout import MatrixLayout
from lapwing.linalg.rows import OuterRows, Piece


@dataclass(frozen=True, eq=False)
class Kronecker(BlockPrior):
    """G (x) A / count for one weight and its bias.

    `terms` has one entry per role the weight plays: one, except where it is also used transposed or as a lookup
    table (tied weights). Several roles are combined into the nearest single Kronecker product in Frobenius norm.
    `joint_bias=False` drops the correlation of weight and bias. `factored_damping` adds the prior to the factors,
    (A + w sqrt(d)) (x) (G + sqrt(d) / w) with w = sqrt(tr A dim G / (tr G dim A)) (thesis 4.25, trace norm), instead
    of to the product; "plain" has w = 1, with A the mean of a a^T over the data and G the sum of g g^T.
    """

    layout: MatrixLayout
    terms: tuple[Term, ...]
    joint_bias: bool = True
    factored_damping: bool | str = False
    multiple: Multiple[Kronecker] | None = field(default=None, repr=False)

    @property
    def size(self) -> int:
        return self.layout.groups * self.layout.rows * self.layout.width

    def __add__(self, other: Curvature) -> KroneckerSum:
        """The sum of the two matrices; both products are kept."""
        return _added(self, other)

    def pooled(self, other: Curvature) -> Kronecker:
        """Adds the sums and the counts: the curvature of both data sets, as if estimated in one pass."""
        other = same_kind(self, other)
        _check_alike(self, other)
        scales = [1 if each.multiple is None else each.multiple.scale for each in (self, other)]
        if not bool(torch.as_tensor(scales[0] == scales[1])):
            raise CurvatureError(
                f"cannot pool Kronecker blocks multiplied by {float(scales[0]):.4g} and {float(scales[1]):.4g}; "
                "expected equal scales, as of batches of one data set. Add them with +, which keeps both products."
            )
        return replace(self, terms=add_terms(self.terms, other.terms), multiple=None)

    def discounted(self, share: float) -> Kronecker:
        """Both sums and the count, each times `share`: averages of the two factors, and not of their product."""
        terms = tuple(replace(t, cols=t.cols * share, rows=t.rows * share, count=t.count * share) for t in self.terms)
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
            return term.mean_cols, term.rows
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

    @property
    def like(self) -> Tensor:
        return self.terms[0].rows

    def with_block_priors(
        self, deltas: Sequence[Float[Tensor, ""]], equal: bool
    ) -> KroneckerPrecision | FactoredPrecision:
        joint = self.joint_bias and equal
        if self.factored_damping and all(float(delta.detach()) > 0 for delta in deltas) and not self._followed(deltas):
            return self._factored(deltas, joint)
        return self._in_eigenbasis(deltas, joint)

    def _followed(self, deltas: Sequence[Tensor]) -> bool:
        """Whether derivatives are taken, which are those of eigenvalues."""
        return any(each.requires_grad for each in (*deltas, *self.factors))

    def _factored(self, deltas: Sequence[Tensor], joint: bool) -> FactoredPrecision:
        """Damping that is split between the factors, which are then not decomposed unless asked."""
        cols, rows = self.factors
        check_finite(cols, "the input factor of a Kronecker block")
        check_finite(rows, "the output factor of a Kronecker block")
        parts = []
        for i, part in enumerate(column_parts(self.layout, joint)):
            inside = cut(cols, part)
            means = diagonal_of(inside).mean(1), diagonal_of(rows).mean(1)
            by = factored_shares(*means, deltas[min(i, len(deltas) - 1)], self.factored_damping == "plain")
            parts.append(DampedPart(part, damped(inside, by[0]), damped(rows, by[1])))
        return FactoredPrecision(self.layout, tuple(parts), lambda: self._in_eigenbasis(deltas, joint))

    def _in_eigenbasis(self, deltas: Sequence[Tensor], joint: bool) -> KroneckerPrecision:
        row_values, parts = self.eigen_rows[0], []
        for i, (part, col_values) in enumerate(self.eigenparts(joint)):
            delta = deltas[min(i, len(deltas) - 1)]
            if joint:  # equal numbers, but perhaps two variables
                delta = joint_prior(deltas, last_entry(col_values, part.col_vectors))
            if self.factored_damping:
                values = factored_eigenvalues(row_values, col_values, delta.mean(), self.factored_damping == "plain")
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

        def outer(rows: OuterRows, part: EigenPart) -> Tensor:
            return outer_sweep(rows, row_values, cols[part.part.start], precisions)

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

    def in_eigenbasis(self) -> CorrectedKronecker:
        """The same matrix as one that is diagonal in its eigenbasis: L = l_G l_A^T."""

        def columns(joint: bool) -> tuple[EigenColumns, ...]:
            return tuple(
                EigenColumns(part.part.start, part.col_vectors, part.values, ties_of(col_values, part.col_vectors))
                for part, col_values in self.eigenparts(joint)
            )

        row_values, row_vectors = self.eigen_rows
        apart = columns(False) if self.joint_bias and self.layout.bias is not None else ()
        ties = ties_of(row_values, row_vectors)
        return CorrectedKronecker(self.layout, row_vectors, columns(self.joint_bias), apart, ties, power=1)


DENSE_LIMIT = 2048
"""Weights of a sum of products that is decomposed as one dense matrix: 33 MB, and a few seconds."""
TERMS_LIMIT = 2**30
"""Bytes of factors that a sum keeps; beyond, the two terms that lose least by it become one, with a warning."""


Part = TypeVar("Part", bound=Curvature)


class TermSum(Curvature, Generic[Part]):
    """A sum that is kept as its terms: products with vectors, the diagonal and the dense form are exact.

    With a prior, `decomposed` takes its place.
    """

    parts: tuple[Part, ...]

    @cached_property
    @abstractmethod
    def decomposed(self) -> Curvature:
        """What takes the place of the sum when a prior is added."""

    @property
    def size(self) -> int:
        return self.parts[0].size

    def mv(self, v: Float[Tensor, "*batch params"]) -> Float[Tensor, "*batch params"]:
        return reduce(torch.add, (part.mv(v) for part in self.parts))

    def diagonal(self) -> Float[Tensor, " params"]:
        return reduce(torch.add, (part.diagonal() for part in self.parts))

    def dense(self) -> Float[Tensor, "params params"]:
        return reduce(torch.add, (part.dense() for part in self.parts))

    def with_prior(self, precision: float | int | Tensor) -> Precision:
        return self.decomposed.with_prior(precision)

    def grouped_logdet(self, groups: Int[Tensor, " params"] | None) -> GroupedLogdet:
        return self.decomposed.grouped_logdet(groups)

    def sweep(self, pieces: Sequence[Piece], precisions: Float[Tensor, " k"]) -> Float[Tensor, "k n r"]:
        return self.decomposed.sweep(pieces, precisions)


@dataclass(frozen=True, eq=False)
class KroneckerSum(TermSum[Kronecker]):
    """sum_t G_t (x) A_t of one weight and its bias: the curvature of several tasks. Memory O(T (O^2 + I^2)).

    Products with vectors, the diagonal and the dense form are exact. With a prior there is no eigenbasis Q_G (x) Q_A:
    up to DENSE_LIMIT weights the sum is decomposed as one dense matrix, exactly and for any prior. A larger one is
    replaced by its diagonal in the eigenbasis of the product that is nearest to it: of the same trace, and never
    further from it than that product; `merge_error` says how far. Factored damping takes the factors of that product.
    """

    parts: tuple[Kronecker, ...]
    multiple: Multiple[KroneckerSum] | None = field(default=None, repr=False)

    def __add__(self, other: Curvature) -> KroneckerSum:
        return _added(self, other)

    def __mul__(self, scale: float | int | Tensor) -> KroneckerSum:
        scale, root = check_scale(scale), self.multiple or Multiple(self, 1)
        return KroneckerSum(tuple(part * scale for part in self.parts), Multiple(root.of, root.scale * scale))

    @property
    def nearest(self) -> Kronecker:
        """The product nearest to the sum; of one term, that term."""
        return self.parts[0] if len(self.parts) == 1 else _nearest(self.parts)

    @cached_property
    def decomposed(self) -> Dense | Kronecker | CorrectedKronecker:
        """What takes the place of the sum when a prior is added."""
        if self.multiple is not None:
            return self.multiple.of.decomposed * self.multiple.scale
        if len(self.parts) == 1 or self.parts[0].factored_damping:
            return self.nearest
        if self.size <= DENSE_LIMIT:
            return Dense(self.dense())
        basis = self.nearest.in_eigenbasis()
        terms = [part.factors for part in self.parts]
        return basis.with_values([_diagonal_in(part, terms) for part in basis.parts]).averaged()

    @property
    def norm(self) -> float:
        """The Frobenius norm."""
        return max(_inner(self.parts, self.parts), 0.0) ** 0.5

    def distance(self, product: Kronecker) -> float:
        """Frobenius distance of a product from the sum."""
        return max(_distance(self.parts, product), 0.0) ** 0.5

    @property
    def merge_error(self) -> float:
        """Relative distance, in Frobenius norm, of `decomposed` from the sum."""
        found, whole = self.decomposed, float(_inner(self.parts, self.parts))
        if isinstance(found, Dense):
            return 0.0
        if isinstance(found, Kronecker):
            square = _distance(self.parts, found)
        else:  # a projection of the sum: the squares of what is kept and of what is not add up
            square = whole - sum(float(each.values.double().square().sum()) for each in found.columns)
        return (max(square, 0.0) / whole) ** 0.5 if whole else 0.0

    def merged(self) -> tuple[KroneckerSum, float]:
        """One term less: the two that lose least become their nearest product. Also what that loses, relative."""
        pairs = list(combinations(range(len(self.parts)), 2))  # by number: one object may be here twice
        both = [[self.parts[i], self.parts[j]] for i, j in pairs]
        products = [_nearest(each) for each in both]
        lost = [_distance(each, product) for each, product in zip(both, products, strict=True)]
        best = min(range(len(pairs)), key=lost.__getitem__)
        kept = [part for number, part in enumerate(self.parts) if number not in pairs[best]]
        error = (max(lost[best], 0.0) / max(float(_inner(self.parts, self.parts)), 1e-300)) ** 0.5
        return KroneckerSum((*kept, products[best])), error


def _added(ours: Kronecker | KroneckerSum, other: Curvature) -> KroneckerSum:
    if not isinstance(other, (Kronecker, KroneckerSum)):
        same_kind(ours, other)  # raises
    assert isinstance(other, (Kronecker, KroneckerSum))
    parts = [part for each in (ours, other) for part in (each.parts if isinstance(each, KroneckerSum) else (each,))]
    for part in parts[1:]:
        _check_alike(parts[0], part)
    total = KroneckerSum(tuple(parts))
    held = sum(factor.numel() * factor.element_size() for factor in parts[0].factors)
    while len(total.parts) > 1 and held * len(total.parts) > TERMS_LIMIT:
        total, error = total.merged()
        warnings.warn(
            f"a sum of {len(total.parts) + 1} Kronecker products of {held / 1e6:.0f} MB each exceeds the limit of "
            f"{TERMS_LIMIT / 1e6:.0f} MB; two of them were merged, at a relative distance of {error:.2g} from the sum.",
            LapwingWarning,
            stacklevel=4,
        )
    return total


def _check_alike(ours: Kronecker, other: Kronecker) -> None:
    same_kind(ours, other)
    if ours.layout != other.layout:
        raise CurvatureError(
            f"cannot add a Kronecker block with layout {other.layout} to one with {ours.layout}; expected the same "
            "weight, used the same way. Fit both with one estimator and one model."
        )
    if (ours.joint_bias, ours.factored_damping) != (other.joint_bias, other.factored_damping):
        raise CurvatureError(
            "cannot add Kronecker blocks that differ in joint_bias or factored_damping; expected the same. Fit "
            "both with the same options."
        )


def _nearest(parts: Sequence[Kronecker]) -> Kronecker:
    """The product nearest to the sum of the parts."""
    cols, rows = nearest_kronecker([Term(*part.factors, 1.0) for part in parts])
    return replace(parts[0], terms=(Term(cols, rows, 1.0),), multiple=None)


def _inner(ours: Sequence[Kronecker], theirs: Sequence[Kronecker]) -> float:
    """The sum of all <G (x) A, G' (x) A'>, a factor at a time."""
    total = 0.0
    for a, b in product(ours, theirs):
        (cols, rows), (other_cols, other_rows) = a.factors, b.factors
        across = sum(inner(cut(cols, part), cut(other_cols, part)) for part in column_parts(a.layout, a.joint_bias))
        total += float((inner(rows, other_rows) * across).sum())
    return total


def _distance(parts: Sequence[Kronecker], one: Kronecker) -> float:
    """The square of the Frobenius distance of a product from the sum of the parts."""
    return _inner(parts, parts) - 2 * _inner(parts, [one]) + _inner([one], [one])


def _diagonal_in(basis: EigenPart, terms: Sequence[tuple[Factor, Factor]]) -> Tensor:
    """The diagonal of sum_t G_t (x) A_t in the basis, as a matrix [K, O, width of part]."""
    found = torch.zeros_like(basis.values)
    for cols, rows in terms:
        row = rotated_diagonal(rows, basis.row_vectors)
        found += row[:, :, None] * rotated_diagonal(cut(cols, basis.part), basis.col_vectors)[:, None, :]
    return found
