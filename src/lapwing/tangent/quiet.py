"""quiet(): hides torch's advice on `vmap`, in this thread alone: `warnings.catch_warnings` would for all of them."""

from __future__ import annotations

import re
import threading
import warnings
from typing import Any

NOTHING = "(?!)"
"""A pattern that nothing matches."""


class _Here(threading.local):
    """Matches like a compiled pattern, in a thread that is inside `quiet`, and nothing elsewhere.

    Filters are read by others: scikit-learn takes their patterns along into its workers, and some are pickled. What
    they find is a pattern that matches nothing.
    """

    inside = False
    pattern, flags = NOTHING, re.UNICODE.value

    def match(self, text: str) -> bool:
        return self.inside and text.startswith("There is a performance drop")

    def __reduce__(self) -> tuple[Any, ...]:
        return re.compile, (self.pattern,)


_HERE = _Here()
_FILTER = ("ignore", _HERE, UserWarning, None, 0)


class quiet:
    """An operation that `vmap` can only run in a loop, at which torch warns, is slow, and right."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        if _FILTER not in warnings.filters:  # stays there, and matches nothing that is not asked for
            warnings.filters.insert(0, _FILTER)  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
        self._before, _HERE.inside = _HERE.inside, True

    def __exit__(self, *_: object) -> None:
        _HERE.inside = self._before
