"""low_rank: the largest eigenpairs of the GGN or Fisher, U diag(l) U^T with U [P, rank]. Memory O(P rank).

With at most `gram_rows` rows in the data they come from the Gram matrix of the rows, exactly, in one pass. With more,
from subspace iteration: a random subspace of a few more dimensions is multiplied by the curvature in every pass, and
what is wrong in it shrinks by (l_other / l_rank) each time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from math import prod

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.errors import CurvatureError, DataError
from lapwing.estimate.cotangents import Cotangents, exact
from lapwing.estimate.data_pass import Batches, one_shot, pulled
from lapwing.estimate.ranks import ONE, Ranks
from lapwing.likelihoods import Likelihood
from lapwing.linalg import Dual, LowRank, RowSet
from lapwing.linalg.checks import eigh_psd, normal
from lapwing.linalg.rows import Piece
from lapwing.tangent import Tangent

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
    gram_rows: int = 2_000,
    passes: int = 6,
    ranks: Ranks = ONE,
) -> LowRank:
    """The `rank` largest eigenpairs of sum_n J_n^T H_n J_n; fewer if it has fewer.

    `gram_rows` is the largest number of rows that the exact way is taken for, `passes` the number of passes over the
    data otherwise. Monte-Carlo cotangents are drawn alike in every pass, if the loader's order is the same. Of several
    `ranks` each has a shard of the data.
    """
    if rank < 1 or passes < 2:
        raise CurvatureError(f"rank is {rank} and passes {passes}; expected a rank >= 1 and at least 2 passes.")
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
    state, size, dtype = generator.get_state(), tangent.space.size, tangent.space.dtype

    def rows() -> Iterator[list[Piece]]:
        generator.set_state(state)
        for batch in pulled(tangent, likelihood, batches, cotangents, generator):
            yield batch.pieces

    few: RowSet | None = None
    with suppress(_TooManyRows):
        few = RowSet.of(size, _at_most(gram_rows, rows()))
    count = torch.tensor(gram_rows + 1 if few is None else few.count, device=tangent.space.device)
    if int(ranks.summed(count)) <= gram_rows:
        assert few is not None
        whole = ranks.pooled(Dual(few))
        assert isinstance(whole, Dual)
        return _from_gram(whole, rank)
    if one_shot(batches):
        raise DataError(
            f"the data are an iterator and make more than {gram_rows} rows; expected a loader that can be gone "
            f"through {passes} times. Give a list of batches or a DataLoader, or raise `gram_rows`."
        )
    like = torch.empty((), dtype=torch.float64, device=tangent.space.device)
    subspace = normal((min(rank + OVERSAMPLING, size), size), like, torch.Generator(like.device).manual_seed(0))
    basis, product = subspace.mT, subspace.mT
    for _ in range(passes):
        basis = torch.linalg.qr(product).Q
        product = ranks.summed(_multiplied(rows(), basis.mT)).mT
    # the curvature within the subspace; what it does to the rest is not known
    values, vectors = eigh_psd((basis.mT @ product + product.mT @ basis) / 2, "the curvature in the subspace")
    return LowRank.of(basis @ (vectors * values.sqrt()), rank, dtype)


def _next_seed() -> int:
    """The number that torch's own generator gives next, which stays as it is."""
    ahead = torch.Generator()
    ahead.set_state(torch.get_rng_state())
    return int(torch.randint(2**62, (), generator=ahead))


class _TooManyRows(Exception):
    pass


def _at_most(limit: int, parts: Iterator[list[Piece]]) -> Iterator[list[Piece]]:
    count = 0
    for pieces in parts:
        count += prod(pieces[0].shape)
        if count > limit:
            raise _TooManyRows
        yield pieces


def _from_gram(dual: Dual, rank: int) -> LowRank:
    """Eigenvectors of R R^T, pulled back: R^T v has the length sqrt(l)."""
    _, vectors = dual.eigen
    return LowRank.of(dual.rows.pull(vectors.mT.flip(0)[:rank]).mT, rank, dual.rows.dtype)


def _multiplied(parts: Iterator[list[Piece]], v: Float[Tensor, "k params"]) -> Float[Tensor, "k params"]:
    """The curvature times k vectors, in one pass."""
    total = torch.zeros_like(v)
    for pieces in parts:
        rows = RowSet(v.shape[1], (tuple(pieces),))
        total += rows.pull(rows.push(v))
    return total
