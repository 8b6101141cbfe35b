"""Checks that no other test sees refuse anything: each is given what it is there for, and its message is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf, nan
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lapwing import metrics
from lapwing.errors import LapwingError
from lapwing.evidence.marginal import Evidence
from lapwing.laplace import Laplace
from lapwing.laplace.calibration import calibrate
from lapwing.likelihoods import BernoulliMixture, Categorical, Gaussian, HeteroscedasticGaussian
from lapwing.linalg import CorrectedKronecker, Dense, Diagonal, EigenColumns, Kronecker, MatrixLayout, Term
from lapwing.linalg.low_rank import LowRank
from lapwing.linalg.rows import DenseRows
from lapwing.params import ParamSpace
from lapwing.priors import Prior
from lapwing.training import GaussNewton, train
from lapwing.training.evidence_ascent import adam
from lapwing.training.tuner import EvidenceTuner

LAYOUT = MatrixLayout(0, (2, 2), (0, 1), 1, 2, 2)
ONES = torch.eye(2, dtype=torch.float64)[None]
HALF = torch.tensor([[[1.0, 0.0], [0.0, 0.0]]], dtype=torch.float64)
ROWS4 = [DenseRows(0, torch.ones(1, 3, 4, dtype=torch.float64))]
ROWS2 = [DenseRows(0, torch.ones(1, 3, 2, dtype=torch.float64))]
NOUGHT = torch.tensor([1.0, 0.0], dtype=torch.float64)


@dataclass(frozen=True)
class Refusal:
    name: str
    call: Callable[[], Any]
    says: str


def kron(cols: Tensor, rows: Tensor) -> Kronecker:
    return Kronecker(LAYOUT, (Term(cols, rows, 1.0),))


def corrected(values: list[list[float]]) -> CorrectedKronecker:
    return CorrectedKronecker(LAYOUT, None, (EigenColumns(0, None, torch.tensor([values], dtype=torch.float64)),))


def fitted(likelihood: Any, outputs: int = 3, **options: Any) -> Any:
    torch.manual_seed(0)
    x = torch.randn(5, 2)
    y = torch.randn(5, outputs) if likelihood == "regression" else torch.arange(5) % outputs
    given: dict[str, Any] = {"hessian_structure": "full", **options}
    la = Laplace(nn.Linear(2, outputs), likelihood, "all", **given)
    la.fit([(x, y)])
    return la, x, y


def of_draws() -> None:
    la, x, y = fitted("classification")
    la.optimize_prior_precision(method="gridsearch", pred_type="nn", val_loader=[(x, y + 7)], n_samples=2, grid_size=2)


def groups_beside_an_earlier_posterior() -> None:
    la, _, _ = fitted("regression")
    after = Laplace(la.model, "regression", "all", "full", prior=la.as_prior())
    after.prior_groups = "layer"


def other_outputs() -> None:
    la, _, _ = fitted("regression", hessian_structure="gp", independent_outputs=True)
    la.curvature.sweep([DenseRows(0, torch.ones(2, 5, 9))], torch.ones(1))


def held_out() -> None:
    la, x, y = fitted("classification")
    calibrate(la, [(x, y + 7)])


def trained(**options: Any) -> None:
    x = torch.randn(4, 2)
    train(nn.Linear(2, 1), [(x, x[:, :1])], Gaussian(), **{"epochs": 1, **options})


def tuned(**options: Any) -> None:
    x = torch.randn(4, 2)
    EvidenceTuner(nn.Linear(2, 1), [(x, x[:, :1])], Gaussian(), **options)


def ascent(**options: Any) -> None:
    model = nn.Linear(2, 1, bias=False)
    evidence = Evidence(Diagonal(torch.ones(2)), torch.zeros(2), torch.tensor(0.0))
    adam(evidence, Prior.isotropic(ParamSpace.of(model), 1.0), **options)


def newton(points: Any) -> None:
    model = nn.Linear(2, 1)
    GaussNewton(model, Gaussian(), prior=Prior.isotropic(ParamSpace.of(model), 1.0), points=points)


NONE = "prior precision"
REFUSALS = [
    Refusal("dense, swept", lambda: Dense(HALF[0]).sweep(ROWS2, NOUGHT), NONE),
    Refusal("diagonal, swept", lambda: Diagonal(HALF[0].diagonal()).sweep(ROWS2, NOUGHT), NONE),
    Refusal("diagonal, not a number, swept", lambda: Diagonal(nan * NOUGHT).sweep(ROWS2, NOUGHT + 1), "finite"),
    Refusal("inputs of kron, swept", lambda: kron(HALF, ONES).sweep(ROWS4, NOUGHT), NONE),
    Refusal("outputs of kron, swept", lambda: kron(ONES, HALF).sweep(ROWS4, NOUGHT), NONE),
    Refusal("ekfac", lambda: corrected([[1.0, 2.0], [0.0, 3.0]]).with_prior(0.0), NONE),
    Refusal("ekfac, swept", lambda: corrected([[1.0, 2.0], [0.0, 3.0]]).sweep(ROWS4, NOUGHT), NONE),
    Refusal("ekfac, of rounding, swept", lambda: corrected([[1.0, 2.0], [1e-40, 3.0]]).sweep(ROWS4, NOUGHT), NONE),
    Refusal("low rank", lambda: LowRank.of(torch.tensor([[inf], [1.0]])), "finite"),
    Refusal("draws against other classes", of_draws, "7"),
    Refusal("held-out targets of other classes", held_out, "7"),
    Refusal("groups beside an earlier posterior", groups_beside_an_earlier_posterior, "other prior_groups"),
    Refusal("other outputs than independent ones", other_outputs, "there are 2 outputs; expected 3"),
    Refusal("entropy", lambda: metrics.entropy(torch.tensor([[0.5, 0.7]])), "expected"),
    Refusal("an odd number of outputs", lambda: HeteroscedasticGaussian().fisher(torch.zeros(2, 3)), "an even number"),
    Refusal("two outputs of three", lambda: BernoulliMixture().fisher(torch.zeros(2, 2)), "three"),
    Refusal(
        "half the outputs", lambda: HeteroscedasticGaussian().check(torch.zeros(2, 4), torch.zeros(2, 4)), "per mean"
    ),
    Refusal(
        "one class each", lambda: Categorical().check(torch.zeros(4, 3), torch.zeros(4, 1).long()), "one class index"
    ),
    Refusal("epochs", partial(trained, epochs=0), "epochs is 0"),
    Refusal("every", partial(trained, every=0), "every is 0"),
    Refusal("temperature of a run", partial(trained, temperature=0.0), "temperature is 0.0"),
    Refusal("rate of a tuner", partial(tuned, hyper_lr=0.0), "lr is 0.0"),
    Refusal("steps of a tuner", partial(tuned, hyper_steps=-1), "steps is -1"),
    Refusal("points of a tuner", partial(tuned, points=0), "points is 0"),
    Refusal("rate of an ascent", partial(ascent, lr=nan), "lr is nan"),
    Refusal("temperature of an ascent", partial(ascent, temperature=inf), "temperature is inf"),
    Refusal("points of a prior", partial(newton, 0), "points is 0"),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.name)
def test_it_is_refused(refusal: Refusal) -> None:
    with pytest.raises(LapwingError, match=refusal.says):
        refusal.call()
