"""Linearised and sampled predictions: shapes, closed forms, randomness that arrives, and a model left as it was."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from lapwing import estimate
from lapwing.errors import LikelihoodError, ModelError, OptionError
from lapwing.likelihoods import Categorical
from lapwing.likelihoods import Gaussian as GaussianLikelihood
from lapwing.linalg import Diagonal, Precision
from lapwing.params import ParamSpace
from lapwing.posterior import Gaussian
from lapwing.predictive import draws, moments, network_draws, probabilities, probit, variances
from lapwing.predictive.sampled import _follows
from lapwing.tangent import Tangent
from unchanged import unchanged


@pytest.fixture
def classifier() -> tuple[Tangent, Gaussian, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double().eval()
    x, y = torch.randn(30, 3, dtype=torch.float64), torch.randint(4, (30,))
    tangent = Tangent(model)
    curvature = estimate.kflr(tangent, Categorical(), [(x, y)])
    return tangent, Gaussian(tangent.space.values(model), curvature.with_prior(2.0)), x[:6]


def test_moments_are_those_of_the_draws(classifier) -> None:
    tangent, posterior, x = classifier
    linear = tangent.at(x)
    mean, covariance = moments(posterior, linear)
    count = 20000
    found = draws(posterior, linear, count, torch.Generator().manual_seed(0))
    variance = covariance.diagonal(dim1=1, dim2=2)
    assert bool(((found.mean(0) - mean).abs() < 4 * (variance / count).sqrt()).all())
    away = found - mean
    error = (covariance.square() + variance.unsqueeze(2) * variance.unsqueeze(1)).sqrt() / count**0.5
    assert bool(((torch.einsum("sbi,sbj->bij", away, away) / count - covariance).abs() < 4 * error).all())


def test_noise_is_added_to_the_diagonal(classifier) -> None:
    tangent, posterior, x = classifier
    _, plain = moments(posterior, tangent.at(x))
    _, noisy = moments(posterior, tangent.at(x), sigma=0.5)
    torch.testing.assert_close(noisy - plain, 0.25 * torch.eye(4, dtype=torch.float64).expand(6, 4, 4))
    _, each = moments(posterior, tangent.at(x), sigma=torch.arange(1.0, 5.0))
    torch.testing.assert_close((each - plain)[0], torch.diag(torch.arange(1.0, 5.0).double() ** 2))


def test_variances_are_the_diagonal_of_the_covariance(classifier) -> None:
    tangent, posterior, x = classifier
    for sigma in (None, 0.5, torch.arange(1.0, 5.0)):
        mean, covariance = moments(posterior, tangent.at(x), sigma)
        found = variances(posterior, tangent.at(x), sigma)
        torch.testing.assert_close(found, (mean, covariance.diagonal(dim1=1, dim2=2)), rtol=1e-9, atol=0)


def test_probit_never_asks_for_a_covariance(classifier, monkeypatch: pytest.MonkeyPatch) -> None:
    tangent, posterior, x = classifier
    mean, covariance = moments(posterior, tangent.at(x))
    expected = probit(mean, covariance.diagonal(dim1=1, dim2=2))
    monkeypatch.setattr(Precision, "covariance", lambda *_: pytest.fail("asked for [B, C, C]"))
    torch.testing.assert_close(probabilities(posterior, tangent.at(x), "probit"), expected)


@pytest.mark.parametrize("link", ["probit", "probit_full", "bridge", "bridge_norm"])
def test_probabilities_sum_to_one(classifier, link: str) -> None:
    tangent, posterior, x = classifier
    with unchanged(tangent.model):
        found = probabilities(posterior, tangent.at(x), link)
    torch.testing.assert_close(found.sum(-1), torch.ones(6, dtype=torch.float64))


def test_draws_are_correlated_over_inputs_as_they_should_be(classifier) -> None:
    """Two copies of an input move together, and two unrelated inputs do not."""
    tangent, posterior, x = classifier
    linear = tangent.at(torch.stack([x[0], x[0], 50 * torch.ones(3, dtype=torch.float64)]))
    found = draws(posterior, linear, 50, torch.Generator().manual_seed(0))
    torch.testing.assert_close(found[:, 0], found[:, 1])
    assert not torch.allclose(found[:, 0] - found[:, 0].mean(0), found[:, 2] - found[:, 2].mean(0), rtol=0.1)


def test_randomness_arrives_by_generator(classifier) -> None:
    tangent, posterior, x = classifier
    linear = tangent.at(x)
    for sample in (lambda g: draws(posterior, linear, 3, g), lambda g: network_draws(posterior, tangent, x, 3, g)):
        one, two = sample(torch.Generator().manual_seed(1)), sample(torch.Generator().manual_seed(1))
        other = sample(torch.Generator().manual_seed(2))
        assert torch.equal(one, two)
        assert not torch.allclose(one, other)


def test_network_draws_are_the_network_at_sampled_weights(classifier) -> None:
    tangent, posterior, x = classifier
    with unchanged(tangent.model):
        found = network_draws(posterior, tangent, x, 3, torch.Generator().manual_seed(0))
    sampled = posterior.sample(3, torch.Generator().manual_seed(0))
    for theta, outputs in zip(sampled, found, strict=True):
        tree = tangent.space.unravel(theta)
        torch.testing.assert_close(outputs, torch.func.functional_call(tangent.model, tree, (x,)).detach())


def test_network_draws_of_a_sub_network_move_nothing_else() -> None:
    model = nn.Linear(2, 1).double()
    space = ParamSpace.of(model).select(mask=torch.tensor([False, True, False]))
    tangent = Tangent(model, space)
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    curvature = estimate.full(tangent, GaussianLikelihood(), [(x, torch.zeros(2, 1, dtype=torch.float64))])
    posterior = Gaussian(space.values(model), curvature.with_prior(1.0))
    found = network_draws(posterior, tangent, x, 5, torch.Generator().manual_seed(0))
    fixed = model(x).detach()
    torch.testing.assert_close(found[:, 0], fixed[0].expand(5, 1))  # meets only the fixed weight and the bias
    assert float((found[:, 1] - fixed[1]).abs().min()) > 0


def test_an_exception_in_the_network_leaves_the_model_alone(classifier) -> None:
    tangent, posterior, x = classifier
    with unchanged(tangent.model), pytest.raises(ModelError, match="forward pass"):
        network_draws(posterior, tangent, x[:, :2], 2, torch.Generator().manual_seed(0))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # that TorchScript is old
def test_parameters_of_a_scripted_module_cannot_be_exchanged() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(3, 4), nn.Tanh()))
    for model, named in ((scripted, "the model is"), (nn.Sequential(scripted, nn.Linear(4, 2)), "^0 is")):
        tangent, x = Tangent(model), torch.randn(5, 3)
        curvature = estimate.diagonal(tangent, GaussianLikelihood(), [(x, torch.zeros_like(model(x)))])
        posterior = Gaussian(tangent.space.values(model), curvature.with_prior(1.0))
        assert moments(posterior, tangent.at(x))[0].shape == model(x).shape
        message = rf"{named} a scripted module.*expected.*pred_type='glm'"
        with unchanged(model), pytest.raises(ModelError, match=message):
            network_draws(posterior, tangent, x, 2, torch.Generator().manual_seed(0))


class ByTheBack(nn.Module):
    """Reaches its first layer as a module and by another way, which `forward` takes."""

    def __init__(self, way: str) -> None:
        super().__init__()
        layer = nn.Linear(3, 4)
        layers = [layer, nn.Tanh()]

        def inner(x):
            for each in layers:
                x = each(x)
            return x

        self.layer, self.out = layer, nn.Linear(4, 2)
        self.run = inner if way == "closure" else None
        self.held = SimpleNamespace(run=layer) if way == "object" else [layer.weight]

    def forward(self, x):
        if self.run is not None:
            return self.out(self.run(x))
        return self.out(x @ self.held[0].T if isinstance(self.held, list) else self.held.run(x))


@pytest.mark.parametrize("way", ["closure", "object", "weight"])
def test_draws_move_every_parameter_or_are_refused(way: str) -> None:
    torch.manual_seed(0)
    model, x = ByTheBack(way).double(), torch.randn(5, 3, dtype=torch.float64)
    tangent = Tangent(model)
    nothing = Diagonal(torch.zeros(tangent.space.size, dtype=torch.float64))
    posterior = Gaussian(tangent.space.values(model), nothing.with_prior(1.0))
    generator = torch.Generator().manual_seed(0)
    with unchanged(model):
        if way != "closure":
            with pytest.raises(ModelError, match=r"'layer.weight' by a way of its own.*expected.*pred_type='glm'"):
                network_draws(posterior, tangent, x, 3, generator)
            return
        found = network_draws(posterior, tangent, x, 3, generator)
    sampled = posterior.sample(3, torch.Generator().manual_seed(0))
    for theta, outputs in zip(sampled, found, strict=True):
        other = ByTheBack(way).double()
        nn.utils.vector_to_parameters(theta, other.parameters())
        torch.testing.assert_close(outputs, other(x).detach())


def test_images_keep_their_shape() -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(1, 2, 3, padding=1).double()
    x = torch.randn(3, 1, 4, 4, dtype=torch.float64)
    tangent = Tangent(model)
    curvature = estimate.diagonal(tangent, GaussianLikelihood(), [(x, torch.zeros(3, 2, 4, 4, dtype=torch.float64))])
    posterior = Gaussian(tangent.space.values(model), curvature.with_prior(1.0))
    assert draws(posterior, tangent.at(x), 5).shape == (5, 3, 2, 4, 4)
    assert moments(posterior, tangent.at(x))[1].shape == (3, 32, 32)
    with pytest.raises(LikelihoodError, match=r"expected|needs \[batch, classes\]"):
        probabilities(posterior, tangent.at(x))


def test_unknown_link_names_the_known_ones(classifier) -> None:
    tangent, posterior, x = classifier
    with pytest.raises(OptionError, match=r"unknown link 'probbit'; expected one of \['bridge'"):
        probabilities(posterior, tangent.at(x), "probbit")


@pytest.mark.parametrize("size", [3, 300], ids=["draws at once", "draws in turn"])
def test_network_draws_of_a_sub_network_are_the_network_at_sampled_weights(size: int) -> None:
    """Sampled weights take the place of the fitted ones; a large batch of inputs is run one draw after the other."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 400), nn.Tanh(), nn.Linear(400, 2)).double()
    space = ParamSpace.of(model).select(mask=torch.tensor([0, 3, 801, 1250, 2001]))
    tangent = Tangent(model, space)
    x = torch.randn(size, 2, dtype=torch.float64)
    mean = space.values(model) + 1.0  # a posterior need not be centred at the model's own weights
    posterior = Gaussian(mean, Diagonal(torch.arange(1.0, 6.0).double()).with_prior(1.0))
    found = network_draws(posterior, tangent, x, 3, torch.Generator().manual_seed(0))
    own = torch.cat([p.detach().flatten() for p in model.parameters()])
    for theta, outputs in zip(posterior.sample(3, torch.Generator().manual_seed(0)), found, strict=True):
        weights = own.clone()
        weights[torch.tensor([0, 3, 801, 1250, 2001])] = theta
        torch.nn.utils.vector_to_parameters(weights, model.parameters())
        torch.testing.assert_close(outputs, model(x).detach())
        torch.nn.utils.vector_to_parameters(own, model.parameters())


def test_network_draws_within_a_budget_are_as_many_as_asked_for() -> None:
    """A budget of three draws: all ten are made, each at weights of its own, and all with the moments of the posterior.

    f = w x + b is Gaussian: 3000 draws have its mean and variance within 4.5 standard errors.
    """
    torch.manual_seed(0)
    model = nn.Linear(2, 1).double()
    tangent = Tangent(model, budget=3 * 4 * 3 * 8)
    x = torch.randn(4, 2, dtype=torch.float64)
    precision = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    posterior = Gaussian(tangent.space.values(model), Diagonal(precision).with_prior(1.0))
    found = network_draws(posterior, tangent, x, 10, torch.Generator().manual_seed(0))
    assert found.shape == (10, 4, 1)
    assert len(found[:, 0, 0].unique()) == 10
    count = 3000
    found = network_draws(posterior, tangent, x, count, torch.Generator().manual_seed(0))[..., 0]
    design = torch.cat([x, torch.ones(4, 1, dtype=torch.float64)], 1)
    variance = (design.square() / (precision + 1)).sum(1)
    mean = model(x).detach()[:, 0]
    assert bool(((found.mean(0) - mean).abs() < 4.5 * (variance / count).sqrt()).all())
    assert bool(((found - mean).square().mean(0) / variance - 1).abs().max() < 4.5 * (2 / count) ** 0.5)


def test_runs_at_once_are_trusted_only_where_they_give_what_runs_in_turn_give() -> None:
    named = {"w": torch.randn(3, 4, generator=torch.Generator().manual_seed(0))}
    in_turn = named["w"].square()
    assert _follows(lambda each: each["w"].square(), named, in_turn)
    assert not _follows(lambda each: each["w"].square(), named, in_turn + 0.1)
    assert not _follows(lambda each: each["w"].square().sum(), named, in_turn)
    assert not _follows(lambda each: each["w"].square() * (2 if float(each["w"][0]) > 0 else 1), named, in_turn)
