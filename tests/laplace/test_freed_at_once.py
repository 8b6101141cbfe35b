"""What a fit or a prediction has held is freed when it ends, and not when Python next looks for cycles.

A recorded pass holds what the forward pass has kept, which may be most of the memory: one that refers to itself stays
until then, beside the next one.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lapwing import Laplace


class Scaled(nn.Module):
    """Parameters in elementwise operations."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.rand(width)), nn.Parameter(torch.rand(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift.exp()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.last = nn.LSTM(8, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.cells(x[:, 0])[0][:, -1])


def attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    return nn.Sequential(nn.Flatten(1, 2), layer, nn.Flatten(), nn.Linear(64, 3))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "images": lambda: nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.GroupNorm(3, 3), nn.Flatten(), nn.Linear(108, 3)
    ),
    "elementwise": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(64, 5), nn.LayerNorm(5), Scaled(5), nn.PReLU(), nn.Linear(5, 3)
    ),
    "attention": attention,
    "recurrent": Recurrent,
}


def left_over(run: Callable[[], object]) -> list[tuple[int, ...]]:
    """Shapes of tensors that only the search for cycles finds."""
    run()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        run()
        gc.collect()
        return [tuple(each.shape) for each in gc.garbage if isinstance(each, Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("structure", ["kron", "ekfac", "diag", "full", "gp", "propagated_diag"])
@pytest.mark.parametrize("name", NETWORKS)
def test_no_tensor_waits_for_the_search_for_cycles(name: str, structure: str) -> None:
    torch.manual_seed(0)
    model = NETWORKS[name]().eval()
    x, y = torch.randn(6, 1, 8, 8), torch.randint(3, (6,))
    la = Laplace(model, "classification", "all", structure)
    assert left_over(lambda: la.fit([(x[:3], y[:3]), (x[3:], y[3:])])) == []
    assert left_over(lambda: la(x)) == []
