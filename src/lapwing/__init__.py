"""lapwing: a Laplace posterior for any PyTorch network.

Curvature, uncertainty, evidence, and the training procedures that use them. `docs/architecture.md` follows one batch
through the files, `docs/notation.md` lists the symbols; imports inside the package point one way, and
`tests/test_imports.py` holds the order.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from lapwing import (
    curvature,
    errors,
    estimate,
    evidence,
    likelihoods,
    linalg,
    metrics,
    params,
    posterior,
    predictive,
    priors,
    serialize,
    subnetwork,
    tangent,
    tape,
    training,
)
from lapwing.directions import alignment
from lapwing.laplace import (
    BaseLaplace,
    BlocksLaplace,
    BlocksSubnetLaplace,
    DiagLaplace,
    DiagLLLaplace,
    DiagSubnetLaplace,
    EkfacLaplace,
    EkfacSubnetLaplace,
    FeatureReduction,
    FullLaplace,
    FullLLLaplace,
    FullSubnetLaplace,
    FunctionalLaplace,
    FunctionalLLLaplace,
    HessianStructure,
    KronLaplace,
    KronLLLaplace,
    KronSubnetLaplace,
    Laplace,
    LinkApprox,
    LLLaplace,
    LowRankLaplace,
    LowRankSubnetLaplace,
    MixedDiagLaplace,
    MixedDiagSubnetLaplace,
    ParametricLaplace,
    Plan,
    PredType,
    PriorStructure,
    PropagatedDiagLaplace,
    PropagatedDiagSubnetLaplace,
    SubnetLaplace,
    SubsetOfWeights,
    TuningMethod,
    gathered,
    load,
    marglik_training,
    plan,
    to_mode,
)
from lapwing.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
    Preference,
)
from lapwing.params import ParamSpace
from lapwing.priors import Prior, PriorGroups
from lapwing.tangent import Tangent
from lapwing.tape.invariance import InvariantGroup, ScaleInvariantGroups, scale_invariant_groups

if TYPE_CHECKING:
    from lapwing import cli, reporting, tables, utils
    from lapwing.laplace.attach import attach
    from lapwing.reporting import compare, report

try:
    __version__ = version("lapwing")
except PackageNotFoundError:  # a source tree on the path that was never installed has no metadata to read
    __version__ = "0+unknown"

__all__ = [
    "BaseLaplace",
    "Bernoulli",
    "BlocksLaplace",
    "BlocksSubnetLaplace",
    "Categorical",
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
    "Gaussian",
    "HessianStructure",
    "HeteroscedasticGaussian",
    "InvariantGroup",
    "KronLLLaplace",
    "KronLaplace",
    "KronSubnetLaplace",
    "LLLaplace",
    "Laplace",
    "Likelihood",
    "LinkApprox",
    "LowRankLaplace",
    "LowRankSubnetLaplace",
    "MixedDiagLaplace",
    "MixedDiagSubnetLaplace",
    "ParamSpace",
    "ParametricLaplace",
    "Plan",
    "Poisson",
    "PredType",
    "Preference",
    "Prior",
    "PriorGroups",
    "PriorStructure",
    "PropagatedDiagLaplace",
    "PropagatedDiagSubnetLaplace",
    "ScaleInvariantGroups",
    "SubnetLaplace",
    "SubsetOfWeights",
    "Tangent",
    "TuningMethod",
    "__version__",
    "alignment",
    "attach",
    "cli",
    "compare",
    "curvature",
    "errors",
    "estimate",
    "evidence",
    "gathered",
    "likelihoods",
    "linalg",
    "load",
    "marglik_training",
    "metrics",
    "params",
    "plan",
    "posterior",
    "predictive",
    "priors",
    "report",
    "reporting",
    "scale_invariant_groups",
    "serialize",
    "subnetwork",
    "tables",
    "tangent",
    "tape",
    "to_mode",
    "training",
    "utils",
]

# What needs the extras is imported when it is first used, so that the library stays quick to import.
_LATER = {"attach": "lapwing.laplace.attach", "compare": "lapwing.reporting", "report": "lapwing.reporting"}
_MODULES = ("cli", "reporting", "tables", "utils")


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    if name in _MODULES:
        return import_module(f"lapwing.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
