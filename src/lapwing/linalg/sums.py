"""Sums of curvatures over the same parameters, whatever their structures: a new one and that of earlier data.

    total(ours, theirs)   the sum, exact as a matrix; which structure it has is decided block by block
    MixedSum              terms that no structure holds together: kept, up to a prior
    merged_factors        one Kronecker product in the place of a sum of them, by adding the factors

Memory: that of the terms.

>>> import torch
>>> from lapwing.linalg.dense import Dense
>>> total(Dense(torch.eye(2)), Diagonal(torch.tensor([1.0, 2.0]))).dense()
tensor([[2., 0.],
        [0., 3.]])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from itertools import product

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.errors import CurvatureError
from lapwing.linalg.blocks import Blocks
from lapwing.linalg.checks import check_scale
from lapwing.linalg.contracts import Curvature, Multiple
from lapwing.linalg.dense import Dense
from lapwing.linalg.diagonal import Diagonal
from lapwing.linalg.kronecker.corrected import CorrectedKronecker
from lapwing.linalg.kronecker.factors import Term, diagonal_of
from lapwing.linalg.kronecker.rotation import EigenPart
from lapwing.linalg.kronecker.structure import DENSE_LIMIT, Kronecker, KroneckerSum, TermSum
from lapwing.linalg.layout import MatrixLayout

Eigenform = Kronecker | KroneckerSum | CorrectedKronecker
"""Structures of one weight that have, or are near to one that has, an eigenbasis Q_G (x) Q_A."""


def total(ours: Curvature, theirs: Curvature) -> Curvature:
    """ours + theirs, exact as a matrix: products with vectors, the diagonal and the dense form have no error.

    With a prior it is exact as well where the two are of one structure that adds, where one of them is dense, and for
    blocks of up to DENSE_LIMIT weights. Larger blocks of one weight are projected, see `MixedSum`; for anything else
    there is no sum, and an error says so.
    """
    if ours.size != theirs.size:
        raise CurvatureError(
            f"cannot add curvatures of {ours.size} and {theirs.size} parameters; expected as many. Fit both over the "
            "same parameters of one model."
        )
    if isinstance(ours, Blocks) or isinstance(theirs, Blocks):
        found = _block_by_block(ours, theirs)
        if found is not None:
            return found
    if _adds(ours, theirs):
        return ours + theirs
    if isinstance(ours, Dense) or isinstance(theirs, Dense) or ours.size <= DENSE_LIMIT:
        return Dense(ours.dense() + theirs.dense())
    parts = [part for each in (ours, theirs) for part in (each.parts if isinstance(each, MixedSum) else (each,))]
    kinds = (Kronecker, KroneckerSum, CorrectedKronecker, Diagonal)
    if all(isinstance(part, kinds) for part in parts) and _one_layout(parts):
        return MixedSum(tuple(parts))  # pyright: ignore[reportArgumentType]
    names = [type(each).__name__ for each in (ours, theirs)]
    raise CurvatureError(
        f"cannot add {names[1]} to {names[0]} of {ours.size} parameters; expected one structure, a dense or diagonal "
        f"one, or at most {DENSE_LIMIT} parameters, whose sum is dense. Use the structure of the earlier posterior."
    )


def _adds(ours: Curvature, theirs: Curvature) -> bool:
    """Whether the two have a structure whose sum is of that structure."""
    kronecker = (Kronecker, KroneckerSum)
    if isinstance(ours, kronecker) and isinstance(theirs, kronecker):
        return _settings(ours) == _settings(theirs)
    if isinstance(ours, CorrectedKronecker) and isinstance(theirs, CorrectedKronecker):
        return ours.layout == theirs.layout and ours.same_basis(theirs)
    return type(ours) is type(theirs) and not isinstance(ours, (Blocks, MixedSum))


def _settings(block: Kronecker | KroneckerSum) -> tuple:
    first = block.parts[0] if isinstance(block, KroneckerSum) else block
    return first.layout, first.joint_bias, first.factored_damping


def _block_by_block(ours: Curvature, theirs: Curvature) -> Blocks | None:
    """The sum of every block, where the two have the same ones; a diagonal has any."""
    if isinstance(ours, Blocks) and isinstance(theirs, Blocks):
        return ours.joined(theirs, total) if ours.fits(theirs) else None
    blocks, other = (ours, theirs) if isinstance(ours, Blocks) else (theirs, ours)
    if not isinstance(other, Diagonal):
        return None
    assert isinstance(blocks, Blocks)
    parts = [replace(b, curvature=Diagonal(b.segments.gather(other.values)), reason="") for b in blocks.blocks]
    return blocks.joined(Blocks(blocks.size, tuple(parts)), total)


def _one_layout(parts: Sequence[Curvature]) -> bool:
    found = [_layout(part) for part in parts if not isinstance(part, Diagonal)]
    return bool(found) and all(each == found[0] for each in found)


def _layout(part: Curvature) -> MatrixLayout:
    assert isinstance(part, (Kronecker, KroneckerSum, CorrectedKronecker))
    return part.parts[0].layout if isinstance(part, KroneckerSum) else part.layout


@dataclass(frozen=True, eq=False)
class MixedSum(TermSum[Eigenform | Diagonal]):
    """The sum of terms of one weight and its bias: in eigenbases of their own, products, or diagonal.

    Products with vectors, the diagonal and the dense form are exact. With a prior it is replaced by its diagonal in
    that of the terms' eigenbases that holds most of it: of the same trace; `merge_error` says how far.
    """

    parts: tuple[Eigenform | Diagonal, ...]
    multiple: Multiple[MixedSum] | None = field(default=None, repr=False)

    def __add__(self, other: Curvature) -> Curvature:
        return total(self, other)

    def __mul__(self, scale: float | int | Tensor) -> MixedSum:
        scale, root = check_scale(scale), self.multiple or Multiple(self, 1)
        return MixedSum(tuple(part * scale for part in self.parts), Multiple(root.of, root.scale * scale))

    @cached_property
    def decomposed(self) -> CorrectedKronecker:
        """What takes the place of the sum when a prior is added."""
        if self.multiple is not None:
            return self.multiple.of.decomposed * self.multiple.scale
        found = [self._in(_eigenform(part)) for part in self.parts if not isinstance(part, Diagonal)]
        return max(found, key=_square).averaged()

    def _in(self, basis: CorrectedKronecker) -> CorrectedKronecker:
        """The nearest matrix to the sum that is diagonal in a basis."""
        return basis.with_values([self._diagonal_in(part) for part in basis.parts])

    def _diagonal_in(self, basis: EigenPart) -> Tensor:
        return reduce(torch.add, (_diagonal_in(basis, term) for term in _plain(self.parts)))

    @property
    def merge_error(self) -> float:
        """Relative distance, in Frobenius norm, of `decomposed` from the sum."""
        terms = _plain(self.parts)
        whole = sum(_inner(a, b) for a, b in product(terms, terms))
        return (max(whole - _square(self.decomposed), 0.0) / whole) ** 0.5 if whole else 0.0


def _square(block: CorrectedKronecker) -> float:
    """The square of the Frobenius norm."""
    return sum(float(each.values.double().square().sum()) for each in block.columns)


def _eigenform(part: Eigenform) -> CorrectedKronecker:
    """A block whose eigenbasis is that of the part, or of the product nearest to it."""
    if isinstance(part, CorrectedKronecker):
        return part
    return (part.nearest if isinstance(part, KroneckerSum) else part).in_eigenbasis()


def _plain(parts: Sequence[Eigenform | Diagonal]) -> list[CorrectedKronecker | tuple[MatrixLayout, Diagonal]]:
    """Terms that are diagonal in a basis each: sums of products one by one, diagonals with the layout of the others."""
    layout = next(_layout(part) for part in parts if not isinstance(part, Diagonal))
    found: list[CorrectedKronecker | tuple[MatrixLayout, Diagonal]] = []
    for part in parts:
        if isinstance(part, Diagonal):
            found.append((layout, part))
        else:
            found += [_eigenform(each) for each in (part.parts if isinstance(part, KroneckerSum) else (part,))]
    return found


def _diagonal_in(basis: EigenPart, term: CorrectedKronecker | tuple[MatrixLayout, Diagonal]) -> Tensor:
    """The diagonal of a term in a basis Q: with Q'^T the term's own, (Q_G^T Q'_G)^2 L (Q'_A^T Q_A)^2."""
    if isinstance(term, tuple):
        matrix = term[0].gather(term[1].values)[..., basis.part]
        matrix = matrix if basis.row_vectors is None else basis.row_vectors.square().mT @ matrix
        return matrix if basis.col_vectors is None else matrix @ basis.col_vectors.square()
    found = torch.zeros_like(basis.values)
    rows = _squared_cosines(basis.row_vectors, term.row_vectors)
    for columns in term.columns:
        start, stop = max(basis.part.start, columns.start), min(basis.part.stop, columns.part.stop)
        if start >= stop:
            continue
        ours, theirs = (slice(start - at, stop - at) for at in (basis.part.start, columns.start))
        values = columns.values if rows is None else rows @ columns.values
        if basis.col_vectors is None and columns.vectors is None:
            found[..., ours] += values[..., theirs]
            continue
        own = None if columns.vectors is None else columns.vectors[:, theirs]
        to = None if basis.col_vectors is None else basis.col_vectors[:, ours]
        cols = _squared_cosines(to, own)
        assert cols is not None
        values = values if own is not None else values[..., theirs]
        if to is None:
            found[..., ours] += values @ cols.mT
        else:
            found += values @ cols.mT
    return found


def _squared_cosines(ours: Tensor | None, theirs: Tensor | None) -> Tensor | None:
    """(Q^T Q')^2 for two bases with vectors as columns; None stands for unit vectors, and for the identity."""
    if ours is None and theirs is None:
        return None
    if ours is None:
        assert theirs is not None
        return theirs.square()
    return (ours.mT if theirs is None else ours.mT @ theirs).square()


def _inner(
    a: CorrectedKronecker | tuple[MatrixLayout, Diagonal], b: CorrectedKronecker | tuple[MatrixLayout, Diagonal]
) -> float:
    """The inner product tr(A B) of two terms."""
    if isinstance(a, tuple):
        return float((a[1].values.double() * _diagonal(b).double()).sum())
    parts = a.parts[: len(a.columns)]
    return sum(float((part.values.double() * _diagonal_in(part, b).double()).sum()) for part in parts)


def _diagonal(term: CorrectedKronecker | tuple[MatrixLayout, Diagonal]) -> Tensor:
    return (term[1] if isinstance(term, tuple) else term).diagonal()


def merged_factors(parts: Sequence[Kronecker]) -> Kronecker:
    """The product G (x) A with the partial traces of the sum of the parts, which add the factors by their share.

    With w_t = tr(G_t) tr(A_t), the trace of a part: A = sum_t tr(G_t) A_t and G = sum_t tr(A_t) G_t / sum_t w_t. The
    trace of the product over the outputs is that of the sum, and over the inputs as well; no other product has both. It
    does not matter how a scale is divided between the factors of a part, nor in which order parts are merged. Of
    several groups (grouped convolution) each is merged on its own.
    """
    if len(parts) == 1:
        return parts[0]
    factors = [part.factors for part in parts]
    traces = [(diagonal_of(cols).sum(1), diagonal_of(rows).sum(1)) for cols, rows in factors]
    whole = reduce(torch.add, (a * g for a, g in traces))
    whole = torch.where(whole > 0, whole, 1.0)
    cols = reduce(_plus, (_times(factor[0], trace[1]) for factor, trace in zip(factors, traces, strict=True)))
    rows = reduce(_plus, (_times(factor[1], trace[0] / whole) for factor, trace in zip(factors, traces, strict=True)))
    return replace(parts[0], terms=(Term(cols, rows, 1.0),), multiple=None)


def _times(factor: Tensor, scale: Float[Tensor, " groups"]) -> Tensor:
    return factor * scale.reshape(-1, *[1] * (factor.dim() - 1))


def _plus(a: Tensor, b: Tensor) -> Tensor:
    if a.dim() != b.dim():
        a, b = (each if each.dim() == 3 else torch.diag_embed(each) for each in (a, b))
    return a + b
