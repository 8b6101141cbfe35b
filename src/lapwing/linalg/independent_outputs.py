"""Independent: a `Dual` for each of C outputs instead of one for all; covariances between outputs are left out.

Output c has the N rows R_c [N, P] of its own, and with K_c = R_c D^-1 R_c^T [N, N] for a prior precision D

    log det    log det D + sum_c log det(I + K_c)
    variance   of output c under (R_c^T R_c + D)^-1; zero between two outputs

    memory    the factors of the rows, and C N^2 numbers instead of (C N)^2
    time      C decompositions of O(N^3) instead of one of O(C^3 N^3)

That is a Gaussian process with C independent functions. It is no Gaussian over the P weights, of which every output has
another: whatever asks for one (`draw`, `solve`, `variance`, `mv`, `dense`) is refused. With one output it is `Dual`.

>>> import torch
>>> from lapwing.linalg import DenseRows, RowSet
>>> rows = DenseRows(0, torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]]]))     # two outputs that are the same function
>>> together = Dual(RowSet.of(2, [[rows]]))
>>> together.with_prior(1.0).quadratic([rows])                          # 1 / (1 + 2), seen twice
tensor([[[0.3333, 0.3333],
         [0.3333, 0.3333]]])
>>> Independent(together, 2).with_prior(1.0).quadratic([rows])          # 1 / (1 + 1) each
tensor([[[0.5000, 0.0000],
         [0.0000, 0.5000]]])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NoReturn

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lapwing.errors import CurvatureError
from lapwing.linalg.budget import intermediate_bytes
from lapwing.linalg.checks import check_scale
from lapwing.linalg.contracts import Curvature, LinearMap, Multiple, Precision, same_kind
from lapwing.linalg.dual import Dual, DualPrecision
from lapwing.linalg.row_set import RowSet
from lapwing.linalg.rows import Piece, push


@dataclass(frozen=True, eq=False)
class Independent(Curvature):
    """`whole` has the rows of all outputs: `count` for every data point, the c-th of which belongs to output c."""

    whole: Dual
    count: int
    multiple: Multiple[Independent] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        found = {count for count, _ in self.whole.rows.shapes}
        if found != {self.count}:
            raise CurvatureError(
                f"data points have {sorted(found)} rows; expected {self.count}, one for every output. Outputs that are "
                "independent must be as many for all data."
            )

    @property
    def size(self) -> int:
        return self.whole.size

    @property
    def entries(self) -> int:
        """Numbers in all Gram matrices."""
        return self.whole.entries // self.count

    def __add__(self, other: Curvature) -> Independent:
        other = same_kind(self, other)
        if other.count != self.count:
            raise CurvatureError(f"cannot add {other.count} independent outputs to {self.count}; expected as many.")
        return Independent(self.whole + other.whole, self.count)

    def __mul__(self, scale: float | int | Tensor) -> Independent:
        scale, root = check_scale(scale), self.multiple or Multiple(self, 1)
        return Independent(self.whole * scale, self.count, Multiple(root.of, root.scale * scale))

    @cached_property
    def outputs(self) -> tuple[Dual, ...]:
        """One curvature per output; those of a multiple share the decompositions of what it multiplies."""
        if self.multiple is not None:
            return tuple(each * self.multiple.scale for each in self.multiple.of.outputs)
        rows, roots = self.whole.rows, self.whole.roots
        by_output = [None] * self.count if roots is None else roots.unflatten(0, (-1, self.count)).unbind(1)
        found = []
        for number, root in enumerate(by_output):
            parts = tuple(tuple(piece.of_cotangent(number) for piece in part) for part in rows.parts)
            found.append(Dual(RowSet(rows.size, parts), root, sharing=self.count))
        return tuple(found)

    def with_prior(self, precision: float | int | Tensor) -> IndependentPrecision:
        return IndependentPrecision(tuple(each.with_prior(precision) for each in self.outputs))

    def sweep(self, pieces: Sequence[Piece], precisions: Float[Tensor, " k"]) -> Float[Tensor, "k n r"]:
        check_outputs(pieces, self.count)
        each = [dual.sweep(of_output(pieces, number), precisions) for number, dual in enumerate(self.outputs)]
        return torch.cat(each, dim=-1)

    def variances(self, linear_map: LinearMap, precisions: Float[Tensor, " k"]) -> Float[Tensor, "k batch outputs"]:
        """All outputs at a time: each has a posterior of its own."""
        return torch.cat([self.sweep(part.pieces(), precisions) for part in linear_map.parts()], dim=1)

    def mv(self, v: Float[Tensor, "*batch params"]) -> Float[Tensor, "*batch params"]:
        refuse()

    def diagonal(self) -> Float[Tensor, " params"]:
        refuse()

    def dense(self) -> Float[Tensor, "params params"]:
        refuse()


@dataclass(frozen=True, eq=False)
class IndependentPrecision(Precision):
    """One precision per output. Rows in factored form must have one cotangent per output, in their order."""

    outputs: tuple[DualPrecision, ...]

    @property
    def size(self) -> int:
        return self.outputs[0].size

    def logdet(self) -> Float[Tensor, ""]:
        """log det D + sum_c log det(I + K_c), which is what the evidence needs."""
        first = self.outputs[0]
        seen = torch.stack([each.core.logdet() for each in self.outputs]).sum()
        return (seen + first.prior_logdet()).to(first.rows.dtype)

    def inverse_trace(self, groups: Int[Tensor, " params"] | None = None) -> Float[Tensor, " groups"]:
        """The derivative of `logdet` in the prior precision of every group, as the trace of one inverse would be."""
        first, *others = self.outputs
        total = first.inverse_trace(groups)
        if not others:
            return total
        weight = first.weight.expand(self.size)
        where = torch.zeros(self.size, dtype=torch.int64, device=weight.device) if groups is None else groups
        prior = weight.new_zeros(len(total)).index_add(0, where, weight)
        # an output changes the trace by what its data say; in float64, as that is a small difference
        seen = sum(prior - each.inverse_trace(groups).double() for each in others)
        return (total.double() - seen).to(total.dtype)

    def quadratic(self, pieces: Sequence[Piece]) -> Float[Tensor, "n r r"]:
        return torch.diag_embed(self.squares(pieces))

    def squares(self, pieces: Sequence[Piece]) -> Float[Tensor, "n r"]:
        check_outputs(pieces, len(self.outputs))
        each = [precision.squares(of_output(pieces, number)) for number, precision in enumerate(self.outputs)]
        return torch.cat(each, dim=-1)

    def variances(self, linear_map: LinearMap) -> Float[Tensor, "batch outputs"]:
        """All outputs at a time: each has a posterior of its own."""
        return torch.cat([self.squares(part.pieces()) for part in linear_map.parts()])

    def joint(self, rows: Float[Tensor, "batch outputs params"]) -> Float[Tensor, "batch outputs batch outputs"]:
        check_count(rows.shape[1], len(self.outputs))
        each = [precision.joint(rows[:, [number]])[:, 0, :, 0] for number, precision in enumerate(self.outputs)]
        return torch.diag_embed(torch.stack(each, dim=-1)).transpose(1, 2)

    def functional_draws(
        self, linear_map: LinearMap, n: int, generator: torch.Generator | None = None
    ) -> Float[Tensor, "n batch outputs"]:
        """Weights of its own are drawn for every output: C draws [n, P], one after the other."""
        check_count(linear_map.outputs, len(self.outputs))
        found = []
        for number, precision in enumerate(self.outputs):
            deltas = precision.draw(n, generator)
            # the rows are pulled back again for every output: kept, they might not fit the memory, nor would all draws
            parts = [
                push(of_output(part.pieces(), number), deltas, intermediate_bytes()) for part in linear_map.parts()
            ]
            found.append(torch.cat(parts, dim=1))
        return torch.cat(found, dim=-1)

    def mv(self, v: Float[Tensor, "*batch params"]) -> Float[Tensor, "*batch params"]:
        refuse()

    def solve(self, v: Float[Tensor, "*batch params"]) -> Float[Tensor, "*batch params"]:
        refuse()

    def draw(self, n: int, generator: torch.Generator | None = None) -> Float[Tensor, "n params"]:
        refuse()

    def variance(self) -> Float[Tensor, " params"]:
        refuse()


def of_output(pieces: Sequence[Piece], number: int) -> list[Piece]:
    """The rows of one output."""
    return [piece.of_cotangent(number) for piece in pieces]


def check_outputs(pieces: Sequence[Piece], count: int) -> None:
    check_count(pieces[0].shape[0], count)


def check_count(found: int, count: int) -> None:
    if found != count:
        raise CurvatureError(
            f"there are {found} outputs; expected {count}, as in the data of the fit: each of them has a posterior of "
            "its own. Use independent_outputs=False where their number varies."
        )


def refuse() -> NoReturn:
    raise CurvatureError(
        "with independent outputs every output has a posterior of its own over the weights, and there is no one "
        "Gaussian over them to draw weights from, or to give their curvature, variance or density; expected "
        "predictions, samples of functions, or the evidence. For weights use independent_outputs=False."
    )
