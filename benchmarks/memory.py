"""Claim to test: a fit or a prediction peaks at no more than three times what a training step needs.

Peak resident memory of the work over what the process held before it, each in a process of its own (Linux). One step of
Adam on a batch of 100 is the unit, and a fit is the same two batches seen by an estimator.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import torch
from _common import batches, cnn, context, mlp, report
from torch import nn

from lapwing import Laplace

WORK = ("step", "kron", "diag", "predict kron", "predict diag")


def resident(key: str) -> int:
    """VmRSS (now) or VmHWM (peak) of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))


def child(network: str, work: str) -> None:
    """Does the work once, and prints by how much the peak exceeds what was there before."""
    torch.set_num_threads(2)
    torch.manual_seed(0)
    model = {"mlp": mlp, "cnn": cnn, "wide": wide}[network]()
    x, y = batches(100)[0]
    small = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))  # brings libraries in, without the work itself
    optimiser = torch.optim.Adam(small.parameters())
    nn.functional.cross_entropy(small(x), y).backward()
    optimiser.step()
    warm = Laplace(small, "classification", "all", "diag")
    warm.fit([(x[:2], y[:2])])
    warm(x[:2])
    la = None
    if work.startswith("predict"):
        la = Laplace(model, "classification", "all", work.split()[1])
        la.fit([(x[:10], y[:10])])
        la(x[:1])  # decomposes; the eigenvectors are part of the posterior, not of a prediction
    optimiser = torch.optim.Adam(model.parameters())
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = resident("VmRSS")
    if work == "step":
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    elif la is not None:
        la(x)
    else:
        Laplace(model, "classification", "all", work).fit([(x, y), (x, y)])
    print(resident("VmHWM") - before)


def wide() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)
    )


def measured(network: str, work: str) -> int:
    command = [sys.executable, __file__, "--child", network, work]
    out = [int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) for _ in range(3)]
    return min(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", nargs=2)
    parser.add_argument("--no-peers", action="store_true", help="there are none here")
    arguments = parser.parse_args()
    if arguments.child:
        child(*arguments.child)
        return
    where = context("memory")
    rows = []
    for network in ("mlp", "cnn", "wide"):
        sizes = {work: measured(network, work) for work in WORK}
        rows += [
            {
                "network": network,
                "work": f"{work}, peak MB",
                "against": "training step",
                "seconds": sizes[work] / 1e9,  # printed as milli-units: megabytes
                "other_seconds": sizes["step"] / 1e9,
                "ratio": sizes[work] / sizes["step"],
                "bar": 3,
            }
            for work in WORK[1:]
        ]
    report(where, rows)


if __name__ == "__main__":
    main()
