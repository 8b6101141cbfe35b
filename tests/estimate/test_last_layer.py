"""Closed forms of the last layer are the general estimators', for every head, likelihood, choice of cotangents."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import problems
from lapwing import estimate
from lapwing.errors import DataError, LikelihoodError, ParameterError
from lapwing.estimate import last_layer
from lapwing.estimate.cotangents import empirical as observed
from lapwing.estimate.data_pass import Watched
from lapwing.likelihoods import (
    Bernoulli,
    BernoulliMixture,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
    from_function,
)
from lapwing.linalg import Blocks, Curvature, Dense, Kronecker, OuterRows
from lapwing.tangent import FeatureTangent, Tangent
from problems import Net
from unchanged import unchanged

PAIRS: dict[str, tuple[Callable[..., Curvature], Callable[..., Curvature], dict[str, Any]]] = {
    "full": (last_layer.full, estimate.full, {}),
    "diagonal": (last_layer.diagonal, estimate.diagonal, {}),
    "kron": (last_layer.kron, estimate.kflr, {}),
    "kron, reduce": (last_layer.kron, estimate.kflr, {"sharing": "reduce"}),
    "kron, separate bias": (last_layer.kron, estimate.kflr, {"joint_bias": False}),
    "kron, factored damping": (last_layer.kron, estimate.kflr, {"factored_damping": True}),
    "blocks": (last_layer.blocks, estimate.blocks, {}),
    "blocks by tensor": (last_layer.blocks, estimate.blocks, {"by": "tensor"}),
}
COTANGENTS = {
    "exact": estimate.exact,
    "fisher": estimate.fisher,
    "monte_carlo": estimate.monte_carlo(3),
    "empirical": observed,
}
HEADS = [
    "mlp",
    "mlp_gaussian",
    "mlp_without_bias",
    "conv2d",
    "transformer_encoder",
    "dict_input",
    "encoding_input",
    "tuple_input",
    "sequence_categorical",
    "sequence_gaussian",
    "weight_norm",
]


def close(found: Tensor, expected: Tensor, rtol: float = 1e-9) -> None:
    scale = float(expected.abs().max() + 1e-30)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol * 1e-3 * scale)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def same_curvature(
    kind: str, model: nn.Module, likelihood: Likelihood, data: list, reduction: str | None = None, **options: Any
) -> tuple[Curvature, Curvature, FeatureTangent]:
    ours, general, own = PAIRS[kind]
    tangent = FeatureTangent(model, reduction=reduction)
    with unchanged(model):
        found = ours(tangent, likelihood, data, generator=seeded(), **own, **options)
    expected = general(Tangent(model, tangent.space), likelihood, data, generator=seeded(), **own, **options)
    assert type(found) is type(expected)
    close(found.dense(), expected.dense())
    close(found.diagonal(), expected.diagonal())
    return found, expected, tangent


def predictions_agree(found: Curvature, expected: Curvature, tangent: FeatureTangent, x: Any) -> None:
    """Covariance, log-determinant and draws of the posterior, each with its own map."""
    general = Tangent(tangent.model, tangent.space).at(x)
    for prior in (0.7, torch.full((tangent.space.size,), 0.7, dtype=torch.float64)):
        ours, theirs = found.with_prior(prior), expected.with_prior(prior)
        close(ours.covariance(tangent.at(x)), theirs.covariance(general))
        close(ours.logdet(), theirs.logdet())
        v = randn(tangent.space.size)
        close(ours.solve(v), theirs.solve(v))


# -- the general estimators -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "name"), problems.chequered(PAIRS, HEADS))
def test_closed_forms_are_the_general_estimators(kind: str, name: str) -> None:
    problem = problems.build(name)
    found, expected, tangent = same_curvature(kind, problem.model, problem.likelihood, problem.batches)
    predictions_agree(found, expected, tangent, problem.x)


@pytest.mark.parametrize("choice", COTANGENTS)
@pytest.mark.parametrize("name", ["mlp", "sequence_categorical"])
@pytest.mark.parametrize("kind", PAIRS)
def test_any_choice_of_cotangents_with_the_same_draws(kind: str, name: str, choice: str) -> None:
    problem = problems.build(name)
    same_curvature(kind, problem.model, problem.likelihood, problem.batches, cotangents=COTANGENTS[choice])


def robust(f: Tensor, y: Tensor) -> Tensor:
    return (1 + (f - y).square()).log().sum()


FAMILIES: dict[str, tuple[Likelihood, int, Callable[[], Tensor]]] = {
    "gaussian": (Gaussian(0.7), 2, lambda: randn(5, 2)),
    "categorical": (Categorical(), 3, lambda: torch.randint(3, (5,))),
    "categorical, ignored": (Categorical(ignore_index=-100), 3, lambda: torch.tensor([0, -100, 2, 1, -100])),
    "bernoulli": (Bernoulli(), 3, lambda: torch.randint(2, (5, 3)).double()),
    "poisson": (Poisson(), 2, lambda: torch.randint(4, (5, 2)).double()),
    "heteroscedastic": (HeteroscedasticGaussian(), 4, lambda: randn(5, 2)),
    "bernoulli mixture": (BernoulliMixture(), 3, lambda: torch.randint(2, (5,)).double()),
    "from a function": (from_function(robust), 2, lambda: 3 * randn(5, 2)),
}


@pytest.mark.parametrize(("kind", "family"), problems.chequered(PAIRS, FAMILIES))
def test_every_family_of_likelihoods(kind: str, family: str) -> None:
    likelihood, outputs, targets = FAMILIES[family]
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double()
    data = [(randn(5, 3), targets())]
    same_curvature(kind, model, likelihood, data)
    if family != "from a function":
        same_curvature(kind, model, likelihood, data, cotangents=estimate.fisher)


@pytest.mark.parametrize("kind", PAIRS)
def test_positions_without_a_target_and_classes_on_another_axis(kind: str) -> None:
    body = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    y = torch.tensor([[0, 1], [2, -100], [-100, -100], [1, 1]])
    for choice in COTANGENTS.values():
        same_curvature(kind, body, Categorical(ignore_index=-100), [(randn(4, 2, 2), y)], cotangents=choice)
    # outputs [B, C = 2, L = 3] of a layer whose own classes come last: columns, as positions are not the layer's
    same_curvature(kind, body, Categorical(class_axis=1), [(randn(4, 2, 2), torch.randint(2, (4, 3)))])
    same_curvature(kind, body, from_function(robust), [(randn(4, 2, 2), randn(4, 2, 3))])
    # as many classes as the layer has outputs, and yet on the other axis
    same_curvature(kind, body, Categorical(class_axis=1), [(randn(4, 3, 2), torch.randint(3, (4, 3)))])


@pytest.mark.parametrize("kind", PAIRS)
def test_outputs_in_another_shape_than_the_layers(kind: str) -> None:
    """One layer of 6 outputs, read as 3 positions of 2 classes, or as 2 classes of 3 positions."""
    model = Net(lambda m, x: m.out(torch.tanh(x)).unflatten(1, (3, 2)), out=nn.Linear(3, 6)).double()
    same_curvature(kind, model, Categorical(), [(randn(4, 3), torch.randint(2, (4, 3)))])
    same_curvature(kind, model, Gaussian(), [(randn(4, 3), randn(4, 3, 2))])
    same_curvature(kind, model, Categorical(class_axis=1), [(randn(4, 3), torch.randint(3, (4, 2)))])


@pytest.mark.parametrize("reduction", ["pick_first", "pick_last", "average"])
@pytest.mark.parametrize("kind", ["full", "diagonal", "blocks"])
def test_reduced_positions(kind: str, reduction: str) -> None:
    bodies = {
        "pick_first": lambda m, t: m.out(torch.tanh(m.e(t)))[:, 0],
        "pick_last": lambda m, t: m.out(torch.tanh(m.e(t)))[:, -1],
        "average": lambda m, t: m.out(torch.tanh(m.e(t))).mean(1),
    }
    model = Net(bodies[reduction], e=nn.Embedding(7, 3), out=nn.Linear(3, 2)).double()
    data = [(torch.randint(7, (4, 5)), torch.randint(2, (4,)))]
    found, expected, tangent = same_curvature(kind, model, Categorical(), data, reduction)
    predictions_agree(found, expected, tangent, data[0][0])


def test_a_picked_position_is_one_position_for_the_factors() -> None:
    """The general estimator counts positions that are thrown away; features say that there is one per data point."""
    model = Net(lambda m, t: m.out(torch.tanh(m.e(t)))[:, 0], e=nn.Embedding(7, 3), out=nn.Linear(3, 2)).double()
    x, y = torch.randint(7, (4, 5)), torch.randint(2, (4,))
    plain = Net(lambda m, t: m.out(torch.tanh(m.e(t[:, 0]))), e=model.e, out=model.out)
    found = last_layer.kron(FeatureTangent(model, reduction="pick_first"), Categorical(), [(x, y)])
    close(found.dense(), last_layer.kron(FeatureTangent(plain), Categorical(), [(x, y)]).dense())


def test_the_kronecker_block_is_built_like_that_of_kflr() -> None:
    problem = problems.build("mlp")
    found, expected, _ = same_curvature("kron", problem.model, problem.likelihood, problem.batches)
    assert isinstance(found, Blocks)
    assert isinstance(expected, Blocks)
    (ours,), (theirs,) = found.blocks, expected.blocks
    assert (ours.name, ours.segments) == (theirs.name, theirs.segments)
    assert isinstance(ours.curvature, Kronecker)
    assert isinstance(theirs.curvature, Kronecker)
    assert ours.curvature.layout == theirs.curvature.layout
    (mine,), (general,) = ours.curvature.terms, theirs.curvature.terms
    assert mine.count == general.count == len(problem.x)
    close(mine.cols, general.cols)
    close(mine.rows, general.rows)
    close((found + expected).dense(), 2 * expected.dense())


def test_blocks_are_named_as_the_general_ones() -> None:
    problem = problems.build("mlp")
    for by in ("layer", "tensor"):
        found = last_layer.blocks(FeatureTangent(problem.model), problem.likelihood, problem.batches, by=by)
        tangent = Tangent(problem.model, problem.space.select(module="4"))
        expected = estimate.blocks(tangent, problem.likelihood, problem.batches, by=by)
        assert [(b.name, b.segments) for b in found.blocks] == [(b.name, b.segments) for b in expected.blocks]
        assert all(isinstance(b.curvature, Dense) for b in found.blocks)


# -- sums -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["exact", "empirical"])
@pytest.mark.parametrize("name", ["mlp", "sequence_categorical"])
@pytest.mark.parametrize("kind", PAIRS)
def test_splits_and_budgets_leave_the_curvature_alone(kind: str, name: str, choice: str) -> None:
    problem = problems.build(name)
    ours, _, own = PAIRS[kind]
    own = {**own, "cotangents": COTANGENTS[choice]}
    whole = ours(FeatureTangent(problem.model), problem.likelihood, problem.batches, **own)
    n = len(problem.x)
    split = list(zip(problem.x.split([1, n - 1]), problem.y.split([1, n - 1]), strict=True))
    close(ours(FeatureTangent(problem.model), problem.likelihood, split, **own).dense(), whole.dense(), rtol=1e-10)
    small = FeatureTangent(problem.model, budget=1)
    close(ours(small, problem.likelihood, problem.batches, **own).dense(), whole.dense(), rtol=1e-10)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", PAIRS)
def test_a_loader_may_fill_one_tensor_again_and_again(kind: str, bias: bool) -> None:
    """The model is its last layer, so that the features are the very tensor that the loader gave."""
    model = nn.Linear(3, 2, bias=bias).double()
    xs, ys = randn(3, 4, 3), torch.randint(2, (3, 4))
    buffer = torch.empty_like(xs[0])

    def refilled():
        for x, y in zip(xs, ys, strict=True):
            buffer.copy_(x)
            yield buffer, y

    ours, _, own = PAIRS[kind]
    found = ours(FeatureTangent(model), Categorical(), refilled(), **own)
    close(found.dense(), ours(FeatureTangent(model), Categorical(), list(zip(xs, ys, strict=True)), **own).dense())


def test_a_seed_repeats_the_draws_and_another_does_not() -> None:
    problem = problems.build("mlp")
    draws = [
        last_layer.kron(
            FeatureTangent(problem.model),
            problem.likelihood,
            problem.batches,
            cotangents=estimate.monte_carlo(1),
            generator=seeded(seed),
        ).dense()
        for seed in (0, 0, 1)
    ]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_draws_have_the_exact_fisher_as_their_mean() -> None:
    problem = problems.build("mlp")
    tangent = FeatureTangent(problem.model)
    exact = last_layer.full(tangent, problem.likelihood, problem.batches).matrix
    generator, choice = seeded(), estimate.monte_carlo(20)
    draws = [
        last_layer.full(tangent, problem.likelihood, problem.batches, cotangents=choice, generator=generator)
        for _ in range(25)
    ]
    traces = torch.stack([drawn.matrix.trace() for drawn in draws])
    assert abs(float(traces.mean() - exact.trace())) < 4 * float(traces.std()) / 5


def test_a_confident_classifier_in_single_precision_keeps_its_small_curvature() -> None:
    """diag(p) - p p^T loses its digits in float32 where p is 1 - 1e-6; the sums are right all the same."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    with torch.no_grad():
        model.get_parameter("2.weight").mul_(0.1)
        model.get_parameter("2.bias").copy_(torch.tensor([14.0, 0.0, 0.0]))
    twin = copy.deepcopy(model).double()
    x, y = torch.randn(50, 3), torch.zeros(50, dtype=torch.int64)
    for ours, _, own in PAIRS.values():
        found = ours(FeatureTangent(model), Categorical(), [(x, y)], **own).dense()
        expected = ours(FeatureTangent(twin), Categorical(), [(x.double(), y)], **own).dense()
        assert float((found - expected).abs().max()) < 1e-4 * float(expected.abs().max())


def test_half_precision_models_are_summed_in_single_precision() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).to(torch.bfloat16)
    data = [(torch.randn(6, 3).to(torch.bfloat16), torch.randint(3, (6,)))]
    for ours, _, own in PAIRS.values():
        assert ours(FeatureTangent(model), Categorical(), data, **own).dense().dtype == torch.float32


def test_a_differentiable_tangent_leaves_no_graph_in_the_sums() -> None:
    problem = problems.build("mlp_gaussian")
    sigma = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    for ours, _, own in PAIRS.values():
        tangent = FeatureTangent(problem.model, differentiable=True)
        found = ours(tangent, Gaussian(sigma), problem.batches, **own)
        assert not found.dense().requires_grad


def test_whoever_watches_the_batches_is_told_of_each() -> None:
    problem = problems.build("mlp")
    seen: list[Tensor] = []
    watched = Watched(problem.batches, lambda: None, lambda value, y, log_prob: seen.append(log_prob))
    last_layer.kron(FeatureTangent(problem.model), problem.likelihood, watched)
    (log_prob,) = seen
    close(log_prob, problem.likelihood.log_prob(problems.call_detached(problem.model, problem.x), problem.y))


# -- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PAIRS)
def test_errors_name_the_batch(kind: str) -> None:
    ours, _, own = PAIRS[kind]
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    good = (randn(4, 3), torch.randint(3, (4,)))
    tangent = FeatureTangent(model)
    with pytest.raises(DataError, match="no batch"):
        ours(tangent, Categorical(), [], **own)
    with pytest.raises(LikelihoodError, match="batch 1: "):
        ours(tangent, Categorical(), [good, (good[0], torch.full((4,), 7))], **own)
    with pytest.raises(DataError, match=r"batch 1: .*pair"):
        ours(tangent, Categorical(), [good, good[0]], **own)
    with pytest.raises(DataError, match=r"batch 1: .*NaN"):
        ours(tangent, Categorical(), [good, (torch.full_like(good[0], float("nan")), good[1])], **own)
    bad = from_function(lambda f, y: (f - y).abs().sum().pow(1.5).sum())  # its second derivative at f = y is infinite
    linear = nn.Linear(3, 1, bias=False).double()
    x = randn(4, 3)
    with pytest.raises(DataError, match="batch 0: "):
        ours(FeatureTangent(linear), bad, [(x, linear(x).detach())], **own)


def test_options_that_do_not_exist_are_named() -> None:
    problem = problems.build("mlp")
    tangent = FeatureTangent(problem.model)
    with pytest.raises(ParameterError, match="unknown option 'share'"):
        last_layer.kron(tangent, problem.likelihood, problem.batches, share=True)
    with pytest.raises(ParameterError, match="grouping"):
        last_layer.blocks(tangent, problem.likelihood, problem.batches, by="row")


# -- memory ---------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that any operation returned, views of smaller ones left out."""

    def __init__(self) -> None:
        super().__init__()
        self.size, self.where = 0, ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, Tensor) and value.untyped_storage().nbytes() > self.size:
                self.size, self.where = value.untyped_storage().nbytes(), f"{func} -> {tuple(value.shape)}"
        return out


@pytest.mark.parametrize("kind", ["kron", "diagonal"])
def test_a_thousand_classes_are_fitted_without_a_matrix_per_data_point(kind: str) -> None:
    """64 points of 512 features and 1000 classes: no [B, C, P] (131 GB), and no [B, C, C] (256 MB)."""
    model = nn.Sequential(nn.Linear(8, 512), nn.Tanh(), nn.Linear(512, 1000))
    x, y = torch.randn(64, 8), torch.randint(1000, (64,))
    tangent = FeatureTangent(model)
    with Largest() as fit:
        PAIRS[kind][0](tangent, Categorical(), [(x, y)])
    assert fit.size <= 8 * 1000**2, fit.where
    with Largest() as rows:
        (piece,) = tangent.at(x).pieces()
    assert rows.size <= 4 * 1000**2, rows.where
    assert isinstance(piece, OuterRows)
    assert piece.left.shape == (1000, 64, 1, 1, 1000)


def test_matrices_of_other_likelihoods_stay_within_the_budget() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 200))
    x, y = torch.randn(64, 8), torch.randint(2, (64, 200)).float()
    budget = 2**22
    with Largest() as fit:
        last_layer.kron(FeatureTangent(model, budget=budget), Bernoulli(), [(x, y)])
    assert fit.size <= budget, fit.where
    with Largest() as whole:
        last_layer.kron(FeatureTangent(model), Bernoulli(), [(x, y)])
    assert whole.size >= 64 * 200 * 200 * 4  # the measure sees a matrix per data point
