"""How good predictions are on rows that were not trained on: the table that sets MAP against Laplace.

nll        mean negative log density (amounts, in their own unit) or log probability (classes)
ece        classes: calibration error of the most probable class; amounts: mean |coverage - level| over 5 %, ..., 95 %
coverage   share of targets in the central interval, or in the smallest set of classes, of 50, 90, 95 % probability
conformal  the same of split-conformal intervals and sets; None where too few rows were held out for the level
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lapwing.metrics import accuracy, calibration_error, nll, rmse
from lapwing.predictive import Amounts
from lapwing.tables.conformal import Conformal, quantile
from lapwing.tables.plain_values import typed
from lapwing.tables.reading import Frame, pd

LEVELS = 0.5, 0.9, 0.95


@dataclass(frozen=True)
class Row:
    """One method. `seconds` is the time to predict the rows; rmse is for amounts, accuracy for classes."""

    method: str
    nll: float
    rmse: float | None
    accuracy: float | None
    ece: float
    seconds: float
    coverage_50: float
    coverage_90: float
    coverage_95: float
    conformal_50: float | None
    conformal_90: float | None
    conformal_95: float | None


@dataclass(frozen=True)
class Summary:
    """MAP and Laplace on the same rows. `rows_used` counts rows by purpose, `seconds` time by stage."""

    task: str
    rows: tuple[Row, ...]
    rows_used: dict[str, int]
    seconds: dict[str, float]

    def table(self) -> Frame:
        """One line per method; scores that the task does not have are left out."""
        frame = pd.DataFrame([asdict(row) for row in self.rows]).set_index("method")
        return frame.drop(columns="accuracy" if self.task == "regression" else "rmse")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(stored: Mapping[str, Any]) -> Summary:
        names = [field.name for field in fields(Row)]
        rows = [{name: row[name] for name in names} for row in stored["rows"]]
        return typed(Summary, {**stored, "rows": rows})


def score_amounts(
    method: str, predicted: Amounts, targets: Float[Tensor, " n"], conformal: Conformal, seconds: float
) -> Row:
    """Scores of predictions of amounts, in the unit of the targets."""
    error, deviation = (targets - predicted.mean).abs(), predicted.deviation
    central = (2 * predicted.below(targets) - 1).abs()  # the level of the smallest central interval with the target

    def share(level: float) -> float:
        return float((central <= level).double().mean())

    grid = [level / 20 for level in range(1, 20)]
    shares: dict[str, Any] = {}
    for level in LEVELS:
        width = quantile(conformal.scores, level)
        inside = float((error <= width * deviation).double().mean())
        shares[f"coverage_{100 * level:g}"] = share(level)
        shares[f"conformal_{100 * level:g}"] = None if width == float("inf") else inside
    scores: dict[str, Any] = {
        "nll": -float(predicted.log_prob(targets).mean()),
        "rmse": rmse(predicted.mean, targets),
        "ece": sum(abs(share(level) - level) for level in grid) / len(grid),
    }
    return Row(method=method, accuracy=None, seconds=seconds, **scores, **shares)


def score_classes(
    method: str,
    probabilities: Float[Tensor, "n classes"],
    targets: Int[Tensor, " n"],
    conformal: Conformal,
    seconds: float,
) -> Row:
    """Scores of class probabilities."""

    def share(sets: Bool[Tensor, "n classes"]) -> float:
        return float(sets.gather(1, targets.unsqueeze(1)).double().mean())

    shares: dict[str, Any] = {}
    for level in LEVELS:
        enough = quantile(conformal.scores, level) < float("inf")
        shares[f"coverage_{100 * level:g}"] = share(likely_set(probabilities, level))
        shares[f"conformal_{100 * level:g}"] = share(conformal.sets(probabilities, level)) if enough else None
    scores = {
        "nll": nll(probabilities, targets),
        "accuracy": accuracy(probabilities, targets),
        "ece": calibration_error(probabilities, targets),
    }
    return Row(method=method, rmse=None, seconds=seconds, **scores, **shares)


def likely_set(probabilities: Float[Tensor, "n classes"], level: float) -> Bool[Tensor, "n classes"]:
    """The fewest classes that together have at least the probability `level`.

    >>> import torch
    >>> likely_set(torch.tensor([[0.6, 0.3, 0.1]]), 0.8)
    tensor([[ True,  True, False]])
    """
    ordered, order = probabilities.sort(dim=1, descending=True)
    before = ordered.cumsum(1) - ordered
    return torch.zeros_like(before, dtype=torch.bool).scatter(1, order, before < level)
