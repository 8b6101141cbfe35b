"""The autoencoder of C26, and its way downhill by damped KFAC updates (the source's 4.4, with one damping for both)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.estimate import kfac
from lapwing.likelihoods import Bernoulli
from lapwing.tangent import Tangent

LIKELIHOOD = Bernoulli()
State = dict[str, Tensor]


def autoencoder(pixels: int, hidden: list[int]) -> nn.Sequential:
    """pixels, hidden, hidden reversed, pixels, with tanh between; logits out. Glorot's uniform weights, zero biases."""
    sizes = [pixels, *hidden, *hidden[-2::-1], pixels]
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layer = nn.Linear(inputs, outputs)
        nn.init.xavier_uniform_(layer.weight)
        nn.init.zeros_(layer.bias)
        layers += [layer, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def train(model: nn.Module, x: Tensor, config: dict[str, Any]) -> tuple[dict[int, State], list[float]]:
    """The weights after each of config["measure_at"] updates, and the loss of every minibatch, a mean over images.

    d = -(KFAC + (lambda + tau) I)^-1 g, with new factors every `refresh` updates, as long as minimises the quadratic
    with the exact GGN (4.18); tau follows the ratio of actual to expected decrease (4.21), every `adapt` updates.
    """
    generator = torch.Generator().manual_seed(config["seed"])
    tangent, count = Tangent(model), config["batch"]
    decay, tau = config["weight_decay"], config["first_damping"]
    kept, losses = {0: _copy(model)}, []
    curvature = None
    for update in range(1, config["updates"] + 1):
        part = x[torch.randint(len(x), (count,), generator=generator)]
        if curvature is None or (update - 1) % config["refresh"] == 0:
            curvature = kfac(tangent, LIKELIHOOD, [(part, part)], generator=generator)
        linear, theta = tangent.at(part), tangent.space.values(model)
        loss = float(-LIKELIHOOD.log_prob(linear.value, part).mean())
        gradient = linear.rmv(LIKELIHOOD.grad(linear.value, part)) / count + decay * theta
        direction = -curvature.with_prior(count * (decay + tau)).solve(count * gradient)
        along = linear.mv(direction)
        bend = float((along * LIKELIHOOD.hessian_mv(linear.value, part, along)).sum()) / count
        slope = float(direction @ gradient)
        length = -slope / (bend + (decay + tau) * float(direction @ direction))
        moved = theta + length * direction
        with torch.no_grad():
            nn.utils.vector_to_parameters(moved, model.parameters())
            if update % config["adapt"] == 0:
                now = float(-LIKELIHOOD.log_prob(model(part), part).mean())
                change = now - loss + decay / 2 * float(moved @ moved - theta @ theta)
                tau *= config["damping_decay"] if change / (length * slope / 2) > 0.75 else 1 / config["damping_decay"]
        losses.append(loss)
        if update in config["measure_at"]:
            kept[update] = _copy(model)
        if update % 10 == 0:
            print(f"update {update}: loss {loss:.2f}, step {length:.3f}, damping {tau:.3f}", flush=True)
    return kept, losses


def _copy(model: nn.Module) -> State:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}
