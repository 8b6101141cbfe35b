"""Hyper-parameters from the evidence: by its gradient, or by MacKay's fixed point. One decomposition.

    gradient   L-BFGS on log precisions and log sigma, to convergence
    updates    alpha = gamma / |theta - mean|^2 per group, sigma^2 = SSE / (N - gamma), one after the other
    em         these updates, until they come to rest; gamma from exact traces, or from draws of the posterior

Both end at a stationary point of the evidence. MacKay's updates need no line search but take many rounds where gamma is
nearly the number of parameters; the gradient method also handles priors for which a group has no effect on the data.

With an `Evidence` theta stays where it is, and there is no data pass. With an `EvidenceAtMode` theta is the linear mode
theta* of every prior that is tried, and the search ends at a joint fixed point (theta*, prior, sigma): log Z has no
derivative by way of theta*, which is an optimum, so that both searches are the same with theta* in the place of theta.

The evidence may prefer a network without some of its groups: their precisions grow without end. Precisions stay
within LOWEST and HIGHEST; with an `EvidenceAtMode` that has exact traces, of which a round is dear, `em` raises none of
which the data determine less than a thousandth of a parameter: log Z can gain about half of that from there on.
`Tuned.pruned` says which groups they were. sigma stays within `GaussianFit.noise_range()`: noise-free targets end at
the lower end of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import log
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lapwing.errors import CurvatureError, LapwingWarning
from lapwing.evidence.exact_evidence import ExactEvidence
from lapwing.evidence.linear_mode import EvidenceAtMode, LinearMode
from lapwing.evidence.marginal import Evidence, GaussianFit
from lapwing.priors import Prior

LOWEST, HIGHEST = 1e-10, 1e10
"""Range of precisions: a group that the data say nothing about would otherwise go to infinity."""
NEAR = 1e-2
"""A logarithm this close to its bound counts as ended there, though its slope is not zero."""
JUMP = 8
"""Rounds of `em` between two extrapolations."""
FALLEN = 1e-3
"""The share of its log evidence (or one nat) by which a search may end below where it began without a word."""
SPARED = 10
"""One target in so many is left to estimate the noise from, on the way of `em` to where there are enough."""


@dataclass(frozen=True, eq=False)
class Tuned:
    """The prior and noise level found, the evidence there, and whether the search had come to rest.

    `error` is the relative standard error of every group's gamma, where they came from draws; `mode` the linear mode
    that goes with them, where the evidence was that at the linear mode. `pruned` says of which groups the data
    determine nothing: their precisions were held where they were, or are at the highest.
    """

    prior: Prior
    sigma: Float[Tensor, ""]
    log_marginal: Float[Tensor, ""]
    converged: bool
    rounds: int
    error: Float[Tensor, " groups"] | None = None
    mode: LinearMode | None = None
    pruned: Bool[Tensor, " groups"] | None = None


AnyEvidence = Evidence | ExactEvidence | EvidenceAtMode
Gamma = Callable[[Evidence | ExactEvidence, Prior, Tensor, float | Tensor], Tensor]
"""gamma [groups] at an evidence, prior, noise level and temperature."""


def by_traces(evidence: Evidence | ExactEvidence, prior: Prior, sigma: Tensor, temperature: float | Tensor) -> Tensor:
    """gamma from the traces of the evidence's own curvature."""
    return evidence.effective_parameters(prior, sigma, temperature)


def gradient(
    evidence: AnyEvidence,
    prior: Prior,
    sigma: float | Tensor = 1.0,
    temperature: float | Tensor = 1.0,
    *,
    fixed_noise: bool = False,
    rounds: int = 100,
    tolerance: float = 1e-6,
) -> Tuned:
    """Maximises the evidence in the prior precisions, and in sigma where there is a noise level that is not fixed."""
    start = prior.precisions.detach().clamp(LOWEST, HIGHEST).log()
    noise = torch.as_tensor(sigma, dtype=start.dtype, device=start.device).detach().reshape(1)
    noise_is_free = evidence.has_noise and not fixed_noise
    free = torch.cat([start, noise.log()]) if noise_is_free else start
    low, high = _bounds(free, len(start), evidence.noise_range())
    free = free.clamp(low, high).clone().requires_grad_()

    def read() -> tuple[Prior, Tensor]:
        count, inside = len(start), free.clamp(low, high).exp()
        return prior.with_precisions(inside[:count]), inside[count] if noise_is_free else noise[0]

    def closure() -> float:
        free.grad = None
        with torch.enable_grad():
            trial, level = read()
            here = evidence.settled(trial, level, temperature)
            loss = -here.log_marginal(trial, level, temperature)
            # a step beyond the bounds must lead back: without a slope there the search would end where it fell
            loss = loss + (free - free.detach().clamp(low, high)).square().sum()
        if not bool(torch.isfinite(loss)):
            raise CurvatureError(
                f"the evidence is {float(-loss.detach())} at prior precisions {trial.precisions.tolist()[:5]}, sigma "
                f"{float(level.detach()):.3g}; expected a finite number. Start from other values."
            )
        loss.backward()
        return float(loss.detach())

    taken, parted = 0, False
    while True:
        # a line search that met a bound ends at the kink there: start anew inside, with no memory of the slope beyond
        optimiser = torch.optim.LBFGS(
            [free], max_iter=rounds - taken, tolerance_grad=tolerance, tolerance_change=0, line_search_fn="strong_wolfe"
        )
        before = free.detach().clone()
        optimiser.step(closure)
        taken += max(1, int(optimiser.state[free].get("n_iter", 0)))
        with torch.no_grad():
            free.clamp_(low, high)
        closure()
        assert free.grad is not None
        at = free.detach()
        held = ((at <= low + NEAR) & (free.grad > 0)) | ((at >= high - NEAR) & (free.grad < 0))
        rest = float(torch.where(held, 0.0, free.grad).abs().max()) if len(free) else 0.0
        with torch.no_grad():
            trial, level = read()
            value = evidence.settled(trial, level, temperature).log_marginal(trial, level, temperature)
        # the sum has terms as large as the targets are many, and its rounding hides slopes below this
        terms = 1 + float(value.abs()) + evidence.targets
        converged = rest <= max(100 * tolerance, torch.finfo(free.dtype).eps ** 0.5 * terms)
        if converged or taken >= rounds:
            break
        if torch.equal(at, before):
            if parted:
                break
            # equal precisions join weight and bias in a Kronecker block, and where they part the evidence falls by a
            # step: no search comes down it, so that it begins behind it
            parted = True
            apart = torch.linspace(0, NEAR, len(start), dtype=free.dtype, device=free.device)
            with torch.no_grad():
                free[: len(start)] -= torch.where(at[: len(start)] > 0, apart, -apart)
    found = _detached(trial)
    pruned = found.precisions >= HIGHEST * (1 - NEAR)
    return _checked(Tuned(found, level.detach(), value, converged, taken, pruned=pruned), "gradient")


@dataclass(frozen=True)
class Limits:
    """How far MacKay's updates may go. The defaults are those of a search that comes to rest at given weights."""

    precisions: tuple[float, float] = (LOWEST, HIGHEST)
    noise: tuple[float, float] | None = None
    """Lowest and highest sigma; None for `GaussianFit.noise_range()`."""
    factor: float | None = None
    """The largest factor by which one update may change a precision or sigma."""
    spared: int | None = None
    """One target in this many is always left to estimate the noise from; None makes it an error if none is left."""
    least: float = 0.0
    """The gamma below which no precision is raised, nor far beyond which in one step."""


@torch.no_grad()
def updates(
    evidence: AnyEvidence,
    prior: Prior,
    sigma: float | Tensor = 1.0,
    temperature: float | Tensor = 1.0,
    *,
    fixed_noise: bool = False,
    limits: Limits | None = None,
    effective: Gamma = by_traces,
) -> Iterator[tuple[Prior, Float[Tensor, ""], Float[Tensor, " groups"]]]:
    """MacKay's updates without end: (prior, sigma) after each, and the gamma [groups] they were computed from.

    alpha = gamma / |theta - mean|^2 per group, sigma^2 = SSE / (N - gamma). An update costs one evaluation of the
    effective parameters: O(P) once the curvature is decomposed.
    """
    limits = limits or Limits()
    prior = _detached(prior)
    level = torch.as_tensor(sigma, dtype=prior.precisions.dtype, device=prior.precisions.device)
    while True:
        here = evidence.settled(prior, level, temperature)
        squares = prior.sums((here.mean - prior.mean).square())
        gamma = effective(here, prior, level, temperature).clamp_min(0)
        wanted = gamma / squares.clamp_min(torch.finfo(squares.dtype).tiny)
        # of a group at its mean, with a gamma of nothing but rounding, the data know nothing: any precision will do
        rounding = here.rounding(prior)
        wanted = wanted.where((gamma > rounding) | (squares * prior.precisions > rounding), prior.precisions)
        wanted = torch.minimum(wanted, prior.precisions * _raise(gamma, limits.least))
        precisions = _limited(wanted, prior.precisions, limits.factor, limits.precisions)
        if isinstance(fit := here.fit, GaussianFit) and not fixed_noise:
            # at temperature T the evidence counts every target as 1 / T of one
            left = fit.targets - float(temperature) * evidence.noise_power / 2 * gamma.sum()
            if limits.spared is not None:
                left = left.clamp_min(fit.targets / limits.spared)
            elif bool(left <= 0):
                raise _nothing_left(gamma, fit.targets)
            level = _limited((fit.squares / left).sqrt(), level, limits.factor, limits.noise or evidence.noise_range())
        prior = prior.with_precisions(precisions)
        yield prior, level, gamma


def em(
    evidence: AnyEvidence,
    prior: Prior,
    sigma: float | Tensor = 1.0,
    temperature: float | Tensor = 1.0,
    *,
    fixed_noise: bool = False,
    rounds: int = 1000,
    tolerance: float = 1e-8,
    samples: int | None = None,
    generator: torch.Generator | None = None,
) -> Tuned:
    """MacKay's re-estimation of one precision per group, and of the noise level where it is not fixed.

    With `samples`, gamma comes from that many draws of the posterior instead of traces, from the same random numbers in
    every round: the fixed point then has a standard error, which is stated.

    Every `JUMP` rounds, what creeps in one direction, or swings, is taken to where its shrinking steps would lead.
    """
    before, converged, taken = _detached(prior), False, 0
    level = torch.as_tensor(sigma, dtype=prior.precisions.dtype, device=prior.precisions.device)
    sampled = (
        None
        if samples is None
        else SampledTraces(samples, torch.initial_seed() if generator is None else generator.initial_seed())
    )
    if sampled is not None and (isinstance(evidence, ExactEvidence) or getattr(evidence, "exactly", False)):
        raise CurvatureError("samples were given for an evidence with exact traces; expected None. Leave them out.")
    effective = by_traces if sampled is None else sampled
    spared, gamma = SPARED, before.entries()
    began: list[float] = []

    def measured(here: Evidence | ExactEvidence, prior: Prior, sigma: Tensor, temperature: float | Tensor) -> Tensor:
        """The effective parameters, and once the evidence that goes with them: where theta* is found, it is here."""
        if not began:
            began.append(float(here.log_marginal(prior, sigma, temperature)))
        return effective(here, prior, sigma, temperature)

    options: dict[str, Any] = {"fixed_noise": fixed_noise, "effective": measured}
    options["limits"] = Limits(spared=spared, least=evidence.least)
    steps = updates(evidence, before, level, temperature, **options)
    tolerance = max(tolerance, evidence.accuracy)
    earlier = torch.zeros_like(torch.cat([before.precisions, level.reshape(1)]))
    with torch.no_grad():
        while taken < rounds:
            after, fresh, gamma = next(steps)
            taken += 1
            change = torch.cat([after.precisions / before.precisions, (fresh / level).reshape(1)]).log()
            moved = change[:-1].abs()
            # gamma is the difference of two numbers up to P, and its rounding moves the precisions for ever
            eps = 8 * torch.finfo(gamma.dtype).eps
            blur = (evidence.rounding(before) / gamma).nan_to_num(eps).clamp(eps, 1e4 * eps)
            within = blur.clamp_min(tolerance)
            converged = bool((moved < within).all()) and bool(change[-1].abs() < within.max())
            before, level = after, fresh
            if converged:
                used = float(temperature) * evidence.noise_power / 2 * float(gamma.sum())
                if fixed_noise or used <= evidence.targets * (1 - 1 / spared) or not evidence.has_noise:
                    break
                if used >= evidence.targets:
                    raise _nothing_left(gamma, evidence.targets)
                # at rest only because so many targets were left: the noise is smaller
                spared *= 10
                options["limits"], converged = Limits(spared=spared, least=evidence.least), False
                steps = updates(evidence, before, level, temperature, **options)
            if taken % JUMP == 0 and taken < rounds:
                factor = _extrapolated(change, earlier)
                factor[:-1] = torch.minimum(factor[:-1], _raise(gamma, evidence.least))
                before = before.with_precisions((before.precisions * factor[:-1]).clamp(LOWEST, HIGHEST))
                level = (level * factor[-1]).clamp(*evidence.noise_range()) if not fixed_noise else level
                steps = updates(evidence, before, level, temperature, **options)
            earlier = change
        value = evidence.settled(before, level, temperature).log_marginal(before, level, temperature)
    if any(float(value) < first - max(1.0, FALLEN * abs(first)) for first in began):
        warnings.warn(
            f"em ended at a log evidence of {float(value):.5g} and had begun at {began[0]:.5g}: its updates follow "
            "effective parameters that are not those of this evidence. Use method='marglik', fewer groups, or, at the "
            "linear mode, curvature='exact'.",
            LapwingWarning,
            stacklevel=2,
        )
    error = None if sampled is None else sampled.error
    pruned = (gamma < evidence.least) | (before.precisions >= HIGHEST * (1 - NEAR))
    return _checked(Tuned(before, level, value, converged, taken, error, pruned=pruned), "em")


mackay = em
"""The name that `em` has had."""


@dataclass(eq=False)
class SampledTraces:
    """gamma from draws of the posterior, of the same random numbers in every call; `error` is its relative error."""

    samples: int
    seed: int
    error: Tensor | None = None

    def __call__(
        self, evidence: Evidence | ExactEvidence, prior: Prior, sigma: Tensor, temperature: float | Tensor
    ) -> Tensor:
        assert isinstance(evidence, Evidence)
        numbers = torch.Generator(device=evidence.mean.device).manual_seed(self.seed)
        gamma, error = evidence.sampled_effective_parameters(
            prior, sigma, temperature, samples=self.samples, generator=numbers
        )
        self.error = error / gamma.clamp_min(torch.finfo(gamma.dtype).tiny)
        return gamma


def _extrapolated(change: Tensor, earlier: Tensor) -> Tensor:
    """The factor to where a geometric series of steps in logarithms ends, of which these are two.

    At most 19 steps further; half a step back where they swing to and fro.
    """
    ratio = (change / earlier).nan_to_num(0.0, 0.0, 0.0).clamp(-1, 0.95)
    return (change * ratio / (1 - ratio)).exp()


def _nothing_left(gamma: Tensor, targets: int) -> CurvatureError:
    return CurvatureError(
        f"the data determine {float(gamma.sum()):.1f} parameters with {targets} targets, which leaves nothing to "
        "estimate the noise from; expected fewer. Fix sigma, or start from a larger prior precision."
    )


def share_left(gamma: Float[Tensor, " groups"], targets: int) -> Float[Tensor, ""]:
    """1 - gamma / N: the share of N targets that no parameter of the mean uses up, at least a tenth.

    For noise that is an output of the network: the last group of the prior is the head that gives the noise, and has no
    part in the mean.
    """
    return (1 - gamma[:-1].clamp_min(0).sum() / targets).clamp_min(0.1)


def _raise(gamma: Tensor, least: float) -> Tensor:
    """The factor by which precisions may be raised: gamma falls as its reciprocal at most, to half of `least`."""
    if least == 0:
        return torch.full_like(gamma, float("inf"))
    return torch.where(gamma < least, 1.0, 2 * gamma / least)


def _limited(value: Tensor, before: Tensor, factor: float | None, bounds: tuple[float, float]) -> Tensor:
    near = value if factor is None else value.clamp(before / factor, before * factor)
    return near.clamp(*bounds)


def _bounds(free: Tensor, precisions: int, noise: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Lowest and highest logarithms: of so many precisions, and of sigma where there is one more."""
    low, high = torch.full_like(free, log(LOWEST)), torch.full_like(free, log(HIGHEST))
    low[precisions:], high[precisions:] = map(log, noise)
    return low, high


def _detached(prior: Prior) -> Prior:
    return prior.with_precisions(prior.precisions.detach())


def _checked(tuned: Tuned, method: str) -> Tuned:
    if not tuned.converged:
        warnings.warn(
            f"{method} had not come to rest after {tuned.rounds} rounds; allow more (rounds=, or n_steps= of "
            "optimize_prior_precision), or start from another prior precision.",
            LapwingWarning,
            stacklevel=3,
        )
    return tuned
