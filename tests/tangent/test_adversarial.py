"""Architectures made to fool a recorder: rows equal brute force, or the error is one of ours. Never a wrong number."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import oracle
import problems
from lapwing import estimate
from lapwing.errors import LapwingError, ModelError
from lapwing.likelihoods import Gaussian
from lapwing.tangent import Tangent
from problems import Net, parameter
from unchanged import unchanged

CASES: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {}


def case(builder: Callable) -> Callable:
    CASES[builder.__name__] = builder
    return builder


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape)


def lin(i: int, o: int, **options) -> nn.Linear:
    return nn.Linear(i, o, **options)


class Quantise(torch.autograd.Function):
    """A straight-through estimator: hides the parameter that goes in."""

    @staticmethod
    def forward(ctx, w):
        return (4 * w).round() / 4

    @staticmethod
    def backward(ctx, grad):
        return grad


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return ctx.saved_tensors[0].cos() * grad


class Unseen(torch.autograd.Function):
    """A cube whose second derivative is hidden, and no error: its derivative leaves torch on the way."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x.detach().square() * grad.detach()


class HiddenLinear(torch.autograd.Function):
    """Data and parameter meet where nobody looks."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w.T, x.T @ grad


@case
def sparse_gradients():
    e = nn.Embedding(5, 3, sparse=True, padding_idx=0)
    return Net(lambda m, t: m.out(torch.tanh(m.e(t).mean(1))), e=e, out=lin(3, 2)), torch.randint(5, (4, 3))


@case
def sparse_gradients_of_bags():
    e = nn.EmbeddingBag(5, 3, sparse=True)
    return Net(lambda m, t: m.out(torch.tanh(m.e(t))), e=e, out=lin(3, 2)), torch.randint(5, (4, 3))


# -- parameters that are views, copies, or written to ---------------------------------------------------------------


@case
def chunks_of_one_weight():
    def body(m, x):
        a, b = m.w.chunk(2)
        c, d = m.w.split([1, 3], dim=1)
        return torch.tanh(x @ a.T) + torch.tanh(x[:, 1:] @ d.T)[:, :2] + c.T[:, :2] * x[:, :1] + b.sum()

    return Net(body, w=parameter(4, 4)), randn(3, 4)


@case
def permuted_and_reshaped():
    def body(m, x):
        w = m.w.permute(2, 0, 1).reshape(4, 6)
        v = m.w.view(6, 4)
        return F.linear(torch.tanh(F.linear(x, w)), v)[:, :3]

    return Net(body, w=parameter(2, 3, 4)), randn(3, 6)


@case
def indexed_rows():
    return Net(lambda m, x: x @ m.w[[2, 0, 2]].T + m.b[1:4] * x[:, :3], w=parameter(3, 4), b=parameter(5)), randn(3, 4)


@case
def strided_view():
    return Net(lambda m, x: x @ m.w[::2, 1::2] + x @ m.w[1::2, ::2], w=parameter(6, 4)), randn(3, 3)


@case
def diagonal_of_a_parameter():
    return Net(lambda m, x: x * m.w.diagonal() + x @ torch.diag(m.d), w=parameter(3, 3), d=parameter(3)), randn(4, 3)


@case
def expanded_parameter():
    return Net(lambda m, x: torch.tanh(x * m.s.expand(3)) @ m.w.expand(3, 2), s=parameter(1), w=parameter(3, 1)), randn(
        4, 3
    )


@case
def expanded_to_the_batch():
    return Net(lambda m, x: x + m.s.expand(len(x), 3) * m.t.expand_as(x), s=parameter(3), t=parameter(1)), randn(4, 3)


@case
def a_class_token_and_prompts_beside_the_data():
    """Two parameters in one concatenation, before and behind the data, and positions for every sample."""

    def body(m, x):
        prompts = m.prompts.unsqueeze(0).repeat(len(x), 1, 1)
        tokens = torch.cat([m.token.expand(len(x), -1, -1), m.a(x), prompts], 1) + m.place.expand(len(x), -1, -1)
        return m.out(torch.tanh(tokens)).flatten(1)

    shapes = {"token": parameter(1, 1, 2), "prompts": parameter(2, 2), "place": parameter(1, 6, 2)}
    return Net(body, a=lin(2, 2), out=lin(2, 1), **shapes), randn(4, 3, 2)


@case
def a_token_beside_the_last_axis_and_one_repeated_twice():
    def body(m, x):
        twice = m.s.expand(3, 1).expand(len(x), 3, 1)
        return torch.tanh(torch.concat([x, twice], dim=-1)).flatten(1) @ m.w

    return Net(body, s=parameter(1), w=parameter(9, 2)), randn(4, 3, 2)


@case
def repeated_for_the_folded_batch():
    """A table as long as the batch times time: no axis of it is the samples'."""

    def body(m, x):
        h = m.a(x.reshape(-1, 2)) + m.table.repeat(len(x), 1)
        return torch.tanh(h).view(len(x), -1)

    return Net(body, a=lin(2, 2), table=parameter(3, 2)), randn(3, 3, 2)


@case
def queries_per_sample():
    """Learned queries that attend to the data."""

    def body(m, x):
        q = m.q.expand(len(x), -1, -1)
        return m.out(F.scaled_dot_product_attention(q, m.k(x), m.v(x)).flatten(1))

    return Net(body, q=parameter(1, 2, 3), k=lin(2, 3), v=lin(2, 3), out=lin(6, 2)), randn(3, 4, 2)


@case
def clone_then_write():
    def body(m, x):
        w = m.w.clone()
        w[0] = 0
        w.mul_(0.5)
        return x @ w

    return Net(body, w=parameter(3, 2)), randn(4, 3)


@case
def clone_then_write_through_a_view():
    def body(m, x):
        w = m.w.clone()
        w[1].zero_()
        w.view(-1)[0:2].mul_(3)
        w.t()[0].add_(m.b)
        return x @ w

    return Net(body, w=parameter(3, 2), b=parameter(3)), randn(4, 3)


@case
def used_before_and_after_a_write():
    def body(m, x):
        w = m.w * 2
        y = x + w
        w.mul_(3)
        return y * 2 + (x + w).tanh()

    return Net(body, w=parameter(3)), randn(4, 3)


@case
def weight_assembled_in_a_buffer():
    def body(m, x):
        w = torch.zeros(3, 3, dtype=x.dtype)
        w[torch.triu_indices(3, 3)[0], torch.triu_indices(3, 3)[1]] = m.upper
        w[2, 0] = m.corner
        return x @ w

    return Net(body, upper=parameter(6), corner=parameter()), randn(4, 3)


@case
def parameter_written_into_data():
    def body(m, x):
        h = torch.zeros(len(x), 4, dtype=x.dtype)
        h[:, :3] = m.a(x)
        h[:, 3] = m.s
        return torch.tanh(h) * m.t

    return Net(body, a=lin(3, 3), s=parameter(), t=parameter(4)), randn(3, 3)


@case
def parameter_added_into_a_slice():
    def body(m, x):
        h = m.a(x)
        h[:, 0].add_(m.s)
        h[:, 1:] *= m.t
        return torch.tanh(h)

    return Net(body, a=lin(3, 3), s=parameter(), t=parameter(2)), randn(4, 3)


@case
def parameter_copied_into_a_slice():
    def body(m, x):
        h = m.a(x)
        h[:, 0].copy_(m.s.expand(len(x)))
        h.index_add_(1, torch.tensor([1, 1]), m.t.expand(len(x), 2))
        return torch.tanh(h)

    return Net(body, a=lin(3, 3), s=parameter(), t=parameter(2)), randn(4, 3)


@case
def data_written_into_a_copy_of_a_parameter():
    def body(m, x):
        w = m.w.expand(len(x), 3).clone()
        w[:, 1] = x[:, 0]
        return torch.tanh(w) @ m.v

    return Net(body, w=parameter(3), v=parameter(3, 2)), randn(4, 3)


@case
def out_argument():
    """With gradients torch refuses out=; without them it hides nothing."""

    def body(m, x):
        buffer = torch.empty(len(x), 3, dtype=x.dtype)
        torch.mul(x, 2, out=buffer)
        return torch.tanh(F.linear(buffer, m.w))

    return Net(body, w=parameter(2, 3)), randn(4, 3)


@case
def stacked_parameters():
    def body(m, x):
        w = torch.stack([m.a, m.b])
        return x @ torch.cat([w, w * m.a], 0).T

    return Net(body, a=parameter(3), b=parameter(3)), randn(4, 3)


@case
def parameter_times_itself():
    return Net(lambda m, x: (x @ m.w) @ (m.w.T @ m.w) + x @ (m.w * m.w), w=parameter(3, 3)), randn(4, 3)


@case
def complex_parts():
    return Net(lambda m, x: torch.view_as_real(torch.view_as_complex(m.w) * x)[..., 0], w=parameter(3, 2)), randn(4, 3)


@case
def scalars_and_size_one():
    def body(m, x):
        return (m.a * x + m.b) @ m.w * m.c.squeeze() + m.d.view(1, 1, 1)[0]

    return Net(body, a=parameter(), b=parameter(1), w=parameter(1, 1), c=parameter(1, 1, 1), d=parameter(1)), randn(
        3, 1
    )


@case
def size_one_everything():
    return nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Conv1d(1, 1, 1), nn.Flatten(), nn.Linear(1, 1)), randn(3, 1, 1)


@case
def channels_last_weights():
    net = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Conv2d(3, 2, 2), nn.Flatten())
    return net.to(memory_format=torch.channels_last), randn(3, 2, 3, 3).to(memory_format=torch.channels_last)


@case
def non_contiguous_parameter():
    m = Net(lambda m, x: F.linear(torch.tanh(F.linear(x, m.w)), m.w.T) + m.v * x, w=None, v=None)
    m.w = nn.Parameter(torch.randn(3, 4).T)
    m.v = nn.Parameter(torch.randn(6)[::2])
    return m, randn(4, 3)


@case
def parameters_that_share_a_buffer():
    flat = torch.randn(9)
    m = Net(lambda m, x: torch.tanh(F.linear(x, m.w)) * m.v, w=None, v=None)
    m.w, m.v = nn.Parameter(flat[:6].view(3, 2)), nn.Parameter(flat[6:])
    return m, randn(4, 2)


@case
def one_parameter_many_ways():
    def body(m, x):
        return (
            x @ m.w
            + F.linear(x, m.w)
            + x * m.w[0]
            + m.w.sum()
            + torch.einsum("bi,ij->bj", x, m.w)
            + F.embedding((x > 0).long().sum(1).clamp_max(3), m.w)
        )

    return Net(body, w=parameter(4, 4)), randn(4, 4)


@case
def vector_as_weight_bias_and_scale():
    def body(m, x):
        h = F.linear(x, m.v.unsqueeze(0), m.v[:1]) * m.v
        return F.layer_norm(h + x, (3,), m.v, m.v)

    return Net(body, v=parameter(3)), randn(4, 3)


@case
def linear_as_convolution():
    return Net(
        lambda m, x: F.linear(x, m.w) + F.conv1d(x.unsqueeze(-1), m.w.unsqueeze(-1))[..., 0], w=parameter(2, 3)
    ), randn(4, 3)


# -- operations that hide something ---------------------------------------------------------------------------------


@case
def straight_through_weight():
    return Net(
        lambda m, x: torch.tanh(F.linear(x, Quantise.apply(m.w), m.b)), w=parameter(3, 3), b=parameter(3)
    ), randn(4, 3)


@case
def hidden_linear():
    return Net(lambda m, x: m.a(torch.tanh(HiddenLinear.apply(x, m.w))), w=parameter(3, 3), a=lin(3, 2)), randn(4, 3)


@case
def hidden_and_seen():
    """One parameter used both where it is seen and where it is not."""
    return Net(lambda m, x: torch.tanh(HiddenLinear.apply(x, m.w)) + x @ m.w, w=parameter(3, 3)), randn(4, 3)


@case
def derived_from_an_opaque_parameter():
    """v has a rule for the product v * g; g is also used where there is none."""

    def body(m, x):
        return x @ (m.v * m.g) + torch.cat([x[:, :1], m.g.expand(len(x), 1)], 1)

    return Net(body, v=parameter(3, 2), g=parameter(1)), randn(4, 3)


@case
def differentiable_once():
    return Net(lambda m, x: m.b(Once.apply(m.a(x))), a=lin(3, 4), b=lin(4, 2)), randn(4, 3)


@case
def output_without_data():
    """Nothing that the parameter meets is data."""
    return Net(lambda m, x: m.b.expand(len(x), 3), b=parameter(3)), randn(4, 2)


@case
def output_partly_without_data():
    return Net(lambda m, x: torch.stack([m.a(x)[:, 0], m.b.expand(len(x))], 1), a=lin(2, 1), b=parameter(1)), randn(
        4, 2
    )


@case
def gate_by_shape_only():
    return Net(lambda m, x: torch.ones(len(x), 2, dtype=x.dtype) @ m.w, w=parameter(2, 3)), randn(4, 2)


@case
def scripted():
    net = torch.jit.script(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    return Net(lambda m, x: m.out(m.net(x)), net=net, out=lin(2, 2)), randn(4, 3)


@case
def checkpointed():
    return Net(
        lambda m, x: m.b(checkpoint(lambda h: torch.tanh(m.a(h)), x, use_reentrant=False)), a=lin(3, 4), b=lin(4, 2)
    ), randn(4, 3)


def _checkpointed(part: nn.Module) -> tuple[nn.Module, Tensor]:
    """The way back repeats the forward pass of the part, where no recorder is active."""

    def body(m, x):
        found = checkpoint(m.part, x, use_reentrant=False)
        return m.out((found[0] if isinstance(found, tuple) else found).mean(1))

    return Net(body, part=part, out=lin(4, 2)), randn(4, 3, 4)


@case
def checkpointed_lstm():
    return _checkpointed(nn.LSTM(4, 4, batch_first=True))


@case
def checkpointed_gru():
    return _checkpointed(nn.GRU(4, 4, num_layers=2, batch_first=True))


@case
def checkpointed_rnn():
    return _checkpointed(nn.RNN(4, 2, bidirectional=True, batch_first=True))


@case
def checkpointed_encoder():
    return _checkpointed(nn.TransformerEncoderLayer(4, 2, 3, batch_first=True))


@case
def mapped_over_samples():
    return Net(lambda m, x: torch.vmap(lambda row: m.b(torch.tanh(m.a(row))))(x), a=lin(3, 4), b=lin(4, 2)), randn(4, 3)


@case
def gradient_inside():
    """The output is a gradient: an energy model, a physics-informed network."""

    def body(m, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = m.b(torch.tanh(m.a(x))).sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0]

    return Net(body, a=lin(3, 4), b=lin(4, 1)), randn(4, 3)


@case
def numpy_in_between():
    """Data leaves torch and comes back: nobody can know that it is the data."""

    def body(m, x):
        return m.a(torch.from_numpy(x.detach().numpy() * 2)) + m.c

    return Net(body, a=lin(3, 2), c=parameter(2)), randn(4, 3)


@case
def tensor_from_a_list():
    return Net(lambda m, x: m.a(torch.tensor(x.tolist(), dtype=x.dtype).tanh()), a=lin(3, 2)), randn(4, 3)


@case
def tensordot_and_friends():
    def body(m, x):
        h = torch.tensordot(x, m.w, dims=1) + torch.inner(x, m.v)
        return h + torch.linalg.multi_dot([x, m.w, m.u])

    return Net(body, w=parameter(3, 2), v=parameter(2, 3), u=parameter(2, 2)), randn(4, 3)


@case
def einsum_variants():
    def body(m, x):
        h = torch.einsum(x, [0, 1], m.w, [1, 2], [0, 2])
        h = h + torch.einsum("bi,ij,jk->bk", x, m.w, m.u)
        h = h + torch.einsum("ij,bi", m.w, x)
        return h + torch.einsum("bi,ii->b", x, m.s).unsqueeze(-1) + torch.einsum("bi,ki->b", x, m.s).unsqueeze(1)

    return Net(body, w=parameter(3, 2), u=parameter(2, 2), s=parameter(3, 3)), randn(4, 3)


@case
def keyword_arguments_out_of_order():
    def body(m, x):
        h = torch.matmul(other=m.w, input=x)
        h = F.linear(bias=m.b, weight=m.v, input=h)
        return F.prelu(weight=m.p, input=torch.add(other=m.b, input=h, alpha=3))

    return Net(body, w=parameter(3, 2), v=parameter(2, 2), b=parameter(2), p=parameter(1)), randn(4, 3)


@case
def addmm_variants():
    def body(m, x):
        h = torch.addmm(m.c, x, m.w, beta=0.5, alpha=2)
        h = h + torch.addmm(m.table, x, m.w)
        h = h + torch.addmv(m.d, x, m.v).unsqueeze(1)
        return h + torch.baddbmm(m.e, x.unsqueeze(1), m.w.expand(len(x), 3, 2))[:, 0]

    return Net(
        body,
        c=parameter(2),
        w=parameter(3, 2),
        table=parameter(1, 2),
        d=parameter(1),
        v=parameter(3),
        e=parameter(1, 1, 2),
    ), randn(4, 3)


@case
def unusual_elementwise():
    def body(m, x):
        h = torch.atan2(x, m.a) + torch.hypot(x, m.b) + torch.logaddexp(m.c, x)
        h = h + x.abs().pow(m.d.sigmoid()) + torch.clamp(x, m.e, m.e + 1) + torch.outer(x[:, 0], m.a)
        return 2 - h / m.f.exp() + torch.rsub(m.a, x, alpha=2) + (m.b > x) * m.c

    return Net(body, **{name: parameter(3) for name in "abcdef"}), randn(4, 3)


@case
def losses_and_distances():
    def body(m, x):
        return torch.cdist(x, m.centres) + F.cosine_similarity(x.unsqueeze(1), m.centres, dim=-1)

    return Net(body, centres=parameter(2, 3)), randn(4, 3)


@case
def radial_basis():
    return Net(
        lambda m, x: torch.exp(-(x.unsqueeze(1) - m.c).square().sum(-1) * m.s.exp()), c=parameter(4, 3), s=parameter(4)
    ), randn(4, 3)


@case
def embedding_bag_and_one_hot():
    def body(m, t):
        h = F.embedding_bag(t, m.e, mode="mean") + F.one_hot(t, 5).to(m.e.dtype).sum(1) @ m.e
        return h + m.e[t].sum(1) + m.e.index_select(0, t[:, 0])

    return Net(body, e=parameter(5, 2)), torch.randint(5, (4, 3))


@case
def gather_from_logits():
    """Classes picked per sample from a parameter."""
    return Net(lambda m, x: m.t[(x > 0).long().sum(1)] * x + m.t.gather(0, (x > 0).long()), t=parameter(4, 3)), randn(
        4, 3
    )


@case
def unflattened_channels():
    def body(m, x):
        h = m.a(x).unflatten(1, (2, 3)).movedim(1, 2)
        return torch.tanh(h * m.s + m.b[:, None]).flatten(1)

    return Net(body, a=lin(3, 6), s=parameter(2), b=parameter(3)), randn(4, 3)


@case
def pixel_shuffle():
    net = nn.Sequential(nn.Conv2d(1, 4, 1), nn.PixelShuffle(2), nn.Conv2d(1, 1, 2, stride=2), nn.Flatten())
    return net, randn(4, 1, 2, 2)


@case
def fold_and_unfold():
    def body(m, x):
        patches = F.unfold(x, 2)
        return torch.tanh(m.w @ patches + m.b[:, None]).mean(-1)

    return Net(body, w=parameter(3, 4), b=parameter(3)), randn(4, 1, 3, 3)


@case
def hyper_network():
    """A weight made from the data: per-sample weights."""

    def body(m, x):
        w = m.hyper(x).view(len(x), 3, 2)
        return torch.bmm(x.unsqueeze(1), w)[:, 0] + torch.bmm(x.unsqueeze(1), m.base.expand(len(x), 3, 2))[:, 0]

    return Net(body, hyper=lin(3, 6), base=parameter(3, 2)), randn(4, 3)


@case
def mixture_of_experts():
    def body(m, x):
        gate = m.gate(x).softmax(-1)
        return torch.einsum("be,beo->bo", gate, torch.einsum("bi,eio->beo", x, m.experts))

    return Net(body, gate=lin(3, 2), experts=parameter(2, 3, 2)), randn(4, 3)


@case
def grouped_batched_matmul():
    """[B, G, 1, i] @ [G, i, o], and the parameter on the left with broadcast axes."""

    def body(m, x):
        h = torch.tanh(x.unsqueeze(2) @ m.w).squeeze(2)
        return (m.u @ h.unsqueeze(-1)).squeeze(-1).flatten(1)

    return Net(body, w=parameter(2, 3, 2), u=parameter(2, 2, 2)), randn(3, 2, 3)


@case
def two_sample_axes():
    """Pairs of a sample with itself: its size appears twice."""

    def body(m, x):
        h = m.a(x)
        return m.out((h @ h.mT).diagonal(dim1=-2, dim2=-1))

    return Net(body, a=lin(2, 2), out=lin(3, 2)), randn(3, 3, 2)


# -- dead, constant, ambiguous --------------------------------------------------------------------------------------


@case
def dead_relu_before_a_folded_layer():
    """Nothing that goes into the layer depends on the data, and time and batch have one size."""

    def body(m, x):
        h = torch.relu(m.a(x.transpose(0, 1)) - 100)
        h = m.b(h) * x.transpose(0, 1).mean(-1, keepdim=True)
        return h.sum(0)

    return Net(body, a=lin(2, 3), b=lin(3, 2)), randn(3, 3, 2)


@case
def all_dead():
    return nn.Sequential(nn.Linear(3, 4), nn.Threshold(1e3, 0.0), nn.Linear(4, 2)), randn(4, 3)


@case
def constant_inputs():
    """Every data point is the same."""
    net = Net(lambda m, x: m.out(torch.tanh(m.a(x.transpose(0, 1))).mean(0)), a=lin(2, 3), out=lin(3, 2))
    return net, torch.ones(3, 3, 2)


@case
def constant_tokens():
    net = Net(lambda m, t: m.out(torch.tanh(m.e(t.T)).mean(0)), e=nn.Embedding(4, 3), out=lin(3, 2))
    return net, torch.ones(3, 3, dtype=torch.long)


@case
def all_zero_inputs():
    net = Net(lambda m, x: m.out(torch.tanh(m.a(x.transpose(0, 1))).sum(0)), a=lin(2, 3), out=lin(3, 2))
    return net, torch.zeros(2, 2, 2)


@case
def last_token_only():
    def body(m, x):
        h = torch.tanh(m.a(x.transpose(0, 1)))
        return m.out(h[-1])

    return Net(body, a=lin(2, 3), out=lin(3, 2)), randn(4, 4, 2)


@case
def own_token_only():
    """Sample n reads token n: in [T, N] only the diagonal counts."""

    def body(m, x):
        return torch.tanh(m.a(x.transpose(0, 1)))[0] + m.b(x)[:, 1]

    return Net(body, a=lin(2, 3), b=lin(2, 3)), randn(3, 3, 2)


@case
def batch_times_batch():
    """[N N]-long axes whose samples are inner, outer, or both mixed with time."""

    def body(m, x):
        h = m.a(x.reshape(-1, 2)).view(len(x), -1, 3)
        g = m.b(x.transpose(0, 1).reshape(-1, 2)).view(-1, len(x), 3).transpose(0, 1)
        return torch.tanh(h * g).sum(1)

    return Net(body, a=lin(2, 3), b=lin(2, 3)), randn(4, 4, 2)


@case
def samples_in_the_channel_axis():
    """The batch as channels of one grouped convolution."""

    def body(m, x):
        h = F.conv1d(x.reshape(1, -1, x.shape[-1]), m.w.repeat(len(x), 1, 1), groups=len(x))
        return torch.tanh(h.view(len(x), -1))

    return Net(body, w=parameter(2, 1, 2)), randn(3, 1, 4)


@case
def reversed_and_restored():
    """The batch turned around, and back again: the k-th row is another sample."""
    return Net(lambda m, x: m.b(torch.tanh(m.a(x.flip(0))).flip(0)), a=lin(3, 4), b=lin(4, 2)), randn(4, 3)


@case
def sorted_by_length():
    """Samples processed in an order that the data decides, as packed sequences are."""

    def body(m, x):
        order = x[:, 0].argsort()
        return m.b(torch.tanh(m.a(x[order]))[order.argsort()])

    return Net(body, a=lin(3, 4), b=lin(4, 2)), randn(5, 3)


@case
def doubled_batch():
    """Each sample twice, once flipped, interleaved."""

    def body(m, x):
        both = torch.stack([x, x.flip(1)], 1).flatten(0, 1)
        return torch.tanh(m.a(both)).view(len(x), 2, -1).prod(1)

    return Net(body, a=lin(3, 4)), randn(2, 3)


def build(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(1)
    torch.set_default_dtype(torch.float64)
    model, x = CASES[name]()
    return model.eval(), x


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12 * float(expected.abs().max() + 1e-30))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", CASES)
def test_rows_products_and_diagonal(name: str) -> None:
    model, x = build(name)
    expected = oracle.jacobian(model, x)
    with unchanged(model):
        linear = Tangent(model).at(x)
        close(linear.rows(), expected)
        v = torch.randn(expected.shape[-1])
        close(linear.mv(v).flatten(1), expected @ v)
        f = linear.value
        found = estimate.diagonal(Tangent(model), Gaussian(), [(x, torch.zeros_like(f))])
        close(found.diagonal(), expected.square().sum((0, 1)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", problems.thinned(CASES))
@pytest.mark.parametrize("index", [[0], [1, 0], [1, 1]])
def test_small_and_repeated_batches(name: str, index: list[int]) -> None:
    model, x = build(name)
    expected = oracle.jacobian(model, x)[index]
    tangent = Tangent(model)
    with unchanged(model):
        close(tangent.at(x[index]).rows(), expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", CASES)
def test_kron_is_exact_for_one_datum_or_refuses(name: str) -> None:
    """One data point without sharing: a Kronecker block is the block of the GGN; with sharing, its trace is no zero."""
    model, x = build(name)
    ggn = oracle.jacobian(model, x[:1])[0]
    ggn = ggn.mT @ ggn
    y = oracle.forward(model, x[:1]).detach() * 0
    with unchanged(model):
        try:
            curvature = estimate.kflr(Tangent(model), Gaussian(), [(x[:1], y)])
        except LapwingError:
            return
        dense = curvature.dense()
        some, exact = dense.diagonal() > 1e-12, ggn.diagonal() > 1e-12
        assert bool(some[exact].all())
        assert torch.equal(some, exact) or not bool(exact.all())  # a bias of keys has none, but for its factors
        for block in curvature.blocks:
            where = torch.cat([torch.arange(*interval) for interval in block.segments.intervals])
            if type(block.curvature).__name__ == "Dense":
                close(block.curvature.dense(), ggn[where][:, where])


def test_control_flow_that_changes_between_batches() -> None:
    """Each batch takes its own way through the network; each is probed for itself."""

    def body(m, x):
        if float(x.mean()) > 0:
            return torch.tanh(m.a(x.transpose(0, 1))).mean(0) @ m.w
        return torch.tanh(m.a(x)).mean(1) @ m.w

    torch.set_default_dtype(torch.float64)
    model = Net(body, a=lin(2, 3), w=parameter(3, 2))
    up = torch.rand(3, 3, 2)
    tangent = Tangent(model)
    for x in (up, -up, up):
        close(tangent.at(x).rows(), oracle.jacobian(model, x))


def test_control_flow_with_equal_operations() -> None:
    """The same operations by name and shape, but the samples lie elsewhere: found, or refused."""

    def body(m, x):
        turned = float(x.mean()) > 0
        h = torch.tanh(m.a(x.transpose(0, 1) if turned else x))
        return h.mean(0 if turned else 1) @ m.w

    torch.set_default_dtype(torch.float64)
    model = Net(body, a=lin(2, 3), w=parameter(3, 2))
    up = torch.rand(3, 3, 2) + 1
    tangent = Tangent(model)
    for x in (up, -up, up):
        try:
            found = tangent.at(x).rows()
        except ModelError:
            continue
        close(found, oracle.jacobian(model, x))


def test_dead_batch_first_does_not_settle_the_axes() -> None:
    """A first batch that says nothing of where the samples are must not decide for those that follow."""

    def body(m, x):
        h = torch.relu(m.a(x.transpose(0, 1)))
        return m.out(m.b(h).mean(0))

    torch.set_default_dtype(torch.float64)
    model = Net(body, a=nn.Linear(2, 3, bias=False), b=nn.Linear(3, 3), out=lin(3, 2))
    with torch.no_grad():
        model.a.weight.abs_()
    dead, alive = -torch.rand(3, 3, 2), torch.rand(3, 3, 2)
    tangent = Tangent(model)
    for x in (dead, alive, dead):
        close(tangent.at(x).rows(), oracle.jacobian(model, x))


@pytest.mark.parametrize("gate", [lambda x: 1.0, lambda x: (x[:, :1] > 0).double()], ids=["dead", "gated"])
def test_hidden_second_derivatives_that_the_first_batch_does_not_reach(gate) -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = Net(
        lambda m, x: m.b(x) + gate(x) * Unseen.apply(m.a(x)),  # pyright: ignore[reportOperatorIssue]
        a=lin(3, 2, bias=False),
        b=lin(3, 2),
    )
    tangent, blank = Tangent(model), torch.zeros(4, 3)
    for x in (blank, torch.randn(4, 3), blank, torch.randn(3, 3)):
        expected = oracle.jacobian(model, x)
        v = torch.randn(expected.shape[-1])
        close(tangent.at(x).mv(v), expected @ v)


def test_second_derivatives_that_another_way_through_the_network_lacks() -> None:
    """An operation of torch that can be differentiated once, and that the first batch does not meet."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)

    def body(m, x):
        h = m.a(x)
        return m.b(torch.cdist(h, m.c) if float(x.detach().mean()) > 0 else h)

    model = Net(body, a=lin(3, 4), b=lin(4, 2), c=parameter(4, 4))
    tangent, up = Tangent(model), torch.rand(4, 3)
    for x in (-up, up):
        expected = oracle.jacobian(model, x)
        v = torch.randn(expected.shape[-1])
        close(tangent.at(x).mv(v), expected @ v)


def test_frozen_after_the_space_was_made() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    tangent = Tangent(model)
    model[0].weight.requires_grad_(False)
    with pytest.raises(ModelError, match=r"'0\.weight'.*requires_grad=False"):
        tangent.at(torch.randn(2, 3))


def test_no_grad_inside_the_model() -> None:
    model = Net(lambda m, x: torch.no_grad()(m.a)(x), a=lin(3, 2))
    with pytest.raises(ModelError, match="no trainable parameter"):
        Tangent(model).at(torch.randn(2, 3))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_called_without_gradients(mode) -> None:
    """A caller who has switched gradients off gets the same numbers."""
    torch.set_default_dtype(torch.float64)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    with mode():
        x = torch.randn(4, 3)
        linear = Tangent(model).at(x)
        rows, product = linear.rows(), linear.mv(torch.ones(26))
        curvature = estimate.kflr(Tangent(model), Gaussian(), [(x, torch.zeros(4, 2))]).dense()
    x = x.clone()
    close(rows.clone(), oracle.jacobian(model, x))
    close(product.clone(), oracle.jacobian(model, x).sum(-1))
    close(curvature.clone(), estimate.kflr(Tangent(model), Gaussian(), [(x, torch.zeros(4, 2))]).dense())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["lstm", "weight_norm", "raw_scale_shift"])
def test_slow_paths_called_without_gradients(name: str, mode) -> None:
    problem = problems.build(name)
    with mode():
        rows = Tangent(problem.model).at(problem.x).rows()
    close(rows.clone(), oracle.jacobian(problem.model, problem.x))


def test_reentrant_checkpoint_is_refused() -> None:
    torch.set_default_dtype(torch.float64)
    model = Net(
        lambda m, x: m.b(checkpoint(lambda h: torch.tanh(m.a(h)), x, use_reentrant=True)), a=lin(3, 4), b=lin(4, 2)
    )
    x = torch.randn(4, 3, requires_grad=True)
    with unchanged(model), pytest.raises(ModelError, match="use_reentrant"):
        Tangent(model).at(x).rows()
