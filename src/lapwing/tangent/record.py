"""Recorder: every use of a parameter during a forward pass, seen at the level of operations.

A `TorchFunctionMode` sees each torch function with its arguments. An operation that reads a tracked parameter and
data becomes a `Use` by its rule; one that reads parameters alone makes a new source (a view, or a derived tensor); one
without a rule makes its parameters *opaque*: they are differentiated sample by sample where the structure allows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import getattr_static
from operator import attrgetter
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import maybe_current_level
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from lapwing.params import ParamSpace
from lapwing.tangent.inputs import tensors
from lapwing.tangent.operations import (
    INDEXING,
    PLAIN,
    REFUSABLE,
    WRITING,
    TensorSet,
    flat,
    inlined,
    kept_by_hooks,
    name_of,
    owned,
    plain_of,
    recomputed,
    refuse_train_mode,
    traits,
    written_to,
)
from lapwing.tangent.paths import Key, Paths
from lapwing.tangent.recurrent import UNROLLED, can_unroll, unrolled
from lapwing.tangent.rules import IN_PLACE, RULES, Call, embedding_arguments, methods
from lapwing.tangent.sources import Alias, Derived, Repeated, Source, looked_up, parameter_alias, repeats, view_alias
from lapwing.tangent.uses import Use

_SAME_ENTRIES = frozenset(
    getattr(Tensor, name)
    for name in ("to", "float", "double", "half", "bfloat16", "type", "type_as", "contiguous", "clone")
)
_REPEATING = frozenset(methods("expand", "expand_as", "broadcast_to", "repeat", "tile"))
_REQUIRES_GRAD = attrgetter("requires_grad")
_SIZES = frozenset((int, str, bool))
_NESTED = frozenset((list, tuple))


@dataclass
class Event:
    """An operation that read parameters: its name, output and use (None if opaque or without data)."""

    name: str
    out: Tensor | None
    use: Use | None
    dependent: bool


HOOKED = frozenset({Tensor.register_hook, getattr_static(Tensor, "grad_fn").__get__})
"""Calls after which a hook may be part of the way back: a tensor's, or that of a node, which is asked for first."""


@dataclass
class Record:
    """What a forward pass left: events in order, and the parameters no rule covers, with the operation at fault.

    `routed` says that data were put in an order that depends on them before a parameter was used (experts that see some
    of the rows, rows sorted by length): which rows belong to which data point is then another matter in every batch.

    `watched` says that hooks of the model's may be part of the way back, a tensor's, a node's of the graph, or those of
    what operations keep (checkpoints): only autograd calls them.
    """

    events: list[Event] = field(default_factory=list)
    opaque: dict[str, str] = field(default_factory=dict)
    derived: dict[str, str] = field(default_factory=dict)
    trace: int = 0
    paths: Paths = field(default_factory=Paths)
    routed: bool = False
    watched: bool = False

    @property
    def uses(self) -> list[tuple[int, Use]]:
        """(event number, use) with opaque parameters left out."""
        hidden = frozenset(self.opaque)
        found = []
        for number, event in enumerate(self.events):
            use = event.use.without(hidden) if event.use is not None and hidden else event.use
            if use is not None:
                found.append((number, use))
        return found

    @property
    def signature(self) -> tuple:
        """What has to be the same for a probe of one batch to hold for another."""
        return self.trace, *[(e.name, e.dependent, None if e.use is None else e.use.signature) for e in self.events]

    def unseen(self, output: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, str]:
        """Parameters that the output depends on by a way that was not recorded, and what is known of their use."""
        found = self.paths.unseen(output, parameters).difference(self.opaque)
        return {name: self.seen(name) for name in sorted(found)} if found else {}

    def seen(self, name: str) -> str:
        """The operations that were seen to use a parameter, for messages."""
        uses = [e.use for e in self.events if e.use is not None]
        known = dict.fromkeys(use.operation for use in uses if any(name in source.names for source in use.sources))
        return (
            " and ".join([*known, "an operation that cannot be seen"]) if known else "an operation that cannot be seen"
        )


def whole_aliases(space: ParamSpace) -> dict[str, Alias]:
    """Every parameter as an alias of itself."""
    starts = space.whole.starts
    return {name: parameter_alias(name, starts[name], space.shape(name)) for name in space.names}


class Recorder(TorchFunctionMode):
    """Records uses of `parameters` (name -> tensor) while active; `inputs` are the data.

    `dependent` holds numbers of events that a probe has shown to depend on the data, for operations whose inputs
    passed through code that hides it (a custom autograd function). `aliases` are those of `whole_aliases(space)`,
    where they are at hand. `graph` keeps the history of what is held, to differentiate rows in the inputs.
    """

    def __init__(
        self,
        space: ParamSpace,
        parameters: Mapping[str, Tensor],
        inputs: Any,
        dependent: frozenset[int] = frozenset(),
        snapshot: Callable[[Tensor], Tensor] | None = None,
        aliases: Mapping[str, Alias] | None = None,
        graph: bool = False,
    ) -> None:
        super().__init__()
        self.record = Record()
        self._parameters = parameters
        self._dependent = dependent
        self._snapshot = snapshot
        self._graph = graph
        self._whole = whole_aliases(space) if aliases is None else aliases
        self._sources: dict[int, tuple[Tensor, Source, int]] = {}
        for name, alias in self._whole.items():
            tensor = parameters[name]
            self._sources[id(tensor)] = tensor, alias, tensor._version
        self._data = TensorSet()
        self._data.add(*tensors(inputs))
        self._routed: TensorSet | None = None

    # -- what is known of a tensor ---------------------------------------------------------------------------------

    def source(self, value: Any) -> Source | None:
        found = self._sources.get(id(value))
        if found is None:
            return None
        tensor, source, version = found
        if tensor._version != version:  # written to since, perhaps through a view of it: no plain view any more
            source = Derived(source.names, get_gradient_edge(tensor), tensor.shape, tensor.dtype)
            self._register(tensor, source)
        return source

    def _register(self, tensor: Tensor, source: Source) -> None:
        self._sources[id(tensor)] = (tensor, source, tensor._version)

    def _mark(self, out: Any) -> None:
        self._data.add(*_listed(out))

    def _meets_data(self, args: tuple, kwargs: dict) -> bool:
        """Whether an operation reads parameters, and data where it expects them: in its first two arguments."""
        return self._data.meets(flat(args[:2], {})) and any(id(t) in self._sources for t in flat(args, kwargs))

    def _seen(self, func: Callable, data: Tensor, *others: Tensor | None) -> Tensor:
        """An operation inside a composition that is not seen itself: the first argument is data, unless parameters."""
        if id(data) not in self._sources:
            self._mark(data)
        return self.__torch_function__(func, (), (data, *others))

    # -- the mode --------------------------------------------------------------------------------------------------

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        plain = plain_of(func) if func in PLAIN else func
        if plain is None:
            with self:
                return inlined(func)(*args, **kwargs)
        if func in HOOKED or kept_by_hooks() is not None:
            self.record.watched = True
        name, kind = traits(func)
        if kind is REFUSABLE:
            refuse_train_mode(func, args, kwargs)
        if func in UNROLLED and can_unroll(func, args) and self._meets_data(args, kwargs) and not recomputed():
            out = unrolled(func, args, kwargs, self._seen)
            self._mark(out)
            return out
        # the operations, also those on data alone, and their axes and sizes: another batch may take another way
        given, sizes = _given(args, kwargs)
        self.record.trace = hash((self.record.trace, name, *sizes))
        read = []
        for t in given:  # Python 3.11 makes a call of a comprehension, and this is asked for every operation
            if id(t) in self._sources:
                read.append(t)  # noqa: PERF401
        data = self._data.meets(given)
        routed = data and (self._routed is not None or name in INDEXING) and self._routes(name, given)
        target = written_to(kind, args, kwargs) if kwargs or kind is WRITING else None
        # inside torch.func the tensors are wrapped, and the graph behind them is not the outer one: left to the walk
        if not read or maybe_current_level() is not None:
            out = plain(*args, **kwargs)
            if data:
                self._data.add(target, out) if isinstance(out, Tensor) else self._data.add(target, *_listed(out))
            if routed:
                self._reordered(out, target)
            return out
        if func in IN_PLACE and args and isinstance(args[0], Tensor):
            before = (args[0].clone() if self._graph else args[0].detach().clone(), *args[1:])
        else:
            before = args
        # where the graph goes on behind this operation, asked for before it may write into its arguments
        onward = []
        for t in given:
            if t.grad_fn is not None and id(t) not in self._sources:
                onward.append((t.grad_fn, t.output_nr))  # noqa: PERF401
        # a tensor that holds parameters loses its name when it is written to, so the names are asked for before
        names, version = (frozenset(), 0) if target is None else (self._names(read), target._version)
        out = owned(func, plain(*args, **kwargs), given)
        if routed:
            self.record.routed = True
            self._reordered(out, target)
        written = target is not None and target._version != version
        if target is not None and written and (out is not target or id(target) in self._sources):
            self._write(func, target, names, data)
        else:
            self._note(func, name, before, kwargs, out, read, data, onward)
        return out

    def _routes(self, name: str, given: list[Tensor]) -> bool:
        """Whether data are indexed by something that depends on the data, now or before."""
        if self._routed is not None and self._routed.meets(given):
            return True
        if name not in INDEXING:
            return False
        indexed = self._data.meets(t for t in given[1:] if not t.is_floating_point())
        return indexed and (len(given) > 2 or self._data.meets(given[:1]))

    def _reordered(self, *made: Any) -> None:
        """The tensors of an operation that put data in an order which depends on them."""
        self._routed = TensorSet() if self._routed is None else self._routed
        self._routed.add(*flat(made, {}))

    def _names(self, read: list[Tensor]) -> frozenset[str]:
        return frozenset().union(*(source.names for source in map(self.source, read) if source is not None))

    def _write(self, func, target: Tensor, names: frozenset[str], data: bool) -> None:
        """Parameters were written into a tensor, whole or in part: no rule follows that, autograd does."""
        name = name_of(func)
        number = len(self.record.events)
        dependent = data or number in self._dependent
        if dependent or not target.requires_grad:
            self._sources.pop(id(target), None)
            self._mark(target)
            for missed in sorted(names) if target.requires_grad else ():
                self.record.opaque.setdefault(missed, name)
        else:
            self._register(target, Derived(names, get_gradient_edge(target), target.shape, target.dtype))
            for derived in sorted(names):
                self.record.derived.setdefault(derived, name)
        kept = self._snapshot(target.detach()) if self._snapshot is not None else None
        self.record.events.append(Event(name, kept, None, dependent))

    def _note(self, func, name: str, args, kwargs, out, read: list[Tensor], data: bool, onward: list[Key]) -> None:
        outs = [out] if isinstance(out, Tensor) else [t for t in _listed(out) if isinstance(t, Tensor)]
        if not any(map(_REQUIRES_GRAD, outs)):
            if data:
                self._mark(out)
            return
        number = len(self.record.events)
        dependent = data or number in self._dependent
        use = None
        if dependent:
            self._data.add(*outs)
            use = self._use(func, args, kwargs, out, read, name, onward)
        else:
            self._derive(func, args, kwargs, outs, read, name)
        kept = self._snapshot(outs[0].detach()) if self._snapshot is not None and len(outs) == 1 else None
        self.record.events.append(Event(name, kept, use, dependent))

    def _use(self, func, args, kwargs, out, read: list[Tensor], name: str, onward: list[Key]) -> Use | None:
        use = None
        if isinstance(out, Tensor) and func in RULES and not out.is_complex():
            call = Call(func, args, kwargs, out, self.source)
            use = RULES[func](call)
            call.source = {}.get  # a rule of someone's that keeps the call has no way back to this record
        sources = [] if use is None else use.sources
        if use is None or len(sources) < len(read):  # a rule that leaves a parameter out accounts for none
            for missed in sorted(self._names(read)):
                self.record.opaque.setdefault(missed, name)
            return None
        for source in sources:  # what was only repeated counts as derived where the rule had no use for its origin
            if isinstance(source, Derived) and source.origin is not None:
                self.record.derived.setdefault(source.origin.view.name, source.origin.operation)
        use.shape, use.edge = out.shape, get_gradient_edge(out)
        use.signature = out.shape, *[source if isinstance(source, Alias) else source.names for source in sources]
        self.record.paths.add(use.edge, onward, sources)
        return use

    def _derive(self, func, args, kwargs, outs: list[Tensor], read: list[Tensor], name: str) -> None:
        sources = [self.source(t) for t in read]
        for out in outs:
            if not out.requires_grad or id(out) in self._sources:
                continue
            view, shape = self._rows(func, args, kwargs, sources) or (None, None)
            source = self._alias(func, out, sources) if view is None else view if shape == out.shape else None
            if source is None:
                names = self._names(read)
                repeated = None if view is None or shape is None else Repeated(view, shape, name)
                origin = repeated or self._origin(func, name, out, read, sources)
                source = Derived(names, get_gradient_edge(out), out.shape, out.dtype, origin)
                for derived in sorted(names) if origin is None else ():
                    self.record.derived.setdefault(derived, name)
            self._register(out, source)

    @staticmethod
    def _origin(func, name: str, out: Tensor, read: list[Tensor], sources: list[Source | None]) -> Repeated | None:
        """The view that `out` repeats, perhaps by several operations, one after the other."""
        if len(sources) != 1 or func not in _REPEATING or not repeats(read[0].shape, out.shape):
            return None
        (source,) = sources
        return Repeated(source, tuple(read[0].shape), name) if isinstance(source, Alias) else source and source.origin

    @staticmethod
    def _rows(func, args, kwargs, sources: list[Source | None]) -> tuple[Alias, tuple[int, ...]] | None:
        """The rows of a table that an index without data picks, and their shape before they are repeated."""
        (first, *others) = sources
        if func not in (F.embedding, Tensor.__getitem__) or others or not isinstance(first, Alias):
            return None
        if func is Tensor.__getitem__:
            return looked_up(first, args[1]) if isinstance(args[1], Tensor) else None
        index, _, padding, by_count = embedding_arguments(args, kwargs)
        return None if by_count or (padding is not None and bool((index == padding).any())) else looked_up(first, index)

    def _alias(self, func, out: Tensor, sources: list[Source | None]) -> Alias | None:
        first = sources[0]
        if len(sources) != 1 or not isinstance(first, Alias):
            return None
        if func in _SAME_ENTRIES:
            return first
        return view_alias(out, self._parameters[first.name], self._whole[first.name])


def _listed(out: Any) -> Sequence[Any]:
    return out if isinstance(out, (list, tuple)) else (out,)


def _given(args: Iterable[Any], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Any]]:
    """The tensors among arguments, as `flat` finds them, and whole numbers, strings, lists and slices of them."""
    found, sizes = [], []
    for value in (*args, *kwargs.values()) if kwargs else args:
        kind = type(value)
        if kind in _SIZES:
            sizes.append(value)
        elif isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            inside, their_sizes = _given(value, {})
            found += inside
            if kind in _NESTED:
                sizes.append(tuple(their_sizes))
        elif isinstance(value, dict):
            found += flat(value.values(), {})
        elif kind is slice:
            sizes.append(tuple(_given((value.start, value.stop, value.step), {})[1]))
    return found, sizes
