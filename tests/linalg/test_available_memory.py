"""What does not fit the machine is refused before anything is computed, with what fits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from lapwing import Laplace
from lapwing.errors import CurvatureError
from lapwing.linalg import budget
from lapwing.linalg.budget import available_memory, check_memory

CPU = torch.device("cpu")


def test_the_system_says_what_is_free() -> None:
    free = available_memory(CPU)
    if not Path("/proc/meminfo").exists():
        assert free is None
        return
    assert free is not None
    assert 2**20 < free < 2**50
    assert available_memory(torch.device("meta")) is None


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"meminfo": "MemTotal: 99 kB\nMemAvailable: 7 kB\n"}, 7 * 1024),
        ({"meminfo": "MemAvailable: 7 kB", "memory.max": "max", "memory.current": "5"}, 7 * 1024),
        ({"meminfo": "MemAvailable: 7 kB", "memory.max": "4000", "memory.current": "1000"}, 3000),
        (
            {
                "meminfo": "MemAvailable: 7 kB",
                "memory.max": "4000",
                "memory.current": "1000",
                "memory.stat": "anon 600\ninactive_file 300\n",
            },
            3300,
        ),
        ({"meminfo": "MemAvailable: 7 kB", "memory.max": "90000", "memory.current": "1000"}, 7 * 1024),
        ({"meminfo": "nothing of the kind"}, None),
        ({}, None),
    ],
)
def test_a_containers_limit_counts(
    files: dict[str, str], expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(budget, "Path", lambda path: tmp_path / ("meminfo" if "meminfo" in path else ""))
    assert available_memory(CPU) == expected


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "available_memory", lambda device: 1000)
    check_memory(1000, "something", "Use less.", CPU)
    with pytest.raises(
        CurvatureError, match=r"^something: .* of memory; expected at most .*, what is free\. Use less\.$"
    ):
        check_memory(1001, "something", "Use less.", CPU)
    monkeypatch.setattr(budget, "available_memory", lambda device: None)
    check_memory(2**60, "something", "Use less.", CPU)


@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_a_full_matrix_of_millions_of_weights(subset: str) -> None:
    """100 TB: an allocation that fails, or that the system kills the process for."""
    model = nn.Sequential(nn.Linear(2, 2000), nn.Tanh(), nn.Linear(2000, 2500))
    x, y = torch.randn(2, 2), torch.tensor([0, 1])
    la = Laplace(model, "classification", subset, "full")
    with pytest.raises(CurvatureError, match=r"a full matrix of 5,0.* weights and its factor: 18[67],.* GiB.*Use kron"):
        la.fit([(x, y)])


def test_dense_blocks_and_eigenvectors_that_do_not_fit() -> None:
    model = nn.Sequential(nn.Linear(2, 2000), nn.Tanh(), nn.Linear(2000, 2500))
    x, y = torch.randn(2, 2), torch.tensor([0, 1])
    with pytest.raises(CurvatureError, match=r"dense blocks of 5,008,500 weights and their factors: .* Use kron"):
        Laplace(model, "classification", "all", "blocks").fit([(x, y)])
    with pytest.raises(CurvatureError, match=r"1000000 eigenvectors of 5,008,500 weights.* Use (rank=|kron)"):
        Laplace(model, "classification", "all", "lowrank", rank=1_000_000).fit([(x, y)])
