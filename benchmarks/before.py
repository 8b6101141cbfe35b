"""Claim to test: fits and predictions take no longer than at an earlier commit, on this machine and in this run.

Ratios to a gradient epoch or to a peer differ between machines; two commits on one machine do not. The earlier one is
cloned into a temporary folder, and processes of either library take turns at the same networks and batches, those of
`curvature.py` and `predict.py`. A gradient epoch, in which the library has no part, shows the noise.

    python benchmarks/before.py            beside 6eff82b, before work on large networks began
    python benchmarks/before.py abc1234    beside another commit
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from _common import batches, best, cnn, context, mlp, report
from curvature import ours

from lapwing import Laplace

ROOT = Path(__file__).resolve().parents[1]
BAR = 1.05  # no slower, but for the noise of the best of several
NETWORKS = {"mlp": (mlp, 2000), "cnn": (cnn, 1000)}


def child(name: str, rounds: int) -> None:
    """Prints the best seconds of every work, with whichever library is imported."""
    torch.set_num_threads(2)
    torch.manual_seed(0)
    make, points = NETWORKS[name]
    model, data = make().eval(), batches(points)
    runs: dict[str, Any] = ours(model, data, torch.Generator().manual_seed(0))
    for structure in ("kron", "diag"):
        la = Laplace(model, "classification", "all", structure)
        la.fit(data)
        runs[f"predict 100, {structure}"] = lambda la=la: la(data[0][0])
    print(json.dumps(best(runs, rounds)))


def measured(root: Path, name: str, rounds: int) -> dict[str, float]:
    command = [sys.executable, str(Path(__file__).resolve()), "--child", name, "--rounds", str(rounds)]
    environment = os.environ | {"PYTHONPATH": str(root / "src")}
    out = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    return json.loads(out.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", default="6eff82b")
    parser.add_argument("--turns", type=int, default=6, help="processes of either commit for a network")
    parser.add_argument("--rounds", type=int, default=10, help="of which the best is taken, in each process")
    parser.add_argument("--child", choices=list(NETWORKS))
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, arguments.rounds)
        return
    where = context("before") | {"against": arguments.commit}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        git = ["git", "-C", folder]
        subprocess.run([*git, "clone", "--quiet", "--no-checkout", str(ROOT), "."], check=True)
        subprocess.run([*git, "checkout", "--quiet", "--detach", arguments.commit], check=True)
        for name in NETWORKS:
            now: dict[str, float] = {}
            before: dict[str, float] = {}
            for _ in range(arguments.turns):
                for root, found in ((ROOT, now), (Path(folder), before)):
                    for work, seconds in measured(root, name, arguments.rounds).items():
                        found[work] = min(found.get(work, seconds), seconds)
            rows += [
                {
                    "network": name,
                    "work": work,
                    "against": arguments.commit,
                    "seconds": now[work],
                    "other_seconds": before[work],
                    "ratio": now[work] / before[work],
                    "bar": None if work == "gradient epoch" else BAR,
                }
                for work in now
            ]
    report(where, rows)


if __name__ == "__main__":
    main()
