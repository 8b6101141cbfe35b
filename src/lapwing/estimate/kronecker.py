"""kflr and kfac: one Kronecker product G (x) A per layer, exact or Monte-Carlo in G. Memory O(O^2 + I^2) per layer.

For N points with T positions that share the weight, a the inputs [a; 1] and g the pulled-back columns:

    expand   (1 / (N T)) (sum_nt a a^T) (x) (sum_nt g g^T)
    reduce   (1 / N) (sum_n a_n a_n^T) (x) (sum_n g_n g_n^T),  a_n the mean and g_n the sum over positions

Uses of one weight in one role count as further positions. Vectors (norm scales, lone biases, PReLU, positional
tables) get an exact dense block up to `dense_limit` entries and an exact diagonal beyond it; a table's input
factor is diagonal. A parameter that reaches the data in no such way is an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

import torch

from lapwing.errors import ParameterError, UnsupportedOperationError
from lapwing.estimate.cotangents import Cotangents, exact, monte_carlo
from lapwing.estimate.diagonal import SquareSum
from lapwing.estimate.factors import Accumulator, DenseVector, DiagonalVector, Matrix, role_of
from lapwing.estimate.passes import Batches, Pulled, pulled
from lapwing.estimate.symmetric import SymmetricSum
from lapwing.likelihoods import Likelihood
from lapwing.linalg import Block, Blocks, DenseRows, Diagonal, LookupRows, MatrixLayout, OuterRows, Piece, Segments
from lapwing.linalg.rows import connected
from lapwing.params import ParamSpace
from lapwing.tangent import Linearisation, Tangent
from lapwing.tangent.probe import Probe


@dataclass(frozen=True)
class KroneckerOptions:
    """How layers become Kronecker products; the fields are the keyword arguments of `kflr` and `kfac`."""

    sharing: str = "expand"
    dense_limit: int = 1024
    joint_bias: bool = True
    factored_damping: bool = False

    def __post_init__(self) -> None:
        if self.sharing not in ("expand", "reduce"):
            raise ParameterError(f"unknown weight sharing {self.sharing!r}; expected 'expand' or 'reduce'.")
        if self.dense_limit < 0:
            raise ParameterError(f"dense_limit is {self.dense_limit}; expected a number of entries >= 0.")

    @staticmethod
    def of(options: Mapping[str, str | int | bool], without: Sequence[str] = ()) -> KroneckerOptions:
        """From keyword arguments; `without` are fields that a structure has no use for."""
        known = [each.name for each in fields(KroneckerOptions) if each.name not in without]
        for name in options:
            if name not in known:
                raise ParameterError(f"unknown option {name!r} of a Kronecker structure; expected some of {known}.")
        return KroneckerOptions(**options)  # pyright: ignore[reportArgumentType]


def kflr(
    tangent: Tangent,
    likelihood: Likelihood,
    batches: Batches,
    *,
    cotangents: Cotangents = exact,
    generator: torch.Generator | None = None,
    **options: str | int | bool,
) -> Blocks:
    """Kronecker factors with the exact output factor: one backward pass per column of the loss Hessian's root."""
    settings = KroneckerOptions.of(options)
    blocks: dict[Segments, Accumulator] = {}

    def block_of(segments: Segments, group: Sequence[Piece]) -> Accumulator:
        if segments not in blocks:
            blocks[segments] = _accumulator(segments, group, settings, tangent)
        return blocks[segments]

    accumulate(pulled(tangent, likelihood, batches, cotangents, generator), tangent, settings.dense_limit, block_of)
    return collect(blocks, tangent.space)


def kfac(
    tangent: Tangent,
    likelihood: Likelihood,
    batches: Batches,
    *,
    samples: int = 1,
    generator: torch.Generator | None = None,
    **options: str | int | bool,
) -> Blocks:
    """As `kflr`, with the output factor estimated from `samples` drawn targets per data point: as many passes."""
    return kflr(tangent, likelihood, batches, cotangents=monte_carlo(samples), generator=generator, **options)


BlockOf = Callable[[Segments, Sequence[Piece]], Accumulator]
"""The block over some parameters, given the pieces of a batch that belong to it."""


def accumulate(rows: Iterable[Pulled], tangent: Tangent, dense_limit: int, block_of: BlockOf) -> None:
    """One pass: every weight with its bias, and every other tensor, to the block that it forms."""
    check_whole(tangent.space)
    plans: dict[Probe, Plan] = {}
    for batch in rows:
        probe = batch.linearisation.probe
        if probe not in plans:
            _check_structured(batch.linearisation, dense_limit)
            plans[probe] = _plan(batch.pieces, block_of)
        for block, members in plans[probe]:
            block.add(
                [batch.pieces[i] if part is None else batch.pieces[i].split()[part] for i, part in members], batch.first
            )


def check_whole(space: ParamSpace) -> None:
    """Refuses parts of weights."""
    if space.index is not None:
        raise ParameterError(
            "a sub-network given by a mask cuts through weights, which a Kronecker block cannot follow; expected whole "
            "tensors. Select by name or module, or use a full, block or diagonal structure."
        )


# -- which parameters form a block ----------------------------------------------------------------------------------


def _check_structured(linearisation: Linearisation, dense_limit: int) -> None:
    record, space = linearisation.record, linearisation.space
    for name in space.names:
        if name in record.opaque:
            raise UnsupportedOperationError(
                f"parameter '{name}' is used by '{record.opaque[name]}', for which there is no Kronecker rule; "
                "expected linear, matmul, einsum, convolution, normalisation, embedding or elementwise operations. Use "
                "a full or diagonal structure, leave the parameter out (requires_grad=False or a smaller ParamSpace), "
                "or add a rule (docs/extending.md)."
            )
        entries = space.shape(name).numel()
        if name in record.derived and entries > dense_limit:
            raise UnsupportedOperationError(
                f"parameter '{name}' is turned into another tensor by '{record.derived[name]}' before it meets the "
                f"data, so that its curvature is no Kronecker product, and its {entries} entries exceed the limit of "
                f"{dense_limit} for a dense block. Raise dense_limit, or use a full or diagonal structure."
            )


Plan = list[tuple[Accumulator, list[tuple[int, int | None]]]]
"""Which pieces (by number, and by part where one is split) go to which block: the same for every batch of a shape."""


def _plan(pieces: Sequence[Piece], block_of: BlockOf) -> Plan:
    """A weight with its bias forms a block where only this weight uses the bias, else each tensor alone."""
    where: dict[int, tuple[int, int | None]] = {id(piece): (i, None) for i, piece in enumerate(pieces)}
    groups = []
    for segments, group in connected(pieces):
        if _is_matrix(group) or all(isinstance(piece, DenseRows) for piece in group):
            groups.append((segments, group))
            continue
        apart = [(where[id(piece)][0], j, part) for piece in group for j, part in enumerate(piece.split())]
        where |= {id(part): (i, j) for i, j, part in apart}
        groups += connected([part for _, _, part in apart])
    return [(block_of(segments, group), [where[id(piece)] for piece in group]) for segments, group in groups]


def _is_matrix(group: Sequence[Piece]) -> bool:
    """Whether all pieces are one weight as a matrix, upright or transposed, with at most one bias, upright."""
    if any(isinstance(piece, DenseRows) for piece in group):
        return False
    if len({p.layout.bias for p in group if isinstance(p, OuterRows) and p.layout.bias is not None}) > 1:
        return False
    upright = _upright(group)
    return all(role_of(piece, upright) is not None for piece in group)


def _upright(group: Sequence[Piece]) -> MatrixLayout:
    """The layout the block takes: that of the use with a bias, else of the first product, else of the table."""
    outer = [piece.layout for piece in group if isinstance(piece, OuterRows)]
    tables = [piece.layout for piece in group if isinstance(piece, LookupRows)]
    return next((layout for layout in outer if layout.bias is not None), (tables + outer)[0])


def name_of(segments: Segments, space: ParamSpace) -> str:
    start = segments.intervals[0][0]
    return next(name for name in reversed(space.names) if space.starts[name] <= start)


def _accumulator(
    segments: Segments, group: Sequence[Piece], options: KroneckerOptions, tangent: Tangent
) -> Accumulator:
    if _is_matrix(group):
        sharing = options.sharing == "reduce"
        return Matrix(segments, _upright(group), sharing, options.joint_bias, options.factored_damping)
    zeros = torch.zeros(segments.size, dtype=tangent.space.dtype, device=tangent.space.device)
    if segments.size <= options.dense_limit:
        return DenseVector(segments, SymmetricSum.zeros(segments.size, zeros, tangent.budget))
    if all(isinstance(piece, DenseRows) for piece in group):
        return DiagonalVector(segments, SquareSum(zeros, tangent.budget))
    raise UnsupportedOperationError(
        f"parameter '{name_of(segments, tangent.space)}' is used by operations of different kinds, so that its "
        f"curvature is no Kronecker product, and its {segments.size} entries exceed the limit of {options.dense_limit} "
        "for a dense block. Raise dense_limit, or use a full or diagonal structure."
    )


def collect(blocks: dict[Segments, Accumulator], space: ParamSpace) -> Blocks:
    """Blocks in parameter order; parameters that no operation used have zero curvature."""
    found = [Block(name_of(segments, space), segments, layer.curvature()) for segments, layer in blocks.items()]
    used = sorted(interval for segments in blocks for interval in segments.intervals)
    at = 0
    for start, stop in [*used, (space.size, space.size)]:
        if start > at:
            gap = Segments(((at, start),))
            zeros = torch.zeros(start - at, dtype=space.dtype, device=space.device)
            found.append(Block(name_of(gap, space), gap, Diagonal(zeros)))
        at = stop
    return Blocks(space.size, tuple(sorted(found, key=lambda block: block.segments.intervals[0])))
