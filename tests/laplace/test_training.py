"""marglik_training through the public face, and grid search on held-out data."""

from __future__ import annotations

from math import log
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lapwing import Laplace, marglik_training
from lapwing.curvature import CurvlinopsEF
from lapwing.errors import CurvatureError, OptionError
from lapwing.laplace import BaseLaplace


def clouds(n: int = 60, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 3
    centres = torch.tensor([[0.0, 2.0], [2.0, -1.0], [-2.0, -1.0]], dtype=torch.float64)
    return centres[y] + 1.2 * torch.randn(n, 2, generator=generator, dtype=torch.float64), y


def wave(n: int = 40, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = 6 * torch.rand(n, 1, generator=generator, dtype=torch.float64) - 3
    return x, torch.sin(x) + 0.3 * torch.randn(n, 1, generator=generator, dtype=torch.float64)


def mlp(inputs: int, outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 12), nn.Tanh(), nn.Dropout(0.1), nn.Linear(12, outputs)).double()


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_training_returns_a_fitted_posterior_and_rising_evidence(structure: str, task: str) -> None:
    x, y = clouds() if task == "classification" else wave()
    model = mlp(x.shape[1], 3 if task == "classification" else 1).train()
    la, same, negative, losses = marglik_training(
        model,
        [(x[:30], y[:30]), (x[30:], y[30:])],
        task,
        structure,
        n_epochs=15,
        n_hypersteps=5,
        optimizer_kwargs={"lr": 1e-2},
        generator=torch.Generator().manual_seed(0),
    )
    assert same is model
    assert isinstance(la, BaseLaplace)
    assert all(module.training for module in model.modules())
    assert len(losses) == 15
    assert len(negative) == 15 * 5
    assert negative[-1] < negative[0]
    assert len(la.prior_precision) == 4
    assert float(-la.log_marginal_likelihood()) <= negative[0]
    if task == "regression":
        assert float(la.sigma_noise) < 1


@pytest.mark.parametrize("structure", ["full", "kron", "diag", "gp"])
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_grid_search_is_the_best_of_plain_predictions(structure: str, task: str) -> None:
    """Each precision scored by a loop over the public predictions, one by one."""
    data, held_out = (clouds, clouds) if task == "classification" else (wave, wave)
    (x, y), (u, v) = data(), held_out(30, 1)
    la = Laplace(mlp(x.shape[1], 3 if task == "classification" else 1), task, "all", structure, sigma_noise=1.0)
    la.fit([(x, y)])
    grid = torch.logspace(-2, 2, 9, dtype=torch.float64)
    scores = []
    for value in grid:
        la.prior_precision = value
        out = la(u)
        if isinstance(out, tuple):
            spread = out[1][:, 0] + la.sigma_noise**2
            scores.append(-torch.distributions.Normal(out[0], spread.sqrt()).log_prob(v).mean())
        else:
            scores.append(-out[torch.arange(len(v)), v].log().mean())
    best = grid[torch.stack(scores).argmin()]
    options = {"log_prior_prec_min": -2, "log_prior_prec_max": 2, "grid_size": 9}
    la.prior_precision = 1.0
    la.optimize_prior_precision(method="gridsearch", val_loader=[(u[:11], v[:11]), (u[11:], v[11:])], **options)
    torch.testing.assert_close(la.prior_precision[0], best)


@pytest.mark.parametrize("options", [{"pred_type": "nn"}, {"link_approx": "mc"}])
def test_grid_search_by_draws_is_reproducible_and_leaves_the_best(options: dict) -> None:
    x, y = clouds()
    la = Laplace(mlp(2, 3), "classification", "all", "kron")
    la.fit([(x, y)])
    found = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(5)
        la.optimize_prior_precision(
            method="gridsearch", val_loader=[clouds(20, 1)], grid_size=4, n_samples=10, generator=generator, **options
        )
        found.append(la.prior_precision.item())
    assert found[0] == found[1]
    with pytest.raises(OptionError, match="a loss of your own"):
        la.optimize_prior_precision(method="gridsearch", val_loader=[(x, y)], loss=lambda p, t: 0.0, **options)


def test_pseudo_data_by_drawn_networks_are_a_plain_loop() -> None:
    """As in the thesis: every pair scored by predictions of networks drawn at it."""
    (x, y), (u, v) = clouds(), clouds(20, 1)
    la = Laplace(mlp(2, 3), "classification", "all", "kron", temperature=3.0)
    la.fit([(x, y)])
    options = {"method": "pseudo_data", "pred_type": "nn", "val_loader": [(u, v)], "n_samples": 10}
    counts, grid = [4.0, 40.0, 400.0], torch.logspace(-2, 2, 3, dtype=torch.float64)
    scores = {}
    for count in counts:
        for value in grid.tolist():
            la.prior_precision, la.temperature = value, la.n_data / count
            f = la.functional_samples(u, "nn", 10, generator=torch.Generator().manual_seed(5))
            probabilities = f.softmax(-1).mean(0)
            scores[value, la.n_data / count] = float(-probabilities[torch.arange(len(v)), v].log().mean())
    best = min(scores, key=scores.__getitem__)
    assert sorted(scores.values())[1] > min(scores.values()) * (1 + 1e-9)
    la.prior_precision, la.temperature = 1.0, 3.0
    search = {"counts": counts, "log_prior_prec_min": -2, "log_prior_prec_max": 2, "grid_size": 3}
    la.optimize_prior_precision(**options, **search, generator=torch.Generator().manual_seed(5))
    assert (la.prior_precision.item(), la.temperature.item()) == pytest.approx(best)
    with pytest.raises(OptionError, match="a loss of your own"):
        la.optimize_prior_precision(**options, loss=lambda p, t: 0.0)
    with pytest.raises(CurvatureError, match="counts go down to 0"):
        la.optimize_prior_precision(**options, counts=[0.0, 1.0])
    assert (la.prior_precision.item(), la.temperature.item()) == pytest.approx(best)


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_the_posterior_of_an_empirical_fisher_has_the_noise_to_the_fourth_power(structure: str) -> None:
    """A gradient of a Gaussian log-likelihood carries 1 / sigma^2, and its square 1 / sigma^4, in every use of it."""
    x, y = wave()
    options = {"sigma_noise": 0.6, "prior_precision": 2.0, "estimator": "empirical"}
    la = Laplace(mlp(1, 1).eval(), "regression", "all", structure, **options)
    la.fit([(x, y)])
    matrix = la.fitted.curvature.dense() / 0.6**4 + 2.0 * torch.eye(la.n_params, dtype=torch.float64)
    weights = list(la.model.parameters())
    grads = [torch.autograd.grad(f, weights, retain_graph=True) for f in la.model(x[:3]).flatten()]
    jacobian = torch.stack([torch.cat([g.flatten() for g in each]) for each in grads])
    expected = torch.einsum("n p, n p -> n", jacobian, torch.linalg.solve(matrix, jacobian.mT).mT)
    torch.testing.assert_close(la(x[:3])[1].flatten(), expected)
    torch.testing.assert_close(la.log_det_posterior_precision, torch.linalg.slogdet(matrix).logabsdet)
    torch.testing.assert_close(la.precision.variance(), torch.linalg.inv(matrix).diagonal())


def test_pseudo_data_sets_precision_and_temperature() -> None:
    x, y = wave()
    la = Laplace(mlp(1, 1), "regression", "all", "full", sigma_noise=0.3)
    la.fit([(x, y)])
    la.optimize_prior_precision(method="pseudo_data", val_loader=[wave(20, 1)], grid_size=5, counts=[4.0, 40.0, 400.0])
    assert la.temperature.item() in (10.0, 1.0, 0.1)
    assert la.prior_precision.item() in torch.logspace(-4, 4, 5, dtype=torch.float64).tolist()


@pytest.mark.parametrize(
    ("burn_in", "every", "evaluated"), [(0, 1, 5), (1, 1, 5), (2, 1, 4), (4, 1, 2), (2, 2, 3), (3, 3, 2)]
)
def test_the_epoch_that_ends_the_burn_in_is_evaluated(burn_in: int, every: int, evaluated: int) -> None:
    """Of five epochs: those from the last of the burn-in on whose number divides by `every`, and the last."""
    found = marglik_training(
        mlp(1, 1), [wave()], "regression", "diag",
        n_epochs=5, n_epochs_burnin=burn_in, marglik_frequency=every, n_hypersteps=3,
    )  # fmt: skip
    assert len(found[2]) == 3 * evaluated
    assert len(found[3]) == 5


# -- options of marglik_training, at weights that stand still --------------------------------------------------------


def still(task: str, **options: Any) -> tuple[BaseLaplace, nn.Module, list[float], list[float]]:
    """One epoch with a learning rate of zero: all that moves is prior and noise."""
    x, y = clouds() if task == "classification" else wave()
    fixed = {"optimizer_cls": torch.optim.SGD, "optimizer_kwargs": {"lr": 0.0}, "n_epochs": 1, "n_hypersteps": 4}
    model = mlp(x.shape[1], 3 if task == "classification" else 1).eval()
    model[2].p = 0.0
    return marglik_training(model, [(x[:20], y[:20]), (x[20:], y[20:])], task, **{**fixed, **options})


OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("regression", {}),
    ("regression", {"prior_prec_init": 3.0}),
    ("regression", {"sigma_noise_init": 0.4}),
    ("regression", {"sigma_noise_init": 0.4, "fix_sigma_noise": True}),
    ("regression", {"sigma_noise_init": 0.4, "temperature": 3.0}),
    ("regression", {"lr_hyp": 0.02}),
    ("regression", {"prior_structure": "scalar"}),
    ("regression", {"prior_structure": "module"}),
    ("regression", {"prior_structure": "diag", "hessian_structure": "diag"}),
    ("regression", {"hessian_structure": "full"}),
    ("regression", {"hessian_structure": "full", "backend": CurvlinopsEF, "sigma_noise_init": 0.7}),
    ("regression", {"hessian_structure": "full", "prior_mean": 0.3}),
    ("regression", {"hessian_structure": "kron", "bias": "separate"}),
    ("classification", {"hessian_structure": "kron"}),
    ("classification", {"hessian_structure": "full", "backend": CurvlinopsEF, "temperature": 0.5}),
]


@pytest.mark.parametrize(("task", "options"), OPTIONS, ids=[f"{task} {'-'.join(of)}" for task, of in OPTIONS])
def test_hyper_steps_are_those_of_adam_on_the_evidence(task: str, options: dict[str, Any]) -> None:
    """Each value, and where it ends, by torch's Adam on log precisions and log sigma of a posterior of its own."""
    la, model, negative, losses = still(task, **options)
    x, y = clouds() if task == "classification" else wave()
    names = ("hessian_structure", "backend", "temperature", "prior_mean", "bias")
    plain = {name: options[name] for name in names if name in options}
    reference = Laplace(model, task, "all", **{"hessian_structure": "kron", **plain})
    reference.fit([(x, y)])
    count = {"scalar": 1, "layerwise": 4, "module": 2, "diag": la.n_params}[options.get("prior_structure", "layerwise")]
    precision = torch.full((count,), options.get("prior_prec_init", 1.0), dtype=torch.float64).log().requires_grad_()
    sigma = torch.tensor(options.get("sigma_noise_init", 1.0), dtype=torch.float64).log().requires_grad_()
    noise = task == "regression"
    tuned = noise and not options.get("fix_sigma_noise", False)
    start = float(options.get("prior_prec_init", 1.0)), float(sigma.detach().exp())
    optimiser = torch.optim.Adam([precision, sigma] if tuned else [precision], lr=options.get("lr_hyp", 0.1))
    expected = []
    for _ in range(4):
        optimiser.zero_grad()
        loss = -reference.log_marginal_likelihood(precision.exp(), sigma.exp() if noise else None)
        expected.append(float(loss.detach()))
        loss.backward()
        optimiser.step()
    assert negative == pytest.approx(expected, rel=1e-7)
    torch.testing.assert_close(la.prior_precision, precision.exp().detach(), rtol=1e-6, atol=0)
    if noise:
        torch.testing.assert_close(la.sigma_noise, sigma.exp().detach(), rtol=1e-6, atol=0)
    # the loss: the negative log joint density per data point, at the hyper-parameters of the start
    f, (delta, level) = model(x).detach(), start
    theta = torch.cat([p.detach().flatten() for p in model.parameters()]) - options.get("prior_mean", 0.0)
    fit = -torch.distributions.Normal(f, level).log_prob(y).sum() if noise else F.cross_entropy(f, y, reduction="sum")
    scatter = delta * theta.square().sum() / 2
    joint = (fit / options.get("temperature", 1.0) + scatter) / len(x)
    assert losses == pytest.approx([float(joint)], rel=1e-7)


def test_a_scheduler_takes_a_step_per_batch() -> None:
    """Steps of 0.1, 0.1 / 2 and 0.1 / 4 for three batches, by hand."""
    x, y = wave(30)
    parts = list(zip(x.split(10), y.split(10), strict=True))
    model, by_hand = (nn.Linear(1, 1).double() for _ in range(2))
    by_hand.load_state_dict(model.state_dict())
    schedule = {"scheduler_cls": torch.optim.lr_scheduler.StepLR, "scheduler_kwargs": {"step_size": 1, "gamma": 0.5}}
    optimiser = {"optimizer_cls": torch.optim.SGD, "optimizer_kwargs": {"lr": 0.1}}
    options = {"n_epochs": 1, "n_hypersteps": 1, "prior_prec_init": 2.0, **schedule, **optimiser}
    marglik_training(model, parts, "regression", "full", **options)
    for number, (a, b) in enumerate(parts):
        weights = list(by_hand.parameters())
        scatter = sum(w.square().sum() for w in weights)
        loss = (by_hand(a) - b).square().sum() / (2 * 10) + 2.0 * scatter / (2 * 30)
        for w, g in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            w.data -= 0.1 * 0.5**number * g
    for ours, theirs in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1).double()

    def forward(self, values: Tensor) -> Tensor:
        return self.layer(values)


def test_training_on_mappings_and_with_a_graph() -> None:
    x, y = wave()
    options = {"dict_key_y": "goal", "dict_key_x": "values", "enable_backprop": True, "n_epochs": 2, "n_hypersteps": 2}
    model = Named()
    la = marglik_training(model, [{"values": x, "goal": y}], "regression", "full", **options)[0]
    assert la.n_data == len(x)
    point = x[:3].clone().requires_grad_()
    variance = la({"values": point, "goal": y[:3]})[1]
    (slope,) = torch.autograd.grad(variance.sum(), point)
    # f = w x + b: the variance at x is (x, 1) S (x, 1)^T, with a slope of 2 (S_ww x + S_wb)
    covariance = la.posterior_covariance
    torch.testing.assert_close(slope, 2 * (covariance[0, 0] * x[:3] + covariance[0, 1]))


def test_drawn_curvature_in_training_follows_its_generator() -> None:
    options = {"estimator": "mc", "backend_kwargs": {"mc_samples": 2}, "hessian_structure": "full"}
    found = [still("classification", generator=torch.Generator().manual_seed(seed), **options)[2] for seed in (0, 0, 1)]
    assert found[0] == found[1]
    assert found[0] != found[2]


# -- options of optimize_prior_precision -----------------------------------------------------------------------------


def fitted(task: str = "regression", structure: str = "full", **options: Any) -> BaseLaplace:
    x, y = clouds() if task == "classification" else wave()
    la = Laplace(mlp(x.shape[1], 3 if task == "classification" else 1), task, "all", structure, **options)
    la.fit([(x, y)])
    return la


@pytest.mark.parametrize("structure", ["scalar", "layerwise", "module", "diag"])
@pytest.mark.parametrize("noise", [False, True])
def test_tuning_by_adam_takes_its_steps_from_where_it_is_told(structure: str, noise: bool) -> None:
    la, reference = (fitted(structure="diag", sigma_noise=0.5, temperature=2.0) for _ in range(2))
    count = {"scalar": 1, "layerwise": 4, "module": 2, "diag": la.n_params}[structure]
    start = torch.linspace(1.0, 4.0, count, dtype=torch.float64)
    la.optimize_prior_precision(
        method="adam", n_steps=3, lr=0.05, init_prior_prec=start, prior_structure=structure, optimize_sigma_noise=noise
    )
    precision = start.log().requires_grad_()
    sigma = torch.tensor(0.5, dtype=torch.float64).log().requires_grad_()
    optimiser = torch.optim.Adam([precision, sigma] if noise else [precision], lr=0.05)
    for _ in range(3):
        optimiser.zero_grad()
        (-reference.log_marginal_likelihood(precision.exp(), sigma.exp())).backward()
        optimiser.step()
    torch.testing.assert_close(la.prior_precision, precision.exp().detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(la.sigma_noise, sigma.exp().detach(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("method", ["marglik", "mackay"])
@pytest.mark.parametrize("structure", ["scalar", "layerwise", "module"])
def test_tuning_of_groups_ends_where_the_evidence_has_no_slope(structure: str, method: str) -> None:
    la = fitted(structure="full", sigma_noise=0.4, temperature=1.5)
    la.optimize_prior_precision(
        method=method, prior_structure=structure, init_prior_prec=0.5, optimize_sigma_noise=True
    )
    logs = [la.prior_precision.log().requires_grad_(), la.sigma_noise.log().requires_grad_()]
    value = la.log_marginal_likelihood(*(each.exp() for each in logs))
    for slope in torch.autograd.grad(value, logs):
        assert float(slope.abs().max()) < 1e-3
    assert len(la.prior_precision) == {"scalar": 1, "layerwise": 4, "module": 2}[structure]


@pytest.mark.parametrize("estimator", ["exact", "empirical"])
@pytest.mark.parametrize("method", ["gridsearch", "pseudo_data"])
def test_held_out_data_are_scored_at_noise_and_temperature(method: str, estimator: str) -> None:
    """All candidates, powers of 3, by a loop over the predictions of a posterior at each of them."""
    la = fitted(sigma_noise=0.25, temperature=4.0, estimator=estimator)
    (u, v), exponents, counts = wave(12, 1), torch.linspace(-3, 5, 9, dtype=torch.float64), [0.5, 3.0, 20.0]
    scores = {}
    for precision in (3.0**exponents).tolist():
        for temperature in [40 / count for count in counts] if method == "pseudo_data" else [4.0]:
            la.prior_precision, la.temperature = precision, temperature
            mean, variance = la(u)
            spread = (variance[:, 0] + 0.25**2).sqrt()
            scores[precision, temperature] = -float(torch.distributions.Normal(mean, spread).log_prob(v).mean())
    best = min(scores, key=scores.__getitem__)
    la.prior_precision, la.temperature = 1.0, 4.0
    search = {"log_prior_prec_min": -3, "log_prior_prec_max": 5, "grid_size": 9, "log_prior_prec_base": 3.0}
    search |= {"counts": counts} if method == "pseudo_data" else {}
    la.optimize_prior_precision(method=method, val_loader=[(u[:5], v[:5]), (u[5:], v[5:])], **search)
    assert (la.prior_precision.item(), la.temperature.item()) == pytest.approx(best)
    assert la.sigma_noise.item() == 0.25


def test_pseudo_data_goes_from_a_thousandth_to_ten_times_the_data() -> None:
    la, (u, v), scores = fitted(sigma_noise=0.25), wave(12, 1), {}
    for count in torch.logspace(-3, 1, 17, dtype=torch.float64).tolist():
        la.prior_precision, la.temperature = 2.0, 1 / count
        mean, variance = la(u)
        spread = (variance[:, 0] + 0.25**2).sqrt()
        scores[1 / count] = -float(torch.distributions.Normal(mean, spread).log_prob(v).mean())
    once = {"log_prior_prec_min": 1, "log_prior_prec_max": 1, "grid_size": 1, "log_prior_prec_base": 2}
    la.optimize_prior_precision(method="pseudo_data", val_loader=[(u, v)], **once)
    assert la.temperature.item() == pytest.approx(min(scores, key=scores.__getitem__))
    assert la.prior_precision.item() == pytest.approx(2.0)


@pytest.mark.parametrize("task", ["regression", "classification"])
@pytest.mark.parametrize("how", [{"pred_type": "nn"}, {"link_approx": "mc"}])
def test_a_grid_by_draws_is_a_loop_over_draws(how: dict[str, str], task: str) -> None:
    """-log of the mean density over `n_samples` draws, from the same numbers each time, summed over data points.

    The first batch is one point with an odd target: a mean over batches would prefer broader posteriors.
    """
    la = fitted(task, "diag", **({"sigma_noise": 0.3} if task == "regression" else {}))
    (u, v), grid = clouds(9, 1) if task == "classification" else wave(9, 1), torch.logspace(-1, 3, 13).tolist()
    v[0] = v[0] + 1
    parts, kind = [(u[:1], v[:1]), (u[1:], v[1:])], how.get("pred_type", "glm")
    scores, by_batch = [], []
    for precision in grid:
        la.prior_precision = precision
        generator, costs = torch.Generator().manual_seed(7), []
        for x, y in parts:
            f = la.functional_samples(x, kind, 6, generator=generator)
            if task == "classification":
                density = f.log_softmax(-1)[:, torch.arange(len(y)), y]
            else:
                density = torch.distributions.Normal(f, 0.3).log_prob(y).squeeze(-1)
            costs.append(log(6) - density.logsumexp(0))
        scores.append(float(torch.cat(costs).mean()))
        by_batch.append(float(sum(cost.mean() for cost in costs)))
    best = min(range(13), key=scores.__getitem__)
    if task == "regression":
        assert best != min(range(13), key=by_batch.__getitem__)
    options = {"log_prior_prec_min": -1, "log_prior_prec_max": 3, "grid_size": 13, "n_samples": 6}
    generator = torch.Generator().manual_seed(7)
    la.optimize_prior_precision(method="gridsearch", val_loader=parts, generator=generator, **how, **options)
    assert la.prior_precision.item() == pytest.approx(grid[best])


def test_a_loss_of_ones_own_sees_means_and_variances_of_targets() -> None:
    """The variance that it sees has the noise in it; batches count by their points."""
    la, (u, v), seen = fitted(sigma_noise=0.3), wave(12, 1), []

    def loss(mean: Tensor, variance: Tensor, targets: Tensor) -> float:
        seen.append((mean, variance, targets))
        return float((variance - 0.11).abs().mean())

    grid = {"log_prior_prec_min": -1, "log_prior_prec_max": 3, "grid_size": 5}
    parts = [(u[:2], v[:2]), (u[2:], v[2:])]
    la.optimize_prior_precision(method="gridsearch", val_loader=parts, loss=loss, **grid)
    chosen, totals = la.prior_precision.item(), []
    for number in range(5):
        la.prior_precision = 10.0 ** (number - 1)
        mean, variance = la(u, diagonal_output=True)
        noisy = variance + 0.09
        torch.testing.assert_close(torch.cat([seen[number][0], seen[5 + number][0]]), mean)
        torch.testing.assert_close(torch.cat([seen[number][1], seen[5 + number][1]]), noisy)
        totals.append(float((noisy - 0.11).abs().mean()))
    assert chosen == pytest.approx(10.0 ** (min(range(5), key=totals.__getitem__) - 1))
