"""Likelihoods by the name of a task, and the noise level that is free to change after a fit."""

from __future__ import annotations

from torch import Tensor

from lapwing.errors import OptionError
from lapwing.laplace.names import Task, choose
from lapwing.likelihoods import Likelihood
from lapwing.likelihoods.tasks import TASKS


def likelihood_of(given: str | Likelihood) -> tuple[Likelihood, float | None]:
    """The likelihood at unit noise, and the noise level that is free to change (None where there is none)."""
    if isinstance(given, Likelihood):
        return given.split_noise()
    return TASKS[choose(given, [task.value for task in Task], "likelihood")]().split_noise()


def noise_of(given: float | int | Tensor, own: float | None) -> float | int | Tensor:
    """The noise level, when it may come from the likelihood object or from `sigma_noise`."""
    if own is None or own == 1:
        return given
    if isinstance(given, Tensor) or given not in (1, own):
        raise OptionError(
            f"sigma_noise is {given} and the likelihood says {own}; expected one of them. Leave sigma_noise out."
        )
    return own
