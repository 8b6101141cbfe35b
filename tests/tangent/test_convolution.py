"""Patches of a convolution: times the weight they are its output, also where "same" cannot pad both sides alike."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lapwing import estimate
from lapwing.likelihoods import Gaussian
from lapwing.tangent import Tangent
from lapwing.tangent.convolution import patches

CONVOLUTIONS = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("padding", ["same", "valid", 1])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("kernel", [(2,), (3,), (4,), (2, 3), (4, 2), (2, 1, 4)], ids=str)
def test_patches_times_the_weight_are_the_convolution(
    kernel: tuple[int, ...], dilation: int, padding: str | int, generator: torch.Generator
) -> None:
    x = torch.randn(2, 4, *[7] * len(kernel), dtype=torch.float64, generator=generator)
    weight = torch.randn(6, 2, *kernel, dtype=torch.float64, generator=generator)
    expected = CONVOLUTIONS[len(kernel)](x, weight, padding=padding, dilation=dilation, groups=2)
    rows = patches(x, kernel, 1, padding, dilation, 2, ones=False)  # [N, positions, K, C / K * prod(kernel)]
    found = torch.einsum("n t k i, k o i -> n k o t", rows, weight.reshape(2, 3, -1))
    torch.testing.assert_close(found.reshape(expected.shape), expected)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("kernel", [2, 4, (2, 3)])
def test_the_curvature_of_an_even_kernel_that_keeps_the_size(kernel: int | tuple[int, int]) -> None:
    """J^T J by autograd, one data point and one output at a time."""
    model = nn.Sequential(nn.Conv2d(1, 2, kernel, padding="same"), nn.Flatten()).double()
    x = torch.randn(3, 1, 5, 5, dtype=torch.float64)
    y = torch.zeros(3, 50, dtype=torch.float64)
    total = torch.zeros(())
    for f in model(x).flatten():
        grads = torch.autograd.grad(f, list(model.parameters()), retain_graph=True)
        row = torch.cat([g.flatten() for g in grads])
        total = total + torch.outer(row, row)
    torch.testing.assert_close(estimate.full(Tangent(model), Gaussian(), [(x, y)]).dense(), total)
