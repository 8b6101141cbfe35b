"""The way back of `kfra`: expected matrices between all values that are alive on a walk, from outputs to parameters.

`JointCurvature` holds G[u, v] [d_u, d_v] for every pair of live values. With M all of them and T_n the Jacobian of one
step (the identity on values that the operation does not touch), a step is M <- E[T_n^T M T_n]. It keeps M positive
semi-definite, and y = x + f(x) keeps its cross terms: between an operation and what runs beside it the mean Jacobian
acts. A chain has one live value; memory O(d^2) per pair.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from lapwing.estimate.propagated.recursion.steps import Step
from lapwing.tape.nodes import Value


@dataclass
class JointCurvature:
    """Blocks of a symmetric matrix over live values, each pair once."""

    live: list[Value]
    blocks: dict[tuple[Value, Value], Tensor]

    def block(self, u: Value, v: Value) -> Tensor:
        return self.blocks[u, v] if (u, v) in self.blocks else self.blocks[v, u].mT

    def back(self, step: Step, outs: Sequence[Value], kept: Collection[Value], count: int) -> JointCurvature:
        """M after a step; `kept` are outputs that stay live although nothing more is passed on from them."""
        inputs = step.inputs
        beside = [v for v in self.live if v not in outs or v in kept]
        first = {z: step.mean({y: self.block(z, y) for y in outs}, count) for z in beside} if inputs else {}
        second = step.second(self.block, outs, count) if inputs else {}
        live = beside + [v for v in inputs if v not in beside]
        number = {v: i for i, v in enumerate(inputs)}
        old = set(beside)
        blocks: dict[tuple[Value, Value], Tensor] = {}
        for at, u in enumerate(live):
            for v in live[at:]:
                shares = []
                if u in old and v in old:
                    shares.append(self.block(u, v))
                if u in old and v in number:
                    shares.append(first[u][number[v]])
                if u in number and v in old:
                    shares.append(first[v][number[u]].mT)
                if u in number and v in number:
                    i, j = number[u], number[v]
                    shares.append(second[i, j] if i <= j else second[j, i].mT)
                blocks[u, v] = shares[0] if len(shares) == 1 else sum(shares[1:], shares[0])
        return JointCurvature(live, blocks)

    def without(self, gone: Collection[Value]) -> JointCurvature:
        live = [v for v in self.live if v not in gone]
        return JointCurvature(live, {pair: G for pair, G in self.blocks.items() if not {*pair} & {*gone}})


def walk_back(
    start: Value,
    G: Tensor,
    steps: Iterable[tuple[Step, Sequence[Value]]],
    count: int,
    kept: Collection[Value],
    arrived: Callable[[Value, Tensor], None],
) -> JointCurvature:
    """Applies steps, each with its outputs, last to first; `arrived` is told G[v, v] of a value when it is complete.

    Parameters are complete once every step that reads them was taken, and leave the walk then.
    """
    order = list(steps)
    readers: dict[Value, int] = {}
    for step, _ in order:
        for value in step.inputs:
            readers[value] = readers.get(value, 0) + 1
    joint = JointCurvature([start], {(start, start): G})
    for step, candidates in reversed(order):
        outs = [v for v in candidates if v in joint.live]
        for out in outs:
            arrived(out, joint.block(out, out))
        if outs:
            joint = joint.back(step, outs, kept, count)
        for value in step.inputs:
            readers[value] -= 1
        done = [v for v in step.inputs if v.parameter is not None and not readers[v] and v in joint.live]
        for value in done:
            arrived(value, joint.block(value, value))
        joint = joint.without(done)
    return joint
