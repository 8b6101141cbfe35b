"""Online training of an autoencoder (source, equations 10, 11, 64 and 65): one draw of the weights for every step.

    theta'   ~ N(theta, (prior + H / T)^-1)                         once a step
    theta    <- optimiser step on the gradient of the batch's loss at theta'
    H        <- (1 - forgetting) H + weight * [N / B] * curvature of the batch        at theta, or at theta'

A step costs a draw, the gradient, and the curvature of the batch: with the sampled diagonal a forward and two backward
passes or so. Memory: H, the drawn weights and a few vectors [P] beside the training step. The network runs in eval mode.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from math import isfinite, nan
from typing import Any

import torch
from torch import Tensor

from lapwing.errors import DataError, ModelError, OptionError, StorageError
from lapwing.estimate.data_pass import check_loss, pair
from lapwing.likelihoods import Likelihood
from lapwing.linalg import Curvature, Diagonal, Precision
from lapwing.linalg.autocast import outside_autocast
from lapwing.serialize import compact, pack, unpack
from lapwing.tangent import Linearisation, Tangent
from lapwing.tangent.inputs import all_finite, batch_size
from lapwing.training.autoencoder.curvatures import OfBatch
from lapwing.training.stepped_run import Step

PLACES = ("mean", "draw")


@dataclass(frozen=True)
class Schedule:
    """The numbers of the update.

    prior_precision   of every weight; it is not forgotten
    start             H before the first batch, forgotten like the rest of it
    forgetting        the share of H that a step forgets (alpha)
    weight            what the curvature of a batch is multiplied by
    rescale           whether it is multiplied by N / B too: from the batch to the data set
    temperature       divides H where weights are drawn: below 1 the posterior is cold
    at                where the curvature is taken: at the "mean" of the weights, or at the "draw"
    """

    prior_precision: float | int = 1.0
    start: float | int = 0.0
    forgetting: float | int = 1e-4
    weight: float | int = 1.0
    rescale: bool = False
    temperature: float | int = 1.0
    at: str = "mean"

    def __post_init__(self) -> None:
        for name, above in (("prior_precision", False), ("start", False), ("weight", True), ("temperature", True)):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
            if not number or value < 0 or (above and not value):
                raise OptionError(f"{name} is {value!r}; expected a finite number {'> 0' if above else '>= 0'}.")
        share = self.forgetting
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share < 1:
            raise OptionError(f"forgetting is {share!r}; expected a share from 0 up to, but not, 1.")
        if not isinstance(self.rescale, bool):
            raise OptionError(f"rescale is {self.rescale!r}; expected True or False.")
        if self.at not in PLACES:
            raise OptionError(f"at is {self.at!r}; expected one of {list(PLACES)}.")
        if not self.prior_precision and not self.start:
            raise OptionError(
                "prior_precision and start are both 0, and there is nothing to draw weights from before the first "
                "batch; expected one of them above 0."
            )


@dataclass(eq=False)
class Running:
    """H and how much of its start is left: q(theta) = N(theta, (prior + (H + start) / T)^-1)."""

    schedule: Schedule
    size: int
    curvature: Curvature | None = None
    start: float = 0.0

    @staticmethod
    def of(schedule: Schedule, size: int) -> Running:
        return Running(schedule, size, None, float(schedule.start))

    def precision(self, like: Tensor) -> Precision:
        """prior + H / T; before the first batch of the start alone."""
        schedule = self.schedule
        flat = schedule.prior_precision + self.start / schedule.temperature
        curvature = Diagonal(like.new_zeros(self.size)) if self.curvature is None else self.curvature
        if schedule.temperature != 1:
            curvature = curvature * (1 / schedule.temperature)
        return curvature.with_prior(flat)

    def updated(self, new: Curvature, factor: float) -> Running:
        kept = 1 - self.schedule.forgetting
        new = new if factor == 1 else new.discounted(factor)
        before = self.curvature
        total = new if before is None else before.discounted(kept).pooled(new)
        return Running(self.schedule, self.size, total, self.start * kept)


@dataclass(eq=False)
class OnlineSteps:
    """Steps on the weights of `tangent`'s model; meets what a `SteppedRun` asks of an optimiser.

    `running` None is plain training: no draw and no curvature.
    """

    tangent: Tangent
    likelihood: Likelihood
    optimizer: torch.optim.Optimizer
    of_batch: OfBatch | None
    running: Running | None
    points: int | None
    generator: torch.Generator | None
    number: int = 0
    drawn: Tangent = field(init=False)

    def __post_init__(self) -> None:
        self.drawn = self.tangent if self.running is None else _twin(self.tangent)

    @outside_autocast
    def step_over(self, batches: Iterable[Any]) -> Step:
        """One step on one batch. Nothing is changed before all that the step needs has been found finite."""
        (batch,) = batches
        x, y = pair(batch)
        size = batch_size(x)
        if self.running is not None:
            self._draw(self.running)
        there = self.drawn.at(x)
        value = there.value
        loss = -float(check_loss(self.likelihood, value, y).double().sum()) / size
        gradient = there.rmv(self.likelihood.grad(value, y) / size)
        if not all_finite(gradient):
            raise DataError(
                "the gradient of the loss holds NaN or infinite entries; expected finite ones. Use a smaller learning "
                "rate, or check the data."
            )
        running = None if self.running is None else self._next(self.running, there, x, y, size)
        self._apply(gradient)
        self.running = running
        self.number += 1
        return Step(self.number - 1, loss, nan, nan, nan, nan, nan, True, 0, float(gradient.norm()))

    @torch.no_grad()
    def _draw(self, running: Running) -> None:
        theta = self.tangent.space.values(self.tangent.model)
        theta += running.precision(theta).draw(1, self.generator)[0]
        parameters = self.drawn.parameters
        for name, value in self.drawn.space.unravel(theta).items():
            parameters[name].copy_(value)

    @torch.no_grad()
    def _next(self, running: Running, there: Linearisation, x: Any, y: Tensor, size: int) -> Running:
        assert self.of_batch is not None
        schedule = running.schedule
        here = there if schedule.at == "draw" else self.tangent.at(x)
        new = self.of_batch(here, self.likelihood, x, y, self.generator)
        if not all_finite(new.diagonal()):
            raise DataError("the curvature of the batch is NaN or infinite; expected finite numbers. Check the data.")
        factor = float(schedule.weight)
        if schedule.rescale:
            assert self.points is not None
            factor *= self.points / size
        return running.updated(new, factor)

    def _apply(self, gradient: Tensor) -> None:
        """A step of the optimiser on this gradient; gradients that the parameters held are theirs again."""
        parameters = self.tangent.parameters
        before = {name: tensor.grad for name, tensor in parameters.items()}
        try:
            for name, value in self.tangent.space.unravel(gradient).items():
                parameters[name].grad = value.to(parameters[name].dtype)
            self.optimizer.step()
        finally:
            for name, tensor in parameters.items():
                tensor.grad = before[name]

    # -- state -----------------------------------------------------------------------------------------------------

    def _settings(self) -> dict[str, Any]:
        return {} if self.running is None else asdict(self.running.schedule)

    def state_dict(self) -> dict[str, Any]:
        kept = None
        if self.running is not None and self.running.curvature is not None:
            self.running.curvature = compact(self.running.curvature)
            description, tensors = pack(self.running.curvature)
            kept = {"description": description, "tensors": tensors}
        return {
            "number": self.number,
            "optimizer": self.optimizer.state_dict(),
            "curvature": kept,
            "start": None if self.running is None else self.running.start,
            "settings": self._settings(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        settings, ours = dict(state_dict["settings"]), self._settings()
        other = [name for name in {**ours, **settings} if ours.get(name) != settings.get(name)]
        if other:
            raise StorageError(
                f"the checkpoint is of another run: {other[0]} was {settings.get(other[0])} and is "
                f"{ours.get(other[0])}. Expected the same settings. Restore them, or delete the file."
            )
        self.number = state_dict["number"]
        self.optimizer.load_state_dict(dict(state_dict["optimizer"]))
        kept = state_dict["curvature"]
        if self.running is not None:
            curvature = None if kept is None else unpack(kept["description"], kept["tensors"])
            assert curvature is None or isinstance(curvature, Curvature)
            self.running = Running(self.running.schedule, self.running.size, curvature, float(state_dict["start"]))


def _twin(tangent: Tangent) -> Tangent:
    """The same network with weights of its own, into which draws are written."""
    try:
        model = deepcopy(tangent.model)
    except Exception as error:
        raise ModelError(
            f"the autoencoder cannot be copied ({error}); expected modules that copy.deepcopy takes, as weights are "
            "drawn into a copy. Detach tensors that modules keep as attributes."
        ) from error
    return Tangent(model, tangent.space, tangent.budget, evaluate=True)
