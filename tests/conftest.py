"""Settings of the whole suite: one thread, and no state that one test leaves to the next.

Shapes are checked because `pyproject.toml` passes `--jaxtyping-packages`, which instruments `lapwing` before this
file is read. Randomness that a test is about arrives as a `torch.Generator` with its seed in the test; the global
generator is reset before each test only because `torch.nn` initialises weights from it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)  # tensors of a few entries: on two busy cores, two threads took four times as long


@pytest.fixture
def generator() -> torch.Generator:
    """A fresh CPU generator with a fixed seed."""
    return torch.Generator().manual_seed(0)


@pytest.fixture(autouse=True)
def _global_state() -> Iterator[None]:
    """Start every test from the same global generator, and give the default dtype back after it."""
    dtype = torch.get_default_dtype()
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(dtype)
