"""Names that users of laplace-torch import from its `utils`: features, sub-network masks and enumerations."""

from lapwing.laplace import (
    FeatureReduction,
    HessianStructure,
    LinkApprox,
    PredType,
    PriorStructure,
    SubsetOfWeights,
    TuningMethod,
)
from lapwing.laplace import Task as Likelihood
from lapwing.subnetwork import (
    LargestMagnitudeSubnetMask,
    LargestVarianceDiagLaplaceSubnetMask,
    LargestVarianceSWAGSubnetMask,
    LastLayerSubnetMask,
    ModuleNameSubnetMask,
    ParamNameSubnetMask,
    RandomSubnetMask,
    SubnetMask,
)
from lapwing.tangent.extractor import FeatureExtractor

__all__ = [
    "FeatureExtractor",
    "FeatureReduction",
    "HessianStructure",
    "LargestMagnitudeSubnetMask",
    "LargestVarianceDiagLaplaceSubnetMask",
    "LargestVarianceSWAGSubnetMask",
    "LastLayerSubnetMask",
    "Likelihood",
    "LinkApprox",
    "ModuleNameSubnetMask",
    "ParamNameSubnetMask",
    "PredType",
    "PriorStructure",
    "RandomSubnetMask",
    "SubnetMask",
    "SubsetOfWeights",
    "TuningMethod",
]
