"""Model inputs of any kind: a tensor, a tuple or list, a mapping (a HuggingFace BatchEncoding too), nested or not.

Axis 0 of every tensor that has the batch size is the sample axis; other tensors are passed along as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from lapwing.errors import DataError, LapwingError, ModelError


def tensors(x: Any) -> list[Tensor]:
    """Every tensor of an input."""
    if isinstance(x, Tensor):
        return [x]
    inside = x.values() if isinstance(x, Mapping) else x if isinstance(x, (tuple, list)) else ()
    return [tensor for value in inside for tensor in tensors(value)]


def map_tensors(function: Callable[[Tensor], Tensor], x: Any) -> Any:
    """The same input with every tensor replaced; mappings become plain dicts."""
    if isinstance(x, Tensor):
        return function(x)
    if isinstance(x, Mapping):
        return {key: map_tensors(function, value) for key, value in x.items()}
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*(map_tensors(function, value) for value in x))
    if isinstance(x, (tuple, list)):
        return type(x)(map_tensors(function, value) for value in x)
    return x


def batch_size(x: Any) -> int:
    """The size of axis 0 of the first tensor of an input."""
    for tensor in tensors(x):
        if tensor.dim() == 0:
            continue
        if tensor.shape[0] == 0:
            raise DataError("the batch is empty (0 rows); expected at least one data point. Drop it from the loader.")
        return tensor.shape[0]
    raise DataError(
        f"no tensor with a sample axis in an input of type {type(x).__name__}; expected a tensor, a tuple, or a "
        "mapping of tensors with samples along axis 0."
    )


def take(x: Any, rows: slice) -> Any:
    """The data points in `rows`."""
    n = batch_size(x)
    return map_tensors(lambda t: t[rows] if t.dim() and t.shape[0] == n else t, x)


def shape_key(x: Any) -> tuple:
    """Shapes and dtypes of an input: what its record of operations may depend on."""
    if isinstance(x, Tensor):
        return tuple(x.shape), x.dtype
    return tuple((tuple(t.shape), t.dtype) for t in tensors(x))


def outside_inference(x: Any) -> Any:
    """The same input, with copies of tensors that were made in inference mode, which autograd refuses."""
    for tensor in tensors(x):
        if tensor.is_inference():
            return map_tensors(lambda t: t.clone() if t.is_inference() else t, x)
    return x


def check_input(x: Any, device: torch.device) -> int:
    """The batch size of an input that is on the model's device, and finite."""
    batch = batch_size(x)
    for tensor in tensors(x):
        if is_functorch_wrapped_tensor(tensor):
            raise DataError(
                "the input is a tensor inside torch.func (grad, vmap, jacrev or jvp), which a linearisation, itself "
                "made of derivatives, cannot be followed through; expected a plain tensor. Give the whole batch at "
                "once instead of vmap; for gradients in the inputs use enable_backprop=True and torch.autograd.grad."
            )
        if tensor.device != device:
            raise ModelError(
                f"the input lies on {tensor.device}, the model's parameters on {device}; expected one device. "
                "Move the batch with .to(device), or the model."
            )
        if tensor.is_floating_point() and not all_finite(tensor):
            where = (~torch.isfinite(tensor)).nonzero()
            point = f", data point {int(where[0, 0])} of the batch first" if where.shape[1] else ""
            raise DataError(
                f"the input holds NaN or infinite values{point}; expected finite ones. Remove or impute them."
            )
    return batch


def moved(x: Any, device: torch.device) -> Any:
    """The same data on a device."""
    for tensor in tensors(x):
        if tensor.is_meta and device.type != "meta":
            raise DataError(
                f"a tensor of shape {tuple(tensor.shape)} lies on meta, which holds no values; expected data, on any "
                "other device. Look for torch.device('meta') where it is made."
            )
    return x.to(device) if isinstance(x, Tensor) else map_tensors(lambda t: t.to(device), x)


def all_finite(tensor: Tensor) -> bool:
    """Whether every entry is finite. A finite sum says so at a fraction of the cost; otherwise each is looked at."""
    return isfinite(tensor.detach().sum().item()) or bool(torch.isfinite(tensor).all())


def call(model: nn.Module, x: Any) -> Tensor:
    """model(x), with tuples and mappings spread over the arguments of `forward` where its signature takes them."""
    args, kwargs = _arguments(model, x)
    try:
        output = model(*args, **kwargs)
    except LapwingError:
        raise
    except (RuntimeError, TypeError, IndexError, ValueError) as error:
        shapes = [f"{tuple(t.shape)} {t.dtype}" for t in tensors(x)]
        raise ModelError(
            f"the forward pass of {type(model).__name__} failed on an input of {', '.join(shapes)}: {error}; expected "
            "an input that the model takes. Check its shape, dtype and device by calling model(x)."
        ) from error
    return output_tensor(output)


class Called(nn.Module):
    """A model that takes its inputs, of any kind, as one argument: what `functional_call` can run."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def train(self, mode: bool = True) -> Called:  # the model's own mode is the user's
        return self

    def forward(self, x: Any) -> Tensor:
        return call(self.model, x)


def output_tensor(output: Any) -> Tensor:
    """The tensor that the likelihood reads: the output itself, or `.logits` of a HuggingFace output."""
    if isinstance(output, Tensor):
        return output
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    raise ModelError(
        f"the model returns {type(output).__name__}; expected a tensor, or an object with a tensor `.logits`. Wrap the "
        "model in a module whose forward returns the tensor that the likelihood reads."
    )


def _arguments(model: nn.Module, x: Any) -> tuple[tuple, dict]:
    if isinstance(x, Tensor) or not isinstance(x, (tuple, list, Mapping)):
        return (x,), {}
    kinds = inspect.Parameter
    parameters = inspect.signature(model.forward).parameters.values()
    positional = [p for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    if isinstance(x, Mapping):
        names = {p.name for p in parameters if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)}
        spread = all(key in names for key in x) or any(p.kind == kinds.VAR_KEYWORD for p in parameters)
        return ((), dict(x)) if spread else ((x,), {})
    spread = any(p.kind == kinds.VAR_POSITIONAL for p in parameters) or len(positional) >= len(x) > 1
    return (tuple(x), {}) if spread or len(x) == 1 else ((x,), {})
