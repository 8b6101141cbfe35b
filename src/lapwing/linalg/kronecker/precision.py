"""KroneckerPrecision: Q diag(values) Q^T with Q = Q_G (x) Q_A, what Kronecker blocks become with a prior.

Memory O(O^2 + I^2 + O I); every operation rotates, scales and rotates back, O(O I (O + I)) for one vector.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.linalg.checks import normal
from lapwing.linalg.contracts import Precision
from lapwing.linalg.kronecker.rotation import EigenPart, each_part, rotated
from lapwing.linalg.layout import MatrixLayout
from lapwing.linalg.rows import Piece, Weighed, add_grams, add_squares


@dataclass(frozen=True, eq=False)
class KroneckerPrecision(Precision):
    """Q diag(values) Q^T with Q = Q_G (x) Q_A and any eigenvalues, those of a product or corrected ones."""

    layout: MatrixLayout
    parts: tuple[EigenPart, ...]

    @property
    def size(self) -> int:
        return self.layout.groups * self.layout.rows * self.layout.width

    def mv(self, v: Float[Tensor, "*batch params"]) -> Float[Tensor, "*batch params"]:
        matrix = self.layout.gather(v)
        return each_part(self.layout, self.parts, lambda part: part.multiplied(matrix[..., part.part]))

    def solve(self, v: Float[Tensor, "*batch params"]) -> Float[Tensor, "*batch params"]:
        matrix = self.layout.gather(v)
        return each_part(self.layout, self._inverse, lambda part: part.multiplied(matrix[..., part.part]))

    def draw(self, n: int, generator: torch.Generator | None = None) -> Float[Tensor, "n params"]:
        shape = (n, self.layout.groups, self.layout.rows, self.layout.width)
        noise = normal(shape, self.parts[0].values, generator)
        return each_part(
            self.layout, self.parts, lambda part: part.rotate_back(noise[..., part.part] * part.values.rsqrt())
        )

    def logdet(self) -> Float[Tensor, ""]:
        return torch.stack([part.values.log().sum() for part in self.parts]).sum()

    def variance(self) -> Float[Tensor, " params"]:
        return each_part(self.layout, self._inverse, EigenPart.diagonal)

    @property
    def _inverse(self) -> list[EigenPart]:
        kept = None if torch.is_inference_mode_enabled() else self._kept_inverse
        return [replace(part, values=part.values.reciprocal()) for part in self.parts] if kept is None else kept

    @cached_property
    def _kept_inverse(self) -> list[EigenPart] | None:
        """None where derivatives are taken: each needs a graph of its own."""
        if any(part.values.requires_grad for part in self.parts):
            return None
        return [replace(part, values=part.values.reciprocal()) for part in self.parts]

    def quadratic(self, pieces: Sequence[Piece]) -> Float[Tensor, "n r r"]:
        """Without sharing sum_j (g Q_G)_j (g' Q_G)_j [(a Q_A)^2 D^T]_j, with D the inverse eigenvalues."""
        return add_grams(self._weighted(pieces), *pieces[0].shape)

    def squares(self, pieces: Sequence[Piece]) -> Float[Tensor, "n r"]:
        return add_squares(self._weighted(pieces), *pieces[0].shape)

    def _weighted(self, pieces: Sequence[Piece]) -> Iterator[Weighed]:
        for points, rows, part in rotated(self.layout, self._inverse, pieces):
            yield points, rows, part.values
