"""matrix_free: the GGN or Fisher by its products over the data, J^T H J v. Memory: a few vectors [P], a batch's graph.

A fit is one pass, which a preconditioner is estimated in, if there is to be one. What comes after it, a solve, a draw
or a log-determinant, goes over the data once per iteration: the loader and the model are kept, and have to stay what
they are. The order of the data may change, their number and the log-likelihood of the network may not; every pass
compares them.

A product with k vectors shares the forward pass of a batch. It costs about 3 k backward passes (J v, then J^T H J v),
or as many as H has columns, whatever k is, where that is less and the rows of J come in factored form.

Where there are few outputs in all, M, and so many weights that few vectors [P] fit into memory, systems are solved
among the outputs: the data are kept, and rows R = S^T J of a batch at a time made from them, for R R^T and products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.errors import CurvatureError, DataError
from lapwing.estimate.cotangents import Columns, Cotangents, empirical, exact, fisher
from lapwing.estimate.data_pass import Batches, Watched, linearised, repeated
from lapwing.estimate.dual_rows import LIMIT, joined_cotangents
from lapwing.estimate.exact_diagonal import diagonal
from lapwing.estimate.kronecker import kflr
from lapwing.likelihoods import Likelihood
from lapwing.linalg import Curvature, Effort, MatrixFree, Products
from lapwing.linalg.checks import normal
from lapwing.linalg.matrix_free import BLOCK_BYTES
from lapwing.linalg.recomputed import KEPT, RecomputedRows
from lapwing.linalg.rows import Piece, push
from lapwing.tangent import Linearisation, Tangent
from lapwing.tangent.inputs import map_tensors, take, tensors

PRECONDITIONERS: dict[str, Callable[..., Curvature] | None] = {"none": None, "diagonal": diagonal, "kron": kflr}
"""What conjugate gradients are preconditioned with, by name: an estimator, or None for the prior alone."""
SPACES = ("auto", "weights", "outputs")
"""Where systems are solved."""
FEW = 4096
"""Rows up to which "auto" solves among them: their Gram matrix takes 128 MB."""
TALL = 4
"""Weights per row from which "auto" solves among the rows."""


def matrix_free(
    tangent: Tangent,
    likelihood: Likelihood,
    batches: Batches,
    *,
    cotangents: Cotangents = exact,
    generator: torch.Generator | None = None,
    preconditioner: str = "none",
    tolerance: float | None = None,
    iterations: int = Effort.iterations,
    probes: int = Effort.probes,
    steps: int = Effort.steps,
    block: int | None = None,
    solve_in: str = "auto",
) -> MatrixFree:
    """sum_n J_n^T H_n J_n as a `MatrixFree`, which keeps the tangent and the batches, and goes over them again.

    `preconditioner` is "none" (the prior alone), "diagonal" or "kron"; it changes how often the data are read, and no
    result: measured, "none" reads them least often (docs/decisions/0019). The others are those of `linalg.Effort`;
    `tolerance` is 1e-8 in float64 and 1e-3 in float32 unless given.
    The `generator` gives the seed of the probes, 0 without one.

    `solve_in` "outputs" keeps the data and solves, under an isotropic prior, among their M outputs by a matrix [M, M]
    that is formed once; other priors are solved for among the weights, as with "weights". "auto" chooses the outputs
    where M is at most `FEW` and P / `TALL`, unless `block` says how many systems of P weights to solve at a time.
    """
    if cotangents not in (exact, fisher, empirical):
        raise CurvatureError(
            "matrix_free was asked for cotangents that are drawn; expected the same matrix in every pass: exact, "
            "fisher or empirical. Leave the estimator out, or use a structure that is summed up in one pass."
        )
    if preconditioner not in PRECONDITIONERS:
        raise CurvatureError(f"preconditioner is {preconditioner!r}; expected one of {list(PRECONDITIONERS)}.")
    if solve_in not in SPACES:
        raise CurvatureError(f"solve_in is {solve_in!r}; expected one of {list(SPACES)}.")
    if solve_in == "outputs" and preconditioner != "none":
        raise CurvatureError(
            f"preconditioner is {preconditioner!r} and solve_in 'outputs', where nothing is iterated; expected "
            "preconditioner='none', or solve_in='weights'."
        )
    if tolerance is None:
        tolerance = 1e-8 if tangent.space.dtype == torch.float64 else 1e-3
    seed = 0 if generator is None else int(torch.randint(2**62, (), generator=generator, device=generator.device))
    effort = Effort(tolerance, iterations, probes, steps, seed, block)
    again = repeated(batches)
    reported = again if isinstance(again, Watched) else None
    kept = DataProducts(
        replace(tangent, differentiable=False) if tangent.differentiable else tangent,
        likelihood,
        again if reported is None else reported.batches,
        cotangents,
    )
    near, estimator = None, PRECONDITIONERS[preconditioner]
    first = kept.watched(reported)
    if estimator is not None:
        return MatrixFree(kept, effort, estimator(tangent, likelihood, first, cotangents=cotangents))
    asked, free = solve_in == "outputs", solve_in == "auto" and block is None
    held = HeldData(kept, LIMIT if asked else min(FEW, kept.size // TALL) if free else 0, asked)
    for linear, y in linearised(tangent, likelihood, first):
        held.take(linear, y)
    return MatrixFree(kept, effort, near, rows=held.rows())


@dataclass
class _Sums:
    """Data points and their log-likelihood, and the size of its terms, in one pass."""

    points: int = 0
    total: float = 0.0
    terms: float = 0.0

    def add(self, log_prob: Tensor) -> None:
        log_prob = log_prob.detach().double()
        self.points, self.total = self.points + len(log_prob), self.total + float(log_prob.sum())
        self.terms += float(log_prob.abs().sum())


@dataclass(eq=False)
class DataProducts(Products):
    """J^T H J over all `batches`, one pass per call of `mv` and `draw`; `passes` counts them."""

    tangent: Tangent
    likelihood: Likelihood
    batches: Batches
    cotangents: Cotangents = exact
    passes: int = 0
    first: _Sums | None = None
    """Of the first whole pass, which all others are compared with."""

    @property
    def like(self) -> Float[Tensor, ""]:
        return torch.empty((), dtype=self.tangent.space.dtype, device=self.tangent.space.device)

    @property
    def size(self) -> int:
        return self.tangent.space.size

    @torch.no_grad()
    def mv(self, v: Float[Tensor, "k params"]) -> Float[Tensor, "k params"]:
        total = torch.zeros_like(v)
        for linear, y in self._pass():
            columns = self.columns(linear, y)
            if columns.count <= 3 * len(v) and self.factored(linear):
                for pieces in self.pulled(linear, columns):
                    along = push(pieces, v, self.tangent.budget)
                    for piece in pieces:
                        piece.pull(along, total)
            else:
                for number, each in enumerate(v):
                    total[number] += linear.rmv(self._curved(linear, y, linear.mv(each)))
        return total

    def factored(self, linear: Linearisation) -> bool:
        """Whether rows of J come as factors: those of other parameters, and of parts of tensors, would be [B, P]."""
        return not (linear.record.opaque or linear.record.derived or self.tangent.space.index is not None)

    def pulled(self, linear: Linearisation, columns: Columns) -> Iterator[list[Piece]]:
        """Rows R = S^T J of a batch in factored form, R^T R = J^T H J: a backward pass per column."""
        step = max(1, self.tangent.budget // 8 // max(1, linear.cotangent_bytes))
        for chunk in columns.chunked(step):
            yield linear.pull(chunk.to(self.like))

    def _curved(self, linear: Linearisation, y: Tensor, u: Float[Tensor, "batch *out"]) -> Float[Tensor, "batch *out"]:
        """H u at the outputs of a batch."""
        if self.cotangents is exact:
            return self.likelihood.hessian_mv(linear.value, y, u).to(u)
        total = torch.zeros_like(u)
        for chunk in self.columns(linear, y).chunked(_CHUNK):
            along = (chunk * u).flatten(2).sum(-1)
            total += torch.einsum("r b, r b ... -> b ...", along, chunk).to(u)
        return total

    @torch.no_grad()
    def draw(self, n: int, generator: torch.Generator | None = None) -> Float[Tensor, "n params"]:
        """sum_n J_n^T S_n eps_n with S S^T = H: its covariance is J^T H J."""
        total = self.like.new_zeros(n, self.size)
        for linear, y in self._pass():
            columns = self.columns(linear, y)
            if columns.count <= n and self.factored(linear):
                for pieces in self.pulled(linear, columns):
                    eps = normal((n, linear.batch, pieces[0].shape[0]), self.like, generator)
                    for piece in pieces:
                        piece.pull(eps, total)
                continue
            noise = linear.value.new_zeros(n, *linear.value.shape)
            for chunk in columns.chunked(_CHUNK):
                eps = normal((n, linear.batch, len(chunk)), self.like, generator)
                noise += torch.einsum("n b r, r b ... -> n b ...", eps, chunk.to(eps))
            for number, each in enumerate(noise):
                total[number] += linear.rmv(each)
        return total

    def diagonal(self) -> Float[Tensor, " params"]:
        return diagonal(self.tangent, self.likelihood, self.batches, cotangents=self.cotangents).diagonal()

    def columns(self, linear: Linearisation, y: Tensor) -> Columns:
        return self.cotangents(self.likelihood, linear.value, y, None)

    def watched(self, reported: Watched | None = None) -> Watched:
        """The batches, whose every pass is compared with the first; `reported` is told of them too."""
        sums = _Sums()

        def start() -> None:
            nonlocal sums
            sums = _Sums()
            if reported is not None:
                reported.start()

        def saw(value: Tensor, y: Tensor, log_prob: Tensor) -> None:
            sums.add(log_prob)
            if reported is not None:
                reported.saw(value, y, log_prob)

        def batches() -> Iterator[object]:
            yield from self.batches
            self.passes += 1
            self.first = self.first or sums
            self.compare(sums, self.first)

        return Watched(_Again(batches), start, saw)

    def _pass(self) -> Iterator[tuple[Linearisation, Tensor]]:
        return linearised(self.tangent, self.likelihood, self.watched())

    def compare(self, sums: _Sums, first: _Sums) -> None:
        """Refuses data, or weights, that are not those of the fit."""
        allowed = torch.finfo(self.tangent.space.dtype).eps ** 0.5 * (1 + sums.terms)
        if sums.points != first.points or abs(sums.total - first.total) > allowed:
            raise DataError(
                f"pass {self.passes} over the data had {sums.points} points with a log-likelihood of {sums.total:.6g}, "
                f"and the fit {first.points} with {first.total:.6g}; a matrix-free posterior reads its data again, and "
                "expected the same data and the same weights in every pass. Fit again if the model has changed; give a "
                "loader without augmentation and drop_last. Shuffling is fine."
            )


@dataclass
class _Batch:
    """Some data points, the rows that they make, and what the fit saw of them."""

    x: Any
    y: Tensor
    count: int
    seen: _Sums


@dataclass
class HeldData:
    """The data of a fit, copied, as long as they make no more than `limit` rows: what rows are made from again."""

    products: DataProducts
    limit: int
    asked: bool
    """Whether more rows are an error, and rows that are spelled out are kept too; otherwise there are none then."""
    batches: list[_Batch] = field(default_factory=list)
    count: int = 0

    def take(self, linear: Linearisation, y: Tensor) -> None:
        if not self.limit:
            return
        columns, products = self.products.columns(linear, y), self.products
        self.count += columns.count * linear.batch
        held = sum(each.numel() * each.element_size() for batch in self.batches for each in tensors(batch.x))
        factored = self.asked or products.factored(linear)
        if self.count > self.limit or held > BLOCK_BYTES or not factored:
            if self.asked:
                raise CurvatureError(
                    f"the data make {self.count} rows or more and take {held / 2**30:.2g} GiB, and solve_in is "
                    f"'outputs'; expected at most {self.limit} rows and {BLOCK_BYTES / 2**30:.2g} GiB. Use fewer data, "
                    "or solve_in='weights'."
                )
            self.limit, self.batches = 0, []
            return
        log_prob = products.likelihood.log_prob(linear.value, y)
        # rows of a batch are there at once: as many data points as fit a part of what may be kept
        each = max(1, columns.count * linear.cotangent_bytes // max(1, linear.batch))
        step = max(1, KEPT // 4 // each)
        for start in range(0, linear.batch, step):
            part = slice(start, min(start + step, linear.batch))
            sums = _Sums()
            sums.add(log_prob[part])
            x, target = (map_tensors(lambda t: t.detach().clone(), take(each, part)) for each in (linear.x, y))
            self.batches.append(_Batch(x, target, columns.count * sums.points, sums))

    def rows(self) -> RecomputedRows | None:
        if not self.batches:
            return None
        return RecomputedRows(self.products.size, tuple(batch.count for batch in self.batches), self.of_batch)

    def of_batch(self, number: int) -> list[Piece]:
        """S^T J of one batch, all columns: as many backward passes."""
        batch, products = self.batches[number], self.products
        ((linear, y),) = linearised(products.tangent, products.likelihood, [(batch.x, batch.y)])
        sums = _Sums()
        sums.add(products.likelihood.log_prob(linear.value, y))
        products.compare(sums, batch.seen)
        return joined_cotangents(list(products.pulled(linear, products.columns(linear, y))))


@dataclass(frozen=True)
class _Again:
    """Something to iterate over, made anew for every pass."""

    make: Callable[[], Iterator[object]]

    def __iter__(self) -> Iterator[object]:
        return self.make()


_CHUNK = 64
"""Cotangents of a batch that exist at once."""
