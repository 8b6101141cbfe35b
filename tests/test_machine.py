"""A test that the processor cannot run is skipped with the reason, and takes no other test with it."""

from __future__ import annotations

import os
import signal

import pytest

import machine


def case(kind: str) -> None:
    """What the child processes run."""
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGILL)
    if kind == "raises":
        raise ValueError


def test_what_ends_a_process_is_skipped_and_what_raises_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ("fine", "killed", "raises", "fine again")
    monkeypatch.setattr(machine, "CASES", tuple(("test_machine.py", "case", kind) for kind in kinds))
    for kind in ("fine", "raises", "fine again"):
        machine.need("test_machine.py", "case", kind)
    with pytest.raises(pytest.skip.Exception, match="a child process was ended by SIGILL"):
        machine.need("test_machine.py", "case", "killed")
