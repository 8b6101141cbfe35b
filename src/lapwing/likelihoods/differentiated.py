"""A likelihood from a user's negative log-likelihood of one data point, differentiated by `torch.func`.

    nll(f_n, y_n) -> scalar -log p(y_n | f_n),   f_n and y_n without the batch axis, f_n in the network's own layout

A custom loss may couple positions, so all outputs of a data point form one block: lead = [B], C = f[n].numel(),
`to_last` flattens f to [B, C], and `from_last(., f.shape)` restores it. `hessian` is exact; as nothing says that it is
positive semi-definite, `hessian_sqrt` and `psd_hessian` give its positive part (negative eigenvalues set to zero): the
Hessian itself for a convex loss. The Fisher would need an expectation over y that the function does not tell:
`fisher` raises, and `sample` works when a sampler is given.

Cost per data point: C Hessian-vector products and O(C^2) memory; O(C^3) for the square root.

>>> import torch
>>> likelihood = from_function(lambda f, y: ((f - y) ** 2).sum() + f[0] * f[1])
>>> f, y = torch.tensor([[1.0, 2.0]]), torch.zeros(1, 2)
>>> likelihood.log_prob(f, y)                                     # -(1 + 4 + 2)
tensor([-7.])
>>> likelihood.hessian(f, y)                                      # 2 I, and 1 from the coupling
tensor([[[2., 1.],
         [1., 2.]]])
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from lapwing.errors import DataError, LikelihoodError
from lapwing.likelihoods.base import Likelihood, message, positive_part, positive_sqrt, working

NegativeLogLikelihood = Callable[[Tensor, Tensor], Tensor]
Sampler = Callable[[Tensor, torch.Generator | None], Tensor]


@dataclass(frozen=True)
class FromFunction(Likelihood):
    """See `from_function`. Not known to be convex: the square root is that of the positive part."""

    convex: ClassVar[bool] = False

    nll: NegativeLogLikelihood
    sampler: Sampler | None = None

    def to_last(self, f: Shaped[Tensor, "batch *outputs"]) -> Shaped[Tensor, "batch C"]:
        """All outputs of a data point in one axis: [B, C]."""
        self._axis(f)
        return f.flatten(1)

    def from_last(
        self, f_last: Shaped[Tensor, "batch C"], shape: torch.Size | None = None
    ) -> Shaped[Tensor, "batch *outputs"]:
        """Undo `to_last` for outputs of the given shape; without one, the outputs were [B, C]."""
        return f_last if shape is None else f_last.reshape(shape)

    def _check_target(self, f: Tensor, y: Tensor) -> None:
        if y.ndim == 0 or y.shape[0] != f.shape[0]:
            raise LikelihoodError(
                message(
                    f"targets of shape {tuple(y.shape)} for outputs of shape {tuple(f.shape)}",
                    f"{f.shape[0]} targets along the first axis",
                    "one target per data point, batch axis first",
                )
            )

    def _invalid(self, f: Tensor, y: Tensor) -> Bool[Tensor, "*target"]:
        return ~torch.isfinite(y)

    def _domain(self, f: Tensor) -> tuple[str, str]:
        return "finite targets", "remove or impute the missing targets"

    def log_prob(self, f: Float[Tensor, "batch *outputs"], y: Tensor) -> Float[Tensor, " batch"]:
        self._check_metadata(f, y)
        f = working(f)
        return -self._map(self.nll, f, y, f.shape[:1])

    def grad(self, f: Float[Tensor, "batch *outputs"], y: Tensor) -> Float[Tensor, "batch *outputs"]:
        self._check_metadata(f, y)
        f = working(f)
        return self._map(torch.func.grad(self.nll), f, y, f.shape)

    def hessian(self, f: Float[Tensor, "batch *outputs"], y: Tensor) -> Float[Tensor, "batch C C"]:
        self._check_metadata(f, y)
        f = working(f)
        flat = self.to_last(f)

        def flat_nll(f_n: Tensor, y_n: Tensor) -> Tensor:
            return self.nll(f_n.reshape(f.shape[1:]), y_n)

        # Reverse over reverse: torch.func.hessian is forward over reverse, and fewer operations have a forward rule.
        return self._map(torch.func.jacrev(torch.func.grad(flat_nll)), flat, y, flat.shape + flat.shape[1:])

    def hessian_sqrt(self, f: Float[Tensor, "batch *outputs"], y: Tensor) -> Float[Tensor, "batch C R"]:
        return positive_sqrt(self._finite_hessian(f, y))

    def psd_hessian(self, f: Float[Tensor, "batch *outputs"], y: Tensor) -> Float[Tensor, "batch C C"]:
        return positive_part(self._finite_hessian(f, y))

    def fisher(self, f: Float[Tensor, "batch *outputs"]) -> Float[Tensor, "batch C C"]:
        raise LikelihoodError(
            message(
                "a likelihood from a function",
                "one whose expectation over targets is known",
                "use hessian or psd_hessian; or average grad grad^T over sample(f), given a sampler",
            )
        )

    def fisher_sqrt(self, f: Float[Tensor, "batch *outputs"]) -> Float[Tensor, "batch C R"]:
        return self.fisher(f)

    @torch.no_grad()
    def sample(self, f: Float[Tensor, "batch *outputs"], generator: torch.Generator | None = None) -> Tensor:
        self._check_outputs(f)
        if self.sampler is None:
            raise LikelihoodError(
                message(
                    "no sampler for a likelihood from a function",
                    "a function sample(f, generator) -> y for a batch",
                    "from_function(nll, sample=...)",
                )
            )
        y = self.sampler(working(f), generator)
        self._check_metadata(f, y)
        return y

    def _finite_hessian(self, f: Tensor, y: Tensor) -> Float[Tensor, "batch C C"]:
        hessian = self.hessian(f, y)
        finite = torch.isfinite(hessian).flatten(1).all(1)
        if not bool(finite.all()):
            index = int((~finite).nonzero()[0, 0])
            raise DataError(
                message(
                    f"a non-finite Hessian of nll at data point {index} of the batch",
                    "finite second derivatives",
                    "check that data point, and guard divisions, logarithms and roots in nll",
                )
            )
        return hessian

    def _map(self, function: Callable[..., Any], f: Tensor, y: Tensor, expected: torch.Size) -> Tensor:
        """vmap over data points; errors inside nll become ours, with the original as cause."""
        if f.shape[0] == 0:  # vmap refuses an empty batch
            return f.new_zeros(expected)
        point = f"outputs {tuple(f.shape[1:])} and target {tuple(y.shape[1:])}"
        try:
            result = torch.func.vmap(function)(f, y)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise LikelihoodError(
                message(
                    f"nll failing on one data point, {point}: {error}",
                    "a scalar from nll(f_n, y_n), by torch operations that vmap and differentiation allow",
                    "write nll for ONE data point without its batch axis, and branch by torch.where instead of if",
                )
            ) from error
        if not isinstance(result, Tensor) or result.shape != expected:
            shape = tuple(result.shape[1:]) if isinstance(result, Tensor) else type(result).__name__
            raise LikelihoodError(
                message(f"nll returning shape {shape} per data point", "a scalar", "reduce in nll, e.g. .sum()")
            )
        return result.to(f.dtype)


def from_function(nll: NegativeLogLikelihood, sample: Sampler | None = None) -> FromFunction:
    """Likelihood with -log p = `nll(f_n, y_n)`, and optionally `sample(f, generator) -> y` for a whole batch."""
    return FromFunction(nll, sample)
