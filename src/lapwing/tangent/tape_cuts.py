"""Cut: a value on the tape that everything from the data to the outputs passes through, a bottleneck for one.

From a cut on, columns of its d entries per data point go back by ordinary autograd to the uses of parameters before it:
R cotangents [R, *shape] become factored rows [R, B, ...], one backward pass through the part before the cut for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lapwing.linalg.rows import DenseRows, Piece, assemble
from lapwing.tangent.fallback import batched_grad
from lapwing.tangent.model import Linearisation, Tangent
from lapwing.tangent.samples import SampleAxis, candidates
from lapwing.tangent.tape import Node, Tape, TapeRecorder, Value
from lapwing.tangent.uses import Use


def record_both(tangent: Tangent, x: Any) -> tuple[Linearisation, Tape]:
    """One forward pass at the inputs x with both records: uses of parameters, and every operation."""
    with TapeRecorder(tangent.parameters, x) as recorder:
        linearisation = tangent.at(x)
    return linearisation, recorder.tape(linearisation.output)


@dataclass(frozen=True, eq=False)
class Cut:
    """A value, the number of the node that made it, and its entries of each data point (B rows of d places)."""

    tape: Tape
    value: Value
    position: int
    entries: Tensor

    @property
    def after(self) -> Sequence[Node]:
        return self.tape.nodes[self.position + 1 :]

    @property
    def before(self) -> Sequence[Node]:
        return self.tape.nodes[: self.position + 1]

    @property
    def width(self) -> int:
        """d, the number of columns that hold any matrix over the entries of one data point."""
        return self.entries.shape[1]

    def columns(self, m: Tensor, part: slice) -> Float[Tensor, "r *shape"]:
        """Column j is sqrt(m) at entry j of every data point, and zero elsewhere."""
        places = self.entries[:, part].T
        root = m.flatten().sqrt()
        spread = root.new_zeros(len(places), root.numel()).scatter_(1, places, root[places])
        return spread.reshape(-1, *m.shape)

    def pull(self, linearisation: Linearisation, columns: Float[Tensor, "r *shape"]) -> list[Piece]:
        """Rows of the parameters that are used before the cut, in the flat coordinates of the space."""
        space, uses = linearisation.space, self._uses(linearisation)
        together = sum(use.shape.numel() for use, _ in uses) < 2**18
        with torch.no_grad():
            grads = batched_grad(
                self.value.edge, [use.edge for use, _ in uses], columns.to(self.value.dtype), together
            ) if uses else []  # fmt: skip
            pieces: list[Piece] = []
            for (use, axis), grad in zip(uses, grads, strict=True):
                if grad is not None:
                    pieces += use.pieces(grad, axis, space.dtype, linearisation._pull_back)
        if space.index is None or not pieces:
            return pieces
        return [DenseRows(0, space.restrict(assemble(pieces, space.total, slice(0, linearisation.batch))))]

    def _uses(self, linearisation: Linearisation) -> list[tuple[Use, SampleAxis]]:
        made = {_key(out.edge) for node in self.before for out in node.outs if out is not None}
        return [(use, axis) for use, axis in linearisation.uses if _key(use.edge) in made]


def _key(edge: GradientEdge) -> tuple[Any, int]:
    return edge.node, edge.output_nr


def find_cut(linearisation: Linearisation, tape: Tape, columns: int, known: Known) -> Cut | None:
    """The cut nearest to the outputs with at most `columns` entries per data point; None where there is none.

    `known` remembers which entries belong to which data point, for batches of one shape.
    """
    batch = linearisation.batch
    for position, value in _bottlenecks(tape):
        size = value.shape.numel()
        if size > columns * batch or size % batch or not value.dtype.is_floating_point:
            continue
        key = tape.signature, position, value.shape, batch
        if key not in known:
            known[key] = _entries(linearisation.output, value, batch)
        entries = known[key]
        if entries is not None:
            return Cut(tape, value, position, entries)
    return None


Known = dict[tuple, Tensor | None]


def _bottlenecks(tape: Tape) -> list[tuple[int, Value]]:
    """Values that all data pass through, from the outputs back."""
    live: set[Value] = set() if tape.output is None else {tape.output}
    found = []
    for position in reversed(range(len(tape.nodes))):
        node = tape.nodes[position]
        made = live.intersection(out for out in node.outs if out is not None)
        if len(live) == len(made) == 1:
            found.append((position, *made))
        live -= made
        for out in made:
            read = node.sources if out.origin is None else [out.origin]
            live.update(value for value in read if not value.derived)
    return found


def _entries(output: Tensor, value: Value, batch: int) -> Tensor | None:
    """Flat indices [B, d] of the entries of each data point: those that its outputs depend on, as a gradient shows.

    A few data points are looked at. None where the entries lie in no regular way, or do not belong to all data.
    """
    places = torch.arange(value.shape.numel(), device=output.device).reshape(value.shape)
    if batch == 1:
        return places.reshape(1, -1)
    weights = torch.cos(torch.arange(output[0].numel(), device=output.device).to(output.dtype)).reshape(output[0].shape)
    seen = {}
    for n in {0, batch // 4, batch // 2, 3 * batch // 4, batch - 1}:
        u = torch.zeros_like(output)
        u[n] = weights
        (grad,) = torch.autograd.grad([output], [value.edge], [u], retain_graph=True, allow_unused=True)
        if grad is not None and bool(grad.any()):
            seen[n] = grad != 0
    if len(seen) < 2:  # a model that goes through its data one by one has parts that all of one point passes through
        return None
    for axis in candidates(value.shape, batch):
        mine = {n: axis.member(value.shape, n).to(output.device) for n in seen}
        if not any(bool((mask & ~mine[n]).any()) for n, mask in seen.items()):
            return axis.split(places, lead=0, features=0).reshape(batch, -1)
    return None
