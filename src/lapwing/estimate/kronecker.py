"""kflr and kfac: one Kronecker product G (x) A per layer, exact or Monte-Carlo in G. Memory O(O^2 + I^2) per layer.

For N points with T positions that share the weight, a the inputs [a; 1] and g the pulled-back columns:

    expand   (1 / (N T)) (sum_nt a a^T) (x) (sum_nt g g^T)
    reduce   (1 / N) (sum_n a_n a_n^T) (x) (sum_n g_n g_n^T),  a_n the mean and g_n the sum over positions

Uses of one weight in one role count as further positions. Vectors (norm scales, lone biases, PReLU, positional
tables) get an exact dense block up to `dense_limit` entries and an exact diagonal beyond it; a table's input
factor is diagonal. A parameter that reaches the data in no such way is an error that names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import Tensor

from lapwing.errors import ParameterError, UnsupportedOperationError
from lapwing.estimate.cotangents import Cotangents, exact, monte_carlo
from lapwing.estimate.diagonal import add_squares
from lapwing.estimate.passes import Batches, Pulled, pulled
from lapwing.likelihoods import Likelihood
from lapwing.linalg import Block, Blocks, Dense, DenseRows, Diagonal, Kronecker, LookupRows, MatrixLayout, OuterRows
from lapwing.linalg import Piece, Segments, Term
from lapwing.linalg.rows import assemble, connected, rows_of
from lapwing.params import ParamSpace
from lapwing.tangent import Tangent


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
    settings = KroneckerOptions(**options)  # pyright: ignore[reportArgumentType]
    space = tangent.space
    if space.index is not None:
        raise ParameterError(
            "a sub-network given by a mask cuts through weights, which a Kronecker block cannot follow; expected whole "
            "tensors. Select by name or module, or use a full, block or diagonal structure."
        )
    layers: dict[Segments, _Layer] = {}
    for batch in pulled(tangent, likelihood, batches, cotangents, generator):
        _check_structured(batch, settings.dense_limit)
        for segments, group in _groups(batch.pieces, settings.dense_limit, space):
            if segments not in layers:
                layers[segments] = _layer(segments, group, settings, space)
            layers[segments].add([piece.moved(segments) for piece in group], batch.first)
    return _collect(layers, space)


def kfac(
    tangent: Tangent,
    likelihood: Likelihood,
    batches: Batches,
    *,
    samples: int = 1,
    generator: torch.Generator | None = None,
    **options: str | int | bool,
) -> Blocks:
    """As `kflr`, with the output factor estimated from `samples` targets drawn per data point: as many backward passes."""
    return kflr(tangent, likelihood, batches, cotangents=monte_carlo(samples), generator=generator, **options)


# -- which parameters form a block ----------------------------------------------------------------------------------


def _check_structured(batch: Pulled, dense_limit: int) -> None:
    record, space = batch.linearisation.record, batch.linearisation.space
    for name, operation in record.opaque.items():
        raise UnsupportedOperationError(
            f"parameter '{name}' is used by '{operation}', for which there is no Kronecker rule; expected linear, matmul, "
            "einsum, convolution, normalisation, embedding or elementwise operations. Use a full or diagonal structure, "
            "leave the parameter out (requires_grad=False or a smaller ParamSpace), or add a rule (docs/extending.md)."
        )
    for name, operation in record.derived.items():
        if space.shape(name).numel() > dense_limit:
            raise UnsupportedOperationError(
                f"parameter '{name}' is turned into another tensor by '{operation}' before it meets the data, so that its "
                f"curvature is no Kronecker product, and its {space.shape(name).numel()} entries exceed the limit of "
                f"{dense_limit} for a dense block. Raise dense_limit, or use a full or diagonal structure."
            )


def _groups(pieces: Sequence[Piece], dense_limit: int, space: ParamSpace) -> list[tuple[Segments, list[Piece]]]:
    """Pieces that form one block each: a weight with its bias where only this weight uses it, else each tensor alone."""
    found = []
    for segments, group in connected(pieces):
        if _is_matrix(group) or all(isinstance(piece, DenseRows) for piece in group):
            found.append((segments, group))
            continue
        for part, members in connected([part for piece in group for part in piece.split()]):
            plain = _is_matrix(members) or all(isinstance(piece, DenseRows) for piece in members)
            if not plain and part.size > dense_limit:
                raise UnsupportedOperationError(
                    f"parameter '{_name(part, space)}' is used by operations of different kinds, so that its curvature is no "
                    f"Kronecker product, and its {part.size} entries exceed the limit of {dense_limit} for a dense block. "
                    "Raise dense_limit, or use a full or diagonal structure."
                )
            found.append((part, members))
    return found


def _is_matrix(group: Sequence[Piece]) -> bool:
    """Whether all pieces are one weight as a matrix, upright or transposed, with at most one bias, upright."""
    upright = next((p.layout for p in group if isinstance(p, OuterRows)), None)
    if any(isinstance(piece, DenseRows) for piece in group):
        return False
    if upright is None:
        return len({p.layout for p in group if isinstance(p, LookupRows)}) == 1
    with_bias = [p.layout for p in group if isinstance(p, OuterRows) and p.layout.bias is not None]
    if len({layout.bias for layout in with_bias}) > 1:
        return False
    upright = with_bias[0] if with_bias else upright
    return all(_role(piece, upright) is not None for piece in group)


def _role(piece: Piece, upright: MatrixLayout) -> str | None:
    """How a piece relates to the block's matrix: "upright", "transposed", "lookup", or not at all."""
    if isinstance(piece, DenseRows):
        return None
    plain, other = replace(upright, bias=None), replace(piece.layout, bias=None)
    if isinstance(piece, LookupRows):
        same = (plain.start, plain.groups, plain.rows, plain.cols) == (other.start, 1, other.rows, other.cols)
        return "lookup" if same and _row_major(plain) else None
    if plain == other:
        return "upright"
    turned = replace(plain, order=plain.order[::-1], rows=plain.cols, cols=plain.rows)
    two_axes = len(plain.stored) == 2 and plain.groups == 1
    return "transposed" if two_axes and turned == other and piece.layout.bias is None else None


def _row_major(layout: MatrixLayout) -> bool:
    return layout.order == tuple(range(len(layout.order)))


def _name(segments: Segments, space: ParamSpace) -> str:
    start = segments.intervals[0][0]
    return next(name for name in reversed(space.names) if space.starts[name] <= start)


# -- accumulation ---------------------------------------------------------------------------------------------------


class _Layer:
    """Sums of one block over the data."""

    def add(self, pieces: list[Piece], first: bool) -> None:
        raise NotImplementedError

    def curvature(self) -> Dense | Diagonal | Kronecker:
        raise NotImplementedError


def _layer(segments: Segments, group: Sequence[Piece], options: KroneckerOptions, space: ParamSpace) -> _Layer:
    if _is_matrix(group):
        layouts = [piece.layout for piece in group if not isinstance(piece, DenseRows)]
        outer = [piece.layout for piece in group if isinstance(piece, OuterRows)]
        upright = next((layout for layout in outer if layout.bias is not None), (outer or layouts)[0])
        return _Matrix(upright.moved(segments), options)
    like = torch.zeros((), dtype=space.dtype, device=space.device)
    if segments.size <= options.dense_limit:
        return _DenseVector(like.new_zeros(segments.size, segments.size))
    return _DiagonalVector(like.new_zeros(segments.size))


@dataclass
class _DenseVector(_Layer):
    total: Tensor

    def add(self, pieces: list[Piece], first: bool) -> None:
        flat = assemble(pieces, len(self.total), slice(0, rows_of(pieces[0])[1])).flatten(0, 1)
        self.total.addmm_(flat.mT, flat)

    def curvature(self) -> Dense:
        return Dense(self.total)


@dataclass
class _DiagonalVector(_Layer):
    total: Tensor

    def add(self, pieces: list[Piece], first: bool) -> None:
        add_squares(pieces, self.total, 2**28)

    def curvature(self) -> Diagonal:
        return Diagonal(self.total)


@dataclass
class _Matrix(_Layer):
    """Sums of the factors, one term per role."""

    layout: MatrixLayout
    options: KroneckerOptions
    terms: dict[str, Term] = field(default_factory=dict)

    def add(self, pieces: list[Piece], first: bool) -> None:
        by_role: dict[str, list[Piece]] = {}
        for piece in pieces:
            role = _role(piece, self.layout)
            assert role is not None
            by_role.setdefault(role, []).append(piece)
        for role, members in by_role.items():
            left, right, index = self._positions(members)
            count = float(prod(left.shape[1:3]))
            rows = _gram(left.flatten(0, 1))
            if role == "lookup":
                assert index is not None
                counts = left.new_zeros(1, self.layout.rows)
                if first:
                    counts[0].index_add_(0, index.flatten(), torch.ones_like(index, dtype=left.dtype).flatten())
                term = Term(self._widened(rows), counts, count if first else 0.0)
            else:
                width = self.layout.rows if role == "transposed" else right.shape[-1]
                cols = _gram(right) if first else right.new_zeros(self.layout.groups, width, width)
                if role == "transposed":
                    cols, rows = self._widened(rows), cols
                term = Term(cols, rows, count if first else 0.0)
            self.terms[role] = self.terms[role] + term if role in self.terms else term

    def _positions(self, members: list[Piece]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Left [R, n, t, k, o] and right [n, t, k, i] of all uses in one role, side by side as further positions."""
        if isinstance(members[0], LookupRows):
            tables = [piece for piece in members if isinstance(piece, LookupRows)]
            left = torch.cat([piece.left for piece in tables], dim=2).unsqueeze(3)
            index = torch.cat([piece.index for piece in tables], dim=1)
            return left, left, index
        outers = [piece for piece in members if isinstance(piece, OuterRows)]
        width = self.layout.width if _role(outers[0], self.layout) == "upright" else self.layout.rows
        rights = [torch.nn.functional.pad(piece.right, (0, width - piece.right.shape[-1])) for piece in outers]
        left = outers[0].left if len(outers) == 1 else torch.cat([piece.left for piece in outers], dim=2)
        right = rights[0] if len(outers) == 1 else torch.cat(rights, dim=1)
        if self.options.sharing == "reduce" and left.shape[2] > 1:
            left, right = left.sum(2, keepdim=True), right.mean(1, keepdim=True)
        return left, right, None

    def _widened(self, factor: Tensor) -> Tensor:
        """A zero for the bias column, which this role does not use."""
        extra = self.layout.width - factor.shape[-1]
        return torch.nn.functional.pad(factor, (0, extra, 0, extra)) if extra else factor

    def curvature(self) -> Kronecker:
        terms = tuple(self.terms[role] for role in sorted(self.terms))
        return Kronecker(self.layout, terms, self.options.joint_bias, self.options.factored_damping)


def _gram(values: Tensor) -> Tensor:
    """[m, t, k, d] -> sum over m, t of v v^T: [k, d, d]."""
    count, shared, groups, width = values.shape
    if shared > width and not values.is_contiguous():
        # positions last in memory (convolutions): small products per data point spare a transposing copy
        last = values.permute(0, 2, 3, 1)
        return (last @ last.mT).sum(0)
    if groups == 1:
        flat = values.reshape(count * shared, width)
        return (flat.mT @ flat).unsqueeze(0)
    return torch.einsum("m t k i, m t k j -> k i j", values, values)


def _collect(layers: dict[Segments, _Layer], space: ParamSpace) -> Blocks:
    """Blocks in parameter order; parameters that no operation used have zero curvature."""
    found = [Block(_name(segments, space), segments, layer.curvature()) for segments, layer in layers.items()]
    used = sorted(interval for segments in layers for interval in segments.intervals)
    at = 0
    for start, stop in [*used, (space.size, space.size)]:
        if start > at:
            gap = Segments(((at, start),))
            zeros = torch.zeros(start - at, dtype=space.dtype, device=space.device)
            found.append(Block(_name(gap, space), gap, Diagonal(zeros)))
        at = stop
    return Blocks(space.size, tuple(sorted(found, key=lambda block: block.segments.intervals[0])))
