"""to_mode: trained weights to the mode of the posterior that `Laplace` is about to form, by Gauss-Newton steps.

    L(theta) = sum_n -log p(y_n | f_n) / (sigma^2 T) + 1/2 (theta - m)^T Lambda (theta - m)

A Laplace approximation is derived at a minimum of L, and training by Adam stops before one. Full batch; a step costs
four or five passes over the data. Memory: [P, P] up to FEW weights, [N C, N C] for as few outputs, else that of the
posterior's own structure.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lapwing.errors import LapwingWarning, OptionError
from lapwing.estimate.data_pass import repeated
from lapwing.laplace.base import BaseLaplace
from lapwing.laplace.data import Pairs
from lapwing.laplace.structures import STRUCTURES
from lapwing.params import ParamSpace
from lapwing.priors import Prior
from lapwing.tangent import Tangent
from lapwing.tangent.inputs import batch_size
from lapwing.training import GaussNewton, Step

FEW = 2048
"""Weights, or outputs of all data, up to which the curvature of a step is exact."""


@dataclass(frozen=True)
class ModeSearch:
    """How far the weights were from a mode, and are now.

    `gradient_before` and `gradient_after` are norms of the gradient of L; `relative_before` and `relative_after` the
    same over the norms of its two parts, data and prior, which cancel at a mode. `loss_before` and `loss_after` are L
    without the prior's constant.
    """

    gradient_before: float
    gradient_after: float
    relative_before: float
    relative_after: float
    loss_before: float
    loss_after: float
    steps: int
    structure: str
    converged: bool


def to_mode(
    la: BaseLaplace,
    train_loader: Iterable[Any],
    *,
    steps: int = 200,
    tolerance: float = 1e-6,
    structure: str | None = None,
    callback: Callable[[Step], object] | None = None,
) -> ModeSearch:
    """Moves the weights of the posterior's model, in place, to the mode under its prior, noise and temperature.

    Call it before `la.fit`, or fit again. Of a last layer or a sub-network only those weights move; the network runs in
    eval mode, as it does for a posterior. It ends where the gradient is `tolerance` of its two parts, or after `steps`.
    `structure` names the curvature of the steps; an exact one where that is small, by default.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise OptionError(f"steps is {steps!r}; expected a whole number >= 1.")
    if not 0 < tolerance < 1:
        raise OptionError(f"tolerance is {tolerance!r}; expected a number between 0 and 1.")
    la.hyper.refuse_earlier("a search for the mode")
    given, tangent = la._tangent_for(repeated(Pairs(train_loader, la.dict_key_y, la._device)))
    pairs = [tuple(pair) for pair in given]
    points = sum(batch_size(x) for x, _ in pairs)
    likelihood = la.distribution.at_noise(float(la.sigma_noise)) if la.has_noise else la.distribution
    prior = la.hyper.base(tangent.space)
    scaled = prior.with_precisions(prior.precisions.detach() * float(la.temperature))
    outputs = points * Tangent(la.model, tangent.space, evaluate=True).at(pairs[0][0]).outputs
    chosen = structure or _exact(tangent.space, outputs) or la.recipe.structure
    exact = chosen in ("full", "gp")
    optimiser = GaussNewton(
        la.model,
        likelihood,
        structure=chosen,
        estimator="exact",
        options={} if exact else _options(la, chosen),
        prior=scaled,
        points=points,
        space=tangent.space,
        zeta="tied" if exact else None,
        tau_decay=1 / 3 if exact else 0.5,
        tau_every=1,
        moving_average=0.0,
        refresh=1,
        momentum=not exact,
        frozen=True,
    )
    before = _relative(optimiser, pairs, scaled, points)
    found, relative = [], before[1]
    while len(found) < steps and relative > tolerance:
        found.append(optimiser.step_over(pairs))
        if callback is not None:
            callback(found[-1])
        if not found[-1].accepted:  # rounding allows no better
            break
        relative = _relative(optimiser, pairs, scaled, points)[1]
    after = _relative(optimiser, pairs, scaled, points)
    scale = points / float(la.temperature)
    search = ModeSearch(
        before[0] * scale, after[0] * scale, before[1], after[1], before[2] * scale, after[2] * scale,
        len(found), chosen, after[1] <= tolerance,
    )  # fmt: skip
    if not search.converged:
        warnings.warn(
            f"the mode was not reached: after {search.steps} steps the gradient is {search.relative_after:.1e} of its "
            f"two parts ({search.relative_before:.1e} before). Allow more steps (steps=), a larger tolerance, a larger "
            "prior precision, or use float64.",
            LapwingWarning,
            stacklevel=2,
        )
    return search


def _relative(
    optimiser: GaussNewton, pairs: list[tuple[Any, Any]], prior: Prior, points: int
) -> tuple[float, float, float]:
    """The norm of the gradient per data point, the same over those of its parts, and the loss."""
    here = optimiser.here(pairs)
    of_prior: Tensor = prior.precision() / points * (here.theta - prior.mean)
    parts = float((here.gradient - of_prior).norm()) + float(of_prior.norm())
    whole = float(here.gradient.norm())
    return whole, whole / parts if parts else 0.0, here.value


def _exact(space: ParamSpace, outputs: int) -> str | None:
    if min(space.size, outputs) > FEW:
        return None
    return "full" if space.size <= outputs or space.index is not None else "gp"


def _options(la: BaseLaplace, structure: str) -> dict[str, Any]:
    """Those of the posterior's recipe that the structure takes."""
    return {name: value for name, value in la.recipe.options.items() if name in STRUCTURES[structure].options}
