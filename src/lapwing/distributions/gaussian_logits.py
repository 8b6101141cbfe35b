"""Class probabilities from Gaussian logits N(mean, covariance): closed forms, quadrature, and the Laplace bridge.

probit          softmax(mean / sqrt(1 + pi/8 variance)), each logit by its own variance: the tutorial's form
probit_full     the same idea for differences of logits, which keeps their correlations; exact scaling for two classes
bridge          the Dirichlet whose Laplace approximation in the logits has this mean and variance
bridge_norm     as bridge, with logits rescaled to the variance for which it is accurate
quadrature      the integral itself, for a single logit: exact to rounding at any variance

Which of them a likelihood has, and by what name, is said by its `links`.

>>> import torch
>>> probit(torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 3.0]]))
tensor([[0.5000, 0.5000]])
"""

from __future__ import annotations

from math import pi

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor


def shrink(mean: Float[Tensor, "*#shape"], variance: Float[Tensor, "*#shape"]) -> Tensor:
    """mean / sqrt(1 + pi/8 variance): the logit whose sigmoid is about E sigmoid(f), f ~ N(mean, variance)."""
    return mean / torch.sqrt(1 + pi / 8 * variance)


def probit(mean: Float[Tensor, "*batch classes"], variance: Float[Tensor, "*batch classes"]) -> Tensor:
    """[*batch, C]: the sigmoid of one logit (C = 1), or the softmax, of logits shrunk by their own variance."""
    shrunk = shrink(mean, variance)
    return torch.sigmoid(shrunk) if mean.shape[-1] == 1 else torch.softmax(shrunk, dim=-1)


def probit_full(
    mean: Float[Tensor, "*batch classes"], covariance: Float[Tensor, "*batch classes classes"]
) -> Float[Tensor, "*batch classes"]:
    """p_k ~ 1 / sum_j exp(-(f_k - f_j) / sqrt(1 + pi/8 Var(f_k - f_j))), normalised; a shift of all logits cancels."""
    if mean.shape[-1] == 1:
        return probit(mean, covariance[..., 0])
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    difference = mean.unsqueeze(-1) - mean.unsqueeze(-2)
    spread = variance.unsqueeze(-1) + variance.unsqueeze(-2) - 2 * covariance
    scores = -torch.logsumexp(-difference / torch.sqrt(1 + pi / 8 * spread.clamp_min(0)), dim=-1)
    return torch.softmax(scores, dim=-1)


def quadrature(mean: Float[Tensor, "*batch 1"], variance: Float[Tensor, "*batch 1"]) -> Float[Tensor, "*batch 1"]:
    """E sigmoid(f) for one Gaussian logit.

    Gauss-Hermite up to a deviation of one. Beyond it the sigmoid is too sharp for that; there the same number is the
    integral of Phi((mean - l) / deviation) over the logistic density of l, by the trapezoidal rule, which converges
    exponentially for both factors.
    """
    nodes, weights = np.polynomial.hermite.hermgauss(64)
    like = {"dtype": mean.dtype, "device": mean.device}
    nodes, weights = torch.as_tensor(nodes, **like), torch.as_tensor(weights / np.sqrt(pi), **like)
    narrow = torch.sigmoid(mean + torch.sqrt(2 * variance.clamp_max(1)) * nodes) @ weights.unsqueeze(-1)
    points = torch.linspace(-45, 45, 361, **like)
    density = torch.sigmoid(points) * torch.sigmoid(-points) * (points[1] - points[0])
    wide = torch.special.ndtr((mean - points) / variance.clamp_min(1).sqrt()) @ density.unsqueeze(-1)
    return torch.where(variance < 1, narrow, wide)


def dirichlet(
    mean: Float[Tensor, "*batch classes"],
    covariance: Float[Tensor, "*batch classes classes"],
    normalise: bool = False,
) -> Float[Tensor, "*batch classes"]:
    """Parameters alpha of the Dirichlet that the Laplace bridge assigns to Gaussian logits.

    The bridge is derived for logits that sum to zero: the Gaussian is first conditioned on that. It is accurate for
    variances of about sqrt(C / 2); `normalise` rescales the logits there, as for large variances it overstates itself.
    """
    classes = mean.shape[-1]
    row = covariance.sum(-1)
    total = row.sum(-1, keepdim=True)
    mean = mean - row * mean.sum(-1, keepdim=True) / total
    covariance = covariance - row.unsqueeze(-1) * row.unsqueeze(-2) / total.unsqueeze(-1)
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    if normalise:
        scale = variance.mean(-1, keepdim=True) / (classes / 2) ** 0.5
        mean, variance = mean / scale.sqrt(), variance / scale
    return (1 - 2 / classes + mean.exp() / classes**2 * (-mean).exp().sum(-1, keepdim=True)) / variance


def bridge(mean: Tensor, covariance: Tensor) -> Tensor:
    """Mean of the Laplace bridge's Dirichlet."""
    alpha = dirichlet(mean, covariance)
    return alpha / alpha.sum(-1, keepdim=True)


def bridge_norm(mean: Tensor, covariance: Tensor) -> Tensor:
    """Mean of the normalised Laplace bridge's Dirichlet."""
    alpha = dirichlet(mean, covariance, normalise=True)
    return alpha / alpha.sum(-1, keepdim=True)
