"""Train mode and torch's random numbers for the length of a run, and copies of parameters and buffers by name.

A copy takes the memory of the model; the rest is a flag per module and the state of a generator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lapwing.errors import StorageError


@contextmanager
def training_mode(model: nn.Module) -> Iterator[None]:
    """Train mode inside, as `train` documents it; every module's own mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        if not model.training:
            model.train()
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def following(generator: torch.Generator | None, device: torch.device) -> Iterator[None]:
    """The global generator follows `generator` inside, and is as before afterwards: dropout takes no other one."""
    if generator is None:
        yield
        return
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def copied(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, which no later step changes."""
    return {name: tensor.detach().clone() for name, tensor in _tensors(model).items()}


@torch.no_grad()
def restore(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """The values that `copied` kept, in the tensors that the model has."""
    for name, tensor in _tensors(model).items():
        tensor.copy_(state[name])


def check_same(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Refuses a state of other parameters and buffers than the model's, by name, shape and dtype."""
    found, ours = ({n: f"{tuple(v.shape)} {v.dtype}" for n, v in each.items()} for each in (state, _tensors(model)))
    different = next((name for name in {**ours, **found} if ours.get(name) != found.get(name)), None)
    if different is not None:
        raise StorageError(
            f"{different!r} is {found.get(different)} in the state and {ours.get(different)} in "
            f"{type(model).__name__}; expected the same. Build the model, and its parts, as they were."
        )
