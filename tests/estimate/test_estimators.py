"""What every estimator owes: sums over data that any split leaves alone, draws that a seed repeats, known limits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import machine
import oracle
import problems
from estimator_checks import LAYOUTS, LIKELIHOODS, close, errors_of_means, parts, seeded, setting
from lapwing import estimate
from lapwing.errors import DataError, ParameterError
from lapwing.estimate.cotangents import empirical as observed
from lapwing.estimate.data_pass import pulled
from lapwing.estimate.exact_diagonal import RowSquares
from lapwing.likelihoods import Categorical, Gaussian
from lapwing.linalg import Curvature, MatrixLayout
from lapwing.params import ParamSpace
from lapwing.tangent import Linearisation, Tangent
from unchanged import unchanged

ESTIMATORS: dict[str, Callable[..., Curvature]] = {
    "full": estimate.full,
    "diagonal": estimate.diagonal,
    "blocks": estimate.blocks,
    "blocks by tensor": lambda *args, **options: estimate.blocks(*args, by="tensor", **options),
    "full, fisher": lambda *args, **options: estimate.full(*args, cotangents=estimate.fisher, **options),
    "kflr": estimate.kflr,
    "kflr, reduce": lambda *args, **options: estimate.kflr(*args, sharing="reduce", **options),
    "kflr, separate bias": lambda *args, **options: estimate.kflr(*args, joint_bias=False, **options),
    "kflr, small limit": lambda *args, **options: estimate.kflr(*args, dense_limit=2, **options),
    "ekfac": estimate.ekfac,
    "ekfac, reduce": lambda *args, **options: estimate.ekfac(*args, sharing="reduce", **options),
    "ekfac, separate bias": lambda *args, **options: estimate.ekfac(*args, joint_bias=False, **options),
    "empirical full": estimate.empirical,
    "empirical diagonal": lambda *args, **options: estimate.empirical(*args, structure="diagonal", **options),
    "empirical blocks": lambda *args, **options: estimate.empirical(*args, structure="blocks", **options),
    "empirical kron": lambda *args, **options: estimate.empirical(*args, structure="kron", **options),
    "empirical ekfac": lambda *args, **options: estimate.empirical(*args, structure="ekfac", **options),
    "hessian": estimate.hessian,
    "hessian diagonal": lambda *args, **options: estimate.hessian(*args, structure="diagonal", **options),
    "hessian blocks": lambda *args, **options: estimate.hessian(*args, structure="blocks", **options),
}
MONTE_CARLO: dict[str, Callable[..., Curvature]] = {
    "kfac": estimate.kfac,
    "kfac, three draws": lambda *args, **options: estimate.kfac(*args, samples=3, **options),
    "full": lambda *args, **options: estimate.full(*args, cotangents=estimate.monte_carlo(2), **options),
    "diagonal": lambda *args, **options: estimate.diagonal(*args, cotangents=estimate.monte_carlo(2), **options),
    "blocks": lambda *args, **options: estimate.blocks(*args, cotangents=estimate.monte_carlo(2), **options),
    "ekfac": lambda *args, **options: estimate.ekfac(*args, cotangents=estimate.monte_carlo(2), **options),
    "kflr, projections": lambda *args, **options: estimate.kflr(*args, cotangents=estimate.projections(3), **options),
    "full, gaussian projections": lambda *args, **options: estimate.full(
        *args, cotangents=estimate.projections(2, "gaussian"), **options
    ),
    "dual, projections": lambda *args, **options: estimate.dual(*args, cotangents=estimate.projections(2), **options),
}
SPLIT = [
    "mlp",
    "conv2d_grouped",
    "batch_norm1d",
    "sequence_categorical",
    "image_gaussian",
    "tied_embedding",
    "mha_time_first",
]


# -- sums -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "name"), problems.chequered(ESTIMATORS, SPLIT))
def test_any_split_of_the_data_gives_the_same_curvature(kind: str, name: str) -> None:
    problem = problems.build(name)
    if kind.startswith("hessian") and name not in ("mlp", "tied_embedding"):
        pytest.skip("P backward passes per batch, and the same sum for every architecture")
    estimator, x, y = ESTIMATORS[kind], problem.x, problem.y
    whole = estimator(Tangent(problem.model), problem.likelihood, [(x, y)])
    n = len(x)
    for sizes in ([1] * n, [1, n - 1], [2, n - 2]):
        split = estimator(Tangent(problem.model), problem.likelihood, parts(x, y, sizes))
        close(split.dense(), whole.dense(), rtol=1e-10)


@pytest.mark.parametrize("name", ["mlp", "conv2d_grouped", "tied_embedding"])
@pytest.mark.parametrize(
    "kind", [kind for kind in ESTIMATORS if "ekfac" not in kind]
)  # test_ekfac.py: not in two bases
def test_halves_are_pooled_and_scalars_multiply(kind: str, name: str) -> None:
    problem = problems.build(name)
    tangent, estimator = Tangent(problem.model), ESTIMATORS[kind]
    first, second = (
        estimator(tangent, problem.likelihood, [batch])
        for batch in parts(problem.x, problem.y, [2, len(problem.x) - 2])
    )
    whole = estimator(tangent, problem.likelihood, problem.batches)
    close(first.pooled(second).dense(), whole.dense(), rtol=1e-10)
    close(second.pooled(first).diagonal(), whole.diagonal(), rtol=1e-10)
    close((first + second).dense(), first.dense() + second.dense(), rtol=1e-10)
    close((whole * 2.5).dense(), 2.5 * whole.dense(), rtol=1e-12)
    close((0.5 * whole).diagonal(), 0.5 * whole.diagonal(), rtol=1e-12)
    v = torch.randn(whole.size, dtype=torch.float64)
    close(whole.mv(v), whole.dense() @ v)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["full", "diagonal", "kflr", "kflr, reduce"])
def test_a_loader_may_fill_one_tensor_again_and_again(kind: str, bias: bool) -> None:
    """Rows that wait for more are not read from a tensor that has changed since."""
    torch.set_default_dtype(torch.float64)
    model = nn.Sequential(nn.Linear(3, 4, bias=bias), nn.Tanh(), nn.Linear(4, 2, bias=bias))
    x, y = torch.randn(12, 3), torch.randn(12, 2)

    def refilled():
        inputs, targets = torch.empty(4, 3), torch.empty(4, 2)
        for batch in parts(x, y, [4, 4, 4]):
            inputs.copy_(batch[0])
            targets.copy_(batch[1])
            yield inputs, targets

    expected = ESTIMATORS[kind](Tangent(model), Gaussian(), [(x, y)])
    close(ESTIMATORS[kind](Tangent(model), Gaussian(), refilled()).dense(), expected.dense())


@pytest.mark.parametrize("kind", ["full", "diagonal", "blocks", "kflr"])
def test_more_rows_than_wait_at_once(kind: str) -> None:
    """Sums that are written in the middle of the pass, and once more at its end."""
    torch.set_default_dtype(torch.float64)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2, bias=False))
    x, y = torch.randn(2500, 2), torch.randn(2500, 2)
    expected = ESTIMATORS[kind](Tangent(model), Gaussian(), [(x, y)])
    close(ESTIMATORS[kind](Tangent(model), Gaussian(), parts(x, y, [700, 700, 1000, 100])).dense(), expected.dense())


@pytest.mark.parametrize("name", [*SPLIT, "raw_matmul", "raw_bmm", "mlp_without_bias"])
def test_squares_that_are_not_formed_go_into_a_running_sum(name: str) -> None:
    """kept * H + factor * (squares of two cotangents), for weights in factors, formed, and without data."""
    problem = problems.build(name)
    model = nn.ModuleDict({"used": problem.model, "idle": nn.Linear(2, 3).double()})
    tangent = Tangent(problems.Net(lambda m, x: problems.call(m.net["used"], x), net=model))
    here, space = tangent.at(problem.x), tangent.space
    u = torch.randn(2, *here.value.shape, dtype=torch.float64, generator=seeded(1))
    expected = _squares(here, u)
    found = RowSquares.none(space.size, here.value, tangent.budget)
    for each in u:
        found.add(here.pull(each.unsqueeze(0)))
    assert found.finite
    close(found.diagonal(), expected)
    running = torch.rand(space.size, dtype=torch.float64, generator=seeded(2))
    total = 0.9 * running + 3.0 * expected
    found.add_to(running, 0.9, 3.0)
    close(running, total)


def _squares(here: Linearisation, u: Tensor) -> Tensor:
    """sum_rn (u_rn^T J_n)^2 from J spelled out."""
    rows = torch.einsum("r n c, n c p -> r n p", u.flatten(2), here.rows())
    return rows.square().sum((0, 1))


def test_squares_are_finite_by_their_sum_and_not_by_the_bound() -> None:
    """Factors of which the largest never meet: the bound is beyond float32, and every entry is far below."""
    layout = MatrixLayout(0, (2, 2), (0, 1), groups=1, rows=2, cols=2)
    like = torch.zeros((), dtype=torch.float32)
    left, right = like.new_tensor([[[1e30, 0.0]], [[0.0, 1.0]]]), like.new_tensor([[[1.0, 2.0]], [[1e30, 0.0]]])
    assert RowSquares(4, 1, {layout: (left, right)}, {}, like).finite
    assert not RowSquares(4, 1, {layout: (left, right.flip(0))}, {}, like).finite
    assert not RowSquares(4, 1, {layout: (left, torch.full_like(right, float("nan")))}, {}, like).finite


def test_tokens_are_summed_within_a_data_point_and_squared_between_them() -> None:
    """f_n = sum_t E[x_nt] with unit noise: entry (v, k) of the diagonal is sum_n (occurrences of v in point n)^2."""
    table = nn.Embedding(3, 2).double()
    model, x = problems.Net(lambda m, x: m.table(x).sum(1), table=table), torch.tensor([[1, 1], [1, 2], [1, 0], [2, 2]])
    counts = torch.nn.functional.one_hot(x, 3).sum(1).double()
    found = estimate.diagonal(Tangent(model), Gaussian(), [(x, torch.zeros(4, 2).double())])
    close(found.diagonal(), counts.square().sum(0).repeat_interleave(2))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tokens", "pixels"])
def test_positions_without_a_target_count_in_no_fisher(layout: str) -> None:
    """Drawn or expected, the Fisher is that of the targets there are, as the GGN is."""
    torch.set_default_dtype(torch.float64)
    if layout == "tokens":
        model, x = nn.Linear(2, 3), torch.randn(3, 4, 2)
    else:
        model, x = nn.Conv2d(2, 3, 1), torch.randn(3, 2, 2, 2)
    y = torch.randint(3, (3, 4) if layout == "tokens" else (3, 2, 2))
    y[1:, 0] = -100
    likelihood = Categorical(ignore_index=-100)
    ggn = estimate.full(Tangent(model), likelihood, [(x, y)]).dense()
    close(estimate.full(Tangent(model), likelihood, [(x, y)], cotangents=estimate.fisher).dense(), ggn)
    nothing = torch.full_like(y, -100)
    for draws in (estimate.monte_carlo(2), estimate.fisher):
        assert not estimate.full(Tangent(model), likelihood, [(x, nothing)], cotangents=draws).dense().any()
    drawn = estimate.full(
        Tangent(model), likelihood, [(x, y)], cotangents=estimate.monte_carlo(4000), generator=seeded(0)
    )
    assert float((drawn.dense() - ggn).norm() / ggn.norm()) < 0.1


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_curvature_holds_no_graph_of_the_noise(kind: str) -> None:
    """Half a derivative would be worse than none; `curvature * (1 / sigma**2)` has it all."""
    torch.set_default_dtype(torch.float64)
    sigma = torch.tensor(1.5, requires_grad=True)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    found = ESTIMATORS[kind](Tangent(model), Gaussian(sigma), [(torch.randn(6, 3), torch.randn(6, 2))])
    assert not found.dense().requires_grad


@pytest.mark.parametrize("kind", ["full", "diagonal", "blocks", "kflr", "kflr, small limit"])
def test_heads_that_take_turns(kind: str) -> None:
    """The same operations on the same shapes, with other parameters from batch to batch: each has its own block."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])

        def forward(self, x: Tensor, head: Tensor) -> Tensor:
            return self.heads[int(head)](x)

    torch.set_default_dtype(torch.float64)
    model = Heads()
    batches = [((torch.randn(6, 3), torch.tensor(i % 2)), torch.randn(6, 2)) for i in range(4)]
    found = ESTIMATORS[kind](Tangent(model), Gaussian(), batches).dense()
    alone = [ESTIMATORS[kind](Tangent(model), Gaussian(), batches[i::2]).dense() for i in range(2)]
    close(found, alone[0] + alone[1])


def test_rows_of_a_sub_network_stay_within_the_budget() -> None:
    """They are formed at its entries: a cotangent takes the outputs of the layer, and a number for each entry."""
    model = nn.Linear(50, 40)
    space = ParamSpace.of(model).select(mask=torch.tensor([0, 7]))
    x, y = torch.randn(3, 50), torch.randn(3, 40)
    each = 3 * 4 * (3 * 40 + 3 * 2)
    chunks = pulled(Tangent(model, space, budget=12 * 15 * each // 2), Gaussian(), [(x, y)], estimate.exact, None)
    assert [chunk.pieces[0].shape[0] for chunk in chunks] == [14, 14, 12]  # at most 15, in parts of about one size


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_a_tiny_budget_changes_nothing(kind: str) -> None:
    for name in ("mlp", "sequence_categorical", "conv2d", "tied_embedding", "weight_norm", "lstm"):
        problem = problems.build(name)
        whole = ESTIMATORS[kind](Tangent(problem.model), problem.likelihood, problem.batches)
        for budget in (1, 2000):
            small = ESTIMATORS[kind](Tangent(problem.model, budget=budget), problem.likelihood, problem.batches)
            close(small.dense(), whole.dense(), rtol=1e-10)


@pytest.mark.parametrize("kind", MONTE_CARLO)
def test_a_tiny_budget_does_not_change_the_draws(kind: str) -> None:
    problem = problems.build("sequence_categorical")
    whole, small = (
        MONTE_CARLO[kind](
            Tangent(problem.model, budget=budget), problem.likelihood, problem.batches, generator=seeded(3)
        )
        for budget in (2**28, 1)
    )
    close(small.dense(), whole.dense(), rtol=1e-10)


def test_batches_may_be_any_iterable() -> None:
    problem = problems.build("mlp")
    expected = estimate.full(Tangent(problem.model), problem.likelihood, problem.batches).dense()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(problem.x, problem.y), batch_size=2)
    close(estimate.full(Tangent(problem.model), problem.likelihood, loader).dense(), expected)
    generator = (batch for batch in problem.batches)
    close(estimate.full(Tangent(problem.model), problem.likelihood, generator).dense(), expected)


# -- randomness -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MONTE_CARLO)
def test_a_seed_repeats_and_no_seed_differs(kind: str) -> None:
    problem = problems.build("mlp")
    args = Tangent(problem.model), problem.likelihood, problem.batches
    run = MONTE_CARLO[kind]
    assert torch.equal(run(*args, generator=seeded(1)).dense(), run(*args, generator=seeded(1)).dense())
    assert not torch.equal(run(*args, generator=seeded(1)).dense(), run(*args, generator=seeded(2)).dense())
    assert not torch.equal(run(*args).dense(), run(*args).dense())


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_exact_estimators_draw_nothing(kind: str) -> None:
    problem = problems.build("mlp")
    before = torch.random.get_rng_state()
    first = ESTIMATORS[kind](Tangent(problem.model), problem.likelihood, problem.batches).dense()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(ESTIMATORS[kind](Tangent(problem.model), problem.likelihood, problem.batches).dense(), first)


def test_a_generator_leaves_the_global_one_alone() -> None:
    problem = problems.build("mlp")
    before = torch.random.get_rng_state()
    estimate.kfac(Tangent(problem.model), problem.likelihood, problem.batches, samples=3, generator=seeded(0))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_every_data_point_and_batch_has_fresh_draws() -> None:
    """Forty copies of one point: the Monte-Carlo factor has the full rank of the Fisher, in one batch and in many."""
    model = nn.Linear(1, 3, bias=False).double()
    x, y = torch.ones(40, 1).double(), torch.zeros(40, dtype=torch.long)
    for batches in ([(x, y)], parts(x, y, [1] * 40), parts(x, y, [8] * 5)):
        full = estimate.full(
            Tangent(model), Categorical(), batches, cotangents=estimate.monte_carlo(1), generator=seeded(0)
        )
        assert int(torch.linalg.matrix_rank(full.dense(), rtol=1e-6)) == 2
        rows = estimate.kfac(Tangent(model), Categorical(), batches, generator=seeded(0)).dense()
        assert int(torch.linalg.matrix_rank(rows, rtol=1e-6)) == 2


def test_monte_carlo_fisher_is_unbiased_and_its_error_falls() -> None:
    problem = problems.build("mlp_without_bias")
    exact = oracle.ggn(problem.model, problem.likelihood, problem.x, problem.y, "fisher")
    tangent = Tangent(problem.model)

    def draws(count: int, generator: torch.Generator) -> Tensor:
        return estimate.full(
            tangent,
            problem.likelihood,
            problem.batches,
            cotangents=estimate.monte_carlo(count),
            generator=generator,
        ).dense()

    errors_of_means(draws, exact, (4, 64))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp_gaussian", "conv1d_grouped", "sequence_categorical"])
def test_kfac_is_unbiased_for_kflr_and_its_error_falls(name: str) -> None:
    problem = problems.build(name)
    tangent = Tangent(problem.model)
    exact = estimate.kflr(tangent, problem.likelihood, problem.batches).dense()

    def draws(count: int, generator: torch.Generator) -> Tensor:
        return estimate.kfac(tangent, problem.likelihood, problem.batches, samples=count, generator=generator).dense()

    errors_of_means(draws, exact, (4, 36))


def test_no_draws_is_refused() -> None:
    with pytest.raises(DataError, match="at least 1"):
        estimate.monte_carlo(0)


# -- likelihoods and outputs ----------------------------------------------------------------------------------------


EXPONENTIAL = ["Gaussian", "Categorical", "Bernoulli", "Poisson"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_every_likelihood_and_layout(kind: str, layout: str) -> None:
    model, likelihood, x, y = setting(kind, layout)
    tangent, data = Tangent(model), [(x, y)]
    ggn = oracle.ggn(model, likelihood, x, y)
    with unchanged(model):
        close(estimate.full(tangent, likelihood, data).dense(), ggn)
        close(estimate.diagonal(tangent, likelihood, data).diagonal(), ggn.diagonal())
        close(estimate.empirical(tangent, likelihood, data).dense(), oracle.empirical(model, likelihood, x, y))
        close(estimate.hessian(tangent, likelihood, data).dense(), oracle.hessian(model, likelihood, x, y))
        estimate.kflr(tangent, likelihood, data)


@pytest.mark.parametrize("kind", [name for name in LIKELIHOODS if name != "from_function"])
def test_the_fisher_in_every_likelihood(kind: str) -> None:
    model, likelihood, x, y = setting(kind, "[B, T, C]")
    fisher = estimate.full(Tangent(model), likelihood, [(x, y)], cotangents=estimate.fisher).dense()
    close(fisher, oracle.ggn(model, likelihood, x, y, "fisher"))
    ggn = estimate.full(Tangent(model), likelihood, [(x, y)]).dense()
    if kind in EXPONENTIAL:
        close(ggn, fisher)
    if kind == "BernoulliMixture":
        assert not torch.allclose(ggn, fisher, rtol=0.05)


# -- the Hessian ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["mlp", "mlp_gaussian", "conv1d_grouped", "embedding", "linear_twice", "tied_autoencoder", "gru_cell",
             "bitfit", "custom_function", "unused_parameters", "sequence_categorical", "raw_scale_shift",
             "attention_fused"]
)  # fmt: skip
def test_hessian_in_every_structure(name: str) -> None:
    problem = problems.build(name)
    expected = oracle.hessian(problem.model, problem.likelihood, problem.x, problem.y)
    tangent, data = Tangent(problem.model), problem.batches
    groups = tangent.space.groups("layer")
    with unchanged(problem.model):
        close(estimate.hessian(tangent, problem.likelihood, data).dense(), expected)
        diagonal = estimate.hessian(tangent, problem.likelihood, data, structure="diagonal")
        close(diagonal.diagonal(), expected.diagonal())
        blocks = estimate.hessian(tangent, problem.likelihood, data, structure="blocks")
        close(blocks.dense(), expected * (groups[:, None] == groups[None, :]))


@pytest.mark.parametrize("name", ["selected_by_name", "selected_by_module", "selected_by_mask"])
def test_hessian_of_a_selection(name: str) -> None:
    problem = problems.build(name)
    whole = oracle.hessian(problem.model, problem.likelihood, problem.x, problem.y)
    where = torch.arange(len(whole))
    space = problem.space
    named = Tangent(problem.model).space
    kept = space.restrict(torch.cat([where[named.segment(n)] for n in space.names]))
    found = estimate.hessian(Tangent(problem.model, space), problem.likelihood, problem.batches)
    close(found.dense(), whole[kept][:, kept])


def test_hessian_is_the_ggn_for_a_linear_model() -> None:
    model = nn.Linear(3, 2).double()
    x, y = torch.randn(5, 3).double(), torch.tensor([0, 1, 1, 0, 1])
    hessian = estimate.hessian(Tangent(model), Categorical(), [(x, y)]).dense()
    close(hessian, estimate.full(Tangent(model), Categorical(), [(x, y)]).dense())


def test_hessian_when_gradients_are_off() -> None:
    problem = problems.build("mlp_gaussian")
    expected = oracle.hessian(problem.model, problem.likelihood, problem.x, problem.y)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = estimate.hessian(Tangent(problem.model), problem.likelihood, problem.batches).dense()
        close(found.clone(), expected)


# -- precision ------------------------------------------------------------------------------------------------------


def in_bfloat16(name: str) -> None:
    problem = problems.build(name)
    tangent, x = Tangent(problem.model.to(torch.bfloat16)), problem.x.to(torch.bfloat16)
    for estimator in (estimate.full, estimate.diagonal, estimate.kflr):
        estimator(tangent, problem.likelihood, [(x, problem.y)])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float16, 2e-2), (torch.bfloat16, 1e-1)])
@pytest.mark.parametrize(
    "name", ["mlp", "conv2d", "layer_norm", "embedding", "transformer_encoder", "linear_twice", "tied_embedding"]
)
def test_low_precision_models_accumulate_in_float32(name: str, dtype: torch.dtype, tolerance: float) -> None:
    """The float64 answer of the same rounded weights, to the rounding of the model's own arithmetic."""
    if dtype == torch.bfloat16 and name == "conv2d":
        machine.need("estimate/test_estimators.py", "in_bfloat16", name)
    problem = problems.build(name)
    model, x = problem.model.to(dtype), problem.x
    x = x.to(dtype) if x.is_floating_point() else x
    tangent = Tangent(model)
    found = {
        "full": estimate.full(tangent, problem.likelihood, [(x, problem.y)]),
        "diagonal": estimate.diagonal(tangent, problem.likelihood, [(x, problem.y)]),
        "kflr": estimate.kflr(tangent, problem.likelihood, [(x, problem.y)]),
    }
    exact_model = model.double()
    exact_x = x.double() if x.is_floating_point() else x
    for kind, curvature in found.items():
        dense = curvature.dense()
        assert dense.dtype == torch.float32
        exact = ESTIMATORS[kind](Tangent(exact_model), problem.likelihood, [(exact_x, problem.y)]).dense()
        assert float((dense.double() - exact).norm()) < tolerance * float(exact.norm()), kind


def test_sums_of_many_half_precision_batches_do_not_stall() -> None:
    """2048 points and then one at a time: a float16 sum would stop growing at 2048."""
    model = nn.Linear(1, 1, bias=False).half()
    x, y = torch.ones(2048, 1).half(), torch.zeros(2048, 1)
    found = estimate.diagonal(Tangent(model), Gaussian(), [(x, y), *[(x[:1], y[:1])] * 16]).diagonal()
    torch.testing.assert_close(found, torch.tensor([2064.0]))


# -- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_an_empty_loader_is_refused(kind: str) -> None:
    problem = problems.build("mlp")
    with pytest.raises(DataError, match="no batch"):
        ESTIMATORS[kind](Tangent(problem.model), problem.likelihood, [])


def test_unknown_structures_are_refused() -> None:
    problem = problems.build("mlp")
    args = Tangent(problem.model), problem.likelihood, problem.batches
    for estimator in (estimate.empirical, estimate.hessian):
        with pytest.raises(ParameterError, match="unknown structure"):
            estimator(*args, structure="tridiagonal")
    with pytest.raises(ParameterError, match="unknown grouping"):
        estimate.blocks(*args, by="channel")


def test_empirical_columns_are_the_observed_gradients() -> None:
    problem = problems.build("mlp")
    f = problem.model(problem.x).detach()
    columns = observed(problem.likelihood, f, problem.y)
    (only,) = columns.chunked(7)
    close(only[0], problem.likelihood.grad(f, problem.y))
