"""Weights of `kfra`: input factors from the data, output factors from the expected matrix at the layer's output.

A use of a weight has entry (t, k, o) of its output at place[t, k, o] of the flattened output of a data point, so that

    expand   G_k[o, o'] = sum_t  G^[(t, k, o), (t, k, o')]          reduce   the sum over all pairs t, t'

and N times that is the sum over data which `kflr` would have. Uses of one weight are further positions.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NoReturn

import torch
from torch import Tensor

from lapwing.errors import UnsupportedOperationError
from lapwing.estimate.accumulators import Matrix
from lapwing.estimate.kronecker import KroneckerOptions, _is_matrix, _upright, matrix_block, name_of
from lapwing.estimate.propagated.recursion.plan import TapePlan
from lapwing.estimate.propagated.recursion.refusal import ALTERNATIVES, refuse
from lapwing.estimate.propagated.recursion.sample_axes import Place, TapedBatch
from lapwing.estimate.propagated.recursion.uses import without_bias
from lapwing.linalg import LookupRows, OuterRows, Piece
from lapwing.linalg.budget import chunks
from lapwing.linalg.rows import connected
from lapwing.tangent.samples import SampleAxis
from lapwing.tangent.uses import Contraction, Lookup
from lapwing.tape.nodes import Value


@dataclass
class WeightUse:
    """One use of a weight: the number of its node, its output, and where entry (t, k, o) of it lies."""

    number: int
    out: Value
    use: Contraction | Lookup
    axis: int
    structure: TapePlan
    seen: Tensor | None = None
    """For a table with padding: how often each position held something else."""

    @property
    def home(self) -> Place:
        return self.structure.frame.place[self.out]

    def piece(self, use: Contraction | Lookup, batch: int) -> OuterRows | LookupRows:
        """The rows of a batch without any row: the side of the inputs."""
        like = self.structure.frame.like
        zero = like.expand(1, *self.home.batched(batch))
        (piece, *_) = use.pieces(zero, self._samples(use, batch), like.dtype, _no_derived)
        if not isinstance(piece, (OuterRows, LookupRows)):
            _no_derived()
        return replace(piece, left=piece.left[:0])

    def watched(self, batch: TapedBatch) -> OuterRows | LookupRows:
        use = self.structure.frame.sources.use(batch.tape.nodes[self.number])
        assert isinstance(use, (Contraction, Lookup))
        if isinstance(use, Contraction) and isinstance(self.use, Contraction) and self.use.bias is None:
            use = without_bias(use)
        piece = self.piece(use, batch.size)
        if isinstance(piece, LookupRows) and piece.padding is not None:
            seen = (piece.index != piece.padding).sum(0)
            self.seen = seen if self.seen is None else self.seen + seen
        return piece

    def _samples(self, use: Contraction | Lookup, batch: int) -> SampleAxis:
        self.home.check(batch, use.operation)
        size = self.home.shape[self.home.axis] if self.home.folded and self.home.axis is not None else 1
        return SampleAxis(self.axis, size, batch, 1)

    def places(self) -> Tensor:
        """[T, K, O]"""
        like = self.structure.frame.like
        index = torch.arange(self.home.size, device=like.device).reshape(1, *self.home.shape)
        split = self._samples(self.use, 1).split(self.use.positions(index), lead=1, features=self.use.features)[0, 0]
        return split if split.dim() == 3 else split.unsqueeze(1)


def _no_derived(*_: object) -> NoReturn:
    raise UnsupportedOperationError(
        "a weight is made from parameters by another operation before it meets the data, so that its curvature is no "
        f"Kronecker product. {ALTERNATIVES}"
    )


@dataclass
class Weight:
    """A block: Kronecker factors of one weight, with all its uses."""

    block: Matrix
    members: list[WeightUse]
    budget: int
    roles: dict[Value, str] = field(default_factory=dict)

    @property
    def joint(self) -> bool:
        """Whether what lies between its uses counts: a reduced sum runs over the positions of all of them."""
        return self.block.reduce and len(self.members) > 1

    def watch(self, batch: TapedBatch) -> None:
        pieces: list[Piece] = [member.watched(batch) for member in self.members]
        for member, piece in zip(self.members, pieces, strict=True):
            role = piece.role(self.block.layout)
            if role is None or self.roles.setdefault(member.out, role) != role:
                raise refuse(member.use.operation, "it uses another part of its weight than in the first batch")
        self.block.add(pieces, first=True)

    def arrived(self, first: WeightUse, second: WeightUse, G: Tensor, count: int) -> None:
        """Adds N times what a pair of uses (usually one use and itself) has at the positions that share the weight."""
        role = self.roles[first.out]
        if self.roles[second.out] != role:
            return
        rows, cols = first.places(), second.places()
        grads = self.block.roles[role].grads
        if self.block.reduce and role != "lookup":
            grads.add_sum(count * _all_pairs(G, rows, cols))
        elif first is second:
            shares = torch.full((len(rows),), float(count)) if first.seen is None else first.seen
            grads.add_sum(_same_position(G, rows, shares.to(G), self.budget))


def _same_position(G: Tensor, place: Tensor, shares: Tensor, budget: int) -> Tensor:
    """sum_t shares[t] G[(t, k, o), (t, k, o')], [K, O, O]."""
    positions, groups, rows = place.shape
    if rows == len(G) and torch.equal(place.flatten(), torch.arange(rows, device=place.device)):
        return shares * G.unsqueeze(0)  # no position and no group but one
    total = G.new_zeros(groups, rows, rows)
    for part in chunks(positions, 4 * groups * rows**2 * G.element_size(), budget):
        at = place[part]
        total += torch.einsum("t k o p, t -> k o p", G[at[..., :, None], at[..., None, :]], shares[part])
    return total


def _all_pairs(G: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
    """sum over t, t' of G[(t, k, o), (t', k, o')], [K, O, O]."""
    found = []
    for k in range(rows.shape[1]):
        left = sum((G[at] for at in rows[1:, k]), G[rows[0, k]])  # [O, d]
        found.append(sum((left[:, at] for at in cols[1:, k]), left[:, cols[0, k]]))
    return torch.stack(found)


# -- which uses form a block ----------------------------------------------------------------------------------------


def members(structure: TapePlan) -> list[WeightUse]:
    found = []
    for number, use in sorted(structure.uses.items()):
        (out,) = structure.tape.nodes[number].outs
        assert out is not None
        home = structure.frame.place[out]
        if home.axis is None:
            raise refuse(use.operation, "its weight meets no data")
        one, two = (use.positions(torch.empty(1, *shape, device="meta")) for shape in (home.shape, home.batched(2)))
        axis = next(i for i, (a, b) in enumerate(zip(one.shape, two.shape, strict=True)) if a != b) - 1
        found.append(WeightUse(number, out, use, axis, structure))
    return found


def biases_apart(structure: TapePlan) -> set[int]:
    """Uses whose bias cannot be a column of the weight's matrix: others use it too, or the weight has several."""
    found = [(member, member.piece(member.use, 1)) for member in members(structure)]
    others = _read_otherwise(structure)
    starts = structure.tangent.space.whole.starts
    elsewhere = {starts[name] for name in others}
    apart = set()
    for _, group in connected([piece for _, piece in found]):
        inside = [(member, piece) for member, piece in found if any(piece is other for other in group)]
        mixed = not _is_matrix(group)
        for member, piece in inside:
            bias = piece.layout.bias
            if bias is not None and (mixed or bias in elsewhere):
                apart.add(member.number)
    return apart


def _read_otherwise(structure: TapePlan) -> set[str]:
    return {v.parameter for step in structure.steps.values() for v in step.inputs if v.parameter is not None}


def weights(structure: TapePlan, options: KroneckerOptions) -> list[Weight]:
    """The blocks of all weights."""
    tangent = structure.tangent
    found = [(member, member.piece(member.use, 1)) for member in members(structure)]
    blocks = []
    for segments, group in connected([piece for _, piece in found]):
        name = name_of(segments, tangent.space)
        if not _is_matrix(group) or name in _read_otherwise(structure):
            raise UnsupportedOperationError(
                f"parameter '{name}' is used by operations of different kinds, so that its curvature is no Kronecker "
                f"product; expected a weight, or a weight and its transpose. {ALTERNATIVES}"
            )
        block = matrix_block(segments, _upright(group), options, tangent)
        inside = [member for member, piece in found if any(piece is other for other in group)]
        blocks.append(Weight(block, inside, tangent.budget))
    return blocks
