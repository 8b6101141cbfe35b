"""Fits that a module of tests shares."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import jaxtyping
import pytest


@contextmanager
def _quick() -> Iterator[None]:
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session")
def quick() -> Callable[[], AbstractContextManager[None]]:
    """For fits that a module shares: no check of shapes, which fits inside tests have."""
    return _quick
