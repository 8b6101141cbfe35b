"""What tests of estimators share: closeness, seeds, splits of the data, errors of draws, likelihoods and layouts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lapwing.likelihoods import (
    Bernoulli,
    BernoulliMixture,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
    from_function,
)


def close(found: Tensor, expected: Tensor, rtol: float = 1e-9) -> None:
    scale = float(expected.abs().max() + 1e-30)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol * 1e-3 * scale)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def parts(x, y: Tensor, sizes: list[int]) -> list[tuple]:
    return list(zip(x.split(sizes), y.split(sizes), strict=True))


def errors_of_means(draws: Callable[[int, torch.Generator], Tensor], exact: Tensor, counts: tuple[int, int]) -> None:
    """|mean - exact| within four standard errors at each count, with standard errors that fall as 1 / sqrt(count)."""
    spread = []
    for count in counts:
        runs = torch.stack([draws(count, seeded(100 * count + seed)) for seed in range(40)])
        deviation = runs.std(0)
        spread.append(float(deviation.norm()))
        off = (runs.mean(0) - exact).abs() / (deviation / 40**0.5).clamp_min(1e-12 * float(exact.abs().max()))
        assert float(off[deviation > 1e-9 * deviation.max()].max()) < 4.5  # four, and room for 500 entries at once
    # each norm is estimated from 40 runs: relative standard error about 1 / sqrt(80), so four of the ratio's are 0.63
    ratio = spread[0] / spread[1]
    expected = (counts[1] / counts[0]) ** 0.5
    assert abs(ratio / expected - 1) < 4 * (2 / 80) ** 0.5


def huber(f: Tensor, y: Tensor) -> Tensor:
    return torch.nn.functional.huber_loss(f, y, reduction="sum")


LIKELIHOODS: dict[str, tuple[Callable[[], Likelihood], int]] = {
    "Gaussian": (lambda: Gaussian(0.7), 2),
    "Categorical": (Categorical, 3),
    "Bernoulli": (Bernoulli, 2),
    "Poisson": (Poisson, 2),
    "HeteroscedasticGaussian": (HeteroscedasticGaussian, 2),
    "BernoulliMixture": (BernoulliMixture, 3),
    "from_function": (lambda: from_function(huber), 2),
}
LAYOUTS = ["[B, C]", "[B, T, C]", "[B, C, H, W]"]


def setting(kind: str, layout: str) -> tuple[nn.Module, Likelihood, Tensor, Tensor]:
    torch.manual_seed(3)
    make, outputs = LIKELIHOODS[kind]
    if layout == "[B, C, H, W]":
        model, x = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Conv2d(2, outputs, 1)), torch.randn(3, 1, 3, 2)
    else:
        model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, outputs))
        x = torch.randn(4, 2) if layout == "[B, C]" else torch.randn(3, 2, 2)
    model, x, likelihood = model.double(), x.double(), make()
    f = model(x).detach()
    y = f + torch.randn_like(f) if kind == "from_function" else likelihood.sample(f)
    return model, likelihood, x, y
