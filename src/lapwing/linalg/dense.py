"""Dense: the whole matrix [P, P]. Memory O(P^2); one eigendecomposition O(P^3), then isotropic priors cost O(P).

Beyond `LARGE` entries a prior is met by a Cholesky factor instead, in about a hundredth of the time: with the matrix,
twice P^2 numbers (0.8 GB for P = 10,000 in float32), and no third for solves, draws, log-determinant or variances. A
factor that is still in use serves whoever asks for the same prior. Eigenvectors are made there only for what needs
them: derivatives in the prior, a `sweep`, or more than `MANY` priors.

>>> import torch
>>> H = Dense(torch.tensor([[2.0, 1.0], [1.0, 2.0]]))
>>> H.with_prior(1.0).logdet().exp().round(decimals=4)     # (2+1)^2 - 1
tensor(8.)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from weakref import ref

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.errors import CurvatureError
from lapwing.linalg.budget import chunks, intermediate_bytes
from lapwing.linalg.checks import (
    check_finite,
    check_positive,
    check_precisions,
    check_prior,
    check_rank,
    check_scale,
    eigh,
    normal,
)
from lapwing.linalg.contracts import Curvature, Multiple, Precision, same_kind
from lapwing.linalg.rows import DenseRows, Piece, assemble

LARGE = 4096
"""Entries beyond which eigenvectors are not made for a few priors."""
MANY = 50
"""Priors of a large matrix from which on they are: so many Cholesky factors take about as long."""
MOST = 20_000
"""Entries up to which eigenvectors are made where a Cholesky factor fails."""
PANEL = 1024
"""Columns of a large inverse that are formed at a time."""


@dataclass(frozen=True, eq=False)
class Dense(Curvature):
    """A full curvature matrix in flat parameter order."""

    matrix: Float[Tensor, "params params"]
    multiple: Multiple[Dense] | None = field(default=None, repr=False)

    @property
    def size(self) -> int:
        return self.matrix.shape[-1]

    def __add__(self, other: Curvature) -> Dense:
        return Dense(self.matrix + same_kind(self, other).matrix)

    def __mul__(self, scale: float | int | Tensor) -> Dense:
        scale, root = check_scale(scale), self.multiple or Multiple(self, 1)
        return Dense(self.matrix * scale, Multiple(root.of, root.scale * scale))

    def mv(self, v: Float[Tensor, "*batch params"]) -> Float[Tensor, "*batch params"]:
        return v @ self.matrix

    def diagonal(self) -> Float[Tensor, " params"]:
        return self.matrix.diagonal()

    def dense(self) -> Float[Tensor, "params params"]:
        return self.matrix

    @cached_property
    def eigen(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues [P] and vectors [P, P], computed once."""
        if self.multiple is not None:
            values, vectors = self.multiple.of.eigen
            return values * self.multiple.scale, vectors
        return eigh(self.matrix)

    def with_prior(self, precision: float | int | Tensor) -> DensePrecision:
        delta = check_prior(precision, self.size, self.matrix)
        if (recent := self._in_use(delta)) is not None:
            return recent
        if delta.dim() == 0 and not self._by_factor(delta):
            values, vectors = self.eigen
            check_positive((values + delta).detach(), "curvature + prior")
            check_rank(values, delta, "the curvature")
            return EigenPrecision(vectors, values + delta)
        # a prior that differs between parameters has its own eigenvectors: Cholesky is the cheaper decomposition
        check_finite(self.matrix, "the curvature")
        if bool((without := delta.detach() == 0).any()):
            # H + D v = 0 needs D v = 0 and H v = 0: what has no prior must be determined by the data among itself
            inner = self.matrix.detach()[without][:, without]
            check_rank(eigh(inner)[0], delta.detach()[without], "the curvature of the parameters without a prior")
        factor, info = self._factor(delta)
        if int(info):
            if delta.dim() == 0 and self.size <= MOST:  # rounding of the sum over data, which `eigh` clamps at zero
                values, vectors = self.eigen
                check_positive((values + delta).detach(), "curvature + prior")
                return EigenPrecision(vectors, values + delta)
            if self.size <= MOST:
                factor, info = self._clamped_factor(delta)
        if int(info):
            raise CurvatureError(
                "curvature + prior is not positive definite; expected every prior precision > 0 where the curvature "
                "is singular. Use a larger prior precision; a Hessian away from a minimum is indefinite, the GGN never "
                "is."
            )
        found = CholeskyPrecision(factor)
        if self.size > LARGE and not factor.requires_grad:
            self._recent["last"] = delta.detach().clone(), ref(found)
        return found

    def _in_use(self, delta: Tensor) -> CholeskyPrecision | None:
        """The factor that was made last, if it is that of this prior and someone still has it."""
        before, found = self._recent.get("last", (None, None))
        if before is None or found is None or delta.requires_grad or not torch.equal(before, delta):
            return None
        return found()

    @cached_property
    def _recent(self) -> dict[str, tuple[Tensor, ref[CholeskyPrecision]]]:
        return {}

    def _by_factor(self, delta: Float[Tensor, ""]) -> bool:
        """Whether one prior precision for all is met by Cholesky."""
        if self.size <= LARGE or delta.requires_grad or self.matrix.requires_grad or not bool(delta > 0):
            return False
        root = self if self.multiple is None else self.multiple.of
        return "eigen" not in vars(root) and next(root._asked) < MANY

    @cached_property
    def _asked(self) -> count[int]:
        """How many priors were met by Cholesky."""
        return count()

    def _factor(self, delta: Tensor) -> tuple[Tensor, Tensor]:
        """L with L L^T = matrix + prior, and where it failed. Of a large matrix in the place of one copy of it."""
        if self.size <= LARGE or delta.requires_grad or self.matrix.requires_grad:
            return torch.linalg.cholesky_ex(self.matrix + delta.diag())
        total, info = self.matrix.clone(), torch.zeros((), dtype=torch.int32, device=self.matrix.device)
        total.diagonal().add_(delta)
        factor = total.mT  # the same matrix, with columns side by side in memory as LAPACK has them
        torch.linalg.cholesky_ex(factor, out=(factor, info))
        return factor, info

    def _clamped_factor(self, delta: Float[Tensor, " params"]) -> tuple[Tensor, Tensor]:
        """L in float64, where rounding has left less than nothing in the matrix; `eigh` clamps that at zero."""
        values, vectors = (each.double() for each in self.eigen)
        factor, info = torch.linalg.cholesky_ex((vectors * values) @ vectors.mT + delta.double().diag())
        return factor.to(self.matrix.dtype), info

    def sweep(self, pieces: Sequence[Piece], precisions: Float[Tensor, " k"]) -> Float[Tensor, "k n r"]:
        values, vectors = self.eigen
        precisions = check_precisions(precisions).to(values)
        check_positive((values.min() + precisions.min()).detach(), "curvature + prior")
        check_rank(values, precisions, "the curvature")
        rows = EigenPrecision(vectors, torch.ones_like(values))._whitened(pieces)
        return torch.cat([DenseRows(0, white.transpose(0, 1)).sweep(values, precisions) for white in rows], dim=1)


class DensePrecision(Precision):
    """A precision held as a factor F with F F^T = precision^-1: subclasses say how to multiply by it."""

    @abstractmethod
    def whiten(self, v: Float[Tensor, "*batch params"]) -> Float[Tensor, "*batch params"]:
        """v F."""

    @property
    @abstractmethod
    def root(self) -> Float[Tensor, "params params"]:
        """F up to a scale of its columns, see `scale`."""

    @property
    @abstractmethod
    def scale(self) -> Float[Tensor, "*params"]:
        """What the columns of `root` are multiplied by."""

    @property
    def _has_root(self) -> bool:
        """Whether `root` is there without more memory than is wise."""
        return True

    def _whitened(self, pieces: Sequence[Piece]) -> Iterator[Float[Tensor, "n r params"]]:
        """Rows times F, for a few data points at a time."""
        if len(pieces) == 1 and self._has_root and (products := pieces[0].times(self.root)) is not None:
            return (rows * self.scale for rows in products)
        count, batch = pieces[0].shape
        parts = chunks(batch, 2 * 8 * count * self.size, intermediate_bytes())
        return (self.whiten(assemble(pieces, self.size, points)).transpose(0, 1) for points in parts)

    def quadratic(self, pieces: Sequence[Piece]) -> Float[Tensor, "n r r"]:
        return torch.cat([white @ white.mT for white in self._whitened(pieces)])

    def squares(self, pieces: Sequence[Piece]) -> Float[Tensor, "n r"]:
        return torch.cat([white.square().sum(-1) for white in self._whitened(pieces)])


@dataclass(frozen=True, eq=False)
class EigenPrecision(DensePrecision):
    """U diag(values) U^T."""

    vectors: Float[Tensor, "params params"]
    values: Float[Tensor, " params"]

    @property
    def size(self) -> int:
        return self.values.shape[-1]

    def whiten(self, v: Tensor) -> Tensor:
        return (v @ self.vectors) * self.values.rsqrt()

    @property
    def root(self) -> Float[Tensor, "params params"]:
        return self.vectors

    @property
    def scale(self) -> Float[Tensor, " params"]:
        return self.values.rsqrt()

    def mv(self, v: Float[Tensor, "*batch params"]) -> Float[Tensor, "*batch params"]:
        return ((v @ self.vectors) * self.values) @ self.vectors.mT

    def solve(self, v: Float[Tensor, "*batch params"]) -> Float[Tensor, "*batch params"]:
        return ((v @ self.vectors) / self.values) @ self.vectors.mT

    def draw(self, n: int, generator: torch.Generator | None = None) -> Float[Tensor, "n params"]:
        return (normal((n, self.size), self.values, generator) * self.values.rsqrt()) @ self.vectors.mT

    def logdet(self) -> Float[Tensor, ""]:
        return self.values.log().sum()

    def variance(self) -> Float[Tensor, " params"]:
        return self.vectors.square() @ self.values.reciprocal()


@dataclass(frozen=True, eq=False)
class CholeskyPrecision(DensePrecision):
    """L L^T, L lower triangular."""

    factor: Float[Tensor, "params params"]

    @property
    def size(self) -> int:
        return self.factor.shape[-1]

    def whiten(self, v: Tensor) -> Tensor:
        flat = v.reshape(-1, self.size)
        return torch.linalg.solve_triangular(self.factor, flat.mT, upper=False).mT.reshape(v.shape)

    @property
    def _has_root(self) -> bool:
        return self.size <= LARGE

    @property
    def root(self) -> Float[Tensor, "params params"]:
        return self._inverse

    @cached_property
    def _inverse(self) -> Tensor:
        eye = torch.eye(self.size, dtype=self.factor.dtype, device=self.factor.device)
        return torch.linalg.solve_triangular(self.factor, eye, upper=False).mT

    @property
    def scale(self) -> Float[Tensor, ""]:
        return self.factor.new_ones(())

    def mv(self, v: Float[Tensor, "*batch params"]) -> Float[Tensor, "*batch params"]:
        return (v @ self.factor) @ self.factor.mT

    def solve(self, v: Float[Tensor, "*batch params"]) -> Float[Tensor, "*batch params"]:
        flat = v.reshape(-1, self.size)
        if self.size > LARGE:  # `cholesky_solve` copies the factor
            half = torch.linalg.solve_triangular(self.factor, flat.mT, upper=False)
            return torch.linalg.solve_triangular(self.factor.mT, half, upper=True).mT.reshape(v.shape)
        return torch.cholesky_solve(flat.mT, self.factor).mT.reshape(v.shape)

    def draw(self, n: int, generator: torch.Generator | None = None) -> Float[Tensor, "n params"]:
        noise = normal((n, self.size), self.factor, generator)
        return torch.linalg.solve_triangular(self.factor.mT, noise.mT, upper=True).mT

    def logdet(self) -> Float[Tensor, ""]:
        return 2 * self.factor.diagonal().log().sum()

    def variance(self) -> Float[Tensor, " params"]:
        if self.size <= LARGE or self.factor.requires_grad:
            return self.root.square().sum(1)
        return torch.cat([self._inverse_squares(start) for start in range(0, self.size, PANEL)])

    def _inverse_squares(self, start: int) -> Float[Tensor, " panel"]:
        """Squares of the columns of L^-1 from `start` on, a panel of them: forward substitution in panels of rows."""
        lower = self.factor[start:, start:]
        inverse = lower.new_zeros(len(lower), min(PANEL, len(lower)))
        inverse.diagonal().fill_(1)
        for top in range(0, len(lower), PANEL):
            rows = slice(top, top + PANEL)
            right = inverse[rows] - lower[rows, :top] @ inverse[:top]
            inverse[rows] = torch.linalg.solve_triangular(lower[rows, rows], right, upper=False)
        return inverse.square().sum(0)
