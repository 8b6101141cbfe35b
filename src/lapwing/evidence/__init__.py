"""Model evidence, and the hyper-parameters that maximise it."""

from lapwing.evidence.exact_evidence import ExactEvidence
from lapwing.evidence.linear_mode import EvidenceAtMode, LinearMode
from lapwing.evidence.linearised_data import LinearisedData
from lapwing.evidence.marginal import Evidence, GaussianFit
from lapwing.evidence.tuners import Tuned, em, gradient, mackay

__all__ = [
    "Evidence",
    "EvidenceAtMode",
    "ExactEvidence",
    "GaussianFit",
    "LinearMode",
    "LinearisedData",
    "Tuned",
    "em",
    "gradient",
    "mackay",
]
