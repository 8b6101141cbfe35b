"""Kronecker curvature: equal to the explicit product of factors, and to the GGN's own blocks where theory says so."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kron_oracle
import oracle
import problems
from lapwing import estimate
from lapwing.errors import ParameterError, UnsupportedOperationError
from lapwing.likelihoods import Categorical, Gaussian
from lapwing.params import ParamSpace
from lapwing.tangent import Tangent, convolution
from problems import Net, parameter
from unchanged import unchanged

# problems in which every matrix is the weight of a module
MODULES = [
    "mlp",
    "mlp_gaussian",
    "mlp_without_bias",
    "mlp_dropout",
    "conv2d",
    "conv2d_strided",
    "conv2d_circular",
    "conv2d_reflect",
    "conv2d_same",
    "conv2d_valid",
    "residual",
    "conv2d_grouped",
    "conv2d_depthwise",
    "conv1d",
    "conv1d_grouped",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose2d_grouped",
    "conv_transpose3d",
    "batch_norm1d",
    "batch_norm2d",
    "layer_norm",
    "group_norm",
    "instance_norm",
    "rms_norm",
    "embedding",
    "embedding_padding",
    "embedding_single",
    "raw_table",
    "prelu_shared",
    "prelu_per_channel",
    "attention_linears",
    "attention_fused",
    "linear_twice",
    "recurrence_from_linears",
    "in_place_relu",
    "in_place_bias",
    "custom_function",
    "folded_time",
    "folded_time_first",
    "folded_between",
    "time_first",
    "tuple_input",
    "dict_input",
    "sequence_categorical",
    "sequence_gaussian",
    "image_categorical",
    "image_gaussian",
    "frozen_layers",
    "frozen_bias",
    "bitfit",
]


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12 * float(expected.abs().max() + 1e-30))


def kflr(problem: problems.Problem, **options) -> Tensor:
    with unchanged(problem.model):
        tangent = Tangent(problem.model, problem.space)
        return estimate.kflr(tangent, problem.likelihood, problem.batches, **options).dense()


@pytest.mark.parametrize("joint_bias", [True, False], ids=["joint", "separate"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", MODULES)
def test_equals_the_product_of_explicit_factors(name: str, sharing: str, joint_bias: bool) -> None:
    problem = problems.build(name)
    expected = kron_oracle.kron(
        problem.model, problem.likelihood, problem.x, problem.y, sharing=sharing, joint_bias=joint_bias
    )
    close(kflr(problem, sharing=sharing, joint_bias=joint_bias), expected)


@pytest.mark.parametrize(
    "name", ["mlp", "mlp_gaussian", "residual", "batch_norm1d", "prelu_shared", "embedding_single"]
)
def test_exact_blocks_for_one_datum_without_sharing(name: str) -> None:
    problem = problems.build(name)
    x, y = problem.x[:1], problem.y[:1]
    ggn = oracle.ggn(problem.model, problem.likelihood, x, y)
    for joint, by in ((True, "layer"), (False, "tensor")):
        curvature = estimate.kflr(Tangent(problem.model), problem.likelihood, [(x, y)], joint_bias=joint)
        groups = problem.space.groups(by)
        norms = torch.tensor([len(shape) == 1 for shape in problem.space.shapes]).repeat_interleave(
            torch.tensor([shape.numel() for shape in problem.space.shapes])
        )
        within = groups[:, None] == groups[None, :]
        if name in ("batch_norm1d", "prelu_shared") and joint:  # scale and shift of a norm are blocks of their own
            tensors = problem.space.groups("tensor")
            lone = norms & (groups == 1)
            within = torch.where(lone[:, None] & lone[None, :], tensors[:, None] == tensors[None, :], within)
        close(curvature.dense(), ggn * within)


def test_exact_layer_blocks_for_a_deep_linear_network_with_square_loss() -> None:
    """g does not depend on the data point, so the mean of products is the product of means."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 2)).double()
    x, y = torch.randn(7, 3).double(), torch.randn(7, 2).double()
    likelihood = Gaussian(0.3)
    groups = ParamSpace.of(model).groups("layer")
    expected = oracle.ggn(model, likelihood, x, y) * (groups[:, None] == groups[None, :])
    close(estimate.kflr(Tangent(model), likelihood, [(x, y)]).dense(), expected)


def test_reduce_is_exact_for_a_linear_network_that_averages_positions() -> None:
    """Deep linear, mean over positions, square loss: KFAC-reduce is exact, KFAC-expand is not."""
    model = Net(lambda m, x: m.b(m.a(x).mean(1)), a=nn.Linear(3, 4), b=nn.Linear(4, 2)).double()
    x, y = torch.randn(5, 6, 3).double(), torch.randn(5, 2).double()
    groups = ParamSpace.of(model).groups("layer")
    expected = oracle.ggn(model, Gaussian(), x, y) * (groups[:, None] == groups[None, :])
    close(estimate.kflr(Tangent(model), Gaussian(), [(x, y)], sharing="reduce").dense(), expected)
    expanded = estimate.kflr(Tangent(model), Gaussian(), [(x, y)], sharing="expand").dense()
    assert not torch.allclose(expanded, expected, rtol=0.1)


def test_expand_is_exact_for_a_linear_network_with_a_loss_at_every_position() -> None:
    """Deep linear, square loss per position: KFAC-expand is exact, KFAC-reduce is not."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    x, y = torch.randn(5, 6, 3).double(), torch.randn(5, 6, 2).double()
    groups = ParamSpace.of(model).groups("layer")
    expected = oracle.ggn(model, Gaussian(), x, y) * (groups[:, None] == groups[None, :])
    close(estimate.kflr(Tangent(model), Gaussian(), [(x, y)], sharing="expand").dense(), expected)
    reduced = estimate.kflr(Tangent(model), Gaussian(), [(x, y)], sharing="reduce").dense()
    assert not torch.allclose(reduced, expected, rtol=0.1)


# -- the same network written differently ---------------------------------------------------------------------------


def equivalent(plain: Net, other: Net, match: dict[str, tuple[str, tuple[int, ...] | None]], x: Tensor) -> None:
    """kflr of two spellings of one network, entry by entry; `match` is name -> (name, permutation of its axes)."""
    y = torch.zeros(len(x), dtype=torch.long)
    close(other(x).detach(), plain(x).detach())
    spaces = ParamSpace.of(plain), ParamSpace.of(other)
    index = torch.empty(spaces[0].size, dtype=torch.long)
    for name, (theirs, perm) in match.items():
        at = torch.arange(spaces[1].size)[spaces[1].segment(theirs)].reshape(spaces[1].shape(theirs))
        index[spaces[0].segment(name)] = (at if perm is None else at.permute(perm)).flatten()
    for sharing in ("expand", "reduce"):
        expected = estimate.kflr(Tangent(plain), Categorical(), [(x, y)], sharing=sharing).dense()
        found = estimate.kflr(Tangent(other), Categorical(), [(x, y)], sharing=sharing).dense()
        close(found[index][:, index], expected)


def plain_net() -> Net:
    return Net(
        lambda m, x: m.out(torch.tanh(m.a(x)).mean(1)), a=nn.Linear(3, 4, bias=False), out=nn.Linear(4, 2)
    ).double()


SPELLINGS = {
    "x @ w": (lambda w, x: x @ w, lambda w: w.T, (1, 0)),
    "x @ w, broadcast over the batch": (lambda w, x: x @ w, lambda w: w.T.unsqueeze(0), (2, 1, 0)),
    "matmul(x, w.T)": (lambda w, x: torch.matmul(x, w.T), lambda w: w, None),
    "w @ x.mT": (lambda w, x: (w @ x.mT).mT, lambda w: w, None),
    "einsum": (lambda w, x: torch.einsum("bti,io->bto", x, w), lambda w: w.T, (1, 0)),
    "einsum, parameter first": (lambda w, x: torch.einsum("oi,bti->bto", w, x), lambda w: w, None),
    "conv1d": (lambda w, x: F.conv1d(x.mT, w.unsqueeze(-1)).mT, lambda w: w, None),
    "conv1d, kernel of one": (lambda w, x: F.conv1d(x.mT, w).mT, lambda w: w.unsqueeze(-1), (0, 1, 2)),
    "folded": (lambda w, x: F.linear(x.flatten(0, 1), w).unflatten(0, x.shape[:2]), lambda w: w, None),
    "folded, time first": (
        lambda w, x: F.linear(x.transpose(0, 1).flatten(0, 1), w).unflatten(0, (x.shape[1], len(x))).transpose(0, 1),
        lambda w: w,
        None,
    ),
    "bmm, expanded": (lambda w, x: torch.bmm(x, w.T.expand(len(x), 3, 4)), lambda w: w, None),
    "addmm": (
        lambda w, x: torch.addmm(x.new_zeros(1, 4), x.flatten(0, 1), w.T).unflatten(0, x.shape[:2]),
        lambda w: w,
        None,
    ),
    "split and joined": (lambda w, x: F.linear(x, w.view(2, 2, 3).flatten(0, 1)), lambda w: w, None),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings_of_a_linear_layer_agree(spelling: str) -> None:
    use, store, perm = SPELLINGS[spelling]
    plain = plain_net()
    other = Net(
        lambda m, x: m.out(torch.tanh(use(m.w, x)).mean(1)),
        w=nn.Parameter(store(plain.a.weight.detach()).contiguous()),
        out=plain.out,
    )
    if perm == (0, 1, 2):
        perm = None
    if spelling == "bmm, expanded":
        # a weight expanded over the batch is no Kronecker product to the recorder: a dense block
        y = torch.zeros(3, dtype=torch.long)
        x = torch.randn(3, 2, 3).double()
        found = estimate.kflr(Tangent(other), Categorical(), [(x, y)]).dense()
        close(found[:12, :12], oracle.ggn(other, Categorical(), x, y)[:12, :12])
        return
    equivalent(
        plain,
        other,
        {"a.weight": ("w", perm), "out.weight": ("out.weight", None), "out.bias": ("out.bias", None)},
        torch.randn(3, 2, 3).double(),
    )


def test_attention_modules_agree_with_linear_layers() -> None:
    """nn.MultiheadAttention is a packed Linear(E, 3E), attention, and a Linear."""
    problem = problems.build("mha_self")
    mha = problem.model.mha

    def body(m, x):
        q, k, v = m.qkv(x).chunk(3, -1)
        return m.out(m.o(problems.attend(q, k, v, 2)).mean(1))

    plain = Net(body, qkv=nn.Linear(4, 12), o=nn.Linear(4, 4), out=problem.model.out).double()
    with torch.no_grad():
        plain.qkv.weight.copy_(mha.in_proj_weight)
        plain.qkv.bias.copy_(mha.in_proj_bias)
        plain.o.load_state_dict(mha.out_proj.state_dict())
    names = {
        "qkv.weight": "mha.in_proj_weight",
        "qkv.bias": "mha.in_proj_bias",
        "o.weight": "mha.out_proj.weight",
        "o.bias": "mha.out_proj.bias",
        "out.weight": "out.weight",
        "out.bias": "out.bias",
    }
    equivalent(plain, problem.model, {name: (theirs, None) for name, theirs in names.items()}, problem.x)


def test_grouped_einsum_agrees_with_a_grouped_convolution() -> None:
    conv = nn.Conv1d(4, 6, 1, groups=2, bias=False).double()
    out = nn.Linear(6, 2).double()
    plain = Net(lambda m, x: m.out(torch.tanh(m.c(x)).mean(-1)), c=conv, out=out)
    weight = nn.Parameter(conv.weight.detach().reshape(2, 3, 2).permute(0, 2, 1).contiguous())
    other = Net(
        lambda m, x: m.out(
            torch.tanh(torch.einsum("bgit,gio->bgot", x.unflatten(1, (2, 2)), m.w)).flatten(1, 2).mean(-1)
        ),
        w=weight,
        out=out,
    )
    x, y = torch.randn(3, 4, 5).double(), torch.zeros(3, dtype=torch.long)
    close(other(x).detach(), plain(x).detach())
    found = estimate.kflr(Tangent(other), Categorical(), [(x, y)]).dense()[:12, :12]
    expected = estimate.kflr(Tangent(plain), Categorical(), [(x, y)]).dense()[:12, :12]
    index = torch.arange(12).reshape(2, 2, 3).permute(0, 2, 1).flatten()
    close(found[index][:, index], expected)


# -- vectors, tables, ties ------------------------------------------------------------------------------------------


EXACT = {
    "raw_scale_shift": ["s", "b", "t"],
    "raw_elementwise_zoo": list("abcdefghk"),
    "layer_norm_of_matrices": ["1.weight", "1.bias"],
    "raw_table_sliced": ["table"],
    "positional_embedding": ["pos.weight"],
}


@pytest.mark.parametrize("name", EXACT)
def test_vectors_and_tables_have_exact_blocks(name: str) -> None:
    problem = problems.build(name)
    ggn = oracle.ggn(problem.model, problem.likelihood, problem.x, problem.y)
    dense = kflr(problem)
    for vector in EXACT[name]:
        part = problem.space.segment(vector)
        close(dense[part, part], ggn[part, part])


def test_vectors_beyond_the_limit_get_an_exact_diagonal() -> None:
    problem = problems.build("layer_norm_of_matrices")
    ggn = oracle.ggn(problem.model, problem.likelihood, problem.x, problem.y)
    dense = kflr(problem, dense_limit=5)
    part = problem.space.segment("1.weight")
    close(dense[part, part], ggn[part, part].diagonal().diag())


def test_derived_weights_have_exact_dense_blocks_within_the_limit() -> None:
    problem = problems.build("weight_norm")
    ggn = oracle.ggn(problem.model, problem.likelihood, problem.x, problem.y)
    dense = kflr(problem)
    for name in problem.space.names[:3]:
        part = problem.space.segment(name)
        if "parametrizations" in name:
            close(dense[part, part], ggn[part, part])
    dense = kflr(problem, dense_limit=5)
    for name in problem.space.names[:3]:
        part = problem.space.segment(name)
        if "parametrizations" in name and part.stop - part.start > 5:
            close(dense[part, part], ggn[part, part].diagonal().diag())
    with pytest.raises(UnsupportedOperationError, match="exceed the limit of 5 for a dense block"):
        kflr(problem, dense_limit=5, on_unsupported="error")


def test_tied_autoencoder_is_the_nearest_product_to_the_sum_of_its_roles() -> None:
    problem = problems.build("tied_autoencoder")
    model = problem.model
    untied = Net(lambda m, x: m.dec(torch.tanh(m.enc(x))), enc=nn.Linear(4, 2), dec=nn.Linear(2, 4)).double()
    with torch.no_grad():
        untied.enc.weight.copy_(model.w)
        untied.enc.bias.copy_(model.b)
        untied.dec.weight.copy_(model.w.T)
        untied.dec.bias.copy_(model.c)
    explicit = kron_oracle.kron(untied, problem.likelihood, problem.x, problem.y)
    space = ParamSpace.of(untied)
    enc, dec = space.segment("enc.weight"), space.segment("dec.weight")
    turned = torch.arange(8).reshape(4, 2).T.flatten()  # dec.weight = w^T
    total = explicit[enc, enc] + explicit[dec, dec][turned][:, turned]
    dense = kflr(problem, joint_bias=False)
    found = dense[:8, :8]
    G, A = kron_oracle.nearest(total, 2, 4)
    best = torch.kron(G, A)
    distance = (found - total).norm(), (best - total).norm()
    # with the biases in one block the compromise is over [w, b]; it is no better than the best for w alone
    assert float(distance[0]) >= float(distance[1]) * (1 - 1e-9)
    assert float(distance[0]) <= float(distance[1]) * 1.5


def test_tied_weights_without_bias_reach_the_dense_van_loan_optimum() -> None:
    torch.set_default_dtype(torch.float64)
    model = Net(lambda m, x: F.linear(torch.tanh(F.linear(x, m.w)), m.w.T), w=parameter(2, 4))
    untied = Net(
        lambda m, x: m.dec(torch.tanh(m.enc(x))), enc=nn.Linear(4, 2, bias=False), dec=nn.Linear(2, 4, bias=False)
    )
    with torch.no_grad():
        untied.enc.weight.copy_(model.w)
        untied.dec.weight.copy_(model.w.T)
    x, y = torch.randn(5, 4), torch.randn(5, 4)
    explicit = kron_oracle.kron(untied, Gaussian(0.5), x, y)
    turned = torch.arange(8).reshape(4, 2).T.flatten()
    total = explicit[:8, :8] + explicit[8:, 8:][turned][:, turned]
    G, A = kron_oracle.nearest(total, 2, 4)
    found = estimate.kflr(Tangent(model), Gaussian(0.5), [(x, y)]).dense()
    torch.testing.assert_close((found - total).norm(), (torch.kron(G, A) - total).norm(), rtol=1e-9, atol=0)
    torch.testing.assert_close(found, torch.kron(G, A), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["tied_embedding", "tied_embedding_sequence"])
def test_tied_embedding_is_the_nearest_product_to_the_sum_of_its_roles(name: str) -> None:
    problem = problems.build(name)
    model = problem.model
    pool = (lambda h: h.mean(1)) if name == "tied_embedding" else (lambda h: h)
    bias = name != "tied_embedding"
    untied = Net(
        lambda m, t: m.out(torch.tanh(m.mix(pool(m.e(t))))),
        e=nn.Embedding(5, 3),
        mix=nn.Linear(3, 3),
        out=nn.Linear(3, 5, bias=bias),
    ).double()
    with torch.no_grad():
        untied.e.weight.copy_(model.e.weight)
        untied.mix.load_state_dict(model.mix.state_dict())
        untied.out.weight.copy_(model.e.weight)
        if bias:
            untied.out.bias.copy_(model.out.bias)
    explicit = kron_oracle.kron(untied, problem.likelihood, problem.x, problem.y)
    space = ParamSpace.of(untied)
    e, out = space.segment("e.weight"), space.segment("out.weight")
    total = explicit[e, e] + explicit[out, out]
    G, A = kron_oracle.nearest(total, 5, 3)
    found = kflr(problem)[:15, :15]
    best = (torch.kron(G, A) - total).norm()
    assert float((found - total).norm()) >= float(best) * (1 - 1e-9)
    if not bias:
        torch.testing.assert_close((found - total).norm(), best, rtol=1e-9, atol=0)
    mix = problem.space.segment("mix.weight")
    close(kflr(problem)[mix, mix], explicit[space.segment("mix.weight"), space.segment("mix.weight")])


# -- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_a_weight_that_meets_two_biases_has_factors_of_its_own_and_they_exact_blocks(sharing: str) -> None:
    def fused(m: Net, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(x, m.a.weight, m.b)), m.a.weight, m.c)

    def spelled_out(m: Net, x: Tensor) -> Tensor:
        return m.a(torch.tanh(m.a(x) + m.b)) + m.c

    members = {"a": nn.Linear(3, 3, bias=False), "b": parameter(3), "c": parameter(3)}
    model, twin = (Net(body, **members).double() for body in (fused, spelled_out))
    x, y = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    expected = kron_oracle.kron(twin, Gaussian(), x, y, sharing=sharing)
    close(estimate.kflr(Tangent(model), Gaussian(), [(x, y)], sharing=sharing).dense(), expected)


def test_unknown_sharing_is_refused() -> None:
    problem = problems.build("mlp")
    with pytest.raises(ParameterError, match="expected 'expand' or 'reduce'"):
        kflr(problem, sharing="average")


def test_padding_tokens_have_no_curvature() -> None:
    """A table row that never receives a gradient has no curvature, whatever the other tokens do."""
    problem = problems.build("embedding_padding")
    dense = kflr(problem)
    assert float(dense[:3].abs().max()) == 0


def test_patches_of_a_layer_are_made_once_for_all_cotangents_and_one_layer_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alive: list[weakref.ref] = []
    images: list[int] = []
    patches = convolution._to_patches

    def watched(*given: Any) -> Tensor:
        assert sum(each() is not None for each in alive) <= 1
        found = patches(*given)
        alive.append(weakref.ref(found))
        images.append(len(found))
        return found

    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Conv2d(3, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, 3))
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 5)).double()
    x, y = torch.randn(4, 1, 8, 8, dtype=torch.float64), torch.tensor([0, 1, 2, 3])
    tangent = Tangent(model, budget=1)  # one cotangent at a time
    expected = estimate.kflr(Tangent(model), Categorical(), [(x, y)])
    tangent.at(x)
    monkeypatch.setattr(convolution, "_to_patches", watched)
    found = estimate.kflr(tangent, Categorical(), [(x, y)])
    assert sum(images) == 3 * len(x)  # every image once for each of the layers, however many at a time
    torch.testing.assert_close(found.dense(), expected.dense(), rtol=1e-9, atol=1e-12)
