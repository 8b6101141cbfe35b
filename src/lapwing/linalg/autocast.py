"""outside_autocast: curvature and its algebra are computed in the dtype that they are kept in.

Under `torch.autocast` a product of two float32 matrices is rounded to eight bits, and decompositions of what comes of
it fail or mislead. Fits and predictions therefore run outside it, the model's forward pass too: they are the same
with and without it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any, TypeVar, cast

import torch

AnyFunction = TypeVar("AnyFunction", bound=Callable)
_PLACES = ("cpu", "cuda", "xpu", "mps")


def outside_autocast(function: AnyFunction) -> AnyFunction:
    """The same function, which a surrounding `torch.autocast` does not reach."""

    @wraps(function)
    def plain(*args: Any, **kwargs: Any) -> Any:
        if not torch._C._is_any_autocast_enabled():
            return function(*args, **kwargs)
        with _no_autocast():
            return function(*args, **kwargs)

    return cast(AnyFunction, plain)


def outside_modes(function: AnyFunction) -> AnyFunction:
    """The same function, which neither `torch.autocast` nor `torch.inference_mode` reaches."""

    @wraps(function)
    def plain(*args: Any, **kwargs: Any) -> Any:
        if not torch._C._is_any_autocast_enabled() and not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), _no_autocast():
            return function(*args, **kwargs)

    return cast(AnyFunction, plain)


def _no_autocast() -> ExitStack:
    stack = ExitStack()
    for place in _PLACES:
        if torch.is_autocast_enabled(place):
            stack.enter_context(torch.autocast(place, enabled=False))
    return stack
