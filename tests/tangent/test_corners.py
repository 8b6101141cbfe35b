"""Forms of operations, and chunks of outputs, that ordinary layers do not have: against the Jacobian by torch.func."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lapwing import Laplace, Tangent, estimate
from lapwing.likelihoods import Gaussian


class Net(nn.Module):
    """A function of x and of parameters by name."""

    def __init__(self, forward: Callable[..., Tensor], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function, generator = forward, torch.Generator().manual_seed(0)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, dtype=torch.float64, generator=generator)))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, **dict(self.named_parameters()))


def inputs(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def brute_force(net: Net, x: Tensor) -> Tensor:
    """[B, C, P], from one data point after the other."""
    parameters = {name: value.detach() for name, value in net.named_parameters()}

    def outputs(values: dict[str, Tensor]) -> Tensor:
        return net.function(x, **values).flatten(1)

    jacobian = torch.func.jacrev(outputs)(parameters)
    return torch.cat([part.flatten(2) for part in jacobian.values()], -1)


CASES = {
    "added with a factor": (Net(lambda x, w, b: torch.add(x @ w, b, alpha=3), w=(2, 4), b=(4,)), inputs(5, 2)),
    "taken away with a factor": (Net(lambda x, w, b: torch.sub(x @ w, b, alpha=0.5), w=(2, 4), b=(4,)), inputs(5, 2)),
    "added in place with a factor": (Net(lambda x, w, b: (x @ w).add_(b, alpha=-2), w=(2, 4), b=(4,)), inputs(5, 2)),
    "einsum with dots, fewer of the weight": (
        Net(lambda x, w: torch.einsum("...i,...io->...o", x, w).flatten(1), w=(3, 2, 4)), inputs(5, 3, 2),
    ),
    "einsum with dots, an axis of one": (
        Net(lambda x, w: torch.einsum("...i,...io->...o", x, w).flatten(1), w=(1, 2, 4)), inputs(5, 3, 2),
    ),
    "einsum, an axis of one by name": (
        Net(lambda x, w: torch.einsum("bti,tio->bto", x, w).flatten(1), w=(1, 2, 4)), inputs(5, 3, 2),
    ),
    "matmul, an axis of one": (Net(lambda x, w: (x.unsqueeze(-2) @ w).flatten(1), w=(1, 2, 4)), inputs(5, 3, 2)),
    "einsum, data with an axis of one": (
        Net(lambda x, w: torch.einsum("bti,tio->bto", x, w).flatten(1), w=(3, 2, 4)), inputs(5, 1, 2),
    ),
    "a table whose padding is counted from its end": (
        Net(lambda x, w: F.embedding(x, w, padding_idx=-2).flatten(1), w=(5, 2)),
        torch.tensor([[0, 3], [3, 1], [4, 4]]),
    ),
    "scale and shift of channels": (
        Net(lambda x, w, b: F.group_norm(x, 2, w, b).flatten(1), w=(4,), b=(4,)), inputs(5, 4, 3),
    ),
    "scale and shift by running statistics": (
        Net(lambda x, w, b: F.batch_norm(x, inputs(4), inputs(4).square() + 0.5, w, b).flatten(1), w=(4,), b=(4,)),
        inputs(5, 4, 3),
    ),
    "scale and shift of each sample's channels": (
        Net(lambda x, w, b: F.instance_norm(x, weight=w, bias=b).flatten(1), w=(4,), b=(4,)), inputs(5, 4, 3),
    ),
    "einsum of operands in a list": (
        Net(lambda x, w: torch.einsum("bi,oi->bo", [x, w]), w=(4, 2)), inputs(5, 2),
    ),
    "einsum without an arrow, without a rule": (
        Net(lambda x, w: torch.einsum("bi,io", x, w), w=(2, 4)), inputs(5, 2),
    ),
    "einsum of three, without a rule": (
        Net(lambda x, w, v: torch.einsum("bi,io,op->bp", x, w, v), w=(2, 4), v=(4, 3)), inputs(5, 2),
    ),
    "einsum by numbers of axes": (
        Net(lambda x, w: torch.einsum(x, [0, 1], w, [1, 2], [0, 2]), w=(2, 4)), inputs(5, 2),
    ),
    "einsum, an axis of the weight that is summed, without a rule": (
        Net(lambda x, w: torch.einsum("bi,ioj->bo", x, w), w=(2, 4, 2)), inputs(5, 2),
    ),
    "linear with a vector, without a rule": (Net(lambda x, w: F.linear(x, w).unsqueeze(1), w=(2,)), inputs(5, 2)),
    "linear by keyword": (Net(lambda x, w, b: F.linear(bias=b, weight=w, input=x), w=(4, 2), b=(4,)), inputs(5, 2)),
    "convolution by position": (
        Net(lambda x, w, b: F.conv1d(x, w, b, 2, 1, 2, 2).flatten(1), w=(4, 1, 2), b=(4,)), inputs(5, 2, 7),
    ),
    "convolution by keyword": (
        Net(
            lambda x, w, b: F.conv1d(input=x, weight=w, bias=b, groups=2, dilation=2, padding=1, stride=2).flatten(1),
            w=(4, 1, 2), b=(4,),
        ),
        inputs(5, 2, 7),
    ),
    "transposed convolution by position": (
        Net(lambda x, w, b: F.conv_transpose1d(x, w, b, 2, 1, 1, 2, 2).flatten(1), w=(2, 2, 2), b=(4,)),
        inputs(5, 2, 7),
    ),
    "transposed convolution by keyword": (
        Net(
            lambda x, w, b: F.conv_transpose1d(
                x, bias=b, weight=w, dilation=2, groups=2, output_padding=1, padding=1, stride=2
            ).flatten(1),
            w=(2, 2, 2), b=(4,),
        ),
        inputs(5, 2, 7),
    ),
    "a table by keyword": (
        Net(lambda x, w: F.embedding(weight=w, input=x, padding_idx=3).flatten(1), w=(5, 2)),
        torch.tensor([[0, 3], [3, 1], [4, 4]]),
    ),
    "a table by position": (
        Net(lambda x, w: F.embedding(x, w, 3).flatten(1), w=(5, 2)), torch.tensor([[0, 3], [3, 1], [4, 4]]),
    ),
    "scale and shift of channels by keyword": (
        Net(lambda x, w, b: F.group_norm(x, bias=b, eps=0.1, weight=w, num_groups=2).flatten(1), w=(4,), b=(4,)),
        inputs(5, 4, 3),
    ),
    "scale and shift of rows by position": (
        Net(lambda x, w, b: F.layer_norm(x, (3,), w, b, 0.1).flatten(1), w=(3,), b=(3,)), inputs(5, 4, 3),
    ),
    "scale and shift of rows by keyword": (
        Net(
            lambda x, w, b: F.layer_norm(x, bias=b, normalized_shape=(3,), weight=w, eps=0.1).flatten(1),
            w=(3,), b=(3,),
        ),
        inputs(5, 4, 3),
    ),
    "addmm by keyword": (
        Net(lambda x, w, b: torch.addmm(b, mat1=x, mat2=w), w=(2, 4), b=(4,)), inputs(5, 2),
    ),
    "addmm with factors, without a rule": (
        Net(lambda x, w, b: torch.addmm(b, x, w, beta=0.5, alpha=3), w=(2, 4), b=(4,)), inputs(5, 2),
    ),
    "one data point without its axis": (
        Net(lambda x, w, b: F.conv1d(x[0], w, b, stride=2, padding=1)[None].flatten(1), w=(3, 2, 2), b=(3,)),
        inputs(1, 2, 7),
    ),
    "einsum with dots, two axes": (
        Net(lambda x, w: torch.einsum("...i,...io->...o", x, w).flatten(1), w=(3, 2, 4)), inputs(5, 2, 3, 2),
    ),
    "a table of positions": (
        Net(lambda x, w: (x * F.embedding(torch.arange(3), w)).flatten(1), w=(7, 2)), inputs(5, 3, 2),
    ),
    "a table of positions for a batch of one": (
        Net(lambda x, w: (x + F.embedding(torch.arange(3)[None], w)).flatten(1), w=(7, 2)), inputs(5, 3, 2),
    ),
    "a table of positions for every sample": (
        Net(lambda x, w: (x + F.embedding(torch.arange(1, 4).repeat(len(x), 1), w)).flatten(1), w=(7, 2)),
        inputs(5, 3, 2),
    ),
    "a table with one type of token": (
        Net(lambda x, w: (x * F.embedding(torch.ones(len(x), 3).long(), w)).flatten(1), w=(3, 2)), inputs(5, 3, 2),
    ),
    "a part of a table, by an index": (
        Net(lambda x, w: (x + w[2:][torch.arange(1, 4)]).flatten(1), w=(7, 2)), inputs(5, 3, 2),
    ),
    "a table of positions, padded elsewhere": (
        Net(lambda x, w: (x * F.embedding(torch.arange(3), w, -1)).flatten(1), w=(7, 2)), inputs(5, 3, 2),
    ),
    "a table of positions, one of them padded, without a rule": (
        Net(lambda x, w: (x * F.embedding(torch.arange(3), w, 1)).flatten(1), w=(7, 2)), inputs(5, 3, 2),
    ),
    "a table of positions with gaps, without a rule": (
        Net(lambda x, w: (x * F.embedding(torch.tensor([0, 2, 3]), w)).flatten(1), w=(7, 2)), inputs(5, 3, 2),
    ),
    "a table of positions from the end, without a rule": (
        Net(lambda x, w: (x + w[torch.arange(-3, 0)]).flatten(1), w=(7, 2)), inputs(5, 3, 2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_rows_are_those_of_brute_force(name: str) -> None:
    net, x = CASES[name]
    expected = brute_force(net, x)
    at = Tangent(net).at(x)
    torch.testing.assert_close(at.rows(), expected, rtol=1e-9, atol=1e-12)
    v = inputs(expected.shape[-1])
    torch.testing.assert_close(at.mv(v).flatten(1), expected @ v, rtol=1e-9, atol=1e-12)
    full = estimate.full(Tangent(net), Gaussian(), [(x, torch.zeros_like(at.value))])
    torch.testing.assert_close(full.dense(), torch.einsum("ncp, ncq -> pq", expected, expected), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_rules_cover_them_except_where_einsum_broadcasts(name: str) -> None:
    """A wrong rule would be found out by the probe, and its parameter have an exact block instead of factors."""
    net, x = CASES[name]
    la = Laplace(net, "regression", "all", "kron")
    la.fit([(x, torch.zeros_like(net(x)).detach())])
    assert bool(la.exact_blocks) == (("einsum" in name and "axis of one" in name) or "without a rule" in name)


@pytest.mark.parametrize("budget", [1, 2_000, 20_000])
def test_outputs_in_chunks_are_all_there(budget: int) -> None:
    """Unit cotangents of a part of the outputs begin where the part begins."""
    net = Net(lambda x, v, w: torch.tanh(x @ v) @ w, v=(2, 6), w=(6, 7))
    x = inputs(5, 2)
    expected = brute_force(net, x)
    at = Tangent(net, budget=budget).at(x)
    torch.testing.assert_close(at.rows(), expected, rtol=1e-9, atol=1e-12)
    precision = estimate.full(Tangent(net), Gaussian(), [(x, torch.zeros(5, 7).double())]).with_prior(0.7)
    inverse = torch.linalg.inv(torch.einsum("ncp, ncq -> pq", expected, expected) + 0.7 * torch.eye(54).double())
    covariance = expected @ inverse @ expected.mT
    torch.testing.assert_close(precision.covariance(at), covariance, rtol=1e-8, atol=1e-10)
    for structure in (estimate.diagonal, estimate.kflr):  # the same rows in parts
        one, cut = (
            structure(Tangent(net, budget=b), Gaussian(), [(x, x @ torch.ones(2, 7).double())]) for b in (10**9, budget)
        )
        torch.testing.assert_close(
            cut.with_prior(1.0).covariance(at), one.with_prior(1.0).covariance(at), rtol=1e-8, atol=1e-10
        )


def test_a_weight_with_and_without_its_bias() -> None:
    """The use without a bias adds nothing to the bias's side of the input factor."""
    net = Net(lambda x, w, b: F.linear(x[:, :2], w, b) + F.linear(x[:, 2:], w), w=(3, 2), b=(3,))
    x = inputs(6, 4)
    left, right = x[:, :2], x[:, 2:]
    ones = torch.cat(
        [torch.cat([left, torch.ones(6, 1).double()], 1), torch.cat([right, torch.zeros(6, 1).double()], 1)]
    )
    curvature = estimate.kflr(Tangent(net), Gaussian(), [(x, torch.zeros(6, 3).double())])
    # G of unit noise is the identity for each of the two uses: G (x) A / count with A summed over both
    expected = torch.kron(torch.eye(3).double() * 12, ones.mT @ ones) / 12
    order = torch.cat([torch.arange(9).reshape(3, 3)[:, :2].flatten(), torch.arange(9).reshape(3, 3)[:, 2]])
    torch.testing.assert_close(curvature.dense(), expected[order][:, order], rtol=1e-9, atol=1e-12)


def test_positions_of_batches_of_several_lengths() -> None:
    """What a table has beyond them is no part of a batch's rows: curvatures add up to those of the whole table."""
    body = lambda x, w, v: ((x * F.embedding(torch.arange(x.shape[1]), w)) @ v).sum(1)  # noqa: E731
    net, batches = Net(body, w=(7, 2), v=(2, 3)), [inputs(5, 3, 2), inputs(4, 6, 2), inputs(3, 2, 2)]
    data = [(x, torch.zeros(len(x), 3).double()) for x in batches]
    rows = torch.cat([brute_force(net, x).flatten(0, 1) for x in batches])
    full = rows.mT @ rows
    torch.testing.assert_close(estimate.full(Tangent(net), Gaussian(), data).dense(), full, rtol=1e-9, atol=1e-9)
    found = estimate.diagonal(Tangent(net), Gaussian(), data).dense()
    torch.testing.assert_close(found, full.diagonal().diag(), rtol=1e-9, atol=1e-9)
    table = slice(0, 14)
    for structure in (estimate.kflr, estimate.blocks):
        found = structure(Tangent(net), Gaussian(), data).dense()[table, table]
        torch.testing.assert_close(found, full[table, table], rtol=1e-9, atol=1e-9)
    for structure in (estimate.dual, estimate.matrix_free):
        precision = structure(Tangent(net), Gaussian(), data).with_prior(0.5)
        inverse = torch.linalg.inv(full + 0.5 * torch.eye(20).double())
        covariance = precision.covariance(Tangent(net).at(batches[1]))
        rows = brute_force(net, batches[1])
        torch.testing.assert_close(covariance, rows @ inverse @ rows.mT, rtol=1e-7, atol=1e-9)
