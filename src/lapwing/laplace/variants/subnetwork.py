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
    BlocksLaplace,
    DiagLaplace,
    EkfacLaplace,
    FullLaplace,
    KronLaplace,
    LowRankLaplace,
    MixedDiagLaplace,
    ParametricLaplace,
    PropagatedDiagLaplace,
    arguments,
)
from lapwing.likelihoods import Likelihood
from lapwing.params import ParamSpace
from lapwing.tangent import Tangent


class SubnetLaplace(ParametricLaplace):
    """Random weights at `subnetwork_indices` of the flat vector; all others stay as trained.

    `mean` and `sample` speak of the whole flat vector, as users expect; curvature and precision of the sub-network.
    """

    subset: ClassVar[str] = "subnetwork"
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
        chosen = self._whole.select(mask=self.subnetwork_indices)
        assert chosen.index is not None
        self._positions = chosen.index
        self._check_chosen(chosen)
        return Tangent(self.model, chosen.tightened(), differentiable=self.enable_backprop, evaluate=True)

    def _check_chosen(self, chosen: ParamSpace) -> None:
        """Refuses a choice that the structure cannot follow."""
        cut = chosen.cut()
        if cut and not self.recipe.row.parts_of_tensors:
            raise ParameterError(
                f"the sub-network has some entries of '{cut[0]}' and not others, and the submatrix of a Kronecker "
                "product G (x) A at such entries is none; expected whole tensors, as subnetwork.by_parameters, "
                "by_modules and last_layers choose. For any entries use hessian_structure='full', 'blocks', 'lowrank' "
                "or 'diag'."
            )

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
        return value[..., self._positions] if value.shape[-1] == self._whole.size != self.space.size else value

    def _filled(self, chosen: Float[Tensor, "*batch chosen"]) -> Float[Tensor, "*batch all"]:
        whole = self._whole.values(self.model).expand(*chosen.shape[:-1], -1).clone()
        whole[..., self._positions] = chosen
        return whole


class FullSubnetLaplace(SubnetLaplace, FullLaplace):
    """All covariances within the sub-network."""


class KronSubnetLaplace(SubnetLaplace, KronLaplace):
    """One Kronecker product per layer, for a sub-network of whole tensors; options as for `KronLaplace`.

    Without the other weights a layer has the same factors: the curvature is the one over all weights, at these.
    """


class EkfacSubnetLaplace(SubnetLaplace, EkfacLaplace):
    """The eigenbasis of a Kronecker product per layer, for a sub-network of whole tensors; options as there."""


class BlocksSubnetLaplace(SubnetLaplace, BlocksLaplace):
    """Exact within each layer's part of the sub-network, nothing between layers."""


class LowRankSubnetLaplace(SubnetLaplace, LowRankLaplace):
    """The leading eigenvectors of the sub-network's curvature."""


class DiagSubnetLaplace(SubnetLaplace, DiagLaplace):
    """Independent weights in the sub-network."""


class PropagatedDiagSubnetLaplace(SubnetLaplace, PropagatedDiagLaplace):
    """Independent weights in the sub-network, with propagated variances."""


class MixedDiagSubnetLaplace(SubnetLaplace, MixedDiagLaplace):
    """Independent weights in the sub-network, exact up to a bottleneck."""
