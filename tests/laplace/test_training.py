"""marglik_training through the public face, and grid search on held-out data."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lapwing import Laplace, marglik_training
from lapwing.errors import CurvatureError, OptionError
from lapwing.laplace import BaseLaplace


def clouds(n: int = 60, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 3
    centres = torch.tensor([[0.0, 2.0], [2.0, -1.0], [-2.0, -1.0]], dtype=torch.float64)
    return centres[y] + 1.2 * torch.randn(n, 2, generator=generator, dtype=torch.float64), y


def wave(n: int = 40, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = 6 * torch.rand(n, 1, generator=generator, dtype=torch.float64) - 3
    return x, torch.sin(x) + 0.3 * torch.randn(n, 1, generator=generator, dtype=torch.float64)


def mlp(inputs: int, outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 12), nn.Tanh(), nn.Dropout(0.1), nn.Linear(12, outputs)).double()


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_training_returns_a_fitted_posterior_and_rising_evidence(structure: str, task: str) -> None:
    x, y = clouds() if task == "classification" else wave()
    model = mlp(x.shape[1], 3 if task == "classification" else 1).train()
    la, same, negative, losses = marglik_training(
        model,
        [(x[:30], y[:30]), (x[30:], y[30:])],
        task,
        structure,
        n_epochs=30,
        n_hypersteps=5,
        optimizer_kwargs={"lr": 1e-2},
        generator=torch.Generator().manual_seed(0),
    )
    assert same is model
    assert isinstance(la, BaseLaplace)
    assert all(module.training for module in model.modules())
    assert len(losses) == 30
    assert len(negative) == 30 * 5
    assert negative[-1] < negative[0]
    assert len(la.prior_precision) == 4
    assert float(-la.log_marginal_likelihood()) <= negative[0]
    if task == "regression":
        assert float(la.sigma_noise) < 1


@pytest.mark.parametrize("structure", ["full", "kron", "diag", "gp"])
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_grid_search_is_the_best_of_plain_predictions(structure: str, task: str) -> None:
    """Each precision scored by a loop over the public predictions, one by one."""
    data, held_out = (clouds, clouds) if task == "classification" else (wave, wave)
    (x, y), (u, v) = data(), held_out(30, 1)
    la = Laplace(mlp(x.shape[1], 3 if task == "classification" else 1), task, "all", structure, sigma_noise=1.0)
    la.fit([(x, y)])
    grid = torch.logspace(-2, 2, 9, dtype=torch.float64)
    scores = []
    for value in grid:
        la.prior_precision = value
        out = la(u)
        if isinstance(out, tuple):
            spread = out[1][:, 0] + la.sigma_noise**2
            scores.append(-torch.distributions.Normal(out[0], spread.sqrt()).log_prob(v).mean())
        else:
            scores.append(-out[torch.arange(len(v)), v].log().mean())
    best = grid[torch.stack(scores).argmin()]
    options = {"log_prior_prec_min": -2, "log_prior_prec_max": 2, "grid_size": 9}
    la.prior_precision = 1.0
    la.optimize_prior_precision(method="gridsearch", val_loader=[(u[:11], v[:11]), (u[11:], v[11:])], **options)
    torch.testing.assert_close(la.prior_precision[0], best)


@pytest.mark.parametrize("options", [{"pred_type": "nn"}, {"link_approx": "mc"}])
def test_grid_search_by_draws_is_reproducible_and_leaves_the_best(options: dict) -> None:
    x, y = clouds()
    la = Laplace(mlp(2, 3), "classification", "all", "kron")
    la.fit([(x, y)])
    found = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(5)
        la.optimize_prior_precision(
            method="gridsearch", val_loader=[clouds(20, 1)], grid_size=4, n_samples=10, generator=generator, **options
        )
        found.append(la.prior_precision.item())
    assert found[0] == found[1]
    with pytest.raises(OptionError, match="a loss of your own"):
        la.optimize_prior_precision(method="gridsearch", val_loader=[(x, y)], loss=lambda p, t: 0.0, **options)


def test_pseudo_data_by_drawn_networks_are_a_plain_loop() -> None:
    """As in the thesis: every pair scored by predictions of networks drawn at it."""
    (x, y), (u, v) = clouds(), clouds(20, 1)
    la = Laplace(mlp(2, 3), "classification", "all", "kron", temperature=3.0)
    la.fit([(x, y)])
    options = {"method": "pseudo_data", "pred_type": "nn", "val_loader": [(u, v)], "n_samples": 10}
    counts, grid = [4.0, 40.0, 400.0], torch.logspace(-2, 2, 3, dtype=torch.float64)
    scores = {}
    for count in counts:
        for value in grid.tolist():
            la.prior_precision, la.temperature = value, la.n_data / count
            f = la.functional_samples(u, "nn", 10, generator=torch.Generator().manual_seed(5))
            probabilities = f.softmax(-1).mean(0)
            scores[value, la.n_data / count] = float(-probabilities[torch.arange(len(v)), v].log().mean())
    best = min(scores, key=scores.__getitem__)
    assert sorted(scores.values())[1] > min(scores.values()) * (1 + 1e-9)
    la.prior_precision, la.temperature = 1.0, 3.0
    search = {"counts": counts, "log_prior_prec_min": -2, "log_prior_prec_max": 2, "grid_size": 3}
    la.optimize_prior_precision(**options, **search, generator=torch.Generator().manual_seed(5))
    assert (la.prior_precision.item(), la.temperature.item()) == pytest.approx(best)
    with pytest.raises(OptionError, match="a loss of your own"):
        la.optimize_prior_precision(**options, loss=lambda p, t: 0.0)
    with pytest.raises(CurvatureError, match="counts go down to 0"):
        la.optimize_prior_precision(**options, counts=[0.0, 1.0])
    assert (la.prior_precision.item(), la.temperature.item()) == pytest.approx(best)


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_the_posterior_of_an_empirical_fisher_has_the_noise_to_the_fourth_power(structure: str) -> None:
    """A gradient of a Gaussian log-likelihood carries 1 / sigma^2, and its square 1 / sigma^4, in every use of it."""
    x, y = wave()
    options = {"sigma_noise": 0.6, "prior_precision": 2.0, "estimator": "empirical"}
    la = Laplace(mlp(1, 1).eval(), "regression", "all", structure, **options)
    la.fit([(x, y)])
    matrix = la.fitted.curvature.dense() / 0.6**4 + 2.0 * torch.eye(la.n_params, dtype=torch.float64)
    weights = list(la.model.parameters())
    grads = [torch.autograd.grad(f, weights, retain_graph=True) for f in la.model(x[:3]).flatten()]
    jacobian = torch.stack([torch.cat([g.flatten() for g in each]) for each in grads])
    expected = torch.einsum("n p, n p -> n", jacobian, torch.linalg.solve(matrix, jacobian.mT).mT)
    torch.testing.assert_close(la(x[:3])[1].flatten(), expected)
    torch.testing.assert_close(la.log_det_posterior_precision, torch.linalg.slogdet(matrix).logabsdet)
    torch.testing.assert_close(la.precision.variance(), torch.linalg.inv(matrix).diagonal())


def test_pseudo_data_sets_precision_and_temperature() -> None:
    x, y = wave()
    la = Laplace(mlp(1, 1), "regression", "all", "full", sigma_noise=0.3)
    la.fit([(x, y)])
    la.optimize_prior_precision(method="pseudo_data", val_loader=[wave(20, 1)], grid_size=5, counts=[4.0, 40.0, 400.0])
    assert la.temperature.item() in (10.0, 1.0, 0.1)
    assert la.prior_precision.item() in torch.logspace(-4, 4, 5, dtype=torch.float64).tolist()
