"""Scale-invariant groups against brute force: parameters scaled one set after the other, on copies of the network.

BatchNorm in eval mode has statistics that go with its weights: where everything that a BatchNorm reads has grown by a
factor c, the oracle gives it c times its running mean and c^2 times its running variance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from itertools import combinations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import lapwing
from lapwing import scale_invariant_groups
from lapwing.errors import DataError, ModelError, OptionError, ParameterError
from lapwing.tape.invariance import _Scaled
from unchanged import unchanged

EPS = 1e-13
"""Of the norms in the tests, so that invariance is exact to rounding."""
NORMS = (nn.modules.batchnorm._BatchNorm, nn.InstanceNorm2d)


@pytest.fixture(autouse=True)
def _float64() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)


# -- the oracle --------------------------------------------------------------------------------------------------------


def trained(model: nn.Module, x: Tensor) -> nn.Module:
    """With weights of no special size, and running statistics of the data."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
        model.train()
        for module in model.modules():
            if isinstance(module, (nn.Dropout, nn.MultiheadAttention)):
                module.eval()
        for _ in range(3):
            model(x + 0.1 * torch.randn_like(x) if x.is_floating_point() else x)
    return model.eval()


def scaled_outputs(model: nn.Module, x: Tensor, names: Iterable[str], k: float) -> Tensor:
    """The outputs with these parameters k times as large, and running statistics that go with them."""
    read: list[Tensor] = []
    with torch.no_grad():
        plain = deepcopy(model).eval()
        for module in plain.modules():
            if isinstance(module, NORMS) and module.running_mean is not None:
                module.register_forward_pre_hook(lambda _, args: read.append(args[0].clone()))
        plain(x)
        copy = deepcopy(model).eval()
        for name, parameter in copy.named_parameters():
            if name in set(names):
                parameter *= k
        before = iter(read)

        def follow(module: nn.Module, args: tuple[Tensor]) -> None:
            was, now = next(before), args[0]
            at = was.abs().flatten().argmax()
            factor = float(now.flatten()[at] / was.flatten()[at])
            if torch.allclose(now, factor * was, rtol=1e-9, atol=1e-12):
                buffers = dict(module.named_buffers())
                buffers["running_mean"] *= factor
                buffers["running_var"] *= factor**2

        for module in copy.modules():
            if isinstance(module, NORMS) and module.running_mean is not None:
                module.register_forward_pre_hook(follow)
        return copy(x)


def invariant(model: nn.Module, x: Tensor, names: Iterable[str], k: float = 3.0) -> bool:
    expected = scaled_outputs(model, x, (), 1.0)
    return torch.allclose(scaled_outputs(model, x, names, k), expected, rtol=1e-7, atol=1e-8)


# -- networks ----------------------------------------------------------------------------------------------------------


class Sum(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        return sum(part(x) for part in self.parts)  # pyright: ignore[reportReturnType]


class Residual(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Functional(nn.Module):
    """Norms as functions, with arguments in every order."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(6, 6))
        self.scale = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        h = F.layer_norm(input=x @ self.a, normalized_shape=(6,), weight=self.scale, eps=EPS)
        return F.layer_norm(F.silu(h) @ self.b, (6,), None, None, EPS)


class WrittenOut(nn.Module):
    """RMSNorm and LayerNorm in plain operations, as many language models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 6)
        self.scale, self.head = nn.Parameter(torch.ones(6)), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = self.scale * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS))
        h = self.second(F.gelu(h))
        h = (h - h.mean(-1, keepdim=True)) / (h.var(-1, keepdim=True) + EPS).sqrt()
        return self.head(F.gelu(h))


class Tied(nn.Module):
    """One layer, used twice, each time before a norm."""

    def __init__(self, head: bool) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.LayerNorm(4, EPS)
        self.last = self.layer if head else nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.layer(torch.tanh(self.norm(self.layer(x)))))))


class TwoReaders(nn.Module):
    """A layer that a norm reads, and something else as well."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.head = nn.Linear(4, 4), nn.LayerNorm(4, EPS), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return self.head(self.norm(h) + torch.tanh(h))


class Gated(nn.Module):
    """relu(h) * gate before a norm: either factor can be scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.gate = nn.Linear(4, 6), nn.Linear(4, 6)
        self.norm, self.head = nn.LayerNorm(6, EPS), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.value(x) * F.silu(self.gate(x))))


def encoder(pre: bool, activation: str = "relu") -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        4, 2, 6, batch_first=True, norm_first=pre, activation=activation, layer_norm_eps=EPS
    )
    end = [nn.LayerNorm(4, EPS)] if pre else []
    return nn.Sequential(nn.Linear(3, 4), layer, *end, nn.Flatten(), nn.Linear(12, 2))


VECTOR, IMAGE, SEQUENCE = (6, 4), (6, 1, 6, 6), (6, 3, 3)
_MLP = [("0.weight", "0.bias")]
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[tuple[str, ...]]]] = {
    "mlp, BatchNorm1d": (
        lambda: nn.Sequential(
            nn.Linear(4, 6), nn.BatchNorm1d(6, EPS), nn.ReLU(),
            nn.Linear(6, 5), nn.BatchNorm1d(5, EPS), nn.Tanh(), nn.Linear(5, 2),
        ),
        VECTOR, [("3.weight", "3.bias"), ("0.weight", "0.bias")],
    ),
    "affine=False, Dropout between": (
        lambda: nn.Sequential(
            nn.Linear(4, 6), nn.Dropout(), nn.BatchNorm1d(6, EPS, affine=False), nn.ReLU(), nn.Dropout(),
            nn.Linear(6, 2),
        ),
        VECTOR, _MLP,
    ),
    "cnn, BatchNorm2d: scale and shift of the first go through relu, pool and convolution into the second": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 3, 3, bias=False), nn.BatchNorm2d(3, EPS), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(3, 2, 2, bias=False), nn.BatchNorm2d(2, EPS), nn.LeakyReLU(), nn.Flatten(), nn.Linear(2, 2),
        ),
        IMAGE, [("4.weight",), ("1.weight", "1.bias"), ("0.weight",)],
    ),
    "residual block": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 3, padding=1, bias=False), nn.BatchNorm2d(2, EPS), nn.ReLU(),
            Residual(nn.Sequential(
                nn.Conv2d(2, 2, 3, padding=1, bias=False), nn.BatchNorm2d(2, EPS), nn.ReLU(inplace=True),
                nn.Conv2d(2, 2, 3, padding=1, bias=False), nn.BatchNorm2d(2, EPS),
            )),
            nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 2),
        ),
        IMAGE, [("3.body.3.weight",), ("3.body.1.weight", "3.body.1.bias"), ("3.body.0.weight",), ("0.weight",)],
    ),
    "pre-activation residual": (
        lambda: nn.Sequential(
            nn.Linear(4, 5),
            Residual(nn.Sequential(nn.LayerNorm(5, EPS), nn.GELU(), nn.Linear(5, 5))),
            Residual(nn.Sequential(nn.LayerNorm(5, EPS), nn.GELU(), nn.Linear(5, 5, bias=False))),
            nn.LayerNorm(5, EPS), nn.Linear(5, 2),
        ),
        VECTOR, [("0.weight", "0.bias", "1.body.2.weight", "1.body.2.bias", "2.body.2.weight")],
    ),
    "two convolutions added before one norm": (
        lambda: nn.Sequential(
            Sum(nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(1, 2, 1, bias=False)), nn.GroupNorm(1, 2, EPS), nn.GELU(),
            nn.Flatten(), nn.Linear(72, 2),
        ),
        IMAGE, [("0.parts.0.weight", "0.parts.0.bias", "0.parts.1.weight")],
    ),
    "data are added before the norm": (
        lambda: nn.Sequential(Residual(nn.Linear(4, 4)), nn.LayerNorm(4, EPS), nn.Linear(4, 2)), VECTOR, [],
    ),
    "pre-norm transformer: all that is written into the stream": (
        lambda: encoder(pre=True), SEQUENCE,
        [(
            "0.weight", "0.bias", "1.self_attn.out_proj.weight", "1.self_attn.out_proj.bias",
            "1.linear2.weight", "1.linear2.bias",
        )],
    ),
    "post-norm transformer with relu: the first norm, and biases with it": (
        lambda: encoder(pre=False), SEQUENCE, [("1.linear1.bias", "1.linear2.bias", "1.norm1.weight", "1.norm1.bias")],
    ),
    "post-norm transformer with gelu": (lambda: encoder(pre=False, activation="gelu"), SEQUENCE, []),
    "GroupNorm, nested": (
        lambda: nn.Sequential(
            nn.Sequential(nn.Sequential(nn.Conv2d(1, 4, 3), nn.AvgPool2d(2)), nn.GroupNorm(2, 4, EPS)), nn.SiLU(),
            nn.Flatten(), nn.Linear(16, 2),
        ),
        IMAGE, [("0.0.0.weight", "0.0.0.bias")],
    ),
    "InstanceNorm2d": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 3, 3, bias=False), nn.InstanceNorm2d(3, EPS), nn.SiLU(), nn.Flatten(), nn.Linear(48, 2)
        ),
        IMAGE, [("0.weight",)],
    ),
    "InstanceNorm2d with running statistics": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.InstanceNorm2d(3, EPS, track_running_stats=True), nn.SiLU(), nn.Flatten(),
            nn.Linear(48, 2),
        ),
        IMAGE, _MLP,
    ),
    "RMSNorm": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.RMSNorm(6, EPS), nn.SiLU(), nn.Linear(6, 2)), VECTOR, _MLP,
    ),
    "norms written out": (
        WrittenOut, VECTOR, [("second.weight", "second.bias"), ("first.weight", "first.bias")],
    ),
    "functional": (Functional, VECTOR, [("b",), ("a",)]),
    "no norm": (lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), VECTOR, []),
    "the norm reads data alone": (lambda: nn.Sequential(nn.LayerNorm(4, EPS), nn.Linear(4, 2)), VECTOR, []),
    "linear maps one after the other": (
        lambda: nn.Sequential(
            nn.Linear(4, 5), nn.Linear(5, 5, bias=False), nn.ReLU(), nn.Linear(5, 5, bias=False),
            nn.LayerNorm(5, EPS), nn.Linear(5, 2),
        ),
        VECTOR, [("3.weight",), ("1.weight",), ("0.weight", "0.bias")],
    ),
    "a bias behind holds the layer before": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 5), nn.LayerNorm(5, EPS), nn.Linear(5, 2)),
        VECTOR, [("2.weight", "2.bias")],
    ),
    "one layer used twice": (lambda: Tied(head=False), VECTOR, [("layer.weight", "layer.bias")]),
    "one layer, also the head": (lambda: Tied(head=True), VECTOR, []),
    "a second reader": (TwoReaders, VECTOR, []),
    "gated": (Gated, VECTOR, [("value.weight", "value.bias")]),
    "weight norm": (
        lambda: nn.Sequential(weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 2)),
        VECTOR, [("0.parametrizations.weight.original1",)],
    ),
    "prelu": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.PReLU(), nn.LayerNorm(5, EPS), nn.Linear(5, 2)), VECTOR, _MLP,
    ),
    "threshold": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Threshold(0.0, 0.0), nn.LayerNorm(5, EPS), nn.Linear(5, 2)),
        VECTOR, _MLP,
    ),
    "a threshold that is not zero": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Threshold(0.5, 0.0), nn.LayerNorm(5, EPS), nn.Linear(5, 2)),
        VECTOR, [],
    ),
}  # fmt: skip


def made(case: str) -> tuple[nn.Module, Tensor]:
    build, shape, _ = CASES[case]
    x = torch.randn(shape)
    return trained(build(), x), x


@pytest.mark.parametrize("case", CASES)
def test_groups_are_what_can_be_scaled(case: str) -> None:
    """The expected sets; each leaves the outputs alone for several factors, and no part of it does."""
    model, x = made(case)
    with unchanged(model):
        found = scale_invariant_groups(model, x)
    assert [group.parameters for group in found] == CASES[case][2]
    for group in found:
        assert all(invariant(model, x, group.parameters, k) for k in (0.1, 3.0))
        assert group.change < 1e-10
        assert group.change_by_eps < 1e-8
        assert group.norms
        for name in group.parameters:
            part = set(group.parameters) - {name}
            assert not part or not invariant(model, x, part)
    in_groups = {name for group in found for name in group.parameters}
    names = [name for name, _ in model.named_parameters()]
    assert list(found.remaining) == [name for name in names if name not in in_groups]
    assert all(found.remaining.values())


@pytest.mark.parametrize("case", [name for name in CASES if "transformer" not in name and "residual" not in name])
def test_nothing_is_left_that_could_be_scaled(case: str) -> None:
    """Of the parameters that are in no group, no set whatever can be scaled."""
    model, x = made(case)
    left = list(scale_invariant_groups(model, x).remaining)
    for size in range(1, min(len(left), 3) + 1):
        for names in combinations(left, size):
            assert not invariant(model, x, names), names


def test_derivatives_along_a_group_vanish() -> None:
    """J theta = 0 for a norm without running statistics, and not for a part of the group."""
    model, x = made("pre-activation residual")
    (group,) = scale_invariant_groups(model, x)
    names, values = zip(*((name, p.detach()) for name, p in model.named_parameters()), strict=True)

    def slope(moved: tuple[str, ...]) -> float:
        def outputs(*given: Tensor) -> Tensor:
            return torch.func.functional_call(model, dict(zip(names, given, strict=True)), (x,))

        along = tuple(value * (name in moved) for name, value in zip(names, values, strict=True))
        pushed = torch.autograd.functional.jvp(outputs, values, along)[1]
        assert isinstance(pushed, Tensor)
        return float(pushed.abs().max())

    assert slope(group.parameters) < 1e-9
    assert slope(group.parameters[1:]) > 1e-3


@pytest.mark.parametrize(
    ("case", "name", "words"),
    [
        ("a second reader", "layer.weight", "tanh"),
        ("no norm", "0.weight", "outputs"),
        ("data are added before the norm", "0.body.weight", "add in '0'"),
        ("pre-norm transformer: all that is written into the stream", "1.self_attn.in_proj_weight", "softmax"),
        ("a bias behind holds the layer before", "0.weight", "'2.bias' would have to scale with it, and does not"),
        ("mlp, BatchNorm1d", "4.weight", "tanh in '5'"),
    ],
)
def test_reasons(case: str, name: str, words: str) -> None:
    model, x = made(case)
    assert words in scale_invariant_groups(model, x).remaining[name]


def test_norms_are_named() -> None:
    model, x = made("mlp, BatchNorm1d")
    found = scale_invariant_groups(model, x)
    assert [group.norms for group in found] == [("batch_norm in '4'",), ("batch_norm in '1'",)]
    assert "batch_norm in '4'" in str(found)


# -- what the operations seem to say, and a run does not bear out ----------------------------------------------------


class Masked(nn.Module):
    """A comparison has no gradient, and is not on the record."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.head = nn.Linear(4, 6), nn.LayerNorm(6, EPS), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return self.head(self.norm(h * (h > 0.7)))


class Hidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.tanh()

    @staticmethod
    def backward(ctx, *grads: Tensor) -> Tensor:
        return grads[0]


class Unseen(nn.Module):
    """An operation that no record shows, before a norm, and a layer that can be seen after it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.second = nn.Linear(4, 6), nn.Linear(6, 6)
        self.norm, self.head = nn.LayerNorm(6, EPS), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.second(Hidden.apply(self.layer(x)))))  # pyright: ignore


def test_a_run_has_the_last_word() -> None:
    x = torch.randn(6, 4)
    model = trained(Masked(), x)
    found = scale_invariant_groups(model, x)
    assert not len(found)
    assert "changes the outputs by" in found.remaining["layer.weight"]
    assert not invariant(model, x, ["layer.weight", "layer.bias"])


def test_what_cannot_be_seen_is_in_no_group() -> None:
    x = torch.randn(6, 4)
    found = scale_invariant_groups(Unseen(), x)
    assert [group.parameters for group in found] == [("second.weight", "second.bias")]
    assert "cannot be seen" in found.remaining["layer.weight"]


def test_a_large_eps_is_no_norm() -> None:
    """Half and double the weights, with eps as it is; how much it may explain is for the user to say."""
    x = torch.randn(6, 4)
    for eps, count in ((1e-5, 1), (3.0, 0)):
        model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6, eps), nn.Tanh(), nn.Linear(6, 2))
        found = scale_invariant_groups(model, x)
        assert len(found) == count
        if count:
            (group,) = found
            expected = scaled_outputs(model, x, (), 1.0)
            spread = (expected - expected.mean(0)).abs().max()
            change = max((scaled_outputs(model, x, group.parameters, k) - expected).abs().max() for k in (0.5, 2.0))
            torch.testing.assert_close(torch.tensor(group.change_by_eps), change / spread)
            assert group.change < 1e-12
            assert not len(scale_invariant_groups(model, x, tolerance=group.change_by_eps / 2))
        else:
            assert "with eps as it is" in found.remaining["0.weight"]
            assert len(scale_invariant_groups(model, x, tolerance=10.0)) == 1


def test_float32_is_exact_too() -> None:
    """Powers of two scale without rounding."""
    x = torch.randn(6, 1, 6, 6, dtype=torch.float32)
    build = CASES["residual block"][0]
    found = scale_invariant_groups(trained(build().float(), x), x)
    assert [group.parameters for group in found] == CASES["residual block"][2]
    assert max(group.change for group in found) < 1e-6


def test_frozen_parameters_are_constants() -> None:
    x = torch.randn(6, 4)
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6, EPS), nn.Linear(6, 2))
    model[0].weight.requires_grad_(False)
    found = scale_invariant_groups(model, x)
    assert not len(found)
    assert list(found.remaining) == ["0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]


def test_modes_and_hooks_stay() -> None:
    """In train mode, with hooks of the user's, and in inference mode, the answer is the same and the model too."""
    model, x = made("mlp, BatchNorm1d")
    calls: list[int] = []
    layers = list(model.children())
    layers[0].register_forward_hook(lambda *_: calls.append(1))
    model.train()
    layers[2].eval()
    with unchanged(model), torch.inference_mode():
        found = scale_invariant_groups(model, x)
    assert [group.parameters for group in found] == CASES["mlp, BatchNorm1d"][2]
    assert calls


def test_a_bias_that_a_norm_takes_away() -> None:
    """It has no effect at all, and is scaled with its weight."""
    x = torch.randn(IMAGE)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.InstanceNorm2d(2, EPS), nn.Tanh(), nn.Flatten(), nn.Linear(32, 2))
    assert invariant(model, x, ["0.bias"])
    (group,) = scale_invariant_groups(model, x)
    assert group.parameters == ("0.weight", "0.bias")


def test_batch_statistics() -> None:
    """A norm that has no running statistics normalises by the batch, and is invariant without more."""
    x = torch.randn(6, 4)
    model = nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6, EPS, track_running_stats=False), nn.Tanh(), nn.Linear(6, 2)
    )
    found = scale_invariant_groups(model, x)
    assert [group.parameters for group in found] == _MLP


# -- errors, and what becomes of the groups --------------------------------------------------------------------------


def test_bad_input() -> None:
    model, x = made("mlp, BatchNorm1d")
    with pytest.raises(DataError, match="NaN or infinite"):
        scale_invariant_groups(model, torch.full((3, 4), float("nan")))
    with pytest.raises(ModelError, match="forward pass"):
        scale_invariant_groups(model, torch.randn(3, 5))
    with pytest.raises(ParameterError, match="tolerance is 0"):
        scale_invariant_groups(model, x, tolerance=0)
    with pytest.raises(OptionError, match="unknown rest 'both'"):
        scale_invariant_groups(model, x).partition("both")


def test_partition() -> None:
    model, x = made("mlp, BatchNorm1d")
    found = scale_invariant_groups(model, x)
    rest = ("1.weight", "1.bias", "4.weight", "4.bias", "6.weight", "6.bias")
    groups = (("3.weight", "3.bias"), ("0.weight", "0.bias"))
    assert found.partition() == lapwing.PriorGroups((*groups, rest), "scale_invariant")
    assert found.partition("tensor").members == (*groups, *((name,) for name in rest))


def norm_calls() -> dict[str, tuple[Callable, tuple, dict]]:
    """Calls of every norm: (function, arguments after the input, keywords); with an eps of their own, and without."""
    mean, var, weight = torch.randn(3), torch.rand(3) + 0.5, torch.randn(3)
    found: dict[str, tuple[Callable, tuple, dict]] = {}
    for eps in (None, 0.7):
        own = {} if eps is None else {"eps": eps}
        found |= {
            f"batch_norm, {eps}": (F.batch_norm, (mean, var, weight), own),
            f"batch_norm by keyword, {eps}": (F.batch_norm, (), {"running_mean": mean, "running_var": var} | own),
            f"batch_norm by its batch, {eps}": (F.batch_norm, (None, None), {"training": True} | own),
            f"instance_norm, {eps}": (F.instance_norm, (), own),
            f"layer_norm, {eps}": (F.layer_norm, ((5,),), own),
            f"group_norm, {eps}": (F.group_norm, (3,), own),
            f"rms_norm, {eps}": (F.rms_norm, ((5,),), own),
            f"torch.layer_norm, {eps}": (torch.layer_norm, ((5,),), own),
            f"torch.group_norm, {eps}": (torch.group_norm, (3,), own),
            f"torch.rms_norm, {eps}": (torch.rms_norm, ((5,),), own),
            f"normalize, {eps}": (F.normalize, (), own | {"dim": -1}),
        }
    found["batch_norm by position"] = F.batch_norm, (mean, var, weight, None, False, 0.1, 0.7), {}
    found["layer_norm by position"] = F.layer_norm, ((5,), None, None, 0.7), {}
    return found


@pytest.mark.parametrize("name", [*norm_calls()])
def test_norms_of_scaled_inputs_with_a_scaled_eps_are_those_of_the_inputs(name: str) -> None:
    """The eps of each, given or torch's own, counts: inputs are small, so that it decides."""
    func, args, kwargs = norm_calls()[name]
    eps = {"normalize": 1e-12, "rms_norm": torch.finfo(torch.float64).eps}.get(
        name.partition(",")[0].removeprefix("torch."), 1e-5
    )
    size = 0.1 if name.endswith("0.7") or "position" in name else (eps / 10 if "normalize" in name else eps**0.5)
    x = torch.randn(2, 3, 5) * size
    expected = func(x, *args, **kwargs)
    as_if_none = torch.allclose(expected, func(3 * x, *args, **kwargs), rtol=1e-2)
    with _Scaled({0: 3.0}):
        found = func(3 * x, *args, **kwargs)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert "batch_norm" in name or not as_if_none


def test_only_the_norm_whose_number_is_given_is_scaled() -> None:
    x = torch.randn(4, 5)
    for site in (0, 1):
        with _Scaled({site: 3.0}):
            found = [F.layer_norm(3 * x, (5,), eps=0.7) for _ in range(2)]
        expected = [F.layer_norm(x if number == site else 3 * x, (5,), eps=0.7) for number in range(2)]
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "clamp", [lambda x, eps: x.clamp(eps), lambda x, eps: x.clamp(min=eps), lambda x, eps: x + eps]
)
def test_an_eps_that_is_written_out_is_scaled_unless_all_is_left_as_it_is(clamp: Callable) -> None:
    x = torch.rand(6) * 1e-4
    plain, scaled = clamp(3 * x, 5e-5), 3 * clamp(x, 5e-5)
    assert not torch.allclose(plain, scaled)
    with _Scaled({0: 3.0}):
        torch.testing.assert_close(clamp(3 * x, 5e-5), scaled, rtol=1e-9, atol=0)
    with _Scaled({0: 3.0}, as_it_is=True):
        torch.testing.assert_close(clamp(3 * x, 5e-5), plain, rtol=1e-9, atol=0)
