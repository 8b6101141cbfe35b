"""Predictions of the network itself at sampled weights: f(x, theta), theta ~ N(mean, Sigma).

Known to go off scale where the posterior is broad (the linearised network does not); kept for comparison and for
posteriors narrow enough. The model's own parameters are never written to.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lapwing.posterior import Gaussian
from lapwing.tangent import Tangent
from lapwing.tangent.guard import plain_attention, unchanged
from lapwing.tangent.inputs import call, check_input


def network_draws(
    posterior: Gaussian, tangent: Tangent, x: Any, n: int, generator: torch.Generator | None = None
) -> Float[Tensor, "n batch *out"]:
    """Outputs at n sampled weight vectors: n forward passes, with the sampled tensors in place of the parameters."""
    check_input(x, tangent.space.device)
    caller = _Caller(tangent.model)
    at = posterior.sample(n, generator)
    fixed = tangent.parameters
    outside = tangent.space.values(tangent.model) if tangent.space.index is not None else None
    out = []
    for theta in at:
        if outside is not None:  # a sub-network: the other entries of its tensors stay where they are
            theta = tangent.space.expand(theta - outside)
            named = {k: fixed[k].detach() + v for k, v in tangent.space.whole.unravel(theta).items()}
        else:
            named = tangent.space.unravel(theta)
        named = {f"inner.{name}": value.to(fixed[name].dtype) for name, value in named.items()}
        with unchanged(tangent.model), plain_attention(), torch.no_grad():
            out.append(torch.func.functional_call(caller, named, (x,)).to(tangent.space.dtype))
    return torch.stack(out)


class _Caller(nn.Module):
    """Calls the model with any kind of input, as `Tangent` does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def train(self, mode: bool = True) -> _Caller:  # the model's own mode is the user's
        return self

    def forward(self, x: Any) -> Tensor:
        return call(self.inner, x)
