"""Data that decide which way they take through the network: rows equal brute force in every batch, or are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import oracle
from lapwing import estimate
from lapwing.errors import ModelError
from lapwing.likelihoods import Gaussian
from lapwing.tangent import Tangent
from problems import Net, parameter
from unchanged import unchanged

CASES: dict[str, Callable] = {}


def case(body: Callable) -> Callable:
    CASES[body.__name__] = body
    return body


@pytest.fixture(autouse=True)
def _double():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12 * float(expected.abs().max() + 1e-30))


@case
def rows_of_one_expert(m, x):
    """Every expert sees the rows that chose it."""
    gate = m.gate(x).softmax(-1)
    choice, out = gate.argmax(-1), torch.zeros(len(x), 2)
    for number, expert in enumerate((m.a, m.b, m.c)):
        rows = (choice == number).nonzero()[:, 0]
        out = out.index_add(0, rows, torch.tanh(expert(x[rows])) * gate[rows, number, None])
    return out + m.out(out)


@case
def experts_that_nobody_chose_are_skipped(m, x):
    gate = m.gate(x).softmax(-1)
    choice, out = gate.argmax(-1), torch.zeros(len(x), 2)
    for number, expert in enumerate((m.a, m.b, m.c)):
        mask = choice == number
        if mask.any():
            out[mask] = torch.tanh(expert(x[mask])) * gate[mask, number].unsqueeze(-1)
    return out + m.out(out)


@case
def two_experts_of_three(m, x):
    gate = m.gate(x).softmax(-1)
    weights, chosen = gate.topk(2, -1)
    out = torch.zeros(len(x), 2)
    for number, expert in enumerate((m.a, m.b, m.c)):
        rows, place = torch.where(chosen == number)
        if len(rows):
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows, place, None])
    return m.out(torch.tanh(out))


@case
def all_experts_then_gather(m, x):
    gate = m.gate(x).softmax(-1)
    choice = gate.argmax(-1)
    every = torch.stack([expert(x) for expert in (m.a, m.b, m.c)], 1)
    return m.out(torch.tanh(every.gather(1, choice[:, None, None].expand(-1, 1, 2))[:, 0])) * gate.amax(-1, True)


@case
def weights_that_are_picked(m, x):
    gate = m.gate(x).softmax(-1)
    choice = gate.argmax(-1)
    weights = torch.stack([m.a.weight, m.b.weight, m.c.weight])[choice]
    return m.out(torch.tanh(torch.bmm(weights, x.unsqueeze(-1))[..., 0])) * gate.gather(1, choice[:, None])


@case
def one_sample_at_a_time(m, x):
    return torch.stack([m.out(torch.tanh((m.a if row[0] > 0 else m.b)(row))) for row in x])


@case
def sorted_by_an_entry(m, x):
    order = x[:, 0].argsort()
    return m.out(torch.tanh(m.a(x[order]))[order.argsort()])


@case
def sorted_by_a_list(m, x):
    order = x[:, 0].argsort()
    back = order.argsort().tolist()
    return m.out(torch.tanh(m.a(x[order.tolist()]))[back])


@case
def depth_by_the_data(m, x):
    """Each data point passes the layer as often as it asks for."""
    steps = 1 + (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    h = x
    for step in range(int(steps.max())):
        h = torch.where((steps > step)[:, None], torch.tanh(m.square(h)), h)
    return m.a(h)


def network(name: str) -> nn.Module:
    experts = {each: nn.Linear(3, 2) for each in "abc"}
    return Net(CASES[name], gate=nn.Linear(3, 3), out=nn.Linear(2, 2), square=nn.Linear(3, 3), **experts)


@pytest.mark.parametrize("name", CASES)
def test_rows_in_every_batch(name: str) -> None:
    """The first batch is in order already, so that it does not show what the next ones do."""
    model = network(name)
    x = torch.randn(7, 3)
    tidy = x[x[:, 0].argsort()]
    tangent = Tangent(model)
    with unchanged(model):
        for batch in (tidy[:4], x[:4], x, tidy, x.flip(0), tidy[:1], tidy[:1].expand(4, 3), -x):
            close(tangent.at(batch).rows(), oracle.jacobian(model, batch))


@pytest.mark.parametrize("name", CASES)
def test_diagonal_over_batches(name: str) -> None:
    model = network(name)
    x = torch.randn(8, 3)
    x = x[x[:, 0].argsort()][[0, 1, 2, 3, 7, 4, 6, 5]]
    batches = [(x[:4], torch.zeros(4, 2)), (x[4:], torch.zeros(4, 2))]
    expected = oracle.jacobian(model, x).square().sum((0, 1))
    close(estimate.diagonal(Tangent(model), Gaussian(), batches).diagonal(), expected)


def test_two_tokens_of_one_sample_or_of_two() -> None:
    """The expert sees two tokens in both batches: one of each sample in the first, both of one sample in the second."""

    def body(m, x):
        tokens = x.flatten(0, 1)
        rows = (tokens[:, 0] > 0).nonzero()[:, 0]
        return m.out(torch.zeros(len(tokens), 3).index_add(0, rows, torch.tanh(m.a(tokens[rows]))).view(len(x), -1))

    model = Net(body, a=nn.Linear(3, 3), out=nn.Linear(6, 2))
    x = torch.randn(2, 2, 3).abs()
    signs = torch.tensor([[[1.0, -1.0], [1.0, -1.0]], [[1.0, 1.0], [-1.0, -1.0]]])
    tangent = Tangent(model)
    for sign in signs:
        batch = torch.cat([x[..., :1] * sign[..., None], x[..., 1:]], -1)
        close(tangent.at(batch).rows(), oracle.jacobian(model, batch))


def test_many_samples_are_told_apart() -> None:
    """More samples than one pass can code; two of them change places."""

    def body(m, x):
        order = x[:, 0].argsort()
        return m.out(torch.tanh(m.a(x[order]))[order.argsort()])

    model = Net(body, a=nn.Linear(3, 2), out=nn.Linear(2, 1))
    x = torch.randn(70, 3)
    x = x[x[:, 0].argsort()]
    tangent = Tangent(model)
    close(tangent.at(x).rows(), oracle.jacobian(model, x))
    x[[3, 57]] = x[[57, 3]]
    close(tangent.at(x).rows(), oracle.jacobian(model, x))


def test_a_choice_for_the_whole_batch_is_refused() -> None:
    """What one data point gives depends on the others."""

    def body(m, x):
        return m.a(x) if x[:, 0].mean() > 0 else torch.tanh(m.b(m.square(x)))

    model = Net(body, a=nn.Linear(3, 2), b=nn.Linear(3, 2), square=nn.Linear(3, 3))
    x = torch.randn(4, 3)
    x[:, 0] = torch.tensor([1.5, -1.2, 1.5, -1.2])
    with unchanged(model), pytest.raises(ModelError, match=r"data point 1 gives another output alone"):
        Tangent(model).at(x)


def test_grouped_products() -> None:
    """Experts by torch._grouped_mm, in the one precision that it has everywhere."""
    if not hasattr(torch, "_grouped_mm"):
        pytest.skip("this torch has no grouped product")

    def body(m, x):
        choice = m.gate(x).argmax(-1)
        order = choice.argsort()
        ends = torch.bincount(choice, minlength=3).cumsum(0).to(torch.int32)
        y = torch._grouped_mm(x[order].bfloat16(), m.w.bfloat16(), offs=ends).to(x.dtype)
        return m.out(torch.tanh(y[order.argsort()]))

    model = Net(body, gate=nn.Linear(8, 3), w=parameter(3, 8, 8), out=nn.Linear(8, 2))
    x = torch.randn(5, 8)
    tangent = Tangent(model)
    for batch in (x, x.flip(0)):
        close(tangent.at(batch).rows(), oracle.jacobian(model, batch))
