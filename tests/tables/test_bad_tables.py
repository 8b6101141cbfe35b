"""Tables as people have them: each is taken sensibly, or refused with words that say what to do."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from lapwing.errors import DataError, LapwingWarning
from lapwing.reporting.table_report import report_table
from lapwing.tables.bundle import Bundle
from lapwing.tables.columns import _far_day, as_days, as_numbers, infer
from lapwing.tables.encoder import Column, Notes
from lapwing.tables.fit import fit_table
from lapwing.tables.reading import open_table
from lapwing.tables.targets import choose_task
from lapwing.tables.training import Spec

SMALL = Spec(1, 1, width=4, depth=1)


def good(rows: int = 100) -> pd.DataFrame:
    random = np.random.default_rng(0)
    frame = pd.DataFrame({"a": random.normal(size=rows), "b": random.normal(size=rows)})
    return frame.assign(y=frame["a"] - frame["b"] + 0.1 * random.normal(size=rows))


def fit(source: object, target: str = "y", **options: Any) -> Bundle:
    return fit_table(source, target, epochs=2, spec=SMALL, **options)


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "data.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("\n\n  \n", "only blank lines"),
        ("a,b,y\n", "column names but no rows"),
        ("a,b,y", "column names but no rows"),
        ("1,2,3\n4,5,6\n7,8,9\n", "expected column names"),
        ("a,a,y\n" + "1,2,3\n" * 20, "more than one column named 'a'"),
        ("a, a ,y\n" + "1,2,3\n" * 20, "more than one column named 'a'"),
        ("a,y\n" + "1,2\n" * 3 + "1,2,3\n" + "1,2\n" * 20, "line 5 has 3 fields; expected 2"),
        ("a,y\n" + "1,2,3\n" * 20, "first row has 3 fields, and there are 2 column names"),
        ("a,y\n" + "1,2\n2,3\n" * 3, "only 6 rows"),
        ("a,y\n" + "1,7\n2,7\n" * 20, "same value"),
        ("a,y\n" + "1,x\n2,x\n" * 20, "same value"),
        ("a,y\n" + "1,\n2,\n" * 20, "empty in every row"),
        ("y\n" + "1\n2\n" * 20, "no column to learn from"),
        ("a,y\n" + "5,1\n5,2\n" * 20, "no column to learn from.*same in all rows"),
        ("a,y\n" + ",1\n,2\n" * 20, "no column to learn from.*empty"),
        ("a,Y \n" + "5,1\n5,2\n" * 20, "Did you mean 'Y'"),
        ("a,y\n" + "".join(f"{i},name {i}\n" for i in range(40)), "text with many different values"),
        ("a,y\n" + "".join(f"{i},2020-01-{i % 28 + 1:02d}\n" for i in range(40)), "holds dates"),
        (b"PK\x03\x04 an excel file", "In Excel"),
        (b"a,y\n\x00\x01\x02\n" * 10, "not a text file"),
        (b"\x1f\x8b broken", "Is the file complete"),
        (b"PAR1 broken", "Is the file complete"),
        (b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03" + b"\xff" * 40, "Is the file complete"),
        ("a,y\n1,2\n".encode("utf-16")[:-1], "UTF-16"),
        ('a,y\n1,2\n"3,4\n' + "1,2\n" * 20, "double quote is opened in about line 3"),
        ("a,y\n" + "1,NA\n2,x\n3,None\n" * 20, "besides cells that are empty, or hold a mark such as NA"),
    ],
)
def test_what_cannot_be_used_is_explained(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        fit(written(tmp_path, text))


def test_a_separator_at_the_end_of_every_line_is_no_column(tmp_path: Path) -> None:
    text = good().to_csv(index=False, lineterminator=",\n").replace("y,\n", "y\n", 1)
    bundle = fit(written(tmp_path, text))
    assert bundle.encoder.inputs == ["a", "b"]
    pd.testing.assert_frame_equal(bundle.predict(tmp_path / "data.csv"), bundle.predict(good()), rtol=1e-4)


def test_a_line_with_too_many_fields_is_refused_at_prediction_too(tmp_path: Path) -> None:
    bundle = fit(good())
    path = written(tmp_path, "b,more,a\n1,x,2\n1,x,z,2\n")
    with pytest.raises(DataError, match="line 3 has 4 fields"):
        bundle.predict(path)


def test_paths_and_objects_that_are_no_tables(tmp_path: Path) -> None:
    good().to_csv(tmp_path / "houses.csv", index=False)
    with pytest.raises(DataError, match=r"Did you mean 'houses\.csv'"):
        fit(tmp_path / "house.csv")
    with pytest.raises(DataError, match="is a folder"):
        fit(tmp_path)
    with pytest.raises(DataError, match="expected the path of a file"):
        fit([1, 2, 3])
    with pytest.raises(DataError, match="no rows"):
        fit(good().iloc[:0])
    with pytest.raises(DataError, match="no columns"):
        fit(pd.DataFrame())
    double = good()
    double.columns = ["a", "a", "y"]
    with pytest.raises(DataError, match="more than one column named 'a'"):
        fit(double)


def test_a_misspelt_target_has_the_nearest_name() -> None:
    with pytest.raises(DataError, match="Did you mean 'price'"):
        fit(good().rename(columns={"y": "price"}), "prise")


def test_ten_rows_are_taken_with_a_warning() -> None:
    with pytest.warns(LapwingWarning, match="only 10 usable rows"):
        bundle = fit(good(10))
    assert bundle.summary.rows_used == {"train": 6, "calibration": 2, "test": 2}
    found = bundle.predict(good(10))
    assert np.isneginf(found["conformal_lower_90"]).all()
    assert np.isfinite(found["lower_90"]).all()
    assert bundle.summary.rows[1].conformal_90 is None


def test_ten_rows_of_three_classes() -> None:
    frame = good(10).assign(y=["u", "u", "u", "u", "v", "v", "v", "w", "w", "w"])
    with pytest.warns(LapwingWarning, match="only 10 usable rows"):
        bundle = fit(frame)
    assert bundle.classes == ("u", "v", "w")
    assert set(bundle.predict(frame)["prediction_set"]) == {"u | v | w"}


def test_missing_values_everywhere() -> None:
    random = np.random.default_rng(0)
    frame = good(200)
    holes = frame.mask(random.random(frame.shape) < 0.4).assign(empty=np.nan)
    bundle = fit(holes)
    assert bundle.encoder.inputs == ["a", "a is missing", "b", "b is missing"]
    assert any("'empty' is empty" in note for note in bundle.notes)
    assert any("no usable value of 'y'" in note for note in bundle.notes)
    found = bundle.predict(pd.DataFrame({"a": [np.nan] * 3, "b": [None] * 3}))
    assert np.isfinite(found["mean"]).all()
    with pytest.raises(DataError, match="empty in every row"):
        fit(frame.mask(np.ones(frame.shape, dtype=bool)))


def test_infinite_values_count_as_missing(tmp_path: Path) -> None:
    frame = good()
    frame.loc[3:5, "a"] = np.inf
    frame.loc[7, "y"] = -np.inf
    frame.loc[8, "b"] = 1e300
    frame.to_csv(tmp_path / "inf.csv", index=False)
    for source in (frame, tmp_path / "inf.csv"):
        bundle = fit(source)
        assert "a is missing" in bundle.encoder.inputs
        assert sum(bundle.summary.rows_used.values()) == 99
        assert any("infinite" in note for note in bundle.notes)
        assert np.isfinite(bundle.predict(source)[["mean", "sd"]]).all().all()


def test_a_column_of_text_is_left_out_and_said(tmp_path: Path) -> None:
    frame = good().assign(name=[f"Ms {i}, “Nr. {i}”;\n née Müller" for i in range(100)])
    frame.to_csv(tmp_path / "t.csv", index=False)
    for source in (frame, tmp_path / "t.csv"):
        bundle = fit(source)
        assert bundle.encoder.inputs == ["a", "b"]
        assert any("'name' holds text with many different values" in note for note in bundle.notes)
        assert len(bundle.predict(source)) == 100


def test_stray_words_among_numbers(tmp_path: Path) -> None:
    frame = good(300).round(3)
    text = frame.astype(str)
    text.loc[250, "a"] = "n.a. (broken)"
    text.loc[260, "y"] = "unknown"
    text.to_csv(tmp_path / "t.csv", index=False)
    for source in (text, tmp_path / "t.csv"):
        bundle = fit(source)
        assert [column.kind for column in bundle.encoder.columns] == ["number", "number"]
        assert any("1 values of 'a' are no numbers (such as 'n.a. (broken)')" in note for note in bundle.notes)
        assert sum(bundle.summary.rows_used.values()) == 299


def test_objects_of_mixed_types() -> None:
    frame = good().assign(mixed=[1, "x", 2.5, None, True] * 20, lists=[[1], [2, 3]] * 50)
    bundle = fit(frame)
    kinds = {column.name: column.kind for column in bundle.encoder.columns}
    assert kinds["mixed"] == "category"
    assert kinds["lists"] == "category"
    assert len(bundle.predict(frame)) == 100


def test_row_numbers_that_pandas_wrote_are_left_out(tmp_path: Path) -> None:
    good().to_csv(tmp_path / "t.csv")
    bundle = fit(tmp_path / "t.csv")
    assert bundle.encoder.inputs == ["a", "b"]
    assert any("has no name" in note for note in bundle.notes)


def test_unicode_names_and_quoted_separators(tmp_path: Path) -> None:
    frame = good().rename(columns={"a": 'größe, "außen"', "b": "価格", "y": "цена"})
    frame["stadt;ort"] = ["Köln; Mitte", "São Paulo, SP", "東京"] * 33 + ["Köln; Mitte"]
    for separator in (",", ";", "\t"):
        frame.to_csv(tmp_path / "t.csv", index=False, sep=separator)
        bundle = fit(tmp_path / "t.csv", "цена")
        assert bundle.encoder.inputs[:2] == ['größe, "außen"', "価格"]
        assert "stadt;ort=東京" in bundle.encoder.inputs
        pd.testing.assert_frame_equal(bundle.predict(frame), bundle.predict(tmp_path / "t.csv"), rtol=1e-4)


def test_a_class_with_one_row() -> None:
    frame = good().assign(y=["u", "v"] * 49 + ["w", "u"])
    bundle = fit(frame)
    assert bundle.classes == ("u", "v", "w")
    assert any("fewer than 5 rows" in note for note in bundle.notes)


def test_too_many_classes() -> None:
    frame = good(600).assign(y=[f"class {i % 150}" for i in range(600)])
    with pytest.raises(DataError, match="too many for classes"):
        fit(frame)
    with pytest.raises(DataError, match="too many for classes"):
        fit(good(600), task="classification")


def test_truth_values_as_a_target() -> None:
    frame = good().assign(y=[True, False] * 50)
    bundle = fit(frame)
    assert bundle.classes == ("False", "True")
    assert bundle.evaluate(frame).rows[0].accuracy is not None
    assert fit(frame, task="regression").task == "regression"


def test_new_kinds_of_values_at_prediction() -> None:
    bundle = fit(good().assign(c=["x", "y"] * 50))
    frame = good(4).assign(a=["1", "two", None, "inf"], c=["x", "new", None, 3])
    found = bundle.predict(frame)
    assert np.isfinite(found[["mean", "sd"]]).all().all()
    notes = " ".join(found.attrs["notes"])
    assert "values of 'a' cannot be read as a number" in notes
    assert "values of 'c' are new" in notes


def test_a_value_that_is_unknown_is_no_confident_average(tmp_path: Path) -> None:
    """a has the largest part in y, and was complete in training: without it, little is known of y."""
    frame = good().assign(y=lambda given: 3 * given["a"] + 0.1 * given["b"])
    bundle = fit_table(frame, "y", epochs=40, spec=SMALL, noise="constant")
    garbage = ["inf", -np.inf, "1e149", "nonsense", "", None, "1e90"]
    new = good(10).astype({"a": object})
    new.loc[:6, "a"] = garbage
    found = bundle.predict(new)
    assert found["ood"].tolist()[:7] == [True] * 7
    spread, unknown = 3 * frame["a"].std(), found.iloc[:6]
    assert unknown["sd_epistemic"].between(0.6 * spread, 1.6 * spread).all()
    assert (unknown["lower_90"] < frame["y"].quantile(0.2)).all()
    assert (unknown["upper_90"] > frame["y"].quantile(0.8)).all()
    pd.testing.assert_frame_equal(found.iloc[7:], bundle.predict(good(10).iloc[7:]))
    notes = " ".join(found.attrs["notes"])
    assert "4 values of 'a' cannot be read as a number: taken as unknown" in notes
    assert "2 values of 'a' are missing, which none were in training: unknown" in notes
    bundle.save(tmp_path / "m")
    pd.testing.assert_frame_equal(Bundle.load(tmp_path / "m").predict(new), found)
    figures = report_table(bundle, pd.concat([frame.astype({"a": object}), new]), tmp_path / "r.html")
    assert figures["rows"] == 110


def test_rows_that_score_alike_are_not_taken_for_those_held_out(tmp_path: Path) -> None:
    """In another order the split chooses other rows, of which these have the same inputs, targets and score."""
    frame = pd.DataFrame({"c": ["red", "green"] * 60, "y": ["hot", "cold"] * 60})
    bundle, page = fit(frame), tmp_path / "r.html"
    assert report_table(bundle, frame, page)["rows_are_test"]
    for seed in range(2):
        assert not report_table(bundle, frame.sample(frac=1, random_state=seed), page)["rows_are_test"]
        assert "held-out" not in page.read_text()
    bundle.save(tmp_path / "m")
    assert report_table(Bundle.load(tmp_path / "m"), frame, page)["rows_are_test"]


@pytest.mark.parametrize(("scale", "offset"), [(1e-90, 0.0), (1e90, 0.0), (1.0, 1e10)])
def test_whether_anything_was_learnt_does_not_hang_on_the_unit(scale: float, offset: float) -> None:
    frame = good()
    nothing = frame.assign(y=np.random.default_rng(1).normal(size=len(frame)))
    for given, learnt in ((frame, True), (nothing, False)):
        moved = given.assign(y=offset + scale * given["y"])
        bundle = fit_table(moved, "y", epochs=30, spec=SMALL, noise="constant")
        assert any("not shown to predict better" in note for note in bundle.notes) != learnt


def test_a_class_that_hangs_on_an_unknown_value_is_not_sure() -> None:
    frame = good().assign(y=lambda given: np.where(given["a"] > 0, "up", "down"))
    bundle = fit_table(frame, "y", epochs=40, spec=SMALL)
    new = frame.iloc[:20].astype({"a": object}).assign(a="?")
    found = bundle.predict(new)
    share = (frame["y"] == "up").mean()
    assert found["ood"].all()
    np.testing.assert_allclose(found["p_up"], share, atol=0.25)
    np.testing.assert_allclose(found["p_up"] + found["p_down"], 1)


def test_a_column_far_from_zero_is_learnt_from() -> None:
    frame = good()
    plain, moved = fit(frame), fit(frame.assign(a=1e12 + (frame["a"] * 1024).round() / 1024))
    assert len(moved.encoder.inputs) == len(plain.encoder.inputs)
    assert moved.summary.rows[1].rmse == pytest.approx(plain.summary.rows[1].rmse, rel=0.05)


def test_a_huge_offset_and_a_tiny_spread() -> None:
    frame = good()
    frame = frame.assign(a=1e9 + frame["a"], y=1e6 + 1e-3 * frame["y"])
    bundle = fit(frame)
    found = bundle.predict(frame)
    assert abs(found["mean"].mean() - 1e6) < 1
    assert np.isfinite(bundle.summary.rows[1].nll)


def test_differences_that_rounding_hides() -> None:
    frame = good()
    for y in (1e-300 * frame["y"], 1e16 + 4 * frame["y"].round()):
        with pytest.raises(DataError, match="lost in rounding"):
            fit(frame.assign(y=y), task="regression")


def test_importing_lapwing_imports_none_of_the_extras() -> None:
    code = "import sys, lapwing; assert not {'pandas', 'sklearn', 'matplotlib', 'jinja2'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# -- ways of writing numbers, dates and files -----------------------------------------------------------------------


def numbers(path: Path, column: str) -> list[float]:
    return as_numbers(pd.concat(open_table(path).chunks())[column]).tolist()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("d;a;y\n31.12.2020;1,5;2\n01.02.2021;-2,25;3\n", [1.5, -2.25]),  # a date has points; the decimals are commas
        ("a;y\n1.234,5;2\n-12;3\n1.000.000;3\n", [1234.5, -12, 1e6]),
        ("a;y\n1 234,5;2\n0,5;3\n", [1234.5, 0.5]),
        ("a;y\n1.234;2,5\n0.5;3\n", [1.234, 0.5]),  # 0.5 has a decimal point, so that 1.234 has one, too
        ('a,y\n"1,234.5",2\n999,3\n"-1,000,000",3\n', [1234.5, 999, -1e6]),
        ("a\ty\n1,234,567\t2\n1,234\t3\n", [1234567, 1234]),
        ('a,y\n1\'234.5,2\n1\u202f000,3\n"12,34",3\n', [1234.5, 1000, np.nan]),
        ("sep=;\na;y\n1,5;2\n", [1.5]),
        ("\ufeffsep=;\r\n;\r\n\r\na;y\r\n1,5;2\r\n", [1.5]),
        (",\n,\na,y\n1.5,2\n", [1.5]),
    ],
)
def test_numbers_as_they_are_written_elsewhere(tmp_path: Path, text: str, wanted: list[float]) -> None:
    np.testing.assert_array_equal(numbers(written(tmp_path, text), "a"), wanted)


def test_marks_of_thousands_are_noted() -> None:
    column = pd.Series(["1,234", "99", "12", "1,250.5"] * 5)
    kind = infer([pd.DataFrame({"a": column})])["a"]
    assert kind.name == "number"
    assert kind.note == "Each ',' in 'a' (such as '1,234') is taken as a mark of thousands."


def test_bytes_that_windows_does_not_know_are_replaced(tmp_path: Path) -> None:
    path = written(tmp_path, b"a,c\n1,\x81\xe4\n2,b\n")
    assert pd.concat(open_table(path).chunks())["c"].tolist() == ["\ufffdä", "b"]


def test_cells_may_hold_what_elsewhere_ends_a_line(tmp_path: Path) -> None:
    path = written(tmp_path, "a,c\u2028 d\n1,x\x0cy\n2,b\n")
    assert open_table(path).columns == ("a", "c\u2028 d")
    assert pd.concat(open_table(path).chunks())["c\u2028 d"].tolist() == ["x\x0cy", "b"]


def test_long_cells_are_no_error(tmp_path: Path) -> None:
    path = written(tmp_path, f'a,c\n1,"{"word " * 40_000}"\n2,b\n')
    assert len(pd.concat(open_table(path).chunks())) == 2


def test_a_date_that_stands_for_never() -> None:
    dates = pd.Series(["1970-01-02", "9999-12-31", None])
    np.testing.assert_array_equal(as_days(dates, "ISO8601"), [1, 2932896, np.nan])


def test_dates_that_only_pandas_3_can_read_are_counted_from_the_same_day() -> None:
    assert _far_day("9999-12-31", "ISO8601") == 2932896
    assert _far_day("31.12.9999", "%d.%m.%Y") == 2932896
    assert _far_day("1600-01-01T12:00", "ISO8601") == -135140 + 0.5
    assert np.isnan(_far_day("1970-01-02", "ISO8601"))  # near: pandas has read it if it can be read
    assert np.isnan(_far_day("never", "ISO8601"))


def test_dates_are_read_as_iso_too_and_else_the_form_is_said() -> None:
    dates = pd.Series(["02.01.1970", "1970-01-03", "1/4/1970"])
    np.testing.assert_array_equal(as_days(dates, "%d.%m.%Y"), [1, 2, np.nan])
    notes = Notes()
    Column("d", "date", "", "%d.%m.%Y", (0.0,) * 3, (1.0,) * 3, indicator=True).encode(dates, notes)
    assert notes.listed() == ["1 values of 'd' cannot be read as a date such as 31.12.2020: taken as unknown."]


def test_a_blank_line_of_a_single_column_is_a_row(tmp_path: Path) -> None:
    found = numbers(written(tmp_path, "\na\n1\n\n2\n"), "a")
    np.testing.assert_array_equal(found, [1, np.nan, 2])


def test_why_few_numbers_are_amounts() -> None:
    kind = infer([pd.DataFrame({"y": [1.0, 2.0, 3.5] * 9})])["y"]
    assert choose_task("y", kind) == ("regression", "Regression, because 'y' holds numbers that are not all whole.")


def test_what_is_no_file_on_disk_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for source in (tmp_path / "pipe", "-"):
        with pytest.raises(DataError, match="read several times"):
            open_table(source)


@pytest.mark.slow
def test_a_million_rows_are_read_in_bounded_memory(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    path = tmp_path / "big.csv"
    with path.open("w") as file:
        for part in range(50):
            frame = pd.DataFrame(random.normal(size=(20_000, 19)).round(5), columns=[f"x{i}" for i in range(19)])
            frame = frame.assign(c=random.choice(list("abcdef"), 20_000))
            frame = frame.assign(y=frame["x0"] - 2 * frame["x1"] + (frame["c"] == "a") + random.normal(size=20_000))
            frame.to_csv(file, index=False, header=part == 0)
    code = f"""
        import resource, torch
        torch.set_num_threads(1)
        from lapwing.tables.fit import fit_table
        from lapwing.tables.training import Spec
        from lapwing.tables.writing import write_predictions
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        bundle = fit_table({str(path)!r}, "y", epochs=1, spec=Spec(1, 1, width=4, depth=1))
        assert bundle.summary.rows_used == {{"train": 980_000, "calibration": 10_000, "test": 10_000}}
        write_predictions(bundle, {str(path)!r}, {str(tmp_path / "out.csv")!r})
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20)
    """
    out = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, capture_output=True, text=True)
    assert float(out.stdout) < 2
    with (tmp_path / "out.csv").open() as file:
        assert sum(1 for _ in file) == 1_000_001


def test_a_cell_of_gigabytes_is_refused_before_it_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lapwing.tables.dialect.LONGEST", 1 << 21)
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(b"a,b\n1," + b"x" * (5 << 20) + b"\n"))
    assert path.stat().st_size < 20_000
    with pytest.raises(DataError, match="a line of more than 2 MB"):
        open_table(path)
    path.write_bytes(gzip.compress(b"a,b\n" + b"1,2\n" * (1 << 20)))
    assert open_table(path).columns == ("a", "b")
