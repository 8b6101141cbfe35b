"""The report: figures against closed forms, pages for every kind of posterior, strings of the user, and a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lapwing import Laplace, metrics
from lapwing.errors import DataError, LikelihoodError, NotFittedError
from lapwing.laplace import BaseLaplace
from lapwing.likelihoods import Categorical, Gaussian, from_function
from lapwing.predictive import Amounts
from lapwing.reporting import report, statistics
from lapwing.reporting.observations import Observations, disturbed, observe
from lapwing.reporting.page import plain_values
from lapwing.reporting.predictions import Classes, Numbers
from lapwing.tables.conformal import Conformal
from unchanged import unchanged

D, C = 3, 4
HEADINGS = 8


def network(outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, outputs)).double()


def data(task: str, n: int = 60, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, D, generator=generator, dtype=torch.float64)
    if task == "classification":
        y = torch.randint(C, (n,), generator=generator)
    elif task == "binary":
        y = torch.randint(2, (n, 1), generator=generator).double()
    else:
        y = torch.randn(n, 2 if task == "two" else 1, generator=generator, dtype=torch.float64)
    return list(zip(x.split(25), y.split(25), strict=True))


def fitted(task: str = "regression", subset: str = "all", structure: str = "full", **options: Any) -> BaseLaplace:
    outputs = {"classification": C, "two": 2, "heteroscedastic": 2}.get(task, 1)
    if subset == "subnetwork":
        options["subnetwork_indices"] = torch.tensor([0, 3, 7, 20, 24])
    la = Laplace(network(outputs), "regression" if task == "two" else task, subset, structure, **options)
    la.fit(data(task))
    return la


class Page(HTMLParser):
    """What a browser would see: tags with their attributes, text, and the embedded figures."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.json, self._script = "", "", False
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._script = tag == "script"

    def handle_endtag(self, tag: str) -> None:
        self._script = False

    def handle_data(self, data: str) -> None:
        if self._script:
            self.json += data
        else:
            self.text += data

    def all(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.tags if tag == name]


@pytest.mark.parametrize(
    ("task", "subset", "structure"),
    [
        ("regression", "all", "full"),
        pytest.param("regression", "all", "gp", marks=pytest.mark.slow),
        pytest.param("regression", "last_layer", "kron", marks=pytest.mark.slow),
        pytest.param("regression", "subnetwork", "full", marks=pytest.mark.slow),
        ("two", "all", "kron"),
        ("heteroscedastic", "all", "diag"),
        ("classification", "all", "kron"),
        pytest.param("classification", "last_layer", "full", marks=pytest.mark.slow),
        pytest.param("classification", "subnetwork", "diag", marks=pytest.mark.slow),
        ("classification", "all", "gp"),
        pytest.param("classification", "all", "lowrank", marks=pytest.mark.slow),
        ("binary", "all", "full"),
    ],
)
def test_every_posterior_has_its_page(tmp_path: Path, task: str, subset: str, structure: str) -> None:
    la = fitted(task, subset, structure)
    path = tmp_path / "new" / "report.html"
    before = la.prior_precision.clone(), la.log_marginal_likelihood()
    with unchanged(la.model):
        figures = report(la, data(task, seed=1), path)
    assert torch.equal(la.prior_precision, before[0])
    assert torch.equal(la.log_marginal_likelihood(), before[1])
    page = Page(path)
    assert len(page.all("img")) == 6
    assert all(
        (image["src"] or "").startswith("data:image/svg+xml;base64,") and image["alt"] for image in page.all("img")
    )
    assert len(page.all("h2")) >= HEADINGS
    assert figures["task"] == ("classification" if task in ("classification", "binary") else "regression")
    assert figures["rows"] == 60
    assert json.loads(page.json) == json.loads(json.dumps(plain_values(figures), allow_nan=False))
    assert sum(figures["effective"]["size"]) == la.space.size


def test_the_page_asks_for_nothing_from_elsewhere(tmp_path: Path) -> None:
    report(fitted(), data("regression", seed=1), tmp_path / "r.html")
    page = Page(tmp_path / "r.html")
    links = [v for _, attributes in page.tags for k, v in attributes.items() if k in ("src", "href") and v]
    assert links
    assert all(link.startswith("data:") for link in links)
    assert not re.search(r"@import|url\(", (tmp_path / "r.html").read_text())


@pytest.mark.slow
def test_the_same_posterior_gives_the_same_bytes(tmp_path: Path) -> None:
    la = fitted("classification")
    for name in "ab":
        report(la, data("classification", seed=1), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_strings_of_the_user_are_text(tmp_path: Path) -> None:
    attack = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&$x_1$"
    la = fitted("classification")
    names = [attack, "b", "c"]
    report(la, data("classification", seed=1), tmp_path / "r", names=names, classes=[attack] * C, title=attack)
    page = Page(tmp_path / "r")
    assert len(page.all("script")) == 1
    assert len(page.all("img")) == 6
    assert not any(key.startswith("on") for _, attributes in page.tags for key in attributes)
    assert page.text.count(attack) >= 4  # title, heading, column name and at least one class
    assert json.loads(page.json)["title"] == attack


def test_column_names_bring_the_values_of_the_rows(tmp_path: Path) -> None:
    la, held_out = fitted(), data("regression", seed=1)
    figures = report(la, held_out, tmp_path / "r", names=["u", "v", "w"])
    x = torch.cat([x for x, _ in held_out])
    first = figures["uncertain"][0]
    assert [float(v) for v in first["columns"]] == pytest.approx(x[first["row"]].tolist(), rel=1e-3)
    assert figures["columns"] == ["u", "v", "w"]
    y = torch.cat([y for _, y in held_out])
    assert first["target"] == y[first["row"]].item()


@pytest.mark.slow
def test_inputs_that_are_given_as_unfamiliar_are_used(tmp_path: Path) -> None:
    la = fitted("classification")
    outside = torch.full((7, D), 5.0, dtype=torch.float64)
    given = [outside, [outside], [(outside, torch.zeros(7))]]
    found = [
        report(la, data("classification", seed=1), tmp_path / "r", out_of_distribution=o)["unfamiliar"] for o in given
    ]
    assert found[0] == found[1] == found[2]
    assert found[0]["count"] == 7
    assert 0.5 < found[0]["auroc_epistemic"] <= 1
    assert not found[0]["made"]
    assert "were given" in Page(tmp_path / "r").text
    made = report(la, data("classification", seed=1), tmp_path / "r")["unfamiliar"]
    assert made["made"]
    assert "so they were made" in Page(tmp_path / "r").text


def test_inputs_that_are_no_tensor_have_no_made_up_ones(tmp_path: Path) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(D, 1).double()

        def forward(self, features: Tensor) -> Tensor:
            return self.layer(features)

    batches = [{"features": x, "labels": y} for x, y in data("regression")]
    la = Laplace(Named(), "regression", "all", "full")
    la.fit(batches)
    figures = report(la, batches, tmp_path / "r")
    assert figures["unfamiliar"] is None
    assert len(Page(tmp_path / "r").all("img")) == 5


def test_disturbed_inputs_keep_means_and_triple_deviations(generator: torch.Generator) -> None:
    x = torch.randn(50, 2, 3, generator=generator, dtype=torch.float64)
    y = disturbed(x, generator)
    torch.testing.assert_close(y.mean(0), x.mean(0))
    torch.testing.assert_close(y.std(0), 3 * x.std(0))
    torch.testing.assert_close(((y - x.mean(0)) / 3 + x.mean(0)).sort(0).values, x.sort(0).values)


# -- figures -----------------------------------------------------------------------------------------------------------


def gaussian(n: int = 20_000, factor: float = 1.0) -> Numbers:
    """Predictions that are right: targets from the predicted distribution, whose deviation is divided by `factor`."""
    generator = torch.Generator().manual_seed(0)
    deviation = torch.rand(n, generator=generator, dtype=torch.float64) + 0.5
    mean = torch.randn(n, generator=generator, dtype=torch.float64)
    targets = mean + deviation * factor * torch.randn(n, generator=generator, dtype=torch.float64)
    amounts = Amounts(mean, (0.6 * deviation).square(), 2 * (0.8 * deviation).log(), torch.zeros_like(mean))
    return Numbers(targets, amounts, amounts.alone())


def within(found: float, share: float, n: int) -> bool:
    return abs(found - share) <= 4 * (share * (1 - share) / n) ** 0.5


def test_intervals_of_right_predictions_cover_what_they_promise() -> None:
    found = statistics.coverage(gaussian())
    for level, laplace, conformal in zip(
        found["levels"], found["laplace"]["covered"], found["conformal"]["covered"], strict=True
    ):
        assert within(laplace, level, 20_000)
        assert within(conformal, level, 10_000)  # the calibrating half is random too
    assert found["network"]["covered"][4] < 0.85  # noise alone is too narrow


def test_conformal_intervals_cover_also_where_predictions_are_wrong() -> None:
    found = statistics.coverage(gaussian(factor=3.0))
    assert found["laplace"]["covered"][4] < 0.6
    assert within(found["conformal"]["covered"][4], 0.9, 10_000)
    assert found["conformal"]["width"][4] > 2 * found["laplace"]["width"][4]


def test_each_half_of_the_rows_is_tested_by_what_the_other_calibrates() -> None:
    """Few rows, spelled out: a row that calibrates is covered more often than a new one."""
    torch.manual_seed(0)
    n, one = 14, torch.ones(14, dtype=torch.float64)
    error = torch.randn(n, dtype=torch.float64)
    law = Amounts(0 * one, one / 2, one.log(), 0 * one)
    data = Numbers(error, law, law)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(3))
    found = statistics.crossed(data, seed=3)
    for level, covered in zip(statistics.LEVELS, found["covered"], strict=True):
        inside = 0
        for calibration, rest in ((order[:7], order[7:]), (order[7:], order[:7])):
            rank = -(-8 * level // 1)  # the smallest whole number >= (7 + 1) * level
            bound = error[calibration].abs().sort().values[int(rank) - 1] if rank <= 7 else torch.tensor(torch.inf)
            inside += int((error[rest].abs() <= bound).sum())
        assert covered == inside / n


def test_a_conformal_set_of_classes_is_never_empty() -> None:
    """Half of the rows sure and right, half unsure: the bound of the sure ones would leave others without a class."""
    sure = torch.tensor([0.97, 0.02, 0.01], dtype=torch.float64)
    unsure = torch.tensor([0.4, 0.35, 0.25], dtype=torch.float64)
    p = torch.stack([sure] * 36 + [unsure] * 4)
    data = Classes(torch.zeros(40, dtype=torch.int64), p, p, torch.ones(40, dtype=torch.float64))
    found = statistics.crossed(data, seed=1)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    for at, level in enumerate(statistics.LEVELS):
        sizes, hits = [], []
        for calibration, rest in ((order[:20], order[20:]), (order[20:], order[:20])):
            conformal = Conformal(1 - p[calibration, 0])
            sets = conformal.sets(p[rest], level)
            sizes.append(sets.sum(1).double())
            hits.append(sets[:, 0])
        assert found["width"][at] == pytest.approx(float(torch.cat(sizes).mean()))
        assert found["width"][at] >= 1
        assert found["covered"][at] == pytest.approx(float(torch.cat(hits).double().mean())) == 1.0


def test_the_transform_of_right_predictions_is_flat() -> None:
    found = statistics.transform(gaussian())
    assert sum(found["laplace"]) == pytest.approx(20)
    assert all(within(share / 20, 0.05, 20_000) for share in found["laplace"])
    assert found["network"][0] > 1.3


def test_errors_are_as_large_as_predicted() -> None:
    found = statistics.errors(gaussian())
    assert len(found["error"]) == 10
    for predicted, error in zip(found["predicted"], found["error"], strict=True):
        assert error == pytest.approx(predicted, rel=0.1)


def test_the_error_among_the_surest_rows_is_theirs() -> None:
    """In the order of the rows unsure ones come first, and they are wrong."""
    unsure, sure = torch.tensor([0.55, 0.45]).double(), torch.tensor([0.99, 0.01]).double()
    p = torch.stack([unsure] * 4 + [sure] * 12)
    data = Classes(torch.tensor([1] * 4 + [0] * 12), p, p, torch.ones(16, dtype=torch.float64))
    found = statistics.errors(data)
    assert found["kept"] == pytest.approx([(i + 1) / 16 for i in range(16)])
    assert found["risk"] == pytest.approx([0.0] * 12 + [1 / 13, 2 / 14, 3 / 15, 4 / 16])


def test_sets_and_reliability_of_classes() -> None:
    p = torch.tensor([[0.6, 0.3, 0.1], [0.5, 0.4, 0.1], [0.1, 0.1, 0.8]], dtype=torch.float64)
    found = Classes(torch.tensor([0, 1, 0]), p, p, torch.ones(3, dtype=torch.float64))
    sets = statistics.coverage(found)["laplace"]
    assert sets["covered"][0] == pytest.approx(1 / 3)  # at 50%: {0}, {0}, {2}
    assert sets["width"][0] == 1.0
    assert sets["covered"][4] == pytest.approx(1.0)  # at 90%: {0, 1}, {0, 1}, {2, 0 or 1}
    reliability = statistics.reliability(found)["laplace"]
    assert reliability["count"] == [1, 1, 1]
    assert reliability["accuracy"] == [0.0, 1.0, 0.0]
    assert reliability["ece"] == pytest.approx(metrics.calibration_error(p, found.targets))


def test_the_summary_is_that_of_the_metrics() -> None:
    la, held_out = fitted("regression"), data("regression", seed=1)
    la.sigma_noise = 0.7
    rows = {row["measure"]: row for row in statistics.summary(observe(la, held_out).data)}
    x, y = torch.cat([x for x, _ in held_out]), torch.cat([y for _, y in held_out])
    mean, variance = la(x, diagonal_output=True)
    assert isinstance(variance, Tensor)
    noise = torch.full_like(variance, 0.49)
    score = rows["Negative log-likelihood"]
    assert score["network"] == pytest.approx(metrics.gaussian_nll(mean, noise, y))
    assert score["laplace"] == pytest.approx(metrics.gaussian_nll(mean, variance + noise, y))
    assert rows["Root mean squared error"]["laplace"] == pytest.approx(metrics.rmse(mean, y))
    assert rows["Coverage of 90% intervals"]["laplace"] == metrics.coverage(mean, variance + noise, y, 0.9)


def test_class_probabilities_are_those_of_the_posterior() -> None:
    la, held_out = fitted("classification", structure="kron"), data("classification", seed=1)
    found = observe(la, held_out).data
    assert isinstance(found, Classes)
    x = torch.cat([x for x, _ in held_out])
    torch.testing.assert_close(found.probabilities, la(x))
    torch.testing.assert_close(found.network, torch.softmax(la.model.eval()(x), -1).detach())
    variance = la.posterior.precision.variances(la.linearise(x))
    torch.testing.assert_close(found.epistemic, variance.mean(1).sqrt())


@pytest.mark.parametrize(
    ("subset", "structure"), [("all", "full"), ("all", "kron"), ("all", "gp"), ("subnetwork", "full")]
)
@pytest.mark.parametrize("prior", ["scalar", "layerwise", "module", "diag"])
def test_effective_parameters_add_up(subset: str, structure: str, prior: str) -> None:
    la = fitted("regression", subset, structure)
    sizes = {"scalar": 1, "layerwise": la.n_layers, "module": len(la.space.layers), "diag": la.space.size}
    if prior == "diag" and structure in ("kron", "gp"):
        pytest.skip("this structure carries no prior per entry")
    if subset == "subnetwork" and prior in ("layerwise", "module"):
        pytest.skip("a sub-network that cuts through tensors has no group of its own for some")
    la.prior_precision = torch.linspace(0.5, 2.0, sizes[prior], dtype=torch.float64)
    found = statistics.effective(la)
    assert sum(found["gamma"]) == pytest.approx(float(la.effective_parameters().sum()), rel=1e-6)
    assert all(0 <= gamma <= size for gamma, size in zip(found["gamma"], found["size"], strict=True))


def test_evidence_is_that_of_the_posterior_and_leaves_it_alone() -> None:
    la = fitted("classification", structure="kron")
    la.prior_precision = torch.tensor([0.3], dtype=torch.float64)
    found = statistics.evidence(la)
    assert found is not None
    assert float(la.prior_precision) == 0.3
    at = 10
    assert found["log_evidence"][at] == pytest.approx(float(la.log_marginal_likelihood(found["precision"][at])))
    la.prior_precision = 0.0
    assert statistics.evidence(la) is None


@pytest.mark.parametrize("task", ["regression", "classification"])
def test_evidence_of_a_full_posterior_with_a_grouped_prior_needs_one_decomposition(task: str) -> None:
    la = fitted(task, "all", "full", temperature=0.7)
    if task == "regression":
        la.sigma_noise = 0.4
    la.prior_precision = torch.linspace(0.5, 3.0, la.n_layers, dtype=torch.float64)
    found = statistics.evidence(la)
    assert found is not None
    assert found["common_factor"]
    assert found["chosen_log_evidence"] == pytest.approx(float(la.log_marginal_likelihood()), rel=1e-10)
    own, at = la.prior_precision.clone(), 7
    direct = la.log_marginal_likelihood(own * found["precision"][at])
    assert found["log_evidence"][at] == pytest.approx(float(direct), rel=1e-10)


def test_positions_to_be_ignored_do_not_count() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 5, D, generator=generator, dtype=torch.float64)
    y = torch.randint(C, (8, 5), generator=generator)
    y[:, 3:] = -100
    la = Laplace(network(C), Categorical(ignore_index=-100), "all", "diag")
    la.fit([(x, y)])
    found = observe(la, [(x, y)])
    assert len(found.data.targets) == 24
    assert found.rows == 8
    assert found.row.tolist() == [row for row in range(8) for _ in range(3)]


def test_noise_per_output_is_used() -> None:
    sigma = torch.tensor([0.5, 2.0], dtype=torch.float64)
    la = Laplace(network(2), Gaussian(sigma), "all", "full")
    la.fit(data("two"))
    found = observe(la, data("two", seed=1)).data
    assert isinstance(found, Numbers)
    torch.testing.assert_close(found.laplace.noise.reshape(-1, 2)[5], sigma)
    torch.testing.assert_close(found.network.deviation.reshape(-1, 2)[5], sigma)


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_bad_input_is_named(tmp_path: Path) -> None:
    la = fitted()
    with pytest.raises(NotFittedError, match="seen no data"):
        report(Laplace(network(1), "regression", "all", "full"), data("regression"), tmp_path / "r")
    with pytest.raises(DataError, match="no batch"):
        report(la, [], tmp_path / "r")
    with pytest.raises(DataError, match="expected a pair"):
        report(la, [torch.zeros(3, D)], tmp_path / "r")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write"):
        report(la, data("regression"), tmp_path / "file" / "r.html")
    other = Laplace(network(1), from_function(lambda f, y: (f - y).pow(4).sum()), "all", "diag")
    other.fit(data("regression"))
    with pytest.raises(LikelihoodError, match="FromFunction"):
        report(other, data("regression"), tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_two_rows_are_enough(tmp_path: Path) -> None:
    for task in ("regression", "classification"):
        la = fitted(task)
        x, y = data(task)[0]
        figures = report(la, [(x[:2], y[:2])], tmp_path / "r")
        assert figures["coverage"]["conformal"]["covered"][0] is None
        assert len(Page(tmp_path / "r").all("img")) == 6


# -- a browser ---------------------------------------------------------------------------------------------------------

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def opened(path: Path, folder: Path) -> tuple[str, str]:
    """The document as Chromium has it after loading, and what it wrote to its log."""
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    more = "--disable-component-update --disable-sync --enable-logging=stderr --v=0 --virtual-time-budget=4000"
    command = [str(CHROMIUM), *flags.split(), *more.split(), f"--user-data-dir={folder}", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, done.stderr


def measuring(path: Path) -> Path:
    """The page with a script that notes errors and how wide each picture came out; its own policy forbids scripts."""
    text = path.read_text(encoding="utf-8")
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    script = (
        "<script>addEventListener('error', e => document.body.dataset.failed = e.message || e.target.tagName, true);"
        "addEventListener('load', () => document.body.dataset.widths = "
        "[...document.images].map(i => i.naturalWidth).join(' '))</script>"
    )
    measured = path.with_suffix(".measured.html")
    measured.write_text(text.replace("<head>", f"<head>{script}", 1), encoding="utf-8")
    return measured


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: the page cannot be opened in a browser")
@pytest.mark.parametrize("task", ["regression", "classification"])
def test_a_browser_shows_every_picture_and_complains_of_nothing(tmp_path: Path, task: str) -> None:
    report(fitted(task), data(task, seed=1), tmp_path / "r.html", names=["<u>", "v", "w"])
    document, log = opened(tmp_path / "r.html", tmp_path / "profile")
    assert "CONSOLE" not in log, log
    assert document.count("<img") == 6
    assert document.rstrip().endswith("</html>")
    measured, log = opened(measuring(tmp_path / "r.html"), tmp_path / "profile")
    assert "CONSOLE" not in log, log
    body = re.search(r"<body[^>]*>", measured)
    assert body is not None
    assert "data-failed" not in body[0]
    widths = re.search(r'data-widths="([\d ]+)"', body[0])
    assert widths is not None
    assert len(widths[1].split()) == 6
    assert all(int(width) > 100 for width in widths[1].split())


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: the page cannot be opened in a browser")
def test_a_broken_page_would_be_noticed(tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    page.write_text(
        '<html><head></head><body><img src="data:image/svg+xml;base64,AAAA"><script>x.y</script></body></html>'
    )
    document, log = opened(measuring(page), tmp_path / "profile")
    assert "CONSOLE" in log
    assert "data-failed" in document
    assert 'data-widths="0"' in document


def test_observed_rows_are_counted() -> None:
    found = observe(fitted("two"), data("two", seed=1))
    assert isinstance(found, Observations)
    assert found.rows == 60
    assert len(found.data.targets) == 120
