"""Predictions of the network itself at sampled weights: f(x, theta), theta ~ N(mean, Sigma).

Known to go off scale where the posterior is broad (the linearised network does not); kept for comparison and for
posteriors narrow enough. The model's own parameters are never written to. Draws of a small forward pass are run
together, as many as the budget allows, where `torch.vmap` can follow the model; others one after the other, which is
faster then (a convolution with other weights for each draw is grouped by draws) and needs the memory of one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lapwing.errors import LapwingError, ModelError
from lapwing.linalg.budget import chunks
from lapwing.posterior import Gaussian
from lapwing.tangent import Tangent
from lapwing.tangent.inputs import Called, check_input
from lapwing.tangent.operations import PLAIN, Plain, flat

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
    caller, space = Called(tangent.network()), tangent.space
    _refuse_scripted(caller)

    def run(named: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(caller, named, (x,)).to(space.dtype)

    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(differentiable))
        mean, seen = _named(tangent, posterior.mean.expand(2, -1)), _Seen(tangent.parameters)
        with seen:
            expected = _in_turn(run, mean)  # errors of the model itself are raised here
        if seen.fused:  # a mode costs time in every operation, and most models do without
            stack.enter_context(Plain())
        together = seen.largest <= TOGETHER and _follows(run, mean, expected)
        out = []
        for part in chunks(n, 4 * space.total * space.dtype.itemsize, tangent.budget):
            named = _named(tangent, posterior.sample(part.stop - part.start, generator))
            out.append(torch.vmap(run)(named) if together else _in_turn(run, named))
    return torch.cat(out)


def _refuse_scripted(caller: nn.Module) -> None:
    """TorchScript keeps its parameters where no other tensor can be put in their place."""
    for name, module in caller.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and next(module.parameters(), None) is not None:
            raise ModelError(
                f"{name.removeprefix('model').lstrip('.') or 'the model'} is a scripted module, and its parameters "
                "cannot be exchanged for sampled ones; expected modules of Python. Use pred_type='glm', or the model "
                "as it was before torch.jit.script or torch.jit.trace."
            )


def _named(tangent: Tangent, theta: Float[Tensor, "n params"]) -> dict[str, Float[Tensor, "n *shape"]]:
    return {f"model.{name}": value for name, value in tangent.tensors(theta).items()}


def _in_turn(run: Callable[[dict[str, Tensor]], Tensor], named: dict[str, Tensor]) -> Tensor:
    count = len(next(iter(named.values())))
    return torch.stack([run({name: values[i] for name, values in named.items()}) for i in range(count)])


def _follows(run: Callable[[dict[str, Tensor]], Tensor], named: dict[str, Tensor], expected: Tensor) -> bool:
    """Whether runs at once give what they give in turn: not where values decide, say."""
    try:
        found = torch.vmap(run)(named)
    except (RuntimeError, LapwingError):
        return False
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-3, atol=1e-5)


class _Seen(Plain):
    """The number of entries of the largest tensor that operations return, and whether one has a fused kernel.

    Refuses a model that reads one of its own parameters, in whose place another tensor was to be.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.largest, self.fused = 0, False
        self._names = {id(parameter): name for name, parameter in parameters.items()}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.fused = self.fused or func in PLAIN
        out = super().__torch_function__(func, types, args, kwargs)
        if isinstance(out, Tensor):
            self.largest = max(self.largest, out.numel())
        name = next((self._names[id(t)] for t in flat(args, kwargs or {}) if id(t) in self._names), None)
        if name is not None and flat((out,), {}):
            raise ModelError(
                f"the model reaches its parameter {name!r} by a way of its own (a global variable, or an object that "
                "is no module), where no sampled tensor can be put in its place; expected parameters that are read as "
                "attributes of the model's modules. Use pred_type='glm', or hand the module on as an attribute."
            )
        return out
