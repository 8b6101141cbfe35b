"""Output distributions p(y | f) with exact derivatives in f and analytic square roots of their curvature.

| likelihood                | outputs per position | target             | square root        | convex |
|---------------------------|----------------------|--------------------|--------------------|--------|
| `Gaussian`                | C means              | C reals            | [C, C] diagonal    | yes    |
| `Categorical`             | C logits             | a class, int64     | [C, C - 1]         | yes    |
| `Preference`              | 2 rewards            | which was chosen   | [2, 1]             | yes    |
| `Bernoulli`               | C logits             | C of {0, 1}        | [C, C] diagonal    | yes    |
| `Poisson`                 | C log-rates          | C counts           | [C, C] diagonal    | yes    |
| `HeteroscedasticGaussian` | D means, D log-vars  | D reals            | [2D, 2D], Fisher   | no     |
| `BernoulliMixture`        | 3 logits             | one of {0, 1}      | [3, 3], PSD part   | no     |
| `from_function`           | any                  | any                | [C, C], PSD part   | no     |

`base` states the contract, the layouts and the precision.

>>> import torch
>>> Categorical().log_prob(torch.zeros(1, 4), torch.tensor([2])).exp()   # uniform over four classes
tensor([0.2500])
"""

from lapwing.likelihoods.base import Likelihood
from lapwing.likelihoods.bernoulli import Bernoulli
from lapwing.likelihoods.bernoulli_mixture import BernoulliMixture
from lapwing.likelihoods.categorical import Categorical
from lapwing.likelihoods.differentiated import from_function
from lapwing.likelihoods.gaussian import Gaussian
from lapwing.likelihoods.heteroscedastic import HeteroscedasticGaussian
from lapwing.likelihoods.poisson import Poisson
from lapwing.likelihoods.preference import Preference

FINAL: tuple[type[Likelihood], ...] = (
    Bernoulli,
    BernoulliMixture,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Poisson,
    Preference,
)
"""Classes that can be stored in a file and made again from it."""

__all__ = [
    "FINAL",
    "Bernoulli",
    "BernoulliMixture",
    "Categorical",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Likelihood",
    "Poisson",
    "Preference",
    "from_function",
]
