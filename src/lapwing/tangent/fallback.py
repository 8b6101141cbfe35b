"""Slower ways to the same numbers: for operations that cannot be vectorised, and parameters that no rule covers.

`opaque_rows` serves recurrent layers and custom operations, one data point at a time.

Each data point is run alone, and each cotangent is one backward pass: N R small passes. Correct for any operation that
autograd can differentiate; slow, and used only for the parameters that need it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from lapwing.errors import ModelError
from lapwing.linalg.rows import DenseRows, Piece
from lapwing.params import ParamSpace
from lapwing.tangent.inputs import batch_size, call, take
from lapwing.tangent.operations import Plain
from lapwing.tangent.quiet import quiet
from lapwing.tangent.sources import Derived


def opaque_rows(
    network: Callable[[], nn.Module],
    space: ParamSpace,
    names: list[str],
    x: Any,
    value: Float[Tensor, "n *out"],
    cotangents: Float[Tensor, "r n *out"],
) -> dict[str, Float[Tensor, "r n size"]]:
    """u[r,n]^T d f(x_n) / d parameter, flattened, for each of `names`; `network` gives a module to run."""
    named = dict(network().named_parameters())
    parameters = [named[name] for name in names]
    count, batch = len(cotangents), batch_size(x)
    out = [torch.zeros(count, batch, p.numel(), dtype=space.dtype, device=space.device) for p in parameters]
    for n in range(batch):
        with Plain(), torch.enable_grad():
            alone = call(network(), take(x, slice(n, n + 1)))
        if not torch.allclose(
            alone.detach()[0], value.detach()[n], rtol=1e-2, atol=1e-3 * float(value.detach().abs().max())
        ):
            raise ModelError(
                f"data point {n} gives another output alone than in its batch; expected independent samples. Call "
                "model.eval(); layers that mix data points cannot be linearised per sample."
            )
        for r in range(count):
            grads = gradients(alone, parameters, cotangents[r, n : n + 1].to(alone.dtype), retain_graph=r < count - 1)
            for rows, grad in zip(out, grads, strict=True):
                if grad is not None:
                    rows[r, n] = grad.flatten().to(space.dtype)
    return dict(zip(names, out, strict=True))


def gradients(output: Tensor, inputs: Sequence[Any], cotangent: Tensor, **options: bool) -> list[Tensor | None]:
    """d(cotangent . output) / d input, dense also for a table that asks for sparse gradients; None where unrelated."""
    grads = torch.autograd.grad(output, inputs, cotangent, allow_unused=True, **options)
    return [grad.to_dense() if grad is not None and grad.is_sparse else grad for grad in grads]


def batched_grad(
    output: Tensor | GradientEdge,
    inputs: Sequence[Any],
    cotangents: Float[Tensor, "r *out"],
    together: bool = True,
    graph: bool = False,
) -> list[Tensor | None]:
    """d(cotangent . output) / d input for every cotangent: [r, *input] each; None for an unrelated input.

    One vectorised backward pass if `together` and every operation on the way can be vectorised, else one pass per
    cotangent, whose results lie side by side in memory for each data point. `graph` makes them differentiable, one
    pass at a time: vectorised, torch 2.13 has a wrong second derivative of group_norm for as many cotangents as points.
    """
    options = {"retain_graph": True, "allow_unused": True, "create_graph": graph}
    # anomaly mode looks for NaN in a way that vmap refuses, and prints where: then the passes one by one
    count = cotangents.shape[0]
    if count > 1 and together and not graph and not torch.is_anomaly_enabled():
        try:
            with quiet():
                return list(torch.autograd.grad((output,), inputs, (cotangents,), is_grads_batched=True, **options))
        except RuntimeError:
            pass  # a genuine error is raised again by the plain passes
    if count == 1:
        grads = torch.autograd.grad((output,), inputs, (cotangents[0],), **options)
        return [None if grad is None else grad.unsqueeze(0) for grad in grads]
    if graph:
        passes = zip(*(torch.autograd.grad((output,), inputs, (u,), **options) for u in cotangents), strict=True)
        return [None if grads[0] is None else torch.stack(grads) for grads in passes]
    found: dict[int, Tensor] = {}
    for r, u in enumerate(cotangents):
        for i, grad in enumerate(torch.autograd.grad((output,), inputs, (u,), **options)):
            if grad is None:
                continue
            if i not in found:
                lead = grad.shape[:1]
                found[i] = grad.new_empty(*lead, count, *grad.shape[1:])
                found[i] = found[i].transpose(0, 1) if lead else found[i]
            found[i][r] = grad
    return [found.get(i) for i in range(len(inputs))]


def pull_back(
    derived: Derived,
    rows: Float[Tensor, "r n size"],
    parameters: Mapping[str, Tensor],
    space: ParamSpace,
    hidden: frozenset[str],
) -> list[Piece]:
    """Rows in the entries of a derived tensor, in those of the parameters it was computed from (without the hidden)."""
    names = sorted(derived.names - hidden)
    if not names:
        return []
    flat = rows.flatten(0, 1).reshape(-1, *derived.shape).to(derived.dtype)
    grads = batched_grad(
        derived.edge, [parameters[name] for name in names], flat, graph=flat.requires_grad and torch.is_grad_enabled()
    )
    return [
        DenseRows(space.whole.starts[name], grad.reshape(*rows.shape[:2], -1).to(space.dtype))
        for name, grad in zip(names, grads, strict=True)
        if grad is not None
    ]
