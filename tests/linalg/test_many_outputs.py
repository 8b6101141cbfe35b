"""Outputs that do not fit the budget together are taken a few at a time; draws go forward where outputs are many."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lapwing import estimate
from lapwing.likelihoods import Categorical, Gaussian
from lapwing.linalg import Curvature
from lapwing.linalg.budget import MemoryBudget, within
from lapwing.linalg.contracts import Precision
from lapwing.linalg.rows import push
from lapwing.tangent import FeatureTangent, Tangent
from memory import Largest

SMALL = 40_000
"""Bytes, for which one input of the networks below has too many outputs."""


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12 * float(expected.detach().abs().max() + 1e-30))


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 2, 3, padding=1)).double()


X = torch.randn(3, 1, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
"""40 outputs each."""
Y = torch.randn(3, 2, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def curvature(name: str, tangent: Any) -> Curvature:
    options = {"rank": 30} if name == "low_rank" else {}
    return getattr(estimate, name)(tangent, Gaussian(), [(X, Y)], **options)


@pytest.mark.parametrize("name", ["full", "kflr", "ekfac", "diagonal", "dual", "low_rank"])
def test_variances_in_parts_are_those_of_all_outputs_at_once(name: str) -> None:
    model = convolutional()
    found, precisions = curvature(name, Tangent(model)), torch.tensor([0.3, 4.0], dtype=torch.float64)
    whole, few = Tangent(model).at(X), Tangent(model, budget=SMALL).at(X)
    assert [len(list(part.columns())) for part in few.parts()] != [1, 1, 1], "outputs are taken apart"
    assert len(list(whole.columns())) == 1
    precision = found.with_prior(0.7)
    close(precision.variances(few), precision.covariance(whole).diagonal(dim1=1, dim2=2))
    close(found.variances(few, precisions), found.variances(whole, precisions))


@pytest.mark.parametrize("name", ["full", "kflr", "diagonal"])
@pytest.mark.parametrize("draws", [39, 40])
def test_draws_are_those_of_the_weights(name: str, draws: int) -> None:
    """39 draws go forward one by one, 40 share the rows of the 40 outputs."""
    model = convolutional()
    precision, linear = curvature(name, Tangent(model)).with_prior(0.7), Tangent(model).at(X)
    found = precision.functional_draws(linear, draws, torch.Generator().manual_seed(5))
    deltas = precision.draw(draws, torch.Generator().manual_seed(5))
    close(found, torch.einsum("b c p, n p -> n b c", linear.rows(), deltas))


def test_few_draws_of_many_outputs_can_be_differentiated_in_the_inputs() -> None:
    model, x = convolutional(), X.clone().requires_grad_()
    precision = curvature("diagonal", Tangent(model)).with_prior(0.7)
    linear = Tangent(model, differentiable=True).at(x)
    found = precision.functional_draws(linear, 3, torch.Generator().manual_seed(5))
    deltas = precision.draw(3, torch.Generator().manual_seed(5))
    expected = torch.stack([linear.mv(delta).flatten(1) for delta in deltas])
    close(found.detach(), expected.detach())
    (ours,) = torch.autograd.grad(found.square().sum(), x, retain_graph=True)
    (theirs,) = torch.autograd.grad(expected.square().sum(), x)
    close(ours, theirs)


def test_draws_that_do_not_fit_are_made_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = convolutional()
    precision, linear = curvature("diagonal", Tangent(model)).with_prior(0.7), Tangent(model).at(X)
    asked, draw = [], type(precision).draw

    def counted(self: Precision, n: int, generator: torch.Generator | None = None) -> Tensor:
        asked.append(n)
        return draw(self, n, generator)

    monkeypatch.setattr(type(precision), "draw", counted)
    with within(MemoryBudget(3 * 2 * 8 * precision.size)):
        found = precision.functional_draws(linear, 8, torch.Generator().manual_seed(5))
    assert asked == [3, 3, 2]
    generator = torch.Generator().manual_seed(5)
    deltas = torch.cat([draw(precision, n, generator) for n in asked])
    close(found, push(linear.pieces(), deltas, 2**28))


def test_a_last_layer_at_many_positions() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5)).double()
    x, y = torch.randn(2, 6, 3, dtype=torch.float64), torch.randint(0, 5, (2, 6))
    likelihood = Categorical(class_axis=-1)
    whole = FeatureTangent(model, "2")
    few = FeatureTangent(model, "2", budget=2000)
    precision = estimate.last_layer.kron(whole, likelihood, [(x, y)]).with_prior(0.7)
    assert max(len(list(part.columns())) for part in few.at(x).parts()) > 1
    close(precision.variances(few.at(x)), precision.covariance(whole.at(x)).diagonal(dim1=1, dim2=2))


def test_no_matrix_of_all_outputs_against_each_other_is_formed() -> None:
    """2048 outputs: their covariances would be 4 million numbers, their cotangents at once 100 million."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1))
    x, y = torch.randn(1, 1, 32, 32), torch.randn(1, 2, 32, 32)
    precision = estimate.kfac(Tangent(model), Gaussian(), [(x, y)], generator=torch.Generator()).with_prior(1.0)
    with Largest() as largest:
        precision.functional_draws(Tangent(model).at(x), 10)
    assert largest.numel < 200_000, largest.where
    with Largest() as largest:
        precision.variances(Tangent(model, budget=2**22).at(x))
    assert largest.numel < 2_000_000, largest.where


def test_rows_that_are_spelled_out_meet_others_in_factored_form() -> None:
    """A low-rank curvature: products with an input's rows, and their derivatives, as of columns spelled out."""
    model = convolutional()
    found, linear = curvature("low_rank", Tangent(model)), Tangent(model).at(X)
    assert found.dual.rows.spelled_out
    assert not curvature("dual", Tangent(model)).rows.spelled_out
    prior = torch.linspace(0.5, 2, found.size, dtype=torch.float64, requires_grad=True)
    J, R = linear.rows(), found.vectors * found.values.sqrt()
    for delta in (prior, prior[0]):
        variances = found.with_prior(delta).variances(linear)
        dense = torch.linalg.inv(R @ R.mT + (delta * torch.ones_like(prior)).diag())
        expected = torch.einsum("b c p, p q, b c q -> b c", J, dense, J)
        close(variances, expected)
        (ours,) = torch.autograd.grad(variances.square().sum(), prior, retain_graph=True)
        (theirs,) = torch.autograd.grad(expected.square().sum(), prior, retain_graph=True)
        close(ours, theirs)


def test_low_rank_predictions_spell_out_no_rows() -> None:
    """64 inputs with ten outputs: 640 rows of 8,000 weights would be five million numbers, once for every part."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(60, 100), nn.Tanh(), nn.Linear(100, 10))
    x, y = torch.randn(64, 60), torch.randint(0, 10, (64,))
    precision = estimate.low_rank(Tangent(model), Categorical(), [(x, y)], rank=5).with_prior(1.0)
    with Largest() as largest:
        precision.variances(Tangent(model).at(x))
    assert largest.numel < 200_000, largest.where
