"""alignment: how nearly a curvature points where the exact one does, as cosines of damped Newton directions.

    approximation   (C~ + damping I)^-1 g      by the structure's own solve
    exact blocks    the same with the GGN cut into one block per layer (module), by conjugate gradients, layer by layer
    full            the same with the whole GGN, by conjugate gradients

The curvature is a sum over the N points of `batches`, and g the gradient of the summed loss. A text that takes means,
mean curvature + (lambda + zeta) I and mean gradient, has the same directions at damping = N (lambda + zeta).

No matrix is formed: a product J^T H J v costs about three backward passes, and those of a layer only reach down to that
layer. One of the approximations preconditions. Memory: the graph of one forward pass over all batches (two of them
while a layer is solved for), so that a subset of the data is what large data sets call for.

>>> import torch
>>> from torch import nn
>>> from lapwing.estimate import diagonal, full
>>> from lapwing.likelihoods import Gaussian
>>> tangent = Tangent(nn.Linear(2, 1, bias=False))
>>> batches = [(torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.tensor([[3.0], [5.0]]))]
>>> found = alignment(
...     tangent, Gaussian(), batches,
...     {"full": full(tangent, Gaussian(), batches), "diagonal": diagonal(tangent, Gaussian(), batches)},
...     damping=1.0, gradient=torch.tensor([1.0, 0.0]),
... )
>>> round(found.with_full["full"].whole, 4)
1.0
>>> round(found.with_full["diagonal"].whole ** 2, 4)        # (1, 0) against (2, -1) / 5, from [[3, 1], [1, 2]]
0.8
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.errors import CurvatureError, DataError, ParameterError
from lapwing.estimate.data_pass import Batches, linearised
from lapwing.estimate.exact_blocks import partition
from lapwing.likelihoods import Likelihood
from lapwing.linalg import Curvature, Precision, Segments, krylov
from lapwing.linalg.blocks import BlocksPrecision
from lapwing.params import ParamSpace
from lapwing.tangent import Linearisation, Tangent

Map = Callable[[Tensor], Tensor]
"""A symmetric matrix as what it does to a flat vector."""


@dataclass(frozen=True)
class Cosines:
    """Cosine similarity of two directions: of the whole vectors, and of their parts in each layer.

    NaN where one of the two is zero, as in a layer that the output does not depend on.
    """

    whole: float
    layers: dict[str, float]


@dataclass(frozen=True)
class Solved:
    """How far conjugate gradients came: |g - (C + damping I) d| / |g|, computed afresh, and the products it took."""

    converged: bool
    residual: float
    iterations: int


@dataclass(frozen=True)
class Alignment:
    """Cosines of every approximation's direction with those of the exact blocks and of the full GGN."""

    layers: tuple[str, ...]
    with_blocks: dict[str, Cosines]
    with_full: dict[str, Cosines]
    blocks_with_full: Cosines
    block_solves: dict[str, Solved]
    full_solve: Solved

    @property
    def converged(self) -> bool:
        """Whether every reference direction reached the tolerance; where not, the cosines are those of rough ones."""
        return self.full_solve.converged and all(solve.converged for solve in self.block_solves.values())

    def rows(self) -> list[dict[str, str | float]]:
        """A table: columns approximation, reference, whole, and one per layer."""
        found = [(name, "exact blocks", cosines) for name, cosines in self.with_blocks.items()]
        found += [(name, "full", cosines) for name, cosines in self.with_full.items()]
        found.append(("exact blocks", "full", self.blocks_with_full))
        return [
            {"approximation": name, "reference": reference, "whole": cosines.whole, **cosines.layers}
            for name, reference, cosines in found
        ]


@torch.no_grad()
def alignment(
    tangent: Tangent,
    likelihood: Likelihood,
    batches: Batches,
    curvatures: Mapping[str, Curvature],
    damping: float | int,
    *,
    gradient: Tensor | None = None,
    preconditioner: str | None = None,
    tolerance: float = 1e-5,
    iterations: int = 500,
) -> Alignment:
    """Cosines of the directions of `curvatures` with the exact ones, at the data of `batches`, which are read once.

    `gradient` is g, the gradient of the summed loss by default; its length plays no role. `preconditioner` names one of
    `curvatures`, the first by default: it changes how many products conjugate gradients take, not what they solve.
    They stop at a residual of `tolerance` |g|, or after `iterations` products, or where rounding allows no better.
    """
    _check(damping, tolerance, iterations)
    space = tangent.space
    precisions = _precisions(curvatures, space, damping)
    if preconditioner is not None and preconditioner not in precisions:
        raise ParameterError(f"no approximation '{preconditioner}' to precondition with; given are {list(precisions)}.")
    chosen = precisions.get(preconditioner if preconditioner is not None else next(iter(precisions), ""))
    data = list(linearised(tangent, likelihood, batches))
    gradient = _gradient(space, likelihood, data) if gradient is None else _checked(gradient, space)
    if not bool(gradient.any()):
        raise DataError(
            "the gradient is zero, which has no direction; expected a point that is no stationary one. Give `gradient`."
        )
    stop = tolerance, iterations
    places = partition(space, "layer")

    product = _product(likelihood, data, damping)
    full, full_solve = conjugate_gradients(product, gradient, _solve(chosen, Segments(((0, space.size),))), *stop)
    blocks, block_solves = torch.zeros_like(gradient), {}
    for layer, place in places.items():
        only = Tangent(tangent.model, _of_layer(space, layer), tangent.budget, evaluate=tangent.evaluate)
        product = _product(likelihood, [(only.at(each.x), y) for each, y in data], damping)
        local, block_solves[layer] = conjugate_gradients(product, place.gather(gradient), _solve(chosen, place), *stop)
        place.scatter(local, blocks)

    directions = {name: precision.solve(gradient) for name, precision in precisions.items()}
    return Alignment(
        layers=tuple(places),
        with_blocks={name: _cosines(direction, blocks, places) for name, direction in directions.items()},
        with_full={name: _cosines(direction, full, places) for name, direction in directions.items()},
        blocks_with_full=_cosines(blocks, full, places),
        block_solves=block_solves,
        full_solve=full_solve,
    )


def conjugate_gradients(
    product: Map, target: Float[Tensor, " params"], precondition: Map, tolerance: float, iterations: int
) -> tuple[Float[Tensor, " params"], Solved]:
    """x with product(x) = target, for a symmetric positive definite matrix, and how well it is solved.

    The residual that the recursion carries drifts from the true one: where it says that all is done, the true one is
    looked at, and the recursion started again from there as long as that helps.
    """
    x, residual = torch.zeros_like(target), target.clone()
    length, used, before = float(target.norm()), 0, math.inf
    if length == 0:
        return x, Solved(True, 0.0, 0)
    while True:
        used = descend(product, x, residual, precondition, tolerance * length, used, iterations)
        residual = target - product(x)
        relative = float(residual.norm()) / length
        # a start that does not halve the true residual has met the rounding of the products
        if relative <= tolerance or used >= iterations or not relative < before / 2:
            return x, Solved(relative <= tolerance, relative, used)
        before = relative


def descend(
    product: Map, x: Tensor, residual: Tensor, precondition: Map, goal: float, used: int, iterations: int
) -> int:
    """`krylov.descend` of one system: x and its residual are changed in place; the number of products so far."""
    one, many = (_of_one(product), _of_one(precondition)), (x.unsqueeze(0), residual.unsqueeze(0))
    return krylov.descend(one[0], *many, one[1], residual.new_full((1,), goal), used, iterations)


def _of_one(of: Map) -> Map:
    """A map of one vector as one of [k, P], for k = 1, or 0 where all is done."""
    return lambda v: of(v[0]).unsqueeze(0) if len(v) else v


# -- maps -------------------------------------------------------------------------------------------------------------


def _product(likelihood: Likelihood, data: Sequence[tuple[Linearisation, Tensor]], damping: float | int) -> Map:
    """v -> sum_n J_n^T H_n J_n v + damping v."""

    def product(v: Tensor) -> Tensor:
        total = damping * v
        for each, y in data:
            total += each.rmv(likelihood.hessian_mv(each.value, y, each.mv(v)))
        return total

    return product


def _solve(precision: Precision | None, place: Segments) -> Map:
    """v -> the block at `place` of precision^-1, times v: positive definite, as the whole is."""
    if precision is None:
        return torch.Tensor.clone
    if isinstance(precision, BlocksPrecision):
        parts = [
            (Segments(tuple((place.local(a), place.local(a) + b - a) for a, b in segments.intervals)), part)
            for segments, part in precision.parts
            if all(place.contains(interval) for interval in segments.intervals)
        ]
        if sum(segments.size for segments, _ in parts) == place.size:  # no block reaches out of this place

            def blockwise(v: Tensor) -> Tensor:
                out = torch.empty_like(v)
                for segments, part in parts:
                    segments.scatter(part.solve(segments.gather(v)), out)
                return out

            return blockwise

    def restricted(v: Tensor) -> Tensor:
        out = v.new_zeros(precision.size)
        place.scatter(v, out)
        return place.gather(precision.solve(out))

    return restricted


def _gradient(space: ParamSpace, likelihood: Likelihood, data: Sequence[tuple[Linearisation, Tensor]]) -> Tensor:
    total = torch.zeros(space.size, dtype=space.dtype, device=space.device)
    for each, y in data:
        total += each.rmv(likelihood.grad(each.value, y))
    return total


def _of_layer(space: ParamSpace, layer: str) -> ParamSpace:
    """The tensors that a module owns itself, without those of the modules inside it."""
    return space.select([name for name in space.names if name.rpartition(".")[0] == layer])


def _cosines(ours: Tensor, theirs: Tensor, places: Mapping[str, Segments]) -> Cosines:
    layers = {layer: _cosine(place.gather(ours), place.gather(theirs)) for layer, place in places.items()}
    return Cosines(_cosine(ours, theirs), layers)


def _cosine(a: Tensor, b: Tensor) -> float:
    a, b = a.double(), b.double()
    return float(torch.dot(a / a.norm(), b / b.norm()))


# -- checks -----------------------------------------------------------------------------------------------------------


def _check(damping: float | int, tolerance: float, iterations: int) -> None:
    if not 0 < damping < math.inf:
        raise ParameterError(
            f"damping is {damping}; expected a finite number > 0. The curvature is a sum over the data: give N times "
            "the damping of a mean curvature."
        )
    if not 0 < tolerance < 1 or iterations < 1:
        raise ParameterError(
            f"tolerance is {tolerance} and iterations is {iterations}; expected a tolerance between 0 and 1, and at "
            "least one iteration."
        )


def _precisions(curvatures: Mapping[str, Curvature], space: ParamSpace, damping: float | int) -> dict[str, Precision]:
    for name, curvature in curvatures.items():
        if curvature.size != space.size:
            raise CurvatureError(
                f"approximation '{name}' has {curvature.size} parameters; expected {space.size} (= P), those of the "
                "tangent. Estimate it with the same tangent."
            )
    return {name: curvature.with_prior(damping) for name, curvature in curvatures.items()}


def _checked(gradient: Tensor, space: ParamSpace) -> Tensor:
    if gradient.shape != (space.size,):
        raise ParameterError(f"gradient has shape {tuple(gradient.shape)}; expected [{space.size}] (= P).")
    if not bool(torch.isfinite(gradient).all()):
        raise DataError("gradient holds NaN or infinite entries; expected finite ones. Check the data and the loss.")
    return gradient.detach().to(dtype=space.dtype, device=space.device)
