"""Settings of the whole suite: one thread (or LAPWING_TEST_THREADS), and no state that one test leaves to the next.

Shapes are checked because `pyproject.toml` passes `--jaxtyping-packages`, which instruments `lapwing` before this
file is read; `shape_check.py` looks at arguments and values as jaxtyping would. To check every call takes long, and the
hundredth case of a test meets the annotations of its first: the check is on for tests without cases, for the first two
cases of the others and every sixteenth after them, and for all with `--shapes=all`. Tests of tables, reports and the
command line run the library whole, many calls of the same: every fourth of them is checked, and none that is marked
`long`. Cases marked `mistyped` are never checked: they are about what the library itself says.

Randomness that a test is about arrives as a `torch.Generator` with its seed in the test; the global generator is reset
before each test only because `torch.nn` initialises weights from it.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterator

import jaxtyping
import pytest
import torch

import shape_check

# tensors of a few entries: on two busy cores, two threads took four times as long as one
torch.set_num_threads(int(os.environ.get("LAPWING_TEST_THREADS", "1")))


jaxtyping.jaxtyped = shape_check.jaxtyped  # pyright: ignore[reportAttributeAccessIssue]
collect_ignore = ["shape_check.py"]  # which has to be imported once, before that

SHAPES = pytest.StashKey[bool]()
"""Whether the shapes of a test are checked."""


WHOLE_RUNS = ("cli", "reporting", "tables")
"""Folders of tests that run the library whole."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shapes", choices=("some", "all"), default="some", help="tests whose every call is checked")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """Modules and cases stay to the end: to look for garbage among them took a quarter of the time of collecting."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose by place among the cases of a test, so that every worker, and every run, chooses the same.

    Some of scikit-learn's checks repeat others, and are slow.
    """
    every, cases = config.getoption("shapes") == "all", Counter[str]()
    for item in items:
        test = item.nodeid.partition("[")[0]
        if "readonly_memmap" in item.nodeid or "check_regressor_data_not_an_array" in item.nodeid:
            item.add_marker(pytest.mark.slow)
        folder = item.path.parent.name
        some = cases[test] < 2 or cases[test] % 16 == 0
        if folder in WHOLE_RUNS:
            some = some and cases[folder] % 4 == 0
        some = every or (some and item.get_closest_marker("long") is None)
        item.stash[SHAPES] = some and item.get_closest_marker("mistyped") is None
        cases.update((test, folder))


@pytest.fixture
def generator() -> torch.Generator:
    """A fresh CPU generator with a fixed seed."""
    return torch.Generator().manual_seed(0)


@pytest.fixture(autouse=True)
def _global_state(request: pytest.FixtureRequest) -> Iterator[None]:
    """Start every test from the same global generator; give the default dtype and the check of shapes back after it.

    The generator itself, as `torch.manual_seed` formats the stack to remember who asked, for each device that may come.
    """
    dtype = torch.get_default_dtype()
    torch.default_generator.manual_seed(0)
    jaxtyping.config.update("jaxtyping_disable", not request.node.stash[SHAPES])
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
    torch.set_default_dtype(dtype)
