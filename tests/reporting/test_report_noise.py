"""Reports where the noise varies with the inputs: figures against the predictive mixture itself, and what is said."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from lapwing import Laplace
from lapwing.errors import DataError
from lapwing.laplace import BaseLaplace
from lapwing.predictive import Amounts
from lapwing.reporting import report, statistics, words
from lapwing.reporting.observations import Observations, observe
from lapwing.reporting.predictions import Numbers
from lapwing.tables.fit import fit_table


def rows(n: int = 400, outputs: int = 1, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Noise that goes from 0.1 to 1 over the inputs."""
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.rand(n, 2, generator=generator, dtype=torch.float64) - 1
    noise = torch.randn(n, outputs, generator=generator, dtype=torch.float64)
    y = torch.sin(2 * x[:, :1]) + (1.15 * (x[:, 1:] - 1)).exp() * noise
    return list(zip(x.split(150), y.split(150), strict=True))


def fitted(outputs: int = 1, steps: int = 300, n: int = 60) -> BaseLaplace:
    """Trained for a moment, to few rows, so that much is unsure; means first, then log-variances."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 2 * outputs)).double()
    x, y = (torch.cat(parts) for parts in zip(*rows(n, outputs), strict=True))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    for _ in range(steps):
        mean, log_noise = model(x).chunk(2, -1)
        loss = ((y - mean).square() * (-log_noise).exp() + log_noise).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    la = Laplace(model, "heteroscedastic", "all", "full")
    la.fit(rows(n, outputs))
    return la


class Text(HTMLParser):
    """What a reader sees."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.text = ""
        self.feed(path.read_text(encoding="utf-8").split("<script")[0])

    def handle_data(self, data: str) -> None:
        self.text += data


def predicted(la: BaseLaplace, x: Tensor) -> Amounts:
    """From the posterior of the outputs, with nothing in between."""
    with torch.no_grad():
        f, covariance = la(x)
    variance = torch.diagonal(covariance, dim1=-2, dim2=-1)
    (mean, log_noise), (epistemic, spread) = f.chunk(2, -1), variance.chunk(2, -1)
    return Amounts(*(each.flatten() for each in (mean, epistemic, log_noise, spread)))


@pytest.mark.parametrize("outputs", [1, 2])
def test_figures_are_those_of_the_mixture(outputs: int) -> None:
    la, held_out = fitted(outputs), rows(outputs=outputs, seed=1)
    x, y = (torch.cat(parts) for parts in zip(*held_out, strict=True))
    amounts, targets = predicted(la, x), y.flatten()
    observed = observe(la, held_out)
    data = observed.data
    assert isinstance(data, Numbers)
    assert float(amounts.spread.mean()) > 0.03  # there is something to integrate over
    for found, expected in zip(vars(data.laplace).values(), vars(amounts).values(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    summary = {row["measure"]: row for row in statistics.summary(data)}
    for source, law in (("laplace", amounts), ("network", amounts.alone())):
        nll = -float(law.log_prob(targets).mean())
        assert summary["Negative log-likelihood"][source] == pytest.approx(nll, rel=1e-9)
        coverage = statistics.coverage(data)
        for level, covered, width in zip(
            coverage["levels"], coverage[source]["covered"], coverage[source]["width"], strict=True
        ):
            half = law.half(level)
            assert covered == float(((targets - law.mean).abs() <= half).double().mean())
            assert width == pytest.approx(2 * float(half.mean()), rel=1e-9)
        assert summary["Coverage of 90% intervals"][source] == coverage[source]["covered"][4]
    errors = statistics.errors(data)
    assert errors["predicted"][-1] == pytest.approx(float(amounts.deviation.sort().values[-40 * outputs :].mean()))
    assert observed.rows == 400


def test_the_network_alone_has_its_likelihood() -> None:
    la, held_out = fitted(), rows(seed=1)
    x, y = (torch.cat(parts) for parts in zip(*held_out, strict=True))
    with torch.no_grad():
        expected = -float(la.distribution.log_prob(la.model(x), y).mean())
    assert statistics.summary(observe(la, held_out).data)[0]["network"] == pytest.approx(expected)


def test_predictions_in_other_units() -> None:
    observed = observe(fitted(), rows(seed=1))
    other = observed.rescaled(1000.0, -5.0)
    assert isinstance(observed.data, Numbers)
    assert isinstance(other.data, Numbers)
    for source in ("network", "laplace"):
        shifted = observed.data.log_prob(source) - torch.tensor(1000.0).double().log()
        torch.testing.assert_close(other.data.log_prob(source), shifted, rtol=1e-7, atol=1e-7)
        widths = [1000 * width for width in observed.data.widths(source, [0.5, 0.9])]
        assert other.data.widths(source, [0.5, 0.9]) == pytest.approx(widths)
        torch.testing.assert_close(other.data.below(source), observed.data.below(source), rtol=0, atol=1e-9)
    found, expected = statistics.noise(other), statistics.noise(observed)
    assert found is not None
    assert expected is not None
    assert found["low"] == pytest.approx(1000 * expected["low"])
    assert found["share"] == pytest.approx(expected["share"])


def test_the_page_says_that_the_noise_varies(tmp_path: Path) -> None:
    la, held_out = fitted(), rows(seed=1)
    figures = report(la, held_out, tmp_path / "r.html")
    noise = predicted(la, torch.cat([x for x, _ in held_out])).noise
    low, high = torch.quantile(noise, torch.tensor([0.05, 0.95], dtype=torch.float64)).tolist()
    assert figures["noise"]["varies"]
    assert (figures["noise"]["low"], figures["noise"]["high"]) == (pytest.approx(low), pytest.approx(high))
    assert 0.05 < low < 0.3 < high < 2
    text = Text(tmp_path / "r.html").text
    assert f"noise varies with the inputs: standard deviation {low:.4g} to {high:.4g} (middle 90% of rows)" in text
    assert "it is predicted for every row, from its inputs" in text
    assert "the noise becomes better known, but stays" in text
    assert "Rows with larger predicted deviations do have larger errors." in text
    assert "noise level" not in text
    assert "the same for all rows" not in text


@pytest.mark.parametrize("sigma", [0.5, 0.01])
def test_the_page_says_that_the_noise_is_constant(tmp_path: Path, sigma: float) -> None:
    torch.manual_seed(0)
    la = Laplace(nn.Linear(2, 1).double(), "regression", "all", "full", sigma_noise=sigma, prior_precision=1.0)
    la.fit(rows(60))
    figures = report(la, rows(seed=1), tmp_path / "r.html")
    assert not figures["noise"]["varies"]
    assert figures["noise"]["low"] == pytest.approx(sigma)
    text = Text(tmp_path / "r.html").text
    assert f"noise level {sigma:.3g}" in text
    assert "the noise does not" in text
    assert "noise varies" not in text
    assert "predicted for every row" not in text


def test_one_noise_for_each_output_does_not_vary_with_the_inputs() -> None:
    amounts = Amounts(*torch.zeros(4, 6, dtype=torch.float64))
    amounts = Amounts(amounts.mean, amounts.variance, torch.tensor([0.0, 1.0] * 3).double(), amounts.spread)
    row = torch.arange(6) // 2

    def seen(law: Amounts) -> Observations:
        return Observations(Numbers(law.mean, law, law.alone()), row, None, None, None, False, None)

    found = statistics.noise(seen(amounts))
    assert found is not None
    assert not found["varies"]
    assert found["share"] == 1
    other = Amounts(amounts.mean, amounts.variance, torch.arange(6).double(), amounts.spread)
    found = statistics.noise(seen(other))
    assert found is not None
    assert found["varies"]


def test_words_where_the_predicted_deviation_says_little() -> None:
    flat = {"predicted": [1.0, 1.0], "error": [1.0, 1.0]}
    noise = {"varies": False, "low": 0.9, "high": 0.9, "share": 0.8}
    assert words.errors(flat, False, noise)[1].endswith(": most of it is noise that is the same for all rows.")
    assert words.errors(flat, False, noise | {"share": 0.2})[1].endswith("large errors from small ones.")
    assert words.errors(flat, False, None)[1].endswith("large errors from small ones.")  # counts
    varies = words.errors(flat, False, noise | {"varies": True})[1]
    assert varies.endswith("small ones, although the noise in it is not the same for all rows.")


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    generator = np.random.default_rng(0)
    x = generator.uniform(-1, 1, (600, 2))
    noise = np.exp(1.2 * (x[:, 1] - 1)) * generator.standard_normal(600)
    return pd.DataFrame({"area": x[:, 0], "age": x[:, 1], "price": 5000 + 900 * np.sin(2 * x[:, 0]) + 800 * noise})


@pytest.mark.parametrize("noise", ["varying", "constant"])
def test_a_table_has_the_scores_of_its_summary(tmp_path: Path, table: pd.DataFrame, noise: str) -> None:
    bundle = fit_table(table, "price", noise=noise, epochs=10)
    assert bundle.spec.varying == (noise == "varying")
    figures = report(bundle, table, tmp_path / "r.html")
    assert figures["rows_are_test"]
    assert figures["noise"]["varies"] == bundle.spec.varying
    found = {row["measure"]: row for row in figures["summary"]}
    for source, expected in zip(("network", "laplace"), bundle.summary.rows, strict=True):
        assert found["Negative log-likelihood"][source] == pytest.approx(expected.nll, rel=1e-6)
        for level in (50, 90, 95):
            covered = found[f"Coverage of {level}% intervals"][source]
            assert covered == pytest.approx(getattr(expected, f"coverage_{level}"))
    frame = bundle.predict(table.iloc[figures["looked_at"]])
    assert figures["noise"]["low"] == pytest.approx(frame["sd_noise"].quantile(0.05), rel=1e-5)
    assert figures["noise"]["high"] == pytest.approx(frame["sd_noise"].quantile(0.95), rel=1e-5)
    width = (frame["upper_90"] - frame["lower_90"]).mean()
    assert figures["coverage"]["laplace"]["width"][4] == pytest.approx(width, rel=1e-5)
    text = Text(tmp_path / "r.html").text
    assert ("noise varies with the inputs" in text) == bundle.spec.varying
    assert ("noise level" in text) != bundle.spec.varying
    assert "e+0" not in text  # amounts as one writes them


def many(n: int) -> Numbers:
    generator = torch.Generator().manual_seed(0)
    four = torch.rand(4, n, generator=generator, dtype=torch.float64)
    amounts = Amounts(*four)
    return Numbers(3 * torch.rand(n, generator=generator, dtype=torch.float64), amounts, amounts.alone())


def test_many_rows_are_integrated_over_once_and_widths_are_of_some(monkeypatch: pytest.MonkeyPatch) -> None:
    data, calls, below, half = many(6000), [], Amounts.below, Amounts.half
    monkeypatch.setattr(Amounts, "below", lambda self, y: calls.append(("below", len(y))) or below(self, y))
    monkeypatch.setattr(Amounts, "half", lambda self, p: calls.append(("half", len(self.mean))) or half(self, p))
    coverage = statistics.coverage(data)
    statistics.summary(data)
    statistics.transform(data)
    assert [size for name, size in calls if name == "below"] == [6000, 6000]
    assert max(size for name, size in calls if name == "half") == 2000
    widths = 2 * half(data.laplace, 0.9)
    error = float(widths.std()) / 2000**0.5
    assert coverage["laplace"]["width"][4] == pytest.approx(float(widths.mean()), abs=4 * error)
    assert coverage == statistics.coverage(many(6000))  # the same rows again


def test_the_middle_of_more_noises_than_torch_has_quantiles_for() -> None:
    values = torch.rand(2**24 + 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert statistics._quantile(values, 0.05) == pytest.approx(float(np.quantile(values.numpy(), 0.05)), rel=1e-12)
    few = values[:7]
    assert statistics._quantile(few, 0.95) == pytest.approx(float(few.quantile(0.95)), rel=1e-12)
    assert statistics._quantile(few[:1], 0.95) == float(few[0])


def test_a_row_with_noise_beyond_all_numbers_is_named(tmp_path: Path) -> None:
    """Where the network's own l is so large that exp l overflows; the spread of l has a bound."""
    torch.manual_seed(0)
    model = nn.Linear(1, 2).double()
    with torch.no_grad():
        model.weight.zero_()
    x = torch.linspace(-1, 1, 20, dtype=torch.float64).unsqueeze(1)
    la = Laplace(model, "heteroscedastic", "all", "full")
    la.fit([(x, x)])
    report(la, [(x, x)], tmp_path / "near.html")
    far = x.clone()
    far[13] = 1e4
    report(la, [(far, x)], tmp_path / "far.html")  # a variance of 1e7 for l
    (tmp_path / "far.html").unlink()
    with torch.no_grad():
        model.weight[1] = 0.5
    la.fit([(x, x)])
    with pytest.raises(DataError, match=r"noise of row 13, .* too large"):
        report(la, [(far, x)], tmp_path / "far.html")
    assert not (tmp_path / "far.html").exists()
