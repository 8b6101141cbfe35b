"""Closed forms for class probabilities, against quadrature and long Monte-Carlo runs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lapwing.predictive import bridge, bridge_norm, dirichlet, probit, probit_full, quadrature


def random_logits(classes: int, scale: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(classes)
    root = scale * torch.randn(6, classes, classes, generator=generator, dtype=torch.float64)
    mean = 2 * torch.randn(6, classes, generator=generator, dtype=torch.float64)
    return mean, root @ root.mT / classes + 0.05 * torch.eye(classes, dtype=torch.float64)


def monte_carlo(mean: Tensor, covariance: Tensor, count: int = 100_000) -> Tensor:
    noise = torch.randn(count, *mean.shape, generator=torch.Generator().manual_seed(0), dtype=mean.dtype)
    return torch.softmax(mean + torch.einsum("bij,sbj->sbi", torch.linalg.cholesky(covariance), noise), -1).mean(0)


def test_quadrature_is_the_integral() -> None:
    """Against a trapezoidal rule over ten standard deviations, fine enough for the sharpest sigmoid in it."""
    mean = torch.linspace(-40, 40, 17, dtype=torch.float64).reshape(-1, 1, 1)
    variance = torch.tensor([0.0, 0.1, 0.9, 1.0, 1.1, 4.0, 100.0, 1e4, 1e6], dtype=torch.float64).reshape(1, -1, 1)
    mean, variance = (each.expand(17, 9, 1).reshape(-1, 1) for each in (mean, variance))
    grid = torch.linspace(-10, 10, 400_001, dtype=torch.float64)
    density = torch.exp(-(grid**2) / 2) / (2 * torch.pi) ** 0.5
    expected = [
        torch.trapezoid(torch.sigmoid(m + v.sqrt() * grid) * density, grid)
        for m, v in zip(mean[:, 0], variance[:, 0], strict=True)
    ]
    torch.testing.assert_close(quadrature(mean, variance)[:, 0], torch.stack(expected), rtol=1e-9, atol=1e-12)


def test_probit_of_one_logit_is_close_to_quadrature() -> None:
    """C11: the largest error is about 0.018."""
    mean = torch.linspace(-10, 10, 201, dtype=torch.float64).reshape(-1, 1, 1)
    variance = torch.logspace(-2, 2, 60, dtype=torch.float64).reshape(1, -1, 1)
    mean, variance = mean.expand(201, 60, 1), variance.expand(201, 60, 1)
    error = (probit(mean, variance) - quadrature(mean, variance)).abs().max()
    assert 0.015 < float(error) < 0.02


@pytest.mark.parametrize("link", ["probit", "probit_full", "bridge", "bridge_norm"])
@pytest.mark.parametrize("classes", [2, 3, 10])
def test_probabilities(link: str, classes: int) -> None:
    mean, covariance = random_logits(classes, 1.0)
    links = {
        "probit": lambda: probit(mean, covariance.diagonal(dim1=1, dim2=2)),
        "probit_full": lambda: probit_full(mean, covariance),
        "bridge": lambda: bridge(mean, covariance),
        "bridge_norm": lambda: bridge_norm(mean, covariance),
    }
    found = links[link]()
    assert bool((found > 0).all())
    torch.testing.assert_close(found.sum(-1), torch.ones(6, dtype=torch.float64), rtol=1e-12, atol=0)


@pytest.mark.parametrize(("classes", "bound"), [(2, 0.02), (3, 0.04), (10, 0.06)])
def test_full_probit_is_close_to_monte_carlo(classes: int, bound: float) -> None:
    """An approximation: its error grows with the number of classes, and is stated here for variances of about one."""
    mean, covariance = random_logits(classes, 1.0)
    assert float((probit_full(mean, covariance) - monte_carlo(mean, covariance)).abs().max()) < bound


def test_full_probit_of_two_classes_is_the_probit_of_their_difference() -> None:
    mean, covariance = random_logits(2, 1.5)
    difference = mean[:, :1] - mean[:, 1:]
    variance = (covariance[:, 0, 0] + covariance[:, 1, 1] - 2 * covariance[:, 0, 1]).unsqueeze(1)
    torch.testing.assert_close(probit_full(mean, covariance)[:, :1], probit(difference, variance), rtol=1e-12, atol=0)


def test_links_of_certain_logits_are_the_softmax() -> None:
    mean, covariance = random_logits(4, 1.0)
    nothing = torch.zeros_like(covariance)
    expected = torch.softmax(mean, -1)
    torch.testing.assert_close(probit(mean, nothing[:, 0]), expected)
    torch.testing.assert_close(probit_full(mean, nothing), expected)


def test_bridge_maps_a_dirichlet_to_itself() -> None:
    """The Laplace approximation of a Dirichlet in the logits, mapped back, has the same parameters."""
    alpha = torch.tensor([[2.0, 5.0, 3.0]], dtype=torch.float64)
    mean = alpha.log() - alpha.log().mean(-1, keepdim=True)
    inverse, classes = 1 / alpha, 3
    covariance = torch.diag_embed(inverse) - (inverse.unsqueeze(-1) + inverse.unsqueeze(-2)) / classes
    covariance = covariance + inverse.sum(-1)[:, None, None] / classes**2
    # singular along (1, 1, 1), as the logits sum to zero: what is added there is conditioned away again
    found = dirichlet(mean, covariance + 1.0)
    torch.testing.assert_close(found, alpha, rtol=1e-9, atol=0)


def conditioned(mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variances of a Gaussian, given that its entries sum to zero: in a basis of the plane, by precisions."""
    classes = len(mean)
    basis = torch.linalg.svd(torch.ones(1, classes, dtype=mean.dtype)).Vh[1:].T
    precision = torch.linalg.inv(covariance)
    inside = torch.linalg.inv(basis.T @ precision @ basis)
    return basis @ inside @ basis.T @ precision @ mean, (basis @ inside @ basis.T).diagonal()


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("classes", [2, 3, 10])
def test_bridge_conditions_logits_that_are_correlated_and_of_any_sum(classes: int, normalise: bool) -> None:
    """Hobbhahn et al., entry by entry; normalised, every logit is divided by the root of what scales the variance."""
    mean, covariance = random_logits(classes, 1.5)
    found = dirichlet(mean, covariance, normalise)
    for row in range(len(mean)):
        mu, variance = conditioned(mean[row], covariance[row])
        if normalise:
            factor = (classes / 2) ** 0.5 / variance.mean()
            mu, variance = mu * factor.sqrt(), variance * factor
        others = sum(torch.exp(-each) for each in mu)
        expected = [
            (1 - 2 / classes + torch.exp(m) * others / classes**2) / v for m, v in zip(mu, variance, strict=True)
        ]
        torch.testing.assert_close(found[row], torch.stack(expected), rtol=1e-9, atol=0)


def test_all_pairs_of_one_logit_are_the_sigmoid() -> None:
    mean, covariance = random_logits(1, 1.5)
    expected = torch.sigmoid(mean / (1 + torch.pi / 8 * covariance[:, :, 0]).sqrt())
    torch.testing.assert_close(probit_full(mean, covariance), expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("lead", [(), (1,), (6, 1), (1, 6), (2, 3)])
@pytest.mark.parametrize("classes", [1, 3])
def test_any_axes_may_come_before_the_classes(lead: tuple[int, ...], classes: int) -> None:
    mean, covariance = random_logits(classes, 1.0)
    count = torch.Size(lead).numel()
    mean, covariance = mean[:count], covariance[:count]
    variance = covariance.diagonal(dim1=1, dim2=2)
    for link, spread in ((probit, variance), (probit_full, covariance), (quadrature, variance), (bridge, covariance)):
        if link in (quadrature, bridge) and (classes == 1) != (link is quadrature):
            continue
        found = link(mean.reshape(*lead, classes), spread.reshape(*lead, *spread.shape[1:]))
        torch.testing.assert_close(found, link(mean, spread).reshape(*lead, classes), rtol=1e-12, atol=0)
