"""Small batches lie side by side in a Kronecker pass: the same sums, the same draws, the same messages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from estimator_checks import close
from lapwing import estimate
from lapwing.errors import DataError, LikelihoodError
from lapwing.estimate import data_pass
from lapwing.evidence.seen import Seen
from lapwing.likelihoods import Categorical
from lapwing.tangent import Tangent


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()


def data(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(size, 3, dtype=torch.float64), torch.randint(4, (size,))) for size in sizes]


class Counted(nn.Module):
    """A model that notes how many rows each pass has."""

    def __init__(self, most: int = 10**6) -> None:
        super().__init__()
        self.inner, self.most = network(), most

    def forward(self, x: Tensor) -> Tensor:
        assert len(x) <= self.most, "made for small batches"
        sizes.append(len(x))
        return self.inner(x)


sizes: list[int] = []


@pytest.mark.parametrize("samples", [1, 3])
def test_draws_and_sums_are_those_of_batches_one_by_one(samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batches, tangent = data(4, 4, 4, 2, 4, 7, 1), Tangent(Counted())
    sizes.clear()
    seen = Seen(False)
    options = {"samples": samples}
    joined = estimate.kfac(
        tangent, Categorical(), seen.watching(batches), generator=torch.Generator().manual_seed(2), **options
    )
    assert max(sizes) > 7
    monkeypatch.setattr(data_pass, "JOINED", 0)
    sizes.clear()
    alone_seen = Seen(False)
    alone = estimate.kfac(
        tangent, Categorical(), alone_seen.watching(batches), generator=torch.Generator().manual_seed(2), **options
    )
    assert max(sizes) == 7
    close(joined.dense(), alone.dense())
    close(seen.fit(torch.float64), alone_seen.fit(torch.float64))
    assert (seen.points, seen.targets, seen.fingerprint) == (
        alone_seen.points,
        alone_seen.targets,
        alone_seen.fingerprint,
    )


def test_a_model_that_refuses_larger_batches_gets_them_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = data(4, 4, 4, 4)
    found = estimate.kflr(Tangent(Counted(most=4)), Categorical(), batches)
    monkeypatch.setattr(data_pass, "JOINED", 0)
    close(found.dense(), estimate.kflr(Tangent(network()), Categorical(), batches).dense())


def test_batches_of_another_kind_stay_apart() -> None:
    batches = data(2, 2, 2, 2)
    mixed = [*batches[:2], ([batches[2][0]], batches[2][1]), batches[3]]
    whole = [tuple(map(torch.cat, zip(*batches, strict=True)))]
    found = estimate.kflr(Tangent(network()), Categorical(), mixed)
    close(found.dense(), estimate.kflr(Tangent(network()), Categorical(), whole).dense())


def test_a_loader_that_fills_one_tensor_again_and_again() -> None:
    batches = data(2, 2, 2, 2, 2)

    class Filling:
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            x, y = torch.empty(2, 3, dtype=torch.float64), torch.empty(2, dtype=torch.int64)
            for each_x, each_y in batches:
                yield x.copy_(each_x), y.copy_(each_y)

    found = estimate.kflr(Tangent(network()), Categorical(), Filling())
    close(found.dense(), estimate.kflr(Tangent(network()), Categorical(), batches).dense())


@pytest.mark.parametrize("which", [0, 2, 4])
def test_the_batch_at_fault_is_named(which: int) -> None:
    batches = data(2, 2, 2, 2, 2)
    broken = list(batches)
    broken[which] = (batches[which][0], torch.tensor([0, 9]))
    with pytest.raises(LikelihoodError, match=f"^batch {which}: .*target 9 at index"):
        estimate.kflr(Tangent(network()), Categorical(), broken)
    broken[which] = (batches[which][0] * float("nan"), batches[which][1])
    with pytest.raises(DataError, match=f"^batch {which}: "):
        estimate.kflr(Tangent(network()), Categorical(), broken)
