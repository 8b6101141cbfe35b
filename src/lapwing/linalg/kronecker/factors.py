"""Factors of Kronecker products: sums over data, their eigenbasis, and the product nearest to a sum of several.

A factor is a batch of symmetric matrices [K, d, d], or [K, d] for diagonal ones (token counts of an embedding).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.errors import CurvatureError
from lapwing.linalg.checks import check_finite, eigh_psd
from lapwing.linalg.layout import MatrixLayout

Factor = Tensor
"""[K, d, d], or [K, d] for a diagonal matrix."""


@dataclass(frozen=True, eq=False)
class Term:
    """Sums over data of one role of a weight: column side A [K, width, width], row side G [K, O, O], and the count.

    The count is one number, or one for each group.
    """

    cols: Factor
    rows: Factor
    count: float | Float[Tensor, " groups"]
    role: str = "upright"

    def __add__(self, other: Term) -> Term:
        return Term(_add(self.cols, other.cols), _add(self.rows, other.rows), self.count + other.count, self.role)

    @property
    def share(self) -> Float[Tensor, " groups"]:
        """1 / count of every group; a role without data has no curvature, and any number will do."""
        count = torch.as_tensor(self.count, dtype=torch.float64, device=self.rows.device).expand(len(self.rows))
        return torch.where(count > 0, 1 / count, 1.0)

    @property
    def mean_cols(self) -> Factor:
        """A / count."""
        share = self.share.to(self.cols.dtype)
        return self.cols * share.reshape(-1, *[1] * (self.cols.dim() - 1))


def add_terms(ours: Sequence[Term], theirs: Sequence[Term]) -> tuple[Term, ...]:
    """Terms of one role added; a role that one of the two data sets alone has is kept."""
    roles = [[term.role for term in terms] for terms in (ours, theirs)]
    if roles[0] == roles[1]:
        return tuple(a + b for a, b in zip(ours, theirs, strict=True))
    if any(len(set(each)) < len(each) for each in roles):
        raise CurvatureError(
            f"cannot add {len(theirs)} Kronecker terms to {len(ours)} that have no roles of their own; expected a "
            "weight in the same roles. Fit both with one estimator and one model."
        )
    found = {term.role: term for term in ours}
    for term in theirs:
        found[term.role] = found[term.role] + term if term.role in found else term
    return tuple(found[role] for role in sorted(found))


def nearest_kronecker(terms: Sequence[Term]) -> tuple[Factor, Factor]:
    """A and G that minimise |G (x) A - sum_i G_i (x) A_i / count_i| in Frobenius norm, for each group.

    With M the sum as a matrix vec(G) vec(A)^T (Van Loan), this is its first singular pair. It lies in the spans of the
    A_i and G_i, so that an eigenproblem of the size of the number of terms finds it: G = sum_i x_i G_i with
    (D C D R) x = s^2 x, where R and C hold the inner products of the G_i and of the A_i, and D = diag(1 / count). These
    are not negative for PSD matrices, so that |x| is a solution where x is, and the factors are PSD.
    """
    cols, rows = _same_form([term.cols for term in terms]), _same_form([term.rows for term in terms])
    share = torch.stack([term.share for term in terms])  # [i, k]
    col_gram = torch.einsum("i k d, j k d -> k i j", cols.flatten(2).double(), cols.flatten(2).double())
    row_gram = torch.einsum("i k d, j k d -> k i j", rows.flatten(2).double(), rows.flatten(2).double())
    weighted = share.mT[:, :, None] * col_gram * share.mT[:, None, :]  # D C D
    values, vectors = torch.linalg.eigh(row_gram)
    root = (vectors * values.clamp_min(0).sqrt().unsqueeze(1)) @ vectors.mT  # R^(1/2): D C D R made symmetric
    first = torch.linalg.eigh(root @ weighted @ root)[1][..., -1:]
    mix = (weighted @ root @ first).abs().squeeze(-1).mT  # [i, k]
    mix = mix / mix.amax(0).clamp_min(torch.finfo(mix.dtype).tiny)
    row = torch.einsum("i k, i k ... -> k ...", mix.to(rows.dtype), rows)
    norm = row.flatten(1).square().sum(1).clamp_min(torch.finfo(row.dtype).tiny)
    onto = torch.einsum("i k d, k d -> i k", rows.flatten(2), row.flatten(1)) / norm
    return torch.einsum("i k, i k ... -> k ...", onto * share.to(onto.dtype), cols), row


def _same_form(factors: Sequence[Factor]) -> Tensor:
    if len({factor.dim() for factor in factors}) > 1:
        factors = [factor if factor.dim() == 3 else torch.diag_embed(factor) for factor in factors]
    return torch.stack(list(factors))


def _add(a: Factor, b: Factor) -> Factor:
    return a + b if a.dim() == b.dim() else _same_form([a, b]).sum(0)


def diagonal_of(factor: Factor) -> Tensor:
    return factor if factor.dim() == 2 else factor.diagonal(dim1=1, dim2=2)


def inner(a: Factor, b: Factor) -> Float[Tensor, " groups"]:
    """The inner product tr(A B) of every group, in float64."""
    both = _same_form([a, b]).double()
    return (both[0] * both[1]).flatten(1).sum(1)


def rotated_diagonal(factor: Factor, vectors: Tensor | None) -> Float[Tensor, "groups d"]:
    """The diagonal of Q^T A Q; None stands for unit vectors."""
    if vectors is None:
        return diagonal_of(factor)
    if factor.dim() == 2:
        return (factor.unsqueeze(1) @ vectors.square()).squeeze(1)
    return (vectors * (factor @ vectors)).sum(1)


def cut(factor: Factor, part: slice) -> Factor:
    return factor[:, part] if factor.dim() == 2 else factor[:, part, part]


def apply(matrix: Tensor, cols: Factor, rows: Factor) -> Tensor:
    """G M A for each group."""
    matrix = matrix * rows[:, :, None] if rows.dim() == 2 else rows @ matrix
    return matrix * cols[:, None, :] if cols.dim() == 2 else matrix @ cols


def eigen(factor: Factor, what: str) -> tuple[Tensor, Tensor | None]:
    if factor.dim() == 2:
        check_finite(factor, what)
        return factor, None
    return eigh_psd(factor, what, single=True)


def last_entry(values: Tensor, vectors: Tensor | None) -> Float[Tensor, "groups width"]:
    """The last entry, that of the bias, of every eigenvector."""
    if vectors is not None:
        return vectors[:, -1, :]
    last = torch.zeros_like(values)
    last[:, -1] = 1
    return last


def column_parts(layout: MatrixLayout, joint: bool) -> list[slice]:
    """Columns that are decomposed together: all, or those of the weight and that of the bias."""
    if joint or layout.bias is None:
        return [slice(0, layout.width)]
    return [slice(0, layout.cols), slice(layout.cols, layout.width)]


def block_priors(layout: MatrixLayout, delta: Tensor) -> tuple[list[Tensor], bool]:
    """One prior precision for the block, or one each for weight and bias; and whether these are equal."""
    if delta.dim() == 0:
        return [delta], True
    matrix = layout.gather(delta)
    parts = [matrix[..., part] for part in column_parts(layout, joint=False)]
    for values in parts:
        if bool((values != values.reshape(-1)[0]).any()):
            raise CurvatureError(
                "the prior precision differs within one weight; a Kronecker block carries one value per weight and "
                "one per bias. Use a layerwise or per-tensor prior, or a diagonal, block or full structure."
            )
    equal = bool(parts[0].reshape(-1)[0] == parts[-1].reshape(-1)[0])
    return [values.mean() for values in parts], equal


def joint_prior(deltas: Sequence[Tensor], last: Float[Tensor, "groups width"]) -> Tensor:
    """The prior along eigenvectors of weight and bias together, where its two numbers are equal.

    Each counts by its share of an eigenvector, `last` being the bias' entries: the derivative of logdet is then exact.
    """
    if len(deltas) == 1:
        return deltas[0]
    return deltas[0] + (deltas[1] - deltas[0]) * last.square().unsqueeze(1)


def factored_eigenvalues(row_values: Tensor, col_values: Tensor, delta: Tensor, plain: bool) -> Tensor:
    """Eigenvalues of (A + w sqrt(d) I) (x) (G + sqrt(d) / w I), w = sqrt(tr A dim G / (tr G dim A)); 1 if `plain`."""
    of_cols, of_rows = factored_shares(col_values.mean(1), row_values.mean(1), delta, plain)
    return (row_values + of_rows[:, None])[:, :, None] * (col_values + of_cols[:, None])[:, None, :]


def factored_shares(
    mean_col: Float[Tensor, " groups"], mean_row: Float[Tensor, " groups"], delta: Float[Tensor, ""], plain: bool
) -> tuple[Float[Tensor, " groups"], Float[Tensor, " groups"]]:
    """What is added to A and to G, w sqrt(d) and sqrt(d) / w, from the means of their diagonals."""
    root = delta.sqrt()
    if plain:
        return root.expand_as(mean_col), root.expand_as(mean_row)
    tiny = torch.finfo(mean_row.dtype).tiny
    omega = (mean_col.clamp_min(tiny) / mean_row.clamp_min(tiny)).sqrt()
    return root * omega, root / omega
