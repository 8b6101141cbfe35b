"""Likelihoods by the name of the task they are for."""

from __future__ import annotations

from lapwing.likelihoods.base import Likelihood
from lapwing.likelihoods.bernoulli import Bernoulli
from lapwing.likelihoods.categorical import Categorical
from lapwing.likelihoods.gaussian import Gaussian
from lapwing.likelihoods.heteroscedastic import HeteroscedasticGaussian
from lapwing.likelihoods.poisson import Poisson
from lapwing.likelihoods.preference import Preference

TASKS: dict[str, type[Likelihood]] = {
    "regression": Gaussian,
    "classification": Categorical,
    "binary": Bernoulli,
    "poisson": Poisson,
    "heteroscedastic": HeteroscedasticGaussian,
    "reward_modeling": Preference,
}
