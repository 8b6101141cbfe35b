"""Slow, obvious references: per-sample Jacobians by `torch.func.jacrev`, and curvature spelled out from them.

Nothing here uses lapwing's recorder, rules or structures; only the likelihood's own log-density and Hessian, which
have tests of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def flat(tree: dict[str, Tensor], lead: int) -> Tensor:
    return torch.cat([value.reshape(*value.shape[:lead], -1) for value in tree.values()], dim=-1)


def one(x, n: int):
    """Data point n as a batch of one."""
    if isinstance(x, Tensor):
        return x[n : n + 1]
    if isinstance(x, dict):
        return {key: one(value, n) for key, value in x.items()}
    return tuple(one(value, n) for value in x)


def size(x) -> int:
    return len(x) if isinstance(x, Tensor) else size(next(iter(x.values())) if isinstance(x, dict) else x[0])


def forward(model: nn.Module, params: dict[str, Tensor], x) -> Tensor:
    if isinstance(x, tuple):
        return functional_call(model, params, x)
    if isinstance(x, dict):
        return functional_call(model, params, (), x)
    return functional_call(model, params, (x,))


def jacobian(model: nn.Module, x) -> Tensor:
    """[B, C, P], all outputs of a data point flattened in C; one data point at a time, so that nothing can couple."""
    params = parameters(model)
    rows = [
        flat(jacrev(lambda p, n=n: forward(model, p, one(x, n))[0].flatten())(params), lead=1) for n in range(size(x))
    ]
    return torch.stack(rows).detach()


def output_hessian(likelihood, f: Tensor, y: Tensor, kind: str = "ggn") -> Tensor:
    """[B, C, C] over all outputs of a data point, positions included: brute force for "hessian", else from the likelihood.

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


def ggn(model: nn.Module, likelihood, x, y: Tensor, kind: str = "ggn") -> Tensor:
    """sum_n J_n^T H_n J_n, [P, P]."""
    f = forward(model, parameters(model), x).detach()
    jac = jacobian(model, x)
    return torch.einsum("ncp,ncd,ndq->pq", jac, output_hessian(likelihood, f, y, kind), jac)


def empirical(model: nn.Module, likelihood, x, y: Tensor) -> Tensor:
    """sum_n grad_n grad_n^T, the gradients by autograd one data point at a time."""
    rows = [flat(_loss_gradient(model, likelihood, one(x, n), y[n : n + 1]), 0) for n in range(size(x))]
    stacked = torch.stack(rows)
    return stacked.mT @ stacked


def hessian(model: nn.Module, likelihood, x, y: Tensor) -> Tensor:
    """Second derivatives of the summed negative log-likelihood, [P, P]."""
    params = parameters(model)
    shapes = [value.shape for value in params.values()]

    def loss(vector: Tensor) -> Tensor:
        parts = vector.split([shape.numel() for shape in shapes])
        tree = {n: part.reshape(shape) for n, part, shape in zip(params, parts, shapes, strict=True)}
        return -likelihood.log_prob(forward(model, tree, x), y).sum()

    return jacrev(jacrev(loss))(flat(params, 0))


def _loss_gradient(model: nn.Module, likelihood, x, y: Tensor) -> dict[str, Tensor]:
    return grad(lambda p: -likelihood.log_prob(forward(model, p, x), y).sum())(parameters(model))
