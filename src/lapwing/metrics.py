"""Scores of predictions against targets: plain functions of tensors, each a mean over points, as a Python float.

    probabilities  [*batch, C]  with targets [*batch], class indices: accuracy, nll, brier, calibration_error
    mean, variance [*batch]     with targets of the same shape: gaussian_nll, rmse, coverage
    scores         [n], [m]     larger where something is out of distribution: auroc

Axes before the class axis are points, whatever they mean (sequences, pixels). Cost O(points x C); a sort for auroc.

>>> import torch
>>> p = torch.tensor([[0.8, 0.2], [0.4, 0.6]])
>>> y = torch.tensor([0, 0])
>>> accuracy(p, y), round(nll(p, y), 4)               # -(log 0.8 + log 0.4) / 2
(0.5, 0.5697)
"""

from __future__ import annotations

from math import log, pi

import torch
from torch import Tensor

from lapwing.errors import DataError


def accuracy(probabilities: Tensor, targets: Tensor) -> float:
    """Share of points whose most probable class is the target."""
    _check_classes(probabilities, targets)
    return float((probabilities.argmax(-1) == targets).double().mean())


def nll(probabilities: Tensor, targets: Tensor) -> float:
    """Mean of -log p(target); zero counts as the smallest number of its type, so that the mean is finite."""
    _check_classes(probabilities, targets)
    chosen = _of_target(probabilities, targets)
    return float(-chosen.clamp_min(torch.finfo(chosen.dtype).tiny).log().double().mean())


def brier(probabilities: Tensor, targets: Tensor) -> float:
    """Mean of sum_c (p_c - 1[c = target])^2: 0 at best, 2 at worst."""
    _check_classes(probabilities, targets)
    squares = probabilities.square().sum(-1) - 2 * _of_target(probabilities, targets) + 1
    return float(squares.double().mean())


def calibration_error(probabilities: Tensor, targets: Tensor, bins: int = 15) -> float:
    """Expected calibration error of the most probable class: mean |accuracy - confidence| over bins of equal width.

    Bins are ]0, 1/bins], ]1/bins, 2/bins], ..., weighted by how many points they hold.
    """
    _check_classes(probabilities, targets)
    if bins < 1:
        raise DataError(f"calibration error with {bins} bins; expected at least one, 15 by custom.")
    confidence, chosen = (value.flatten() for value in probabilities.max(-1))
    gap = (chosen == targets.flatten()).double() - confidence.double()
    index = (confidence.double() * bins).ceil().long().clamp(1, bins) - 1
    sums = torch.zeros(bins, dtype=torch.float64, device=gap.device).index_add(0, index, gap)
    return float(sums.abs().sum() / len(gap))


def entropy(probabilities: Tensor) -> Tensor:
    """-sum_c p_c log p_c of every point, [*batch], in nats; 0 log 0 = 0."""
    _check_probabilities(probabilities)
    return -torch.special.xlogy(probabilities, probabilities).sum(-1)


def gaussian_nll(mean: Tensor, variance: Tensor, targets: Tensor) -> float:
    """Mean over entries of -log N(target | mean, variance), every constant included."""
    _check_moments(mean, targets, variance)
    error = (targets - mean).double().square() / variance.double()
    return float((error + variance.double().log() + log(2 * pi)).mean() / 2)


def rmse(mean: Tensor, targets: Tensor) -> float:
    """Square root of the mean squared error over entries."""
    _check_moments(mean, targets)
    return float((targets - mean).double().square().mean().sqrt())


def coverage(mean: Tensor, variance: Tensor, targets: Tensor, level: float) -> float:
    """Share of targets inside the central interval that a Gaussian gives the probability `level`."""
    _check_moments(mean, targets, variance)
    if not 0 < level < 1:
        raise DataError(f"coverage at level {level}; expected a probability between 0 and 1, such as 0.95.")
    half = torch.special.ndtri(torch.tensor((1 + level) / 2, dtype=torch.float64, device=mean.device))
    return float(((targets - mean).double().abs() <= half * variance.double().sqrt()).double().mean())


def auroc(scores_in: Tensor, scores_out: Tensor) -> float:
    """Probability that a score from `scores_out` exceeds one from `scores_in`; equal scores count one half."""
    for name, scores in (("scores_in", scores_in), ("scores_out", scores_out)):
        if scores.dim() != 1 or not len(scores):
            raise DataError(f"{name} has shape {tuple(scores.shape)}; expected a vector of at least one score.")
        if bool(torch.isnan(scores).any()):
            raise DataError(f"{name} holds NaN; expected numbers, which have an order. Remove those points.")
    inside = scores_in.to(torch.promote_types(scores_in.dtype, scores_out.dtype)).sort().values
    outside = scores_out.to(inside.dtype)
    below = torch.searchsorted(inside, outside, side="left")
    up_to = torch.searchsorted(inside, outside, side="right")
    return float((below + up_to).double().mean() / (2 * len(inside)))


def _of_target(probabilities: Tensor, targets: Tensor) -> Tensor:
    return probabilities.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def _check_probabilities(probabilities: Tensor) -> None:
    if probabilities.dim() < 1 or not probabilities.numel() or not probabilities.is_floating_point():
        raise DataError(
            f"probabilities have shape {tuple(probabilities.shape)} and dtype {probabilities.dtype}; expected "
            "floating-point numbers [*batch, classes], at least one point."
        )
    total = probabilities.sum(-1)
    if not bool(((total - 1).abs() < 1e-3).all()) or bool((probabilities < 0).any()):  # a NaN fails the first
        raise DataError(
            f"probabilities sum to between {float(total.min()):.4g} and {float(total.max()):.4g} over the last axis, "
            "or some are negative; expected distributions over classes. Apply softmax(-1) to logits; for one logit "
            "stack 1 - p and p."
        )


def _check_classes(probabilities: Tensor, targets: Tensor) -> None:
    _check_probabilities(probabilities)
    if targets.shape != probabilities.shape[:-1] or targets.dtype != torch.int64:
        raise DataError(
            f"targets have shape {tuple(targets.shape)} and dtype {targets.dtype}; expected class indices of shape "
            f"{tuple(probabilities.shape[:-1])} in torch.int64. Use targets.long(), or argmax(-1) of one-hot ones."
        )
    if bool((targets < 0).any()) or bool((targets >= probabilities.shape[-1]).any()):
        raise DataError(
            f"targets run from {int(targets.min())} to {int(targets.max())}; expected class indices from 0 to "
            f"{probabilities.shape[-1] - 1}. Leave out points without a label."
        )


def _check_moments(mean: Tensor, targets: Tensor, variance: Tensor | None = None) -> None:
    for name, value in (("targets", targets), ("the variance", variance)):
        if value is not None and value.shape != mean.shape:
            raise DataError(
                f"{name} has shape {tuple(value.shape)} and the mean {tuple(mean.shape)}; expected the same. A missing "
                "axis would broadcast."
            )
    if not mean.numel():
        raise DataError("the mean holds no entry; expected at least one point.")
    if variance is not None and not bool((variance > 0).all()):
        raise DataError(
            f"the smallest variance is {float(variance.min()):.3g}; expected numbers > 0. Add the observation noise "
            "sigma^2 to the variance of the function."
        )
