"""Patches of a convolution are made for a few data points at a time, and the curvature is the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lapwing.estimate import accumulators, diagonal, ekfac, kfac, kflr
from lapwing.estimate.cotangents import monte_carlo
from lapwing.likelihoods import Categorical
from lapwing.linalg import Curvature, rows
from lapwing.tangent import Linearisation, Tangent, rules

POINTS = 9


def network() -> nn.Module:
    """With and without a bias, of one channel each, transposed, and a last layer."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 3, groups=4, bias=False)]
    layers += [nn.Tanh(), nn.ConvTranspose2d(4, 3, 2, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(3 * 64, 3)]
    return nn.Sequential(*layers).double()


def batch() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(POINTS, 2, 6, 6, dtype=torch.float64, generator=generator)
    return [(x, torch.randint(3, (POINTS,), generator=generator))]


@pytest.mark.parametrize(
    ("estimator", "options"),
    [(kflr, {}), (kflr, {"sharing": "reduce"}), (kfac, {}), (kfac, {"sharing": "reduce"}), (diagonal, {})],
)
def test_a_few_data_points_at_a_time(
    monkeypatch: pytest.MonkeyPatch, estimator: Callable[..., Curvature], options: dict[str, Any]
) -> None:
    sizes: list[int] = []

    def listening(made: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def wrapped(x: Tensor, *rest: Any) -> Tensor:
            sizes.append(len(x))
            return made(x, *rest)

        return wrapped

    for name in ("patches", "transposed_patches", "padded", "spread_out"):
        monkeypatch.setattr(rules, name, listening(getattr(rules, name)))
    tangent, data = Tangent(network()), batch()

    def found() -> tuple[Curvature, list[int]]:
        tangent.at(data[0][0])  # what is looked at once
        sizes.clear()
        curvature = estimator(tangent, Categorical(), data, generator=torch.Generator().manual_seed(2), **options)
        return curvature, list(sizes)

    whole, once = found()
    monkeypatch.setattr(rows, "CACHE", 1)
    monkeypatch.setattr(accumulators, "CACHE", 1)
    monkeypatch.setattr(rules, "CACHE", 1)
    parts, many = found()
    assert set(once) == {POINTS}
    assert set(many) == {1}
    v = torch.randn(whole.size, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(parts.mv(v), whole.mv(v), rtol=1e-9, atol=1e-12)


def test_samples_that_share_their_axis_have_patches_of_all() -> None:
    """Two images a data point, folded into the batch: no part of the first axis is one data point's."""

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.out = nn.Conv2d(2, 3, 3), nn.Linear(2 * 48, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.conv(x.flatten(0, 1)).tanh().reshape(len(x), -1))

    torch.manual_seed(0)
    x = torch.randn(4, 2, 2, 6, 6, dtype=torch.float64)
    y = torch.tensor([0, 1, 2, 0])
    tangent = Tangent(Pairs().double())
    found = diagonal(tangent, Categorical(), [(x, y)])
    each = sum(diagonal(tangent, Categorical(), [(x[i : i + 1], y[i : i + 1])]).diagonal() for i in range(4))
    torch.testing.assert_close(found.diagonal(), each, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("estimator", [diagonal, ekfac])
@pytest.mark.parametrize("drawn", [False, True])
def test_large_batches_come_in_parts_with_all_cotangents(
    monkeypatch: pytest.MonkeyPatch, estimator: Callable[..., Curvature], drawn: bool
) -> None:
    """With the memory of one cotangent of the batch; drawn cotangents have the batch as it is."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(41, 2, 6, 6, dtype=torch.float64, generator=generator)
    data = [(x, torch.randint(3, (41,), generator=generator))]
    model, seen = network(), []
    pull = Linearisation.pull

    def listening(self: Linearisation, cotangents: Tensor) -> Any:
        seen.append(tuple(cotangents.shape[:2]))
        return pull(self, cotangents)

    monkeypatch.setattr(Linearisation, "pull", listening)
    options: dict[str, Any] = {"cotangents": monte_carlo(3)} if drawn else {}

    def found(budget: int) -> Curvature:
        seen.clear()
        given = {"generator": torch.Generator().manual_seed(2), **options}
        return estimator(Tangent(model, budget=budget), Categorical(), data, **given)

    whole = found(2**28)
    assert set(seen) == {(3 if drawn else 2, 41)}
    parts = found(2**16)
    if drawn:
        assert set(seen) == {(1, 41)}
    else:
        assert {(2, 21), (2, 20)} <= set(seen)
        v = torch.randn(whole.size, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        torch.testing.assert_close(parts.mv(v), whole.mv(v), rtol=1e-9, atol=1e-11)


def test_a_model_for_one_batch_size_is_not_divided() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.out = nn.Conv2d(2, 3, 3), nn.Linear(48, 3)

        def forward(self, x: Tensor) -> Tensor:
            if len(x) != 40:
                raise RuntimeError("made for 40")
            return self.out(self.conv(x).tanh().flatten(1))

    torch.manual_seed(0)
    x, model = torch.randn(40, 2, 6, 6, dtype=torch.float64), Fixed().double()
    y = torch.arange(40) % 3
    found = diagonal(Tangent(model, budget=2**16), Categorical(), [(x, y)])
    expected = diagonal(Tangent(model), Categorical(), [(x, y)])
    torch.testing.assert_close(found.diagonal(), expected.diagonal(), rtol=1e-9, atol=1e-14)
