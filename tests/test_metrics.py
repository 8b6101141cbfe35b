"""Metrics against closed forms and brute force, and what they refuse."""

from __future__ import annotations

from math import log, pi

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lapwing import metrics
from lapwing.errors import DataError

P = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.3, 0.3, 0.4]], dtype=torch.float64)
Y = torch.tensor([0, 2, 2])


def test_accuracy_is_the_share_of_hits() -> None:
    assert metrics.accuracy(P, Y) == pytest.approx(2 / 3)


def test_nll_is_the_mean_of_minus_log_p() -> None:
    assert metrics.nll(P, Y) == pytest.approx(-(log(0.7) + log(0.3) + log(0.4)) / 3, rel=1e-12)


def test_nll_of_an_impossible_target_is_large_and_finite() -> None:
    found = metrics.nll(torch.tensor([[1.0, 0.0]]), torch.tensor([1]))
    assert 80 < found < 100


def test_brier_is_the_squared_distance_to_the_one_hot_target() -> None:
    one_hot = torch.nn.functional.one_hot(Y, 3)
    assert metrics.brier(P, Y) == pytest.approx(float((P - one_hot).square().sum(-1).mean()), rel=1e-12)
    assert metrics.brier(torch.tensor([[0.0, 1.0]]), torch.tensor([0])) == 2


def test_classes_keep_their_axis_last_over_positions() -> None:
    wide, targets = P.expand(4, 3, 3), Y.expand(4, 3)
    for metric in (metrics.accuracy, metrics.nll, metrics.brier, metrics.calibration_error):
        assert metric(wide, targets) == pytest.approx(metric(P, Y), rel=1e-12)
    assert metrics.entropy(wide).shape == (4, 3)


def test_calibration_error_of_perfect_and_of_certain_wrong_predictions() -> None:
    p = torch.tensor([0.75, 0.25], dtype=torch.float64).expand(4, 2)
    assert metrics.calibration_error(p, torch.tensor([0, 0, 0, 1])) == pytest.approx(0, abs=1e-12)
    assert metrics.calibration_error(p, torch.tensor([1, 1, 1, 1])) == pytest.approx(0.75)
    assert metrics.calibration_error(torch.tensor([[1.0, 0.0]]), torch.tensor([1])) == 1


def test_a_confidence_at_the_edge_of_two_bins_belongs_to_the_lower_one() -> None:
    p, y = torch.tensor([[0.5, 0.5], [0.75, 0.25]]), torch.tensor([0, 1])
    # ]0, 1/2] holds the first point, right at 1/2, and ]1/2, 1] the second, wrong at 3/4
    assert metrics.calibration_error(p, y, bins=2) == pytest.approx((0.5 + 0.75) / 2)


@settings(deadline=None, max_examples=30, derandomize=True)
@given(st.integers(0, 10_000), st.integers(1, 20))
def test_calibration_error_is_the_sum_over_bins(seed: int, bins: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    p = torch.randn(50, 3, dtype=torch.float64, generator=generator).softmax(-1)
    y = torch.randint(3, (50,), generator=generator)
    confidence, chosen = p.max(-1)
    expected = 0.0
    for k in range(bins):
        inside = (confidence > k / bins) & (confidence <= (k + 1) / bins)
        if bool(inside.any()):
            hits = (chosen[inside] == y[inside]).double().mean()
            expected += float(inside.double().mean() * (hits - confidence[inside].mean()).abs())
    assert metrics.calibration_error(p, y, bins) == pytest.approx(expected, abs=1e-12)


def test_entropy_in_closed_form() -> None:
    p = torch.tensor([[0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0]])
    torch.testing.assert_close(metrics.entropy(p), torch.tensor([log(4), 0.0, log(2)]))


def test_gaussian_nll_has_every_constant() -> None:
    mean, variance = torch.randn(5, 2, dtype=torch.float64), torch.rand(5, 2, dtype=torch.float64) + 0.1
    y = torch.randn(5, 2, dtype=torch.float64)
    expected = -torch.distributions.Normal(mean, variance.sqrt()).log_prob(y).mean()
    assert metrics.gaussian_nll(mean, variance, y) == pytest.approx(float(expected), rel=1e-12)
    one = torch.ones(1)
    assert metrics.gaussian_nll(0 * one, one, 0 * one) == pytest.approx(log(2 * pi) / 2)


def test_rmse_in_closed_form() -> None:
    assert metrics.rmse(torch.tensor([1.0, 2.0]), torch.tensor([4.0, 6.0])) == pytest.approx((25 / 2) ** 0.5)


def test_coverage_counts_the_central_interval() -> None:
    """1.96 standard deviations for 95 %."""
    mean, variance = torch.zeros(4), torch.full((4,), 4.0)
    targets = 2 * torch.tensor([0.0, 1.959, -1.959, 1.961])
    assert metrics.coverage(mean, variance, targets, 0.95) == 0.75
    y = torch.randn(40_000, generator=torch.Generator().manual_seed(0))
    found = metrics.coverage(torch.zeros_like(y), torch.ones_like(y), y, 0.9)
    assert abs(found - 0.9) < 4 * (0.9 * 0.1 / 40_000) ** 0.5


@settings(deadline=None, max_examples=50, derandomize=True)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=9), st.lists(st.integers(0, 5), min_size=1, max_size=9))
def test_auroc_counts_pairs_and_halves_ties(inside: list[int], outside: list[int]) -> None:
    pairs = [(a < b) + (a == b) / 2 for a in inside for b in outside]
    found = metrics.auroc(torch.tensor(inside).float(), torch.tensor(outside).double())
    assert found == pytest.approx(sum(pairs) / len(pairs))


def test_auroc_at_its_ends() -> None:
    low, high = torch.tensor([0.0, 1.0]), torch.tensor([2.0, float("inf")])
    assert metrics.auroc(low, high) == 1
    assert metrics.auroc(high, low) == 0
    assert metrics.auroc(low, low) == 0.5


@pytest.mark.parametrize("metric", [metrics.accuracy, metrics.nll, metrics.brier, metrics.calibration_error])
@pytest.mark.parametrize(
    ("probabilities", "targets", "message"),
    [
        (P * 2, Y, "sum to.*expected distributions.*softmax"),
        (torch.tensor([[1.5, -0.5]]), torch.tensor([0]), "negative; expected distributions"),
        (P * float("nan"), Y, "sum to.*expected distributions"),
        (P, Y.double(), "dtype torch.float64; expected class indices"),
        (P, Y[:2], r"shape \(2,\).*expected class indices of shape \(3,\)"),
        (P, Y + 1, "from 1 to 3; expected class indices from 0 to 2"),
        (P, Y - 1, "from -1 to 1; expected class indices from 0 to 2"),
        (P[:0], Y[:0], "at least one point"),
    ],
)
def test_class_metrics_refuse_what_they_cannot_score(metric, probabilities: Tensor, targets: Tensor, message) -> None:
    with pytest.raises(DataError, match=message):
        metric(probabilities, targets)


def test_other_refusals_name_the_remedy() -> None:
    one = torch.ones(3)
    for function in (lambda v: metrics.gaussian_nll(one, v, one), lambda v: metrics.coverage(one, v, one, 0.5)):
        with pytest.raises(DataError, match=r"smallest variance is 0; expected numbers > 0.*noise"):
            function(one * 0)
        with pytest.raises(DataError, match=r"variance has shape \(1,\).*expected the same"):
            function(one[:1])
    with pytest.raises(DataError, match=r"targets has shape \(3, 1\).*expected the same"):
        metrics.rmse(one, one[:, None])
    with pytest.raises(DataError, match="no entry; expected at least one"):
        metrics.rmse(one[:0], one[:0])
    with pytest.raises(DataError, match=r"level 95.0; expected a probability"):
        metrics.coverage(one, one, one, 95.0)
    with pytest.raises(DataError, match="0 bins; expected at least one"):
        metrics.calibration_error(P, Y, bins=0)
    with pytest.raises(DataError, match="scores_out holds NaN"):
        metrics.auroc(one, one * float("nan"))
    with pytest.raises(DataError, match=r"scores_in has shape.*at least one"):
        metrics.auroc(one[:0], one)


@pytest.mark.parametrize("types", [(torch.float32, torch.float64), (torch.float64, torch.float32)])
def test_scores_of_two_types_are_compared_in_the_finer_one(types: tuple[torch.dtype, torch.dtype]) -> None:
    """1 and 1 + 1e-10 are one number in float32."""
    near = torch.tensor([1 + 1e-10], dtype=torch.float64)
    one = torch.tensor([1.0], dtype=torch.float32)
    found = metrics.auroc(one, near) if types[0] is torch.float32 else metrics.auroc(near, one)
    assert found == (1.0 if types[0] is torch.float32 else 0.0)
