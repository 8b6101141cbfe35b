"""mixed_diagonal: exact up to a bottleneck, propagated from there to the outputs; for autoencoders.

Variances come back from the outputs as in `propagated_diagonal` until they reach a value that all data pass through and
that has few entries per data point (a latent code). There the d variances become d exact columns, which go back to the
inputs like those of `diagonal`:

    M = diag(m) = sum_j c_j c_j^T,  c_j = sqrt(m_j) e_j;        diag(H_w) = sum_n sum_j (J_w^T c_j)[w]^2

so that nothing more is dropped, however wide the layers before the bottleneck are: the number of columns stays d (the
source's version of section 3 goes back to variances there). Networks with few outputs are exact altogether, and those
without a bottleneck are propagated altogether.

Cost: that of `propagated_diagonal`, and d <= `columns` backward passes through what lies before the bottleneck.
Memory: a chunk of columns within the budget.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.errors import DataError
from lapwing.estimate.cotangents import Columns, Cotangents, exact, fisher
from lapwing.estimate.diagonal import SquareSum
from lapwing.estimate.passes import Batches, _named, observe, pair
from lapwing.estimate.propagated import add_squares, collect, variances, walk
from lapwing.likelihoods import Likelihood
from lapwing.linalg import Diagonal
from lapwing.linalg.rows import chunks
from lapwing.tangent import Linearisation, Tangent
from lapwing.tangent.tape import Tape
from lapwing.tangent.tape_cuts import Cut, Known, find_cut, record_both

COLUMNS = 32
"""Latent codes of autoencoders have up to about this many entries."""


def mixed_diagonal(
    tangent: Tangent,
    likelihood: Likelihood,
    batches: Batches,
    *,
    cotangents: Cotangents = exact,
    generator: torch.Generator | None = None,
    columns: int = COLUMNS,
) -> Diagonal:
    """The diagonal of the GGN or Fisher, exact wherever at most `columns` columns suffice, propagated elsewhere.

    `columns` bounds the cost: 0 is `propagated_diagonal`, and as many as there are outputs is `diagonal`.
    """
    if columns < 0:
        raise DataError(f"columns is {columns}; expected how many exact columns are allowed: 0, or a positive number.")
    tangent = replace(tangent, differentiable=False) if tangent.differentiable else tangent
    mixed = _Mixed.empty(tangent, likelihood, cotangents, generator, columns)
    empty = True
    for number, batch in enumerate(batches):
        empty = False
        with _named(number):
            x, y = pair(batch)
            mixed.add(x, y, batches)
    if empty:
        raise DataError(
            "the loader yields no batch; expected at least one (x, y) pair. Check the dataset and drop_last."
        )
    return Diagonal(tangent.space.restrict(mixed.propagated) + mixed.exactly.vector())


@dataclass
class _Mixed:
    """The two sums of one pass over the data. `taped` remembers that the last batch had too many outputs."""

    tangent: Tangent
    likelihood: Likelihood
    cotangents: Cotangents
    generator: torch.Generator | None
    limit: int
    propagated: Float[Tensor, " total"]
    exactly: SquareSum
    taped: bool = False
    known: Known = field(default_factory=dict)

    @staticmethod
    def empty(
        tangent: Tangent, likelihood: Likelihood, cotangents: Cotangents, generator: torch.Generator | None, limit: int
    ) -> _Mixed:
        space = tangent.space
        options = {"dtype": space.dtype, "device": space.device}
        total = SquareSum(torch.zeros(space.size, **options), tangent.budget)
        return _Mixed(tangent, likelihood, cotangents, generator, limit, torch.zeros(space.total, **options), total)

    def add(self, x: Any, y: Tensor, batches: Batches) -> None:
        tape = None
        if self.taped:
            linearisation, tape = record_both(self.tangent, x)
        else:
            linearisation = self.tangent.at(x)
        value = linearisation.value
        observe(batches, self.likelihood, value, y)
        columns = self._few(value, y)
        self.taped = columns is None
        if columns is not None:
            step = self._step(linearisation)
            for chunk in columns.chunked(step):
                self.exactly.add(linearisation.pull(chunk.detach().to(self.tangent.space.dtype)))
            return
        if tape is None:
            linearisation, tape = record_both(self.tangent, x)
        m = variances(self.likelihood, value, y, self.cotangents, self.generator, self.tangent.budget).detach()
        cut = find_cut(linearisation, tape, self.limit, self.known)
        if cut is None:
            add_squares(tape, m, self.tangent, self.propagated)
        else:
            self._add_through(cut, m, linearisation, tape)

    def _few(self, value: Tensor, y: Tensor) -> Columns | None:
        """The columns at the outputs, if they are few enough."""
        square_root = self.cotangents is exact or self.cotangents is fisher
        if square_root and value[0].numel() > self.limit:  # about as many columns, not worth forming
            return None
        columns = self.cotangents(self.likelihood, value, y, self.generator)
        return columns if columns.count <= self.limit else None

    @torch.no_grad()
    def _add_through(self, cut: Cut, m: Tensor, linearisation: Linearisation, tape: Tape) -> None:
        """Variances down to the cut, columns from there on."""
        assert tape.output is not None
        held = walk(cut.after, {tape.output: m})
        at_cut = held.pop(cut.value, None)
        # parameters that no rule for rows covers stay with their variances, before the cut too
        opaque = list(linearisation.record.opaque)
        if opaque:
            whole = torch.zeros_like(self.propagated)
            add_squares(tape, m, self.tangent, whole)
        held = walk(cut.before, held)  # what is left are functions of parameters alone
        part = torch.zeros_like(self.propagated)
        collect(tape, held, self.tangent, part)
        starts = self.tangent.space.whole.starts
        for name in opaque:
            where = slice(starts[name], starts[name] + tape.parameters[name].shape.numel())
            part[where] = whole[where]  # pyright: ignore[reportPossiblyUnboundVariable]
        self.propagated += part
        if at_cut is None:
            return
        each = self._step(linearisation)
        for piece in chunks(cut.width, 1, each):
            self.exactly.add(cut.pull(linearisation, cut.columns(at_cut, piece)))

    def _step(self, linearisation: Linearisation) -> int:
        """How many cotangents fit into a quarter of the budget, as for the exact diagonal."""
        return max(1, self.tangent.budget // 4 // max(1, linearisation.cotangent_bytes))
