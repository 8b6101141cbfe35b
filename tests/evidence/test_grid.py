"""Prior precisions chosen on held-out data: against a plain loop of predictions, one value after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lapwing import estimate, metrics
from lapwing.errors import CurvatureError, DataError, LapwingWarning, LikelihoodError, OptionError
from lapwing.evidence import grid as validation
from lapwing.likelihoods import Bernoulli, Categorical, HeteroscedasticGaussian, Likelihood, Poisson
from lapwing.likelihoods import Gaussian as GaussianLikelihood
from lapwing.linalg import Curvature
from lapwing.posterior import Gaussian
from lapwing.predictive import candidates, probabilities, variances
from lapwing.tangent import Tangent
from unchanged import unchanged

F64 = torch.float64
PRECISIONS = torch.logspace(-3, 3, 9, dtype=F64)
Batches = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Problem:
    tangent: Tangent
    likelihood: Likelihood
    curvature: Curvature
    x: Tensor
    y: Tensor

    def batches(self, *sizes: int) -> Batches:
        return list(zip(self.x.split(sizes or len(self.x)), self.y.split(sizes or len(self.y)), strict=True))

    def posterior(self, precision: float, scale: float = 1.0) -> Gaussian:
        mean = self.tangent.space.values(self.tangent.model)
        return Gaussian(mean, (self.curvature * scale).with_prior(precision))

    def grid(self, precisions: Any = PRECISIONS, batches: Any = None, **options: Any) -> validation.Grid:
        batches = self.batches() if batches is None else batches
        return validation.grid(self.curvature, self.tangent.at, self.likelihood, batches, precisions, **options)


def problem(
    likelihood: Likelihood,
    outputs: int,
    draw: Callable[[Tensor], Tensor],
    estimator: Callable[..., Curvature] = estimate.kflr,
    model: nn.Module | None = None,
    inputs: tuple[int, ...] = (3,),
) -> Problem:
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, outputs))
    model = model.double().eval()
    x = torch.randn(32, *inputs, dtype=F64)
    with torch.no_grad():
        y = draw(model(x))
    tangent = Tangent(model)
    return Problem(tangent, likelihood, estimator(tangent, likelihood, [(x[:20], y[:20])]), x[20:], y[20:])


def classes(f: Tensor) -> Tensor:
    return torch.randint(f.shape[-1], f.shape[:-1])


def classification(estimator: Callable[..., Curvature] = estimate.kflr) -> Problem:
    return problem(Categorical(), 4, classes, estimator)


def regression(estimator: Callable[..., Curvature] = estimate.kflr) -> Problem:
    return problem(GaussianLikelihood(), 2, lambda f: f + 0.3 * torch.randn_like(f), estimator)


every_estimator = pytest.mark.parametrize("estimator", [estimate.full, estimate.diagonal, estimate.kflr])


# -- against the plain loop -------------------------------------------------------------------------------------------


@every_estimator
def test_classification_is_a_plain_loop_of_predictions(estimator: Callable[..., Curvature]) -> None:
    found = classification(estimator)
    expected = []
    for precision in PRECISIONS.tolist():
        p = probabilities(found.posterior(precision, 1 / 0.5), found.tangent.at(found.x))
        expected.append(metrics.nll(p, found.y))
    with unchanged(found.tangent.model):
        grid = found.grid(batches=found.batches(5, 7), temperature=0.5)
    torch.testing.assert_close(grid.scores, torch.tensor(expected, dtype=F64), rtol=1e-9, atol=0)
    assert grid.best == float(PRECISIONS[min(range(9), key=expected.__getitem__)])
    assert torch.equal(grid.precisions, PRECISIONS)


@every_estimator
def test_regression_is_a_plain_loop_of_predictions(estimator: Callable[..., Curvature]) -> None:
    found = regression(estimator)
    expected = []
    for precision in PRECISIONS.tolist():
        mean, variance = variances(found.posterior(precision, 1 / 0.3**2), found.tangent.at(found.x), sigma=0.3)
        expected.append(2 * metrics.gaussian_nll(mean, variance, found.y))  # two outputs
    grid = found.grid(batches=found.batches(5, 7), sigma=0.3)
    torch.testing.assert_close(grid.scores, torch.tensor(expected, dtype=F64), rtol=1e-9, atol=0)


def test_the_noise_of_the_likelihood_and_sigma_are_one_noise() -> None:
    """A curvature that already carries 1/sigma^2, and one at unit noise with sigma given: the same scores."""
    plain = regression()
    noisy = GaussianLikelihood(sigma=torch.tensor([0.3, 0.3]))
    train = (torch.randn(5, 3, dtype=F64), torch.randn(5, 2, dtype=F64))
    unit = estimate.kflr(plain.tangent, GaussianLikelihood(), [train])
    scaled = estimate.kflr(plain.tangent, noisy, [train])
    args = plain.tangent.at, plain.batches(), PRECISIONS
    one = validation.grid(unit, args[0], GaussianLikelihood(), *args[1:], sigma=0.3)
    two = validation.grid(scaled, args[0], noisy, *args[1:])
    torch.testing.assert_close(one.scores, two.scores, rtol=1e-6, atol=0)


@pytest.mark.parametrize("outputs", [1, 3], ids=["one logit", "several labels"])
def test_bernoulli_is_a_plain_loop_over_every_label(outputs: int) -> None:
    found = problem(Bernoulli(), outputs, lambda f: torch.randint(2, f.shape).double())
    expected = []
    for precision in PRECISIONS.tolist():
        mean, variance = variances(found.posterior(precision), found.tangent.at(found.x))
        p = torch.sigmoid(mean / torch.sqrt(1 + torch.pi / 8 * variance))
        expected.append(-torch.where(found.y == 1, p, 1 - p).log().sum(-1).mean())
    torch.testing.assert_close(found.grid().scores, torch.stack(expected), rtol=1e-9, atol=0)


@pytest.mark.parametrize("link", ["probit_full", "bridge", "bridge_norm"])
def test_links_with_covariances_are_a_plain_loop_too(link: str) -> None:
    found = classification()
    posteriors = [found.posterior(precision, 2.0) for precision in PRECISIONS.tolist()]
    expected = [metrics.nll(probabilities(p, found.tangent.at(found.x), link), found.y) for p in posteriors]
    scores = found.grid(batches=found.batches(5, 7), link=link, temperature=0.5).scores
    torch.testing.assert_close(scores, torch.tensor(expected, dtype=F64), rtol=1e-9, atol=0)


def test_links_with_covariances_keep_within_the_budget_of_the_tangent() -> None:
    found = classification()
    whole = found.grid(link="bridge").scores
    linear = found.tangent.at(found.x)
    found.tangent.budget = linear.cotangent_bytes * linear.outputs // 4
    assert len(list(found.tangent.at(found.x).parts())) > 2
    torch.testing.assert_close(found.grid(link="bridge").scores, whole, rtol=1e-9, atol=0)


@pytest.mark.parametrize("likelihood", [Poisson(), HeteroscedasticGaussian()], ids=lambda x: type(x).__name__)
def test_other_likelihoods_average_over_draws_of_the_marginals(likelihood: Likelihood) -> None:
    """Against Gauss-Hermite quadrature over each output, within four standard errors."""
    found = problem(likelihood, 2, lambda f: likelihood.sample(f))
    nodes, weights = torch.from_numpy(_hermite()[0]), torch.from_numpy(_hermite()[1])
    first, second = torch.meshgrid(nodes, nodes, indexing="ij")
    both = torch.stack([first.flatten(), second.flatten()], -1)
    joint = torch.outer(weights, weights).flatten()
    samples = 4000
    grid = found.grid(precisions=[0.5, 5.0], samples=samples, generator=torch.Generator().manual_seed(0))
    for score, precision in zip(grid.scores.tolist(), (0.5, 5.0), strict=True):
        mean, variance = variances(found.posterior(precision), found.tangent.at(found.x))
        values = torch.stack([likelihood.log_prob(mean + variance.sqrt() * z, found.y).exp() for z in both])
        p = joint @ values
        spread = (
            (joint @ values.square() - p.square()).clamp_min(0) / p.square() / samples
        )  # of log p, by the delta rule
        assert abs(score + float(p.log().mean())) < 4 * float(spread.mean().sqrt()) + 1e-3


def _hermite() -> Any:
    import numpy as np

    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    return nodes, weights / weights.sum()


def test_draws_come_from_the_generator() -> None:
    found = problem(Poisson(), 1, lambda f: torch.poisson(f.exp()))
    one, two = (found.grid(samples=5, generator=torch.Generator().manual_seed(1)).scores for _ in range(2))
    assert torch.equal(one, two)
    assert not torch.equal(one, found.grid(samples=5, generator=torch.Generator().manual_seed(2)).scores)


@pytest.mark.parametrize("shape", ["sequence", "image"])
def test_positions_keep_the_class_axis_of_the_likelihood(shape: str) -> None:
    if shape == "sequence":
        model, inputs, last = nn.Linear(3, 4), (5, 3), lambda f: f
    else:
        model, inputs, last = nn.Conv2d(1, 4, 3, padding=1), (1, 4, 4), lambda f: f.movedim(1, -1)
    found = problem(Categorical(ignore_index=-1), 4, lambda f: classes(last(f)), model=model, inputs=inputs)
    found.y[:, 0] = -1  # without a label
    expected = []
    for precision in PRECISIONS.tolist():
        mean, variance = variances(found.posterior(precision), found.tangent.at(found.x))
        p = torch.softmax(last(mean / torch.sqrt(1 + torch.pi / 8 * variance)), -1)
        log_p = p.log().gather(-1, found.y.clamp_min(0).unsqueeze(-1)).squeeze(-1)
        expected.append(-(log_p * (found.y >= 0)).flatten(1).sum(1).mean())
    torch.testing.assert_close(found.grid().scores, torch.stack(expected), rtol=1e-9, atol=0)
    shapes = []
    found.grid(score=lambda p, y: shapes.append(p.shape) or float(last(p).sum(-1).mean()))
    assert set(shapes) == {found.tangent.at(found.x).value.shape}


# -- scores -----------------------------------------------------------------------------------------------------------


@dataclass
class Mean:
    """A running average, in the manner of torchmetrics."""

    values: list[float] = field(default_factory=list)
    resets: int = 0

    def reset(self) -> None:
        self.values, self.resets = [], self.resets + 1

    def update(self, prediction: Any, targets: Tensor) -> None:
        self.values += (-prediction.gather(1, targets[:, None]).log()).flatten().tolist()

    def compute(self) -> float:
        return sum(self.values) / len(self.values)


def test_d2_a_grid_search_keeps_nothing_from_one_value_to_the_next() -> None:
    """Each score is that of its precision alone, whatever came before; also where the score is an object with state."""
    found = classification()
    forward = found.grid(batches=found.batches(5, 7))
    backward = found.grid(PRECISIONS.flip(0), batches=found.batches(5, 7))
    torch.testing.assert_close(forward.scores, backward.scores.flip(0), rtol=1e-9, atol=0)
    assert forward.best == pytest.approx(backward.best)
    metric = Mean()
    metric.values = [1e6]  # left from somewhere else
    gathered = found.grid(batches=found.batches(5, 7), score=metric)
    torch.testing.assert_close(gathered.scores, forward.scores, rtol=1e-9, atol=0)
    assert metric.resets == len(PRECISIONS)


def test_d3_a_regression_is_scored_by_what_depends_on_the_prior() -> None:
    """The mean does not; the score has a minimum inside the grid, where the predicted variance fits the residuals."""
    found = regression()
    grid = found.grid(torch.logspace(-6, 6, 25, dtype=F64), sigma=0.25)
    assert float(grid.scores.max() - grid.scores.min()) > 0.1
    assert grid.index not in (0, 24)
    squares = found.grid(score=lambda moments, y: metrics.rmse(moments[0], y))
    assert float(squares.scores.max() - squares.scores.min()) == 0


def test_a_function_is_averaged_over_data_points() -> None:
    found = classification()
    sizes = []

    def score(p: Tensor, y: Tensor) -> float:
        sizes.append(len(y))
        return metrics.nll(p, y)

    by_function = found.grid(batches=found.batches(1, 11), score=score)
    torch.testing.assert_close(by_function.scores, found.grid().scores, rtol=1e-9, atol=0)
    assert sizes == [1] * 9 + [11] * 9


def test_a_function_of_a_regression_sees_mean_and_variance() -> None:
    found = regression()
    scores = found.grid(sigma=0.3, score=lambda moments, y: 2 * metrics.gaussian_nll(moments[0], moments[1], y)).scores
    torch.testing.assert_close(scores, found.grid(sigma=0.3).scores, rtol=1e-9, atol=0)


@pytest.mark.parametrize("make", [classification, regression])
def test_the_split_into_batches_does_not_matter(make: Callable[[], Problem]) -> None:
    found = make()
    whole = found.grid()
    for sizes in ((1,) * 12, (3, 9), (5, 5, 2)):
        torch.testing.assert_close(found.grid(batches=found.batches(*sizes)).scores, whole.scores, rtol=1e-9, atol=0)


def test_the_data_is_linearised_once_per_batch() -> None:
    found, calls = classification(), []
    at = lambda x: calls.append(len(x)) or found.tangent.at(x)  # noqa: E731
    validation.grid(found.curvature, at, found.likelihood, found.batches(5, 7), PRECISIONS)
    assert calls == [5, 7]


def test_equal_scores_give_the_first() -> None:
    assert classification().grid(score=lambda p, y: 1.0).index == 0


def test_a_score_that_is_not_finite_never_wins_and_is_named() -> None:
    found = classification()
    values = iter([float("nan"), 3.0, float("-inf"), 2.0, 2.5] + [4.0] * 4)
    with pytest.warns(LapwingWarning, match=r"score is (nan at prior precision 0.001|-inf at prior precision 0.0316)"):
        grid = found.grid(score=lambda p, y: next(values))
    assert grid.index == 3
    with pytest.raises(DataError, match=r"no score is finite \(the first is nan at prior precision 0.001\)"):
        found.grid(score=lambda p, y: float("nan"))


# -- pseudo-data ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("link", ["probit", "probit_full"])
def test_pseudo_data_are_a_plain_loop_over_counts_and_precisions(link: str) -> None:
    found, counts, precisions = classification(), [5.0, 20.0, 200.0], [0.1, 1.0, 10.0, 100.0]
    grid = validation.pseudo_data(
        found.curvature,
        found.tangent.at,
        found.likelihood,
        found.batches(5, 7),
        counts,
        precisions,
        points=20,
        link=link,
    )
    expected = torch.empty(3, 4, dtype=F64)
    for i, count in enumerate(counts):
        for j, precision in enumerate(precisions):
            p = probabilities(found.posterior(precision, count / 20), found.tangent.at(found.x), link)
            expected[i, j] = metrics.nll(p, found.y)
    torch.testing.assert_close(grid.scores, expected, rtol=1e-9, atol=0)
    i, j = divmod(int(expected.argmin()), 4)
    assert grid.best == (counts[i], precisions[j])
    plain = found.grid(precisions, link=link)
    torch.testing.assert_close(grid.scores[1], plain.scores, rtol=1e-9, atol=0)  # as many points as there are


def test_pseudo_data_refuse_counts_that_are_none() -> None:
    found = classification()
    args = found.curvature, found.tangent.at, found.likelihood, found.batches()
    with pytest.raises(CurvatureError, match=r"counts go down to 0.*expected numbers > 0"):
        validation.pseudo_data(*args, [0.0, 1.0], [1.0], points=20)
    with pytest.raises(CurvatureError, match=r"counts: .*negative \(-1\)"):
        validation.pseudo_data(*args, [-1.0], [1.0], points=20)
    with pytest.raises(CurvatureError, match="of 0 points; expected numbers > 0"):
        validation.pseudo_data(*args, [1.0], [1.0], points=0)


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precisions", "message"),
    [
        ([1.0, -2.0], r"prior precisions: .*negative \(-2\); expected"),
        ([1.0, float("nan")], "prior precisions: .*NaN or infinite; expected"),
        ([float("inf")], "prior precisions: .*NaN or infinite; expected"),
        ([], r"prior precisions: .*shape \(0,\).*expected a vector of at least one"),
    ],
)
def test_what_is_no_precision_is_refused(precisions: list[float], message: str) -> None:
    with pytest.raises(CurvatureError, match=message):
        classification().grid(precisions)


def test_a_loader_without_batches_is_refused() -> None:
    with pytest.raises(DataError, match="validation loader yields no batch; expected at least one"):
        classification().grid(batches=[])


def test_a_bad_batch_is_named() -> None:
    found = classification()
    good = found.batches()[0]
    with pytest.raises(DataError, match="validation batch 1: a batch is a Tensor; expected a pair"):
        found.grid(batches=[good, found.x])
    with pytest.raises(LikelihoodError, match=r"validation batch 1: .*target 4"):
        found.grid(batches=[good, (found.x[:1], torch.tensor([4]))])
    with pytest.raises(DataError, match=r"validation batch 0: .*NaN"):
        found.grid(batches=[(found.x * float("nan"), found.y)])


def test_options_that_do_not_fit_are_refused() -> None:
    found = classification()
    with pytest.raises(OptionError, match=r"unknown link 'probbit'; expected one of \['bridge'"):
        found.grid(link="probbit")
    with pytest.raises(CurvatureError, match=r"sigma is 0.5 for Categorical, which has no noise level; expected sigma"):
        found.grid(sigma=0.5)
    for name in ("sigma", "temperature"):
        for value in (0.0, -1.0, float("nan")):
            with pytest.raises(CurvatureError, match=f"{name} is {value}; expected a finite number > 0"):
                found.grid(**{name: value})
    labels = problem(Bernoulli(), 3, lambda f: torch.randint(2, f.shape).double())
    with pytest.raises(OptionError, match=r"link 'bridge' for Bernoulli.*expected 'probit'"):
        labels.grid(link="bridge")
    sequence = problem(Categorical(), 4, classes, model=nn.Linear(3, 4), inputs=(5, 3))
    with pytest.raises(LikelihoodError, match=r"shape \(12, 5, 4\); a link with covariances needs .*Use link='probit'"):
        sequence.grid(link="bridge")
    counts = problem(Poisson(), 1, lambda f: torch.poisson(f.exp()))
    with pytest.raises(OptionError, match="0 draws of the outputs; expected at least one"):
        counts.grid(samples=0)


def test_a_metric_that_is_better_when_larger_is_refused() -> None:
    metric = Mean()
    metric.higher_is_better = True  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(OptionError, match=r"Mean is better when larger; expected a loss.*negative"):
        classification().grid(score=metric)


@pytest.mark.parametrize("size", [1, 5000])
@pytest.mark.parametrize("likelihood", [Categorical(), Bernoulli(), Poisson()], ids=lambda each: type(each).__name__)
def test_candidates_are_scored_in_parts_as_all_at_once(
    likelihood: Likelihood, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of a cache holds one candidate at a time, or two; the order of candidates stays."""
    outputs = 4 if isinstance(likelihood, Categorical) else 2
    made = problem(likelihood, outputs, likelihood.sample)
    draws = {} if isinstance(likelihood, (Categorical, Bernoulli)) else {"samples": 3}

    def scores() -> Tensor:
        generator = {"generator": torch.Generator().manual_seed(0)} if draws else {}
        return made.grid(**draws, **generator).scores

    whole = scores()
    monkeypatch.setattr(candidates, "CACHE", size)
    torch.testing.assert_close(scores(), whole, rtol=1e-12, atol=0)
    assert len(whole.unique()) == len(PRECISIONS)
