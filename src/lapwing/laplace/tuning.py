"""How `optimize_prior_precision` finds its numbers: by the evidence, or by held-out data. No state of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing import evidence
from lapwing.errors import DataError, OptionError, ParameterError
from lapwing.estimate.data_pass import pair
from lapwing.evidence import Evidence, EvidenceAtMode, Tuned
from lapwing.evidence import grid as validation
from lapwing.laplace.hyper import HyperParameters, precisions_of, prior_of
from lapwing.laplace.linear_modes import checked
from lapwing.laplace.names import PriorStructure, TunedAt, TuningMethod, choose
from lapwing.likelihoods import Likelihood
from lapwing.linalg import Curvature, LinearMap
from lapwing.params import ParamSpace
from lapwing.posterior import Gaussian as GaussianPosterior
from lapwing.priors import PriorGroups
from lapwing.training import adam

METHODS = tuple(method.value for method in TuningMethod)
PLACES = tuple(place.value for place in TunedAt)
TRACES = ("exact", "samples")
logger = logging.getLogger("lapwing")


@dataclass(frozen=True)
class Exponents:
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
class Search:
    """A fitted posterior as a search sees it; nothing of it is changed.

    `outputs(posterior, x, pred_type, n, generator)` draws n outputs of the network under any Gaussian over its weights.
    """

    evidence: Evidence
    space: ParamSpace
    hyper: HyperParameters
    points: int
    distribution: Likelihood
    linearise: Callable[[Any], LinearMap]
    outputs: Callable[[GaussianPosterior, Any, str, int, torch.Generator | None], Tensor]

    def posterior(self, precision: Tensor, temperature: float | Tensor) -> GaussianPosterior:
        """The posterior under another prior precision and temperature."""
        prior = prior_of(self.space, precision.reshape(1), self.hyper.prior_mean)
        return GaussianPosterior(
            self.evidence.mean, self.evidence.precision(prior, self.hyper.sigma_noise, temperature)
        )

    @property
    def curvature(self) -> Curvature:
        """The curvature that 1 / sigma^2 still multiplies, as validation expects it."""
        rest = self.evidence.noise_power - 2
        curvature = self.evidence.curvature
        return curvature * float(self.hyper.sigma_noise) ** -rest if rest else curvature


def starting_precision(
    space: ParamSpace, structure: str, value: float | int | Tensor, groups: PriorGroups | None = None
) -> Float[Tensor, " groups"]:
    """`value` once for each precision that the structure has."""
    structure = choose(structure, [each.value for each in PriorStructure], "prior_structure")
    sizes = precisions_of(space, groups)
    start = torch.as_tensor(value, dtype=space.dtype, device=space.device).detach().reshape(-1)
    if len(start) not in (1, sizes[structure]):
        raise ParameterError(
            f"init_prior_prec has {len(start)} entries; expected 1 or {sizes[structure]} for prior_structure "
            f"{structure!r}."
        )
    if not bool(torch.isfinite(start).all()) or bool((start <= 0).any()):
        raise ParameterError(f"init_prior_prec is {start.tolist()[:5]}; expected finite numbers > 0.")
    return start.expand(sizes[structure]).clone()


def check_options(
    method: str,
    noise: bool,
    counts: Iterable[float | int] | None,
    at: str = "trained",
    train_loader: Iterable[Any] | None = None,
    traces: str = "exact",
    curvature: str = "structure",
) -> None:
    """Options that the chosen method would not read."""
    if noise and method in ("gridsearch", "pseudo_data"):
        raise OptionError(f"optimize_sigma_noise=True with method={method!r}; expected 'marglik', 'adam' or 'em'.")
    if counts is not None and method != "pseudo_data":
        raise OptionError(f"counts were given for method={method!r}; expected 'pseudo_data'. Leave them out.")
    if at == "linear_mode" and method not in ("marglik", "em", "mackay"):
        raise OptionError(f"at='linear_mode' with method={method!r}; expected 'marglik' or 'em'.")
    if at == "linear_mode" and train_loader is None:
        raise OptionError(
            "at='linear_mode' has no train_loader; expected the data of the fit, from which the mode is found."
        )
    if at == "trained" and train_loader is not None:
        raise OptionError(
            "train_loader was given with at='trained', which needs no data; expected at='linear_mode'. Leave it out; "
            "held-out data are val_loader."
        )
    if traces == "samples" and method not in ("em", "mackay"):
        raise OptionError(f"traces='samples' with method={method!r}; expected 'em'. Leave it out.")
    if curvature == "exact" and at != "linear_mode":
        raise OptionError(
            "curvature='exact' with at='trained', where the evidence is that of the posterior's own structure; "
            "expected at='linear_mode' and train_loader, which it is formed from. Or fit hessian_structure='full' or "
            "'gp'."
        )
    if curvature == "exact" and traces == "samples":
        raise OptionError("traces='samples' with curvature='exact'; expected traces='exact'. Leave one of them out.")


def check_scalar(structure: str, method: str) -> None:
    if choose(structure, [each.value for each in PriorStructure], "prior_structure") != "scalar":
        raise OptionError(
            f"prior_structure={structure!r} with method={method!r}, which searches one number; expected 'scalar'. "
            "Use method='marglik' or 'em' for several precisions."
        )


def by_evidence(
    search: Search,
    at_mode: EvidenceAtMode | None,
    method: str,
    start: Float[Tensor, " groups"],
    noise: bool,
    n_steps: int,
    lr: float,
    samples: int | None = None,
    generator: torch.Generator | None = None,
) -> Tuned:
    """What is found from `start`: at the trained weights, or jointly with the linear mode where `at_mode` is given.

    `samples`: of the posterior, where gamma is to come from draws.
    """
    if noise and not search.evidence.has_noise:
        raise OptionError("optimize_sigma_noise=True for a likelihood without a noise level; expected False.")
    hyper = search.hyper
    prior = prior_of(search.space, start, hyper.prior_mean.detach(), hyper.prior_groups)
    sigma, temperature = hyper.sigma_noise.detach(), float(hyper.temperature.detach())
    shared = {"temperature": temperature, "fixed_noise": not noise}
    where = at_mode or search.evidence
    if method in ("em", "mackay"):
        tuned = evidence.em(where, prior, sigma, rounds=10 * n_steps, samples=samples, generator=generator, **shared)
    elif method == "adam":
        tuned = adam(search.evidence, prior, sigma, steps=n_steps, lr=lr, **shared)
    else:
        tuned = evidence.gradient(where, prior, sigma, rounds=n_steps, **shared)
    if at_mode is None:
        return tuned
    mode = checked(at_mode.mode(tuned.prior, tuned.sigma, hyper.temperature.detach()))
    # a search comes to rest at a stale mode, too, once its passes are used up
    return replace(tuned, mode=mode, converged=tuned.converged and mode.converged)


def by_validation(
    search: Search,
    pairs: Iterable[Any],
    grid: Exponents,
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
    hyper = search.hyper
    values = grid.values(hyper.prior_precision)
    if pred_type == "glm" and link != "mc":
        best = validation.grid(
            search.curvature,
            search.linearise,
            search.distribution,
            pairs,
            values,
            sigma=hyper.sigma_noise,
            temperature=hyper.temperature,
            score=_score(search.distribution, loss),
            link=link,
            samples=n_samples,
            generator=generator,
        )
        return values[best.index].reshape(1)
    _check_no_loss(loss)
    candidates = [(value, hyper.temperature) for value in values]
    scores = _scores_of_draws(search, pairs, candidates, (pred_type, n_samples), generator)
    return values[validation.smallest(scores, [f"prior precision {float(v):.6g}" for v in values])].reshape(1)


def _check_no_loss(loss: Callable | None) -> None:
    if loss is not None:
        raise OptionError(
            "a loss of your own goes with predictions in closed form; found pred_type='nn' or link_approx='mc', which "
            "score by the predictive density of the draws. Leave loss out, or use pred_type='glm' and 'probit'."
        )


def _score(distribution: Likelihood, loss: Callable | None) -> validation.Score | None:
    """A function of the user: loss(probabilities, y), and loss(mean, variance, y) where numbers are predicted."""
    if loss is None or isinstance(loss, validation.Metric) or distribution.has_classes:
        return loss

    def score(prediction: Tensor | tuple[Tensor, Tensor], targets: Tensor) -> object:
        if isinstance(prediction, Tensor):  # draws of the outputs
            prediction = prediction.mean(0), prediction.var(0)
        return loss(*prediction, targets)

    return score


def _scores_of_draws(
    search: Search,
    pairs: Iterable[Any],
    candidates: Sequence[tuple[Tensor, float | Tensor]],
    draws: tuple[str, int],
    generator: torch.Generator | None,
) -> Float[Tensor, " k"]:
    """Mean over held-out points of -log of the mean over draws of p(y | f), for (precision, temperature) each."""
    kept, likelihood = [pair(batch) for batch in pairs], search.distribution
    if not kept:
        raise DataError("the validation loader yields no batch; expected at least one (x, y) pair.")
    if search.evidence.has_noise:
        likelihood = likelihood.at_noise(float(search.hyper.sigma_noise))
    seed = torch.initial_seed() if generator is None else generator.initial_seed()
    scores = []
    for precision, temperature in candidates:
        posterior = search.posterior(precision, temperature)
        numbers = torch.Generator(device=candidates[0][0].device).manual_seed(seed)
        total, points = 0.0, 0
        for x, y in kept:
            outputs = search.outputs(posterior, x, *draws, numbers)
            likelihood.check(outputs[0], y)
            each = torch.stack([likelihood.log_prob(f, y) for f in outputs])
            total -= float((torch.logsumexp(each, 0) - log(len(each))).sum())
            points += len(y)
        scores.append(total / max(points, 1))
    return torch.tensor(scores, dtype=torch.float64)


def by_pseudo_data(
    search: Search,
    pairs: Iterable[Any],
    grid: Exponents,
    counts: Iterable[float | int] | None,
    pred_type: str,
    loss: Callable | None,
    link: str,
    n_samples: int,
    generator: torch.Generator | None,
) -> tuple[Float[Tensor, " one"], float]:
    """The thesis' (N, lambda): a precision, and the temperature that makes n_data points count as N.

    Without `counts` N goes from a thousandth of the data to ten times as many, in 17 steps. pred_type "nn", as in the
    thesis, and link "mc" draw outputs for one pair after the other, each time from the same random numbers.
    """
    values = grid.values(search.hyper.prior_precision)
    points = search.points
    numbers = torch.logspace(-3, 1, 17, dtype=torch.float64) * points if counts is None else list(counts)
    if pred_type == "nn" or link == "mc":
        _check_no_loss(loss)
        chosen = validation.check_counts(numbers, points).tolist()
        candidates = [(value, points / number) for number in chosen for value in values]
        scores = _scores_of_draws(search, pairs, candidates, (pred_type, n_samples), generator)
        names = [f"prior precision {float(value):.6g}, temperature {each:.6g}" for value, each in candidates]
        precision, temperature = candidates[validation.smallest(scores, names)]
        return precision.reshape(1), float(temperature)
    found = validation.pseudo_data(
        search.curvature,
        search.linearise,
        search.distribution,
        pairs,
        numbers,
        values,
        points=points,
        sigma=search.hyper.sigma_noise,
        score=_score(search.distribution, loss),
        link=link,
        samples=n_samples,
        generator=generator,
    )
    return values[found.index[1]].reshape(1), points / found.best[0]


def report(prior_precision: Tensor, method: str, verbose: bool) -> None:
    level = logging.INFO if verbose else logging.DEBUG
    logger.log(level, "%s: prior precision %s", method, prior_precision.tolist()[:5])
