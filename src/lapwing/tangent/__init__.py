"""The only place that talks to autograd: recorded uses of parameters, Jacobian products, factored rows."""

from lapwing.tangent.features import FeatureMap, FeatureTangent
from lapwing.tangent.last_layer import last_layer_name
from lapwing.tangent.model import Linearisation, Tangent

__all__ = ["FeatureMap", "FeatureTangent", "Linearisation", "Tangent", "last_layer_name"]
