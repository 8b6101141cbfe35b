"""Numbers whose noise is uncertain: densities, probabilities and intervals against dense sums over log-noises."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from lapwing.distributions import ScaleMixture
from lapwing.distributions.scale_mixture import SPREAD

VARIANCES = 0.0, 1e-4, 0.1, 3.0
SPREADS = 0.0, 1e-6, 1e-3, 0.05, 0.5, 3.0
ERRORS = 0.0, 0.3, 2.0, 8.0, 100.0, 1e4
LOG_NOISE = -0.4
LEVELS = 0.1, 0.5, 0.9, 0.99, 0.9999


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def one(mean: float, variance: float, log_noise: float, spread: float) -> ScaleMixture:
    return ScaleMixture(column(mean), column(variance), column(log_noise), column(spread))


def grid(*spreads: float) -> tuple[ScaleMixture, list[tuple[float, float]]]:
    """Around zero, every variance with every spread."""
    pairs = list(product(VARIANCES, spreads))
    variance, spread = (column(*values) for values in zip(*pairs, strict=True))
    return ScaleMixture(0 * spread, variance, LOG_NOISE + 0 * spread, spread), pairs


def log_density(error: float, variance: float, log_noise: float, spread: float) -> float:
    """By a sum over l, in steps of a fiftieth of its deviation, from far below the integrand's top to far above."""
    if spread == 0:
        return float(stats.norm.logpdf(error, scale=(variance + np.exp(log_noise)) ** 0.5))
    s = spread**0.5
    upper = max(log_noise, np.log(max(error**2, 1e-300))) + 11 * s
    lower = log_noise - 11 * s - spread
    noise = np.linspace(lower, upper, max(20_001, int(50 * (upper - lower) / s)))
    total = variance + np.exp(noise)
    terms = -(error**2 / total + np.log(total) + (noise - log_noise) ** 2 / spread) / 2
    top, step = terms.max(), noise[1] - noise[0]
    return float(np.log(np.exp(terms - top).sum() * step) + top - np.log(2 * np.pi) - np.log(s))


def probability_below(error: float, variance: float, log_noise: float, spread: float) -> float:
    z = np.linspace(-10, 10, 10_001)
    inside = stats.norm.cdf(error / np.sqrt(variance + np.exp(log_noise + spread**0.5 * z)))
    return float((inside * stats.norm.pdf(z)).sum() * (z[1] - z[0]))


def moment(amounts: ScaleMixture, power: int) -> float:
    """E |y - mean|^power of one amount, by a sum over u of the density at mean + exp(u)."""
    u = torch.linspace(-45, 45, 9001, dtype=torch.float64)
    many = ScaleMixture.joined([amounts] * len(u))
    return 2 * float((many.log_prob(many.mean + u.exp()) + (power + 1) * u).exp().sum() * (u[1] - u[0]))


# -- against sums ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("variance", VARIANCES)
def test_densities_are_those_of_a_dense_sum(variance: float, spread: float) -> None:
    errors = column(*ERRORS)
    amounts = ScaleMixture.joined([one(5.0, variance, LOG_NOISE, spread)] * len(ERRORS))
    expected = column(*(log_density(e, variance, LOG_NOISE, spread) for e in ERRORS))
    torch.testing.assert_close(amounts.log_prob(5 + errors), expected, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(amounts.log_prob(5 - errors), expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("variance", VARIANCES)
def test_probabilities_and_intervals_are_those_of_a_dense_sum(variance: float, spread: float) -> None:
    amounts = ScaleMixture.joined([one(5.0, variance, LOG_NOISE, spread)] * len(ERRORS))
    expected = column(*(probability_below(e, variance, LOG_NOISE, spread) for e in ERRORS))
    torch.testing.assert_close(amounts.below(5 + column(*ERRORS)), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(amounts.below(5 - column(*ERRORS)), 1 - expected, rtol=0, atol=1e-6)
    for level in LEVELS:
        half = float(amounts.half(level)[0])
        assert 2 * probability_below(half, variance, LOG_NOISE, spread) - 1 == pytest.approx(level, abs=1e-6)


@pytest.mark.parametrize("spread", [16.0, 64.0, 400.0])
def test_noise_of_which_next_to_nothing_is_known(spread: float) -> None:
    for variance, error in product((0.0, 0.1, 3.0), (0.3, 2.0, 100.0)):
        amounts = one(0.0, variance, LOG_NOISE, spread)
        expected = log_density(error, variance, LOG_NOISE, spread)
        assert float(amounts.log_prob(column(error))) == pytest.approx(expected, rel=1e-8)
        below = probability_below(error, variance, LOG_NOISE, spread)
        assert float(amounts.below(column(error))) == pytest.approx(below, abs=1e-6)
        for level in (0.5, 0.9):
            half = float(amounts.half(level))
            assert 2 * probability_below(half, variance, LOG_NOISE, spread) - 1 == pytest.approx(level, abs=1e-6)


@given(
    st.sampled_from([0.0, 1.0]),
    st.floats(-12, 6),
    st.floats(-12, 6),
    st.floats(-7, 2),
    st.floats(-5, 7),
)
@settings(deadline=None, max_examples=60)
def test_densities_of_any_scale(weight: float, v: float, log_noise: float, s: float, e: float) -> None:
    """Far from the mean the integrand may have two tops, one by what is known of l and one where l explains y."""
    variance, spread = weight * np.exp(v), np.exp(2 * s)
    error = np.exp(e) * (variance + np.exp(log_noise)) ** 0.5
    found = float(one(0.0, variance, log_noise, spread).log_prob(column(error)))
    expected = log_density(error, variance, log_noise, spread)
    assert found == pytest.approx(expected, rel=1e-7, abs=1e-8)


# -- laws --------------------------------------------------------------------------------------------------------------


def test_noise_that_is_known_gives_the_gaussian() -> None:
    amounts, pairs = grid(0.0)
    sigma = np.sqrt([variance + np.exp(LOG_NOISE) for variance, _ in pairs])
    for error in ERRORS:
        y = amounts.mean + error
        expected = torch.from_numpy(stats.norm.logpdf(error, scale=sigma))
        torch.testing.assert_close(amounts.log_prob(y), expected, rtol=1e-12, atol=1e-12)
        expected = torch.from_numpy(stats.norm.cdf(error, scale=sigma))
        torch.testing.assert_close(amounts.below(y), expected, rtol=1e-12, atol=1e-12)
    for level in LEVELS:
        expected = torch.from_numpy(stats.norm.ppf((1 + level) / 2) * sigma)
        torch.testing.assert_close(amounts.half(level), expected, rtol=1e-12, atol=0)


def test_noise_that_is_almost_known_is_almost_that_of_the_gaussian() -> None:
    """Also where log_noise + deviation is log_noise, by rounding."""
    for spread in (5e-324, 1e-60, 1e-30, 1e-20):
        amounts = ScaleMixture.joined([one(0.0, 0.1, LOG_NOISE, spread)] * len(ERRORS))
        known = ScaleMixture.joined([one(0.0, 0.1, LOG_NOISE, 0.0)] * len(ERRORS))
        torch.testing.assert_close(
            amounts.log_prob(column(*ERRORS)), known.log_prob(column(*ERRORS)), rtol=1e-9, atol=0
        )
        torch.testing.assert_close(amounts.below(column(*ERRORS)), known.below(column(*ERRORS)), rtol=1e-9, atol=0)
        torch.testing.assert_close(amounts.half(0.9), known.half(0.9), rtol=1e-9, atol=0)


def test_rows_do_not_see_each_other() -> None:
    """Known and unknown noise side by side, in more rows than are taken at a time."""
    amounts, _ = grid(*SPREADS, 64.0)
    times = 4096 // len(amounts.mean) + 2
    many = ScaleMixture.joined([amounts] * times)
    y = torch.linspace(-3, 3, len(amounts.mean), dtype=torch.float64)
    alone = [ScaleMixture(*(value[i : i + 1] for value in vars(amounts).values())) for i in range(len(y))]
    for name in ("log_prob", "below"):
        expected = torch.cat([getattr(each, name)(y[i : i + 1]) for i, each in enumerate(alone)])
        torch.testing.assert_close(getattr(many, name)(y.repeat(times)), expected.repeat(times), rtol=1e-7, atol=1e-7)
    expected = torch.cat([each.half(0.9) for each in alone])
    torch.testing.assert_close(many.half(0.9), expected.repeat(times), rtol=1e-6, atol=0)


@pytest.mark.parametrize("spread", [0.0, 1e-3, 0.5, 3.0])
@pytest.mark.parametrize("variance", [0.0, 0.1, 3.0])
def test_the_density_adds_up_and_has_the_moments_it_says(variance: float, spread: float) -> None:
    amounts = one(-2.0, variance, LOG_NOISE, spread)
    assert moment(amounts, 0) == pytest.approx(1, rel=1e-8)
    assert float(amounts.deviation) ** 2 == pytest.approx(moment(amounts, 2), rel=1e-8)
    square = variance + np.exp(LOG_NOISE + spread / 2)
    fourth = variance**2 + 2 * variance * (square - variance) + np.exp(2 * LOG_NOISE + 2 * spread)
    assert moment(amounts, 4) == pytest.approx(3 * fourth, rel=1e-7)
    assert float(amounts.epistemic) == variance**0.5
    assert float(amounts.noise) ** 2 == pytest.approx(square - variance)


@given(st.floats(1e-4, 1e4), st.floats(-1e3, 1e3), st.floats(0.05, 0.95), st.floats(-20, 20))
@settings(deadline=None, max_examples=30)
def test_other_units_change_units_alone(scale: float, shift: float, level: float, y: float) -> None:
    amounts, _ = grid(*SPREADS)
    other = amounts.rescaled(scale, shift)
    points = amounts.mean + y
    moved = other.mean + scale * (points - amounts.mean)
    torch.testing.assert_close(other.mean, amounts.mean * scale + shift)
    torch.testing.assert_close(other.log_prob(moved), amounts.log_prob(points) - np.log(scale), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(other.below(moved), amounts.below(points), rtol=0, atol=1e-7)
    torch.testing.assert_close(other.half(level), amounts.half(level) * scale, rtol=1e-8, atol=0)
    for name in ("deviation", "epistemic", "noise"):
        torch.testing.assert_close(getattr(other, name), getattr(amounts, name) * scale)


@given(st.floats(1e-3, 1 - 1e-3), st.floats(-8, 8))
@settings(deadline=None, max_examples=30)
def test_intervals_hold_their_probability_and_tails_mirror_each_other(level: float, y: float) -> None:
    amounts, _ = grid(*SPREADS)
    half = amounts.half(level)
    held = amounts.below(amounts.mean + half) - amounts.below(amounts.mean - half)
    torch.testing.assert_close(held, torch.full_like(held, level), rtol=0, atol=1e-9)
    both = amounts.below(amounts.mean + y) + amounts.below(amounts.mean - y)
    torch.testing.assert_close(both, torch.ones_like(both), rtol=0, atol=1e-12)


def test_the_network_alone_is_the_gaussian_it_gives() -> None:
    amounts, _ = grid(*SPREADS)
    y = amounts.mean + 0.7
    expected = torch.from_numpy(stats.norm.logpdf(0.7 * np.ones(len(y)), scale=np.exp(LOG_NOISE / 2)))
    torch.testing.assert_close(amounts.alone().log_prob(y), expected, rtol=1e-12, atol=0)


def test_no_amounts_at_all() -> None:
    none = torch.zeros(0, dtype=torch.float64)
    amounts = ScaleMixture(none, none, none, none)
    for found in (amounts.log_prob(none), amounts.below(none), amounts.half(0.9), amounts.deviation):
        assert found.shape == (0,)
    assert amounts.rescaled(2.0, 1.0).alone().mean.shape == (0,)
    assert ScaleMixture.joined([amounts, one(1.0, 0.0, 0.0, 0.5), amounts]).mean.tolist() == [1.0]


def test_what_is_not_a_number_ends_as_none() -> None:
    """And it does end."""
    amounts = one(float("nan"), 0.1, LOG_NOISE, 0.5)
    assert bool(amounts.log_prob(column(0.3)).isnan())
    assert bool(amounts.below(column(0.3)).isnan())
    assert bool(one(0.0, 0.1, LOG_NOISE, 0.5).log_prob(column(float("inf"))).isnan())
    unknown = one(0.0, 0.1, LOG_NOISE, float("nan"))
    assert bool(unknown.below(column(0.3)).isnan())
    assert bool(unknown.half(0.9).isnan())
    assert bool(unknown.log_prob(column(0.3)).isnan())


@pytest.mark.parametrize("spread", [0.0, 0.5])
@pytest.mark.parametrize("log_noise", [-800.0, 800.0])
def test_noise_whose_variance_float64_cannot_hold(log_noise: float, spread: float) -> None:
    """exp(800) overflows: the same in other units, where it does not, and exp(-800) likewise."""
    scale = np.exp(log_noise / 2)
    here, there = one(0.0, 0.0, log_noise, spread), one(0.0, 0.0, 0.0, spread)
    y = column(0.7)
    torch.testing.assert_close(here.deviation / scale, there.deviation, rtol=1e-9, atol=0)
    torch.testing.assert_close(here.half(0.9) / scale, there.half(0.9), rtol=1e-9, atol=0)
    torch.testing.assert_close(here.below(y * scale), there.below(y), rtol=1e-9, atol=0)
    torch.testing.assert_close(here.log_prob(y * scale) + log_noise / 2, there.log_prob(y), rtol=1e-9, atol=0)


def test_beyond_all_numbers_widths_are_infinite_and_never_nan() -> None:
    """And the row beside them has what it has alone."""
    level, spread = column(1e5, 0.0, 1e5, 0.0), column(0.0, 1e6, 1e4, 0.5)
    amounts = ScaleMixture(0 * level, 1 + 0 * level, level, spread)
    for found in (amounts.half(0.9), amounts.deviation):
        assert found.isinf().tolist() == [True, True, True, False]
    torch.testing.assert_close(amounts.half(0.9)[3:], one(0.0, 1.0, 0.0, 0.5).half(0.9), rtol=1e-7, atol=0)
    assert bool(amounts.log_prob(0.5 + 0 * level).isfinite().all())
    torch.testing.assert_close(amounts.below(0 * level), 0.5 + 0 * level, rtol=1e-12, atol=0)


def test_outputs_of_two_heads_and_the_bound_of_their_spread() -> None:
    value = torch.tensor([[1.0, 2.0, -1.0, -2.0], [3.0, 4.0, -3.0, -4.0]])
    variance = torch.tensor([[0.1, 0.2, 0.3, 1e9], [0.4, -1e-9, -1e-9, 0.6]])
    found = ScaleMixture.of_heads(value, variance)
    assert found.mean.tolist() == [1, 2, 3, 4]
    assert found.log_noise.tolist() == [-1, -2, -3, -4]
    torch.testing.assert_close(found.variance, torch.tensor([0.1, 0.2, 0.4, 0.0]).double())
    torch.testing.assert_close(found.spread, torch.tensor([0.3, SPREAD, 0.0, 0.6]).double())
    assert found.mean.dtype == torch.float64


def test_intervals_hold_their_level_and_draws_fall_into_them() -> None:
    law, n = ScaleMixture(column(0, 5), column(0.4, 1e-3), column(-1, 0.3), column(0, 0.7)), 100_000
    drawn = law.draw(n, torch.Generator().manual_seed(0))
    low, high = law.interval(0.9)
    torch.testing.assert_close(law.cdf(high) - law.cdf(low), column(0.9, 0.9), rtol=1e-8, atol=0)
    torch.testing.assert_close(law.width(0.9), high - low)
    share = ((low < drawn) & (drawn < high)).double().mean(0)
    assert bool(((share - 0.9).abs() < 4 * (0.9 * 0.1 / n) ** 0.5).all())
    assert bool(((drawn.mean(0) - law.mean).abs() < 4 * law.deviation / n**0.5).all())
