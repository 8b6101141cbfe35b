"""Where a check divides numbers, the last on the one side is taken and the first on the other side is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf, nan
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing import directions, estimate, metrics
from lapwing.errors import LapwingError
from lapwing.estimate.cotangents import monte_carlo, projections
from lapwing.estimate.kronecker import KroneckerOptions
from lapwing.evidence.grid import check_counts
from lapwing.laplace import Laplace
from lapwing.laplace.hyper import checked_noise, checked_precision, checked_temperature
from lapwing.laplace.tuning import Exponents, starting_precision
from lapwing.likelihoods import Categorical, Gaussian
from lapwing.linalg import Diagonal, Effort, MatrixFree
from lapwing.linalg.checks import check_precisions, normal
from lapwing.linalg.contracts import check_groups
from lapwing.linalg.low_rank import LowRank
from lapwing.linalg.matrix_free import DenseProducts
from lapwing.params import ParamSpace
from lapwing.priors import Gaussian as Earlier
from lapwing.priors import Prior
from lapwing.subnetwork.choices import last_layers
from lapwing.subnetwork.swag import swag_variance
from lapwing.tables.conformal import amount_scores, quantile
from lapwing.tables.fit import check_seed
from lapwing.tables.network import Spec
from lapwing.tables.reading import open_table
from lapwing.tangent import Tangent
from lapwing.training import Continual, GaussNewton
from lapwing.training.autoencoder.curvatures import estimator_of
from lapwing.training.autoencoder.online import Schedule
from lapwing.training.damping import Damping
from lapwing.training.options import check_numbers, starting_noise

SMALL, ALMOST = 1e-30, 1 - 1e-9
PLACE = torch.float64, torch.device("cpu")
HALF = torch.tensor([[0.5, 0.5]])


@dataclass(frozen=True)
class Boundary:
    """`call` takes every value of `taken` and refuses every value of `refused` with an error of the library.

    And so those of `mistyped`, which annotations rule out as well.
    """

    name: str
    call: Callable[[Any], Any]
    taken: tuple[Any, ...]
    refused: tuple[Any, ...]
    mistyped: tuple[Any, ...] = ()


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)).double()


def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 2, dtype=torch.float64, generator=generator)
    return [(x, x.sum(1, keepdim=True))]


def fitted(structure: str = "diag") -> Any:
    la = Laplace(network(), "regression", "all", structure)
    la.fit(data())
    return la


def align(**options: Any) -> Any:
    tangent = Tangent(network())
    ours = {"diag": estimate.diagonal(tangent, Gaussian(), data())}
    return directions.alignment(tangent, Gaussian(), data(), ours, **options)


def swag(**options: Any) -> Any:
    return swag_variance(network(), data(), Gaussian(), **({"snapshots": 2} | options))


def low_rank(**options: Any) -> Any:
    return estimate.low_rank(Tangent(network()), Gaussian(), data(), **({"rank": 1} | options))


def scored(probability: float) -> Any:
    return metrics.entropy(torch.tensor([probability, 1 - probability], dtype=torch.float64))


def classes(target: int) -> Any:
    return metrics.nll(HALF, torch.tensor([target]))


def linear_mode(**options: Any) -> Any:
    return fitted("full").linear_mode(data(), **options)


def steps(**options: Any) -> GaussNewton:
    return GaussNewton(network(), Gaussian(), **options)


def posterior() -> Any:
    return Laplace(network(), "regression", "all", "diag")


SPACE = ParamSpace.of(network())
PRODUCTS = MatrixFree(DenseProducts(torch.ones(1, 2)), Effort(0.1))
BOUNDARIES = (
    Boundary("seed of a table", check_seed, (0, 2**64 - 1), (-1, 2**64, True, 1.0)),
    Boundary(
        "rows of a chunk", lambda n: list(open_table(pd.DataFrame({"a": [1, 2]})).chunks(size=n)), (1,), (0, True)
    ),
    Boundary("level of a quantile", partial(quantile, torch.ones(3)), (SMALL, ALMOST), (0.0, 1.0, nan)),
    Boundary("deviation of a score", lambda s: amount_scores(*torch.tensor([[1.0], [s], [1.0]])), (SMALL,), (0.0, nan)),
    Boundary("level of a coverage", lambda p: metrics.coverage(*torch.ones(3, 1), p), (SMALL, ALMOST), (0.0, 1.0, nan)),
    Boundary("bins", lambda n: metrics.calibration_error(HALF, torch.tensor([0]), n), (1,), (0,)),
    Boundary("probability", scored, (0.0, 1.0), (-0.01, 1.01, nan)),
    Boundary("class", classes, (0, 1), (-1, 2)),
    Boundary("variance", lambda v: metrics.gaussian_nll(*torch.tensor([[1.0], [v], [1.0]])), (SMALL,), (0.0, nan)),
    Boundary("prior precision", lambda p: Prior.isotropic(SPACE, p), (0.0, SMALL), (-SMALL, inf, nan)),
    Boundary(
        "number of a group",
        lambda n: Prior.grouped(SPACE, torch.full((SPACE.size,), 1).index_fill(0, torch.tensor([0]), n)),
        (0,),
        (-1,),
    ),
    Boundary(
        "prior precision of a posterior",
        lambda p: checked_precision(p, PLACE),
        (0.0,),
        (-SMALL, inf, nan),
        ([], [[1.0]]),
    ),
    Boundary(
        "sigma of a posterior", lambda s: checked_noise(s, PLACE, True), (SMALL, [2.0]), (0.0, inf, nan), ([[2.0]],)
    ),
    Boundary("sigma where there is none", lambda s: checked_noise(s, PLACE, False), (1.0,), (ALMOST, 2.0)),
    Boundary("temperature", lambda t: checked_temperature(t, PLACE), (SMALL,), (0.0, inf, nan), ([1.0, 2.0],)),
    Boundary("sigma of a likelihood", Gaussian, (SMALL,), (0.0, inf, nan, torch.ones(1, 1), torch.ones(0))),
    Boundary("sigma to train from", lambda s: starting_noise(Gaussian(), s, SPACE, False), (SMALL,), (0.0, inf, nan)),
    Boundary("sigma of classes", lambda s: starting_noise(Categorical(), s, SPACE, False), (None, 1.0), (0.5, 2.0)),
    Boundary("epochs", lambda n: check_numbers(epochs=n), (1,), (0,)),
    Boundary("every", lambda n: check_numbers(every=n), (1,), (0,)),
    Boundary("points", lambda n: check_numbers(points=n), (1,), (0,)),
    Boundary("burn-in", lambda n: check_numbers(burn_in=n), (0,), (-1,)),
    Boundary("steps", lambda n: check_numbers(steps=n), (0,), (-1,)),
    Boundary("rate", lambda r: check_numbers(rate=r), (SMALL,), (0.0, inf, nan)),
    Boundary("prior of a curvature", Diagonal(torch.ones(3)).with_prior, (0.0, SMALL), (-SMALL, inf, nan)),
    Boundary("precisions to compare", lambda p: check_precisions(torch.tensor([p])), (0.0,), (-SMALL, inf, nan)),
    Boundary("number of draws", lambda n: normal((n, 2), torch.ones(1), None), (0, 1), (-1,)),
    Boundary("eigenvalue", lambda v: LowRank(torch.ones(2, 1), torch.tensor([v])), (0.0,), (-SMALL,)),
    Boundary("data points of a subset", lambda n: estimate.subset(data(), n), (1, 6), (0, 7)),
    Boundary(
        "exact columns",
        lambda n: estimate.mixed_diagonal(Tangent(network()), Gaussian(), data(), columns=n),
        (0,),
        (-1,),
    ),
    Boundary("draws of targets", monte_carlo, (1,), (0,)),
    Boundary("projections", projections, (1,), (0,)),
    Boundary("rank", lambda n: low_rank(rank=n), (1,), (0,)),
    Boundary("passes of low rank", lambda n: low_rank(passes=n, gram_rows=0), (2,), (1,)),
    Boundary("dense limit", lambda n: KroneckerOptions(dense_limit=n), (0,), (-1,)),
    Boundary("snapshots", lambda n: swag(snapshots=n), (2,), (1,)),
    Boundary("epochs between snapshots", lambda n: swag(every=n), (1,), (0,)),
    Boundary("rate of SWAG", lambda r: swag(lr=r), (SMALL,), (0.0, inf, nan)),
    Boundary("momentum of SWAG", lambda m: swag(momentum=m), (0.0, 0.99), (-0.1, 1.0, nan)),
    Boundary("decay of SWAG", lambda d: swag(decay=d), (0.0, 0.1), (-SMALL, inf, nan)),
    Boundary("last layers", lambda n: last_layers(SPACE, network(), data()[0][0], n), (1, 2), (0, True), (1.0,)),
    Boundary("damping of directions", lambda d: align(damping=d), (1e-3,), (0.0, inf, nan)),
    Boundary("tolerance of directions", lambda t: align(damping=1.0, tolerance=t), (1e-9, ALMOST), (0.0, 1.0, nan)),
    Boundary("iterations of directions", lambda n: align(damping=1.0, iterations=n), (1,), (0,)),
    Boundary(
        "rows of attach", lambda n: lapwing.attach(network(), data(), "regression", rows=n), (0, 1), (-1, True), (1.0,)
    ),
    Boundary("passes of a linear mode", lambda n: linear_mode(max_passes=n), (5,), (4, True), (5.0,)),
    Boundary("tolerance of a linear mode", lambda t: linear_mode(tolerance=t), (1e-6, ALMOST, None), (0.0, 1.0, nan)),
    Boundary("n_subset", lambda n: Laplace(network(), "regression", "all", "gp", n_subset=n), (1, None), (0,)),
    Boundary(
        "draws per point",
        lambda n: Laplace(network(), "regression", "all", "kron", estimator="mc", backend_kwargs={"mc_samples": n}),
        (1,),
        (0, 1.0),
    ),
    Boundary("grid of precisions", lambda n: Exponents(-1, 1, n).values(torch.ones(1)), (1, 2), (0,)),
    Boundary("ends of a grid", lambda high: Exponents(0, high, 3), (0, 1), (-1e-9, nan)),
    Boundary("base of a grid", lambda base: Exponents(0, 1, 3, base), (SMALL, ALMOST, 2), (0.0, 1.0, inf, nan)),
    Boundary(
        "first precision",
        lambda p: starting_precision(SPACE, "scalar", p),
        (SMALL,),
        (0.0, -1.0, inf, nan),
        ([1.0, 2.0],),
    ),
    Boundary("counts of points", lambda n: check_counts([n], 5), (SMALL,), (0.0, -1.0, inf)),
    Boundary("points behind counts", lambda n: check_counts([1.0], n), (1,), (0,)),
    Boundary(
        "draws of a prediction", lambda n: fitted()(data()[0][0], pred_type="nn", n_samples=n), (2,), (1, 0, True)
    ),
    Boundary(
        "draws of gamma",
        lambda n: fitted().evidence.sampled_effective_parameters(fitted().prior, samples=n),
        (2,),
        (1,),
    ),
    Boundary("tau", lambda v: Damping(v, None), (0.0, SMALL), (-SMALL, inf, nan)),
    Boundary("zeta", lambda v: Damping(1.0, v), (0.0, None), (-SMALL, inf, nan)),
    Boundary("decay of tau", lambda v: Damping(1.0, 1.0, tau_decay=v), (SMALL, ALMOST), (0.0, 1.0, nan)),
    Boundary("decay of zeta", lambda v: Damping(1.0, 1.0, zeta_decay=v), (SMALL, ALMOST), (0.0, 1.0, nan)),
    Boundary("steps between looks at tau", lambda n: Damping(1.0, 1.0, tau_every=n), (1,), (0, True)),
    Boundary("steps between looks at zeta", lambda n: Damping(1.0, 1.0, zeta_every=n), (1,), (0, True)),
    Boundary("moving average", lambda v: steps(moving_average=v), (0.0, ALMOST), (-SMALL, 1.0, nan, True)),
    Boundary("refresh", lambda n: steps(refresh=n), (1,), (0, True)),
    Boundary("micro-batch", lambda n: steps(micro_batch=n), (1, None), (0, True)),
    Boundary("weight decay", lambda v: steps(weight_decay=v), (0.0, SMALL), (-SMALL, inf, nan)),
    Boundary("points of a prior", lambda n: steps(prior=Prior.isotropic(SPACE), points=n), (1,), (0, True, None)),
    Boundary("epochs of steps", lambda n: steps().fit(data(), epochs=n), (1,), (0, True)),
    Boundary("number of steps", lambda n: steps().fit(data(), steps=n), (1,), (0, True)),
    Boundary("tolerance of steps", lambda v: steps().fit(data(), steps=1, tolerance=v), (0.0, 0.5), (-SMALL, 1.0, nan)),
    Boundary(
        "steps to a mode", lambda n: lapwing.to_mode(posterior(), data(), steps=n, tolerance=ALMOST), (1,), (0, True)
    ),
    Boundary(
        "tolerance of a mode",
        lambda v: lapwing.to_mode(posterior(), data(), steps=1, tolerance=v),
        (ALMOST,),
        (0.0, 1.0),
    ),
    Boundary("forgetting", lambda v: Schedule(forgetting=v), (0, 0.0, ALMOST), (-SMALL, 1.0, nan, True)),
    Boundary("first curvature", lambda v: Schedule(start=v), (0.0, SMALL), (-SMALL, inf, nan, True)),
    Boundary("weight of a curvature", lambda v: Schedule(weight=v), (SMALL,), (0.0, inf, nan, True)),
    Boundary("temperature of a schedule", lambda v: Schedule(temperature=v), (SMALL,), (0.0, inf, nan, True)),
    Boundary("prior of a schedule", lambda v: Schedule(prior_precision=v, start=1.0), (0.0,), (-SMALL, inf, nan, True)),
    Boundary("prior without a start", lambda v: Schedule(prior_precision=v), (SMALL,), (0.0,)),
    Boundary("draws of a curvature", lambda n: estimator_of("sampled", n), (1, 2), (0, True)),
    Boundary("draws where none are", lambda n: estimator_of("exact", n), (1,), (2,)),
    Boundary("tolerance of solves", Effort, (SMALL, ALMOST), (0.0, 1.0, nan)),
    Boundary("iterations of solves", lambda n: Effort(0.1, iterations=n), (2,), (1, True)),
    Boundary("probes", lambda n: Effort(0.1, probes=n), (2,), (1, True)),
    Boundary("steps of Lanczos", lambda n: Effort(0.1, steps=n), (1,), (0, True)),
    Boundary("systems at once", lambda n: Effort(0.1, block=n), (1, None), (0, True)),
    Boundary("multiple of products", lambda v: (PRODUCTS * v).with_prior(1.0), (0.0, SMALL), (-1.0, inf, nan)),
    Boundary("prior of products", PRODUCTS.with_prior, (SMALL, 1.0), (0.0, -1.0, inf, nan)),
    Boundary("weights of a prior", lambda n: Earlier(torch.zeros(n), Diagonal(torch.ones(3)), 1.0), (3,), (2, 4)),
    Boundary("base of a prior", lambda v: Earlier(torch.zeros(3), Diagonal(torch.ones(3)), v), (0.0,), (-1.0, inf)),
    Boundary("mean of a prior", lambda v: Earlier(torch.tensor([v]), Diagonal(torch.ones(1)), 1.0), (0.0,), (inf,)),
    Boundary("multiplier of tasks", lambda v: Continual(network(), "regression", multiplier=v), (0, SMALL), (-1, inf)),
    Boundary("prior of tasks", lambda v: Continual(network(), "regression", prior_precision=v), (0,), (-1, inf, nan)),
    Boundary("epsilon", lambda v: Continual(network(), "regression", method="si", epsilon=v), (SMALL,), (0, -1, inf)),
    Boundary("inputs of a network", lambda n: Spec(n, 1), (1,), (0, True)),
    Boundary("outputs of a network", lambda n: Spec(1, n), (1,), (0, True)),
    Boundary("width of a network", lambda n: Spec(1, 1, width=n), (1,), (0, True)),
    Boundary("depth of a network", lambda n: Spec(1, 1, depth=n), (0,), (-1, True)),
    Boundary(
        "tolerance of invariance",
        lambda v: lapwing.scale_invariant_groups(network(), data()[0][0], tolerance=v),
        (SMALL,),
        (0.0, inf, nan),
    ),
    Boundary("number of a group of variances", lambda n: check_groups(torch.tensor([n, 0]), 2), (0, 3), (-1,)),
    Boundary("numbers of groups", lambda n: check_groups(torch.zeros(n, dtype=torch.int64), 2), (2,), (1, 3)),
)


@pytest.mark.parametrize(
    ("boundary", "value"),
    [
        pytest.param(
            each, value, id=f"{each.name}-{value}", marks=pytest.mark.mistyped if isinstance(value, list) else ()
        )
        for each in BOUNDARIES
        for value in each.taken
    ],
)
def test_the_last_number_on_this_side_is_taken(boundary: Boundary, value: Any) -> None:
    boundary.call(value)


@pytest.mark.parametrize(
    ("boundary", "value"),
    [
        pytest.param(each, value, id=f"{each.name}-{value}", marks=marks)
        for each in BOUNDARIES
        for values, marks in ((each.refused, ()), (each.mistyped, pytest.mark.mistyped))
        for value in values
    ],
)
def test_the_first_number_on_the_other_side_is_refused(boundary: Boundary, value: Any) -> None:
    with pytest.raises(LapwingError):
        boundary.call(value)
