"""Laplace(...): the posterior of a network by the names of its parts, and the choice that `auto` makes among them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypedDict, Unpack

from torch import Tensor, nn

from lapwing.errors import OptionError
from lapwing.laplace.base import BaseLaplace
from lapwing.laplace.budgets import AnyBudget, bytes_of, kept_bytes
from lapwing.laplace.hyper import Groups, Number
from lapwing.laplace.names import SubsetOfWeights, choose
from lapwing.laplace.persistence import register
from lapwing.laplace.planning import FULL_LIMIT, Plan
from lapwing.laplace.structures import STRUCTURES
from lapwing.laplace.variants import all_weights, functional, last_layer, subnetwork
from lapwing.laplace.wrapped import unwrapped
from lapwing.likelihoods import Likelihood
from lapwing.linalg.budget import size_text
from lapwing.params import ParamSpace
from lapwing.priors import Gaussian

SUBSETS: dict[str, tuple[str, type[BaseLaplace]]] = {
    "all": ("Laplace", all_weights.ParametricLaplace),
    "last_layer": ("LLLaplace", last_layer.LLLaplace),
    "subnetwork": ("SubnetLaplace", subnetwork.SubnetLaplace),
}
"""How the name of a class ends that treats these weights as random, and what such classes have in common."""
CLASSES: dict[tuple[str, str], type[BaseLaplace]] = {}
"""The class of every subset of weights and structure, as `class_of` finds them."""


def class_of(subset: str, structure: str) -> type[BaseLaplace]:
    """The named class of a structure, or one made for a structure that has no class of its own."""
    if (subset, structure) in CLASSES:
        return CLASSES[subset, structure]
    row = STRUCTURES[structure]
    if subset not in row.subsets:
        possible = [name for name, other in STRUCTURES.items() if subset in other.subsets]
        raise OptionError(f"subset_of_weights={subset!r} has no structure {structure!r}; expected one of {possible}.")
    ending, base = SUBSETS[subset]
    name = f"{row.title}{ending}"
    for module in (all_weights, last_layer, subnetwork, functional):
        if hasattr(module, name):
            kind = getattr(module, name)
            break
    else:
        kind = type(name, (base,), {"structure": structure, "__doc__": f"Keeps {row.keeps}."})
    CLASSES[subset, structure] = kind
    register(kind)
    return kind


for _row in STRUCTURES.values():
    for _subset in _row.subsets:
        class_of(_subset, _row.name)


class Options(TypedDict, total=False):
    """Further arguments of `Laplace`. Each class takes those that mean something to it, and refuses others."""

    sigma_noise: Number
    prior_precision: Number
    prior_mean: Number
    prior_groups: Groups | None
    prior: Gaussian | None
    temperature: Number
    enable_backprop: bool
    dict_key_x: str
    dict_key_y: str
    backend: type | None
    backend_kwargs: Mapping[str, Any] | None
    estimator: str | None
    distribution: str
    last_layer_name: str | None
    feature_reduction: str | None
    subnetwork_indices: Tensor
    bias: str
    sharing: str
    damping: bool | str
    dense_limit: int
    wide_limit: int
    joint_bias: bool
    on_unsupported: str
    columns: int
    exact_bottleneck: bool
    by: str
    rank: int
    n_subset: int | None
    seed: int
    independent_outputs: bool
    limit: int
    preconditioner: str
    tolerance: float
    iterations: int
    probes: int
    steps: int
    block: int
    solve_in: str
    memory_budget: AnyBudget | None
    loader: Iterable[Any] | None
    time_budget: float | int | None


def Laplace(
    model: nn.Module,
    likelihood: str | Likelihood,
    subset_of_weights: str = "last_layer",
    hessian_structure: str = "kron",
    *arguments: Any,
    **options: Unpack[Options],
) -> BaseLaplace:
    """A Laplace posterior over all weights, the last layer or a sub-network, with curvature of the given structure.

    `hessian_structure="auto"` takes the most exact structure that is affordable, and says why in `la.reason`: by the
    weights and the memory budget alone, as there are no data yet; with `loader`, the data that are going to be fitted,
    by `plan(...)`, within a `time_budget` in seconds where one is given.

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
    structure = choose(hessian_structure, [*STRUCTURES, "auto"], "hessian_structure")
    reason = ""
    model = unwrapped(model)
    loader, time_budget = options.pop("loader", None), options.pop("time_budget", None)
    if (time_budget is not None and loader is None) or (loader is not None and structure != "auto"):
        raise OptionError(
            f"loader or time_budget were given with hessian_structure={structure!r}; expected 'auto', which chooses by "
            "the data, and both for a time. Leave them out, or ask lapwing.plan(model, likelihood, loader)."
        )
    if structure == "auto":
        indices = options.get("subnetwork_indices", next(iter(arguments), None))
        budget = options.get("memory_budget")
        if loader is None:
            structure, reason = automatic(model, subset, indices, options.get("last_layer_name"), budget)
        else:
            known = ("subnetwork_indices", "last_layer_name", "feature_reduction", "dict_key_y")
            given: dict[str, Any] = {name: value for name, value in options.items() if name in known}
            given |= {"subnetwork_indices": indices} if subset == "subnetwork" else {}
            found = plan(model, likelihood, loader, subset, memory_budget=budget, time_budget=time_budget, **given)
            structure, reason = found.chosen, found.reason
    kind = class_of(subset, structure)
    if subset == "subnetwork" and not arguments and "subnetwork_indices" not in options:
        raise OptionError(
            "subset_of_weights='subnetwork' without subnetwork_indices; expected positions in the flat parameter "
            "vector. A mask of lapwing.utils selects some: LargestMagnitudeSubnetMask(model, n_params_subnet=100)."
        )
    la = kind(model, likelihood, *arguments, **options)  # pyright: ignore[reportCallIssue]
    la.reason = reason
    return la


def plan(
    model: nn.Module,
    likelihood: str | Likelihood,
    loader: Iterable[Any],
    subset_of_weights: str = "all",
    *,
    memory_budget: AnyBudget | None = None,
    time_budget: float | int | None = None,
    **options: Any,
) -> Plan:
    """A table of all structures with the time and memory that each would take here, before anything is fitted.

    `options` are those of `Laplace` that say which weights and data are meant: `subnetwork_indices`, `last_layer_name`,
    `dict_key_y`. `time_budget` is in seconds, for a fit.

    >>> import torch
    >>> x = torch.randn(100, 3)
    >>> found = plan(nn.Linear(3, 2), "regression", [(x, x[:, :2])])
    >>> found.chosen, found.reason
    ('full', 'full: 8 weights, so every covariance fits (up to 3,000)')
    >>> [row["structure"] for row in found.rows][:3]
    ['full', 'kron', 'ekfac']
    """
    structure = "kron" if subset_of_weights == "last_layer" else "diag"  # both exist for these weights, any will do
    la = Laplace(model, likelihood, subset_of_weights, structure, memory_budget=memory_budget, **options)
    return la.plan(loader, time_budget=time_budget)


def automatic(
    model: nn.Module,
    subset: str,
    indices: Any = None,
    last_layer_name: str | None = None,
    memory_budget: AnyBudget | None = None,
) -> tuple[str, str]:
    """The structure that `auto` means, and the reason in a sentence.

    A last layer without a name is found when data are seen; until then the last nn.Linear of the model stands for it.
    """
    size = len(indices) if subset == "subnetwork" and isinstance(indices, Tensor) else ParamSpace.of(model).size
    if subset == "last_layer":
        linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        layer = linear.get(last_layer_name or next(reversed(linear), ""))
        size = size if layer is None else sum(p.numel() for p in layer.parameters())
    limit = None if memory_budget is None else bytes_of(memory_budget)
    if size <= FULL_LIMIT and (limit is None or 2 * size**2 * ParamSpace.of(model).dtype.itemsize <= limit):
        return "full", f"full: {size:,} weights, so every covariance fits (up to {FULL_LIMIT:,})"
    if subset == "subnetwork" and ParamSpace.of(model).select(mask=indices).cut():
        return "diag", f"diag: {size:,} weights are chosen, more than the {FULL_LIMIT:,} that a full matrix is kept for"
    needed = kept_bytes("kron", ParamSpace.of(model), {}) if subset == "all" else None
    if limit is not None and needed is not None and needed > limit:
        return "diag", f"diag: the factors of kron take {size_text(needed)}, more than the memory_budget"
    if size <= FULL_LIMIT:
        return "kron", f"kron: a full matrix of {size:,} weights takes more than the memory_budget"
    return "kron", f"kron: {size:,} weights, more than the {FULL_LIMIT:,} that a full matrix is kept for"
