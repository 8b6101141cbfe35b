"""Posteriors over all weights: a structure for the curvature, and the form in which it is handed out.

FullLaplace            [P, P]                        DiagLaplace        [P]
PropagatedDiagLaplace  [P], for many outputs         MixedDiagLaplace   the same, exact up to a bottleneck
KronLaplace            G (x) A per layer             EkfacLaplace       its eigenbasis, eigenvalues corrected
BlocksLaplace          exact per layer               LowRankLaplace     leading eigenvectors
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lapwing.errors import OptionError
from lapwing.laplace.base import BaseLaplace
from lapwing.laplace.hyper import Number
from lapwing.laplace.structures import STRUCTURES
from lapwing.likelihoods import Likelihood
from lapwing.linalg import Curvature, Diagonal


class ParametricLaplace(BaseLaplace):
    """A Gaussian over weights whose curvature has a structure of its own."""


def arguments(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a constructor from its `locals()`, by name; options that are None are left to their defaults."""
    named = {**given, **given.get("options", {})}
    options = {"bias", *(name for row in STRUCTURES.values() for name in row.options)}
    left_out = {"self", "__class__", "options", *(name for name in options if named.get(name) is None)}
    return {name: value for name, value in named.items() if name not in left_out}


class FullLaplace(ParametricLaplace):
    """Every covariance between weights: [P, P]."""

    structure: ClassVar[str] = "full"

    @property
    def H(self) -> Float[Tensor, "params params"]:
        return self.curvature.dense()

    @property
    def posterior_precision(self) -> Float[Tensor, "params params"]:
        scale = 1 / (self.sigma_noise**self.noise_power * self.temperature)
        total = self.H * scale + torch.diag_embed(self.prior_precision_diag)
        return total if self.hyper.earlier is None else total + self.hyper.earlier.dense()

    @property
    def posterior_scale(self) -> Float[Tensor, "params params"]:
        """Lower triangular L with L L^T the posterior covariance."""
        return torch.linalg.cholesky(self.posterior_covariance)


class DiagLaplace(ParametricLaplace):
    """Weights independent of each other: [P]."""

    structure: ClassVar[str] = "diag"

    @property
    def H(self) -> Float[Tensor, " params"]:
        return self.curvature.diagonal()

    @property
    def posterior_precision(self) -> Float[Tensor, " params"]:
        total = self.H / (self.sigma_noise**self.noise_power * self.temperature) + self.prior_precision_diag
        earlier = self.hyper.earlier
        if earlier is None:
            return total
        if not isinstance(earlier, Diagonal):
            raise OptionError(
                f"posterior_precision is a vector, and the prior's curvature a {type(earlier).__name__}, which is no "
                "diagonal; expected one. Use la.posterior.precision, which has both."
            )
        return total + earlier.values

    @property
    def posterior_scale(self) -> Float[Tensor, " params"]:
        """Standard deviation of every weight."""
        return self.posterior_variance.sqrt()


class PropagatedDiagLaplace(DiagLaplace):
    """`DiagLaplace` with variances carried back through squared Jacobians: images out cost no more than labels.

    Approximate: covariances between units of a layer are dropped. See `lapwing.estimate.propagated_diagonal`.
    """

    structure: ClassVar[str] = "propagated_diag"


class MixedDiagLaplace(DiagLaplace):
    """`PropagatedDiagLaplace` from the outputs to a bottleneck, exact columns from there: for autoencoders.

    Options: `columns` (32 unless given), up to which a bottleneck is narrow enough; `exact_bottleneck`, which makes
    everything before it exact. See `lapwing.estimate.mixed_diagonal`.
    """

    structure: ClassVar[str] = "mixed_diag"

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood,
        sigma_noise: Number = 1.0,
        prior_precision: Number = 1.0,
        prior_mean: Number = 0.0,
        temperature: Number = 1.0,
        enable_backprop: bool = False,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        backend: type | None = None,
        backend_kwargs: Mapping[str, Any] | None = None,
        *,
        columns: int | None = None,
        exact_bottleneck: bool | None = None,
        estimator: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**arguments(locals()))


class KronLaplace(ParametricLaplace):
    """One Kronecker product per layer. `damping=True` adds the prior to the factors (approximate) instead of exactly.

    The prior is divided between the factors by their traces; `damping="plain"` adds its square root to each.

    Options: `bias` "joint" (weight and bias in one block, default) or "separate"; `sharing` "expand" or "reduce";
    `dense_limit` (1024 unless given), up to which vectors get a dense block, and a diagonal beyond; `wide_limit`
    (8192), the most rows of a factor that is kept whole: of a wider one, as of a vocabulary, the diagonal is kept;
    `on_unsupported`, for parameters that form no Kronecker product: "exact" (default), blocks as for vectors, named in
    `exact_blocks`, or "error".
    """

    structure: ClassVar[str] = "kron"
    stored: ClassVar[tuple[str, ...]] = ("damping",)

    @property
    def H_facs(self) -> Curvature | None:
        """The Kronecker factors, the same object as `H`; None before a fit."""
        return None if self._fitted is None else self._fitted.curvature

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood,
        sigma_noise: Number = 1.0,
        prior_precision: Number = 1.0,
        prior_mean: Number = 0.0,
        temperature: Number = 1.0,
        enable_backprop: bool = False,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        backend: type | None = None,
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
        named = arguments(locals())
        self.damping = named.pop("damping")
        if damping:
            named["factored_damping"] = damping
        super().__init__(**named)


class EkfacLaplace(ParametricLaplace):
    """The eigenbasis of a Kronecker product per layer, with the exact diagonal of the curvature in it: two passes.

    Never further from the exact block than `KronLaplace`, and with its trace. Options as there, without `damping`.
    Data that are added later (`override=False`) are taken in the basis of the first fit, in one pass.
    """

    structure: ClassVar[str] = "ekfac"

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood,
        sigma_noise: Number = 1.0,
        prior_precision: Number = 1.0,
        prior_mean: Number = 0.0,
        temperature: Number = 1.0,
        enable_backprop: bool = False,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        backend: type | None = None,
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


class BlocksLaplace(ParametricLaplace):
    """The exact curvature within each layer, nothing between layers. Option: `by` "layer" or "tensor"."""

    structure: ClassVar[str] = "blocks"

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood,
        sigma_noise: Number = 1.0,
        prior_precision: Number = 1.0,
        prior_mean: Number = 0.0,
        temperature: Number = 1.0,
        enable_backprop: bool = False,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        backend: type | None = None,
        backend_kwargs: Mapping[str, Any] | None = None,
        *,
        by: str | None = None,
        estimator: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**arguments(locals()))


class LowRankLaplace(ParametricLaplace):
    """The `rank` (100 unless given) leading eigenvectors of the curvature; the prior everywhere else."""

    structure: ClassVar[str] = "lowrank"

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood,
        backend: type | None = None,
        sigma_noise: Number = 1.0,
        prior_precision: Number = 1.0,
        prior_mean: Number = 0.0,
        temperature: Number = 1.0,
        enable_backprop: bool = False,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        backend_kwargs: Mapping[str, Any] | None = None,
        *,
        rank: int = 100,
        estimator: str | None = None,
        **options: Any,
    ) -> None:
        named = arguments(locals())
        super().__init__(**named)
