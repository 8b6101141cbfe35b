"""Continual: one task after another with one network, each under what is known of the weights from those before it.

    online       the posterior of the tasks so far is the prior of the next: curvatures add (thesis 5.23, 5.25)
    non_online   the same with the curvatures of all tasks taken anew at the latest weights: sees all data (5.24)
    ewc          one quadratic per task, each around the weights it ended with (5.26)
    si           the same with importances from the steps of training in the place of curvature (5.27, 5.28)
    sequential   nothing but the base prior: what forgetting looks like
    joint        all data so far: what could be reached

A task costs its training, whose every step has the gradient of the quadratic besides (`quadratic_term`), and a pass
over its data for the curvature. No data are kept, except by non_online and joint, which keep the loaders.

>>> import torch
>>> from torch import nn
>>> _ = torch.manual_seed(0)
>>> model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
>>> tasks = Continual(model, "regression", structure="full")
>>> newton = lambda params: torch.optim.LBFGS(params, line_search_fn="strong_wolfe", tolerance_grad=1e-12)
>>> x = torch.ones(2, 1, dtype=torch.float64)
>>> for y in (1 * x, 4 * x):
...     _ = tasks.learn([(x, y)], epochs=5, optimizer=newton)
>>> round(model.weight.item(), 9), tasks.posterior.variance().item()        # (2 * 1 + 2 * 4) / (1 + 2 + 2), 1 / 5
(2.0, 0.2)
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lapwing.errors import DataError, NotFittedError, OptionError, ParameterError, StorageError
from lapwing.estimate.data_pass import Wrapped, pairs
from lapwing.estimate.naming import Estimator, by_name
from lapwing.likelihoods import Likelihood
from lapwing.likelihoods.tasks import TASKS
from lapwing.linalg import Curvature, Diagonal, total
from lapwing.linalg.autocast import outside_autocast
from lapwing.params import ParamSpace
from lapwing.posterior import Gaussian
from lapwing.priors import Prior
from lapwing.serialize import KINDS, compact, pack, read, unpack, write
from lapwing.serialize.files import AnyPath
from lapwing.tangent import Tangent
from lapwing.tangent.inputs import call, moved
from lapwing.training.gauss_newton import GaussNewton
from lapwing.training.importance import Importance
from lapwing.training.loop import Epoch
from lapwing.training.memory import MERGED, Memory, added, joined, split
from lapwing.training.objective import Objective, count
from lapwing.training.options import check_numbers
from lapwing.training.quadratic_term import Anchor, QuadraticTerm
from lapwing.training.run_file import RunFile
from lapwing.training.task_run import TaskRun
from lapwing.training.train_mode import check_same, copied, following, restore, training_mode

METHODS = ("online", "non_online", "ewc", "si", "sequential", "joint")
KEEP_LOADERS = ("non_online", "joint")
WITHOUT_POSTERIOR = ("si", "sequential")
MERGING = ("online", "non_online", "joint")
KIND = "continual"
VERSION = 1
Heads = Sequence[nn.Module] | Callable[[], nn.Module]


@dataclass(frozen=True)
class Learned:
    """One task: its number from 0 on, its data points, and the loss of every epoch, the penalty included."""

    task: int
    points: int
    losses: tuple[float, ...]


class Continual:
    """Learns tasks one after the other with `model`, in place.

    `structure` and `estimator` name the curvature as `Laplace` does ("exact" unless given), with `options` of the
    structure; or `structure` is a function of `lapwing.estimate`. `prior_precision` is that of the base prior around
    zero, one number. `multiplier` is lambda, on the curvature of every task. `terms` says what becomes of sums of
    Kronecker products: "keep" them, or merge them into one of constant memory, by "factors" or as the "nearest" one.
    `epsilon` is that of Synaptic Intelligence.

    `heads` are modules for the tasks, `head(model(x))`, in a list, or a function that makes one: the weights of `model`
    are shared and carry the posterior, and each head stays as its task has left it.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: str | Likelihood,
        *,
        method: str = "online",
        structure: str | Estimator = "kron",
        estimator: str | None = None,
        options: Mapping[str, Any] | None = None,
        prior_precision: float | int = 1.0,
        multiplier: float | int = 1.0,
        terms: str = "keep",
        heads: Heads | None = None,
        epsilon: float | int = 0.1,
        generator: torch.Generator | None = None,
    ) -> None:
        self.method = _choose(method, METHODS, "method")
        self.terms = _choose(terms, tuple(MERGED), "terms")
        self.likelihood = _likelihood(likelihood)
        self.model, self.structure, self.source = model, structure, estimator
        self.space = ParamSpace.of(model)
        for name, value, least in (("prior_precision", prior_precision, 0), ("multiplier", multiplier, 0)):
            _check_number(name, value, least)
        if method == "si":
            _check_number("epsilon", epsilon, 0, above=True)
            if structure not in ("kron", "diag"):  # kron is what nobody asked for
                raise OptionError(
                    f"structure is {structure!r} with method='si', whose importances are one number per weight; "
                    "expected 'diag', or none given."
                )
        if terms != "keep" and method not in MERGING:
            raise OptionError(
                f"terms is {terms!r} with method={method!r}, whose quadratics are each around weights of its own, or "
                f"which has none; expected 'keep', or one of the methods {list(MERGING)}."
            )
        self.prior_precision, self.multiplier, self.epsilon = prior_precision, multiplier, epsilon
        self.options, self.generator = dict(options or {}), generator
        self._estimator = _estimator(structure, estimator, self.options)
        self._given_heads = _checked_heads(heads)
        self._heads: list[nn.Module] = []
        self._loaders: list[Iterable[Any]] = []
        self._memory: Memory | None = None
        self._posteriors: dict[int | None, tuple[float, Gaussian]] = {}
        self._tangents: dict[int | None, Tangent] = {}

    # -- what is known ---------------------------------------------------------------------------------------------

    @property
    def tasks(self) -> int:
        """How many were learnt."""
        return 0 if self._memory is None else len(self._memory.points)

    @property
    def memory(self) -> Memory:
        """What is kept of the tasks so far."""
        if self._memory is None:
            raise NotFittedError("no task was learnt yet; expected learn(loader) to be called first.")
        return self._memory

    @property
    def heads(self) -> tuple[nn.Module, ...]:
        """The heads of the tasks so far; empty where one network serves all."""
        return tuple(self._heads)

    @property
    def merge_error(self) -> float:
        """How far merged Kronecker products are from their sum at most, in Frobenius norm, relative to themselves.

        Zero where terms are kept. Of two tasks it is the distance; of more, the sum of those of all merges.
        """
        return self.memory.merge_error

    @property
    def posterior(self) -> Gaussian:
        """The Gaussian over the shared weights after the tasks so far."""
        return self.posterior_of(None)

    def posterior_of(self, head: int | None, prior_precision: float | int | None = None) -> Gaussian:
        """The Gaussian over the shared weights, or over them and those of a head.

        Another precision of the base prior than that of training costs little, as the curvature stays decomposed.
        """
        memory = self.memory
        base = self.prior_precision if prior_precision is None else prior_precision
        _check_number("prior_precision", base, 0)
        if self.method in WITHOUT_POSTERIOR:
            raise OptionError(
                f"method={self.method!r} has no posterior; expected 'online', 'non_online', 'ewc' or 'joint'. Predict "
                "with pred='map'."
            )
        kept = self._posteriors.get(head)
        if kept is not None and kept[0] == base:
            return kept[1]
        mean, curvature = memory.mean, memory.curvature
        if curvature is None:  # of quadratics that are kept one by one
            curvature = reduce(total, (anchor.curvature for anchor in memory.anchors))
        if head is not None:
            own = memory.heads[head]
            mean, curvature = torch.cat([mean, own.mean]), joined(curvature, own.curvature)
        with torch.inference_mode(False), torch.no_grad():
            found = Gaussian(mean, curvature.with_prior(base))
        self._posteriors[head] = float(base), found
        return found

    def penalty(self, theta: Float[Tensor, " params"]) -> Float[Tensor, ""]:
        """What the next task is learnt under, beside its own loss: the quadratic at flat shared weights, not over N."""
        self.space.check(theta)
        anchors, base = self._prior(self.space)
        away = theta - base.mean
        value = (away * base.precision() * away).sum() / 2
        for anchor in anchors:
            away = theta - anchor.mean
            value = value + (away * anchor.curvature.mv(away)).sum() / 2
        return value

    def term(self, points: int) -> QuadraticTerm:
        """That quadratic over N = `points`, for a loop of one's own; `term.at(tensors)` adds its gradient.

        The tensors are the trainable parameters in their order. When the task is learnt, `remember` adds it.
        """
        self._check_own_loop()
        check_numbers(points=points)
        self._check_weights()
        return QuadraticTerm.of(*self._prior(self.space), self.space, points)

    def _prior(self, space: ParamSpace) -> tuple[tuple[Anchor, ...], Prior]:
        """Quadratics over the shared weights, the first of the space, and the base prior over all."""
        base = Prior.isotropic(space, self.prior_precision)
        if self._memory is None or self.method in ("sequential", "joint"):
            return (), base
        anchors = self._memory.anchors
        if self.method in ("online", "non_online"):  # one Gaussian, with the base around its mean as well
            assert self._memory.curvature is not None
            anchors = (Anchor(self._memory.mean, self._memory.curvature),)
            centre = torch.zeros(space.size, dtype=space.dtype, device=space.device)
            centre[: self.space.size] = self._memory.mean
            base = replace(base, mean=centre)
        return anchors, base

    # -- learning --------------------------------------------------------------------------------------------------

    @outside_autocast
    def learn(
        self,
        loader: Iterable[Any],
        epochs: int = 20,
        optimizer: Callable[[list[Tensor]], torch.optim.Optimizer] = lambda params: torch.optim.Adam(params, 1e-3),  # pyright: ignore[reportArgumentType]
        scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        checkpoint: AnyPath | None = None,
        callback: Callable[[Epoch], object] | None = None,
        *,
        checkpoint_every: int = 1,
        checkpoint_every_batches: int | None = None,
        points: int | None = None,
    ) -> Learned:
        """Trains on one task, and adds what it says of the weights to what is known.

        `optimizer` makes one from a list of tensors, `scheduler` one from the optimiser; it takes a step per epoch. The
        loss is the mean over a batch, and the quadratic is divided by `points`, the number of data points: counted
        unless given. If anything fails, the model is as it was. With a `checkpoint`, the path of a file, the run is
        kept there after every `checkpoint_every` epochs, and inside them after every `checkpoint_every_batches` if that
        is given; called again in the same way, also in another process, it goes on from there, and ends bit for bit
        where it would have ended.
        """
        counts = {"points": points, "checkpoint_every_batches": checkpoint_every_batches}
        check_numbers(epochs=epochs, **{name: value for name, value in counts.items() if value is not None})
        self._check_weights()
        heads = self._with_next_head(self._heads)
        loaders = [*self._loaders, loader] if self.method in KEEP_LOADERS else [loader]
        self._check_loaders(loaders)
        network, batches = self._trained(heads, loaders)
        before = copied(network)
        modes = training_mode(network)
        try:
            with modes, following(self.generator, self.space.device):
                counted = count(loader, points)[1]
                whole = counted + sum(self.memory.points if self.method == "joint" and self.tasks else ())
                run = self._run(network, batches, loaders, optimizer, scheduler, whole)
                term = QuadraticTerm.of(*self._prior(run.objective.tangent.space), run.objective.tangent.space, whole)
                keeper = None
                if checkpoint is not None:
                    keeper = RunFile.of(checkpoint, checkpoint_every, self._same(network, epochs, whole, run))
                run.go(term, epochs, callback, keeper, checkpoint_every, checkpoint_every_batches)
                run.optimiser.zero_grad(set_to_none=True)
                memory = self._remembered(heads, loaders, run.importance, counted)
        except BaseException:
            restore(network, before)
            for parameter in network.parameters():
                parameter.grad = None
            raise
        self._memory, self._heads, self._posteriors, self._tangents = memory, heads, {}, {}
        if self.method in KEEP_LOADERS:
            self._loaders = loaders
        if keeper is not None:
            keeper.remove()
        return Learned(self.tasks - 1, counted, tuple(run.losses))

    @outside_autocast
    def remember(self, loader: Iterable[Any], points: int | None = None) -> None:
        """Adds a task that a loop of one's own has trained the model on, under `term`, at the weights as they are.

        One pass over its data. `points` is their number, counted unless given.
        """
        self._check_own_loop()
        if points is not None:
            check_numbers(points=points)
        loaders = [*self._loaders, loader] if self.method in KEEP_LOADERS else [loader]
        self._check_loaders(loaders)
        with following(self.generator, self.space.device):
            memory = self._remembered([], loaders, None, count(loader, points)[1])
        self._memory, self._posteriors, self._tangents = memory, {}, {}
        if self.method in KEEP_LOADERS:
            self._loaders = loaders

    def _run(
        self,
        network: nn.Module,
        batches: Iterable[Any],
        loaders: Sequence[Iterable[Any]],
        optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
        scheduler: Callable[[torch.optim.Optimizer], Any] | None,
        points: int,
    ) -> TaskRun:
        tangent = Tangent(network)
        objective = Objective(batches, self.likelihood, tangent, self._estimator, False, 1.0, points, 2)
        optimiser = optimizer(objective.tensors)
        if not isinstance(optimiser, torch.optim.Optimizer):
            raise OptionError(
                f"optimizer made a {type(optimiser).__name__}; expected a torch optimiser, as "
                "lambda params: torch.optim.Adam(params, 1e-3) makes one."
            )
        if isinstance(optimiser, GaussNewton):
            raise OptionError(
                "optimizer made a GaussNewton, whose steps know no prior with covariances; expected an optimiser that "
                "steps by gradients, such as torch.optim.Adam or LBFGS."
            )
        held = {id(tensor) for group in optimiser.param_groups for tensor in group["params"]}
        if held != {id(tensor) for tensor in objective.tensors}:
            raise OptionError(
                "the optimiser has other tensors than those that it was given; expected all of them, and no others. "
                "Pass on the list that `optimizer` is called with."
            )
        importance = Importance(self.space.values(self.model), points) if self.method == "si" else None
        rate = None if scheduler is None else scheduler(optimiser)
        return TaskRun(network, objective, batches, tuple(loaders), optimiser, rate, self.generator, importance)

    def _remembered(
        self, heads: list[nn.Module], loaders: Sequence[Iterable[Any]], importance: Importance | None, points: int
    ) -> Memory:
        """The memory with one more task in it, at the weights as they are."""
        before, mean = self._memory, self.space.values(self.model)
        counts = (*(() if before is None else before.points), points)
        anchors = () if before is None else before.anchors
        kept = () if before is None else before.heads
        if self.method in WITHOUT_POSTERIOR:
            if heads:
                kept = (*kept, _still(heads[-1]))
            if importance is not None:
                anchors = (*anchors, Anchor(mean, importance.curvature(mean, self.epsilon, self.multiplier)))
            return Memory(mean, anchors, None, kept, counts)
        if self.method == "ewc":
            new, own = self._curvature(heads, len(heads) - 1, loaders[-1])
            return Memory(mean, (*anchors, Anchor(mean, compact(new))), None, (*kept, *own), counts)
        if self.method in KEEP_LOADERS:  # all curvatures anew, at these weights
            shared, lost, kept = None, 0.0, ()
            for number, loader in enumerate(loaders):
                new, own = self._curvature(heads, number, loader)
                shared, more = added(shared, new, self.terms)
                lost, kept = lost + more, (*kept, *own)
        else:
            new, own = self._curvature(heads, len(heads) - 1, loaders[-1])
            shared, more = added(None if before is None else before.curvature, new, self.terms)
            lost, kept = more + (0.0 if before is None else before.lost), (*kept, *own)
        return Memory(mean, (), shared, kept, counts, lost)

    def _curvature(
        self, heads: list[nn.Module], number: int, loader: Iterable[Any]
    ) -> tuple[Curvature, tuple[Anchor, ...]]:
        """Of a task's data, times the multiplier: that of the shared weights, and its head with that of its own."""
        network = self._network(heads, number)
        tangent = Tangent(network, evaluate=True)
        batches = _Moved(loader, self.space.device)
        with torch.no_grad():
            found = self._estimator(tangent, self.likelihood, batches, generator=self.generator) * self.multiplier
            if not heads:
                return found, ()
            shared, own = split(found, self.space.size)
        return shared, (Anchor(_values(heads[number]), own),)

    # -- networks --------------------------------------------------------------------------------------------------

    def _with_next_head(self, heads: list[nn.Module]) -> list[nn.Module]:
        """The heads, with that of the next task."""
        given = self._given_heads
        if given is None:
            return []
        number = len(heads)
        if isinstance(given, Sequence):
            if number >= len(given):
                raise OptionError(
                    f"task {number} has no head: {len(given)} were given; expected one for every task. Give more, or a "
                    "function that makes them."
                )
            return [*heads, given[number]]
        made = given()
        if not isinstance(made, nn.Module):
            raise OptionError(f"heads() made a {type(made).__name__}; expected a torch.nn.Module.")
        if any(made is head for head in heads):
            raise OptionError("heads() made a head that another task has; expected a new one every time.")
        return [*heads, made]

    def _network(self, heads: Sequence[nn.Module], number: int) -> nn.Module:
        """The network of a task: the model, and its head where there are any. The shared weights come first."""
        if not heads:
            return self.model
        return nn.Sequential(OrderedDict(shared=self.model, head=heads[number]))

    def _tangent(self, number: int | None) -> Tangent:
        """The network of a task for predictions; kept, with what it has found out about inputs of a shape."""
        if number not in self._tangents:
            network = self._network(self._heads, 0 if number is None else number)
            self._tangents[number] = Tangent(network, evaluate=True)
        return self._tangents[number]

    def _trained(self, heads: list[nn.Module], loaders: Sequence[Iterable[Any]]) -> tuple[nn.Module, Iterable[Any]]:
        """What is trained on which batches."""
        if self.method != "joint":
            return self._network(heads, len(heads) - 1), _Moved(loaders[-1], self.space.device)
        network = _ByTask(self.model, heads) if heads else self.model
        return network, _InTurn(tuple(_Moved(each, self.space.device) for each in loaders), bool(heads))

    # -- predictions -----------------------------------------------------------------------------------------------

    @outside_autocast
    def predict(
        self,
        x: Any,
        head: int | None = None,
        *,
        pred: str = "glm",
        link: str = "probit",
        prior_precision: float | int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Probabilities for classes and events; for numbers the mean and variance of the outputs, without noise.

        "glm" is the linearised network under the posterior, "map" the network as it is: probabilities, or the outputs.
        `prior_precision` is another one for the error bars alone, as chosen on held-out data: of many weights the data
        say little, and what the prior says of them counts.
        """
        _choose(pred, ("glm", "map"), "pred")
        number = self._head(head)
        self._check_weights()
        x, tangent = moved(x, self.space.device), self._tangent(number)
        with torch.no_grad():
            if pred == "map":
                return self.likelihood.predicted(call(tangent.network(), x))
            posterior, linear = self.posterior_of(number, prior_precision), tangent.at(x)
            if not self.likelihood.has_probabilities:
                return linear.value, posterior.variances(linear).reshape(linear.value.shape)
            closed = self.likelihood.link(link)
            closed.check(linear.value)
            if closed.joint:
                return self.likelihood.probabilities(linear.value, posterior.covariance(linear), link)
            variances = posterior.variances(linear).reshape(linear.value.shape)
            return self.likelihood.probabilities(linear.value, variances, link)

    @outside_autocast
    def scores(self, x: Any, head: int | None = None) -> Float[Tensor, " batch"]:
        """How little the tasks so far say of each input: the variance of the outputs, their mean, under the posterior.

        Of several heads the smallest counts, unless one is named: what is known by one of them is known.
        """
        self._check_weights()
        numbers = range(len(self._heads)) if head is None and self._heads else [self._head(head)]
        found = []
        with torch.no_grad():
            for number in numbers:
                linear = self._tangent(number).at(moved(x, self.space.device))
                found.append(self.posterior_of(number).variances(linear).mean(1))
        return torch.stack(found).amin(0)

    def unseen(self, x: Any, seen: Any, share: float = 0.99, head: int | None = None) -> Bool[Tensor, " batch"]:
        """Flags inputs with a score above that of a `share` of the inputs `seen`, some of any task that was learnt.

        Of inputs like those that were learnt 1 - share are flagged; of those of a task that was not, most should be.
        """
        if not 0 < share < 1:
            raise ParameterError(f"share is {share!r}; expected a number between 0 and 1.")
        return self.scores(x, head) > self.scores(seen, head).quantile(share)

    def _head(self, head: int | None) -> int | None:
        """The number of a head that there is; None where there are none."""
        if not self._heads:
            if head is not None:
                raise OptionError(f"head is {head!r}, and one network serves all tasks; expected none.")
            _ = self.memory
            return None
        if head is None and len(self._heads) == 1:
            return 0
        if isinstance(head, bool) or not isinstance(head, int) or not 0 <= head < len(self._heads):
            raise OptionError(f"head is {head!r}; expected the number of a task, from 0 to {len(self._heads) - 1}.")
        return head

    # -- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that the next task depends on, weights of model and heads included: tensors, numbers and strings.

        Loaders, which non_online and joint keep, are not in it.
        """
        description, tensors = pack(self._memory)
        state: dict[str, Any] = {"version": VERSION, **self._settings(), "memory": json.dumps(description)}
        state |= {f"memory.{name}": tensor.clone() for name, tensor in tensors.items()}
        for prefix, module in self._modules(self._heads):
            state |= {f"{prefix}.{name}": tensor for name, tensor in copied(module).items()}
        if self.generator is not None:
            state["generator"] = self.generator.get_state()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from a state of the same settings: model and heads get its weights. Where it fails nothing changes.

        Heads that a function makes are made anew, as many as there were tasks.
        """
        if "version" not in state_dict or "memory" not in state_dict:
            raise StorageError("the state has no memory of tasks; expected what state_dict() returns.")
        if int(state_dict["version"]) > VERSION:
            raise StorageError(
                f"the state has version {state_dict['version']}; expected at most {VERSION}. It was written by a later "
                "lapwing: upgrade to read it."
            )
        for name, ours in self._settings().items():
            if state_dict.get(name) != ours:
                raise StorageError(
                    f"the state has {name} {state_dict.get(name)!r} and this object {ours!r}; expected the same. Build "
                    "it as it was when the state was taken."
                )
        memory = self._memory_of(state_dict)
        heads: list[nn.Module] = []
        for _ in memory.points if memory is not None and self._given_heads is not None else ():
            heads = self._with_next_head(heads)
        weights = [(module, _part(state_dict, f"{prefix}.")) for prefix, module in self._modules(heads)]
        for module, stored in weights:
            check_same(module, stored)
        if memory is not None and memory.mean.shape != (self.space.size,):
            raise StorageError(f"the state is of {len(memory.mean)} shared weights; expected {self.space.size}.")
        if (self.generator is None) != ("generator" not in state_dict):
            raise StorageError("the state has a generator's and this object has none, or the reverse; expected both.")
        for module, stored in weights:
            restore(module, stored)
        if self.generator is not None:
            self.generator.set_state(state_dict["generator"].cpu())
        self._memory, self._heads, self._posteriors, self._tangents = memory, heads, {}, {}

    def _memory_of(self, state_dict: Mapping[str, Any]) -> Memory | None:
        # copies: what becomes of the caller's tensors is no matter of this memory
        tensors = {
            name: tensor.detach().to(self.space.device, copy=True)
            for name, tensor in _part(state_dict, "memory.").items()
        }
        try:
            memory = unpack(json.loads(state_dict["memory"]), tensors)
        except (DataError, TypeError, ValueError, KeyError) as error:
            raise StorageError(
                f"the memory of the state cannot be read ({error}); expected what state_dict() returns."
            ) from error
        if memory is not None and not isinstance(memory, Memory):
            raise StorageError(f"the state holds a {type(memory).__name__}; expected the memory of tasks.")
        return memory

    def save(self, path: AnyPath) -> None:
        """The state in one file, for `Continual.load`; written atomically, without pickle."""
        self._check_weights()
        likelihood: dict[str, Any] = {"own": type(self.likelihood).__name__}
        state = self.state_dict()
        tensors = {f"state.{name}": value for name, value in state.items() if isinstance(value, Tensor)}
        if KINDS.get(type(self.likelihood).__name__) is type(self.likelihood):
            description, parts = pack(self.likelihood)
            likelihood = {"object": description}
            tensors |= {f"likelihood.{name}": value for name, value in parts.items()}
        plain = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
        options = dict(self.options)
        write(path, tensors, {"kind": KIND, "likelihood": likelihood, "state": plain, "options": options})

    @staticmethod
    def load(
        path: AnyPath,
        model: nn.Module,
        *,
        heads: Heads | None = None,
        loaders: Sequence[Iterable[Any]] = (),
        likelihood: Likelihood | None = None,
        structure: Estimator | None = None,
        generator: torch.Generator | None = None,
    ) -> Continual:
        """What `save` wrote, over a model (and heads) built as it was, which get the weights of the file.

        `loaders` are those of the tasks so far, for non_online and joint. A likelihood or an estimator of one's own,
        which no file can hold, is given again, as is the generator where there was one.
        """
        tensors, metadata = read(path)
        if metadata.get("kind") != KIND:
            raise StorageError(f"the file holds {metadata.get('kind')!r}; expected {KIND!r}, as Continual.save writes.")
        try:
            state = {**metadata["state"], **_part(tensors, "state.")}
            given = metadata["likelihood"]
            if (likelihood is None) == ("own" in given) or (structure is None) == (state["structure"] == "own"):
                raise StorageError(
                    f"the file has the likelihood {given.get('own', 'in it')!r} and the structure "
                    f"{state['structure']!r}; expected those of one's own, and no others: load(..., likelihood=..., "
                    "structure=...)."
                )
            found = likelihood or unpack(given["object"], _part(tensors, "likelihood."))
            names = ("method", "estimator", "terms", "prior_precision", "multiplier", "epsilon")
            settings = {name: state[name] for name in names}
            settings |= {"structure": structure or state["structure"], "options": metadata["options"]}
            made = Continual(model, found, heads=heads, generator=generator, **settings)
            made.load_state_dict(state)
        except (KeyError, TypeError) as error:
            raise StorageError(f"the file is incomplete ({error}); expected what Continual.save writes.") from error
        made._loaders = list(loaders)
        if made.method in KEEP_LOADERS:
            made._check_loaders([*loaders, ()])
        return made

    def _modules(self, heads: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
        return [("model", self.model), *((f"head {number}", head) for number, head in enumerate(heads))]

    # -- checks ----------------------------------------------------------------------------------------------------

    def _check_weights(self) -> None:
        """The posterior belongs to the weights that the tasks have led to."""
        if self._memory is None:
            return
        parts = [(self.space.values(self.model), self._memory.mean, "the model")]
        kept = zip(self._heads, self._memory.heads, strict=True)
        parts += [(_values(head), anchor.mean, f"head {k}") for k, (head, anchor) in enumerate(kept)]
        for values, mean, what in parts:
            if not torch.equal(values, mean):
                raise ParameterError(
                    f"the weights of {what} are not those that the tasks so far have led to; expected the same. Leave "
                    "them alone between tasks, or load the state that goes with them."
                )

    def _check_own_loop(self) -> None:
        """What only `learn` can do: watch the steps, train on the data of all tasks, and make heads."""
        if self.method in ("si", "joint") or self._given_heads is not None:
            found = "heads" if self._given_heads is not None else f"method={self.method!r}"
            raise OptionError(
                f"a loop of one's own with {found}; expected 'online', 'non_online', 'ewc' or 'sequential', without "
                "heads. Train by learn(loader)."
            )

    def _check_loaders(self, loaders: Sequence[Iterable[Any]]) -> None:
        if self.method in KEEP_LOADERS and len(loaders) != self.tasks + 1:
            raise OptionError(
                f"method={self.method!r} needs the data of all tasks, and has those of {len(loaders) - 1} of "
                f"{self.tasks}; expected all of them. Give them to Continual.load(..., loaders=[...])."
            )

    def _same(self, network: nn.Module, epochs: int, points: int, run: TaskRun) -> dict[str, Any]:
        """What must not differ between two attempts at a task."""
        sizes = {f"tensor {n}": f"{tuple(v.shape)} {v.dtype}" for n, v in copied(network).items()}
        seed = None if self.generator is None else self.generator.initial_seed()
        groups = [{k: str(v) for k, v in group.items() if k != "params"} for group in run.optimiser.param_groups]
        rest = {"epochs": epochs, "points": points, "task": self.tasks, "generator's seed": seed}
        optimiser = {"optimizer": type(run.optimiser).__name__, "options of the optimizer": str(groups)}
        return {**self._settings(), **rest, **optimiser, **sizes}

    def _settings(self) -> dict[str, Any]:
        """What a state must have in common with the object that it is loaded into."""
        return {
            "method": self.method,
            "structure": self.structure if isinstance(self.structure, str) else "own",
            "estimator": self.source,
            "terms": self.terms,
            "prior_precision": float(self.prior_precision),
            "multiplier": float(self.multiplier),
            "epsilon": float(self.epsilon),
            "likelihood": type(self.likelihood).__name__,
            "heads": self._given_heads is not None,
        }


# -- data --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Moved(Wrapped):
    """Batches on the device of the model."""

    loader: Iterable[Any]
    device: torch.device

    @property
    def source(self) -> Iterable[Any]:
        return self.loader

    def __iter__(self) -> Iterator[Any]:
        return (moved(pair, self.device) for pair in pairs(self.loader))


@dataclass(frozen=True)
class _InTurn:
    """A batch of every task in turn, until all have given theirs; with `numbered`, x is (x, number of the task)."""

    loaders: tuple[Iterable[Any], ...]
    numbered: bool

    def __iter__(self) -> Iterator[Any]:
        ahead = list(enumerate(map(iter, self.loaders)))
        while ahead:
            for entry in list(ahead):
                number, batches = entry
                try:
                    x, y = next(batches)
                except StopIteration:
                    ahead.remove(entry)
                    continue
                yield ((x, number) if self.numbered else x), y


class _ByTask(nn.Module):
    """The shared network with all heads, for batches that say whose they are."""

    def __init__(self, shared: nn.Module, heads: Sequence[nn.Module]) -> None:
        super().__init__()
        self.shared, self.heads = shared, nn.ModuleList(heads)

    def forward(self, x: Any, task: int) -> Tensor:
        return self.heads[task](call(self.shared, x))


# -- what is asked for -------------------------------------------------------------------------------------------------


def _choose(given: object, known: Sequence[str], what: str) -> str:
    if not isinstance(given, str) or given not in known:
        raise OptionError(f"{what} is {given!r}; expected one of {list(known)}.")
    return given


def _check_number(name: str, value: object, least: float | int, above: bool = False) -> None:
    number = float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else float("nan")
    if not least <= number < float("inf") or (above and number == least):
        raise OptionError(f"{name} is {value!r}; expected a finite number {'>' if above else '>='} {least}.")


def _likelihood(given: str | Likelihood) -> Likelihood:
    if isinstance(given, Likelihood):
        return given
    return TASKS[_choose(given, tuple(TASKS), "likelihood")]()


def _estimator(structure: str | Estimator, source: str | None, options: Mapping[str, Any]) -> Estimator:
    if isinstance(structure, str):
        return by_name(structure, source or "exact", **options)
    if not callable(structure) or source is not None or options:
        raise OptionError(
            f"structure is {structure!r} with estimator {source!r} and options {dict(options)}; expected the name of a "
            "structure, or a function of lapwing.estimate alone."
        )
    return structure


def _checked_heads(heads: Heads | None) -> Heads | None:
    if heads is None or (callable(heads) and not isinstance(heads, nn.Module)):
        return heads
    found = list(heads) if isinstance(heads, (list, tuple, nn.ModuleList)) else None
    if not found or not all(isinstance(head, nn.Module) for head in found):
        raise OptionError(
            f"heads is a {type(heads).__name__}; expected a list of modules, one per task, or a function that makes "
            "one."
        )
    if len({id(head) for head in found}) < len(found):
        raise OptionError("heads has one module twice; expected one of its own for every task.")
    return found


def _part(mapping: Mapping[str, Any], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in mapping.items() if name.startswith(prefix)}


def _values(head: nn.Module) -> Float[Tensor, " params"]:
    return ParamSpace.of(head).values(head)


def _still(head: nn.Module) -> Anchor:
    """The weights of a head, without a curvature."""
    values = _values(head)
    return Anchor(values, Diagonal(torch.zeros_like(values)))
