"""PriorTerm: 1/2 (theta - mean)^T prior (theta - mean) / N over the tensors of a network, and its gradient, in place.

Precisions [P] are given to the tensors once, as one number where a tensor has one. A step then reads every weight once
for the value and once for the gradient; no graph is made for the latter, and nothing is gathered by group.

>>> import torch
>>> from torch import nn
>>> from lapwing.params import ParamSpace
>>> from lapwing.priors import Prior
>>> layer = nn.Linear(1, 1, bias=False)
>>> _ = nn.init.constant_(layer.weight, 3.0)
>>> space = ParamSpace.of(layer)
>>> term = PriorTerm.of(Prior.isotropic(space, 4.0), space, points=2)
>>> term.value([layer.weight]).item()                           # 4 * 3^2 / 2 / 2
9.0
>>> term.add_gradient([layer.weight])
>>> layer.weight.grad                                           # 4 * 3 / 2
tensor([[6.]])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.params import ParamSpace
from lapwing.priors import Prior


@dataclass(frozen=True, eq=False)
class PriorTerm:
    """Per tensor, in the order of the space: the precision over N and the mean, numbers or [entries] each."""

    precisions: tuple[float | Tensor, ...]
    means: tuple[float | Tensor, ...]
    shared: Float[Tensor, " tensors"]
    """The precisions that are numbers; 1 for the others."""

    @staticmethod
    def of(prior: Prior, space: ParamSpace, points: int) -> PriorTerm:
        precisions, means = _parts(prior.precision() / points, space), _parts(prior.mean, space)
        shared = [1.0 if isinstance(each, Tensor) else each for each in precisions]
        return PriorTerm(precisions, means, torch.tensor(shared, dtype=space.dtype, device=space.device))

    def value(self, tensors: Sequence[Tensor]) -> Float[Tensor, ""]:
        """The term at these tensors, differentiable in them."""
        squares = []
        for tensor, precision, mean in zip(tensors, self.precisions, self.means, strict=True):
            away = self._away(tensor, mean)
            squares.append(torch.dot(away, precision * away if isinstance(precision, Tensor) else away))
        return torch.dot(self.shared, torch.stack(squares)) / 2

    @torch.no_grad()
    def add_gradient(self, tensors: Sequence[Tensor], scale: float = 1.0) -> None:
        """Adds `scale` times the gradient of the term to the gradients that the tensors hold."""
        for tensor, precision, mean in zip(tensors, self.precisions, self.means, strict=True):
            dense = tensor.grad is not None and not tensor.grad.is_sparse
            if dense and not isinstance(precision, Tensor) and _is_zero(mean):
                assert tensor.grad is not None
                tensor.grad.add_(tensor, alpha=scale * precision)  # in one pass, without a copy
                continue
            add_slope(tensor, (self._away(tensor, mean) * precision * scale).reshape(tensor.shape))

    def at(self, tensors: Sequence[Tensor]) -> tuple[Float[Tensor, ""], Callable[[float], None]]:
        """The value, and what adds so much of the gradient: what an objective asks of a term."""
        return self.value(tensors), partial(self.add_gradient, tensors)

    def _away(self, tensor: Tensor, mean: float | Tensor) -> Float[Tensor, " entries"]:
        """theta - mean, in the dtype of the space."""
        away = tensor.to(self.shared.dtype).flatten()
        return away if _is_zero(mean) else away - mean


def add_slope(tensor: Tensor, slope: Tensor) -> None:
    """Adds to the gradient that a tensor holds, if any, in its own dtype."""
    slope = slope.to(tensor.dtype)
    if tensor.grad is None:
        tensor.grad = slope
    elif tensor.grad.is_sparse:
        tensor.grad = slope + tensor.grad
    else:
        tensor.grad.add_(slope)


def _is_zero(mean: float | Tensor) -> bool:
    return not isinstance(mean, Tensor) and mean == 0


def _parts(values: Tensor | float, space: ParamSpace) -> tuple[float | Tensor, ...]:
    """A number, or [P], given to the tensors: a number each, or [entries] where these differ."""
    values = torch.as_tensor(values, dtype=space.dtype, device=space.device).detach()
    flat = values.expand(space.size) if values.dim() == 0 else values
    parts = [part.flatten() for part in space.unravel(flat).values()]
    return tuple(float(part[0]) if len(part) and bool((part == part[0]).all()) else part for part in parts)
