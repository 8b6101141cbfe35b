"""The check of shapes refuses what jaxtyping's own refuses, in the same words, and passes what it passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import jaxtyping
import pytest
import torch
from beartype import beartype
from jaxtyping import Float, TypeCheckError
from torch import Tensor

import lapwing.linalg
import shape_check

OURS, THEIRS = shape_check.jaxtyped(typechecker=beartype), shape_check._jaxtyped(typechecker=beartype)


@pytest.fixture(autouse=True)
def _on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", False)


def product(a: Float[Tensor, "n k"], b: Float[Tensor, "k m"], *, cut: int = 0) -> Float[Tensor, "n m"]:
    return (a @ b)[cut:]


def several(*each: Float[Tensor, " n"], count: int | None = None, **more: Float[Tensor, " n"]) -> int:
    return len(each) + len(more)


def rows(a: Float[Tensor, "n k"]) -> Iterator[Float[Tensor, " k"]]:
    yield from a


def inner(a: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Calls another, whose n is its own."""
    return a if len(a) < 2 else torch.cat([a[:1], OURS(inner)(a[1:])])


def refuse(x: int) -> NoReturn:
    raise KeyError(x)


def nothing(x: int) -> None:
    return x  # pyright: ignore[reportReturnType]


def unknown(x: Nowhere) -> Nowhere:  # pyright: ignore[reportUndefinedVariable]
    return x


def plain(x, /, y=2):
    return x + y


CALLS: list[tuple[Callable[..., Any], tuple, dict[str, Any]]] = [
    (product, (torch.ones(2, 3), torch.ones(3, 4)), {}),
    (product, (torch.ones(2, 3), torch.ones(2, 4)), {}),  # k
    (product, (torch.ones(2, 3), torch.ones(3)), {}),
    (product, (torch.ones(2, 3), torch.ones(3, 4)), {"cut": 1}),  # n of the value
    (product, (torch.ones(2, 3), torch.ones(3, 4)), {"cut": None}),
    (product, (torch.ones(2, 3).long(), torch.ones(3, 4)), {}),
    (product, (), {"b": torch.ones(3, 4), "a": torch.ones(2, 3)}),
    (several, (torch.ones(2), torch.ones(2)), {"c": torch.ones(2), "count": None}),
    (several, (torch.ones(2), torch.ones(3)), {}),
    (several, (torch.ones(2),), {"c": torch.ones(3)}),
    (several, (torch.ones(2),), {"count": 1.5}),
    (rows, (torch.ones(2, 3),), {}),
    (rows, (torch.ones(2),), {}),
    (inner, (torch.ones(4),), {}),
    (refuse, (1,), {}),
    (refuse, ("1",), {}),
    (nothing, (1,), {}),
    (unknown, (1,), {}),
    (plain, (1,), {}),
]


def outcome(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> tuple[str, str]:
    try:
        found = function(*args, **kwargs)
    except (TypeCheckError, KeyError) as error:
        return type(error).__name__, str(error)
    return "value", str([*found]) if isinstance(found, Iterator) else str(found)


@pytest.mark.parametrize("number", range(len(CALLS)))
def test_it_says_what_jaxtyping_says(number: int) -> None:
    function, args, kwargs = CALLS[number]
    found = outcome(OURS(function), args, kwargs)
    assert found == outcome(THEIRS(function), args, kwargs)


def test_eleven_of_these_calls_are_refused() -> None:
    found = [outcome(OURS(function), args, kwargs)[0] for function, args, kwargs in CALLS]
    assert found.count("TypeCheckError") == 11
    assert found.count("KeyError") == 1


def test_a_wrong_number_of_arguments_is_an_error_of_the_call() -> None:
    with pytest.raises(TypeError, match=r"product\(\) missing 1 required positional argument: 'b'"):
        OURS(product)(torch.ones(2, 3))


@dataclass(frozen=True)
class Pair:
    a: Float[Tensor, "n k"]
    b: Float[Tensor, " k"]


class Longer(Pair):
    pass


def test_fields_of_a_dataclass_are_checked_once() -> None:
    made = OURS(Pair)
    assert made is Pair
    first = Pair.__init__
    assert OURS(Longer).__init__ is first
    Pair(torch.ones(2, 3), torch.ones(3))
    with pytest.raises(TypeCheckError, match="b"):
        Pair(torch.ones(2, 3), torch.ones(2))
    with pytest.raises(TypeCheckError, match="b"):
        Longer(torch.ones(2, 3), torch.ones(2))


def test_functions_inside_a_function_are_checked_each_with_what_it_closes_over() -> None:
    def make(k: int) -> Callable[..., Tensor]:
        @OURS
        def scaled(a: Float[Tensor, " n"], by: int = k) -> Float[Tensor, " n"]:
            return a[: len(a) + 1 - k] * by

        return scaled

    assert make(1)(torch.ones(2)).tolist() == [1, 1]
    with pytest.raises(TypeCheckError, match="return value"):
        make(2)(torch.ones(2))
    with pytest.raises(TypeCheckError, match="parameters"):
        make(1)(torch.ones(2, 2))


def test_nothing_is_checked_while_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = OURS(product)
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    assert checked(torch.ones(2, 3), torch.ones(3)).shape == (2,)

    def local(a: Float[Tensor, "n k"]) -> None: ...

    assert OURS(local) is local


def test_the_library_is_checked() -> None:
    with pytest.raises(TypeCheckError, match=r"Diagonal\.__init__"):
        lapwing.linalg.Diagonal(torch.ones(2, 2))
    with pytest.raises(TypeCheckError, match=r"Diagonal\.mv"):
        lapwing.linalg.Diagonal(torch.ones(2)).mv(torch.ones(2).long())
