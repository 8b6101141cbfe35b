"""Sums of patch products without patches are those of the patches, whatever the kernel, its steps and the border."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lapwing.estimate import kflr, symmetric_sums
from lapwing.likelihoods import Gaussian
from lapwing.tangent import Tangent, rules
from lapwing.tangent.convolution import padded, patches, spread_out, transposed_patches
from lapwing.tangent.patch_products import Kernel, PatchProducts, lines, patch_products

# images, kernel, stride, padding, dilation, groups
PLAIN = {
    "square": ((5, 4, 9, 7), (3, 3), (1, 1), (1, 1), (1, 1), 1),
    "oblong, strides, dilation and groups": ((5, 4, 9, 7), (3, 2), (2, 3), (1, 0), (1, 2), 2),
    "one channel each": ((3, 4, 12, 12), (5, 3), (2, 1), (2, 2), (1, 1), 4),
    "a sequence, dilation not of the stride": ((3, 4, 17), (5,), (3,), (2,), (2,), 2),
    "volumes": ((3, 2, 6, 5, 7), (3, 2, 3), (1, 2, 1), (1, 1, 1), (1, 1, 2), 1),
    "one position": ((3, 2, 3, 3), (3, 3), (1, 1), (0, 0), (1, 1), 1),
    "two positions, a tall kernel": ((3, 2, 6, 6), (5, 2), (1, 1), (0, 0), (1, 1), 1),
    "gaps between patches": ((3, 2, 8, 8), (2, 2), (3, 3), (0, 0), (1, 1), 1),
    "one pixel": ((3, 2, 8, 8), (1, 1), (2, 2), (0, 0), (1, 1), 1),
}


def products(values: Tensor) -> Tensor:
    flat = values.flatten(0, 1).transpose(0, 1)
    return flat.mT @ flat


@pytest.mark.parametrize("ones", [True, False])
@pytest.mark.parametrize("budget", [1, 5000, 2**22])
@pytest.mark.parametrize("case", PLAIN)
def test_they_are_the_products_of_patches(case: str, budget: int, ones: bool) -> None:
    shape, kernel, stride, padding, dilation, groups = PLAIN[case]
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = patches(x, kernel, stride, padding, dilation, groups, ones)
    out = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(shape[2:], kernel, stride, padding, dilation, strict=True)
    ]
    meets = Kernel(kernel, stride, dilation, groups, tuple(out))
    found = patch_products(
        lambda which: padded(x[which], padding, kernel, dilation), len(x), shape[1], meets, ones, x, budget
    )
    torch.testing.assert_close(found.matrix(), products(expected), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("ones", [True, False])
@pytest.mark.parametrize(("stride", "dilation", "groups"), [(2, 1, 1), (1, 2, 2), (3, 1, 4)])
def test_of_transposed_convolutions_too(stride: int, dilation: int, groups: int, ones: bool) -> None:
    x = torch.randn(3, 4, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    kernel, steps = (3, 2), (dilation, dilation)
    expected = transposed_patches(x, kernel, stride, 1, 0, groups, dilation, ones)
    weight = x.new_zeros(4, 1, *kernel)
    out = F.conv_transpose2d(x, weight, None, stride, 1, 0, groups, dilation).shape[2:]
    meets = Kernel(kernel, (1, 1), steps, groups, tuple(out))
    found = patch_products(
        lambda which: spread_out(x[which], kernel, stride, 1, 0, steps), len(x), 4, meets, ones, x, 2**22, reverse=True
    )
    torch.testing.assert_close(found.matrix(), products(expected), rtol=1e-9, atol=1e-12)


def test_lines_are_multiplied_once() -> None:
    plan = lines(32, 3, 1, 1)
    assert plan.count == 34 + 33 + 32  # of distances 0, 1 and 2, where patches have 9 * 32
    assert len(plan.pieces) == 5 + 3 + 1
    assert Kernel((1, 1), (1, 1), (1, 1), 1, (32, 32)).needed(8) == 0
    assert Kernel((3, 3), (1, 1), (1, 1), 1, (32, 32)).needed(8) == 8 * (73**2 + 9 * 24**2)


@pytest.mark.parametrize("mode", ["zeros", "circular", "reflect"])
def test_factors_of_a_fit_are_those_with_patches(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 3, 3, padding=1, padding_mode=mode), nn.Tanh(), nn.Conv2d(3, 2, 3, stride=2, bias=False)]
    layers += [nn.Tanh(), nn.ConvTranspose2d(2, 2, 3, stride=2), nn.Flatten(), nn.LazyLinear(2)]
    model = nn.Sequential(*layers).double()
    x, y = torch.randn(5, 2, 7, 8, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    model(x)
    data = [(x[:3], y[:3]), (x[3:], y[3:])]
    found = kflr(Tangent(model), Gaussian(), data).dense()
    made: list[int] = []
    monkeypatch.setattr(rules, "patch_products", lambda *given: made.append(1))
    expected = kflr(Tangent(model, budget=1000), Gaussian(), data).dense()
    assert not made, "a budget too small for the sums has patches, a few at a time"
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kept", [0, 2**22])
def test_sums_of_batches_are_put_together_at_the_end_or_at_once(monkeypatch: pytest.MonkeyPatch, kept: int) -> None:
    """Images of two sizes have other pieces, whichever comes first."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 3, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2)]
    model = nn.Sequential(*layers).double()
    sizes = [(2, 7, 8), (3, 7, 8), (2, 6, 6), (1, 7, 8), (1, 7, 8)]
    data = [(torch.randn(n, 2, a, b, dtype=torch.float64), torch.randn(n, 2, dtype=torch.float64)) for n, a, b in sizes]
    together: list[int] = []
    whole = PatchProducts.matrix
    monkeypatch.setattr(PatchProducts, "matrix", lambda self: (together.append(self.points), whole(self))[1])
    monkeypatch.setattr(symmetric_sums, "CACHE", kept)
    found = kflr(Tangent(model), Gaussian(), data).dense()
    assert together == ([5, 2, 2] if kept else [2, 3, 2, 2])
    monkeypatch.setattr(rules, "patch_products", lambda *given: None)
    expected = kflr(Tangent(model, budget=1000), Gaussian(), data).dense()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
