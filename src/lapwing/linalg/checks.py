"""Checks that structures share (scales, priors, eigenvalues), decompositions in float64, and standard normal draws."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from math import isfinite

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.errors import CurvatureError, LapwingWarning
from lapwing.linalg.few_directions import eigh_of_few

PART = 2**22
"""Entries of a large matrix that are looked at together."""


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
    if isfinite(matrix.detach().sum().item()):  # at a fraction of the cost; a sum of finite entries may overflow
        return
    # a few rows at a time: the question alone would take as much memory again
    rows = max(1, PART // max(1, matrix[:1].numel())) if matrix.dim() else 1
    if not all(bool(torch.isfinite(part).all()) for part in (matrix.split(rows) if matrix.dim() else [matrix])):
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


WIDE = 1024
"""Matrices in float32 of this width may be decomposed as they are: half the time of float64, or less."""


def eigh(
    matrix: Float[Tensor, "*batch p p"], single: bool = False
) -> tuple[Float[Tensor, "*batch p"], Float[Tensor, "*batch p p"]]:
    """Eigenvalues and vectors, computed in float64 and returned in the dtype of the matrix; rounding clamped at zero.

    Eigenvalues below zero by no more than the rounding of the input's dtype become 0. Clearly negative ones are kept
    (a Hessian has them). `single` leaves wide matrices in float32 as they are, if the result passes a check: errors are
    then a few roundings of the largest eigenvalue, as those of the sum are that the matrix was made by.
    """
    check_finite(matrix, "the matrix to decompose")
    values = vectors = None
    if single and matrix.dtype == torch.float32 and matrix.shape[-1] >= WIDE:
        values, vectors = _eigh_single(matrix)
    if values is None or vectors is None or not _decomposes(matrix, values, vectors):
        values, vectors = torch.linalg.eigh(matrix.double())
    tolerance = rounding(matrix) * values.abs().amax(-1, keepdim=True)
    values = torch.where((values < 0) & (values >= -tolerance), torch.zeros_like(values), values)
    return values.to(matrix.dtype), vectors.to(matrix.dtype)


def _eigh_single(matrix: Float[Tensor, "*batch p p"]) -> tuple[Tensor, Tensor]:
    """In float32; one matrix that is zero in most directions, by those that it has."""
    few = eigh_of_few(matrix.reshape(matrix.shape[-2:])) if matrix.numel() == matrix.shape[-1] ** 2 else None
    if few is None:
        return torch.linalg.eigh(matrix)
    return few[0].reshape(matrix.shape[:-1]), few[1].reshape(matrix.shape)


def _decomposes(matrix: Tensor, values: Tensor, vectors: Tensor) -> bool:
    """Whether Q diag(l) Q^T v is the matrix times v, and Q Q^T v is v, for a v with no zeros: O(p^2)."""
    v = torch.cos(torch.arange(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)).unsqueeze(1)
    inside = vectors.mT @ v
    away = (vectors @ (values.unsqueeze(-1) * inside) - matrix @ v).norm(dim=(-2, -1)) / values.abs().amax(-1)
    turned = (vectors @ inside - v).norm(dim=(-2, -1))
    bound = 100 * torch.finfo(matrix.dtype).eps * v.norm()
    return bool(((away <= bound) | (values == 0).all(-1)).all()) and bool((turned <= bound).all())


def eigh_psd(matrix: Float[Tensor, "*batch p p"], what: str, single: bool = False) -> tuple[Tensor, Tensor]:
    """As `eigh`, for matrices that are PSD by construction: negative eigenvalues are clamped, and said so if clear."""
    values, vectors = eigh(matrix, single)
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
