"""kflr and kfac: one Kronecker product G (x) A per layer, exact or Monte-Carlo in G. Memory O(O^2 + I^2) per layer.

For N points with T positions that share the weight, a the inputs [a; 1] and g the pulled-back columns:

    expand   (1 / (N T)) (sum_nt a a^T) (x) (sum_nt g g^T)
    reduce   (1 / N) (sum_n a_n a_n^T) (x) (sum_n g_n g_n^T),  a_n the mean and g_n the sum over positions

Uses of one weight in one role count as further positions; a table's input factor is diagonal. Vectors (norm scales,
lone biases, PReLU, positional tables), and every parameter that reaches the data in a way that forms no product, get an
exact dense block up to `dense_limit` entries and an exact diagonal beyond it; `Block.reason` says why of the latter,
and `on_unsupported="error"` refuses them. A factor of more than `wide_limit` rows (a vocabulary) is kept as its
diagonal, which is exact for the diagonal of the block and for its trace.

A parameter's block is decided by the first batch that uses it. Where a weight with factors meets rows of another form
in a later batch, their matrices M enter as one more role, (sum M M^T) (x) (sum M^T M) / sum |M|^2, of exact trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch

from lapwing.errors import ParameterError, UnsupportedOperationError
from lapwing.estimate.accumulators import Accumulator, DenseVector, DiagonalVector, Matrix
from lapwing.estimate.cotangents import Cotangents, exact, monte_carlo
from lapwing.estimate.data_pass import Batches, Pulled, pulled
from lapwing.estimate.exact_diagonal import SquareSum
from lapwing.estimate.symmetric_sums import SymmetricSum
from lapwing.likelihoods import Likelihood
from lapwing.linalg import (
    Block,
    Blocks,
    Dense,
    Kronecker,
    KroneckerSum,
    LookupRows,
    MatrixLayout,
    OuterRows,
    Piece,
    Segments,
)
from lapwing.linalg.blocks import covering
from lapwing.linalg.layout import Segment
from lapwing.linalg.rows import connected
from lapwing.params import ParamSpace
from lapwing.tangent import Linearisation, Tangent
from lapwing.tangent.probe import Probe
from lapwing.tangent.record import Record


@dataclass(frozen=True)
class KroneckerOptions:
    """How layers become Kronecker products; the fields are the keyword arguments of `kflr` and `kfac`."""

    sharing: str = "expand"
    dense_limit: int = 1024
    wide_limit: int = 8192
    joint_bias: bool = True
    factored_damping: bool | str = False
    on_unsupported: str = "exact"

    def __post_init__(self) -> None:
        if self.sharing not in ("expand", "reduce"):
            raise ParameterError(f"unknown weight sharing {self.sharing!r}; expected 'expand' or 'reduce'.")
        if self.dense_limit < 0:
            raise ParameterError(f"dense_limit is {self.dense_limit}; expected a number of entries >= 0.")
        if self.wide_limit < 0:
            raise ParameterError(f"wide_limit is {self.wide_limit}; expected a number of rows >= 0.")
        if self.factored_damping not in (False, True, "plain"):
            raise ParameterError(f"factored_damping is {self.factored_damping!r}; expected False, True or 'plain'.")
        if self.on_unsupported not in ("exact", "error"):
            raise ParameterError(f"unknown on_unsupported {self.on_unsupported!r}; expected 'exact' or 'error'.")

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
    added_to: Blocks | None = None,
    **options: str | int | bool,
) -> Blocks:
    """Kronecker factors with the exact output factor: one backward pass per column of the loss Hessian's root.

    `added_to` is a curvature of other data, to which this one will be added: it takes the same blocks.
    """
    settings = KroneckerOptions.of(options)
    blocks = {} if added_to is None else _same_blocks(added_to, settings, tangent)

    def make(segments: Segments, group: Sequence[Piece], linearisation: Linearisation) -> Accumulator:
        return _accumulator(segments, group, linearisation, settings)

    rows = pulled(tangent, likelihood, batches, cotangents, generator, joining=2)
    accumulate(_without_opaque(rows) if settings.on_unsupported == "error" else rows, tangent, blocks, make)
    return collect(blocks, tangent.space)


def kfac(
    tangent: Tangent,
    likelihood: Likelihood,
    batches: Batches,
    *,
    samples: int = 1,
    generator: torch.Generator | None = None,
    added_to: Blocks | None = None,
    **options: str | int | bool,
) -> Blocks:
    """As `kflr`, with the output factor estimated from `samples` drawn targets per data point: as many passes."""
    drawn = monte_carlo(samples)
    return kflr(tangent, likelihood, batches, cotangents=drawn, generator=generator, added_to=added_to, **options)


Make = Callable[[Segments, Sequence[Piece], Linearisation], Accumulator]
"""A new block over some parameters, given the pieces of a batch that belong to it."""


def accumulate(rows: Iterable[Pulled], tangent: Tangent, blocks: dict[Segments, Accumulator], make: Make) -> None:
    """One pass: every weight with its bias, and every other tensor, to the block that it forms.

    The first batch that uses a parameter decides on its block, of `blocks` or made anew; later rows go there in
    whichever form they come, so that batches may differ in the operations that use a parameter.
    """
    check_whole(tangent.space)
    plans: dict[tuple[Probe, tuple[str, ...]], Plan] = {}
    for batch in rows:
        key = batch.linearisation.probe, tuple(batch.linearisation.record.opaque)
        if key not in plans:
            plans[key] = _plan(batch, blocks, make)
        for block, members in plans[key]:
            pieces = [member.of(batch.pieces) for member in members]
            block.add(pieces, batch.first)
            for piece in pieces:
                piece.forget()  # patches of one layer at a time


def check_whole(space: ParamSpace) -> None:
    """Refuses parts of weights."""
    if space.index is not None:
        raise ParameterError(
            "a sub-network given by a mask cuts through weights, which a Kronecker block cannot follow; expected whole "
            "tensors. Select by name or module, or use a full, block or diagonal structure."
        )


# -- which parameters form a block ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Member:
    """A piece of a batch by its number, a part of it where one is split, and an interval of that where one is cut."""

    number: int
    part: int | None = None
    interval: Segment | None = None

    def of(self, pieces: Sequence[Piece]) -> Piece:
        piece = pieces[self.number]
        piece = piece if self.part is None else piece.split()[self.part]
        if self.interval is None:
            return piece
        found = piece.cut(self.interval)
        assert found is not None, "a piece is cut where it has entries"
        return found


Plan = list[tuple[Accumulator, list[Member]]]
"""Which pieces go to which block: the same for every batch of a shape with the same opaque parameters."""


def _plan(batch: Pulled, blocks: dict[Segments, Accumulator], make: Make) -> Plan:
    """Pieces to the blocks there are. Of the others, a weight forms a block with a bias that it alone uses."""
    assigned: dict[Segments, list[Member]] = {}
    free: list[Member] = []
    for number in range(len(batch.pieces)):
        for home, member in _homes(Member(number), batch.pieces, list(blocks)):
            if home is None:
                free.append(member)
            else:
                assigned.setdefault(home, []).append(member)
    groups = _groups(free, batch.pieces)
    used = [
        interval for segments in (*blocks, *(segments for segments, _ in groups)) for interval in segments.intervals
    ]
    for segments, members in groups:
        group = [member.of(batch.pieces) for member in members]
        if not _is_matrix(group):
            segments = _grown(segments, used, batch.linearisation.space)
        blocks[segments] = make(segments, group, batch.linearisation)
        assigned[segments] = members
    return [(blocks[segments], members) for segments, members in assigned.items()]


def _homes(
    member: Member, pieces: Sequence[Piece], blocks: Sequence[Segments]
) -> Iterator[tuple[Segments | None, Member]]:
    """The blocks that a piece belongs to, each with its part of the piece; None for parameters without a block."""
    piece = member.of(pieces)
    home = next((each for each in blocks if all(map(each.contains, piece.segments))), None)
    touched = {interval: each for each in blocks for interval in each.intervals if _meets(interval, piece)}
    if home is not None or not touched:
        yield home, member
        return
    apart = piece.split()
    if len(apart) > 1:
        for part in range(len(apart)):
            yield from _homes(replace(member, part=part), pieces, blocks)
        return
    ((at, stop),) = piece.segments
    for interval in sorted(touched):
        start, end = max(interval[0], at), min(interval[1], stop)
        if at < start:
            yield None, replace(member, interval=(at, start))
        yield touched[interval], replace(member, interval=(start, end))
        at = end
    if at < stop:
        yield None, replace(member, interval=(at, stop))


def _meets(interval: Segment, piece: Piece) -> bool:
    return any(interval[0] < stop and start < interval[1] for start, stop in piece.segments)


def _groups(free: Sequence[Member], pieces: Sequence[Piece]) -> list[tuple[Segments, list[Member]]]:
    """Pieces that share parameters: a weight with its bias where only this weight uses it, else each tensor alone."""
    found = {id(piece): (member, piece) for member in free for piece in [member.of(pieces)]}
    groups = []
    for segments, group in connected([piece for _, piece in found.values()]):
        if _is_matrix(group) or not any(piece.factored for piece in group):
            groups.append((segments, group))
            continue
        for member, piece in [found[id(piece)] for piece in group]:
            parts = piece.split()
            if len(parts) > 1:
                found |= {id(part): (replace(member, part=j), part) for j, part in enumerate(parts)}
                group = [each for each in group if each is not piece] + parts
        groups += connected(group)
    return [(segments, [found[id(piece)][0] for piece in group]) for segments, group in groups]


def _grown(segments: Segments, used: Sequence[Segment], space: ParamSpace) -> Segments:
    """With what is left of its tensors: of a table of positions, those beyond the length of this batch's sequences.

    The block is then the same whichever batch comes first. An interval reaches to the next that is used, and back to
    the start of its tensor where it is the first.
    """
    found = []
    for start, stop in segments.intervals:
        tensor = space.segment(name_of(Segments(((start, stop),)), space))
        if stop <= tensor.stop:
            after = min((a for a, _ in used if a >= stop), default=tensor.stop)
            before = any(tensor.start <= a < start for a, _ in used)
            start, stop = start if before else tensor.start, min(after, tensor.stop)
        found.append((start, stop))
    return Segments(tuple(found))


def _is_matrix(group: Sequence[Piece]) -> bool:
    """Whether all pieces are one weight as a matrix, upright or transposed, with at most one bias, upright."""
    if len(group) == 1:
        return group[0].factored
    if not all(piece.factored for piece in group):
        return False
    if len({p.layout.bias for p in group if isinstance(p, OuterRows) and p.layout.bias is not None}) > 1:
        return False
    upright = _upright(group)
    return all(piece.role(upright) is not None for piece in group)


def _upright(group: Sequence[Piece]) -> MatrixLayout:
    """The layout the block takes: that of the use with a bias, else of the table, else of the first product."""
    outer = [piece.layout for piece in group if isinstance(piece, OuterRows)]
    tables = [piece.layout for piece in group if isinstance(piece, LookupRows)]
    return next((layout for layout in outer if layout.bias is not None), (tables + outer)[0])


def name_of(segments: Segments, space: ParamSpace) -> str:
    start = segments.intervals[0][0]
    return next(name for name in reversed(space.names) if space.starts[name] <= start)


def _accumulator(
    segments: Segments, group: Sequence[Piece], linearisation: Linearisation, options: KroneckerOptions
) -> Accumulator:
    tangent = linearisation.tangent
    if _is_matrix(group):
        return matrix_block(segments, _upright(group), options, tangent)
    name = name_of(segments, tangent.space)
    why = _why_exact(name, group, linearisation.record)
    if options.on_unsupported == "error" and why and segments.size > options.dense_limit:
        raise UnsupportedOperationError(
            f"parameter '{name}' is {why}, so that its curvature is no Kronecker product, and its {segments.size} "
            f"entries exceed the limit of {options.dense_limit} for a dense block; expected a weight that meets the "
            f"data itself, in one kind of operation, as on_unsupported is 'error'. {_REMEDY}."
        )
    found = exact_block(segments, segments.size <= options.dense_limit, tangent)
    found.reason = why
    return found


def matrix_block(segments: Segments, layout: MatrixLayout, options: KroneckerOptions, tangent: Tangent) -> Matrix:
    reduce, damping = options.sharing == "reduce", options.factored_damping
    return Matrix(segments, layout, reduce, options.joint_bias, damping, options.wide_limit, tangent.budget)


def exact_block(segments: Segments, dense: bool, tangent: Tangent) -> DenseVector | DiagonalVector:
    zeros = torch.zeros(segments.size, dtype=tangent.space.dtype, device=tangent.space.device)
    if dense:
        return DenseVector(segments, SymmetricSum.zeros(segments.size, zeros, tangent.budget))
    return DiagonalVector(segments, SquareSum(zeros, tangent.budget))


def _why_exact(name: str, group: Sequence[Piece], record: Record) -> str:
    """Why a parameter has no Kronecker factors; empty for one that is a vector to its operations."""
    if name in record.opaque:
        operation = record.opaque[name]
        operation = operation if "cannot be seen" in operation else f"'{operation}'"
        return f"used by {operation} in a way that forms no Kronecker product"
    if name in record.derived:
        return f"turned into another tensor by '{record.derived[name]}' before it meets the data"
    return "used by operations of different kinds" if any(piece.factored for piece in group) else ""


_REMEDY = (
    "Leave on_unsupported out, which gives the parameter an exact block; use a full or diagonal structure; or leave "
    "the parameter out (requires_grad=False or a smaller ParamSpace)"
)


def _without_opaque(rows: Iterable[Pulled]) -> Iterator[Pulled]:
    """Refuses parameters that no rule covers, in any batch: what `on_unsupported="error"` asks for."""
    for batch in rows:
        opaque = batch.linearisation.record.opaque
        for name in [name for name in batch.linearisation.space.names if name in opaque][:1]:
            why = _why_exact(name, [], batch.linearisation.record)
            raise UnsupportedOperationError(
                f"parameter '{name}' is {why}; expected linear, matmul, einsum, convolution, normalisation, embedding "
                "or elementwise operations that see all data points at once, as on_unsupported is 'error'. "
                f"{_REMEDY}, or add a rule (docs/extending.md)."
            )
        yield batch


def _same_blocks(found: Blocks, options: KroneckerOptions, tangent: Tangent) -> dict[Segments, Accumulator]:
    """The blocks of another curvature, from zero; those of parameters that its data did not use are left open."""
    blocks: dict[Segments, Accumulator] = {}
    for block in found.blocks:
        segments, curvature = block.segments, block.curvature
        if isinstance(curvature, KroneckerSum):
            curvature = curvature.parts[0]
        if isinstance(curvature, Kronecker):
            given = replace(options, joint_bias=curvature.joint_bias, factored_damping=curvature.factored_damping)
            blocks[segments] = matrix_block(segments, curvature.layout.placed(segments), given, tangent)
        elif not block.empty:
            blocks[segments] = exact_block(segments, isinstance(curvature, Dense), tangent)
            blocks[segments].reason = block.reason
    return blocks


def collect(blocks: dict[Segments, Accumulator], space: ParamSpace) -> Blocks:
    """Blocks in parameter order; parameters that no operation used have zero curvature."""
    found = [
        Block(name_of(segments, space), segments, layer.curvature(), layer.reason)
        for segments, layer in blocks.items()
        if layer.used
    ]
    like = torch.zeros((), dtype=space.dtype, device=space.device)
    return covering(space.size, found, like, lambda start: name_of(Segments(((start, start + 1),)), space))
