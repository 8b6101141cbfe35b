"""Descriptions of what a model is made of: equal for equal values made twice, and different for different ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import partial
from itertools import combinations
from typing import Any

import pytest
import torch

from lapwing.laplace.descriptions import text


class Plain(Enum):
    ONE = 1
    TWO = 2


class Number(IntEnum):
    ONE = 1
    TWO = 2


@dataclass
class Pair:
    a: int
    b: float = 2.0


class Owner:
    def first(self) -> int:
        return 1

    def second(self) -> int:
        return 2


def scaled(x: float, by: float = 1.0) -> float:
    return x * by


def closure(number: Any) -> Callable[[], Any]:
    return lambda: number


def keyword(number: int) -> Callable[..., int]:
    def inner(*, of: int = number) -> int:
        return of

    return inner


VALUES: list[Callable[[], Any]] = [
    lambda: None,
    lambda: True,
    lambda: 1,
    lambda: 1.0,
    lambda: "1",
    lambda: b"1",
    lambda: torch.float32,
    lambda: torch.float64,
    lambda: range(1),
    lambda: range(2),
    lambda: Plain.ONE,
    lambda: Plain.TWO,
    lambda: Number.ONE,
    lambda: Number.TWO,
    lambda: slice(1, 2),
    lambda: slice(1, 2, 3),
    lambda: (1, 2),
    lambda: (2, 1),
    lambda: frozenset({"a", "b", "c"}),
    lambda: frozenset({"a", "b"}),
    lambda: partial(scaled, 1.0),
    lambda: partial(scaled, 2.0),
    lambda: partial(scaled, 1.0, by=3.0),
    lambda: Owner,
    lambda: Owner().first,
    lambda: Owner().second,
    lambda: Pair(1),
    lambda: Pair(2),
    lambda: Pair(1, 3.0),
    lambda: torch.relu,
    lambda: torch.Tensor.relu,
]
BY_CODE: list[Callable[[], Any]] = [
    lambda: torch.zeros(2),
    lambda: torch.zeros(2, 1),
    lambda: torch.zeros(2, dtype=torch.float64),
    lambda: torch.ones(2),
    lambda: [1, 2],
    lambda: [2, 1],
    lambda: {"a", "b", "c"},
    lambda: {"a", "b"},
    lambda: {"a": 1, "b": 2},
    lambda: {"a": 1, "b": 3},
    lambda: closure(1),
    lambda: closure(2),
    lambda: closure(torch.zeros(2)),
    lambda: keyword(1),
    lambda: keyword(2),
]


@pytest.mark.parametrize(("made", "code"), [(VALUES, False), ([*VALUES, *BY_CODE], True)], ids=["names", "code"])
def test_each_value_has_its_own_description(made: list[Callable[[], Any]], code: bool) -> None:
    found = [text(make(), code) for make in made]
    assert found == [text(make(), code) for make in made]
    # torch moves its functions between classes from one release to the next: they have one name
    apart = [each for each in found if each != "relu"]
    assert not [pair for pair in combinations(apart, 2) if pair[0] == pair[1]]
    assert [each for each in found if each.endswith("relu")]


def test_sets_and_mappings_have_no_order() -> None:
    assert text({"a": 1, "b": 2}, True) == text({"b": 2, "a": 1}, True)
    assert text(frozenset("abc")) == text(frozenset("cba"))
    assert text([1, 2], True) != text([2, 1], True)


def test_without_code_mutable_values_are_known_by_their_kind() -> None:
    assert text([1, 2]) == text([3]) == "list"
    assert text(torch.zeros(2)) == text(torch.ones(3)) == "Tensor"


def test_a_value_that_holds_itself_ends() -> None:
    around: list[Any] = [1]
    around.append(around)
    assert text(around, True) == "list(1, ...)"
    deep: Any = 1
    for _ in range(30):
        deep = (deep,)
    assert text(deep).count("(") < 30
    assert "..." in text(deep)


def test_a_name_without_a_value_yet_is_described() -> None:
    def outer() -> Callable[[], int]:
        def inner() -> int:
            return later

        described.append(text(inner, True))
        later = 1
        described.append(text(inner, True))
        return inner

    described: list[str] = []
    outer()
    assert described[0] != described[1]


@pytest.mark.parametrize("length", [196, 197, 198, 199, 400])
def test_long_values_are_hashes(length: int) -> None:
    value = "a" * length
    if length <= 198:  # with its quotes
        assert text(value) == repr(value)
    else:
        assert text(value).startswith("str ")
        assert len(text(value)) == len("str ") + 64
        assert text(value) != text(value[:-1] + "b")
