"""hessian_structure="matrix_free": the full posterior without its matrix, within the errors that it states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oracle
import problems
from lapwing import Laplace, estimate
from lapwing.errors import CurvatureError, DataError, LapwingWarning, OptionError, StorageError
from lapwing.estimate import data_products
from lapwing.estimate.cotangents import empirical
from lapwing.laplace import BaseLaplace
from lapwing.likelihoods import Categorical, Poisson
from lapwing.linalg import MatrixFree
from lapwing.linalg.matrix_free import MatrixFreePrecision
from lapwing.params import ParamSpace
from lapwing.tangent import Tangent
from unchanged import unchanged

TIGHT: dict[str, Any] = {"tolerance": 1e-12, "probes": 31, "steps": 34}
"""Solved to rounding, with as many probes as there are parameters: nothing is random."""


def close(a: Tensor, b: Tensor, rtol: float = 1e-9) -> None:
    torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * float(b.abs().max()))


def net(outputs: int = 3, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).to(dtype)


def data(task: str, n: int = 24, dtype: torch.dtype = torch.float64, cut: int = 24) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(n, 3, generator=g, dtype=torch.float64).to(dtype)
    y = {
        "classification": torch.randint(3, (n,), generator=g),
        "regression": torch.randn(n, 3, generator=g, dtype=torch.float64).to(dtype),
        "poisson": torch.poisson(torch.full((n, 3), 2.0), generator=g).to(dtype),
    }[task]
    return [(x[:cut], y[:cut]), (x[cut:], y[cut:])] if cut < n else [(x, y)]


def made(task: str, structure: str = "matrix_free", dtype: torch.dtype = torch.float64, **options: Any) -> BaseLaplace:
    la = Laplace(net(dtype=dtype), task, "all", structure, **options)
    with unchanged(la.model):
        la.fit(data(task, dtype=dtype))
    return la


def precision_of(la: BaseLaplace) -> MatrixFreePrecision:
    found = la.posterior.precision
    assert isinstance(found, MatrixFreePrecision)
    return found


# -- products ----------------------------------------------------------------------------------------------------------

ZOO = ["mlp", "mlp_gaussian", "conv2d", "lstm", "custom_function", "weight_norm", "mha_self", "sequence_categorical"]
ZOO += ["image_gaussian", "embedding", "selected_by_name"]


@pytest.mark.parametrize("name", ZOO)
def test_products_are_those_of_the_dense_matrix(name: str) -> None:
    """One at a time by Jacobian products, and many at a time by rows; any network."""
    problem = problems.build(name)
    tangent = Tangent(problem.model, problem.space)
    with unchanged(problem.model):
        found = estimate.matrix_free(tangent, problem.likelihood, problem.batches, preconditioner="none")
        dense = estimate.full(tangent, problem.likelihood, problem.batches).dense()
        v = torch.randn(4, found.size, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        close(found.mv(v), v @ dense)
        close(found.mv(v[0]), v[0] @ dense)
        close(found.dense(), dense)
        close(found.diagonal(), dense.diagonal())
    if problem.select is None:
        rows = oracle.jacobian(problem.model, problem.x)
        outer = oracle.output_hessian(problem.likelihood, problems.call_detached(problem.model, problem.x), problem.y)
        close(dense, torch.einsum("n c p, n c d, n d q -> p q", rows, outer, rows))


@pytest.mark.parametrize("cotangents", [estimate.fisher, empirical])
def test_products_of_the_fisher_and_of_the_empirical_one(cotangents: Any) -> None:
    tangent, batches = Tangent(net()), data("classification", cut=15)
    dense = estimate.full(tangent, Categorical(), batches, cotangents=cotangents).dense()
    found = estimate.matrix_free(tangent, Categorical(), batches, cotangents=cotangents)
    close(found.dense(), dense)
    close(found.mv(torch.ones(found.size).double()), dense.sum(0))


@pytest.mark.parametrize("cotangents", [estimate.fisher, empirical])
def test_products_over_a_part_of_the_weights_go_by_the_columns_at_the_outputs(cotangents: Any) -> None:
    model = net()
    tangent = Tangent(model, ParamSpace.of(model).select(mask=torch.arange(0, 31, 2)))
    batches = data("classification", cut=15)
    dense = estimate.full(tangent, Categorical(), batches, cotangents=cotangents).dense()
    found = estimate.matrix_free(tangent, Categorical(), batches, cotangents=cotangents)
    v = torch.randn(4, found.size, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    close(found.mv(v), v @ dense)


def test_draws_of_the_data_noise_have_the_curvature_as_covariance() -> None:
    """10,000 draws, every entry of the second moments within five standard errors."""
    tangent, batches, n = Tangent(nn.Linear(2, 3).double()), data("classification"), 10_000
    batches = [(x[:, :2], y) for x, y in batches]
    dense = estimate.full(tangent, Categorical(), batches).dense()
    found = estimate.matrix_free(tangent, Categorical(), batches)
    draws = found.products.draw(n, torch.Generator().manual_seed(0))
    diagonal = dense.diagonal()
    error = ((dense.square() + diagonal[:, None] * diagonal) / n).sqrt()
    assert bool(((draws.mT @ draws / n - dense).abs() < 5 * error).all())


# -- the posterior beside its dense twin -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "prior"),
    [("regression", "scalar"), ("classification", "layerwise"), ("poisson", "diag"), ("regression", "layerwise")],
)
def test_everything_is_as_in_the_full_posterior(task: str, prior: str) -> None:
    """Noise, temperature, prior mean and any prior: covariances, evidence, effective dimension at a relative 1e-9."""
    common: dict[str, Any] = {"temperature": 1.7, "prior_mean": 0.3}
    if task == "regression":
        common["sigma_noise"] = 0.6
    near = {"scalar": "kron", "layerwise": "diagonal", "diag": "none"}[prior]
    found, full = made(task, preconditioner=near, **TIGHT, **common), made(task, "full", **common)
    count = {"scalar": 1, "layerwise": 4, "diag": found.n_params}[prior]
    xt = torch.randn(5, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for la in (found, full):
        la.prior_precision = torch.linspace(0.5, 2, count, dtype=torch.float64)
    with unchanged(found.model):
        for one, two in zip(found.predict_moments(xt), full.predict_moments(xt), strict=True):
            close(one, two)
        close(found.predict_moments(xt, joint=True)[1], full.predict_moments(xt, joint=True)[1], rtol=1e-8)
        close(found.log_marginal_likelihood(), full.log_marginal_likelihood())
        close(found.effective_parameters(), full.effective_parameters())
        close(found.posterior_variance, full.posterior_variance)
        value = found.fitted.mean + 0.1
        close(found.log_prob(value), full.log_prob(value))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_defaults_agree_with_the_full_posterior_within_the_stated_errors(dtype: torch.dtype) -> None:
    found, full = made("classification", dtype=dtype), made("classification", "full", dtype=dtype)
    xt = torch.randn(5, 3, generator=torch.Generator().manual_seed(2), dtype=dtype)
    bounded = precision_of(found).bounded_variances(found.linearise(xt))
    truth = full.posterior.variances(full.linearise(xt))
    slack = (1e-10 if dtype == torch.float64 else 1e-4) * truth
    assert bool((bounded.value <= truth + slack).all())
    assert bool((truth <= bounded.value + bounded.excess + slack).all())
    logdet = precision_of(found).log_determinant()
    away = float(found.log_marginal_likelihood() - full.log_marginal_likelihood())
    assert 0 < float(logdet.standard_error) < 5
    assert abs(away) < 4 * float(logdet.standard_error) / 2 + float(logdet.truncation) + 1e-3
    gamma, error = found.evidence.sampled_effective_parameters(
        found.prior, samples=400, generator=torch.Generator().manual_seed(0)
    )
    assert abs(float(gamma - full.effective_parameters())) < 4 * float(error)


def test_samples_of_the_weights_have_the_covariance_of_the_full_posterior() -> None:
    """Whitened by the dense twin; 2,000 draws, mean and second moments within four and a half standard errors."""
    found, full, n = made("poisson", prior_precision=3.0), made("poisson", "full", prior_precision=3.0), 2000
    draws = found.sample(n, generator=torch.Generator().manual_seed(0)) - found.mean
    precision = full.posterior_precision
    assert isinstance(precision, Tensor)
    white = draws @ torch.linalg.cholesky(precision)
    size = found.n_params
    error = (torch.ones(size, size) + torch.eye(size)).double().sqrt() / n**0.5
    away = (white.mT @ white / n - torch.eye(size)).abs() / error
    assert float(away.max()) < 4.5
    assert float(white.mean(0).abs().max()) < 4.5 / n**0.5
    again = found.sample(3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(again, found.sample(3, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("method", ["marglik", "em"])
def test_the_prior_that_the_evidence_prefers_is_that_of_the_full_posterior(method: str) -> None:
    found, full = made("regression", tolerance=1e-6, probes=31, steps=34), made("regression", "full")
    for la in (found, full):
        la.optimize_prior_precision(method=method)
    close(found.prior_precision, full.prior_precision, rtol=1e-3)


def test_the_evidence_of_a_layerwise_prior_has_the_slopes_of_the_full_one() -> None:
    slopes = []
    for la in (made("regression", **TIGHT), made("regression", "full")):
        precision = torch.tensor([0.5, 2.0, 1.0, 3.0], dtype=torch.float64, requires_grad=True)
        sigma = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
        slopes.append(torch.autograd.grad(la.log_marginal_likelihood(precision, sigma), [precision, sigma]))
    for one, two in zip(*slopes, strict=True):
        close(one, two)


def test_a_grid_of_precisions_costs_one_run_per_batch() -> None:
    found, full = made("classification"), made("classification", "full")
    assert isinstance(found.H, MatrixFree)
    products = found.H.products
    assert isinstance(products, data_products.DataProducts)
    before = products.passes
    for la in (found, full):
        la.optimize_prior_precision(
            method="gridsearch", val_loader=data("classification", 18), grid_size=40, log_prior_prec_min=-2
        )
    close(found.prior_precision, full.prior_precision)
    assert products.passes - before <= 4 * found.n_params


def test_data_that_are_added_count_as_if_they_had_been_there() -> None:
    whole, parts = made("classification", **TIGHT), Laplace(net(), "classification", "all", "matrix_free", **TIGHT)
    first, second = data("classification", cut=15)
    parts.fit([first])
    parts.fit([second], override=False)
    assert parts.n_data == whole.n_data
    close(parts.log_marginal_likelihood(), whole.log_marginal_likelihood())
    close(parts(first[0][:2]), whole(first[0][:2]))  # pyright: ignore[reportArgumentType]


# -- among few outputs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ZOO)
def test_variances_solved_for_among_the_outputs_are_those_of_the_dense_matrix(name: str) -> None:
    """Any network: rows by factors, spelled out, and of a part of the weights."""
    problem = problems.build(name)
    tangent = Tangent(problem.model, problem.space)
    with unchanged(problem.model):
        found = estimate.matrix_free(tangent, problem.likelihood, problem.batches, solve_in="outputs")
        assert found.rows is not None
        again = replace(found.rows, kept=1)  # every batch meets every other on its own
        close(again.gram(), found.rows.gram())
        dense = estimate.full(tangent, problem.likelihood, problem.batches)
        close(found.gram.trace(), dense.dense().trace())
        linear = tangent.at(problem.x)
        for scale, prior in ((1.0, 0.7), (2.5, 3.0)):
            ours, truth = ((each * scale).with_prior(prior) for each in (found, dense))
            close(ours.covariance(linear), truth.covariance(linear))
            close(ours.variances(linear), truth.variances(linear))
            close(ours.logdet(), truth.logdet())
            close(ours.inverse_trace(), truth.inverse_trace())
            v = torch.randn(3, found.size, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
            close(ours.solve(v), truth.solve(v))
        precisions = torch.tensor([0.3, 2.0], dtype=torch.float64)
        close(found.variances(linear, precisions), dense.variances(linear, precisions))


def test_everything_among_the_outputs_is_as_in_the_full_posterior() -> None:
    """Noise, temperature, prior mean, evidence and its slopes, added data; a prior by layer is solved for elsewhere."""
    common: dict[str, Any] = {"temperature": 1.7, "prior_mean": 0.3, "sigma_noise": 0.6, "prior_precision": 0.8}
    found, full = made("regression", solve_in="outputs", **TIGHT, **common), made("regression", "full", **common)
    xt = torch.randn(5, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert precision_of(found).few is not None
    slopes = []
    for la in (found, full):
        precision = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
        sigma = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
        slopes.append(torch.autograd.grad(la.log_marginal_likelihood(precision, sigma), [precision, sigma]))
    for one, two in zip(*slopes, strict=True):
        close(one, two)
    for layerwise in (False, True):
        if layerwise:
            for la in (found, full):
                la.prior_precision = torch.linspace(0.5, 2, 4, dtype=torch.float64)
            assert precision_of(found).few is None
        close(found.predict_moments(xt)[1], full.predict_moments(xt)[1])
        close(found.predict_moments(xt, joint=True)[1], full.predict_moments(xt, joint=True)[1], rtol=1e-8)
        close(found.log_marginal_likelihood(), full.log_marginal_likelihood())
        close(found.posterior_variance, full.posterior_variance)
    first, second = data("regression", cut=15)
    parts = Laplace(net(), "regression", "all", "matrix_free", solve_in="outputs", **TIGHT, **common)
    parts.fit([first])
    parts.fit([second], override=False)
    assert precision_of(parts).few is not None
    full.prior_precision, full.sigma_noise = 0.8, 0.6
    close(parts.predict_moments(xt)[1], full.predict_moments(xt)[1])


def test_samples_among_the_outputs_have_the_covariance_of_the_full_posterior() -> None:
    """Whitened by the dense twin; 2,000 draws, mean and second moments within four and a half standard errors."""
    n, options = 2000, {"prior_precision": 3.0}
    found, full = made("poisson", solve_in="outputs", **options), made("poisson", "full", **options)
    draws = found.sample(n, generator=torch.Generator().manual_seed(0)) - found.mean
    precision = full.posterior_precision
    assert isinstance(precision, Tensor)
    white = draws @ torch.linalg.cholesky(precision)
    size = found.n_params
    error = (torch.ones(size, size) + torch.eye(size)).double().sqrt() / n**0.5
    assert float(((white.mT @ white / n - torch.eye(size)).abs() / error).max()) < 4.5
    assert float(white.mean(0).abs().max()) < 4.5 / n**0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_variances_among_the_outputs_lie_within_their_bounds(dtype: torch.dtype) -> None:
    found = made("classification", dtype=dtype, solve_in="outputs")
    full = made("classification", "full", dtype=dtype)
    xt = torch.randn(5, 3, generator=torch.Generator().manual_seed(2), dtype=dtype)
    bounded = precision_of(found).bounded_variances(found.linearise(xt))
    truth = full.posterior.variances(full.linearise(xt))
    slack = (1e-10 if dtype == torch.float64 else 1e-4) * truth
    assert bool((bounded.value <= truth + slack).all())
    assert bool((truth <= bounded.value + bounded.excess + slack).all())
    solution = precision_of(found).solved(torch.ones(2, found.n_params, dtype=dtype))
    assert bool(solution.converged.all())


def test_systems_of_many_weights_and_few_outputs_are_solved_among_these(monkeypatch: pytest.MonkeyPatch) -> None:
    """By themselves, where there are four weights for a row; shuffled data and any batch size are fine."""

    def of(hidden: int, structure: str = "matrix_free", **options: Any) -> BaseLaplace:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, hidden), nn.Tanh(), nn.Linear(hidden, 3)).double()
        loader = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(*data("classification")[0]),
            batch_size=7,
            shuffle=True,
            generator=torch.Generator().manual_seed(0),
        )
        la = Laplace(model, "classification", "all", structure, **options)
        la.fit(loader)
        return la

    assert precision_of(of(26)).few is None  # 185 weights, 48 rows
    assert precision_of(of(27, preconditioner="diagonal")).few is None
    assert precision_of(of(27, solve_in="weights")).few is None
    assert precision_of(of(27, block=4)).few is None
    monkeypatch.setattr(data_products, "KEPT", 1)  # one data point at a time
    found, full = of(27), of(27, "full")  # 192 weights
    few = precision_of(found).few
    assert few is not None
    assert len(few.rows.counts) == 24
    xt = torch.randn(5, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    close(found.predict_moments(xt)[1], full.predict_moments(xt)[1])
    monkeypatch.setattr(data_products, "FEW", 47)
    assert precision_of(of(27)).few is None


def test_weights_that_have_changed_are_refused_among_the_outputs_too() -> None:
    la = made("classification", solve_in="outputs")
    la.sample(1)
    with torch.no_grad():
        next(la.model.parameters()).add_(0.1)
    with pytest.raises(DataError, match=r"the same weights in every pass. Fit again if the model has changed"):
        la.sample(1)


# -- what is said, and what is refused ---------------------------------------------------------------------------------


def test_what_did_not_converge_is_said() -> None:
    la = made("regression", iterations=2, sigma_noise=0.01)
    with pytest.warns(LapwingWarning, match=r"systems for a covariance were not solved: the relative residual is"):
        la(data("regression")[0][0][:2])
    with pytest.warns(LapwingWarning, match=r"systems for draws were not solved"):
        la.sample(2)


def test_an_iterator_is_refused() -> None:
    def once() -> Iterator[Any]:
        yield from data("regression")

    la = Laplace(net(), "regression", "all", "matrix_free")
    with pytest.raises(DataError, match=r"iterator, which can be gone through only once.*Give a list of batches"):
        la.fit(once())


def test_other_data_or_weights_than_those_of_the_fit_are_refused() -> None:
    model, kept = net(), data("classification", cut=15)
    la = Laplace(model, "classification", "all", "matrix_free")
    la.fit(kept)
    la.sample(1)
    extra = kept.pop()
    with pytest.raises(DataError, match=r"2 batches and the next one 1|had 15 points .* and the fit 24"):
        la.sample(1)
    kept.append((extra[0] + 1, extra[1]))
    with pytest.raises(DataError, match=r"had 24 points with a log-likelihood of .*expected the same data"):
        la.sample(1)
    kept[1] = extra
    kept.reverse()  # in any order
    la.sample(1)
    with torch.no_grad():
        next(model.parameters()).add_(0.1)
    with pytest.raises(DataError, match=r"the same weights in every pass. Fit again if the model has changed"):
        la.sample(1)


def test_files_and_checkpoints_are_refused_by_name(tmp_path: Path) -> None:
    la = made("classification")
    with pytest.raises(StorageError, match=r"matrix_free posterior keeps the data.*fit again where the data are"):
        la.save(tmp_path / "a")
    with pytest.raises(StorageError, match="matrix_free"):
        la.state_dict()
    assert not list(tmp_path.iterdir())
    with pytest.raises(
        OptionError, match=r"'matrix_free' posterior cannot be fitted with a checkpoint.*Leave checkpoint"
    ):
        la.fit(data("classification"), checkpoint=tmp_path / "c")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"preconditioner": "cholesky"},
            r"preconditioner is 'cholesky'; expected one of .*'diagonal', 'kron'",
        ),
        ({"tolerance": 2.0}, "tolerance is 2.0; expected"),
        ({"solve_in": "functions"}, r"solve_in is 'functions'; expected one of \['auto', 'weights', 'outputs'\]"),
        ({"solve_in": "outputs", "preconditioner": "kron"}, r"where nothing is iterated; expected preconditioner='no"),
        ({"probes": 0}, "probes is 0; expected a whole number"),
        ({"estimator": "mc"}, "cotangents that are drawn; expected the same matrix in every pass"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    la = Laplace(net(), "classification", "all", "matrix_free", **options)
    with pytest.raises(CurvatureError, match=message):
        la.fit(data("classification"))


def test_a_zero_prior_is_refused() -> None:
    la = made("classification", prior_precision=0.0)
    with pytest.raises(CurvatureError, match=r"prior precision is 0.*expected numbers > 0.*larger prior precision"):
        la.sample(1)


def test_the_seed_of_the_probes_comes_from_the_generator() -> None:
    values = []
    for seed in (None, 4, 4, 5):
        la = Laplace(net(), "poisson", "all", "matrix_free", 1.0, 30.0, probes=2, steps=20)
        la.fit(data("poisson"), generator=None if seed is None else torch.Generator().manual_seed(seed))
        values.append(float(la.log_marginal_likelihood()))
    assert values[1] == values[2] != values[3]
    assert values[0] != values[1]
    assert Poisson().adds_noise is False
