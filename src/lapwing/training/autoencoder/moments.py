"""What an uncertain autoencoder says: latent codes, reconstructions, log p(x), scores; moments of draws in parts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.errors import LikelihoodError
from lapwing.likelihoods import Bernoulli, Gaussian, HeteroscedasticGaussian, Likelihood


@dataclass(frozen=True, eq=False)
class Latent:
    """The latent code of every input: its mean, and its covariance over the K entries of a code."""

    mean: Float[Tensor, "batch *latent"]
    covariance: Float[Tensor, "batch K K"]

    @property
    def variance(self) -> Float[Tensor, "batch *latent"]:
        """Of every entry alone."""
        return self.covariance.diagonal(dim1=-2, dim2=-1).reshape(self.mean.shape)


@dataclass(frozen=True, eq=False)
class Reconstruction:
    """The mean of x (for coins: the probability), its variance by the weights, and the variance of the noise beside it.

    A new x has the variance `variance + noise`.
    """

    mean: Float[Tensor, "batch *data"]
    variance: Float[Tensor, "batch *data"]
    noise: Float[Tensor, "batch *data"]


@dataclass(frozen=True, eq=False)
class LogProb:
    """log p(x) of every input, estimated from draws of the weights.

    `value` is log mean_s p(x | theta_s), with the standard error of that estimate to first order: where a few draws
    have all the weight it is near 1, and says that more are needed. `bound` is mean_s log p(x | theta_s), never above
    `value`, which training maximises (equation 8), with its own.
    """

    value: Float[Tensor, " batch"]
    standard_error: Float[Tensor, " batch"]
    bound: Float[Tensor, " batch"]
    bound_error: Float[Tensor, " batch"]

    @staticmethod
    def of(each: Float[Tensor, "n batch"]) -> LogProb:
        """From log p(x | theta_s) of every draw."""
        n, each = len(each), each.double()
        top = each.amax(0)
        share = (each - top).exp()
        mean = share.mean(0)
        return LogProb(
            top + mean.log(),
            share.std(0) / (n**0.5 * mean),
            each.mean(0),
            each.std(0) / n**0.5,
        )


@dataclass(frozen=True, eq=False)
class Scores:
    """Of every input, larger for what is less like the data.

    negative_log_likelihood   -log p(x)
    typicality                | -log p(x) - its mean over the data |; None where that has not been measured
    latent_variance           summed over the entries of the latent code
    output_variance           summed over the outputs, without noise
    """

    negative_log_likelihood: Float[Tensor, " batch"]
    typicality: Float[Tensor, " batch"] | None
    latent_variance: Float[Tensor, " batch"]
    output_variance: Float[Tensor, " batch"]


@dataclass
class Spread:
    """Mean and variance of draws that come in parts; memory of one."""

    count: int = 0
    mean: Tensor | float = 0.0
    squares: Tensor | float = 0.0

    def add(self, draws: Float[Tensor, "n *shape"]) -> None:
        new, mean = len(draws), draws.mean(0)
        total = self.count + new
        away = mean - self.mean
        self.squares = self.squares + (draws - mean).square().sum(0) + away.square() * (self.count * new / total)
        self.mean = self.mean + away * (new / total)
        self.count = total

    @property
    def variance(self) -> Tensor:
        assert isinstance(self.squares, Tensor)
        return self.squares / (self.count - 1)


def covariance(draws: Float[Tensor, "n batch K"]) -> Float[Tensor, "batch K K"]:
    away = draws - draws.mean(0)
    return torch.einsum("n b k, n b l -> b k l", away, away) / (len(draws) - 1)


def signal(likelihood: Likelihood, f: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of x at known outputs, and the variance of the noise around it, both in the layout of x."""
    if isinstance(likelihood, Bernoulli):
        p = likelihood.predicted(f)
        return p, p * (1 - p)
    found = likelihood.signal_and_noise(likelihood.to_last(f))
    assert found is not None
    mean, noise = (likelihood.from_last(each) for each in found)
    return mean, noise


def of_linearised(likelihood: Likelihood, f: Tensor, variance: Tensor) -> Reconstruction:
    """For Gaussian outputs; the probability of a coin by the probit form, its variance to first order in f."""
    if isinstance(likelihood, Bernoulli):
        p = likelihood.predicted(f)
        slope = p * (1 - p)
        mean = likelihood.probabilities(f, variance)
        return Reconstruction(mean, slope.square() * variance, mean * (1 - mean))
    mean, noise = signal(likelihood, f)
    if isinstance(likelihood, HeteroscedasticGaussian):
        of_mean, of_log = likelihood.to_last(variance).chunk(2, -1)
        # E[exp(l)] of a Gaussian l
        noise = noise * (likelihood.from_last(of_log) / 2).exp()
        variance = likelihood.from_last(of_mean)
    return Reconstruction(mean, variance, noise)


NAMES = ("mse", "learned_variance", "bernoulli")


def likelihood_of(given: str | Likelihood) -> Likelihood:
    """By name, or as given: one of those whose mean and noise are known."""
    if isinstance(given, str):
        if given not in NAMES:
            raise LikelihoodError(
                f"unknown likelihood {given!r}; expected one of {list(NAMES)}, or Gaussian(sigma), "
                "HeteroscedasticGaussian() or Bernoulli() of lapwing.likelihoods."
            )
        return {"mse": Gaussian(), "learned_variance": HeteroscedasticGaussian(), "bernoulli": Bernoulli()}[given]
    if not isinstance(given, (Gaussian, HeteroscedasticGaussian, Bernoulli)):
        raise LikelihoodError(
            f"the likelihood is {given!r}; expected one of {list(NAMES)}, or Gaussian(sigma), "
            "HeteroscedasticGaussian() or Bernoulli() of lapwing.likelihoods."
        )
    return given


def target_shape(likelihood: Likelihood, out: torch.Size) -> torch.Size:
    """The shape of the data that outputs of this shape speak of."""
    if not isinstance(likelihood, HeteroscedasticGaussian):
        return out
    axis = likelihood._axis(torch.empty(out, device="meta"))
    if out[axis] % 2:
        raise LikelihoodError(
            f"the decoder gives outputs of shape {tuple(out)}; expected an even number on axis {axis}: means, then "
            "log-variances. Let its last layer give twice as many."
        )
    return torch.Size((*out[:axis], out[axis] // 2, *out[axis + 1 :]))
