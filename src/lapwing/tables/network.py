"""Networks for tables, by numbers and names: a multi-layer perceptron or a residual network, [B, D] to [B, C].

Where the noise varies with the inputs, the last layer has two heads, and the outputs are [B, 2 C]: C means, then C
log-variances, as `HeteroscedasticGaussian` takes them.

>>> build(Spec(3, 1, width=5)).eval()(torch.zeros(2, 3)).shape
torch.Size([2, 1])
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lapwing.errors import OptionError

KINDS = "mlp", "resnet"
ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "silu": nn.SiLU}
GAINS = {"tanh": 5 / 3, "relu": 2**0.5, "silu": 2**0.5}
"""Standard deviation of initial weights, times the root of the number of inputs: keeps the scale between layers."""


@dataclass(frozen=True)
class Spec:
    """A network by numbers and names, which JSON can hold: `Spec(**dataclasses.asdict(spec)) == spec`.

    mlp      `depth` hidden layers of `width`
    resnet   a linear map to `width`, and `depth` residual blocks of two layers each

    `outputs` counts amounts or classes; with `varying` noise the network gives a log-variance for each as well.
    """

    inputs: int
    outputs: int
    width: int = 50
    depth: int = 1
    kind: str = "mlp"
    activation: str = "tanh"
    varying: bool = False

    def __post_init__(self) -> None:
        for name, least in (("inputs", 1), ("outputs", 1), ("width", 1), ("depth", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise OptionError(f"{name} of a network is {value!r}; expected a whole number >= {least}.")
        for name, known in (("kind", KINDS), ("activation", tuple(ACTIVATIONS))):
            if getattr(self, name) not in known:
                raise OptionError(f"{name} of a network is {getattr(self, name)!r}; expected one of {list(known)}.")

    def likelihood(self, task: str) -> str:
        """By its name in `Laplace`."""
        return "heteroscedastic" if self.varying else task

    @property
    def tensors(self) -> int:
        """How many parameters and buffers the network has, told without building it."""
        layers = 2 * self.depth + 2 if self.kind == "resnet" else self.depth + 1
        return 2 * layers + (3 if self.varying else 0)  # weights of the noise, its level, the centre of its features

    @property
    def widest(self) -> int:
        """The largest number of units of any layer: the size of the largest Kronecker factor."""
        return max(self.inputs, self.outputs, self.width)


class Residual(nn.Module):
    """h + second(activation(first(h))): [B, width] to [B, width]."""

    def __init__(self, first: nn.Linear, activation: nn.Module, second: nn.Linear) -> None:
        super().__init__()
        self.first, self.activation, self.second = first, activation, second

    def forward(self, h: Float[Tensor, "batch width"]) -> Float[Tensor, "batch width"]:
        return h + self.second(self.activation(self.first(h)))


class Heads(nn.Module):
    """C means and C log-variances of the same features: [B, width] to [B, 2 C].

    Log-variances are `level` plus a linear map of the features less their `centre`, so that a prior around zero is one
    around constant noise. The level is not a weight: like sigma for constant noise, it is tuned by the evidence.
    """

    level: Tensor
    centre: Tensor

    def __init__(self, mean: nn.Linear, noise: nn.Linear, level: Float[Tensor, " outputs"]) -> None:
        super().__init__()
        self.mean, self.noise = mean, noise
        self.register_buffer("level", level)
        self.register_buffer("centre", torch.zeros_like(noise.weight[0]).detach())

    def forward(self, h: Float[Tensor, "batch width"]) -> Float[Tensor, "batch outputs"]:
        return torch.cat([self.mean(h), self.level + self.noise(h - self.centre)], 1)


class Network(nn.Sequential):
    """Layers one after the other, for inputs of any floating type.

    Weights are float64 unless asked otherwise: where noise is small, the curvature of the data is 1e9 times the prior,
    and float32 cannot hold both in one matrix.
    """

    def forward(self, input: Float[Tensor, "batch inputs"]) -> Float[Tensor, "batch outputs"]:
        return super().forward(input.to(next(self.parameters()).dtype))


def build(spec: Spec, generator: torch.Generator | None = None, *, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The network of a specification, in eval mode; weights from `generator`, or from torch's global one."""

    def linear(inputs: int, outputs: int, scale: float) -> nn.Linear:
        layer = nn.utils.skip_init(nn.Linear, inputs, outputs, dtype=dtype)
        assert isinstance(layer, nn.Linear)
        nn.init.normal_(layer.weight, std=scale * inputs**-0.5, generator=generator)
        nn.init.zeros_(layer.bias)
        return layer

    return _assembled(spec, linear)


def blank(spec: Spec, dtype: torch.dtype) -> nn.Module:
    """The network without memory (device "meta"): names and shapes, to be filled by `load_state_dict(assign=True)`."""

    def linear(inputs: int, outputs: int, scale: float) -> nn.Linear:
        return nn.Linear(inputs, outputs, dtype=dtype, device="meta")

    return _assembled(spec, linear)


def _assembled(spec: Spec, linear: Callable[[int, int, float], nn.Linear]) -> nn.Module:
    """The network of layers that `linear` makes, given inputs, outputs and the scale of initial weights."""
    gain = GAINS[spec.activation]
    activation = ACTIVATIONS[spec.activation]
    modules: list[nn.Module] = []
    if spec.kind == "resnet":
        modules.append(linear(spec.inputs, spec.width, 1.0))
        for _ in range(spec.depth):
            # blocks that start small keep the sum of any number of them at the scale of one
            second = linear(spec.width, spec.width, (spec.depth + 1) ** -0.5)
            modules.append(Residual(linear(spec.width, spec.width, gain), activation(), second))
        modules.append(activation())
    else:
        for number in range(spec.depth):
            modules += [linear(spec.width if number else spec.inputs, spec.width, gain), activation()]
    last = spec.width if spec.depth or spec.kind == "resnet" else spec.inputs
    end = linear(last, spec.outputs, 1.0)
    return Network(*modules, _heads(end, torch.zeros_like(end.bias).detach()) if spec.varying else end).eval()


@torch.no_grad()
def with_heads(model: nn.Module, level: float, x: Float[Tensor, "rows inputs"]) -> nn.Module:
    """A copy of a network for amounts that gives their noise as well: at first exp(level / 2) everywhere.

    The centre of its features is their mean over the rows of x.
    """
    assert isinstance(model, Network)
    *modules, end = deepcopy(model)
    assert isinstance(end, nn.Linear)
    heads = _heads(end, torch.full((end.out_features,), level, dtype=end.weight.dtype))
    heads.centre.copy_(nn.Sequential(*modules)(x.to(end.weight.dtype)).mean(0))
    return Network(*modules, heads).eval()


def as_trained(spec: Spec, model: nn.Module) -> Spec:
    """The specification of a network that may have been given heads."""
    *_, end = model.children()
    return replace(spec, varying=isinstance(end, Heads))


def heads_of(model: nn.Module) -> Heads:
    """The last layer of a network whose noise varies."""
    *_, heads = model.children()
    assert isinstance(heads, Heads)
    return heads


def noise_level(model: nn.Module) -> Float[Tensor, " outputs"]:
    """Standard deviation around which the noise of a network with heads varies."""
    return (heads_of(model).level / 2).exp()


def _heads(mean: nn.Linear, level: Float[Tensor, " outputs"]) -> Heads:
    place = {"dtype": mean.weight.dtype, "device": mean.weight.device}
    noise = nn.utils.skip_init(nn.Linear, mean.in_features, mean.out_features, bias=False, **place)
    assert isinstance(noise, nn.Linear)
    nn.init.zeros_(noise.weight)
    return Heads(mean, noise, level)
