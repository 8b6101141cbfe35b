"""Every rule of the tape against its operation's Jacobian, spelled out: m_in = (J * J)^T m_out, in float64."""

# ruff: noqa: B008 (a default binds what a loop is at)

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.functional import jacobian

from lapwing.errors import UnsupportedOperationError
from lapwing.estimate.propagated.diagonal import walk
from lapwing.linalg.budget import MemoryBudget, within
from lapwing.tape.rules import RULES
from lapwing.tape.rules import kinds as rules_of_one_entry
from lapwing.tape.rules.kinds import functional
from lapwing.tape.tape import TapeRecorder

RTOL = 1e-9


def squares(function: Callable, inputs: Sequence[Tensor], m: Sequence[Tensor], rules: int | None) -> list[Tensor]:
    """The tape's answer, with every input a tensor of data that depends on parameters."""
    leaves = {str(i): x.clone().requires_grad_() for i, x in enumerate(inputs)}
    recorder = TapeRecorder(leaves)
    for value in recorder.parameters.values():
        value.derived = rules == 0  # nothing is spelled out unless it is meant to be
    with recorder:
        out = function(*leaves.values())
    outs = [o for o in (out if isinstance(out, (tuple, list)) else [out]) if o.requires_grad]
    if rules is not None and rules > 0:
        assert len(recorder.nodes) >= rules
        assert all(node.rule is not None for node in recorder.nodes)
    held = {}
    for tensor, variance in zip(outs, m, strict=True):
        value = recorder.value(tensor, "the test")
        assert value is not None
        held[value] = variance
    with torch.no_grad():
        held = walk(recorder.nodes, held)
    return [held.get(recorder.parameters[key], torch.zeros_like(leaf)) for key, leaf in leaves.items()]


def oracle(function: Callable, inputs: Sequence[Tensor], m: Sequence[Tensor]) -> list[Tensor]:
    """One dense Jacobian per output and input."""
    found = [torch.zeros_like(x) for x in inputs]
    for number, variance in enumerate(m):

        def output(*xs: Tensor, number=number) -> Tensor:
            out = function(*xs)
            return [o for o in (out if isinstance(out, (tuple, list)) else [out]) if o.requires_grad][number]

        for i, full in enumerate(jacobian(output, tuple(inputs))):
            flat = full.reshape(variance.numel(), -1)
            found[i] += (flat.square().mT @ variance.flatten()).reshape(inputs[i].shape)
    return found


def check(function: Callable, *shapes: tuple[int, ...] | Tensor, rules: int | None = 1) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [s if isinstance(s, Tensor) else torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]
    with torch.enable_grad():
        out = function(*(x.clone().requires_grad_() for x in inputs))
    outs = [o.detach() for o in (out if isinstance(out, (tuple, list)) else [out]) if o.requires_grad]
    m = [torch.rand(o.shape, dtype=torch.float64, generator=generator) for o in outs]
    expected = oracle(function, inputs, m)
    assert any(bool(e.any()) for e in expected)
    for a, e in zip(squares(function, inputs, m, rules), expected, strict=True):
        torch.testing.assert_close(a, e, rtol=RTOL, atol=1e-12)


def data(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def positive(*shape: int) -> Tensor:
    return 0.1 + 0.8 * torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def distinct(*shape: int) -> Tensor:
    """No ties, and nothing at a kink."""
    count = torch.Size(shape).numel()
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1)).to(torch.float64)
    return ((order + 0.3) / count * 4 - 2).reshape(shape)


CASES: dict[str, tuple] = {}


def case(name: str, function: Callable, *inputs: Any) -> None:
    assert name not in CASES, name
    CASES[name] = (function, *inputs)


# -- sums of products -----------------------------------------------------------------------------------------------

case("linear", lambda x, w, b: F.linear(x, w, b), (3, 4), (2, 4), (2,))
case("linear of sequences", lambda x, w: F.linear(x, w), (2, 3, 4), (2, 4))
case("linear by keyword", lambda x, w, b: F.linear(input=x, bias=b, weight=w), (3, 4), (2, 4), (2,))
case("linear of a vector", lambda x, w, b: F.linear(x, w, b), (4,), (2, 4), (2,))
case("linear of data", lambda w, b: F.linear(data(3, 4), w, b), (2, 4), (2,))
case("linear, constant weight", lambda x: F.linear(x, data(2, 4), data(2)), (3, 4))
for _dims in (1, 2, 3):
    _conv = getattr(F, f"conv{_dims}d")
    _back = getattr(F, f"conv_transpose{_dims}d")
    _x, _k = (2, 4, *(5, 4, 3)[:_dims]), (3, 2, 1)[:_dims]
    _w, _wb = (6, 2, *_k), (4, 3, *_k)
    case(f"conv{_dims}d", lambda x, w, b, f=_conv: f(x, w, b, groups=2), _x, _w, (6,))
    case(f"conv{_dims}d strided", lambda x, w, b, f=_conv: f(x, w, b, 2, 1, 1, 2), _x, _w, (6,))
    case(f"conv{_dims}d dilated", lambda x, w, f=_conv: f(x, w, None, padding=2, dilation=2, groups=2), _x, _w)
    case(
        f"conv{_dims}d same", lambda x, w, b, f=_conv: f(x, w, b, padding="same"), _x, (2, 4, *(3, 1, 5)[:_dims]), (2,)
    )
    case(f"conv{_dims}d alone", lambda x, w, b, f=_conv: f(x, w, b, groups=2), _x[1:], _w, (6,))
    case(f"conv{_dims}d keywords", lambda x, w, b, f=_conv: f(x, weight=w, bias=b, groups=2), _x, _w, (6,))
    case(f"conv{_dims}d bias only", lambda b, f=_conv, x=_x, w=_w: f(data(*x), data(*w), b, groups=2), (6,))
    case(f"conv_transpose{_dims}d", lambda x, w, b, f=_back: f(x, w, b), _x, _wb, (3,))
    case(
        f"conv_transpose{_dims}d strided",
        lambda x, w, b, f=_back: f(x, w, b, 2, 1, 1, 2),
        (2, 4, *(3, 2, 3)[:_dims]), (4, 2, *(3, 2, 3)[:_dims]), (4,),
    )  # fmt: skip
    case(f"conv_transpose{_dims}d dilated", lambda x, w, f=_back: f(x, w, stride=2, dilation=2, padding=1), _x, _wb)
case(
    "conv2d of both",
    lambda x, w: F.conv2d(x, w, stride=(2, 1), padding=(0, 1), dilation=(1, 2)),
    (1, 2, 4, 5),
    (2, 2, 2, 2),
)
case("matmul", lambda a, b: a @ b, (3, 4), (4, 2))
case("matmul of batches", lambda a, b: torch.matmul(a, b), (2, 1, 3, 4), (3, 4, 2))
case("matmul with a vector", lambda a, b: a.matmul(b), (2, 3, 4), (4,))
case("matmul from data", lambda b: data(3, 4) @ b, (4, 2))
case("mm", lambda a, b: torch.mm(a, mat2=b), (3, 4), (4, 2))
case("bmm", lambda a, b: torch.bmm(a, b), (2, 3, 4), (2, 4, 2))
case("mv", lambda a, b: a.mv(b), (3, 4), (4,))
case("dot", lambda a, b: torch.dot(a, b), (4,), (4,))
case("vdot", lambda a, b: torch.vdot(a, b), (4,), (4,))
case("vecdot", lambda a, b: torch.linalg.vecdot(a, b), (3, 4), (3, 4))
case("inner", lambda a, b: torch.inner(a, b), (2, 4), (3, 4))
case("outer", lambda a, b: torch.outer(a, b), (2,), (3,))
case("kron", lambda a, b: torch.kron(a, b), (2, 2), (1, 3))
case("tensordot", lambda a, b, f=torch.tensordot: f(a, b, dims=([1, 2], [2, 0])), (2, 3, 4), (4, 2, 3))
case("addmm", lambda c, a, b: torch.addmm(c, a, b), (3, 2), (3, 4), (4, 2))
case("addmm scaled", lambda c, a, b: torch.addmm(c, a, b, alpha=-2.0, beta=0.5), (2,), (3, 4), (4, 2))
case("baddbmm", lambda c, a, b: torch.baddbmm(c, a, b, alpha=3.0), (2, 3, 2), (2, 3, 4), (2, 4, 2))
case("addbmm", lambda c, a, b: torch.addbmm(c, a, b, beta=2.0), (3, 2), (2, 3, 4), (2, 4, 2))
case("addmv", lambda c, a, b: torch.addmv(c, a, b, alpha=-0.5), (3,), (3, 4), (4,))
case("addr", lambda c, a, b: torch.addr(c, a, b, alpha=1.5), (3, 2), (3,), (2,))
case("addmm in place", lambda c, a, b: c.clone().addmm_(a, b, alpha=2.0), (3, 2), (3, 4), (4, 2))
case("addmm into data", lambda a, b: data(3, 2).addmm_(a, b, alpha=2.0), (3, 4), (4, 2))
case("einsum", lambda a, b: torch.einsum("bi,oi->bo", a, b), (3, 4), (2, 4))
case("einsum, a label summed in one", lambda a, b: torch.einsum("bti,oi->bo", a, b), (2, 3, 4), (2, 4))
case("einsum of sums", lambda a, b: torch.einsum("ij,kl->i", a, b), (2, 3), (2, 4))
case("einsum of three", lambda a, b, c: torch.einsum("bi,oij,bj->bo", a, b, c), (2, 3), (2, 3, 2), (2, 2))
case("einsum of one", lambda a: torch.einsum("bij->bj", a), (2, 3, 2))
case("einsum implicit", lambda a, b: torch.einsum("zj,jk", a, b), (2, 3), (3, 2))
case("einsum with dots", lambda a, b: torch.einsum("...i,i o->...o", a, b), (2, 2, 3), (3, 2))
case("einsum, dots implied", lambda a, b: torch.einsum("...ij,...jk", a, b), (2, 2, 3), (3, 2))
case("einsum of a list", lambda a, b: torch.einsum("bi,bi->b", [a, b]), (2, 3), (2, 3))
case("einsum of lists of axes", lambda a, b: torch.einsum(a, [0, 1], b, [1, 2]), (2, 3), (3, 2))
case("einsum broadcast", lambda a, b: torch.einsum("bi,bi->b", a, b), (1, 3), (2, 3))
case("einsum broadcast in a sum", lambda a, b: torch.einsum("bi,bi->b", a, b), (2, 1), (2, 3))
case("bilinear", lambda a, b, w, c: F.bilinear(a, b, w, c), (3, 2), (3, 4), (2, 2, 4), (2,))
case("bilinear of sequences", lambda a, b, w: F.bilinear(a, b, w), (2, 3, 2), (2, 3, 2), (2, 2, 2))

# -- entry by entry -------------------------------------------------------------------------------------------------

ACTIVATIONS = (
    "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "softplus", "softshrink",
    "hardshrink", "hardtanh", "hardswish", "hardsigmoid", "logsigmoid", "softsign", "tanh", "sigmoid", "tanhshrink",
    "rrelu", "abs", "neg", "negative", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan",
    "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "sinc", "sqrt", "rsqrt", "square",
    "reciprocal", "erf", "erfc", "erfinv", "logit", "lgamma", "digamma", "nan_to_num", "frac",
)  # fmt: skip
_POSITIVE = {"log", "log2", "log10", "sqrt", "rsqrt", "logit", "lgamma", "digamma", "reciprocal"}
_SMALL = {"asin", "acos", "atanh", "erfinv", "log1p"}


def _domain(name: str) -> Tensor:
    if name == "acosh":
        return 1 + positive(2, 3)
    return positive(2, 3) if name in _POSITIVE else distinct(2, 3) / (3 if name in _SMALL else 1)


for _name in ACTIVATIONS:
    for _place, _f in enumerate(dict.fromkeys(functional(_name))):
        case(f"{_name}, form {_place}", lambda x, f=_f: f(x), _domain(_name))
    _in_place = (
        () if _name in ("asinh", "acosh", "atanh") else functional(f"{_name}_")
    )  # torch cannot differentiate them
    for _place, _f in enumerate(dict.fromkeys(_in_place)):
        case(f"{_name} in place, form {_place}", lambda x, f=_f: f(x.clone()), _domain(_name))
for _name in ("relu", "relu6", "leaky_relu", "elu", "selu", "celu", "silu", "mish", "hardtanh", "hardswish"):
    case(f"{_name} with inplace=True", lambda x, f=getattr(F, _name): f(x * 1.0, inplace=True), distinct(2, 3))
case("threshold", lambda x: F.threshold(x, 0.1, -2.0), distinct(2, 3))
case("gelu tanh", lambda x: F.gelu(x, approximate="tanh"), distinct(2, 3))
case("clamp", lambda x: x.clamp(-0.5, 0.7), distinct(2, 3))
case("clip", lambda x: torch.clip(x, max=0.7), distinct(2, 3))
case("clamp to tensors", lambda x, a: torch.clamp(x, min=a), distinct(2, 3), (3,))
case("clamp_min", lambda x, a: x.clamp_min(a), distinct(2, 3), (2, 1))
case("clamp_max", lambda x: x.clamp_max(0.2), distinct(2, 3))
case("clamp in place", lambda x: (x * 1.0).clamp_(-0.5), distinct(2, 3))
case("remainder", lambda x: torch.remainder(x, 0.7), distinct(2, 3))
case("fmod", lambda x: x.fmod(0.7), distinct(2, 3))
case("masked_fill", lambda x: x.masked_fill(data(2, 3) > 0, -1.0), (2, 3))
case("masked_fill broadcast", lambda x: x.masked_fill(data(2, 1) > 0, -1.0), (2, 3))
case("masked_fill with a value", lambda x, v: x.masked_fill(data(2, 3) > 0, v), (2, 3), ())
case("masked_fill with a value alone", lambda v: data(2, 3).masked_fill(data(2, 3) > 0, v), ())
case("masked_fill in place", lambda x, v: x.clone().masked_fill_(data(2, 3) > 0, v), (2, 3), ())
case("where", lambda x, y: torch.where(data(2, 3) > 0, x, y), (2, 3), (3,))
case("where of one", lambda x: torch.where(data(2, 3) > 0, x, 1.5), (2, 3))
case("where as a method", lambda x, y: x.where(data(2, 3) > 0, y), (2, 1), (2, 3))
case("where by keyword", lambda x, y: torch.where(data(2, 3) > 0, other=y, input=x), (2, 3), (2, 3))

BINARY = (
    "add", "sub", "mul", "div", "rsub", "subtract", "multiply", "divide", "true_divide", "pow", "float_power",
    "maximum", "minimum", "fmax", "fmin", "atan2", "hypot", "logaddexp", "xlogy",
)  # fmt: skip
for _name in BINARY:
    _f = getattr(torch, _name)
    case(f"{_name} of two", lambda x, y, f=_f: f(x, y), positive(2, 3), positive(2, 3).flip(0))
    case(f"{_name} broadcast", lambda x, y, f=_f: f(x, y), positive(2, 3), positive(3).flip(0))
    case(f"{_name} with data", lambda x, f=_f: f(x, positive(4, 2, 3)), positive(2, 3).flip(0))
    case(f"{_name} from data", lambda x, f=_f: f(positive(2, 3), x), positive(3).flip(0))
    if hasattr(Tensor, f"{_name}_"):
        _g = getattr(Tensor, f"{_name}_")
        case(f"{_name} in place", lambda x, y, g=_g: g(x.clone(), y), positive(2, 3), positive(3).flip(0))
        case(f"{_name} into data", lambda y, g=_g: g(positive(2, 3), y), positive(3).flip(0))
        case(f"{_name} in place of data", lambda x, g=_g: g(x.clone(), positive(3)), positive(2, 3).flip(0))
case("add alpha", lambda x, y: torch.add(x, y, alpha=-3.0), (2, 3), (3,))
case("add alpha nought", lambda x, y: torch.add(x, y, alpha=0), (2, 3), (3,))
case("sub alpha", lambda x, y: x.sub(y, alpha=2.0), (2, 3), (2, 1))
case("a + x", lambda y: 2.0 + y, (2, 3))
case("a - x", lambda y: 2.0 - y, (2, 3))
case("a / x", lambda y: 2.0 / y, positive(2, 3))
case("a ** x", lambda y: 2.0**y, (2, 3))
case("x ** a", lambda y: y**2, (2, 3))
case("- x", lambda y: -y, (2, 3))
case("abs(x)", lambda y: abs(y), distinct(2, 3))
case("x ** parameter", lambda x, y: x**y, positive(2, 3), ())
case("x += y", lambda x, y: x.clone().__iadd__(y), (2, 3), (3,))
case("x *= y", lambda x, y: x.clone().__imul__(y), (2, 3), (3,))
case("lerp", lambda a, b, w: torch.lerp(a, b, w), (2, 3), (3,), (2, 1))
case("lerp by a number", lambda a, b: a.lerp(b, 0.3), (2, 3), (2, 3))
case("addcmul", lambda a, b, c: torch.addcmul(a, b, c, value=-2.0), (2, 3), (3,), (2, 1))
case("addcdiv", lambda a, b, c: torch.addcdiv(a, b, c, value=0.5), (2, 3), (3,), positive(2, 1))
case("one base: silu", lambda x: x * torch.sigmoid(x), (2, 3))
case("one base: deep", lambda x: x.tanh() * x.exp() + (x - x.square()) / (1 + x.square()), (2, 3))
case("one base: in place", lambda x: x.sin().mul_(x).add_(x), (2, 3))
case("one base: where", lambda x: torch.where(x > 0, x.exp(), x.sin()), distinct(2, 3))
case("one base: masked", lambda x: x * x.masked_fill(data(2, 3) > 0, 2.0), (2, 3))
case("x * x", lambda x: x * x, (2, 3))
case("x + x", lambda x: x + x, (2, 3))

# -- zeros and ones -------------------------------------------------------------------------------------------------

case("reshape", lambda x: x.reshape(3, 4), (2, 3, 2))
case("view", lambda x: x.view(-1), (2, 3))
case("view_as", lambda x: x.view_as(data(3, 2)), (2, 3))
case("flatten", lambda x: torch.flatten(x, 1), (2, 3, 2))
case("unflatten", lambda x: x.unflatten(1, (2, 2)), (2, 4))
case("permute", lambda x: x.permute(2, 0, 1), (2, 3, 2))
case("transpose", lambda x: x.transpose(0, 1), (2, 3))
case("T", lambda x: x.T, (2, 3))
case("mT", lambda x: x.mT, (2, 3, 2))
case("movedim", lambda x: x.movedim(0, -1), (2, 3, 2))
case("squeeze", lambda x: x.squeeze(1).unsqueeze(0), (2, 1, 3))
case("expand", lambda x: x.expand(4, 2, 3), (2, 1))
case("expand_as", lambda x: x.expand_as(data(4, 2)), (2,))
case("broadcast_to", lambda x: torch.broadcast_to(x, (4, 2)), (2,))
case("broadcast_tensors", lambda x, y: torch.broadcast_tensors(x, y), (2, 1), (3,))
case("repeat", lambda x: x.repeat(2, 3), (2, 2))
case("tile", lambda x: torch.tile(x, (2, 1)), (2, 2))
case("repeat_interleave", lambda x: x.repeat_interleave(3, 1), (2, 2))
case("chunk", lambda x: x.chunk(2, 1), (2, 4))
case("split", lambda x: torch.split(x, [1, 3], 1), (2, 4))
case("split as a method", lambda x: x.split(2, 1), (2, 4))
case("tensor_split", lambda x: x.tensor_split(3, 1), (2, 4))
case("unbind", lambda x: x.unbind(1), (2, 3))
case("select", lambda x: x.select(1, 0), (2, 3))
case("narrow", lambda x: x.narrow(1, 1, 2), (2, 4))
case("slice", lambda x: x[:, 1:], (2, 3))
case("index", lambda x: x[torch.tensor([0, 0, 1]), torch.tensor([2, 2, 1])], (2, 3))
case("index by a mask", lambda x: x[data(2, 3) > 0], (2, 3))
case("index_select", lambda x: x.index_select(1, torch.tensor([0, 2, 2])), (2, 3))
case("gather", lambda x: x.gather(1, torch.tensor([[0, 0], [2, 1]])), (2, 3))
case("take_along_dim", lambda x: torch.take_along_dim(x, torch.tensor([[0, 0], [2, 1]]), 1), (2, 3))
case("take", lambda x: torch.take(x, torch.tensor([0, 4, 4])), (2, 3))
case("masked_select", lambda x: x.masked_select(data(2, 3) > 0), (2, 3))
case("masked_scatter", lambda x, y: x.masked_scatter(data(2, 3) > 0, y), (2, 3), (6,))
case("scatter", lambda x, y: x.scatter(1, torch.tensor([[0, 2], [1, 2]]), y), (2, 3), (2, 2))
case("scatter_add", lambda x, y: x.scatter_add(1, torch.tensor([[0, 0], [1, 2]]), y), (2, 3), (2, 2))
case("index_copy", lambda x, y: x.index_copy(1, torch.tensor([2, 0]), y), (2, 3), (2, 2))
case("cat", lambda x, y: torch.cat([x, y], 1), (2, 3), (2, 1))
case("cat of one twice", lambda x: torch.cat((x, x)), (2, 3))
case("cat by keyword", lambda x, y: torch.cat(tensors=[x, data(2, 1), y], dim=1), (2, 3), (2, 1))
case("stack", lambda x, y: torch.stack([x, y], dim=-1), (2, 3), (2, 3))
case("hstack", lambda x, y: torch.hstack([x, y]), (2, 3), (2, 1))
case("roll", lambda x: x.roll(1, 0), (2, 3))
case("flip", lambda x: x.flip(1), (2, 3))
case("diagonal", lambda x: x.diagonal(), (3, 3))
case("diag_embed", lambda x: torch.diag_embed(x), (2, 3))
case("tril", lambda x: x.tril(), (3, 3))
case("trace", lambda x: x.trace(), (3, 3))
case("unfold", lambda x: F.unfold(x, 2, padding=1), (1, 2, 3, 3))
case("windows", lambda x: x.unfold(1, 2, 1), (2, 4))
case("fold", lambda x: F.fold(x, (3, 3), 2), (1, 8, 4))
case("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), (1, 4, 2, 2))
case("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2), (1, 1, 4, 4))
case("channel_shuffle", lambda x: F.channel_shuffle(x, 2), (1, 4, 2, 2))
case("pad", lambda x: F.pad(x, (1, 2), value=3.0), (2, 3))
for _mode in ("reflect", "replicate", "circular"):
    case(f"pad {_mode}", lambda x, mode=_mode: F.pad(x, (1, 2, 1, 1), mode=mode), (1, 2, 3, 3))
case("sum", lambda x: x.sum(), (2, 3))
case("sum of axes", lambda x: torch.sum(x, (0, 2), keepdim=True), (2, 3, 2))
case("cumsum", lambda x: x.cumsum(1), (2, 3))
case("sort", lambda x: x.sort(1, descending=True), distinct(2, 3))
case("topk", lambda x: x.topk(2, 1), distinct(2, 4))
case("setitem", lambda x, y: _assigned(x.clone(), y), (2, 3), (2,))
case("setitem into data", lambda y: _assigned(data(2, 3), y), (2,))
case("copy_", lambda y: torch.zeros(2, 3, dtype=torch.float64).copy_(y), (3,))
case("clone and to", lambda x: x.clone().to(torch.float64).contiguous(), (2, 3))
for _name in ("dropout", "dropout1d", "alpha_dropout", "feature_alpha_dropout"):
    case(f"{_name} in eval", lambda x, f=getattr(F, _name): f(x, 0.5, training=False), (2, 2, 3))
case("embedding", lambda w: F.embedding(torch.tensor([[0, 2, 2]]), w, padding_idx=0), (3, 2))


def _assigned(x: Tensor, y: Tensor) -> Tensor:
    x[:, 1] = y
    return x


# -- pooling and resampling -----------------------------------------------------------------------------------------

case("max_pool1d", lambda x: F.max_pool1d(x, 2, 1, padding=1), distinct(1, 2, 5))
case("max_pool2d", lambda x: F.max_pool2d(x, 3, stride=2, padding=1, ceil_mode=True), distinct(1, 2, 4, 5))
case("max_pool2d dilated", lambda x: F.max_pool2d(x, 2, stride=1, dilation=2), distinct(1, 2, 4, 5))
case("max_pool2d with indices", lambda x: F.max_pool2d(x, 2, return_indices=True), distinct(1, 2, 4, 4))
case("max_pool3d", lambda x: F.max_pool3d(x, 2, 1), distinct(1, 1, 3, 3, 2))
case("max_unpool2d", lambda x: F.max_unpool2d(x, torch.tensor([[[[0, 3], [9, 15]]]]), (2, 2)), (1, 1, 2, 2))
for _dims in (1, 2, 3):
    case(
        f"adaptive_max_pool{_dims}d",
        lambda x, f=getattr(F, f"adaptive_max_pool{_dims}d"): f(x, 2),
        distinct(1, 2, *(5, 3, 4)[:_dims]),
    )
    _avg, _ada = getattr(F, f"avg_pool{_dims}d"), getattr(F, f"adaptive_avg_pool{_dims}d")
    _x = (2, 2, *(5, 4, 6)[:_dims])
    case(f"avg_pool{_dims}d", lambda x, f=_avg: f(x, 2), _x)
    case(f"avg_pool{_dims}d overlapping", lambda x, f=_avg: f(x, 3, 1, padding=1), _x)
    case(f"avg_pool{_dims}d ceil", lambda x, f=_avg: f(x, 3, stride=2, padding=1, ceil_mode=True), _x)
    case(
        f"avg_pool{_dims}d without padding",
        lambda x, f=_avg: f(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
        _x,
    )
    case(f"avg_pool{_dims}d alone", lambda x, f=_avg: f(x, 2), _x[1:])
    case(f"avg_pool{_dims}d by keyword", lambda x, f=_avg: f(input=x, kernel_size=2), _x)
    case(f"adaptive_avg_pool{_dims}d", lambda x, f=_ada: f(x, 3), _x)
    case(f"adaptive_avg_pool{_dims}d to one", lambda x, f=_ada: f(x, 1), _x)
case("avg_pool2d divided", lambda x: F.avg_pool2d(x, (2, 3), 1, (1, 0), divisor_override=5), (1, 2, 4, 4))
case("adaptive_avg_pool2d of one axis", lambda x: F.adaptive_avg_pool2d(x, (None, 2)), (1, 2, 4, 5))
_LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}
for _dims in (1, 2, 3):
    _x, _size = (1, 2, *(3, 4, 2)[:_dims]), (5, 3, 3)[:_dims]
    for _mode in ("nearest", "nearest-exact", "area"):
        case(f"interpolate {_mode} {_dims}d", lambda x, mode=_mode, n=_size: F.interpolate(x, n, mode=mode), _x)
        case(
            f"interpolate {_mode} {_dims}d by a factor",
            lambda x, mode=_mode: F.interpolate(x, scale_factor=1.7, mode=mode),
            _x,
        )
    for _corners in (False, True):
        _mode = _LINEAR[_dims]
        case(
            f"interpolate {_mode} {_corners}",
            lambda x, mode=_mode, n=_size, c=_corners: F.interpolate(x, size=n, mode=mode, align_corners=c),
            _x,
        )
        case(
            f"interpolate {_mode} {_corners} by a factor",
            lambda x, mode=_mode, c=_corners: F.interpolate(x, scale_factor=2, mode=mode, align_corners=c),
            _x,
        )
for _corners in (False, True):
    case(
        f"interpolate bicubic {_corners}",
        lambda x, c=_corners: F.interpolate(x, (5, 7), mode="bicubic", align_corners=c),
        (1, 2, 3, 4),
    )
case("interpolate bicubic by a factor", lambda x: F.interpolate(x, None, (1.5, 0.7), "bicubic"), (1, 2, 4, 5))
case("interpolate, positional", lambda x: F.interpolate(x, (5, 3), None, "nearest"), (1, 2, 3, 4))
case("interpolate, antialiased", lambda x: F.interpolate(x, (2, 3), mode="bilinear", antialias=True), (1, 2, 5, 6))
case("interpolate, default", lambda x: F.interpolate(x, (5, 3)), (1, 2, 3, 4))
case("mean", lambda x: x.mean(), (2, 3))
case("mean of axes", lambda x: torch.mean(x, dim=(-1, 0)), (2, 3, 2))

# -- reductions -----------------------------------------------------------------------------------------------------

for _name in ("prod", "logsumexp", "var", "std", "amax", "amin", "norm", "median", "kthvalue", "max", "min"):
    _extra = (2,) if _name == "kthvalue" else (2.0,) if _name == "norm" else ()
    case(f"{_name} of an axis", lambda x, f=getattr(torch, _name), e=_extra: f(x, *e, dim=1), distinct(2, 3, 2))
for _name in ("prod", "var", "std", "norm", "median", "max", "min", "amax", "amin"):
    case(f"{_name} of all", lambda x, f=getattr(Tensor, _name): f(x), distinct(2, 3))
case("max of two", lambda x, y: torch.max(x, y), distinct(2, 3), distinct(3) + 0.01)
case("max with data", lambda x: x.max(distinct(2, 3) + 0.01), distinct(3))
case("min of two", lambda x, y: torch.min(x, other=y), distinct(2, 3), distinct(3) + 0.01)
case("max, positional", lambda x: x.max(1, True), distinct(2, 3))
case("var without correction", lambda x: x.var((0, 1), correction=0), (2, 3, 2))
case("std_mean", lambda x: torch.std_mean(x, 1), (2, 3))
case("vector_norm", lambda x: torch.linalg.vector_norm(x, 3, dim=1, keepdim=True), (2, 3))
case("linalg.norm", lambda x: torch.linalg.norm(x, dim=-1), (2, 3))
case("matrix_norm", lambda x: torch.linalg.matrix_norm(x), (2, 3, 3))
case("norm by a keyword", lambda x: x.norm(p=1, dim=-1), distinct(2, 3))
case("det", lambda x: torch.linalg.det(x), (2, 3, 3))
case("glu", lambda x: F.glu(x, 1), (2, 4))
case("cosine_similarity", lambda x, y: F.cosine_similarity(x, y, dim=-1), (3, 4), (3, 4))
case("cosine_similarity broadcast", lambda x, y: F.cosine_similarity(x[:, None], y[None], dim=-1), (3, 4), (2, 4))
case("cosine_similarity with data", lambda x: F.cosine_similarity(x[:, None], data(1, 2, 4), dim=-1), (3, 4))
case("pairwise_distance", lambda x, y: F.pairwise_distance(x, y), (3, 4), (3, 4))
case("dist", lambda x, y: torch.dist(x, y), (3, 4), (3, 4))

# -- closed forms ---------------------------------------------------------------------------------------------------

for _name in ("softmax", "log_softmax"):
    case(f"{_name}", lambda x, f=getattr(F, _name): f(x, dim=-1), (2, 4))
    case(f"{_name}, method", lambda x, f=getattr(Tensor, _name): f(x, 1), (2, 4, 3))
    case(f"{_name}, torch", lambda x, f=getattr(torch, _name): f(x, dim=0), (3, 2))
    case(
        f"{_name}, masked",
        lambda x, f=getattr(F, _name): f(x.masked_fill(data(2, 4) > 1, float("-inf")), -1)[:, :2],
        (2, 4),
    )
case("softmin", lambda x: F.softmin(x, dim=1), (2, 4))
_mean, _var = data(4), positive(4)
for _name, _x in (("a table", (3, 4)), ("an image", (3, 4, 2, 2))):
    case(f"batch_norm of {_name}", lambda x, w, b: F.batch_norm(x, _mean, _var, w, b), _x, (4,), (4,))
    case(f"batch_norm of {_name}, plain", lambda x: F.batch_norm(x, _mean, _var, eps=0.1), _x)
    case(
        f"batch_norm of {_name}, keywords",
        lambda x, w, b: F.batch_norm(x, _mean, _var, bias=b, weight=w),
        _x,
        (4,),
        (4,),
    )
    case(f"group_norm of {_name}", lambda x, w, b: F.group_norm(x, 2, w, b, 1e-3), _x, (4,), (4,))
    case(f"group_norm of {_name}, plain", lambda x: F.group_norm(x, 1, eps=0.1), _x)
case("layer_norm", lambda x, w, b: F.layer_norm(x, (4,), w, b), (2, 3, 4), (4,), (4,))
case("layer_norm of matrices", lambda x, w, b: F.layer_norm(x, (3, 4), w, b, 0.1), (2, 3, 4), (3, 4), (3, 4))
case("layer_norm, plain", lambda x: F.layer_norm(x, [4]), (2, 4))
case("layer_norm of a vector", lambda x, w, b: F.layer_norm(x, (4,), w, b), (4,), (4,), (4,))
case("layer_norm of data", lambda w, b: F.layer_norm(data(3, 4), (4,), weight=w, bias=b), (4,), (4,))
case("layer_norm, torch", lambda x, w: torch.layer_norm(x, (4,), w), (2, 4), (4,))
case("instance_norm", lambda x, w, b: F.instance_norm(x, weight=w, bias=b), (2, 3, 4), (3,), (3,))
case(
    "instance_norm, running",
    lambda x, w, b: F.instance_norm(x, data(3), positive(3), w, b, use_input_stats=False),
    (2, 3, 4),
    (3,),
    (3,),
)
case("rms_norm", lambda x, w: F.rms_norm(x, (4,), w), (2, 3, 4), (4,))
case("rms_norm of matrices", lambda x, w: F.rms_norm(x, (3, 4), weight=w, eps=0.1), (2, 3, 4), (3, 4))
case("rms_norm of a vector", lambda x, w: F.rms_norm(x, (4,), w), (4,), (4,))
case("normalize", lambda x: F.normalize(x), (3, 4))
case("normalize, p = 3", lambda x: F.normalize(x, 3.0, dim=-1), (2, 3, 4))
case("normalize, small", lambda x: F.normalize(x, eps=100.0), (3, 4))
case("weight_norm", lambda v, g: torch._weight_norm(v, g, 0), (3, 2, 2), (3, 1, 1))
case("weight_norm without an axis", lambda v, g: torch._weight_norm(v, g), (3, 2, 2), (3, 1, 1))
case("weight_norm by keyword", lambda v, g: torch._weight_norm(v, g=g, dim=1), (2, 3), (1, 3))
case("normalize by keyword", lambda x: F.normalize(input=x, dim=0, p=3.0, eps=1e-3), (3, 4))
case("weight_norm, last", lambda v, g: torch._weight_norm(v, g, 1), (2, 3), (1, 3))
case("prelu", lambda x, w: F.prelu(x, w), distinct(2, 3, 2), (3,))
case("prelu of one slope", lambda x, w: F.prelu(x, w), distinct(2, 3, 2), (1,))
case("prelu of a vector", lambda x, w: torch.prelu(x, w), distinct(3), (1,))
case("prelu by keyword", lambda x, w: F.prelu(weight=w, input=x), distinct(2, 3), (3,))


@pytest.mark.parametrize("name", CASES)
def test_a_rule_gives_the_squared_jacobian(name):
    function, *inputs = CASES[name]
    check(function, *inputs)


def test_every_activation_is_tried():
    elsewhere = {"threshold", "clamp", "clamp_min", "clamp_max", "clip", "masked_fill", "remainder", "fmod"}
    flat = {"sign", "floor", "ceil", "round", "trunc"}  # no slope anywhere
    assert set(rules_of_one_entry._ACTIVATIONS) == {*ACTIVATIONS, *elsewhere, *flat}


@pytest.mark.parametrize("name", ["sign", "floor", "ceil", "round", "trunc"])
def test_steps_pass_nothing(name):
    (found,) = squares(lambda x: getattr(torch, name)(x), [distinct(2, 3)], [torch.ones(2, 3)], 1)
    assert not found.any()


def test_every_kind_of_rule_is_tried():
    kinds = {type(rule) for rule in RULES.values()}
    seen = set()
    for function, *shapes in CASES.values():
        inputs = [s if isinstance(s, Tensor) else torch.randn(s, dtype=torch.float64) for s in shapes]
        leaves = {str(i): x.clone().requires_grad_() for i, x in enumerate(inputs)}
        recorder = TapeRecorder(leaves)
        with recorder:
            function(*leaves.values())
        seen |= {type(node.rule) for node in recorder.nodes}
    assert kinds <= seen


SPELLED_OUT: dict[str, tuple] = {
    "matrix_exp": (lambda a: torch.linalg.matrix_exp(a), (3, 3)),
    "solve": (lambda a, b: torch.linalg.solve(a, b), (3, 3), (3, 2)),
    "inverse": (lambda a: torch.linalg.inv(a), (3, 3)),
    "cumprod": (lambda a: a.cumprod(1), (2, 3)),
    "qr": (lambda a: tuple(torch.linalg.qr(a)), (3, 3)),
    "cummax": (lambda a: tuple(a.cummax(1)), (2, 4)),
    "one value twice": (lambda a: torch.linalg.solve_triangular(a, a, upper=True), (3, 3)),
}


@pytest.mark.parametrize("name", SPELLED_OUT)
def test_what_is_made_of_parameters_alone_needs_no_rule(name):
    function, *inputs = SPELLED_OUT[name]
    check(function, *inputs, rules=0)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", SPELLED_OUT)
def test_entries_are_spelled_out_one_by_one_in_anomaly_mode(name):
    """Where many backward passes cannot be one."""
    function, *inputs = SPELLED_OUT[name]
    with torch.autograd.set_detect_anomaly(True):
        check(function, *inputs, rules=0)


def test_entries_are_spelled_out_in_parts():
    with within(MemoryBudget(1)):
        check(lambda a, b: torch.linalg.solve(a, b), (3, 3), (3, 2), rules=0)


def test_what_is_too_large_to_be_spelled_out_is_refused(monkeypatch):
    monkeypatch.setattr(rules_of_one_entry, "SPELLED_OUT", 8)
    with pytest.raises(UnsupportedOperationError, match="'linalg_inv' has no rule"):
        check(lambda a: torch.linalg.inv(a), (3, 3), rules=0)


def test_without_a_rule_data_are_refused():
    with pytest.raises(UnsupportedOperationError, match=r"'cumprod' has no rule.*Register a rule"):
        check(lambda x: x.cumprod(1), (2, 3), rules=None)


def test_an_activation_that_nobody_registered_proves_itself():
    assert torch.special.erfcx not in RULES
    check(lambda x: torch.special.erfcx(x), (2, 3), rules=None)


def test_sparse_gradients_of_an_embedding():
    index = torch.tensor([[0, 2, 2], [1, 1, 1]])
    m = torch.rand(2, 3, 2, dtype=torch.float64)
    (found,) = squares(lambda w: F.embedding(index, w, sparse=True), [data(4, 2)], [m], 1)
    expected = torch.zeros(4, 2, dtype=torch.float64).index_add_(0, index.flatten(), m.flatten(0, 1))
    torch.testing.assert_close(found, expected, rtol=RTOL, atol=0)


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
@pytest.mark.parametrize(
    ("function", "shapes", "words"),
    [
        (lambda w: F.embedding(torch.tensor([0, 0]), w, scale_grad_by_freq=True), [(3, 2)], "scale_grad_by_freq"),
        (lambda a: torch.einsum("ii->i", a), [(3, 3)], "torch.diagonal"),
        (lambda a, b, w: F.bilinear(a, b, weight=w), [(2, 3), (2, 2), (1, 3, 2)], "by keyword"),
        (lambda a: F.softmax(a), [(2, 3)], "dim="),
    ],
)
def test_what_a_rule_does_not_cover_is_refused(function, shapes, words):
    inputs = [data(*shape) for shape in shapes]
    out = function(*inputs)
    with pytest.raises(UnsupportedOperationError, match=words):
        squares(function, inputs, [torch.ones_like(out)], None)


def test_composites_are_followed_into():
    check(lambda x: F.lp_pool1d(x, 2.0, 2), positive(1, 2, 6), rules=2)


@pytest.mark.parametrize("masked", ["none", "boolean", "added", "causal", "grouped", "scaled", "nothing"])
def test_attention_in_plain_operations(masked):
    """The same outputs as torch's own, also where a query may look at nothing."""
    q, k, v = data(2, 4, 3, 2), data(2, 4, 5, 2).flip(0), data(2, 4, 5, 3)
    options: dict[str, Any] = {
        "none": {},
        "boolean": {"attn_mask": torch.tensor([[True, False, True, True, False]]).expand(3, 5)},
        "added": {"attn_mask": data(3, 5)},
        "causal": {"is_causal": True},
        "grouped": {"enable_gqa": True},
        "scaled": {"scale": 0.3},
        "nothing": {"attn_mask": torch.tensor([[True] * 5, [False] * 5, [True] * 5])},
    }[masked]
    if masked == "grouped":
        k, v = k[:, :2], v[:, :2]
    expected = F.scaled_dot_product_attention(q, k, v, **options)
    recorder = TapeRecorder({"q": q.clone().requires_grad_()})
    with recorder:
        found = F.scaled_dot_product_attention(q.clone().requires_grad_(), k, v, **options)
    torch.testing.assert_close(found.detach(), expected)


def test_attention_softmax_and_product():
    """softmax(q k^T) v in v alone is linear, so that its rule is exact."""
    q, k = data(2, 3, 2), data(2, 4, 2).flip(0)
    check(lambda v: F.scaled_dot_product_attention(q, k, v), (2, 4, 2), rules=1)


def test_modules_with_several_operations():
    """A block is the rules of its operations."""
    block = nn.Sequential(nn.Linear(3, 3), nn.Hardswish()).double().requires_grad_(False)
    check(lambda x: block(x), (2, 3), rules=2)
