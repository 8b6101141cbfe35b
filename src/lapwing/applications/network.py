"""A network for a table and its posterior: MAP training in which the evidence tunes prior and noise as it goes.

    x [N, D] float, standardised       y [N] or [N, C] float, standardised, or [N] class numbers 0 .. C - 1

Steps of Adam on the weights alternate with looks at the Laplace evidence, with Kronecker curvature of at most
`EVIDENCE_ROWS` rows, scaled to N, so that a round costs the same for a million rows. For a regression each look updates
precisions (one per layer) and sigma; for classes one precision goes by factors of three, with further steps under each,
as long as the evidence grows. The weights with the largest evidence are kept; they need not be at a mode. The final
curvature is of all rows: full [P, P] where P and the work N C P^2 are small, Kronecker factors otherwise. Last, the
scale of the covariance is checked with rows that were not seen (`lapwing.applications.calibration`): a tenth that is
kept apart, or, for a regression with the full matrix, every row by leaving it out.

    >>> import torch
    >>> x = torch.linspace(-1, 1, 30).unsqueeze(1)
    >>> model, la = train(x, 2 * x, "regression", Spec(1, 1, width=5, depth=1), seed=0, epochs=20)
    >>> mean, variance = la(x)
    >>> mean.shape, variance.shape, type(la).__name__
    (torch.Size([30, 1]), torch.Size([30, 1, 1]), 'FullLaplace')
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, cos, log2, pi

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lapwing.applications.architecture import Spec, build
from lapwing.applications.calibration import ERRORS, calibrate, leave_one_out, rescale
from lapwing.applications.tuning import reestimated, scaled
from lapwing.errors import DataError, OptionError
from lapwing.evidence import Evidence
from lapwing.laplace import BaseLaplace, Laplace
from lapwing.metrics import gaussian_nll, nll
from lapwing.priors import Prior

EVIDENCE_ROWS = 20_000
FULL_WEIGHTS, FULL_WORK, FACTOR = 3_000, 2e11, 2_000
"""The full matrix up to so many weights and so much work N C P^2; Kronecker factors up to this size; else diagonal."""
ROUNDS, UPDATES, FINAL_UPDATES = 40, 3, 10
STEPS, RATE = 8_000, 2e-2
PRIOR_STEP, STRETCHES = 3.0, 4
"""Prior precisions that are tried for classes: each times the step, at most so many, with a quarter of the epochs."""

Pair = tuple[Tensor, Tensor]

# -- training -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Progress:
    """What a callback is told after an epoch: `loss` per row, and the evidence where it was evaluated."""

    epoch: int
    epochs: int
    loss: float
    log_marginal: float | None


def train(
    x: Float[Tensor, "rows inputs"],
    y: Tensor,
    task: str,
    spec: Spec,
    *,
    seed: int,
    epochs: int | None = None,
    batch_size: int | None = None,
    validation: Pair | None = None,
    callback: Callable[[Progress], object] | None = None,
    structure: str = "auto",
    dtype: torch.dtype = torch.float64,
) -> tuple[nn.Module, BaseLaplace]:
    """A trained network, and its posterior, tuned and calibrated; the same seed gives the same result.

    `task` is "regression" or "classification". Without `epochs` there are as many as make about `STEPS` steps. With
    `validation`, a pair (x, y), the weights kept are those with the smallest validation NLL, not the largest evidence.
    `structure` is "full", "kron" or "diag", or "auto". Torch's global generator is left alone.
    """
    x, y = _checked(x, y, task, spec, dtype)
    generator = torch.Generator().manual_seed(seed)
    model = build(spec, generator, dtype=dtype)
    if structure == "auto":
        structure = _structure(sum(p.numel() for p in model.parameters()), len(x), spec)
    everything, held_out = (x, y), validation
    if validation is not None:
        held_out = validation = _checked(*validation, task, spec, dtype)
    elif task == "classification" or structure != "full":
        (x, y), held_out = _apart(x, y, generator)
    size = min(len(x), _batch_size(len(x)) if batch_size is None else batch_size)
    for name, value in (("batch_size", size), ("epochs", 1 if epochs is None else epochs)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise OptionError(f"{name} is {value!r}; expected a whole number >= 1, or None.")
    per_epoch = ceil(len(x) / size)
    epochs = ceil(STEPS / per_epoch) if epochs is None else epochs
    run = _Run(model, spec, x, y, task, epochs, size, generator)
    prior, sigma = run.climb(validation, callback)
    return model, run.posterior(prior, sigma, structure, everything, held_out)


@dataclass(frozen=True, eq=False)
class _Kept:
    """Weights, with the prior and noise they were trained under; the larger the score the better."""

    score: float
    prior: Prior
    sigma: Tensor
    weights: list[Tensor]


@dataclass(eq=False)
class _Clock:
    """Counts epochs over all stretches and tells a callback."""

    epochs: int
    callback: Callable[[Progress], object] | None
    epoch: int = 0

    def tick(self, loss: float, log_marginal: float | None) -> None:
        self.epoch += 1
        if self.callback is not None:
            self.callback(Progress(self.epoch, self.epochs, loss, log_marginal))


@dataclass(frozen=True, eq=False)
class _Run:
    """What does not change while a network is trained."""

    model: nn.Module
    spec: Spec
    x: Tensor
    y: Tensor
    task: str
    epochs: int
    size: int
    generator: torch.Generator

    def climb(self, validation: Pair | None, callback: Callable[[Progress], object] | None) -> tuple[Prior, Tensor]:
        """Trains the model in place; prior and noise of the weights that were kept."""
        prior = Prior.layerwise(self.laplace("diag").space, 1.0)
        quarter = ceil(self.epochs / 4)
        classes = self.task == "classification"
        clock = _Clock(self.epochs + classes * STRETCHES * quarter, callback)
        best = self.stretch(self.epochs, RATE, prior, torch.ones_like(prior.precisions[0]), validation, clock)
        factors = [PRIOR_STEP, 1 / PRIOR_STEP] if classes else []
        tried, start = 0, best
        while factors and tried < STRETCHES:
            self.put(best)
            prior = best.prior.with_precisions(best.prior.precisions * factors[0])
            found = self.stretch(quarter, RATE / 4, prior, best.sigma, validation, clock)
            tried += 1
            if found.score > best.score:
                best = found
            else:
                factors = factors[1:] if best is start else []
        self.put(best)
        for parameter in self.model.parameters():
            parameter.grad = None
        return best.prior, best.sigma

    def stretch(
        self,
        epochs: int,
        rate: float,
        prior: Prior,
        sigma: Tensor,
        validation: Pair | None,
        clock: _Clock,
    ) -> _Kept:
        """Steps from where the model is, down to 1 % of the rate along a cosine; the weights of the best round."""
        laplace = self.laplace("kron" if self.spec.widest <= FACTOR else "diag")
        optimiser = torch.optim.Adam(self.model.parameters(), lr=rate)
        # the decomposition of a wide factor takes seconds, and a few steps of the weights change nothing
        rounds = ROUNDS if self.spec.widest <= 500 else ROUNDS // 4
        every = max(ceil(epochs / rounds), ceil(25 * self.size / len(self.x)))
        rows = torch.randperm(len(self.x), generator=self.generator)[:EVIDENCE_ROWS].sort().values
        best: _Kept | None = None
        for epoch in range(1, epochs + 1):
            share = (epoch - 1) / epochs
            optimiser.param_groups[0]["lr"] = rate * (0.01 + 0.99 * (1 + cos(pi * share)) / 2)
            loss = self.epoch(optimiser, prior, float(sigma))
            value = None
            if epoch % every == 0 or epoch == epochs:
                laplace.fit(_batches(self.x[rows], self.y[rows]), generator=self.generator)
                evidence = scaled(laplace.evidence, len(self.x) / len(rows))
                prior, sigma, value = self.tuned(evidence, prior, sigma, UPDATES)
                score = value if validation is None else -self.held_out(laplace, prior, sigma, validation)
                if best is None or score > best.score:
                    best = _Kept(score, prior, sigma, [p.detach().clone() for p in self.model.parameters()])
            clock.tick(loss, value)
        assert best is not None
        return best

    @torch.no_grad()
    def put(self, kept: _Kept) -> None:
        for parameter, value in zip(self.model.parameters(), kept.weights, strict=True):
            parameter.copy_(value)

    def epoch(self, optimiser: torch.optim.Optimizer, prior: Prior, sigma: float) -> float:
        """One pass of steps, at unit noise, so that a rate means the same whatever sigma is; the mean loss."""
        scale = sigma**2 / len(self.x)
        decay = [float(part[0]) * scale for part in _split(prior.precision().expand(prior.size), self.model)]
        total = 0.0
        for rows in torch.randperm(len(self.x), generator=self.generator).split(self.size):
            optimiser.zero_grad()
            f, y = self.model(self.x[rows]), self.y[rows]
            regression = self.task == "regression"
            loss = (f - y).square().sum() / (2 * len(rows)) if regression else nn.functional.cross_entropy(f, y)
            loss.backward()
            for parameter, strength in zip(self.model.parameters(), decay, strict=True):
                assert parameter.grad is not None
                parameter.grad.add_(parameter.detach(), alpha=strength)
            optimiser.step()
            total += float(loss.detach()) * len(rows)
        return total / len(self.x)

    def tuned(self, evidence: Evidence, prior: Prior, sigma: Tensor, updates: int) -> tuple[Prior, Tensor, float]:
        """Prior and noise after updates at these weights, and log Z; for classes the prior stays as it is.

        The more a network is sure of its classes, the smaller its curvature, the fewer parameters count as determined,
        and the stronger the next prior: updates at given weights run away (on digits to 640, and the NLL of new rows
        to 0.173 against 0.123), so `climb` compares priors by the weights that each leads to.
        """
        if self.task == "classification":
            return prior, sigma, float(evidence.log_marginal(prior, sigma))
        return reestimated(evidence, prior, sigma, updates)

    def laplace(self, structure: str) -> BaseLaplace:
        # exact factors cost a backward pass per output, one draw per row costs one in all
        source = "mc" if self.spec.outputs > 20 and structure == "kron" else "exact"
        return Laplace(self.model, self.task, "all", structure, estimator=source)

    def held_out(self, laplace: BaseLaplace, prior: Prior, sigma: Tensor, pair: Pair) -> float:
        """Mean negative log density of the predictive distribution."""
        laplace.prior_precision = prior.precisions
        if laplace.has_noise:
            laplace.sigma_noise = sigma
        out = laplace(pair[0], diagonal_output=True)
        if isinstance(out, tuple):
            return gaussian_nll(out[0], out[1] + sigma**2, pair[1])
        return nll(out, pair[1])

    def posterior(self, prior: Prior, sigma: Tensor, structure: str, rows: Pair, held_out: Pair | None) -> BaseLaplace:
        """The posterior of all rows; prior and noise go on from those of the training, under its own curvature.

        The evidence measures a width of the posterior by curvature at one point. Softmax outputs of a network that is
        sure of its training rows have hardly any, and errors of a regression without noise are all of the network's
        making: rows that were not seen tell, and scale the covariance where they gain by it.
        """
        laplace = self.laplace(structure)
        laplace.fit(_batches(self.x, self.y), generator=self.generator)
        prior, sigma, _ = self.tuned(laplace.evidence, prior, sigma, FINAL_UPDATES)
        if laplace.has_noise:
            laplace.sigma_noise = sigma
        laplace.prior_precision = prior.precisions
        if held_out is not None:
            calibrate(laplace, _batches(*held_out))
        elif laplace.has_noise and structure == "full":
            some = torch.randperm(len(self.x), generator=self.generator)[:EVIDENCE_ROWS]
            rescale(laplace, leave_one_out(laplace, _batches(self.x[some], self.y[some])), ERRORS)
        if len(rows[0]) > len(self.x):
            laplace.fit(_batches(*rows), generator=self.generator)
        return laplace


# -- details --------------------------------------------------------------------------------------------------------


def _batches(x: Tensor, y: Tensor) -> list[Pair]:
    """For a pass of curvature."""
    return list(zip(x.split(1024), y.split(1024), strict=True))


def _structure(weights: int, rows: int, spec: Spec) -> str:
    """The most exact one that is affordable."""
    if weights <= FULL_WEIGHTS and rows * spec.outputs * weights**2 <= FULL_WORK:
        return "full"
    return "kron" if spec.widest <= FACTOR else "diag"


def _apart(x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Pair, Pair | None]:
    """Rows to train on, and a tenth of them apart (more of few, at most 5000); none of a class with few rows."""
    count = min(max(len(x) // 10, min(len(x) // 4, 50)), 5000)
    order = torch.randperm(len(x), generator=generator)
    if not y.dtype.is_floating_point:
        order = order[torch.bincount(y)[y[order]] >= 8]
    if len(x) < 40 or len(order) < count:
        return (x, y), None
    kept = torch.ones(len(x), dtype=torch.bool)
    kept[order[:count]] = False
    return (x[kept], y[kept]), (x[~kept], y[~kept])


def _split(flat: Float[Tensor, " params"], model: nn.Module) -> tuple[Tensor, ...]:
    """A flat vector by parameter tensors."""
    return flat.split([parameter.numel() for parameter in model.parameters()])


def _batch_size(rows: int) -> int:
    """About sixteen steps an epoch, between 16 and 4096 rows each: a power of two."""
    return 2 ** min(12, max(4, round(log2(rows / 16))))


def _checked(x: Tensor, y: Tensor, task: str, spec: Spec, dtype: torch.dtype) -> Pair:
    """Targets as the likelihood takes them, [N, C] of `dtype` or [N] class numbers; inputs as they are."""
    if task not in ("regression", "classification"):
        raise OptionError(f"unknown task {task!r}; expected 'regression' or 'classification'.")
    if x.dim() != 2 or x.shape[1] != spec.inputs or not len(x) or len(x) != len(y):
        raise DataError(
            f"x has shape {tuple(x.shape)} and y {tuple(y.shape)}; expected [N, {spec.inputs}] and N targets, N >= 1."
        )
    if not bool(torch.isfinite(x).all()):
        raise DataError("x holds NaN or infinite values; expected finite ones. Fill in or leave out missing values.")
    if task == "regression":
        y = y.to(dtype).reshape(len(y), -1)
        if y.shape[1] != spec.outputs or not bool(torch.isfinite(y).all()):
            raise DataError(f"y has {y.shape[1]} targets a row, or NaN; expected {spec.outputs}, all of them finite.")
        return x, y
    if y.dim() != 1 or y.dtype.is_floating_point or int(y.min()) < 0 or int(y.max()) >= spec.outputs:
        raise DataError(f"y is {y.dtype} of shape {tuple(y.shape)}; expected class numbers 0 .. {spec.outputs - 1}.")
    return x, y.long()
