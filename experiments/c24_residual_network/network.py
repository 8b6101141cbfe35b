"""A residual network of bottleneck blocks, ResNet-50 by its sizes, and the images that it is trained on a little."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import colour_images


class Bottleneck(nn.Module):
    """1 x 1 to `width` channels, 3 x 3, 1 x 1 to four times as many, and the input beside it."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        self.narrow = nn.Conv2d(before, width, 1, bias=False)
        self.first = nn.BatchNorm2d(width)
        self.middle = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.second = nn.BatchNorm2d(width)
        self.wide = nn.Conv2d(width, after, 1, bias=False)
        self.third = nn.BatchNorm2d(after)
        self.beside: nn.Module = nn.Identity()
        if stride > 1 or before != after:
            self.beside = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.relu(self.first(self.narrow(x)))
        inner = torch.relu(self.second(self.middle(inner)))
        return torch.relu(self.third(self.wide(inner)) + self.beside(x))


def network(widths: list[int], blocks: list[int], classes: int) -> nn.Sequential:
    """Images [B, 3, 32, 32] to logits [B, classes]; ResNet-50 has widths 64, 128, 256, 512 and 3, 4, 6, 3 blocks."""
    first = widths[0]
    layers: list[nn.Module] = [nn.Conv2d(3, first, 7, 2, 3, bias=False), nn.BatchNorm2d(first), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    before = first
    for stage, (width, count) in enumerate(zip(widths, blocks, strict=True)):
        for number in range(count):
            layers.append(Bottleneck(before, width, 2 if stage and not number else 1))
            before = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))


def images(config: dict[str, Any], seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Images of the first classes alone: those of the fit, others to train with, and those that are predicted."""
    found = {}
    for split in ("train", "test"):
        x, y = colour_images("cifar10", split)
        x, y = x[y < config["classes"]] - 0.5, y[y < config["classes"]]
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        found[split] = x[order], y[order]
    x, y = found["train"]
    points = config["points"]
    inputs, targets = found["test"]
    return {
        "fit": (x[:points], y[:points]),
        "train": (x, y),
        "predict": (inputs[: config["inputs"]], targets[: config["inputs"]]),
    }


def trained(config: dict[str, Any], seed: int) -> nn.Sequential:
    """A few steps of Adam in train mode, so that the statistics of the normalisations are those of images."""
    torch.manual_seed(seed)
    model = network(config["widths"], config["blocks"], config["classes"])
    x, y = images(config, seed)["train"]
    optimiser = torch.optim.Adam(model.parameters(), config["rate"])
    for _ in range(config["training_steps"]):
        chosen = torch.randint(len(x), (config["training_batch"],))
        loss = nn.functional.cross_entropy(model(x[chosen]), y[chosen])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model.eval()
