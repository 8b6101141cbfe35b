"""What is pulled back through the network: columns whose outer products sum to the curvature at the outputs.

    exact         the columns of S, S S^T = H (C or fewer per position): the generalised Gauss-Newton
    fisher        the columns of the Fisher's square root: differs from `exact` where p is no exponential family
    monte_carlo   gradients at targets drawn from the model: the Fisher in expectation, one pass per draw
    projections   S v with E[v v^T] = I: the same H as `exact` in expectation, one pass per draw
    empirical     gradients at the observed targets: the empirical Fisher
    output_by_output(any of them)   the diagonal of what they sum to: one cotangent per output, along that output

Each is a function (likelihood, f, y, generator) -> Columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil, prod

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.errors import DataError
from lapwing.likelihoods import Likelihood


@dataclass(frozen=True)
class Columns:
    """`count` cotangents of the outputs, made in slices so that they never all exist at once."""

    count: int
    take: Callable[[slice], Tensor]

    def chunked(self, step: int) -> Iterator[Float[Tensor, "r batch *out"]]:
        """At most `step` at a time, in parts of about the same size."""
        step = ceil(self.count / ceil(self.count / step)) if self.count else 1
        for start in range(0, self.count, step):
            yield self.take(slice(start, min(start + step, self.count)))


DISTRIBUTIONS = ("rademacher", "gaussian")
Cotangents = Callable[[Likelihood, Tensor, Tensor, torch.Generator | None], Columns]


def exact(likelihood: Likelihood, f: Tensor, y: Tensor, generator: torch.Generator | None = None) -> Columns:
    """Square-root columns of the Hessian at the outputs: the GGN, exactly."""
    return _square_root(likelihood, f, likelihood.hessian_sqrt(f, y))


def fisher(likelihood: Likelihood, f: Tensor, y: Tensor, generator: torch.Generator | None = None) -> Columns:
    """Square-root columns of the Fisher at the outputs, exactly."""
    root, observed = likelihood.fisher_sqrt(f), likelihood.observed(y)
    return _square_root(likelihood, f, root if observed is None else root.where(observed[..., None, None], 0.0))


def monte_carlo(samples: int = 1) -> Cotangents:
    """Gradients at `samples` targets drawn afresh for every batch; an unbiased estimate of the Fisher."""
    if samples < 1:
        raise DataError(f"samples is {samples}; expected at least 1 draw per data point.")

    def columns(likelihood: Likelihood, f: Tensor, y: Tensor, generator: torch.Generator | None = None) -> Columns:
        observed = likelihood.observed(y)

        def take(part: slice) -> Tensor:
            drawn = [likelihood.sample(f, generator) for _ in range(part.start, part.stop)]
            if observed is not None:  # a position without a target stays without one
                drawn = [target.where(observed, y) for target in drawn]
            return torch.stack([likelihood.grad(f, target) for target in drawn]) / samples**0.5

        return Columns(samples, take)

    return columns


def projections(samples: int = 1, distribution: str = "rademacher") -> Cotangents:
    """S v / sqrt(samples) with v drawn afresh for every data point and batch (thesis 4.10-4.11), E[v v^T] = I.

    Unbiased for the GGN, also where that is not the Fisher, and where targets cannot be drawn. v has an entry for every
    column of every position, so that a draw is one cotangent however many positions there are. Entries are -1 or 1
    ("rademacher"), or standard normal ("gaussian", which adds variance). Linear in the outputs where H is diagonal.
    """
    if samples < 1:
        raise DataError(f"samples is {samples}; expected at least 1 draw per data point.")
    if distribution not in DISTRIBUTIONS:
        raise DataError(f"unknown distribution {distribution!r} of projections; expected one of {DISTRIBUTIONS}.")

    def columns(likelihood: Likelihood, f: Tensor, y: Tensor, generator: torch.Generator | None = None) -> Columns:
        if likelihood.diagonal:  # one number per output, where a matrix would be quadratic in them
            root = likelihood.to_last(likelihood.hessian_diagonal(f, y)).sqrt()
            shape = root.shape
        else:
            root = likelihood.hessian_sqrt(f, y)
            shape = torch.Size((*root.shape[:-2], root.shape[-1]))
        # drawn where the generator lives, as targets are
        place = root.device if generator is None else generator.device

        def drawn() -> Tensor:
            if distribution == "gaussian":
                v = torch.randn(shape, dtype=root.dtype, device=place, generator=generator)
            else:
                v = torch.randint(2, shape, device=place, generator=generator) * 2 - 1
            v = v.to(root)
            product = root * v if likelihood.diagonal else torch.einsum("... c r, ... r -> ... c", root, v)
            return likelihood.from_last(product, f.shape)

        def take(part: slice) -> Tensor:
            return torch.stack([drawn() for _ in range(part.start, part.stop)]) / samples**0.5

        return Columns(samples, take)

    return columns


def empirical(likelihood: Likelihood, f: Tensor, y: Tensor, generator: torch.Generator | None = None) -> Columns:
    """The gradient at the observed targets."""
    return Columns(1, lambda part: likelihood.grad(f, y).unsqueeze(0))


def repeatable(cotangents: Cotangents) -> bool:
    """Whether the cotangents of a data point are the same in any batch: none is drawn."""
    return cotangents in (exact, fisher, empirical)


def output_by_output(cotangents: Cotangents) -> Cotangents:
    """sqrt(H_cc) e_c for every output c, in the order of the outputs, where H is what the `cotangents` sum to."""

    def columns(likelihood: Likelihood, f: Tensor, y: Tensor, generator: torch.Generator | None = None) -> Columns:
        squares = torch.zeros_like(f)
        for column in cotangents(likelihood, f, y, generator).chunked(1):
            squares = squares + column[0].square()
        root = squares.sqrt().reshape(len(f), -1)

        def take(part: slice) -> Tensor:
            index = torch.arange(part.start, part.stop, device=f.device)
            found = root.new_zeros(len(index), *root.shape)
            found[index - part.start, :, index] = root[:, index].mT
            return found.reshape(len(index), *f.shape)

        return Columns(root.shape[1], take)

    return columns


def _square_root(likelihood: Likelihood, f: Tensor, root: Float[Tensor, "*lead C R"]) -> Columns:
    """Column (position m, r) is root[:, m, :, r] at position m and zero elsewhere."""
    batch, *positions, classes, rank = root.shape
    flat = root.reshape(batch, -1, classes, rank)
    places = flat.shape[1]

    def take(part: slice) -> Tensor:
        if places == 1:
            columns = flat[:, 0, :, part].permute(2, 0, 1).reshape(-1, batch, *(1 for _ in positions), classes)
        else:
            index = torch.arange(part.start, part.stop, device=root.device)
            place, column = index // rank, index % rank
            spread = root.new_zeros(len(index), batch, places, classes)
            spread[index - part.start, :, place] = flat[:, place, :, column]
            columns = spread.reshape(len(index), batch, *positions, classes)
        if f.dim() == 2:  # of more axes, sizes do not tell which one holds the classes
            return columns
        return torch.stack([likelihood.from_last(column, f.shape) for column in columns])

    return Columns(prod(positions) * rank, take)
