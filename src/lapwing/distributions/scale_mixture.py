"""Numbers whose mean and log-noise are Gaussian: y ~ N(m, exp l), m ~ N(mean, variance), l ~ N(log_noise, spread).

    mean, variance, log_noise, spread   [n], float64: what a regression predicts, for noise that is known (spread 0)
                                        or that a network gives for every input (`HeteroscedasticGaussian`)

m and l are taken as independent. Given l the prediction is a Gaussian; over l it is a mixture of Gaussians around the
same mean, symmetric, with heavier tails the less is known of the noise. Integrals over l are sums over points, right to
about eight digits; without spread there are none. They are taken in units of each row's own scale, so that where a
network has been led so far from its data that exp l is no number any more, a width is infinite, and none is NaN.

>>> import torch
>>> one = torch.ones(1, dtype=torch.float64)
>>> known = ScaleMixture(mean=0 * one, variance=3 * one, log_noise=0 * one, spread=0 * one)       # N(0, 3 + 1)
>>> known.deviation, known.half(0.95).round(decimals=2)
(tensor([2.], dtype=torch.float64), tensor([3.9200], dtype=torch.float64))
>>> unsure = ScaleMixture(0 * one, 0 * one, 0 * one, spread=one)
>>> bool(unsure.log_prob(5 * one) > known.alone().log_prob(5 * one))                         # heavier tails
True
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, log, pi

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.distributions.distribution import Distribution

POINTS, REACH = 65, 8.3
"""Of a Gaussian over l, for averages: exp(-8.3^2 / 2) = 1e-15."""
FINE, DROP, CHUNK = 129, 45.0, 4096
"""For log-densities, where points follow the integrand down to exp(-45) of its top."""
TINY = 1e-300
SPREAD = 4.0
"""The largest variance of a log-noise that is believed."""
FARTHEST, SMALLEST, WIDEST = 700.0, -1400.0, 1e150
"""Exponents of a variance in units of the row's, the least of that unit, and widths in its root, in float64."""
MOST = 16
"""Times as many points where l is so little known that its own scale, on which y changes, would fall between them."""


@dataclass(frozen=True, eq=False)
class ScaleMixture(Distribution):
    """A prediction for each of n numbers; see the head of this module."""

    mean: Float[Tensor, " n"]  # pyright: ignore[reportIncompatibleMethodOverride]
    variance: Float[Tensor, " n"]
    log_noise: Float[Tensor, " n"]
    spread: Float[Tensor, " n"]

    @property
    def epistemic(self) -> Float[Tensor, " n"]:
        """Standard deviation of m, which more data would settle."""
        return self.variance.sqrt()

    @property
    def noise(self) -> Float[Tensor, " n"]:
        """Standard deviation of y around m: the root of E exp l = exp(log_noise + spread / 2)."""
        return ((self.log_noise + self.spread / 2) / 2).exp()

    @property
    def deviation(self) -> Float[Tensor, " n"]:
        """Standard deviation of y."""
        return torch.hypot(self.epistemic, self.noise)

    @property
    def parts(self) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        """The deviation as two: by the weights and by the noise."""
        return self.epistemic, self.noise

    @staticmethod
    def of_sigma(value: Float[Tensor, "*n c"], variance: Float[Tensor, "*n c"], sigma: Tensor) -> ScaleMixture:
        """From outputs that are means, one after the other, with known noise: one for all, or one per output."""
        level = 2 * sigma.double().log().to(value.device).expand(value.shape)
        given = value, variance.clamp_min(0), level, torch.zeros_like(value)
        return ScaleMixture(*(part.reshape(-1).double().cpu() for part in given))

    @staticmethod
    def of_heads(value: Float[Tensor, "*n two"], variance: Float[Tensor, "*n two"]) -> ScaleMixture:
        """From outputs of which the first half are means and the second log-variances, one after the other.

        The variance of a linearised log-noise grows without bound away from the data, and with it E exp l: beyond
        `SPREAD`, a factor of e^2 in the deviation either way at two deviations of l, it says no more.
        """
        (mean, level), (of_mean, of_level) = value.chunk(2, -1), variance.chunk(2, -1)
        given = mean, of_mean.clamp_min(0), level, of_level.clamp(0, SPREAD)
        return ScaleMixture(*(part.reshape(-1).double().cpu() for part in given))

    def alone(self) -> ScaleMixture:
        """What the network says without error bars: N(mean, exp log_noise)."""
        return replace(self, variance=torch.zeros_like(self.mean), spread=torch.zeros_like(self.mean))

    def rescaled(self, scale: float, shift: float) -> ScaleMixture:
        """In other units, y * scale + shift; scale > 0."""
        return ScaleMixture(
            self.mean * scale + shift, self.variance * scale**2, self.log_noise + 2 * log(scale), self.spread
        )

    def log_prob(self, y: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """Log-density at y."""
        unit = self._log_unit
        errors = (y - self.mean) * (-unit / 2).exp()
        taken = (errors.square(), self.variance.log() - unit, self.log_noise - unit, self.spread)
        squares, log_variance, level, _ = taken
        total = log_variance.exp() + level.exp()
        known = -(squares / total + total.log() + log(2 * pi)) / 2
        unsure = self.spread != 0  # NaN is unsure, too
        if bool(unsure.any()):
            parts = (torch.split(each[unsure], CHUNK) for each in taken)
            known[unsure] = torch.cat([_log_mixture(*part) for part in zip(*parts, strict=True)])
        return known - unit / 2

    def below(self, y: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """P(y' < y)."""

        def part(errors: Tensor, inverse: Tensor, weights: Tensor) -> Tensor:
            return torch.special.ndtr(errors.unsqueeze(-1) * inverse) @ weights

        return self._averaged(part, (y - self.mean) * (-self._log_unit / 2).exp())

    def half(self, level: float) -> Float[Tensor, " n"]:
        """Half the width of the central interval of this probability, mean +- half.

        The probability of mean +- w is increasing and concave in w, so that each of Newton's steps ends below the
        solution, and from there they do not overshoot.
        """

        def part(start: Tensor, inverse: Tensor, weights: Tensor) -> Tensor:
            found, left = start.clone(), torch.arange(len(start), device=start.device)
            for _ in range(100):
                width = found[left]
                z = width.unsqueeze(-1) * inverse
                short = level - torch.erf(z / 2**0.5) @ weights
                step = short / ((2 / pi) ** 0.5 * inverse * (-z.square() / 2).exp() @ weights)
                width = width + torch.maximum(step, -width / 2)
                found[left] = torch.where(width < WIDEST, width, width * torch.inf)
                more = (step.abs() > 1e-10 * width) & (width < WIDEST)  # NaN is none
                if not bool(more.any()):
                    break
                if not bool(more.all()):
                    left, inverse = left[more], inverse[more]
            return found

        start = torch.special.ndtri(torch.full_like(self.mean, (1 + level) / 2))
        return self._averaged(part, start) * (self._log_unit / 2).exp()

    def cdf(self, y: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        return self.below(y)

    def interval(self, level: float) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        """mean -+ `half`."""
        half = self.half(level)
        return self.mean - half, self.mean + half

    def width(self, level: float) -> Float[Tensor, " n"]:
        return 2 * self.half(level)  # also where it is small beside the mean

    def draw(self, count: int, generator: torch.Generator | None = None) -> Float[Tensor, "count n"]:
        """New observations, with the mean and the noise drawn anew for each."""
        of_mean, of_level, noise = torch.randn(3, count, len(self.mean), dtype=self.mean.dtype, generator=generator)
        level = self.log_noise + self.spread.sqrt() * of_level
        return self.mean + self.epistemic * of_mean + (level / 2).exp() * noise

    @property
    def _log_unit(self) -> Float[Tensor, " n"]:
        """The larger of the two variances of y at log_noise, in which the total is between one and two."""
        return torch.maximum(self.variance.log(), self.log_noise).clamp(SMALLEST, 1e300)

    def _averaged(self, part: Callable[[Tensor, Tensor, Tensor], Tensor], given: Float[Tensor, " n"]) -> Tensor:
        """`part` of chunks of `given`, of inverse deviations of y at points of l, [n, k], and of their weights [k].

        Deviations are in units of the row's.
        """
        unit, found = self._log_unit, []
        for rows in torch.arange(len(given), device=given.device).split(CHUNK):
            deviation = self.spread[rows].sqrt()
            if bool((deviation > 0).any()):
                points = torch.linspace(
                    -REACH, REACH, _count(POINTS, deviation), dtype=given.dtype, device=given.device
                )
            else:
                points = given.new_zeros(1)  # the noise is known
            level = (self.log_noise - unit)[rows].unsqueeze(-1) + deviation.unsqueeze(-1) * points
            variance = (self.variance[rows].log() - unit[rows]).exp().unsqueeze(-1)
            weights = torch.softmax(-points.square() / 2, 0)
            found.append(part(given[rows], (variance + level.clamp(-FARTHEST, FARTHEST).exp()).rsqrt(), weights))
        return torch.cat(found)


def _count(least: int, deviation: Float[Tensor, " n"]) -> int:
    """Points to take for the least known of these l, an odd number; `least` are enough up to a deviation of two."""
    times = ceil(min(MOST, max(1.0, float(deviation.max()) / 2)))  # max(1, NaN) is 1
    return (least - 1) * times + 1


def _log_mixture(
    squares: Float[Tensor, " n"], log_v: Float[Tensor, " n"], m: Float[Tensor, " n"], s2: Float[Tensor, " n"]
) -> Float[Tensor, " n"]:
    """log of the integral of N(error | 0, v + exp l) N(l | m, s2) over l = m + s t, by the trapezoidal rule over t.

    The logarithm of the first factor rises with l up to v + exp l = error^2 and falls from there. It rises by no more
    than error^2 / 2 (v + exp m) per unit above m, and falls by no more than 1/2, so that the top is between t = -s / 2
    and the lesser of two bounds, and what counts is within reach of these. A grid over that is narrowed down to it.
    """
    s, v, reach = s2.sqrt(), log_v.exp(), (2 * DROP) ** 0.5
    count = _count(FINE, s)
    steps = torch.arange(count, dtype=s.dtype, device=s.device)
    steepest = s / 2 * squares / (v + m.exp()).clamp_min(TINY)
    first, last = -s / 2 - reach, torch.minimum((squares.log() - m) / s, steepest).clamp_min(0) + reach
    squares, v, m, s = (each.unsqueeze(-1) for each in (squares, v, m, s))
    while True:
        width = (last - first) / (count - 1)
        t = first.unsqueeze(-1) + width.unsqueeze(-1) * steps
        total = (v + (m + s * t).exp()).clamp_min(TINY)
        terms = -(squares / total + total.log() + t.square()) / 2
        counts = (terms > terms.amax(-1, keepdim=True) - DROP).to(torch.uint8)
        low, high = counts.argmax(-1), count - 1 - counts.flip(-1).argmax(-1)
        near, far = first + width * (low - 1).clamp_min(0), first + width * (high + 1).clamp_max(count - 1)
        if not bool((far - near < 0.7 * (last - first)).any()):  # NaN narrows nothing
            return torch.logsumexp(terms, -1) + width.log() - log(2 * pi)
        first, last = near, far
