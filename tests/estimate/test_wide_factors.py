"""Factors wider than `wide_limit` are kept as their diagonal: exact in the block's diagonal, and nowhere formed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing
import oracle
import problems
from lapwing import Laplace, estimate
from lapwing.errors import ParameterError
from lapwing.likelihoods import Categorical, Gaussian
from lapwing.linalg import Blocks, Kronecker
from lapwing.tangent import Tangent
from memory import Largest

LIMIT = 3


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12 * float(expected.abs().max() + 1e-30))


def narrowed(factor: Tensor) -> Tensor:
    """What is expected of a factor [k, d, d], or of one that is diagonal anyway."""
    return factor.diagonal(dim1=1, dim2=2) if factor.dim() == 3 and factor.shape[-1] > LIMIT else factor


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize(
    "name", ["mlp", "conv2d_grouped", "conv_transpose2d", "embedding", "tied_autoencoder", "attention_linears"]
)
@pytest.mark.parametrize("estimator", ["kflr", "kfac", "kfra"])
def test_terms_are_the_diagonals_of_those_that_are_kept_whole(estimator: str, name: str, sharing: str) -> None:
    problem = problems.build(name)
    if estimator == "kfra" and name == "attention_linears":
        pytest.skip("kfra has no rule for products of two values")

    def found(**options: Any) -> Blocks:
        if estimator == "kfac":
            options["generator"] = torch.Generator().manual_seed(0)
        run = getattr(estimate, estimator)
        return run(Tangent(problem.model), problem.likelihood, [(problem.x, problem.y)], sharing=sharing, **options)

    whole, wide = found(), found(wide_limit=LIMIT)
    compared = 0
    for before, after in zip(whole.blocks, wide.blocks, strict=True):
        if not isinstance(before.curvature, Kronecker):
            close(after.curvature.dense(), before.curvature.dense())
            continue
        assert isinstance(after.curvature, Kronecker)
        for ours, theirs in zip(after.curvature.terms, before.curvature.terms, strict=True):
            close(ours.cols, narrowed(theirs.cols))
            close(ours.rows, narrowed(theirs.rows))
            assert ours.count == theirs.count
            compared += ours.cols.dim() == 2 or ours.rows.dim() == 2
        if len(before.curvature.terms) == 1:
            close(after.curvature.diagonal(), before.curvature.diagonal())
    assert compared


def test_a_factor_of_exactly_the_limit_is_whole() -> None:
    model = nn.Linear(4, 3).double()  # five columns with the bias
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2])
    for limit, (cols, rows) in {5: (3, 3), 4: (2, 3), 3: (2, 3), 2: (2, 2)}.items():
        (block,) = estimate.kflr(Tangent(model), Categorical(), [(x, y)], wide_limit=limit).blocks
        assert isinstance(block.curvature, Kronecker)
        (term,) = block.curvature.terms
        assert (term.cols.dim(), term.rows.dim()) == (cols, rows)
    with pytest.raises(ParameterError, match="wide_limit is -1; expected"):
        estimate.kflr(Tangent(model), Categorical(), [(x, y)], wide_limit=-1)


def test_ekfac_of_two_diagonal_factors_is_the_exact_diagonal() -> None:
    problem = problems.build("mlp")
    exact = oracle.ggn(problem.model, problem.likelihood, problem.x, problem.y).diagonal()
    found = estimate.ekfac(Tangent(problem.model), problem.likelihood, [(problem.x, problem.y)], wide_limit=0)
    close(found.dense(), exact.diag())


@pytest.mark.parametrize("options", [{}, {"bias": "separate"}, {"damping": True}, {"damping": "plain"}])
@pytest.mark.parametrize("structure", ["kron", "ekfac"])
def test_predictions_samples_and_files(structure: str, options: dict[str, Any], tmp_path: Path) -> None:
    if structure == "ekfac" and "damping" in options:
        pytest.skip("ekfac has no split damping")
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = torch.randn(9, 5, dtype=torch.float64), torch.randn(9, 2, dtype=torch.float64)
    la = Laplace(model, "regression", "all", structure, wide_limit=LIMIT, prior_precision=0.8, **options)
    la.fit([(x[:5], y[:5]), (x[5:], y[5:])])
    precision = la.posterior_precision.mv(torch.eye(34, dtype=torch.float64))
    posterior = torch.linalg.inv(precision)
    if "damping" not in options:
        close(precision, la.H.dense() + 0.8 * torch.eye(34, dtype=torch.float64))
    J = oracle.jacobian(model, x[:3])
    found = la(x[:3])[1]
    close(found, torch.einsum("n c p, p q, n d q -> n c d", J, posterior, J))
    sign, logdet = torch.linalg.slogdet(precision)
    assert sign == 1
    close(la.log_det_posterior_precision, logdet)
    la.save(tmp_path / "la.lapwing")
    again = lapwing.load(tmp_path / "la.lapwing", model)
    assert torch.equal(again(x[:3])[1], found)


@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian()])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("estimator", ["exact", "mc"])
def test_the_closed_form_of_a_last_layer_is_the_same(likelihood: Any, sharing: str, estimator: str) -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    x = torch.randn(7, 3, dtype=torch.float64)
    y = torch.arange(7) % 4 if isinstance(likelihood, Categorical) else torch.randn(7, 4, dtype=torch.float64)
    fits = []
    for limit in (LIMIT, 100):
        given: dict[str, Any] = {"sharing": sharing, "wide_limit": limit, "estimator": estimator}
        la = Laplace(model, likelihood, "last_layer", "kron", **given)
        torch.manual_seed(3)
        la.fit([(x, y)])
        fits.append(la.H.blocks[0].curvature.terms[0])
    wide, whole = fits
    close(wide.cols, whole.cols.diagonal(dim1=1, dim2=2))
    close(wide.rows, whole.rows.diagonal(dim1=1, dim2=2))


def test_a_vocabulary_takes_no_matrix_of_its_size() -> None:
    """20,000 words: one factor would be 1.6 GB."""
    words, width = 20_000, 8
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, words))
    x, y = torch.randn(6, width), torch.arange(6)

    with Largest() as largest:
        Laplace(model, "classification", "all", "kron", estimator="mc").fit([(x, y)])
    assert largest.numel < 10 * words * width, largest.where
