"""What is particular to one likelihood, and what must hold for shapes nobody thought of."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from lapwing.errors import DataError, LikelihoodError
from lapwing.likelihoods import (
    Bernoulli,
    BernoulliMixture,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
    from_function,
)

RTOL = {"rtol": 1e-9, "atol": 1e-12}
F64 = torch.float64


def normal(*shape, seed=0, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def classes(n_classes, *shape, seed=0):
    return torch.randint(0, n_classes, shape, generator=torch.Generator().manual_seed(seed))


# -- any shape


@settings(max_examples=60, deadline=None)
@given(
    lead=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    n_classes=st.integers(2, 9),
    scale=st.sampled_from([0.1, 1.0, 10.0, 100.0]),
    seed=st.integers(0, 1000),
)
def test_the_categorical_root_is_exact_for_any_shape(lead, n_classes, scale, seed):
    f = normal(*lead, n_classes, seed=seed, scale=scale)
    y = classes(n_classes, *lead, seed=seed)
    likelihood = Categorical(class_axis=-1)
    root, hessian = likelihood.hessian_sqrt(f, y), likelihood.hessian(f, y)
    assert root.shape == (*lead, n_classes, n_classes - 1)
    torch.testing.assert_close(root @ root.mT, hessian, **RTOL)
    ones = torch.ones(n_classes, dtype=F64)
    torch.testing.assert_close(root.mT @ ones, torch.zeros_like(root[..., 0, :]), **RTOL)
    torch.testing.assert_close(likelihood.grad(f, y).sum(-1), torch.zeros_like(f[..., 0]), **RTOL)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), shape=st.lists(st.integers(0, 4), min_size=2, max_size=6))
def test_from_last_undoes_to_last(data, shape):
    axis = data.draw(st.none() | st.integers(1, len(shape) - 1) | st.integers(1 - len(shape), -1))
    likelihood = Gaussian(class_axis=axis)
    f = normal(*shape)
    last = likelihood.to_last(f)
    expected = axis if axis is not None else (-1 if len(shape) <= 3 else 1)
    assert last.shape[0] == shape[0]
    assert last.shape[-1] == shape[expected]
    assert torch.equal(likelihood.from_last(last), f)
    custom = from_function(lambda f, y: f.sum())
    assert custom.to_last(f).shape == (shape[0], math.prod(shape[1:]))
    assert torch.equal(custom.from_last(custom.to_last(f), f.shape), f)


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from([Gaussian(0.3), Bernoulli(), Poisson(), HeteroscedasticGaussian()]),
    lead=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    half=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_samples_and_derivatives_fit_for_any_shape(kind, lead, half, seed):
    likelihood = dataclasses.replace(kind, class_axis=-1)
    f = normal(*lead, 2 * half, seed=seed)
    y = likelihood.sample(f, generator=torch.Generator().manual_seed(seed))
    likelihood.check(f, y)
    expected = torch.func.grad(lambda f: -likelihood.log_prob(f, y).sum())(f)
    torch.testing.assert_close(likelihood.grad(f, y), expected, **RTOL)
    root = likelihood.hessian_sqrt(f, y)
    torch.testing.assert_close(root @ root.mT, likelihood.psd_hessian(f, y), **RTOL)


# -- Gaussian


def test_gaussian_densities_integrate_to_one():
    grid = torch.linspace(-30, 30, 4001, dtype=F64)
    for likelihood, f in (
        (Gaussian(1.3), torch.tensor([[0.4]], dtype=F64)),
        (HeteroscedasticGaussian(), torch.tensor([[0.4, 0.7]], dtype=F64)),
    ):
        density = likelihood.log_prob(f.expand(len(grid), -1), grid[:, None]).exp()
        torch.testing.assert_close(torch.trapezoid(density, grid), torch.tensor(1.0, dtype=F64), **RTOL)


def test_sigma_is_differentiable():
    sigma = torch.tensor([0.5, 2.0], dtype=F64, requires_grad=True)
    f, y = normal(6, 2, seed=1), normal(6, 2, seed=2)
    likelihood = Gaussian(sigma)
    (slope,) = torch.autograd.grad(likelihood.log_prob(f, y).sum(), sigma)
    expected = ((y - f) ** 2).sum(0) / sigma.detach() ** 3 - 6 / sigma.detach()
    torch.testing.assert_close(slope, expected, **RTOL)
    (slope,) = torch.autograd.grad(likelihood.hessian(f, y).sum(), sigma)
    torch.testing.assert_close(slope, -2 * 6 / sigma.detach() ** 3, **RTOL)


@pytest.mark.parametrize("sigma", [2, 2.0, torch.tensor(2.0), torch.tensor([2.0]), torch.tensor([2, 2, 2])])
def test_sigma_may_be_any_positive_number_or_vector(sigma):
    f, y = normal(4, 3, seed=1), normal(4, 3, seed=2)
    torch.testing.assert_close(Gaussian(sigma).log_prob(f, y), Gaussian(2.0).log_prob(f, y), **RTOL)


def test_sigma_per_output_follows_the_class_axis_of_images():
    f, y = normal(2, 3, 4, 5, seed=1), normal(2, 3, 4, 5, seed=2)
    sigma = torch.tensor([0.5, 1.0, 2.0], dtype=F64)
    expected = (f - y) / sigma[:, None, None] ** 2
    torch.testing.assert_close(Gaussian(sigma).grad(f, y), expected, **RTOL)


def test_integer_targets_are_numbers():
    f, y = normal(3, 2), torch.tensor([[1, 2], [3, 4], [5, 6]])
    torch.testing.assert_close(Gaussian().grad(f, y), f - y, **RTOL)


# -- Categorical


def test_ignored_positions_contribute_nothing():
    f, y = normal(2, 4, 3), classes(3, 2, 4)
    masked = y.clone()
    masked[0, 1] = masked[1, 3] = -7
    likelihood = Categorical(ignore_index=-7)
    likelihood.check(f, masked)
    kept = masked != -7
    expected = -cross_entropy(f.movedim(-1, 1), masked, reduction="none", ignore_index=-7).sum(1)
    torch.testing.assert_close(likelihood.log_prob(f, masked), expected, **RTOL)
    for name in ("grad", "hessian", "hessian_sqrt", "psd_hessian"):
        result, full = getattr(likelihood, name)(f, masked), getattr(Categorical(), name)(f, y)
        assert (result[~kept] == 0).all()
        assert torch.equal(result[kept], full[kept])


def test_an_ignored_position_within_the_range_of_classes_is_ignored():
    f, y = normal(3, 3), torch.tensor([0, 1, 2])
    likelihood = Categorical(ignore_index=0)
    likelihood.check(f, y)
    assert likelihood.log_prob(f, y)[0] == 0
    assert (likelihood.hessian(f, y)[0] == 0).all()


@pytest.mark.parametrize("confident", [0, 1, 2, 3])
def test_the_categorical_root_is_accurate_in_float32_for_confident_outputs(confident):
    f = normal(1, 4)
    f[0, confident] = 12.0
    truth = Categorical().fisher(f)
    root = Categorical().fisher_sqrt(f.float())
    torch.testing.assert_close((root @ root.mT).double(), truth, rtol=1e-3, atol=1e-9)


def test_many_classes_need_no_factorisation():
    f = normal(4, 512)
    root = Categorical().fisher_sqrt(f)
    torch.testing.assert_close(root @ root.mT, Categorical().fisher(f), **RTOL)


# -- likelihoods that are not convex


def test_the_heteroscedastic_substitute_is_the_fisher():
    f, y = normal(5, 4), normal(5, 2, seed=1)
    likelihood = HeteroscedasticGaussian()
    expected = torch.diag_embed(torch.cat([(-f[:, 2:]).exp(), torch.full((5, 2), 0.5, dtype=F64)], -1))
    torch.testing.assert_close(likelihood.psd_hessian(f, y), expected, **RTOL)
    assert torch.linalg.eigvalsh(likelihood.hessian(f, y)).min() < 0


def clamped(hessian):
    values, vectors = torch.linalg.eigh(hessian)
    return vectors @ torch.diag_embed(values.clamp_min(0)) @ vectors.mT


def test_the_mixture_hessian_is_not_its_fisher_and_not_psd():
    h, y = normal(20, 3), classes(2, 20)
    likelihood = BernoulliMixture()
    hessian, fisher = likelihood.hessian(h, y), likelihood.fisher(h)
    assert ((hessian - fisher).abs().amax((-2, -1)) > 0.01).all()
    assert torch.linalg.eigvalsh(hessian).min() < -0.01
    torch.testing.assert_close(likelihood.psd_hessian(h, y), clamped(hessian), **RTOL)


def test_the_mixture_hessian_averages_to_its_fisher():
    """E_y[H] = E_y[grad grad^T], although neither target has it."""
    h = normal(20, 3)
    likelihood = BernoulliMixture()
    average = sum(
        likelihood.log_prob(h, y).exp()[:, None, None] * likelihood.hessian(h, y)
        for y in (torch.zeros(20), torch.ones(20))
    )
    torch.testing.assert_close(average, likelihood.fisher(h), **RTOL)


def test_the_mixture_gradients_are_parallel_so_the_fisher_has_rank_one():
    h = normal(20, 3)
    likelihood = BernoulliMixture()
    zero, one = likelihood.grad(h, torch.zeros(20)), likelihood.grad(h, torch.ones(20))
    torch.testing.assert_close(torch.linalg.cross(zero, one), torch.zeros(20, 3, dtype=F64), **RTOL)
    assert likelihood.fisher_sqrt(h).shape == (20, 3, 1)


# -- from_function


def test_a_function_with_the_formula_of_a_likelihood_is_that_likelihood():
    f, y = normal(5, 4), classes(4, 5)
    likelihood, truth = from_function(lambda f, y: cross_entropy(f, y)), Categorical()
    likelihood.check(f, y)
    for name in ("log_prob", "grad", "hessian", "psd_hessian"):
        torch.testing.assert_close(getattr(likelihood, name)(f, y), getattr(truth, name)(f, y), **RTOL)
    root = likelihood.hessian_sqrt(f, y)
    torch.testing.assert_close(root @ root.mT, truth.hessian(f, y), **RTOL)


def coupled(f, y):
    """A loss that couples positions: squared error, and a rough non-convex penalty between neighbours."""
    return ((f - y) ** 2).sum() + (f[1:] * f[:-1]).sum().sin()


@pytest.mark.parametrize("shape", [(3, 4), (3, 2, 4), (2, 3, 2, 2)])
def test_a_function_may_couple_positions(shape):
    f, y = normal(*shape), normal(*shape, seed=1)
    likelihood = from_function(coupled)
    hessian, size = likelihood.hessian(f, y), math.prod(shape[1:])
    assert likelihood.grad(f, y).shape == f.shape
    assert hessian.shape == (shape[0], size, size)
    for n in range(shape[0]):
        torch.testing.assert_close(likelihood.log_prob(f, y)[n], -coupled(f[n], y[n]), **RTOL)
        torch.testing.assert_close(likelihood.grad(f, y)[n], torch.func.grad(coupled)(f[n], y[n]), **RTOL)
        expected = torch.autograd.functional.hessian(lambda f_n, y_n=y[n]: coupled(f_n, y_n), f[n])
        torch.testing.assert_close(hessian[n], expected.reshape(size, size), **RTOL)
    root = likelihood.hessian_sqrt(f, y)
    torch.testing.assert_close(root @ root.mT, clamped(hessian), **RTOL)
    torch.testing.assert_close(likelihood.psd_hessian(f, y), clamped(hessian), **RTOL)


def test_a_function_without_sampler_says_how_to_give_one():
    with pytest.raises(LikelihoodError, match=r"from_function\(nll, sample=\.\.\.\)"):
        from_function(coupled).sample(normal(2, 3))


def test_a_given_sampler_is_used_with_its_generator():
    likelihood = from_function(coupled, sample=lambda f, g: f + torch.randn(f.shape, generator=g))
    f = normal(2, 3).float()
    first, second = (likelihood.sample(f.half(), torch.Generator().manual_seed(0)) for _ in range(2))
    assert torch.equal(first, second)
    likelihood.check(f, first)
    with pytest.raises(LikelihoodError, match="first axis"):
        from_function(coupled, sample=lambda f, g: f[:1]).sample(f)


def test_a_function_has_no_fisher():
    for name in ("fisher", "fisher_sqrt"):
        with pytest.raises(LikelihoodError, match="psd_hessian"):
            getattr(from_function(coupled), name)(normal(2, 3))


@pytest.mark.parametrize(
    ("nll", "pattern"),
    [
        (lambda f, y: (f - y) ** 2, r"shape \(3,\).*a scalar"),
        (lambda f, y: 1.0, "a scalar"),
        (lambda f, y: f.sum() if f.sum() > 0 else -f.sum(), r"torch\.where"),
        (lambda f, y: f @ torch.ones(7, dtype=F64), "ONE data point"),
        (lambda f: f.sum(), "ONE data point"),
    ],
)
def test_a_function_that_cannot_be_vectorised_is_explained(nll, pattern):
    with pytest.raises(LikelihoodError, match=pattern):
        from_function(nll).log_prob(normal(2, 3), normal(2, 3))
    for name in ("grad", "hessian"):
        with pytest.raises(LikelihoodError, match="a scalar"):
            getattr(from_function(nll), name)(normal(2, 3), normal(2, 3))


def test_a_non_finite_hessian_names_its_data_point():
    f = normal(3, 2).abs()
    f[1] = 0.0
    for name in ("hessian_sqrt", "psd_hessian"):
        with pytest.raises(DataError, match="data point 1"):
            getattr(from_function(lambda f, y: f.sqrt().sum()), name)(f, f)


def test_a_function_on_half_precision_and_on_an_empty_batch():
    likelihood, f, y = from_function(lambda f, y: ((f - y) ** 2).sum()), normal(2, 3), normal(2, 3)
    for name in ("log_prob", "grad", "hessian", "hessian_sqrt"):
        assert getattr(likelihood, name)(f.half(), y.float()).dtype == torch.float32
        assert getattr(likelihood, name)(f[:0], y[:0]).shape[0] == 0
    torch.testing.assert_close(likelihood.hessian(f.half(), y.float()), 2 * torch.eye(3).expand(2, 3, 3))


def test_a_linear_function_has_no_curvature():
    assert (from_function(lambda f, y: (f * y).sum()).hessian(normal(2, 3), normal(2, 3)) == 0).all()


# -- the classes


def test_likelihoods_are_values_and_frozen(case):
    likelihood = case.build()
    assert isinstance(likelihood, Likelihood)
    with pytest.raises(dataclasses.FrozenInstanceError):
        likelihood.class_axis = 1


def test_equality_sees_every_field():
    assert Categorical() == Categorical()
    assert Categorical() != Categorical(ignore_index=0)
    assert Categorical() != Categorical(class_axis=1)
    assert Gaussian(1.0) != Gaussian(2.0)
    assert Gaussian(torch.ones(2)) != Gaussian(torch.ones(2) * 2)


@pytest.mark.parametrize("ambient", [torch.no_grad, torch.inference_mode])
def test_results_do_not_depend_on_the_ambient_grad_mode(case, ambient):
    f, y = normal(3, case.n_outputs), case.targets(torch.Size([3]), torch.Generator().manual_seed(0))
    methods = ("log_prob", "grad", "hessian", "psd_hessian")
    expected = [getattr(case.build(), name)(f, y) for name in methods]
    with ambient():
        results = [getattr(case.build(), name)(f.clone(), y) for name in methods]
    assert all(torch.equal(result, truth) for result, truth in zip(results, expected, strict=True))
