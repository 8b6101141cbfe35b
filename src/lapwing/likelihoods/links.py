"""Links: closed forms from Gaussian outputs to predicted probabilities, by the names that `link_approx` takes.

A likelihood lists its own in `links`. `integrated` makes one of any function of one output.

>>> import torch
>>> integrated(torch.sigmoid).of(torch.zeros(1, 1), torch.ones(1, 1)).round(decimals=4)         # symmetric around zero
tensor([[0.5000]])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.errors import LikelihoodError, OptionError

NAMES = ("probit", "probit_full", "bridge", "bridge_norm", "quadrature", "mc")
"""What users may ask of any likelihood; "mc" is no closed form but the mean over draws."""
DEFAULT = "probit"
"""What is asked for where nobody chose; a likelihood with probabilities has this one."""
POINTS, REACH = 257, 9.0
"""Of the trapezoidal rule over a standard normal density, which is exp(-40) of its top at the ends."""


@dataclass(frozen=True)
class Link:
    """A closed form on the class axis: `of` takes the mean and the variances, or (`joint`) the covariance, of outputs.

    `outputs`, where there is one, gives the outputs at which the likelihood itself says these probabilities, entry by
    entry: more exact than their inverse where a probability rounds to one.
    """

    of: Callable[[Tensor, Tensor], Tensor]
    joint: bool = False
    outputs: Callable[[Tensor, Tensor], Tensor] | None = None

    def check(self, value: Tensor) -> None:
        """Refuses outputs whose covariance the closed form would not know how to read."""
        if self.joint and value.dim() != 2:
            raise LikelihoodError(
                f"the outputs have shape {tuple(value.shape)}; a link with covariances needs [batch, classes]. "
                "Use link='probit'."
            )


def integrated(inverse_link: Callable[[Tensor], Tensor]) -> Link:
    """E inverse_link(f) for every Gaussian output f alone, by the trapezoidal rule over nine deviations either way.

    Points are 0.07 deviations apart: right to rounding for a function that is smooth on that scale.
    """

    def of(mean: Tensor, variance: Tensor) -> Tensor:
        points = torch.linspace(-REACH, REACH, POINTS, dtype=mean.dtype, device=mean.device)
        weights = torch.softmax(-points.square() / 2, 0)
        return inverse_link(mean.unsqueeze(-1) + variance.sqrt().unsqueeze(-1) * points) @ weights

    return Link(of)


def check_link(link: str, own: Iterable[str] = ()) -> None:
    """Refuses a name that is none, and none of a likelihood's `own`."""
    if link not in (known := {*NAMES, *own}):
        raise OptionError(f"unknown link {link!r}; expected one of {sorted(known)}.")
