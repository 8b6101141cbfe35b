"""Large dense matrices, by Cholesky in place and in panels: the same numbers as an explicit inverse."""

from __future__ import annotations

from weakref import ref

import pytest
import torch
from torch import Tensor

from lapwing.errors import CurvatureError
from lapwing.linalg import Dense, checks, dense
from lapwing.linalg.dense import CholeskyPrecision, EigenPrecision
from lapwing.linalg.rows import DenseRows
from memory import Peak

P = 11


@pytest.fixture(autouse=True)
def _small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "LARGE", 5)
    monkeypatch.setattr(dense, "PANEL", 4)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def matrix() -> Tensor:
    rows = normal(6, P)
    return rows.mT @ rows


@pytest.mark.parametrize("prior", [0.3, torch.linspace(0.2, 2, P, dtype=torch.float64)], ids=["one", "each"])
@pytest.mark.parametrize("scale", [1, 2.5])
def test_all_of_a_precision_is_that_of_the_inverse(prior: float | Tensor, scale: float) -> None:
    kept = matrix()
    curvature = Dense(kept) * scale
    before = curvature.matrix.clone()
    precision = curvature.with_prior(prior)
    assert isinstance(precision, CholeskyPrecision)
    exact = scale * matrix() + torch.as_tensor(prior, dtype=torch.float64).expand(P).diag()
    inverse = torch.linalg.inv(exact)
    rows = normal(2, 3, P, seed=1)
    close = {"rtol": 1e-9, "atol": 1e-12}
    torch.testing.assert_close(precision.variance(), inverse.diagonal(), **close)
    torch.testing.assert_close(precision.logdet(), torch.logdet(exact), **close)
    torch.testing.assert_close(precision.solve(rows[0]), rows[0] @ inverse, **close)
    torch.testing.assert_close(precision.mv(rows[0]), rows[0] @ exact, **close)
    found = precision.quadratic([DenseRows(0, rows)])
    torch.testing.assert_close(found, torch.einsum("rnp, pq, snq -> nrs", rows, inverse, rows), **close)
    squares = torch.einsum("rnp, pq, rnq -> nr", rows, inverse, rows)
    torch.testing.assert_close(precision.squares([DenseRows(0, rows)]), squares, **close)
    noise = torch.randn(5, P, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    drawn = precision.draw(5, torch.Generator().manual_seed(2))
    torch.testing.assert_close((drawn @ exact * drawn).sum(1), noise.square().sum(1), **close)
    assert torch.equal(curvature.matrix, before)  # the factor is made in the place of a copy
    assert torch.equal(kept, matrix())


def test_derivatives_sweeps_and_many_priors_take_eigenvectors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "MANY", 3)
    curvature = Dense(matrix())
    kinds = [type((curvature * 2.0).with_prior(0.1 * i)) for i in range(1, 6)]
    assert kinds == [CholeskyPrecision] * 3 + [EigenPrecision] * 2
    asked = Dense(matrix())
    delta = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(asked.with_prior(delta).logdet(), delta)
    inverse = torch.linalg.inv(matrix() + 0.5 * torch.eye(P, dtype=torch.float64))
    torch.testing.assert_close(slope, inverse.trace(), rtol=1e-9, atol=0)
    assert isinstance(asked.with_prior(0.5), EigenPrecision)  # they are there now
    each = torch.full((P,), 0.5, dtype=torch.float64, requires_grad=True)
    (slopes,) = torch.autograd.grad(Dense(matrix()).with_prior(each).logdet(), each)
    torch.testing.assert_close(slopes, inverse.diagonal(), rtol=1e-9, atol=0)
    (slopes,) = torch.autograd.grad(Dense(matrix()).with_prior(each).variance().sum(), each)
    torch.testing.assert_close(slopes, -(inverse @ inverse).diagonal(), rtol=1e-9, atol=0)


def test_a_factor_in_use_serves_the_same_prior_and_is_not_kept_for_it() -> None:
    curvature = Dense(matrix())
    first = curvature.with_prior(0.3)
    assert curvature.with_prior(0.3) is first
    assert curvature.with_prior(torch.tensor(0.3, dtype=torch.float64)) is first
    assert curvature.with_prior(0.4) is not first
    each = torch.full((P,), 0.3, dtype=torch.float64)
    other = curvature.with_prior(each)
    assert other is not first
    kept, logdet = ref(other), other.logdet()
    del other
    assert kept() is None
    torch.testing.assert_close(curvature.with_prior(0.3).logdet(), logdet, rtol=1e-12, atol=0)


def test_a_precision_takes_one_more_matrix_and_its_uses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 600
    monkeypatch.setattr(dense, "LARGE", 64)
    monkeypatch.setattr(dense, "PANEL", 16)
    monkeypatch.setattr(checks, "PART", 4096)
    rows = normal(20, size)
    curvature, v = Dense(rows.mT @ rows), normal(2, size)
    one = 8 * size**2
    with Peak() as made:
        precision = curvature.with_prior(0.3)
    assert one <= made.bytes < 1.2 * one
    uses = {
        "solve": lambda: precision.solve(v),
        "draw": lambda: precision.draw(2),
        "logdet": precision.logdet,
        "variance": precision.variance,
        "again": lambda: curvature.with_prior(0.3).logdet(),
        "rows": lambda: precision.quadratic([DenseRows(0, v.unsqueeze(1))]),
    }
    for name, use in uses.items():
        with Peak() as made:
            use()
        assert made.bytes < 0.2 * one, name


def test_rounding_below_zero_is_clamped_as_in_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum in float32 whose zeros came out a little below: no Cholesky factor, and nothing wrong with the data."""
    values = torch.tensor([1e6, 10.0, *[-0.05] * (P - 2)])
    vectors = torch.linalg.qr(normal(P, P))[0].float()
    rounded = Dense((vectors * values) @ vectors.mT)
    precision = rounded.with_prior(0.01)
    assert isinstance(precision, EigenPrecision)
    assert float(precision.values.min()) == pytest.approx(0.01)
    each = torch.linspace(0.01, 0.02, P)
    several = rounded.with_prior(each)
    clamped = (vectors.double() * values.double().clamp_min(0)) @ vectors.mT.double() + each.double().diag()
    assert float(several.logdet()) == pytest.approx(float(clamped.logdet()), rel=1e-2)
    monkeypatch.setattr(dense, "MOST", P - 1)
    for prior in (0.01, each):
        with pytest.raises(CurvatureError, match="larger prior precision"):
            Dense(rounded.matrix).with_prior(prior)


def test_a_prior_of_zero_and_negative_curvature_are_refused() -> None:
    with pytest.raises(CurvatureError, match="Use a larger prior precision"):
        Dense(matrix()).with_prior(0.0)
    with pytest.raises(CurvatureError, match="not positive definite"):
        Dense(-matrix()).with_prior(0.1)
    with pytest.raises(CurvatureError, match="not positive definite"):
        Dense(-matrix()).with_prior(torch.full((P,), 0.1, dtype=torch.float64))
    broken = matrix()
    broken[2, 3] = float("nan")
    with pytest.raises(CurvatureError, match="NaN"):
        Dense(broken).with_prior(0.1)
