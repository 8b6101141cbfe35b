"""Posteriors over the last layer: features in closed form, the rest of the network as trained."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from lapwing.errors import ModelError
from lapwing.laplace import predictions
from lapwing.laplace.classes import DiagLaplace, FullLaplace, KronLaplace, ParametricLaplace
from lapwing.laplace.data import peek
from lapwing.laplace.structures import CLOSED_FORM, AnyTangent
from lapwing.likelihoods import Likelihood
from lapwing.tangent import Tangent
from lapwing.tangent.features import FeatureTangent
from lapwing.tangent.inputs import take


class LLLaplace(ParametricLaplace):
    """Random weights in the last layer only: features in closed form, the rest of the network as trained.

    The layer is found when data are seen, or named by `last_layer_name`. `feature_reduction` says how the model comes
    from features [B, T, D] to outputs [B, C]: "pick_first", "pick_last" or "average" over the positions.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood,
        sigma_noise: float | int | Tensor = 1.0,
        prior_precision: float | int | Tensor = 1.0,
        prior_mean: float | int | Tensor = 0.0,
        temperature: float | int | Tensor = 1.0,
        enable_backprop: bool = False,
        feature_reduction: str | None = None,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        backend: type | None = None,
        last_layer_name: str | None = None,
        backend_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.last_layer_name = last_layer_name
        self.feature_reduction = None if feature_reduction is None else str(feature_reduction)
        super().__init__(
            model=model,
            likelihood=likelihood,
            sigma_noise=sigma_noise,
            prior_precision=prior_precision,
            prior_mean=prior_mean,
            temperature=temperature,
            enable_backprop=enable_backprop,
            dict_key_x=dict_key_x,
            dict_key_y=dict_key_y,
            backend=backend,
            backend_kwargs=backend_kwargs,
            **options,
        )

    def _chosen_tangent(self, x: Any | None) -> AnyTangent | None:
        name = self.last_layer_name
        if x is None:
            return None if name is None else self._general(name)
        closed = self.recipe.structure in CLOSED_FORM and self.recipe.source != "hessian"
        features = self._features(name)
        try:
            features.at(x)
        except ModelError:
            if name is None:
                raise
            closed = False  # a named layer that the output is no linear function of: its Jacobian, by autograd
        if closed:
            return features
        found = name or features.name
        assert found is not None
        return self._general(found)

    def _features(self, name: str | None) -> FeatureTangent:
        reduction, graph = self.feature_reduction, self.enable_backprop
        return FeatureTangent(self.model, name, reduction, differentiable=graph, evaluate=True)

    def _general(self, name: str) -> Tangent:
        space = self._whole.select(module=name)
        return Tangent(self.model, space, differentiable=self.enable_backprop, evaluate=True)

    def _tangent_for(self, pairs: Iterable[Any]) -> tuple[Iterable[Any], AnyTangent]:
        first, pairs = peek(pairs)
        few = take(first[0], slice(0, 5)) if isinstance(first, (tuple, list)) and len(first) == 2 else first
        tangent = self._chosen_tangent(few)
        assert tangent is not None
        return pairs, tangent

    def functional_variance_fast(self, X: Any) -> tuple[Tensor, Tensor]:
        """Outputs and the variance of each of them, [B, *out] both, without the covariances between outputs."""
        posterior = self.posterior
        with self._working():
            return predictions.moments(posterior, self.linearise(X), diagonal=True)

    def _bind_stored(self, state_dict: Mapping[str, Any]) -> None:
        if self._tangent is not None:
            return
        names = [name for name, _ in json.loads(state_dict["parameters"])]
        layer = names[0].rpartition(".")[0]
        if "features" not in state_dict:
            self._bind(self._general(layer))
            return
        self._bind(self._features(layer))


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
        sigma_noise: float | int | Tensor = 1.0,
        prior_precision: float | int | Tensor = 1.0,
        prior_mean: float | int | Tensor = 0.0,
        temperature: float | int | Tensor = 1.0,
        enable_backprop: bool = False,
        feature_reduction: str | None = None,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        backend: type | None = None,
        last_layer_name: str | None = None,
        damping: bool | str = False,
        backend_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            model=model,
            likelihood=likelihood,
            sigma_noise=sigma_noise,
            prior_precision=prior_precision,
            prior_mean=prior_mean,
            temperature=temperature,
            enable_backprop=enable_backprop,
            feature_reduction=feature_reduction,
            dict_key_x=dict_key_x,
            dict_key_y=dict_key_y,
            backend=backend,
            last_layer_name=last_layer_name,
            backend_kwargs=backend_kwargs,
            damping=damping,
            **options,
        )
