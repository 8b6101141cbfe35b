"""Amounts whose mean and log-noise are Gaussian: y ~ N(m, exp l), m ~ N(mean, variance), l ~ N(log_noise, spread).

    mean, variance, log_noise, spread   [n], float64: what a regression predicts, for noise that is known (spread 0)
                                        or that a network gives for every input (`HeteroscedasticGaussian`)

m and l are taken as independent. Given l the prediction is a Gaussian; over l it is a mixture of Gaussians around the
same mean, symmetric, with heavier tails the less is known of the noise. Integrals over l are sums over points, right to
about eight digits; without spread there are none.

>>> import torch
>>> one = torch.ones(1, dtype=torch.float64)
>>> known = Amounts(mean=0 * one, variance=3 * one, log_noise=0 * one, spread=0 * one)       # N(0, 3 + 1)
>>> known.deviation, known.half(0.95).round(decimals=2)
(tensor([2.], dtype=torch.float64), tensor([3.9200], dtype=torch.float64))
>>> unsure = Amounts(0 * one, 0 * one, 0 * one, spread=one)
>>> bool(unsure.log_prob(5 * one) > known.alone().log_prob(5 * one))                         # heavier tails
True
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import log, pi

import torch
from jaxtyping import Float
from torch import Tensor

POINTS, REACH = 65, 8.3
"""Of a Gaussian over l, for averages: exp(-8.3^2 / 2) = 1e-15."""
FINE, DROP, CHUNK = 129, 45.0, 4096
"""For log-densities, where points follow the integrand down to exp(-45) of its top."""


@dataclass(frozen=True, eq=False)
class Amounts:
    """A prediction for each of n amounts; see the head of this module."""

    mean: Float[Tensor, " n"]
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
        return (self.variance + self.noise.square()).sqrt()

    def alone(self) -> Amounts:
        """What the network says without error bars: N(mean, exp log_noise)."""
        return replace(self, variance=torch.zeros_like(self.mean), spread=torch.zeros_like(self.mean))

    def rescaled(self, scale: float, shift: float) -> Amounts:
        """In other units, y * scale + shift; scale > 0."""
        return Amounts(
            self.mean * scale + shift, self.variance * scale**2, self.log_noise + 2 * log(scale), self.spread
        )

    def log_prob(self, y: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """Log-density at y."""
        squares = (y - self.mean).square()
        total = self.variance + self.log_noise.exp()
        known = -(squares / total + total.log() + log(2 * pi)) / 2
        unsure = self.spread > 0
        if bool(unsure.any()):
            taken = (squares, self.variance, self.log_noise, self.spread)
            parts = (torch.split(each[unsure], CHUNK) for each in taken)
            known[unsure] = torch.cat([_log_mixture(*part) for part in zip(*parts, strict=True)])
        return known

    def below(self, y: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """P(amount < y)."""

        def part(errors: Tensor, inverse: Tensor, weights: Tensor) -> Tensor:
            return torch.special.ndtr(errors.unsqueeze(-1) * inverse) @ weights

        return self._averaged(part, y - self.mean)

    def half(self, level: float) -> Float[Tensor, " n"]:
        """Half the width of the central interval of this probability, mean +- half.

        The probability of mean +- w is increasing and concave in w, so that each of Newton's steps ends below the
        solution, and from there they do not overshoot.
        """

        def part(width: Tensor, inverse: Tensor, weights: Tensor) -> Tensor:
            for _ in range(100):
                z = width.unsqueeze(-1) * inverse
                short = level - torch.erf(z / 2**0.5) @ weights
                step = short / ((2 / pi) ** 0.5 * inverse * (-z.square() / 2).exp() @ weights)
                step = torch.maximum(step, -width / 2)
                width = width + step
                if bool((step.abs() <= 1e-10 * width).all()):
                    break
            return width

        middle = (self.variance + self.log_noise.exp()).sqrt()
        return self._averaged(part, middle * torch.special.ndtri(torch.full_like(middle, (1 + level) / 2)))

    def _averaged(self, part: Callable[[Tensor, Tensor, Tensor], Tensor], given: Float[Tensor, " n"]) -> Tensor:
        """`part` of chunks of `given`, of inverse deviations of y at points of l, [n, k], and of their weights [k]."""
        points = torch.linspace(-REACH, REACH, POINTS, dtype=self.mean.dtype, device=self.mean.device)
        if not bool((self.spread > 0).any()):
            points = points[POINTS // 2].unsqueeze(0)  # the noise is known
        weights, found = torch.softmax(-points.square() / 2, 0), []
        for rows in torch.arange(len(given), device=given.device).split(CHUNK):
            noise = (self.log_noise[rows].unsqueeze(-1) + self.spread[rows].sqrt().unsqueeze(-1) * points).exp()
            found.append(part(given[rows], (self.variance[rows].unsqueeze(-1) + noise).rsqrt(), weights))
        return torch.cat(found)


def _log_mixture(
    squares: Float[Tensor, " n"], v: Float[Tensor, " n"], m: Float[Tensor, " n"], s2: Float[Tensor, " n"]
) -> Float[Tensor, " n"]:
    """log of the integral of N(error | 0, v + exp l) N(l | m, s2) over l, by the trapezoidal rule.

    The first factor grows with l up to v + exp l = error^2 and falls from there, so that the integrand is within reach
    of m or between m and there. A grid over that is narrowed down, a few times, to where the integrand counts.
    """
    s, squares, v, m, s2 = s2.sqrt(), *(each.unsqueeze(-1) for each in (squares, v, m, s2))
    steps = torch.linspace(0, 1, FINE, dtype=v.dtype, device=v.device)
    reach = 9.5 * s + s.square() / 2
    first, last = m.squeeze(-1) - reach, torch.maximum(m, squares.clamp_min(1e-300).log()).squeeze(-1) + reach
    while True:
        points = first.unsqueeze(-1) + (last - first).unsqueeze(-1) * steps
        total = v + points.exp()
        terms = -(squares / total + total.log() + (points - m).square() / s2) / 2
        counts = (terms > terms.amax(-1, keepdim=True) - DROP).to(torch.uint8)
        low, high = counts.argmax(-1, keepdim=True), FINE - 1 - counts.flip(-1).argmax(-1, keepdim=True)
        near = points.gather(-1, (low - 1).clamp_min(0)).squeeze(-1)
        far = points.gather(-1, (high + 1).clamp_max(FINE - 1)).squeeze(-1)
        if bool((far - near >= 0.7 * (last - first)).all()):
            width = (last - first) / (FINE - 1)
            return torch.logsumexp(terms, -1) + width.log() - log(2 * pi) - s.log()
        first, last = near, far
