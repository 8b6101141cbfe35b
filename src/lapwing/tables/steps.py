"""The steps in which a network for a table is trained: Adam on the weights, and looks at the evidence between them.

    Run       a network, its rows [N, D] and targets, and how to go on from where its weights are
    Kept      weights of the best round, with their prior and noise
    Clock     epochs over all stretches, for a callback

A look takes the curvature of at most `EVIDENCE_ROWS` rows, scaled to N, so that a round costs the same for a million.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, cos, log, pi

import torch
from jaxtyping import Int
from torch import Tensor, nn

from lapwing.evidence import Evidence
from lapwing.laplace import BaseLaplace, Laplace
from lapwing.priors import Prior
from lapwing.tables.network import Spec, heads_of
from lapwing.tables.tuning import SIGMA, reestimated, scaled, share_left

EVIDENCE_ROWS = 20_000
FACTOR = 2_000
"""Kronecker factors up to this size."""
LOOK_WORK = 2e9
"""The full matrix at a look, where it is worth it, up to so much work N C P^2: a quarter of a second."""
ROUNDS, UPDATES = 40, 3

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Progress:
    """What a callback is told after an epoch: `loss` per row, and the evidence where it was evaluated."""

    epoch: int
    epochs: int
    loss: float
    log_marginal: float | None


@dataclass(eq=False)
class Clock:
    """Counts epochs over all stretches and tells a callback."""

    epochs: int
    callback: Callable[[Progress], object] | None
    epoch: int = 0

    def tick(self, loss: float, log_marginal: float | None) -> None:
        self.epoch += 1
        if self.callback is not None:
            self.callback(Progress(self.epoch, self.epochs, loss, log_marginal))


@dataclass(frozen=True, eq=False)
class Kept:
    """Weights, with the prior and noise they were trained under, and the log evidence."""

    score: float
    prior: Prior
    sigma: Tensor
    weights: dict[str, Tensor]
    """The state of the network: its parameters, and the level of noise that varies."""


@dataclass(frozen=True, eq=False)
class Run:
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

    def stretch(self, epochs: int, rate: float, prior: Prior, sigma: Tensor, clock: Clock) -> Kept:
        """Steps from where the model is, down to 1 % of the rate along a cosine; it ends with the best round's weights.

        The best round is the one with the largest evidence.
        """
        laplace = self.laplace(self.looks)
        optimiser = torch.optim.Adam(self.model.parameters(), lr=rate)
        # the decomposition of a wide factor takes seconds, and a few steps of the weights change nothing
        rounds = ROUNDS if self.spec.widest <= 500 else ROUNDS // 4
        every = max(ceil(epochs / rounds), ceil(25 * self.size / len(self.x)))
        rows = torch.randperm(len(self.x), generator=self.generator)[:EVIDENCE_ROWS].sort().values
        best: Kept | None = None
        for epoch in range(1, epochs + 1):
            share = (epoch - 1) / epochs
            optimiser.param_groups[0]["lr"] = rate * (0.01 + 0.99 * (1 + cos(pi * share)) / 2)
            loss = self.epoch(optimiser, prior, float(sigma))
            value = None
            if epoch % every == 0 or epoch == epochs:
                laplace.fit(batches(self.x[rows], self.y[rows]), generator=self.generator)
                evidence = scaled(laplace.evidence, len(self.x) / len(rows))
                prior, sigma, value = self.tuned(evidence, prior, sigma, UPDATES)
                if best is None or value > best.score:
                    state = {name: entry.clone() for name, entry in self.model.state_dict().items()}
                    best = Kept(value, prior, sigma, state)
                if self.spec.varying:
                    self.relevel(evidence, prior, rows)
            clock.tick(loss, value)
        assert best is not None
        self.put(best)
        return best

    def put(self, kept: Kept) -> None:
        self.model.load_state_dict(kept.weights)
        for parameter in self.model.parameters():
            parameter.grad = None

    def epoch(self, optimiser: torch.optim.Optimizer, prior: Prior, sigma: float) -> float:
        """One pass of steps, at unit noise, so that a rate means the same whatever sigma is; the mean loss."""
        scale = sigma**2 / len(self.x)
        parts = prior.precision().expand(prior.size).split([each.numel() for each in self.model.parameters()])
        decay = [float(part[0]) * scale for part in parts]
        total = 0.0
        for rows in torch.randperm(len(self.x), generator=self.generator).split(self.size):
            optimiser.zero_grad()
            loss = self.loss(self.model(self.x[rows]), self.y[rows])
            loss.backward()
            for parameter, strength in zip(self.model.parameters(), decay, strict=True):
                assert parameter.grad is not None
                parameter.grad.add_(parameter.detach(), alpha=strength)
            optimiser.step()
            total += float(loss.detach()) * len(rows)
        return total / len(self.x)

    def loss(self, f: Tensor, y: Tensor) -> Tensor:
        """Per row, without the constant."""
        if self.task == "classification":
            return nn.functional.cross_entropy(f, y)
        if self.spec.varying:
            mean, level = f.chunk(2, -1)
            return ((y - mean).square() * (-level).exp() + level).sum() / (2 * len(y))
        return (f - y).square().sum() / (2 * len(y))

    def tuned(self, evidence: Evidence, prior: Prior, sigma: Tensor, updates: int) -> tuple[Prior, Tensor, float]:
        """Prior and noise after updates at these weights, and log Z; for classes the prior stays as it is.

        The more a network is sure of its classes, the smaller its curvature, the fewer parameters count as determined,
        and the stronger the next prior: updates at given weights run away (on digits to 640, and the NLL of new rows
        to 0.173 against 0.123), so priors are compared by the weights that each leads to.
        """
        if self.task == "classification":
            return prior, sigma, float(evidence.log_marginal(prior, sigma))
        return reestimated(evidence, prior, sigma, updates)

    @torch.no_grad()
    def relevel(self, evidence: Evidence, prior: Prior, rows: Int[Tensor, " some"]) -> None:
        """Log-variances up or down together, to where the evidence is largest at these weights: sum z^2 = N - gamma.

        z are errors over deviations, and gamma counts the parameters of the mean that the data determine, as in
        sigma^2 = SSE / (N - gamma) for constant noise. Weights that would do the same leave gamma out.
        """
        heads = heads_of(self.model)
        pairs = zip(self.x[rows].split(4096), self.y[rows].split(4096), strict=True)
        found = [(y, *self.model(x).chunk(2, -1)) for x, y in pairs]
        squares = torch.cat([(y - mean).square() * (-level).exp() for y, mean, level in found]).mean(0)
        left = share_left(evidence.effective_parameters(prior), self.y.numel())
        heads.level.add_((squares / left).log().clamp(-1, 1))
        heads.level.clamp_(2 * log(SIGMA[0]), 2 * log(SIGMA[1]))

    @property
    def looks(self) -> str:
        """Structure of the curvature at a look: a split of the noise from the errors of the mean needs the full one."""
        work = min(len(self.x), EVIDENCE_ROWS) * 2 * self.spec.outputs * self.weights**2
        if self.spec.varying and work <= LOOK_WORK:
            return "full"
        return "kron" if self.spec.widest <= FACTOR else "diag"

    def laplace(self, structure: str) -> BaseLaplace:
        # exact factors cost a backward pass per output, one draw per row costs one in all
        source = "mc" if self.spec.outputs > 20 and structure == "kron" else "exact"
        return Laplace(self.model, self.spec.likelihood(self.task), "all", structure, estimator=source)


def batches(x: Tensor, y: Tensor) -> list[Pair]:
    """For a pass of curvature."""
    return list(zip(x.split(1024), y.split(1024), strict=True))
