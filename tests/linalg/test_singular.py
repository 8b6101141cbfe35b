"""A prior precision of zero: refused wherever the curvature is singular, in every structure and from every start."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lapwing.errors import CurvatureError
from lapwing.laplace import BaseLaplace, Laplace
from lapwing.laplace.factory import CLASSES
from lapwing.linalg import CorrectedKronecker, EigenColumns, Kronecker, MatrixLayout, Term
from lapwing.linalg.kronecker import structure as eigenbasis

STRUCTURES = [structure for subset, structure in CLASSES if subset == "all"]
SEEDS = range(4)


def skip_unless_singular(la: BaseLaplace) -> None:
    """A diagonal of what the data see in part is definite, whatever the structure is called: nothing to refuse."""
    dense = la.curvature.dense().double()
    if int(torch.linalg.matrix_rank(dense, rtol=1e-5, hermitian=True)) == len(dense):
        pytest.skip("the curvature is definite")


def network(dtype: torch.dtype, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("likelihood", ["regression", "classification"])
def test_a_singular_curvature_is_refused_from_every_start(likelihood: str, structure: str, dtype: torch.dtype) -> None:
    """Fewer rows than parameters, or logits that may all be shifted: by the sign of rounding some passed."""
    for seed in SEEDS:
        torch.manual_seed(seed)
        model = network(dtype, 3)
        few = 2 if likelihood == "regression" else 40
        x = torch.randn(few, 3, dtype=dtype)
        y = torch.randint(3, (few,)) if likelihood == "classification" else torch.randn(few, 3, dtype=dtype)
        la = Laplace(model, likelihood, "all", structure, prior_precision=0.0)
        la.fit([(x, y)])
        skip_unless_singular(la)
        with pytest.raises(CurvatureError, match="prior precision"):
            la(x)
        with pytest.raises(CurvatureError, match="prior precision"):
            la.optimize_prior_precision(
                method="gridsearch", val_loader=[(x, y)], log_prior_prec_min=-400, log_prior_prec_max=0, grid_size=2
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_one_direction_that_the_data_do_not_see(structure: str, dtype: torch.dtype) -> None:
    """Its eigenvalue is one rounding error, positive from every second start, and was then taken for curvature."""
    for seed in range(10):
        torch.manual_seed(seed)
        x = torch.randn(30, 2, dtype=dtype)
        x = torch.cat([x, x.sum(1, keepdim=True)], 1)
        la = Laplace(nn.Linear(3, 1).to(dtype), "regression", "all", structure, prior_precision=0.0)
        la.fit([(x, x[:, :1])])
        skip_unless_singular(la)
        with pytest.raises(CurvatureError, match="prior precision"):
            la(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("structure", ["full", "blocks", "kron", "ekfac"])
def test_a_definite_curvature_needs_no_prior(structure: str, dtype: torch.dtype) -> None:
    for seed in SEEDS:
        torch.manual_seed(seed)
        model = nn.Linear(3, 2).to(dtype)
        x = torch.randn(40, 3, dtype=dtype)
        la = Laplace(model, "regression", "all", structure, prior_precision=0.0)
        la.fit([(x, torch.randn(40, 2, dtype=dtype))])
        design = torch.cat([x, torch.ones(40, 1, dtype=dtype)], 1).double()
        expected = (design @ torch.linalg.inv(design.mT @ design) * design).sum(1)
        _, variance = la(x, diagonal_output=True)
        torch.testing.assert_close(variance[:, 0].double(), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("structure", ["full", "blocks", "kron", "ekfac"])
def test_a_prior_on_some_layers_only(structure: str) -> None:
    """Zero for the first layer, which two data points do not determine."""
    for seed in SEEDS:
        torch.manual_seed(seed)
        model = network(torch.float64, 1)
        x = torch.randn(2, 3, dtype=torch.float64)
        la = Laplace(model, "regression", "all", structure)
        la.fit([(x, x[:, :1])])
        la.prior_precision = torch.tensor([0.0, 0.0, 1.0, 1.0])
        with pytest.raises(CurvatureError, match="prior precision"):
            la(x)
        la.prior_precision = torch.tensor([1.0, 1.0, 1.0, 0.0])  # the last bias: one number, always determined
        assert bool((la(x, diagonal_output=True)[1] > 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_a_large_sum_of_products_that_share_a_null_space(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its diagonal in an eigenbasis is no sum of squares, and rounding gives zeros of either sign."""
    monkeypatch.setattr(eigenbasis, "DENSE_LIMIT", 0)
    layout = MatrixLayout(0, (4, 5), (0, 1), groups=1, rows=4, cols=5)

    def product(seen: torch.Tensor) -> Kronecker:
        inside, outputs = (torch.randn(n, 9, dtype=dtype) for n in (seen.shape[1], 4))
        inputs = seen @ inside
        return Kronecker(layout, (Term((inputs @ inputs.mT)[None], (outputs @ outputs.mT)[None], 9.0),))

    for seed in range(20):
        torch.manual_seed(seed)
        directions = torch.linalg.qr(torch.randn(5, 5, dtype=dtype))[0]
        singular = product(directions[:, :3]) + product(directions[:, :3])
        for each in (singular, singular.parts[0].in_eigenbasis()):
            with pytest.raises(CurvatureError, match="positive definite"):
                each.with_prior(0.0)
        definite = product(directions) + product(directions)
        assert bool(definite.with_prior(0.0).logdet().isfinite())


def test_a_wide_corrected_block_is_judged_by_the_size_of_its_factors() -> None:
    """Not by the number of its weights: in float32 3,600 made zeros of all below 2e-5 of the largest."""
    values = torch.logspace(-6, 0, 3600).reshape(1, 60, 60)
    layout = MatrixLayout(0, (60, 60), (0, 1), groups=1, rows=60, cols=60)
    block = CorrectedKronecker(layout, None, (EigenColumns(0, None, values),))
    torch.testing.assert_close(block.with_prior(0.0).logdet(), values.log().sum())
