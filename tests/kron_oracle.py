"""Kronecker factors spelled out: modules hooked, one data point at a time, patches by loops, one backward per column.

Independent of lapwing's recorder, rules and structures. For every module that has a weight matrix,

    expand   (1 / (N T)) (sum_nt g g^T) (x) (sum_nt a a^T)
    reduce   (1 / N) (sum_n g_n g_n^T) (x) (sum_n a_n a_n^T),  a_n the mean and g_n the sum over positions

is placed at the flat positions of its weight and bias; every other parameter gets its exact block from the oracle.
Uses of one module are further positions. An embedding is always expanded: its input factor is diagonal.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oracle

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
MATRICES = (nn.Linear, nn.Embedding, *CONVOLUTIONS, *TRANSPOSED)


@dataclass
class Layer:
    """a [T, K, I] and g [R, T, K, O] of every data point."""

    module: nn.Module
    inputs: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)


def square_root(likelihood: Any, f: Tensor, y: Tensor) -> Tensor:
    """[R, C]: rows whose outer products sum to the output Hessian of one data point."""
    hess = oracle.output_hessian(likelihood, f, y)[0]
    values, vectors = torch.linalg.eigh(hess)
    return (vectors * values.clamp_min(0).sqrt()).mT


def kron(
    model: nn.Module, likelihood: Any, x: Any, y: Tensor, *, sharing: str = "expand", joint_bias: bool = True
) -> Tensor:
    """The block-diagonal Kronecker approximation [P, P] in flat parameter order."""
    layers = {name: Layer(module) for name, module in model.named_modules() if isinstance(module, MATRICES)}
    for n in range(oracle.size(x)):
        collect(model, likelihood, oracle.one(x, n), y[n : n + 1], layers)
    starts, at = {}, 0
    params = oracle.parameters(model)
    for name, p in params.items():
        starts[name] = at
        at += p.numel()
    ggn = oracle.ggn(model, likelihood, x, y)
    out = torch.zeros_like(ggn)
    covered = set()
    for name, layer in layers.items():
        weight, bias = f"{name}.weight".lstrip("."), f"{name}.bias".lstrip(".")
        if weight not in params or not layer.inputs:
            continue
        index = positions(layer.module, starts[weight], starts.get(bias))
        A, G = factors(layer, sharing)
        width = index.shape[-1]
        covered |= {weight} | ({bias} if bias in starts else set())
        for k in range(len(index)):
            block = torch.kron(G[k], A[k][:width, :width])
            where = index[k].flatten()
            if bias in starts and not joint_bias:
                is_bias = torch.arange(width) == width - 1
                same = (is_bias[:, None] == is_bias[None, :]).repeat(len(G[k]), len(G[k]))
                block = block * same
            out[where[:, None], where[None, :]] = block
    for name, p in params.items():
        if name not in covered:
            part = slice(starts[name], starts[name] + p.numel())
            out[part, part] = ggn[part, part]
    return out


def factors(layer: Layer, sharing: str) -> tuple[Tensor, Tensor]:
    """A [K, I, I] and G [K, O, O], the count divided out of A."""
    a, g = torch.stack(layer.inputs), torch.stack(layer.grads)  # [N, T, K, I] and [N, R, T, K, O]
    if sharing == "reduce" and not isinstance(layer.module, nn.Embedding):
        a, g = a.mean(1, keepdim=True), g.sum(2, keepdim=True)
    used = a.shape[0] * a.shape[1]
    if isinstance(layer.module, nn.Embedding) and layer.module.padding_idx is not None:
        used = int(a.sum())  # padded positions do not use the table
    A = torch.einsum("ntki,ntkj->kij", a, a) / max(used, 1)
    return A, torch.einsum("nrtko,nrtkp->kop", g, g)


def positions(module: nn.Module, weight: int, bias: int | None) -> Tensor:
    """[K, O, I (+ 1)]: where in the flat vector the entries of the matrix [W, b] lie."""
    w = module.weight
    flat = weight + torch.arange(w.numel())
    if isinstance(module, nn.Embedding):
        return flat.reshape(w.shape).T.unsqueeze(0)  # one row per feature, one column per token
    groups = getattr(module, "groups", 1)
    if isinstance(module, TRANSPOSED):  # stored [C_in, C_out / K, *kernel]
        index = flat.reshape(groups, w.shape[0] // groups, w.shape[1], -1).permute(0, 2, 1, 3).flatten(2)
    else:
        index = flat.reshape(groups, w.shape[0] // groups, -1)
    if bias is None:
        return index
    column = bias + torch.arange(index.shape[0] * index.shape[1]).reshape(*index.shape[:2], 1)
    return torch.cat([index, column], dim=-1)


def collect(model: nn.Module, likelihood: Any, x: Any, y: Tensor, layers: dict[str, Layer]) -> None:
    """Hooks, one forward pass of one data point, and one backward pass per column."""
    calls: list[tuple[str, Tensor, Tensor]] = []

    def hook(name: str, args: tuple, out: Tensor) -> Tensor:
        calls.append((name, args[0], out))
        return out.clone()  # operations in place then write into the copy

    handles = [
        layer.module.register_forward_hook(lambda _, args, out, name=name: hook(name, args, out))
        for name, layer in layers.items()
    ]
    try:
        f = oracle.forward(model, x)
    finally:
        for handle in handles:
            handle.remove()
    root = square_root(likelihood, f.detach(), y)
    found: dict[str, list[tuple[Tensor, Tensor]]] = {}
    outs = [out for _, _, out in calls]
    columns = []
    for column in root:
        grads = torch.autograd.grad(f, outs, column.reshape(f.shape), retain_graph=True, allow_unused=True)
        columns.append([torch.zeros_like(o) if g is None else g for o, g in zip(outs, grads, strict=True)])
    for i, (name, given, _) in enumerate(calls):
        module = layers[name].module
        a = inputs_of(module, given.detach())
        g = torch.stack([grads_of(module, grads[i]) for grads in columns])
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            g = g * (a.sum(-1) > 0).to(g.dtype).unsqueeze(-1)
        found.setdefault(name, []).append((a, g))
    for name, uses in found.items():
        layers[name].inputs.append(torch.cat([a for a, _ in uses]))
        layers[name].grads.append(torch.cat([g for _, g in uses], dim=1))


def grads_of(module: nn.Module, grad: Tensor) -> Tensor:
    """[T, K, O]"""
    if isinstance(module, (*CONVOLUTIONS, *TRANSPOSED)):
        return grad[0].reshape(module.groups, grad.shape[1] // module.groups, -1).permute(2, 0, 1)
    return grad.reshape(-1, 1, grad.shape[-1])


def inputs_of(module: nn.Module, x: Tensor) -> Tensor:
    """[T, K, I], with a last column of ones."""
    if isinstance(module, nn.Embedding):
        a = F.one_hot(x.flatten(), module.num_embeddings).to(module.weight.dtype)
        if module.padding_idx is not None:
            a[:, module.padding_idx] = 0
        return a.unsqueeze(1)
    if isinstance(module, CONVOLUTIONS):
        a = convolution_inputs(module, x)
    elif isinstance(module, TRANSPOSED):
        a = transposed_inputs(module, x)
    else:
        a = x.reshape(-1, 1, x.shape[-1])
    return torch.cat([a, torch.ones_like(a[..., :1])], dim=-1)


def convolution_inputs(conv: nn.Module, x: Tensor) -> Tensor:
    """Loops over output positions and kernel offsets."""
    dims = len(conv.kernel_size)
    if conv.padding == "same":
        total = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
        sides = [(t // 2, t - t // 2) for t in total]
    elif conv.padding == "valid":
        sides = [(0, 0)] * dims
    else:
        sides = [(p, p) for p in conv.padding]
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    x = F.pad(x, [amount for side in reversed(sides) for amount in side], mode=mode)[0]
    sizes = [
        (s - d * (k - 1) - 1) // t + 1
        for s, k, t, d in zip(x.shape[1:], conv.kernel_size, conv.stride, conv.dilation, strict=True)
    ]
    rows = []
    for place in itertools.product(*map(range, sizes)):
        columns = []
        for offset in itertools.product(*map(range, conv.kernel_size)):
            at = [p * t + k * d for p, t, k, d in zip(place, conv.stride, offset, conv.dilation, strict=True)]
            columns.append(x[(slice(None), *at)])
        rows.append(torch.stack(columns, dim=-1))  # [C, offsets]
    return torch.stack(rows).reshape(len(rows), conv.groups, -1)


def transposed_inputs(conv: nn.Module, x: Tensor) -> Tensor:
    """y[p] = sum over q, k with p = q stride - padding + k dilation of w[k] x[q]."""
    size = conv(x).shape[2:]
    rows = []
    for place in itertools.product(*map(range, size)):
        columns = []
        for offset in itertools.product(*map(range, conv.kernel_size)):
            reached = [p + a - k * d for p, a, k, d in zip(place, conv.padding, offset, conv.dilation, strict=True)]
            on_grid = all(r % t == 0 for r, t in zip(reached, conv.stride, strict=True))
            at = [r // t for r, t in zip(reached, conv.stride, strict=True)]
            inside = on_grid and all(0 <= q < s for q, s in zip(at, x.shape[2:], strict=True))
            columns.append(x[(0, slice(None), *at)] if inside else torch.zeros_like(x[0].flatten(1)[:, 0]))
        rows.append(torch.stack(columns, dim=-1))
    return torch.stack(rows).reshape(len(rows), conv.groups, -1)


def nearest(matrix: Tensor, rows: int, cols: int) -> tuple[Tensor, Tensor]:
    """Van Loan: G [rows, rows] and A [cols, cols] minimising |G (x) A - matrix|, from the largest singular pair."""
    rearranged = matrix.reshape(rows, cols, rows, cols).permute(0, 2, 1, 3).reshape(rows * rows, cols * cols)
    u, s, v = torch.linalg.svd(rearranged)
    return (s[0].sqrt() * u[:, 0]).reshape(rows, rows), (s[0].sqrt() * v[0]).reshape(cols, cols)
