"""Tangent: a network and its Jacobian at a batch of inputs, as a linear map that is never spelled out unless asked.

at(x)      one recorded forward pass
.mv(v)     J v          [B, *out]     two thirds of a gradient, or two backward passes
.rmv(u)    J^T u        [P]           one backward pass
.pull(V)   V^T J        R backward passes, in factored form per layer
.rows()    J            [B, C, P]

>>> import torch
>>> from torch import nn
>>> model = nn.Linear(2, 1, bias=False)
>>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
>>> Tangent(model).at(x).rows()[:, 0]     # the Jacobian of a linear model is its input
tensor([[1., 2.],
        [3., 4.]])
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lapwing.errors import DataError, ModelError, UnsupportedOperationError
from lapwing.linalg.autocast import outside_autocast, outside_modes
from lapwing.linalg.budget import DEFAULT_BUDGET, chunks, keep_freed_memory
from lapwing.linalg.rows import DenseRows, Piece, assemble, push, side_by_side
from lapwing.params import ParamSpace
from lapwing.tangent.checks import check_output, check_space, check_trainable
from lapwing.tangent.fallback import batched_grad, gradients, opaque_rows, pull_back
from lapwing.tangent.input_gradients import Gate, gated, through
from lapwing.tangent.inputs import call, check_input, outside_inference, shape_key, take
from lapwing.tangent.paths import custom_function
from lapwing.tangent.private import private
from lapwing.tangent.probe import Probe, probe
from lapwing.tangent.pullback import pulled_back
from lapwing.tangent.pushforward import pushed
from lapwing.tangent.record import Record, Recorder, whole_aliases
from lapwing.tangent.samples import SampleAxis
from lapwing.tangent.sources import Alias, Derived
from lapwing.tangent.uses import Broadcast, Contraction, Use


@dataclass
class Tangent:
    """The network as a function of the parameters in `space` (default: all trainable ones).

    `differentiable` keeps the way back to inputs that require gradients: outputs, Jacobian products and what is
    computed from them can then be differentiated with respect to the inputs, once. `evaluate` runs the network in eval
    mode, whatever mode the model is in. The model itself is not run, but private copies of it: see `private`.
    """

    model: nn.Module
    space: ParamSpace = field(default=None)  # pyright: ignore[reportAssignmentType]
    budget: int = DEFAULT_BUDGET
    differentiable: bool = False
    evaluate: bool = False
    _probes: dict[tuple, Probe] = field(default_factory=dict, repr=False)
    _sizes: dict[tuple, tuple[int, int] | None] = field(default_factory=dict, repr=False)
    _twice: bool | None = field(default=None, repr=False)
    _routed: bool = field(default=False, repr=False)
    _held: Linearisation | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.space is None:
            self.space = ParamSpace.of(self.model)
        check_space(self.space, self.model)

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The tensors that the model holds now, by name."""
        found: dict[str, Tensor] = {}
        try:
            for name, path, last in self._paths:  # without a walk through the whole model
                module: Any = self.model
                for key in path:
                    module = module._modules[key]
                tensor = module._parameters[last]
                if tensor is None:
                    raise KeyError(name)
                found[name] = tensor
        except (KeyError, AttributeError):  # a module that names its parameters in a way of its own
            named = dict(self.model.named_parameters())
            return {name: named[name] for name in self.space.names}
        return found

    @cached_property
    def _aliases(self) -> dict[str, Alias]:
        return whole_aliases(self.space)

    @cached_property
    def _paths(self) -> list[tuple[str, list[str], str]]:
        """The name of every parameter, the way to its module, and its name there."""
        return [(name, *_path(name)) for name in self.space.names]

    def tensors(self, theta: Float[Tensor, "*batch params"]) -> dict[str, Float[Tensor, "*batch *shape"]]:
        """The tensors, by name, of flat weights; entries outside a sub-network are the model's."""
        space, fixed = self.space, self.parameters
        if space.index is not None:
            away = space.whole.unravel(space.expand(theta - space.values(self.model)))
            found = {name: fixed[name].detach() + value for name, value in away.items()}
        else:
            found = space.unravel(theta)
        return {name: value.to(fixed[name].dtype) for name, value in found.items()}

    def network(self) -> nn.Module:
        """The network to run: a private copy of the model, with the model's own parameters."""
        return private(self.model, self.evaluate)

    def holding(self, linearisation: Linearisation) -> Tangent:
        """The same tangent, with a linearisation at the present weights: for its inputs there is no second pass."""
        return replace(self, _held=linearisation)

    def per_point(self, x: Any) -> tuple[int, int] | None:
        """Bytes that a cotangent takes on its way back for each data point, and outputs; from a few, looked at once.

        None where a few say nothing of the others (a model for one batch size, or one that sorts its data), and where
        few patches would be made again for every cotangent.
        """
        key = shape_key(x)
        if key not in self._sizes:
            found = None
            with suppress(Exception):  # the whole batch is to say what is wrong
                few = self.at(take(x, slice(0, FEW_SAMPLES)))
                if few.patches >= few._entries and not few.record.routed:
                    found = -(-few.cotangent_bytes // few.batch), few.outputs
            with _KEEPING:
                while len(self._sizes) >= MOST_PROBES:
                    del self._sizes[next(iter(self._sizes))]
                self._sizes[key] = found
        return self._sizes[key]

    @outside_modes
    def at(self, x: Any) -> Linearisation:
        """One recorded forward pass at the inputs x."""
        if self._held is not None and self._held.x is x:
            return self._held
        keep_freed_memory()
        x = outside_inference(x)
        batch = check_input(x, self.space.device)
        parameters = self.parameters
        check_trainable(parameters)
        seen, gate = gated(x) if self.differentiable else (x, None)
        network = self.network()
        with torch.enable_grad():
            value, record, found = self._recorded(network, seen, parameters, batch, gate is not None)
        check_output(value, batch)
        record.opaque.update(found.opaque)
        record.opaque.update(record.unseen(value, parameters))
        return Linearisation(self, x, value, record, found, gate)

    def differentiable_twice(self, linearisation: Linearisation) -> bool:
        """Whether J v may be had from the derivative of J^T u; tried once where all operations are torch's own.

        A custom autograd function may hide its second derivative without a word, and only in batches that reach it.
        """
        if custom_function(linearisation.output):
            return linearisation.adjoint
        if self._twice is None:
            self._twice = linearisation.adjoint
        return self._twice

    def _recorded(
        self, network: nn.Module, x: Any, parameters: dict[str, Tensor], batch: int, graph: bool
    ) -> tuple[Tensor, Record, Probe]:
        """A forward pass, its record, and the probe that tells its samples apart."""
        modes = () if self.evaluate else tuple(module.training for module in network.modules())
        key = shape_key(x), modes
        found = self._probes.get(key)
        if found is not None:
            value, record = self._record(network, x, parameters, found, graph)
            if record.signature == found.signature:
                return value, record, found
        elif batch > FEW_SAMPLES and not self._routed:
            with suppress(ModelError):  # a model made for one batch size; other errors come again below
                few = self._probe(network, take(x, slice(0, FEW_SAMPLES)), parameters, modes)
                value, record = self._record(network, x, parameters, few, graph)
                carried = few.carried_over(record, batch) if few.settled and not record.routed else None
                if carried is not None:
                    self._keep(key, carried)
                    return value, record, carried
        # a new shape of few samples, or the model does something else with this data
        found = probe(network, self.space, parameters, x)
        self._routed |= found.routed
        if found.settled:
            self._keep(key, found)
        return *self._record(network, x, parameters, found, graph), found

    def _probe(self, network: nn.Module, x: Any, parameters: dict[str, Tensor], modes: tuple[bool, ...]) -> Probe:
        key = shape_key(x), modes
        found = self._probes.get(key)
        if found is None:
            found = probe(network, self.space, parameters, x)
            if found.settled:
                self._keep(key, found)
        return found

    def _keep(self, key: tuple, found: Probe) -> None:
        """Keeps a probe, and forgets the oldest where there are too many: every length of sequences has its own."""
        with _KEEPING:
            while len(self._probes) >= MOST_PROBES:
                del self._probes[next(iter(self._probes))]
            self._probes[key] = found

    def _record(
        self, network: nn.Module, x: Any, parameters: dict[str, Tensor], found: Probe, graph: bool
    ) -> tuple[Tensor, Record]:
        recorder = Recorder(self.space, parameters, x, found.dependent, aliases=self._aliases, graph=graph)
        with recorder:
            value = call(network, x)
        return value, recorder.record


def _share(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors lie in the same memory."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _path(name: str) -> tuple[list[str], str]:
    *path, last = name.split(".")
    return path, last


MOST_PROBES = 256
"""How many shapes of inputs a tangent remembers."""
_KEEPING = threading.Lock()
FEW_SAMPLES = 5
"""How many samples a probe looks at; a prime, so that it is seldom the size of something else."""


@dataclass
class Linearisation:
    """J at a batch of inputs; meets the `LinearMap` contract. Holds the graph of one forward pass."""

    tangent: Tangent
    x: Any
    output: Float[Tensor, "batch *out"]
    record: Record
    probe: Probe
    gate: Gate | None = None

    @cached_property
    def space(self) -> ParamSpace:
        return self.tangent.space

    @property
    def batch(self) -> int:
        return self.output.shape[0]

    @property
    def outputs(self) -> int:
        """C, all outputs of one data point."""
        return self.output.shape[1:].numel()

    @property
    def value(self) -> Float[Tensor, "batch *out"]:
        """The network's output in the dtype of the curvature; without a graph, or with one to the inputs alone."""
        value = self.output.detach() if self.gate is None else self._through(self.output)
        return value.to(self.space.dtype)

    # -- products --------------------------------------------------------------------------------------------------

    @outside_autocast
    def mv(self, v: Float[Tensor, " params"]) -> Float[Tensor, "batch *out"]:
        """J v by tangents where every operation has a rule (`pushforward`), two thirds of a gradient.

        Elsewhere J^T u is linear in u, and its derivative along v is J v: about two backward passes.

        Where J v is to be differentiated in the inputs, it is had from the rows: torch 2.13 has no third derivative of
        layer_norm, and gives a wrong one.
        """
        self.space.check(v)
        if self.gate is not None:
            parts = [push(self.pull(eye), v.unsqueeze(0), self.tangent.budget)[0] for eye in self.identity()]
            return torch.cat(parts, dim=1).reshape(self.output.shape)
        with torch.inference_mode(False), torch.enable_grad():
            v = v.clone() if v.is_inference() else v
            product = self._by_tangents(v)
            if product is not None:
                return product
            if self.tangent.differentiable_twice(self):
                with suppress(RuntimeError):  # an operation that the batch which was tried did not meet
                    return self._derivative_along(v)
            parts = [
                assemble(self._pull(eye), self.space.total, slice(0, self.batch)) @ self.space.expand(v)
                for eye in self.identity(self.cotangent_bytes + 8 * self.batch * self.space.total)
            ]
            return torch.cat(parts).mT.reshape(self.output.shape)

    def _by_tangents(self, v: Tensor) -> Tensor | None:
        parameters, direction = self.tangent.parameters, self.space.unravel(v)
        directions = [direction[name].to(tensor.dtype) for name, tensor in parameters.items()]
        product = pushed(self.output, list(parameters.values()), directions)
        return None if product is None else product.to(self.space.dtype)

    @cached_property
    def adjoint(self) -> bool:
        """Whether u . (J v) = (J^T u) . v for one u and v: not where an operation hides its second derivative."""
        v = torch.cos(torch.arange(self.space.size, dtype=self.space.dtype, device=self.space.device))
        u = torch.sin(1 + torch.arange(self.output.numel(), dtype=self.space.dtype, device=self.space.device))
        u = u.reshape(self.output.shape)
        try:
            forward = self._derivative_along(v)
        except RuntimeError:  # an operation on the way says that it can be differentiated only once
            return False
        backward = self.rmv(u)
        eps = torch.finfo(self.output.dtype).eps
        scale = float((forward * u).abs().sum() + (backward * v).abs().sum())
        return abs(float((forward * u).sum() - (backward * v).sum())) <= eps**0.5 * scale

    def _derivative_along(self, v: Tensor) -> Tensor:
        parameters, direction = self.tangent.parameters, self.space.unravel(v)
        with torch.enable_grad():
            u = torch.zeros_like(self.output, requires_grad=True)
            grads = gradients(self.output, list(parameters.values()), u, create_graph=True)
            terms = [
                (grad * direction[name].to(grad.dtype)).sum()
                for name, grad in zip(parameters, grads, strict=True)
                if grad is not None and grad.requires_grad
            ]
            if not terms:
                return torch.zeros_like(self.value)
            (product,) = torch.autograd.grad(torch.stack(terms).sum(), u, retain_graph=True)
        return product.to(self.space.dtype)

    @outside_autocast
    def rmv(self, u: Float[Tensor, "batch *out"]) -> Float[Tensor, " params"]:
        """J^T u summed over the batch: one backward pass."""
        if u.shape != self.output.shape:
            raise DataError(
                f"the cotangent has shape {tuple(u.shape)}; expected that of the outputs, {tuple(self.output.shape)}."
            )
        parameters = self.tangent.parameters
        options = {"retain_graph": True, "create_graph": self.gate is not None}
        grads = gradients(self.output, list(parameters.values()), u.to(self.output.dtype), **options)
        flat = self.space.ravel(
            {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(parameters.items(), grads, strict=True)}
        )
        return self._through(flat)

    def _through(self, value: Tensor) -> Tensor:
        return value if self.gate is None else self.gate.through([value])[0]

    def rows(self) -> Float[Tensor, "batch outputs params"]:
        """J spelled out, [B, C, P]; for small problems and for tests."""
        parts = [
            assemble(self._pull(eye), self.space.total, slice(0, self.batch))
            for eye in self.identity(self.cotangent_bytes + 8 * self.batch * self.space.total)
        ]
        return self.space.restrict(torch.cat(parts)).transpose(0, 1)

    # -- factored rows ---------------------------------------------------------------------------------------------

    @cached_property
    def uses(self) -> list[tuple[Use, SampleAxis]]:
        return [(use, self.probe.axes[number]) for number, use in self.record.uses]

    @cached_property
    def _entries(self) -> int:
        """Of the outputs of all uses whose cotangents are kept, together, and of the largest of the others."""
        sizes = [(isinstance(use, Broadcast), use.shape.numel()) for use, _ in self.uses]
        return sum([size for own, size in sizes if not own]) + max([size for own, size in sizes if own], default=0)

    @cached_property
    def _largest(self) -> int:
        """Of the output of one use."""
        return max([use.shape.numel() for use, _ in self.uses], default=0)

    @property
    def one_by_one(self) -> bool:
        """Whether a backward pass for each cotangent is better than a vectorised one, however few there are.

        What one pass gives is copied then, which takes less than the caches, and the fresh memory, that several at
        once go through.
        """
        return self._entries >= 2**23 or self._largest >= 2**18

    @property
    def patches(self) -> int:
        """Entries of right sides that are made when they are asked for, all layers together."""
        return sum([use.patches for use, _ in self.uses if isinstance(use, Contraction)])

    @cached_property
    def cotangent_bytes(self) -> int:
        """Memory that one cotangent needs on its way back, all layers together."""
        spelled_out = {*self.record.opaque, *self.record.derived}
        dense = sum(self.space.shape(name).numel() for name in spelled_out) * self.batch
        if self.space.index is not None:  # rows of a sub-network are spelled out, one piece at a time
            dense += self.space.size * self.batch
        return 3 * (self._entries + dense) * max(4, self.space.dtype.itemsize)

    def identity(self, bytes_per_cotangent: int | None = None) -> Iterator[Float[Tensor, "r batch *out"]]:
        """Unit cotangents, one per output, in chunks within the budget."""
        each = self.cotangent_bytes if bytes_per_cotangent is None else bytes_per_cotangent
        for part in chunks(self.outputs, each, self.tangent.budget):
            yield self._units(part)

    def _units(self, part: slice) -> Float[Tensor, "r batch *out"]:
        count = part.stop - part.start
        eye = torch.zeros(count, self.outputs, dtype=self.space.dtype, device=self.output.device)
        eye.diagonal(part.start).fill_(1)
        return eye.reshape(count, 1, *self.output.shape[1:]).expand(-1, *self.output.shape)

    def pull(self, cotangents: Float[Tensor, "r batch *out"]) -> list[Piece]:
        """Rows u[r,n]^T J[n] of every cotangent and data point, in the flat coordinates of the space.

        A sub-network that cuts through tensors has no layer structure: its rows come spelled out.
        """
        pieces = self._pull(cotangents)
        if self.space.index is None:
            return pieces
        rows = pieces[0].at_entries(self.space.index, self.tangent.budget)
        for piece in pieces[1:]:
            rows = rows + piece.at_entries(self.space.index, self.tangent.budget)
        return [DenseRows(0, rows)]

    @outside_modes
    def _pull(self, cotangents: Tensor) -> list[Piece]:
        cotangents = cotangents.clone() if cotangents.is_inference() else cotangents
        if self.gate is None and not torch.is_grad_enabled():
            return self._pieces(cotangents)
        with torch.set_grad_enabled(self.gate is not None):
            pieces = self._pieces(cotangents)
        return pieces if self.gate is None else through(self.gate, pieces)

    def _pieces(self, cotangents: Tensor) -> list[Piece]:
        found: list[list[Piece]] = [[] for _ in self.uses]

        def take(number: int, grad: Tensor) -> bool:
            use, axis = self.uses[number]
            found[number] = use.pieces(grad, axis, self.space.dtype, self._pull_back)
            return any(_share(piece.by_row, grad) for piece in found[number])

        self._pass_back(cotangents, take)
        pieces: list[Piece] = [piece for own in found for piece in own]
        pieces = side_by_side(pieces)
        if self.record.opaque and self.gate is not None:
            name, operation = next(iter(self.record.opaque.items()))
            raise UnsupportedOperationError(
                f"parameter '{name}' is used by '{operation}', for which there is no rule, and the rows of such "
                "parameters cannot be differentiated with respect to the inputs; expected linear, matmul, einsum, "
                "convolution, normalisation, embedding or elementwise operations. Leave the parameter out of the "
                "ParamSpace, add a rule (docs/extending.md), or give inputs that require no gradient."
            )
        if self.record.opaque:
            values = opaque_rows(
                self.tangent.network, self.space, list(self.record.opaque), self.x, self.output, cotangents
            )
            pieces += [DenseRows(self.space.whole.starts[name], rows) for name, rows in values.items()]
        if not pieces:
            pieces = [DenseRows(0, self.value.new_zeros(len(cotangents), self.batch, self.space.total))]
        return pieces

    def _pass_back(self, cotangents: Tensor, take: Callable[[int, Tensor], bool]) -> None:
        """Gives `take` the gradients of every use's output, zero for those that the outputs do not depend on."""
        cotangents, met = cotangents.to(self.output.dtype), set()
        edges = [use.edge for use, _ in self.uses]

        def taken(number: int, grad: Tensor) -> bool:
            met.add(number)
            return take(number, grad)

        if edges and self.output.requires_grad and not self._at_once(cotangents, edges, taken):
            together = not self.one_by_one and self._largest * len(cotangents) < 2**22
            for number, grad in enumerate(
                batched_grad(self.output, edges, cotangents, together, graph=self.gate is not None)
            ):
                if grad is not None:
                    taken(number, grad)
        for number, (use, _) in enumerate(self.uses):
            if number not in met:
                take(number, cotangents.new_zeros(len(cotangents), *use.shape))

    def _at_once(self, cotangents: Tensor, edges: Sequence[Any], take: Callable[[int, Tensor], bool]) -> bool:
        """Whether all cotangents went back without autograd, which looks for NaN, calls hooks and keeps a graph."""
        if len(cotangents) < 2 or self.gate is not None or self.record.watched or torch.is_anomaly_enabled():
            return False
        return pulled_back(self.output, edges, cotangents, take)

    def _pull_back(self, derived: Derived, rows: Float[Tensor, "r n size"]) -> list[Piece]:
        return pull_back(derived, rows, self.tangent.parameters, self.space, frozenset(self.record.opaque))

    # -- the LinearMap contract ------------------------------------------------------------------------------------

    def pieces(self) -> list[Piece]:
        return self.pull(self._units(slice(0, self.outputs)))

    def columns(self) -> Iterator[list[Piece]]:
        return (self.pull(units) for units in self.identity())

    def parts(self) -> Iterator[Linearisation]:
        """This map, or maps of consecutive sub-batches of one size (the last may be less) if all outputs are too many.

        A third of the budget keeps a prediction near the memory of a training step; parts of a batch of which one
        cotangent takes more than that may have as much, or all of the budget: of few data points they would be slow.
        """
        budget, needed = self.tangent.budget, self.cotangent_bytes * self.outputs
        room = min(budget, max(budget // 3, self.cotangent_bytes))
        if needed <= room or self.batch == 1:
            yield self
            return
        most = max(1, room // -(-needed // self.batch))
        step = -(-self.batch // -(-self.batch // most))
        for start in range(0, self.batch, step):
            yield self.tangent.at(take(self.x, slice(start, min(start + step, self.batch))))
