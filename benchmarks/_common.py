"""Shared by the benchmarks: networks, interleaved timing, and a JSON file that says where the figures come from."""

from __future__ import annotations

import json
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

RESULTS = Path(__file__).parent / "results"


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def batches(points: int, size: int = 100) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(points, 1, 28, 28, generator=generator)
    y = torch.randint(10, (points,), generator=generator)
    return list(zip(x.split(size), y.split(size), strict=True))


def gradient_epoch(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> None:
    """Forward, loss and backward of every batch: the unit of cost."""
    parameters = list(model.parameters())
    for x, y in data:
        loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
        torch.autograd.grad(loss, parameters)


def best(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Best time of each, in seconds; contenders take turns, so that noise of the machine meets all of them."""
    for run in contenders.values():
        run()
    times = dict.fromkeys(contenders, float("inf"))
    for _ in range(rounds):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            times[name] = min(times[name], time.perf_counter() - start)
    return times


def write(name: str, rows: list[dict]) -> None:
    RESULTS.mkdir(exist_ok=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    context = {
        "commit": commit,
        "seed": 0,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(context | {"rows": rows}, indent=1) + "\n")
