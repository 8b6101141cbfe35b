"""The user's model is never changed: what a forward pass may touch is put back, also after an exception."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restores buffers (values and objects) and train/eval flags of every module on the way out."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for module, name, buffer, before in buffers:
                module._buffers[name] = buffer
                if before is not None and buffer is not None and not _identical(buffer, before):
                    buffer.copy_(before)


def _identical(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


@contextmanager
def plain_attention() -> Iterator[None]:
    """Turns the fused paths of attention off, so that its operations can be seen, and differentiated twice."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
