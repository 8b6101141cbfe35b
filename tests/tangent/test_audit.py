"""How far rows may be from autograd's gradient before a parameter takes the slow path: just within, just beyond."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lapwing.params import ParamSpace
from lapwing.tangent import probe as audit

SHARES = pytest.mark.parametrize(("share", "found"), [(0.9, False), (1.1, True)])


class TwoParts(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.one = nn.Linear(2, 1, bias=False, dtype=dtype)
        self.two = nn.Linear(2, 1, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x[:, :2]) + self.two(x[:, 2:])


def unexplained(monkeypatch: pytest.MonkeyPatch, x: Tensor, name: str, off: float) -> bool:
    """Whether the audit notices that the gradient of a tensor is `off`, in units of the cotangent, in one entry."""
    model = TwoParts(x.dtype)
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    plain, cotangent = audit._gradients, 1.25 + torch.cos(torch.ones((), dtype=torch.float64))

    def other(value: Tensor, inputs: list[Any], weights: Tensor) -> Sequence[Tensor | None]:
        grads = plain(value, inputs, weights)
        for place, each in enumerate(inputs):
            if each is parameters[name]:
                grad = grads[place]
                assert grad is not None
                moved = grad.double()
                moved[0, 0] += off * cotangent
                grads[place] = moved.to(grad.dtype)
        return grads

    monkeypatch.setattr(audit, "_gradients", other)
    opaque = audit.probe(model, ParamSpace.of(model), parameters, x).opaque
    assert set(opaque) <= {name}
    return name in opaque


@SHARES
@pytest.mark.parametrize("size", [3.0, 0.25])
def test_a_gradient_is_compared_to_half_its_digits(
    monkeypatch: pytest.MonkeyPatch, size: float, share: float, found: bool
) -> None:
    x = torch.full((3, 4), size, dtype=torch.float64)
    x[:, 2:] = 1.0
    within = size * torch.finfo(torch.float64).eps ** 0.5
    assert unexplained(monkeypatch, x, "one.weight", share * within) is found


@SHARES
@pytest.mark.parametrize("size", [3.0, 0.25])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_a_gradient_of_zero_is_compared_with_the_largest(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, size: float, share: float, found: bool
) -> None:
    """A thousand roundings of the largest number of the pass, or half its digits if those are fewer."""
    x = torch.zeros(3, 4, dtype=dtype)
    x[:, :2] = size
    eps = torch.finfo(dtype).eps
    within = (1000 * eps if dtype == torch.float64 else eps**0.5) * max(size, 1.0)
    assert unexplained(monkeypatch, x, "two.weight", share * within) is found
