"""Rates: what this machine takes for the kinds of operations that fits are made of, measured in a few hundred ms.

The network's own passes are timed on a batch of its own; products, copies and decompositions on matrices of moderate
size, once per process, number of threads and dtype.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import log

import torch

from lapwing.laplace.counts import Work

LARGE_SHARE = 0.6
"""Of the speed of a product of two square matrices, what sums over data have, which are long and narrow."""
SMALL_SHARE = 0.35
"""Of the speed of a large product, what many small ones have."""
WIDTHS = (96, 384)
"""Of the matrices whose decomposition is timed."""
TAPE = 6.0
"""Forward passes that a walk back over every operation costs."""


@dataclass(frozen=True)
class Machine:
    """Operations a second in large products, bytes a second, seconds a call, and of decompositions c * width^power."""

    products: float | int
    moved: float | int
    call: float | int
    eigen: tuple[float, float]

    def decomposition(self, width: int) -> float | int:
        """Beyond the widths that were timed with the third power, as products then take all of the time."""
        scale, power = self.eigen
        timed = min(max(1, width), WIDTHS[1])
        return scale * timed**power * (max(1, width) / timed) ** 3


@dataclass(frozen=True)
class Rates:
    """The machine, and seconds for a data point through the network: forwards, and back with one cotangent."""

    machine: Machine
    forward: float | int
    backward: float | int

    def seconds(self, work: Work) -> float | int:
        """What work takes."""
        machine = self.machine
        return (
            work.forward * self.forward
            + work.backward * self.backward
            + work.tape * TAPE * self.forward
            + work.products / (LARGE_SHARE * machine.products)
            + work.small / (SMALL_SHARE * machine.products)
            + work.moved / machine.moved
            + work.calls * machine.call
            + sum(many * machine.decomposition(width) for many, width in work.decomposed)
        )


_KNOWN: dict[tuple[str, str, int], Machine] = {}


def machine_of(dtype: torch.dtype, device: torch.device) -> Machine:
    """Measured once, in about a quarter of a second."""
    key = str(dtype), str(device), torch.get_num_threads()
    if key not in _KNOWN:
        _KNOWN[key] = _measured(dtype, device)
    return _KNOWN[key]


def _measured(dtype: torch.dtype, device: torch.device) -> Machine:
    generator = torch.Generator().manual_seed(0)

    def matrix(width: int, kind: torch.dtype) -> torch.Tensor:
        return torch.randn(width, width, generator=generator, dtype=torch.float32).to(device, kind)

    a, long, few = matrix(512, dtype), matrix(1024, dtype), torch.ones(8, dtype=dtype, device=device)
    seconds = best(lambda: a @ a, device)
    copied = best(lambda: long * long, device)
    called = best(lambda: [few + few for _ in range(100)], device) / 100
    times = []
    for width in WIDTHS:
        square = matrix(width, torch.float64)
        square = square @ square.mT
        times.append(best(lambda square=square: torch.linalg.eigh(square), device))
    power = min(3.2, max(2.0, log(times[1] / times[0]) / log(WIDTHS[1] / WIDTHS[0])))
    return Machine(
        2 * 512**3 / seconds,
        3 * long.numel() * long.element_size() / copied,
        called,
        (times[1] / WIDTHS[1] ** power, power),
    )


def best(run: Callable[[], object], device: torch.device, rounds: int = 3, limit: float = 0.1) -> float | int:
    """The shortest time of a few runs after a first one, which alone is taken where it is longer than `limit`."""
    first = _timed(run, device)
    if first > limit:
        return first
    return min(_timed(run, device) for _ in range(rounds))


def _timed(run: Callable[[], object], device: torch.device) -> float | int:
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
