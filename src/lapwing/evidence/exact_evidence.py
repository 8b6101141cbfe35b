"""ExactEvidence: log Z with the exact curvature of all data, from the kernels that theta* was found with.

    log Z = log p(y | theta) - 1/2 |theta - m|^2_Lambda - 1/2 log det(I + w S^T K S)

The posterior's own structure has no part in it: a Kronecker product may take several times as many parameters for
determined as there are. The curvature is that at the trained network's outputs, as it is in every `Evidence`. One
evaluation costs O(M^3) for M = N C outputs, in float64, and has its first derivatives with it:

    d log det / d log lambda_g = -gamma_g       d log det / d log w = sum of gamma
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.errors import CurvatureError
from lapwing.evidence.function_space import FunctionSpace
from lapwing.evidence.marginal import Evidence, GaussianFit
from lapwing.priors import Prior

LEAST = 1e-3
"""The part of one parameter that a group must have determined if its precision is to be raised further.

log Z can gain about half of it by doing without the group, and every round of a search costs O(M^3).
"""


@dataclass(frozen=True, eq=False)
class ExactEvidence:
    """Meets what tuners ask of an `Evidence`; `own` is the posterior's, with the same weights, theta~ or theta*."""

    own: Evidence
    functions: FunctionSpace

    @property
    def has_noise(self) -> bool:
        return self.own.has_noise

    @property
    def noise_power(self) -> int:
        return 2

    @property
    def targets(self) -> int:
        return self.own.targets

    @property
    def accuracy(self) -> float:
        """To which the weights are known, relatively: they are given."""
        return 0.0

    @property
    def least(self) -> float:
        """gamma below which a search raises a precision no further."""
        return LEAST

    def noise_range(self) -> tuple[float, float]:
        """Within which sigma is searched."""
        return self.own.noise_range()

    def settled(self, prior: Prior, sigma: float | Tensor = 1.0, temperature: float | Tensor = 1.0) -> ExactEvidence:
        """At these weights, whatever the prior is."""
        return self

    @property
    def mean(self) -> Float[Tensor, " params"]:
        return self.own.mean

    @property
    def fit(self) -> Float[Tensor, ""] | GaussianFit:
        return self.own.fit

    def log_marginal(
        self, prior: Prior, sigma: float | Tensor = 1.0, temperature: float | Tensor = 1.0
    ) -> Float[Tensor, ""]:
        """log Z, with first derivatives in the precisions, sigma and temperature."""
        weight = torch.as_tensor(self._weight(sigma, temperature)).to(self.mean)
        logdet, gamma = self.functions.measured(prior, float(weight.detach()))
        slopes = torch.cat([-gamma, gamma.sum().reshape(1)])
        at = torch.cat([prior.precisions.double().log(), weight.double().log().reshape(1)])
        ratio = (prior.scatter(self.mean).double() + _Logdet.apply(at, logdet, slopes)) / 2  # pyright: ignore[reportOperatorIssue]
        return (self.own.log_likelihood(sigma, temperature).double() - ratio).to(self.mean)

    @torch.no_grad()
    def effective_parameters(
        self, prior: Prior, sigma: float | Tensor = 1.0, temperature: float | Tensor = 1.0
    ) -> Float[Tensor, " groups"]:
        """gamma of every group: how many of its parameters the data determine."""
        return self.functions.measured(prior, float(self._weight(sigma, temperature)))[1].to(self.mean)

    def _weight(self, sigma: float | Tensor, temperature: float | Tensor) -> Tensor | int:
        return replace(self.own, noise_power=2).scale(sigma, temperature)

    def rounding(self, prior: Prior) -> Float[Tensor, " groups"]:
        """Of gamma, which is a sum of what is not negative: that of one parameter."""
        return torch.full_like(prior.precisions.detach(), 8 * torch.finfo(self.mean.dtype).eps)


class _Logdet(torch.autograd.Function):
    """A number that is known with its slopes."""

    @staticmethod
    def forward(ctx: Any, at: Tensor, value: float, slopes: Tensor) -> Tensor:
        ctx.save_for_backward(slopes)
        return at.new_tensor(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled():  # slopes are numbers: a derivative of theirs would come out as zero
            raise CurvatureError(
                "the exact evidence was differentiated with create_graph=True, and has first derivatives alone; "
                "expected create_graph=False. Take differences of its slopes for second ones."
            )
        (slopes,) = ctx.saved_tensors
        return grad * slopes, None, None
