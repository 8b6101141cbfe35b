"""BaseLaplace: the object most users touch. It binds network, likelihood, prior, estimator, posterior and predictions.

All mathematics is below it. The model is used in eval mode and never touched: passes run on private copies of its
modules, so that any number of threads may predict, and use the model, at once. It is made of parts:

    setup      what it is made with: model, likelihood, recipe of the estimator (`setup`, `structures`)
    hyper      prior, noise and temperature, replaced as a whole when one of them is set (`hyper`)
    fitted     sums over the data (`fitted`); before a fit there are none, and the posterior is the prior
    tangent    the network as a function of its random parameters (`lapwing.tangent`)

Closed forms are in `predictions`, searches for hyper-parameters in `tuning`, files in `persistence` and `checkpoint`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from lapwing.distributions import Distribution
from lapwing.errors import NotFittedError, OptionError, ParameterError
from lapwing.estimate.data_pass import Divided, no_batch
from lapwing.estimate.ranks import ONE, Ranks
from lapwing.evidence import Evidence, EvidenceAtMode, GaussianFit, LinearMode, Tuned
from lapwing.evidence.seen import Seen
from lapwing.laplace import linear_modes, persistence, predictions, state, tuning
from lapwing.laplace.budgets import AnyBudget, budget_of, budgeted, check_kept
from lapwing.laplace.checkpoint import EVERY, Checkpointed, check_rows, remove
from lapwing.laplace.data import FirstInputs, Pairs, Tracked
from lapwing.laplace.fitted import Fitted
from lapwing.laplace.hyper import (
    Groups,
    HyperParameters,
    Number,
    check_prior,
    checked_groups,
    checked_mean,
    checked_noise,
    checked_precision,
    checked_temperature,
    invariant_groups,
    precisions_of,
    prior_of,
    with_previous,
)
from lapwing.laplace.identity import Kept
from lapwing.laplace.names import PriorStructure, choose
from lapwing.laplace.planning import Plan, plan_of, points_of
from lapwing.laplace.process_group import ProcessGroup
from lapwing.laplace.ranks_checkpoint import RanksCheckpointed
from lapwing.laplace.same import check_same, own_generator
from lapwing.laplace.setup import Setup
from lapwing.laplace.shards import group_of, seen_by_all, shard_of
from lapwing.laplace.structures import RANDOM, AnyTangent, Recipe, exceptions, recipe
from lapwing.laplace.tasks import likelihood_of, noise_of
from lapwing.laplace.wrapped import unwrapped
from lapwing.likelihoods import Likelihood
from lapwing.linalg import Curvature, DenseRows, Diagonal, LinearMap, Precision, total
from lapwing.linalg.autocast import outside_autocast
from lapwing.linalg.budget import MemoryBudget, current_budget, within
from lapwing.linalg.checks import normal
from lapwing.linalg.contracts import scaled
from lapwing.params import ParamSpace
from lapwing.posterior import Gaussian
from lapwing.predictive import draws, network_draws
from lapwing.priors import AnyPrior, PriorGroups
from lapwing.priors import Gaussian as PreviousPosterior
from lapwing.serialize import compact
from lapwing.serialize.files import AnyPath
from lapwing.tangent import Tangent
from lapwing.tangent.divided import DividedMap, footprint
from lapwing.tangent.features import FeatureTangent
from lapwing.tangent.inputs import batch_size, moved, shape_key, take, tensors


class BaseLaplace:
    """A Laplace posterior over the weights of `model`.

    `likelihood` is "regression", "classification", "binary", "poisson", "heteroscedastic", "reward_modeling" (fitted to
    choices in pairs, see `likelihoods.Preference`), or an object of `lapwing.likelihoods`. `estimator` says where
    curvature comes from: "exact" (the generalised Gauss-Newton, default), "fisher", "mc" (sampled Fisher), "projection"
    (randomly projected GGN), "recursive" (kron alone: propagated in expectation over the data of a fit, for many
    outputs), "empirical" or "hessian"; `backend` does the same with names of `lapwing.curvature`. `prior_groups`
    names the parameters that share a prior precision. `prior` is a previous posterior over the same parameters, as
    `la.as_prior()` gives it, in the place of precision and mean. `memory_budget`, in bytes or as "2 GB", bounds what
    fits and predictions take beyond the model, a batch of data and the curvature that is kept (docs/structures.md).
    Other keyword arguments are options of the structure.
    """

    structure: ClassVar[str]
    subset: ClassVar[str] = "all"
    """Which weights are random: "all", "last_layer" or "subnetwork"."""
    reason: str = ""
    """Why the structure was chosen, where `hessian_structure="auto"` chose it."""
    tuned: Tuned | None = None
    """What the last search by the evidence found, and at the linear mode the mode; not kept in files."""
    choices: tuple[str, ...] = ()
    """What `lapwing.attach` decided, a sentence each."""
    pred_types: ClassVar[tuple[str, ...]] = ("glm", "nn")
    stored: ClassVar[tuple[str, ...]] = ("enable_backprop", "dict_key_x", "dict_key_y", "memory_budget")
    """Attributes that are arguments of the constructor and that files keep; a class adds its own."""

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
        estimator: str | None = None,
        prior_groups: Groups | None = None,
        prior: object = None,
        memory_budget: AnyBudget | None = None,
        **options: Any,
    ) -> None:
        self.enable_backprop = enable_backprop
        self.memory_budget = memory_budget
        self.dict_key_x, self.dict_key_y = dict_key_x, dict_key_y
        model = unwrapped(model)
        distribution, own_sigma = likelihood_of(likelihood)
        has_noise = own_sigma is not None
        made = recipe(self.structure, estimator, backend, backend_kwargs, options)
        kinds = type(self).__mro__
        kept = {name: getattr(self, name) for kind in kinds for name in kind.__dict__.get("stored", ())}
        self.setup = Setup(type(self), model, likelihood, distribution, has_noise, made, kept)
        self._whole = ParamSpace.of(model)
        self._budget = budget_of(memory_budget, self._whole.device)
        self._footprints: dict[tuple, int | None] = {}
        self._space: ParamSpace | None = None
        self._tangent: AnyTangent | None = None
        self._fitted: Fitted | None = None
        self._posterior: tuple[tuple, Gaussian] | None = None
        self._kept: Kept | None = None
        self._few: Any = None
        self._batch_points = 0
        sigma_noise = checked_noise(noise_of(sigma_noise, own_sigma), self._place, has_noise)
        self.hyper = HyperParameters(
            checked_precision(prior_precision, self._place),
            checked_mean(prior_mean, self._place),
            sigma_noise,
            checked_temperature(temperature, self._place),
            checked_groups(prior_groups, self._whole),
        )
        if prior is not None:
            self.hyper = with_previous(self.hyper, prior, self._whole)
        self._bind(self._chosen_tangent(None))

    @property
    def model(self) -> nn.Module:
        return self.setup.model

    @property
    def likelihood(self) -> str | Likelihood:
        """As it was given: the name of a task, or an object."""
        return self.setup.likelihood

    @property
    def distribution(self) -> Likelihood:
        """The likelihood as an object, at unit noise where the noise level is free."""
        return self.setup.distribution

    @property
    def has_noise(self) -> bool:
        """Whether there is a noise level sigma that can change without another pass."""
        return self.setup.has_noise

    @property
    def recipe(self) -> Recipe:
        """How the curvature is estimated."""
        return self.setup.recipe

    @property
    def noise_power(self) -> int:
        """The power of sigma that divides the curvature: gradients of the empirical Fisher carry 1 / sigma^2 each."""
        return 4 if self.recipe.source == "empirical" else 2

    @property
    def _place(self) -> tuple[torch.dtype, torch.device]:
        return self._whole.dtype, self._whole.device

    @property
    def _device(self) -> torch.device:
        """Where the weights are, and the posterior with them: for code that moves a state there."""
        return self._whole.device

    @property
    def _dtype(self) -> torch.dtype:
        return self._whole.dtype

    def __repr__(self) -> str:
        """What it is, in one line."""

        def span(values: Tensor) -> str:
            low, high = float(values.detach().min()), float(values.detach().max())
            return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"

        size = "" if self._space is None else f" over {self._space.size:,} parameters"
        groups = f" in {len(self.prior_precision)} groups ({self.hyper.structure})" if self.hyper.structure else ""
        fitted = "not fitted" if self._fitted is None else f"fitted to {self.n_data:,} points"
        noise = f", sigma_noise {span(self.sigma_noise)}" if self.has_noise else ""
        return (
            f"{type(self).__name__}: {self.structure} posterior{size} of {type(self.model).__name__}, "
            f"{type(self.distribution).__name__} likelihood, {fitted}; prior_precision {span(self.prior_precision)}"
            f"{groups}{noise}, temperature {span(self.temperature)}"
        )

    # -- which parameters --------------------------------------------------------------------------------------------

    def _chosen_tangent(self, x: Any | None) -> AnyTangent | None:
        """The network as a function of the random parameters; None where that needs data (x) to be known."""
        return Tangent(self.model, self._whole, differentiable=self.enable_backprop, evaluate=True)

    def _bind(self, tangent: AnyTangent | None) -> None:
        if tangent is None:
            return
        with self._all_or_nothing():
            self._tangent, self._space = _with_budget(tangent, self._budget), tangent.space
            self._check_prior(tangent.space, self.prior_precision, self.prior_mean, self.prior_groups)

    def _check_prior(self, space: ParamSpace, precision: Tensor, mean: Number, groups: PriorGroups | None) -> None:
        earlier = self.hyper.earlier
        if earlier is not None and earlier.size != space.size:
            raise ParameterError(
                f"the prior is a previous posterior over {earlier.size} parameters, and this one is over {space.size}; "
                "expected the same parameters. Choose the same subset_of_weights of the same network."
            )
        check_prior(space, precision, mean, self.recipe.row.per_entry_prior, groups)

    @property
    def space(self) -> ParamSpace:
        """The parameters that are treated as random."""
        if self._space is None:
            raise NotFittedError("the last layer is found when data are seen; call fit first, or give last_layer_name.")
        return self._space

    @property
    def n_params(self) -> int:
        return self.space.size

    @property
    def n_layers(self) -> int:
        """Number of parameter tensors: as many precisions as a layerwise prior has."""
        return precisions_of(self.space)["layerwise"]

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Whatever fails inside leaves the posterior as it was."""
        before = dict(vars(self))
        try:
            yield
        except BaseException:
            vars(self).update(before)
            raise

    # -- memory --------------------------------------------------------------------------------------------------------

    def _within(self, memory_budget: AnyBudget | None = None) -> AbstractContextManager:
        """Work within a budget: the one given, else that of whoever calls, else this posterior's own."""
        if memory_budget is not None:
            return within(budget_of(memory_budget, self._device))
        return within(self._budget) if current_budget() == MemoryBudget() else nullcontext()

    def _most_points(self, tangent: AnyTangent, x: Any) -> int | None:
        """How many data points are linearised at a time: half of the budget is for their graph; None for any number."""
        total = current_budget().total
        if total is None:
            return None
        key = shape_key(take(x, slice(0, 1)))
        if key not in self._footprints:
            self._footprints[key] = footprint(tangent, x)
        each = self._footprints[key]
        return None if each is None else max(1, total // 2 // each)

    # -- hyper-parameters --------------------------------------------------------------------------------------------

    @property
    def prior_precision(self) -> Float[Tensor, " groups"]:
        """One precision, one per parameter tensor, per module, or per entry; with `prior_groups` one per group."""
        return self.hyper.prior_precision

    @prior_precision.setter
    def prior_precision(self, value: Number) -> None:
        self.hyper.refuse_earlier("another prior_precision")
        precision = checked_precision(value, self._place)
        if self._space is not None:
            self._check_prior(self._space, precision, 0.0, self.prior_groups)
        self._set(prior_precision=precision)

    @property
    def prior_groups(self) -> PriorGroups | None:
        """Which parameters, by name, share a precision; None where the number of precisions says so.

        Set it to what `lapwing.scale_invariant_groups` returns, or to lists of names, while there is one precision.
        """
        return self.hyper.prior_groups

    @prior_groups.setter
    def prior_groups(self, value: Groups | None) -> None:
        self.hyper.refuse_earlier("other prior_groups")
        groups = checked_groups(value, self._whole)
        if self._space is not None:
            self._check_prior(self._space, self.prior_precision, 0.0, groups)
        self.hyper = replace(self.hyper, prior_groups=groups, prior_precision=self.prior_precision.clone())

    @property
    def prior_mean(self) -> Float[Tensor, "..."]:
        return self.hyper.prior_mean

    @prior_mean.setter
    def prior_mean(self, value: Number) -> None:
        self.hyper.refuse_earlier("another prior_mean")
        mean = checked_mean(value, self._place)
        if self._space is not None:
            prior_of(self._space, self.prior_precision.detach(), mean, self.prior_groups)
        self._set(prior_mean=mean)

    @property
    def sigma_noise(self) -> Float[Tensor, "..."]:
        """Standard deviation of the observation noise of a regression; 1 for every other likelihood."""
        return self.hyper.sigma_noise

    @sigma_noise.setter
    def sigma_noise(self, value: Number) -> None:
        self._set(sigma_noise=checked_noise(value, self._place, self.has_noise))

    @property
    def temperature(self) -> Float[Tensor, ""]:
        """Divides log-likelihood and curvature: below 1 the posterior is colder, narrower than Bayes' rule."""
        return self.hyper.temperature

    @temperature.setter
    def temperature(self, value: Number) -> None:
        self._set(temperature=checked_temperature(value, self._place))

    def _set(self, **values: Any) -> None:
        self.hyper = replace(self.hyper, **values)

    @property
    def prior(self) -> AnyPrior:
        """Independent Gaussians, or a previous posterior."""
        return self.hyper.prior(self.space)

    @property
    def prior_precision_diag(self) -> Float[Tensor, " params"]:
        """The prior's precision of every weight; of a previous posterior that which it began with."""
        return self.hyper.base(self.space).precision().expand(self.space.size)

    @outside_autocast
    def as_prior(self) -> PreviousPosterior:
        """This posterior as a prior for other data over the same weights: `Laplace(..., prior=la.as_prior())`.

        Noise and temperature are in its curvature as they are now.
        """
        hyper, fitted = self.hyper, self.fitted
        scale = 1 / (hyper.sigma_noise.detach() ** self.noise_power * hyper.temperature.detach())
        curvature = scaled(fitted.curvature, 1 if float(scale) == 1 else scale)
        curvature = curvature if hyper.earlier is None else total(curvature, hyper.earlier)
        base = hyper.base(self.space)
        return PreviousPosterior(fitted.mean, curvature, base.with_precisions(base.precisions.detach()))

    # -- the Gaussian over the weights -------------------------------------------------------------------------------

    @property
    def fitted(self) -> Fitted:
        if self._fitted is None:
            raise NotFittedError("this posterior has seen no data; expected fit(train_loader) to be called first.")
        return self._fitted

    @property
    def precision(self) -> Precision:
        """curvature / (sigma^2 T) + prior, differentiable in all three."""
        return self.evidence.precision(self.prior, self.sigma_noise, self.temperature)

    @property
    @outside_autocast
    def posterior(self) -> Gaussian:
        """The Gaussian over the weights; kept until a hyper-parameter changes."""
        # kept with what it was made of: another thread may change a hyper-parameter meanwhile
        hyper = self.hyper
        fitted = self._fitted
        precision, sigma, temperature = hyper.prior_precision, hyper.sigma_noise, hyper.temperature
        kept = self._posterior
        if kept is not None:
            (was, *numbers), posterior = kept
            if was is fitted and numbers[0] is precision and numbers[1] is sigma and numbers[2] is temperature:
                return posterior
        with torch.inference_mode(False), torch.no_grad(), self._within():
            posterior = Gaussian(self.fitted.mean, self.precision)
        self._posterior = (fitted, precision, sigma, temperature), posterior
        return posterior

    @property
    def weights(self) -> Gaussian:
        """The posterior, or the prior before any data are seen: what is known of the weights so far."""
        if self._fitted is not None:
            return self.posterior
        space, prior = self.space, self.prior
        mean = torch.as_tensor(prior.mean, dtype=space.dtype, device=space.device).expand(space.size).clone()
        return Gaussian(mean, prior.added_to(self.curvature))

    @property
    def curvature(self) -> Curvature:
        """The curvature of the data seen so far: before a fit, zero."""
        if self._fitted is not None:
            return self._fitted.curvature
        return Diagonal(torch.zeros(self.space.size, dtype=self.space.dtype, device=self.space.device))

    @property
    def mean(self) -> Float[Tensor, " params"]:
        """The mode: the trained weights, flat; before a fit the mean of the prior."""
        return self.weights.mean

    @property
    def H(self) -> Tensor | Curvature:
        """The curvature at unit noise and temperature, summed over data: an object with `.dense()`."""
        return self.curvature

    @property
    def posterior_precision(self) -> Tensor | Precision:
        """The precision as an object: mv, solve, draw, logdet, variance, covariance."""
        return self.weights.precision

    @property
    @outside_autocast
    def posterior_variance(self) -> Float[Tensor, " params"]:
        """Marginal variance of every weight."""
        return self.weights.variance()

    @property
    @outside_autocast
    def posterior_covariance(self) -> Float[Tensor, "params params"]:
        """Spelled out, O(P^2): for small posteriors."""
        return self.weights.precision.to_matrix(-1)

    @outside_autocast
    def sample(self, n_samples: int = 100, generator: torch.Generator | None = None) -> Float[Tensor, "n params"]:
        """Weight vectors from the posterior."""
        return self.weights.sample(whole(n_samples), generator)

    @outside_autocast
    def log_prob(self, value: Float[Tensor, "*batch params"], normalized: bool = True) -> Float[Tensor, "*batch"]:
        """Log density of the posterior at flat weights; without its constant where `normalized` is False."""
        self.space.check(value)
        return self.weights.log_prob(value) if normalized else -self.square_norm(value) / 2

    @outside_autocast
    def square_norm(self, value: Float[Tensor, "*batch params"]) -> Float[Tensor, "*batch"]:
        """(value - mean)^T precision (value - mean)."""
        self.space.check(value)
        weights = self.weights
        away = value - weights.mean
        return (away * weights.precision.mv(away)).sum(-1)

    @outside_autocast
    @budgeted
    def functional_variance(self, Js: Float[Tensor, "batch outputs params"]) -> Float[Tensor, "batch outputs outputs"]:
        """J Sigma J^T of every data point, for Jacobians that the user has."""
        self.space.check(Js)
        return self.posterior.precision.quadratic([DenseRows(0, Js.transpose(0, 1))])

    @outside_autocast
    @budgeted
    def functional_covariance(self, Js: Float[Tensor, "batch outputs params"]) -> Float[Tensor, "all all"]:
        """J Sigma J^T over all data points and outputs, [B C, B C]."""
        self.space.check(Js)
        size = Js.shape[0] * Js.shape[1]
        return self.posterior.precision.joint(Js).reshape(size, size)

    # -- evidence ----------------------------------------------------------------------------------------------------

    @property
    def evidence(self) -> Evidence:
        """The evidence as a function of prior, noise and temperature."""
        return Evidence(self.fitted.curvature, self.fitted.mean, self.fitted.fit, self.noise_power)

    @property
    def n_data(self) -> int:
        """How many data points were seen: counted, not asked of the loader."""
        return 0 if self._fitted is None else self._fitted.n_data

    @property
    def n_outputs(self) -> int:
        return self.fitted.output_shape.numel()

    @property
    def loss(self) -> Float[Tensor, ""]:
        """Negative log-likelihood of the mode up to noise and constants: half the squared residuals in regression."""
        fit = self.fitted.fit
        return fit.squares / 2 if isinstance(fit, GaussianFit) else -fit

    @property
    def log_likelihood(self) -> Float[Tensor, ""]:
        """Of the mode, every constant included, divided by the temperature."""
        fit = self.fitted.fit
        value = fit.log_likelihood(self.sigma_noise) if isinstance(fit, GaussianFit) else fit
        return value / self.temperature

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
    @budgeted
    def log_marginal_likelihood(
        self,
        prior_precision: Number | None = None,
        sigma_noise: Number | None = None,
        *,
        at: LinearMode | None = None,
    ) -> Float[Tensor, ""]:
        """log Z of the Laplace approximation, differentiable in its arguments, which become the posterior's own.

        Inside `torch.func` they do not: nothing of it stays. With `at`, log Z of the linearised network at its mode,
        which stays where it is when the prior changes.
        """
        if at is not None:
            linear_modes.check_mode(at, self.fitted, None, self.space)
        evidence = self.evidence if at is None else at.evidence
        before = self.hyper
        try:
            if sigma_noise is not None:
                if not self.has_noise:
                    raise OptionError("sigma_noise was given for a likelihood without a noise level; expected none.")
                self.sigma_noise = sigma_noise
            if prior_precision is not None:
                self.prior_precision = prior_precision
            value = evidence.log_marginal(self.prior, self.sigma_noise, self.temperature)
        except BaseException:
            self.hyper = before
            raise
        precision, sigma = self.hyper.prior_precision.detach(), self.hyper.sigma_noise.detach()
        if any(map(is_functorch_wrapped_tensor, (precision, sigma))):  # of torch.func, and without meaning outside
            self.hyper = before
        else:
            self._set(prior_precision=precision, sigma_noise=sigma)
        return value

    @outside_autocast
    def effective_parameters(self) -> Float[Tensor, " groups"]:
        """gamma per group of the prior: how many of its parameters the data determine."""
        with torch.no_grad():
            return self.evidence.effective_parameters(self.prior, self.sigma_noise, self.temperature)

    @outside_autocast
    @budgeted
    def linear_mode(
        self,
        train_loader: Iterable[Any],
        *,
        solver: str = "auto",
        tolerance: float | None = None,
        max_passes: int = linear_modes.PASSES,
    ) -> LinearMode:
        """theta*, the weights at which the network linearised at theta~, the trained weights, has its smallest loss.

        The loss is that of f(x; theta~) + J(x) (theta - theta~) on the data of the fit, all of them and in any order,
        with the present prior, noise and temperature. It is convex for every likelihood that is convex in f, so that
        theta* does not depend on where training stopped. `at=mode` takes predictions and the evidence there. The result
        is not kept, and nothing changes.

        `solver`: "exact" forms the exact curvature of the data, [P, P] or [N C, N C], to solve with; "structure" uses
        this posterior's own; "auto" the exact one where that is small: 1024 weights, or fewer outputs than weights and
        at most some thousands. `tolerance` is the relative residual, 1e-8 in float64 and 1e-3 in float32; a warning
        says if it was not met after `max_passes` passes over the data.
        """
        at_mode = self.evidence_at_mode(train_loader, solver=solver, tolerance=tolerance, max_passes=max_passes)
        hyper = self.hyper
        with torch.inference_mode(False), torch.no_grad():
            return linear_modes.checked(at_mode.mode(hyper.base(self.space), hyper.sigma_noise, hyper.temperature))

    @outside_autocast
    @budgeted
    def evidence_at_mode(
        self,
        train_loader: Iterable[Any],
        *,
        solver: str = "auto",
        tolerance: float | None = None,
        max_passes: int = linear_modes.PASSES,
        curvature: str = "structure",
    ) -> EvidenceAtMode:
        """The evidence at the linear mode as a function of prior, noise and temperature, for searches of one's own.

        Options are those of `linear_mode`. What one search computes from the data serves the next. `curvature` says
        whose log-determinant and traces the evidence has: this posterior's "structure", or the "exact" curvature.
        """
        self.hyper.refuse_earlier("a linear mode")
        options: dict[str, Any] = {"solver": solver, "tolerance": tolerance, "max_passes": max_passes}
        fitted, options["curvature"] = self.fitted, curvature
        self._check_weights(whole=True)
        assert self._tangent is not None
        with torch.inference_mode(False), torch.no_grad():
            batches = self._data(Pairs(train_loader, self.dict_key_y, self._whole.device))
            arguments = self.setup, self.evidence, fitted, self._tangent, batches
            return linear_modes.evidence_at_mode(*arguments, **options)

    # -- fitting -----------------------------------------------------------------------------------------------------

    @outside_autocast
    def fit(
        self,
        train_loader: Iterable[Any],
        override: bool = True,
        progress_bar: bool = False,
        *,
        generator: torch.Generator | None = None,
        checkpoint: AnyPath | None = None,
        checkpoint_every: int = EVERY,
        process_group: dist.ProcessGroup | None = None,
        memory_budget: AnyBudget | None = None,
    ) -> None:
        """One pass over the data (ekfac: two). With `override=False` the data are added to those already seen.

        Under `torchrun`, where the loader has a `DistributedSampler`, every rank fits its shard, sums are added up over
        ranks, and all end with the posterior of all data. `process_group` names other ranks than all; with it the data
        may be divided in any way. See docs/distributed.md.

        Interrupted at any point, the model and this posterior are as they were. With a `checkpoint`, the path of a
        file, the sum so far is kept there after every `checkpoint_every` batches; called again in the same way, also in
        another process, the fit goes on from it. The loader must give the same batches in the same order.

        `memory_budget` stands for this fit in the place of the posterior's own. Random estimators (mc, projection) draw
        for the parts of a divided batch, and so other numbers than for the whole of it.
        """
        group, named = group_of(train_loader, process_group, self._device), process_group is not None
        with nullcontext() if group is None else group.together(), self._within(memory_budget):
            fitted, tangent, sampled = self._fit(
                train_loader, override, progress_bar, generator, checkpoint, checkpoint_every, group, named
            )
        with self._all_or_nothing():
            self._bind(tangent)
            self._fitted, self._posterior, self._kept = fitted, None, Kept.of(self.model)
            self._few, self._batch_points, self.tuned = sampled.few, sampled.size, None
        if checkpoint is not None and (group is None or group.rank == 0):
            remove(checkpoint)

    def _fit(
        self,
        train_loader: Iterable[Any],
        override: bool,
        progress_bar: bool,
        generator: torch.Generator | None,
        checkpoint: AnyPath | None,
        checkpoint_every: int,
        group: ProcessGroup | None,
        named: bool,
    ) -> tuple[Fitted, AnyTangent, FirstInputs]:
        """What the data leave behind, the function it belongs to, and a few inputs."""
        if not override:
            self._check_weights(whole=True)
        shown = progress_bar and (group is None or group.rank == 0)
        loader = Tracked(train_loader, "curvature") if shown else train_loader
        sampled = FirstInputs(Pairs(loader, self.dict_key_y, self._whole.device, shard=group is not None))
        shard = None
        if group is not None:
            self._check_ranks(group)
            shard = shard_of(sampled, train_loader, group, named)
        pairs, tangent = self._tangent_for(self._data(sampled if shard is None else shard))
        check_kept(self.structure, tangent.space, self.recipe.options)
        working = _with_budget(tangent, current_budget())
        if group is None and current_budget().total is not None:
            pairs = Divided(pairs, lambda x: self._most_points(working, x))
        ranks: Ranks = ONE
        if group is not None:
            ranks = group
            check_same(group, self.setup, self.hyper, tangent.space, None if override else self._fitted)
            if self.recipe.source in RANDOM and checkpoint is None:
                generator = own_generator(generator, group.rank, tangent.space.device)
        seen = Seen(self.has_noise)
        added_to = None if override or self._fitted is None else self._fitted.curvature
        if checkpoint is None:
            watched = seen.watching(pairs)
            curvature = self.recipe(working, self.distribution, watched, generator, added_to, ranks)
            if group is not None and shard is not None:
                check_rows(self.setup, curvature)  # a limit on the rows of all ranks, of which each knew its own
                seen = seen_by_all(seen, shard, group)
        else:
            kept = Checkpointed(self.setup, working, seen, generator, checkpoint, checkpoint_every)
            if group is None or shard is None:
                curvature = kept.run(pairs, added_to)
            else:
                curvature, seen = RanksCheckpointed(kept, group, shard).run(added_to)
        assert seen.shape is not None
        mean = tangent.space.values(self.model)
        fitted = Fitted(curvature, mean, seen.fit(tangent.space.dtype), seen.points, seen.shape, seen.fingerprint)
        if not override and self._fitted is not None:
            fitted = self._fitted + fitted
        return replace(fitted, curvature=ranks.decomposed(compact(fitted.curvature))), tangent, sampled

    @outside_autocast
    def plan(
        self,
        train_loader: Iterable[Any] | None = None,
        *,
        memory_budget: AnyBudget | None = None,
        time_budget: float | int | None = None,
    ) -> Plan:
        """Every structure over these weights, with the time and memory that it would take on this machine.

        From the first batch of `train_loader`, or, after a fit, from what it has seen. `time_budget` is in seconds, for
        a fit; `memory_budget` is this posterior's own unless given. The table can be printed; `.rows` has it as data,
        `.chosen` the structure that `.reason` speaks for. Nothing is fitted or changed. See `lapwing.plan`.
        """
        budget = self._budget if memory_budget is None else budget_of(memory_budget, self._device)
        size = None
        if train_loader is not None:
            points, loader = points_of(train_loader), Pairs(train_loader, self.dict_key_y, self._device)
            with torch.random.fork_rng(devices=()):  # a shuffled loader draws its order, which the fit is to draw
                batch = next(iter(loader), None)
            if batch is None:
                raise no_batch()
        elif self._few is None:
            raise NotFittedError(
                "a plan was asked of a posterior that has seen no inputs (it was not fitted, or was loaded); expected "
                "some. Give the data: la.plan(train_loader)."
            )
        else:
            points, batch, size = self.n_data, (self._few, None), self._batch_points
        _, tangent = self._tangent_for([batch])
        options = {self.structure: self.recipe.options}
        with self._within(memory_budget), torch.inference_mode(False):
            arguments = _with_budget(tangent, budget), self.distribution, batch, points, self.subset, options
            return plan_of(*arguments, memory=budget, time_budget=time_budget, batch_points=size)

    def _check_ranks(self, group: ProcessGroup) -> None:
        """Refuses what is not the same from shards as from all data."""
        why = "it propagates expectations over all data" if self.recipe.source == "recursive" else self._one_process
        if why and group.size > 1:
            raise OptionError(
                f"a {self.structure!r} posterior with estimator={self.recipe.source!r} cannot be fitted by "
                f"{group.size} ranks: {why}. Expected one that adds up over shards: 'kron', 'ekfac', 'diag', 'blocks', "
                "'full', 'lowrank' or 'gp', with another estimator. Or give every rank all data, without "
                "DistributedSampler."
            )

    @property
    def _one_process(self) -> str:
        """Why shards of the data do not add up, where they do not."""
        return self.recipe.row.one_process

    @property
    def exact_blocks(self) -> str:
        """Which parameters have an exact block although the others have Kronecker factors, and why; mostly empty."""
        return exceptions(self.fitted.curvature)

    def _data(self, pairs: Iterable[Any]) -> Iterable[Any]:
        """The data that a fit sees: all, except where a class chooses a subset."""
        return pairs

    def _tangent_for(self, pairs: Iterable[Any]) -> tuple[Iterable[Any], AnyTangent]:
        assert self._tangent is not None
        return pairs, self._tangent

    # -- predictions ---------------------------------------------------------------------------------------------------

    def linearise(self, x: Any, at: LinearMode | None = None) -> LinearMap:
        """The network at the inputs x, and its Jacobian as a linear map; with `at`, its value at the linear mode."""
        _ = self.space  # known before the first fit, except for a last layer that is still to be found
        assert self._tangent is not None
        self._check_weights()
        with self._within():
            inputs, tangent = self._inputs(x), _with_budget(self._tangent, current_budget())
            most = self._most_points(tangent, inputs) if tensors(inputs) else None
            divided = most is not None and most < batch_size(inputs)
            linear: LinearMap = DividedMap(tangent, inputs, most or 1) if divided else tangent.at(inputs)
        if at is None:
            return linear
        linear_modes.check_mode(at, self.fitted, self.hyper, self.space)
        return linear_modes.MovedMap.of(linear, at.offset)

    def _check_weights(self, whole: bool = False) -> None:
        """Outputs of another model than the curvature's would be mixed with it. `whole` looks at all of its numbers."""
        if self._fitted is None:
            return
        if self._kept is not None:
            found = self._kept.difference(self.model, whole)
        elif torch.equal(self.space.values(self.model), self.fitted.mean):
            self._kept, found = Kept.of(self.model), ""
        else:
            found = "they differ from the posterior's mean"
        if found:
            raise ParameterError(
                f"the model's weights are not those that this posterior was fitted at, or it is another model: {found}"
                ". Expected the same. Fit again, or restore the model that goes with the posterior."
            )

    def _inputs(self, x: Any) -> Any:
        if not isinstance(x, Tensor) and isinstance(x, Mapping):
            x = {key: value for key, value in x.items() if key != self.dict_key_y}
        return moved(x, self._whole.device)

    @outside_autocast
    def __call__(
        self,
        x: Any,
        pred_type: str = "glm",
        joint: bool = False,
        link_approx: str = "probit",
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        fitting: bool = False,
        *,
        at: LinearMode | None = None,
        memory_budget: AnyBudget | None = None,
        **model_kwargs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Probabilities [B, *out] for classes and events; for numbers the mean [B, *out] and covariance [B, C, C].

        The covariance is that of the function, without observation noise. `joint=True` gives mean [B C] and covariance
        [B C, B C] over all inputs (probabilities are per input, and stay as they are); `diagonal_output=True` the
        variances in the shape of the outputs. `pred_type="nn"` averages the network itself at sampled weights.
        `link_approx` is "probit", "mc", "probit_full", "bridge", "bridge_norm", or "quadrature" for a single logit.
        Further arguments of the model go into x, where it is a mapping. `fitting` is for likelihood="reward_modeling",
        which predicts rewards of single inputs: with it, the probabilities of the choices in pairs. The mean is the
        trained network's output; `at`, a result of `linear_mode`, makes it that of the linearised network at its mode.
        `memory_budget` stands for this call in the place of the posterior's own.
        """
        x = _with_arguments(x, model_kwargs)
        with self._within(memory_budget):
            return self._prediction(
                x, pred_type, joint, link_approx, n_samples, diagonal_output, generator, fitting, at
            )

    def _prediction(
        self,
        x: Any,
        pred_type: str,
        joint: bool,
        link_approx: str,
        n_samples: int,
        diagonal_output: bool,
        generator: torch.Generator | None,
        fitting: bool,
        at: LinearMode | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        pred_type = self._pred_type(pred_type)
        likelihood = self.distribution.of_targets() if fitting else self.distribution
        link, posterior = predictions.chosen_link(likelihood, link_approx), self.posterior
        classes = likelihood.has_probabilities
        if joint and pred_type == "nn":
            raise OptionError(
                "joint=True goes with pred_type='glm'; found 'nn'. Use functional_samples, which are joint."
            )
        if pred_type == "nn":
            refuse_mode(at)
            if not classes and whole(n_samples) < 2:
                raise ParameterError("n_samples is 1, which has no variance; expected at least 2 draws.")
            out = predictions.predicted(likelihood, self.functional_samples(x, "nn", n_samples, generator=generator))
            return out.mean(0) if classes else (out.mean(0), out.var(0))
        with self._working():
            linear = self.linearise(x, at)
            if classes:
                arguments = likelihood, link, whole(n_samples), generator
                return predictions.probabilities(posterior, linear, *arguments)
            return predictions.moments(posterior, linear, joint=joint, diagonal=diagonal_output)

    def predict_proba(
        self,
        x: Any,
        link_approx: str = "probit",
        n_samples: int = 100,
        generator: torch.Generator | None = None,
        *,
        at: LinearMode | None = None,
        memory_budget: AnyBudget | None = None,
    ) -> Float[Tensor, "batch *out"]:
        """Probabilities of classes or events, [B, *out]. As `la(x)`, with one type of answer."""
        if not self.distribution.has_probabilities:
            raise OptionError(
                f"probabilities were asked of a {type(self.distribution).__name__} likelihood, which predicts numbers; "
                "expected one of classes or events. Use predict_moments or predict_distribution."
            )
        how = {"link_approx": link_approx, "n_samples": n_samples, "generator": generator, "at": at}
        answer = self(x, "glm", **how, memory_budget=memory_budget)
        assert isinstance(answer, Tensor)
        return answer

    @outside_autocast
    def predict_moments(
        self,
        x: Any,
        joint: bool = False,
        diagonal_output: bool = False,
        *,
        at: LinearMode | None = None,
        memory_budget: AnyBudget | None = None,
    ) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."]]:
        """Mean [B, *out] and covariance [B, C, C] of the outputs f(x), of logits too; without observation noise.

        `joint=True` gives [B C] and [B C, B C], `diagonal_output=True` variances in the shape of the outputs.
        """
        with self._within(memory_budget), self._working():
            posterior = self.posterior
            return predictions.moments(posterior, self.linearise(x, at), joint=joint, diagonal=diagonal_output)

    def predict_distribution(
        self, x: Any, *, at: LinearMode | None = None, memory_budget: AnyBudget | None = None
    ) -> Distribution:
        """The law of new targets, noise included: mean, deviation, interval(0.9), log_prob(y), cdf(y), draw(n).

        Targets stand one after the other, [B D] for D of them in a data point. For classes and events there are
        `predict_proba`.

        >>> x = torch.tensor([[1.0], [2.0]])
        >>> model = nn.Linear(1, 1, bias=False)
        >>> with torch.no_grad(): _ = model.weight.fill_(1.0)
        >>> from lapwing import Laplace
        >>> la = Laplace(model, "regression", "all", "full", sigma_noise=0.1)
        >>> la.fit([(x, x)])
        >>> predicted = la.predict_distribution(x)
        >>> low, high = predicted.interval(0.9)
        >>> bool((low < predicted.mean).all()), (high - low).round(decimals=2).tolist()
        (True, [0.36, 0.44])
        """
        mean, variance = self.predict_moments(x, diagonal_output=True, at=at, memory_budget=memory_budget)
        likelihood = self.distribution
        law = likelihood.predictive(likelihood.to_last(mean), likelihood.to_last(variance), self.sigma_noise.detach())
        if law is None:
            raise OptionError(
                f"there is no closed form for the targets of a {type(likelihood).__name__} likelihood; expected "
                "numbers or counts. Use predict_proba for classes and events, predictive_samples for others."
            )
        return law

    def predictive(self, x: Any, pred_type: str = "glm", link_approx: str = "probit", n_samples: int = 100) -> Any:
        """As calling the object."""
        return self(x, pred_type, link_approx=link_approx, n_samples=n_samples)

    @outside_autocast
    def functional_samples(
        self,
        x: Any,
        pred_type: str = "glm",
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        *,
        at: LinearMode | None = None,
        memory_budget: AnyBudget | None = None,
    ) -> Float[Tensor, "n batch *out"]:
        """Draws of the outputs f(x): one draw moves all inputs together, as one draw of the weights does.

        `diagonal_output=True` draws every output on its own, from its marginal variance.
        """
        kind, count = self._pred_type(pred_type), whole(n_samples)
        if kind == "nn" and diagonal_output:
            raise OptionError("diagonal_output=True goes with pred_type='glm'; found 'nn'. Leave it out.")
        if not diagonal_output:
            with self._within(memory_budget):
                return self._outputs(self.posterior, x, kind, count, generator, at)
        posterior = self.posterior
        with self._within(memory_budget), self._working():
            mean, variance = predictions.moments(posterior, self.linearise(x, at), diagonal=True)
            return mean + variance.sqrt() * normal((count, *mean.shape), mean, generator)

    def _outputs(
        self,
        posterior: Gaussian,
        x: Any,
        pred_type: str,
        n: int,
        generator: torch.Generator | None,
        at: LinearMode | None = None,
    ) -> Float[Tensor, "n batch *out"]:
        """Draws of the outputs under a Gaussian over the weights."""
        with self._working():
            if pred_type != "nn":
                return draws(posterior, self.linearise(x, at), n, generator)
            refuse_mode(at)
            self._check_weights()
            tangent = Tangent(self.model, self.space, current_budget().intermediate, evaluate=True)
            return network_draws(posterior, tangent, self._inputs(x), n, generator, self.enable_backprop)

    @outside_autocast
    def predictive_samples(
        self,
        x: Any,
        pred_type: str = "glm",
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
        *,
        at: LinearMode | None = None,
        memory_budget: AnyBudget | None = None,
    ) -> Float[Tensor, "n batch *out"]:
        """Draws of predictions: probabilities for classes and events, else of the function, without noise."""
        how = {"at": at, "memory_budget": memory_budget}
        found = self.functional_samples(x, pred_type, n_samples, diagonal_output, generator, **how)
        return predictions.predicted(self.distribution, found)

    def _pred_type(self, pred_type: str) -> str:
        if str(getattr(pred_type, "value", pred_type)) == "gp" and "gp" not in self.pred_types:
            raise OptionError(
                f"pred_type='gp' was asked of {type(self).__name__}; expected 'glm' or 'nn'. For the Gaussian process "
                "view use FunctionalLaplace, or Laplace(..., hessian_structure='gp')."
            )
        return choose(pred_type, self.pred_types, "pred_type")

    def _working(self) -> AbstractContextManager:
        """No graph unless asked for.

        Not in inference mode: what is decomposed meanwhile is kept, and differentiated another time.
        """
        if not torch.is_inference_mode_enabled():
            return torch.set_grad_enabled(self.enable_backprop and torch.is_grad_enabled())
        stack = ExitStack()
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        return stack

    # -- tuning --------------------------------------------------------------------------------------------------------

    @outside_autocast
    @budgeted
    def optimize_prior_precision(
        self,
        pred_type: str = "glm",
        method: str = "marglik",
        n_steps: int = 100,
        lr: float | int = 0.1,
        init_prior_prec: float | int | Tensor = 1.0,
        prior_structure: str = "scalar",
        val_loader: Iterable[Any] | None = None,
        loss: Callable | None = None,
        log_prior_prec_min: float | int = -4,
        log_prior_prec_max: float | int = 4,
        grid_size: int = 100,
        link_approx: str = "probit",
        n_samples: int = 100,
        verbose: bool = False,
        progress_bar: bool = False,
        log_prior_prec_base: float | int = 10.0,
        *,
        optimize_sigma_noise: bool = False,
        counts: Iterable[float | int] | None = None,
        generator: torch.Generator | None = None,
        at: str = "trained",
        train_loader: Iterable[Any] | None = None,
        traces: str = "exact",
        max_passes: int = linear_modes.PASSES,
        curvature: str = "structure",
    ) -> None:
        """Sets the prior precision (with `optimize_sigma_noise` the noise as well) to what the data prefer.

        marglik      maximises the evidence by L-BFGS until it comes to rest, at most `n_steps` rounds; `lr` is not used
        adam         maximises the evidence by `n_steps` steps of Adam at `lr`
        em           MacKay's fixed point alpha = gamma / |theta|^2, per group of the prior, until it stands still, at
                     most ten times `n_steps` rounds; gamma, the effective parameters, from traces or
                     (`traces="samples"`) from `n_samples` draws of the posterior, with a standard error in
                     `tuned.error`. "mackay" is the same
        gridsearch   the best of `grid_size` precisions on `val_loader`, by validation NLL or `loss`
        pseudo_data  the best pair of a precision and a number N of data points (`counts`) that the data shall count
                     for, on `val_loader`; sets the temperature to n_data / N as well

        `loss` is called with (probabilities, targets), or with (mean, variance, targets) where numbers are predicted.
        The prior has one precision ("scalar"), one per parameter tensor ("layerwise"), one per module ("module"), one
        per entry ("diag"), or one per group of weights that a normalisation makes scale-invariant, and one for the rest
        ("scale_invariant"; see `scale_invariant_groups`). `verbose` reports through `logging`.

        `at` says where marglik and em take the evidence. "trained": at the trained weights, which have to be near the
        mode for it. "linear_mode": at the linear mode theta* (see `linear_mode`), which moves with the prior, so that
        prior, noise and theta* are found together from `train_loader`, the data of the fit, in at most `max_passes`
        passes. Use it for networks with normalisation or early stopping. Predictions keep the trained network's output
        for their mean, and have error bars with the prior that was found; `tuned.mode` is the mode.

        `curvature`, with at="linear_mode", says whose evidence that is: of this posterior's own "structure", which
        predicts, or with the "exact" curvature of all data, for up to 8192 outputs of them (or 1024 weights); an
        approximation may count several times as many effective parameters. Groups that the evidence would rather do
        without are `tuned.pruned`.
        """
        self.hyper.refuse_earlier("optimize_prior_precision")
        groups = self._groups_for(prior_structure)
        start = tuning.starting_precision(self.space, prior_structure, init_prior_prec, groups)
        chosen = choose(method, tuning.METHODS, "method")
        fitted = self.fitted
        place, traces = choose(at, tuning.PLACES, "at"), choose(traces, tuning.TRACES, "traces")
        curvature = choose(curvature, linear_modes.CURVATURES, "curvature")
        tuning.check_options(chosen, optimize_sigma_noise, counts, place, train_loader, traces, curvature)
        hyper = replace(self.hyper, prior_groups=groups)
        search = tuning.Search(
            self.evidence, self.space, hyper, fitted.n_data, self.distribution, self.linearise, self._outputs
        )
        if chosen in ("gridsearch", "pseudo_data"):
            grid = tuning.Exponents(log_prior_prec_min, log_prior_prec_max, grid_size, log_prior_prec_base)
            tuning.check_scalar(prior_structure, chosen)
            pairs = self._held_out(val_loader, chosen)
            link = predictions.chosen_link(self.distribution, link_approx)
            how = self._pred_type(pred_type), loss, link, whole(n_samples), generator
            with self._all_or_nothing(), self._working(), torch.no_grad():
                if chosen == "gridsearch":
                    self.prior_precision = tuning.by_validation(search, pairs, grid, *how)
                else:
                    self.prior_precision, self.temperature = tuning.by_pseudo_data(search, pairs, grid, counts, *how)
        else:
            self._check_prior(self.space, start, 0.0, groups)
            at_mode = None
            if train_loader is not None:
                at_mode = self.evidence_at_mode(train_loader, max_passes=max_passes, curvature=curvature)
            samples = whole(n_samples) if traces == "samples" else None
            with torch.inference_mode(False):
                tuned = tuning.by_evidence(
                    search, at_mode, chosen, start, optimize_sigma_noise, n_steps, lr, samples, generator
                )
            precision = checked_precision(tuned.prior.precisions, self._place)
            with self._all_or_nothing():
                self.hyper, self.tuned = replace(self.hyper, prior_precision=precision, prior_groups=groups), tuned
                if optimize_sigma_noise:
                    self.sigma_noise = tuned.sigma
        tuning.report(self.prior_precision, chosen, verbose)

    def _groups_for(self, structure: str) -> PriorGroups | None:
        """The groups of a structure that has names in it: those of this posterior, or found at a few inputs of the fit.

        A single precision leaves the groups there are for another time.
        """
        name = str(getattr(structure, "value", structure))
        if name != PriorStructure.SCALE_INVARIANT:
            return self.prior_groups if name == PriorStructure.SCALAR else None
        if self.prior_groups is not None:
            return self.prior_groups
        if self._few is None:
            raise OptionError(
                "prior_structure='scale_invariant' needs the operations of the network, and this posterior has seen no "
                "inputs (it was not fitted, or was loaded); expected its groups. Set "
                "la.prior_groups = lapwing.scale_invariant_groups(model, x) with a few inputs x."
            )
        return invariant_groups(self.model, self._few)

    def _held_out(self, val_loader: Iterable[Any] | None, method: str) -> Pairs:
        if val_loader is None:
            raise OptionError(f"method={method!r} has no val_loader; expected held-out data to score by.")
        return Pairs(val_loader, self.dict_key_y, self._whole.device)

    # -- state ---------------------------------------------------------------------------------------------------------

    def save(self, path: AnyPath, weights: bool = True) -> None:
        """This posterior and the model's weights (unless `weights` is False) in one file, for `lapwing.load`."""
        self._check_weights(whole=True)
        persistence.save(self.setup, self.state_dict(), self.reason, path, weights)

    def state_dict(self) -> dict[str, Tensor | int | float | str]:
        """Hyper-parameters and fit as tensors, numbers and strings; the model's weights are not in it."""
        features = isinstance(self._tangent, FeatureTangent)
        return state.state_dict(self.setup, self.hyper, self._fitted, self._space, features)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes the hyper-parameters and the fit of a posterior of the same class over the same parameters."""
        hyper, fitted = state.load(self.setup, self._place, state_dict)
        groups = checked_groups(state.groups(state_dict), self._whole)
        with self._all_or_nothing():
            if fitted is not None:
                self._bind_stored(state_dict)
                state.check_parameters(self.space, state_dict)
            self._set(prior_precision=hyper["prior_precision"], prior_groups=groups, earlier=None)
            for name, value in hyper.items():
                setattr(self, name, value)
            self._set(earlier=state.earlier(state_dict, self._whole.device))
            if self._space is not None:
                self._check_prior(self._space, self.prior_precision, 0.0, groups)
            self._fitted, self._posterior, self._kept = fitted, None, None
            self.tuned = None

    def _bind_stored(self, state_dict: Mapping[str, Any]) -> None:
        """Binds the parameters that a state speaks of, where that is not known yet."""


def _with_budget(tangent: AnyTangent, budget: MemoryBudget) -> AnyTangent:
    """The same tangent, with what it has learnt of the network, within another budget."""
    return tangent if tangent.budget == budget.intermediate else replace(tangent, budget=budget.intermediate)


def whole(n: int) -> int:
    """n as a number of draws."""
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ParameterError(f"n_samples is {n!r}; expected a whole number >= 1.")
    return n


def refuse_mode(at: LinearMode | None) -> None:
    """The network itself, at sampled weights, has nothing to do with the mode of the linearised one."""
    if at is not None:
        raise OptionError(
            "a linear mode was given with pred_type='nn'; expected 'glm', as it is the mode of the linearised network. "
            "Leave `at` out."
        )


def _with_arguments(x: Any, arguments: Mapping[str, Any]) -> Any:
    if not arguments:
        return x
    if not isinstance(x, Mapping):
        raise OptionError(
            f"unknown argument {next(iter(arguments))!r} for inputs that are no mapping; expected none. What the model "
            "takes by name is given as one mapping: la({'input_ids': ids, 'attention_mask': mask})."
        )
    return {**x, **arguments}
