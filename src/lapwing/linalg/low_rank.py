"""LowRank: U diag(l) U^T with U [P, k] orthonormal and l >= 0. Memory O(P k); every operation O(P k) or O(P k^2).

With a prior it is the dual form of k rows, sqrt(l) U^T, so that decompositions are of size k: one for all isotropic
priors and scales, one for every vector [P].

>>> import torch
>>> curvature = LowRank(torch.tensor([[0.6], [0.8]]), torch.tensor([3.0]))
>>> curvature.with_prior(1.0).logdet().exp()         # eigenvalues 3 + 1 and 1
tensor(4.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.errors import CurvatureError
from lapwing.linalg.checks import check_finite, check_scale, eigh_psd, rounding
from lapwing.linalg.contracts import Curvature, Multiple, same_kind
from lapwing.linalg.dual import Dual, DualPrecision
from lapwing.linalg.row_set import RowSet
from lapwing.linalg.rows import DenseRows, Piece


@dataclass(frozen=True, eq=False)
class LowRank(Curvature):
    """The largest eigenpairs of a curvature; the rest is taken for zero."""

    vectors: Float[Tensor, "params rank"]
    values: Float[Tensor, " rank"]
    multiple: Multiple[LowRank] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if bool((self.values < 0).any()):
            raise CurvatureError(
                f"a low-rank curvature has eigenvalue {float(self.values.min()):.3g}; expected numbers >= 0."
            )

    @staticmethod
    def of(columns: Float[Tensor, "params k"], rank: int | None = None, dtype: torch.dtype | None = None) -> LowRank:
        """B B^T in its largest eigenpairs, at most `rank` and no more than it has."""
        check_finite(columns, "the columns of a low-rank curvature")
        basis, triangle = torch.linalg.qr(columns.double())
        values, vectors = eigh_psd(triangle @ triangle.mT, "the product of the columns")
        values, vectors = values.flip(0)[:rank], vectors.flip(1)[:, :rank]
        found = max(1, int((values > rounding(triangle) * values[:1]).sum()))
        dtype = columns.dtype if dtype is None else dtype
        return LowRank((basis @ vectors[:, :found]).to(dtype), values[:found].to(dtype))

    @property
    def size(self) -> int:
        return self.vectors.shape[0]

    @property
    def rank(self) -> int:
        return self.vectors.shape[1]

    def __add__(self, other: Curvature) -> LowRank:
        """Of rank k + k', or less where the two overlap."""
        other = same_kind(self, other)
        return LowRank.of(torch.cat([each.vectors * each.values.sqrt() for each in (self, other)], dim=1))

    def discounted(self, share: float) -> LowRank:
        raise CurvatureError(
            "a moving average of eigenvectors grows with every batch; expected one of fixed size (kron, diag, "
            "blocks, full). Take the curvature of the present batch alone: moving_average=0."
        )

    def __mul__(self, scale: float | int | Tensor) -> LowRank:
        scale, root = check_scale(scale), self.multiple or Multiple(self, 1)
        return LowRank(self.vectors, self.values * scale, Multiple(root.of, root.scale * scale))

    def mv(self, v: Float[Tensor, "*batch params"]) -> Float[Tensor, "*batch params"]:
        return ((v @ self.vectors) * self.values) @ self.vectors.mT

    def diagonal(self) -> Float[Tensor, " params"]:
        return self.vectors.square() @ self.values

    def dense(self) -> Float[Tensor, "params params"]:
        return (self.vectors * self.values) @ self.vectors.mT

    @cached_property
    def dual(self) -> Dual:
        """The same curvature as k rows."""
        if self.multiple is not None:
            return self.multiple.of.dual * self.multiple.scale
        if self.values.requires_grad or self.vectors.requires_grad:
            raise CurvatureError(
                "the eigenpairs of a low-rank curvature require gradients; expected fixed ones. Add first and scale "
                "the sum: derivatives in the scale of a whole curvature are kept."
            )
        rows = (self.vectors * self.values.sqrt()).mT.unsqueeze(1)
        check_finite(rows, "the low-rank curvature")
        return Dual(RowSet(self.size, ((DenseRows(0, rows),),)))

    def with_prior(self, precision: float | int | Tensor) -> DualPrecision:
        return self.dual.with_prior(precision)

    def sweep(self, pieces: Sequence[Piece], precisions: Float[Tensor, " k"]) -> Float[Tensor, "k n r"]:
        return self.dual.sweep(pieces, precisions)


@dataclass(frozen=True, eq=False)
class Subspace:
    """H B, a curvature times a basis B [P, k], in float64: one pass of subspace iteration, a sum over data."""

    basis: Float[Tensor, "params k"]
    product: Float[Tensor, "params k"]

    @staticmethod
    def spanned(columns: Float[Tensor, "params k"]) -> Subspace:
        """An orthonormal basis of the columns, and no data."""
        basis = torch.linalg.qr(columns).Q
        return Subspace(basis, torch.zeros_like(basis))

    def pooled(self, other: Subspace) -> Subspace:
        """Of both data sets, in one basis."""
        if not torch.equal(self.basis, other.basis):
            raise CurvatureError("cannot add products with two bases; expected one. Begin the fit anew.")
        return Subspace(self.basis, self.product + other.product)

    def leading(self, rank: int, dtype: torch.dtype) -> LowRank:
        """The largest eigenpairs of the curvature within the subspace; what it does to the rest is not known."""
        inside = self.basis.mT @ self.product
        values, vectors = eigh_psd((inside + inside.mT) / 2, "the curvature in the subspace")
        return LowRank.of(self.basis @ (vectors * values.sqrt()), rank, dtype)
