"""Scripts written for laplace-torch 0.3 run with lapwing after changing the import, and give its figures at 1e-4.

The figures are stored (`recorded/`, made by `record.py`); where laplace-torch itself can be run, they are also made
afresh. Draws are compared within four standard errors. What laplace-torch gets wrong is not among the figures:

    D1   the gradient of the Kronecker evidence in sigma: the script keeps sigma fixed there
    D7   the evidence of the function-space posterior: the script only predicts
    D8   `generator` in `__call__`: the script compares averages
    D9   draws of linearised functions share their noise between inputs: the script compares each input by itself
    D11  `functional_samples(pred_type="nn")` of the last layer raises: not called there
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TOLERANCE = 1e-4
FIGURES = ("regression", "classification")


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _recorded(script: str) -> dict[str, Any]:
    return json.loads((HERE / "recorded" / f"{script}.json").read_text())["figures"]


@pytest.fixture(scope="module")
def answers() -> Iterator[dict[str, Any]]:
    """What each script says with lapwing; run once, in this process, so that shapes are checked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE / "scripts"))
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            yield {name: _module(HERE / "scripts" / f"{name}.py").main("lapwing") for name in (*FIGURES, "surface")}
        finally:
            torch.set_default_dtype(dtype)


def _peers() -> Path | None:
    """An interpreter that has laplace-torch, if there is one."""
    named = os.environ.get("LAPWING_PEERS")
    places = [Path(named)] if named else [ROOT / ".venv-peers/bin/python", ROOT.parent / ".venv-peers/bin/python"]
    return next((place for place in places if place.exists()), None)


def _is_draws(section: str) -> bool:
    return section.startswith("draws")


def _close(found: Any, expected: Any, where: str) -> None:
    """Nested lists of numbers, relative to the largest of each tensor: entries that cancel to zero have no digits."""
    left, right = torch.tensor(found, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64)
    assert left.shape == right.shape, f"{where}: shape {tuple(left.shape)}, laplace-torch {tuple(right.shape)}"
    scale = right.abs().max().clamp_min(1e-12)
    worst = float(((left - right).abs() / torch.maximum(right.abs(), 1e-2 * scale)).max())
    assert worst < TOLERANCE, f"{where}: relative difference {worst:.2e}\nlapwing {found}\nlaplace-torch {expected}"


def _within(found: dict[str, Any], expected: dict[str, Any], where: str) -> None:
    """Two averages of draws, each with its standard error."""
    left, right = (torch.tensor(answer["mean"], dtype=torch.float64) for answer in (found, expected))
    assert left.shape == right.shape, f"{where}: shape {tuple(left.shape)}, laplace-torch {tuple(right.shape)}"
    error = torch.hypot(*(torch.tensor(answer["error"], dtype=torch.float64) for answer in (found, expected)))
    away = (left - right).abs() / error.clamp_min(1e-12)
    away = torch.where((left - right).abs() < 1e-9, 0.0, away)  # entries that do not vary at all
    assert float(away.max()) < 4, f"{where}: {float(away.max()):.1f} standard errors apart"
    if where.endswith((".weights", ".glm")):  # Gaussian draws; probabilities near 0 and 1 have no such reliable spread
        ratio = torch.tensor(found["error"], dtype=torch.float64) / torch.tensor(expected["error"], dtype=torch.float64)
        ratio = ratio[torch.isfinite(ratio)]
        assert bool(((ratio - 1).abs() < 0.1).all()), f"{where}: spread differs by {ratio.min()} to {ratio.max()}"


def _compare(found: dict[str, Any], expected: dict[str, Any], section: str) -> None:
    for name, value in expected.items():
        if (section, name) in OTHERWISE:
            continue
        (_within if _is_draws(section) else _close)(found[name], value, f"{section}.{name}")


OTHERWISE = {("tempered", "log_likelihood"), ("tempered", "log_marginal_likelihood")}
"""A temperature divides the whole log-likelihood; laplace-torch divides its squares, but not its normaliser."""

SECTIONS = [(script, section) for script in FIGURES for section in _recorded(script)]


@pytest.mark.parametrize(("script", "section"), SECTIONS, ids=[" ".join(pair) for pair in SECTIONS])
def test_a_script_gives_the_figures_of_laplace_torch(answers: dict[str, Any], script: str, section: str) -> None:
    _compare(answers[script][section], _recorded(script)[section], section)


@pytest.mark.parametrize("name", ["log_likelihood", "log_marginal_likelihood"])
def test_a_temperature_divides_the_whole_log_likelihood(answers: dict[str, Any], name: str) -> None:
    targets, sigma, temperature = 28, 0.3, 2.0
    normaliser = -targets * math.log(sigma * math.sqrt(2 * math.pi))
    expected = _recorded("regression")["tempered"][name] - normaliser * (1 - 1 / temperature)
    assert answers["regression"]["tempered"][name] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("script", FIGURES)
def test_a_posterior_restored_from_its_state_dict_is_the_same(answers: dict[str, Any], script: str) -> None:
    answer = answers[script]
    restored = [section for section in answer if section.endswith("_restored")]
    assert restored
    for section in restored:
        original = answer[section.replace("_restored", "" if script == "classification" else "_tuned")]
        for name, value in answer[section].items():
            assert torch.allclose(torch.tensor(value), torch.tensor(original[name]), rtol=1e-12, atol=1e-14), name


# -- shapes ------------------------------------------------------------------------------------------------------------


NOT_TAKEN_OVER = {
    "functional_variance_fast",
    "gp_kernel_prior_variance",
    "predictive_moments",
    "predictive_moments joint",
}
"""Parts of laplace-torch's machinery: scripts have `la(x, diagonal_output=True)` and `la(x)` for them."""


def _same(found: Any, expected: Any) -> bool:
    if isinstance(expected, dict) and "type" in expected:  # an object of its own there
        return True
    number = isinstance(expected, int | float) and not isinstance(expected, bool)
    return found == expected or (number and found == {"shape": []})


@pytest.mark.parametrize("place", list(_recorded("surface")))
def test_methods_and_attributes_return_the_shapes_of_laplace_torch(answers: dict[str, Any], place: str) -> None:
    found, expected = answers["surface"][place], dict(_recorded("surface")[place])
    if place.startswith("Functional"):
        assert found["n_data"] == 20  # what was seen, not what the loader has
        del expected["n_data"]
    wanted = {name: value for name, value in expected.items() if name not in NOT_TAKEN_OVER}
    missing = sorted(set(wanted) - set(found))
    assert not missing, f"{place} lacks or raises in {missing}"
    other = {name: (found[name], value) for name, value in wanted.items() if not _same(found[name], value)}
    assert not other, f"{place}: (lapwing, laplace-torch) = {other}"


# -- live --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("backend", [None, "BackPackGGN"])
@pytest.mark.parametrize("script", FIGURES)
def test_a_live_run_of_laplace_torch_agrees(answers: dict[str, Any], script: str, backend: str | None) -> None:
    python = _peers()
    if python is None:
        pytest.skip("no interpreter with laplace-torch: set LAPWING_PEERS, or run `make peers`")
    options = [backend] if backend else []
    live = _module(HERE / "record.py").run(python, script, "laplace", *options)
    for section, expected in live.items():
        _compare(answers[script][section], expected, section)
