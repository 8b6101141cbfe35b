"""Which tests execute which block of the library, and how long each of them takes.

    PYTHONPATH=tests python -m mutation.seen [--workers 2] [tests/a.py ...]      # all tests, ten minutes on two cores

As a pytest plugin this file has a mark put at the start of each block before `lapwing` is imported (`marks.py`), which
costs tens of nanoseconds where a tracer costs microseconds, and notes after each test which marks were hit, also in the
processes it started. Fixtures of a module, class or session count for every test that asks for them, and what a test
file does while it is imported for every test of the file. Tests run in a copy of the tree, as those of a mutant do, and
only those that pass are kept. What is forked from a test is not seen.

Each run adds files to `build/seen`, and the latest word on a test counts; a block is known by its place in the text of
its file, so that a run is void for files that have changed since.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mutation.marks import CHILDREN, MARKS, STARTED, Block, Finder, Place, Span, blocks, start_of, stop_of, written
from mutation.run import ADDOPTS, ROOT, copied

SEEN = ROOT / "build" / "seen"
VARIABLE = "LAPWING_SEEN"
"""Names the folder that the plugin writes to."""
DEFAULTS = ("tests/compat/test_defaults.py", "tests/compat/test_signatures.py")
"""Tests that read defaults without a call."""

# -- the plugin --------------------------------------------------------------------------------------------------------


class Notes:
    """What each test hit. `fixtures` and `files` hold what was hit on behalf of more than one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hit: set[Block] = set()
        self.tests: dict[str, tuple[float, set[Block]]] = {}
        self.fixtures: dict[tuple[str, str], set[Block]] = {}
        self.files: dict[str, set[Block]] = {}
        self.failed: set[str] = set()
        self.children = tempfile.TemporaryDirectory(prefix="seen-")
        os.environ[CHILDREN] = self.children.name
        setattr(builtins, MARKS, self.hit)
        sys.meta_path.insert(0, Finder())

    def _taken(self) -> set[Block]:
        found = self.hit | written(Path(self.children.name))
        self.hit.clear()
        return found

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Any:
        self.hit.clear()
        report = yield
        if isinstance(collector, pytest.File):
            self.files[collector.nodeid] = self._taken()
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Any:
        if fixturedef.scope == "function":
            return (yield)
        before = self._taken()
        value = yield
        made = self.fixtures.setdefault((fixturedef.baseid, fixturedef.argname), set())
        made |= self._taken()
        self.hit |= before
        return value

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self.hit.clear()
        start = time.perf_counter()
        result = yield
        seconds, found = time.perf_counter() - start, self._taken()
        found |= self.files.get(item.nodeid.partition("::")[0], set())
        known = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
        for definition in (one for several in known.values() for one in several):
            found |= self.fixtures.get((definition.baseid, definition.argname), set())
        if item.nodeid not in self.failed:
            self.tests[item.nodeid] = seconds, found
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self.failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self.children.cleanup()
        if not self.tests:
            return
        every = sorted({block for _, found in self.tests.values() for block in found})
        number = {block: i for i, block in enumerate(every)}
        source = _source_of(sys.modules["lapwing"]) if "lapwing" in sys.modules else None
        texts = {name: digest(source / name) for name, _ in every} if source is not None else {}
        tests = {
            name: (seconds, hex(sum(1 << number[block] for block in found)))
            for name, (seconds, found) in self.tests.items()
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{time.time_ns()}-{os.getpid()}.json"
        path.write_text(json.dumps({"texts": texts, "blocks": every, "tests": tests}), encoding="utf-8")


def _source_of(package: ModuleType) -> Path:
    assert package.__file__ is not None
    return Path(package.__file__).parent


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before the conftest of a folder that is asked for by name imports the library."""
    if VARIABLE in os.environ:
        early_config.pluginmanager.register(Notes(Path(os.environ[VARIABLE])), "blocks that are seen")


# -- the map -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """How long each test takes, how many blocks it executes, and the tests of each block."""

    seconds: dict[str, float]
    size: dict[str, int]
    tests: dict[Block, set[str]]


@cache
def seen() -> Seen:
    """All runs together; of a test that ran more than once, the last."""
    seconds, found, texts = {}, {}, {}
    for path in sorted(SEEN.glob("*.json")):
        run = json.loads(path.read_text(encoding="utf-8"))
        names = [tuple(block) for block in run["blocks"]]
        texts |= run["texts"]
        for name, (taken, bits) in run["tests"].items():
            number = int(bits, 16)
            seconds[name] = taken
            found[name] = {names[i] for i in range(number.bit_length()) if number >> i & 1}
    if not found:
        raise SystemExit(f"There is no map of tests in {SEEN}; make it with: PYTHONPATH=tests python -m mutation.seen")
    stale = [name for name, known in texts.items() if digest(ROOT / "src" / "lapwing" / name) != known]
    if stale:
        raise SystemExit(
            f"{', '.join(sorted(stale))} changed since the map in {SEEN} was made; remove it, make it again."
        )
    tests: dict[Block, set[str]] = {}
    for name, hit in found.items():
        for block in hit:
            tests.setdefault(block, set()).add(name)
    return Seen(seconds, {name: len(hit) for name, hit in found.items()}, tests)


def those_that_execute(file: str, text: str, place: Place) -> set[str]:
    """The tests that execute what is at a place of a file.

    What is executed at import counts as seen where it is used: defaults of parameters with the function's body (and in
    `DEFAULTS`), a name of the module in every block of the library that speaks of it, the rest of a class or module in
    all its blocks. So does a block that is executed at import and later.
    """
    tree = ast.parse(text)
    spans = blocks(tree)
    of = [i for i, span in enumerate(spans) if any(_inside(place, default) for default in _defaults(span.owner))]
    if of or any(isinstance(node, ast.AnnAssign) and _inside(place, node) for node in _of_classes(tree)):
        read = {test for test in seen().seconds if test.startswith(DEFAULTS)}
        return read | _that_execute(file, tree, spans, place, of)
    return _that_execute(file, tree, spans, place, of)


def _of_classes(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements in the bodies of classes, such as fields with a default."""
    return (part for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for part in node.body)


def _that_execute(file: str, tree: ast.Module, spans: list[Span], place: Place, of: list[int]) -> set[str]:
    """`of` are the bodies of the functions that the place is a default of."""
    within = [i for i, span in enumerate(spans) if span.start <= place < span.stop] + of
    if within and (file, within[-1]) not in executed_at_import():
        return seen().tests.get((file, within[-1]), set())
    around = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and _inside(place, node)]
    names = {part.id for node in around for part in ast.walk(node) if isinstance(part, ast.Name) and _stored(part)}
    users = {test for name in names for block in _speaking_of(name) for test in seen().tests.get(block, ())}
    if users:
        return users
    inside = around[0] if around and isinstance(around[0], ast.ClassDef) else None
    chosen = [i for i, span in enumerate(spans) if inside is None or _inside(span.start, inside)]
    return {test for i in chosen for test in seen().tests.get((file, i), ())}


@cache
def executed_at_import() -> set[Block]:
    """In a process of its own, as this one must not import the library."""
    program = (
        "import builtins, importlib, pkgutil, sys; from mutation.marks import MARKS, Finder; marks = set()\n"
        "setattr(builtins, MARKS, marks); sys.meta_path.insert(0, Finder()); import lapwing\n"
        "for one in pkgutil.walk_packages(lapwing.__path__, 'lapwing.'): importlib.import_module(one.name)\n"
        "print(repr(sorted(marks)))"
    )
    surroundings = os.environ | {"PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ("src", "tests"))}
    done = subprocess.run([sys.executable, "-c", program], env=surroundings, capture_output=True, check=True, text=True)
    return set(ast.literal_eval(done.stdout.splitlines()[-1]))


def _inside(place: Place, node: ast.AST) -> bool:
    return start_of(node) <= place < stop_of(node)


def _defaults(owner: ast.AST) -> list[ast.expr]:
    if not isinstance(owner, (ast.FunctionDef, ast.Lambda)):
        return []
    return [*owner.args.defaults, *(one for one in owner.args.kw_defaults if one is not None)]


def _stored(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


@cache
def _words() -> dict[str, list[Block]]:
    """The blocks in which a name occurs, as a variable, an attribute or a keyword."""
    found: dict[str, list[Block]] = {}
    source = ROOT / "src" / "lapwing"
    for path in sorted(source.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for number, span in enumerate(blocks(tree)):
            parts = span.body if isinstance(span.body, list) else [span.body]
            words = {word for part in parts for node in ast.walk(part) for word in _names(node)}
            for word in words:
                found.setdefault(word, []).append((path.relative_to(source).as_posix(), number))
    return found


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr


def _speaking_of(name: str) -> list[Block]:
    return _words().get(name, [])


def in_order(tests: set[str], budget: float) -> list[str]:
    """Quick tests that execute little come first, one case of each test before a second of any, up to some seconds."""
    known = seen()
    ranked = sorted(tests, key=lambda test: (max(known.seconds[test], 0.01) * known.size[test], test))
    cases: dict[str, int] = {}
    turn = {}
    for test in ranked:
        function = test.partition("[")[0]
        turn[test] = cases[function] = cases.get(function, 0) + 1
    chosen, total = [], 0.0
    for test in sorted(ranked, key=lambda test: turn[test]):
        if total + known.seconds[test] <= budget:
            chosen.append(test)
            total += known.seconds[test]
    return chosen


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Note which tests execute which block of the library.")
    parser.add_argument("tests", nargs="*", help="paths from the root of the tree; all tests by default")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the tests")
    options = parser.parse_args(arguments)
    with copied() as copy:
        started = copy / "started"  # where no doctest is looked for: collected, it would take the marks from the plugin
        started.mkdir()
        (started / "sitecustomize.py").write_text(STARTED.format(folder=str(copy / "tests")), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "mutation.seen"]
        command += ["-m", "not slow", "-o", f"addopts={ADDOPTS}", "--ignore=tests/mutation", "-n", str(options.workers)]
        paths = os.pathsep.join(str(copy / name) for name in ("started", "src", "tests"))
        surroundings = os.environ | {"PYTHONPATH": paths, VARIABLE: str(SEEN)}
        return subprocess.run([*command, *options.tests], cwd=copy, env=surroundings, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
