"""low_rank: the largest eigenpairs of the GGN or Fisher, U diag(l) U^T with U [P, rank]. Memory O(P rank).

With at most `gram_rows` rows in the data they come from the Gram matrix of the rows, exactly, in one pass. With more,
from subspace iteration: a random subspace of a few more dimensions is multiplied by the curvature in every pass, and
what is wrong in it shrinks by (l_other / l_rank) each time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.errors import CurvatureError, DataError
from lapwing.estimate.cotangents import Cotangents, exact
from lapwing.estimate.data_pass import Batches, one_shot, pulled
from lapwing.estimate.ranks import ONE, Ranks
from lapwing.likelihoods import Likelihood
from lapwing.linalg import Dual, LowRank, RowSet, Subspace
from lapwing.linalg.budget import check_memory, room
from lapwing.linalg.checks import normal
from lapwing.linalg.rows import Piece
from lapwing.params import ParamSpace
from lapwing.tangent import Tangent

GRAM_ROWS, PASSES = 2_000, 6
"""Rows up to which the exact way is taken, and passes over the data beyond."""
OVERSAMPLING = 10
"""Further dimensions of the subspace, so that the gap that convergence depends on lies behind more eigenvalues."""


def low_rank(
    tangent: Tangent,
    likelihood: Likelihood,
    batches: Batches,
    *,
    rank: int,
    cotangents: Cotangents = exact,
    generator: torch.Generator | None = None,
    gram_rows: int | None = None,
    passes: int = PASSES,
    ranks: Ranks = ONE,
) -> LowRank:
    """The `rank` largest eigenpairs of sum_n J_n^T H_n J_n; fewer if it has fewer.

    `gram_rows` (GRAM_ROWS) is up to how many rows the exact way is taken, `passes` the number of passes over the
    data otherwise. Monte-Carlo cotangents are drawn alike in every pass, if the loader's order is the same. Of several
    `ranks` each has a shard of the data.
    """
    if rank < 1 or passes < 2:
        raise CurvatureError(f"rank is {rank} and passes {passes}; expected a rank >= 1 and at least 2 passes.")
    _check_memory(tangent.space, rank)
    gram_rows = GRAM_ROWS if gram_rows is None else gram_rows
    if generator is None:
        numbers = torch.Generator().manual_seed(_next_seed())
        found = low_rank(
            tangent,
            likelihood,
            batches,
            rank=rank,
            cotangents=cotangents,
            generator=numbers,
            gram_rows=gram_rows,
            passes=passes,
            ranks=ranks,
        )
        if not torch.equal(numbers.get_state(), torch.Generator().manual_seed(numbers.initial_seed()).get_state()):
            torch.randint(2**62, ())  # numbers were drawn: torch's own generator goes on
        return found
    state = generator.get_state()

    def rows() -> Iterator[list[Piece]]:
        generator.set_state(state)
        return pieces_of(tangent, likelihood, batches, cotangents, generator)

    few = gram_part(tangent.space.size, rows(), gram_rows)
    count = torch.tensor(few.rows.count, device=tangent.space.device)
    if int(ranks.summed(count)) <= gram_rows:
        whole = ranks.pooled(few)
        assert isinstance(whole, Dual)
        return from_gram(whole, rank)
    if one_shot(batches):
        raise DataError(
            f"the data are an iterator and make more than {gram_rows} rows; expected a loader that can be gone "
            f"through {passes} times. Give a list of batches or a DataLoader, or raise `gram_rows`."
        )
    del few
    found = first_subspace(tangent.space, rank)
    for number in range(passes):
        found = found if number == 0 else Subspace.spanned(found.product)
        found = replace(found, product=ranks.summed(times_basis(rows(), found.basis)))
    return found.leading(rank, tangent.space.dtype)


def _check_memory(space: ParamSpace, rank: int) -> None:
    """Eigenvectors in float64 while they are found, with those of the subspace and of its decomposition."""
    each = 4 * 8 * space.size
    free = room(space.device)
    fits = 0 if free is None else max(0, free // each - OVERSAMPLING)
    remedy = f"Use rank={fits}, which fits" if fits else "Use kron, diag or matrix_free"
    what = f"{rank} eigenvectors of {space.size:,} weights, while they are found"
    check_memory(each * (min(rank + OVERSAMPLING, space.size)), what, f"{remedy}, or fewer weights.", space.device)


def _next_seed() -> int:
    """The number that torch's own generator gives next, which stays as it is."""
    ahead = torch.Generator()
    ahead.set_state(torch.get_rng_state())
    return int(torch.randint(2**62, (), generator=ahead))


# -- parts of it, which add up over data -------------------------------------------------------------------------------


def pieces_of(
    tangent: Tangent,
    likelihood: Likelihood,
    batches: Batches,
    cotangents: Cotangents,
    generator: torch.Generator | None,
) -> Iterator[list[Piece]]:
    """Rows of the data."""
    for batch in pulled(tangent, likelihood, batches, cotangents, generator):
        yield batch.pieces


def gram_part(size: int, rows: Iterator[list[Piece]], gram_rows: int) -> Dual:
    """The rows themselves; reading stops where there are more than `gram_rows` of them."""
    return Dual(RowSet.of(size, _until_more_than(gram_rows, rows)))


def _until_more_than(limit: int, rows: Iterator[list[Piece]]) -> Iterator[list[Piece]]:
    count = 0
    for pieces in rows:
        yield pieces
        count += prod(pieces[0].shape)
        if count > limit:
            return


def from_gram(dual: Dual, rank: int) -> LowRank:
    """Eigenvectors of R R^T, pulled back: R^T v has the length sqrt(l)."""
    _, vectors = dual.eigen
    return LowRank.of(dual.rows.pull(vectors.mT.flip(0)[:rank]).mT, rank, dual.rows.dtype)


def first_subspace(space: ParamSpace, rank: int) -> Subspace:
    """A random one, always the same, of a few more dimensions."""
    like = torch.empty((), dtype=torch.float64, device=space.device)
    numbers = torch.Generator(like.device).manual_seed(0)
    return Subspace.spanned(normal((min(rank + OVERSAMPLING, space.size), space.size), like, numbers).mT)


def times_basis(rows: Iterator[list[Piece]], basis: Float[Tensor, "params k"]) -> Float[Tensor, "params k"]:
    """The curvature of the rows times a basis, in one pass."""
    v = basis.mT
    total = torch.zeros_like(v)
    for pieces in rows:
        part = RowSet(v.shape[1], (tuple(pieces),))
        total += part.pull(part.push(v))
    return total.mT
