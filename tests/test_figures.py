"""Figures that are committed: where they come from, and that what is written in words is what was measured."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENTS = sorted(path.parent for path in (ROOT / "experiments").glob("*/config.json"))


def module(path: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A script of the repository, imported without running it."""
    file = ROOT / path
    monkeypatch.syspath_prepend(str(file.parent))
    spec = importlib.util.spec_from_file_location(f"figures_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, loaded)
    spec.loader.exec_module(loaded)
    return loaded


def git(folder: Path, *arguments: str) -> None:
    name = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    subprocess.run(["git", "-C", str(folder), *name, *arguments], check=True, capture_output=True)


# -- what `clean` covers ----------------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with the parts that a run depends on, and its own lapwing on the path."""
    for name in ("src/lapwing/__init__.py", "experiments/common.py", "experiments/c00/config.json", ".gitignore"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("__pycache__/\n" if name == ".gitignore" else "")
    (tmp_path / "experiments/c00/results.json").write_text("{}")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "all")
    found = importlib.util.spec_from_file_location("lapwing", tmp_path / "src/lapwing/__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    return tmp_path


@pytest.mark.parametrize(
    "changed",
    [
        "experiments/c00/config.json",
        "experiments/common.py",
        "src/lapwing/__init__.py",
        "experiments/c00/another.py",
        "benchmarks/_common.py",
    ],
)
def test_any_change_of_the_tree_is_not_clean(changed: str, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    committed = module("experiments/provenance.py", monkeypatch).committed
    assert committed([], tree)["clean"]
    (tree / changed).parent.mkdir(exist_ok=True)
    (tree / changed).write_text("something else")
    found = committed(["experiments/c00/results.json"], tree)
    assert not found["clean"]
    assert found["changed"] == [changed]


def test_own_outputs_and_ignored_files_may_change(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    committed = module("experiments/provenance.py", monkeypatch).committed
    (tree / "experiments/c00/results.json").write_text("new")
    (tree / "experiments/c00/picture.png").write_text("new")
    (tree / "src/lapwing/__pycache__").mkdir()
    (tree / "src/lapwing/__pycache__/x.pyc").write_text("")
    outputs = ["experiments/c00/results.json", "experiments/c00/picture.png"]
    assert committed(outputs, tree)["clean"]
    assert committed(outputs[:1], tree)["changed"] == outputs[1:]


def test_a_library_from_another_place_is_not_clean(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    provenance = module("experiments/provenance.py", monkeypatch)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: importlib.util.spec_from_file_location(name, ROOT / "src/x.py")
    )
    assert not provenance.committed([], tree)["clean"]


# -- words and figures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", EXPERIMENTS, ids=lambda folder: folder.name)
def test_readme_has_the_figures_of_the_results(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = json.loads((folder / "results.json").read_text())
    assert not results["smoke"]
    expected = module("experiments/readme.py", monkeypatch).rendered(folder, results)
    assert (folder / "README.md").read_text() == expected, "run: python experiments/readme.py"


def results_of(value: float, seeds: list[bool]) -> dict[str, Any]:
    return {
        "smoke": False,
        "config": {"seeds": [0, 1]},
        "held": {"a": all(seeds), "b": True},
        "held_on_seeds": {"a": seeds},
        "ours": {"x": [{"y": value}, {"median": 2.0, "min": 1.0, "max": 4.0, "mean": 2.0, "deviation": 1.0}]},
    }


def test_figures_follow_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = module("experiments/readme.py", monkeypatch)
    (tmp_path / "README.md").write_text(f"before\n{readme.START}old\n{readme.END}\nafter\n")
    (tmp_path / "config.json").write_text('{"seeds": [0, 1], "smoke": {"seeds": [0]}}')
    (tmp_path / "figures.md").write_text("{ours/x/#0/y:.2f}, {ours/x/#1:.1f}\n{verdict}\n{checks}\n")
    wanted = "0.25, 2.0 (1.0 to 4.0)\n**Held in part**: 1 of 2 checks\n- **not held** (1 of 2 seeds): a\n- held: b\n"
    found = readme.rendered(tmp_path, results_of(0.25, [True, False]))
    assert found == f"before\n{readme.START}{wanted}{readme.END}\nafter\n"
    assert "1 of 2 checks" not in readme.rendered(tmp_path, results_of(0.25, [True, True]))
    other = results_of(0.25, [True, True]) | {"config": {"seeds": [0]}}
    assert readme.STALE in readme.rendered(tmp_path, other)
    (tmp_path / "figures.md").write_text("{ours/z:.2f}\n")
    with pytest.raises(KeyError, match="has no 'ours/z'"):
        readme.rendered(tmp_path, results_of(0.25, [True, True]))


def test_spread_over_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    common = module("experiments/common.py", monkeypatch)
    found = common.spread([{"a": 1.0, "b": [1, 2], "c": 7, "d": "x"}, {"a": 4.0, "b": [1], "c": 7, "d": "x"}])
    assert found["a"] == {"median": 2.5, "mean": 2.5, "deviation": pytest.approx(4.5**0.5, rel=1e-5)} | {
        "min": 1.0,
        "max": 4.0,
    }
    assert found["b"] is None
    assert (found["c"], found["d"]) == (7, "x")


@pytest.mark.parametrize("claim", ["c12", "c13", "c14"])
def test_claims_that_depend_on_a_draw_have_five_seeds(claim: str) -> None:
    (folder,) = (each for each in EXPERIMENTS if each.name.startswith(claim))
    assert len(set(json.loads((folder / "config.json").read_text())["seeds"])) >= 5
