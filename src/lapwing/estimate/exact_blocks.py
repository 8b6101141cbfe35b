"""blocks: the exact GGN or Fisher within each layer (or tensor), nothing between them. Memory O(sum of block^2)."""

from __future__ import annotations

from itertools import pairwise

import torch

from lapwing.errors import ParameterError
from lapwing.estimate.cotangents import Cotangents, exact
from lapwing.estimate.data_pass import Batches, pulled
from lapwing.estimate.symmetric_sums import SymmetricSum
from lapwing.likelihoods import Likelihood
from lapwing.linalg import Block, Blocks, Dense, Segments
from lapwing.linalg.budget import check_memory
from lapwing.linalg.rows import Places
from lapwing.params import ParamSpace
from lapwing.tangent import Tangent


def blocks(
    tangent: Tangent,
    likelihood: Likelihood,
    batches: Batches,
    *,
    by: str = "layer",
    cotangents: Cotangents = exact,
    generator: torch.Generator | None = None,
) -> Blocks:
    """The diagonal blocks of sum_n J_n^T H_n J_n, one per module ("layer") or per parameter ("tensor")."""
    space = tangent.space
    places = partition(space, by)
    like = torch.zeros((), dtype=space.dtype, device=space.device)
    needed = 2 * sum(segments.size**2 for segments in places.values()) * space.dtype.itemsize
    check_memory(needed, f"dense blocks of {space.size:,} weights and their factors", SMALLER, space.device)
    totals = {name: SymmetricSum.zeros(segments.size, like, tangent.budget) for name, segments in places.items()}
    routes, sums = Places(list(places.values())), list(totals.values())
    for batch in pulled(tangent, likelihood, batches, cotangents, generator):
        for number, local in routes.assigned(batch.pieces):
            sums[number].add(local)
    found = (Block(name, places[name], Dense(total.matrix())) for name, total in totals.items())
    return Blocks(space.size, tuple(found))


SMALLER = (
    "Use kron, ekfac or diag, fewer weights (a sub-network, the last layer), or more memory (a larger memory_budget, "
    "another machine)."
)


def partition(space: ParamSpace, by: str) -> dict[str, Segments]:
    """Name -> positions of each block. A sub-network is cut where its groups are."""
    groups, counts = torch.unique_consecutive(space.groups(by), return_counts=True)
    names = space.names if by == "tensor" else space.layers
    intervals: dict[int, list[tuple[int, int]]] = {}
    stops = [0, *counts.cumsum(0).tolist()]
    for group, interval in zip(groups.tolist(), pairwise(stops), strict=True):
        intervals.setdefault(group, []).append(interval)
    if not intervals:
        raise ParameterError("the parameter space has no entries; expected at least one. Select other parameters.")
    return {names[group]: Segments(tuple(found)) for group, found in intervals.items()}
