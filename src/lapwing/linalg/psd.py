"""The two contracts every structure meets: `Curvature` [P, P], summed over data, and `Precision`, curvature + prior.

A curvature adds and scales; a precision solves, draws, and has a log-determinant. A structure decomposes itself once,
when the first precision is asked of it; every further prior then costs O(P) or so, and `logdet`, `solve` and
`covariance` are differentiable in the prior precision.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lapwing.errors import CurvatureError, LapwingWarning
from lapwing.linalg.rows import DEFAULT_BUDGET, Piece, push


@runtime_checkable
class LinearMap(Protocol):
    """The Jacobian of a network at a batch of inputs: [B, C, P], never spelled out unless asked."""

    @property
    def batch(self) -> int: ...

    @property
    def outputs(self) -> int: ...

    @property
    def value(self) -> Float[Tensor, "batch *out"]:
        """The network's output, the point that J is taken at."""
        ...

    def mv(self, v: Float[Tensor, " params"]) -> Float[Tensor, "batch *out"]: ...

    def rmv(self, u: Float[Tensor, "batch *out"]) -> Float[Tensor, " params"]: ...

    def rows(self) -> Float[Tensor, "batch outputs params"]: ...

    def parts(self) -> Iterator[LinearMap]:
        """The same map for consecutive sub-batches, each small enough for the memory budget."""
        ...

    def pieces(self) -> list[Piece]:
        """The rows in factored form, one cotangent per output."""
        ...


class Curvature(ABC):
    """A symmetric positive semi-definite matrix [P, P] (or a Hessian, which may be indefinite), summed over data."""

    @property
    @abstractmethod
    def size(self) -> int:
        """P, the number of parameters."""

    @abstractmethod
    def __add__(self, other: Curvature) -> Curvature:
        """The sum of the two matrices: curvatures of two tasks, each perhaps scaled, at the same parameters."""

    @abstractmethod
    def __mul__(self, scale: float | int | Tensor) -> Curvature: ...

    @abstractmethod
    def mv(self, v: Float[Tensor, "*batch params"]) -> Float[Tensor, "*batch params"]: ...

    @abstractmethod
    def diagonal(self) -> Float[Tensor, " params"]: ...

    @abstractmethod
    def dense(self) -> Float[Tensor, "params params"]:
        """The matrix in flat parameter order; O(P^2) memory, for small P and for tests."""

    @abstractmethod
    def with_prior(self, precision: float | int | Tensor) -> Precision:
        """Curvature + diag(precision): a number for an isotropic prior, or a vector [P]."""

    def pooled(self, other: Curvature) -> Curvature:
        """The curvature of one data set of which the two have seen a part each, as if estimated in one pass.

        The sum, except where a curvature is no sum over data, as a Kronecker product is not.
        """
        return self + other

    def __rmul__(self, scale: float | int | Tensor) -> Curvature:
        return self * scale

    def to_matrix(self) -> Float[Tensor, "params params"]:
        """As `dense`."""
        return self.dense()

    def clone(self) -> Curvature:
        """A copy that shares no memory."""
        return deepcopy(self)

    def sweep(self, pieces: Sequence[Piece], precisions: Float[Tensor, " k"]) -> Float[Tensor, "k n r"]:
        """`with_prior(p).squares(pieces)` for each of k isotropic prior precisions p.

        Structures rotate the rows once and not k times; a Kronecker block states a relative error (below 1e-6).
        """
        precisions = check_precisions(precisions)
        return torch.stack([self.with_prior(precision).squares(pieces) for precision in precisions])

    def variances(self, linear_map: LinearMap, precisions: Float[Tensor, " k"]) -> Float[Tensor, "k batch outputs"]:
        """Variance of every output under each of k isotropic prior precisions, with one linearisation."""
        return torch.cat([self.sweep(part.pieces(), precisions) for part in linear_map.parts()], dim=1)


class Precision(ABC):
    """A symmetric positive definite matrix [P, P] that is solved with, sampled from and integrated."""

    @property
    @abstractmethod
    def size(self) -> int:
        """P, the number of parameters."""

    @abstractmethod
    def mv(self, v: Float[Tensor, "*batch params"]) -> Float[Tensor, "*batch params"]: ...

    @abstractmethod
    def solve(self, v: Float[Tensor, "*batch params"]) -> Float[Tensor, "*batch params"]: ...

    @abstractmethod
    def draw(self, n: int, generator: torch.Generator | None = None) -> Float[Tensor, "n params"]:
        """n draws from N(0, precision^-1)."""

    @abstractmethod
    def logdet(self) -> Float[Tensor, ""]: ...

    @abstractmethod
    def variance(self) -> Float[Tensor, " params"]:
        """The diagonal of the inverse."""

    @abstractmethod
    def quadratic(self, pieces: Sequence[Piece]) -> Float[Tensor, "n r r"]:
        """row[r,n] precision^-1 row[s,n]^T for rows in factored form, one data point at a time."""

    def to_matrix(self, exponent: float | int = 1) -> Float[Tensor, "params params"]:
        """The matrix, its inverse (-1) or another power of it; O(P^2) memory, for small P and for tests."""
        like = self.variance()
        eye = torch.eye(self.size, dtype=like.dtype, device=like.device)
        if exponent == 1:
            return self.mv(eye)
        if exponent == -1:
            return self.solve(eye)
        values, vectors = eigh(self.mv(eye))
        return (vectors * values**exponent) @ vectors.mT

    def clone(self) -> Precision:
        """A copy that shares no memory."""
        return deepcopy(self)

    def squares(self, pieces: Sequence[Piece]) -> Float[Tensor, "n r"]:
        """The diagonal of `quadratic`; structures that can do so leave the rest of it out."""
        return self.quadratic(pieces).diagonal(dim1=-2, dim2=-1)

    def variances(self, linear_map: LinearMap) -> Float[Tensor, "batch outputs"]:
        """The diagonal of `covariance`, without the rest of it: what many outputs allow."""
        return torch.cat([self.squares(part.pieces()) for part in linear_map.parts()])

    def covariance(self, linear_map: LinearMap) -> Float[Tensor, "batch outputs outputs"]:
        """J precision^-1 J^T of every input: the functional covariance, without [B, C, P]."""
        return torch.cat([self.quadratic(part.pieces()) for part in linear_map.parts()])

    def joint(self, rows: Float[Tensor, "batch outputs params"]) -> Float[Tensor, "batch outputs batch outputs"]:
        """J precision^-1 J^T between the outputs of all inputs, for rows that are spelled out."""
        return torch.einsum("b c p, d e p -> b c d e", rows, self.solve(rows))

    def functional_draws(
        self, linear_map: LinearMap, n: int, generator: torch.Generator | None = None
    ) -> Float[Tensor, "n batch outputs"]:
        """n draws of J v, v ~ N(0, precision^-1): a draw of the weights moves all inputs together, as it should."""
        deltas = self.draw(n, generator)
        parts = [push(part.pieces(), deltas, DEFAULT_BUDGET) for part in linear_map.parts()]
        return torch.cat(parts, dim=1)

    def inverse_trace(self, groups: Int[Tensor, " params"] | None = None) -> Float[Tensor, " groups"]:
        """Trace of the inverse, per group of parameters (group numbers 0..k as from `ParamSpace.groups`)."""
        variance = self.variance()
        if groups is None:
            return variance.sum().unsqueeze(0)
        if groups.shape != variance.shape or bool((groups < 0).any()):
            raise CurvatureError(
                f"groups has shape {tuple(groups.shape)} and smallest number {int(groups.min())}; expected {self.size} "
                "(= P) numbers >= 0, as from ParamSpace.groups."
            )
        return variance.new_zeros(int(groups.max()) + 1).index_add(0, groups, variance)


# -- shared checks and decompositions -----------------------------------------------------------------------------

AnyCurvature = TypeVar("AnyCurvature", bound=Curvature)


@dataclass(frozen=True, eq=False)
class Multiple(Generic[AnyCurvature]):
    """What a scaled curvature is a multiple of, so that it has not to be decomposed again.

    The eigenvectors are those of `of`, and the eigenvalues a product: derivatives in the scale (1 / sigma^2 of a
    regression) need none of the decomposition itself, which would be infinite for equal eigenvalues.
    """

    of: AnyCurvature
    scale: float | int | Tensor


def same_kind(ours: AnyCurvature, other: Curvature) -> AnyCurvature:
    """`other`, if it has the structure and the size of `ours`; an error otherwise."""
    if not isinstance(other, type(ours)) or other.size != ours.size:
        size = f" of size {other.size}" if isinstance(other, Curvature) else ""
        raise CurvatureError(
            f"cannot add {type(other).__name__}{size} to {type(ours).__name__} of size {ours.size}; expected the same "
            "structure over the same parameters. Fit both with one estimator and one parameter space."
        )
    return other


def check_scale(scale: float | int | Tensor) -> float | int | Tensor:
    """What a curvature is multiplied by: one number."""
    if not isinstance(scale, Tensor):
        return scale
    if scale.numel() != 1:
        raise CurvatureError(
            f"a curvature is multiplied by a tensor of shape {tuple(scale.shape)}; expected one number, as "
            "1 / sigma**2 is. Where parameters are to differ, give each its own prior precision."
        )
    return scale.reshape(())


def check_prior(precision: float | int | Tensor, size: int, like: Tensor) -> Float[Tensor, ""] | Float[Tensor, " size"]:
    """The prior precision as a tensor: a scalar or [size], finite and not negative."""
    delta = torch.as_tensor(precision, dtype=like.dtype, device=like.device)
    if delta.numel() == 1:
        delta = delta.reshape(())
    elif delta.shape != (size,):
        raise CurvatureError(
            f"prior precision has shape {tuple(delta.shape)}; expected one number or a vector of {size} (= P)."
        )
    if not bool(torch.isfinite(delta).all()):
        raise CurvatureError("prior precision is NaN or infinite; expected finite numbers >= 0.")
    if bool((delta < 0).any()):
        raise CurvatureError(f"prior precision is negative ({float(delta.min()):.3g}); expected numbers >= 0.")
    return delta


def check_precisions(precisions: Tensor) -> Float[Tensor, " k"]:
    """Prior precisions to compare: a vector, not empty, of finite numbers >= 0."""
    if precisions.dim() != 1 or not len(precisions) or not precisions.is_floating_point():
        raise CurvatureError(
            f"prior precisions have shape {tuple(precisions.shape)} and dtype {precisions.dtype}; expected a vector of "
            "at least one floating-point number, as from torch.logspace(-4, 4, 100)."
        )
    if not bool(torch.isfinite(precisions).all()):
        raise CurvatureError("a prior precision is NaN or infinite; expected finite numbers >= 0.")
    if bool((precisions < 0).any()):
        raise CurvatureError(f"a prior precision is negative ({float(precisions.min()):.3g}); expected numbers >= 0.")
    return precisions


def check_finite(matrix: Tensor, what: str) -> None:
    if not bool(torch.isfinite(matrix).all()):
        raise CurvatureError(
            f"{what} holds NaN or infinite entries; expected finite ones. Check the data and the loss."
        )


def check_positive(values: Tensor, what: str) -> None:
    """Eigenvalues of a precision must be > 0."""
    if not bool((values > 0).all()):  # not `<= 0`, which a NaN would pass
        raise CurvatureError(
            f"{what} is not positive definite (smallest eigenvalue {float(values.min()):.3g}); expected > 0. Use a "
            "larger prior precision; a Hessian away from a minimum is indefinite, the GGN never is."
        )


def check_rank(values: Float[Tensor, "*batch p"], delta: Tensor, what: str, tolerance: float | None = None) -> None:
    """Where the prior is zero the curvature alone must have full rank, whatever sign rounding gives to its zeros.

    An eigenvalue counts as zero up to `tolerance` times the largest (None: `rounding`, of a decomposed matrix): decided
    by the sign alone, half of all singular matrices would pass. One that is clearly negative is left to
    `check_positive`, which says so.
    """
    if bool((delta != 0).all()):
        return
    tolerance = rounding(values) if tolerance is None else tolerance
    largest, smallest = values.detach().amax(-1), values.detach().amin(-1)
    if bool((smallest.abs() <= tolerance * largest).any()):
        raise CurvatureError(
            f"the prior precision is 0 and {what} is not positive definite without it: its eigenvalues go down to "
            f"{float(smallest.min()):.3g}, which beside {float(largest.max()):.3g} is zero to rounding (a relative "
            f"{tolerance:.2g}); expected full rank. Use a larger prior precision than 0."
        )


def eigh(matrix: Float[Tensor, "*batch p p"]) -> tuple[Float[Tensor, "*batch p"], Float[Tensor, "*batch p p"]]:
    """Eigenvalues and vectors, computed in float64 and returned in the dtype of the matrix; rounding clamped at zero.

    Eigenvalues below zero by no more than the rounding of the input's dtype become 0. Clearly negative ones are kept
    (a Hessian has them).
    """
    check_finite(matrix, "the matrix to decompose")
    values, vectors = torch.linalg.eigh(matrix.double())
    tolerance = rounding(matrix) * values.abs().amax(-1, keepdim=True)
    values = torch.where((values < 0) & (values >= -tolerance), torch.zeros_like(values), values)
    return values.to(matrix.dtype), vectors.to(matrix.dtype)


def eigh_psd(matrix: Float[Tensor, "*batch p p"], what: str) -> tuple[Tensor, Tensor]:
    """As `eigh`, for matrices that are PSD by construction: negative eigenvalues are clamped, and said so if clear."""
    values, vectors = eigh(matrix)
    if bool((values < 0).any()):
        warnings.warn(
            f"{what} has eigenvalue {float(values.min()):.3g} (largest {float(values.max()):.3g}); clamped at zero.",
            LapwingWarning,
            stacklevel=3,
        )
        values = values.clamp_min(0)
    return values, vectors


def rounding(matrix: Tensor) -> float:
    """Relative size of eigenvalue errors that summation in this dtype can explain; 5e-5 was seen of 55,000 images."""
    return 10 * max(matrix.shape[-1], 100) * torch.finfo(matrix.dtype).eps


def normal(shape: Sequence[int], like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Standard normal numbers; the first axis counts draws. Drawn where the generator lives, which may be elsewhere."""
    if shape[0] < 0:
        raise CurvatureError(f"asked for {shape[0]} draws; expected a number >= 0.")
    place = like.device if generator is None else generator.device
    return torch.randn(*shape, dtype=like.dtype, device=place, generator=generator).to(like.device)
