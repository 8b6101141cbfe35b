"""A network for a table and its posterior: MAP training in which the evidence tunes prior and noise as it goes.

    x [N, D] float, standardised       y [N] or [N, C] float, standardised, or [N] class numbers 0 .. C - 1

Steps of Adam on the weights alternate with a few steps on log precisions (one per layer) and log sigma, up the Laplace
evidence with Kronecker curvature. That curvature is of at most `EVIDENCE_ROWS` rows, scaled to N, so that a round costs
the same for a million rows; the weights with the largest evidence are kept. The final curvature is of all rows: full
[P, P] where P and the work N C P^2 are small, Kronecker factors otherwise.

    >>> import torch
    >>> x = torch.linspace(-1, 1, 30).unsqueeze(1)
    >>> model, la = train(x, 2 * x, "regression", Spec(1, 1, width=5, depth=1), seed=0, epochs=20)
    >>> mean, variance = la(x)
    >>> mean.shape, variance.shape, type(la).__name__
    (torch.Size([30, 1]), torch.Size([30, 1, 1]), 'FullLaplace')
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, cos, e, log2, pi

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lapwing.errors import DataError, OptionError
from lapwing.evidence import Evidence, GaussianFit
from lapwing.laplace import BaseLaplace, Laplace
from lapwing.metrics import gaussian_nll, nll
from lapwing.priors import Prior

EVIDENCE_ROWS = 20_000
FULL_WEIGHTS, FULL_WORK, FACTOR = 3_000, 2e11, 2_000
"""The full matrix up to so many weights and so much work N C P^2; Kronecker factors up to this size; else diagonal."""
SIGMA = 1e-3, 10.0
"""Noise levels that a standardised target can have; a smaller one would be about the rounding of float32."""
PRECISION = 1e-4, 1e6
ROUNDS, UPDATES, FINAL_UPDATES = 40, 3, 10
STEPS, RATE = 8_000, 2e-2
MULTIPLES = tuple(10 ** (half / 2) for half in range(11))
KINDS = "mlp", "resnet"
ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "silu": nn.SiLU}
GAINS = {"tanh": 5 / 3, "relu": 2**0.5, "silu": 2**0.5}
"""Standard deviation of initial weights times the root of their number, which keeps the scale from layer to layer."""

Pair = tuple[Tensor, Tensor]

# -- networks -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spec:
    """A network by numbers and names, which JSON can hold: `Spec(**dataclasses.asdict(spec)) == spec`.

    mlp      `depth` hidden layers of `width`
    resnet   a linear map to `width`, and `depth` residual blocks of two layers each
    """

    inputs: int
    outputs: int
    width: int = 50
    depth: int = 1
    kind: str = "mlp"
    activation: str = "tanh"

    def __post_init__(self) -> None:
        for name, least in (("inputs", 1), ("outputs", 1), ("width", 1), ("depth", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise OptionError(f"{name} of a network is {value!r}; expected a whole number >= {least}.")
        for name, known in (("kind", KINDS), ("activation", tuple(ACTIVATIONS))):
            if getattr(self, name) not in known:
                raise OptionError(f"{name} of a network is {getattr(self, name)!r}; expected one of {list(known)}.")

    @property
    def widest(self) -> int:
        """The largest number of units of any layer: the size of the largest Kronecker factor."""
        return max(self.inputs, self.outputs, self.width)


class Residual(nn.Module):
    """h + second(activation(first(h))): [B, width] to [B, width]."""

    def __init__(self, first: nn.Linear, activation: nn.Module, second: nn.Linear) -> None:
        super().__init__()
        self.first, self.activation, self.second = first, activation, second

    def forward(self, h: Float[Tensor, "batch width"]) -> Float[Tensor, "batch width"]:
        return h + self.second(self.activation(self.first(h)))


class Network(nn.Sequential):
    """Layers one after the other, for inputs of any floating type.

    Weights are float64 unless asked otherwise: where noise is small, the curvature of the data is 1e9 times the prior,
    and float32 cannot hold both in one matrix.
    """

    def forward(self, input: Float[Tensor, "batch inputs"]) -> Float[Tensor, "batch outputs"]:
        return super().forward(input.to(next(self.parameters()).dtype))


def build(spec: Spec, generator: torch.Generator | None = None, *, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The network of a specification, in eval mode; weights from `generator`, or from torch's global one."""

    def linear(inputs: int, outputs: int, scale: float = GAINS[spec.activation]) -> nn.Linear:
        layer = nn.utils.skip_init(nn.Linear, inputs, outputs, dtype=dtype)
        assert isinstance(layer, nn.Linear)
        nn.init.normal_(layer.weight, std=scale * inputs**-0.5, generator=generator)
        nn.init.zeros_(layer.bias)
        return layer

    activation = ACTIVATIONS[spec.activation]
    modules: list[nn.Module] = []
    if spec.kind == "resnet":
        modules.append(linear(spec.inputs, spec.width, 1.0))
        for _ in range(spec.depth):
            # blocks that start small keep the sum of any number of them at the scale of one
            second = linear(spec.width, spec.width, (spec.depth + 1) ** -0.5)
            modules.append(Residual(linear(spec.width, spec.width), activation(), second))
        modules.append(activation())
    else:
        for number in range(spec.depth):
            modules += [linear(spec.width if number else spec.inputs, spec.width), activation()]
    last = spec.width if spec.depth or spec.kind == "resnet" else spec.inputs
    return Network(*modules, linear(last, spec.outputs, 1.0)).eval()


# -- training -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Progress:
    """What a callback is told after an epoch: `loss` per row, and the evidence where it was evaluated."""

    epoch: int
    epochs: int
    loss: float
    log_marginal: float | None


def train(
    x: Float[Tensor, "rows inputs"],
    y: Tensor,
    task: str,
    spec: Spec,
    *,
    seed: int,
    epochs: int | None = None,
    batch_size: int | None = None,
    validation: Pair | None = None,
    callback: Callable[[Progress], object] | None = None,
    structure: str = "auto",
    dtype: torch.dtype = torch.float64,
) -> tuple[nn.Module, BaseLaplace]:
    """A trained network, and its posterior with prior and noise tuned; the same seed gives the same result.

    `task` is "regression" or "classification". Without `epochs` there are as many as make about `STEPS` steps. With
    `validation`, a pair (x, y), the weights kept are those with the smallest validation NLL, not the largest evidence.
    `structure` is "full", "kron" or "diag", or "auto". Torch's global generator is left alone.
    """
    x, y = _checked(x, y, task, spec, dtype)
    generator = torch.Generator().manual_seed(seed)
    everything, held_out = (x, y), validation
    if validation is not None:
        held_out = validation = _checked(*validation, task, spec, dtype)
    elif task == "classification":
        (x, y), held_out = _apart(x, y, generator)
    size = min(len(x), _batch_size(len(x)) if batch_size is None else batch_size)
    for name, value in (("batch_size", size), ("epochs", 1 if epochs is None else epochs)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise OptionError(f"{name} is {value!r}; expected a whole number >= 1, or None.")
    model = build(spec, generator, dtype=dtype)
    per_epoch = ceil(len(x) / size)
    epochs = ceil(STEPS / per_epoch) if epochs is None else epochs
    run = _Run(model, spec, x, y, task, epochs, size, generator)
    prior, sigma = run.climb(validation, callback)
    return model, run.posterior(prior, sigma, structure, everything, held_out)


@dataclass(frozen=True, eq=False)
class _Run:
    """What does not change while a network is trained."""

    model: nn.Module
    spec: Spec
    x: Tensor
    y: Tensor
    task: str
    epochs: int
    size: int
    generator: torch.Generator

    def climb(self, validation: Pair | None, callback: Callable[[Progress], object] | None) -> tuple[Prior, Tensor]:
        """Trains the model in place; prior and noise of the weights that were kept."""
        laplace = self.laplace("kron" if self.spec.widest <= FACTOR else "diag")
        prior = Prior.layerwise(laplace.space, 1.0)
        sigma = torch.ones_like(prior.precisions[0])
        parameters = list(self.model.parameters())
        optimiser = torch.optim.Adam(parameters, lr=RATE)
        # the decomposition of a wide factor takes seconds, and a few steps of the weights change nothing
        rounds = ROUNDS if self.spec.widest <= 500 else ROUNDS // 4
        every = max(ceil(self.epochs / rounds), ceil(25 * self.size / len(self.x)))
        rows = torch.randperm(len(self.x), generator=self.generator)[:EVIDENCE_ROWS].sort().values
        best: tuple[float, Prior, Tensor, list[Tensor]] | None = None
        for epoch in range(1, self.epochs + 1):
            # down to 1 % of the rate along a cosine, so that the evidence is finally taken close to a mode
            share = (epoch - 1) / self.epochs
            optimiser.param_groups[0]["lr"] = RATE * (0.01 + 0.99 * (1 + cos(pi * share)) / 2)
            loss = self.epoch(optimiser, prior, float(sigma))
            value = None
            if epoch % every == 0 or epoch == self.epochs:
                laplace.fit(_batches(self.x[rows], self.y[rows]), generator=self.generator)
                evidence = _scaled(laplace.evidence, len(self.x) / len(rows))
                prior, sigma, value = _reestimated(evidence, prior, sigma, UPDATES)
                score = value if validation is None else -self.held_out(laplace, prior, sigma, validation)
                if best is None or score > best[0]:
                    best = score, prior, sigma, [p.detach().clone() for p in parameters]
            if callback is not None:
                callback(Progress(epoch, self.epochs, loss, value))
        assert best is not None
        with torch.no_grad():
            for parameter, kept in zip(parameters, best[3], strict=True):
                parameter.copy_(kept)
                parameter.grad = None
        return best[1], best[2]

    def epoch(self, optimiser: torch.optim.Optimizer, prior: Prior, sigma: float) -> float:
        """One pass of steps, at unit noise, so that a rate means the same whatever sigma is; the mean loss."""
        scale = sigma**2 / len(self.x)
        decay = [float(part[0]) * scale for part in _split(prior.precision().expand(prior.size), self.model)]
        total = 0.0
        for rows in torch.randperm(len(self.x), generator=self.generator).split(self.size):
            optimiser.zero_grad()
            f, y = self.model(self.x[rows]), self.y[rows]
            regression = self.task == "regression"
            loss = (f - y).square().sum() / (2 * len(rows)) if regression else nn.functional.cross_entropy(f, y)
            loss.backward()
            for parameter, strength in zip(self.model.parameters(), decay, strict=True):
                assert parameter.grad is not None
                parameter.grad.add_(parameter.detach(), alpha=strength)
            optimiser.step()
            total += float(loss.detach()) * len(rows)
        return total / len(self.x)

    def laplace(self, structure: str) -> BaseLaplace:
        # exact factors cost a backward pass per output, one draw per row costs one in all
        source = "mc" if self.spec.outputs > 20 and structure == "kron" else "exact"
        return Laplace(self.model, self.task, "all", structure, estimator=source)

    def held_out(self, laplace: BaseLaplace, prior: Prior, sigma: Tensor, pair: Pair) -> float:
        """Mean negative log density of the predictive distribution."""
        laplace.prior_precision = prior.precisions
        if laplace.has_noise:
            laplace.sigma_noise = sigma
        out = laplace(pair[0], diagonal_output=True)
        if isinstance(out, tuple):
            return gaussian_nll(out[0], out[1] + sigma**2, pair[1])
        return nll(out, pair[1])

    def posterior(self, prior: Prior, sigma: Tensor, structure: str, rows: Pair, held_out: Pair | None) -> BaseLaplace:
        """The posterior of all rows; prior and noise go on from those of the training, under its own curvature.

        Softmax outputs of a network that is sure of its training rows have no curvature, so that the evidence leaves
        weights loose which predictions need. Where classes are predicted, the prior is therefore the multiple of
        that of the evidence, up to one under which the network is as good as fixed, with the smallest held-out NLL.
        """
        weights = sum(p.numel() for p in self.model.parameters())
        if structure == "auto":
            fits = weights <= FULL_WEIGHTS and len(self.x) * self.spec.outputs * weights**2 <= FULL_WORK
            structure = "full" if fits else "kron" if self.spec.widest <= FACTOR else "diag"
        laplace = self.laplace(structure)
        laplace.fit(_batches(self.x, self.y), generator=self.generator)
        prior, sigma, _ = _reestimated(laplace.evidence, prior, sigma, FINAL_UPDATES)
        if laplace.has_noise:
            laplace.sigma_noise = sigma
        elif held_out is not None:
            scaled = [prior.with_precisions(prior.precisions * multiple) for multiple in MULTIPLES]
            scores = [self.held_out(laplace, each, sigma, held_out) for each in scaled]
            # of multiples that score alike, the smallest: a posterior that still knows what it has not seen
            prior = next(each for each, found in zip(scaled, scores, strict=True) if found <= min(scores) + 0.002)
        laplace.prior_precision = prior.precisions
        if len(rows[0]) > len(self.x):
            laplace.fit(_batches(*rows), generator=self.generator)
        return laplace


# -- details --------------------------------------------------------------------------------------------------------


def _batches(x: Tensor, y: Tensor) -> list[Pair]:
    """For a pass of curvature."""
    return list(zip(x.split(1024), y.split(1024), strict=True))


def _apart(x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Pair, Pair | None]:
    """Rows to train on, and a tenth of them apart (more of few, at most 5000); none of a class with few rows."""
    count = min(max(len(x) // 10, min(len(x) // 4, 50)), 5000)
    order = torch.randperm(len(x), generator=generator)
    order = order[torch.bincount(y)[y[order]] >= 8]
    if len(x) < 40 or len(order) < count:
        return (x, y), None
    kept = torch.ones(len(x), dtype=torch.bool)
    kept[order[:count]] = False
    return (x[kept], y[kept]), (x[~kept], y[~kept])


def _split(flat: Float[Tensor, " params"], model: nn.Module) -> tuple[Tensor, ...]:
    """A flat vector by parameter tensors."""
    return flat.split([parameter.numel() for parameter in model.parameters()])


def _scaled(evidence: Evidence, scale: float | int) -> Evidence:
    """The evidence of `scale` times as many rows of the same kind."""
    if scale == 1:
        return evidence
    fit = evidence.fit
    more = GaussianFit(round(fit.targets * scale), fit.squares * scale) if isinstance(fit, GaussianFit) else fit * scale
    return replace(evidence, curvature=evidence.curvature * scale, fit=more)


@torch.no_grad()
def _reestimated(evidence: Evidence, prior: Prior, sigma: Tensor, updates: int) -> tuple[Prior, Tensor, float]:
    """MacKay's updates, no further than a factor e at a time, as the weights are not yet at their mode; log Z after.

    alpha = gamma / |theta|^2 per layer, and sigma^2 = SSE / (N - gamma): where the structure counts nearly as many
    determined parameters as there are targets, a tenth of the targets is still left to estimate the noise from.
    """
    squares = prior.sums(evidence.mean.square()).clamp_min(torch.finfo(prior.precisions.dtype).tiny)
    for _ in range(updates):
        gamma = evidence.effective_parameters(prior, sigma).clamp_min(0)
        if isinstance(fit := evidence.fit, GaussianFit):
            left = (fit.targets - gamma.sum()).clamp_min(fit.targets / 10)
            sigma = _near((fit.squares / left).sqrt(), sigma, SIGMA)
        prior = prior.with_precisions(_near(gamma / squares, prior.precisions, PRECISION))
    return prior, sigma, float(evidence.log_marginal(prior, sigma))


def _near(value: Tensor, before: Tensor, bounds: tuple[float, float]) -> Tensor:
    return value.clamp(before / e, before * e).clamp(*bounds)


def _batch_size(rows: int) -> int:
    """About sixteen steps an epoch, between 16 and 4096 rows each: a power of two."""
    return 2 ** min(12, max(4, round(log2(rows / 16))))


def _checked(x: Tensor, y: Tensor, task: str, spec: Spec, dtype: torch.dtype) -> Pair:
    """Targets as the likelihood takes them, [N, C] of `dtype` or [N] class numbers; inputs as they are."""
    if task not in ("regression", "classification"):
        raise OptionError(f"unknown task {task!r}; expected 'regression' or 'classification'.")
    if x.dim() != 2 or x.shape[1] != spec.inputs or not len(x) or len(x) != len(y):
        raise DataError(
            f"x has shape {tuple(x.shape)} and y {tuple(y.shape)}; expected [N, {spec.inputs}] and N targets, N >= 1."
        )
    if not bool(torch.isfinite(x).all()):
        raise DataError("x holds NaN or infinite values; expected finite ones. Fill in or leave out missing values.")
    if task == "regression":
        y = y.to(dtype).reshape(len(y), -1)
        if y.shape[1] != spec.outputs or not bool(torch.isfinite(y).all()):
            raise DataError(f"y has {y.shape[1]} targets a row, or NaN; expected {spec.outputs}, all of them finite.")
        return x, y
    if y.dim() != 1 or y.dtype.is_floating_point or int(y.min()) < 0 or int(y.max()) >= spec.outputs:
        raise DataError(f"y is {y.dtype} of shape {tuple(y.shape)}; expected class numbers 0 .. {spec.outputs - 1}.")
    return x, y.long()
