"""Priors: a Gaussian over the weights, with one precision for all, per layer, per tensor, per group, or per entry.

    p(theta) = prod_i N(theta_i | mean_i, 1 / precision[group(i)])

One class serves them all: a group number for every entry and a precision for every group. Memory O(P) for the group
numbers, nothing for the isotropic prior. Everything is differentiable in the precisions.

`Gaussian` is a prior that is a previous posterior: N(mean, (curvature + diag(base))^-1), of any structure.

    >>> import torch
    >>> from torch import nn
    >>> from lapwing.params import ParamSpace
    >>> space = ParamSpace.of(nn.Linear(2, 1))
    >>> prior = Prior.per_tensor(space, [4.0, 1.0])
    >>> prior.precision()
    tensor([4., 4., 1.])
    >>> prior.logdet().exp()                                  # 4 * 4 * 1
    tensor(16.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import log, pi
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lapwing.errors import ParameterError
from lapwing.linalg import Curvature, Precision, total
from lapwing.params import ParamSpace


@dataclass(frozen=True)
class PriorGroups:
    """Which parameter tensors, by name, have a precision in common: each of them is in one group.

    A posterior over a part of the parameters has a precision for every group that it touches, in this order.

    >>> groups = PriorGroups.of([["0.weight", "0.bias"], ["1.weight"]])
    >>> len(groups), groups.members[1]
    (2, ('1.weight',))
    """

    members: tuple[tuple[str, ...], ...]
    structure: str = "grouped"

    def __post_init__(self) -> None:
        names = [name for group in self.members for name in group]
        if not names or not all(self.members):
            raise ParameterError(f"groups of a prior are {list(self.members)}; expected names of parameters in each.")
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ParameterError(f"'{twice}' is in several groups of a prior; expected every parameter in one.")

    def __len__(self) -> int:
        return len(self.members)

    @staticmethod
    def of(groups: Iterable[Iterable[str]], structure: str = "grouped") -> PriorGroups:
        """From lists of names."""
        listed = [[group] if isinstance(group, str) else list(group) for group in groups]
        strange = next((name for names in listed for name in names if not isinstance(name, str)), None)
        if strange is not None:
            raise ParameterError(f"a group of a prior has {strange!r}; expected lists of parameter names.")
        return PriorGroups(tuple(map(tuple, listed)), structure)

    def touched(self, space: ParamSpace) -> tuple[tuple[str, ...], ...]:
        """The groups that have an entry in the space, with the members that do."""
        present = self._present(space)
        held = [tuple(name for name in group if name in present) for group in self.members]
        return tuple(group for group in held if group)

    def numbers(self, space: ParamSpace) -> Int[Tensor, " size"]:
        """For every entry of the space the number of its group, among those that are touched."""
        number = {name: at for at, group in enumerate(self.touched(space)) for name in group}
        missing = next((name for name in self._present(space) if name not in number), None)
        if missing is not None:
            raise ParameterError(f"'{missing}' is in no group of the prior; expected every parameter in one.")
        of_tensor = torch.tensor([number.get(name, 0) for name in space.names], device=space.device)
        return of_tensor[space.groups("tensor")]

    def _present(self, space: ParamSpace) -> list[str]:
        if space.index is None:
            return list(space.names)
        return [space.names[int(number)] for number in space.groups("tensor").unique()]


@dataclass(frozen=True, eq=False)
class Prior:
    """Independent Gaussians; `groups` maps entries to `precisions`, None means that all entries share one."""

    size: int
    precisions: Float[Tensor, " groups"]
    groups: Int[Tensor, " size"] | None = None
    mean: Float[Tensor, ""] | Float[Tensor, " size"] | float = 0.0
    structure: str = "isotropic"

    @staticmethod
    def isotropic(space: ParamSpace, precision: float | Tensor = 1.0, mean: float | Tensor = 0.0) -> Prior:
        return Prior(space.size, _precisions(precision, 1, space), None, _mean(mean, space), "isotropic")

    @staticmethod
    def layerwise(
        space: ParamSpace, precision: float | Sequence[float] | Tensor = 1.0, mean: float | Tensor = 0.0
    ) -> Prior:
        """One precision per module, in the order of `space.layers`."""
        return Prior._grouped(space, space.groups("layer"), precision, mean, "layerwise")

    @staticmethod
    def per_tensor(
        space: ParamSpace, precision: float | Sequence[float] | Tensor = 1.0, mean: float | Tensor = 0.0
    ) -> Prior:
        """One precision per parameter tensor, in the order of `space.names`."""
        return Prior._grouped(space, space.groups("tensor"), precision, mean, "per_tensor")

    @staticmethod
    def grouped(
        space: ParamSpace,
        groups: Int[Tensor, " size"],
        precision: float | Sequence[float] | Tensor = 1.0,
        mean: float | Tensor = 0.0,
    ) -> Prior:
        """One precision per group; `groups` numbers them 0, 1, ... for every entry."""
        if groups.shape != (space.size,) or groups.dtype.is_floating_point or int(groups.min()) < 0:
            raise ParameterError(
                f"groups has shape {tuple(groups.shape)} and dtype {groups.dtype}; expected {space.size} group numbers "
                ">= 0, one per entry."
            )
        return Prior._grouped(space, groups, precision, mean, "grouped")

    @staticmethod
    def by_name(
        space: ParamSpace,
        groups: PriorGroups,
        precision: float | Sequence[float] | Tensor = 1.0,
        mean: float | Tensor = 0.0,
    ) -> Prior:
        """One precision per group of parameter tensors."""
        return Prior._grouped(space, groups.numbers(space), precision, mean, groups.structure)

    @staticmethod
    def diagonal(
        space: ParamSpace, precision: float | Sequence[float] | Tensor = 1.0, mean: float | Tensor = 0.0
    ) -> Prior:
        """One precision per entry."""
        return Prior._grouped(space, torch.arange(space.size, device=space.device), precision, mean, "diagonal")

    @staticmethod
    def _grouped(space: ParamSpace, groups: Tensor, precision: object, mean: float | Tensor, structure: str) -> Prior:
        count = int(groups.max()) + 1
        return Prior(space.size, _precisions(precision, count, space), groups, _mean(mean, space), structure)

    def precision(self) -> Float[Tensor, ""] | Float[Tensor, " size"]:
        """What `Curvature.with_prior` takes: a scalar for the isotropic prior, else one number per entry."""
        return self.precisions[0] if self.groups is None else self.precisions[self.groups]

    def with_precisions(self, precisions: Tensor) -> Prior:
        """The same prior with other precisions, as tuning makes them: [groups], or one for all."""
        if precisions.numel() == 1:
            precisions = precisions.reshape(1).expand(len(self.precisions))
        if precisions.shape != self.precisions.shape:
            raise ParameterError(
                f"{precisions.numel()} precisions for a {self.structure} prior; expected 1 or {len(self.precisions)}."
            )
        return replace(self, precisions=precisions)

    def entries(self) -> Float[Tensor, " groups"]:
        """Number of entries of each group."""
        if self.groups is None:
            return self.precisions.new_full((1,), self.size)
        return torch.bincount(self.groups, minlength=len(self.precisions)).to(self.precisions)

    def sums(self, values: Float[Tensor, " size"]) -> Float[Tensor, " groups"]:
        """Sum of a flat vector over each group."""
        if self.groups is None:
            return values.sum().unsqueeze(0)
        return values.new_zeros(len(self.precisions)).index_add(0, self.groups, values)

    def scatter(self, theta: Float[Tensor, " size"]) -> Float[Tensor, ""]:
        """(theta - mean)^T diag(precision) (theta - mean)."""
        return (self.sums((theta - self.mean).square()) * self.precisions).sum()

    def logdet(self, entries: Float[Tensor, " groups"] | None = None) -> Float[Tensor, ""]:
        """log det diag(precision); with the `entries` of the groups, where they are at hand."""
        return ((self.entries() if entries is None else entries) * self.precisions.log()).sum()

    def log_prob(self, theta: Float[Tensor, " size"]) -> Float[Tensor, ""]:
        """log p(theta), every constant included."""
        return (self.logdet() - self.scatter(theta) - self.size * log(2 * pi)) / 2

    def added_to(self, curvature: Curvature) -> Precision:
        """curvature + diag(precision): the precision of a posterior."""
        return curvature.with_prior(self.precision())


@dataclass(frozen=True, eq=False)
class Gaussian:
    """N(mean, (curvature + diag(base))^-1): a previous posterior, whose data gave `curvature`, as a prior.

    `base` is the prior that it began with, or its precision, one number for all; its own mean plays no part, as it has
    moved to `mean`. The precision matrix is never spelled out. Where the curvature has no exact decomposition (a large
    sum of Kronecker products), `logdet` is that of what takes its place, as it is for posteriors.

    >>> import torch
    >>> from lapwing.linalg import Diagonal
    >>> prior = Gaussian(torch.zeros(2), Diagonal(torch.tensor([3.0, 1.0])), 1.0)
    >>> prior.scatter(torch.ones(2)), prior.gradient(torch.ones(2))         # 4 + 2
    (tensor(6.), tensor([4., 2.]))
    """

    mean: Float[Tensor, " size"]
    curvature: Curvature
    base: Prior

    def __init__(self, mean: Any, curvature: Any, base: Any) -> None:
        if not isinstance(mean, Tensor) or mean.dim() != 1 or not mean.is_floating_point():
            found = f"shape {tuple(mean.shape)}, {mean.dtype}" if isinstance(mean, Tensor) else type(mean).__name__
            raise ParameterError(f"the mean of a prior is {found}; expected a vector [P] of floats, as la.mean is.")
        if not bool(torch.isfinite(mean).all()):
            raise ParameterError("the mean of a prior holds NaN or infinite values; expected finite ones.")
        if not isinstance(curvature, Curvature):
            raise ParameterError(
                f"the curvature of a prior is a {type(curvature).__name__}; expected one of lapwing.linalg, as "
                "la.fitted.curvature is. Of a fitted posterior use la.as_prior()."
            )
        base = base if isinstance(base, Prior) else _alone(base, mean)
        if not len(mean) == curvature.size == base.size:
            raise ParameterError(
                f"a prior has a mean of {len(mean)} entries, a curvature of {curvature.size} and a base of {base.size}"
                "; expected as many. Take all three over the same parameters."
            )
        for name, value in (("mean", mean.detach().clone()), ("curvature", curvature), ("base", base)):
            object.__setattr__(self, name, value)

    @property
    def size(self) -> int:
        return len(self.mean)

    def scatter(self, theta: Float[Tensor, " size"]) -> Float[Tensor, ""]:
        """(theta - mean)^T (curvature + diag(base)) (theta - mean)."""
        return ((theta - self.mean) * self.gradient(theta)).sum()

    def gradient(self, theta: Float[Tensor, " size"]) -> Float[Tensor, " size"]:
        """(curvature + diag(base)) (theta - mean): the gradient of half the scatter, and of -log p."""
        away = theta - self.mean
        return self.curvature.mv(away) + self.base.precision() * away

    def logdet(self) -> Float[Tensor, ""]:
        """log det (curvature + diag(base))."""
        return self.base.added_to(self.curvature).logdet()

    def log_prob(self, theta: Float[Tensor, " size"]) -> Float[Tensor, ""]:
        """log p(theta), every constant included."""
        return (self.logdet() - self.scatter(theta) - len(self.mean) * log(2 * pi)) / 2

    def added_to(self, curvature: Curvature) -> Precision:
        """curvature + this prior's precision: that of the posterior after the data of `curvature`."""
        return self.base.added_to(total(curvature, self.curvature))


AnyPrior = Prior | Gaussian


def _alone(precision: object, mean: Tensor) -> Prior:
    """One precision for all entries of a vector."""
    try:
        value = torch.as_tensor(precision, dtype=mean.dtype, device=mean.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ParameterError(f"the base of a prior is {precision!r}; expected a Prior, or a number >= 0.") from error
    if value.numel() != 1 or not bool(torch.isfinite(value).all()) or bool((value < 0).any()):
        raise ParameterError(
            f"the base of a prior is {value.flatten().tolist()[:5]}; expected one finite number >= 0, or a Prior."
        )
    return Prior(len(mean), value.detach().reshape(1))


def _precisions(precision: object, count: int, space: ParamSpace) -> Tensor:
    values = torch.as_tensor(precision, dtype=space.dtype, device=space.device)
    if values.dim() > 1:
        raise ParameterError(f"prior precision has shape {tuple(values.shape)}; expected a number or a vector.")
    values = values.reshape(-1)
    if len(values) not in (1, count):
        raise ParameterError(f"{len(values)} prior precisions; expected 1, or {count} (one per group).")
    if not bool(torch.isfinite(values).all()) or bool((values < 0).any()):
        raise ParameterError(
            f"prior precision {values.tolist()[:5]} is negative, NaN or infinite; expected numbers >= 0."
        )
    return values if len(values) == count else values.expand(count)


def _mean(mean: float | Tensor, space: ParamSpace) -> Tensor:
    values = torch.as_tensor(mean, dtype=space.dtype, device=space.device)
    if values.numel() == 1:
        values = values.reshape(())
    elif values.shape != (space.size,):
        raise ParameterError(
            f"prior mean has shape {tuple(values.shape)}; expected a number or {space.size} (= P) entries."
        )
    if not bool(torch.isfinite(values).all()):
        raise ParameterError("prior mean holds NaN or infinite values; expected finite ones.")
    return values
