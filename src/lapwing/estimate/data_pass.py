"""One pass over the data: every batch checked, linearised once, and its cotangents pulled back in chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lapwing.errors import DataError, LapwingError, ModelError
from lapwing.estimate.cotangents import Columns, Cotangents, repeatable
from lapwing.likelihoods import Likelihood
from lapwing.linalg.rows import Piece
from lapwing.tangent import Linearisation, Tangent
from lapwing.tangent.inputs import all_finite, batch_size, take, tensors
from lapwing.tangent.model import FEW_SAMPLES

Batches = Iterable[Any]


class Wrapped(ABC):
    """Batches made from other batches, `source`, which decide whether there can be a second pass."""

    @property
    @abstractmethod
    def source(self) -> Batches: ...


class PartOfBatch(tuple):
    """A pair (inputs, targets) of some data points of a batch, of which it has the number."""

    number: int


@dataclass(frozen=True)
class Divided(Wrapped):
    """Batches in parts: `most` says of inputs how many data points may be in one, None for any number."""

    batches: Batches
    most: Callable[[Any], int | None]

    @property
    def source(self) -> Batches:
        return self.batches

    def __iter__(self) -> Iterator[Any]:
        for count, batch in enumerate(self.batches):
            number, points = batch.number if isinstance(batch, PartOfBatch) else count, _points(batch)
            most = self.most(batch[0]) if points else None
            if most is None or points <= most:
                yield batch
                continue
            for start in range(0, points, most):
                rows = slice(start, start + most)
                part = PartOfBatch((take(batch[0], rows), batch[1][rows]))
                part.number = number
                yield part


def _points(batch: Any) -> int:
    """Data points of a pair that can be divided; 0 of anything else."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2 or not isinstance(batch[1], Tensor):
        return 0
    x, y = batch
    if y.dim() == 0 or not any(t.dim() for t in tensors(x)):
        return 0
    return len(y) if len(y) and len(y) == batch_size(x) else 0


def one_shot(batches: Batches) -> bool:
    """Whether the data behind any wrapping are an iterator, which is empty after one pass."""
    while isinstance(batches, Wrapped):
        batches = batches.source
    return isinstance(batches, Iterator)


@dataclass
class Watched(Wrapped):
    """Batches that report their outputs and log-likelihoods, so that a fit learns its loss in the same pass.

    `saw` is told the outputs, the targets and log p(y | f) [B] of every batch, and `start` that a pass begins.
    """

    batches: Batches
    start: Callable[[], None]
    saw: Callable[[Tensor, Tensor, Tensor], None]

    @property
    def source(self) -> Batches:
        return self.batches

    def __iter__(self) -> Iterator[Any]:
        self.start()
        yield from self.batches


@dataclass
class Repeated:
    """Batches for several passes; a later pass with another number of batches is an error."""

    batches: Batches
    first: int | None = None

    def __iter__(self) -> Iterator[Any]:
        count = 0
        for batch in self.batches:
            count += 1
            yield batch
        if self.first is None:
            self.first = count
        elif count != self.first:
            raise DataError(
                f"the first pass over the data had {self.first} batches and the next one {count}; expected the same "
                "data in every pass. Give a list of batches or a DataLoader."
            )


def repeated(batches: Batches) -> Batches:
    """Batches for an estimator that needs several passes; `Watched` ones report every pass."""
    if isinstance(batches, Watched):
        return replace(batches, batches=repeated(batches.batches))
    if one_shot(batches):
        raise DataError(
            "the data are an iterator, which can be gone through only once; expected data for several passes. Give a "
            "list of batches or a DataLoader."
        )
    return Repeated(batches)


@dataclass(frozen=True)
class Pulled:
    """Rows of one chunk of cotangents of one batch; `first` marks the first chunk of a batch."""

    linearisation: Linearisation
    pieces: list[Piece]
    first: bool


def linearised(tangent: Tangent, likelihood: Likelihood, batches: Batches) -> Iterator[tuple[Linearisation, Tensor]]:
    """(linearisation, targets) of every batch, checked; errors name the batch."""
    for part in _passed(tangent, likelihood, batches, joining=0):
        yield part.linearisation, part.y


@dataclass(frozen=True)
class _Part:
    """A linearisation of one batch, or of several side by side: the number of the first, and the rows of each."""

    linearisation: Linearisation
    y: Any
    first: int
    rows: tuple[int, ...] = ()

    def columns(self, likelihood: Likelihood, cotangents: Cotangents, generator: torch.Generator | None) -> Columns:
        """Those that are drawn, of every batch on its own: where they go back in one chunk, they do not depend on which
        batches lie side by side."""
        value, found = self.linearisation.value, []
        rows = () if repeatable(cotangents) else self.rows
        pairs = zip(value.split(rows), self.y.split(rows), strict=True) if rows else [(value, self.y)]
        for number, (f, y) in enumerate(pairs, self.first):
            with named(number):
                found.append(cotangents(likelihood, f, y, generator))
        if len(found) == 1:
            return found[0]
        return Columns(found[0].count, lambda part: torch.cat([each.take(part) for each in found], dim=1))


@dataclass
class _Joining:
    """How many rows may lie side by side; 0 for one batch at a time."""

    most: int = 0


JOINED = 2**22
"""Bytes of inputs and of one cotangent, all layers together, up to which batches are put side by side.

What `joining` multiplies: products of more rows are worth more to a factor of a Kronecker product.
"""


def _passed(tangent: Tangent, likelihood: Likelihood, batches: Batches, joining: int) -> Iterator[_Part]:
    """Every batch, checked and linearised; small ones of one shape side by side, up to `joining` times `JOINED`.

    A pass over small batches is mostly calls, which cost the same for four batches as for one.
    """
    if tangent.differentiable:  # a curvature is no function of the inputs
        tangent = replace(tangent, differentiable=False)

    def at(x: Any, y: Any, first: int, rows: tuple[int, ...] = ()) -> _Part:
        linearisation = tangent.at(x)
        observe(batches, likelihood, linearisation.value, y)
        return _Part(linearisation, y, first, rows)

    limit = _Joining()
    for group in _groups(batches, limit):
        if len(group) > 1:
            numbers, xs, ys = zip(*group, strict=True)
            together = None
            with suppress(Exception):  # the batch at fault is to say what is wrong; or the model takes one batch size
                together = at(torch.cat(xs), torch.cat(ys), numbers[0], tuple(map(len, ys)))
            if together is not None:
                yield together
                continue
            limit.most = 0
        for number, x, y in group:
            with named(number):
                part = at(x, y, number)
            if joining and number == 0 and _plain(x, y) and not part.linearisation.record.opaque:
                needed = x.numel() * x.element_size() + part.linearisation.cotangent_bytes
                limit.most = min(joining * JOINED, tangent.budget // 8) * len(x) // max(1, needed)
            yield part


def _groups(batches: Batches, limit: _Joining) -> Iterator[list[tuple[int, Any, Any]]]:
    """(number, inputs, targets) of every batch, with those that follow it as long as they are alike and few rows."""
    waiting: list[tuple[int, Any, Any]] = []
    rows = 0
    for number, batch in numbered(batches):
        with named(number):
            x, y = pair(batch)
        fits = _plain(x, y) and rows + len(x) <= limit.most
        if waiting and not (fits and _alike(waiting[0][1], x) and _alike(waiting[0][2], y)):
            yield waiting
            waiting, rows = [], 0
        rows += len(x) if _plain(x, y) else 0
        if rows and rows + len(x) <= limit.most:
            waiting.append((number, x.clone(), y.clone()))  # a loader may fill one tensor again and again
            continue
        waiting.append((number, x, y))
        yield waiting
        waiting, rows = [], 0
    if waiting:
        yield waiting


def _plain(x: Any, y: Any) -> bool:
    """Whether inputs and targets are one tensor each, of as many rows."""
    if type(x) is not Tensor or type(y) is not Tensor or x.requires_grad or y.requires_grad:
        return False
    return x.dim() > 0 and y.dim() > 0 and len(x) == len(y) > 0


def _alike(a: Tensor, b: Tensor) -> bool:
    return (a.shape[1:], a.dtype, a.device, a.layout) == (b.shape[1:], b.dtype, b.device, b.layout)


FEWEST = 8
"""Data points that a part of a batch has at least: calls cost the same for fewer."""


@dataclass
class _Parts:
    """Large batches in parts, whose cotangents go back all at once, with the memory of the batch and one cotangent.

    Patches, and what norms multiply with, are then made once and not for each cotangent: `together`. Batches of which
    all cotangents take half of the budget stay whole, as calls cost the same for few data points.
    """

    tangent: Tangent
    together: bool
    room: int = 0
    """Bytes of the largest batch that was divided, with one cotangent."""

    @property
    def small(self) -> int:
        """Bytes of cotangents that need not be divided: a twelfth of the budget keeps a fit near the memory of a
        training step, for a tenth of the time or so."""
        return self.tangent.budget // (8 if self.together else 12)

    def of(self, batches: Batches) -> Batches:
        if isinstance(batches, Watched):
            return replace(batches, batches=self.of(batches.batches))
        return Divided(batches, self._most)

    def _most(self, x: Any) -> int | None:
        points = batch_size(x)
        found = self.tangent.per_point(x) if points >= 2 * FEWEST else None
        if found is None:
            return None
        each, outputs = found
        # a graph takes about as much as a cotangent on its way back: most (1 + outputs) <= points (1 + 1)
        most = max(-(-2 * points // (1 + outputs)), self.tangent.budget // 2 // max(1, each * outputs))
        if not FEWEST <= most < points:
            return None
        self.room = max(self.room, 2 * each * points)
        return -(-points // -(-points // most))  # parts of one size

    def step(self, linearisation: Linearisation) -> int:
        """Cotangents at a time: a few take no more than the graph of the forward pass, which has about `graph`."""
        graph = max(2, linearisation.cotangent_bytes)
        room = max(self.small, self.room - graph, min(2 * graph, self.tangent.budget))
        return max(1, room // (graph // 2))


def pulled(
    tangent: Tangent,
    likelihood: Likelihood,
    batches: Batches,
    cotangents: Cotangents,
    generator: torch.Generator | None,
    joining: int = 0,
    together: bool = False,
) -> Iterator[Pulled]:
    """Rows of every batch, for as many cotangents at a time as the budget allows; `joining` as for `_passed`.

    `together` is for estimators that form rows from patches, which are made for every chunk of cotangents: large
    batches come in parts instead, where cotangents are the same in any batch.
    """
    parts = _Parts(tangent, together and repeatable(cotangents))
    batches = parts.of(batches) if parts.together else batches
    for batch in _passed(tangent, likelihood, batches, joining):
        linearisation, columns = batch.linearisation, batch.columns(likelihood, cotangents, generator)
        for part, chunk in enumerate(columns.chunked(parts.step(linearisation))):
            # a noise level that requires gradients would leave part of a graph in the sums; scaling has the whole one
            chunk = chunk.detach().to(tangent.space.dtype)
            found = Pulled(linearisation, linearisation.pull(chunk), first=part == 0)
            yield found
            found.pieces.clear()  # before the next are made: whoever went through these still holds the list


def observe(batches: Batches, likelihood: Likelihood, value: Tensor, y: Any) -> None:
    """Checks the outputs and targets of a batch, and reports them if the batches are `Watched`."""
    log_prob = check_loss(likelihood, value, y)
    if isinstance(batches, Watched):
        batches.saw(value, y, log_prob)


def check_loss(likelihood: Likelihood, value: Tensor, y: Any) -> Tensor:
    """Finite outputs, targets that fit the likelihood, and a finite loss: log p(y | f) of each data point."""
    if not all_finite(value):
        raise DataError("the model's output holds NaN or infinite values; expected finite ones. Check the weights.")
    if not isinstance(y, Tensor):
        raise DataError(f"the targets are {type(y).__name__}; expected a tensor. Convert them: torch.as_tensor(y).")
    likelihood.check(value, y)
    likelihood.refuse_probabilities(value)
    loss = likelihood.log_prob(value, y)
    if not all_finite(loss):
        where = int((~torch.isfinite(loss)).nonzero()[0])
        raise DataError(
            f"the log-likelihood of data point {where} is {float(loss[where])}; expected finite numbers. Check its "
            "target and the model's output."
        )
    return loss


def check_independent(tangent: Tangent, x: Any) -> None:
    """Refuses a model that mixes its samples, as a linearisation of a few of them finds out."""
    try:
        tangent.at(take(x, slice(0, FEW_SAMPLES)))
    except ModelError:  # perhaps made for one batch size; other errors come again
        tangent.at(x)


def pair(batch: Any, which: str = "a batch") -> tuple[Any, Any]:
    """(inputs, targets) of a batch; an error calls it `which`."""
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    size = f" of length {len(batch)}" if isinstance(batch, (tuple, list)) else ""
    raise DataError(
        f"{which} is a {type(batch).__name__}{size}; expected a pair (inputs, targets), where inputs may be a tensor, "
        "a tuple or a mapping. Give a loader of pairs, or a list of them: [(x, y)]."
    )


def pairs(batches: Batches) -> Iterator[tuple[Any, Any]]:
    """(inputs, targets) of every batch; an error names the batch that is no pair."""
    for number, batch in enumerate(batches):
        yield pair(batch, f"batch {number}")


def numbered(batches: Batches) -> Iterator[tuple[int, Any]]:
    """Batches with their numbers; a loader without any is an error."""
    number = -1
    for number, batch in enumerate(batches):
        yield batch.number if isinstance(batch, PartOfBatch) else number, batch
    if number < 0:
        raise no_batch()


def no_batch() -> DataError:
    return DataError("the loader yields no batch; expected at least one (x, y) pair. Check the dataset and drop_last.")


@contextmanager
def named(batch: int | str) -> Iterator[None]:
    """Errors begin with the batch at fault: its number, or its name in words."""
    try:
        yield
    except LapwingError as error:
        name = f"batch {batch}" if isinstance(batch, int) else batch
        raise type(error)(f"{name}: {error}") from error
