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
from lapwing.evidence.function_space import KEPT, OUTPUTS
from lapwing.laplace.fitted import Fitted
from lapwing.laplace.hyper import HyperParameters
from lapwing.laplace.names import choose
from lapwing.laplace.setup import Setup
from lapwing.laplace.structures import AnyTangent, Recipe
from lapwing.linalg import Dense, Dual, LinearMap, Piece
from lapwing.params import ParamSpace
from lapwing.tangent import Tangent

SOLVERS = ("auto", "exact", "structure")
CURVATURES = ("structure", "exact")
FEW = 1024
"""Up to so many weights, or outputs of all data with Gaussian noise, an exact curvature is formed to solve with."""
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
    curvature: str = "structure",
) -> EvidenceAtMode:
    """The evidence of a fitted posterior at the linear mode, after one or two passes over the data of its fit.

    `solver` is what theta* is solved with: the posterior's own curvature ("structure"), the exact one ("exact"), which
    costs a pass and [P, P] or [N C, N C] numbers, or the exact one where that is small ("auto"): up to `FEW` weights,
    or, where there are fewer outputs N C than weights, what `FunctionSpace` keeps (`OUTPUTS` of them, in `KEPT` bytes).

    `curvature` is what the evidence has its log-determinant and traces from: the posterior's own, or the exact one that
    theta* is solved with.
    """
    solver, exactly = choose(solver, SOLVERS, "solver"), choose(curvature, CURVATURES, "curvature") == "exact"
    if isinstance(max_passes, bool) or not isinstance(max_passes, int) or max_passes < LEAST:
        raise OptionError(f"max_passes is {max_passes!r}; expected a whole number of passes >= {LEAST}.")
    if tolerance is not None and not 0 < tolerance < 1:
        raise OptionError(f"tolerance is {tolerance!r}; expected a relative residual between 0 and 1.")
    likelihood, again = setup.distribution, repeated(batches)
    data = LinearisedData(tangent, likelihood, again, setup.has_noise, max_passes)
    own = setup.recipe.source in ("exact", "fisher") and type(fitted.curvature) in (Dense, Dual)
    by_rows = (outputs := fitted.n_data * fitted.output_shape.numel()) < tangent.space.size
    by_rows = by_rows and isinstance(tangent, Tangent)
    few = solver == "exact" or (outputs if by_rows else tangent.space.size) <= FEW
    formed, among = None, False
    if solver != "structure" and not (own and likelihood.adds_noise):
        among = by_rows and not (likelihood.adds_noise and few)
        if few and not own and not among:  # sum J^T H J as a matrix or by its rows, whichever is smaller
            formed = Recipe("gp" if by_rows else "full")(tangent, likelihood, again, None)
    data.passes += formed is not None
    if exactly and not (own or among or formed is not None):
        raise OptionError(
            f"curvature='exact' with solver={solver!r} for {outputs} outputs of all data and {tangent.space.size} "
            f"weights; expected fewer outputs than weights, up to {OUTPUTS}, or up to {FEW} weights, and "
            "solver='auto'. Use curvature='structure', or solver='exact' for a matrix of all weights."
        )
    found = EvidenceAtMode.of(
        evidence,
        data,
        fitted.n_data,
        solver=formed,
        exact=own or formed is not None,
        outputs=outputs if among else None,
        exactly=exactly and not among,
        tolerance=tolerance,
    )
    if among and found.functions is None and (solver == "exact" or (exactly and not own)):
        asked = "solver" if solver == "exact" else "curvature"
        raise OptionError(
            f"{asked}='exact' for {outputs} outputs of all data and {tangent.space.size} weights; expected at most "
            f"{OUTPUTS} outputs, with rows and kernels of {KEPT / 2**30:.3g} GiB. Use {asked}='structure'."
        )
    found.exactly = exactly
    return found


LEAST = 5
"""Passes without which no mode can be found and verified."""


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
