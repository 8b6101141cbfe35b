"""Imports inside `lapwing` point one way: a module may import what is listed above it in `LAYERS`, and itself.

Between the files of one unit there is no cycle either, and no name of a package is both a module and something else.

The imports are read with `ast`, never executed, so those inside functions and under `TYPE_CHECKING` count too:
a cycle that is hidden from the interpreter is still a cycle for the reader.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

PACKAGE = "lapwing"
SOURCE = Path(__file__).parents[1] / "src" / PACKAGE

# From the bottom up. Units on one line do not know each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("params", "metrics"),
    ("linalg", "distributions"),
    ("likelihoods", "tangent", "priors"),
    ("tape",),
    ("estimate",),
    ("posterior",),
    ("predictive", "subnetwork", "directions"),
    ("evidence",),
    ("serialize",),
    ("training", "curvature"),
    ("laplace",),
    ("utils", "tables"),
    ("reporting",),
    ("cli",),
)
RANK = {unit: rank for rank, layer in enumerate(LAYERS) for unit in layer}
TOP = LAYERS[-1][0]
# `metrics` is a leaf: plain functions of predictions and targets, which anyone above may use.
ONLY = {"metrics": {"errors"}}
# Folders of the repository that use the library, and that the library therefore never uses.
OUTSIDE = {"tests", "experiments", "benchmarks"}
# The package itself, as seen by `import lapwing` or `from lapwing import Laplace`.
ROOT = ""


def unit_of(path: Path, source: Path) -> str:
    """The unit a file belongs to: `linalg` for `linalg/dense.py`, `ROOT` for the package's own `__init__.py`."""
    first = path.relative_to(source).parts[0]
    return ROOT if first == "__init__.py" else first.removesuffix(".py")


def units_under(source: Path) -> set[str]:
    return {unit_of(path, source) for path in source.rglob("*.py")} - {ROOT}


def imported_modules(path: Path, source: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of all that a file imports; `from m import n` gives `m.n`."""
    here = (source.name, *path.relative_to(source).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            # One leading dot is the package that holds the file, each further dot the one around it.
            base = list(here[: len(here) - node.level + 1]) if node.level else []
            base += node.module.split(".") if node.module else []
            for alias in node.names:
                yield node.lineno, ".".join([*base, alias.name])


def target_unit(dotted: str, package: str, units: set[str]) -> str | None:
    """The unit that a dotted name points to, `ROOT` for the package's own names, None outside the package."""
    first, *rest = dotted.split(".")
    if first != package:
        return None
    return rest[0] if rest and (rest[0] in units or rest[0] in RANK) else ROOT


def wrong_arrow(importer: str, imported: str) -> str | None:
    """Why one unit may not import another; None if it may."""
    if importer in (ROOT, imported):
        return None
    if imported == ROOT:
        return None if importer == TOP else "takes a name from the package, not from the module that defines it"
    if importer in ONLY and imported not in ONLY[importer]:
        return f"may import only {', '.join(sorted(ONLY[importer]))}"
    if RANK[imported] == RANK[importer]:
        return "is a sibling, and siblings do not know each other"
    if RANK[imported] > RANK[importer]:
        return "is above it"
    return None


def violations(source: Path) -> list[str]:
    """Every wrong arrow in a tree, and every unit that has no layer, each as one readable line."""
    units = units_under(source)
    found = [f"{unit}: in no layer; place it in LAYERS of tests/test_imports.py" for unit in sorted(units - set(RANK))]
    for path in sorted(source.rglob("*.py")):
        importer = unit_of(path, source)
        for line, dotted in imported_modules(path, source):
            where = f"{path.relative_to(source.parent).as_posix()}:{line}: {importer or source.name} imports {dotted}"
            if dotted.split(".")[0] in OUTSIDE:
                found.append(f"{where}, which is outside the library")
                continue
            imported = target_unit(dotted, source.name, units)
            # A unit without a layer is reported once above, not once per import.
            if imported is None or not {importer, imported} <= {*RANK, ROOT}:
                continue
            if reason := wrong_arrow(importer, imported):
                found.append(f"{where}: {imported or source.name} {reason}")
    return found


def modules_under(source: Path) -> dict[str, Path]:
    """Every module by its dotted name; a package by its own, for its `__init__.py`."""
    found = {}
    for path in sorted(source.rglob("*.py")):
        parts = [source.name, *path.relative_to(source).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def arrows(source: Path) -> dict[str, set[str]]:
    """For every module the modules that it imports; a name from a package counts as the package."""
    modules = modules_under(source)
    found: dict[str, set[str]] = {}
    for name, path in modules.items():
        targets = set()
        for _, dotted in imported_modules(path, source):
            longest = dotted if dotted in modules else dotted.rpartition(".")[0]
            if longest in modules:
                targets.add(longest)
        found[name] = targets - {name}
    return found


def cycles(source: Path) -> list[str]:
    """One cycle of imports for every module that is first in one, as a readable line."""
    graph, found, done = arrows(source), [], set()

    def walk(name: str, trail: list[str]) -> None:
        if name in trail:
            found.append(" imports ".join([*trail[trail.index(name) :], name]))
        elif name not in done:
            for target in sorted(graph[name]):
                walk(target, [*trail, name])
            done.add(name)

    for name in sorted(graph):
        walk(name, [])
    return found


def test_no_file_imports_itself_through_others() -> None:
    found = cycles(SOURCE)
    assert not found, "\n" + "\n".join(found)


def test_a_planted_cycle_between_files_is_caught(tmp_path: Path) -> None:
    source = plant(
        tmp_path,
        {
            "linalg/__init__.py": "",
            "linalg/a.py": "from lapwing.linalg.b import x\n",
            "linalg/b.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from lapwing.linalg import c\n",
            "linalg/c.py": "def late():\n    from lapwing.linalg.a import y\n",
        },
    )
    assert cycles(source) == [
        "lapwing.linalg.a imports lapwing.linalg.b imports lapwing.linalg.c imports lapwing.linalg.a"
    ]


def test_no_name_is_both_a_module_and_something_else() -> None:
    both = []
    for name, path in modules_under(SOURCE).items():
        if path.name == "__init__.py":
            package = import_module(name)
            inside = [p.stem for p in path.parent.iterdir() if (p.suffix == ".py" or p.is_dir()) and p != path]
            both += [f"{name}.{each}" for each in inside if not isinstance(getattr(package, each, package), ModuleType)]
    assert not both, "\n" + "\n".join(both)


def test_imports_point_one_way() -> None:
    found = violations(SOURCE)
    assert not found, "\n" + "\n".join(found)


def test_the_tree_that_is_checked_is_the_package() -> None:
    assert (SOURCE / "__init__.py").is_file()
    assert "errors" in units_under(SOURCE)


def plant(root: Path, files: dict[str, str]) -> Path:
    source = root / PACKAGE
    for name, text in {"__init__.py": "", **files}.items():
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return source


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("params.py", "import lapwing.linalg.dense\n", "linalg is above it"),
        ("params.py", "from lapwing.linalg import dense\n", "linalg is above it"),
        ("params.py", "from lapwing import linalg\n", "linalg is above it"),
        ("params.py", "from . import linalg\n", "linalg is above it"),
        ("linalg/dense.py", "from ..tangent import record\n", "tangent is above it"),
        ("linalg/dense.py", "from .. import tangent\n", "tangent is above it"),
        ("linalg/__init__.py", "from ..tangent import record\n", "tangent is above it"),
        ("linalg/deep/er.py", "from ...tangent import record\n", "tangent is above it"),
        ("linalg/dense.py", "def late():\n    from lapwing.laplace import Laplace\n", "laplace is above it"),
        (
            "estimate/kfac.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from lapwing.posterior import Gaussian\n",
            "posterior is above it",
        ),
        ("likelihoods/gaussian.py", "from lapwing.tangent import Tangent\n", "tangent is a sibling"),
        ("tangent/model.py", "from lapwing import priors\n", "priors is a sibling"),
        ("priors.py", "from .likelihoods import gaussian\n", "likelihoods is a sibling"),
        ("metrics.py", "from lapwing.params import ParamSpace\n", "params may import only errors"),
        ("laplace.py", "from lapwing.tables import fit\n", "tables is above it"),
        ("posterior.py", "from lapwing import Laplace\n", "takes a name from the package"),
        ("posterior.py", "import lapwing\n", "takes a name from the package"),
        ("linalg/dense.py", "from benchmarks import timing\n", "outside the library"),
        ("novelty.py", "", "in no layer"),
        ("novelty/part.py", "", "in no layer"),
    ],
)
def test_a_planted_violation_is_caught(tmp_path: Path, name: str, text: str, reason: str) -> None:
    found = violations(plant(tmp_path, {name: text}))
    assert len(found) == 1
    assert reason in found[0]


def test_arrows_that_point_down_are_accepted(tmp_path: Path) -> None:
    source = plant(
        tmp_path,
        {
            "__init__.py": "from lapwing.laplace import Laplace\nfrom .cli import commands\n",
            "errors.py": "import torch\n",
            "metrics.py": "from lapwing.errors import DataError\n",
            "linalg/__init__.py": "from .dense import Dense\nfrom lapwing.linalg.contracts import Curvature\n",
            "linalg/dense.py": "from ..errors import CurvatureError\nfrom . import contracts\n",
            "linalg/contracts.py": "from lapwing.params import ParamSpace\n",
            "laplace.py": "from lapwing import errors, metrics\nfrom lapwing.evidence.mackay import mackay\n",
            "cli/demo.py": "from lapwing import Laplace\nimport lapwing\nimport lapwing_other\n",
        },
    )
    assert violations(source) == []


def test_every_violation_names_its_file_and_line(tmp_path: Path) -> None:
    source = plant(tmp_path, {"params.py": "import math\n\nfrom lapwing.posterior import Gaussian\n"})
    assert violations(source) == [
        "lapwing/params.py:3: params imports lapwing.posterior.Gaussian: posterior is above it"
    ]
