"""Tasks one after the other: the posterior of all data in linear-Gaussian models; what each method says elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lapwing import Laplace
from lapwing.likelihoods import Gaussian
from lapwing.linalg import Blocks, Diagonal, KroneckerSum
from lapwing.params import ParamSpace
from lapwing.priors import Prior
from lapwing.training import Continual
from lapwing.training.quadratic_term import Anchor, QuadraticTerm

EXACT: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-11}
Pairs = list[tuple[Tensor, Tensor]]


def newton(params: list[Tensor]) -> torch.optim.Optimizer:
    """By gradients alone: a line search compares losses, whose rounding hides the last eight digits of the mode."""
    return torch.optim.LBFGS(params, max_iter=100, tolerance_grad=1e-15, tolerance_change=0.0)


def adam(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, 1e-2)


def classes(seed: int, n: int = 12, batch: int = 6) -> Pairs:
    """Classes of inputs [n, 3], in batches."""
    drawn = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=drawn, dtype=torch.float64)
    y = torch.randint(2, (n,), generator=drawn)
    return [(x[i : i + batch], y[i : i + batch]) for i in range(0, n, batch)]


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def numbers(seed: int, orthogonal: bool = False, n: int = 8) -> Pairs:
    """Targets of a linear model; with `orthogonal` inputs the weights are independent given the data."""
    drawn = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=drawn, dtype=torch.float64)
    if orthogonal:
        x = torch.linalg.qr(x)[0] * torch.rand(3, generator=drawn, dtype=torch.float64)
    return [(x, torch.randn(n, 1, generator=drawn, dtype=torch.float64))]


@pytest.mark.parametrize("structure", ["full", "kron", "ekfac", "blocks", "diag"])
def test_linear_gaussian_tasks_in_sequence_have_the_posterior_of_all_data(structure: str) -> None:
    """One output: G is a number, so that every structure but the diagonal one holds the posterior for any inputs."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    tasks = [numbers(seed, structure == "diag") for seed in range(3)]
    continual = Continual(model, Gaussian(0.5), structure=structure, prior_precision=0.7)
    for task in tasks:
        continual.learn(task, epochs=3, optimizer=newton)
    x, y = (torch.cat(each) for each in zip(*(task[0] for task in tasks), strict=True))
    precision = x.T @ x / 0.25 + 0.7 * torch.eye(3, dtype=torch.float64)
    mean = torch.linalg.solve(precision, x.T @ y / 0.25).squeeze(1)
    torch.testing.assert_close(continual.posterior.mean, mean, **EXACT)
    torch.testing.assert_close(continual.posterior.precision.to_matrix(), precision, **EXACT)
    assert continual.tasks == 3


@pytest.mark.parametrize("structure", ["full", "kron", "ekfac", "diag"])
def test_one_task_is_the_plain_fit(structure: str) -> None:
    model, data = network(), classes(0)
    continual = Continual(model, "classification", structure=structure, prior_precision=2.0)
    learned = continual.learn(data, epochs=2, optimizer=adam)
    la = Laplace(model, "classification", "all", structure, prior_precision=2.0)
    la.fit(data)
    assert (learned.task, learned.points, len(learned.losses)) == (0, 12, 2)
    x = torch.randn(5, 3, dtype=torch.float64)
    torch.testing.assert_close(continual.predict(x), la(x), **EXACT)
    torch.testing.assert_close(continual.posterior.precision.to_matrix(), la.posterior.precision.to_matrix(), **EXACT)


@pytest.mark.parametrize("method", ["online", "ewc"])
@pytest.mark.parametrize("structure", ["full", "kron", "ekfac", "diag"])
def test_the_gradient_of_a_step_is_that_of_the_dense_quadratic(structure: str, method: str) -> None:
    model = network()
    continual = Continual(model, "classification", method=method, structure=structure, multiplier=3.0)
    moments: list[tuple[Tensor, Tensor]] = []
    for seed in range(3):
        continual.learn(classes(seed), epochs=1, optimizer=adam)
        la = Laplace(model, "classification", "all", structure)
        la.fit(classes(seed))
        moments.append((continual.space.values(model), 3 * la.curvature.dense()))
    theta = torch.randn(continual.space.size, dtype=torch.float64).requires_grad_()
    if method == "online":
        away = theta - moments[-1][0]
        value = away @ (sum(H for _, H in moments) + torch.eye(len(theta), dtype=torch.float64)) @ away / 2
    else:
        value = theta.square().sum() / 2 + sum((theta - m) @ H @ (theta - m) / 2 for m, H in moments)
    assert isinstance(value, Tensor)
    (expected,) = torch.autograd.grad(value, theta)
    torch.testing.assert_close(continual.penalty(theta.detach()), value.detach(), **EXACT)
    anchors, base = continual._prior(continual.space)
    found, gradient = QuadraticTerm.of(anchors, base, continual.space, 1).value_and_gradient(theta.detach())
    torch.testing.assert_close(found, value.detach(), **EXACT)
    torch.testing.assert_close(gradient, expected, **EXACT)


def test_kept_terms_are_those_of_the_tasks() -> None:
    model = network()
    continual = Continual(model, "classification", structure="kron")
    for seed in range(3):
        continual.learn(classes(seed), epochs=1, optimizer=adam)
    curvature = continual.memory.curvature
    assert isinstance(curvature, Blocks)
    for block in curvature.blocks:
        assert isinstance(block.curvature, KroneckerSum)
        assert len(block.curvature.parts) == 3
    assert continual.merge_error == 0


def test_the_term_is_divided_by_the_data_points_and_added_to_the_gradient() -> None:
    model = network()
    space = ParamSpace.of(model)
    anchor = Anchor(torch.zeros(space.size, dtype=torch.float64), Diagonal(torch.ones(space.size).double()))
    term = QuadraticTerm.of([anchor], Prior.isotropic(space, 1.0), space, points=4)
    for tensor in model.parameters():
        tensor.grad = torch.ones_like(tensor)
    value, add_gradient = term.at(list(model.parameters()))
    add_gradient(0.5)
    theta = space.values(model)
    torch.testing.assert_close(value, theta.square().sum() / 4, **EXACT)
    found = space.ravel({name: tensor.grad for name, tensor in model.named_parameters() if tensor.grad is not None})
    torch.testing.assert_close(found, 1 + 0.5 * 2 * theta / 4, **EXACT)
