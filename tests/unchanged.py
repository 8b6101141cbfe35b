"""The model is as it was: bit for bit, object for object, hook for hook."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
)


def _facts(model: nn.Module) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        facts[f"{name}: type"] = type(module)
        facts[f"{name}: mode"] = module.training
        facts[f"{name}: attributes"] = sorted(vars(module))
        for kind in _HOOKS:
            facts[f"{name}: {kind}"] = list(getattr(module, kind).items())
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            facts[f"{name}.{key}: object"] = id(tensor)
            if tensor is not None:
                facts[f"{name}.{key}: requires_grad"] = tensor.requires_grad
                facts[f"{name}.{key}: grad"] = None if tensor.grad is None else tensor.grad.clone()
                facts[f"{name}.{key}: hooks"] = len(tensor._backward_hooks or ())
                facts[f"{name}.{key}: layout"] = (tensor.dtype, tensor.shape, tensor.stride())
                facts[f"{name}.{key}: value"] = tensor.detach().clone()
    facts["fast path"] = torch.backends.mha.get_fastpath_enabled()
    facts["has_torch_function"] = torch.nn.functional.has_torch_function
    facts["grad mode"] = torch.is_grad_enabled()
    return facts


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Fails unless the model and torch's global switches are as before, also when the body raises."""
    before = _facts(model)
    try:
        yield
    finally:
        after = _facts(model)
        assert before.keys() == after.keys()
        for key, value in before.items():
            if isinstance(value, torch.Tensor):
                same = torch.equal(torch.nan_to_num(value), torch.nan_to_num(after[key]))
                assert same, f"{key} changed"
            else:
                assert value == after[key], f"{key} changed from {value} to {after[key]}"
