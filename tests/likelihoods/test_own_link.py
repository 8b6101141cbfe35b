"""Likelihoods of a user's own, with links that the library has never heard of, go the whole way through `Laplace`.

Both are written here, as docs/extending.md says, and nothing else of the library is touched. The network is linear in
its weights, so that the Gaussian of its outputs is known by hand; integrals over it are plain sums over many points.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from lapwing import BaseLaplace, Laplace
from lapwing.distributions import Distribution
from lapwing.errors import LikelihoodError, OptionError
from lapwing.evidence import grid
from lapwing.laplace.calibration import COVARIANCE, calibrate
from lapwing.likelihoods import Bernoulli
from lapwing.likelihoods.base import Positionwise, require_real, require_same_shape
from lapwing.likelihoods.links import Link, integrated
from lapwing.reporting import report
from lapwing.reporting.observations import observe
from lapwing.reporting.predictions import Classes, Counts

F64 = torch.float64
Z = torch.linspace(-9, 9, 401, dtype=F64)
W = torch.softmax(-Z.square() / 2, 0)
GRID = torch.logspace(-3, 3, 25, dtype=F64)


class PerOutput(Positionwise):
    """Targets of the shape of the outputs."""

    convex: ClassVar[bool] = True
    per_output: ClassVar[bool] = True

    def _check_target(self, f: Tensor, y: Tensor) -> None:
        require_same_shape(self, f, y)
        require_real(self, y, allow_bool=False)

    def _invalid(self, f: Tensor, y: Tensor) -> Bool[Tensor, "*target"]:
        return y < 0

    def _domain(self, f: Tensor) -> tuple[str, str]:
        return "numbers >= 0", "check the targets"


def cloglog(f: Tensor) -> Tensor:
    return -torch.expm1(-f.exp())


@dataclass(frozen=True)
class Events(PerOutput):
    """P(y = 1) = 1 - exp(-exp f): whether a Poisson process with log-rate f had an event."""

    links: ClassVar[Mapping[str, Link]] = {"probit": integrated(cloglog), "cloglog": integrated(cloglog)}

    def _log_prob(self, f: Float[Tensor, "*lead C"], y: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead"]:
        return (y * cloglog(f).log() - (1 - y) * f.exp()).sum(-1)

    def _grad(self, f: Float[Tensor, "*lead C"], y: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead C"]:
        return (1 - y) * f.exp() - y * f.exp() / torch.expm1(f.exp())

    def _fisher(self, f: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead C C"]:
        return torch.diag_embed(f.exp().square() / torch.expm1(f.exp()))

    def _fisher_sqrt(self, f: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead C R"]:
        return torch.diag_embed(f.exp() / torch.expm1(f.exp()).sqrt())

    def _hessian_diagonal(self, f: Float[Tensor, "*lead C"], y: Tensor) -> Float[Tensor, "*lead C"]:
        u, of_one = f.exp(), torch.expm1(f.exp())
        return (1 - y) * u + y * u * (u * u.exp() - of_one) / of_one.square()

    def _hessian(self, f: Float[Tensor, "*lead C"], y: Tensor) -> Float[Tensor, "*lead C C"]:
        return torch.diag_embed(self._hessian_diagonal(f, y))

    def _hessian_sqrt(self, f: Float[Tensor, "*lead C"], y: Tensor) -> Float[Tensor, "*lead C R"]:
        return torch.diag_embed(self._hessian_diagonal(f, y).sqrt())

    def _sample(self, f: Float[Tensor, "*lead C"], generator: torch.Generator | None) -> Float[Tensor, "*lead C"]:
        return torch.bernoulli(cloglog(f), generator=generator)

    def _predicted(self, f: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead C"]:
        return cloglog(f)

    def _outputs_of(self, p: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead C"]:
        return torch.log(-torch.log1p(-p))


R = 3.0


def log_binomial(y: Tensor, f: Tensor) -> Tensor:
    """Of counts y with mean exp f and variance exp f + exp(2 f) / R."""
    t = f - torch.tensor(R, dtype=f.dtype).log()
    constant = torch.lgamma(y + R) - torch.lgamma(torch.tensor(R, dtype=f.dtype)) - torch.lgamma(y + 1)
    return constant + y * logsigmoid(t) + R * logsigmoid(-t)


@dataclass(frozen=True, eq=False)
class OverdispersedCounts(Distribution):
    """Negative-binomial counts with a Gaussian log-mean: sums over points of f and over counts."""

    discrete: ClassVar[bool] = True

    log_mean: Float[Tensor, " n"]
    variance: Float[Tensor, " n"]

    @property
    def mean(self) -> Float[Tensor, " n"]:
        return (self.log_mean + self.variance / 2).exp()

    @property
    def deviation(self) -> Float[Tensor, " n"]:
        return torch.hypot(*self.parts)

    @property
    def epistemic(self) -> Float[Tensor, " n"]:
        return self.variance.sqrt()

    @property
    def parts(self) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        square = (2 * self.log_mean + 2 * self.variance).exp()
        return (square - self.mean.square()).clamp_min(0).sqrt(), (self.mean + square / R).sqrt()

    def log_prob(self, y: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        f = self.log_mean.unsqueeze(-1) + self.epistemic.unsqueeze(-1) * Z[::2]
        return torch.logsumexp(log_binomial(y.unsqueeze(-1), f) + (2 * W[::2]).log(), -1)

    def cdf(self, y: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        counts = range(int(y.max()) + 1)
        p = [self.log_prob(torch.full_like(y, k)).exp() * (k <= y) for k in counts]
        return torch.stack(p).sum(0) if p else torch.zeros_like(y)

    def interval(self, level: float) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        drawn = self.draw(4000, torch.Generator().manual_seed(0))
        return drawn.quantile((1 - level) / 2, 0), drawn.quantile((1 + level) / 2, 0)

    def draw(self, count: int, generator: torch.Generator | None = None) -> Float[Tensor, "count n"]:
        noise = torch.randn(count, len(self.mean), dtype=self.mean.dtype, generator=generator)
        return OverdispersedLikelihood().sample(self.log_mean + self.epistemic * noise, generator)


@dataclass(frozen=True)
class OverdispersedLikelihood(PerOutput):
    """y ~ NegativeBinomial with mean exp f and R failures."""

    def _share(self, f: Tensor) -> Tensor:
        return torch.sigmoid(f - torch.tensor(R, dtype=f.dtype).log())

    def _log_prob(self, f: Float[Tensor, "*lead C"], y: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead"]:
        return log_binomial(y, f).sum(-1)

    def _grad(self, f: Float[Tensor, "*lead C"], y: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead C"]:
        return (y + R) * self._share(f) - y

    def _fisher(self, f: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead C C"]:
        return torch.diag_embed(R * self._share(f))

    def _fisher_sqrt(self, f: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead C R"]:
        return torch.diag_embed((R * self._share(f)).sqrt())

    def _hessian_diagonal(self, f: Float[Tensor, "*lead C"], y: Tensor) -> Float[Tensor, "*lead C"]:
        return (y + R) * self._share(f) * (1 - self._share(f))

    def _hessian(self, f: Float[Tensor, "*lead C"], y: Tensor) -> Float[Tensor, "*lead C C"]:
        return torch.diag_embed(self._hessian_diagonal(f, y))

    def _hessian_sqrt(self, f: Float[Tensor, "*lead C"], y: Tensor) -> Float[Tensor, "*lead C R"]:
        return torch.diag_embed(self._hessian_diagonal(f, y).sqrt())

    def _sample(self, f: Float[Tensor, "*lead C"], generator: torch.Generator | None) -> Float[Tensor, "*lead C"]:
        rate = torch._standard_gamma(torch.full_like(f, R), generator) / R * f.exp()
        return torch.poisson(rate, generator=generator)

    def predictive(
        self, mean: Float[Tensor, "*lead C"], variance: Float[Tensor, "*lead C"], sigma: float | Tensor = 1.0
    ) -> OverdispersedCounts:
        return OverdispersedCounts(*(part.reshape(-1).double().cpu() for part in (mean, variance.clamp_min(0))))


# -- by hand ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Byhand:
    """A linear model with two inputs and a bias, its data, and the Gaussian of its outputs."""

    likelihood: Positionwise
    model: nn.Linear
    x: Tensor
    y: Tensor
    held_x: Tensor
    held_y: Tensor

    def laplace(self, **options: float) -> BaseLaplace:
        la = Laplace(self.model, self.likelihood, "all", "full", **options)
        la.fit([(self.x[:30], self.y[:30]), (self.x[30:], self.y[30:])])
        return la

    def variances(self, x: Tensor, precision: float | Tensor, factor: float = 1.0) -> Tensor:
        """[n, 1]: factor * phi (sum_n h_n phi phi^T + precision)^-1 phi^T, h by autograd."""

        def nll(f: Tensor) -> Tensor:
            return -self.likelihood.log_prob(f.reshape(-1, 1), self.y).sum()

        f = self.model(self.x).detach().flatten()
        h = torch.autograd.functional.hessian(nll, f).diagonal()
        phi, new = (torch.cat([part, torch.ones(len(part), 1, dtype=F64)], 1) for part in (self.x, x))
        covariance = torch.linalg.inv(phi.T @ (h.unsqueeze(1) * phi) + precision * torch.eye(3, dtype=F64))
        return factor * ((new @ covariance) * new).sum(1, keepdim=True)

    def log_prob(self, precision: float | Tensor, factor: float = 1.0) -> Tensor:
        """Of every held-out target, log E p(y | f) by a sum over outputs."""
        with torch.no_grad():
            f = self.model(self.held_x) + self.variances(self.held_x, precision, factor).sqrt() * Z
        log_p = self.likelihood.log_prob(f.reshape(-1, 1), self.held_y.expand_as(f).reshape(-1, 1)).reshape(f.shape)
        return torch.logsumexp(log_p + W.log(), 1)


def problem(likelihood: Positionwise, bias: float) -> Byhand:
    torch.manual_seed(0)
    model, x = nn.Linear(2, 1).double(), torch.randn(260, 2, dtype=F64)
    with torch.no_grad():
        model.bias.fill_(bias)
        f = model(x)
        y = likelihood.sample(f, torch.Generator().manual_seed(1))
    far = 3 * x[60:]
    with torch.no_grad():  # held-out targets for which the network is too sure
        g = bias + 0.3 * (model(far) - bias) + torch.randn(len(far), 1, dtype=F64)
        held = likelihood.sample(g, torch.Generator().manual_seed(2))
    return Byhand(likelihood, model, x[:60], y[:60], far, held)


@pytest.fixture
def events() -> Byhand:
    return problem(Events(), -0.5)


@pytest.fixture
def counts() -> Byhand:
    return problem(OverdispersedLikelihood(), 1.0)


# -- through Laplace --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("likelihood", [Events(), OverdispersedLikelihood()], ids=["events", "counts"])
def test_the_derivatives_are_those_of_autograd(likelihood: Positionwise) -> None:
    f = torch.randn(20, 2, generator=torch.Generator().manual_seed(3), dtype=F64)
    y = likelihood.sample(f, torch.Generator().manual_seed(4))
    slope = torch.func.grad(lambda f: -likelihood.log_prob(f, y).sum())
    torch.testing.assert_close(likelihood.grad(f, y), slope(f), rtol=1e-9, atol=1e-12)
    curve = torch.func.grad(lambda f: slope(f).sum())(f)
    torch.testing.assert_close(likelihood.hessian_diagonal(f, y), curve, rtol=1e-8, atol=1e-10)


def test_events_are_predicted_by_the_integral(events: Byhand) -> None:
    la = events.laplace(prior_precision=0.5)
    with torch.no_grad():
        f = events.model(events.held_x)
    spread = events.variances(events.held_x, 0.5).sqrt()
    expected = cloglog(f + spread * Z) @ W
    torch.testing.assert_close(la(events.held_x), expected.unsqueeze(1), rtol=1e-9, atol=1e-12)
    n = 4000
    found = la(events.held_x, link_approx="mc", n_samples=n, generator=torch.Generator().manual_seed(0))
    error = (cloglog(f + spread * Z).square() @ W - expected.square()).clamp_min(0).sqrt() / n**0.5
    assert bool(((found[:, 0] - expected).abs() <= 4 * error + 1e-9).all())
    with pytest.raises(OptionError, match=r"link 'bridge' for Events; expected .* another of \['cloglog', 'probit'\]"):
        la(events.held_x, link_approx="bridge")
    drawn = la.predictive_samples(events.held_x, n_samples=3)
    assert drawn.shape == (3, len(f), 1)
    assert 0 <= float(drawn.min()) <= float(drawn.max()) <= 1


def test_events_are_scored_on_held_out_data(events: Byhand) -> None:
    la = events.laplace()
    scores = torch.stack([-events.log_prob(precision).mean() for precision in GRID])
    found = grid.grid(
        la.fitted.curvature, la.linearise, la.distribution, [(events.held_x, events.held_y)], GRID, link="cloglog"
    )
    torch.testing.assert_close(found.scores, scores, rtol=1e-8, atol=0)
    options = {"log_prior_prec_min": -3, "log_prior_prec_max": 3, "grid_size": 25}
    la.optimize_prior_precision(method="gridsearch", val_loader=[(events.held_x, events.held_y)], **options)
    assert float(la.prior_precision) == pytest.approx(float(GRID[scores.argmin()]))


def test_counts_are_scored_by_draws_and_predicted_as_outputs(counts: Byhand) -> None:
    la = counts.laplace(prior_precision=0.5)
    mean, variance = la(counts.held_x)
    torch.testing.assert_close(mean, counts.model(counts.held_x).detach())
    torch.testing.assert_close(variance[:, 0], counts.variances(counts.held_x, 0.5), rtol=1e-9, atol=0)
    n = 4000
    arguments = la.fitted.curvature, la.linearise, la.distribution, [(counts.held_x, counts.held_y)], [0.5]
    found = grid.grid(*arguments, samples=n, generator=torch.Generator().manual_seed(0))
    f = mean + counts.variances(counts.held_x, 0.5).sqrt() * Z
    p = log_binomial(counts.held_y, f).exp()
    average = p @ W
    spread = ((p.square() @ W) / average.square() - 1).clamp_min(0) / n  # of log p, by the delta rule
    error = 4 * float(spread.sum().sqrt()) / len(average)
    assert float(found.scores[0]) == pytest.approx(-float(average.log().mean()), abs=error)


@pytest.mark.parametrize("kind", ["events", "counts"])
def test_calibration_finds_the_factor_of_a_plain_loop(kind: str, request: pytest.FixtureRequest) -> None:
    by_hand: Byhand = request.getfixturevalue(kind)
    la = by_hand.laplace(prior_precision=50.0)
    sums = torch.stack([by_hand.log_prob(50.0, c).sum() for c in COVARIANCE.tolist()])
    best = float(COVARIANCE[sums.argmax()])
    said = calibrate(la, [(by_hand.held_x, by_hand.held_y)])
    assert "was multiplied by" in said, said
    assert float(la.temperature) == pytest.approx(best)
    assert float(la.prior_precision) == pytest.approx(50.0 / best)
    assert f"{float(sums.max()) / len(by_hand.held_y):.4f} after" in said


@pytest.mark.parametrize("kind", ["events", "counts"])
def test_a_report_is_written(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    by_hand: Byhand = request.getfixturevalue(kind)
    la, held_out = by_hand.laplace(prior_precision=2.0), [(by_hand.held_x, by_hand.held_y.clamp_max(60))]
    data = observe(la, held_out).data
    assert isinstance(data, Classes if kind == "events" else Counts)
    if isinstance(data, Classes):
        torch.testing.assert_close(data.probabilities[:, 1:], la(by_hand.held_x), rtol=1e-9, atol=1e-12)
    else:
        expected = by_hand.likelihood.log_prob(la.model(by_hand.held_x), held_out[0][1]).detach()
        torch.testing.assert_close(data.log_prob("network"), expected, rtol=1e-9, atol=1e-9)
    figures = report(la, held_out, tmp_path / "r.html")
    assert figures["rows"] == len(by_hand.held_x)


def test_what_links_need_is_asked_for() -> None:
    with pytest.raises(LikelihoodError, match="'probit' among them"):

        class Nameless(Bernoulli):
            links: ClassVar = {"quadrature": Bernoulli.links["quadrature"]}

    class Unsaid(Events):
        _predicted = Positionwise._predicted

    with pytest.raises(LikelihoodError, match="write _predicted"):
        Unsaid().predicted(torch.zeros(2, 1))
