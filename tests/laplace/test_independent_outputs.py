"""independent_outputs=True: a Gaussian process per output, against dense matrices of one output at a time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing
import oracle
from lapwing import Laplace, estimate
from lapwing.errors import CurvatureError, OptionError, ParameterError
from lapwing.likelihoods import Categorical, Gaussian, Likelihood
from lapwing.linalg import Dual, Independent
from lapwing.tangent import Tangent

SIGMA, TEMPERATURE = 0.7, 1.3
TASKS = ("regression of 1", "regression of 3", "classification", "conv2d", "embedding")
PRIORS = ("scalar", "per tensor", "per entry")


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Words(nn.Module):
    """Sequences of words in, three numbers out; the table is used several times by a data point."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(7, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.table(x)).sum(1))


@dataclass
class Case:
    """A network, its data and inputs to predict at; what they mean is computed from dense matrices."""

    model: nn.Module
    likelihood: Likelihood
    x: Tensor
    y: Tensor
    test: Tensor
    prior: Tensor

    @property
    def regression(self) -> bool:
        return isinstance(self.likelihood, Gaussian)

    @property
    def delta(self) -> Tensor:
        sizes = torch.tensor([p.numel() for p in self.model.parameters()])
        if len(self.prior) == len(sizes):
            return self.prior.repeat_interleave(sizes)
        return self.prior.expand(int(sizes.sum()))

    @property
    def mode(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])

    @property
    def f(self) -> Tensor:
        return oracle.forward(self.model, self.x).detach()

    def seen(self) -> list[Tensor]:
        """J_c^T diag(H_cc) J_c of every output c, [P, P]."""
        hessian = oracle.output_hessian(self.likelihood, self.f, self.y).diagonal(dim1=1, dim2=2)
        jacobian = oracle.jacobian(self.model, self.x)
        scale = 1 / ((SIGMA**2 if self.regression else 1) * TEMPERATURE)
        return [scale * j.mT @ (h.unsqueeze(1) * j) for j, h in zip(jacobian.unbind(1), hessian.unbind(1), strict=True)]

    def covariances(self, rows: Tensor) -> Tensor:
        """[B, C, B, C] of rows [B, C, P]: zero between outputs."""
        out = rows.new_zeros(*rows.shape[:2], *rows.shape[:2])
        for c, seen in enumerate(self.seen()):
            out[:, c, :, c] = rows[:, c] @ torch.linalg.inv(seen + self.delta.diag()) @ rows[:, c].mT
        return out

    def log_marginal(self) -> Tensor:
        likelihood = Gaussian(sigma=SIGMA) if self.regression else self.likelihood
        value = likelihood.log_prob(self.f, self.y).sum() / TEMPERATURE - (self.delta * self.mode.square()).sum() / 2
        for seen in self.seen():
            value = value - torch.logdet(torch.eye(len(seen)) + seen / self.delta) / 2
        return value

    def laplace(self, **options: Any) -> Any:
        own = {"sigma_noise": SIGMA} if self.regression else {}
        own |= {"prior_precision": self.prior, "temperature": TEMPERATURE, "independent_outputs": True}
        task = "regression" if self.regression else "classification"
        return Laplace(self.model, task, "all", "gp", **(own | options))

    def fitted(self, **options: Any) -> Any:
        la = self.laplace(**options)
        la.fit([(self.x[:4], self.y[:4]), (self.x[4:], self.y[4:])])
        return la


def case(task: str, prior: str = "scalar") -> Case:
    torch.manual_seed(0)
    x, test = normal(7, 2), normal(4, 2, seed=1)
    likelihood: Likelihood = Gaussian()
    if task == "conv2d":
        model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3))
        x, test = normal(7, 1, 3, 3), normal(4, 1, 3, 3, seed=1)
    elif task == "embedding":
        model, x, test = Words(), normal(7, 4).argsort(1), normal(4, 4, seed=1).argsort(1)
    else:
        model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1 if task == "regression of 1" else 3))
    model = model.double()
    y = normal(7, model(x).shape[1], seed=2)
    if task in ("classification", "embedding"):
        likelihood, y = Categorical(), torch.arange(7) % 3
    sizes = [p.numel() for p in model.parameters()]
    count = {"scalar": 1, "per tensor": len(sizes), "per entry": sum(sizes)}[prior]
    return Case(model, likelihood, x, y, test, 0.5 + normal(count, seed=3).square())


@pytest.mark.parametrize(
    ("task", "prior"),
    [*((task, prior) for task in TASKS[:3] for prior in PRIORS), *((task, "per tensor") for task in TASKS[3:])],
)
def test_predictions_and_evidence_are_those_of_every_output_alone(task: str, prior: str) -> None:
    own = case(task, prior)
    la = own.fitted()
    assert isinstance(la.fitted.curvature, Dual if la.n_outputs == 1 else Independent)
    rows = oracle.jacobian(own.model, own.test)
    joint = own.covariances(rows)
    each = torch.stack([joint[n, :, n] for n in range(len(rows))])
    close(la.functional_variance(rows), each)
    close(la.functional_covariance(rows), joint.reshape(rows.shape[0] * rows.shape[1], -1))
    linear = la.linearise(own.test)
    close(la.posterior.covariance(linear), each)
    close(la.posterior.variances(linear), each.diagonal(dim1=1, dim2=2))
    close(la.posterior.joint_covariance(linear), joint)
    close(la.log_marginal_likelihood(), own.log_marginal())
    if own.regression:
        close(la(own.test)[1], each)
        close(la(own.test, joint=True)[1], joint.reshape(la.n_outputs * 4, -1))
        close(la(own.test, diagonal_output=True)[1], each.diagonal(dim1=1, dim2=2))
    else:
        kappa = (1 + torch.pi / 8 * each.diagonal(dim1=1, dim2=2)).rsqrt()
        close(la(own.test), torch.softmax(kappa * own.model(own.test).detach(), -1))


@pytest.mark.parametrize("prior", PRIORS)
def test_with_one_output_nothing_changes(prior: str) -> None:
    own = case("regression of 1", prior)
    la, exact = own.fitted(), own.fitted(independent_outputs=False)
    close(la(own.test)[1], exact(own.test)[1])
    close(la.log_marginal_likelihood(), exact.log_marginal_likelihood())
    close(la.effective_parameters(), exact.effective_parameters())
    seed = torch.Generator().manual_seed
    close(*(each.functional_samples(own.test, generator=seed(0)) for each in (la, exact)))
    close(*(each.sample(3, generator=seed(0)) for each in (la, exact)))
    other = own.laplace()
    other.load_state_dict(la.state_dict())
    close(other(own.test)[1], exact(own.test)[1])


def test_it_is_another_posterior_where_outputs_share_weights() -> None:
    own = case("classification")
    assert not torch.allclose(own.fitted()(own.test), own.fitted(independent_outputs=False)(own.test), rtol=1e-3)


@pytest.mark.parametrize("task", ["regression of 3", "embedding"])
def test_functions_are_drawn_jointly_over_inputs_and_apart_over_outputs(task: str) -> None:
    own, count = case(task), 4000
    la = own.fitted()
    draws = la.functional_samples(own.test, n_samples=count, generator=torch.Generator().manual_seed(0))
    expected = own.covariances(oracle.jacobian(own.model, own.test)).reshape(draws[0].numel(), -1)
    found = torch.cov(draws.flatten(1).mT).reshape(expected.shape)
    variance = expected.diagonal()
    error = ((variance[:, None] * variance + expected.square()) / count).sqrt()
    assert float(((found - expected) / error).abs().max()) < 4.5
    away = draws.mean(0) - own.model(own.test).detach()
    assert bool((away.flatten().abs() < 4.5 * (variance / count).sqrt()).all())


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("task", ["regression of 3", "classification"])
def test_gradients_of_the_evidence_and_effective_parameters_agree(task: str, prior: str) -> None:
    own = case(task, prior)
    la = own.fitted()
    log = own.prior.log().requires_grad_()
    (found,) = torch.autograd.grad(la.log_marginal_likelihood(log.exp()), log)
    by_hand = Case(own.model, own.likelihood, own.x, own.y, own.test, log.exp())
    (expected,) = torch.autograd.grad(by_hand.log_marginal(), log)
    close(found, expected)
    # d log Z / d log alpha = (gamma - alpha |theta|^2) / 2
    squares = la.prior.sums(la.mean.square())
    close(la.effective_parameters(), 2 * found + own.prior * squares)


def test_noise_and_prior_are_tuned_to_the_same_evidence_by_both_ways() -> None:
    own = case("regression of 3")
    found = []
    for method in ("marglik", "mackay"):
        la = own.fitted(temperature=1.0)
        la.optimize_prior_precision(method=method, optimize_sigma_noise=True)
        found.append(torch.stack([la.prior_precision[0], la.sigma_noise, la.log_marginal_likelihood()]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=0)


@pytest.mark.parametrize("task", ["regression of 3", "classification"])
def test_all_precisions_of_a_grid_at_once_are_those_one_by_one(task: str) -> None:
    own = case(task)
    la = own.fitted()
    precisions = torch.logspace(-2, 2, 3, dtype=torch.float64)
    curvature = la.fitted.curvature * 2.0
    together = curvature.variances(la.linearise(own.test), precisions)
    for precision, found in zip(precisions, together, strict=True):
        close(found, curvature.with_prior(precision).variances(la.linearise(own.test)))
    la.optimize_prior_precision(method="gridsearch", val_loader=[(own.test, own.y[:4])], grid_size=5)


def test_data_add_and_scale_and_share_their_decompositions() -> None:
    own = case("regression of 3")
    first, second = own.laplace(), own.laplace()
    first.fit([(own.x[:3], own.y[:3])])
    second.fit([(own.x[3:], own.y[3:])])
    total = first.fitted.curvature * 2.0 + second.fitted.curvature * 3.0
    weights = torch.tensor([2.0] * 3 + [3.0] * 4, dtype=torch.float64)
    jacobian, rows = oracle.jacobian(own.model, own.x), oracle.jacobian(own.model, own.test)
    found = total.with_prior(1.5).joint(rows)
    for c in range(3):
        j = jacobian[:, c]
        precision = j.mT @ (weights.unsqueeze(1) * j) + 1.5 * torch.eye(j.shape[1])
        close(found[:, c, :, c], rows[:, c] @ torch.linalg.inv(precision) @ rows[:, c].mT)
    assert (total * 2.0).outputs[1].eigen is total.outputs[1].eigen
    first.fit([(own.x[3:], own.y[3:])], override=False)
    close(first(own.test)[1], own.fitted()(own.test)[1])


def test_cotangents_in_chunks_and_classes_by_place_give_the_same() -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(1, 3, 2).double()  # three classes at each of four places: [B, 3, 2, 2]
    x, y = normal(4, 1, 3, 3), torch.arange(16).reshape(4, 2, 2) % 3
    test, likelihood = normal(2, 1, 3, 3, seed=1), Categorical()
    jacobian, rows = oracle.jacobian(model, x), oracle.jacobian(model, test)
    hessian = oracle.output_hessian(likelihood, model(x).detach(), y).diagonal(dim1=1, dim2=2)
    for budget in (2**28, 8):
        tangent = Tangent(model, budget=budget)
        found = estimate.dual(tangent, likelihood, [(x[:3], y[:3]), (x[3:], y[3:])], independent_outputs=True)
        assert isinstance(found, Independent)
        variances = found.with_prior(0.7).variances(tangent.at(test))
        for c in range(12):
            j = jacobian[:, c]
            precision = j.mT @ (hessian[:, c, None] * j) + 0.7 * torch.eye(j.shape[1], dtype=torch.float64)
            expected = (rows[:, c] * torch.linalg.solve(precision, rows[:, c].mT).mT).sum(1)
            close(variances[:, c], expected)


@pytest.mark.parametrize("source", ["fisher", "empirical"])
def test_other_sources_give_the_diagonal_of_theirs(source: str) -> None:
    own = case("classification")
    la = own.fitted(estimator=source, temperature=1.0)
    f = own.f
    at = own.likelihood.fisher(f) if source == "fisher" else None
    each = own.likelihood.grad(f, own.y).square() if at is None else at.diagonal(dim1=1, dim2=2)
    jacobian, rows = oracle.jacobian(own.model, own.x), oracle.jacobian(own.model, own.test)
    found = la.functional_variance(rows)
    for c in range(3):
        j = jacobian[:, c]
        precision = j.mT @ (each[:, c, None] * j) + own.delta.diag()
        close(found[:, c, c], (rows[:, c] * torch.linalg.solve(precision, rows[:, c].mT).mT).sum(1))


def test_whatever_needs_one_gaussian_over_weights_is_refused() -> None:
    own = case("regression of 3")
    la = own.fitted()
    for refused in (
        la.sample,
        lambda: la.posterior_variance,
        lambda: la.posterior_covariance,
        lambda: la.posterior_precision.solve(la.mean),
        lambda: la.posterior_precision.to_matrix(),
        lambda: la.log_prob(la.mean),
        lambda: la.square_norm(la.mean),
        lambda: la(own.test, pred_type="nn"),
        lambda: la.functional_samples(own.test, "nn"),
        lambda: la.H.dense(),
        lambda: la.H.mv(la.mean),
        lambda: la.H.diagonal(),
    ):
        with pytest.raises(CurvatureError, match="independent_outputs=False"):
            refused()
    close(la.mean, own.mode)


def test_other_numbers_of_outputs_and_preferences_are_refused() -> None:
    own = case("regression of 3")
    la = own.fitted()
    with pytest.raises(CurvatureError, match="2 outputs; expected 3"):
        la.functional_variance(normal(4, 2, la.n_params))
    with pytest.raises(CurvatureError, match="2 outputs; expected 3"):
        la.functional_covariance(normal(4, 2, la.n_params))
    with pytest.raises(OptionError, match="preferences"):
        Laplace(own.model, "reward_modeling", "all", "gp", independent_outputs=True)
    with pytest.raises(CurvatureError, match="3 Gram matrices"):
        own.fitted(limit=12)  # 3 x 7^2 = 147 numbers
    own.fitted(limit=13)


def test_state_files_and_checkpoints_keep_it(tmp_path: Path) -> None:
    own = case("regression of 3", "per tensor")
    la = own.fitted()
    expected, path = la(own.test)[1], tmp_path / "posterior"
    other = own.laplace()
    other.load_state_dict(la.state_dict())
    assert torch.equal(other(own.test)[1], expected)
    la.save(path)
    loaded = lapwing.load(path, own.model)
    assert torch.equal(loaded(own.test)[1], expected)
    assert loaded.independent_outputs
    with pytest.raises(ParameterError, match="independent_outputs=True and this posterior False"):
        own.laplace(independent_outputs=False).load_state_dict(la.state_dict())
    data = [(own.x[:4], own.y[:4]), (own.x[4:], own.y[4:])]
    other = own.laplace()
    other.fit(data, checkpoint=tmp_path / "checkpoint", checkpoint_every=1)
    close(other(own.test)[1], expected)
    with pytest.raises(CurvatureError, match="Gram matrices"):
        own.laplace(limit=12).fit(data, checkpoint=tmp_path / "checkpoint", checkpoint_every=1)


def test_subset_last_layer_and_backprop() -> None:
    own = case("regression of 3")
    la = own.fitted(n_subset=5)
    assert la.n_data == 5
    whole = own.fitted(enable_backprop=True)
    x = own.test.clone().requires_grad_()
    (grad,) = torch.autograd.grad(whole(x)[1].sum(), x)
    moved = own.test.clone()
    moved[0, 0] += 1e-6
    numeric = (own.fitted()(moved)[1].sum() - own.fitted()(own.test)[1].sum()) / 1e-6
    torch.testing.assert_close(grad[0, 0], numeric, rtol=1e-4, atol=1e-6)
    last = Laplace(own.model, "regression", "last_layer", "gp", sigma_noise=SIGMA, independent_outputs=True)
    last.fit([(own.x, own.y)])
    # a last layer has weights of its own for every output, so that nothing is left out
    exact = Laplace(own.model, "regression", "last_layer", "full", sigma_noise=SIGMA)
    exact.fit([(own.x, own.y)])
    close(last(own.test)[1], exact(own.test)[1])
    close(last.log_marginal_likelihood(), exact.log_marginal_likelihood())


def test_gram_matrices_of_all_outputs_share_the_memory_that_may_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    own = case("regression of 3", "per tensor")
    expected = own.fitted()(own.test)[1]
    monkeypatch.setattr("lapwing.linalg.dual.KEPT", 3 * 4 * 7**2 * 8 - 1)  # outputs, tensors, data
    la = own.fitted()
    close(la(own.test)[1], expected)
    assert all(each.block_grams is None for each in la.fitted.curvature.outputs)
