"""Claim to test: fits of deep convolutional and attention networks cost a few gradients of their data, predictions too.

    fit          kron <= 6, kron mc <= 2.5, diag <= 8, ekfac <= 15 gradients; warm: sample axes of the shape are known.
                 mc: one drawn target for each data point instead of all classes, in both passes of ekfac too
    predict      64 inputs, probit, decomposed before: <= 5 gradients of the batch
    first fit    what a user waits for at the first call, probing included; no bar

One batch of 64 images [3, 32, 32] of ten classes, random numbers. ResNet-20 (0.27M weights), a vision transformer with
a class token and learned positions (1.8M), an MLP (0.33M), and with --large a residual network of ResNet-50's blocks
(23M). All in one process, in turns, best of several; laplace-torch beside us where it is installed and runs.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from _common import Batches, best, context, peer_backends, peer_fit, report
from torch import Tensor, nn

from lapwing import Laplace
from lapwing.estimate import diagonal, ekfac, kfac, kflr
from lapwing.estimate.cotangents import monte_carlo
from lapwing.likelihoods import Categorical
from lapwing.tangent import Tangent

CLASSES, POINTS = 10, 64
BARS = {"kron": 6.0, "kron mc": 2.5, "diag": 8.0, "ekfac": 15.0, "ekfac mc": 15.0}
PREDICTED = 5.0


class Basic(nn.Module):
    """Two 3 x 3 convolutions with BatchNorm and a way around them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = conv(before, after, 3, stride), conv(after, after, 3)
        self.around = nn.Identity() if stride == 1 and before == after else conv(before, after, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(torch.relu(self.first(x))) + self.around(x))


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions, the last four times as wide, and a way around them."""

    def __init__(self, before: int, inside: int, stride: int) -> None:
        super().__init__()
        after = 4 * inside
        self.parts = nn.ModuleList([conv(before, inside, 1), conv(inside, inside, 3, stride), conv(inside, after, 1)])
        self.around = nn.Identity() if stride == 1 and before == after else conv(before, after, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.parts
        return torch.relu(third(torch.relu(second(torch.relu(first(x))))) + self.around(x))


def conv(before: int, after: int, size: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(before, after, size, stride, padding=size // 2, bias=False), nn.BatchNorm2d(after))


def resnet20() -> nn.Module:
    layers: list[nn.Module] = [conv(3, 16, 3), nn.ReLU()]
    before = 16
    for width in (16, 32, 64):
        for number in range(3):
            layers.append(Basic(before, width, 2 if number == 0 and width > 16 else 1))
            before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, CLASSES))


def resnet50() -> nn.Module:
    layers: list[nn.Module] = [conv(3, 64, 3), nn.ReLU()]
    before = 64
    for width, count in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for number in range(count):
            layers.append(Bottleneck(before, width, 2 if number == 0 and width > 64 else 1))
            before = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, CLASSES))


class Vit(nn.Module):
    """64 patches of 4 x 4, a class token, learned positions, encoder layers; the class token's output is read."""

    def __init__(self, width: int = 192, layers: int = 4, heads: int = 3) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.place = nn.Parameter(0.02 * torch.randn(1, 65, width))
        options: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": True, "activation": "gelu"}
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, **options) for _ in range(layers)
        )
        self.norm, self.last = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.embed(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), patches], 1) + self.place
        for layer in self.layers:
            tokens = layer(tokens)
        return self.last(self.norm(tokens)[:, 0])


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(3072, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, CLASSES)
    )


NETWORKS = {"resnet20": resnet20, "vit": Vit, "mlp": mlp, "resnet50": resnet50}


def images() -> Batches:
    generator = torch.Generator().manual_seed(0)
    data = Batches(
        [(torch.randn(POINTS, 3, 32, 32, generator=generator), torch.randint(CLASSES, (POINTS,), generator=generator))]
    )
    data.dataset = [None] * POINTS
    return data


def row(network: str, work: str, against: str, seconds: float, other: float, bar: float | None) -> dict[str, Any]:
    times = {"seconds": seconds, "other_seconds": other, "ratio": seconds / other}
    return {"network": network, "work": work, "against": against, **times, "bar": bar}


def fits(
    name: str, model: nn.Module, data: Batches, rounds: int, structures: list[str]
) -> tuple[list[dict[str, Any]], float]:
    """The rows of the fits, and the seconds of a gradient."""
    likelihood, generator, tangent = Categorical(), torch.Generator().manual_seed(0), Tangent(model)
    (x, y), parameters = data[0], list(model.parameters())

    def gradient() -> None:
        torch.autograd.grad(nn.functional.cross_entropy(model(x), y, reduction="sum"), parameters)

    runs = {
        "kron": lambda: kflr(tangent, likelihood, data),
        "kron mc": lambda: kfac(tangent, likelihood, data, generator=generator),
        "diag": lambda: diagonal(tangent, likelihood, data),
        "ekfac": lambda: ekfac(tangent, likelihood, data),
        "ekfac mc": lambda: ekfac(tangent, likelihood, data, cotangents=monte_carlo(1), generator=generator),
    }
    runs = {key: run for key, run in runs.items() if key in structures}
    unit = best({"": gradient}, rounds)[""]
    start = time.perf_counter()
    kfac(Tangent(model), likelihood, data, generator=generator)
    first = time.perf_counter() - start
    times = best({"gradient": gradient, **runs}, rounds)
    unit = min(unit, times["gradient"])
    rows = [row(name, key, "gradients", times[key], unit, BARS[key]) for key in runs]
    return [*rows, row(name, "first fit, kron mc", "gradients", first, unit, None)], unit


def predictions(
    name: str, model: nn.Module, data: Batches, rounds: int, unit: float, structures: list[str]
) -> list[dict[str, Any]]:
    rows, x = [], data[0][0]
    extra = {"mlp": {"lowrank": {"rank": 50}}, "resnet20": {"gp": {}}}.get(name, {})
    for structure, options in {"kron": {"estimator": "mc"}, "diag": {}, **extra}.items():
        if structure not in structures and structure not in extra:
            continue
        la = Laplace(model, "classification", "all", structure, **options)
        la.fit(data)
        start = time.perf_counter()
        la(x)
        first = time.perf_counter() - start
        seconds = best({"": lambda la=la: la(x)}, rounds)[""]
        rows.append(row(name, f"predict, {structure}", "gradients", seconds, unit, PREDICTED))
        rows.append(row(name, f"first, {structure}", "gradients", first, unit, None))
    return rows


def peers(name: str, model: nn.Module, data: Batches, ours: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """laplace-torch's Kronecker fit, by the backends that take the network."""
    kron, rows = next(each["seconds"] for each in ours if each["work"] == "kron"), []
    for peer, backend in peer_backends().items():
        try:
            seconds = best({"": lambda b=backend: peer_fit(model, data, "kron", b)}, 1, warm=False)[""]
        except Exception as error:  # whatever a peer raises is its answer
            print(f"{name}: {peer} does not fit it: {type(error).__name__}: {str(error)[:90]}")
            continue
        rows.append(row(name, "kron", peer, kron, seconds, None))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--large", action="store_true", help="the 23M-weight network too, kron mc and diag alone")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=list(NETWORKS), choices=list(NETWORKS))
    arguments = parser.parse_args()
    where = context("modern")
    torch.set_num_threads(arguments.threads)
    rows: list[dict[str, Any]] = []
    for name in arguments.only:
        large = name == "resnet50"
        if large and not arguments.large:
            continue
        torch.manual_seed(0)
        model, data = NETWORKS[name]().eval(), images()
        structures = ["kron mc", "diag"] if large else list(BARS)
        found, unit = fits(name, model, data, 1 if large else arguments.rounds, structures)
        found += predictions(name, model, data, 1 if large else arguments.rounds, unit, structures)
        if not large and not arguments.no_peers:
            found += peers(name, model, data, found)
        rows += found
        print(
            f"{name}: {sum(p.numel() for p in model.parameters()):,} weights, gradient {1e3 * unit:.0f} ms", flush=True
        )
    report(where, rows)


if __name__ == "__main__":
    main()
