"""Slow, obvious references: one data point, one output and one backward pass at a time, and curvature spelled out.

Nothing here uses lapwing's recorder, rules or structures, nor any vectorised derivative of torch; only the likelihood's
own log-density and Hessian, which have tests of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, jacrev
from torch.nn.attention import SDPBackend, sdpa_kernel


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def one(x: Any, n: int) -> Any:
    """Data point n as a batch of one."""
    if isinstance(x, Tensor):
        return x[n : n + 1]
    if isinstance(x, Mapping):
        return {key: one(value, n) for key, value in x.items()}
    return tuple(one(value, n) for value in x)


def size(x: Any) -> int:
    if isinstance(x, Tensor):
        return len(x)
    return size(next(iter(x.values())) if isinstance(x, Mapping) else x[0])


def forward(model: nn.Module, x: Any) -> Tensor:
    """The call that a user would write; a model with `whole_input` takes its mapping as one argument."""
    if isinstance(x, Tensor) or getattr(model, "whole_input", False):
        out = model(x)
    elif isinstance(x, Mapping):
        out = model(**x)
    else:
        out = model(*x)
    return out if isinstance(out, Tensor) else out.logits


def flat_gradient(scalar: Tensor, params: list[Tensor], create_graph: bool = False) -> Tensor:
    """The gradient of a scalar as one vector; zeros where it does not depend on a parameter."""
    if not scalar.requires_grad:
        return torch.zeros(sum(p.numel() for p in params), dtype=scalar.dtype)
    grads = torch.autograd.grad(scalar, params, retain_graph=True, create_graph=create_graph, allow_unused=True)
    parts = [torch.zeros_like(p) if g is None else g.to_dense() for p, g in zip(params, grads, strict=True)]
    return torch.cat([part.reshape(-1) for part in parts])


def jacobian(model: nn.Module, x: Any) -> Tensor:
    """[B, C, P], all outputs of a data point flattened in C; one data point at a time, so that nothing can couple."""
    params = list(parameters(model).values())
    rows = []
    for n in range(size(x)):
        outputs = forward(model, one(x, n))[0].flatten()
        rows.append(torch.stack([flat_gradient(output, params) for output in outputs]))
    return torch.stack(rows)


def output_hessian(likelihood, f: Tensor, y: Tensor, kind: str = "ggn") -> Tensor:
    """[B, C, C] over all outputs of a data point, positions included.

    kind: "ggn" (the likelihood's PSD Hessian), "fisher", "hessian" (exact, by autograd).
    """
    batch, outputs = f.shape[0], f[0].numel()
    if kind == "hessian":
        rows = []
        for n in range(batch):
            loss = lambda v, n=n: -likelihood.log_prob(v.reshape(1, *f.shape[1:]), y[n : n + 1]).sum()  # noqa: E731
            rows.append(jacrev(grad(loss))(f[n].flatten()))
        return torch.stack(rows)
    blocks = likelihood.psd_hessian(f, y) if kind == "ggn" else likelihood.fisher(f)
    classes = blocks.shape[-1]
    blocks = blocks.reshape(batch, -1, classes, classes)
    index = likelihood.to_last(torch.arange(outputs).reshape(1, *f.shape[1:])).reshape(-1, classes)
    out = f.new_zeros(batch, outputs, outputs)
    for place in range(blocks.shape[1]):
        where = index[place]
        out[:, where[:, None], where[None, :]] = blocks[:, place]
    return out


def ggn(model: nn.Module, likelihood, x: Any, y: Tensor, kind: str = "ggn") -> Tensor:
    """sum_n J_n^T H_n J_n, [P, P]."""
    f = forward(model, x).detach()
    return contracted(jacobian(model, x), output_hessian(likelihood, f, y, kind))


def contracted(jac: Tensor, hess: Tensor) -> Tensor:
    """sum_n J_n^T H_n J_n of [B, C, P] and [B, C, C]."""
    return sum(j.mT @ h @ j for j, h in zip(jac, hess, strict=True))  # pyright: ignore[reportReturnType]


def empirical(model: nn.Module, likelihood, x: Any, y: Tensor) -> Tensor:
    """sum_n grad_n grad_n^T, one data point at a time."""
    params = list(parameters(model).values())
    rows = [
        flat_gradient(-likelihood.log_prob(forward(model, one(x, n)), y[n : n + 1]).sum(), params)
        for n in range(size(x))
    ]
    stacked = torch.stack(rows)
    return stacked.mT @ stacked


def hessian(model: nn.Module, likelihood, x: Any, y: Tensor) -> Tensor:
    """Second derivatives of the summed negative log-likelihood, [P, P], one row at a time."""
    params = list(parameters(model).values())
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels of attention have no second derivative
        gradient = flat_gradient(-likelihood.log_prob(forward(model, x), y).sum(), params, create_graph=True)
    return torch.stack([flat_gradient(entry, params) for entry in gradient])
