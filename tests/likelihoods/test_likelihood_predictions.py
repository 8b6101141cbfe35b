"""What a likelihood says of predictions agrees with what it says of targets, for every row of `CASES`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lapwing.likelihoods import Bernoulli, Categorical, Preference, from_function
from lapwing.likelihoods.links import DEFAULT

RTOL = {"rtol": 1e-9, "atol": 1e-12}


def observed(problem: Any) -> tuple[Tensor, Tensor]:
    """Outputs [n, C] and targets [n, ...] with the layout taken off, positions without a target left out."""
    f = problem.f_last.flatten(0, -2)
    y = problem.y_last.flatten(0, -2) if problem.case.per_output else problem.y.flatten()
    kept = problem.likelihood.observed(problem.y)
    return (f, y) if kept is None else (f[kept.flatten()], y[kept.flatten()])


def test_links_without_a_spread_are_the_prediction_itself(problem) -> None:
    likelihood, f = problem.likelihood, problem.f
    assert bool(likelihood.links) == likelihood.has_probabilities
    if not likelihood.links:
        return
    assert DEFAULT in likelihood.links
    p = likelihood.predicted(f)
    torch.testing.assert_close(likelihood.predicted(likelihood.outputs_of(p)), p, **RTOL)
    if not problem.case.per_output:
        torch.testing.assert_close(likelihood.to_last(p).sum(-1), torch.ones_like(likelihood.to_last(p)[..., 0]))
    for name, link in likelihood.links.items():
        if not link.joint:
            torch.testing.assert_close(likelihood.probabilities(f, torch.zeros_like(f), name), p, **RTOL)
        if link.outputs is not None:
            spread = f.square()
            said = likelihood.predicted(link.outputs(f, spread))
            torch.testing.assert_close(said, likelihood.probabilities(f, spread, name), **RTOL)


def test_targets_without_a_spread_have_their_likelihood(problem) -> None:
    if not problem.likelihood.has_closed_form or problem.case.name == "bernoulli_soft":
        return
    f, y = observed(problem)
    y = y.to(f.dtype) if problem.case.per_output else y
    each = problem.likelihood.target_log_prob(f, torch.zeros_like(f), y)
    assert each.shape == (y.numel(),)
    expected = problem.likelihood.log_prob(problem.f, problem.y).sum()
    torch.testing.assert_close(each.sum(), expected, rtol=1e-6, atol=1e-9)


def test_laws_are_averages_of_the_likelihood_over_outputs(vector_problem) -> None:
    """Against Monte Carlo, within four standard errors by the delta rule."""
    likelihood, (f, y) = vector_problem.likelihood, observed(vector_problem)
    variance = 0.05 + 0.2 * torch.rand(f.shape, generator=torch.Generator().manual_seed(1), dtype=f.dtype)
    law = likelihood.predictive(f, variance)
    if law is None:
        return
    count, generator = 20_000, torch.Generator().manual_seed(2)
    noise = torch.randn(count, *f.shape, generator=generator, dtype=f.dtype)
    outputs = (f + variance.sqrt() * noise).flatten(0, 1)
    p = likelihood.log_prob(outputs, y.repeat(count, 1)).exp().reshape(count, len(f))
    found = law.log_prob(y.flatten().to(f.dtype)).reshape(len(f), -1).sum(1)
    assert bool(((found.exp() - p.mean(0)).abs() < 4 * p.std(0) / count**0.5).all())
    drawn = likelihood.sample(outputs, generator).reshape(count, -1)
    assert bool(((drawn.mean(0) - law.mean).abs() < 4 * law.deviation / count**0.5).all())
    torch.testing.assert_close(torch.hypot(*law.parts), law.deviation, **RTOL)
    low, high = law.interval(0.9)
    share = ((low <= drawn) & (drawn <= high)).to(f.dtype).mean(0)
    within = share - 0.9 if not law.discrete else (share - 0.9).clamp_max(0)  # whole numbers hold their level or more
    assert bool((within.abs() < 4 * (0.09 / count) ** 0.5).all())


def test_signal_and_noise_are_the_moments_of_samples(vector_problem) -> None:
    likelihood, f = vector_problem.likelihood, vector_problem.f_last
    known = likelihood.signal_and_noise(f)
    assert likelihood.adds_noise <= (known is not None)
    if known is None:
        return
    mean, variance = known
    drawn = torch.stack([likelihood.sample(f, torch.Generator().manual_seed(k)) for k in range(4000)])
    assert bool(((drawn.mean(0) - mean).abs() < 4 * (variance / 4000).sqrt()).all())
    torch.testing.assert_close(drawn.var(0), variance.expand_as(mean), rtol=0.15, atol=0)


def test_noise_that_is_split_off_can_be_put_back(vector_problem) -> None:
    likelihood, f, y = vector_problem.likelihood, vector_problem.f, vector_problem.y
    unit, sigma = likelihood.split_noise()
    if sigma is None:
        assert unit is likelihood
        return
    assert likelihood.adds_noise
    torch.testing.assert_close(unit.at_noise(sigma).log_prob(f, y), likelihood.log_prob(f, y), **RTOL)
    assert unit.split_noise()[1] == 1


def test_preferences_predict_rewards_and_their_targets_are_classes() -> None:
    f = torch.randn(3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert not Preference().has_probabilities
    assert Preference().of_targets().has_probabilities
    torch.testing.assert_close(Preference().of_targets().predicted(f), f.softmax(-1))


def test_a_likelihood_that_says_nothing_predicts_its_outputs() -> None:
    likelihood = from_function(lambda f, y: ((f - y) ** 2).sum())
    f = torch.randn(3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.equal(likelihood.predicted(f), f)
    assert likelihood.of_targets() is likelihood
    assert likelihood.split_noise() == (likelihood, None)
    assert likelihood.signal_and_noise(f) is None
    assert not any((likelihood.has_probabilities, likelihood.has_classes, likelihood.has_closed_form))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_probabilities_that_round_to_zero_or_one_have_finite_outputs(dtype: torch.dtype) -> None:
    p = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1e-30, 1 - 1e-30], [0.3, 0.7]], dtype=dtype)
    for likelihood in (Bernoulli(), Categorical()):
        f = likelihood.outputs_of(p)
        assert bool(f.isfinite().all())
        torch.testing.assert_close(likelihood.predicted(f), p, rtol=1e-5, atol=1e-6)
