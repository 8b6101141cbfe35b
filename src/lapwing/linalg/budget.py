"""How much memory an intermediate may take, and how work is cut into chunks that fit.

A budget holds for whatever runs inside `within(budget)`, in this thread alone: rows are multiplied in many places, and
each asks here (`intermediate_bytes`) instead of being told by everyone who calls it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from lapwing.errors import CurvatureError

DEFAULT_BUDGET = 2**28
"""Bytes that one intermediate of a fit or a prediction may take; work is cut into chunks that fit."""

CACHE = 2**22
"""Bytes of an intermediate that is read again at once: small enough to stay in a processor's cache."""

PARTS = 8
"""Intermediates that a budget for all work is divided among: some exist at a time, and a product needs copies."""


@cache
def keep_freed_memory() -> None:
    """Lets the C library keep what is freed for what is allocated next, up to 64 MB instead of 256 kB.

    glibc gives larger pieces back to the system, and every page that it asks for again is a fault: a third of the time
    of a fit. It adapts to the largest block under 32 MB that a process has freed, so one is taken, never written to,
    and freed; elsewhere this does nothing. docs/decisions/0023-memory-that-is-used-again.md
    """
    torch.empty(2**25 - 2**16, dtype=torch.uint8)


@dataclass(frozen=True)
class MemoryBudget:
    """`intermediate`: bytes for one intermediate. `total`: bytes for all of them together; None where nobody said."""

    intermediate: int = DEFAULT_BUDGET
    total: int | None = None

    @staticmethod
    def of_total(total: int) -> MemoryBudget:
        """Intermediates are never larger than without a budget: beyond that they would only miss the caches."""
        return MemoryBudget(max(1, min(DEFAULT_BUDGET, total // PARTS)), total)

    @staticmethod
    def of_machine(device: torch.device) -> MemoryBudget:
        """As without a budget, or less where half of the free memory would be."""
        free = available_memory(device)
        return MemoryBudget() if free is None else MemoryBudget(MemoryBudget.of_total(free // 2).intermediate)


_NOBODY_SAID = MemoryBudget()
_CURRENT: ContextVar[MemoryBudget] = ContextVar("memory_budget", default=_NOBODY_SAID)


def current_budget() -> MemoryBudget:
    """The budget of the work that is running in this thread."""
    return _CURRENT.get()


def intermediate_bytes() -> int:
    """What one intermediate may take now."""
    return _CURRENT.get().intermediate


def cache_bytes() -> int:
    """What an intermediate may take that is read again at once."""
    return min(CACHE, _CURRENT.get().intermediate)


@contextmanager
def within(budget: MemoryBudget) -> Iterator[None]:
    """Work inside keeps to the budget."""
    token = _CURRENT.set(budget)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def chunks(total: int, bytes_per_item: int, budget: int) -> Iterator[slice]:
    """Consecutive slices of range(total), each within the budget (at least one item)."""
    step = max(1, min(total, budget // max(1, bytes_per_item)))
    for start in range(0, total, step):
        yield slice(start, min(start + step, total))


def available_memory(device: torch.device) -> int | None:
    """Bytes that are free on a device, as far as the system says: None where it does not."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    free = _number(Path("/proc/meminfo"), "MemAvailable:")
    if free is None:
        return None
    group = Path("/sys/fs/cgroup")  # a container's limit; files that the system keeps in memory count as free
    limit, used = _number(group / "memory.max"), _number(group / "memory.current")
    if limit is None or used is None:
        return 1024 * free
    return min(1024 * free, limit - used + (_number(group / "memory.stat", "inactive_file") or 0))


def _number(path: Path, name: str = "") -> int | None:
    """The number behind a name, or the first one, of a file of the system; None where there is none."""
    try:
        words = path.read_text().split()
        return int(words[words.index(name) + 1 if name else 0])
    except (OSError, ValueError, IndexError):
        return None


def check_memory(needed: int, what: str, remedy: str, device: torch.device) -> None:
    """Refuses, before anything is computed, what the device has no room for, or the memory budget."""
    free, total = available_memory(device), current_budget().total
    if total is not None and needed > total and (free is None or total <= free):
        raise CurvatureError(
            f"{what}: {size_text(needed)} of memory; expected at most {size_text(total)}, the memory_budget. {remedy}"
        )
    if free is not None and needed > free:
        raise CurvatureError(
            f"{what}: {size_text(needed)} of memory; expected at most {size_text(free)}, what is free. {remedy}"
        )


def room(device: torch.device) -> int | None:
    """Bytes that may be taken: what is free, or the memory budget where that is less; None where nobody knows."""
    known = [bytes_ for bytes_ in (available_memory(device), current_budget().total) if bytes_ is not None]
    return min(known) if known else None


def size_text(count: int) -> str:
    """A number of bytes in words."""
    return f"{count / 2**30:,.1f} GiB" if count >= 2**29 else f"{count / 2**20:,.1f} MiB"
