"""Held-out tuning takes what predictions take: links are looked up in one place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lapwing.errors import OptionError
from lapwing.laplace import BaseLaplace, Laplace, LinkApprox
from lapwing.predictive.links import NAMES

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
    if link == "mc" and likelihood in ("classification", "binary"):
        with pytest.raises(OptionError, match=r"link 'mc' for .*no closed form"):
            la.optimize_prior_precision(method="pseudo_data", **tune)
    else:
        la.optimize_prior_precision(method="pseudo_data", **tune)


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
