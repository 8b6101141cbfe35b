"""Gaussian: the Laplace posterior N(mean, precision^-1) over the weights. Holds a vector [P] and a `Precision`.

>>> import torch
>>> from lapwing.linalg import Diagonal
>>> posterior = Gaussian(torch.zeros(2), Diagonal(torch.tensor([3.0, 1.0])).with_prior(1.0))
>>> posterior.variance()
tensor([0.2500, 0.5000])
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log, pi

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.errors import ParameterError
from lapwing.linalg import LinearMap, Precision


@dataclass(frozen=True, eq=False)
class Gaussian:
    """N(mean, precision^-1) over a flat parameter vector."""

    mean: Float[Tensor, " params"]
    precision: Precision

    def __post_init__(self) -> None:
        if len(self.mean) != self.precision.size:
            raise ParameterError(
                f"the mean has {len(self.mean)} entries and the precision {self.precision.size}; expected as many."
            )

    def sample(self, n: int, generator: torch.Generator | None = None) -> Float[Tensor, "n params"]:
        """n weight vectors."""
        drawn = self.precision.draw(n, generator)
        if drawn.requires_grad or drawn.dtype != self.mean.dtype or self.mean.requires_grad:
            return self.mean + drawn
        return drawn.add_(self.mean)  # a second [n, P] would double the memory

    def log_prob(self, theta: Float[Tensor, "*batch params"]) -> Float[Tensor, "*batch"]:
        """The density's logarithm, every constant included."""
        away = theta - self.mean
        square = (away * self.precision.mv(away)).sum(-1)
        return (self.precision.logdet() - square - len(self.mean) * log(2 * pi)) / 2

    def variance(self) -> Float[Tensor, " params"]:
        """Marginal variance of every weight."""
        return self.precision.variance()

    # -- in function space: the network linearised at the mean -----------------------------------------------------

    def covariance(self, linear_map: LinearMap) -> Float[Tensor, "batch outputs outputs"]:
        """Covariance of the outputs of each input, J Sigma J^T."""
        return self.precision.covariance(linear_map)

    def variances(self, linear_map: LinearMap) -> Float[Tensor, "batch outputs"]:
        """Variance of every output alone: the diagonal of `covariance`, without the rest of it."""
        return self.precision.variances(linear_map)

    def joint_covariance(self, linear_map: LinearMap) -> Float[Tensor, "batch outputs batch outputs"]:
        """Covariance between the outputs of all inputs; spells out J [B, C, P], so for small batches."""
        return self.precision.joint(linear_map.rows())

    def functional_draws(
        self, linear_map: LinearMap, n: int, generator: torch.Generator | None = None
    ) -> Float[Tensor, "n batch outputs"]:
        """n draws of J (theta - mean): a draw of the weights moves all inputs together, as it should."""
        return self.precision.functional_draws(linear_map, n, generator)
