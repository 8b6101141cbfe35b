"""The two problems of the scripts: data, a network and its trained weights, as numbers in `small_problems.json`.

`python small_problems.py` draws and trains them again; everybody else only reads, so that two libraries, or two
versions of torch, see the same weights to the last digit.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

STORED = Path(__file__).with_name("small_problems.json")


def network(kind: str) -> nn.Sequential:
    """A tanh network of the problem's size, with weights yet to be filled in."""
    inputs, outputs, hidden = {"regression": (1, 1, 8), "classification": (2, 3, 6)}[kind]
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))


def load(kind: str) -> tuple[nn.Sequential, DataLoader[Any], Tensor]:
    """The trained network, its training data in batches, and inputs to predict at. float64 throughout."""
    stored = json.loads(STORED.read_text())[kind]
    model = network(kind).double()
    weights = {name: torch.tensor(values, dtype=torch.float64) for name, values in stored["weights"].items()}
    model.load_state_dict(weights)
    x = torch.tensor(stored["x"], dtype=torch.float64)
    y = torch.tensor(stored["y"], dtype=torch.float64 if kind == "regression" else torch.int64)
    test = torch.tensor(stored["test"], dtype=torch.float64)
    return model, DataLoader(TensorDataset(x, y), batch_size=16), test


def numbers(value: Any) -> Any:
    """Tensors, in whatever they are nested, as plain lists of numbers."""
    if isinstance(value, Tensor):
        return value.detach().tolist()
    if isinstance(value, dict):
        return {key: numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [numbers(item) for item in value]
    return value


def average(draws: Tensor) -> dict[str, Any]:
    """Mean over the first axis and its standard error: what two libraries with other random numbers can compare."""
    return {"mean": numbers(draws.mean(0)), "error": numbers(draws.std(0) / math.sqrt(len(draws)))}


def _train(kind: str, x: Tensor, y: Tensor) -> nn.Sequential:
    """The mode of the log joint with a unit Gaussian prior, by L-BFGS."""
    model = network(kind).double()
    loss = {"regression": lambda f: 50 * (f - y).square().sum(), "classification": _cross_entropy(y)}[kind]
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1000, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(model(x)) + sum(p.square().sum() for p in model.parameters()) / 2
        value.backward()
        return value

    for _ in range(5):
        optimizer.step(closure)
    return model


def _cross_entropy(y: Tensor) -> Any:
    return lambda f: nn.functional.cross_entropy(f, y, reduction="sum")


def _make() -> None:
    torch.manual_seed(7)
    made = {}
    x = torch.linspace(-2, 2, 40, dtype=torch.float64).unsqueeze(1)
    x = x[(x.abs() > 0.6).squeeze(1)]
    y = torch.sin(2 * x) + 0.15 * torch.randn(x.shape, dtype=torch.float64)
    made["regression"] = (x, y, torch.linspace(-3, 3, 7, dtype=torch.float64).unsqueeze(1))
    centres = torch.tensor([[0.0, 1.5], [1.5, -1.0], [-1.5, -1.0]], dtype=torch.float64)
    labels = torch.arange(45) % 3
    x = centres[labels] + 0.8 * torch.randn(45, 2, dtype=torch.float64)
    test = torch.tensor([[0.0, 0.0], [0.3, 1.2], [2.0, -1.0], [-3.0, 2.0], [0.1, -4.0]], dtype=torch.float64)
    made["classification"] = (x, labels, test)
    stored = {}
    for kind, (x, y, test) in made.items():
        model = _train(kind, x, y)
        stored[kind] = numbers({"x": x, "y": y, "test": test, "weights": model.state_dict()})
    STORED.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    _make()
