"""Claim to test: a last layer of 512 features and 1000 classes fits and predicts within 1 GB over the model.

The covariance [16, 1000, 1000] and the variances of 16 inputs are timed against a forward pass. The peak of resident
memory over the model and its data is taken in a process of its own, from VmHWM after a reset (Linux): `ru_maxrss` would
not do, as a child starts with its parent's. With 100 classes and 256 points, laplace-torch fits and predicts the same
layer in the same run, where it is installed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _common import Batches, best, context, peer_backends, report
from torch import nn

from lapwing.estimate import last_layer
from lapwing.likelihoods import Categorical
from lapwing.tangent import FeatureTangent

FEATURES, GIGABYTE = 512, 2**30
STRUCTURES: dict[str, Callable] = {"kron": last_layer.kron, "diag": last_layer.diagonal}


def network(classes: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, FEATURES), nn.ReLU(), nn.Linear(FEATURES, classes)).eval()


def data(points: int, classes: int, size: int = 100) -> Batches:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(points, 1, 28, 28, generator=generator)
    y = torch.randint(classes, (points,), generator=generator)
    batches = Batches(zip(x.split(size), y.split(size), strict=True))
    batches.dataset = [None] * points
    return batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    where = context("last_layer")
    torch.set_num_threads(2)
    check_measure()
    rows = []
    for structure in STRUCTURES:
        rows += predict(structure, arguments.rounds)
        rows += peak(structure, 1000, 16)
    rows += against_peer(not arguments.no_peers)
    report(where, rows)


def row(network: str, work: str, against: str, seconds: float, other: float, bar: float | None = None, **more) -> dict:
    times = {"seconds": seconds, "other_seconds": other, "ratio": seconds / other}
    return {"network": network, "work": work, "against": against, **times, "bar": bar, **more}


def predict(structure: str, rounds: int) -> list[dict]:
    """Time of 16 predictions, and of the fit, over a forward pass of the same inputs."""
    model, batches = network(1000), data(400, 1000)
    tangent, x = FeatureTangent(model), batches[0][0][:16]
    precision = STRUCTURES[structure](tangent, Categorical(), batches).with_prior(1.0)

    def forward_all() -> None:
        with torch.no_grad():
            for inputs, _ in batches:
                model(inputs)

    contenders = {
        "forward": lambda: model(x),
        "covariance": lambda: precision.covariance(tangent.at(x)),
        "variances": lambda: precision.variances(tangent.at(x)),
        "forward of all": forward_all,
        "fit": lambda: STRUCTURES[structure](tangent, Categorical(), batches),
    }
    times = best(contenders, rounds)
    return [
        row("1000", f"predict 16, {structure}", "forward pass", times["covariance"], times["forward"]),
        row("1000", f"variances 16, {structure}", "forward pass", times["variances"], times["forward"]),
        row("1000", f"fit 400, {structure}", "forward passes", times["fit"], times["forward of all"]),
    ]


# -- peak memory, each in a process of its own ------------------------------------------------------------------------


def memory(field: str) -> int:
    """Bytes of this process: VmRSS now, or VmHWM at its peak since the last reset."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def measured(work: Callable[..., Callable[[], None]], *args: Any) -> tuple[float, int]:
    """Seconds, and bytes by which the peak of a fresh process exceeds what it held before."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, work, args))
    process.start()
    sender.close()
    result = receiver.recv()
    process.join()
    return result


def _child(sender: Any, work: Callable[..., Callable[[], None]], args: tuple) -> None:
    torch.set_num_threads(2)
    run = work(*args)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # sets the peak back to what is held now
    before, start = memory("VmRSS"), time.perf_counter()
    run()
    sender.send((time.perf_counter() - start, memory("VmHWM") - before))
    sender.close()


def known(size: int) -> Callable[[], None]:
    """A tensor of so many bytes, made and dropped."""

    def run() -> None:
        torch.ones(size // 4)

    return run


def check_measure() -> None:
    """The measure sees a known amount, and no more than that: else its figures would mean nothing."""
    for size in (2**23, 2**28):
        _, found = measured(known, size)
        if not 0.9 * size <= found <= size + 2**23:
            raise RuntimeError(f"a tensor of {size} bytes was measured as {found}; expected as many within 8 MB.")


def ours(structure: str, classes: int, points: int, inputs: int) -> Callable[[], None]:
    model, batches = network(classes), data(points, classes)
    x = data(inputs, classes, inputs)[0][0]
    model(x)  # threads and workspaces are the model's

    def run() -> None:
        tangent = FeatureTangent(model)
        precision = STRUCTURES[structure](tangent, Categorical(), batches).with_prior(1.0)
        precision.covariance(tangent.at(x))

    return run


def theirs(classes: int, points: int, inputs: int) -> Callable[[], None]:
    from laplace import Laplace  # pyright: ignore[reportMissingImports]

    model, batches = network(classes), data(points, classes)
    x = data(inputs, classes, inputs)[0][0]
    model(x)

    def run() -> None:
        fitted = Laplace(model, "classification", subset_of_weights="last_layer", hessian_structure="kron")
        fitted.fit(batches)
        fitted._glm_predictive_distribution(x)

    return run


def peak(structure: str, classes: int, inputs: int) -> list[dict]:
    seconds, peak_bytes = measured(ours, structure, classes, 100, inputs)
    work = f"memory {inputs}, {structure}"
    print(f"{work}: {peak_bytes / GIGABYTE:.2f} GB over the model, {seconds:.2f} s with the fit of 100")
    # seconds stand for gigabytes: the ratio is what the bar is about
    return [row(str(classes), work, "1 GB", peak_bytes / GIGABYTE, 1.0, 1.0, unit="GB")]


def against_peer(peers: bool) -> list[dict]:
    """Fit 256 points and predict them, 100 classes."""
    seconds, peak_bytes = measured(ours, "kron", 100, 256, 256)
    print(f"100 classes, 256 points, kron: {seconds:.2f} s, {peak_bytes / GIGABYTE:.2f} GB")
    if not peers or not peer_backends():
        return []
    other_seconds, other_bytes = measured(theirs, 100, 256, 256)
    return [
        row("100", "fit + predict 256", "laplace-torch", seconds, other_seconds),
        row("100", "memory 256", "laplace-torch", peak_bytes / GIGABYTE, other_bytes / GIGABYTE, unit="GB"),
    ]


if __name__ == "__main__":
    main()
