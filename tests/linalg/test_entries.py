"""Rows at chosen entries of the flat vector, as a sub-network needs them, are those of the whole rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import problems
from lapwing.linalg.rows import assemble
from lapwing.tangent import Tangent
from memory import Largest

NAMES = [
    "mlp",
    "mlp_without_bias",
    "conv2d_grouped",
    "conv_transpose2d_grouped",
    "conv1d",
    "embedding",
    "embedding_padding",
    "layer_norm",
    "prelu_per_channel",
    "attention_linears",
    "linear_twice",
    "tied_autoencoder",
    "raw_table_sliced",
    "weight_norm",
    "custom_function",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("budget", [2**28, 1])
def test_entries_are_those_of_the_whole_rows(name: str, budget: int) -> None:
    problem = problems.build(name)
    linear = Tangent(problem.model).at(problem.x)
    pieces, size = linear.pieces(), linear.space.total
    whole = assemble(pieces, size, slice(0, linear.batch))
    order = torch.randperm(size, generator=torch.Generator().manual_seed(0))
    for index in (order[: max(1, size // 9)], order, order[:0]):
        found = torch.stack([piece.at_entries(index, budget) for piece in pieces]).sum(0)
        torch.testing.assert_close(found, whole[..., index], rtol=1e-12, atol=1e-14)


def test_ten_weights_of_a_wide_layer_take_no_memory_of_its_size() -> None:
    """A batch of 40 with five outputs: whole rows of a million weights would be 200 million numbers."""
    model = nn.Sequential(nn.Linear(1000, 1000), nn.Tanh(), nn.Linear(1000, 5))
    x = torch.randn(40, 1000)
    tangent = Tangent(model)
    chosen = tangent.space.select(mask=torch.arange(10) * 100_000)
    linear = Tangent(model, chosen).at(x)
    with Largest() as largest:
        pieces = linear.pieces()
    assert largest.numel < 3_000_000, largest.where
    assert pieces[0].shape == (5, 40)


def test_ten_weights_of_a_table_take_no_memory_of_its_size() -> None:
    """A batch of 40 with five outputs: whole rows of 400,000 entries would be 80 million numbers."""
    model = nn.Sequential(nn.Embedding(50_000, 8), nn.Flatten(), nn.Linear(24, 5))
    x = torch.randint(0, 50_000, (40, 3), generator=torch.Generator().manual_seed(0))
    looked_up = x.flatten()[:10] * 8 + torch.arange(10) % 8
    chosen = Tangent(model).space.select(mask=looked_up.sort().values)
    linear = Tangent(model, chosen).at(x)
    with Largest() as largest:
        (rows,) = linear.pieces()
    assert largest.numel < 1_000_000, largest.where
    assert bool(assemble([rows], 10, slice(0, 40)).any())
