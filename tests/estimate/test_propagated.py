"""The propagated diagonal: against a walk with dense Jacobians, exact where it must be, and how far off elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.functional import jacobian

import machine
import oracle
import problems
from lapwing.errors import DataError, ModelError, UnsupportedOperationError
from lapwing.estimate import diagonal, exact, fisher, monte_carlo, projections, propagated_diagonal
from lapwing.estimate.propagated.diagonal import variances
from lapwing.likelihoods import Categorical, Gaussian
from lapwing.params import ParamSpace
from lapwing.tangent import Tangent
from unchanged import unchanged

RTOL = 1e-9
REFUSED = {
    "lstm_packed": "'lstm' has no rule",
    "custom_function": "cannot be seen",
    "custom_function_first": "cannot be seen",
}


def propagated(problem: problems.Problem, **options) -> Tensor:
    tangent = Tangent(problem.model, problem.space)
    return propagated_diagonal(tangent, problem.likelihood, problem.batches, **options).diagonal()


# -- a walk with dense Jacobians ------------------------------------------------------------------------------------


def leaves(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if not list(module.children())]


def layer_by_layer(model: nn.Module, likelihood, x: Tensor, y: Tensor) -> Tensor:
    """One data point and one layer at a time; of every propagated matrix only the diagonal is kept."""
    named = {id(p): name for name, p in model.named_parameters()}
    found = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for n in range(len(x)):
        steps, h = [], x[n : n + 1]
        for layer in leaves(model):
            steps.append((layer, h))
            h = layer(h).detach()
        m = oracle.output_hessian(likelihood, h, y[n : n + 1])[0].diagonal()
        for layer, read in reversed(steps):
            own = dict(layer.named_parameters())

            def run(read: Tensor, *values: Tensor, layer=layer, own=own) -> Tensor:
                given = dict(zip(own, values, strict=True))
                return torch.func.functional_call(layer, given, (read,)).flatten()

            values = tuple(own.values())
            in_parameters = jacobian(lambda *values, run=run, read=read: run(read, *values), values) if values else ()
            for parameter, j in zip(values, in_parameters, strict=True):
                found[named[id(parameter)]] += (j.flatten(1).square().mT @ m).reshape(parameter.shape)
            if read.is_floating_point():
                j = jacobian(lambda read, run=run, values=values: run(read, *values), read)
                assert isinstance(j, Tensor)
                m = j.flatten(1).square().mT @ m
    return torch.cat([value.flatten() for value in found.values()])


CHAINS = (
    "mlp", "mlp_gaussian", "mlp_without_bias", "mlp_dropout", "conv2d", "conv2d_strided", "conv2d_same",
    "conv2d_valid", "conv2d_grouped", "conv2d_depthwise", "conv1d", "conv3d", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose2d_grouped", "conv_transpose3d", "batch_norm1d", "batch_norm2d", "layer_norm",
    "layer_norm_of_matrices", "group_norm", "instance_norm", "rms_norm", "embedding_single", "prelu_shared",
    "prelu_per_channel", "sequence_categorical", "sequence_gaussian", "image_categorical", "image_gaussian",
)  # fmt: skip


@pytest.mark.parametrize("name", CHAINS)
def test_chains_of_layers_agree_with_dense_jacobians(name):
    problem = problems.build(name)
    assert isinstance(problem.model, nn.Sequential)
    expected = layer_by_layer(problem.model, problem.likelihood, problem.x, problem.y)
    torch.testing.assert_close(propagated(problem), expected, rtol=RTOL, atol=1e-12)


def test_a_residual_block_agrees_with_dense_jacobians(generator):
    """y = out(h + b(tanh(a(h)))), h = first(x): both branches bring their variances to h."""
    first, a, b, out = (nn.Linear(i, o).double() for i, o in ((2, 3), (3, 4), (4, 3), (3, 2)))

    def body(m, x):
        h = m.first(x)
        return m.out(h + m.b(torch.tanh(m.a(h))))

    model = problems.Net(body, first=first, a=a, b=b, out=out)
    x, y = (torch.randn(5, 2, dtype=torch.float64, generator=generator) for _ in range(2))
    expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for n in range(5):
        h = first(x[n])
        z = a(h)
        t = torch.tanh(z)
        m_out = torch.full((2,), 1 / 0.7**2, dtype=torch.float64)
        expected["out.weight"] += torch.outer(m_out, (h + b(t)).square())
        expected["out.bias"] += m_out
        m_sum = out.weight.square().mT @ m_out
        expected["b.weight"] += torch.outer(m_sum, t.square())
        expected["b.bias"] += m_sum
        m_z = (b.weight.square().mT @ m_sum) * (1 - t.square()).square()
        expected["a.weight"] += torch.outer(m_z, h.square())
        expected["a.bias"] += m_z
        m_h = m_sum + a.weight.square().mT @ m_z
        expected["first.weight"] += torch.outer(m_h, x[n].square())
        expected["first.bias"] += m_h
    found = propagated_diagonal(Tangent(model), Gaussian(0.7), [(x, y)]).diagonal()
    torch.testing.assert_close(found, torch.cat([e.detach().flatten() for e in expected.values()]), rtol=RTOL, atol=0)


# -- where it is exact ----------------------------------------------------------------------------------------------


class Diagonal(nn.Module):
    """A linear layer with a diagonal weight."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.bias = nn.Parameter(torch.randn(size))

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, torch.diag(self.weight), self.bias)


def _pointwise() -> nn.Module:
    """Depthwise 1x1 convolutions: every pixel of every channel goes its own way."""
    return nn.Sequential(nn.Conv2d(2, 2, 1, groups=2), nn.Tanh(), nn.Conv2d(2, 2, 1, groups=2), nn.Softplus())


EXACT = {
    "a last layer alone": (lambda: nn.Linear(3, 4), (5, 3)),
    "one hidden layer, square loss": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), (5, 3)),
    "a chain of single units": (
        lambda: nn.Sequential(
            nn.Linear(3, 1), nn.Tanh(), nn.Linear(1, 1), nn.Softplus(), nn.Linear(1, 1), nn.SiLU(), nn.Linear(1, 4)
        ),
        (5, 3),
    ),
    "diagonal weights": (lambda: nn.Sequential(Diagonal(3), nn.Tanh(), Diagonal(3), nn.GELU(), Diagonal(3)), (5, 3)),
    "scales and shifts": (
        lambda: problems.Net(
            lambda m, x: torch.tanh(x * m.a + m.b) * m.c.exp(), a=problems.parameter(3), b=problems.parameter(3),
            c=problems.parameter(3),
        ),
        (5, 3),
    ),
    "pixels that go their own way": (_pointwise, (3, 2, 1, 1)),
    "a selection on the way": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Unflatten(1, (2, 2)), nn.MaxPool1d(2), nn.Flatten()),
        (5, 3),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_exact_where_off_diagonals_vanish(name, generator):
    """C10: no unit shares what lies above it with another, and the outputs' Hessian is diagonal."""
    torch.set_default_dtype(torch.float64)
    build, shape = EXACT[name]
    model = build()
    x = torch.randn(shape, generator=generator)
    batches = [(x, torch.randn(model(x).shape, generator=generator))]
    tangent, likelihood = Tangent(model), Gaussian(0.7)
    expected = diagonal(tangent, likelihood, batches).diagonal()
    torch.testing.assert_close(
        propagated_diagonal(tangent, likelihood, batches).diagonal(), expected, rtol=RTOL, atol=0
    )


def test_the_last_layer_of_a_deep_classifier_is_exact(generator):
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x = torch.randn(6, 3, dtype=torch.float64, generator=generator)
    batches = [(x, torch.randint(3, (6,), generator=generator))]
    tangent = Tangent(model)
    found, expected = (f(tangent, Categorical(), batches).diagonal() for f in (propagated_diagonal, diagonal))
    torch.testing.assert_close(found[-15:], expected[-15:], rtol=RTOL, atol=0)
    assert not torch.allclose(found[:-15], expected[:-15], rtol=1e-3)


# -- how far off it is elsewhere ------------------------------------------------------------------------------------

ERRORS: dict[str, float] = {
    "mlp": 0.1324, "mlp_gaussian": 0, "mlp_without_bias": 0.3304, "mlp_dropout": 0.09527, "conv2d": 0.2358,
    "conv2d_strided": 0.1427, "conv2d_circular": 0.3998, "conv2d_reflect": 0.3899, "conv2d_same": 0.1362,
    "conv2d_valid": 0.09283, "residual": 0.01798, "conv2d_grouped": 0.2327, "conv2d_depthwise": 0.2252,
    "conv1d": 0.1887, "conv1d_grouped": 0.1143, "conv3d": 0.2511, "conv_transpose1d": 0.1666,
    "conv_transpose2d": 0.2784, "conv_transpose2d_grouped": 0.1885, "conv_transpose3d": 0.1677,
    "batch_norm1d": 0.09063, "batch_norm2d": 0.6029, "layer_norm": 0.1203, "layer_norm_of_matrices": 0.3548,
    "group_norm": 1.24, "instance_norm": 0.6235, "instance_norm_tracking": 0.4808, "rms_norm": 0.9115,
    "embedding": 0.008406, "embedding_padding": 0.04257, "embedding_single": 0.004649,
    "positional_embedding": 0.1292, "raw_matmul": 0.3763, "raw_matmul_left": 0, "raw_matmul_transposed_data": 0.8327,
    "raw_vector": 0.2415, "raw_scale_shift": 0.3216, "raw_elementwise_zoo": 0, "raw_addmm": 0.5658, "raw_bmm": 0,
    "raw_einsum": 1.006, "raw_einsum_summed": 0, "raw_table": 0.08503, "raw_table_sliced": 0.1658,
    "bilinear": 0.0609, "class_token": 0.04596, "prelu_shared": 0.116, "prelu_per_channel": 0.07317,
    "attention_linears": 0.06865, "attention_fused": 0.4519, "mha_self": 0.6616, "mha_time_first": 0.6296,
    "mha_cross": 0.5724, "mha_kdim_vdim": 0.57, "mha_bias_kv": 0.1943, "transformer_encoder": 0.6057,
    "transformer_encoder_norm_first": 0.3285, "transformer_encoder_masked": 0.229, "transformer_decoder": 0.4316,
    "linear_twice": 0.04471, "recurrence_from_linears": 0.2272, "functional_linear": 0.05702, "shared_bias": 0.1219,
    "tied_embedding": 0.3492, "tied_embedding_sequence": 0.326, "tied_autoencoder": 0.1061, "weight_norm": 0.1636,
    "weight_norm_conv": 0.1092, "spectral_norm": 0.1603, "low_rank_update": 0.02484, "in_place_relu": 0.1844,
    "in_place_bias": 0.0932, "folded_time": 0.03967, "folded_time_first": 0.0407, "folded_between": 0.05719,
    "time_first": 0.009349, "samples_last": 0.3942, "siamese": 0.04822, "one_by_one": 0.1931,
    "micro_batches": 0.1756, "packed_tokens": 0.02017, "tuple_input": 0.2817, "dict_input": 0.04829,
    "encoding_input": 0.04829, "mapping_argument": 0.04782, "sequence_categorical": 0.06751, "sequence_gaussian": 0,
    "image_categorical": 0.1888, "image_gaussian": 0.01768, "frozen_layers": 0.08802, "bitfit": 0.1523,
    "frozen_bias": 0.1172, "selected_by_name": 0.1234, "selected_by_module": 0.4883, "selected_by_mask": 0.07362,
    "unused_parameters": 0.1988, "lstm": 0.004745, "gru": 0.3324, "gru_cell": 0.8608, "rnn_relu": 0.008057,
    "lstm_projected": 0.002091, "gru_learned_start": 0.5262,
}  # fmt: skip
"""|propagated - exact| / |exact|, measured. Untrained, and of a few units: off-diagonals are at their largest."""


@pytest.mark.parametrize("name", problems.NAMES)
def test_error_to_the_exact_diagonal(name):
    problem = problems.build(name)
    if name in REFUSED:
        with unchanged(problem.model), pytest.raises(UnsupportedOperationError, match=REFUSED[name]):
            propagated(problem)
        return
    with unchanged(problem.model):
        found = propagated(problem)
    expected = diagonal(Tangent(problem.model, problem.space), problem.likelihood, problem.batches).diagonal()
    error = float((found - expected).norm() / expected.norm())
    assert error == pytest.approx(ERRORS[name], rel=0.01, abs=1e-9)
    assert found.shape == (problem.space.size,)
    assert bool((found >= 0).all())


# -- the pass over the data -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["mlp", "conv2d", "group_norm", "transformer_encoder", "tied_embedding", "spectral_norm"]
)
def test_any_split_into_batches_gives_the_same(name):
    problem = problems.build(name)
    tangent = Tangent(problem.model, problem.space)
    single = [(oracle.one(problem.x, n), problem.y[n : n + 1]) for n in range(len(problem.y))]
    found = propagated_diagonal(tangent, problem.likelihood, single).diagonal()
    torch.testing.assert_close(found, propagated(problem), rtol=RTOL, atol=1e-12)


@pytest.mark.parametrize("kind", ["mask", "names"])
def test_a_sub_network_is_part_of_the_whole(kind):
    problem = problems.build("mlp")
    space = ParamSpace.of(problem.model)
    mask = torch.tensor([0, 5, 17, 40])
    part = space.select(mask=mask) if kind == "mask" else space.select(names=["2.bias", "0.weight"])
    found = propagated_diagonal(Tangent(problem.model, part), problem.likelihood, problem.batches).diagonal()
    numbered = {
        name: torch.arange(start, start + space.shape(name).numel()) for name, start in space.whole.starts.items()
    }
    index = mask if kind == "mask" else torch.cat([numbered[name] for name in part.names])
    torch.testing.assert_close(found, propagated(problem)[index], rtol=RTOL, atol=0)


def in_bfloat16(name):
    return propagated(problems.build(name, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["mlp", "conv2d", "layer_norm", "attention_linears", "embedding", "conv_transpose2d"])
def test_lower_precisions_run(name, dtype):
    if dtype == torch.bfloat16 and name.startswith("conv"):
        machine.need("estimate/test_propagated.py", "in_bfloat16", name)
    problem = problems.build(name, dtype=dtype)
    reference = problems.build(name)
    with torch.no_grad():
        for p, q in zip(reference.model.parameters(), problem.model.parameters(), strict=True):
            p.copy_(q)
    x = problem.x.double() if problem.x.is_floating_point() else problem.x
    expected = propagated_diagonal(Tangent(reference.model), problem.likelihood, [(x, problem.y)]).diagonal()
    found = propagated(problem)
    assert found.dtype == problem.space.dtype
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    assert float((found.double() - expected).norm() / expected.norm()) < tolerance


@pytest.mark.parametrize(
    "name", ["mlp", "raw_elementwise_zoo", "conv2d_same", "group_norm", "weight_norm", "mha_self", "raw_einsum_summed"]
)
def test_inputs_from_inference_mode(name):
    problem = problems.build(name)
    expected = propagated(problem)
    with torch.inference_mode():
        x = problem.x.clone()
        found = propagated_diagonal(Tangent(problem.model), problem.likelihood, [(x, problem.y)]).diagonal()
    torch.testing.assert_close(found.clone(), expected)


def test_fisher_and_exact_agree_for_an_exponential_family():
    problem = problems.build("conv2d")
    torch.testing.assert_close(propagated(problem, cotangents=fisher), propagated(problem), rtol=RTOL, atol=0)


@pytest.mark.parametrize("budget", [1, 2**20], ids=["one column at a time", "all columns"])
def test_columns_are_squared_before_they_are_summed(budget):
    """Five classes have four columns, which sum to the variance p (1 - p) of each class."""
    f = torch.randn(7, 5, dtype=torch.float64)
    found = variances(Categorical(), f, torch.zeros(7, dtype=torch.int64), fisher, None, budget)
    p = f.softmax(1)
    torch.testing.assert_close(found, p * (1 - p), rtol=RTOL, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [monte_carlo, projections])
def test_random_cotangents_are_unbiased(kind):
    """Variances are linear in those of the outputs, so draws average to the exact ones: within four standard errors."""
    problem = problems.build("mlp")
    draws = torch.stack(
        [propagated(problem, cotangents=kind(2), generator=torch.Generator().manual_seed(seed)) for seed in range(200)]
    )
    expected = propagated(problem, cotangents=exact)
    error = draws.std(0) / len(draws) ** 0.5
    assert bool(((draws.mean(0) - expected).abs() <= 4 * error + 1e-12).all())


def test_the_same_seed_gives_the_same():
    problem = problems.build("mlp")
    first, again, other = (
        propagated(problem, cotangents=monte_carlo(1), generator=torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    )
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("count", [4, 9])
def test_samples_that_are_coupled_are_refused(count):
    model = problems.Net(lambda m, x: m.b(m.a(x) - m.a(x).mean(0)), a=nn.Linear(3, 4), b=nn.Linear(4, 2)).double()
    x = torch.randn(count, 3, dtype=torch.float64)
    with unchanged(model), pytest.raises(ModelError, match="batch 0"):
        propagated_diagonal(Tangent(model), Gaussian(), [(x, torch.zeros(count, 2, dtype=torch.float64))])


def test_a_model_for_one_batch_size_is_no_coupled_one():
    model = problems.Net(lambda m, x: m.a(x.view(9, 3)), a=nn.Linear(3, 2)).double()
    x = torch.randn(9, 3, dtype=torch.float64)
    batches = [(x, torch.zeros(9, 2, dtype=torch.float64))]
    found, expected = (f(Tangent(model), Gaussian(), batches).diagonal() for f in (propagated_diagonal, diagonal))
    torch.testing.assert_close(found, expected, rtol=RTOL, atol=0)


def test_a_tangent_for_gradients_in_the_inputs_gives_the_same():
    problem = problems.build("mlp")
    tangent = Tangent(problem.model, differentiable=True)
    found = propagated_diagonal(tangent, problem.likelihood, [(problem.x.clone().requires_grad_(), problem.y)])
    torch.testing.assert_close(found.diagonal(), propagated(problem), rtol=RTOL, atol=0)


def test_an_image_network_with_writes_in_place():
    """Residual sums and activations in place, as in image networks, against the same without."""

    def body(m, x, quiet):
        h = m.norm(m.first(x))
        h = h.relu_() if quiet else h.relu()
        g = m.second(h)
        if quiet:
            g += h
        else:
            g = g + h
        return m.last(nn.functional.relu(g, inplace=quiet).mean((2, 3)))

    members = {
        "first": nn.Conv2d(1, 3, 3, padding=1, bias=False), "norm": nn.BatchNorm2d(3), "second": nn.Conv2d(3, 3, 1),
        "last": nn.Linear(3, 2),
    }  # fmt: skip
    x = torch.randn(4, 1, 5, 5, dtype=torch.float64)
    found, expected = (
        propagated_diagonal(
            Tangent(problems.Net(lambda m, x, quiet=quiet: body(m, x, quiet), **members).double().eval()),
            Gaussian(), [(x, torch.zeros(4, 2, dtype=torch.float64))],
        ).diagonal()
        for quiet in (True, False)
    )  # fmt: skip
    torch.testing.assert_close(found, expected, rtol=RTOL, atol=0)


def test_an_empty_loader_and_a_bad_batch_are_named():
    problem = problems.build("mlp")
    tangent = Tangent(problem.model)
    with pytest.raises(DataError, match="yields no batch"):
        propagated_diagonal(tangent, problem.likelihood, [])
    bad = problem.x.clone()
    bad[0, 0] = float("nan")
    with unchanged(problem.model), pytest.raises(DataError, match="batch 1"):
        propagated_diagonal(tangent, problem.likelihood, [*problem.batches, (bad, problem.y)])
