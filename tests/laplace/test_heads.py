"""The last layer of other networks: the curvature of brute force, or a refusal that helps; never another number."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oracle
from lapwing import Laplace
from lapwing.errors import ModelError
from lapwing.likelihoods import Gaussian
from lapwing.tangent import FeatureTangent, Tangent
from problems import Net
from unchanged import unchanged


@pytest.fixture(autouse=True)
def _double():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12 * float(expected.abs().max() + 1e-30))


def expected(model: nn.Module, batches: list, names: list[str]) -> Tensor:
    """The Gauss-Newton matrix of these parameters, by one backward pass per output."""
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    place = torch.arange(sum(sizes.values())).split(list(sizes.values()))
    chosen = torch.cat([where for name, where in zip(sizes, place, strict=True) if name in names])
    return sum(oracle.ggn(model, Gaussian(), x, y)[chosen][:, chosen] for x, y in batches)  # pyright: ignore


def fitted(model: nn.Module, batches: list, structure: str = "full", **options):
    with unchanged(model):
        la = Laplace(model, "regression", hessian_structure=structure, **options)
        la.fit(batches)
    return la


class Sequence(nn.Module):
    """Scores every token, and takes the score of the last one that is no padding (0)."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.e, self.mix, self.score = nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 2, bias=bias)

    def forward(self, t: Tensor) -> Tensor:
        h = self.e(t).cumsum(1)
        logits = self.score(torch.tanh(self.mix(h)))
        last = (t != 0).long().cumsum(1).argmax(1)
        return logits[torch.arange(len(t)), last]


def tokens(*lengths: int) -> Tensor:
    t = torch.randint(1, 6, (len(lengths), 5))
    for row, length in zip(t, lengths, strict=True):
        row[length:] = 0
    return t


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("structure", ["full", "diag", "kron", "gp"])
def test_scores_of_all_tokens_of_which_one_is_taken(structure: str, bias: bool) -> None:
    model = Sequence(bias)
    batches = [(tokens(5, 5, 5), torch.randn(3, 2)), (tokens(2, 4, 1), torch.randn(3, 2))]
    la = fitted(model, batches, structure)
    names = ["score.weight", "score.bias"] if bias else ["score.weight"]
    matrix = expected(model, batches, names)
    if structure == "full":
        close(la.H, matrix)
    elif structure == "diag":
        close(la.H, matrix.diagonal())
    x = tokens(3, 1, 5, 2)
    jacobian = FeatureTangent(model).at(x).rows()
    params = [p for name, p in model.named_parameters() if name in names]
    brute = torch.stack([torch.stack([oracle.flat_gradient(f, params) for f in row]) for row in model(x)])
    close(jacobian, brute)
    if structure in ("full", "gp"):
        covariance = torch.linalg.inv(matrix + torch.eye(len(matrix)))
        close(la(x)[1], brute @ covariance @ brute.mT)


def test_positions_of_equal_scores_and_other_features_are_refused() -> None:
    """Columns of zeros in the weight, as after pruning: which position was taken cannot be read off the scores."""
    model = Net(
        lambda m, x: m.score(m.a(x))[torch.arange(len(x)), (x[..., 0] > 9).int().argmax(1)],
        a=nn.Linear(3, 4),
        score=nn.Linear(4, 2),
    )
    with torch.no_grad():
        model.score.weight[:, :2] = 0
        model.a.weight[2:, 0] = 0
    x = torch.randn(5, 3, 3)
    x[:, 2, 0] = 10
    tangent = FeatureTangent(model, "score")
    close(tangent.at(x).rows(), oracle.jacobian(model, x)[..., -10:])
    x[3, 2, 1:] = x[3, 0, 1:]  # alike but for what the score does not look at
    with pytest.raises(ModelError, match="is not what its last layer"):
        tangent.at(x)
    x[3, 0] = x[3, 2]
    close(tangent.at(x).rows(), oracle.jacobian(model, x)[..., -10:])


@pytest.mark.parametrize("table", [nn.Embedding, nn.EmbeddingBag])
def test_a_table_that_is_rewritten_by_the_forward_pass_is_refused(table: type) -> None:
    model = Net(
        lambda m, t: m.head(h if (h := m.e(t)).dim() == 2 else h.mean(1)),
        e=table(7, 4, max_norm=0.5),
        head=nn.Linear(4, 2),
    )
    batches = [(torch.randint(7, (5, 3)), torch.zeros(5, 2))]
    for subset in ("last_layer", "all"):
        with unchanged(model), pytest.raises(ModelError, match="max_norm rewrites"):
            Laplace(model, "regression", subset, hessian_structure="diag").fit(batches)


def test_pooled_scores_are_refused_for_several_classes() -> None:
    """The largest score of every class comes from several tokens."""
    model = Net(lambda m, x: m.head(torch.tanh(m.a(x))).amax(1), a=nn.Linear(2, 3), head=nn.Linear(3, 2))
    x = torch.randn(6, 4, 2)
    with pytest.raises(ModelError, match="is not what its last layer"):
        FeatureTangent(model, "head").at(x)
    close(fitted(model, [(x, torch.zeros(6, 2))], last_layer_name="head").H,
          expected(model, [(x, torch.zeros(6, 2))], ["head.weight", "head.bias"]))  # fmt: skip


CONVOLUTIONS = {
    "image": lambda: (nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Conv2d(3, 2, 1)), (1, 4, 4)),
    "signal": lambda: (nn.Sequential(nn.Conv1d(1, 3, 3), nn.Tanh(), nn.Conv1d(3, 2, 1, bias=False)), (1, 5)),
    "upsampled": lambda: (nn.Sequential(nn.Conv2d(1, 3, 2), nn.Tanh(), nn.Conv2d(3, 2, 1), nn.Upsample(scale_factor=2)),
                          (1, 3, 3)),
    "wide": lambda: (nn.Sequential(nn.Conv2d(1, 3, 2), nn.Tanh(), nn.Conv2d(3, 1, 2)), (1, 4, 4)),
    "pooled": lambda: (nn.Sequential(nn.Conv2d(1, 3, 2), nn.Tanh(), nn.Conv2d(3, 2, 1), nn.AdaptiveAvgPool2d(1),
                                     nn.Flatten()), (1, 4, 4)),
}  # fmt: skip


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_as_heads(name: str, named: bool) -> None:
    model, shape = CONVOLUTIONS[name]()
    x = torch.randn(6, *shape)
    y = torch.zeros_like(model(x)).detach()
    batches = [(x[:4], y[:4]), (x[4:], y[4:])]
    names = [each for each, _ in model.named_parameters() if each.startswith("2.")]
    options = {"last_layer_name": "2"} if named else {}
    close(fitted(model, batches, **options).H, expected(model, batches, names))
    close(fitted(model, batches, "diag", **options).H, expected(model, batches, names).diagonal())
    assert fitted(model, batches, "kron", **options).H.size == sum(p.numel() for p in model[2].parameters())


@pytest.mark.parametrize("padding", [False, True])
def test_an_encoder_with_padding(padding: bool) -> None:
    """Without gradients torch packs the tokens into a nested tensor; nothing of that may be seen."""
    layer = nn.TransformerEncoderLayer(4, 2, 4, batch_first=True)
    model = Net(
        lambda m, x: m.head(m.encoder(x, src_key_padding_mask=(x[..., 0] == 0) if padding else None)[:, 0]),
        encoder=nn.TransformerEncoder(layer, 1),
        head=nn.Linear(4, 2),
    ).eval()
    x = torch.randn(5, 3, 4)
    x[1, 2:], x[3, 1:] = 0, 0
    batches = [(x[:3], torch.zeros(3, 2)), (x[3:], torch.zeros(2, 2))]
    close(fitted(model, batches).H, expected(model, batches, ["head.weight", "head.bias"]))


def deep(call: Callable) -> Callable:
    """The layer runs once, and once more as long as a data point asks for it."""

    def body(m, x):
        h = torch.tanh(m.a(x))
        while float(h.detach()[:, 0].amax()) > 0.3 and float(x.amax()) > 0:
            h = torch.where(h[:, :1] > 0.3, torch.tanh(call(m, h)) - 0.2, h)
        return m.head(h)

    return body


DEPTHS = {
    "module": lambda m, h: m.head(h),
    "function": lambda m, h: F.linear(h, m.head.weight, m.head.bias),
    "product": lambda m, h: h @ m.head.weight.T,
    "bias alone": lambda m, h: h - m.head.bias.abs(),
}


@pytest.mark.parametrize("kind", DEPTHS)
def test_a_layer_used_a_varying_number_of_times_is_refused(kind: str) -> None:
    """The first batch uses it once; what holds there does not hold for the next."""
    model = Net(deep(DEPTHS[kind]), a=nn.Linear(3, 3), head=nn.Linear(3, 3))
    x = torch.rand(4, 3)
    batches = [(-x, torch.zeros(4, 3)), (2 * x, torch.zeros(4, 3))]
    with torch.no_grad():
        model.a.weight.abs_()
    for structure in ("full", "diag", "kron"):
        with unchanged(model), pytest.raises(ModelError, match=r"batch 1: the .*'head' (ran|is read by) \d+ .*'all'"):
            fitted(model, batches, structure)
    names = ["head.weight", "head.bias"]
    close(fitted(model, batches[::-1], last_layer_name="head").H, expected(model, batches, names))


def test_what_follows_the_layer_may_not_depend_on_the_batch() -> None:
    """The output of the layer in the first batch, twice the output in the second."""

    def body(m, x):
        y = m.head(torch.tanh(m.a(x)))
        return y if float(x.sum()) < 0 else y.mul_(2)

    model = Net(body, a=nn.Linear(3, 3), head=nn.Linear(3, 2))
    x = torch.rand(4, 3)
    with pytest.raises(ModelError, match=r"batch 1: .*not what its last layer 'head' makes"):
        fitted(model, [(-x, torch.zeros(4, 2)), (x, torch.zeros(4, 2))])


def test_a_tied_head_is_refused_and_right_when_named() -> None:
    model = Net(lambda m, t: m.head(torch.tanh(m.mix(m.e(t)).sum(1))), e=nn.Embedding(5, 3), mix=nn.Linear(3, 3),
                head=nn.Linear(3, 5, bias=False))  # fmt: skip
    model.head.weight = model.e.weight
    t = torch.randint(5, (4, 3))
    batches = [(t, torch.zeros(4, 5))]
    with pytest.raises(ModelError, match=r"tied to 'e.weight'.*last_layer_name"):
        fitted(model, batches)
    close(fitted(model, batches, last_layer_name="head").H, expected(model, batches, ["e.weight"]))


def test_softmax_after_the_layer_is_still_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), nn.Softmax(-1))
    with pytest.raises(ModelError, match="softmax"):
        fitted(model, [(torch.randn(4, 3), torch.zeros(4, 2))])


def test_scripted_parts() -> None:
    with pytest.warns(DeprecationWarning, match="script"):
        body = torch.jit.script(nn.Sequential(nn.Linear(3, 4), nn.Tanh()))
    model = nn.Sequential(body, nn.Linear(4, 2))
    batches = [(torch.randn(4, 3), torch.zeros(4, 2))]
    close(fitted(model, batches).H, expected(model, batches, ["1.weight", "1.bias"]))


def test_a_kept_posterior_of_a_convolution_predicts_the_same() -> None:
    model, shape = CONVOLUTIONS["pooled"]()
    x = torch.randn(4, *shape)
    la = fitted(model, [(x, torch.zeros(4, 2))])
    again = Laplace(model, "regression", hessian_structure="full")
    again.load_state_dict(la.state_dict())
    close(again(x)[1], la(x)[1])


def test_rounding_of_autocast_is_not_taken_for_an_unseen_operation() -> None:
    torch.set_default_dtype(torch.float32)
    model = Net(
        lambda m, x: torch.autocast("cpu", dtype=torch.bfloat16)(lambda h: m.b(torch.tanh(m.a(h))))(x).float(),
        a=nn.Linear(3, 4),
        b=nn.Linear(4, 2),
    )
    assert not Tangent(model).at(torch.randn(4, 3)).record.opaque
