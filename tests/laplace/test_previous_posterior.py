"""A prior that is a previous posterior: structures against dense matrices, evidence, predictions, files, refusals."""

from __future__ import annotations

from itertools import product
from math import log, pi
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing import Laplace, priors
from lapwing.errors import CurvatureError, OptionError, ParameterError
from lapwing.likelihoods import Gaussian
from lapwing.linalg import Diagonal
from lapwing.params import ParamSpace

EXACT: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-11}
COMMON = ("full", "kron", "ekfac", "diag")
PAIRS = [
    *product(COMMON, COMMON),
    ("blocks", "kron"),
    ("diag", "blocks"),
    ("gp", "gp"),
    ("kron", "gp"),
    ("lowrank", "full"),
]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def data(seed: int) -> list[tuple[Tensor, Tensor]]:
    drawn = torch.Generator().manual_seed(seed)
    x = torch.randn(6, 3, generator=drawn, dtype=torch.float64)
    return [(x, torch.randn(6, 2, generator=drawn, dtype=torch.float64))]


def move(model: nn.Module) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_precision_evidence_and_predictions_are_those_of_the_dense_sum(old: str, new: str) -> None:
    model = network()
    before = Laplace(model, Gaussian(0.5), "all", old, prior_precision=0.7)
    before.fit(data(0))
    prior = before.as_prior()
    previous = before.posterior.precision.to_matrix()
    about = ParamSpace.of(model).values(model)
    move(model)
    la = Laplace(model, Gaussian(0.5), "all", new, prior=prior)
    la.fit(data(1))
    theta = ParamSpace.of(model).values(model)
    away = theta - about
    plain = Laplace(model, Gaussian(0.5), "all", new)
    plain.fit(data(1))
    precision = plain.curvature.dense() / 0.25 + previous
    torch.testing.assert_close(la.posterior.precision.to_matrix(), precision, **EXACT)
    (x, y), size = data(1)[0], len(theta)
    residual = y - model(x).detach()
    fit = -y.numel() / 2 * log(2 * pi * 0.25) - residual.square().sum() / 0.5
    of_prior = (torch.logdet(previous) - away @ previous @ away - size * log(2 * pi)) / 2
    evidence = fit + of_prior + size / 2 * log(2 * pi) - torch.logdet(precision) / 2
    torch.testing.assert_close(la.log_marginal_likelihood(), evidence, **EXACT)
    torch.testing.assert_close(la.prior.log_prob(theta), of_prior, **EXACT)
    x = data(2)[0][0]
    rows = torch.stack([_rows(model, point) for point in x])
    mean, covariance = la(x)
    torch.testing.assert_close(mean, model(x).detach(), **EXACT)
    expected = rows @ torch.linalg.inv(precision) @ rows.mT
    torch.testing.assert_close(covariance, expected, **EXACT)


def _rows(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x.unsqueeze(0)).squeeze(0)
    found = [torch.autograd.grad(each, list(model.parameters()), retain_graph=True) for each in out]
    return torch.stack([torch.cat([part.flatten() for part in parts]) for parts in found])


def test_three_posteriors_in_a_row_keep_all_curvatures() -> None:
    model = network()
    la = Laplace(model, Gaussian(), "all", "kron", prior_precision=0.7)
    la.fit(data(0))
    total = la.curvature.dense()
    for seed in (1, 2):
        move(model)
        la = Laplace(model, Gaussian(), "all", "kron", prior=la.as_prior())
        la.fit(data(seed))
        total = total + la.curvature.dense()
    expected = total + 0.7 * torch.eye(len(total), dtype=torch.float64)
    torch.testing.assert_close(la.posterior.precision.to_matrix(), expected, **EXACT)


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
@pytest.mark.parametrize(
    ("subset", "options"), [("last_layer", {}), ("subnetwork", {"subnetwork_indices": torch.arange(16)})]
)
def test_a_part_of_the_weights_has_a_previous_posterior_as_well(
    subset: str, options: dict[str, Any], structure: str, tmp_path: Path
) -> None:
    model = network()
    before = Laplace(model, Gaussian(0.5), subset, structure, prior_precision=0.7, **options)
    before.fit(data(0))
    move(model)
    la = Laplace(model, Gaussian(0.5), subset, structure, prior=before.as_prior(), **options)
    la.fit(data(1))
    plain = Laplace(model, Gaussian(0.5), subset, structure, **options)
    plain.fit(data(1))
    expected = before.posterior.precision.to_matrix() + plain.curvature.dense() / 0.25
    torch.testing.assert_close(la.posterior.precision.to_matrix(), expected, **EXACT)
    la.save(tmp_path / "la.lapwing")
    loaded = lapwing.load(tmp_path / "la.lapwing", network())
    assert torch.equal(loaded.posterior.precision.to_matrix(), la.posterior.precision.to_matrix())


@pytest.mark.parametrize("precision", [1.0, "tensor", "module"])
def test_the_base_keeps_its_groups(precision: float | str) -> None:
    model = network()
    numbers = {"tensor": [1.0, 2.0, 3.0, 4.0], "module": [1.0, 2.0]}
    value = torch.tensor(numbers[precision]) if isinstance(precision, str) else precision
    first = Laplace(model, "regression", "all", "kron", prior_precision=value)
    first.fit(data(0))
    second = Laplace(model, "regression", "all", "kron", prior=first.as_prior())
    torch.testing.assert_close(second.prior_precision_diag, first.prior_precision_diag, **EXACT)
    torch.testing.assert_close(second.mean, first.mean, **EXACT)
    assert not second.n_data


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_files_and_states_keep_the_prior(structure: str, tmp_path: Path) -> None:
    model = network()
    first = Laplace(model, "regression", "all", structure)
    first.fit(data(0))
    la = Laplace(model, "regression", "all", structure, prior=first.as_prior())
    la.fit(data(1))
    la.save(tmp_path / "la.lapwing")
    loaded = lapwing.load(tmp_path / "la.lapwing", network())
    assert torch.equal(loaded.posterior.precision.to_matrix(), la.posterior.precision.to_matrix())
    assert torch.equal(loaded.log_marginal_likelihood(), la.log_marginal_likelihood())
    other = Laplace(model, "regression", "all", structure)
    other.load_state_dict(la.state_dict())
    assert torch.equal(other.posterior.precision.to_matrix(), la.posterior.precision.to_matrix())
    other.load_state_dict(first.state_dict())
    assert not isinstance(other.prior, priors.Gaussian)


def test_what_needs_a_free_prior_is_refused_by_name() -> None:
    model = network()
    la = Laplace(model, "regression", "all", "kron")
    la.fit(data(0))
    la = Laplace(model, "regression", "all", "kron", prior=la.as_prior())
    la.fit(data(1))
    with pytest.raises(OptionError, match="optimize_prior_precision was asked of"):
        la.optimize_prior_precision()
    with pytest.raises(OptionError, match="another prior_precision"):
        la.log_marginal_likelihood(prior_precision=2.0)
    with pytest.raises(OptionError, match="another prior_mean"):
        la.prior_mean = 1.0
    with pytest.raises(OptionError, match="a linear mode"):
        la.linear_mode(data(1))
    with pytest.raises(OptionError, match="a search for the mode"):
        lapwing.to_mode(la, data(1))
    assert la.effective_parameters().shape == (1,)


def test_a_prior_that_does_not_fit_is_refused() -> None:
    model = network()
    la = Laplace(model, "regression", "all", "kron")
    la.fit(data(0))
    prior = la.as_prior()
    with pytest.raises(OptionError, match="Give its as_prior"):
        Laplace(model, "regression", "all", "kron", prior=la)  # pyright: ignore[reportArgumentType]
    with pytest.raises(OptionError, match="prior_precision, prior_mean or prior_groups as well"):
        Laplace(model, "regression", "all", "kron", prior=prior, prior_precision=2.0)
    with pytest.raises(ParameterError, match="over 26 parameters, and this one is over 12"):
        Laplace(nn.Linear(3, 3).double(), "regression", "all", "kron", prior=prior)
    with pytest.raises(ParameterError, match="dtype"):
        Laplace(network().float(), "regression", "all", "kron", prior=prior)
    with pytest.raises(OptionError, match="prior was given"):
        lapwing.marglik_training(model, data(0), "regression", prior=prior)


def test_a_gaussian_is_its_dense_self() -> None:
    torch.manual_seed(0)
    mean, values = torch.randn(3, dtype=torch.float64), torch.rand(3, dtype=torch.float64)
    prior = priors.Gaussian(mean, Diagonal(values), 2.0)
    law = torch.distributions.MultivariateNormal(mean, precision_matrix=torch.diag(values + 2))
    theta = torch.randn(3, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(prior.log_prob(theta), law.log_prob(theta), **EXACT)
    (slope,) = torch.autograd.grad(-law.log_prob(theta), theta)
    torch.testing.assert_close(prior.gradient(theta.detach()), slope, **EXACT)
    torch.testing.assert_close(prior.scatter(mean), torch.zeros((), dtype=torch.float64), **EXACT)


@pytest.mark.parametrize(
    ("mean", "curvature", "base", "words"),
    [
        (torch.zeros(3), Diagonal(torch.ones(2)), 1.0, "expected as many"),
        (torch.zeros(2), Diagonal(torch.ones(2)), -1.0, "finite number >= 0"),
        (torch.tensor([0.0, float("nan")]), Diagonal(torch.ones(2)), 1.0, "NaN"),
        (torch.zeros(2, 2), Diagonal(torch.ones(2)), 1.0, "vector"),
        (torch.zeros(2), torch.ones(2), 1.0, "lapwing.linalg"),
        (torch.zeros(2), Diagonal(torch.ones(2)), "much", "number >= 0"),
    ],
)
def test_a_gaussian_of_nothing_is_refused(mean: Any, curvature: Any, base: Any, words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        priors.Gaussian(mean, curvature, base)


def test_a_vector_is_no_precision_under_a_prior_with_covariances() -> None:
    model = network()
    la = Laplace(model, "regression", "all", "kron")
    la.fit(data(0))
    diagonal = Laplace(model, "regression", "all", "diag", prior=la.as_prior())
    diagonal.fit(data(1))
    with pytest.raises(OptionError, match="no diagonal"):
        _ = diagonal.posterior_precision
    with pytest.raises(CurvatureError, match="1 and 26"):
        lapwing.linalg.total(Diagonal(torch.ones(1)), la.curvature)
