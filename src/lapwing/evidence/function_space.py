"""FunctionSpace: theta* of a linearised network, for any likelihood, by Newton's method among its M = N C outputs.

The optimum of the loss (`lapwing.evidence.linear_mode`) is m + Lambda^-1 J^T a for some a [M], so that the search is
one for a. With w = 1 / (sigma^2 T) and H = S S^T the Hessian of -log p,

    K = J Lambda^-1 J^T            = sum over groups of the prior of K_g / lambda_g, [M, M]
    g = f + J (m - theta~) + K a   outputs
    c = w grad + a                 zero at the optimum; J^T c is the gradient of the loss in theta
    step                           -(c - w S (I + w S^T K S)^-1 S^T K c)
    first step                     a = r - w S (I + w S^T K S)^-1 S^T K r with r = w (H (g - f - J (m - theta~)) - grad)

The first is Newton's step from any weights with outputs g: those of the trained network, or of the last theta*.

With the curvature at the trained outputs, as everywhere in the evidence, W = w S (I + w S^T K S)^-1 S^T, and

    log det(w J^T H J + Lambda) - log det Lambda = log det(I + w S^T K S)
    gamma_g                                      = tr(K_g W) / lambda_g, the parameters of a group that data determine

The K_g are computed once, O(M^2 P); every further prior costs a few steps of O(M^3 / 3), and no pass over the data.
Both exact figures cost O(M^3), in float64; of groups that share a tensor, gamma costs O(M^2 P).
Memory: the rows of J in factored form, and G + 4 matrices [M, M] for G groups, in the dtype of the network.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import isnan
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.estimate.cotangents import Columns
from lapwing.estimate.dual_rows import by_tensor, joined_cotangents
from lapwing.evidence.linearised_data import SIZES, LinearisedData, Point
from lapwing.evidence.marginal import GaussianFit
from lapwing.evidence.seen import Seen
from lapwing.likelihoods import Likelihood
from lapwing.linalg import RowSet
from lapwing.linalg.checks import check_finite
from lapwing.linalg.rows import Piece
from lapwing.priors import Prior
from lapwing.tangent import Linearisation

OUTPUTS = 8192
"""M up to which steps of O(M^3) are worth it."""
KEPT = 2**32
"""Bytes that the rows and the kernels may take."""
STEPS = 100
"""Steps of Newton's method at most, under one prior."""
ROWS = 512
"""Rows of two matrices [M, M] that are multiplied entry by entry at a time, in float64."""
WORK = 4
"""Matrices [M, M] that a step needs beside the kernels of the groups."""


@dataclass(frozen=True, eq=False)
class _Batch:
    """Which rows belong to a batch, the shape of its outputs, and its targets."""

    rows: slice
    shape: torch.Size
    y: Tensor


@dataclass(eq=False)
class FunctionSpace:
    """`value` [M] are the outputs f at the trained weights, class axis last; `last` those where a search has ended."""

    likelihood: Likelihood
    regression: bool
    rows: RowSet
    value: Float[Tensor, " m"]
    batches: list[_Batch]
    last: Float[Tensor, " m"]
    steps: int = 0
    _parts: tuple[int, ...] = ()
    """For every block of the rows, the number of the kernel that it is part of."""
    _kernels: list[Tensor] = field(default_factory=list, repr=False)
    _base: tuple[object, Tensor] | None = field(default=None, repr=False)
    _unit: float | None = None

    @staticmethod
    def of(data: LinearisedData, outputs: int) -> FunctionSpace | None:
        """One pass over the data, of `outputs` in all; None where rows and kernels are too large to keep."""
        space, likelihood, dtype = data.tangent.space, data.likelihood, data.tangent.space.dtype
        room = KEPT - (1 + WORK) * outputs**2 * dtype.itemsize
        if outputs > OUTPUTS or room < 0:
            return None
        rows: RowSet | None = None
        values, batches, start = [], [], 0
        for linear, y in data.passed():
            assert isinstance(linear, Linearisation)
            own = RowSet.of(space.size, [by_tensor(space, _identity_rows(linear, likelihood))])
            room -= _bytes(own)
            if room < 0:
                return None
            rows = own if rows is None else rows + own
            last = likelihood.to_last(linear.value.detach())
            values.append(last.reshape(-1).double())
            batches.append(_Batch(slice(start, start := start + last.numel()), linear.value.shape, y.clone()))
        assert rows is not None
        value = torch.cat(values)
        return FunctionSpace(likelihood, data.regression, rows, value, batches, value)

    # -- kernels -------------------------------------------------------------------------------------------------------

    def kernel(self, prior: Prior) -> Float[Tensor, "m m"]:
        """K; those of groups of whole tensors are kept, and kernels of their unions are sums."""
        delta = prior.precision().detach().double().expand(prior.size)
        blocks = self.rows.blocks
        if any(bool((delta[a:b] != delta[a]).any()) for a, b in blocks) or not self._split(prior):
            return self.rows.weighted(self.rows.stacks, delta.reciprocal()).to(self.rows.dtype)
        total = torch.zeros_like(self._kernels[0])
        for number, kept in enumerate(self._kernels):
            at = blocks[self._parts.index(number)][0]
            total.add_(kept, alpha=1 / float(delta[at]))
        return total

    def _split(self, prior: Prior) -> bool:
        """Has a kernel for every group at least; False where they do not fit, or a tensor is in several groups."""
        groups = torch.zeros(prior.size, dtype=torch.long) if prior.groups is None else prior.groups
        blocks = self.rows.blocks
        if any(bool((groups[a:b] != groups[a]).any()) for a, b in blocks):
            return False
        asked = [int(groups[a]) for a, _ in blocks]
        pairs = list(zip(self._parts or (0,) * len(asked), asked, strict=True))
        order = {each: number for number, each in enumerate(dict.fromkeys(pairs))}
        if self._kernels and len(order) == len(self._kernels):
            return True
        if _bytes(self.rows) + (len(order) + WORK) * len(self.value) ** 2 * self.rows.dtype.itemsize > KEPT:
            return False
        self._kernels = []
        self._parts = tuple(order[each] for each in pairs)
        for number in range(len(order)):
            members = [block for block, part in enumerate(self._parts) if part == number]
            self._kernels.append(self.rows.gram(members, self.rows.dtype))
            check_finite(self._kernels[-1], "the kernel of the outputs")
        return True

    def _length(self, u: Float[Tensor, " m"]) -> float:
        """|J^T u|."""
        if not self._kernels:
            return float(self.rows.pull(u.unsqueeze(0)).norm())
        short = u.to(self.rows.dtype)
        return max(0.0, sum(float(torch.dot(short, kernel @ short)) for kernel in self._kernels)) ** 0.5

    # -- the search ----------------------------------------------------------------------------------------------------

    def mode(self, prior: Prior, trained: Float[Tensor, " params"], weight: float, tolerance: float) -> Point:
        """theta*, with a residual of `tolerance`, or as small as rounding allows; searched from where it was last."""
        kernel = self.kernel(prior)

        def times(u: Tensor) -> Tensor:
            return (kernel @ u.to(kernel)).double()

        base = self._at_mean(prior, trained)
        if self._unit is None:
            self._unit = self._length(self._grad(self.value))
        whole = self._first(kernel, base, weight)
        image = times(whole)
        # a whole step may be too far for its quadratic model; of shorter ones, zero leads to the prior's mean
        a = whole * min((*SIZES, 0.0), key=lambda t: self._loss(base, t * whole, t * image, weight))
        moved, before = times(a), float("inf")
        for _ in range(STEPS):
            grad = self._grad(base + moved)
            c = weight * grad + a
            norm = self._length(c)
            if norm <= tolerance * (weight * self._unit + self._length(a)):
                break
            seen = times(c)
            step = self._solved(kernel, base + moved, seen, weight) - c
            image, slope, here = times(step), float(torch.dot(seen, step)), self._loss(base, a, moved, weight)
            rounding = 10 * torch.finfo(kernel.dtype).eps * (1 + abs(here))
            for size in SIZES:
                value = self._loss(base, a + size * step, moved + size * image, weight)
                if value <= here + 0.1 * size * slope + rounding:
                    break
            else:
                break
            a = a + size * step
            moved = times(a)
            if -slope <= rounding and norm > before / 2:
                break  # rounding allows no better
            before = norm
        self.last = base + moved
        pulled = self.rows.pull(torch.stack([a, self._grad(self.last)]))
        away = prior.mean - trained.double() + pulled[0] / prior.precision().detach().double()
        return Point(away, self._fit(self.last), pulled[1])

    def _at_mean(self, prior: Prior, trained: Tensor) -> Float[Tensor, " m"]:
        """f + J (m - theta~)."""
        if self._base is None or self._base[0] is not prior.mean:
            away = (torch.as_tensor(prior.mean).detach().double() - trained.double()).expand(self.rows.size)
            self._base = prior.mean, self.value + self.rows.push(away.unsqueeze(0))[0]
        return self._base[1]

    def _first(self, kernel: Tensor, base: Tensor, weight: float) -> Float[Tensor, " m"]:
        """a, one step of Newton's method away from `last`."""
        roots = self._roots(self.last)
        across, outputs, _ = roots.shape
        inner = torch.einsum("l c r, l c -> l r", roots, (self.last - base).view(across, outputs))
        r = weight * (torch.einsum("l c r, l r -> l c", roots, inner).reshape(-1) - self._grad(self.last))
        return r - self._solved(kernel, self.last, (kernel @ r.to(kernel)).double(), weight)

    def _solved(self, kernel: Tensor, g: Tensor, u: Tensor, weight: float) -> Float[Tensor, " m"]:
        """w S (I + w S^T K S)^-1 S^T u, at the outputs g."""
        self.steps += 1
        root, inner = self._inner(kernel, g, weight)
        across, outputs, columns = root.shape
        right = torch.einsum("l c r, l c -> l r", root, u.to(kernel).view(across, outputs)).reshape(-1, 1)
        solved = torch.cholesky_solve(right, _factor(inner)).view(across, columns)
        return torch.einsum("l c r, l r -> l c", root, solved).reshape(-1).double()

    def _inner(self, kernel: Tensor, g: Tensor, weight: float) -> tuple[Float[Tensor, "l C R"], Float[Tensor, "m m"]]:
        """S, with w in it, and I + w S^T K S, at the outputs g."""
        root = (self._roots(g) * weight**0.5).to(kernel)
        across, outputs, columns = root.shape
        half = torch.bmm(root.mT, kernel.view(across, outputs, -1)).reshape(-1, across, outputs)  # [l R, l, C]
        inner = torch.bmm(half.transpose(0, 1), root).transpose(0, 1).reshape(across * columns, -1)
        inner.diagonal().add_(1)
        check_finite(inner, "the curvature of the outputs")
        return root, inner

    # -- the exact curvature -------------------------------------------------------------------------------------------

    def logdet(self, prior: Prior, weight: float = 1.0) -> float:
        """log det(w J^T H J + Lambda) - log det Lambda with the exact curvature at the trained outputs, in float64."""
        inner = self._inner(self.kernel(prior), self.value, weight)[1].double()
        return 2 * float(_factor(inner).diagonal().log().sum())

    def core(self, prior: Prior, weight: float = 1.0) -> tuple[float, Float[Tensor, "m m"]]:
        """`logdet` and W, in float64, from one factor.

        Other outputs with the Jacobian J' have the exact posterior covariance
        J' Lambda^-1 J'^T - (J' Lambda^-1 J^T) W (J Lambda^-1 J'^T).
        """
        root, inner = self._inner(self.kernel(prior), self.value, weight)
        factor = _factor(inner.double())
        del inner
        logdet = 2 * float(factor.diagonal().log().sum())
        core = torch.cholesky_inverse(factor)
        del factor
        return logdet, _between(root.double(), core)

    def measured(self, prior: Prior, weight: float = 1.0) -> tuple[float, Float[Tensor, " groups"]]:
        """`logdet`, and gamma of every group of the prior, from the same factor and without a difference of traces."""
        logdet, core = self.core(prior, weight)
        if not self._split(prior):
            seen = self.rows.traced(self.rows.stacks, core) / prior.precision().detach().double()
            return logdet, prior.sums(seen)
        precisions = prior.precisions.detach().double()
        gamma = torch.zeros_like(precisions)
        for number, kernel in enumerate(self._kernels):
            at = self.rows.blocks[self._parts.index(number)][0]
            group = 0 if prior.groups is None else int(prior.groups[at])
            parts = zip(kernel.split(ROWS), core.split(ROWS), strict=True)
            gamma[group] += sum((ours.double() * theirs).sum() for ours, theirs in parts)
        return logdet, gamma / precisions

    # -- the likelihood ------------------------------------------------------------------------------------------------

    def _each(self, g: Tensor, function: Callable[[Tensor, Tensor], Any]) -> list[Any]:
        """function(outputs, targets) of every batch."""
        likelihood, found = self.likelihood, []
        for batch in self.batches:
            last = likelihood.to_last(torch.empty(batch.shape, device="meta")).shape
            f = likelihood.from_last(g[batch.rows].reshape(last), batch.shape)
            y = batch.y.to(f) if batch.y.is_floating_point() else batch.y
            found.append(function(f, y))
        return found

    def _grad(self, g: Tensor) -> Float[Tensor, " m"]:
        return torch.cat([self.likelihood.to_last(each).reshape(-1) for each in self._each(g, self.likelihood.grad)])

    def _roots(self, g: Tensor) -> Float[Tensor, "l C R"]:
        return torch.cat([each.flatten(0, -3) for each in self._each(g, self.likelihood.hessian_sqrt)])

    def _loss(self, base: Tensor, a: Tensor, moved: Tensor, weight: float) -> float:
        """Of a, with `moved` K a; infinite where it is no number."""
        log_prob = sum(float(each.sum()) for each in self._each(base + moved, self.likelihood.log_prob))
        value = float(torch.dot(a, moved)) / 2 - weight * log_prob
        return float("inf") if isnan(value) else value

    def _fit(self, g: Tensor) -> Float[Tensor, ""] | GaussianFit:
        seen = Seen(self.regression)
        self._each(g, lambda f, y: seen.saw(f, y, self.likelihood.log_prob(f, y)))
        return seen.fit(self.rows.dtype)


def _bytes(rows: RowSet) -> int:
    return sum(tensor.nbytes for part in rows.parts for piece in part for tensor in piece.factors.values())


def _factor(matrix: Float[Tensor, "m m"]) -> Float[Tensor, "m m"]:
    """L L^T = I + a kernel, of which rounding may leave less than nothing: the diagonal is then raised.

    A larger curvature shortens a step of Newton's method; where it ends is the gradient's to say.
    """
    raised, most = 0.0, float(matrix.diagonal().max())
    while True:
        factor, failed = torch.linalg.cholesky_ex(matrix)
        if not bool(failed):
            return factor
        more = max(10 * raised, torch.finfo(matrix.dtype).eps * most)
        matrix.diagonal().add_(more - raised)
        raised = more


def _between(root: Float[Tensor, "l C R"], core: Float[Tensor, "r r"]) -> Float[Tensor, "m m"]:
    """S core S^T for S that has a block for every l."""
    across, outputs, columns = root.shape
    half = torch.bmm(root, core.view(across, columns, -1)).reshape(-1, across, columns)  # [l C, l, R]
    return torch.bmm(half.transpose(0, 1), root.mT).transpose(0, 1).reshape(across * outputs, -1)


def _identity_rows(linear: Linearisation, likelihood: Likelihood) -> list[Piece]:
    """Rows of J: a cotangent for every output of a data point, class axis last."""
    last = likelihood.to_last(linear.value)
    count = last[0].numel()
    eye = torch.eye(count, dtype=linear.value.dtype, device=linear.value.device)

    def take(part: slice) -> Tensor:
        each = [likelihood.from_last(row.reshape(1, *last.shape[1:]), linear.value[:1].shape) for row in eye[part]]
        return torch.stack(each).expand(-1, linear.batch, *linear.value.shape[1:])

    step = max(1, linear.tangent.budget // 8 // max(1, linear.cotangent_bytes))
    return joined_cotangents([linear.pull(chunk) for chunk in Columns(count, take).chunked(step)])
