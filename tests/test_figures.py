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
import torch

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(not (ROOT / "experiments").is_dir(), reason="a distribution has no experiments")
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


def test_rerun_copies_what_a_good_run_wrote(tree: Path, tmp_path_factory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rerun = module("experiments/rerun.py", monkeypatch)
    (tree / "good.py").write_text(
        "import os\nfrom pathlib import Path\n"
        "Path('experiments/c00/results.json').write_text(os.environ['PYTHONPATH'])\n"
        "Path('experiments/c00/new.png').write_text('picture')\n"
    )
    (tree / "bad.py").write_text("open('experiments/common.py', 'w').write('half')\nraise SystemExit(3)\n")
    git(tree, "add", ".")
    git(tree, "commit", "--quiet", "-m", "scripts")
    into = tmp_path_factory.mktemp("into")
    assert rerun.rerun(["good.py"], tree, into)
    assert (into / "experiments/c00/results.json").read_text() == str(tree / "src")
    assert (into / "experiments/c00/new.png").read_text() == "picture"
    assert not rerun.rerun(["bad.py"], tree, into)
    assert not (into / "experiments/common.py").exists()
    assert rerun.written(tree) == []


def test_rerun_without_names_means_every_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rerun = module("experiments/rerun.py", monkeypatch)
    runs = [f"experiments/{name}/run.py" for name in ("c00_first", "e01_second")]
    for each in runs:
        (tmp_path / each).parent.mkdir(parents=True)
        (tmp_path / each).write_text("")
    assert rerun.scripts([], tmp_path) == [[each] for each in runs]
    assert rerun.scripts(["e01"], tmp_path) == [[runs[1]]]
    with pytest.raises(SystemExit, match="'d' is no experiment"):
        rerun.scripts(["d"], tmp_path)


# -- words and figures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", EXPERIMENTS, ids=lambda folder: folder.name)
def test_readme_has_the_figures_of_the_results(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = module("experiments/readme.py", monkeypatch)
    results = readme.stored(folder)
    assert results is None or not results["smoke"]
    expected = readme.rendered(folder, results)
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
    assert readme.stored(tmp_path) is None
    assert readme.rendered(tmp_path, None) == f"before\n{readme.START}{readme.NOT_RUN}{readme.END}\nafter\n"
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


@pytest.mark.parametrize(
    "claim",
    [
        "c12",
        "c13",
        "c14",
        "c15",
        "c17_cifar10",
        "c18",
        "c19",
        "c20",
        "c22",
        "c25",
        "c26",
        "c27",
        "c31",
        "c33",
        "c34",
        "c35",
        "c36",
        "c37",
        "c38",
        "e14_classes",
        "e14_noise",
    ],
)
def test_claims_that_depend_on_a_draw_have_five_seeds(claim: str) -> None:
    (folder,) = (each for each in EXPERIMENTS if each.name.startswith(claim))
    assert len(set(json.loads((folder / "config.json").read_text())["seeds"])) >= 5


def test_uci_in_words() -> None:
    """README.md says what the rows of uci.json say, and which splits the design was chosen on."""
    stored = json.loads((ROOT / "benchmarks/results/uci.json").read_text())
    found, rows = stored["summary"], stored["rows"]
    chosen = found["design_splits"]
    for name, part in (
        ("all", rows),
        ("design", [row for row in rows if row["split"] in chosen]),
        ("untouched", [row for row in rows if row["split"] not in chosen]),
    ):
        assert found[name]["splits"] == len(part)
        assert found[name]["better"] == sum(row["gain"] > 0 for row in part)
        worst = max(-row["gain"] / row["standard_error"] for row in part)
        assert found[name]["largest_loss_in_standard_errors"] == pytest.approx(worst)
    every, design, rest = found["all"], found["design"], found["untouched"]
    assert found["sets_with_mean_gain"] == {"all": 5, "untouched": 5}
    words = " ".join((ROOT / "README.md").read_text().split())
    first, last = chosen[0], chosen[-1]
    for sentence in (
        f"improve the likelihood of new rows on {every['better']} of {every['splits']} splits and in the mean on every "
        f"table, and nowhere harm it by more than {every['largest_loss_in_standard_errors']:.1f} standard errors",
        f"chosen on splits {first} to {last} (better on {design['better']} of {design['splits']})",
        f"improve it on {rest['better']} of {rest['splits']}, in the mean on every table, and harm it by at most "
        f"{rest['largest_loss_in_standard_errors']:.1f} standard errors",
    ):
        assert sentence in words


# -- benchmarks -------------------------------------------------------------------------------------------------------


def test_last_layer_is_compared_with_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    last_layer = module("benchmarks/last_layer.py", monkeypatch)
    monkeypatch.setattr(last_layer, "measured", lambda *arguments: (2.0, 2**30))
    assert last_layer.against_peer(peers=False) == []
    stored = json.loads((ROOT / "benchmarks/results/last_layer.json").read_text())
    assert {row["against"] for row in stored["rows"]} <= {"forward pass", "forward passes", "1 GB", "laplace-torch"}


def test_mixed_is_not_the_propagated_diagonal(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the network with a bottleneck; and exponents and their reading follow the rows."""
    resolution = module("benchmarks/resolution.py", monkeypatch)
    assert resolution.difference_of_mixed(8, 2) > 1e-3
    rows = {}
    for work, (_, sizes) in resolution.WORK.items():
        power = 4 if work in ("exact, at once", "kron, at once") else 3 if work in ("exact", "kron") else 2
        rows[work] = [{"size": size, "seconds": 1e-6 * size**power, "bytes": 100 * size**power} for size in sizes]
    lines = {line["work"]: line for line in resolution.summary(rows, 32)}
    assert lines["propagated"]["time_exponent"] == pytest.approx(1)
    assert lines["exact, at once"]["memory_exponent"] == pytest.approx(2)
    assert len(lines["exact, at once"]["sizes"]) >= 5
    words = " ".join(resolution.reading(list(lines.values()), 0.1))
    assert "memory: 1.50 in time" in words
    assert "in time exact and kron stay below it" in words


def test_inversion_lemma_gives_the_dense_solution(monkeypatch: pytest.MonkeyPatch) -> None:
    woodbury = module("benchmarks/woodbury.py", monkeypatch)
    assert woodbury.agreement(150) < 1e-12
    assert woodbury.slope([10, 100, 1000], [0.5, 5.0, 50.0]) == pytest.approx(1, rel=1e-5)


def test_the_transformer_of_the_benchmark_has_the_weights_of_gpt2_small(monkeypatch: pytest.MonkeyPatch) -> None:
    transformer = module("benchmarks/transformer.py", monkeypatch)
    with torch.device("meta"):
        model = transformer.Transformer(None, **transformer.SHAPES["gpt2"])
    assert sum(each.numel() for each in model.parameters()) == 124_439_808
    assert model.head.weight is model.table.weight
