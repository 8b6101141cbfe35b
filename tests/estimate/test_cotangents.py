"""Columns at the outputs have the layout of the outputs, also where every axis has the same size."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import oracle
from lapwing import Laplace
from lapwing.estimate.cotangents import Columns, monte_carlo
from lapwing.likelihoods import Categorical, Likelihood

CUBES: dict[str, tuple[nn.Module, tuple[int, ...], Likelihood]] = {
    "two classes on two by two pixels": (nn.Conv2d(1, 2, 1), (3, 1, 2, 2), Categorical()),
    "three classes at three times": (nn.Conv1d(1, 3, 1), (3, 1, 3), Categorical(class_axis=1)),
    "three classes last": (nn.Linear(2, 3), (3, 3, 2), Categorical()),
}


@pytest.mark.parametrize("structure", ["full", "diag"])
@pytest.mark.parametrize("name", CUBES)
def test_as_many_classes_as_positions_along_every_axis(name: str, structure: str) -> None:
    """The class axis is known by its place; its size says nothing."""
    torch.manual_seed(0)
    model, shape, likelihood = CUBES[name]
    model, x = model.double(), torch.randn(shape).double()
    last = likelihood.to_last(model(x))
    y = torch.randint(last.shape[-1], last.shape[:-1])
    la = Laplace(model, likelihood, "all", structure)
    la.fit([(x, y)])
    matrix = oracle.ggn(model, likelihood, x, y)
    torch.testing.assert_close(la.H, matrix if structure == "full" else matrix.diagonal(), rtol=1e-9, atol=1e-12)


def test_nothing_is_drawn_where_there_is_no_target() -> None:
    f, y = torch.randn(4, 3, 5, dtype=torch.float64), torch.zeros(4, 3, dtype=torch.int64)
    y[1, 2] = y[3, 0] = -100
    columns = monte_carlo(3)(Categorical(ignore_index=-100), f, y, torch.Generator().manual_seed(0))
    found = torch.cat(list(columns.chunked(2)))
    assert torch.equal((found != 0).any(-1), (y != -100).expand(3, 4, 3))


@pytest.mark.parametrize(
    ("count", "step", "sizes"),
    [(0, 3, []), (1, 3, [1]), (10, 4, [4, 4, 2]), (9, 8, [5, 4]), (8, 8, [8]), (7, 1, [1] * 7), (5, 100, [5])],
)
def test_columns_are_made_in_parts_of_about_the_same_size(count: int, step: int, sizes: list[int]) -> None:
    everything = torch.arange(count, dtype=torch.float64)[:, None, None]
    parts = list(Columns(count, lambda part: everything[part]).chunked(step))
    assert [len(part) for part in parts] == sizes
    assert torch.equal(torch.cat([*parts, everything[:0]]), everything)
