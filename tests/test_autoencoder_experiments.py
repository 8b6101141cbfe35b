"""Experiments with autoencoders: neighbours, calibration, completions and the mixture, each against a slow twin."""

from __future__ import annotations

import importlib.util
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENTS = ROOT / "experiments"
pytestmark = pytest.mark.skipif(not EXPERIMENTS.is_dir(), reason="a distribution has no experiments")


def script(folder: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """run.py of an experiment, imported without running it."""
    for each in (EXPERIMENTS, EXPERIMENTS / "c36_missing_halves"):
        monkeypatch.syspath_prepend(str(each))
    name = f"uses_{folder}"
    spec = importlib.util.spec_from_file_location(name, EXPERIMENTS / folder / "run.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, loaded)
    spec.loader.exec_module(loaded)
    return loaded


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_neighbours_vote_and_the_nearer_wins_a_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    run = script("c37_semi_supervised", monkeypatch)
    codes, asked = torch.randn(40, 2, generator=seeded()), torch.randn(120, 2, generator=seeded(1))
    labels, counts = torch.arange(40) % 4, [1, 2, 3, 6]
    found = run.predictions(codes, labels, asked, counts)
    for column, point in enumerate(asked.tolist()):
        order = sorted(
            range(40), key=lambda k: sum((a - b) ** 2 for a, b in zip(codes[k].tolist(), point, strict=True))
        )
        for row, count in enumerate(counts):
            nearest = [int(labels[k]) for k in order[:count]]
            most = max(nearest.count(each) for each in nearest)
            tied = {each for each in nearest if nearest.count(each) == most}
            assert int(found[row, column]) in tied
            if count == 2:
                assert int(found[row, column]) == nearest[0]


def test_the_number_of_neighbours_is_one_that_folds_have_points_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two classes of labels that are wrong in a fifth of the points: more than one neighbour is better."""
    pytest.importorskip("sklearn")
    run = script("c37_semi_supervised", monkeypatch)
    config = {"neighbours": [1, 2, 5, 10, 50], "held_out": 400}
    labels = torch.arange(10).repeat(40)
    codes = torch.nn.functional.one_hot(labels, 10).float() + 0.01 * torch.randn(400, 10, generator=seeded())
    wrong = torch.rand(400, generator=seeded(1)) < 0.2
    noisy = torch.where(wrong, (labels + 1) % 10, labels)
    assert run.best_count(codes, noisy, config, seeded(2)) in (5, 10)
    assert run.best_count(codes[:10], labels[:10], config, seeded(2)) == 1


def test_calibration_over_bins(monkeypatch: pytest.MonkeyPatch) -> None:
    run = script("c36_missing_halves", monkeypatch)
    probabilities = torch.rand(300, 3, generator=seeded(), dtype=torch.float64)
    probabilities = probabilities / probabilities.sum(1, keepdim=True)
    labels = torch.randint(3, (300,), generator=seeded(1))
    found = run.calibration(probabilities, labels, 10)
    gaps: list[tuple[float, float]] = []
    for low in range(10):
        rows = [k for k in range(300) if low / 10 <= float(probabilities[k].max()) < (low + 1) / 10]
        if rows:
            sure = sum(float(probabilities[k].max()) for k in rows) / len(rows)
            right = sum(int(probabilities[k].argmax()) == int(labels[k]) for k in rows) / len(rows)
            gaps.append((len(rows) / 300, abs(sure - right)))
    assert found["ece"] == pytest.approx(sum(share * gap for share, gap in gaps), rel=1e-9)
    assert found["mce"] == pytest.approx(max(gap for _, gap in gaps), rel=1e-9)
    assert found["rmsce"] == pytest.approx(sum(share * gap**2 for share, gap in gaps) ** 0.5, rel=1e-9)


def test_completions_keep_what_is_seen_and_look_at_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    run = script("c36_missing_halves", monkeypatch)
    baselines: Any = sys.modules["autoencoders"]
    shape = baselines.Architecture("dense", (6,))
    config = {"chains": 5, "steps": 2, "average": 3}
    x = torch.rand(4, 1, 28, 28, generator=seeded())
    observed = torch.zeros(1, 28, 28, dtype=torch.bool)
    observed[:, 14:] = True
    other = torch.where(observed, x, 1 - x)
    torch.manual_seed(0)
    for name in ("VAE", "MC-dropout AE", "ensemble"):
        model = baselines.BASELINES[name](shape)
        found, again = (run.completions(model, each, observed, config, seeded(3)) for each in (x, other))
        assert torch.equal(found, again)
        assert torch.equal(found[..., 14:, :], x[..., 14:, :].expand(5, -1, -1, -1, -1))
        assert not torch.equal(found[0], found[1])
    figures = run.likeness(x.expand(5, -1, -1, -1, -1) + 0.5 * ~observed, x, observed)
    assert figures["error"] == pytest.approx(392 * 0.25, rel=1e-5)
    assert figures["log_prob"] == pytest.approx(-392 * 0.125, rel=1e-5)


def test_the_mixture_and_its_maximisation(monkeypatch: pytest.MonkeyPatch) -> None:
    run = script("c38_mixture_of_gaussians", monkeypatch)
    x, means = run.arc(30, 0.1, 0), run.grid(3, 2.0)
    mixture = run.Mixture(means, torch.linspace(-1, 1, 9, dtype=torch.float64))
    parts = [
        torch.distributions.MultivariateNormal(mean, value.exp() * torch.eye(2, dtype=torch.float64)).log_prob(x).exp()
        for mean, value in zip(means, mixture.log_variances, strict=True)
    ]
    expected = (torch.stack(parts).mean(0)).log().mean()
    torch.testing.assert_close(mixture.log_prob(x), expected, rtol=1e-9, atol=0)
    values = [float(mixture.log_prob(x))]
    for _ in range(300):
        mixture = mixture.maximised(x)
        values.append(float(mixture.log_prob(x)))
    assert all(later >= before - 1e-12 for before, later in pairwise(values))
    at = mixture.log_variances.clone().requires_grad_()
    (slope,) = torch.autograd.grad(run.Mixture(means, at).log_prob(x), at)
    assert float(slope.abs().max()) < 1e-4  # a stationary point of the likelihood too


def test_growth_says_how_variance_goes_with_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    run = script("c38_mixture_of_gaussians", monkeypatch)
    places = torch.stack([torch.linspace(1, 8, 8), torch.zeros(8)], 1)
    found = run.growth(places, torch.zeros(1, 2), places[:, 0].exp())
    assert found["far_over_near"] == pytest.approx(float(torch.tensor(6.0).exp()), rel=1e-5)
    assert found["rank_correlation"] == pytest.approx(1.0)
    assert run.growth(places, torch.zeros(1, 2), 1 / places[:, 0])["rank_correlation"] == pytest.approx(-1.0)
