"""Claim to test: the full covariance of a sub-network of 40,000 weights fits into the memory of two such matrices.

A network of 101,770 weights (784-128-10, float32), n of them at random, few rows. A matrix has n^2 numbers: 0.4 GB for
10,000 weights, 1.6 GB for 20,000 and 6.4 GB for 40,000; the curvature and a Cholesky factor are two, and beside them
there is room for the rows of a batch (0.5 GB). Up to 4,096 weights there are eigenvectors in float64 instead, and no
bar.

Every size is a process of its own: time of the fit, of the first prediction (which factorises), of the next one, of
the evidence and of two draws, and the peak of resident memory over what was there before (Linux). The factor is checked
by the relative residual of a solve, in float32. A size for which the machine has not memory enough is left out, and
said to be; one that fails is a row that says so.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from _common import RESULTS, batches, context, write
from torch import nn

from lapwing import Laplace
from lapwing.subnetwork import RandomSubnetMask

SIZES = (10_000, 20_000, 40_000)
MATRICES, ROOM = 2, 2**29
"""The claim: at its peak the work holds no more than so many matrices, and so many bytes beside them."""
EIGEN = 4096
"""Weights up to which there are eigenvectors."""
RESIDUAL = 1e-3
"""What a solve in float32 may leave of its right-hand side."""
SPARE = 2e9
"""Bytes that the machine keeps for others; a size is left out where it has less than the claim and this."""


def memory(file: str, key: str) -> int:
    """A line of /proc in bytes: VmRSS (now) or VmHWM (peak) of self/status, MemAvailable of meminfo."""
    lines = Path(f"/proc/{file}").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))


def posterior(n: int, points: int, hidden: int = 128) -> tuple[Any, list]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, 10)).eval()
    indices = RandomSubnetMask(model, n, torch.Generator().manual_seed(0)).select()
    return Laplace(model, "classification", "subnetwork", "full", subnetwork_indices=indices), batches(points, 50)


def child(n: int, points: int, threads: int) -> None:
    torch.set_num_threads(threads)
    warm, data = posterior(50, 10, hidden=8)  # brings libraries in, without the work itself
    warm.fit(data)
    warm(data[0][0])
    la, data = posterior(n, points)
    x = data[0][0][:10]
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("self/status", "VmRSS")
    times = {}
    for name, work in (
        ("fit", lambda: la.fit(data)),
        ("first_prediction", lambda: la(x)),
        ("next", lambda: la(x)),
        ("evidence", la.log_marginal_likelihood),
        ("draws", lambda: la.posterior.precision.draw(2)),
    ):
        start = time.perf_counter()
        work()
        times[f"{name}_seconds"] = time.perf_counter() - start
        times[f"{name}_peak"] = memory("self/status", "VmHWM") - before
    v = torch.randn(n, generator=torch.Generator().manual_seed(1))
    solved = la.posterior.precision.solve(v)
    residual = float((la.H @ solved + la.prior_precision * solved - v).norm() / v.norm())
    peak = memory("self/status", "VmHWM") - before
    finite = bool(torch.isfinite(la(x)).all())
    print(json.dumps({**times, "bytes": peak, "residual": residual, "finite": finite}))


def measured(n: int, points: int, threads: int) -> dict[str, Any]:
    matrix = 4 * n**2
    row: dict[str, Any] = {"weights": n, "points": points, "matrix_bytes": matrix}
    free = memory("meminfo", "MemAvailable")
    if free < MATRICES * matrix + ROOM + SPARE:
        return row | {"left_out": f"{free / 1e9:.1f} GB are free"}
    command = [sys.executable, __file__, "--child", str(n), str(points), str(threads)]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        return row | {"failed": run.returncode, "message": run.stderr[-500:]}
    found = json.loads(run.stdout)
    matrices = found["bytes"] / matrix
    bar = MATRICES * matrix + ROOM if n > EIGEN else None
    held = None if bar is None else found["bytes"] <= bar and found["finite"] and found["residual"] <= RESIDUAL
    return row | found | {"matrices": matrices, "bar": bar, "held": held}


def shown(row: dict[str, Any]) -> str:
    if "matrices" not in row:
        return f"{row['weights']:8,} " + ("left out: " + row["left_out"] if "left_out" in row else "FAILED")
    times = " ".join(f"{row[f'{name}_seconds']:9.2f} s" for name in ("fit", "first_prediction", "next"))
    bar = "" if row["bar"] is None else f"{'<=' if row['held'] else 'NOT'} {row['bar'] / 1e9:.2f} GB"
    peak = f"{row['bytes'] / 1e9:7.2f} GB {row['matrices']:6.2f} matrices"
    return f"{row['weights']:8,} {times} {peak}   residual {row['residual']:.1e}   {bar}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", nargs=3, type=int)
    parser.add_argument("--sizes", type=int, nargs="*", help="instead of the sizes of the claim, for a trial")
    parser.add_argument("--points", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="a folder instead of results/, for a trial")
    parser.add_argument("--no-peers", action="store_true", help="there are none here")
    arguments = parser.parse_args()
    if arguments.child:
        child(*arguments.child)
        return
    where = context("subnetwork")
    sizes = arguments.sizes or SIZES
    print(f"{'weights':>8} {'fit':>11} {'first':>11} {'next':>11} {'peak':>10}")
    rows = []
    for n in sizes:
        rows.append(measured(n, arguments.points, arguments.threads))
        print(shown(rows[-1]), flush=True)
    write(where, {"threads": arguments.threads, "rows": rows}, arguments.out or RESULTS)


if __name__ == "__main__":
    main()
