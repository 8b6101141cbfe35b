"""Where the posterior of a table's classes has its mean: not at the trained weights, but where all rows put it.

    theta~    trained weights, which have not seen the rows that were kept apart
    theta*    the mode of the network linearised at theta~, for all rows (`lapwing.evidence.linear_mode`)
    mean      theta~ + t (theta* - theta~), with outputs f(x) + t J(x) (theta* - theta~)

`learnt` gives t (theta* - theta~), a vector [P]. The share t of the way is what rows kept apart make of the way to the
mode of the other rows: where training stops early, the network may not be linear as far as its mode.
Cost: two convex problems, each of some ten passes over the rows with the full matrix, sixty with Kronecker factors.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.laplace import BaseLaplace
from lapwing.laplace.calibration import HeldOut, averaged, gathered, scale
from lapwing.tables.stretch import Pair, batches

WAYS = torch.linspace(0, 1, 21, dtype=torch.float64)
"""Shares of the way to the mode, as likely as each other before rows are looked at."""
TOLERANCE = 1e-3
"""Relative residual of a mode: what is left moves logits by far less than rows do."""
ROWS = 50_000
"""Of more rows to learn from less than a tenth is kept apart, and passes over them are dear: the mean stays."""


def learnt(
    la: BaseLaplace, seen: Pair, apart: Pair, generator: torch.Generator
) -> tuple[Float[Tensor, " params"], float]:
    """t (theta* - theta~), and t, for a posterior that was fitted to the rows `seen` and is then fitted to all rows.

    The rows `apart` choose t and the scale of the covariance, as a posterior of the others only.
    """
    held_out = batches(*apart)
    mode = to_mode(la, seen)
    before, after = gathered(la, held_out), gathered(la, held_out, mode)
    assert before is not None
    assert after is not None
    way = share(before, after)
    scale(la, averaged(replace(after, value=torch.lerp(before.value, after.value, way))))
    rows = torch.cat([seen[0], apart[0]]), torch.cat([seen[1], apart[1]])
    la.fit(batches(*rows), generator=generator)
    return way * to_mode(la, rows), way


def to_mode(la: BaseLaplace, rows: Pair) -> Float[Tensor, " params"]:
    """theta* - theta~ for the rows that the posterior was fitted to."""
    return la.linear_mode(batches(*rows), tolerance=TOLERANCE).offset


def share(before: HeldOut, after: HeldOut) -> float:
    """The share t of the way from outputs `before` to outputs `after`, as targets know it: E[t], with t uniform.

    As for the scale of the covariance (`averaged`): where many shares are about as likely, one in their middle. The
    loss is convex in outputs: half of the way has at least half of what the whole of it gains, at a smaller risk.
    """
    ways = [replace(before, value=torch.lerp(before.value, after.value, t)) for t in WAYS.tolist()]
    return float(torch.stack([way.log_prob(0.0).sum() for way in ways]).softmax(0) @ WAYS)
