"""Ways through the library that few models and data take: each against brute force, or against what it promises."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lapwing import Laplace, Tangent, estimate
from lapwing.errors import DataError, LapwingError, LapwingWarning, ParameterError
from lapwing.estimate import leading_eigenpairs
from lapwing.evidence.linearised_data import Point
from lapwing.evidence.marginal import GaussianFit
from lapwing.likelihoods import Bernoulli, Gaussian
from lapwing.linalg import Block, Blocks, Diagonal
from lapwing.linalg.addends import with_addends
from lapwing.linalg.layout import Segments
from lapwing.linalg.low_rank import LowRank
from lapwing.serialize.files import write
from lapwing.tables import training as table_training
from lapwing.tables.network import Spec
from lapwing.tangent.sources import parameter_alias, view_alias

EXACT: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-12}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def regression(structure: str, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    return Laplace(model, "regression", "all", structure, **options)


def batches(seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    return [(normal(4, 2, seed=seed + i), normal(4, 1, seed=seed + 9 + i)) for i in range(2)]


# -- views of parameters ---------------------------------------------------------------------------------------------


def test_a_view_that_leaves_its_parameter_is_no_part_of_it() -> None:
    """Parameters that share a storage, as in a flat buffer of them all."""
    flat = torch.arange(8.0)
    parameter, whole = flat[2:6], parameter_alias("w", 10, torch.Size([4]))
    inside = view_alias(flat[3:6], parameter, whole)
    assert inside is not None
    assert (inside.start, inside.stored) == (11, (3,))
    assert view_alias(flat[3:7], parameter, whole) is None
    assert view_alias(flat[1:4], parameter, whole) is None
    assert view_alias(flat[2:2], parameter, whole) is None
    assert view_alias(parameter.view(torch.int32), parameter, whole) is None
    across = flat.view(4, 2).T
    assert view_alias(across[0, :1], across, parameter_alias("w", 10, across.shape)) is None


class Hidden(torch.autograd.Function):
    """rows @ table^T, where no recorder sees the table."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, table: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(rows, table)
        return rows @ table.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows, table = ctx.saved_tensors
        return grad @ table, grad.T @ rows


class Tied(nn.Module):
    """A table that is looked up, and used by an operation without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3, dtype=torch.float64)
        self.inner = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return Hidden.apply(self.inner(self.table(x)), self.table.weight)  # pyright: ignore[reportReturnType]


def test_a_table_that_is_looked_up_and_used_out_of_sight() -> None:
    torch.manual_seed(0)
    model, x = Tied(), torch.tensor([0, 3, 3])
    found = Tangent(model).at(x).rows()
    for n in range(3):
        for c in range(5):
            grads = torch.autograd.grad(model(x)[n, c], list(model.parameters()))
            torch.testing.assert_close(found[n, c], torch.cat([each.flatten() for each in grads]), **EXACT)


# -- fits in several passes --------------------------------------------------------------------------------------------


def test_data_are_added_in_the_basis_of_those_before_also_with_a_checkpoint(tmp_path: Path) -> None:
    plain, kept = regression("ekfac"), regression("ekfac")
    for la, options in ((plain, {}), (kept, {"checkpoint": tmp_path / "fit", "checkpoint_every": 1})):
        la.fit(batches())
        la.fit(batches(5), override=False, **options)
    torch.testing.assert_close(kept.curvature.dense(), plain.curvature.dense(), **EXACT)


def test_an_iterator_is_refused_where_a_second_pass_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leading_eigenpairs, "GRAM_ROWS", 3)
    la = regression("lowrank")
    with pytest.raises(DataError, match="only once"):
        la.fit(iter(batches()), checkpoint=tmp_path / "fit")


def test_a_low_rank_matrix_has_no_more_directions_than_there_are() -> None:
    one = normal(4, 1)
    found = LowRank.of(torch.cat([one, 2 * one, -one], 1))
    assert found.rank == 1
    torch.testing.assert_close(found.dense(), 6 * one @ one.T, **EXACT)
    assert LowRank.of(torch.zeros(4, 3)).rank == 1


# -- hyperparameters ---------------------------------------------------------------------------------------------------


def test_the_precision_of_a_full_posterior_counts_an_earlier_one() -> None:
    before = regression("full", prior_precision=0.7)
    before.fit(batches())
    la = Laplace(before.model, "regression", "all", "full", prior=before.as_prior())
    la.fit(batches(5))
    plain = Laplace(before.model, "regression", "all", "full", prior_precision=0.7)
    plain.fit(batches(5))
    torch.testing.assert_close(la.posterior_precision, plain.posterior_precision + before.H, **EXACT)
    assert la.prior_precision.shape == (1,)
    equal = regression("full", prior_precision=torch.full((13,), 0.7, dtype=torch.float64))
    equal.fit(batches())
    again = Laplace(equal.model, "regression", "all", "full", prior=equal.as_prior())
    assert again.prior_precision.tolist() == [0.7]


def test_half_the_squares_are_the_loss_of_a_regression() -> None:
    nothing = torch.zeros(1)
    assert Point(nothing, GaussianFit(3, torch.tensor(8.0)), nothing).loss == 4
    assert Point(nothing, torch.tensor(-3.0), nothing).loss == 3


# -- sizes that do not fit ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda la, wrong: la.functional_variance(wrong.expand(2, 1, -1)),
        lambda la, wrong: la.functional_covariance(wrong.expand(2, 1, -1)),
        lambda la, wrong: la.log_prob(wrong),
        lambda la, wrong: la.square_norm(wrong),
    ],
)
def test_jacobians_and_weights_of_another_size_are_refused(call: Callable[[Any, Tensor], Any]) -> None:
    la = regression("diag")
    la.fit(batches())
    for size in (1, 12, 14):
        with pytest.raises(ParameterError, match=rf"shape .*{size}.*expected last axis 13"):
            call(la, normal(size))


def test_blocks_do_not_add_up_if_one_of_them_does_not() -> None:
    la = regression("gp")
    la.fit(batches())
    one, both = Segments(((0, 2),)), Segments(((2, 15),))
    two = Blocks(15, (Block("a", one, Diagonal(torch.ones(2))), Block("b", both, la.curvature)))
    assert with_addends(two, lambda values: values) is None


def test_padding_by_a_number_that_is_given_by_its_place() -> None:
    torch.manual_seed(0)
    first, last = nn.Linear(2, 3).double(), nn.Linear(5, 1).double()

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = first, last

        def forward(self, x: Tensor) -> Tensor:
            return self.last(F.pad(self.first(x), (1, 1), "constant", 0.5))

    x, y = batches()[0]
    la = Laplace(Padded(), Gaussian(1.0), "all", "full")
    la.fit([(x, y)])
    rows = Tangent(la.model).at(x).rows()[:, 0]
    torch.testing.assert_close(la.H, rows.T @ rows, **EXACT)


# -- limits ------------------------------------------------------------------------------------------------------------


def test_twenty_logits_between_nought_and_one_are_no_chance() -> None:
    likelihood = Bernoulli()
    with pytest.warns(LapwingWarning, match="all 20 outputs"):
        likelihood.refuse_probabilities(torch.linspace(0, 1, 20)[:, None])
    likelihood.refuse_probabilities(torch.linspace(0, 1, 19)[:, None])
    likelihood.refuse_probabilities(torch.linspace(-1e-3, 1, 20)[:, None])
    likelihood.refuse_probabilities(torch.linspace(0, 1.001, 20)[:, None])


@pytest.mark.parametrize("apart", [False, True])
def test_as_many_rows_as_the_limit_are_taken(apart: bool) -> None:
    """3 data points of four outputs: one Gram matrix of 12 rows, or four of 3, which are the 36 numbers of 6 rows."""
    torch.manual_seed(0)
    tangent, x = Tangent(nn.Linear(2, 4)), torch.randn(3, 2)
    data, enough = [(x, torch.zeros(3, 4))], 6 if apart else 12
    assert estimate.dual(tangent, Gaussian(), data, limit=enough, independent_outputs=apart).size == 12
    with pytest.raises(LapwingError, match="raise `limit`"):
        estimate.dual(tangent, Gaussian(), data, limit=enough - 1, independent_outputs=apart)


@pytest.mark.parametrize(("structure", "times"), [("full", 1), ("diag", 0)])
def test_amounts_without_held_out_rows_are_scaled_by_leaving_one_out(
    monkeypatch: pytest.MonkeyPatch, structure: str, times: int
) -> None:
    seen: list[int] = []
    plain = table_training.rescale

    def noted(la: Any, held_out: Any, errors: float = 0.0) -> str:
        seen.append(len(held_out.targets))
        return plain(la, held_out, errors)

    monkeypatch.setattr(table_training, "rescale", noted)
    x = normal(12, 2)
    spec = Spec(2, 1, width=2)
    table_training.train(
        x, x[:, :1] - x[:, 1:], "regression", spec, seed=0, epochs=2, structure=structure, noise="constant"
    )
    assert seen == [12] * times


@pytest.mark.parametrize("letters", range(1, 9))
def test_numbers_of_a_file_begin_at_a_multiple_of_eight_bytes(tmp_path: Path, letters: int) -> None:
    """Whatever the length of the description, as safetensors has it."""
    write(tmp_path / "file", {"a" * letters: torch.ones(2)}, {})
    found = (tmp_path / "file").read_bytes()
    assert int.from_bytes(found[:8], "little") % 8 == 0
    assert found[-8:] == torch.ones(2).numpy().tobytes()
