"""Two processes, with gloo, fit one posterior: what each of them checks is in ranks.py beside this file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lapwing import Laplace
from lapwing.errors import DataError
from lapwing.linalg import Diagonal, Dual
from lapwing.linalg.addends import with_addends

ROOT = Path(__file__).parents[2]
CASES = 15
TIMEOUT = 240
"""Seconds, on a machine that does much else; alone they take about ten."""


def test_two_processes_fit_what_one_does(tmp_path: Path) -> None:
    """Many cases in one start: a process takes three seconds to begin. The last case kills rank 1."""
    script = Path(__file__).with_name("ranks.py")
    surroundings = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error::UserWarning:lapwing", str(script)]
    running = [
        subprocess.Popen(
            [*command, str(rank), "2", str(tmp_path / "store"), str(tmp_path / f"rank{rank}.json")],
            env=surroundings,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        said = [each.communicate(timeout=TIMEOUT)[0] for each in running]
    finally:
        for each in running:
            each.kill()
    for rank in (0, 1):
        file = tmp_path / f"rank{rank}.json"
        assert file.exists(), said[rank]
        found = json.loads(file.read_text())
        failed = {name: text for name, text in found.items() if isinstance(text, str)}
        assert not failed, f"rank {rank}: " + "\n".join(f"{name}\n{text}" for name, text in failed.items())
        assert len(found) == CASES - rank, f"rank {rank} stopped after {list(found)[-1:]}:\n{said[rank]}"
    assert [each.returncode for each in running] == [0, -signal.SIGKILL]


def points() -> TensorDataset:
    return TensorDataset(torch.randn(7, 2), torch.randn(7, 1))


def test_a_shard_without_a_process_group_is_refused() -> None:
    la = Laplace(torch.nn.Linear(2, 1), "regression", "all", "full")
    with pytest.raises(DataError, match=r"1 of 2 shards.*init_process_group"):
        la.fit(DataLoader(points(), 2, sampler=DistributedSampler(points(), 2, 0)))
    la.fit(DataLoader(points(), 2, sampler=DistributedSampler(points(), 1, 0)))
    assert la.n_data == 7
    with pytest.raises(DataError, match=r"sees a shard of 2; expected all data"):
        la.linear_mode(DataLoader(points(), 2, sampler=DistributedSampler(points(), 2, 0)))


def test_a_wrapped_model_is_unwrapped_in_one_process(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", f"file://{tmp_path / 'store'}", None, 1, 0)
    try:
        inside = torch.nn.Linear(2, 1)
        la = Laplace(DistributedDataParallel(inside), "regression", "all", "auto")
        assert la.model is inside
        data = points()
        la.fit(DataLoader(data, 2, sampler=DistributedSampler(data)))
        alone = Laplace(inside, "regression", "all", "full")
        alone.fit([data.tensors])
        torch.testing.assert_close(la.H, alone.H)
        assert la.n_data == 7
    finally:
        torch.distributed.destroy_process_group()


def test_what_adds_up() -> None:
    doubled = with_addends(Diagonal(torch.ones(2)), lambda values: 2 * values)
    assert doubled is not None
    assert torch.equal(doubled.diagonal(), torch.full((2,), 2.0))
    la = Laplace(torch.nn.Linear(2, 1), "regression", "all", "gp")
    la.fit([points().tensors])
    assert isinstance(la.curvature, Dual)
    assert with_addends(la.curvature, lambda values: values) is None
