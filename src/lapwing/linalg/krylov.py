"""Krylov methods for a symmetric matrix that is known by its products [k, P] -> [k, P], k vectors at a time.

    conjugate_gradients   x with A x = b, each column to its own residual       5 vectors [P] per column
    lanczos               the tridiagonal matrix [m, m] of each start, by which
                          b^T f(A) b is a sum over m nodes for any f              4 vectors [P] per column

One product serves all columns, so that k solves read the data as often as one. Columns that are done leave the block.
Nothing is orthogonalised again: rounding brings eigenvalues back as copies, which changes no sum over nodes.

>>> import torch
>>> matrix = torch.diag(torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64))
>>> found = conjugate_gradients(lambda v: v @ matrix, torch.ones(1, 3).double(), lambda v: v, 1e-12, 10)
>>> found.value
tensor([[1.0000, 0.5000, 0.2500]], dtype=torch.float64)
>>> found.products      # three, and one for the residual
4
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lapwing.errors import CurvatureError

Product = Callable[[Tensor], Tensor]
"""A symmetric matrix as what it does to k vectors [k, P]."""
Nodes = tuple[Tensor, Tensor]
"""Nodes and weights [k, m] of a quadrature for each of k vectors."""


@dataclass(frozen=True, eq=False)
class Solution:
    """`value` [k, P], and what it leaves: `residual` is b - A x, found afresh, `relative` its norm over that of b."""

    value: Float[Tensor, "k params"]
    residual: Float[Tensor, "k params"]
    relative: Float[Tensor, " k"]
    converged: Bool[Tensor, " k"]
    products: int
    """Products of A that it took, the last one for the residual among them."""

    @property
    def worst(self) -> float:
        """The largest relative residual."""
        return float(self.relative.max()) if len(self.relative) else 0.0


def conjugate_gradients(
    product: Product, target: Float[Tensor, "k params"], precondition: Product, tolerance: float, iterations: int
) -> Solution:
    """A x = target for a symmetric positive definite A, until every column has a residual of `tolerance` |target|.

    The residual that the recursion carries drifts from the true one: where it says that all is done, the true one is
    looked at, and the recursion started again from there as long as that helps.
    """
    x, residual, length = torch.zeros_like(target), target.clone(), target.norm(dim=1)
    goal, used, before = tolerance * length, 0, torch.full_like(length, torch.inf)
    while True:
        used = descend(product, x, residual, precondition, goal, used, iterations)
        residual = target - product(x)
        used += 1
        norm = residual.norm(dim=1)
        # a start that does not halve the true residual has met the rounding of the products
        if used >= iterations or not bool(((norm > goal) & (norm < before / 2)).any()):
            relative = torch.where(length > 0, norm / length, norm)
            return Solution(x, residual, relative, norm <= goal, used)
        before = norm


def descend(
    product: Product,
    x: Float[Tensor, "k params"],
    residual: Float[Tensor, "k params"],
    precondition: Product,
    goal: Float[Tensor, " k"],
    used: int,
    iterations: int,
) -> int:
    """Conjugate gradients from x, which is changed in place with its residual; the number of products so far."""
    live = (residual.norm(dim=1) > goal).nonzero()[:, 0]
    rest = residual[live]
    step = precondition(rest)
    along = (rest * step).sum(1, keepdim=True)
    while used < iterations and len(live):
        image = product(step)
        used += 1
        curvature = (step * image).sum(1, keepdim=True)
        going = (curvature > 0)[:, 0]  # or a step so short that its product underflows, or an overflow
        size = torch.where(going[:, None], along / curvature, 0.0)
        rest = rest - size * image
        x[live] += size * step
        residual[live] = rest
        going &= rest.norm(dim=1) > goal[live]
        if not bool(going.all()):
            live, rest, step, along = live[going], rest[going], step[going], along[going]
        steepest = precondition(rest)
        before, along = along, (rest * steepest).sum(1, keepdim=True)
        step = steepest + step * (along / before)
    return used


# -- quadrature --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Tridiagonal:
    """T [m, m] of k starts, in float64: `diagonal` [k, m], `beside` [k, m], whose last entry leads out of T.

    `squares` [k] are the squared norms of the starts.
    """

    diagonal: Float[Tensor, "k m"]
    beside: Float[Tensor, "k m"]
    squares: Float[Tensor, " k"]

    @cached_property
    def gauss(self) -> Nodes:
        """Nodes and weights [k, m] with b^T f(A) b = sum weight f(node), exact for polynomials up to 2 m - 1."""
        return self._nodes(self._matrix)

    @cached_property
    def radau(self) -> Nodes:
        """The same with one more node at zero, for a positive semi-definite A.

        Where even derivatives of f have one sign and odd ones the other, as those of 1 / x and log x, the truth lies
        between the two rules.
        """
        matrix, last = self._matrix, self.beside[:, -1]
        count, steps = self.diagonal.shape
        # just below zero: at an eigenvalue the system would be singular
        lowest = -1e-15 * float(self.diagonal.abs().max() + self.beside.abs().max())
        eye = torch.eye(steps, dtype=matrix.dtype, device=matrix.device)
        out = matrix.new_zeros(count, steps, 1)
        out[:, -1, 0] = last.square()
        ending = torch.linalg.solve(matrix - (lowest or -1.0) * eye, out)[:, -1, 0]
        larger = matrix.new_zeros(count, steps + 1, steps + 1)
        larger[:, :steps, :steps] = matrix
        larger[:, steps, steps] = lowest + ending
        larger[:, steps, steps - 1] = larger[:, steps - 1, steps] = last
        return self._nodes(larger)

    @property
    def _matrix(self) -> Float[Tensor, "k m m"]:
        inner = self.beside[:, :-1]
        return torch.diag_embed(self.diagonal) + torch.diag_embed(inner, 1) + torch.diag_embed(inner, -1)

    def _nodes(self, matrix: Float[Tensor, "k n n"]) -> Nodes:
        values, vectors = torch.linalg.eigh(matrix)
        return values.clamp_min(0), self.squares[:, None] * vectors[:, 0].square()


def lanczos(
    product: Product,
    starts: Float[Tensor, "k params"],
    steps: int,
    enough: Callable[[Tridiagonal], bool] | None = None,
) -> Tridiagonal:
    """At most `steps` products; fewer where every start has seen all it can reach, or where `enough` says so."""
    norms = starts.double().norm(dim=1)
    eps = torch.finfo(starts.dtype).eps
    current = starts / norms.clamp_min(torch.finfo(starts.dtype).tiny)[:, None].to(starts)
    before, beta = torch.zeros_like(current), torch.zeros_like(norms)
    diagonal, beside, found = [], [], None
    live, largest = norms > 0, torch.zeros_like(norms)
    for number in range(steps):
        image = product(current) - beta[:, None].to(starts) * before
        alpha = (image * current).sum(1).double()
        image = image - alpha[:, None].to(starts) * current
        fresh = image.double().norm(dim=1) if image.dtype != torch.float32 else image.norm(dim=1).double()
        largest = torch.maximum(largest, alpha.abs() + fresh)
        diagonal.append(torch.where(live, alpha, 0.0))
        live = live & (fresh > 10 * eps * largest)  # beyond it there are only directions made of rounding
        beta = torch.where(live, fresh, 0.0)
        beside.append(beta)
        found = Tridiagonal(torch.stack(diagonal, 1), torch.stack(beside, 1), norms.square())
        if not bool(live.any()) or (enough is not None and number % CHECKED == CHECKED - 1 and enough(found)):
            break
        inverse = torch.where(live, 1 / fresh, 0.0)[:, None].to(starts)
        before, current = current, image * inverse
    if found is None:
        raise CurvatureError(f"Lanczos was asked for {steps} steps; expected at least 1.")
    return found


CHECKED = 4
"""Steps between two looks at whether they are enough."""
