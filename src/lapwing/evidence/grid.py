"""Prior precisions chosen on held-out data: every candidate scored exactly, with one linearisation per batch.

    grid           scores [k] of k prior precisions; posterior precision H / (sigma^2 T) + delta
    pseudo_data    scores [m, k] of m counts and k precisions; N / points H / (sigma^2 T) + delta, N a free number

The default score is the mean negative log predictive density of a data point: N(f, J Sigma J^T + sigma^2) in
regression, the probit approximation for classes and labels, and for other likelihoods an average over draws from the
marginals of the outputs, the same draws for every candidate. Cost of a batch: one forward pass, C backward passes, one
`sweep`.
Scores are sums over data points, so that the split into batches does not matter (draws apart).

Links that need the covariance of the logits (`probit_full`, `bridge`, `bridge_norm`) are slower: the batch is
linearised once all the same, but every candidate forms its own [B, C, C].
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.errors import CurvatureError, DataError, LapwingWarning, OptionError
from lapwing.estimate.data_pass import check_loss, named, pair
from lapwing.likelihoods import Likelihood
from lapwing.linalg import Curvature, LinearMap
from lapwing.linalg.checks import check_precisions
from lapwing.predictive.candidates import Batch, Candidates, Family, family


@runtime_checkable
class Metric(Protocol):
    """A score that gathers batches, as those of torchmetrics do; reset before every candidate."""

    def reset(self) -> None: ...

    def update(self, prediction: Any, targets: Any, /) -> None: ...

    def compute(self) -> Any: ...


Score = Callable[[Any, Tensor], Any] | Metric


@dataclass(frozen=True, eq=False)
class Grid:
    """Scores of prior precisions, smaller is better; those that are not finite never win."""

    precisions: Float[Tensor, " k"]
    scores: Float[Tensor, " k"]
    index: int

    @property
    def best(self) -> float:
        """The precision with the smallest score, the first of equals."""
        return float(self.precisions[self.index])


@dataclass(frozen=True, eq=False)
class PseudoData:
    """Scores of (count, prior precision): the curvature as if there had been `count` data points."""

    counts: Float[Tensor, " m"]
    precisions: Float[Tensor, " k"]
    scores: Float[Tensor, "m k"]
    index: tuple[int, int]

    @property
    def best(self) -> tuple[float, float]:
        """(count, precision) with the smallest score, the first of equals."""
        return float(self.counts[self.index[0]]), float(self.precisions[self.index[1]])


def grid(
    curvature: Curvature,
    tangent_at: Callable[[Any], LinearMap],
    likelihood: Likelihood,
    batches: Iterable[Any],
    precisions: Tensor | Sequence[float],
    *,
    sigma: float | Tensor = 1.0,
    temperature: float | Tensor = 1.0,
    score: Score | None = None,
    link: str = "probit",
    samples: int = 100,
    generator: torch.Generator | None = None,
) -> Grid:
    """Scores isotropic prior precisions on held-out batches of (inputs, targets).

    `tangent_at` linearises at inputs, as `Tangent.at`. In regression `curvature` is the one at the likelihood's own
    noise, and `sigma` multiplies that: with Gaussian() the curvature at unit noise, and sigma the noise.

    `score` takes (prediction, targets) of a batch: class probabilities in the shape of the outputs, (mean, variance)
    in regression, and draws of the outputs [samples, B, *out] for other likelihoods. It is a function, whose
    values are averaged over data points, or an object with reset, update and compute.
    """
    deltas = _numbers(precisions, "prior precisions")
    scale = _positive(sigma, "sigma") ** -2 / _positive(temperature, "temperature")
    candidates = Candidates(torch.full_like(deltas, scale), deltas)
    how = family(likelihood, link, _positive(sigma, "sigma"), samples, generator)
    scores = _scores(curvature, tangent_at, how, batches, candidates, score)
    return Grid(deltas, scores, smallest(scores, [f"prior precision {float(d):.6g}" for d in deltas]))


def pseudo_data(
    curvature: Curvature,
    tangent_at: Callable[[Any], LinearMap],
    likelihood: Likelihood,
    batches: Iterable[Any],
    counts: Tensor | Sequence[float],
    precisions: Tensor | Sequence[float],
    *,
    points: int,
    sigma: float | Tensor = 1.0,
    temperature: float | Tensor = 1.0,
    score: Score | None = None,
    link: str = "probit",
    samples: int = 100,
    generator: torch.Generator | None = None,
) -> PseudoData:
    """Scores pairs (N, delta) of the posterior precision N * mean curvature + delta, both chosen on held-out data.

    `points` is the number of data points that `curvature` is a sum over. The variance at N and delta is that at
    delta points / N, times points / N: all pairs are one sweep. Otherwise as `grid`.
    """
    numbers, deltas = check_counts(counts, points), _numbers(precisions, "prior precisions")
    scale = _positive(sigma, "sigma") ** -2 / _positive(temperature, "temperature") / points
    pairs = torch.cartesian_prod(numbers, deltas).reshape(-1, 2)
    how = family(likelihood, link, _positive(sigma, "sigma"), samples, generator)
    scores = _scores(curvature, tangent_at, how, batches, Candidates(pairs[:, 0] * scale, pairs[:, 1]), score)
    number = smallest(scores, [f"count {float(n):.6g} with prior precision {float(d):.6g}" for n, d in pairs])
    index = divmod(number, len(deltas))
    return PseudoData(numbers, deltas, scores.reshape(len(numbers), len(deltas)), index)


def check_counts(counts: Tensor | Sequence[float], points: int) -> Float[Tensor, " m"]:
    """Numbers of data points that `points` are to count for: finite and > 0."""
    numbers = _numbers(counts, "counts")
    if bool((numbers <= 0).any()) or points < 1:
        raise CurvatureError(
            f"counts go down to {float(numbers.min()):.3g}, for a curvature of {points} points; expected numbers > 0."
        )
    return numbers


def _numbers(values: Tensor | Sequence[float], what: str) -> Float[Tensor, " k"]:
    try:
        return check_precisions(torch.as_tensor(values, dtype=torch.float64).detach())
    except CurvatureError as error:
        raise CurvatureError(f"{what}: {error}") from error


def _positive(value: float | Tensor, name: str) -> float:
    number = float(value.detach()) if isinstance(value, Tensor) else float(value)
    if not 0 < number < float("inf"):
        raise CurvatureError(f"{name} is {number}; expected a finite number > 0.")
    return number


# -- one pass over the data -------------------------------------------------------------------------------------------


def _batches(
    curvature: Curvature,
    tangent_at: Callable[[Any], LinearMap],
    how: Family,
    batches: Iterable[Any],
    candidates: Candidates,
) -> Iterator[Batch]:
    empty = True
    for number, batch in enumerate(batches):
        empty = False
        with named(f"validation batch {number}"):
            x, y = pair(batch)
            linear = tangent_at(x)
            check_loss(how.likelihood, linear.value, y)
            found = how.batch(curvature, linear, candidates, y)
        yield found
    if empty:
        raise DataError(
            "the validation loader yields no batch; expected at least one (x, y) pair. Check the dataset and drop_last."
        )


@torch.no_grad()
def _scores(
    curvature: Curvature,
    tangent_at: Callable[[Any], LinearMap],
    how: Family,
    batches: Iterable[Any],
    candidates: Candidates,
    score: Score | None,
) -> Float[Tensor, " k"]:
    found = _batches(curvature, tangent_at, how, batches, candidates)
    if isinstance(score, Metric):
        return _gathered(how, list(found), len(candidates), score)
    total, points = torch.zeros(len(candidates), dtype=torch.float64), 0
    for batch in found:
        if score is None:
            sums = how.loss(batch).double().sum(1).cpu()
        else:
            each = [float(score(how.prediction(batch, k), batch.targets)) for k in range(len(candidates))]
            sums = torch.tensor(each, dtype=torch.float64) * len(batch.value)
        total, points = total + sums, points + len(batch.value)
    return total / points


def _gathered(how: Family, batches: Sequence[Batch], count: int, metric: Metric) -> Float[Tensor, " k"]:
    """A metric sees all batches of one candidate, and then all of the next; predictions are kept until the end."""
    if getattr(metric, "higher_is_better", None):
        raise OptionError(
            f"{type(metric).__name__} is better when larger; expected a loss, as the smallest score wins. Give a "
            "function that returns its negative."
        )
    scores = []
    for k in range(count):
        metric.reset()
        for batch in batches:
            metric.update(how.prediction(batch, k), batch.targets)
        scores.append(float(metric.compute()))
    return torch.tensor(scores, dtype=torch.float64)


def smallest(scores: Float[Tensor, " k"], names: Sequence[str]) -> int:
    """The first of the smallest scores among those that are finite."""
    finite = torch.isfinite(scores)
    if not bool(finite.any()):
        raise DataError(
            f"no score is finite (the first is {float(scores[0])} at {names[0]}); expected at least one. Check the "
            "targets, the score and the range of candidates."
        )
    for index in (~finite).nonzero().flatten().tolist():
        warnings.warn(f"the score is {float(scores[index])} at {names[index]}; left out.", LapwingWarning, stacklevel=3)
    return int(scores.where(finite, float("inf")).argmin())
