"""Prior, noise and width of an approximate posterior of a regression, from the exact posterior of some of its rows.

Kronecker factors, diagonals and blocks leave out how weights of different layers make up for each other. They count
more weights as determined by the data than there are (78 of 3,781 where it is 21), and what is left of the targets to
estimate the noise from is too little: a noise of 0.1 has come out as 0.6, and error bars were as much too wide. In
function space the posterior of M rows is exact, at a cost of M^3 whatever the number of weights. So

    prior, sigma   maximise the exact evidence of at most `rows` outputs of rows drawn at random
    covariance     is multiplied by  sum_n exact variance / sum_n approximate variance  over these rows, both with
                   the same rows, prior and noise

The factor goes into temperature and prior precision, as in `lapwing.laplace.calibration`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from lapwing import estimate
from lapwing.laplace.base import BaseLaplace
from lapwing.laplace.data import Pairs
from lapwing.laplace.factory import CLASSES, Laplace
from lapwing.laplace.predictions import moments

EXACT = ("full", "gp")
"""Structures that keep every covariance."""
SHARED = ("dict_key_x", "dict_key_y", "last_layer_name", "feature_reduction")
"""Options that mean the same for the exact posterior."""


def can_tune(la: BaseLaplace, subset: str, prior_structure: str) -> bool:
    """Whether there is an exact posterior in function space to learn from, and something to learn."""
    known = (subset, "gp") in CLASSES and prior_structure != "diag"
    return la.has_noise and la.structure not in EXACT and known


def tune_by_rows(
    la: BaseLaplace,
    loader: Iterable[Any],
    rows: int,
    *,
    subset: str,
    prior_structure: str,
    options: Mapping[str, Any],
    generator: torch.Generator | None = None,
) -> str:
    """Sets prior precision, noise level and temperature of a fitted `la`; says what was done."""
    count = min(la.n_data, max(1, rows // la.n_outputs))
    some: Iterable[Any] = Pairs(loader, la.dict_key_y, la.space.device)
    if count < la.n_data:
        some = estimate.subset(some, count, generator)
    start = {"sigma_noise": la.sigma_noise.detach(), "prior_mean": la.prior_mean, "temperature": la.temperature}
    shared = {name: options[name] for name in SHARED if name in options}
    exact = Laplace(la.model, la.likelihood, subset, "gp", **start, **shared)
    exact.fit(some)
    exact.optimize_prior_precision(prior_structure=prior_structure, optimize_sigma_noise=True)
    beside = la
    if count < la.n_data:
        beside = Laplace(la.model, la.likelihood, subset, la.structure, **dict(options))
        beside.fit(some, generator=generator)
    for posterior in (la, beside):
        posterior.prior_precision, posterior.sigma_noise = exact.prior_precision, exact.sigma_noise
    factor = _variance(exact, some) / max(_variance(beside, some), torch.finfo(la.space.dtype).tiny)
    la.temperature = la.temperature * factor
    la.prior_precision = la.prior_precision / factor
    which = f"all {count:,} rows" if count == la.n_data else f"{count:,} of {la.n_data:,} rows, drawn at random"
    return (
        f"Width: prior and noise by the exact evidence of {which}, in function space; the covariance of "
        f"{la.structure} was multiplied by {factor:.3g}, which makes it as large as the exact one on average there."
    )


@torch.no_grad()
def _variance(la: BaseLaplace, some: Iterable[Any]) -> float:
    """The sum over rows and outputs of the function's variance."""
    return float(sum(moments(la.posterior, la.linearise(x), diagonal=True)[1].double().sum() for x, _ in some))
