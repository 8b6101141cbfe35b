"""blocks: the exact GGN or Fisher within each layer (or tensor), nothing between them. Memory O(sum of block^2)."""

from __future__ import annotations

import torch

from lapwing.errors import ParameterError
from lapwing.estimate.cotangents import Cotangents, exact
from lapwing.estimate.data_pass import Batches, pulled
from lapwing.estimate.symmetric_sums import SymmetricSum
from lapwing.likelihoods import Likelihood
from lapwing.linalg import Block, Blocks, Dense, Segments
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
    totals = {name: SymmetricSum.zeros(segments.size, like, tangent.budget) for name, segments in places.items()}
    routes, sums = Places(list(places.values())), list(totals.values())
    for batch in pulled(tangent, likelihood, batches, cotangents, generator):
        for number, local in routes.assigned(batch.pieces):
            sums[number].add(local)
    found = (Block(name, places[name], Dense(total.matrix())) for name, total in totals.items())
    return Blocks(space.size, tuple(found))


def partition(space: ParamSpace, by: str) -> dict[str, Segments]:
    """Name -> positions of each block. A sub-network is cut where its groups are."""
    groups = space.groups(by).tolist()
    names = space.names if by == "tensor" else space.layers
    intervals: dict[int, list[tuple[int, int]]] = {}
    start = 0
    for stop in range(1, len(groups) + 1):
        if stop == len(groups) or groups[stop] != groups[start]:
            intervals.setdefault(groups[start], []).append((start, stop))
            start = stop
    if not intervals:
        raise ParameterError("the parameter space has no entries; expected at least one. Select other parameters.")
    return {names[group]: Segments(tuple(found)) for group, found in intervals.items()}
