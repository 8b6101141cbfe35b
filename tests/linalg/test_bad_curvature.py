"""Matrices that are no curvature: indefinite, not finite, or divided up wrongly."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch

from contracts import LINEAR, LINEAR_BIAS, STRUCTURES, Case, close, generator, kronecker, normal, psd
from lapwing.errors import CurvatureError
from lapwing.linalg import (
    Block,
    Blocks,
    CorrectedKronecker,
    Curvature,
    Dense,
    Diagonal,
    Kronecker,
    LowRank,
    MatrixLayout,
    Segments,
    Term,
)

SADDLE = torch.tensor([[1.0, 2.0], [2.0, 1.0]], dtype=torch.float64)  # eigenvalues 3 and -1


def on_block(curvature: Curvature) -> Blocks:
    rest = Diagonal(torch.ones(1, dtype=torch.float64))
    size = curvature.size
    return Blocks(
        size + 1, (Block("a", Segments(((0, size),)), curvature), Block("b", Segments(((size, size + 1),)), rest))
    )


@pytest.mark.parametrize(
    "curvature",
    [Dense(SADDLE), Diagonal(torch.tensor([3.0, -1.0]).double()), on_block(Dense(SADDLE))],
    ids=["dense", "diagonal", "block"],
)
def test_an_indefinite_hessian_needs_a_prior_that_is_strong_enough(curvature: Curvature) -> None:
    for weak in (0.0, 0.5, 0.999):
        with pytest.raises(CurvatureError, match=r"not positive definite.*expected.*larger prior.*indefinite"):
            curvature.with_prior(weak)
        with pytest.raises(CurvatureError, match=r"not positive definite.*expected.*larger prior.*indefinite"):
            curvature.with_prior(torch.full((curvature.size,), weak))
    precision = curvature.with_prior(1.5)
    close(precision.logdet(), torch.linalg.slogdet(curvature.dense() + 1.5 * torch.eye(curvature.size)).logabsdet)


def test_the_smallest_eigenvalue_is_named() -> None:
    with pytest.raises(CurvatureError, match=r"smallest eigenvalue -0\.5"):
        Dense(SADDLE).with_prior(0.5)


def test_rounding_below_zero_is_no_indefiniteness() -> None:
    """Rank one in float32: eigenvalues of -1e-6 are rounding, and a prior far below them still gives a precision."""
    row = torch.randn(40, generator=generator())
    matrix = torch.outer(row, row)
    assert float(torch.linalg.eigvalsh(matrix).min()) < -1e-8
    Dense(matrix).with_prior(1e-12)
    expected = 39 * torch.tensor(1e-3).log() + (row @ row + 1e-3).log()
    torch.testing.assert_close(Dense(matrix).with_prior(1e-3).logdet(), expected, rtol=1e-3, atol=0)


def test_equal_eigenvalues_do_not_spoil_the_derivative_in_the_scale() -> None:
    """d/ds [logdet(s H + I) + v^T (s H + I)^-1 v] for H = I, whose eigenvectors have no derivative."""
    eye, v = torch.eye(4, dtype=torch.float64), normal(generator(), 4)
    layout = MatrixLayout(0, (2, 2), (0, 1), 1, 2, 2)
    for curvature in (Dense(eye), Kronecker(layout, (Term(eye[None, :2, :2], eye[None, :2, :2], 1.0),))):
        scale = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
        precision = (curvature * scale).with_prior(1.0)
        (found,) = torch.autograd.grad(precision.logdet() + v @ precision.solve(v), scale)
        close(found, 4 / 2.5 - v @ v / 2.5**2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("vector", [False, True], ids=["one prior", "a vector"])
def test_entries_that_are_not_finite_are_refused(bad: float, vector: bool) -> None:
    prior = torch.ones(8, dtype=torch.float64) if vector else 1.0
    matrix, values = psd(generator(), 8), torch.ones(8, dtype=torch.float64)
    a, g, counts = psd(generator(), 1, 4), psd(generator(), 1, 2), torch.ones(1, 2, dtype=torch.float64)
    matrix[2, 1] = matrix[1, 2] = values[3] = bad
    bad_a, bad_g, bad_counts = a.clone(), g.clone(), counts.clone()
    bad_a[0, 3, 3] = bad_g[0, 1, 0] = bad_counts[0, 1] = bad
    for curvature in (
        Dense(matrix),
        Diagonal(values),
        Kronecker(LINEAR_BIAS, (Term(bad_a, g, 1.0),)),
        Kronecker(LINEAR_BIAS, (Term(a, bad_g, 1.0),)),
        Kronecker(LINEAR_BIAS, (Term(a, bad_counts, 1.0),)),
        Kronecker(LINEAR_BIAS, (Term(bad_a, g, 1.0), Term(a, g, 1.0))),
        Kronecker(LINEAR_BIAS, (Term(bad_a, g, 1.0),), factored_damping=True),
    ):
        with pytest.raises(CurvatureError, match=r"NaN or infinite.*expected.*Check"):
            curvature.with_prior(prior)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_low_rank_entries_that_are_not_finite_are_refused(bad: float) -> None:
    vectors, values = torch.eye(3, 2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    spoiled = vectors.clone()
    spoiled[1, 1] = bad
    for curvature in (LowRank(spoiled, values), LowRank(vectors, torch.tensor([1.0, bad], dtype=torch.float64))):
        with pytest.raises(CurvatureError, match=r"the low-rank curvature holds NaN or infinite.*expected.*Check"):
            curvature.with_prior(1.0)


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_a_scale_that_is_nan_is_refused_when_a_precision_is_formed(structure) -> None:
    curvature = structure.make(generator()).curvature
    curvature.with_prior(1.0)  # decomposed before, so that nothing is decomposed again
    with pytest.raises(CurvatureError, match=r"expected"):
        (curvature * float("nan")).with_prior(1.0)


def test_blocks_must_cover_every_position_once() -> None:
    def make(*intervals: tuple[int, int]) -> Blocks:
        found = [Block("", Segments((i,)), Diagonal(torch.ones(i[1] - i[0]).double())) for i in intervals]
        return Blocks(6, tuple(found))

    make((0, 4), (4, 6))
    make((4, 6), (0, 4))
    for wrong, position in ((((0, 3), (4, 6)), 3), (((0, 4), (3, 6)), 3), (((1, 6),), 0)):
        with pytest.raises(CurvatureError, match=f"leave out or repeat position {position}; expected"):
            make(*wrong)
    with pytest.raises(CurvatureError, match=r"cover 5 positions; expected 6"):
        make((0, 5))


def test_blocks_must_have_the_size_of_their_segments() -> None:
    with pytest.raises(CurvatureError, match=r"block 'head' .*3.*expected.*2"):
        Blocks(2, (Block("head", Segments(((0, 2),)), Diagonal(torch.ones(3).double())),))


def test_blocks_divided_differently_cannot_be_added() -> None:
    ones = torch.ones(2, dtype=torch.float64)
    one = Blocks(4, (Block("a", Segments(((0, 2),)), Diagonal(ones)), Block("b", Segments(((2, 4),)), Diagonal(ones))))
    two = Blocks(4, (Block("a", Segments(((0, 4),)), Diagonal(torch.ones(4).double())),))
    with pytest.raises(CurvatureError, match=r"different blocks; fit both the same way"):
        one + two


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_results_keep_the_dtype_of_the_curvature(structure) -> None:
    """A prior or a scale in float64 does not widen a float32 curvature, nor is it widened by decompositions."""
    case = structure.make(generator())
    narrow = _narrow(case.curvature)
    precision = (narrow * 2.0).with_prior(torch.tensor(0.5, dtype=torch.float64))
    v = normal(generator(), case.size).float()
    for result in (precision.solve(v), precision.draw(2, generator()), precision.logdet(), precision.variance()):
        assert result.dtype == torch.float32
    expected = torch.linalg.slogdet(2 * case.with_prior(torch.tensor(0.25, dtype=torch.float64))).logabsdet
    torch.testing.assert_close(precision.logdet().double(), expected, rtol=1e-4, atol=1e-3)


def _narrow(value: Any) -> Any:
    """The same structure, of whatever kind, with float32 tensors."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, tuple):
        return tuple(map(_narrow, value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: _narrow(getattr(value, field.name)) for field in fields(value)})
    return value


# -- corrected Kronecker blocks ---------------------------------------------------------------------------------------


def _corrected(case: Case) -> CorrectedKronecker:
    assert isinstance(case.curvature, Kronecker)
    return case.curvature.in_eigenbasis()


def test_corrected_blocks_in_other_bases_cannot_be_added() -> None:
    one, other = (_corrected(kronecker(LINEAR_BIAS)(generator(seed))) for seed in (1, 2))
    (one + one).with_prior(1.0)
    with pytest.raises(CurvatureError, match=r"another eigenbasis or layout; expected the same.*basis=first"):
        one + other
    apart = _corrected(kronecker(LINEAR_BIAS, joint=False)(generator(1)))
    with pytest.raises(CurvatureError, match="another eigenbasis or layout"):
        one + apart
    turned = replace(one, layout=replace(one.layout, order=one.layout.order[::-1]))
    with pytest.raises(CurvatureError, match="another eigenbasis or layout"):
        one + turned


def test_an_uncorrected_block_is_the_kronecker_block() -> None:
    for structure in STRUCTURES:
        case = structure.make(generator())
        if isinstance(case.curvature, Kronecker) and not case.curvature.factored_damping:
            same = _corrected(case)
            close(same.dense(), case.matrix)
            prior = (0.3 + 0.2 * torch.arange(2.0).double())[case.tensors]
            close(same.with_prior(prior).logdet(), case.curvature.with_prior(prior).logdet())


def test_a_corrected_block_that_is_not_finite_is_refused() -> None:
    block = _corrected(kronecker(LINEAR)(generator()))
    broken = block.with_values([part.values * float("nan") for part in block.parts])
    with pytest.raises(CurvatureError, match="NaN or infinite"):
        broken.with_prior(1.0)
