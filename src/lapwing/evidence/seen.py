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

The targets leave a fingerprint, whatever their order and batches, so that evidences of other data are told apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lapwing.errors import CurvatureError
from lapwing.estimate.data_pass import Batches, Watched
from lapwing.evidence.marginal import GaussianFit


@dataclass
class Seen:
    """Data points, the log-likelihood or the squared residuals, and the outputs' shape, of the latest pass.

    Squared residuals are at least the square of float32's rounding of their target, unless they are `exact`. Without
    `printing` there is no fingerprint.
    """

    regression: bool
    points: int = 0
    targets: int = 0
    total: Tensor | float = 0.0
    shape: torch.Size | None = None
    exact: bool = False
    prints: Tensor | int | None = 0
    printing: bool = True

    @property
    def fingerprint(self) -> int | None:
        """Of the targets of all data points, as a set; None where those of earlier ones are not known."""
        return None if self.prints is None else int(self.prints)

    def watching(self, batches: Batches) -> Watched:
        """The batches, of which every pass is noted here."""
        return Watched(batches, self.start, self.saw)

    def start(self) -> None:
        self.points, self.targets, self.total, self.shape = 0, 0, 0.0, None
        self.prints = 0 if self.printing else None

    def saw(self, value: Tensor, y: Tensor, log_prob: Tensor) -> None:
        self.points += len(value)
        self.targets += value.numel()
        self.prints = None if self.prints is None else self.prints + fingerprint(y)
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


_ODD, _MIXED = 0x5851F42D4C957F2D, 0x14057B7EF767814F
"""Multipliers of the hash."""


def fingerprint(y: Tensor) -> Int[Tensor, ""]:
    """A hash [] of the targets of a batch, a sum over data points modulo 2^64: sets of data add.

    Numbers count as float32 rounds them, so that a copy in float64 has the same hash.
    """
    rows = (
        y.detach().flatten(1) if y.dim() > 1 else y.detach().unsqueeze(1)
    ).float() + 0.0  # one zero, where there are two
    bits = rows.contiguous().view(torch.int32).long()  # + 0.0: there are two zeros, and one counts
    place = torch.arange(1, bits.shape[1] + 1, device=y.device)
    hashed = ((bits + place * _ODD) * (2 * place * _MIXED + 1)).sum(1)
    for shift in (33, 29, 32):  # a sum of these is not the sum over columns
        hashed = (hashed ^ (hashed >> shift)) * _ODD
    return hashed.sum()


def joint_fingerprint(a: int | None, b: int | None) -> int | None:
    """Of two sets of data points together, from those of each; None where one is not known."""
    return None if a is None or b is None else (a + b + 2**63) % 2**64 - 2**63
