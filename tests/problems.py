"""The zoo: small float64 networks with inputs, targets and a likelihood, one per way of using a parameter.

`build(name, seed)` makes a fresh `Problem`; `NAMES` lists them all, and `ROWS` says which row of the layer table each
belongs to. Everything is tiny (P below about 150, 3 to 5 data points), so that a brute-force reference takes
milliseconds. A new architecture is one decorated function.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from lapwing.likelihoods import Categorical, Gaussian, Likelihood
from lapwing.params import ParamSpace


@dataclass(frozen=True)
class Problem:
    """A model with one batch of data.

    `exact` marks networks with parameters that form no Kronecker product; `kron` is False where that structure refuses.
    """

    name: str
    row: str
    model: nn.Module
    x: Any
    y: Tensor
    likelihood: Likelihood
    kron: bool = True
    exact: bool = False
    select: dict[str, Any] | None = None

    @property
    def space(self) -> ParamSpace:
        whole = ParamSpace.of(self.model)
        return whole if self.select is None else whole.select(**self.select)

    @property
    def batches(self) -> list[tuple[Any, Tensor]]:
        return [(self.x, self.y)]


class Net(nn.Module):
    """Modules and parameters by name, and a function of them: `body(self, *inputs)`."""

    def __init__(self, body: Callable, **members: Any) -> None:
        super().__init__()
        for name, member in members.items():
            setattr(self, name, member)
        self.body = body

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(self, *args, **kwargs)


_BUILDERS: dict[str, Callable[[], tuple]] = {}
ROWS: dict[str, str] = {}
_OPTIONS: dict[str, dict[str, Any]] = {}


def zoo(row: str, **options: Any) -> Callable[[Callable], Callable]:
    """Registers a builder that returns (model, x), or (model, x, "gaussian" | "categorical" | likelihood)."""

    def register(builder: Callable) -> Callable:
        name = builder.__name__.strip("_")
        _BUILDERS[name], ROWS[name], _OPTIONS[name] = builder, row, options
        return builder

    return register


def thinned(names: Iterable[str], every: int = 3) -> list[Any]:
    """Names to go through, of which most are for `make slow`: where another test has looked at each network already."""
    return [name if i % every == 0 else pytest.param(name, marks=pytest.mark.slow) for i, name in enumerate(names)]


def chequered(first: Iterable[str], second: Iterable[str]) -> list[Any]:
    """All pairs, of which every other one is for `make slow`: each of either kind meets half of the other."""
    others = list(second)
    return [
        pytest.param(a, b, marks=pytest.mark.slow if (i + j) % 2 else ())
        for i, a in enumerate(first)
        for j, b in enumerate(others)
    ]


def call(model: nn.Module, x: Any) -> Tensor:
    """What a user would write for this input."""
    if getattr(model, "whole_input", False) or isinstance(x, Tensor):
        out = model(x)
    elif isinstance(x, (dict, Mapping, UserDict)):
        out = model(**x)
    else:
        out = model(*x)
    return out if isinstance(out, Tensor) else out.logits


def build(name: str, seed: int = 0, dtype: torch.dtype = torch.float64) -> Problem:
    """A fresh problem; the same seed gives the same numbers, and the global generator is left alone."""
    before = torch.get_default_dtype()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        torch.set_default_dtype(dtype)
        try:
            model, x, *rest = _BUILDERS[name]()
            model.eval()
            likelihood, y = targets(call_detached(model, x), *rest)
        finally:
            torch.set_default_dtype(before)
    problem = Problem(name, ROWS[name], model, x, y, likelihood)
    return replace(problem, **_OPTIONS[name])


def call_detached(model: nn.Module, x: Any) -> Tensor:
    with torch.no_grad():
        return call(model, x)


def targets(f: Tensor, likelihood: str | Likelihood = "categorical") -> tuple[Likelihood, Tensor]:
    if isinstance(likelihood, str):
        likelihood = {"categorical": Categorical(), "gaussian": Gaussian(0.7)}[likelihood]
    return likelihood, likelihood.sample(f + torch.randn_like(f))


def parameter(*shape: int, scale: float = 0.5) -> nn.Parameter:
    return nn.Parameter(scale * torch.randn(shape))


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape)


def tokens(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape)


def scrambled(module: nn.Module) -> nn.Module:
    """Parameters and running statistics moved away from the ones and zeros they start with."""
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.3 * torch.randn_like(p))
        for name, buffer in module.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(torch.randn_like(buffer))
            if name.endswith("running_var"):
                buffer.copy_(torch.rand_like(buffer) + 0.5)
    return module


# -- MLP, Conv2d, Dropout (eval), residual --------------------------------------------------------------------------


@zoo("MLP")
def mlp():
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)), randn(5, 3)


@zoo("MLP")
def mlp_gaussian():
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), randn(4, 3), "gaussian"


@zoo("MLP")
def mlp_without_bias():
    return nn.Sequential(nn.Linear(3, 5, bias=False), nn.Tanh(), nn.Linear(5, 2, bias=False)), randn(4, 3)


@zoo("Dropout (eval)")
def mlp_dropout():
    return nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.Tanh(), nn.Linear(5, 3)), randn(4, 3)


@zoo("Conv2d")
def conv2d():
    return (
        nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(27, 2)),
        randn(4, 2, 3, 3),
    )


@zoo("Conv2d")
def conv2d_strided():
    body = nn.Sequential(nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)), nn.Tanh())
    return nn.Sequential(body, nn.Conv2d(3, 2, 1, bias=False), nn.Flatten(), nn.Linear(8, 2)), randn(3, 2, 4, 4)


@zoo("Conv2d")
def conv2d_circular():
    net = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), nn.Tanh(), nn.Flatten())
    return nn.Sequential(net, nn.Linear(18, 2)), randn(3, 1, 3, 3)


@zoo("Conv2d")
def conv2d_reflect():
    net = nn.Sequential(nn.Conv2d(1, 2, 3, padding=(1, 2), padding_mode="reflect"), nn.Tanh(), nn.Flatten())
    return nn.Sequential(net, nn.Linear(30, 2)), randn(3, 1, 3, 3)


@zoo("Conv2d")
def conv2d_same():
    net = nn.Sequential(nn.Conv2d(1, 2, (1, 3), padding="same", dilation=(1, 2)), nn.Tanh(), nn.Flatten())
    return nn.Sequential(net, nn.Linear(24, 2)), randn(3, 1, 3, 4)


@zoo("Conv2d")
def conv2d_valid():
    net = nn.Sequential(nn.Conv2d(1, 2, 2, padding="valid"), nn.Tanh(), nn.Flatten())
    return nn.Sequential(net, nn.Linear(8, 2)), randn(3, 1, 3, 3)


@zoo("residual add")
def residual():
    return Net(
        lambda m, x: m.out(x + m.b(torch.tanh(m.a(x)))), a=nn.Linear(3, 4), b=nn.Linear(4, 3), out=nn.Linear(3, 3)
    ), randn(4, 3)


@zoo("grouped Conv2d")
def conv2d_grouped():
    net = nn.Sequential(nn.Conv2d(4, 6, 2, groups=2, stride=2, padding=1), nn.Tanh(), nn.Flatten())
    return nn.Sequential(net, nn.Linear(24, 2)), randn(3, 4, 3, 3)


@zoo("grouped Conv2d")
def conv2d_depthwise():
    return (
        nn.Sequential(nn.Conv2d(3, 6, 2, groups=3), nn.Tanh(), nn.Conv2d(6, 2, 1), nn.Flatten(), nn.Linear(8, 2)),
        randn(3, 3, 3, 3),
    )


# -- Conv1d, Conv3d, transposed convolutions ------------------------------------------------------------------------


@zoo("Conv1d")
def conv1d():
    net = nn.Sequential(nn.Conv1d(2, 3, 3, stride=2, padding=1, dilation=2), nn.Tanh(), nn.Flatten())
    return nn.Sequential(net, nn.Linear(9, 2)), randn(4, 2, 7)


@zoo("Conv1d")
def conv1d_grouped():
    net = nn.Sequential(nn.Conv1d(4, 4, 2, groups=2, bias=False), nn.Tanh(), nn.Flatten())
    return nn.Sequential(net, nn.Linear(12, 2)), randn(4, 4, 4)


@zoo("Conv3d")
def conv3d():
    net = nn.Sequential(nn.Conv3d(2, 2, (1, 2, 2), padding=(0, 1, 0), stride=(1, 2, 1)), nn.Tanh(), nn.Flatten())
    return nn.Sequential(net, nn.Linear(16, 2)), randn(3, 2, 2, 2, 3)


@zoo("ConvTranspose1d")
def conv_transpose1d():
    net = nn.Sequential(nn.ConvTranspose1d(2, 3, 3, stride=2, padding=1, output_padding=1), nn.Tanh(), nn.Flatten())
    return nn.Sequential(net, nn.Linear(18, 2)), randn(3, 2, 3)


@zoo("ConvTranspose2d")
def conv_transpose2d():
    conv = nn.ConvTranspose2d(2, 3, (2, 3), stride=(2, 1), padding=(0, 1), output_padding=(1, 0), dilation=(1, 2))
    return nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.Linear(60, 2)), randn(3, 2, 2, 2)


@zoo("ConvTranspose2d")
def conv_transpose2d_grouped():
    conv = nn.ConvTranspose2d(4, 6, 2, stride=2, padding=1, output_padding=1, groups=2, dilation=1)
    return nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.Linear(54, 2, bias=False)), randn(3, 4, 2, 2)


@zoo("ConvTranspose3d")
def conv_transpose3d():
    conv = nn.ConvTranspose3d(2, 2, (1, 2, 2), stride=(1, 2, 1), groups=2)
    return nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.Linear(24, 2)), randn(3, 2, 1, 2, 2)


# -- normalisation --------------------------------------------------------------------------------------------------


@zoo("BatchNorm (eval)")
def batch_norm1d():
    return scrambled(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))), randn(5, 3)


@zoo("BatchNorm (eval)")
def batch_norm2d():
    net = nn.Sequential(nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.ReLU(), nn.BatchNorm2d(2), nn.Flatten())
    return scrambled(nn.Sequential(net, nn.Linear(8, 2))), randn(4, 1, 3, 3)


@zoo("LayerNorm")
def layer_norm():
    return scrambled(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 3))), randn(4, 3)


@zoo("LayerNorm")
def layer_norm_of_matrices():
    net = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm((4, 3)), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2))
    return scrambled(net), randn(4, 4, 2)


@zoo("GroupNorm")
def group_norm():
    net = nn.Sequential(nn.Conv2d(1, 4, 2), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(16, 2))
    return scrambled(net), randn(4, 1, 3, 3)


@zoo("InstanceNorm")
def instance_norm():
    net = nn.Sequential(nn.Conv2d(1, 3, 2), nn.InstanceNorm2d(3, affine=True), nn.Tanh(), nn.Flatten())
    return scrambled(nn.Sequential(net, nn.Linear(12, 2))), randn(3, 1, 3, 3)


@zoo("InstanceNorm")
def instance_norm_tracking():
    net = nn.Sequential(nn.InstanceNorm1d(2, affine=True, track_running_stats=True), nn.Flatten())
    return scrambled(nn.Sequential(net, nn.Linear(8, 2))), randn(3, 2, 4)


@zoo("RMSNorm")
def rms_norm():
    return scrambled(nn.Sequential(nn.Linear(3, 4), nn.RMSNorm(4), nn.Tanh(), nn.Linear(4, 3))), randn(4, 3)


# -- embeddings and raw parameters ----------------------------------------------------------------------------------


@zoo("Embedding")
def embedding():
    """Repeated tokens, within and between data points, and tokens that never occur."""
    x = torch.tensor([[1, 2, 1], [0, 4, 2], [4, 4, 4], [5, 1, 0]])
    return Net(lambda m, t: m.out(torch.tanh(m.e(t)).mean(1)), e=nn.Embedding(7, 3), out=nn.Linear(3, 3)), x


@zoo("Embedding")
def embedding_padding():
    x = torch.tensor([[1, 2, 0], [0, 0, 2], [4, 3, 4], [3, 0, 0]])
    net = Net(lambda m, t: m.out(torch.tanh(m.e(t)).sum(1)), e=nn.Embedding(5, 3, padding_idx=0), out=nn.Linear(3, 2))
    with torch.no_grad():
        net.e.weight.add_(0.1)
    return net, x


@zoo("Embedding")
def embedding_single():
    return nn.Sequential(nn.Embedding(4, 3, padding_idx=-1), nn.Tanh(), nn.Linear(3, 2)), torch.tensor([0, 3, 1, 1, 2])


@zoo("Embedding")
def positional_embedding():
    net = Net(
        lambda m, x: m.out(torch.tanh(m.a(x) + m.pos(torch.arange(x.shape[1]))).mean(1)),
        a=nn.Linear(2, 3),
        pos=nn.Embedding(6, 3),
        out=nn.Linear(3, 2),
    )
    return net, randn(4, 4, 2)


@zoo("raw Parameter")
def raw_matmul():
    return Net(
        lambda m, x: torch.tanh(x @ m.w) @ m.v + m.b, w=parameter(3, 4), v=parameter(4, 2), b=parameter(2)
    ), randn(4, 3)


@zoo("raw Parameter")
def raw_matmul_left():
    return Net(lambda m, x: m.v @ torch.tanh(m.w @ x), w=parameter(4, 3), v=parameter(2, 4)), randn(3, 3, 2), "gaussian"


@zoo("raw Parameter")
def raw_matmul_transposed_data():
    """w @ x.T: the samples are the columns."""
    return Net(lambda m, x: torch.tanh(m.w @ x.T).T @ m.v, w=parameter(4, 3), v=parameter(4, 2)), randn(4, 3)


@zoo("raw Parameter")
def raw_vector():
    """A matrix-vector product, and an output axis added afterwards."""
    return Net(lambda m, x: torch.tanh(x @ m.w).unsqueeze(-1) * m.v, w=parameter(3), v=parameter(2)), randn(4, 3)


@zoo("raw Parameter")
def raw_scale_shift():
    return Net(lambda m, x: torch.tanh(x * m.s + m.b) * m.t, s=parameter(3), b=parameter(3), t=parameter()), randn(4, 3)


@zoo("raw Parameter")
def raw_elementwise_zoo():
    def body(m, x):
        h = torch.where(x > 0, x * m.a, m.b)
        h = torch.maximum(h, m.c - x) / (1 + m.d.exp())
        h = torch.addcmul(h, x, m.e, value=2) - m.f
        h = 1.5 - (m.g - h).div(m.h.square() + 1)
        return torch.lerp(h, x, m.k.sigmoid())

    return Net(body, **{name: parameter(3) for name in "abcdefghk"}), randn(4, 3)


@zoo("raw Parameter")
def raw_addmm():
    return Net(
        lambda m, x: torch.addmm(m.c, torch.tanh(torch.addmm(m.b, x, m.w)), m.v),
        w=parameter(3, 4),
        b=parameter(4),
        v=parameter(4, 2),
        c=parameter(2),
    ), randn(4, 3)


@zoo("raw Parameter")
def raw_bmm():
    """A batch of weights, one per head: x [B, 2, 3] -> heads first."""
    return Net(lambda m, x: torch.tanh(torch.bmm(x.transpose(0, 1), m.w)).sum(0), w=parameter(2, 3, 4)), randn(4, 2, 3)


@zoo("raw Parameter")
def raw_einsum():
    def body(m, x):
        h = torch.tanh(torch.einsum("bi,oi->bo", x, m.w)).unflatten(1, (2, 2))
        h = torch.tanh(torch.einsum("gij, bgi -> b g j", m.grouped, h))  # the groups of a grouped einsum
        return torch.einsum("...i,io->...o", h.flatten(1), m.v)

    return Net(body, w=parameter(4, 3), grouped=parameter(2, 2, 3), v=parameter(6, 2)), randn(4, 3)


@zoo("raw Parameter")
def raw_einsum_summed():
    """Labels that only the input has are summed before the product."""
    return Net(lambda m, x: torch.einsum("bti,io->bo", x, m.w), w=parameter(3, 2)), randn(4, 3, 3)


@zoo("raw Parameter")
def raw_table():
    """A positional table added to a sequence, with as many positions as data points."""
    return Net(
        lambda m, x: m.out(torch.tanh(m.a(x) + m.table).mean(1)),
        a=nn.Linear(2, 3),
        table=parameter(4, 3),
        out=nn.Linear(3, 2),
    ), randn(4, 4, 2)


@zoo("raw Parameter")
def raw_table_sliced():
    return Net(
        lambda m, x: m.out(torch.tanh(m.a(x) + m.table[:, : x.shape[1]]).mean(1)),
        a=nn.Linear(2, 3),
        table=parameter(1, 6, 3),
        out=nn.Linear(3, 2),
    ), randn(3, 4, 2)


@zoo("raw Parameter")
def bilinear():
    return Net(lambda m, x: m.out(torch.tanh(m.f(x, x.flip(1)))), f=nn.Bilinear(3, 3, 4), out=nn.Linear(4, 2)), randn(
        4, 3
    )


@zoo("raw Parameter")
def class_token():
    """A parameter that is repeated for every sample and concatenated with the data."""
    return Net(
        lambda m, x: m.out(torch.tanh(m.a(torch.cat([m.token.expand(len(x), 1, 2), x], 1))).mean(1)),
        token=parameter(1, 1, 2),
        a=nn.Linear(2, 3),
        out=nn.Linear(3, 2),
    ), randn(4, 3, 2)


@zoo("PReLU")
def prelu_shared():
    return nn.Sequential(nn.Linear(3, 4), nn.PReLU(), nn.Linear(4, 2)), randn(5, 3)


@zoo("PReLU")
def prelu_per_channel():
    net = nn.Sequential(nn.Conv2d(1, 3, 2), nn.PReLU(3), nn.Flatten(), nn.Linear(12, 2))
    return scrambled(net), randn(4, 1, 3, 3)


# -- attention and transformers -------------------------------------------------------------------------------------


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    def split(t: Tensor) -> Tensor:
        return t.unflatten(-1, (heads, -1)).transpose(1, 2)

    q, k, v = split(q), split(k), split(v)
    weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2)


@zoo("attention from Linears")
def attention_linears():
    return Net(
        lambda m, x: m.out(m.o(attend(m.q(x), m.k(x), m.v(x), 2)).mean(1)),
        q=nn.Linear(4, 4),
        k=nn.Linear(4, 4),
        v=nn.Linear(4, 4, bias=False),
        o=nn.Linear(4, 4),
        out=nn.Linear(4, 2),
    ), randn(3, 3, 4)


@zoo("attention from Linears")
def attention_fused():
    """scaled_dot_product_attention, all projections in one."""

    def body(m, x):
        q, k, v = m.qkv(x).chunk(3, -1)
        return m.out(F.scaled_dot_product_attention(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1))[:, 0].mean(1))

    return Net(body, qkv=nn.Linear(3, 9), out=nn.Linear(3, 2)), randn(4, 3, 3)


@zoo("nn.MultiheadAttention")
def mha_self():
    return scrambled(
        Net(
            lambda m, x: m.out(m.mha(x, x, x, need_weights=False)[0].mean(1)),
            mha=nn.MultiheadAttention(4, 2, batch_first=True),
            out=nn.Linear(4, 2),
        )
    ), randn(4, 3, 4)


@zoo("nn.MultiheadAttention")
def mha_time_first():
    """[T, N, E] inside, with as many positions as data points."""
    return scrambled(
        Net(
            lambda m, x: m.out(m.mha(x.transpose(0, 1), x.transpose(0, 1), x.transpose(0, 1))[0].mean(0)),
            mha=nn.MultiheadAttention(4, 2),
            out=nn.Linear(4, 2),
        )
    ), randn(3, 3, 4)


@zoo("nn.MultiheadAttention")
def mha_cross():
    return scrambled(
        Net(
            lambda m, q, k: m.out(m.mha(q, k, k)[0].mean(1)),
            mha=nn.MultiheadAttention(4, 2, batch_first=True),
            out=nn.Linear(4, 2),
        )
    ), (randn(3, 2, 4), randn(3, 5, 4))


@zoo("nn.MultiheadAttention")
def mha_kdim_vdim():
    return scrambled(
        Net(
            lambda m, q, k, v: m.out(m.mha(q, k, v)[0].mean(1)),
            mha=nn.MultiheadAttention(4, 2, kdim=3, vdim=2, batch_first=True),
            out=nn.Linear(4, 2),
        )
    ), (randn(3, 2, 4), randn(3, 4, 3), randn(3, 4, 2))


@zoo("nn.MultiheadAttention")
def mha_bias_kv():
    """Learned extra key and value, concatenated with the data."""
    return scrambled(
        Net(
            lambda m, x: m.out(m.mha(x, x, x)[0].mean(1)),
            mha=nn.MultiheadAttention(4, 2, add_bias_kv=True, batch_first=True),
            out=nn.Linear(4, 2),
        )
    ), randn(3, 2, 4)


@zoo("TransformerEncoderLayer")
def transformer_encoder():
    layer = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.1, batch_first=True)
    return scrambled(Net(lambda m, x: m.out(m.layer(x).mean(1)), layer=layer, out=nn.Linear(4, 2))), randn(4, 3, 4)


@zoo("TransformerEncoderLayer")
def transformer_encoder_norm_first():
    layer = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.1, norm_first=True, activation="gelu")
    return scrambled(
        Net(lambda m, x: m.out(m.layer(x.transpose(0, 1)).mean(0)), layer=layer, out=nn.Linear(4, 2))
    ), randn(3, 3, 4)


@zoo("TransformerEncoderLayer")
def transformer_encoder_masked():
    """A causal mask, and padding that differs between data points."""
    layer = nn.TransformerEncoderLayer(4, 2, 3, batch_first=True)

    def body(m, x, padding):
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return m.out(m.layer(x, src_mask=mask, src_key_padding_mask=padding)[:, 0])

    padding = torch.tensor([[0, 0, 0], [0, 0, 1], [0, 1, 1], [0, 0, 0]], dtype=torch.bool)
    return scrambled(Net(body, layer=layer, out=nn.Linear(4, 2))), (randn(4, 3, 4), padding)


@zoo("TransformerDecoderLayer")
def transformer_decoder():
    layer = nn.TransformerDecoderLayer(2, 1, 3, batch_first=True)
    return scrambled(Net(lambda m, x, z: m.out(m.layer(x, z).mean(1)), layer=layer, out=nn.Linear(2, 2))), (
        randn(3, 2, 2),
        randn(3, 4, 2),
    )


# -- recurrent ------------------------------------------------------------------------------------------------------


@zoo("LSTM / GRU")
def lstm():
    return Net(lambda m, x: m.out(m.rnn(x)[0][:, -1]), rnn=nn.LSTM(2, 3, batch_first=True), out=nn.Linear(3, 2)), randn(
        4, 3, 2
    )


@zoo("LSTM / GRU")
def gru():
    """Time first, two layers, both directions."""
    rnn = nn.GRU(2, 1, num_layers=2, bidirectional=True)
    return Net(lambda m, x: m.out(m.rnn(x.transpose(0, 1))[0][-1]), rnn=rnn, out=nn.Linear(2, 2)), randn(3, 3, 2)


@zoo("LSTM / GRU")
def gru_cell():
    def body(m, x):
        h = x.new_zeros(len(x), 3)
        for t in range(x.shape[1]):
            h = m.cell(x[:, t], h)
        return m.out(h)

    return Net(body, cell=nn.GRUCell(2, 3), out=nn.Linear(3, 2)), randn(3, 3, 2)


@zoo("LSTM / GRU")
def rnn_relu():
    rnn = nn.RNN(2, 2, nonlinearity="relu", bias=False, batch_first=True)
    return Net(lambda m, x: m.out(m.rnn(x)[1][0]), rnn=rnn, out=nn.Linear(2, 2)), randn(4, 3, 2)


@zoo("LSTM / GRU")
def lstm_projected():
    """Two layers, both directions, a smaller output than state."""
    rnn = nn.LSTM(1, 2, num_layers=2, bidirectional=True, proj_size=1, batch_first=True)
    return Net(lambda m, x: m.out(m.rnn(x)[0].mean(1)), rnn=rnn, out=nn.Linear(2, 2)), randn(3, 2, 1)


@zoo("LSTM / GRU", exact=True)
def lstm_packed():
    """Sequences of different lengths: no axis holds all data points."""

    def body(m, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return m.out(m.rnn(packed)[1][0][-1])

    rnn = nn.LSTM(2, 2, batch_first=True)
    return Net(body, rnn=rnn, out=nn.Linear(2, 2)), (randn(4, 3, 2), torch.tensor([3, 1, 2, 3]))


@zoo("LSTM / GRU", exact=True)
def gru_learned_start():
    """The state that all data points start with is a parameter."""
    return Net(
        lambda m, x: m.out(m.rnn(x, m.start.expand(1, len(x), 3).contiguous())[0][:, -1]),
        rnn=nn.GRU(2, 3, batch_first=True),
        start=parameter(1, 1, 3),
        out=nn.Linear(3, 2),
    ), randn(4, 3, 2)


# -- several uses ---------------------------------------------------------------------------------------------------


@zoo("a Linear used twice")
def linear_twice():
    return Net(lambda m, x: m.out(torch.tanh(m.a(torch.tanh(m.a(x))))), a=nn.Linear(3, 3), out=nn.Linear(3, 2)), randn(
        4, 3
    )


@zoo("a Linear used twice")
def recurrence_from_linears():
    def body(m, x):
        h = x.new_zeros(len(x), 3)
        for t in range(x.shape[1]):
            h = torch.tanh(m.i(x[:, t]) + m.h(h))
        return m.out(h)

    return Net(body, i=nn.Linear(2, 3), h=nn.Linear(3, 3, bias=False), out=nn.Linear(3, 2)), randn(4, 3, 2)


@zoo("F.linear(x, layer.weight)")
def functional_linear():
    return Net(
        lambda m, x: m.out(torch.tanh(m.a(x)) + F.linear(x.flip(1), m.a.weight)), a=nn.Linear(3, 3), out=nn.Linear(3, 2)
    ), randn(4, 3)


@zoo("a bias shared by two layers")
def shared_bias():
    def body(m, x):
        return m.out(torch.tanh(F.linear(torch.tanh(F.linear(x, m.w, m.b)), m.v, m.b)))

    return Net(body, w=parameter(3, 3), v=parameter(3, 3), b=parameter(3), out=nn.Linear(3, 2)), randn(4, 3)


@zoo("tied embedding and output")
def tied_embedding():
    def body(m, t):
        return F.linear(torch.tanh(m.mix(m.e(t).mean(1))), m.e.weight)

    return Net(body, e=nn.Embedding(5, 3), mix=nn.Linear(3, 3)), tokens(5, 4, 2)


@zoo("tied embedding and output")
def tied_embedding_sequence():
    net = Net(
        lambda m, t: m.out(torch.tanh(m.mix(m.e(t)))), e=nn.Embedding(5, 3), mix=nn.Linear(3, 3), out=nn.Linear(3, 5)
    )
    net.out.weight = net.e.weight
    return net, tokens(5, 3, 2)


@zoo("tied autoencoder")
def tied_autoencoder():
    return (
        Net(
            lambda m, x: F.linear(torch.tanh(F.linear(x, m.w, m.b)), m.w.T, m.c),
            w=parameter(2, 4),
            b=parameter(2),
            c=parameter(4),
        ),
        randn(4, 4),
        "gaussian",
    )


# -- derived weights ------------------------------------------------------------------------------------------------


@zoo("weight_norm")
def weight_norm():
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2)), randn(4, 3)


@zoo("weight_norm")
def weight_norm_conv():
    conv = parametrizations.weight_norm(nn.Conv2d(1, 2, 2))
    return nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.Linear(8, 2)), randn(3, 1, 3, 3)


@zoo("spectral_norm")
def spectral_norm():
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2)), randn(4, 3)


@zoo("low-rank update")
def low_rank_update():
    """LoRA: a frozen weight plus the product of two thin parameters."""

    def body(m, x):
        return m.out(torch.tanh(F.linear(x, m.frozen + m.up @ m.down)))

    return Net(
        body,
        frozen=nn.Parameter(torch.randn(4, 3), requires_grad=False),
        up=parameter(4, 1),
        down=parameter(1, 3),
        out=nn.Linear(4, 2),
    ), randn(4, 3)


# -- in-place operations, custom functions --------------------------------------------------------------------------


@zoo("in-place")
def in_place_relu():
    return nn.Sequential(
        nn.Linear(3, 5), nn.ReLU(inplace=True), nn.Linear(5, 4), nn.ReLU(True), nn.Linear(4, 2)
    ), randn(5, 3)


@zoo("in-place")
def in_place_bias():
    def body(m, x):
        h = m.a(x)
        h += m.bias
        h *= m.scale
        return m.out(torch.tanh(h))

    return Net(body, a=nn.Linear(3, 4), bias=parameter(4), scale=parameter(4), out=nn.Linear(4, 2)), randn(4, 3)


class Cube(torch.autograd.Function):
    """Opaque to a function mode: what comes out does not show what went in."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


@zoo("custom autograd.Function")
def custom_function():
    return Net(lambda m, x: m.b(Cube.apply(torch.tanh(m.a(x)))), a=nn.Linear(3, 4), b=nn.Linear(4, 2)), randn(4, 3)


@zoo("custom autograd.Function")
def custom_function_first():
    """All data passes through the custom function before it meets a parameter, twice."""
    return Net(
        lambda m, x: m.c(Cube.apply(torch.tanh(m.b(Cube.apply(torch.tanh(m.a(Cube.apply(x)))))))),
        a=nn.Linear(3, 3),
        b=nn.Linear(3, 3),
        c=nn.Linear(3, 2),
    ), randn(4, 3)


# -- where the samples are ------------------------------------------------------------------------------------------


@zoo("samples elsewhere")
def folded_time():
    def body(m, x):
        b, t, _ = x.shape
        h = torch.tanh(m.a(x.reshape(b * t, -1)))
        return m.out(h.view(b, t, -1).mean(1))

    return Net(body, a=nn.Linear(2, 3), out=nn.Linear(3, 2)), randn(3, 4, 2)


@zoo("samples elsewhere")
def folded_time_first():
    """Flattened [T, B], with T = B, so that the sizes say nothing."""

    def body(m, x):
        b, t, _ = x.shape
        h = torch.tanh(m.a(x.transpose(0, 1).reshape(t * b, -1)))
        return m.out(h.view(t, b, -1).mean(0))

    return Net(body, a=nn.Linear(2, 3), out=nn.Linear(3, 2)), randn(3, 3, 2)


@zoo("samples elsewhere")
def folded_between():
    """[H, B, T] flattened: the samples are the middle index."""

    def body(m, x):
        h = torch.tanh(m.a(x.transpose(0, 1).reshape(-1, 2)))
        return m.out(h.view(3, len(x), 3, -1).mean((0, 2)))

    return Net(body, a=nn.Linear(2, 3), out=nn.Linear(3, 2)), randn(3, 3, 3, 2)


@zoo("samples elsewhere")
def time_first():
    def body(m, x):
        h = torch.tanh(m.a(x.transpose(0, 1))) * m.s
        return m.out(h.mean(0))

    return Net(body, a=nn.Linear(2, 3), s=parameter(3), out=nn.Linear(3, 2)), randn(4, 4, 2)


@zoo("samples elsewhere")
def samples_last():
    """Features first, samples last, throughout."""
    return Net(
        lambda m, x: (m.v @ torch.tanh(m.w @ x.T + m.b[:, None])).T,
        w=parameter(4, 3),
        b=parameter(4),
        v=parameter(2, 4),
    ), randn(4, 3)


@zoo("samples elsewhere")
def siamese():
    """Two inputs stacked along the batch axis for one pass."""

    def body(m, x, z):
        a, b = torch.tanh(m.a(torch.cat([x, z]))).chunk(2)
        return m.out(a * b)

    return Net(body, a=nn.Linear(3, 4), out=nn.Linear(4, 2)), (randn(3, 3), randn(3, 3))


@zoo("samples elsewhere", exact=True)
def one_by_one():
    """A Python loop over data points: no operation sees the batch."""
    return Net(
        lambda m, x: torch.stack([m.b(torch.tanh(m.a(row))) for row in x]), a=nn.Linear(3, 4), b=nn.Linear(4, 2)
    ), randn(3, 3)


@zoo("samples elsewhere", exact=True)
def micro_batches():
    """The batch cut into parts within the forward pass."""
    return Net(
        lambda m, x: torch.cat([m.b(torch.tanh(m.a(part))) for part in x.split(2)]),
        a=nn.Linear(3, 4),
        b=nn.Linear(4, 2),
    ), randn(4, 3)


@zoo("samples elsewhere", exact=True)
def packed_tokens():
    """Only the tokens that are not padding, in one long axis."""

    def body(m, x, keep):
        h = x.new_zeros(*x.shape[:2], 3).masked_scatter(keep.unsqueeze(-1), torch.tanh(m.a(x[keep])))
        return m.out(h.mean(1))

    keep = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]], dtype=torch.bool)
    return Net(body, a=nn.Linear(2, 3), out=nn.Linear(3, 2)), (randn(3, 3, 2), keep)


# -- inputs and outputs ---------------------------------------------------------------------------------------------


@zoo("inputs")
def tuple_input():
    return Net(
        lambda m, x, z: m.out(torch.tanh(m.a(x) + m.b(z))), a=nn.Linear(3, 4), b=nn.Linear(2, 4), out=nn.Linear(4, 2)
    ), (
        randn(4, 3),
        randn(4, 2),
    )


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e, self.a, self.out = nn.Embedding(5, 3), nn.Linear(2, 3), nn.Linear(3, 2)

    def forward(self, input_ids: Tensor, features: Tensor, scale: float = 1.0) -> SimpleNamespace:
        h = torch.tanh(self.e(input_ids).mean(1) + scale * self.a(features))
        return SimpleNamespace(logits=self.out(h), hidden=h)


@zoo("inputs")
def dict_input():
    return Named(), {"input_ids": tokens(5, 4, 2), "features": randn(4, 2)}


@zoo("inputs")
def encoding_input():
    """A UserDict, as tokenisers return."""
    return Named(), UserDict(input_ids=tokens(5, 4, 2), features=randn(4, 2))


class Whole(nn.Module):
    """Takes its mapping as one argument."""

    whole_input = True

    def __init__(self) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(2, 3), nn.Linear(3, 2)

    def forward(self, batch: Mapping) -> Tensor:
        return self.out(torch.tanh(self.a(batch["features"])) * batch["gate"])


@zoo("inputs")
def mapping_argument():
    return Whole(), {"features": randn(4, 2), "gate": randn(4, 1)}


@zoo("outputs")
def sequence_categorical():
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)), randn(3, 3, 2)


@zoo("outputs")
def sequence_gaussian():
    return nn.Sequential(nn.Embedding(5, 3), nn.Tanh(), nn.Linear(3, 2)), tokens(5, 3, 4), "gaussian"


@zoo("outputs")
def image_categorical():
    return nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 3, 1)), randn(3, 1, 3, 2)


@zoo("outputs")
def image_gaussian():
    return nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.ConvTranspose2d(2, 1, 2)), randn(3, 1, 3, 3), "gaussian"


# -- which parameters -----------------------------------------------------------------------------------------------


@zoo("which parameters")
def frozen_layers():
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    net[2].requires_grad_(False)
    return net, randn(4, 3)


@zoo("which parameters")
def bitfit():
    """Only biases are trainable; the weights beside them are frozen."""
    net = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 2))
    for name, p in net.named_parameters():
        p.requires_grad_(name.endswith("bias"))
    return net, randn(4, 2, 3)


@zoo("which parameters")
def frozen_bias():
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    net[0].bias.requires_grad_(False)
    return net, randn(4, 3)


@zoo("which parameters", select={"names": ["2.bias", "0.weight"]})
def selected_by_name():
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), randn(4, 3)


@zoo("which parameters", select={"module": "2"})
def selected_by_module():
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2)), randn(4, 3)


@zoo("which parameters", select={"mask": torch.tensor([0, 3, 4, 17, 20, 27, 31])}, kron=False)
def selected_by_mask():
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), randn(4, 3)


@zoo("which parameters")
def unused_parameters():
    """A layer that the forward pass does not reach, one whose result is dropped, one behind a detach."""

    def body(m, x):
        m.dropped(x)
        return m.out(torch.tanh(m.a(x)) + m.behind(x).detach())

    return Net(
        body,
        unused=nn.Linear(2, 2),
        a=nn.Linear(3, 4),
        dropped=nn.Linear(3, 1),
        behind=nn.Linear(3, 4),
        out=nn.Linear(4, 2),
    ), randn(4, 3)


NAMES = tuple(_BUILDERS)
