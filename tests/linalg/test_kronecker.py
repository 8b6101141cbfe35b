"""Kronecker blocks beyond the contract: the nearest product of several, priors that split a block, damping."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from contracts import (
    GROUPED_BIAS,
    LINEAR_BIAS,
    TABLE,
    WIDE_BIAS,
    Sums,
    close,
    generator,
    kronecker,
    kronecker_case,
    nearest_product,
    normal,
    outer,
    psd,
)
from lapwing.errors import CurvatureError, LapwingWarning
from lapwing.linalg import Kronecker, KroneckerSum, MatrixLayout, Term, nearest_kronecker
from lapwing.linalg.checks import WIDE, eigh_psd
from lapwing.linalg.kronecker import structure as eigenbasis
from lapwing.linalg.kronecker.factors import add_terms, apply, rotated_diagonal
from lapwing.serialize import pack, unpack

fast = settings(deadline=None, max_examples=50, derandomize=True)


def distance(a: Tensor, g: Tensor, terms: list[Term]) -> float:
    target = sum(torch.kron(_full(t.rows)[0], _full(t.cols)[0]) / t.count for t in terms)
    assert isinstance(target, Tensor)
    return float((torch.kron(_full(g)[0], _full(a)[0]) - target).norm())


def _full(factor: Tensor) -> Tensor:
    return torch.diag_embed(factor) if factor.dim() == 2 else factor


@fast
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(0, 10_000))
def test_the_nearest_product_is_the_first_singular_pair_of_the_rearranged_sum(
    count: int, rows: int, cols: int, seed: int
) -> None:
    """Van Loan: no product is closer in Frobenius norm. The residual is that of the best rank-one matrix."""
    g = generator(seed)
    terms = [Term(psd(g, 1, cols), psd(g, 1, rows), float(1 + i)) for i in range(count)]
    a, b = nearest_kronecker(terms)
    best_a, best_b = nearest_product([Sums(t.cols, t.rows, t.count) for t in terms], 0)
    best = distance(best_a[None], best_b[None], terms)
    assert distance(a, b, terms) <= best * (1 + 1e-9) + 1e-12
    for factor in (a, b):
        assert float(torch.linalg.eigvalsh(factor).min()) >= -1e-12 * float(factor.abs().max())


def test_the_nearest_product_of_one_product_is_that_product() -> None:
    g = generator()
    a, b = psd(g, 1, 3), psd(g, 1, 2)
    terms = [Term(a, b, 2.0), Term(3 * a, 0.5 * b, 4.0), Term(torch.zeros_like(a), torch.zeros_like(b), 0.0)]
    found_a, found_b = nearest_kronecker(terms)
    close(torch.kron(found_b[0], found_a[0]), torch.kron(b[0], a[0]) * (1 / 2 + 1.5 / 4))


def test_the_nearest_product_of_equal_orthogonal_terms_is_psd() -> None:
    """Two solutions, and every mixture of them: the difference of the two would be one as well."""
    e, f = torch.diag(torch.tensor([1.0, 0.0])).double(), torch.diag(torch.tensor([0.0, 1.0])).double()
    terms = [Term(e[None], e[None], 1.0), Term(f[None], f[None], 1.0)]
    a, b = nearest_kronecker(terms)
    assert float(torch.linalg.eigvalsh(torch.kron(b[0], a[0])).min()) >= 0
    assert distance(a, b, terms) == pytest.approx(1.0)


def test_the_nearest_product_of_nothing_is_zero() -> None:
    zero = torch.zeros(2, 3, 3, dtype=torch.float64)
    a, b = nearest_kronecker([Term(zero, zero, 1.0), Term(zero, zero, 1.0)])
    assert torch.equal(a, zero)
    assert torch.isfinite(b).all()


def test_close_singular_values_do_not_slow_the_nearest_product_down() -> None:
    """Where a power iteration would still be on its way."""
    e, f = torch.diag(torch.tensor([1.0, 0.0])).double(), torch.diag(torch.tensor([0.0, 1.0])).double()
    terms = [Term(e[None] * (1 + 1e-6), e[None], 1.0), Term(f[None], f[None], 1.0)]
    a, b = nearest_kronecker(terms)
    close(torch.kron(b[0], a[0]), torch.kron(e, e) * (1 + 1e-6))


def test_a_prior_per_tensor_splits_the_block_and_keeps_its_factors() -> None:
    """A_ww (x) G + d_w and A_bb G + d_b, the sub-blocks of the factors that are stored; no correlation between them."""
    g = generator()
    a, b = psd(g, 1, 4), psd(g, 1, 2)
    curvature = Kronecker(LINEAR_BIAS, (Term(a, b, 1.0),))
    prior = torch.cat([torch.full((6,), 0.5), torch.full((2,), 2.0)]).double()
    inverse = curvature.with_prior(prior).solve(torch.eye(8, dtype=torch.float64))
    close(inverse[:6, :6], torch.linalg.inv(torch.kron(b[0], a[0, :3, :3]) + 0.5 * torch.eye(6).double()))
    close(inverse[6:, 6:], torch.linalg.inv(b[0] * a[0, 3, 3] + 2 * torch.eye(2).double()))
    assert float(inverse[:6, 6:].abs().max()) == 0
    equal = curvature.with_prior(torch.full((8,), 0.5, dtype=torch.float64))
    assert float(equal.solve(torch.eye(8, dtype=torch.float64))[:6, 6:].abs().max()) > 0.01


def test_the_split_into_batches_does_not_matter() -> None:
    """Sums and counts are stored and the product is formed last."""
    g = generator()
    inputs, outputs = normal(g, 12, 4), normal(g, 12, 2)

    def term(part: slice) -> Kronecker:
        a, b = inputs[part], outputs[part]
        return Kronecker(LINEAR_BIAS, (Term((a.mT @ a)[None], (b.mT @ b)[None], float(len(a))),))

    whole = term(slice(0, 12)).dense()
    for cuts in ([0, 5, 12], [0, 1, 2, 12], [0, 6, 12]):
        parts = [term(slice(i, j)) for i, j in itertools.pairwise(cuts)]
        total = parts[0]
        for part in parts[1:]:
            total = total.pooled(part)
        close(total.dense(), whole)
    assert not torch.allclose((term(slice(0, 6)).dense() + term(slice(6, 12)).dense()), whole)


def test_counts_of_tokens_that_never_occur_leave_the_prior() -> None:
    counts = torch.tensor([[3.0, 0.0, 1.0, 0.0, 2.0]]).double()
    case = kronecker_case(TABLE, [Sums(psd(generator(), 1, 2), counts, 6.0)], True, False)
    variance = case.curvature.with_prior(0.5).variance().reshape(5, 2)
    close(variance[counts[0] == 0], torch.full((2, 2), 2.0, dtype=torch.float64))


def test_terms_of_another_number_cannot_be_pooled() -> None:
    one = Kronecker(TABLE, (Term(psd(generator(), 1, 2), psd(generator(), 1, 5), 1.0),))
    two = Kronecker(TABLE, one.terms * 2)
    with pytest.raises(CurvatureError, match="cannot add 2 Kronecker terms to 1"):
        one.pooled(two)
    close((one + two).dense(), one.dense() + two.dense())


@pytest.mark.parametrize("option", ["joint_bias", "factored_damping"])
def test_blocks_with_other_options_cannot_be_added(option: str) -> None:
    """The sum would take the options of whichever comes first."""
    one = Kronecker(TABLE, (Term(psd(generator(), 1, 2), psd(generator(), 1, 5), 1.0),))
    other = replace(one, **{option: not getattr(one, option)})
    for add in (Kronecker.__add__, Kronecker.pooled):
        with pytest.raises(CurvatureError, match=r"differ in joint_bias or factored_damping"):
            add(one, other)


def test_another_layout_of_the_same_size_cannot_be_added() -> None:
    """[5, 2] and its transpose have one size, and the sums of their factors no meaning."""
    g = generator()
    turned = MatrixLayout(0, (2, 5), (1, 0), 1, 5, 2)
    one, other = (Kronecker(where, (Term(psd(g, 1, 2), psd(g, 1, 5), 1.0),)) for where in (TABLE, turned))
    for add in (Kronecker.__add__, Kronecker.pooled):
        with pytest.raises(CurvatureError, match=r"cannot add .*layout"):
            add(one, other)


# -- sums of products -------------------------------------------------------------------------------------------------


def tasks(layout: MatrixLayout, count: int, seed: int = 0, damped: bool = False) -> list[Kronecker]:
    found = [kronecker(layout, damped=damped)(generator(seed + i)).curvature for i in range(count)]
    return [each for each in found if isinstance(each, Kronecker)]


def test_differently_scaled_blocks_are_no_batches_of_one_data_set() -> None:
    one, other = tasks(LINEAR_BIAS, 2)
    with pytest.raises(CurvatureError, match=r"multiplied by 3 and 0\.5.*expected equal scales.*Add them with \+"):
        (3 * one).pooled(0.5 * other)
    close((2 * one).pooled(2 * other).dense(), 2 * one.pooled(other).dense())


@pytest.mark.parametrize("layout", [WIDE_BIAS, GROUPED_BIAS, TABLE], ids=["bias", "groups", "table"])
def test_a_large_sum_is_its_own_diagonal_in_the_eigenbasis_of_the_nearest_product(
    layout: MatrixLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same trace, and nearer to the sum than the nearest product is; the distance is as stated."""
    monkeypatch.setattr(eigenbasis, "DENSE_LIMIT", 0)
    one, other = tasks(layout, 2)
    total = 3 * one + 0.5 * other
    exact, found = total.dense(), total.decomposed.dense()
    product = Kronecker(layout, (Term(*nearest_kronecker([Term(*p.factors, 1.0) for p in total.parts]), 1.0),))
    assert float(found.trace()) == pytest.approx(float(exact.trace()), rel=1e-12)
    assert float((found - exact).norm()) < float((product.dense() - exact).norm())
    assert total.merge_error == pytest.approx(float((found - exact).norm() / exact.norm()), rel=1e-9)
    assert 0.01 < total.merge_error < 0.5
    precision = total.with_prior(0.7)
    eye = torch.eye(total.size, dtype=torch.float64)
    close(precision.solve(eye), torch.linalg.inv(found + 0.7 * eye))
    close((2 * total).with_prior(1.4).logdet(), precision.logdet() + total.size * torch.tensor(2.0).double().log())
    rows = [outer(layout, generator(5), 1)]
    close(total.sweep(rows, torch.tensor([0.7], dtype=torch.float64))[0], precision.squares(rows))


def test_proportional_terms_lose_nothing_by_merging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eigenbasis, "DENSE_LIMIT", 0)
    (one,) = tasks(LINEAR_BIAS, 1)
    total = one + 2 * one
    assert total.merge_error < 1e-7
    close(total.decomposed.dense(), 3 * one.dense())


def test_up_to_the_limit_nothing_is_merged() -> None:
    one, other = tasks(LINEAR_BIAS, 2)
    assert (one + other).merge_error == 0
    assert eigenbasis.DENSE_LIMIT >= 1000


@pytest.mark.parametrize("width", [128, 129, 300])
def test_wide_factors_are_inverted_in_blocks(width: int) -> None:
    g = generator()
    layout = MatrixLayout(0, (2, 2, width), (0, 1, 2), groups=2, rows=2, cols=width)
    a, b = psd(g, 2, width), psd(g, 2, 2)
    precision = Kronecker(layout, (Term(a, b, 1.0),), factored_damping=True).with_prior(0.5)
    v = normal(g, 4 * width)
    matrix = precision.mv(torch.eye(4 * width, dtype=torch.float64))
    torch.testing.assert_close(precision.solve(v), torch.linalg.solve(matrix, v), rtol=1e-9, atol=1e-12)
    (part,) = precision.parts
    assert part.inverse is not None
    torch.testing.assert_close(part.inverse.cols, torch.linalg.inv(part.cols), rtol=1e-9, atol=1e-12)


def test_factored_damping_damps_the_factors_of_the_nearest_product() -> None:
    one, other = tasks(LINEAR_BIAS, 2, damped=True)
    total = one + other
    cols, rows = nearest_kronecker([Term(*p.factors, 1.0) for p in (one, other)])
    nearest = Kronecker(LINEAR_BIAS, (Term(cols, rows, 1.0),), factored_damping=True)
    close(total.with_prior(0.5).variance(), nearest.with_prior(0.5).variance())
    exact = total.dense()
    assert total.merge_error == pytest.approx(float((nearest.dense() - exact).norm() / exact.norm()), rel=1e-9)


def test_beyond_the_limit_of_memory_the_two_terms_that_lose_least_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = tasks(LINEAR_BIAS, 2)
    bytes_of_two = 2 * sum(8 * factor.numel() for factor in one.factors)
    monkeypatch.setattr(eigenbasis, "TERMS_LIMIT", bytes_of_two)
    total = one + other
    with pytest.warns(LapwingWarning, match=r"exceeds the limit of .* were merged, at a relative distance of"):
        total = total + 3 * one  # which is proportional to the first
    assert len(total.parts) == 2
    close(total.dense(), 4 * one.dense() + other.dense())
    third = tasks(LINEAR_BIAS, 1, seed=7)[0]
    with pytest.warns(LapwingWarning) as said:
        merged = total + third
    exact = total.dense() + third.dense()
    distance = float((merged.dense() - exact).norm() / exact.norm())
    assert f"distance of {distance:.2g} from" in str(said[0].message)


def test_one_term_that_is_there_twice_is_merged_once() -> None:
    """All pairs lose nothing, so that rounding chooses; a pair of unequal objects took the third term with it."""
    for one in tasks(LINEAR_BIAS, 10):
        total = 3 * one + one + one
        merged, error = total.merged()
        assert len(merged.parts) == 2
        assert error < 1e-7
        close(merged.dense(), 5 * one.dense())


def test_a_sum_of_one_term_is_that_term_under_any_prior() -> None:
    (one,) = tasks(LINEAR_BIAS, 1)
    prior = torch.full((one.size,), 2.0, dtype=torch.float64)
    layout = one.layout
    assert layout.bias is not None
    prior[layout.bias : layout.bias + layout.rows] = 5.0
    close(KroneckerSum((one,)).with_prior(prior).logdet(), one.with_prior(prior).logdet())
    close((KroneckerSum((one,)) * 3).with_prior(prior).variance(), (one * 3).with_prior(prior).variance())


def test_a_sum_of_products_is_stored_and_read() -> None:
    one, other = tasks(LINEAR_BIAS, 2)
    total = 3 * one + 0.5 * other
    close(unpack(*pack(2 * total)).dense(), 2 * total.dense())


def test_a_factor_that_is_clearly_indefinite_is_clamped_with_a_warning() -> None:
    a = torch.diag(torch.tensor([1.0, -0.5])).double()[None]
    curvature = Kronecker(TABLE, (Term(a, torch.ones(1, 5).double(), 1.0),))
    with pytest.warns(LapwingWarning, match=r"eigenvalue -0\.5.*clamped at zero"):
        precision = curvature.with_prior(1.0)
    close(precision.variance().reshape(5, 2)[0], torch.tensor([0.5, 1.0]).double())


def test_roles_that_both_data_sets_have_are_added_and_others_kept() -> None:
    """A weight that one data set uses in one way and the other in two."""
    g = generator()
    first, second, table = (
        Term(psd(g, 1, 4), psd(g, 1, 3), float(2 + i), role) for i, role in enumerate(("upright", "upright", "formed"))
    )
    for ours, theirs in (((first,), (table, second)), ((table, second), (first,))):
        found = {term.role: term for term in add_terms(ours, theirs)}
        assert set(found) == {"upright", "formed"}
        close(found["upright"].cols, first.cols + second.cols)
        close(found["upright"].rows, first.rows + second.rows)
        assert found["upright"].count == 5.0
        close(found["formed"].cols, table.cols)


@pytest.mark.parametrize("rows", ["matrix", "diagonal"])
@pytest.mark.parametrize("cols", ["matrix", "diagonal"])
def test_factors_that_are_diagonal_are_those_spelled_out(rows: str, cols: str) -> None:
    a, g = (torch.stack([psd(generator(seed + n), size) for n in range(2)]) for seed, size in ((0, 3), (5, 4)))
    a, g = (each.diagonal(dim1=1, dim2=2) if how == "diagonal" else each for each, how in ((a, cols), (g, rows)))
    matrix, vectors = normal(generator(9), 2, 4, 3), torch.linalg.qr(normal(generator(8), 2, 3, 3)).Q
    close(apply(matrix, a, g), _full(g) @ matrix @ _full(a))
    expected = (vectors.mT @ _full(a) @ vectors).diagonal(dim1=1, dim2=2)
    close(rotated_diagonal(a, vectors), expected)
    close(rotated_diagonal(a, None), _full(a).diagonal(dim1=1, dim2=2))


@pytest.mark.parametrize("scale", [1.0, 1.001])
def test_wide_factors_in_float32_are_decomposed_as_they_are_if_that_is_good_enough(scale, monkeypatch):
    root = torch.randn(1, WIDE, 300, generator=torch.Generator().manual_seed(0))
    matrix, asked, eigh = root @ root.mT, [], torch.linalg.eigh

    def watched(given: Tensor) -> tuple[Tensor, Tensor]:
        asked.append(given.dtype)
        values, vectors = eigh(given)
        return values, vectors if given.dtype == torch.float64 else vectors * scale

    monkeypatch.setattr(torch.linalg, "eigh", watched)
    values, vectors = eigh_psd(matrix, "a factor", single=True)
    assert asked == ([torch.float32] if scale == 1 else [torch.float32, torch.float64])
    expected = eigh(matrix.double())[0]
    torch.testing.assert_close(values.double(), expected, rtol=0, atol=2e-6 * float(expected.max()))
    product = (vectors * values.unsqueeze(1)) @ vectors.mT
    torch.testing.assert_close(product, matrix, rtol=0, atol=2e-6 * float(expected.max()))
    asked.clear()
    eigh_psd(matrix[:, 1:, 1:], "a narrower factor", single=True)
    eigh_psd(matrix, "no factor")
    assert asked == [torch.float64, torch.float64]
