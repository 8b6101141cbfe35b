"""Held-out tuning takes what predictions take: links are looked up in one place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lapwing.errors import OptionError
from lapwing.evidence import grid as validation
from lapwing.laplace import BaseLaplace, Laplace, LinkApprox
from lapwing.likelihoods.links import NAMES

TARGETS = {
    "regression": lambda n: torch.sin(torch.arange(n).double()).unsqueeze(1).expand(n, 2).clone(),
    "classification": lambda n: torch.arange(n) % 2,
    "binary": lambda n: (torch.arange(2 * n) % 2).double().reshape(n, 2),
    "poisson": lambda n: (torch.arange(2 * n) % 3).double().reshape(n, 2),
}


def data(likelihood: str, n: int = 12) -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(n, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return [(x, TARGETS[likelihood](n))]


def fitted(likelihood: str) -> BaseLaplace:
    torch.manual_seed(0)
    la = Laplace(nn.Linear(3, 2).double(), likelihood, "all", "full")
    la.fit(data(likelihood))
    return la


def test_the_face_knows_the_names_of_all_links() -> None:
    assert {each.value for each in LinkApprox} == set(NAMES)


@pytest.mark.parametrize("likelihood", TARGETS)
@pytest.mark.parametrize("link", NAMES)
def test_a_grid_takes_the_links_that_predictions_take(link: str, likelihood: str) -> None:
    la, held_out = fitted(likelihood), data(likelihood, 5)
    ask = {"link_approx": link, "n_samples": 10, "generator": torch.Generator().manual_seed(0)}
    tune = {"val_loader": held_out, "grid_size": 3, **ask}
    try:
        la(held_out[0][0], **ask)
    except OptionError:
        with pytest.raises(OptionError, match=f"link {link!r} for"):
            la.optimize_prior_precision(method="gridsearch", **tune)
        return
    la.optimize_prior_precision(method="gridsearch", **tune)
    assert float(la.prior_precision) in (1e-4, 1.0, 1e4)
    la.optimize_prior_precision(method="pseudo_data", counts=[6.0, 12.0], **tune)
    assert float(la.prior_precision) in (1e-4, 1.0, 1e4)
    assert float(la.temperature) in (1.0, 2.0)


@pytest.mark.parametrize("link", ["probit", "probit_full", "quadrature"])
def test_a_grid_scores_what_is_predicted(link: str) -> None:
    """The loss sees the probabilities that the posterior gives at each precision."""
    la, held_out = fitted("binary"), data("binary", 5)
    seen: list[Tensor] = []

    def loss(probabilities: Tensor, y: Tensor) -> float:
        seen.append(probabilities)
        return float((probabilities - y).square().sum())

    la.optimize_prior_precision(method="gridsearch", val_loader=held_out, grid_size=3, link_approx=link, loss=loss)
    for found, precision in zip(seen, (1e-4, 1.0, 1e4), strict=True):
        la.prior_precision = precision
        torch.testing.assert_close(found, la(held_out[0][0], link_approx=link))


def test_draws_are_scored_by_the_density_of_their_mixture(monkeypatch: pytest.MonkeyPatch) -> None:
    """-log of the mean over draws, as the prediction is a mixture; the mean of -log prefers draws that all agree."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    with torch.no_grad():
        model.weight.mul_(12)  # far too sure of itself
    la = Laplace(model, "classification", "all", "full")
    la.fit(data("classification"))
    (x, y), grid = data("classification", 9)[0], torch.logspace(-3, 3, 7, dtype=torch.float64)
    mixture, agreement = [], []
    for precision in grid:
        la.prior_precision = precision
        draws = la.functional_samples(x, "nn", 50, generator=torch.Generator().manual_seed(5))
        likely = draws.softmax(-1)[:, torch.arange(9), y]
        mixture.append(-float(likely.mean(0).log().mean()))
        agreement.append(-float(likely.log().mean()))
    best = int(torch.tensor(mixture).argmin())
    assert best != int(torch.tensor(agreement).argmin())
    ask = {"val_loader": [(x, y)], "log_prior_prec_min": -3, "log_prior_prec_max": 3, "grid_size": 7, "n_samples": 50}
    generator, compared, smallest = torch.Generator().manual_seed(5), [], validation.smallest
    monkeypatch.setattr(
        validation, "smallest", lambda scores, names: compared.append(scores) or smallest(scores, names)
    )
    la.optimize_prior_precision(pred_type="nn", method="gridsearch", generator=generator, **ask)
    torch.testing.assert_close(la.prior_precision, grid[best : best + 1])
    torch.testing.assert_close(compared[0], torch.tensor(mixture, dtype=torch.float64), rtol=1e-9, atol=0)


SIGMA = 0.3


def noisy(estimator: str = "ggn") -> BaseLaplace:
    torch.manual_seed(0)
    options = {"estimator": estimator} if estimator != "ggn" else {}
    la = Laplace(nn.Linear(3, 2).double(), "regression", "all", "full", sigma_noise=SIGMA, **options)
    la.fit(data("regression"))
    return la


def held_out_scores(la: BaseLaplace, precisions: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The mean negative log density of the predictive Gaussian at each precision, from `la` itself."""
    scores = []
    for precision in precisions:
        la.prior_precision = float(precision)
        mean, variance = la(x, diagonal_output=True)
        law = torch.distributions.Normal(mean, (variance + SIGMA**2).sqrt())
        scores.append(-law.log_prob(y).sum(-1).mean())
    return torch.stack(scores)


@pytest.mark.parametrize("estimator", ["ggn", "empirical"])
def test_a_grid_sees_the_curvature_that_predictions_see(estimator: str) -> None:
    """1 / sigma^2 multiplies a GGN, 1 / sigma^4 an empirical Fisher; the loss gets what `la` predicts."""
    la, (x, y) = noisy(estimator), data("regression", 5)[0]
    seen: list[Tensor] = []

    def loss(mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
        seen.append(variance.diagonal(dim1=-2, dim2=-1) if variance.dim() == 3 else variance)
        return (y - mean).square().mean()

    grid = {"log_prior_prec_min": -1, "log_prior_prec_max": 1, "grid_size": 3}
    la.optimize_prior_precision(method="gridsearch", val_loader=[(x, y)], loss=loss, **grid)
    for precision, variance in zip((0.1, 1.0, 10.0), seen, strict=True):
        la.prior_precision = precision
        function = la(x, diagonal_output=True)[1]
        extra = (variance - function).flatten()  # with noise, or without it
        torch.testing.assert_close(extra, torch.full_like(extra, float(extra[0])), rtol=1e-7, atol=1e-10)
        assert float(extra[0]) == pytest.approx(0, abs=1e-10) or float(extra[0]) == pytest.approx(SIGMA**2)


def test_draws_are_scored_at_the_noise_level() -> None:
    """Many draws rank precisions as the closed form does; at another noise level they would choose otherwise."""
    la, (x, y) = noisy(), data("regression", 5)[0]
    precisions = torch.tensor([0.01, 1.0, 100.0])
    closed = held_out_scores(la, precisions, x, y)
    best = float(precisions[closed.argmin()])
    ask = {"val_loader": [(x, y)], "log_prior_prec_min": -2, "log_prior_prec_max": 2, "grid_size": 3}
    la.optimize_prior_precision(
        method="gridsearch", pred_type="nn", n_samples=600, generator=torch.Generator().manual_seed(0), **ask
    )
    assert float(la.prior_precision) == pytest.approx(best)
