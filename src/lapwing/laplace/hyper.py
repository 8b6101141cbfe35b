"""Hyper-parameters of a posterior: prior precision and mean, noise level, temperature; each checked when it is set.

They can change at any time without another pass over the data: the posterior precision is
curvature / (sigma^2 T) + prior.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lapwing.errors import CurvatureError, OptionError, ParameterError
from lapwing.linalg import Curvature
from lapwing.params import ParamSpace
from lapwing.priors import AnyPrior, Gaussian, Prior, PriorGroups
from lapwing.tape.invariance import ScaleInvariantGroups, scale_invariant_groups

Number = float | int | Tensor
Groups = PriorGroups | ScaleInvariantGroups | Iterable[Iterable[str]]
"""Which parameters have a precision in common: as found by `scale_invariant_groups`, or lists of names."""


@dataclass(frozen=True, eq=False)
class HyperParameters:
    """Four tensors. `prior_precision` has one entry, one per parameter tensor, one per module, or one per weight.

    With `prior_groups`, which name the parameter tensors that share one, it has one entry, or one per group. With
    `earlier`, the curvature of earlier data, the prior is a previous posterior around `prior_mean`.
    """

    prior_precision: Float[Tensor, " groups"]
    prior_mean: Float[Tensor, "..."]
    sigma_noise: Float[Tensor, ""]
    temperature: Float[Tensor, ""]
    prior_groups: PriorGroups | None = None
    earlier: Curvature | None = None

    @property
    def structure(self) -> str:
        """The name of the groups, where there is more than one precision and they say whose each is; else empty."""
        return "" if self.prior_groups is None or len(self.prior_precision) == 1 else self.prior_groups.structure

    def prior(self, space: ParamSpace) -> AnyPrior:
        base = self.base(space)
        if self.earlier is None:
            return base
        mean = self.prior_mean.expand(space.size)
        return Gaussian(mean, self.earlier, base)

    def base(self, space: ParamSpace) -> Prior:
        """The prior without what earlier data have said."""
        return prior_of(space, self.prior_precision, self.prior_mean, self.prior_groups)

    def refuse_earlier(self, what: str) -> None:
        """Where the prior has to be independent Gaussians, whose precisions are free."""
        if self.earlier is not None:
            raise OptionError(
                f"{what} was asked of a posterior whose prior is a previous posterior; expected a prior with "
                "precisions of its own. A previous posterior is fixed: tune it before it becomes a prior."
            )


def with_previous(hyper: HyperParameters, prior: object, whole: ParamSpace) -> HyperParameters:
    """With a previous posterior for the prior; its base has the groups that a posterior can have."""
    if not isinstance(prior, Gaussian):
        remedy = "Give its as_prior()." if hasattr(prior, "as_prior") else "Use prior_precision for independent ones."
        raise OptionError(f"prior is a {type(prior).__name__}; expected a lapwing.priors.Gaussian. {remedy}")
    given = [float(hyper.prior_precision[0]) != 1, bool((hyper.prior_mean != 0).any()), hyper.prior_groups is not None]
    if len(hyper.prior_precision) > 1 or any(given):
        raise OptionError(
            "a prior was given, and prior_precision, prior_mean or prior_groups as well; expected one of them. A "
            "previous posterior has all three."
        )
    if prior.mean.dtype != whole.dtype:
        raise ParameterError(
            f"the prior is of dtype {prior.mean.dtype} and the model's curvature of {whole.dtype}; expected the same. "
            f"Convert the model, for example with model.to({prior.mean.dtype})."
        )
    precision = prior.base.precision().detach().reshape(-1)
    if len(precision) > 1 and bool((precision == precision[0]).all()):
        precision = precision[:1]
    if len(precision) == whole.size > 1:  # one per tensor, or per module, where that is all there is to it
        for by in ("tensor", "layer"):
            numbers = whole.groups(by)
            firsts = precision.new_zeros(int(numbers.max()) + 1).index_copy(0, numbers, precision)
            if torch.equal(firsts[numbers], precision):
                precision = firsts
                break
    mean = prior.mean.to(whole.device)
    return replace(hyper, prior_precision=precision.to(whole.device), prior_mean=mean, earlier=prior.curvature)


NAMES = ("prior_precision", "prior_mean", "sigma_noise", "temperature")


def checked_precision(value: Number, place: tuple[torch.dtype, torch.device]) -> Float[Tensor, " groups"]:
    """Prior precisions as a vector of finite numbers >= 0."""
    tensor = as_tensor(value, "prior_precision", place)
    if tensor.dim() > 1:
        raise ParameterError(f"prior_precision has shape {tuple(tensor.shape)}; expected a number or a vector.")
    tensor = tensor.reshape(-1)
    numbers = tensor.detach()
    if not len(tensor):
        raise ParameterError("prior_precision is empty; expected at least one finite number >= 0.")
    if not bool(torch.isfinite(numbers).all()) or bool((numbers < 0).any()):
        raise ParameterError(f"prior_precision is {numbers.tolist()[:5]}; expected finite numbers >= 0.")
    return tensor


def checked_groups(value: Groups | None, space: ParamSpace) -> PriorGroups | None:
    """Groups of the trainable parameters of a model."""
    if value is None:
        return None
    if isinstance(value, ScaleInvariantGroups):
        value = value.partition()
    elif not isinstance(value, PriorGroups):
        if isinstance(value, str) or not isinstance(value, Iterable):
            raise ParameterError(
                f"prior_groups is {value!r}; expected what lapwing.scale_invariant_groups(model, x) returns, or lists "
                "of parameter names."
            )
        value = PriorGroups.of(value)
    names = [name for group in value.members for name in group]
    unknown = next((name for name in names if name not in space.names), None)
    if unknown is not None:
        raise ParameterError(
            f"prior_groups has '{unknown}', which is no trainable parameter of the model; expected some of "
            f"{list(space.names)}."
        )
    return value


def invariant_groups(model: nn.Module, x: Any) -> PriorGroups:
    """The scale-invariant groups of a model, and one of all its other parameters."""
    found = scale_invariant_groups(model, x)
    if not len(found):
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(found.remaining.items())[:3])
        raise OptionError(
            f"{type(model).__name__} has no scale-invariant group ({reasons}); expected parameters before a "
            "normalisation. Use prior_structure='scalar', or 'layerwise' for one precision per tensor."
        )
    return found.partition()


def checked_mean(value: Number, place: tuple[torch.dtype, torch.device]) -> Float[Tensor, "..."]:
    """The prior mean: one number, or one per weight."""
    tensor = as_tensor(value, "prior_mean", place)
    return tensor.reshape(()) if tensor.numel() == 1 else tensor


def checked_noise(value: Number, place: tuple[torch.dtype, torch.device], has_noise: bool) -> Float[Tensor, ""]:
    """The noise level: one number > 0, and 1 for a likelihood that has none."""
    tensor = as_tensor(value, "sigma_noise", place)
    if tensor.numel() != 1 or tensor.dim() > 1:
        raise ParameterError(
            f"sigma_noise has shape {tuple(tensor.shape)}; expected one number. For one noise level per output give "
            "likelihood=lapwing.likelihoods.Gaussian(sigma=...), which is then fixed."
        )
    number = float(tensor.detach())
    if not (0 < number < float("inf")):
        raise ParameterError(f"sigma_noise is {number}; expected a finite number > 0.")
    if not has_noise and number != 1:
        raise OptionError(
            f"sigma_noise is {number} for a likelihood without a free noise level; expected 1. Only "
            "likelihood='regression' has one."
        )
    return tensor.reshape(())


def checked_temperature(value: Number, place: tuple[torch.dtype, torch.device]) -> Float[Tensor, ""]:
    tensor = as_tensor(value, "temperature", place)
    if tensor.numel() != 1:
        raise ParameterError(f"temperature has shape {tuple(tensor.shape)}; expected one number.")
    if not (0 < float(tensor.detach()) < float("inf")):
        raise ParameterError(f"temperature is {float(tensor.detach())}; expected a finite number > 0.")
    return tensor.reshape(())


def as_tensor(value: object, name: str, place: tuple[torch.dtype, torch.device]) -> Tensor:
    """A copy, as the caller may change its own."""
    dtype, device = place
    try:
        return torch.as_tensor(value, dtype=dtype, device=device).clone()
    except (TypeError, ValueError) as error:
        raise ParameterError(f"{name} is {value!r}; expected a number or a tensor.") from error


def check_prior(
    space: ParamSpace, precision: Tensor, mean: Number, per_entry: bool, groups: PriorGroups | None = None
) -> None:
    """A number of precisions and a mean that fit the parameters, and a structure that can hold them."""
    prior = prior_of(space, precision.detach(), mean, groups)
    if prior.structure == "diagonal" and not per_entry:
        raise CurvatureError(
            "one prior precision per entry was given to a Kronecker posterior, whose blocks carry one per weight "
            f"and one per bias; expected 1, {len(space.names)} (per tensor) or {len(space.layers)} "
            "(per module) numbers. Use hessian_structure 'full', 'diag' or 'blocks' for a diagonal prior."
        )


def precisions_of(space: ParamSpace, groups: PriorGroups | None = None) -> dict[str, int]:
    """How many precisions each structure of a prior has; a sub-network counts the tensors and modules it touches."""
    if space.index is None:
        tensors, modules = len(space.names), len(space.layers)
    else:
        tensors, modules = (len(space.groups(by).unique()) for by in ("tensor", "layer"))
    named = {} if groups is None else {"scale_invariant": len(groups.touched(space))}
    return {"scalar": 1, "layerwise": tensors, "module": modules, "diag": space.size, **named}


def prior_of(space: ParamSpace, precision: Tensor, mean: Number, groups: PriorGroups | None = None) -> Prior:
    """The prior that a number of precisions means: one, one per tensor, one per module, or one per entry.

    With groups it is one, or one per group.
    """
    count, known = precision.numel(), precisions_of(space, groups)
    if groups is not None:
        if count not in (1, known["scale_invariant"]):
            raise ParameterError(
                f"prior_precision has {count} entries; expected 1, or {known['scale_invariant']} (one per group of "
                "prior_groups). For another structure set prior_precision to one number, then prior_groups to None."
            )
        prior = Prior.by_name(space, groups, precision, mean)
        return Prior.isotropic(space, precision.reshape(()), mean) if count == 1 else prior
    if count == 1:
        return Prior.isotropic(space, precision.reshape(()), mean)
    for structure, by in (("layerwise", "tensor"), ("module", "layer")):
        if count == known[structure]:
            numbers = space.groups(by)
            if space.index is not None:  # without gaps, where tensors are not touched
                numbers = numbers.unique(return_inverse=True)[1]
            return replace(Prior.grouped(space, numbers, precision, mean), structure=structure)
    if count == known["diag"]:
        return Prior.diagonal(space, precision, mean)
    raise ParameterError(
        f"prior_precision has {count} entries; expected 1, {known['layerwise']} (one per parameter tensor), "
        f"{known['module']} (one per module) or {known['diag']} (one per entry)."
    )
