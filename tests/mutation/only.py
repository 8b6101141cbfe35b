"""A pytest plugin: of all tests that were collected, only those that a file lists, and in its order."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--only", required=True, help="a file with one name of a test in each line")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    names = Path(str(config.getoption("only"))).read_text(encoding="utf-8").splitlines()
    place = {name: i for i, name in enumerate(names)}
    items[:] = sorted((item for item in items if item.nodeid in place), key=lambda item: place[item.nodeid])


def pytest_collection_finish(session: pytest.Session) -> None:
    file = getattr(sys.modules.get("lapwing"), "__file__", None)
    if file is not None and session.config.rootpath not in Path(file).parents:
        pytest.exit(f"lapwing comes from {file}; expected the copy in {session.config.rootpath}.", returncode=3)
