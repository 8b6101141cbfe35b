"""The demonstration: both data sets from table to report, in a minute at most on two cores."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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
    arguments = ["demo", "--out", str(tmp_path / "demo"), "--picture", str(tmp_path / "demo.png"), "--json", "--debug"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
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


@pytest.mark.slow
def test_the_demonstration_takes_a_minute(tmp_path: Path) -> None:
    """As users run it, without the check of shapes, which alone takes longer than the rest."""
    arguments = ["demo", "--out", str(tmp_path), "--picture", str(tmp_path / "demo.png")]
    program = (
        "from time import process_time; from lapwing.cli.commands import app; "
        f"app({arguments!r}, standalone_mode=False); print(process_time())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert float(done.stdout.split()[-1]) < 75  # of one core; 46 on a quiet machine
