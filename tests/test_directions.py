"""Cosines of directions against dense solves with the GGN spelled out; conjugate gradients say how far they came."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing
import oracle
from lapwing import estimate
from lapwing.directions import Alignment, alignment, conjugate_gradients
from lapwing.errors import CurvatureError, DataError, ParameterError
from lapwing.likelihoods import Bernoulli, BernoulliMixture, Categorical, Gaussian, Likelihood
from lapwing.linalg import Curvature, Diagonal
from lapwing.params import ParamSpace
from lapwing.tangent import Tangent
from unchanged import unchanged

EXACT: dict[str, Any] = {"tolerance": 1e-13, "iterations": 2000}
DAMPING = 0.3


class Nested(nn.Module):
    """Tensors of its own, which are not together in the flat vector's order by layer, and a module in a module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(2, 4), nn.Tanh())
        self.scale = nn.Parameter(torch.randn(4))
        self.last = nn.Linear(4, 3)
        self.shift = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) * self.scale) + self.shift


def dense_network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def convolution() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 2)), nn.Conv1d(1, 3, 2), nn.Flatten(), nn.Tanh(), nn.Linear(3, 3)).double()


def targets(likelihood: Likelihood, n: int, generator: torch.Generator) -> Tensor:
    if isinstance(likelihood, Categorical):
        return torch.randint(3, (n,), generator=generator)
    if isinstance(likelihood, BernoulliMixture):
        return torch.randint(2, (n,), generator=generator)
    if isinstance(likelihood, Bernoulli):
        return torch.rand(n, 3, generator=generator, dtype=torch.float64)
    return torch.randn(n, 3, generator=generator, dtype=torch.float64)


def data(likelihood: Likelihood, n: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 2, generator=generator, dtype=torch.float64), targets(likelihood, n, generator)


def split(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(x[:5], y[:5]), (x[5:], y[5:])]


def structures(tangent: Tangent, likelihood: Likelihood, batches: list[tuple[Tensor, Tensor]]) -> dict[str, Curvature]:
    args = tangent, likelihood, batches
    return {
        "kron": estimate.kflr(*args),
        "factored": estimate.kflr(*args, factored_damping=True),
        "full": estimate.full(*args),
        "blocks": estimate.blocks(*args),
        "tensors": estimate.blocks(*args, by="tensor"),
        "diagonal": estimate.diagonal(*args),
    }


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0))


def owners(model: nn.Module) -> list[str]:
    """The module of every entry of the flat vector."""
    return [name.rpartition(".")[0] for name, p in model.named_parameters() for _ in range(p.numel())]


def expected(
    model: nn.Module, likelihood: Likelihood, x: Tensor, y: Tensor, curvatures: dict[str, Curvature], damping: float
) -> list[dict[str, str | float]]:
    """The rows of the table, by dense solves."""
    ggn, owner = oracle.ggn(model, likelihood, x, y), owners(model)
    loss = -likelihood.log_prob(model(x), y).sum()
    gradient = oracle.flat_gradient(loss, list(oracle.parameters(model).values())).detach()
    eye = torch.eye(len(ggn), dtype=ggn.dtype)
    same = torch.tensor([[a == b for b in owner] for a in owner])
    full = torch.linalg.solve(ggn + damping * eye, gradient)
    blocks = torch.linalg.solve(ggn * same + damping * eye, gradient)
    directions = {
        name: torch.linalg.inv(curvature.with_prior(damping).mv(eye)) @ gradient
        for name, curvature in curvatures.items()
    }
    pairs = [(name, "exact blocks", ours, blocks) for name, ours in directions.items()]
    pairs += [(name, "full", ours, full) for name, ours in directions.items()]
    pairs.append(("exact blocks", "full", blocks, full))
    rows = []
    for name, reference, ours, theirs in pairs:
        where = {layer: torch.tensor([o == layer for o in owner]) for layer in dict.fromkeys(owner)}
        layers = {layer: cosine(ours[mask], theirs[mask]) for layer, mask in where.items()}
        rows.append({"approximation": name, "reference": reference, "whole": cosine(ours, theirs), **layers})
    return rows


def assert_same(found: list[dict[str, str | float]], wanted: list[dict[str, str | float]]) -> None:
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        assert list(ours) == list(theirs)
        for key, value in theirs.items():
            assert ours[key] == (pytest.approx(value, rel=1e-9) if isinstance(value, float) else value), (theirs, key)


# -- against dense solves -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("likelihood", [Gaussian(0.7), Bernoulli(), Categorical(), BernoulliMixture()], ids=repr)
@pytest.mark.parametrize("build", [dense_network, convolution, lambda: Nested().double()])
def test_every_cosine_is_that_of_dense_solves(build: Any, likelihood: Likelihood) -> None:
    model = build()
    x, y = data(likelihood)
    tangent = Tangent(model)
    curvatures = structures(tangent, likelihood, split(x, y))
    with unchanged(model):
        found = alignment(tangent, likelihood, split(x, y), curvatures, DAMPING, **EXACT)
    assert found.converged
    assert found.layers == tangent.space.layers
    assert_same(found.rows(), expected(model, likelihood, x, y, curvatures, DAMPING))


@pytest.mark.parametrize("preconditioner", ["kron", "factored", "full", "blocks", "tensors", "diagonal", None])
def test_the_preconditioner_changes_the_way_and_not_the_answer(preconditioner: str | None) -> None:
    model, likelihood = Nested().double(), Categorical()
    x, y = data(likelihood)
    tangent = Tangent(model)
    curvatures = structures(tangent, likelihood, [(x, y)])
    if preconditioner is None:
        found = alignment(tangent, likelihood, [(x, y)], {}, DAMPING, **EXACT)
        curvatures = {}
    else:
        found = alignment(tangent, likelihood, [(x, y)], curvatures, DAMPING, preconditioner=preconditioner, **EXACT)
    assert found.converged
    assert_same(found.rows(), expected(model, likelihood, x, y, curvatures, DAMPING))
    if preconditioner == "full":
        assert found.full_solve.iterations == 1
    if preconditioner == "blocks":
        assert all(solve.iterations == 1 for solve in found.block_solves.values())


def test_the_exact_curvatures_are_aligned_with_themselves() -> None:
    model, likelihood = dense_network(), Bernoulli()
    x, y = data(likelihood)
    tangent = Tangent(model)
    curvatures = structures(tangent, likelihood, [(x, y)])
    found = alignment(tangent, likelihood, [(x, y)], curvatures, DAMPING, **EXACT)
    full, blocks = found.with_full["full"], found.with_blocks["blocks"]
    assert [full.whole, *full.layers.values()] == pytest.approx([1.0] * 4, rel=1e-9)
    assert [blocks.whole, *blocks.layers.values()] == pytest.approx([1.0] * 4, rel=1e-9)
    assert found.with_full["blocks"].whole == pytest.approx(found.blocks_with_full.whole, rel=1e-9)
    assert 0 < found.with_full["diagonal"].whole < 0.999  # the instrument can tell them apart


def test_damping_is_that_of_a_sum_over_the_data() -> None:
    """Every point twice: the mean curvature and gradient stay, and so do the directions at twice the damping."""
    likelihood = Categorical()
    x, y = data(likelihood)
    tangent = Tangent(dense_network())
    found = []
    for batches, damping in (([(x, y)], DAMPING), ([(x, y), (x, y)], 2 * DAMPING)):
        curvatures = {"diagonal": estimate.diagonal(tangent, likelihood, batches)}
        found.append(alignment(tangent, likelihood, batches, curvatures, damping, **EXACT))
    assert_same(found[0].rows(), found[1].rows())


def test_a_gradient_of_ones_own_of_any_length() -> None:
    """The gradient with a weight decay in it; a large damping leaves the gradient's own direction everywhere."""
    likelihood = Gaussian()
    x, y = data(likelihood)
    tangent = Tangent(dense_network())
    gradient = tangent.space.values(tangent.model)
    curvatures = {"diagonal": estimate.diagonal(tangent, likelihood, [(x, y)])}
    args = tangent, likelihood, [(x, y)], curvatures
    ours = alignment(*args, DAMPING, gradient=gradient, **EXACT)
    assert_same(ours.rows(), alignment(*args, DAMPING, gradient=3 * gradient, **EXACT).rows())
    assert abs(ours.with_full["diagonal"].whole - alignment(*args, DAMPING, **EXACT).with_full["diagonal"].whole) > 1e-3
    far = alignment(*args, 1e9, gradient=gradient, **EXACT)
    assert far.with_full["diagonal"].whole == pytest.approx(1, abs=1e-6)
    assert far.blocks_with_full.whole == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("mask", [False, True])
def test_a_part_of_the_weights(mask: bool) -> None:
    """A sub-network's directions are those of the rows and columns of its weights."""
    model, likelihood = dense_network(), Categorical()
    x, y = data(likelihood)
    whole = ParamSpace.of(model)
    if mask:
        chosen = torch.tensor([0, 3, 9, 11, 12, 20, 30, 40, 46])
        space = whole.select(mask=chosen)
    else:
        chosen = torch.cat([torch.arange(whole.size)[whole.segment(n)] for n in ("0.weight", "4.weight", "4.bias")])
        space = whole.select(["0.weight", "4.weight", "4.bias"])
    tangent = Tangent(model, space)
    curvatures = {"full": estimate.full(tangent, likelihood, [(x, y)])}
    found = alignment(tangent, likelihood, [(x, y)], curvatures, DAMPING, **EXACT)
    loss = -likelihood.log_prob(model(x), y).sum()
    gradient = oracle.flat_gradient(loss, list(model.parameters())).detach()[chosen]
    ggn = oracle.ggn(model, likelihood, x, y)[chosen][:, chosen]
    owner = [owners(model)[i] for i in chosen.tolist()]
    same = torch.tensor([[a == b for b in owner] for a in owner])
    eye = torch.eye(len(chosen), dtype=torch.float64)
    full = torch.linalg.solve(ggn + DAMPING * eye, gradient)
    blocks = torch.linalg.solve(ggn * same + DAMPING * eye, gradient)
    assert found.converged
    assert found.with_full["full"].whole == pytest.approx(1, rel=1e-9)
    assert found.blocks_with_full.whole == pytest.approx(cosine(blocks, full), rel=1e-9)
    first = torch.tensor([o == "0" for o in owner])
    assert found.blocks_with_full.layers["0"] == pytest.approx(cosine(blocks[first], full[first]), rel=1e-9)


def test_a_layer_without_effect_has_no_direction() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(2, 3), nn.Linear(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    likelihood = Categorical()
    x, y = data(likelihood)
    tangent = Tangent(Idle().double())
    found = alignment(
        tangent, likelihood, [(x, y)], {"full": estimate.full(tangent, likelihood, [(x, y)])}, DAMPING, **EXACT
    )
    assert found.converged
    assert found.block_solves["idle"].iterations == 0
    assert math.isnan(found.with_blocks["full"].layers["idle"])
    assert found.with_blocks["full"].whole == pytest.approx(1, rel=1e-9)


def test_it_is_a_name_of_the_package() -> None:
    assert lapwing.alignment is alignment


# -- conjugate gradients --------------------------------------------------------------------------------------------


def spread(size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A positive definite matrix with eigenvalues from 1 to 10,000."""
    generator = torch.Generator().manual_seed(2)
    basis = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q
    return ((basis * torch.logspace(0, 4, size, dtype=torch.float64)) @ basis.mT).to(dtype)


def test_conjugate_gradients_solve() -> None:
    matrix, target = spread(30), torch.arange(1.0, 31.0, dtype=torch.float64)
    x, solved = conjugate_gradients(lambda v: matrix @ v, target, torch.clone, 1e-12, 500)
    assert solved.converged
    assert 0 < solved.residual <= 1e-12
    torch.testing.assert_close(x, torch.linalg.solve(matrix, target), rtol=1e-9, atol=1e-12)
    scale = matrix.diagonal()
    _, other = conjugate_gradients(lambda v: matrix @ v, target, lambda v: torch.linalg.solve(matrix, v), 1e-9, 500)
    assert other.iterations == 1
    y, _ = conjugate_gradients(lambda v: matrix @ v, target, lambda v: v / scale, 1e-12, 500)
    torch.testing.assert_close(y, x, rtol=1e-9, atol=1e-12)


def test_conjugate_gradients_say_that_they_were_cut_short() -> None:
    matrix, target = spread(30), torch.ones(30, dtype=torch.float64)
    x, solved = conjugate_gradients(lambda v: matrix @ v, target, torch.clone, 1e-12, 5)
    assert (solved.converged, solved.iterations) == (False, 5)
    assert solved.residual == pytest.approx(float((target - matrix @ x).norm() / target.norm()), rel=1e-9)


def test_conjugate_gradients_stop_where_rounding_does() -> None:
    matrix, target = spread(30, torch.float32), torch.ones(30)
    x, solved = conjugate_gradients(lambda v: matrix @ v, target, torch.clone, 1e-13, 100_000)
    assert not solved.converged
    assert solved.iterations < 10_000
    assert solved.residual == pytest.approx(float((target - matrix @ x).norm() / target.norm()))
    assert solved.residual < 1e-2


def test_nothing_to_solve() -> None:
    x, solved = conjugate_gradients(lambda v: 2 * v, torch.zeros(3), torch.clone, 1e-6, 10)
    assert not x.any()
    assert (solved.converged, solved.iterations) == (True, 0)


def measured(**options: Any) -> Alignment:
    likelihood = Categorical()
    x, y = data(likelihood)
    tangent = Tangent(dense_network())
    curvatures = {"diagonal": estimate.diagonal(tangent, likelihood, [(x, y)])}
    return alignment(tangent, likelihood, [(x, y)], curvatures, **{"damping": 1e-4, **options})


def test_a_reference_that_is_cut_short_is_said_to_be() -> None:
    found = measured(iterations=2)
    assert not found.converged
    assert not found.full_solve.converged
    assert found.full_solve.iterations == 2
    assert found.full_solve.residual > 1e-5
    assert measured(tolerance=1e-10).converged


def test_a_good_preconditioner_saves_products() -> None:
    """In a deep linear network with square loss every layer's block is a Kronecker product: nothing is left to do."""
    likelihood = Gaussian()
    x, y = data(likelihood, 60)
    tangent = Tangent(nn.Sequential(nn.Linear(2, 4), nn.Identity(), nn.Linear(4, 3)).double())
    curvatures = {"kron": estimate.kflr(tangent, likelihood, [(x, y)])}
    ours = alignment(tangent, likelihood, [(x, y)], curvatures, DAMPING)
    plain = alignment(tangent, likelihood, [(x, y)], {}, DAMPING)
    assert [solve.iterations for solve in ours.block_solves.values()] == [1, 1]
    assert min(solve.iterations for solve in plain.block_solves.values()) > 1
    assert ours.converged
    assert plain.converged


# -- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"damping": 0.0}, ParameterError, "damping is 0.0; expected a finite number > 0"),
        ({"damping": -1}, ParameterError, "damping is -1"),
        ({"damping": math.inf}, ParameterError, "damping is inf"),
        ({"damping": math.nan}, ParameterError, "damping is nan"),
        ({"tolerance": 0.0}, ParameterError, "tolerance is 0.0"),
        ({"tolerance": 1.0}, ParameterError, "tolerance is 1.0"),
        ({"iterations": 0}, ParameterError, "iterations is 0"),
        ({"preconditioner": "kron"}, ParameterError, "no approximation 'kron'.*'diagonal'"),
        ({"gradient": torch.ones(3)}, ParameterError, r"gradient has shape \(3,\); expected \[47\]"),
        ({"gradient": torch.zeros(47)}, DataError, "the gradient is zero"),
        ({"gradient": torch.full((47,), math.nan)}, DataError, "NaN or infinite"),
    ],
)
def test_bad_input(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        measured(**options)


def test_a_curvature_of_other_weights() -> None:
    likelihood = Categorical()
    tangent = Tangent(dense_network())
    with pytest.raises(CurvatureError, match="'small' has 3 parameters; expected 47"):
        alignment(tangent, likelihood, [data(likelihood)], {"small": Diagonal(torch.ones(3).double())}, 1.0)


def test_no_data() -> None:
    with pytest.raises(DataError, match="no batch"):
        alignment(Tangent(dense_network()), Categorical(), [], {}, 1.0)


def test_it_works_in_inference_mode() -> None:
    likelihood = Categorical()
    x, y = data(likelihood)
    tangent = Tangent(dense_network())
    args = likelihood, [(x, y)], {"diagonal": estimate.diagonal(tangent, likelihood, [(x, y)])}, DAMPING
    with torch.inference_mode():
        found = alignment(tangent, *args, **EXACT)
    assert_same(found.rows(), alignment(tangent, *args, **EXACT).rows())
