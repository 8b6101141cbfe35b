"""LaplacianAutoencoder: an autoencoder with a Gaussian posterior over its weights ("Laplacian Autoencoders", 2022).

    model = LaplacianAutoencoder(encoder, decoder)
    model.fit(loader, epochs=20)                    online: weights are drawn while they are trained
    model.fit_posthoc(loader)                       or: one pass over the data at the weights as they are
    model.latent(x), model.reconstruct(x), model.log_prob(x), model.ood_scores(x)
    model.impute(x, observed), model.embed(x, n=100), model.sample(16)
    model.save(path), LaplacianAutoencoder.load(path, encoder, decoder)

The posterior is N(theta, (prior + H / T)^-1) about the weights that the modules hold. Cost of a step: `online`; of a
prediction: a forward pass per draw, or with method="glm" a backward pass per output. Memory is linear in the weights
and in the pixels for every diagonal. The user's modules are trained in place and otherwise as they were.

>>> import torch
>>> from torch import nn
>>> x = torch.tensor([[1.0], [2.0]], dtype=torch.float64)
>>> encoder, decoder = nn.Linear(1, 1, bias=False).double(), nn.Identity()
>>> model = LaplacianAutoencoder(encoder, decoder, prior_precision=3.0, curvature="exact").fit_posthoc([x])
>>> model.posterior.variance()                       # 1 / (3 + 1 + 4)
tensor([0.1250], dtype=torch.float64)
>>> model.latent(x, method="glm").covariance.flatten()           # x^2 / 8
tensor([0.1250, 0.5000], dtype=torch.float64)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lapwing.errors import DataError, ModelError, NotFittedError, OptionError, StorageError
from lapwing.estimate.data_pass import Wrapped, named, no_batch, one_shot
from lapwing.estimate.naming import Estimator
from lapwing.evidence import Evidence, em
from lapwing.evidence.seen import Seen
from lapwing.likelihoods import Likelihood
from lapwing.linalg import Curvature
from lapwing.linalg.autocast import outside_autocast
from lapwing.linalg.budget import chunks
from lapwing.params import ParamSpace
from lapwing.posterior import Gaussian
from lapwing.predictive import glm
from lapwing.predictive.sampled import network_draws
from lapwing.priors import Prior
from lapwing.serialize import KINDS, compact, pack, pack_tree, read, unpack, unpack_tree, write
from lapwing.serialize.files import AnyPath
from lapwing.tangent import Tangent
from lapwing.tangent.inputs import Called, call
from lapwing.training.autoencoder.curvatures import estimator_of, of_batch
from lapwing.training.autoencoder.moments import (
    Latent,
    LogProb,
    Reconstruction,
    Scores,
    Spread,
    covariance,
    likelihood_of,
    of_linearised,
    signal,
    target_shape,
)
from lapwing.training.autoencoder.online import OnlineSteps, Running, Schedule
from lapwing.training.autoencoder.parts import Joined, Marked, Part, Whole
from lapwing.training.stepped_run import SteppedRun
from lapwing.training.train_mode import check_same, copied, following, restore, training_mode

METHODS = ("sample", "glm")
KIND = "autoencoder"
VERSION = 1


@dataclass(frozen=True)
class AutoencoderStep:
    """What a step of training did: its number, the loss per data point before it, and the gradient's norm."""

    number: int
    loss: float
    gradient: float


class LaplacianAutoencoder:
    """Two modules and a Gaussian over their weights; or one model, whose submodule `bottleneck` gives the latent code.

    For one model `example` is an input of a row or more: to decode, the model runs on zeros of that shape.

    `likelihood` is "mse" (a Gaussian of unit variance, as in the source), "learned_variance" (the decoder gives means
    and log-variances along the class axis), "bernoulli" (logits), or such an object of `lapwing.likelihoods`, as
    Gaussian(sigma). `curvature` is a name of `curvatures`, or a function of `lapwing.estimate`, with `samples` random
    cotangents where it draws any. The other numbers are those of `online.Schedule`; `points`, the number of data points
    N, is counted where `rescale` needs it and it is not given. Random numbers are the `generator`'s; what is asked
    later may bring one of its own.

    Data are tensors x, or pairs whose first entry is x (labels are not looked at). Where the decoder's outputs are of
    another shape with as many entries, x is compared with them in that shape.
    """

    def __init__(
        self,
        encoder: nn.Module,
        decoder: nn.Module | None = None,
        *,
        bottleneck: str | None = None,
        example: Tensor | None = None,
        likelihood: str | Likelihood = "mse",
        curvature: str | Estimator = "sampled",
        samples: int = 1,
        prior_precision: float | int = 1.0,
        start: float | int = 0.0,
        forgetting: float | int = 1e-4,
        weight: float | int = 1.0,
        rescale: bool = False,
        temperature: float | int = 1.0,
        at: str = "draw",
        points: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        if (decoder is None) == (bottleneck is None) or (bottleneck is None) != (example is None):
            raise OptionError(
                "expected an encoder and a decoder, or one model with `bottleneck`, the name of the submodule that "
                "gives the latent code, and `example`, an input or more; found another mixture of them."
            )
        if points is not None:
            _count(points, "points")
        self.schedule = Schedule(prior_precision, start, forgetting, weight, rescale, temperature, at)
        self.likelihood = likelihood_of(likelihood)
        self.curvature, self.samples = curvature, samples
        self._estimator, self._of_batch = estimator_of(curvature, samples), of_batch(curvature, samples)
        self.points, self.generator = points, generator
        if decoder is not None:
            self.whole: Whole = Joined(encoder, decoder)
        else:
            assert bottleneck is not None
            assert example is not None
            self.whole = Marked(encoder, bottleneck, example)
        self.space = ParamSpace.of(self.whole)
        self._tangents = {part: Tangent(self.whole.view(part), self.space, evaluate=True) for part in _PARTS}
        if example is not None:
            network: Any = self._tangents["whole"].network()
            network.check(example)
        self.running: Running | None = None
        self.entropy: float | None = None
        self._shape: torch.Size | None = None
        self._given: torch.Size | None = None

    @classmethod
    def released(cls, encoder: nn.Module, decoder: nn.Module | None = None, **options: Any) -> LaplacianAutoencoder:
        """As the authors' released code sets it: batches scaled by N / B and halved, of which a step forgets 1/1000.

        H begins with N, beside a prior of 1, and settles near 500 times the sum over the data: a cold posterior.
        """
        setting: dict[str, Any] = {"weight": 0.5, "rescale": True, "forgetting": 1e-3, "start": 1.0}
        return cls(encoder, decoder, **(setting | options))

    # -- training --------------------------------------------------------------------------------------------------

    def fit(
        self,
        loader: Iterable[Any],
        epochs: int,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        checkpoint: AnyPath | None = None,
        checkpoint_every: int = 100,
        callback: Callable[[AutoencoderStep], object] | None = None,
    ) -> list[AutoencoderStep]:
        """Online training; what each step did. The posterior goes on from the one there is, if there is one.

        `optimizer` is any of torch's over the modules' parameters that needs no closure, Adam(lr=1e-3) if none is
        given; `scheduler` makes a schedule of learning rates from it, which takes a step per epoch, and is told the
        mean loss where it looks at one. The network runs in eval mode. With a `checkpoint`, the path of a file, the run
        is kept there every `checkpoint_every` steps; called again in the same way, also in another process, it goes on
        from there and ends bit for bit where it would have.
        """
        data = _Inputs(loader, self)
        points = self.points
        if self.schedule.rescale and points is None:
            points = data.count()
        running = self.running or Running.of(self.schedule, self.space.size, points)
        made = self._steps(optimizer, scheduler, running, points)
        return self._run(made, data, epochs, checkpoint, checkpoint_every, callback)

    def fit_posthoc(
        self,
        loader: Iterable[Any],
        epochs: int = 0,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        checkpoint: AnyPath | None = None,
        checkpoint_every: int = 100,
        callback: Callable[[AutoencoderStep], object] | None = None,
        tune_prior: bool = False,
    ) -> LaplacianAutoencoder:
        """Plain training for some epochs, or none for a trained model; then H of all data, in one pass.

        The model is trained as one would by hand, in train mode: normalisation keeps its statistics, dropout drops, and
        of modules that are in train mode already each keeps its own. H is taken in eval mode. Afterwards every module
        has the mode that it came with. Random numbers of the training follow the `generator`, where there is one.

        `start`, `forgetting`, `weight` and `rescale` are for online training; H is the sum over the data. `tune_prior`
        takes the prior precision to where the marginal likelihood is largest, from the one that was given.
        """
        data = _Inputs(loader, self)
        if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 0:
            raise OptionError(f"epochs is {epochs!r}; expected a whole number >= 0.")
        if epochs:
            made = self._steps(optimizer, scheduler, None, None)
            with ExitStack() as modes:
                for module in self.whole.children():  # the user's own
                    modes.enter_context(training_mode(module))
                modes.enter_context(following(self.generator, self.space.device))
                self._run(made, data, epochs, checkpoint, checkpoint_every, callback)
        seen = Seen(regression=False, printing=False)
        whole = self._tangents["whole"]
        found = self._estimator(whole, self.likelihood, seen.watching(data), generator=self.generator)
        if tune_prior:
            theta = self.space.values(self.whole)
            evidence = Evidence(found, theta, seen.fit(theta.dtype))
            prior = Prior.isotropic(self.space, float(self.schedule.prior_precision))
            tuned = em(evidence, prior, temperature=float(self.schedule.temperature))
            self.schedule = replace(self.schedule, prior_precision=float(tuned.prior.precisions[0]))
        self.running = Running(self.schedule, self.space.size, found, 0.0)
        return self

    def _steps(
        self,
        optimizer: torch.optim.Optimizer | None,
        scheduler: Callable[[torch.optim.Optimizer], Any] | None,
        running: Running | None,
        points: int | None,
    ) -> OnlineSteps:
        tangent = self._tangents["whole"]
        optimizer = torch.optim.Adam(self.whole.parameters(), lr=1e-3) if optimizer is None else optimizer
        _check_optimizer(optimizer, tangent)
        rate = None if scheduler is None else _scheduled(scheduler, optimizer)
        name = self.curvature if isinstance(self.curvature, str) else "a function"
        settings = {"curvature": name, "samples": self.samples, "likelihood": repr(self.likelihood)}
        return OnlineSteps(
            tangent, self.likelihood, optimizer, self._of_batch, running, points, self.generator, rate, settings
        )

    def _run(
        self,
        steps: OnlineSteps,
        data: _Inputs,
        epochs: int,
        checkpoint: AnyPath | None,
        every: int,
        callback: Callable[[AutoencoderStep], object] | None,
    ) -> list[AutoencoderStep]:
        run = SteppedRun.of(steps, data, epochs, None, False, 0.0, checkpoint, every, steps.end_epoch)
        told: list[AutoencoderStep] = []
        for step in run.steps():
            told.append(AutoencoderStep(step.number, step.loss, step.gradient))
            self.running = steps.running
            if callback is not None:
                callback(told[-1])
        return told

    # -- the posterior ---------------------------------------------------------------------------------------------

    @property
    def posterior(self) -> Gaussian:
        """N(theta, (prior + H / T)^-1), about the weights that the modules hold now."""
        if self.running is None:
            raise NotFittedError("there is no posterior yet; expected fit or fit_posthoc first.")
        theta = self.space.values(self.whole)
        return Gaussian(theta, self.running.precision(theta))

    # -- uncertainty -----------------------------------------------------------------------------------------------

    def latent(
        self, x: Tensor, samples: int = 100, method: str = "sample", generator: torch.Generator | None = None
    ) -> Latent:
        """The latent code of every input: mean and covariance, by sampled encoders or by linearisation ("glm")."""
        _choose(method)
        if method == "glm":
            mean, found = glm.moments(self.posterior, self._tangents["encoder"].at(x))
            return Latent(mean, found)
        draws = self.embed(x, _count(samples, "samples", 2), generator)
        return Latent(draws.mean(0), covariance(draws.flatten(2)))

    def reconstruct(
        self, x: Tensor, samples: int = 100, method: str = "sample", generator: torch.Generator | None = None
    ) -> Reconstruction:
        """Mean and variance of the reconstruction of every input."""
        return self._moments("whole", x, samples, method, generator)

    def decode(
        self, z: Tensor, samples: int = 100, method: str = "sample", generator: torch.Generator | None = None
    ) -> Reconstruction:
        """Mean and variance of what latent points z are decoded to."""
        return self._moments("decoder", z, samples, method, generator)

    def log_prob(self, x: Tensor, samples: int = 100, generator: torch.Generator | None = None) -> LogProb:
        """log p(x) = log E[p(x | theta, x)] of every input over sampled networks, with its Monte-Carlo error."""
        y = self.target(x)
        draws = self._draws("whole", x, _count(samples, "samples", 2), generator)
        return LogProb.of(torch.cat([self._log_probs(part, y) for part in draws]))

    def measure_entropy(
        self, loader: Iterable[Any], samples: int = 100, generator: torch.Generator | None = None
    ) -> float:
        """The mean of -log p(x) over data, which `typicality` compares with; kept as `entropy`."""
        total, points = 0.0, 0
        for x, _ in _Inputs(loader, self):
            total -= float(self.log_prob(x, samples, generator).value.sum())
            points += len(x)
        if not points:
            raise no_batch()
        self.entropy = total / points
        return self.entropy

    def typicality(
        self, x: Tensor, samples: int = 100, generator: torch.Generator | None = None
    ) -> Float[Tensor, " batch"]:
        """| -log p(x) - entropy | of every input: small where x is as likely as data are (Nalisnick et al., 2019)."""
        if self.entropy is None:
            raise NotFittedError(
                "the mean of -log p(x) over the data is not known; expected measure_entropy(loader) first."
            )
        return (-self.log_prob(x, samples, generator).value - self.entropy).abs()

    def ood_scores(self, x: Tensor, samples: int = 100, generator: torch.Generator | None = None) -> Scores:
        """Scores that are larger for what is less like the data: see `Scores`. One set of networks gives them all."""
        y, n = self.target(x), _count(samples, "samples", 2)
        spread, codes, each = Spread(), Spread(), []
        for z, f in self._pairs(x, n, generator):
            codes.add(z)
            spread.add(self._signals(f)[0])
            each.append(self._log_probs(f, y))
        surprise = -LogProb.of(torch.cat(each)).value
        return Scores(
            surprise,
            None if self.entropy is None else (surprise - self.entropy).abs(),
            codes.variance.flatten(1).sum(1),
            spread.variance.flatten(1).sum(1),
        )

    # -- uses ------------------------------------------------------------------------------------------------------

    def embed(
        self, x: Tensor, n: int = 100, generator: torch.Generator | None = None
    ) -> Float[Tensor, "n batch *latent"]:
        """Latent codes by n sampled encoders."""
        generator = generator or self.generator
        return network_draws(self.posterior, self._tangents["encoder"], x, _count(n, "n"), generator)

    def impute(
        self,
        x: Tensor,
        observed: Tensor,
        n: int = 5,
        steps: int = 5,
        average: int = 5,
        fill: float | int | Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "n batch *data"]:
        """n completions of x, whose entries count where `observed` is True; those are returned as they are.

        Each of n chains begins with `fill` in the missing part (uniform noise in [0, 1] by default), and `steps` times
        draws a network and puts its reconstruction there; in the end the missing part is the mean of `average`
        reconstructions by further networks (source, A.3, which has one step). What x holds there is never looked at.
        """
        n, steps, average = _count(n, "n"), _count(steps, "steps"), _count(average, "average")
        if not isinstance(observed, Tensor) or observed.dtype != torch.bool:
            found = observed.dtype if isinstance(observed, Tensor) else type(observed).__name__
            raise DataError(f"observed is {found}; expected a boolean tensor: True where x is known.")
        try:
            known = observed.expand(x.shape)
        except RuntimeError as error:
            raise DataError(
                f"observed has shape {tuple(observed.shape)}; expected that of x, {tuple(x.shape)}, or one that "
                "broadcasts to it."
            ) from error
        generator, chains = generator or self.generator, []
        for _ in range(n):
            if fill is None:
                place = x.device if generator is None else generator.device
                start = torch.rand(x.shape, dtype=x.dtype, device=place, generator=generator).to(x.device)
            else:
                start = torch.as_tensor(fill, dtype=x.dtype, device=x.device).expand(x.shape)
            state = torch.where(known, x, start)
            for _ in range(steps):
                state = torch.where(known, x, self._once(state, 1, generator))
            chains.append(torch.where(known, x, self._once(state, average, generator)))
        return torch.stack(chains)

    def sample(
        self,
        n: int,
        steps: int = 5,
        average: int = 5,
        shape: torch.Size | tuple[int, ...] | None = None,
        generator: torch.Generator | None = None,
    ) -> Float[Tensor, "n *data"]:
        """n new data points: chains from noise, as `impute` with nothing observed. `shape` is that of one of them."""
        n = _count(n, "n")
        shape = self._given if shape is None else torch.Size(shape)
        if shape is None:
            raise NotFittedError("the shape of the data is not known; expected fit or fit_posthoc first, or `shape`.")
        blank = torch.zeros(n, *shape, dtype=self.space.dtype, device=self.space.device)
        return self.impute(blank, torch.zeros_like(blank, dtype=torch.bool), 1, steps, average, None, generator)[0]

    # -- files -----------------------------------------------------------------------------------------------------

    def save(self, path: AnyPath) -> None:
        """Weights, posterior and settings in one file, for `load`; written atomically, without pickle."""
        if self.running is None:
            raise NotFittedError("there is no posterior to save yet; expected fit or fit_posthoc first.")
        own = KINDS.get(type(self.likelihood).__name__) is not type(self.likelihood)
        self.running.curvature = None if self.running.curvature is None else compact(self.running.curvature)
        parts = {"curvature": self.running.curvature, "likelihood": None if own else self.likelihood}
        packed = {name: dict(zip(("description", "tensors"), pack(part), strict=True)) for name, part in parts.items()}
        description, tensors = pack_tree(
            {
                **packed,
                "schedule": asdict(self.schedule),
                "start": self.running.start,
                "curvature_name": self.curvature if isinstance(self.curvature, str) else None,
                "samples": self.samples,
                "points": self.points,
                "bottleneck": self.whole.bottleneck if isinstance(self.whole, Marked) else None,
                "entropy": self.entropy,
                "shape": None if self._given is None else list(self._given),
                "weights": copied(self.whole),
                "generator": None if self.generator is None else self.generator.get_state(),
            }
        )
        write(path, tensors, {"kind": KIND, "version": VERSION, "state": description})

    @staticmethod
    def load(
        path: AnyPath,
        encoder: nn.Module,
        decoder: nn.Module | None = None,
        *,
        likelihood: Likelihood | None = None,
        curvature: Estimator | None = None,
        generator: torch.Generator | None = None,
    ) -> LaplacianAutoencoder:
        """What `save` wrote, over modules built as they were, which get the weights of the file.

        A model with a named bottleneck is given alone. A likelihood or a curvature of one's own, which no file can
        hold, is given again, as is the generator where there was one, which goes on from where it was.
        """
        tensors, metadata = read(path)
        if metadata.get("kind") != KIND:
            raise StorageError(
                f"the file holds {metadata.get('kind')!r}; expected {KIND!r}, as LaplacianAutoencoder.save writes."
            )
        if metadata.get("version", 0) > VERSION:
            raise StorageError(
                f"the file has version {metadata['version']}; expected at most {VERSION}. It was written by a later "
                "lapwing: upgrade to read it."
            )
        try:
            return _loaded(unpack_tree(metadata["state"], tensors), encoder, decoder, likelihood, curvature, generator)
        except (KeyError, TypeError, DataError) as error:
            raise StorageError(
                f"the file is incomplete ({error}); expected what LaplacianAutoencoder.save writes."
            ) from error

    # -- below -----------------------------------------------------------------------------------------------------

    def target(self, x: Any) -> Tensor:
        """x in the shape of the outputs."""
        if not isinstance(x, Tensor) or x.dim() < 2 or not len(x):
            found = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise DataError(f"the inputs are {found}; expected a tensor [batch, ...] of one row or more.")
        if self._shape is None or self._given != x.shape[1:]:
            with torch.no_grad():
                out = call(self._tangents["whole"].network(), x[:1])
            shape = target_shape(self.likelihood, out.shape)[1:]
            if shape.numel() != x.shape[1:].numel():
                raise ModelError(
                    f"the decoder gives outputs of shape {tuple(out.shape[1:])} for inputs of shape "
                    f"{tuple(x.shape[1:])}; expected as many entries, or with a learned variance twice as many."
                )
            self._shape, self._given = shape, x.shape[1:]
        return x.reshape(len(x), *self._shape)

    def _draws(
        self, part: Part, x: Tensor, n: int, generator: torch.Generator | None
    ) -> Iterator[Float[Tensor, "k batch *out"]]:
        """Outputs of n sampled networks, in parts within the budget."""
        tangent, posterior = self._tangents[part], self.posterior
        entries = len(x) * (x.shape[1:].numel() if part == "whole" else 1)
        for each in chunks(n, 8 * entries * self.space.dtype.itemsize, tangent.budget):
            yield network_draws(posterior, tangent, x, each.stop - each.start, generator or self.generator)

    @torch.no_grad()
    def _pairs(self, x: Tensor, n: int, generator: torch.Generator | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Latent codes [1, B, *latent] and outputs [1, B, *out] of n sampled networks."""
        posterior, tangent = self.posterior, self._tangents["whole"]
        network: Any = tangent.network()
        halves = [Called(network.view(part)) for part in ("encoder", "decoder")]
        for _ in range(n):
            theta = posterior.sample(1, generator or self.generator)[0]
            weights = {f"model.{name}": value for name, value in tangent.tensors(theta).items()}
            z = torch.func.functional_call(halves[0], weights, (x,))
            f = torch.func.functional_call(halves[1], weights, (z,))
            yield z.to(self.space.dtype).unsqueeze(0), f.to(self.space.dtype).unsqueeze(0)

    @outside_autocast
    def _moments(
        self, part: Part, x: Tensor, samples: int, method: str, generator: torch.Generator | None
    ) -> Reconstruction:
        _choose(method)
        if method == "glm":
            found = glm.variances(self.posterior, self._tangents[part].at(x))
            return of_linearised(self.likelihood, *found)
        means, noises = Spread(), Spread()
        for draws in self._draws(part, x, _count(samples, "samples", 2), generator):
            mean, noise = self._signals(draws)
            means.add(mean)
            noises.add(noise)
        assert isinstance(means.mean, Tensor)
        assert isinstance(noises.mean, Tensor)
        return Reconstruction(means.mean, means.variance, noises.mean)

    def _once(self, x: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
        """The mean of reconstructions by `count` sampled networks, in the shape of x."""
        drawn = torch.cat([self._signals(part)[0] for part in self._draws("whole", x, count, generator)])
        return drawn.mean(0).reshape(x.shape).to(x.dtype)

    def _signals(self, draws: Float[Tensor, "n batch *out"]) -> tuple[Tensor, Tensor]:
        """Mean and noise [n, batch, *data] of x by every draw."""
        mean, noise = signal(self.likelihood, draws.flatten(0, 1))
        return mean.unflatten(0, draws.shape[:2]), noise.unflatten(0, draws.shape[:2])

    def _log_probs(self, draws: Float[Tensor, "n batch *out"], y: Tensor) -> Float[Tensor, "n batch"]:
        each = self.likelihood.log_prob(draws.flatten(0, 1), y.repeat(len(draws), *(1 for _ in y.shape[1:])))
        return each.unflatten(0, draws.shape[:2])


_PARTS: tuple[Part, ...] = ("whole", "encoder", "decoder")


@dataclass
class _Inputs(Wrapped):
    """Pairs (x, x in the shape of the outputs) of the batches of a loader."""

    loader: Iterable[Any]
    owner: LaplacianAutoencoder

    @property
    def source(self) -> Iterable[Any]:
        return self.loader

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number, batch in enumerate(self.loader):
            with named(number):
                x: Any = batch[0] if isinstance(batch, (tuple, list)) and len(batch) else batch
                target = self.owner.target(x)
            yield x, target

    def count(self) -> int:
        """The number of data points."""
        if one_shot(self.loader):
            raise DataError(
                f"the loader is a {type(self.loader).__name__} that can be read only once; expected one that starts "
                "again, or `points`, the number of data points."
            )
        points = sum(len(x) for x, _ in self)
        if not points:
            raise no_batch()
        return points


def _loaded(
    kept: Mapping[str, Any],
    encoder: nn.Module,
    decoder: nn.Module | None,
    likelihood: Likelihood | None,
    curvature: Estimator | None,
    generator: torch.Generator | None,
) -> LaplacianAutoencoder:
    bottleneck, weights = kept["bottleneck"], kept["weights"]
    if (bottleneck is None) != (decoder is not None):
        found = "an encoder and a decoder" if bottleneck is None else f"one model with the bottleneck {bottleneck!r}"
        raise StorageError(f"the file is of {found}; expected the same modules. Build them as they were.")
    part = unpack(kept["likelihood"]["description"], kept["likelihood"]["tensors"])
    for name, ours, stored in (
        ("likelihood", likelihood, part),
        ("curvature", curvature, kept["curvature_name"]),
        ("generator", generator, kept["generator"]),
    ):
        there = (stored is not None) if name == "generator" else stored is None
        if there != (ours is not None):
            state = "one that is not in the file" if there else "none of one's own"
            raise StorageError(
                f"{name} is {'not given' if ours is None else 'given'}, and what was saved had {state}; expected "
                f"load(..., {name}=...) exactly where there was one of one's own."
            )
    made = LaplacianAutoencoder(
        encoder,
        decoder,
        bottleneck=bottleneck,
        example=None if bottleneck is None else weights["example"],
        likelihood=likelihood or part,
        curvature=curvature or kept["curvature_name"],
        samples=kept["samples"],
        points=kept["points"],
        generator=generator,
        **kept["schedule"],
    )
    device = made.space.device
    tensors = {name: tensor.to(device) for name, tensor in kept["curvature"]["tensors"].items()}
    found = unpack(kept["curvature"]["description"], tensors)
    assert found is None or isinstance(found, Curvature)
    check_same(made.whole, weights)
    restore(made.whole, weights)
    if generator is not None:
        generator.set_state(kept["generator"])
    made.running = Running(made.schedule, made.space.size, found, float(kept["start"]))
    made.entropy = kept["entropy"]
    if kept["shape"] is not None:
        made.target(torch.zeros(1, *kept["shape"], dtype=made.space.dtype, device=device))
    return made


def _scheduled(scheduler: object, optimizer: torch.optim.Optimizer) -> Any:
    made = scheduler(optimizer) if callable(scheduler) else scheduler
    if not callable(scheduler) or not callable(getattr(made, "step", None)):
        raise OptionError(
            f"scheduler is or makes a {type(made).__name__}; expected a function of the optimiser that makes a "
            "schedule, as lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10) does."
        )
    return made


def _check_optimizer(optimizer: object, tangent: Tangent) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, torch.optim.LBFGS):
        raise OptionError(
            f"the optimizer is {type(optimizer).__name__}; expected one of torch.optim that takes steps on gradients, "
            "as torch.optim.Adam(parameters) does. LBFGS evaluates the loss again and again, at other draws each time."
        )
    held = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    missing = [name for name, tensor in tangent.parameters.items() if id(tensor) not in held]
    if missing:
        raise OptionError(
            f"the optimizer does not hold the parameter {missing[0]!r}; expected every trainable parameter of the "
            "modules. Freeze others with requires_grad=False before the autoencoder is made."
        )


def _choose(method: object) -> None:
    if method not in METHODS:
        raise OptionError(f"unknown method {method!r}; expected one of {list(METHODS)}.")


def _count(value: object, name: str, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OptionError(f"{name} is {value!r}; expected a whole number >= {least}.")
    return value
