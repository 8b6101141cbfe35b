"""Through the public face, on a linear-Gaussian model: evidence, predictions and samples have a closed form."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

from lapwing import Laplace
from lapwing.laplace import BaseLaplace
from lapwing.linalg import Precision

N, D, SIGMA, PRECISION = 40, 3, 0.4, 1.5
# A diagonal posterior is exact where the columns of the design are orthogonal.
EVERY = ["full", "kron", "blocks", "gp", "lowrank", "diag"]


@dataclass
class Linear:
    """y = x w + b + noise with the model at the mode of the posterior."""

    model: nn.Linear
    x: Tensor
    y: Tensor

    @property
    def design(self) -> Tensor:
        return torch.cat([self.x, torch.ones(len(self.x), 1, dtype=self.x.dtype)], dim=1)

    @property
    def covariance(self) -> Tensor:
        precision = self.design.mT @ self.design / SIGMA**2 + PRECISION * torch.eye(D + 1, dtype=self.x.dtype)
        return torch.linalg.inv(precision)

    def log_marginal(self, precision: float | Tensor = PRECISION, sigma: float | Tensor = SIGMA) -> Tensor:
        noise = sigma**2 * torch.eye(N, dtype=self.x.dtype)
        prior = MultivariateNormal(self.x.new_zeros(N), self.design @ self.design.mT / precision + noise)
        return prior.log_prob(self.y[:, 0])

    def fitted(self, structure: str, subset: str = "all", **options: object) -> BaseLaplace:
        if structure == "lowrank":
            options["rank"] = D + 1
        la = Laplace(
            self.model, "regression", subset, structure, sigma_noise=SIGMA, prior_precision=PRECISION, **options
        )
        la.fit([(self.x[:7], self.y[:7]), (self.x[7:], self.y[7:])])
        return la


def problem(orthogonal: bool) -> Linear:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(N, D, generator=generator, dtype=torch.float64)
    if orthogonal:
        x = torch.linalg.qr(torch.cat([x.new_ones(N, 1), x], dim=1)).Q[:, 1:] * N**0.5
    w = torch.tensor([1.0, -0.5, 0.2], dtype=torch.float64)
    y = (x @ w + 0.3 + SIGMA * torch.randn(N, generator=generator, dtype=torch.float64)).unsqueeze(1)
    found = Linear(nn.Linear(D, 1).double(), x, y)
    mode = found.covariance @ found.design.mT @ y[:, 0] / SIGMA**2
    with torch.no_grad():
        found.model.weight.copy_(mode[:D].reshape(1, D))
        found.model.bias.copy_(mode[D:])
    return found


def close(found: Tensor, expected: Tensor, rtol: float = 1e-9) -> None:
    torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-12)


@pytest.mark.parametrize("structure", EVERY)
def test_the_evidence_is_the_marginal_likelihood(structure: str) -> None:
    linear = problem(orthogonal=structure == "diag")
    close(linear.fitted(structure).log_marginal_likelihood(), linear.log_marginal())


@pytest.mark.parametrize("structure", EVERY)
def test_predictions_are_the_exact_ones(structure: str) -> None:
    linear = problem(orthogonal=structure == "diag")
    la = linear.fitted(structure)
    x = torch.randn(5, D, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    rows = torch.cat([x, x.new_ones(5, 1)], dim=1)
    exact = rows @ linear.covariance @ rows.mT
    mean, variance = la(x)
    close(mean, linear.model(x).detach())
    close(variance[:, 0, 0], exact.diagonal())
    close(la(x, diagonal_output=True)[1][:, 0], exact.diagonal())
    mean, covariance = la(x, joint=True)
    assert mean.shape == (5,)
    close(covariance, exact)


@pytest.mark.parametrize("structure", ["full", "kron", "diag", "gp"])
def test_a_last_layer_is_the_whole_of_a_linear_model(structure: str) -> None:
    linear = problem(orthogonal=structure == "diag")
    la = linear.fitted(structure, "last_layer")
    close(la.log_marginal_likelihood(), linear.log_marginal())
    assert la.n_params == D + 1


@pytest.mark.parametrize("structure", EVERY)
def test_samples_have_the_posterior_covariance(structure: str) -> None:
    """Within four standard errors, sqrt(2 / n) of a variance."""
    linear, n = problem(orthogonal=structure == "diag"), 20_000
    draws = linear.fitted(structure).sample(n, generator=torch.Generator().manual_seed(1))
    found = (draws - draws.mean(0)).square().mean(0)
    exact = linear.covariance.diagonal()
    assert bool(((found / exact - 1).abs() < 4 * (2 / n) ** 0.5).all())


@pytest.mark.parametrize("structure", EVERY)
@pytest.mark.parametrize("method", ["marglik", "mackay"])
def test_tuning_finds_the_optimum_of_the_exact_evidence(structure: str, method: str) -> None:
    """The mean stays where it is, so the optimum is that of the evidence at these weights: its gradient vanishes."""
    la = problem(orthogonal=structure == "diag").fitted(structure)
    la.optimize_prior_precision(method=method, optimize_sigma_noise=True)
    free = torch.stack([la.prior_precision[0], la.sigma_noise]).log().requires_grad_()
    value = la.log_marginal_likelihood(free[0].exp(), free[1].exp())
    (slope,) = torch.autograd.grad(value, free)
    assert float(slope.abs().max()) < 1e-4


def test_adam_climbs_to_the_same_optimum() -> None:
    la = problem(orthogonal=False).fitted("full")
    la.optimize_prior_precision(method="marglik")
    best = la.prior_precision.clone()
    la.optimize_prior_precision(method="adam", n_steps=500, lr=0.1)
    close(la.prior_precision, best, rtol=1e-3)


def test_the_evidence_in_noise_and_prior_is_differentiable_and_right() -> None:
    linear = problem(orthogonal=False)
    for structure in ("full", "kron", "gp"):
        la = linear.fitted(structure)
        log_prior, log_sigma = (torch.zeros(1, dtype=torch.float64, requires_grad=True) for _ in range(2))
        value = la.log_marginal_likelihood(log_prior.exp(), log_sigma.exp())
        found = torch.autograd.grad(value, [log_prior, log_sigma])
        step = 1e-6
        for i, grad in enumerate(found):
            up, down = ([step, 0.0][i], [0.0, step][i]), ([-step, 0.0][i], [0.0, -step][i])
            values = [
                la.log_marginal_likelihood(torch.tensor(a).double().exp(), torch.tensor(b).double().exp())
                for a, b in (up, down)
            ]
            close(grad[0], (values[0] - values[1]) / (2 * step), rtol=1e-5)


def test_a_second_data_set_adds_to_the_first() -> None:
    linear = problem(orthogonal=False)
    for structure in ("full", "kron", "diag", "blocks", "gp"):
        la = Laplace(linear.model, "regression", "all", structure, sigma_noise=SIGMA, prior_precision=PRECISION)
        la.fit([(linear.x[:9], linear.y[:9])])
        la.fit([(linear.x[9:], linear.y[9:])], override=False)
        whole = linear.fitted(structure)
        assert la.n_data == whole.n_data == N
        close(la.log_marginal_likelihood(), whole.log_marginal_likelihood())


def test_temperature_divides_log_likelihood_and_curvature() -> None:
    linear = problem(orthogonal=False)
    warm = linear.fitted("full", temperature=2.0)
    expected = linear.fitted("full").H / (2 * SIGMA**2) + PRECISION * torch.eye(D + 1, dtype=torch.float64)
    close(warm.posterior_precision, expected)
    close(warm.log_likelihood, linear.fitted("full").log_likelihood / 2)


def test_a_posterior_is_not_kept_for_numbers_that_changed_while_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when another thread sets the prior precision in the middle of a prediction."""
    model = nn.Linear(2, 1).double()
    la = Laplace(model, "regression", "all", "full")
    la.fit([(torch.randn(9, 2).double(), torch.randn(9, 1).double())])
    plain = type(la).precision

    def slow(self: BaseLaplace) -> Precision:
        found = plain.fget(self)
        monkeypatch.undo()
        la.prior_precision = 100.0
        return found

    monkeypatch.setattr(type(la), "precision", property(slow))
    _ = la.posterior
    expected = torch.linalg.inv(la.H + 100 * torch.eye(3).double()).diagonal()
    torch.testing.assert_close(la.posterior_variance, expected)


def test_the_seed_decides_which_data_a_gaussian_process_keeps() -> None:
    own, points = problem(orthogonal=False), 5
    design = own.design

    def pair_of(seed: int) -> tuple[int, int]:
        """The two data points whose closed form the predictions have."""
        options = {"sigma_noise": SIGMA, "prior_precision": PRECISION, "n_subset": 2, "seed": seed}
        la = Laplace(own.model, "regression", "all", "gp", **options)
        la.fit([(own.x[:points], own.y[:points])])
        _, found = la(own.x)
        prior = PRECISION * torch.eye(D + 1, dtype=own.x.dtype)
        fitting = []
        for pair in combinations(range(points), 2):
            rows = design[list(pair)]
            covariance = torch.linalg.inv(rows.mT @ rows / SIGMA**2 + prior)
            if torch.allclose(found[:, 0, 0], (design @ covariance * design).sum(1), rtol=1e-8):
                fitting.append(pair)
        (pair,) = fitting
        return pair

    pairs = [pair_of(seed) for seed in range(6)]
    assert len(set(pairs)) > 1
    assert pairs == [pair_of(seed) for seed in range(6)]
