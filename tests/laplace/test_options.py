"""Every option of the public face does what it says: each against plain matrices, gradients or loops over draws."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oracle
from lapwing import Laplace, attach, predictive
from lapwing.errors import CurvatureError, UnsupportedOperationError
from lapwing.laplace import BaseLaplace
from lapwing.likelihoods import Categorical, Gaussian
from problems import Net


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mlp(outputs: int = 2, inputs: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def labels(n: int, classes: int = 2) -> Tensor:
    return torch.arange(n) % classes


def dense(la: BaseLaplace) -> Tensor:
    return la.H if isinstance(la.H, Tensor) else la.H.dense()


def blocks(matrix: Tensor, sizes: list[int]) -> Tensor:
    return matrix * torch.block_diag(*(torch.ones(n, n, dtype=torch.float64) for n in sizes))


def close(found: Tensor, expected: Tensor, rtol: float = 1e-8) -> None:
    torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol * float(expected.abs().max() + 1e-30))


# -- options of the structures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", ["sharing", "backend_kwargs", "kfac_approx"])
@pytest.mark.parametrize("structure", ["kron", "ekfac"])
def test_weight_sharing_is_reduced_on_request(structure: str, words: str) -> None:
    """A linear layer that is averaged over positions: of one data point, `reduce` is exact and `expand` is not."""
    torch.manual_seed(0)
    model = Net(lambda m, x: m.layer(x).mean(1), layer=nn.Linear(3, 2)).double()
    data = [(normal(1, 5, 3), normal(1, 2))]
    expected = oracle.ggn(model, Gaussian(), *data[0])
    options: dict[str, Any] = {"sharing": "reduce"} if words == "sharing" else {
        "backend_kwargs": {"sharing" if words == "backend_kwargs" else words: "reduce"}
    }  # fmt: skip
    la = Laplace(model, "regression", "all", structure, **options)
    la.fit(data)
    close(dense(la), expected)
    other = Laplace(model, "regression", "all", structure)
    other.fit(data)
    if structure == "kron":
        assert float((dense(other) - expected).abs().max()) > 1e-2


@pytest.mark.parametrize("structure", ["kron", "ekfac"])
@pytest.mark.parametrize(("bias", "sizes"), [(None, [16, 5]), ("joint", [16, 5]), ("separate", [12, 4, 4, 1])])
def test_weight_and_bias_in_one_block_or_two(structure: str, bias: str | None, sizes: list[int]) -> None:
    """Of one data point and one output the product is the exact block."""
    model, data = mlp(1), [(normal(1, 3), normal(1, 1))]
    la = Laplace(model, "regression", "all", structure, **({} if bias is None else {"bias": bias}))
    la.fit(data)
    close(dense(la), blocks(oracle.ggn(model, Gaussian(), *data[0]), sizes))


@pytest.mark.parametrize("structure", ["kron", "ekfac"])
@pytest.mark.parametrize("limit", [None, 6, 5])
def test_vectors_above_the_limit_get_a_diagonal(structure: str, limit: int | None) -> None:
    """LayerNorm has two vectors of six: blocks are exact up to the limit, and diagonal beyond."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 2)).double()
    x, y = normal(4, 6), labels(4)
    la = Laplace(model, "classification", "all", structure, **({} if limit is None else {"dense_limit": limit}))
    la.fit([(x, y)])
    exact = oracle.ggn(model, Categorical(), x, y)
    for part in (slice(0, 6), slice(6, 12)):
        block = exact[part, part]
        close(dense(la)[part, part], block.diagonal().diag() if limit == 5 else block)


@pytest.mark.parametrize("structure", ["kron", "ekfac"])
def test_what_forms_no_product_is_exact_or_an_error(structure: str) -> None:
    torch.manual_seed(0)
    model = Net(lambda m, x: m.layer(x) ** 2 + (x @ (m.w * m.w)), layer=nn.Linear(3, 2), w=nn.Parameter(normal(3, 2)))
    model.double()
    x, y = normal(4, 3), normal(4, 2)
    la = Laplace(model, "regression", "all", structure, on_unsupported="exact")
    la.fit([(x, y)])
    at = la.space.segment("w")
    close(dense(la)[at, at], oracle.ggn(model, Gaussian(), x, y)[at, at])
    assert "'w'" in la.exact_blocks
    with pytest.raises(UnsupportedOperationError, match="limit of 5"):
        Laplace(model, "regression", "all", structure, on_unsupported="error", dense_limit=5).fit([(x, y)])


@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("damping", [True, "plain"])
def test_damping_adds_the_prior_to_the_factors(subset: str, damping: bool | str) -> None:
    """(A + pi sqrt(d) I) (x) (G + sqrt(d) / pi I), pi^2 the ratio of the mean eigenvalues of A and G, or 1."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2, bias=False).double()
    x, y, delta = normal(7, 3), labels(7), 2.5
    la = Laplace(model, "classification", subset, "kron", damping=damping, prior_precision=delta)
    la.fit([(x, y)])
    a = x.mT @ x
    p = model(x).softmax(-1).detach()
    g = (p.diag_embed() - p.unsqueeze(2) * p.unsqueeze(1)).mean(0)
    pi = float((a.trace() / 3) / (g.trace() / 2)) ** 0.5 if damping is True else 1.0
    eye2, eye3 = torch.eye(2, dtype=torch.float64), torch.eye(3, dtype=torch.float64)
    sides = [torch.kron(g + delta**0.5 / pi * eye2, a + delta**0.5 * pi * eye3)]
    if damping == "plain":  # how a product is divided between its factors is free where only the product counts
        n = len(x)
        sides += [torch.kron(s * g + delta**0.5 * eye2, a / s + delta**0.5 * eye3) for s in (n, n**0.5)]
    found = la.posterior_precision
    found = found if isinstance(found, Tensor) else torch.linalg.inv(la.posterior_covariance)
    assert any(torch.allclose(found, side, rtol=1e-6) for side in sides)
    torch.testing.assert_close(dense(la), torch.kron(g, a), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("by", [None, "layer", "tensor"])
def test_blocks_of_layers_or_tensors(by: str | None) -> None:
    model, x, y = mlp(), normal(5, 3), labels(5)
    la = Laplace(model, "classification", "all", "blocks", **({} if by is None else {"by": by}))
    la.fit([(x, y)])
    close(dense(la), blocks(oracle.ggn(model, Categorical(), x, y), [12, 4, 8, 2] if by == "tensor" else [16, 10]))


@pytest.mark.parametrize("rank", [1, 3])
def test_low_rank_keeps_as_many_eigenpairs_as_it_is_told(rank: int) -> None:
    model, x, y = mlp(), normal(9, 3), labels(9)
    la = Laplace(model, "classification", "all", "lowrank", rank=rank)
    la.fit([(x, y)])
    values, vectors = torch.linalg.eigh(oracle.ggn(model, Categorical(), x, y))
    expected = (vectors[:, -rank:] * values[-rank:]) @ vectors[:, -rank:].mT
    close(dense(la), expected, 1e-6)


def test_a_gaussian_process_refuses_more_rows_than_its_limit() -> None:
    model, x, y = mlp(), normal(5, 3), normal(5, 2)
    Laplace(model, "regression", "all", "gp", limit=10).fit([(x, y)])
    with pytest.raises(CurvatureError, match="at most 9 rows"):
        Laplace(model, "regression", "all", "gp", limit=9).fit([(x, y)])


@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_a_gaussian_process_of_a_subset_is_the_posterior_of_those_points(subset: str) -> None:
    """By brute force over all pairs of points: exactly one of them has this posterior."""
    model, x, y = mlp(1), normal(5, 3), normal(5, 1)
    pairs = {}
    for i, j in combinations(range(5), 2):
        full = Laplace(model, "regression", subset, "full", prior_precision=1.5)
        full.fit([(x[[i, j]], y[[i, j]])])
        pairs[i, j] = full(x)[1], full.log_marginal_likelihood()
    found = []
    for seed in (0, 1, 2):
        la = Laplace(model, "regression", subset, "gp", n_subset=2, seed=seed, prior_precision=1.5)
        la.fit([(x[:3], y[:3]), (x[3:], y[3:])])
        assert la.n_data == 2
        variance = la(x)[1]
        (pair,) = [pair for pair, (other, _) in pairs.items() if torch.allclose(other, variance, rtol=1e-7)]
        torch.testing.assert_close(la.log_marginal_likelihood(), pairs[pair][1])
        found.append(pair)
    assert len(set(found)) > 1


@pytest.mark.parametrize("structure", ["full", "diag", "kron"])
@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_the_sampled_fisher_is_the_mean_over_its_draws(subset: str, structure: str) -> None:
    """The mean of 16 draws has a quarter of the deviation of one: of the trace, by 12 seeds, to about a third."""
    model, x, y = mlp(), normal(2, 3), labels(2)
    spread = []
    for draws in (1, 16):
        found = []
        for seed in range(12):
            la = Laplace(
                model, "classification", subset, structure, estimator="mc", backend_kwargs={"mc_samples": draws}
            )
            la.fit([(x, y)], generator=torch.Generator().manual_seed(seed))
            found.append(la.H.sum() if structure == "diag" else dense(la).trace())
        spread.append(float(torch.stack(found).std()))
    assert 1.9 < spread[0] / spread[1] < 10


# -- features, priors, temperature -----------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["full", "diag"])
@pytest.mark.parametrize("reduction", ["pick_first", "pick_last", "average"])
def test_a_last_layer_behind_a_reduction_over_positions(reduction: str, structure: str) -> None:
    """The model reduces outputs of all positions; curvature and variances of the head by plain backward passes."""
    torch.manual_seed(0)
    how = {"pick_first": lambda t: t[:, 0], "pick_last": lambda t: t[:, -1], "average": lambda t: t.mean(1)}[reduction]
    model = Net(lambda m, x: how(m.head(torch.tanh(m.first(x)))), first=nn.Linear(3, 4), head=nn.Linear(4, 2)).double()
    x, y = normal(6, 5, 3), labels(6)
    la = Laplace(model, "classification", "last_layer", structure, feature_reduction=reduction, prior_precision=0.7)
    la.fit([(x, y)])
    exact = oracle.ggn(model, Categorical(), x, y)[16:, 16:]
    exact = exact.diagonal().diag() if structure == "diag" else exact
    close(dense(la) if structure != "diag" else la.H.diag(), exact)
    jacobian = oracle.jacobian(model, x)[..., 16:]
    covariance = torch.linalg.inv(exact + 0.7 * torch.eye(10, dtype=torch.float64))
    _, variance = la.functional_variance_fast(x)
    close(variance, torch.einsum("bcp,pq,bcq->bc", jacobian, covariance, jacobian))


@pytest.mark.parametrize("structure", ["full", "diag", "kron", "ekfac", "blocks", "lowrank", "gp"])
@pytest.mark.parametrize("mean", ["number", "vector"])
def test_the_evidence_of_a_prior_with_a_mean(structure: str, mean: str) -> None:
    """Every term by hand, with other precisions for each tensor; the mean is read in the setter too."""
    model, x, y = mlp(1), normal(12, 3), normal(12, 1)
    prior_mean = 0.4 if mean == "number" else normal(21, seed=1)
    each = torch.tensor([2.0, 0.5, 1.0, 3.0], dtype=torch.float64)
    la = Laplace(model, "regression", "all", structure, prior_precision=each, prior_mean=prior_mean, sigma_noise=0.6)
    la.fit([(x, y)])
    entries = each.repeat_interleave(torch.tensor([12, 4, 4, 1]))
    theta = torch.cat([p.detach().flatten() for p in model.parameters()])
    if structure in ("kron", "ekfac"):  # precisions that differ part weight and bias
        logdet = la.log_det_posterior_precision
    else:
        curvature_of = la.H.diag() if structure == "diag" else dense(la)
        logdet = torch.logdet(curvature_of / 0.36 + entries.diag())
    fit = torch.distributions.Normal(model(x).detach(), 0.6).log_prob(y).sum()
    for now in (prior_mean, -1.0):
        la.prior_mean = now
        scatter = (entries * (theta - now).square()).sum()
        expected = fit + (entries.log().sum() - scatter - logdet) / 2
        torch.testing.assert_close(la.log_marginal_likelihood(), expected, rtol=1e-8, atol=0)
        torch.testing.assert_close(la.scatter, scatter)
        assert torch.equal(la.mean, theta)  # the mode is where the network was trained to


@pytest.mark.parametrize("structure", ["full", "kron", "diag", "gp"])
def test_predictions_at_a_temperature_and_a_noise(structure: str) -> None:
    model, x, y = mlp(1), normal(12, 3), normal(12, 1)
    la = Laplace(model, "regression", "all", structure, sigma_noise=0.6, temperature=2.5, prior_precision=1.5)
    la.fit([(x, y)])
    h = la.H.diag() if structure == "diag" else dense(la)
    matrix = h / (0.36 * 2.5) + 1.5 * torch.eye(21, dtype=torch.float64)
    jacobian = oracle.jacobian(model, x)
    close(la(x)[1], torch.einsum("bcp,pq,bdq->bcd", jacobian, torch.linalg.inv(matrix), jacobian), 1e-7)
    joint = la(x, joint=True)[1]
    flat = jacobian.flatten(0, 1)
    close(joint, flat @ torch.linalg.inv(matrix) @ flat.mT, 1e-7)
    close(la(x, diagonal_output=True)[1].flatten(), joint.diagonal(), 1e-7)


# -- predictions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["regression", "classification"])
@pytest.mark.parametrize("subset", ["all", "last_layer", "subnetwork"])
def test_predictions_of_drawn_networks_are_a_loop_over_draws(subset: str, task: str) -> None:
    model, x = mlp(), normal(6, 3)
    y = labels(6) if task == "classification" else normal(6, 2)
    options = {"subnetwork_indices": torch.tensor([0, 5, 13, 20])} if subset == "subnetwork" else {}
    la = Laplace(model, task, subset, "full", prior_precision=0.3, **options)
    la.fit([(x, y)])
    own = torch.cat([p.detach().flatten() for p in model.parameters()])
    draws = la.sample(7, generator=torch.Generator().manual_seed(3))
    outputs = []
    for draw in draws:
        weights = own.clone()
        weights[-draws.shape[1] :] = draw  # a last layer is the end of the flat vector; of others a draw is all of it
        torch.nn.utils.vector_to_parameters(weights, model.parameters())
        outputs.append(model(x).detach())
    torch.nn.utils.vector_to_parameters(own, model.parameters())
    drawn = torch.stack(outputs)
    ask = {"pred_type": "nn", "n_samples": 7}
    found = [la.functional_samples(x, generator=torch.Generator().manual_seed(3), **ask)]
    close(found[0], drawn, 1e-6)
    found = la(x, generator=torch.Generator().manual_seed(3), **ask)
    likely = la.predictive_samples(x, generator=torch.Generator().manual_seed(3), **ask)
    if task == "classification":
        close(found, drawn.softmax(-1).mean(0), 1e-6)
        close(likely, drawn.softmax(-1), 1e-6)
    else:
        close(found[0], drawn.mean(0), 1e-6)
        close(found[1], drawn.var(0), 1e-6)
        close(likely, drawn, 1e-6)


def test_draws_of_outputs_one_by_one_or_together() -> None:
    """20 000 draws: covariances within and between inputs as in joint predictions, or none. 5 standard errors."""
    model, x, count = mlp(), normal(3, 3), 20_000
    la = Laplace(model, "regression", "all", "full", prior_precision=0.3)
    la.fit([(normal(8, 3), normal(8, 2))])
    expected = la(x, joint=True)[1]
    for alone in (False, True):
        options = {"n_samples": count, "diagonal_output": alone, "generator": torch.Generator().manual_seed(0)}
        draws = la.functional_samples(x, **options).flatten(1)
        wanted = expected.diagonal().diag() if alone else expected
        found = (draws - la(x)[0].flatten()).mT @ (draws - la(x)[0].flatten()) / count
        sd = expected.diagonal().sqrt()
        assert float(((found - wanted).abs() / (sd[:, None] * sd)).max()) < 5 * (2 / count) ** 0.5


@pytest.mark.parametrize("link", ["probit", "probit_full", "bridge", "bridge_norm"])
def test_a_link_by_name_is_the_function_of_that_name(link: str) -> None:
    la = Laplace(mlp(3), "classification", "all", "full", prior_precision=0.3)
    x = normal(6, 3)
    la.fit([(x, labels(6, 3))])
    jacobian = oracle.jacobian(la.model, x)
    covariance = torch.einsum("bcp,pq,bdq->bcd", jacobian, la.posterior_covariance, jacobian)
    spread = covariance.diagonal(dim1=1, dim2=2) if link == "probit" else covariance
    expected = getattr(predictive, link)(la.model(x).detach(), spread)
    close(la(x, link_approx=link), expected)
    close(la.predictive(x, link_approx=link), expected)
    others = {name: la(x, link_approx=name) for name in ("probit", "probit_full", "bridge", "bridge_norm")}
    del others[link]
    assert all(float((expected - other).abs().max()) > 1e-6 for other in others.values())


def test_as_many_draws_as_asked_for() -> None:
    """A mean over n draws has a deviation of d / sqrt(n): over 24 seeds, for 4 and 64 draws, a ratio of 4 (+- 0.8)."""
    la = Laplace(mlp(), "classification", "all", "full", prior_precision=0.3)
    x = normal(1, 3)
    la.fit([(normal(8, 3), labels(8))])
    for how in ({"link_approx": "mc"}, {"pred_type": "nn"}):
        spread = []
        for n in (4, 64):
            seeds = [torch.Generator().manual_seed(seed) for seed in range(24)]
            spread.append(float(torch.stack([la(x, n_samples=n, generator=g, **how)[0, 0] for g in seeds]).std()))
        assert 2 < spread[0] / spread[1] < 8
        some = la.predictive(x, n_samples=4, **how)
        assert some.shape == (1, 2)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("bias", ["joint", "separate"])
def test_factors_of_a_last_layer_at_every_position(sharing: str, bias: str) -> None:
    """Classes at each of five positions: G (x) A / count, with inputs at all positions or their means."""
    model, x = mlp(3), normal(4, 5, 3)
    y = torch.randint(3, (4, 5), generator=torch.Generator().manual_seed(0))
    likelihood = Categorical(class_axis=-1)
    la = Laplace(model, likelihood, "last_layer", "kron", sharing=sharing, bias=bias)
    la.fit([(x[:1], y[:1]), (x[1:], y[1:])])
    phi = torch.cat([model[1](model[0](x)).detach(), torch.ones(4, 5, 1, dtype=torch.float64)], -1)
    p = model(x).softmax(-1).detach()
    g = (p.diag_embed() - p.unsqueeze(-1) * p.unsqueeze(-2)).sum((0, 1))
    rows = phi.flatten(0, 1) if sharing == "expand" else phi.mean(1)
    a = rows.mT @ rows / len(rows)
    joint = torch.kron(g, a).reshape(3, 5, 3, 5)
    weight, side, offset = joint[:, :4, :, :4], joint[:, :4, :, 4], joint[:, 4, :, 4]
    side = torch.zeros_like(side) if bias == "separate" else side
    upper = torch.cat([weight.reshape(12, 12), side.reshape(12, 3)], 1)
    close(dense(la), torch.cat([upper, torch.cat([side.reshape(12, 3).mT, offset], 1)]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_grid_of_events_that_are_all_but_certain(dtype: torch.dtype) -> None:
    """Where a probability rounds to one, the right label costs nothing; no score may be NaN."""
    model = nn.Linear(1, 1).to(dtype)
    with torch.no_grad():
        model.weight.fill_(60.0)
        model.bias.zero_()
    x = torch.tensor([[1.0], [-1.0], [0.5]], dtype=dtype)
    la = Laplace(model, "binary", "all", "full", prior_precision=1e4)
    la.fit([(x, (x > 0).to(dtype))])
    grid = {"log_prior_prec_min": 2, "log_prior_prec_max": 6, "grid_size": 3}
    ask = {"method": "gridsearch", "link_approx": "quadrature", **grid}
    la.optimize_prior_precision(val_loader=[(x, (x > 0).to(dtype))], **ask)
    assert round(float(la.prior_precision)) in (100, 10_000, 1_000_000)


# -- densities, shapes, and arguments that are handed on ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("subset", "structure"),
    [("all", name) for name in ("full", "diag", "kron", "ekfac", "blocks", "lowrank", "gp")]
    + [("last_layer", name) for name in ("full", "diag", "kron", "gp")]
    + [("subnetwork", name) for name in ("full", "diag")],
)
def test_densities_of_weights_are_those_of_the_gaussian(subset: str, structure: str) -> None:
    model, x, chosen = mlp(), normal(6, 3), torch.tensor([0, 5, 13, 20])
    options = {"subnetwork_indices": chosen} if subset == "subnetwork" else {}
    la = Laplace(model, "classification", subset, structure, prior_precision=0.8, **options)
    la.fit([(x, labels(6))])
    theta = torch.cat([p.detach().flatten() for p in model.parameters()])
    mean = {"all": theta, "last_layer": theta[16:], "subnetwork": theta[chosen]}[subset]
    covariance = la.posterior_covariance
    values = mean + normal(3, len(mean), seed=2)
    gaussian = torch.distributions.MultivariateNormal(mean, covariance)
    given = values
    if subset == "subnetwork":
        given = theta.expand(3, -1).clone()
        given[:, chosen] = values
        torch.testing.assert_close(la.log_prob(values), gaussian.log_prob(values), rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(la.log_prob(given), gaussian.log_prob(values), rtol=1e-7, atol=1e-9)
    away = values - mean
    squares = torch.einsum("ni,ni->n", away, torch.linalg.solve(covariance, away.mT).mT)
    torch.testing.assert_close(la.square_norm(given), squares, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(la.log_prob(given[0], normalized=False), -squares[0] / 2, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(la.posterior_variance, covariance.diagonal(), rtol=1e-7, atol=1e-12)


def test_auto_keeps_every_covariance_up_to_its_limit() -> None:
    for weights, expected in ((3000, "full"), (3001, "kron")):
        model = nn.Linear(weights, 1, bias=False)
        assert Laplace(model, "regression", "all", "auto").structure == expected
        assert Laplace(model, "regression", "last_layer", "auto").structure == expected
    model = nn.Linear(4000, 1, bias=False)
    for count, expected in ((3000, "full"), (3001, "diag")):
        chosen = torch.arange(count)
        assert Laplace(model, "regression", "subnetwork", "auto", chosen).structure == expected
        assert Laplace(model, "regression", "subnetwork", "auto", subnetwork_indices=chosen).structure == expected


def test_events_by_draws_are_a_loop_over_draws() -> None:
    """Sigmoids of the draws, of each of two labels; and for all links of events the same mean to their accuracy."""
    model, x = mlp(), normal(6, 3)
    la = Laplace(model, "binary", "all", "full", prior_precision=0.5)
    la.fit([(x, torch.stack([labels(6), 1 - labels(6)], 1).double())])
    ask = {"n_samples": 6, "generator": torch.Generator()}
    for kind in ("nn", "glm"):
        ask["generator"].manual_seed(1)
        f = la.functional_samples(x, kind, **ask)
        ask["generator"].manual_seed(1)
        close(la.predictive_samples(x, kind, **ask), f.sigmoid())
        if kind == "nn":
            ask["generator"].manual_seed(1)
            close(la(x, pred_type="nn", **ask), f.sigmoid().mean(0))
    f = la.functional_samples(x, n_samples=20_000, generator=torch.Generator().manual_seed(0)).sigmoid()
    error = 5 * f.std(0) / 20_000**0.5
    assert bool(((la(x, link_approx="quadrature") - f.mean(0)).abs() < error).all())
    again = la(x, link_approx="mc", n_samples=20_000, generator=torch.Generator().manual_seed(1))
    assert bool(((again - f.mean(0)).abs() < 1.5 * error).all())
    close(la(x, link_approx="probit_full"), la(x, link_approx="probit"))


def test_draws_of_images_have_their_classes_along_the_first_axis() -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(1, 3, 2).double()
    x, y = normal(2, 1, 3, 3), torch.randint(3, (2, 2, 2), generator=torch.Generator().manual_seed(0))
    la = Laplace(model, "classification", "all", "full", prior_precision=0.5)
    la.fit([(x, y)])
    for kind in ("glm", "nn"):
        f = la.functional_samples(x, kind, 4, generator=torch.Generator().manual_seed(1))
        found = la.predictive_samples(x, kind, 4, generator=torch.Generator().manual_seed(1))
        close(found, f.softmax(2))
        if kind == "nn":
            close(la(x, pred_type="nn", n_samples=4, generator=torch.Generator().manual_seed(1)), f.softmax(2).mean(0))
    many = la.functional_samples(x, n_samples=20_000, generator=torch.Generator().manual_seed(2)).softmax(2)
    found = la(x, link_approx="mc", n_samples=20_000, generator=torch.Generator().manual_seed(3))
    assert bool(((found - many.mean(0)).abs() < 5 * many.std(0) * (2 / 20_000) ** 0.5).all())


@pytest.mark.parametrize("method", ["gridsearch", "pseudo_data"])
def test_a_grid_with_a_noise_for_each_output(method: str) -> None:
    """Two outputs with noise of 0.2 and 1.5, which belong to the likelihood and stay."""
    model, x, sigma = mlp(), normal(20, 3), torch.tensor([0.2, 1.5], dtype=torch.float64)
    y = model(x).detach() + 0.5 * normal(20, 2, seed=3)
    la = Laplace(model, Gaussian(sigma=sigma), "all", "full")
    la.fit([(x[:10], y[:10])])
    scores = {}
    for precision in (0.1, 1.0, 10.0, 100.0):
        for temperature in (0.5, 5.0) if method == "pseudo_data" else (1.0,):
            la.prior_precision, la.temperature = precision, temperature
            mean, variance = la(x[10:], diagonal_output=True)
            density = torch.distributions.Normal(mean, (variance + sigma.square()).sqrt()).log_prob(y[10:])
            scores[precision, temperature] = -float(density.sum())
    best = min(scores, key=scores.__getitem__)
    la.prior_precision, la.temperature = 1.0, 1.0
    search = {"log_prior_prec_min": -1, "log_prior_prec_max": 2, "grid_size": 4}
    search |= {"counts": [20.0, 2.0]} if method == "pseudo_data" else {}
    la.optimize_prior_precision(method=method, val_loader=[(x[10:], y[10:])], **search)
    assert (la.prior_precision.item(), la.temperature.item()) == pytest.approx(best)


def test_arguments_of_the_model_are_handed_on() -> None:
    torch.manual_seed(0)
    net = nn.Linear(3, 1).double()

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, values: Tensor, scale: Tensor) -> Tensor:
            return self.net(values) * scale

    x, scale = normal(5, 3), 1 + normal(5, 1).square()
    la = Laplace(Scaled(), "regression", "all", "full")
    la.fit([{"values": x, "scale": scale, "labels": normal(5, 1)}])
    close(la({"values": x}, scale=scale)[0], net(x).detach() * scale)
    close(la({"values": x}, scale=2 * scale)[1], 4 * la({"values": x, "scale": scale})[1])


@pytest.mark.parametrize("subset", ["all", "last_layer", "subnetwork"])
@pytest.mark.parametrize("kind", ["glm", "nn"])
def test_predictions_are_functions_of_the_inputs(kind: str, subset: str) -> None:
    """Slopes of means and variances along a direction, by central differences with the same draws."""
    model, x, along = mlp(), normal(4, 3), normal(4, 3, seed=5)
    options = {"subnetwork_indices": torch.tensor([0, 5, 13, 20])} if subset == "subnetwork" else {}
    la = Laplace(model, "regression", subset, "full", prior_precision=0.5, enable_backprop=True, **options)
    la.fit([(x, normal(4, 2))])

    def value(at: Tensor) -> Tensor:
        options = {"pred_type": kind, "n_samples": 5, "generator": torch.Generator().manual_seed(0)}
        mean, variance = la(at, diagonal_output=kind == "glm", **options)
        return (mean + 3 * variance).sum()

    point = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(value(point), point)
    step = 1e-5 * along
    expected = (value(x + step) - value(x - step)).detach() / 2e-5
    torch.testing.assert_close((slope * along).sum(), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("count", "entries"), [(1, [2.0, 2.0, 2.0, 2.0]), (3, [2.0, 2.0, 3.0, 5.0]), (2, [2.0, 2.0, 3.0, 3.0])]
)
@pytest.mark.parametrize("structure", ["full", "diag"])
def test_precisions_of_a_sub_network_are_those_of_what_it_touches(
    structure: str, count: int, entries: list[float]
) -> None:
    """Of four tensors in two modules it touches the first, third and fourth: one precision, three, or two."""
    model, x, chosen = mlp(), normal(6, 3), torch.tensor([0, 7, 20, 25])
    la = Laplace(model, "classification", "subnetwork", structure, subnetwork_indices=chosen)
    la.fit([(x, labels(6))])
    la.prior_precision = torch.tensor([2.0, 3.0, 5.0][:count])
    curvature = oracle.ggn(model, Categorical(), x, labels(6))[chosen][:, chosen]
    curvature = curvature.diagonal().diag() if structure == "diag" else curvature
    matrix = curvature + torch.tensor(entries, dtype=torch.float64).diag()
    close(la.posterior_covariance, torch.linalg.inv(matrix))
    name = {1: "scalar", 3: "layerwise", 2: "module"}[count]
    la.optimize_prior_precision(prior_structure=name, method="adam", n_steps=2)
    assert len(la.prior_precision) == count


def test_attach_hands_its_choices_on() -> None:
    model, x = mlp(), normal(30, 3)
    y = torch.sin(x[:, :2]) + 0.3 * normal(30, 2, seed=2)
    la = attach(
        model,
        [(x, y)],
        "regression",
        structure="diag",
        subset_of_weights="last_layer",
        prior_structure="layerwise",
        rows=0,
    )
    assert (la.structure, la.space.names, len(la.prior_precision)) == ("diag", ("2.weight", "2.bias"), 2)
    logs = [la.prior_precision.log().requires_grad_(), la.sigma_noise.log().requires_grad_()]
    value = la.log_marginal_likelihood(*(each.exp() for each in logs))
    assert all(float(slope.abs().max()) < 1e-3 for slope in torch.autograd.grad(value, logs))
    drawn = [
        attach(
            model, [(x, labels(30))], "classification", estimator="mc", generator=torch.Generator().manual_seed(seed)
        )
        for seed in (0, 0, 1)
    ]
    assert torch.equal(dense(drawn[0]), dense(drawn[1]))
    assert not torch.equal(dense(drawn[0]), dense(drawn[2]))


# -- numbers that are set after a fit ----------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["full", "diag", "kron", "gp", "lowrank"])
@pytest.mark.parametrize(
    ("name", "value"), [("prior_precision", 3.0), ("sigma_noise", 0.4), ("temperature", 0.25), ("prior_mean", 0.5)]
)
def test_a_number_that_is_set_is_followed(structure: str, name: str, value: float) -> None:
    """A prediction before it was set leaves nothing behind: the posterior is that of one made with the number."""
    model, x, y = mlp(), normal(7, 3), normal(7, 2, seed=1)
    la = Laplace(model, "regression", "all", structure)
    la.fit([(x, y)])
    evidence = la.log_marginal_likelihood().clone()
    before = la(x)[1].clone()  # last, so that a posterior is kept when the number changes
    setattr(la, name, value)
    made = Laplace(model, "regression", "all", structure, **{name: value})  # pyright: ignore[reportArgumentType]
    made.fit([(x, y)])
    close(la(x)[1], made(x)[1], 1e-9)
    close(la.log_marginal_likelihood(), made.log_marginal_likelihood(), 1e-9)
    assert not torch.allclose(la.log_marginal_likelihood(), evidence)
    assert torch.allclose(la(x)[1], before) == (name == "prior_mean")


@pytest.mark.parametrize("estimator", ["exact", "empirical"])
@pytest.mark.parametrize("structure", ["full", "diag"])
def test_the_precision_that_users_read_has_noise_and_temperature_in_it(structure: str, estimator: str) -> None:
    model, x, y = mlp(), normal(7, 3), normal(7, 2, seed=1)
    numbers = {"sigma_noise": 0.4, "temperature": 3.0, "prior_precision": torch.tensor([1.0, 2.0, 3.0, 4.0])}
    la = Laplace(model, "regression", "all", structure, estimator=estimator, **numbers)  # pyright: ignore[reportArgumentType]
    la.fit([(x, y)])
    prior = torch.cat([torch.full((p.numel(),), float(i + 1)) for i, p in enumerate(model.parameters())]).double()
    power = 4 if estimator == "empirical" else 2
    matrix = dense(la) if structure == "full" else torch.diag(dense(la))
    expected = matrix / (0.4**power * 3.0) + torch.diag(prior)
    assert isinstance(la.posterior_precision, Tensor)
    close(la.posterior_precision, expected if structure == "full" else expected.diagonal(), 1e-9)
    close(la.posterior_variance, torch.linalg.inv(expected).diagonal(), 1e-9)
    close(la.posterior_covariance, torch.linalg.inv(expected), 1e-9)
    root = la.posterior_scale
    close(root @ root.mT if structure == "full" else torch.diag(root.square()), torch.linalg.inv(expected), 1e-9)
