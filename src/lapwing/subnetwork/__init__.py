"""Sub-networks: which weights are random. Scores [P] -> a smaller `ParamSpace`; the other weights stay at their values.

choices    n weights of largest magnitude or variance, or at random; whole tensors by name; the last layers
swag       a score [P]: variance along an SGD trajectory
masks      the same under the names and arguments that users of laplace-torch know
"""

from lapwing.subnetwork.choices import (
    by_modules,
    by_parameters,
    largest_magnitude,
    largest_variance,
    last_layer,
    last_layers,
    positions,
    random,
)
from lapwing.subnetwork.masks import (
    LargestMagnitudeSubnetMask,
    LargestVarianceDiagLaplaceSubnetMask,
    LargestVarianceSWAGSubnetMask,
    LastLayerSubnetMask,
    ModuleNameSubnetMask,
    ParamNameSubnetMask,
    RandomSubnetMask,
    SubnetMask,
)
from lapwing.subnetwork.swag import swag_variance

__all__ = [
    "LargestMagnitudeSubnetMask",
    "LargestVarianceDiagLaplaceSubnetMask",
    "LargestVarianceSWAGSubnetMask",
    "LastLayerSubnetMask",
    "ModuleNameSubnetMask",
    "ParamNameSubnetMask",
    "RandomSubnetMask",
    "SubnetMask",
    "by_modules",
    "by_parameters",
    "largest_magnitude",
    "largest_variance",
    "last_layer",
    "last_layers",
    "positions",
    "random",
    "swag_variance",
]
