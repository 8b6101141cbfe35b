"""Importance: what Synaptic Intelligence keeps of a task, from the steps of its training (thesis 5.28).

    omega = -sum_k g_k (theta_{k+1} - theta_k)          g_k the gradient of the task's own loss, of all its points
    Omega = lambda max(omega, 0) / ((theta_K - theta_0)^2 + epsilon)

omega is the part of the fall of the loss that each weight brought about, to first order: positive where the loss fell,
so that the sign is minus for a loss that is minimised. A weight along which it rose on the whole has no importance, as
a negative one would push away from the task's weights. Memory: four vectors [P].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.linalg import Diagonal


@dataclass(eq=False)
class Importance:
    """Of the weights `start` on; `points` are those of the task, of which a batch's loss is the mean."""

    start: Float[Tensor, " params"]
    points: int
    omega: Float[Tensor, " params"] = field(default=None)  # pyright: ignore[reportAssignmentType]
    _step: tuple[Tensor, Tensor] | None = None

    def __post_init__(self) -> None:
        if self.omega is None:
            self.omega = torch.zeros_like(self.start)

    @torch.no_grad()
    def watch(self, tensors: Sequence[Tensor]) -> None:
        """Before a step: weights and gradient. An optimiser may ask for several gradients; the first is that of 5.28"""
        if self._step is None:
            gradient = [torch.zeros_like(t) if t.grad is None else t.grad.to_dense() for t in tensors]
            self._step = self.flat(tensors), self.flat(gradient)

    @torch.no_grad()
    def stepped(self, tensors: Sequence[Tensor]) -> None:
        """After the step."""
        assert self._step is not None
        before, gradient = self._step
        self.omega -= self.points * gradient * (self.flat(tensors) - before)
        self._step = None

    def curvature(self, end: Float[Tensor, " params"], epsilon: float | int, multiplier: float | int) -> Diagonal:
        """Omega, in the place of a curvature."""
        return Diagonal(multiplier * self.omega.clamp_min(0) / ((end - self.start).square() + epsilon))

    def flat(self, tensors: Sequence[Tensor]) -> Float[Tensor, " params"]:
        """The first entries of the tensors side by side, as many as there are weights to watch; a copy."""
        return torch.cat([t.detach().to(self.start.dtype).flatten() for t in tensors])[: len(self.start)].clone()
