"""A network for a table and its posterior: MAP training in which the evidence tunes prior and noise as it goes.

    x [N, D] float, standardised       y [N] or [N, C] float, standardised, or [N] class numbers 0 .. C - 1

Steps of Adam on the weights alternate with looks at the Laplace evidence (`lapwing.tables.stretch`). For a
regression each look updates precisions (one per layer) and sigma; for classes one precision goes by factors of three,
with further steps under each, as long as the evidence grows. The weights with the largest evidence are kept; they need
not be at a mode. A regression then trains on for half as long, once with a second head for noise that varies with the
inputs and once without; varying noise is kept if its evidence is larger by more than chance and further training would
explain. The final curvature is of all rows: full [P, P] where P and the work N C P^2 are small, Kronecker factors
otherwise. Last, the scale of the covariance is checked with unseen rows (`lapwing.laplace.calibration`): a tenth that
is kept apart or, for a regression with the full matrix, every row by leaving it out. Where rows of classes were kept
apart, the posterior learns from them as well: its mean is shifted (`lapwing.tables.shift`).

    >>> import torch
    >>> x = torch.linspace(-1, 1, 30).unsqueeze(1)
    >>> model, la, shift = train(x, 2 * x, "regression", Spec(1, 1, width=5, depth=1), seed=0, epochs=20)
    >>> mean, variance = la(x)
    >>> mean.shape, variance.shape, type(la).__name__, shift
    (torch.Size([30, 1]), torch.Size([30, 1, 1]), 'FullLaplace', None)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, log, log2
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lapwing.errors import DataError, OptionError
from lapwing.laplace import BaseLaplace
from lapwing.laplace.calibration import ERRORS, calibrate, leave_one_out, rescale
from lapwing.priors import Prior
from lapwing.tables.network import Spec, build, with_heads
from lapwing.tables.shift import ROWS, learnt
from lapwing.tables.stretch import EVIDENCE_ROWS, FACTOR, Callback, Clock, Pair, TableTraining, batches
from lapwing.training.loop import Best
from lapwing.training.train_mode import restore

FULL_WEIGHTS, FULL_WORK = 3_000, 2e11
"""The full matrix up to this many weights and this much work N C P^2; then Kronecker factors; else diagonal."""
FINAL_UPDATES, FINAL_LEVELS = 10, 2
STEPS, RATE = 8_000, 2e-2
PRIOR_STEP, STRETCHES = 3.0, 4
"""Classes: the factor between prior precisions, and how many are tried at most, each for a quarter of the epochs."""
UNSEEN = 5_000
"""At most this many rows are kept apart, or left out, to check the scale of the covariance."""
NOISES = "auto", "constant", "varying"
VARYING_ROWS = 100
"""Fewer rows cannot show how their noise varies."""
CHANCE = 4.77
"""Log evidence that varying noise gains by chance in one of a thousand tables of constant noise: z^2 / 2, z = 3.09

Constant noise is the limit of an infinite prior precision of the second head, at the edge of what the evidence chooses
from, so that twice the gain is zero or, as often, chi-squared with one degree of freedom (Self and Liang, 1987)."""


class Trained(NamedTuple):
    """A network, its posterior, and where that has its mean: `shift` from the weights, [P], or None for at them."""

    model: nn.Module
    laplace: BaseLaplace
    shift: Float[Tensor, " params"] | None


# -- training -------------------------------------------------------------------------------------------------------


def train(
    x: Float[Tensor, "rows inputs"],
    y: Tensor,
    task: str,
    spec: Spec,
    *,
    seed: int,
    epochs: int | None = None,
    batch_size: int | None = None,
    noise: str = "auto",
    callback: Callback = None,
    structure: str = "auto",
    apart: bool = True,
    dtype: torch.dtype = torch.float64,
) -> Trained:
    """A trained network, and its posterior, tuned and calibrated; the same seed gives the same result.

    `task` is "regression" or "classification". Without `epochs` there are as many as make about `STEPS` steps. `noise`
    of a regression is "constant", "varying" with the inputs, or "auto", which lets the evidence choose; where it varies
    the network is that of `replace(spec, varying=True)`, and the likelihood of the posterior a heteroscedastic one;
    `spec.varying` itself is not looked at. Classes have no noise, and one that varies is refused.
    `structure` is "full", "kron" or "diag", or "auto". What was chosen is in `la.choices`. With `apart` False the
    network learns from all rows, and none checks the posterior unless its structure is full and it is of amounts.
    Torch's global generator is left alone.
    """
    check_noise(noise, task)
    spec = replace(spec, varying=False)
    x, y = _checked(x, y, task, spec, dtype)
    generator = torch.Generator().manual_seed(seed)
    model = build(spec, generator, dtype=dtype)
    if structure == "auto":
        structure = _structure(sum(p.numel() for p in model.parameters()), len(x), spec)
    everything, held_out = (x, y), None
    if apart and (task == "classification" or structure != "full"):
        (x, y), held_out = _apart(x, y, generator)
    size = min(len(x), _batch_size(len(x)) if batch_size is None else batch_size)
    for name, value in (("batch_size", size), ("epochs", 1 if epochs is None else epochs)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise OptionError(f"{name} is {value!r}; expected a whole number >= 1, or None.")
    epochs = ceil(STEPS / ceil(len(x) / size)) if epochs is None else epochs
    run = TableTraining(model, spec, x, y, task, size, generator)
    if task == "classification":
        fitted = _climb(run, epochs, structure, callback)
    else:
        fitted = _level(run, epochs, structure, callback, noise)
    return fitted.settled(everything, held_out)


def check_noise(noise: str, task: str) -> None:
    """Refuses an unknown kind of noise, and varying noise for classes."""
    if noise not in NOISES:
        raise OptionError(f"noise is {noise!r}; expected one of {list(NOISES)}.")
    if noise == "varying" and task == "classification":
        raise OptionError(
            "noise that varies was asked for, but the target has classes, and these have no noise level; expected "
            "amounts. Leave the noise out, or, where the classes are numbers, ask for the task 'regression'."
        )


@dataclass(frozen=True, eq=False)
class _Fitted:
    """A run at its end, the posterior of its rows, and the log evidence."""

    run: TableTraining
    laplace: BaseLaplace
    log_marginal: float

    @staticmethod
    def of(run: TableTraining, kept: Best, structure: str) -> _Fitted:
        """Prior and noise go on from those of the training, under the curvature of all rows."""
        laplace = run.laplace(structure)
        laplace.fit(batches(run.x, run.y), generator=run.generator)
        tuned = run.tuned(laplace.evidence, kept.tuned.prior, kept.tuned.sigma, FINAL_UPDATES)
        for _ in range(FINAL_LEVELS * run.spec.varying):  # the level is part of the network, and of its curvature
            run.relevel(laplace.evidence, tuned.prior, torch.arange(len(run.x)))
            laplace.fit(batches(run.x, run.y), generator=run.generator)
            tuned = run.tuned(laplace.evidence, tuned.prior, tuned.sigma, FINAL_UPDATES)
        if laplace.has_noise:
            laplace.sigma_noise = tuned.sigma
        laplace.prior_precision = tuned.prior.precisions
        return _Fitted(run, laplace, float(tuned.log_marginal))

    def saying(self, choice: str) -> _Fitted:
        self.laplace.choices = (choice,)
        return self

    def settled(self, rows: Pair, held_out: Pair | None) -> Trained:
        """The posterior of all rows, with its covariance scaled where unseen rows gain by it, and its mean shifted.

        The evidence measures the width of the posterior by the curvature at one point. That is nearly zero for a
        softmax network that is sure of its training rows, and misses the network's own errors in a regression without
        noise. Unseen rows show both.
        """
        run, laplace = self.run, self.laplace
        if held_out is not None and run.task == "classification" and len(rows[0]) <= ROWS:
            shift, way = learnt(laplace, (run.x, run.y), held_out, run.generator)
            laplace.choices = (_moved(way, len(held_out[0])),)
            return Trained(run.model, laplace, shift)
        if held_out is not None:
            calibrate(laplace, batches(*held_out))
        elif run.task == "regression" and laplace.structure == "full":
            some = torch.randperm(len(run.x), generator=run.generator)[:UNSEEN]
            rescale(laplace, leave_one_out(laplace, batches(run.x[some], run.y[some])), ERRORS)
        if len(rows[0]) > len(run.x):
            laplace.fit(batches(*rows), generator=run.generator)
        return Trained(run.model, laplace, None)


def _climb(run: TableTraining, epochs: int, structure: str, callback: Callback) -> _Fitted:
    """Classes: one precision, by factors, as long as the evidence of the weights it leads to grows."""
    quarter = ceil(epochs / 4)
    clock = Clock(epochs + STRETCHES * quarter, callback)
    best = start = _first(run, epochs, clock)
    factors, tried = [PRIOR_STEP, 1 / PRIOR_STEP], 0
    while factors and tried < STRETCHES:
        restore(run.model, best.weights)
        prior = best.tuned.prior.with_precisions(best.tuned.prior.precisions * factors[0])
        after = run.stretch(quarter, RATE / 4, prior, best.tuned.sigma, clock)
        tried += 1
        if after.log_marginal > best.log_marginal:
            best = after
        else:
            factors = factors[1:] if best is start else []
    restore(run.model, best.weights)
    return _Fitted.of(run, best, structure)


def _level(run: TableTraining, epochs: int, structure: str, callback: Callback, noise: str) -> _Fitted:
    """Amounts: constant noise and then, where it is to be tried, varying noise from the same weights; the better one.

    Both describe the same targets and train equally long, so that their evidences compare. The prior of the second head
    is around constant noise: variation that the rows do not show costs evidence. Varying noise must gain more than
    `CHANCE`, and more than further training gains with constant noise: while that still gains, the residuals hold
    errors of the mean, which vary with the inputs and are not noise.
    """
    tried = noise == "varying" or (noise == "auto" and len(run.x) >= VARYING_ROWS)
    further = ceil(epochs / 2)
    clock = Clock(epochs + tried * (1 + (noise == "auto")) * further, callback)
    kept = _first(run, epochs, clock)
    if not tried:
        few = f"as fewer than {VARYING_ROWS} rows to learn from cannot show how it varies"
        said = f"The noise is the same for all rows, {'as asked for' if noise == 'constant' else few}."
        return _Fitted.of(run, kept, structure).saying(said)
    some = run.x[:: ceil(len(run.x) / EVIDENCE_ROWS)]  # from all over the table, which may be sorted
    before, sigma = kept.tuned.prior, kept.tuned.sigma
    model = with_heads(run.model, 2 * log(float(sigma)), some)
    other = replace(run, model=model, spec=replace(run.spec, varying=True))
    precisions = torch.cat([before.precisions, torch.ones_like(before.precisions[:1])])
    prior = Prior.layerwise(other.laplace("diag").space, precisions)
    varying = _Fitted.of(other, other.stretch(further, RATE / 4, prior, torch.ones_like(sigma), clock), structure)
    if noise == "varying":
        return varying.saying("The noise varies with the inputs, as asked for.")
    end = run.stretch(further, RATE / 4, before, sigma, clock)
    constant = _Fitted.of(run, end, structure)
    charge = CHANCE + max(0.0, end.log_marginal - kept.log_marginal)
    gain = varying.log_marginal - constant.log_marginal - charge
    by = f"probable than one level for all (log evidence {gain:+.1f} beyond {charge:.1f} for chance and steps)"
    if gain > 0:
        return varying.saying(f"The noise varies with the inputs, which is more {by}.")
    return constant.saying(f"The noise is the same for all rows; that it varies is less {by}.")


def _first(run: TableTraining, epochs: int, clock: Clock) -> Best:
    """From the initial weights, under a unit prior per layer."""
    prior = Prior.layerwise(run.laplace("diag").space, 1.0)
    return run.stretch(epochs, RATE, prior, torch.ones_like(prior.precisions[0]), clock)


# -- details --------------------------------------------------------------------------------------------------------


def _moved(way: float, apart: int) -> str:
    return (
        f"The probabilities are those {way:.0%} of the way from the trained weights to the linear mode of all rows, "
        f"{apart:,} kept apart in training included."
    )


def _structure(weights: int, rows: int, spec: Spec) -> str:
    """The most exact one that is affordable."""
    if weights <= FULL_WEIGHTS and rows * spec.outputs * weights**2 <= FULL_WORK:
        return "full"
    return "kron" if spec.widest <= FACTOR else "diag"


def _apart(x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Pair, Pair | None]:
    """Rows to train on, and rows kept apart: a tenth (more of a small table, at most `UNSEEN`), of no rare class."""
    count = min(max(len(x) // 10, min(len(x) // 4, 50)), UNSEEN)
    order = torch.randperm(len(x), generator=generator)
    if not y.dtype.is_floating_point:
        order = order[torch.bincount(y)[y[order]] >= 8]
    if len(x) < 40 or len(order) < count:
        return (x, y), None
    kept = torch.ones(len(x), dtype=torch.bool)
    kept[order[:count]] = False
    return (x[kept], y[kept]), (x[~kept], y[~kept])


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
