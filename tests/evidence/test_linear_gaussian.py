"""A linear model with Gaussian noise: the Laplace approximation is exact, so evidence, posterior and samples have a
closed form, which every structure that can be exact there must meet."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

from lapwing import estimate
from lapwing.errors import CurvatureError, ParameterError
from lapwing.evidence import Evidence, GaussianFit, gradient, mackay
from lapwing.likelihoods import Gaussian as GaussianLikelihood
from lapwing.posterior import Gaussian
from lapwing.priors import Prior
from lapwing.tangent import Tangent

N, D, SIGMA = 40, 3, 0.4


@dataclass
class Linear:
    """y = x w + b + noise, at the mode for the prior precisions of weight and bias."""

    tangent: Tangent
    x: Tensor
    y: Tensor
    prior: Prior

    @property
    def design(self) -> Tensor:
        return torch.cat([self.x, torch.ones(N, 1, dtype=torch.float64)], dim=1)

    def evidence(self, structure: str = "full") -> Evidence:
        estimator = {"full": estimate.full, "kron": estimate.kflr, "blocks": estimate.blocks}[structure]
        curvature = estimator(self.tangent, GaussianLikelihood(), [(self.x[:7], self.y[:7]), (self.x[7:], self.y[7:])])
        residuals = self.y - self.tangent.at(self.x).value
        return Evidence(
            curvature, self.tangent.space.values(self.tangent.model), GaussianFit(N, residuals.square().sum())
        )

    def exact(self, precisions: Tensor, sigma: Tensor) -> Tensor:
        """log N(y | 0, X diag(1/precision) X^T + sigma^2 I)."""
        covariance = self.design @ torch.diag(1 / precisions) @ self.design.mT
        covariance = covariance + sigma**2 * torch.eye(N, dtype=torch.float64)
        return MultivariateNormal(torch.zeros(N, dtype=torch.float64), covariance).log_prob(self.y[:, 0])


@pytest.fixture
def problem() -> Linear:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(N, D, generator=generator, dtype=torch.float64)
    w = torch.tensor([1.0, -0.5, 0.2], dtype=torch.float64)
    y = (x @ w + 0.3 + SIGMA * torch.randn(N, generator=generator, dtype=torch.float64)).unsqueeze(1)
    model = nn.Linear(D, 1).double()
    tangent = Tangent(model)
    return at_the_mode(Linear(tangent, x, y, Prior.isotropic(tangent.space, 1.5)), SIGMA)


def at_the_mode(problem: Linear, sigma: float) -> Linear:
    """Moves the model's weights to the mode of the posterior."""
    precision = problem.prior.precision().expand(D + 1)
    hessian = problem.design.mT @ problem.design / sigma**2 + torch.diag(precision)
    mode = torch.linalg.solve(hessian, problem.design.mT @ problem.y[:, 0] / sigma**2)
    with torch.no_grad():
        problem.tangent.model.weight.copy_(mode[:D].reshape(1, D))
        problem.tangent.model.bias.copy_(mode[D:])
    return problem


@pytest.mark.parametrize("structure", ["full", "kron", "blocks"])
def test_evidence_at_the_mode_is_the_marginal_likelihood(problem: Linear, structure: str) -> None:
    found = problem.evidence(structure).log_marginal(problem.prior, SIGMA)
    expected = problem.exact(problem.prior.precision().expand(D + 1), torch.tensor(SIGMA, dtype=torch.float64))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)


def test_evidence_with_one_precision_per_tensor(problem: Linear) -> None:
    prior = Prior.per_tensor(problem.tangent.space, [2.0, 0.5])
    problem = at_the_mode(Linear(problem.tangent, problem.x, problem.y, prior), SIGMA)
    expected = problem.exact(prior.precision(), torch.tensor(SIGMA, dtype=torch.float64))
    torch.testing.assert_close(problem.evidence().log_marginal(prior, SIGMA), expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize("structure", ["full", "kron", "blocks"])
def test_gradients_in_precision_noise_and_temperature_are_finite_differences(problem: Linear, structure: str) -> None:
    evidence = problem.evidence(structure)

    def value(free: Tensor) -> Tensor:
        prior = problem.prior.with_precisions(free[:1].exp())
        return evidence.log_marginal(prior, free[1].exp(), free[2].exp())

    free = torch.tensor([0.3, -0.8, 0.2], dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(value(free), free)
    for i in range(3):
        step = torch.zeros(3, dtype=torch.float64)
        step[i] = 1e-5
        with torch.no_grad():
            slope = (value(free + step) - value(free - step)) / 2e-5
        torch.testing.assert_close(found[i], slope, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("structure", ["full", "kron"])
def test_tuned_hyper_parameters_are_the_optimum_of_a_fine_grid(problem: Linear, structure: str) -> None:
    evidence = problem.evidence(structure)
    tuned = gradient(evidence, problem.prior, 1.0)
    assert tuned.converged
    steps = torch.linspace(-0.3, 0.3, 31, dtype=torch.float64)
    values = torch.tensor(
        [
            [
                float(
                    evidence.log_marginal(
                        tuned.prior.with_precisions(tuned.prior.precisions * a.exp()), tuned.sigma * b.exp()
                    )
                )
                for b in steps
            ]
            for a in steps
        ]
    )
    best = values.flatten().argmax()
    assert (int(best) // 31, int(best) % 31) == (15, 15)


def test_mackay_stands_still_where_the_evidence_is_stationary(problem: Linear) -> None:
    """C13: alpha = gamma / |w|^2 and sigma^2 = SSE / (N - gamma) hold at a zero of the gradient."""
    evidence = problem.evidence()
    fixed = mackay(evidence, problem.prior, 1.0)
    assert fixed.converged
    free = torch.stack([fixed.prior.precisions[0].log(), fixed.sigma.log()]).requires_grad_()
    value = evidence.log_marginal(problem.prior.with_precisions(free[:1].exp()), free[1].exp())
    (slope,) = torch.autograd.grad(value, free)
    assert float(slope.abs().max()) < 1e-6
    gamma = evidence.effective_parameters(fixed.prior, fixed.sigma)
    weights = evidence.mean.square().sum()
    torch.testing.assert_close(fixed.prior.precisions[0], gamma[0] / weights, rtol=1e-7, atol=0)
    climbed = gradient(evidence, problem.prior, 1.0)
    torch.testing.assert_close(climbed.log_marginal, fixed.log_marginal, rtol=1e-9, atol=0)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 2.3])
@pytest.mark.parametrize("mean", [0.0, 0.4])
def test_mackay_at_any_temperature_and_about_any_mean(problem: Linear, temperature: float, mean: float) -> None:
    """alpha = gamma / |w - mean|^2 and sigma^2 = SSE / (N - T gamma) hold at a zero of the gradient."""
    evidence = problem.evidence()
    prior = Prior.isotropic(problem.tangent.space, 1.5, mean)
    fixed = mackay(evidence, prior, 1.0, temperature)
    assert fixed.converged
    free = torch.stack([fixed.prior.precisions[0].log(), fixed.sigma.log()]).requires_grad_()
    value = evidence.log_marginal(prior.with_precisions(free[:1].exp()), free[1].exp(), temperature)
    (slope,) = torch.autograd.grad(value, free)
    assert float(slope.abs().max()) < 1e-6
    gamma = evidence.effective_parameters(fixed.prior, fixed.sigma, temperature)
    assert isinstance(evidence.fit, GaussianFit)
    torch.testing.assert_close(fixed.prior.precisions[0], gamma[0] / (evidence.mean - mean).square().sum())
    torch.testing.assert_close(fixed.sigma**2, evidence.fit.squares / (N - temperature * gamma[0]))
    climbed = gradient(evidence, prior, 1.0, temperature)
    torch.testing.assert_close(climbed.log_marginal, fixed.log_marginal, rtol=1e-9, atol=0)
    if temperature != 1:  # and another point than at T = 1
        other = mackay(evidence, prior, 1.0)
        assert float((other.sigma / fixed.sigma).log().abs()) > 1e-3


def test_mackay_per_group_agrees_with_the_gradient(problem: Linear) -> None:
    evidence = problem.evidence()
    prior = Prior.per_tensor(problem.tangent.space, 1.0)
    fixed, climbed = mackay(evidence, prior, 1.0), gradient(evidence, prior, 1.0)
    torch.testing.assert_close(fixed.prior.precisions, climbed.prior.precisions, rtol=1e-4, atol=0)
    torch.testing.assert_close(fixed.sigma, climbed.sigma, rtol=1e-4, atol=0)


def test_effective_parameters_count_eigenvalues(problem: Linear) -> None:
    evidence = problem.evidence()
    values = torch.linalg.eigvalsh(problem.design.mT @ problem.design / SIGMA**2)
    expected = (values / (values + 1.5)).sum()
    torch.testing.assert_close(evidence.effective_parameters(problem.prior, SIGMA)[0], expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize("structure", ["full", "kron", "blocks"])
def test_posterior_in_weights_and_functions(problem: Linear, structure: str) -> None:
    evidence = problem.evidence(structure)
    posterior = Gaussian(evidence.mean, evidence.precision(problem.prior, SIGMA))
    precision = problem.design.mT @ problem.design / SIGMA**2 + 1.5 * torch.eye(D + 1, dtype=torch.float64)
    dense = MultivariateNormal(evidence.mean, precision_matrix=precision)
    theta = torch.randn(5, D + 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(posterior.log_prob(theta), dense.log_prob(theta), rtol=1e-9, atol=0)
    torch.testing.assert_close(posterior.variance(), dense.covariance_matrix.diagonal(), rtol=1e-9, atol=0)
    x = torch.randn(4, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    design = torch.cat([x, torch.ones(4, 1, dtype=torch.float64)], dim=1)
    joint = design @ dense.covariance_matrix @ design.mT
    linear = problem.tangent.at(x)
    torch.testing.assert_close(posterior.covariance(linear)[:, 0, 0], joint.diagonal(), rtol=1e-9, atol=0)
    torch.testing.assert_close(posterior.joint_covariance(linear)[:, 0, :, 0], joint, rtol=1e-9, atol=1e-12)


def test_functional_draws_have_the_joint_distribution_over_inputs(problem: Linear) -> None:
    """The right way where samples would otherwise share noise across inputs: correlations are those of J Sigma J^T."""
    evidence = problem.evidence()
    posterior = Gaussian(evidence.mean, evidence.precision(problem.prior, SIGMA))
    x = torch.randn(3, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    linear = problem.tangent.at(x)
    count = 20000
    draws = posterior.functional_draws(linear, count, torch.Generator().manual_seed(2))[:, :, 0]
    joint = posterior.joint_covariance(linear)[:, 0, :, 0]
    error = (joint.square() + joint.diagonal()[:, None] * joint.diagonal()).sqrt() / count**0.5  # of a covariance
    assert bool(((draws.mT @ draws / count - joint).abs() < 4 * error).all())
    again = posterior.functional_draws(linear, count, torch.Generator().manual_seed(2))[:, :, 0]
    assert torch.equal(draws, again)


def test_functional_draws_are_jacobian_products_of_weight_draws() -> None:
    """On a network with convolutions, norms and an embedding-free tail: f + J delta, exactly."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.LayerNorm(8), nn.Linear(8, 3)).double()
    x = torch.randn(5, 1, 4, 4, dtype=torch.float64)
    tangent = Tangent(model)
    precision = estimate.diagonal(
        tangent, GaussianLikelihood(), [(x, torch.zeros(5, 3, dtype=torch.float64))]
    ).with_prior(1.0)
    posterior = Gaussian(tangent.space.values(model), precision)
    linear = tangent.at(x)
    found = posterior.functional_draws(linear, 4, torch.Generator().manual_seed(0))
    deltas = precision.draw(4, torch.Generator().manual_seed(0))
    torch.testing.assert_close(found, torch.einsum("bcp,sp->sbc", linear.rows(), deltas), rtol=1e-10, atol=1e-12)


def test_noise_where_there_is_none_is_refused(problem: Linear) -> None:
    evidence = Evidence(problem.evidence().curvature, problem.evidence().mean, torch.tensor(-3.0, dtype=torch.float64))
    with pytest.raises(CurvatureError, match=r"noise level.*Only Gaussian regression"):
        evidence.log_marginal(problem.prior, 0.5)
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(CurvatureError, match="expected a finite number > 0"):
            problem.evidence().log_marginal(problem.prior, wrong)


def test_priors_say_what_they_cannot_be(problem: Linear) -> None:
    space = problem.tangent.space
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ParameterError, match="negative, NaN or infinite"):
            Prior.isotropic(space, wrong)
    with pytest.raises(ParameterError, match=r"3 prior precisions; expected 1, or 2"):
        Prior.per_tensor(space, [1.0, 2.0, 3.0])
    with pytest.raises(ParameterError, match="prior mean has shape"):
        Prior.isotropic(space, 1.0, torch.zeros(2))
    with pytest.raises(ParameterError, match="groups has shape"):
        Prior.grouped(space, torch.zeros(2, dtype=torch.int64))


def test_log_prob_of_a_prior_with_a_mean(problem: Linear) -> None:
    space = problem.tangent.space
    precision = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    mean = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    theta = torch.tensor([1.0, -1.0, 0.5, 2.0], dtype=torch.float64)
    expected = torch.distributions.Normal(mean, precision.rsqrt()).log_prob(theta).sum()
    torch.testing.assert_close(Prior.diagonal(space, precision, mean).log_prob(theta), expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        Prior.layerwise(space, 2.0).log_prob(theta), Prior.isotropic(space, 2.0).log_prob(theta), rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("numbers", [[2.0, 5.0], [3.0]], ids=["weight and bias", "one for all"])
def test_log_prob_of_precisions_that_entries_share(problem: Linear, numbers: list[float]) -> None:
    space = problem.tangent.space
    prior = Prior.per_tensor(space, numbers) if len(numbers) > 1 else Prior.isotropic(space, numbers[0])
    theta = torch.tensor([1.0, -1.0, 0.5, 2.0], dtype=torch.float64)
    each = torch.tensor([*numbers[:1] * 3, numbers[-1]], dtype=torch.float64)  # three weights and a bias
    expected = torch.distributions.Normal(torch.zeros_like(theta), each.rsqrt()).log_prob(theta).sum()
    torch.testing.assert_close(prior.log_prob(theta), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("power", "temperature"), [(2, 1.0), (2, 3.0), (4, 1.0), (4, 3.0)])
def test_the_noise_divides_a_curvature_at_unit_noise_by_its_power(
    problem: Linear, power: int, temperature: float
) -> None:
    """Second derivatives carry 1 / sigma^2, squared gradients 1 / sigma^4; every term of the evidence by hand."""
    plain, sigma = problem.evidence(), 0.7
    evidence = Evidence(plain.curvature, plain.mean, plain.fit, power)
    prior = Prior.per_tensor(problem.tangent.space, [1.5, 4.0])
    each = torch.tensor([1.5, 1.5, 1.5, 4.0], dtype=torch.float64)
    matrix = problem.design.mT @ problem.design / (sigma**power * temperature) + each.diag()
    variance = evidence.precision(prior, sigma, temperature).variance()
    torch.testing.assert_close(variance, torch.linalg.inv(matrix).diagonal(), rtol=1e-9, atol=0)
    residuals = problem.y - problem.tangent.at(problem.x).value
    fit = torch.distributions.Normal(0.0, torch.tensor(sigma, dtype=torch.float64)).log_prob(residuals).sum()
    ratio = each.log().sum() - (each * plain.mean.square()).sum() - torch.logdet(matrix)
    found = evidence.log_marginal(prior, sigma, temperature)
    torch.testing.assert_close(found, fit / temperature + ratio / 2, rtol=1e-9, atol=0)
    gamma = torch.ones_like(each) - each * torch.linalg.inv(matrix).diagonal()
    expected = torch.stack([gamma[:3].sum(), gamma[3]])
    torch.testing.assert_close(evidence.effective_parameters(prior, sigma, temperature), expected, rtol=1e-9, atol=0)
