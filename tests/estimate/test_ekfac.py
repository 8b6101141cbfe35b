"""Eigenvalue-corrected Kronecker blocks: diag(Q^T F Q) of the exact block F, and what theory says of it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oracle
import problems
from estimator_checks import close, errors_of_means, parts, seeded
from lapwing import estimate
from lapwing.errors import CurvatureError, DataError, ParameterError
from lapwing.estimate.data_pass import Watched
from lapwing.likelihoods import Categorical, Gaussian
from lapwing.linalg import Blocks, CorrectedKronecker, Diagonal, Kronecker, Segments
from lapwing.linalg.checks import eigh_psd
from lapwing.linalg.kronecker import factors
from lapwing.params import ParamSpace
from lapwing.tangent import Tangent
from problems import Net
from unchanged import unchanged

NAMES = [name for name in problems.NAMES if problems._OPTIONS[name].get("kron", True)]
OPTIONS: dict[str, dict[str, Any]] = {
    "expand": {},
    "reduce": {"sharing": "reduce"},
    "separate bias": {"joint_bias": False},
}


def truth(problem: problems.Problem) -> Tensor:
    """The GGN [P, P] in the problem's space."""
    whole = oracle.ggn(problem.model, problem.likelihood, problem.x, problem.y)
    names = list(oracle.parameters(problem.model))
    index = torch.arange(len(whole)).split([p.numel() for p in oracle.parameters(problem.model).values()])
    kept = problem.space.restrict(torch.cat([index[names.index(name)] for name in problem.space.names]))
    return whole[kept][:, kept]


def bias_mask(block: Kronecker) -> Tensor:
    """Whether two entries are both of the weight or both of the bias."""
    is_bias = torch.zeros(block.size, dtype=torch.bool)
    if block.layout.bias is not None:
        is_bias[block.layout.bias : block.layout.bias + block.layout.groups * block.layout.rows] = True
    return is_bias[:, None] == is_bias[None, :]


def exact_block(ggn: Tensor, segments: Segments, block: Kronecker, joint: bool) -> Tensor:
    where = segments.gather(torch.arange(len(ggn)))
    found = ggn[where][:, where]
    return found if joint else found * bias_mask(block)


def projections(factor: Tensor) -> list[Tensor]:
    """Of a dense factor, one for each of its different eigenvalues; of a diagonal one, one for each entry."""
    if factor.dim() == 1:
        return [torch.outer(unit, unit) for unit in torch.eye(len(factor), dtype=factor.dtype)]
    values, vectors = torch.linalg.eigh(factor)
    numbers = (values.diff() > 1e-12 * values.max()).cumsum(0).tolist()
    columns: dict[int, list[Tensor]] = {}
    for number, vector in zip([0, *numbers], vectors.mT, strict=True):
        columns.setdefault(number, []).append(torch.outer(vector, vector))
    return [torch.stack(each).sum(0) for each in columns.values()]


def explicit(block: Kronecker, exact: Tensor, joint: bool) -> Tensor:
    """sum_ab tr(P F) / tr(P) P with P = P_a (x) P_b spelled out, from eigenprojections of the factors."""
    cols, rows = block.factors
    layout = block.layout
    place = layout.gather(torch.arange(block.size).double()).long()  # [K, O, width]: flat positions
    out = torch.zeros_like(exact)
    slices = [slice(0, layout.width)]
    if layout.bias is not None and not joint:
        slices = [slice(0, layout.cols), slice(layout.cols, layout.width)]
    for group in range(layout.groups):
        for part in slices:
            own = cols[group][part] if cols.dim() == 2 else cols[group][part, part]
            where = place[group][:, part].flatten()
            inside = exact[where][:, where]
            for a, b in product(projections(rows[group]), projections(own)):
                both = torch.kron(a, b)
                out[where[:, None], where[None, :]] += (both * inside).sum() / both.trace() * both
    return out


@pytest.mark.parametrize("name", problems.thinned(NAMES))
def test_never_further_from_the_exact_block_than_kfac_and_of_the_same_trace(name: str) -> None:
    """Of all matrices that are diagonal in the basis, the corrected one is the nearest; KFAC's is another."""
    problem = problems.build(name)
    tangent, ggn = Tangent(problem.model, problem.space), truth(problem)
    for options in OPTIONS.values():
        with unchanged(problem.model):
            kfac = estimate.kflr(tangent, problem.likelihood, problem.batches, **options)
            ekfac = estimate.ekfac(tangent, problem.likelihood, problem.batches, **options)
        assert [block.segments for block in ekfac.blocks] == [block.segments for block in kfac.blocks]
        for ours, theirs in zip(ekfac.blocks, kfac.blocks, strict=True):
            found, other = ours.curvature, theirs.curvature
            if not isinstance(other, Kronecker):
                assert torch.equal(found.dense(), other.dense())
                continue
            assert isinstance(found, CorrectedKronecker)
            exact = exact_block(ggn, ours.segments, other, options.get("joint_bias", True))
            scale = float(exact.norm())
            assert float((found.dense() - exact).norm()) <= float((other.dense() - exact).norm()) + 1e-10 * scale
            assert float(found.diagonal().sum()) == pytest.approx(float(exact.trace()), rel=1e-9, abs=1e-12)
            assert all(float(part.values.min()) >= 0 for part in found.parts)


EXPLICIT = [
    "mlp",
    "mlp_without_bias",
    "conv2d",
    "conv2d_grouped",
    "conv1d",
    "conv_transpose1d",
    "conv_transpose2d_grouped",
    "batch_norm1d",
    "linear_twice",
    "sequence_categorical",
    "time_first",
    "tied_autoencoder",
    "attention_linears",
]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", EXPLICIT)
def test_equals_the_diagonal_of_the_exact_block_in_an_explicit_basis(name: str, options: dict) -> None:
    problem = problems.build(name)
    tangent, ggn = Tangent(problem.model, problem.space), truth(problem)
    kfac = estimate.kflr(tangent, problem.likelihood, problem.batches, **options)
    ekfac = estimate.ekfac(tangent, problem.likelihood, problem.batches, **options)
    joint = options.get("joint_bias", True)
    for ours, theirs in zip(ekfac.blocks, kfac.blocks, strict=True):
        if isinstance(theirs.curvature, Kronecker):
            exact = exact_block(ggn, ours.segments, theirs.curvature, joint)
            close(ours.curvature.dense(), explicit(theirs.curvature, exact, joint))
            if joint:  # where the prior differs between weight and bias, each is corrected in a basis of its own
                exact = exact_block(ggn, ours.segments, theirs.curvature, joint=False)
                prior = torch.full((len(exact),), 0.5)
                prior[~bias_mask(theirs.curvature)[0]] = 2.0
                if bool((prior != prior[0]).any()):
                    expected = torch.linalg.inv(explicit(theirs.curvature, exact, joint=False) + prior.diag())
                    close(ours.curvature.with_prior(prior).variance(), expected.diagonal())


@pytest.mark.parametrize("name", ["mlp", "conv2d_grouped", "sequence_categorical", "image_gaussian", "mha_time_first"])
def test_no_rotation_of_equal_eigenvectors_changes_the_result(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another processor does: rounding of another kind, and with it another basis of every null space."""
    problem = problems.build(name)
    tangent = Tangent(problem.model, problem.space)
    found, bases = [], []
    for seed in range(3):
        with monkeypatch.context() as patch:
            if seed:
                patch.setattr(factors, "eigh_psd", rounded_otherwise(seed))
            result = estimate.ekfac(tangent, problem.likelihood, problem.batches, sharing="reduce")
        prior = torch.full((result.size,), 0.5, dtype=torch.float64)
        prior[[start for start in range(result.size) if is_bias(result, start)]] = 2.0
        found.append((result.dense(), result.with_prior(prior).variance()))
        bases.append(
            [b.curvature.columns[0].vectors for b in result.blocks if isinstance(b.curvature, CorrectedKronecker)]
        )
    for again in found[1:]:
        close(again[0], found[0][0])
        close(again[1], found[0][1])
    assert any(not torch.allclose(a.abs(), b.abs(), atol=1e-3) for a, b in zip(bases[0], bases[1], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_over_positions_that_cancel_are_zero_and_not_their_rounding(dtype: torch.dtype) -> None:
    """A shift of all keys changes no softmax, so that the sum of their cotangents is zero, on any processor."""
    problem = problems.build("mha_time_first")
    tangent = Tangent(problem.model.to(dtype))
    found = estimate.kflr(tangent, problem.likelihood, [(problem.x.to(dtype), problem.y)], sharing="reduce")
    queries, keys, values = found.diagonal()[tangent.space.segment("mha.in_proj_weight")].view(3, 16)
    assert not keys.any()
    assert queries.all()
    assert values.all()


def is_bias(curvature: Blocks, position: int) -> bool:
    """Whether an entry of the flat vector belongs to the bias of a corrected block."""
    for block in curvature.blocks:
        at = block.segments.gather(torch.arange(curvature.size)).tolist()
        if position in at and isinstance(block.curvature, CorrectedKronecker):
            layout = block.curvature.layout
            return layout.bias is not None and 0 <= at.index(position) - layout.bias < layout.groups * layout.rows
    return False


def rounded_otherwise(seed: int) -> Any:
    """eigh of the matrix plus noise of the size of its rounding."""

    def decompose(matrix: Tensor, what: str, single: bool = False) -> tuple[Tensor, Tensor]:
        noise = torch.randn(matrix.shape, dtype=matrix.dtype, generator=seeded(seed)) * 2e-16 * matrix.abs().max()
        return eigh_psd(matrix + noise + noise.mT, what, single)

    return decompose


@pytest.mark.parametrize("name", ["embedding", "embedding_padding", "embedding_single", "tied_embedding"])
def test_tables_are_corrected_token_by_token(name: str) -> None:
    """The token side is diagonal, so that its eigenvectors are the tokens; only features are rotated."""
    problem = problems.build(name)
    tangent, ggn = Tangent(problem.model), truth(problem)
    kfac = estimate.kflr(tangent, problem.likelihood, problem.batches)
    ekfac = estimate.ekfac(tangent, problem.likelihood, problem.batches)
    first = kfac.blocks[0].curvature
    assert isinstance(first, Kronecker)
    cols, rows = first.factors
    if rows.dim() == 2:
        q = torch.kron(torch.eye(rows.shape[1]), torch.linalg.eigh(cols[0])[1].contiguous())
    else:
        q = torch.kron(*(torch.linalg.eigh(f[0])[1].contiguous() for f in (rows, cols)))
    exact = exact_block(ggn, kfac.blocks[0].segments, first, joint=True)
    expected = q @ (q.mT @ exact @ q).diagonal().diag() @ q.mT
    close(ekfac.blocks[0].curvature.dense(), expected)


def test_exact_where_kfac_is_exact() -> None:
    """One data point without sharing; a deep linear network with square loss."""
    problem = problems.build("mlp")
    x, y = problem.x[:1], problem.y[:1]
    groups = problem.space.groups("layer")
    expected = oracle.ggn(problem.model, problem.likelihood, x, y) * (groups[:, None] == groups[None, :])
    close(estimate.ekfac(Tangent(problem.model), problem.likelihood, [(x, y)]).dense(), expected)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 2)).double()
    x, y = torch.randn(7, 3).double(), torch.randn(7, 2).double()
    groups = ParamSpace.of(model).groups("layer")
    expected = oracle.ggn(model, Gaussian(0.3), x, y) * (groups[:, None] == groups[None, :])
    close(estimate.ekfac(Tangent(model), Gaussian(0.3), [(x, y)]).dense(), expected)


def test_clearly_nearer_than_kfac_with_shared_weights() -> None:
    """Not a theorem, but the reason to have it."""
    problem = problems.build("sequence_categorical")
    tangent, ggn = Tangent(problem.model), truth(problem)
    kfac, ekfac = (
        each(tangent, problem.likelihood, problem.batches).blocks[0] for each in (estimate.kflr, estimate.ekfac)
    )
    where = kfac.segments.gather(torch.arange(len(ggn)))
    exact = ggn[where][:, where]
    errors = [float((each.curvature.dense() - exact).norm() / exact.norm()) for each in (kfac, ekfac)]
    assert errors[1] < 0.8 * errors[0]


# -- one basis ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "conv2d_grouped", "embedding", "tied_embedding", "layer_norm"])
def test_in_a_given_basis_one_pass_is_enough_and_halves_add(name: str) -> None:
    problem = problems.build(name)
    tangent = Tangent(problem.model)
    halves = parts(problem.x, problem.y, [2, len(problem.x) - 2])
    basis = estimate.kflr(tangent, problem.likelihood, halves[:1])
    whole = estimate.ekfac(tangent, problem.likelihood, iter(problem.batches), basis=basis)
    first, second = (estimate.ekfac(tangent, problem.likelihood, [half], basis=basis) for half in halves)
    close((first + second).dense(), whole.dense())
    again = estimate.ekfac(tangent, problem.likelihood, problem.batches, basis=first)
    close(again.dense(), whole.dense())
    close((whole * 2.5).dense(), 2.5 * whole.dense())
    own = estimate.ekfac(tangent, problem.likelihood, problem.batches)
    full = estimate.kflr(tangent, problem.likelihood, problem.batches)
    close(estimate.ekfac(tangent, problem.likelihood, problem.batches, basis=full).dense(), own.dense())
    assert float(whole.diagonal().sum()) == pytest.approx(float(own.diagonal().sum()), rel=1e-9)


def test_two_bases_have_no_sum() -> None:
    problem = problems.build("mlp")
    first, second = (
        estimate.ekfac(Tangent(problem.model), problem.likelihood, [half])
        for half in parts(problem.x, problem.y, [2, len(problem.x) - 2])
    )
    with pytest.raises(CurvatureError, match=r"another eigenbasis.*basis=first"):
        first + second


def test_a_basis_without_the_layers_that_the_data_use_is_refused() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])

        def forward(self, x: Tensor, head: Tensor) -> Tensor:
            return self.heads[int(head)](x)

    torch.set_default_dtype(torch.float64)
    model = Heads()
    batches = [((torch.randn(6, 3), torch.tensor(i % 2)), torch.randn(6, 2)) for i in range(4)]
    basis = estimate.kflr(Tangent(model), Gaussian(), batches[::2])
    with unchanged(model), pytest.raises(ParameterError, match=r"no eigenvectors for parameter 'heads.1.weight'"):
        estimate.ekfac(Tangent(model), Gaussian(), batches, basis=basis)


def test_a_basis_of_something_else_is_refused() -> None:
    problem = problems.build("mlp")
    args = Tangent(problem.model), problem.likelihood, problem.batches
    size = Tangent(problem.model).space.size
    basis = estimate.kflr(*args)
    with pytest.raises(ParameterError, match=r"\['sharing'\] were given with a basis; expected none"):
        estimate.ekfac(*args, basis=basis, sharing="reduce")
    other = Blocks(1, estimate.kflr(Tangent(nn.Linear(1, 1, bias=False)), Gaussian(), [(torch.ones(1, 1),) * 2]).blocks)
    with pytest.raises(ParameterError, match=rf"1 parameters and the network {size}; expected the same"):
        estimate.ekfac(*args, basis=other)
    diagonal = estimate.diagonal(*args).values
    places = [block.segments for block in basis.blocks]
    wrong = Blocks(size, tuple(
        type(block)(block.name, place, Diagonal(place.gather(diagonal)))
        for block, place in zip(basis.blocks, places, strict=True)
    ))  # fmt: skip
    with pytest.raises(ParameterError, match="no eigenvectors for parameter"):
        estimate.ekfac(*args, basis=wrong)


# -- passes ---------------------------------------------------------------------------------------------------------


def test_an_iterator_is_refused_before_anything_is_done() -> None:
    problem = problems.build("mlp")
    with pytest.raises(DataError, match=r"iterator.*only once; expected.*list of batches or a DataLoader"):
        estimate.ekfac(Tangent(problem.model), problem.likelihood, iter(problem.batches))


class Exhausted:
    """No iterator, but empty the second time."""

    def __init__(self, batches: list) -> None:
        self.once = iter(batches)

    def __iter__(self) -> Iterator:
        return self.once


def test_data_that_are_gone_in_the_second_pass_are_refused() -> None:
    problem = problems.build("mlp")
    halves = parts(problem.x, problem.y, [2, len(problem.x) - 2])
    with pytest.raises(DataError, match=r"had 2 batches and the next one 0; expected the same data in every pass"):
        estimate.ekfac(Tangent(problem.model), problem.likelihood, Exhausted(halves))


def test_who_watches_the_data_is_told_of_each_pass() -> None:
    problem = problems.build("mlp")
    seen: list[Any] = []
    watched = Watched(problem.batches, lambda: seen.append("start"), lambda f, y, p: seen.append(len(f)))
    estimate.ekfac(Tangent(problem.model), problem.likelihood, watched)
    assert seen == ["start", len(problem.x)] * 2


def test_a_loader_that_shuffles_gives_the_same() -> None:
    problem = problems.build("mlp")
    expected = estimate.ekfac(Tangent(problem.model), problem.likelihood, problem.batches).dense()
    data = torch.utils.data.TensorDataset(problem.x, problem.y)
    loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
    close(estimate.ekfac(Tangent(problem.model), problem.likelihood, loader).dense(), expected)


# -- draws and refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["monte_carlo", "projections"])
def test_the_correction_is_unbiased_given_the_basis_and_its_error_falls(source: str) -> None:
    problem = problems.build("mlp_gaussian")
    tangent = Tangent(problem.model)
    basis = estimate.kflr(tangent, problem.likelihood, problem.batches)
    exact = estimate.ekfac(tangent, problem.likelihood, problem.batches, basis=basis).dense()

    def draws(count: int, generator: torch.Generator) -> Tensor:
        arguments: dict[str, Any] = {"cotangents": getattr(estimate, source)(count), "generator": generator}
        return estimate.ekfac(tangent, problem.likelihood, problem.batches, basis=basis, **arguments).dense()

    errors_of_means(draws, exact, (4, 36))


def test_many_draws_come_near_the_exact_one() -> None:
    problem = problems.build("mlp")
    tangent = Tangent(problem.model)
    exact = estimate.ekfac(tangent, problem.likelihood, problem.batches).dense()
    arguments: dict[str, Any] = {"cotangents": estimate.monte_carlo(800), "generator": seeded(0)}
    drawn = estimate.ekfac(tangent, problem.likelihood, problem.batches, **arguments).dense()
    assert float((drawn - exact).norm() / exact.norm()) < 0.15


def test_options_and_masks_are_refused_as_by_kflr() -> None:
    problem = problems.build("mlp")
    args = Tangent(problem.model), problem.likelihood, problem.batches
    with pytest.raises(ParameterError, match=r"unknown option 'factored_damping'.*expected some of"):
        estimate.ekfac(*args, factored_damping=True)
    with pytest.raises(ParameterError, match="expected 'expand' or 'reduce'"):
        estimate.ekfac(*args, sharing="average")
    space = ParamSpace.of(problem.model).select(mask=torch.tensor([0, 3]))
    with pytest.raises(ParameterError, match="sub-network given by a mask"):
        estimate.ekfac(Tangent(problem.model, space), problem.likelihood, problem.batches)


def test_float32_models() -> None:
    model = Net(lambda m, x: m.b(torch.tanh(m.a(x))), a=nn.Linear(3, 4), b=nn.Linear(4, 2))
    x, y = torch.randn(9, 3), torch.randint(2, (9,))
    found = estimate.ekfac(Tangent(model), Categorical(), [(x, y)]).dense()
    assert found.dtype == torch.float32
    exact = estimate.ekfac(Tangent(model.double()), Categorical(), [(x.double(), y)]).dense()
    assert float((found.double() - exact).norm()) < 1e-4 * float(exact.norm())
