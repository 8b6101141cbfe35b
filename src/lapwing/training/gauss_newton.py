"""GaussNewton: steps by approximate curvature whose length and damping set themselves (thesis 4.4). Nothing to tune.

    direction   d = -(G~ + (decay + zeta) I)^-1 g         G~ of any structure, of this batch or a moving average
    length      a = -g^T d / d^T (G + (decay + tau) I) d  one product with the exact Gauss-Newton matrix of the batch
    tau, zeta   as `damping` says

    optimiser = GaussNewton(model, Categorical(), structure="kron", estimator="mc")
    for x, y in loader:
        step = optimiser.step(x, y)

A step whose loss rises on its own batch, or is not finite, is refused: the weights stay, and tau is raised until the
loss falls. It costs a gradient, the product J d (two thirds of one; twice that where `tangent.pushforward` lacks a
rule), a solve, a forward pass to verify, and every `refresh` steps the curvature of a batch with its decomposition.
Memory: the curvature, its decomposition, and three vectors [P].

The network runs as it is: in train mode, batch normalisation (whose samples depend on each other) and dropout are
refused by name; with `frozen=True` steps run in eval mode, with the statistics that there are and without dropout.

>>> import torch
>>> from torch import nn
>>> from lapwing.likelihoods import Gaussian
>>> model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
>>> x = torch.tensor([[1.0], [2.0]], dtype=torch.float64)
>>> optimiser = GaussNewton(model, Gaussian(), structure="full", estimator="exact", tau=0.0, zeta=0.0)
>>> optimiser.step(x, 3 * x).accepted, round(model.weight.item(), 12)      # a linear model: one step, closed form
(True, 3.0)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf, isfinite, nan
from typing import Any

import torch
from jaxtyping import Float
from rich.progress import Progress
from torch import Tensor, nn

from lapwing.errors import DataError, OptionError, StorageError
from lapwing.estimate.data_pass import named, pair
from lapwing.estimate.naming import Estimator, by_name
from lapwing.likelihoods import Likelihood
from lapwing.linalg import Curvature, Precision
from lapwing.linalg.autocast import outside_autocast
from lapwing.params import ParamSpace
from lapwing.priors import AnyPrior
from lapwing.serialize import compact, pack, unpack
from lapwing.serialize.files import AnyPath
from lapwing.tangent import Tangent
from lapwing.tangent.inputs import all_finite, batch_size, take
from lapwing.training.damping import Damping
from lapwing.training.quadratic import Here, Pair, Penalty, Plan
from lapwing.training.stepped_run import Step, SteppedRun

TRIES = 12
"""How often the damping of one step is raised before the step is given up."""
FIRST = tuple(10.0**-k for k in range(7))
"""Dampings that the first step tries, in units of the curvature along the gradient."""
FARTHEST = 3
"""Powers of ten that zeta may move when it is looked for far and wide: at steps 1, 2, 4, 8, ..., if nobody gave it."""
FAR = 1e30
"""No weight of a step that nobody looks behind moves as far: beyond, it may not be finite."""
NEARLY = 0.999
"""The share of the best promise that a larger zeta has to reach to be preferred."""
ENOUGH = 0.9
"""The share of the best decrease among them that a larger damping has to reach to be preferred."""


class GaussNewton(torch.optim.Optimizer):
    """A PyTorch optimiser whose `step` takes a batch: it needs the likelihood's curvature, not only a gradient.

    `structure` and `estimator` name the curvature as `Laplace` does (kron, ekfac, full, gp, blocks, diag, ...; exact,
    mc, projection, recursive, ...), or `structure` is a function of `lapwing.estimate`. `weight_decay` is lambda beside
    a mean loss; parameter groups may each have their own: `groups=[{"params": [...], "weight_decay": 0.1}, ...]`. A
    `prior` with `points`, the number of data points it is meant for, takes its place; it may be a previous posterior
    (`la.as_prior()`), whose curvature is then added to that of every batch. A `space` trains some of the
    parameters, or some entries of them, and leaves the others alone.

    `tau` and `zeta` start where they are given, or are found at the first step, which tries a few; `zeta="tied"` is tau
    at all times, for curvatures that are exact. `moving_average` is the weight of the past in the curvature, 0 for that
    of one batch alone; a curvature serves `refresh` steps, or fewer while damping is looked for. `momentum` adds the
    last step as a second direction of the same quadratic. `verify=False` looks at the loss behind a step only when tau
    is due: a rise in between is not seen. `micro_batch` splits batches, for memory. There is no learning rate, and no
    scheduler for it.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood,
        *,
        structure: str | Estimator = "kron",
        estimator: str = "mc",
        options: Mapping[str, Any] | None = None,
        weight_decay: float | int = 0.0,
        groups: Iterable[dict[str, Any]] | None = None,
        prior: AnyPrior | None = None,
        points: int | None = None,
        space: ParamSpace | None = None,
        tau: float | int | None = None,
        zeta: float | int | str | None = None,
        tau_decay: float = 0.95,
        tau_every: int = 5,
        zeta_decay: float = 0.95,
        zeta_every: int = 20,
        moving_average: float | int = 0.9,
        refresh: int = 5,
        momentum: bool = False,
        verify: bool = True,
        micro_batch: int | None = None,
        frozen: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        if not isinstance(likelihood, Likelihood):
            raise OptionError(
                f"the likelihood is {likelihood!r}; expected an object of lapwing.likelihoods, such as Categorical()."
            )
        _check_share(moving_average, "moving_average")
        _check_count(refresh, "refresh")
        if micro_batch is not None:
            _check_count(micro_batch, "micro_batch")
        self.tangent = Tangent(model, space or ParamSpace.of(model), evaluate=frozen)
        space, parameters = self.tangent.space, self.tangent.parameters
        super().__init__(list(groups or [{"params": list(parameters.values())}]), {"weight_decay": weight_decay})
        self.penalty = _penalty(self.param_groups, parameters, space, prior, points)
        self.likelihood = likelihood
        named_structure = isinstance(structure, str)
        self.estimator: Estimator = by_name(structure, estimator, **(options or {})) if named_structure else structure  # pyright: ignore[reportArgumentType]
        tied = zeta == "tied"
        if isinstance(zeta, str) and not tied:
            raise OptionError(f"zeta is {zeta!r}; expected a number, None (found at the first step), or 'tied'.")
        self._search = tau is None or (zeta is None and not tied)
        first = (1.0 if tau is None else tau), (None if tied else 1.0 if zeta is None else zeta)
        self.damping = Damping(*first, tau_decay, tau_every, zeta_decay, zeta_every)  # pyright: ignore[reportArgumentType]
        self._given = tau, zeta
        self.moving_average, self.refresh, self.momentum = moving_average, refresh, momentum
        self.verify, self.micro_batch, self.generator = verify, micro_batch, generator
        self.number = 0
        self._curvature: tuple[Curvature, float] | None = None
        self._precision: tuple[float, Precision] | None = None
        self._joined: tuple[Curvature, Curvature] | None = None
        self._last: Tensor | None = None
        self._room: Tensor | None = None

    @classmethod
    def levenberg_marquardt(
        cls, model: nn.Module, likelihood: Likelihood, structure: str | Estimator = "full", **options: Any
    ) -> GaussNewton:
        """For small networks and whole data sets: exact curvature, new at every step, one damping that moves fast."""
        damping: dict[str, Any] = {"zeta": "tied", "tau_decay": 1 / 3, "tau_every": 1}
        curvature: dict[str, Any] = {"estimator": "exact", "moving_average": 0.0, "refresh": 1}
        return cls(model, likelihood, structure=structure, **(damping | curvature | options))

    # -- steps -----------------------------------------------------------------------------------------------------

    @outside_autocast
    @torch.no_grad()
    def step(self, x: Any, y: Any = None) -> Step:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step on a batch: `step(x, y)`, or `step(closure)` with a function that returns the pair."""
        if y is None and callable(x) and not isinstance(x, Tensor):
            with torch.enable_grad():
                x, y = pair(x(), "what the closure returned")
        return self.step_over([(x, y)])

    @outside_autocast
    @torch.no_grad()
    def step_over(self, batches: Iterable[Pair]) -> Step:
        """One step on several batches as one: the whole data set, or gradients of micro-batches added up."""
        parts = self._parts(batches)
        with named(f"step {self.number}"):
            here = Here.of(self.tangent, self.likelihood, self.penalty, parts)
            if self._curvature is None or self.number % self.refresh == 0 or self._far_and_wide:
                self._renew(here)
            if self._search:
                self._first(here)
        step = self._move(here)
        self.number += 1
        return step

    @torch.no_grad()
    def here(self, batches: Iterable[Pair]) -> Here:
        """The loss of some batches at the present weights, and its gradient, without a step."""
        return Here.of(self.tangent, self.likelihood, self.penalty, self._parts(batches))

    def _parts(self, batches: Iterable[Pair]) -> list[Pair]:
        parts = [part for batch in batches for part in self._split(*batch)]
        if not parts:
            raise DataError("there is no batch to take a step on; expected at least one pair (x, y).")
        return parts

    def _split(self, x: Any, y: Any) -> Iterator[Pair]:
        size = batch_size(x)
        if self.micro_batch is None or size <= self.micro_batch:
            yield x, y
            return
        for start in range(0, size, self.micro_batch):
            part = slice(start, start + self.micro_batch)
            yield take(x, part), y[part]

    def _renew(self, here: Here) -> None:
        """The curvature of these batches, or its average with those before.

        Where damping is found, the average begins after the first `refresh` steps: those go farthest, and what they
        leave behind may be a thousand times less curved. Kept, it would be nine tenths of the average for long.
        """
        tangent = self.tangent if here.kept is None else self.tangent.holding(here.kept[0])
        new = self.estimator(tangent, self.likelihood, here.batches, generator=self.generator)
        points = float(here.points)
        young = self._given[1] is None and self.number < self.refresh
        if self.moving_average and self._curvature is not None and not young:
            before, share = self._curvature, self.moving_average
            new = before[0].discounted(share).pooled(new.discounted(1 - share))
            points = share * before[1] + (1 - share) * points
        self._curvature, self._precision = (new, points), None

    def _direction(self, here: Here, zeta: float, again: bool = False) -> tuple[Float[Tensor, " params"], float]:
        """A vector v and a number u with d = u v: the quadratic finds its own length, and d is not formed.

        Where v is the only one, it is written to the memory of the last step's: `again`.
        """
        assert self._curvature is not None
        curvature, points = self._curvature
        if self._precision is None or self._precision[0] != zeta:
            if self._joined is None or self._joined[0] is not curvature:  # kept: it may hold its decomposition
                self._joined = curvature, self.penalty.joined(curvature, points)
            self._precision = zeta, self._joined[1].with_prior(points * (self.penalty.decay + zeta))
        if not again:
            return self._precision[1].solve(here.gradient), -points
        if self._room is None or self._room.dtype != here.gradient.dtype or self._room.device != here.gradient.device:
            self._room = torch.empty_like(here.gradient)
        self._precision[1].solve_into(here.gradient, self._room)
        return self._room, -points

    def _plan(self, here: Here, zeta: float, again: bool = False) -> Plan:
        direction, unit = self._direction(here, zeta, again)
        directions = direction.unsqueeze(0)
        if self.momentum and self._last is not None:
            directions = torch.cat([directions, self._last.unsqueeze(0)])
        return Plan.of(here, directions, zeta, unit)

    def _first(self, here: Here) -> None:
        """Damping to begin with: the largest whose step lowers the loss nearly as much as the best of those tried.

        Curvature of one half of the data, gradient of the other: of the same points, any damping looks good. Tied
        damping is for curvature that belongs to the data of the gradient.
        """
        tau, zeta = self._given
        kept, tied = self._curvature, self.damping.zeta is None
        there = here
        if not tied and here.points > 1:
            halves = [list(half) for half in zip(*[_halved(*batch) for batch in here.batches], strict=True)]
            halves = [[part for part in half if batch_size(part[0])] for half in halves]
            there = Here.of(self.tangent, self.likelihood, self.penalty, halves[1])
            new = self.estimator(self.tangent, self.likelihood, halves[0], generator=self.generator)
            self._curvature, self._precision = (new, float(here.points - there.points)), None
        scale = self._along_gradient(there)
        found: list[tuple[float, float]] = []
        for share in FIRST:
            damping = share * scale if scale < inf else share
            plan = self._plan(there, zeta if isinstance(zeta, (int, float)) else damping)
            coefficients, _ = plan.best(tau if tau is not None else damping)
            found.append((damping, here.value - here.loss(plan.moved(here.theta, coefficients))))
        best = max((gain for _, gain in found if isfinite(gain)), default=-inf)
        enough = [damping for damping, gain in found if best > 0 and gain >= ENOUGH * best]
        chosen = enough[0] if enough else found[0][0]
        self.damping = replace(
            self.damping,
            tau=chosen if tau is None else tau,
            zeta=chosen if zeta is None else self.damping.zeta,
        )
        self._search, self._curvature, self._precision = False, kept, None

    @property
    def _far_and_wide(self) -> bool:
        """Whether zeta is looked for far and wide in this step, with a new curvature: the old one may be outrun."""
        return self._given[1] is None and self.number.bit_count() == 1

    def _far(self, here: Here) -> Plan:
        """Zeta by powers of ten: the largest that promises nearly as much as the best, wherever that leads.

        Never beyond the curvature along the gradient: above it all directions are the gradient's, and promise the same.
        """
        tried: dict[int, tuple[float, Plan]] = {}
        largest = self._along_gradient(here)

        def look(power: int) -> None:
            plan = self._plan(here, min(self.damping.of_curvature * 10.0**power, largest))
            tried[power] = plan.best(self.damping.tau)[1], plan

        for power in (-1, 0, 1):
            look(power)
        while min(tried) > -FARTHEST and tried[min(tried)][0] == min(value for value, _ in tried.values()):
            look(min(tried) - 1)
        best = min(value for value, _ in tried.values())
        _, plan = tried[max(power for power, (value, _) in tried.items() if value <= NEARLY * best)]
        self.damping = self.damping.with_zeta(plan.zeta)
        return plan

    def _along_gradient(self, here: Here) -> float:
        """The curvature of the quadratic along the gradient; infinite where there is none to measure by."""
        plan = Plan.of(here, here.gradient.unsqueeze(0), 0.0)
        bend, norm = float(plan.bends[0, 0]), float(plan.norms[0, 0])
        return bend / norm if norm and bend > 0 else inf

    def _move(self, here: Here) -> Step:
        if self.damping.zeta is not None and self.number and self.number % self.damping.zeta_every == 0:
            plans = [self._plan(here, zeta) for zeta in self.damping.candidates()]
            plan = min(plans, key=lambda each: each.best(self.damping.tau)[1])
            self.damping = self.damping.with_zeta(plan.zeta)
        elif self._far_and_wide:
            plan = self._far(here)
        else:
            plan = self._plan(here, self.damping.of_curvature, again=True)
        due = (self.number + 1) % self.damping.tau_every == 0
        slack = 8 * torch.finfo(self.tangent.space.dtype).eps * abs(here.value)
        refused, after, accepted, length, promised = 0, nan, False, 0.0, 0.0
        before = self.damping
        while not accepted and refused <= TRIES:
            coefficients, promised = plan.best(self.damping.tau)
            if not (self.verify or due) and -inf < promised < -slack and plan.reach(coefficients) < FAR:
                self._advance(plan, coefficients)  # nobody looks at the loss there: one pass over the weights
                accepted = True
            elif torch.equal(there := plan.moved(here.theta, coefficients), here.theta):  # too short, or zero
                break
            elif isfinite(promised) and all_finite(there):
                after = here.loss(there) if self.verify or due else nan
                accepted = after <= here.value + slack or not (self.verify or due)
                if accepted:
                    self._write(there)
            if accepted:
                length = float(coefficients[0]) / plan.unit
                self._last = plan.step(coefficients) if self.momentum else None
                break
            along = float(plan.bends[0, 0] / plan.norms[0, 0]) if float(plan.norms[0, 0]) else 0.0
            self.damping = self.damping.after_refusal(refused, along)
            refused += 1
            if self.damping.zeta is None:
                plan = self._plan(here, self.damping.tau)
        # below rounding a ratio says nothing
        ratio = (after - here.value) / promised if accepted and promised < -slack else nan
        if refused and before.zeta is not None and before.tau:
            # what one batch needed is no measure for the next: beyond this step, damping is raised as by a poor ratio
            self.damping = replace(before, zeta=self.damping.zeta).after(-inf)
        elif due and not refused and ratio == ratio:
            self.damping = self.damping.after(ratio)
        return Step(
            self.number,
            here.value,
            after,
            ratio,
            length if accepted else 0.0,
            self.damping.tau,
            self.damping.of_curvature,
            accepted,
            refused,
            here.norm,
        )

    def _write(self, theta: Float[Tensor, " params"]) -> None:
        parameters = self.tangent.parameters
        for name, value in self.tangent.tensors(theta).items():
            parameters[name].copy_(value)

    def _advance(self, plan: Plan, coefficients: Float[Tensor, " k"]) -> None:
        """`_write` of `plan.moved`, in place."""
        parameters = self.tangent.parameters
        for direction, coefficient in zip(plan.directions, coefficients.tolist(), strict=True):
            for name, part in self.tangent.space.unravel(direction).items():
                parameters[name].add_(part, alpha=coefficient)

    # -- a run -----------------------------------------------------------------------------------------------------

    def fit(
        self,
        loader: Iterable[Any],
        *,
        epochs: int | None = None,
        steps: int | None = None,
        full_batch: bool = False,
        tolerance: float | int = 0.0,
        callback: Callable[[Step], object] | None = None,
        progress_bar: bool = False,
        checkpoint: AnyPath | None = None,
        checkpoint_every: int = 100,
    ) -> list[Step]:
        """Steps over the batches of a loader, for a number of `epochs` or of `steps`; what each did.

        `full_batch` takes one step for all batches of the loader together. The run ends early where the norm of the
        gradient is `tolerance` of the first step's, or where a step on all the data was given up. With a `checkpoint`,
        the path of a file, the run is kept there every `checkpoint_every` steps; called again in the same way, also in
        another process, it goes on from there and ends bit for bit where it would have ended.
        """
        run = SteppedRun.of(self, loader, epochs, steps, full_batch, tolerance, checkpoint, checkpoint_every)
        with Progress(disable=not progress_bar) as progress:
            task = progress.add_task("", total=run.total)
            for step in run.steps():
                if progress_bar:
                    said = f"loss {step.loss:.6g}  rho {step.ratio:.2f}  tau {step.tau:.2g}  zeta {step.zeta:.2g}"
                    progress.update(task, advance=1, description=said)
                if callback is not None:
                    callback(step)
        return run.done

    # -- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """All that the next step depends on besides weights and data: tensors, numbers and strings."""
        kept = None
        if self._curvature is not None:
            # laid out as it will be when it comes back: products in another layout may round in another way
            self._curvature, self._precision = (compact(self._curvature[0]), self._curvature[1]), None
            description, tensors = pack(self._curvature[0])
            kept = {"description": description, "tensors": tensors, "points": self._curvature[1]}
        state = {
            "number": self.number,
            "tau": self.damping.tau,
            "zeta": self.damping.zeta,
            "search": self._search,
            "curvature": kept,
            "last": self._last,
            "generator": None if self.generator is None else self.generator.get_state(),
        }
        groups = [{name: value for name, value in group.items() if name != "params"} for group in self.param_groups]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """What `state_dict` gave, into an optimiser that was made in the same way."""
        try:
            state, groups = state_dict["state"], state_dict["param_groups"]
            kept, generator = state["curvature"], state["generator"]
            curvature = None if kept is None else (unpack(kept["description"], kept["tensors"]), float(kept["points"]))
            damping = replace(self.damping, tau=state["tau"], zeta=state["zeta"])
            number, search, last = state["number"], state["search"], state["last"]
        except (KeyError, TypeError) as error:
            raise StorageError(
                f"the state lacks {error}; expected what GaussNewton.state_dict gave. Load the state of this optimiser."
            ) from error
        size = self.tangent.space.size
        found = [None if curvature is None else curvature[0].size, None if last is None else len(last)]
        if any(each not in (None, size) for each in found) or len(groups) != len(self.param_groups):
            raise StorageError(
                f"the state is that of {next((each for each in found if each), size)} parameters in {len(groups)} "
                f"groups; expected {size} in {len(self.param_groups)}, those of this optimiser."
            )
        if (generator is None) != (self.generator is None):
            raise StorageError("the state has a generator's and the optimiser has none, or the reverse; expected both.")
        for ours, theirs in zip(self.param_groups, groups, strict=True):
            ours.update(theirs)
        if self.generator is not None and generator is not None:
            self.generator.set_state(generator)
        self.number, self._search, self.damping, self._last = number, search, damping, last
        self._curvature, self._precision = curvature, None


def _halved(x: Any, y: Any) -> tuple[Pair, Pair]:
    middle = batch_size(x) // 2
    first, second = slice(0, middle), slice(middle, None)
    return (take(x, first), y[first]), (take(x, second), y[second])


def _penalty(
    groups: Sequence[Mapping[str, Any]],
    parameters: Mapping[str, Tensor],
    space: ParamSpace,
    prior: AnyPrior | None,
    points: int | None,
) -> Penalty:
    """From a prior over the data of `points` points, or the weight decay of every group."""
    decays = {id(tensor): group["weight_decay"] for group in groups for tensor in group["params"]}
    for value in decays.values():
        if not (isinstance(value, (int, float)) and isfinite(value) and value >= 0):
            raise OptionError(f"weight_decay is {value!r}; expected a finite number >= 0.")
    missing = [name for name, tensor in parameters.items() if id(tensor) not in decays]
    if missing or len(decays) != len(parameters):
        raise OptionError(
            f"the groups leave out {missing[0]!r}, or have tensors that are no trainable parameters of the model; "
            "expected every trainable parameter in one group. Freeze others with requires_grad=False."
            if missing
            else "the groups have tensors that are no trainable parameters of the model; expected those alone."
        )
    if prior is not None:
        if points is None or any(decays.values()):
            raise OptionError(
                "a prior was given without `points`, the number of data points, or with a weight decay; expected the "
                "prior and the number."
            )
        _check_count(points, "points")
        if prior.size != space.size:
            raise OptionError(
                f"the prior is one of {prior.size} parameters; expected {space.size}, those that are trained."
            )
        return Penalty.of(prior, points)
    if len(set(decays.values())) == 1:
        return Penalty(float(next(iter(decays.values()))))
    each = torch.tensor([decays[id(tensor)] for tensor in parameters.values()], dtype=space.dtype, device=space.device)
    return Penalty(each[space.groups("tensor")])


def _check_share(value: object, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise OptionError(f"{name} is {value!r}; expected a number from 0 up to, but not, 1.")


def _check_count(value: object, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(f"{name} is {value!r}; expected a whole number >= 1.")
