"""Prior precisions and noise by the evidence, as a network for a table is trained: MacKay's updates, and their limits.

    reestimated   precisions [groups] and sigma after updates at given weights, and log Z there
    scaled        the evidence of more rows of the same kind
    share_left    where the noise is an output: what is left of the targets to estimate its level from

Each update costs one evaluation of the effective parameters: O(P) once the curvature is decomposed.
"""

from __future__ import annotations

from dataclasses import replace
from math import e

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.evidence import Evidence, GaussianFit
from lapwing.priors import Prior

SIGMA = 1e-3, 10.0
"""Noise levels that a standardised target can have; a smaller one would be about the rounding of float32."""
PRECISION = 1e-4, 1e6


@torch.no_grad()
def reestimated(evidence: Evidence, prior: Prior, sigma: Tensor, updates: int) -> tuple[Prior, Tensor, float]:
    """MacKay's updates, no further than a factor e at a time, as the weights are not yet at their mode; log Z after.

    alpha = gamma / |theta|^2 per layer, and sigma^2 = SSE / (N - gamma): where the structure counts nearly as many
    determined parameters as there are targets, a tenth of the targets is still left to estimate the noise from.
    """
    squares = prior.sums(evidence.mean.square()).clamp_min(torch.finfo(prior.precisions.dtype).tiny)
    for _ in range(updates):
        gamma = evidence.effective_parameters(prior, sigma).clamp_min(0)
        if isinstance(fit := evidence.fit, GaussianFit):
            left = (fit.targets - gamma.sum()).clamp_min(fit.targets / 10)
            sigma = _near((fit.squares / left).sqrt(), sigma, SIGMA)
        prior = prior.with_precisions(_near(gamma / squares, prior.precisions, PRECISION))
    return prior, sigma, float(evidence.log_marginal(prior, sigma))


def scaled(evidence: Evidence, scale: float | int) -> Evidence:
    """The evidence of `scale` times as many rows of the same kind."""
    if scale == 1:
        return evidence
    fit = evidence.fit
    more = GaussianFit(round(fit.targets * scale), fit.squares * scale) if isinstance(fit, GaussianFit) else fit * scale
    return replace(evidence, curvature=evidence.curvature * scale, fit=more)


def share_left(gamma: Float[Tensor, " groups"], targets: int) -> Float[Tensor, ""]:
    """1 - gamma / N, of N targets the share that no parameter of the mean uses up: a tenth at least.

    The last group of the prior is the head that gives the noise, and has no part in the mean.
    """
    return (1 - gamma[:-1].clamp_min(0).sum() / targets).clamp_min(0.1)


def _near(value: Tensor, before: Tensor, bounds: tuple[float, float]) -> Tensor:
    return value.clamp(before / e, before * e).clamp(*bounds)
