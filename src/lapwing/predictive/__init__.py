"""From a Gaussian over the weights to predictions: linearised in closed form or by draws, or the network sampled."""

from lapwing.distributions import ScaleMixture as Amounts
from lapwing.distributions.gaussian_logits import bridge, bridge_norm, dirichlet, probit, probit_full, quadrature
from lapwing.predictive.glm import draws, moments, probabilities, variances
from lapwing.predictive.sampled import network_draws

__all__ = [
    "Amounts",
    "bridge",
    "bridge_norm",
    "dirichlet",
    "draws",
    "moments",
    "network_draws",
    "probabilities",
    "probit",
    "probit_full",
    "quadrature",
    "variances",
]
