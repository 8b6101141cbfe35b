"""What many Gaussians over the outputs of one network predict for targets: candidates compared with each other.

A `Candidates` holds k posterior precisions scale H + delta of one curvature H. A `Family` says how a Gaussian over the
outputs becomes a prediction of targets:

    Regression   N(f, variance + noise)
    Separate     probabilities by a link of the likelihood that takes the variance of every output
    Joint        probabilities by one that takes their covariance, [B, C, C] for each candidate in turn
    Sampled      any likelihood: an average over draws from the marginals, the same noise for all candidates

A batch is linearised once; `loss` gives -log p(y) as [k, B], `prediction` what one candidate predicts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from math import log, pi

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.errors import CurvatureError, OptionError
from lapwing.likelihoods import Likelihood
from lapwing.likelihoods.links import Link, check_link
from lapwing.linalg import Curvature, LinearMap
from lapwing.linalg.budget import CACHE, chunks

Prediction = Tensor | tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Candidates:
    """Posterior precisions scale H + delta = scale (H + delta / scale), so that one sweep serves them all."""

    scales: Float[Tensor, " k"]
    deltas: Float[Tensor, " k"]

    def __len__(self) -> int:
        return len(self.deltas)

    def variances(self, curvature: Curvature, linear: LinearMap) -> Float[Tensor, "k batch *out"]:
        variances = curvature.variances(linear, self.deltas / self.scales)
        variances = variances / self.scales.to(variances).reshape(-1, 1, 1)
        return variances.reshape(len(self), *linear.value.shape)

    def probabilities(
        self, curvature: Curvature, linear: LinearMap, link: Callable[[Tensor, Tensor], Tensor]
    ) -> Float[Tensor, "k batch classes"]:
        found, at = [], 0
        for part in linear.parts():
            pieces = part.pieces()
            mean = linear.value[at : at + part.batch]
            at += part.batch
            each = []
            for scale, delta in zip(self.scales.tolist(), self.deltas.tolist(), strict=True):
                each.append(link(mean, curvature.with_prior(delta / scale).quadratic(pieces) / scale))
            found.append(torch.stack(each))
        return torch.cat(found, dim=1)


@dataclass(frozen=True, eq=False)
class Batch:
    """One batch: `found` [k, B, *out] holds a variance or a probability for every candidate and output."""

    value: Float[Tensor, "batch *out"]
    found: Float[Tensor, "k batch *out"]
    targets: Tensor
    noise: Float[Tensor, "samples batch *out"] | None = None


@dataclass(frozen=True, eq=False)
class Family(ABC):
    """How the Gaussian over outputs becomes a prediction of targets."""

    likelihood: Likelihood

    def batch(self, curvature: Curvature, linear: LinearMap, candidates: Candidates, targets: Tensor) -> Batch:
        return Batch(linear.value, candidates.variances(curvature, linear), targets)

    @abstractmethod
    def loss(self, batch: Batch) -> Float[Tensor, "k batch"]:
        """-log p(y) of every data point under every candidate."""

    @abstractmethod
    def prediction(self, batch: Batch, number: int) -> Prediction: ...

    def _log_prob(self, outputs: Float[Tensor, "k batch *out"], targets: Tensor) -> Float[Tensor, "k batch"]:
        """log p(y | f) with the candidates as if they were data points, several at a time."""
        found = []
        for part in chunks(len(outputs), 4 * outputs[0].numel() * outputs.element_size(), CACHE):
            some = outputs[part]
            repeated = targets.expand(len(some), *targets.shape).flatten(0, 1)
            found.append(self.likelihood.log_prob(some.flatten(0, 1), repeated).reshape(some.shape[:2]))
        return torch.cat(found)


@dataclass(frozen=True, eq=False)
class Regression(Family):
    """N(f, variance + noise)."""

    sigma: float

    def _noise(self, value: Tensor) -> Tensor:
        known = self.likelihood.signal_and_noise(self.likelihood.to_last(value), self.sigma)
        assert known is not None
        return self.likelihood.from_last(known[1], value.shape)

    def loss(self, batch: Batch) -> Tensor:
        variance = batch.found + self._noise(batch.value)
        terms = (batch.targets - batch.value).square() / variance + variance.log() + log(2 * pi)
        return terms.flatten(2).sum(-1) / 2

    def prediction(self, batch: Batch, number: int) -> tuple[Tensor, Tensor]:
        return batch.value, batch.found[number] + self._noise(batch.value)


@dataclass(frozen=True, eq=False)
class Separate(Family):
    """Probabilities from the variance of every output; the likelihood at the outputs that say the same is the loss."""

    link: str

    def loss(self, batch: Batch) -> Tensor:
        closed = self.likelihood.link(self.link)
        if closed.outputs is not None:
            return -self._log_prob(closed.outputs(batch.value, batch.found), batch.targets)
        said = [self.likelihood.outputs_of(self.prediction(batch, k)) for k in range(len(batch.found))]
        return -self._log_prob(torch.stack(said), batch.targets)

    def prediction(self, batch: Batch, number: int) -> Tensor:
        return self.likelihood.probabilities(batch.value, batch.found[number], self.link)


@dataclass(frozen=True, eq=False)
class Joint(Family):
    """Probabilities from the covariance of the outputs."""

    link: Link

    def batch(self, curvature: Curvature, linear: LinearMap, candidates: Candidates, targets: Tensor) -> Batch:
        self.link.check(linear.value)
        return Batch(linear.value, candidates.probabilities(curvature, linear, self.link.of), targets)

    def loss(self, batch: Batch) -> Tensor:
        said = torch.stack([self.likelihood.outputs_of(p) for p in batch.found])
        return -self._log_prob(said, batch.targets)

    def prediction(self, batch: Batch, number: int) -> Tensor:
        return batch.found[number]


@dataclass(frozen=True, eq=False)
class Sampled(Family):
    """Any likelihood: an average over draws from the marginals of the outputs, the same noise for all candidates."""

    samples: int
    generator: torch.Generator | None

    def batch(self, curvature: Curvature, linear: LinearMap, candidates: Candidates, targets: Tensor) -> Batch:
        value = linear.value
        place = value.device if self.generator is None else self.generator.device
        shape = (self.samples, *value.shape)
        noise = torch.randn(shape, dtype=value.dtype, device=place, generator=self.generator).to(value.device)
        return Batch(value, candidates.variances(curvature, linear), targets, noise)

    def loss(self, batch: Batch) -> Tensor:
        each = [self._log_prob(self.prediction(batch, k), batch.targets).logsumexp(0) for k in range(len(batch.found))]
        return log(self.samples) - torch.stack(each)

    def prediction(self, batch: Batch, number: int) -> Tensor:
        assert batch.noise is not None
        return batch.value + batch.found[number].sqrt() * batch.noise


def family(likelihood: Likelihood, link: str, sigma: float, samples: int, generator: torch.Generator | None) -> Family:
    check_link(link, likelihood.links)
    if likelihood.adds_noise:
        return Regression(likelihood, sigma)
    if sigma != 1:
        raise CurvatureError(
            f"sigma is {sigma} for {type(likelihood).__name__}, which has no noise level; expected sigma = 1. Only "
            "Gaussian regression has one."
        )
    if likelihood.links:
        closed = likelihood.link(link)
        return Joint(likelihood, closed) if closed.joint else Separate(likelihood, link)
    if samples < 1:
        raise OptionError(f"asked for {samples} draws of the outputs; expected at least one.")
    return Sampled(likelihood, samples, generator)
