"""Sums of symmetric products of every size: bands, tiles, rows that wait, and each layout of the values in memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import oracle
from lapwing import estimate
from lapwing.estimate.symmetric_sums import GramSum, add_product, merged, mirrored
from lapwing.likelihoods import Gaussian
from lapwing.tangent import Tangent


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(191,), (192,), (193,), (400,), (2, 250), (600,)])
def test_a_mirrored_triangle_is_symmetric_beyond_one_tile(shape: tuple[int, ...]) -> None:
    values = normal(*shape, shape[-1])
    expected = values.triu() + values.triu(1).mT
    assert torch.equal(mirrored(values.clone()), expected)


@pytest.mark.parametrize(("width", "count"), [(5, 3), (192, 511), (192, 512), (300, 600), (511, 20), (515, 20)])
def test_products_in_one_two_or_four_bands(width: int, count: int) -> None:
    """Twice, as the sum is added to; widths that no number of bands divides among them."""
    last = normal(2, width, count)
    total = last.new_zeros(2, width, width)
    add_product(total, last)
    add_product(total, last[..., :7])
    expected = last @ last.mT + last[..., :7] @ last[..., :7].mT
    torch.testing.assert_close(mirrored(total), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("width", [3, 250])
@pytest.mark.parametrize("layout", ["rows", "positions last", "gradients of a convolution"])
def test_gram_sums_of_every_layout_and_of_batches_of_any_size(layout: str, width: int) -> None:
    """Few rows wait for more: sizes around the limit (6 rows for a width of 3), and what waits at the end counts."""
    shared = width + 1 if layout == "gradients of a convolution" else 2
    parts = [normal(count, shared, 2, width) for count in (1, 2, 2, 4, 1, 3)]
    total = GramSum(parts[0].new_zeros(2, width, width))
    for part in parts:
        if layout == "positions last":
            total.add(part.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1))
        elif layout == "gradients of a convolution":
            total.add(part.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2))
        else:
            total.add(part)
    expected = sum(torch.einsum("m t k i, m t k j -> k i j", part, part) for part in parts)
    torch.testing.assert_close(total.matrix(), expected, rtol=1e-9, atol=1e-9)


def test_cotangents_and_points_are_merged_in_either_order() -> None:
    left = normal(3, 4, 5)
    other = left.transpose(0, 1).contiguous().transpose(0, 1)
    for values in (left, other):
        rows = merged(values)
        torch.testing.assert_close(rows.mT @ rows, left.flatten(0, 1).mT @ left.flatten(0, 1))


@pytest.mark.parametrize("budget", [2**29, 20_000])
@pytest.mark.parametrize("kind", ["full", "tensor", "layer", "kron"])
def test_a_network_with_more_parameters_than_a_tile(kind: str, budget: int) -> None:
    """P = 523, most of them one weight: against one backward pass per output; kron is exact for one data point."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(520, 1), nn.Tanh(), nn.Linear(1, 1)).double()
    x, y = normal(1 if kind == "kron" else 3, 520), normal(1 if kind == "kron" else 3, 1)
    tangent = Tangent(model, budget=budget)
    expected = oracle.ggn(model, Gaussian(), x, y)
    if kind == "full":
        found = estimate.full(tangent, Gaussian(), [(x, y)]).dense()
    elif kind == "kron":
        found = estimate.kflr(tangent, Gaussian(), [(x, y)]).dense()
    else:
        found = estimate.blocks(tangent, Gaussian(), [(x, y)], by=kind).dense()
    if kind != "full":
        sizes = [520, 1, 1, 1] if kind == "tensor" else [521, 2]
        expected = expected * torch.block_diag(*(torch.ones(n, n, dtype=torch.float64) for n in sizes))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
