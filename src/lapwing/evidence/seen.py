"""Seen: what a pass over the data tells the evidence about the fit, collected while the curvature is estimated.

>>> import torch
>>> from torch import nn
>>> from lapwing import estimate
>>> from lapwing.likelihoods import Gaussian
>>> from lapwing.tangent import Tangent
>>> seen = Seen(regression=True)
>>> x = torch.ones(3, 2)
>>> _ = estimate.diagonal(Tangent(nn.Linear(2, 1)), Gaussian(), seen.watching([(x, x[:, :1])]))
>>> seen.points, seen.fit(torch.float32).targets
(3, 3)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.errors import CurvatureError
from lapwing.estimate.data_pass import Batches, Watched
from lapwing.evidence.marginal import GaussianFit


@dataclass
class Seen:
    """Data points, the log-likelihood or the squared residuals, and the outputs' shape, of the latest pass.

    Squared residuals are at least the square of float32's rounding of their target, unless they are `exact`.
    """

    regression: bool
    points: int = 0
    targets: int = 0
    total: Tensor | float = 0.0
    shape: torch.Size | None = None
    exact: bool = False

    def watching(self, batches: Batches) -> Watched:
        """The batches, of which every pass is noted here."""
        return Watched(batches, self.start, self.saw)

    def start(self) -> None:
        self.points, self.targets, self.total, self.shape = 0, 0, 0.0, None

    def saw(self, value: Tensor, y: Tensor, log_prob: Tensor) -> None:
        self.points += len(value)
        self.targets += value.numel()
        # sequences may have another length in every batch; the shape of the first says how many outputs there are
        self.shape = value.shape[1:] if self.shape is None else self.shape
        self.total = self.total + (self._squares(value, y) if self.regression else log_prob.double().sum())

    def fit(self, dtype: torch.dtype) -> Float[Tensor, ""] | GaussianFit:
        if not isinstance(self.total, Tensor):
            raise CurvatureError(
                "the estimator reported no batch; expected it to go through the batches with those functions of "
                "lapwing.estimate.data_pass that check and report them: pulled, linearised or observe."
            )
        total = self.total.detach().to(dtype)
        return GaussianFit(self.targets, total) if self.regression else total

    def _squares(self, value: Tensor, y: Tensor) -> Float[Tensor, ""]:
        """The sum of squared residuals; none counts as less than 1.2e-7 of its target, the rounding of float32.

        Also in float64: a noise level below that would multiply the curvature, and its rounding, by more than 1e14.
        """
        squares = (value - y).double().square()
        if self.exact:
            return squares.sum()
        rounding = max(torch.finfo(value.dtype).eps, torch.finfo(torch.float32).eps) * y.double()
        return torch.maximum(squares, rounding.square()).sum()
