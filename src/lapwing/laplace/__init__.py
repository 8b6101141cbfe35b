"""The public face: `Laplace`, the named posteriors, and training by the marginal likelihood."""

from lapwing.laplace.base import BaseLaplace
from lapwing.laplace.factory import Laplace, plan
from lapwing.laplace.gathering import gathered
from lapwing.laplace.loading import load
from lapwing.laplace.marglik import marglik_training
from lapwing.laplace.mode_search import ModeSearch, to_mode
from lapwing.laplace.names import (
    FeatureReduction,
    LinkApprox,
    PredType,
    PriorStructure,
    SubsetOfWeights,
    Task,
    TuningMethod,
)
from lapwing.laplace.planning import Alternative, Plan
from lapwing.laplace.structures import HessianStructure
from lapwing.laplace.variants.all_weights import (
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
from lapwing.laplace.variants.functional import FunctionalLaplace, FunctionalLLLaplace
from lapwing.laplace.variants.last_layer import DiagLLLaplace, FullLLLaplace, KronLLLaplace, LLLaplace
from lapwing.laplace.variants.subnetwork import (
    BlocksSubnetLaplace,
    DiagSubnetLaplace,
    EkfacSubnetLaplace,
    FullSubnetLaplace,
    KronSubnetLaplace,
    LowRankSubnetLaplace,
    MixedDiagSubnetLaplace,
    PropagatedDiagSubnetLaplace,
    SubnetLaplace,
)

__all__ = [
    "Alternative",
    "BaseLaplace",
    "BlocksLaplace",
    "BlocksSubnetLaplace",
    "DiagLLLaplace",
    "DiagLaplace",
    "DiagSubnetLaplace",
    "EkfacLaplace",
    "EkfacSubnetLaplace",
    "FeatureReduction",
    "FullLLLaplace",
    "FullLaplace",
    "FullSubnetLaplace",
    "FunctionalLLLaplace",
    "FunctionalLaplace",
    "HessianStructure",
    "KronLLLaplace",
    "KronLaplace",
    "KronSubnetLaplace",
    "LLLaplace",
    "Laplace",
    "LinkApprox",
    "LowRankLaplace",
    "LowRankSubnetLaplace",
    "MixedDiagLaplace",
    "MixedDiagSubnetLaplace",
    "ModeSearch",
    "ParametricLaplace",
    "Plan",
    "PredType",
    "PriorStructure",
    "PropagatedDiagLaplace",
    "PropagatedDiagSubnetLaplace",
    "SubnetLaplace",
    "SubsetOfWeights",
    "Task",
    "TuningMethod",
    "gathered",
    "load",
    "marglik_training",
    "plan",
    "to_mode",
]
