"""Which layer is the last one, and whether the model's output is f = phi W^T + b of its input phi.

Layers are watched by forward hooks during one pass without a graph; the hooks are gone afterwards, whatever happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from lapwing.errors import ModelError, ParameterError
from lapwing.params import ParamSpace
from lapwing.tangent.inputs import batch_size, call, outside_inference
from lapwing.tangent.operations import REFUSABLE, flat, refuse_rewriting, traits
from lapwing.tangent.private import all_modules, private

REDUCTIONS = ("pick_first", "pick_last", "average")
ELSEWHERE = "Name the layer with last_layer_name=, or use subset_of_weights='all'."
GENERAL = "Use subset_of_weights='all', or the general Tangent with ParamSpace.of(model).select(module=...)."


def last_layer_name(model: nn.Module, x: Any, reduction: str | None = None) -> str:
    """The name of the nn.Linear whose output is the model's output, at most reshaped (or reduced over positions).

    >>> last_layer_name(nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1)), torch.ones(4, 3))
    '2'
    """
    return last_layer_of(private(model), x, reduction)


def last_layer_of(network: nn.Module, x: Any, reduction: str | None) -> str:
    """The same of a private copy of the model, where hooks may be set."""
    check_reduction(reduction)
    batch = batch_size(x)
    leaves = {name: module for name, module in network.named_modules() if not next(module.children(), None)}
    linear = {name: module for name, module in network.named_modules() if isinstance(module, nn.Linear)}
    ran: list[str] = []
    with torch.inference_mode(False), torch.no_grad():
        x = outside_inference(x)
        with watched(leaves, lambda name, *_: ran.append(name)), recorded(linear) as uses, Readers(()):
            output = call(network, x)
    found = [use for use in uses if explains(linear[use.name], use.by_sample(batch, reduction, output), output)]
    # of two layers with equal outputs, one that merely feeds the other has its own memory
    same = [use for use in found if use.output.untyped_storage().data_ptr() == output.untyped_storage().data_ptr()]
    names = list(dict.fromkeys(use.name for use in (same or found)))
    if len(names) == 1:
        return names[0]
    if names:
        raise ModelError(f"the layers {names} all give the model's output; expected one last layer. {ELSEWHERE}")
    last = f"'{ran[-1]}' ({type(leaves[ran[-1]]).__name__})" if ran else "none"
    differs = f"that of the last nn.Linear, '{uses[-1].name}', differs" if uses else "none ran"
    raise ModelError(
        f"the last module to run is {last}, and no nn.Linear gives the model's output of shape {tuple(output.shape)} "
        f"({differs}); expected f = phi W^T + b, at most reshaped, without a softmax or another operation after it. "
        f"{ELSEWHERE}"
    )


def check_reduction(reduction: str | None) -> None:
    if reduction is not None and reduction not in REDUCTIONS:
        raise ParameterError(f"unknown reduction {reduction!r} of features; expected None or one of {REDUCTIONS}.")


def linear_layer(model: nn.Module, name: str) -> nn.Linear:
    """The module of this name, which must be an nn.Linear."""
    with suppress(KeyError, AttributeError):  # no walk through the whole model where the name leads to it
        module: Any = model
        for key in name.split(".") if name else ():
            module = module._modules[key]
        if isinstance(module, nn.Linear):
            return module
    modules = dict(model.named_modules(remove_duplicate=False))
    known = [each for each, module in modules.items() if isinstance(module, nn.Linear)]
    if name not in modules:
        raise ModelError(f"{type(model).__name__} has no module '{name}'; expected an nn.Linear, one of {known}.")
    layer = modules[name]
    if not isinstance(layer, nn.Linear):
        raise ModelError(
            f"the module '{name}' is {type(layer).__name__}; expected an nn.Linear, one of {known}, or "
            "subset_of_weights='all'."
        )
    return layer


def layer_space(model: nn.Module, name: str, layer: nn.Linear) -> ParamSpace:
    """The weight and bias of the layer, if these are plain parameters of its own."""
    weight, bias = parameter_name(name, "weight"), parameter_name(name, "bias")
    if not isinstance(layer.weight, nn.Parameter):
        raise ModelError(
            f"the weight of the last layer '{name}' is computed from other parameters; expected an nn.Parameter. "
            f"Remove the parametrisation. {GENERAL}"
        )
    if not layer.weight.requires_grad:
        raise ModelError(
            f"parameter '{weight}' of the last layer has requires_grad=False; expected a trainable one. Set "
            "requires_grad=True, or name another layer with last_layer_name=."
        )
    space = ParamSpace.of(model)
    if weight not in space.names:
        first = next(each for each, parameter in model.named_parameters() if parameter is layer.weight)
        raise ModelError(
            f"the weight of the last layer '{name}' is tied to '{first}'; expected one that the network uses nowhere "
            "else, as J is not the features otherwise. Give its name (last_layer_name=), and every use of the weight "
            f"is differentiated. {GENERAL}"
        )
    return space.select([each for each in (weight, bias) if each in space.names])


def parameter_name(module: str, parameter: str) -> str:
    return f"{module}.{parameter}" if module else parameter


def check_deterministic(model: nn.Module) -> None:
    """No layer that draws random numbers, or mixes the samples of a batch."""
    for module in all_modules(model):
        random = isinstance(module, _DropoutNd) and module.p > 0
        if module.training and (random or isinstance(module, _BatchNorm)):
            name = next(name for name, other in model.named_modules() if other is module)
            raise ModelError(
                f"the module '{name}' ({type(module).__name__}) is in training mode; expected independent samples and "
                "a deterministic model. Call model.eval()."
            )


@dataclass(frozen=True, eq=False)
class LayerCall:
    """One call of a layer: its input and its output, and the version that the output had."""

    name: str
    features: Tensor
    output: Tensor
    version: int

    def by_sample(
        self, batch: int, reduction: str | None, output: Tensor
    ) -> Float[Tensor, "batch positions width"] | None:
        """The features as [B, T, D]; those of the one position that the model's output was picked from, if it was."""
        features = by_sample(self.features, batch, reduction)
        if features is None or reduction is not None or features.shape[1] == 1 or self.output.is_nested:
            return features
        made = self.output.detach().reshape(batch, features.shape[1], -1)
        if output.numel() != batch * made.shape[2]:
            return features
        # a classifier of sequences scores every token, and takes the score of the last one that is no padding
        same = (made == output.detach().reshape(batch, 1, -1)).all(-1)
        picked = features[torch.arange(batch, device=features.device), same.int().argmax(1)].unsqueeze(1)
        # where several positions give the output, other features (in columns of W that are zero, say) leave it open
        eps = torch.finfo(features.dtype).eps
        other = ((features - picked).abs() > eps**0.5 * picked.abs().max()).any(-1) & same
        return features if not bool(same.any(1).all()) or bool(other.any()) else picked

    def is_whole(self, output: Tensor) -> bool:
        """Whether the model's output is this one in the same memory, in the same order, and not written to since."""
        return (
            output.data_ptr() == self.output.data_ptr()
            and output.numel() == self.output.numel()
            and output.is_contiguous()
            and self.output.is_contiguous()
            and (self.output.is_inference() or self.output._version == self.version)
        )


class Readers(TorchFunctionMode):
    """Counts the operations that make something of one of these tensors; refuses those that write into a parameter.

    While it is active, torch leaves out the fused paths of its encoders, which pack padded tokens into nested tensors.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.count = 0
        self._wanted = frozenset(id(tensor) for tensor in tensors)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if traits(func)[1] is REFUSABLE:
            refuse_rewriting(func, args, kwargs)
        out = func(*args, **kwargs)
        if not self._wanted.isdisjoint(map(id, flat(args, kwargs))) and flat((out,), {}):
            self.count += 1
        return out


@contextmanager
def watched(modules: Mapping[str, nn.Module], saw: Callable[[str, tuple, dict, Any], object]) -> Iterator[None]:
    """Tells `saw` the name, arguments and output of every call of these modules."""

    def hook(name: str) -> Callable[..., None]:
        def forward(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            saw(name, args, kwargs, output)

        return forward

    with ExitStack() as handles:
        for name, module in modules.items():
            if isinstance(module, torch.jit.ScriptModule):  # takes no hooks, and is no nn.Linear either
                continue
            handles.callback(module.register_forward_hook(hook(name), with_kwargs=True).remove)
        yield


@contextmanager
def recorded(layers: Mapping[str, nn.Linear]) -> Iterator[list[LayerCall]]:
    """Every call of these layers."""
    uses: list[LayerCall] = []

    def keep(name: str, args: tuple, kwargs: dict, output: Tensor) -> None:
        version = 0 if output.is_inference() else output._version
        uses.append(LayerCall(name, args[0] if args else kwargs["input"], output, version))

    with watched(layers, keep):
        yield uses


def by_sample(features: Tensor, batch: int, reduction: str | None) -> Float[Tensor, "batch positions width"] | None:
    """Features as [B, T, D], reduced to T = 1 if asked; None if the rows do not divide into samples."""
    if features.numel() % (batch * features.shape[-1]):
        return None
    shared = features.reshape(batch, -1, features.shape[-1])
    if reduction == "average":
        return shared.mean(1, keepdim=True)
    return {"pick_first": shared[:, :1], "pick_last": shared[:, -1:], None: shared}[reduction]


@torch.no_grad()
def explains(layer: nn.Linear, features: Float[Tensor, "batch positions width"] | None, output: Tensor) -> bool:
    """Whether the output is the layer's value at these features, in the same order, up to rounding."""
    if features is None or features.shape[:2].numel() * layer.out_features != output.numel():
        return False
    dtype = torch.promote_types(torch.promote_types(layer.weight.dtype, output.dtype), torch.float32)
    features, weight = features.to(dtype), layer.weight.to(dtype)
    bias = None if layer.bias is None else layer.bias.to(dtype)
    expected = nn.functional.linear(features, weight, bias).reshape(output.shape)
    eps = max(torch.finfo(kind).eps for kind in (layer.weight.dtype, output.dtype))
    terms = features.norm(dim=-1).max() * weight.norm(dim=-1).max()  # cancel where the output is small
    return not bool(((output - expected).abs() > eps**0.5 * expected.abs().max() + eps * terms).any())


def differ(found: Tensor, expected: Tensor) -> bool:
    """Whether two tensors differ by more than rounding."""
    found, expected = found.detach(), expected.detach()
    eps = max(torch.finfo(kind).eps for kind in (found.dtype, expected.dtype))
    return bool(((found - expected).abs() > eps**0.5 * expected.abs().max()).any())
