"""Eigenvectors of a wide matrix that is zero in most directions: a factor of a layer that few data points have reached.

A sum of r products of vectors [d] has rank r at most. Where r is well below d / 4, a basis of its range is found by
products with d / 4 random vectors, decomposed within, and completed by Householder reflections to all of the space:
O(d^2 r + d^3 / 4), of products alone, where a decomposition takes some 10 d^3, half of them at the speed of memory.

>>> import torch
>>> v = torch.cos(torch.arange(64.0, dtype=torch.float64))
>>> values, vectors = eigh_of_few(torch.outer(v, v))
>>> torch.allclose(values[-1], v @ v), torch.allclose((vectors * values) @ vectors.mT, torch.outer(v, v))
(True, True)
>>> eigh_of_few(torch.eye(64)) is None                                   # all directions matter
True
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

SHARE = 4
"""Random vectors are one in so many of the width: with more there is little to gain, and more to lose by trying."""
TOLERATED = 100
"""Roundings of the largest eigenvalue that all that is left out may add up to."""


def eigh_of_few(matrix: Float[Tensor, "d d"]) -> tuple[Float[Tensor, " d"], Float[Tensor, "d d"]] | None:
    """Eigenvalues, in rising order and zero at first, and vectors of a PSD matrix; None if too many are not zero.

    What is left out is what the matrix has outside the range that was found: its trace there bounds every eigenvalue.
    """
    width = len(matrix)
    tried = width // SHARE
    random = torch.randn(width, tried, dtype=matrix.dtype, generator=torch.Generator().manual_seed(0)).to(matrix.device)
    images = matrix @ random
    among = random.mT @ images
    sizes = torch.linalg.eigvalsh((among + among.mT) / 2)
    eps = torch.finfo(matrix.dtype).eps
    rank = int((sizes > tried * eps * sizes[-1:]).sum())
    count = rank + tried // 8
    if not rank or count > tried:
        return None
    basis = _completed(images[:, :count])
    if basis is None:
        return None
    first, rest = basis[:, :count], basis[:, count:]
    inside = first.mT @ (matrix @ first)
    values, vectors = torch.linalg.eigh(((inside + inside.mT) / 2).double())
    left = matrix.diagonal().double().sum() - inside.diagonal().double().sum()
    if not bool(left.abs() <= TOLERATED * eps * values[-1]):
        return None
    zeros = matrix.new_zeros(width - count)
    return torch.cat([zeros, values.to(matrix)]), torch.cat([rest, first @ vectors.to(matrix)], dim=1)


def _completed(columns: Float[Tensor, "d k"]) -> Float[Tensor, "d d"] | None:
    """An orthonormal basis whose first k vectors span the columns: I - V T V^T, all reflections in one product.

    T is the inverse of the upper triangle of V^T V with 1 / tau on its diagonal, as the reflections are orthogonal.
    """
    packed, tau = torch.geqrf(columns)
    if not bool((tau != 0).all()):
        return None
    v = packed.tril(-1)
    v.diagonal().fill_(1)
    inverse = (v.mT @ v).triu(1) + torch.diag(1 / tau)
    found = v @ torch.linalg.solve_triangular(inverse, v.mT, upper=True)
    return torch.eye(len(v), dtype=v.dtype, device=v.device) - found
