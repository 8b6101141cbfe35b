"""Noise that varies: when it is chosen, at what level, and where it may go wrong: extreme tables and inputs, classes,
copies from before it was there."""

from __future__ import annotations

import pickle
from math import log, pi
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from torch import Tensor
from typer.testing import CliRunner

from lapwing.cli.commands import app
from lapwing.errors import OptionError
from lapwing.laplace.calibration import point_share
from lapwing.likelihoods import Gaussian, HeteroscedasticGaussian
from lapwing.priors import Prior
from lapwing.tables import network as architecture
from lapwing.tables.bundle import Bundle
from lapwing.tables.estimators import LaplaceRegressor
from lapwing.tables.fit import fit_table
from lapwing.tables.network import Spec, build
from lapwing.tables.stretch import FitProgress, TableTraining
from lapwing.tables.training import train

AMOUNTS = ["mean", "sd", "sd_epistemic", "sd_noise", "lower_90", "upper_90"]


def table(rows: int = 150, scale: float = 1.0) -> pd.DataFrame:
    """The deviation of the noise goes with b, from a tenth to ten times 0.3."""
    random = np.random.default_rng(0)
    a, b = random.normal(size=(2, rows))
    return pd.DataFrame({"a": a, "b": b, "y": scale * (3 * a + 0.3 * np.exp(b) * random.normal(size=rows))})


def arrays(rows: int = 150) -> tuple[np.ndarray, np.ndarray]:
    frame = table(rows)
    return frame[["a", "b"]].to_numpy(), frame["y"].to_numpy()


# -- networks -------------------------------------------------------------------------------------------------------


def swelling(rows: int, seed: int = 0, ratio: float = 10.0) -> tuple[Tensor, Tensor]:
    """y = sin 2 x_0 + noise whose deviation goes from 0.05 with x_1 to as many times as that."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(rows, 2, generator=generator) * 2 - 1
    deviation = 0.05 * ratio ** ((x[:, 1] + 1) / 2)
    return x, torch.sin(2 * x[:, 0]) + deviation * torch.randn(rows, generator=generator)


@pytest.mark.slow
@pytest.mark.parametrize("structure", ["full", "kron"])
def test_the_evidence_chooses_between_one_noise_and_one_that_varies(structure: str) -> None:
    options = {"spec": Spec(2, 1, width=6, depth=1), "seed": 0, "epochs": 60, "structure": structure}
    model, la, _ = train(*swelling(600), "regression", **options)
    assert isinstance(la.distribution, HeteroscedasticGaussian)
    assert "The noise varies with the inputs" in la.choices[0]
    assert "(log evidence +" in la.choices[0]
    x, _ = swelling(300, seed=1)
    with torch.no_grad():
        mean, level = model(x).T
    torch.testing.assert_close(mean, torch.sin(2 * x[:, 0]).double(), rtol=0, atol=0.25)
    truth = 0.05 * 10 ** ((x[:, 1].double() + 1) / 2)
    assert float((level / 2 - truth.log()).abs().mean()) < 0.25  # one noise for all rows has 0.58
    _, la, _ = train(*swelling(400, ratio=1.0), "regression", **options)
    assert isinstance(la.distribution, Gaussian)
    assert "The noise is the same for all rows" in la.choices[0]
    assert "(log evidence -" in la.choices[0]


@pytest.mark.slow
def test_constant_noise_is_not_taken_for_varying() -> None:
    """Of these tables, 10 gain log evidence by chance: up to 1.5."""
    for seed in range(12):
        for width in (6, 20):
            data = swelling(400, seed, ratio=1.0)
            _, la, _ = train(*data, "regression", Spec(2, 1, width=width), seed=seed, epochs=60, structure="full")
            assert "The noise is the same for all rows" in la.choices[0], (seed, width)


def test_noise_is_as_asked_for_and_few_rows_have_one() -> None:
    options = {"spec": Spec(2, 1, width=4, depth=1), "seed": 0, "epochs": 8}
    told: list[FitProgress] = []
    for rows, noise, varies, said in (
        (40, "auto", False, "fewer than 100 rows"),
        (40, "varying", True, "varies with the inputs, as asked for"),
        (120, "constant", False, "same for all rows, as asked for"),
    ):
        told.clear()
        model, la, _ = train(*swelling(rows), "regression", noise=noise, callback=told.append, **options)
        assert isinstance(la.distribution, HeteroscedasticGaussian) == varies
        assert said in la.choices[0]
        assert [each.epoch for each in told] == list(range(1, 13 if varies else 9))
        assert model(torch.zeros(3, 2)).shape == (3, 2 if varies else 1)
    with pytest.raises(OptionError, match="noise is 'no'"):
        train(*swelling(40), "regression", noise="no", **options)


def test_a_second_head_starts_from_the_network_as_it_is() -> None:
    model = build(Spec(3, 2, width=5, kind="resnet"), torch.Generator().manual_seed(0))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(7, 3, generator=torch.Generator().manual_seed(1))
    heads = architecture.with_heads(model, 2 * log(0.3), x)
    with torch.no_grad():
        mean, level = heads(x).chunk(2, 1)
        torch.testing.assert_close(mean, model(x))
        torch.testing.assert_close((level / 2).exp(), torch.full((7, 2), 0.3, dtype=torch.float64))
        for parameter in heads.parameters():
            parameter.add_(1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    torch.testing.assert_close(architecture.noise_level(heads), torch.full((2,), 0.3, dtype=torch.float64))
    rebuilt = build(Spec(3, 2, width=5, kind="resnet", varying=True))
    rebuilt.load_state_dict(heads.state_dict())
    assert torch.equal(rebuilt(x), heads(x))


def test_the_level_of_noise_that_varies_is_where_the_evidence_is_largest() -> None:
    """At given weights, for a mean whose curvature is all that depends on the level."""
    x, y = swelling(80)
    x, y = x.double(), y.double().unsqueeze(1)
    plain = build(Spec(2, 1, width=4, depth=1), torch.Generator().manual_seed(0))
    model = architecture.with_heads(plain, 1.0, x)  # the noise head says nothing yet: no weight of the mean moves l
    spec = Spec(2, 1, width=4, depth=1, varying=True)
    run = TableTraining(model, spec, x, y, "regression", 16, torch.Generator().manual_seed(0))
    la = run.laplace("full")
    prior = Prior.layerwise(la.space, [0.3, 0.5, 1.0])

    def evidence(level: float) -> float:
        architecture.heads_of(model).level.fill_(level)
        la.fit([(x, y)])
        return float(la.evidence.log_marginal(prior))

    evidence(1.0)
    for _ in range(30):
        run.relevel(la.evidence, prior, torch.arange(80))
        la.fit([(x, y)])
    found = float(architecture.heads_of(model).level)
    best = evidence(found)
    assert max(evidence(found - 0.05), evidence(found + 0.05)) < best
    assert (evidence(found + 1e-4) - evidence(found - 1e-4)) / 2e-4 == pytest.approx(0, abs=1e-3)
    evidence(found)
    with torch.no_grad():
        squares = (y - model(x)[:, :1]).square().sum() / architecture.noise_level(model) ** 2
    la.prior_precision = prior.precisions
    assert float(squares) == pytest.approx(80 * point_share(la), rel=1e-6)  # sum z^2 = N - gamma


def test_the_loss_of_noise_that_varies_is_its_log_density_without_the_constant() -> None:
    spec = Spec(2, 2, width=4, depth=1, varying=True)
    random = torch.Generator().manual_seed(0)
    mean, level, y = torch.randn(3, 5, 2, generator=random, dtype=torch.float64)
    x = torch.randn(5, 2, generator=random, dtype=torch.float64)
    run = TableTraining(build(spec, random), spec, x, y, "regression", 5, random)
    density = torch.distributions.Normal(mean, (level / 2).exp()).log_prob(y).sum() + y.numel() * log(2 * pi) / 2
    assert float(run.loss(torch.cat([mean, level], 1), y)) == pytest.approx(-float(density) / 5, rel=1e-12)


def test_several_targets_have_a_noise_each() -> None:
    x, y = swelling(150)
    model, la, _ = train(
        x, torch.stack([y, -y], 1), "regression", Spec(2, 2, width=6), seed=0, epochs=10, noise="varying"
    )
    assert model(x).shape == (150, 4)
    assert la(x)[1].shape == (150, 4, 4)


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
