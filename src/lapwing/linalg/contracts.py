"""The two contracts every structure meets: `Curvature` [P, P], summed over data, and `Precision`, curvature + prior.

A curvature adds and scales; a precision solves, draws, and has a log-determinant. A structure decomposes itself once,
when the first precision is asked of it; every further prior then costs O(P) or so, and `logdet`, `solve` and
`covariance` are differentiable in the prior precision.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lapwing.errors import CurvatureError
from lapwing.linalg.budget import chunks, intermediate_bytes
from lapwing.linalg.checks import check_precisions, eigh
from lapwing.linalg.rows import Piece, push


@runtime_checkable
class LinearMap(Protocol):
    """The Jacobian of a network at a batch of inputs: [B, C, P], never spelled out unless asked."""

    @property
    def batch(self) -> int: ...

    @property
    def outputs(self) -> int: ...

    @property
    def value(self) -> Float[Tensor, "batch *out"]:
        """The network's output, the point that J is taken at."""
        ...

    def mv(self, v: Float[Tensor, " params"]) -> Float[Tensor, "batch *out"]: ...

    def rmv(self, u: Float[Tensor, "batch *out"]) -> Float[Tensor, " params"]: ...

    def rows(self) -> Float[Tensor, "batch outputs params"]: ...

    def parts(self) -> Iterator[LinearMap]:
        """The same map for consecutive sub-batches, each small enough for the memory budget."""
        ...

    def pieces(self) -> list[Piece]:
        """The rows in factored form, one cotangent per output."""
        ...

    def columns(self) -> Iterator[list[Piece]]:
        """`pieces` of consecutive outputs, as many at a time as the memory budget allows."""
        ...


class Curvature(ABC):
    """A symmetric positive semi-definite matrix [P, P] (or a Hessian, which may be indefinite), summed over data."""

    @property
    @abstractmethod
    def size(self) -> int:
        """P, the number of parameters."""

    @abstractmethod
    def __add__(self, other: Curvature) -> Curvature:
        """The sum of the two matrices: curvatures of two tasks, each perhaps scaled, at the same parameters."""

    @abstractmethod
    def __mul__(self, scale: float | int | Tensor) -> Curvature: ...

    @abstractmethod
    def mv(self, v: Float[Tensor, "*batch params"]) -> Float[Tensor, "*batch params"]: ...

    @abstractmethod
    def diagonal(self) -> Float[Tensor, " params"]: ...

    @abstractmethod
    def dense(self) -> Float[Tensor, "params params"]:
        """The matrix in flat parameter order; O(P^2) memory, for small P and for tests."""

    @abstractmethod
    def with_prior(self, precision: float | int | Tensor) -> Precision:
        """Curvature + diag(precision): a number for an isotropic prior, or a vector [P]."""

    def pooled(self, other: Curvature) -> Curvature:
        """The curvature of one data set of which the two have seen a part each, as if estimated in one pass.

        The sum, except where a curvature is no sum over data, as a Kronecker product is not.
        """
        return self + other

    def discounted(self, share: float) -> Curvature:
        """The curvature of the same data if each point counted for `share` of one; for `pooled`.

        A multiple, except where a curvature is no sum over data, as a Kronecker product is not. What grows with every
        batch that is added, as rows do, refuses.
        """
        return self * share

    def __rmul__(self, scale: float | int | Tensor) -> Curvature:
        return self * scale

    def to_matrix(self) -> Float[Tensor, "params params"]:
        """As `dense`."""
        return self.dense()

    def clone(self) -> Curvature:
        """A copy that shares no memory."""
        return deepcopy(self)

    def sweep(self, pieces: Sequence[Piece], precisions: Float[Tensor, " k"]) -> Float[Tensor, "k n r"]:
        """`with_prior(p).squares(pieces)` for each of k isotropic prior precisions p.

        Structures rotate the rows once and not k times; a Kronecker block states a relative error (below 1e-6).
        """
        precisions = check_precisions(precisions)
        return torch.stack([self.with_prior(precision).squares(pieces) for precision in precisions])

    def grouped_logdet(self, groups: Int[Tensor, " params"] | None) -> GroupedLogdet:
        """log det(scale * self + diag(precisions[groups])) as a function of precisions [groups] and scale, for many.

        What depends on the groups alone is found out once; None stands for one group of all parameters.
        """
        return ExpandedLogdet(self, groups, one_group(groups))

    def variances(self, linear_map: LinearMap, precisions: Float[Tensor, " k"]) -> Float[Tensor, "k batch outputs"]:
        """Variance of every output under each of k isotropic prior precisions, with one linearisation."""
        parts = [[self.sweep(pieces, precisions) for pieces in part.columns()] for part in linear_map.parts()]
        return _joined([_joined(columns, dim=2) for columns in parts], dim=1)


class GroupedLogdet(ABC):
    """log det(scale * curvature + diag(precisions[groups])), differentiable in both arguments."""

    @abstractmethod
    def __call__(self, precisions: Float[Tensor, " groups"], scale: float | int | Tensor = 1) -> Float[Tensor, ""]: ...


@dataclass(frozen=True, eq=False)
class ExpandedLogdet(GroupedLogdet):
    """By a precision for every parameter, or by one number where they are in one group."""

    curvature: Curvature
    groups: Int[Tensor, " params"] | None
    only: int | None

    def __call__(self, precisions: Float[Tensor, " groups"], scale: float | int | Tensor = 1) -> Float[Tensor, ""]:
        prior = precisions[self.groups] if self.only is None else precisions[self.only]
        return scaled(self.curvature, scale).with_prior(prior).logdet()


def one_group(groups: Int[Tensor, " params"] | None) -> int | None:
    """The number of the group that all parameters are in, if there is one; None stands for group 0 of all."""
    if groups is None:
        return 0
    return int(groups[0]) if len(groups) and bool((groups == groups[0]).all()) else None


AnyCurvature = TypeVar("AnyCurvature", bound=Curvature)


def scaled(curvature: AnyCurvature, scale: float | int | Tensor) -> AnyCurvature:
    """scale * curvature; the curvature itself, with what it has decomposed, for a plain 1."""
    return curvature if not isinstance(scale, Tensor) and scale == 1 else curvature * scale  # pyright: ignore[reportReturnType]


class Precision(ABC):
    """A symmetric positive definite matrix [P, P] that is solved with, sampled from and integrated."""

    @property
    @abstractmethod
    def size(self) -> int:
        """P, the number of parameters."""

    @abstractmethod
    def mv(self, v: Float[Tensor, "*batch params"]) -> Float[Tensor, "*batch params"]: ...

    @abstractmethod
    def solve(self, v: Float[Tensor, "*batch params"]) -> Float[Tensor, "*batch params"]:
        """precision^-1 v, in memory of its own."""

    def solve_into(self, v: Float[Tensor, " params"], out: Float[Tensor, " params"]) -> None:
        """`solve(v)` written to `out`; structures that can do so leave the copy out. No derivatives are taken."""
        out.copy_(self.solve(v))

    @abstractmethod
    def draw(self, n: int, generator: torch.Generator | None = None) -> Float[Tensor, "n params"]:
        """n draws from N(0, precision^-1)."""

    @abstractmethod
    def logdet(self) -> Float[Tensor, ""]: ...

    @abstractmethod
    def variance(self) -> Float[Tensor, " params"]:
        """The diagonal of the inverse."""

    @abstractmethod
    def quadratic(self, pieces: Sequence[Piece]) -> Float[Tensor, "n r r"]:
        """row[r,n] precision^-1 row[s,n]^T for rows in factored form, one data point at a time."""

    def to_matrix(self, exponent: float | int = 1) -> Float[Tensor, "params params"]:
        """The matrix, its inverse (-1) or another power of it; O(P^2) memory, for small P and for tests."""
        like = self.variance()
        eye = torch.eye(self.size, dtype=like.dtype, device=like.device)
        if exponent == 1:
            return self.mv(eye)
        if exponent == -1:
            return self.solve(eye)
        values, vectors = eigh(self.mv(eye))
        return (vectors * values**exponent) @ vectors.mT

    def clone(self) -> Precision:
        """A copy that shares no memory."""
        return deepcopy(self)

    def squares(self, pieces: Sequence[Piece]) -> Float[Tensor, "n r"]:
        """The diagonal of `quadratic`; structures that can do so leave the rest of it out."""
        return self.quadratic(pieces).diagonal(dim1=-2, dim2=-1)

    def variances(self, linear_map: LinearMap) -> Float[Tensor, "batch outputs"]:
        """The diagonal of `covariance`, without the rest of it: what many outputs allow."""
        parts = [[self.squares(pieces) for pieces in part.columns()] for part in linear_map.parts()]
        return _joined([_joined(columns, dim=1) for columns in parts])

    def covariance(self, linear_map: LinearMap) -> Float[Tensor, "batch outputs outputs"]:
        """J precision^-1 J^T of every input: the functional covariance, without [B, C, P]."""
        return _joined([self.quadratic(part.pieces()) for part in linear_map.parts()])

    def joint(self, rows: Float[Tensor, "batch outputs params"]) -> Float[Tensor, "batch outputs batch outputs"]:
        """J precision^-1 J^T between the outputs of all inputs, for rows that are spelled out."""
        return torch.einsum("b c p, d e p -> b c d e", rows, self.solve(rows))

    def functional_draws(
        self, linear_map: LinearMap, n: int, generator: torch.Generator | None = None
    ) -> Float[Tensor, "n batch outputs"]:
        """n draws of J v, v ~ N(0, precision^-1): a draw of the weights moves all inputs together, as it should.

        By products with J where there are more outputs than draws, which otherwise share the rows of J; as they do
        where derivatives in the inputs are asked for, of which every product with J would need the rows.
        """
        if n < linear_map.outputs and not linear_map.value.requires_grad:
            each = 2 * self.size * linear_map.value.element_size()
            found = []
            for part in chunks(n, each, intermediate_bytes()):
                found += [linear_map.mv(delta).flatten(1) for delta in self.draw(part.stop - part.start, generator)]
            return torch.stack(found)
        deltas = self.draw(n, generator)
        parts = [push(part.pieces(), deltas, intermediate_bytes()) for part in linear_map.parts()]
        return torch.cat(parts, dim=1)

    def inverse_trace(self, groups: Int[Tensor, " params"] | None = None) -> Float[Tensor, " groups"]:
        """Trace of the inverse, per group of parameters (group numbers 0..k as from `ParamSpace.groups`)."""
        variance = self.variance()
        if groups is None:
            return variance.sum().unsqueeze(0)
        check_groups(groups, self.size)
        return variance.new_zeros(int(groups.max()) + 1).index_add(0, groups, variance)


def check_groups(groups: Int[Tensor, " entries"], size: int) -> None:
    """A group number for every parameter."""
    if groups.shape != (size,) or bool((groups < 0).any()):
        raise CurvatureError(
            f"groups has shape {tuple(groups.shape)} and smallest number {int(groups.min())}; expected {size} "
            "(= P) numbers >= 0, as from ParamSpace.groups."
        )


def _joined(parts: list[Tensor], dim: int = 0) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


AnyCurvature = TypeVar("AnyCurvature", bound=Curvature)


@dataclass(frozen=True, eq=False)
class Multiple(Generic[AnyCurvature]):
    """What a scaled curvature is a multiple of, which is then not decomposed again.

    The eigenvectors are those of `of`, and the eigenvalues a product: derivatives in the scale (1 / sigma^2 of a
    regression) need none of the decomposition itself, which would be infinite for equal eigenvalues.
    """

    of: AnyCurvature
    scale: float | int | Tensor


def same_kind(ours: AnyCurvature, other: Curvature) -> AnyCurvature:
    """`other`, if it has the structure and the size of `ours`; an error otherwise."""
    if not isinstance(other, type(ours)) or other.size != ours.size:
        size = f" of size {other.size}" if isinstance(other, Curvature) else ""
        raise CurvatureError(
            f"cannot add {type(other).__name__}{size} to {type(ours).__name__} of size {ours.size}; expected the same "
            "structure over the same parameters. Fit both with one estimator and one parameter space."
        )
    return other
