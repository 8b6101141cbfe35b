"""Dual: R^T R [P, P] known by its M rows R [M, P], M <= N C, in factored form: the exact posterior where P >> N C.

With prior precision D = diag(delta) and K = R D^-1 R^T [M, M],

    log det(R^T R + D) = log det D + log det(I + K)
    (R^T R + D)^-1     = D^-1 - D^-1 R^T (I + K)^-1 R D^-1

    memory    the factors of the rows, and M^2 numbers; R itself is never formed
    priors    isotropic: one eigendecomposition O(M^3), then O(M) per prior or scale
              constant on every tensor: a Gram matrix per tensor is kept (within `KEPT` bytes), then O(M^3) per prior
              any vector [P]: O(M^2 P) per prior

    precision solve, draw O(M P); quadratic, squares O(M (O + I)) per row and layer without sharing, and O(M^2) per row;
              variance O(M^2 P); inverse_trace O(M^2 (O + I)) per layer where prior and groups are constant on tensors

All of it is exact and differentiable in the prior and in the scale. I + K has no eigenvalue below 1, and it is
decomposed in float64.

>>> import torch
>>> from lapwing.linalg.rows import DenseRows
>>> rows = RowSet.of(3, [[DenseRows(0, torch.tensor([[[1.0, 2.0, 2.0]]]))]])
>>> Dual(rows).with_prior(1.0).logdet().exp()      # eigenvalues 9 + 1, 1, 1
tensor(10.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lapwing.errors import CurvatureError
from lapwing.linalg.budget import chunks, current_budget, intermediate_bytes
from lapwing.linalg.checks import check_finite, check_precisions, check_prior, check_scale, eigh_psd, normal
from lapwing.linalg.contracts import Curvature, Multiple, Precision, same_kind
from lapwing.linalg.dense import CholeskyPrecision, DensePrecision, EigenPrecision
from lapwing.linalg.diagonal import DiagonalPrecision
from lapwing.linalg.row_set import RowSet
from lapwing.linalg.rows import Piece

KEPT = 2**31
"""Bytes that the Gram matrices of all blocks may take; beyond it they are computed again for every prior."""


@dataclass(frozen=True, eq=False)
class Dual(Curvature):
    """R^T diag(roots^2) R; `roots` [M] weigh rows of data sets that were scaled before they were added."""

    rows: RowSet
    roots: Float[Tensor, " m"] | None = None
    multiple: Multiple[Dual] | None = field(default=None, repr=False)
    sharing: int = field(default=1, repr=False)
    """How many curvatures there are that keep their Gram matrices at the same time, and share `KEPT`."""

    @property
    def size(self) -> int:
        return self.rows.size

    @property
    def entries(self) -> int:
        """Numbers in the Gram matrix."""
        return self.rows.count**2

    @property
    def scale(self) -> Float[Tensor, ""]:
        """What R^T diag(roots^2) R is multiplied by."""
        scale = 1 if self.multiple is None else self.multiple.scale
        return torch.as_tensor(scale, dtype=torch.float64, device=self.rows.device)

    def __add__(self, other: Curvature) -> Dual:
        other = same_kind(self, other)
        if all(each.multiple is None and each.roots is None for each in (self, other)):
            return Dual(self.rows + other.rows)
        roots = [each._weights() * each._checked_scale().sqrt() for each in (self, other)]
        return Dual(self.rows + other.rows, torch.cat(roots))

    def discounted(self, share: float) -> Dual:
        raise CurvatureError(
            "a moving average of rows grows with every batch; expected one of fixed size (kron, diag, "
            "blocks, full). Take the curvature of the present batch alone: moving_average=0."
        )

    def __mul__(self, scale: float | int | Tensor) -> Dual:
        scale, root = check_scale(scale), self.multiple or Multiple(self, 1)
        return Dual(self.rows, self.roots, Multiple(root.of, root.scale * scale), self.sharing)

    def mv(self, v: Float[Tensor, "*batch params"]) -> Float[Tensor, "*batch params"]:
        flat = v.reshape(-1, self.size).double()
        moved = self.rows.push(flat) * self._weights().square()
        return (self.scale * self.rows.pull(moved)).to(v.dtype).reshape(v.shape)

    def diagonal(self) -> Float[Tensor, " params"]:
        return (self.scale * self.rows.squares(self._weights().square())).to(self.rows.dtype)

    def dense(self) -> Float[Tensor, "params params"]:
        rows = self.rows.pull(torch.diag(self._weights()))
        return (self.scale * (rows.mT @ rows)).to(self.rows.dtype)

    @cached_property
    def gram(self) -> Float[Tensor, "m m"]:
        """K for a prior precision of 1 and a scale of 1."""
        total = torch.zeros(self.rows.count, self.rows.count, dtype=torch.float64, device=self.rows.device)
        for gram in self.rows.block_grams(self.rows.stacks):
            total = total + gram
        return self._between(total)

    @cached_property
    def block_grams(self) -> Float[Tensor, "blocks m m"] | None:
        """The same by block, if they are not too large to keep."""
        total = current_budget().total
        if self.sharing * len(self.rows.blocks) * self.entries * 8 > (KEPT if total is None else min(KEPT, total // 2)):
            return None
        return torch.stack([self._between(gram) for gram in self.rows.block_grams(self.rows.stacks)])

    @cached_property
    def eigen(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues [M] and vectors [M, M] of `gram`, computed once; a multiple has those of what it multiplies."""
        if self.multiple is not None:
            return self.multiple.of.eigen
        check_finite(self.gram, "the Gram matrix of the rows")
        return eigh_psd(self.gram, "the Gram matrix of the rows")

    def with_prior(self, precision: float | int | Tensor) -> DualPrecision:
        like = torch.empty((), dtype=self.rows.dtype, device=self.rows.device)
        delta = check_prior(precision, self.size, like).double()
        check_nonzero(delta)
        scale, weight = self._checked_scale(), delta.reciprocal()
        if delta.dim() == 0:
            values, vectors = self.eigen
            core = EigenPrecision(vectors, 1 + scale * weight * values)
            return DualPrecision(self.rows, self._weights(), scale, weight, weight.expand(len(self.rows.blocks)), core)
        blocks = self._of_blocks(delta)
        if blocks is not None:
            blocks = blocks.reciprocal()
            gram = self._sum_of_blocks(blocks)
        else:
            gram = self._between(self.rows.weighted(self.rows.stacks, weight))
        check_finite(gram.detach(), "the Gram matrix of the rows")
        core = CholeskyPrecision(torch.linalg.cholesky(torch.eye(len(gram)).to(gram) + scale * gram))
        return DualPrecision(self.rows, self._weights(), scale, weight, blocks, core)

    def sweep(self, pieces: Sequence[Piece], precisions: Float[Tensor, " k"]) -> Float[Tensor, "k n r"]:
        """Rows meet the training rows and are rotated once; every precision then costs O(M) per row."""
        precisions = check_precisions(precisions).double()
        check_nonzero(precisions)
        values, scale = self.eigen[0].unsqueeze(1), self._checked_scale()
        one = self.with_prior(1.0)
        found = []
        for own, cross in one.crossed(pieces):
            rotated = (cross @ self.eigen[1]).square()  # [n, r, m]
            seen = rotated @ (scale / (precisions * (precisions + scale * values)))
            prior = DiagonalPrecision(one.weight.expand(self.size)).squares(own)
            found.append(prior.unsqueeze(-1) / precisions - seen)
        return torch.cat(found).movedim(-1, 0).to(self.rows.dtype)

    def _sum_of_blocks(self, weights: Float[Tensor, " blocks"]) -> Float[Tensor, "m m"]:
        kept = (self if self.multiple is None else self.multiple.of).block_grams
        if kept is not None:
            return torch.einsum("b, b m n -> m n", weights, kept)
        total = torch.zeros(self.rows.count, self.rows.count, dtype=torch.float64, device=self.rows.device)
        for weight, gram in zip(weights, self.rows.block_grams(self.rows.stacks), strict=True):
            total = total + weight * gram
        return self._between(total)

    def _of_blocks(self, delta: Float[Tensor, " params"]) -> Float[Tensor, " blocks"] | None:
        """One number per block, if the prior is constant on every block and stays so when it is tuned."""
        varied = [delta.detach()]
        if delta.requires_grad:
            groups = _groups(delta)
            if groups is None:
                return None
            varied.append(groups)
        for start, stop in self.rows.blocks:
            if any(bool((values[start:stop] != values[start]).any()) for values in varied):
                return None
        return delta[torch.tensor([start for start, _ in self.rows.blocks], device=delta.device)]

    def _weights(self) -> Float[Tensor, " m"]:
        if self.roots is not None:
            return self.roots
        return torch.ones(self.rows.count, dtype=torch.float64, device=self.rows.device)

    def _between(self, gram: Float[Tensor, "m m"]) -> Float[Tensor, "m m"]:
        """Rows weighed, and rounding made symmetric."""
        if self.roots is not None:
            gram = self.roots.unsqueeze(1) * gram * self.roots
        return (gram + gram.mT) / 2

    def _checked_scale(self) -> Float[Tensor, ""]:
        scale = self.scale
        if not bool(torch.isfinite(scale)) or bool(scale < 0):
            raise CurvatureError(
                f"the curvature is multiplied by {float(scale)}; expected a finite number >= 0, as 1 / sigma**2 is."
            )
        return scale


def check_nonzero(delta: Tensor) -> None:
    if bool((delta == 0).any()):
        raise CurvatureError(
            "the prior precision is 0, so curvature + prior is not positive definite for all that is known of it: the "
            "dual form divides by the prior, and M rows say nothing about most directions; expected numbers > 0. Use "
            "a larger prior precision, or the full structure if the data determine every parameter."
        )


def _groups(delta: Float[Tensor, " params"]) -> Int[Tensor, " params"] | None:
    """Which entries are one number to whoever differentiates: the groups of `precisions[groups]`, as autograd recorded.

    Per layer or per tensor, the derivative is then one product of [M, M] matrices per block; without this knowledge
    every entry needs a derivative of its own, O(M^2 P).
    """
    node = delta.grad_fn
    while node is not None and node.name() == "ToCopyBackward0":
        node = node.next_functions[0][0]
    if node is None or node.name() != "IndexBackward0":
        return None
    index = node._saved_indices  # pyright: ignore[reportAttributeAccessIssue]
    if len(index) != 1 or index[0] is None or index[0].shape != delta.shape or index[0].is_floating_point():
        return None
    return index[0]


@dataclass(frozen=True, eq=False)
class DualPrecision(Precision):
    """scale R^T R + D, by R, D^-1 (a number or [P]) and the decomposed I + K; `blocks` is D^-1 if constant on blocks.

    `blocks` is None for any other vector; then products with other rows cost O(M P) per row.
    """

    rows: RowSet
    roots: Float[Tensor, " m"]
    scale: Float[Tensor, ""]
    weight: Float[Tensor, ""] | Float[Tensor, " params"]
    blocks: Float[Tensor, " blocks"] | None
    core: DensePrecision

    @property
    def size(self) -> int:
        return self.rows.size

    def mv(self, v: Float[Tensor, "*batch params"]) -> Float[Tensor, "*batch params"]:
        flat = v.reshape(-1, self.size).double()
        moved = self.rows.pull(self.rows.push(flat) * self.roots.square())
        return (self.scale * moved + flat / self.weight).to(v.dtype).reshape(v.shape)

    def solve(self, v: Float[Tensor, "*batch params"]) -> Float[Tensor, "*batch params"]:
        flat = v.reshape(-1, self.size).double() * self.weight
        inner = self.core.solve(self.rows.push(flat) * self.roots) * self.roots
        return (flat - self.scale * self.weight * self.rows.pull(inner)).to(v.dtype).reshape(v.shape)

    def draw(self, n: int, generator: torch.Generator | None = None) -> Float[Tensor, "n params"]:
        """A draw of the prior, moved by what the data, with noise of their own, say of it: exact, not approximate."""
        theta = normal((n, self.size), self._like(), generator).double() * self.weight.sqrt()
        noise = normal((n, self.rows.count), self.roots, generator)
        root = self.scale.sqrt() * self.roots
        seen = self.core.solve(self.rows.push(theta) * root + noise)
        return (theta - self.weight * self.rows.pull(seen * root)).to(self.rows.dtype)

    def logdet(self) -> Float[Tensor, ""]:
        return (self.core.logdet() + self.prior_logdet()).to(self.rows.dtype)

    def prior_logdet(self) -> Float[Tensor, ""]:
        """log det D, in float64."""
        return -self.weight.log().sum() * (self.size if self.weight.dim() == 0 else 1)

    def variance(self) -> Float[Tensor, " params"]:
        inverse = self.core.solve(torch.diag(self.roots)) * self.roots
        seen = self.rows.traced(self.rows.stacks, inverse)
        return (self.weight - self.scale * self.weight.square() * seen).to(self.rows.dtype)

    def inverse_trace(self, groups: Int[Tensor, " params"] | None = None) -> Float[Tensor, " groups"]:
        """By block, tr(D_b^-1) - tr(D_b^-1 R_b^T (I + K)^-1 R_b D_b^-1): O(M^2) per block beside its Gram matrix."""
        numbers = self._group_of_blocks(groups)
        if self.blocks is None or numbers is None:
            return super().inverse_trace(groups)
        inverse = self.core.solve(torch.diag(self.roots)) * self.roots
        grams = self.rows.block_grams(self.rows.stacks)
        seen = [weight.square() * (inverse * gram).sum() for weight, gram in zip(self.blocks, grams, strict=True)]
        weight = self.weight.expand(self.size)
        if groups is None:
            groups = torch.zeros(self.size, dtype=torch.int64, device=weight.device)
        total = weight.new_zeros(int(groups.max()) + 1).index_add(0, groups, weight)
        return (total - self.scale * torch.zeros_like(total).index_add(0, numbers, torch.stack(seen))).to(
            self.rows.dtype
        )

    def _group_of_blocks(self, groups: Tensor | None) -> Int[Tensor, " blocks"] | None:
        """The group of every block; None if one holds several, or if the groups are to be refused."""
        starts = torch.tensor([start for start, _ in self.rows.blocks], device=self.roots.device)
        if groups is None:
            return torch.zeros_like(starts)
        if groups.shape != (self.size,) or bool((groups < 0).any()):
            return None
        if any(bool((groups[start:stop] != groups[start]).any()) for start, stop in self.rows.blocks):
            return None
        return groups[starts]

    def quadratic(self, pieces: Sequence[Piece]) -> Float[Tensor, "n r r"]:
        prior = DiagonalPrecision(self.weight.reciprocal().expand(self.size))
        found = []
        for own, cross in self.crossed(pieces):
            white = self.core.whiten(cross)
            found.append(prior.quadratic(own) - self.scale * (white @ white.mT))
        return torch.cat(found).to(self.rows.dtype)

    def squares(self, pieces: Sequence[Piece]) -> Float[Tensor, "n r"]:
        prior = DiagonalPrecision(self.weight.reciprocal().expand(self.size))
        found = []
        for own, cross in self.crossed(pieces):
            found.append(prior.squares(own) - self.scale * self.core.whiten(cross).square().sum(-1))
        return torch.cat(found).to(self.rows.dtype)

    def crossed(self, pieces: Sequence[Piece]) -> Iterator[tuple[list[Piece], Float[Tensor, "n r m"]]]:
        """Other rows in float64, a few data points at a time, and their products R' D^-1 R^T with these rows."""
        count, batch = pieces[0].shape
        for points in chunks(batch, 4 * 8 * count * self.rows.count, intermediate_bytes()):
            own = [piece.of_points(points) for piece in pieces]
            yield own, (self._cross(own).mT * self.roots).unflatten(0, (-1, count))

    def _cross(self, pieces: Sequence[Piece]) -> Float[Tensor, "m rows"]:
        """R D^-1 R'^T for other rows R'."""
        if self.rows.spelled_out:
            return self.rows.crossed(pieces, self.weight)
        other = self.rows.among(pieces)
        if self.blocks is None:
            return self.rows.weighted(other, self.weight)
        grams = zip(self.blocks, self.rows.block_grams(other), strict=True)
        weight, first = next(grams)
        total = weight * first
        for weight, gram in grams:
            total = total + weight * gram
        return total

    def _like(self) -> Tensor:
        return torch.empty((), dtype=self.rows.dtype, device=self.rows.device)
