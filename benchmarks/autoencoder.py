"""Claim: a step of online training costs at most three plain steps at any resolution, and memory linear in the pixels.

Autoencoders of one-channel images, latent size 2, tanh, batches of 64. "conv": convolutions of 8 and 16 channels, each
halving the image, a linear layer to the code, and back. "dense": 512-256-2 and back. A plain step is Adam on the mean
squared error; an online step draws weights, takes the gradient there, and adds the curvature of the batch. Processor
time on one thread; plain and online steps take turns; the best step of each counts. "exact" has a backward pass for
every pixel, and is left out where that would take minutes.

Memory is the peak of resident memory in the second step over what was there before the first, each in a process of its
own (Linux); exponents in the number of pixels are by least squares over the sizes.

    python benchmarks/autoencoder.py [--rounds 3] [--sizes 28 64 128] [--out folder]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from _common import RESULTS, context, report, write
from resolution import exponent, resident
from torch import Tensor, nn

from lapwing.training import LaplacianAutoencoder

SIZES = 28, 64, 128
BATCH, STEPS, LATENT = 64, 4, 2
TIME_BAR, MEMORY_BAR = 3.0, 1.1
CONTENDERS: dict[str, tuple[dict[str, Any], tuple[str, ...], int]] = {
    "sampled": ({}, ("conv", "dense"), max(SIZES)),
    "at the mean": ({"at": "mean"}, ("conv",), max(SIZES)),
    "propagated": ({"curvature": "propagated"}, ("conv",), max(SIZES)),
    "exact": ({"curvature": "exact"}, ("conv",), 28),
}
"""Options, networks, and the largest size of each; the first is what one gets without any."""


def halves(network: str, size: int) -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(0)
    if network == "dense":
        pixels = size**2
        into = [nn.Flatten(), nn.Linear(pixels, 512), nn.Tanh(), nn.Linear(512, 256), nn.Tanh(), nn.Linear(256, LATENT)]
        back = [nn.Linear(LATENT, 256), nn.Tanh(), nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, pixels)]
        return nn.Sequential(*into), nn.Sequential(*back, nn.Unflatten(1, (1, size, size)))
    inner = size // 4
    encoder = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(16 * inner**2, LATENT)),
    )
    decoder = nn.Sequential(
        *(
            nn.Linear(LATENT, 16 * inner**2),
            nn.Tanh(),
            nn.Unflatten(1, (16, inner, inner)),
            nn.Upsample(scale_factor=2),
        ),
        *(nn.Conv2d(16, 8, 3, padding=1), nn.Tanh(), nn.Upsample(scale_factor=2), nn.Conv2d(8, 1, 3, padding=1)),
    )
    return encoder, decoder


Told = Callable[[object], None]


def plain(network: str, size: int, x: Tensor) -> Callable[[int, Told], None]:
    """Steps as one writes them, each followed by a call."""
    model = nn.Sequential(*halves(network, size))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    def run(steps: int, told: Told) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            ((model(x) - x).square().sum() / 2 / len(x)).backward()
            optimizer.step()
            told(None)

    return run


def online(network: str, size: int, x: Tensor, options: dict[str, Any]) -> Callable[[int, Told], None]:
    model = LaplacianAutoencoder(*halves(network, size), **options, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.Adam(model.whole.parameters(), lr=1e-4)
    return lambda steps, told: model.fit([x] * steps, 1, optimizer=optimizer, callback=told) and None


def images(size: int) -> Tensor:
    return torch.rand(BATCH, 1, size, size, generator=torch.Generator().manual_seed(1))


def best_steps(runs: dict[str, Callable[[int, Told], None]], rounds: int) -> dict[str, float]:
    """Processor seconds of the best step of each, from one call to the next; runs take turns."""
    found = dict.fromkeys(runs, float("inf"))
    for number in range(rounds):
        for name, run in runs.items():
            if name == "exact" and number:  # half a minute each
                continue
            marks: list[float] = []
            run(2 if name == "exact" else STEPS, lambda _, marks=marks: marks.append(time.process_time()))
            found[name] = min(found[name], *(b - a for a, b in pairwise(marks)))
    return found


def timed(network: str, size: int, rounds: int) -> list[dict[str, Any]]:
    x = images(size)
    chosen = {
        name: options for name, (options, networks, most) in CONTENDERS.items() if network in networks and size <= most
    }
    runs = {"plain": plain(network, size, x)}
    runs |= {name: online(network, size, x, options) for name, options in chosen.items()}
    times = best_steps(runs, rounds)
    return [
        {
            "network": network,
            "work": f"{name}, {size}",
            "size": size,
            "against": "plain step",
            "seconds": times[name],
            "other_seconds": times["plain"],
            "ratio": times[name] / times["plain"],
            "bar": TIME_BAR if name == "sampled" else None,
        }
        for name in chosen
    ]


# -- memory -----------------------------------------------------------------------------------------------------------


def child(network: str, work: str, size: int) -> None:
    """Prints the peak of memory in two steps, in bytes."""
    torch.set_num_threads(1)

    def made(pixels: int) -> Callable[[int, Told], None]:
        x = images(pixels)
        return plain(network, pixels, x) if work == "plain" else online(network, pixels, x, CONTENDERS[work][0])

    made(8)(2, lambda _: None)  # brings libraries in, without the work itself
    run = made(size)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    run(2, lambda _: None)
    print(json.dumps(resident("VmHWM") - before))


def peaks(network: str, work: str, sizes: list[int]) -> list[int]:
    found = []
    for size in sizes:
        command = [sys.executable, __file__, "--child", network, work, str(size)]
        found.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    return found


def remembered(sizes: list[int]) -> list[dict[str, Any]]:
    pixels, lines = [size**2 for size in sizes], []
    for network, work in (("conv", "plain"), ("conv", "sampled"), ("conv", "propagated"), ("dense", "sampled")):
        found = peaks(network, work, sizes)
        slope = exponent(pixels, [float(each) for each in found])
        line: dict[str, Any] = {"network": network, "work": work, "sizes": sizes, "bytes": found, "exponent": slope}
        line["bar"] = MEMORY_BAR if work == "sampled" else None
        lines.append(line)
        at = "  ".join(f"{size}: {each / 1e6:.0f} MB" for size, each in zip(sizes, found, strict=True))
        limit = "" if line["bar"] is None else f"{'<=' if slope <= MEMORY_BAR else 'ABOVE'} {MEMORY_BAR}"
        print(f"{network:8} {work:20} {at}   pixels^{slope:.2f}   {limit}", flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", nargs=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--out", type=Path, default=RESULTS, help="a folder instead of results/, for a trial")
    arguments = parser.parse_args()
    if arguments.child:
        child(*arguments.child[:2], int(arguments.child[2]))
        return
    where = context("autoencoder")
    torch.set_num_threads(1)
    rows = [
        row
        for network in ("conv", "dense")
        for size in arguments.sizes
        for row in timed(network, size, arguments.rounds)
    ]
    report(where, rows, arguments.out)
    lines = remembered(list(arguments.sizes))
    write(where, {"batch": BATCH, "rows": rows, "memory": lines}, arguments.out)


if __name__ == "__main__":
    main()
