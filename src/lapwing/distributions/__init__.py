"""What is predicted for targets when the outputs of a network are Gaussian: integrals over outputs, and their laws.

| name                 | outputs                              | targets                                           |
|----------------------|--------------------------------------|---------------------------------------------------|
| `ScaleMixture`       | a mean, and a known or a learnt noise | numbers                                          |
| `PoissonLognormal`   | log-rates                            | counts                                            |
| `gaussian_logits`    | logits                               | classes and events: functions to probabilities    |

Nothing here knows a network or a likelihood.
"""

from lapwing.distributions.distribution import Distribution
from lapwing.distributions.poisson_lognormal import PoissonLognormal
from lapwing.distributions.scale_mixture import ScaleMixture

__all__ = ["Distribution", "PoissonLognormal", "ScaleMixture"]
