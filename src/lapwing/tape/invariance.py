"""scale_invariant_groups: sets of parameters whose common scale has no effect on the outputs, as norms make them.

    f(theta', k theta'') = f(theta', theta'')    for every k > 0

Candidates come from the operations of one forward pass (`degrees`); each is then run, with its parameters scaled, on a
private copy of the network, and is a group only if the outputs stay where they are.

BatchNorm in eval mode has statistics of weights that training saw: scaled weights would have led to running means k
and variances k^2 times as large, so these are scaled along. In this sense, and up to eps, networks with BatchNorm are
invariant, and their predictions do not depend on k when each group has a precision of its own (Antoran et al. 2022).

    >>> from torch import nn
    >>> from lapwing import scale_invariant_groups
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    >>> found = scale_invariant_groups(model, torch.randn(5, 4))
    >>> [group.parameters for group in found]
    [('0.weight', '0.bias')]
    >>> found.remaining["3.weight"]
    'its scale reaches the outputs'
    >>> found.partition().members
    (('0.weight', '0.bias'), ('1.weight', '1.bias', '3.weight', '3.bias'))
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule

from lapwing.errors import OptionError, ParameterError, UnsupportedOperationError
from lapwing.linalg.autocast import outside_modes
from lapwing.params import ParamSpace
from lapwing.priors import PriorGroups
from lapwing.tangent.checks import check_output, check_trainable
from lapwing.tangent.inputs import Called, batch_size, call, check_input, map_tensors
from lapwing.tangent.model import Tangent
from lapwing.tangent.operations import Plain, flat
from lapwing.tape.degrees import NORMS, Equation, System, eps_of, equations, roles
from lapwing.tape.nodes import Node, Value, version_of
from lapwing.tape.tape import Tape, TapeRecorder

TOLERANCE = 0.25
"""The largest change of the outputs, relative to their spread, by half and double the scale that is put down to eps."""


@dataclass(frozen=True)
class InvariantGroup:
    """Parameters that can be scaled together, and the operations at which their scale is lost.

    `change` is the largest change of the outputs, relative to their spread, when the parameters are multiplied by 1/4
    and 4, and running statistics and eps of the norms along with them: rounding. `change_by_eps` is the same for 1/2
    and 2 with eps as it is.
    """

    parameters: tuple[str, ...]
    norms: tuple[str, ...]
    change: float
    change_by_eps: float


@dataclass(frozen=True)
class ScaleInvariantGroups:
    """The groups, from the outputs back, and for every other parameter the reason why it is in none."""

    groups: tuple[InvariantGroup, ...]
    remaining: Mapping[str, str]
    names: tuple[str, ...] = field(repr=False)

    def __iter__(self) -> Iterator[InvariantGroup]:
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)

    def __str__(self) -> str:
        lines = [f"{len(self)} scale-invariant groups"]
        lines += [f"  {', '.join(group.parameters)}: {', '.join(group.norms)}" for group in self]
        lines += [f"  not {name}: {reason}" for name, reason in self.remaining.items()]
        return "\n".join(lines)

    def partition(self, rest: str = "one") -> PriorGroups:
        """What shares a precision: each group, and the other parameters, all together ("one") or each ("tensor")."""
        if rest not in ("one", "tensor"):
            raise OptionError(f"unknown rest {rest!r}; expected 'one' (precision for all) or 'tensor' (one for each).")
        left = tuple(name for name in self.names if name in self.remaining)
        others = [left] if rest == "one" and left else [(name,) for name in left]
        return PriorGroups((*(group.parameters for group in self), *others), "scale_invariant")


@outside_modes
def scale_invariant_groups(model: nn.Module, x: Any, *, tolerance: float | int = TOLERANCE) -> ScaleInvariantGroups:
    """Sets of the trainable parameters of `model` whose scale its outputs at x, a few data points, do not depend on.

    The network is looked at in eval mode. Members of a set are scaled by one factor; sets have no parameter in common.
    Weight and bias of a layer before a norm are one group, as are all that are added up before it, such as what the
    blocks of a residual network write. A bias that a norm takes away again (before an InstanceNorm, or a BatchNorm in
    training) is scaled with its weight like every other. Frozen parameters are constants.

    `tolerance` says how much of a change, relative to the spread of the outputs, eps may explain; a norm of values that
    are not large beside its eps is no norm.
    """
    if not 0 < tolerance < float("inf"):
        raise ParameterError(f"tolerance is {tolerance}; expected a finite number > 0.")
    space = ParamSpace.of(model)
    tangent = Tangent(model, space, evaluate=True)
    with torch.inference_mode(False), torch.enable_grad():
        x = map_tensors(lambda t: t.detach().clone() if t.is_inference() else t.detach(), x)
        check_input(x, space.device)
        check_trainable(tangent.parameters)
        recorder, tape = _recorded(tangent, x)
    system = _system(recorder, tape)
    runs = _Runs(tangent, x, recorder)
    groups: list[InvariantGroup] = []
    taken: set[str] = set()  # in a group, or refused with one
    remaining: dict[str, str] = {}
    used = _last_uses(tape)
    for name in used:
        if name in taken:
            continue
        found = system.solve(name, taken)
        if isinstance(found, str):
            remaining[name] = found
            continue
        members = tuple(each for each in space.names if found.get(system.parameters[each]))
        group = runs.verified(members, found, tape.nodes, tolerance)
        taken.update(members)
        if isinstance(group, str):
            remaining |= dict.fromkeys(members, group)
        else:
            groups.append(group)
    unused = "an operation that cannot be seen may read it" if recorder.hidden else "it has no effect on the outputs"
    idle = dict.fromkeys((name for name in space.names if name not in used), unused)
    grouped = {name for group in groups for name in group.parameters}
    reasons = remaining | idle
    return ScaleInvariantGroups(
        tuple(groups), {name: reasons[name] for name in space.names if name not in grouped}, space.names
    )


# -- the record ------------------------------------------------------------------------------------------------------


class _Recorder(TapeRecorder):
    """Every operation with its arguments, the module it happened in, and the number of the norm that it is."""

    def __init__(self, parameters: Mapping[str, Tensor], inputs: Any) -> None:
        super().__init__(parameters, inputs)
        self.modules: list[str] = []
        self.where: dict[Node, str] = {}
        self.sites: dict[Node, int] = {}
        self.hidden: dict[int, tuple[Tensor, Value]] = {}
        self.count = 0
        self._site: int | None = None

    def _refuse(self, func, args, kwargs) -> None:
        if func not in NORMS:  # normalised by the batch, samples depend on each other: of no concern here
            super()._refuse(func, args, kwargs)

    def value(self, tensor: Tensor, reader: str) -> Value | None:
        try:
            return super().value(tensor, reader)
        except UnsupportedOperationError:  # nothing is known of it, but that it may depend on parameters
            if id(tensor) not in self.hidden:
                edge = torch.autograd.graph.get_gradient_edge(tensor)
                self.hidden[id(tensor)] = tensor, Value(edge, tensor.shape, tensor.dtype)
            return self.hidden[id(tensor)][1]

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self._site = None
        if is_site(func, args, kwargs):
            self._site, self.count = self.count, self.count + 1
        return super().__torch_function__(func, types, args, kwargs)

    def _note(self, func, name: str, args, kwargs, inputs: dict[int, Value], made: list[Tensor], derived: bool) -> None:
        super()._note(func, name, args, kwargs, inputs, made, derived)
        node = self.nodes[-1]
        node.args, node.kwargs = args, kwargs
        node.versions = [version_of(tensor) for tensor in flat(args, kwargs)]
        self.where[node] = f"{name} in '{self.modules[-1]}'" if self.modules and self.modules[-1] else name
        if self._site is not None:
            self.sites[node] = self._site


def _recorded(tangent: Tangent, x: Any) -> tuple[_Recorder, Tape]:
    network = tangent.network()
    recorder = _Recorder(tangent.parameters, x)
    for name, module in network.named_modules():
        if not isinstance(module, ScriptModule):
            module.register_forward_pre_hook(partial(_enter, recorder.modules, name))
            module.register_forward_hook(partial(_leave, recorder.modules), always_call=True)
    with recorder:
        out = call(network, x)
    check_output(out, batch_size(x))
    return recorder, recorder.tape(out)


def _enter(modules: list[str], name: str, *_: Any) -> None:
    modules.append(name)


def _leave(modules: list[str], *_: Any) -> None:
    modules.pop()


def _system(recorder: _Recorder, tape: Tape) -> System:
    made = [each for node in tape.nodes for each in equations(node, recorder.where[node])]
    if tape.output is not None:
        made.append(Equation({tape.output: 1.0}, "its scale reaches the outputs"))
    for _, value in recorder.hidden.values():
        made.append(Equation({value: 1.0}, "its scale reaches an operation that cannot be seen"))
    return System(made, tape.parameters)


def _last_uses(tape: Tape) -> list[str]:
    """Parameters that the outputs depend on, those that are used last first."""
    uses: dict[str, None] = {}
    for node in reversed(tape.nodes):
        uses |= dict.fromkeys(value.parameter for value in node.inputs.values() if value.parameter is not None)
    if tape.output is not None and tape.output.parameter is not None:
        uses[tape.output.parameter] = None
    return list(uses)


# -- the check -------------------------------------------------------------------------------------------------------


def is_site(func: Any, args: tuple, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call has statistics or an eps that would be others for scaled inputs."""
    return func in NORMS or eps_of(func, args, kwargs) is not None


class _Scaled(Plain):
    """Runs norms with the running statistics, and unless `as_it_is` the eps, of inputs scaled by factors[number]."""

    def __init__(self, factors: Mapping[int, float], as_it_is: bool = False) -> None:
        super().__init__()
        self.factors, self.as_it_is, self.count = factors, as_it_is, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if is_site(func, args, kwargs):
            factor, self.count = self.factors.get(self.count, 1.0), self.count + 1
            if factor != 1:
                args, kwargs = self._scaled(func, args, dict(kwargs), factor)
        return super().__torch_function__(func, types, args, kwargs)

    def _scaled(self, func: Any, args: tuple, kwargs: dict[str, Any], factor: float) -> tuple[tuple, dict[str, Any]]:
        if func not in NORMS:
            found = eps_of(func, args, kwargs)
            assert found is not None
            where, eps = found
            if self.as_it_is:
                return args, kwargs
            if isinstance(where, int):
                return (*args[:where], eps * factor, *args[where + 1 :]), kwargs
            return args, kwargs | {where: eps * factor}
        names = NORMS[func]
        bound = dict(zip(names, args, strict=False)) | kwargs
        for name, power in (("running_mean", 1), ("running_var", 2)):
            if bound.get(name) is not None and not bound.get("training", False):
                bound[name] = bound[name] * factor**power
        if not self.as_it_is:
            eps = bound.get("eps")
            power = 1 if "p" in names else 2
            bound["eps"] = (_eps(func, bound["input"]) if eps is None else eps) * factor**power
        return (bound.pop("input"),), bound


def _eps(func: Any, x: Tensor) -> float:
    """What a norm takes where none is given."""
    names = NORMS[func]
    if "p" in names:
        return 1e-12
    return torch.finfo(x.dtype).eps if names[-2:] == ("weight", "eps") else 1e-5


@dataclass(eq=False)
class _Runs:
    """The network on private copies, with parameters scaled."""

    tangent: Tangent
    x: Any
    recorder: _Recorder
    _plain: Tensor | None = None

    def verified(
        self, members: tuple[str, ...], degrees: Mapping[Value, float], nodes: list[Node], tolerance: float
    ) -> InvariantGroup | str:
        """The group, or why it is none."""
        lost = [node for node in nodes if _loses(node, degrees)]
        sites = self.recorder.sites
        at = {sites[node]: _degree(node, degrees) for node in nodes if node in sites}
        plain, spread, rounding = self._reference()
        exact = eps = 0.0
        for k, as_it_is in ((0.25, False), (4.0, False), (0.5, True), (2.0, True)):
            out, same = self._outputs(members, {site: k**degree for site, degree in at.items()}, k, as_it_is)
            if not same:
                return "the network does not run the same operations twice"
            change = float((out - plain).abs().max())
            if not torch.isfinite(out).all() or change > rounding + spread * (tolerance if as_it_is else _exact(out)):
                what = "with eps as it is, " if as_it_is else ""
                return f"{what}scaling {', '.join(members)} by {k} changes the outputs by {change:.2g}"
            share = change / spread if spread else change
            exact, eps = (exact, max(eps, share)) if as_it_is else (max(exact, share), eps)
        norms = tuple(dict.fromkeys(self.recorder.where[node] for node in lost))
        return InvariantGroup(members, norms, exact, eps)

    def _reference(self) -> tuple[Tensor, float, float]:
        """The outputs, how far they are apart, and what of a change may be rounding."""
        if self._plain is None:
            self._plain, _ = self._outputs((), {}, 1.0, False)
        out = self._plain
        spread = float((out - out.mean(0)).abs().max()) or float(out.abs().max())
        return out, spread, 64 * torch.finfo(out.dtype).eps * float(out.abs().max())

    @torch.no_grad()
    def _outputs(
        self, members: tuple[str, ...], factors: Mapping[int, float], k: float, as_it_is: bool
    ) -> tuple[Tensor, bool]:
        own = self.tangent.parameters
        scaled = {f"model.{name}": own[name].detach() * k for name in members}
        mode = _Scaled(factors, as_it_is)
        with mode:
            out = torch.func.functional_call(Called(self.tangent.network()), scaled, (self.x,))
        out = out.detach()
        return out if out.is_floating_point() else out.float(), mode.count == self.recorder.count


def _exact(out: Tensor) -> float:
    return torch.finfo(out.dtype).eps ** 0.75


def _degree(node: Node, degrees: Mapping[Value, float]) -> float:
    """Of what is normalised, or of what an eps is added to; 0 if no parameter went into it."""
    number = roles(node, NORMS.get(node.function, ("input",))).get("input", 0)
    return degrees.get(node.inputs[number], 0.0) if number in node.inputs else 0.0


def _loses(node: Node, degrees: Mapping[Value, float]) -> bool:
    """Whether something with a scale goes in, and comes out without."""
    return any(degrees.get(value) for value in node.inputs.values()) and not any(
        degrees.get(out) for out in node.outs if out is not None
    )
