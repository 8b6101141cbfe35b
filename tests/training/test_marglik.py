"""Training by the marginal likelihood: on linear-Gaussian models it ends at the optimum of the exact evidence, and on
networks it keeps what it promises about modes, weights, noise, schedulers and randomness."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal
from torch.utils.data import DataLoader, TensorDataset

from lapwing import estimate
from lapwing.errors import CurvatureError, DataError, LikelihoodError, ParameterError, UnsupportedOperationError
from lapwing.evidence import Evidence, GaussianFit, gradient
from lapwing.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Poisson
from lapwing.linalg import Curvature, Diagonal
from lapwing.params import ParamSpace
from lapwing.priors import Prior
from lapwing.tangent import Tangent
from lapwing.training import Epoch, EvidenceTuner, Hyper, adam, train

N, D = 40, 3
NEWTON = {"max_iter": 50, "line_search_fn": "strong_wolfe", "tolerance_grad": 1e-11, "tolerance_change": 0.0}
LBFGS = {"optimizer_cls": torch.optim.LBFGS, "optimizer_kwargs": NEWTON}
STILL = {"optimizer_cls": torch.optim.SGD, "optimizer_kwargs": {"lr": 0.0}}


def linear_data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(N, D, generator=generator, dtype=torch.float64)
    w = torch.tensor([1.0, -0.5, 0.2], dtype=torch.float64)
    return x, (x @ w + 0.3 + 0.4 * torch.randn(N, generator=generator, dtype=torch.float64)).unsqueeze(1)


def design(x: Tensor) -> Tensor:
    return torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], dim=1)


def exact(x: Tensor, y: Tensor, precisions: Tensor, sigma: Tensor) -> Tensor:
    """log N(y | 0, X diag(1/precision) X^T + sigma^2 I)."""
    covariance = design(x) @ torch.diag(1 / precisions) @ design(x).mT
    covariance = covariance + sigma**2 * torch.eye(len(x), dtype=torch.float64)
    return MultivariateNormal(torch.zeros(len(x), dtype=torch.float64), covariance).log_prob(y[:, 0])


def mode(x: Tensor, y: Tensor, precisions: Tensor, sigma: float, temperature: float = 1.0) -> Tensor:
    hessian = design(x).mT @ design(x) / (sigma**2 * temperature) + torch.diag(precisions)
    return torch.linalg.solve(hessian, design(x).mT @ y[:, 0] / (sigma**2 * temperature))


def curve() -> tuple[Tensor, Tensor]:
    x = torch.linspace(-2, 2, 48, dtype=torch.float64).unsqueeze(1)
    return x, torch.sin(2 * x) + 0.1 * torch.randn(48, 1, generator=torch.Generator().manual_seed(1), dtype=x.dtype)


def blobs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    y = torch.arange(60) % 3
    centres = torch.tensor([[2.0, 0.0], [-1.0, 1.7], [-1.0, -1.7]], dtype=torch.float64)
    return centres[y] + 0.6 * torch.randn(60, 2, generator=generator, dtype=torch.float64), y


def batches(x: Any, y: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), y.split(size), strict=True))


def small(outputs: int = 1, inputs: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


class Notes(list[bool]):
    """Shared with private copies of the module that holds it, which have plain lists of their own."""


class Watch(nn.Module):
    """Notes the mode of every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Notes()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.training)
        return x


# -- the optimum ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", [estimate.full, estimate.kflr, estimate.blocks])
def test_a_linear_model_ends_at_the_optimum_of_a_fine_grid(estimator: Any) -> None:
    x, y = linear_data()
    model = nn.Linear(D, 1).double()
    found = train(
        model, [(x, y)], Gaussian(), estimator=estimator, prior="isotropic", epochs=10, hyper_steps=40, **LBFGS
    )
    at, level = float(found.prior.precisions[0].log()), float(found.sigma.log())
    steps = torch.linspace(-0.02, 0.02, 9, dtype=torch.float64)
    coarse = torch.linspace(-2.0, 2.0, 21, dtype=torch.float64)
    for grid in (coarse, steps):
        values = torch.stack(
            [exact(x, y, (at + a).exp().expand(D + 1), (level + b).exp()) for a, b in itertools.product(grid, grid)]
        )
        middle = len(grid) // 2
        assert divmod(int(values.argmax()), len(grid)) == (middle, middle)
    expected = exact(x, y, found.prior.precisions[0].expand(D + 1), found.sigma)
    torch.testing.assert_close(torch.tensor(max(found.log_marginals)).double(), expected, rtol=1e-6, atol=0)
    theta = ParamSpace.of(model).values(model)
    torch.testing.assert_close(
        theta, mode(x, y, found.prior.precisions.expand(4), float(found.sigma)), rtol=1e-3, atol=0
    )


@pytest.mark.slow
def test_minibatches_of_adam_end_there_too() -> None:
    x, y = linear_data()
    model = nn.Linear(D, 1).double()
    loader = DataLoader(TensorDataset(x, y), batch_size=10, shuffle=True)
    found = train(
        model,
        loader,
        Gaussian(),
        estimator=estimate.full,
        epochs=80,
        every=4,
        hyper_steps=15,
        optimizer_kwargs={"lr": 0.1},
        scheduler_cls=torch.optim.lr_scheduler.ExponentialLR,
        scheduler_kwargs={"gamma": 0.93},
        generator=torch.Generator().manual_seed(0),
    )
    options = {"estimator": estimate.full, "epochs": 10, "hyper_steps": 30}
    reference = train(nn.Linear(D, 1).double(), [(x, y)], Gaussian(), **options, **LBFGS)
    assert found.log_marginals[-1] == pytest.approx(reference.log_marginals[-1], abs=1e-3)
    torch.testing.assert_close(found.prior.precisions, reference.prior.precisions, rtol=0.02, atol=0)
    torch.testing.assert_close(found.sigma, reference.sigma, rtol=5e-3, atol=0)


@pytest.mark.parametrize(("sigma", "temperature"), [(1.0, 1.0), (0.3, 1.0), (0.3, 2.5), (2.0, 0.4)])
def test_the_weights_are_the_mode_of_the_posterior(sigma: float, temperature: float) -> None:
    x, y = linear_data()
    model, precisions = nn.Linear(D, 1).double(), torch.tensor([2.0, 0.5], dtype=torch.float64)
    prior = Prior.per_tensor(ParamSpace.of(model), precisions)
    options = {"sigma": sigma, "temperature": temperature, "fixed_noise": True, "hyper_steps": 0, "epochs": 3}
    # by gradients alone: a line search compares losses, which tell weights apart to 1e-8 and no further
    steps = {"optimizer_cls": torch.optim.LBFGS, "optimizer_kwargs": NEWTON | {"line_search_fn": None}}
    found = train(model, [(x, y)], Gaussian(), prior=prior, **options, **steps)
    expected = mode(x, y, precisions[[0, 0, 0, 1]], sigma, temperature)
    torch.testing.assert_close(ParamSpace.of(model).values(model), expected, rtol=1e-9, atol=0)
    torch.testing.assert_close(found.prior.precisions, precisions, rtol=1e-12, atol=0)
    torch.testing.assert_close(found.evidence.mean, expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_loss_is_the_negative_log_joint_per_point_of_what_the_loader_yields(drop_last: bool) -> None:
    """D14: with drop_last the data are those that are seen, 36 here and not 40."""
    x, y = linear_data()
    model = nn.Linear(D, 1).double()
    prior = Prior.isotropic(ParamSpace.of(model), 1.5, 0.1)
    loader = DataLoader(TensorDataset(x, y), batch_size=12, drop_last=drop_last)
    options = {"sigma": 0.7, "temperature": 2.0, "fixed_noise": True, "hyper_steps": 0, "epochs": 2, "burn_in": 1}
    found = train(model, loader, Gaussian(), prior=prior, **options, **STILL)
    n = 36 if drop_last else 40
    theta = ParamSpace.of(model).values(model)
    terms = Gaussian(0.7).log_prob(model(x[:n]).detach(), y[:n])
    expected = float(-terms.sum() / 2.0 + prior.scatter(theta) / 2) / n
    assert found.losses == pytest.approx((expected, expected), rel=1e-12)
    assert found.evidence.fit.targets == n
    told = train(model, loader, Gaussian(), prior=prior, points=1000, **options, **STILL)
    assert told.losses[0] == pytest.approx(expected + float(prior.scatter(theta) / 2) * (1 / 1000 - 1 / n), rel=1e-12)


@pytest.mark.parametrize(("sigma", "temperature"), [(0.1, 1.0), (5.0, 3.0)])
def test_a_step_follows_the_gradient_at_unit_noise(sigma: float, temperature: float) -> None:
    """A learning rate means the same for every noise level: the residuals' gradient is not divided by sigma^2."""
    x, y = linear_data()
    model = nn.Linear(D, 1).double()
    start = ParamSpace.of(model).values(model)
    options = {"sigma": sigma, "temperature": temperature, "fixed_noise": True, "hyper_steps": 0, "epochs": 1}
    sgd = {"optimizer_cls": torch.optim.SGD, "optimizer_kwargs": {"lr": 0.1}}
    train(model, [(x, y)], Gaussian(), prior="isotropic", precision=2.0, **options, **sgd)
    residual = design(x) @ start - y[:, 0]
    slope = (design(x).mT @ residual + temperature * sigma**2 * 2.0 * start) / N
    torch.testing.assert_close(ParamSpace.of(model).values(model), start - 0.1 * slope, rtol=1e-10, atol=0)


@pytest.mark.parametrize("structure", ["isotropic", "per_tensor", "diagonal"])
@pytest.mark.parametrize("mean", [0.3, "each"])
def test_the_priors_part_and_its_gradient_are_those_of_the_flat_vector(structure: str, mean: Any) -> None:
    x, y = linear_data()
    model = nn.Sequential(nn.Linear(D, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    space = ParamSpace.of(model)
    about = torch.linspace(-1, 1, space.size, dtype=torch.float64) if mean == "each" else mean
    count = {"isotropic": 1, "per_tensor": 4, "diagonal": space.size}[structure]
    prior = getattr(Prior, structure)(space, torch.linspace(0.5, 2, count, dtype=torch.float64), about)
    objective = EvidenceTuner(model, [(x, y)], Gaussian(), prior=prior, estimator=estimate.diagonal).objective
    found = objective.penalty(prior)
    expected = prior.scatter(space.ravel(dict(model.named_parameters()))) / (2 * N)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    parameters = list(model.parameters())
    slopes = zip(torch.autograd.grad(3 * found, parameters), torch.autograd.grad(3 * expected, parameters), strict=True)
    for ours, flat in slopes:
        torch.testing.assert_close(ours, flat, rtol=1e-12, atol=1e-15)


def test_batches_do_not_gather_precisions_again(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = linear_data()
    objective = EvidenceTuner(nn.Linear(D, 1).double(), [(x, y)], Gaussian()).objective
    prior = Prior.per_tensor(objective.tangent.space, 2.0)
    gradient = objective.under(prior, 1.0)
    expected = gradient(x, y)
    for name in ("precision", "sums", "scatter"):
        monkeypatch.delattr(Prior, name)
    assert gradient(x, y) == expected


# -- steps on the evidence ------------------------------------------------------------------------------------------


def linear_evidence() -> tuple[Evidence, ParamSpace]:
    x, y = linear_data()
    tangent = Tangent(nn.Linear(D, 1).double())
    curvature = estimate.full(tangent, Gaussian(), [(x, y)])
    fit = GaussianFit(N, (y - tangent.at(x).value).square().sum())
    return Evidence(curvature, tangent.space.values(tangent.model), fit), tangent.space


def test_adam_climbs_to_where_lbfgs_does() -> None:
    evidence, space = linear_evidence()
    climbed = adam(evidence, Prior.per_tensor(space), 1.0, steps=400, lr=0.1)
    best = gradient(evidence, Prior.per_tensor(space), 1.0)
    assert climbed.converged
    torch.testing.assert_close(climbed.log_marginal, best.log_marginal, rtol=1e-9, atol=0)
    torch.testing.assert_close(climbed.prior.precisions, best.prior.precisions, rtol=1e-4, atol=0)
    torch.testing.assert_close(climbed.sigma, best.sigma, rtol=1e-4, atol=0)


def test_a_state_makes_two_calls_one() -> None:
    evidence, space = linear_evidence()
    prior = Prior.per_tensor(space)
    together = adam(evidence, prior, 1.0, steps=30, lr=0.1)
    state = Hyper.of(prior, noise=True)
    half = adam(evidence, prior, 1.0, steps=14, lr=0.1, state=state)
    apart = adam(evidence, half.prior, half.sigma, steps=16, lr=0.1, state=state)
    torch.testing.assert_close(apart.prior.precisions, together.prior.precisions, rtol=1e-10, atol=0)
    torch.testing.assert_close(apart.log_marginal, together.log_marginal, rtol=1e-12, atol=0)
    assert len(state.values) == 30
    cold = adam(evidence, half.prior, half.sigma, steps=16, lr=0.1)
    assert not torch.allclose(cold.prior.precisions, together.prior.precisions, rtol=1e-3)
    assert not half.converged


def test_adam_with_a_state_of_another_size_or_a_fixed_noise() -> None:
    evidence, space = linear_evidence()
    prior = Prior.per_tensor(space)
    with pytest.raises(ParameterError, match=r"holds 3 hyper-parameters; expected 2.*state=None"):
        adam(evidence, Prior.isotropic(space), state=Hyper.of(prior, noise=True))
    fixed = adam(evidence, prior, 0.7, steps=5, fixed_noise=True)
    assert float(fixed.sigma) == 0.7
    assert not torch.equal(fixed.prior.precisions, prior.precisions)


def test_adam_climbs_the_tempered_evidence() -> None:
    evidence, space = linear_evidence()
    climbed = adam(evidence, Prior.isotropic(space), 1.0, steps=400, lr=0.1, temperature=3.0)
    free = torch.stack([climbed.prior.precisions[0].log(), climbed.sigma.log()]).requires_grad_()
    value = evidence.log_marginal(Prior.isotropic(space).with_precisions(free[:1].exp()), free[1].exp(), 3.0)
    (slope,) = torch.autograd.grad(value, free)
    assert float(slope.abs().max()) < 1e-4


def test_hyper_steps_do_not_decompose_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda *args, **kwargs: calls.append(1) or real(*args, **kwargs))
    counts = []
    for steps in (1, 50):
        calls.clear()
        train(small(), [curve()], Gaussian(), prior="per_tensor", epochs=1, hyper_steps=steps)
        counts.append(len(calls))
    assert counts[0] == counts[1] > 0


# -- networks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prior", "groups"), [("isotropic", 1), ("layerwise", 2), ("per_tensor", 4)])
def test_the_evidence_rises_under_every_structure(prior: str, groups: int) -> None:
    x, y = curve()
    found = train(
        small(),
        batches(x, y, 16),
        Gaussian(),
        prior=prior,
        epochs=80,
        every=10,
        hyper_steps=10,
        optimizer_kwargs={"lr": 0.04},
    )
    assert found.log_marginals[-1] > found.log_marginals[0] + 10
    assert len(found.prior.precisions) == groups
    assert found.prior.structure == prior
    assert 0.02 < float(found.sigma) < 0.8
    assert found.curvature is found.evidence.curvature
    assert len(found.steps) == 80


def test_one_precision_per_weight_under_a_diagonal_curvature() -> None:
    found = train(
        small(), [curve()], Gaussian(), estimator=estimate.diagonal, prior="diagonal", epochs=2, hyper_steps=2
    )
    assert len(found.prior.precisions.unique()) > 1


def test_what_the_estimator_cannot_do_is_said_before_the_first_step() -> None:
    """Not after a long burn-in: a prior that Kronecker factors cannot carry, a layer that is asked to be refused."""
    model = small()
    before = ParamSpace.of(model).values(model)
    with pytest.raises(CurvatureError, match=r"prior precision differs within one weight.*per-tensor prior"):
        train(model, [curve()], Gaussian(), prior="diagonal", epochs=9, burn_in=8)
    assert torch.equal(ParamSpace.of(model).values(model), before)

    class Token(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.out = nn.Parameter(torch.ones(1).double()), nn.Linear(2, 1).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.out(torch.hstack([x, self.token.expand(len(x), 1)]))

    strict = partial(estimate.kflr, on_unsupported="error")
    with pytest.raises(UnsupportedOperationError, match=r"'token' is used by 'hstack'.*no Kronecker product"):
        train(Token(), [curve()], Gaussian(), estimator=strict, epochs=9, burn_in=8)


def counts() -> tuple[Tensor, Tensor]:
    x, _ = curve()
    return x, torch.poisson(torch.exp(0.5 + x), generator=torch.Generator().manual_seed(0))


def truths() -> tuple[Tensor, Tensor]:
    x, _ = curve()
    return x, (torch.rand(48, 1, generator=torch.Generator().manual_seed(0)).double() < torch.sigmoid(3 * x)).double()


@pytest.mark.parametrize(
    ("likelihood", "data", "outputs"), [(Categorical(), blobs, 3), (Bernoulli(), truths, 1), (Poisson(), counts, 1)]
)
def test_likelihoods_without_noise(likelihood: Likelihood, data: Any, outputs: int) -> None:
    x, y = data()
    model = small(outputs, x.shape[1])
    before = float(likelihood.log_prob(model(x).detach(), y).sum())
    found = train(model, batches(x, y, 20), likelihood, epochs=15, hyper_steps=5, optimizer_kwargs={"lr": 0.05})
    assert found.log_marginals[-1] > found.log_marginals[0] + 2
    assert float(found.sigma) == 1
    fit = likelihood.log_prob(model(x).detach(), y).sum()
    assert float(fit) > before
    torch.testing.assert_close(found.evidence.fit, fit, rtol=1e-9, atol=0)
    if isinstance(likelihood, Categorical):
        assert float((model(x).argmax(1) == y).double().mean()) > 0.95


@pytest.mark.parametrize("estimator", [estimate.kfac, estimate.diagonal, estimate.empirical])
def test_other_estimators(estimator: Any) -> None:
    x, y = blobs()
    found = train(small(3, 2), batches(x, y, 20), Categorical(), estimator=estimator, epochs=2, hyper_steps=3)
    assert len(found.log_marginals) == 2


def test_the_fit_is_learnt_in_the_pass_of_the_estimator() -> None:
    model, ours, _ = normalised()
    inside: list[int] = []

    def watched(*args: Any, **options: Any) -> Curvature:
        before = len(ours.seen)
        curvature = estimate.kflr(*args, **options)
        inside.append(len(ours.seen) - before)
        return curvature

    train(model, batches(*blobs(), 20), Categorical(), estimator=watched, epochs=2, hyper_steps=1)
    assert len(inside) == 3  # a look at the first batch, and two evaluations
    assert ours.seen.count(False) == sum(inside)


def test_an_estimator_that_reports_no_batch_is_refused() -> None:
    def silent(tangent: Tangent, *args: Any, **options: Any) -> Curvature:
        return Diagonal(torch.ones(tangent.space.size).double())

    with pytest.raises(CurvatureError, match=r"reported no batch; expected .*linearised or observe"):
        train(small(), [curve()], Gaussian(), estimator=silent, epochs=1)


def test_inputs_that_are_tuples_and_mappings() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 3).double()

        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return self.inner(torch.cat([left, right], dim=1))

    x, y = blobs()
    results = []
    for pack in (lambda a: (a, a.square()), lambda a: {"left": a, "right": a.square()}):
        torch.manual_seed(0)
        loader = [(pack(a), b) for a, b in batches(x, y, 20)]
        results.append(train(Two(), loader, Categorical(), epochs=2, hyper_steps=3).log_marginals)
    assert results[0] == results[1]


# -- modes, weights and buffers -------------------------------------------------------------------------------------


def normalised() -> tuple[nn.Sequential, Watch, Watch]:
    """Dropout, BatchNorm, a frozen BatchNorm, and what sees the modes of the model and of a module in eval mode."""
    ours, frozen = Watch(), Watch()
    model = nn.Sequential(
        nn.Linear(2, 8), nn.BatchNorm1d(8), ours, nn.Dropout(0.5), nn.BatchNorm1d(8), frozen, nn.Linear(8, 3)
    ).double()
    model[4].eval()
    frozen.eval()
    return model, ours, frozen


def test_d13_train_mode_is_on_again_after_every_evaluation() -> None:
    model, ours, frozen = normalised()
    x, y = blobs()
    during: list[bool] = []
    train(
        model,
        batches(x, y, 20),
        Categorical(),
        epochs=3,
        every=1,
        hyper_steps=2,
        callback=lambda epoch: during.extend([model.training, model[1].training, model[3].training, model[4].training]),
    )
    assert during == [True, True, True, False] * 3
    changes = [mode for mode, _ in itertools.groupby(ours.seen)]
    assert changes == [False] + [True, False] * 3  # a look at the first batch; an epoch, an evaluation, and again
    assert sum(ours.seen) == 9
    assert not any(frozen.seen)
    assert [module.training for module in model] == [True, True, True, True, False, False, True]


def test_a_model_in_eval_mode_is_trained_in_train_mode_and_given_back_in_eval_mode() -> None:
    model, ours, _ = normalised()
    model.eval()
    x, y = blobs()
    train(model, batches(x, y, 20), Categorical(), epochs=2, hyper_steps=2)
    assert sum(ours.seen) == 6
    assert not any(module.training for module in model.modules())


def test_running_statistics_come_from_training_alone_and_belong_to_the_best_weights() -> None:
    model, _, _ = normalised()
    x, y = blobs()
    kept: dict[int, dict[str, Tensor]] = {}

    def keep(epoch: Epoch) -> None:
        kept[epoch.number] = {name: value.clone() for name, value in model.state_dict().items()}
        assert int(model[1].num_batches_tracked) == 3 * epoch.number

    found = train(
        model,
        batches(x, y, 20),
        Categorical(),
        epochs=12,
        hyper_steps=5,
        optimizer_kwargs={"lr": 0.1},
        scheduler_cls=torch.optim.lr_scheduler.LambdaLR,
        scheduler_kwargs={"lr_lambda": lambda epoch: 1.0 if epoch < 5 else 30.0},  # ruins what was learnt
        callback=keep,
    )
    best = max(range(12), key=lambda i: found.log_marginals[i]) + 1
    assert found.best_epoch == best < 12
    assert found.evaluated == tuple(range(1, 13))
    for name, value in model.state_dict().items():
        assert torch.equal(value, kept[best][name])
        assert torch.equal(value, found.state[name])
        assert value.data_ptr() != found.state[name].data_ptr()
    assert torch.equal(found.evidence.mean, ParamSpace.of(model).values(model))
    value = found.evidence.log_marginal(found.prior, found.sigma)
    assert float(value) == pytest.approx(max(found.log_marginals), rel=1e-9)
    assert all(p.grad is None for p in model.parameters())


class Interrupted:
    """A loader that is interrupted before the batch of some number, counted over all passes."""

    def __init__(self, data: list, at: int) -> None:
        self.data, self.left = data, at

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in self.data:
            if not self.left:
                raise KeyboardInterrupt
            self.left -= 1
            yield batch


@pytest.mark.parametrize(("at", "taken", "evaluating"), [(3 + 3 + 3 + 1, 4, False), (3 + 3 + 2, 3, True)])
def test_an_interruption_leaves_the_last_weights_and_the_modes(at: int, taken: int, evaluating: bool) -> None:
    """Passes of three batches: one to count, then an epoch and an evaluation in turn."""
    model, ours, _ = normalised()
    start = ParamSpace.of(model).values(model)
    model[0].eval()
    modes = [module.training for module in model.modules()]
    x, y = blobs()
    with pytest.raises(KeyboardInterrupt):
        train(model, Interrupted(batches(x, y, 20), at), Categorical(), epochs=5, hyper_steps=2)
    assert ours.seen[-1] is not evaluating
    assert sum(ours.seen) == taken
    assert int(model[1].num_batches_tracked) == taken
    assert [module.training for module in model.modules()] == modes
    now = ParamSpace.of(model).values(model)
    assert bool(torch.isfinite(now).all())
    assert not torch.equal(now, start)


# -- options --------------------------------------------------------------------------------------------------------


def test_fixed_noise_stays_and_the_likelihood_says_where_it_starts() -> None:
    x, y = curve()
    fixed = train(small(), [(x, y)], Gaussian(0.25), epochs=3, hyper_steps=5, fixed_noise=True)
    assert float(fixed.sigma) == 0.25
    assert float(fixed.prior.precisions[0]) != 1
    free = train(small(), [(x, y)], Gaussian(0.25), epochs=3, hyper_steps=5)
    assert float(free.sigma) != 0.25
    given = train(small(), [(x, y)], Gaussian(), sigma=0.25, epochs=3, hyper_steps=0)
    assert float(given.sigma) == pytest.approx(0.25)


def test_one_noise_level_per_output_can_only_be_kept() -> None:
    x, y = curve()
    y = torch.cat([y, y.cos()], dim=1)
    likelihood = Gaussian(torch.tensor([0.3, 0.6]))
    with pytest.raises(LikelihoodError, match=r"2 noise levels.*fixed_noise=True"):
        train(small(2), [(x, y)], likelihood, epochs=1)
    model = small(2)
    found = train(model, [(x, y)], likelihood, epochs=2, hyper_steps=3, fixed_noise=True)
    torch.testing.assert_close(found.evidence.fit, likelihood.log_prob(model(x).detach(), y).sum(), rtol=1e-9, atol=0)


@pytest.mark.parametrize(("per_batch", "expected"), [(False, 0.5**2), (True, 0.5**6)])
def test_the_scheduler_is_stepped(per_batch: bool, expected: float) -> None:
    x, y = curve()
    made = []

    def sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
        made.append(torch.optim.SGD(parameters, lr=lr))
        return made[-1]

    train(
        small(),
        batches(x, y, 16),
        Gaussian(),
        epochs=2,
        hyper_steps=1,
        optimizer_cls=sgd,
        optimizer_kwargs={"lr": 0.01},
        scheduler_cls=torch.optim.lr_scheduler.ExponentialLR,
        scheduler_kwargs={"gamma": 0.5},
        scheduler_per_batch=per_batch,
    )
    assert made[0].param_groups[0]["lr"] == pytest.approx(0.01 * expected)


def test_a_plateau_scheduler_is_told_the_loss() -> None:
    made = []

    def plateau(optimiser: torch.optim.Optimizer) -> torch.optim.lr_scheduler.ReduceLROnPlateau:
        made.append(torch.optim.lr_scheduler.ReduceLROnPlateau(optimiser))
        return made[-1]

    found = train(small(), [curve()], Gaussian(), epochs=3, hyper_steps=0, scheduler_cls=plateau)
    assert made[0].best == pytest.approx(min(found.losses))


@pytest.mark.parametrize(
    ("burn_in", "every", "expected"), [(0, 1, (1, 2, 3, 4, 5, 6, 7)), (0, 3, (3, 6, 7)), (4, 2, (6, 7)), (6, 1, (7,))]
)
def test_when_the_evidence_is_evaluated(burn_in: int, every: int, expected: tuple[int, ...]) -> None:
    told: list[Epoch] = []
    options = {"epochs": 7, "burn_in": burn_in, "every": every, "hyper_steps": 1, "callback": told.append}
    found = train(small(), [curve()], Gaussian(), **options)
    assert found.evaluated == expected
    assert len(found.log_marginals) == len(expected)
    assert [epoch.number for epoch in told if epoch.tuned is not None] == list(expected)
    assert [epoch.loss for epoch in told] == list(found.losses)
    assert [epoch.number for epoch in told if epoch.best][-1] == found.best_epoch


def test_a_generator_decides_all_that_is_random() -> None:
    """Dropout, the loader's order and drawn curvature; torch's own generator stays where it was."""
    x, y = blobs()

    def run(seed: int, noise: int) -> tuple[float, ...]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
        torch.manual_seed(noise)
        before = torch.get_rng_state()
        loader = DataLoader(TensorDataset(x, y), batch_size=20, shuffle=True)
        generator = torch.Generator().manual_seed(seed)
        found = train(
            model, loader, Categorical(), estimator=estimate.kfac, epochs=2, hyper_steps=2, generator=generator
        )
        assert torch.equal(torch.get_rng_state(), before)
        return found.log_marginals + found.losses

    assert run(1, 1) == run(1, 2)
    assert run(1, 1) != run(2, 1)


def test_frozen_parameters_are_not_trained() -> None:
    model = small()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    found = train(model, [curve()], Gaussian(), epochs=2, hyper_steps=1)
    assert torch.equal(model[0].weight, before)
    assert found.prior.size == 9
    assert "0.weight" in found.state


# -- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"prior": "layerwize"}, ParameterError, r"unknown prior structure 'layerwize'; did you mean 'layerwise'\?"),
        ({"prior": "spherical"}, ParameterError, r"unknown prior structure.*expected one of"),
        ({"hyper_lr": -0.1}, ParameterError, r"lr is -0.1; expected a finite number > 0"),
        ({"temperature": 0.0}, ParameterError, r"temperature is 0.0; expected a finite number > 0"),
        ({"optimizer_kwargs": {"lr": -1.0}}, ParameterError, r"Adam refuses .*-1.0.*Invalid learning rate"),
        ({"scheduler_cls": torch.optim.lr_scheduler.StepLR}, ParameterError, r"StepLR refuses \{\}.*step_size"),
        ({"epochs": 0}, ParameterError, r"epochs is 0; expected a whole number >= 1"),
        ({"every": 0}, ParameterError, r"every is 0"),
        ({"points": 0}, ParameterError, r"points is 0"),
        ({"burn_in": 2}, ParameterError, r"burn_in is 2 with 2 epochs.*never be evaluated"),
        ({"hyper_steps": -1}, ParameterError, r"steps is -1"),
        ({"sigma": -1.0}, LikelihoodError, r"sigma is -1.0; expected one finite number > 0"),
        ({"precision": -1.0}, ParameterError, r"negative, NaN or infinite"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], error: type[Exception], message: str) -> None:
    model = small()
    before = ParamSpace.of(model).values(model)
    with pytest.raises(error, match=message):
        train(model, [curve()], Gaussian(), **{"epochs": 2, **options})
    assert torch.equal(ParamSpace.of(model).values(model), before)


def test_data_that_make_no_sense() -> None:
    x, y = curve()
    with pytest.raises(DataError, match="the loader yields no batch"):
        train(small(), [], Gaussian(), epochs=1)
    with pytest.raises(DataError, match=r"list_iterator that can be read only once.*DataLoader"):
        train(small(), iter([(x, y)]), Gaussian(), epochs=1)
    with pytest.raises(DataError, match=r"batch 0 is a Tensor; expected a pair"):
        train(small(), [x], Gaussian(), epochs=1)
    with pytest.raises(DataError, match=r"epoch 1, batch 1: .*finite targets"):
        train(small(), [(x, y), (x, y * float("nan"))], Gaussian(), epochs=1)
    with pytest.raises(LikelihoodError, match=r"batch 0: .*\(48, 1\).*add the output axis"):
        train(small(), [(x, y[:, 0])], Gaussian(), epochs=1)
    with pytest.raises(LikelihoodError, match=r"sigma is 0.5 for Categorical, which has no noise level"):
        train(small(3, 2), [blobs()], Categorical(), sigma=0.5, epochs=1)
    with pytest.raises(ParameterError, match=r"the prior is over 4 weights and the model trains 25"):
        train(small(), [(x, y)], Gaussian(), prior=Prior.isotropic(ParamSpace.of(nn.Linear(3, 1))), epochs=1)


def test_a_loss_that_explodes_names_epoch_and_batch() -> None:
    x, y = linear_data()
    with pytest.raises(DataError, match=r"epoch \d+, batch 0: the loss is (inf|nan).*smaller learning rate"):
        train(
            nn.Linear(D, 1).double(),
            [(x, y)],
            Gaussian(),
            epochs=10,
            burn_in=9,
            optimizer_cls=torch.optim.SGD,
            optimizer_kwargs={"lr": 1e100},
        )
