"""Names of curvature backends, for code that chooses one: there is one engine, and a name selects the estimator.

    GGN        generalised Gauss-Newton (exact, or Monte-Carlo with backend_kwargs={"stochastic": True})
    EF         empirical Fisher: outer products of the gradients at the observed targets
    Hessian    second derivatives of the loss

Libraries that peers delegate to (BackPACK, ASDL, curvlinops) are not needed and not used.

>>> BackPackGGN.source, CurvlinopsEF.source
('exact', 'empirical')
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "AsdlEF",
    "AsdlGGN",
    "AsdlHessian",
    "AsdlInterface",
    "BackPackEF",
    "BackPackGGN",
    "BackPackInterface",
    "CurvatureInterface",
    "CurvlinopsEF",
    "CurvlinopsGGN",
    "CurvlinopsHessian",
    "CurvlinopsInterface",
    "EFInterface",
    "GGNInterface",
]


class CurvatureInterface:
    """Selects an estimator; never instantiated."""

    source: ClassVar[str] = "exact"


class GGNInterface(CurvatureInterface):
    """The generalised Gauss-Newton."""


class EFInterface(CurvatureInterface):
    """The empirical Fisher."""

    source: ClassVar[str] = "empirical"


class _HessianInterface(CurvatureInterface):
    source: ClassVar[str] = "hessian"


class AsdlInterface(GGNInterface): ...


class AsdlGGN(GGNInterface): ...


class AsdlEF(EFInterface): ...


class AsdlHessian(_HessianInterface): ...


class BackPackInterface(GGNInterface): ...


class BackPackGGN(GGNInterface): ...


class BackPackEF(EFInterface): ...


class CurvlinopsInterface(GGNInterface): ...


class CurvlinopsGGN(GGNInterface): ...


class CurvlinopsEF(EFInterface): ...


class CurvlinopsHessian(_HessianInterface): ...
