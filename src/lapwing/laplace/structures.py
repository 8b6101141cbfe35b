"""Which estimator a structure and a source of curvature mean, and which options it takes.

    structure   full, diag, propagated_diag, mixed_diag, kron, ekfac, blocks, lowrank, gp
    source      exact (GGN), fisher, mc (sampled Fisher), projection (randomly projected GGN), recursive (propagated in
                expectation, kron alone), empirical, hessian

Strings end here: below this module an estimator is a function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from lapwing import estimate
from lapwing.errors import OptionError
from lapwing.estimate import last_layer
from lapwing.estimate.cotangents import DISTRIBUTIONS
from lapwing.estimate.cotangents import empirical as observed
from lapwing.estimate.data_pass import Batches
from lapwing.laplace.names import OnUnsupported, check_options, choose
from lapwing.likelihoods import Likelihood
from lapwing.linalg import Blocks, Curvature, Diagonal
from lapwing.tangent import Tangent
from lapwing.tangent.features import FeatureTangent

SOURCES = ("exact", "fisher", "mc", "projection", "recursive", "empirical", "hessian")
RANDOM = ("mc", "projection")
"""Sources that draw, `mc_samples` times for every data point."""
AnyTangent = Tangent | FeatureTangent

_GENERAL: dict[str, Callable[..., Curvature]] = {
    "full": estimate.full,
    "diag": estimate.diagonal,
    "propagated_diag": estimate.propagated_diagonal,
    "mixed_diag": estimate.mixed_diagonal,
    "kron": estimate.kflr,
    "ekfac": estimate.ekfac,
    "blocks": estimate.blocks,
    "lowrank": estimate.low_rank,
    "gp": estimate.dual,
}
_CLOSED: dict[str, Callable[..., Curvature]] = {
    "full": last_layer.full,
    "diag": last_layer.diagonal,
    "kron": last_layer.kron,
    "blocks": last_layer.blocks,
}
_OPTIONS: dict[str, tuple[str, ...]] = {
    "kron": ("sharing", "dense_limit", "joint_bias", "factored_damping", "on_unsupported"),
    "ekfac": ("sharing", "dense_limit", "joint_bias", "on_unsupported"),
    "mixed_diag": ("columns", "exact_bottleneck"),
    "blocks": ("by",),
    "lowrank": ("rank",),
    "gp": ("limit", "independent_outputs"),
}
_HESSIAN = {"full": "full", "diag": "diagonal", "blocks": "blocks"}
FEW = 4
"""Names that a sentence lists."""
CLOSED_FORM = frozenset(_CLOSED)
"""Structures with a closed form for the last layer; the others use the general estimators on its parameters."""


@dataclass(frozen=True)
class Recipe:
    """How a curvature is estimated: the structure, the source, how many draws of which kind, and the options."""

    structure: str
    source: str = "exact"
    draws: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    distribution: str = DISTRIBUTIONS[0]

    def __post_init__(self) -> None:
        choose(self.source, SOURCES, "estimator")
        check_options(self.options, _OPTIONS.get(self.structure, ()), f"option of the structure {self.structure!r}:")
        if "on_unsupported" in self.options:
            choose(self.options["on_unsupported"], OnUnsupported, "on_unsupported")
        if self.source == "hessian" and self.structure not in _HESSIAN:
            raise OptionError(
                f"the exact Hessian has no {self.structure!r} structure; expected hessian_structure='full', 'diag' or "
                "'blocks', which it has. For this structure use the generalised Gauss-Newton: estimator='exact', or "
                "backend=lapwing.curvature.CurvlinopsGGN."
            )
        if self.source == "recursive" and self.structure != "kron":
            raise OptionError(
                f"the recursive estimator has no {self.structure!r} structure; expected 'kron', whose output factors "
                "it propagates. Use estimator='exact', or hessian_structure='kron'."
            )

    def __call__(
        self,
        tangent: AnyTangent,
        likelihood: Likelihood,
        batches: Batches,
        generator: torch.Generator | None,
        added_to: Curvature | None = None,
    ) -> Curvature:
        """The curvature of the data; `added_to` is what it will be added to: kron takes its blocks, ekfac its basis."""
        if self.source == "hessian":
            assert isinstance(tangent, Tangent)  # a last layer is then linearised like any other parameters
            return estimate.hessian(tangent, likelihood, batches, structure=_HESSIAN[self.structure])
        table = _CLOSED if isinstance(tangent, FeatureTangent) else _GENERAL
        # of a last layer alone the recursion is its start, the exact mean
        recursive = self.source == "recursive" and table is _GENERAL
        options = self.options
        if added_to is not None and self.structure == "ekfac":
            options = {"basis": added_to}
        elif added_to is not None and self.structure == "kron" and table is _GENERAL and not recursive:
            options = {**options, "added_to": added_to}
        estimator = partial(estimate.kfra if recursive else table[self.structure], **options)
        return estimator(tangent, likelihood, batches, cotangents=self._cotangents(), generator=generator)

    def _cotangents(self) -> Callable:
        if self.source == "mc":
            return estimate.monte_carlo(self.draws)
        if self.source == "projection":
            return estimate.projections(self.draws, self.distribution)
        return {"fisher": estimate.fisher, "empirical": observed}.get(self.source, estimate.exact)


def recipe(
    structure: str,
    estimator: str | None,
    backend: type | None,
    backend_kwargs: Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> Recipe:
    """From the words of the public face: an estimator's name, or a backend of `lapwing.curvature`."""
    given = dict(backend_kwargs or {})
    source = _source(estimator, backend)
    stochastic = bool(given.pop("stochastic", False))
    if stochastic and source not in ("exact", "mc"):
        raise OptionError(f"stochastic=True goes with the GGN; found the {source} estimator. Leave one of them out.")
    draws = given.pop("mc_samples", given.pop("num_samples", 1))
    if not isinstance(draws, int) or draws < 1:
        raise OptionError(f"mc_samples is {draws!r}; expected a number of draws per data point >= 1.")
    if "kfac_approx" in given:  # another library's name for it
        given["sharing"] = given.pop("kfac_approx")
    merged = given | dict(options)
    bias = merged.pop("bias", None)
    if bias is not None:
        if structure not in ("kron", "ekfac"):
            raise OptionError(
                f"bias={bias!r} was given for structure {structure!r}; expected 'kron' or 'ekfac'. Leave it out."
            )
        merged["joint_bias"] = choose(bias, ("joint", "separate"), "bias") == "joint"
    distribution = merged.pop("distribution", None)
    if distribution is not None and source != "projection":
        raise OptionError(
            f"distribution={distribution!r} goes with estimator='projection'; found the {source} estimator. Leave it "
            "out."
        )
    distribution = choose(distribution or DISTRIBUTIONS[0], DISTRIBUTIONS, "distribution")
    return Recipe(structure, "mc" if stochastic else source, draws, merged, distribution)


def exceptions(curvature: Curvature) -> str:
    """One line: the blocks that are exact where the others are Kronecker products, by their reason."""
    found: dict[str, list[str]] = {}
    for block in curvature.blocks if isinstance(curvature, Blocks) else ():
        if block.reason:
            kind = "diagonal" if isinstance(block.curvature, Diagonal) else "dense"
            found.setdefault(block.reason, []).append(f"'{block.name}' ({kind})")
    said = []
    for reason, names in found.items():
        more = f" and {len(names) - FEW} more" if len(names) > FEW else ""
        said.append(f"{', '.join(names[:FEW])}{more}, {reason}")
    return f"Exact blocks instead of Kronecker factors: {'; '.join(said)}." if said else ""


def _source(estimator: str | None, backend: type | None) -> str:
    if backend is None:
        return "exact" if estimator is None else choose(estimator, SOURCES, "estimator")
    source = getattr(backend, "source", None)
    if source not in SOURCES:
        raise OptionError(
            f"backend is {backend!r}; expected one of lapwing.curvature (its names select GGN, EF or Hessian; there is "
            "one engine), or estimator='exact', 'mc', 'projection', 'recursive', 'empirical', 'hessian'."
        )
    if estimator is not None and estimator != source:
        raise OptionError(f"backend means {source!r} and estimator is {estimator!r}; expected one of them.")
    return source
