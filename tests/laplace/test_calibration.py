"""Rows left out by a formula are those left out in fact; the noise of a point prediction; when a scale is changed."""

from __future__ import annotations

from math import log

import pytest
import torch
from torch import Tensor, nn

from lapwing import BaseLaplace, Laplace
from lapwing.distributions.scale_mixture import SPREAD
from lapwing.laplace import calibration
from lapwing.laplace.calibration import ERRORS, HeldOut, calibrate, leave_one_out, point_noise, rescale
from lapwing.likelihoods import Gaussian

ALPHA, SIGMA = 0.7, 0.3


def data(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64)
    return x, y + SIGMA * torch.randn(n, 1, generator=generator, dtype=torch.float64)


def at_mode(x: Tensor, y: Tensor) -> tuple[nn.Linear, Tensor]:
    """A linear model at the mode of its posterior, and the covariance of the weights."""
    precision = x.T @ x / SIGMA**2 + ALPHA * torch.eye(3, dtype=torch.float64)
    model = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.linalg.solve(precision, x.T @ y / SIGMA**2).T)
    return model, torch.linalg.inv(precision)


def fitted(x: Tensor, y: Tensor) -> BaseLaplace:
    la = Laplace(at_mode(x, y)[0], "regression", "all", "full", prior_precision=ALPHA, sigma_noise=SIGMA)
    la.fit([(x, y)])
    return la


@pytest.mark.parametrize("scaled", [False, True])
def test_rows_left_out_by_the_formula_are_those_left_out_in_fact(scaled: bool) -> None:
    x, y = data(12)
    la = fitted(x, y)
    if scaled:  # a covariance that has been multiplied leaves leverages as they are
        la.temperature, la.prior_precision = la.temperature * 4, la.prior_precision / 4
    found = leave_one_out(la, [(x[:5], y[:5]), (x[5:], y[5:])])
    for row in range(len(x)):
        rest = torch.arange(len(x)) != row
        model, covariance = at_mode(x[rest], y[rest])
        variance = x[row] @ covariance @ x[row] * (4 if scaled else 1)
        torch.testing.assert_close(found.value[row], model(x[row]).detach(), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found.variance[row, 0], variance, rtol=1e-9, atol=0)


@pytest.mark.parametrize("scaled", [False, True])
def test_the_noise_of_a_point_prediction_is_generalised_cross_validation(scaled: bool) -> None:
    x, y = data(12)
    la = fitted(x, y)
    if scaled:
        la.temperature, la.prior_precision = la.temperature * 4, la.prior_precision / 4
    model, covariance = at_mode(x, y)
    leverage = (x @ covariance * x).sum() / SIGMA**2 / len(x)
    expected = (model(x) - y).square().mean().sqrt() / (1 - leverage)
    assert point_noise(la) == pytest.approx(float(expected.detach()), rel=1e-9)


def test_rows_left_out_where_the_noise_is_an_output() -> None:
    """As with constant noise, if the noise head says the same everywhere and has nothing to do with the mean."""
    x, y = data(12)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.noise = at_mode(x, y)[0], nn.Linear(3, 1, dtype=torch.float64)
            with torch.no_grad():
                self.noise.weight.zero_()
                self.noise.bias.fill_(2 * log(SIGMA))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.mean(x), self.noise(x)], 1)

    la = Laplace(Two(), "heteroscedastic", "all", "full", prior_precision=ALPHA)
    la.fit([(x, y)])
    found, plain = leave_one_out(la, [(x, y)]), leave_one_out(fitted(x, y), [(x, y)])
    torch.testing.assert_close(found.value[:, :1], plain.value, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.variance[:, :1], plain.variance, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.value[:, 1], torch.full((12,), 2 * log(SIGMA), dtype=torch.float64))
    assert found.count == 12
    for c in (0.5, 1.0, 4.0):
        spread = (c * found.variance[:, 1:]).clamp_max(SPREAD)
        level = found.value[:, 1:] + spread.sqrt() * torch.linspace(-9, 9, 4001).double()
        weights = torch.softmax(-torch.linspace(-9, 9, 4001).double().square() / 2, 0).log()
        normal = torch.distributions.Normal(found.value[:, :1], (c * found.variance[:, :1] + level.exp()).sqrt())
        expected = torch.logsumexp(normal.log_prob(y) + weights, 1)
        torch.testing.assert_close(found.log_prob(c), expected, rtol=1e-7, atol=1e-8)
    said = rescale(la, found)
    assert "the noise by" not in said


def held_out(factor: float, n: int, la: BaseLaplace) -> HeldOut:
    generator = torch.Generator().manual_seed(0)
    variance = torch.rand(n, 1, generator=generator, dtype=torch.float64)
    total = factor * variance + SIGMA**2
    y = total.sqrt() * torch.randn(n, 1, generator=generator, dtype=torch.float64)
    return HeldOut(Gaussian(), torch.zeros(n, 1, dtype=torch.float64), variance, y, la.sigma_noise.reshape(1))


def test_a_scale_changes_where_it_gains_by_several_standard_errors() -> None:
    la = fitted(*data(12))
    before = la.posterior_variance.clone()
    assert "left as the evidence chose it" in rescale(la, held_out(1.0, 2000, la), ERRORS)
    assert "was multiplied by" in rescale(la, held_out(5.0, 2000, la), ERRORS)
    assert float((la.posterior_variance / before).mean()) == pytest.approx(5, rel=0.2)
    other = fitted(*data(12))
    said = [rescale(other, held_out(5.0, 60, other), errors) for errors in (1e3, 0.0)]
    assert "left as the evidence chose it" in said[0]
    assert "was multiplied by" in said[1]


@pytest.mark.parametrize(("structure", "estimator"), [("full", "exact"), ("full", "empirical"), ("diag", "exact")])
def test_calibration_multiplies_covariance_and_noise_each_by_one_number(
    structure: str, estimator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best pair of the grid by a loop over densities; every entry of the covariance goes up by the same factor."""
    for name in ("COVARIANCE", "NOISE"):
        monkeypatch.setattr(calibration, name, getattr(calibration, name)[::5])
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 2, generator=generator, dtype=torch.float64)
    y = torch.sin(2 * x[:, :1]) + 0.5 * torch.randn(60, 1, generator=generator, dtype=torch.float64)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    la = Laplace(model, "regression", "all", structure, sigma_noise=0.2, temperature=1.7, estimator=estimator)
    la.fit([(x[:30], y[:30])])
    before, u, v = la.posterior_covariance, x[30:], y[30:]
    mean, variance = la(u, diagonal_output=True)

    def score(c: float, s: float) -> float:
        spread = (c * variance + (0.2 * s) ** 2).sqrt()
        return float(torch.distributions.Normal(mean, spread).log_prob(v).sum())

    pairs = [(c, s) for c in calibration.COVARIANCE.tolist() for s in calibration.NOISE.tolist()]
    best = max(pairs, key=lambda pair: score(*pair))
    assert score(*best) > score(1.0, 1.0) + 2
    calibrate(la, [(u[:11], v[:11]), (u[11:], v[11:])])
    torch.testing.assert_close(la.posterior_covariance, best[0] * before, rtol=1e-8, atol=1e-12)
    assert la.sigma_noise.item() == pytest.approx(0.2 * best[1])
