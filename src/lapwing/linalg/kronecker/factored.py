"""FactoredPrecision: (G + sqrt(d) / w I) (x) (A + w sqrt(d) I), damping split between the two factors (thesis 4.25).

A product of two matrices, whose inverse is the product of theirs: products and solves need no eigenvectors, only a
Cholesky factor each, and half the time of a solve in the eigenbasis. Everything else is that of the eigenbasis, which
is found when first asked for. Memory O(O^2 + I^2) for the inverses.

    >>> import torch
    >>> from lapwing.linalg import Kronecker, MatrixLayout, Term
    >>> layout = MatrixLayout(0, (1, 2), (0, 1), groups=1, rows=1, cols=2)
    >>> A, G = torch.diag(torch.tensor([3.0, 3.0])), torch.tensor([[3.0]])
    >>> damped = Kronecker(layout, (Term(A[None], G[None], 1.0),), factored_damping=True).with_prior(1.0)
    >>> damped.solve(torch.tensor([16.0, 32.0]))                               # (3 + 1) (3 + 1)
    tensor([1., 2.])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.linalg.contracts import Precision
from lapwing.linalg.kronecker.factors import Factor, apply
from lapwing.linalg.kronecker.precision import KroneckerPrecision
from lapwing.linalg.layout import MatrixLayout
from lapwing.linalg.rows import Piece


@dataclass(frozen=True, eq=False)
class DampedPart:
    """Columns of the matrix that are damped together, and the two damped factors."""

    part: slice
    cols: Factor
    rows: Factor

    @cached_property
    def inverse(self) -> DampedPart | None:
        """That of both factors; None where rounding leaves one without a Cholesky factor."""
        cols, rows = _inverse(self.cols), _inverse(self.rows)
        return None if cols is None or rows is None else DampedPart(self.part, cols, rows)

    @cached_property
    def bordered(self) -> tuple[Factor, Tensor, Tensor]:
        """The column factor as that of the weight [K, I, I], what joins it to the bias [K, I, 1], and the bias' own.

        Products with the weight's part alone are a third faster: widths are rarely odd before the bias is added.
        """
        cols = self.cols if self.cols.dim() == 3 else torch.diag_embed(self.cols)
        return cols[:, :-1, :-1].contiguous(), cols[:, :-1, -1:].contiguous(), cols[:, -1:, -1:]

    def applied(self, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """G [W b] A, for a weight [..., K, O, I] and its bias [..., K, O, 1] that are damped together."""
        inner, border, corner = self.bordered
        if self.rows.dim() == 2:
            weight, bias = weight * self.rows[:, :, None], bias * self.rows[:, :, None]
        else:
            weight, bias = self.rows @ weight, self.rows @ bias
        return torch.addcmul(weight @ inner, bias, border.mT), weight @ border + bias * corner

    def apply_into(self, weight: Tensor, bias: Tensor, to_weight: Tensor, to_bias: Tensor | None) -> None:
        """`applied`, written to a weight [K, O, I] and a bias [K, O, 1] of the same layout."""
        assert to_bias is not None
        inner, border, corner = self.bordered
        if self.rows.dim() == 2:
            weight, bias = weight * self.rows[:, :, None], bias * self.rows[:, :, None]
        else:
            weight, bias = self.rows @ weight, self.rows @ bias
        torch.mul(bias, border.mT, out=to_weight).baddbmm_(weight, inner)
        torch.mul(bias, corner, out=to_bias).baddbmm_(weight, border)


@dataclass(frozen=True, eq=False)
class FactoredPrecision(Precision):
    """`decompose` gives the same matrix in its eigenbasis."""

    layout: MatrixLayout
    parts: tuple[DampedPart, ...]
    decompose: Callable[[], KroneckerPrecision]

    @cached_property
    def eigen(self) -> KroneckerPrecision:
        return self.decompose()

    @property
    def size(self) -> int:
        return self.layout.groups * self.layout.rows * self.layout.width

    def mv(self, v: Float[Tensor, "*batch params"]) -> Float[Tensor, "*batch params"]:
        return self._applied(v, self.parts)

    def solve(self, v: Float[Tensor, "*batch params"]) -> Float[Tensor, "*batch params"]:
        inverses = [part.inverse for part in self.parts]
        known = [each for each in inverses if each is not None]
        return self._applied(v, known) if len(known) == len(inverses) else self.eigen.solve(v)

    def solve_into(self, v: Float[Tensor, " params"], out: Float[Tensor, " params"]) -> None:
        inverse = self.parts[0].inverse if len(self.parts) == 1 else None
        weight, bias = self.layout.gather_apart(v)
        if inverse is None or bias is None or not (self.layout.in_order and out.is_contiguous()):
            out.copy_(self.solve(v))
        else:
            inverse.apply_into(weight, bias, *self.layout.gather_apart(out))

    def _applied(self, v: Tensor, parts: Sequence[DampedPart]) -> Tensor:
        weight, bias = self.layout.gather_apart(v)
        if bias is None:
            weight = apply(weight, parts[0].cols, parts[0].rows)
        elif len(parts) == 1:
            weight, bias = parts[0].applied(weight, bias)
        else:
            weight, bias = (apply(each, p.cols, p.rows) for each, p in zip((weight, bias), parts, strict=True))
        return self.layout.flat(weight, bias)

    def draw(self, n: int, generator: torch.Generator | None = None) -> Float[Tensor, "n params"]:
        return self.eigen.draw(n, generator)

    def logdet(self) -> Float[Tensor, ""]:
        return self.eigen.logdet()

    def variance(self) -> Float[Tensor, " params"]:
        return self.eigen.variance()

    def quadratic(self, pieces: Sequence[Piece]) -> Float[Tensor, "n r r"]:
        return self.eigen.quadratic(pieces)

    def squares(self, pieces: Sequence[Piece]) -> Float[Tensor, "n r"]:
        return self.eigen.squares(pieces)


def damped(factor: Factor, by: Float[Tensor, " groups"]) -> Factor:
    """factor + by I, for each group."""
    found = factor.clone()
    (found if factor.dim() == 2 else found.diagonal(dim1=1, dim2=2)).add_(by[:, None])
    return found


def _inverse(factor: Factor) -> Factor | None:
    if factor.dim() == 2:
        return factor.reciprocal()
    root, info = torch.linalg.cholesky_ex(factor)
    if bool((info != 0).any()):
        return None
    return torch.cholesky_inverse(root)
