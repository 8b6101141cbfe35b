"""kfra: equal to kflr where theory says so, and to eq. 4.7 of the thesis with one dense Jacobian per data point."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kron_oracle
import oracle
import problems
from lapwing import estimate
from lapwing.errors import DataError, ModelError, ParameterError, UnsupportedOperationError
from lapwing.estimate.cotangents import Columns
from lapwing.estimate.propagated.kfra import output_sum
from lapwing.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from lapwing.linalg import Kronecker
from lapwing.params import ParamSpace
from lapwing.tangent import Tangent
from lapwing.tangent.inputs import take
from lapwing.tape.rules import RULES
from problems import Net, parameter
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
    "lstm_packed": "lstm",
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
# a parameter among the data, which has a test of its own
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


@pytest.mark.parametrize(("name", "sharing"), problems.chequered(SUPPORTED, ["expand", "reduce"]))
def test_equals_kflr_for_one_datum(name: str, sharing: str) -> None:
    """Claim C07, as the next one."""
    problem = problems.build(name)
    batches = one(problem)
    expected = estimate.kflr(Tangent(problem.model, problem.space), problem.likelihood, batches, sharing=sharing)
    close(kfra(problem, batches, sharing=sharing), expected.dense())


def test_a_parameter_among_the_data_is_followed() -> None:
    """A class token is concatenated with the data."""
    problem = problems.build("class_token")
    batches = one(problem)
    start = problem.space.starts["token"]
    token = slice(start, start + 2)
    expected = oracle.ggn(problem.model, problem.likelihood, *batches[0])[token, token]
    close(kfra(problem, batches)[token, token], expected)


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_what_it_cannot_follow(name: str) -> None:
    problem = problems.build(name)
    error = ParameterError if name == "selected_by_mask" else UnsupportedOperationError
    with pytest.raises(error, match=REFUSED[name]):
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


class Larger(nn.Module):
    """Both arguments carry the data: neither slope is one everywhere."""

    def forward(self, h: Tensor) -> Tensor:
        return torch.maximum(h, 0.3 * h.flip(-1) - 0.1)


class Chosen(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return torch.where(h > 0.1, 2 * h, h.flip(-1))


class Filled(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return torch.minimum(h.masked_fill(h < -0.2, -0.3), h.new_tensor(0.5))


def chains() -> dict[str, tuple[list[nn.Module], tuple[int, ...], Likelihood]]:
    return {
        "mlp": (
            [nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)],
            (3,),
            Categorical(),
        ),
        "maximum of two": ([nn.Linear(3, 5), Larger(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)], (3,), Bernoulli()),
        "where": ([nn.Linear(3, 5), Chosen(), nn.Linear(5, 4), Larger(), nn.Linear(4, 2)], (3,), Gaussian(0.5)),
        "masked_fill and minimum": ([nn.Linear(3, 5), Filled(), nn.Linear(5, 3)], (3,), Categorical()),
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


def test_residual_sums_keep_what_is_between_their_branches() -> None:
    """z = h + c(tanh(b(h))): M of (h, branch) is propagated as one matrix, E[T_n^T M T_n] for every step."""
    torch.manual_seed(2)
    parts = {"a": nn.Linear(3, 4), "b": nn.Linear(4, 3), "c": nn.Linear(3, 4), "out": nn.Linear(4, 3)}
    model = Net(lambda m, x: m.out((h := m.a(x)) + m.c(torch.tanh(m.b(h)))), **parts).double()
    x, y = torch.randn(6, 3).double(), torch.tensor([0, 1, 2, 0, 1, 1])
    f, h = model(x).detach(), parts["a"](x).detach()
    slope = 1 - torch.tanh(parts["b"](h).detach()) ** 2
    W = {name: layer.weight.detach() for name, layer in parts.items()}
    eye, count = torch.eye(4).double(), len(x)
    G = {
        "out": total(oracle.output_hessian(Categorical(), f[n : n + 1], y[n : n + 1])[0] for n in range(count)) / count
    }
    z = W["out"].T @ G["out"] @ W["out"]
    both = torch.cat([eye, eye], 1)  # z = h + c's output
    M = both.T @ z @ both
    G["c"] = M[4:, 4:]
    T = torch.block_diag(eye, W["c"])
    M = T.T @ M @ T
    steps = [torch.block_diag(eye, slope[n].diag()) for n in range(count)]
    M = total(T.T @ M @ T for T in steps) / count
    G["b"] = M[4:, 4:]
    T = torch.cat([eye, W["b"]])
    G["a"] = T.T @ M @ T
    inputs = {
        "a": x,
        "b": h,
        "c": torch.tanh(parts["b"](h).detach()),
        "out": h + parts["c"](torch.tanh(parts["b"](h))).detach(),
    }
    found = estimate.kfra(Tangent(model), Categorical(), [(x[:2], y[:2]), (x[2:], y[2:])])
    for block in found.blocks:
        name = block.name.split(".")[0]
        a = torch.cat([inputs[name], torch.ones(count, 1).double()], 1)
        assert isinstance(block.curvature, Kronecker)
        A, rows = block.curvature.factors
        close(A[0], a.T @ a / count)
        close(rows[0], count * G[name])


# -- any split of the data ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", problems.thinned(name for name in SUPPORTED if name not in {*FOLDED, *BATCHWISE}))
def test_any_split_into_batches_gives_the_same(name: str, sharing: str) -> None:
    problem = problems.build(name)
    count = len(problem.y)
    whole = kfra(problem, sharing=sharing)
    singly = [batch for n in range(count) for batch in one(problem, n)]
    parts = [(take(problem.x, part), problem.y[part]) for part in (slice(1, count), slice(0, 1))]
    close(kfra(problem, singly, sharing=sharing), whole)
    close(kfra(problem, parts, sharing=sharing), whole)
    assert torch.linalg.eigvalsh(whole).min() >= -1e-9 * whole.abs().max(), "positive semi-definite"


# -- options --------------------------------------------------------------------------------------------------------


def test_options_are_those_of_kflr() -> None:
    problem = problems.build("batch_norm1d")
    batches, tangent = one(problem), Tangent(problem.model)
    given: list[dict[str, Any]] = [{"joint_bias": False}, {"dense_limit": 0}, {"factored_damping": True}]
    for options in given:
        found = estimate.kfra(tangent, problem.likelihood, batches, **options)
        expected = estimate.kflr(tangent, problem.likelihood, batches, **options)
        close(found.dense(), expected.dense())
        assert [type(b.curvature) for b in found.blocks] == [type(b.curvature) for b in expected.blocks]
        close(found.with_prior(0.7).logdet(), expected.with_prior(0.7).logdet())
    with pytest.raises(ParameterError, match="unknown option 'shared'"):
        estimate.kfra(tangent, problem.likelihood, batches, shared="expand")


@pytest.mark.slow
def test_cotangents_stand_for_the_output_hessian() -> None:
    problem = problems.build("mlp")
    tangent = Tangent(problem.model)
    exact = kfra(problem)
    close(kfra(problem, cotangents=estimate.fisher), exact)
    for cotangents in (estimate.monte_carlo(20), estimate.projections(20)):
        generator = torch.Generator().manual_seed(0)
        draws = [
            estimate.kfra(tangent, problem.likelihood, problem.batches, cotangents=cotangents, generator=generator)
            for _ in range(100)
        ]
        dense = torch.stack([draw.dense() for draw in draws])
        error = dense.std(0) / len(draws) ** 0.5
        assert bool(((dense.mean(0) - exact).abs() <= 4.5 * error + 1e-12).all())
        again = estimate.kfra(
            tangent,
            problem.likelihood,
            problem.batches,
            cotangents=cotangents,
            generator=torch.Generator().manual_seed(0),
        )
        assert torch.equal(again.dense(), draws[0].dense())


@pytest.mark.parametrize(
    "likelihood", [Bernoulli(), Gaussian(0.3), Categorical()], ids=lambda each: type(each).__name__
)
def test_diagonal_output_hessians_are_never_spelled_out(likelihood: Likelihood) -> None:
    f = torch.randn(5, 4, 3).double()
    y = likelihood.sample(f)
    found = output_sum(likelihood, f, y, estimate.exact, None, 2**20)
    assert found.dim() == (2 if isinstance(likelihood, Categorical) else 1)
    expected = total(oracle.output_hessian(likelihood, f[n : n + 1], y[n : n + 1])[0] for n in range(5))
    close(found if found.dim() == 2 else found.diag(), expected)


def test_positions_without_a_target_do_not_make_the_output_hessian_diagonal() -> None:
    f = torch.randn(4, 3, 5, dtype=torch.float64)
    y = torch.randint(5, (4, 3))
    y[0, 1] = y[2, 0] = y[2, 2] = -100
    expected = torch.zeros(15, 15, dtype=torch.float64)
    for n, t in (y != -100).nonzero().tolist():
        p, at = f[n, t].softmax(0), slice(5 * t, 5 * t + 5)
        expected[at, at] += p.diag() - p.outer(p)
    found = output_sum(Categorical(ignore_index=-100), f, y, estimate.exact, None, 2**20)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_float32_inference_mode_and_inputs_that_require_gradients() -> None:
    problem = problems.build("residual")
    expected = kfra(problem)
    x = problem.x.clone().requires_grad_()
    tangent = Tangent(problem.model, differentiable=True)
    found = estimate.kfra(tangent, problem.likelihood, [(x, problem.y)])
    close(found.dense(), expected)
    assert not found.dense().requires_grad
    with torch.inference_mode():
        close(kfra(problem).clone(), expected)
    single = problems.build("residual", dtype=torch.float32)
    model = single.model.float()
    low = estimate.kfra(Tangent(model), problem.likelihood, [(problem.x.float(), problem.y)]).dense()
    model.double()
    assert low.dtype == torch.float32


# -- entrywise operations -------------------------------------------------------------------------------------------


def test_gates_multiply_entry_by_entry() -> None:
    """Products of two tensors that depend on parameters; the gate's own activation is a step of its own."""
    torch.manual_seed(3)
    parts = {"a": nn.Linear(3, 4), "b": nn.Linear(3, 4), "out": nn.Linear(4, 2)}
    model = Net(lambda m, x: m.out(m.a(x) * torch.sigmoid(m.b(x))), **parts).double()
    x, y = torch.randn(5, 3).double(), torch.randn(5, 2).double()
    W, gate, value = parts["out"].weight.detach(), torch.sigmoid(parts["b"](x)).detach(), parts["a"](x).detach()
    G, slope = W.T @ W, gate * (1 - gate)
    expected = {
        "a.weight": G * (gate.T @ gate),
        "b.weight": G * (value.T @ value) * (slope.T @ slope) / len(x),
    }
    for block in estimate.kfra(Tangent(model), Gaussian(), [(x, y)]).blocks:
        if block.name in expected:
            assert isinstance(block.curvature, Kronecker)
            close(block.curvature.factors[1][0], expected[block.name])
    single = [(x[:1], y[:1])]
    found, exact = (method(Tangent(model), Gaussian(), single).dense() for method in (estimate.kfra, estimate.kflr))
    close(found, exact)


def test_an_activation_without_a_rule_proves_itself() -> None:
    assert torch.special.erfcx not in RULES
    model = Net(lambda m, x: m.b(torch.special.erfcx(m.a(x))), a=nn.Linear(3, 4), b=nn.Linear(4, 2)).double()
    x, y = torch.randn(1, 3).double(), torch.tensor([1])
    found, exact = (
        method(Tangent(model), Categorical(), [(x, y)]).dense() for method in (estimate.kfra, estimate.kflr)
    )
    close(found, exact)


def test_parameters_that_meet_the_data_first_in_batches_of_one() -> None:
    """[1, 3] is broadcast over a batch, but not over a batch of one."""
    torch.manual_seed(0)
    members = {"w": parameter(1, 3), "b": parameter(1, 3), "out": nn.Linear(3, 2)}
    model = Net(lambda m, x: m.out(torch.tanh(x * m.w + m.b)), **members).double()
    x, y = torch.randn(4, 3).double(), torch.tensor([0, 1, 1, 0])
    singly = [(x[n : n + 1], y[n : n + 1]) for n in range(4)]
    whole, split = (estimate.kfra(Tangent(model), Categorical(), data).dense() for data in ([(x, y)], singly))
    close(split, whole)
    found, exact = (m(Tangent(model), Categorical(), singly[:1]).dense() for m in (estimate.kfra, estimate.kflr))
    close(found, exact)


def branching() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    def residual(m, x):
        h = F.relu(m.norm(m.stem(x)))
        h = F.relu(m.norm1(m.inner(F.relu(m.outer(h)))) + m.down(h))
        return m.out(F.adaptive_avg_pool2d(h, 1).flatten(1))

    def skip(m, x):
        e = torch.tanh(m.down(x))
        u = F.interpolate(torch.tanh(m.inner(F.max_pool2d(e, 2))), scale_factor=2, mode="bilinear")
        return m.out(torch.cat([e, u, x], 1).flatten(1))

    def dense(m, x):
        one = torch.tanh(m.a(x))
        two = torch.tanh(m.b(torch.cat([x, one], 1)))
        left, right = m.c(torch.cat([one, two], 1)).chunk(2, 1)
        return m.out(torch.stack([left * torch.sigmoid(right), one, two], 1).sum(1)) * m.scale

    blocks = {
        "stem": nn.Conv2d(1, 2, 3, padding=1), "norm": nn.BatchNorm2d(2), "outer": nn.Conv2d(2, 3, 3, 2, 1, bias=False),
        "inner": nn.Conv2d(3, 3, 3, padding=1), "norm1": nn.BatchNorm2d(3), "down": nn.Conv2d(2, 3, 1, 2),
        "out": nn.Linear(3, 2),
    }  # fmt: skip
    convs = {"down": nn.Conv2d(1, 2, 3, padding=1), "inner": nn.Conv2d(2, 2, 1), "out": nn.Linear(80, 2)}
    linears = {"a": nn.Linear(3, 4), "b": nn.Linear(7, 4), "c": nn.Linear(8, 8), "out": nn.Linear(4, 2)}
    return {
        "residual block": (Net(residual, **blocks), (1, 4, 4)),
        "u-net": (Net(skip, **convs), (1, 4, 4)),
        "dense block and gate": (Net(dense, **linears, scale=parameter()), (3,)),
    }


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", branching())
def test_branching_networks(name: str, sharing: str) -> None:
    """Exact for one datum; any split of several gives the same."""
    torch.manual_seed(4)
    model, shape = branching()[name]
    model = problems.scrambled(model.double()).eval()
    x, y = torch.randn(4, *shape).double(), torch.tensor([0, 1, 1, 0])
    for n in range(4):
        data = [(x[n : n + 1], y[n : n + 1])]
        both = (estimate.kfra, estimate.kflr)
        found, exact = (method(Tangent(model), Categorical(), data, sharing=sharing).dense() for method in both)
        close(found, exact)
    parts = [(x[:1], y[:1]), (x[1:], y[1:])]
    whole, split = (estimate.kfra(Tangent(model), Categorical(), d, sharing=sharing).dense() for d in ([(x, y)], parts))
    close(split, whole)


# -- refusals -------------------------------------------------------------------------------------------------------


def refused(body: Any, match: str, x: Any = None, batches: Any = None, **members: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 3).double() if x is None else x
    model = Net(body, **members).double()
    batches = batches or [(x, torch.zeros(4, dtype=torch.long))]
    with unchanged(model), pytest.raises(UnsupportedOperationError, match=match):
        estimate.kfra(Tangent(model), Categorical(), batches)


def test_refuses_jacobians_that_differ_between_data_points() -> None:
    layers = {"a": nn.Linear(3, 4), "b": nn.Linear(4, 4)}
    refused(lambda m, x: m.a(x).gather(1, (x > 0).long()), "'gather'.*differs between data points", **layers)
    refused(lambda m, x: m.a(x).softmax(1), "'softmax'.*mixes entries", **layers)
    refused(lambda m, x: m.a(x).sort(1)[0], "'sort'.*differs", **layers)
    refused(lambda m, x: (m.a(x).unsqueeze(1) @ m.b(m.a(x)).unsqueeze(2)).flatten(1), "multiplies 2", **layers)
    refused(lambda m, x: (x.unsqueeze(2) @ m.a(x)[:, None]).flatten(1), "matmul.*differs between", **layers)
    refused(lambda m, x: torch.linalg.norm(m.a(x), dim=1, keepdim=True), "norm", **layers)


def test_refuses_a_weight_of_several_kinds() -> None:
    refused(lambda m, x: (x @ m.w) * m.w.sum(0), "'w' is used by operations of different kinds", w=parameter(3, 3))


def test_refuses_data_that_takes_another_way() -> None:
    def body(m, x):
        return m.b(m.a(x)) if float(x[0, 0]) > 0 else m.a(x)

    x, y = torch.tensor([[1.0, 0.0, 0.0], [-1.0, 0.0, 0.0]]).double(), torch.zeros(1, dtype=torch.long)
    batches = [(x[:1], y), (x[1:], y)]
    refused(body, "batch 1: .*another way", batches=batches, a=nn.Linear(3, 2), b=nn.Linear(2, 2))


def test_refuses_samples_that_depend_on_each_other() -> None:
    model = Net(lambda m, x: m.b(torch.tanh((h := m.a(x)) - h.mean(0))), a=nn.Linear(3, 4), b=nn.Linear(4, 2)).double()
    with pytest.raises(ModelError, match="depend"):
        estimate.kfra(Tangent(model), Categorical(), [(torch.randn(4, 3).double(), torch.zeros(4, dtype=torch.long))])


def test_refuses_a_matrix_beyond_the_budget() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)).double()
    batch = torch.randn(2, 1, 8, 8).double(), torch.zeros(2, dtype=torch.long)
    with pytest.raises(UnsupportedOperationError, match=r"144 x 144 entries.*'conv2d' at or after '0\.weight'.*kfac"):
        estimate.kfra(Tangent(model, budget=2**16), Categorical(), [batch])
    model = nn.Sequential(nn.Conv2d(1, 4, 1), nn.MaxPool2d(64), nn.Flatten(), nn.Linear(64, 2))
    batch = torch.randn(2, 1, 256, 256), torch.zeros(2, dtype=torch.long)
    with pytest.raises(UnsupportedOperationError, match=r"262144 x 262144 entries \(262144 MiB\)"):
        estimate.kfra(Tangent(model), Categorical(), [batch])


def test_refuses_an_empty_loader() -> None:
    with pytest.raises(DataError, match="no batch"):
        estimate.kfra(Tangent(nn.Linear(2, 2)), Categorical(), [])


@pytest.mark.parametrize("steps", [1, 2, 100])
@pytest.mark.parametrize("likelihood", [Gaussian(0.3), Categorical()], ids=lambda each: type(each).__name__)
def test_columns_sum_to_the_output_hessian_in_parts_that_fit(likelihood: Likelihood, steps: int) -> None:
    """The Fisher's columns: its sum is that of the Hessians, which these likelihoods have in common with it."""
    f = torch.randn(5, 4, 3).double()
    y = likelihood.sample(f)
    sizes: list[int] = []

    def watched(*args: Any) -> Columns:
        columns = estimate.fisher(*args)
        return Columns(columns.count, lambda part: (sizes.append(part.stop - part.start), columns.take(part))[1])

    budget = 4 * steps * 2 * f.numel() * f.element_size()
    found = output_sum(likelihood, f, y, watched, None, budget)
    expected = total(oracle.output_hessian(likelihood, f[n : n + 1], y[n : n + 1])[0] for n in range(5))
    close(found, expected)
    count = 12 if isinstance(likelihood, Gaussian) else 8  # two of three classes are free
    assert sum(sizes) == count
    assert max(sizes) == min(steps, count)
    sizes.clear()
    close(output_sum(likelihood, f, y, watched, None, 0), expected)
    assert sizes == [1] * count
