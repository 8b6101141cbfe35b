"""The toy of the source: inputs uniform in [-4, 4], targets N(x^3, 3^2). numpy only, as hmc.py has no torch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def truth(x: Array) -> Array:
    return x**3


def grid(config: dict[str, Any]) -> Array:
    return np.linspace(-config["extent"], config["extent"], config["grid"])


def draws(config: dict[str, Any], seed: int) -> dict[str, tuple[Array, Array]]:
    """Training, validation and test points of a seed; validation and test are draws of their own."""
    generator = np.random.default_rng(seed)
    found = {}
    for name in ("points", "validation", "test"):
        x = generator.uniform(-config["edge"], config["edge"], config[name])
        found[name] = x, truth(x) + config["noise"] * generator.standard_normal(len(x))
    return found
