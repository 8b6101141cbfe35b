"""A loop of one's own with `Continual.term` and `remember`, or with Avalanche's hooks, learns what `learn` learns."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lapwing.errors import ModelError, OptionError, ParameterError
from lapwing.training import Continual, avalanche_plugin
from lapwing.training.avalanche_plugin import ContinualPlugin
from lapwing.training.options import check_numbers

BATCHES, EPOCHS = 3, 4
Task = list[tuple[Tensor, Tensor]]


def tasks() -> list[Task]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 24, 2, generator=generator, dtype=torch.float64)
    sides = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 0.5]], dtype=torch.float64)
    return [
        list(zip(a.chunk(BATCHES), (a @ w > 0).long().chunk(BATCHES), strict=True))
        for a, w in zip(x, sides, strict=True)
    ]


def made(**options: Any) -> Continual:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    model[0].bias.requires_grad_(False)  # the flat order is that of trainable parameters
    return Continual(model, "classification", prior_precision=0.5, **options)


def learnt(**options: Any) -> Continual:
    """By `learn`, with plain steps."""
    continual = made(**options)
    for task in tasks():
        continual.learn(task, EPOCHS, lambda params: torch.optim.SGD(params, 0.1))
    return continual


def own_loop(continual: Continual, batches: Task) -> None:
    parameters = [p for p in continual.model.parameters() if p.requires_grad]
    term = continual.term(24)
    optimiser = torch.optim.SGD(parameters, 0.1)
    for _ in range(EPOCHS):
        for x, y in batches:
            optimiser.zero_grad()
            cross_entropy(continual.model(x), y).backward()
            term.at(parameters)[1](1.0)
            optimiser.step()
    optimiser.zero_grad()
    continual.remember(batches)


def assert_same(found: Continual, expected: Continual) -> None:
    assert found.tasks == expected.tasks == 3
    assert found.memory.points == expected.memory.points == (24, 24, 24)
    torch.testing.assert_close(found.memory.mean, expected.memory.mean, rtol=1e-9, atol=1e-12)
    if expected.method != "sequential":
        x = tasks()[0][0][0]
        torch.testing.assert_close(found.predict(x), expected.predict(x), rtol=1e-9, atol=1e-12)
        theta = expected.memory.mean + 1
        torch.testing.assert_close(found.penalty(theta), expected.penalty(theta), rtol=1e-9, atol=0)


@pytest.mark.parametrize("method", ["online", "non_online", "ewc", "sequential"])
def test_a_loop_of_ones_own_is_learn(method: str) -> None:
    continual = made(method=method)
    for task in tasks():
        own_loop(continual, task)
    assert_same(continual, learnt(method=method))


def test_the_gradient_is_that_of_the_penalty() -> None:
    continual = made(structure="full")
    own_loop(continual, tasks()[0])
    parameters = [p for p in continual.model.parameters() if p.requires_grad]
    term = continual.term(10)
    with torch.no_grad():
        for p in parameters:
            p += 0.3
    theta = continual.space.values(continual.model).requires_grad_()
    value = continual.penalty(theta) / 10
    (expected,) = torch.autograd.grad(value, theta)
    found, add = term.at(parameters)
    add(1.0)
    torch.testing.assert_close(found, value.detach(), rtol=1e-9, atol=0)
    torch.testing.assert_close(torch.cat([p.grad.flatten() for p in parameters]), expected, rtol=1e-9, atol=1e-12)  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize("options", [{"method": "si"}, {"method": "joint"}, {"heads": lambda: nn.Linear(2, 2)}])
def test_what_only_learn_can_do_is_refused(options: dict[str, Any]) -> None:
    continual = made(**options)
    with pytest.raises(OptionError, match="a loop of one's own"):
        continual.term(24)
    with pytest.raises(OptionError, match="a loop of one's own"):
        continual.remember(tasks()[0])
    assert continual.tasks == 0


def test_bad_numbers_and_other_weights_are_refused() -> None:
    continual = made()
    for wrong in (0, -1):
        with pytest.raises(ParameterError, match="points is"):
            continual.term(wrong)
        with pytest.raises(ParameterError, match="points is"):
            continual.remember(tasks()[0], wrong)
    for wrong in (0, 2.5, True):  # a whole number, which a shape check of the tests would ask for as well
        with pytest.raises(ParameterError, match="epochs is"):
            check_numbers(epochs=wrong)
    check_numbers(epochs=1, steps=0)
    own_loop(continual, tasks()[0])
    with torch.no_grad():
        continual.model[0].weight.add_(1)  # type: ignore[index]
    with pytest.raises(ParameterError, match="not those that the tasks so far"):
        continual.term(24)


# -- Avalanche's hooks, called in its order: also where it is not installed -------------------------------------------


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A base class that does nothing, which the plugin's own is made with where there is no Avalanche."""
    if avalanche_plugin.SupervisedPlugin is object:
        monkeypatch.setattr(avalanche_plugin, "SupervisedPlugin", type("SupervisedPlugin", (), {}))


def test_without_avalanche_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(avalanche_plugin, "SupervisedPlugin", object)
    with pytest.raises(OptionError, match="pip install avalanche-lib"):
        ContinualPlugin(made())


def strategy_of(model: nn.Module, batches: Task) -> SimpleNamespace:
    """A strategy as far as the plugin knows one; its batches end in labels of the task."""
    labelled = [(x, y, torch.zeros(len(y))) for x, y in batches]
    return SimpleNamespace(model=model, adapted_dataset=range(24), dataloader=labelled)


@pytest.mark.usefixtures("hooks")
@pytest.mark.parametrize("method", ["online", "ewc"])
def test_its_hooks_train_as_learn(method: str) -> None:
    continual = made(method=method)
    plugin = ContinualPlugin(continual)
    optimiser = torch.optim.SGD([p for p in continual.model.parameters() if p.requires_grad], 0.1)
    for task in tasks():
        strategy = strategy_of(continual.model, task)
        plugin.before_training_exp(strategy)
        for _ in range(EPOCHS):
            for x, y, _ in strategy.dataloader:
                optimiser.zero_grad()
                cross_entropy(strategy.model(x), y).backward()
                plugin.before_update(strategy)
                optimiser.step()
        plugin.after_training_exp(strategy)
    assert_same(continual, learnt(method=method))


@pytest.mark.usefixtures("hooks")
def test_another_model_is_refused() -> None:
    plugin = ContinualPlugin(made())
    with pytest.raises(ModelError, match="another model"):
        plugin.before_training_exp(strategy_of(nn.Linear(2, 2), tasks()[0]))
