"""Adam up the evidence: steps on log precisions [groups] and log sigma, at fixed weights.

The weights may change between two calls; a `Hyper` keeps Adam's moments, [groups] or [groups + 1] of each.
The curvature is decomposed once for all steps of a call; a step is an evaluation of log Z and of its gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.errors import CurvatureError, ParameterError
from lapwing.evidence import Evidence, Tuned
from lapwing.evidence.marginal import lowest_noise
from lapwing.evidence.tuners import HIGHEST, LOWEST
from lapwing.priors import Prior
from lapwing.training.options import check_numbers


@dataclass(eq=False)
class Hyper:
    """Adam's moments for log precisions and log sigma, kept between calls of `adam`; `values`: log Z at each step."""

    free: Float[Tensor, " free"]
    optimiser: torch.optim.Adam
    values: list[float] = field(default_factory=list)

    @staticmethod
    def of(prior: Prior, noise: bool) -> Hyper:
        """Fresh moments for one log precision per group, and for log sigma where there is `noise` to tune."""
        free = torch.zeros(len(prior.precisions) + noise, dtype=prior.precisions.dtype, device=prior.precisions.device)
        free.requires_grad_()
        return Hyper(free, torch.optim.Adam([free]))


def adam(
    evidence: Evidence,
    prior: Prior,
    sigma: float | int | Tensor = 1.0,
    steps: int = 100,
    lr: float | int = 0.1,
    *,
    temperature: float | int = 1.0,
    fixed_noise: bool = False,
    state: Hyper | None = None,
) -> Tuned:
    """`steps` of Adam up the evidence, from `prior` and `sigma`; with a `state`, its moments go on where they were.

    Unlike `evidence.gradient` it does not go to the optimum, which moves while the weights are trained.
    """
    check_numbers(steps=steps, lr=lr, temperature=temperature)
    noise = evidence.has_noise and not fixed_noise
    state = Hyper.of(prior, noise) if state is None else state
    count = len(prior.precisions)
    if len(state.free) != count + noise:
        raise ParameterError(
            f"the state holds {len(state.free)} hyper-parameters; expected {count + noise}, the precisions of this "
            f"{prior.structure} prior{' and sigma' if noise else ''}. Start with state=None."
        )
    free, level = state.free, torch.as_tensor(sigma, dtype=state.free.dtype, device=state.free.device).detach()
    start, high = prior.precisions.detach().log(), torch.full_like(free, log(HIGHEST), requires_grad=False)
    low = torch.full_like(free, log(LOWEST), requires_grad=False)
    low[count:] = log(lowest_noise(free.dtype))
    with torch.no_grad():
        free.copy_(torch.cat([start, level.log().reshape(1)]) if noise else start).clamp_(low, high)
    state.optimiser.param_groups[0]["lr"] = lr

    def read() -> tuple[Prior, Tensor]:
        return prior.with_precisions(free[:count].exp()), free[count].exp() if noise else level

    def climb() -> Tensor:
        state.optimiser.zero_grad()
        with torch.enable_grad():
            trial, now = read()
            value = evidence.log_marginal(trial, now, temperature)
        if not bool(torch.isfinite(value)):
            raise CurvatureError(
                f"the evidence is {float(value.detach())} at prior precisions {trial.precisions.tolist()[:5]}, sigma "
                f"{float(now.detach()):.3g}; expected a finite number. Start from other values, or use a smaller lr."
            )
        (-value).backward()
        return value.detach()

    for _ in range(steps):
        state.values.append(float(climb()))
        state.optimiser.step()
        with torch.no_grad():
            free.clamp_(low, high)
    value = climb()
    assert free.grad is not None
    inside = (free.detach() > low) & (free.detach() < high)
    rest = float((free.grad * inside).abs().max())
    converged = rest <= torch.finfo(free.dtype).eps ** 0.5 * float(1 + value.abs())
    with torch.no_grad():
        trial, now = read()
    return Tuned(trial, now.clone(), value, converged, steps)
