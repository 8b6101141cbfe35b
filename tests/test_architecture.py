"""docs/architecture.md speaks of files that are there, and its walk names each of them once."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PATH = re.compile(r"`([a-z_/]+(?:\.py|/))`")


def test_every_file_is_there() -> None:
    named = PATH.findall(TEXT)
    assert len(named) > 50
    missing = [name for name in named if not (ROOT / "src" / "lapwing" / name).exists() and not (ROOT / name).exists()]
    assert not missing


def test_the_walk_names_each_file_once() -> None:
    start, end = TEXT.index("## One batch"), TEXT.index("## What a change touches")
    named = PATH.findall(TEXT[start:end])
    assert sorted(named) == sorted(set(named))


def test_every_package_is_in_the_picture() -> None:
    picture = (ROOT / "docs" / "images" / "house.svg").read_text(encoding="utf-8")
    packages = [path.name for path in (ROOT / "src" / "lapwing").iterdir() if (path / "__init__.py").exists()]
    assert len(packages) > 10
    assert all(f">{name}<" in picture for name in packages)
