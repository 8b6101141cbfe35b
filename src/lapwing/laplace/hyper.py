"""What a fitted posterior knows, and its hyper-parameters: prior precision, noise, temperature. No data, no network.

`Fitted` is the result of a pass over the data: the curvature at unit noise, the mode, and how well the mode fits.
Hyper-parameters can be changed at any time without another pass: the precision is curvature / (sigma^2 T) + prior.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from lapwing.errors import CurvatureError, NotFittedError, OptionError, ParameterError
from lapwing.evidence import Evidence, GaussianFit
from lapwing.linalg import Curvature, Diagonal, Precision
from lapwing.linalg.autocast import outside_autocast
from lapwing.params import ParamSpace
from lapwing.posterior import Gaussian
from lapwing.priors import Prior


@dataclass(frozen=True, eq=False)
class Fitted:
    """A pass over the data: sums, so that data sets add."""

    curvature: Curvature
    mean: Float[Tensor, " params"]
    fit: Float[Tensor, ""] | GaussianFit
    n_data: int
    output_shape: torch.Size

    def __add__(self, other: Fitted) -> Fitted:
        """The fit of both data sets, at the same weights and for the same outputs."""
        if not torch.equal(self.mean, other.mean):
            raise ParameterError(
                "the model's weights have changed since the first fit; expected the same, as curvatures add only at "
                "one point. Fit all data again with override=True."
            )
        if self.output_shape != other.output_shape:
            raise ParameterError(
                f"the outputs have shape {tuple(other.output_shape)} and had {tuple(self.output_shape)} in the first "
                "fit; expected the same."
            )
        if isinstance(self.fit, GaussianFit) and isinstance(other.fit, GaussianFit):
            fit = GaussianFit(self.fit.targets + other.fit.targets, self.fit.squares + other.fit.squares)
        else:
            assert isinstance(self.fit, Tensor)
            assert isinstance(other.fit, Tensor)
            fit = self.fit + other.fit
        curvature, count = self.curvature.pooled(other.curvature), self.n_data + other.n_data
        return Fitted(curvature, self.mean, fit, count, self.output_shape)


def precisions_of(space: ParamSpace) -> dict[str, int]:
    """How many precisions each structure of a prior has; a sub-network counts the tensors and modules it touches."""
    if space.index is None:
        tensors, modules = len(space.names), len(space.layers)
    else:
        tensors, modules = (len(space.groups(by).unique()) for by in ("tensor", "layer"))
    return {"scalar": 1, "layerwise": tensors, "module": modules, "diag": space.size}


def prior_of(space: ParamSpace, precision: Tensor, mean: float | int | Tensor) -> Prior:
    """The prior that a number of precisions means: one, one per tensor, one per module, or one per entry."""
    count, known = precision.numel(), precisions_of(space)
    if count == 1:
        return Prior.isotropic(space, precision.reshape(()), mean)
    for structure, by in (("layerwise", "tensor"), ("module", "layer")):
        if count == known[structure]:
            groups = space.groups(by)
            if space.index is not None:  # without gaps, where tensors are not touched
                groups = groups.unique(return_inverse=True)[1]
            return replace(Prior.grouped(space, groups, precision, mean), structure=structure)
    if count == known["diag"]:
        return Prior.diagonal(space, precision, mean)
    raise ParameterError(
        f"prior_precision has {count} entries; expected 1, {known['layerwise']} (one per parameter tensor), "
        f"{known['module']} (one per module) or {known['diag']} (one per entry)."
    )


class HyperParameters:
    """Prior, noise and temperature of a posterior, and all that follows from them without data."""

    has_noise: bool
    """Whether there is a noise level sigma that can change without another pass."""
    _per_entry_prior: bool = True
    noise_power: int = 2

    def __init__(
        self,
        sigma_noise: float | int | Tensor,
        prior_precision: float | int | Tensor,
        prior_mean: float | int | Tensor,
        temperature: float | int | Tensor,
    ) -> None:
        self._fitted: Fitted | None = None
        self._space: ParamSpace | None = None
        self._posterior: tuple[tuple, Gaussian] | None = None
        self.sigma_noise = sigma_noise
        self.prior_precision = prior_precision
        self.prior_mean = prior_mean
        self.temperature = temperature

    # -- the numbers -----------------------------------------------------------------------------------------------

    @property
    def prior_precision(self) -> Float[Tensor, " groups"]:
        """One precision, one per parameter tensor, one per module, or one per entry."""
        return self._prior_precision

    @prior_precision.setter
    def prior_precision(self, value: float | int | Tensor) -> None:
        value = self._number(value, "prior_precision")
        if value.dim() > 1:
            raise ParameterError(f"prior_precision has shape {tuple(value.shape)}; expected a number or a vector.")
        value = value.reshape(-1)
        checked = value.detach()
        if not len(value) or not bool(torch.isfinite(checked).all()) or bool((checked < 0).any()):
            raise ParameterError(
                f"prior_precision is {checked.tolist()[:5]}; expected finite numbers >= 0 (and not none of them)."
            )
        if self._space is not None:
            self._check_prior(value)
        self._prior_precision, self._posterior = value, None

    @property
    def prior_mean(self) -> Float[Tensor, "..."]:
        return self._prior_mean

    @prior_mean.setter
    def prior_mean(self, value: float | int | Tensor) -> None:
        value = self._number(value, "prior_mean")
        value = value.reshape(()) if value.numel() == 1 else value
        if self._space is not None:
            prior_of(self._space, self._prior_precision.detach(), value)
        self._prior_mean = value

    @property
    def sigma_noise(self) -> Float[Tensor, "..."]:
        """Standard deviation of the observation noise of a regression; 1 for every other likelihood."""
        return self._sigma_noise

    @sigma_noise.setter
    def sigma_noise(self, value: float | int | Tensor) -> None:
        value = self._number(value, "sigma_noise")
        if value.numel() != 1 or value.dim() > 1:
            raise ParameterError(
                f"sigma_noise has shape {tuple(value.shape)}; expected one number. For one noise level per output give "
                "likelihood=lapwing.likelihoods.Gaussian(sigma=...), which is then fixed."
            )
        value = value.reshape(())
        number = float(value.detach())
        if not (0 < number < float("inf")):
            raise ParameterError(f"sigma_noise is {number}; expected a finite number > 0.")
        if not self.has_noise and number != 1:
            raise OptionError(
                f"sigma_noise is {number} for a likelihood without a free noise level; expected 1. Only "
                "likelihood='regression' has one."
            )
        self._sigma_noise, self._posterior = value, None

    @property
    def temperature(self) -> Float[Tensor, ""]:
        """Divides log-likelihood and curvature: below 1 the posterior is colder, narrower than Bayes' rule."""
        return self._temperature

    @temperature.setter
    def temperature(self, value: float | int | Tensor) -> None:
        value = self._number(value, "temperature")
        if value.numel() != 1:
            raise ParameterError(f"temperature has shape {tuple(value.shape)}; expected one number.")
        value = value.reshape(())
        if not (0 < float(value.detach()) < float("inf")):
            raise ParameterError(f"temperature is {float(value.detach())}; expected a finite number > 0.")
        self._temperature, self._posterior = value, None

    def _number(self, value: object, name: str) -> Tensor:
        dtype, device = self._place
        try:
            return torch.as_tensor(value, dtype=dtype, device=device).clone()  # the caller's own may change
        except (TypeError, ValueError) as error:
            raise ParameterError(f"{name} is {value!r}; expected a number or a tensor.") from error

    @property
    def _place(self) -> tuple[torch.dtype, torch.device]:
        """Dtype and device of the hyper-parameters."""
        raise NotImplementedError

    def _check_prior(self, precision: Tensor) -> None:
        assert self._space is not None
        prior = prior_of(self._space, precision.detach(), 0.0)
        if prior.structure == "diagonal" and not self._per_entry_prior:
            raise CurvatureError(
                "one prior precision per entry was given to a Kronecker posterior, whose blocks carry one per weight "
                f"and one per bias; expected 1, {len(self._space.names)} (per tensor) or {len(self._space.layers)} "
                "(per module) numbers. Use hessian_structure 'full', 'diag' or 'blocks' for a diagonal prior."
            )

    # -- what follows from them -------------------------------------------------------------------------------------

    @property
    def fitted(self) -> Fitted:
        if self._fitted is None:
            raise NotFittedError("this posterior has seen no data; expected fit(train_loader) to be called first.")
        return self._fitted

    @property
    def space(self) -> ParamSpace:
        """The parameters that are treated as random."""
        if self._space is None:
            raise NotFittedError("the last layer is found when data are seen; call fit first, or give last_layer_name.")
        return self._space

    @property
    def prior(self) -> Prior:
        return prior_of(self.space, self._prior_precision, self._prior_mean)

    @property
    def evidence(self) -> Evidence:
        """The evidence as a function of prior, noise and temperature."""
        return Evidence(self.fitted.curvature, self.fitted.mean, self.fitted.fit, self.noise_power)

    @property
    def precision(self) -> Precision:
        """curvature / (sigma^2 T) + prior, differentiable in all three."""
        return self.evidence.precision(self.prior, self._sigma_noise, self._temperature)

    @property
    @outside_autocast
    def posterior(self) -> Gaussian:
        """The Gaussian over the weights; kept until a hyper-parameter changes."""
        # kept with what it was made of: another thread may change a hyper-parameter meanwhile
        made_of = (self._fitted, self._prior_precision, self._sigma_noise, self._temperature)
        kept = self._posterior
        if kept is not None and all(a is b for a, b in zip(kept[0], made_of, strict=True)):
            return kept[1]
        with torch.inference_mode(False), torch.no_grad():
            found = Gaussian(self.fitted.mean, self.precision)
        self._posterior = made_of, found
        return found

    @property
    def weights(self) -> Gaussian:
        """The posterior, or the prior before any data are seen: what is known of the weights so far."""
        if self._fitted is not None:
            return self.posterior
        space, prior = self.space, self.prior
        mean = torch.as_tensor(prior.mean, dtype=space.dtype, device=space.device).expand(space.size).clone()
        return Gaussian(mean, self.curvature.with_prior(prior.precision()))

    @property
    def curvature(self) -> Curvature:
        """The curvature of the data seen so far: before a fit, zero."""
        if self._fitted is not None:
            return self._fitted.curvature
        return Diagonal(torch.zeros(self.space.size, dtype=self.space.dtype, device=self.space.device))

    @property
    def n_data(self) -> int:
        """How many data points were seen: counted, not asked of the loader."""
        return 0 if self._fitted is None else self._fitted.n_data

    @property
    def n_outputs(self) -> int:
        return self.fitted.output_shape.numel()

    @property
    def n_params(self) -> int:
        return self.space.size

    @property
    def n_layers(self) -> int:
        """Number of parameter tensors: as many precisions as a layerwise prior has."""
        return precisions_of(self.space)["layerwise"]

    @property
    def prior_precision_diag(self) -> Float[Tensor, " params"]:
        return self.prior.precision().expand(self.space.size)

    @property
    def loss(self) -> Float[Tensor, ""]:
        """Negative log-likelihood of the mode up to noise and constants: half the squared residuals in regression."""
        fit = self.fitted.fit
        return fit.squares / 2 if isinstance(fit, GaussianFit) else -fit

    @property
    def log_likelihood(self) -> Float[Tensor, ""]:
        """Of the mode, every constant included, divided by the temperature."""
        fit = self.fitted.fit
        value = fit.log_likelihood(self._sigma_noise) if isinstance(fit, GaussianFit) else fit
        return value / self._temperature

    @property
    def scatter(self) -> Float[Tensor, ""]:
        return self.prior.scatter(self.fitted.mean)

    @property
    def log_det_prior_precision(self) -> Float[Tensor, ""]:
        return self.prior.logdet()

    @property
    @outside_autocast
    def log_det_posterior_precision(self) -> Float[Tensor, ""]:
        return self.precision.logdet()

    @property
    def log_det_ratio(self) -> Float[Tensor, ""]:
        return self.log_det_posterior_precision - self.log_det_prior_precision

    @outside_autocast
    def log_marginal_likelihood(
        self, prior_precision: float | int | Tensor | None = None, sigma_noise: float | int | Tensor | None = None
    ) -> Float[Tensor, ""]:
        """log Z of the Laplace approximation, differentiable in its arguments, which become the posterior's own.

        Inside `torch.func` they do not: nothing of it stays.
        """
        before = self._prior_precision, self._sigma_noise
        try:
            if sigma_noise is not None:
                if not self.has_noise:
                    raise OptionError("sigma_noise was given for a likelihood without a noise level; expected none.")
                self.sigma_noise = sigma_noise
            if prior_precision is not None:
                self.prior_precision = prior_precision
            value = self.evidence.log_marginal(self.prior, self._sigma_noise, self._temperature)
        except BaseException:
            self._prior_precision, self._sigma_noise = before
            self._posterior = None
            raise
        now = self._prior_precision.detach(), self._sigma_noise.detach()
        if any(map(is_functorch_wrapped_tensor, now)):  # inside torch.func, whose tensors mean nothing outside
            now, self._posterior = before, None
        self._prior_precision, self._sigma_noise = now
        return value

    @outside_autocast
    def effective_parameters(self) -> Float[Tensor, " groups"]:
        """gamma per group of the prior: how many of its parameters the data determine."""
        with torch.no_grad():
            return self.evidence.effective_parameters(self.prior, self._sigma_noise, self._temperature)
