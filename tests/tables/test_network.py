"""Networks for tables: what is built, how well it is trained, and that hard data do not break it."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable
from dataclasses import asdict
from math import log
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lapwing.errors import DataError, OptionError
from lapwing.evidence import Evidence, GaussianFit, Tuned
from lapwing.likelihoods import Categorical, Gaussian
from lapwing.linalg import Dense
from lapwing.metrics import accuracy, gaussian_nll, nll
from lapwing.params import ParamSpace
from lapwing.priors import Prior
from lapwing.tables import network as architecture
from lapwing.tables import stretch as stretches
from lapwing.tables import training as network
from lapwing.tables.network import Spec, build
from lapwing.tables.stretch import Clock, FitProgress, TableTraining, reestimated
from lapwing.tables.training import train
from lapwing.training.loop import Best, Looks, TrainingLoop


def wave(rows: int, seed: int = 0, noise: float = 0.1) -> tuple[Tensor, Tensor]:
    """y = sin 2 x_0 + noise, with a second input that says nothing."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 2, generator=generator)
    y = torch.sin(2 * x[:, 0]) + noise * torch.randn(rows, generator=generator)
    return x, y


def rings(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Three classes by radius."""
    x = torch.randn(rows, 2, generator=torch.Generator().manual_seed(seed))
    return x, torch.bucketize(x.norm(dim=1), torch.tensor([0.8, 1.5]))


# -- building -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", architecture.KINDS)
@pytest.mark.parametrize("activation", architecture.ACTIVATIONS)
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_network_has_the_shapes_of_its_specification(kind: str, activation: str, depth: int) -> None:
    spec = Spec(4, 3, width=6, depth=depth, kind=kind, activation=activation)
    model = build(spec)
    assert model(torch.randn(5, 4)).shape == (5, 3)
    assert not model.training
    linear = [each for each in model.modules() if isinstance(each, nn.Linear)]
    assert len(linear) == (2 * depth + 2 if kind == "resnet" else depth + 1)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    assert model(torch.randn(5, 4, dtype=torch.float32)).dtype == torch.float64


@pytest.mark.parametrize("kind", architecture.KINDS)
def test_outputs_start_at_the_scale_of_one_at_any_depth(kind: str) -> None:
    x = torch.randn(500, 20, generator=torch.Generator().manual_seed(0))
    for depth in (1, 4):
        model = build(Spec(20, 30, width=200, depth=depth, kind=kind), torch.Generator().manual_seed(1))
        assert 0.2 < float(model(x).std().detach()) < 3


def test_weights_follow_the_generator_and_leave_the_global_one_alone() -> None:
    spec = Spec(3, 1)
    before = torch.get_rng_state()
    first, second, other = (build(spec, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(next(first.parameters()), next(other.parameters()))


def test_a_specification_goes_through_json() -> None:
    spec = Spec(4, 2, width=7, depth=3, kind="resnet", activation="relu", varying=True)
    assert Spec(**json.loads(json.dumps(asdict(spec)))) == spec


@pytest.mark.parametrize(
    "wrong", [{"width": 0}, {"depth": -1}, {"inputs": True}, {"kind": "cnn"}, {"activation": "step"}]
)
def test_a_wrong_specification_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(OptionError, match=f"{next(iter(wrong))} of a network"):
        Spec(**({"inputs": 1, "outputs": 1} | wrong))  # pyright: ignore[reportArgumentType]


# -- training -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_regression_finds_function_and_noise() -> None:
    x, y = wave(300)
    model, la, _ = train(x, y, "regression", Spec(2, 1, width=30, depth=1), seed=0, epochs=150, noise="constant")
    assert 0.07 < float(la.sigma_noise) < 0.14  # 0.1 is true
    x_new, y_new = wave(1000, seed=1)
    mean, variance = la(x_new)
    with torch.no_grad():
        torch.testing.assert_close(model(x_new), mean)
        residual = (model(x) - y.unsqueeze(1)).square().mean()
    ours = gaussian_nll(mean[:, 0], variance[:, 0, 0] + la.sigma_noise**2, y_new)
    at_mode = gaussian_nll(mean[:, 0], residual.expand(1000), y_new)
    assert ours < at_mode
    assert ours < -0.4  # the true density has -0.88, a linear fit about 1.1


@pytest.mark.slow
@pytest.mark.parametrize("kind", architecture.KINDS)
def test_classes_are_learned(kind: str) -> None:
    x, y = rings(400)
    model, la, _ = train(x, y, "classification", Spec(2, 3, width=20, depth=1, kind=kind), seed=0, epochs=100)
    x_new, y_new = rings(1000, seed=1)
    probabilities = la(x_new)
    assert isinstance(probabilities, Tensor)
    assert accuracy(probabilities, y_new) > 0.93
    with torch.no_grad():
        assert nll(probabilities, y_new) <= nll(model(x_new).softmax(1), y_new) + 0.01


@pytest.mark.slow
def test_several_targets_share_a_network() -> None:
    x, y = wave(200)
    options = {"seed": 0, "epochs": 60, "noise": "constant"}
    _, la, _ = train(x, torch.stack([y, -y], 1), "regression", Spec(2, 2, width=10, depth=1), **options)
    mean, variance = la(x)
    assert mean.shape == (200, 2)
    assert variance.shape == (200, 2, 2)
    assert float(torch.corrcoef(mean.T)[0, 1]) < -0.95


def test_the_same_seed_gives_the_same_posterior() -> None:
    x, y = wave(60)
    before = torch.get_rng_state()
    options = {"task": "regression", "spec": Spec(2, 1, width=8, depth=1), "epochs": 10}
    found = [train(x, y, seed=seed, **options)[1] for seed in (3, 3, 4)]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(found[0].mean, found[1].mean)
    assert torch.equal(found[0](x)[1], found[1](x)[1])
    assert not torch.equal(found[0].mean, found[2].mean)


def test_the_callback_hears_of_every_epoch() -> None:
    x, y = wave(40)
    told: list[FitProgress] = []
    train(x, y, "regression", Spec(2, 1, width=5, depth=1), seed=0, epochs=90, callback=told.append)
    assert [each.epoch for each in told] == list(range(1, 91))
    evaluated = [each.log_marginal for each in told if each.log_marginal is not None]
    assert 5 <= len(evaluated) <= stretches.LOOKS
    assert told[-1].log_marginal is not None
    assert told[-1].loss < told[0].loss


@pytest.mark.parametrize(("width", "looks"), [(5, 40), (500, 40), (501, 10)])
def test_wide_networks_are_looked_at_less_often(width: int, looks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look decomposes factors as wide as the layers, which takes seconds beyond 500."""
    x, y = wave(8)
    spec = Spec(2, 1, width=width, depth=1)
    generator = torch.Generator().manual_seed(0)
    run = TableTraining(build(spec, generator), spec, x, y.unsqueeze(1), "regression", 8, generator)
    asked: list[int] = []

    def noted(self: TrainingLoop, looks: Looks, epochs: int, due: Callable[[int], bool], told: Any) -> Best:
        asked.extend(number for number in range(1, epochs + 1) if due(number))
        return object.__new__(Best)

    monkeypatch.setattr(TrainingLoop, "run", noted)
    run.stretch(2000, 1e-3, Prior.isotropic(ParamSpace.of(run.model)), torch.ones(()), Clock(2000, None))
    assert len(asked) == looks
    assert asked[-1] == 2000


def test_an_interrupt_comes_through() -> None:
    def stop(progress: FitProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(*wave(40), "regression", Spec(2, 1, width=5), seed=0, epochs=5, callback=stop)


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_the_structure_can_be_asked_for(structure: str) -> None:
    _, la, _ = train(*wave(40), "regression", Spec(2, 1, width=5, depth=1), seed=0, epochs=3, structure=structure)
    assert la.structure == structure


def test_many_weights_get_kronecker_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = Spec(2, 1, width=10, depth=1)  # 41 weights
    monkeypatch.setattr(network, "FULL_WEIGHTS", 40)
    assert train(*wave(40), "regression", spec, seed=0, epochs=3)[1].structure == "kron"
    monkeypatch.setattr(network, "FULL_WEIGHTS", 41)
    assert train(*wave(40), "regression", spec, seed=0, epochs=3)[1].structure == "full"
    monkeypatch.setattr(network, "FULL_WORK", 40 * 41**2 - 1)
    assert train(*wave(40), "regression", spec, seed=0, epochs=3)[1].structure == "kron"


@pytest.mark.parametrize(
    ("best", "found", "tried"),
    [
        (1.0, 1.0, [3, 1 / 3]),
        (1 / 9, 1 / 9, [3, 1 / 3, 1 / 9, 1 / 27]),
        (9.0, 9.0, [3, 9, 27]),
        (1e6, 81, [3, 9, 27, 81]),
    ],
)
def test_the_prior_of_classes_goes_where_the_evidence_grows(
    best: float, found: float, tried: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each precision is tried from the best weights so far; the evidence is put in place of the training here."""
    seen: list[float] = []

    def stretch(run: TableTraining, epochs: int, rate: float, prior: Prior, sigma: Tensor, *rest: object) -> Best:
        weights = {name: value + len(seen) for name, value in run.model.state_dict().items()}
        seen.append(float(prior.precisions[0]))
        value = -(prior.precisions[0].log() - log(best)).abs()
        return Best(Tuned(prior, sigma, value, converged=False, rounds=0), epochs, weights)

    monkeypatch.setattr(TableTraining, "stretch", stretch)
    x, y = rings(30)
    _, la, _ = train(x, y, "classification", Spec(2, 3, width=4), seed=0, epochs=8, structure="kron")
    assert seen == pytest.approx([1, *tried])
    assert la.prior_precision.tolist() == pytest.approx([found] * 2)


def test_every_stretch_of_classes_is_told_of() -> None:
    told: list[FitProgress] = []
    train(*rings(60), "classification", Spec(2, 3, width=4), seed=0, epochs=8, callback=told.append)
    assert [each.epoch for each in told] == list(range(1, len(told) + 1))
    assert {each.epochs for each in told} == {16}
    assert 8 + 2 * 2 <= len(told) <= 16


def test_the_evidence_of_some_rows_is_scaled_to_all_of_them() -> None:
    x, y = wave(64)
    model = build(Spec(2, 1, width=4, depth=1), dtype=torch.float32)
    la = stretches.Laplace(model, "regression", "all", "full")
    la.fit([(x, y.unsqueeze(1))] * 3)
    three = la.evidence
    la.fit([(x, y.unsqueeze(1))])
    scaled = la.evidence.scaled(3)
    prior = Prior.layerwise(la.space, 0.7)
    torch.testing.assert_close(scaled.log_marginal(prior, 0.3), three.log_marginal(prior, 0.3), rtol=1e-4, atol=0)


def test_updates_come_to_rest_where_the_evidence_is_stationary() -> None:
    x, y = wave(80)
    model = build(Spec(2, 1, width=4, depth=1), torch.Generator().manual_seed(0), dtype=torch.float64)
    la = stretches.Laplace(model, "regression", "all", "full")
    la.fit([(x.double(), y.double().unsqueeze(1))])
    start = Prior.layerwise(la.space, 1.0)
    tuned = reestimated(la.evidence, start, torch.ones((), dtype=torch.float64), 300)
    free = torch.cat([tuned.prior.precisions, tuned.sigma.reshape(1)]).log().requires_grad_()
    found = la.evidence.log_marginal(start.with_precisions(free[:-1].exp()), free[-1].exp())
    found.backward()
    assert float(tuned.log_marginal) == pytest.approx(float(found.detach()))
    inside = (free.detach() > -9.2) & (free.detach() < 13.8)  # bounds of the precisions
    assert free.grad is not None
    assert float((free.grad * inside).abs().max()) < 1e-5


def test_a_noise_level_remains_when_all_targets_are_determined() -> None:
    """A structure that counts more determined parameters than targets would ask for the root of a negative number."""

    evidence = Evidence(Dense(1e12 * torch.eye(30)), torch.ones(30), GaussianFit(10, torch.tensor(4.0)))
    prior = Prior(30, torch.ones(1))
    assert float(evidence.effective_parameters(prior)) > 10
    tuned = reestimated(evidence, prior, torch.ones(()), 5)
    assert float(tuned.sigma) == pytest.approx(2.0)  # sqrt(4 / 1): one of ten targets is left


# -- hard data ------------------------------------------------------------------------------------------------------


def hard(name: str) -> tuple[Tensor, Tensor]:
    x, y = wave(10 if name == "ten rows" else 50)
    if name == "two rows":
        return x[:2], y[:2]
    if name == "constant features":
        return torch.cat([x, torch.zeros(50, 3)], 1), y
    if name == "only constant features":
        return torch.zeros(50, 2), y
    if name == "a constant target":
        return x, torch.zeros(50)
    if name == "one feature":
        return x[:, :1], y
    if name == "repeated rows":
        return x[:1].expand(50, 2), y[:1].expand(50)
    if name == "an outlier":
        return torch.cat([x, torch.full((1, 2), 1e4)]), torch.cat([y, torch.tensor([1e3])])
    if name == "more features than rows":
        return torch.randn(10, 60), y[:10]
    return x, y


HARD = [
    "ten rows",
    "two rows",
    "constant features",
    "only constant features",
    "a constant target",
    "one feature",
    "repeated rows",
    "an outlier",
    "more features than rows",
]


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("task", ["regression", "classification"])
def test_hard_data_give_finite_error_bars(name: str, task: str) -> None:
    x, y = hard(name)
    outputs = 1 if task == "regression" else 2
    targets = y if task == "regression" else (y > 0).long()
    _, la, _ = train(x, targets, task, Spec(x.shape[1], outputs, width=10, depth=1), seed=0, epochs=40)
    out = la(torch.cat([x, 3 * x]))
    for each in out if isinstance(out, tuple) else (out,):
        assert bool(torch.isfinite(each).all())
    if isinstance(out, tuple):
        assert bool((out[1] >= 0).all())
    assert bool(torch.isfinite(la.log_marginal_likelihood()))


@pytest.mark.slow
def test_targets_that_are_noise_get_the_mean_and_their_own_spread() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(200, 5, generator=generator), torch.randn(200, generator=generator)
    _, la, _ = train(x, y, "regression", Spec(5, 1), seed=0, epochs=100)
    mean, _ = la(torch.randn(200, 5, generator=generator))
    assert float(la.sigma_noise) == pytest.approx(1.0, abs=0.15)
    assert float(mean.std()) < 0.35


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has another unit elsewhere")
def test_a_million_rows_in_bounded_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1_000_000, 20, generator=generator)
    y = torch.sin(x[:, 0]) + 0.1 * torch.randn(len(x), generator=generator)
    _, la, _ = train(x, y, "regression", Spec(20, 1), seed=0, epochs=1)
    assert la.structure == "kron"
    assert la.n_data == 1_000_000
    assert float(la.sigma_noise) < 0.5
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e6
    assert grown < 1.0, f"{grown:.2f} GB"


# -- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "y", "task", "match"),
    [
        (torch.zeros(0, 2), torch.zeros(0), "regression", "x has shape"),
        (torch.zeros(5, 3), torch.zeros(5), "regression", "x has shape"),
        (torch.zeros(5, 2), torch.zeros(4), "regression", "x has shape"),
        (torch.full((5, 2), float("nan")), torch.zeros(5), "regression", "NaN"),
        (torch.zeros(5, 2), torch.full((5,), float("inf")), "regression", "finite"),
        (torch.zeros(5, 2), torch.zeros(5, 2), "regression", "2 targets a row"),
        (torch.zeros(5, 2), torch.zeros(5), "classification", "class numbers"),
        (torch.zeros(5, 2), torch.tensor([0, 1, 0, 1, -1]), "classification", "class numbers"),
        (torch.zeros(5, 2), torch.tensor([0, 1, 0, 1, 1]), "classification", "class numbers 0 .. 0"),
    ],
)
def test_bad_data_are_refused(x: Tensor, y: Tensor, task: str, match: str) -> None:
    with pytest.raises(DataError, match=match):
        train(x, y, task, Spec(2, 1), seed=0)


def test_bad_options_are_refused() -> None:
    x, y = wave(10)
    with pytest.raises(OptionError, match="task"):
        train(x, y, "ranking", Spec(2, 1), seed=0)
    with pytest.raises(OptionError, match="epochs"):
        train(x, y, "regression", Spec(2, 1), seed=0, epochs=0)
    with pytest.raises(OptionError, match="batch_size"):
        train(x, y, "regression", Spec(2, 1), seed=0, batch_size=0)
    with pytest.raises(OptionError, match="hessian_structure"):
        train(x, y, "regression", Spec(2, 1), seed=0, epochs=1, structure="fulll")


@pytest.mark.parametrize("task", ["regression", "classification"])
def test_steps_follow_the_joint_density_of_the_whole_table(task: str) -> None:
    """Batches of a table, on average: sigma^2 / N times the gradient of -log p(y, theta) over all rows."""
    torch.manual_seed(0)
    x = torch.randn(12, 2, dtype=torch.float64)
    y = x[:, :1].sin() if task == "regression" else (x[:, 0] > 0).long()
    spec = Spec(2, 1 if task == "regression" else 2, width=3, depth=1)
    model = architecture.build(spec, torch.Generator().manual_seed(0), dtype=torch.float64)
    run = TableTraining(model, spec, x, y, task, 4, torch.Generator())
    prior = Prior.layerwise(ParamSpace.of(model), torch.tensor([0.5, 3.0], dtype=torch.float64))
    sigma = 0.3 if task == "regression" else 1.0
    gradient, parameters = run.under(prior, sigma), list(model.parameters())
    average = [torch.zeros_like(parameter) for parameter in parameters]
    for rows in torch.arange(12).split(4):
        model.zero_grad()
        gradient(x[rows], y[rows])
        for total, parameter in zip(average, parameters, strict=True):
            assert parameter.grad is not None
            total += parameter.grad / 3
    flat = torch.cat([parameter.flatten() for parameter in parameters])
    likelihood = Gaussian(sigma) if task == "regression" else Categorical()
    joint = -likelihood.log_prob(model(x), y).sum() + (prior.precision() * flat.square()).sum() / 2
    expected = torch.autograd.grad(joint * sigma**2 / 12, parameters)
    for found, wanted in zip(average, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("steps", "epochs"), [(6, 2), (7, 3), (1, 1)])
def test_without_a_number_of_epochs_there_are_about_as_many_steps(
    steps: int, epochs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three batches of 8, 8 and 4 rows."""
    monkeypatch.setattr(network, "STEPS", steps)
    told: list[tuple[int, int]] = []
    x, y = wave(20)
    train(
        x,
        y,
        "regression",
        Spec(x.shape[1], 1, depth=0),
        seed=0,
        batch_size=8,
        structure="full",
        noise="constant",
        callback=lambda now: told.append((now.epoch, now.epochs)),
    )
    assert told == [(number + 1, epochs) for number in range(epochs)]
