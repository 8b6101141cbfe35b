"""Preferences (Bradley-Terry): of two rewards f [B, 2] one was chosen, p(y) = softmax(f)_y. The rewards are the answer.

    -log p(1) = log(1 + exp(f_0 - f_1)),   H = p (1 - p) [[1, -1], [-1, 1]]

Only differences of rewards are seen, so H has rank one. A network is fitted to pairs x [B, 2, ...], for which it gives
[B, 2], and asked for the reward of single inputs x [B, ...], for which it gives [B, 1]: a number with a variance, as in
regression. `nn.Flatten()` as last module does both for a network that works on the last axis.

>>> import torch
>>> Preference().log_prob(torch.tensor([[0.0, 0.0]]), torch.tensor([1])).exp()
tensor([0.5000])
"""

from dataclasses import dataclass

from torch import Tensor

from lapwing.errors import LikelihoodError
from lapwing.likelihoods.base import message
from lapwing.likelihoods.categorical import Categorical


@dataclass(frozen=True)
class Preference(Categorical):
    """Which of two was chosen: y is 0 or 1, int64 [B]."""

    def _check_outputs(self, f: Tensor) -> None:
        if f.ndim != 2 or f.shape[1] != 2:
            raise LikelihoodError(
                message(
                    f"rewards of shape {tuple(f.shape)} for pairs",
                    "one reward for each of two, [B, 2], from inputs [B, 2, ...]",
                    "let the model end in nn.Flatten(), or reshape its output in forward",
                )
            )

    @property
    def has_probabilities(self) -> bool:
        return False  # of single inputs the rewards are asked for

    def of_targets(self) -> Categorical:
        return Categorical()
