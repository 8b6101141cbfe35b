"""Claims to test: predictions, evidence steps and grid search through the public face, beside laplace-torch.

    predict 100 inputs, kron, all weights      300 (MLP) and 20 (CNN) times faster than its faster backend
    100 steps on the prior, full, P = 3000     at most 1.5 times one eigendecomposition
    grid search of 100 precisions, kron        at most 3 times one prediction pass

Both libraries hold the same network in the same process and are called as their users call them. Peers are timed as the
best of two runs; their grid search runs over 2 values, and the figure is per value. `--all-peers` times every backend,
which takes a quarter of an hour.
"""

from __future__ import annotations

import argparse
import time
import warnings

import torch
from _common import Batches, batches, best, cnn, context, mlp, peer_backends, peer_fit, report
from torch import nn

from lapwing import Laplace

GRID = 100
FASTER = "backpack"  # of the backends of laplace-torch at these predictions, see covariance.py
PREDICT = {"mlp": 1 / 300, "cnn": 1 / 20}


def row(network: str, work: str, against: str, seconds: float, other: float, bar: float | None) -> dict:
    return {
        "network": network,
        "work": work,
        "against": against,
        "seconds": seconds,
        "other_seconds": other,
        "ratio": seconds / other,
        "bar": bar,
    }


def predictions(name: str, model: nn.Module, points: int, peers: dict[str, type], rounds: int) -> list[dict]:
    data = batches(points)
    x, y = data[0]
    la = Laplace(model, "classification", "all", "kron")
    la.fit(data)
    held_out = Batches([(x, y)])
    held_out.dataset = [None] * len(x)

    def search() -> None:
        la.optimize_prior_precision(method="gridsearch", val_loader=held_out, grid_size=GRID)

    times = best({"forward": lambda: model(x), "probit": lambda: la(x), "search": search}, rounds)
    rows = [
        row(name, "predict 100", "forward pass", times["probit"], times["forward"], None),
        row(name, f"grid of {GRID}", "one prediction", times["search"], times["probit"], 3),
    ]
    for peer, backend in peers.items():
        fitted = peer_fit(model, data, "kron", backend)
        other = best({"": lambda f=fitted: f(x, pred_type="glm", link_approx="probit")}, 2, warm=False)[""]
        rows.append(row(name, "predict 100", peer, times["probit"], other, PREDICT[name] if peer == FASTER else None))
        if peer == FASTER:
            start = time.perf_counter()
            fitted.optimize_prior_precision(method="gridsearch", val_loader=held_out, grid_size=2)
            each = (time.perf_counter() - start) / 2
            rows.append(row(name, "grid, per value", peer, times["search"] / GRID, each, None))
    return rows


def evidence(rounds: int, peers: dict[str, type]) -> list[dict]:
    """100 steps of Adam up the evidence in the prior precision of a full posterior, decomposition included."""
    model = nn.Sequential(nn.Linear(20, 100), nn.Tanh(), nn.Linear(100, 9))
    generator = torch.Generator().manual_seed(0)
    data = Batches([(torch.randn(500, 20, generator=generator), torch.randint(9, (500,), generator=generator))])
    data.dataset = [None] * 500
    size = sum(p.numel() for p in model.parameters())
    la = Laplace(model, "classification", "all", "full")
    la.fit(data)
    matrix = la.H

    def eigh() -> None:
        torch.linalg.eigh(matrix.double())

    def steps() -> None:
        la.fit(data)  # a fresh curvature: nothing is decomposed yet
        start = time.perf_counter()
        la.optimize_prior_precision(method="adam", n_steps=100, lr=0.1)
        spent.append(time.perf_counter() - start)

    spent: list[float] = []
    times = best({"eigh": eigh, "steps": steps}, rounds)
    ours = min(spent)
    name = f"P={size}"
    rows = [row(name, "100 evidence steps", "one eigh", ours, times["eigh"], 1.5)]
    if FASTER in peers:
        other = peer_fit(model, data, "full", peers[FASTER])
        start = time.perf_counter()
        other.optimize_prior_precision(method="marglik", n_steps=3)
        rows.append(
            row(name, "evidence, per step", "laplace-torch", ours / 100, (time.perf_counter() - start) / 3, None)
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--all-peers", action="store_true")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    where = context("predict")
    warnings.simplefilter("ignore")  # peers warn about their own dependencies
    torch.set_num_threads(2)
    torch.manual_seed(0)
    peers = {} if arguments.no_peers else peer_backends()
    if not arguments.all_peers:
        peers = {name: peer for name, peer in peers.items() if name == FASTER}
    rows = []
    for name, model, points in (("mlp", mlp(), 2000), ("cnn", cnn(), 1000)):
        rows += predictions(name, model.eval(), points, peers, arguments.rounds)
    rows += evidence(3, peers)
    report(where, rows)


if __name__ == "__main__":
    main()
