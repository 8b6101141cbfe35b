"""Degrees of operations against brute force: the equations hold for exactly the scalings that the operation allows."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lapwing.tangent import Tangent
from lapwing.tape import degrees
from lapwing.tape.degrees import SMALL, eps_of, equations
from lapwing.tape.invariance import _recorded, _Recorder, _system

K = 1.7
EPS = 1e-13
"""Of the norms in the tests, so that invariance is exact to rounding."""
GRID = (-1.0, 0.0, 0.5, 1.0, 2.0, 3.0)


@pytest.fixture(autouse=True)
def _float64() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)


def data(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def several(out: Any) -> list[Tensor]:
    return [o for o in (out if isinstance(out, (tuple, list)) else [out]) if o.is_floating_point()]


def allowed(function: Callable, inputs: list[Tensor]) -> set[tuple[float, ...]]:
    """Degrees (of the inputs, of the outputs) under which each output of scaled inputs is the scaled output."""
    plain, found = several(function(*(x.clone() for x in inputs))), set()
    for given in product(GRID, repeat=len(inputs)):
        scaled = several(function(*(K**degree * x for degree, x in zip(given, inputs, strict=True))))
        fits = [
            [degree for degree in GRID if torch.allclose(b, K**degree * a, rtol=1e-8, atol=1e-11)]
            for a, b in zip(plain, scaled, strict=True)
        ]
        found |= {(*given, *outs) for outs in product(*fits)}
    return found


def solutions(function: Callable, inputs: list[Tensor]) -> set[tuple[float, ...]]:
    """Those that the equations of the operations allow, whatever values in between do."""
    leaves = {str(i): x.clone().requires_grad_() for i, x in enumerate(inputs)}
    recorder = _Recorder(leaves, ())
    with recorder:
        outs = [recorder.value(out, "the test") for out in several(function(*leaves.values())) if out.requires_grad]
    ends = [*recorder.parameters.values(), *(out for out in outs if out is not None)]
    made = [each for node in recorder.nodes for each in equations(node, "it")]
    assert made
    between = list({value: None for each in made for value in each.terms if value not in ends})
    found = set()
    for degree in product(GRID, repeat=len(ends) + len(between)):
        of = dict(zip([*ends, *between], degree, strict=True))
        if all(abs(sum(c * of[value] for value, c in each.terms.items())) < 1e-9 for each in made):
            found.add(degree[: len(ends)])
    return found


def assigned(x: Tensor, value: Any) -> Tensor:
    out = x.clone()
    out[0] = value
    return out


X, BIAS, MASK = data(4, 3), data(3).flip(0), torch.tensor([[True, False, True]])
INDEX, STATISTICS = torch.tensor([2, 0]), (data(3), 1 + data(3).square())
POSITIVE = 0.5 + data(4, 3).abs()
M, V = (3, 2), (3,)
CASES: dict[str, tuple] = {
    "number / tensor": (lambda a: 2.0 / a, M),
    "tensor / number": (lambda a: a / 2.0, M),
    "tensor / tensor": (lambda a, b: a / b, M, M),
    "data / tensor": (lambda a: data(3, 2) / a, M),
    "rounded": (lambda a: torch.div(8 * a, 0.3, rounding_mode="floor"), M),
    "power": (lambda a: a.abs() ** 2, M),
    "power by keyword": (lambda a: torch.pow(a.abs(), exponent=0.5), M),
    "square root": (lambda a: a.abs().sqrt(), M),
    "linear": (lambda w: F.linear(X, w), (2, 3)),
    "linear, constant bias": (lambda w: F.linear(X, w, data(2)), (2, 3)),
    "linear, bias of zeros": (lambda w: F.linear(X, w, torch.zeros(2)), (2, 3)),
    "linear, bias": (lambda w, b: F.linear(X, w, b), (2, 3), (2,)),
    "linear by keyword": (lambda w, b: F.linear(bias=b, weight=w, input=X), (2, 3), (2,)),
    "linear by keyword, constant bias": (lambda w: F.linear(X, weight=w, bias=data(2)), (2, 3)),
    "linear of a constant weight": (lambda x, b: F.linear(x, BIAS[None], b), (4, 3), (1,)),
    "addmm": (lambda a, b, c: torch.addmm(a, b, c), (2, 2), (2, 3), (3, 2)),
    "addmm of data": (lambda b, c: torch.addmm(data(2, 2), b, c), (2, 3), (3, 2)),
    "bilinear": (lambda a, b, w: F.bilinear(a, b, w), (2, 3), (2, 2), (1, 3, 2)),
    "layer_norm": (lambda x: F.layer_norm(x, (3,), eps=EPS), (4, 3)),
    "layer_norm, weight": (lambda x, w: F.layer_norm(x, (3,), w, eps=EPS), (4, 3), V),
    "layer_norm, both": (lambda x, w, b: F.layer_norm(x, (3,), w, b, EPS), (4, 3), V, V),
    "layer_norm by keyword": (lambda x, w, b: F.layer_norm(x, (3,), bias=b, weight=w, eps=EPS), (4, 3), V, V),
    "layer_norm, constant bias": (lambda x, w: F.layer_norm(x, (3,), w, BIAS, EPS), (4, 3), V),
    "layer_norm, bias of zeros": (lambda x, w: F.layer_norm(x, (3,), w, 0 * BIAS, EPS), (4, 3), V),
    "layer_norm, constant weight": (lambda x, b: F.layer_norm(x, (3,), BIAS, b, EPS), (4, 3), V),
    "batch_norm by its batch": (lambda x, w: F.instance_norm(x, None, None, w, eps=EPS), (2, 3, 5), V),
    "normalize": (lambda x: F.normalize(x), (4, 3)),
    "weight_norm": (lambda v, g: torch._weight_norm(v, g, 0), (3, 2), (3, 1)),
    "var_mean": (lambda x: torch.var_mean(x, 0), (4, 3)),
    "std_mean": (lambda x: torch.std_mean(x, 0), (4, 3)),
    "var": (lambda x: x.var(0), (4, 3)),
    "norm": (lambda x: torch.linalg.vector_norm(x, dim=0), (4, 3)),
    "masked_fill, 0": (lambda x: x.masked_fill(MASK, 0.0), (4, 3)),
    "masked_fill, a number": (lambda x: x.masked_fill(MASK, 2.0), (4, 3)),
    "masked_fill by keyword": (lambda x: x.masked_fill(mask=MASK, value=2.0), (4, 3)),
    "masked_fill, infinity": (lambda x: x.masked_fill(MASK, float("-inf")), (4, 3)),
    "where": (lambda a, b: torch.where(MASK, a, b), (4, 3), (4, 3)),
    "where, 0": (lambda a: torch.where(MASK, a, 0.0), (4, 3)),
    "where, a number": (lambda a: torch.where(MASK, a, 2.0), (4, 3)),
    "where, data": (lambda a: torch.where(MASK, a, X), (4, 3)),
    "where of zeros": (lambda a: torch.where(MASK, torch.zeros(4, 3), a), (4, 3)),
    "pad": (lambda x: F.pad(x, (1, 1)), (4, 3)),
    "pad, 0": (lambda x: F.pad(x, (1, 1), "constant", 0.0), (4, 3)),
    "pad, a number": (lambda x: F.pad(x, (1, 1), "constant", 2.0), (4, 3)),
    "pad by keyword": (lambda x: F.pad(x, (1, 1), value=2.0), (4, 3)),
    "pad, reflected": (lambda x: F.pad(x, (1, 1), mode="reflect"), (1, 4, 3)),
    "assigned, 0": (lambda x: assigned(x, 0.0), (4, 3)),
    "assigned, a number": (lambda x: assigned(x, 2.0), (4, 3)),
    "assigned, another": (lambda x, b: assigned(x, b), (4, 3), V),
    "assigned, data": (lambda x: assigned(x, BIAS), (4, 3)),
    "copied": (lambda x, b: x.clone().copy_(b), (4, 3), (4, 3)),
    "relu": (lambda x: F.relu(x), (4, 3)),
    "clamp at 0": (lambda x: x.clamp(0), (4, 3)),
    "clamp at 0 by keyword": (lambda x: x.clamp(min=0), (4, 3)),
    "clamp from above": (lambda x: x.clamp(max=0.0), (4, 3)),
    "clamp from above, by position": (lambda x: torch.clamp(x, None, 0.0), (4, 3)),
    "clamp to all numbers": (lambda x: x.clamp(0.0, float("inf")), (4, 3)),
    "clamp to an interval": (lambda x: x.clamp(-0.5, 0.5), (4, 3)),
    "clamp to an interval by keyword": (lambda x: x.clamp(min=-0.5, max=0.5), (4, 3)),
    "clamp_min": (lambda x: x.clamp_min(0.3), (4, 3)),
    "clamp at an eps": (lambda x: x.clamp(EPS), POSITIVE),
    "clamp at an eps by keyword": (lambda x: x.clamp(min=EPS), POSITIVE),
    "clamp_min at an eps": (lambda x: torch.clamp_min(x, EPS), POSITIVE),
    "threshold": (lambda x: F.threshold(x, 0.0, 0.0), (4, 3)),
    "a threshold that is not 0": (lambda x: F.threshold(x, 0.2, 0.0), (4, 3)),
    "prelu": (lambda x, w: F.prelu(x, w), (4, 3), V),
    "embedding": (lambda w: F.embedding(INDEX, w), (4, 3)),
    "index_select": (lambda w: w.index_select(0, INDEX), (4, 3)),
    "sum": (lambda a, b: a + b, M, M),
    "sum with an eps": (lambda a: a.abs() + EPS, M),
    "sum with a number": (lambda a: a + 1.0, M),
    "sum with 0": (lambda a: a + 0.0, M),
    "sum with data": (lambda a: a + data(3, 2), M),
    "number - tensor": (lambda a: 2.0 - a, M),
    "product": (lambda a, b: a * b, M, M),
    "square of a product": (lambda a: a * a, M),
    "view_as": (lambda a, b: a.view_as(b), M, (2, 3)),
    "mean": (lambda a: a.mean(0), M),
    "tanh": (lambda a: a.tanh(), M),
    "concatenated": (lambda a, b: torch.cat([a, b]), M, M),
    "concatenated with data": (lambda a: torch.cat([a, data(3, 2)]), M),
    "concatenated with zeros": (lambda a: torch.cat([a, torch.zeros(3, 2)]), M),
}


@pytest.mark.parametrize("name", CASES)
def test_equations_hold_for_exactly_the_scalings_that_leave_an_operation_alone(name: str) -> None:
    function, *shapes = CASES[name]
    generator = torch.Generator().manual_seed(3)
    inputs = [shape if isinstance(shape, Tensor) else torch.randn(shape, generator=generator) for shape in shapes]
    expected = allowed(function, inputs)
    assert expected
    assert solutions(function, inputs) == expected


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "expected"),
    [
        (torch.add, (X, SMALL), {}, (1, SMALL)),
        (torch.add, (X, 1.01 * SMALL), {}, None),
        (torch.add, (X, 0), {}, None),
        (torch.add, (X, -1e-5), {}, None),
        (torch.add, (X, X), {}, None),
        (torch.add, (X, True), {}, None),
        (torch.mul, (X, 1e-5), {}, None),
        (torch.clamp, (X, 1e-5), {}, (1, 1e-5)),
        (torch.clamp, (X,), {"min": 1e-5}, ("min", 1e-5)),
        (torch.clamp, (X,), {"min": 1e-5, "max": 2.0}, None),
        (torch.clamp, (X, 1e-5, 2.0), {}, None),
        (torch.clamp, (X,), {"max": 1e-5}, None),
        (torch.add, (1e-5, X), {}, None),
        (torch.add, (), {}, None),
    ],
)
def test_where_an_eps_stands(function: Callable, args: tuple, kwargs: dict, expected: tuple | None) -> None:
    assert eps_of(function, args, kwargs) == expected


class Choice(nn.Module):
    """norm(c + a b): c grows with a or b; a cannot, as tanh reads a e, and e would have to shrink."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.e = (nn.Parameter(torch.randn(4)) for _ in range(4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        stream = F.layer_norm(x * (self.c + self.a * self.b), (4,), eps=EPS)
        return self.head(stream + torch.tanh(self.a * self.e))


def test_a_search_is_given_up_after_so_many_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first choice, a, leads nowhere; the second, b, is right."""
    system = _system(*_recorded(Tangent(Choice()), data(5, 4)))
    monkeypatch.setattr(degrees, "ATTEMPTS", 1)
    found = system.solve("c")
    assert not isinstance(found, str)
    grown = {value.parameter: degree for value, degree in found.items() if value.parameter is not None}
    assert grown == {"b": 1.0, "c": 1.0}
    monkeypatch.setattr(degrees, "ATTEMPTS", 0)
    assert isinstance(system.solve("c"), str)
