"""A coarser search for the scale of a posterior: of a fit to a hundred rows it would take nine tenths of the time.

Tests that are marked slow, and fixtures that a module shares, search the whole grid.
"""

from __future__ import annotations

import pytest

from lapwing.laplace import calibration


@pytest.fixture(autouse=True)
def _few_scales(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fifth factor, 1 among them."""
    if request.node.get_closest_marker("slow") is None:
        for name in ("COVARIANCE", "NOISE"):
            monkeypatch.setattr(calibration, name, getattr(calibration, name)[::5])
