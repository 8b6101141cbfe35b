"""full: the GGN or Fisher [P, P], spelled out. Memory O(P^2), work O(N R P^2)."""

from __future__ import annotations

import torch

from lapwing.estimate.cotangents import Cotangents, exact
from lapwing.estimate.data_pass import Batches, pulled
from lapwing.estimate.exact_blocks import SMALLER
from lapwing.estimate.symmetric_sums import SymmetricSum
from lapwing.likelihoods import Likelihood
from lapwing.linalg import Dense
from lapwing.linalg.budget import check_memory
from lapwing.params import ParamSpace
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
    check_full(space)
    total = SymmetricSum.zeros(space.size, torch.zeros((), dtype=space.dtype, device=space.device), tangent.budget)
    for batch in pulled(tangent, likelihood, batches, cotangents, generator):
        total.add(batch.pieces)
    return Dense(total.matrix())


def check_full(space: ParamSpace) -> None:
    """The matrix, and the factor that every use of it needs, have to fit."""
    needed = 2 * space.size**2 * space.dtype.itemsize
    check_memory(needed, f"a full matrix of {space.size:,} weights and its factor", SMALLER, space.device)
