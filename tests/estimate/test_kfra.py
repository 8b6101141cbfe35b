"""kfra: equal to kflr where theory says so, and to eq. 4.7 of the thesis with one dense Jacobian per data point."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kron_oracle
import oracle
import problems
from lapwing import estimate
from lapwing.errors import LapwingError, UnsupportedOperationError
from lapwing.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from lapwing.params import ParamSpace
from lapwing.tangent import Tangent
from lapwing.tangent.inputs import take
from problems import Net
from unchanged import unchanged

REFUSED = {
    "layer_norm": "layer_norm",
    "layer_norm_of_matrices": "layer_norm",
    "group_norm": "group_norm",
    "instance_norm": "instance_norm",
    "rms_norm": "rms_norm",
    "attention_linears": "multiplies 2 tensors",
    "attention_fused": "multiplies 2 tensors",
    "mha_self": "multiplies 2 tensors",
    "mha_time_first": "multiplies 2 tensors",
    "mha_cross": "multiplies 2 tensors",
    "mha_kdim_vdim": "multiplies 2 tensors",
    "mha_bias_kv": "multiplies 2 tensors",
    "transformer_encoder": "layer_norm",
    "transformer_encoder_norm_first": "layer_norm",
    "transformer_encoder_masked": "layer_norm",
    "transformer_decoder": "layer_norm",
    "lstm": "lstm",
    "gru": "gru",
    "gru_cell": "gru_cell",
    "weight_norm": "weight is made from",
    "weight_norm_conv": "weight is made from",
    "spectral_norm": "weight is made from",
    "low_rank_update": "weight is made from",
    "custom_function": "cannot be seen",
    "custom_function_first": "cannot be seen",
    "one_by_one": "another way",
    "selected_by_mask": "mask",
}
# samples share an axis with other positions: fine one at a time, refused in larger batches
FOLDED = ["folded_time", "folded_time_first", "folded_between", "siamese"]
# the batch decides which operations there are
BATCHWISE = ["micro_batches", "packed_tokens"]
# kflr has no rule for them, and the tape has
ONLY_HERE = ["class_token"]
SUPPORTED = [name for name in problems.NAMES if name not in {*REFUSED, *ONLY_HERE}]


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12 * float(expected.abs().max() + 1e-30))


def kfra(problem: problems.Problem, batches: Any = None, **options) -> Tensor:
    with unchanged(problem.model):
        tangent = Tangent(problem.model, problem.space)
        return estimate.kfra(tangent, problem.likelihood, batches or problem.batches, **options).dense()


def one(problem: problems.Problem, n: int = 0) -> list[tuple[Any, Tensor]]:
    return [(take(problem.x, slice(n, n + 1)), problem.y[n : n + 1])]


# -- exact for one datum --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", SUPPORTED)
def test_equals_kflr_for_one_datum(name: str, sharing: str) -> None:
    problem = problems.build(name)
    batches = one(problem)
    expected = estimate.kflr(Tangent(problem.model, problem.space), problem.likelihood, batches, sharing=sharing)
    close(kfra(problem, batches, sharing=sharing), expected.dense())


def test_a_parameter_among_the_data_is_followed() -> None:
    """A class token is concatenated with the data, for which kflr has no rule."""
    problem = problems.build("class_token")
    batches = one(problem)
    start = problem.space.starts["token"]
    token = slice(start, start + 2)
    expected = oracle.ggn(problem.model, problem.likelihood, *batches[0])[token, token]
    close(kfra(problem, batches)[token, token], expected)


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_what_it_cannot_follow(name: str) -> None:
    problem = problems.build(name)
    with pytest.raises(LapwingError, match=REFUSED[name]):
        kfra(problem)


@pytest.mark.parametrize("name", [*FOLDED, *BATCHWISE])
def test_refuses_batches_that_it_cannot_take_apart(name: str) -> None:
    problem = problems.build(name)
    with pytest.raises(UnsupportedOperationError, match=r"samples share axis|another way"):
        kfra(problem)


# -- exact for linear networks --------------------------------------------------------------------------------------


def linear_networks() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    def body(m, x):
        h = m.a(x)
        h = h + m.c(m.b(h))
        return m.out(h) + x

    branches = Net(body, a=nn.Linear(3, 4), b=nn.Linear(4, 2), c=nn.Linear(2, 4), out=nn.Linear(4, 3))
    skip = Net(lambda m, x: x + m.b(m.a(x)), a=nn.Linear(3, 4), b=nn.Linear(4, 3))
    chain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 2))
    conv = nn.Sequential(nn.Conv2d(1, 2, 2), nn.AvgPool2d(2, 1), nn.Upsample(scale_factor=2), nn.Flatten())
    conv = nn.Sequential(conv, nn.Linear(8, 3))
    return {"chain": (chain, (3,)), "skip": (skip, (3,)), "branches": (branches, (3,)), "conv": (conv, (1, 3, 3))}


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", linear_networks())
def test_equals_kflr_for_linear_networks(name: str, sharing: str) -> None:
    """Lemma 4.1: nothing that is propagated depends on the data point."""
    torch.manual_seed(0)
    model, shape = linear_networks()[name]
    model = model.double()
    x = torch.randn(6, *shape).double()
    y = torch.randn_like(model(x).detach())
    likelihood = Gaussian(0.3)
    expected = estimate.kflr(Tangent(model), likelihood, [(x, y)], sharing=sharing).dense()
    close(
        estimate.kfra(Tangent(model), likelihood, [(x[:4], y[:4]), (x[4:], y[4:])], sharing=sharing).dense(), expected
    )


def test_is_the_block_ggn_of_a_deep_linear_network() -> None:
    model = linear_networks()["chain"][0].double()
    x, y = torch.randn(7, 3).double(), torch.randn(7, 2).double()
    groups = ParamSpace.of(model).groups("layer")
    expected = oracle.ggn(model, Gaussian(), x, y) * (groups[:, None] == groups[None, :])
    close(estimate.kfra(Tangent(model), Gaussian(), [(x, y)]).dense(), expected)


# -- eq. 4.7, spelled out -------------------------------------------------------------------------------------------


def with_parameter(layer: nn.Module, name: str, h: Tensor, p: Tensor) -> Tensor:
    return torch.func.functional_call(layer, {name: p}, (h,))


def jacobian(function: Any, x: Tensor) -> Tensor:
    out = torch.autograd.functional.jacobian(function, x)
    return out.reshape(-1, x.numel())


def total(matrices: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(matrices)).sum(0)


def recursion(layers: list[nn.Module], likelihood: Likelihood, x: Tensor, y: Tensor, sharing: str) -> Tensor:
    """G_in = mean_n J_n^T G_out J_n, module by module, with dense Jacobians of one data point at a time."""
    inputs, count = [[x[n : n + 1] for n in range(len(x))]], len(x)
    for layer in layers:
        inputs.append([layer(h).detach() for h in inputs[-1]])
    G = total(oracle.output_hessian(likelihood, f, y[n : n + 1])[0] for n, f in enumerate(inputs[-1])) / count
    blocks = []
    for layer, given in zip(reversed(layers), reversed(inputs[:-1]), strict=True):
        if isinstance(layer, kron_oracle.MATRICES):
            a = torch.stack([kron_oracle.inputs_of(layer, h) for h in given])
            place = kron_oracle.grads_of(layer, torch.arange(len(G)).reshape(layer(given[0]).shape))
            blocks.append(kronecker(layer, a, G, place, sharing, count))
        else:
            for name, p in reversed(list(layer.named_parameters())):
                calls = [partial(with_parameter, layer, name, h) for h in given]
                rows = [jacobian(call, p.detach()) for call in calls]
                blocks.append(total(J.T @ G @ J for J in rows))
        rows = [jacobian(layer, h) for h in given]
        G = total(J.T @ G @ J for J in rows) / count
    return torch.block_diag(*reversed(blocks))


def kronecker(layer: nn.Module, a: Tensor, G: Tensor, place: Tensor, sharing: str, count: int) -> Tensor:
    positions, (rows,) = len(place), place.shape[2:]
    if sharing == "reduce":
        a = a.mean(1, keepdim=True)
        right = total(G[place[s, 0]][:, place[t, 0]] for s in range(positions) for t in range(positions))
    else:
        right = total(G[place[t, 0]][:, place[t, 0]] for t in range(positions))
    A = torch.einsum("ntki,ntkj->ij", a, a) / (count * a.shape[1])
    index = kron_oracle.positions(layer, 0, int(a.shape[-1] - 1) * rows)[0].flatten()
    out = torch.zeros(index.numel(), index.numel()).double()
    out[index[:, None], index[None, :]] = torch.kron(count * right, A)
    assert rows == len(right)
    return out


def chains() -> dict[str, tuple[list[nn.Module], tuple[int, ...], Likelihood]]:
    return {
        "mlp": (
            [nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)],
            (3,),
            Categorical(),
        ),
        "sigmoid autoencoder": (
            [nn.Linear(4, 3), nn.Sigmoid(), nn.Linear(3, 2), nn.Linear(2, 3), nn.SiLU(), nn.Linear(3, 4)],
            (4,),
            Bernoulli(),
        ),
        "conv, max-pooling": (
            [nn.Conv2d(1, 2, 2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3)],
            (1, 5, 5),
            Categorical(),
        ),
        "overlapping max-pooling with padding": (
            [nn.Conv2d(1, 2, 2, padding=1), nn.MaxPool2d(3, 2, 1), nn.Tanh(), nn.Conv2d(2, 2, 2), nn.Flatten()],
            (1, 4, 4),
            Gaussian(0.5),
        ),
        "dilated max-pooling in one dimension": (
            [nn.Conv1d(1, 2, 2), nn.MaxPool1d(2, 1, dilation=2), nn.Flatten(), nn.Linear(8, 2)],
            (1, 7),
            Categorical(),
        ),
        "max-pooling beyond the edge": (
            [nn.Conv1d(1, 2, 2), nn.MaxPool1d(3, 2, ceil_mode=True), nn.Flatten(), nn.Linear(6, 2)],
            (1, 7),
            Categorical(),
        ),
        "adaptive max-pooling": (
            [nn.Conv2d(1, 2, 2), nn.AdaptiveMaxPool2d((3, 2)), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)],
            (1, 6, 5),
            Categorical(),
        ),
        "max-pooling in three dimensions": (
            [nn.Conv3d(1, 2, 1), nn.MaxPool3d((1, 2, 2)), nn.Flatten(), nn.Linear(8, 2)],
            (1, 2, 4, 3),
            Categorical(),
        ),
        "batch norm and PReLU": (
            [nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.PReLU(2), nn.Flatten(), nn.Linear(8, 3), nn.PReLU()],
            (1, 3, 3),
            Categorical(),
        ),
    }  # fmt: skip


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", chains())
def test_equals_the_recursion_spelled_out(name: str, sharing: str) -> None:
    torch.manual_seed(1)
    layers, shape, likelihood = chains()[name]
    model = problems.scrambled(nn.Sequential(*layers).double()).eval()
    x = torch.randn(5, *shape).double()
    y = likelihood.sample(model(x).detach())
    expected = recursion(layers, likelihood, x, y, sharing)
    with unchanged(model):
        found = estimate.kfra(Tangent(model), likelihood, [(x[:3], y[:3]), (x[3:], y[3:])], sharing=sharing).dense()
    close(found, expected)
    if name == "mlp":
        exact = estimate.kflr(Tangent(model), likelihood, [(x, y)], sharing=sharing).dense()
        assert (found - exact).abs().max() > 1e-3 * exact.abs().max(), "with several data points the two differ"
