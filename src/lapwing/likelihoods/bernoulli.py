"""Binary and multi-label classification: y_c ~ Bernoulli(s(f_c)) independently, s the logistic function.

    -log p = -sum_c y_c log s(f_c) + (1 - y_c) log s(-f_c)
    grad = s(f) - y,   H = Fisher = diag(s(f) s(-f)),   S = diag(sqrt(s(f) s(-f)))

f and y have the same shape; y holds 0 and 1 in any dtype. Soft targets in [0, 1] are accepted, and make this the
cross-entropy rather than a normalised density. S is [*lead, C, C]. Cost O(C^2) per position, for the zeros.

>>> import torch
>>> f, y = torch.tensor([[0.0]]), torch.tensor([[1]])
>>> Bernoulli().grad(f, y), Bernoulli().hessian(f, y)             # 1/2 - 1, and 1/2 * 1/2
(tensor([[-0.5000]]), tensor([[[0.2500]]]))
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from lapwing.distributions.gaussian_logits import quadrature, shrink
from lapwing.errors import LapwingWarning
from lapwing.likelihoods.base import Positionwise, require_real, require_same_shape
from lapwing.likelihoods.links import Link

FEW_LOGITS = 20
"""Fewer outputs may lie between 0 and 1 by chance."""


def _shrunk(mean: Tensor, variance: Tensor) -> Tensor:
    return torch.sigmoid(shrink(mean, variance))


def _integrated(mean: Tensor, variance: Tensor) -> Tensor:
    return quadrature(mean.unsqueeze(-1), variance.unsqueeze(-1)).squeeze(-1)


@dataclass(frozen=True)
class Bernoulli(Positionwise):
    """Independent coins with logits f."""

    convex: ClassVar[bool] = True
    per_output: ClassVar[bool] = True
    diagonal: ClassVar[bool] = True
    links: ClassVar[Mapping[str, Link]] = {
        "probit": Link(_shrunk, outputs=shrink),
        "probit_full": Link(_shrunk, outputs=shrink),  # every logit is alone
        "quadrature": Link(_integrated),
    }

    def _check_target(self, f: Tensor, y: Tensor) -> None:
        require_same_shape(self, f, y)
        require_real(self, y, allow_bool=True)

    def _invalid(self, f: Tensor, y: Tensor) -> Bool[Tensor, "*target"]:
        return ~((y >= 0) & (y <= 1))

    def _all_valid(self, f: Tensor, y: Tensor) -> bool:
        if y.dtype == torch.bool or not y.numel():
            return True
        low, high = y.aminmax()  # NaN where one is
        return bool(low >= 0) and bool(high <= 1)

    def _domain(self, f: Tensor) -> tuple[str, str]:
        return "0, 1, or a probability between them", "code the classes as 0 and 1 (for -1 and 1: (y + 1) / 2)"

    def _log_prob(self, f: Float[Tensor, "*lead C"], y: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead"]:
        return torch.lerp(logsigmoid(-f), logsigmoid(f), y).sum(-1)

    def _grad(self, f: Float[Tensor, "*lead C"], y: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead C"]:
        return torch.lerp(f.sigmoid(), -(-f).sigmoid(), y)

    def _fisher(self, f: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead C C"]:
        return torch.diag_embed(f.sigmoid() * (-f).sigmoid())

    def _fisher_sqrt(self, f: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead C R"]:
        # In log space the root keeps half the exponent, and its derivative in f stays finite where s(f) underflows.
        return torch.diag_embed((0.5 * (logsigmoid(f) + logsigmoid(-f))).exp())

    def _hessian_diagonal(self, f: Float[Tensor, "*lead C"], y: Tensor) -> Float[Tensor, "*lead C"]:
        return self._hessian_mv(f, y, torch.ones_like(f))

    def _hessian_mv(
        self, f: Float[Tensor, "*lead C"], y: Tensor, v: Float[Tensor, "*lead C"]
    ) -> Float[Tensor, "*lead C"]:
        return f.sigmoid() * (-f).sigmoid() * v

    def _sample(self, f: Float[Tensor, "*lead C"], generator: torch.Generator | None) -> Float[Tensor, "*lead C"]:
        level = torch.rand(f.shape, dtype=f.dtype, device=f.device, generator=generator)  # a third of bernoulli's time
        return (level < f.sigmoid()).to(f.dtype)

    def _predicted(self, f: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead C"]:
        return torch.sigmoid(f)

    def _outputs_of(self, p: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead C"]:
        limits = torch.finfo(p.dtype)  # below one by as much as can be told from it
        return torch.logit(p.clamp(limits.tiny, 1 - limits.eps))

    def refuse_probabilities(self, f: Float[Tensor, "batch *outputs"]) -> None:
        if f.numel() >= FEW_LOGITS and bool(f.amin() >= 0) and bool(f.amax() <= 1):
            warnings.warn(
                f"all {f.numel()} outputs of the model lie between 0 and 1; expected logits. If it ends in a "
                "sigmoid, leave that out, or take torch.logit of what it gives.",
                LapwingWarning,
                stacklevel=2,
            )
