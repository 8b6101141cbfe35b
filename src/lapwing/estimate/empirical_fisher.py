"""empirical: outer products of the gradients at the observed targets, in any structure. One backward pass per batch.

Not a curvature in general: it agrees with the Fisher where the model is right about the targets. No factor of two or
1/N is hidden in it: it is sum_n grad_n grad_n^T with grad_n the gradient of -log p(y_n | f_n).
"""

from __future__ import annotations

import inspect

import torch

from lapwing.errors import ParameterError
from lapwing.estimate.corrected_kronecker import ekfac
from lapwing.estimate.cotangents import empirical as observed
from lapwing.estimate.data_pass import Batches
from lapwing.estimate.exact_blocks import blocks
from lapwing.estimate.exact_diagonal import diagonal
from lapwing.estimate.full_matrix import full
from lapwing.estimate.kronecker import kflr
from lapwing.likelihoods import Likelihood
from lapwing.linalg import Curvature
from lapwing.tangent import Tangent

_COMMON = ("tangent", "likelihood", "batches", "cotangents", "generator")
_STRUCTURES = {"full": full, "diagonal": diagonal, "blocks": blocks, "kron": kflr, "ekfac": ekfac}


def empirical(
    tangent: Tangent,
    likelihood: Likelihood,
    batches: Batches,
    *,
    structure: str = "full",
    generator: torch.Generator | None = None,
    **options: str | int | bool,
) -> Curvature:
    """The empirical Fisher; `structure` is "full", "diagonal", "blocks", "kron" or "ekfac", `options` its own."""
    if structure not in _STRUCTURES:
        raise ParameterError(f"unknown structure {structure!r}; expected one of {sorted(_STRUCTURES)}.")
    estimator = _STRUCTURES[structure]
    if structure not in ("kron", "ekfac"):  # Kronecker structures check their own
        own = [name for name in inspect.signature(estimator).parameters if name not in _COMMON]
        unknown = [name for name in options if name not in own]
        if unknown:
            raise ParameterError(f"unknown option {unknown[0]!r} of structure {structure!r}; expected some of {own}.")
    return estimator(tangent, likelihood, batches, cotangents=observed, generator=generator, **options)
