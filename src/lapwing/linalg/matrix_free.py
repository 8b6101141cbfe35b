"""Matrix-free: a curvature [P, P] known by its products with vectors, H V for k vectors V [k, P] in one pass.

    H            `Products`: they go over the data; nothing of size N C or P^2 is kept
    solve        (H + D)^-1 b by preconditioned conjugate gradients, many b in one block
    variance     b^T (H + D)^-1 b = b^T x + x^T r + e, r = b - (H + D) x: 0 <= e <= r^T D^-1 r whatever x is
    draw         (H + D) v = g + D^1/2 xi, g ~ N(0, H): its law is N(0, (H + D)^-1)
    logdet       stochastic Lanczos quadrature with fixed probes: a standard error over them, a bracket for each

    memory       about eight vectors [P] per column of a block, and what a product takes
    few rows     H = R^T R with M rows, M far below P: under an isotropic prior all of the above from R R^T [M, M],
                 which is formed once by `RecomputedRows`; vectors [M] then, and [P] only where they are asked for
    priors       isotropic: one decomposition by Lanczos, then O(probes * steps) per prior or scale, without a product
                 any vector [P]: `steps` products per prior; its derivatives by a solve of all probes

Exact in the limit, for any network and any P. Every result has its error: `solved`, `log_determinant`, `inverse_traces`
and `bounded_variances` return it, and a `LapwingWarning` says where a tolerance was not met. Probes are the same in
every call, so that the evidence is a smooth function of the prior; with as many as there are parameters they are unit
vectors, and nothing is random.

>>> import torch
>>> curvature = MatrixFree(DenseProducts(torch.tensor([[1.0, 2.0, 2.0]]).double()), Effort(1e-9, probes=3))
>>> curvature.with_prior(1.0).logdet().exp()      # eigenvalues 9 + 1, 1, 1
tensor(10.0000, dtype=torch.float64)
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from lapwing.errors import CurvatureError, LapwingWarning
from lapwing.linalg.budget import chunks, intermediate_bytes
from lapwing.linalg.checks import check_finite, check_precisions, check_prior, check_scale, eigh_psd, normal
from lapwing.linalg.contracts import Curvature, LinearMap, Multiple, Precision, check_groups, same_kind
from lapwing.linalg.diagonal import DiagonalPrecision
from lapwing.linalg.krylov import Nodes, Product, Solution, Tridiagonal, conjugate_gradients, lanczos
from lapwing.linalg.recomputed import RecomputedRows
from lapwing.linalg.row_set import Adjoint
from lapwing.linalg.rows import Piece, assemble

EXCUSED = 1e-6
"""Relative error of a variance, due to rounding, that is below any use of it."""
SPELLED_OUT = 4096
"""Weights up to which their variances are solved for, one system each."""
BLOCK_BYTES = 2**30
"""What the vectors of a block may take; there are about eight per column."""
LARGEST_BLOCK = 1024


class Products(ABC):
    """A symmetric positive semi-definite matrix H [P, P] as what it does to vectors. Products take time, not memory."""

    @property
    @abstractmethod
    def like(self) -> Float[Tensor, ""]:
        """A number with the dtype and the device of the vectors."""

    @property
    @abstractmethod
    def size(self) -> int:
        """P."""

    @abstractmethod
    def mv(self, v: Float[Tensor, "k params"]) -> Float[Tensor, "k params"]:
        """H v for k vectors, in one pass."""

    @abstractmethod
    def draw(self, n: int, generator: torch.Generator | None = None) -> Float[Tensor, "n params"]:
        """n draws from N(0, H), in one pass."""

    @abstractmethod
    def diagonal(self) -> Float[Tensor, " params"]: ...


@dataclass(frozen=True, eq=False)
class DenseProducts(Products):
    """R^T R by its rows R [M, P], spelled out: for small problems and for tests."""

    rows: Float[Tensor, "m params"]

    @property
    def like(self) -> Float[Tensor, ""]:
        return self.rows.new_empty(())

    @property
    def size(self) -> int:
        return self.rows.shape[1]

    def mv(self, v: Float[Tensor, "k params"]) -> Float[Tensor, "k params"]:
        return (v @ self.rows.mT) @ self.rows

    def draw(self, n: int, generator: torch.Generator | None = None) -> Float[Tensor, "n params"]:
        return normal((n, len(self.rows)), self.rows, generator) @ self.rows

    def diagonal(self) -> Float[Tensor, " params"]:
        return self.rows.square().sum(0)


@dataclass(frozen=True, eq=False)
class SummedProducts(Products):
    """The sum of several, each with a factor: data sets that were added."""

    parts: tuple[tuple[Products, float], ...]

    @property
    def like(self) -> Float[Tensor, ""]:
        return self.parts[0][0].like

    @property
    def size(self) -> int:
        return self.parts[0][0].size

    def mv(self, v: Float[Tensor, "k params"]) -> Float[Tensor, "k params"]:
        return torch.stack([scale * part.mv(v) for part, scale in self.parts]).sum(0)

    def draw(self, n: int, generator: torch.Generator | None = None) -> Float[Tensor, "n params"]:
        return torch.stack([scale**0.5 * part.draw(n, generator) for part, scale in self.parts]).sum(0)

    def diagonal(self) -> Float[Tensor, " params"]:
        return torch.stack([scale * part.diagonal() for part, scale in self.parts]).sum(0)


@dataclass(frozen=True)
class Effort:
    """How much work goes into a result.

    `tolerance` is the relative residual of a solve, and the relative width of the bracket of a quadrature, or 100 times
    the rounding of the dtype where that is more; `iterations` the most products that a solve takes, `steps` those of a
    decomposition, `probes` the vectors that traces are taken with, `seed` their random numbers, and `block` how many
    systems are solved at once (None: by memory).
    """

    tolerance: float
    iterations: int = 1000
    probes: int = 16
    steps: int = 64
    seed: int = 0
    block: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.tolerance < 1:
            raise CurvatureError(f"tolerance is {self.tolerance}; expected a relative residual between 0 and 1.")
        for name, least in (("iterations", 2), ("probes", 2), ("steps", 1), ("block", 1)):
            value = getattr(self, name)
            if name == "block" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise CurvatureError(f"{name} is {value!r}; expected a whole number >= {least}.")

    def within(self, dtype: torch.dtype) -> float:
        """The tolerance that a dtype allows."""
        return max(self.tolerance, 100 * torch.finfo(dtype).eps)

    def columns(self, products: Products) -> int:
        """How many systems are solved at once."""
        each = 8 * products.size * products.like.dtype.itemsize
        return self.block or max(1, min(LARGEST_BLOCK, BLOCK_BYTES // max(1, each)))


@dataclass(frozen=True, eq=False)
class Estimate:
    """A number, or several, from probes: the standard error over them, and how wide the brackets of the rest are.

    `truncation` is what more steps of Lanczos, or more iterations, could still change.
    """

    value: Float[Tensor, "*groups"]
    standard_error: Float[Tensor, "*groups"]
    truncation: Float[Tensor, "*groups"]


@dataclass(frozen=True, eq=False)
class Bounded:
    """`value` is never above the truth, and the truth never above `value + excess`, but for rounding."""

    value: Float[Tensor, "batch outputs"]
    excess: Float[Tensor, "batch outputs"]


@dataclass(frozen=True, eq=False)
class MatrixFree(Curvature):
    """H by its products. `preconditioner` is a curvature near to it that is solved with; it changes no result.

    `rows` are R with R^T R = H where they are few; under an isotropic prior they are solved with instead.
    """

    products: Products
    effort: Effort
    preconditioner: Curvature | None = None
    multiple: Multiple[MatrixFree] | None = field(default=None, repr=False)
    rows: RecomputedRows | None = field(default=None, repr=False)

    @property
    def size(self) -> int:
        return self.products.size

    @property
    def scale(self) -> Float[Tensor, ""]:
        """What the products are multiplied by."""
        scale = 1 if self.multiple is None else self.multiple.scale
        like = self.products.like
        return torch.as_tensor(scale, dtype=like.dtype, device=like.device)

    def __add__(self, other: Curvature) -> MatrixFree:
        other = same_kind(self, other)
        if self.scale.requires_grad or other.scale.requires_grad:
            raise CurvatureError(
                "a curvature whose scale requires gradients is added to another; expected fixed scales. Add first and "
                "scale the sum: derivatives in the scale of a whole curvature are kept."
            )
        parts = [(each.products, float(each.scale)) for each in (self, other)]
        ours, theirs = self.preconditioner, other.preconditioner
        near = None if ours is None or theirs is None else ours * parts[0][1] + theirs * parts[1][1]
        rows = None
        if self.rows is not None and other.rows is not None and all(scale == 1 for _, scale in parts):
            rows = self.rows + other.rows
        return MatrixFree(SummedProducts(tuple(parts)), self.effort, near, rows=rows)

    def discounted(self, share: float) -> MatrixFree:
        raise CurvatureError(
            "a moving average of products grows with every batch; expected one of fixed size (kron, diag, "
            "blocks, full). Take the curvature of the present batch alone: moving_average=0."
        )

    def __mul__(self, scale: float | int | Tensor) -> MatrixFree:
        scale, root = check_scale(scale), self.multiple or Multiple(self, 1)
        multiple = Multiple(root.of, root.scale * scale)
        return MatrixFree(self.products, self.effort, self.preconditioner, multiple, self.rows)

    def clone(self) -> MatrixFree:
        """The same: it holds no numbers of its own that anyone could change."""
        return self

    def mv(self, v: Float[Tensor, "*batch params"]) -> Float[Tensor, "*batch params"]:
        flat = v.reshape(-1, self.size).to(self.products.like)
        return (self.scale * Adjoint.apply(flat, self._mv, self._mv)).to(v.dtype).reshape(v.shape)

    def _mv(self, v: Float[Tensor, "k params"]) -> Float[Tensor, "k params"]:
        if not len(v):
            return v
        return torch.cat([self.products.mv(part) for part in v.split(self.effort.columns(self.products))])

    def diagonal(self) -> Float[Tensor, " params"]:
        return self.scale * self.products.diagonal()

    def dense(self) -> Float[Tensor, "params params"]:
        like = self.products.like
        found = self.mv(torch.eye(self.size, dtype=like.dtype, device=like.device))
        return (found + found.mT) / 2

    def with_prior(self, precision: float | int | Tensor) -> MatrixFreePrecision:
        delta = check_prior(precision, self.size, self.products.like)
        if bool((delta == 0).any()):
            raise CurvatureError(
                "the prior precision is 0, so curvature + prior is not positive definite for all that products tell of "
                "it; expected numbers > 0, which also bound the error of every solve. Use a larger prior precision, or "
                "the full structure if the data determine every parameter."
            )
        scale = self.scale
        if not bool(torch.isfinite(scale)) or bool(scale < 0):
            raise CurvatureError(
                f"the curvature is multiplied by {float(scale)}; expected a finite number >= 0, as 1 / sigma**2 is."
            )
        return MatrixFreePrecision(self if self.multiple is None else self.multiple.of, scale, delta)

    @cached_property
    def gram(self) -> Float[Tensor, "m m"]:
        """R R^T of few rows, computed once; a multiple has that of what it multiplies."""
        if self.multiple is not None:
            return self.multiple.of.gram
        assert self.rows is not None
        gram = self.rows.gram()
        check_finite(gram, "the Gram matrix of the rows")
        return gram

    @cached_property
    def eigen(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues [M] and vectors [M, M] of `gram`."""
        if self.multiple is not None:
            return self.multiple.of.eigen
        return eigh_psd(self.gram, "the Gram matrix of the rows")

    @cached_property
    def spectrum(self) -> Tridiagonal:
        """H as the probes see it, computed once; a multiple has that of what it multiplies."""
        if self.multiple is not None:
            return self.multiple.of.spectrum
        return self.decomposed(None)

    def decomposed(self, roots: Float[Tensor, " params"] | None) -> Tridiagonal:
        """diag(1 / roots) H diag(1 / roots) as the probes see it, `effort.steps` products per block of probes."""

        def product(v: Tensor) -> Tensor:
            return self.products.mv(v) if roots is None else self.products.mv(v / roots) / roots

        with torch.no_grad():
            blocks = self.probes().split(self.effort.columns(self.products))
            return _stacked([lanczos(product, block, self.effort.steps) for block in blocks])

    @property
    def exact_traces(self) -> bool:
        """Whether there are as many probes as parameters, so that they are unit vectors."""
        return self.effort.probes >= self.size

    def probes(self) -> Float[Tensor, "probes params"]:
        """Vectors z with E[z z^T] = I / probes: entries -1 or 1 over sqrt(probes), or all unit vectors."""
        like = self.products.like
        if self.exact_traces:
            return torch.eye(self.size, dtype=like.dtype, device=like.device)
        count = self.effort.probes
        numbers = torch.Generator().manual_seed(self.effort.seed)
        signs = torch.randint(2, (count, self.size), generator=numbers, dtype=torch.int8) * 2 - 1
        return signs.to(like) / count**0.5

    def sweep(self, pieces: Sequence[Piece], precisions: Float[Tensor, " k"]) -> Float[Tensor, "k n r"]:
        """Every row starts one run of Lanczos, which serves all precisions."""
        precisions = check_precisions(precisions)
        first = self.with_prior(precisions.min())
        if first.few is not None:
            return first.few.swept(pieces, precisions.double()).to(self.products.like)
        found = [first.swept(rows, precisions.double()) for rows in _rows(pieces, self)]
        return torch.cat(found, dim=1).to(self.products.like)


@dataclass(frozen=True, eq=False)
class MatrixFreePrecision(Precision):
    """scale H + diag(delta), for a number delta or a vector [P]; `curvature` has the scale 1."""

    curvature: MatrixFree
    scale: Float[Tensor, ""]
    delta: Float[Tensor, ""] | Float[Tensor, " params"]

    @property
    def size(self) -> int:
        return self.curvature.size

    @property
    def effort(self) -> Effort:
        return self.curvature.effort

    @property
    def tolerance(self) -> float:
        return self.effort.within(self.delta.dtype)

    @cached_property
    def few(self) -> FewRows | None:
        """What is solved with among few rows; None where there are many, or the prior is no single number."""
        rows, delta = self.curvature.rows, self._one_number
        if rows is None or delta is None:
            return None
        return FewRows(self.curvature, rows, self.scale.double(), delta.double())

    def mv(self, v: Float[Tensor, "*batch params"]) -> Float[Tensor, "*batch params"]:
        return self.scale * self.curvature.mv(v) + self.delta * v

    # -- solves --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def solved(self, v: Float[Tensor, "k params"]) -> Solution:
        """precision^-1 v with the residuals that are left, k systems in blocks."""
        scale, delta, effort = self.scale.detach(), self.delta.detach(), self.effort

        def product(u: Tensor) -> Tensor:
            return scale * self.curvature.products.mv(u) + delta * u

        found = [
            conjugate_gradients(product, block, self._precondition, self.tolerance, effort.iterations)
            if self.few is None
            else self.few.solved(product, block, self.tolerance)
            for block in v.detach().to(self.curvature.products.like).split(effort.columns(self.curvature.products))
        ]
        if len(found) == 1:
            return found[0]
        joined = {name: torch.cat([getattr(each, name) for each in found]) for name in _JOINED}
        return Solution(**joined, products=sum(each.products for each in found))

    @cached_property
    def _precondition(self) -> Product:
        """v -> a matrix near to the inverse, times v; by the prior alone where nothing is known of the curvature."""
        delta, near = self.delta.detach(), self.curvature.preconditioner
        if near is None:
            return lambda v: v / delta
        return (near * self.scale.detach()).with_prior(delta).solve

    def solve(self, v: Float[Tensor, "*batch params"]) -> Float[Tensor, "*batch params"]:
        flat = v.reshape(-1, self.size).to(self.curvature.products.like)
        if not len(flat):
            return v
        return _Solve.apply(flat, self.scale, self.delta, self).to(v.dtype).reshape(v.shape)  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]

    def checked(self, v: Float[Tensor, "k params"], what: str) -> Solution:
        """`solved`, and a warning where a residual is too large."""
        found = self.solved(v)
        if not bool(found.converged.all()):
            warnings.warn(
                f"{int((~found.converged).sum())} of {len(v)} systems for {what} were not solved: the relative "
                f"residual is {found.worst:.1e} after {found.products} products, and tolerance {self.tolerance:.1e}. "
                "Allow more iterations, a larger tolerance or prior precision, another preconditioner, or float64.",
                LapwingWarning,
                stacklevel=3,
            )
        return found

    # -- rows ----------------------------------------------------------------------------------------------------------

    def quadratic(self, pieces: Sequence[Piece]) -> Float[Tensor, "n r r"]:
        if self.few is not None:
            return self.few.quadratic(pieces).to(self.delta.dtype)
        found = []
        for rows in _rows(pieces, self.curvature):
            if self._differentiated(rows):
                found.append(torch.einsum("n r p, n s p -> n r s", rows, self.solve(rows)))
                continue
            solution = self.checked(rows.flatten(0, 1), "a covariance")
            x, rest = (each.unflatten(0, rows.shape[:2]) for each in (solution.value, solution.residual))
            gram = rows @ x.mT + x @ rest.mT
            found.append((gram + gram.mT) / 2)
        return torch.cat(found)

    def squares(self, pieces: Sequence[Piece]) -> Float[Tensor, "n r"]:
        if self.few is not None:
            return self.few.bounded(pieces).value.to(self.delta.dtype)
        found = []
        for rows in _rows(pieces, self.curvature):
            if self._differentiated(rows):
                found.append((rows * self.solve(rows)).sum(-1))
            else:
                found.append(self._bounded(rows).value)
        return torch.cat(found)

    def bounded_variances(self, linear_map: LinearMap) -> Bounded:
        """`variances`, with what each may be too small by."""
        if self.few is not None:
            few = self.few
            every = [[few.bounded(pieces) for pieces in part.columns()] for part in linear_map.parts()]
            value, excess = (
                torch.cat([torch.cat([getattr(each, name) for each in part], 1) for part in every])
                for name in ("value", "excess")
            )
            return Bounded(value.to(self.delta.dtype), excess.to(self.delta.dtype))
        parts = [self._bounded(rows) for part in linear_map.parts() for rows in _rows(part.pieces(), self.curvature)]
        return Bounded(torch.cat([part.value for part in parts]), torch.cat([part.excess for part in parts]))

    def _bounded(self, rows: Float[Tensor, "n r params"]) -> Bounded:
        flat = rows.detach().flatten(0, 1)
        solution = self.checked(flat, "a variance")
        value = (flat * solution.value + solution.value * solution.residual).sum(-1)
        excess = (solution.residual.square() / self.delta.detach()).sum(-1)
        return Bounded(*(each.unflatten(0, rows.shape[:2]) for each in (value, excess)))

    def _differentiated(self, rows: Tensor) -> bool:
        return torch.is_grad_enabled() and any(t.requires_grad for t in (rows, self.scale, self.delta))

    def swept(self, rows: Float[Tensor, "n r params"], precisions: Float[Tensor, " k"]) -> Float[Tensor, "k n r"]:
        """b^T (scale H + p)^-1 b for every row and each of k isotropic precisions; `delta` is the smallest.

        Differentiable in the precisions and in the scale, not in the rows.
        """
        scale, tolerance = self.scale.double(), self.tolerance

        def values(rule: Nodes, over: Tensor) -> Tensor:
            nodes, weights = rule
            return (weights / (scale * nodes + over[:, None, None])).sum(-1)

        def width(found: Tridiagonal) -> float:
            low, high = (values(rule, self.delta.double().reshape(1)) for rule in (found.gauss, found.radau))
            return float(((high - low) / high.clamp_min(torch.finfo(high.dtype).tiny)).max())

        flat, effort = rows.detach().flatten(0, 1), self.effort
        with torch.no_grad():
            found = [
                lanczos(self.curvature.products.mv, block, effort.iterations, lambda t: width(t) <= tolerance)
                for block in flat.split(effort.columns(self.curvature.products))
            ]
            worst = max(map(width, found))
            largest = max(float(each.gauss[0].max()) for each in found)
            # eigenvalues are known to the rounding of the largest, and so is a bracket: no warning where that is small
            rounding = 100 * torch.finfo(scale.dtype).eps * largest * float(scale / self.delta)
            tolerance = max(tolerance, min(rounding, EXCUSED))
        if worst > tolerance:
            warnings.warn(
                f"variances under prior precisions from {float(precisions.min()):.3g} on are known to a "
                f"relative {worst:.1e} after {found[0].diagonal.shape[1]} products, and tolerance is {tolerance:.1e}. "
                "Allow more iterations or a larger tolerance, or leave the smallest precisions out.",
                LapwingWarning,
                stacklevel=3,
            )
        return torch.cat([values(each.gauss, precisions) for each in found], 1).unflatten(1, rows.shape[:2])

    def variance(self) -> Float[Tensor, " params"]:
        if self.size > SPELLED_OUT:
            raise CurvatureError(
                f"the variance of each of {self.size} weights was asked of a matrix-free posterior, which solves a "
                f"system for every one; expected at most {SPELLED_OUT}. Take it from draws, whose relative standard "
                "error is sqrt(2 / n): la.sample(n).var(0). Variances of outputs and the trace need no such thing."
            )
        like = self.curvature.products.like
        eye = torch.eye(self.size, dtype=like.dtype, device=like.device)
        if self._differentiated(eye):
            return self.solve(eye).diagonal()
        blocks = eye.split(self.effort.columns(self.curvature.products))
        return torch.cat([self._bounded(block.unsqueeze(0)).value[0] for block in blocks])

    # -- draws ---------------------------------------------------------------------------------------------------------

    def draw(self, n: int, generator: torch.Generator | None = None) -> Float[Tensor, "n params"]:
        if self.few is not None:
            return self.few.draw(n, generator)
        return self.drawn(n, generator).value

    @torch.no_grad()
    def drawn(self, n: int, generator: torch.Generator | None = None) -> Solution:
        """`draw`, with the residuals: a draw of prior and data noise, and one system for each."""
        products = self.curvature.products
        noise = normal((n, self.size), products.like, generator) * self.delta.sqrt()
        for start in range(0, n, self.effort.columns(products)):
            part = noise[start : start + self.effort.columns(products)]
            part += self.scale.sqrt() * products.draw(len(part), generator)
        if not n:
            return Solution(noise, noise, noise.new_zeros(0), noise.new_zeros(0).bool(), 0)
        return self.checked(noise, "draws")

    # -- traces --------------------------------------------------------------------------------------------------------

    def inverse_trace(self, groups: Int[Tensor, " params"] | None = None) -> Float[Tensor, " groups"]:
        return self.inverse_traces(groups).value

    def inverse_traces(self, groups: Int[Tensor, " params"] | None = None) -> Estimate:
        """tr precision^-1 per group and its errors; without a product for one group and an isotropic prior."""
        if groups is not None:
            check_groups(groups, self.size)
        if self._one_number is not None and (groups is None or not bool(groups.any())):
            found = self._summed(
                lambda t: t / (1 + t), self._one_number
            )  # gamma, the parameters that the data determine
            trace = (self.size - found.value) / self._one_number
            rest = (each / self._one_number for each in (found.standard_error, found.truncation))
            return Estimate(*(each.reshape(1) for each in (trace, *rest)))
        if groups is None:
            groups = torch.zeros(self.size, dtype=torch.int64, device=self.delta.device)
        sums, widths = [], []
        for diagonals, width in self._probed():
            zeros = diagonals.new_zeros(len(diagonals), int(groups.max()) + 1)
            sums.append(zeros.index_add(1, groups, diagonals))
            widths.append(zeros.index_add(1, groups, width))
        each, truncation = torch.cat(sums), torch.cat(widths).sqrt().sum(0)
        return Estimate(each.sum(0), self._error(each), truncation)

    def inverse_diagonal(self) -> Float[Tensor, " params"]:
        """diag(precision^-1) by the probes: unbiased, each entry with the error of few draws; sums of many are good."""
        return torch.stack([diagonals.sum(0) for diagonals, _ in self._probed()]).sum(0)

    def _probed(self) -> Iterator[tuple[Float[Tensor, "k params"], Float[Tensor, "k params"]]]:
        """What every probe says of diag(precision^-1), and the square of what is wrong with it, in blocks."""
        delta = self.delta.detach()
        for probes in self.curvature.probes().split(self.effort.columns(self.curvature.products)):
            found = self.checked(probes * delta.sqrt(), "a trace")
            rest = (found.residual.square() / delta).sum(1, keepdim=True)
            yield probes * found.value / delta.sqrt(), probes.square() / delta.square() * rest

    @property
    def _one_number(self) -> Float[Tensor, ""] | None:
        """The precision of an isotropic prior, also where it is spelled out for every parameter."""
        if self.delta.dim() == 0:
            return self.delta
        if self.delta.requires_grad or bool((self.delta != self.delta[0]).any()):
            return None
        return self.delta[0]

    @cached_property
    def _whitened(self) -> Tridiagonal:
        """D^-1/2 H D^-1/2 as the probes see it."""
        return self.curvature.decomposed(self.delta.detach().sqrt())

    def _summed(self, function: Callable[[Tensor], Tensor], delta: Tensor | None) -> Estimate:
        """tr f(scale D^-1/2 H D^-1/2) by the probes; for one delta by a decomposition that is there for all.

        Among few rows the eigenvalues are known, and f is 0 at all others, which are 0.
        """
        if delta is not None and self.few is not None:
            value = function(self.few.eigenvalues).sum().to(self.delta.dtype)
            return Estimate(value, torch.zeros_like(value), torch.zeros_like(value))
        found = self._whitened if delta is None else self.curvature.spectrum
        scale = self.scale.double() / (1 if delta is None else delta.double())

        def each(rule: Nodes) -> Tensor:
            nodes, weights = rule
            return (weights * function(scale * nodes)).sum(1)

        high, low = each(found.gauss), each(found.radau).detach()
        error, width = self._error(high.detach()), (high.detach() - low).sum().abs()
        return Estimate(*(value.to(self.delta.dtype) for value in (high.sum(), error, width)))

    def _error(self, each: Float[Tensor, "probes *groups"]) -> Float[Tensor, "*groups"]:
        """The standard error of a sum over probes."""
        if self.curvature.exact_traces:
            return torch.zeros_like(each[0])
        return each.std(0) * len(each) ** 0.5

    def log_determinant(self) -> Estimate:
        """log det, the standard error over the probes, and what more steps could change."""
        delta = self._one_number
        found = self._summed(torch.log1p, delta)
        prior = self.delta.double().log().sum() if self.delta.dim() else self.size * self.delta.double().log()
        value = (prior.to(self.delta.dtype) if delta is not None else prior.detach().to(self.delta.dtype)) + found.value
        found = Estimate(value, found.standard_error, found.truncation)
        within = max(self.tolerance * float(value.detach().abs()), float(found.standard_error))
        if float(found.truncation) > within:
            warnings.warn(
                f"the log-determinant {float(value.detach()):.6g} may be too large by {float(found.truncation):.3g} "
                f"after {self.effort.steps} steps of Lanczos, more than its standard error "
                f"{float(found.standard_error):.3g} and than tolerance {self.tolerance:.1e} of it. Allow more "
                "steps, or a larger prior precision.",
                LapwingWarning,
                stacklevel=3,
            )
        return found

    def logdet(self) -> Float[Tensor, ""]:
        if self._one_number is None and torch.is_grad_enabled():
            return _Logdet.apply(self.scale, self.delta, self)  # pyright: ignore[reportReturnType]
        return self.log_determinant().value


@dataclass(frozen=True, eq=False)
class FewRows:
    """scale R^T R + delta I by its M rows, K = scale / delta R R^T [M, M], in float64.

    With c = scale^1/2 / delta R b, w that solves (I + K) w = c and leaves rho, b^T (..)^-1 b is

        b^T b / delta - c^T w - (w + rho)^T rho + e,    0 <= e <= rho^T K rho,

    the bound of `MatrixFreePrecision` for x = (b - scale^1/2 R^T w) / delta, whose residual is -scale^1/2 R^T rho.
    """

    curvature: MatrixFree
    rows: RecomputedRows
    scale: Float[Tensor, ""]
    delta: Float[Tensor, ""]

    @property
    def eigenvalues(self) -> Float[Tensor, " m"]:
        """Those of K: of the curvature in units of the prior precision."""
        return self.scale / self.delta * self.curvature.eigen[0]

    def core_solve(self, u: Float[Tensor, "*batch m"]) -> Float[Tensor, "*batch m"]:
        """(I + K)^-1 u."""
        vectors = self.curvature.eigen[1]
        return ((u @ vectors) / (1 + self.eigenvalues)) @ vectors.mT

    def crossed(self, pieces: Sequence[Piece]) -> Iterator[tuple[list[Piece], Float[Tensor, "n r m"]]]:
        """Other rows in float64, a few data points at a time, and their products with R."""
        count, batch = pieces[0].shape
        for points in chunks(batch, 4 * 8 * count * self.rows.count, intermediate_bytes()):
            own = [piece.of_points(points) for piece in pieces]
            yield own, self.rows.cross(own).mT.unflatten(0, (-1, count))

    @property
    def _prior(self) -> DiagonalPrecision:
        """The identity: what rows are squared with, to be divided by delta."""
        return DiagonalPrecision(torch.ones((), dtype=torch.float64, device=self.delta.device).expand(self.rows.size))

    def quadratic(self, pieces: Sequence[Piece]) -> Float[Tensor, "n r r"]:
        found = []
        for own, cross in self.crossed(pieces):
            white = (cross @ self.curvature.eigen[1]) * (1 + self.eigenvalues).rsqrt()
            seen = self.scale / self.delta.square() * (white @ white.mT)
            found.append(self._prior.quadratic(own) / self.delta - seen)
        return torch.cat(found)

    def bounded(self, pieces: Sequence[Piece]) -> Bounded:
        """The variance of every row, and what it may be too small by but for rounding."""
        values, excesses = [], []
        for own, cross in self.crossed(pieces):
            c = self.scale.sqrt() / self.delta * cross
            w = self.core_solve(c)
            rho = c - w - self._times(w)
            values.append(self._prior.squares(own) / self.delta - (c * w).sum(-1) - ((w + rho) * rho).sum(-1))
            excesses.append((rho * self._times(rho)).sum(-1))
        return Bounded(torch.cat(values), torch.cat(excesses))

    def _times(self, u: Float[Tensor, "*batch m"]) -> Float[Tensor, "*batch m"]:
        """K u."""
        return self.scale / self.delta * (u @ self.curvature.gram)

    def swept(self, pieces: Sequence[Piece], precisions: Float[Tensor, " k"]) -> Float[Tensor, "k n r"]:
        """The variance of every row under each of k precisions in the place of delta: rows meet R once."""
        values, found = self.curvature.eigen[0].unsqueeze(1), []
        for own, cross in self.crossed(pieces):
            rotated = (cross @ self.curvature.eigen[1]).square()
            seen = rotated @ (self.scale / (precisions * (precisions + self.scale * values)))
            found.append(self._prior.squares(own).unsqueeze(-1) / precisions - seen)
        return torch.cat(found).movedim(-1, 0)

    def solved(self, product: Product, target: Float[Tensor, "k params"], tolerance: float) -> Solution:
        """The inversion lemma, and the residual by a product over the data."""
        with torch.no_grad():
            x = target / self.delta.to(target)
            inner = self.core_solve(self.rows.push(x).double())
            self.rows.pull(-self.scale / self.delta * inner, x)
            residual = target - product(x)
        length, norm = target.norm(dim=1), residual.norm(dim=1)
        relative = torch.where(length > 0, norm / length, norm)
        return Solution(x, residual, relative, norm <= tolerance * length, 1)

    @torch.no_grad()
    def draw(self, n: int, generator: torch.Generator | None = None) -> Float[Tensor, "n params"]:
        """A draw of the prior, moved by what the data, with noise of their own, say of it: n vectors [P] in all."""
        theta = normal((n, self.rows.size), self.curvature.products.like, generator)
        theta *= self.delta.rsqrt().to(theta)
        noise = normal((n, self.rows.count), self.delta, generator)
        seen = self.core_solve(self.scale.sqrt() * self.rows.push(theta).double() + noise)
        self.rows.pull(-self.scale.sqrt() / self.delta * seen, theta)
        return theta


class _Logdet(torch.autograd.Function):
    """log det(scale H + D): its derivative is diag(precision^-1) in D, and tr(precision^-1 H) in the scale.

    By the same probes as the value; of the value with these probes it is the derivative up to their error.
    """

    @staticmethod
    def forward(ctx, scale: Tensor, delta: Tensor, precision: MatrixFreePrecision) -> Tensor:
        ctx.precision = MatrixFreePrecision(precision.curvature, scale.detach(), delta.detach())
        return ctx.precision.log_determinant().value

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        precision: MatrixFreePrecision = ctx.precision
        inverse = precision.inverse_diagonal()
        determined = precision.size - (precision.delta * inverse).sum()
        return grad * determined / precision.scale, grad * inverse, None


class _Solve(torch.autograd.Function):
    """x = (scale H + D)^-1 v: dx = precision^-1 (dv - dD x - dscale H x), one more solve for all derivatives."""

    @staticmethod
    def forward(ctx, v: Tensor, scale: Tensor, delta: Tensor, precision: MatrixFreePrecision) -> Tensor:
        ctx.precision = MatrixFreePrecision(precision.curvature, scale.detach(), delta.detach())
        x = precision.checked(v, "a solve").value
        ctx.save_for_backward(v, x)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        precision: MatrixFreePrecision = ctx.precision
        (v, x), (_, in_scale, in_delta, _) = ctx.saved_tensors, ctx.needs_input_grad
        back = precision.checked(grad, "a derivative").value
        by_delta = -(back * x).sum(0) if in_delta else None
        if by_delta is not None and precision.delta.dim() == 0:
            by_delta = by_delta.sum()
        by_scale = -(back * (v - precision.delta * x)).sum() / precision.scale if in_scale else None
        return back, by_scale, by_delta, None


_JOINED = ("value", "residual", "relative", "converged")


def _rows(pieces: Sequence[Piece], curvature: MatrixFree) -> Iterator[Float[Tensor, "n r params"]]:
    """Rows spelled out, as many data points at a time as a block has columns, and at least one."""
    count, batch = pieces[0].shape
    step = max(1, curvature.effort.columns(curvature.products) // max(1, count))
    for start in range(0, batch, step):
        yield assemble(pieces, curvature.size, slice(start, min(start + step, batch))).transpose(0, 1)


def _stacked(found: list[Tridiagonal]) -> Tridiagonal:
    """Those of several blocks; what a shorter one lacks are zeros, of weight zero."""
    steps = max(each.diagonal.shape[1] for each in found)

    def padded(values: Tensor) -> Tensor:
        return torch.nn.functional.pad(values, (0, steps - values.shape[1]))

    return Tridiagonal(
        torch.cat([padded(each.diagonal) for each in found]),
        torch.cat([padded(each.beside) for each in found]),
        torch.cat([each.squares for each in found]),
    )
