"""The network inside `DistributedDataParallel`, which copies gradients between processes and is no part of it."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself; of a wrapped one the module inside, whose parameters and names these are."""
    return model.module if isinstance(model, DistributedDataParallel) else model
