"""The contract of `Precision`, for every structure of `contracts.py`, against its dense twin."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from contracts import STRUCTURES, Case, Structure, all_pieces, close, generator, normal, priors, spelled_out
from lapwing.errors import CurvatureError
from lapwing.linalg import Piece, Precision
from lapwing.linalg.budget import MemoryBudget, cache_bytes, intermediate_bytes, within

every_structure = pytest.mark.parametrize("structure", STRUCTURES, ids=str)


def with_every_prior(case: Case) -> Iterator[tuple[Precision, Tensor]]:
    """(precision, its dense twin) for every prior that the structure has to carry."""
    for prior in priors(case, generator(1)).values():
        yield case.curvature.with_prior(prior), case.with_prior(prior)


# -- values ---------------------------------------------------------------------------------------------------------


@every_structure
@pytest.mark.parametrize("lead", [(), (3,), (2, 3)], ids=str)
def test_solve_is_the_inverse_times_a_vector(structure: Structure, lead: tuple[int, ...]) -> None:
    case = structure.make(generator())
    v = normal(generator(2), *lead, case.size)
    for precision, matrix in with_every_prior(case):
        close(precision.solve(v), torch.linalg.solve(matrix, v.reshape(-1, case.size).mT).mT.reshape(v.shape))
        assert precision.size == case.size


@every_structure
def test_a_solution_has_memory_of_its_own_or_goes_where_it_is_told_to(structure: Structure) -> None:
    """Without derivatives solutions may be written in place; they are the same, and v is as it was."""
    case = structure.make(generator())
    v = normal(generator(2), case.size)
    for precision, matrix in with_every_prior(case):
        kept, wide = v.clone(), torch.full((case.size + 2,), 7.0, dtype=torch.float64)
        with torch.no_grad():
            found = precision.solve(v)
            precision.solve_into(v, wide[1:-1])
        expected = torch.linalg.solve(matrix, kept)
        close(found, expected)
        close(wide[1:-1], expected)
        found.zero_()
        assert torch.equal(v, kept)
        assert wide[0] == wide[-1] == 7


@every_structure
@pytest.mark.parametrize("lead", [(), (3,), (2, 3)], ids=str)
def test_mv_is_the_matrix_times_a_vector(structure: Structure, lead: tuple[int, ...]) -> None:
    case = structure.make(generator())
    v = normal(generator(2), *lead, case.size)
    for precision, matrix in with_every_prior(case):
        close(precision.mv(v), v @ matrix)


@every_structure
def test_logdet_is_that_of_the_matrix(structure: Structure) -> None:
    for precision, matrix in with_every_prior(structure.make(generator())):
        close(precision.logdet(), torch.linalg.slogdet(matrix).logabsdet)


@every_structure
def test_variance_is_the_diagonal_of_the_inverse(structure: Structure) -> None:
    for precision, matrix in with_every_prior(structure.make(generator())):
        close(precision.variance(), torch.linalg.inv(matrix).diagonal())


@every_structure
def test_inverse_trace_sums_the_variance_by_group(structure: Structure) -> None:
    case = structure.make(generator())
    groups = torch.arange(case.size) % 3
    for precision, matrix in with_every_prior(case):
        inverse = torch.linalg.inv(matrix).diagonal()
        close(precision.inverse_trace(), inverse.sum().unsqueeze(0))
        close(precision.inverse_trace(groups), torch.stack([inverse[groups == k].sum() for k in range(3)]))


@every_structure
def test_quadratic_is_the_covariance_of_rows_in_any_form(structure: Structure) -> None:
    case = structure.make(generator())
    found = all_pieces(case, generator(2))
    rows = {name: spelled_out(pieces, case.size) for name, pieces in found.items()}
    for precision, matrix in with_every_prior(case):
        inverse = torch.linalg.inv(matrix)
        for name, pieces in found.items():
            expected = torch.einsum("r n p, p q, s n q -> n r s", rows[name], inverse, rows[name])
            try:
                close(precision.quadratic(pieces), expected)
                close(precision.squares(pieces), expected.diagonal(dim1=1, dim2=2))
            except AssertionError as error:
                raise AssertionError(f"rows: {name}") from error


PRECISIONS = torch.logspace(-3, 3, 7, dtype=torch.float64)


@every_structure
def test_a_sweep_is_the_squares_under_each_prior_precision(structure: Structure) -> None:
    case = structure.make(generator())
    inverses = [torch.linalg.inv(case.with_prior(precision)) for precision in PRECISIONS]
    for name, pieces in all_pieces(case, generator(2)).items():
        rows = spelled_out(pieces, case.size)
        expected = torch.stack([torch.einsum("r n p, p q, r n q -> n r", rows, inverse, rows) for inverse in inverses])
        try:
            for found, one in zip(case.curvature.sweep(pieces, PRECISIONS), expected, strict=True):
                close(found, one)  # each by its own scale
        except AssertionError as error:
            raise AssertionError(f"rows: {name}") from error


@every_structure
def test_a_sweep_of_a_multiple_is_that_of_the_scaled_matrix(structure: Structure) -> None:
    """variance at scale s and prior d = variance at prior d / s, divided by s."""
    case = structure.make(generator())
    pieces = all_pieces(case, generator(2))["dense rows"]
    close((case.curvature * 4.0).sweep(pieces, PRECISIONS), case.curvature.sweep(pieces, PRECISIONS / 4) / 4)


@every_structure
def test_a_sweep_is_differentiable_in_the_precisions(structure: Structure) -> None:
    case = structure.make(generator())
    pieces = all_pieces(case, generator(2))["dense rows"]
    found, expected = (torch.tensor([0.3, 2.0], dtype=torch.float64, requires_grad=True) for _ in range(2))
    case.curvature.sweep(pieces, found).sum().backward()
    torch.stack([case.curvature.with_prior(d).squares(pieces) for d in expected]).sum().backward()
    assert found.grad is not None
    assert expected.grad is not None
    close(found.grad, expected.grad)


@every_structure
@pytest.mark.parametrize(
    ("precisions", "message"),
    [
        ([1.0, -0.5], "negative.*-0.5.*expected"),
        ([1.0, float("nan")], "NaN or infinite.*expected"),
        ([], "shape.*expected a vector"),
    ],
)
def test_a_sweep_over_what_is_no_precision_is_refused(structure: Structure, precisions: list, message: str) -> None:
    case = structure.make(generator())
    pieces = all_pieces(case, generator(2))["dense rows"]
    with pytest.raises(CurvatureError, match=message):
        case.curvature.sweep(pieces, torch.tensor(precisions, dtype=torch.float64))


@every_structure
def test_a_sweep_that_starts_at_zero_is_refused_where_the_curvature_is_singular(structure: Structure) -> None:
    case = structure.make(generator())
    pieces = all_pieces(case, generator(2))["dense rows"]
    precisions = torch.tensor([0.0, 1.0], dtype=torch.float64)
    if float(torch.linalg.eigvalsh(case.matrix).min()) > 1e-8:
        close(case.curvature.sweep(pieces, precisions)[0], case.curvature.with_prior(0.0).squares(pieces))
    else:
        with pytest.raises(CurvatureError, match=r"not positive definite.*expected.*larger prior"):
            case.curvature.sweep(pieces, precisions)


@every_structure
def test_a_small_budget_cuts_the_work_and_changes_nothing(structure: Structure) -> None:
    case = structure.make(generator())
    precision = case.curvature.with_prior(0.7)
    found = all_pieces(case, generator(2))
    whole = {name: precision.quadratic(pieces) for name, pieces in found.items()}
    swept = {name: case.curvature.sweep(pieces, PRECISIONS) for name, pieces in found.items()}
    with within(MemoryBudget(1)):
        assert intermediate_bytes() == cache_bytes() == 1
        for name, pieces in found.items():
            close(precision.quadratic(pieces), whole[name])
            close(precision.squares(pieces), whole[name].diagonal(dim1=1, dim2=2))
            close(case.curvature.sweep(pieces, PRECISIONS), swept[name])


@dataclass(frozen=True)
class Map:
    """A linear map in two parts, as `Precision.covariance` sees one."""

    pieces_of: tuple[list[Piece], ...]
    matrix: Tensor
    batch: int
    outputs: int

    @property
    def value(self) -> Tensor:
        return self.matrix.new_zeros(self.batch, self.outputs)

    def mv(self, v: Tensor) -> Tensor:
        return self.matrix @ v

    def rmv(self, u: Tensor) -> Tensor:
        return torch.einsum("n c, n c p -> p", u, self.matrix)

    def rows(self) -> Tensor:
        return self.matrix

    def parts(self) -> Iterator[Map]:
        for pieces in self.pieces_of:
            yield Map((pieces,), self.matrix, self.batch, self.outputs)

    def pieces(self) -> list[Piece]:
        return self.pieces_of[0]

    def columns(self) -> Iterator[list[Piece]]:
        for number in range(self.outputs):
            yield [piece.of_cotangent(number) for piece in self.pieces_of[0]]


@every_structure
def test_covariance_goes_through_the_parts_of_a_map_in_order(structure: Structure) -> None:
    case = structure.make(generator())
    parts = [all_pieces(case, generator(seed))["dense rows"] for seed in (2, 3)]
    jacobian = torch.cat([spelled_out(pieces, case.size).transpose(0, 1) for pieces in parts])
    linear_map = Map(tuple(parts), jacobian, *jacobian.shape[:2])
    for precision, matrix in with_every_prior(case):
        expected = jacobian @ torch.linalg.inv(matrix) @ jacobian.mT
        close(precision.covariance(linear_map), expected)
        close(precision.variances(linear_map), expected.diagonal(dim1=1, dim2=2))
    swept = case.curvature.variances(linear_map, PRECISIONS)
    close(swept, torch.stack([case.curvature.with_prior(d).variances(linear_map) for d in PRECISIONS]))


# -- draws ----------------------------------------------------------------------------------------------------------


@every_structure
def test_draws_have_the_inverse_as_covariance(structure: Structure) -> None:
    """Within four standard errors: sqrt(2 / n) of a variance along a direction, sqrt(1 / n) of a standardised mean."""
    case, n = structure.make(generator()), 20_000
    for precision, matrix in with_every_prior(case):
        draws = precision.draw(n, generator(3))
        assert draws.shape == (n, case.size)
        directions = torch.cat([torch.eye(case.size, dtype=torch.float64)[:3], normal(generator(4), 5, case.size)])
        along = draws @ directions.mT
        variance = (directions @ torch.linalg.inv(matrix) * directions).sum(1)
        assert float(((along.square().mean(0) / variance) - 1).abs().max()) < 4 * (2 / n) ** 0.5
        assert float((along.mean(0) / variance.sqrt()).abs().max()) < 4 * (1 / n) ** 0.5
        # and x^T precision x is chi-squared with P degrees of freedom: mean P, variance 2 P
        energy = (draws @ matrix * draws).sum(1).mean()
        assert abs(float(energy) - case.size) < 4 * (2 * case.size / n) ** 0.5


@every_structure
def test_draws_come_from_the_generator_alone(structure: Structure) -> None:
    precision = structure.make(generator()).curvature.with_prior(1.0)
    state = torch.get_rng_state()
    assert torch.equal(precision.draw(3, generator(5)), precision.draw(3, generator(5)))
    assert not torch.equal(precision.draw(3, generator(5)), precision.draw(3, generator(6)))
    assert torch.equal(torch.get_rng_state(), state)
    assert precision.draw(0, generator(5)).shape == (0, precision.size)


# -- gradients in the prior -----------------------------------------------------------------------------------------


def outcomes(case: Case) -> dict[str, tuple[Callable[[Precision], Tensor], Callable[[Tensor], Tensor]]]:
    """Differentiable scalars of a precision, and of its dense twin."""
    v, w = normal(generator(2), 2, case.size)
    pieces = all_pieces(case, generator(2))["pieces of every kind that share parameters"]
    rows = spelled_out(pieces, case.size)
    weights = normal(generator(3), rows.shape[1], rows.shape[0], rows.shape[0])

    def quadratic(matrix: Tensor) -> Tensor:
        return torch.einsum("r n p, p q, s n q, n r s ->", rows, torch.linalg.inv(matrix), rows, weights)

    return {
        "logdet": (lambda p: p.logdet(), lambda m: torch.linalg.slogdet(m).logabsdet),
        "solve": (lambda p: w @ p.solve(v), lambda m: w @ torch.linalg.solve(m, v)),
        "quadratic": (lambda p: (p.quadratic(pieces) * weights).sum(), quadratic),
        "squares": (
            lambda p: (p.squares(pieces) * weights[:, 0]).sum(),
            lambda m: torch.einsum("r n p, p q, r n q, n r ->", rows, torch.linalg.inv(m), rows, weights[:, 0]),
        ),
        "variance": (lambda p: w @ p.variance(), lambda m: w @ torch.linalg.inv(m).diagonal()),
    }


@every_structure
def test_gradients_in_an_isotropic_prior_are_those_of_the_twin(structure: Structure) -> None:
    case = structure.make(generator())
    for ours, twin in outcomes(case).values():
        delta = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
        (expected,) = torch.autograd.grad(twin(case.with_prior(delta)), delta)
        (actual,) = torch.autograd.grad(ours(case.curvature.with_prior(delta)), delta)
        close(actual, expected)
        torch.autograd.gradcheck(lambda d, ours=ours: ours(case.curvature.with_prior(d)), (delta,), rtol=1e-5)


@every_structure
def test_gradients_in_a_prior_per_parameter_or_per_tensor_are_those_of_the_twin(structure: Structure) -> None:
    case = structure.make(generator())
    groups = torch.arange(case.size) if case.tensors is None else case.tensors
    start = 0.3 + 0.2 * torch.arange(1.0 + int(groups.max())).double()
    for ours, twin in outcomes(case).values():
        each = start.clone().requires_grad_()
        (expected,) = torch.autograd.grad(twin(case.with_prior(each[groups])), each)
        (actual,) = torch.autograd.grad(ours(case.curvature.with_prior(each[groups])), each)
        close(actual, expected)


@every_structure
def test_the_gradient_of_logdet_is_right_where_all_priors_are_equal(structure: Structure) -> None:
    """Where evidence is optimised from: d logdet / d delta_k = sum of the variances of tensor k."""
    case = structure.make(generator())
    groups = torch.arange(case.size) if case.tensors is None else case.tensors
    each = torch.full((1 + int(groups.max()),), 0.7, dtype=torch.float64, requires_grad=True)
    precision = case.curvature.with_prior(each[groups])
    (actual,) = torch.autograd.grad(precision.logdet(), each)
    probe = torch.full_like(each, 0.7, requires_grad=True)
    (expected,) = torch.autograd.grad(torch.linalg.slogdet(case.with_prior(probe[groups])).logabsdet, probe)
    close(actual, expected)


@every_structure
@pytest.mark.parametrize("start", [[0.7, 0.7], [0.3, 0.5]], ids=["equal", "different"])
def test_logdet_by_group_is_that_of_the_twin_with_its_gradients(structure: Structure, start: list[float]) -> None:
    """In precisions of groups, one per tensor and one for all, and in the scale; equal or not."""
    case = structure.make(generator())
    tensors = torch.arange(case.size) if case.tensors is None else case.tensors
    for groups in (tensors, torch.zeros_like(tensors), None):
        count = 1 if groups is None else 1 + int(groups.max())
        each = torch.linspace(*start, count).double().requires_grad_()
        twin = case.with_prior(each[torch.zeros_like(tensors) if groups is None else groups])
        expected = torch.linalg.slogdet(twin).logabsdet
        found = case.curvature.grouped_logdet(groups)
        close(found(each), expected)
        close(*(torch.autograd.grad(value, each)[0] for value in (found(each), expected)))
        scale = torch.tensor(1.7, dtype=torch.float64, requires_grad=True)
        prior = each.detach()[0 if groups is None else groups]
        values = found(each.detach(), scale), (case.curvature * scale).with_prior(prior).logdet()
        close(*values)
        close(*(torch.autograd.grad(value, scale)[0] for value in values))


# -- what is refused, and what is kept ------------------------------------------------------------------------------


@every_structure
def test_the_decomposition_is_kept(structure: Structure, monkeypatch: pytest.MonkeyPatch) -> None:
    case, calls = structure.make(generator()), []
    whole = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda *args, **kwargs: calls.append(1) or whole(*args, **kwargs))
    first = case.curvature.with_prior(0.3).logdet()
    before = len(calls)
    for delta in (0.5, 0.7, 11.0):
        assert case.curvature.with_prior(delta).logdet() > first
    assert len(calls) == before


@every_structure
def test_a_scaled_curvature_is_not_decomposed_again(structure: Structure, monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise of a regression can be tuned at the price of a product, whether or not H was decomposed before."""
    case, calls = structure.make(generator()), []
    whole = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda *args, **kwargs: calls.append(1) or whole(*args, **kwargs))
    (case.curvature * 2.0).with_prior(0.3).logdet()  # split damping is decomposed when something needs it
    before = len(calls)
    for scale in (0.5, 3.0):
        found = (case.curvature * scale * 2.0).with_prior(0.7)
        expected = 2 * scale * case.with_prior(torch.tensor(0.35 / scale, dtype=torch.float64))
        close(found.logdet(), torch.linalg.slogdet(expected).logabsdet)
    case.curvature.with_prior(0.3)
    assert len(calls) == before


@every_structure
@pytest.mark.parametrize(
    ("prior", "message"),
    [
        (-0.5, "negative.*-0.5.*expected"),
        (float("nan"), "NaN or infinite.*expected"),
        (float("inf"), "NaN or infinite.*expected"),
    ],
)
def test_a_prior_that_is_no_precision_is_refused(structure: Structure, prior: float, message: str) -> None:
    case = structure.make(generator())
    with pytest.raises(CurvatureError, match=message):
        case.curvature.with_prior(prior)
    vector = torch.ones(case.size, dtype=torch.float64)
    vector[-1] = prior
    with pytest.raises(CurvatureError, match=message):
        case.curvature.with_prior(vector)


@every_structure
def test_a_prior_of_the_wrong_size_is_refused(structure: Structure) -> None:
    case = structure.make(generator())
    for shape in ((case.size + 1,), (case.size - 1,), (1, case.size), (case.size, case.size)):
        with pytest.raises(CurvatureError, match=rf"shape .*; expected one number or a vector of {case.size}"):
            case.curvature.with_prior(torch.ones(shape))


@every_structure
def test_a_prior_that_the_structure_cannot_carry_is_refused_and_not_rounded(structure: Structure) -> None:
    case = structure.make(generator())
    prior = 1 + torch.arange(case.size).double()
    if case.tensors is None:
        case.curvature.with_prior(prior)
        return
    with pytest.raises(CurvatureError, match=r"differs within one weight.*Use a .*diagonal, block or full"):
        case.curvature.with_prior(prior)


@every_structure
def test_a_zero_prior_is_right_where_the_curvature_is_definite_and_refused_where_not(structure: Structure) -> None:
    case = structure.make(generator())
    smallest = float(torch.linalg.eigvalsh(case.matrix).min())
    if smallest > 1e-8:
        close(case.curvature.with_prior(0.0).logdet(), torch.linalg.slogdet(case.matrix).logabsdet)
    else:
        with pytest.raises(CurvatureError, match=r"not positive definite.*expected.*larger prior"):
            case.curvature.with_prior(0.0)


@every_structure
def test_groups_of_the_wrong_size_are_refused(structure: Structure) -> None:
    precision = structure.make(generator()).curvature.with_prior(1.0)
    with pytest.raises(CurvatureError, match=r"groups.*expected"):
        precision.inverse_trace(torch.zeros(precision.size + 1, dtype=torch.int64))
    with pytest.raises(CurvatureError, match=r"groups.*expected"):
        precision.inverse_trace(torch.arange(precision.size) - 1)


@every_structure
def test_a_negative_number_of_draws_is_refused(structure: Structure) -> None:
    precision = structure.make(generator()).curvature.with_prior(1.0)
    with pytest.raises(CurvatureError, match=r"-1 draws; expected"):
        precision.draw(-1, generator())


@every_structure
def test_squares_are_the_diagonal_of_quadratic_also_where_none_are_written(structure: Structure) -> None:
    case = structure.make(generator())
    pieces = all_pieces(case, generator(2))["dense rows"]
    rows = spelled_out(pieces, case.size)
    precision, matrix = next(with_every_prior(case))
    expected = torch.einsum("r n p, p q, r n q -> n r", rows, torch.linalg.inv(matrix), rows)
    close(precision.squares(pieces), expected)
    close(Precision.squares(precision, pieces), expected)
