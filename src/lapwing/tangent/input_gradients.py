"""Gradients with respect to the inputs, and nothing else: what `Tangent(differentiable=True)` gives.

The network runs on private copies of the inputs; its outputs, and whatever is computed from them, pass a gate that
leads back to the inputs alone. The parameters lie behind the gate, so that `backward()` never adds to their `.grad`.
One backward pass through the recorded graph for all tensors that pass together; differentiable once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lapwing.linalg.rows import Piece
from lapwing.tangent.inputs import map_tensors, tensors


@dataclass(frozen=True, eq=False)
class Gate:
    """Inputs that require gradients, and the copies of them that the network saw."""

    inputs: list[Tensor]
    private: list[Tensor]

    def through(self, values: Sequence[Tensor]) -> list[Tensor]:
        """The same values, as functions of the inputs alone."""
        if not any(value.requires_grad for value in values):
            return list(values)
        return list(_Through.apply(values, self.private, *self.inputs))  # pyright: ignore[reportArgumentType]


def gated(x: Any) -> tuple[Any, Gate | None]:
    """The input to run the network on, and the gate that leads back to x; None if x requires no gradient."""
    inputs = [tensor for tensor in tensors(x) if tensor.requires_grad]
    if not inputs:
        return x, None
    private = {id(tensor): tensor.detach().requires_grad_() for tensor in inputs}
    return map_tensors(lambda t: private.get(id(t), t), x), Gate(inputs, [private[id(tensor)] for tensor in inputs])


def through(gate: Gate, pieces: Sequence[Piece]) -> list[Piece]:
    """Rows in factored form, as functions of the inputs alone."""
    held = [piece.factors for piece in pieces]
    let = iter(gate.through([value for fields in held for value in fields.values()]))
    return [replace(piece, **{name: next(let) for name in fields}) for piece, fields in zip(pieces, held, strict=True)]


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Sequence[Tensor], private: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.values, ctx.private = values, private
        ctx.set_materialize_grads(False)
        return tuple(value.detach() for value in values)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        pairs = [(v, g) for v, g in zip(ctx.values, grads, strict=True) if g is not None and v.requires_grad]
        if not pairs:
            return (None, None, *(None for _ in ctx.private))
        values, given = zip(*pairs, strict=True)
        found = torch.autograd.grad(values, ctx.private, given, retain_graph=True, allow_unused=True)
        return (None, None, *found)
