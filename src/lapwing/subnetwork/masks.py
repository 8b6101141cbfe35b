"""Masks: choices of n of P weights under the names and arguments that users of laplace-torch know.

    select(loader) -> positions [n] in the flat vector of trainable weights, once per mask; then `indices`

A mask only calls the functions of `choices` and `swag`, at their cost and memory; what it keeps is one index [n].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from lapwing.errors import DataError, ParameterError
from lapwing.likelihoods import Categorical, Gaussian, Likelihood
from lapwing.params import ParamSpace
from lapwing.subnetwork.choices import (
    by_modules,
    by_parameters,
    check_count,
    largest_magnitude,
    largest_variance,
    last_layers,
    positions,
    random,
    unknown,
)
from lapwing.subnetwork.swag import swag_variance


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
        self._indices = positions(self.space, self._choice(train_loader))
        return self._indices

    def _choice(self, train_loader: Iterable[Any] | None) -> ParamSpace:
        """The sub-network; from the mask [P] where that is all that a class has."""
        return self.space.select(mask=self.get_subnet_mask(train_loader).bool())

    @property
    def indices(self) -> Int[Tensor, " chosen"]:
        if self._indices is None:
            raise ParameterError("the sub-network is not selected yet; expected a call of select() before.")
        return self._indices

    @property
    def n_params_subnet(self) -> int:
        return len(self.indices)

    def _loader(self, train_loader: Iterable[Any] | None) -> Iterable[Any]:
        if train_loader is None:
            raise DataError(f"{type(self).__name__} needs data; expected select(train_loader), got no loader.")
        return train_loader


class _Chosen(SubnetMask):
    """A mask that is a choice of `choices`: the mask [P] is made only where somebody asks for it."""

    @abstractmethod
    def _choice(self, train_loader: Iterable[Any] | None) -> ParamSpace: ...

    def get_subnet_mask(self, train_loader: Iterable[Any] | None) -> Bool[Tensor, " size"]:
        mask = torch.zeros(self.space.size, dtype=torch.bool, device=self.space.device)
        mask[positions(self.space, self._choice(train_loader))] = True
        return mask


class _Counted(_Chosen):
    """A mask of a given number of weights."""

    def __init__(self, model: nn.Module, n_params_subnet: int | None) -> None:
        super().__init__(model)
        check_count(self.space, n_params_subnet)
        assert n_params_subnet is not None
        self._count = n_params_subnet

    @property
    def n_params_subnet(self) -> int:
        return self._count


class RandomSubnetMask(_Counted):
    """`random`."""

    def __init__(self, model: nn.Module, n_params_subnet: int | None, generator: torch.Generator | None = None) -> None:
        super().__init__(model, n_params_subnet)
        self._generator = generator

    def _choice(self, train_loader: Iterable[Any] | None) -> ParamSpace:
        return random(self.space, self._count, self._generator)


class LargestMagnitudeSubnetMask(_Counted):
    """`largest_magnitude`."""

    def _choice(self, train_loader: Iterable[Any] | None) -> ParamSpace:
        return largest_magnitude(self.space, self.model, self._count)


class LargestVarianceDiagLaplaceSubnetMask(_Counted):
    """`largest_variance` of a diagonal posterior over all weights, which is fitted to the loader's data.

    Weights that the data do not touch have the largest variance, that of the prior, and are chosen first: where there
    are as many of them as are wanted, the sub-network predicts what MAP does. Those of `LargestVarianceSWAGSubnetMask`
    move with the data.
    """

    def __init__(self, model: nn.Module, n_params_subnet: int | None, diag_laplace_model: Any) -> None:
        super().__init__(model, n_params_subnet)
        if not callable(getattr(diag_laplace_model, "fit", None)):
            raise ParameterError(
                f"diag_laplace_model is a {type(diag_laplace_model).__name__} without fit(); expected a Laplace object "
                "over all weights with hessian_structure='diag'."
            )
        self._posterior = diag_laplace_model

    def _choice(self, train_loader: Iterable[Any] | None) -> ParamSpace:
        self._posterior.fit(self._loader(train_loader))
        return largest_variance(self.space, self._posterior.posterior_variance.detach(), self._count)


class LargestVarianceSWAGSubnetMask(_Counted):
    """`largest_variance` of `swag_variance`; `likelihood` is an object, 'classification' or 'regression'."""

    def __init__(
        self,
        model: nn.Module,
        n_params_subnet: int | None,
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
                raise ParameterError(unknown("likelihood", name, list(known)))
            likelihood = known[name]
        self._likelihood = likelihood
        self._swag = {"snapshots": swag_n_snapshots, "every": swag_snapshot_freq, "lr": swag_lr}

    def _choice(self, train_loader: Iterable[Any] | None) -> ParamSpace:
        variance = swag_variance(self.model, self._loader(train_loader), self._likelihood, **self._swag)
        return largest_variance(self.space, variance, self._count)


class _Named(_Chosen):
    """A mask of whole tensors, for which no data are needed."""

    _chosen: ParamSpace

    def _choice(self, train_loader: Iterable[Any] | None) -> ParamSpace:
        return self._chosen


class ParamNameSubnetMask(_Named):
    """`by_parameters`."""

    def __init__(self, model: nn.Module, parameter_names: Iterable[str]) -> None:
        super().__init__(model)
        self._chosen = by_parameters(self.space, parameter_names)


class ModuleNameSubnetMask(_Named):
    """`by_modules`."""

    def __init__(self, model: nn.Module, module_names: Iterable[str]) -> None:
        super().__init__(model)
        self._chosen = by_modules(self.space, module_names)


class LastLayerSubnetMask(_Chosen):
    """`last_layers` on the loader's first batch, or the module of a given name, for which no data are needed."""

    def __init__(self, model: nn.Module, last_layer_name: str | None = None, n_layers: int = 1) -> None:
        super().__init__(model)
        if last_layer_name is not None and n_layers != 1:
            raise ParameterError(
                f"n_layers is {n_layers} with the layer {last_layer_name!r}; expected one of the two. Use "
                "ModuleNameSubnetMask for several layers by name."
            )
        self._count = n_layers
        self._chosen = None if last_layer_name is None else by_modules(self.space, [last_layer_name])

    def _choice(self, train_loader: Iterable[Any] | None) -> ParamSpace:
        if self._chosen is not None:
            return self._chosen
        for batch in self._loader(train_loader):
            return last_layers(self.space, self.model, batch[0], self._count)
        raise DataError("the loader yields no batch; expected at least one, to find the last layer with.")
