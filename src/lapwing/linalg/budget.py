"""How much memory an intermediate may take, and how work is cut into chunks that fit."""

from __future__ import annotations

from collections.abc import Iterator

DEFAULT_BUDGET = 2**28
"""Bytes that one intermediate of a fit or a prediction may take; work is cut into chunks that fit."""

CACHE = 2**22
"""Bytes of an intermediate that is read again at once: small enough to stay in a processor's cache."""


def chunks(total: int, bytes_per_item: int, budget: int) -> Iterator[slice]:
    """Consecutive slices of range(total), each within the budget (at least one item)."""
    step = max(1, min(total, budget // max(1, bytes_per_item)))
    for start in range(0, total, step):
        yield slice(start, min(start + step, total))
