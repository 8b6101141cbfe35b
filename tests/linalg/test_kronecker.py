"""Kronecker blocks beyond the contract: the nearest product of several, priors that split a block, damping."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from contracts import LINEAR_BIAS, TABLE, Sums, close, generator, kronecker_case, nearest_product, normal, psd
from lapwing.errors import LapwingWarning
from lapwing.linalg import Kronecker, MatrixLayout, Term, nearest_kronecker

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
            total = total + part
        close(total.dense(), whole)
    assert not torch.allclose((term(slice(0, 6)).dense() + term(slice(6, 12)).dense()), whole)


def test_counts_of_tokens_that_never_occur_leave_the_prior() -> None:
    counts = torch.tensor([[3.0, 0.0, 1.0, 0.0, 2.0]]).double()
    case = kronecker_case(TABLE, [Sums(psd(generator(), 1, 2), counts, 6.0)], True, False)
    variance = case.curvature.with_prior(0.5).variance().reshape(5, 2)
    close(variance[counts[0] == 0], torch.full((2, 2), 2.0, dtype=torch.float64))


def test_terms_of_another_number_cannot_be_added() -> None:
    one = Kronecker(TABLE, (Term(psd(generator(), 1, 2), psd(generator(), 1, 5), 1.0),))
    two = Kronecker(TABLE, one.terms * 2)
    with pytest.raises(ValueError, match="cannot add 2 Kronecker terms to 1"):
        one + two


@pytest.mark.parametrize("option", ["joint_bias", "factored_damping"])
def test_blocks_with_other_options_cannot_be_added(option: str) -> None:
    """The sum would take the options of whichever comes first."""
    one = Kronecker(TABLE, (Term(psd(generator(), 1, 2), psd(generator(), 1, 5), 1.0),))
    with pytest.raises(ValueError, match=r"differ in joint_bias or factored_damping"):
        one + replace(one, **{option: not getattr(one, option)})


def test_another_layout_of_the_same_size_cannot_be_added() -> None:
    """[5, 2] and its transpose have one size, and the sums of their factors no meaning."""
    g = generator()
    turned = MatrixLayout(0, (2, 5), (1, 0), 1, 5, 2)
    one, other = (Kronecker(where, (Term(psd(g, 1, 2), psd(g, 1, 5), 1.0),)) for where in (TABLE, turned))
    with pytest.raises(ValueError, match=r"cannot add .*layout"):
        one + other


def test_a_factor_that_is_clearly_indefinite_is_clamped_with_a_warning() -> None:
    a = torch.diag(torch.tensor([1.0, -0.5])).double()[None]
    curvature = Kronecker(TABLE, (Term(a, torch.ones(1, 5).double(), 1.0),))
    with pytest.warns(LapwingWarning, match=r"eigenvalue -0\.5.*clamped at zero"):
        precision = curvature.with_prior(1.0)
    close(precision.variance().reshape(5, 2)[0], torch.tensor([0.5, 1.0]).double())
