"""Fits that take a tenth of their time: for a hundred rows, most of it goes to the search for the posterior's scale.

Tests that are marked slow search the whole grid of scales.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import jaxtyping
import pytest

from lapwing.laplace import calibration


def coarser(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fifth factor of the grid, 1 among them."""
    for name in ("COVARIANCE", "NOISE"):
        monkeypatch.setattr(calibration, name, getattr(calibration, name)[::5])


@pytest.fixture(autouse=True)
def _few_scales(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("slow") is None:
        coarser(monkeypatch)


@contextmanager
def _quick() -> Iterator[None]:
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        with pytest.MonkeyPatch.context() as monkeypatch:
            coarser(monkeypatch)
            yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session")
def quick() -> Callable[[], AbstractContextManager[None]]:
    """For fits that a module shares: a coarser search, and no check of shapes, which fits inside tests have."""
    return _quick
