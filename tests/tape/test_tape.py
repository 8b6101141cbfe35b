"""The tape: what it holds, what it refuses, and that recording leaves no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import problems
from lapwing.errors import ModelError, UnsupportedOperationError
from lapwing.params import ParamSpace
from lapwing.tangent import Tangent
from lapwing.tape.nodes import Node, Value
from lapwing.tape.tape import Tape, record
from unchanged import unchanged

UNSEEN = ("custom_function", "custom_function_first")


def taped(body, given: Tensor, **members) -> Tape:
    return record(Tangent(problems.Net(body, **members)), given)


def made(node: Node) -> Value:
    """The one value that a node returned."""
    (value,) = node.outs
    assert value is not None
    return value


def names(tape: Tape) -> list[str]:
    return [node.name for node in tape.nodes]


def x(*shape: int) -> Tensor:
    return torch.randn(shape)


@pytest.mark.parametrize("name", [name for name in problems.NAMES if name not in UNSEEN])
def test_outputs_are_those_of_the_model_and_the_model_is_left_alone(name):
    problem = problems.build(name)
    with unchanged(problem.model):
        tape = record(Tangent(problem.model, problem.space), problem.x)
    torch.testing.assert_close(tape.value, problems.call_detached(problem.model, problem.x))


@pytest.mark.parametrize("name", UNSEEN)
def test_a_custom_function_hides_its_operations(name):
    problem = problems.build(name)
    with unchanged(problem.model), pytest.raises(UnsupportedOperationError, match=r"cannot be seen.*'diag', 'kron'"):
        record(Tangent(problem.model, problem.space), problem.x)


def test_nodes_in_order_and_what_they_read():
    tape = taped(lambda m, x: m.b(F.relu(m.a(x))), x(4, 3), a=nn.Linear(3, 5), b=nn.Linear(5, 2))
    assert names(tape) == ["linear", "relu", "linear"]
    first, relu, last = tape.nodes
    assert [value.parameter for value in first.sources] == ["a.weight", "a.bias"]
    assert relu.sources == first.outs
    assert made(relu).base is made(first)
    assert tape.output is last.outs[0]
    assert last.sources[0] is relu.outs[0]
    assert made(last).shape == (4, 2)


def test_outputs_without_parameters():
    model = problems.Net(lambda m, x: m.a(x), a=nn.Linear(3, 2), unused=nn.Linear(3, 2))
    tape = record(Tangent(model, ParamSpace.of(model).select(module="unused")), x(4, 3))
    assert tape.output is None
    assert tape.nodes == []


def test_calls_that_lead_nowhere_are_left_out():
    def body(m, x):
        m.b(x).square().sum()
        return m.a(x)

    assert names(taped(body, x(4, 3), a=nn.Linear(3, 2), b=nn.Linear(3, 2))) == ["linear"]


def test_entrywise_operations_of_one_value_have_one_base():
    def body(m, x):
        h = m.a(x)
        return (h * h.sigmoid()).tanh_() + h

    tape = taped(body, x(4, 3), a=nn.Linear(3, 2))
    assert names(tape) == ["linear", "sigmoid", "mul", "tanh_", "add"]
    assert all(made(node).base is made(tape.nodes[0]) for node in tape.nodes)


def test_operations_of_two_values_have_none():
    tape = taped(lambda m, x: m.a(x) * m.b(x), x(4, 3), a=nn.Linear(3, 2), b=nn.Linear(3, 2))
    assert made(tape.nodes[-1]).origin is None


def test_what_is_made_of_parameters_alone_is_known():
    def body(m, x):
        weight = m.a.exp() @ torch.ones(2, 2)  # parameters and constants
        scale = (x.detach() * 2).mean() * m.s  # parameters and data
        hidden = (m.s * x.sum()).detach() * m.s  # what is detached is data still
        return x @ weight * scale * hidden

    tape = taped(body, x(4, 2), a=problems.parameter(2, 2), s=problems.parameter())
    assert [node.derived for node in tape.nodes] == [True, True, False, False, False, False, False]


def test_functions_of_torch_in_python_are_followed_into():
    tape = taped(lambda m, x: F.local_response_norm(m.a(x), 2), x(2, 1, 4), a=nn.Conv1d(1, 3, 1))
    assert "local_response_norm" not in names(tape)
    assert "div" in names(tape)


def test_attention_is_recorded_in_plain_operations():
    problem = problems.build("mha_self")
    tape = record(Tangent(problem.model), problem.x)
    assert {"softmax", "matmul", "linear"} <= set(names(tape))
    assert "scaled_dot_product_attention" not in names(tape)


def test_global_switches_are_put_back_after_an_exception():
    def body(m, x):
        wrong: Any = "wrong"
        return F.local_response_norm(m.a(x), 2, alpha=wrong)

    model = problems.Net(body, a=nn.Conv1d(1, 3, 1))
    before = {name: vars(F)[name] for name in vars(F) if name.startswith("has_torch_function")}
    with unchanged(model), pytest.raises(ModelError, match="forward pass"):
        record(Tangent(model), x(2, 1, 4))
    assert before == {name: vars(F)[name] for name in vars(F) if name.startswith("has_torch_function")}


def test_buffers_and_modes_are_put_back_after_an_exception():
    def body(m, x):
        m.train()
        m.norm.running_mean.add_(1)
        raise RuntimeError("in the middle")

    model = problems.Net(body, norm=nn.BatchNorm1d(3)).eval()
    with unchanged(model), pytest.raises(ModelError, match="in the middle"):
        record(Tangent(model), x(2, 3))


def test_train_mode_is_refused():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with pytest.raises(ModelError, match="train mode"):
        record(Tangent(model), x(4, 3))


# -- operations in place --------------------------------------------------------------------------------------------


def test_writing_through_a_view_is_refused():
    def body(m, x):
        h = m.a(x)
        h[:, :2].mul_(2.0)
        return h * 1.0

    with pytest.raises(UnsupportedOperationError, match="written to through a view"):
        taped(body, x(4, 3), a=nn.Linear(3, 3))


def test_a_view_of_what_is_written_to_is_refused():
    def body(m, x):
        h = m.a(x)
        view = h.view(2, 6)
        h.mul_(2.0)
        return view.reshape(4, 3) * 1.0

    with pytest.raises(UnsupportedOperationError, match="written to through a view"):
        taped(body, x(4, 3), a=nn.Linear(3, 3))


def test_data_that_are_overwritten_are_missed_only_where_they_are_needed():
    """`mul` needs x on the way back, `add` does not."""

    def product(m, x):
        x = x.clone()
        h = x * m.s
        x.zero_()
        return h

    def sum_(m, x):
        x = x.clone()
        h = x + m.s
        x.zero_()
        return h

    assert names(taped(sum_, x(4, 3), s=problems.parameter(3))) == ["add"]
    node = taped(product, x(4, 3), s=problems.parameter(3)).nodes[0]
    with pytest.raises(UnsupportedOperationError, match=r"'mul' read a tensor of shape .* that is written to later on"):
        _ = node.given


def test_writing_into_data_leaves_the_inputs_alone():
    """The tape repeats operations; an input of the user's that one writes to is never written again."""
    given = x(4, 3)

    def body(m, x):
        return x.mul_(m.s)

    model = problems.Net(lambda m, x: body(m, x.clone()), s=problems.parameter(3))
    before = given.clone()
    tape = record(Tangent(model), given)
    (node,) = [node for node in tape.nodes if node.name == "mul_"]
    for _ in range(2):
        torch.testing.assert_close(node.given[0], given)
        torch.testing.assert_close(dict(node.pull([torch.ones(4, 3)]))[tape.parameters["s"]], given.sum(0))
    torch.testing.assert_close(given, before)


# -- which tensors --------------------------------------------------------------------------------------------------


def test_inputs_from_inference_mode():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    with torch.inference_mode():
        given = x(4, 3)
        tape = record(Tangent(model), given)
    assert names(tape) == ["linear", "tanh", "linear"]


def test_inputs_that_require_gradients_are_data():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    given = x(4, 3).requires_grad_()
    tape = record(Tangent(model), given)
    assert set(tape.parameters) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert [value.parameter for value in tape.nodes[0].sources] == ["0.weight", "0.bias"]
    assert given.grad is None


def test_parameters_outside_the_space_are_constants():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    tape = record(Tangent(model, ParamSpace.of(model).select(module="2")), x(4, 3))
    assert names(tape) == ["linear", "tanh", "linear"]
    assert [value.parameter for value in tape.nodes[0].sources] == ["2.weight", "2.bias"]
    assert list(tape.nodes[2].inputs) == [0]


def test_two_batches_of_one_network_have_one_signature():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    tangent = Tangent(model)
    assert record(tangent, x(4, 3)).signature == record(tangent, x(7, 3)).signature


def test_pull_agrees_with_autograd_for_one_and_for_many_cotangents():
    def body(m, x):
        return torch.cat([m.a(x), m.a(x).tanh()], 1) * m.s

    model = problems.Net(body, a=nn.Linear(3, 2), s=problems.parameter(4))
    tape = record(Tangent(model), x(5, 3))
    node = tape.nodes[-1]
    left, scale = node.given
    u = torch.randn(6, 5, 4)
    for value, found in node.pull([u], batched=True):
        expected = (u * left).sum(1) if value.parameter == "s" else u * scale
        torch.testing.assert_close(found, expected)
    for value, found in node.pull([u[0]]):
        expected = (u[0] * left).sum(0) if value.parameter == "s" else u[0] * scale
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (lambda m, x: m.first(x)[:, 0], "has shape \\(4,\\); expected \\[batch, outputs\\]"),
        (lambda m, x: m.first(x)[:3], "has 3 rows for a batch of 4 inputs"),
        (lambda m, x: m.first(x).repeat(2, 1), "has 8 rows for a batch of 4 inputs"),
        (lambda m, x: m.first(x).detach(), "no trainable parameter behind the model's output"),
    ],
    ids=["no output axis", "fewer rows", "more rows", "detached"],
)
def test_outputs_that_are_no_rows_of_data_points_are_refused(body: Any, words: str) -> None:
    model = problems.Net(body, first=nn.Linear(3, 2))
    with unchanged(model), pytest.raises(ModelError, match=words):
        record(Tangent(model), x(4, 3))
