"""QuadraticTerm: sum_t 1/2 (theta - mean_t)^T H_t (theta - mean_t) + 1/2 (theta - m)^T base (theta - m), over N.

What earlier tasks ask of the weights while another one is learnt. With H = sum_t H_t and the latest mean r the gradient
is H (theta - r) - sum_t H_t (mean_t - r) + base (theta - m), whose second part is formed once. Its value comes with it.

All T terms of a layer that are Kronecker products take two matrix products: [G_1; ...; G_T] M, and that side by side
times [A_1; ...; A_T]. No graph is made; the cost is T O I (O + I) for a weight [O, I], and the memory that of the
factors once more.

>>> import torch
>>> from torch import nn
>>> from lapwing.linalg import Diagonal
>>> from lapwing.params import ParamSpace
>>> layer = nn.Linear(1, 1, bias=False)
>>> _ = nn.init.constant_(layer.weight, 3.0)
>>> anchor = Anchor(torch.ones(1), Diagonal(torch.tensor([2.0])))
>>> space = ParamSpace.of(layer)
>>> term = QuadraticTerm.of([anchor], Prior.isotropic(space, 1.0), space, points=1)
>>> value, add_gradient = term.at([layer.weight])
>>> add_gradient(1.0)
>>> value.item(), layer.weight.grad.item()                           # 2 (3 - 1)^2 / 2 + 3^2 / 2, and 2 (3 - 1) + 3
(8.5, 7.0)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.linalg import Blocks, Curvature, Kronecker, KroneckerSum, MatrixLayout, Segments, total
from lapwing.linalg.kronecker.factors import column_parts
from lapwing.params import ParamSpace
from lapwing.priors import Prior
from lapwing.training.prior_term import add_slope


@dataclass(frozen=True, eq=False)
class Anchor:
    """1/2 (theta - mean)^T curvature (theta - mean)."""

    mean: Float[Tensor, " params"]
    curvature: Curvature


Product = Callable[[Tensor, Tensor], None]
"""(v [P], out [P]) -> None: writes the entries that a part of a symmetric matrix gives of its product with v."""


@dataclass(frozen=True, eq=False)
class QuadraticTerm:
    """Of the first `size` entries of the flat weights; the base is over all. `products` are those of H, by place.

    `centre` is the base's own; where it is None the base is around `reference`, which then has all entries.
    """

    products: tuple[Product, ...]
    size: int
    reference: Float[Tensor, " entries"]
    shift: Float[Tensor, " size"] | None
    constant: Float[Tensor, ""]
    base: Float[Tensor, ""] | Float[Tensor, " params"]
    centre: Float[Tensor, ""] | Float[Tensor, " params"] | None
    shapes: tuple[torch.Size, ...]
    points: int

    @staticmethod
    def of(anchors: Sequence[Anchor], base: Prior, space: ParamSpace, points: int) -> QuadraticTerm:
        """The anchors may be over the first entries of the space alone; the mean of the base is its own."""
        centre = torch.as_tensor(base.mean, dtype=space.dtype, device=space.device)
        reference = anchors[-1].mean if anchors else torch.zeros(0, dtype=space.dtype, device=space.device)
        size, shift, constant, products = len(reference), None, torch.zeros_like(centre.sum()), ()
        with torch.no_grad():
            if anchors:
                products = tuple(_products(reduce(total, (anchor.curvature for anchor in anchors))))
            for anchor in anchors[:-1]:
                away = anchor.mean - reference
                pulled = anchor.curvature.mv(away)
                shift = pulled if shift is None else shift + pulled
                constant = constant + torch.dot(away, pulled) / 2
            if shift is None and centre.dim() and torch.equal(centre[:size], reference):
                reference, centre = centre, None
        place = products, size, reference, shift, constant
        return QuadraticTerm(*place, base.precision().detach(), centre, space.shapes, points)

    def value_and_gradient(self, theta: Float[Tensor, " params"]) -> tuple[Float[Tensor, ""], Float[Tensor, " params"]]:
        """Not divided by N."""
        if self.centre is None:
            away = theta - self.reference
            gradient = away * self.base
            gradient[: self.size] += self._pulled(away[: self.size])
            return torch.dot(away, gradient) / 2, gradient
        away = theta - self.centre
        gradient = away * self.base
        value = torch.dot(away, gradient) / 2 + self.constant
        if self.size:
            away = theta[: self.size] - self.reference
            pulled = self._pulled(away)
            value = value + torch.dot(away, pulled) / 2
            if self.shift is not None:
                value = value - torch.dot(away, self.shift)
                pulled -= self.shift
            gradient[: self.size] += pulled
        return value, gradient

    def _pulled(self, away: Float[Tensor, " size"]) -> Float[Tensor, " size"]:
        out = torch.empty_like(away)
        for times in self.products:
            times(away, out)
        return out

    @torch.no_grad()
    def at(self, tensors: Sequence[Tensor]) -> tuple[Float[Tensor, ""], Callable[[float], None]]:
        """The value over N, and what adds so many times its gradient to the gradients that the tensors hold."""
        flat = torch.cat([tensor.detach().to(self.reference.dtype).flatten() for tensor in tensors])
        value, gradient = self.value_and_gradient(flat)

        def add_gradient(scale: float) -> None:
            parts = gradient.mul_(scale / self.points).split([shape.numel() for shape in self.shapes])
            for tensor, part, shape in zip(tensors, parts, self.shapes, strict=True):
                add_slope(tensor, part.view(shape))

        return value / self.points, add_gradient


def _products(curvature: Curvature) -> list[Product]:
    """Products with the parts of a curvature, as few and as large as they can be."""
    whole = Segments(((0, curvature.size),))
    blocks = [(b.segments, b.curvature) for b in curvature.blocks] if isinstance(curvature, Blocks) else []
    return [_product(*each) for each in blocks or [(whole, curvature)]]


def _product(segments: Segments, curvature: Curvature) -> Product:
    parts = curvature.parts if isinstance(curvature, KroneckerSum) else (curvature,)
    products = [part for part in parts if isinstance(part, Kronecker)]
    dense = all(factor.dim() == 3 and len(factor) == 1 for part in products for factor in part.factors)
    if len(products) == len(parts) and dense:
        return StackedProducts.of(products, segments)

    def times(v: Tensor, out: Tensor) -> None:
        segments.scatter(curvature.mv(segments.gather(v)), out)

    return times


@dataclass(frozen=True, eq=False)
class StackedProducts:
    """sum_t G_t M A_t for a matrix M [O, I]: rows [T O, O] of all G_t, and cols [T I, I] of all A_t."""

    layout: MatrixLayout
    rows: Float[Tensor, "stacked_rows rows"]
    cols: Float[Tensor, "stacked_cols cols"]

    @staticmethod
    def of(parts: Sequence[Kronecker], segments: Segments) -> StackedProducts:
        layout, joint = parts[0].layout, parts[0].joint_bias
        cols, rows = zip(*(part.factors for part in parts), strict=True)
        inside = [factor[0] for factor in cols]
        if not joint:  # weight and bias apart
            inside = [torch.block_diag(*(a[p, p] for p in column_parts(layout, joint))) for a in inside]
        return StackedProducts(layout.placed(segments), torch.cat([factor[0] for factor in rows]), torch.cat(inside))

    def __call__(self, v: Float[Tensor, " params"], out: Float[Tensor, " params"]) -> None:
        matrix = self.layout.gather(v)[0]
        height, width = matrix.shape
        turned = self.rows @ matrix
        if len(self.rows) > height:
            turned = turned.view(-1, height, width).transpose(0, 1).reshape(height, -1)
        self.layout.scatter((turned @ self.cols).unsqueeze(0), out)
