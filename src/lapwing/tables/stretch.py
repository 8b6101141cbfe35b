"""A stretch of training of a network for a table: Adam on the weights, and looks at the evidence between its epochs.

    TableTraining   a network, its rows [N, D] and targets, and how to go on from where its weights are
    Clock           epochs over all stretches, for a callback

A look takes the curvature of at most `EVIDENCE_ROWS` rows, scaled to N, so that it costs the same for a million. The
loop is that of `lapwing.training`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from math import ceil, cos, e, log, pi
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from lapwing.evidence import Evidence, Tuned
from lapwing.evidence.tuners import Limits, share_left, updates
from lapwing.laplace import BaseLaplace, Laplace
from lapwing.params import ParamSpace
from lapwing.priors import Prior
from lapwing.tables.network import Spec, heads_of
from lapwing.training.loop import Best, Epoch, Gradient, Looks, TrainingLoop
from lapwing.training.prior_term import PriorTerm

EVIDENCE_ROWS = 20_000
FACTOR = 2_000
"""Kronecker factors up to this size."""
LOOK_WORK = 2e9
"""The full matrix at a look, where it is worth it, up to so much work N C P^2: a quarter of a second."""
LOOKS, UPDATES = 40, 3
SIGMA = 1e-3, 10.0
"""Noise levels that a standardised target can have; a smaller one would be about the rounding of float32."""
LIMITS = Limits(precisions=(1e-4, 1e6), noise=SIGMA, factor=e, spared=10)
"""No further than a factor e at a time, as the weights are not yet at their mode.

Where the structure counts nearly as many determined parameters as there are targets, a tenth of the targets is still
left to estimate the noise from."""

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class FitProgress:
    """What a callback is told after an epoch: `loss` per row, and the evidence where it was evaluated."""

    epoch: int
    epochs: int
    loss: float
    log_marginal: float | None


Callback = Callable[[FitProgress], object] | None


@dataclass(eq=False)
class Clock:
    """Counts epochs over all stretches and tells a callback."""

    epochs: int
    callback: Callback
    epoch: int = 0

    def tick(self, loss: float, log_marginal: float | None) -> None:
        self.epoch += 1
        if self.callback is not None:
            self.callback(FitProgress(self.epoch, self.epochs, loss, log_marginal))


@dataclass(frozen=True, eq=False)
class Shuffled:
    """Rows in batches of `size`, in a new order in every pass."""

    x: Tensor
    y: Tensor
    size: int
    generator: torch.Generator

    def __iter__(self) -> Iterator[Pair]:
        for rows in torch.randperm(len(self.x), generator=self.generator).split(self.size):
            yield self.x[rows], self.y[rows]


@dataclass(frozen=True, eq=False)
class TableTraining:
    """What does not change while a network is trained. Where its noise varies, sigma is one throughout."""

    model: nn.Module
    spec: Spec
    x: Tensor
    y: Tensor
    task: str
    size: int
    generator: torch.Generator

    @property
    def weights(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def stretch(self, epochs: int, rate: float, prior: Prior, sigma: Tensor, clock: Clock) -> Best:
        """Trains from where the model is, at a rate that falls to 1 % along a cosine; keeps the best look's weights."""
        laplace = self.laplace(self.looks)
        optimiser = torch.optim.Adam(self.model.parameters(), lr=rate)
        cosine = torch.optim.lr_scheduler.LambdaLR(
            optimiser, lambda epoch: 0.01 + 0.99 * (1 + cos(pi * (epoch / epochs))) / 2
        )
        # the decomposition of a wide factor takes seconds, and a few steps of the weights change nothing
        looks = LOOKS if self.spec.widest <= 500 else LOOKS // 4
        every = max(ceil(epochs / looks), ceil(25 * self.size / len(self.x)))
        rows = torch.randperm(len(self.x), generator=self.generator)[:EVIDENCE_ROWS].sort().values

        def evidence() -> Evidence:
            laplace.fit(batches(self.x[rows], self.y[rows]), generator=self.generator)
            return laplace.evidence.scaled(len(self.x) / len(rows))

        def tune(evidence: Evidence, prior: Prior, sigma: Tensor) -> Tuned:
            return self.tuned(evidence, prior, sigma, UPDATES)

        def told(epoch: Epoch, evidence: Evidence | None) -> None:
            if self.spec.varying and evidence is not None and epoch.tuned is not None:
                self.relevel(evidence, epoch.tuned.prior, rows)
            clock.tick(epoch.loss, None if epoch.tuned is None else float(epoch.tuned.log_marginal))

        shuffled = Shuffled(self.x, self.y, self.size, self.generator)
        loop = TrainingLoop(self.model, shuffled, optimiser, self.under, evidence, tune, cosine)
        return loop.run(Looks(prior, sigma), epochs, lambda number: number % every == 0, told)

    def under(self, prior: Prior, sigma: float) -> Gradient:
        """Losses without the prior, and gradients with it, at unit noise: a rate means the same whatever sigma is."""
        parameters, scale = list(self.model.parameters()), sigma**2
        term = PriorTerm.of(prior, ParamSpace.of(self.model), len(self.x))

        def gradient(x: Any, y: Any) -> tuple[float, float]:
            loss = self.loss(self.model(x), y)
            loss.backward()
            term.add_gradient(parameters, scale)
            value = float(loss.detach())
            return value, value

        return gradient

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        """Per row, without the constant."""
        if self.task == "classification":
            return nn.functional.cross_entropy(f, y)
        if self.spec.varying:
            mean, level = f.chunk(2, -1)
            return ((y - mean).square() * (-level).exp() + level).sum() / (2 * len(y))
        return (f - y).square().sum() / (2 * len(y))

    def tuned(self, evidence: Evidence, prior: Prior, sigma: Tensor, count: int) -> Tuned:
        """Prior and noise after some updates at these weights, and log Z; for classes the prior stays as it is.

        The more a network is sure of its classes, the smaller its curvature, the fewer parameters count as determined,
        and the stronger the next prior: updates at given weights run away (on digits to 640, and the NLL of new rows
        to 0.173 against 0.123), so priors are compared by the weights that each leads to.
        """
        if self.task != "classification":
            return reestimated(evidence, prior, sigma, count)
        return Tuned(prior, sigma, evidence.log_marginal(prior, sigma).detach(), converged=False, rounds=0)

    @torch.no_grad()
    def relevel(self, evidence: Evidence, prior: Prior, rows: Int[Tensor, " some"]) -> None:
        """Shifts all log-variances to where the evidence is largest at these weights: sum z^2 = N - gamma.

        z are errors over deviations, and gamma counts the parameters of the mean that the data determine, as in
        sigma^2 = SSE / (N - gamma) for constant noise. Training the level like a weight would leave gamma out.
        """
        heads = heads_of(self.model)
        pairs = zip(self.x[rows].split(4096), self.y[rows].split(4096), strict=True)
        outputs = [(y, *self.model(x).chunk(2, -1)) for x, y in pairs]
        squares = torch.cat([(y - mean).square() * (-level).exp() for y, mean, level in outputs]).mean(0)
        left = share_left(evidence.effective_parameters(prior), self.y.numel())
        heads.level.add_((squares / left).log().clamp(-1, 1))
        heads.level.clamp_(2 * log(SIGMA[0]), 2 * log(SIGMA[1]))

    @property
    def looks(self) -> str:
        """Structure of the curvature at a look: only the full one tells noise from errors of the mean."""
        work = min(len(self.x), EVIDENCE_ROWS) * 2 * self.spec.outputs * self.weights**2
        if self.spec.varying and work <= LOOK_WORK:
            return "full"
        return "kron" if self.spec.widest <= FACTOR else "diag"

    def laplace(self, structure: str) -> BaseLaplace:
        # exact factors cost a backward pass per output, one draw per row costs one in all
        source = "mc" if self.spec.outputs > 20 and structure == "kron" else "exact"
        return Laplace(self.model, self.spec.likelihood(self.task), "all", structure, estimator=source)


@torch.no_grad()
def reestimated(evidence: Evidence, prior: Prior, sigma: Tensor, count: int) -> Tuned:
    """MacKay's updates, so many of them, within `LIMITS`; and log Z after them."""
    *_, (prior, sigma, _) = islice(updates(evidence, prior, sigma, limits=LIMITS), count)
    return Tuned(prior, sigma, evidence.log_marginal(prior, sigma), converged=False, rounds=count)


def batches(x: Tensor, y: Tensor) -> list[Pair]:
    """For a pass of curvature."""
    return list(zip(x.split(1024), y.split(1024), strict=True))
