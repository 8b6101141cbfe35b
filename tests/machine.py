"""What this processor can do, found out in a child process: an illegal instruction ends the process that meets it.

torch has convolutions of bfloat16 that end in one on some processors with AMX. `need(file, function, argument)` skips a
test whose `function(argument)` a child process did not survive; errors of any other kind are left to the test itself.
One child tries all of CASES, and another one takes over after a case that ended it.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

Case = tuple[str, str, str]
"""A file under `tests/`, a function in it that takes one string, and the string."""

CASES: tuple[Case, ...] = (
    ("estimate/test_propagated.py", "in_bfloat16", "conv2d"),
    ("estimate/test_propagated.py", "in_bfloat16", "conv_transpose2d"),
    ("estimate/test_mixed.py", "in_bfloat16", "propagated"),
    ("estimate/test_mixed.py", "in_bfloat16", "whole"),
    ("estimate/test_estimators.py", "in_bfloat16", "conv2d"),
)

CHILD = """
import contextlib, runpy, sys
for case in sys.argv[1:]:
    path, function, argument = case.split("::")
    with contextlib.suppress(Exception):
        runpy.run_path(path)[function](argument)
    print(case, flush=True)
"""


def need(file: str, function: str, argument: str) -> None:
    """Skips the test where `function(argument)` of the file ends the process it runs in."""
    if (reason := _ended_by(CASES)[file, function, argument]) is not None:
        pytest.skip(f"this processor cannot run it with this torch: a child process was ended by {reason}")


@functools.cache
def _ended_by(cases: Sequence[Case]) -> dict[Case, str | None]:
    """The signal that ended a child process at each case, or None."""
    tests = Path(__file__).parent
    names = {"::".join((str(tests / file), *rest)): (file, *rest) for file, *rest in cases}
    found: dict[Case, str | None] = {}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 300, "env": environment}
    while left := [name for name, case in names.items() if case not in found]:
        child = subprocess.run([sys.executable, "-c", CHILD, *left], check=False, **options)
        done = child.stdout.splitlines()
        found |= {names[name]: None for name in done if name in names}
        if child.returncode >= 0:
            assert done[-1:] == left[-1:], child.stderr
        else:
            found[names[left[len(done)]]] = signal.Signals(-child.returncode).name
    return found
