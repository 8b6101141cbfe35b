"""Cut: a value on the tape that everything from the data to the outputs passes through, a bottleneck for one.

From a cut on, columns of its d entries per data point go back by ordinary autograd to the uses of parameters before it:
R cotangents [R, *shape] become factored rows [R, B, ...], one backward pass through the part before the cut for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.graph import GradientEdge

from lapwing.errors import UnsupportedOperationError
from lapwing.linalg.rows import DenseRows, Piece, assemble
from lapwing.tangent.fallback import batched_grad
from lapwing.tangent.model import Linearisation, Tangent
from lapwing.tangent.samples import SampleAxis, candidates
from lapwing.tangent.uses import Use
from lapwing.tape.nodes import Node, Value
from lapwing.tape.tape import Tape, TapeRecorder


def record_both(tangent: Tangent, x: Any) -> tuple[Linearisation, Tape]:
    """One forward pass at the inputs x with both records: uses of parameters, and every operation."""
    with torch.inference_mode(False), torch.enable_grad():
        recorder = TapeRecorder(tangent.parameters, x)
        with recorder:
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

    def gather(self, values: Float[Tensor, "r *shape"]) -> Float[Tensor, "r batch d"]:
        """Entry by entry of each data point."""
        return values.flatten(1)[:, self.entries]

    def spread(self, values: Float[Tensor, "r batch d"]) -> Float[Tensor, "r *shape"]:
        """The other way round."""
        flat = values.new_zeros(len(values), self.value.shape.numel())
        return flat.scatter_(1, self.entries.flatten().expand(len(values), -1), values.flatten(1)).reshape(
            -1, *self.value.shape
        )

    def matrix(
        self, linearisation: Linearisation, hessian: Callable[[Tensor], Tensor], step: int
    ) -> Float[Tensor, "batch d d"]:
        """J^T H J of the outputs in the cut, with `hessian` the product of H and a vector: about four passes a column.

        J v is the derivative of J^T u, which is linear in u, along v; `step` columns at a time.
        """
        output, dtype = linearisation.output, linearisation.space.dtype
        unit = torch.eye(self.width, dtype=dtype, device=output.device).unsqueeze(1).expand(-1, linearisation.batch, -1)
        parts = []
        try:
            with torch.enable_grad():
                u = torch.zeros_like(output, requires_grad=True)
                (pulled,) = torch.autograd.grad([output], [self.value.edge], [u], create_graph=True)
            for start in range(0, self.width, step):
                along = self.spread(unit[start : start + step]).to(pulled.dtype)
                (pushed,) = batched_grad(pulled, [u], along) if pulled.requires_grad else [None]
                if pushed is None:  # the outputs do not depend on the cut
                    return unit.new_zeros(linearisation.batch, self.width, self.width)
                middle = torch.stack([hessian(v.to(dtype)) for v in pushed])
                (back,) = batched_grad(output, [self.value.edge], middle.to(output.dtype))
                assert back is not None
                parts.append(self.gather(back).to(dtype))
        except RuntimeError as error:
            raise UnsupportedOperationError(
                f"an operation between the bottleneck and the outputs has no second derivative ({error}), which the "
                "exact matrix at the bottleneck needs; expected plain operations. Leave exact_bottleneck out."
            ) from error
        found = torch.cat(parts).permute(1, 0, 2)
        return (found + found.mT) / 2

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
