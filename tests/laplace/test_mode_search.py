"""to_mode ends where the gradient of the posterior's own loss is zero, for every subset of weights, and says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lapwing import Laplace, to_mode
from lapwing.errors import LapwingWarning, OptionError
from lapwing.likelihoods import Likelihood

pytestmark = pytest.mark.long

X = torch.linspace(-2, 2, 30, dtype=torch.float64).unsqueeze(1)
Y = torch.sin(2 * X)
LABELS = (Y[:, 0] > 0).long()
BATCHES = [(X[:20], Y[:20]), (X[20:], Y[20:])]
CLASSES = [(X[:20], LABELS[:20]), (X[20:], LABELS[20:])]


def network(outputs: int = 1) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


def gradient(la: Any, batches: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Of the negative log posterior, as a user would write it, for all weights."""
    model: nn.Module = la.model
    likelihood: Likelihood = la.distribution.at_noise(float(la.sigma_noise)) if la.has_noise else la.distribution
    loss = sum(-likelihood.log_prob(model(x), y).sum() for x, y in batches) / la.temperature
    names = {name: p for name, p in model.named_parameters() if name in la.space.names}
    flat = torch.cat([p.flatten() for p in names.values()])
    if la.space.index is not None:
        flat = flat[la.space.index]
    loss = loss + (la.prior.precision() * (flat - la.prior.mean) ** 2).sum() / 2
    return dict(zip(names, torch.autograd.grad(loss, list(names.values())), strict=True))


@pytest.mark.parametrize("structure", ["kron"])
def test_the_gradient_of_the_posteriors_own_loss_is_zero(structure: str) -> None:
    la = Laplace(
        network(), "regression", "all", structure, prior_precision=0.7, prior_mean=0.1, sigma_noise=0.3, temperature=2.0
    )
    found = to_mode(la, BATCHES)
    after = gradient(la, BATCHES)
    assert found.converged
    assert found.relative_after < 1e-6 < found.relative_before
    whole = torch.cat([each.flatten() for each in after.values()]).norm()
    assert float(whole) == pytest.approx(found.gradient_after, abs=1e-9)
    assert float(whole) < 1e-4 * found.gradient_before
    assert found.loss_after < found.loss_before


def test_classes_and_precisions_per_layer() -> None:
    la = Laplace(network(2), "classification", "all", "kron", prior_precision=torch.tensor([0.5, 2.0]))
    found = to_mode(la, CLASSES, tolerance=1e-7)
    assert found.converged
    assert all(float(each.norm()) < 1e-5 for each in gradient(la, CLASSES).values())
    la.fit(CLASSES)
    assert torch.isfinite(la.log_marginal_likelihood())


@pytest.mark.parametrize("subset", ["last_layer", "subnetwork"])
def test_only_the_posteriors_weights_move(subset: str) -> None:
    chosen: dict[str, Any] = {"subnetwork_indices": torch.tensor([0, 3, 7, 14, 18])} if subset == "subnetwork" else {}
    model = network()
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    la = Laplace(model, "regression", subset, "full", sigma_noise=0.3, **chosen)
    assert to_mode(la, BATCHES).converged
    moved = nn.utils.parameters_to_vector(model.parameters()).detach() != before
    expected = torch.zeros(19, dtype=torch.bool)
    expected[chosen["subnetwork_indices"] if chosen else slice(12, 19)] = True
    assert torch.equal(moved, expected)
    la.fit(BATCHES)
    of_chosen = torch.cat([each.flatten() for each in gradient(la, BATCHES).values()])
    assert float((of_chosen if la.space.index is None else of_chosen[la.space.index]).norm()) < 1e-4


@pytest.mark.parametrize("structure", ["kron", "blocks"])
def test_a_structure_of_ones_own_gets_there_too(structure: str) -> None:
    la = Laplace(network(), "regression", "all", "kron", prior_precision=1.0, sigma_noise=0.5)
    found = to_mode(la, BATCHES, structure=structure, steps=200, tolerance=1e-2)
    assert found.structure == structure
    assert found.converged


def test_the_evidence_is_stationary_in_the_weights() -> None:
    """What a Laplace approximation assumes: no weight can be moved to a higher joint density nearby."""
    la = Laplace(network(), "regression", "all", "full", prior_precision=1.0, sigma_noise=0.3)
    to_mode(la, BATCHES, tolerance=1e-7)

    def joint() -> float:
        la.fit(BATCHES)
        return float(la.log_likelihood + la.prior.log_prob(la.mean))

    best, model = joint(), la.model
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        away = [1e-3 * torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in model.parameters()]
        for sign in (1, -2):
            with torch.no_grad():
                for p, each in zip(model.parameters(), away, strict=True):
                    p.add_(sign * each)
            assert joint() < best
        with torch.no_grad():
            for p, each in zip(model.parameters(), away, strict=True):
                p.add_(each)


def test_modes_of_modules_are_left_alone_and_eval_is_meant() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 1)).double()
    la = Laplace(model.train(), "regression", "all", "full", sigma_noise=0.5)
    assert to_mode(la, BATCHES).converged
    assert all(module.training for module in model.modules())


def test_what_is_not_reached_is_said() -> None:
    la = Laplace(network(), "regression", "all", "full", sigma_noise=0.01)
    with pytest.warns(LapwingWarning, match="the mode was not reached: after 1 steps"):
        assert not to_mode(la, BATCHES, steps=1).converged
    with pytest.raises(OptionError, match="steps is 0"):
        to_mode(la, BATCHES, steps=0)
    with pytest.raises(OptionError, match=r"tolerance is 0\.0"):
        to_mode(la, BATCHES, tolerance=0.0)
    with pytest.raises(OptionError, match="unknown structure"):
        to_mode(la, BATCHES, structure="round")


def test_the_callback_is_told_of_every_step() -> None:
    la = Laplace(network(), "regression", "all", "kron", prior_precision=1.0, sigma_noise=0.5)
    told: list[Any] = []
    found = to_mode(la, BATCHES, tolerance=0.05, callback=told.append)
    assert len(told) == found.steps > 1
    assert [step.accepted for step in told[:-1]] == [True] * (found.steps - 1)
    assert told[-1].loss < told[0].loss
