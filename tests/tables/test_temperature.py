"""The temperature of a network alone: a maximum, bounded, and kept with a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from lapwing.errors import DataError, StorageError
from lapwing.reporting import report
from lapwing.serialize.files import read, write
from lapwing.tables.bundle import Bundle
from lapwing.tables.conformal import Conformal
from lapwing.tables.fit import fit_table
from lapwing.tables.network import Spec
from lapwing.tables.temperature import WIDEST, Scaled, temperature


def loss(logits: Tensor, targets: Tensor, log_t: Tensor) -> Tensor:
    log_p = (logits / log_t.exp()).log_softmax(1)
    return -log_p[torch.arange(len(targets)), targets].sum() + log_t.square() / 2


def drawn(scale: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Logits that say `scale` times too much of targets."""
    f = torch.randn(500, 3, dtype=torch.float64, generator=generator)
    return scale * f, torch.multinomial(f.softmax(1), 1, generator=generator).squeeze(1)


@pytest.mark.parametrize("scale", [0.2, 1.0, 4.0])
def test_it_is_where_the_slope_of_likelihood_and_prior_vanishes(scale: float, generator: torch.Generator) -> None:
    logits, targets = drawn(scale, generator)
    log_t = torch.tensor(temperature(logits, targets), dtype=torch.float64).log().requires_grad_()
    (slope,) = torch.autograd.grad(loss(logits, targets, log_t), log_t, create_graph=True)
    (bend,) = torch.autograd.grad(slope, log_t)
    assert bend > 0
    slope, bend = slope.item(), bend.item()
    assert abs(slope / bend) < 1e-3, "the step that Newton would take"
    pulled = abs(np.log(scale)) / bend
    assert abs(float(log_t.detach()) - np.log(scale)) < 4 / bend**0.5 + pulled, "four standard errors, and the prior"


def test_few_rows_that_are_all_right_do_not_make_it_certain() -> None:
    logits, targets = torch.tensor([[3.0, 0.0]]).repeat(5, 1), torch.zeros(5, dtype=torch.int64)
    assert 0.4 < temperature(logits, targets) < 1
    wrong = temperature(100 * logits, 1 - targets)
    assert wrong == pytest.approx(np.exp(WIDEST), rel=2e-3), "the bound"


@pytest.mark.parametrize("level", [0.0, -1.0, float("inf"), float("nan")])
def test_a_temperature_is_positive(level: float) -> None:
    with pytest.raises(DataError, match="expected a positive number"):
        Scaled(level, Conformal(torch.ones(3)))


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(200, 2))
    kind = np.where(x[:, 0] + 0.5 * generator.normal(size=200) > 0, "a", "b")
    return pd.DataFrame({"u": x[:, 0], "v": x[:, 1], "kind": kind})


@pytest.fixture(scope="module")
def bundle(table: pd.DataFrame) -> Bundle:
    return fit_table(table, "kind", epochs=5, spec=Spec(1, 1, 5))


def test_it_is_kept_with_the_model(bundle: Bundle, tmp_path: Path) -> None:
    path = tmp_path / "a.lapwing"
    bundle.save(path)
    again = Bundle.load(path)
    assert bundle.scaled is not None
    assert again.scaled is not None
    assert again.scaled.temperature == bundle.scaled.temperature
    assert torch.equal(again.scaled.conformal.scores, bundle.scaled.conformal.scores)
    assert [row.method for row in again.summary.rows] == ["MAP", "MAP, scaled", "Laplace"]


def test_a_report_has_it_as_a_column(bundle: Bundle, table: pd.DataFrame, tmp_path: Path) -> None:
    figures = report(bundle, table, tmp_path / "r.html")
    assert figures["rows_are_test"]
    scores = {row["measure"]: row for row in figures["summary"]}
    row = bundle.summary.rows[1]
    assert row.method == "MAP, scaled"
    assert scores["Negative log-likelihood"]["scaled"] == pytest.approx(row.nll)
    assert scores["Calibration error (ECE)"]["scaled"] == pytest.approx(row.ece)
    page = (tmp_path / "r.html").read_text()
    titles = [page.index(title) for title in ("Network alone (MAP)", "MAP with a temperature", "With error bars")]
    assert titles == sorted(titles)
    report(replace(bundle, scaled=None), table, tmp_path / "old.html")
    assert "MAP with a temperature" not in (tmp_path / "old.html").read_text()


def test_files_from_before_have_none(bundle: Bundle, tmp_path: Path) -> None:
    path = tmp_path / "a.lapwing"
    rows = tuple(row for row in bundle.summary.rows if row.method != "MAP, scaled")
    replace(bundle, scaled=None, summary=replace(bundle.summary, rows=rows)).save(path)
    tensors, stored = read(path)
    del stored["temperature_map"]
    write(path, tensors, stored)
    again = Bundle.load(path)
    assert again.scaled is None
    assert [row.method for row in again.summary.rows] == ["MAP", "Laplace"]


@pytest.mark.parametrize("level", [-1.0, "hot", None])
def test_a_file_with_another_number_of_methods_or_no_temperature_is_refused(
    bundle: Bundle, tmp_path: Path, level: object
) -> None:
    path = tmp_path / "a.lapwing"
    bundle.save(path)
    tensors, stored = read(path)
    write(path, tensors, {**stored, "temperature_map": level})
    with pytest.raises(StorageError):
        Bundle.load(path)
