"""Sub-networks: which weights are random. Scores [P] -> a smaller `ParamSpace`; the other weights stay at their values.

    largest_magnitude, largest_variance, random    n weights, cut through tensors
    by_parameters, by_modules, last_layer          whole tensors
    swag_variance                                  a score: variance along an SGD trajectory, `snapshots` epochs

A choice costs O(P log P) and one index [n]. Positions are those of the flat vector of the space they are taken from.
The classes at the end have the names and arguments that users of laplace-torch know, and only call these functions.

    >>> import torch
    >>> from torch import nn
    >>> model = nn.Linear(3, 1, bias=False)
    >>> _ = nn.init.constant_(model.weight, 0.1)
    >>> model.weight.data[0, 1] = -2.0
    >>> largest_magnitude(ParamSpace.of(model), model, 1).index
    tensor([1])
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.func import functional_call

from lapwing.errors import DataError, LapwingError, ModelError, ParameterError
from lapwing.likelihoods import Categorical, Gaussian, Likelihood
from lapwing.params import ParamSpace
from lapwing.tangent import Tangent
from lapwing.tangent.guard import unchanged
from lapwing.tangent.inputs import batch_size, call
from lapwing.tangent.uses import Contraction

# -- choices --------------------------------------------------------------------------------------------------------


def largest_magnitude(space: ParamSpace, model: nn.Module, n: int) -> ParamSpace:
    """The n weights of largest absolute value."""
    return _largest(space, space.values(model).abs(), n, "magnitude")


def largest_variance(space: ParamSpace, variance: Float[Tensor, " size"], n: int) -> ParamSpace:
    """The n weights of largest variance, as from a diagonal posterior or `swag_variance`."""
    return _largest(space, variance, n, "variance")


def random(space: ParamSpace, n: int, generator: torch.Generator | None = None) -> ParamSpace:
    """n weights drawn without replacement, all sets equally likely."""
    _check_count(space, n)
    place = torch.device("cpu") if generator is None else generator.device
    return space.select(mask=torch.randperm(space.size, generator=generator, device=place)[:n])


def by_parameters(space: ParamSpace, names: Iterable[str]) -> ParamSpace:
    """Whole tensors, by the names of `named_parameters()`."""
    names = _names(names, "parameter")
    for name in names:
        if name not in space.names:
            raise ParameterError(_unknown("parameter", name, space.names))
    return space.select(names)


def by_modules(space: ParamSpace, names: Iterable[str]) -> ParamSpace:
    """All tensors of the modules, and of the modules inside them, by the names of `named_modules()`."""
    names = _names(names, "module")
    owners = sorted({name[:at] for name in space.names for at, c in enumerate(name) if c == "."})
    for name in names:
        if name and name not in owners:
            raise ParameterError(_unknown("module with parameters", name, owners))
    return space.select([own for own in space.names if any(not name or own.startswith(f"{name}.") for name in names)])


def last_layer(space: ParamSpace, model: nn.Module, x: Any) -> ParamSpace:
    """The weight that is multiplied last when `model` runs on the inputs x, and its bias. One recorded pass."""
    with unchanged(model):
        model.eval()
        linearisation = Tangent(model, space.whole).at(x)
    used = [(use, {name for source in use.sources for name in source.names}) for use, _ in linearisation.uses]
    last = max((i for i, (use, _) in enumerate(used) if isinstance(use, Contraction) and use.weight), default=None)
    if last is None:
        raise ModelError(
            f"no operation of {type(model).__name__} multiplies its input by a trainable weight; expected a linear or "
            "convolutional layer. Name the layer: by_modules(space, ['...'])."
        )
    owner = _module(min(used[last][1]))
    later = {name for _, names in used[last:] for name in names if _module(name) == owner}
    return space.select([name for name in space.names if name in later])


def positions(space: ParamSpace, chosen: ParamSpace) -> Int[Tensor, " chosen"]:
    """Where the entries of a sub-network lie in the flat vector of `space`, in increasing order."""
    inside = torch.zeros(space.total, dtype=torch.bool, device=space.device)
    segments = [torch.arange(space.total, device=space.device)[space.whole.segment(name)] for name in chosen.names]
    inside[chosen.restrict(torch.cat(segments))] = True
    found = space.restrict(inside).nonzero().squeeze(1)
    if len(found) != chosen.size:
        raise ParameterError(
            f"{chosen.size - len(found)} entries of the sub-network are not in the larger space; expected all of them. "
            "Choose from this space."
        )
    return found


# -- a score --------------------------------------------------------------------------------------------------------


class _Called(nn.Module):
    """A model that takes its inputs, of any kind, as one argument: what `functional_call` can run."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Any) -> Tensor:
        return call(self.model, x)


def swag_variance(
    model: nn.Module,
    loader: Iterable[Any],
    likelihood: Likelihood,
    snapshots: int = 40,
    every: int = 1,
    lr: float | int = 0.01,
    momentum: float | int = 0.9,
    decay: float | int = 3e-4,
) -> Float[Tensor, " size"]:
    """Variance of every trainable weight along SGD from where the model stands (diagonal SWAG; Maddox et al. 2019).

    A snapshot after every `every` epochs, `snapshots` of them; the loss is the mean negative log-likelihood, `decay`
    its weight decay. The steps are taken on copies of the parameters and buffers (memory 4 P with the moments), so the
    model is not changed. It runs in the mode it is in: dropout is off unless it was left on.
    """
    if snapshots < 2 or every < 1:
        raise ParameterError(
            f"snapshots is {snapshots} and every is {every}; expected at least 2 snapshots, and every >= 1."
        )
    if not 0 < lr < float("inf") or not 0 <= momentum < 1 or not 0 <= decay < float("inf"):
        raise ParameterError(
            f"lr is {lr}, momentum {momentum}, decay {decay}; expected lr > 0, momentum in [0, 1) and decay >= 0."
        )
    space, caller = ParamSpace.of(model), _Called(model)
    theta = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters() if p.requires_grad}
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    state = {f"model.{name}": value for name, value in {**theta, **buffers}.items()}
    velocity = {name: torch.zeros_like(value) for name, value in theta.items()}
    mean = space.ravel({name: value.detach() for name, value in theta.items()}).zero_()
    squares = torch.zeros_like(mean)
    for epoch in range(1, snapshots * every + 1):
        number = -1
        for number, batch in enumerate(loader):
            if not isinstance(batch, (tuple, list)) or len(batch) != 2:
                raise DataError(f"batch {number} is a {type(batch).__name__}; expected a pair (inputs, targets).")
            x, y = batch
            try:
                with unchanged(model), torch.enable_grad():
                    f = functional_call(caller, state, (x,))
                    likelihood.check(f, y)
                    loss = -likelihood.log_prob(f, y).sum() / batch_size(x)
            except LapwingError as error:
                raise type(error)(f"batch {number}: {error}") from error
            if not bool(torch.isfinite(loss)):
                raise DataError(
                    f"the loss of batch {number} is {float(loss.detach())} in epoch {epoch} of SGD; expected a finite "
                    f"number. Use a smaller lr than {lr}, or check the data."
                )
            grads = torch.autograd.grad(loss, list(theta.values()), allow_unused=True)
            with torch.no_grad():
                for (name, value), grad in zip(theta.items(), grads, strict=True):
                    if grad is not None:
                        velocity[name].mul_(momentum).add_(grad).add_(value, alpha=decay)
                        value.sub_(velocity[name], alpha=lr)
        if number < 0:
            raise DataError("the loader yields no batch; expected at least one (x, y) pair in every epoch.")
        if epoch % every == 0:
            now = space.ravel({name: value.detach() for name, value in theta.items()})
            away = now - mean
            mean = mean + away / (epoch // every)
            squares = squares + away * (now - mean)  # Welford: E[p^2] - E[p]^2 would cancel
    return squares / snapshots


# -- details --------------------------------------------------------------------------------------------------------


def _largest(space: ParamSpace, scores: Tensor, n: int, what: str) -> ParamSpace:
    _check_count(space, n)
    space.check(scores)
    if bool(torch.isnan(scores).any()):
        raise ParameterError(
            f"the {what} of weight {int(torch.isnan(scores).nonzero()[0])} is NaN; expected numbers. Check the model."
        )
    return space.select(mask=scores.argsort(descending=True, stable=True)[:n])


def _check_count(space: ParamSpace, n: int) -> None:
    if not 1 <= n <= space.size:
        raise ParameterError(f"a sub-network of {n} weights; expected a number from 1 to {space.size} (= P).")


def _names(names: Iterable[str], kind: str) -> list[str]:
    found = [names] if isinstance(names, str) else list(names)
    if isinstance(names, str) or not found:
        raise ParameterError(f"{kind} names are {names!r}; expected a list with at least one name, ['...'].")
    return found


def _unknown(kind: str, name: str, known: Sequence[str]) -> str:
    near = get_close_matches(name, known, n=1)
    return f"no {kind} '{name}' here; " + (f"did you mean '{near[0]}'?" if near else f"expected some of {list(known)}.")


def _module(name: str) -> str:
    """The module that owns a parameter; a parametrisation (weight norm) belongs to the module that it is put on."""
    return (
        name.partition("parametrizations.")[0].rstrip(".") if "parametrizations." in name else name.rpartition(".")[0]
    )


# -- under the names of laplace-torch ---------------------------------------------------------------------------------


class SubnetMask(ABC):
    """Chooses once, by `select`; then `indices` are the chosen positions of the flat vector of trainable weights.

    A choice of one's own extends this class by `get_subnet_mask`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.space = ParamSpace.of(model)
        self._indices: Tensor | None = None

    @abstractmethod
    def get_subnet_mask(self, train_loader: Iterable[Any] | None) -> Bool[Tensor, " size"]:
        """True where a weight belongs to the sub-network."""

    def select(self, train_loader: Iterable[Any] | None = None) -> Int[Tensor, " chosen"]:
        if self._indices is not None:
            raise ParameterError("the sub-network is selected already; expected one select per mask. Make a new mask.")
        mask = self.get_subnet_mask(train_loader)
        self._indices = positions(self.space, self.space.select(mask=mask.bool()))
        return self._indices

    @property
    def indices(self) -> Int[Tensor, " chosen"]:
        if self._indices is None:
            raise ParameterError("the sub-network is not selected yet; expected a call of select() before.")
        return self._indices

    @property
    def n_params_subnet(self) -> int:
        return len(self.indices)

    def _mask(self, chosen: ParamSpace) -> Bool[Tensor, " size"]:
        mask = torch.zeros(self.space.size, dtype=torch.bool, device=self.space.device)
        mask[positions(self.space, chosen)] = True
        return mask

    def _loader(self, train_loader: Iterable[Any] | None) -> Iterable[Any]:
        if train_loader is None:
            raise DataError(f"{type(self).__name__} needs data; expected select(train_loader), got no loader.")
        return train_loader


class _Counted(SubnetMask):
    """A mask of a given number of weights."""

    def __init__(self, model: nn.Module, n_params_subnet: int) -> None:
        super().__init__(model)
        _check_count(self.space, n_params_subnet)
        self._count = n_params_subnet

    @property
    def n_params_subnet(self) -> int:
        return self._count


class RandomSubnetMask(_Counted):
    """`random`."""

    def __init__(self, model: nn.Module, n_params_subnet: int, generator: torch.Generator | None = None) -> None:
        super().__init__(model, n_params_subnet)
        self._generator = generator

    def get_subnet_mask(self, train_loader: Iterable[Any] | None) -> Bool[Tensor, " size"]:
        return self._mask(random(self.space, self._count, self._generator))


class LargestMagnitudeSubnetMask(_Counted):
    """`largest_magnitude`."""

    def get_subnet_mask(self, train_loader: Iterable[Any] | None) -> Bool[Tensor, " size"]:
        return self._mask(largest_magnitude(self.space, self.model, self._count))


class LargestVarianceDiagLaplaceSubnetMask(_Counted):
    """`largest_variance` of a diagonal posterior over all weights, which is fitted to the loader's data."""

    def __init__(self, model: nn.Module, n_params_subnet: int, diag_laplace_model: Any) -> None:
        super().__init__(model, n_params_subnet)
        if not callable(getattr(diag_laplace_model, "fit", None)):
            raise ParameterError(
                f"diag_laplace_model is a {type(diag_laplace_model).__name__} without fit(); expected a Laplace object "
                "over all weights with hessian_structure='diag'."
            )
        self._posterior = diag_laplace_model

    def get_subnet_mask(self, train_loader: Iterable[Any] | None) -> Bool[Tensor, " size"]:
        self._posterior.fit(self._loader(train_loader))
        return self._mask(largest_variance(self.space, self._posterior.posterior_variance.detach(), self._count))


class LargestVarianceSWAGSubnetMask(_Counted):
    """`largest_variance` of `swag_variance`; `likelihood` is an object, 'classification' or 'regression'."""

    def __init__(
        self,
        model: nn.Module,
        n_params_subnet: int,
        likelihood: Likelihood | str = "classification",
        swag_n_snapshots: int = 40,
        swag_snapshot_freq: int = 1,
        swag_lr: float | int = 0.01,
    ) -> None:
        super().__init__(model, n_params_subnet)
        if isinstance(likelihood, str):
            known: dict[str, Likelihood] = {"classification": Categorical(), "regression": Gaussian()}
            name = str(getattr(likelihood, "value", likelihood))
            if name not in known:
                raise ParameterError(_unknown("likelihood", name, list(known)))
            likelihood = known[name]
        self._likelihood = likelihood
        self._swag = {"snapshots": swag_n_snapshots, "every": swag_snapshot_freq, "lr": swag_lr}

    def get_subnet_mask(self, train_loader: Iterable[Any] | None) -> Bool[Tensor, " size"]:
        variance = swag_variance(self.model, self._loader(train_loader), self._likelihood, **self._swag)
        return self._mask(largest_variance(self.space, variance, self._count))


class ParamNameSubnetMask(SubnetMask):
    """`by_parameters`."""

    def __init__(self, model: nn.Module, parameter_names: Iterable[str]) -> None:
        super().__init__(model)
        self._chosen = by_parameters(self.space, parameter_names)

    def get_subnet_mask(self, train_loader: Iterable[Any] | None) -> Bool[Tensor, " size"]:
        return self._mask(self._chosen)


class ModuleNameSubnetMask(SubnetMask):
    """`by_modules`."""

    def __init__(self, model: nn.Module, module_names: Iterable[str]) -> None:
        super().__init__(model)
        self._chosen = by_modules(self.space, module_names)

    def get_subnet_mask(self, train_loader: Iterable[Any] | None) -> Bool[Tensor, " size"]:
        return self._mask(self._chosen)


class LastLayerSubnetMask(SubnetMask):
    """`last_layer` on the loader's first batch, or the module of a given name, for which no data are needed."""

    def __init__(self, model: nn.Module, last_layer_name: str | None = None) -> None:
        super().__init__(model)
        self._chosen = None if last_layer_name is None else by_modules(self.space, [last_layer_name])

    def get_subnet_mask(self, train_loader: Iterable[Any] | None) -> Bool[Tensor, " size"]:
        if self._chosen is not None:
            return self._mask(self._chosen)
        for batch in self._loader(train_loader):
            return self._mask(last_layer(self.space, self.model, batch[0]))
        raise DataError("the loader yields no batch; expected at least one, to find the last layer with.")
