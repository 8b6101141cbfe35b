"""Matrix-free: every error that is stated holds against the dense twin, and what did not converge is said."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from contracts import close, generator, normal
from lapwing.errors import CurvatureError, LapwingWarning
from lapwing.linalg import DenseRows, Diagonal, Effort, MatrixFree
from lapwing.linalg.krylov import conjugate_gradients, lanczos
from lapwing.linalg.matrix_free import DenseProducts

SIZE, ROWS = 60, 40


def rows(seed: int = 0, spread: float = 2.0) -> Tensor:
    """Rows whose curvature has eigenvalues over several orders of magnitude."""
    g = generator(seed)
    scales = torch.logspace(-spread, 1, SIZE, dtype=torch.float64)
    return normal(g, ROWS, SIZE) * scales


def made(effort: Effort | None = None, near: bool = False) -> tuple[MatrixFree, Tensor]:
    found = rows()
    matrix = found.mT @ found
    effort = effort or Effort(1e-10)
    return MatrixFree(DenseProducts(found), effort, Diagonal(matrix.diagonal()) if near else None), matrix


@pytest.mark.parametrize("near", [False, True], ids=["plain", "diagonal"])
def test_residuals_are_the_true_ones_of_every_column(near: bool) -> None:
    curvature, matrix = made(Effort(1e-6, block=3), near)
    precision = curvature.with_prior(0.5)
    b = normal(generator(1), 7, SIZE)
    b[2] = 0
    b[4] *= 1e6
    found = precision.solved(b)
    residual = b - found.value @ (matrix + 0.5 * torch.eye(SIZE))
    torch.testing.assert_close(found.residual, residual, rtol=0, atol=1e-12 * 1e6 * 1e4)
    norm = residual.norm(dim=1) / b.norm(dim=1)
    assert bool((norm[[0, 1, 3, 4, 5, 6]] <= 1e-6).all())
    assert bool(found.converged.all())
    assert not bool(found.value[2].any())


def test_columns_that_are_done_leave_the_block() -> None:
    """An eigenvector is solved for in one product; the others go on without it."""
    matrix = torch.diag(torch.logspace(0, 3, 20, dtype=torch.float64))
    widths: list[int] = []

    def product(v: Tensor) -> Tensor:
        widths.append(len(v))
        return v @ matrix

    target = torch.zeros(3, 20, dtype=torch.float64)
    target[0, 4] = 1
    target[1:] = 1
    found = conjugate_gradients(product, target, lambda v: v, 1e-9, 100)
    assert bool(found.converged.all())
    assert widths[:2] == [3, 2]
    assert found.products == len(widths)


@pytest.mark.parametrize("prior", ["scalar", "vector"])
def test_the_variance_lies_within_its_bounds_which_shrink_with_every_iteration(prior: str) -> None:
    delta = torch.tensor(0.3).double() if prior == "scalar" else 0.1 + torch.rand(SIZE, generator=generator(3)).double()
    _, matrix = made()
    b = normal(generator(2), 5, SIZE)
    truth = (b * torch.linalg.solve(matrix + delta.expand(SIZE).diag(), b.mT).mT).sum(1)
    before = torch.full_like(truth, torch.inf)
    for iterations in (2, 5, 10, 20, 40, 80):
        precision = made(Effort(1e-14, iterations))[0].with_prior(delta)
        with pytest.warns(LapwingWarning, match=r"5 of 5 systems for a variance were not solved.*more iterations"):
            found = precision._bounded(b.unsqueeze(0))
        value, excess = found.value[0], found.excess[0]
        assert bool((value <= truth * (1 + 1e-10)).all())
        assert bool((truth <= (value + excess) * (1 + 1e-10)).all())
        error = truth - value
        assert bool((error <= before + 1e-10 * truth).all())  # the energy norm falls in every step
        before = error
    assert float((before / truth).max()) < 1e-5


def test_covariances_have_an_error_of_the_second_order() -> None:
    """A solve to 1e-3 gives covariances to about 1e-6: what the residual says is added."""
    curvature, matrix = made(Effort(1e-3))
    b = normal(generator(2), 4, 2, SIZE)
    pieces = [DenseRows(0, b.transpose(0, 1))]
    truth = b @ torch.linalg.inv(matrix + 0.3 * torch.eye(SIZE)) @ b.mT
    precision = curvature.with_prior(0.3)
    first = torch.einsum("n r p, n s p -> n r s", b, precision.solve(b))
    error, plain = ((each - truth).abs().max() / truth.abs().max() for each in (precision.quadratic(pieces), first))
    assert float(error) < 2e-5
    assert float(error) < float(plain) / 5
    close(precision.squares(pieces), precision.quadratic(pieces).diagonal(dim1=1, dim2=2))


def test_quadrature_brackets_the_truth_and_the_bracket_shrinks() -> None:
    curvature, matrix = made()
    z = normal(generator(5), 3, SIZE)
    values, vectors = torch.linalg.eigh(matrix)
    for function in (lambda t: torch.log1p(t / 0.1), lambda t: -1 / (t + 0.1)):
        truth = ((z @ vectors).square() * function(values.clamp_min(0))).sum(1)
        before = torch.inf
        for steps in (3, 8, 16, 32):
            found = lanczos(curvature.products.mv, z, steps)
            high, low = ((weights * function(nodes)).sum(1) for nodes, weights in (found.gauss, found.radau))
            slack = 1e-9 * truth.abs()
            assert bool((low <= truth + slack).all())
            assert bool((truth <= high + slack).all())
            width = float((high - low).max())
            assert width < before
            before = width


@pytest.mark.parametrize("prior", ["scalar", "vector"])
def test_log_determinant_and_traces_lie_within_their_standard_errors(prior: str) -> None:
    """Fixed seeds, four standard errors; the errors themselves are those of Rademacher probes, within a factor of 2."""
    curvature, matrix = made(Effort(1e-8, probes=48, steps=60))
    delta = torch.tensor(0.3).double() if prior == "scalar" else 0.1 + torch.rand(SIZE, generator=generator(3)).double()
    precision, dense = curvature.with_prior(delta), matrix + delta.expand(SIZE).diag()
    found, truth = precision.log_determinant(), torch.linalg.slogdet(dense).logabsdet
    assert float(found.truncation) < 1e-3
    assert abs(float(found.value - truth)) < 4 * float(found.standard_error)
    root = delta.expand(SIZE).sqrt()
    log = torch.linalg.eigh(dense / root[:, None] / root)
    log = log[1] @ log[0].log().diag() @ log[1].mT
    expected = float((2 * (log.square().sum() - log.diagonal().square().sum()) / 48).sqrt())
    assert expected / 2 < float(found.standard_error) < 2 * expected
    groups = torch.arange(SIZE) % 3
    for grouping in (None, groups):
        traces = precision.inverse_traces(grouping)
        numbers = torch.zeros(SIZE, dtype=torch.long) if grouping is None else grouping
        inverse = torch.linalg.inv(dense).diagonal()
        exact = torch.zeros(int(numbers.max()) + 1).double().index_add(0, numbers, inverse)
        assert bool(((traces.value - exact).abs() < 4 * traces.standard_error + traces.truncation).all())
        assert bool((traces.standard_error < 0.2 * exact).all())


def test_log_determinants_are_smooth_in_the_prior_and_cost_no_product() -> None:
    curvature, _ = made(Effort(1e-8, probes=4, steps=60))
    curvature.with_prior(1.0).logdet()
    calls: list[int] = []
    spectrum = curvature.spectrum
    watched = replace(curvature, products=_Counted(rows(), calls))
    object.__setattr__(watched, "spectrum", spectrum)
    delta = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    scale = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)

    def value(d: Tensor, s: Tensor) -> Tensor:
        return (watched * s).with_prior(d).logdet()

    assert torch.autograd.gradcheck(value, (delta, scale), rtol=1e-7)
    close((watched * scale).with_prior(delta).inverse_trace()[0], torch.autograd.grad(value(delta, scale), delta)[0])
    assert not calls


class _Counted(DenseProducts):
    def __init__(self, found: Tensor, calls: list[int]) -> None:
        super().__init__(found)
        object.__setattr__(self, "calls", calls)

    def mv(self, v: Tensor) -> Tensor:
        self.calls.append(len(v))  # pyright: ignore[reportAttributeAccessIssue]
        return super().mv(v)


def test_draws_solve_for_noise_with_the_covariance_of_the_precision() -> None:
    """Whitened by the dense twin, 4,000 draws have the identity as second moments, to four standard errors."""
    curvature, matrix = made(near=True)
    delta = 0.5 + torch.rand(SIZE, generator=generator(3)).double()
    precision = (curvature * 2.0).with_prior(delta)
    found = precision.drawn(4000, generator(6))
    assert bool(found.converged.all())
    root = torch.linalg.cholesky(2 * matrix + delta.diag())
    white = found.value @ root
    moments = white.mT @ white / 4000
    error = torch.full((SIZE, SIZE), (1 / 4000) ** 0.5).double() + torch.eye(SIZE) * (2**0.5 - 1) * (1 / 4000) ** 0.5
    outside = ((moments - torch.eye(SIZE)).abs() > 4 * error).float().mean()
    assert float(outside) < 5e-4  # 6e-5 are expected
    assert bool((white.mean(0).abs() < 4.5 / 4000**0.5).all())


def test_draws_of_data_that_were_added_have_the_covariance_of_the_sum() -> None:
    """10,000 draws, every entry of the second moments within five standard errors."""
    parts = [normal(generator(seed), 3, 4) for seed in (1, 2)]
    first, second = (MatrixFree(DenseProducts(each), Effort(1e-10)) for each in parts)
    whole = first * 4.0 + second
    dense = 4 * parts[0].mT @ parts[0] + parts[1].mT @ parts[1]
    close(whole.dense(), dense)
    close(whole.diagonal(), dense.diagonal())
    draws, n = whole.products.draw(10_000, generator(0)), 10_000
    error = ((dense.square() + dense.diagonal()[:, None] * dense.diagonal()) / n).sqrt()
    assert bool(((draws.mT @ draws / n - dense).abs() < 5 * error).all())


def test_a_decomposition_that_is_too_short_is_said() -> None:
    curvature, _ = made(Effort(1e-8, probes=200, steps=3))
    with pytest.warns(LapwingWarning, match=r"may be too large by .* after 3 steps.*Allow more steps"):
        curvature.with_prior(1e-3).logdet()
    curvature, _ = made(Effort(1e-8, iterations=3))
    pieces = [DenseRows(0, normal(generator(2), 1, 4, SIZE))]
    with pytest.warns(LapwingWarning, match=r"known to a relative .* after 3 products.*Allow more iterations"):
        curvature.sweep(pieces, torch.tensor([1e-3, 1.0]).double())


@pytest.mark.parametrize(("largest", "delta"), [(1e8, 1e-8), (1e7, 1e-6)])
def test_variances_that_rounding_spoils_are_said_to_be(largest: float, delta: float) -> None:
    """Eigenvalues fifteen orders above the prior: the bracket stays open, and rounding is no excuse for percents."""
    values = torch.logspace(-9, math.log10(largest), 40, dtype=torch.float64)
    q = torch.linalg.qr(normal(generator(0), 40, 40)).Q
    curvature = MatrixFree(DenseProducts((q * values.sqrt()).mT.contiguous()), Effort(1e-9, iterations=200))
    row, at = normal(generator(1), 1, 1, 40), torch.tensor([delta], dtype=torch.float64)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = float(curvature.sweep([DenseRows(0, row)], at))
    truth = float(((row[0, 0] @ q).square() / (values + delta)).sum())
    assert said or abs(found / truth - 1) < 1e-5, f"wrong by {found / truth - 1:.2g}, without a word"


def test_a_variance_of_every_one_of_many_weights_is_refused() -> None:
    curvature = MatrixFree(DenseProducts(torch.ones(1, 5000)), Effort(1e-3))
    precision = curvature.with_prior(1.0)
    with pytest.raises(CurvatureError, match=r"each of 5000 weights.*expected at most 4096.*la\.sample\(n\)\.var"):
        precision.variance()
    found = precision.inverse_traces()  # 4,999 directions with the prior alone, one with 5,001
    assert abs(float(found.value) - 4999.0002) <= 4 * float(found.standard_error) + 1e-3 * 5000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tolerance": 0.0}, "tolerance is 0.0; expected"),
        ({"tolerance": 1.0}, "tolerance is 1.0; expected"),
        ({"iterations": 1}, "iterations is 1; expected a whole number >= 2"),
        ({"probes": 1}, "probes is 1; expected a whole number >= 2"),
        ({"steps": 0}, "steps is 0; expected"),
        ({"block": 0}, "block is 0; expected"),
        pytest.param({"probes": 2.5}, "probes is 2.5; expected", marks=pytest.mark.mistyped),
    ],
)
def test_efforts_that_are_none_are_refused(options: dict, message: str) -> None:
    with pytest.raises(CurvatureError, match=message):
        Effort(**{"tolerance": 1e-3, **options})


def test_blocks_of_any_size_give_the_same() -> None:
    b, numbers = normal(generator(1), 3, SIZE), []
    for block in (None, 2):
        precision = made(Effort(1e-11, probes=3, steps=60, block=block))[0].with_prior(5.0)
        groups = torch.arange(SIZE) % 2
        numbers.append([precision.solve(b), precision.logdet(), precision.inverse_trace(groups)])
    for other in numbers[1:]:
        for one, two in zip(numbers[0], other, strict=True):
            close(two, one, rtol=1e-8)
