"""Predictions of a fitted posterior in the form its users expect, for outputs of any shape [B, *out].

    probabilities   classes and events, in closed form (`link`) or as the mean over draws
    moments         numbers: mean [B, *out] and covariance [B, C, C], or variances [B, *out]

What a likelihood makes of outputs is its own (`likelihoods.base`). The closed forms that treat outputs one by one take
variances [B, C] only, never [B, C, C].
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.laplace.names import LinkApprox, choose
from lapwing.likelihoods import Likelihood
from lapwing.linalg import LinearMap
from lapwing.linalg.checks import normal
from lapwing.posterior import Gaussian
from lapwing.predictive import draws

LINKS = tuple(link.value for link in LinkApprox)
FEW_OUTPUTS = 64
"""Up to so many outputs the mean over draws is taken of draws of each input's own outputs: [B, C, C] is then small."""


def chosen_link(likelihood: Likelihood, link: str) -> str:
    """One of the names that every user knows, or of the likelihood's own."""
    return choose(link, dict.fromkeys([*LINKS, *likelihood.links]), "link_approx")


def predicted(likelihood: Likelihood, outputs: Float[Tensor, "draws batch *out"]) -> Float[Tensor, "draws batch *out"]:
    """Draws of outputs as predictions: probabilities for classes and events, else as they are."""
    return _predicted(likelihood, outputs) if likelihood.has_probabilities else outputs


def _predicted(likelihood: Likelihood, outputs: Float[Tensor, "draws batch *out"]) -> Tensor:
    return likelihood.predicted(outputs.flatten(0, 1)).unflatten(0, outputs.shape[:2])  # one batch axis


def probabilities(
    posterior: Gaussian,
    linear: LinearMap,
    likelihood: Likelihood,
    link: str = "probit",
    n_samples: int = 100,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "batch *prediction"]:
    """Class or event probabilities of the linearised network."""
    value = linear.value
    if link == "mc":
        few = value.dim() == 2 and value.shape[1] <= FEW_OUTPUTS
        outputs = (marginal_draws if few else draws)(posterior, linear, n_samples, generator)
        return _predicted(likelihood, outputs).mean(0)
    closed = likelihood.link(link)
    closed.check(value)
    if closed.joint:
        return likelihood.probabilities(value, posterior.covariance(linear), link)
    return likelihood.probabilities(value, posterior.precision.variances(linear).reshape(value.shape), link)


def marginal_draws(
    posterior: Gaussian, linear: LinearMap, n: int, generator: torch.Generator | None = None
) -> Float[Tensor, "n batch outputs"]:
    """Draws of the outputs of each input on its own: right for a mean over draws, which sees one input at a time."""
    value, covariance = linear.value, posterior.covariance(linear)
    values, vectors = torch.linalg.eigh(covariance)
    root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
    noise = normal((n, *value.shape), value, generator)
    return value + torch.einsum("b c k, n b k -> n b c", root, noise)


def moments(
    posterior: Gaussian, linear: LinearMap, *, joint: bool = False, diagonal: bool = False
) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the function, without observation noise.

    Mean [B, *out] with covariance [B, C, C]; `diagonal`: variances [B, *out]; `joint`: mean [BC], covariance [BC, BC].
    """
    value = linear.value
    if joint:
        size = value.numel()
        return value.flatten(), posterior.joint_covariance(linear).reshape(size, size)
    if diagonal:
        return value, posterior.precision.variances(linear).reshape(value.shape)
    return value, posterior.covariance(linear)
