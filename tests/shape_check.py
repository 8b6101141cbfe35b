"""The check of shapes under pytest: what `jaxtyping.jaxtyped` checks, at less cost per call.

jaxtyping binds the arguments of every call to its signature, and looks at each argument twice: before the call, and
with the value that it returns. Here each is looked at once, before the call, and the value alone after it, all in one
jaxtyping context, so that an axis has one size in arguments and value. What looks is made by beartype at the first call
that is checked, not at import, and once for all the functions that a line inside another function defines. An error is
told by jaxtyping itself, from the same arguments and value. Of what jaxtyping offers, axes that name an argument,
`Float[Tensor, "{n}"]`, are not supported: nothing in lapwing has them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import partial, update_wrapper, wraps
from types import FunctionType
from typing import Any, get_type_hints

import jaxtyping

_jaxtyped: Any = jaxtyping.jaxtyped
_config = jaxtyping.config
_context = _jaxtyped("context")  # it holds nothing: one serves calls inside calls, in any thread

Look = Callable[..., object]


def jaxtyped(*function: Any, typechecker: Any) -> Any:
    """In place of `jaxtyping.jaxtyped`, for functions and for dataclasses.

    Functions that are defined inside others stay as they are while the check is off.
    """
    if not function:
        return partial(jaxtyped, typechecker=typechecker)
    (given,) = function
    if inspect.isclass(given):
        if is_dataclass(given) and not hasattr(given.__init__, "checked"):
            given.__init__ = _checked(given.__init__, typechecker)
        return given
    if not isinstance(given, FunctionType):
        return _jaxtyped(given, typechecker=typechecker)
    if _config.jaxtyping_disable and "<locals>" in given.__qualname__:
        return given
    return _checked(given, typechecker)


def _checked(function: Any, typechecker: Any) -> Any:
    looks = _Looks(typechecker)

    @wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if _config.jaxtyping_disable:
            return function(*args, **kwargs)
        before, after = looks.made or looks.make(function)
        with _context:
            if before is not None:
                try:
                    before(*args, **kwargs)
                except looks.violation:
                    _tell(function, typechecker, args, kwargs, None)
                    raise
            found = function(*args, **kwargs)
            if after is not None:
                try:
                    after(found)
                except looks.violation:
                    _tell(function, typechecker, args, kwargs, found)
                    raise
        return found

    wrapped.checked = True  # pyright: ignore[reportFunctionMemberAccess]
    return wrapped


class _Looks:
    """What looks at arguments and at the value of a function; None where nothing is said of them."""

    __slots__ = ("made", "typechecker", "violation")
    shared: dict[tuple, tuple[Look | None, Look | None]] = {}  # noqa: RUF012

    def __init__(self, typechecker: Any) -> None:
        from beartype.roar import BeartypeCallHintViolation

        self.made: tuple[Look | None, Look | None] | None = None
        self.typechecker, self.violation = typechecker, BeartypeCallHintViolation

    def make(self, function: Any) -> tuple[Look | None, Look | None]:
        said = tuple(function.__annotations__.items())
        if "<locals>" in function.__qualname__ and all(isinstance(each, str) for _, each in said):
            key = function.__module__, function.__qualname__, function.__code__, said
            if key not in self.shared:
                self.shared[key] = self._make(function)
            self.made = self.shared[key]
        else:
            self.made = self._make(function)
        return self.made

    def _make(self, function: Any) -> tuple[Look | None, Look | None]:
        hints = {name: _resolved(each, function.__globals__) for name, each in function.__annotations__.items()}
        hints = {name: each for name, each in hints.items() if each is not Any}
        value = {name: hints.pop(name) for name in ("return",) if name in hints}
        arguments = inspect.signature(function).parameters.values()
        defaults = {f"default_{each.name}": each.default for each in arguments if each.default is not each.empty}
        bare = [
            each.replace(
                annotation=each.empty,
                default=each.empty if each.default is each.empty else _Name(f"default_{each.name}"),
            )
            for each in arguments
        ]
        before = self._look(function, str(inspect.Signature(bare)), "pass", defaults, hints) if hints else None
        return before, self._look(function, "(value)", "return value", {}, value) if value else None

    def _look(self, function: Any, header: str, body: str, space: dict[str, Any], hints: dict[str, Any]) -> Look:
        exec(f"def {function.__name__}{header}: {body}", space)
        found = space[function.__name__]
        found.__module__, found.__qualname__, found.__annotations__ = function.__module__, function.__qualname__, hints
        return self.typechecker(found)


class _Name:
    """What a signature prints for a default: the name that holds it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


def _resolved(hint: Any, space: dict[str, Any]) -> Any:
    """As jaxtyping does it: Any for what the module does not know, as classes inside a function."""

    def holder(value: object) -> None: ...

    holder.__annotations__ = {"value": hint}
    try:
        return get_type_hints(holder, space, include_extras=True)["value"]
    except Exception:
        return Any


def _tell(function: Any, typechecker: Any, args: tuple, kwargs: dict[str, Any], found: Any) -> None:
    """Raise what jaxtyping says of a call with these arguments that returns this value."""

    def answer(*args: Any, **kwargs: Any) -> Any:
        return found

    again = FunctionType(answer.__code__, function.__globals__, function.__name__, closure=answer.__closure__)
    _jaxtyped(update_wrapper(again, function), typechecker=typechecker)(*args, **kwargs)
