"""The layer table: every architecture of the zoo in every structure, against brute force; never silently wrong.

A row is (row of the table, name of the problem). `full`, `diagonal`, `blocks` and the Jacobian products equal the
oracle to rounding; Kronecker structures meet the explicit product of `kron_oracle` (test_kronecker), with exact blocks
for parameters that form none, or refuse these on request with an error that names the parameter and the operation.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import oracle
import problems
from lapwing import estimate
from lapwing.errors import ModelError, ParameterError, UnsupportedOperationError
from lapwing.likelihoods import Categorical, Gaussian
from lapwing.tangent import Tangent
from unchanged import unchanged

ROWS = [pytest.param(name, id=f"{problems.ROWS[name]}: {name}") for name in problems.NAMES]
KRON = [row for row in ROWS if problems._OPTIONS[row.values[0]].get("kron", True)]
EXACT = [row for row in ROWS if problems._OPTIONS[row.values[0]].get("exact", False)]


def close(found: Tensor, expected: Tensor) -> None:
    """Equal to rounding of float64."""
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12 * max(scale, 1e-30))


def truth(problem: problems.Problem) -> tuple[Tensor, Tensor]:
    """(J [B, C, P], GGN [P, P]) in the problem's space, by the oracle."""
    jac = oracle.jacobian(problem.model, problem.x)
    whole = {name: i for i, name in enumerate(oracle.parameters(problem.model))}
    space = problem.space
    sizes = [p.numel() for p in oracle.parameters(problem.model).values()]
    parts = jac.split(sizes, dim=-1)
    jac = space.restrict(torch.cat([parts[whole[name]] for name in space.names], dim=-1))
    f = oracle.forward(problem.model, problem.x).detach()
    return jac, oracle.contracted(jac, oracle.output_hessian(problem.likelihood, f, problem.y))


def tangent_of(problem: problems.Problem) -> Tangent:
    return Tangent(problem.model, problem.space)


@pytest.mark.parametrize("name", ROWS)
def test_jacobian_and_its_products(name: str) -> None:
    problem = problems.build(name)
    jac, _ = truth(problem)
    with unchanged(problem.model):
        linear = tangent_of(problem).at(problem.x)
        close(linear.rows(), jac)
        v = torch.randn(jac.shape[-1], dtype=jac.dtype)
        close(linear.mv(v).flatten(1), jac @ v)
        u = torch.randn(linear.output.shape, dtype=jac.dtype)
        close(linear.rmv(u), torch.einsum("ncp,nc->p", jac, u.flatten(1)))


@pytest.mark.parametrize("name", ROWS)
def test_full_diagonal_and_blocks(name: str) -> None:
    problem = problems.build(name)
    _, ggn = truth(problem)
    tangent = tangent_of(problem)
    with unchanged(problem.model):
        close(estimate.full(tangent, problem.likelihood, problem.batches).dense(), ggn)
        close(estimate.diagonal(tangent, problem.likelihood, problem.batches).diagonal(), ggn.diagonal())
        for by in ("layer", "tensor"):
            groups = problem.space.groups(by)
            within = groups[:, None] == groups[None, :]
            blocks = estimate.blocks(tangent, problem.likelihood, problem.batches, by=by)
            close(blocks.dense(), ggn * within)


@pytest.mark.parametrize("name", problems.thinned(problems.NAMES))
def test_empirical(name: str) -> None:
    problem = problems.build(name)
    if problem.select is not None:
        pytest.skip("the selection is covered by the GGN")
    expected = oracle.empirical(problem.model, problem.likelihood, problem.x, problem.y)
    with unchanged(problem.model):
        found = estimate.empirical(tangent_of(problem), problem.likelihood, problem.batches)
        close(found.dense(), expected)
        diagonal = estimate.empirical(tangent_of(problem), problem.likelihood, problem.batches, structure="diagonal")
        close(diagonal.diagonal(), expected.diagonal())


@pytest.mark.parametrize("name", problems.thinned(problems.NAMES))
def test_batches_of_one_two_and_duplicates(name: str) -> None:
    """A batch of one, of two, and of a data point repeated: the same rows as in the batch."""
    problem = problems.build(name)
    if name == "micro_batches":
        pytest.skip("gives one data point to a split of two; covered by the batch itself")
    jac, _ = truth(problem)
    tangent = tangent_of(problem)
    with unchanged(problem.model):
        for index in ([0], [1, 1]):
            close(Tangent(problem.model, problem.space).at(pick(problem.x, torch.tensor(index))).rows(), jac[index])
        for index in ([2, 1, 1], [0, 2, 1], [1, 0]):
            close(tangent.at(pick(problem.x, torch.tensor(index))).rows(), jac[index])


def pick(x, index: Tensor):
    if isinstance(x, Tensor):
        return x[index]
    if isinstance(x, tuple):
        return tuple(pick(value, index) for value in x)
    return {key: pick(value, index) for key, value in x.items()}


@pytest.mark.parametrize("name", KRON)
def test_kron_runs_and_is_positive_semidefinite(name: str) -> None:
    problem = problems.build(name)
    _, ggn = truth(problem)
    with unchanged(problem.model):
        for options in ({}, {"sharing": "reduce"}, {"joint_bias": False}):
            curvature = estimate.kflr(tangent_of(problem), problem.likelihood, problem.batches, **options)
            dense = curvature.dense()
            torch.testing.assert_close(dense, dense.mT)
            torch.linalg.cholesky(dense + 1e-9 * dense.abs().max() * torch.eye(len(dense)))
            # a parameter with no influence has no curvature, and the other way round
            assert torch.equal(dense.diagonal() > 1e-14, curvature.diagonal() > 1e-14)
            if options.get("sharing") != "reduce":  # whose sums over positions may cancel: keys, maps before a norm
                assert not bool((dense.diagonal()[ggn.diagonal() > 1e-12] <= 0).any())


@pytest.mark.parametrize("name", EXACT)
def test_parameters_without_factors_have_exact_blocks_or_are_refused_by_name(name: str) -> None:
    problem = problems.build(name)
    _, ggn = truth(problem)
    found = estimate.kflr(tangent_of(problem), problem.likelihood, problem.batches)
    reasons = [block for block in found.blocks if block.reason]
    assert reasons
    for block in reasons:
        where = block.segments.gather(torch.arange(problem.space.size))
        close(block.curvature.dense(), ggn[where][:, where])
    with unchanged(problem.model), pytest.raises(UnsupportedOperationError) as caught:
        estimate.kflr(tangent_of(problem), problem.likelihood, problem.batches, on_unsupported="error")
    message = str(caught.value)
    assert any(f"'{block.name}'" in message for block in reasons), message
    assert "no Kronecker product" in message
    assert "requires_grad=False" in message


def test_parts_of_weights_are_refused() -> None:
    problem = problems.build("selected_by_mask")
    with unchanged(problem.model), pytest.raises(ParameterError, match="cuts through weights"):
        estimate.kflr(tangent_of(problem), problem.likelihood, problem.batches)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_asymmetric_same_padding() -> None:
    """An even kernel pads one side more than the other."""
    model = nn.Sequential(nn.Conv2d(1, 2, (2, 4), padding="same"), nn.Tanh(), nn.Flatten(), nn.Linear(24, 2)).double()
    x, y = torch.randn(3, 1, 3, 4).double(), torch.tensor([0, 1, 1])
    close(estimate.full(Tangent(model), Categorical(), [(x, y)]).dense(), oracle.ggn(model, Categorical(), x, y))


# -- what has to be refused -----------------------------------------------------------------------------------------


def coupled(body) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = problems.Net(body, a=nn.Linear(3, 4), out=nn.Linear(4, 2)).double().eval()
    return model, torch.randn(4, 3).double().flip(0), torch.tensor([0, 1, 0, 1])


COUPLED = {
    "mean over the batch": lambda m, x: m.out(torch.tanh(m.a(x - x.mean(0)))),
    "mean over the batch, between layers": lambda m, x: m.out((h := torch.tanh(m.a(x))) - h.mean(0)),
    "mean over the batch, at the end": lambda m, x: (f := m.out(torch.tanh(m.a(x)))) - f.mean(0),
    "softmax over the batch": lambda m, x: m.out(m.a(x).softmax(0)),
    "cumulative sum over the batch": lambda m, x: m.out(torch.tanh(m.a(x)).cumsum(0)),
    "reversed cumulative sum over the batch": lambda m, x: m.out(torch.tanh(m.a(x)).flip(0).cumsum(0).flip(0)),
    "cumulative sum of the input": lambda m, x: m.out(torch.tanh(m.a(x.cumsum(0)))),
    "neighbours": lambda m, x: m.out(torch.tanh(m.a(x.roll(1, 0)))),
    "pairs": lambda m, x: m.out(torch.tanh(m.a(x)) + torch.tanh(m.a(x.view(2, -1, 3).flip(0).reshape(x.shape)))),
    "largest of the batch": lambda m, x: m.out(torch.tanh(m.a(x / x.abs().max()))),
    "smallest of the batch": lambda m, x: m.out(torch.tanh(m.a(x - x.amin(0)))),
    "sorted": lambda m, x: m.out(torch.tanh(m.a(x.sort(0).values))),
    "attention over the batch": lambda m, x: m.out((m.a(x) @ m.a(x).T).softmax(-1) @ m.a(x)),
    "batch statistics": lambda m, x: m.out(torch.nn.functional.batch_norm(m.a(x), None, None, training=True)),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", COUPLED)
def test_coupled_samples_are_refused(name: str, size: int) -> None:
    model, x, y = coupled(COUPLED[name])
    with unchanged(model), pytest.raises(ModelError):
        estimate.diagonal(Tangent(model), Categorical(), [(x[:size], y[:size])])


@pytest.mark.parametrize("module", [nn.BatchNorm1d(4), nn.Dropout(0.5), nn.AlphaDropout(0.2), nn.RReLU()])
@pytest.mark.parametrize("size", [1, 4])
def test_train_mode_is_refused(module: nn.Module, size: int) -> None:
    model = nn.Sequential(nn.Linear(3, 4), module, nn.Linear(4, 2)).double().train()
    x, y = torch.randn(4, 3).double(), torch.tensor([0, 1, 0, 1])
    for estimator in (estimate.full, estimate.diagonal, estimate.kflr):
        with unchanged(model), pytest.raises(ModelError, match="eval"):
            estimator(Tangent(model), Categorical(), [(x[:size], y[:size])])


@pytest.mark.parametrize("size", [1, 3])
def test_random_model_is_refused(size: int) -> None:
    model = problems.Net(lambda m, x: m.a(x + torch.randn_like(x)), a=nn.Linear(3, 2)).double()
    x = torch.randn(size, 3).double()
    with unchanged(model), pytest.raises(ModelError, match="deterministic"):
        Tangent(model).at(x)


def test_attention_with_dropout_in_train_mode_is_refused() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.3, batch_first=True).double().train()
    with unchanged(layer), pytest.raises(ModelError, match="eval"):
        estimate.diagonal(Tangent(layer), Gaussian(), [(torch.randn(3, 2, 4).double(), torch.randn(3, 2, 4).double())])


def test_unchanged_after_an_error_in_the_middle() -> None:
    """The second batch is bad: BatchNorm buffers, modes and gradients are as before."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double().eval()
    x, y = torch.randn(4, 3).double(), torch.tensor([0, 1, 0, 1])
    bad = x.clone()
    bad[1, 1] = float("nan")
    model[0].weight.grad = torch.ones_like(model[0].weight)
    for estimator in (estimate.full, estimate.diagonal, estimate.blocks, estimate.kflr, estimate.hessian):
        with unchanged(model), pytest.raises(ValueError, match="batch 1"):
            estimator(Tangent(model), Categorical(), [(x, y), (bad, y)])
