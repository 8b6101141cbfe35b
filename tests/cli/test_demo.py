"""The demonstration: both data sets from table to report, in a minute at most on two cores."""

from __future__ import annotations

import json
from pathlib import Path
from time import process_time

import jaxtyping
import pytest
import torch
from typer.testing import CliRunner

from lapwing.cli import demo
from lapwing.cli.commands import app


def test_the_tables_are_those_of_scikit_learn() -> None:
    digits, diabetes = demo.tables()
    assert digits.shape == (1797, 65)
    assert diabetes.shape == (442, 11)
    turned = demo._turned(digits)
    assert list(turned.columns) == list(digits.columns[:-1])
    upright, quarter = (torch.tensor(each.to_numpy()[7, :64]).reshape(8, 8) for each in (digits, turned))
    assert torch.equal(upright.rot90(1), quarter)


@pytest.mark.slow
def test_the_demonstration_runs_and_says_where_things_are(tmp_path: Path) -> None:
    jaxtyping.config.update("jaxtyping_disable", True)  # the time of users, who do not check shapes
    start = process_time()
    arguments = ["demo", "--out", str(tmp_path / "demo"), "--picture", str(tmp_path / "demo.png"), "--json", "--debug"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    seconds = process_time() - start
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    found = json.loads(result.stdout)
    assert [each["title"] for each in found["demos"]] == ["Handwritten digits", "Progress of diabetes after a year"]
    for each in found["demos"]:
        assert Path(each["model"]).is_file()
        assert Path(each["report"]).read_text(encoding="utf-8").count("<img") == 6
        network, laplace = each["summary"]["rows"]
        assert laplace["nll"] < network["nll"] + 0.02
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert seconds < 90  # of one core
