"""Online training of an autoencoder (source, equations 10, 11, 64 and 65): one draw of the weights for every step.

    theta'   ~ N(theta, (prior + H / T)^-1)                         once a step
    theta    <- optimiser step on the gradient of the batch's loss at theta'
    H        <- (1 - forgetting) H + weight * [N / B] * curvature of the batch        at theta, or at theta'

A step costs a draw, the gradient, and the curvature of the batch: with the sampled diagonal a backward pass at the
draw, and a forward pass more at the mean. Memory: H and the drawn weights, two vectors [P], beside that of a training
step. A pass over a vector [P] costs about as much as a product of a layer with a batch, which is small beside it: a
diagonal H is drawn from in blocks that stay in a cache, and takes in a batch's squares as they are multiplied. The
network runs in eval mode. Plain training, without draws and curvature, runs it in the modes that it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from math import isfinite, nan
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lapwing.errors import DataError, ModelError, OptionError, StorageError
from lapwing.estimate.data_pass import check_loss, pair
from lapwing.estimate.exact_diagonal import RowSquares
from lapwing.likelihoods import Likelihood
from lapwing.linalg import Curvature, Diagonal, Precision
from lapwing.linalg.autocast import outside_autocast
from lapwing.linalg.checks import normal
from lapwing.serialize import compact, pack, unpack
from lapwing.tangent import Linearisation, Tangent
from lapwing.tangent.fallback import gradients
from lapwing.tangent.inputs import all_finite, batch_size, call, check_input, outside_inference, shape_key
from lapwing.training.autoencoder.curvatures import OfBatch
from lapwing.training.loop import advance
from lapwing.training.stepped_run import Step

PLACES = ("mean", "draw")
BLOCK = 2**18
"""Entries that are drawn at a time: few enough to stay in a cache, enough for a call to be short beside its work."""
AT_ONCE = 16
"""Normal numbers that torch makes together on a processor; the last of a vector are made anew where they are fewer."""


@dataclass(frozen=True)
class Schedule:
    """The numbers of the update.

    prior_precision   of every weight; it is not forgotten
    start             H before the first batch, forgotten like the rest of it; with `rescale` it is that of one data
                      point, and N times as much is meant
    forgetting        the share of H that a step forgets (alpha)
    weight            what the curvature of a batch is multiplied by
    rescale           whether it is multiplied by N / B too: from the batch to the data set
    temperature       divides H where weights are drawn: below 1 the posterior is cold
    at                where the curvature is taken: at the "draw", which has its forward pass done, or at the "mean" of
                      the weights, to the letter of equation 11
    """

    prior_precision: float | int = 1.0
    start: float | int = 0.0
    forgetting: float | int = 1e-4
    weight: float | int = 1.0
    rescale: bool = False
    temperature: float | int = 1.0
    at: str = "draw"

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
    """H and how much of its start is left: q(theta) = N(theta, (prior + (H + start) / T)^-1).

    A diagonal H is updated in place.
    """

    schedule: Schedule
    size: int
    curvature: Curvature | None
    start: float

    @staticmethod
    def of(schedule: Schedule, size: int, points: int | None) -> Running:
        """Before the first batch; `points` is N, which only `rescale` needs."""
        assert points is not None or not schedule.rescale
        return Running(schedule, size, None, float(schedule.start) * (points if schedule.rescale and points else 1))

    @property
    def flat(self) -> float:
        """What is added to H / T: the prior, and what is left of the start."""
        return self.schedule.prior_precision + self.start / self.schedule.temperature

    def precision(self, like: Tensor) -> Precision:
        """prior + H / T; before the first batch of the start alone."""
        curvature = Diagonal(like.new_zeros(self.size)) if self.curvature is None else self.curvature
        if self.schedule.temperature != 1:
            curvature = curvature * (1 / self.schedule.temperature)
        return curvature.with_prior(self.flat)

    def draw(self, like: Tensor, generator: torch.Generator | None) -> Iterator[Float[Tensor, " entries"]]:
        """theta' - theta, as `precision` draws it, in consecutive blocks; the next one may take the memory of the last.

        Blocks of a diagonal are small enough to stay in a cache, and hold a multiple of the numbers that torch draws at
        once: together they are what one call draws.
        """
        if not isinstance(self.curvature, Diagonal):
            yield self.precision(like).draw(1, generator)[0]
            return
        values, scale = self.curvature.values, 1 / self.schedule.temperature
        edges = list(range(0, self.size, BLOCK if like.device.type == "cpu" else self.size))
        if len(edges) > 1 and self.size - edges[-1] < AT_ONCE:
            edges.pop()
        here = generator is None or generator.device == like.device
        noise, spread = like.new_empty(2, min(self.size, BLOCK + AT_ONCE if len(edges) > 1 else self.size))
        for start, stop in pairwise([*edges, self.size]):
            drawn, part = noise[: stop - start], spread[: stop - start]
            drawn = drawn.normal_(generator=generator) if here else normal((stop - start,), like, generator)
            torch.mul(values[start:stop], scale, out=part)
            yield drawn.mul_(part.add_(self.flat).rsqrt_())

    def update(self, new: Curvature | RowSquares, factor: float) -> None:
        """H <- (1 - forgetting) H + factor * new."""
        kept = 1 - self.schedule.forgetting
        before = self.curvature
        if isinstance(new, RowSquares):
            if before is None:
                before = self.curvature = Diagonal(new.like.new_zeros(self.size))
            assert isinstance(before, Diagonal), "a run keeps to one curvature"
            new.add_to(before.values, kept, factor)
        elif isinstance(before, Diagonal) and isinstance(new, Diagonal):
            before.values.mul_(kept).add_(new.values, alpha=factor)
        else:
            new = new.clone() if isinstance(new, Diagonal) else new  # changed in place from now on
            new = new if factor == 1 else new.discounted(factor)
            self.curvature = new if before is None else before.discounted(kept).pooled(new)
        self.start *= kept


@dataclass(eq=False)
class OnlineSteps:
    """Steps on the weights of `tangent`'s model; meets what a `SteppedRun` asks of an optimiser.

    `running` None is plain training: no draw and no curvature, each module in its own mode. The `scheduler` takes a
    step per epoch. `settings` must not differ where a run goes on.
    """

    tangent: Tangent
    likelihood: Likelihood
    optimizer: torch.optim.Optimizer
    of_batch: OfBatch | None
    running: Running | None
    points: int | None
    generator: torch.Generator | None
    scheduler: Any = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    number: int = 0
    total: float = 0.0
    taken: int = 0
    drawn: Tangent = field(init=False)
    _known: set[tuple] = field(default_factory=set, init=False, repr=False)

    def __post_init__(self) -> None:
        self.drawn = self.tangent if self.running is None else _twin(self.tangent)

    @outside_autocast
    def step_over(self, batches: Iterable[Any]) -> Step:
        """One step on one batch. Nothing is changed before all that the step needs has been found finite."""
        (batch,) = batches
        x, y = pair(batch)
        size = batch_size(x)
        if self.running is not None:
            self._look(x)
            self._draw(self.running)
        there = None if self.running is None else self.drawn.at(x)
        output = self._forward(x) if there is None else there.output
        value = output.detach().to(self.tangent.space.dtype)
        loss = -float(check_loss(self.likelihood, value, y).double().sum()) / size
        cotangent = (self.likelihood.grad(value, y) / size).to(output.dtype)
        parameters = list(self.drawn.parameters.values())
        gradient = gradients(output, parameters, cotangent, retain_graph=there is not None)
        found = [each for each in gradient if each is not None]
        norm = float(torch.stack(torch._foreach_norm(found)).double().norm()) if found else 0.0
        if not isfinite(norm) and not all(all_finite(each) for each in found):
            raise DataError(
                "the gradient of the loss holds NaN or infinite entries; expected finite ones. Use a smaller learning "
                "rate, or check the data."
            )
        new = None
        if self.running is not None and there is not None:
            new = self._curvature(self.running, there, x, y)
        self._apply(gradient)
        if self.running is not None and new is not None:
            self.running.update(new, self._factor(self.running.schedule, size))
        self.number, self.total, self.taken = self.number + 1, self.total + size * loss, self.taken + size
        return Step(self.number - 1, loss, nan, nan, nan, nan, nan, True, 0, norm)

    def end_epoch(self) -> None:
        """A step of the scheduler, told the mean loss of the epoch's data points."""
        if self.taken:
            advance(self.scheduler, self.total / self.taken)
        self.total, self.taken = 0.0, 0

    def _forward(self, x: Any) -> Tensor:
        """A forward pass of plain training: normalisation takes the statistics of the batch, dropout drops."""
        check_input(x, self.tangent.space.device)
        with torch.enable_grad():
            return call(self.tangent.model, outside_inference(x))

    def _look(self, x: Any) -> None:
        """Has the twin tell its samples apart at the mean of the weights, where the shape of x is new to it.

        At a draw from a wide prior rounding may grow into differences that pass for samples that are coupled.
        """
        key = shape_key(x)
        if key not in self._known:
            into = self.drawn.parameters
            with torch.no_grad():
                for name, mean in self.tangent.parameters.items():
                    into[name].copy_(mean)
            self.drawn.at(x)
            self._known.add(key)

    @torch.no_grad()
    def _draw(self, running: Running) -> None:
        """Writes a draw of the weights into the twin."""
        mean, into, space = self.tangent.parameters, self.drawn.parameters, self.tangent.space
        blocks = running.draw(torch.empty(0, dtype=space.dtype, device=space.device), self.generator)
        both = [(tensor, into[name]) for name, tensor in mean.items()]
        if space.index is None and all(each.is_contiguous() for pair in both for each in pair):
            _add_blocks(blocks, [(tensor.view(-1), twin.view(-1)) for tensor, twin in both])
            return
        for name, away in space.unravel(torch.cat([block.clone() for block in blocks])).items():
            torch.add(mean[name], away.to(mean[name].dtype), out=into[name])

    @torch.no_grad()
    def _curvature(self, running: Running, there: Linearisation, x: Any, y: Tensor) -> Curvature | RowSquares:
        assert self.of_batch is not None
        here = there if running.schedule.at == "draw" else self.tangent.at(x)
        new = self.of_batch(here, self.likelihood, x, y, self.generator)
        if not (new.finite if isinstance(new, RowSquares) else all_finite(new.diagonal())):
            raise DataError("the curvature of the batch is NaN or infinite; expected finite numbers. Check the data.")
        return new

    def _factor(self, schedule: Schedule, size: int) -> float:
        if not schedule.rescale:
            return float(schedule.weight)
        assert self.points is not None
        return schedule.weight * self.points / size

    def _apply(self, gradient: Sequence[Tensor | None]) -> None:
        """A step of the optimiser on this gradient; gradients that the parameters held are theirs again."""
        parameters = list(self.tangent.parameters.values())
        before = [tensor.grad for tensor in parameters]
        try:
            for tensor, value in zip(parameters, gradient, strict=True):
                tensor.grad = torch.zeros_like(tensor) if value is None else value
            self.optimizer.step()
        finally:
            for tensor, value in zip(parameters, before, strict=True):
                tensor.grad = value

    # -- state -----------------------------------------------------------------------------------------------------

    def _settings(self) -> dict[str, Any]:
        made = {
            "optimizer": type(self.optimizer).__name__,
            "scheduler": None if self.scheduler is None else type(self.scheduler).__name__,
            "online": self.running is not None,
        }
        return {**self.settings, **made, **({} if self.running is None else asdict(self.running.schedule))}

    def state_dict(self) -> dict[str, Any]:
        kept = None
        if self.running is not None and self.running.curvature is not None:
            self.running.curvature = compact(self.running.curvature)
            description, tensors = pack(self.running.curvature)
            kept = {"description": description, "tensors": tensors}
        return {
            "number": self.number,
            "epoch": [self.total, self.taken],
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
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
        self.number, (self.total, self.taken) = state_dict["number"], state_dict["epoch"]
        self.optimizer.load_state_dict(dict(state_dict["optimizer"]))
        if self.scheduler is not None:
            self.scheduler.load_state_dict(dict(state_dict["scheduler"]))
        kept = state_dict["curvature"]
        if self.running is not None:
            curvature = None if kept is None else unpack(kept["description"], kept["tensors"])
            assert curvature is None or isinstance(curvature, Curvature)
            self.running = Running(self.running.schedule, self.running.size, curvature, float(state_dict["start"]))


def _add_blocks(blocks: Iterable[Tensor], tensors: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Writes mean + block into the twin, for (mean, twin) [entries] of every tensor one after the other."""
    number, at = 0, 0
    for block in blocks:
        done = 0
        while done < len(block):
            mean, twin = tensors[number]
            count = min(len(block) - done, len(mean) - at)
            part = slice(at, at + count)
            torch.add(mean[part], block[done : done + count].to(mean.dtype), out=twin[part])
            done, at = done + count, at + count
            if at == len(mean):
                number, at = number + 1, 0


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
