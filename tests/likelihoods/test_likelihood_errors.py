"""Targets that do not fit are refused, with what was found, what was expected, and the remedy."""

import math

import pytest
import torch

from lapwing.errors import DataError, LapwingError, LikelihoodError
from lapwing.likelihoods import (
    Bernoulli,
    BernoulliMixture,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Poisson,
    from_function,
)

NAN, INF = math.nan, math.inf
custom = from_function(lambda f, y: ((f - y) ** 2).sum())


def zeros(*shape):
    return torch.zeros(shape)


SHAPE = [
    (Gaussian(), zeros(4, 1), zeros(4), r"\(4,\).*\(4, 1\).*y\.unsqueeze\(1\)"),
    (Gaussian(), zeros(4, 2), zeros(4, 1), r"\(4, 1\).*\(4, 2\).*shape of the outputs"),
    (Gaussian(), zeros(4, 1, 2, 2), zeros(4, 2, 2), r"y\.unsqueeze\(1\)"),
    (Gaussian(), zeros(4, 2), zeros(3, 2), r"\(3, 2\)"),
    (Bernoulli(), zeros(4, 1), zeros(4), r"y\.unsqueeze\(1\)"),
    (Poisson(), zeros(4, 1), zeros(4), r"y\.unsqueeze\(1\)"),
    (Categorical(), zeros(4, 3), zeros(4, 1).long(), r"expected \(4,\).*y\.squeeze\(1\)"),
    (Categorical(), zeros(4, 3), zeros(4, 3), r"one-hot targets, y\.argmax\(1\)"),
    (Categorical(), zeros(2, 3, 5, 5), zeros(2, 5).long(), r"expected \(2, 5, 5\)"),
    (Categorical(), zeros(2, 3, 5), zeros(2, 5).long(), "class_axis"),
    (HeteroscedasticGaussian(), zeros(4, 2), zeros(4), r"y\.unsqueeze\(1\)"),
    (HeteroscedasticGaussian(), zeros(4, 4), zeros(4, 4), r"expected \(4, 2\)"),
    (BernoulliMixture(), zeros(4, 3), zeros(4, 1), r"y\.squeeze\(1\)"),
    (custom, zeros(4, 3), zeros(3, 3), "4 targets along the first axis"),
    (custom, zeros(4, 3), torch.tensor(1.0), "4 targets along the first axis"),
]

DTYPE = [
    (Categorical(), zeros(4, 3), zeros(4), r"torch\.float32.*y\.long\(\)"),
    (Categorical(), zeros(4, 3), zeros(4).int(), r"torch\.int32.*y\.long\(\)"),
    (Gaussian(), zeros(4, 1), zeros(4, 1).bool(), r"torch\.bool.*real numbers"),
    (Gaussian(), zeros(4, 1), zeros(4, 1).to(torch.complex64), r"torch\.complex64"),
    (Bernoulli(), zeros(4, 1), zeros(4, 1).to(torch.complex64), r"torch\.complex64"),
    (Poisson(), zeros(4, 1), zeros(4, 1).bool(), r"torch\.bool"),
    (HeteroscedasticGaussian(), zeros(4, 2), zeros(4, 1).bool(), r"torch\.bool"),
    (BernoulliMixture(), zeros(4, 3), zeros(4).to(torch.complex64), r"torch\.complex64"),
]

VALUES = [
    (Categorical(), zeros(3, 4), torch.tensor([0, 3, 4]), r"target 4 at index \[2\].*from 0 to 3.*ignore_index"),
    (Categorical(), zeros(3, 4), torch.tensor([0, -1, -100]), r"target -1 at index \[1\] \(2 such values\)"),
    (Categorical(ignore_index=-1), zeros(3, 4), torch.tensor([0, -1, -100]), r"-100 at index \[2\] \(1 such"),
    (Bernoulli(), zeros(2, 1), torch.tensor([[1], [-1]]), r"target -1 .*\(y \+ 1\) / 2"),
    (Bernoulli(), zeros(2, 1), torch.tensor([[1.0], [1.5]]), r"target 1\.5 at index \[1, 0\]"),
    (Poisson(), zeros(2, 1), torch.tensor([[1], [-1]]), "counts"),
    (Poisson(), zeros(2, 1), torch.tensor([[1.0], [-1.0]]), "counts"),
    (Poisson(), zeros(2, 1), torch.tensor([[1.0], [0.5]]), r"target 0\.5.*use Gaussian"),
    (BernoulliMixture(), zeros(2, 3), torch.tensor([0, 2]), "0 or 1"),
    (BernoulliMixture(), zeros(2, 3), torch.tensor([0.0, 0.5]), "0 or 1"),
]

NON_FINITE = [
    (Gaussian(), zeros(3, 1), [3, 1]),
    (Bernoulli(), zeros(3, 1), [3, 1]),
    (Poisson(), zeros(3, 1), [3, 1]),
    (HeteroscedasticGaussian(), zeros(3, 2), [3, 1]),
    (BernoulliMixture(), zeros(3, 3), [3]),
    (custom, zeros(3, 2), [3, 2]),
]

OUTPUTS = [
    (Gaussian(), zeros(4), r"\(4,\).*f\.unsqueeze\(-1\)"),
    (Categorical(), zeros(4), r"f\.unsqueeze\(-1\)"),
    (custom, zeros(4), r"f\.unsqueeze\(-1\)"),
    (Gaussian(class_axis=2), zeros(4, 2), r"class_axis=2.*from 1 to 1"),
    (Gaussian(class_axis=-2), zeros(4, 2), r"class_axis=-2"),
    (Categorical(), zeros(4, 1), "two classes.*Bernoulli"),
    (HeteroscedasticGaussian(), zeros(4, 3), "even number"),
    (HeteroscedasticGaussian(), zeros(4, 0), "even number"),
    (BernoulliMixture(), zeros(4, 2), "three"),
    (Gaussian(torch.ones(3)), zeros(4, 2), "3 entries for 2 outputs"),
]


@pytest.mark.parametrize(("likelihood", "f", "y", "pattern"), SHAPE + DTYPE)
def test_shape_and_dtype_are_refused_by_every_method_that_takes_targets(likelihood, f, y, pattern):
    for name in ("check", "log_prob", "grad", "hessian", "hessian_sqrt", "psd_hessian"):
        with pytest.raises(LikelihoodError, match=pattern) as caught:
            getattr(likelihood, name)(f, y)
        assert all(word in str(caught.value) for word in ("found ", "; expected ", "; remedy: "))


@pytest.mark.parametrize(("likelihood", "f", "y", "pattern"), VALUES)
def test_values_outside_the_support_are_refused_by_check(likelihood, f, y, pattern):
    with pytest.raises(LikelihoodError, match=pattern) as caught:
        likelihood.check(f, y)
    assert all(word in str(caught.value) for word in ("found ", "; expected ", "; remedy: "))


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize(("likelihood", "f", "shape"), NON_FINITE)
def test_non_finite_targets_are_a_data_error_that_names_the_data_point(likelihood, f, shape, value):
    y = torch.zeros(shape)
    likelihood.check(f, y)
    y[2] = value
    with pytest.raises(DataError, match=r"index \[2.*finite targets.*data point 2"):
        likelihood.check(f, y)


@pytest.mark.parametrize(("likelihood", "f", "pattern"), OUTPUTS)
def test_outputs_that_do_not_fit_are_refused(likelihood, f, pattern):
    for name in ("fisher_sqrt", "sample"):
        if likelihood is custom:
            continue  # it offers neither
        with pytest.raises(LikelihoodError, match=pattern):
            getattr(likelihood, name)(f)
    with pytest.raises(LikelihoodError, match=pattern):
        likelihood.hessian(f, f)


def test_outputs_must_be_floating_point():
    with pytest.raises(LikelihoodError, match=r"dtype torch\.int64.*floating-point"):
        Bernoulli().check(zeros(2, 1).long(), zeros(2, 1))


@pytest.mark.parametrize("likelihood", [Gaussian(), custom])
def test_targets_on_another_device_are_refused(likelihood):
    with pytest.raises(LikelihoodError, match=r"meta.*cpu.*y\.to\('cpu'\)"):
        likelihood.check(zeros(2, 1), torch.zeros(2, 1, device="meta"))


@pytest.mark.parametrize("sigma", [0.0, -1.0, NAN, INF, torch.tensor([1.0, 0.0]), torch.tensor([NAN])])
def test_sigma_must_be_positive(sigma):
    with pytest.raises(LikelihoodError, match="above zero"):
        Gaussian(sigma)


@pytest.mark.parametrize("sigma", [torch.ones(2, 2), torch.ones(0)])
def test_sigma_must_be_a_number_or_one_per_output(sigma):
    with pytest.raises(LikelihoodError, match="shape"):
        Gaussian(sigma)


def test_the_class_axis_is_not_the_batch_axis():
    with pytest.raises(LikelihoodError, match="class_axis=0"):
        Categorical(class_axis=0)


@pytest.mark.parametrize("log_rate", [100.0, NAN, 60.0])
def test_a_rate_that_overflows_is_not_sampled(log_rate):
    with pytest.raises(LikelihoodError, match="log-rates"):
        Poisson().sample(torch.full((1, 1), log_rate))


@pytest.mark.parametrize("value", [NAN, INF])
def test_no_class_is_drawn_of_outputs_that_are_not_finite(value):
    with pytest.raises(DataError, match="NaN or infinite"):
        Categorical().sample(torch.tensor([[0.0, 1.0], [value, 0.0]]))


def test_errors_are_value_errors_of_the_library():
    with pytest.raises(ValueError) as caught:
        Gaussian(-1.0)
    assert isinstance(caught.value, LapwingError)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float64])
def test_zeros_and_ones_of_any_dtype_are_binary_targets(dtype):
    y = torch.tensor([[0], [1]]).to(dtype)
    f = torch.tensor([[0.3], [-0.2]])
    Bernoulli().check(f, y)
    BernoulliMixture().check(f.expand(2, 3), y[:, 0])
    torch.testing.assert_close(Bernoulli().log_prob(f, y), Bernoulli().log_prob(f, y.float()))
    log_prob = BernoulliMixture().log_prob(f.expand(2, 3), y[:, 0])
    torch.testing.assert_close(log_prob, BernoulliMixture().log_prob(f.expand(2, 3), y[:, 0].float()))


def test_a_valid_target_passes(problem):
    problem.likelihood.check(problem.f, problem.y)


@pytest.mark.parametrize("of", ["hessian_sqrt", "psd_hessian"])
def test_one_second_derivative_that_is_not_finite_names_its_data_point(of):
    """f_0^2 + sqrt(f_1): the Hessian is diag(2, -f_1^(-3/2) / 4), infinite in one entry at f_1 = 0."""
    likelihood = from_function(lambda f, y: f[0] ** 2 + f[1].sqrt() + 0 * y.sum())
    f = torch.tensor([[1.0, 1.0], [1.0, 4.0], [1.0, 0.0]])
    assert likelihood.hessian(f, zeros(3, 1))[2].isfinite().any()
    getattr(likelihood, of)(f[:2], zeros(2, 1))
    with pytest.raises(DataError, match="data point 2 of the batch"):
        getattr(likelihood, of)(f, zeros(3, 1))


@pytest.mark.parametrize("shape", [(4, 3), (2, 5, 3), (2, 3, 4, 5)], ids=["vector", "sequence", "image"])
def test_probabilities_in_place_of_logits_are_refused_wherever_the_classes_are(shape: tuple[int, ...]) -> None:
    f = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    likelihood = Categorical()
    with pytest.raises(DataError, match=r"outputs are probabilities.*expected logits"):
        likelihood.refuse_probabilities(likelihood.predicted(f))
    likelihood.refuse_probabilities(f)
    likelihood.refuse_probabilities(torch.rand(shape, dtype=torch.float64))
    wrong = 1 if len(shape) == 3 else -1
    if len(shape) > 2:  # sums to one along an axis that has no classes
        likelihood.refuse_probabilities(f.softmax(wrong))
