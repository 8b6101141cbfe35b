"""The mean of a classifier's posterior: at the linear mode of all rows, as far as rows kept apart allow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from lapwing.errors import StorageError
from lapwing.laplace import Laplace
from lapwing.laplace.calibration import COVARIANCE, HeldOut, averaged, gathered
from lapwing.likelihoods import Categorical
from lapwing.predictive import probit
from lapwing.serialize.files import read, write
from lapwing.tables import shift as shifts
from lapwing.tables import training
from lapwing.tables.bundle import Bundle, score
from lapwing.tables.fit import fit_table
from lapwing.tables.network import Spec, build
from lapwing.tables.shift import WAYS, learnt, share
from lapwing.tables.training import train


def jacobian(model: nn.Module, x: Tensor) -> Tensor:
    """[rows, classes, P], by autograd."""
    weights = dict(model.named_parameters())
    found = torch.func.jacrev(lambda w: torch.func.functional_call(model, w, (x,)))(weights)
    return torch.cat([part.flatten(2) for part in found.values()], 2).detach()


def newton(model: nn.Module, x: Tensor, y: Tensor, precision: float) -> Tensor:
    """theta* - theta~ of the linearised network, by Newton's method with dense matrices."""
    f, J = model(x).detach(), jacobian(model, x)
    theta = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    truth, away = nn.functional.one_hot(y, f.shape[1]).double(), torch.zeros_like(theta)
    for _ in range(50):
        p = (f + J @ away).softmax(1)
        slope = torch.einsum("ncp,nc->p", J, p - truth) + precision * (theta + away)
        H = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
        bend = torch.einsum("ncp,ncd,ndq->pq", J, H, J) + precision * torch.eye(len(theta), dtype=torch.float64)
        away = away - torch.linalg.solve(bend, slope)
    return away


def problem(rows: int = 60) -> tuple[nn.Module, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    model = build(Spec(2, 3, width=4), generator)
    x = torch.randn(rows, 2, dtype=torch.float64, generator=generator)
    return model, x, torch.randint(3, (rows,), generator=generator)


@pytest.mark.parametrize("structure", ["full", "kron"])
def test_the_mean_is_on_the_way_to_the_mode_of_all_rows(structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shifts, "TOLERANCE", 1e-12)
    model, x, y = problem()
    for precision, wanted in ((4.0, 1.0), (4.0, 0.5)):
        la = Laplace(model, "classification", "all", structure, prior_precision=precision)
        la.fit([(x[:40], y[:40])])
        monkeypatch.setattr(shifts, "share", lambda before, after, wanted=wanted: wanted)
        found, way = learnt(la, (x[:40], y[:40]), (x[40:], y[40:]), torch.Generator().manual_seed(0))
        assert way == wanted
        assert la.n_data == 60
        torch.testing.assert_close(found, wanted * newton(model, x, y, precision), rtol=1e-9, atol=1e-11)


def test_rows_kept_apart_are_judged_by_a_posterior_that_has_not_seen_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shifts, "TOLERANCE", 1e-12)
    model, x, y = problem()
    la = Laplace(model, "classification", "all", "full", prior_precision=4.0)
    la.fit([(x[:40], y[:40])])
    seen: list[HeldOut] = []
    monkeypatch.setattr(shifts, "share", lambda before, after: seen.extend((before, after)) or 1.0)
    learnt(la, (x[:40], y[:40]), (x[40:], y[40:]), torch.Generator().manual_seed(0))
    away = newton(model, x[:40], y[:40], 4.0)
    f, J = model(x[40:]).detach(), jacobian(model, x[40:])
    torch.testing.assert_close(seen[0].value, f, rtol=1e-9, atol=0)
    torch.testing.assert_close(seen[1].value, f + J @ away, rtol=1e-9, atol=1e-11)


def test_outputs_of_moved_weights_are_linear_in_the_move() -> None:
    model, x, y = problem()
    la = Laplace(model, "classification", "all", "full")
    la.fit([(x, y)])
    move = torch.randn(la.n_params, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plain, moved = gathered(la, [(x, y)]), gathered(la, [(x, y)], move)
    assert plain is not None
    assert moved is not None
    torch.testing.assert_close(moved.value, plain.value + jacobian(model, x) @ move, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(moved.variance, plain.variance, rtol=0, atol=0)


def held(value: Tensor, targets: Tensor) -> HeldOut:
    """With variances that must not matter."""
    one = torch.ones(1, dtype=torch.float64)
    return HeldOut(Categorical(), value, torch.full_like(value, 7.0), targets, one)


def test_the_share_of_the_way_is_averaged_over_what_targets_say() -> None:
    generator = torch.Generator().manual_seed(1)
    start, end = 2 * torch.randn(2, 25, 3, dtype=torch.float64, generator=generator)
    targets = torch.randint(3, (25,), generator=generator)

    def likely(t: float) -> float:
        p = np.exp((start + t * (end - start)).numpy())
        return float(np.log((p / p.sum(1, keepdims=True))[np.arange(25), targets.numpy()]).sum())

    ways = np.linspace(0, 1, len(WAYS))
    weights = np.exp(np.array([likely(t) for t in ways]) - likely(0))
    expected = (weights * ways).sum() / weights.sum()
    assert 0.05 < expected < 0.95
    assert share(held(start, targets), held(end, targets)) == pytest.approx(expected, rel=1e-9)


def test_where_all_shares_are_as_likely_the_mean_goes_half_of_the_way() -> None:
    start = torch.tensor([[1.0, 0.0]], dtype=torch.float64).repeat(200, 1)
    targets = torch.zeros(200, dtype=torch.int64)
    assert share(held(start, targets), held(start, targets)) == pytest.approx(0.5, rel=1e-9)
    away = torch.tensor([4.0, 0.0], dtype=torch.float64)
    assert share(held(start, targets), held(start - away, targets)) < 0.01
    assert share(held(start - away, targets), held(start, targets)) > 0.94


def test_the_factor_on_the_covariance_is_averaged_over_what_targets_say() -> None:
    generator = torch.Generator().manual_seed(0)
    value, variance = torch.randn(2, 30, 3, dtype=torch.float64, generator=generator)
    rows = replace(held(3 * value, torch.randint(3, (30,), generator=generator)), variance=variance.square())
    likely = []
    for c in COVARIANCE.tolist():
        p = probit(rows.value, c * rows.variance)
        likely.append(float(p.gather(1, rows.targets[:, None]).log().sum()))
    weights = np.exp(np.array(likely) - max(likely))
    expected = np.exp((weights * np.log(COVARIANCE.numpy())).sum() / weights.sum())
    assert averaged(rows) == pytest.approx(expected, rel=1e-9)
    assert averaged(replace(rows, variance=0 * rows.variance)) == pytest.approx(1, rel=1e-9), "all are as likely"


# -- in training ----------------------------------------------------------------------------------------------------


def spots(rows: int = 90) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, 2, generator=generator)
    return x, (x[:, 0] + 0.5 * torch.randn(rows, generator=generator) > 0).long()


def test_only_classes_of_which_rows_were_kept_apart_are_shifted(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = spots()
    options: dict[str, Any] = {"seed": 0, "epochs": 4}
    spec = Spec(2, 2, width=4)
    found = train(x, y, "classification", spec, **options)
    assert found.shift is not None
    assert "22" in found.laplace.choices[0], "says how many rows were kept apart"
    assert "% of the way from the trained weights" in found.laplace.choices[0]
    assert found.laplace.n_data == 90
    alone = train(x, y, "classification", spec, apart=False, **options)
    assert alone.shift is None
    assert alone.laplace.n_data == 90
    assert float(alone.laplace.temperature) == 1
    assert train(x, x[:, 0], "regression", Spec(2, 1, width=4), structure="kron", **options).shift is None
    monkeypatch.setattr(training, "ROWS", 89)
    large = train(x, y, "classification", spec, **options)
    assert large.shift is None
    for one, other in zip(found.model.parameters(), large.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


# -- in a fitted table ----------------------------------------------------------------------------------------------


def table() -> pd.DataFrame:
    x, y = spots(200)
    return pd.DataFrame({"u": x[:, 0], "v": x[:, 1], "kind": np.array(["a", "b"])[y]})


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return fit_table(table(), "kind", epochs=5, spec=Spec(1, 1, 5))


def test_only_the_posterior_is_shifted(bundle: Bundle) -> None:
    x = bundle.encoder(table())
    raw = bundle.raw(x)
    assert bundle.shift is not None
    f, J = bundle.model(x).detach(), jacobian(bundle.model, x)
    torch.testing.assert_close(raw.value, f, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(raw.plain, f.softmax(1), rtol=1e-9, atol=0)
    torch.testing.assert_close(raw.probable, probit(f + J @ bundle.shift, raw.variance), rtol=1e-9, atol=0)
    unmoved = replace(bundle, shift=None).raw(x)
    torch.testing.assert_close(unmoved.probable, probit(f, raw.variance), rtol=1e-9, atol=0)
    y = torch.from_numpy((table()["kind"] == "b").to_numpy().astype(np.int64))
    *network, laplace = score(bundle, x, y)
    *same, other = score(replace(bundle, shift=None), x, y)
    assert [row.nll for row in network] == [row.nll for row in same]
    assert laplace.nll != other.nll


def test_it_comes_back_from_a_file(bundle: Bundle, tmp_path: Path) -> None:
    path = tmp_path / "a.lapwing"
    bundle.save(path)
    again = Bundle.load(path)
    assert bundle.shift is not None
    assert again.shift is not None
    torch.testing.assert_close(again.shift, bundle.shift, rtol=0, atol=0)
    pd.testing.assert_frame_equal(again.predict(table()), bundle.predict(table()), check_exact=True)
    assert read(path)[1]["kind_version"] == 2, "a reader from before would leave the shift out"
    replace(bundle, shift=None).save(path)
    assert read(path)[1]["kind_version"] == 1
    assert Bundle.load(path).shift is None


def test_a_shift_that_does_not_fit_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    path = tmp_path / "a.lapwing"
    bundle.save(path)
    tensors, stored = read(path)
    shift = tensors["shift"]
    for wrong in (shift[:-1], shift.float(), shift.unsqueeze(0), shift / 0):
        write(path, {**tensors, "shift": wrong.contiguous()}, stored)
        with pytest.raises(StorageError, match="shift"):
            Bundle.load(path)
    write(path, {name: value for name, value in tensors.items() if name != "shift"}, stored)
    with pytest.raises(StorageError, match="Fit again"):
        Bundle.load(path)
