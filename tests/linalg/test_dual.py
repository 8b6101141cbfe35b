"""Dual and LowRank: the whole contract of `contracts.py`, priors per tensor, and what is particular to them.

The functions of the two suites are run as they stand, with the rows of this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from inspect import signature
from types import FunctionType

import pytest
import torch
from torch import Generator, Tensor

from contracts import (
    RTOL,
    Case,
    Structure,
    all_pieces,
    close,
    generator,
    lone_rows,
    lookup,
    normal,
    outer,
    spelled_out,
)
from lapwing.errors import CurvatureError
from lapwing.linalg import (
    Dense,
    DenseRows,
    Dual,
    LowRank,
    MatrixLayout,
    OuterRows,
    Piece,
    Precision,
    RowSet,
    row_set,
)
from lapwing.linalg import dual as dual_module
from lapwing.linalg import row_products as stacks
from lapwing.linalg.budget import MemoryBudget, within
from linalg import test_bad_curvature, test_curvature, test_precision

LINEAR = MatrixLayout(0, (2, 3), (0, 1), 1, 2, 3, bias=6)
TURNED = MatrixLayout(8, (3, 2), (1, 0), 1, 2, 3)
GROUPED = MatrixLayout(14, (2, 2, 3), (0, 1, 2), 2, 2, 3, bias=26)
TABLE = MatrixLayout(30, (5, 2), (0, 1), 1, 5, 2)
NETWORK = 43  # a vector of 3 comes last
TENSORS = torch.repeat_interleave(torch.arange(7), torch.tensor([6, 2, 6, 12, 4, 10, 3]))


def network(generator: Generator, shared: int) -> list[Piece]:
    """A batch of rows over layers of every kind; T of the middle ones differs between batches, as sequences do."""
    return [
        outer(LINEAR, generator, 1),
        outer(TURNED, generator, shared),
        outer(GROUPED, generator, shared),
        lookup(TABLE, generator, shared),
        DenseRows(40, normal(generator, 2, 4, 3)),
    ]


def tied(generator: Generator) -> list[Piece]:
    """A table that is the transposed output layer too, a weight used twice, and a part of it used once more."""
    weight = replace(TABLE, start=0)
    turned = MatrixLayout(0, (5, 2), (1, 0), 1, 2, 5)
    square = MatrixLayout(10, (3, 3), (0, 1), 1, 3, 3, bias=19)
    return [
        lookup(weight, generator),
        outer(turned, generator, 1),
        outer(square, generator, 1),
        outer(square, generator, 3),
        lone_rows(replace(square, stored=(2, 3)), generator),
    ]


def parts(name: str, generator: Generator) -> tuple[int, list[list[Piece]]]:
    """P, and the rows of two or three batches."""
    if name == "dense rows":
        return 20, [[DenseRows(0, normal(generator, 2, n, 20))] for n in (2, 3)]
    if name == "layers":
        return NETWORK, [network(generator, 1), network(generator, 1)]
    if name == "layers with sharing":
        return NETWORK, [network(generator, 2), network(generator, 7), network(generator, 2)]
    if name == "a batch that leaves a layer out":
        return NETWORK, [network(generator, 3), network(generator, 3)[:2]]
    assert name == "tied weights"
    return 22, [tied(generator), tied(generator)]


NAMES = ["dense rows", "layers", "layers with sharing", "a batch that leaves a layer out", "tied weights"]


def twin(size: int, batches: list[list[Piece]]) -> Tensor:
    rows = torch.cat([spelled_out(pieces, size).flatten(0, 1) for pieces in batches])
    return rows.mT @ rows


def dual(name: str) -> Callable[[Generator], Case]:
    def make(generator: Generator) -> Case:
        size, batches = parts(name, generator)

        def own(generator: Generator) -> dict[str, list[Piece]]:
            return {"rows like its own": parts(name, generator)[1][0]}

        return Case(Dual(RowSet.of(size, batches)), twin(size, batches), pieces=own)

    return make


def low_rank(size: int, rank: int) -> Callable[[Generator], Case]:
    def make(generator: Generator) -> Case:
        vectors = torch.linalg.qr(normal(generator, size, rank)).Q
        values = normal(generator, rank).square()
        return Case(LowRank(vectors, values), (vectors * values) @ vectors.mT)

    return make


STRUCTURES = [
    *(Structure(f"Dual, {name}", dual(name)) for name in NAMES),
    Structure("LowRank", low_rank(12, 4)),
    Structure("LowRank, one", low_rank(12, 1)),
    Structure("LowRank of a sum", lambda g: _sum(low_rank(12, 2)(g), low_rank(12, 3)(g))),
    Structure("Dual of a scaled sum", lambda g: _scaled_sum(dual("layers")(g), dual("layers with sharing")(g))),
]


def _sum(a: Case, b: Case) -> Case:
    return Case(a.curvature + b.curvature, a.matrix + b.matrix)


def _scaled_sum(a: Case, b: Case) -> Case:
    return Case(a.curvature * 2.0 + 0.5 * b.curvature, 2 * a.matrix + b.matrix / 2)


every_structure = pytest.mark.parametrize("structure", STRUCTURES, ids=str)

# -- the two suites -------------------------------------------------------------------------------------------------

ELSEWHERE = {
    "test_a_small_budget_cuts_the_work_and_changes_nothing",  # looks for budgets in the modules that it knows
    "test_results_keep_the_dtype_of_the_curvature",  # knows how to narrow the structures that it knows
}


def adopted() -> Iterator[tuple[str, FunctionType]]:
    """The tests of every structure, with the structures of this file."""
    for module in (test_curvature, test_precision, test_bad_curvature):
        for name, test in vars(module).items():
            if not (name.startswith("test_") and isinstance(test, FunctionType)) or name in ELSEWHERE:
                continue
            if "structure" not in signature(test).parameters:
                continue
            copy = FunctionType(test.__code__, test.__globals__, name, test.__defaults__, test.__closure__)
            copy.__annotations__, copy.__doc__ = test.__annotations__, test.__doc__
            others = [mark for mark in test.pytestmark if mark.args[0] != "structure"]  # pyright: ignore
            copy.pytestmark = [*others, every_structure.mark]  # pyright: ignore
            suffix = module.__name__.rpartition("test_")[2]
            yield f"{name}_{suffix}", copy


globals().update(adopted())


def test_the_suites_were_found() -> None:
    assert len([name for name in globals() if name.endswith(("_curvature", "_precision"))]) >= 25


# -- priors that are constant on tensors ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["layers", "layers with sharing", "a batch that leaves a layer out"])
@pytest.mark.parametrize("kept", [True, False], ids=["Grams kept", "Grams made again"])
def test_every_method_under_a_prior_per_tensor(name: str, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dual_module, "KEPT", 2**31 if kept else 0)
    case = dual(name)(generator())
    pieces = all_pieces(case, generator(2))["rows like its own"]
    rows = spelled_out(pieces, NETWORK)
    v, mixed = normal(generator(3), NETWORK), torch.arange(NETWORK) % 3
    scale = torch.tensor(1.7, dtype=torch.float64, requires_grad=True)
    each = (0.3 + 0.2 * torch.arange(7.0)).double().requires_grad_()

    def outcomes(precision: Precision | Tensor) -> list[Tensor]:
        if isinstance(precision, Precision):
            covariance = precision.quadratic(pieces)
            close(precision.squares(pieces), covariance.diagonal(dim1=1, dim2=2))
            traces = [precision.inverse_trace(), precision.inverse_trace(TENSORS), precision.inverse_trace(mixed)]
            found = [precision.logdet(), precision.solve(v), precision.variance(), covariance, precision.mv(v)]
            return found + traces
        inverse = torch.linalg.inv(precision)
        covariance = torch.einsum("r n p, p q, s n q -> n r s", rows, inverse, rows)
        logdet = torch.linalg.slogdet(precision).logabsdet
        variance = inverse.diagonal()
        traces = [
            torch.stack([variance[groups == k].sum() for k in range(int(groups.max()) + 1)])
            for groups in (0 * TENSORS, TENSORS, mixed)
        ]
        return [logdet, inverse @ v, variance, covariance, precision @ v, *traces]

    ours = (case.curvature * scale).with_prior(each[TENSORS])
    assert ours.blocks is not None  # pyright: ignore[reportAttributeAccessIssue]
    matrix = scale * case.matrix + each[TENSORS].diag()
    for actual, expected in zip(outcomes(ours), outcomes(matrix), strict=True):
        close(actual, expected)
        weights = normal(generator(4), *actual.shape, 1)[..., 0]
        arguments = ((actual * weights).sum(), (each, scale)), ((expected * weights).sum(), (each, scale))
        for found, right in zip(*(torch.autograd.grad(*a, retain_graph=True) for a in arguments), strict=True):
            close(found, right, 10 * RTOL)


def test_the_derivative_in_a_diagonal_prior_is_right_where_it_happens_to_be_constant() -> None:
    """Tuning starts there: one number per tensor must not be mistaken for one number per entry."""
    case = dual("layers")(generator())
    each = torch.full((NETWORK,), 0.7, dtype=torch.float64, requires_grad=True)
    for prior in (each, each * 1.0, each[torch.arange(NETWORK)]):
        (found,) = torch.autograd.grad(case.curvature.with_prior(prior).logdet(), each)
        close(found, torch.linalg.inv(case.matrix + 0.7 * torch.eye(NETWORK).double()).diagonal())


def test_a_second_derivative_in_a_diagonal_prior() -> None:
    case = dual("layers with sharing")(generator())
    start = 0.5 + torch.rand(NETWORK, dtype=torch.float64, generator=generator(1))
    seconds = []
    for logdet in (
        lambda d: case.curvature.with_prior(d).logdet(),
        lambda d: torch.linalg.slogdet(case.matrix + d.diag()).logabsdet,
    ):
        delta = start.clone().requires_grad_()
        (first,) = torch.autograd.grad(logdet(delta), delta, create_graph=True)
        (second,) = torch.autograd.grad(first[3] + first[20], delta)
        seconds.append(second)
    close(*seconds)


def test_prior_and_scale_of_a_whole_tuning_cost_no_further_gram(monkeypatch: pytest.MonkeyPatch) -> None:
    case, calls = dual("layers")(generator()), []
    whole = row_set.block_cross
    monkeypatch.setattr(row_set, "block_cross", lambda *args: calls.append(1) or whole(*args))
    (case.curvature * 2.0).with_prior(1.0)
    assert len(calls) == 7
    case.curvature.with_prior((1 + torch.arange(7.0).double())[TENSORS])
    assert len(calls) == 14
    for scale in (0.5, 3.0):
        (case.curvature * scale).with_prior(0.3).logdet()
        (case.curvature * scale).with_prior((2 + torch.arange(7.0).double())[TENSORS]).logdet()
    assert len(calls) == 14


# -- chunks, dtypes, copies -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["layers", "layers with sharing", "tied weights"])
@pytest.mark.parametrize("budget", [1, 3000])
def test_a_small_budget_cuts_the_work_and_changes_nothing(name: str, budget: int) -> None:
    def outcomes() -> list[Tensor]:
        case = dual(name)(generator())
        found = all_pieces(case, generator(2))
        v = normal(generator(3), 2, case.size)
        prior = 0.5 + torch.arange(case.size).double() / case.size
        out = [case.curvature.diagonal(), case.curvature.mv(v)]
        for precision in (case.curvature.with_prior(0.7), case.curvature.with_prior(prior)):
            out += [precision.logdet(), precision.solve(v), precision.variance(), precision.draw(2, generator(4))]
            out += [precision.quadratic(found[name]) for name in ("rows like its own", "a shared weight")]
        return out

    whole = outcomes()
    with within(MemoryBudget(budget)):
        cut = outcomes()
    for actual, expected in zip(cut, whole, strict=True):
        close(actual, expected)


def narrow(pieces: list[Piece]) -> list[Piece]:
    def one(piece: Piece) -> Piece:
        return replace(piece, **{name: factor.float() for name, factor in piece.factors.items()})

    return [one(piece) for piece in pieces]


@pytest.mark.parametrize("name", NAMES)
def test_float32_stays_float32_and_is_right_for_priors_far_below_the_curvature(name: str) -> None:
    """Variances of what the data determine are differences of nearly equal numbers: never negative, nearly right."""
    size, batches = parts(name, generator())
    matrix = twin(size, batches)
    curvature = Dual(RowSet.of(size, [narrow(pieces) for pieces in batches]))
    pieces = batches[0]
    rows = spelled_out(pieces, size)
    for delta in (1.0, 1e-6):
        for prior in (delta, torch.full((size,), delta, dtype=torch.float64)):
            precision = (curvature * 2.0).with_prior(prior)
            full = 2 * matrix + delta * torch.eye(size, dtype=torch.float64)
            v = normal(generator(1), size).float()
            results = [precision.solve(v), precision.draw(2, generator()), precision.logdet(), precision.variance()]
            found = precision.quadratic(narrow(pieces))
            assert all(result.dtype == torch.float32 for result in (*results, found))
            expected = torch.einsum("r n p, p q, s n q -> n r s", rows, torch.linalg.inv(full), rows)
            assert float((found - expected).abs().max() / expected.abs().max()) < 1e-4
            assert abs(float(results[2]) - float(torch.linalg.slogdet(full).logabsdet)) < 1e-3 * size


def test_rows_are_copied_so_that_a_refilled_batch_does_not_change_them() -> None:
    size, batches = parts("layers with sharing", generator())
    before = twin(size, batches)
    rows = RowSet.of(size, batches)
    for piece in (piece for pieces in batches for piece in pieces):
        for tensor in vars(piece).values():
            if isinstance(tensor, Tensor):
                tensor.zero_()
    close(Dual(rows).dense(), before)


def test_batches_of_one_form_are_joined() -> None:
    """Products of many small batches are few and large."""
    size, batches = parts("layers", generator())
    rows = RowSet.of(size, batches * 5)
    assert len(rows.parts) == 1
    assert rows.count == 80
    close(Dual(rows).dense(), 5 * twin(size, batches))


def test_shared_rows_are_kept_in_the_smaller_form() -> None:
    few, many = outer(TURNED, generator(), 2), outer(TURNED, generator(), 40)
    assert isinstance(RowSet.of(14, [[many]]).parts[0][0], DenseRows)
    wide = MatrixLayout(0, (30, 30), (0, 1), 1, 30, 30)
    assert isinstance(RowSet.of(900, [[outer(wide, generator(), 2)]]).parts[0][0], OuterRows)
    close(Dual(RowSet.of(14, [[few], [many]])).dense(), twin(14, [[few], [many]]))


def test_no_row_of_a_layer_is_spelled_out_without_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object) -> None:
        raise AssertionError("columns of R were spelled out")

    monkeypatch.setattr(stacks.Stack, "columns", never)
    layout = MatrixLayout(0, (30, 20), (0, 1), 1, 30, 20, bias=600)
    batches: list[list[Piece]] = [[outer(layout, generator(), 1)], [outer(layout, generator(1), 1)]]
    curvature = Dual(RowSet.of(630, batches))
    precision = curvature.with_prior(0.5)
    rows = spelled_out(batches[0], 630)
    inverse = torch.linalg.inv(twin(630, batches) + 0.5 * torch.eye(630, dtype=torch.float64))
    expected = torch.einsum("r n p, p q, s n q -> n r s", rows, inverse, rows)
    close(precision.quadratic(batches[0]), expected)
    per_tensor = torch.cat([torch.full((600,), 0.5), torch.full((30,), 0.2)]).double()
    curvature.with_prior(per_tensor).squares(batches[0])


# -- what is refused ------------------------------------------------------------------------------------------------


@every_structure
def test_a_zero_prior_says_why(structure: Structure) -> None:
    case = structure.make(generator())
    vector = torch.ones(case.size, dtype=torch.float64)
    vector[0] = 0
    for prior in (0.0, vector):
        with pytest.raises(CurvatureError, match=r"divides by the prior.*expected numbers > 0.*larger prior"):
            case.curvature.with_prior(prior)


@every_structure
@pytest.mark.parametrize("scale", [-1.0, float("inf")])
def test_a_scale_that_leaves_no_curvature_is_refused(structure: Structure, scale: float) -> None:
    case = structure.make(generator())
    with pytest.raises(CurvatureError, match=r"expected"):
        (case.curvature * scale).with_prior(1.0)


def test_rows_that_are_not_finite_are_refused() -> None:
    rows = torch.ones(1, 2, 3, dtype=torch.float64)
    rows[0, 1, 2] = float("nan")
    curvature = Dual(RowSet.of(3, [[DenseRows(0, rows)]]))
    for prior in (1.0, torch.arange(1.0, 4.0).double()):
        with pytest.raises(CurvatureError, match=r"NaN or infinite.*expected.*Check"):
            curvature.with_prior(prior)
    with pytest.raises(CurvatureError, match=r"no rows; expected"):
        RowSet.of(3, [])


def test_scaled_by_zero_leaves_the_prior() -> None:
    case = dual("layers")(generator())
    precision = (case.curvature * 0.0).with_prior(2.0)
    close(precision.variance(), torch.full((NETWORK,), 0.5, dtype=torch.float64))


# -- low rank -------------------------------------------------------------------------------------------------------


def test_low_rank_of_columns_has_their_rank_and_orthonormal_vectors() -> None:
    columns = normal(generator(), 9, 3)
    columns = torch.cat([columns, columns @ normal(generator(1), 3, 4)], dim=1)
    found = LowRank.of(columns)
    assert found.rank == 3
    close(found.dense(), columns @ columns.mT)
    close(found.vectors.mT @ found.vectors, torch.eye(3, dtype=torch.float64))
    assert LowRank.of(columns, 2).rank == 2
    best = torch.linalg.eigvalsh(columns @ columns.mT).flip(0)
    close(LowRank.of(columns, 2).values, best[:2])


def test_low_rank_refuses_what_it_cannot_carry() -> None:
    vectors = torch.eye(3, dtype=torch.float64)[:, :2]
    with pytest.raises(CurvatureError, match=r"eigenvalue -1; expected numbers >= 0"):
        LowRank(vectors, torch.tensor([1.0, -1.0], dtype=torch.float64))
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    one = LowRank(vectors, torch.ones(2, dtype=torch.float64))
    with pytest.raises(CurvatureError, match=r"require gradients; expected fixed ones. Add first"):
        (one * scale + one).with_prior(1.0)
    with pytest.raises(CurvatureError, match="cannot add"):
        _ = one + Dense(torch.eye(3, dtype=torch.float64))
