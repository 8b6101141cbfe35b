"""mixed_diagonal: exact up to a bottleneck, propagated from there to the outputs; for autoencoders.

Variances come back from the outputs as in `propagated_diagonal` until they reach a value that all data pass through and
that has few entries per data point (a latent code). There the d variances become d exact columns, which go back to the
inputs like those of `diagonal`:

    M = diag(m) = sum_j c_j c_j^T,  c_j = sqrt(m_j) e_j;        diag(H_w) = sum_n sum_j (J_w^T c_j)[w]^2

so that nothing more is dropped, however wide the layers before the bottleneck are: the number of columns stays d (the
source, section 3, goes back to variances there). Networks with few outputs are exact altogether, and those without a
bottleneck are propagated altogether. With `exact_bottleneck`, M is the d x d matrix J^T H J of what lies behind the
bottleneck, by products with its d unit vectors: everything before the bottleneck is then exact.

Cost: that of `propagated_diagonal`, and d <= `columns` backward passes through what lies before the bottleneck; with
`exact_bottleneck`, about 4 d passes through what lies behind it too. Memory: a chunk of columns within the budget.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.errors import DataError
from lapwing.estimate.cotangents import Columns, Cotangents, exact, fisher
from lapwing.estimate.data_pass import Batches, named, numbered, observe, pair
from lapwing.estimate.exact_diagonal import SquareSum
from lapwing.estimate.propagated.diagonal import add_squares, collect, variances, walk
from lapwing.likelihoods import Likelihood
from lapwing.linalg import Diagonal
from lapwing.tangent import Linearisation, Tangent
from lapwing.tape.cuts import Cut, Known, find_cut, record_both

COLUMNS = 32
"""Latent codes of autoencoders have up to about this many entries."""


@torch.inference_mode(False)
def mixed_diagonal(
    tangent: Tangent,
    likelihood: Likelihood,
    batches: Batches,
    *,
    cotangents: Cotangents = exact,
    generator: torch.Generator | None = None,
    columns: int = COLUMNS,
    exact_bottleneck: bool = False,
) -> Diagonal:
    """The diagonal of the GGN or Fisher: exact columns where at most `columns` suffice, propagated variances elsewhere.

    `columns` bounds the cost: 0 is `propagated_diagonal`, and as many as there are outputs is `diagonal`. Variances
    that come through a trained decoder can be far too small; `exact_bottleneck` makes up for it at a cost.
    """
    if columns < 0:
        raise DataError(f"columns is {columns}; expected how many exact columns are allowed: 0, or a positive number.")
    if exact_bottleneck and cotangents is not exact:
        raise DataError(
            "exact_bottleneck forms J^T H J with the exact Hessian at the outputs; expected cotangents=exact. Leave "
            "one of the two out."
        )
    tangent = replace(tangent, differentiable=False) if tangent.differentiable else tangent
    mixed = _Mixed.empty(tangent, likelihood, cotangents, generator, columns, exact_bottleneck)
    for number, batch in numbered(batches):
        with named(number):
            x, y = pair(batch)
            mixed.add(x, y, batches)
    return Diagonal(tangent.space.restrict(mixed.propagated) + mixed.exactly.vector())


@dataclass
class _Mixed:
    """The two sums of one pass over the data. `taped` remembers that the last batch had too many outputs, and `known`
    which entries of a bottleneck belong to which data point."""

    tangent: Tangent
    likelihood: Likelihood
    cotangents: Cotangents
    generator: torch.Generator | None
    limit: int
    whole: bool
    propagated: Float[Tensor, " total"]
    exactly: SquareSum
    taped: bool = False
    known: Known = field(default_factory=dict)

    @staticmethod
    def empty(
        tangent: Tangent,
        likelihood: Likelihood,
        cotangents: Cotangents,
        generator: torch.Generator | None,
        limit: int,
        whole: bool,
    ) -> _Mixed:
        space = tangent.space
        options = {"dtype": space.dtype, "device": space.device}
        exactly = SquareSum(torch.zeros(space.size, **options), tangent.budget)
        variances = torch.zeros(space.total, **options)
        return _Mixed(tangent, likelihood, cotangents, generator, limit, whole, variances, exactly)

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
            self._add_through(cut, m, linearisation, y)

    def _few(self, value: Tensor, y: Tensor) -> Columns | None:
        """The columns at the outputs, if they are few enough."""
        square_root = self.cotangents is exact or self.cotangents is fisher
        if square_root and value[0].numel() > self.limit:  # about as many columns, not worth forming
            return None
        columns = self.cotangents(self.likelihood, value, y, self.generator)
        return columns if columns.count <= self.limit else None

    @torch.no_grad()
    def _add_through(self, cut: Cut, m: Tensor, linearisation: Linearisation, y: Tensor) -> None:
        """Variances down to the cut, columns from there on."""
        tape = cut.tape
        assert tape.output is not None
        held = walk(cut.after, {tape.output: m})
        at_cut = held.pop(cut.value, None)
        held = walk(cut.before, held)  # what is left are functions of parameters alone
        part = torch.zeros_like(self.propagated)
        collect(tape, held, self.tangent, part)
        # parameters that no rule for rows covers stay with their variances, before the cut too
        if linearisation.record.opaque:
            everywhere = torch.zeros_like(part)
            add_squares(tape, m, self.tangent, everywhere)
            starts = self.tangent.space.whole.starts
            for name in linearisation.record.opaque:
                where = slice(starts[name], starts[name] + tape.parameters[name].shape.numel())
                part[where] = everywhere[where]
        self.propagated += part
        step = self._step(linearisation)
        if self.whole:
            hessian = partial(self.likelihood.hessian_mv, linearisation.value, y)
            values, vectors = torch.linalg.eigh(cut.matrix(linearisation, hessian, step).double())
            root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
        elif at_cut is not None:
            root = torch.diag_embed(cut.gather(at_cut.unsqueeze(0))[0].sqrt())
        else:
            return
        columns = root.to(m.dtype).permute(2, 0, 1)
        for start in range(0, cut.width, step):
            self.exactly.add(cut.pull(linearisation, cut.spread(columns[start : start + step])))

    def _step(self, linearisation: Linearisation) -> int:
        """How many cotangents fit into a quarter of the budget, as for the exact diagonal."""
        return max(1, self.tangent.budget // 4 // max(1, linearisation.cotangent_bytes))
