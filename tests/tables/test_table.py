"""Reading, kinds of columns, and the encoder: against numpy on the whole table, and by hand."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from lapwing.errors import DataError, OptionError
from lapwing.tables.columns import as_days, as_numbers, as_text, as_truth, infer
from lapwing.tables.dialect import separator_of
from lapwing.tables.encoder import FARTHEST, Encoder, Moments, Notes, learn
from lapwing.tables.reading import find_column, open_table
from lapwing.tables.targets import CALIBRATION, TEST, TRAIN, UNUSED, Target, choose_task, read_target, split


def kinds_of(frame: pd.DataFrame, size: int = 7) -> dict[str, str]:
    return {name: kind.name for name, kind in infer(open_table(frame).chunks(size=size)).items()}


def learned(frame: pd.DataFrame, size: int = 7) -> Encoder:
    table = open_table(frame)
    return learn(table, infer(table.chunks(size=size)))


# -- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_separators_are_found_and_quoted_ones_are_text(tmp_path: Path, separator: str) -> None:
    path = tmp_path / "a.csv"
    lines = [separator.join(["a", f'"b{separator}c"', "größe"])]
    lines += [separator.join([str(i), f'"x{separator}y"', "ü"]) for i in range(5)]
    path.write_text("\n".join(lines), encoding="utf-8")
    table = open_table(path)
    assert table.columns == ("a", f"b{separator}c", "größe")
    frame = pd.concat(table.chunks())
    assert frame["a"].tolist() == [0, 1, 2, 3, 4]
    assert set(frame[f"b{separator}c"]) == {f"x{separator}y"}


def test_chunks_hold_all_rows_in_order(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": np.arange(100), "b": np.arange(100) / 7, "c": list("xyzw") * 25})
    frame.to_csv(tmp_path / "t.csv", index=False)
    frame.to_parquet(tmp_path / "t.parquet")
    with gzip.open(tmp_path / "t.csv.gz", "wt") as file:
        frame.to_csv(file, index=False)
    for source in (frame, tmp_path / "t.csv", tmp_path / "t.parquet", str(tmp_path / "t.csv.gz")):
        chunks = list(open_table(source).chunks(["c", "b"], size=33))
        assert [len(chunk) for chunk in chunks] == [33, 33, 33, 1]
        pd.testing.assert_frame_equal(pd.concat(chunks), frame[["c", "b"]], check_dtype=False)


def test_decimal_commas_and_foreign_encodings(tmp_path: Path) -> None:
    path = tmp_path / "german.csv"
    path.write_bytes("preis;straße;menge\n1,5;Höhe;1\n2,25;Tür;2\nkeiner;Tür;3\n".encode("cp1252"))
    table = open_table(path)
    assert table.columns == ("preis", "straße", "menge")
    assert len(table.notes) == 2
    (frame,) = table.chunks()
    assert np.array_equal(as_numbers(frame["preis"]), [1.5, 2.25, np.nan], equal_nan=True)
    path.write_bytes("\ufeffa,b\n1,2\n".encode())
    assert open_table(path).columns == ("a", "b")
    path.write_bytes("a,b\n1,2\n".encode("utf-16"))
    assert open_table(path).columns == ("a", "b")


def test_a_misspelt_name_has_the_nearest_one() -> None:
    with pytest.raises(DataError, match="Did you mean 'Price'"):
        find_column("prise", ["Price", "rooms"], "the table")
    with pytest.raises(DataError, match="Its columns are: 'a'"):
        find_column("zzzz", ["a"], "the table")


# -- kinds -----------------------------------------------------------------------------------------------------------


def test_kinds_are_found_whatever_the_chunks() -> None:
    n = 60
    frame = pd.DataFrame(
        {
            "number": np.linspace(0, 1, n),
            "holes": [np.nan if i % 3 else float(i) for i in range(n)],
            "mostly": ["oops" if i == 31 else str(i / 2) for i in range(n)],
            "flag": [True, False] * 30,
            "says": ["yes", "No"] * 30,
            "colour": ["red", "green", "blue"] * 20,
            "remark": [f"remark number {i} of many" for i in range(n)],
            "day": pd.date_range("2020-01-01", periods=n).strftime("%Y-%m-%d"),
            "german_day": pd.date_range("2020-01-01", periods=n).strftime("%d.%m.%Y"),
            "ambiguous": pd.date_range("2020-01-20", periods=n).strftime("%d/%m/%Y"),
            "stamp": pd.date_range("2020-01-01", periods=n, tz="Europe/Berlin"),
            "nothing": [None] * n,
            "id": range(1, n + 1),
            "year": range(1950, 1950 + n),
            "wait": pd.to_timedelta(np.arange(n), unit="h"),
        }
    )
    expected = {
        "number": "number",
        "holes": "number",
        "mostly": "number",
        "flag": "boolean",
        "says": "boolean",
        "colour": "category",
        "remark": "left out",
        "day": "date",
        "german_day": "date",
        "ambiguous": "date",
        "stamp": "date",
        "nothing": "left out",
        "id": "left out",
        "year": "number",
        "wait": "number",
    }
    for size in (7, 13, 1000):
        assert kinds_of(frame, size) == expected
    kinds = infer(open_table(frame).chunks(size=11))
    assert "oops" in kinds["mostly"].note
    assert kinds["ambiguous"].format == "%d/%m/%Y"
    assert kinds["year"].whole
    assert not kinds["number"].whole
    assert kinds["colour"].distinct == 3


def test_values_by_hand() -> None:
    column = pd.Series([1, "2.50", " x ", None, "?", "inf", 1e200, "3.0"], dtype=object)
    assert as_text(column).tolist() == ["1", "2.50", "x", None, None, "inf", str(int(1e200)), "3"]
    assert np.array_equal(as_numbers(column), [1, 2.5, *[np.nan] * 5, 3], equal_nan=True)
    assert np.array_equal(as_truth(pd.Series(["TRUE", "no", "x", True])), [1, 0, np.nan, 1], equal_nan=True)
    days = as_days(pd.Series(["1970-01-02", "1970-01-01T12:00", "bad"]), "ISO8601")
    assert np.array_equal(days, [1, 0.5, np.nan], equal_nan=True)


# -- encoder ---------------------------------------------------------------------------------------------------------


def test_moments_are_those_of_all_rows_also_far_from_zero() -> None:
    random = np.random.default_rng(0)
    values = random.normal(1e6, 1.0, (1000, 2))
    values[::5, 1] = np.nan
    moments = Moments.none(2)
    for part in np.array_split(values, 17):
        moments.add(part)
    np.testing.assert_allclose(moments.mean, np.nanmean(values, axis=0), rtol=1e-12)
    np.testing.assert_allclose(moments.deviation(), np.nanstd(values, axis=0), rtol=1e-9)
    assert moments.count.tolist() == [1000, 800]


def test_numbers_are_standardised_and_missing_ones_marked() -> None:
    frame = pd.DataFrame({"a": [1.0, 2.0, 3.0, np.nan, 6.0], "b": [0.0, 1.0, 2.0, 3.0, 4.0]})
    encoder = learned(frame)
    assert encoder.inputs == ["a", "a is missing", "b"]
    a = np.array([1.0, 2.0, 3.0, 6.0])
    expected = np.insert((a - a.mean()) / a.std(), 3, 0.0)
    x = encoder(frame).double().numpy()
    np.testing.assert_allclose(x[:, 0], expected, rtol=1e-6)
    assert x[:, 1].tolist() == [0, 0, 0, 1, 0]
    np.testing.assert_allclose(x[:, 2].std(), 1, rtol=1e-6)


def test_a_missing_level_has_an_input_of_its_own() -> None:
    frame = pd.DataFrame({"c": ["x"] * 9 + ["y"] * 9 + ["once", None, None], "n": range(21)})
    encoder = learned(frame)
    assert encoder.inputs == ["c=x", "c=y", "c=other", "c=missing", "n"]
    notes = Notes()
    x = encoder(pd.DataFrame({"c": ["y", "once", "new", None], "n": [1, 2, 3, 4]}), notes)
    expected = [[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    assert torch.equal(x[:, :4] > x[:, :4].mean(), torch.tensor(expected).bool())
    assert encoder.strange(x).tolist() == [False] * 4
    assert not any("unknown" in note for note in notes.counts)


def test_rare_and_new_levels_are_other() -> None:
    frame = pd.DataFrame({"c": ["x"] * 5 + ["y"] * 4 + ["once"], "n": range(10)})
    encoder = learned(frame)
    assert encoder.inputs == ["c=x", "c=y", "c=other", "n"]
    notes = Notes()
    x = encoder(pd.DataFrame({"c": ["y", "once", "new", None], "n": [1, 2, 3, 4]}), notes)
    assert x[:3, :3].tolist() == [[0, 1, 0], [0, 0, 1], [0, 0, 1]]
    assert bool(x[3, :3].isnan().all())  # no level at all is not one of the rare ones
    assert encoder.strange(x).tolist() == [False, False, False, True]
    said = " ".join(notes.listed())
    assert "1 values of 'c' are new (such as 'new')" in said
    assert "missing, which none were in training" in said


def test_only_the_chosen_rows_teach() -> None:
    frame = pd.DataFrame({"a": [1.0, 2.0, 100.0, 200.0], "c": ["x", "x", "y", "y"], "d": [1, 1, 2, 2]})
    table = open_table(frame)
    encoder = learn(table, infer(table.chunks()), rows=np.array([True, True, False, False]))
    column = encoder.columns[0]
    assert column.means == (1.5,)
    assert column.deviations == (0.5,)
    assert [c.kind for c in encoder.columns] == ["number", "left out", "left out"]
    assert "same in all rows" in encoder.columns[1].note


def test_dates_become_days_and_the_place_in_the_year() -> None:
    frame = pd.DataFrame({"day": pd.date_range("2020-01-01", periods=800).strftime("%Y-%m-%d")})
    encoder = learned(frame, 100)
    assert len(encoder.inputs) == 3
    x = encoder(frame).double()
    assert torch.allclose(x.mean(0), torch.zeros(3).double(), atol=1e-5)
    assert torch.allclose(x.std(0, correction=0), torch.ones(3).double(), atol=1e-5)
    typed = pd.DataFrame({"day": pd.to_datetime(frame["day"])})
    assert torch.equal(encoder(typed).double(), x)


def test_extreme_values_are_held_unreadable_ones_unknown_and_both_noted() -> None:
    encoder = learned(pd.DataFrame({"a": np.arange(10.0)}))
    notes = Notes()
    x = encoder(pd.DataFrame({"a": ["1e90", "-1e90", "word", "inf", "5"]}), notes)
    assert x[:2, 0].tolist() == [FARTHEST, -FARTHEST]
    assert x[:, 0].isnan().tolist() == [False, False, True, True, False]
    assert encoder.strange(x).tolist() == [True, True, True, True, False]
    assert any("extremely far" in note for note in notes.listed())
    assert any("cannot be read as a number" in note for note in notes.listed())


def test_an_unknown_value_may_be_any_of_training_and_goes_with_others_of_its_row() -> None:
    n = np.arange(1000.0)
    frame = pd.DataFrame({"a": n, "b": -n, "c": np.where(n % 2, "odd", "even"), "d": np.where(n % 10, n, np.nan)})
    encoder = learned(frame, 100)
    assert np.shape(encoder.examples) == (32, len(encoder.inputs))
    assert encoder.inputs == ["a", "b", "c=even", "c=odd", "c=other", "d", "d is missing"]
    drawn = torch.tensor(encoder.examples).double()
    assert bool(drawn.isfinite().all())
    assert float(drawn[:, 0].mean().abs()) < 4 / 32**0.5
    x = encoder(pd.DataFrame({"a": ["?", "1", "x"], "b": [None, 1, 1], "c": ["odd", "new", None], "d": ["", "1", "x"]}))
    # an empty cell is a case of training where there were some; a word in its place is not
    assert x.isnan().any(0).tolist() == [True] * 7
    assert x[:, 5].isnan().tolist() == [False, False, True]
    assert encoder.strange(x).tolist() == [True, True, True]  # a level is new where training had no rare one
    versions = encoder.versions(x)
    assert versions.shape == (3, 32, 7)
    assert bool(versions.isfinite().all())
    torch.testing.assert_close(versions[0, :, 0], -versions[0, :, 1])
    assert bool((versions[0, :, 2:5] == torch.tensor([0.0, 1.0, 0.0])).all())
    assert bool((versions[1] == x[1]).all())
    assert bool((versions[2, :, 2:5].sum(1) == 1).all())


def test_examples_do_not_depend_on_chunks() -> None:
    frame = pd.DataFrame({"a": np.arange(500.0)})
    kinds = infer(open_table(frame).chunks())
    found = []
    for size in (7, 100, 10_000):
        table = open_table(frame)
        found.append(learn(replace(table, read=lambda c, t, _, read=table.read, size=size: read(c, t, size)), kinds))
    assert found[0].examples == found[1].examples == found[2].examples


@pytest.mark.parametrize("offset", [0.0, 1e12, -1e15])
def test_an_offset_does_not_hide_what_varies(offset: float) -> None:
    frame = pd.DataFrame({"a": offset + np.arange(200.0), "b": offset + 0.1, "n": range(200)})
    encoder = learned(frame)
    assert encoder.inputs == ["a", "n"]
    x = encoder(frame)
    torch.testing.assert_close(x[:, 0], x[:, 1], rtol=1e-6, atol=1e-6)
    assert Moments.none(1).deviation().tolist() == [0.0]


def test_an_encoder_is_json() -> None:
    frame = pd.DataFrame(
        {"a": [1.0, 2.0, np.nan, 4.0] * 3, "c": ["x", "ü", "x", "ü"] * 3, "t": [f"t{i}" for i in range(12)]}
    )
    encoder = learned(frame)
    again = Encoder.from_dict(json.loads(json.dumps(encoder.to_dict())))
    assert again.columns == encoder.columns
    assert again.examples == encoder.examples
    for wrong in ([], [[0.0]]):
        with pytest.raises(DataError, match="examples of training rows"):
            Encoder.from_dict(encoder.to_dict() | {"examples": wrong})
    assert torch.equal(again(frame), encoder(frame))


def test_many_levels_are_kept_by_frequency() -> None:
    words = [f"w{i:03d}" for i in range(200) for _ in range(3 + (i < 40))]
    encoder = learned(pd.DataFrame({"c": words, "n": range(len(words))}), 1000)
    levels = encoder.columns[0].levels
    assert len(levels) == 30
    assert all(level < "w040" for level in levels)
    assert "170 rare levels" in encoder.columns[0].note


# -- the task --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "task"),
    [
        (np.linspace(0, 1, 40), "regression"),
        (np.arange(40), "regression"),
        ([0, 1] * 20, "classification"),
        ([0.0, 1.0, np.nan, 2.0] * 10, "classification"),
        ([0.5, 1.5] * 20, "regression"),
        (["a", "b"] * 20, "classification"),
        ([True, False] * 20, "classification"),
    ],
)
def test_the_task_is_inferred_and_explained(values: list, task: str) -> None:
    frame = pd.DataFrame({"y": values})
    kind = infer(open_table(frame).chunks())["y"]
    found, reason = choose_task("y", kind)
    assert found == task
    assert "because 'y' holds" in reason


def test_a_task_can_be_asked_for() -> None:
    frame = pd.DataFrame({"y": [3, 1, 2, 10] * 10, "w": list("abcd") * 10})
    table = open_table(frame)
    kinds = infer(table.chunks())
    target, values = read_target(table, "y", kinds["y"], "regression")
    assert target.task == "regression"
    assert values.tolist() == frame["y"].tolist()
    target, values = read_target(table, "y", kinds["y"], "classification")
    assert target.classes == ("1", "2", "3", "10")
    assert values[:4].tolist() == [2, 0, 1, 3]
    assert target.encode(pd.Series(["10", 1.0, "new", None], dtype=object)).tolist() == [3, 0, -1, -1]
    assert Target.from_dict(json.loads(json.dumps(target.to_dict()))) == target
    with pytest.raises(DataError, match="holds words"):
        read_target(table, "w", kinds["w"], "regression")
    with pytest.raises(OptionError, match="unknown task"):
        read_target(table, "w", kinds["w"], "cluster")


@pytest.mark.parametrize(("distinct", "kind"), [(5, "category"), (6, "left out")])
def test_five_words_are_categories_and_six_that_fill_half_the_rows_are_not(distinct: int, kind: str) -> None:
    words = [f"word {chr(97 + i % distinct)}" for i in range(2 * distinct - 1)]
    assert infer(open_table(pd.DataFrame({"w": words})).chunks())["w"].name == kind


def test_a_class_is_called_by_the_way_it_is_written_most_often() -> None:
    frame = pd.DataFrame({"y": ["YES", *["yes"] * 9, "No", *["NO"] * 9]})
    table = open_table(frame)
    target, values = read_target(table, "y", infer(table.chunks())["y"])
    assert sorted(target.classes) == ["NO", "yes"]
    assert [target.classes[int(i)] for i in values] == ["yes"] * 10 + ["NO"] * 10


@pytest.mark.parametrize(
    ("given", "kind", "classes"),
    [
        (["1,5", "2,5", "1,50"], "number", ("1,5", "2,5")),
        (["1.234", "A 1", "B,5"], "category", ("1.234", "A 1", "B,5")),
    ],
)
def test_labels_of_a_table_with_decimal_commas_are_kept_as_given(
    given: list[str], kind: str, classes: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a;y\n" + "".join(f"{i},5;{given[i % 3]}\n" for i in range(31)))
    table = open_table(path)
    kinds = infer(table.chunks())
    assert (kinds["a"].name, kinds["y"].name) == ("number", kind)
    target, values = read_target(table, "y", kinds["y"], "classification")
    assert target.classes == classes
    again = Target.from_dict(json.loads(json.dumps(target.to_dict())))
    read = [again.encode(frame["y"]) for frame in table.chunks(["y"], text=["y"])]
    assert np.concatenate(read).tolist() == values.tolist()
    assert values.min() == 0


@pytest.mark.parametrize(
    ("given", "classes", "codes"),
    [
        (["Yes", "no", "Yes", "NO", "no"], ("no", "Yes"), [1, 0, 1, 0, 0]),
        (["02134", "00501", "02134"], ("00501", "02134"), [1, 0, 1]),
        (["2.0", "1.0", "2.0", "1"], ("1.0", "2.0"), [1, 0, 1, 0]),
        (["x", "2.0", "x", "2.0", None], ("2.0", "x"), [1, 0, 1, 0, -1]),
        ([True, False, True], ("False", "True"), [1, 0, 1]),
        ([2, 1, 2], ("1", "2"), [1, 0, 1]),
    ],
)
def test_labels_are_kept_as_given(given: list, classes: tuple[str, ...], codes: list[int], tmp_path: Path) -> None:
    frame = pd.DataFrame({"y": given * 10, "n": range(10 * len(given))})
    frame.to_csv(tmp_path / "t.csv", index=False)
    for source in (frame, tmp_path / "t.csv"):
        table = open_table(source)
        target, values = read_target(table, "y", infer(table.chunks())["y"], "classification")
        assert target.classes == classes
        assert values[: len(given)].tolist() == codes
        assert target.encode(pd.Series(given, dtype=object)).tolist() == codes
        assert Target.from_dict(json.loads(json.dumps(target.to_dict()))) == target


# -- splits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "held"), [(10, 2), (50, 10), (100, 20), (1000, 150), (200_000, 10_000)])
def test_sizes_of_the_parts(rows: int, held: int) -> None:
    values = np.random.default_rng(0).normal(size=rows)
    parts = split(values, Target("y", "regression", "", "number"), seed=0)
    assert [(parts == part).sum() for part in (UNUSED, TRAIN, CALIBRATION, TEST)] == [0, rows - 2 * held, held, held]


def test_splits_are_stratified_and_follow_the_seed() -> None:
    values = np.repeat([0, 1, 2], [800, 150, 50])
    target = Target("y", "classification", "", "category", ("a", "b", "c"))
    parts = split(values, target, seed=0)
    for part in (CALIBRATION, TEST):
        counts = np.bincount(values[parts == part])
        assert (parts == part).sum() == 150
        np.testing.assert_allclose(counts, [120, 22.5, 7.5], atol=2.5)
    assert np.array_equal(parts, split(values, target, seed=0))
    assert not np.array_equal(parts, split(values, target, seed=1))


def test_every_row_can_be_held_out() -> None:
    values = np.repeat([0, 1], [30, 20])
    target = Target("y", "classification", "", "category", ("a", "b"))
    drawn = np.stack([split(values, target, seed) for seed in range(400)])
    for part in (CALIBRATION, TEST):
        share = (drawn == part).mean(0)
        assert np.abs(share - 0.2).max() < 4.5 * np.sqrt(0.2 * 0.8 / 400)


def test_rows_without_a_target_and_beyond_the_limit_are_not_used() -> None:
    values = np.where(np.arange(200) % 4 == 0, np.nan, np.arange(200.0))
    parts = split(values, Target("y", "regression", "", "number"), seed=0, most=100)
    assert (parts[::4] == UNUSED).all()
    assert (parts != UNUSED).sum() == 100


def test_of_a_long_table_rows_from_everywhere_are_used() -> None:
    target = Target("y", "regression", "", "number")
    used = np.stack([split(np.arange(200.0), target, seed, most=20) != UNUSED for seed in range(400)])
    assert (used.sum(1) == 20).all()
    # each row is drawn with probability 1/10: four standard errors of the share that the first 20 rows have
    error = (0.1 * 0.9 / 400 / 20) ** 0.5
    assert abs(used[:, :20].mean() - 0.1) < 4 * error


def test_the_last_word_of_many_decides_how_dates_are_written() -> None:
    unclear = [f"{day:02}/{month:02}/2020" for day in range(1, 13) for month in range(1, 6)]  # day or month first
    for last, form in (("25/03/2020", "%d/%m/%Y"), ("03/25/2020", "%m/%d/%Y")):
        frame = pd.DataFrame({"when": [*unclear, last]})
        found = infer([frame])["when"]
        assert (found.name, found.format) == ("date", form)


@pytest.mark.parametrize("whole", [True, False])
def test_the_last_row_of_a_sample_counts_where_it_is_whole(whole: bool) -> None:
    assert separator_of("a;b", whole) == ";"
    assert separator_of("a;b\nc;d\ne,f,g", whole) == ("," if whole else ";")
