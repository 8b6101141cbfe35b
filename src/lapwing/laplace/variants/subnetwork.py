"""Posteriors over a sub-network: chosen entries of the flat parameter vector, all others as trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from lapwing.errors import ParameterError
from lapwing.laplace.hyper import Number
from lapwing.laplace.structures import AnyTangent
from lapwing.laplace.variants.all_weights import (
    DiagLaplace,
    FullLaplace,
    MixedDiagLaplace,
    ParametricLaplace,
    PropagatedDiagLaplace,
    arguments,
)
from lapwing.likelihoods import Likelihood
from lapwing.tangent import Tangent


class SubnetLaplace(ParametricLaplace):
    """Random weights at `subnetwork_indices` of the flat vector; all others stay as trained.

    `mean` and `sample` speak of the whole flat vector, as users expect; curvature and precision of the sub-network.
    """

    stored: ClassVar[tuple[str, ...]] = ("subnetwork_indices",)

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood,
        subnetwork_indices: Int[Tensor, " chosen"],
        sigma_noise: Number = 1.0,
        prior_precision: Number = 1.0,
        prior_mean: Number = 0.0,
        temperature: Number = 1.0,
        backend: type | None = None,
        backend_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        named = arguments(locals())
        if not isinstance(subnetwork_indices, Tensor):
            raise ParameterError(
                f"subnetwork_indices is a {type(subnetwork_indices).__name__}; expected a tensor of positions in the "
                "flat parameter vector, as a mask's select() returns."
            )
        self.subnetwork_indices = named.pop("subnetwork_indices")
        super().__init__(**named)

    def _chosen_tangent(self, x: Any | None) -> AnyTangent:
        space = self._whole.select(mask=self.subnetwork_indices)
        return Tangent(self.model, space, differentiable=self.enable_backprop, evaluate=True)

    @property
    def n_params(self) -> int:
        return self._whole.size

    @property
    def n_layers(self) -> int:
        """Number of parameter tensors of the network; a layerwise prior has one precision for each that is touched."""
        return len(self._whole.names)

    @property
    def n_params_subnet(self) -> int:
        return self.space.size

    @property
    def mean(self) -> Float[Tensor, " all"]:
        return self._filled(self.weights.mean)

    @property
    def mean_subnet(self) -> Float[Tensor, " chosen"]:
        return self.weights.mean

    def sample(self, n_samples: int = 100, generator: torch.Generator | None = None) -> Float[Tensor, "n all"]:
        return self._filled(super().sample(n_samples, generator))

    def log_prob(self, value: Float[Tensor, "*batch entries"], normalized: bool = True) -> Float[Tensor, "*batch"]:
        """Of whole flat vectors, as `sample` gives them, or of the sub-network's entries."""
        return super().log_prob(self._chosen(value), normalized)

    def square_norm(self, value: Float[Tensor, "*batch entries"]) -> Float[Tensor, "*batch"]:
        return super().square_norm(self._chosen(value))

    def _chosen(self, value: Float[Tensor, "*batch entries"]) -> Float[Tensor, "*batch chosen"]:
        return self.space.restrict(value) if value.shape[-1] == self._whole.size != self.space.size else value

    def _filled(self, chosen: Float[Tensor, "*batch chosen"]) -> Float[Tensor, "*batch all"]:
        whole = self._whole.values(self.model).expand(*chosen.shape[:-1], -1).clone()
        assert self.space.index is not None
        whole[..., self.space.index] = chosen
        return whole


class FullSubnetLaplace(SubnetLaplace, FullLaplace):
    """All covariances within the sub-network."""


class DiagSubnetLaplace(SubnetLaplace, DiagLaplace):
    """Independent weights in the sub-network."""


class PropagatedDiagSubnetLaplace(SubnetLaplace, PropagatedDiagLaplace):
    """Independent weights in the sub-network, with propagated variances."""


class MixedDiagSubnetLaplace(SubnetLaplace, MixedDiagLaplace):
    """Independent weights in the sub-network, exact up to a bottleneck."""
