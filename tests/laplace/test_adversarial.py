"""The public face under unkind use: numbers by brute force, global state, options, and state after a failure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chosen
from lapwing import Laplace, marglik_training
from lapwing.curvature import BackPackEF
from lapwing.errors import DataError, OptionError, ParameterError
from lapwing.laplace import BaseLaplace, FullLaplace, FullLLLaplace, FullSubnetLaplace
from lapwing.laplace.factory import CLASSES
from lapwing.likelihoods import Gaussian

SUBNET = torch.tensor([0, 3, 13, 17, 25])
every_class = pytest.mark.parametrize(("subset", "structure"), list(CLASSES))


def net(outputs: int = 2, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).to(dtype)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


x, y, xt = normal(12, 3), normal(12, 2, seed=1), normal(5, 3, seed=2)
labels = (y[:, 0] > 0).long()


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def made(subset: str, structure: str, task: str = "regression", **options: Any) -> BaseLaplace:
    options |= {"subnetwork_indices": chosen.positions(net(), structure, SUBNET)} if subset == "subnetwork" else {}
    options |= {"rank": 26} if structure == "lowrank" else {}
    options |= {"tolerance": 1e-12, "probes": 26} if structure == "matrix_free" else {}
    return Laplace(net(), task, subset, structure, **options)


def full(likelihood: Any = "regression", outputs: int = 2, targets: Tensor = y, **options: Any) -> FullLaplace:
    la = FullLaplace(net(outputs), likelihood, **options)
    la.fit([(x, targets)])
    return la


def jacobian(model: nn.Module, at: Tensor) -> Tensor:
    named = {name: p.detach() for name, p in model.named_parameters()}

    def one(values: dict[str, Tensor], point: Tensor) -> Tensor:
        return torch.func.functional_call(model, values, (point[None],))[0]

    found = torch.func.vmap(torch.func.jacrev(one), (None, 0))(named, at)
    return torch.cat([found[name].flatten(2) for name in named], 2)


# -- right, and at risk ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("subset", "structure"), [each for each in CLASSES if each[1] not in ("kron", "ekfac")])
@pytest.mark.parametrize("groups", ["scalar", "layerwise", "module", "diag"])
def test_covariance_and_evidence_by_brute_force(subset: str, structure: str, groups: str) -> None:
    """Noise, temperature, prior mean and every form of prior together, with explicit Jacobians and inverses."""
    la = made(subset, structure, sigma_noise=0.6, temperature=1.7)
    la.fit([(x[:7], y[:7]), (x[7:], y[7:])])
    chosen = {"last_layer": torch.arange(16, 26), "subnetwork": SUBNET}.get(subset, torch.arange(26))
    rows, at = jacobian(la.model, x)[..., chosen], jacobian(la.model, xt)[..., chosen].flatten(0, 1)
    curvature = torch.einsum("n c p, n c q -> p q", rows, rows) / (0.36 * 1.7)
    layer = (chosen >= 16).long()
    tensor = torch.bucketize(chosen, torch.tensor([12, 16, 24]), right=True)
    if structure.endswith("diag"):  # one hidden layer and square loss: the propagated ones are exact too
        curvature = curvature.diagonal().diag()
    if structure == "blocks":
        curvature = curvature * (layer[:, None] == layer)
    which = {"scalar": 0 * layer, "layerwise": tensor, "module": layer, "diag": torch.arange(len(chosen))}[groups]
    which = which - which.min()
    precisions, mean = torch.linspace(0.5, 2, int(which.max()) + 1, dtype=torch.float64), normal(len(chosen), seed=4)
    la.prior_precision, la.prior_mean = precisions, mean
    prior = precisions[which]
    precision = curvature + prior.diag()
    covariance = at @ torch.linalg.inv(precision) @ at.T
    torch.testing.assert_close(la(xt, joint=True)[1], covariance, rtol=1e-9, atol=1e-11)
    variance = la(xt, diagonal_output=True)[1].flatten()
    torch.testing.assert_close(variance, covariance.diagonal(), rtol=1e-9, atol=1e-11)
    away = la.fitted.mean - mean
    fit = torch.distributions.Normal(la.model(x).detach(), 0.6).log_prob(y).sum() / 1.7
    evidence = fit + (prior.log().sum() - (away**2 * prior).sum() - torch.logdet(precision)) / 2
    torch.testing.assert_close(la.log_marginal_likelihood(), evidence, rtol=1e-9, atol=1e-9)


@every_class
def test_gradients_in_the_inputs_are_those_of_finite_differences(subset: str, structure: str) -> None:
    la = made(subset, structure, enable_backprop=True)
    la.fit([(x, y)])
    at = xt.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(la(at)[1][:, 0, 1].sum(), at)
    step = torch.zeros_like(xt)
    step[1, 2] = 1e-5
    with torch.no_grad():
        expected = (la(xt + step)[1] - la(xt - step)[1])[:, 0, 1].sum() / 2e-5
    torch.testing.assert_close(gradient[1, 2], expected, rtol=1e-6, atol=1e-8)
    assert all(p.grad is None for p in la.model.parameters())
    plain = made(subset, structure)
    plain.fit([(x, y)])
    assert not any(each.requires_grad for each in plain(at))


@every_class
def test_with_a_generator_the_global_one_stands_still(subset: str, structure: str) -> None:
    la = made(subset, structure, "classification")
    before = torch.get_rng_state()
    la.fit([(x, labels)], generator=seeded())
    for pred_type, link in (("glm", "mc"), ("nn", "probit")):
        la(xt, pred_type, link_approx=link, n_samples=3, generator=seeded())
    la.sample(2, generator=seeded())
    la.functional_samples(xt, n_samples=2, diagonal_output=True, generator=seeded())
    search(la, labels, "nn", generator=seeded())
    assert torch.equal(before, torch.get_rng_state())


# -- wrong numbers --------------------------------------------------------------------------------------------------


class Tripled(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return 3 * h if self.training else h


def test_a_batch_beyond_the_budget_is_linearised_in_eval_mode() -> None:
    model = nn.Sequential(*net(), Tripled())
    la = FullLaplace(model, "regression")
    la.fit([(x, y)])
    model.train()
    _, expected = la(xt)
    la._tangent.budget = 300  # pyright: ignore[reportOptionalMemberAccess]
    torch.testing.assert_close(la(xt)[1], expected)


def test_a_layerwise_prior_of_a_subnetwork_has_one_precision_per_tensor() -> None:
    la = FullSubnetLaplace(net(), "regression", torch.tensor([0, 1, 2, 3]))  # all within the first weight
    la.fit([(x, y)])
    la.optimize_prior_precision(prior_structure="layerwise")
    assert len(la.prior_precision_diag.unique()) == 1


def trained(**options: Any) -> Any:
    shared: dict[str, Any] = {"n_epochs": 1, "n_hypersteps": 1, "lr_hyp": 1e-12, "hessian_structure": "full"}
    return marglik_training(net(1), [(x, y[:, :1])], "regression", **shared, **options)


@pytest.mark.parametrize("options", [{"backend": BackPackEF}, {"prior_mean": 5.0}])
def test_training_climbs_the_evidence_of_its_posterior(options: dict[str, Any]) -> None:
    la, _, found, _ = trained(sigma_noise_init=0.3, fix_sigma_noise=True, **options)
    assert -found[0] == pytest.approx(float(la.log_marginal_likelihood()), rel=1e-6)


@pytest.mark.parametrize(
    "pair",
    [
        lambda: tuple(FullSubnetLaplace(net(), "regression", torch.tensor(at)) for at in ([0, 1, 2], [3, 4, 5])),
        lambda: (FullLaplace(net(), "regression", 0.5, estimator="empirical"), FullLaplace(net(), "regression")),
        lambda: (FullLaplace(net(), Gaussian(torch.tensor([0.5, 2.0]))), FullLaplace(net(), "regression")),
    ],
    ids=["positions", "estimator", "noise"],
)
def test_a_state_of_another_kind_is_refused(pair: Callable[[], tuple[BaseLaplace, ...]]) -> None:
    la, other = pair()
    la.fit([(x, y)])
    with pytest.raises(ParameterError):
        other.load_state_dict(la.state_dict())


def test_hyper_parameters_are_copies() -> None:
    la, given = full(), torch.ones(1, dtype=torch.float64)
    la.prior_precision = given
    given.fill_(-7.0)  # as an optimiser's step does to a leaf given to log_marginal_likelihood
    assert float(la.prior_precision) == 1


def test_weights_that_changed_since_the_fit_are_refused() -> None:
    la = full()
    with torch.no_grad():
        la.model[0].weight.add_(1.0)  # pyright: ignore
    with pytest.raises(ParameterError):
        la(xt)


def test_no_graph_is_kept_where_none_is_asked_for() -> None:
    """Gradients need `enable_backprop` and a caller who records: one of the two is not enough."""
    at = xt.clone().requires_grad_()
    assert all(value.requires_grad for value in full(enable_backprop=True)(at))
    with torch.no_grad():
        assert not any(value.requires_grad for value in full(enable_backprop=True)(at))
    assert not any(value.requires_grad for value in full()(at))


def test_sampled_networks_carry_gradients_when_asked() -> None:
    la = full(enable_backprop=True)
    assert la.functional_samples(xt.clone().requires_grad_(), "nn", 2).requires_grad


# -- options that are ignored, input that is taken or refused without a word ------------------------------------------


def search(la: BaseLaplace, targets: Tensor = y, pred_type: str = "glm", **options: Any) -> None:
    options = {"method": "gridsearch", "val_loader": [(x, targets)], "grid_size": 3, "n_samples": 3} | options
    la.optimize_prior_precision(pred_type, **options)


@pytest.mark.parametrize(
    "use",
    [
        lambda: search(full(), optimize_sigma_noise=True),
        lambda: search(full(), counts=[1, 2]),
        lambda: search(full("classification", targets=labels), labels, method="pseudo_data", link_approx="quadrature"),
        lambda: trained(prior_precision=50.0),
    ],
    ids=["sigma", "counts", "pseudo_data", "training"],
)
def test_an_option_is_read_or_refused(use: Callable[[], object]) -> None:
    with pytest.raises(OptionError):
        use()


def test_a_loss_for_counts_gets_mean_and_variance() -> None:
    counts = y[:, :1].abs().round()
    search(full("poisson", 1, counts), counts, loss=lambda m, v, t: ((m - t) ** 2 + v).mean())


@pytest.mark.parametrize("link", ["quadrature", "probit_full"])
def test_a_link_that_predicts_can_be_tuned(link: str) -> None:
    events = labels[:, None].double()
    la = full("binary", 1, events)
    la(xt, link_approx=link)
    search(la, events, link_approx=link)


@pytest.mark.parametrize(
    "use",
    [
        lambda: setattr(full(), "temperature", torch.ones(2)),
        lambda: full().log_prob(torch.zeros(2, 1, dtype=torch.float64)),
        lambda: full()(xt, "nn", n_samples=1),
        lambda: search(full(), pred_type="nn", val_loader=[(x, y, y)]),
        lambda: FullLaplace(net(2, torch.float32), "regression").load_state_dict(full().state_dict()),
        lambda: full().load_state_dict({k: v for k, v in full().state_dict().items() if k != "mean"}),
    ],
    ids=["temperature", "log_prob", "one draw", "triples", "dtype", "missing"],
)
def test_bad_input_meets_an_error_with_a_remedy(use: Callable[[], object]) -> None:
    with pytest.raises((DataError, ParameterError, OptionError)):
        use()


# -- state after a failure, and between calls -------------------------------------------------------------------------


def test_a_state_that_fails_changes_nothing() -> None:
    la = full()
    with pytest.raises(ParameterError):
        la.load_state_dict(la.state_dict() | {"prior_precision": torch.tensor([9.0]), "temperature": -torch.ones(())})
    assert float(la.prior_precision) == 1


def test_the_state_of_a_hidden_layer_predicts_in_a_fresh_posterior() -> None:
    la, fresh = FullLLLaplace(net(), "regression", last_layer_name="0"), FullLLLaplace(net(), "regression")
    la.fit([(x, y)])
    fresh.load_state_dict(la.state_dict())
    torch.testing.assert_close(fresh(xt)[1], la(xt)[1])


def test_a_prediction_in_inference_mode_leaves_nothing_behind() -> None:
    la = made("all", "gp")
    la.fit([(x, y)])
    with torch.inference_mode():
        la(xt)
    la.optimize_prior_precision()


def test_the_density_of_a_subnetwork_takes_its_own_samples() -> None:
    la = FullSubnetLaplace(net(), "regression", SUBNET)
    la.fit([(x, y)])
    assert la.log_prob(la.sample(3)).shape == (3,)
