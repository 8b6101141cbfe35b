"""Output variances under many prior precisions at once, for rows g (x) a in the eigenbasis of G (x) A.

    variance(delta) = sum_oi g_o^2 a_i^2 / (l_o l_i + delta)

Taken literally that is N I O work for each precision. But 1 / (e^s + delta) is smooth in s = log l_o + log l_i, with
poles at a distance of pi from the real line for every delta: g^2 and a^2 are spread over nodes that are equally spaced
in log l (local polynomials of ORDER points), the two are convolved, and a precision costs one product over nodes. The
nodes follow the spectrum, however wide it is; eigenvalues that are zero, or too small to matter beside the
smallest precision, are kept apart exactly. Relative error below 1e-6 for every spectrum and precision (measured: 8e-8).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lapwing.linalg.budget import chunks, intermediate_bytes
from lapwing.linalg.rows import OuterRows

ORDER, STEP = 12, 1 / 3
"""Points of a local polynomial and their distance in log l: error (STEP / pi)^ORDER (1/2 3/2 ... 11/2)^2, or 5e-8."""
NEGLIGIBLE = 1e-7
"""An eigenvalue of the product this small beside the smallest precision counts as zero."""


@dataclass(frozen=True, eq=False)
class Nodes:
    """Eigenvalues [K, d] on equally spaced nodes start + j STEP of the logarithm; `zero` marks those without one."""

    start: float
    weights: Float[Tensor, "groups d nodes"]
    zero: Bool[Tensor, "groups d"]

    @property
    def count(self) -> int:
        return self.weights.shape[-1]


def spread(values: Float[Tensor, "groups d"], floor: float) -> Nodes:
    """Interpolation weights of every eigenvalue above the floor; the rows of the others are zero."""
    values = values.detach().double()
    zero = values <= floor
    if bool(zero.all()):
        return Nodes(0.0, values.new_zeros(*values.shape, 1), zero)
    logs = values.masked_fill(zero, float(values.max())).log()
    position = (logs - logs.min()) / STEP
    first = position.floor()
    offsets = torch.arange(ORDER, device=values.device) - (ORDER // 2 - 1)
    away = (position - first).unsqueeze(-1) - offsets  # [K, d, ORDER]
    apart = (offsets.unsqueeze(1) - offsets).double()
    other = ~torch.eye(ORDER, dtype=torch.bool, device=values.device)
    lagrange = torch.where(other, away.unsqueeze(-2), 1.0).prod(-1) / torch.where(other, apart, 1.0).prod(-1)
    index = first.long().unsqueeze(-1) + torch.arange(ORDER, device=values.device)
    weights = values.new_zeros(*values.shape, int(first.max()) + ORDER).scatter(-1, index, lagrange)
    start = float(logs.min()) - (ORDER // 2 - 1) * STEP
    return Nodes(start, weights.masked_fill(zero.unsqueeze(-1), 0.0), zero)


def outer_sweep(
    rows: OuterRows,
    row_values: Float[Tensor, "groups rows"],
    col_values: Float[Tensor, "groups width"],
    precisions: Float[Tensor, " k"],
) -> Float[Tensor, "k n r"]:
    """Whichever is less work: the nodes, or one precision after the other."""
    if float(row_values.min()) < 0 or float(col_values.min()) < 0:  # has no logarithm
        return rows.sweep(row_values[:, :, None] * col_values[:, None, :], precisions)
    floor = NEGLIGIBLE * float(precisions.min())
    row_nodes = spread(row_values, floor / max(float(col_values.max()), torch.finfo(torch.float64).tiny))
    col_nodes = spread(col_values, floor / max(float(row_values.max()), torch.finfo(torch.float64).tiny))
    (count, _, _, groups, outputs), (batch, _, _, width) = rows.left.shape, rows.right.shape
    pairs, many = row_nodes.count + col_nodes.count, len(precisions)
    one_by_one = many * groups * outputs * (width + count)
    by_nodes = groups * (width * col_nodes.count + count * row_nodes.count * (outputs + pairs)) + count * pairs * many
    if batch * one_by_one <= 2 * batch * by_nodes:
        return rows.sweep(row_values[:, :, None] * col_values[:, None, :], precisions)
    return node_sweep(rows, row_nodes, col_nodes, precisions)


def node_sweep(
    rows: OuterRows, row_nodes: Nodes, col_nodes: Nodes, precisions: Float[Tensor, " k"]
) -> Float[Tensor, "k n r"]:
    """g^2 and a^2 on their nodes, convolved: the mass of every data point and row at every node of log l_o l_i."""
    dtype = rows.right.dtype
    left = rows.left[:, :, 0].square().permute(1, 2, 0, 3)  # [n or 1, k, r, o]
    right = rows.right[:, 0].square().unsqueeze(-2)  # [n, k, 1, i]
    g, a = left @ row_nodes.weights.to(dtype), (right @ col_nodes.weights.to(dtype)).squeeze(-2)
    g_zero, g_all = left @ row_nodes.zero.to(dtype).unsqueeze(-1), left.sum(-1, keepdim=True)
    a_zero, a_rest = (right @ zero.to(dtype).unsqueeze(-1) for zero in (col_nodes.zero, ~col_nodes.zero))
    at_zero = (g_all * a_zero + g_zero * a_rest).squeeze(-1).sum(1)  # [n, r]

    last = row_nodes.count - 1
    pairs = col_nodes.count + last
    padded = torch.nn.functional.pad(a, (last, last))
    g = g.flip(-1)
    mass = []
    for points in chunks(len(a), a.shape[1] * row_nodes.count * pairs * a.element_size(), intermediate_bytes()):
        own = g if len(g) == 1 else g[points]
        mass.append((own @ padded[points].unfold(-1, pairs, 1)).sum(1))  # [n, r, pairs]
    at = row_nodes.start + col_nodes.start + STEP * torch.arange(pairs, dtype=torch.float64, device=a.device)
    found = torch.cat(mass) @ (at.exp().unsqueeze(1) + precisions.double()).reciprocal().to(dtype)
    if bool(row_nodes.zero.any()) or bool(col_nodes.zero.any()):
        found = found + at_zero.unsqueeze(-1) / precisions.to(dtype)
    return found.movedim(-1, 0)
