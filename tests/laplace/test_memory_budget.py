"""memory_budget: the peak of fits and predictions stays below it, and the results are those without a budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing import Laplace
from lapwing.errors import CurvatureError, LapwingError, OptionError
from lapwing.laplace.budgets import bytes_of
from lapwing.linalg import budget
from lapwing.linalg.budget import DEFAULT_BUDGET, MemoryBudget, current_budget, intermediate_bytes, within
from lapwing.serialize import pack
from memory import Peak

MEGABYTE = 10**6
POINTS, CLASSES = 1000, 5


def network(inputs: int = 20, width: int = 64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, CLASSES)
    ).double()


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.Tanh(), nn.Conv2d(6, 6, 3), nn.Tanh(), nn.Flatten(), nn.Linear(96, CLASSES)
    ).double()


def data(points: int, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(points, *shape, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (points,), generator=generator)


CASES: dict[str, tuple[nn.Module, str, str, int, dict[str, Any], tuple[int, ...], float]] = {
    # network, weights, structure, points of the fit, options, shape of an input, the small budget in MB
    "kron": (network(), "all", "kron", POINTS, {}, (20,), 3),
    "ekfac": (network(), "all", "ekfac", POINTS, {}, (20,), 3),
    "diag": (network(), "all", "diag", POINTS, {}, (20,), 3),
    "full": (network(5, 16), "all", "full", POINTS, {}, (5,), 4),
    "gp": (network(), "all", "gp", 60, {}, (20,), 3),
    "lowrank": (network(), "all", "lowrank", 60, {"rank": 10}, (20,), 5),
    "last layer": (network(), "last_layer", "kron", POINTS, {}, (20,), 1),
    "last layer, full": (network(), "last_layer", "full", POINTS, {}, (20,), 4),
    "convolutions, kron": (convolutions(), "all", "kron", 400, {}, (1, 8, 8), 3),
    "convolutions, diag": (convolutions(), "all", "diag", 400, {}, (1, 8, 8), 3),
}


def kept(la: lapwing.BaseLaplace) -> int:
    """Bytes of the curvature itself."""
    return sum(t.numel() * t.element_size() for t in pack(la.fitted.curvature)[1].values())


@pytest.mark.parametrize("name", CASES)
def test_a_small_budget_is_kept_and_changes_no_result(name: str) -> None:
    model, weights, structure, points, options, shape, megabytes = CASES[name]
    small = int(megabytes * MEGABYTE)
    x, y = data(points, shape)
    test = data(POINTS if len(shape) == 1 else 400, shape)[0]
    found = []
    for limit in (None, small):
        la = Laplace(model, "classification", weights, structure, **options, memory_budget=limit)
        la.fit([(x[:50], y[:50])])
        la(test[:50])  # what is looked at once per network
        with Peak() as fit:
            la.fit([(x, y)])
        _ = la.posterior  # decomposed
        la(test[:2])
        with Peak() as prediction:
            answer = la(test)
        found.append((fit.bytes - kept(la), prediction.bytes, answer, la.log_marginal_likelihood()))
    (wide_fit, wide_prediction, expected, evidence), (fit_bytes, prediction_bytes, answer, other) = found
    assert fit_bytes <= small, (fit_bytes, wide_fit)
    assert prediction_bytes <= small, (prediction_bytes, wide_prediction)
    assert max(wide_fit, wide_prediction) > small, "the budget was no constraint"
    torch.testing.assert_close(answer, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(other, evidence, rtol=1e-9, atol=0)


def test_budgets_in_words() -> None:
    assert [bytes_of(text) for text in ("3", "2 GB", "1.5kB", " 1 MiB ", "1e3 b")] == [3, 2 * 10**9, 1500, 2**20, 1000]
    assert bytes_of(10.0**7) == 10**7
    for wrong in ("", "much", "2 XB", "-1 GB", 0, -5, True, float("nan"), float("inf")):
        with pytest.raises(OptionError, match=r"memory_budget is .*; expected a number of bytes .*Leave it out"):
            Laplace(network(), "classification", "all", "kron", memory_budget=wrong)  # pyright: ignore[reportArgumentType]


def test_a_budget_holds_inside_and_nowhere_else() -> None:
    assert current_budget() == MemoryBudget()
    with within(MemoryBudget.of_total(8000)):
        assert intermediate_bytes() == 1000
    assert intermediate_bytes() == DEFAULT_BUDGET
    assert MemoryBudget.of_total(2**60).intermediate == DEFAULT_BUDGET


def test_without_one_it_is_a_share_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "available_memory", lambda device: 16 * 10**6)
    la = Laplace(network(), "classification", "all", "kron")
    assert la._budget == MemoryBudget(10**6, None)
    assert la._tangent is not None
    assert la._tangent.budget == 10**6
    monkeypatch.setattr(budget, "available_memory", lambda device: None)
    assert Laplace(network(), "classification", "all", "kron")._budget == MemoryBudget()


def test_a_call_has_its_own() -> None:
    x, y = data(200, (20,))
    la = Laplace(network(), "classification", "all", "diag")
    la.fit([(x, y)], memory_budget="200 kB")
    expected = la(x)
    with Peak() as wide:
        la(x)
    for call in (
        lambda: la(x, memory_budget="500 kB"),
        lambda: la.predict_proba(x, memory_budget=500_000),
        lambda: la.predict_moments(x, diagonal_output=True, memory_budget=5e5),
        lambda: la.functional_samples(x, n_samples=20, diagonal_output=True, memory_budget="0.5 MB"),
    ):
        with Peak() as small:
            call()
        assert small.bytes <= 500_000 < wide.bytes
    torch.testing.assert_close(la(x, memory_budget="500 kB"), expected, rtol=1e-9, atol=0)
    assert current_budget() == MemoryBudget()
    with pytest.raises(OptionError, match="memory_budget is 'none'"):
        la(x, memory_budget="none")


def test_a_divided_map_is_the_map() -> None:
    x, y = data(60, (20,))
    model = network()
    whole, small = (Laplace(model, "classification", "all", "kron", memory_budget=b) for b in (None, "450 kB"))
    for la in (whole, small):
        la.fit([(x, y)])
    one, parts = whole.linearise(x), small.linearise(x)
    assert type(parts).__name__ == "DividedMap"
    assert (parts.batch, parts.outputs) == (60, CLASSES)
    v, u = torch.randn(whole.n_params).double(), torch.randn(60, CLASSES).double()
    for left, right in (
        (parts.value, one.value),
        (parts.mv(v), one.mv(v)),
        (parts.rmv(u), one.rmv(u)),
        (parts.rows(), one.rows()),
    ):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-12)
    draws = [la.functional_samples(x, n_samples=9, generator=torch.Generator().manual_seed(1)) for la in (whole, small)]
    torch.testing.assert_close(*draws, rtol=1e-9, atol=1e-10)  # sums of numbers of about 1
    joint = [la.predict_moments(x[:4], joint=True)[1] for la in (whole, small)]
    torch.testing.assert_close(*joint, rtol=1e-9, atol=1e-12)
    covariances = [small.posterior.precision.quadratic(parts.pieces()), whole.posterior.covariance(one)]
    torch.testing.assert_close(*covariances, rtol=1e-9, atol=1e-12)
    assert len(list(parts.columns())) >= 1


def test_an_error_names_the_batch_of_the_loader_and_not_a_part_of_it() -> None:
    x, y = data(100, (20,))
    bad = y.clone()
    bad[70] = CLASSES
    la = Laplace(network(), "classification", "all", "kron", memory_budget="450 kB")
    with pytest.raises(LapwingError, match=r"^batch 1: "):
        la.fit([(x, y), (x, bad)])


@pytest.mark.parametrize("structure", ["kron", "ekfac", "diag"])
def test_a_curvature_that_does_not_fit_is_refused_before_data_are_read(structure: str) -> None:
    class Unread:
        def __iter__(self):
            pytest.fail("read the data")

    la = Laplace(network(), "classification", "all", structure, memory_budget="50 kB")
    expected = rf"a {structure} curvature of 5,829 weights .*; expected at most 0.0 MiB, the memory_budget. Use diag"
    with pytest.raises(CurvatureError, match=expected):
        la.fit(Unread())


def test_a_gram_matrix_that_does_not_fit_is_refused() -> None:
    x, y = data(60, (20,))
    la = Laplace(network(), "classification", "all", "gp", memory_budget="1 MB")
    with pytest.raises(CurvatureError, match=r"the Gram matrix of .* rows.*the memory_budget. Use fewer data points"):
        la.fit([(x, y)])
    with pytest.raises(CurvatureError, match=r"10 eigenvectors .* the memory_budget. Use rank="):
        Laplace(network(), "classification", "all", "lowrank", rank=10, memory_budget="3 MB").fit([(x, y)])


def test_it_is_kept_with_the_posterior(tmp_path) -> None:
    x, y = data(20, (20,))
    for given in (None, "5 MB", 10**7):
        la = Laplace(network(), "classification", "all", "diag", memory_budget=given)
        la.fit([(x, y)])
        la.save(tmp_path / "posterior")
        assert lapwing.load(tmp_path / "posterior", network()).memory_budget == given  # pyright: ignore


@pytest.mark.parametrize("subset", ["all", "last_layer", "subnetwork"])
def test_every_class_takes_it(subset: str) -> None:
    x, y = data(40, (20,))
    options: dict[str, Any] = {"subnetwork_indices": torch.arange(50)} if subset == "subnetwork" else {}
    for structure in ("full", "diag", "gp", "lowrank", "blocks", "propagated_diag", "mixed_diag", "matrix_free"):
        try:
            la = Laplace(network(5, 8), "classification", subset, structure, memory_budget="20 MB", **options)
        except OptionError:  # not for these weights
            continue
        la.fit([(x[:, :5], y)])
        plain = Laplace(network(5, 8), "classification", subset, structure, **options)
        plain.fit([(x[:, :5], y)])
        rtol = 1e-9 if structure != "matrix_free" else 1e-6
        torch.testing.assert_close(la(x[:3, :5]), plain(x[:3, :5]), rtol=rtol, atol=1e-12)
