"""Counts whose log-rate is Gaussian: y ~ Poisson(exp f), f ~ N(log_rate, variance).

    log_rate, variance   [n], float

Mean and variance of y have closed forms, `log_prob` is an integral of one log-concave function, `cdf` one over a gamma
law. A variance of zero gives the Poisson law. Integrals are sums over `POINTS` points, right to about ten digits.

>>> import torch
>>> law = PoissonLognormal(torch.zeros(1, dtype=torch.float64), torch.full((1,), 0.5, dtype=torch.float64))
>>> round(float(law.mean), 4)                              # exp(0.25)
1.284
>>> none = torch.zeros(1)
>>> torch.allclose(law.cdf(none), law.log_prob(none).exp(), rtol=1e-9)
True
"""

from __future__ import annotations

from dataclasses import dataclass
from math import pi
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.distributions.distribution import Distribution

POINTS, CHUNK = 257, 4096
DROP = 45.0
"""Where a log-density is this much below its top, it is left out: exp(-45) = 3e-20."""


LARGEST_RATE = 1e15
"""torch.poisson counts in int64."""


@dataclass(frozen=True, eq=False)
class PoissonLognormal(Distribution):
    """A prediction for each of n counts; see the head of this module."""

    discrete: ClassVar[bool] = True

    log_rate: Float[Tensor, " n"]
    variance: Float[Tensor, " n"]

    @staticmethod
    def of_outputs(value: Float[Tensor, "*n c"], variance: Float[Tensor, "*n c"]) -> PoissonLognormal:
        """From outputs that are log-rates, one after the other."""
        return PoissonLognormal(*(part.reshape(-1).double().cpu() for part in (value, variance.clamp_min(0))))

    @property
    def mean(self) -> Float[Tensor, " n"]:
        """E y = exp(log_rate + variance / 2)."""
        return torch.exp(self.log_rate + self.variance / 2)

    @property
    def total(self) -> Float[Tensor, " n"]:
        """Var y = E y + (exp(variance) - 1) (E y)^2."""
        expected = self.mean
        return expected + torch.expm1(self.variance) * expected.square()

    @property
    def deviation(self) -> Float[Tensor, " n"]:
        """Standard deviation of y."""
        return self.total.sqrt()

    @property
    def epistemic(self) -> Float[Tensor, " n"]:
        """Of the log-rate, the scale on which the network is linear: a large rate is not by itself an unsure one."""
        return self.variance.sqrt()

    @property
    def parts(self) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        """The deviation as two: by the rate, which more data would settle, and by chance given the rate."""
        expected = self.mean
        return (self.total - expected).clamp_min(0).sqrt(), expected.sqrt()

    def log_prob(self, y: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """log of the integral of Poisson(y | exp f) N(f | log_rate, variance) over f, by the trapezoidal rule.

        The logarithm g of the integrand is concave with g'' <= -1 / variance, so that all that counts lies within
        sqrt(2 DROP variance) of its top. Bisection narrows that down.
        """
        chunks = (torch.split(part.double(), CHUNK) for part in (y, self.log_rate, self.variance))
        return torch.cat([_log_prob(*chunk) for chunk in zip(*chunks, strict=True)]).to(self.log_rate.dtype)

    def cdf(self, y: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """P(count <= y): a step at every whole number, zero below zero.

        Given f it is P(G > exp f) for G of the gamma law with shape y + 1, a step of width 1 / sqrt(y + 1) in f. Where
        f is narrower than that, Gauss-Hermite over f; else the same number is E Phi((log G - log_rate) / deviation)
        over G.
        """
        whole = y.double().clamp_min(0).floor() + 1, self.log_rate.double(), self.variance.double().clamp_min(0).sqrt()
        chunks = (torch.split(part, CHUNK) for part in whole)
        above_zero = torch.cat([_cdf(*chunk) for chunk in zip(*chunks, strict=True)])
        return torch.where(y < 0, 0.0, above_zero).to(self.log_rate.dtype)

    def interval(self, level: float) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        """The (1 - level) / 2 and the (1 + level) / 2 quantile; both belong to it."""
        return self._quantile((1 - level) / 2), self._quantile((1 + level) / 2)

    def _quantile(self, share: float) -> Float[Tensor, " n"]:
        """The smallest count with `cdf` >= share, by bisection."""
        low, high = torch.full_like(self.log_rate, -1), torch.ones_like(self.log_rate)
        while bool((short := (self.cdf(high) < share) & (high < LARGEST_RATE)).any()):
            low, high = torch.where(short, high, low), torch.where(short, 2 * high, high)
        while bool((high - low > 1).any()):
            middle = ((low + high) / 2).floor()
            enough = self.cdf(middle) >= share
            low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
        return high

    def draw(self, count: int, generator: torch.Generator | None = None) -> Float[Tensor, "count n"]:
        """Counts, with the rate drawn anew for each."""
        noise = torch.randn(count, len(self.log_rate), dtype=self.log_rate.dtype, generator=generator)
        rates = (self.log_rate + self.epistemic * noise).exp().clamp_max(LARGEST_RATE)
        return torch.poisson(rates, generator=generator)


def _log_prob(y: Float[Tensor, " n"], m: Float[Tensor, " n"], v: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    v = v.clamp_min(1e-14)

    def g(f: Tensor, y: Tensor, m: Tensor, v: Tensor) -> Tensor:
        return y * f - f.exp() - torch.lgamma(y + 1) - (f - m).square() / (2 * v) - torch.log(2 * pi * v) / 2

    top = torch.maximum(m, y.log())  # at or right of the top, from where Newton's steps come down without overshooting
    for _ in range(200):
        step = (y - top.exp() - (top - m) / v) / (top.exp() + 1 / v)
        top = top + step
        if bool((step.abs() <= 1e-12 * (1 + top.abs())).all()):
            break
    highest = g(top, y, m, v)
    ends = []
    for sign in (-1, 1):
        near, far = torch.zeros_like(top), (2 * DROP * v).sqrt()
        for _ in range(30):
            middle = (near + far) / 2
            inside = g(top + sign * middle, y, m, v) > highest - DROP
            near, far = torch.where(inside, middle, near), torch.where(inside, far, middle)
        ends.append(top + sign * far)
    points, width = _grid(*ends)
    terms = g(points, y.unsqueeze(-1), m.unsqueeze(-1), v.unsqueeze(-1))
    return torch.logsumexp(terms, -1) + width.log()


def _cdf(a: Float[Tensor, " n"], m: Float[Tensor, " n"], s: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    nodes, weights = np.polynomial.hermite.hermgauss(64)
    like = {"dtype": torch.float64, "device": a.device}
    nodes, weights = torch.as_tensor(nodes, **like), torch.as_tensor(weights / np.sqrt(pi), **like)
    narrow = s * a.sqrt() < 1
    found = torch.empty_like(m)
    if bool(narrow.any()):
        rates = torch.exp(m[narrow].unsqueeze(-1) + 2**0.5 * s[narrow].unsqueeze(-1) * nodes)
        found[narrow] = torch.special.gammaincc(a[narrow].unsqueeze(-1).expand_as(rates), rates) @ weights
    if not bool(narrow.all()):
        shape, centre, scale = (part[~narrow].unsqueeze(-1) for part in (a, m, s))
        reach = (2 * DROP / shape).sqrt()
        ends = shape.log() - 1 - DROP / shape - reach, shape.log() + reach
        points, width = _grid(*(end.squeeze(-1) for end in ends))
        density = torch.exp(shape * points - points.exp() - torch.lgamma(shape))
        found[~narrow] = (density * torch.special.ndtr((points - centre) / scale)).sum(-1) * width
    return found.clamp(0, 1)


def _grid(first: Float[Tensor, " n"], last: Float[Tensor, " n"]) -> tuple[Float[Tensor, "n k"], Float[Tensor, " n"]]:
    """Points from first to last, and how far they are apart."""
    steps = torch.linspace(0, 1, POINTS, dtype=first.dtype, device=first.device)
    return first.unsqueeze(-1) + (last - first).unsqueeze(-1) * steps, (last - first) / (POINTS - 1)
