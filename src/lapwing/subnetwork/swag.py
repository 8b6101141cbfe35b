"""Diagonal SWAG (Maddox et al. 2019): the variance [P] of every weight along an SGD trajectory, a score of weights.

Cost: `snapshots` * `every` epochs of SGD. Memory, beside that of a step: 4 P, for the weights that move, their
velocity, and the running mean and squares of the snapshots.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call

from lapwing.errors import DataError, ParameterError
from lapwing.estimate.data_pass import named, pairs
from lapwing.likelihoods import Likelihood
from lapwing.params import ParamSpace
from lapwing.tangent.inputs import Called, batch_size
from lapwing.tangent.private import private


def swag_variance(
    model: nn.Module,
    loader: Iterable[Any],
    likelihood: Likelihood,
    snapshots: int = 40,
    every: int = 1,
    lr: float | int = 0.01,
    momentum: float | int = 0.9,
    decay: float | int = 3e-4,
) -> Float[Tensor, " size"]:
    """Variance of every trainable weight along SGD from where the model stands (diagonal SWAG; Maddox et al. 2019).

    A snapshot after every `every` epochs, `snapshots` of them; the loss is the mean negative log-likelihood, `decay`
    its weight decay. The steps are taken on copies of the parameters and buffers (memory 4 P with the moments), so the
    model is not changed. It runs in the mode it is in: dropout is off unless it was left on.
    """
    if snapshots < 2 or every < 1:
        raise ParameterError(
            f"snapshots is {snapshots} and every is {every}; expected at least 2 snapshots, and every >= 1."
        )
    if not 0 < lr < float("inf") or not 0 <= momentum < 1 or not 0 <= decay < float("inf"):
        raise ParameterError(
            f"lr is {lr}, momentum {momentum}, decay {decay}; expected lr > 0, momentum in [0, 1) and decay >= 0."
        )
    space, caller = ParamSpace.of(model), Called(private(model))
    theta = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters() if p.requires_grad}
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    state = {f"model.{name}": value for name, value in {**theta, **buffers}.items()}
    velocity = {name: torch.zeros_like(value) for name, value in theta.items()}
    mean = space.ravel({name: value.detach() for name, value in theta.items()}).zero_()
    squares = torch.zeros_like(mean)
    for epoch in range(1, snapshots * every + 1):
        number = -1
        for number, (x, y) in enumerate(pairs(loader)):
            with named(number), torch.enable_grad():
                f = functional_call(caller, state, (x,))
                likelihood.check(f, y)
                loss = -likelihood.log_prob(f, y).sum() / batch_size(x)
            if not bool(torch.isfinite(loss)):
                raise DataError(
                    f"the loss of batch {number} is {float(loss.detach())} in epoch {epoch} of SGD; expected a finite "
                    f"number. Use a smaller lr than {lr}, or check the data."
                )
            grads = torch.autograd.grad(loss, list(theta.values()), allow_unused=True)
            with torch.no_grad():
                for (name, value), grad in zip(theta.items(), grads, strict=True):
                    if grad is not None:
                        velocity[name].mul_(momentum).add_(grad).add_(value, alpha=decay)
                        value.sub_(velocity[name], alpha=lr)
        if number < 0:
            raise DataError("the loader yields no batch; expected at least one (x, y) pair in every epoch.")
        if epoch % every == 0:
            now = space.ravel({name: value.detach() for name, value in theta.items()})
            away = now - mean
            mean = mean + away / (epoch // every)
            squares = squares + away * (now - mean)  # Welford: E[p^2] - E[p]^2 would cancel
    return squares / snapshots
