"""A mixture of two coins with three outputs h: the smallest likelihood whose Hessian and Fisher differ.

    p(y | h) = s(h1) s(h2)^y s(-h2)^(1-y) + s(-h1) s(h3)^y s(-h3)^(1-y),   s the logistic function, y in {0, 1}

With z = 2 y - 1, u = s(-z h2), w = s(-z h3), and r = s(h1 + log s(z h2) - log s(z h3)) the responsibility of the first
coin:

    grad = (s(h1) - r,  -r z u,  (r - 1) z w)
    H = diag(s(h1) s(-h1),  r u (1 - u),  (1 - r) w (1 - w)) - r (1 - r) d d^T,   d = (1, z u, -z w)

H is indefinite: `hessian_sqrt` and `psd_hessian` give its positive part (negative eigenvalues set to zero).

The Fisher has rank one. y is a coin with log-odds L(h) = log p(1 | h) - log p(0 | h), so the gradient is
(s(L) - y) dL/dh: parallel for both values of y. Its second moment is s(L) s(-L) (dL/dh)(dL/dh)^T, hence
S = sqrt(s(L) s(-L)) dL/dh, of shape [*lead, 3, 1], where dL/dh = grad(y=0) - grad(y=1).

f is [*lead, 3] with the class axis last; y is [*lead]. Cost O(1) per position, and a 3 x 3 eigendecomposition for the
positive part. Everything is computed in log space, and is finite for any finite h.

>>> import torch
>>> h, y = torch.zeros(1, 3), torch.tensor([1])
>>> BernoulliMixture().log_prob(h, y).exp().round(decimals=4)     # two fair coins
tensor([0.5000])
>>> BernoulliMixture().grad(h, y)                                 # r = u = w = 1/2
tensor([[ 0.0000, -0.2500, -0.2500]])
>>> BernoulliMixture().fisher(h)                                  # L = 0, dL/dh = (0, 1/2, 1/2)
tensor([[[0.0000, 0.0000, 0.0000],
         [0.0000, 0.0625, 0.0625],
         [0.0000, 0.0625, 0.0625]]])
>>> BernoulliMixture().hessian(h, y)[0, 0]                        # not the Fisher: its diagonal is (0, 1/16, 1/16)
tensor([ 0.0000, -0.1250,  0.1250])
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from lapwing.errors import LikelihoodError
from lapwing.likelihoods.base import (
    Positionwise,
    message,
    positive_part,
    positive_sqrt,
    require_one_per_position,
    require_real,
)


@dataclass(frozen=True)
class BernoulliMixture(Positionwise):
    """s(h1) Bernoulli(s(h2)) + s(-h1) Bernoulli(s(h3)). Not convex: the square root is that of the positive part."""

    convex: ClassVar[bool] = False
    per_output: ClassVar[bool] = False

    def _check_outputs(self, f: Tensor) -> None:
        super()._check_outputs(f)
        if f.shape[self._axis(f)] != 3:
            raise LikelihoodError(
                message(
                    f"{f.shape[self._axis(f)]} outputs per position in shape {tuple(f.shape)}",
                    "three: the logit of the mixture weight, and the logits of the two coins",
                    "let the last layer give 3 outputs, or set class_axis if they are on another axis",
                )
            )

    def _check_target(self, f: Tensor, y: Tensor) -> None:
        require_one_per_position(self, f, y, "one 0 or 1 per position")
        require_real(self, y, allow_bool=True)

    def _invalid(self, f: Tensor, y: Tensor) -> Bool[Tensor, "*target"]:
        return (y != 0) & (y != 1)

    def _domain(self, f: Tensor) -> tuple[str, str]:
        return "0 or 1", "code the two classes as 0 and 1"

    def _log_prob(self, f: Float[Tensor, "*lead 3"], y: Float[Tensor, "*lead"]) -> Float[Tensor, "*lead"]:
        h1, h2, h3 = f.unbind(-1)
        z = 2 * y - 1
        return torch.logaddexp(logsigmoid(h1) + logsigmoid(z * h2), logsigmoid(-h1) + logsigmoid(z * h3))

    def _grad(self, f: Float[Tensor, "*lead 3"], y: Float[Tensor, "*lead"]) -> Float[Tensor, "*lead 3"]:
        h1, h2, h3 = f.unbind(-1)
        z = 2 * y - 1
        odds = _responsibility_logit(f, z)
        weight = h1.sigmoid() - odds.sigmoid()
        return torch.stack(
            [weight, -z * odds.sigmoid() * (-z * h2).sigmoid(), -z * (-odds).sigmoid() * (-z * h3).sigmoid()], dim=-1
        )

    def _hessian(self, f: Float[Tensor, "*lead 3"], y: Float[Tensor, "*lead"]) -> Float[Tensor, "*lead 3 3"]:
        h1, h2, h3 = f.unbind(-1)
        z = 2 * y - 1
        odds = _responsibility_logit(f, z)
        first, second = odds.sigmoid(), (-odds).sigmoid()
        u, w = (-z * h2).sigmoid(), (-z * h3).sigmoid()
        own = torch.stack(
            [h1.sigmoid() * (-h1).sigmoid(), first * u * (z * h2).sigmoid(), second * w * (z * h3).sigmoid()], dim=-1
        )
        d = torch.stack([torch.ones_like(u), z * u, -z * w], dim=-1)
        between = (first * second)[..., None, None] * d.unsqueeze(-1) * d.unsqueeze(-2)
        return torch.diag_embed(own) - between

    def _hessian_sqrt(self, f: Float[Tensor, "*lead 3"], y: Float[Tensor, "*lead"]) -> Float[Tensor, "*lead 3 3"]:
        return positive_sqrt(self._hessian(f, y))

    def _psd_hessian(self, f: Float[Tensor, "*lead 3"], y: Float[Tensor, "*lead"]) -> Float[Tensor, "*lead 3 3"]:
        return positive_part(self._hessian(f, y))

    def _fisher(self, f: Float[Tensor, "*lead 3"]) -> Float[Tensor, "*lead 3 3"]:
        root = self._fisher_sqrt(f)
        return root * root.mT

    def _fisher_sqrt(self, f: Float[Tensor, "*lead 3"]) -> Float[Tensor, "*lead 3 1"]:
        zero = torch.zeros_like(f[..., 0])
        log_odds = self._log_odds(f)
        slope = self._grad(f, zero) - self._grad(f, zero + 1)
        spread = (0.5 * (logsigmoid(log_odds) + logsigmoid(-log_odds))).exp()
        return (spread.unsqueeze(-1) * slope).unsqueeze(-1)

    def probability(self, f: Float[Tensor, "batch *outputs"]) -> Float[Tensor, "*lead"]:
        """Of a one."""
        return self._log_odds(self.to_last(f)).sigmoid()

    @property
    def has_classes(self) -> bool:
        return True

    def predicted(self, f: Float[Tensor, "batch *outputs"]) -> Float[Tensor, "*lead"]:
        return self.probability(f)

    def _log_odds(self, f: Float[Tensor, "*lead 3"]) -> Float[Tensor, "*lead"]:
        zero = torch.zeros_like(f[..., 0])
        return self._log_prob(f, zero + 1) - self._log_prob(f, zero)

    def _sample(self, f: Float[Tensor, "*lead 3"], generator: torch.Generator | None) -> Float[Tensor, "*lead"]:
        return torch.bernoulli(self._log_odds(f).sigmoid(), generator=generator)


def _responsibility_logit(f: Float[Tensor, "*lead 3"], z: Float[Tensor, "*lead"]) -> Float[Tensor, "*lead"]:
    h1, h2, h3 = f.unbind(-1)
    return h1 + logsigmoid(z * h2) - logsigmoid(z * h3)
