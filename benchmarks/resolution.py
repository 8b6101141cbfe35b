"""Claim to test (Laplacian autoencoder, Table 1 and Fig 7): time and memory of propagated diagonals grow linearly with
the resolution of the output, those of the exact diagonal and of Kronecker factors quadratically.

Two networks with a Gaussian on every pixel. "flat": five convolutions that keep three channels and the size, tanh
between them, as in the source. "bottleneck": an autoencoder by way of 16 numbers, for the mixed diagonal, which without
a bottleneck is the propagated one. Its layers at the bottleneck have as many weights as pixels, as a gradient has too.

lapwing forms the exact quantities in chunks of cotangents, so that their memory is bounded, and small sizes leave the
processor half idle: their time grows with an exponent below 2 at the sizes that can be reached. "at once" gives them a
budget for all cotangents together, as libraries without chunks need it, for one image instead of a batch, so that there
are enough sizes to see the square in time and in memory. `reading` in the results says in words what was found.

Every measurement is a process of its own: the best time of several fits, and the peak of resident memory over what was
there before (Linux). A gradient of the same batch is the unit. Sizes that would take longer than `--limit` seconds or
more memory than `MEMORY`, by the growth so far, are left out, and said to be.
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
from typing import Any

import torch
from _common import RESULTS, context, write
from torch import Tensor, nn

from lapwing import estimate
from lapwing.likelihoods import Gaussian
from lapwing.tangent import Tangent

SIZES = 16, 24, 32, 48, 64, 96, 128
AT_ONCE = 16, 20, 24, 28, 32, 40, 48, 56, 64
MEMORY = 6e9
"""Bytes beyond which nothing is started."""
LATENT = 16
WORK = {
    "gradient": ("flat", SIZES),
    "exact": ("flat", SIZES),
    "kron": ("flat", SIZES),
    "propagated": ("flat", SIZES),
    "exact, at once": ("flat", AT_ONCE),
    "kron, at once": ("flat", AT_ONCE),
    "gradient, bottleneck": ("bottleneck", SIZES),
    "propagated, bottleneck": ("bottleneck", SIZES),
    "mixed, bottleneck": ("bottleneck", SIZES),
}
"""Network and sizes of each line."""
ESTIMATORS = {
    "exact": estimate.diagonal,
    "kron": estimate.kflr,
    "propagated": estimate.propagated_diagonal,
    "mixed": estimate.mixed_diagonal,
}


def flat() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(5):
        layers += [nn.Conv2d(3, 3, 3, padding=1), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def bottleneck(size: int) -> nn.Module:
    """[B, 3, size, size] to itself by way of LATENT numbers; size a multiple of 4."""
    inner = size // 4
    return nn.Sequential(
        *(nn.Conv2d(3, 3, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(3, 3, 3, padding=1), nn.Tanh()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(3 * inner**2, LATENT), nn.Tanh()),
        *(nn.Linear(LATENT, 3 * inner**2), nn.Tanh(), nn.Unflatten(1, (3, inner, inner)), nn.Upsample(scale_factor=2)),
        *(nn.Conv2d(3, 3, 3, padding=1), nn.Tanh(), nn.Upsample(scale_factor=2), nn.Conv2d(3, 3, 3, padding=1)),
    )


def images_of(work: str, batch: int) -> int:
    return 1 if work.endswith("at once") else batch


def prepared(work: str, size: int, batch: int) -> Callable[[], Any]:
    """The work as a function without arguments."""
    torch.manual_seed(0)
    model = flat() if WORK[work][0] == "flat" else bottleneck(size)
    x = torch.rand(images_of(work, batch), 3, size, size)
    parameters = list(model.parameters())
    name = work.split(",")[0]
    if name == "gradient":
        return lambda: torch.autograd.grad((model(x) - x).square().sum() / 2, parameters)
    tangent = Tangent(model, budget=2**40) if work.endswith("at once") else Tangent(model)
    return lambda: ESTIMATORS[name](tangent, Gaussian(), [(x, x)])


def resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))


def child(work: str, size: int, batch: int, threads: int) -> None:
    """Prints seconds (best of as many as fit into two seconds, at least one) and the peak in bytes."""
    torch.set_num_threads(threads)
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


def difference_of_mixed(size: int, batch: int) -> float:
    """|mixed - propagated| / |propagated| on the network with a bottleneck: not zero, or nothing was exact."""
    mixed, propagated = (prepared(f"{name}, bottleneck", size, batch)().diagonal() for name in ("mixed", "propagated"))
    assert isinstance(mixed, Tensor)
    return float((mixed - propagated).norm() / propagated.norm())


def exponent(pixels: list[int], values: list[float]) -> float:
    """Slope of log value against log pixels, by least squares; nan where there is one size only."""
    if len(pixels) < 2:
        return float("nan")
    x, y = [log(p) for p in pixels], [log(v) for v in values]
    mx, my = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)


def measured(batch: int, threads: int, limit: float, repeats: int, largest: int) -> dict[str, list[dict]]:
    found: dict[str, list[dict]] = {work: [] for work in WORK}
    for work, (_, sizes) in WORK.items():
        rows = found[work]
        for size in sizes:
            if size > largest:
                continue
            growth = (size / rows[-1]["size"]) ** 4 if rows else 1
            if rows and (rows[-1]["seconds"] * growth > limit or rows[-1]["bytes"] * growth > MEMORY):
                reason = "time" if rows[-1]["seconds"] * growth > limit else "memory"
                rows.append({"size": size, "left_out": reason})
                print(f"{size:4} {work:24} left out: too much {reason} by the growth so far", flush=True)
                break
            command = [sys.executable, __file__, "--child", work, str(size), str(batch), str(threads)]
            runs = [
                json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                for _ in range(repeats)
            ]
            row = {"size": size, **{key: min(run[key] for run in runs) for key in ("seconds", "bytes")}}
            rows.append(row)
            print(f"{size:4} {work:24} {1e3 * row['seconds']:10.2f} ms {row['bytes'] / 1e6:9.1f} MB", flush=True)
    return found


def summary(found: dict[str, list[dict]], batch: int) -> list[dict]:
    """Exponents in the number of pixels, of the upper sizes, where the work is more than its overhead."""
    lines = []
    for work, rows in found.items():
        rows = [row for row in rows if "seconds" in row]
        upper = [row for row in rows if row["size"] >= 32]
        upper = upper if len(upper) > 2 else rows
        pixels = [row["size"] ** 2 for row in upper]
        base = "gradient, bottleneck" if WORK[work][0] == "bottleneck" else "gradient"
        unit = {row["size"]: row["seconds"] for row in found[base] if "seconds" in row}
        line: dict[str, Any] = {
            "work": work,
            "images": images_of(work, batch),
            "sizes": [row["size"] for row in rows],
            "exponents_from": upper[0]["size"],
            "time_exponent": exponent(pixels, [row["seconds"] for row in upper]),
            "time_exponent_all_sizes": exponent([row["size"] ** 2 for row in rows], [row["seconds"] for row in rows]),
            "memory_exponent": exponent(pixels, [max(row["bytes"], 1e5) for row in upper]),
        }
        if images_of(work, batch) == batch:
            line["gradients"] = [row["seconds"] / unit[row["size"]] for row in rows]
        lines.append(line)
    return lines


def reading(lines: list[dict], difference: float) -> list[str]:
    """The claim in words, with the exponents of this run."""
    of = {line["work"]: line for line in lines}

    def both(work: str) -> str:
        line = of[work]
        return (
            f"{line['time_exponent']:.2f} in time and {line['memory_exponent']:.2f} in memory "
            f"({line['exponents_from']} to {line['sizes'][-1]} pixels a side)"
        )

    short = [work for work in ("exact", "kron") if of[work]["time_exponent"] < 1.9]
    below = f"in time {' and '.join(short)} stay below it at these sizes" if short else "in time both reach it"
    return [
        f"Exponents in the number of pixels. Propagated: {both('propagated')}; linear is 1.",
        f"Exact diagonal in chunks, which bound its memory: {both('exact')}. Kronecker factors: {both('kron')}. "
        f"A square would be 2; {below}.",
        f"All cotangents at once, one image: exact {both('exact, at once')}; Kronecker {both('kron, at once')}; "
        "a square is 2.",
        f"With a bottleneck: propagated {both('propagated, bottleneck')}; mixed {both('mixed, bottleneck')}; the two "
        f"diagonals differ by {difference:.3g}, relative.",
    ]


def picture(found: dict[str, list[dict]], lines: list[dict], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    shades = "0.6", "tab:red", "tab:purple", "tab:blue", "tab:red", "tab:purple", "0.6", "tab:blue", "tab:green"
    colours = dict(zip(WORK, shades, strict=True))
    figure, axes = plt.subplots(1, 2, figsize=(13, 5.4), constrained_layout=True)
    for axis, key, scale, label in (
        (axes[0], "seconds", 1.0, "time of one batch, at once: one image (s)"),
        (axes[1], "bytes", 1e-6, "peak memory over the start, at once: one image (MB)"),
    ):
        for line in lines:
            rows = [row for row in found[line["work"]] if "seconds" in row]
            slope = line["time_exponent" if key == "seconds" else "memory_exponent"]
            style = ":" if line["work"].endswith("at once") else "--" if line["work"].endswith("bottleneck") else "-"
            name = f"{line['work']}  (pixels$^{{{slope:.2f}}}$)"
            values = [max(row[key] * scale, 1e-9) for row in rows]
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
        axis.legend(fontsize=7.5, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, handlelength=4)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", nargs=4)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds that one fit may take")
    parser.add_argument("--rounds", type=int, default=3, help="processes per measurement; the best counts")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--largest", type=int, default=max(SIZES), help="pixels a side; smaller for a trial")
    parser.add_argument("--out", type=Path, help="a folder instead of results/, for a trial")
    parser.add_argument("--no-peers", action="store_true", help="there are none here")
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child[0], *map(int, arguments.child[1:]))
        return
    where = context("resolution")
    torch.set_num_threads(arguments.threads)
    found = measured(arguments.batch, arguments.threads, arguments.limit, arguments.rounds, arguments.largest)
    lines = summary(found, arguments.batch)
    print(f"\n{'work':24} {'largest':>8} {'time':>7} {'memory':>7}   gradients, by size")
    for line in lines:
        ratios = " ".join(f"{ratio:.3g}" for ratio in line.get("gradients", []))
        exponents = f"{line['time_exponent']:7.2f} {line['memory_exponent']:7.2f}"
        print(f"{line['work']:24} {line['sizes'][-1]:>8} {exponents}   {ratios}")
    words = reading(lines, difference_of_mixed(16, 2))
    print(*words, sep="\n")
    folder = arguments.out or RESULTS
    figures = {"batch": arguments.batch, "reading": words, "summary": lines, "rows": found}
    write(where, figures, folder)
    picture(found, lines, folder / "resolution.png")


if __name__ == "__main__":
    main()
