"""One temperature for the logits of a classifier, softmax(f / T): what anyone can do for a network without a posterior.

    Scaled        T, and conformal scores of the probabilities that it gives, [n]
    temperature   T > 0 from logits [n, C] and classes [n] of rows that were held out

T maximises the likelihood of the held-out rows, with a standard normal prior on log T: of few rows that are all
classified rightly the likelihood alone would make any network certain.

>>> import torch
>>> logits, targets = torch.tensor([[4.0, 0.0]]).repeat(100, 1), torch.tensor([0] * 90 + [1] * 10)
>>> f = logits / temperature(logits, targets)
>>> [round(p, 2) for p in f[0].softmax(0).tolist()]                # right on 90 of 100: as sure as that
[0.9, 0.1]
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lapwing.errors import DataError
from lapwing.tables.conformal import Conformal, class_scores

WIDEST = 5.0
"""Bound on |log T|."""


@dataclass(frozen=True, eq=False)
class Scaled:
    """The network alone, with its temperature."""

    temperature: float
    conformal: Conformal

    def __post_init__(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise DataError(f"the temperature of the network is {self.temperature}; expected a positive number.")

    @staticmethod
    def of(logits: Float[Tensor, "n classes"], targets: Int[Tensor, " n"]) -> Scaled:
        """From rows that were held out."""
        found = temperature(logits, targets)
        return Scaled(found, Conformal(class_scores((logits / found).softmax(1), targets)))

    def probabilities(self, logits: Float[Tensor, "n classes"]) -> Float[Tensor, "n classes"]:
        return (logits / self.temperature).softmax(1)


def temperature(logits: Float[Tensor, "n classes"], targets: Int[Tensor, " n"]) -> float:
    """The most probable T, to a relative 1e-3: the best of a grid, looked at again between its neighbours."""
    low, high = -WIDEST, WIDEST
    best = 0.0
    while high - low > 1e-3:
        grid = torch.linspace(low, high, 41, dtype=torch.float64).tolist()
        loss = [float(nn.functional.cross_entropy(logits / exp(t), targets, reduction="sum")) + t**2 / 2 for t in grid]
        best = grid[loss.index(min(loss))]
        step = (high - low) / 40
        low, high = max(best - step, -WIDEST), min(best + step, WIDEST)
    return exp(best)
