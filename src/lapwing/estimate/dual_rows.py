"""dual: the exact GGN or Fisher by its rows, for P >> N C. Memory: the factors of M <= N C rows, and M^2 numbers.

`subset` draws some of the data, for whoever has too many for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lapwing.errors import CurvatureError, DataError
from lapwing.estimate.cotangents import Cotangents, exact, output_by_output
from lapwing.estimate.data_pass import Batches, pulled
from lapwing.estimate.exact_blocks import partition
from lapwing.likelihoods import Likelihood
from lapwing.linalg import Dual, Independent, RowSet
from lapwing.linalg.budget import check_memory
from lapwing.linalg.rows import Piece
from lapwing.params import ParamSpace
from lapwing.tangent import Tangent
from lapwing.tangent.inputs import batch_size, map_tensors, tensors

LIMIT = 20_000
FEWER = "Use fewer data points (n_subset, estimate.subset), a Kronecker structure, or a larger memory_budget."


def dual(
    tangent: Tangent,
    likelihood: Likelihood,
    batches: Batches,
    *,
    cotangents: Cotangents = exact,
    generator: torch.Generator | None = None,
    limit: int = LIMIT,
    independent_outputs: bool = False,
) -> Dual | Independent:
    """sum_n J_n^T H_n J_n as a `Dual`; `limit` is the largest number of rows, M, that is accepted.

    With `independent_outputs`, and more than one output, an `Independent` of one Gram matrix per output: covariances
    between outputs are left out, and of H_n, which couples the classes of a softmax, the diagonal is taken. The C N^2
    numbers in all Gram matrices may then be as many as those of `limit` rows.
    """
    if not independent_outputs:
        return Dual(RowSet.of(tangent.space.size, limited(tangent, likelihood, batches, cotangents, generator, limit)))
    parts = _of_all_outputs(tangent, likelihood, batches, cotangents, generator, limit)
    whole = Dual(RowSet.of(tangent.space.size, parts))
    return whole if {count for count, _ in whole.rows.shapes} == {1} else Independent(whole, whole.rows.shapes[0][0])


def _of_all_outputs(
    tangent: Tangent,
    likelihood: Likelihood,
    batches: Batches,
    cotangents: Cotangents,
    generator: torch.Generator | None,
    limit: int,
) -> Iterator[list[Piece]]:
    """Rows of the data, batch by batch, one cotangent per output: chunks of them are put together again."""
    chunks: list[list[Piece]] = []
    points = 0
    for batch in pulled(tangent, likelihood, batches, output_by_output(cotangents), generator):
        if batch.first:
            if chunks:
                yield by_tensor(tangent.space, joined_cotangents(chunks))
            chunks, outputs, points = [], batch.linearisation.outputs, points + batch.linearisation.batch
            entries = outputs * points**2
            if entries > limit**2:
                raise CurvatureError(
                    f"the first {points} data points make {outputs} Gram matrices of as many rows, which with their "
                    f"decompositions take at least {4 * 8 * entries / 2**30:.3g} GiB; expected at most {limit**2} "
                    "numbers in them. Use fewer data points (estimate.subset), a Kronecker structure, or raise `limit`."
                )
        chunks.append(list(batch.pieces))
    yield by_tensor(tangent.space, joined_cotangents(chunks))


def limited(
    tangent: Tangent,
    likelihood: Likelihood,
    batches: Batches,
    cotangents: Cotangents,
    generator: torch.Generator | None,
    limit: int,
) -> Iterator[list[Piece]]:
    """Rows of the data, chunk by chunk, and an error once there are more than `limit`, or than the budget allows."""
    count = points = 0
    for batch in pulled(tangent, likelihood, batches, cotangents, generator):
        rows, size = batch.pieces[0].shape
        count, points = count + rows * size, points + size * batch.first
        if count > limit:
            raise CurvatureError(
                f"the first {points} data points make {count} rows, whose Gram matrix and its decomposition take at "
                f"least {memory(count) / 2**30:.3g} GiB; expected at most {limit} rows. Use fewer data points "
                "(estimate.subset), fewer cotangents (monte_carlo), a Kronecker structure, or raise `limit`."
            )
        what = f"the Gram matrix of {count:,} rows, those of the first {points} data points, and its decomposition"
        check_memory(memory(count), what, FEWER, tangent.space.device)
        yield by_tensor(tangent.space, batch.pieces)


def joined_cotangents(chunks: list[list[Piece]]) -> list[Piece]:
    """Rows of the same data points for several chunks of cotangents, as one."""
    return [first.with_cotangents(others) for first, *others in zip(*chunks, strict=True)]


def memory(rows: int) -> int:
    """Bytes of a Gram matrix, its eigenvectors, and the workspace of their computation, in float64."""
    return 4 * 8 * rows**2


def by_tensor(space: ParamSpace, pieces: list[Piece]) -> list[Piece]:
    """Rows of a sub-network, which come in one piece, cut where its tensors are: priors may differ between those."""
    if space.index is None:
        return pieces
    intervals = [interval for segments in partition(space, "tensor").values() for interval in segments.intervals]
    cuts = [piece.cut(interval) for piece in pieces for interval in intervals]
    return [cut for cut in cuts if cut is not None]


# -- fewer data ------------------------------------------------------------------------------------------------------


@dataclass
class _Points:
    """Some data points of one batch, copied: positions in the draw, the pair (x, y), and which tensors have samples."""

    slots: list[int]
    pair: Any
    sampled: list[bool]


def subset(batches: Batches, n: int, generator: torch.Generator | None = None) -> list[tuple[Any, Any]]:
    """n data points drawn without replacement in one pass, every set of n being as likely as any other.

    They come in their original order, in batches of the size of the first one. Where data points of several batches
    cannot be joined (sequences padded to different lengths) batches are smaller. Memory: n (1 + log(N / n)) points.
    """
    if n < 1:
        raise DataError(f"a subset of {n} data points was asked for; expected at least 1.")
    owner: list[int] = []  # the number of the data point that holds each of n places
    seen, largest = 0, 0
    device = torch.device("cpu") if generator is None else generator.device
    found: list[_Points] = []
    for pair in batches:
        size = batch_size(pair)
        largest = largest or size
        fresh: dict[int, int] = {}
        chances = torch.rand(size, dtype=torch.float64, device=device, generator=generator)
        for number, chance in enumerate(chances.tolist()):
            # reservoir: point k stays with probability n / (k + 1), in the place of a random one
            place = len(owner) if len(owner) < n else int(chance * (seen + number + 1))
            if place < n:
                owner[place : place + 1] = [seen + number]
                fresh[seen + number] = number
        slots = sorted(set(owner) & set(fresh))
        if slots:
            rows = [fresh[slot] for slot in slots]
            sampled = [_has_samples(t, size) for t in tensors(pair)]
            picked = map_tensors(lambda t, r=rows, n=size: t[r] if _has_samples(t, n) else t.clone(), pair)
            found.append(_Points(slots, picked, sampled))
        seen += size
    if seen < n:
        raise DataError(
            f"a subset of {n} data points was asked for and the loader holds {seen}; expected at most that."
        )
    return _batched(found, set(owner), largest)


def _batched(found: list[_Points], chosen: set[int], largest: int) -> list[tuple[Any, Any]]:
    """What was chosen, joined as far as it fits together, and cut into batches."""
    runs: list[list[_Points]] = []
    for points in found:
        where = [i for i, slot in enumerate(points.slots) if slot in chosen]
        if not where:
            continue
        left = replace(
            points, slots=[points.slots[i] for i in where], pair=_of_samples(points, lambda t, w=where: t[w])
        )
        if runs and _fit(runs[-1][-1], left):
            runs[-1].append(left)
        else:
            runs.append([left])
    return [
        tuple(_of_samples(whole, lambda t, start=start: t[start : start + largest]))
        for whole in map(_joined, runs)
        for start in range(0, len(whole.slots), largest)
    ]


def _has_samples(tensor: Tensor, size: int) -> bool:
    return tensor.dim() > 0 and tensor.shape[0] == size


def _of_samples(points: _Points, function: Callable[[Tensor], Tensor]) -> Any:
    """The pair, with a function applied to all tensors that have samples."""
    sampled = iter(points.sampled)
    return map_tensors(lambda t: function(t) if next(sampled) else t, points.pair)


def _fit(a: _Points, b: _Points) -> bool:
    """Whether two batches can be one: sequences of different lengths cannot."""
    ours, theirs = list(tensors(a.pair)), list(tensors(b.pair))
    if a.sampled != b.sampled or [t.dtype for t in ours] != [t.dtype for t in theirs]:
        return False
    return all(
        x.shape[1:] == y.shape[1:] if has_samples else torch.equal(x, y)
        for x, y, has_samples in zip(ours, theirs, a.sampled, strict=True)
    )


def _joined(run: list[_Points]) -> _Points:
    columns = iter(list(zip(*(tensors(points.pair) for points in run), strict=True)))
    sampled = iter(run[0].sampled)
    pair = map_tensors(lambda t: torch.cat(found) if (found := next(columns)) and next(sampled) else t, run[0].pair)
    return replace(run[0], slots=[slot for points in run for slot in points.slots], pair=pair)
