"""Images of the autoencoders, [N, pixels] in [0, 1], drawn with a seed: MNIST, CURVES, FACES.

    CURVES    28 x 28, a parabola through three random points of the plane, two pixels wide or so, with soft edges
    FACES     25 x 25, Olivetti's first 25 people, 250 images, turned by -90 to 90 degrees and enlarged 1.4 to 1.8 times

The source takes CURVES from Hinton and Salakhutdinov (2006), and FACES from their recipe.
"""

from __future__ import annotations

from math import pi

import numpy as np
import torch
from common import data_folder, idx_images
from torch import Tensor
from torch.nn.functional import affine_grid, avg_pool2d, grid_sample

CHUNK = 500


def mnist(count: int, generator: torch.Generator) -> Tensor:
    """Of the first 50,000, as in the source."""
    images = idx_images("mnist", "train", 50000)[0].flatten(1)
    return images[torch.randperm(len(images), generator=generator)[:count]]


def curves(count: int, generator: torch.Generator, width: float = 0.8, points: int = 96) -> Tensor:
    """Each through its three points at t = 0, 1/2 and 1; grey falls off with the distance to the nearest part."""
    first, middle, last = (28 * torch.rand(3, count, 1, 2, generator=generator)).unbind(0)
    t = torch.linspace(0, 1, points).unsqueeze(1)
    bend = 2 * middle - (first + last) / 2
    path = (1 - t) ** 2 * first + 2 * t * (1 - t) * bend + t**2 * last  # [count, points, 2]
    centres = torch.arange(28) + 0.5
    near = torch.exp(-((path.unsqueeze(-1) - centres) ** 2) / (2 * width**2))  # [count, points, 2, 28]
    parts = [torch.einsum("n t i, n t j -> n t i j", *each.unbind(2)).amax(1) for each in near.split(CHUNK)]
    return torch.cat(parts).flatten(1)


def faces(count: int, generator: torch.Generator) -> Tensor:
    with np.load(data_folder() / "olivetti" / "olivetti_faces.npz") as arrays:
        images = torch.tensor(arrays["images"][arrays["subject"] < 25]).float().unsqueeze(1) / 255
    chosen = images[torch.arange(count) % len(images)]
    angle = pi * (torch.rand(count, generator=generator) - 0.5)
    scale = 1.4 + 0.4 * torch.rand(count, generator=generator)
    turned = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], 1).view(count, 2, 2)
    maps = torch.cat([turned / scale.view(count, 1, 1), torch.zeros(count, 2, 1)], 2)
    parts = []
    for image, each in zip(chosen.split(CHUNK), maps.split(CHUNK), strict=True):
        grid = affine_grid(each, [len(image), 1, 50, 50], align_corners=False)
        large = grid_sample(image, grid, padding_mode="border", align_corners=False)
        parts.append(avg_pool2d(large, 2))
    found = torch.cat(parts).flatten(1)
    return found[torch.randperm(count, generator=generator)]


IMAGES = {"mnist": mnist, "curves": curves, "faces": faces}
