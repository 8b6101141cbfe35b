"""The only place that talks to autograd: recorded uses of parameters, Jacobian products, factored rows."""

from lapwing.tangent.model import Linearisation, Tangent

__all__ = ["Linearisation", "Tangent"]
