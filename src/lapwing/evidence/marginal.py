"""Evidence: the log marginal likelihood after one data pass, as a function of prior precisions, noise and temperature.

    log Z = log p(y | f*) + log p(theta*) + (P / 2) log 2 pi - 1/2 log det(H / (sigma^2 T) + prior)

Every constant is in it: for a linear-Gaussian model at its mode it is the log marginal likelihood, to rounding. The
curvature is decomposed once; every further evaluation costs O(P) or so and is differentiable in all arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import pi

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lapwing.errors import CurvatureError
from lapwing.linalg import Curvature, Precision
from lapwing.linalg.contracts import GroupedLogdet, scaled
from lapwing.priors import AnyPrior, Gaussian, Prior


@dataclass(frozen=True, eq=False)
class GaussianFit:
    """What the noise level needs to know of a regression: the number of targets and the sum of squared residuals."""

    targets: int
    squares: Float[Tensor, ""]

    def __mul__(self, scale: float | int) -> GaussianFit:
        """The fit of `scale` times as many rows of the same kind."""
        return GaussianFit(round(self.targets * scale), self.squares * scale)

    def log_likelihood(self, sigma: Tensor) -> Float[Tensor, ""]:
        """sum log N(y | f*, sigma^2)."""
        return -self.targets / 2 * torch.log(2 * pi * sigma**2) - self.squares / (2 * sigma**2)

    def noise_range(self) -> tuple[float, float]:
        """Within which sigma is searched: from half to 1e6 times the residuals' root mean square r.

        No optimum lies under r, as sigma^2 = N r^2 / (N - gamma) there. Where r is zero, and the evidence grows without
        end as sigma falls, it ends at `lowest_noise`.
        """
        rms = float(self.squares.detach().double() / max(self.targets, 1)) ** 0.5
        lowest = max(rms / 2, lowest_noise(self.squares.dtype))
        return lowest, max(1.0, 1e6 * lowest)


def lowest_noise(dtype: torch.dtype) -> float:
    """finfo.tiny ** 0.2 (2.6e-8 in float32, 3e-62 in float64): its fourth power still has a finite reciprocal."""
    return torch.finfo(dtype).tiny ** 0.2


@dataclass(frozen=True, eq=False)
class _ByGroup:
    """What log Z needs to know of a prior's groups: their sizes, |theta - mean|^2 of each, and the log-determinant."""

    groups: Int[Tensor, " params"] | None
    about: Tensor | float
    entries: Float[Tensor, " groups"]
    squares: Float[Tensor, " groups"]
    logdet: GroupedLogdet


@dataclass(frozen=True, eq=False)
class Evidence:
    """`fit` is the log-likelihood at the mode, or a `GaussianFit` when the noise level is free.

    With a `GaussianFit`, `curvature` is the one at unit noise, and sigma to the power `noise_power` divides it: 2 for
    second derivatives, 4 for the empirical Fisher, whose gradients carry 1 / sigma^2 each.
    """

    curvature: Curvature
    mean: Float[Tensor, " params"]
    fit: Float[Tensor, ""] | GaussianFit
    noise_power: int = 2

    @property
    def has_noise(self) -> bool:
        return isinstance(self.fit, GaussianFit)

    @property
    def targets(self) -> int:
        """Numbers that the noise level is estimated from; none where there is no noise level."""
        return self.fit.targets if isinstance(self.fit, GaussianFit) else 0

    @property
    def accuracy(self) -> float:
        """To which the weights are known, relatively: they are given."""
        return 0.0

    @property
    def least(self) -> float:
        """gamma below which a search raises a precision no further: none but zero, as a round is cheap."""
        return 0.0

    def noise_range(self) -> tuple[float, float]:
        """Within which sigma is searched."""
        return self.fit.noise_range() if isinstance(self.fit, GaussianFit) else (1.0, 1.0)

    def settled(self, prior: AnyPrior, sigma: float | Tensor = 1.0, temperature: float | Tensor = 1.0) -> Evidence:
        """The evidence at the weights that go with a prior: at these, whatever it is. `EvidenceAtMode` moves them."""
        return self

    def scaled(self, scale: float | int) -> Evidence:
        """The evidence of `scale` times as many rows of the same kind."""
        if scale == 1:
            return self
        return replace(self, curvature=self.curvature * scale, fit=self.fit * scale)

    def precision(self, prior: AnyPrior, sigma: float | Tensor = 1.0, temperature: float | Tensor = 1.0) -> Precision:
        """The posterior precision."""
        return prior.added_to(scaled(self.curvature, self.scale(sigma, temperature)))

    def scale(self, sigma: float | Tensor, temperature: float | Tensor) -> Float[Tensor, ""] | int:
        """What multiplies the curvature; a plain 1 where nothing does."""
        scale = 1 / (self._noise(sigma) ** self.noise_power * self._positive(temperature, "temperature"))
        return 1 if not scale.requires_grad and float(scale) == 1 else scale

    def log_marginal(
        self, prior: AnyPrior, sigma: float | Tensor = 1.0, temperature: float | Tensor = 1.0
    ) -> Float[Tensor, ""]:
        """log Z of the Laplace approximation; a temperature divides the log-likelihood as it does the curvature."""
        sigma = self._noise(sigma)
        if isinstance(prior, Gaussian):
            logdet = self.precision(prior, sigma, temperature).logdet()
            ratio = (prior.logdet() - prior.scatter(self.mean) - logdet) / 2
        else:
            by_group = self._by_group(prior)
            logdet = by_group.logdet(prior.precisions, self.scale(sigma, temperature))
            ratio = (prior.logdet(by_group.entries) - (by_group.squares * prior.precisions).sum() - logdet) / 2
        return self.log_likelihood(sigma, temperature) + ratio

    def log_likelihood(self, sigma: float | Tensor = 1.0, temperature: float | Tensor = 1.0) -> Float[Tensor, ""]:
        """log p(y | theta) / T."""
        sigma = self._noise(sigma)
        fit = self.fit.log_likelihood(sigma) if isinstance(self.fit, GaussianFit) else self.fit
        return fit / self._positive(temperature, "temperature")

    def _by_group(self, prior: Prior) -> _ByGroup:
        """Of the groups and the mean of a prior, whatever its precisions; those that were asked for last are kept."""
        kept = self._kept.get("last")
        if kept is None or kept.groups is not prior.groups or kept.about is not prior.mean:
            squares = prior.sums((self.mean - prior.mean).square())
            logdet = self.curvature.grouped_logdet(prior.groups)
            kept = _ByGroup(prior.groups, prior.mean, prior.entries(), squares, logdet)
            # a graph is for one use, and autograd has none for tensors of inference mode
            if not squares.requires_grad and not squares.is_inference():
                self._kept["last"] = kept
        return kept

    @cached_property
    def _kept(self) -> dict[str, _ByGroup]:
        return {}

    def effective_parameters(
        self, prior: AnyPrior, sigma: float | Tensor = 1.0, temperature: float | Tensor = 1.0
    ) -> Float[Tensor, " groups"]:
        """gamma of every group: how many of its parameters the data determine, sum lambda / (lambda + prior).

        Under a previous posterior its data count as well: the groups and the prior are those that it began with.
        """
        base = prior.base if isinstance(prior, Gaussian) else prior
        trace = self.precision(prior, sigma, temperature).inverse_trace(base.groups)
        return base.entries() - base.precisions * trace

    def rounding(self, prior: AnyPrior) -> Float[Tensor, " groups"]:
        """Of gamma, which is the difference of two numbers of as many as a group has parameters."""
        base = prior.base if isinstance(prior, Gaussian) else prior
        return 8 * torch.finfo(self.mean.dtype).eps * base.entries()

    def sampled_effective_parameters(
        self,
        prior: Prior,
        sigma: float | Tensor = 1.0,
        temperature: float | Tensor = 1.0,
        *,
        samples: int = 100,
        generator: torch.Generator | None = None,
    ) -> tuple[Float[Tensor, " groups"], Float[Tensor, " groups"]]:
        """gamma of every group by draws z of the posterior, and its standard error: E[z (precision - prior) z].

        Of one group with a curvature it is at most sqrt(2 gamma / samples), also where gamma is a small part of P.
        """
        if samples < 2:
            raise CurvatureError(f"{samples} draws have no standard error; expected at least 2.")
        precision = self.precision(prior, sigma, temperature)
        draws = precision.draw(samples, generator)
        each = draws * (precision.mv(draws) - prior.precision() * draws)
        groups = (
            prior.groups if prior.groups is not None else torch.zeros(prior.size, dtype=torch.long, device=each.device)
        )
        sums = each.new_zeros(samples, len(prior.precisions)).index_add(1, groups, each)
        return sums.mean(0), sums.std(0) / samples**0.5

    def _noise(self, sigma: float | Tensor) -> Tensor:
        sigma = self._positive(sigma, "sigma")
        if not self.has_noise and (sigma.requires_grad or float(sigma) != 1):
            raise CurvatureError(
                "a noise level was given for a likelihood that has none; expected sigma = 1. Only Gaussian regression "
                "has a free noise level."
            )
        return sigma

    def _positive(self, value: float | Tensor, name: str) -> Tensor:
        number = torch.as_tensor(value, dtype=self.mean.dtype, device=self.mean.device).reshape(())
        if not bool(torch.isfinite(number)) or bool(number <= 0):
            raise CurvatureError(f"{name} is {float(number)}; expected a finite number > 0.")
        return number
