"""The contract of `Curvature`, for every structure of `contracts.py`, against its dense twin."""

from __future__ import annotations

import pytest
import torch

from contracts import STRUCTURES, Structure, close, generator, normal, psd
from lapwing.errors import CurvatureError
from lapwing.linalg import Block, Blocks, Curvature, Dense, Diagonal, Segments

every_structure = pytest.mark.parametrize("structure", STRUCTURES, ids=str)


@every_structure
def test_the_dense_matrix_is_the_twin_and_symmetric(structure: Structure) -> None:
    case = structure.make(generator())
    close(case.curvature.dense(), case.matrix)
    close(case.curvature.dense(), case.curvature.dense().mT)
    assert case.curvature.size == case.size


@every_structure
@pytest.mark.parametrize("lead", [(), (3,), (2, 3)], ids=str)
def test_mv_is_the_matrix_times_a_vector(structure: Structure, lead: tuple[int, ...]) -> None:
    case = structure.make(generator())
    v = normal(generator(1), *lead, case.size)
    before = v.clone()
    close(case.curvature.mv(v), v @ case.matrix)
    assert torch.equal(v, before)


@every_structure
def test_the_diagonal_is_that_of_the_matrix(structure: Structure) -> None:
    case = structure.make(generator())
    close(case.curvature.diagonal(), case.matrix.diagonal())


@every_structure
def test_pooled_is_the_curvature_of_both_data_sets(structure: Structure) -> None:
    one, other = structure.make(generator(1)), structure.make(generator(2))
    close(one.curvature.pooled(other.curvature).dense(), one.pooled(other))
    close(other.curvature.pooled(one.curvature).dense(), one.pooled(other))


@every_structure
def test_a_sum_is_the_sum_of_the_matrices_however_they_are_scaled(structure: Structure) -> None:
    one, other = structure.make(generator(1)), structure.make(generator(2))
    for scale, factor in ((1.0, 1.0), (3.0, 0.5), (1e-3, 1e3)):
        total = scale * one.curvature + other.curvature * factor
        expected = scale * one.matrix + factor * other.matrix
        close(total.dense(), expected)
        close(total.diagonal(), expected.diagonal())
        v = normal(generator(3), 2, one.size)
        close(total.mv(v), v @ expected)


@every_structure
def test_addition_and_pooling_are_associative(structure: Structure) -> None:
    a, b, c = (structure.make(generator(seed)).curvature for seed in range(3))
    close(((a + b) + c).dense(), (a + (b + c)).dense())
    close(a.pooled(b).pooled(c).dense(), a.pooled(b.pooled(c)).dense())


@every_structure
def test_twice_the_data_is_twice_the_curvature(structure: Structure) -> None:
    curvature = structure.make(generator()).curvature
    close((curvature + curvature).dense(), 2 * curvature.dense())
    close(curvature.pooled(curvature).dense(), 2 * curvature.dense())


@every_structure
@pytest.mark.parametrize("scale", [0.25, 3, torch.tensor(2.5, dtype=torch.float64)], ids=["float", "int", "tensor"])
def test_scaling_scales_the_matrix(structure: Structure, scale: float | torch.Tensor) -> None:
    case = structure.make(generator())
    close((case.curvature * scale).dense(), case.matrix * scale)
    close((scale * case.curvature).dense(), case.matrix * scale)
    close((scale * case.curvature).diagonal(), case.matrix.diagonal() * scale)
    close(case.curvature.dense(), case.matrix)  # and leaves the original alone


@every_structure
def test_scaled_curvature_has_a_scaled_precision(structure: Structure) -> None:
    """H * s + d I = s (H + d / s I), also where H has been decomposed before."""
    case = structure.make(generator())
    case.curvature.with_prior(1.0)
    v = normal(generator(1), case.size)
    scaled = (case.curvature * 2.0).with_prior(0.5)
    close(scaled.solve(v), case.curvature.with_prior(0.25).solve(v) / 2)
    expected = torch.linalg.slogdet(2 * case.with_prior(torch.tensor(0.25, dtype=torch.float64))).logabsdet
    close(scaled.logdet(), expected)


@every_structure
def test_precisions_are_differentiable_in_the_scale(structure: Structure) -> None:
    """1 / sigma^2 multiplies the curvature of a regression: the evidence is differentiated in it."""
    case = structure.make(generator())
    v = normal(generator(1), case.size)

    def ours(scale: torch.Tensor) -> torch.Tensor:
        precision = (case.curvature * scale).with_prior(0.7)
        return precision.logdet() + v @ precision.solve(v)

    def twin(scale: torch.Tensor) -> torch.Tensor:
        matrix = scale * case.with_prior(0.7 / scale)
        return torch.linalg.slogdet(matrix).logabsdet + v @ torch.linalg.solve(matrix, v)

    gradients = []
    for function in (ours, twin):
        scale = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
        gradients.append(torch.autograd.grad(function(scale), scale)[0])
    close(*gradients)


@every_structure
def test_the_scale_is_one_number(structure: Structure) -> None:
    """A vector would scale columns, and leave no symmetric matrix."""
    case = structure.make(generator())
    close((case.curvature * torch.tensor([3.0])).dense(), 3 * case.matrix)
    with pytest.raises(CurvatureError, match="expected one number"):
        case.curvature * torch.ones(case.size, dtype=torch.float64)


@every_structure
def test_another_structure_or_size_cannot_be_added(structure: Structure) -> None:
    case = structure.make(generator())
    others: list[Curvature] = [Diagonal(torch.ones(case.size + 1, dtype=torch.float64))]
    if not isinstance(case.curvature, Dense):
        others.append(Dense(case.matrix))
    if not isinstance(case.curvature, Diagonal):
        others.append(Diagonal(torch.ones(case.size, dtype=torch.float64)))
    for other in others:
        for a, b in ((case.curvature, other), (other, case.curvature)):
            with pytest.raises(CurvatureError, match=r"cannot add .* expected the same structure"):
                a + b


@pytest.mark.parametrize("first_has_both", [True, False])
@pytest.mark.parametrize("join", [lambda a, b: a + b, lambda a, b: a.pooled(b)], ids=["sum", "pooled"])
def test_parameters_that_one_of_two_data_sets_does_not_reach(join, first_has_both: bool) -> None:
    """Their curvature is that of the other, whichever comes first."""
    left, right = Segments(((0, 2),)), Segments(((2, 5),))
    seen, other = psd(generator(1), 2), psd(generator(2), 2)
    rest = psd(generator(3), 3)
    whole = Blocks(5, (Block("a", left, Dense(seen)), Block("b", right, Dense(rest))))
    nothing = Diagonal(torch.zeros(3, dtype=torch.float64))
    part = Blocks(5, (Block("a", left, Dense(other)), Block("b", right, nothing)))
    found = join(whole, part) if first_has_both else join(part, whole)
    expected = torch.block_diag(seen + other, rest)
    close(found.dense(), expected)
