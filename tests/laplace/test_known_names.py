"""What users of laplace-torch reach for beside fit and predictions: the prior before a fit, features, small names."""

from __future__ import annotations

from enum import Enum

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

import oracle
from lapwing import Laplace, curvature, subnetwork, utils
from lapwing.errors import LapwingError, NotFittedError
from lapwing.laplace import KronLaplace, LLLaplace, SubnetLaplace
from lapwing.laplace.factory import CLASSES
from lapwing.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Poisson
from lapwing.linalg import Curvature, Precision
from lapwing.utils import FeatureExtractor
from unchanged import unchanged

STRUCTURES = [structure for subset, structure in CLASSES if subset == "all"]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def data() -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(10, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return [(x, torch.sin(x[:, :2]))]


# -- before a fit the posterior is the prior -------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
def test_before_a_fit_the_posterior_is_the_prior(structure: str) -> None:
    precision = torch.tensor([2.0, 1.0, 4.0, 0.5], dtype=torch.float64)
    la = Laplace(network(), "regression", "all", structure, prior_precision=precision, prior_mean=0.3)
    sizes = torch.tensor([p.numel() for p in la.model.parameters()])
    each = precision.repeat_interleave(sizes)
    mean = torch.full_like(each, 0.3)
    theta = torch.randn(26, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(la.mean, mean)
    torch.testing.assert_close(
        la.log_prob(theta), MultivariateNormal(mean, precision_matrix=each.diag()).log_prob(theta)
    )
    torch.testing.assert_close(la.square_norm(theta), (each * (theta - mean).square()).sum())
    torch.testing.assert_close(la.posterior_variance, 1 / each)
    torch.testing.assert_close(la.posterior_covariance, (1 / each).diag())
    curvature_before = la.H if isinstance(la.H, Tensor) else la.H.dense()
    assert not bool(curvature_before.any())
    draws = la.sample(4000, generator=torch.Generator().manual_seed(2))
    assert bool(((draws.mean(0) - mean).abs() < 4.5 / (4000 * each).sqrt()).all())
    torch.testing.assert_close(draws.var(0), 1 / each, rtol=0.15, atol=0)
    with pytest.raises(NotFittedError):
        la(data()[0][0])
    la.fit(data())
    assert not torch.equal(la.mean, mean)


def test_before_a_fit_a_sub_network_is_its_prior_and_the_rest_as_trained() -> None:
    model = network()
    la = Laplace(model, "regression", "subnetwork", "full", subnetwork_indices=torch.tensor([1, 20]), prior_mean=5.0)
    assert isinstance(la, SubnetLaplace)
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    expected[[1, 20]] = 5.0
    torch.testing.assert_close(la.mean, expected)
    assert la.sample(3).shape == (3, 26)
    assert la.H.shape == (2, 2)


def test_a_last_layer_that_is_still_to_be_found_has_no_prior_yet() -> None:
    la = Laplace(network(), "regression", "last_layer", "full")
    with pytest.raises(NotFittedError, match="last layer"):
        _ = la.mean
    named = Laplace(network(), "regression", "last_layer", "full", last_layer_name="2")
    assert named.mean.shape == (10,)


# -- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["kron", "ekfac", "blocks", "lowrank", "gp"])
def test_a_precision_as_a_matrix(structure: str) -> None:
    la = Laplace(network(), "regression", "all", structure, prior_precision=0.7)
    la.fit(data())
    assert isinstance(la.H, Curvature)
    assert isinstance(la.posterior_precision, Precision)
    expected = la.H.to_matrix() + 0.7 * torch.eye(26, dtype=torch.float64)
    torch.testing.assert_close(la.posterior_precision.to_matrix(), expected)
    torch.testing.assert_close(la.posterior_precision.to_matrix(-1), torch.linalg.inv(expected))
    root = la.posterior_precision.to_matrix(0.5)
    torch.testing.assert_close(root @ root, expected)
    copy = la.posterior_precision.clone()
    assert type(copy) is type(la.posterior_precision)
    torch.testing.assert_close(copy.to_matrix(), expected)
    torch.testing.assert_close(la.H.clone().dense(), la.H.dense())


def test_a_clone_shares_no_memory() -> None:
    la = Laplace(network(), "regression", "all", "diag")
    la.fit(data())
    kept = la.fitted.curvature.clone()
    la.fitted.curvature.diagonal().zero_()
    assert float(kept.diagonal().sum()) > 0


def test_kronecker_factors_and_device() -> None:
    la = Laplace(network(), "regression", "all", "kron")
    assert isinstance(la, KronLaplace)
    assert la.H_facs is None
    la.fit(data())
    assert la.H_facs is la.H
    assert la._device == torch.device("cpu")
    assert la._dtype == torch.float64


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
@pytest.mark.parametrize("task", ["regression", "classification"])
def test_variances_of_a_last_layer_without_covariances(structure: str, task: str) -> None:
    la = Laplace(network(), task, "last_layer", structure)
    x, y = data()[0]
    la.fit([(x, y if task == "regression" else torch.arange(10) % 2)])
    assert isinstance(la, LLLaplace)
    mean, variance = la.functional_variance_fast(x)
    torch.testing.assert_close(mean, la.model(x).detach())
    rows = la.linearise(x).rows()
    torch.testing.assert_close(variance, la.functional_variance(rows).diagonal(dim1=1, dim2=2))


def test_a_noise_level_is_a_number() -> None:
    for wrong in (torch.ones(1, 1), torch.ones(2)):
        with pytest.raises(ValueError, match=r"sigma_noise has shape .*expected one number"):
            Laplace(network(), "regression", "all", "full", sigma_noise=wrong)
    assert float(Laplace(network(), "regression", "all", "full", sigma_noise=torch.ones(1)).sigma_noise) == 1


@pytest.mark.parametrize("kind", [KeyError, ValueError, LapwingError])
def test_a_missing_key_of_a_batch_is_a_key_error_too(kind: type[Exception]) -> None:
    la = Laplace(network(), "regression", "all", "full")
    with pytest.raises(kind, match=r"^a batch has the entries \['input_ids'\]; expected the targets under 'labels'"):
        la.fit([{"input_ids": data()[0][0]}])


@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_a_kronecker_hessian_names_what_works(subset: str) -> None:
    with pytest.raises(ValueError, match=r"expected hessian_structure='full', 'diag'.*GGN"):
        Laplace(network(), "regression", subset, "kron", backend=curvature.CurvlinopsHessian)
    la = Laplace(network(), "regression", subset, "full", backend=curvature.CurvlinopsHessian)
    la.fit(data())


# -- features --------------------------------------------------------------------------------------------------------


def test_features_are_the_input_of_the_last_layer() -> None:
    model, (x, _) = network(), data()[0]
    extractor = FeatureExtractor(model)
    assert extractor.last_layer is None
    with unchanged(model):
        output, features = extractor.forward_with_features(x)
    assert extractor.last_layer is model[2]
    torch.testing.assert_close(output, model(x))
    torch.testing.assert_close(features, model[:2](x).detach())
    assert not features.requires_grad
    torch.testing.assert_close(extractor(x), model(x))
    assert list(extractor.state_dict()) == [f"model.{name}" for name in model.state_dict()]
    moving = FeatureExtractor(model, "2", enable_backprop=True)
    assert moving.forward_with_features(x.clone().requires_grad_())[1].requires_grad


@pytest.mark.parametrize("reduction", ["pick_first", "pick_last", "average"])
def test_features_of_positions(reduction: str) -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(3, 5), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            out = self.head(torch.tanh(self.body(x)))
            return {"pick_first": out[:, 0], "pick_last": out[:, -1], "average": out.mean(1)}[reduction]

    model, x = Pooled(), torch.randn(4, 6, 3)
    output, features = FeatureExtractor(model, feature_reduction=reduction).forward_with_features(x)
    assert features.shape == (4, 5)
    torch.testing.assert_close(model.head(features), output)


def test_features_that_are_not_there() -> None:
    with pytest.raises(ValueError, match="unknown reduction 'sum'"):
        FeatureExtractor(network(), feature_reduction="sum")
    with pytest.raises(ValueError, match="no module 'head'"):
        FeatureExtractor(network(), "head")


# -- names of backends, and their options ----------------------------------------------------------------------------


def classified() -> tuple[nn.Sequential, Tensor, Tensor]:
    return network(), data()[0][0], torch.arange(10) % 2


BACKENDS = {
    "ggn": ["AsdlGGN", "AsdlInterface", "BackPackGGN", "BackPackInterface", "CurvatureInterface", "CurvlinopsGGN",
            "CurvlinopsInterface", "GGNInterface"],
    "empirical": ["AsdlEF", "BackPackEF", "CurvlinopsEF", "EFInterface"],
    "hessian": ["AsdlHessian", "CurvlinopsHessian"],
}  # fmt: skip


def test_no_backend_is_left_out() -> None:
    assert sorted(curvature.__all__) == sorted(name for names in BACKENDS.values() for name in names)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in BACKENDS.items() for name in names])
def test_a_backend_gives_the_curvature_of_its_name(kind: str, name: str) -> None:
    """G, the sum of squared gradients, or second derivatives, each by plain backward passes."""
    model, x, y = classified()
    la = Laplace(model, "classification", "all", "full", backend=getattr(curvature, name))
    la.fit([(x, y)])
    expected = {"ggn": oracle.ggn, "empirical": oracle.empirical, "hessian": oracle.hessian}[kind]
    torch.testing.assert_close(la.H, expected(model, Categorical(), x, y), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("words", [("stochastic", "mc_samples"), ("stochastic", "num_samples"), ("mc", "mc_samples")])
def test_the_sampled_fisher_takes_as_many_draws_as_it_is_told(words: tuple[str, str]) -> None:
    """A draw of the target of one data point adds a matrix of rank one, if the class is another: 1, 2 and 4 at most."""
    torch.manual_seed(0)
    model = nn.Linear(3, 5).double()
    x, y = data()[0][0][:1], torch.tensor([2])
    for draws, rank in ((1, 1), (2, 2), (20, 4)):
        options = {words[1]: draws, **({"stochastic": True} if words[0] == "stochastic" else {})}
        estimator = None if words[0] == "stochastic" else "mc"
        la = Laplace(model, "classification", "all", "full", estimator=estimator, backend_kwargs=options)
        found = set()
        for seed in range(8):
            la.fit([(x, y)], generator=torch.Generator().manual_seed(seed))
            found.add(torch.linalg.matrix_rank(la.H, rtol=1e-9).item())
        assert max(found) == rank


ENUMS = [each for each in vars(utils).values() if isinstance(each, type) and issubclass(each, Enum)]


def test_members_of_enums_are_called_as_their_values_and_masks_are_those_of_subnetwork() -> None:
    assert len(ENUMS) == 8
    for each in ENUMS:
        assert [member.value for member in each] == [name.lower() for name in each.__members__]
    masks = [name for name in vars(utils) if name.endswith("Mask")]
    assert len(masks) == 8
    assert all(getattr(utils, name) is getattr(subnetwork, name) for name in masks)


@pytest.mark.parametrize("task", [each for each in utils.Likelihood if each != utils.Likelihood.REWARD_MODELING])
def test_a_task_by_its_name_or_member_has_its_own_likelihood(task: utils.Likelihood) -> None:
    likelihood, y = {
        "regression": (Gaussian(), torch.sin(data()[0][0][:, :2])),
        "classification": (Categorical(), torch.arange(10) % 2),
        "binary": (Bernoulli(), (data()[0][0][:, :2] > 0).double()),
        "poisson": (Poisson(), torch.arange(20.0).reshape(10, 2).double()),
        "heteroscedastic": (HeteroscedasticGaussian(), torch.sin(data()[0][0][:, :1])),
    }[task.value]
    x = data()[0][0]
    for given in (task, task.value, likelihood):
        la = Laplace(network(), given, utils.SubsetOfWeights.ALL, utils.HessianStructure.FULL)
        la.fit([(x, y)])
        expected = oracle.ggn(la.model, likelihood, x, y)
        torch.testing.assert_close(la.H, expected, rtol=1e-8, atol=1e-10)
        fit = likelihood.log_prob(la.model(x), y).sum().detach()
        torch.testing.assert_close(la.log_likelihood, fit)


def test_members_are_taken_wherever_names_are() -> None:
    la = Laplace(network(), "classification", "all", "full")
    x, y = data()[0][0], torch.arange(10) % 2
    la.fit([(x, y)])
    for link in (utils.LinkApprox.PROBIT, utils.LinkApprox.BRIDGE_NORM):
        torch.testing.assert_close(la(x, utils.PredType.GLM, link_approx=link), la(x, link_approx=link.value))
    grid = {"val_loader": [(x, y)], "grid_size": 3, "link_approx": utils.LinkApprox.PROBIT_FULL}
    la.optimize_prior_precision(utils.PredType.GLM, utils.TuningMethod.GRIDSEARCH, **grid)
    assert len(la.prior_precision) == 1
    by = {"prior_structure": utils.PriorStructure.MODULE, "n_steps": 2}
    la.optimize_prior_precision(method=utils.TuningMethod.ADAM, **by)
    assert len(la.prior_precision) == 2


@pytest.mark.parametrize("structure", ["full", "kron", "gp"])
def test_a_noise_level_of_the_likelihood_is_that_of_the_posterior(structure: str) -> None:
    (x, y) = data()[0]
    objects = (Gaussian(0.4), {}), ("regression", {"sigma_noise": 0.4}), (Gaussian(0.4), {"sigma_noise": 0.4})
    found = []
    for likelihood, options in objects:
        la = Laplace(network(), likelihood, "all", structure, **options)
        la.fit([(x, y)])
        la.optimize_prior_precision(method="adam", n_steps=2)
        found.append((la(x), la.log_marginal_likelihood(), la.sigma_noise))
        assert la.sigma_noise.item() == pytest.approx(0.4)
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


def test_the_extractor_finds_its_last_layer_and_gives_the_output_there() -> None:
    model = network()
    x = torch.randn(4, next(model.parameters()).shape[1], dtype=next(model.parameters()).dtype)
    *_, last = (each for each in model.modules() if isinstance(each, nn.Linear))
    for way in ("find_last_layer", "__call__"):
        extractor = FeatureExtractor(model)
        assert extractor.last_layer is None
        torch.testing.assert_close(getattr(extractor, way)(x), model(x))
        assert extractor.last_layer is last
