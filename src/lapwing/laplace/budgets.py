"""memory_budget: what fits and predictions may take beyond the model, a batch of data, and the curvature that is kept.

A budget is a number of bytes or a text such as "2 GB". Chunks of rows and of cotangents are cut to it, batches are
divided where the graph of a forward pass would not fit, and a structure that would not fit is refused before data are
read. The smallest chunk is one data point and one cotangent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import wraps
from math import isfinite, prod
from typing import Any, TypeVar, cast

import torch

from lapwing.errors import OptionError
from lapwing.linalg.budget import MemoryBudget, check_memory
from lapwing.params import ParamSpace

AnyBudget = int | float | str
_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", 1):
    _UNITS |= {f"{_letter}b": 1000**_power, f"{_letter}ib": 1024**_power}
_TEXT = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:e[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)

AnyFunction = TypeVar("AnyFunction", bound=Callable)


def bytes_of(value: AnyBudget) -> int:
    """A budget as a number of bytes.

    >>> bytes_of("2 GB"), bytes_of("1.5 MiB"), bytes_of(10_000)
    (2000000000, 1572864, 10000)
    """
    found = None
    if isinstance(value, str):
        match = _TEXT.fullmatch(value)
        unit = None if match is None else _UNITS.get(match[2].lower())
        found = None if match is None or unit is None else float(match[1]) * unit
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        found = value
    if found is None or not isfinite(found) or found < 1:
        raise OptionError(
            f"memory_budget is {value!r}; expected a number of bytes >= 1, or a text such as '500 MB' or '2 GiB'. "
            "Leave it out for a share of what is free."
        )
    return int(found)


def budget_of(value: AnyBudget | None, device: torch.device) -> MemoryBudget:
    """The budget that was given, or that of the machine."""
    return MemoryBudget.of_machine(device) if value is None else MemoryBudget.of_total(bytes_of(value))


def budgeted(method: AnyFunction) -> AnyFunction:
    """The same method of a posterior, within its memory budget."""

    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._within():
            return method(self, *args, **kwargs)

    return cast(AnyFunction, run)


# -- what a structure keeps --------------------------------------------------------------------------------------------


def kept_bytes(structure: str, space: ParamSpace, options: Mapping[str, Any]) -> int | None:
    """Bytes of a curvature and of its decomposition, by the shapes of the weights; None where the data decide."""
    each, size = space.dtype.itemsize, space.size
    if structure in ("diag", "propagated_diag", "mixed_diag"):
        return 2 * each * size
    if structure == "full":
        return 2 * each * size**2
    if structure == "lowrank":
        return 2 * each * size * min(options.get("rank", 100), size)
    if structure in ("kron", "ekfac") and space.index is None:
        shapes = [space.shape(name) for name in space.names]
        factors = sum(_factors(tuple(shape), options) for shape in shapes)
        return 2 * each * factors + (2 * each * size if structure == "ekfac" else 0)
    return None


def _factors(shape: tuple[int, ...], options: Mapping[str, Any]) -> int:
    """Numbers in the factors of one tensor, or in the exact block of a vector."""
    if len(shape) < 2:
        size = prod(shape)
        return size if size > options.get("dense_limit", 1024) else size**2
    wide = options.get("wide_limit", 8192)
    return sum(side**2 if side <= wide else side for side in (shape[0], prod(shape[1:]) + 1))


def check_kept(structure: str, space: ParamSpace, options: Mapping[str, Any]) -> None:
    """Refuses a structure whose curvature does not fit the memory budget, or the machine."""
    needed = kept_bytes(structure, space, options)
    if needed is not None and structure not in ("full", "lowrank"):  # whose estimators know more, and refuse themselves
        remedy = "Use diag, fewer weights (a sub-network, the last layer), or a larger memory_budget."
        what = f"a {structure} curvature of {space.size:,} weights and its decomposition"
        check_memory(needed, what, remedy, space.device)
