"""Posteriors over the last layer: features in closed form, the rest of the network as trained."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from lapwing.errors import ModelError
from lapwing.laplace import predictions
from lapwing.laplace.budgets import budgeted
from lapwing.laplace.data import peek
from lapwing.laplace.hyper import Number
from lapwing.laplace.structures import AnyTangent
from lapwing.laplace.variants.all_weights import DiagLaplace, FullLaplace, KronLaplace, ParametricLaplace, arguments
from lapwing.likelihoods import Likelihood
from lapwing.linalg.autocast import outside_autocast
from lapwing.subnetwork import last_layer
from lapwing.tangent import Tangent
from lapwing.tangent.features import FeatureTangent
from lapwing.tangent.inputs import take
from lapwing.tangent.last_layer import differ


class LLLaplace(ParametricLaplace):
    """Random weights in the last layer only: features in closed form, the rest of the network as trained.

    The layer is found when data are seen: an nn.Linear whose value is the output, at every position or at one of them,
    or else the weight that is multiplied last (a convolution, say), if the output is linear in it. `last_layer_name`
    names any module; where it is no such layer, its Jacobian is autograd's. `feature_reduction` says how the model
    comes from features [B, T, D] to outputs [B, C]: "pick_first", "pick_last" or "average" over the positions.
    """

    subset: ClassVar[str] = "last_layer"
    stored: ClassVar[tuple[str, ...]] = ("last_layer_name", "feature_reduction")

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood,
        sigma_noise: Number = 1.0,
        prior_precision: Number = 1.0,
        prior_mean: Number = 0.0,
        temperature: Number = 1.0,
        enable_backprop: bool = False,
        feature_reduction: str | None = None,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        backend: type | None = None,
        last_layer_name: str | None = None,
        backend_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        named = arguments(locals())
        self.last_layer_name = named.pop("last_layer_name", None)
        reduction = named.pop("feature_reduction", None)
        self.feature_reduction = None if reduction is None else str(reduction)
        super().__init__(**named)

    def _chosen_tangent(self, x: Any | None) -> AnyTangent | None:
        name = self.last_layer_name
        if x is None:
            return None if name is None else self._general(name)
        closed = self.recipe.row.closed is not None and self.recipe.source != "hessian"
        try:
            features = self._features(name)
            features.at(x)
        except ModelError as refused:  # no nn.Linear that the output is a linear function of: its Jacobian, by autograd
            return self._found(x, refused) if name is None else self._general(name)
        if closed:
            return features
        assert features.name is not None
        return self._general(features.name)

    def _features(self, name: str | None) -> FeatureTangent:
        reduction, graph = self.feature_reduction, self.enable_backprop
        return FeatureTangent(self.model, name, reduction, differentiable=graph, evaluate=True)

    def _general(self, name: str) -> Tangent:
        """The parameters of a module, which another module may own."""
        modules = dict(self.model.named_modules(remove_duplicate=False))
        if name not in modules:
            raise ModelError(f"{type(self.model).__name__} has no module '{name}'; expected one of {list(modules)}.")
        own = {id(parameter) for parameter in modules[name].parameters()}
        named = dict(self.model.named_parameters())
        return self._tangent_of([each for each in self._whole.names if id(named[each]) in own])

    def _tangent_of(self, names: list[str]) -> Tangent:
        space = self._whole.select(names)
        return Tangent(self.model, space, differentiable=self.enable_backprop, evaluate=True)

    def _found(self, x: Any, refused: ModelError) -> Tangent:
        """The weight that is multiplied last, in any layer (a convolution, say), if the output is linear in it."""
        if self.feature_reduction is not None:
            raise refused
        try:
            space = last_layer(self._whole, self.model, x)
            linear_map = Tangent(self.model, space, evaluate=True).at(x)
            linear = not differ(linear_map.mv(space.values(self.model)), linear_map.value)
        except ModelError:
            raise refused from None
        if not linear:
            raise refused
        return self._tangent_of(list(space.names))

    def _tangent_for(self, pairs: Iterable[Any]) -> tuple[Iterable[Any], AnyTangent]:
        first, pairs = peek(pairs)
        few = take(first[0], slice(0, 5)) if isinstance(first, (tuple, list)) and len(first) == 2 else first
        tangent = self._chosen_tangent(few)
        assert tangent is not None
        return pairs, tangent

    @outside_autocast
    @budgeted
    def functional_variance_fast(self, X: Any) -> tuple[Tensor, Tensor]:
        """Outputs and the variance of each of them, [B, *out] both, without the covariances between outputs."""
        posterior = self.posterior
        with self._working():
            return predictions.moments(posterior, self.linearise(X), diagonal=True)

    def _bind_stored(self, state_dict: Mapping[str, Any]) -> None:
        names = [name for name, _ in json.loads(state_dict["parameters"])]
        if "features" in state_dict:  # fitted by features, it predicts by them, also where the layer was named
            if not isinstance(self._tangent, FeatureTangent):
                self._bind(self._features(self.last_layer_name or names[0].rpartition(".")[0]))
        elif self._tangent is None:
            self._bind(self._tangent_of(names))


class FullLLLaplace(LLLaplace, FullLaplace):
    """All covariances between the last layer's weights."""


class DiagLLLaplace(LLLaplace, DiagLaplace):
    """Independent weights in the last layer."""


class KronLLLaplace(LLLaplace, KronLaplace):
    """One Kronecker product for the last layer; `damping` as for `KronLaplace`."""

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood,
        sigma_noise: Number = 1.0,
        prior_precision: Number = 1.0,
        prior_mean: Number = 0.0,
        temperature: Number = 1.0,
        enable_backprop: bool = False,
        feature_reduction: str | None = None,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        backend: type | None = None,
        last_layer_name: str | None = None,
        damping: bool | str = False,
        backend_kwargs: Mapping[str, Any] | None = None,
        *,
        bias: str | None = None,
        sharing: str | None = None,
        dense_limit: int | None = None,
        wide_limit: int | None = None,
        on_unsupported: str | None = None,
        estimator: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**arguments(locals()))
