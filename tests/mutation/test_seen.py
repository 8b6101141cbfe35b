"""Marks say which blocks ran and change nothing else; a mistake meets the tests of its block, the quick ones first."""

from __future__ import annotations

import ast
import builtins
from itertools import pairwise
from typing import Any

import pytest

from mutation import seen
from mutation.draw import drawn
from mutation.marks import MARKS, blocks, marked
from mutation.seen import DEFAULTS, Seen, in_order, those_that_execute

TEXT = '''
"""A module."""
LIMIT = 3
OTHER = lambda x: x + 1

def sign(x, zero=0):
    """A docstring."""
    if x < zero:
        return -1
    elif x == 0:
        return 0
    for _ in range(1):
        x = 1 if x > LIMIT else 2
    return x

class Thing:
    number: int = 4

    def value(self):
        try:
            return self.number / 0
        except ZeroDivisionError:
            return OTHER(self.number)
'''


@pytest.fixture
def hit(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, int]]:
    marks: set[tuple[str, int]] = set()
    monkeypatch.setattr(builtins, MARKS, marks, raising=False)
    return marks


@pytest.fixture
def names() -> list[str]:
    """The text of each block's first line behind a docstring."""
    lines = TEXT.splitlines()
    return [
        lines[span.start[0] - 1]
        .encode()[span.start[1] : span.stop[1] if span.start[0] == span.stop[0] else None]
        .decode()
        for span in blocks(ast.parse(TEXT))
    ]


def run() -> dict[str, Any]:
    space: dict[str, Any] = {"__name__": "text"}
    exec(compile(marked(TEXT, "text.py"), "text.py", "exec"), space)
    return space


def test_each_block_has_a_mark(hit: set[tuple[str, int]], names: list[str]) -> None:
    space = run()
    assert not hit

    def seen_by(call: Any) -> tuple[Any, list[str]]:
        hit.clear()
        value = call()
        return value, [names[number] for _, number in sorted(hit)]

    sign = space["sign"]
    assert sign.__doc__ == "A docstring."
    assert seen_by(lambda: sign(-5)) == (-1, ['"""A docstring."""', "return -1"])
    assert seen_by(lambda: sign(0)) == (0, ['"""A docstring."""', "elif x == 0:", "return 0"])
    assert seen_by(lambda: sign(9))[0] == 1
    assert seen_by(lambda: sign(9))[1][-2:] == ["x = 1 if x > LIMIT else 2", "1"]
    value, found = seen_by(space["Thing"]().value)
    assert value == 5
    assert found == ["x + 1", "try:", "return self.number / 0", "return OTHER(self.number)"]


def test_places_lead_to_the_tests_of_their_blocks(monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
    known = {("text.py", i): {name} for i, name in enumerate(names)}
    read = f"{DEFAULTS[0]}::test"
    monkeypatch.setattr(seen, "seen", lambda: Seen({read: 1.0}, {}, known))
    monkeypatch.setattr(seen, "executed_at_import", set)
    monkeypatch.setattr(seen, "_speaking_of", lambda name: [("text.py", 5)] if name == "LIMIT" else [])

    def met(words: str) -> set[str]:
        line = next(i for i, text in enumerate(TEXT.splitlines()) if words in text)
        return those_that_execute("text.py", TEXT, (line + 1, TEXT.splitlines()[line].index(words)))

    assert met("-1") == {"return -1"}
    assert met("< zero") == {'"""A docstring."""'}
    assert met("0):") == {'"""A docstring."""', read}, "a default is met by the function's tests, and read"
    assert met("> LIMIT") == {"x = 1 if x > LIMIT else 2"}
    assert met("+ 1") == {"x + 1"}
    assert met("3") == known["text.py", 5], "a name of the module is met where it is spoken of"
    assert met("4") == {"try:", "return self.number / 0", "return OTHER(self.number)", read}


def test_quick_tests_and_other_functions_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"a[0]": 0.1, "a[1]": 0.1, "b": 0.5, "c": 9.0, "wide": 0.2}
    size = {"a[0]": 3, "a[1]": 3, "b": 3, "c": 3, "wide": 100}
    monkeypatch.setattr(seen, "seen", lambda: Seen(seconds, size, {}))
    assert in_order(set(seconds), 100) == ["a[0]", "b", "wide", "c", "a[1]"]
    assert in_order(set(seconds), 1.0) == ["a[0]", "b", "wide", "a[1]"]
    assert in_order(set(), 1.0) == []


def test_the_same_seed_draws_the_same_mistakes() -> None:
    first, more = drawn(5, 10), drawn(5, 20)
    assert first == more[:10]
    assert len({(one.mutant.file, one.mutant.after) for one in more}) == 20
    for one in more:
        text = (seen.ROOT / "src" / "lapwing" / one.mutant.file).read_text(encoding="utf-8")
        ast.parse(text.replace(one.mutant.before, one.mutant.after))
        spans = blocks(ast.parse(text))
        assert all(a.start <= b.start for a, b in pairwise(spans))
