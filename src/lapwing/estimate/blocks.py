"""blocks: the exact GGN or Fisher within each layer (or tensor), nothing between them. Memory O(sum of block^2)."""

from __future__ import annotations

import torch

from lapwing.errors import ParameterError
from lapwing.estimate.cotangents import Cotangents, exact
from lapwing.estimate.passes import Batches, pulled
from lapwing.likelihoods import Likelihood
from lapwing.linalg import Block, Blocks, Dense, Segments
from lapwing.linalg.rows import assemble, chunks, route, rows_of
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
    totals = {
        name: torch.zeros(segments.size, segments.size, dtype=space.dtype, device=space.device)
        for name, segments in places.items()
    }
    for batch in pulled(tangent, likelihood, batches, cotangents, generator):
        count, size = rows_of(batch.pieces[0])
        assigned = [[] for _ in places]
        for piece in batch.pieces:
            for i, local in route(piece, list(places.values())):
                assigned[i].append(local)
        for total, local in zip(totals.values(), assigned, strict=True):
            if not local:
                continue
            for rows in chunks(size, 2 * count * len(total) * space.dtype.itemsize, tangent.budget):
                flat = assemble(local, len(total), rows).flatten(0, 1)
                total.addmm_(flat.mT, flat)
    return Blocks(space.size, tuple(Block(name, places[name], Dense(total)) for name, total in totals.items()))


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
        raise ParameterError("the parameter space is empty.")
    return {names[group]: Segments(tuple(found)) for group, found in intervals.items()}
