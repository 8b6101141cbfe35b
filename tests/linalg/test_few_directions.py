"""Wide matrices that are zero in most directions are decomposed by those that they have."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lapwing.linalg import few_directions
from lapwing.linalg.checks import WIDE, eigh_psd
from lapwing.linalg.few_directions import eigh_of_few


def made(width: int, rank: int, dtype: torch.dtype = torch.float64, least: float = 1.0) -> Tensor:
    """A PSD matrix of a rank, whose eigenvalues go from `least` to 1."""
    generator = torch.Generator().manual_seed(rank)
    basis = torch.linalg.qr(torch.randn(width, rank, dtype=torch.float64, generator=generator)).Q
    return ((basis * torch.logspace(0, torch.tensor(least).log10().item(), rank)) @ basis.mT).to(dtype)


@pytest.mark.parametrize("rank", [1, 2, 17, 53])
@pytest.mark.parametrize("least", [1.0, 1e-6])
def test_it_is_the_decomposition(rank: int, least: float) -> None:
    matrix = made(240, rank, least=least)
    found = eigh_of_few(matrix)
    assert found is not None
    values, vectors = found
    torch.testing.assert_close(values, torch.linalg.eigvalsh(matrix), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close((vectors * values) @ vectors.mT, matrix, rtol=0, atol=1e-12)
    torch.testing.assert_close(vectors.mT @ vectors, torch.eye(240, dtype=torch.float64), rtol=0, atol=1e-12)
    assert bool((values.diff() >= -1e-14).all())


@pytest.mark.parametrize("rank", [54, 60, 61, 120, 240])
def test_more_directions_than_are_worth_it_are_left_to_others(rank: int) -> None:
    assert eigh_of_few(made(240, rank)) is None


def test_nothing_is_left_to_others_too() -> None:
    assert eigh_of_few(torch.zeros(240, 240)) is None


def test_a_small_rest_in_all_directions_is_seen() -> None:
    """A tenth of the tolerance in every direction adds up to more than is tolerated."""
    eps = torch.finfo(torch.float64).eps
    matrix = made(240, 5)
    assert eigh_of_few(matrix + 10 * eps * torch.eye(240, dtype=torch.float64)) is None
    assert eigh_of_few(matrix + 0.1 * eps * torch.eye(240, dtype=torch.float64)) is not None


def test_wide_factors_take_this_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32; what is decomposed is no wider than the random vectors that were tried."""
    widths: list[int] = []
    whole = torch.linalg.eigh

    def counted(matrix: Tensor) -> tuple[Tensor, Tensor]:
        widths.append(matrix.shape[-1])
        return whole(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", counted)
    matrix = made(WIDE, 30, torch.float32).unsqueeze(0)
    values, vectors = eigh_psd(matrix, "a factor", single=True)
    assert widths
    assert max(widths) <= WIDE // few_directions.SHARE
    assert values.shape == (1, WIDE)
    assert int((values > 1e-3).sum()) == 30
    torch.testing.assert_close((vectors * values.unsqueeze(1)) @ vectors.mT, matrix, rtol=0, atol=1e-5)
    eigh_psd(made(WIDE, WIDE, torch.float32).unsqueeze(0), "a factor", single=True)
    assert max(widths) == WIDE
