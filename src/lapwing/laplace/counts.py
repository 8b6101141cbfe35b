"""Counts: what a network and its data are made of, from one recorded pass over one batch, and what structures do.

    Counts     weights P, data points N, outputs C, and per layer: rows O, columns I, groups K, positions T
    Work       operations by kind: products, small products, numbers moved, decompositions, passes; and bytes

`fit_work` and `prediction_work` say in formulas what each structure costs; `machine_rates` says what an operation costs
on this machine. Constants in the formulas are how often the code goes over a tensor, or what share of a large
product's speed a product of that shape has; `benchmarks/plan.py` compares the results with reality.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

from lapwing.estimate.data_pass import JOINED
from lapwing.estimate.dual_rows import LIMIT
from lapwing.estimate.leading_eigenpairs import GRAM_ROWS, OVERSAMPLING, PASSES
from lapwing.linalg.budget import CACHE
from lapwing.linalg.dense import LARGE


@dataclass(frozen=True)
class Layer:
    """A weight as K matrices [O, I] that meet T positions of every data point, or a vector (O = size, I = 1).

    `kind` is "matrix" (a bias counts as a column), "table" or "vector".
    """

    kind: str
    rows: int
    cols: int
    groups: int = 1
    positions: int = 1

    @property
    def size(self) -> int:
        return self.groups * self.rows * self.cols

    def factors(self, options: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
        """(how many, width) of the matrices that kron keeps of it; a width of 0 stands for diagonals."""
        if self.kind == "vector":
            return ((1, self.size),) if self.size <= options.get("dense_limit", 1024) else ()
        wide = options.get("wide_limit", 8192)
        sides = (self.cols,) if self.kind == "table" else (self.rows, self.cols)
        return tuple((self.groups, side) for side in sides if side <= wide)


@dataclass(frozen=True)
class Counts:
    """`columns` is how many cotangents the likelihood has per data point, `entries` the outputs of all layers of one.

    `graph` are bytes that the graph of one data point holds, and `item` those of a number.
    """

    weights: int
    points: int
    batch: int
    outputs: int
    columns: int
    layers: tuple[Layer, ...]
    entries: int
    graph: int
    item: int
    closed: bool = False
    """Whether it is a last layer, which needs no backward pass."""

    @property
    def rows(self) -> int:
        """Rows of the whole data, N C."""
        return self.points * self.columns

    @property
    def batches(self) -> int:
        return ceil(self.points / self.batch)

    def of_batch(self, size: int) -> Counts:
        return replace(self, points=size, batch=size)


@dataclass
class Work:
    """Operations by kind, added up; `peak` are bytes beyond what is `kept`."""

    forward: float | int = 0  # data points through a recorded forward pass
    backward: float | int = 0  # data points times cotangents, back to every layer
    tape: float | int = 0  # data points through a pass that walks back over every operation
    products: float | int = 0  # multiplications and additions in large products
    small: float | int = 0  # the same in many small ones
    moved: float | int = 0  # bytes read and written
    calls: float | int = 0  # operations that are started
    decomposed: list[tuple[float | int, int]] = field(default_factory=list)  # (how many, width) of symmetric matrices
    kept: float | int = 0
    peak: float | int = 0
    refused: str = ""


# -- what all share ----------------------------------------------------------------------------------------------------


def _pass(counts: Counts, work: Work, cotangents: int, budget: int, predicts: bool = False) -> None:
    """Every batch forwards, and back once per cotangent."""
    work.forward += counts.points
    work.calls += counts.batches * (20 + 12 * len(counts.layers))
    if not counts.closed:
        work.backward += counts.points * cotangents
        work.calls += counts.batches * 12 * len(counts.layers)
    work.peak = max(work.peak, _passing(counts, cotangents, budget, predicts))


def _joined(counts: Counts, structure: str) -> Counts:
    """With small batches side by side, as fits of diagonals and Kronecker factors take them (`data_pass.JOINED`)."""
    often = {"diag": 1, "kron": 2, "ekfac": 2}.get(structure, 0)
    first = next((layer for layer in counts.layers if layer.kind == "matrix"), None)
    if counts.closed or not often or first is None:
        return counts
    each = counts.item * (first.cols * first.positions + 3 * counts.entries)
    together = min(counts.batches, often * JOINED // (each * counts.batch))
    return replace(counts, batch=counts.batch * max(1, together))


def _passing(counts: Counts, cotangents: int, budget: int, predicts: bool) -> float | int:
    """Bytes of a batch on its way: its graph, a chunk of cotangents at every layer, and the inputs at all positions.

    A fit sends a few back at a time, or as many as a twelfth of the budget holds (decision 0023).
    """
    graph = counts.graph * counts.batch
    if counts.closed:
        return graph
    one = counts.entries * counts.item * counts.batch
    most = budget // max(1, 3 * one) if predicts else max(4, budget // max(1, 12 * one))
    at_once = max(1, min(cotangents, most))
    patches = sum(
        counts.batch * layer.positions * layer.groups * layer.cols * counts.item
        for layer in counts.layers
        if layer.kind == "matrix" and layer.positions > 1
    )
    return graph + 1.3 * at_once * one + min(patches, 2 * CACHE)  # patches are made for a few data points at a time


def _factor_products(counts: Counts, work: Work, options: Mapping[str, Any]) -> None:
    n, r, most = counts.points, counts.columns, 0.0
    for layer in counts.layers:
        if layer.kind == "vector":
            if layer.size <= options.get("dense_limit", 1024):
                work.products += n * r * layer.size**2
            work.moved += 3 * n * r * layer.size * counts.item
            continue
        k, t, wide = layer.groups, layer.positions, options.get("wide_limit", 8192)
        if layer.kind == "matrix" and layer.cols <= wide:
            work.products += n * t * k * layer.cols**2
        if layer.kind == "matrix" and layer.rows <= wide:
            work.products += n * r * t * k * layer.rows**2
        if layer.kind == "table":
            work.products += n * r * t * layer.cols**2
        work.moved += 2 * n * t * k * (layer.cols + r * layer.rows) * counts.item
        most += sum(min(1024, 2 * width) * width for _, width in layer.factors(options))
    work.peak += most * counts.item / 2


def _factor_bytes(counts: Counts, options: Mapping[str, Any]) -> float | int:
    return sum(many * width**2 for layer in counts.layers for many, width in layer.factors(options)) * counts.item


def _eigen(counts: Counts, work: Work, options: Mapping[str, Any], times: int = 1) -> None:
    """Every factor once, in float64."""
    for layer in counts.layers:
        for many, width in layer.factors(options):
            work.decomposed.append((times * many, width))
    widest = max((width for layer in counts.layers for _, width in layer.factors(options)), default=0)
    work.peak = max(work.peak, 4 * 8 * widest**2)


def _formed(counts: Counts, work: Work, rows: int) -> None:
    """The rows of every layer with shared positions, formed for a few data points at a time."""
    for layer in counts.layers:
        if layer.kind == "matrix" and layer.positions > 1:
            work.small += 2 * rows * layer.positions * layer.size
            work.moved += 4 * rows * layer.size * counts.item


# -- one function per structure ----------------------------------------------------------------------------------------


def _diagonal(counts: Counts, work: Work) -> None:
    _formed(counts, work, counts.points * counts.columns)
    for layer in counts.layers:
        if layer.kind != "matrix" or layer.positions == 1:
            work.products += 2 * counts.points * layer.size
            work.moved += 3 * counts.points * counts.columns * layer.rows * counts.item


def fit_work(structure: str, counts: Counts, options: Mapping[str, Any], budget: int) -> Work:
    """From data to a posterior that is ready to predict: passes, sums and decompositions."""
    work, p, item = Work(), counts.weights, counts.item
    if structure == "matrix_free":
        _pass(counts, work, 0, budget)
        return work
    if structure in ("propagated_diag", "mixed_diag"):
        work.forward, work.tape = counts.points, counts.points
        work.calls = counts.batches * 60 * len(counts.layers)
        work.kept, work.peak = item * p, item * p + 3 * counts.graph * counts.batch
        return work
    _pass(_joined(counts, structure), work, counts.columns, budget)
    rows = min(counts.rows, counts.batch * counts.columns)
    if structure in ("kron", "ekfac"):
        _factor_products(counts, work, options)
        work.kept = _factor_bytes(counts, options)
        _eigen(counts, work, options)
        if structure == "ekfac":
            _pass(counts, work, counts.columns, budget)
            for layer in counts.layers:
                if layer.kind == "matrix" and layer.positions == 1:
                    work.products += 4 * counts.points * (layer.cols**2 + layer.size)
                    work.products += 2 * counts.points * counts.columns * layer.rows**2
                elif layer.kind == "matrix":
                    work.small += 2 * counts.points * counts.columns * layer.size * min(layer.rows, layer.positions)
            _formed(counts, work, 2 * counts.points * counts.columns)
            work.kept += 2 * item * p
            work.decomposed += [(many, width) for layer in counts.layers for many, width in layer.factors(options)][
                1::2
            ]
        else:
            work.kept = 2 * work.kept + item * p  # with the eigenvectors, and an eigenvalue for every weight
    elif structure == "diag":
        _diagonal(counts, work)
        work.kept, work.peak = 2 * item * p, work.peak + item * max((layer.size for layer in counts.layers), default=0)
    elif structure == "full":
        work.products += counts.rows * p**2
        work.moved += 4 * counts.rows * p * item
        work.kept = 2 * item * p**2
        work.peak += min(budget, 2 * rows * p * item)
        if p <= LARGE:
            work.decomposed.append((1, p))
            work.peak = max(work.peak, 3 * 8 * p**2)
        else:
            work.products += p**3 / 3
    elif structure == "blocks":
        sizes = [layer.size for layer in counts.layers]
        work.products += sum(counts.rows * size**2 for size in sizes)
        work.moved += 4 * counts.rows * p * item
        work.kept = 2 * item * sum(size**2 for size in sizes)
        work.decomposed += [(1, size) for size in sizes if size <= LARGE]
        work.products += sum(size**3 / 3 for size in sizes if size > LARGE)
        work.peak = max(work.peak, 3 * 8 * max(sizes, default=0) ** 2)
    elif structure == "gp":
        _gram(counts, work)
        if counts.rows > options.get("limit", LIMIT):
            work.refused = (
                f"{counts.rows:,} rows of the data, more than the {options.get('limit', LIMIT):,} that are kept"
            )
    elif structure == "lowrank":
        rank = min(options.get("rank", 100), p)
        work.kept = 2 * item * p * rank
        wide = min(rank + OVERSAMPLING, p)
        if counts.rows <= GRAM_ROWS:
            kept = work.kept
            _gram(counts, work)
            work.kept = kept
            work.peak += _row_bytes(counts)
            work.products += 2 * rank * p * counts.points
        else:
            for _ in range(PASSES - 1):
                _pass(counts, work, counts.columns, budget)
            along = sum(layer.size * layer.positions for layer in counts.layers)
            work.small += 2 * PASSES * 4 * counts.points * along * wide
            work.small += 2 * PASSES * 4 * counts.points * counts.columns * counts.entries * wide
        work.products += 60 * p * wide**2  # tall and narrow, and in float64
        work.peak += 4 * 8 * p * wide
    return work


def _row_bytes(counts: Counts) -> float | int:
    """The factors of all rows: M O + N I per layer, or the rows themselves where that is less."""
    total = 0.0
    for layer in counts.layers:
        factors = counts.points * layer.positions * layer.groups * (counts.columns * layer.rows + layer.cols)
        total += min(factors, counts.rows * layer.size)
    return total * counts.item


def _gram(counts: Counts, work: Work) -> None:
    """Products of all rows with all rows, and the decomposition of their matrix, in float64."""
    m = counts.rows
    for layer in counts.layers:
        pairs = layer.positions**2
        if layer.kind != "matrix" or pairs == 1 or pairs * (layer.rows + layer.cols) <= layer.size:
            work.products += 2 * (2 * m**2 * pairs * layer.rows + 2 * counts.points**2 * pairs * layer.cols)
            work.moved += 4 * 8 * m**2 * pairs
        else:
            work.products += 2 * m**2 * layer.size
            work.small += 2 * m * layer.positions * layer.size
    work.decomposed.append((1, m))
    work.kept = _row_bytes(counts) + 2 * 8 * m**2
    work.peak = max(work.peak, 3 * 8 * m**2)


def prediction_work(structure: str, counts: Counts, options: Mapping[str, Any], budget: int, data: Counts) -> Work:
    """Probabilities or moments of one batch, once decompositions are made; `data` are the counts of the fit."""
    work, p, item = Work(), counts.weights, counts.item
    n, c = counts.points, counts.outputs
    if structure == "matrix_free":
        systems = n * c
        iterations = min(options.get("iterations", 1000), 4 * int(max(1, data.rows) ** 0.5) + 10)
        work.forward, work.backward = iterations * data.points, 2 * iterations * data.points * min(systems, 64)
        work.peak = 6 * item * p * max(1, min(systems, 64, budget // max(1, 6 * item * p)))
        return work
    _pass(counts, work, c, budget, predicts=True)
    if structure in ("kron", "ekfac"):
        for layer in counts.layers:
            if layer.kind == "vector":
                work.products += 2 * n * c * layer.size * min(layer.size, 1024)
            elif layer.positions == 1:
                work.products += 2 * n * (layer.cols**2 * layer.groups + layer.size + c * layer.rows**2)
            else:
                work.small += 2 * n * c * layer.size * (layer.positions + min(layer.rows, layer.positions))
                work.moved += 4 * n * c * layer.size * item
    elif structure in ("diag", "propagated_diag", "mixed_diag"):
        _diagonal(replace(counts, columns=c), work)
    elif structure in ("full", "blocks"):
        sizes = [p] if structure == "full" else [layer.size for layer in counts.layers]
        work.products += sum(2 * n * c * size**2 for size in sizes)
        work.moved += 4 * n * c * p * item
        work.peak += min(budget, 2 * n * c * p * item)
    elif structure == "gp":
        m = data.rows
        for layer in counts.layers:
            pairs = layer.positions**2
            factored = layer.kind != "matrix" or pairs == 1 or pairs * (layer.rows + layer.cols) <= layer.size
            each = 2 * pairs * layer.rows if factored else 2 * layer.size
            work.products += 2 * m * n * c * each
            work.moved += 4 * 8 * m * n * c
        work.products += 4 * n * c * m**2
        work.peak += min(4 * budget, 6 * 8 * m * n * c)
    elif structure == "lowrank":
        rank = min(options.get("rank", 100), p)
        work.small += 4 * n * rank * sum(layer.size * layer.positions for layer in counts.layers)
        work.small += 4 * n * c * rank * counts.entries
        work.moved += 24 * 8 * p * rank
        work.peak += min(budget, 3 * 8 * p * rank)
    return work
