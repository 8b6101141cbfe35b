"""What laplace-torch 0.3 gets wrong, done right: curvature, evidence and tuning (D1 to D7).

Each test is named after what is right and has an oracle of its own: a closed form, a finite difference, or a loop that
anybody can read. What concerns predictions and the user's model is in `test_what_is_kept.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import log, pi
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing
from lapwing import Laplace


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def trained(model: nn.Sequential, loss: Callable[[], Tensor]) -> nn.Sequential:
    """The mode of the log joint with a unit prior, by L-BFGS."""
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss() + sum(p.square().sum() for p in model.parameters()) / 2
        value.backward()
        return value

    optimizer.step(closure)
    return model


def wave(points: int = 30) -> tuple[nn.Sequential, DataLoader[Any]]:
    """A tanh network fitted to a noisy sine."""
    x = torch.linspace(-2, 2, points).unsqueeze(1)
    y = torch.sin(2 * x) + 0.3 * torch.randn(points, 1)
    model = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1))
    trained(model, lambda: 5 * (model(x) - y).square().sum())
    return model, DataLoader(TensorDataset(x, y), batch_size=7)


def blobs(points: int = 45) -> tuple[nn.Sequential, DataLoader[Any], DataLoader[Any]]:
    """A network fitted to three clouds that overlap, with as many data held out."""
    labels = torch.arange(2 * points) % 3
    x = torch.tensor([[0.0, 1.0], [1.0, -0.7], [-1.0, -0.7]])[labels] + torch.randn(2 * points, 2)
    model = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3))
    trained(model, lambda: 4 * nn.functional.cross_entropy(model(x[:points]), labels[:points], reduction="sum"))
    fit, held = TensorDataset(x[:points], labels[:points]), TensorDataset(x[points:], labels[points:])
    return model, DataLoader(fit, batch_size=10), DataLoader(held, batch_size=10)


# -- D1 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["kron", "full", "diag"])
@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_the_gradient_of_the_evidence_in_sigma_is_its_derivative(subset: str, structure: str) -> None:
    model, loader = wave()
    la = Laplace(model, "regression", subset, structure)
    la.fit(loader)
    at = torch.tensor([0.7, -1.1])  # log prior precision, log sigma
    free = at.clone().requires_grad_()
    la.log_marginal_likelihood(free[0].exp(), free[1].exp()).backward()
    assert free.grad is not None

    def value(point: Tensor) -> float:
        return float(la.log_marginal_likelihood(point[0].exp(), point[1].exp()))

    step = 1e-5
    for i in range(2):
        shift = step * torch.eye(2)[i]
        slope = (value(at + shift) - value(at - shift)) / (2 * step)
        assert float(free.grad[i]) == pytest.approx(slope, rel=1e-6)


def test_the_sigma_that_adam_finds_is_the_best_of_a_fine_grid() -> None:
    model, loader = wave()
    la = Laplace(model, "regression", "all", "kron")
    la.fit(loader)
    log_prior, log_sigma = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.Adam([log_prior, log_sigma], lr=0.05)
    for _ in range(600):
        optimizer.zero_grad()
        (-la.log_marginal_likelihood(log_prior.exp(), log_sigma.exp())).backward()
        optimizer.step()
    prior = log_prior.detach().exp()
    grid = log_sigma.detach() + torch.linspace(-1, 1, 401)
    scores = torch.stack([la.log_marginal_likelihood(prior, each.exp()).detach() for each in grid])
    assert abs(float(grid[scores.argmax()] - log_sigma.detach())) <= 0.005 + 1e-9


# -- D2, D3 ------------------------------------------------------------------------------------------------------------


def held_out_nll(la: Any, held: DataLoader[Any]) -> float:
    total, count = 0.0, 0
    for x, y in held:
        if la.likelihood == "classification":
            total -= float(la(x).log()[torch.arange(len(y)), y].sum())
        else:
            mean, variance = la(x)
            variance = variance.squeeze(-1) + la.sigma_noise**2
            total += float((log(2 * pi) / 2 + variance.log() / 2 + (y - mean).square() / (2 * variance)).sum())
        count += len(y)
    return total / count


def best_by_hand(la: Any, held: DataLoader[Any], grid: Tensor) -> float:
    scores = []
    for each in grid:
        la.prior_precision = float(each)
        scores.append(held_out_nll(la, held))
    best = int(torch.tensor(scores).argmin())
    assert 0 < best < len(grid) - 1  # a choice at the end of the grid would prove nothing
    return float(grid[best])


@pytest.mark.parametrize("structure", ["full", "kron"])
def test_grid_search_scores_every_precision_afresh(structure: str) -> None:
    model, loader, held = blobs()
    la = Laplace(model, "classification", "all", structure)
    la.fit(loader)
    grid = torch.logspace(-3, 3, 25)
    expected = best_by_hand(la, held, grid)
    options = {"log_prior_prec_min": -3.0, "log_prior_prec_max": 3.0, "grid_size": 25}
    la.optimize_prior_precision(method="gridsearch", val_loader=held, **options)
    assert float(la.prior_precision) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("structure", ["full", "kron"])
def test_grid_search_in_regression_scores_by_predictive_likelihood(structure: str) -> None:
    torch.manual_seed(1)
    model, loader = wave()
    x = torch.linspace(-3, 3, 31).unsqueeze(1)
    held = DataLoader(TensorDataset(x, torch.sin(2 * x) + 0.3 * torch.randn(31, 1)), batch_size=8)
    la = Laplace(model, "regression", "all", structure, sigma_noise=0.3)
    la.fit(loader)
    grid = torch.logspace(-4, 4, 33)
    expected = best_by_hand(la, held, grid)
    la.optimize_prior_precision(method="gridsearch", val_loader=held, grid_size=33)
    assert float(la.prior_precision) == pytest.approx(expected, rel=1e-6)


# -- D4 ----------------------------------------------------------------------------------------------------------------


def test_damping_adds_the_prior_to_the_factors() -> None:
    """(G + sqrt(d)/w) (x) (A + w sqrt(d)), w = sqrt(tr A dim G / (tr G dim A)). Here G = I, A = sum [x; 1][x; 1]^T."""
    model, x, delta = nn.Linear(3, 2), torch.randn(12, 3), 0.8
    loader = DataLoader(TensorDataset(x, torch.randn(12, 2)), batch_size=5)
    at = torch.randn(4, 3)
    inputs, new = (torch.cat([t, torch.ones(len(t), 1)], dim=1) for t in (x, at))
    factor = inputs.T @ inputs
    w = (factor.trace() * 2 / (2 * 4)).sqrt()
    damped = factor + w * delta**0.5 * torch.eye(4)
    scale = 1 / (1 + delta**0.5 / w)
    expected = scale * torch.einsum("bi,ij,bj->b", new, damped.inverse(), new)
    exact = torch.einsum("bi,ij,bj->b", new, (factor + delta * torch.eye(4)).inverse(), new)
    for damping, variance in ((True, expected), (False, exact)):
        la = Laplace(model, "regression", "all", "kron", prior_precision=delta, damping=damping)
        la.fit(loader)
        _, found = la(at)
        torch.testing.assert_close(found, variance[:, None, None] * torch.eye(2), rtol=1e-9, atol=1e-12)
    assert float((expected - exact).abs().max()) > 1e-3


# -- D5 ----------------------------------------------------------------------------------------------------------------


def gradients(model: nn.Module, loader: DataLoader[Any], loss: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """[N, P]: of one data point after the other."""
    rows = []
    for x, y in loader:
        for i in range(len(x)):
            parts = torch.autograd.grad(loss(model(x[i : i + 1]), y[i : i + 1]), list(model.parameters()))
            rows.append(torch.cat([part.flatten() for part in parts]))
    return torch.stack(rows)


@pytest.mark.parametrize("sigma", [1.0, 0.5])
def test_the_empirical_fisher_of_regression_is_the_sum_of_outer_products_of_gradients(sigma: float) -> None:
    model, loader = wave()
    rows = gradients(model, loader, lambda f, y: (f - y).square().sum() / (2 * sigma**2))
    expected = rows.T @ rows
    for choice in ({"estimator": "empirical"}, {"backend": lapwing.curvature.CurvlinopsEF}):
        for structure in ("full", "diag"):
            la: Any = Laplace(model, "regression", "all", structure, sigma_noise=sigma, prior_precision=2.0, **choice)
            la.fit(loader)
            posterior = la.posterior_precision
            wanted = expected + 2 * torch.eye(len(expected)) if structure == "full" else expected.diagonal() + 2
            torch.testing.assert_close(posterior, wanted, rtol=1e-9, atol=1e-9)


# -- D6 ----------------------------------------------------------------------------------------------------------------


def repeated() -> tuple[nn.Linear, DataLoader[Any]]:
    """Forty times the same point: curvature of three classes has rank two."""
    model = nn.Linear(2, 3, bias=False)
    with torch.no_grad():
        model.weight.mul_(0.1)
    x = torch.tensor([[1.0, -0.5]]).expand(40, 2)
    return model, DataLoader(TensorDataset(x, torch.zeros(40, dtype=torch.int64)), batch_size=40)


def sampled(structure: str, generator: torch.Generator | None) -> Tensor:
    model, loader = repeated()
    la = Laplace(model, "classification", "all", structure, estimator="mc")
    la.fit(loader, generator=generator)
    found = la.H
    return found if isinstance(found, Tensor) else found.dense()


@pytest.mark.parametrize("structure", ["kron", "full"])
def test_the_sampled_fisher_draws_for_every_point(structure: str, generator: torch.Generator) -> None:
    assert int(torch.linalg.matrix_rank(sampled(structure, generator), rtol=1e-9)) == 2


def test_the_sampled_fisher_depends_on_the_seed() -> None:
    def seeded(seed: int) -> Tensor:
        torch.manual_seed(9)  # the same weights each time
        return sampled("kron", torch.Generator().manual_seed(seed))

    assert torch.equal(seeded(0), seeded(0))
    assert not torch.allclose(seeded(0), seeded(1))


# -- D7 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prior_mean", [0.0, 0.4])
def test_the_evidence_in_function_space_is_exact_for_a_linear_gaussian_model(prior_mean: float) -> None:
    x, y, delta, sigma = torch.randn(15, 3), torch.randn(15, 2), 1.7, 0.6
    inputs = torch.cat([x, torch.ones(15, 1)], dim=1)
    precision = inputs.T @ inputs / sigma**2 + delta * torch.eye(4)
    weights = torch.linalg.solve(precision, inputs.T @ y / sigma**2 + delta * prior_mean)  # the mode
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.copy_(weights[:3].T)
        model.bias.copy_(weights[3])
    covariance = inputs @ inputs.T / delta + sigma**2 * torch.eye(15)
    prior = prior_mean * inputs.sum(1)
    exact = sum(torch.distributions.MultivariateNormal(prior, covariance).log_prob(y[:, k]) for k in range(2))
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    options = {"sigma_noise": sigma, "prior_precision": delta, "prior_mean": prior_mean}
    for structure, extra in (("gp", {"n_subset": 15}), ("full", {})):
        la = Laplace(model, "regression", "all", structure, **options, **extra)
        la.fit(loader)
        assert float(la.log_marginal_likelihood()) == pytest.approx(float(exact), rel=1e-9)
