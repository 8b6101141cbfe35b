"""Four networks of about 46,000 weights for images [B, 1, 14, 14] of ten classes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

CLASSES = 10
SIDE = 14


def cnn(channels: tuple[int, int, int]) -> nn.Sequential:
    """Three convolutions with BatchNorm, the mean over positions, and a linear layer."""
    a, b, c = channels
    return nn.Sequential(
        *(nn.Conv2d(1, a, 3, 2, 1, bias=False), nn.BatchNorm2d(a), nn.ReLU()),
        *(nn.Conv2d(a, b, 3, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU()),
        *(nn.Conv2d(b, c, 3, 2, 1, bias=False), nn.BatchNorm2d(c), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, CLASSES)),
    )


class Residual(nn.Module):
    """x + conv(conv(x)), with BatchNorm after each convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        inside = torch.relu(self.first_norm(self.first(x)))
        return torch.relu(x + self.second_norm(self.second(inside)))


def resnet(channels: int, blocks: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(1, channels, 3, 2, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()),
        nn.AvgPool2d(2, ceil_mode=True),
        *(Residual(channels) for _ in range(blocks)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES)),
    )


class FixupResidual(nn.Module):
    """x + conv(conv(x)) with learned scalars in the place of norms; the second convolution begins at zero."""

    def __init__(self, channels: int, blocks: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.shifts = nn.ParameterList(nn.Parameter(torch.zeros(1)) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(1))
        nn.init.kaiming_normal_(self.first.weight, nonlinearity="relu")
        with torch.no_grad():
            self.first.weight.mul_(blocks**-0.5)
        nn.init.zeros_(self.second.weight)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d = self.shifts
        inside = torch.relu(self.first(x + a) + b)
        return torch.relu(x + self.scale * self.second(inside + c) + d)


class Shift(nn.Module):
    """x + a learned scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


def fixup(channels: int, blocks: int) -> nn.Sequential:
    """The residual network without normalisation, begun as Zhang et al. (2019) have it; the last layer is zero then."""
    stem, last = nn.Conv2d(1, channels, 3, 2, 1, bias=False), nn.Linear(channels, CLASSES)
    nn.init.kaiming_normal_(stem.weight, nonlinearity="relu")
    nn.init.zeros_(last.weight)
    return nn.Sequential(
        *(stem, Shift(), nn.ReLU(), nn.AvgPool2d(2, ceil_mode=True)),
        *(FixupResidual(channels, blocks) for _ in range(blocks)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), Shift(), last),
    )


class Transformer(nn.Module):
    """Patches of 4 x 4 pixels as 16 tokens; encoder layers with LayerNorm before each part and at the end; the mean."""

    def __init__(self, width: int, heads: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, width, 4, 4, padding=1)
        self.place = nn.Parameter(0.02 * torch.randn(16, width))
        options = {"dim_feedforward": hidden, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(width, heads, **options) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.last = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(2).transpose(1, 2) + self.place
        for layer in self.layers:
            tokens = layer(tokens)
        return self.last(self.norm(tokens).mean(1))
