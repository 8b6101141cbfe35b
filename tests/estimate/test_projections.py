"""Random projections S v of the output Hessian's root: unbiased for the GGN, also where that is not the Fisher."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oracle
import problems
from estimator_checks import LAYOUTS, LIKELIHOODS, close, errors_of_means, parts, seeded, setting
from lapwing import estimate
from lapwing.errors import DataError
from lapwing.estimate import last_layer
from lapwing.likelihoods import BernoulliMixture, Categorical, Gaussian
from lapwing.tangent import Tangent
from lapwing.tangent.features import FeatureTangent

DISTRIBUTIONS = ["rademacher", "gaussian"]


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("name", ["mlp_gaussian", "sequence_categorical"])
def test_projections_are_unbiased_and_their_error_falls(name: str, distribution: str) -> None:
    """C07: within four standard errors of the GGN, which fall as 1 / sqrt(samples)."""
    problem = problems.build(name)
    exact = oracle.ggn(problem.model, problem.likelihood, problem.x, problem.y)
    tangent = Tangent(problem.model)

    def draws(count: int, generator: torch.Generator) -> Tensor:
        cotangents = estimate.projections(count, distribution)
        arguments: dict[str, Any] = {"cotangents": cotangents, "generator": generator}
        return estimate.full(tangent, problem.likelihood, problem.batches, **arguments).dense()

    errors_of_means(draws, exact, (4, 64))


@pytest.mark.parametrize("name", ["mlp_gaussian", "sequence_categorical"])
def test_the_kronecker_output_factor_is_unbiased_for_that_of_kflr(name: str) -> None:
    problem = problems.build(name)
    tangent = Tangent(problem.model)
    exact = estimate.kflr(tangent, problem.likelihood, problem.batches).dense()

    def draws(count: int, generator: torch.Generator) -> Tensor:
        arguments: dict[str, Any] = {"cotangents": estimate.projections(count), "generator": generator}
        return estimate.kflr(tangent, problem.likelihood, problem.batches, **arguments).dense()

    errors_of_means(draws, exact, (4, 36))


def test_they_converge_to_the_ggn_where_drawn_targets_converge_to_another_matrix() -> None:
    """The Fisher of a mixture of Bernoullis is not its Hessian."""
    model, likelihood, x, y = setting("BernoulliMixture", "[B, T, C]")
    assert isinstance(likelihood, BernoulliMixture)
    ggn = oracle.ggn(model, likelihood, x, y)
    fisher = oracle.ggn(model, likelihood, x, y, "fisher")
    apart = float((ggn - fisher).norm())

    def found(cotangents: Any) -> Tensor:
        return estimate.full(Tangent(model), likelihood, [(x, y)], cotangents=cotangents, generator=seeded(0)).dense()

    projected, sampled = found(estimate.projections(1000)), found(estimate.monte_carlo(1000))
    assert float((projected - ggn).norm()) < 0.2 * apart
    assert float((sampled - fisher).norm()) < 0.4 * apart
    assert float((sampled - ggn).norm()) > 0.6 * apart


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_every_likelihood_and_layout_in_one_pass_per_draw(kind: str, layout: str) -> None:
    """Also without a sampler; and however many positions there are."""
    model, likelihood, x, y = setting(kind, layout)
    f = model(x).detach()
    columns = estimate.projections(3)(likelihood, f, y, seeded(0))
    assert columns.count == 3
    (drawn,) = columns.chunked(3)
    assert drawn.shape == (3, *f.shape)
    hessian = oracle.output_hessian(likelihood, f, y)
    (many,) = estimate.projections(1000)(likelihood, f, y, seeded(1)).chunked(1000)
    many = many.flatten(2)
    found = torch.einsum("r n c, r n d -> n c d", many, many)
    assert float((found - hessian).norm() / hessian.norm()) < 0.2


def test_signs_are_exact_where_the_hessian_is_diagonal_and_each_output_has_its_own_weight() -> None:
    """v v^T has a diagonal of ones for signs, so that nothing is random in the diagonal of a linear layer."""
    model = nn.Linear(3, 2).double()
    x, y = torch.randn(5, 3).double(), torch.randn(5, 2).double()
    exact = estimate.diagonal(Tangent(model), Gaussian(0.5), [(x, y)]).diagonal()
    found = estimate.diagonal(Tangent(model), Gaussian(0.5), [(x, y)], cotangents=estimate.projections())
    close(found.diagonal(), exact)


@pytest.mark.parametrize("layout", ["tokens", "pixels"])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_positions_without_a_target_stay_zero(layout: str, distribution: str) -> None:
    torch.set_default_dtype(torch.float64)
    if layout == "tokens":
        model, x, y = nn.Linear(2, 3), torch.randn(3, 4, 2), torch.randint(3, (3, 4))
    else:
        model, x, y = nn.Conv2d(2, 3, 1), torch.randn(3, 2, 2, 2), torch.randint(3, (3, 2, 2))
    y[1:, 0] = -100
    likelihood = Categorical(ignore_index=-100)
    cotangents = estimate.projections(5, distribution)
    (drawn,) = cotangents(likelihood, model(x).detach(), y, None).chunked(5)
    kept = (y != -100).unsqueeze(-1 if layout == "tokens" else 1)
    assert not drawn.masked_select(~kept.expand_as(drawn[0])).any()
    assert bool(drawn.masked_select(kept.expand_as(drawn[0])).any())
    nothing = torch.full_like(y, -100)
    assert not estimate.full(Tangent(model), likelihood, [(x, nothing)], cotangents=cotangents).dense().any()


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_every_data_point_and_batch_has_fresh_draws(distribution: str) -> None:
    """Forty copies of one point have the full rank of the Hessian, in one batch and in many."""
    model = nn.Linear(1, 3, bias=False).double()
    x, y = torch.ones(40, 1).double(), torch.zeros(40, dtype=torch.long)
    for batches in ([(x, y)], parts(x, y, [1] * 40), parts(x, y, [8] * 5)):
        cotangents = estimate.projections(1, distribution)
        full = estimate.full(Tangent(model), Categorical(), batches, cotangents=cotangents, generator=seeded(0))
        assert int(torch.linalg.matrix_rank(full.dense(), rtol=1e-6)) == 2


@pytest.mark.parametrize("kind", ["full", "diagonal", "kron"])
def test_last_layers_take_them(kind: str) -> None:
    """The same draws give the same curvature, whether rows come from features or from the network."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, y = torch.randn(6, 3).double(), torch.randint(3, (6,))
    whole = {"full": estimate.full, "diagonal": estimate.diagonal, "kron": estimate.kflr}[kind]
    tangent = Tangent(model, Tangent(model).space.select(module="2"))
    features = FeatureTangent(model)
    features.at(x)
    arguments = [(x, y)], estimate.projections(3)
    expected = whole(tangent, Categorical(), arguments[0], cotangents=arguments[1], generator=seeded(2))
    found = getattr(last_layer, kind)(
        features, Categorical(), arguments[0], cotangents=arguments[1], generator=seeded(2)
    )
    close(found.dense(), expected.dense())


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(DataError, match="samples is 0; expected at least 1"):
        estimate.projections(0)
    with pytest.raises(DataError, match=r"unknown distribution 'uniform'.*expected one of.*rademacher"):
        estimate.projections(1, "uniform")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_a_likelihood_that_says_so_has_a_diagonal_hessian_and_projections_with_its_root(name: str, layout: str) -> None:
    """S v with the whole root, from the same random numbers."""
    model, likelihood, x, y = setting(name, layout)
    f = model(x).detach()
    matrix, diagonal = likelihood.psd_hessian(f, y), likelihood.to_last(likelihood.hessian_diagonal(f, y))
    if likelihood.diagonal:
        close(matrix, torch.diag_embed(diagonal))
    root = likelihood.hessian_sqrt(f, y)
    v = torch.randint(2, (*root.shape[:-2], root.shape[-1]), generator=seeded(3)) * 2 - 1
    found = estimate.projections(1)(likelihood, f, y, seeded(3)).take(slice(0, 1))[0]
    close(found, likelihood.from_last(torch.einsum("... c r, ... r -> ... c", root, v.to(root)), f.shape))
