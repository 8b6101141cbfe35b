"""The linear mode theta*: the optimum of the loss of a network that is linearised at its trained weights theta~.

    L(theta) = sum_n -log p(y_n | f_n + J_n (theta - theta~)) / (sigma^2 T) + 1/2 (theta - m)^T Lambda (theta - m)

Convex where -log p is convex in f, so that theta* is the only optimum; elsewhere it is a stationary point. The trained
weights are far from it where training stopped early, or where normalisation makes the scale of weights a matter of
chance. The evidence then has to be taken at theta*.

    Gaussian noise, and sum J^T J as a matrix or by its rows   one solve; a pass to begin with, and one to verify
    any likelihood, few outputs N C < P                        Newton's method among the outputs; a pass for their
                                                               kernels, and one to verify (`FunctionSpace`)
    Gaussian noise                                             conjugate gradients, one pass per product
    others                                                     Newton's method: conjugate gradients, and a line search
                                                               in one pass

A curvature preconditions, of whatever structure: the nearer to the exact one, the fewer passes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.directions import descend
from lapwing.errors import CurvatureError
from lapwing.evidence.exact_evidence import ExactEvidence
from lapwing.evidence.function_space import FunctionSpace
from lapwing.evidence.linearised_data import SIZES, LinearisedData, Point
from lapwing.evidence.marginal import Evidence, GaussianFit, lowest_noise
from lapwing.linalg import Curvature, Independent
from lapwing.priors import Prior

ROUNDS = 1000
"""Steps of Newton's method that a search takes at most; passes over the data end it sooner."""
PRODUCTS = 300
"""Products that conjugate gradients take at most for one of them."""
FORCED = 0.5
"""What conjugate gradients leave of the gradient in a step of Newton's method that begins far from the optimum.

A step's model of the loss is soon left behind there, and its passes are better spent on the next step.
"""
LOOSE = 1e-2
"""The relative residual that theta* may have while a search for the prior still moves by a factor of e."""
REFINED = 5
"""How often a closed form is verified and refined before conjugate gradients take over."""


@dataclass(frozen=True, eq=False)
class LinearMode:
    """theta* under one prior, noise level and temperature, and how well it was found.

    `evidence` is that of the linearised network at theta*: its mean is theta*, its fit that of the outputs
    f(x; theta~) + J(x) (theta* - theta~), and its curvature the one at the trained network's outputs. `before` and
    `after` are norms of the gradient of the loss, at theta~ and at theta*; `scale` is what they are measured by, the
    norm of the data's part of it at theta~ plus that of the prior's part at theta*. `rounds`, `products` and `passes`
    (over the data) are all that were made for it, also by a search for the prior.
    """

    evidence: Evidence
    offset: Float[Tensor, " params"]
    """theta* - theta~."""
    prior: Prior
    sigma: Float[Tensor, ""]
    temperature: Float[Tensor, ""]
    before: float
    after: float
    scale: float
    converged: bool
    rounds: int
    products: int
    passes: int
    exact_log_marginal: Float[Tensor, ""] | None = None
    """log Z at theta* by the exact curvature of all data, where that was asked for."""

    @property
    def weights(self) -> Float[Tensor, " params"]:
        """theta*, flat."""
        return self.evidence.mean

    @property
    def relative(self) -> float:
        """The residual: `after` / `scale`."""
        return self.after / self.scale if self.scale else 0.0

    @property
    def log_marginal(self) -> Float[Tensor, ""]:
        """log Z at theta*, by the posterior's own structure."""
        return self.evidence.log_marginal(self.prior, self.sigma, self.temperature)

    def __repr__(self) -> str:
        """What was found, in one line."""
        exact = "" if (value := self.exact_log_marginal) is None else f", {float(value):.6g} by the exact curvature"
        return (
            f"LinearMode: {'found' if self.converged else 'not found'} in {self.passes} passes over the data; gradient "
            f"{self.before:.3g} before, {self.after:.3g} after, {self.relative:.1e} relative; log evidence "
            f"{float(self.log_marginal):.6g}{exact}"
        )


@dataclass(eq=False)
class EvidenceAtMode:
    """The evidence at the theta* that goes with every prior: max over theta, instead of at one theta.

    It meets what tuners ask of an `Evidence`. `trained` is the evidence at the trained weights. `solver` has the
    curvature that theta* is solved with, the same or one nearer to the truth; with `exact` it is sum J^T J. With
    `functions` theta* is found among the outputs, whatever the solver. It is searched from where it was last, `point`.
    It is an optimum, so that the derivative of log Z in the prior and in the noise is the one at fixed theta*.

    With `exactly`, log-determinant and traces are those of the exact curvature, by `functions` or by the solver's.
    """

    trained: Evidence
    solver: Evidence
    data: LinearisedData
    exact: bool
    tolerance: float
    start: Point
    """At the trained weights."""
    point: Point
    functions: FunctionSpace | None = None
    exactly: bool = False
    rounds: int = 0
    products: int = 0
    _asked: Tensor | None = field(default=None, repr=False)

    @staticmethod
    @torch.no_grad()
    def of(
        trained: Evidence,
        data: LinearisedData,
        points: int,
        *,
        solver: Curvature | None = None,
        exact: bool = False,
        outputs: int | None = None,
        exactly: bool = False,
        tolerance: float | None = None,
    ) -> EvidenceAtMode:
        """One pass over the data, which must be the `points` that `trained` has seen.

        `outputs` is how many they have in all, where theta* is to be found among them: one more pass, if they fit the
        memory. `solver` is a curvature of second derivatives to solve with, that of `trained` if None. `exact` says
        that it is the sum of J^T H J at the trained weights, which for Gaussian noise is that at all weights.
        `exactly`: the evidence has the log-determinant of that sum, not of the curvature of `trained`.
        """
        start = data.at(torch.zeros_like(trained.mean, dtype=torch.float64))
        data.check(start, trained, points)
        if tolerance is None:
            tolerance = 1e-8 if trained.mean.dtype == torch.float64 else 1e-3
        with_solver = trained if solver is None else replace(trained, curvature=solver, noise_power=2)
        functions = None if outputs is None else FunctionSpace.of(data, outputs)
        if exactly and functions is None and not exact:
            raise CurvatureError(
                "the evidence is to have the exact curvature, and there are neither kernels of the outputs nor an "
                "exact curvature to solve with; expected one of them. Give outputs=, or solver= and exact=True."
            )
        exact = exact and data.likelihood.adds_noise and with_solver.noise_power == 2
        return EvidenceAtMode(trained, with_solver, data, exact, tolerance, start, start, functions, exactly)

    @property
    def has_noise(self) -> bool:
        return self.trained.has_noise

    @property
    def noise_power(self) -> int:
        return 2 if self.exactly else self.trained.noise_power

    @property
    def targets(self) -> int:
        return self.trained.targets

    @property
    def accuracy(self) -> float:
        """To which theta* is known, relatively."""
        return 100 * torch.finfo(self.trained.mean.dtype).eps if self.exact else self.tolerance

    @property
    def least(self) -> float:
        """gamma below which a search raises a precision no further."""
        return self._taken().least

    def rounding(self, prior: Prior) -> Float[Tensor, " groups"]:
        """Of gamma."""
        return self._taken().rounding(prior)

    def noise_range(self) -> tuple[float, float]:
        """Within which sigma is searched: residuals at theta* may be far below those of the trained network.

        They end at the rounding of the targets, and at what a solve resolves.
        """
        if not isinstance(fit := self.start.fit, GaussianFit):
            return 1.0, 1.0
        rms, least = ((total / max(fit.targets, 1)) ** 0.5 for total in (float(fit.squares), self.data.least))
        eps = torch.finfo(fit.squares.dtype).eps
        return max(lowest_noise(fit.squares.dtype), least / 2, eps**0.5 * rms), max(1.0, 1e6 * rms)

    @torch.no_grad()
    def settled(
        self, prior: Prior, sigma: float | Tensor = 1.0, temperature: float | Tensor = 1.0
    ) -> Evidence | ExactEvidence:
        """The evidence at the theta* of this prior, noise level and temperature.

        As good as a search needs it: where these have changed much since the last call, theta* is found less exactly.
        """
        asked = torch.cat([prior.precisions.detach().double().log().cpu(), torch.tensor([float(sigma)]).double().log()])
        before, moved = self._asked, 1.0
        if before is not None and before.shape == asked.shape:
            moved = float((asked - before).abs().max())
        self._asked = asked
        tolerance = self.tolerance if self.exact else max(self.tolerance, min(LOOSE, LOOSE * moved))
        loss = _Loss(self, prior, sigma, temperature)
        if self.functions is None:
            self._search(loss, tolerance, closed=self.exact)
        else:
            self._among_outputs(self.functions, loss, tolerance)
        return self._taken()

    @torch.no_grad()
    def mode(self, prior: Prior, sigma: float | Tensor = 1.0, temperature: float | Tensor = 1.0) -> LinearMode:
        """The theta* of this prior, noise level and temperature, its residual computed from the data."""
        loss = _Loss(self, prior, sigma, temperature)
        if self.functions is not None and loss.norm(self.start) > self.tolerance * loss.scale(self.start):
            self._among_outputs(self.functions, loss, self.tolerance / 10)
            self.point = self.data.at(self.point.away)
        for _ in range(REFINED if self.exact else 0):
            self._search(loss, self.tolerance, closed=True)
            if self.point is not self.start and self.data.left:
                self.point = self.data.at(self.point.away)
            if loss.norm(self.point) <= self.tolerance * loss.scale(self.point):
                break
        self._search(loss, self.tolerance, closed=False)
        after, scale = loss.norm(self.point), loss.scale(self.point)
        like = self.trained.mean
        return LinearMode(
            self._evidence(),
            self.point.away.to(like),
            loss.prior,
            *(torch.as_tensor(each, dtype=like.dtype, device=like.device).detach() for each in (sigma, temperature)),
            before=loss.norm(self.start),
            after=after,
            scale=scale,
            converged=after <= self.tolerance * scale,
            rounds=self.rounds,
            products=self.products,
            passes=self.data.passes,
            exact_log_marginal=self._taken().log_marginal(loss.prior, sigma, temperature) if self.exactly else None,
        )

    def _taken(self) -> Evidence | ExactEvidence:
        """The evidence with the curvature that it is to have."""
        if not self.exactly:
            return self._evidence()
        if self.functions is not None:
            return ExactEvidence(self._evidence(), self.functions)
        return replace(self._evidence(), curvature=self.solver.curvature, noise_power=2)

    def _evidence(self) -> Evidence:
        return replace(
            self.trained, mean=(self.trained.mean.double() + self.point.away).to(self.trained.mean), fit=self.point.fit
        )

    def _among_outputs(self, functions: FunctionSpace, loss: _Loss, tolerance: float) -> None:
        before = functions.steps
        self.point = functions.mode(loss.prior, self.trained.mean, loss.weight, tolerance)
        self.rounds += functions.steps - before

    # -- Newton's method -----------------------------------------------------------------------------------------------

    def _search(self, loss: _Loss, tolerance: float, closed: bool) -> None:
        """Moves `point` to the optimum. `closed`: the curvature says how the gradient changes, without a pass."""
        for _ in range(ROUNDS):
            gradient, goal = loss.gradient(self.point), tolerance * loss.scale(self.point)
            norm = float(gradient.norm())
            if norm <= goal or (not closed and self.data.left < 3):
                return
            self.rounds += 1
            point, goes_on = (self._solved if closed else self._descended)(loss, gradient, goal)
            if point is not None and (goes_on or loss.norm(point) < norm):
                self.point = point
            if not goes_on:
                return

    def _solved(self, loss: _Loss, gradient: Tensor, goal: float) -> tuple[Point, bool]:
        """One solve; another may refine it."""
        step = -loss.precondition(gradient)
        point = self.point.moved(step, self.solver.curvature.mv(step.to(self.trained.mean)).double(), self.data.least)
        return point, loss.norm(point) < float(gradient.norm()) / 2

    def _descended(self, loss: _Loss, gradient: Tensor, goal: float) -> tuple[Point | None, bool]:
        """The next point, None if there is no better one, and whether to go on from there."""
        data, away, norm = self.data, self.point.away, float(gradient.norm())
        quadratic = data.likelihood.adds_noise
        if not quadratic:  # far from the optimum the model of the loss is not worth the passes
            goal = max(goal, min(FORCED, (norm / loss.scale(self.point)) ** 0.5) * norm)
        step, residual = torch.zeros_like(gradient), -gradient
        allowed = min(PRODUCTS, data.left - 2)

        def product(v: Tensor) -> Tensor:
            return loss.weight * data.product(away, v) + loss.precisions * v

        used = descend(product, step, residual, loss.precondition, goal / 3, 0, allowed)
        self.products += used
        if quadratic:
            point = data.at(away + step)
            # a solution that does not halve the true gradient has met the rounding of the products
            return point, used == allowed or loss.norm(point) < norm / 2
        point, rounding = self._along(loss, gradient, step)
        if point is None:
            return None, False
        return point, -float(torch.dot(gradient, step)) > rounding or loss.norm(point) < norm / 2

    def _along(self, loss: _Loss, gradient: Tensor, step: Tensor) -> tuple[Point | None, float]:
        """The longest step that lowers the loss as its slope promises, and the rounding of the loss."""
        here, slope = loss.value(self.point), float(torch.dot(gradient, step))
        rounding = 10 * torch.finfo(self.trained.mean.dtype).eps * (1 + abs(here))
        losses, whole = self.data.along(self.point.away, step)
        for size, found in zip(SIZES, losses, strict=True):
            value = loss.weight * found + loss.prior_value(self.point.away + size * step)
            # half of the slope for a quadratic; a tenth, as a matrix in place of the Hessian may let steps swing
            if value <= here + 0.1 * size * slope + rounding:
                return whole if size == 1 else self.data.at(self.point.away + size * step), rounding
        return None, rounding


class _Loss:
    """L under one prior, noise level and temperature, from what a `Point` knows of the data."""

    def __init__(self, at: EvidenceAtMode, prior: Prior, sigma: float | Tensor, temperature: float | Tensor) -> None:
        self.at, self.prior = at, prior.with_precisions(prior.precisions.detach())
        self.sigma, self.temperature = sigma, temperature
        self.precisions = self.prior.precision().double()
        self.weight = 1 / (float(sigma) ** 2 * float(temperature))

    def gradient(self, point: Point) -> Tensor:
        return self.weight * point.gradient + self._pull(point.away)

    def norm(self, point: Point) -> float:
        return float(self.gradient(point).norm())

    def value(self, point: Point) -> float:
        return self.weight * point.loss + self.prior_value(point.away)

    def prior_value(self, away: Tensor) -> float:
        return float(torch.dot(self._from_mean(away).double(), self._pull(away).double())) / 2

    def scale(self, point: Point) -> float:
        """What the gradient at a point is measured by; at theta~ a prior may pull by any amount."""
        return self.weight * float(self.at.start.gradient.norm()) + float(self._pull(point.away).norm())

    @cached_property
    def precondition(self) -> Callable[[Tensor], Tensor]:
        """v -> precision^-1 v; by the prior alone where there is no one precision over the weights."""
        if isinstance(self.at.solver.curvature, Independent):
            return lambda v: v / self.precisions
        solve, like = self.at.solver.precision(self.prior, self.sigma, self.temperature).solve, self.at.trained.mean
        return lambda v: solve(v.to(like)).double()

    def _from_mean(self, away: Tensor) -> Tensor:
        return self.at.trained.mean.double() + away - self.prior.mean

    def _pull(self, away: Tensor) -> Tensor:
        """The gradient of the prior's part."""
        return self.precisions * self._from_mean(away)
