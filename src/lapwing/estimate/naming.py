"""Estimators by the names of structures and sources, for those who choose by name: `by_name("kron", "mc")`.

    source   exact (GGN), fisher, mc (sampled Fisher), projection (randomly projected GGN), recursive (propagated in
             expectation), empirical

Which structures there are is told by the table of them, `laplace.structures`, which enters every row here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lapwing.errors import OptionError
from lapwing.estimate.cotangents import DISTRIBUTIONS, Cotangents, empirical, exact, fisher, monte_carlo, projections
from lapwing.linalg import Curvature

Estimator = Callable[..., Curvature]
"""(tangent, likelihood, batches, generator=...) -> Curvature: any function of `lapwing.estimate`."""

SOURCES = ("exact", "fisher", "mc", "projection", "recursive", "empirical")
"""Where the curvature at the outputs comes from; the exact Hessian, which has no such place, is not among them."""

_ESTIMATORS: dict[str, tuple[Estimator, Estimator | None]] = {}


def register(name: str, estimator: Estimator, recursive: Estimator | None) -> None:
    """A structure's estimator, and the one that propagates expectations if there is one."""
    _ESTIMATORS[name] = estimator, recursive


def structures() -> list[str]:
    """The names there are."""
    return list(_ESTIMATORS)


def by_name(structure: str, source: str = "exact", draws: int = 1, **options: Any) -> Estimator:
    """The estimator of a structure from a source; sources that draw do so `draws` times for every data point."""
    _choose(structure, structures(), "structure")
    _choose(source, SOURCES, "estimator")
    estimator, recursive = _ESTIMATORS[structure]
    if source == "recursive":
        if recursive is None:
            others = [name for name, (_, other) in _ESTIMATORS.items() if other is not None]
            raise OptionError(
                f"the recursive estimator has no {structure!r} structure; expected one of {others}. Use another "
                "estimator, or that structure."
            )
        return partial(recursive, **options)
    return partial(estimator, cotangents=cotangents_of(source, draws), **options)


def cotangents_of(source: str, draws: int = 1, distribution: str = DISTRIBUTIONS[0]) -> Cotangents:
    """What is pulled back through the network for a source."""
    if source == "mc":
        return monte_carlo(draws)
    if source == "projection":
        return projections(draws, distribution)
    return {"fisher": fisher, "empirical": empirical}.get(source, exact)


def _choose(given: str, known: Sequence[str], what: str) -> None:
    if given not in known:
        raise OptionError(f"unknown {what} {given!r}; expected one of {list(known)}.")
