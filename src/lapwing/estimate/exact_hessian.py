"""hessian: second derivatives of the loss itself, not made positive semi-definite. P backward passes per batch.

The exact Hessian is J^T H J plus the network's own curvature, and is indefinite away from a minimum: a precision of
it exists only where the prior is strong enough, which `with_prior` checks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lapwing.errors import ParameterError
from lapwing.estimate.data_pass import Batches, linearised
from lapwing.estimate.exact_blocks import partition
from lapwing.likelihoods import Likelihood
from lapwing.linalg import Block, Blocks, Dense, Diagonal, Segments
from lapwing.linalg.budget import chunks
from lapwing.tangent import Linearisation, Tangent
from lapwing.tangent.fallback import batched_grad


def hessian(
    tangent: Tangent,
    likelihood: Likelihood,
    batches: Batches,
    *,
    structure: str = "full",
    generator: torch.Generator | None = None,
) -> Dense | Diagonal | Blocks:
    """Hessian of the summed negative log-likelihood: `structure` is "full", "diagonal" or "blocks" (per layer).

    `generator` is taken, like by every estimator, and not used.
    """
    space = tangent.space
    if structure == "blocks":
        places = partition(space, "layer")
    elif structure in ("full", "diagonal"):
        places = {"": Segments(((0, space.size),))}
    else:
        raise ParameterError(f"unknown structure {structure!r}; expected 'full', 'diagonal' or 'blocks'.")
    shape = (lambda n: (n,)) if structure == "diagonal" else (lambda n: (n, n))
    totals = [torch.zeros(shape(place.size), dtype=space.dtype, device=space.device) for place in places.values()]
    for linearisation, y in linearised(tangent, likelihood, batches):
        gradient = _gradient(linearisation, likelihood, y)
        for total, place in zip(totals, places.values(), strict=True):
            for part, rows in _rows(linearisation, gradient, place):
                if structure == "diagonal":
                    total[part] += rows[torch.arange(len(rows)), torch.arange(part.start, part.stop)]
                else:
                    total[part] += rows
    if structure == "full":
        return Dense((totals[0] + totals[0].mT) / 2)
    if structure == "diagonal":
        return Diagonal(totals[0])
    found = zip(places.items(), totals, strict=True)
    return Blocks(space.size, tuple(Block(name, place, Dense((t + t.mT) / 2)) for (name, place), t in found))


def _gradient(linearisation: Linearisation, likelihood: Likelihood, y: Tensor) -> Tensor:
    """The flat gradient of the loss, itself differentiable."""
    parameters = linearisation.tangent.parameters
    with torch.inference_mode(False), torch.enable_grad():
        y = y.clone() if y.is_inference() else y
        loss = -likelihood.log_prob(linearisation.output, y).sum()
        grads = torch.autograd.grad(loss, list(parameters.values()), create_graph=True, allow_unused=True)
        tree = {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(parameters.items(), grads, strict=True)}
        return linearisation.space.ravel(tree)


def _rows(linearisation: Linearisation, gradient: Tensor, place: Segments) -> Iterator[tuple[slice, Tensor]]:
    """Rows of one block of the Hessian, in chunks."""
    space, parameters = linearisation.space, linearisation.tangent.parameters
    positions = place.gather(torch.arange(space.size, device=space.device))
    bytes_each = 3 * (space.total * space.dtype.itemsize + linearisation.cotangent_bytes)
    for part in chunks(place.size, bytes_each, linearisation.tangent.budget):
        unit = gradient.new_zeros(part.stop - part.start, space.size)
        unit[torch.arange(len(unit), device=space.device), positions[part]] = 1
        if gradient.requires_grad:
            found = batched_grad(gradient, list(parameters.values()), unit)
        else:
            found = [None] * len(parameters)
        tree = {
            name: p.new_zeros(len(unit), *p.shape) if g is None else g
            for (name, p), g in zip(parameters.items(), found, strict=True)
        }
        yield part, place.gather(space.ravel(tree))
