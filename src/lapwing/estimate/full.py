"""full: the GGN or Fisher [P, P], spelled out. Memory O(P^2), work O(N R P^2)."""

from __future__ import annotations

import torch

from lapwing.estimate.cotangents import Cotangents, exact
from lapwing.estimate.passes import Batches, pulled
from lapwing.likelihoods import Likelihood
from lapwing.linalg import Dense
from lapwing.linalg.rows import assemble, chunks, rows_of
from lapwing.tangent import Tangent


def full(
    tangent: Tangent,
    likelihood: Likelihood,
    batches: Batches,
    *,
    cotangents: Cotangents = exact,
    generator: torch.Generator | None = None,
) -> Dense:
    """sum_n J_n^T H_n J_n over the data, any parameters, any operation that autograd can differentiate."""
    space = tangent.space
    total = torch.zeros(space.size, space.size, dtype=space.dtype, device=space.device)
    for batch in pulled(tangent, likelihood, batches, cotangents, generator):
        count, size = rows_of(batch.pieces[0])
        for rows in chunks(size, 2 * count * space.size * space.dtype.itemsize, tangent.budget):
            flat = assemble(batch.pieces, space.size, rows).flatten(0, 1)
            total.addmm_(flat.mT, flat)
    return Dense(total)
