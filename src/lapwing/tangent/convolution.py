"""Convolutions of any dimension as contractions: the patches of the input that meet the kernel at every position.

    convolution:            y[n, p, k, o] = sum_i patch[n, p, k, i] w[k, o, i],   i = (channel, kernel offset)
    transposed convolution: the same, with patches of the input spread out by its stride and the kernel reversed

Memory N * positions * I for one layer at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor


def as_tuple(value: int | Sequence[int], dims: int) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, Sequence) else (value,)
    return values * dims if len(values) == 1 else values


def padded(x: Tensor, padding: str | int | Sequence[int], kernel: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """Zero padding as the convolution itself applies it ("valid", "same", or numbers)."""
    dims = len(kernel)
    if padding == "valid":
        sides = [(0, 0)] * dims
    elif padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        sides = [(t // 2, t - t // 2) for t in total]
    else:
        assert not isinstance(padding, str)
        sides = [(p, p) for p in as_tuple(padding, dims)]
    flat = [amount for side in reversed(sides) for amount in side]
    return F.pad(x, flat) if any(flat) else x


def windows(x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """[N, C, *size] -> view [N, C, *positions, *kernel]."""
    dims = len(kernel)
    size = x.shape[2:]
    out = [(s - d * (k - 1) - 1) // t + 1 for s, k, t, d in zip(size, kernel, stride, dilation, strict=True)]
    steps = x.stride()[2:]
    return x.as_strided(
        (*x.shape[:2], *out, *kernel),
        (*x.stride()[:2], *(steps[i] * stride[i] for i in range(dims)), *(steps[i] * dilation[i] for i in range(dims))),
    )


def patches(
    x: Tensor,
    kernel: Sequence[int],
    stride: int | Sequence[int],
    padding: str | int | Sequence[int],
    dilation: int | Sequence[int],
    groups: int,
    ones: bool,
) -> Tensor:
    """[N, C, *size] -> [N, positions, K, C / K * prod(kernel)], with a last column of ones for the bias if asked."""
    dims = len(kernel)
    stride, dilation = as_tuple(stride, dims), as_tuple(dilation, dims)
    view = windows(padded(x, padding, kernel, dilation), kernel, stride, dilation)
    return _to_patches(view, groups, dims, ones)


def spread_out(
    x: Tensor,
    kernel: Sequence[int],
    stride: int | Sequence[int],
    padding: int | Sequence[int],
    output_padding: int | Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """The image whose convolution with the reversed kernel is the transposed convolution: zeros between the pixels."""
    dims = len(kernel)
    stride, padding, output_padding = (as_tuple(value, dims) for value in (stride, padding, output_padding))
    size = x.shape[2:]
    spread = x.new_zeros(*x.shape[:2], *((s - 1) * t + 1 for s, t in zip(size, stride, strict=True)))
    spread[(..., *(slice(None, None, t) for t in stride))] = x
    sides = []
    for k, d, p, extra in zip(kernel, dilation, padding, output_padding, strict=True):
        sides.append((d * (k - 1) - p, d * (k - 1) - p + extra))
    return F.pad(spread, [amount for side in reversed(sides) for amount in side])  # negative amounts crop


def transposed_patches(
    x: Tensor,
    kernel: Sequence[int],
    stride: int | Sequence[int],
    padding: int | Sequence[int],
    output_padding: int | Sequence[int],
    groups: int,
    dilation: int | Sequence[int],
    ones: bool,
) -> Tensor:
    """As `patches`, for a transposed convolution: position p meets x[q] at kernel offset p + padding - q stride."""
    dims = len(kernel)
    dilation = as_tuple(dilation, dims)
    spread = spread_out(x, kernel, stride, padding, output_padding, dilation)
    view = windows(spread, kernel, (1,) * dims, dilation).flip(tuple(range(2 + dims, 2 + 2 * dims)))
    return _to_patches(view, groups, dims, ones)


def _to_patches(view: Tensor, groups: int, dims: int, ones: bool) -> Tensor:
    """Laid out as [K, I, N, positions] in memory: the copy runs along rows of the image, and products need no other."""
    n, channels = view.shape[:2]
    positions, kernel = view.shape[2 : 2 + dims], view.shape[2 + dims :]
    width = channels // groups * prod(kernel)
    out = view.new_empty(groups, width + ones, n, *positions)
    out[:, width:] = 1
    source = view.permute(1, *range(2 + dims, 2 + 2 * dims), 0, *range(2, 2 + dims))
    out[:, :width].unflatten(1, (channels // groups, *kernel)).copy_(source.unflatten(0, (groups, channels // groups)))
    return out.flatten(3).permute(2, 3, 0, 1)


def channels_last(y: Tensor, groups: int) -> Tensor:
    """[R, N, C, *positions] -> [R, N, positions, K, C / K]."""
    r, n, c = y.shape[:3]
    return y.reshape(r, n, groups, c // groups, -1).permute(0, 1, 4, 2, 3)


def weight_axes(weight: torch.Size, groups: int, transposed: bool) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
    """(split, perm, rows, cols) that bring a kernel to [K, O, I]."""
    kernel = prod(weight[2:])
    if transposed:  # stored [C_in, C_out / K, *kernel]
        split = (groups, weight[0] // groups, weight[1], kernel)
        return split, (0, 2, 1, 3), weight[1], weight[0] // groups * kernel
    return (groups, weight[0] // groups, weight[1] * kernel), (0, 1, 2), weight[0] // groups, weight[1] * kernel
