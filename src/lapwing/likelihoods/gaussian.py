"""Gaussian regression: y ~ N(f, diag(sigma^2)), one standard deviation for all outputs or one per output.

    -log p = sum_c (y_c - f_c)^2 / (2 sigma_c^2) + log sigma_c + (1/2) log 2 pi
    grad = (f - y) / sigma^2,   H = Fisher = diag(1 / sigma^2),   S = diag(1 / sigma)

f and y have the same shape; S is [*lead, C, C]. Cost O(C) per position: H and S are one matrix, expanded, not copied.

>>> import torch
>>> likelihood = Gaussian(sigma=2.0)
>>> f, y = torch.tensor([[1.0, 3.0]]), torch.tensor([[1.0, 1.0]])
>>> likelihood.grad(f, y)                                         # (f - y) / 4
tensor([[0.0000, 0.5000]])
>>> likelihood.hessian(f, y)                                      # 1/4 on the diagonal
tensor([[[0.2500, 0.0000],
         [0.0000, 0.2500]]])
>>> expected = -0.5 * (2 / 2) ** 2 - 2 * torch.tensor(2.0).log() - torch.tensor(2 * torch.pi).log()
>>> torch.allclose(likelihood.log_prob(f, y), expected)
True
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lapwing.distributions import ScaleMixture
from lapwing.errors import LikelihoodError
from lapwing.likelihoods.base import Positionwise, message, require_real, require_same_shape


@dataclass(frozen=True, eq=False)
class Gaussian(Positionwise):
    """N(f, diag(sigma^2)). `sigma`: a number, or a tensor [C]; it may require gradients, and results carry them."""

    convex: ClassVar[bool] = True
    per_output: ClassVar[bool] = True
    diagonal: ClassVar[bool] = True
    adds_noise: ClassVar[bool] = True

    sigma: float | int | Tensor = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        sigma = torch.as_tensor(self.sigma, dtype=torch.float64).detach()
        if sigma.ndim > 1 or sigma.numel() == 0:
            raise LikelihoodError(
                message(f"sigma of shape {tuple(sigma.shape)}", "a number or a tensor [C]", "one entry per output")
            )
        if not bool(((sigma > 0) & torch.isfinite(sigma)).all()):
            raise LikelihoodError(
                message(f"sigma = {sigma.tolist()}", "finite standard deviations above zero", "e.g. sigma=1.0")
            )

    def _scale(self, f: Float[Tensor, "*lead C"]) -> Float[Tensor, " C"]:
        sigma = torch.as_tensor(self.sigma, dtype=f.dtype, device=f.device)
        n_outputs = f.shape[-1]
        if sigma.numel() not in (1, n_outputs):
            raise LikelihoodError(
                message(
                    f"sigma with {sigma.numel()} entries for {n_outputs} outputs per position",
                    f"a number or {n_outputs} entries",
                    "one entry per output, or set class_axis if the outputs are on another axis",
                )
            )
        return sigma.reshape(-1).expand(n_outputs)

    def _check_target(self, f: Tensor, y: Tensor) -> None:
        require_same_shape(self, f, y)
        require_real(self, y, allow_bool=False)

    def _invalid(self, f: Tensor, y: Tensor) -> Bool[Tensor, "*target"]:
        return ~torch.isfinite(y)

    def _domain(self, f: Tensor) -> tuple[str, str]:
        return "finite targets", "remove or impute the missing targets"

    def _log_prob(self, f: Float[Tensor, "*lead C"], y: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead"]:
        sigma = self._scale(f)
        return -(0.5 * ((y - f) / sigma) ** 2 + sigma.log() + 0.5 * math.log(2 * math.pi)).sum(-1)

    def _grad(self, f: Float[Tensor, "*lead C"], y: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead C"]:
        return (f - y) / self._scale(f) ** 2

    def _fisher(self, f: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead C C"]:
        return torch.diag(self._scale(f) ** -2).expand(*f.shape, f.shape[-1])

    def _fisher_sqrt(self, f: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead C R"]:
        return torch.diag(1 / self._scale(f)).expand(*f.shape, f.shape[-1])

    def _hessian_diagonal(self, f: Float[Tensor, "*lead C"], y: Tensor) -> Float[Tensor, "*lead C"]:
        return self._hessian_mv(f, y, torch.ones_like(f))

    def _hessian_mv(
        self, f: Float[Tensor, "*lead C"], y: Tensor, v: Float[Tensor, "*lead C"]
    ) -> Float[Tensor, "*lead C"]:
        return v / self._scale(f) ** 2

    def _sample(self, f: Float[Tensor, "*lead C"], generator: torch.Generator | None) -> Float[Tensor, "*lead C"]:
        noise = torch.randn(f.shape, generator=generator, dtype=f.dtype, device=f.device)
        return f + self._scale(f) * noise

    def predictive(
        self, mean: Float[Tensor, "*lead C"], variance: Float[Tensor, "*lead C"], sigma: float | Tensor = 1.0
    ) -> ScaleMixture:
        own, factor = (torch.as_tensor(level).detach().double().cpu() for level in (self.sigma, sigma))
        return ScaleMixture.of_sigma(mean, variance, own * factor)

    def signal_and_noise(
        self, f: Float[Tensor, "*lead C"], sigma: float | Tensor = 1.0
    ) -> tuple[Float[Tensor, "*lead C"], Float[Tensor, "*lead C"]]:
        own = torch.as_tensor(self.sigma, dtype=f.dtype, device=f.device).detach()
        return f, (own * sigma).square().expand(f.shape)

    def split_noise(self) -> "tuple[Gaussian, float | None]":
        """One noise level per output is fixed."""
        try:
            sigma = float(self.sigma)
        except (TypeError, ValueError, RuntimeError):
            return self, None
        return Gaussian(class_axis=self.class_axis), sigma

    def at_noise(self, sigma: float) -> "Gaussian":
        return replace(self, sigma=sigma)
