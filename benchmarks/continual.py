"""Claim: to learn a task under the posterior of earlier ones costs one or two plain steps more per step and kept task.

784-100-100-10 with batches of 250, one thread, float32. After T tasks another one is learnt, by Adam: what is timed is
an epoch of steps, as the difference between runs of three epochs and of one; what is left of the run of one is the
curvature of the task. The ratio is to an epoch of the same steps without any quadratic, in the same run, in turns, best
of several. Kronecker terms kept or merged, diagonals, EWC, SI; the number behind a name is T.

    python benchmarks/continual.py [--rounds 3]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from _common import best, context, report, write
from torch import Tensor, nn

from lapwing.training import Continual

BATCH, BATCHES = 250, 20
CONTENDERS: dict[str, dict[str, Any]] = {
    "kron, kept": {"structure": "kron"},
    "kron, factors added": {"structure": "kron", "terms": "factors"},
    "ewc, kron": {"structure": "kron", "method": "ewc"},
    "diag": {"structure": "diag"},
    "ewc, diag": {"structure": "diag", "method": "ewc"},
    "si": {"method": "si"},
}
TASKS = {"kron, kept": (1, 5, 15, 50)}
FEW = (1, 15)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10))


def adam(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(weights, lr=1e-4)


def plain(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> Callable[[], None]:
    optimiser = adam(model.parameters())

    def run() -> None:
        for x, y in data:
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimiser.step()

    return run


def later(tasks: int, data: list[tuple[Tensor, Tensor]], options: dict[str, Any]) -> Callable[[int], Callable]:
    """What learns one more task, in so many epochs, always from the same state."""
    torch.manual_seed(0)
    known = Continual(network(), "classification", **options)
    for k in range(tasks):
        generator = torch.Generator().manual_seed(k)
        rolled = [(x[:, torch.randperm(784, generator=generator)], y) for x, y in data[:2]]
        known.learn(rolled, epochs=1, optimizer=adam)

    def learns(epochs: int) -> Callable[[], object]:
        return lambda: deepcopy(known).learn(data, epochs=epochs, optimizer=adam)

    return learns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    where = context("continual")
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    data = [
        (torch.rand(BATCH, 784, generator=generator), torch.randint(10, (BATCH,), generator=generator))
        for _ in range(BATCHES)
    ]
    work: dict[str, Callable[[], object]] = {"plain": plain(network(), data)}
    cases = [(name, tasks) for name in CONTENDERS for tasks in TASKS.get(name, FEW)]
    for name, tasks in cases:
        learns = later(tasks, data, CONTENDERS[name])
        work |= {f"{name}, {tasks}, 1": learns(1), f"{name}, {tasks}, 3": learns(3)}
    times = best(work, rounds)
    rows = []
    for name, tasks in cases:
        once, thrice = (times[f"{name}, {tasks}, {epochs}"] for epochs in (1, 3))
        epoch = (thrice - once) / 2
        rows.append(
            {
                "network": "mlp",
                "work": f"{name}, {tasks}",
                "against": "plain",
                "seconds": epoch / BATCHES,
                "other_seconds": times["plain"] / BATCHES,
                "ratio": epoch / times["plain"],
                "bar": None,
                "curvature_in_plain_epochs": (once - epoch) / times["plain"],
            }
        )
    report(where, rows)
    write(where, {"rows": rows})


if __name__ == "__main__":
    main()
