"""BaseLaplace: the object most users touch. It binds network, likelihood, prior, estimator, posterior and predictions.

All mathematics is below it. The model is used in eval mode and never touched: passes run on private copies of its
modules, so that any number of threads may predict, and use the model, at once. Hyper-parameters are in `hyper`, the
Gaussian over weights in `weights`, the choice of estimator in `structures`, closed forms in `predictions`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lapwing.errors import OptionError, ParameterError
from lapwing.estimate.data_pass import Watched
from lapwing.laplace import persistence as files
from lapwing.laplace import predictions, state, tuning
from lapwing.laplace.checkpoint import EVERY, checkpointed, remove
from lapwing.laplace.data import Pairs, Seen, Tracked
from lapwing.laplace.hyper import Fitted
from lapwing.laplace.identity import Kept
from lapwing.laplace.names import choose
from lapwing.laplace.structures import AnyTangent, exceptions, recipe
from lapwing.laplace.tasks import likelihood_of, noise_of
from lapwing.laplace.weights import Weights, whole
from lapwing.likelihoods import Categorical, Likelihood, Preference
from lapwing.linalg import LinearMap
from lapwing.linalg.autocast import outside_autocast
from lapwing.linalg.checks import normal
from lapwing.params import ParamSpace
from lapwing.predictive import draws, network_draws
from lapwing.serialize import compact
from lapwing.serialize.files import AnyPath
from lapwing.tangent import Tangent
from lapwing.tangent.inputs import moved


class BaseLaplace(Weights):
    """A Laplace posterior over the weights of `model`.

    `likelihood` is "regression", "classification", "binary", "poisson", "heteroscedastic", "reward_modeling" (fitted to
    choices in pairs, see `likelihoods.Preference`), or an object of `lapwing.likelihoods`. `estimator` says where
    curvature comes from: "exact" (the generalised Gauss-Newton, default), "fisher", "mc" (sampled Fisher), "projection"
    (randomly projected GGN), "recursive" (kron alone: propagated in expectation over the data of a fit, for many
    outputs), "empirical" or "hessian"; `backend` does the same with names of `lapwing.curvature`. Other keyword
    arguments are options of the structure.
    """

    structure: ClassVar[str]
    reason: str = ""
    """Why the structure was chosen, where `hessian_structure="auto"` chose it."""
    choices: tuple[str, ...] = ()
    """What `lapwing.attach` decided, a sentence each."""
    pred_types: ClassVar[tuple[str, ...]] = ("glm", "nn")

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood,
        sigma_noise: float | int | Tensor = 1.0,
        prior_precision: float | int | Tensor = 1.0,
        prior_mean: float | int | Tensor = 0.0,
        temperature: float | int | Tensor = 1.0,
        enable_backprop: bool = False,
        dict_key_x: str = "input_ids",
        dict_key_y: str = "labels",
        backend: type | None = None,
        backend_kwargs: Mapping[str, Any] | None = None,
        *,
        estimator: str | None = None,
        **options: Any,
    ) -> None:
        self.model = model
        self.likelihood = likelihood
        self.distribution, own_sigma = likelihood_of(likelihood)
        self.has_noise = own_sigma is not None
        self._whole = ParamSpace.of(model)
        self.enable_backprop = enable_backprop
        self.dict_key_x, self.dict_key_y = dict_key_x, dict_key_y
        self.recipe = recipe(self.structure, estimator, backend, backend_kwargs, options)
        self.noise_power = 4 if self.recipe.source == "empirical" else 2
        super().__init__(noise_of(sigma_noise, own_sigma), prior_precision, prior_mean, temperature)
        self._tangent: AnyTangent | None = None
        self._kept: Kept | None = None
        self._bind(self._chosen_tangent(None))

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
        fitted = "not fitted" if self._fitted is None else f"fitted to {self.n_data:,} points"
        noise = f", sigma_noise {span(self._sigma_noise)}" if self.has_noise else ""
        return (
            f"{type(self).__name__}: {self.structure} posterior{size} of {type(self.model).__name__}, "
            f"{type(self.distribution).__name__} likelihood, {fitted}; prior_precision {span(self._prior_precision)}"
            f"{noise}, temperature {span(self._temperature)}"
        )

    # -- which parameters --------------------------------------------------------------------------------------------

    def _chosen_tangent(self, x: Any | None) -> AnyTangent | None:
        """The network as a function of the random parameters; None where that needs data (x) to be known."""
        return Tangent(self.model, self._whole, differentiable=self.enable_backprop, evaluate=True)

    def _bind(self, tangent: AnyTangent | None) -> None:
        if tangent is None:
            return
        with self._all_or_nothing():
            self._tangent, self._space = tangent, tangent.space
            self._check_prior(self._prior_precision)
            self.prior_mean = self._prior_mean

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Whatever fails inside leaves the posterior as it was."""
        before = dict(vars(self))
        try:
            yield
        except BaseException:
            vars(self).update(before)
            raise

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
    ) -> None:
        """One pass over the data (ekfac: two). With `override=False` the data are added to those already seen.

        Interrupted at any point, the model and this posterior are as they were. With a `checkpoint`, the path of a
        file, the sum so far is kept there after every `checkpoint_every` batches; called again in the same way, also in
        another process, the fit goes on from it. The loader must give the same batches in the same order.
        """
        if not override:
            self._check_weights(whole=True)
        if progress_bar:
            train_loader = Tracked(train_loader, "curvature")
        pairs = self._data(Pairs(train_loader, self.dict_key_y, self._whole.device))
        pairs, tangent = self._tangent_for(pairs)
        seen = Seen(self.has_noise)
        if checkpoint is None:
            watched = Watched(pairs, seen.start, seen.saw)
            added_to = None if override or self._fitted is None else self._fitted.curvature
            curvature = self.recipe(tangent, self.distribution, watched, generator, added_to)
        else:
            curvature = checkpointed(self, tangent, pairs, seen, generator, checkpoint, checkpoint_every)
        assert seen.shape is not None
        mean = tangent.space.values(self.model)
        fitted = Fitted(curvature, mean, seen.fit(tangent.space.dtype), seen.points, seen.shape)
        if not override and self._fitted is not None:
            fitted = self._fitted + fitted
        fitted = replace(fitted, curvature=compact(fitted.curvature))
        with self._all_or_nothing():
            self._bind(tangent)
            self._fitted, self._posterior, self._kept = fitted, None, Kept.of(self.model)
        if checkpoint is not None:
            remove(checkpoint)

    @property
    def exact_blocks(self) -> str:
        """Which parameters have an exact block although the others have Kronecker factors, and why; mostly empty."""
        return exceptions(self.fitted.curvature)

    def _data(self, pairs: Pairs) -> Iterable[Any]:
        """The data that a fit sees: all, except where a class chooses a subset."""
        return pairs

    def _tangent_for(self, pairs: Iterable[Any]) -> tuple[Iterable[Any], AnyTangent]:
        assert self._tangent is not None
        return pairs, self._tangent

    # -- predictions ---------------------------------------------------------------------------------------------------

    @outside_autocast
    def linearise(self, x: Any) -> LinearMap:
        """The network at the inputs x, and its Jacobian as a linear map."""
        _ = self.space  # known before the first fit, except for a last layer that is still to be found
        assert self._tangent is not None
        self._check_weights()
        return self._tangent.at(self._inputs(x))

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
        if isinstance(x, Mapping):
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
        **model_kwargs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Probabilities [B, *out] for classes and events; for numbers the mean [B, *out] and covariance [B, C, C].

        The covariance is that of the function, without observation noise. `joint=True` gives mean [B C] and covariance
        [B C, B C] over all inputs (probabilities are per input, and stay as they are); `diagonal_output=True` the
        variances in the shape of the outputs. `pred_type="nn"` averages the network itself at sampled weights.
        `link_approx` is "probit", "mc", "probit_full", "bridge", "bridge_norm", or "quadrature" for a single logit.
        Further arguments of the model go into x, where it is a mapping. `fitting` is for likelihood="reward_modeling",
        which predicts rewards of single inputs: with it, the probabilities of the choices in pairs.
        """
        x = _with_arguments(x, model_kwargs)
        pred_type = self._pred_type(pred_type)
        link = choose(link_approx, predictions.LINKS, "link_approx")
        posterior = self.posterior
        likelihood = Categorical() if fitting and isinstance(self.distribution, Preference) else self.distribution
        classes = predictions.has_probabilities(likelihood)
        if joint and pred_type == "nn":
            raise OptionError(
                "joint=True goes with pred_type='glm'; found 'nn'. Use functional_samples, which are joint."
            )
        if pred_type == "nn":
            if not classes and whole(n_samples) < 2:
                raise ParameterError("n_samples is 1, which has no variance; expected at least 2 draws.")
            out = predictions.predicted(likelihood, self.functional_samples(x, "nn", n_samples, generator=generator))
            return out.mean(0) if classes else (out.mean(0), out.var(0))
        with self._working():
            linear = self.linearise(x)
            if classes:
                arguments = likelihood, link, whole(n_samples), generator
                return predictions.probabilities(posterior, linear, *arguments)
            return predictions.moments(posterior, linear, joint=joint, diagonal=diagonal_output)

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
    ) -> Float[Tensor, "n batch *out"]:
        """Draws of the outputs f(x): one draw moves all inputs together, as one draw of the weights does.

        `diagonal_output=True` draws every output on its own, from its marginal variance.
        """
        pred_type = self._pred_type(pred_type)
        count, posterior = whole(n_samples), self.posterior
        if pred_type == "nn":
            if diagonal_output:
                raise OptionError("diagonal_output=True goes with pred_type='glm'; found 'nn'. Leave it out.")
            self._check_weights()
            with self._working():
                tangent = Tangent(self.model, self.space, evaluate=True)
                return network_draws(posterior, tangent, self._inputs(x), count, generator, self.enable_backprop)
        with self._working():
            linear = self.linearise(x)
            if not diagonal_output:
                return draws(posterior, linear, count, generator)
            mean, variance = predictions.moments(posterior, linear, diagonal=True)
            noise = normal((count, *mean.shape), mean, generator)
            return mean + variance.sqrt() * noise

    @outside_autocast
    def predictive_samples(
        self,
        x: Any,
        pred_type: str = "glm",
        n_samples: int = 100,
        diagonal_output: bool = False,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "n batch *out"]:
        """Draws of predictions: probabilities for classes and events, else of the function, without noise."""
        found = self.functional_samples(x, pred_type, n_samples, diagonal_output, generator)
        return predictions.predicted(self.distribution, found)

    def _pred_type(self, pred_type: str) -> str:
        if str(getattr(pred_type, "value", pred_type)) == "gp" and "gp" not in self.pred_types:
            raise OptionError(
                f"pred_type='gp' was asked of {type(self).__name__}; expected 'glm' or 'nn'. For the Gaussian process "
                "view use FunctionalLaplace, or Laplace(..., hessian_structure='gp')."
            )
        return choose(pred_type, self.pred_types, "pred_type")

    @contextmanager
    def _working(self) -> Iterator[None]:
        """No graph unless asked for.

        Not in inference mode: what is decomposed meanwhile is kept, and differentiated another time.
        """
        graph = self.enable_backprop and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        with torch.inference_mode(False), torch.set_grad_enabled(graph):
            yield

    # -- tuning --------------------------------------------------------------------------------------------------------

    @outside_autocast
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
    ) -> None:
        """Sets the prior precision (with `optimize_sigma_noise` the noise as well) to what the data prefer.

        marglik      maximises the evidence by L-BFGS until it comes to rest, at most `n_steps` rounds; `lr` is not used
        adam         maximises the evidence by `n_steps` steps of Adam at `lr`
        mackay       MacKay's fixed point, per group of the prior, until it stands still
        gridsearch   the best of `grid_size` precisions on `val_loader`, by validation NLL or `loss`
        pseudo_data  the best pair of a precision and a number N of data points (`counts`) that the data shall count
                     for, on `val_loader`; sets the temperature to n_data / N as well

        `loss` is called with (probabilities, targets), or with (mean, variance, targets) where numbers are predicted.
        The prior has one precision ("scalar"), one per parameter tensor ("layerwise"), one per module ("module") or
        one per entry ("diag"). `verbose` reports through `logging`.
        """
        start = tuning.starting_precision(self.space, prior_structure, init_prior_prec)
        chosen = choose(method, tuning.METHODS, "method")
        _ = self.fitted
        tuning.check_options(chosen, optimize_sigma_noise, counts)
        if chosen in ("gridsearch", "pseudo_data"):
            grid = tuning.Grid(log_prior_prec_min, log_prior_prec_max, grid_size, log_prior_prec_base)
            tuning.check_scalar(prior_structure, chosen)
            pairs = self._held_out(val_loader, chosen)
            link = choose(link_approx, predictions.LINKS, "link_approx")
            how = self._pred_type(pred_type), loss, link, n_samples, generator
            with self._all_or_nothing(), self._working(), torch.no_grad():
                if chosen == "gridsearch":
                    found = tuning.by_validation(self, pairs, grid, *how)
                else:
                    found, self.temperature = tuning.by_pseudo_data(self, pairs, grid, counts, *how)
                self.prior_precision = found
        else:
            self._check_prior(start)
            hyper = tuning.Start(start, self._prior_mean, self._sigma_noise, optimize_sigma_noise)
            self.prior_precision, sigma = tuning.by_evidence(self, chosen, hyper, n_steps, lr)
            if sigma is not None:
                self.sigma_noise = sigma
        tuning.report(self, chosen, verbose)

    def _held_out(self, val_loader: Iterable[Any] | None, method: str) -> Pairs:
        if val_loader is None:
            raise OptionError(f"method={method!r} has no val_loader; expected held-out data to score by.")
        return Pairs(val_loader, self.dict_key_y, self._whole.device)

    # -- state ---------------------------------------------------------------------------------------------------------

    def save(self, path: AnyPath, weights: bool = True) -> None:
        """This posterior and the model's weights (unless `weights` is False) in one file, for `lapwing.load`."""
        files.save(self, path, weights)

    def state_dict(self) -> dict[str, Tensor | int | float | str]:
        """Hyper-parameters and fit as tensors, numbers and strings; the model's weights are not in it."""
        return state.state_dict(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes the hyper-parameters and the fit of a posterior of the same class over the same parameters."""
        hyper, fitted = state.load(self, state_dict)
        with self._all_or_nothing():
            if fitted is not None:
                self._bind_stored(state_dict)
                state.check_parameters(self, state_dict)
            for name, value in hyper.items():
                setattr(self, name, value)
            self._fitted, self._posterior, self._kept = fitted, None, None

    def _bind_stored(self, state_dict: Mapping[str, Any]) -> None:
        """Binds the parameters that a state speaks of, where that is not known yet."""


def _with_arguments(x: Any, arguments: Mapping[str, Any]) -> Any:
    if not arguments:
        return x
    if not isinstance(x, Mapping):
        raise OptionError(
            f"unknown argument {next(iter(arguments))!r} for inputs that are no mapping; expected none. What the model "
            "takes by name is given as one mapping: la({'input_ids': ids, 'attention_mask': mask})."
        )
    return {**x, **arguments}
