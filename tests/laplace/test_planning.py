"""plan: a table of alternatives from one batch, a choice with a reason, and `auto` that follows it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing import Laplace
from lapwing.errors import DataError, NotFittedError, OptionError
from lapwing.laplace.counts import Counts, Layer, Work, fit_work
from lapwing.laplace.machine_rates import Machine, Rates
from lapwing.laplace.planning import Plan, counted, planned, points_of, seconds_text
from lapwing.laplace.structures import STRUCTURES
from lapwing.likelihoods import Categorical
from lapwing.linalg.budget import MemoryBudget
from lapwing.tangent import Tangent
from unchanged import unchanged

RATES = Rates(Machine(1e10, 1e10, 1e-6, (1e-9, 3.0)), 1e-5, 2e-5)
"""A machine for which times can be worked out by hand."""


def network(width: int = 60, outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, outputs))


def data(points: int = 50, outputs: int = 3, size: int = 20) -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(points, 4, generator=torch.Generator().manual_seed(0))
    return list(zip(x.split(size), (torch.arange(points) % outputs).split(size), strict=True))


def counts(weights: int = 100_000, points: int = 10_000, outputs: int = 10) -> Counts:
    side = round(weights**0.5)
    return Counts(side**2, points, 100, outputs, outputs, (Layer("matrix", side, side),), side, 8 * side, 4)


def choice(found: Counts, memory: int | None = None, time_budget: float | None = None, free: int = 2**33) -> Plan:
    budget = MemoryBudget() if memory is None else MemoryBudget.of_total(memory)
    return planned(found, RATES, "all", {}, budget, free, time_budget)


# -- counting ----------------------------------------------------------------------------------------------------------


def test_layers_are_counted_from_one_recorded_pass() -> None:
    model = nn.Sequential(nn.Conv2d(2, 6, 3, groups=2), nn.GroupNorm(2, 6), nn.Flatten(), nn.Linear(24, 3))
    found, rates = counted(Tangent(model), Categorical(), torch.randn(7, 2, 4, 4), torch.arange(7) % 3, 1000)
    assert found.layers == (
        Layer("matrix", 3, 10, groups=2, positions=4),
        Layer("vector", 6, 1),
        Layer("vector", 6, 1),
        Layer("matrix", 3, 25),
    )
    # C - 1 columns: those of a softmax sum to nothing
    assert (found.weights, found.points, found.batch, found.outputs, found.columns) == (
        147,
        1000,
        7,
        3,
        2,
    )  # a softmax has C - 1
    assert sum(layer.size for layer in found.layers) == found.weights
    assert found.entries == 6 * 4 + 6 * 4 + 3
    assert 0 < rates.forward < 10
    assert 0 < rates.backward < 10


def test_a_table_and_shared_positions() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(11, 5), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.table(x)).mean(1)

    found, _ = counted(Tangent(Words()), Categorical(), torch.randint(11, (6, 8)), torch.arange(6) % 2, 6)
    assert found.layers == (Layer("table", 11, 5, 1, 8), Layer("matrix", 2, 6, 1, 8))


def test_operations_follow_the_formulas() -> None:
    """A product of width 300 x 300: sums over data of a a^T and g g^T, half of them, for N points and C columns."""
    found = counts(90_000, 1000, 10)
    work = fit_work("kron", found, {}, 2**28)
    assert work.products == pytest.approx(1000 * 300**2 + 1000 * 10 * 300**2)
    assert (work.forward, work.backward) == (1000, 10_000)
    assert sorted(work.decomposed) == [(1, 300), (1, 300)]
    assert work.kept == 2 * 2 * 300**2 * 4 + 90_000 * 4
    assert RATES.seconds(Work(forward=10, products=1e10, decomposed=[(2, 1000)])) == pytest.approx(1e-4 + 1 / 0.6 + 2)
    twice = fit_work("kron", replace(found, points=2000), {}, 2**28)
    assert twice.products == 2 * work.products


def test_points_of_a_loader() -> None:
    x = torch.randn(23, 4)
    assert points_of(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x), 5)) == 23
    assert points_of([(x, x), (x[:2], x[:2])]) == 25
    with pytest.raises(DataError, match=r"an iterator, .*expected data that can be gone through again. Give a list"):
        points_of(iter([(x, x)]))


# -- choosing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "memory", "seconds", "expected"),
    [
        (counts(2_900), None, None, "full"),
        (counts(100_000, points=80), None, None, "gp"),
        (counts(100_000), None, None, "kron"),
        (counts(100_000), None, 60.0, "ekfac"),
        (counts(100_000), None, 1e6, "full"),
        (counts(100_000, 1000, 1000), None, None, "propagated_diag"),
        (counts(10**8), 2 * 10**9, None, "kron"),  # factors of more than 8,192 rows are diagonals
        (counts(64 * 10**6), 7 * 10**8, None, "propagated_diag"),
    ],
)
def test_the_ladder(found: Counts, memory: int | None, seconds: float | None, expected: str) -> None:
    plan = choice(found, memory, seconds, free=2**38)
    assert plan.chosen == expected, str(plan)
    assert plan.reason.startswith(f"{expected}: ")
    assert plan[expected].fits


def test_what_does_not_fit_says_why() -> None:
    plan = choice(counts(100_000), memory=10**8, time_budget=100.0)
    assert "95.4 MiB of the budget" in plan["full"].note
    assert "100,000 rows of the data" in plan["gp"].note
    assert not plan["full"].fits
    assert "of free memory" in choice(counts(100_000), free=10**6)["kron"].note
    slow = choice(counts(100_000), time_budget=1e-3)
    assert "1 ms of the time budget" in slow["kron"].note
    assert "nothing fits" in choice(counts(10**6), memory=1000).reason


def test_a_table_for_people_and_one_for_programs() -> None:
    plan = choice(counts(100_000))
    assert [row["structure"] for row in plan.rows] == list(STRUCTURES)
    assert [row["structure"] for row in plan.rows if row["chosen"]] == ["kron"]
    head, names, *lines, reason = str(plan).splitlines()
    assert head == "99,856 weights, 10,000 points, 10 outputs"
    assert names.split() == ["structure", "fit", "predict", "memory", "fits"]
    assert len(lines) == len(STRUCTURES)
    assert [line.split()[1] for line in lines if line.startswith("*")] == ["kron"]
    assert reason == f"{plan.reason}."
    assert [seconds_text(s) for s in (0.0123, 2.0, 7200.0)] == ["12.3 ms", "2 s", "2 h"]


# -- the public face ---------------------------------------------------------------------------------------------------


def test_a_plan_before_and_after_a_fit_changes_nothing() -> None:
    model = network()
    with unchanged(model):
        before = lapwing.plan(model, "classification", data())
        la = Laplace(model, "classification", "all", "kron")
        with pytest.raises(NotFittedError, match=r"la.plan\(train_loader\)"):
            la.plan()
        assert la.plan(data()).chosen == before.chosen == "gp"
        la.fit(data())
        after = la.plan()
    assert after.counts.points == before.counts.points == 50
    assert after.counts.batch == before.counts.batch == 20
    assert after.counts.layers == before.counts.layers
    assert all(row["fit_seconds"] > 0 and row["memory"] >= 0 for row in after.rows)


@pytest.mark.parametrize("subset", ["last_layer", "subnetwork"])
def test_other_weights_have_their_own_structures(subset: str) -> None:
    options: dict[str, Any] = {"subnetwork_indices": torch.arange(200)} if subset == "subnetwork" else {}
    plan = lapwing.plan(network(), "classification", data(), subset, **options)
    names = {each.structure for each in plan.alternatives}
    assert "full" in names
    assert names == {
        row.name
        for row in STRUCTURES.values()
        if subset in row.subsets and (subset != "subnetwork" or row.parts_of_tensors)
    }
    assert plan.chosen == "full"
    assert plan.counts.weights == (200 if subset == "subnetwork" else 183)


def test_auto_follows_the_plan_where_it_is_given_data() -> None:
    la = Laplace(network(), "classification", "all", "auto", loader=data())
    assert (la.structure, la.reason) == ("gp", "gp: every covariance of 4,143 weights, by 100 rows of the data")
    la.fit(data())
    many = data(1000)
    assert Laplace(network(), "classification", "all", "auto", loader=many).structure == "kron"
    assert Laplace(network(20), "classification", "all", "auto", loader=many).structure == "full"
    assert Laplace(network(), "classification", "all", "auto", loader=many, time_budget=1e5).structure == "full"


def test_auto_without_data_keeps_to_the_memory_budget() -> None:
    kinds = [Laplace(network(), "classification", "all", "auto", memory_budget=b) for b in (None, "1 MB", "20 kB")]
    assert [la.structure for la in kinds] == ["kron", "kron", "diag"]
    assert kinds[2].reason.startswith("diag: the factors of kron take ")
    assert Laplace(network(20), "classification", "all", "auto", memory_budget="100 kB").structure == "kron"


def test_what_is_no_budget_is_refused() -> None:
    with pytest.raises(OptionError, match=r"with hessian_structure='kron'; expected 'auto'.*lapwing.plan"):
        Laplace(network(), "classification", "all", "kron", loader=data())
    with pytest.raises(OptionError, match="expected 'auto', which chooses by the data, and both for a time"):
        Laplace(network(), "classification", "all", "auto", time_budget=1.0)
    with pytest.raises(OptionError, match=r"time_budget is -1; expected a number of seconds > 0"):
        lapwing.plan(network(), "classification", data(), time_budget=-1)


def test_a_loader_that_is_read_once_is_not_touched() -> None:
    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        yield pytest.fail("read it")

    with pytest.raises(DataError, match="an iterator"):
        lapwing.plan(network(), "classification", batches())


def test_an_empty_loader_and_a_shuffled_one() -> None:
    with pytest.raises(DataError, match="the loader yields no batch"):
        lapwing.plan(network(), "classification", [])
    ((x, y), *_) = data()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 5, shuffle=True)
    model = network()
    before = torch.get_rng_state()
    lapwing.plan(model, "classification", loader)
    assert torch.equal(before, torch.get_rng_state())
