"""From a table to a bundle: what is held out, what is scored, and that the scores are those of the predictions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from math import log, pi
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from lapwing.errors import LapwingWarning, OptionError
from lapwing.metrics import coverage
from lapwing.predictive import Amounts
from lapwing.tables import fit, reading
from lapwing.tables.bundle import Bundle
from lapwing.tables.conformal import Conformal, quantile, rows_needed
from lapwing.tables.fit import FEW, calibrated, encode, fit_table
from lapwing.tables.reading import open_table
from lapwing.tables.scoring import LEVELS, Summary, likely_set, score_amounts, score_classes
from lapwing.tables.targets import CALIBRATION, TRAIN, UNUSED
from lapwing.tables.training import Spec

SMALL = Spec(1, 1, width=8, depth=1)
LINEAR = Spec(1, 1, depth=0)
Quick = Callable[[], AbstractContextManager[None]]


def houses(rows: int = 400, seed: int = 0) -> pd.DataFrame:
    """An amount that depends on a number, a category and a flag, with noise of deviation 5."""
    random = np.random.default_rng(seed)
    area = random.uniform(20, 120, rows)
    town = random.choice(["Aachen", "Köln", "Bonn"], rows)
    garden = random.random(rows) < 0.3
    price = 100 + 2 * area + 30 * (town == "Köln") + 20 * garden + random.normal(0, 5, rows)
    age = random.uniform(0, 50, rows)
    price += 0.2 * age
    age[random.random(rows) < 0.05] = np.nan
    return pd.DataFrame({"area": area, "age": age, "town": town, "garden": garden, "price": price})


def flowers(rows: int = 400, seed: int = 0) -> pd.DataFrame:
    random = np.random.default_rng(seed)
    label = random.integers(0, 3, rows)
    x = random.normal(size=(rows, 2)) * 0.7 + np.array([[0, 0], [2, 0], [0, 2]])[label]
    return pd.DataFrame({"long": x[:, 0], "wide": x[:, 1], "kind": np.array(["rose", "iris", "aster"])[label]})


@pytest.fixture(scope="module")
def amounts(quick: Quick) -> Bundle:
    with quick():
        return fit_table(houses(), "price", epochs=40, spec=SMALL, noise="constant")


@pytest.fixture(scope="module")
def classes(quick: Quick) -> Bundle:
    with quick():
        return fit_table(flowers(), "kind", epochs=40, spec=SMALL)


def test_amounts_are_learned(amounts: Bundle) -> None:
    assert amounts.task == "regression"
    assert amounts.encoder.inputs == [
        "area", "age", "age is missing", "town=Aachen", "town=Bonn", "town=Köln", "town=other", "garden",
    ]  # fmt: skip
    new = houses(1000, seed=1)
    found = amounts.predict(new.drop(columns="price"))
    error = (found["mean"] - new["price"]).to_numpy()
    assert np.sqrt(np.mean(error**2)) < 9
    assert 3 < found["sd_noise"].iloc[0] < 9
    np.testing.assert_allclose(found["sd"] ** 2, found["sd_epistemic"] ** 2 + found["sd_noise"] ** 2, rtol=1e-9)
    for lower, upper in (("lower_90", "upper_90"), ("conformal_lower_90", "conformal_upper_90")):
        inside = (found[lower] <= new["price"]) & (new["price"] <= found[upper])
        assert 0.8 < inside.mean() < 0.99
    assert found["ood"].mean() < 0.1


def test_classes_are_learned(classes: Bundle) -> None:
    assert classes.task == "classification"
    assert classes.classes == ("aster", "iris", "rose")
    new = flowers(1000, seed=1)
    found = classes.predict(new)
    p = found[["p_aster", "p_iris", "p_rose"]].to_numpy()
    np.testing.assert_allclose(p.sum(1), 1, atol=1e-6)
    assert (found["prediction"] == new["kind"]).mean() > 0.75
    assert (found["prediction"] == np.array(classes.classes)[p.argmax(1)]).all()
    np.testing.assert_allclose(found["entropy"], -(p * np.log(p)).sum(1), rtol=1e-5)
    covered = [kind in words.split(" | ") for kind, words in zip(new["kind"], found["prediction_set"], strict=True)]
    assert 0.82 < np.mean(covered) < 0.98


def test_the_summary_sets_map_against_laplace(amounts: Bundle, classes: Bundle) -> None:
    for bundle, own, other in ((amounts, "rmse", "accuracy"), (classes, "accuracy", "rmse")):
        summary = bundle.summary
        table = summary.table()
        assert list(table.index) == (["MAP", "Laplace"] if own == "rmse" else ["MAP", "MAP, scaled", "Laplace"])
        assert own in table
        assert other not in table
        assert summary.rows_used == {"train": 280, "calibration": 60, "test": 60}
        assert set(summary.seconds) == {"reading", "training", "calibration"}
        assert table.notna().all().all()
        assert Summary.from_dict(summary.to_dict()) == summary
        shares = table[[f"{name}_{100 * level:g}" for name in ("coverage", "conformal") for level in LEVELS]]
        assert ((shares >= 0) & (shares <= 1)).all().all()


def test_scores_of_any_table_are_those_of_its_predictions(amounts: Bundle, classes: Bundle) -> None:
    new = houses(300, seed=2)
    new.loc[3, "price"] = np.nan
    plain, laplace = amounts.evaluate(new, chunk=50).rows
    kept = new.dropna(subset="price")
    found = amounts.predict(kept)
    z = (kept["price"] - found["mean"]) / found["sd"]
    nll = np.mean(0.5 * z**2 + np.log(found["sd"]) + 0.5 * np.log(2 * np.pi))
    assert laplace.nll == pytest.approx(nll, rel=1e-6)
    assert laplace.rmse == pytest.approx(np.sqrt(np.mean((kept["price"] - found["mean"]) ** 2)), rel=1e-6)
    inside = (found["conformal_lower_90"] <= kept["price"]) & (kept["price"] <= found["conformal_upper_90"])
    assert laplace.conformal_90 == pytest.approx(inside.mean())
    assert plain.rmse == pytest.approx(laplace.rmse, rel=1e-5)
    flower = flowers(300, seed=2)
    row = classes.evaluate(flower).rows[-1]
    found = classes.predict(flower)
    chosen = [found.loc[i, f"p_{kind}"] for i, kind in enumerate(flower["kind"])]
    assert row.nll == pytest.approx(-np.mean(np.log(chosen)), rel=1e-5)
    assert row.accuracy == pytest.approx((found["prediction"] == flower["kind"]).mean())


def test_rows_far_from_the_data_are_flagged(amounts: Bundle, classes: Bundle) -> None:
    far = pd.DataFrame({"area": [1000.0, -500.0], "age": 20.0, "town": ["Bonn"] * 2, "garden": [True] * 2})
    assert amounts.predict(far)["ood"].all()
    strange = pd.DataFrame({"long": [40.0, -40.0], "wide": [-30.0, 40.0]})
    assert classes.predict(strange)["ood"].all()
    assert all(len(text) > 40 for text in (*amounts.explain(), *classes.explain()))
    assert f"{amounts.ood.threshold:.4g}" in amounts.explain()[2]


def test_the_same_seed_gives_the_same_bundle() -> None:
    stages: list[tuple[str, float]] = []
    first, second, third = (
        fit_table(houses(120), "price", epochs=3, spec=SMALL, seed=seed, progress=lambda s, d: stages.append((s, d)))
        for seed in (1, 1, 2)
    )
    new = houses(10, seed=3)
    pd.testing.assert_frame_equal(first.predict(new), second.predict(new), check_exact=True)
    assert not np.allclose(first.predict(new)["mean"], third.predict(new)["mean"])
    assert {stage for stage, _ in stages} == {"reading the table", "training", "calibrating"}
    assert all(0 <= share <= 1 for _, share in stages)
    assert stages[-1] == ("calibrating", 1.0)


def test_held_out_rows_teach_nothing() -> None:
    frame = houses(200)
    bundle = fit_table(frame, "price", epochs=3, spec=SMALL)
    from lapwing.tables.columns import infer
    from lapwing.tables.reading import open_table
    from lapwing.tables.targets import TRAIN, read_target, split

    table = open_table(frame)
    target, values = read_target(table, "price", infer(table.chunks())["price"])
    held = split(values, target, 0) != TRAIN
    changed = frame.copy()
    changed.loc[held, "area"] *= 3
    changed.loc[held, "price"] += 1000
    again = fit_table(changed, "price", epochs=3, spec=SMALL)
    assert again.encoder.columns == bundle.encoder.columns
    assert again.target == bundle.target
    for ours, theirs in zip(bundle.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert not torch.equal(bundle.conformal.scores, again.conformal.scores)


def test_threads_are_given_back_also_after_an_error() -> None:
    before, seen = torch.get_num_threads(), set()
    torch.set_num_threads(2)
    try:
        fit_table(
            houses(100), "price", epochs=2, spec=SMALL, progress=lambda s, d: seen.add((s, torch.get_num_threads()))
        )
        assert torch.get_num_threads() == 2
        assert ("training", 1) in seen
        with pytest.raises(OptionError, match="epochs"):
            fit_table(houses(100), "price", epochs=0, spec=SMALL)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_small_tables_are_warned_of() -> None:
    with pytest.warns(LapwingWarning, match="only 40 usable rows"):
        bundle = fit_table(houses(FEW - 10), "price", epochs=2, spec=SMALL)
    assert any("only 40 usable rows" in note for note in bundle.notes)
    assert any("95 %" in note for note in bundle.notes)


@pytest.mark.parametrize("seed", [-1, True])
def test_seeds_are_whole_numbers(seed: int) -> None:
    with pytest.raises(OptionError, match="whole number"):
        fit_table(houses(100), "price", seed=seed)


def test_scores_by_hand(generator: torch.Generator) -> None:
    mean = torch.zeros(50, dtype=torch.float64)
    y = torch.randn(50, generator=generator, dtype=torch.float64)
    conformal = Conformal(torch.full((12,), 2.0, dtype=torch.float64))
    row = score_amounts("x", Amounts(mean, 0 * mean, 0 * mean, 0 * mean), y, conformal, 0.0)
    assert row.nll == pytest.approx(float((y.square() + log(2 * pi)).mean()) / 2, rel=1e-12)
    assert row.conformal_90 == float((y.abs() <= 2).double().mean())
    assert row.conformal_95 is None
    assert row.coverage_50 == coverage(mean, torch.ones_like(mean), y, 0.5)
    p = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]], dtype=torch.float64)
    assert likely_set(p, 0.6).tolist() == [[True, True, False], [False, False, True]]
    row = score_classes("x", p, torch.tensor([1, 2]), conformal, 0.0)
    assert (row.coverage_50, row.coverage_90, row.accuracy) == (0.5, 1.0, 0.5)


# -- noise that varies -----------------------------------------------------------------------------------------------


def springs(rows: int, seed: int = 0) -> pd.DataFrame:
    """An amount whose noise is 1 where `worn` is false and 8 where it is true."""
    random = np.random.default_rng(seed)
    load, worn = random.uniform(0, 100, rows), random.random(rows) < 0.5
    return pd.DataFrame({"load": load, "worn": worn, "length": load + random.normal(0, np.where(worn, 8, 1))})


@pytest.mark.slow
def test_noise_that_varies_is_found_where_there_is_some() -> None:
    varying = fit_table(springs(500), "length", epochs=60, spec=SMALL)
    assert varying.spec.varying
    assert any("noise varies with the inputs" in note and "(log evidence +" in note for note in varying.notes)
    new = springs(2000, seed=1)
    found = varying.predict(new)
    for worn, deviation in ((True, 8), (False, 1)):
        assert found["sd_noise"][new["worn"] == worn].mean() == pytest.approx(deviation, rel=0.25)
    np.testing.assert_allclose(found["sd"] ** 2, found["sd_epistemic"] ** 2 + found["sd_noise"] ** 2, rtol=1e-9)
    for worn in (True, False):  # an interval with one noise for all rows holds too few of some, and too many of others
        inside = (found["lower_90"] <= new["length"]) & (new["length"] <= found["upper_90"])
        assert 0.82 < inside[new["worn"] == worn].mean() < 0.97
    constant = fit_table(springs(500), "length", epochs=60, spec=SMALL, noise="constant")
    assert not constant.spec.varying
    assert constant.predict(new)["sd_noise"].nunique() == 1
    scores = [each.evaluate(new).rows[1].nll for each in (varying, constant)]
    assert scores[0] < scores[1] - 0.3  # the noise itself: 2.46 on average, against log of its root mean square, 3.16


@pytest.mark.slow
def test_one_noise_remains_where_it_does_not_vary() -> None:
    found = fit_table(houses(500), "price", epochs=60, spec=SMALL)
    assert not found.spec.varying
    assert any("same for all rows" in note and "(log evidence -" in note for note in found.notes)


def test_scores_of_varying_noise_are_those_of_the_mixture() -> None:
    found = fit_table(springs(200), "length", epochs=5, spec=SMALL, noise="varying")
    new = springs(50, seed=3)
    plain, laplace = found.evaluate(new).rows
    ((_, x),) = found.encoded(open_table(new))
    raw, scale = found.raw(x), found.target.deviation
    y = torch.tensor((new["length"].to_numpy() - found.target.mean) / scale)
    mean, level = raw.value.T
    share = (
        1 - float(found.la.effective_parameters()[:-1].sum()) / found.la.n_data
    )  # of the noise's level, 1 - gamma / N
    alone = torch.distributions.Normal(mean, (level / 2).exp() / share**0.5).log_prob(y) - log(scale)
    assert plain.nll == pytest.approx(-float(alone.mean()), rel=1e-9)
    draws = level + raw.variance[:, 1].sqrt() * torch.linspace(-9, 9, 20_001, dtype=torch.float64).unsqueeze(1)
    weights = torch.softmax(-torch.linspace(-9, 9, 20_001, dtype=torch.float64).square() / 2, 0).log().unsqueeze(1)
    given = torch.distributions.Normal(mean, (raw.variance[:, 0] + draws.exp()).sqrt()).log_prob(y)
    assert laplace.nll == pytest.approx(log(scale) - float(torch.logsumexp(given + weights, 0).mean()), rel=1e-7)


def test_a_wrong_noise_is_refused() -> None:
    with pytest.raises(OptionError, match=r"noise is 'both'.*expected one of.*'varying'"):
        fit_table(houses(100), "price", noise="both")


def test_conformal_scores_of_the_network_and_of_the_posterior_are_their_own(
    amounts: Bundle, classes: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """|y - mean| / sd from the columns of the predictions: their deviation, and the one noise of the network alone."""
    new = houses(60, seed=4)
    x, y = amounts.encoder(new), torch.tensor(new["price"].to_numpy())
    again, found = calibrated(amounts, x, y), amounts.predict(new)
    away = np.abs(new["price"] - found["mean"])
    np.testing.assert_allclose(again.conformal.scores, away / found["sd"], rtol=1e-4)
    np.testing.assert_allclose(again.conformal_map.scores, away / amounts.noise_map, rtol=1e-4)
    assert found["sd"].std() > 1e-3 * found["sd"].mean()
    # a posterior that makes a difference: its covariance times 1000
    monkeypatch.setattr(classes.la, "temperature", 1e3 * classes.la.temperature)
    monkeypatch.setattr(classes.la, "prior_precision", 1e-3 * classes.la.prior_precision)
    flower = flowers(60, seed=4)
    labels = torch.tensor([classes.classes.index(kind) for kind in flower["kind"]])
    again, found = calibrated(classes, classes.encoder(flower), labels), classes.predict(flower)
    chosen = [found.loc[i, f"p_{kind}"] for i, kind in enumerate(flower["kind"])]
    np.testing.assert_allclose(again.conformal.scores, 1 - np.array(chosen), rtol=1e-4, atol=1e-6)
    alone = classes.model.eval()(classes.encoder(flower)).softmax(1)[torch.arange(60), labels].detach()
    assert float((alone - torch.tensor(chosen)).abs().max()) > 1e-3
    np.testing.assert_allclose(again.conformal_map.scores, 1 - alone, rtol=1e-4, atol=1e-6)


def test_the_row_of_map_is_scored_by_the_network_alone(amounts: Bundle, classes: Bundle, tmp_path: Path) -> None:
    """Densities and (conformal) intervals with the one noise, and the network's probabilities; also when loaded."""
    new, flower = houses(300, seed=2), flowers(300, seed=2)
    found = amounts.predict(new)
    away = torch.tensor((new["price"] - found["mean"]).to_numpy()) / amounts.noise_map
    labels = torch.tensor([classes.classes.index(kind) for kind in flower["kind"]])
    p = classes.model.eval()(classes.encoder(flower)).softmax(1).detach().double()
    # other quantiles for the network than for the posterior
    amounts = replace(amounts, conformal_map=Conformal(1.3 * amounts.conformal.scores))
    classes = replace(classes, conformal_map=Conformal(classes.conformal.scores.clamp_min(0.99)))
    for name, bundle in (("amounts", amounts), ("classes", classes)):
        bundle.save(tmp_path / name)
    for saved in (False, True):
        if saved:
            amounts, classes = Bundle.load(tmp_path / "amounts"), Bundle.load(tmp_path / "classes")
        plain = amounts.evaluate(new).rows[0]
        density = 0.5 * away.square() + log(amounts.noise_map) + 0.5 * log(2 * pi)
        assert plain.nll == pytest.approx(float(density.mean()), rel=1e-5)
        for level, z in ((0.5, 0.67449), (0.9, 1.64485), (0.95, 1.95996)):
            name = f"{100 * level:g}"
            assert getattr(plain, f"coverage_{name}") == pytest.approx(
                float((away.abs() <= z).double().mean()), abs=0.004
            )
            width = quantile(amounts.conformal_map.scores, level)
            inside = None if width == float("inf") else float((away.abs() <= width).double().mean())
            assert getattr(plain, f"conformal_{name}") == pytest.approx(inside, abs=0.004)
        row = classes.evaluate(flower).rows[0]
        assert row.nll == pytest.approx(-float(p[torch.arange(300), labels].log().mean()), rel=1e-5)
        sets = classes.conformal_map.sets(p, 0.9)[torch.arange(300), labels]
        assert row.conformal_90 == pytest.approx(float(sets.double().mean()), abs=0.004)
        other = classes.conformal.sets(p, 0.9)[torch.arange(300), labels]
        assert float(other.double().mean()) < float(sets.double().mean()) - 0.01


def test_a_table_in_several_chunks_is_fitted_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 256 rows: statistics, split and inputs are those of the whole table."""
    whole = fit_table(houses(), "garden", epochs=1, spec=LINEAR)
    monkeypatch.setattr(reading, "CELLS", 1)
    assert len(list(open_table(houses()).chunks())) == 2
    parts = fit_table(houses(), "garden", epochs=1, spec=LINEAR)
    new = houses(300, seed=1)
    ours, theirs = whole.predict(new), parts.predict(new)
    assert parts.summary.rows_used == whole.summary.rows_used
    assert parts.tested == whole.tested  # the inputs of the rows to test, bit for bit
    for column in ("p_True", "entropy", "sd_epistemic"):
        np.testing.assert_allclose(theirs[column], ours[column], rtol=1e-4)


def test_a_table_too_large_for_memory_is_drawn_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight inputs a row and 960 numbers: 120 of 400 rows, divided as the whole would be, and it is said."""
    monkeypatch.setattr(fit, "NUMBERS", 960)
    bundle, again = (fit_table(houses(), "garden", epochs=1, spec=LINEAR, seed=seed) for seed in (0, 1))
    used = bundle.summary.rows_used
    assert len(bundle.encoder.inputs) == 8
    assert 100 < sum(used.values()) <= 120
    assert used["train"] > used["calibration"] + used["test"]
    assert any(f"Of 400 rows, {sum(used.values())} were drawn at random" in note for note in bundle.notes)
    assert again.encoder.columns != bundle.encoder.columns  # other rows


def parts_of(frame: pd.DataFrame, monkeypatch: pytest.MonkeyPatch) -> tuple[Bundle, np.ndarray]:
    """A fit, and the part that each row had in it."""
    seen: list[np.ndarray] = []
    monkeypatch.setattr(
        fit, "encode", lambda table, encoder, parts: seen.append(parts) or encode(table, encoder, parts)
    )
    bundle = fit_table(frame, "price", epochs=1, spec=LINEAR, noise="constant")
    return bundle, seen[0]


@pytest.mark.parametrize("numbers", [None, 960])
@pytest.mark.parametrize("others", ["held out", "unused"])
def test_what_is_no_row_to_learn_from_leaves_no_trace(
    others: str, numbers: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in means, ranges, categories or shares of missing values, nor in the unit of the target: rows held out, rows
    without a target, and rows that were too many for memory."""
    if numbers is not None:
        monkeypatch.setattr(fit, "NUMBERS", numbers)
    frame = houses(300)
    frame.loc[::10, "price"] = np.nan
    bundle, parts = parts_of(frame, monkeypatch)
    rows = parts == UNUSED if others == "unused" else (parts != UNUSED) & (parts != TRAIN)
    assert rows.sum() > 20
    changed = frame.copy()
    changed.loc[rows, "area"] = 1e6
    changed.loc[rows, "age"] = np.nan
    changed.loc[rows, "town"] = "Bonn" if numbers else "Ulm"  # how many rows are drawn hangs on the number of towns
    changed.loc[rows, "garden"] = True
    changed.loc[rows, "price"] *= -3  # missing ones stay missing
    again, same = parts_of(changed, monkeypatch)
    assert np.array_equal(same, parts)
    assert again.encoder.columns == bundle.encoder.columns
    assert again.encoder.inputs == bundle.encoder.inputs
    np.testing.assert_array_equal(again.encoder.examples, bundle.encoder.examples)  # some of them missing
    assert "Ulm" not in str(again.encoder.columns)
    assert again.target == bundle.target
    learnt = frame["price"][parts == TRAIN]
    assert bundle.target.mean == pytest.approx(learnt.mean(), rel=1e-12)
    assert bundle.target.deviation == pytest.approx(learnt.std(ddof=0), rel=1e-12)
    for ours, theirs in zip(bundle.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    counts = {name: int((parts == part).sum()) for name, part in fit.PARTS.items()}
    assert bundle.summary.rows_used == counts
    assert torch.equal(bundle.conformal.scores, again.conformal.scores) == (others == "unused")


@pytest.mark.parametrize("columns", [20, 23])
def test_columns_beyond_twenty_that_are_left_out_are_counted(columns: int) -> None:
    frame = houses(100).assign(**{f"same {i}": 1 for i in range(columns)})
    bundle = fit_table(frame, "price", epochs=1, spec=LINEAR, noise="constant")
    said = [note for note in bundle.notes if note.startswith("Left out: ")]
    assert len(said) == 20 + (columns > 20)
    assert (f"Left out: {columns - 20} more columns." in said) == (columns > 20)


def notes(bundle: Bundle, counts: dict[str, int], values: np.ndarray, parts: np.ndarray) -> str:
    return " ".join(fit._notes(bundle.target, bundle.encoder, values, parts, counts))


@pytest.mark.parametrize("learnt", [4, 5])
def test_classes_with_fewer_than_five_rows_to_learn_from_are_named(classes: Bundle, learnt: int) -> None:
    """Rows held out do not count."""
    values = np.array([0] * 30 + [1] * 30 + [2] * 30)
    parts = np.full(90, TRAIN, dtype=np.int8)
    parts[60 + learnt :] = CALIBRATION
    said = notes(classes, {"train": 60 + learnt, "calibration": 30 - learnt, "test": 20}, values, parts)
    named = f"Classes with fewer than 5 rows to learn from: {classes.target.classes[2]!r}."
    assert (named in said) == (learnt < 5)
    assert ("Classes with fewer" in said) == (learnt < 5)


@pytest.mark.parametrize("used", [FEW - 1, FEW])
@pytest.mark.parametrize("held", [rows_needed(0.95) - 1, rows_needed(0.95)])
def test_few_rows_are_noted_and_just_enough_are_not(amounts: Bundle, used: int, held: int) -> None:
    values, parts = np.arange(used, dtype=np.float64), np.full(used, TRAIN, dtype=np.int8)
    said = notes(amounts, {"train": used - held - 5, "calibration": held, "test": 5}, values, parts)
    assert (fit._few(used) in said) == (used < FEW)
    assert (f"Only {held} rows could be held out for calibration" in said) == (held < rows_needed(0.95))
    assert "drawn at random" not in said
    assert "rows have no usable value" not in said


def test_rows_without_a_target_and_rows_left_out_are_counted_apart(amounts: Bundle) -> None:
    values, parts = np.arange(200, dtype=np.float64), np.full(200, TRAIN, dtype=np.int8)
    values[:7] = np.nan
    whole = notes(amounts, {"train": 93, "calibration": 50, "test": 50}, values, parts)
    assert "7 of 200 rows have no usable value" in whole
    assert "drawn at random" not in whole
    assert "Of 200 rows, 192 were drawn at random" in notes(
        amounts, {"train": 92, "calibration": 50, "test": 50}, values, parts
    )
