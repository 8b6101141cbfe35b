"""kfra: one Kronecker product G (x) A per layer, G by recursion on expected matrices; for many outputs.

Recursive mean propagation (Botev's thesis, 4.7): one matrix G^ [d, d] per value, d being the entries of one data point
(channels times positions), starts as the mean Hessian at the outputs and goes back one operation at a time,

    G^_L = E_n[H_n],        G^_in = E_n[J_n^T G^_out J_n].

Exact for one data point, and for networks that are linear between data and outputs; else an approximation, which
forgets how Jacobians of different layers vary together. The cost does not grow with the number of outputs: one forward
pass, statistics of activations (as much work as input factors), and one walk back over matrices at the end.
Expectations run over the whole data set, so that any split into batches gives the same result.

Memory: d^2 for each activation, and for each pair of branches that run side by side.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lapwing.errors import UnsupportedOperationError
from lapwing.estimate.accumulators import Accumulator, Known
from lapwing.estimate.cotangents import Cotangents, exact
from lapwing.estimate.data_pass import Batches, check_independent, named, numbered, observe, pair
from lapwing.estimate.kronecker import KroneckerOptions, check_whole, collect
from lapwing.estimate.propagated.recursion.layers import Weight, biases_apart, weights
from lapwing.estimate.propagated.recursion.plan import TapePlan, structure
from lapwing.estimate.propagated.recursion.pool import MaxPool
from lapwing.estimate.propagated.recursion.refusal import ALTERNATIVES
from lapwing.estimate.propagated.recursion.steps import probe
from lapwing.estimate.propagated.recursion.walk import walk_back
from lapwing.estimate.symmetric_sums import GramSum
from lapwing.likelihoods import Likelihood
from lapwing.linalg import Blocks, Dense, Diagonal, Segments
from lapwing.linalg.budget import chunks
from lapwing.tangent import Tangent
from lapwing.tape.nodes import Value
from lapwing.tape.tape import record


def kfra(
    tangent: Tangent,
    likelihood: Likelihood,
    batches: Batches,
    *,
    cotangents: Cotangents = exact,
    generator: torch.Generator | None = None,
    **options: str | int | bool,
) -> Blocks:
    """Kronecker factors with the output factor propagated in expectation: its cost does not depend on the outputs."""
    settings = KroneckerOptions.of(options)
    check_whole(tangent.space)
    if tangent.differentiable:  # a curvature is no function of the inputs
        tangent = replace(tangent, differentiable=False)
    found: _Pass | None = None
    for number, batch in numbered(batches):
        with named(number), torch.inference_mode(False):
            x, y = pair(batch)
            if found is None:
                found = _Pass.begin(tangent, x, settings)
            found.watch(x, y, likelihood, batches, cotangents, generator)
    assert found is not None, "a pass without a batch is refused"
    with torch.inference_mode(False):
        return found.end()


@dataclass
class _Pass:
    """What one pass over the data gathers, and the walk back at its end."""

    structure: TapePlan
    weights: list[Weight]
    options: KroneckerOptions
    output: Tensor
    """sum_n H_n [D, D]; [D] while it is diagonal."""
    count: int = 0
    blocks: dict[Segments, Accumulator] = field(default_factory=dict)

    @staticmethod
    def begin(tangent: Tangent, x: Any, options: KroneckerOptions) -> _Pass:
        check_independent(tangent, x)
        with torch.no_grad():
            found = structure(tangent, x, biases_apart)
            _check_sizes(found)
            size = found.tape.value.numel()
            return _Pass(found, weights(found, options), options, found.frame.like.new_zeros(size))

    def watch(
        self,
        x: Any,
        y: Any,
        likelihood: Likelihood,
        batches: Batches,
        cotangents: Cotangents,
        generator: torch.Generator | None,
    ) -> None:
        tangent = self.structure.tangent
        tape = record(tangent, x)
        value = tape.value.to(tangent.space.dtype)
        observe(batches, likelihood, value, y)
        with torch.no_grad():
            batch = self.structure.batch(tape, len(value))
            for number, step in self.structure.steps.items():
                step.watch(tape.nodes[number], batch)
            for weight in self.weights:
                weight.watch(batch)
            H = output_sum(likelihood, value, y, cotangents, generator, tangent.budget).to(self.output)
        if H.dim() != self.output.dim():
            H, self.output = (each.diag() if each.dim() == 1 else each for each in (H, self.output))
        self.output = self.output + H
        self.count += len(value)

    @torch.no_grad()
    def end(self) -> Blocks:
        tape, space = self.structure.tape, self.structure.tangent.space
        if tape.output is not None:
            G = self.output / self.count
            joint = [weight for weight in self.weights if weight.joint]
            kept = {member.out for weight in joint for member in weight.members}
            owner = {member.out: (weight, member) for weight in self.weights for member in weight.members}

            def arrived(value: Value, G: Tensor) -> None:
                if value.parameter is not None:
                    self._vector(value.parameter, G)
                elif value in owner:
                    weight, member = owner[value]
                    weight.arrived(member, member, G, self.count)

            steps = [
                (step, [v for v in tape.nodes[number].outs if v is not None])
                for number, step in sorted(self.structure.steps.items())
            ]
            last = walk_back(tape.output, G.diag() if G.dim() == 1 else G, steps, self.count, kept, arrived)
            for weight in joint:
                for first in weight.members:
                    for second in weight.members:
                        if first is not second and {first.out, second.out} <= {*last.live}:
                            weight.arrived(first, second, last.block(first.out, second.out), self.count)
        self.blocks |= {weight.block.segments: weight.block for weight in self.weights}
        return collect(self.blocks, space)

    def _vector(self, name: str, G: Tensor) -> None:
        """A block of its own: dense, or its diagonal where it has too many entries."""
        start = self.structure.tangent.space.starts[name]
        segments = Segments(((start, start + len(G)),))
        small = len(G) <= self.options.dense_limit
        found = Dense(self.count * G) if small else Diagonal(self.count * G.diagonal())
        self.blocks[segments] = Known(segments, found)


def _check_sizes(found: TapePlan) -> None:
    """One matrix per value on the way back has to fit the budget."""
    like, budget = found.frame.like, found.tangent.budget
    for number, step in sorted(found.steps.items()):
        node = found.tape.nodes[number]
        sizes = [found.frame.place[v].size for v in (*node.outs, *step.inputs) if v is not None]
        d = max(*sizes, step.at.numel() if isinstance(step, MaxPool) else 0)
        if d * d * like.element_size() > budget:
            before = [use for at, use in sorted(found.uses.items()) if at <= number]
            layer = sorted(before[-1].sources[0].names)[0] if before else "the first layer"
            raise UnsupportedOperationError(
                f"kfra needs a matrix of {d} x {d} entries ({d * d * like.element_size() / 2**20:.0f} MiB) for the {d} "
                f"entries per data point of '{node.name}' at or after '{layer}'; expected at most "
                f"{budget / 2**20:.0f} MiB, the budget. {ALTERNATIVES} Or give a larger Tangent.budget."
            )


# -- the outputs ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def output_sum(
    likelihood: Likelihood,
    value: Tensor,
    y: Tensor,
    cotangents: Cotangents,
    generator: torch.Generator | None,
    budget: int,
) -> Tensor:
    """sum_n H_n over the outputs of a data point, flattened: [D, D], or [D] where every H_n is diagonal."""
    size = value[0].numel()
    if cotangents is not exact:
        columns = cotangents(likelihood, value, y, generator)
        total = GramSum(value.new_zeros(1, size, size))
        step = max(1, budget // 4 // max(1, 2 * value.numel() * value.element_size()))
        for chunk in columns.chunked(step):
            total.add(chunk.detach().to(value.dtype).flatten(0, 1).flatten(1)[:, None, None])
        return total.matrix()[0]
    diagonal = likelihood.hessian_diagonal(value, y).detach()
    v = probe(value.numel(), 0, value.device).reshape(value.shape).to(value.dtype)
    along = likelihood.hessian_mv(value, y, v).detach()
    expected = diagonal * v
    rounding = 8 * torch.finfo(value.dtype).eps * expected.abs().max()
    if bool(((along - expected).abs() <= rounding).all()):
        return diagonal.sum(0).flatten()
    total = value.new_zeros(size, size)
    at = likelihood.to_last(torch.arange(size, device=value.device).reshape(1, *value.shape[1:]))
    at = at.reshape(-1, at.shape[-1])  # [positions, C]
    each = 2 * at.shape[1] * size * value.element_size()
    for part in chunks(len(value), each, budget):
        H = likelihood.psd_hessian(value[part], y[part]).detach().sum(0).reshape(len(at), at.shape[1], at.shape[1])
        total[at[:, :, None], at[:, None, :]] += H
    return total
