"""The sketched score: equal to the dense one where nothing is left out, near it where lengths are estimated."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import oracle
from lapwing import estimate
from lapwing.errors import CurvatureError
from lapwing.likelihoods import Categorical, Gaussian
from lapwing.linalg.sketch import Sketch
from lapwing.params import ParamSpace
from lapwing.tangent import Tangent
from memory import Largest
from unchanged import unchanged


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- the sketch --------------------------------------------------------------------------------------------------------


def matrix(sketch: Sketch) -> Tensor:
    return sketch(torch.eye(sketch.size, dtype=torch.float64)).mT


@pytest.mark.parametrize(("size", "block"), [(300, 2**18), (300, 64), (129, 128)])
def test_lengths_and_angles_are_right_in_the_mean(size: int, block: int) -> None:
    """400 sketches of 32 rows: the mean of S^T S is the identity within five standard errors, entry by entry."""
    v = normal(2, size)
    found = torch.stack([(lambda s: s @ s.mT)(Sketch(size, 32, seed, block)(v)) for seed in range(400)])
    error = found.std(0) / 400**0.5
    assert bool(((found.mean(0) - v @ v.mT).abs() < 5 * error).all())
    spread = float(found[:, 0, 0].std() / v[0].square().sum())
    assert 0.5 < spread / (2 / 32) ** 0.5 < 1.5


def test_a_sketch_is_linear_and_comes_again_from_its_seed() -> None:
    a, b = normal(3, 500), normal(3, 500, seed=1)
    sketch = Sketch(500, 64, 3, block=200)
    torch.testing.assert_close(sketch(2 * a - b), 2 * sketch(a) - sketch(b), rtol=1e-9, atol=1e-12)
    assert torch.equal(Sketch(500, 64, 3, block=200)(a), sketch(a))
    assert not torch.equal(Sketch(500, 64, 4, block=200)(a), sketch(a))
    assert torch.equal(Sketch(500, 500)(a), a), "as many rows as entries: nothing to be left out"
    state = torch.get_rng_state()
    sketch(a)
    assert torch.equal(torch.get_rng_state(), state)


def test_bad_sizes_of_sketches() -> None:
    for rows in (0, 1, 7):
        with pytest.raises(CurvatureError, match=f"a sketch of {rows} rows; expected an even number"):
            Sketch(100, rows)
    with pytest.raises(CurvatureError, match="vectors of 9 entries for a sketch of 10; expected as many"):
        Sketch(10, 4)(normal(1, 9))


# -- the score ---------------------------------------------------------------------------------------------------------


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def left_over(model: nn.Module, likelihood, x: Tensor, y: Tensor, new: Tensor) -> Tensor:
    """sum_c |J_c|^2 - |U^T J_c|^2 with U the eigenvectors of the dense GGN that are not zero."""
    values, vectors = torch.linalg.eigh(oracle.ggn(model, likelihood, x, y))
    U = vectors[:, values > 1e-12 * values.max()]
    J = oracle.jacobian(model, new)
    return J.square().sum((1, 2)) - (J @ U).square().sum((1, 2))


@pytest.mark.parametrize("likelihood", [Gaussian(), Categorical()])
def test_without_a_sketch_and_with_all_directions_it_is_the_dense_score(likelihood) -> None:
    """A whole Krylov space, so that Lanczos' loss of orthogonality shows: 1e-6 of the whole, and not 1e-9."""
    model, x, new = network(), normal(3, 3), normal(5, 3, seed=2)
    y = normal(3, 2, seed=1) if isinstance(likelihood, Gaussian) else torch.tensor([0, 1, 1])
    with unchanged(model):
        found = estimate.sketched(Tangent(model), likelihood, [(x[:2], y[:2]), (x[2:], y[2:])], steps=12)
        scores = found(new)
    whole = oracle.jacobian(model, new).square().sum((1, 2))
    expected = left_over(model, likelihood, x, y, new)
    assert bool((expected > 1e-3 * whole).all()), "the data leave something open"
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-6 * float(whole.max()))
    if isinstance(likelihood, Gaussian):  # of logits, a shift of all is never known
        seen = found(x)
        assert bool((seen < 1e-6 * oracle.jacobian(model, x).square().sum((1, 2))).all()), "its own data are known"
    assert found.rank <= 6


def test_with_a_sketch_it_is_near_the_dense_score() -> None:
    """1,500 weights in 400 numbers, eight directions: within 4 sqrt(8 / 400) of the whole, and in the same order."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 60), nn.Tanh(), nn.Linear(60, 2)).double()
    x, y, new = normal(4, 20), normal(4, 2, seed=1), torch.cat([normal(4, 20), 3 * normal(4, 20, seed=3)])
    new[:4] += 0.1 * normal(4, 20, seed=4)
    found = estimate.sketched(Tangent(model), Gaussian(), [(x, y)], steps=12, rows=400)
    assert ParamSpace.of(model).size > 1000
    assert found.basis.shape[0] == 400
    whole = oracle.jacobian(model, new).square().sum((1, 2))
    expected = left_over(model, Gaussian(), x, y, new)
    scores = found(new)
    assert bool(((scores - expected).abs() < 4 * (8 / 400) ** 0.5 * whole).all())
    assert float(scores[:4].max()) < float(scores[4:].min())
    again = estimate.sketched(Tangent(model), Gaussian(), [(x, y)], steps=12, rows=400)
    assert torch.equal(again(new), scores)
    other = torch.Generator().manual_seed(5)
    assert not torch.equal(
        estimate.sketched(Tangent(model), Gaussian(), [(x, y)], rows=400, generator=other)(new), scores
    )


def test_no_tensor_is_larger_than_a_few_copies_of_the_weights() -> None:
    model = nn.Sequential(nn.Linear(30, 2000), nn.Tanh(), nn.Linear(2000, 2))
    x, y = torch.randn(6, 30), torch.randn(6, 2)
    size = ParamSpace.of(model).size
    with Largest() as largest:
        estimate.sketched(Tangent(model), Gaussian(), [(x, y)], steps=10, rows=100)(x)
    assert largest.numel <= 8 * size, largest.where


def test_bad_input() -> None:
    model, x, y = network(), normal(3, 3), normal(3, 2)
    for steps, rows in ((0, 100), (10, 39)):
        with pytest.raises(CurvatureError, match=f"steps is {steps} and rows {rows}; expected at least 1 step"):
            estimate.sketched(Tangent(model), Gaussian(), [(x, y)], steps=steps, rows=rows)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model[2].requires_grad_(False)
    with pytest.raises(CurvatureError, match="the curvature is zero; expected data that determine"):
        estimate.sketched(Tangent(model), Gaussian(), [(x, y)])
