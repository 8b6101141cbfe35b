"""Counts with a Gaussian log-rate: against sums, quadrature of another kind, and the Poisson law itself."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats
from torch import Tensor

from lapwing.distributions import PoissonLognormal


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def by_quadrature(value: str, y: float, mean: float, variance: float) -> float:
    """E of the Poisson pmf or cdf over the log-rate, by adaptive quadrature in pieces."""
    law = getattr(stats.poisson, value)

    def integrand(z: float) -> float:
        return law(y, np.exp(mean + z * variance**0.5)) * stats.norm.pdf(z)

    where = (np.log(y + 0.5) - mean) / variance**0.5
    width = 1 / (y + 1) ** 0.5 / variance**0.5
    edges = sorted({-12.0, 12.0, *np.clip(where + width * np.array([-30, -8, -3, 0, 3, 8]), -12, 12)})
    return sum(
        integrate.quad(integrand, low, high, epsabs=1e-14, epsrel=1e-11, limit=500)[0] for low, high in pairwise(edges)
    )


CASES = [
    (y, mean, variance)
    for y in (0, 1, 7, 300)
    for mean in (-2.0, 0.3, 5.5)
    for variance in (1e-6, 0.01, 0.5, 4.0, 60.0)
]


@pytest.mark.parametrize(("y", "mean", "variance"), CASES)
def test_probabilities_are_those_of_an_adaptive_quadrature(y: float, mean: float, variance: float) -> None:
    expected = by_quadrature("pmf", y, mean, variance)
    found = PoissonLognormal(tensor(mean), tensor(variance)).log_prob(tensor(y)).exp()
    assert float(found) == pytest.approx(expected, rel=1e-8, abs=1e-30)
    below = by_quadrature("cdf", y, mean, variance)
    assert float(PoissonLognormal(tensor(mean), tensor(variance)).cdf(tensor(y))) == pytest.approx(
        below, rel=1e-8, abs=1e-12
    )


def test_without_variance_it_is_the_poisson_law() -> None:
    y = torch.arange(40, dtype=torch.float64)
    mean, zero = torch.full_like(y, 1.7), torch.zeros_like(y)
    logs, below = (torch.from_numpy(f(y.numpy(), np.exp(1.7))) for f in (stats.poisson.logpmf, stats.poisson.cdf))
    torch.testing.assert_close(PoissonLognormal(mean, zero).log_prob(y), logs, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(PoissonLognormal(mean, zero).cdf(y), below, rtol=1e-9, atol=1e-12)


@settings(max_examples=20, deadline=None)
@given(st.floats(-3, 2.5), st.floats(0, 0.5))  # log 2200 is then seven deviations above the log-rate
def test_probabilities_sum_to_the_distribution_and_its_moments(mean: float, variance: float) -> None:
    y = torch.arange(2200, dtype=torch.float64)
    m, v = (torch.full_like(y, value) for value in (mean, variance))
    p = PoissonLognormal(m, v).log_prob(y).exp()
    torch.testing.assert_close(p.cumsum(0), PoissonLognormal(m, v).cdf(y), rtol=1e-8, atol=1e-9)
    expected, spread = (float(moment[0]) for moment in (PoissonLognormal(m, v).mean, PoissonLognormal(m, v).total))
    assert float((p * y).sum()) == pytest.approx(expected, rel=1e-6)
    assert float((p * (y - expected).square()).sum()) == pytest.approx(spread, rel=1e-4)


def test_between_whole_numbers_the_distribution_is_flat() -> None:
    law = PoissonLognormal(tensor(0.3, 0.3, 5.0, 5.0), tensor(0.5, 0.5, 0.0, 2.0))
    for whole in (0, 2, 7):
        at = law.cdf(torch.full((4,), float(whole), dtype=torch.float64))
        for between in (0.25, 0.999):
            torch.testing.assert_close(law.cdf(torch.full((4,), whole + between, dtype=torch.float64)), at)


def test_far_rates_stay_finite() -> None:
    y, mean, variance = tensor(0, 0, 1e6, 3), tensor(50, -700, 3, 2), tensor(100, 1, 25, 1e6)
    assert bool(PoissonLognormal(mean, variance).log_prob(y).isfinite().all())
    found = PoissonLognormal(mean, variance).cdf(y)
    assert bool(((found >= 0) & (found <= 1)).all())
    assert float(PoissonLognormal(tensor(0), tensor(1)).cdf(tensor(-1))) == 0


@pytest.mark.parametrize("level", [0.5, 0.9, 0.99])
def test_intervals_are_quantiles_by_a_plain_sum(level: float) -> None:
    law = PoissonLognormal(tensor(-3, 0.2, 2, 5), tensor(0, 0.5, 0.1, 1e-4))
    low, high = law.interval(level)
    k = torch.arange(2000, dtype=torch.float64)
    for row in range(4):
        below = law.rows(torch.full((2000,), row)).cdf(k)
        assert float(low[row]) == float(k[int((below >= (1 - level) / 2).nonzero()[0])])
        assert float(high[row]) == float(k[int((below >= (1 + level) / 2).nonzero()[0])])


def test_draws_have_the_mean_and_the_deviation() -> None:
    law, n = PoissonLognormal(tensor(0.3, 2.0), tensor(0.5, 0.05)), 100_000
    drawn = law.draw(n, torch.Generator().manual_seed(0))
    assert bool(((drawn.mean(0) - law.mean).abs() < 4 * law.deviation / n**0.5).all())
    torch.testing.assert_close(drawn.std(0), law.deviation, rtol=0.05, atol=0)


def test_the_width_is_that_of_the_interval() -> None:
    law = PoissonLognormal(tensor(-1.0, 0.3, 4.0), tensor(0.1, 0.5, 0.2))
    for level in (0.5, 0.9):
        low, high = law.interval(level)
        assert torch.equal(law.width(level), high - low)
    assert bool((law.width(0.9) > law.width(0.5)).any())
