"""Split-conformal prediction: intervals and sets with a promise that holds for any model, at any number of rows.

    scores   [n]  of held-out rows: |y - mean| / sd for amounts, 1 - p(y) for classes; larger is worse
    quantile      the ceil((n + 1) level)-th smallest score, infinite where that is more than n

The promise: where the held-out rows and a new one are exchangeable (drawn alike, in any order), the new target lies
within mean -+ quantile sd, or in the set {c : 1 - p(c) <= quantile}, with probability at least `level`, and at most
level + 1 / (n + 1) where scores do not tie. It is on average over rows, not for each kind of row. The rows must not
have been used for training. Cost: one sort.

The most probable class is always in a set, so that none is empty; a larger set keeps the promise.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lapwing.errors import DataError


def quantile(scores: Float[Tensor, " n"], level: float) -> float:
    """The ceil((n + 1) level)-th smallest score, infinite where there are too few for the level.

    >>> import torch
    >>> quantile(torch.arange(1.0, 10.0), 0.9), quantile(torch.arange(1.0, 9.0), 0.9)
    (9.0, inf)
    """
    if not 0 < level < 1:
        raise DataError(f"a level of {level} was asked for; expected a probability between 0 and 1, such as 0.9.")
    rank = _rank(len(scores), level)
    return inf if rank > len(scores) else float(scores.sort().values[rank - 1])


def rows_needed(level: float) -> int:
    """The least number of held-out rows for which intervals at this level are finite."""
    return next(n for n in range(1, 10**7) if _rank(n, level) <= n)


def _rank(n: int, level: float) -> int:
    return ceil((n + 1) * level - 1e-9)  # 10 x 0.9 is 9, and not a rounding error above it


def amount_scores(
    mean: Float[Tensor, " n"], deviation: Float[Tensor, " n"], targets: Float[Tensor, " n"]
) -> Float[Tensor, " n"]:
    """|y - mean| / sd: how wrong a prediction was, in units of how sure it claimed to be."""
    if not bool((deviation > 0).all()):
        raise DataError(f"the smallest deviation is {float(deviation.min()):.3g}; expected numbers > 0.")
    return (targets - mean).abs() / deviation


def class_sets(probabilities: Float[Tensor, "n classes"], bound: float) -> Bool[Tensor, "n classes"]:
    """The classes whose score is within the bound, and always the most probable one."""
    return (1 - probabilities <= bound) | (probabilities == probabilities.max(1, keepdim=True).values)


def class_scores(probabilities: Float[Tensor, "n classes"], targets: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    """1 - p(y)."""
    return 1 - probabilities.gather(1, targets.unsqueeze(1)).squeeze(1)


@dataclass(frozen=True, eq=False)
class Conformal:
    """Scores of held-out rows, [n], and what follows from them at any level."""

    scores: Float[Tensor, " n"]

    def __post_init__(self) -> None:
        if not len(self.scores) or not bool(torch.isfinite(self.scores).all()):
            raise DataError("there is no calibration score, or one is not finite; expected one per held-out row.")

    def interval(
        self, mean: Float[Tensor, " batch"], deviation: Float[Tensor, " batch"], level: float = 0.9
    ) -> tuple[Float[Tensor, " batch"], Float[Tensor, " batch"]]:
        """Bounds for amounts; infinite where there are too few held-out rows for the level."""
        half = quantile(self.scores, level) * deviation
        return mean - half, mean + half

    def sets(self, probabilities: Float[Tensor, "batch classes"], level: float = 0.9) -> Bool[Tensor, "batch classes"]:
        """Which classes are in the set of each row; all where there are too few held-out rows for the level."""
        return class_sets(probabilities, quantile(self.scores, level))

    def explain(self, level: float = 0.9, classes: bool = False) -> str:
        """What is promised, in words."""
        what, percent = "set of classes" if classes else "interval", f"{100 * level:g}%"
        if _rank(len(self.scores), level) > len(self.scores):
            return (
                f"Only {len(self.scores)} rows were held out for calibration, and a conformal {what} at {percent} "
                f"needs {rows_needed(level)}: it is {'all classes' if classes else 'infinite'}."
            )
        return (
            f"The conformal {what} holds the true value for at least {percent} of new rows, on average, whatever the "
            f"network has learned, as long as they come from the same source as the {len(self.scores)} rows that were "
            "held out to calibrate it. It promises nothing for rows that are unlike them."
        )


@dataclass(frozen=True)
class Unfamiliar:
    """A row counts as out of distribution if its sd_epistemic is above a threshold that held-out rows rarely reach."""

    threshold: float
    level: float
    rows: int

    @staticmethod
    def of(scores: Float[Tensor, " n"], level: float = 0.99) -> Unfamiliar:
        """The ceil((n + 1) level)-th smallest score of held-out rows; the largest where there are fewer."""
        rank = min(len(scores), _rank(len(scores), level))
        return Unfamiliar(float(scores.sort().values[rank - 1]), level, len(scores))

    def explain(self, classes: bool = False) -> str:
        alarm = max(1 - self.level, 1 / (self.rows + 1))
        return (
            f"A row is flagged as out of distribution where sd_epistemic, what the network does not know about "
            f"{'its logits' if classes else 'the mean'} there, is above {self.threshold:.4g}. Of rows like the "
            f"{self.rows} that were held out, about {alarm:.0%} pass that; a row that does is unlike those the network "
            "has learned from, or lies where they are sparse, and its prediction is an extrapolation. So is a row with "
            "a value that is extremely far from those in training, a new one in a column of categories that had no "
            "rare ones, or an unknown one: missing or not to be read, where training had no such case. The deviation "
            "of a row with an unknown value is as large as what the value might have been makes it."
        )
