"""Tasks one after the other: the posterior of all data in linear-Gaussian models; what each method says elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
from torch import Tensor, nn

import problems
from lapwing import Laplace
from lapwing.errors import DataError, LapwingError, NotFittedError, OptionError, ParameterError, StorageError
from lapwing.estimate import by_name
from lapwing.likelihoods import Categorical, Gaussian
from lapwing.linalg import Blocks, Diagonal, KroneckerSum, total
from lapwing.params import ParamSpace
from lapwing.priors import Prior
from lapwing.tangent import Tangent
from lapwing.training import Continual, Epoch, GaussNewton
from lapwing.training.quadratic_term import Anchor, QuadraticTerm
from unchanged import unchanged

EXACT: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-11}
Pairs = list[tuple[Tensor, Tensor]]


def newton(params: list[Tensor]) -> torch.optim.Optimizer:
    """By gradients alone: a line search compares losses, whose rounding hides the last eight digits of the mode."""
    return torch.optim.LBFGS(params, max_iter=100, tolerance_grad=1e-15, tolerance_change=0.0)


def adam(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, 1e-2)


def classes(seed: int, n: int = 12, batch: int = 6) -> Pairs:
    """Classes of inputs [n, 3], in batches."""
    drawn = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=drawn, dtype=torch.float64)
    y = torch.randint(2, (n,), generator=drawn)
    return [(x[i : i + batch], y[i : i + batch]) for i in range(0, n, batch)]


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def numbers(seed: int, orthogonal: bool = False, n: int = 8) -> Pairs:
    """Targets of a linear model; with `orthogonal` inputs the weights are independent given the data."""
    drawn = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=drawn, dtype=torch.float64)
    if orthogonal:
        x = torch.linalg.qr(x)[0] * torch.rand(3, generator=drawn, dtype=torch.float64)
    return [(x, torch.randn(n, 1, generator=drawn, dtype=torch.float64))]


@pytest.mark.parametrize("structure", ["full", "kron", "ekfac", "blocks", "diag"])
def test_linear_gaussian_tasks_in_sequence_have_the_posterior_of_all_data(structure: str) -> None:
    """One output: G is a number, so that every structure but the diagonal one holds the posterior for any inputs."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    tasks = [numbers(seed, structure == "diag") for seed in range(3)]
    continual = Continual(model, Gaussian(0.5), structure=structure, prior_precision=0.7)
    for task in tasks:
        continual.learn(task, epochs=3, optimizer=newton)
    x, y = (torch.cat(each) for each in zip(*(task[0] for task in tasks), strict=True))
    precision = x.T @ x / 0.25 + 0.7 * torch.eye(3, dtype=torch.float64)
    mean = torch.linalg.solve(precision, x.T @ y / 0.25).squeeze(1)
    torch.testing.assert_close(continual.posterior.mean, mean, **EXACT)
    torch.testing.assert_close(continual.posterior.precision.to_matrix(), precision, **EXACT)
    assert continual.tasks == 3


@pytest.mark.parametrize("structure", ["full", "kron", "ekfac", "diag"])
def test_one_task_is_the_plain_fit(structure: str) -> None:
    model, data = network(), classes(0)
    continual = Continual(model, "classification", structure=structure, prior_precision=2.0)
    learned = continual.learn(data, epochs=2, optimizer=adam)
    la = Laplace(model, "classification", "all", structure, prior_precision=2.0)
    la.fit(data)
    assert (learned.task, learned.points, len(learned.losses)) == (0, 12, 2)
    x = torch.randn(5, 3, dtype=torch.float64)
    torch.testing.assert_close(continual.predict(x), la(x), **EXACT)
    la.prior_precision = 5.0
    torch.testing.assert_close(continual.predict(x, prior_precision=5.0), la(x), **EXACT)
    la.prior_precision = 2.0
    torch.testing.assert_close(continual.posterior.precision.to_matrix(), la.posterior.precision.to_matrix(), **EXACT)


@pytest.mark.parametrize("method", ["online", "ewc"])
@pytest.mark.parametrize("structure", ["full", "kron", "ekfac", "diag"])
def test_the_gradient_of_a_step_is_that_of_the_dense_quadratic(structure: str, method: str) -> None:
    model = network()
    continual = Continual(model, "classification", method=method, structure=structure, multiplier=3.0)
    moments: list[tuple[Tensor, Tensor]] = []
    for seed in range(3):
        continual.learn(classes(seed), epochs=1, optimizer=adam)
        la = Laplace(model, "classification", "all", structure)
        la.fit(classes(seed))
        moments.append((continual.space.values(model), 3 * la.curvature.dense()))
    theta = torch.randn(continual.space.size, dtype=torch.float64).requires_grad_()
    if method == "online":
        away = theta - moments[-1][0]
        value = away @ (sum(H for _, H in moments) + torch.eye(len(theta), dtype=torch.float64)) @ away / 2
    else:
        value = theta.square().sum() / 2 + sum((theta - m) @ H @ (theta - m) / 2 for m, H in moments)
    assert isinstance(value, Tensor)
    (expected,) = torch.autograd.grad(value, theta)
    torch.testing.assert_close(continual.penalty(theta.detach()), value.detach(), **EXACT)
    anchors, base = continual._prior(continual.space)
    found, gradient = QuadraticTerm.of(anchors, base, continual.space, 1).value_and_gradient(theta.detach())
    torch.testing.assert_close(found, value.detach(), **EXACT)
    torch.testing.assert_close(gradient, expected, **EXACT)


@pytest.mark.parametrize("name", problems.thinned(problems.NAMES, every=8))
def test_the_gradient_is_right_for_every_kind_of_layer(name: str) -> None:
    """Two kept terms of convolutions, tables, attention, recurrent layers and vectors, against their dense sum."""
    problem = problems.build(name, 0)
    if not problem.kron or problem.select is not None:
        pytest.skip("no Kronecker structure over all weights")
    space = problem.space
    tangent = Tangent(problem.model, space, evaluate=True)
    curvature = by_name("kron")(tangent, problem.likelihood, problem.batches)
    torch.manual_seed(0)
    mean, theta = torch.randn(2, space.size, dtype=torch.float64)
    anchor = Anchor(mean, total(curvature, curvature * 2.0))
    value, gradient = QuadraticTerm.of([anchor], Prior.isotropic(space, 0.5), space, 1).value_and_gradient(theta)
    pulled = 3 * curvature.dense() @ (theta - mean)
    torch.testing.assert_close(gradient, pulled + 0.5 * theta, **EXACT)
    torch.testing.assert_close(value, (theta - mean) @ pulled / 2 + theta.square().sum() / 4, **EXACT)


def test_kept_terms_are_those_of_the_tasks() -> None:
    model = network()
    continual = Continual(model, "classification", structure="kron")
    for seed in range(3):
        continual.learn(classes(seed), epochs=1, optimizer=adam)
    curvature = continual.memory.curvature
    assert isinstance(curvature, Blocks)
    for block in curvature.blocks:
        assert isinstance(block.curvature, KroneckerSum)
        assert len(block.curvature.parts) == 3
    assert continual.merge_error == 0


def test_the_term_is_divided_by_the_data_points_and_added_to_the_gradient() -> None:
    model = network()
    space = ParamSpace.of(model)
    anchor = Anchor(torch.zeros(space.size, dtype=torch.float64), Diagonal(torch.ones(space.size).double()))
    term = QuadraticTerm.of([anchor], Prior.isotropic(space, 1.0), space, points=4)
    for tensor in model.parameters():
        tensor.grad = torch.ones_like(tensor)
    value, add_gradient = term.at(list(model.parameters()))
    add_gradient(0.5)
    theta = space.values(model)
    torch.testing.assert_close(value, theta.square().sum() / 4, **EXACT)
    found = space.ravel({name: tensor.grad for name, tensor in model.named_parameters() if tensor.grad is not None})
    torch.testing.assert_close(found, 1 + 0.5 * 2 * theta / 4, **EXACT)


# -- methods -----------------------------------------------------------------------------------------------------------


def test_the_multiplier_is_on_the_curvature_of_every_task() -> None:
    dense = {}
    for multiplier in (1.0, 10.0):
        model = network()
        continual = Continual(model, "classification", structure="full", multiplier=multiplier)
        continual.learn(classes(0), epochs=1, optimizer=adam)
        assert continual.memory.curvature is not None
        dense[multiplier] = continual.memory.curvature.dense()
    torch.testing.assert_close(dense[10.0], 10 * dense[1.0], **EXACT)


def test_non_online_takes_all_curvatures_at_the_latest_weights() -> None:
    model = network()
    continual = Continual(model, "classification", method="non_online", structure="full")
    for seed in range(3):
        continual.learn(classes(seed), epochs=2, optimizer=adam)
    la = Laplace(model, "classification", "all", "full")
    la.fit([batch for seed in range(3) for batch in classes(seed)])
    torch.testing.assert_close(continual.posterior.precision.to_matrix(), la.posterior.precision.to_matrix(), **EXACT)
    theta = torch.randn(continual.space.size, dtype=torch.float64)
    away = theta - continual.posterior.mean
    torch.testing.assert_close(continual.penalty(theta), away @ la.posterior.precision.to_matrix() @ away / 2, **EXACT)


def test_joint_training_is_training_on_all_data() -> None:
    """In a linear-Gaussian model, where that has one answer."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    continual = Continual(model, Gaussian(0.5), method="joint", structure="full", prior_precision=0.7)
    tasks = [numbers(seed) for seed in range(2)]
    for task in tasks:
        continual.learn(task, epochs=60, optimizer=lambda params: torch.optim.SGD(params, 0.05))
    x, y = (torch.cat(each) for each in zip(*(task[0] for task in tasks), strict=True))
    precision = x.T @ x / 0.25 + 0.7 * torch.eye(3, dtype=torch.float64)
    torch.testing.assert_close(continual.posterior.precision.to_matrix(), precision, **EXACT)
    mode = torch.linalg.solve(precision, x.T @ y / 0.25).squeeze(1)
    # steps on a task at a time go around the mode of both, within the learning rate
    assert float((continual.posterior.mean - mode).norm()) < 0.2 * float(mode.norm())
    torch.testing.assert_close(continual.penalty(mode), 0.7 * mode.square().sum() / 2, **EXACT)


def test_sequential_training_forgets() -> None:
    """The second task is learnt under the base prior alone, wherever the first has led."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    continual = Continual(model, Gaussian(0.5), method="sequential", prior_precision=0.7)
    for seed in range(2):
        continual.learn(numbers(seed), epochs=3, optimizer=newton)
    x, y = numbers(1)[0]
    alone = torch.linalg.solve(x.T @ x / 0.25 + 0.7 * torch.eye(3, dtype=torch.float64), x.T @ y / 0.25)
    torch.testing.assert_close(model.weight.detach(), alone.T, **EXACT)
    torch.testing.assert_close(continual.predict(x, pred="map"), model(x).detach(), **EXACT)
    with pytest.raises(OptionError, match="no posterior"):
        continual.predict(x)


def test_importances_are_those_of_a_trace_by_hand() -> None:
    """Two tasks of one weight each step by gradient descent; 5.28 worked out with plain numbers."""
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    one = torch.ones(2, 1, dtype=torch.float64)
    continual = Continual(model, "regression", method="si", prior_precision=0.5, multiplier=3.0, epsilon=0.01)
    anchors: list[tuple[float, float]] = []
    weight = 0.0
    for target in (1.0, -1.0):
        continual.learn([(one, target * one)], epochs=4, optimizer=lambda params: torch.optim.SGD(params, 0.1))
        start, omega = weight, 0.0
        for _ in range(4):
            slope = weight - target  # of the loss of a point: 1/2 (w - target)^2
            pull = (0.5 * weight + sum(big * (weight - mean) for mean, big in anchors)) / 2
            step = -0.1 * (slope + pull)
            omega -= 2 * slope * step  # of both points
            weight += step
        anchors.append((weight, 3.0 * max(omega, 0.0) / ((weight - start) ** 2 + 0.01)))
    found = [(anchor.mean.item(), anchor.curvature.dense().item()) for anchor in continual.memory.anchors]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(anchors), **EXACT)
    assert anchors[0][1] > 0


@pytest.mark.parametrize("terms", ["factors", "nearest"])
def test_merged_products_say_how_far_they_are_from_the_sum(terms: str) -> None:
    kept, merged = (Continual(network(), "classification", terms=each) for each in ("keep", terms))
    for continual in (kept, merged):
        for seed in range(2):
            # no training: the same weights, so that the curvatures are the same
            continual.learn(classes(seed), epochs=1, optimizer=lambda params: torch.optim.SGD(params, 0.0))
    assert kept.memory.curvature is not None
    assert merged.memory.curvature is not None
    whole, one = kept.memory.curvature.dense(), merged.memory.curvature.dense()
    torch.testing.assert_close(merged.merge_error, float((whole - one).norm() / one.norm()), rtol=1e-6, atol=0)
    if terms == "factors":
        torch.testing.assert_close(one.trace(), whole.trace(), **EXACT)
    for seed in range(2, 4):
        for continual in (kept, merged):
            continual.learn(classes(seed), epochs=1, optimizer=lambda params: torch.optim.SGD(params, 0.0))
    whole, one = kept.memory.curvature.dense(), merged.memory.curvature.dense()
    assert float((whole - one).norm() / one.norm()) <= merged.merge_error


# -- heads -------------------------------------------------------------------------------------------------------------


def make_head() -> nn.Module:
    return nn.Linear(4, 2).double()


def body() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh()).double()


@pytest.mark.parametrize("structure", ["kron", "ekfac", "diag", "blocks"])
def test_heads_keep_their_weights_and_the_shared_ones_the_posterior(structure: str) -> None:
    model, heads = body(), [make_head() for _ in range(2)]
    continual = Continual(model, "classification", structure=structure, heads=heads, prior_precision=0.5)
    continual.learn(classes(0), epochs=2, optimizer=adam)
    first = [p.detach().clone() for p in heads[0].parameters()]
    curvature = [_fitted(model, heads[0], structure, 0)]
    continual.learn(classes(1), epochs=2, optimizer=adam)
    assert all(torch.equal(a, b) for a, b in zip(first, heads[0].parameters(), strict=True))
    curvature.append(_fitted(model, heads[1], structure, 1))
    shared = continual.space.size
    base = 0.5 * torch.eye(shared, dtype=torch.float64)
    expected = sum((each[:shared, :shared] for each in curvature), start=base)
    torch.testing.assert_close(continual.posterior.precision.to_matrix(), expected, **EXACT)
    for number, own in enumerate(curvature):
        whole = continual.posterior_of(number).precision.to_matrix()
        torch.testing.assert_close(whole[:shared, :shared], expected, **EXACT)
        at_head = own[shared:, shared:] + 0.5 * torch.eye(len(own) - shared, dtype=torch.float64)
        torch.testing.assert_close(whole[shared:, shared:], at_head, **EXACT)
        assert not bool(whole[:shared, shared:].any())
    x = torch.randn(4, 3, dtype=torch.float64)
    torch.testing.assert_close(continual.predict(x, 0, pred="map"), heads[0](model(x)).softmax(1).detach(), **EXACT)
    assert continual.predict(x, 1).shape == (4, 2)  # pyright: ignore[reportAttributeAccessIssue]
    both = torch.stack([continual.scores(x, number) for number in range(2)])
    torch.testing.assert_close(continual.scores(x), both.amin(0), **EXACT)
    with pytest.raises(OptionError, match="task 2 has no head"):
        continual.learn(classes(2), epochs=1)


def _fitted(model: nn.Module, head: nn.Module, structure: str, seed: int) -> Tensor:
    la = Laplace(nn.Sequential(model, head), "classification", "all", structure)
    la.fit(classes(seed))
    return la.curvature.dense()


def test_a_new_head_begins_at_the_base_prior() -> None:
    model = body()
    continual = Continual(model, "classification", heads=make_head, prior_precision=0.5)
    continual.learn(classes(0), epochs=1, optimizer=adam)
    space = ParamSpace.of(nn.Sequential(model, make_head()))
    anchors, base = continual._prior(space)
    theta = torch.randn(space.size, dtype=torch.float64)
    shared, own = theta[: continual.space.size], theta[continual.space.size :]
    value, _ = QuadraticTerm.of(anchors, base, space, 1).value_and_gradient(theta)
    torch.testing.assert_close(value, continual.penalty(shared) + 0.5 * own.square().sum() / 2, **EXACT)


@pytest.mark.parametrize("method", ["joint", "non_online", "ewc", "si", "sequential"])
def test_every_method_has_heads(method: str) -> None:
    model = body()
    continual = Continual(model, "classification", method=method, heads=make_head)
    for seed in range(2):
        continual.learn(classes(seed), epochs=1, optimizer=adam)
    x = torch.randn(4, 3, dtype=torch.float64)
    for number in range(2):
        expected = continual.heads[number](model(x)).softmax(1).detach()
        torch.testing.assert_close(continual.predict(x, number, pred="map"), expected, **EXACT)


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["online", "ewc", "si", "sequential"])
@pytest.mark.parametrize("heads", [None, make_head])
def test_a_file_goes_on_bit_for_bit(method: str, heads: Any, tmp_path: Path) -> None:
    make = network if heads is None else body
    model = make()
    continual = Continual(model, "classification", method=method, heads=heads)
    for seed in range(2):
        continual.learn(classes(seed), epochs=2, optimizer=adam)
    continual.save(tmp_path / "tasks.lapwing")
    torch.manual_seed(5)
    continual.learn(classes(2), epochs=2, optimizer=adam)
    other = make()
    loaded = Continual.load(tmp_path / "tasks.lapwing", other, heads=heads)
    assert loaded.tasks == 2
    torch.manual_seed(5)
    loaded.learn(classes(2), epochs=2, optimizer=adam)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    theta = torch.randn(continual.space.size, dtype=torch.float64)
    assert torch.equal(continual.penalty(theta), loaded.penalty(theta))


class Killed(Exception):
    pass


@pytest.mark.parametrize("method", ["online", "si"])
def test_a_task_that_was_broken_off_goes_on_bit_for_bit(method: str, tmp_path: Path) -> None:
    def run(path: Path | None, kill: int | None) -> tuple[nn.Module, Continual, int]:
        model = nn.Sequential(network(), nn.Dropout(0.2))
        drawn = torch.Generator().manual_seed(3)
        continual = Continual(model, "classification", method=method, generator=drawn)
        epochs = 0

        def callback(epoch: Epoch) -> None:
            nonlocal epochs
            epochs += 1
            if kill is not None and continual.tasks == 1 and epoch.number == kill:
                raise Killed

        for seed in range(2):
            data = [pair for batch in classes(seed) for pair in zip(*batch, strict=True)]
            loader = torch.utils.data.DataLoader(data, 4, shuffle=True, generator=torch.Generator().manual_seed(seed))  # pyright: ignore[reportArgumentType]
            before = continual.space.values(model)
            try:
                continual.learn(
                    loader,
                    epochs=4,
                    optimizer=adam,
                    scheduler=lambda optimiser: torch.optim.lr_scheduler.ExponentialLR(optimiser, 0.9),
                    checkpoint=path if seed else None,
                    callback=callback,
                )
            except Killed:
                assert torch.equal(continual.space.values(model), before)  # as if it had not begun
                assert path is not None
                assert path.exists()
        return model, continual, epochs

    whole, continual, epochs = run(None, None)
    path = tmp_path / "task.lapwing"
    run(path, 3)
    again, resumed, rest = run(path, None)
    assert (epochs, rest) == (8, 4 + 2)
    assert not path.exists()
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))
    theta = torch.randn(continual.space.size, dtype=torch.float64)
    assert torch.equal(continual.penalty(theta), resumed.penalty(theta))


@pytest.mark.parametrize("method", ["online", "si", "joint"])
@pytest.mark.parametrize("steps", [1, 4, 12])
def test_a_task_that_was_broken_off_inside_an_epoch_goes_on_bit_for_bit(
    method: str, steps: int, tmp_path: Path
) -> None:
    """Kept every two batches of six; the step that fails is before any is kept, in the first epoch, in the second."""

    def run(path: Path | None, kill: int | None) -> tuple[nn.Module, Continual, int]:
        model = nn.Sequential(network(), nn.Dropout(0.2))
        continual = Continual(model, "classification", method=method, generator=torch.Generator().manual_seed(3))
        taken = 0

        def count(*_: Any) -> None:
            nonlocal taken
            if continual.tasks == 1 and torch.is_grad_enabled() and model.training:
                taken += 1
                if taken == kill:
                    raise Killed

        for seed in range(2):
            data = [pair for batch in classes(seed) for pair in zip(*batch, strict=True)]
            loader = torch.utils.data.DataLoader(data, 2, shuffle=True, generator=torch.Generator().manual_seed(seed))  # pyright: ignore[reportArgumentType]
            hook = model.register_forward_pre_hook(count)
            try:
                kept = path if seed else None
                continual.learn(loader, epochs=3, optimizer=adam, checkpoint=kept, checkpoint_every_batches=2)
            except Killed:
                assert path is not None
                assert path.exists() == (steps > 2)
            finally:
                hook.remove()
        return model, continual, taken

    whole, continual, taken = run(None, None)
    path = tmp_path / "task.lapwing"
    run(path, steps)
    again, resumed, rest = run(path, None)
    assert rest == taken - (steps - 1) // 2 * 2
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))
    if method != "joint":
        theta = torch.randn(continual.space.size, dtype=torch.float64)
        assert torch.equal(continual.penalty(theta), resumed.penalty(theta))


def test_a_checkpoint_inside_an_epoch_with_more_batches_than_the_loader_has_is_refused(tmp_path: Path) -> None:
    model, path = network(), tmp_path / "task.lapwing"
    continual = Continual(model, "classification")

    def kill(*_: Any) -> None:
        if path.exists():
            raise Killed

    hook = model.register_forward_pre_hook(kill)
    with pytest.raises(Killed):
        continual.learn(classes(0, batch=2), epochs=1, optimizer=adam, checkpoint=path, checkpoint_every_batches=4)
    hook.remove()
    with unchanged(model), pytest.raises(StorageError, match="after 4 batches of an epoch, and the loader has fewer"):
        continual.learn(classes(0), epochs=1, optimizer=adam, checkpoint=path, checkpoint_every_batches=4)
    with pytest.raises(ParameterError, match="checkpoint_every_batches is 0"):
        continual.learn(classes(0), epochs=1, checkpoint=path, checkpoint_every_batches=0)


# -- what is refused, and what is left as it was -----------------------------------------------------------------------


def test_numbers_that_are_not_finite_name_epoch_and_batch_and_leave_the_model_alone() -> None:
    model, data = network(), classes(0)
    data[1][0][0, 0] = float("nan")
    next(module for module in model.modules() if isinstance(module, nn.Tanh)).eval()
    continual = Continual(model, "classification")
    with unchanged(model), pytest.raises(DataError, match="epoch 1, batch 1"):
        continual.learn(data, epochs=1, optimizer=adam)
    assert continual.tasks == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "best"}, "method is 'best'"),
        ({"terms": "some"}, "terms is 'some'"),
        ({"structure": "round"}, "unknown structure 'round'"),
        ({"estimator": "guess"}, "unknown estimator 'guess'"),
        ({"multiplier": -1.0}, "multiplier is -1.0"),
        ({"prior_precision": float("nan")}, "prior_precision is nan"),
        ({"method": "si", "structure": "full"}, "one number per weight"),
        ({"method": "ewc", "terms": "nearest"}, "around weights of its own"),
        ({"method": "si", "epsilon": 0.0}, "epsilon is 0.0"),
        pytest.param({"heads": 3}, "heads is a int", marks=pytest.mark.mistyped),
        ({"heads": []}, "heads is a list"),
    ],
)
def test_options_without_a_meaning_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        Continual(network(), "classification", **options)


def test_calls_without_a_meaning_are_refused(tmp_path: Path) -> None:
    model = network()
    continual = Continual(model, "classification")
    with pytest.raises(NotFittedError, match="no task was learnt"):
        continual.predict(torch.zeros(1, 3, dtype=torch.float64))
    with pytest.raises(DataError, match="read only once"):
        continual.learn(iter(classes(0)), epochs=1)
    with pytest.raises(OptionError, match="optimizer made a NoneType"):
        continual.learn(classes(0), epochs=1, optimizer=lambda params: None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(OptionError, match="GaussNewton"):
        continual.learn(classes(0), epochs=1, optimizer=lambda params: GaussNewton(model, Categorical()))
    with pytest.raises(OptionError, match="other tensors"):
        continual.learn(classes(0), epochs=1, optimizer=lambda params: torch.optim.SGD(params[:1], 0.1))
    with pytest.raises(ParameterError, match="epochs is 0"):
        continual.learn(classes(0), epochs=0)
    continual.learn(classes(0), epochs=1)
    with pytest.raises(OptionError, match="head is 1"):
        continual.predict(torch.zeros(1, 3, dtype=torch.float64), head=1)
    with pytest.raises(ParameterError, match="share is 2"):
        continual.unseen(torch.zeros(1, 3).double(), torch.zeros(1, 3).double(), share=2.0)
    with pytest.raises(StorageError, match="multiplier"):
        Continual(network(), "classification", multiplier=2.0).load_state_dict(continual.state_dict())
    with pytest.raises(StorageError, match="no memory"):
        continual.load_state_dict({})
    continual.save(tmp_path / "tasks.lapwing")
    with pytest.raises(StorageError, match=r"0\.weight"):
        Continual.load(tmp_path / "tasks.lapwing", nn.Sequential(nn.Linear(3, 5)).double())
    x = torch.zeros(1, 3, dtype=torch.float64)
    with pytest.raises(OptionError, match="pred is 'nn'"):
        continual.predict(x, pred="nn")
    with pytest.raises(LapwingError, match="expected"):
        continual.penalty(torch.zeros(continual.space.size + 1, dtype=torch.float64))
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    calls: list[Callable[[], object]] = [
        lambda: continual.learn(classes(1), epochs=1),
        lambda: continual.predict(x),
        lambda: continual.scores(x),
        lambda: continual.save(tmp_path / "later.lapwing"),
    ]
    for call in calls:
        with pytest.raises(ParameterError, match="the weights of the model are not"):
            call()
    assert not (tmp_path / "later.lapwing").exists()
    full = Continual(body(), "classification", structure="full", heads=make_head)
    with pytest.raises(OptionError, match="between shared weights and a head"):
        full.learn(classes(0), epochs=1)


def test_non_online_asks_for_its_loaders_again(tmp_path: Path) -> None:
    continual = Continual(network(), "classification", method="non_online", structure="diag")
    continual.learn(classes(0), epochs=1)
    continual.save(tmp_path / "tasks.lapwing")
    with pytest.raises(OptionError, match="data of all tasks"):
        Continual.load(tmp_path / "tasks.lapwing", network())
    loaded = Continual.load(tmp_path / "tasks.lapwing", network(), loaders=[classes(0)])
    loaded.learn(classes(1), epochs=1)
    assert loaded.tasks == 2


def test_inputs_of_another_task_are_flagged() -> None:
    model = network()
    continual = Continual(model, "classification", structure="full", prior_precision=0.1)
    data = [
        (torch.cat([x for x, _ in classes(s, 40, 40)]), torch.cat([y for _, y in classes(s, 40, 40)])) for s in (0, 1)
    ]
    for pair in data:
        continual.learn([pair], epochs=20, optimizer=adam)
    seen = data[0][0]
    assert float(continual.unseen(seen, data[1][0], 0.9).double().mean()) < 0.3
    assert bool(continual.unseen(5 * seen, seen, 0.9).double().mean() > 0.7)


# -- what else a user relies on ----------------------------------------------------------------------------------------


def descent(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.01)


def regression(method: str = "online", structure: str = "full", **options: Any) -> tuple[nn.Module, Continual]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    return model, Continual(model, Gaussian(0.5), method=method, structure=structure, **options)


def test_numbers_are_predicted_with_their_variance(tmp_path: Path) -> None:
    model, continual = regression(prior_precision=0.7)
    data = numbers(0)
    assert continual.tasks == 0
    continual.learn(data, epochs=3, optimizer=newton)
    x = torch.randn(4, 3, dtype=torch.float64)
    covariance = torch.linalg.inv(data[0][0].T @ data[0][0] / 0.25 + 0.7 * torch.eye(3, dtype=torch.float64))
    mean, variance = continual.predict(x)
    torch.testing.assert_close(mean, model(x).detach(), **EXACT)
    expected = torch.einsum("n i, i j, n j -> n", x, covariance, x)
    torch.testing.assert_close(variance, expected.unsqueeze(1), **EXACT)
    torch.testing.assert_close(continual.scores(x), expected, **EXACT)
    continual.save(tmp_path / "tasks.lapwing")  # the noise is in the file
    loaded = Continual.load(tmp_path / "tasks.lapwing", nn.Linear(3, 1, bias=False, dtype=torch.float64))
    torch.testing.assert_close(loaded.predict(x)[1], variance, rtol=0, atol=0)


@pytest.mark.parametrize("link", ["probit", "bridge", "bridge_norm"])
def test_links_are_those_of_the_plain_fit(link: str) -> None:
    model, data = network(), classes(0)
    continual = Continual(model, "classification", structure="full")
    continual.learn(data, epochs=2, optimizer=adam)
    la = Laplace(model, "classification", "all", "full")
    la.fit(data)
    x = torch.randn(5, 3, dtype=torch.float64)
    torch.testing.assert_close(continual.predict(x, link=link), la(x, link_approx=link), **EXACT)


def test_scores_above_a_quantile_are_flagged() -> None:
    """Strictly above: the inputs that set the quantile are not."""
    _, continual = regression()
    continual.learn(numbers(0), epochs=1)
    seen = torch.arange(1, 12, dtype=torch.float64).unsqueeze(1) * torch.ones(3, dtype=torch.float64)
    assert continual.unseen(seen, seen, 0.5).tolist() == [False] * 6 + [True] * 5
    assert continual.unseen(seen, seen[:1], 0.5).tolist() == [False] + [True] * 10
    for share in (0.0, 1.0):
        with pytest.raises(ParameterError, match="share is"):
            continual.unseen(seen, seen, share)


@pytest.mark.parametrize("given", [None, 80])
def test_the_quadratic_is_divided_by_the_points_that_are_given(given: int | None) -> None:
    """One step of gradient descent on the second task, by hand."""
    model, continual = regression(prior_precision=0.7)
    continual.learn(numbers(0), epochs=2, optimizer=newton)
    before, (x, y) = model.weight.detach().clone(), numbers(1)[0]
    posterior = continual.posterior.precision.to_matrix()
    losses: list[float] = []
    learned = continual.learn(
        [(x, y)], epochs=2, optimizer=descent, points=given, callback=lambda epoch: losses.append(epoch.loss)
    )
    assert (learned.task, learned.points) == (1, given or len(x))
    assert learned.losses == tuple(losses)
    weight, points = before, given or len(x)
    for _ in range(2):
        slope = (weight @ x.T - y.T) @ x / 0.25 / len(x) + (weight - before) @ posterior / points
        weight = weight - 0.01 * slope
    torch.testing.assert_close(model.weight.detach(), weight, **EXACT)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_joint_training_divides_by_the_points_of_all_tasks() -> None:
    model, continual = regression("joint", prior_precision=0.7)
    continual.learn(numbers(0), epochs=1, optimizer=newton)
    weight = model.weight.detach().clone()
    continual.learn(numbers(1, n=4), epochs=1, optimizer=descent)
    for x, y in (numbers(0)[0], numbers(1, n=4)[0]):  # a batch of every task in turn
        weight = weight - 0.01 * ((weight @ x.T - y.T) @ x / 0.25 / len(x) + 0.7 * weight / 12)
    torch.testing.assert_close(model.weight.detach(), weight, **EXACT)


def test_importances_of_shared_weights_leave_heads_out() -> None:
    model, head = nn.Linear(1, 1, bias=False, dtype=torch.float64), nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.ones_(model.weight)
    nn.init.ones_(head.weight)
    one = torch.ones(2, 1, dtype=torch.float64)
    continual = Continual(model, "regression", method="si", prior_precision=0.0, epsilon=0.01, heads=[head])
    continual.learn([(one, 3 * one)], epochs=1, optimizer=lambda params: torch.optim.SGD(params, 0.1))
    step = 0.1 * 2  # the slope is (1 * 1 - 3) * 1
    assert continual.memory.anchors[0].mean.tolist() == [1 + step]
    assert continual.memory.anchors[0].curvature.dense().item() == pytest.approx(2 * 2 * step / (step**2 + 0.01))
    assert continual.memory.heads[0].mean.tolist() == [1 + step]
    assert continual.heads == (head,)


@pytest.mark.parametrize("structure", ["diag", "full", "blocks"])
def test_merging_leaves_alone_what_is_no_product(structure: str) -> None:
    kept, merged = (
        Continual(network(), "classification", structure=structure, terms=each) for each in ("keep", "factors")
    )
    for continual in (kept, merged):
        for seed in range(2):
            continual.learn(classes(seed), epochs=1, optimizer=adam)
    assert merged.merge_error == 0
    theta = torch.randn(kept.space.size, dtype=torch.float64)
    torch.testing.assert_close(merged.penalty(theta), kept.penalty(theta), **EXACT)


def test_a_failure_leaves_no_gradients_and_what_was_known() -> None:
    model, data = network(), classes(1)
    continual = Continual(model, "classification")
    continual.learn(classes(0), epochs=1, optimizer=adam)
    before = continual.posterior

    def fail(epoch: Epoch) -> None:
        raise Killed

    with unchanged(model), pytest.raises(Killed):
        continual.learn(data, epochs=1, optimizer=adam, callback=fail)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert continual.tasks == 1
    assert continual.posterior is before
    continual.learn(data, epochs=1, optimizer=adam)
    assert continual.posterior is not before


@pytest.mark.parametrize("every", [1, 2])
def test_a_checkpoint_is_written_as_often_as_asked(every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as for users
    path = tmp_path / "task.lapwing"
    there: list[bool] = []

    def look(epoch: Epoch) -> None:  # before the checkpoint of its epoch
        there.append(path.exists())

    def learn(epochs: int, **options: Any) -> None:
        continual = Continual(network(), "classification")
        continual.learn(classes(0), epochs, adam, checkpoint=path, checkpoint_every=every, **options)

    def fail(epoch: Epoch) -> None:
        if epoch.number == 3:
            raise Killed

    learn(3, callback=look)
    assert there == ([False, True, True] if every == 1 else [False, False, True])
    assert not path.exists()
    with pytest.raises(Killed):
        learn(3, callback=fail)
    with pytest.raises(StorageError, match="epochs was 3 and is 4"):
        learn(4)
    with pytest.raises(StorageError, match="points was 12 and is 13"):
        learn(3, points=13)
    for wrong in (0, True, 1.5):
        with pytest.raises(OptionError, match="checkpoint_every is"):
            Continual(network(), "classification").learn(classes(0), checkpoint=path, checkpoint_every=wrong)  # pyright: ignore[reportArgumentType]


def test_heads_that_cannot_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as for users
    one = make_head()
    with pytest.raises(OptionError, match="one module twice"):
        Continual(body(), "classification", heads=[one, one])
    with pytest.raises(OptionError, match="heads is a list"):
        Continual(body(), "classification", heads=[one, 3])  # pyright: ignore[reportArgumentType]
    with pytest.raises(OptionError, match="heads is a Linear"):
        Continual(body(), "classification", heads=one)  # pyright: ignore[reportArgumentType]
    with pytest.raises(OptionError, match=r"heads\(\) made a int"):
        Continual(body(), "classification", heads=lambda: 3).learn(classes(0), epochs=1)  # pyright: ignore[reportArgumentType]
    again = Continual(body(), "classification", heads=lambda: one)
    again.learn(classes(0), epochs=1, optimizer=adam)
    x = torch.zeros(1, 3, dtype=torch.float64)
    torch.testing.assert_close(again.predict(x), again.predict(x, 0))  # of one head no number is needed
    with pytest.raises(OptionError, match="another task has"):
        again.learn(classes(1), epochs=1)
    two = Continual(body(), "classification", heads=make_head)
    for seed in range(2):
        two.learn(classes(seed), epochs=1, optimizer=adam)
    for head in (None, 2, -1, True, 1.0):
        with pytest.raises(OptionError, match=r"head is .*expected the number of a task, from 0 to 1"):
            two.predict(x, head)  # pyright: ignore[reportArgumentType]
    with torch.no_grad():
        next(two.heads[1].parameters()).add_(1.0)
    with pytest.raises(ParameterError, match="the weights of head 1 are not"):
        two.predict(x, 0)


def test_states_that_do_not_fit_are_refused_and_change_nothing(tmp_path: Path) -> None:
    continual = Continual(network(), "classification", generator=torch.Generator().manual_seed(0))
    continual.learn(classes(0), epochs=1, optimizer=adam)
    state = continual.state_dict()
    fresh = network(seed=1)
    other = Continual(fresh, "classification", generator=torch.Generator())
    later = {**state, "version": 2}
    for wrong, words in (
        (later, r"version 2; expected at most 1"),
        ({**state, "memory": "3"}, "holds a int|cannot be read"),
        ({**state, "memory": "{"}, "cannot be read"),
        ({name: value for name, value in state.items() if name != "generator"}, "generator's"),
        ({**state, "model.0.bias": torch.zeros(5)}, r"'0\.bias' is \(5,\)"),
        ({**state, "model.more": torch.zeros(5)}, "'more' is"),
        ({name: value for name, value in state.items() if name != "version"}, "no memory"),
    ):
        with unchanged(fresh), pytest.raises(StorageError, match=words):
            other.load_state_dict(wrong)
        assert other.tasks == 0
    with pytest.raises(StorageError, match="generator's"):
        Continual(fresh, "classification").load_state_dict(state)
    other.load_state_dict(state)
    assert other.tasks == 1
    assert torch.equal(other.generator.get_state(), continual.generator.get_state())  # pyright: ignore[reportOptionalMemberAccess]
    for value in state.values():
        if isinstance(value, Tensor):
            value.zero_()
    assert torch.equal(continual.posterior.mean, continual.space.values(continual.model))  # a state is a copy
    assert torch.equal(other.posterior.mean, continual.posterior.mean)  # and so is what was loaded from one
    la = Laplace(network(), "classification", "all", "diag")
    la.fit(classes(0))
    la.save(tmp_path / "la.lapwing")
    with pytest.raises(StorageError, match=r"the file holds .*; expected 'continual'"):
        Continual.load(tmp_path / "la.lapwing", network())


def test_what_is_ones_own_is_given_again(tmp_path: Path) -> None:
    class Own(Categorical):
        pass

    path, structure = tmp_path / "own.lapwing", by_name("diag")
    continual = Continual(network(), Own(), structure=structure)
    continual.learn(classes(0), epochs=1, optimizer=adam)
    continual.save(path)
    for given in ({}, {"likelihood": Own()}, {"structure": structure}):
        with pytest.raises(StorageError, match="expected those of one's own"):
            Continual.load(path, network(), **given)
    loaded = Continual.load(path, network(seed=1), likelihood=Own(), structure=structure)
    theta = torch.randn(loaded.space.size, dtype=torch.float64)
    assert torch.equal(loaded.penalty(theta), continual.penalty(theta))
    with pytest.raises(OptionError, match=r"function of lapwing\.estimate alone"):
        Continual(network(), "classification", structure=structure, estimator="mc")
    with pytest.raises(OptionError, match=r"function of lapwing\.estimate alone"):
        Continual(network(), "classification", structure=structure, options={"sharing": "expand"})


@pytest.mark.parametrize("value", [float("inf"), True, pytest.param("1", marks=pytest.mark.mistyped), -1])
def test_precisions_that_are_no_numbers_are_refused(value: Any) -> None:
    with pytest.raises(OptionError, match="expected a finite number >= 0"):
        Continual(network(), "classification", prior_precision=value)
    continual = Continual(network(), "classification")
    continual.learn(classes(0), epochs=1, optimizer=adam)
    with pytest.raises(OptionError, match="expected a finite number >= 0"):
        continual.posterior_of(None, value)
