"""Claim to test (Laplacian autoencoder, Table 1 and Fig 7): time and memory of propagated diagonals grow linearly with
the resolution of the output, those of the exact diagonal and of Kronecker factors quadratically.

Five convolutions that keep three channels and the size, tanh between them, a Gaussian on every pixel: 16x16 to 128x128.
Every measurement is a process of its own: the best time of several fits, and the peak of resident memory over what was
there before (Linux). A gradient of the same batch is the unit. `exact, at once` gives the exact diagonal a budget for
all its cotangents together, as libraries without chunks need it. Sizes that would take longer than `--limit` seconds,
by the growth so far, are left out, and said to be.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from math import log
from pathlib import Path

import torch
from _common import RESULTS, context
from torch import nn

from lapwing import estimate
from lapwing.likelihoods import Gaussian
from lapwing.tangent import Tangent

SIZES = 16, 24, 32, 48, 64, 96, 128
WORK = "gradient", "exact", "exact, at once", "kron", "propagated", "mixed"
MEMORY = 6e9
"""Bytes beyond which nothing is started."""


def network() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(5):
        layers += [nn.Conv2d(3, 3, 3, padding=1), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def prepared(work: str, size: int, batch: int) -> Callable[[], object]:
    """The work as a function without arguments."""
    torch.manual_seed(0)
    model = network()
    x = torch.rand(batch, 3, size, size)
    parameters = list(model.parameters())
    data, likelihood = [(x, x)], Gaussian()
    if work == "gradient":
        return lambda: torch.autograd.grad((model(x) - x).square().sum() / 2, parameters)
    if work == "exact, at once":
        tangent = Tangent(model, budget=2**40)
        return lambda: estimate.diagonal(tangent, likelihood, data)
    run = {
        "exact": estimate.diagonal,
        "kron": estimate.kflr,
        "propagated": estimate.propagated_diagonal,
        "mixed": estimate.mixed_diagonal,
    }[work]
    tangent = Tangent(model)
    return lambda: run(tangent, likelihood, data)


def resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))


def child(work: str, size: int, batch: int) -> None:
    """Prints seconds (best of as many as fit into a second, at least one) and the peak in bytes."""
    torch.set_num_threads(2)
    prepared(work, 4, 2)()  # brings libraries in, without the work itself
    run = prepared(work, size, batch)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    start = time.perf_counter()
    run()
    first = time.perf_counter() - start
    peak = resident("VmHWM") - before
    times = [first]
    while sum(times) < 2 and len(times) < 200:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    print(json.dumps({"seconds": min(times), "bytes": peak}))


def exponent(pixels: list[int], values: list[float]) -> float:
    """Slope of log value against log pixels, by least squares."""
    x, y = [log(p) for p in pixels], [log(v) for v in values]
    mx, my = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)


def measured(batch: int, limit: float, repeats: int) -> dict[str, list[dict]]:
    found: dict[str, list[dict]] = {work: [] for work in WORK}
    for size in SIZES:
        for work in WORK:
            rows = found[work]
            if rows and rows[-1].get("left_out"):
                continue
            growth = (size / rows[-1]["size"]) ** 4 if rows else 1
            if rows and (rows[-1]["seconds"] * growth > limit or rows[-1]["bytes"] * growth > MEMORY):
                reason = "time" if rows[-1]["seconds"] * growth > limit else "memory"
                rows.append({"size": size, "left_out": reason})
                print(f"{size:4} {work:16} left out: too much {reason} by the growth so far", flush=True)
                continue
            command = [sys.executable, __file__, "--child", work, str(size), str(batch)]
            runs = [
                json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                for _ in range(repeats)
            ]
            row = {"size": size, **{key: min(run[key] for run in runs) for key in ("seconds", "bytes")}}
            rows.append(row)
            print(f"{size:4} {work:16} {1e3 * row['seconds']:10.2f} ms {row['bytes'] / 1e6:9.1f} MB", flush=True)
    return found


def summary(found: dict[str, list[dict]]) -> list[dict]:
    """Exponents in the number of pixels, from the sizes where the work is more than its overhead."""
    unit = {row["size"]: row["seconds"] for row in found["gradient"]}
    lines = []
    for work, rows in found.items():
        rows = [row for row in rows if "seconds" in row]
        upper = [row for row in rows if row["size"] >= 32] if rows[-1]["size"] > 48 else rows
        pixels = [row["size"] ** 2 for row in upper]
        lines.append(
            {
                "work": work,
                "largest": rows[-1]["size"],
                "time_exponent": exponent(pixels, [row["seconds"] for row in upper]),
                "time_exponent_all_sizes": exponent(
                    [row["size"] ** 2 for row in rows], [row["seconds"] for row in rows]
                ),
                "memory_exponent": exponent(pixels, [max(row["bytes"], 1e5) for row in upper]),
                "gradients": [row["seconds"] / unit[row["size"]] for row in rows],
            }
        )
    return lines


def picture(found: dict[str, list[dict]], lines: list[dict], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    colours = dict(zip(WORK, ("0.6", "tab:red", "tab:orange", "tab:purple", "tab:blue", "tab:green"), strict=True))
    figure, axes = plt.subplots(1, 2, figsize=(10.5, 4.2), constrained_layout=True)
    for axis, key, scale, label in (
        (axes[0], "seconds", 1.0, "time of one batch (s)"),
        (axes[1], "bytes", 1e-6, "peak memory over the start (MB)"),
    ):
        for line in lines:
            rows = [row for row in found[line["work"]] if "seconds" in row]
            slope = line["time_exponent" if key == "seconds" else "memory_exponent"]
            values = [max(row[key], 1e-9) * scale for row in rows]
            style = "--" if line["work"] in ("gradient", "mixed") else "-"
            name = f"{line['work']}  (pixels$^{{{slope:.2f}}}$)"
            axis.plot(
                [row["size"] ** 2 for row in rows],
                values,
                style,
                marker="o",
                ms=4,
                color=colours[line["work"]],
                label=name,
            )
        axis.set(xscale="log", yscale="log", xlabel="resolution (pixels)", ylabel=label)
        axis.set_xticks([size**2 for size in SIZES[::2]], [f"{size}x{size}" for size in SIZES[::2]])
        axis.set_xticks([], minor=True)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", nargs=3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds that one fit may take")
    parser.add_argument("--rounds", type=int, default=3, help="processes per measurement; the best counts")
    parser.add_argument("--no-peers", action="store_true", help="there are none here")
    arguments = parser.parse_args()
    if arguments.child:
        work, size, batch = arguments.child
        child(work, int(size), int(batch))
        return
    found = measured(arguments.batch, arguments.limit, arguments.rounds)
    lines = summary(found)
    print(f"\n{'work':16} {'largest':>8} {'time':>7} {'memory':>7}   gradients, by size")
    for line in lines:
        ratios = " ".join(f"{ratio:.3g}" for ratio in line["gradients"])
        exponents = f"{line['time_exponent']:7.2f} {line['memory_exponent']:7.2f}"
        print(f"{line['work']:16} {line['largest']:>8} {exponents}   {ratios}")
    RESULTS.mkdir(exist_ok=True)
    written = context() | {"batch": arguments.batch, "summary": lines, "rows": found}
    (RESULTS / "resolution.json").write_text(json.dumps(written, indent=1) + "\n")
    picture(found, lines, RESULTS / "resolution.png")


if __name__ == "__main__":
    main()
