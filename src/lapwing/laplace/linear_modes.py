"""The linear mode of a fitted posterior: how it is solved for, and predictions there.

MovedMap   f(x; theta~) + J(x) (theta* - theta~) for the value, and the same Jacobian
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.errors import LapwingWarning, OptionError, ParameterError
from lapwing.estimate.data_pass import Batches, repeated
from lapwing.evidence import Evidence, EvidenceAtMode, LinearisedData, LinearMode
from lapwing.laplace.fitted import Fitted
from lapwing.laplace.hyper import HyperParameters
from lapwing.laplace.names import choose
from lapwing.laplace.setup import Setup
from lapwing.laplace.structures import AnyTangent, Recipe
from lapwing.likelihoods import Likelihood
from lapwing.linalg import Curvature, Dense, Dual, LinearMap, Piece
from lapwing.params import ParamSpace
from lapwing.tangent import Tangent

SOLVERS = ("auto", "exact", "structure")
FEW = 1024
"""Up to so many weights, or outputs of all data, an exact curvature is formed to solve with."""
PASSES = 1000
"""Passes over the data that a search takes at most."""


def evidence_at_mode(
    setup: Setup,
    evidence: Evidence,
    fitted: Fitted,
    tangent: AnyTangent,
    batches: Batches,
    *,
    solver: str = "auto",
    tolerance: float | None = None,
    max_passes: int = PASSES,
) -> EvidenceAtMode:
    """The evidence of a fitted posterior at the linear mode, after one or two passes over the data of its fit.

    `solver` is what theta* is solved with: the posterior's own curvature ("structure"), the exact one ("exact"), which
    costs a pass and [P, P] or [N C, N C] numbers, or the exact one where that is small ("auto").
    """
    solver = choose(solver, SOLVERS, "solver")
    if isinstance(max_passes, bool) or not isinstance(max_passes, int) or max_passes < LEAST:
        raise OptionError(f"max_passes is {max_passes!r}; expected a whole number of passes >= {LEAST}.")
    if tolerance is not None and not 0 < tolerance < 1:
        raise OptionError(f"tolerance is {tolerance!r}; expected a relative residual between 0 and 1.")
    likelihood, again = setup.distribution, repeated(batches)
    data = LinearisedData(tangent, likelihood, again, setup.has_noise, max_passes)
    own = setup.recipe.source in ("exact", "fisher") and type(fitted.curvature) in (Dense, Dual)
    curvature = None if own or solver == "structure" else _exact(tangent, likelihood, again, fitted, solver)
    data.passes += curvature is not None
    exact = own or curvature is not None
    return EvidenceAtMode.of(evidence, data, fitted.n_data, solver=curvature, exact=exact, tolerance=tolerance)


LEAST = 5
"""Passes without which no mode can be found and verified."""


def _exact(
    tangent: AnyTangent, likelihood: Likelihood, batches: Batches, fitted: Fitted, solver: str
) -> Curvature | None:
    """sum J^T H J as a matrix or by its rows, whichever is smaller; None where neither is small, unless asked for."""
    weights, rows = tangent.space.size, fitted.n_data * fitted.output_shape.numel()
    by_rows = rows < weights and isinstance(tangent, Tangent)
    if min(weights, rows if by_rows else weights) > FEW and solver == "auto":
        return None
    return Recipe("gp" if by_rows else "full")(tangent, likelihood, batches, None)


def checked(mode: LinearMode) -> LinearMode:
    """The mode, with a warning if it was not found."""
    if not mode.converged:
        warnings.warn(
            f"the linear mode was not found: after {mode.passes} passes over the data the gradient is "
            f"{mode.relative:.1e} of its two parts. Allow more passes (max_passes=) or a larger tolerance, "
            "or use a structure that is nearer to the exact curvature, a larger prior precision, or float64.",
            LapwingWarning,
            stacklevel=3,
        )
    return mode


def check_mode(mode: Any, fitted: Fitted, hyper: HyperParameters | None, space: ParamSpace) -> None:
    """Refuses a mode of another fit; with `hyper`, also one under another prior, noise level or temperature."""
    if not isinstance(mode, LinearMode):
        raise OptionError(
            f"at is {mode!r}; expected a LinearMode, as la.linear_mode(train_loader) returns it, or None for the "
            "trained weights."
        )
    if mode.evidence.curvature is not fitted.curvature:
        raise ParameterError("the linear mode is that of another fit; expected one of this. Call linear_mode again.")
    if hyper is None:
        return
    prior = hyper.base(space)
    for name, ours, theirs in (
        ("prior precision", prior.precisions, mode.prior.precisions),
        ("prior mean", torch.as_tensor(prior.mean), torch.as_tensor(mode.prior.mean)),
        ("sigma_noise", hyper.sigma_noise, mode.sigma),
        ("temperature", hyper.temperature, mode.temperature),
    ):
        if ours.shape != theirs.shape or not torch.equal(ours.detach(), theirs):
            raise ParameterError(
                f"the {name} is {ours.detach().flatten().tolist()[:3]} and the linear mode was found under "
                f"{theirs.flatten().tolist()[:3]}; expected the same. Call linear_mode again."
            )


@dataclass(frozen=True, eq=False)
class MovedMap:
    """A linear map with the value of the linearised network at other weights; meets the `LinearMap` contract."""

    linear: LinearMap
    value: Float[Tensor, "batch *out"]

    @staticmethod
    def of(linear: LinearMap, offset: Float[Tensor, " params"]) -> MovedMap:
        """With the value f + J offset."""
        return MovedMap(linear, linear.value + linear.mv(offset))

    @property
    def batch(self) -> int:
        return self.linear.batch

    @property
    def outputs(self) -> int:
        return self.linear.outputs

    def mv(self, v: Float[Tensor, " params"]) -> Float[Tensor, "batch *out"]:
        return self.linear.mv(v)

    def rmv(self, u: Float[Tensor, "batch *out"]) -> Float[Tensor, " params"]:
        return self.linear.rmv(u)

    def rows(self) -> Float[Tensor, "batch outputs params"]:
        return self.linear.rows()

    def pieces(self) -> list[Piece]:
        return self.linear.pieces()

    def columns(self) -> Iterator[list[Piece]]:
        return self.linear.columns()

    def parts(self) -> Iterator[MovedMap]:
        start = 0
        for part in self.linear.parts():
            yield MovedMap(part, self.value[start : start + part.batch])
            start += part.batch
