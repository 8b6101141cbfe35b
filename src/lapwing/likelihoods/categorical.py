"""Classification: y ~ Categorical(p), p = softmax(f), with an analytic square root of rank C - 1.

    -log p = logsumexp(f) - f_y,   grad = p - e_y,   H = Fisher = diag(p) - p p^T

Square root: let s = sqrt(p), a unit vector, and Q = I - v v^T / (1 + s_C) the reflection with v = s + e_C, which takes
e_C to -s. The other columns of Q complete s to an orthonormal basis, so Q_{:, <C} Q_{:, <C}^T = I - s s^T, and
S = diag(s) Q_{:, <C} has S S^T = diag(p) - p p^T. One outer product: O(C^2) per position, no factorisation.

y is int64 [*lead]: [B] for f [B, C], [B, T] for [B, T, C], [B, H, W] for [B, C, H, W]. S is [*lead, C, C - 1].

>>> import torch
>>> f, y = torch.tensor([[0.0, 0.0]]), torch.tensor([1])
>>> Categorical().grad(f, y)                                      # p - e_y, p = (1/2, 1/2)
tensor([[ 0.5000, -0.5000]])
>>> Categorical().hessian(f, y)                                   # p (1 - p) = 1/4
tensor([[[ 0.2500, -0.2500],
         [-0.2500,  0.2500]]])
>>> S = Categorical().hessian_sqrt(f, y)
>>> S.shape, torch.allclose(S @ S.mT, Categorical().hessian(f, y))
(torch.Size([1, 2, 1]), True)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn.functional import cross_entropy

from lapwing.distributions.gaussian_logits import bridge, bridge_norm, probit, probit_full, shrink
from lapwing.errors import DataError, LikelihoodError
from lapwing.likelihoods.base import Positionwise, message, require_one_per_position
from lapwing.likelihoods.links import Link

_NO_CLASS = -(2**62)
"""What torch is told to ignore, in the place of -100, which would pass for a class without a word."""


@dataclass(frozen=True)
class Categorical(Positionwise):
    """softmax(f). Positions whose target is `ignore_index` contribute nothing.

    `fisher` and `sample` see no targets, and treat every position alike; estimators ask `observed` which ones count.
    """

    convex: ClassVar[bool] = True
    per_output: ClassVar[bool] = False
    links: ClassVar[Mapping[str, Link]] = {
        "probit": Link(probit, outputs=shrink),
        "probit_full": Link(probit_full, joint=True),
        "bridge": Link(bridge, joint=True),
        "bridge_norm": Link(bridge_norm, joint=True),
    }

    ignore_index: int | None = None

    def _check_outputs(self, f: Tensor) -> None:
        super()._check_outputs(f)
        if f.shape[self._axis(f)] < 2:
            raise LikelihoodError(
                message(
                    f"{f.shape[self._axis(f)]} class in outputs of shape {tuple(f.shape)}",
                    "at least two classes",
                    "use likelihood='binary' (Bernoulli) for one logit, or Categorical(class_axis=...) if the classes "
                    "are on another axis",
                )
            )

    def _check_target(self, f: Tensor, y: Tensor) -> None:
        require_one_per_position(self, f, y, "one class index per position")
        if y.dtype != torch.int64:
            raise LikelihoodError(
                message(f"Categorical targets of dtype {y.dtype}", "class indices in torch.int64", "use y.long()")
            )

    def _invalid(self, f: Tensor, y: Tensor) -> Bool[Tensor, "*target"]:
        out_of_range = (y < 0) | (y >= f.shape[self._axis(f)])
        return out_of_range if self.ignore_index is None else out_of_range & (y != self.ignore_index)

    def _all_valid(self, f: Tensor, y: Tensor) -> bool:
        if self.ignore_index is not None or not y.numel():
            return super()._all_valid(f, y)
        low, high = torch.aminmax(y)
        return int(low) >= 0 and int(high) < f.shape[self._axis(f)]

    def _domain(self, f: Tensor) -> tuple[str, str]:
        last = f.shape[self._axis(f)] - 1
        remedy = "check the number of outputs, count classes from 0, or set ignore_index for positions without a label"
        return f"class indices from 0 to {last}", remedy

    def _target_to_last(self, f: Float[Tensor, "*lead C"], y: Tensor) -> Int64[Tensor, "*lead"]:
        return y

    def observed(self, y: Int64[Tensor, "*lead"]) -> Bool[Tensor, "*lead"] | None:
        return None if self.ignore_index is None else y != self.ignore_index

    def _log_prob(self, f: Float[Tensor, "*lead C"], y: Int64[Tensor, "*lead"]) -> Float[Tensor, "*lead"]:
        kept = self.observed(y)
        index = y if kept is None else y.where(kept, 0)
        log_p = f.log_softmax(-1).gather(-1, index.unsqueeze(-1)).squeeze(-1)
        return log_p if kept is None else log_p.where(kept, 0.0)

    def total_loss(self, f: Float[Tensor, "batch *outputs"], y: Int64[Tensor, "*lead"]) -> Float[Tensor, ""]:
        if self.ignore_index is not None or f.dim() != 2:
            return super().total_loss(f, y)
        f, y = self._prepare(f, y)
        return cross_entropy(f, y, reduction="sum", ignore_index=_NO_CLASS)

    def _grad(self, f: Float[Tensor, "*lead C"], y: Int64[Tensor, "*lead"]) -> Float[Tensor, "*lead C"]:
        kept = self.observed(y)
        index = (y if kept is None else y.where(kept, 0)).unsqueeze(-1)
        grad = f.softmax(-1).scatter_add(-1, index, -torch.ones_like(f[..., :1]))
        return grad if kept is None else grad.where(kept.unsqueeze(-1), 0.0)

    def _hessian(self, f: Float[Tensor, "*lead C"], y: Int64[Tensor, "*lead"]) -> Float[Tensor, "*lead C C"]:
        kept = self.observed(y)
        hessian = self._fisher(f)
        return hessian if kept is None else hessian.where(kept[..., None, None], 0.0)

    def _hessian_sqrt(self, f: Float[Tensor, "*lead C"], y: Int64[Tensor, "*lead"]) -> Float[Tensor, "*lead C R"]:
        kept = self.observed(y)
        root = self._fisher_sqrt(f)
        return root if kept is None else root.where(kept[..., None, None], 0.0)

    def _fisher(self, f: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead C C"]:
        p = f.softmax(-1)
        return torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)

    def _fisher_sqrt(self, f: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead C R"]:
        s = (0.5 * f.log_softmax(-1)).exp()
        head, last = s[..., :-1], s[..., -1:]
        sv = torch.cat([head**2, last * (1 + last)], dim=-1)  # s * v
        root = -sv.unsqueeze(-1) * (head / (1 + last)).unsqueeze(-2)
        # s_j - s_j p_j / (1 + s_C) in a form without cancellation between the two terms as p_j -> 1.
        root.diagonal(dim1=-2, dim2=-1).copy_(head * (last + (1 - head**2)) / (1 + last))
        return root

    def _hessian_diagonal(self, f: Float[Tensor, "*lead C"], y: Int64[Tensor, "*lead"]) -> Float[Tensor, "*lead C"]:
        kept, p = self.observed(y), f.softmax(-1)
        return p * (1 - p) if kept is None else (p * (1 - p)).where(kept.unsqueeze(-1), 0.0)

    def _hessian_mv(
        self, f: Float[Tensor, "*lead C"], y: Int64[Tensor, "*lead"], v: Float[Tensor, "*lead C"]
    ) -> Float[Tensor, "*lead C"]:
        kept = self.observed(y)
        p = f.softmax(-1)
        product = p * (v - (p * v).sum(-1, keepdim=True))
        return product if kept is None else product.where(kept.unsqueeze(-1), 0.0)

    def _sample(self, f: Float[Tensor, "*lead C"], generator: torch.Generator | None) -> Int64[Tensor, "*lead"]:
        """The class at which the sum of the probabilities passes a uniform number: two thirds of multinomial's time."""
        below = f.softmax(-1).cumsum(-1)
        if not bool(below[..., -1].isfinite().all()):
            raise DataError(
                "outputs hold NaN or infinite values, of which no class can be drawn; expected finite ones."
            )
        level = torch.rand(f.shape[:-1], dtype=f.dtype, device=f.device, generator=generator)
        level = (level.unsqueeze(-1) * below[..., -1:]).contiguous()
        return torch.searchsorted(below, level, right=True).squeeze(-1).clamp_max(f.shape[-1] - 1)

    def _predicted(self, f: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead C"]:
        return f.softmax(-1)

    def _outputs_of(self, p: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead C"]:
        return p.clamp_min(torch.finfo(p.dtype).tiny).log()  # the logarithm of a distribution is its logits

    def refuse_probabilities(self, f: Float[Tensor, "batch *outputs"]) -> None:
        if bool((f >= 0).all()) and bool((f <= 1).all()) and bool((self.to_last(f).sum(-1) - 1).abs().max() < 1e-3):
            raise DataError(
                "the model's outputs are probabilities: none is negative, and they sum to one; expected logits. "
                "Leave out the softmax at its end, or take the logarithm of what it gives."
            )
