"""The table of structures: what each is, which estimators and options it has, and how it is stored.

One row says all of it, and everything that lists structures is made from the rows: the names that `Laplace` takes, the
classes, the options, the kinds that a file may hold, and the table in docs/structures.md. A new structure is a file in
`linalg`, a file in `estimate`, and a row here (`register`).

    source      exact (GGN), fisher, mc (sampled Fisher), projection (randomly projected GGN), recursive (propagated in
                expectation, kron alone), empirical, hessian

Strings end here: below this module an estimator is a function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch

from lapwing import estimate, linalg, serialize
from lapwing.errors import OptionError
from lapwing.estimate import last_layer, naming
from lapwing.estimate.cotangents import DISTRIBUTIONS, Cotangents
from lapwing.estimate.data_pass import Batches
from lapwing.estimate.ranks import ONE, Ranks
from lapwing.laplace.names import OnUnsupported, check_options, choose
from lapwing.likelihoods import Likelihood
from lapwing.linalg import Blocks, Curvature, Diagonal
from lapwing.linalg.kronecker.factors import Term
from lapwing.tangent import Tangent
from lapwing.tangent.features import FeatureTangent

AnyTangent = Tangent | FeatureTangent
Options = Mapping[str, Any]


@dataclass(frozen=True)
class Structure:
    """One row. `keeps` says in a few words what is kept, for the docs.

    `stored` are the classes that a file may hold; without any, a posterior cannot be stored.

    `title` is the first part of its classes' names: KronLaplace, KronLLLaplace, KronSubnetLaplace. `estimator` goes
    over the data; `closed` does the same for a last layer in closed form, `recursive` by propagated expectations, and
    `hessian` is what `estimate.hessian` calls the structure. `continued` gives the estimator's options where data are
    added to a curvature. `not_additive` names what of the curvatures of two data sets does not add up, if anything.
    An estimator that `takes_ranks` asks for sums over processes itself; of others the results are pooled.
    `one_process` says why no shards of the data can be fitted, if they cannot.
    `parts_of_tensors` says whether a sub-network may have some entries of a tensor and not others.
    """

    name: str
    title: str
    keeps: str
    estimator: Callable[..., Curvature]
    stored: tuple[type, ...]
    options: tuple[str, ...] = ()
    subsets: tuple[str, ...] = ("all",)
    closed: Callable[..., Curvature] | None = None
    recursive: Callable[..., Curvature] | None = None
    hessian: str | None = None
    continued: Callable[[Options, Curvature], Options] | None = None
    not_additive: str = ""
    takes_ranks: bool = False
    one_process: str = ""
    per_entry_prior: bool = True
    parts_of_tensors: bool = True


STRUCTURES: dict[str, Structure] = {}


def register(row: Structure) -> None:
    """Adds a structure; its name must be new."""
    if row.name in STRUCTURES:
        raise OptionError(f"there is a structure {row.name!r} already; expected a new name.")
    STRUCTURES[row.name] = row
    serialize.register(*row.stored)
    naming.register(row.name, row.estimator, row.recursive)


_EVERYWHERE = ("all", "last_layer", "subnetwork")
_KRONECKER = ("sharing", "dense_limit", "wide_limit", "joint_bias", "on_unsupported")
_BLOCKS = (linalg.Blocks, linalg.Block, linalg.Dense, linalg.Diagonal)

for _row in (
    Structure(
        "full",
        "Full",
        "every covariance, [P, P]",
        estimate.full,
        (linalg.Dense,),
        subsets=_EVERYWHERE,
        closed=last_layer.full,
        hessian="full",
    ),
    Structure(
        "kron",
        "Kron",
        "one Kronecker product G (x) A per layer",
        estimate.kflr,
        (linalg.Kronecker, linalg.KroneckerSum, linalg.MixedSum, Term, *_BLOCKS),
        options=(*_KRONECKER, "factored_damping"),
        subsets=_EVERYWHERE,
        closed=last_layer.kron,
        recursive=estimate.kfra,
        continued=lambda options, before: {**options, "added_to": before},
        per_entry_prior=False,
        parts_of_tensors=False,
    ),
    Structure(
        "ekfac",
        "Ekfac",
        "the Kronecker eigenbasis, with the exact variance along each of its directions",
        estimate.ekfac,
        (linalg.CorrectedKronecker, linalg.EigenColumns, *_BLOCKS),
        options=_KRONECKER,
        continued=lambda _, before: {"basis": before},
        subsets=("all", "subnetwork"),
        not_additive="eigenbases",
        takes_ranks=True,
        per_entry_prior=False,
        parts_of_tensors=False,
    ),
    Structure(
        "diag",
        "Diag",
        "one variance per weight, [P]",
        estimate.diagonal,
        (linalg.Diagonal,),
        subsets=_EVERYWHERE,
        closed=last_layer.diagonal,
        hessian="diagonal",
    ),
    Structure(
        "propagated_diag",
        "PropagatedDiag",
        "as diag, approximate, at a cost that does not grow with the outputs",
        estimate.propagated_diagonal,
        (linalg.Diagonal,),
        subsets=("all", "subnetwork"),
    ),
    Structure(
        "mixed_diag",
        "MixedDiag",
        "as propagated_diag, exact from a bottleneck back to the inputs",
        estimate.mixed_diagonal,
        (linalg.Diagonal,),
        options=("columns", "exact_bottleneck"),
        subsets=("all", "subnetwork"),
    ),
    Structure(
        "lowrank",
        "LowRank",
        "the leading eigenvectors of the whole matrix",
        estimate.low_rank,
        (linalg.LowRank, linalg.Subspace, linalg.Dual, linalg.RowSet),
        options=("rank",),
        subsets=("all", "subnetwork"),
        not_additive="leading eigenvectors",
        takes_ranks=True,
    ),
    Structure(
        "gp",
        "Functional",
        "every covariance, by the rows of the data (a Gaussian process)",
        estimate.dual,
        (linalg.Dual, linalg.Independent, linalg.RowSet),
        options=("limit", "independent_outputs"),
        subsets=("all", "last_layer"),
    ),
    Structure(
        "blocks",
        "Blocks",
        "every covariance within a layer, or within a tensor",
        estimate.blocks,
        _BLOCKS,
        options=("by",),
        subsets=("all", "subnetwork"),
        closed=last_layer.blocks,
        hessian="blocks",
    ),
    Structure(
        "matrix_free",
        "MatrixFree",
        "nothing but the data and the network, which every result goes over again (Krylov methods)",
        estimate.matrix_free,
        (),
        options=("preconditioner", "tolerance", "iterations", "probes", "steps", "block", "solve_in"),
        subsets=("all", "subnetwork"),
        one_process="it reads its data again for every result, which all ranks would have to ask for together",
    ),
):
    register(_row)

HessianStructure = StrEnum("HessianStructure", {row.name.upper(): row.name for row in STRUCTURES.values()})
"""The names of the structures that come with the library; a member is a string, so either form works."""


def markdown() -> str:
    """The rows as a table for the docs."""
    lines = ["| structure | keeps | options | over |", "|---|---|---|---|"]
    for row in STRUCTURES.values():
        options = ", ".join(f"`{name}`" for name in row.options) or "none"
        over = ", ".join(subset.replace("_", " ") for subset in row.subsets)
        lines.append(f"| `{row.name}` | {row.keeps} | {options} | {over} |")
    return "\n".join(lines)


# -- from a row to an estimator ----------------------------------------------------------------------------------------

SOURCES = (*naming.SOURCES, "hessian")
RANDOM = ("mc", "projection")
"""Sources that draw, `mc_samples` times for every data point."""
FEW = 4
"""Names that a sentence lists."""


@dataclass(frozen=True)
class Recipe:
    """How a curvature is estimated: the structure, the source, how many draws of which kind, and the options."""

    structure: str
    source: str = "exact"
    draws: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    distribution: str = DISTRIBUTIONS[0]

    @property
    def row(self) -> Structure:
        return STRUCTURES[self.structure]

    @property
    def cotangents(self) -> Cotangents:
        """What is pulled back through the network."""
        return naming.cotangents_of(self.source, self.draws, self.distribution)

    def __post_init__(self) -> None:
        choose(self.source, SOURCES, "estimator")
        check_options(self.options, self.row.options, f"option of the structure {self.structure!r}:")
        if "on_unsupported" in self.options:
            choose(self.options["on_unsupported"], OnUnsupported, "on_unsupported")
        if self.source == "hessian" and self.row.hessian is None:
            raise OptionError(
                f"the exact Hessian has no {self.structure!r} structure; expected hessian_structure='full', 'diag' or "
                "'blocks', which it has. For this structure use the generalised Gauss-Newton: estimator='exact', or "
                "backend=lapwing.curvature.CurvlinopsGGN."
            )
        if self.source == "recursive" and self.row.recursive is None:
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
        ranks: Ranks = ONE,
    ) -> Curvature:
        """The curvature of the data; `added_to` is what it will be added to: kron takes its blocks, ekfac its basis.

        Of several `ranks` each has a shard of the data, and gets the curvature of all.
        """
        row = self.row
        if self.source == "hessian":
            assert row.hessian is not None
            assert isinstance(tangent, Tangent)  # a last layer is then linearised like any other parameters
            return ranks.pooled(estimate.hessian(tangent, likelihood, batches, structure=row.hessian))
        closed = row.closed if isinstance(tangent, FeatureTangent) else None
        estimator, options = closed or row.estimator, self.options
        if self.source == "recursive" and closed is None:  # of a last layer the recursion is its start, the exact mean
            assert row.recursive is not None
            estimator = row.recursive
        elif added_to is not None and row.continued is not None and closed is None:
            options = row.continued(options, added_to)
        arguments = {"cotangents": self.cotangents, "generator": generator, **options}
        if row.takes_ranks:
            return estimator(tangent, likelihood, batches, **arguments, ranks=ranks)
        return ranks.pooled(estimator(tangent, likelihood, batches, **arguments))


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
