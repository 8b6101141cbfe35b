"""Fitted: what one pass over the data leaves behind. Sums over data points, so that data sets add."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.errors import ParameterError
from lapwing.evidence import GaussianFit
from lapwing.evidence.seen import joint_fingerprint
from lapwing.linalg import Curvature


@dataclass(frozen=True, eq=False)
class Fitted:
    """The curvature at unit noise, the mode, how well the mode fits, and how many points of which shape were seen.

    `fingerprint` is that of their targets (`evidence.seen`); None where it is not known, as from an older file.
    """

    curvature: Curvature
    mean: Float[Tensor, " params"]
    fit: Float[Tensor, ""] | GaussianFit
    n_data: int
    output_shape: torch.Size
    fingerprint: int | None = None

    def __add__(self, other: Fitted) -> Fitted:
        """The fit of both data sets, at the same weights and for the same outputs."""
        if not torch.equal(self.mean, other.mean):
            raise ParameterError(
                "the model's weights have changed since the first fit; expected the same, as curvatures add only at "
                "one point. Fit all data again with override=True."
            )
        if self.output_shape != other.output_shape:
            raise ParameterError(
                f"the outputs have shape {tuple(other.output_shape)} and had {tuple(self.output_shape)} in the first "
                "fit; expected the same."
            )
        if isinstance(self.fit, GaussianFit) and isinstance(other.fit, GaussianFit):
            fit = GaussianFit(self.fit.targets + other.fit.targets, self.fit.squares + other.fit.squares)
        else:
            assert isinstance(self.fit, Tensor)
            assert isinstance(other.fit, Tensor)
            fit = self.fit + other.fit
        curvature, count = self.curvature.pooled(other.curvature), self.n_data + other.n_data
        both = joint_fingerprint(self.fingerprint, other.fingerprint)
        return Fitted(curvature, self.mean, fit, count, self.output_shape, both)
