"""Laplace(...): the posterior of a network by the names of its parts, and the choice that `auto` makes among them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lapwing.errors import OptionError
from lapwing.laplace.base import BaseLaplace
from lapwing.laplace.functional import FunctionalLaplace, FunctionalLLLaplace
from lapwing.laplace.last_layer import DiagLLLaplace, FullLLLaplace, KronLLLaplace
from lapwing.laplace.names import HessianStructure, SubsetOfWeights, choose
from lapwing.laplace.subnetwork import (
    DiagSubnetLaplace,
    FullSubnetLaplace,
    MixedDiagSubnetLaplace,
    PropagatedDiagSubnetLaplace,
)
from lapwing.laplace.variants import (
    BlocksLaplace,
    DiagLaplace,
    EkfacLaplace,
    FullLaplace,
    KronLaplace,
    LowRankLaplace,
    MixedDiagLaplace,
    PropagatedDiagLaplace,
)
from lapwing.likelihoods import Likelihood
from lapwing.params import ParamSpace

CLASSES: dict[tuple[str, str], type[BaseLaplace]] = {
    ("all", "full"): FullLaplace,
    ("all", "kron"): KronLaplace,
    ("all", "ekfac"): EkfacLaplace,
    ("all", "diag"): DiagLaplace,
    ("all", "propagated_diag"): PropagatedDiagLaplace,
    ("all", "mixed_diag"): MixedDiagLaplace,
    ("all", "blocks"): BlocksLaplace,
    ("all", "lowrank"): LowRankLaplace,
    ("all", "gp"): FunctionalLaplace,
    ("last_layer", "full"): FullLLLaplace,
    ("last_layer", "kron"): KronLLLaplace,
    ("last_layer", "diag"): DiagLLLaplace,
    ("last_layer", "gp"): FunctionalLLLaplace,
    ("subnetwork", "full"): FullSubnetLaplace,
    ("subnetwork", "diag"): DiagSubnetLaplace,
    ("subnetwork", "propagated_diag"): PropagatedDiagSubnetLaplace,
    ("subnetwork", "mixed_diag"): MixedDiagSubnetLaplace,
}

FULL_LIMIT = 3000
"""Weights up to which `auto` keeps every covariance: [P, P] and one eigendecomposition, some seconds at most."""


def Laplace(
    model: nn.Module,
    likelihood: str | Likelihood,
    subset_of_weights: str = "last_layer",
    hessian_structure: str = "kron",
    *arguments: Any,
    **options: Any,
) -> BaseLaplace:
    """A Laplace posterior over all weights, the last layer or a sub-network, with curvature of the given structure.

    `hessian_structure="auto"` takes the most exact structure that is affordable, and says why in `la.reason`.

    >>> import torch
    >>> from torch import Tensor, nn
    >>> model = nn.Linear(1, 1, bias=False)
    >>> with torch.no_grad(): _ = model.weight.fill_(0.9)           # the mode of the posterior below
    >>> x, y = torch.ones(9, 1), torch.ones(9, 1)
    >>> la = Laplace(model, "regression", subset_of_weights="all", hessian_structure="full")
    >>> la.fit([(x, y)])
    >>> mean, variance = la(torch.tensor([[2.0]]))
    >>> round(mean.item(), 6), round(variance.item(), 6)            # 2 * 0.9, and 2^2 / (9 + 1)
    (1.8, 0.4)
    """
    subset = choose(subset_of_weights, [each.value for each in SubsetOfWeights], "subset_of_weights")
    structure = choose(hessian_structure, [*(each.value for each in HessianStructure), "auto"], "hessian_structure")
    reason = ""
    if structure == "auto":
        structure, reason = automatic(model, subset, options.get("subnetwork_indices", next(iter(arguments), None)))
    if (subset, structure) not in CLASSES:
        possible = [name for chosen, name in CLASSES if chosen == subset]
        raise OptionError(f"subset_of_weights={subset!r} has no structure {structure!r}; expected one of {possible}.")
    if subset == "subnetwork" and not arguments and "subnetwork_indices" not in options:
        raise OptionError(
            "subset_of_weights='subnetwork' without subnetwork_indices; expected positions in the flat parameter "
            "vector. A mask of lapwing.utils selects some: LargestMagnitudeSubnetMask(model, n_params_subnet=100)."
        )
    la = CLASSES[subset, structure](model, likelihood, *arguments, **options)
    la.reason = reason
    return la


def automatic(model: nn.Module, subset: str, indices: Any = None) -> tuple[str, str]:
    """The structure that `auto` means, and the reason in a sentence.

    A last layer is found when data are seen, so the weights of the whole network count for it.
    """
    size = len(indices) if subset == "subnetwork" and isinstance(indices, Tensor) else ParamSpace.of(model).size
    if size <= FULL_LIMIT:
        return "full", f"full: {size:,} weights, so every covariance fits (up to {FULL_LIMIT:,})"
    if subset == "subnetwork":
        return "diag", f"diag: {size:,} weights are chosen, more than the {FULL_LIMIT:,} that a full matrix is kept for"
    return "kron", f"kron: {size:,} weights, more than the {FULL_LIMIT:,} that a full matrix is kept for"
