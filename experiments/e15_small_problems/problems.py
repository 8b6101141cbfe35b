"""Small least-squares problems where people ask for Levenberg-Marquardt, as networks with residuals for outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import pi
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Problem:
    """Minimise mean (f(x) - y)^2 / 2 + decay / 2 |theta|^2."""

    model: nn.Module
    x: Tensor
    y: Tensor
    decay: float


class Rosenbrock(nn.Module):
    """Row n of x chooses one of the residuals 10 (t_{i+1} - t_i^2) and 1 - t_i."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.t = nn.Parameter(start)

    def forward(self, x: Tensor) -> Tensor:
        residuals = torch.cat([10 * (self.t[1:] - self.t[:-1] ** 2), 1 - self.t[:-1]])
        return (x * residuals).sum(1, keepdim=True)


def rosenbrock(seed: int, config: dict[str, Any]) -> Problem:
    """A long curved valley; the usual start, moved a little."""
    generator = torch.Generator().manual_seed(seed)
    size = config["dimensions"]
    start = torch.tensor([-1.2, 1.0] * size, dtype=torch.float64)[:size]
    start = start + 0.1 * torch.randn(size, generator=generator, dtype=torch.float64)
    rows = torch.eye(2 * (size - 1), dtype=torch.float64)
    return Problem(Rosenbrock(start), rows, torch.zeros(len(rows), 1, dtype=torch.float64), 0.0)


def regression(seed: int, config: dict[str, Any]) -> Problem:
    """A 1-50-1 tanh network and a wave with noise."""
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.rand(config["points"], 1, generator=generator, dtype=torch.float64) - 1
    noise = 0.05 * torch.randn(x.shape, generator=generator, dtype=torch.float64)
    torch.manual_seed(seed)
    width = config["width"]
    model = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 1)).double()
    return Problem(model, x, torch.sin(3 * x) + 0.3 * torch.cos(9 * x) + noise, config["decay"])


class Poisson(nn.Module):
    """Residuals of u'' = -pi^2 sin(pi x) inside, and of u = 0 at the ends, by derivatives carried along with values."""

    def __init__(self, width: int, ends: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1, width), nn.Linear(width, width), nn.Linear(width, 1)])
        self.ends = ends

    def forward(self, x: Tensor) -> Tensor:
        place, at_end = x[:, :1], x[:, 1:]
        value, slope, bend = place, torch.ones_like(place), torch.zeros_like(place)
        for number, layer in enumerate(self.layers):
            if number:
                t = torch.tanh(value)
                inner = 1 - t * t
                value, slope, bend = t, inner * slope, inner * bend - 2 * t * inner * slope * slope
            assert isinstance(layer, nn.Linear)
            weight = layer.weight
            value, slope, bend = layer(value), slope @ weight.mT, bend @ weight.mT
        inside = bend + pi**2 * torch.sin(pi * place)
        return at_end * self.ends * value + (1 - at_end) * inside


def poisson(seed: int, config: dict[str, Any]) -> Problem:
    """A physics-informed network for Poisson's equation in one dimension."""
    torch.manual_seed(seed)
    model = Poisson(config["width"], config["ends"]).double()
    inside = torch.linspace(-1, 1, config["points"] + 2, dtype=torch.float64)[1:-1]
    places = torch.cat([inside, torch.tensor([-1.0, 1.0], dtype=torch.float64)])
    at_end = torch.cat([torch.zeros_like(inside), torch.ones(2, dtype=torch.float64)])
    return Problem(model, torch.stack([places, at_end], 1), torch.zeros(len(places), 1, dtype=torch.float64), 0.0)


PROBLEMS: dict[str, Callable[[int, dict[str, Any]], Problem]] = {
    "rosenbrock": rosenbrock,
    "regression": regression,
    "poisson": poisson,
}
