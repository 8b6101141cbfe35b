"""sketched: a score of inputs for networks of any size, with the sketches of a Krylov basis in the place of the basis.

Lanczos' method on the GGN finds directions v_1 .. v_k that the data determine; a pass over the data each, and three
vectors [P] at a time. Of every direction S v_i is kept, [rows], and of all k their span Q. The score of an input is
what of its Jacobian lies in no such direction,

    sum over outputs c of |J_c|^2 - |Q^T S J_c|^2,

the variance of the outputs, in units of the prior's, where the data leave kept directions no variance and others all of
it. Memory: 3 P and k rows, whatever P is; a posterior of rank k keeps k P. The error of the sketch is about
sqrt(k / rows) of |J_c|^2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.errors import CurvatureError
from lapwing.estimate.cotangents import Cotangents, exact
from lapwing.estimate.data_pass import Batches, repeated
from lapwing.estimate.data_products import DataProducts
from lapwing.likelihoods import Likelihood
from lapwing.linalg.checks import normal
from lapwing.linalg.sketch import Sketch
from lapwing.tangent import Tangent
from lapwing.tangent.inputs import batch_size, take


@dataclass(frozen=True, eq=False)
class SketchedScore:
    """What of a network's Jacobian at an input the data of a fit do not determine."""

    tangent: Tangent
    sketch: Sketch
    basis: Float[Tensor, "rows k"]
    """Q, orthonormal."""

    @property
    def rank(self) -> int:
        """Directions that are kept."""
        return self.basis.shape[1]

    @torch.no_grad()
    def __call__(self, x: Any) -> Float[Tensor, " batch"]:
        """One score for each input: a backward pass for each of its outputs."""
        found = []
        for number in range(batch_size(x)):
            linear = self.tangent.at(take(x, slice(number, number + 1)))
            total = linear.value.new_zeros(())
            for output in range(linear.outputs):
                unit = torch.zeros_like(linear.value)
                unit.view(-1)[output] = 1
                row = linear.rmv(unit)
                inside = self.sketch(row.unsqueeze(0)) @ self.basis
                total += row.square().sum() - inside.square().sum()
            found.append(total)
        return torch.stack(found)


@torch.no_grad()
def sketched(
    tangent: Tangent,
    likelihood: Likelihood,
    batches: Batches,
    *,
    steps: int = 50,
    rows: int = 10_000,
    cotangents: Cotangents = exact,
    generator: torch.Generator | None = None,
) -> SketchedScore:
    """A score from `steps` + 1 passes over the data; the batches must be there to be gone through as often."""
    if steps < 1 or rows < 4 * steps:
        raise CurvatureError(
            f"steps is {steps} and rows {rows}; expected at least 1 step, and a sketch of at least 4 times as many "
            "rows, without which directions are not told apart."
        )
    space = tangent.space
    seed = 0 if generator is None else int(torch.randint(2**31, (), generator=generator, device=generator.device))
    sketch = Sketch(space.size, rows + rows % 2, seed)
    products = DataProducts(tangent, likelihood, repeated(batches), cotangents)
    like = torch.empty((), dtype=space.dtype, device=space.device)
    # a product first: no part of it lies where the data say nothing
    now = products.mv(normal((1, space.size), like, torch.Generator(space.device).manual_seed(seed)))
    if not bool(now.any()):
        raise CurvatureError("the curvature is zero; expected data that determine some direction of the weights.")
    now, before, length, largest = now.div_(now.norm()), torch.zeros_like(now), 0.0, 0.0
    kept = []
    for _ in range(min(steps, space.size)):
        kept.append(sketch(now).double())
        product = products.mv(now)
        along = float((product * now).sum())
        product.add_(now, alpha=-along).add_(before, alpha=-length)  # in place: no further vector [P]
        length, largest = float(product.norm()), max(largest, abs(along))
        if length <= torch.finfo(space.dtype).eps ** 0.5 * max(largest, abs(along)):
            break  # an invariant space: the data determine nothing else
        before, now = now, product.div_(length)
    left, values, _ = torch.linalg.svd(torch.cat(kept).mT, full_matrices=False)
    independent = values > torch.finfo(space.dtype).eps ** 0.5 * values[0]
    return SketchedScore(tangent, sketch, left[:, independent].to(space.dtype))
