"""Recurrent layers, unrolled: the numbers of the fused call, and the Kronecker factors of the linear maps they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kron_oracle
import oracle
from lapwing import Laplace, estimate
from lapwing.errors import ModelError
from lapwing.likelihoods import Categorical
from lapwing.linalg import Blocks, CorrectedKronecker, Kronecker
from lapwing.params import ParamSpace
from lapwing.tangent import Tangent
from problems import Net
from unchanged import unchanged

# name: the layer, of 2 inputs
LAYERS: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "LSTM": (nn.LSTM, {"hidden_size": 3}),
    "LSTM, batch first": (nn.LSTM, {"hidden_size": 3, "batch_first": True}),
    "LSTM without bias": (nn.LSTM, {"hidden_size": 2, "bias": False}),
    "LSTM, two layers": (nn.LSTM, {"hidden_size": 2, "num_layers": 2, "dropout": 0.5}),
    "LSTM, both directions": (nn.LSTM, {"hidden_size": 2, "bidirectional": True}),
    "LSTM, projected": (nn.LSTM, {"hidden_size": 3, "proj_size": 2, "num_layers": 2, "bidirectional": True}),
    "LSTM, projected, without bias": (nn.LSTM, {"hidden_size": 3, "proj_size": 2, "bias": False}),
    "GRU": (nn.GRU, {"hidden_size": 3, "batch_first": True}),
    "GRU without bias": (nn.GRU, {"hidden_size": 2, "bias": False}),
    "GRU, two layers, both directions": (nn.GRU, {"hidden_size": 2, "num_layers": 2, "bidirectional": True}),
    "RNN, tanh": (nn.RNN, {"hidden_size": 3, "num_layers": 2}),
    "RNN, relu": (nn.RNN, {"hidden_size": 3, "nonlinearity": "relu", "bidirectional": True}),
}


class Plain(nn.Module):
    """The same layer from `nn.Linear`, written from the equations in the documentation of torch."""

    def __init__(self, rnn: nn.RNNBase) -> None:
        super().__init__()
        self.__dict__["kind"] = rnn  # no module of this one
        self.time = 1 if rnn.batch_first else 0
        self.chains = [
            f"l{layer}{way}" for layer in range(rnn.num_layers) for way in ["", "_reverse"][: 1 + rnn.bidirectional]
        ]
        for chain in self.chains:
            for part in ("ih", "hh", "hr"):
                weight = getattr(rnn, f"weight_{part}_{chain}", None)
                if weight is None:
                    continue
                bias = getattr(rnn, f"bias_{part}_{chain}", None)
                linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
                with torch.no_grad():
                    linear.weight.copy_(weight)
                    if bias is not None:
                        linear.bias.copy_(bias)
                setattr(self, f"{part}_{chain}", linear)

    def forward(self, x: Tensor) -> Tensor:
        ways = 1 + self.kind.bidirectional
        for layer in range(self.kind.num_layers):
            outs = [self.run(x, self.chains[ways * layer + way], bool(way)) for way in range(ways)]
            x = torch.cat(outs, -1)
        return x

    def run(self, x: Tensor, chain: str, backwards: bool) -> Tensor:
        steps = list(x.unbind(self.time))
        ih, hh, hr = (getattr(self, f"{part}_{chain}", None) for part in ("ih", "hh", "hr"))
        size = self.kind.hidden_size
        h = x.new_zeros(len(steps[0]), size if hr is None else hr.out_features)
        c = x.new_zeros(len(steps[0]), size)
        found = []
        for step in steps[::-1] if backwards else steps:
            given, own = ih(step), hh(h)
            if isinstance(self.kind, nn.LSTM):
                i, f, g, o = (given + own).split(size, -1)
                c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
                h = torch.sigmoid(o) * torch.tanh(c)
                h = h if hr is None else hr(h)
            elif isinstance(self.kind, nn.GRU):
                (r, z, n), (own_r, own_z, own_n) = given.split(size, -1), own.split(size, -1)
                z = torch.sigmoid(z + own_z)
                h = (1 - z) * torch.tanh(n + torch.sigmoid(r + own_r) * own_n) + z * h
            else:
                h = torch.tanh(given + own) if self.kind.nonlinearity == "tanh" else torch.relu(given + own)
            found.append(h)
        return torch.stack(found[::-1] if backwards else found, self.time)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12 * float(expected.abs().max() + 1e-30))


def build(name: str) -> tuple[Net, Net, Tensor, Tensor]:
    """The network with a recurrent layer, the same from linear maps, and data."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    kind, options = LAYERS[name]
    rnn = kind(2, **options)
    time = 1 if rnn.batch_first else 0
    width = (rnn.proj_size or rnn.hidden_size) * (1 + rnn.bidirectional)
    out = nn.Linear(width, 2)

    def body(m: Any, x: Tensor) -> Tensor:
        given = x if time else x.transpose(0, 1)
        found = m.rnn(given)
        found = found[0] if isinstance(found, tuple) else found
        return m.out(found.select(time, 1) + found.select(time, -1).square())

    x = torch.randn(4, 3, 2)
    return Net(body, rnn=rnn, out=out).eval(), Net(body, rnn=Plain(rnn), out=out).eval(), x, torch.tensor([0, 1, 1, 0])


def match(fused: Net, plain: Net) -> Tensor:
    """Where the entries of the plain network lie in the flat vector of the fused one."""
    ours, theirs = ParamSpace.of(plain), ParamSpace.of(fused)
    index = torch.empty(ours.size, dtype=torch.long)
    for name in ours.names:
        other = name
        if name.startswith("rnn."):
            module, kind = name.removeprefix("rnn.").split(".")
            part, chain = module.split("_", 1)
            other = f"rnn.{kind}_{part}_{chain}"
        index[ours.segment(name)] = torch.arange(theirs.size)[theirs.segment(other)]
    return index


@pytest.mark.parametrize("name", LAYERS)
def test_output_curvature_and_factors(name: str) -> None:
    fused, plain, x, y = build(name)
    index = match(fused, plain)
    with unchanged(fused):
        tangent = Tangent(fused)
        linear = tangent.at(x)
        close(linear.value, fused(x).detach())
        close(linear.value, plain(x).detach())
        assert not linear.record.opaque
        assert not linear.record.derived
        full = estimate.full(tangent, Categorical(), [(x, y)]).dense()
        close(full, oracle.ggn(fused, Categorical(), x, y))
        close(estimate.diagonal(tangent, Categorical(), [(x, y)]).diagonal(), full.diagonal())
        for sharing, joint in (("expand", True), ("reduce", False)):
            options = {"sharing": sharing, "joint_bias": joint}
            found = estimate.kflr(tangent, Categorical(), [(x, y)], **options)
            assert all(isinstance(block.curvature, Kronecker) for block in found.blocks)
            expected = kron_oracle.kron(plain, Categorical(), x, y, **options)
            close(found.dense()[index][:, index], expected)
        corrected = estimate.ekfac(tangent, Categorical(), [(x, y)])
        assert all(isinstance(block.curvature, CorrectedKronecker) for block in corrected.blocks)
        close(corrected.dense().trace(), full.trace())


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
@pytest.mark.parametrize("bias", [True, False])
def test_cells(cell: type[nn.RNNCellBase], bias: bool) -> None:
    """A loop over a cell, which makes its first state itself, is the layer."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    layer = {nn.LSTMCell: nn.LSTM, nn.GRUCell: nn.GRU, nn.RNNCell: nn.RNN}[cell](2, 3, bias=bias, batch_first=True)
    one = cell(2, 3, bias=bias)
    with torch.no_grad():
        for name, value in one.named_parameters():
            value.copy_(getattr(layer, f"{name}_l0"))

    def loop(m: Any, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = m.rnn(step, state)
        assert state is not None
        return m.out(state[0] if isinstance(state, tuple) else state)

    out, x, y = nn.Linear(3, 2), torch.randn(4, 3, 2), torch.tensor([0, 1, 1, 0])
    ours, theirs = Net(loop, rnn=one, out=out), Net(lambda m, x: m.out(m.rnn(x)[0][:, -1]), rnn=layer, out=out)
    found, expected = (estimate.kflr(Tangent(model), Categorical(), [(x, y)]) for model in (ours, theirs))
    assert all(isinstance(block.curvature, Kronecker) for block in found.blocks)
    close(found.dense(), expected.dense())


def test_states_that_are_given_and_returned() -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)

    def body(m: Any, x: Tensor, h: Tensor, c: Tensor) -> Tensor:
        _, (h, c) = m.rnn(x, (h.transpose(0, 1).contiguous(), c.transpose(0, 1).contiguous()))
        return m.out(torch.cat([*h, *c], -1))

    model = Net(body, rnn=nn.LSTM(2, 3, num_layers=2, batch_first=True), out=nn.Linear(12, 2))
    x, y = (torch.randn(4, 3, 2), torch.randn(4, 2, 3), torch.randn(4, 2, 3)), torch.tensor([0, 1, 1, 0])
    linear = Tangent(model).at(x)
    close(linear.value, model(*x).detach())
    assert not linear.record.opaque
    close(estimate.full(Tangent(model), Categorical(), [(x, y)]).dense(), oracle.ggn(model, Categorical(), x, y))


def test_a_learned_first_state_leaves_the_weights_their_factors() -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model = Net(
        lambda m, x: m.out(m.rnn(x, m.start.expand(1, len(x), 3).contiguous())[0][:, -1]),
        rnn=nn.GRU(2, 3, batch_first=True),
        start=nn.Parameter(torch.randn(1, 1, 3)),
        out=nn.Linear(3, 2),
    )
    x, y = torch.randn(4, 3, 2), torch.tensor([0, 1, 1, 0])
    found = estimate.kflr(Tangent(model), Categorical(), [(x, y)])
    assert isinstance(found, Blocks)
    assert [block.name for block in found.blocks if not isinstance(block.curvature, Kronecker)] == ["start"]
    part = ParamSpace.of(model).segment("start")
    close(found.dense()[part, part], oracle.ggn(model, Categorical(), x, y)[part, part])


def test_dropout_between_layers_in_train_mode_is_refused() -> None:
    model = Net(lambda m, x: m.rnn(x)[0][:, -1], rnn=nn.LSTM(2, 2, num_layers=2, dropout=0.5, batch_first=True)).train()
    with pytest.raises(ModelError, match="dropout in lstm"):
        estimate.kflr(Tangent(model), Categorical(), [(torch.randn(4, 3, 2), torch.tensor([0, 1, 1, 0]))])


@pytest.mark.parametrize("structure", ["kron", "ekfac", "full", "diag"])
def test_a_posterior(structure: str) -> None:
    """The covariance of the function is J S J^T with J from autograd on the fused layer."""
    fused, _, x, _ = build("GRU")
    y = torch.randn(4, 2)
    la = Laplace(fused, "regression", "all", structure, sigma_noise=0.5, prior_precision=2.0)
    with unchanged(fused):
        la.fit([(x, y)])
        mean, covariance = la(x)
    close(mean, fused(x).detach())
    precision = la.fitted.curvature.dense() / 0.5**2
    jac = oracle.jacobian(fused, x)
    close(covariance, jac @ torch.linalg.solve(precision + 2 * torch.eye(len(precision)), jac.mT))
