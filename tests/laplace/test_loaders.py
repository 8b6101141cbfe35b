"""Data that can be gone through once: every structure fits them, or says that it needs more passes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from lapwing.errors import DataError
from lapwing.laplace import Laplace
from lapwing.laplace.factory import CLASSES

Batch = tuple[Tensor, Tensor]
N = 2100


def batches(points: int) -> list[Batch]:
    x = torch.randn(points, 3, generator=torch.Generator().manual_seed(0))
    return list(zip(x.split(300), x.sum(1, keepdim=True).split(300), strict=True))


def once(points: int) -> Iterator[Batch]:
    yield from batches(points)


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "progress"])
def test_low_rank_of_more_rows_than_fit_at_once_refuses_an_iterator(wrapped: bool) -> None:
    """It needs several passes, and used to miss what the first one had taken."""
    model = nn.Linear(3, 1)
    la = Laplace(model, "regression", "all", "lowrank", rank=2)
    with pytest.raises(DataError, match="iterator"):
        la.fit(once(N), progress_bar=wrapped)
    la.fit(batches(N))
    assert la.n_data == N


@pytest.mark.parametrize(("subset", "structure"), [key for key in CLASSES if key[0] != "subnetwork"])
def test_an_iterator_is_fitted_as_a_list_is_or_refused(subset: str, structure: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    listed, drawn = (Laplace(model, "regression", subset, structure) for _ in range(2))
    listed.fit(batches(600))
    if structure in ("ekfac", "matrix_free"):
        with pytest.raises(DataError, match="iterator"):
            drawn.fit(once(600))
        return
    drawn.fit(once(600))
    assert drawn.n_data == listed.n_data == 600
    torch.testing.assert_close(drawn.posterior_variance, listed.posterior_variance)
