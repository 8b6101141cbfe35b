"""GaussNewton: closed forms, the quadratic by brute force, damping by hand, refusals, and runs that go on."""

from __future__ import annotations

from copy import deepcopy
from math import isnan
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lapwing import estimate, priors
from lapwing.errors import CurvatureError, DataError, ModelError, OptionError, StorageError
from lapwing.likelihoods import Bernoulli, BernoulliMixture, Categorical, Gaussian, Likelihood, Poisson, from_function
from lapwing.linalg import Dense
from lapwing.params import ParamSpace
from lapwing.priors import Prior
from lapwing.tangent import Tangent
from lapwing.training import GaussNewton, Step, gauss_newton
from lapwing.training.damping import RAISED, Damping
from lapwing.training.quadratic import Here, Penalty, Plan
from oracle import ggn
from unchanged import unchanged

X = torch.linspace(-2, 2, 24, dtype=torch.float64).unsqueeze(1)
Y = torch.sin(2 * X)
LABELS = (Y[:, 0] > 0).long()
STRUCTURES = ("kron", "ekfac", "full", "gp", "blocks", "diag", "propagated_diag", "lowrank")


def network(outputs: int = 1, width: int = 5) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, outputs)).double()


def weights(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def loss_of(model: nn.Module, likelihood: Likelihood, x: Tensor, y: Tensor, decay: float | Tensor = 0.0) -> float:
    """As a user would write it."""
    data = -likelihood.log_prob(model(x), y).mean()
    return float(data.detach() + (decay * weights(model) ** 2).sum() / 2)


# -- closed forms ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["full", "gp", "blocks", "lowrank"])
def test_one_undamped_step_solves_a_linear_model(structure: str) -> None:
    torch.manual_seed(0)
    model, x, y = nn.Linear(3, 1).double(), torch.randn(20, 3).double(), torch.randn(20, 1).double()
    decay = 0.3
    options = {"rank": 4} if structure == "lowrank" else {}
    optimiser = GaussNewton(
        model,
        Gaussian(),
        structure=structure,
        estimator="exact",
        options=options,
        weight_decay=decay,
        tau=0.0,
        zeta=0.0,
    )
    step = optimiser.step(x, y)
    wide = torch.cat([x, torch.ones(20, 1).double()], 1)
    ridge = torch.linalg.solve(wide.mT @ wide / 20 + decay * torch.eye(4).double(), wide.mT @ y / 20).squeeze(1)
    torch.testing.assert_close(weights(model), ridge, rtol=1e-9, atol=1e-12)
    assert step.accepted
    assert step.ratio == pytest.approx(1.0, rel=1e-9)
    assert step.length == pytest.approx(1.0, rel=1e-9)


def test_a_step_of_a_prior_with_a_mean_ends_at_its_own_solution() -> None:
    torch.manual_seed(0)
    model, x, y = nn.Linear(3, 1, bias=False).double(), torch.randn(20, 3).double(), torch.randn(20, 1).double()
    precision, mean = torch.tensor([1.0, 2.0, 5.0]).double(), torch.tensor([0.5, -1.0, 2.0]).double()
    prior = Prior.diagonal(ParamSpace.of(model), precision, mean)
    GaussNewton(model, Gaussian(), structure="full", estimator="exact", prior=prior, points=20, tau=0.0, zeta=0.0).step(
        x, y
    )
    expected = torch.linalg.solve(x.mT @ x + precision.diag(), (x.mT @ y).squeeze(1) + precision * mean)
    torch.testing.assert_close(weights(model), expected, rtol=1e-9, atol=1e-12)


def posterior_of_earlier_data(size: int) -> priors.Gaussian:
    torch.manual_seed(1)
    rows, mean = torch.randn(6, size).double(), torch.randn(size).double()
    return priors.Gaussian(mean, Dense(rows.mT @ rows), 0.5)


def test_one_step_under_a_previous_posterior_ends_at_the_mode_of_both_data_sets() -> None:
    torch.manual_seed(0)
    model, x, y = nn.Linear(3, 1, bias=False).double(), torch.randn(20, 3).double(), torch.randn(20, 1).double()
    prior = posterior_of_earlier_data(3)
    options: dict[str, Any] = {"structure": "full", "estimator": "exact", "tau": 0.0, "zeta": 0.0}
    step = GaussNewton(model, Gaussian(), prior=prior, points=20, **options).step(x, y)
    precision = prior.curvature.dense() + 0.5 * torch.eye(3).double()
    mode = torch.linalg.solve(x.mT @ x + precision, (x.mT @ y).squeeze(1) + precision @ prior.mean)
    torch.testing.assert_close(weights(model), mode, rtol=1e-9, atol=1e-12)
    assert step.ratio == pytest.approx(1.0, rel=1e-9)
    assert step.length == pytest.approx(1.0, rel=1e-9)
    expected = -Gaussian().log_prob(x @ mode[:, None], y).mean() + prior.scatter(mode) / 40
    assert step.after == pytest.approx(float(expected), rel=1e-9)


@pytest.mark.parametrize("structure", ["kron", "diag", "gp"])
def test_a_previous_posterior_joins_any_structure(structure: str) -> None:
    """A batch of 24 points has its share, 24 / 100, of a prior for 100: direction and curvature by dense matrices."""
    model = network()
    prior = posterior_of_earlier_data(16)
    optimiser = GaussNewton(
        model, Gaussian(), structure=structure, estimator="exact", prior=prior, points=100, tau=0.1, zeta=0.3
    )
    here = optimiser.here([(X, Y)])
    optimiser._renew(here)
    assert optimiser._curvature is not None
    precision = (prior.curvature.dense() + 0.5 * torch.eye(16).double()) / 100
    gradient = Here.of(optimiser.tangent, Gaussian(), Penalty(), [(X, Y)]).gradient
    gradient = gradient + precision @ (here.theta - prior.mean)
    torch.testing.assert_close(here.gradient, gradient, rtol=1e-9, atol=1e-12)
    matrix = optimiser._curvature[0].dense() / 24 + precision + 0.3 * torch.eye(16).double()
    vector, unit = optimiser._direction(here, 0.3)
    direction = unit * vector
    torch.testing.assert_close(direction, -torch.linalg.solve(matrix, gradient), rtol=1e-9, atol=1e-12)
    exact = ggn(model, Gaussian(), X, Y) / 24 + precision
    bends = here.bends(torch.stack([direction, gradient]))
    both = torch.stack([direction, gradient])
    torch.testing.assert_close(bends, both @ exact @ both.mT, rtol=1e-9, atol=1e-12)


def renewals(refresh: int, count: int, **damping: Any) -> tuple[list[int], list[Tensor], list[Tensor]]:
    """Steps that renewed the curvature, what each of them estimated, and the average that it left."""
    steps, seen, kept = [], [], []

    def diagonal(*args: Any, **options: Any) -> Any:
        found = estimate.diagonal(*args, **options)
        if len(args[2][0][0]) == len(X):  # the search at the first step takes halves
            steps.append(optimiser.number)
            seen.append(found.diagonal())
        return found

    optimiser = GaussNewton(network(), Gaussian(), structure=diagonal, refresh=refresh, zeta_every=10**6, **damping)
    for _ in range(count):
        optimiser.step(X, Y)
        assert optimiser._curvature is not None
        if len(kept) < len(seen):
            kept.append(optimiser._curvature[0].diagonal())
    return steps, seen, kept


def test_curvature_is_new_where_zeta_is_looked_for_and_the_first_steps_are_forgotten() -> None:
    """The first steps go farthest: what was estimated before them is far from the curvature behind them."""
    steps, seen, kept = renewals(5, 17)
    assert steps == [0, 1, 2, 4, 5, 8, 10, 15, 16]
    expected = seen[0]
    for step, new, found in zip(steps, seen, kept, strict=True):
        expected = new if step < 5 else 0.9 * expected + 0.1 * new
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_given_damping_averages_from_the_beginning() -> None:
    steps, seen, kept = renewals(5, 11, tau=1.0, zeta=1.0)
    assert steps == [0, 5, 10]
    torch.testing.assert_close(kept[1], 0.9 * seen[0] + 0.1 * seen[1], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(kept[2], 0.9 * kept[1] + 0.1 * seen[2], rtol=1e-9, atol=1e-12)


def test_the_curvature_of_a_step_is_that_of_a_pass_of_its_own() -> None:
    """It is estimated on the pass that the gradient made, and is the same."""
    model = network(3)
    optimiser = GaussNewton(
        model, Categorical(), tau=1.0, zeta=1.0, refresh=1, moving_average=0, generator=torch.Generator().manual_seed(3)
    )
    expected = estimate.kfac(Tangent(model), Categorical(), [(X, LABELS)], generator=torch.Generator().manual_seed(3))
    optimiser.step(X, LABELS)
    assert optimiser._curvature is not None
    assert torch.equal(optimiser._curvature[0].diagonal(), expected.diagonal())
    expected = estimate.kfac(Tangent(model), Categorical(), [(X, LABELS)], generator=deepcopy(optimiser.generator))
    optimiser.step(X, LABELS)
    assert torch.equal(optimiser._curvature[0].diagonal(), expected.diagonal())


def test_kfac_is_kflr_in_expectation() -> None:
    """Means of drawn factors over 100 draws lie within four standard errors of the exact ones."""
    model, generator = network(3), torch.Generator().manual_seed(0)
    tangent, data = Tangent(model), [(X, LABELS)]
    exact = estimate.by_name("kron", "exact")(tangent, Categorical(), data).diagonal()
    drawn = torch.stack(
        [
            estimate.by_name("kron", "mc")(tangent, Categorical(), data, generator=generator).diagonal()
            for _ in range(100)
        ]
    )
    error = drawn.std(0) / 10
    assert bool(((drawn.mean(0) - exact).abs() <= 4 * error + 1e-12).all())


# -- the quadratic -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("likelihood", "y"), [(Gaussian(), Y), (Categorical(), LABELS), (Poisson(), Y.round().abs())])
def test_the_length_is_that_of_a_line_search_on_the_quadratic(likelihood: Likelihood, y: Tensor) -> None:
    """By brute force: the dense GGN, and q on a fine grid of lengths around the one that was taken."""
    model = network(2 if isinstance(likelihood, Categorical) else 1)
    decay, tau, zeta = 0.05, 0.3, 0.7
    matrix = ggn(model, likelihood, X, y) / len(X)
    before = weights(model)
    here = Here.of(Tangent(model), likelihood, Penalty(decay), [(X, y)])
    assert here.value == pytest.approx(loss_of(model, likelihood, X, y, decay), rel=1e-12)
    loss = -likelihood.log_prob(model(X), y).mean()
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]) + decay * before
    torch.testing.assert_close(here.gradient, gradient, rtol=1e-9, atol=1e-12)

    optimiser = GaussNewton(
        model, likelihood, structure="diag", estimator="exact", weight_decay=decay, tau=tau, zeta=zeta, tau_every=100
    )
    step = optimiser.step(X, y)
    eye = torch.eye(len(before)).double()
    direction = -gradient / (matrix.diagonal() + decay + zeta)
    damped = matrix + (decay + tau) * eye

    def q(length: float) -> float:
        return float(length * direction @ gradient + length**2 / 2 * direction @ damped @ direction)

    assert step.length == pytest.approx(float(-direction @ gradient / (direction @ damped @ direction)), rel=1e-9)
    assert all(q(step.length) <= q(step.length * (1 + share)) for share in (-0.5, -0.01, -1e-4, 1e-4, 0.01, 0.5))
    torch.testing.assert_close(weights(model), before + step.length * direction, rtol=1e-9, atol=1e-12)
    assert step.ratio == pytest.approx((step.after - step.loss) / q(step.length), rel=1e-6)


def test_momentum_minimises_the_quadratic_over_both_directions() -> None:
    model = network()
    matrix = ggn(model, Gaussian(), X, Y) / len(X)
    here = Here.of(Tangent(model), Gaussian(), Penalty(0.01), [(X, Y)])
    directions = torch.randn(2, len(here.theta), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    coefficients, value = Plan.of(here, directions, 1.0).best(0.2)
    damped = matrix + 0.21 * torch.eye(len(here.theta)).double()
    both = directions @ damped @ directions.mT
    expected = torch.linalg.solve(both, -directions @ here.gradient)
    torch.testing.assert_close(coefficients, expected, rtol=1e-9, atol=1e-12)
    step = expected @ directions
    assert value == pytest.approx(float(step @ here.gradient + step @ damped @ step / 2), rel=1e-9)


def test_a_second_direction_that_adds_nothing_is_left_out() -> None:
    here = Here.of(Tangent(network()), Gaussian(), Penalty(), [(X, Y)])
    alone = Plan.of(here, -here.gradient.unsqueeze(0), 1.0).best(0.1)
    twice = Plan.of(here, torch.stack([-here.gradient, torch.zeros_like(here.gradient)]), 1.0).best(0.1)
    assert twice[0].tolist() == [pytest.approx(float(alone[0][0])), 0.0]
    assert twice[1] == pytest.approx(alone[1])


@pytest.mark.parametrize("parts", [3, 24])
def test_micro_batches_take_the_step_of_the_whole(parts: int) -> None:
    found = []
    for micro in (None, 24 // parts):
        model = network()
        optimiser = GaussNewton(
            model,
            Gaussian(),
            structure="kron",
            estimator="exact",
            tau=0.1,
            zeta=0.1,
            micro_batch=micro,
            momentum=True,
            refresh=2,
        )
        for _ in range(3):
            optimiser.step(X, Y)
        found.append(weights(model))
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-12)


# -- damping -----------------------------------------------------------------------------------------------------------


def test_damping_follows_a_trace_by_hand() -> None:
    """Twenty steps: tau looked at every 5 by its ratio, zeta among three neighbours at the 20th; numbers by hand."""
    model, omega = network(), 0.9
    optimiser = GaussNewton(
        model,
        Gaussian(),
        structure="diag",
        estimator="exact",
        tau=0.5,
        zeta=0.4,
        tau_decay=omega,
        zeta_decay=omega,
        refresh=1,
    )
    tau, zeta, trace = 0.5, 0.4, []
    for number in range(21):
        if number == 20:  # the candidates, each by its own quadratic at these weights
            here = Here.of(Tangent(model), Gaussian(), Penalty(), [(X, Y)])
            gradient, total = here.gradient, ggn(model, Gaussian(), X, Y) / 24
            promised = {}
            for each in (omega * zeta, zeta, zeta / omega):
                curvature = optimiser._curvature
                assert curvature is not None
                now = estimate.diagonal(Tangent(model), Gaussian(), [(X, Y)])
                mixed = 0.9 * curvature[0].diagonal() / 24 + 0.1 * now.diagonal() / 24
                direction = -gradient / (mixed + each)
                bend = direction @ total @ direction + tau * direction @ direction
                promised[each] = float(-((direction @ gradient) ** 2) / bend / 2)
            zeta = min(promised, key=promised.__getitem__)
        step = optimiser.step(X, Y)
        assert step.accepted
        assert not step.refused
        if (number + 1) % 5 == 0:
            tau *= omega if step.ratio > 0.75 else 1 / omega
        trace.append((step.tau, step.zeta))
        assert trace[-1] == (pytest.approx(tau, rel=1e-12), pytest.approx(zeta, rel=1e-12))
    assert len({each for each, _ in trace}) == 5  # it moved at 5, 10, 15 and 20
    assert trace[19][1] == 0.4
    assert trace[20][1] != 0.4


@pytest.mark.parametrize(("ratio", "expected"), [(0.76, 0.5), (0.75, 2.0), (0.74, 2.0), (-1.0, 2.0), (5.0, 0.5)])
def test_tau_is_lowered_where_the_quadratic_kept_its_promise(ratio: float, expected: float) -> None:
    assert Damping(1.0, 1.0, tau_decay=0.5).after(ratio).tau == expected


def test_tied_damping_is_tau_everywhere() -> None:
    damping = Damping(2.0, None)
    assert damping.candidates() == (2.0,)
    assert damping.of_curvature == 2.0
    assert damping.with_zeta(3.0) == damping
    assert damping.after_refusal(0, 1.0).of_curvature == 2.0 * RAISED
    assert damping.after_refusal(4, 1.0).of_curvature == 2.0 * RAISED**3
    assert Damping(0.0, None).after_refusal(0, 5.0).tau == pytest.approx(5e-4 * RAISED)


def test_the_first_damping_does_not_depend_on_the_scale_of_the_loss() -> None:
    """A loss 100 times as steep has 100 times the damping, and the same step."""
    found = []
    for sigma in (1.0, 0.1):
        model = network()
        optimiser = GaussNewton(model, Gaussian(sigma), structure="kron", estimator="exact")
        optimiser.step(X, Y)
        found.append((weights(model), optimiser.damping.tau))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-6, atol=1e-9)
    assert found[1][1] == pytest.approx(100 * found[0][1], rel=1e-6)


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_a_step_that_would_raise_the_loss_is_shortened_until_it_does_not() -> None:
    """At tau = 0 the quadratic of this log-rate overshoots to a loss of e^40 or so."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, -8.0)
    x, y = torch.ones(4, 1).double(), torch.full((4, 1), 3.0).double()
    optimiser = GaussNewton(model, Poisson(), structure="full", estimator="exact", tau=0.0, zeta=0.0)
    step = optimiser.step(x, y)
    assert step.accepted
    assert step.refused > 0
    assert step.after < step.loss
    assert step.tau > 0
    assert step.after == pytest.approx(loss_of(model, Poisson(), x, y), rel=1e-12)


def test_a_step_that_cannot_be_had_leaves_the_weights_bit_for_bit() -> None:
    class Worse(nn.Module):
        """Any other weight is worse than this one, whatever the derivative says."""

        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.tensor([1.0]))

        def forward(self, x: Tensor) -> Tensor:
            return self.w * x if bool(self.w == 1) else self.w * x * float("nan")

    model = Worse()
    optimiser = GaussNewton(model, Gaussian(), structure="full", estimator="exact", tau=1.0, zeta=1.0)
    with unchanged(model):
        step = optimiser.step(torch.ones(3, 1), torch.zeros(3, 1))
    assert not step.accepted
    assert step.length == 0
    assert isnan(step.ratio)
    assert step.tau > 1


def test_a_batch_that_allows_no_step_does_not_freeze_the_next() -> None:
    """tau is raised by 5 % beyond a step that was given up, and not by all that was tried."""

    class Brittle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.tensor([1.0]))
            self.start = 1.0

        def forward(self, x: Tensor) -> Tensor:
            broken = bool((x > 5).any()) and float(self.w.detach()) != self.start
            return self.w * x * (float("nan") if broken else 1.0)

    optimiser = GaussNewton(Brittle(), Gaussian(), structure="full", estimator="exact", tau=1.0, zeta=1.0)
    given_up = optimiser.step(torch.full((3, 1), 6.0), torch.zeros(3, 1))
    assert not given_up.accepted
    assert given_up.refused > 5
    assert given_up.tau == pytest.approx(1 / 0.95)
    assert optimiser.step(torch.ones(3, 1), torch.zeros(3, 1)).accepted


@pytest.mark.parametrize("structure", STRUCTURES)
def test_every_structure_lowers_the_loss(structure: str) -> None:
    model = network(3)
    options: dict[str, Any] = {"options": {"rank": 8}} if structure == "lowrank" else {}
    averages = structure in ("kron", "full", "blocks", "diag", "propagated_diag")
    optimiser = GaussNewton(
        model, Categorical(), structure=structure, estimator="exact", moving_average=0.9 if averages else 0.0, **options
    )
    steps = optimiser.fit([(X, LABELS)], steps=15)
    assert all(step.after <= step.loss + 1e-12 for step in steps)
    assert steps[-1].after < 0.5 * steps[0].loss


@pytest.mark.parametrize("estimator", ["exact", "fisher", "mc", "projection", "recursive", "empirical"])
def test_every_source_lowers_the_loss(estimator: str) -> None:
    optimiser = GaussNewton(
        network(3), Categorical(), estimator=estimator, generator=torch.Generator().manual_seed(0), momentum=True
    )
    steps = optimiser.fit([(X, LABELS)], steps=15)
    assert steps[-1].after < 0.5 * steps[0].loss


@pytest.mark.parametrize("structure", ["gp", "lowrank"])
def test_curvatures_that_grow_have_no_moving_average(structure: str) -> None:
    options = {"rank": 3} if structure == "lowrank" else {}
    optimiser = GaussNewton(network(), Gaussian(), structure=structure, estimator="exact", options=options)
    optimiser.fit([(X, Y)], steps=5)
    with pytest.raises(CurvatureError, match="moving_average=0"):
        optimiser.step(X, Y)


def test_a_moving_average_is_one_of_factors() -> None:
    """By hand: A and G of two batches, each averaged by itself, and the mean curvature their product."""
    model = nn.Linear(2, 2, bias=False).double()
    torch.manual_seed(0)
    batches = [(torch.randn(n, 2).double(), torch.randn(n, 2).double()) for n in (4, 4)]
    optimiser = GaussNewton(model, Gaussian(), estimator="exact", tau=1.0, zeta=1.0, moving_average=0.75, refresh=1)
    for batch in batches:
        optimiser.step(*batch)
    a = [x.mT @ x / 4 for x, _ in batches]
    mixed = 0.75 * a[0] + 0.25 * a[1]
    assert optimiser._curvature is not None
    curvature, points = optimiser._curvature
    torch.testing.assert_close(
        curvature.dense() / points, torch.kron(torch.eye(2).double(), mixed), rtol=1e-9, atol=1e-12
    )


def test_curvature_is_renewed_every_few_steps() -> None:
    made = []

    def counted(*args: Any, **options: Any) -> Any:
        made.append(1)
        return estimate.diagonal(*args, **options)

    optimiser = GaussNewton(network(), Gaussian(), structure=counted, refresh=4, tau=1.0, zeta=1.0)
    optimiser.fit([(X, Y)], steps=9)
    assert len(made) == 3


def test_without_verification_the_loss_behind_is_seen_when_tau_is_due() -> None:
    optimiser = GaussNewton(network(), Gaussian(), structure="full", estimator="exact", verify=False, tau=1.0, zeta=1.0)
    steps = optimiser.fit([(X, Y)], steps=5)
    assert [isnan(step.after) for step in steps] == [True, True, True, True, False]


# -- likelihoods and networks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [False, True])
def test_steps_that_nobody_looks_behind_go_where_others_go(part: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are moved in place, with momentum, end where a verified step leads; also some entries alone."""
    found = []
    for far, verify in ((gauss_newton.FAR, False), (0.0, False), (gauss_newton.FAR, True)):
        monkeypatch.setattr(gauss_newton, "FAR", far)
        model = network()
        space = ParamSpace.of(model)
        chosen = space.select(mask=torch.arange(space.size) % 3 > 0) if part else space
        options: dict[str, Any] = {"structure": "full" if part else "kron", "estimator": "exact", "momentum": True}
        optimiser = GaussNewton(model, Gaussian(), space=chosen, verify=verify, tau=1.0, zeta=1.0, **options)
        steps = [optimiser.step(X, Y) for _ in range(7)]
        assert all(step.accepted and step.length > 0 for step in steps)
        assert [step.after == step.after for step in steps] == [verify or n == 4 for n in range(7)]
        found.append((weights(model), torch.tensor([step.length for step in steps])))
    for other in found[1:]:
        torch.testing.assert_close(found[0][0], other[0], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found[0][1], other[1], rtol=1e-9, atol=0)


def test_a_step_of_no_finite_length_is_not_taken_unseen() -> None:
    model = network()
    optimiser = GaussNewton(model, Gaussian(), structure="full", estimator="exact", verify=False, tau=1.0, zeta=1.0)
    before = weights(model).clone()
    optimiser._direction = lambda here, zeta, again=False: (here.gradient * torch.inf, 1.0)
    assert not optimiser.step(X, Y).accepted
    torch.testing.assert_close(weights(model), before, rtol=0, atol=0)


def test_the_mixture_of_bernoullis_trains_also_from_a_function() -> None:
    """The same density twice, by its class and as a function of one data point: the same steps."""
    y = LABELS.double()

    def nll(f: Tensor, target: Tensor) -> Tensor:
        p = torch.sigmoid(f)
        one, two = (p[k] ** target * (1 - p[k]) ** (1 - target) for k in (1, 2))
        return -torch.log(p[0] * one + (1 - p[0]) * two)

    found = []
    for likelihood in (BernoulliMixture(), from_function(nll)):
        model = network(3)
        steps = GaussNewton(model, likelihood, estimator="exact", tau=1e-3, zeta=1e-2).fit([(X, y)], steps=12)
        assert steps[-1].after < 0.7 * steps[0].loss
        found.append(weights(model))
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-8)


def test_weight_decay_differs_by_group() -> None:
    model = network()
    decays = torch.tensor([0.2] * 10 + [0.7] * 6, dtype=torch.float64)
    groups = [
        {"params": list(model[0].parameters()), "weight_decay": 0.2},
        {"params": list(model[2].parameters()), "weight_decay": 0.7},
    ]
    optimiser = GaussNewton(model, Gaussian(), estimator="exact", groups=groups)
    assert optimiser.step(X, Y).loss == pytest.approx(loss_of(network(), Gaussian(), X, Y, decays), rel=1e-12)
    optimiser.fit([(X, Y)], steps=200, full_batch=True)
    loss = -Gaussian().log_prob(model(X), Y).mean()
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
    assert float((gradient + decays * weights(model)).norm()) < 1e-4


def batch_normed(mode: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 1)).double()
    return model.train() if mode == "train" else model.eval()


def test_batch_normalisation_and_dropout_are_refused_or_frozen() -> None:
    model = batch_normed("train")
    with unchanged(model), pytest.raises(ModelError):
        GaussNewton(model, Gaussian()).step(X, Y)
    frozen, plain = batch_normed("train"), batch_normed("eval")
    for each, option in ((frozen, True), (plain, False)):
        GaussNewton(each, Gaussian(), estimator="exact", frozen=option).step(X, Y)
    torch.testing.assert_close(weights(frozen), weights(plain), rtol=0, atol=0)
    assert frozen.training
    assert torch.equal(frozen[1].running_mean, torch.zeros(4).double())  # type: ignore[index]


# -- as an optimiser of torch ------------------------------------------------------------------------------------------


def test_it_is_a_torch_optimiser() -> None:
    model = network()
    optimiser = GaussNewton(model, Gaussian(), estimator="exact")
    assert isinstance(optimiser, torch.optim.Optimizer)
    model(X).sum().backward()
    optimiser.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    calls = []
    optimiser.register_step_post_hook(lambda *_: calls.append(1))
    first = optimiser.step(lambda: (X, Y))
    assert isinstance(first, Step)
    assert calls == [1]
    assert all(p.grad is None for p in model.parameters())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert optimiser.step(X, Y).after < first.loss


@pytest.mark.parametrize("momentum", [False, True])
def test_the_state_makes_another_optimiser_go_on_bit_for_bit(momentum: bool) -> None:
    def made(model: nn.Module) -> GaussNewton:
        generator = torch.Generator().manual_seed(3)
        return GaussNewton(model, Categorical(), generator=generator, refresh=3, momentum=momentum)

    model = network(2)
    optimiser = made(model)
    optimiser.fit([(X, LABELS)], steps=8)
    copy = network(2)
    copy.load_state_dict(model.state_dict())
    other = made(copy)
    state = deepcopy(optimiser.state_dict())
    other.load_state_dict(state)
    ours, theirs = (each.fit([(X, LABELS)], steps=30) for each in (optimiser, other))
    assert [repr(step) for step in ours] == [repr(step) for step in theirs]
    assert torch.equal(weights(model), weights(copy))


def test_a_state_can_be_loaded_by_torch_without_pickled_classes(tmp_path: Path) -> None:
    optimiser = GaussNewton(network(), Gaussian(), estimator="exact")
    optimiser.step(X, Y)
    torch.save(optimiser.state_dict(), tmp_path / "state.pt")
    other = GaussNewton(network(), Gaussian(), estimator="exact")
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert other.damping == optimiser.damping
    assert other.number == 1


@pytest.mark.parametrize("key", ["state", "param_groups"])
def test_a_state_of_something_else_is_refused(key: str) -> None:
    optimiser = GaussNewton(network(), Gaussian())
    optimiser.step(X, Y)
    state = optimiser.state_dict()
    with pytest.raises(StorageError, match="parameters in"):
        GaussNewton(network(width=7), Gaussian()).load_state_dict(state)
    del state[key]
    with pytest.raises(StorageError, match="state_dict gave"):
        GaussNewton(network(), Gaussian()).load_state_dict(state)


class Killed:
    """A loader that breaks off after some batches, as a kill would."""

    def __init__(self, inner: DataLoader, batches: int) -> None:
        self.inner, self.left, self.generator = inner, batches, inner.generator

    def __iter__(self) -> Any:
        for batch in self.inner:
            if not self.left:
                raise KeyboardInterrupt
            self.left -= 1
            yield batch


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("batches", [3, 7, 12])
def test_a_killed_run_ends_where_it_would_have_ended(tmp_path: Path, batches: int, own: bool) -> None:
    """Also in the middle of an epoch of 6 batches; kept every 2 steps, shuffled by its own or the global generator."""

    def run(path: Path | None, kill: int | None = None) -> tuple[Tensor, list[Step]]:
        torch.manual_seed(11)
        model = network(2).float()
        shuffled = torch.Generator().manual_seed(2) if own else None
        loader: Any = DataLoader(TensorDataset(X.float(), LABELS), batch_size=4, shuffle=True, generator=shuffled)
        optimiser = GaussNewton(model, Categorical(), generator=torch.Generator().manual_seed(1), refresh=3)
        loader = loader if kill is None else Killed(loader, kill)
        steps = optimiser.fit(loader, epochs=3, checkpoint=path, checkpoint_every=2)
        return weights(model), steps

    # the first state that is written lays tensors out anew, so the reference keeps a file as well
    expected, steps = run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "broken", batches)
    assert (tmp_path / "broken").exists()
    found, again = run(tmp_path / "broken")
    assert torch.equal(found, expected)
    assert [repr(step) for step in again] == [repr(step) for step in steps]
    assert not (tmp_path / "broken").exists()


def test_a_file_of_another_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    loader = DataLoader(TensorDataset(X, Y), batch_size=4)
    with pytest.raises(KeyboardInterrupt):
        GaussNewton(network(), Gaussian()).fit(Killed(loader, 4), epochs=3, checkpoint=path, checkpoint_every=2)
    with pytest.raises(StorageError, match="epochs was 3 and is 4"):
        GaussNewton(network(), Gaussian()).fit(loader, epochs=4, checkpoint=path)
    with pytest.raises(StorageError, match=r"another run: tensor 0\.weight"):
        GaussNewton(network(width=3), Gaussian()).fit(loader, epochs=3, checkpoint=path)
    path.write_bytes(b"something else")
    with pytest.raises(StorageError, match="Delete it"):
        GaussNewton(network(), Gaussian()).fit(loader, epochs=3, checkpoint=path)


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_a_batch_with_nan_is_named_and_the_weights_are_as_they_were() -> None:
    model = network()
    x = X.clone()
    x[9] = float("nan")
    optimiser = GaussNewton(model, Gaussian(), estimator="exact")
    seen = []
    with pytest.raises(DataError, match="epoch 0, batch 2"):
        optimiser.fit(
            [(x[k : k + 4], Y[k : k + 4]) for k in range(0, 24, 4)],
            epochs=1,
            callback=lambda s: seen.append(weights(model)),
        )
    assert len(seen) == 2
    assert torch.equal(weights(model), seen[-1])
    y = Y.clone()
    y[0] = float("inf")
    with unchanged(model), pytest.raises(DataError, match="step 2"):
        optimiser.step(X, y)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"structure": "round"}, "unknown structure 'round'"),
        ({"estimator": "guess"}, "unknown estimator 'guess'"),
        ({"structure": "full", "estimator": "recursive"}, "recursive"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0"),
        ({"weight_decay": float("nan")}, "weight_decay is nan"),
        ({"tau": -1.0, "zeta": 1.0}, "tau is -1.0"),
        ({"zeta": "tide"}, "zeta is 'tide'"),
        ({"tau_decay": 1.0}, "tau_decay is 1.0"),
        ({"zeta_every": 0}, "zeta_every is 0"),
        ({"moving_average": 1.0}, "moving_average is 1.0"),
        ({"refresh": 0}, "refresh is 0"),
        pytest.param({"micro_batch": 2.5}, "micro_batch is 2.5", marks=pytest.mark.mistyped),
        ({"groups": [{"params": []}]}, "leave out"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises((OptionError, ValueError), match=message):
        GaussNewton(network(), Gaussian(), **options)


def test_other_mistakes_are_named() -> None:
    model = network()
    with pytest.raises(OptionError, match="without `points`"):
        GaussNewton(model, Gaussian(), prior=Prior.isotropic(ParamSpace.of(model)))
    with pytest.raises(OptionError, match="one of 3 parameters; expected 16"):
        GaussNewton(model, Gaussian(), prior=posterior_of_earlier_data(3), points=24)
    with pytest.raises(OptionError, match="no trainable parameters"):
        GaussNewton(model, Gaussian(), groups=[{"params": [*model.parameters(), nn.Parameter(torch.ones(1))]}])
    optimiser = GaussNewton(model, Gaussian())
    for epochs, steps in ((None, None), (1, 1)):
        with pytest.raises(OptionError, match="exactly one"):
            optimiser.fit([(X, Y)], epochs=epochs, steps=steps)
    with pytest.raises(OptionError, match="steps is 0"):
        optimiser.fit([(X, Y)], steps=0)
    with pytest.raises(OptionError, match="tolerance is 2"):
        optimiser.fit([(X, Y)], steps=1, tolerance=2)
    with pytest.raises(DataError, match="only once"):
        optimiser.fit(iter([(X, Y)]), steps=3)
    with pytest.raises(DataError, match="no batch"):
        optimiser.fit([], epochs=2)
    with pytest.raises(DataError, match="no batch"):
        optimiser.step_over([])
    with pytest.raises(DataError, match="batch 0 is a Tensor"):
        optimiser.fit([X], epochs=1)  # type: ignore[list-item]


def test_a_run_ends_where_the_gradient_is_small_enough() -> None:
    model = network()
    optimiser = GaussNewton.levenberg_marquardt(model, Gaussian(), weight_decay=1e-3)
    steps = optimiser.fit([(X, Y)], steps=500, full_batch=True, tolerance=1e-8)
    assert len(steps) < 100
    assert steps[-1].gradient <= 1e-8 * steps[0].gradient


def test_binary_targets_and_float32_autoencoders_train() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, 6))
    x = torch.rand(40, 6).round()
    steps = GaussNewton(model, Bernoulli(), estimator="recursive").fit([(x, x)], steps=40)
    assert steps[-1].after < 0.6 * steps[0].loss
