"""Where a search by the evidence has no optimum inside, or numbers too coarse to see it: it ends, finite and said."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from math import log
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing import evidence
from lapwing.errors import CurvatureError, LapwingWarning
from lapwing.evidence import GaussianFit, tuners
from lapwing.evidence.tuners import Limits, em, gradient, updates
from lapwing.laplace import BaseLaplace, Laplace

DTYPES = (torch.float32, torch.float64)


def fitted(dtype: torch.dtype, noise: float = 0.0, structure: str = "full", width: int = 0) -> BaseLaplace:
    """A regression whose targets are the network's own outputs, and some noise."""
    torch.manual_seed(0)
    layers = [nn.Linear(2, 1)] if not width else [nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 1)]
    model = nn.Sequential(*layers).to(dtype)
    x = torch.randn(60, 2, dtype=dtype)
    with torch.no_grad():
        y = model(x) + noise * torch.randn(60, 1, dtype=dtype)
    la = Laplace(model, "regression", "all", structure)
    la.fit([(x, y)])
    return la


@pytest.mark.parametrize("structure", ["full", "kron", "diag", "gp"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", ["marglik", "adam", "mackay"])
def test_noise_free_targets_end_at_a_bound(method: str, dtype: torch.dtype, structure: str) -> None:
    if (method, structure) == ("mackay", "gp"):
        pytest.skip("gamma of a dual form is not known to 1e-3 at noise this small: it warns that it found no rest")
    la = fitted(dtype, structure=structure)
    la.optimize_prior_precision(method=method, optimize_sigma_noise=True)
    assert isinstance(la.fitted.fit, GaussianFit)
    lowest, highest = la.fitted.fit.noise_range()
    assert lowest <= float(la.sigma_noise) <= highest
    if method != "adam":  # which takes a hundred steps of a tenth and no more
        assert float(la.sigma_noise) < 10 * torch.finfo(torch.float32).eps
    mean, variance = la(torch.ones(1, 2, dtype=dtype))
    assert bool(torch.isfinite(mean).all())
    assert bool((variance >= 0).all())
    assert bool(torch.isfinite(la.log_marginal_likelihood()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_attach_takes_noise_free_targets(dtype: torch.dtype) -> None:
    model = nn.Linear(2, 1).to(dtype)
    x = torch.randn(40, 2, dtype=dtype, generator=torch.Generator().manual_seed(0))
    la = lapwing.attach(model, [(x, model(x).detach())], "regression")
    assert 0 < float(la.sigma_noise) < 1e-5


@pytest.mark.parametrize(("method", "noise"), [("marglik", 1e-6), ("marglik", 1e3), ("mackay", 1e-6), ("mackay", 1e-3)])
def test_noise_far_from_the_start_is_found(method: str, noise: float) -> None:
    la = fitted(torch.float64, noise)
    la.optimize_prior_precision(method=method, optimize_sigma_noise=True)
    fit = la.fitted.fit
    assert isinstance(fit, GaussianFit)
    level = (fit.squares / (fit.targets - la.effective_parameters().sum())).sqrt()
    torch.testing.assert_close(la.sigma_noise, level, rtol=1e-4, atol=0)


def test_weights_that_use_nearly_all_targets_leave_the_rest_to_the_noise() -> None:
    """19 weights and 20 targets: fewer than one target in ten is left, and sigma^2 = SSE / (N - gamma) all the same."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 18, generator=generator, dtype=torch.float64)
    y = 3 * x.sum(1, keepdim=True) + 0.1 * torch.randn(20, 1, generator=generator, dtype=torch.float64)
    model = nn.Linear(18, 1).double()
    best = torch.linalg.lstsq(torch.cat([x, torch.ones(20, 1).double()], 1), y).solution
    with torch.no_grad():
        model.weight.copy_(best[:-1].T)
        model.bias.copy_(best[-1])
    la = Laplace(model, "regression", "all", "full")
    la.fit([(x, y)])
    la.optimize_prior_precision(method="mackay", optimize_sigma_noise=True)
    fit, gamma = la.fitted.fit, float(la.effective_parameters().sum())
    assert isinstance(fit, GaussianFit)
    assert 18.5 < gamma < 19
    torch.testing.assert_close(float(la.sigma_noise), float(fit.squares / (20 - gamma)) ** 0.5, rtol=1e-4, atol=0)


@pytest.mark.parametrize("seed", range(12))
def test_all_targets_zero(seed: int) -> None:
    """Residuals without a scale: the bound is that of the dtype. From some inputs one search ends at a kink."""
    model = nn.Linear(2, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    la = Laplace(model, "regression", "all", "full")
    la.fit([(torch.randn(20, 2, generator=torch.Generator().manual_seed(seed)), torch.zeros(20, 1))])
    la.optimize_prior_precision(optimize_sigma_noise=True)
    torch.testing.assert_close(float(la.sigma_noise), torch.finfo(torch.float32).tiny ** 0.2, rtol=1e-3, atol=0)
    torch.testing.assert_close(float(la.prior_precision), evidence.tuners.HIGHEST, rtol=1e-3, atol=0)


@pytest.mark.parametrize("fixed_noise", [True, False])
@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
@pytest.mark.parametrize("width", [3, 20])
def test_mackay_comes_to_rest_in_float32(width: int, structure: str, fixed_noise: bool) -> None:
    la = fitted(torch.float32, 0.3, structure, width)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = evidence.mackay(la.evidence, la.prior, fixed_noise=fixed_noise)
    assert found.converged
    assert found.rounds < 200
    climbed = evidence.gradient(la.evidence, la.prior, fixed_noise=fixed_noise)
    close(found.prior.precisions, climbed.prior.precisions)
    close(found.sigma, climbed.sigma)


@pytest.mark.parametrize("start", [1.0, evidence.tuners.HIGHEST])
@pytest.mark.parametrize("structure", ["kron", "ekfac"])
def test_equal_precisions_of_weight_and_bias_are_left(structure: str, start: float) -> None:
    """The evidence falls by a step where the two part: 13 of 32 searches had stayed where they began."""
    for seed in range(2):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        la = Laplace(model, "classification", "all", structure)
        la.fit([(torch.randn(40, 3).double(), torch.randint(2, (40,)))])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            la.optimize_prior_precision(prior_structure="layerwise", init_prior_prec=start)
        logs = la.prior_precision.log().requires_grad_()
        (slope,) = torch.autograd.grad(la.log_marginal_likelihood(logs.exp()), logs)
        inside = (logs.detach().abs() - log(evidence.tuners.HIGHEST)).abs() > evidence.tuners.NEAR
        assert bool(inside.any())
        assert float((slope * inside).abs().max()) < 1e-4


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=5e-3, atol=0)


@pytest.mark.parametrize("spared", [None, 5])
def test_weights_that_use_all_targets_leave_nothing_to_estimate_the_noise_from(spared: int | None) -> None:
    """A gamma of 20 and more for 20 targets: an error, unless one target in so many is always left."""
    la = fitted(torch.float64, 0.3)
    fit = la.fitted.fit
    assert isinstance(fit, GaussianFit)
    for excess, refused in ((0.0, True), (0.5, True), (-0.5, False)):

        def effective(*args: object, excess: float = excess) -> Tensor:
            return torch.full((1,), fit.targets + excess, dtype=torch.float64)

        options = {"limits": Limits(spared=spared), "effective": effective}
        found = updates(la.evidence, la.prior, **options)
        if refused and spared is None:
            with pytest.raises(CurvatureError, match=f"determine {fit.targets + excess:.1f} parameters with"):
                next(found)
            continue
        left = max(-excess, 0.0 if spared is None else fit.targets / spared)
        torch.testing.assert_close(float(next(found)[1]), (float(fit.squares) / left) ** 0.5, rtol=1e-9, atol=0)


@pytest.mark.parametrize("method", [gradient, em], ids=["gradient", "em"])
def test_a_search_that_has_not_come_to_rest_says_so_where_it_was_called(method: Callable[..., Any]) -> None:
    la = fitted(torch.float64, 0.3)
    name = method.__name__
    with pytest.warns(LapwingWarning, match=f"{name} had not come to rest after 1 rounds") as said:
        found = method(la.evidence, la.prior, rounds=1)
    assert not found.converged
    assert found.rounds == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert method(la.evidence, la.prior, rounds=1000).converged
    assert len(said) == 1


def test_the_steps_that_optimize_prior_precision_allows_bound_em_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    la, allowed = fitted(torch.float64, 0.3), []

    def listening(*arguments: Any, rounds: int, **options: Any) -> Any:
        allowed.append(rounds)
        return em(*arguments, rounds=rounds, **options)

    monkeypatch.setattr(evidence, "em", listening)
    la.optimize_prior_precision(method="em", n_steps=7)
    la.optimize_prior_precision(method="mackay")
    assert allowed == [70, 1000]


def test_a_search_that_ends_below_where_it_began_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates that follow something else than the evidence: here, a prior that grows a thousandfold every time."""
    la = fitted(torch.float64, 0.3)

    def astray(at: Any, prior: Any, level: Tensor, *rest: Any, **options: Any) -> Any:
        options["effective"](at.settled(prior, level), prior, level, 1.0)
        while True:
            prior = prior.with_precisions(prior.precisions * 1e3)
            yield prior, level, prior.entries() + 1.0

    first = float(la.evidence.log_marginal(la.prior, 1.0))
    monkeypatch.setattr(tuners, "updates", astray)
    with pytest.warns(LapwingWarning) as said:
        found = em(la.evidence, la.prior, 1.0, rounds=2)
    texts = [str(each.message) for each in said]
    assert sum(f"had begun at {first:.5g}" in text and "method='marglik'" in text for text in texts) == 1
    assert float(found.log_marginal) < first - 1
