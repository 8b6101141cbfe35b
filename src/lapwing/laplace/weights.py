"""The Gaussian over the weights, as users see it: mode, curvature, variances, samples and densities.

Before a fit it is the prior, with a curvature of zero.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.errors import ParameterError
from lapwing.laplace.hyper import HyperParameters
from lapwing.linalg import Curvature, DenseRows, Precision
from lapwing.linalg.autocast import outside_autocast


class Weights(HyperParameters):
    """N(mean, precision^-1) over the random parameters, flat."""

    @property
    def mean(self) -> Float[Tensor, " params"]:
        """The mode: the trained weights, flat; before a fit the mean of the prior."""
        return self.weights.mean

    @property
    def H(self) -> Tensor | Curvature:
        """The curvature at unit noise and temperature, summed over data: an object with `.dense()`."""
        return self.curvature

    @property
    def posterior_precision(self) -> Tensor | Precision:
        """The precision as an object: mv, solve, draw, logdet, variance, covariance."""
        return self.weights.precision

    @property
    @outside_autocast
    def posterior_variance(self) -> Float[Tensor, " params"]:
        """Marginal variance of every weight."""
        return self.weights.variance()

    @property
    @outside_autocast
    def posterior_covariance(self) -> Float[Tensor, "params params"]:
        """Spelled out, O(P^2): for small posteriors."""
        return self.weights.precision.to_matrix(-1)

    @outside_autocast
    def sample(self, n_samples: int = 100, generator: torch.Generator | None = None) -> Float[Tensor, "n params"]:
        """Weight vectors from the posterior."""
        return self.weights.sample(whole(n_samples), generator)

    @outside_autocast
    def log_prob(self, value: Float[Tensor, "*batch params"], normalized: bool = True) -> Float[Tensor, "*batch"]:
        """Log density of the posterior at flat weights; without its constant where `normalized` is False."""
        self.space.check(value)
        return self.weights.log_prob(value) if normalized else -self.square_norm(value) / 2

    @outside_autocast
    def square_norm(self, value: Float[Tensor, "*batch params"]) -> Float[Tensor, "*batch"]:
        """(value - mean)^T precision (value - mean)."""
        self.space.check(value)
        weights = self.weights
        away = value - weights.mean
        return (away * weights.precision.mv(away)).sum(-1)

    @outside_autocast
    def functional_variance(self, Js: Float[Tensor, "batch outputs params"]) -> Float[Tensor, "batch outputs outputs"]:
        """J Sigma J^T of every data point, for Jacobians that the user has."""
        self.space.check(Js)
        return self.posterior.precision.quadratic([DenseRows(0, Js.transpose(0, 1))])

    @outside_autocast
    def functional_covariance(self, Js: Float[Tensor, "batch outputs params"]) -> Float[Tensor, "all all"]:
        """J Sigma J^T over all data points and outputs, [B C, B C]."""
        self.space.check(Js)
        size = Js.shape[0] * Js.shape[1]
        return self.posterior.precision.joint(Js).reshape(size, size)


def whole(n: int) -> int:
    """n as a number of draws."""
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ParameterError(f"n_samples is {n!r}; expected a whole number >= 1.")
    return n
