"""Cost and memory of every structure against the number of weights P, of data points N and of outputs C.

An MLP of two hidden layers on random data. One measurement is a process of its own: the time of a gradient over all
data (the unit), of a fit, and of the first linearised prediction of 8 inputs, decompositions included, each the best of
up to three; and the peak of resident memory over what was there before the first fit (Linux). Times are those of the
processor, in one thread: what a machine gives to others meanwhile does not count. Sizes that would take longer than
`--limit` seconds or more memory than `--memory` GB, by the growth so far, are left out, and said to be; what is refused
says why.

Exponents are slopes of log cost against log size over the sizes above the smallest one that takes a hundredth of the
largest: below it, time is that of starting operations.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from math import log
from pathlib import Path
from typing import Any

import torch
from _common import RESULTS, context, write
from torch import Tensor, nn

from lapwing import Laplace, estimate
from lapwing.errors import LapwingError
from lapwing.likelihoods import Categorical
from lapwing.tangent import Tangent

AXES: dict[str, list[int]] = {
    "weights": [10**3, 10**4, 10**5, 10**6, 10**7, 10**8],
    "points": [64, 256, 1024, 4096],
    "outputs": [2, 8, 32, 128],
}
BASE = {"weights": 10**5, "points": 128, "outputs": 10}
FULL_WEIGHTS = 3000
"""A full matrix of the base's weights would take 75 GB: its cost against N and C is that of fewer."""
STRUCTURES = {
    "diag": ("all", "diag", {}),
    "kron": ("all", "kron", {"estimator": "exact"}),
    "kron, sampled": ("all", "kron", {"estimator": "mc"}),
    "ekfac": ("all", "ekfac", {}),
    "full": ("all", "full", {}),
    "rank 20": ("all", "lowrank", {"rank": 20}),
    "gp": ("all", "gp", {}),
    "matrix-free": ("all", "matrix_free", {}),
    "last layer, kron": ("last_layer", "kron", {}),
    "1000 weights, full": ("subnetwork", "full", {}),
    "sketched": ("all", "sketched", {}),
}
ROUNDS, QUICK = 3, 4.0
"""A measurement is the best of so many, each with a fit of its own, as long as it began within so many seconds."""
INPUTS = 32
PREDICTED = 8


def network(weights: int, outputs: int) -> nn.Module:
    """About so many weights: w^2 + (INPUTS + outputs + 3) w = P."""
    linear = INPUTS + outputs + 3
    width = max(2, round((-linear + (linear**2 + 4 * weights) ** 0.5) / 2))
    return nn.Sequential(
        nn.Linear(INPUTS, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, outputs)
    )


def data(points: int, outputs: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(points, INPUTS, generator=generator)
    y = torch.randint(outputs, (points,), generator=generator)
    return list(zip(x.split(128), y.split(128), strict=True))


def gradient(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
    for x, y in batches:
        torch.autograd.grad(nn.functional.cross_entropy(model(x), y, reduction="sum"), list(model.parameters()))


def fitted(name: str, model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> Any:
    """Something that predicts: a posterior, or a score."""
    subset, structure, options = STRUCTURES[name]
    if structure == "sketched":
        return estimate.sketched(Tangent(model), Categorical(), batches, steps=20, rows=2000)
    if subset == "subnetwork":
        size = sum(p.numel() for p in model.parameters())
        chosen = torch.randperm(size, generator=torch.Generator().manual_seed(0))[:1000].sort().values
        options = options | {"subnetwork_indices": chosen}
    la = Laplace(model, "classification", subset, structure, **options)
    la.fit(batches)
    return la


def resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))


def child(name: str, sizes: dict[str, int], threads: int) -> None:
    """Prints one measurement; a refusal is one too."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    small = data(4, 2)
    fitted(name if name != "1000 weights, full" else "diag", network(1000, 2), small)(small[0][0])  # libraries
    model, batches = network(sizes["weights"], sizes["outputs"]), data(sizes["points"], sizes["outputs"])
    x = batches[0][0][:PREDICTED]
    times = []
    for _ in range(3):
        start = time.process_time()
        gradient(model, batches)
        times.append(time.process_time() - start)
    found: dict[str, Any] = {"size": sum(p.numel() for p in model.parameters()), "gradient": min(times)}
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    began = time.process_time()
    found["rounds"] = 0
    while found["rounds"] < ROUNDS and time.process_time() - began < QUICK:
        try:
            start = time.process_time()
            predict = fitted(name, model, batches)
            middle = time.process_time()
            predict(x)
        except LapwingError as error:
            found["refused"] = str(error).split("; ")[0]
            break
        for key, seconds in (("fit", middle - start), ("prediction", time.process_time() - middle)):
            found[key] = min(found.get(key, float("inf")), seconds)
        found.setdefault("bytes", resident("VmHWM") - before)
        del predict
        found["rounds"] += 1
    print(json.dumps(found))


def expected(rows: list[dict[str, Any]], value: int, keys: tuple[str, ...]) -> float:
    """What the next size may take: by the growth between the last two, from linear to cubic; after one, by 1.5."""
    sizes, costs = [row["at"] for row in rows[-2:]], [sum(row[key] for key in keys) for row in rows[-2:]]
    power = 1.5
    if len(rows) > 1 and min(costs) > 0:
        power = min(3.0, max(1.0, log(costs[1] / costs[0]) / log(sizes[1] / sizes[0])))
    return costs[-1] * (value / sizes[-1]) ** power


def measured(name: str, axis: str, threads: int, limit: float, memory: float, largest: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for value in AXES[axis]:
        if axis == "weights" and value > largest:
            break
        if rows:
            seconds = expected(rows, value, ("fit", "prediction"))
            if seconds > limit or expected(rows, value, ("bytes",)) > memory:
                rows.append({"at": value, "left_out": "time" if seconds > limit else "memory"})
                print(f"{axis:8} {value:>11,} {name:20} left out: {rows[-1]['left_out']}", flush=True)
                break
        sizes = json.dumps(BASE | ({"weights": FULL_WEIGHTS} if name == "full" else {}) | {axis: value})
        command = [sys.executable, __file__, "--child", name, sizes, "--threads", str(threads)]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=2 * limit)
        except subprocess.TimeoutExpired:
            rows.append({"at": value, "left_out": f"time: more than {2 * limit:.0f} s"})
            print(f"{axis:8} {value:>11,} {name:20} left out: more than {2 * limit:.0f} s", flush=True)
            break
        if ended.returncode:
            said = ended.stderr.strip().splitlines()[-1:] or [f"ended with {ended.returncode}"]
            rows.append({"at": value, "failed": said[0]})
            print(f"{axis:8} {value:>11,} {name:20} failed: {said[0]}", flush=True)
            break
        row = {"at": value, **json.loads(ended.stdout)}
        rows.append(row)
        if "refused" in row:
            print(f"{axis:8} {value:>11,} {name:20} refused: {row['refused']}", flush=True)
            break
        epochs = f"{row['fit'] / row['gradient']:8.1f} gradients"
        line = f"{row['fit']:8.2f} s {epochs} {row['prediction']:8.2f} s {row['bytes'] / 1e6:9.0f} MB"
        print(f"{axis:8} {value:>11,} {name:20} {line}", flush=True)
    return rows


def exponent(rows: list[dict[str, Any]], key: str) -> float | None:
    """The slope over the sizes that matter; None with fewer than two of them."""
    pairs = [(row["at"], row[key]) for row in rows if row.get(key, 0) > 0]
    most = max((value for _, value in pairs), default=0.0)
    pairs = [(log(at), log(value)) for at, value in pairs if value > most / 100]
    if len(pairs) < 2:
        return None
    mx, my = (sum(pair[i] for pair in pairs) / len(pairs) for i in (0, 1))
    return sum((x - mx) * (y - my) for x, y in pairs) / sum((x - mx) ** 2 for x, _ in pairs)


def picture(found: dict[str, dict[str, list[dict[str, Any]]]], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(12, 4.2), layout="constrained")
    for panel, (key, title) in zip(
        panels,
        [
            ("fit", "fit, processor seconds"),
            ("prediction", "first prediction, processor seconds"),
            ("bytes", "memory, bytes"),
        ],
        strict=True,
    ):
        for number, (name, axes) in enumerate(found.items()):
            rows = [row for row in axes["weights"] if row.get(key, 0) > 0]
            style = "-" if number < 6 else "--"
            panel.loglog([row["size"] for row in rows], [row[key] for row in rows], style, marker=".", label=name)
        panel.set_xlabel("weights")
        panel.set_title(title)
        panel.grid(alpha=0.3)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--child", nargs=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds that a fit and a prediction may take")
    parser.add_argument("--memory", type=float, default=12.0, help="GB that they may take")
    parser.add_argument("--largest", type=int, default=10**8, help="weights")
    parser.add_argument("--only", nargs="*", default=list(STRUCTURES), help="the others stay as they were measured")
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child[0], json.loads(arguments.child[1]), arguments.threads)
        return
    where = context("scaling")
    found = {
        name: {
            axis: measured(name, axis, arguments.threads, arguments.limit, 1e9 * arguments.memory, arguments.largest)
            for axis in AXES
        }
        for name in arguments.only
    }
    slopes = {
        name: {
            axis: {key: exponent(rows, key) for key in ("fit", "prediction", "bytes")} for axis, rows in axes.items()
        }
        for name, axes in found.items()
    }
    for name, axes in slopes.items():
        words = [
            f"{axis}: " + ", ".join(f"{key} {'-' if value is None else f'{value:.2f}'}" for key, value in keys.items())
            for axis, keys in axes.items()
        ]
        print(f"{name:20} exponents in {'; '.join(words)}")
    limits = {"seconds": arguments.limit, "bytes": 1e9 * arguments.memory}
    sizes = {"base": BASE, "full_weights": FULL_WEIGHTS, "threads": arguments.threads, "limits": limits}
    kept: dict[str, Any] = {}
    if arguments.only != list(STRUCTURES):  # what was measured before says where: a commit, its limits, a machine
        before = json.loads((RESULTS / "scaling.json").read_text())
        own = {key: before[key] for key in ("commit", "clean", "machine", "limits")}
        others = [name for name in STRUCTURES if name in before["measured"] and name not in found]
        kept = {"before": {name: before.get("before", {}).get(name, own) for name in others}}
        found = {
            name: found.get(name, before["measured"].get(name)) for name in STRUCTURES if name in [*found, *others]
        }
        slopes = {name: slopes.get(name, before["exponents"].get(name)) for name in found}
    write(where, {**sizes, **kept, "measured": found, "exponents": slopes})
    picture(found, RESULTS / "scaling.png")


if __name__ == "__main__":
    main()
