"""sum over data points and positions of patch patch^T, [K, I, I], without the patches: a convolution's input factor.

Two entries of a patch that are as far apart at other offsets of the kernel multiply the same pairs of pixels, but for
the border. Along the first axis of the image that is made use of; patches are formed along the others alone, Z[q] for
every line q. With a stride s, offset k meets lines s j + r, r = k mod s (k times the dilation), from j = a to a + out:

    A[(k, .), (k', .)] = sum_j Z_r[j] Z_r'[j + a' - a]^T

Pairs (k, k') with the same (r, r', a' - a) differ in the range of j alone, which is cut where any of them begins or
ends: every piece is multiplied once. For a 3 x 3 kernel that is a third of the products, and of the copies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from lapwing.linalg.budget import chunks
from lapwing.linalg.rows import ProductSum
from lapwing.tangent.convolution import windows

Piece = tuple[int, int, int, int, int]
"""Residues of the two lines, the distance a' - a, and the range of j."""


@dataclass(frozen=True)
class Lines:
    """What is multiplied along the first axis: for every pair of offsets k <= k', the pieces of its range."""

    residues: tuple[int, ...]
    starts: tuple[tuple[int, int], ...]
    """(r, a) of every offset."""
    pairs: dict[tuple[int, int], list[Piece]]
    out: int

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        return tuple(sorted({piece for pieces in self.pairs.values() for piece in pieces}))

    @property
    def count(self) -> int:
        """Lines that are multiplied, of as many as there are pairs and positions with patches."""
        return sum(stop - start for *_, start, stop in self.pieces)


@lru_cache(maxsize=1024)
def lines(out: int, kernel: int, stride: int, dilation: int) -> Lines:
    starts = tuple((dilation * k % stride, dilation * k // stride) for k in range(kernel))
    alike: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for k, (r, a) in enumerate(starts):
        for other in range(k, kernel):
            there, b = starts[other]
            alike.setdefault((r, there, b - a), []).append((k, other))
    pairs = {}
    for key, members in alike.items():
        edges = sorted({edge for k, _ in members for edge in (starts[k][1], starts[k][1] + out)})
        for k, other in members:
            a = starts[k][1]
            pairs[k, other] = [(*key, *cut) for cut in pairwise(edges) if a <= cut[0] and cut[1] <= a + out]
    return Lines(tuple(sorted({r for r, _ in starts})), starts, pairs, out)


@dataclass(frozen=True)
class Kernel:
    """How a kernel meets padded images: its sizes, steps and groups, and the positions that it takes."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    positions: tuple[int, ...]

    @property
    def lines(self) -> Lines:
        return lines(self.positions[0], self.size[0], self.stride[0], self.dilation[0])

    def needed(self, channels: int) -> int:
        """Bytes that the sums take, 0 where products of patches are less work.

        Those are made in bands of the upper triangle, of wide ones little more than half (`symmetric_sums`).
        """
        plan, width = self.lines, channels // self.groups * prod(self.size)
        if plan.count > 0.56 * self.size[0] ** 2 * plan.out:
            return 0
        return 8 * self.groups * ((width + 1) ** 2 + len(plan.pieces) * (width // self.size[0]) ** 2)


@dataclass(eq=False)
class PatchProducts(ProductSum):
    """The sums for every piece, and along the edge for a bias: few numbers, put together when all batches are in."""

    kernel: Kernel
    reverse: bool
    """Whether the kernel is met in reverse, as that of a transposed convolution."""
    pieces: Tensor
    """[pieces, K, C * inner, C * inner]"""
    edges: Tensor | None
    """[kernel, K, C * inner], where there is a bias."""
    points: int

    @property
    def bytes(self) -> int:
        return self.pieces.numel() * self.pieces.element_size()

    def add(self, other: ProductSum) -> bool:
        """Takes the sums of other data points; False where their images have another size."""
        assert isinstance(other, PatchProducts)
        if (self.kernel, self.reverse, self.edges is None) != (other.kernel, other.reverse, other.edges is None):
            return False
        self.pieces += other.pieces
        if self.edges is not None and other.edges is not None:
            self.edges += other.edges
        self.points += other.points
        return True

    def matrix(self) -> Tensor:
        """[K, I, I], I = C / K * prod(kernel), one more for a bias."""
        kernel, plan, ones = self.kernel, self.kernel.lines, self.edges is not None
        high, inner, groups = kernel.size[0], prod(kernel.size[1:]), self.pieces.shape[1]
        channels = self.pieces.shape[2] // inner
        width, found = channels * high * inner, dict(zip(plan.pieces, self.pieces, strict=True))
        out = self.pieces.new_empty(groups, width + ones, width + ones)
        sides = (channels, high, inner)
        apart = out[:, :width, :width].unflatten(2, sides).unflatten(1, sides)  # a view: [K, C, k, i, C, k', i']
        for (k, other), pieces in plan.pairs.items():
            block = torch.stack([found[piece] for piece in pieces]).sum(0) if len(pieces) > 1 else found[pieces[0]]
            apart[:, :, other, :, :, k] = block.mT.unflatten(2, (channels, inner)).unflatten(1, (channels, inner))
            apart[:, :, k, :, :, other] = block.unflatten(2, (channels, inner)).unflatten(1, (channels, inner))
        if self.edges is not None:
            edge = (
                self.edges.transpose(0, 1).unflatten(2, (channels, inner)).transpose(1, 2).flatten(1)
            )  # [K, (C, k, i)]
            out[:, :width, width] = out[:, width, :width] = edge
            out[:, width, width] = self.points * prod(kernel.positions)
        return _turned(out, kernel.size, ones) if self.reverse else out


def patch_products(
    images: Callable[[slice], Tensor],
    batch: int,
    channels: int,
    kernel: Kernel,
    ones: bool,
    like: Tensor,
    budget: int,
    reverse: bool = False,
) -> PatchProducts:
    """Of padded images [n, C, *size] of some data points, as `like`: a few at a time, whose lines fit the budget."""
    plan, groups, channels = kernel.lines, kernel.groups, channels // kernel.groups
    high, inner = kernel.size[0], prod(kernel.size[1:])
    found = like.new_zeros(len(plan.pieces), groups, channels * inner, channels * inner)
    edges = like.new_zeros(high, groups, channels * inner) if ones else None
    tall = kernel.stride[0] * plan.out + kernel.dilation[0] * (high - 1)
    each = tall * groups * channels * inner * prod(kernel.positions[1:]) * like.element_size()
    for points in chunks(batch, each, budget):
        part = images(points).to(like.dtype)
        made = {r: _lines(part, r, kernel) for r in plan.residues}
        for piece, total in zip(plan.pieces, found, strict=True):
            r, there, away, start, stop = piece
            left, right = made[r][:, :, start:stop], made[there][:, :, start + away : stop + away]
            total.baddbmm_(left.flatten(2), right.flatten(2).mT)
        if edges is not None:
            sums = {r: values.sum(-1) for r, values in made.items()}
            for edge, (r, a) in zip(edges, plan.starts, strict=True):
                edge += sums[r][:, :, a : a + plan.out].sum(-1)
    return PatchProducts(kernel, reverse, found, edges, batch)


def _turned(found: Tensor, kernel: tuple[int, ...], ones: bool) -> Tensor:
    """The products for the kernel in reverse."""
    width = found.shape[-1] - ones
    order = torch.arange(width, device=found.device).unflatten(0, (-1, prod(kernel))).flip(1).flatten()
    order = torch.cat([order, order.new_full((int(ones),), width)])
    return found[:, order][:, :, order]


def _lines(x: Tensor, residue: int, kernel: Kernel) -> Tensor:
    """[N, C, *size] -> [K, C / K * inner, lines, N * inner positions]: lines of one residue, patches along the rest."""
    dims = len(kernel.size)
    x = x[:, :, residue :: kernel.stride[0]]
    view = windows(x, (1, *kernel.size[1:]), (1, *kernel.stride[1:]), (1, *kernel.dilation[1:])).select(2 + dims, 0)
    positions, inner = range(3, 2 + dims), range(2 + dims, 1 + 2 * dims)  # of [n, C, lines, *positions, *inner]
    ordered = view.permute(1, *inner, 2, 0, *positions).unflatten(0, (kernel.groups, -1))
    return ordered.contiguous().flatten(2 + dims).flatten(1, dims)
