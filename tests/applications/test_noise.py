"""Noise that varies where it may go wrong: extreme tables and inputs, classes, copies from before it was there."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from typer.testing import CliRunner

from lapwing.applications.architecture import Spec
from lapwing.applications.bundle import Bundle
from lapwing.applications.cli import app
from lapwing.applications.estimators import LaplaceRegressor
from lapwing.applications.fitting import fit_table
from lapwing.errors import OptionError

AMOUNTS = ["mean", "sd", "sd_epistemic", "sd_noise", "lower_90", "upper_90"]


def table(rows: int = 150, scale: float = 1.0) -> pd.DataFrame:
    """The deviation of the noise goes with b, from a tenth to ten times 0.3."""
    random = np.random.default_rng(0)
    a, b = random.normal(size=(2, rows))
    return pd.DataFrame({"a": a, "b": b, "y": scale * (3 * a + 0.3 * np.exp(b) * random.normal(size=rows))})


def arrays(rows: int = 150) -> tuple[np.ndarray, np.ndarray]:
    frame = table(rows)
    return frame[["a", "b"]].to_numpy(), frame["y"].to_numpy()


# -- tables ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [Spec(1, 1, depth=0), Spec(1, 1, width=8, activation="relu")])
def test_far_from_the_data_nothing_is_nan(spec: Spec, tmp_path: Path) -> None:
    """Log-variances of these networks go on and on: exp overflows ten thousand deviations from the data."""
    frame = table()
    bundle = fit_table(frame, "y", epochs=10, spec=spec, noise="varying")
    bundle.save(tmp_path / "model")
    frame.loc[7, ["a", "b"]] = [-1e9, 1e9]
    frame.loc[8, ["a", "b"]] = [1e9, -1e9]
    found = Bundle.load(tmp_path / "model").predict(frame)
    assert bool(found[AMOUNTS].notna().all().all())
    assert bool(found.loc[[7, 8], "ood"].all())
    assert (found.loc[[7, 8], "sd"] > 100).all()
    near = found.drop(index=[7, 8])[AMOUNTS]
    assert bool(np.isfinite(near).all().all())
    pd.testing.assert_frame_equal(near, bundle.predict(frame.drop(index=[7, 8]))[AMOUNTS], rtol=1e-6)


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_the_unit_of_the_target_does_not_matter(scale: float) -> None:
    plain, other = (fit_table(table(scale=s), "y", epochs=5, noise="varying") for s in (1.0, scale))
    found, expected = other.predict(table()), plain.predict(table())
    pd.testing.assert_frame_equal(found[AMOUNTS] / scale, expected[AMOUNTS], rtol=1e-5)
    assert other.noise == pytest.approx(scale * plain.noise, rel=1e-5)
    shift = np.log(scale)
    for row, same in zip(other.summary.rows, plain.summary.rows, strict=True):
        assert row.nll - shift == pytest.approx(same.nll, abs=1e-4)
        assert row.coverage_90 == same.coverage_90


@pytest.mark.filterwarnings("ignore::lapwing.errors.LapwingWarning")
@pytest.mark.parametrize("rows", [8, 20])
def test_a_few_rows_whose_noise_is_to_vary(rows: int) -> None:
    bundle = fit_table(table(rows), "y", epochs=5, noise="varying")
    assert bundle.spec.varying
    assert bool(np.isfinite(bundle.predict(table(rows))[AMOUNTS]).all().all())


def test_rows_without_any_noise() -> None:
    """Each row many times over, so that it can be learnt by heart, and no residual is left."""
    frame = pd.concat([table(10)] * 20, ignore_index=True)
    bundle = fit_table(frame, "y", epochs=60, noise="varying")
    found = bundle.predict(frame)
    assert bool(np.isfinite(found[AMOUNTS]).all().all())
    assert found["sd_noise"].to_numpy().max() < 0.2 * frame["y"].to_numpy().std()


# -- classes --------------------------------------------------------------------------------------------------------


def test_classes_have_no_noise_that_could_vary(tmp_path: Path) -> None:
    frame = table().assign(y=lambda given: np.where(given["y"] > 0, "up", "down"))
    stages: list[str] = []
    with pytest.raises(OptionError, match="classes, and these have no noise level"):
        fit_table(frame, "y", noise="varying", progress=lambda stage, _: stages.append(stage))
    assert "training" not in stages
    frame.to_csv(tmp_path / "t.csv", index=False)
    out = tmp_path / "t.lapwing"
    arguments = ["fit", str(tmp_path / "t.csv"), "--target", "y", "--noise", "varying", "--out", str(out)]
    result: Any = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "no noise level" in result.stderr
    assert not out.exists()
    assert fit_table(frame, "y", noise="constant", epochs=2).task == "classification"


def test_an_unknown_noise_is_refused_before_training() -> None:
    stages: list[str] = []
    with pytest.raises(OptionError, match="noise is 'loud'; expected one of"):
        fit_table(table(), "y", noise="loud", progress=lambda stage, _: stages.append(stage))
    assert "training" not in stages


# -- estimators -----------------------------------------------------------------------------------------------------


def test_copies_from_before_there_was_a_choice() -> None:
    """Their state has no noise, and their network none that varies."""
    X, y = arrays(60)
    for fitted in (False, True):
        made = LaplaceRegressor(width=5, epochs=3, noise="constant", random_state=0)
        state = (made.fit(X, y) if fitted else made).__getstate__()
        state.pop("noise")
        if fitted:
            state["spec_"].pop("varying")
        old = LaplaceRegressor.__new__(LaplaceRegressor)
        old.__setstate__(pickle.loads(pickle.dumps(state)))
        assert "LaplaceRegressor(" in repr(old)
        assert old.get_params()["noise"] == "constant"
        copy: Any = clone(old)
        again = copy.fit(X, y)
        if fitted:
            np.testing.assert_array_equal(old.predict(X, return_std=True), made.predict(X, return_std=True))
            np.testing.assert_array_equal(again.predict(X), made.predict(X))


def test_a_deviation_whose_square_overflows() -> None:
    X, y = arrays()
    found = LaplaceRegressor(depth=0, epochs=10, noise="varying", random_state=0).fit(X, y)
    far = 1.0
    while (found.predict([[0.0, 2 * far]], return_std=True)[1] < 1e160).all():
        far *= 2
        assert far < 1e12
    mean, std = found.predict([[0.0, far], [0.0, 1.5 * far], [1e9, 1e9]], return_std=True)
    assert std[0] < 1e160
    assert np.isfinite(mean).all()
    assert not np.isnan(std).any()
    assert std[1] > 1e30


def test_a_search_over_noises() -> None:
    X, y = arrays()
    made: Any = LaplaceRegressor(width=5, epochs=3, random_state=0)
    found = GridSearchCV(made, {"noise": ["constant", "varying"]}, cv=2).fit(X, y)
    assert np.isfinite(found.cv_results_["mean_test_score"]).all()
    with pytest.raises(OptionError, match="noise is 'loud'"):
        made.set_params(noise="loud").fit(X, y)
