"""Predictions with one type of answer each: probabilities, moments of outputs, and laws of targets."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lapwing import BaseLaplace, HeteroscedasticGaussian, Laplace, Poisson
from lapwing.errors import OptionError

X = torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(4, 2)


def fitted(likelihood: object, outputs: int, y: Tensor, **options: object) -> BaseLaplace:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, outputs)).double()
    la = Laplace(model, likelihood, "all", "full", **options)  # pyright: ignore[reportArgumentType]
    la.fit([(X, y)])
    return la


def test_probabilities_are_those_of_a_call() -> None:
    la = fitted("classification", 3, torch.tensor([0, 1, 2, 1]))
    for link in ("probit", "bridge"):
        assert torch.equal(la.predict_proba(X, link), la(X, link_approx=link))
    same = [torch.Generator().manual_seed(1) for _ in range(2)]
    assert torch.equal(la.predict_proba(X, "mc", 7, same[0]), la(X, link_approx="mc", n_samples=7, generator=same[1]))


def test_moments_are_those_of_the_outputs_for_every_likelihood() -> None:
    for likelihood, y in (("classification", torch.tensor([0, 1, 2, 1])), ("regression", X.repeat(1, 2)[:, :3])):
        la = fitted(likelihood, 3, y)
        mean, covariance = la.predict_moments(X)
        rows = la.linearise(X).rows()
        torch.testing.assert_close(mean, la.model(X).detach(), rtol=1e-12, atol=0)
        torch.testing.assert_close(covariance, rows @ la.posterior_covariance @ rows.mT, rtol=1e-9, atol=1e-12)
        variance = covariance.diagonal(dim1=1, dim2=2)
        torch.testing.assert_close(la.predict_moments(X, diagonal_output=True)[1], variance, rtol=1e-9, atol=0)
        joint = la.predict_moments(X, joint=True)[1].reshape(4, 3, 4, 3)
        torch.testing.assert_close(joint[2, :, 2], covariance[2], rtol=1e-9, atol=1e-12)


def test_numbers_have_a_normal_law_with_the_noise_in_it() -> None:
    la = fitted("regression", 2, X, sigma_noise=0.3, prior_precision=2.0)
    mean, variance = la(X, diagonal_output=True)
    law = torch.distributions.Normal(mean.flatten(), (variance + 0.3**2).sqrt().flatten())
    found = la.predict_distribution(X)
    torch.testing.assert_close(found.mean, law.mean, rtol=1e-12, atol=0)
    torch.testing.assert_close(found.deviation, law.stddev, rtol=1e-9, atol=0)
    torch.testing.assert_close(found.log_prob(X.flatten()), law.log_prob(X.flatten()), rtol=1e-9, atol=0)
    low, high = found.interval(0.9)
    torch.testing.assert_close(low, law.icdf(torch.tensor(0.05, dtype=torch.float64)), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(high, law.icdf(torch.tensor(0.95, dtype=torch.float64)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("likelihood", "outputs", "y"),
    [(HeteroscedasticGaussian(), 2, X[:, :1]), (Poisson(), 1, torch.tensor([[0.0], [2.0], [1.0], [5.0]]).double())],
)
def test_laws_have_the_moments_of_draws(likelihood: object, outputs: int, y: Tensor) -> None:
    """Outputs from their Gaussian, targets given outputs from the likelihood: means within four standard errors."""
    la = fitted(likelihood, outputs, y, prior_precision=5.0)
    generator = torch.Generator().manual_seed(0)
    f = la.functional_samples(X, n_samples=20_000, diagonal_output=True, generator=generator)
    drawn = la.distribution.sample(f.flatten(0, 1), generator).reshape(20_000, 4)
    found = la.predict_distribution(X)
    error = drawn.std(0) / 20_000**0.5
    assert bool(((drawn.mean(0) - found.mean).abs() < 4 * error).all())
    low, high = found.interval(0.8)
    inside = ((drawn >= low) & (drawn <= high)).double().mean(0)
    # a whole number holds more than its share of a count's interval
    assert bool((inside > 0.8 - 4 * (0.16 / 20_000) ** 0.5).all())


def test_the_wrong_question_names_the_right_one() -> None:
    numbers = fitted("regression", 1, X[:, :1])
    with pytest.raises(OptionError, match=r"predicts numbers.*predict_moments or predict_distribution"):
        numbers.predict_proba(X)
    classes = fitted("classification", 3, torch.tensor([0, 1, 2, 1]))
    with pytest.raises(OptionError, match=r"no closed form.*predict_proba"):
        classes.predict_distribution(X)
