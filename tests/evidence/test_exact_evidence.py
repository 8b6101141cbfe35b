"""The evidence at theta* with the exact curvature is that of a dense Jacobian, whatever structure the posterior has."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linearised
from lapwing.errors import CurvatureError, LapwingWarning, OptionError
from lapwing.evidence import EvidenceAtMode, em, function_space, gradient
from lapwing.evidence.exact_evidence import LEAST
from lapwing.laplace import BaseLaplace, Laplace, linear_modes
from lapwing.laplace.hyper import prior_of
from lapwing.priors import Prior
from linearised import DOUBLE, Dense

Batches = list[tuple[Tensor, Tensor]]
STRUCTURES = ("scalar", "layerwise", "module", "diag", "scale_invariant")


def normalised(structure: str = "kron", dtype: torch.dtype = DOUBLE, **options: Any) -> tuple[BaseLaplace, Batches]:
    """36 outputs of three classes, 121 weights, two of them tensors that a norm makes scale-invariant."""
    torch.manual_seed(2)
    layers = [nn.Conv2d(1, 3, 3, bias=False), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 5, bias=False)]
    model = nn.Sequential(*layers, nn.LayerNorm(5), nn.Linear(5, 3)).double().eval().to(dtype)
    x = torch.randn(12, 1, 4, 4, dtype=DOUBLE, generator=torch.Generator().manual_seed(3))
    y = x.flatten(1)[:, :15].reshape(12, 3, 5).mean(2).argmax(1)
    la = Laplace(model, "classification", "all", structure, **options)
    batches = [(x[:7].to(dtype), y[:7]), (x[7:].to(dtype), y[7:])]
    la.fit(batches)
    return la, batches


def regression(structure: str = "kron", **options: Any) -> tuple[BaseLaplace, Batches]:
    """24 outputs and 77 weights."""
    x, y = linearised.data("regression")
    options.setdefault("sigma_noise", 0.3)
    la = Laplace(linearised.network(2, 15, 2), "regression", "all", structure, **options)
    batches = [(x[:7], y[:7]), (x[7:], y[7:])]
    la.fit(batches)
    return la, batches


def joined(batches: Batches) -> tuple[Tensor, Tensor]:
    xs, ys = zip(*batches, strict=True)
    return torch.cat(xs), torch.cat(ys)


def a_prior(la: BaseLaplace, structure: str, low: float = -1, high: float = 1, mean: float = 0.0) -> Prior:
    sizes = {"scalar": 1, "layerwise": len(la.space.names), "module": len(la.space.layers), "diag": la.n_params}
    groups = la._groups_for(structure)
    size = sizes[structure] if structure in sizes else len(groups or ())
    return prior_of(la.space, torch.logspace(low, high, size, dtype=DOUBLE), torch.tensor(mean, dtype=DOUBLE), groups)


def dense_figures(dense: Dense, prior: Prior, mode: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """log det(w J^T H J + Lambda), gamma of every group, and log Z at the mode: all of it [P, P]."""
    rows, hessian = dense.jacobian, dense.likelihood.hessian(dense.f, dense.y)
    curvature = dense.weight * torch.einsum("n c p, n c d, n d q -> p q", rows, hessian, rows)
    delta = prior.precision().expand(prior.size)
    total = curvature + delta.diag()
    seen = torch.linalg.solve(total, curvature).diagonal()
    dense.precision, dense.mean = delta, torch.as_tensor(prior.mean).expand(prior.size)
    mode = dense.mode() if mode is None else mode
    log_prob = dense.likelihood.log_prob(dense.outputs(mode), dense.y).sum()
    log_z = dense.weight * log_prob - (delta * (mode - dense.mean).square()).sum() / 2
    return total.logdet(), prior.sums(seen), log_z + (delta.log().sum() - total.logdet()) / 2


def at_mode_of(la: BaseLaplace, batches: Batches, **options: Any) -> EvidenceAtMode:
    return la.evidence_at_mode(batches, curvature="exact", tolerance=1e-12, **options)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_it_meets_the_dense_oracle_for_every_structure_of_the_prior(structure: str) -> None:
    la, batches = normalised(temperature=0.8)
    prior = a_prior(la, structure, mean=0.05)
    at_mode = at_mode_of(la, batches)
    logdet, gamma, log_z = dense_figures(Dense.of(la, *joined(batches)), prior)
    assert at_mode.functions is not None
    at_mode.settled(prior, 1.0, 0.8)
    here = at_mode.settled(prior, 1.0, 0.8)  # again from there: the first ends at a loose residual
    torch.testing.assert_close(here.effective_parameters(prior, 1.0, 0.8), gamma, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(here.log_marginal(prior, 1.0, 0.8), log_z, rtol=1e-9, atol=0)
    found, again = at_mode.functions.measured(prior, 1 / 0.8)
    assert found + float(prior.logdet()) == pytest.approx(float(logdet), rel=1e-9)
    assert found == pytest.approx(at_mode.functions.logdet(prior, 1 / 0.8), rel=1e-12)
    torch.testing.assert_close(again, gamma, rtol=1e-9, atol=1e-12)


def test_kernels_that_are_not_kept_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    la, batches = normalised()
    prior = a_prior(la, "layerwise")
    kept = at_mode_of(la, batches).settled(prior).effective_parameters(prior)
    at_mode = at_mode_of(la, batches)
    monkeypatch.setattr(function_space, "KEPT", 11 * 36**2 * 8)
    torch.testing.assert_close(at_mode.settled(prior).effective_parameters(prior), kept, rtol=1e-9, atol=1e-12)
    assert at_mode.functions is not None
    assert not at_mode.functions._kernels


@pytest.mark.parametrize("few", [1, 1024])
@pytest.mark.parametrize("structure", ["kron", "ef_diag", "full"])
def test_of_gaussian_noise_it_is_the_integral_over_the_weights(
    monkeypatch: pytest.MonkeyPatch, few: int, structure: str
) -> None:
    """By kernels among the outputs (few = 1), by a curvature that is formed, or by the posterior's own."""
    monkeypatch.setattr(linear_modes, "FEW", few)
    options = {"estimator": "empirical"} if structure == "ef_diag" else {}
    la, batches = regression(structure.removeprefix("ef_"), **options)
    prior, dense = a_prior(la, "layerwise"), Dense.of(la, *joined(batches))
    at_mode = at_mode_of(la, batches)
    assert (at_mode.functions is not None) == (few == 1 and structure != "full")
    assert at_mode.noise_power == 2
    for sigma in (0.3, 0.5):
        level = torch.tensor(sigma, dtype=DOUBLE)
        expected = dense.marginal(prior.precision(), level)
        torch.testing.assert_close(at_mode.settled(prior, level).log_marginal(prior, level), expected)
        mode = at_mode.mode(prior, level)
        assert mode.exact_log_marginal is not None
        torch.testing.assert_close(mode.exact_log_marginal, expected, rtol=1e-9, atol=0)
        assert "by the exact curvature" in repr(mode)


def test_its_slopes_are_those_of_the_integral(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_modes, "FEW", 1)
    la, batches = regression()
    dense, at_mode, start = Dense.of(la, *joined(batches)), at_mode_of(la, batches), a_prior(la, "layerwise")
    free = torch.cat([start.precisions, torch.tensor([0.4], dtype=DOUBLE)]).log().requires_grad_()
    prior, sigma = start.with_precisions(free[:-1].exp()), free[-1].exp()
    at_mode.settled(prior, sigma.detach())
    here = at_mode.settled(prior, sigma.detach())  # again from there: the first ends at a loose residual
    found = torch.autograd.grad(here.log_marginal(prior, sigma), free, retain_graph=True)[0]
    expected = torch.autograd.grad(dense.marginal(prior.precision(), sigma), free, retain_graph=True)[0]
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)
    value = here.log_marginal(prior, sigma)
    with pytest.raises(CurvatureError, match="first derivatives alone"):
        torch.autograd.grad(value, free, create_graph=True)


def exact_slopes(la: BaseLaplace, batches: Batches, prior: Prior) -> Tensor:
    """Of the dense oracle's log Z in the logarithms of the precisions, at a theta* of its own, which is an optimum."""
    dense, logs = Dense.of(la, *joined(batches)), prior.precisions.log().requires_grad_()
    trial = prior.with_precisions(logs.exp())
    dense.precision, dense.mean = prior.precision().expand(prior.size), torch.as_tensor(prior.mean).expand(prior.size)
    return torch.autograd.grad(dense_figures(dense, trial, dense.mode())[2], logs)[0]


@pytest.mark.parametrize("structure", ["scalar", "scale_invariant"])
def test_em_ends_where_the_exact_evidence_has_no_slope(structure: str) -> None:
    la, batches = normalised()
    start = a_prior(la, structure, 0, 0)
    at_mode = at_mode_of(la, batches)
    tuned = em(at_mode, start, tolerance=1e-6)
    assert tuned.converged
    assert tuned.pruned is not None
    slopes = exact_slopes(la, batches, tuned.prior)
    held = slopes.masked_fill(tuned.pruned, 0.0)
    assert float(held.abs().max()) < 1e-5
    assert bool(((slopes >= 0) & (slopes < LEAST))[tuned.pruned].all())
    by_gradient = gradient(at_mode, start)
    assert by_gradient.converged
    torch.testing.assert_close(by_gradient.log_marginal, tuned.log_marginal, rtol=0, atol=2 * LEAST)
    if structure == "scalar":
        torch.testing.assert_close(by_gradient.prior.precisions, tuned.prior.precisions, rtol=1e-3, atol=0)
        by_structure = em(la.evidence_at_mode(batches), start, tolerance=1e-3)
        assert float((by_structure.prior.precisions / tuned.prior.precisions).log().abs()) > 0.01


@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32])
def test_a_group_that_the_evidence_would_rather_not_have_ends_at_a_bound(dtype: torch.dtype) -> None:
    """Labels that have nothing to do with the inputs: of most groups, the less the better."""
    la, batches = normalised(dtype=dtype)
    batches = [(x, (torch.arange(len(y)) + number) % 3) for number, (x, y) in enumerate(batches)]
    la.fit(batches)
    at_mode = la.evidence_at_mode(batches, curvature="exact")
    start = prior_of(la.space, torch.ones(len(la.space.names), dtype=dtype), torch.zeros((), dtype=dtype), None)
    with warnings.catch_warnings():
        warnings.simplefilter("error", LapwingWarning)
        tuned = em(at_mode, start, rounds=300)
    assert tuned.pruned is not None
    assert bool(tuned.pruned.any())
    assert bool(torch.isfinite(tuned.prior.precisions).all())
    assert bool(torch.isfinite(tuned.log_marginal))
    gamma = at_mode.settled(tuned.prior).effective_parameters(tuned.prior)
    assert bool((gamma[tuned.pruned] < LEAST).all())
    further = torch.where(tuned.pruned, 10 * tuned.prior.precisions, tuned.prior.precisions)
    prior = tuned.prior.with_precisions(further)
    gained = at_mode.settled(prior).log_marginal(prior) - tuned.log_marginal
    assert float(gained) < LEAST * len(gamma)


def test_the_public_face_takes_it() -> None:
    la, batches = normalised()
    la.optimize_prior_precision(
        method="em", at="linear_mode", train_loader=batches, prior_structure="scale_invariant", curvature="exact"
    )
    assert la.tuned is not None
    assert la.tuned.mode is not None
    assert la.tuned.pruned is not None
    gamma = dense_figures(Dense.of(la, *joined(batches)), la.tuned.prior, la.tuned.mode.weights)[1]
    squares = la.tuned.prior.sums(la.tuned.mode.weights.square())
    at_rest = (gamma / squares / la.prior_precision).log().abs() < 1e-5
    assert bool((at_rest | la.tuned.pruned).all())
    mode = la.tuned.mode
    assert mode.exact_log_marginal is not None
    torch.testing.assert_close(mode.exact_log_marginal, la.tuned.log_marginal, rtol=1e-6, atol=0)
    torch.testing.assert_close(la.log_marginal_likelihood(at=mode), mode.log_marginal)
    assert float((mode.log_marginal - mode.exact_log_marginal).abs()) > 0.01
    la(batches[0][0], at=mode)


def test_what_cannot_be_exact_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    la, batches = normalised()
    with pytest.raises(OptionError, match=r"curvature='exact' with at='trained'.*expected at='linear_mode'"):
        la.optimize_prior_precision(curvature="exact")
    options: dict[str, Any] = {"at": "linear_mode", "train_loader": batches, "method": "em"}
    with pytest.raises(OptionError, match=r"traces='samples' with curvature='exact'"):
        la.optimize_prior_precision(curvature="exact", traces="samples", **options)
    with pytest.raises(OptionError, match="unknown curvature"):
        la.optimize_prior_precision(curvature="dense", **options)
    with pytest.raises(OptionError, match=r"curvature='exact' with solver='structure' for 36 outputs .* 121 weights"):
        la.evidence_at_mode(batches, curvature="exact", solver="structure")
    at_mode = la.evidence_at_mode(batches, curvature="exact")
    with pytest.raises(CurvatureError, match=r"samples were given .* exact traces"):
        em(at_mode, a_prior(la, "scalar"), samples=10)
    with pytest.raises(CurvatureError, match="neither kernels"):
        EvidenceAtMode.of(la.evidence, at_mode.data, 12, exactly=True)
    monkeypatch.setattr(function_space, "OUTPUTS", 35)
    with pytest.raises(OptionError, match=r"curvature='exact' for 36 outputs .* Use curvature='structure'"):
        la.evidence_at_mode(batches, curvature="exact")
