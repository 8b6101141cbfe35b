"""full, diagonal, kron, blocks of the last layer in closed form, from its features: no backward pass.

With phi the features [phi; 1] and H_n [C, C] the likelihood's Hessian at the outputs,

    full        sum_n H_n (x) phi_n phi_n^T        [P, P], P = C (D + 1)
    diagonal    sum_n diag(H_n) (x) phi_n^2        [P]
    kron        A = sum_n phi_n phi_n^T, G = sum_n H_n, and the count N

in flat order, the same curvature as the general estimators find for a `Tangent` of that layer. A layer applied at T
positions has one such term per position, where the likelihood factors over them. Memory: the result, and chunks of
[B, C, C] within the budget; for `Categorical`, kron and diagonal need probabilities [B, C] only. Draws and observed
gradients (`monte_carlo`, `empirical`) are few columns per point, and are put in their place as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.estimate.cotangents import Columns, Cotangents, exact, fisher
from lapwing.estimate.data_pass import Batches, named, numbered, observe, pair
from lapwing.estimate.exact_blocks import partition
from lapwing.estimate.exact_diagonal import SquareSum
from lapwing.estimate.full_matrix import check_full
from lapwing.estimate.kronecker import KroneckerOptions
from lapwing.estimate.symmetric_sums import DiagonalSum, GramSum, SymmetricSum, factor_sum, mirrored, over_positions
from lapwing.likelihoods import Categorical, Likelihood
from lapwing.linalg import Block, Blocks, Dense, Diagonal, Kronecker, MatrixLayout, Piece, Term
from lapwing.linalg.budget import chunks
from lapwing.linalg.layout import merge_segments
from lapwing.tangent.features import FeatureMap, FeatureTangent


def full(
    tangent: FeatureTangent,
    likelihood: Likelihood,
    batches: Batches,
    *,
    cotangents: Cotangents = exact,
    generator: torch.Generator | None = None,
) -> Dense:
    """sum_n H_n (x) [phi; 1] [phi; 1]^T, spelled out. Work O(N P^2), C times less than from its rows."""
    joined: Tensor | None = None
    spelled_out: SymmetricSum | None = None
    for step in _steps(tangent, likelihood, batches, cotangents, generator):
        layout, size = step.linear_map.layout, tangent.space.size
        if joined is None and spelled_out is None:
            check_full(tangent.space)
        if step.columns is None:
            joined = step.zeros(size, size) if joined is None else joined
            for phi, hessian in step.hessians(layout.rows * (2 * layout.width + 4 * layout.rows)):
                _add_outer(joined, phi, hessian)
        else:
            spelled_out = spelled_out or SymmetricSum.zeros(size, step.zeros(), tangent.budget)
            for pieces in step.pieces():
                spelled_out.add(pieces)
    totals = [] if joined is None else [_in_flat_order(mirrored(joined), tangent.layout)]
    totals += [] if spelled_out is None else [spelled_out.matrix()]
    return Dense(totals[0] if len(totals) == 1 else torch.stack(totals).sum(0))


def diagonal(
    tangent: FeatureTangent,
    likelihood: Likelihood,
    batches: Batches,
    *,
    cotangents: Cotangents = exact,
    generator: torch.Generator | None = None,
) -> Diagonal:
    """diag(sum_n H_n (x) [phi; 1] [phi; 1]^T): one product of [C, N] and [N, D + 1]."""
    total: SquareSum | None = None
    for step in _steps(tangent, likelihood, batches, cotangents, generator):
        total = total or SquareSum(step.zeros(tangent.space.size), tangent.budget)
        if step.columns is None:
            for phi, variances in step.variances():
                squares = torch.einsum("m o, m i -> o i", variances, phi.square())
                step.linear_map.layout.scatter_add(squares.unsqueeze(0), total.total)
        else:
            for pieces in step.pieces():
                total.add(pieces)
    assert total is not None, "a pass without a batch is refused"
    return Diagonal(total.vector())


def kron(
    tangent: FeatureTangent,
    likelihood: Likelihood,
    batches: Batches,
    *,
    cotangents: Cotangents = exact,
    generator: torch.Generator | None = None,
    **options: str | int | bool,
) -> Blocks:
    """One Kronecker product G (x) A / N, as `kflr` returns it; `options` are those of `kflr`."""
    settings = KroneckerOptions.of(options)
    inputs: GramSum | DiagonalSum | None = None
    outputs, count = torch.zeros(()), 0.0
    for step in _steps(tangent, likelihood, batches, cotangents, generator):
        layout, right = step.linear_map.layout, step.linear_map.right
        if inputs is None:
            inputs = factor_sum(1, layout.width, step.zeros(), settings.wide_limit)
        right = right.mean(1, keepdim=True) if settings.sharing == "reduce" else right
        inputs.add(right.unsqueeze(2))
        total = step.total if layout.rows <= settings.wide_limit else step.total_diagonal
        outputs = outputs + total(settings.sharing == "reduce")
        count += right.shape[0] * right.shape[1]
    assert inputs is not None, "a pass without a batch is refused"
    layout = tangent.layout
    segments = merge_segments(layout.segments)
    term = Term(inputs.matrix(), outputs.unsqueeze(0), count)
    curvature = Kronecker(layout.moved(segments), (term,), settings.joint_bias, settings.factored_damping)
    return Blocks(tangent.space.size, (Block(tangent.space.names[0], segments, curvature),))


def blocks(
    tangent: FeatureTangent,
    likelihood: Likelihood,
    batches: Batches,
    *,
    by: str = "layer",
    cotangents: Cotangents = exact,
    generator: torch.Generator | None = None,
) -> Blocks:
    """The one block of the layer, or ("tensor") that of the weight and that of the bias."""
    matrix = full(tangent, likelihood, batches, cotangents=cotangents, generator=generator).matrix
    found = (
        Block(name, segments, Dense(segments.gather(segments.gather(matrix).mT)))
        for name, segments in partition(tangent.space, by).items()
    )
    return Blocks(tangent.space.size, tuple(found))


# -- one batch ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class FeatureBatch:
    """One batch: its features, and either Hessians at the outputs (`columns` None) or columns to be put in place."""

    number: int
    linear_map: FeatureMap
    y: Tensor
    likelihood: Likelihood
    cotangents: Cotangents
    columns: Columns | None

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.linear_map.space.dtype, device=self.linear_map.space.device)

    def hessians(self, entries: int) -> Iterator[tuple[Float[Tensor, "m width"], Float[Tensor, "m C C"]]]:
        """[phi; 1] and H at the positions of some data points, as many as fit with `entries` numbers for each."""
        right, rows = self.linear_map.right, self.linear_map.layout.rows
        for part in chunks(len(right), 8 * entries * right.shape[1], self.linear_map.budget):
            with named(self.number):
                hessian = self._hessian(part).detach().to(right.dtype)
            yield right[part].flatten(0, 1), hessian.reshape(-1, rows, rows)

    def _hessian(self, part: slice) -> Tensor:
        f, y = self.linear_map.value[part], self.y[part]
        if isinstance(self.likelihood, Categorical):
            f = f.double()  # diag(p) - p p^T cancels where one class is all but certain
        if self.cotangents is exact:
            return self.likelihood.psd_hessian(f, y)
        hessian, observed = self.likelihood.fisher(f), self.likelihood.observed(y)
        return hessian if observed is None else hessian.where(observed[..., None, None], 0.0)

    def _probabilities(self) -> Float[Tensor, "m C"]:
        """Class probabilities at every position, zero where there is no target."""
        value, observed = self.linear_map.value, self.likelihood.observed(self.y)
        p = self.likelihood.to_last(value).double().softmax(-1)
        return (p if observed is None else p.where(observed.unsqueeze(-1), 0.0)).flatten(0, -2)

    def variances(self) -> Iterator[tuple[Float[Tensor, "m width"], Float[Tensor, "m C"]]]:
        """[phi; 1] and the diagonal of H."""
        if isinstance(self.likelihood, Categorical):
            p = self._probabilities()
            yield self.linear_map.right.flatten(0, 1), (p * (1 - p)).to(self.linear_map.space.dtype)
        else:
            for phi, hessian in self.hessians(4 * self.linear_map.layout.rows**2):
                yield phi, hessian.diagonal(dim1=1, dim2=2)

    def total(self, reduce: bool) -> Float[Tensor, "C C"]:
        """The sum of H over data points and positions; `reduce` sums columns over positions first."""
        if self.columns is None and isinstance(self.likelihood, Categorical):
            p = self._probabilities()
            total = -(p.mT @ p)
            total.diagonal().copy_((p * (1 - p)).sum(0))
            return total.to(self.linear_map.space.dtype)
        rows = self.linear_map.layout.rows
        total = self.zeros(rows, rows)
        if self.columns is None:
            for _, hessian in self.hessians(4 * rows**2):
                total += hessian.sum(0)
        else:
            for chunk in self._chunked():
                left = chunk.reshape(*chunk.shape[:2], -1, rows)
                left = (over_positions(left) if reduce else left).reshape(-1, rows)
                total += left.mT @ left
        return total

    def total_diagonal(self, reduce: bool) -> Float[Tensor, " C"]:
        """The diagonal of `total`, which is not formed."""
        if self.columns is None:
            return sum((variances.sum(0) for _, variances in self.variances()), self.zeros(self.linear_map.layout.rows))
        total = self.zeros(self.linear_map.layout.rows)
        for chunk in self._chunked():
            left = chunk.reshape(*chunk.shape[:2], -1, len(total))
            total += (over_positions(left) if reduce else left).square().reshape(-1, len(total)).sum(0)
        return total

    def pieces(self) -> Iterator[list[Piece]]:
        """Rows of as many columns at a time as the budget allows."""
        return (self.linear_map.pull(chunk) for chunk in self._chunked())

    def _chunked(self) -> Iterator[Float[Tensor, "r batch *out"]]:
        assert self.columns is not None
        value = self.linear_map.value
        step = max(1, self.linear_map.budget // (3 * value.numel() * value.element_size()))
        with named(self.number):
            for chunk in self.columns.chunked(step):
                # a noise level that requires gradients would leave part of a graph in the sums
                yield chunk.detach().to(value.dtype)


def _steps(
    tangent: FeatureTangent,
    likelihood: Likelihood,
    batches: Batches,
    cotangents: Cotangents,
    generator: torch.Generator | None,
) -> Iterator[FeatureBatch]:
    """Every batch, checked; errors name it."""
    for number, batch in numbered(batches):
        with named(number):
            x, y = pair(batch)
            found = tangent.at(x)
            found = replace(found, output=found.output.detach(), shared=found.shared.detach())
            observe(batches, likelihood, found.value, y)
            closed = cotangents in (exact, fisher) and _factors(likelihood, found)
            columns = None if closed else cotangents(likelihood, found.value, y, generator)
        yield FeatureBatch(number, found, y, likelihood, cotangents, columns)


def _factors(likelihood: Likelihood, linear_map: FeatureMap) -> bool:
    """Whether the likelihood's positions and classes are those of the layer, in the same order."""
    shape = linear_map.output.shape[1:]
    index = torch.arange(shape.numel()).reshape(1, *shape)
    last = likelihood.to_last(index)
    return last.shape[-1] == linear_map.layout.rows and torch.equal(last.flatten(), index.flatten())


# -- the full matrix ------------------------------------------------------------------------------------------------


def _add_outer(total: Tensor, phi: Float[Tensor, "m width"], hessian: Float[Tensor, "m C C"]) -> None:
    """total += the upper blocks of sum_m H_m (x) phi_m phi_m^T, one row of blocks at a time."""
    width = phi.shape[1]
    for c in range(hessian.shape[1]):
        weighted = (hessian[:, c, c:, None] * phi[:, None, :]).flatten(1)
        total[c * width : (c + 1) * width, c * width :].addmm_(phi.mT, weighted)


def _in_flat_order(matrix: Float[Tensor, "P P"], layout: MatrixLayout) -> Float[Tensor, "P P"]:
    """From rows [w, b] of the joined matrix to the weight first and the bias after it."""
    if layout.bias is None:
        return matrix
    place = layout.gather(torch.arange(len(matrix), dtype=torch.float64, device=matrix.device)).flatten().long()
    out = torch.empty_like(matrix)
    out[place[:, None], place] = matrix
    return out
