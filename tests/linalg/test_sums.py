"""Sums of curvatures of any structures: exact as matrices, and with a prior as far as they say."""

from __future__ import annotations

from itertools import combinations_with_replacement
from typing import Any

import pytest
import torch
from torch import Tensor

from lapwing.errors import CurvatureError
from lapwing.linalg import (
    Block,
    Blocks,
    Curvature,
    Dense,
    Diagonal,
    Kronecker,
    MatrixLayout,
    MixedSum,
    Segments,
    Term,
    merged_factors,
    sums,
    total,
)

EXACT: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-11}
LAYOUT = MatrixLayout(0, (3, 4), (0, 1), groups=1, rows=3, cols=4, bias=12)
KINDS = ("kronecker", "sum", "corrected", "diagonal", "mixed", "separate", "lookup")


def psd(n: int, k: int = 1) -> Tensor:
    root = torch.randn(k, n, n, dtype=torch.float64)
    return root @ root.mT


def product(joint: bool = True) -> Kronecker:
    return Kronecker(LAYOUT, (Term(psd(5), psd(3), 2.0),), joint_bias=joint)


def block(kind: str) -> Curvature:
    if kind == "diagonal":
        return Diagonal(torch.rand(15, dtype=torch.float64))
    if kind == "corrected":
        return product().in_eigenbasis()
    if kind == "mixed":
        return MixedSum((product().in_eigenbasis(), Diagonal(torch.rand(15, dtype=torch.float64))))
    if kind == "separate":
        return product(joint=False)
    if kind == "lookup":  # a factor that is diagonal, as that of a table
        return Kronecker(LAYOUT, (Term(torch.rand(1, 5, dtype=torch.float64), psd(3), 2.0),)).in_eigenbasis()
    return product() + product() if kind == "sum" else product()


@pytest.fixture(params=[0, 2048])
def limit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Blocks that are never dense, and those that are."""
    monkeypatch.setattr(sums, "DENSE_LIMIT", request.param)
    return request.param


@pytest.mark.parametrize(("first", "second"), list(combinations_with_replacement(KINDS, 2)))
def test_a_sum_of_two_blocks_is_that_of_their_matrices(first: str, second: str, limit: int) -> None:
    torch.manual_seed(0)
    a, b = block(first), block(second)
    found, dense = total(a, b), a.dense() + b.dense()
    v = torch.randn(2, 15, dtype=torch.float64)
    torch.testing.assert_close(found.dense(), dense, **EXACT)
    torch.testing.assert_close(found.mv(v), v @ dense, **EXACT)
    torch.testing.assert_close(found.diagonal(), dense.diagonal(), **EXACT)
    torch.testing.assert_close((found * 3).dense(), 3 * dense, **EXACT)
    if isinstance(found, MixedSum):
        assert not limit
        near = found.decomposed.dense()
        torch.testing.assert_close(near.trace(), dense.trace(), **EXACT)
        error = float((near - dense).norm() / dense.norm())
        torch.testing.assert_close(found.merge_error, error, rtol=1e-6, atol=1e-7)
        expected = near + 0.5 * torch.eye(15, dtype=torch.float64)
        torch.testing.assert_close(found.with_prior(0.5).to_matrix(), expected, **EXACT)
        torch.testing.assert_close((found * 3).with_prior(1.5).to_matrix(), 3 * expected, **EXACT)
        torch.testing.assert_close(found.grouped_logdet(None)(v.new_ones(1) / 2), torch.logdet(expected), **EXACT)
    elif limit:
        expected = dense + 0.5 * torch.eye(15, dtype=torch.float64)
        torch.testing.assert_close(found.with_prior(0.5).to_matrix(), expected, **EXACT)


def test_terms_in_one_basis_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product, and the same in its eigenbasis: diagonal there, the sum as well."""
    monkeypatch.setattr(sums, "DENSE_LIMIT", 0)
    torch.manual_seed(0)
    one = product()
    found = total(one, one.in_eigenbasis())
    assert isinstance(found, MixedSum)
    assert found.merge_error < 1e-7
    torch.testing.assert_close(found.decomposed.dense(), 2 * one.dense(), **EXACT)


def test_blocks_and_what_is_not_of_blocks() -> None:
    torch.manual_seed(0)
    parts = (Block("a", Segments(((0, 15),)), product()), Block("b", Segments(((15, 17),)), Dense(psd(2)[0])))
    blocks = Blocks(17, parts)
    whole, diagonal = Dense(psd(17)[0]), Diagonal(torch.rand(17, dtype=torch.float64))
    singles = [Block(str(i), Segments(((i, i + 1),)), Dense(psd(1)[0])) for i in range(17)]
    empty = Block("c", Segments(((15, 17),)), Diagonal(torch.zeros(2, dtype=torch.float64)))
    for other in (whole, diagonal, Blocks(17, tuple(singles)), Blocks(17, (parts[0], empty))):
        for a, b in ((blocks, other), (other, blocks)):
            torch.testing.assert_close(total(a, b).dense(), a.dense() + b.dense(), **EXACT)
    assert isinstance(total(blocks, diagonal), Blocks)
    assert isinstance(total(blocks, whole), Dense)


def test_sums_of_blocks_keep_the_names_of_what_no_data_have_reached() -> None:
    def zeros(name: str, start: int, stop: int) -> Block:
        return Block(name, Segments(((start, stop),)), Diagonal(torch.zeros(stop - start, dtype=torch.float64)))

    one = Block("b", Segments(((2, 3),)), Dense(psd(1)[0]))
    first = Blocks(4, (zeros("a", 0, 2), one, zeros("c", 3, 4)))
    second = Blocks(4, (zeros("other", 0, 1), zeros("others", 1, 2), one, zeros("third", 3, 4)))
    found = total(first, second)
    assert isinstance(found, Blocks)
    assert [(block.name, block.segments.intervals) for block in found.blocks] == [
        ("a", ((0, 2),)),
        ("b", ((2, 3),)),
        ("c", ((3, 4),)),
    ]
    torch.testing.assert_close(found.dense(), first.dense() + second.dense(), **EXACT)


@pytest.mark.parametrize("joint", [True, False])
def test_damped_factors_that_are_diagonal(joint: bool) -> None:
    """Factors as vectors, on either side, are those of the diagonal matrices."""
    torch.manual_seed(0)
    col, row = torch.rand(1, 5, dtype=torch.float64), torch.rand(1, 3, dtype=torch.float64)
    v = torch.randn(2, 15, dtype=torch.float64)
    for cols, rows in ((col, psd(3)), (psd(5), row), (col, row)):
        dense = [each if each.dim() == 3 else torch.diag_embed(each) for each in (cols, rows)]
        ours, theirs = (
            Kronecker(LAYOUT, (Term(*each, 2.0),), joint_bias=joint, factored_damping=True).with_prior(0.3)
            for each in ((cols, rows), dense)
        )
        torch.testing.assert_close(ours.mv(v), theirs.mv(v), **EXACT)
        torch.testing.assert_close(ours.mv(v), v @ ours.to_matrix(), **EXACT)
        torch.testing.assert_close(ours.solve(v), torch.linalg.solve(ours.to_matrix(), v.mT).mT, **EXACT)


def test_large_sums_without_a_structure_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "DENSE_LIMIT", 0)
    torch.manual_seed(0)
    other = Kronecker(MatrixLayout(0, (5, 3), (0, 1), groups=1, rows=5, cols=3), (Term(psd(3), psd(5), 1.0),))
    with pytest.raises(CurvatureError, match="cannot add Kronecker to Kronecker of 15 parameters"):
        total(product(), other)


@pytest.mark.parametrize("groups", [1, 2])
def test_merged_factors_have_the_partial_traces_of_the_sum(groups: int) -> None:
    torch.manual_seed(0)
    layout = MatrixLayout(0, (groups, 3, 4), (0, 1, 2), groups=groups, rows=3, cols=4)
    parts = [Kronecker(layout, (Term(psd(4, groups), psd(3, groups), 2.0),)) for _ in range(3)]
    one = merged_factors(parts)
    dense = sum((part.dense() for part in parts), start=torch.zeros((), dtype=torch.float64))
    size = 12
    for k in range(groups):
        place = slice(k * size, (k + 1) * size)
        ours, theirs = (each[place, place].reshape(3, 4, 3, 4) for each in (one.dense(), dense))
        for equation in ("o i o j -> i j", "o i p i -> o p"):
            torch.testing.assert_close(torch.einsum(equation, ours), torch.einsum(equation, theirs), **EXACT)
    again = merged_factors([merged_factors(parts[:2]), parts[2]])
    torch.testing.assert_close(again.dense(), one.dense(), **EXACT)
    # a scale that moves from one factor to the other changes nothing
    moved = [Kronecker(layout, (Term(5 * p.terms[0].cols, p.terms[0].rows / 5, 2.0),)) for p in parts[:1]]
    torch.testing.assert_close(merged_factors([*moved, *parts[1:]]).dense(), one.dense(), **EXACT)


def test_merged_factors_of_one_product_and_of_a_diagonal_one() -> None:
    torch.manual_seed(0)
    one = product()
    assert merged_factors([one]) is one
    diagonal = Kronecker(LAYOUT, (Term(torch.rand(1, 5, dtype=torch.float64), psd(3), 1.0),))
    spelled = Kronecker(LAYOUT, (Term(torch.diag_embed(diagonal.terms[0].cols), diagonal.terms[0].rows, 1.0),))
    for parts in ([one, diagonal], [diagonal, one]):
        expected = merged_factors([spelled if part is diagonal else part for part in parts])
        torch.testing.assert_close(merged_factors(parts).dense(), expected.dense(), **EXACT)
