"""Claim: two ranks fit the Kronecker posterior of a CNN at least 1.6 times as fast as one, on two cores.

One thread each, gloo, float32, ten classes, DataLoaders over data in memory. What is timed is the fit and the first use
of the posterior, so that eigendecompositions are in it for both: two ranks share them out at the end of a fit, one
makes them when they are first needed. Rank 0 alone, then both together, in turns in the same processes, best of
several; while one fits, the other waits. The ratio is the time of two ranks over that of one.

    python benchmarks/distributed.py [--points 6000] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _common import batches, best, cnn, context, report
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lapwing import Laplace

RANKS, BATCH, BAR = 2, 100, 1.6
STRUCTURES = ("kron", "ekfac", "diag")


def data(points: int) -> TensorDataset:
    x, y = zip(*batches(points), strict=True)
    return TensorDataset(torch.cat(x), torch.cat(y))


def measured(rank: int, points: int, rounds: int, folder: str) -> None:
    """What each process does; rank 0 writes the times, in seconds."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", timedelta(minutes=10), RANKS, rank)
    torch.manual_seed(0)
    model, found = cnn(), {}
    every = data(points)
    alone = DataLoader(every, BATCH)
    shard = DataLoader(every, BATCH, sampler=DistributedSampler(every, shuffle=False))

    def fit(structure: str, loader: DataLoader) -> None:
        la = Laplace(model, "classification", "all", structure)
        la.fit(loader)
        _ = la.posterior

    def by_one(structure: str) -> None:
        if rank == 0:
            fit(structure, alone)
        dist.barrier()

    for structure in STRUCTURES:
        work = {"one": lambda s=structure: by_one(s), "two": lambda s=structure: fit(s, shard)}
        found[structure] = best(work, rounds)
    if rank == 0:
        Path(folder, "times.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=6000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    where = context("distributed")
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measured, (options.points, options.rounds, folder), nprocs=RANKS)
        times = json.loads(Path(folder, "times.json").read_text())
    rows = [
        {
            "network": "cnn",
            "work": f"{structure}, two ranks",
            "against": "one rank",
            "seconds": each["two"],
            "other_seconds": each["one"],
            "ratio": each["two"] / each["one"],
            "bar": 1 / BAR if structure == "kron" else None,
            "points": options.points,
        }
        for structure, each in times.items()
    ]
    report(where, rows)


if __name__ == "__main__":
    main()
