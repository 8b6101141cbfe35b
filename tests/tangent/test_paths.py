"""No path from a parameter to the outputs goes unseen, whatever the gradient is at the samples that are looked at."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import pytest
import torch
from torch import Tensor, nn

import oracle
from lapwing import estimate
from lapwing.errors import LapwingError
from lapwing.likelihoods import Gaussian
from lapwing.tangent import Tangent
from problems import Net, parameter
from unchanged import unchanged


class Hidden(torch.autograd.Function):
    """x @ w where no torch function is seen."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w.T, x.T @ grad


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        return (4 * w).round() / 4

    @staticmethod
    def backward(ctx, grad):
        return grad


@pytest.fixture(autouse=True)
def _double():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12 * float(expected.abs().max() + 1e-30))


def gated(use: Callable) -> Callable:
    """k a(x) + (1 - k) b(x): which expert a data point reaches is decided by the sign of its first entry."""

    def body(m, x):
        k = (x[:, :1] > 0).to(x.dtype)
        return k * use(m, x, m.a) + (1 - k) * use(m, x, m.b)

    return body


EXPERTS = {
    "hidden product": lambda m, x, w: Hidden.apply(x, w),
    "hidden weight": lambda m, x, w: x @ Rounded.apply(w),
    "hidden factor of a weight": lambda m, x, w: x @ (m.v * Rounded.apply(w)),
    "hidden and seen": lambda m, x, w: x @ w + 0.5 * Hidden.apply(x.cos(), w),
    "written into a slice": lambda m, x, w: (x * 1.0).index_fill(1, torch.tensor([2]), 1.0)[:, 1:].mul_(w[0]),
    "a gradient": lambda m, x, w: torch.func.vmap(torch.func.grad(lambda row: (row @ w).sin().sum()))(x)[:, :2],
}


@pytest.mark.parametrize("alone", [0, 4])
@pytest.mark.parametrize("use", EXPERTS)
def test_an_expert_that_one_data_point_reaches_is_seen(use: str, alone: int) -> None:
    model = Net(gated(EXPERTS[use]), a=parameter(3, 2), b=parameter(3, 2), v=parameter(3, 2))
    x = torch.randn(6, 3)
    x[:, 0] = torch.where(torch.arange(6) == alone, 1.0, -1.0) * x[:, 0].abs()
    expected = oracle.jacobian(model, x)
    tangent = Tangent(model)
    with unchanged(model):
        for order in (torch.arange(6), torch.arange(6).flip(0)):
            close(tangent.at(x[order]).rows(), expected[order])
        batches = [(x[:3], torch.zeros(3, 2)), (x[3:], torch.zeros(3, 2))]
        ggn = torch.einsum("n c p, n c q -> p q", expected, expected)
        close(estimate.diagonal(Tangent(model), Gaussian(), batches).diagonal(), ggn.diagonal())
        close(estimate.full(Tangent(model), Gaussian(), batches).dense(), ggn)
        for block in estimate.blocks(Tangent(model), Gaussian(), batches).blocks:
            where = torch.cat([torch.arange(*interval) for interval in block.segments.intervals])
            close(block.curvature.dense(), ggn[where][:, where])
        kernel = torch.einsum("n c p, m d p -> n c m d", expected, expected).reshape(12, 12)
        found = estimate.dual(Tangent(model), Gaussian(), batches).dense()
        close(torch.linalg.eigvalsh(found)[-12:].sum(), torch.linalg.eigvalsh(kernel).sum())


@pytest.mark.parametrize("seed", range(2, 6))
def test_dead_units_behind_a_custom_function(seed: int) -> None:
    """The gradient of the sample that is looked at is zero in most seeds."""
    torch.manual_seed(seed)
    model = Net(lambda m, x: m.out(torch.relu(Hidden.apply(x, m.w) - 1.0)), w=parameter(3, 2), out=nn.Linear(2, 2))
    x = torch.randn(7, 3)
    tangent = Tangent(model)
    for batch in (x, x[:2], x[2:]):
        close(tangent.at(batch).rows(), oracle.jacobian(model, batch))


def test_what_is_hidden_is_seen_where_it_is_small_beside_the_rest() -> None:
    """Far below the root of the rounding, and far above the rounding."""
    model = Net(lambda m, x: x @ m.w + 1e-10 * Hidden.apply(x, m.a), w=parameter(3, 2), a=parameter(3, 2))
    x = torch.randn(4, 3)
    found, expected = Tangent(model).at(x).rows(), oracle.jacobian(model, x)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)


def test_a_blank_first_batch() -> None:
    model = Net(lambda m, x: m.out(torch.tanh(Hidden.apply(x, m.w))), w=parameter(3, 2), out=nn.Linear(2, 2))
    x = torch.randn(4, 3)
    tangent = Tangent(model)
    for batch in (torch.zeros(4, 3), x):
        close(tangent.at(batch).rows(), oracle.jacobian(model, batch))


def test_a_path_that_only_a_later_batch_takes() -> None:
    """The same torch functions are called in both cases: only the graph shows which parameter was used."""

    def body(m, x):
        return Hidden.apply(x, m.a if float(x.sum()) > 0 else m.b)

    model = Net(body, a=parameter(3, 2), b=parameter(3, 2))
    x = torch.rand(4, 3)
    tangent = Tangent(model)
    for batch in (x, -x, x):
        expected = oracle.jacobian(model, batch)
        close(tangent.at(batch).rows(), expected)


IN_PLACE = {
    "linear of sequences": lambda flag: (
        nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=flag), nn.Flatten(), nn.Linear(8, 2)), (2, 3)),
    "instance norm": lambda flag: (
        nn.Sequential(nn.Conv2d(1, 2, 2), nn.InstanceNorm2d(2), nn.LeakyReLU(inplace=flag), nn.Flatten(),
                      nn.Linear(8, 2)), (1, 3, 3)),
    "instance norm with weights": lambda flag: (
        nn.Sequential(nn.Conv2d(1, 2, 2), nn.InstanceNorm2d(2, affine=True), nn.LeakyReLU(inplace=flag), nn.Flatten(),
                      nn.Linear(8, 2)), (1, 3, 3)),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_PLACE)
def test_an_in_place_activation_on_a_reshaped_result(name: str) -> None:
    """Autograd takes the result of these layers for a view, and rewrites its history when it is written to."""
    found = {}
    for flag in (True, False):
        torch.manual_seed(1)
        model, shape = IN_PLACE[name](flag)
        x = torch.randn(5, *shape)
        batches = [(x, torch.zeros(5, 2))]
        linear = Tangent(model).at(x)
        assert not linear.record.opaque
        close(linear.rows(), oracle.jacobian(model, x))
        found[flag] = [
            each(Tangent(model), Gaussian(), batches).diagonal()
            for each in (estimate.kflr, estimate.ekfac, estimate.propagated_diagonal, estimate.mixed_diagonal)
        ]
    for in_place, plain in zip(found[True], found[False], strict=True):
        close(in_place, plain)


def test_a_view_by_einsum_keeps_its_base() -> None:
    """einsum of one operand is a view: what is written into it is written into the tensor below."""

    def body(m, x):
        h = m.a(x)
        torch.einsum("n i j -> n j i", h).mul_(m.s)
        return h.flatten(1)

    model = Net(body, a=nn.Linear(3, 3), s=parameter(2))
    x = torch.randn(4, 2, 3)
    close(Tangent(model).at(x).rows(), oracle.jacobian(model, x))
    try:
        estimate.propagated_diagonal(Tangent(model), Gaussian(), [(x, torch.zeros(4, 6))])
    except LapwingError:
        return
    raise AssertionError("a write through a view is refused by structures that propagate")


def test_the_walk_costs_little() -> None:
    """A small part of the recorded pass that it belongs to, on a network of many small operations."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 2).eval()
    x = torch.randn(4, 3, 8)
    tangent = Tangent(model)

    def best(run: Callable) -> float:
        times = []
        for _ in range(7):
            start = perf_counter()
            run()
            times.append(perf_counter() - start)
        return min(times)

    linear = tangent.at(x)
    walk = best(lambda: linear.record.paths.unseen(linear.output, tangent.parameters))
    assert walk < 0.25 * best(lambda: tangent.at(x))
