"""Sums of one block over the data: Kronecker factors of a weight, or an exact dense or diagonal block of a vector."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from lapwing.estimate.exact_diagonal import SquareSum
from lapwing.estimate.symmetric_sums import DiagonalSum, GramSum, SymmetricSum, factor_sum, merged, over_positions
from lapwing.linalg import (
    Curvature,
    Dense,
    Diagonal,
    Kronecker,
    LookupRows,
    MatrixLayout,
    OuterRows,
    Piece,
    Segments,
    Term,
)
from lapwing.linalg.budget import CACHE, DEFAULT_BUDGET, chunks
from lapwing.linalg.kronecker.factors import diagonal_of
from lapwing.linalg.rows import assemble


class Accumulator(ABC):
    """A block in the making, over the entries `segments` of the flat vector."""

    segments: Segments
    reason: str = ""
    """Why a block is exact that others have factors for."""

    @property
    def used(self) -> bool:
        """Whether there is a block to speak of: factors have not even a form before the first rows."""
        return True

    @abstractmethod
    def add(self, pieces: list[Piece], first: bool) -> None:
        """Takes the rows of a chunk of cotangents, in flat coordinates; `first` marks the first chunk of a batch."""

    @abstractmethod
    def curvature(self) -> Curvature:
        """The block in local coordinates."""


@dataclass
class Known(Accumulator):
    """A block that was found before; the rows of another pass change nothing."""

    segments: Segments
    found: Curvature

    def add(self, pieces: list[Piece], first: bool) -> None:
        pass

    def curvature(self) -> Curvature:
        return self.found


@dataclass
class DenseVector(Accumulator):
    segments: Segments
    total: SymmetricSum

    def add(self, pieces: list[Piece], first: bool) -> None:
        self.total.add([piece.moved(self.segments) for piece in pieces])

    def curvature(self) -> Dense:
        return Dense(self.total.matrix())


@dataclass
class DiagonalVector(Accumulator):
    segments: Segments
    total: SquareSum

    def add(self, pieces: list[Piece], first: bool) -> None:
        self.total.add([piece.moved(self.segments) for piece in pieces])

    def curvature(self) -> Diagonal:
        return Diagonal(self.total.vector())


@dataclass
class Sums:
    """Factor sums of one role: the input side, the pulled-back side, and the number of positions.

    For a lookup the input side is the count of each token, a diagonal.
    """

    inputs: GramSum | DiagonalSum | Tensor
    grads: GramSum | DiagonalSum
    count: float = 0.0


@dataclass
class Matrix(Accumulator):
    """Kronecker factors of one weight (and its bias), one pair of sums per role."""

    segments: Segments
    layout: MatrixLayout
    reduce: bool
    joint_bias: bool
    factored_damping: bool | str
    wide_limit: int
    budget: int = DEFAULT_BUDGET
    roles: dict[str, Sums] = field(default_factory=dict)

    @property
    def used(self) -> bool:
        return bool(self.roles)

    def add(self, pieces: list[Piece], first: bool) -> None:
        by_role: dict[str | None, list[Piece]] = {}
        for piece in pieces:
            by_role.setdefault(piece.role(self.layout), []).append(piece)
        if None in by_role:
            self._add_formed(pieces)
            return
        for role, members in by_role.items():
            assert role is not None
            if role == "lookup":
                self._add_lookup(members, first)
            else:
                self._add_outer(role, members, first)

    def _add_lookup(self, members: list[Piece], first: bool) -> None:
        for piece in members:
            assert isinstance(piece, LookupRows)
            sums = self._sums("lookup", piece.left, None, self.layout.cols)
            sums.grads.add(merged(piece.left).unsqueeze(2))
            if first:
                tokens = piece.index.flatten()
                tokens = tokens if piece.padding is None else tokens[tokens != piece.padding]
                assert isinstance(sums.inputs, Tensor)
                sums.inputs[0].index_add_(0, tokens, torch.ones_like(tokens, dtype=sums.inputs.dtype))
                sums.count += len(tokens)

    def _add_outer(self, role: str, members: list[Piece], first: bool) -> None:
        """Uses in one role are further positions: left [R, n, t, k, o], and right [n, t, k, i] for the first chunk."""
        outers = [piece for piece in members if isinstance(piece, OuterRows)]
        width = self.layout.width if role == "upright" else self.layout.rows
        left = outers[0].left if len(outers) == 1 else torch.cat([piece.left for piece in outers], dim=2)
        reduced = self.reduce and left.shape[2] > 1
        left = over_positions(left) if reduced else left
        sums = self._sums(role, left, width, left.shape[-1])
        sums.grads.add(merged(left))
        if first:
            assert not isinstance(sums.inputs, Tensor)
            alone = len(outers) == 1 and not reduced and outers[0].layout.width == width
            if alone and isinstance(sums.inputs, GramSum):
                parts = outers[0].right_products(self.budget)
                if parts is not None:
                    sums.inputs.add_parts(parts)
                    sums.count += outers[0].shape[1] * outers[0].shared
                    return
            for right in self._rights(outers, width):
                right = right.mean(1, keepdim=True) if reduced else right
                sums.inputs.add(right)
                sums.count += right.shape[0] * right.shape[1]

    def _rights(self, outers: list[OuterRows], width: int) -> Iterator[Tensor]:
        """Inputs of all uses, those of a single one a few data points at a time: patches that stay in a cache."""
        if len(outers) == 1:
            for right in outers[0].rights(min(CACHE, self.budget)):
                yield _wide(right, width)
        else:  # a use without the bias has 0 where the others have 1
            yield torch.cat([_wide(piece.right, width) for piece in outers], dim=1)

    def _add_formed(self, pieces: list[Piece]) -> None:
        """Rows that are no products: as matrices M, one more role with sum M M^T and sum M^T M (module `kronecker`)."""
        layout, local = self.layout.moved(self.segments), [piece.moved(self.segments) for piece in pieces]
        count, batch = pieces[0].shape
        for points in chunks(batch, 4 * 8 * count * self.segments.size, self.budget):
            matrix = layout.gather(assemble(local, self.segments.size, points)).flatten(0, 1)  # [m, k, o, i]
            sums = self._sums("formed", matrix, layout.width, layout.rows)
            assert not isinstance(sums.inputs, Tensor)
            sums.inputs.add(matrix.transpose(1, 2))
            sums.grads.add(matrix.permute(0, 3, 1, 2))

    def _sums(self, role: str, like: Tensor, inputs: int | None, grads: int) -> Sums:
        """The sums of a role, made when first asked for; `inputs` None stands for token counts."""
        if role not in self.roles:
            groups, limit = self.layout.groups, self.wide_limit
            grad_side = factor_sum(groups, grads, like, limit)
            if inputs is None:
                self.roles[role] = Sums(like.new_zeros(groups, self.layout.rows), grad_side)
            else:
                self.roles[role] = Sums(factor_sum(groups, inputs, like, limit), grad_side)
        return self.roles[role]

    def curvature(self) -> Kronecker:
        terms = tuple(self._term(role, self.roles[role]) for role in sorted(self.roles))
        return Kronecker(self.layout.moved(self.segments), terms, self.joint_bias, self.factored_damping)

    def _term(self, role: str, sums: Sums) -> Term:
        inputs = sums.inputs if isinstance(sums.inputs, Tensor) else sums.inputs.matrix()
        grads = sums.grads.matrix()
        if role == "upright":
            return Term(inputs, grads, sums.count, role)
        if role == "formed":
            return Term(inputs, grads, diagonal_of(grads).sum(1).double(), role)
        extra = self.layout.width - grads.shape[-1]  # this role does not use the bias
        return Term(F.pad(grads, (0, extra) * (grads.dim() - 1)), inputs, sums.count, role)


def _wide(values: Tensor, width: int) -> Tensor:
    return values if values.shape[-1] == width else F.pad(values, (0, width - values.shape[-1]))
