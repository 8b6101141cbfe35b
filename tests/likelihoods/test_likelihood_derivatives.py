"""Every closed form against automatic differentiation of `log_prob`, and `log_prob` against torch.distributions."""

import pytest
import torch

from lapwing.errors import LikelihoodError
from lapwing.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
    from_function,
)

RTOL = {"rtol": 1e-9, "atol": 1e-12}


def test_log_prob_agrees_with_torch_distributions(problem):
    expected = problem.case.reference(problem.f_last, problem.y_last)
    expected = expected.reshape(expected.shape[0], -1).sum(1)
    log_prob = problem.likelihood.log_prob(problem.f, problem.y)
    assert log_prob.shape == problem.f.shape[:1]
    torch.testing.assert_close(log_prob, expected, **RTOL)


def test_grad_is_the_derivative_of_the_negative_log_likelihood(problem):
    expected = torch.func.grad(lambda f: -problem.likelihood.log_prob(f, problem.y).sum())(problem.f)
    grad = problem.likelihood.grad(problem.f, problem.y)
    assert grad.shape == problem.f.shape
    torch.testing.assert_close(grad, expected, **RTOL)


def test_the_total_loss_and_its_derivative_are_those_of_log_prob(problem):
    f = problem.f.clone().requires_grad_()
    loss = problem.likelihood.total_loss(f, problem.y)
    torch.testing.assert_close(loss, -problem.likelihood.log_prob(f, problem.y).sum(), **RTOL)
    (slope,) = torch.autograd.grad(loss, f)
    torch.testing.assert_close(slope, problem.likelihood.grad(problem.f, problem.y), **RTOL)


def test_the_class_that_torch_ignores_by_default_is_no_class_here():
    with pytest.raises(IndexError, match="-100"):
        Categorical().total_loss(torch.zeros(2, 3), torch.tensor([0, -100]))


def test_hessian_is_the_second_derivative_and_positions_are_independent(problem):
    blocks = problem.likelihood.hessian(problem.f, problem.y)
    n_outputs = problem.case.n_outputs
    assert blocks.shape == (*problem.f_last.shape, n_outputs)
    for n in range(problem.f.shape[0]):
        expected = torch.func.jacrev(torch.func.grad(problem.nll(n)))(problem.flat(n))
        assembled = torch.block_diag(*blocks[n].reshape(-1, n_outputs, n_outputs))
        torch.testing.assert_close(assembled, expected, **RTOL)


def test_hessian_sqrt_squares_to_the_psd_hessian(problem):
    root = problem.likelihood.hessian_sqrt(problem.f, problem.y)
    psd = problem.likelihood.psd_hessian(problem.f, problem.y)
    assert root.shape[:-1] == problem.f_last.shape
    torch.testing.assert_close(root @ root.mT, psd, **RTOL)
    assert torch.linalg.eigvalsh(psd).min() > -1e-12


def test_hessian_mv_is_the_product_with_the_psd_hessian(problem):
    v = torch.randn(problem.f.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    psd = problem.likelihood.psd_hessian(problem.f, problem.y)
    expected = (psd @ v.movedim(problem.axis, -1).unsqueeze(-1)).squeeze(-1).movedim(-1, problem.axis)
    product = problem.likelihood.hessian_mv(problem.f, problem.y, v)
    assert product.shape == problem.f.shape
    torch.testing.assert_close(product, expected, **RTOL)


def test_hessian_diagonal_is_that_of_the_psd_hessian(problem):
    found = problem.likelihood.hessian_diagonal(problem.f, problem.y)
    assert found.shape == problem.f.shape
    expected = problem.likelihood.psd_hessian(problem.f, problem.y).diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(found, expected.movedim(-1, problem.axis), **RTOL)
    if problem.likelihood.convex:  # then it is the Hessian, positions without a target included
        for n in range(problem.f.shape[0]):
            second = torch.func.jacrev(torch.func.grad(problem.nll(n)))(problem.flat(n)).diagonal()
            torch.testing.assert_close(found[n].movedim(problem.axis - 1, -1).reshape(-1), second, **RTOL)


@pytest.mark.parametrize(
    "likelihood", [Bernoulli(), Gaussian(0.5), Poisson(), Categorical(), HeteroscedasticGaussian()]
)
def test_hessian_mv_of_many_outputs_forms_no_matrix(likelihood):
    f = torch.zeros(2, 200_000)  # [2, C, C] would be 320 GB
    y = {Categorical: torch.zeros(2).long(), HeteroscedasticGaussian: f[:, ::2]}.get(type(likelihood), f)
    assert likelihood.hessian_mv(f, y, torch.ones_like(f)).shape == f.shape


def test_hessian_mv_of_a_function_keeps_the_layout():
    likelihood = from_function(lambda f, y: ((f - y) ** 2).sum() + f.prod())
    f = torch.tensor([[[1.0], [2.0]]], dtype=torch.float64)
    product = likelihood.hessian_mv(f, torch.zeros_like(f), torch.tensor([[[1.0], [3.0]]], dtype=torch.float64))
    torch.testing.assert_close(product, torch.tensor([[[5.0], [7.0]]], dtype=torch.float64), **RTOL)  # [[2, 1], [1, 2]]


@pytest.mark.parametrize("likelihood", [Bernoulli(), from_function(lambda f, y: ((f - y) ** 2).sum())])
def test_hessian_mv_refuses_another_shape(likelihood):
    f = torch.zeros(4, 3)
    with pytest.raises(LikelihoodError, match=r"shape \(3,\).*shape of the outputs"):
        likelihood.hessian_mv(f, f, torch.zeros(3))


def test_the_psd_hessian_is_the_hessian_where_convex(problem):
    if not problem.likelihood.convex:
        pytest.skip("the substitute has its own test")
    psd = problem.likelihood.psd_hessian(problem.f, problem.y)
    torch.testing.assert_close(psd, problem.likelihood.hessian(problem.f, problem.y), rtol=0, atol=0)


def test_fisher_sqrt_squares_to_the_fisher(problem):
    root = problem.likelihood.fisher_sqrt(problem.f)
    fisher = problem.likelihood.fisher(problem.f)
    assert fisher.shape == (*problem.f_last.shape, problem.case.n_outputs)
    assert root.shape[:-1] == problem.f_last.shape
    torch.testing.assert_close(root @ root.mT, fisher, **RTOL)


def integrate(problem):
    """Gradients [K, B, C] and weights [K, B] over targets that integrate the expectation over y exactly."""
    f = problem.f
    y, weights = problem.case.nodes(f)
    many_f = f.expand(y.shape[0], *f.shape).reshape(-1, f.shape[-1])
    many_y = y.reshape(-1, *y.shape[2:])
    if weights is None:
        weights = problem.likelihood.log_prob(many_f, many_y).exp().reshape(y.shape[:2])
    return problem.likelihood.grad(many_f, many_y).reshape(y.shape[0], *f.shape), weights


def test_fisher_is_the_expected_outer_product_of_gradients(vector_problem):
    grad, weights = integrate(vector_problem)
    expected = torch.einsum("kb,kbi,kbj->bij", weights, grad, grad)
    torch.testing.assert_close(vector_problem.likelihood.fisher(vector_problem.f), expected, **RTOL)


def test_the_expected_gradient_is_zero(vector_problem):
    grad, weights = integrate(vector_problem)
    mean = torch.einsum("kb,kbi->bi", weights, grad)
    torch.testing.assert_close(mean, torch.zeros_like(mean), rtol=0, atol=1e-12)


def test_probabilities_of_discrete_targets_sum_to_one(vector_problem):
    if vector_problem.case.nodes(vector_problem.f)[1] is not None:
        pytest.skip("continuous targets are integrated in their own test")
    _, weights = integrate(vector_problem)
    torch.testing.assert_close(weights.sum(0), torch.ones_like(weights[0]), **RTOL)


def test_fisher_is_the_hessian_in_natural_parameters(problem):
    if not problem.case.natural or "ignore" in problem.case.name:
        pytest.skip("not natural parameters, or masked positions")
    hessian = problem.likelihood.hessian(problem.f, problem.y)
    torch.testing.assert_close(problem.likelihood.fisher(problem.f), hessian, rtol=0, atol=0)


def test_square_roots_are_differentiable_in_the_outputs(vector_problem):
    """d(S S^T)/df from the analytic root is that of the Fisher itself."""
    likelihood, f = vector_problem.likelihood, vector_problem.f

    def squared(f):
        root = likelihood.fisher_sqrt(f)
        return root @ root.mT

    expected = torch.func.jacrev(likelihood.fisher)(f)
    torch.testing.assert_close(torch.func.jacrev(squared)(f), expected, **RTOL)


def test_methods_compose_with_vmap(vector_problem):
    likelihood, f, y = vector_problem.likelihood, vector_problem.f, vector_problem.y
    for method in (likelihood.log_prob, likelihood.grad, likelihood.hessian, likelihood.hessian_sqrt):
        mapped = torch.func.vmap(lambda f_n, y_n, method=method: method(f_n[None], y_n[None])[0])(f, y)
        expected = method(f, y)
        if method == likelihood.hessian_sqrt:  # roots are unique up to rotation
            mapped, expected = mapped @ mapped.mT, expected @ expected.mT
        torch.testing.assert_close(mapped, expected, **RTOL)


def test_an_empty_batch_gives_empty_results(problem):
    likelihood, f, y = problem.likelihood, problem.f[:0], problem.y[:0]
    likelihood.check(f, y)
    assert likelihood.log_prob(f, y).shape == (0,)
    assert likelihood.grad(f, y).shape == f.shape
    for result in (likelihood.hessian(f, y), likelihood.hessian_sqrt(f, y), likelihood.fisher(f)):
        assert result.shape[:-1] == problem.f_last[:0].shape
    assert likelihood.sample(f).shape == y.shape


def test_hessian_diagonal_is_that_of_the_psd_hessian_also_where_none_is_written(problem):
    expected = problem.likelihood.psd_hessian(problem.f, problem.y).diagonal(dim1=-2, dim2=-1)
    for found in (
        problem.likelihood.hessian_diagonal(problem.f, problem.y),
        Likelihood.hessian_diagonal(problem.likelihood, problem.f, problem.y),
    ):
        assert found.shape == problem.f.shape
        torch.testing.assert_close(problem.likelihood.to_last(found), expected, **RTOL)
