"""What pyproject.toml claims: every lowest version is the one that `make lowest` installs, every extra is imported."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
CLAIMS = [*PROJECT["dependencies"], *(each for extra in EXTRAS.values() for each in extra)]
TOOLS = {"ruff", "basedpyright", "pytest-xdist"}
"""Run, and not imported."""
BEHIND = {"pyarrow": "parquet"}
"""Used by another package, for what is asked of that by this word."""


def pinned(file: str) -> dict[str, tuple[int, ...]]:
    lines = [line.split("==") for line in (ROOT / file).read_text().splitlines() if "==" in line and line[0] != "#"]
    return {name: version(text) for name, text in lines}


def version(text: str) -> tuple[int, ...]:
    """Without zeros at the end, which mean nothing."""
    return tuple(int(part) for part in re.sub(r"(\.0)+$", "", text).split("."))


def claims() -> dict[str, tuple[int, ...]]:
    found = [claim.split(">=") for claim in CLAIMS if ">=" in claim]
    return {name: version(text) for name, text in found}


def test_the_lowest_versions_are_installed_by_make_lowest() -> None:
    pins = pinned("constraints-lowest.txt")
    assert set(pins) - {"click", "pyparsing"} == set(claims()) - {"ruff", "basedpyright"}
    for name, lowest in claims().items():
        assert pins.get(name, lowest) == lowest, f"pyproject.toml claims {name} {lowest}, make lowest has {pins[name]}"


def test_the_readme_asks_for_the_versions_that_pyproject_claims() -> None:
    python, torch = re.findall(r"(?:Python|torch) ([\d.]+) or later", (ROOT / "README.md").read_text())
    assert PROJECT["requires-python"] == f">={python}"
    assert claims()["torch"] == version(torch)


def test_the_pinned_versions_are_within_the_claims() -> None:
    pins = pinned("constraints.txt")
    for name, lowest in claims().items():
        assert pins[name] >= lowest, f"{name}: constraints.txt has {pins[name]}, below the claim {lowest}"


@cache
def modules_of() -> dict[str, list[str]]:
    """Names of modules by the package that brings them."""
    found: dict[str, list[str]] = {}
    for module, owners in packages_distributions().items():
        for owner in owners:
            found.setdefault(owner, []).append(module)
    return found


@cache
def text_of(file: Path) -> str:
    return file.read_text()


@pytest.mark.parametrize("name", sorted(set(claims()) - TOOLS))
def test_every_package_that_is_asked_for_is_imported(name: str) -> None:
    names = "|".join(map(re.escape, [*modules_of().get(name, []), name.replace("-", "_")]))
    wanted = BEHIND.get(name) or rf"^\s*(import|from) ({names})\b|--jaxtyping-packages=.*\b({names})\."
    files = [*ROOT.glob("src/**/*.py")]
    if not any(claim.startswith(f"{name}>=") for claim in PROJECT["dependencies"]):  # the library itself needs those
        files += [*ROOT.glob("tests/**/*.py"), ROOT / "pyproject.toml"]
    assert any(re.search(wanted, text_of(file), re.MULTILINE) for file in files), f"nobody imports {name}"
