"""propagated_diagonal: variances of the outputs carried back through squared Jacobians; linear in the outputs.

The diagonal of M_l = J_l^T M_{l+1} J_l is propagated, and its off-diagonal entries are dropped at every operation (the
"approximate diagonal" of the Laplacian autoencoder, appendix E.4.1):

    m_in[i] = sum_o J[o, i]^2 m_out[o],        diag(H_w) = sum_n sum_o J_w[o, w]^2 m_out[n, o]

Exact where those entries vanish: a last layer, and below it networks whose units do not share what is above them. Cost:
one forward pass and one pass back, whatever the number of outputs. Memory: that of a training step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.estimate.cotangents import Cotangents, exact
from lapwing.estimate.data_pass import Batches, check_independent, named, numbered, observe, pair
from lapwing.likelihoods import Likelihood
from lapwing.linalg import Diagonal
from lapwing.tangent import Tangent
from lapwing.tape.nodes import Node, Value
from lapwing.tape.rules.kinds import propagate
from lapwing.tape.tape import Tape, record


@torch.inference_mode(False)
def propagated_diagonal(
    tangent: Tangent,
    likelihood: Likelihood,
    batches: Batches,
    *,
    cotangents: Cotangents = exact,
    generator: torch.Generator | None = None,
) -> Diagonal:
    """An approximate diagonal of the GGN or Fisher, whose cost does not grow with the number of outputs."""
    space = tangent.space
    tangent = replace(tangent, differentiable=False) if tangent.differentiable else tangent
    total = torch.zeros(space.total, dtype=space.dtype, device=space.device)
    for tape, m in taped(tangent, likelihood, batches, cotangents, generator):
        add_squares(tape, m, tangent, total)
    return Diagonal(space.restrict(total))


def taped(
    tangent: Tangent,
    likelihood: Likelihood,
    batches: Batches,
    cotangents: Cotangents,
    generator: torch.Generator | None,
) -> Iterator[tuple[Tape, Tensor]]:
    """(tape, variances at the outputs) of every batch, checked; errors name the batch."""
    for number, batch in numbered(batches):
        with named(number):
            x, y = pair(batch)
            if number == 0:
                check_independent(tangent, x)
            tape = record(tangent, x)
            value = tape.value.to(tangent.space.dtype)
            observe(batches, likelihood, value, y)
            m = variances(likelihood, value, y, cotangents, generator, tangent.budget)
        yield tape, m.detach()


@torch.no_grad()
def variances(
    likelihood: Likelihood,
    value: Float[Tensor, "batch *out"],
    y: Tensor,
    cotangents: Cotangents,
    generator: torch.Generator | None,
    budget: int,
) -> Float[Tensor, "batch *out"]:
    """The diagonal of the output Hessian; for other cotangents, the sum of their squares."""
    if cotangents is exact:
        return likelihood.hessian_diagonal(value, y)
    columns = cotangents(likelihood, value, y, generator)
    step = max(1, budget // 4 // max(1, 2 * value.numel() * value.element_size()))
    return torch.stack([chunk.square().sum(0) for chunk in columns.chunked(step)]).sum(0)


@torch.no_grad()
def add_squares(tape: Tape, m: Tensor, tangent: Tangent, total: Float[Tensor, " params"]) -> None:
    """Walks the tape backwards; what reaches a parameter is added to its place in `total`."""
    if tape.output is not None:
        held = walk(tape.nodes, {tape.output: m})
        collect(tape, held, tangent, total)


def walk(nodes: Sequence[Node], held: dict[Value, Tensor]) -> dict[Value, Tensor]:
    """Variances of values, carried back through all nodes; what is left belongs to parameters."""
    for node in reversed(nodes):
        given = [None if out is None else held.pop(out, None) for out in node.outs]
        if all(each is None for each in given):
            continue
        for value, share in propagate(node, given):
            held[value] = held[value] + share if value in held else share
    return held


def collect(tape: Tape, held: dict[Value, Tensor], tangent: Tangent, total: Float[Tensor, " params"]) -> None:
    """Adds the variances of parameters to their places in `total`."""
    starts = tangent.space.whole.starts
    for name, value in tape.parameters.items():
        if value in held:
            total[starts[name] : starts[name] + value.shape.numel()] += held[value].flatten().to(total.dtype)
