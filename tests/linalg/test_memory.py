"""No tensor of the size of [B, C, P] is made for a layer: the largest one is counted, operation by operation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lapwing import estimate
from lapwing.likelihoods import Categorical
from lapwing.linalg import Curvature, Dense, Kronecker, MatrixLayout, OuterRows, Term, dense
from lapwing.tangent import Tangent
from memory import Largest

BATCH, CLASSES, WIDTH = 8, 5, 128


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
    with Largest() as sweep:
        curvature.variances(linear_map, torch.logspace(-2, 2, 5))
    for largest in (fit, prediction):
        assert largest.numel <= size, largest.where
        assert largest.numel < BATCH * CLASSES * size / 20, largest.where
    assert sweep.numel <= 5 * size, sweep.where  # a weight per precision, however many data points and outputs


def test_the_measure_sees_a_jacobian_that_is_formed() -> None:
    """Else the test above would prove nothing."""
    tangent, data = wide()
    with Largest() as largest:
        tangent.at(data[0][0]).rows()
    assert largest.numel >= BATCH * CLASSES * tangent.space.size


# -- a last layer with many classes ---------------------------------------------------------------------------------

CLASSES_OF_MANY, FEATURES, INPUTS = 1000, 512, 16


def last_layer() -> tuple[Kronecker, OuterRows]:
    """Rows of a last layer: the cotangents are the unit vectors, in one memory for all inputs."""
    g = torch.Generator().manual_seed(0)
    layout = MatrixLayout(
        0, (CLASSES_OF_MANY, FEATURES), (0, 1), 1, CLASSES_OF_MANY, FEATURES, bias=CLASSES_OF_MANY * FEATURES
    )
    a, b = torch.randn(64, FEATURES + 1, generator=g), torch.randn(64, CLASSES_OF_MANY, generator=g)
    kron = Kronecker(layout, (Term((a.mT @ a)[None], (b.mT @ b)[None] / CLASSES_OF_MANY, 64.0),))
    eye = torch.eye(CLASSES_OF_MANY).reshape(CLASSES_OF_MANY, 1, 1, 1, CLASSES_OF_MANY)
    right = torch.randn(INPUTS, 1, 1, FEATURES + 1, generator=g)
    return kron, OuterRows(layout, eye.expand(-1, INPUTS, -1, -1, -1), right)


def test_variances_of_many_classes_need_no_covariance_and_covariance_no_jacobian() -> None:
    """512 features x 1000 classes, 16 inputs. Far below 1 GB: no tensor beyond [C, C] or the weight, 4 MB; the
    covariance [16, C, C] is 64 MB, and nothing is larger."""
    kron, rows = last_layer()
    precision = kron.with_prior(1.0)
    weight = CLASSES_OF_MANY * (FEATURES + 1)
    with Largest() as largest:
        found = precision.squares([rows])
    assert largest.numel <= max(CLASSES_OF_MANY**2, weight), largest.where
    with Largest() as largest:
        covariance = precision.quadratic([rows])
    assert largest.numel <= covariance.numel(), largest.where
    torch.testing.assert_close(found, covariance.diagonal(dim1=1, dim2=2), rtol=1e-4, atol=1e-6)
    with Largest() as largest:
        swept = kron.sweep([rows], torch.logspace(-4, 4, 20))
    assert largest.numel < INPUTS * CLASSES_OF_MANY**2 / 2, largest.where
    assert swept.shape == (20, INPUTS, CLASSES_OF_MANY)


def test_a_dense_last_layer_never_forms_the_outer_product_with_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    classes, features, inputs = 10, 12, 300
    layout = MatrixLayout(0, (classes, features), (0, 1), 1, classes, features)
    g = torch.Generator().manual_seed(0)
    root = torch.randn(layout.rows * layout.cols, 200, generator=g, dtype=torch.float64)
    eye = torch.eye(classes, dtype=torch.float64).reshape(classes, 1, 1, 1, classes).expand(-1, inputs, -1, -1, -1)
    rows = OuterRows(layout, eye, torch.randn(inputs, 1, 1, features, generator=g, dtype=torch.float64))
    precision = Dense(root @ root.mT).with_prior(1.0)
    with monkeypatch.context() as patch:
        patch.setattr(dense, "assemble", lambda *_: pytest.fail("spelled the rows out"))
        found = precision.quadratic([rows])
    copied = OuterRows(layout, rows.left.contiguous(), rows.right)
    torch.testing.assert_close(found, precision.quadratic([copied]), rtol=1e-9, atol=1e-12)
