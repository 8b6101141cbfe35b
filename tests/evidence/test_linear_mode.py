"""Prior, noise and linear mode found together: a stationary point of the evidence, and the same by both methods."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linearised
from lapwing import estimate
from lapwing.errors import CurvatureError, LapwingWarning, OptionError
from lapwing.evidence import EvidenceAtMode, GaussianFit, LinearisedData, em, gradient, linear_mode, mackay
from lapwing.laplace import BaseLaplace, Laplace
from lapwing.priors import Prior
from linearised import DOUBLE, Dense
from unchanged import unchanged


def fitted(likelihood: str = "regression", structure: str = "full", **options: Any) -> tuple[BaseLaplace, Any]:
    x, y = linearised.data(likelihood, points=30, outputs=2 if likelihood != "binary" else 1)
    la = Laplace(linearised.network(2, 3, y.shape[1] if y.dim() > 1 else 2), likelihood, "all", structure, **options)
    la.fit([(x, y)])
    return la, [(x, y)]


def by_structure(la: BaseLaplace, batches: Any, **options: Any) -> EvidenceAtMode:
    """With conjugate gradients that the posterior's own structure preconditions."""
    tangent = la._tangent
    assert tangent is not None
    data = LinearisedData(tangent, la.distribution, batches, la.has_noise, 3000)
    return EvidenceAtMode.of(la.evidence, data, la.n_data, **options)


def slopes(la: BaseLaplace, noise: bool) -> Tensor:
    """Of the evidence at the mode that was found, in the logarithms of precisions and noise; theta* stays."""
    assert la.tuned is not None
    logs = [la.prior_precision.log().requires_grad_()]
    if noise:
        logs.append(la.sigma_noise.log().requires_grad_())
    value = la.log_marginal_likelihood(*(each.exp() for each in logs), at=la.tuned.mode)
    return torch.cat([each.reshape(-1) for each in torch.autograd.grad(value, logs)])


@pytest.mark.parametrize("prior", ["scalar", "layerwise"])
@pytest.mark.parametrize("method", ["marglik", "em"])
def test_the_joint_point_maximises_the_integral_over_the_weights(method: str, prior: str) -> None:
    """log p(y) of the linear model as one Gaussian of all targets, differentiated with theta integrated out."""
    la, batches = fitted()
    with unchanged(la.model):
        la.optimize_prior_precision(
            method=method, prior_structure=prior, at="linear_mode", train_loader=batches, optimize_sigma_noise=True
        )
    dense = Dense.of(la, *batches[0])
    logs = torch.cat([la.prior_precision, la.sigma_noise.reshape(1)]).log().requires_grad_()
    groups = torch.zeros(la.n_params, dtype=torch.long) if prior == "scalar" else la.space.groups("tensor")
    value = dense.marginal(logs[:-1].exp()[groups], logs[-1].exp())
    (slope,) = torch.autograd.grad(value, logs)
    assert float(slope.abs().max()) < 1e-4
    assert la.tuned is not None
    mode = la.tuned.mode
    assert mode is not None
    assert mode.converged
    assert mode.passes <= 10
    torch.testing.assert_close(mode.log_marginal, value.detach(), rtol=1e-8, atol=0)
    assert float(dense.gradient(mode.weights).norm()) < 1e-8 * mode.scale
    assert float(slopes(la, noise=True).abs().max()) < 1e-4


@pytest.mark.parametrize(
    ("likelihood", "structure"),
    [("regression", "kron"), ("regression", "diag"), ("classification", "kron"), ("binary", "gp"), ("poisson", "diag")],
)
def test_both_methods_meet_at_a_stationary_point(likelihood: str, structure: str) -> None:
    la, batches = fitted(likelihood, structure)
    noise, found = likelihood == "regression", []
    for method in ("marglik", "em"):
        la.optimize_prior_precision(
            method=method, at="linear_mode", train_loader=batches, optimize_sigma_noise=noise, init_prior_prec=2.0
        )
        assert float(slopes(la, noise).abs().max()) < 1e-3
        mode = la.tuned.mode  # pyright: ignore[reportOptionalMemberAccess]
        assert float(Dense.of(la, *batches[0]).gradient(mode.weights).norm()) < 1e-8 * mode.scale
        found.append(torch.cat([la.prior_precision, la.sigma_noise.reshape(1)]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=0)


def test_conjugate_gradients_and_the_exact_solve_find_the_same_prior() -> None:
    la, batches = fitted("regression", "kron")
    exact = estimate.full(la._tangent, la.distribution, batches)
    own, other = by_structure(la, batches), by_structure(la, batches, solver=exact, exact=True)
    found, expected = (gradient(each, la.prior) for each in (own, other))
    torch.testing.assert_close(found.prior.precisions, expected.prior.precisions, rtol=1e-5, atol=0)
    torch.testing.assert_close(found.sigma, expected.sigma, rtol=1e-5, atol=0)
    assert own.data.passes > 10
    assert other.data.passes == 1
    assert other.mode(expected.prior, expected.sigma).passes == 2


@pytest.mark.filterwarnings("ignore:(em|gradient) had not come to rest")
@pytest.mark.parametrize("method", ["marglik", "em"])
def test_a_search_that_runs_out_of_passes_ends_and_says_so(method: str) -> None:
    la, batches = fitted("classification", "diag")
    with pytest.warns(LapwingWarning, match="linear mode was not found"):
        la.optimize_prior_precision(method=method, at="linear_mode", train_loader=batches, max_passes=5)
    mode = la.tuned.mode  # pyright: ignore[reportOptionalMemberAccess]
    assert mode.passes <= 5
    assert not mode.converged
    assert not la.tuned.converged, "nor is the search at rest, whose mode is stale"  # pyright: ignore[reportOptionalMemberAccess]
    assert bool(torch.isfinite(la.prior_precision).all())


@pytest.mark.long
def test_steps_far_from_the_mode_are_not_worth_a_close_solve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Newton's method then finds the same theta* in fewer passes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 30, bias=False), nn.BatchNorm1d(30), nn.ReLU(), nn.Linear(30, 3)).double()
    x, y = torch.randn(60, 4, dtype=DOUBLE), torch.arange(60) % 3
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(100):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    la = Laplace(model, "classification", "all", "kron")
    la.fit([(x, y)])
    found = {}
    for forced in (linear_mode.FORCED, 0.1):
        monkeypatch.setattr(linear_mode, "FORCED", forced)
        found[forced] = la.linear_mode([(x, y)], solver="structure")
    fewer, more = found.values()
    assert fewer.converged
    torch.testing.assert_close(fewer.weights, more.weights, rtol=1e-5, atol=1e-5)
    assert fewer.passes < more.passes


def test_batch_norm_misleads_the_evidence_at_the_trained_weights() -> None:
    """The mechanism of claim C20: normalised weights have any scale, and a large one asks for a small precision."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 20, bias=False), nn.BatchNorm1d(20), nn.Tanh(), nn.Linear(20, 1)).double()
    x = torch.linspace(-2, 2, 40, dtype=DOUBLE).unsqueeze(1)
    y = torch.sin(2 * x) + 0.1 * torch.randn(40, 1, dtype=DOUBLE)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(150):
        optimiser.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimiser.step()
    with torch.no_grad():
        model[0].weight.mul_(30)
        model[1].running_mean.mul_(30)
        model[1].running_var.mul_(900)  # the same function
    model.train()
    la = Laplace(model, "regression", "all", "full", sigma_noise=0.1)
    la.fit([(x, y)])
    found = {}
    for at, loader in (("trained", None), ("linear_mode", [(x, y)])):
        with unchanged(model):
            la.optimize_prior_precision(at=at, train_loader=loader)
        found[at] = float(la.prior_precision)
    assert found["trained"] < found["linear_mode"] / 50
    assert la.tuned is not None
    assert la.tuned.mode is not None
    assert float(la.tuned.mode.weights.norm()) < float(la.mean.norm()) / 5


# -- em ----------------------------------------------------------------------------------------------------------------


def test_mackay_is_em() -> None:
    assert mackay is em
    la, _ = fitted()
    found = []
    for method in ("em", "mackay", "marglik"):
        la.optimize_prior_precision(method=method, prior_structure="layerwise")
        found.append(la.prior_precision)
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], found[2], rtol=1e-4, atol=0)


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_gamma_from_draws_is_within_its_standard_error(structure: str) -> None:
    la, _ = fitted(structure=structure, sigma_noise=0.4)
    prior = Prior.grouped(la.space, la.space.groups("tensor"), [0.5, 2.0, 1.0, 3.0])
    exact = la.evidence.effective_parameters(prior, 0.4, 1.3)
    found, error = la.evidence.sampled_effective_parameters(
        prior, 0.4, 1.3, samples=400, generator=torch.Generator().manual_seed(1)
    )
    assert bool(((found - exact).abs() < 4 * error).all())
    assert bool((error < 0.3 * exact).all())
    more = la.evidence.sampled_effective_parameters(
        prior, 0.4, 1.3, samples=6400, generator=torch.Generator().manual_seed(1)
    )[1]
    torch.testing.assert_close(more, error / 4, rtol=0.2, atol=0)
    with pytest.raises(CurvatureError, match="at least 2"):
        la.evidence.sampled_effective_parameters(prior, samples=1)


@pytest.mark.parametrize("at", ["trained", "linear_mode"])
def test_em_by_draws_ends_near_em_by_traces_and_states_its_error(at: str) -> None:
    la, batches = fitted(sigma_noise=0.3)
    loader = {"at": at, "train_loader": batches if at == "linear_mode" else None}
    la.optimize_prior_precision(method="em", **loader)
    exact = la.prior_precision
    assert la.tuned is not None
    assert la.tuned.error is None
    draws = {"traces": "samples", "n_samples": 1000}
    la.optimize_prior_precision(method="em", generator=torch.Generator().manual_seed(3), **draws, **loader)
    assert la.tuned.error is not None
    assert 0 < float(la.tuned.error) < 0.05
    assert abs(float((la.prior_precision / exact).log())) < 4 * float(la.tuned.error)
    first = la.prior_precision
    la.optimize_prior_precision(method="em", generator=torch.Generator().manual_seed(3), **draws, **loader)
    assert torch.equal(la.prior_precision, first)


def test_a_group_that_the_data_do_not_know_keeps_its_precision() -> None:
    """At the linear mode it is at its mean, and gamma is zero: 0 / 0."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    with torch.no_grad():
        model[2].weight.zero_()  # the first layer has no effect
    x, y = linearised.data("regression", outputs=1)
    la = Laplace(model, "regression", "all", "full")
    la.fit([(x, y)])
    la.optimize_prior_precision(
        method="em", prior_structure="layerwise", init_prior_prec=3.0, at="linear_mode", train_loader=[(x, y)]
    )
    torch.testing.assert_close(la.prior_precision[:2], torch.tensor([3.0, 3.0], dtype=DOUBLE), rtol=1e-6, atol=0)
    assert bool(torch.isfinite(la.prior_precision).all())


def test_more_effective_parameters_than_targets_are_passed_through() -> None:
    """A diagonal counts correlated weights twice: the first prior has a gamma beyond the number of targets."""
    la, _ = fitted(structure="diag", sigma_noise=0.02, prior_precision=1e-3)
    x, y = linearised.data("regression", points=8)
    la.fit([(x, y)])
    assert float(la.effective_parameters().sum()) > 16
    la.optimize_prior_precision(method="em", init_prior_prec=1e-3, optimize_sigma_noise=True)
    em_found = torch.cat([la.prior_precision, la.sigma_noise.reshape(1)])
    la.optimize_prior_precision(method="marglik", optimize_sigma_noise=True)
    torch.testing.assert_close(em_found, torch.cat([la.prior_precision, la.sigma_noise.reshape(1)]), rtol=1e-3, atol=0)


# -- float32, and noise-free targets -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["marglik", "em"])
@pytest.mark.parametrize(("likelihood", "structure"), [("regression", "kron"), ("classification", "full")])
def test_float32_ends_where_float64_does(likelihood: str, structure: str, method: str) -> None:
    found = []
    for dtype in (torch.float64, torch.float32):
        x, y = linearised.data(likelihood, points=30)
        y = y.to(dtype) if y.is_floating_point() else y
        la = Laplace(linearised.network(2, 3, 2).to(dtype), likelihood, "all", structure)
        la.fit([(x.to(dtype), y)])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            noise = likelihood == "regression"
            loader = [(x.to(dtype), y)]
            la.optimize_prior_precision(
                method=method, at="linear_mode", train_loader=loader, optimize_sigma_noise=noise
            )
        assert la.tuned is not None
        assert la.tuned.rounds < 100
        found.append(torch.cat([la.prior_precision, la.sigma_noise.reshape(1)]).double())
    torch.testing.assert_close(found[0], found[1], rtol=0.02, atol=0)


@pytest.mark.parametrize("method", ["marglik", "em"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_free_targets_end_at_a_bound(dtype: torch.dtype, method: str) -> None:
    model = linearised.network(2, 6, 1).to(dtype)
    x = torch.randn(30, 2, dtype=dtype, generator=torch.Generator().manual_seed(0))
    la = Laplace(model, "regression", "all", "full")
    la.fit([(x, model(x).detach())])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LapwingWarning)  # noise this small leaves little to solve with
        la.optimize_prior_precision(
            method=method,
            at="linear_mode",
            train_loader=[(x, model(x).detach())],
            optimize_sigma_noise=True,
            max_passes=30,
        )
    assert isinstance(la.fitted.fit, GaussianFit)
    assert 0 < float(la.sigma_noise) < 1e-2
    mean, variance = la(x)
    assert bool(torch.isfinite(mean).all())
    assert bool((variance >= 0).all())
    assert bool(torch.isfinite(la.log_marginal_likelihood()))


# -- options -----------------------------------------------------------------------------------------------------------


def test_options_that_do_not_go_together_are_refused() -> None:
    la, batches = fitted()
    with pytest.raises(OptionError, match="has no train_loader"):
        la.optimize_prior_precision(at="linear_mode")
    with pytest.raises(OptionError, match="train_loader was given with at='trained'"):
        la.optimize_prior_precision(train_loader=batches)
    for method in ("adam", "gridsearch"):
        with pytest.raises(OptionError, match=f"at='linear_mode' with method='{method}'"):
            la.optimize_prior_precision(method=method, at="linear_mode", train_loader=batches, val_loader=batches)
    with pytest.raises(OptionError, match=r"unknown at 'mode'; .*linear_mode"):
        la.optimize_prior_precision(at="mode")
    with pytest.raises(OptionError, match="traces='samples' with method='marglik'"):
        la.optimize_prior_precision(traces="samples")
    with pytest.raises(OptionError, match="max_passes is 1"):
        la.optimize_prior_precision(at="linear_mode", train_loader=batches, max_passes=1)
    assert la.tuned is None


def test_what_was_found_is_forgotten_by_the_next_fit() -> None:
    la, batches = fitted()
    before = la.prior_precision
    la.optimize_prior_precision()
    assert la.tuned is not None
    assert la.tuned.mode is None
    assert torch.equal(la.tuned.prior.precisions, la.prior_precision)
    assert not torch.equal(before, la.prior_precision)
    la.fit(batches)
    assert la.tuned is None
