"""Claim to test: the functional covariance of 100 inputs, all weights, Kronecker: 300 (MLP) and 20 (CNN) times faster.

laplace-torch forms [batch, outputs, parameters] Jacobians; lapwing rotates the factors of each layer. Both return
J Sigma J^T [100, 10, 10] of the same network in the same process; peers are timed as the best of two runs after one to
warm up, lapwing as the best of several.
"""

from __future__ import annotations

import argparse

import torch
from _common import batches, best, cnn, context, mlp, peer_backends, peer_fit, report
from torch import nn

from lapwing.estimate import diagonal, kflr
from lapwing.likelihoods import Categorical
from lapwing.tangent import Tangent

BARS = {("mlp", "kron"): 1 / 300, ("cnn", "kron"): 1 / 20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    where = context("covariance")
    torch.set_num_threads(2)
    torch.manual_seed(0)
    rows = []
    for name, model, points in (("mlp", mlp(), 2000), ("cnn", cnn(), 1000)):
        for structure in ("kron", "diag"):
            rows += predict(name, model.eval(), points, structure, arguments)
    report(where, rows)


def predict(name: str, model: nn.Module, points: int, structure: str, arguments: argparse.Namespace) -> list[dict]:
    data = batches(points)
    x = data[0][0]
    tangent = Tangent(model)
    estimator = kflr if structure == "kron" else diagonal
    precision = estimator(tangent, Categorical(), data).with_prior(1.0)
    contenders = {"forward pass": lambda: model(x), "ours": lambda: precision.covariance(tangent.at(x))}
    times = best(contenders, arguments.rounds)
    against = {"forward pass": times["forward pass"]}
    for peer, backend in ({} if arguments.no_peers or structure == "diag" else peer_backends()).items():
        fitted = peer_fit(model, data, structure, backend)
        against[peer] = best({"": lambda f=fitted: f._glm_predictive_distribution(x)}, 2)[""]
    peers = [seconds for other, seconds in against.items() if other != "forward pass"]
    if peers:
        against["faster peer"] = min(peers)
    return [
        {
            "network": name,
            "work": f"predict 100, {structure}",
            "against": other,
            "seconds": times["ours"],
            "other_seconds": seconds,
            "ratio": times["ours"] / seconds,
            "bar": BARS.get((name, structure)) if other == "faster peer" else None,
        }
        for other, seconds in against.items()
    ]


if __name__ == "__main__":
    main()
