"""How `optimize_prior_precision` finds its numbers: by the evidence, or by held-out data. No state of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing import evidence
from lapwing.errors import DataError, OptionError, ParameterError
from lapwing.estimate.data_pass import pair
from lapwing.evidence import grid as validation
from lapwing.laplace.hyper import HyperParameters, precisions_of, prior_of
from lapwing.laplace.names import PriorStructure, TuningMethod, choose
from lapwing.likelihoods import Bernoulli, Categorical, Gaussian
from lapwing.linalg import Curvature
from lapwing.params import ParamSpace
from lapwing.training import adam

if TYPE_CHECKING:
    from lapwing.laplace.base import BaseLaplace

METHODS = tuple(method.value for method in TuningMethod)
logger = logging.getLogger("lapwing")


@dataclass(frozen=True)
class Grid:
    """`size` precisions, base ** exponent with exponents evenly spaced from `low` to `high`."""

    low: float | int
    high: float | int
    size: int
    base: float | int = 10.0

    def __post_init__(self) -> None:
        if self.size < 1 or not self.low <= self.high or not 0 < self.base < float("inf") or self.base == 1:
            raise ParameterError(
                f"a grid of {self.size} precisions {self.base} ** ({self.low} ... {self.high}); expected at least one "
                "value, exponents in order, and a base > 0 other than 1."
            )

    def values(self, like: Tensor) -> Float[Tensor, " size"]:
        exponents = torch.linspace(self.low, self.high, self.size, dtype=torch.float64, device=like.device)
        return (self.base**exponents).to(like.dtype)


@dataclass(frozen=True, eq=False)
class Start:
    """Where a search by the evidence begins, and whether the noise is searched as well."""

    precision: Tensor
    mean: Tensor
    sigma: Tensor
    noise: bool


def starting_precision(space: ParamSpace, structure: str, value: float | int | Tensor) -> Float[Tensor, " groups"]:
    """`value` once for each precision that the structure has."""
    structure = choose(structure, [each.value for each in PriorStructure], "prior_structure")
    sizes = precisions_of(space)
    start = torch.as_tensor(value, dtype=space.dtype, device=space.device).detach().reshape(-1)
    if len(start) not in (1, sizes[structure]):
        raise ParameterError(
            f"init_prior_prec has {len(start)} entries; expected 1 or {sizes[structure]} for prior_structure "
            f"{structure!r}."
        )
    if not bool(torch.isfinite(start).all()) or bool((start <= 0).any()):
        raise ParameterError(f"init_prior_prec is {start.tolist()[:5]}; expected finite numbers > 0.")
    return start.expand(sizes[structure]).clone()


def check_options(method: str, noise: bool, counts: Iterable[float | int] | None) -> None:
    """Options that the chosen method would not read."""
    if noise and method in ("gridsearch", "pseudo_data"):
        raise OptionError(f"optimize_sigma_noise=True with method={method!r}; expected 'marglik', 'adam' or 'mackay'.")
    if counts is not None and method != "pseudo_data":
        raise OptionError(f"counts were given for method={method!r}; expected 'pseudo_data'. Leave them out.")


def check_scalar(structure: str, method: str) -> None:
    if choose(structure, [each.value for each in PriorStructure], "prior_structure") != "scalar":
        raise OptionError(
            f"prior_structure={structure!r} with method={method!r}, which searches one number; expected 'scalar'. "
            "Use method='marglik' or 'mackay' for several precisions."
        )


def by_evidence(
    hyper: HyperParameters, method: str, start: Start, n_steps: int, lr: float
) -> tuple[Tensor, Tensor | None]:
    """Precisions, and the noise level where it was searched."""
    if start.noise and not hyper.evidence.has_noise:
        raise OptionError("optimize_sigma_noise=True for a likelihood without a noise level; expected False.")
    prior = prior_of(hyper.space, start.precision, start.mean.detach())
    arguments = hyper.evidence, prior, start.sigma.detach()
    shared = {"temperature": float(hyper.temperature.detach()), "fixed_noise": not start.noise}
    if method == "mackay":
        found = evidence.mackay(*arguments, **shared)
    elif method == "adam":
        found = adam(*arguments, steps=n_steps, lr=lr, **shared)
    else:
        found = evidence.gradient(*arguments, rounds=n_steps, **shared)
    return found.prior.precisions, found.sigma if start.noise else None


def by_validation(
    laplace: BaseLaplace,
    pairs: Iterable[Any],
    grid: Grid,
    pred_type: str,
    loss: Callable | None,
    link: str,
    n_samples: int,
    generator: torch.Generator | None,
) -> Float[Tensor, " one"]:
    """The precision with the smallest loss on held-out data.

    Closed forms linearise the network once per batch and score all precisions at once; draws (pred_type "nn", or link
    "mc") are made for one precision after the other, each time from the same random numbers.
    """
    values = grid.values(laplace.prior_precision)
    if laplace._pred_type(pred_type) == "glm" and link != "mc":
        found = validation.grid(
            _at_noise(laplace),
            laplace.linearise,
            laplace.distribution,
            pairs,
            values,
            sigma=laplace.sigma_noise,
            temperature=laplace.temperature,
            score=_score(laplace, loss),
            link=link,
            samples=n_samples,
            generator=generator,
        )
        return values[found.index].reshape(1)
    _check_no_loss(loss)
    candidates = [(value, laplace.temperature) for value in values]
    scores = _scores_of_draws(laplace, pairs, candidates, (pred_type, n_samples), generator)
    return values[validation.smallest(scores, [f"prior precision {float(v):.6g}" for v in values])].reshape(1)


def _check_no_loss(loss: Callable | None) -> None:
    if loss is not None:
        raise OptionError(
            "a loss of your own goes with predictions in closed form; found pred_type='nn' or link_approx='mc', which "
            "score by the predictive density of the draws. Leave loss out, or use pred_type='glm' and 'probit'."
        )


def _at_noise(laplace: BaseLaplace) -> Curvature:
    """The curvature that 1 / sigma^2 still multiplies, as validation expects it."""
    rest = laplace.evidence.noise_power - 2
    return laplace.fitted.curvature * float(laplace.sigma_noise) ** -rest if rest else laplace.fitted.curvature


def _score(laplace: BaseLaplace, loss: Callable | None) -> validation.Score | None:
    """A function of the user: loss(probabilities, y), and loss(mean, variance, y) where numbers are predicted."""
    if (
        loss is None
        or isinstance(loss, validation.Metric)
        or isinstance(laplace.distribution, (Categorical, Bernoulli))
    ):
        return loss

    def score(prediction: Tensor | tuple[Tensor, Tensor], targets: Tensor) -> object:
        if isinstance(prediction, Tensor):  # draws of the outputs
            prediction = prediction.mean(0), prediction.var(0)
        return loss(*prediction, targets)

    return score


def _scores_of_draws(
    laplace: BaseLaplace,
    pairs: Iterable[Any],
    candidates: Sequence[tuple[Tensor, float | Tensor]],
    draws: tuple[str, int],
    generator: torch.Generator | None,
) -> Float[Tensor, " k"]:
    """Mean over held-out points of -log of the mean over draws of p(y | f), for (precision, temperature) each."""
    kept, before = [pair(batch) for batch in pairs], (laplace.prior_precision, laplace.temperature)
    likelihood = laplace.distribution
    if isinstance(likelihood, Gaussian) and laplace.has_noise:
        likelihood = replace(likelihood, sigma=float(laplace.sigma_noise))
    seed = torch.initial_seed() if generator is None else generator.initial_seed()
    scores = []
    try:
        for precision, temperature in candidates:
            laplace.prior_precision, laplace.temperature = precision, temperature
            numbers = torch.Generator(device=candidates[0][0].device).manual_seed(seed)
            total, points = 0.0, 0
            for x, y in kept:
                outputs = laplace.functional_samples(x, *draws, generator=numbers)
                likelihood.check(outputs[0], y)
                each = torch.stack([likelihood.log_prob(f, y) for f in outputs])
                total -= float((torch.logsumexp(each, 0) - log(len(each))).sum())
                points += len(y)
            scores.append(total / max(points, 1))
    finally:
        laplace.prior_precision, laplace.temperature = before
    if not kept:
        raise DataError("the validation loader yields no batch; expected at least one (x, y) pair.")
    return torch.tensor(scores, dtype=torch.float64)


def by_pseudo_data(
    laplace: BaseLaplace,
    pairs: Iterable[Any],
    grid: Grid,
    counts: Iterable[float | int] | None,
    pred_type: str,
    loss: Callable | None,
    link: str,
    n_samples: int,
    generator: torch.Generator | None,
) -> tuple[Float[Tensor, " one"], float]:
    """The thesis' (N, lambda): a precision, and the temperature that makes n_data points count as N.

    Without `counts` N goes from a thousandth of the data to ten times as many, in 17 steps. pred_type "nn", as in the
    thesis, draws networks for one pair after the other, each time from the same random numbers.
    """
    values = grid.values(laplace.prior_precision)
    points = laplace.n_data
    numbers = torch.logspace(-3, 1, 17, dtype=torch.float64) * points if counts is None else list(counts)
    if pred_type == "nn":
        _check_no_loss(loss)
        chosen = validation.check_counts(numbers, points).tolist()
        candidates = [(value, points / number) for number in chosen for value in values]
        scores = _scores_of_draws(laplace, pairs, candidates, (pred_type, n_samples), generator)
        names = [f"prior precision {float(value):.6g}, temperature {each:.6g}" for value, each in candidates]
        precision, temperature = candidates[validation.smallest(scores, names)]
        return precision.reshape(1), float(temperature)
    found = validation.pseudo_data(
        _at_noise(laplace),
        laplace.linearise,
        laplace.distribution,
        pairs,
        numbers,
        values,
        points=points,
        sigma=laplace.sigma_noise,
        score=_score(laplace, loss),
        link=link,
        samples=n_samples,
        generator=generator,
    )
    return values[found.index[1]].reshape(1), points / found.best[0]


def report(hyper: HyperParameters, method: str, verbose: bool) -> None:
    level = logging.INFO if verbose else logging.DEBUG
    logger.log(level, "%s: prior precision %s", method, hyper.prior_precision.tolist()[:5])
