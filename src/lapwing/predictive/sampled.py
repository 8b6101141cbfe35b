"""Predictions of the network itself at sampled weights: f(x, theta), theta ~ N(mean, Sigma).

Known to go off scale where the posterior is broad (the linearised network does not); kept for comparison and for
posteriors narrow enough. The model's own parameters are never written to. Draws of a small forward pass are run
together, as many as the budget allows, where `torch.vmap` can follow the model; others one after the other, which is
faster then (a convolution with other weights for each draw is grouped by draws) and needs the memory of one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lapwing.errors import LapwingError
from lapwing.linalg.rows import chunks
from lapwing.posterior import Gaussian
from lapwing.tangent import Tangent
from lapwing.tangent.guard import plain_attention, unchanged
from lapwing.tangent.inputs import Called, check_input

TOGETHER = 2**16
"""Entries of the largest activation up to which draws are run together: about where the two ways take the same time."""


def network_draws(
    posterior: Gaussian,
    tangent: Tangent,
    x: Any,
    n: int,
    generator: torch.Generator | None = None,
    differentiable: bool = False,
) -> Float[Tensor, "n batch *out"]:
    """Outputs at n sampled weight vectors: n forward passes, with the sampled tensors in place of the parameters.

    With `differentiable` they are functions of the inputs.
    """
    check_input(x, tangent.space.device)
    caller, space = Called(tangent.model), tangent.space

    def run(named: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(caller, named, (x,)).to(space.dtype)

    with unchanged(tangent.model), plain_attention(), torch.set_grad_enabled(differentiable):
        together = _follows(run, _named(tangent, posterior.mean.expand(2, -1)))
        out = []
        for part in chunks(n, 4 * space.total * space.dtype.itemsize, tangent.budget):
            named = _named(tangent, posterior.sample(part.stop - part.start, generator))
            out.append(torch.vmap(run)(named) if together else _in_turn(run, named))
    return torch.cat(out)


def _named(tangent: Tangent, theta: Float[Tensor, "n params"]) -> dict[str, Float[Tensor, "n *shape"]]:
    """Weight vectors as tensors by name; entries outside a sub-network stay where they are."""
    space, fixed = tangent.space, tangent.parameters
    if space.index is not None:
        away = space.whole.unravel(space.expand(theta - space.values(tangent.model)))
        named = {name: fixed[name].detach() + value for name, value in away.items()}
    else:
        named = space.unravel(theta)
    return {f"model.{name}": value.to(fixed[name].dtype) for name, value in named.items()}


def _in_turn(run: Callable[[dict[str, Tensor]], Tensor], named: dict[str, Tensor]) -> Tensor:
    count = len(next(iter(named.values())))
    return torch.stack([run({name: values[i] for name, values in named.items()}) for i in range(count)])


def _follows(run: Callable[[dict[str, Tensor]], Tensor], named: dict[str, Tensor]) -> bool:
    """Whether runs at once are worth it, and give what they give in turn: not where values decide, say."""
    with _Largest() as largest:
        expected = _in_turn(run, named)  # errors of the model itself are raised here
    if largest.numel > TOGETHER:
        return False
    try:
        found = torch.vmap(run)(named)
    except (RuntimeError, LapwingError):
        return False
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-3, atol=1e-5)


class _Largest(TorchFunctionMode):
    """The number of entries of the largest tensor that operations return while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.numel = max(self.numel, out.numel())
        return out
