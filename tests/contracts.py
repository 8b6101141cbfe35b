"""The contracts of `Curvature` and `Precision` as data: one row of `STRUCTURES` per structure, with its dense twin.

`tests/linalg/test_curvature.py` and `tests/linalg/test_precision.py` run every method of every row against the twin,
in float64 at a relative 1e-9. A new structure is one more `Structure(name, make)` in the list at the end of this file,
where `make(generator)` returns a `Case`: a random curvature and the same matrix, built in the most obvious way.

What a row may say beyond that, and mostly need not:

    tensors      [P] group numbers, where a prior has to be constant within a group; None where any vector will do
    posterior    prior [P] -> [P, P], where it is not matrix + diag(prior)
    statistics   what adds up over data, where the matrix itself does not, and `rebuild` to make a case of it
    pieces       rows in the structure's own layout, on top of the generic ones that every structure has to take
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod, sqrt
from typing import Any

import torch
from torch import Generator, Tensor

from lapwing.linalg import (
    Block,
    Blocks,
    CorrectedKronecker,
    Curvature,
    Dense,
    DenseRows,
    Diagonal,
    Effort,
    EigenColumns,
    Kronecker,
    LookupRows,
    MatrixFree,
    MatrixLayout,
    OuterRows,
    Piece,
    Segments,
    Term,
)
from lapwing.linalg.matrix_free import DenseProducts
from lapwing.linalg.recomputed import RecomputedRows

RTOL = 1e-9
REPEATS = 3
"""T, positions that share a weight; N and R are other numbers, so that no two axes can be taken for one another."""
POINTS, ROWS = 4, 2


@dataclass(frozen=True)
class Case:
    """A curvature and its dense twin."""

    curvature: Curvature
    matrix: Tensor
    tensors: Tensor | None = None
    posterior: Callable[[Tensor], Tensor] | None = None
    statistics: Any = None
    rebuild: Callable[[Any], Case] | None = None
    pieces: Callable[[Generator], dict[str, list[Piece]]] = field(default=lambda generator: {})

    @property
    def size(self) -> int:
        return len(self.matrix)

    def with_prior(self, prior: Tensor) -> Tensor:
        """The dense twin of `curvature.with_prior(prior)`, differentiable in the prior."""
        prior = prior.expand(self.size)
        return self.matrix + prior.diag() if self.posterior is None else self.posterior(prior)

    def pooled(self, other: Case) -> Tensor:
        """The dense twin of the curvature of both data sets."""
        if self.rebuild is None:
            return self.matrix + other.matrix
        return self.rebuild(_add(self.statistics, other.statistics)).matrix


@dataclass(frozen=True)
class Structure:
    """One row: a name, and how to make a random case. The suites do the rest."""

    name: str
    make: Callable[[Generator], Case]

    def __str__(self) -> str:
        return self.name


def generator(seed: int = 0) -> Generator:
    return torch.Generator().manual_seed(seed)


def close(actual: Tensor, expected: Tensor, rtol: float = RTOL) -> None:
    """Equal to a relative 1e-9 of the largest entry: a twin has no exact zeros where rounding is."""
    assert actual.dtype == expected.dtype == torch.float64
    scale = float(expected.detach().abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=rtol * scale)


def normal(generator: Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def psd(generator: Generator, *shape: int) -> Tensor:
    """A random PSD matrix of full rank: shape (*lead, d) gives [*lead, d, d]."""
    root = normal(generator, *shape, shape[-1] + 2)
    return root @ root.mT / shape[-1]


def priors(case: Case, generator: Generator) -> dict[str, Tensor]:
    """Prior precisions that the structure has to carry, by name."""
    found = {"isotropic": torch.tensor(0.7, dtype=torch.float64)}
    if case.tensors is None:
        found["a vector"] = 0.1 + torch.rand(case.size, dtype=torch.float64, generator=generator)
        return found
    found["a constant vector"] = torch.full((case.size,), 0.7, dtype=torch.float64)
    if int(case.tensors.max()):
        found["one per tensor"] = (0.3 + 0.2 * torch.arange(1.0 + int(case.tensors.max())).double())[case.tensors]
    return found


# -- rows of a Jacobian ---------------------------------------------------------------------------------------------


def positions(layout: MatrixLayout) -> Tensor:
    """Flat position of every entry of the matrix [K, O, width] of a layout, by counting."""
    found = torch.empty(layout.groups, layout.rows, layout.width, dtype=torch.int64)
    axes = [layout.stored[axis] for axis in layout.order]
    for number, index in enumerate(product(*map(range, axes))):
        where = 0
        for axis, size in enumerate(layout.stored):  # row-major over the stored axes
            where = where * size + index[layout.order.index(axis)]
        k, rest = divmod(number, layout.rows * layout.cols)
        found[k, rest // layout.cols, rest % layout.cols] = layout.start + where
    if layout.bias is not None:
        for k, o in product(range(layout.groups), range(layout.rows)):
            found[k, o, layout.cols] = layout.bias + k * layout.rows + o
    return found


def spelled_out(pieces: Sequence[Piece], size: int) -> Tensor:
    """The rows [R, N, P] that pieces stand for, one entry at a time."""
    count, points = _rows(pieces[0]).shape[:2]
    out = torch.zeros(count, points, size, dtype=torch.float64)
    for piece in pieces:
        if isinstance(piece, DenseRows):
            out[..., piece.start : piece.start + piece.values.shape[-1]] += piece.values
        elif isinstance(piece, OuterRows):
            where = positions(piece.layout)
            for t in range(piece.shared):
                for k, o, i in product(*map(range, where.shape)):
                    out[..., where[k, o, i]] += piece.left[:, :, t, k, o] * piece.right[:, t, k, i]
        else:
            where = positions(piece.layout)[0]
            for n, t in product(*map(range, piece.index.shape)):
                out[:, n, where[piece.index[n, t]]] += piece.left[:, n, t]
    return out


def _rows(piece: Piece) -> Tensor:
    return piece.values if isinstance(piece, DenseRows) else piece.left


def outer(layout: MatrixLayout, generator: Generator, shared: int) -> OuterRows:
    """Random rows of a weight; the bias column is one, as in [a; 1], but not everywhere, as for padded uses."""
    left = normal(generator, ROWS, POINTS, shared, layout.groups, layout.rows)
    return OuterRows(layout, left, normal(generator, POINTS, shared, layout.groups, layout.width))


def fixed(layout: MatrixLayout, generator: Generator) -> OuterRows:
    """Rows whose left side is one memory for all data points, as a last layer gives them."""
    left = normal(generator, ROWS, 1, 1, layout.groups, layout.rows).expand(-1, POINTS, -1, -1, -1)
    return OuterRows(layout, left, normal(generator, POINTS, 1, layout.groups, layout.width))


def lookup(layout: MatrixLayout, generator: Generator, shared: int = REPEATS) -> LookupRows:
    """Random rows of a table; with more positions than tokens, so that tokens repeat."""
    index = torch.randint(layout.rows, (POINTS, shared), generator=generator)
    index[0] = 0  # one token at every position
    return LookupRows(layout, normal(generator, ROWS, POINTS, shared, layout.cols), index)


def generic_pieces(size: int, generator: Generator) -> dict[str, list[Piece]]:
    """Rows over 0..size that have nothing to do with the structure: it has to take them all the same."""
    half = size // 2
    upright = MatrixLayout(0, (2, half), (0, 1), 1, 2, half)
    turned = MatrixLayout(size - 2 * half, (half, 2), (1, 0), 1, 2, half)
    with_bias = MatrixLayout(2, (2, half - 2), (0, 1), 1, 2, half - 2, bias=0)
    table = MatrixLayout(0, (half, 2), (0, 1), 1, half, 2)

    def dense(start: int, stop: int) -> DenseRows:
        return DenseRows(start, normal(generator, ROWS, POINTS, stop - start))

    return {
        "dense rows": [dense(0, size)],
        "dense rows of a part": [dense(1, size - 1)],
        "dense rows that overlap": [dense(0, half + 1), dense(half - 1, size), dense(half, half + 1)],
        "a weight": [outer(upright, generator, 1)],
        "a weight, the same cotangent everywhere": [fixed(with_bias, generator)],
        "a shared weight": [outer(turned, generator, REPEATS)],
        "a table": [lookup(table, generator)],
        "pieces of every kind that share parameters": [
            outer(with_bias, generator, 1),
            outer(turned, generator, REPEATS),
            lookup(table, generator),
            dense(1, size),
        ],
    }


def all_pieces(case: Case, generator: Generator) -> dict[str, list[Piece]]:
    return generic_pieces(case.size, generator) | case.pieces(generator)


def layout_pieces(layout: MatrixLayout, generator: Generator) -> dict[str, list[Piece]]:
    """Rows in a structure's own layout."""
    plain = replace(layout, bias=None)
    found: dict[str, list[Piece]] = {
        "its own weight": [outer(layout, generator, 1)],
        "its own weight, the same cotangent everywhere": [fixed(layout, generator)],
        "its own weight, shared": [outer(layout, generator, REPEATS)],
        "its own weight, shared more": [outer(layout, generator, 5)],
        "its own weight, shared often": [outer(layout, generator, 20)],
        "its own weight, two uses": [outer(layout, generator, 1), outer(layout, generator, REPEATS)],
        "its own weight without the bias": [outer(plain, generator, 1)],
        "its own weight and rows on top": [outer(layout, generator, 1), lone_rows(layout, generator)],
    }
    if layout.groups == 1 and len(layout.stored) == 2:
        turned = replace(plain, order=plain.order[::-1], rows=plain.cols, cols=plain.rows)
        found["its own weight, transposed"] = [outer(turned, generator, REPEATS)]
        if layout.order == (0, 1):
            found["its own table"] = [lookup(plain, generator, 1)]
            found["its own table, tokens repeated"] = [lookup(plain, generator, 2 * layout.rows + 1)]
            found["its own table and weight (tied)"] = [lookup(plain, generator), outer(layout, generator, REPEATS)]
    return found


def lone_rows(layout: MatrixLayout, generator: Generator) -> DenseRows:
    """Rows of the weight alone, spelled out."""
    return DenseRows(layout.start, normal(generator, ROWS, POINTS, prod(layout.stored)))


# -- twins ----------------------------------------------------------------------------------------------------------


def dense(generator: Generator, size: int = 7) -> Case:
    matrix = psd(generator, size)
    return Case(Dense(matrix), matrix)


def singular(generator: Generator, size: int = 8) -> Case:
    """Fewer data than parameters, as usual."""
    rows = normal(generator, 3, size)
    return Case(Dense(rows.mT @ rows), rows.mT @ rows)


def diagonal(generator: Generator, size: int = 9) -> Case:
    values = normal(generator, size).square()
    return Case(Diagonal(values), values.diag())


@dataclass(frozen=True, eq=False)
class OneByOne:
    """The rows of a matrix, each a batch."""

    rows: Tensor

    def __call__(self, number: int) -> list[DenseRows]:
        return [DenseRows(0, self.rows[number, None, None])]


def matrix_free(rows: int, near: bool = False, few: bool = False) -> Callable[[Generator], Case]:
    """By products with a matrix of so many rows, solved to rounding; `near`: preconditioned by its diagonal.

    `few`: solved among the rows, which come in batches of one.
    """

    def make(generator: Generator, size: int = 8) -> Case:
        found = normal(generator, rows, size)
        matrix = found.mT @ found
        effort = Effort(1e-12, probes=size)
        again = RecomputedRows(size, (1,) * rows, OneByOne(found), kept=1)
        diagonal = Diagonal(matrix.diagonal()) if near else None
        return Case(MatrixFree(DenseProducts(found), effort, diagonal, rows=again if few else None), matrix)

    return make


@dataclass(frozen=True)
class Sums:
    """What a Kronecker term is made of."""

    cols: Tensor
    rows: Tensor
    count: float

    def __add__(self, other: Sums) -> Sums:
        return Sums(self.cols + other.cols, self.rows + other.rows, self.count + other.count)


def matrix_factor(factor: Tensor) -> Tensor:
    return torch.diag_embed(factor) if factor.dim() == 2 else factor


def nearest_product(terms: Sequence[Sums], group: int) -> tuple[Tensor, Tensor]:
    """A, G that minimise |G (x) A - sum_i G_i (x) A_i / n_i|: the first singular pair of the rearranged matrix."""
    pairs = [(matrix_factor(t.rows)[group], matrix_factor(t.cols)[group] / t.count) for t in terms]
    rearranged = sum(torch.outer(g.flatten(), a.flatten()) for g, a in pairs)
    assert isinstance(rearranged, Tensor)
    u, s, vh = torch.linalg.svd(rearranged)
    g, a = (s[0] * u[:, 0]).reshape(pairs[0][0].shape), vh[0].reshape(pairs[0][1].shape)
    sign = torch.sign(a.trace())
    return sign * a, sign * g


def kronecker_case(layout: MatrixLayout, terms: Sequence[Sums], joint: bool, damped: bool) -> Case:
    where = positions(layout)
    size = where.numel()
    products = [nearest_product(terms, group) for group in range(layout.groups)]
    is_bias = torch.zeros(size, dtype=torch.int64)
    if layout.bias is not None:
        is_bias[where[..., -1].flatten()] = 1
    apart = is_bias[:, None] != is_bias[None, :]

    def placed(blocks: Iterable[Tensor]) -> Tensor:
        out = torch.zeros(size, size, dtype=torch.float64)
        for flat, block in zip(where.flatten(1), blocks, strict=True):
            index = torch.zeros(size, len(flat), dtype=torch.float64)
            index[flat, torch.arange(len(flat))] = 1
            out = out + index @ block @ index.mT
        return out

    matrix = placed(torch.kron(g, a) for a, g in products)
    if not joint:
        matrix = matrix.masked_fill(apart, 0)

    def posterior(prior: Tensor) -> Tensor:
        split = not joint or bool((prior != prior[0]).any())
        if damped:
            return placed(
                damp(a, g, prior[flat], split) for (a, g), flat in zip(products, where.flatten(1), strict=True)
            )
        return (matrix.masked_fill(apart, 0) if split else matrix) + prior.diag()

    def damp(a: Tensor, g: Tensor, prior: Tensor, split: bool) -> Tensor:
        """(G + sqrt(d) / w) (x) (A + w sqrt(d)), separately for weight and bias where they are apart."""
        prior = prior.reshape(len(g), len(a))
        parts = [slice(0, layout.cols), slice(layout.cols, layout.width)] if split else [slice(0, layout.width)]
        pieces = []
        for part in parts:
            if part.start == part.stop or part.start == len(a):
                continue
            own, root = a[part, part], prior[:, part].mean().sqrt()
            omega = sqrt(float(own.trace()) * len(g) / (float(g.trace()) * len(own)))
            eye_a, eye_g = torch.eye(len(own), dtype=a.dtype), torch.eye(len(g), dtype=g.dtype)
            product = torch.kron(g + root / omega * eye_g, own + root * omega * eye_a)
            pick = torch.eye(len(a), dtype=a.dtype)[part]
            spread = torch.kron(eye_g, pick)
            pieces.append(spread.mT @ product @ spread)
        return torch.stack(pieces).sum(0)

    def rebuild(statistics: Sequence[Sums]) -> Case:
        return kronecker_case(layout, statistics, joint, damped)

    curvature = Kronecker(layout, tuple(Term(t.cols, t.rows, t.count) for t in terms), joint, damped)
    return Case(
        curvature,
        matrix,
        tensors=is_bias,
        posterior=posterior,
        statistics=tuple(terms),
        rebuild=rebuild,
        pieces=lambda generator: layout_pieces(layout, generator),
    )


def kronecker(
    layout: MatrixLayout,
    *,
    terms: int = 1,
    diagonal_rows: bool = False,
    joint: bool = True,
    damped: bool = False,
) -> Callable[[Generator], Case]:
    """Random factors for a layout; `diagonal_rows` is a table's token counts."""

    def make(generator: Generator) -> Case:
        found = []
        for number in range(terms):
            diagonal = diagonal_rows and number == 0
            rows = psd(generator, layout.groups, layout.rows)
            if diagonal:
                rows = torch.randint(1, 5, (layout.groups, layout.rows), generator=generator).double()
            cols = psd(generator, layout.groups, layout.width)
            found.append(Sums(cols, rows, 3.0 + number))
        return kronecker_case(layout, found, joint, damped)

    return make


def kronecker_sum(layout: MatrixLayout, *, joint: bool = True) -> Callable[[Generator], Case]:
    """3 A + B / 2: two tasks, scaled."""

    def make(generator: Generator) -> Case:
        parts = []
        for scale in (3.0, 0.5):
            case = kronecker(layout, joint=joint)(generator)
            assert isinstance(case.curvature, Kronecker)
            parts.append((case.curvature * scale, scale * case.matrix))
        total = parts[0][0] + parts[1][0]
        return Case(total, parts[0][1] + parts[1][1], pieces=lambda generator: layout_pieces(layout, generator))

    return make


def corrected(layout: MatrixLayout, *, diagonal_rows: bool = False, joint: bool = True) -> Callable[[Generator], Case]:
    """Random eigenvalues in a basis that is the same for every generator: only then is there a sum."""

    def basis() -> Kronecker:
        case = kronecker(layout, diagonal_rows=diagonal_rows, joint=joint)(generator(17))
        assert isinstance(case.curvature, Kronecker)
        return case.curvature

    def make(generator: Generator) -> Case:
        plain = basis().in_eigenbasis()
        return corrected_case(plain.with_values([normal(generator, *p.values.shape).square() for p in plain.parts]))

    return make


def corrected_case(curvature: CorrectedKronecker) -> Case:
    layout = curvature.layout
    where = positions(layout)
    is_bias = torch.zeros(where.numel(), dtype=torch.int64)
    if layout.bias is not None:
        is_bias[where[..., -1].flatten()] = 1

    def placed(columns: Sequence[EigenColumns]) -> Tensor:
        """Q diag(L) Q^T from explicit Kronecker products of eigenvectors, group by group."""
        out = torch.zeros(where.numel(), where.numel(), dtype=torch.float64)
        for each, group in product(columns, range(layout.groups)):
            flat = where[group][:, each.part].flatten()
            rows, cols = curvature.row_vectors, each.vectors
            q = torch.kron(
                torch.eye(layout.rows, dtype=torch.float64) if rows is None else rows[group].contiguous(),
                torch.eye(each.values.shape[-1], dtype=torch.float64) if cols is None else cols[group].contiguous(),
            )
            out[flat[:, None], flat[None, :]] = q @ each.values[group].flatten().diag() @ q.mT
        return out

    def posterior(prior: Tensor) -> Tensor:
        split = bool((prior != prior[0]).any()) and curvature.apart
        return placed(curvature.apart if split else curvature.columns) + prior.diag()

    return Case(
        curvature,
        placed(curvature.columns),
        tensors=is_bias,
        posterior=posterior,
        pieces=lambda generator: layout_pieces(layout, generator),
    )


def blocks(*parts: tuple[Callable[[Generator], Case], tuple[tuple[int, int], ...]]) -> Callable[[Generator], Case]:
    """Block-diagonal: each part with the intervals of the flat vector that its own coordinates are spread over."""

    def make(generator: Generator) -> Case:
        return blocks_case([(part(generator), Segments(intervals)) for part, intervals in parts])

    return make


def blocks_case(parts: Sequence[tuple[Case, Segments]]) -> Case:
    size = sum(segments.size for _, segments in parts)
    where = [torch.cat([torch.arange(*interval) for interval in segments.intervals]) for _, segments in parts]
    tensors = torch.arange(size)  # one group per entry where anything goes
    if any(case.tensors is not None for case, _ in parts):
        for (case, _), flat in zip(parts, where, strict=True):
            if case.tensors is not None:
                tensors[flat] = size + flat[0] * size + case.tensors
        tensors = tensors.unique(return_inverse=True)[1]

    def placed(each: Iterable[Tensor]) -> Tensor:
        out = torch.zeros(size, size, dtype=torch.float64)
        for flat, block in zip(where, each, strict=True):
            out = out.index_put((flat[:, None], flat[None, :]), block)
        return out

    def posterior(prior: Tensor) -> Tensor:
        return placed(case.with_prior(prior[flat]) for (case, _), flat in zip(parts, where, strict=True))

    def rebuild(statistics: Sequence[Any]) -> Case:
        made = []
        for (case, segments), own in zip(parts, statistics, strict=True):
            made.append((case.rebuild(own) if case.rebuild else replace(case, matrix=own), segments))
        return blocks_case(made)

    def pieces(generator: Generator) -> dict[str, list[Piece]]:
        found, together = {}, []
        for number, (case, segments) in enumerate(parts):
            own = {k: [_out_of(segments, p) for p in v] for k, v in case.pieces(generator).items()}
            found |= {f"block {number}: {key}": value for key, value in own.items()}
            together += next(iter(own.values()), [])
        return found | ({"every block at once": together} if together else {})

    return Case(
        Blocks(size, tuple(Block(str(i), s, case.curvature) for i, (case, s) in enumerate(parts))),
        placed(case.matrix for case, _ in parts),
        tensors=None if all(case.tensors is None for case, _ in parts) else tensors,
        posterior=posterior,
        statistics=tuple(case.matrix if case.rebuild is None else case.statistics for case, _ in parts),
        rebuild=rebuild,
        pieces=pieces,
    )


def _out_of(segments: Segments, piece: Piece) -> Piece:
    """A piece in a block's coordinates, in those of the whole; its tensors do not cross an interval."""

    def flat(position: int) -> int:
        return int(torch.cat([torch.arange(*interval) for interval in segments.intervals])[position])

    if isinstance(piece, DenseRows):
        return replace(piece, start=flat(piece.start))
    bias = None if piece.layout.bias is None else flat(piece.layout.bias)
    return replace(piece, layout=replace(piece.layout, start=flat(piece.layout.start), bias=bias))


def _add(a: Any, b: Any) -> Any:
    if isinstance(a, tuple):
        return tuple(_add(x, y) for x, y in zip(a, b, strict=True))
    return a + b


# -- the rows -------------------------------------------------------------------------------------------------------

LINEAR = MatrixLayout(0, (2, 3), (0, 1), 1, 2, 3)
LINEAR_BIAS = MatrixLayout(0, (2, 3), (0, 1), 1, 2, 3, bias=6)
BIAS_FIRST = MatrixLayout(2, (2, 3), (0, 1), 1, 2, 3, bias=0)
WIDE_BIAS = MatrixLayout(0, (2, 6), (0, 1), 1, 2, 6, bias=12)
TRANSPOSED = MatrixLayout(0, (3, 2), (1, 0), 1, 2, 3)
TRANSPOSED_BIAS = MatrixLayout(0, (3, 2), (1, 0), 1, 2, 3, bias=6)
GROUPED = MatrixLayout(0, (3, 2, 4), (0, 1, 2), 3, 2, 4)
GROUPED_BIAS = MatrixLayout(0, (2, 2, 3), (0, 1, 2), 2, 2, 3, bias=12)
CONV_TRANSPOSE = MatrixLayout(0, (2, 2, 3, 2), (0, 2, 1, 3), 2, 3, 4)
CONV_TRANSPOSE_BIAS = MatrixLayout(0, (1, 2, 3, 2), (0, 2, 1, 3), 1, 3, 4, bias=12)
TABLE = MatrixLayout(0, (5, 2), (0, 1), 1, 5, 2)
SQUARE_BIAS = MatrixLayout(0, (3, 3), (0, 1), 1, 3, 3, bias=9)

STRUCTURES = [
    Structure("Dense", dense),
    Structure("Dense, singular", singular),
    Structure("Diagonal", diagonal),
    Structure("MatrixFree", matrix_free(6)),
    Structure("MatrixFree, singular, preconditioned", matrix_free(3, near=True)),
    Structure("MatrixFree, among few rows", matrix_free(3, few=True)),
    Structure("Blocks of Dense", blocks((dense, ((0, 7),)), (singular, ((7, 15),)))),
    Structure("Blocks of Dense, apart", blocks((dense, ((0, 3), (11, 15))), (singular, ((3, 11),)))),
    Structure(
        "Blocks of all kinds",
        blocks(
            (kronecker(LINEAR_BIAS), ((0, 6), (9, 11))),
            (lambda generator: dense(generator, 3), ((6, 9),)),
            (kronecker(TABLE, diagonal_rows=True), ((11, 21),)),
            (lambda generator: diagonal(generator, 4), ((21, 25),)),
            (kronecker(TRANSPOSED, joint=False), ((25, 31),)),
        ),
    ),
    Structure("Kronecker", kronecker(LINEAR)),
    Structure("Kronecker, bias", kronecker(LINEAR_BIAS)),
    Structure("Kronecker, bias, more inputs than outputs", kronecker(WIDE_BIAS)),
    Structure("Kronecker, bias stored first", kronecker(BIAS_FIRST)),
    Structure("Kronecker, bias apart", kronecker(LINEAR_BIAS, joint=False)),
    Structure("Kronecker, transposed", kronecker(TRANSPOSED)),
    Structure("Kronecker, transposed, bias", kronecker(TRANSPOSED_BIAS)),
    Structure("Kronecker, groups", kronecker(GROUPED)),
    Structure("Kronecker, groups, bias", kronecker(GROUPED_BIAS)),
    Structure("Kronecker, groups, bias apart", kronecker(GROUPED_BIAS, joint=False)),
    Structure("Kronecker, transposed convolution, groups", kronecker(CONV_TRANSPOSE)),
    Structure("Kronecker, transposed convolution, bias", kronecker(CONV_TRANSPOSE_BIAS)),
    Structure("Kronecker, table", kronecker(TABLE, diagonal_rows=True)),
    Structure("Kronecker, two roles", kronecker(SQUARE_BIAS, terms=2)),
    Structure("Kronecker, two roles, groups", kronecker(GROUPED, terms=2)),
    Structure("Kronecker, three roles, one a table", kronecker(TABLE, terms=3, diagonal_rows=True)),
    Structure("Kronecker, factored damping", kronecker(LINEAR, damped=True)),
    Structure("Kronecker, factored damping, bias", kronecker(LINEAR_BIAS, damped=True)),
    Structure("Kronecker, factored damping, bias apart", kronecker(LINEAR_BIAS, damped=True, joint=False)),
    Structure("Kronecker, factored damping, groups", kronecker(GROUPED_BIAS, damped=True)),
    Structure("Kronecker, factored damping, table", kronecker(TABLE, diagonal_rows=True, damped=True)),
    Structure("Sum of Kronecker products", kronecker_sum(LINEAR)),
    Structure("Sum of Kronecker products, bias", kronecker_sum(LINEAR_BIAS)),
    Structure("Sum of Kronecker products, bias apart", kronecker_sum(LINEAR_BIAS, joint=False)),
    Structure("Sum of Kronecker products, groups", kronecker_sum(GROUPED_BIAS)),
    Structure("Corrected Kronecker", corrected(LINEAR)),
    Structure("Corrected Kronecker, bias", corrected(LINEAR_BIAS)),
    Structure("Corrected Kronecker, bias, more inputs than outputs", corrected(WIDE_BIAS)),
    Structure("Corrected Kronecker, bias stored first", corrected(BIAS_FIRST)),
    Structure("Corrected Kronecker, bias apart", corrected(LINEAR_BIAS, joint=False)),
    Structure("Corrected Kronecker, transposed, bias", corrected(TRANSPOSED_BIAS)),
    Structure("Corrected Kronecker, groups", corrected(GROUPED)),
    Structure("Corrected Kronecker, groups, bias", corrected(GROUPED_BIAS)),
    Structure("Corrected Kronecker, transposed convolution, groups", corrected(CONV_TRANSPOSE)),
    Structure("Corrected Kronecker, table", corrected(TABLE, diagonal_rows=True)),
    Structure(
        "Blocks with a corrected Kronecker",
        blocks((corrected(LINEAR_BIAS), ((0, 6), (9, 11))), (lambda generator: dense(generator, 3), ((6, 9),))),
    ),
]
