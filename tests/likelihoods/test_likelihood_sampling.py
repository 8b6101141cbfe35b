"""Samples are valid targets, come from the generator alone, and have the moments that the Fisher promises."""

import pytest
import torch

from lapwing.likelihoods import Bernoulli, BernoulliMixture, Categorical, Gaussian, HeteroscedasticGaussian, Poisson

METHODS = ("log_prob", "grad", "hessian", "hessian_sqrt", "psd_hessian")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_samples_pass_check(problem):
    y = problem.likelihood.sample(problem.f, generator=seeded())
    problem.likelihood.check(problem.f, y)
    assert y.shape == problem.y.shape


def test_gradients_at_samples_have_mean_zero_and_second_moment_fisher(vector_problem):
    likelihood, n = vector_problem.likelihood, 40_000
    f = vector_problem.f[:1].expand(n, -1)
    grad = likelihood.grad(f, likelihood.sample(f, generator=seeded(1)))
    outer = grad.unsqueeze(-1) * grad.unsqueeze(-2)
    for values, expected in ((grad, torch.zeros_like(grad[0])), (outer, likelihood.fisher(f[:1])[0])):
        standard_error = values.std(0) / n**0.5
        assert (standard_error > 0).any()
        assert ((values.mean(0) - expected).abs() <= 4 * standard_error + 1e-12).all()


def test_a_seed_gives_the_same_targets_and_leaves_the_global_generator_alone(problem):
    likelihood, f = problem.likelihood, problem.f
    state = torch.get_rng_state()
    first, second = likelihood.sample(f, generator=seeded(3)), likelihood.sample(f, generator=seeded(3))
    assert torch.equal(first, second)
    assert torch.equal(state, torch.get_rng_state())


def test_a_second_draw_differs(vector_problem):
    likelihood, generator = vector_problem.likelihood, seeded()
    f = vector_problem.f.repeat(20, 1)
    draws = [likelihood.sample(f, generator=generator) for _ in range(2)] + [likelihood.sample(f) for _ in range(2)]
    assert not torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[2], draws[3])


def test_positions_draw_independently(vector_problem):
    likelihood = vector_problem.likelihood
    y = likelihood.sample(vector_problem.f[:1].expand(64, -1), generator=seeded())
    assert (y != y[:1]).any()


def test_samples_carry_no_gradient(vector_problem):
    assert not vector_problem.likelihood.sample(vector_problem.f.clone().requires_grad_(), seeded()).requires_grad


@pytest.mark.parametrize(
    ("shape", "class_axis"), [((6, 4), None), ((3, 5, 4), None), ((3, 4, 5), 1), ((3, 4, 2, 5), None)]
)
def test_samples_are_in_the_layout_of_the_outputs(shape, class_axis):
    """Nearly deterministic outputs: the sample must be the mode, each at its own place."""
    axis = class_axis or (len(shape) - 1 if len(shape) < 4 else 1)
    f = 1e4 * torch.randn(shape, generator=seeded())
    y = Categorical(class_axis=class_axis).sample(f, generator=seeded())
    assert torch.equal(y, f.argmax(axis))
    assert torch.equal(Bernoulli(class_axis=class_axis).sample(f, generator=seeded()), (f > 0).float())
    y = Gaussian(1e-3, class_axis=class_axis).sample(f, generator=seeded())
    torch.testing.assert_close(y, f, rtol=0, atol=0.01)
    mean, log_variance = f.split(2, axis)
    y = HeteroscedasticGaussian(class_axis=class_axis).sample(torch.cat([mean, log_variance * 0 - 40], axis), seeded())
    torch.testing.assert_close(y, mean)
    log_rate = torch.log(1e6 * torch.rand(shape, generator=seeded(), dtype=torch.float64) + 1e5)
    y = Poisson(class_axis=class_axis).sample(log_rate, generator=seeded())
    torch.testing.assert_close(y, log_rate.exp(), rtol=0.05, atol=0)
    h = f.narrow(axis, 0, 3)
    coin = torch.where(h.select(axis, 0) > 0, h.select(axis, 1), h.select(axis, 2))
    assert torch.equal(BernoulliMixture(class_axis=class_axis).sample(h, generator=seeded()), (coin > 0).float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_outputs_are_computed_in_float32(vector_problem, dtype):
    likelihood, y = vector_problem.likelihood, vector_problem.y
    f = vector_problem.f.to(dtype)
    likelihood.check(f, y)
    for name in METHODS:
        result = getattr(likelihood, name)(f, y)
        assert result.dtype == torch.float32
        torch.testing.assert_close(result, getattr(likelihood, name)(f.float(), y), rtol=0, atol=0)
    assert likelihood.fisher(f).dtype == likelihood.fisher_sqrt(f).dtype == torch.float32
    sample = likelihood.sample(f, generator=seeded())
    assert torch.equal(sample, likelihood.sample(f.float(), generator=seeded()))
    likelihood.check(f, sample)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [30.0, 100.0, 1e4, 1e30])
@pytest.mark.parametrize(("likelihood", "n_outputs"), [(Categorical(), 3), (Bernoulli(), 3), (BernoulliMixture(), 3)])
def test_extreme_logits_stay_finite(likelihood, n_outputs, size, dtype):
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 0.0, 1.0])] * n_outputs)
    f = (size * signs).to(dtype)
    for seed in range(3):
        if isinstance(likelihood, Bernoulli):
            y = torch.randint(0, 2, f.shape, generator=seeded(seed))
        else:
            y = torch.randint(0, 2, f.shape[:1], generator=seeded(seed))
        for name in METHODS:
            assert torch.isfinite(getattr(likelihood, name)(f, y)).all(), name
        assert torch.isfinite(likelihood.fisher_sqrt(f)).all()
        likelihood.check(f, likelihood.sample(f, generator=seeded(seed)))


def test_a_confident_bernoulli_keeps_its_relative_precision():
    f = torch.tensor([[40.0, -40.0]], dtype=torch.float64)
    tail = torch.exp(torch.tensor(-40.0, dtype=torch.float64))  # s(-40) to rounding
    likelihood, y = Bernoulli(), torch.tensor([[1, 0]])
    torch.testing.assert_close(likelihood.log_prob(f, y), -2 * tail[None], rtol=1e-9, atol=0)
    torch.testing.assert_close(likelihood.grad(f, y), torch.stack([-tail, tail])[None], rtol=1e-9, atol=0)
    diagonal = likelihood.hessian(f, y).diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(diagonal, tail.expand(1, 2), rtol=1e-9, atol=0)


def test_rare_coins_in_bfloat16_are_as_rare_as_they_should_be():
    """bfloat16 has 256 levels between 0 and 1: drawn in it, one coin in 256 would be."""
    f = torch.full((400_000, 1), -7.0, dtype=torch.bfloat16)
    drawn = Bernoulli().sample(f, torch.Generator().manual_seed(0))
    rate = float(torch.sigmoid(torch.tensor(-7.0)))
    assert abs(float(drawn.double().mean()) - rate) < 4 * (rate / len(f)) ** 0.5 + 0.005 * rate
