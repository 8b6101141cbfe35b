"""The network of C17: three convolutions and three fully connected layers, trained by Adam to a MAP estimate."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

MEAN, DEVIATION = 0.2860, 0.3530  # of Fashion-MNIST's training pixels


class Normalise(nn.Module):
    """Pixels in [0, 1] to zero mean and unit deviation over the training pixels; the same for images of other kinds."""

    def __init__(self, mean: float, deviation: float) -> None:
        super().__init__()
        self.mean, self.deviation = mean, deviation

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.deviation


def network(
    channels: list[int],
    hidden: list[int],
    colours: int = 1,
    side: int = 28,
    mean: float = MEAN,
    deviation: float = DEVIATION,
) -> nn.Sequential:
    """[B, colours, side, side] -> [B, 10]."""
    a, b, c = channels
    d, e = hidden
    left = (((side - 4) // 2 - 2) // 2 // 2) ** 2  # pixels after the last pooling
    return nn.Sequential(
        Normalise(mean, deviation),
        *(nn.Conv2d(colours, a, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(a, b, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(b, c, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(left * c, d), nn.ReLU(), nn.Linear(d, e), nn.ReLU(), nn.Linear(e, 10)),
    )


def train(model: nn.Module, x: Tensor, y: Tensor, config: dict[str, Any], epochs: int) -> tuple[list[float], float]:
    """Adam with one cycle of the rate on -log p(y | x) + delta/2 |theta|^2; losses, and processor seconds an epoch."""
    generator = torch.Generator().manual_seed(config["seed"])
    steps = epochs * -(-len(x) // config["batch"])
    optimiser = torch.optim.Adam(model.parameters(), lr=config["rate"])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, config["rate"], total_steps=steps)
    decay = config["training_precision"] / 2 / len(x)
    losses, started = [], time.process_time()
    for _ in range(epochs):
        total = 0.0
        for index in torch.randperm(len(x), generator=generator).split(config["batch"]):
            optimiser.zero_grad()
            loss = cross_entropy(model(x[index]), y[index])
            (loss + decay * torch.stack([p.square().sum() for p in model.parameters()]).sum()).backward()
            optimiser.step()
            schedule.step()
            total += float(loss.detach()) * len(index)
        losses.append(total / len(x))
        print(f"epoch {len(losses)}: loss {losses[-1]:.4f}", flush=True)
    return losses, (time.process_time() - started) / epochs
