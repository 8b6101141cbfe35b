"""The user's model is never changed: what a forward pass may touch is put back, also after an exception."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def unchanged(model: nn.Module, modules: Sequence[nn.Module] | None = None) -> Iterator[None]:
    """Restores buffers (values and objects) and train/eval flags of every module on the way out.

    `modules` are those of the model, where the caller has listed them already.
    """
    modules = list(model.modules()) if modules is None else modules
    modes = [module.training for module in modules]
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in modules
        if module._buffers
        for name, buffer in module._buffers.items()
    ]
    try:
        yield
    finally:
        for module, training in zip(modules, modes, strict=True):
            if module.training is not training:  # assigning to a module's attribute is slow
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
    before = [enabled() for enabled, _, _ in _SWITCHES]
    for _, switch, plain in _SWITCHES:
        switch(plain)
    try:
        yield
    finally:
        for (_, switch, _), value in zip(_SWITCHES, before, strict=True):
            switch(value)


_CUDA = torch.backends.cuda
_SWITCHES = (  # (whether it is on, how to set it, what is plain); those named after cuda decide for every device
    (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, False),
    (_CUDA.flash_sdp_enabled, _CUDA.enable_flash_sdp, False),
    (_CUDA.mem_efficient_sdp_enabled, _CUDA.enable_mem_efficient_sdp, False),
    (_CUDA.cudnn_sdp_enabled, _CUDA.enable_cudnn_sdp, False),
    (_CUDA.math_sdp_enabled, _CUDA.enable_math_sdp, True),
)
"""`sdpa_kernel` does the same at many times the cost, which every batch would pay."""
