"""The posterior in function space: the same Gaussian, computed from the Gram matrix of the data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lapwing import estimate
from lapwing.errors import OptionError, ParameterError
from lapwing.laplace.base import BaseLaplace
from lapwing.laplace.hyper import Number
from lapwing.laplace.tasks import likelihood_of
from lapwing.laplace.variants.all_weights import arguments
from lapwing.laplace.variants.last_layer import LLLaplace
from lapwing.likelihoods import Likelihood, Preference


class FunctionalLaplace(BaseLaplace):
    """The same posterior from the Gram matrix of the data (a Gaussian process): exact, for any number of weights.

    Work grows with (data x outputs)^3, so `n_subset` may choose that many data points at random (`seed`); posterior
    and evidence are then those of the subset. None takes all data.

    `independent_outputs=True` leaves out the covariances between outputs: a Gaussian process for each, with the Gram
    matrix [data, data] of that output alone. Work then grows with outputs x data^3. Of the likelihood's Hessian, which
    couples the classes of a softmax, the diagonal is taken. Predicted covariances are diagonal, functions of different
    outputs are drawn independently, and the evidence has the sum over outputs of log det(I + K). Every output then has
    a posterior of its own over the weights: there is no one Gaussian, and `sample`, `posterior_variance`, `log_prob`
    and pred_type="nn" are refused. With one output nothing changes.
    """

    structure: ClassVar[str] = "gp"
    stored: ClassVar[tuple[str, ...]] = ("n_subset", "seed")
    pred_types: ClassVar[tuple[str, ...]] = ("gp", "glm", "nn")

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood,
        n_subset: int | None = None,
        sigma_noise: Number = 1.0,
        prior_precision: Number = 1.0,
        prior_mean: Number = 0.0,
        temperature: Number = 1.0,
        enable_backprop: bool = False,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        backend: type | None = None,
        backend_kwargs: Mapping[str, Any] | None = None,
        independent_outputs: bool = False,
        seed: int = 0,
        *,
        limit: int | None = None,
        estimator: str | None = None,
        **options: Any,
    ) -> None:
        named = arguments(locals())
        if independent_outputs and isinstance(likelihood_of(likelihood)[0], Preference):
            raise OptionError(
                "independent_outputs=True was given for preferences, whose two outputs are rewards of one function; "
                "expected False. Leave it out."
            )
        if n_subset is not None and n_subset < 1:
            raise ParameterError(f"n_subset is {n_subset}; expected a number of data points >= 1, or None for all.")
        self.n_subset, self.seed = named.pop("n_subset"), named.pop("seed")
        self.independent_outputs = independent_outputs
        if not independent_outputs:
            del named["independent_outputs"]
        super().__init__(**named)

    @property
    def _one_process(self) -> str:
        return "" if self.n_subset is None else "n_subset draws from all data"

    def _data(self, pairs: Iterable[Any]) -> Iterable[Any]:
        if self.n_subset is None:
            return pairs
        return estimate.subset(pairs, self.n_subset, torch.Generator().manual_seed(self.seed))

    def __call__(
        self,
        x: Any,
        pred_type: str = "gp",
        joint: bool = False,
        link_approx: str = "probit",
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        fitting: bool = False,
        **model_kwargs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """As for posteriors over weights; "gp" and "glm" mean the same here."""
        arguments = joint, link_approx, n_samples, diagonal_output, generator, fitting
        return super().__call__(x, pred_type, *arguments, **model_kwargs)

    def _pred_type(self, pred_type: str) -> str:
        chosen = super()._pred_type(pred_type)
        return "glm" if chosen == "gp" else chosen


class FunctionalLLLaplace(FunctionalLaplace, LLLaplace):
    """The Gaussian process of the last layer; `last_layer_name` and `feature_reduction` as there."""

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood,
        n_subset: int | None = None,
        sigma_noise: Number = 1.0,
        prior_precision: Number = 1.0,
        prior_mean: Number = 0.0,
        temperature: Number = 1.0,
        enable_backprop: bool = False,
        feature_reduction: str | None = None,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        last_layer_name: str | None = None,
        backend: type | None = None,
        backend_kwargs: Mapping[str, Any] | None = None,
        independent_outputs: bool = False,
        seed: int = 0,
        *,
        limit: int | None = None,
        estimator: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**arguments(locals()))
