"""The public face: `Laplace`, the named posteriors, and training by the marginal likelihood."""

from lapwing.laplace.base import BaseLaplace
from lapwing.laplace.factory import CLASSES, Laplace
from lapwing.laplace.functional import FunctionalLaplace, FunctionalLLLaplace
from lapwing.laplace.last_layer import DiagLLLaplace, FullLLLaplace, KronLLLaplace, LLLaplace
from lapwing.laplace.marglik import marglik_training
from lapwing.laplace.names import (
    FeatureReduction,
    HessianStructure,
    Likelihood,
    LinkApprox,
    PredType,
    PriorStructure,
    SubsetOfWeights,
    TuningMethod,
)
from lapwing.laplace.persistence import load, register
from lapwing.laplace.subnetwork import (
    DiagSubnetLaplace,
    FullSubnetLaplace,
    MixedDiagSubnetLaplace,
    PropagatedDiagSubnetLaplace,
    SubnetLaplace,
)
from lapwing.laplace.variants import (
    BlocksLaplace,
    DiagLaplace,
    EkfacLaplace,
    FullLaplace,
    KronLaplace,
    LowRankLaplace,
    MixedDiagLaplace,
    ParametricLaplace,
    PropagatedDiagLaplace,
)

__all__ = [
    "BaseLaplace",
    "BlocksLaplace",
    "DiagLLLaplace",
    "DiagLaplace",
    "DiagSubnetLaplace",
    "EkfacLaplace",
    "FeatureReduction",
    "FullLLLaplace",
    "FullLaplace",
    "FullSubnetLaplace",
    "FunctionalLLLaplace",
    "FunctionalLaplace",
    "HessianStructure",
    "KronLLLaplace",
    "KronLaplace",
    "LLLaplace",
    "Laplace",
    "Likelihood",
    "LinkApprox",
    "LowRankLaplace",
    "MixedDiagLaplace",
    "MixedDiagSubnetLaplace",
    "ParametricLaplace",
    "PredType",
    "PriorStructure",
    "PropagatedDiagLaplace",
    "PropagatedDiagSubnetLaplace",
    "SubnetLaplace",
    "SubsetOfWeights",
    "TuningMethod",
    "load",
    "marglik_training",
]

register(*CLASSES.values())
