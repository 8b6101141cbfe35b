"""What a plain value or a function is, in one line of text that is the same in every process.

Numbers, strings, None, tuples and enumerations by value; functions, methods, partials and classes by name; dataclasses
by their fields; any other object by its class alone. Nothing is pickled, and no address in memory is in the text.

With `code=True` functions are told apart by what they do as well: their bytecode, constants and defaults, the values
they close over, and the functions and plain values of their module that they name, followed to the end; Python's own
and torch's functions by name. Such a text may be another one under another version of Python.

>>> from functools import partial
>>> text((1, 2.5, "a")), text(torch.tanh), text(partial(torch.relu, 3))
("(1, 2.5, 'a')", 'tanh', 'partial(relu, 3)')
>>> text(lambda x: x + 1) == text(lambda x: x + 2), text(lambda x: x + 1, True) == text(lambda x: x + 2, True)
(True, False)
"""

from __future__ import annotations

import dis
import hashlib
import inspect
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lapwing.serialize.files import sha256

_LONG = 200
_NAMED = "torch", "numpy", "builtins", "math", "functools", "lapwing"
"""Packages whose functions are known by their names."""


def text(value: Any, code: bool = False) -> str:
    """The value in words; long ones as a hash."""
    found = _text(value, code, ())
    return found if len(found) <= _LONG else f"{type(value).__name__} {hashlib.sha256(found.encode()).hexdigest()}"


def _text(value: Any, code: bool, above: tuple[int, ...]) -> str:
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, range)):
        return repr(value) if not isinstance(value, Enum) else f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if id(value) in above or len(above) > 20:
        return "..."
    above = (*above, id(value))
    if isinstance(value, slice):
        return f"slice{_text((value.start, value.stop, value.step), code, above)}"
    if isinstance(value, tuple):
        return f"({', '.join(_text(each, code, above) for each in value)})"
    if isinstance(value, frozenset):
        return f"frozenset({', '.join(sorted(_text(each, code, above) for each in value))})"
    if isinstance(value, partial):
        given = [value.args, *sorted(value.keywords.items())] if value.keywords else value.args
        return f"partial({', '.join(_text(each, code, above) for each in (value.func, *given))})"
    if isinstance(value, type):
        return value.__qualname__
    if isinstance(value, MethodType):
        return f"{_text(value.__func__, code, above)} of {_text(value.__self__, code, above)}"
    if isinstance(value, FunctionType):
        return _function(value, code, above)
    if isinstance(value, BuiltinFunctionType) or type(value).__name__ in ("method_descriptor", "wrapper_descriptor"):
        return _named(value)
    if code and isinstance(value, Tensor):
        return f"tensor {value.dtype} {tuple(value.shape)} {sha256(value)}"
    if code and isinstance(value, (list, set, dict)):
        items = sorted(value.items(), key=repr) if isinstance(value, dict) else value
        inside = [_text(each, code, above) for each in items]
        return f"{type(value).__name__}({', '.join(sorted(inside) if isinstance(value, set) else inside)})"
    if is_dataclass(value) and not isinstance(value, type):
        inside = (f"{each.name}={_text(getattr(value, each.name, None), code, above)}" for each in fields(value))
        return f"{type(value).__qualname__}({', '.join(inside)})"
    return type(value).__qualname__


def _named(function: Any) -> str:
    """Without the module: a script's is __main__ in one process and its name in another, and torch moves its own."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return name.rpartition("VariableFunctionsClass.")[2].removeprefix("type.")


def _function(function: FunctionType, code: bool, above: tuple[int, ...]) -> str:
    if not code or (_is_known(function) and "<" not in function.__qualname__):
        return _named(function)
    inside = [_code(function.__code__, above), _text(function.__defaults__, code, above)]
    inside.append(_text(tuple(sorted((function.__kwdefaults__ or {}).items())), code, above))
    for cell in function.__closure__ or ():
        try:
            inside.append(_text(cell.cell_contents, code, above))
        except ValueError:  # a name that has no value yet
            inside.append("empty")
    around = {name: function.__globals__.get(name) for name in sorted(_names(function.__code__))}
    inside += [f"{name}={_text(value, code, above)}" for name, value in around.items() if _counts(value)]
    return f"{_named(function)} {hashlib.sha256(' '.join(inside).encode()).hexdigest()}"


def _counts(value: Any) -> bool:
    return value is not None and not isinstance(value, ModuleType)


def _code(code: CodeType, above: tuple[int, ...]) -> str:
    constants = [
        _code(each, above) if isinstance(each, CodeType) else _text(each, True, above) for each in code.co_consts
    ]
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_argcount, code.co_flags
    return hashlib.sha256(f"{code.co_code!r} {constants} {names}".encode()).hexdigest()


def _names(code: CodeType) -> set[str]:
    nested = [_names(each) for each in code.co_consts if isinstance(each, CodeType)]
    return set(code.co_names).union(*nested)


# -- classes of modules ------------------------------------------------------------------------------------------------


def of_torch(kind: type) -> bool:
    """Whether a class is torch's own."""
    return kind.__module__.partition(".")[0] == "torch"


def _is_known(each: type | FunctionType) -> bool:
    return (each.__module__ or "").partition(".")[0] in _NAMED


def code_of(kind: type) -> str:
    """The functions and plain values of a class, and of those it is derived from, except known ones: as a hash."""
    found = []
    for each in kind.__mro__:
        if _is_known(each):
            continue
        for name, value in sorted(vars(each).items()):
            inside = _inside(value)
            if isinstance(inside, FunctionType) or (
                not name.startswith("__") and isinstance(inside, (bool, int, float, str, tuple))
            ):
                found.append(f"{name}={_text(inside, True, ())}")
    return hashlib.sha256(" ".join(found).encode()).hexdigest()


def _inside(value: Any) -> Any:
    if isinstance(value, property):
        return value.fget
    return value.__func__ if isinstance(value, (staticmethod, classmethod)) else value


_BY_NAME = frozenset(("setattr", "register_buffer"))
_written: WeakKeyDictionary[type, frozenset[str]] = WeakKeyDictionary()


def written(kind: type[nn.Module]) -> frozenset[str]:
    """Names of attributes that the forward pass of a module assigns to, as counters and caches: no part of what it is.

    Read from the bytecode of `forward` and of the methods that it names. Beside `setattr` and `register_buffer` every
    name that stands there as a string counts.
    """
    if kind not in _written:
        _written[kind] = frozenset(_assigned(kind, "forward", set()))
    return _written[kind]


def _assigned(kind: type, name: str, seen: set[str]) -> Iterator[str]:
    seen.add(name)
    function = _inside(inspect.getattr_static(kind, name, None))
    function = inspect.unwrap(function) if callable(function) else function
    if not isinstance(function, FunctionType) or function is vars(nn.Module).get(name):
        return
    for each in _codes(function.__code__):
        yield from (str(step.argval) for step in dis.get_instructions(each) if step.opname == "STORE_ATTR")
        if not _BY_NAME.isdisjoint(each.co_names):
            yield from (value for value in each.co_consts if isinstance(value, str) and value.isidentifier())
        for other in each.co_names:
            if other not in seen and not (other.startswith("__") and other.endswith("__")):
                yield from _assigned(kind, other, seen)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)
