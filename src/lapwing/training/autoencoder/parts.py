"""An autoencoder as one network, and its two halves: modules over the same parameters, with the same names.

    Joined      x -> decoder(encoder(x))       two modules
    Marked      x -> model(x)                  one model, in which a submodule by name gives the latent code

The view of a part, "encoder" (x -> z) or "decoder" (z -> outputs), is a network that holds every parameter of the
whole, used or not: a posterior over the whole serves all three. The user's modules are held, not copied.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lapwing.errors import ModelError
from lapwing.tangent.inputs import call

Part = Literal["whole", "encoder", "decoder"]


class Whole(nn.Module, ABC):
    """An autoencoder: `forward` reconstructs. `view` makes networks of its halves."""

    part: Part = "whole"

    @abstractmethod
    def encode(self, x: Any) -> Tensor: ...

    @abstractmethod
    def decode(self, z: Tensor) -> Tensor: ...

    @abstractmethod
    def reconstruct(self, x: Any) -> Tensor: ...

    def forward(self, x: Any) -> Tensor:
        return {"whole": self.reconstruct, "encoder": self.encode, "decoder": self.decode}[self.part](x)

    def view(self, part: Part) -> Whole:
        """The network of a part: it has all the parameters of the whole, under the same names."""
        other = copy(self)
        other.part = part
        return other


class Joined(Whole):
    """Two modules, one behind the other."""

    def __init__(self, encoder: nn.Module, decoder: nn.Module) -> None:
        super().__init__()
        for name, module in (("encoder", encoder), ("decoder", decoder)):
            if not isinstance(module, nn.Module):
                raise ModelError(f"the {name} is {type(module).__name__}; expected a torch.nn.Module.")
        self.training = encoder.training
        self.encoder, self.decoder = encoder, decoder

    def encode(self, x: Any) -> Tensor:
        return call(self.encoder, x)

    def decode(self, z: Tensor) -> Tensor:
        return call(self.decoder, z)

    def reconstruct(self, x: Any) -> Tensor:
        return self.decode(self.encode(x))


class Reached(BaseException):
    """Ends a forward pass at the bottleneck; no `Exception`, which a model may catch."""


class Marked(Whole):
    """One model; the output of its submodule `bottleneck` is the latent code.

    `example` is an input of a row or more: to decode, the model runs on zeros of its shape, and the latent code takes
    the place of what the bottleneck gives.
    """

    example: Tensor

    def __init__(self, model: nn.Module, bottleneck: str, example: Tensor) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise ModelError(f"the model is {type(model).__name__}; expected a torch.nn.Module.")
        names = [name for name, _ in model.named_modules() if name]
        if bottleneck not in names:
            raise ModelError(f"the model has no submodule {bottleneck!r}; expected one of {names}.")
        if not isinstance(example, Tensor) or example.dim() < 2 or not len(example):
            found = tuple(example.shape) if isinstance(example, Tensor) else type(example).__name__
            raise ModelError(f"the example is {found}; expected a tensor of inputs, of one row or more.")
        self.training = model.training
        self.model, self.bottleneck = model, bottleneck
        self.register_buffer("example", example[:1].detach().clone(), persistent=False)

    def encode(self, x: Any) -> Tensor:
        reached: list[Tensor] = []

        def stop(module: nn.Module, given: Any, code: Tensor) -> None:
            reached.append(code)
            raise Reached

        handle = self.model.get_submodule(self.bottleneck).register_forward_hook(stop)
        try:
            call(self.model, x)
        except Reached:
            return reached[0]
        finally:
            handle.remove()
        raise self._unused()

    def decode(self, z: Tensor) -> Tensor:
        return self._decoded(z, torch.zeros_like(self.example))

    def _decoded(self, z: Tensor, x: Tensor) -> Tensor:
        used: list[bool] = []

        def exchange(module: nn.Module, given: Any, code: Tensor) -> Tensor:
            if code.shape[1:] != z.shape[1:]:
                raise ModelError(
                    f"latent points have shape {tuple(z.shape)}; expected (n, "
                    f"{', '.join(map(str, code.shape[1:]))}), as {self.bottleneck!r} gives them."
                )
            used.append(True)
            return z

        handle = self.model.get_submodule(self.bottleneck).register_forward_hook(exchange)
        try:
            out = call(self.model, x.expand(len(z), *x.shape[1:]))
        finally:
            handle.remove()
        if not used:
            raise self._unused()
        return out

    def _unused(self) -> ModelError:
        return ModelError(
            f"a forward pass does not go through {self.bottleneck!r}; expected the submodule whose output is the "
            "latent code. Name another one."
        )

    def reconstruct(self, x: Any) -> Tensor:
        return call(self.model, x)

    @torch.no_grad()
    def check(self, x: Tensor) -> None:
        """Refuses a model in which something of the input passes the bottleneck by: its codes cannot be decoded."""
        x = x[:1]
        code = self.encode(x)
        there, here = self._decoded(code, torch.zeros_like(x)), call(self.model, x)
        if not torch.allclose(there, here, rtol=1e-3, atol=1e-5):
            raise ModelError(
                f"the output depends on the input by a way around {self.bottleneck!r}; expected all of it to pass the "
                "bottleneck, so that a latent point can be decoded. Name a later submodule, or give an encoder and a "
                "decoder."
            )
