"""Shared by the benchmarks: networks, interleaved timing, and a JSON file that says where the figures come from."""

from __future__ import annotations

import copy
import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "experiments"))
from provenance import committed, machine

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


class Batches(list):
    """A list of (x, y) that also answers `.dataset`, which laplace-torch asks of a loader."""

    dataset: list


def batches(points: int, size: int = 100) -> Batches:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(points, 1, 28, 28, generator=generator)
    y = torch.randint(10, (points,), generator=generator)
    data = Batches(zip(x.split(size), y.split(size), strict=True))
    data.dataset = [None] * points
    return data


def gradient_epoch(model: nn.Module, data: Batches) -> None:
    """Forward, loss and backward of every batch: the unit of cost."""
    parameters = list(model.parameters())
    for x, y in data:
        loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
        torch.autograd.grad(loss, parameters)


def peer_backends() -> dict[str, type]:
    """Backends of laplace-torch that can be imported; empty where it is not installed."""
    found = {}
    for name, module, kind in (
        ("curvlinops", "laplace.curvature.curvlinops", "CurvlinopsGGN"),
        ("backpack", "laplace.curvature.backpack", "BackPackGGN"),
        ("asdl", "laplace.curvature.asdl", "AsdlGGN"),
    ):
        try:
            found[name] = getattr(importlib.import_module(module), kind)
        except ImportError as error:
            print(f"without peer {name}: {error}")
    return found


def peer_fit(model: nn.Module, data: Batches, structure: str, backend: type) -> Any:
    laplace = importlib.import_module("laplace")
    fitted = laplace.Laplace(
        copy.deepcopy(model), "classification", subset_of_weights="all", hessian_structure=structure, backend=backend
    )
    fitted.fit(data)
    return fitted


def best(contenders: dict[str, Callable[[], object]], rounds: int, warm: bool = True) -> dict[str, float]:
    """Best time of each, in seconds; contenders take turns, so that noise of the machine meets all of them."""
    if warm:
        for run in contenders.values():
            run()
    times = dict.fromkeys(contenders, float("inf"))
    for _ in range(rounds):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            times[name] = min(times[name], time.perf_counter() - start)
    return times


def report(where: dict[str, Any], rows: list[dict], folder: Path = RESULTS) -> None:
    """Prints a table and writes <name>.json in `folder`; `where` is the `context` of the start."""
    print(f"{'network':8} {'work':20} {'against':16} {'ms':>9} {'other ms':>10} {'ratio':>9}   bar")
    for row in rows:
        ratio, bar = row["ratio"], row["bar"]
        factor = f"{ratio:8.2f}x" if ratio >= 1 else f"1/{1 / ratio:.1f}".rjust(9)
        limit = "" if bar is None else f"{'<=' if ratio <= bar else 'ABOVE'} {bar if bar >= 1 else f'1/{1 / bar:.3g}'}"
        times = f"{1e3 * row['seconds']:9.1f} {1e3 * row['other_seconds']:10.1f}"
        print(f"{row['network']:8} {row['work']:20} {row['against']:16} {times} {factor}   {limit}")
    write(where, {"rows": rows}, folder)


def write(where: dict[str, Any], figures: dict[str, Any], folder: Path = RESULTS) -> None:
    """<name>.json in `folder`: where figures come from, and the figures."""
    folder.mkdir(exist_ok=True)
    text = json.dumps(where | {"machine": machine()} | figures, indent=1)
    (folder / f"{where['benchmark']}.json").write_text(text + "\n")


def context(name: str) -> dict[str, Any]:
    """Where figures come from, to be asked before anything is measured: the commit, and whether all was as in it."""
    outputs = [f"benchmarks/results/{name}.{kind}" for kind in ("json", "png")]
    return {"benchmark": name, **committed(outputs), "seed": 0}
