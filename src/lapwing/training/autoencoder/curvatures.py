"""Curvature of a batch for an autoencoder, by name: one backward pass or so, however many outputs there are.

    sampled      diagonal from random signs at the outputs: unbiased; `samples` passes
    summed       the same from one gradient of the batch: unbiased, cheaper, and noisier by the size of the batch
    exact        diagonal, one pass for every output
    propagated   variances through squared Jacobians (the source's approximate diagonal): far too small before the
                 bottleneck of a trained autoencoder
    mixed        the same, with exact columns from the bottleneck on (the source's mixed diagonal)
    bottleneck   mixed, with the exact matrix at the bottleneck: the encoder is exact, the decoder propagated
    kron         Kronecker factors from drawn targets; each draw of weights decomposes them

docs/decisions/0018 has what they cost and how far they are from the exact diagonal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lapwing.errors import OptionError
from lapwing.estimate.cotangents import projections
from lapwing.estimate.data_pass import Batches, linearised
from lapwing.estimate.exact_diagonal import RowSquares, diagonal
from lapwing.estimate.kronecker import kfac
from lapwing.estimate.naming import Estimator
from lapwing.estimate.propagated.diagonal import propagated_diagonal
from lapwing.estimate.propagated.mixed import mixed_diagonal
from lapwing.likelihoods import Likelihood
from lapwing.linalg import Curvature, Diagonal
from lapwing.tangent import Linearisation, Tangent

OfBatch = Callable[[Linearisation, Likelihood, Any, Tensor, torch.Generator | None], Curvature | RowSquares]
"""(linearisation, likelihood, x, y, generator) -> the curvature of the batch at the weights of the linearisation."""


def summed_diagonal(
    tangent: Tangent,
    likelihood: Likelihood,
    batches: Batches,
    *,
    samples: int = 1,
    generator: torch.Generator | None = None,
) -> Diagonal:
    """diag(sum_n J_n^T H_n J_n) from squared gradients of whole batches: E[(sum_n J_n^T S_n v_n)^2], v of random signs.

    Signs of different data points are independent, so that what is between them has mean zero. One backward pass per
    sample and nothing of a data point alone: as cheap as a gradient, for any operation. The relative variance of every
    entry is 2 per batch and sample.
    """
    total = torch.zeros(tangent.space.size, dtype=tangent.space.dtype, device=tangent.space.device)
    for linearisation, y in linearised(tangent, likelihood, batches):
        total += _summed(linearisation, likelihood, y, samples, generator)
    return Diagonal(total)


def _summed(
    linearisation: Linearisation, likelihood: Likelihood, y: Tensor, samples: int, generator: torch.Generator | None
) -> Tensor:
    columns = projections(samples)(likelihood, linearisation.value, y, generator)
    squares = [linearisation.rmv(column[0].detach()).square() for column in columns.chunked(1)]
    return squares[0] if samples == 1 else torch.stack(squares).sum(0)


def _of_linearisation(
    summed: bool,
    samples: int,
    linearisation: Linearisation,
    likelihood: Likelihood,
    x: Any,
    y: Tensor,
    generator: torch.Generator | None,
) -> Diagonal | RowSquares:
    """The sampled diagonals, with the forward pass that there is."""
    if summed:
        return Diagonal(_summed(linearisation, likelihood, y, samples, generator))
    space, value = linearisation.space, linearisation.value
    total = RowSquares.none(space.size, value, linearisation.tangent.budget)
    for column in projections(samples)(likelihood, value, y, generator).chunked(1):
        total.add(linearisation.pull(column.detach().to(space.dtype)))
    return total


def _of_estimator(
    estimator: Estimator,
    linearisation: Linearisation,
    likelihood: Likelihood,
    x: Any,
    y: Tensor,
    generator: torch.Generator | None,
) -> Curvature:
    return estimator(linearisation.tangent, likelihood, [(x, y)], generator=generator)


def _table(samples: int) -> dict[str, Estimator]:
    return {
        "sampled": partial(diagonal, cotangents=projections(samples)),
        "summed": partial(summed_diagonal, samples=samples),
        "exact": diagonal,
        "propagated": propagated_diagonal,
        "mixed": mixed_diagonal,
        "bottleneck": partial(mixed_diagonal, exact_bottleneck=True),
        "kron": partial(kfac, samples=samples),
    }


CURVATURES: Sequence[str] = tuple(_table(1))
DRAWN = ("sampled", "summed", "kron")
"""Those that `samples` is for."""


def estimator_of(curvature: str | Estimator, samples: int) -> Estimator:
    """The estimator of a name, or the one that was given."""
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise OptionError(f"samples is {samples!r}; expected a whole number >= 1.")
    if not isinstance(curvature, str):
        if not callable(curvature):
            raise OptionError(
                f"curvature is {curvature!r}; expected one of {list(CURVATURES)}, or a function of lapwing.estimate."
            )
        return curvature
    if curvature not in CURVATURES:
        raise OptionError(f"unknown curvature {curvature!r}; expected one of {list(CURVATURES)}.")
    if samples != 1 and curvature not in DRAWN:
        raise OptionError(f"samples is {samples} for curvature {curvature!r}, which draws nothing; expected 1.")
    return _table(samples)[curvature]


def of_batch(curvature: str | Estimator, samples: int) -> OfBatch:
    """The same for a batch that is linearised already."""
    estimator = estimator_of(curvature, samples)
    if curvature in ("sampled", "summed"):
        return partial(_of_linearisation, curvature == "summed", samples)
    return partial(_of_estimator, estimator)
