"""How wide a posterior should be: one factor on its covariance and one on the noise, by rows it was not fitted to.

    HeldOut    value, variance [n, C] of outputs at rows apart, and their targets [n, ...]
    rescale    the factors c and s with the largest likelihood there, where they are worth it

The covariance is multiplied by c through temperature and prior precision, (H / (sigma^2 s^2 T) + prior / c)^-1 with
T = c / s^2, so that nothing is fitted again. Where no rows can be spared, `leave_one_out` gives what a Gaussian
regression would have said of each row without it, from one pass: with leverage h = variance / (sigma^2 T),

    y - f_without = (y - f) / (1 - h)        variance_without = variance / (1 - h)

which is exact for a linear model at its mode and needs the full covariance: Kronecker factors do not add up to
leverages below one. Where the noise is an output of the network, c scales its variance too, s does not exist, and sigma
is that of the row. `point_noise` is the same idea for a prediction without error bars.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.errors import DataError
from lapwing.estimate.data_pass import check_loss, pair
from lapwing.evidence import GaussianFit
from lapwing.evidence.tuners import share_left
from lapwing.laplace import BaseLaplace
from lapwing.laplace.data import Pairs
from lapwing.laplace.linear_modes import MovedMap
from lapwing.laplace.predictions import moments
from lapwing.likelihoods import Likelihood

COVARIANCE = torch.logspace(-3, 3, 61, dtype=torch.float64)
NOISE = torch.logspace(-1.5, 1, 51, dtype=torch.float64)
TOGETHER = 2**18
"""Numbers that are looked at in one go."""
LEVERAGE = 0.95
"""The largest leverage of a row; the formula divides by one minus it."""
ERRORS = 3.0
"""Standard errors by which factors must gain where rows were left out by a formula, not in fact."""


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Outputs, their variances and targets, class axis last: what closed-form predictions need."""

    likelihood: Likelihood
    value: Float[Tensor, "n outputs"]
    variance: Float[Tensor, "n outputs"]
    targets: Tensor
    noise: Float[Tensor, " 1"]
    """The noise level that is free, times that of the likelihood; one where there is none."""

    @property
    def count(self) -> int:
        return self.targets.numel()

    def log_prob(self, c: float, s: float = 1.0) -> Float[Tensor, " count"]:
        """Of each target, for a covariance times c and noise times s."""
        return self.likelihood.target_log_prob(self.value, c * self.variance, self.targets, self.noise * s)

    def totals(self, s: float) -> Float[Tensor, " factors"]:
        """The sum over targets for a covariance times each of `COVARIANCE`, and noise times s."""
        if not self.likelihood.adds_noise:
            return torch.stack([self.log_prob(c, s).sum() for c in COVARIANCE.tolist()])
        # with constant noise a row costs next to nothing, and a call does not: many factors at once
        sums = []
        for factors in COVARIANCE.split(max(1, TOGETHER // self.value.numel())):
            count = len(factors)
            value, targets = (each.repeat(count, 1) for each in (self.value, self.targets))
            variance = (factors.reshape(-1, 1, 1) * self.variance).flatten(0, 1)
            log_prob = self.likelihood.target_log_prob(value, variance, targets, self.noise * s)
            sums.append(log_prob.reshape(count, -1).sum(1))
        return torch.cat(sums)


def calibrate(la: BaseLaplace, val_loader: Iterable[Any]) -> str:
    """Scales the posterior covariance, and a free noise level, to what held-out targets prefer; says what was done."""
    held_out = gathered(la, val_loader)
    if held_out is None:
        name = type(la.distribution).__name__
        return f"Calibration: none, as predictions of {name} have no closed form to compare scales with."
    return rescale(la, held_out)


def rescale(la: BaseLaplace, held_out: HeldOut, errors: float = 0.0) -> str:
    """The best factors are kept where they gain more than they are numbers (Akaike's rule), and more than `errors`
    standard errors of the gain; else nothing changes. Says what was done."""
    sigmas = NOISE.tolist() if la.has_noise else [1.0]
    before = held_out.log_prob(1.0)
    totals = torch.stack([held_out.totals(s) for s in sigmas], 1)
    row, column = divmod(int(totals.argmax()), len(sigmas))
    c, s = float(COVARIANCE[row]), sigmas[column]
    gains, n = held_out.log_prob(c, s) - before, held_out.count
    gain, error = float(gains.sum()), float(gains.std(correction=0)) * n**0.5
    means = f"mean log-likelihood {float(before.mean()):.4f} before"
    if not gain > max(1 + la.has_noise, errors * error):
        return f"Calibration: left as the evidence chose it; {n:,} targets of val_loader gain too little ({means})."
    scale(la, c, s)
    noise = f" and the noise by {s:.3g}" if la.has_noise else ""
    return (
        f"Calibration: on {n:,} targets of val_loader the posterior covariance was multiplied by {c:.3g}{noise} "
        f"({means}, {float((before + gains).mean()):.4f} after)."
    )


def scale(la: BaseLaplace, c: float, s: float = 1.0) -> None:
    """Multiplies the posterior covariance by c, and a free noise level by s."""
    la.temperature = la.temperature * c / s**la.evidence.noise_power
    la.prior_precision = la.prior_precision / c
    if la.has_noise:
        la.sigma_noise = la.sigma_noise * s


def averaged(held_out: HeldOut) -> float:
    """The factor on the covariance as held-out targets know it: exp E[log c], with log c uniform over `COVARIANCE`.

    Where many factors are about as likely this is one in their middle, and not the one that chance prefers.
    """
    return float((held_out.totals(1.0).softmax(0) @ COVARIANCE.log()).exp())


def gathered(la: BaseLaplace, loader: Iterable[Any], shift: Float[Tensor, " params"] | None = None) -> HeldOut | None:
    """Predictions for the rows of a loader; None for a likelihood whose predictions have no closed form.

    With `shift`, outputs are those of the linearised network with weights moved by it.
    """
    likelihood = la.distribution
    if not likelihood.has_closed_form:
        return None
    values, variances, targets = [], [], []
    for batch in Pairs(loader, la.dict_key_y, la.space.device):
        x, y = pair(batch, "a batch of val_loader")
        with torch.no_grad():
            linear = la.linearise(x)
            linear = linear if shift is None else MovedMap.of(linear, shift)
            check_loss(likelihood, linear.value, y)
            value, variance = (likelihood.to_last(v) for v in moments(la.posterior, linear, diagonal=True))
        rows = [v.reshape(-1, v.shape[-1]).double().cpu() for v in (value, variance.clamp_min(0))]
        if likelihood.per_output:
            y = likelihood.to_last(y)
            rows.append(y.reshape(-1, y.shape[-1]).double().cpu())
        else:
            observed = likelihood.observed(y)
            rows.append(y.flatten().cpu())
            rows = rows if observed is None else [row[observed.flatten().cpu()] for row in rows]
        for kept, row in zip((values, variances, targets), rows, strict=True):
            kept.append(row)
    if not sum(map(len, targets)):
        raise DataError("val_loader yields no target; expected at least one (x, y) pair of held-out data.")
    noise = la.sigma_noise.detach().double().cpu().reshape(-1)
    return HeldOut(likelihood, torch.cat(values), torch.cat(variances), torch.cat(targets), noise)


def leave_one_out(la: BaseLaplace, loader: Iterable[Any]) -> HeldOut:
    """What a regression would have said of each row it was fitted to, had it not seen it."""
    seen = gathered(la, loader)
    assert seen is not None
    known = seen.likelihood.signal_and_noise(seen.value, seen.noise)
    assert known is not None
    mean, square = known
    count = mean.shape[1]
    variance = seen.variance[:, :count]
    left = 1 - (variance / (square * float(la.temperature))).clamp_max(LEVERAGE)
    without = seen.targets - (seen.targets - mean) / left
    value = torch.cat([without, seen.value[:, count:]], 1)
    return replace(seen, value=value, variance=torch.cat([variance / left, seen.variance[:, count:]], 1))


@torch.no_grad()
def point_noise(la: BaseLaplace) -> float:
    """The noise level of a regression that is to do without error bars of the mean, by generalised cross-validation.

    sigma^2 = (SSE / N) / (1 - gamma / N)^2, with gamma parameters determined by N targets: the mean square of the
    residuals, each as it were without its own row, if all had the same leverage. It is the noise of the evidence,
    SSE / (N - gamma), plus what the weights leave open on average; a posterior says in addition where.
    """
    fit = la.evidence.fit
    assert isinstance(fit, GaussianFit)
    gamma = la.evidence.effective_parameters(la.prior, la.sigma_noise, la.temperature).clamp_min(0).sum()
    left = (1 - gamma / fit.targets).clamp_min(0.1)  # as for the noise: some targets remain to estimate it from
    return float((fit.squares / fit.targets).sqrt() / left)


@torch.no_grad()
def point_share(la: BaseLaplace) -> float:
    """1 - gamma / N where the noise is an output, for gamma parameters of the mean that are determined by N targets.

    With log-variances at their level by the evidence, sum z^2 = N - gamma, generalised cross-validation asks for noise
    variances over this.
    """
    return float(share_left(la.effective_parameters(), la.n_data * la.n_outputs // 2))
