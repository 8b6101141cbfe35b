"""Recurrent layers as the linear maps they are: the fused calls of torch.nn, unrolled over time.

`nn.LSTM`, `nn.GRU`, `nn.RNN` and their cells call one function each, inside which no operation can be seen. The same
numbers, to rounding, come from

    W_ih x_t + b_ih     for all t at once
    W_hh h_t + b_hh     for one t after the other (GRU: the gates' sums; LSTM with a projection: W_hr m_t as well)

and elementwise operations, which the recorder follows: every weight is a linear map that is shared over time. Layers,
directions and projections are covered. A packed sequence is not: its steps have fewer and fewer data points, so that no
axis holds them all, and its weights are differentiated one data point at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

State = tuple[Tensor, ...]
Seen = Callable[..., Tensor]
"""Calls an operation (the function, then its arguments) such that the recorder sees it: those that read parameters."""
Map = Callable[[Tensor], Tensor]
Step = Callable[[Tensor, State, Map, Map | None], State]
"""(W_ih x_t + b_ih, state, h -> W_hh h + b_hh, m -> W_hr m) -> the next state, whose first tensor is the output."""


def _lstm(given: Tensor, state: State, own: Map, project: Map | None) -> State:
    h, c = state
    into, forget, new, out = (given + own(h)).chunk(4, -1)
    c = forget.sigmoid() * c + into.sigmoid() * new.tanh()
    h = out.sigmoid() * c.tanh()
    return (h if project is None else project(h)), c


def _gru(given: Tensor, state: State, own: Map, project: Map | None) -> State:
    (h,) = state
    reset, update, new = given.chunk(3, -1)
    own_reset, own_update, own_new = own(h).chunk(3, -1)
    new = (new + (reset + own_reset).sigmoid() * own_new).tanh()
    return (new + (update + own_update).sigmoid() * (h - new),)


def _rnn(activation: Callable[[Tensor], Tensor]) -> Step:
    def step(given: Tensor, state: State, own: Map, project: Map | None) -> State:
        return (activation(given + own(state[0])),)

    return step


_STEPS: dict[Callable, Step] = {
    torch.lstm: _lstm,
    torch.gru: _gru,
    torch.rnn_tanh: _rnn(torch.tanh),
    torch.rnn_relu: _rnn(torch.relu),
}
_CELLS: dict[Callable, Step] = {
    torch.lstm_cell: _lstm,
    torch.gru_cell: _gru,
    torch.rnn_tanh_cell: _rnn(torch.tanh),
    torch.rnn_relu_cell: _rnn(torch.relu),
}
UNROLLED = frozenset((*_STEPS, *_CELLS))
"""The functions of recurrent layers and cells."""


def can_unroll(func: Callable, args: tuple) -> bool:
    """Whether `unrolled` covers a call; a packed sequence has the sizes of its steps after the data."""
    return func in _CELLS or (func in _STEPS and len(args) > 3 and isinstance(args[3], bool))


def unrolled(func: Callable, args: tuple, kwargs: dict, seen: Seen) -> Any:
    """The call as a composition of linear maps, which are seen, and elementwise operations on data, which need not."""
    return (_cell if func in _CELLS else _layers)(func, seen, *args, **kwargs)


def _cell(
    func: Callable,
    seen: Seen,
    input: Tensor,
    hx: Any,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Any:
    start = hx if isinstance(hx, (tuple, list)) else (hx,)
    state = tuple(seen(torch.add, input.new_zeros(()), each) for each in start)
    state = _CELLS[func](seen(F.linear, input, w_ih, b_ih), state, partial(_linear, seen, w_hh, b_hh), None)
    return state if func is torch.lstm_cell else state[0]


def _layers(
    func: Callable,
    seen: Seen,
    input: Tensor,
    hx: Any,
    params: Any,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """Outputs of the last layer [T, N, D] or [N, T, D], and the last state of every layer and direction."""
    start = hx if isinstance(hx, (tuple, list)) else (hx,)
    chains = num_layers * (2 if bidirectional else 1)
    per = len(params) // chains
    time = 1 if batch_first else 0
    last: list[State] = []
    for _ in range(num_layers):
        outputs = []
        for direction in range(2 if bidirectional else 1):
            chain = len(last)
            w_ih, w_hh, *rest = params[chain * per : (chain + 1) * per]
            b_ih, b_hh = rest[:2] if has_biases else (None, None)
            own = partial(_linear, seen, w_hh, b_hh)
            project = partial(_linear, seen, rest[-1], None) if per in (3, 5) else None
            # mostly zeros; a state that is a parameter meets data here, so that the first step is like the others
            state = tuple(seen(torch.add, input.new_zeros(()), each[chain]) for each in start)
            given = seen(F.linear, input, w_ih, b_ih).unbind(time)
            found = []
            for step in reversed(given) if direction else given:
                state = _STEPS[func](step, state, own, project)
                found.append(state[0])
            outputs.append(torch.stack(found[::-1] if direction else found, time))
            last.append(state)
        input = torch.cat(outputs, -1) if bidirectional else outputs[0]
    return (input, *(torch.stack(list(parts)) for parts in zip(*last, strict=True)))


def _linear(seen: Seen, weight: Tensor, bias: Tensor | None, h: Tensor) -> Tensor:
    return seen(F.linear, h, weight, bias)
