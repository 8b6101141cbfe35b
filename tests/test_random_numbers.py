"""Random numbers come from the generator that is given, wherever it lives, and from torch's own only where drawn."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lapwing import Laplace, estimate
from lapwing.estimate import exact, monte_carlo
from lapwing.likelihoods import Categorical
from lapwing.linalg.checks import normal
from lapwing.tangent import Tangent
from lapwing.tangent.features import FeatureTangent
from lapwing.tangent.model import MOST_PROBES
from lapwing.tangent.probe import Probe


def test_a_generator_of_another_device() -> None:
    """No second device is at hand but meta, whose numbers cannot be read: drawn on the generator's, and moved."""
    elsewhere = torch.empty((), device="meta")
    found = normal((2, 3), elsewhere, torch.Generator().manual_seed(0))
    assert found.device == elsewhere.device
    here = normal((2, 3), torch.empty(()), torch.Generator().manual_seed(0))
    assert torch.equal(here, torch.randn(2, 3, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("gram_rows", [2000, 1])
@pytest.mark.parametrize(("cotangents", "drawn"), [(exact, False), (monte_carlo(), True)])
def test_low_rank_and_the_global_random_state(cotangents, drawn: bool, gram_rows: int) -> None:
    model, batches = nn.Linear(3, 2), [(torch.randn(6, 3), torch.randint(2, (6,)))]

    def fit() -> torch.Tensor:
        options = {"rank": 2, "cotangents": cotangents, "gram_rows": gram_rows}
        return estimate.low_rank(Tangent(model), Categorical(), batches, **options).dense()

    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = fit()
    assert torch.equal(torch.get_rng_state(), before) is not drawn
    assert torch.allclose(fit(), first) is not drawn  # Monte-Carlo fits are not all alike
    torch.manual_seed(3)
    assert torch.allclose(fit(), first)


@pytest.mark.parametrize("structure", ["full", "kron", "diag", "lowrank", "gp", "ekfac", "propagated_diag"])
def test_a_fit_and_its_closed_forms_draw_nothing(structure: str) -> None:
    x, y = torch.randn(6, 3), torch.randint(2, (6,))
    before = torch.get_rng_state()
    model = nn.Linear(3, 2)
    torch.set_rng_state(before)
    la = Laplace(model, "classification", subset_of_weights="all", hessian_structure=structure)
    la.fit([(x, y)])
    la(x)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_is_remembered_of_shapes_is_bounded() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    tangent, features = Tangent(model), FeatureTangent(model, "0")
    for number in range(MOST_PROBES):
        tangent._keep((number,), Probe())
        features._checked.add((number,))
    tangent.at(torch.randn(3, 2))
    features.at(torch.randn(3, 2))
    assert len(tangent._probes) == MOST_PROBES
    assert (0,) not in tangent._probes
    assert len(features._checked) == 1
