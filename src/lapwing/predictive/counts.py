"""Counts whose log-rate is Gaussian, y ~ Poisson(exp f) with f ~ N(mean, variance): what a network of counts predicts.

    mean, variance, counts   [n], float

moments    E y and Var y: closed forms
log_prob   log P(y): an integral of one log-concave function
cdf        P(count <= y)

A variance of zero gives the Poisson law. Integrals are sums over `POINTS` points, right to about ten digits.

>>> import torch
>>> mean, variance = torch.zeros(1, dtype=torch.float64), torch.full((1,), 0.5, dtype=torch.float64)
>>> expected, spread = moments(mean, variance)
>>> round(float(expected), 4)                              # exp(0.25)
1.284
>>> none = torch.zeros(1)
>>> torch.allclose(cdf(none, mean, variance), log_prob(none, mean, variance).exp(), rtol=1e-9)
True
"""

from __future__ import annotations

from math import pi

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

POINTS, CHUNK = 257, 4096
DROP = 45.0
"""Where a log-density is this much below its top, it is left out: exp(-45) = 3e-20."""


def moments(
    mean: Float[Tensor, " n"], variance: Float[Tensor, " n"]
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """E y = exp(mean + variance / 2), and Var y = E y + (exp(variance) - 1) (E y)^2."""
    expected = torch.exp(mean + variance / 2)
    return expected, expected + torch.expm1(variance) * expected.square()


def log_prob(
    counts: Float[Tensor, " n"], mean: Float[Tensor, " n"], variance: Float[Tensor, " n"]
) -> Float[Tensor, " n"]:
    """log of the integral of Poisson(y | exp f) N(f | mean, variance) over f, by the trapezoidal rule.

    The logarithm g of the integrand is concave with g'' <= -1 / variance, so that all that counts lies within
    sqrt(2 DROP variance) of its top. Bisection narrows that down.
    """
    parts = (torch.split(each.double(), CHUNK) for each in (counts, mean, variance))
    return torch.cat([_log_prob(*part) for part in zip(*parts, strict=True)]).to(mean.dtype)


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


def cdf(counts: Float[Tensor, " n"], mean: Float[Tensor, " n"], variance: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """P(count <= y); zero below zero.

    Given f it is P(G > exp f) for G of the gamma law with shape y + 1, a step of width 1 / sqrt(y + 1) in f. Where f is
    narrower than that, Gauss-Hermite over f; else the same number is E Phi((log G - mean) / deviation) over G.
    """
    whole = counts.double().clamp_min(0) + 1, mean.double(), variance.double().clamp_min(0).sqrt()
    parts = (torch.split(each, CHUNK) for each in whole)
    found = torch.cat([_cdf(*part) for part in zip(*parts, strict=True)])
    return torch.where(counts < 0, 0.0, found).to(mean.dtype)


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
