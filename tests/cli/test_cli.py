"""The command line: what people and machines get on stdout, clean errors on stderr, and exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import lapwing
from lapwing.cli import console
from lapwing.cli.commands import app
from lapwing.cli.console import Stages
from lapwing.tables.bundle import Bundle

SMALL = ["--epochs", "30", "--width", "8", "--depth", "1"]


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def ok(*arguments: str | Path) -> Any:
    result = run(*arguments)
    assert result.exit_code == 0, result.stderr
    return result


def as_json(result: Any) -> Any:
    assert result.stderr == ""
    return json.loads(result.stdout)


def amounts(n: int, seed: int) -> pd.DataFrame:
    random = np.random.default_rng(seed)
    frame = pd.DataFrame({"size": random.normal(80, 20, n), "town": random.choice(["Ulm", "Graz", "Basel"], n)})
    frame["price"] = 3 * frame["size"] + 40 * (frame["town"] == "Basel") + random.normal(0, 10, n)
    return frame


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tables and models, fitted once."""
    folder = tmp_path_factory.mktemp("cli")
    amounts(200, 0).to_csv(folder / "houses.csv", index=False)
    amounts(12, 1).drop(columns="price").to_csv(folder / "new.csv", index=False)
    flats = amounts(200, 2)
    flats.assign(dear=flats["price"] > flats["price"].median()).drop(columns="price").to_csv(
        folder / "flats.csv", index=False
    )
    ok("fit", folder / "houses.csv", "--target", "price", "--out", folder / "houses.lapwing", *SMALL)
    ok("fit", folder / "flats.csv", "--target", "dear", "--out", folder / "flats.lapwing", "--seed", "3", *SMALL)
    return folder


# -- fit ---------------------------------------------------------------------------------------------------------------


def test_fit_prints_a_table_and_names_the_model_after_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = ok("fit", folder / "houses.csv", "--target", "price", *SMALL).stdout
    assert "Regression of 'price': 140 rows to learn from, 30 to calibrate, 30 to test." in text
    for line in ("MAP", "Laplace", "Negative log-likelihood", "Root mean squared error", "ECE", "Coverage of the 95%"):
        assert line in text
    assert "Model: houses.lapwing" in text
    assert (tmp_path / "houses.lapwing").is_file()


def test_fit_for_machines(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "m.lapwing"
    arguments = ("fit", folder / "flats.csv", "--target", "dear", "--out", out, *SMALL, "--json")
    found = as_json(ok(*arguments, "--seed", "3"))
    assert found["task"] == "classification"
    assert found["model"] == str(out)
    assert [row["method"] for row in found["summary"]["rows"]] == ["MAP", "MAP, scaled", "Laplace"]
    assert found["seconds"] > 0
    before = as_json(ok("inspect", folder / "flats.lapwing", "--json"))  # of the same table and seed
    scores = [[{**row, "seconds": 0} for row in each["summary"]["rows"]] for each in (found, before)]
    assert scores[0] == scores[1]
    other = as_json(ok(*arguments, "--seed", "1"))
    assert other["summary"]["rows"][0]["nll"] != found["summary"]["rows"][0]["nll"]


# -- predict -----------------------------------------------------------------------------------------------------------


def test_predict_writes_a_row_for_each_row(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.csv"
    text = ok("predict", folder / "houses.lapwing", folder / "new.csv", "--out", out).stdout
    assert "12 rows predicted" in text
    assert "conformal interval" in text
    assert "flagged as out of distribution" in text
    found = pd.read_csv(out)
    assert len(found) == 12
    assert {"mean", "sd", "sd_epistemic", "sd_noise", "lower_90", "conformal_upper_90", "ood"} <= set(found.columns)
    np.testing.assert_allclose(found["sd"] ** 2, found["sd_epistemic"] ** 2 + found["sd_noise"] ** 2, rtol=1e-6)


def test_predict_for_machines_and_into_parquet(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.parquet"
    found = as_json(
        ok("predict", folder / "flats.lapwing", folder / "new.csv", "--out", out, "--level", "0.8", "--json")
    )
    assert found["rows"] == 12
    assert found["predictions"] == str(out)
    assert found["threshold"] > 0
    assert found["flagged"] == int(pd.read_parquet(out)["ood"].sum())
    assert list(pd.read_parquet(out)["prediction"].unique()) != []


def test_predict_says_what_is_new_and_flags_what_is_far(folder: Path, tmp_path: Path) -> None:
    frame = amounts(5, 3).drop(columns="price")
    frame.loc[0, "town"], frame.loc[1, "size"] = "Vaduz", 1e6
    frame.to_csv(tmp_path / "new.csv", index=False)
    out = tmp_path / "p.csv"
    found = as_json(ok("predict", folder / "houses.lapwing", tmp_path / "new.csv", "--out", out, "--json"))
    assert any("Vaduz" in note for note in found["notes"])
    assert pd.read_csv(out)["ood"][1]


# -- report ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_report_looks_at_the_rows_that_fit_held_out(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.html"
    result = ok("report", folder / "houses.lapwing", folder / "houses.csv", "--out", out)
    assert "30 rows (the rows that the fit held out to test)" in result.stdout
    assert f"Report: {out}" in result.stdout
    found = as_json(ok("report", folder / "houses.lapwing", folder / "houses.csv", "--out", out, "--json"))["figures"]
    fitted = found["fit"]["rows"][1]
    measured = {row["measure"]: row["laplace"] for row in found["summary"]}
    assert measured["Negative log-likelihood"] == pytest.approx(fitted["nll"], rel=1e-5)
    assert measured["Root mean squared error"] == pytest.approx(fitted["rmse"], rel=1e-5)
    assert measured["Coverage of 90% intervals"] == fitted["coverage_90"]
    at = found["coverage"]["levels"].index(0.9)
    assert found["coverage"]["conformal"]["covered"][at] == fitted["conformal_90"]
    table = pd.read_csv(folder / "houses.csv")
    row = found["uncertain"][0]
    assert row["target"] == pytest.approx(table["price"][row["row"]], rel=1e-6)
    assert row["columns"][1] == table["town"][row["row"]]
    assert found["columns"] == ["size", "town"]


@pytest.mark.slow
def test_report_of_other_rows_looks_at_all(folder: Path, tmp_path: Path) -> None:
    amounts(200, 9).to_csv(tmp_path / "other.csv", index=False)
    out = tmp_path / "r.html"
    assert (
        "200 rows (rows that may have been used for training)"
        in ok("report", folder / "houses.lapwing", tmp_path / "other.csv", "--out", out).stdout
    )
    assert "would be too good" in out.read_text()


def test_report_of_classes_with_unfamiliar_rows(folder: Path, tmp_path: Path) -> None:
    far = amounts(20, 4).drop(columns="price")
    far["size"] += 1000
    far.to_csv(tmp_path / "far.csv", index=False)
    out = tmp_path / "r.html"
    arguments = (
        "report",
        folder / "flats.lapwing",
        folder / "flats.csv",
        "--out",
        out,
        "--unfamiliar",
        tmp_path / "far.csv",
    )
    found = as_json(ok(*arguments, "--title", "Flats", "--json"))["figures"]
    assert found["unfamiliar"]["count"] == 20
    assert found["classes"] == ["False", "True"]
    assert "<h1>Flats</h1>" in out.read_text()
    # fitted with another seed than 0, which the model knows
    assert found["rows_are_test"]
    assert found["summary"][0]["laplace"] == pytest.approx(found["fit"]["rows"][-1]["nll"], rel=1e-5)
    assert "On held-out rows" in out.read_text()
    other = pd.read_csv(folder / "flats.csv").iloc[5:]
    other.to_csv(tmp_path / "other.csv", index=False)
    text = ok("report", folder / "flats.lapwing", tmp_path / "other.csv", "--out", out).stdout
    assert "195 rows (rows that may have been used for training)" in text
    for said in (text, out.read_text()):
        assert "held-out" not in said
    assert "On rows that may have been used for training" in out.read_text()


# -- inspect, version --------------------------------------------------------------------------------------------------


def test_inspect(folder: Path) -> None:
    text = ok("inspect", folder / "houses.lapwing").stdout
    for words in ("regression of 'price'", "2 used (1 number, 1 category)", "log evidence", "Negative log-likelihood"):
        assert words in text
    found = as_json(ok("inspect", folder / "flats.lapwing", "--json"))
    assert found["task"] == "classification"
    assert found["classes"] == ["False", "True"]
    assert [column["name"] for column in found["columns"]] == ["size", "town"]
    assert found["effective_parameters"] <= found["network"]["parameters"]


def test_inspect_a_posterior_of_ones_own(tmp_path: Path) -> None:
    la = lapwing.attach(nn.Linear(2, 1), [(torch.randn(9, 2), torch.randn(9, 1))], "regression")
    la.save(tmp_path / "la.lapwing")
    assert "FullLaplace of a Linear" in ok("inspect", tmp_path / "la.lapwing").stdout
    assert as_json(ok("inspect", tmp_path / "la.lapwing", "--json"))["entries"] == {"weight": [1, 2], "bias": [1]}
    result = run("predict", tmp_path / "la.lapwing", tmp_path / "x.csv")
    assert result.exit_code == 2
    assert "lapwing.load(path, model)" in result.stderr


def test_version_and_help() -> None:
    assert ok("--version").stdout.strip() == f"lapwing {lapwing.__version__}"
    for command in ("fit", "predict", "report", "inspect", "demo"):
        assert "--json" in ok(command, "--help").stdout


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "arguments", "reason"),
    [
        (None, [], "there is no file"),
        ("", [], "is empty"),
        ("a,y\n", [], "no rows"),
        ("a,y\n1,2\n2,3\n3,4\n", [], "only 3 rows"),
        ("a,y\n" + "1,5\n" * 40, [], "same value"),
        ("a,y\n" + "".join(f"{i},{i * i}\n" for i in range(40)), ["--target", "z"], "no column 'z'"),
        ("a,y\n" + "".join(f"{i},{i * i}\n" for i in range(40)), ["--out", "no/such/folder/m"], "there is no folder"),
        ("a,y\n" + "".join(f"{i},{i * i}\n" for i in range(40)), ["--seed", "-1"], "the seed is -1"),
        ("a,y\n" + "".join(f"{i},{i * i}\n" for i in range(40)), ["--seed", f"{2**64}"], "the seed is 184467"),
        ("a,y\n1,2\n", ["--out", "-"], "no name of a file"),
        ("a,y\n" + "".join(f"{i},word{i}\n" for i in range(40)), ["--task", "regression"], "Expected amounts"),
    ],
)
def test_bad_input_is_one_clean_message(
    tmp_path: Path, text: str | None, arguments: Sequence[str], reason: str
) -> None:
    path = tmp_path / "data.csv"
    if text is not None:
        path.write_text(text)
    out = [] if "--out" in arguments else ["--out", str(tmp_path / "m")]
    target = [] if "--target" in arguments else ["--target", "y"]
    result = run("fit", path, *target, *arguments, *out, "--json")
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ")
    assert reason in result.stderr
    assert json.loads(result.stdout) == {"error": result.stderr.strip().removeprefix("Error: "), "exit_code": 2}
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "m").exists()


def test_files_that_are_no_models_are_refused(folder: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "m.lapwing"
    damaged.write_bytes((folder / "houses.lapwing").read_bytes()[:-10])
    for path in (folder / "houses.csv", damaged, tmp_path / "none.lapwing"):
        for command in (["inspect", path], ["predict", path, folder / "new.csv", "--out", tmp_path / "p.csv"]):
            result = run(*command)
            assert result.exit_code == 2, result.stderr
            assert result.stderr.startswith("Error: ")
            assert "Traceback" not in result.stderr
    assert not (tmp_path / "p.csv").exists()


def test_a_report_needs_targets_and_prediction_the_columns(folder: Path, tmp_path: Path) -> None:
    result = run("report", folder / "houses.lapwing", folder / "new.csv", "--out", tmp_path / "r.html")
    assert result.exit_code == 2
    assert "'price'" in result.stderr
    pd.DataFrame({"size": [1.0]}).to_csv(tmp_path / "less.csv", index=False)
    result = run("predict", folder / "houses.lapwing", tmp_path / "less.csv", "--out", tmp_path / "p.csv")
    assert result.exit_code == 2
    assert "'town'" in result.stderr
    assert list(tmp_path.iterdir()) == [tmp_path / "less.csv"]


def test_nothing_that_is_read_is_written_over(folder: Path, tmp_path: Path) -> None:
    model, data = tmp_path / "m.lapwing", tmp_path / "new.csv"
    model.write_bytes((folder / "houses.lapwing").read_bytes())
    data.write_bytes((folder / "new.csv").read_bytes())
    (tmp_path / "link.csv").symlink_to(data)
    before = data.read_bytes(), model.read_bytes()
    for arguments in (
        ["fit", data, "--target", "size", "--out", data],
        ["predict", model, data, "--out", data],
        ["predict", model, data, "--out", model],
        ["predict", model, tmp_path / "link.csv", "--out", data],
        ["report", model, folder / "houses.csv", "--unfamiliar", data, "--out", data],
    ):
        result = run(*arguments)
        assert result.exit_code == 2
        assert "would be written over" in result.stderr
    assert before == (data.read_bytes(), model.read_bytes())


def test_where_nothing_can_be_written(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    result = run("predict", folder / "houses.lapwing", folder / "new.csv", "--out", tmp_path / "pipe")
    assert (result.exit_code, "device or a pipe" in result.stderr) == (2, True)
    monkeypatch.setattr("os.access", lambda path, mode: mode != os.W_OK)
    result = run("predict", folder / "houses.lapwing", folder / "new.csv", "--out", tmp_path / "p.csv")
    assert (result.exit_code, "write-protected" in result.stderr) == (2, True)
    assert run("fit", "/", "--target", "y").exit_code == 2


def test_predictions_have_the_format_of_their_name(folder: Path, tmp_path: Path) -> None:
    arguments = ("predict", folder / "houses.lapwing", folder / "new.csv", "--out")
    for name in ("p.csv", "p.csv.gz", "p.tsv", "p.parquet"):
        ok(*arguments, tmp_path / name)
    plain = pd.read_csv(tmp_path / "p.csv")
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "p.csv.gz", compression="gzip"), plain)
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "p.tsv", sep="\t"), plain)
    result = run(*arguments, tmp_path / "p.xlsx")
    assert result.exit_code == 2
    assert "Excel opens CSV" in result.stderr


def test_levels_between_whole_percents_are_not_rounded(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.csv"
    text = ok("predict", folder / "houses.lapwing", folder / "new.csv", "--out", out, "--level", "0.995").stdout
    assert "a conformal interval at 99.5% needs 199" in text
    assert "conformal_upper_99.5" in pd.read_csv(out).columns


def test_ctrl_c_is_exit_code_130(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lapwing.cli.inspecting.inspected", stopped)
    result = run("inspect", folder / "houses.lapwing", "--json")
    assert result.exit_code == 130
    assert result.stderr == "Error: stopped before the end; no unfinished file is left.\n"
    assert json.loads(result.stdout)["exit_code"] == 130


def test_the_next_command_can_be_pasted(folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "my houses.csv"
    data.write_bytes((folder / "houses.csv").read_bytes())
    out = tmp_path / "my model.lapwing"
    text = ok("fit", data, "--target", "price", "--out", out, "--epochs", "2", "--width", "4", "--depth", "1").stdout
    assert f"lapwing report '{out}' '{data}'" in text


def test_one_target_at_a_time(folder: Path) -> None:
    result = run("fit", folder / "houses.csv", "--target", "price", "--target", "size")
    assert result.exit_code == 2
    assert "--target was given 2 times ('price', 'size'); expected one" in result.stderr


@pytest.mark.filterwarnings("ignore::lapwing.errors.LapwingWarning")
def test_labels_come_back_as_they_were_given_and_none_reaches_the_terminal_as_an_order(tmp_path: Path) -> None:
    labels = ["=cmd|' /C calc'!A0", "Yes \x1b[31mred", "02134", "2.0"]
    frame = pd.DataFrame({"a": np.arange(80.0) % 4, "b": np.arange(80.0), "y": [labels[i % 4] for i in range(80)]})
    data, model, out = (tmp_path / name for name in ("t.csv", "t.lapwing", "p.csv"))
    frame.to_csv(data, index=False)
    text = ok("fit", data, "--target", "y", "--out", model, *SMALL, "--epochs", "60").stdout
    text += ok("inspect", model).stdout
    said = ok("predict", model, data, "--out", out, "--raw").stdout
    raw = pd.read_csv(out, dtype=str)["prediction"]
    assert (raw == frame["y"]).mean() > 0.9
    assert "formulas" not in said
    text += ok("predict", model, data, "--out", out).stdout
    escaped = pd.read_csv(out, dtype=str)
    assert set(escaped["prediction"]) == {"'" + labels[0], *labels[1:]}
    assert not escaped["prediction_set"].str.startswith("=").any()
    assert "taken for formulas" in text.replace("take for", "taken for")
    text += said + ok("report", model, data, "--out", tmp_path / "r.html").stdout
    assert "\x1b" not in text
    assert "\\x1b[31mred" in text
    result = run("fit", data, "--target", "\x1b[2J")
    assert (result.exit_code, "\x1b" in result.stderr) == (2, False)


@pytest.mark.filterwarnings("ignore::lapwing.errors.LapwingWarning")
def test_a_table_with_nothing_to_learn_says_so(folder: Path, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    pd.DataFrame(random.normal(size=(12, 3)), columns=["a", "b", "y"]).to_csv(tmp_path / "t.csv", index=False)
    text = ok("fit", tmp_path / "t.csv", "--target", "y", "--out", tmp_path / "m", "--epochs", "5").stdout
    assert "not shown to predict better" in text.replace("\n", " ")
    for name in ("houses", "flats"):
        assert "not shown to predict better" not in ok("inspect", folder / f"{name}.lapwing").stdout


def test_ctrl_c_while_importing_leaves_no_traceback() -> None:
    code = (
        "import os, threading, lapwing_command as command; "
        "threading.Timer(0.3, os.kill, (os.getpid(), 2)).start(); command.main()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 130
    assert result.stderr == "Error: stopped before the end; no unfinished file is left.\n"


def test_a_defect_is_said_to_be_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path) -> None:
        raise RuntimeError("a defect [bold]of ours[/bold]")

    monkeypatch.setattr("lapwing.cli.inspecting.inspected", broken)
    result = run("inspect", folder / "houses.lapwing")
    assert result.exit_code == 1
    assert (
        result.stderr == "Error: RuntimeError: a defect [bold]of ours[/bold]. Run it again with --debug to see where.\n"
    )
    result = run("inspect", folder / "houses.lapwing", "--debug")
    assert result.exit_code == 1
    assert "Traceback" in result.stderr


@pytest.mark.slow
def test_exit_codes_of_the_process(folder: Path, tmp_path: Path) -> None:
    def code(*arguments: str | Path) -> tuple[int, str, str]:
        command = [sys.executable, "-m", "lapwing.cli.commands", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        return done.returncode, done.stdout, done.stderr

    assert code("inspect", folder / "houses.lapwing", "--json")[0] == 0
    status, out, error = code("inspect", tmp_path / "none")
    assert (status, out) == (2, "")
    assert error.startswith("Error: ")
    assert error.count("\n") == 1
    assert code("fit", folder / "houses.csv")[0] == 2  # no target: an error of usage


def test_small_tables_take_one_thread_and_give_it_back() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with console.one_thread():
            assert torch.get_num_threads() == 1
        with console.one_thread(False):
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# -- progress ----------------------------------------------------------------------------------------------------------


def test_bars_are_for_terminals_and_long_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Stages() as stages:
        stages("off a terminal", 0.5)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with Stages() as stages:
        stages("within a second", 0.5)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(console, "DELAY", 0.0)
    with Stages() as stages:
        stages("training", 0.25)
        stages("calibrating", 0.5)
    captured = capsys.readouterr()
    assert "calibrating" in captured.err
    assert captured.out == ""
    with Stages(quiet=True) as stages:
        stages("for machines", 0.5)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("length", [240, 400])
def test_a_name_that_no_file_can_have_is_found_before_the_fit(tmp_path: Path, length: int) -> None:
    data = tmp_path / "d.csv"
    data.write_text("a,b\n1,2\n")
    for command in (("fit", data, "--target", "b"), ("predict", data, data), ("report", data, data)):
        found = run(*command, "--out", tmp_path / ("x" * length))
        assert found.exit_code
        assert "too long for the file system" in " ".join(found.output.split())
    assert [each.name for each in tmp_path.iterdir()] == ["d.csv"]


def test_the_options_of_fit_reach_the_model(folder: Path, tmp_path: Path) -> None:
    network = ["--network", "resnet", "--width", "6", "--depth", "2", "--epochs", "2", "--noise", "varying"]
    ok("fit", folder / "houses.csv", "--target", "price", "--out", tmp_path / "a", *network, "--seed", "5")
    bundle = Bundle.load(tmp_path / "a")
    assert (bundle.spec.kind, bundle.spec.width, bundle.spec.depth) == ("resnet", 6, 2)
    assert (bundle.spec.varying, bundle.seed) == (True, 5)
    (tmp_path / "t.csv").write_text("a,y\n" + "".join(f"{i},{i % 3}\n" for i in range(60)))
    as_amounts = ["--task", "regression", "--noise", "constant", "--epochs", "1", "--width", "2"]
    ok("fit", tmp_path / "t.csv", "--target", "y", *as_amounts, "--out", tmp_path / "b")
    other = Bundle.load(tmp_path / "b")
    assert (other.task, other.spec.varying, other.spec.width, other.spec.kind) == ("regression", False, 2, "mlp")
