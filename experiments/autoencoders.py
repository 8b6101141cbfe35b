"""Autoencoders of images that are compared with the Laplacian one: training, draws, and scores in one protocol.

    parts = images("mnist", seed, train=10000, validation=1000, test=2000)     Images: train, validation, test
    shape = Architecture("dense", (512, 256))                                  encoders and decoders, x [N, 1, 28, 28]
    model = BASELINES["VAE"](shape)                                            weights of torch's global random numbers
    train(model, Shuffled(parts.train, 64, generator), epochs, generator=generator)
    draw = model.draw(x, number, generator)                                    code, mean, noise of one network
    found = scores(model, x, samples, generator, entropy)                      larger for what is less like the data
    found = scores_of(laplacian, x, samples, generator)                        the same of a `LaplacianAutoencoder`

Baselines, with tanh and the source's settings (appendix A): an autoencoder with unit variance, one whose variance is
learned (a decoder of its own), a VAE with learned variance (two encoders, two decoders), dropout of .2 between all
layers that stays on in tests, an ensemble of five. All are given as x's density under their reconstructions,
log mean_s N(x | mean_s, noise_s) over draws s: for the VAE too, whose codes are drawn given x.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from math import log, pi
from typing import Any, NamedTuple

import torch
from common import idx_images
from torch import Tensor, nn

from lapwing.training import LaplacianAutoencoder

FLOOR = 1e-3
"""Of learned variances: pixels that are always black would have none."""
SURPRISE, TYPICALITY, LATENT, OUTPUT = "log-likelihood", "typicality", "latent variance", "output variance"
SCORES = (SURPRISE, TYPICALITY, LATENT, OUTPUT)


# -- data -------------------------------------------------------------------------------------------------------------


class Images(NamedTuple):
    """Each [N, 1, 28, 28] in [0, 1], with its labels [N]."""

    train: Tensor
    validation: Tensor
    test: Tensor
    train_labels: Tensor
    validation_labels: Tensor
    test_labels: Tensor


@cache
def images(name: str, seed: int, train: int, validation: int, test: int) -> Images:
    """Training images of a seed from the first 50,000, validation images behind them, the first of the test images."""
    x, y = idx_images(name, "train")
    chosen = torch.randperm(min(50000, len(x) - validation), generator=torch.Generator().manual_seed(seed))[:train]
    held = slice(len(x) - validation, len(x))
    test_x, test_y = idx_images(name, "test", test)
    return Images(x[chosen], x[held], test_x, y[chosen], y[held], test_y)


@dataclass(frozen=True, eq=False)
class Shuffled:
    """Batches of x, in a new order in every pass."""

    x: Tensor
    size: int
    generator: torch.Generator

    def __iter__(self) -> Iterator[Tensor]:
        for rows in torch.randperm(len(self.x), generator=self.generator).split(self.size):
            yield self.x[rows]


# -- networks ---------------------------------------------------------------------------------------------------------


class Dropout(nn.Module):
    """Entries set to zero in training and in tests, by the random numbers of `generator`."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.generator: torch.Generator | None = None

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.rand(x.shape, generator=self.generator) >= self.share
        return x * kept / (1 - self.share)


@dataclass(frozen=True)
class Architecture:
    """Encoders and decoders that mirror them, of images [N, 1, 28, 28].

    "dense": linear layers 784, *hidden, latent. "convolutional": two of 3 x 3 with `channels` and max-pooling, then
    linear layers channels[1] * 49, *hidden, latent; nearest upsampling on the way back (source, A.2).
    """

    kind: str
    hidden: tuple[int, ...]
    channels: tuple[int, int] = (4, 8)
    latent: int = 2
    activation: type[nn.Module] = nn.Tanh
    dropout: float = 0.0

    def encoder(self) -> nn.Sequential:
        return nn.Sequential(*self._between([*self._first(), *self._dense((self._entries, *self.hidden, self.latent))]))

    def decoder(self) -> nn.Sequential:
        back = self._dense((self.latent, *self.hidden[::-1], self._entries))
        return nn.Sequential(*self._between([*back, *self._last()]))

    @property
    def _entries(self) -> int:
        return 784 if self.kind == "dense" else 49 * self.channels[1]

    def _first(self) -> list[nn.Module]:
        if self.kind == "dense":
            return [nn.Flatten()]
        one, two = self.channels
        convolutions = [nn.Conv2d(1, one, 3, padding=1), nn.Conv2d(one, two, 3, padding=1)]
        return [*(each for c in convolutions for each in (c, self.activation(), nn.MaxPool2d(2))), nn.Flatten()]

    def _last(self) -> list[nn.Module]:
        if self.kind == "dense":
            return [nn.Unflatten(1, (1, 28, 28))]
        one, two = self.channels
        return [
            *(self.activation(), nn.Unflatten(1, (two, 7, 7)), nn.Upsample(scale_factor=2)),
            *(nn.Conv2d(two, one, 3, padding=1), self.activation(), nn.Upsample(scale_factor=2)),
            nn.Conv2d(one, 1, 3, padding=1),
        ]

    def _dense(self, sizes: tuple[int, ...]) -> list[nn.Module]:
        layers = [each for a, b in pairwise(sizes) for each in (nn.Linear(a, b), self.activation())]
        return layers[:-1]

    def _between(self, layers: list[nn.Module]) -> list[nn.Module]:
        """With dropout before every layer that has weights, but the first."""
        weighted = [each for each in layers if isinstance(each, (nn.Linear, nn.Conv2d))]
        if not self.dropout:
            return layers
        return [
            more
            for each in layers
            for more in ((Dropout(self.dropout), each) if each in weighted and each is not weighted[0] else (each,))
        ]


# -- models -----------------------------------------------------------------------------------------------------------


class Draw(NamedTuple):
    """What one network says of x: code [N, latent], mean and variance [N, 1, 28, 28] of its pixels."""

    code: Tensor
    mean: Tensor
    noise: Tensor


class Baseline(nn.Module, ABC):
    """An autoencoder from which networks are drawn; `networks` is how many there are, None where there is no end."""

    networks: int | None = 1

    @abstractmethod
    def draw(self, x: Tensor, number: int = 0, generator: torch.Generator | None = None) -> Draw:
        """The network of that number, where they are numbered; else a new one."""

    @abstractmethod
    def loss(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Per data point."""

    def embed(self, x: Tensor, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Codes [n, N, latent] by n networks, or by as many as there are."""
        with torch.no_grad():
            return torch.stack([self.draw(x, each, generator).code for each in range(self.count(n))])

    def count(self, n: int) -> int:
        return n if self.networks is None else min(n, self.networks)


class Plain(Baseline):
    """An autoencoder: unit variance, or one that a decoder of its own gives; with dropout in its layers or without."""

    def __init__(self, shape: Architecture, learned: bool = False) -> None:
        super().__init__()
        self.encoder, self.decoder = shape.encoder(), shape.decoder()
        self.variance = shape.decoder() if learned else None
        self.networks = None if shape.dropout else 1

    def draw(self, x: Tensor, number: int = 0, generator: torch.Generator | None = None) -> Draw:
        for module in self.modules():
            if isinstance(module, Dropout):
                module.generator = generator
        code = self.encoder(x)
        mean = self.decoder(code)
        return Draw(code, mean, torch.ones_like(mean) if self.variance is None else _positive(self.variance(code)))

    def loss(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return -log_density(x, self.draw(x, 0, generator)).mean()


class Variational(Baseline):
    """A VAE: q(z | x) and p(x | z) are Gaussians, with networks of their own for means and variances."""

    networks = None

    def __init__(self, shape: Architecture, weight: float = 1.0) -> None:
        super().__init__()
        self.encoder, self.spread = shape.encoder(), shape.encoder()
        self.decoder, self.variance = shape.decoder(), shape.decoder()
        self.weight = weight

    def code(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log-variance of q(z | x)."""
        return self.encoder(x), self.spread(x)

    def draw(self, x: Tensor, number: int = 0, generator: torch.Generator | None = None) -> Draw:
        return self._of(*self.code(x), generator)

    def _of(self, mean: Tensor, log_variance: Tensor, generator: torch.Generator | None) -> Draw:
        z = mean + (log_variance / 2).exp() * torch.randn(mean.shape, generator=generator)
        return Draw(z, self.decoder(z), _positive(self.variance(z)))

    def loss(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """The negative lower bound, its divergence times `weight`."""
        mean, log_variance = self.code(x)
        divergence = (log_variance.exp() + mean.square() - 1 - log_variance).sum(1) / 2
        return (self.weight * divergence - log_density(x, self._of(mean, log_variance, generator))).mean()


class Ensemble(Baseline):
    """Autoencoders of unit variance, each trained alone. Its `loss` is the sum of theirs, on the same batches."""

    def __init__(self, members: Iterable[Baseline]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.networks = len(self.members)

    def draw(self, x: Tensor, number: int = 0, generator: torch.Generator | None = None) -> Draw:
        member = self.members[number % len(self.members)]
        assert isinstance(member, Baseline)
        return member.draw(x, 0, generator)

    def loss(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return torch.stack([each.loss(x, generator) for each in self.members if isinstance(each, Baseline)]).sum()


BASELINES: dict[str, Callable[[Architecture], Baseline]] = {
    "AE": Plain,
    "AE, learned variance": lambda shape: Plain(shape, learned=True),
    "VAE": Variational,
    "MC-dropout AE": lambda shape: Plain(replace(shape, dropout=0.2)),
    "ensemble": lambda shape: Ensemble(Plain(shape) for _ in range(5)),
}


def _positive(log_variance: Tensor) -> Tensor:
    return FLOOR + log_variance.exp()


def log_density(x: Tensor, draw: Draw) -> Tensor:
    """log N(x | mean, noise), summed over the pixels."""
    each = (x - draw.mean).square() / draw.noise + draw.noise.log() + log(2 * pi)
    return -each.flatten(1).sum(1) / 2


def train(
    model: Baseline,
    batches: Iterable[Tensor],
    epochs: int,
    rate: float = 1e-3,
    generator: torch.Generator | None = None,
) -> Baseline:
    """Adam; the same model, trained."""
    adam = torch.optim.Adam(model.parameters(), lr=rate)
    for _ in range(epochs):
        for x in batches:
            adam.zero_grad()
            model.loss(x, generator).backward()
            adam.step()
    return model


# -- scores -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def scores(
    model: Baseline, x: Tensor, samples: int, generator: torch.Generator, entropy: float | None = None
) -> dict[str, Tensor]:
    """Those of SCORES that the model has, each [N]; typicality where the mean of -log p(x) over data is given.

    The output's variance is that of the means over networks, and the mean of what is learned beside it.
    """
    draws = [model.draw(x, each, generator) for each in range(model.count(samples))]
    densities = torch.stack([log_density(x, each).double() for each in draws])
    surprise = log(len(draws)) - densities.logsumexp(0)
    found = {SURPRISE: surprise}
    if entropy is not None:
        found[TYPICALITY] = (surprise - entropy).abs()
    several, learned = len(draws) > 1, getattr(model, "variance", None) is not None
    if several:
        found[LATENT] = _variance([each.code for each in draws])
    if several or learned:
        by_networks = _variance([each.mean for each in draws]) if several else torch.zeros(len(x))
        noise = torch.stack([each.noise.flatten(1).sum(1) for each in draws]).mean(0)
        found[OUTPUT] = by_networks + noise if learned else by_networks
    return found


def scores_of(
    model: LaplacianAutoencoder, x: Tensor, samples: int, generator: torch.Generator | None = None
) -> dict[str, Tensor]:
    """The same; typicality where `measure_entropy` was called before."""
    found = model.ood_scores(x, samples, generator)
    four = (found.negative_log_likelihood, found.typicality, found.latent_variance, found.output_variance)
    return {name: each for name, each in zip(SCORES, four, strict=True) if each is not None}


def _variance(parts: list[Tensor]) -> Tensor:
    """Over the draws, summed over the entries."""
    return torch.stack(parts).var(0).flatten(1).sum(1)


# -- the Laplacian autoencoder ----------------------------------------------------------------------------------------


def one_sum(encoder: nn.Module, decoder: nn.Module, **options: Any) -> LaplacianAutoencoder:
    """H begins with N, as `released`, and settles at the sum over the data in some hundred steps: no cold posterior."""
    return LaplacianAutoencoder.released(encoder, decoder, weight=1e-2, forgetting=1e-2, **options)


SETTINGS: dict[str, Callable[..., LaplacianAutoencoder]] = {
    "online, paper": LaplacianAutoencoder,
    "online, released": LaplacianAutoencoder.released,
    "online, one sum": one_sum,
}
"""How H is kept in online training: see docs/autoencoders.md."""


def with_prior(model: LaplacianAutoencoder, precision: float) -> LaplacianAutoencoder:
    """The same model with another prior precision beside the curvature that it has."""
    assert model.running is not None
    model.schedule = replace(model.schedule, prior_precision=precision)
    model.running = replace(model.running, schedule=model.schedule)
    return model


def by_validation(
    model: LaplacianAutoencoder, x: Tensor, precisions: Iterable[float], samples: int, seed: int
) -> LaplacianAutoencoder:
    """With the prior precision under which log p(x) of these images is largest, the same draws for each."""

    def value(precision: float) -> float:
        generator = torch.Generator().manual_seed(seed)
        return float(with_prior(model, precision).log_prob(x, samples, generator).value.mean())

    return with_prior(model, max(precisions, key=value))
