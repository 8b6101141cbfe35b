"""Gaussian regression with a learned variance: the outputs are D means m and then D log-variances l.

    -log p = sum_d (y_d - m_d)^2 exp(-l_d) / 2 + l_d / 2 + (1/2) log 2 pi
    grad_m = (m - y) exp(-l),   grad_l = (1 - (y - m)^2 exp(-l)) / 2
    H_mm = exp(-l),   H_ml = (y - m) exp(-l),   H_ll = (y - m)^2 exp(-l) / 2   (diagonal blocks [D, D])

det H < 0 wherever y differs from m: the negative log-likelihood is not convex. `hessian_sqrt` and `psd_hessian` give
the Fisher in its place, diag(exp(-l), 1/2), which is the expectation of H over y and always positive definite.

f is [*lead, 2 D] with the class axis last, y is [*lead, D] in the layout of f; S is [*lead, 2 D, 2 D]. Cost O(D^2) per
position, for the zeros.

>>> import torch
>>> f, y = torch.tensor([[1.0, 0.0]]), torch.tensor([[3.0]])      # mean 1, variance 1
>>> HeteroscedasticGaussian().grad(f, y)                          # (m - y, (1 - (y - m)^2) / 2)
tensor([[-2.0000, -1.5000]])
>>> HeteroscedasticGaussian().hessian(f, y)                       # determinant -(y - m)^2 / 2
tensor([[[1., 2.],
         [2., 2.]]])
>>> HeteroscedasticGaussian().psd_hessian(f, y)
tensor([[[1.0000, 0.0000],
         [0.0000, 0.5000]]])
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lapwing.distributions import ScaleMixture
from lapwing.errors import LikelihoodError
from lapwing.likelihoods.base import Positionwise, message, require_real, require_shape


@dataclass(frozen=True)
class HeteroscedasticGaussian(Positionwise):
    """N(m, exp(l)) with f = (m, l) along the class axis. Not convex: the square root is that of the Fisher."""

    convex: ClassVar[bool] = False
    per_output: ClassVar[bool] = True
    diagonal: ClassVar[bool] = True

    def _check_outputs(self, f: Tensor) -> None:
        super()._check_outputs(f)
        n_outputs = f.shape[self._axis(f)]
        if n_outputs % 2 or not n_outputs:
            raise LikelihoodError(
                message(
                    f"{n_outputs} outputs per position in shape {tuple(f.shape)}",
                    "an even number: D means, then D log-variances",
                    "let the last layer give 2 D outputs, or set class_axis if they are on another axis",
                )
            )

    def _check_target(self, f: Tensor, y: Tensor) -> None:
        axis = self._axis(f)
        n_targets = f.shape[axis] // 2
        expected = torch.Size((*f.shape[:axis], n_targets, *f.shape[axis + 1 :]))
        missing_axis = n_targets == 1 and y.shape == f.shape[:axis] + f.shape[axis + 1 :]
        remedy = f"add the output axis: y.unsqueeze({axis})" if missing_axis else "give one target per mean"
        require_shape(self, f, y, expected, "one value per mean, half the outputs", remedy)
        require_real(self, y, allow_bool=False)

    def _invalid(self, f: Tensor, y: Tensor) -> Bool[Tensor, "*target"]:
        return ~torch.isfinite(y)

    def _domain(self, f: Tensor) -> tuple[str, str]:
        return "finite targets", "remove or impute the missing targets"

    def _log_prob(self, f: Float[Tensor, "*lead C"], y: Float[Tensor, "*lead D"]) -> Float[Tensor, "*lead"]:
        mean, log_variance = f.chunk(2, -1)
        return -0.5 * ((y - mean) ** 2 * (-log_variance).exp() + log_variance + math.log(2 * math.pi)).sum(-1)

    def _grad(self, f: Float[Tensor, "*lead C"], y: Float[Tensor, "*lead D"]) -> Float[Tensor, "*lead C"]:
        mean, log_variance = f.chunk(2, -1)
        precision = (-log_variance).exp()
        return torch.cat([(mean - y) * precision, 0.5 * (1 - (y - mean) ** 2 * precision)], dim=-1)

    def _hessian(self, f: Float[Tensor, "*lead C"], y: Float[Tensor, "*lead D"]) -> Float[Tensor, "*lead C C"]:
        mean, log_variance = f.chunk(2, -1)
        precision = (-log_variance).exp()
        mixed = torch.diag_embed((y - mean) * precision)
        upper = torch.cat([torch.diag_embed(precision), mixed], dim=-1)
        lower = torch.cat([mixed, torch.diag_embed(0.5 * (y - mean) ** 2 * precision)], dim=-1)
        return torch.cat([upper, lower], dim=-2)

    def _psd_hessian(self, f: Float[Tensor, "*lead C"], y: Float[Tensor, "*lead D"]) -> Float[Tensor, "*lead C C"]:
        return self._fisher(f)

    def _fisher(self, f: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead C C"]:
        _, log_variance = f.chunk(2, -1)
        precision = (-log_variance).exp()
        return torch.diag_embed(torch.cat([precision, torch.full_like(precision, 0.5)], dim=-1))

    def _fisher_sqrt(self, f: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead C R"]:
        _, log_variance = f.chunk(2, -1)
        root = (-0.5 * log_variance).exp()
        return torch.diag_embed(torch.cat([root, torch.full_like(root, math.sqrt(0.5))], dim=-1))

    def _hessian_diagonal(self, f: Float[Tensor, "*lead C"], y: Tensor) -> Float[Tensor, "*lead C"]:
        return self._hessian_mv(f, y, torch.ones_like(f))

    def _hessian_mv(
        self, f: Float[Tensor, "*lead C"], y: Tensor, v: Float[Tensor, "*lead C"]
    ) -> Float[Tensor, "*lead C"]:
        _, log_variance = f.chunk(2, -1)
        of_mean, of_log_variance = v.chunk(2, -1)
        return torch.cat([(-log_variance).exp() * of_mean, 0.5 * of_log_variance], dim=-1)

    def _sample(self, f: Float[Tensor, "*lead C"], generator: torch.Generator | None) -> Float[Tensor, "*lead D"]:
        mean, log_variance = f.chunk(2, -1)
        noise = torch.randn(mean.shape, generator=generator, dtype=f.dtype, device=f.device)
        return mean + (0.5 * log_variance).exp() * noise

    def predictive(
        self, mean: Float[Tensor, "*lead C"], variance: Float[Tensor, "*lead C"], sigma: float | Tensor = 1.0
    ) -> ScaleMixture:
        return ScaleMixture.of_heads(mean, variance)

    def signal_and_noise(
        self, f: Float[Tensor, "*lead C"], sigma: float | Tensor = 1.0
    ) -> tuple[Float[Tensor, "*lead D"], Float[Tensor, "*lead D"]]:
        mean, log_variance = f.chunk(2, -1)
        return mean, log_variance.exp()
