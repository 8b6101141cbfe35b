"""attach(model, loader, likelihood): a trained network gets error bars in one call; every choice is said in words.

    la = lapwing.attach(model, train_loader, "classification", val_loader=val_loader)
    print(*la.choices, sep="\\n")

fit         one pass over the loader; the structure is the most exact one that is affordable
tune        the prior precision, and the noise of a regression, by the evidence: no held-out data are needed
calibrate   with `val_loader`: one factor on the posterior covariance (and one on the noise), by the likelihood of its
            targets; kept where it gains more than it has free numbers (Akaike's rule), else nothing changes

The model is never changed. Cost: one pass, one decomposition, and one prediction pass over `val_loader`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import log, pi
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lapwing.errors import DataError, UnsupportedOperationError
from lapwing.estimate.passes import check_loss
from lapwing.laplace import BaseLaplace, KronLaplace, Laplace
from lapwing.laplace.data import Pairs
from lapwing.laplace.predictions import moments
from lapwing.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from lapwing.predictive import probit

COVARIANCE = torch.logspace(-3, 3, 61, dtype=torch.float64)
NOISE = torch.logspace(-1, 1, 41, dtype=torch.float64)


def attach(
    model: nn.Module,
    loader: Iterable[Any],
    likelihood: str | Likelihood,
    *,
    val_loader: Iterable[Any] | None = None,
    structure: str = "auto",
    subset_of_weights: str = "all",
    prior_structure: str = "scalar",
    generator: torch.Generator | None = None,
    progress_bar: bool = False,
    **options: Any,
) -> BaseLaplace:
    """The posterior of a trained network: fitted, tuned, and calibrated where `val_loader` is given.

    `structure` is any `hessian_structure` of `Laplace`; "auto" keeps every covariance up to 3000 weights, Kronecker
    factors beyond, and variances only where an operation of the network has no Kronecker factors. What was chosen, and
    why, is in `la.choices`. Further options are those of the structure.

    >>> x = torch.linspace(-1, 1, 40).reshape(-1, 1)
    >>> model = nn.Linear(1, 1)
    >>> with torch.no_grad(): _ = model.weight.fill_(2.0), model.bias.fill_(0.0)
    >>> la = attach(model, [(x, 2 * x + 0.1 * torch.sin(100 * x))], "regression")
    >>> la.choices[0]
    'Structure: full: 2 weights, so every covariance fits (up to 3,000).'
    >>> round(float(la.sigma_noise), 2)                       # the sine has mean square 0.1^2 / 2
    0.07
    """
    if isinstance(loader, Iterator):  # it may be needed twice
        loader = list(loader)
    la = Laplace(model, likelihood, subset_of_weights, structure, **options)
    try:
        la.fit(loader, progress_bar=progress_bar, generator=generator)
    except UnsupportedOperationError as error:
        if structure != "auto" or not isinstance(la, KronLaplace) or subset_of_weights != "all":
            raise
        la = Laplace(model, likelihood, subset_of_weights, "diag", **options)
        la.fit(loader, progress_bar=progress_bar, generator=generator)
        la.reason = f"diag: Kronecker factors were refused ({str(error).split(';')[0]})"
    la.optimize_prior_precision(prior_structure=prior_structure, optimize_sigma_noise=la.has_noise)
    said = [f"Structure: {la.reason or f'{la.structure}, as asked for'}.", _prior(la)]
    if la.has_noise:
        said.append(f"Noise: standard deviation {float(la.sigma_noise):.4g}, by the evidence.")
    said.append("Calibration: none, as no val_loader was given." if val_loader is None else calibrate(la, val_loader))
    la.choices = tuple(said)
    return la


def _prior(la: BaseLaplace) -> str:
    values = la.prior_precision
    shown = f"{float(values[0]):.4g}" if len(values) == 1 else f"{float(values.min()):.4g} to {float(values.max()):.4g}"
    evidence = float(la.log_marginal_likelihood())
    return f"Prior precision: {shown}, by the evidence of {la.n_data:,} points (log evidence {evidence:.6g})."


def calibrate(la: BaseLaplace, val_loader: Iterable[Any]) -> str:
    """Scales the posterior covariance, and a free noise level, to what held-out targets prefer; says what was done.

    The covariance is multiplied by c through temperature and prior precision: (H / (sigma^2 c T) + prior / c)^-1.
    """
    held_out = _gathered(la, val_loader)
    if held_out is None:
        name = type(la.distribution).__name__
        return f"Calibration: none, as predictions of {name} have no closed form to compare scales with."
    sigmas = NOISE if la.has_noise else torch.ones(1, dtype=torch.float64)
    scores = torch.stack([held_out.log_prob(float(c), sigmas) for c in COVARIANCE])
    before = float(held_out.log_prob(1.0, torch.ones(1, dtype=torch.float64)))
    best = int(scores.argmax())
    c, s = float(COVARIANCE[best // len(sigmas)]), float(sigmas[best % len(sigmas)])
    gain, n = float(scores.max()) - before, held_out.count
    means = f"mean log-likelihood {before / n:.4f} before"
    if not gain > 1 + la.has_noise:
        return f"Calibration: left as the evidence chose it; {n:,} held-out targets gain too little ({means})."
    power = la.evidence.noise_power
    la.temperature = la.temperature * c / s**power
    la.prior_precision = la.prior_precision / c
    noise = ""
    if la.has_noise:
        la.sigma_noise = la.sigma_noise * s
        noise = f" and the noise by {s:.3g}"
    return (
        f"Calibration: on {n:,} held-out targets the posterior covariance was multiplied by {c:.3g}{noise} ({means}, "
        f"{float(scores.max()) / n:.4f} after)."
    )


@dataclass(frozen=True, eq=False)
class _HeldOut:
    """Outputs, their variances and targets, class axis last: what closed-form predictions need."""

    likelihood: Likelihood
    value: Float[Tensor, "n outputs"]
    variance: Float[Tensor, "n outputs"]
    targets: Tensor
    noise: Float[Tensor, " outputs"] | Float[Tensor, " 1"]

    @property
    def count(self) -> int:
        return len(self.targets) if isinstance(self.likelihood, Categorical) else self.targets.numel()

    def log_prob(self, c: float, sigmas: Float[Tensor, " k"]) -> Float[Tensor, " k"]:
        """Sum over targets, for covariances times c and noise times each of sigmas."""
        variance = c * self.variance
        if isinstance(self.likelihood, Categorical):
            p = probit(self.value, variance).gather(1, self.targets.unsqueeze(1))
            return p.clamp_min(1e-300).log().sum().expand(len(sigmas))
        if isinstance(self.likelihood, Bernoulli):
            p = probit(self.value.unsqueeze(-1), variance.unsqueeze(-1)).squeeze(-1)
            p = torch.where(self.targets > 0.5, p, 1 - p)
            return p.clamp_min(1e-300).log().sum().expand(len(sigmas))
        error = (self.targets - self.value).square()
        totals = [variance + (self.noise * float(s)).square() for s in sigmas]
        return torch.stack([-(error / total + total.log() + log(2 * pi)).sum() / 2 for total in totals])


def _gathered(la: BaseLaplace, loader: Iterable[Any]) -> _HeldOut | None:
    likelihood = la.distribution
    if not isinstance(likelihood, (Categorical, Bernoulli, Gaussian)):
        return None
    values, variances, targets = [], [], []
    for batch in Pairs(loader, la.dict_key_y, la.space.device):
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise DataError(f"a batch of val_loader is a {type(batch).__name__}; expected a pair (x, y).")
        x, y = batch
        with torch.no_grad():
            linear = la.linearise(x)
            check_loss(likelihood, linear.value, y)
            value, variance = (likelihood.to_last(v) for v in moments(la.posterior, linear, diagonal=True))
        width = value.shape[-1]
        flat, spread = (v.reshape(-1, width).double().cpu() for v in (value, variance))
        if isinstance(likelihood, Categorical):
            y = y.flatten().cpu()
            kept = (0 <= y) & (y < width)  # a target to be ignored is outside the classes
            flat, spread, y = flat[kept], spread[kept], y[kept]
        else:
            y = likelihood.to_last(y).reshape(-1, width).double().cpu()
        values.append(flat)
        variances.append(spread.clamp_min(0))
        targets.append(y)
    if not sum(map(len, targets)):
        raise DataError("val_loader yields no target; expected at least one (x, y) pair of held-out data.")
    noise = torch.ones(1, dtype=torch.float64)
    if isinstance(likelihood, Gaussian):
        noise = la.sigma_noise if la.has_noise else torch.as_tensor(likelihood.sigma)
        noise = noise.detach().double().cpu().reshape(-1)
    return _HeldOut(likelihood, torch.cat(values), torch.cat(variances), torch.cat(targets), noise)
