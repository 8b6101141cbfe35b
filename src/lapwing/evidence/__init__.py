"""Model evidence, and the hyper-parameters that maximise it."""

from lapwing.evidence.marginal import Evidence, GaussianFit
from lapwing.evidence.tuners import Tuned, gradient, mackay

__all__ = ["Evidence", "GaussianFit", "Tuned", "gradient", "mackay"]
