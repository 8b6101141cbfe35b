"""Claim: a Gauss-Newton step with Kronecker factors costs a few gradients of its batch.

The autoencoder of the thesis on MNIST's shape, 784-1000-500-250-30-250-500-1000-784, a batch of 1000, two threads. A
contender takes ten steps, of which one (or every one) renews the curvature; the ratio is to ten gradients in the same
run, in turns, best of several. The damping is given, so that no step searches for it. Below: what the parts of a step
cost.

    python benchmarks/optimiser.py [--rounds 4]
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from _common import best, context, report, write
from torch import Tensor, nn

from lapwing.estimate import kfac, kfra
from lapwing.likelihoods import Bernoulli
from lapwing.serialize import pack, unpack
from lapwing.tangent import Tangent
from lapwing.training import GaussNewton
from lapwing.training.quadratic import Here, Penalty

SIZES = (784, 1000, 500, 250, 30, 250, 500, 1000, 784)
STEPS = 10
BAR = 2.5
CONTENDERS: dict[str, dict] = {
    "kfac": {"refresh": 10, "verify": False},
    "kfac, split": {"refresh": 10, "verify": False, "options": {"factored_damping": True}},
    "kfac, split, verified": {"refresh": 10, "options": {"factored_damping": True}},
    "kfac, split, each": {"refresh": 1, "verify": False, "options": {"factored_damping": True}},
    "kfac, each": {"refresh": 1, "verify": False},
    "kfra, split": {"refresh": 10, "verify": False, "estimator": "recursive", "options": {"factored_damping": True}},
}


def autoencoder() -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(SIZES):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def gradients(model: nn.Module, data: list[Tensor]) -> None:
    parameters = list(model.parameters())
    for x in data:
        loss = nn.functional.binary_cross_entropy_with_logits(model(x), x, reduction="sum") / len(x)
        torch.autograd.grad(loss, parameters)


def steps(model: nn.Module, data: list[Tensor], **options: Any) -> Callable[[], object]:
    optimiser = GaussNewton(
        copy.deepcopy(model), Bernoulli(), generator=torch.Generator().manual_seed(0), tau=1.0, zeta=1.0,
        zeta_every=10**6, **options,
    )  # fmt: skip

    def run() -> None:
        for x in data:
            optimiser.step(x, x)

    return run


def parts(model: nn.Module, x: Tensor, rounds: int) -> dict[str, float]:
    """Seconds of what a step is made of, once each."""
    tangent, likelihood, generator = Tangent(model), Bernoulli(), torch.Generator().manual_seed(0)
    data = [(x, x)]
    whole = kfac(tangent, likelihood, data, generator=generator)
    split = kfac(tangent, likelihood, data, generator=generator, factored_damping=True)
    here = Here.of(tangent, likelihood, Penalty(), data)
    eigen, inverse = whole.with_prior(1000.0), split.with_prior(1000.0)
    described = pack(whole)
    work: dict[str, Callable[[], object]] = {
        "gradient, plain": lambda: gradients(model, [x]),
        "loss and gradient": lambda: Here.of(tangent, likelihood, Penalty(), data),
        "product with the exact curvature": lambda: here.bends(here.gradient.unsqueeze(0)),
        "loss behind the step": lambda: here.loss(here.theta),
        "solve, eigenbasis": lambda: eigen.solve(here.gradient),
        "solve, split damping": lambda: inverse.solve(here.gradient),
        "curvature, drawn": lambda: kfac(tangent, likelihood, data, generator=generator),
        "curvature, recursive": lambda: kfra(tangent, likelihood, data),
        # what comes from a description has no eigenvectors yet; a copy would bring those it was made with
        "eigenvectors": lambda: unpack(*described).with_prior(1000.0),
        "inverses": lambda: split.with_prior(1000.0).solve(here.gradient),
    }
    return best(work, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    rounds = parser.parse_args().rounds
    where = context("optimiser")
    torch.set_num_threads(2)
    torch.manual_seed(0)
    model, generator = autoencoder(), torch.Generator().manual_seed(1)
    data = [torch.rand(1000, SIZES[0], generator=generator) for _ in range(STEPS)]
    work: dict[str, Callable[[], object]] = {"gradients": lambda: gradients(model, data)}
    work |= {name: steps(model, data, **options) for name, options in CONTENDERS.items()}
    times = best(work, rounds)
    rows = [
        {
            "network": "mnist ae",
            "work": name,
            "against": "gradients",
            "seconds": times[name] / STEPS,
            "other_seconds": times["gradients"] / STEPS,
            "ratio": times[name] / times["gradients"],
            "bar": BAR if name.startswith("kfac") and not name.endswith("each") else None,
        }
        for name in CONTENDERS
    ]
    report(where, rows)
    found = parts(model, data[0], rounds)
    for name, seconds in found.items():
        print(f"{name:34} {1e3 * seconds:8.1f} ms  {seconds / found['gradient, plain']:6.2f} gradients")
    write(where, {"rows": rows, "parts": found})


if __name__ == "__main__":
    main()
