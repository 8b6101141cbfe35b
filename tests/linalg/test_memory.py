"""No tensor of the size of [B, C, P] is made for a layer: the largest one is counted, operation by operation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lapwing import estimate
from lapwing.likelihoods import Categorical
from lapwing.linalg import Curvature
from lapwing.tangent import Tangent

BATCH, CLASSES, WIDTH = 8, 5, 128


class Largest(TorchDispatchMode):
    """The number of entries of the largest tensor that any operation returned, views of smaller ones left out."""

    def __init__(self) -> None:
        super().__init__()
        self.numel, self.where = 0, ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, Tensor) and value.untyped_storage().nbytes() // value.element_size() > self.numel:
                self.numel = value.untyped_storage().nbytes() // value.element_size()
                self.where = f"{func} -> {tuple(value.shape)}"
        return out


def wide() -> tuple[Tangent, list[tuple[Tensor, Tensor]]]:
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)
    )
    x = torch.randn(BATCH, WIDTH)
    return Tangent(model), [(x, torch.arange(BATCH) % CLASSES)]


@pytest.mark.parametrize(
    "estimator", [estimate.diagonal, estimate.kflr, estimate.kfac], ids=["diagonal", "kflr", "kfac"]
)
def test_fit_and_prediction_of_a_wide_network_never_form_its_jacobian(estimator: Callable[..., Curvature]) -> None:
    """The largest tensor is of the order of one weight, or of all activations; not B C times as large."""
    tangent, data = wide()
    size = tangent.space.size
    with Largest() as fit:
        curvature = estimator(tangent, Categorical(), data, generator=torch.Generator().manual_seed(0))
    precision = curvature.with_prior(1.0)
    linear_map = tangent.at(data[0][0])
    with Largest() as prediction:
        covariance = precision.covariance(linear_map)
    assert covariance.shape == (BATCH, CLASSES, CLASSES)
    for largest in (fit, prediction):
        assert largest.numel <= size, largest.where
        assert largest.numel < BATCH * CLASSES * size / 20, largest.where


def test_the_measure_sees_a_jacobian_that_is_formed() -> None:
    """Else the test above would prove nothing."""
    tangent, data = wide()
    with Largest() as largest:
        tangent.at(data[0][0]).rows()
    assert largest.numel >= BATCH * CLASSES * tangent.space.size
