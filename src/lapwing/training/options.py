"""What training is asked for, checked before the first step: numbers, the prior and noise to start from, optimisers.

Prior precisions [groups] and one sigma are made here, in the dtype and on the device of the weights. Nothing runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.errors import LikelihoodError, ParameterError
from lapwing.likelihoods import Gaussian, Likelihood
from lapwing.params import ParamSpace
from lapwing.priors import Prior

STRUCTURES: dict[str, Callable[..., Prior]] = {
    "isotropic": Prior.isotropic,
    "layerwise": Prior.layerwise,
    "per_tensor": Prior.per_tensor,
    "diagonal": Prior.diagonal,
}


def check_numbers(**values: float | int) -> None:
    """Counts are whole, at least 1 (`burn_in`, `steps` at least 0); rates and temperature are finite and positive."""
    least = {"epochs": 1, "every": 1, "burn_in": 0, "steps": 0, "points": 1, "checkpoint_every_batches": 1}
    for name, value in values.items():
        whole = isinstance(value, int) and not isinstance(value, bool)
        if name in least and not (whole and value >= least[name]):
            raise ParameterError(f"{name} is {value!r}; expected a whole number >= {least[name]}.")
        if name not in least and not 0 < value < float("inf"):
            raise ParameterError(f"{name} is {value}; expected a finite number > 0.")


def starting_prior(prior: Prior | str, precision: float | int | Tensor, space: ParamSpace) -> Prior:
    """The prior as given, checked for size; or, by the name of a structure, a new one with `precision` everywhere."""
    if isinstance(prior, str):
        if prior not in STRUCTURES:
            near = get_close_matches(prior, STRUCTURES, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"expected one of {list(STRUCTURES)}."
            raise ParameterError(f"unknown prior structure {prior!r}; {hint}")
        return STRUCTURES[prior](space, precision)
    if prior.size != space.size:
        raise ParameterError(
            f"the prior is over {prior.size} weights and the model trains {space.size}; expected as many. Build it "
            "with ParamSpace.of(model)."
        )
    return prior


def starting_noise(
    likelihood: Likelihood, sigma: float | int | Tensor | None, space: ParamSpace, fixed: bool
) -> Float[Tensor, ""] | None:
    """The noise level to start from; None for a likelihood without one, or with one per output that is not tuned."""
    if isinstance(likelihood, Gaussian):
        own = torch.as_tensor(likelihood.sigma)
        if own.numel() == 1 or sigma is not None:
            value = torch.as_tensor(own if sigma is None else sigma, dtype=space.dtype, device=space.device).detach()
            if value.numel() != 1 or not bool(torch.isfinite(value).all()) or float(value) <= 0:
                raise LikelihoodError(f"sigma is {value.tolist()}; expected one finite number > 0.")
            return value.reshape(())
        if not fixed:
            raise LikelihoodError(
                f"the likelihood has {own.numel()} noise levels, and the evidence tunes one; expected Gaussian(sigma) "
                "with a number, or fixed_noise=True to leave them as they are."
            )
        return None
    if sigma is not None and float(sigma) != 1:
        raise LikelihoodError(f"sigma is {float(sigma)} for {type(likelihood).__name__}, which has no noise level.")
    return None


def built(build: Callable[..., Any], what: Any, options: Mapping[str, Any]) -> Any:
    """An optimiser of parameters, or a scheduler of an optimiser."""
    try:
        return build(what, **options)
    except (TypeError, ValueError) as error:
        name = getattr(build, "__name__", "the optimiser")
        raise ParameterError(f"{name} refuses {dict(options)}: {error}; expected arguments that it takes.") from error
