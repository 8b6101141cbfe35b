"""What a model, its parameter space and its output must be, before anything is differentiated."""

from __future__ import annotations

from torch import Tensor, nn

from lapwing.errors import ModelError, ParameterError
from lapwing.params import ParamSpace


def check_space(space: ParamSpace, model: nn.Module) -> None:
    """A space of this model: its names and shapes."""
    named = dict(model.named_parameters())
    if space.device.type == "meta":
        raise ModelError(
            "the model's parameters lie on meta, which holds no values; expected the device of the data. Use "
            "model.to_empty(device=...) and load its state."
        )
    for name, parameter in named.items():
        if parameter.is_inference():
            raise ModelError(
                f"parameter '{name}' was made in torch.inference_mode, where nothing can be differentiated; expected "
                "an ordinary one. Make or load the model outside of it, or take copy.deepcopy(model) outside of it."
            )
    for name, shape in zip(space.names, space.shapes, strict=True):
        if name not in named:
            raise ParameterError(
                f"the parameter space names '{name}', which {type(model).__name__} does not have; expected some of "
                f"{list(named)}. Build it with ParamSpace.of(model)."
            )
        if named[name].shape != shape:
            raise ParameterError(
                f"parameter '{name}' has shape {tuple(named[name].shape)} in the model and {tuple(shape)} in the "
                "parameter space; expected the same. Build it with ParamSpace.of(model)."
            )


def check_trainable(parameters: dict[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            raise ModelError(
                f"parameter '{name}' of the parameter space has requires_grad=False; expected a trainable one. Set "
                "requires_grad=True, or build the ParamSpace again after freezing."
            )


def check_output(value: Tensor, batch: int) -> None:
    if value.dim() < 2:
        raise ModelError(
            f"the model's output has shape {tuple(value.shape)}; expected [batch, outputs]. Keep the output axis, for "
            "example with unsqueeze(-1)."
        )
    if value.shape[0] != batch:
        raise ModelError(
            f"the model's output has {value.shape[0]} rows for a batch of {batch} inputs; expected one row per data "
            "point, samples along axis 0."
        )
    if not value.requires_grad:
        raise ModelError(
            "autograd finds no trainable parameter behind the model's output; expected at least one. Look for "
            "torch.no_grad or detach in the forward pass."
        )
