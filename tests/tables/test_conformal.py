"""Split-conformal prediction: the promise itself, by Monte Carlo, and the finite-sample quantile by hand."""

from __future__ import annotations

from math import ceil, inf, sqrt

import pytest
import torch

from lapwing.errors import DataError
from lapwing.tables.conformal import (
    Conformal,
    Unfamiliar,
    amount_scores,
    class_scores,
    quantile,
    rows_needed,
)


def test_the_quantile_by_hand() -> None:
    scores = torch.tensor([3.0, 1.0, 2.0, 4.0], dtype=torch.float64)
    assert quantile(scores, 0.5) == 3.0  # ceil(5 * 0.5) = 3rd
    assert quantile(scores, 0.8) == 4.0
    assert quantile(scores, 0.81) == float("inf")


@pytest.mark.parametrize(("n", "level"), [(9, 0.9), (10, 0.5), (19, 0.95), (25, 0.8), (100, 0.99)])
def test_the_quantile_is_an_order_statistic(n: int, level: float, generator: torch.Generator) -> None:
    scores = torch.randn(n, generator=generator, dtype=torch.float64)
    rank = ceil(round((n + 1) * level, 6))
    assert quantile(scores, level) == sorted(scores.tolist())[rank - 1]


def test_too_few_rows_give_an_infinite_interval_and_say_so() -> None:
    assert [rows_needed(level) for level in (0.5, 0.9, 0.95, 0.99)] == [1, 9, 19, 99]
    few = Conformal(torch.ones(8, dtype=torch.float64))
    lower, upper = few.interval(torch.zeros(2), torch.ones(2), 0.9)
    assert lower.tolist() == [-inf, -inf]
    assert upper.tolist() == [inf, inf]
    assert "needs 9" in few.explain(0.9)
    assert bool(few.sets(torch.tensor([[0.9, 0.1]]), 0.9).all())
    assert "all classes" in few.explain(0.9, classes=True)
    assert "at least 50%" in few.explain(0.5)


@pytest.mark.parametrize(("n", "level"), [(9, 0.9), (20, 0.9), (30, 0.5), (39, 0.95)])
def test_intervals_cover_exactly_as_promised_whatever_the_model(
    n: int, level: float, generator: torch.Generator
) -> None:
    # heavy tails, a biased mean and a wrong deviation: coverage is k / (n + 1) all the same
    trials = 1000
    x = torch.rand(trials, n + 1, generator=generator, dtype=torch.float64)
    noise = torch.randn(trials, n + 1, generator=generator, dtype=torch.float64)
    y = x + (1 + 3 * x) * noise / torch.rand(trials, n + 1, generator=generator, dtype=torch.float64)
    mean, deviation = 0.5 * x + 0.3, 0.2 + x.square()
    hits = 0
    for t in range(trials):
        scores = amount_scores(mean[t, :n], deviation[t, :n], y[t, :n])
        lower, upper = Conformal(scores).interval(mean[t, n:], deviation[t, n:], level)
        hits += int(lower <= y[t, n:]) * int(y[t, n:] <= upper)
    exact = ceil(round((n + 1) * level, 6)) / (n + 1)
    assert level <= exact <= level + 1 / (n + 1)
    assert abs(hits / trials - exact) < 4 * sqrt(exact * (1 - exact) / trials)


@pytest.mark.parametrize(("n", "level"), [(19, 0.9), (40, 0.8)])
def test_sets_of_classes_cover_as_promised(n: int, level: float, generator: torch.Generator) -> None:
    trials, classes = 1000, 5
    logits = 2 * torch.randn(trials, n + 1, classes, generator=generator, dtype=torch.float64)
    truth = torch.multinomial(logits.softmax(2).flatten(0, 1), 1, generator=generator).reshape(trials, n + 1)
    wrong = (0.3 * logits + 0.5).softmax(2)  # a model that is far too unsure
    hits = 0
    for t in range(trials):
        conformal = Conformal(class_scores(wrong[t, :n], truth[t, :n]))
        hits += int(conformal.sets(wrong[t, n:], level)[0, truth[t, n]])
    exact = ceil(round((n + 1) * level, 6)) / (n + 1)
    error = 4 * sqrt(exact * (1 - exact) / trials)
    assert hits / trials > exact - error
    assert hits / trials < exact + error + 0.02  # the most probable class is added to sets that would be empty


def test_a_set_is_never_empty() -> None:
    sure = Conformal(torch.full((50,), 0.01, dtype=torch.float64))
    sets = sure.sets(torch.tensor([[0.4, 0.35, 0.25], [0.995, 0.003, 0.002]]), 0.5)
    assert sets.tolist() == [[True, False, False], [True, False, False]]


@pytest.mark.parametrize(("n", "alarm"), [(20, 1 / 21), (99, 0.01), (400, 0.01)])
def test_familiar_rows_are_seldom_flagged(n: int, alarm: float, generator: torch.Generator) -> None:
    trials = 1000
    scores = torch.rand(trials, n + 1, generator=generator, dtype=torch.float64)
    limits = torch.tensor([Unfamiliar.of(row[:n]).threshold for row in scores])
    share = float((scores[:, n] > limits).double().mean())
    assert share < alarm + 4 * sqrt(alarm / trials)
    assert "above" in Unfamiliar.of(scores[0]).explain()


@pytest.mark.parametrize("level", [0.0, 1.0, -1.0, 90.0])
def test_levels_are_probabilities(level: float) -> None:
    with pytest.raises(DataError, match="between 0 and 1"):
        quantile(torch.ones(5), level)


def test_bad_scores_are_refused() -> None:
    with pytest.raises(DataError, match="calibration score"):
        Conformal(torch.zeros(0))
    with pytest.raises(DataError, match="not finite"):
        Conformal(torch.tensor([1.0, float("nan")]))
    with pytest.raises(DataError, match="> 0"):
        amount_scores(torch.zeros(2), torch.zeros(2), torch.zeros(2))
