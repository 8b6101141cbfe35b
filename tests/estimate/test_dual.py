"""The dual and the low-rank estimator against the full one, the Gaussian-process evidence, and subsets of data."""

from __future__ import annotations

from dataclasses import replace
from math import log, pi

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contracts import RTOL, close
from lapwing import estimate
from lapwing.errors import CurvatureError, DataError
from lapwing.estimate.dual_rows import by_tensor
from lapwing.evidence import Evidence, GaussianFit
from lapwing.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from lapwing.linalg import Curvature, Dense, DenseRows, Dual, LowRank
from lapwing.priors import Prior
from lapwing.tangent import Tangent
from lapwing.tangent.inputs import batch_size, take
from linalg.test_memory import Largest
from problems import Problem, build, targets

ARCHITECTURES = [
    "mlp",
    "conv2d",
    "conv2d_grouped",
    "conv_transpose2d",
    "layer_norm",
    "embedding",
    "raw_matmul",
    "transformer_encoder",
    "lstm",
    "linear_twice",
    "recurrence_from_linears",
    "shared_bias",
    "tied_embedding_sequence",
    "tied_autoencoder",
    "weight_norm",
    "sequence_categorical",
    "image_gaussian",
    "dict_input",
    "selected_by_mask",
    "unused_parameters",
]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def split(problem: Problem) -> list[tuple[object, Tensor]]:
    """The data in two batches of different sizes."""
    n = batch_size(problem.x)
    return [(take(problem.x, part), problem.y[part]) for part in (slice(0, 2), slice(2, n))]


def with_likelihood(problem: Problem, likelihood: Likelihood) -> Problem:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        found, y = targets(Tangent(problem.model, problem.space).at(problem.x).value, likelihood)
    return replace(problem, y=y, likelihood=found)


def priors(problem: Problem) -> dict[str, Prior]:
    space = problem.space
    layers, tensors = (int(space.groups(by).max()) + 1 for by in ("layer", "tensor"))
    spaced = lambda count: torch.linspace(0.3, 1.5, count, dtype=torch.float64)  # noqa: E731
    return {
        "isotropic": Prior.isotropic(space, 0.7),
        "per layer": Prior.layerwise(space, spaced(layers)),
        "per tensor": Prior.per_tensor(space, spaced(tensors)),
        "diagonal": Prior.diagonal(space, spaced(space.size)),
    }


def check(problem: Problem, curvature: Curvature, full: Dense) -> None:
    """Every method and the derivatives of the log-determinant, with every kind of prior and a scale."""
    close(curvature.dense(), full.matrix)
    close(curvature.diagonal(), full.diagonal())
    v = torch.randn(2, full.size, dtype=torch.float64, generator=generator())
    close(curvature.mv(v), full.mv(v))
    linear_map = Tangent(problem.model, problem.space).at(take(problem.x, slice(0, 2)))
    for prior in priors(problem).values():
        free = prior.precisions.clone().requires_grad_()
        scale = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
        tuned = prior.with_precisions(free)
        ours = (curvature * scale).with_prior(tuned.precision())
        matrix = full.matrix * scale + tuned.precision().expand(full.size).diag()
        logdet = torch.linalg.slogdet(matrix).logabsdet
        close(ours.logdet(), logdet)
        found = torch.autograd.grad(ours.logdet(), (free, scale), retain_graph=True)
        for actual, expected in zip(found, torch.autograd.grad(logdet, (free, scale)), strict=True):
            close(actual, expected)
        inverse = torch.linalg.inv(matrix.detach())
        with torch.no_grad():
            close(ours.solve(v), v @ inverse)
            close(ours.mv(v), v @ matrix)
            close(ours.variance(), inverse.diagonal())
            rows = linear_map.rows()
            close(ours.covariance(linear_map), rows @ inverse @ rows.mT, 10 * RTOL)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_dual_is_the_full_ggn(name: str) -> None:
    problem = build(name)
    tangent = Tangent(problem.model, problem.space)
    full = estimate.full(tangent, problem.likelihood, problem.batches)
    check(problem, estimate.dual(tangent, problem.likelihood, split(problem)), full)


@pytest.mark.parametrize(
    "likelihood", [Categorical(), Gaussian(0.7), Bernoulli()], ids=lambda found: type(found).__name__
)
@pytest.mark.parametrize("name", ["mlp", "conv2d", "tied_embedding"])
def test_dual_and_low_rank_are_the_full_ggn_for_every_likelihood(name: str, likelihood: Likelihood) -> None:
    problem = with_likelihood(build(name), likelihood)
    tangent = Tangent(problem.model, problem.space)
    full = estimate.full(tangent, likelihood, problem.batches)
    check(problem, estimate.dual(tangent, likelihood, split(problem)), full)
    check(problem, estimate.low_rank(tangent, likelihood, split(problem), rank=problem.space.size), full)


@pytest.mark.parametrize("name", ["transformer_encoder", "linear_twice", "sequence_categorical", "unused_parameters"])
def test_low_rank_at_full_rank_is_the_full_ggn(name: str) -> None:
    problem = build(name)
    tangent = Tangent(problem.model, problem.space)
    full = estimate.full(tangent, problem.likelihood, problem.batches)
    found = estimate.low_rank(tangent, problem.likelihood, split(problem), rank=10_000)
    values = torch.linalg.eigvalsh(full.matrix)
    assert found.rank == int((values > 1e-12 * values.max()).sum())
    check(problem, found, full)


def test_the_sum_of_two_data_sets_is_the_dual_of_both() -> None:
    problem = build("conv2d")
    tangent = Tangent(problem.model, problem.space)
    one, two = (estimate.dual(tangent, problem.likelihood, [batch]) for batch in split(problem))
    full = estimate.full(tangent, problem.likelihood, problem.batches)
    check(problem, one + two, full)
    scale = torch.tensor(0.6, dtype=torch.float64, requires_grad=True)
    parts = [estimate.full(tangent, problem.likelihood, [batch]).matrix for batch in split(problem)]
    matrix = parts[0] * scale + parts[1] + 0.5 * torch.eye(full.size, dtype=torch.float64)
    logdets = (one * scale + two).with_prior(torch.linspace(0.5, 0.5, full.size).double()).logdet(), matrix.logdet()
    close(logdets[0], logdets[1])
    slopes = [torch.autograd.grad(each, scale)[0] for each in logdets]
    close(slopes[0], slopes[1])


def test_monte_carlo_cotangents_come_from_the_generator() -> None:
    problem = build("mlp")
    tangent, data = Tangent(problem.model, problem.space), split(problem)
    for estimator in (estimate.dual, lambda *args, **kwargs: estimate.low_rank(*args, rank=500, **kwargs)):
        draws = estimate.monte_carlo(3)
        full = estimate.full(tangent, problem.likelihood, data, cotangents=draws, generator=generator(4))
        found = estimator(tangent, problem.likelihood, data, cotangents=draws, generator=generator(4))
        close(found.dense(), full.matrix)


def test_draws_of_a_network_have_the_posterior_covariance() -> None:
    """Within four standard errors along ten directions; x^T precision x is chi-squared with P degrees of freedom."""
    problem, n = build("conv2d"), 20_000
    tangent = Tangent(problem.model, problem.space)
    full = estimate.full(tangent, problem.likelihood, problem.batches)
    for curvature in (
        estimate.dual(tangent, problem.likelihood, split(problem)),
        estimate.low_rank(tangent, problem.likelihood, split(problem), rank=500),
    ):
        for prior in priors(problem).values():
            matrix = 2 * full.matrix + prior.precision().expand(full.size).diag()
            draws = (curvature * 2).with_prior(prior.precision()).draw(n, generator(1))
            directions = torch.randn(10, full.size, dtype=torch.float64, generator=generator(2))
            variance = (directions @ torch.linalg.inv(matrix) * directions).sum(1)
            along = draws @ directions.mT
            assert float((along.square().mean(0) / variance - 1).abs().max()) < 4 * (2 / n) ** 0.5
            assert float((along.mean(0) / variance.sqrt()).abs().max()) < 4 / n**0.5
            energy = (draws @ matrix * draws).sum(1).mean()
            assert abs(float(energy) - full.size) < 4 * (2 * full.size / n) ** 0.5


# -- evidence -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["dual", "low_rank"])
def test_d7_the_gp_evidence_counts_the_data_once(structure: str) -> None:
    """log N(y | 0, sigma^2 I + Phi Phi^T / delta), with more features than data; its gradient as well."""
    points, features, sigma, delta = 15, 40, 0.4, 1.5
    x = torch.randn(points, features, dtype=torch.float64, generator=generator(1))
    y = torch.randn(points, 1, dtype=torch.float64, generator=generator(2))
    model = nn.Linear(features, 1, bias=False).double()
    tangent = Tangent(model)
    kernel = x @ x.mT
    with torch.no_grad():  # the mode: Phi^T (K + sigma^2 delta I)^-1 y
        shifted = kernel + sigma**2 * delta * torch.eye(points, dtype=torch.float64)
        model.weight.copy_((x.mT @ torch.linalg.solve(shifted, y)).mT)
    data = [(x[:6], y[:6]), (x[6:], y[6:])]
    options = {"rank": points} if structure == "low_rank" else {}
    curvature = getattr(estimate, structure)(tangent, Gaussian(), data, **options)
    squares = (y - tangent.at(x).value).square().sum()
    evidence = Evidence(curvature, tangent.space.values(model), GaussianFit(points, squares))

    free = torch.tensor([delta, sigma], dtype=torch.float64, requires_grad=True)
    found = evidence.log_marginal(Prior.isotropic(tangent.space).with_precisions(free[:1]), free[1])
    covariance = kernel / free[0] + free[1] ** 2 * torch.eye(points, dtype=torch.float64)
    root = torch.linalg.cholesky(covariance)
    white = torch.linalg.solve_triangular(root, y, upper=False)
    exact = -white.square().sum() / 2 - root.diagonal().log().sum() - points / 2 * log(2 * pi)
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=0)
    # at the mode its own movement does not count, so that the gradients agree too
    slopes = [torch.autograd.grad(value, free)[0] for value in (found, exact)]
    close(slopes[0], slopes[1], 1e-8)


def test_evidence_is_tuned_per_layer_as_with_the_full_matrix() -> None:
    problem = with_likelihood(build("mlp"), Gaussian(1.0))
    tangent = Tangent(problem.model, problem.space)
    mean = problem.space.values(problem.model)
    fit = GaussianFit(problem.y.numel(), (problem.y - tangent.at(problem.x).value).square().sum())
    gradients, effective = [], []
    for estimator in (estimate.dual, estimate.full):
        evidence = Evidence(estimator(tangent, Gaussian(), split(problem)), mean, fit)
        prior = Prior.layerwise(problem.space)
        free = torch.full((1 + len(prior.precisions),), 0.8, dtype=torch.float64, requires_grad=True)
        value = evidence.log_marginal(prior.with_precisions(free[1:]), free[0])
        gradients.append(torch.cat([torch.autograd.grad(value, free)[0], value.detach().reshape(1)]))
        effective.append(evidence.effective_parameters(prior, 0.8))
    close(*gradients)
    close(*effective)


# -- size -----------------------------------------------------------------------------------------------------------


def test_two_million_parameters_within_a_small_budget() -> None:
    """No tensor is larger than a few copies of the parameters: the rows spelled out would be 60 times as large."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 1024), nn.Tanh(), nn.Linear(1024, 1150), nn.Tanh(), nn.Linear(1150, 4))
    tangent = Tangent(model)
    size = tangent.space.size
    assert size > 1_950_000
    x, y = torch.randn(20, 784), torch.arange(20) % 4
    with Largest() as largest:
        curvature = estimate.dual(tangent, Categorical(), [(x[:10], y[:10]), (x[10:], y[10:])])
        precision = (curvature * 0.5).with_prior(0.3)
        covariance = precision.covariance(tangent.at(x[:5]))
        per_layer = curvature.with_prior(Prior.layerwise(tangent.space, [1.0, 2.0, 3.0]).precision())
        assert bool(torch.isfinite(per_layer.logdet()))
        draw = precision.draw(1, generator())
    assert curvature.rows.count <= 80
    assert largest.numel <= 2 * size, largest.where
    assert draw.shape == (1, size)
    # the two sides of one identity: J (H + D)^-1 J^T by solving with each row
    rows = tangent.at(x[:1]).rows()[0]
    expected = rows @ precision.solve(rows).mT
    torch.testing.assert_close(covariance[0], expected, rtol=1e-3, atol=1e-5)


def test_too_many_rows_name_the_memory_and_the_remedy() -> None:
    problem = build("mlp")
    tangent = Tangent(problem.model, problem.space)
    with pytest.raises(CurvatureError, match=r"data points make \d+ rows.* GiB; expected at most 7 rows.*subset.*Kron"):
        estimate.dual(tangent, problem.likelihood, problem.batches, limit=7)


def test_rows_of_a_sub_network_are_cut_by_tensor() -> None:
    problem = build("selected_by_mask")
    assert problem.space.index is not None
    tangent = Tangent(problem.model, problem.space)
    curvature = estimate.dual(tangent, problem.likelihood, problem.batches)
    precision = curvature.with_prior(priors(problem)["per tensor"].precision())
    assert precision.blocks is not None
    pieces = by_tensor(problem.space, [DenseRows(0, torch.ones(1, 1, problem.space.size, dtype=torch.float64))])
    assert sum(piece.segments[0][1] - piece.segments[0][0] for piece in pieces) == problem.space.size


# -- low rank -------------------------------------------------------------------------------------------------------


def decaying() -> tuple[Tangent, list[tuple[Tensor, Tensor]]]:
    """A linear model whose inputs have variances 1, 1/4, 1/16, ...: gaps between all eigenvalues."""
    x = torch.randn(60, 24, dtype=torch.float64, generator=generator()) * 0.5 ** torch.arange(24)
    model = nn.Linear(24, 1, bias=False).double()
    return Tangent(model), [(part, torch.zeros(len(part), 1, dtype=torch.float64)) for part in x.split(25)]


@pytest.mark.parametrize("gram_rows", [2000, 10], ids=["Gram matrix", "subspace iteration"])
def test_the_largest_eigenpairs(gram_rows: int) -> None:
    tangent, data = decaying()
    values, vectors = torch.linalg.eigh(estimate.full(tangent, Gaussian(), data).matrix)
    values, vectors = values.flip(0)[:4], vectors.flip(1)[:, :4]
    found = estimate.low_rank(tangent, Gaussian(), data, rank=4, gram_rows=gram_rows)
    assert found.rank == 4
    close(found.values, values)
    close((found.vectors * found.values) @ found.vectors.mT, (vectors * values) @ vectors.mT, 1e-8)
    close(found.vectors.mT @ found.vectors, torch.eye(4, dtype=torch.float64))


def test_subspace_iteration_over_more_than_the_rank_is_exact() -> None:
    problem = build("mlp")
    tangent = Tangent(problem.model, problem.space)
    full = estimate.full(tangent, problem.likelihood, problem.batches)
    found = estimate.low_rank(tangent, problem.likelihood, split(problem), rank=problem.space.size, gram_rows=1)
    values = torch.linalg.eigvalsh(full.matrix)
    assert found.rank == int((values > 1e-12 * values.max()).sum())
    close(found.dense(), full.matrix)


def test_subspace_iteration_draws_the_same_cotangents_in_every_pass() -> None:
    problem = build("mlp")
    tangent, data = Tangent(problem.model, problem.space), split(problem)
    draws = estimate.monte_carlo(2)
    full = estimate.full(tangent, problem.likelihood, data, cotangents=draws, generator=generator(4))
    found = estimate.low_rank(
        tangent, problem.likelihood, data, rank=500, cotangents=draws, generator=generator(4), gram_rows=1
    )
    close(found.dense(), full.matrix)
    estimate.low_rank(tangent, problem.likelihood, data, rank=2, cotangents=draws, gram_rows=1)


def test_low_rank_refuses_what_it_cannot_do() -> None:
    tangent, data = decaying()
    with pytest.raises(DataError, match=r"iterator.*more than 10 rows; expected a loader.*6 times"):
        estimate.low_rank(tangent, Gaussian(), iter(data), rank=2, gram_rows=10)
    assert estimate.low_rank(tangent, Gaussian(), iter(data), rank=2).rank == 2
    for rank, passes in ((0, 6), (2, 1)):
        with pytest.raises(CurvatureError, match=r"expected a rank >= 1 and at least 2 passes"):
            estimate.low_rank(tangent, Gaussian(), data, rank=rank, passes=passes)


def test_estimators_leave_curvature_that_does_not_follow_the_model() -> None:
    """The weights may be trained on: rows are copies."""
    problem = build("tied_autoencoder")
    tangent = Tangent(problem.model, problem.space)
    curvature = estimate.dual(tangent, problem.likelihood, problem.batches)
    before = curvature.dense()
    with torch.no_grad():
        for parameter in problem.model.parameters():
            parameter.zero_()
    assert isinstance(curvature, Dual)
    close(Dual(curvature.rows).dense(), before)


# -- subsets --------------------------------------------------------------------------------------------------------


def numbered(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    """Data points that carry their number, in x and in y."""
    y = torch.arange(sum(sizes))
    return [(part.double().unsqueeze(1).repeat(1, 2), part) for part in y.split(list(sizes))]


def test_a_subset_holds_different_points_in_order_with_their_targets() -> None:
    found = estimate.subset(numbered(8, 8, 8, 5), 11, generator())
    y = torch.cat([y for _, y in found])
    assert [len(y) for _, y in found] == [8, 3]
    assert len(y) == len(y.unique()) == 11
    assert torch.equal(y, y.sort().values)
    assert torch.equal(torch.cat([x for x, _ in found])[:, 0], y.double())
    again = estimate.subset(iter(numbered(8, 8, 8, 5)), 11, generator())
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(found, again, strict=True))
    everything = estimate.subset(numbered(8, 8, 5), 21, generator())
    assert torch.equal(torch.cat([y for _, y in everything]), torch.arange(21))


def test_every_point_is_as_likely_as_any_other() -> None:
    """Counts over 1500 draws of 3 out of 10 within four standard errors, and so are those of pairs."""
    draws, seeds = 1500, generator(7)
    chosen = torch.zeros(draws, 10, dtype=torch.float64)
    data = numbered(4, 4, 2)
    for i in range(draws):
        chosen[i, torch.cat([y for _, y in estimate.subset(data, 3, seeds)])] = 1
    assert bool((chosen.sum(1) == 3).all())
    for frequency, chance in ((chosen.mean(0), 0.3), ((chosen.mT @ chosen / draws)[0, 1:], 3 * 2 / (10 * 9))):
        assert float((frequency - chance).abs().max()) < 4 * (chance * (1 - chance) / draws) ** 0.5


def test_a_subset_of_any_kind_of_input_is_a_copy() -> None:
    shared = torch.arange(3.0)
    x = torch.arange(20.0).reshape(10, 2)
    data = [({"a": x[i : i + 5], "b": (x[i : i + 5, 0], shared)}, x[i : i + 5, 1]) for i in (0, 5)]
    ((found, y),) = estimate.subset(data, 5, generator())
    chosen = y.clone()
    assert len(chosen.unique()) == 5
    x.zero_()
    shared.zero_()
    assert torch.equal(y, chosen)
    assert torch.equal(found["a"], torch.stack([y - 1, y], dim=1))
    assert torch.equal(found["b"][0], y - 1)
    assert torch.equal(found["b"][1], torch.arange(3.0))


def test_points_that_cannot_be_joined_stay_apart() -> None:
    """Sequences padded to different lengths."""
    data = [(torch.ones(4, length), torch.zeros(4)) for length in (3, 5, 5)]
    found = estimate.subset(data, 11, generator())
    assert [x.shape[1] for x, _ in found] == [3, 5, 5]
    assert sum(len(y) for _, y in found) == 11


def test_points_with_other_shared_tensors_stay_apart() -> None:
    """A mask [T, T] that belongs to the batch, not to a sample of it."""
    masks = [torch.eye(3), torch.eye(3), torch.ones(3, 3)]
    data = [((torch.full((4, 3), float(i)), mask), torch.full((4,), float(i))) for i, mask in enumerate(masks)]
    found = estimate.subset(data, 10, generator())
    assert sum(len(y) for _, y in found) == 10
    for (x, mask), y in found:
        for number in y.tolist():
            assert torch.equal(mask, masks[int(number)])
        assert torch.equal(x[:, 0], y)


def test_a_subset_of_more_than_there_is_is_refused() -> None:
    with pytest.raises(DataError, match=r"subset of 12 .* holds 11; expected at most"):
        estimate.subset(numbered(8, 3), 12)
    with pytest.raises(DataError, match=r"subset of 0 .*expected at least 1"):
        estimate.subset(numbered(8, 3), 0)


def test_a_subset_feeds_the_dual() -> None:
    problem = build("dict_input")
    tangent = Tangent(problem.model, problem.space)
    found = estimate.dual(tangent, problem.likelihood, estimate.subset(problem.batches, 2, generator()))
    assert isinstance(found, Dual)
    assert not isinstance(found, LowRank)
    assert found.rows.count < estimate.dual(tangent, problem.likelihood, problem.batches).rows.count


class TwoWays(nn.Module):
    """One square table, looked up by rows and by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.embedding(x[:, 0], self.table)) * F.embedding(x[:, 1], self.table.T)


def test_a_table_that_is_looked_up_by_rows_and_by_columns() -> None:
    """Equal indices are equal entries only where both look up the same way."""
    model, x = TwoWays(), torch.tensor([[0, 0], [1, 2], [2, 1], [3, 3], [0, 1]])
    y = torch.zeros(5, 4, dtype=torch.float64)
    dual = estimate.dual(Tangent(model), Gaussian(), [(x, y)])
    jacobian = torch.func.jacrev(lambda t: torch.func.functional_call(model, {"table": t}, (x,)))(model.table.detach())
    rows = jacobian.reshape(20, 16)
    prior = torch.linspace(1, 2, 16, dtype=torch.float64)
    torch.testing.assert_close(dual.dense(), rows.T @ rows, rtol=1e-9, atol=1e-12)
    precision = dual.with_prior(prior)
    expected = torch.logdet(rows.T @ rows + torch.diag(prior))
    torch.testing.assert_close(precision.logdet(), expected, rtol=1e-9, atol=0)
