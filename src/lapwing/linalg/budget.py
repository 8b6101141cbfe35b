"""How much memory an intermediate may take, and how work is cut into chunks that fit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from lapwing.errors import CurvatureError

DEFAULT_BUDGET = 2**28
"""Bytes that one intermediate of a fit or a prediction may take; work is cut into chunks that fit."""

CACHE = 2**22
"""Bytes of an intermediate that is read again at once: small enough to stay in a processor's cache."""


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
    """Refuses, before anything is computed, what the device has no room for."""
    free = available_memory(device)
    if free is not None and needed > free:
        raise CurvatureError(
            f"{what}: {_size(needed)} of memory; expected at most {_size(free)}, what is free. {remedy}"
        )


def _size(count: int) -> str:
    return f"{count / 2**30:,.1f} GiB" if count >= 2**29 else f"{count / 2**20:,.1f} MiB"
