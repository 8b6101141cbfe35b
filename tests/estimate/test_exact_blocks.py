"""Parameters that form no Kronecker product: exact blocks in kron and ekfac, whatever operation uses them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import lapwing
import oracle
from lapwing import Laplace, estimate
from lapwing.errors import OptionError, UnsupportedOperationError
from lapwing.estimate.cotangents import exact, monte_carlo, projections
from lapwing.likelihoods import Categorical, Gaussian
from lapwing.linalg import Blocks, CorrectedKronecker, Dense, Diagonal, Kronecker
from lapwing.params import ParamSpace
from lapwing.tangent import Tangent
from problems import Net, parameter
from unchanged import unchanged


class Cube(torch.autograd.Function):
    """Hides its use of a weight from whoever looks at operations."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w**3

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, w = ctx.saved_tensors
        return grad * w**3, (grad * x * 3 * w**2).sum(0)


def relative() -> tuple[Net, Any]:
    """A table of biases by relative position, as in Swin and T5."""
    index = torch.arange(3)[:, None] - torch.arange(3)[None, :] + 2

    def body(m: Any, x: Tensor) -> Tensor:
        scores = x @ x.mT + m.table[index].squeeze(-1)
        return m.out((scores.softmax(-1) @ m.a(x)).mean(1))

    return Net(body, table=parameter(5, 1), a=nn.Linear(2, 3), out=nn.Linear(3, 2)), torch.randn(4, 3, 2)


def state_space() -> tuple[Net, Any]:
    """A decay rate as its logarithm, as in Mamba."""

    def body(m: Any, x: Tensor) -> Tensor:
        state, decay = x.new_zeros(len(x), 2, 3), -torch.exp(m.A_log)
        for step in m.a(x).unbind(1):
            state = torch.exp(decay) * state + step.unsqueeze(-1) * m.B
        return m.out((state * m.D).flatten(1))

    members = {"A_log": parameter(2, 3), "B": parameter(2, 3), "D": parameter(2, 1)}
    return Net(body, **members, a=nn.Linear(2, 2), out=nn.Linear(6, 2)), torch.randn(4, 3, 2)


def scripted() -> nn.Module:
    """Compiled to TorchScript, inside which a mode sees nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that TorchScript is old
        return torch.jit.script(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))


def weight_norm() -> tuple[nn.Module, Any]:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2)), torch.randn(4, 3)


# name: (network and inputs, the parameters that must be exact); hstack has no rule, unlike cat
CASES: dict[str, tuple[Callable[[], tuple[nn.Module, Any]], list[str]]] = {
    "class token": (
        lambda: (
            Net(
                lambda m, x: m.out(torch.tanh(m.a(torch.hstack([m.token.expand(len(x), -1, -1), x])))[:, 0]),
                token=parameter(1, 1, 2),
                a=nn.Linear(2, 3),
                out=nn.Linear(3, 2),
            ),
            torch.randn(4, 3, 2),
        ),
        ["token"],
    ),
    "learned positions": (
        lambda: (
            Net(
                lambda m, x: m.out(torch.tanh(m.a(x) + m.pos[:, torch.tensor([0, 1, 4])]).mean(1)),
                pos=parameter(1, 5, 3),
                a=nn.Linear(2, 3),
                out=nn.Linear(3, 2),
            ),
            torch.randn(4, 3, 2),
        ),
        ["pos"],
    ),
    "relative positions": (relative, ["table"]),
    "embedding bag": (
        lambda: (
            Net(lambda m, t: m.out(torch.tanh(m.bag(t))), bag=nn.EmbeddingBag(6, 3, mode="mean"), out=nn.Linear(3, 2)),
            torch.tensor([[0, 1, 1], [2, 3, 0], [5, 5, 4], [1, 2, 3]]),
        ),
        ["bag.weight"],
    ),
    "baddbmm": (
        lambda: (
            Net(
                lambda m, x: m.out(torch.tanh(torch.baddbmm(m.b, x, m.w.expand(len(x), -1, -1), beta=0.5)).mean(1)),
                b=parameter(1, 3, 3),
                w=parameter(1, 2, 3),
                out=nn.Linear(3, 2),
            ),
            torch.randn(4, 3, 2),
        ),
        ["b", "w"],
    ),
    "cdist": (
        lambda: (
            Net(lambda m, x: m.out(torch.cdist(x, m.c)), c=parameter(4, 3), out=nn.Linear(4, 2)),
            torch.randn(4, 3),
        ),
        ["c"],
    ),
    "decay rate": (state_space, ["A_log"]),
    "weight norm": (weight_norm, ["0.parametrizations.weight.original0", "0.parametrizations.weight.original1"]),
    "custom function": (
        lambda: (Net(lambda m, x: m.out(Cube.apply(x, m.w)), w=parameter(3), out=nn.Linear(3, 2)), torch.randn(4, 3)),
        ["w"],
    ),
    "scripted": (
        lambda: (scripted(), torch.randn(4, 3)),
        ["0.weight", "0.bias", "2.weight", "2.bias"],
    ),
    "one data point at a time": (
        lambda: (
            Net(
                lambda m, x: torch.stack([m.b(torch.tanh(m.a(row))) for row in x]),
                a=nn.Linear(3, 4),
                b=nn.Linear(4, 2),
            ),
            torch.randn(4, 3),
        ),
        ["a.weight", "a.bias", "b.weight", "b.bias"],
    ),
    "a Fourier transform": (
        lambda: (
            Net(
                lambda m, x: m.out(torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(m.w), n=4)),
                w=parameter(4),
                out=nn.Linear(4, 2),
            ),
            torch.randn(4, 4),
        ),
        ["w"],
    ),
    "a product of weights": (
        lambda: (
            Net(
                lambda m, x: m.out(torch.tanh(x @ (m.u @ m.v))),
                u=parameter(3, 2),
                v=parameter(2, 4),
                out=nn.Linear(4, 2),
            ),
            torch.randn(4, 3),
        ),
        ["u", "v"],
    ),
    "a weight that is also added": (
        lambda: (
            Net(lambda m, x: m.out(torch.tanh(x @ m.w) + m.w.sum(0)), w=parameter(3, 4), out=nn.Linear(4, 2)),
            torch.randn(4, 3),
        ),
        ["w"],
    ),
}


def build(name: str) -> tuple[nn.Module, Any, Tensor, list[str]]:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    make, names = CASES[name]
    model, x = make()
    return model.eval(), x, torch.tensor([0, 1, 1, 0]), names


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12 * float(expected.abs().max() + 1e-30))


def block_over(curvature: Blocks, start: int) -> Any:
    return next(block for block in curvature.blocks if block.segments.contains((start, start + 1)))


@pytest.mark.parametrize("estimator", [estimate.kflr, estimate.ekfac], ids=["kron", "ekfac"])
@pytest.mark.parametrize("name", CASES)
def test_exact_up_to_the_limit_and_their_diagonal_beyond(name: str, estimator: Callable) -> None:
    model, x, y, names = build(name)
    ggn = oracle.ggn(model, Categorical(), x, y)
    for limit, options in ((1024, {}), (1, {"sharing": "reduce", "joint_bias": False})):
        with unchanged(model):
            found = estimator(Tangent(model), Categorical(), [(x, y)], dense_limit=limit, **options)
        space, dense = ParamSpace.of(model), found.dense()
        for parameter_name in names:
            part = space.segment(parameter_name)
            size = part.stop - part.start
            small = size <= limit
            close(dense[part, part], ggn[part, part] if small else ggn[part, part].diagonal().diag())
            block = block_over(found, part.start)
            assert isinstance(block.curvature, Dense if small else Diagonal)
            assert block.segments.size == size
    torch.linalg.cholesky(dense + 1e-9 * torch.eye(len(dense)))


@pytest.mark.parametrize("name", ["class token", "a product of weights", "scripted"])
@pytest.mark.parametrize("cotangents", [exact, monte_carlo(2), projections(2)], ids=["exact", "mc", "projections"])
def test_every_source_of_curvature(name: str, cotangents: Callable) -> None:
    """The same draws in exact blocks per tensor."""
    model, x, y, names = build(name)

    def drawn(estimator: Callable, **options: Any) -> Tensor:
        generator = torch.Generator().manual_seed(3)
        options |= {"cotangents": cotangents, "generator": generator}
        return estimator(Tangent(model), Categorical(), [(x, y)], **options).dense()

    expected, found = drawn(estimate.blocks, by="tensor"), drawn(estimate.kflr)
    for parameter_name in names:
        part = ParamSpace.of(model).segment(parameter_name)
        close(found[part, part], expected[part, part])
    empirical = estimate.empirical(Tangent(model), Categorical(), [(x, y)], structure="kron").dense()
    gradients = oracle.empirical(model, Categorical(), x, y)
    for parameter_name in names:
        part = ParamSpace.of(model).segment(parameter_name)
        close(empirical[part, part], gradients[part, part])


@pytest.mark.parametrize("structure", ["kron", "ekfac"])
@pytest.mark.parametrize("name", CASES)
def test_what_is_exact_is_said_in_one_line(name: str, structure: str) -> None:
    model, x, y, names = build(name)
    la = Laplace(model, "classification", "all", structure)
    la.fit([(x, y)])
    said = la.exact_blocks
    assert said.startswith("Exact blocks instead of Kronecker factors: ")
    assert "\n" not in said
    assert all(f"'{each}' (dense)" in said for each in names)
    plain = Laplace(nn.Linear(3, 2), "classification", "all", structure)
    plain.fit([(torch.randn(4, 3), y)])
    assert plain.exact_blocks == ""


@pytest.mark.parametrize("name", CASES)
def test_an_error_instead_on_request(name: str) -> None:
    model, x, y, names = build(name)
    for estimator in (estimate.kflr, estimate.ekfac, estimate.kfac):
        with unchanged(model), pytest.raises(UnsupportedOperationError) as caught:
            estimator(Tangent(model), Categorical(), [(x, y)], on_unsupported="error", dense_limit=2)
        message = str(caught.value)
        assert any(f"'{each}'" in message for each in names), message
        assert "no Kronecker product" in message
        assert "Leave on_unsupported out" in message
        assert "Raise dense_limit" not in message


def test_the_option_is_checked_at_the_face() -> None:
    model = nn.Linear(3, 2)
    for structure in ("kron", "ekfac"):
        with pytest.raises(OptionError, match=r"on_unsupported 'errors'.*Did you mean 'error'"):
            Laplace(model, "classification", "all", structure, on_unsupported="errors")
    with pytest.raises(OptionError, match="on_unsupported"):
        Laplace(model, "classification", "all", "diag", on_unsupported="error")


# -- the posterior over such blocks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1024, 1], ids=["dense", "diagonal"])
@pytest.mark.parametrize("structure", ["kron", "ekfac"])
@pytest.mark.parametrize("name", ["class token", "a product of weights", "one data point at a time", "embedding bag"])
def test_predictions_evidence_and_files(name: str, structure: str, limit: int, tmp_path: Path) -> None:
    model, x, _, _ = build(name)
    y = torch.randn(4, 2)
    la = Laplace(model, "regression", "all", structure, sigma_noise=0.7, prior_precision=1.5, dense_limit=limit)
    la.fit([(x, y)])
    dense = la.fitted.curvature.dense() / 0.7**2
    precision = dense + 1.5 * torch.eye(len(dense))
    jac = oracle.jacobian(model, x)
    expected = jac @ torch.linalg.solve(precision, jac.mT)
    mean, covariance = la(x)
    close(covariance, expected)
    close(mean, oracle.forward(model, x).detach())
    weights = ParamSpace.of(model).values(model)
    logdet = torch.linalg.slogdet(precision)[1] - len(dense) * torch.tensor(1.5).log()
    expected = la.log_likelihood - 0.5 * (logdet + 1.5 * weights.square().sum())
    close(la.log_marginal_likelihood(), expected)
    la.prior_precision = 1 + torch.arange(len(ParamSpace.of(model).names)) / 3
    drawn = la.predictive_samples(x, n_samples=3, generator=torch.Generator().manual_seed(0))
    assert bool(drawn.isfinite().all())

    la.save(tmp_path / "la.lap")
    again = lapwing.load(tmp_path / "la.lap", build(name)[0])
    other = Laplace(model, "regression", "all", structure, dense_limit=limit)
    other.load_state_dict(la.state_dict())
    for each in (again, other):
        assert each.exact_blocks == la.exact_blocks
        assert torch.equal(each(x)[1], la(x)[1])
    checked = Laplace(model, "regression", "all", structure, sigma_noise=0.7, dense_limit=limit)
    if structure == "kron":  # the bases of parts do not add up
        checked.fit([(x, y)] * 3, checkpoint=tmp_path / "fit", checkpoint_every=1)
        close(checked.fitted.curvature.dense(), 3 * la.fitted.curvature.dense())


def test_biases_apart_and_subsets() -> None:
    model, x, y, _ = build("class token")
    whole = ParamSpace.of(model)
    ggn = oracle.ggn(model, Categorical(), x, y)
    for space in (whole.select(names=["token", "a.weight"]), whole.select(names=["token"])):
        found = estimate.kflr(Tangent(model, space), Categorical(), [(x, y)], joint_bias=False)
        part, own = whole.segment("token"), space.segment("token")
        close(found.dense()[own, own], ggn[part, part])


# -- batches that use a parameter in different ways -------------------------------------------------------------------


class Ragged(nn.Module):
    """Runs its first layer on the tokens that are there, or on all of them where none is missing: another route."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(2, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        if bool(keep.all()):
            return self.out(torch.tanh(self.a(x)).mean(1))
        h = x.new_zeros(*x.shape[:2], 3).masked_scatter(keep.unsqueeze(-1), torch.tanh(self.a(x[keep])))
        return self.out(h.mean(1))


def ragged() -> tuple[Ragged, list[Any], list[Any]]:
    """A model, batches without padding, and batches with some."""
    torch.manual_seed(1)
    torch.set_default_dtype(torch.float64)
    model = Ragged()

    def batch(missing: bool) -> tuple[tuple[Tensor, Tensor], Tensor]:
        keep = torch.ones(4, 3, dtype=torch.bool)
        if missing:
            keep[0, 2], keep[1, 1:], keep[3, 2] = False, False, False
        return (torch.randn(4, 3, 2), keep), torch.randint(2, (4,))

    return model, [batch(False), batch(False)], [batch(True), batch(True)]


def ggn_of(model: nn.Module, batches: list[Any]) -> Tensor:
    return torch.stack([oracle.ggn(model, Categorical(), x, y) for x, y in batches]).sum(0)


@pytest.mark.parametrize("limit", [1024, 1])
def test_products_in_a_later_batch_join_an_exact_block(limit: int) -> None:
    model, plain, padded = ragged()
    batches = [*padded, *plain, padded[0]]
    ggn = ggn_of(model, batches)
    for estimator in (estimate.kflr, estimate.ekfac):
        found = estimator(Tangent(model), Categorical(), batches, dense_limit=limit).dense()
        for name in ("a.weight", "a.bias"):
            part = ParamSpace.of(model).segment(name)
            close(found[part, part], ggn[part, part] if limit > 1 else ggn[part, part].diagonal().diag())


def test_rows_of_another_form_in_a_later_batch_join_a_kronecker_block() -> None:
    """Their matrices M as one more role, (sum M M^T) (x) (sum M^T M) / sum |M|^2; the nearest product to both."""
    model, plain, padded = ragged()
    space = ParamSpace.of(model)
    segments = (slice(0, 6), slice(6, 9))
    assert (space.segment("a.weight"), space.segment("a.bias")) == segments
    tangent = Tangent(model)
    both = estimate.kflr(tangent, Categorical(), [*plain, *padded])
    block = block_over(both, 0).curvature
    assert isinstance(block, Kronecker)
    assert [term.role for term in block.terms] == ["formed", "upright"]
    rows = []
    for x, y in padded:
        jac, f = oracle.jacobian(model, x), oracle.forward(model, x).detach()
        values, vectors = torch.linalg.eigh(oracle.output_hessian(Categorical(), f, y))
        root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
        rows.append((root.mT @ jac)[..., :9].flatten(0, 1))
    matrix = torch.cat([torch.cat(rows)[:, :6].reshape(-1, 3, 2), torch.cat(rows)[:, 6:].unsqueeze(-1)], dim=-1)
    formed = block.terms[0]
    close(formed.rows[0], (matrix @ matrix.mT).sum(0))
    close(formed.cols[0], (matrix.mT @ matrix).sum(0))
    (count,) = formed.count
    close(count, matrix.square().sum())
    close((formed.rows[0].trace() * formed.cols[0].trace()) / count, ggn_of(model, padded)[:9, :9].trace())
    alone = estimate.kflr(tangent, Categorical(), plain).blocks[0].curvature
    assert isinstance(alone, Kronecker)
    close(block.terms[1].rows, alone.terms[0].rows)
    dense = both.dense()
    torch.linalg.cholesky(dense + 1e-9 * torch.eye(len(dense)))


@pytest.mark.parametrize("groups", [1, 2])
def test_rows_of_another_form_do_not_mind_how_the_data_are_split(groups: int) -> None:
    """Each group of a convolution has a trace of its own, which adds up over the data."""

    def body(m: Any, x: Tensor, derived: Tensor) -> Tensor:
        weight = m.a.weight * torch.tanh(m.a.weight) if bool(derived) else m.a.weight
        return m.out(torch.tanh(F.conv1d(x, weight, m.a.bias, groups=groups)).mean(-1))

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model = Net(body, a=nn.Conv1d(4, 4, 3, groups=groups), out=nn.Linear(4, 2))
    batches = [((torch.randn(5, 4, 6), torch.tensor(i > 0)), torch.randint(2, (5,))) for i in range(4)]
    whole, added = (Laplace(model, "classification", "all", "kron") for _ in range(2))
    whole.fit(batches)
    added.fit(batches[:1])
    for batch in batches[1:]:
        added.fit([batch], override=False)
    close(added.fitted.curvature.dense(), whole.fitted.curvature.dense())


def test_the_corrected_diagonal_is_exact_for_any_form() -> None:
    model, plain, padded = ragged()
    batches = [plain[0], padded[0], padded[1], plain[1]]
    found = estimate.ekfac(Tangent(model), Categorical(), batches)
    block = block_over(found, 0).curvature
    assert isinstance(block, CorrectedKronecker)
    ggn = ggn_of(model, batches)[:9, :9]
    close(block.dense().trace(), ggn.trace())
    part = block.parts[0]
    q = torch.kron(part.row_vectors[0], part.col_vectors[0])
    order = block.layout.gather(torch.arange(9.0)).flatten().long()
    close(part.values.flatten(), (q.mT @ ggn[order][:, order] @ q).diagonal())
    again = estimate.ekfac(Tangent(model), Categorical(), batches, basis=found)
    close(again.dense(), found.dense())


@pytest.mark.parametrize("first", ["plain", "padded"])
def test_data_may_be_added_in_parts_that_differ(first: str, tmp_path: Path) -> None:
    model, plain, padded = ragged()
    parts = (plain, padded) if first == "plain" else (padded, plain)
    whole, added, checked = (Laplace(model, "classification", "all", "kron") for _ in range(3))
    whole.fit(parts[0] + parts[1])
    added.fit(parts[0])
    added.fit(parts[1], override=False)
    checked.fit(parts[0] + parts[1], checkpoint=tmp_path / "fit", checkpoint_every=1)
    for each in (added, checked):
        close(each.fitted.curvature.dense(), whole.fitted.curvature.dense())
        assert each.exact_blocks == whole.exact_blocks
    corrected = Laplace(model, "classification", "all", "ekfac")
    corrected.fit(parts[0])
    corrected.fit(parts[1], override=False)
    x, _ = plain[0]
    assert bool(corrected(x).isfinite().all())
    assert bool(whole(padded[0][0]).isfinite().all())


def test_layers_that_the_first_data_did_not_use_can_be_added() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])

        def forward(self, x: Tensor, head: Tensor) -> Tensor:
            return self.heads[int(head)](x)

    torch.set_default_dtype(torch.float64)
    model = Heads()
    batches = [((torch.randn(6, 3), torch.tensor(i % 2)), torch.randn(6, 2)) for i in range(4)]
    whole = estimate.kflr(Tangent(model), Gaussian(), batches)
    found = estimate.kflr(Tangent(model), Gaussian(), batches[::2])
    rest = estimate.kflr(Tangent(model), Gaussian(), batches[1::2], added_to=found)
    expected = found.dense() + estimate.kflr(Tangent(model), Gaussian(), batches[1::2]).dense()
    close((found + rest).dense(), expected)
    found = found.pooled(rest)
    assert [block.name for block in found.blocks] == [block.name for block in whole.blocks]
    close(found.dense(), whole.dense())


@pytest.mark.parametrize("bias", [True, False])
def test_experts_that_some_of_the_data_do_not_use(bias: bool, tmp_path: Path) -> None:
    """A weight without a bias has the same segments as the zeros that stand for it where no data have reached it."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(3, 4, bias), nn.Linear(3, 4, bias)])
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor, number: Tensor) -> Tensor:
            return self.head(torch.tanh(self.experts[int(number)](x)))

    torch.set_default_dtype(torch.float64)
    model = Experts()
    batches = [((torch.randn(6, 3), torch.tensor(i % 2)), torch.randint(2, (6,))) for i in range(4)]
    whole, added, checked = (Laplace(model, "classification", "all", "kron") for _ in range(3))
    whole.fit(batches)
    added.fit(batches[::2])
    added.fit(batches[1::2], override=False)
    checked.fit(batches, checkpoint=tmp_path / "fit", checkpoint_every=1)
    for each in (added, checked):
        close(each.fitted.curvature.dense(), whole.fitted.curvature.dense())
    first = estimate.kflr(Tangent(model), Categorical(), batches[::2])
    second = estimate.kflr(Tangent(model), Categorical(), batches[1::2], added_to=first)
    close((second + first).dense(), (first + second).dense())
    close(second.dense(), estimate.kflr(Tangent(model), Categorical(), batches[1::2]).dense())


def test_a_third_task_is_added_to_the_sum_of_two() -> None:
    torch.set_default_dtype(torch.float64)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    tasks = [[(torch.randn(6, 3), torch.randint(2, (6,)))] for _ in range(3)]
    total = estimate.kflr(Tangent(model), Categorical(), tasks[0])
    for task in tasks[1:]:
        total = total + estimate.kflr(Tangent(model), Categorical(), task, added_to=total)
    close(total.dense(), sum(estimate.kflr(Tangent(model), Categorical(), task).dense() for task in tasks))
    corrected = estimate.ekfac(Tangent(model), Categorical(), tasks[0], basis=total)
    close(corrected.diagonal().sum(), ggn_of(model, tasks[0]).trace())


def test_a_path_that_only_one_batch_takes_unseen() -> None:
    """The operations that can be seen are the same in both batches; a custom function reads the weight in one."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model = Net(
        lambda m, x, flag: m.out(m.a(Cube.apply(x, m.w if bool(flag[0]) else m.c))),
        w=parameter(3),
        c=nn.Buffer(torch.randn(3)),
        a=nn.Linear(3, 4),
        out=nn.Linear(4, 2),
    )
    batches = [((torch.randn(4, 3), torch.full((4,), flag)), torch.randint(2, (4,))) for flag in (0, 1, 0, 1)]
    ggn = ggn_of(model, batches)
    found = estimate.kflr(Tangent(model), Categorical(), batches)
    part = ParamSpace.of(model).segment("w")
    close(found.dense()[part, part], ggn[part, part])


def test_parts_of_a_weight_that_a_later_batch_uses_whole() -> None:
    """Thirds of a packed projection first, then all of it at once: cut where the blocks are."""

    def body(m: Any, x: Tensor, together: Tensor) -> Tensor:
        if bool(together):
            q, k, v = F.linear(x, m.w).chunk(3, -1)
        else:
            q, k, v = (F.linear(x, part) for part in m.w.chunk(3))
        return m.out(torch.tanh(q) * k + v)

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model = Net(body, w=parameter(6, 3), out=nn.Linear(2, 2))
    x, y = torch.randn(4, 3), torch.randint(2, (4,))
    batches = [((x, torch.tensor(together)), y) for together in (0, 1)]
    found = estimate.kflr(Tangent(model), Categorical(), batches)
    assert [block.segments.intervals[0] for block in found.blocks[:3]] == [(0, 6), (6, 12), (12, 18)]
    assert bool(found.diagonal().isfinite().all())
    found = estimate.kflr(Tangent(model), Categorical(), batches[::-1])
    assert found.blocks[0].segments.intervals == ((0, 18),)


def pairs(m: Any, x: Tensor) -> Tensor:
    return m.layer(x, x[:, :2])


@pytest.mark.parametrize(
    ("layer", "body", "shape"),
    [
        (nn.Bilinear(3, 2, 4), pairs, (5, 3)),
        (nn.Linear(3, 4), lambda m, x: m.layer(x), (5, 3)),
        (nn.Conv1d(3, 2, 2), lambda m, x: m.layer(x).flatten(1), (5, 3, 6)),
        (nn.ConvTranspose1d(3, 2, 2), lambda m, x: m.layer(x).flatten(1), (5, 3, 6)),
        (nn.LayerNorm(3), lambda m, x: m.layer(x), (5, 3)),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, nn.Module) else "",
)
def test_a_rule_is_right_without_the_fallback(layer: nn.Module, body: Callable, shape: tuple[int, ...]) -> None:
    """Weights whose rule gives wrong rows are differentiated one data point at a time: right, and an exact block."""
    model, x = Net(body, layer=layer).double(), torch.randn(shape, dtype=torch.float64)
    tangent = Tangent(model)
    found = estimate.kflr(tangent, Gaussian(), [(x, torch.zeros_like(model(x)))], on_unsupported="error")
    assert not [block.name for block in found.blocks if block.reason]
    torch.testing.assert_close(tangent.at(x).rows(), oracle.jacobian(model, x), rtol=1e-9, atol=1e-12)
