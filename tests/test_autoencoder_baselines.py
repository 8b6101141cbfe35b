"""The rivals of the Laplacian autoencoder in experiments/: losses and scores against torch's distributions."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.distributions import Independent, Normal, kl_divergence

from test_figures import module

EXPERIMENTS = Path(__file__).resolve().parents[1] / "experiments"
pytestmark = pytest.mark.skipif(not EXPERIMENTS.is_dir(), reason="a distribution has no experiments")
X = torch.rand(3, 1, 28, 28, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.fixture
def rivals(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    return module("experiments/autoencoders.py", monkeypatch)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def shape(rivals: ModuleType, kind: str = "dense") -> object:
    torch.manual_seed(0)
    return rivals.Architecture(kind, (6, 4), (2, 3))


@pytest.mark.parametrize("kind", ["dense", "convolutional"])
@pytest.mark.parametrize("name", ["AE", "AE, learned variance", "VAE", "MC-dropout AE", "ensemble"])
def test_scores_are_those_of_the_draws_one_by_one(rivals: ModuleType, kind: str, name: str) -> None:
    model = rivals.BASELINES[name](shape(rivals, kind)).double()
    found = rivals.scores(model, X, 7, seeded(), entropy=700.0)
    generator, count = seeded(), {"AE": 1, "AE, learned variance": 1, "ensemble": 5}.get(name, 7)
    draws = [model.draw(X, number, generator) for number in range(count)]
    densities = [Independent(Normal(d.mean, d.noise.sqrt()), 3).log_prob(X) for d in draws]
    shift = densities[0].mean()
    surprise = -(torch.stack(densities) - shift).exp().mean(0).log() - shift
    torch.testing.assert_close(found["log-likelihood"], surprise, rtol=1e-9, atol=0)
    torch.testing.assert_close(found["typicality"], (surprise - 700).abs(), rtol=1e-9, atol=0)
    assert ("latent variance" in found) == (count > 1)
    if count > 1:
        codes, means = (torch.stack([d[i] for d in draws]).var(0).flatten(1).sum(1) for i in (0, 1))
        torch.testing.assert_close(found["latent variance"], codes, rtol=1e-9, atol=0)
        if name != "VAE":
            torch.testing.assert_close(found["output variance"], means, rtol=1e-9, atol=0)
    if name == "AE, learned variance":
        torch.testing.assert_close(found["output variance"], draws[0].noise.sum((1, 2, 3)), rtol=1e-9, atol=0)


def test_the_loss_of_the_vae_is_the_negative_lower_bound(rivals: ModuleType) -> None:
    model = rivals.Variational(shape(rivals)).double()
    mean, log_variance = model.code(X)
    q = Independent(Normal(mean, (log_variance / 2).exp()), 1)
    drawn = model.draw(X, 0, seeded())
    density = Independent(Normal(drawn.mean, drawn.noise.sqrt()), 3).log_prob(X)
    bound = density - kl_divergence(q, Independent(Normal(torch.zeros_like(mean), torch.ones_like(mean)), 1))
    torch.testing.assert_close(model.loss(X, seeded()), -bound.mean(), rtol=1e-9, atol=0)


def test_dropout_keeps_the_mean_and_is_on_in_tests(rivals: ModuleType) -> None:
    """100,000 entries of 1: their mean is 1 within 4 standard errors of sqrt(.2 / .8 / 100000)."""
    layer = rivals.Dropout(0.2).eval()
    layer.generator = seeded()
    out = layer(torch.ones(100000))
    assert set(out.unique().tolist()) == {0.0, 1.25}
    assert abs(float(out.mean()) - 1) < 4 * (0.25 / 100000) ** 0.5


def test_dropout_stands_before_every_layer_but_the_first(rivals: ModuleType) -> None:
    model = rivals.BASELINES["MC-dropout AE"](shape(rivals, "convolutional"))
    for half, layers in ((model.encoder, 5), (model.decoder, 5)):
        kinds = [type(each) for each in half]
        before = [kinds[i - 1] is rivals.Dropout for i, kind in enumerate(kinds) if kind in (nn.Linear, nn.Conv2d)]
        assert before == [False] + [True] * (layers - 1)


def test_training_lowers_the_loss(rivals: ModuleType) -> None:
    model = rivals.BASELINES["ensemble"](shape(rivals)).double()
    before = float(model.loss(X).detach())
    rivals.train(model, rivals.Shuffled(X, 2, seeded()), epochs=5, rate=0.01)
    assert float(model.loss(X).detach()) < before
    assert model.embed(X, 9).shape == (5, 3, 2)
