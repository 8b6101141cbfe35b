"""Breaks the library on purpose, one mutant at a time, and says whether the tests notice.

    PYTHONPATH=tests python -m mutation.run [--jobs N] [words of a name ...]

Each mutant of `mutants.py` is put into a temporary copy of the sources, where the tests that cover it run; this
tree is never written to. A mutant is killed if a test fails or if the tests do not come to an end, and survives if all
of them pass, which is a hole in the tests. The exit code is 1 if one survives. Survivors take the longest, as
pytest stops at the first failure: all mutants together need about an hour on one core.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from mutation.mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("src", "tests", "docs", "pyproject.toml", "README.md", "constraints.txt")
"""What the tests read."""
SECONDS = 600
"""After which tests do not come to an end any more; without a mutant they need one to three minutes."""
PREPARED = ("torch", "torch._dynamo", "pandas", "sklearn.utils.estimator_checks", "hypothesis", "jaxtyping", "beartype")
"""What takes long to import, and is not ours."""
ADDOPTS = "--import-mode=importlib --doctest-modules --doctest-glob=*.md --strict-markers"
"""Those of `pyproject.toml` without the check of shapes."""
FIRST = 4
"""Files whose chosen tests run first: to collect all takes longer than to run most."""
PASSED, FAILED, INTERRUPTED, BROKEN = 0, 1, 2, 3
"""Exit codes of pytest, the third where a test file cannot be imported; any other means that nothing could fail."""


def mutated(mutant: Mutant, root: Path = ROOT) -> str:
    """The text of the file with the mistake in it."""
    text = (root / "src" / "lapwing" / mutant.file).read_text(encoding="utf-8")
    count = text.count(mutant.before)
    if count != 1:
        raise ValueError(f"{mutant.name!r}: the text occurs {count} times in {mutant.file}; expected once.")
    return text.replace(mutant.before, mutant.after)


@contextmanager
def copied() -> Iterator[Path]:
    """A temporary copy of what the tests read, compiled files too: times are copied, so that they hold."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("*.egg-info"))
            else:
                shutil.copy(source, copy / name)
        yield copy


@dataclass(frozen=True)
class Outcome:
    """`found` is "killed", "survived", "timeout" or "broken" (no test could run); `by` is the test that failed."""

    found: str
    seconds: float
    by: str = ""


def outcome(mutant: Mutant, chosen: Sequence[str] = ()) -> Outcome:
    """Run the tests of a mutant, or those chosen by their names and in their order.

    Those that are chosen run first in a fork of this process, which has torch at hand, and without the check of shapes:
    to prepare it takes longer than most tests. Only if none of them fails do those of the first files run with it.
    """
    start = time.perf_counter()
    with copied() as copy:
        (copy / "src" / "lapwing" / mutant.file).write_text(mutated(mutant), encoding="utf-8")
        command = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
        if not chosen:
            code, text = _started(copy, [*command, *(f"tests/{name}" for name in mutant.tests)])
        else:
            (copy / "chosen.txt").write_text("\n".join(chosen), encoding="utf-8")
            command += ["-p", "mutation.only", "--only", "chosen.txt"]
            files = list(dict.fromkeys(name.partition("::")[0] for name in chosen))
            code, text = PASSED, ""
            for part in (files[:FIRST], files[FIRST:]):
                if code == PASSED and part:
                    code, text = _forked(copy, ["-o", f"addopts={ADDOPTS}", *command, *part])
            if code == PASSED:
                code, text = _started(copy, [*command, *files[:FIRST]])
    found = {None: "timeout", PASSED: "survived", FAILED: "killed", INTERRUPTED: "killed"}.get(code, "broken")
    failed = [line for line in text.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if found == "killed" and not failed:
        found = "broken"
    return Outcome(found, time.perf_counter() - start, failed[0] if failed else "")


def _surroundings(copy: Path) -> dict[str, str]:
    """An installed lapwing must not be taken for the copy, neither here nor in processes that tests start."""
    paths = os.pathsep.join(str(copy / name) for name in ("src", "tests"))
    return {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}


def _started(copy: Path, arguments: Sequence[str]) -> tuple[int | None, str]:
    """Exit code and output of pytest in a process of its own; None for a code if it comes to no end."""
    command = [sys.executable, "-m", "pytest", *arguments]
    surroundings = os.environ | _surroundings(copy)
    try:
        done = subprocess.run(
            command, cwd=copy, env=surroundings, capture_output=True, timeout=SECONDS, check=False, text=True
        )
    except subprocess.TimeoutExpired:
        return None, ""
    return done.returncode, done.stdout


def _forked(copy: Path, arguments: Sequence[str]) -> tuple[int | None, str]:
    """As `_started`, in a fork of this process."""
    for name in PREPARED:
        importlib.import_module(name)
    process = multiprocessing.get_context("fork").Process(target=_child, args=(copy, [*arguments]))
    process.start()
    process.join(SECONDS)
    if process.exitcode is None:
        process.kill()
        process.join()
        return None, ""
    return process.exitcode, (copy / "output.txt").read_text(encoding="utf-8")


def _child(copy: Path, arguments: list[str]) -> None:
    os.chdir(copy)
    os.environ.update(_surroundings(copy))
    sys.dont_write_bytecode = True
    sys.path[:] = [
        str(copy / "src"),
        str(copy / "tests"),
        *(path for path in sys.path if Path(path).resolve() not in (ROOT, ROOT / "src", ROOT / "tests")),
    ]
    code = BROKEN
    try:
        with open("output.txt", "w", encoding="utf-8") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            # of packages that have plugins for pytest, and are prepared
            code = int(pytest.main([*arguments, "-W", "ignore::pytest.PytestAssertRewriteWarning"]))
            sys.stdout.flush()
    finally:
        os._exit(code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what is asked for; 1 if a mutant survived or could not be tried, else 0."""
    parser = argparse.ArgumentParser(description="Break the library on purpose, and see whether the tests notice.")
    parser.add_argument("names", nargs="*", help="words that occur in the names or files of mutants; all by default")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    options = parser.parse_args(arguments)
    wrong = []
    for mutant in MUTANTS:
        try:
            mutated(mutant)
        except ValueError as error:
            wrong.append(str(error))
    if wrong:
        print(*wrong, sep="\n")
        return 1
    chosen = [m for m in MUTANTS if not options.names or any(word in f"{m.name} {m.file}" for word in options.names)]
    counts: dict[str, int] = {}
    with ThreadPoolExecutor(options.jobs) as pool:
        for mutant, result in zip(chosen, pool.map(outcome, chosen), strict=True):
            counts[result.found] = counts.get(result.found, 0) + 1
            print(f"{result.found:<8} {result.seconds:5.0f} s  {mutant.file}: {mutant.name}", flush=True)
    killed = counts.get("killed", 0) + counts.get("timeout", 0)
    print(f"{killed} of {len(chosen)} mutants were noticed")
    return 0 if killed == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
