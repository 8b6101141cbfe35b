"""Reports and calibration of counts and of mixtures of coins: figures against the law they come from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing import Laplace
from lapwing.distributions import Distribution, PoissonLognormal
from lapwing.laplace.calibration import calibrate
from lapwing.likelihoods import BernoulliMixture, Poisson
from lapwing.reporting import report, statistics
from lapwing.reporting.observations import observe
from lapwing.reporting.predictions import Classes, Counts, Source
from unchanged import unchanged


def network(outputs: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


def rows(kind: str, n: int = 80, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, generator=generator, dtype=torch.float64)
    y = torch.poisson(x[:, :1].exp(), generator=generator)
    return list(zip(x.split(30), (y if kind == "counts" else (y[:, 0] > 1).double()).split(30), strict=True))


@pytest.mark.parametrize(("kind", "outputs"), [("counts", 1), ("coins", 3)])
def test_the_page_is_written_in_one_call(tmp_path: Path, kind: str, outputs: int) -> None:
    model = network(outputs)
    likelihood = Poisson() if kind == "counts" else BernoulliMixture()
    with unchanged(model):
        la = lapwing.attach(model, rows(kind), likelihood, val_loader=rows(kind, seed=2))
        figures = report(la, rows(kind, seed=1), tmp_path / "r.html")
    assert figures["task"] == ("regression" if kind == "counts" else "classification")
    assert figures["rows"] == 80
    text = (tmp_path / "r.html").read_text()
    assert text.count("data:image/svg+xml;base64,") == 6
    assert ("no closed form" in text) == (kind == "coins")


def predictions(n: int = 20_000) -> Counts:
    """Predictions that are right: counts drawn from the predicted law."""
    generator = torch.Generator().manual_seed(11)
    log_rate = 1 + torch.randn(n, generator=generator, dtype=torch.float64)
    variance = torch.rand(n, generator=generator, dtype=torch.float64)
    f = log_rate + variance.sqrt() * torch.randn(n, generator=generator, dtype=torch.float64)
    laws = (PoissonLognormal(log_rate, factor * variance) for factor in (1.0, 0.0))
    return Counts(torch.poisson(f.exp(), generator=generator), *laws)


def within(found: float, share: float, n: int) -> bool:
    return abs(found - share) <= 4 * (share * (1 - share) / n) ** 0.5


def test_right_predictions_are_uniform_and_cover() -> None:
    data = predictions()
    found = statistics.transform(data)
    assert all(within(share / 20, 0.05, 20_000) for share in found["laplace"])
    assert found["network"][-1] > 1.5  # the rate alone is too sure
    for level in (0.5, 0.9, 0.99):
        # an interval of whole numbers holds its level or more; what it may hold is known for every row
        lower = level - 4 * (level * (1 - level) / 20_000) ** 0.5
        assert float(data.inside("laplace", level).double().mean()) > lower
    assert float(data.inside("network", 0.9).double().mean()) < 0.85


def test_coverage_is_that_of_intervals_spelled_out() -> None:
    data = predictions(40)
    k = torch.arange(800, dtype=torch.float64)
    cases: list[tuple[Source, Distribution]] = [("network", data.network), ("laplace", data.laplace)]
    for source, law in cases:
        widths = []
        for row in range(40):
            below = law.rows(torch.full((800,), row)).cdf(k)
            low, high = (float(k[int((below >= q).nonzero()[0])]) for q in (0.05, 0.95))
            assert bool(data.inside(source, 0.9)[row]) == (low <= float(data.targets[row]) <= high)
            widths.append(high - low)
        found = data.widths(source, [0.9], draws=20_000)[0]
        assert found == pytest.approx(sum(widths) / 40, rel=0.02)


def test_scores_of_the_network_are_those_of_its_likelihood() -> None:
    la = Laplace(network(1), "poisson", "all", "kron")
    la.fit(rows("counts"))
    held_out = rows("counts", seed=1)
    data = observe(la, held_out).data
    assert isinstance(data, Counts)
    x, y = torch.cat([x for x, _ in held_out]), torch.cat([y for _, y in held_out])
    with torch.no_grad():
        f = la.model(x)
    row = statistics.summary(data)[0]
    assert row["network"] == pytest.approx(-float(la.distribution.log_prob(f, y).mean()))
    mean, variance = la(x)
    assert isinstance(data.laplace, PoissonLognormal)
    torch.testing.assert_close(data.laplace.log_rate, mean[:, 0])
    torch.testing.assert_close(data.laplace.variance, variance[:, 0, 0])
    weights, noise = data.parts
    torch.testing.assert_close(weights.square() + noise.square(), data.deviation.square())


def test_the_covariance_of_counts_is_scaled_to_held_out_ones() -> None:
    model = network(1)
    with torch.no_grad():
        dict(model.named_parameters())["2.bias"] += (
            4  # rates of about 50, whose own spread does not hide that of the log-rates
        )
    la = Laplace(model, "poisson", "all", "full", prior_precision=3.0)
    la.fit(rows("counts"))
    generator = torch.Generator().manual_seed(3)
    x = 2 * torch.randn(3000, 2, generator=generator, dtype=torch.float64)
    mean, variance = (each.reshape(-1, 1) for each in la(x))
    noise = torch.randn(mean.shape, generator=generator, dtype=torch.float64)
    y = torch.poisson((mean + (variance / 10).sqrt() * noise).exp(), generator=generator)
    said = calibrate(la, [(x, y)])
    assert 0.07 < float(said.split("multiplied by ")[1].split(" ")[0]) < 0.14, said


def test_coins_have_the_mean_probability_of_draws() -> None:
    la = Laplace(network(3), BernoulliMixture(), "all", "full")
    la.fit(rows("coins"))
    held_out = rows("coins", seed=1)
    data = observe(la, held_out).data
    assert isinstance(data, Classes)
    x = torch.cat([x for x, _ in held_out])
    draws = la.functional_samples(x, n_samples=4000, generator=torch.Generator().manual_seed(5))
    p = torch.stack([BernoulliMixture().probability(f) for f in draws])
    error = 4 * p.std(0) * (1 / 500 + 1 / 4000) ** 0.5
    assert bool(((data.probabilities[:, 1] - p.mean(0)).abs() <= error).all())
    with torch.no_grad():
        expected = BernoulliMixture().log_prob(la.model(x), torch.ones(80, dtype=torch.float64)).exp()
    torch.testing.assert_close(data.network[:, 1], expected)
