"""Training by the marginal likelihood (Immer et al. 2021): weights and hyper-parameters in one run, no validation set.

    weights           minimise sum_n -log p(y_n | f_n) / T + 1/2 (theta - mean)^T prior (theta - mean): an epoch each
    hyper-parameters  maximise log Z(prior, sigma) of the Laplace approximation at these weights: `hyper_steps` of Adam

An evaluation of log Z costs one curvature pass (KFLR unless told otherwise) and one decomposition; its steps are cheap.
The weights with the largest log Z are kept: a copy of parameters and buffers, and one curvature, in memory.

    >>> import torch
    >>> from torch import nn
    >>> from lapwing.likelihoods import Gaussian
    >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
    >>> found = train(nn.Linear(1, 1), [(x, 3 * x)], Gaussian(), epochs=2, hyper_steps=5)
    >>> len(found.losses), len(found.log_marginals), found.prior.structure
    (2, 2, 'per_tensor')
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from math import isfinite, log
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lapwing.errors import CurvatureError, DataError, LapwingError, LikelihoodError, ParameterError
from lapwing.estimate import kflr
from lapwing.evidence import Evidence, GaussianFit, Tuned
from lapwing.evidence.tuning import HIGHEST, LOWEST
from lapwing.likelihoods import Gaussian, Likelihood
from lapwing.linalg import Curvature
from lapwing.params import ParamSpace
from lapwing.priors import Prior
from lapwing.tangent import Tangent
from lapwing.tangent.guard import unchanged
from lapwing.tangent.inputs import batch_size, call

Estimator = Callable[..., Curvature]
"""(tangent, likelihood, batches, generator=...) -> Curvature: any function of `lapwing.estimate`."""

STRUCTURES: dict[str, Callable[..., Prior]] = {
    "isotropic": Prior.isotropic,
    "layerwise": Prior.layerwise,
    "per_tensor": Prior.per_tensor,
    "diagonal": Prior.diagonal,
}

# -- steps on the evidence ------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Hyper:
    """Adam's moments for log precisions and log sigma, kept between calls of `adam`; `values`: log Z at each step."""

    free: Float[Tensor, " free"]
    optimiser: torch.optim.Adam
    values: list[float] = field(default_factory=list)

    @staticmethod
    def of(prior: Prior, noise: bool) -> Hyper:
        """At rest, for one log precision per group, and log sigma where there is `noise` to tune."""
        free = torch.zeros(len(prior.precisions) + noise, dtype=prior.precisions.dtype, device=prior.precisions.device)
        free.requires_grad_()
        return Hyper(free, torch.optim.Adam([free]))


def adam(
    evidence: Evidence,
    prior: Prior,
    sigma: float | int | Tensor = 1.0,
    steps: int = 100,
    lr: float | int = 0.1,
    *,
    temperature: float | int = 1.0,
    fixed_noise: bool = False,
    state: Hyper | None = None,
) -> Tuned:
    """`steps` of Adam up the evidence, from `prior` and `sigma`; with a `state`, its moments go on where they were.

    Unlike `evidence.gradient` it does not go to the optimum, which moves while the weights are trained.
    """
    _check_numbers(steps=steps, lr=lr, temperature=temperature)
    noise = evidence.has_noise and not fixed_noise
    state = Hyper.of(prior, noise) if state is None else state
    count = len(prior.precisions)
    if len(state.free) != count + noise:
        raise ParameterError(
            f"the state holds {len(state.free)} hyper-parameters; expected {count + noise}, the precisions of this "
            f"{prior.structure} prior{' and sigma' if noise else ''}. Start with state=None."
        )
    free, level = state.free, torch.as_tensor(sigma, dtype=state.free.dtype, device=state.free.device).detach()
    start, bounds = prior.precisions.detach().log(), (log(LOWEST), log(HIGHEST))
    with torch.no_grad():
        free.copy_(torch.cat([start, level.log().reshape(1)]) if noise else start).clamp_(*bounds)
    state.optimiser.param_groups[0]["lr"] = lr

    def read() -> tuple[Prior, Tensor]:
        return prior.with_precisions(free[:count].exp()), free[count].exp() if noise else level

    def climb() -> Tensor:
        state.optimiser.zero_grad()
        with torch.enable_grad():
            found, now = read()
            value = evidence.log_marginal(found, now, temperature)
        if not bool(torch.isfinite(value)):
            raise CurvatureError(
                f"the evidence is {float(value.detach())} at prior precisions {found.precisions.tolist()[:5]}, sigma "
                f"{float(now.detach()):.3g}; expected a finite number. Start from other values, or use a smaller lr."
            )
        (-value).backward()
        return value.detach()

    for _ in range(steps):
        state.values.append(float(climb()))
        state.optimiser.step()
        with torch.no_grad():
            free.clamp_(*bounds)
    value = climb()
    assert free.grad is not None
    inside = (free.detach() > bounds[0]) & (free.detach() < bounds[1])
    rest = float((free.grad * inside).abs().max())
    converged = rest <= torch.finfo(free.dtype).eps ** 0.5 * float(1 + value.abs())
    with torch.no_grad():
        found, now = read()
    return Tuned(found, now.clone(), value, converged, steps)


# -- training -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Epoch:
    """What a callback is told after an epoch; `tuned` is None where the evidence was not evaluated."""

    number: int
    loss: float
    tuned: Tuned | None
    best: bool


@dataclass(frozen=True, eq=False)
class Trained:
    """The hyper-parameters, evidence and weights of the best epoch, and how the run went.

    `losses` holds the mean over an epoch of the negative log joint density per data point, `log_marginals` log Z after
    each evaluation's hyper-steps (at the epochs `evaluated`), `steps` log Z before each single hyper-step. `state` has
    the parameters and buffers by name; the model holds the same values.
    """

    prior: Prior
    sigma: Float[Tensor, ""]
    log_marginals: tuple[float, ...]
    losses: tuple[float, ...]
    evidence: Evidence
    best_epoch: int
    state: dict[str, Tensor]
    evaluated: tuple[int, ...]
    steps: tuple[float, ...]

    @property
    def curvature(self) -> Curvature:
        """At the best weights; for regression at unit noise."""
        return self.evidence.curvature


def train(
    model: nn.Module,
    loader: Iterable[Any],
    likelihood: Likelihood,
    *,
    estimator: Estimator = kflr,
    prior: Prior | str = "per_tensor",
    precision: float | int | Tensor = 1.0,
    sigma: float | int | Tensor | None = None,
    optimizer_cls: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
    optimizer_kwargs: Mapping[str, Any] | None = None,
    scheduler_cls: Callable[..., Any] | None = None,
    scheduler_kwargs: Mapping[str, Any] | None = None,
    scheduler_per_batch: bool = False,
    epochs: int = 300,
    burn_in: int = 0,
    every: int = 1,
    hyper_steps: int = 100,
    hyper_lr: float | int = 0.1,
    temperature: float | int = 1.0,
    fixed_noise: bool = False,
    points: int | None = None,
    noise_power: int = 2,
    generator: torch.Generator | None = None,
    callback: Callable[[Epoch], object] | None = None,
) -> Trained:
    """Trains the model in place, and leaves it with the weights of largest evidence.

    The evidence is evaluated, in eval mode, after each epoch past `burn_in` whose number divides by `every`, and after
    the last. `prior` is a `Prior` over all trainable weights, or the name of a structure that starts at `precision`.
    `sigma` is the noise level that regression starts from (that of the likelihood unless given), and stays at with
    `fixed_noise`. The gradient of a regression is taken at unit noise, so that a learning rate means the same whatever
    sigma is. `points` is N; without it the loader is counted in one pass over it. `noise_power` is that
    of `Evidence`. A scheduler takes a step per epoch,
    or per batch; `optimizer_kwargs` are {'lr': 1e-3} unless given.

    A model in train mode is trained with each module in its own mode, so that a frozen BatchNorm stays frozen; one in
    eval mode is put into train mode. On the way out every module has the mode it came with. After an exception or an
    interruption the model keeps its last weights.

    With a `generator`, all randomness (dropout, the order of a loader without a generator of its own, drawn curvature)
    follows it and torch's global generator stays as it was; without one, the global generator is used.
    """
    _check_numbers(epochs=epochs, every=every, burn_in=burn_in, steps=hyper_steps, lr=hyper_lr, temperature=temperature)
    if burn_in >= epochs:
        raise ParameterError(
            f"burn_in is {burn_in} with {epochs} epochs, so the evidence would never be evaluated; expected a smaller "
            "burn_in, or more epochs."
        )
    if points is not None:
        _check_numbers(points=points)
    space = ParamSpace.of(model)
    level = _level(likelihood, sigma, space, fixed_noise)
    start = _prior(prior, precision, space)
    now = Tuned(start, torch.ones_like(start.precisions[0]) if level is None else level, start.logdet(), False, 0)
    state = Hyper.of(start, level is not None and not fixed_noise)
    with _modes(model), _following(generator, space.device):
        first, counted = _count(loader, points)
        how = level is not None, temperature, counted, noise_power
        run = _Run(loader, likelihood, Tangent(model, space), estimator, *how)
        run.check(first, start, generator)
        optimiser = _built(optimizer_cls, list(run.tangent.parameters.values()), optimizer_kwargs or {"lr": 1e-3})
        scheduler = None if scheduler_cls is None else _built(scheduler_cls, optimiser, scheduler_kwargs or {})
        losses, values, evaluated, best = [], [], [], None
        for number in range(1, epochs + 1):
            losses.append(run.epoch(number, optimiser, now, scheduler if scheduler_per_batch else None))
            if not scheduler_per_batch:
                _advance(scheduler, losses[-1])
            evaluate, better = number == epochs or (number > burn_in and number % every == 0), False
            if evaluate:
                evidence = run.evidence(generator)
                options = {"temperature": temperature, "fixed_noise": fixed_noise, "state": state}
                now = adam(evidence, now.prior, now.sigma, hyper_steps, hyper_lr, **options)
                values.append(float(now.log_marginal))
                evaluated.append(number)
                better = best is None or values[-1] > float(best[0].log_marginal)
                if better:
                    best = now, evidence, number, _copy(model)
            if callback is not None:
                callback(Epoch(number, losses[-1], now if evaluate else None, better))
        assert best is not None
        tuned, evidence, number, weights = best
        optimiser.zero_grad(set_to_none=True)
        _restore(model, weights)
    history = tuple(values), tuple(losses)
    return Trained(tuned.prior, tuned.sigma, *history, evidence, number, weights, tuple(evaluated), tuple(state.values))


@dataclass(frozen=True, eq=False)
class _Run:
    """What does not change while a model is trained. `level`: whether there is a noise level sigma."""

    loader: Iterable[Any]
    likelihood: Likelihood
    tangent: Tangent
    estimator: Estimator
    level: bool
    temperature: float | int
    points: int
    noise_power: int

    def at(self, sigma: float) -> Likelihood:
        return (
            replace(self.likelihood, sigma=sigma)
            if isinstance(self.likelihood, Gaussian) and self.level
            else self.likelihood
        )

    def epoch(self, number: int, optimiser: torch.optim.Optimizer, now: Tuned, scheduler: Any) -> float:
        """One pass of steps; the mean of the loss over data points."""
        space, likelihood = self.tangent.space, self.at(float(now.sigma))
        scale = self.temperature * float(now.sigma) ** 2
        total = count = 0
        for batch, (x, y) in enumerate(_pairs(self.loader)):
            seen: list[float] = []
            weight = batch_size(x)

            def closure(x: Any = x, y: Any = y, weight: int = weight, seen: list[float] = seen) -> float:
                optimiser.zero_grad()
                with torch.enable_grad():
                    f = call(self.tangent.model, x)
                    likelihood.check(f, y)
                    fit = likelihood.log_prob(f, y).sum() / (weight * self.temperature)
                    loss = now.prior.scatter(space.ravel(self.tangent.parameters)) / (2 * self.points) - fit
                    seen.append(float(loss.detach()))
                    if not isfinite(seen[-1]):
                        raise DataError(
                            f"the loss is {seen[-1]}; expected a finite number. Use a smaller learning rate, or check "
                            "the data."
                        )
                    (loss * scale).backward()
                return seen[-1] * scale

            with _named(number, batch):
                optimiser.step(closure)
            _advance(scheduler, seen[0])
            total, count = total + weight * seen[0], count + weight
        if not count:
            raise DataError(f"the loader yields no batch in epoch {number}; expected it to start again in each epoch.")
        return total / count

    def check(self, batch: tuple[Any, Any], prior: Prior, generator: torch.Generator | None) -> None:
        """Refuses, before any step, a model that the estimator has no rule for or a prior that it cannot carry."""
        different = 1 + torch.arange(len(prior.precisions)) / len(prior.precisions)
        evidence = replace(self, loader=[batch]).evidence(generator)
        evidence.precision(prior.with_precisions(different.to(prior.precisions)))

    def evidence(self, generator: torch.Generator | None) -> Evidence:
        """Curvature and fit at the present weights, in eval mode, at unit noise where there is a noise level."""
        model, space, likelihood = self.tangent.model, self.tangent.space, self.at(1.0)
        with unchanged(model):
            model.eval()
            observed = _Observed(self.loader, model, likelihood)
            curvature = self.estimator(self.tangent, likelihood, observed, generator=generator)
        mean = space.values(model)
        if self.level:
            fit = GaussianFit(observed.targets, mean.new_tensor(observed.squares))
            return Evidence(curvature, mean, fit, self.noise_power)
        return Evidence(curvature, mean, mean.new_tensor(observed.log_likelihood))


@dataclass(eq=False)
class _Observed:
    """The loader's batches; once they have all been taken, how well the model fits those very batches."""

    loader: Iterable[Any]
    model: nn.Module
    likelihood: Likelihood
    targets: int = 0
    squares: float = 0.0
    log_likelihood: float = 0.0

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        self.targets, self.squares, self.log_likelihood = 0, 0.0, 0.0
        for x, y in _pairs(self.loader):
            yield x, y  # first: the estimator names what is wrong with a batch
            with torch.no_grad():
                f = call(self.model, x)
                self.log_likelihood += float(self.likelihood.log_prob(f, y).sum())
                if isinstance(self.likelihood, Gaussian):
                    self.targets += y.numel()
                    self.squares += float((y - f).double().square().sum())


# -- details --------------------------------------------------------------------------------------------------------


def _check_numbers(**values: float | int) -> None:
    """Counts are at least 1 (or 0, where nothing is something to ask for), rates and temperature are positive."""
    least = {"epochs": 1, "every": 1, "burn_in": 0, "steps": 0, "points": 1}
    for name, value in values.items():
        if name in least and value < least[name]:
            raise ParameterError(f"{name} is {value}; expected a whole number >= {least[name]}.")
        if name not in least and not 0 < value < float("inf"):
            raise ParameterError(f"{name} is {value}; expected a finite number > 0.")


def _prior(prior: Prior | str, precision: float | int | Tensor, space: ParamSpace) -> Prior:
    if isinstance(prior, str):
        if prior not in STRUCTURES:
            near = get_close_matches(prior, STRUCTURES, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"expected one of {list(STRUCTURES)}."
            raise ParameterError(f"unknown prior structure {prior!r}; {hint}")
        return STRUCTURES[prior](space, precision)
    if prior.size != space.size:
        raise ParameterError(
            f"the prior is over {prior.size} weights and the model trains {space.size}; expected as many. Build it "
            "with ParamSpace.of(model)."
        )
    return prior


def _level(likelihood: Likelihood, sigma: float | int | Tensor | None, space: ParamSpace, fixed: bool) -> Tensor | None:
    """The noise level to start from; None for a likelihood without one, or with one per output that is not tuned."""
    if isinstance(likelihood, Gaussian):
        own = torch.as_tensor(likelihood.sigma)
        if own.numel() == 1 or sigma is not None:
            value = torch.as_tensor(own if sigma is None else sigma, dtype=space.dtype, device=space.device).detach()
            if value.numel() != 1 or not bool(torch.isfinite(value).all()) or float(value) <= 0:
                raise LikelihoodError(f"sigma is {value.tolist()}; expected one finite number > 0.")
            return value.reshape(())
        if not fixed:
            raise LikelihoodError(
                f"the likelihood has {own.numel()} noise levels, and the evidence tunes one; expected Gaussian(sigma) "
                "with a number, or fixed_noise=True to leave them as they are."
            )
        return None
    if sigma is not None and float(sigma) != 1:
        raise LikelihoodError(f"sigma is {float(sigma)} for {type(likelihood).__name__}, which has no noise level.")
    return None


def _built(build: Callable[..., Any], what: Any, options: Mapping[str, Any]) -> Any:
    try:
        return build(what, **options)
    except (TypeError, ValueError) as error:
        name = getattr(build, "__name__", "the optimiser")
        raise ParameterError(f"{name} refuses {dict(options)}: {error}; expected arguments that it takes.") from error


def _advance(scheduler: Any, loss: float) -> None:
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        scheduler.step(loss)
    elif scheduler is not None:
        scheduler.step()


def _pairs(loader: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    for number, batch in enumerate(loader):
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise DataError(
                f"batch {number} is a {type(batch).__name__}; expected a pair (inputs, targets). Give a loader of "
                "pairs, or a list of them: [(x, y)]."
            )
        yield batch[0], batch[1]


def _count(loader: Iterable[Any], points: int | None) -> tuple[tuple[Any, Any], int]:
    """The first batch, and N: counted, as the length of a dataset is another number where the last batch is dropped."""
    if iter(loader) is loader:
        raise DataError(
            f"the loader is a {type(loader).__name__} that can be read only once; expected one that starts again in "
            "each epoch. Give a DataLoader, or a list of pairs."
        )
    first, counted = None, 0
    for x, y in _pairs(loader):
        first = (x, y) if first is None else first
        counted += batch_size(x)
        if points is not None:
            break
    if first is None:
        raise DataError("the loader yields no batch; expected at least one (x, y) pair. Check the dataset, drop_last.")
    return first, counted if points is None else points


@contextmanager
def _named(epoch: int, batch: int) -> Iterator[None]:
    try:
        yield
    except LapwingError as error:
        raise type(error)(f"epoch {epoch}, batch {batch}: {error}") from error


@contextmanager
def _modes(model: nn.Module) -> Iterator[None]:
    """Train mode inside, as `train` documents it; every module's own mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        if not model.training:
            model.train()
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def _following(generator: torch.Generator | None, device: torch.device) -> Iterator[None]:
    """The global generator follows `generator` inside, and is as before afterwards: dropout takes no other one."""
    if generator is None:
        yield
        return
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _copy(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in _tensors(model).items()}


@torch.no_grad()
def _restore(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    for name, tensor in _tensors(model).items():
        tensor.copy_(state[name])
