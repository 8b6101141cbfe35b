"""Which numbers of a curvature add when two data sets are pooled: what processes have to sum over.

A diagonal, a matrix, both factors and the count of a Kronecker product, the eigenvalues in a basis that all share.
Rows and eigenvectors of one's own are no such numbers, and have to be sent as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from lapwing.linalg.blocks import Blocks
from lapwing.linalg.contracts import Curvature
from lapwing.linalg.dense import Dense
from lapwing.linalg.diagonal import Diagonal
from lapwing.linalg.kronecker.corrected import CorrectedKronecker
from lapwing.linalg.kronecker.factors import Term
from lapwing.linalg.kronecker.structure import Kronecker
from lapwing.linalg.low_rank import Subspace

Sum = Curvature | Subspace
"""What adds up over data."""


def with_addends(curvature: Sum, function: Callable[[Tensor], Tensor]) -> Sum | None:
    """The curvature with `function` of every tensor that adds, always in one order; None where not all is such.

    >>> with_addends(Diagonal(torch.ones(2)), lambda values: 2 * values).diagonal()
    tensor([2., 2.])
    """
    if isinstance(curvature, Diagonal):
        return Diagonal(function(curvature.values))
    if isinstance(curvature, Dense) and curvature.multiple is None:
        return Dense(function(curvature.matrix))
    if isinstance(curvature, Kronecker) and curvature.multiple is None:
        return replace(curvature, terms=tuple(_term(term, function) for term in curvature.terms))
    if isinstance(curvature, CorrectedKronecker):
        return curvature.with_values([function(part.values) for part in curvature.parts])
    if isinstance(curvature, Subspace):
        return Subspace(curvature.basis, function(curvature.product))
    if isinstance(curvature, Blocks):
        found = [with_addends(block.curvature, function) for block in curvature.blocks]
        parts = [each for each in found if isinstance(each, Curvature)]
        if len(parts) < len(found):
            return None
        pairs = zip(curvature.blocks, parts, strict=True)
        return replace(curvature, blocks=tuple(replace(block, curvature=part) for block, part in pairs))
    return None


def _term(term: Term, function: Callable[[Tensor], Tensor]) -> Term:
    if isinstance(term.count, Tensor):
        count = function(term.count)
    else:
        count = float(function(torch.tensor(term.count, dtype=torch.float64)))
    return replace(term, cols=function(term.cols), rows=function(term.rows), count=count)
