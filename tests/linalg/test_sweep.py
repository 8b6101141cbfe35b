"""Sweeps over prior precisions by interpolation in the logarithm of the spectrum: against the sum, spelled out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from contracts import generator, normal
from lapwing.linalg import Kronecker, MatrixLayout, OuterRows, Term
from lapwing.linalg.kronecker import sweep
from lapwing.linalg.kronecker.sweep import NEGLIGIBLE, STEP, node_sweep, outer_sweep, spread

TOLERANCE = 1e-6
"""What the module states; relative, for every entry on its own."""

F64 = torch.float64
SPECTRA = {
    "flat": torch.ones(40, dtype=F64),
    "one eigenvalue": torch.tensor([3.0], dtype=F64),
    "all zero": torch.zeros(12, dtype=F64),
    "zeros and a few": torch.cat([torch.zeros(30, dtype=F64), torch.logspace(-3, 2, 10, dtype=F64)]),
    "thirty decades": torch.logspace(-25, 5, 60, dtype=F64),
    "as small as numbers get": torch.tensor([0.0, 1e-300, 1e-200, 1e-30, 1.0], dtype=F64),
    "as large as numbers get": torch.tensor([1e-12, 1.0, 1e60, 1e120], dtype=F64),
    "two clusters": torch.cat([scale * (1 + torch.arange(20, dtype=F64) / 100) for scale in (1e-7, 1e7)]),
    "on the nodes": (STEP * torch.arange(30, dtype=F64)).exp(),
}


def without_sharing(left: Tensor, right: Tensor) -> OuterRows:
    groups, rows, cols = *left.shape[2:], right.shape[-1]
    layout = MatrixLayout(0, (groups, rows, cols), (0, 1, 2), groups, rows, cols)
    return OuterRows(layout, left.unsqueeze(2), right.unsqueeze(1))


def literal(rows: OuterRows, row_values: Tensor, col_values: Tensor, precisions: Tensor) -> Tensor:
    inverse = 1 / (row_values[:, :, None] * col_values[:, None, :] + precisions[:, None, None, None])
    left, right = rows.left[:, :, 0].expand(-1, len(rows.right), -1, -1), rows.right[:, 0]
    return torch.einsum("r n k o, n k i, p k o i -> p n r", left.square(), right.square(), inverse)


def nodes(row_values: Tensor, col_values: Tensor, precisions: Tensor) -> tuple[sweep.Nodes, sweep.Nodes]:
    floor = NEGLIGIBLE * float(precisions.min())
    return (
        spread(row_values, floor / max(float(col_values.max()), 1e-300)),
        spread(col_values, floor / max(float(row_values.max()), 1e-300)),
    )


@pytest.mark.parametrize("rows", SPECTRA)
@pytest.mark.parametrize("cols", SPECTRA)
def test_nodes_are_right_for_every_spectrum(rows: str, cols: str) -> None:
    """Also where all mass lies on a single eigenvalue, large, small or zero: each entry is right on its own."""
    row_values, col_values = SPECTRA[rows][None], SPECTRA[cols][None]
    precisions = torch.logspace(-8, 8, 33, dtype=torch.float64)
    left = torch.cat(
        [normal(generator(1), 1, 1, row_values.shape[1]), torch.eye(row_values.shape[1]).double()[:, None]]
    )
    right = torch.cat([normal(generator(2), 1, col_values.shape[1]), torch.eye(col_values.shape[1]).double()])
    outer = without_sharing(left.unsqueeze(2), right.unsqueeze(1))
    found = node_sweep(outer, *nodes(row_values, col_values, precisions), precisions)
    torch.testing.assert_close(found, literal(outer, row_values, col_values, precisions), rtol=TOLERANCE, atol=0)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.integers(0, 10_000), st.integers(1, 3), st.booleans(), st.floats(-12, 12), st.floats(0, 14))
def test_nodes_are_right_for_random_spectra(seed: int, groups: int, same: bool, middle: float, width: float) -> None:
    g = generator(seed)
    row_values, col_values = (10 ** (width * (torch.rand(groups, d, generator=g).double() - 0.5)) for d in (7, 9))
    precisions = 10 ** (middle + torch.linspace(-4, 4, 5).double())
    outer = without_sharing(normal(g, 2, 1 if same else 3, groups, 7), normal(g, 3, groups, 9))
    found = node_sweep(outer, *nodes(row_values, col_values, precisions), precisions)
    torch.testing.assert_close(found, literal(outer, row_values, col_values, precisions), rtol=TOLERANCE, atol=0)


def test_interpolation_weights_sum_to_one() -> None:
    found = spread(torch.logspace(-5, 5, 50).double()[None], 1e-3)
    torch.testing.assert_close(found.weights.sum(-1), (~found.zero).double(), rtol=1e-12, atol=1e-12)
    assert int(found.zero.sum()) > 0


def test_a_precision_of_zero_is_right_where_no_eigenvalue_is() -> None:
    row_values, col_values = torch.logspace(-2, 2, 20).double()[None], torch.logspace(-3, 1, 30).double()[None]
    precisions = torch.tensor([0.0, 1.0], dtype=torch.float64)
    outer = without_sharing(normal(generator(1), 2, 3, 1, 20), normal(generator(2), 3, 1, 30))
    found = node_sweep(outer, *nodes(row_values, col_values, precisions), precisions)
    torch.testing.assert_close(found, literal(outer, row_values, col_values, precisions), rtol=TOLERANCE, atol=0)


def test_a_wide_layer_is_swept_by_nodes_and_a_narrow_one_literally(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(sweep, "node_sweep", lambda *args: calls.append(1) or node_sweep(*args))
    precisions = torch.logspace(-4, 4, 100).double()
    for rows, cols, expected in ((200, 300, 1), (3, 4, 0)):
        calls.clear()
        row_values = torch.logspace(-6, 1, rows).double()[None]
        col_values = torch.logspace(-6, 1, cols).double()[None]
        outer = without_sharing(normal(generator(1), 5, 20, 1, rows), normal(generator(2), 20, 1, cols))
        found = outer_sweep(outer, row_values, col_values, precisions)
        torch.testing.assert_close(found, literal(outer, row_values, col_values, precisions), rtol=TOLERANCE, atol=0)
        assert len(calls) == expected


def test_negative_eigenvalues_are_swept_literally() -> None:
    """Of a curvature that data were taken from: there is no logarithm."""
    row_values, col_values = torch.linspace(-0.5, 1, 200).double()[None], torch.linspace(0, 1, 200).double()[None]
    precisions = torch.linspace(1, 2, 100).double()
    outer = without_sharing(normal(generator(1), 2, 3, 1, 200), normal(generator(2), 3, 1, 200))
    found = outer_sweep(outer, row_values, col_values, precisions)
    torch.testing.assert_close(found, literal(outer, row_values, col_values, precisions), rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_wide_block_of_low_rank_is_swept_as_the_loop_does(dtype: torch.dtype) -> None:
    """Fewer data than inputs, exact zeros among them, as pixels that are always dark."""
    g = generator(3)
    layout = MatrixLayout(0, (120, 300), (0, 1), 1, 120, 300, bias=120 * 300)
    a = torch.randn(60, 301, dtype=dtype, generator=g) * (torch.rand(301, generator=g) < 0.7)
    b = torch.randn(60, 120, dtype=dtype, generator=g) * 10 ** torch.linspace(-4, 0, 120, dtype=dtype)
    curvature = Kronecker(layout, (Term((a.mT @ a)[None], (b.mT @ b)[None], 60.0),))
    left, right = torch.randn(4, 15, 1, 1, 120, dtype=dtype, generator=g), torch.randn(15, 1, 1, 301, dtype=dtype)
    rows = [OuterRows(layout, left, right)]
    precisions = torch.logspace(-4, 4, 50, dtype=dtype)
    expected = torch.stack([curvature.with_prior(d).squares(rows) for d in precisions])
    found = curvature.sweep(rows, precisions)
    torch.testing.assert_close(found, expected, rtol=TOLERANCE if dtype == torch.float64 else 2e-5, atol=0)


def test_a_sweep_by_nodes_is_differentiable_in_the_precisions() -> None:
    values_a, values_g = torch.logspace(-4, 2, 80, dtype=F64)[None], torch.logspace(-3, 1, 60, dtype=F64)[None]
    outer = without_sharing(normal(generator(1), 2, 3, 1, 60), normal(generator(2), 3, 1, 80))
    precisions = torch.tensor([0.1, 1.0, 7.0], dtype=torch.float64, requires_grad=True)
    found = node_sweep(outer, *nodes(values_g, values_a, precisions.detach()), precisions)
    (gradient,) = torch.autograd.grad(found.sum(), precisions)
    (expected,) = torch.autograd.grad(literal(outer, values_g, values_a, precisions).sum(), precisions)
    torch.testing.assert_close(gradient, expected, rtol=TOLERANCE, atol=0)
