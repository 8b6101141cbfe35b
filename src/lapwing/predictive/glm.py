"""Predictions of the linearised network: f(x) ~ N(f*, J Sigma J^T), closed form or by draws of the function.

Outputs keep the network's shape [B, *out]; covariances are over all outputs of a data point, [B, C, C].
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.errors import LikelihoodError
from lapwing.likelihoods import Categorical
from lapwing.linalg import LinearMap
from lapwing.posterior import Gaussian


def moments(
    posterior: Gaussian, linear: LinearMap, sigma: float | Tensor | None = None
) -> tuple[Float[Tensor, "batch *out"], Float[Tensor, "batch outputs outputs"]]:
    """Mean and covariance of the function; with `sigma`, of noisy observations of it."""
    covariance = posterior.covariance(linear)
    if sigma is not None:
        noise = torch.as_tensor(sigma, dtype=covariance.dtype, device=covariance.device).square()
        covariance = covariance + torch.diag_embed(noise.expand(covariance.shape[-1]))
    return linear.value, covariance


def variances(
    posterior: Gaussian, linear: LinearMap, sigma: float | Tensor | None = None
) -> tuple[Float[Tensor, "batch *out"], Float[Tensor, "batch *out"]]:
    """Mean and variance of every output alone, of its shape; with `sigma`, of a noisy observation of it."""
    variance = posterior.variances(linear)
    if sigma is not None:
        variance = variance + torch.as_tensor(sigma, dtype=variance.dtype, device=variance.device).square()
    return linear.value, variance.reshape(linear.value.shape)


def probabilities(posterior: Gaussian, linear: LinearMap, link: str = "probit") -> Float[Tensor, "batch classes"]:
    """Class probabilities in closed form, for outputs [B, C]; `link` names one of `Categorical.links`."""
    closed = Categorical().link(link)
    if linear.value.dim() != 2:
        raise LikelihoodError(
            f"the outputs have shape {tuple(linear.value.shape)}; a closed form needs [batch, classes]. Use `draws`."
        )
    return closed.of(*(moments if closed.joint else variances)(posterior, linear))


def draws(
    posterior: Gaussian, linear: LinearMap, n: int, generator: torch.Generator | None = None
) -> Float[Tensor, "n batch *out"]:
    """n draws of the linearised function: each moves all inputs of the batch by one draw of the weights."""
    moved = posterior.functional_draws(linear, n, generator)
    return linear.value + moved.reshape(n, *linear.value.shape)
