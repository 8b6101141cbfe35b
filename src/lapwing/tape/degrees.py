"""Degrees: how every value of a forward pass grows when some parameters are multiplied by k > 0.

A value of degree d becomes k^d times what it was. Each operation makes one or two linear equations between the degrees
of what it reads and what it returns; data and constants have degree 0:

    y = W x + b           d(y) = d(W) + d(x) = d(b)
    y = relu(x), a view   d(y) = d(x)
    y = a + b             d(y) = d(a) = d(b)
    y = g norm(x) + s     d(y) = d(g) = d(s), whatever d(x) is: here a scale is lost
    y = tanh(x)           d(y) = d(x) = 0, as for every operation that is not known

A set of parameters that can be scaled together without a change of the outputs is a solution with d = 1 for its
members, 0 for all other parameters, and 0 for the outputs. `System.solve` finds the one that is nearest behind a
parameter: it follows what the equations force, and where a product must grow it lets the parameters in it do so.

A sum with a number up to `SMALL` counts as the eps of a norm, and keeps the degree. Equations are necessary as far as
the operations are known; whether a solution holds is for a run of the network to say (`invariance`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lapwing.tangent.operations import flat
from lapwing.tangent.rules import methods
from lapwing.tape.nodes import Node, Value
from lapwing.tape.rules import RULES, Selection
from lapwing.tape.rules.kinds import functional
from lapwing.tape.rules.resampling import Mean, Resampling

SMALL = 1e-3
"""The largest number that is taken for the eps of a norm where it is added, or where values are clamped to it."""
ATTEMPTS = 200
"""Choices between the factors of a product that lead nowhere, after which a search is given up."""

Terms = dict[Value, float]


@dataclass(frozen=True, eq=False)
class Equation:
    """sum of coefficient * degree = 0, and what it says about an operation."""

    terms: Terms
    why: str


def equations(node: Node, where: str) -> list[Equation]:
    """What one operation says; `where` is how messages name it."""
    made = HANDLERS.get(node.function, _by_rule)(node)
    outs = [out for out in node.outs if out is not None]
    if made is None:  # it may do anything to a scale
        return [
            Equation({value: 1.0}, f"its scale reaches {where}, which does not keep it")
            for value in [*node.sources, *outs]
        ]
    return [Equation(terms, f"{where} {why}") for terms, why in made]


# -- one function per kind of operation ------------------------------------------------------------------------------

Made = list[tuple[Terms, str]]
_JOINS = "joins what scales with what does not"


def _equal(a: Value, b: Value, why: str = _JOINS) -> tuple[Terms, str]:
    return _sum(a, {b: 1.0}, why)


def _sum(out: Value, parts: Mapping[Value, float], why: str) -> tuple[Terms, str]:
    """d(out) = sum of coefficient * d(part)."""
    terms = {out: 1.0}
    for value, factor in parts.items():
        terms[value] = terms.get(value, 0.0) - factor
    return {value: factor for value, factor in terms.items() if factor}, why


def _outs(node: Node) -> list[Value]:
    return [out for out in node.outs if out is not None]


def _constants(node: Node) -> list[Tensor]:
    """Tensors that were read and do not depend on parameters."""
    return [tensor for number, tensor in enumerate(flat(node.args, node.kwargs)) if number not in node.inputs]


def _neutral(value: Any) -> bool:
    """Zeros and infinities, which stay what they are when scaled; whatever is no real number, such as an index."""
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            return True
        value = value.detach()
        return bool(((value == 0) | value.isinf()).all())
    return not isinstance(value, (int, float)) or isinstance(value, bool) or value in (0, float("inf"), float("-inf"))


def _same(node: Node, numbers: Iterable[Any] = ()) -> Made:
    """All that goes in and comes out has one degree: 0 where data or other constants are among it."""
    outs = _outs(node)
    if not outs:
        return []
    first, *others = outs
    made = [_equal(first, value) for value in [*others, *node.inputs.values()]]
    numbers = [value for value in numbers if not isinstance(value, Tensor)]
    if not all(_neutral(value) for value in [*_constants(node), *numbers]):
        made.append(({first: 1.0}, _JOINS))
    return made


def _of_first(node: Node) -> Made | None:
    """Only what is in the first argument goes on; others lend a shape, or say where."""
    return [_equal(out, node.inputs[0]) for out in _outs(node)] if 0 in node.inputs else None


def _sums(node: Node) -> Made | None:
    """Sums and differences. A small number is the eps of a norm."""
    if eps_of(node.function, node.args, node.kwargs) is not None:
        return [_equal(out, value) for out in _outs(node) for value in node.sources]
    return _same(node, node.args[:2])


def _product(node: Node) -> Made:
    parts: Terms = {}
    for value in node.inputs.values():
        parts[value] = parts.get(value, 0.0) + 1
    return [_sum(out, parts, "multiplies what may not scale") for out in _outs(node)]


def _powered(power: float) -> Callable[[Node], Made]:
    def handler(node: Node) -> Made:
        return [_sum(out, {node.sources[0]: power}, "takes a power of it") for out in _outs(node)]

    return handler


def _pow(node: Node) -> Made | None:
    exponent = node.args[1] if len(node.args) > 1 else node.kwargs.get("exponent")
    if not isinstance(exponent, (int, float)) or isinstance(exponent, bool) or list(node.inputs) != [0]:
        return None
    return _powered(float(exponent))(node)


def _quotient(node: Node) -> Made | None:
    if node.kwargs.get("rounding_mode") is not None or len(node.args) < 2:
        return None
    parts: Terms = {}
    number = 0
    for place, argument in enumerate(node.args[:2]):
        if isinstance(argument, Tensor):
            if number in node.inputs:
                value = node.inputs[number]
                parts[value] = parts.get(value, 0.0) + (1 if place == 0 else -1)
            number += 1
    return [_sum(out, parts, "divides by it") for out in _outs(node)]


def _reversed_quotient(node: Node) -> Made:
    """number / tensor."""
    return [_sum(out, {node.sources[0]: -1.0}, "divides by it") for out in _outs(node)]


def roles(node: Node, names: tuple[str, ...]) -> dict[str, int]:
    """The number, among all tensors given, of each argument that is a tensor."""
    found: dict[str, int] = {}
    number = 0
    for place, argument in enumerate(node.args):
        if isinstance(argument, Tensor) and place < len(names):
            found[names[place]] = number
        number += len(flat((argument,), {}))
    for key, argument in node.kwargs.items():
        if isinstance(argument, Tensor):
            found[key] = number
        number += len(flat((argument,), {}))
    return found


def _affine(factors: tuple[str, ...], added: str, names: tuple[str, ...]) -> Callable[[Node], Made]:
    """A product of the arguments `factors`, to which the argument `added` is added, where there is one."""

    def handler(node: Node) -> Made:
        at = roles(node, names)
        (out,) = _outs(node)
        parts: Terms = {}
        for name in factors:
            if name in at and at[name] in node.inputs:
                value = node.inputs[at[name]]
                parts[value] = parts.get(value, 0.0) + 1
        made = [_sum(out, parts, "multiplies what may not scale")]
        if added in at:
            if at[added] in node.inputs:
                made.append(_equal(out, node.inputs[at[added]]))
            elif not _neutral(flat(node.args, node.kwargs)[at[added]]):
                made.append(({out: 1.0}, _JOINS))
        return made

    return handler


def _norm(node: Node) -> Made:
    """weight * (x normalised) + bias: of degree 0 in x."""
    at = roles(node, NORMS[node.function])
    (out,) = _outs(node)
    made = []
    given = flat(node.args, node.kwargs)
    weight = at.get("weight")
    if weight is None or weight not in node.inputs:
        made.append(({out: 1.0}, "returns one scale, whatever it reads"))
    else:
        made.append(_equal(out, node.inputs[weight]))
    bias = at.get("bias")
    if bias is not None and bias in node.inputs:
        made.append(_equal(out, node.inputs[bias]))
    elif bias is not None and not _neutral(given[bias]):
        made.append(({out: 1.0}, _JOINS))
    return made


def _moments(first: float, second: float) -> Callable[[Node], Made]:
    """var_mean and std_mean."""

    def handler(node: Node) -> Made:
        powers = zip(node.outs, (first, second), strict=False)
        return [_sum(out, {node.sources[0]: power}, "takes moments of it") for out, power in powers if out is not None]

    return handler


def _filled(node: Node) -> Made:
    """masked_fill(x, mask, value)."""
    return _same(node, [*node.args[2:], *node.kwargs.values()])


def _where(node: Node) -> Made:
    return _same(node, [*node.args[1:], *node.kwargs.values()])


def _padded(node: Node) -> Made:
    value = node.args[3] if len(node.args) > 3 else node.kwargs.get("value")
    return _same(node, [value])


def _assigned(node: Node) -> Made:
    return _same(node, node.args[2:])


def _copied(node: Node) -> Made:
    """copy_: what was there before is gone."""
    return [_equal(out, node.inputs[1]) for out in _outs(node)] if 1 in node.inputs else _same(node)


def _clamped(node: Node) -> Made | None:
    """Kept on one side of zero, or away from it by an eps."""
    bounds = [*node.args[1:], *node.kwargs.values()]
    if eps_of(node.function, node.args, node.kwargs) is not None:
        return _of_first(node)
    return _same(node) if all(bound is None or _neutral(bound) for bound in bounds) else None


def _prelu(node: Node) -> Made | None:
    made = _of_first(node)
    slopes = [value for number, value in node.inputs.items() if number]
    return None if made is None else made + [({value: 1.0}, "has it as a slope") for value in slopes]


def _threshold(node: Node) -> Made | None:
    return _same(node) if all(_neutral(value) for value in [*node.args[1:], *node.kwargs.values()]) else None


def _looked_up(node: Node) -> Made:
    return [_equal(out, value) for out in _outs(node) for value in node.sources]


def _by_rule(node: Node) -> Made | None:
    """Operations that the tape knows as a choice of entries, or an average of them."""
    return _same(node) if isinstance(RULES.get(node.function), (Selection, Mean, Resampling)) else None


def eps_of(function: Callable, args: tuple, kwargs: Mapping[str, Any]) -> tuple[str | int, float] | None:
    """Where a small number is added, or clamped to, and which: the eps of a norm that is written out."""
    place: str | int = 1
    if not args or not isinstance(args[0], Tensor):
        return None
    if function in _SUMS and len(args) > 1:
        number = args[1]
    elif function in _CLAMPS and len(args) <= 2 and kwargs.get("max") is None:
        place, number = (1, args[1]) if len(args) == 2 else ("min", kwargs.get("min"))
    else:
        return None
    if not isinstance(number, (int, float)) or isinstance(number, bool) or not 0 < number <= SMALL:
        return None
    return place, float(number)


NORMS: dict[Callable, tuple[str, ...]] = {
    F.batch_norm: ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    F.instance_norm: ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps"),
    **dict.fromkeys(functional("layer_norm"), ("input", "normalized_shape", "weight", "bias", "eps")),
    **dict.fromkeys(functional("group_norm"), ("input", "num_groups", "weight", "bias", "eps")),
    **dict.fromkeys(functional("rms_norm"), ("input", "normalized_shape", "weight", "eps")),
    F.normalize: ("input", "p", "dim", "eps", "out"),
}
"""Normalisations, and the names of their arguments in order."""
_SUMS = frozenset(methods("add", "add_", "__add__", "__radd__", "__iadd__"))
_CLAMPS = frozenset(methods("clamp", "clamp_", "clamp_min", "clamp_min_", "clip", "clip_"))


def _both(*names: str) -> list[Callable]:
    """With the in-place forms."""
    return functional(*names, *(f"{name}_" for name in names))


def _operators(*names: str) -> list[Callable]:
    return methods(*(f"__{side}{name}__" for name in names for side in ("", "i")))


_LAYER = ("input", "weight", "bias")
_CONVOLUTIONS = [getattr(F, f"conv{kind}{dims}d") for kind in ("", "_transpose") for dims in (1, 2, 3)]
HANDLERS: dict[Callable, Callable[[Node], Made | None]] = {
    **dict.fromkeys(_both("relu", "leaky_relu", "rrelu", "abs", "neg", "negative", "dropout"), _same),
    **dict.fromkeys(methods("__neg__", "__abs__", "__pos__", "nanmean", "nansum"), _same),
    **dict.fromkeys(methods("max", "min", "amax", "amin", "maximum", "minimum", "fmax", "fmin", "median"), _same),
    **dict.fromkeys(methods("norm", "std"), _powered(1.0)),
    **dict.fromkeys((torch.linalg.vector_norm, torch.linalg.norm, torch.linalg.matrix_norm), _powered(1.0)),
    **dict.fromkeys(methods("var"), _powered(2.0)),
    **dict.fromkeys(methods("var_mean"), _moments(2.0, 1.0)),
    **dict.fromkeys(methods("std_mean"), _moments(1.0, 1.0)),
    **dict.fromkeys(_both("square"), _powered(2.0)),
    **dict.fromkeys(_both("sqrt"), _powered(0.5)),
    **dict.fromkeys(_both("rsqrt"), _powered(-0.5)),
    **dict.fromkeys(_both("reciprocal"), _powered(-1.0)),
    **dict.fromkeys([*_both("pow"), *_operators("pow")], _pow),
    **dict.fromkeys([*_both("add", "sub", "subtract"), *_operators("add", "sub")], _sums),
    **dict.fromkeys(methods("__radd__", "__rsub__", "rsub"), _sums),
    **dict.fromkeys([*_both("mul", "multiply"), *_operators("mul"), *methods("__rmul__")], _product),
    **dict.fromkeys([*_both("div", "divide", "true_divide"), *_operators("truediv", "div")], _quotient),
    **dict.fromkeys(methods("__rtruediv__", "__rdiv__"), _reversed_quotient),
    **dict.fromkeys(methods("matmul", "mm", "bmm", "mv", "dot", "vdot", "inner", "outer", "ger"), _product),
    **dict.fromkeys([*methods("__matmul__", "__rmatmul__", "tensordot", "kron"), torch.einsum], _product),
    **dict.fromkeys((torch.linalg.matmul, torch.linalg.vecdot), _product),
    F.linear: _affine(("input", "weight"), "bias", _LAYER),
    **dict.fromkeys(_CONVOLUTIONS, _affine(("input", "weight"), "bias", _LAYER)),
    F.bilinear: _affine(("input1", "input2", "weight"), "bias", ("input1", "input2", "weight", "bias")),
    **dict.fromkeys(methods("addmm", "addmm_"), _affine(("mat1", "mat2"), "input", ("input", "mat1", "mat2"))),
    **dict.fromkeys(methods("addmv", "addmv_"), _affine(("mat", "vec"), "input", ("input", "mat", "vec"))),
    **dict.fromkeys(methods("addr", "addr_"), _affine(("vec1", "vec2"), "input", ("input", "vec1", "vec2"))),
    **dict.fromkeys(
        methods("baddbmm", "baddbmm_", "addbmm", "addbmm_"),
        _affine(("batch1", "batch2"), "input", ("input", "batch1", "batch2")),
    ),
    **dict.fromkeys(NORMS, _norm),
    torch._weight_norm: _affine(("g",), "", ("v", "g")),
    F.embedding: _looked_up,
    **dict.fromkeys(methods("view_as", "reshape_as", "expand_as", "type_as", "to"), _of_first),
    **dict.fromkeys(methods("masked_fill", "masked_fill_"), _filled),
    torch.where: _where,
    **dict.fromkeys(functional("pad"), _padded),
    **dict.fromkeys(methods("__setitem__"), _assigned),
    **dict.fromkeys(methods("copy_"), _copied),
    **dict.fromkeys(methods("clamp", "clamp_", "clamp_min", "clamp_min_", "clamp_max", "clamp_max_", "clip"), _clamped),
    **dict.fromkeys(functional("threshold", "threshold_"), _threshold),
    **dict.fromkeys(functional("prelu"), _prelu),
}  # fmt: skip


# -- solutions --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class System:
    """The equations of a forward pass.

    `zeros` holds the values that can have no other degree than 0, each with the reason.
    """

    equations: list[Equation]
    parameters: dict[str, Value]
    zeros: dict[Value, str] = field(init=False, repr=False)
    of: dict[Value, list[Equation]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.of, self.zeros = {}, {}
        for equation in self.equations:
            for value in equation.terms:
                self.of.setdefault(value, []).append(equation)
        queue = [(value, each.why) for each in self.equations if len(each.terms) == 1 for value in each.terms]
        while queue:
            value, why = queue.pop()
            if value in self.zeros:
                continue
            self.zeros[value] = why
            for equation in self.of[value]:
                left = [each for each in equation.terms if each not in self.zeros]
                if len(left) == 1:  # what comes out stands first, and says more
                    queue.append((left[0], next(self.zeros[each] for each in equation.terms if each in self.zeros)))

    def solve(self, name: str, taken: Iterable[str] = ()) -> dict[Value, float] | str:
        """The degrees under which the parameter `name` grows and the outputs do not; or why there are none.

        Parameters in `taken` stay as they are. Values that are not in the answer have degree 0.
        """
        search = _Search(self, {self.parameters[each] for each in taken})
        why = search.run(self.parameters[name])
        return {value: degree for value, degree in search.found.items() if degree} if why is None else why


@dataclass(frozen=True, eq=False)
class _Choice:
    """What could be chosen to fulfil an equation, and what was known before."""

    equation: Equation
    options: Iterator[dict[Value, float]]
    before: int
    active: dict[Equation, None]


@dataclass(eq=False)
class _Search:
    """Degrees that are `found`, besides the zeros of the system, and in which order (`_trail`)."""

    system: System
    other: set[Value]
    found: dict[Value, float] = field(default_factory=dict)
    _trail: list[Value] = field(default_factory=list)
    _active: dict[Equation, None] = field(default_factory=dict)
    _failed: int = 0
    _why: str | None = None

    def run(self, start: Value) -> str | None:
        """None, with the degrees in `found`; else the first reason that was met."""
        return None if self._assign({start: 1.0}) and self._decide() else self._why

    def _decide(self) -> bool:
        """Chooses, where products leave a choice, until nothing is left open; takes choices back that lead nowhere."""
        choices: list[_Choice] = []
        while (equation := self._open()) is not None:
            options = iter(list(self._options(equation)))
            choices.append(_Choice(equation, options, len(self._trail), dict(self._active)))
            while choices:
                choice = choices[-1]
                for value in self._trail[choice.before :]:
                    del self.found[value]
                del self._trail[choice.before :]
                self._active = dict(choice.active)
                option = next(choice.options, None)
                if option is None:
                    self._why = self._why or choice.equation.why
                    choices.pop()
                    continue
                if self._assign(option, choice.equation.why):
                    break
                self._failed += 1
                if self._failed > ATTEMPTS:
                    return False
            else:
                return False
        return True

    def _options(self, equation: Equation) -> Iterator[dict[Value, float]]:
        """One degree that is not known yet makes up for all; parameters are tried before what data went into."""
        left, rest = self._state(equation)
        for value in sorted(left, key=lambda each: not each.derived):
            degree = -rest / equation.terms[value]
            if value.parameter is None or (value not in self.other and abs(degree - 1) < 1e-9):
                yield dict.fromkeys(left, 0.0) | {value: degree}

    def _open(self) -> Equation | None:
        """An equation that what is known does not fulfil, with several degrees that are not known yet."""
        for equation in reversed(list(self._active)):
            left, total = self._state(equation)
            if left and abs(total) > 1e-9:
                return equation
            del self._active[equation]
        return None

    def _state(self, equation: Equation) -> tuple[list[Value], float]:
        """The values of an equation whose degree is not known yet, and the sum of the others."""
        left, total = [], 0.0
        for value, factor in equation.terms.items():
            if value in self.found:
                total += factor * self.found[value]
            elif value not in self.system.zeros:
                left.append(value)
        return left, total

    def _assign(self, given: Mapping[Value, float], why: str = "") -> bool:
        """Takes these degrees, and all that follow from them; False where they contradict each other.

        The reason of a zero is handed on to what it forces.
        """
        zeros = self.system.zeros
        queue = [(value, degree, why, "") for value, degree in given.items()]
        while queue:
            value, degree, why, root = queue.pop()
            if value in self.found or value in zeros:
                if abs(self.found.get(value, 0.0) - degree) > 1e-9:
                    return self._fail(zeros.get(value) or root or why)
                continue
            if value.parameter is not None:
                if value in self.other and abs(degree) > 1e-9:
                    return self._fail(f"'{value.parameter}' would have to scale with it, and does not")
                if min(abs(degree), abs(degree - 1)) > 1e-9:
                    return self._fail(root or why)
            self.found[value] = degree
            self._trail.append(value)
            for equation in self.system.of.get(value, ()):
                left, total = self._state(equation)
                held = next((zeros[each] for each in equation.terms if each in zeros), root)
                if len(left) == 1:
                    queue.append((left[0], -total / equation.terms[left[0]], equation.why, held))
                elif not left and abs(total) > 1e-9:
                    return self._fail(held or equation.why)
                elif left and abs(total) > 1e-9:
                    self._active[equation] = None
        return True

    def _fail(self, why: str) -> bool:
        self._why = self._why or why
        return False
