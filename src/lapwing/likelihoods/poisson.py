"""Counts: y_c ~ Poisson(exp(f_c)) independently, f the log-rates.

    -log p = sum_c exp(f_c) - y_c f_c + log y_c!
    grad = exp(f) - y,   H = Fisher = diag(exp(f)),   S = diag(exp(f / 2))

f and y have the same shape; y holds counts in any real dtype. S is [*lead, C, C]. Cost O(C^2) per position, for the
zeros.

>>> import torch
>>> f, y = torch.tensor([[3.0]]).log(), torch.tensor([[2]])
>>> Poisson().grad(f, y).round(decimals=4), Poisson().hessian(f, y).round(decimals=4)   # rate - y, and the rate
(tensor([[1.]]), tensor([[[3.]]]))
>>> Poisson().log_prob(f, y).exp().allclose(torch.tensor(4.5) * torch.tensor(-3.0).exp())   # 3^2 / 2! e^-3
True
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lapwing.distributions import PoissonLognormal
from lapwing.errors import LikelihoodError
from lapwing.likelihoods.base import Positionwise, message, require_real, require_same_shape

_LARGEST_RATE = 2.0**60  # torch.poisson counts in int64


@dataclass(frozen=True)
class Poisson(Positionwise):
    """Independent counts with log-rates f."""

    convex: ClassVar[bool] = True
    per_output: ClassVar[bool] = True
    diagonal: ClassVar[bool] = True

    def _check_target(self, f: Tensor, y: Tensor) -> None:
        require_same_shape(self, f, y)
        require_real(self, y, allow_bool=False)

    def _invalid(self, f: Tensor, y: Tensor) -> Bool[Tensor, "*target"]:
        if not y.is_floating_point():
            return y < 0
        return ~((y >= 0) & (y == y.floor()) & torch.isfinite(y))

    def _domain(self, f: Tensor) -> tuple[str, str]:
        return "counts 0, 1, 2, ...", "use Gaussian for real-valued targets"

    def _log_prob(self, f: Float[Tensor, "*lead C"], y: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead"]:
        return (y * f - f.exp() - torch.lgamma(y + 1)).sum(-1)

    def _grad(self, f: Float[Tensor, "*lead C"], y: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead C"]:
        return f.exp() - y

    def _fisher(self, f: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead C C"]:
        return torch.diag_embed(f.exp())

    def _fisher_sqrt(self, f: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead C R"]:
        return torch.diag_embed((0.5 * f).exp())

    def _hessian_diagonal(self, f: Float[Tensor, "*lead C"], y: Tensor) -> Float[Tensor, "*lead C"]:
        return self._hessian_mv(f, y, torch.ones_like(f))

    def _hessian_mv(
        self, f: Float[Tensor, "*lead C"], y: Tensor, v: Float[Tensor, "*lead C"]
    ) -> Float[Tensor, "*lead C"]:
        return f.exp() * v

    def _sample(self, f: Float[Tensor, "*lead C"], generator: torch.Generator | None) -> Float[Tensor, "*lead C"]:
        rate = f.exp()
        if not bool((rate < _LARGEST_RATE).all()):
            raise LikelihoodError(
                message(
                    f"a rate exp({f.max().item():.4g})",
                    f"finite log-rates below {_LARGEST_RATE:.1e} to sample from",
                    "check that the outputs are log-rates, not rates",
                )
            )
        return torch.poisson(rate, generator=generator)

    def predictive(
        self, mean: Float[Tensor, "*lead C"], variance: Float[Tensor, "*lead C"], sigma: float | Tensor = 1.0
    ) -> PoissonLognormal:
        return PoissonLognormal.of_outputs(mean, variance)
