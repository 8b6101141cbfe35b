"""Dataclasses of plain values, made from JSON, with the type of every field checked.

>>> from dataclasses import dataclass
>>> @dataclass
... class Point:
...     x: float
...     names: tuple[str, ...] = ()
>>> typed(Point, {"x": 1, "names": ["a"]})
Point(x=1.0, names=('a',))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from lapwing.errors import DataError

T = TypeVar("T")


def typed(kind: type[T], stored: Mapping[str, Any]) -> T:
    """`kind(**stored)`; a `DataError` where a field is unknown or of another type."""
    hints = get_type_hints(kind)
    unknown = [name for name in stored if name not in hints]
    if unknown:
        raise DataError(f"a {kind.__name__} has no field {unknown[0]!r}; expected some of {list(hints)}.")
    return kind(**{name: _value(value, hints[name], name) for name, value in stored.items()})


def _value(value: Any, hint: Any, name: str) -> Any:
    if get_origin(hint) is UnionType:
        return None if value is None else _value(value, get_args(hint)[0], name)
    if get_origin(hint) is tuple and isinstance(value, (list, tuple)):
        return tuple(_value(entry, get_args(hint)[0], name) for entry in value)
    if get_origin(hint) is dict and isinstance(value, dict):
        return {str(key): _value(entry, get_args(hint)[1], name) for key, entry in value.items()}
    if is_dataclass(hint) and isinstance(hint, type) and isinstance(value, dict):
        return typed(hint, value)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise DataError(f"{name} is {value!r:.40}; expected a {getattr(hint, '__name__', hint)}.")
    return value
