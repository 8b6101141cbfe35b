"""Names that the public face takes as strings: what they stand for, and the nearest one when a name is unknown.

The enumerations carry the values that users of laplace-torch know; their members are strings, so either form works.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from enum import Enum, StrEnum

from lapwing.errors import OptionError


class SubsetOfWeights(StrEnum):
    ALL = "all"
    LAST_LAYER = "last_layer"
    SUBNETWORK = "subnetwork"


class Task(StrEnum):
    """A likelihood by the name of what it is for."""

    REGRESSION = "regression"
    CLASSIFICATION = "classification"
    BINARY = "binary"
    POISSON = "poisson"
    HETEROSCEDASTIC = "heteroscedastic"
    REWARD_MODELING = "reward_modeling"


class PredType(StrEnum):
    GLM = "glm"
    NN = "nn"
    GP = "gp"


class LinkApprox(StrEnum):
    MC = "mc"
    PROBIT = "probit"
    PROBIT_FULL = "probit_full"
    QUADRATURE = "quadrature"
    BRIDGE = "bridge"
    BRIDGE_NORM = "bridge_norm"


class TuningMethod(StrEnum):
    MARGLIK = "marglik"
    ADAM = "adam"
    EM = "em"
    MACKAY = "mackay"
    """As `em`."""
    GRIDSEARCH = "gridsearch"
    PSEUDO_DATA = "pseudo_data"


class TunedAt(StrEnum):
    """The weights at which the evidence is taken."""

    TRAINED = "trained"
    LINEAR_MODE = "linear_mode"


class PriorStructure(StrEnum):
    """`layerwise` is one precision per parameter tensor, as in laplace-torch; `module` one per module.

    `scale_invariant` is one per group of parameters whose scale the outputs do not depend on, and one for the rest.
    """

    SCALAR = "scalar"
    LAYERWISE = "layerwise"
    MODULE = "module"
    DIAG = "diag"
    SCALE_INVARIANT = "scale_invariant"


class OnUnsupported(StrEnum):
    """What a Kronecker structure does with parameters that form no Kronecker product: an exact block, or an error."""

    EXACT = "exact"
    ERROR = "error"


class FeatureReduction(StrEnum):
    PICK_FIRST = "pick_first"
    PICK_LAST = "pick_last"
    AVERAGE = "average"


def choose(value: object, known: Iterable[str], what: str) -> str:
    """`value` as one of `known`; an error that names the nearest one otherwise."""
    names = list(map(str, known))
    name = str(value.value) if isinstance(value, Enum) else value
    if name in names:
        return str(name)
    near = get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise OptionError(f"unknown {what} {name!r}; expected one of {names}.{hint}")


def check_options(options: Iterable[str], known: Iterable[str], what: str) -> None:
    """Keyword arguments of which each is known; an error that names the nearest one otherwise."""
    for name in options:
        choose(name, known, what)
