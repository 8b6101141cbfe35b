"""CorrectedKronecker: Q diag(L) Q^T with the eigenbasis Q = Q_G (x) Q_A of a Kronecker block and any L [O, I] >= 0.

With L the diagonal of the exact block in that basis it is the nearest such matrix to the block in Frobenius norm, so
never further from it than the Kronecker product itself, and it has the block's trace. Memory O(O^2 + I^2 + O I).
Nothing is decomposed: the eigenvectors are stored, with what belongs to them.

Equal eigenvalues of a factor, in particular those of its null space, leave the eigenvectors open: any rotation of
them will do, and rounding chooses. `averaged` gives L one value for each pair of eigenspaces, the mean over the pair.
That is the nearest matrix to the block among all sum_ab c_ab P_a (x) P_b of the factors' eigenprojections, which no
rotation changes; G (x) A is one of them, and the trace stays. `row_ties` and `ties` number the eigenspaces.

Where the prior differs between weight and bias the two decouple, each with a diagonal in a basis of its own (`apart`).

    >>> import torch
    >>> layout = MatrixLayout(0, (1, 2), (0, 1), groups=1, rows=1, cols=2)
    >>> values = torch.tensor([[[3.0, 1.0]]])
    >>> CorrectedKronecker(layout, None, (EigenColumns(0, None, values),)).with_prior(1.0).logdet().exp()   # 4 * 2
    tensor(8.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lapwing.errors import CurvatureError
from lapwing.linalg.checks import (
    check_finite,
    check_positive,
    check_precisions,
    check_rank,
    check_scale,
    rounding,
)
from lapwing.linalg.contracts import Curvature, same_kind
from lapwing.linalg.kronecker.block_prior import BlockPrior
from lapwing.linalg.kronecker.factors import joint_prior, last_entry
from lapwing.linalg.kronecker.precision import KroneckerPrecision
from lapwing.linalg.kronecker.rotation import EigenPart, each_part, swept
from lapwing.linalg.layout import MatrixLayout
from lapwing.linalg.rows import Piece

TIE = 64
"""Eigenvalues that differ by this many roundings of the largest count as equal; zeros were seen to move by 5."""


@dataclass(frozen=True, eq=False)
class EigenColumns:
    """Columns of the matrix from `start` on: eigenvectors of their input factor (None: the unit vectors), and L.

    `ties` has the number of the eigenspace that each eigenvector belongs to; None where no two eigenvalues are equal.
    """

    start: int
    vectors: Float[Tensor, "groups cols cols"] | None
    values: Float[Tensor, "groups rows cols"]
    ties: Int[Tensor, "groups cols"] | None = None

    @property
    def part(self) -> slice:
        return slice(self.start, self.start + self.values.shape[-1])


@dataclass(frozen=True, eq=False)
class CorrectedKronecker(BlockPrior):
    """One weight and its bias; `columns` is one entry for both, or one each where their correlation is dropped.

    `apart` has one each as well, for priors that differ between the two; empty where there is nothing to decouple.
    `row_vectors` None stands for unit vectors: the tokens of a table. An eigenvalue is zero to rounding below the
    rounding of the factors beside the largest, to the `power` 2 where L are sums of squares of rotated rows, else 1.
    """

    layout: MatrixLayout
    row_vectors: Float[Tensor, "groups rows rows"] | None
    columns: tuple[EigenColumns, ...]
    apart: tuple[EigenColumns, ...] = ()
    row_ties: Int[Tensor, "groups rows"] | None = None
    power: int = 2

    @property
    def size(self) -> int:
        return self.layout.groups * self.layout.rows * self.layout.width

    @property
    def parts(self) -> list[EigenPart]:
        """All bases with their eigenvalues: those of `columns`, then those of `apart`."""
        return self._parts(self.columns + self.apart)

    def with_values(self, values: Sequence[Float[Tensor, "groups rows _"]]) -> CorrectedKronecker:
        """The same bases with other eigenvalues, in the order of `parts`."""
        found = [replace(each, values=v) for each, v in zip(self.columns + self.apart, values, strict=True)]
        count = len(self.columns)
        return replace(self, columns=tuple(found[:count]), apart=tuple(found[count:]))

    def averaged(self) -> CorrectedKronecker:
        """The same with the mean of L over each pair of eigenspaces, which no choice of eigenvectors changes."""
        if self.row_ties is None and all(each.ties is None for each in self.columns + self.apart):
            return self
        found = []
        for each in self.columns + self.apart:
            values = each.values if each.ties is None else _means(each.values, each.ties)
            found.append(values if self.row_ties is None else _means(values.mT, self.row_ties).mT)
        return self.with_values(found)

    def __add__(self, other: Curvature) -> CorrectedKronecker:
        """Eigenvalues add where the basis is the same; in bases of their own two such matrices have no sum."""
        other = same_kind(self, other)
        if self.layout != other.layout or not self.same_basis(other):
            raise CurvatureError(
                "cannot add a corrected Kronecker block in another eigenbasis or layout; expected the same, as the "
                "eigenvalues belong to it. Fit all data at once, or the second part in the basis of the first: "
                "ekfac(..., basis=first)."
            )
        total = self.with_values([a.values + b.values for a, b in zip(self.parts, other.parts, strict=True)])
        return replace(total, power=min(self.power, other.power))

    def same_basis(self, other: CorrectedKronecker) -> bool:
        """Whether the eigenvectors are the same, so that eigenvalues add."""
        ours, theirs = self.columns + self.apart, other.columns + other.apart
        if [(each.start, each.values.shape) for each in ours] != [(each.start, each.values.shape) for each in theirs]:
            return False
        return _equal(self.row_vectors, other.row_vectors) and all(
            _equal(a.vectors, b.vectors) for a, b in zip(ours, theirs, strict=True)
        )

    def __mul__(self, scale: float | int | Tensor) -> CorrectedKronecker:
        scale = check_scale(scale)
        return self.with_values([part.values * scale for part in self.parts])

    def mv(self, v: Float[Tensor, "*batch params"]) -> Float[Tensor, "*batch params"]:
        matrix = self.layout.gather(v)
        parts = self._parts(self.columns)
        return each_part(self.layout, parts, lambda part: part.multiplied(matrix[..., part.part]))

    def diagonal(self) -> Float[Tensor, " params"]:
        return each_part(self.layout, self._parts(self.columns), EigenPart.diagonal)

    def dense(self) -> Float[Tensor, "params params"]:
        values = self.columns[0].values
        return self.mv(torch.eye(self.size, dtype=values.dtype, device=values.device))

    @property
    def like(self) -> Tensor:
        return self.columns[0].values

    def with_block_priors(self, deltas: Sequence[Float[Tensor, ""]], equal: bool) -> KroneckerPrecision:
        columns = self.columns if equal or not self.apart else self.apart
        parts = []
        for i, part in enumerate(self._parts(columns)):
            check_finite(part.values, "a corrected Kronecker block")
            delta = deltas[min(i, len(deltas) - 1)]
            if len(columns) == 1:
                delta = joint_prior(deltas, last_entry(part.values[:, 0], part.col_vectors))
            parts.append(replace(part, values=part.values + delta))
            check_positive(parts[-1].values.detach(), "corrected Kronecker curvature + prior")
            self._check_rank(part, delta)
        return KroneckerPrecision(self.layout, tuple(parts))

    def sweep(self, pieces: Sequence[Piece], precisions: Float[Tensor, " k"]) -> Float[Tensor, "k n r"]:
        """Exact; rows are rotated once for all precisions."""
        precisions, parts = check_precisions(precisions).to(self.columns[0].values), self._parts(self.columns)
        for part in parts:
            check_positive((part.values.min() + precisions.min()).detach(), "corrected Kronecker curvature + prior")
            self._check_rank(part, precisions)
        return swept(self.layout, parts, pieces, precisions)

    def _check_rank(self, part: EigenPart, delta: Tensor) -> None:
        tolerance = max(rounding(part.values), rounding(part.values.mT)) ** self.power
        check_rank(part.values.flatten(1), delta, "a corrected Kronecker block", tolerance)

    def _parts(self, columns: Sequence[EigenColumns]) -> list[EigenPart]:
        return [EigenPart(each.part, self.row_vectors, each.vectors, each.values) for each in columns]


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def ties_of(values: Float[Tensor, "groups d"], vectors: Tensor | None) -> Int[Tensor, "groups d"] | None:
    """Numbers of the eigenspaces. Unit vectors (None) are no choice of rounding, whatever their eigenvalues."""
    if vectors is None:
        return None
    values, order = values.detach().sort(-1)
    limits = TIE * torch.finfo(values.dtype).eps * values[:, -1].abs()
    numbers = []
    for row, limit in zip(values.tolist(), limits.tolist(), strict=True):
        first, number, own = 0.0, 0, []
        for value in row:
            if value - first > limit:  # measured from the first of the eigenspace, so that a dense spectrum is no chain
                first, number = value, number + 1
            own.append(number)
        numbers.append(own)
    found = torch.tensor(numbers, dtype=torch.int64, device=values.device)
    if bool((found.diff(dim=-1) > 0).all()):
        return None
    return torch.empty_like(found).scatter_(-1, order, found)


def _means(values: Float[Tensor, "groups rows d"], ties: Int[Tensor, "groups d"]) -> Float[Tensor, "groups rows d"]:
    """Every entry replaced by the mean of those in its eigenspace, along the last axis."""
    where = ties.unsqueeze(1).expand_as(values)
    size = values.new_zeros(values.shape[0], values.shape[-1] + 1)
    count = size.scatter_add(1, ties, torch.ones_like(values[:, 0])).unsqueeze(1)
    total = values.new_zeros(*values.shape[:2], values.shape[-1] + 1).scatter_add(2, where, values)
    return (total / count.clamp_min(1)).gather(2, where)
