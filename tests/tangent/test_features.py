"""The last layer by its features: found by itself, the same map as the general one, and refused where it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import problems
from lapwing.errors import DataError, ModelError, ParameterError
from lapwing.linalg import LinearMap
from lapwing.linalg.rows import OuterRows
from lapwing.params import ParamSpace
from lapwing.tangent import FeatureTangent, Tangent, last_layer_name
from problems import Net
from unchanged import unchanged

REFUSED = {
    **dict.fromkeys([name for name in problems.NAMES if name.startswith("raw_") and "table" not in name], "none ran"),
    "tied_embedding": "'mix' (Linear)",
    "tied_embedding_sequence": "tied to 'e.weight'",
    "tied_autoencoder": "none ran",
    "samples_last": "none ran",
    "one_by_one": "'b', differs",
    "micro_batches": "ran 2 times",
    "image_categorical": "'2' (Conv2d)",
    "image_gaussian": "'2' (ConvTranspose2d)",
    "bitfit": "requires_grad=False",
}


def close(found: Tensor, expected: Tensor, rtol: float = 1e-9) -> None:
    torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol * float(expected.abs().max() + 1e-30))


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def mlp(outputs: int = 2) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def same_map(model: nn.Module, x: Any, reduction: str | None = None) -> None:
    """Every part of the contract, against the general linearisation in the same parameters."""
    tangent = FeatureTangent(model, reduction=reduction)
    with unchanged(model):
        found = tangent.at(x)
    general = Tangent(model, tangent.space).at(x)
    assert isinstance(found, LinearMap)
    assert (found.batch, found.outputs) == (general.batch, general.outputs)
    close(found.value, general.value)
    close(found.rows(), general.rows())
    v, u = randn(tangent.space.size), torch.randn_like(general.value)
    close(found.mv(v), general.mv(v))
    close(found.rmv(u), general.rmv(u))


# -- the same map ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in problems.NAMES if name not in REFUSED])
def test_the_map_of_every_network_with_a_linear_head_is_the_general_one(name: str) -> None:
    problem = problems.build(name)
    same_map(problem.model, problem.x)


def sequence(body: Callable) -> tuple[nn.Module, Tensor]:
    return Net(body, e=nn.Embedding(7, 3), out=nn.Linear(3, 2)).double(), torch.randint(7, (4, 5))


@pytest.mark.parametrize(
    ("reduction", "body"),
    [
        ("pick_first", lambda m, t: m.out(torch.tanh(m.e(t)))[:, 0]),
        ("pick_last", lambda m, t: m.out(torch.tanh(m.e(t)))[:, -1]),
        ("average", lambda m, t: m.out(torch.tanh(m.e(t))).mean(1)),
    ],
)
def test_a_layer_applied_at_every_position_and_then_reduced(reduction: str, body: Callable) -> None:
    model, x = sequence(body)
    same_map(model, x, reduction)
    assert FeatureTangent(model, "out", reduction).at(x).features.shape == (4, 3)
    other = "average" if reduction != "average" else "pick_last"
    with pytest.raises(ModelError, match=f"reduced by '{other}'"):
        FeatureTangent(model, "out", other).at(x)
    if reduction != "average":  # the position that was picked is found, as it may be another for every data point
        same_map(model, x)
        return
    with pytest.raises(ModelError, match=f"reduction='{reduction}'"):
        FeatureTangent(model, "out").at(x)
    with pytest.raises(ModelError, match="'out', differs"):
        last_layer_name(model, x)


@pytest.mark.parametrize("reduction", ["pick_first", "pick_last", "average"])
def test_a_reduction_has_nothing_to_do_where_features_have_one_position(reduction: str) -> None:
    same_map(mlp(), randn(4, 3), reduction)


@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: m.out(torch.tanh(m.a(x))).flatten(1),
        lambda m, x: m.out(torch.tanh(m.a(x))).unsqueeze(1),
        lambda m, x: m.out(torch.tanh(m.a(x))).unflatten(1, (3, 2)),
        lambda m, x: m.out(torch.tanh(m.a(x)).unsqueeze(1)).squeeze(1),
        lambda m, x: m.out(torch.tanh(m.a(x))).clone(),
        lambda m, x: m.out(input=torch.tanh(m.a(x))),
        lambda m, x: F.dropout(m.out(torch.tanh(m.a(x))), 0.5, training=m.training),
    ],
    ids=["flatten", "unsqueeze", "unflatten", "squeeze", "clone", "keyword", "dropout in eval mode"],
)
def test_operations_on_the_shape_may_follow_the_last_layer(body: Callable) -> None:
    model = Net(body, a=nn.Linear(3, 4), out=nn.Linear(4, 6)).double().eval()
    assert last_layer_name(model, randn(4, 3)) == "out"
    same_map(model, randn(4, 3))


def test_positions_may_be_folded_into_the_batch_before_the_layer() -> None:
    def body(m, x):
        return m.out(torch.tanh(m.a(x.flatten(0, 1)))).unflatten(0, x.shape[:2])

    same_map(Net(body, a=nn.Linear(3, 4), out=nn.Linear(4, 2)).double(), randn(4, 5, 3))


def test_the_model_may_be_the_layer_and_the_bias_may_be_frozen_or_missing() -> None:
    assert last_layer_name(nn.Linear(3, 2).double(), randn(4, 3)) == ""
    same_map(nn.Linear(3, 2).double(), randn(4, 3))
    same_map(nn.Linear(3, 2, bias=False).double(), randn(4, 3))
    frozen = mlp()
    frozen[2].bias.requires_grad_(False)
    assert FeatureTangent(frozen, "2").space.names == ("2.weight",)
    same_map(frozen, randn(4, 3))


def test_one_data_point_and_models_of_one_batch_size() -> None:
    same_map(mlp(), randn(1, 3))
    same_map(mlp(), randn(2, 3))
    fixed = Net(lambda m, x: m.out(x.reshape(4, 3)), out=nn.Linear(3, 2)).double()
    same_map(fixed, randn(4, 3))


def test_rows_are_an_identity_that_takes_no_memory_per_data_point() -> None:
    found = FeatureTangent(mlp(5)).at(randn(6, 3))
    (piece,) = found.pieces()
    assert isinstance(piece, OuterRows)
    assert piece.left.shape == (5, 6, 1, 1, 5)
    assert piece.left.stride(1) == 0
    assert torch.equal(piece.left[:, 0, 0, 0], torch.eye(5, dtype=torch.float64))
    close(piece.right[:, 0, 0, :4], found.features)
    assert bool((piece.right[..., -1] == 1).all())


def test_parts_within_a_budget_are_the_whole_without_another_pass() -> None:
    model, x = mlp(), {"x": randn(7, 3)}
    passes = []
    counted = Net(lambda m, x: passes.append(len(x)) or m.body_(x), body_=model).double()
    found = FeatureTangent(counted, "body_.2", budget=2 * 3 * 2**2 * 8).at(x)
    before = len(passes)
    parts = list(found.parts())
    assert [part.batch for part in parts] == [2, 2, 2, 1]
    assert len(passes) == before
    close(torch.cat([part.rows() for part in parts]), found.rows())
    assert [len(part.x["x"]) for part in parts] == [2, 2, 2, 1]
    assert [part.batch for part in FeatureTangent(counted, "body_.2", budget=1).at(x).parts()] == [1] * 7


def test_half_precision_is_widened() -> None:
    model = mlp().to(torch.bfloat16)
    found = FeatureTangent(model).at(randn(5, 3).to(torch.bfloat16))
    assert found.value.dtype == found.features.dtype == found.rows().dtype == torch.float32
    assert FeatureTangent(model).at(randn(5, 3).to(torch.bfloat16)).output.dtype == torch.bfloat16


def test_no_graph_unless_asked_for_and_then_gradients_in_the_input() -> None:
    model, x = mlp(), randn(4, 3).requires_grad_()
    plain = FeatureTangent(model).at(x)
    assert not plain.value.requires_grad
    assert not plain.features.requires_grad
    found = FeatureTangent(model, differentiable=True).at(x)
    weight = torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(4, 2)
    (gradient,) = torch.autograd.grad((found.value * weight).sum(), x, retain_graph=True)
    (expected,) = torch.autograd.grad((model(x) * weight).sum(), x)
    close(gradient, expected)
    (piece,) = found.pieces()
    assert isinstance(piece, OuterRows)
    (of_rows,) = torch.autograd.grad(piece.right.square().sum(), x)
    (expected,) = torch.autograd.grad(model[:2](x).square().sum(), x)
    close(of_rows, expected)


def test_inference_mode_makes_no_difference() -> None:
    model, x = mlp(), randn(4, 3)
    expected = FeatureTangent(model).at(x).rows()
    with torch.inference_mode():
        assert last_layer_name(model, x.clone()) == "2"
        close(FeatureTangent(model).at(x.clone()).rows(), expected)


def test_the_map_follows_the_weights() -> None:
    model, x = mlp(), randn(4, 3)
    tangent = FeatureTangent(model)
    tangent.at(x)
    with torch.no_grad():
        model.get_parameter("0.weight").mul_(2)
        model.get_parameter("2.weight").add_(1)
    close(tangent.at(x).value, model(x).detach())
    close(tangent.at(x).features, model[:2](x).detach())


# -- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REFUSED)
def test_a_network_without_a_linear_head_of_its_own_is_refused(name: str) -> None:
    problem = problems.build(name)
    with unchanged(problem.model), pytest.raises(ModelError) as error:
        FeatureTangent(problem.model).at(problem.x)
    assert REFUSED[name] in str(error.value)
    assert "expected" in str(error.value)
    assert "last_layer_name=" in str(error.value) or "subset_of_weights='all'" in str(error.value)


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (lambda m, x: m.out(torch.tanh(m.a(x))).softmax(-1), "'out', differs"),
        (lambda m, x: m.out(torch.tanh(m.a(x))).relu_(), "'out', differs"),
        (lambda m, x: 2 * m.out(torch.tanh(m.a(x))), "'out', differs"),
        (lambda m, x: m.softmax(m.out(torch.tanh(m.a(x)))), "'softmax' (Softmax)"),
        (lambda m, x: F.linear(torch.tanh(m.a(x)), m.out.weight), "'a' (Linear)"),
        (lambda m, x: m.out(torch.tanh(m.a(x)).unsqueeze(1).expand(-1, 5, -1)).mT, "'out', differs"),
        (lambda m, x: (m.out(torch.tanh(m.a(x))) + m.twin(torch.tanh(m.a(x)))) / 2, "['out', 'twin']"),
    ],
    ids=["softmax", "in place", "scaled", "softmax module", "functional", "permuted", "two candidates"],
)
def test_what_follows_the_last_layer_is_named(body: Callable, found: str) -> None:
    members = {"a": nn.Linear(3, 4), "out": nn.Linear(4, 2), "twin": nn.Linear(4, 2), "softmax": nn.Softmax(-1)}
    members["twin"].load_state_dict(members["out"].state_dict())
    model = Net(body, **members).double()
    x = randn(4, 3)
    with unchanged(model), pytest.raises(ModelError) as error:
        last_layer_name(model, x)
    message = str(error.value)
    assert found in message
    assert "expected" in message
    assert "last_layer_name=" in message
    assert "subset_of_weights='all'" in message
    with unchanged(model), pytest.raises(ModelError):
        FeatureTangent(model).at(x)
    with unchanged(model), pytest.raises(ModelError, match=r"expected.*subset_of_weights='all'"):
        FeatureTangent(model, "out").at(x)


@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: m.out(torch.tanh(F.linear(x, m.out.weight) + m.a(x))),
        lambda m, x: m.out(torch.tanh(m.a(x)) * m.out.bias.sum()),
    ],
    ids=["weight", "bias"],
)
def test_another_use_of_the_last_layers_parameters_is_refused(body: Callable) -> None:
    """The output is phi W^T + b, but phi depends on W: the features alone are not the Jacobian."""
    model = Net(body, a=nn.Linear(3, 3), out=nn.Linear(3, 3)).double()
    with unchanged(model), pytest.raises(ModelError, match="uses nowhere else"):
        FeatureTangent(model).at(randn(4, 3))


@pytest.mark.parametrize("head", ["first", "last"])
def test_a_tied_layer_is_refused_whichever_name_comes_first(head: str) -> None:
    members = {"e": nn.Embedding(5, 3), "out": nn.Linear(3, 5)}
    members["e"].weight = members["out"].weight
    ordered = dict(reversed(members.items())) if head == "first" else members
    model = Net(lambda m, t: m.out(torch.tanh(m.e(t).mean(1))), **ordered).double()
    with unchanged(model), pytest.raises(ModelError, match="tied"):
        FeatureTangent(model).at(torch.randint(5, (4, 2)))


def test_a_derived_weight_is_refused() -> None:
    model = mlp()
    parametrizations.weight_norm(model[2])
    with pytest.raises(ModelError, match="computed from other parameters"):
        FeatureTangent(model).at(randn(4, 3))


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.BatchNorm1d(4), nn.AlphaDropout(0.1)])
def test_training_mode_is_refused_where_it_matters(layer: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(3, 4), layer, nn.Linear(4, 2)).double().train()
    x = randn(5, 3)
    with unchanged(model), pytest.raises(ModelError, match=r"'1' .*training mode.*model.eval\(\)"):
        FeatureTangent(model).at(x)
    with unchanged(model):
        assert last_layer_name(model, x) == "2"
    same_map(model.eval(), x)
    same_map(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.0), nn.Linear(4, 2)).double().train(), x)


@pytest.mark.parametrize(
    "body",
    [lambda m, x: m.out(x - x.mean(0)), lambda m, x: m.out(x + torch.randn_like(x))],
    ids=["coupled", "random"],
)
def test_coupled_samples_and_random_models_are_refused(body: Callable) -> None:
    model = Net(body, out=nn.Linear(3, 2)).double()
    with unchanged(model), pytest.raises(ModelError, match="independent samples and a deterministic model"):
        FeatureTangent(model, "out").at(randn(5, 3))


def test_names_and_reductions_that_do_not_exist() -> None:
    model = mlp()
    with pytest.raises(ModelError, match=r"no module 'head'.*\['0', '2'\]"):
        FeatureTangent(model, "head")
    with pytest.raises(ModelError, match="'1' is Tanh"):
        FeatureTangent(model, "1")
    with pytest.raises(ParameterError, match="unknown reduction 'sum'"):
        FeatureTangent(model, reduction="sum")
    with pytest.raises(ParameterError, match="unknown reduction 'sum'"):
        last_layer_name(model, randn(2, 3), "sum")
    with pytest.raises(ModelError, match="'0' makes of"):
        FeatureTangent(model, "0").at(randn(4, 3))
    with pytest.raises(ModelError, match="not known before the first batch"):
        FeatureTangent(model).space.size  # noqa: B018


def test_frozen_weights_and_a_layer_that_does_not_run() -> None:
    model = mlp()
    model[2].weight.requires_grad_(False)
    with pytest.raises(ModelError, match=r"'2.weight' of the last layer has requires_grad=False"):
        FeatureTangent(model, "2")
    later = mlp()
    tangent = FeatureTangent(later, "2")
    later.get_parameter("2.bias").requires_grad_(False)
    with pytest.raises(ModelError, match=r"'2.bias' of the parameter space has requires_grad=False"):
        tangent.at(randn(4, 3))
    idle = Net(lambda m, x: m.out(x), out=nn.Linear(3, 2), idle=nn.Linear(3, 2)).double()
    with pytest.raises(ModelError, match="'idle' ran 0 times"):
        FeatureTangent(idle, "idle").at(randn(4, 3))


def test_bad_inputs_say_what_is_wrong() -> None:
    tangent = FeatureTangent(mlp())
    with pytest.raises(DataError, match="NaN"):
        tangent.at(torch.full((4, 3), float("nan"), dtype=torch.float64))
    with pytest.raises(DataError, match="empty"):
        tangent.at(randn(0, 3))
    with pytest.raises(ModelError, match="forward pass"):
        tangent.at(randn(4, 5))
    found = tangent.at(randn(4, 3))
    with pytest.raises(DataError, match="cotangent"):
        found.rmv(randn(4, 3))
    with pytest.raises(ParameterError):
        found.mv(randn(3))
    flat = Net(lambda m, x: m.out(x).squeeze(-1), out=nn.Linear(3, 1)).double()
    with pytest.raises(ModelError, match="Keep the output axis"):
        FeatureTangent(flat).at(randn(4, 3))


def test_hooks_are_gone_after_an_exception_in_the_forward_pass() -> None:
    def body(m, x):
        if bool((x > 100).any()):
            raise KeyError("from the model")
        return m.out(x)

    model = Net(body, out=nn.Linear(3, 2)).double()
    x = torch.full((4, 3), 200.0, dtype=torch.float64)
    with unchanged(model), pytest.raises(KeyError):
        last_layer_name(model, x)
    with unchanged(model), pytest.raises(KeyError):
        FeatureTangent(model, "out").at(x)


def test_the_users_own_hooks_stay_and_are_seen() -> None:
    model, x = mlp(), randn(4, 3)
    handle = model[2].register_forward_pre_hook(lambda _, args: (2 * args[0],))
    same_map(model, x)
    close(FeatureTangent(model).at(x).features, 2 * model[:2](x).detach())
    handle.remove()


def test_the_space_is_the_layer_in_flat_order() -> None:
    model = mlp()
    tangent = FeatureTangent(model, "2")
    assert tangent.space == ParamSpace.of(model).select(module="2")
    assert list(tangent.parameters) == ["2.weight", "2.bias"]
    assert tangent.parameters["2.weight"] is model[2].weight


def test_errors_are_lapwings_own() -> None:
    with pytest.raises(ModelError):
        last_layer_name(nn.Softmax(-1), randn(4, 3))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (lambda y: y[:, 0], r"output has shape \(6,\); expected \[batch, outputs\]"),
        (lambda y: y.sum(), r"output has shape \(\); expected"),
        (lambda y: y[:4], r"4 rows for a batch of 6 inputs"),
        (lambda y: torch.cat([y, y]), r"12 rows for a batch of 6 inputs"),
    ],
    ids=["no output axis", "one number", "too few rows", "too many rows"],
)
def test_outputs_of_another_shape_are_refused(shape: Callable[[Tensor], Tensor], message: str) -> None:
    net = Net(lambda self, x: shape(self.head(torch.tanh(x))), head=nn.Linear(3, 2).double())
    for tangent in (FeatureTangent(net, "head"), Tangent(net)):
        with pytest.raises(ModelError, match=message):
            tangent.at(randn(6, 3))
