"""Every mutant can be made: its text is there, once, and what takes its place is Python. `run.py` does the rest."""

from __future__ import annotations

import ast
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from mutation.mutants import MUTANTS, Mutant
from mutation.run import main, mutated

TESTS = Path(__file__).parents[1]


@cache
def parsed(file: str) -> str:
    return ast.dump(ast.parse((TESTS.parent / "src" / "lapwing" / file).read_text(encoding="utf-8")))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_applies(mutant: Mutant) -> None:
    assert ast.dump(ast.parse(mutated(mutant))) != parsed(mutant.file)
    assert mutant.tests
    for name in mutant.tests:
        assert (TESTS / name).exists(), name


def test_names_differ() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 50


def test_text_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    gone = replace(MUTANTS[0], name="nothing to break", before="no such text")
    with pytest.raises(ValueError, match="occurs 0 times"):
        mutated(gone)
    monkeypatch.setattr("mutation.run.MUTANTS", (gone,))
    assert main([]) == 1
    assert "nothing to break" in capsys.readouterr().out
