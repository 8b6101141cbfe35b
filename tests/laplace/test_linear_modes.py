"""The linear mode is the optimum of the linearised network's loss, whatever structure the posterior has."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import linearised
from lapwing.errors import DataError, LapwingWarning, NotFittedError, OptionError, ParameterError
from lapwing.evidence import LinearMode
from lapwing.laplace import BaseLaplace, Laplace
from lapwing.laplace.linear_modes import check_mode
from lapwing.likelihoods import Gaussian, HeteroscedasticGaussian
from lapwing.linalg.budget import MemoryBudget, within
from linearised import DOUBLE, Dense
from unchanged import unchanged

NETWORKS = ("full", "kron", "diag")
STRUCTURES = ("full", "gp", "kron", "ekfac", "diag", "blocks", "lowrank", "propagated_diag", "mixed_diag")


def halves(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(x[:7], y[:7]), (x[7:], y[7:])]


def fitted(
    likelihood: Any = "regression",
    structure: str = "full",
    subset: str = "all",
    widths: tuple[int, ...] = (2, 3, 2),
    x: Tensor | None = None,
    y: Tensor | None = None,
    **options: Any,
) -> tuple[BaseLaplace, list[tuple[Tensor, Tensor]]]:
    """A posterior of a network that is nowhere near its mode, and its data in two batches."""
    if x is None or y is None:
        name = likelihood if isinstance(likelihood, str) else "regression"
        x, y = linearised.data(name, inputs=widths[0], outputs=widths[-1])
    model = linearised.network(*widths)
    if likelihood == "regression":
        options = {"sigma_noise": 0.3, **options}
    la = Laplace(model, likelihood, subset, structure, **{"prior_precision": 0.7, **options})
    la.fit(halves(x, y))
    return la, halves(x, y)


def joined(batches: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    xs, ys = zip(*batches, strict=True)
    return torch.cat(xs), torch.cat(ys)


def close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("structure", "solver"), [(structure, "structure") for structure in STRUCTURES] + [("diag", "exact")]
)
def test_of_a_linear_model_it_is_the_ridge_solution(structure: str, solver: str) -> None:
    precision = torch.tensor([0.4, 2.0], dtype=DOUBLE)  # of the weight, and of the bias
    options = {"prior_precision": precision, "prior_mean": 0.3, "temperature": 1.7}
    la, batches = fitted("regression", structure, widths=(3, 2), **options)
    mode = la.linear_mode(batches, tolerance=1e-13, solver=solver)
    x, y = joined(batches)
    design = torch.cat([x, torch.ones(len(x), 1, dtype=DOUBLE)], 1)
    lam = torch.tensor([0.4, 0.4, 0.4, 2.0], dtype=DOUBLE)
    scale = 1 / (0.3**2 * 1.7)
    ridge = torch.linalg.solve(scale * design.mT @ design + lam.diag(), scale * design.mT @ y + lam[:, None] * 0.3)
    close(mode.weights, torch.cat([ridge[:3].mT.flatten(), ridge[3]]), 1e-9)
    assert mode.converged
    assert mode.relative < 1e-13
    assert mode.passes <= 40


@pytest.mark.parametrize(
    ("structure", "solver"),
    [
        ("full", "structure"),
        ("kron", "structure"),
        ("diag", "structure"),
        ("kron", "auto"),
        *(pytest.param(each, "structure", marks=pytest.mark.slow) for each in STRUCTURES if each[:4] not in NETWORKS),
    ],
)
def test_of_a_network_with_gaussian_noise_it_is_one_dense_solve(structure: str, solver: str) -> None:
    la, batches = fitted("regression", structure, sigma_noise=0.8)
    dense = Dense.of(la, *joined(batches))
    mode = la.linear_mode(batches, tolerance=1e-12, solver=solver)
    rows = dense.jacobian.flatten(0, 1)
    hessian = dense.weight * rows.mT @ rows + dense.precision.diag()
    expected = dense.trained - torch.linalg.solve(hessian, dense.gradient(dense.trained))
    close(mode.weights, expected, 1e-8)
    close(mode.offset, expected - dense.trained, 1e-8)
    torch.testing.assert_close(mode.before, float(dense.gradient(dense.trained).norm()), rtol=1e-9, atol=0)
    if solver == "auto":
        assert mode.passes <= 5


@pytest.mark.parametrize(
    ("likelihood", "structure"),
    [
        ("classification", "gp"),
        ("classification", "kron"),
        ("binary", "full"),
        ("binary", "ekfac"),
        ("poisson", "diag"),
        ("poisson", "blocks"),
    ],
)
def test_of_other_likelihoods_it_is_the_optimum_of_the_dense_loss(likelihood: str, structure: str) -> None:
    la, batches = fitted(likelihood, structure, prior_mean=0.1, temperature=0.8)
    with torch.no_grad():
        la.model[0].weight.mul_(3)  # far away: the first steps of Newton's method have to be cut
    la.fit(batches)
    dense = Dense.of(la, *joined(batches))
    mode = la.linear_mode(batches, tolerance=1e-10, solver="structure")
    close(mode.weights, dense.mode(), 1e-8)
    assert float(dense.gradient(mode.weights).norm()) <= 2e-10 * mode.scale
    torch.testing.assert_close(mode.after, float(dense.gradient(mode.weights).norm()), rtol=0, atol=1e-12 * mode.scale)


def test_a_line_search_cuts_steps_that_overshoot() -> None:
    """exp of a whole first step is infinite: the loss of counts grows faster than any quadratic."""
    la, batches = fitted("poisson", "full", widths=(2, 2), prior_precision=1e-3)
    x, y = joined(batches)
    with torch.no_grad():
        la.model[0].bias.sub_(9.0)
    la.fit(halves(x, y))
    mode = la.linear_mode(halves(x, y))
    assert mode.converged
    close(mode.weights, Dense.of(la, x, y).mode(), 1e-6)


@pytest.mark.parametrize(
    ("likelihood", "structure"), [("regression", "kron"), ("classification", "full"), ("classification", "gp")]
)
def test_of_the_last_layer(likelihood: str, structure: str) -> None:
    la, batches = fitted(likelihood, structure, "last_layer", widths=(2, 6, 2))
    mode = la.linear_mode(batches, tolerance=1e-11)
    assert len(mode.weights) == 6 * 2 + 2
    close(mode.weights, Dense.of(la, *joined(batches)).mode(), 1e-8)


@pytest.mark.parametrize(("likelihood", "structure"), [("regression", "diag"), ("classification", "full")])
def test_of_a_subnetwork(likelihood: str, structure: str) -> None:
    chosen = torch.tensor([0, 3, 4, 9, 11, 16])
    la, batches = fitted(likelihood, structure, "subnetwork", subnetwork_indices=chosen)
    mode = la.linear_mode(batches, tolerance=1e-11, solver="structure")
    assert len(mode.weights) == len(chosen)
    close(mode.weights, Dense.of(la, *joined(batches)).mode(), 1e-8)


@pytest.mark.parametrize(
    ("likelihood", "structure", "options"),
    [
        (Gaussian(sigma=torch.tensor([0.3, 0.9])), "kron", {}),
        ("regression", "full", {"estimator": "empirical"}),
        ("regression", "diag", {"estimator": "hessian", "prior_precision": 300.0}),
        ("classification", "gp", {"independent_outputs": True}),
        ("regression", "kron", {"damping": True}),
    ],
)
def test_with_other_curvatures_and_noise(likelihood: Any, structure: str, options: dict[str, Any]) -> None:
    la, batches = fitted(likelihood, structure, **options)
    expected = Dense.of(la, *joined(batches)).mode()
    for solver in ("auto", "structure"):
        close(la.linear_mode(batches, tolerance=1e-10, solver=solver).weights, expected, 1e-7)


def test_of_a_likelihood_that_is_not_convex_it_is_a_stationary_point() -> None:
    x, y = linearised.data("regression", outputs=1)
    la, batches = fitted(HeteroscedasticGaussian(), "full", x=x, y=y, prior_precision=5.0)
    mode = la.linear_mode(batches, tolerance=1e-4)
    assert mode.converged
    assert float(Dense.of(la, x, y).gradient(mode.weights).norm()) <= 1.01e-4 * mode.scale


def test_a_network_that_is_at_its_mode_stays_there() -> None:
    la, batches = fitted("regression", "kron", widths=(2, 2))
    expected = Dense.of(la, *joined(batches)).mode()
    with torch.no_grad():
        la.model[0].weight.copy_(expected[:4].reshape(2, 2))
        la.model[0].bias.copy_(expected[4:])
    la.fit(batches)
    mode = la.linear_mode(batches)
    assert (mode.passes, mode.rounds, mode.products) == (2, 0, 0)  # the exact curvature, and the gradient
    assert not bool(mode.offset.any())
    assert mode.converged


# -- predictions and evidence there ------------------------------------------------------------------------------------


def test_the_evidence_there_is_the_integral_over_the_weights() -> None:
    """Of the linearised network, by a Gaussian of all targets; at the trained weights it is another number."""
    la, batches = fitted("regression", "full", prior_mean=0.2)
    dense = Dense.of(la, *joined(batches))
    expected = dense.marginal(dense.precision, la.sigma_noise)
    mode = la.linear_mode(batches)
    torch.testing.assert_close(mode.log_marginal, expected, rtol=1e-9, atol=0)
    torch.testing.assert_close(la.log_marginal_likelihood(at=mode), expected, rtol=1e-9, atol=0)
    assert float(la.log_marginal_likelihood()) < float(expected) - 1
    # under another prior, theta* stays: its slope in the prior is that of the integral all the same
    logs = torch.tensor([0.7], dtype=DOUBLE).log().requires_grad_()
    (slope,) = torch.autograd.grad(la.log_marginal_likelihood(logs.exp(), at=mode), logs)
    (whole,) = torch.autograd.grad(dense.marginal(logs.exp().expand(la.n_params), la.sigma_noise), logs)
    torch.testing.assert_close(slope, whole, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("structure", ["full", "kron", "gp"])
def test_predictions_there_are_those_of_the_linearised_network(structure: str) -> None:
    la, batches = fitted("regression", structure)
    x, y = joined(batches)
    mode, new = la.linear_mode(batches), x[:4] + 0.3
    dense = Dense.of(la, new, y[:4])
    mean, covariance = la(new, at=mode)
    torch.testing.assert_close(mean, dense.outputs(mode.weights))
    trained, same = la(new)
    torch.testing.assert_close(trained, la.model(new).detach())
    torch.testing.assert_close(covariance, same)
    torch.testing.assert_close(la.predict_moments(new, at=mode)[0], mean)
    torch.testing.assert_close(la.predict_distribution(new, at=mode).mean, mean.flatten())
    draws = [la.functional_samples(new, generator=torch.Generator().manual_seed(0), at=at) for at in (mode, None)]
    torch.testing.assert_close(draws[0] - draws[1], (mean - trained).expand(100, -1, -1))
    single = la.functional_samples(new, diagonal_output=True, generator=torch.Generator().manual_seed(0), at=mode)
    assert float((single.mean(0) - mean).abs().max()) < 1
    assert la.predictive_samples(new, at=mode).shape == single.shape


@pytest.mark.parametrize("link", ["probit", "mc", "bridge"])
def test_probabilities_there_are_those_of_moved_logits(link: str) -> None:
    la, batches = fitted("classification", "full")
    x, y = joined(batches)
    mode = la.linear_mode(batches)
    logits, covariance = la.predict_moments(x, at=mode)
    torch.testing.assert_close(logits, Dense.of(la, x, y).outputs(mode.weights))
    found = la(x, link_approx=link, generator=torch.Generator().manual_seed(0), at=mode)
    torch.testing.assert_close(found, la.predict_proba(x, link, generator=torch.Generator().manual_seed(0), at=mode))
    if link == "probit":
        variance = covariance.diagonal(dim1=1, dim2=2)
        torch.testing.assert_close(found, torch.softmax(logits / (1 + torch.pi / 8 * variance).sqrt(), 1))


def test_large_batches_are_predicted_in_parts() -> None:
    la, batches = fitted("regression", "kron")
    mode, (x, _) = la.linear_mode(batches), joined(batches)
    whole = la(x, at=mode)
    with within(MemoryBudget(1)):
        for found, expected in zip(la(x, at=mode), whole, strict=True):
            torch.testing.assert_close(found, expected)
        values = [part.value for part in la.linearise(x, at=mode).parts()]
    assert len(values) > 1
    torch.testing.assert_close(torch.cat(values), whole[0])


# -- what it leaves alone, and what it refuses -------------------------------------------------------------------------


def test_the_model_and_the_posterior_are_left_alone() -> None:
    la, batches = fitted("classification", "kron")
    la.model.train()
    before = la.hyper, la.fitted
    with unchanged(la.model), torch.inference_mode():
        mode = la.linear_mode(batches)
    assert (la.hyper, la.fitted) == before
    assert not mode.weights.requires_grad
    assert not mode.weights.is_inference()


def test_any_order_of_the_data_will_do() -> None:
    la, batches = fitted("classification", "diag")
    x, y = joined(batches)
    loader = DataLoader(TensorDataset(x, y), batch_size=7, shuffle=True, generator=torch.Generator().manual_seed(0))
    found = la.linear_mode(loader, solver="structure", tolerance=1e-7)
    close(found.weights, Dense.of(la, x, y).mode(), 1e-5)


def test_data_that_can_be_read_once_are_refused() -> None:
    la, batches = fitted()
    with pytest.raises(DataError, match="only once"):
        la.linear_mode(iter(batches))
    with pytest.raises(DataError, match="only once"):
        la.optimize_prior_precision(at="linear_mode", train_loader=iter(batches))


def test_other_data_than_those_of_the_fit_are_refused() -> None:
    la, batches = fitted()
    x, y = joined(batches)
    with pytest.raises(DataError, match=r"holds 7 data points .* fitted to 12"):
        la.linear_mode(batches[:1])
    with pytest.raises(DataError, match=r"expected the same data"):
        la.linear_mode([(x, y + 1)])
    with pytest.raises(DataError, match="no batch"):
        la.linear_mode([])


class Changing:
    """A loader whose inputs differ from pass to pass."""

    def __init__(self, batches: list[tuple[Tensor, Tensor]], since: int) -> None:
        self.batches, self.since, self.passes = batches, since, 0

    def __iter__(self):
        self.passes += 1
        shift = 0.1 * self.passes if self.passes > self.since else 0.0
        return iter([(x + shift, y) for x, y in self.batches])


def test_data_that_change_from_pass_to_pass_are_refused() -> None:
    la, batches = fitted("classification", "diag")
    with pytest.raises(DataError, match=r"pass 3 over the data .*augmentation"):
        la.linear_mode(Changing(batches, since=2), solver="structure")


def test_a_mode_that_was_not_found_is_said() -> None:
    la, batches = fitted("poisson", "diag", prior_precision=1e-6)
    with pytest.warns(LapwingWarning, match="the linear mode was not found: after"):
        mode = la.linear_mode(batches, solver="structure", max_passes=6)
    assert not mode.converged
    assert mode.passes <= 6
    assert mode.relative > 1e-8
    assert "not found in" in repr(mode)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "LinearMode: found in" in repr(la.linear_mode(batches, tolerance=0.9, solver="structure", max_passes=9))


def test_a_mode_goes_with_its_fit_and_its_prior() -> None:
    la, batches = fitted()
    mode, (x, _) = la.linear_mode(batches), joined(batches)
    for name, value in (("prior_precision", 0.8), ("sigma_noise", 0.2), ("temperature", 2.0), ("prior_mean", 0.1)):
        before = getattr(la, name)
        setattr(la, name, value)
        with pytest.raises(ParameterError, match=r"linear mode was found under .* Call linear_mode again"):
            la(x, at=mode)
        setattr(la, name, before)
    la(x, at=mode)
    la.fit(batches)
    with pytest.raises(ParameterError, match="another fit"):
        la(x, at=mode)
    with pytest.raises(ParameterError, match="another fit"):
        la.log_marginal_likelihood(at=mode)


def test_bad_options_are_refused() -> None:
    la, batches = fitted()
    mode, (x, _) = la.linear_mode(batches), joined(batches)
    with pytest.raises(OptionError, match="pred_type='nn'"):
        la(x, pred_type="nn", at=mode)
    with pytest.raises(OptionError, match="pred_type='nn'"):
        la.functional_samples(x, "nn", at=mode)
    with pytest.raises(OptionError, match=r"at is .*expected a LinearMode"):
        check_mode("linear_mode", la.fitted, la.hyper, la.space)  # pyright: ignore[reportArgumentType]
    with pytest.raises(OptionError, match="unknown solver"):
        la.linear_mode(batches, solver="fast")
    for passes in (4, True):
        with pytest.raises(OptionError, match="max_passes is"):
            la.linear_mode(batches, max_passes=passes)
    for tolerance in (0.0, 1.0, float("nan")):
        with pytest.raises(OptionError, match="tolerance is"):
            la.linear_mode(batches, tolerance=tolerance)
    with torch.no_grad():
        la.model[0].weight.add_(1)
    with pytest.raises(ParameterError, match="weights are not those"):
        la.linear_mode(batches)
    with pytest.raises(NotFittedError):
        Laplace(nn.Linear(2, 1), "regression", "all", "full").linear_mode(batches)
    assert isinstance(mode, LinearMode)
