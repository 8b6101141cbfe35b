"""Wrong input is refused with what was found, what was expected and the remedy; and the model stays as it was.

Each row of `WRONG` is one mistake: a model, a likelihood and batches, the error, and words that its message has to
hold, in this order. Every estimator that the mistake concerns has to give the same answer.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lapwing import estimate
from lapwing.errors import (
    DataError,
    LapwingError,
    LikelihoodError,
    ModelError,
    ParameterError,
    UnsupportedOperationError,
)
from lapwing.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, Poisson, from_function
from lapwing.tangent import Tangent
from unchanged import unchanged

EVERY = {
    "full": estimate.full,
    "diagonal": estimate.diagonal,
    "blocks": estimate.blocks,
    "kflr": estimate.kflr,
    "kfac": estimate.kfac,
    "empirical": estimate.empirical,
    "hessian": estimate.hessian,
}
REFUSING = {
    "strict kflr": partial(estimate.kflr, on_unsupported="error"),
    "strict kfac": partial(estimate.kfac, on_unsupported="error"),
    "strict ekfac": partial(estimate.ekfac, on_unsupported="error"),
}
STRICT = ("strict kflr", "strict kfac", "strict ekfac")


@dataclass(frozen=True)
class Wrong:
    """One mistake. `make` returns (model, likelihood, batches); `words` are looked for in this order."""

    name: str
    make: Callable[[], tuple[nn.Module, Likelihood, Iterable[Any]]]
    error: type[LapwingError]
    words: tuple[str, ...]
    only: tuple[str, ...] = tuple(EVERY)


def net(*extra: nn.Module, outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 4), *extra, nn.Tanh(), nn.Linear(4, outputs))


def batch(seed: int = 0, size: int = 4) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(size, 2, generator=g), torch.arange(size) % 3


def three(second: Any) -> list[Any]:
    """Three batches, the one in the middle wrong."""
    return [batch(0), second, batch(2)]


def with_model(model: nn.Module) -> tuple[nn.Module, Likelihood, Iterable[Any]]:
    return model, Categorical(), [batch()]


def with_target(likelihood: Likelihood, good: Tensor, bad: Tensor, outputs: int = 1):
    x, _ = batch()
    return net(outputs=outputs), likelihood, [(x, good), (x, bad), (x, good)]


def spoiled(value: float) -> Tensor:
    x, _ = batch(1)
    x[2, 1] = value
    return x


class Forward(nn.Module):
    """A linear layer, and whatever `body(self, hidden)` makes of its output."""

    def __init__(self, body: Callable[[Any, Tensor], Any], **children: Any) -> None:
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.body = body
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, x: Tensor) -> Any:
        return self.body(self, self.first(x))


def nan_weights() -> nn.Module:
    model = net()
    with torch.no_grad():
        model[0].weight[1, 1] = float("nan")
    return model


def attention(dropout: float) -> nn.Module:
    layer = nn.MultiheadAttention(4, 2, dropout=dropout, batch_first=True)
    head = nn.Linear(4, 3)

    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.layer, self.head = nn.Linear(2, 4), layer, head

        def forward(self, x: Tensor) -> Tensor:
            tokens = self.up(x).unsqueeze(1).expand(-1, 3, -1)
            return self.head(self.layer(tokens, tokens, tokens, need_weights=False)[0].mean(1))

    return Attend()


class Recurrent(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.rnn = nn.LSTM(1, 3, num_layers=2, dropout=dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x.unsqueeze(-1))[0][:, -1]


class Hidden(torch.autograd.Function):
    """x * w behind a custom function, which a mode does not see."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad * w, (grad * x).sum(0)


def hidden() -> nn.Module:
    return Forward(lambda self, h: Hidden.apply(h, self.w), w=parameter(3))


def scripted() -> nn.Module:
    """Compiled to TorchScript, inside which a mode sees nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that TorchScript is old
        return torch.jit.script(net())


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def batch_norm_alone() -> nn.Module:
    return net(nn.BatchNorm1d(4, track_running_stats=False)).eval()


def branching(threshold: float) -> nn.Module:
    """Another layer where the largest hidden number is beyond a threshold."""

    def body(self: Any, h: Tensor) -> Tensor:
        return self.left(h) if float(h.detach().abs().max()) > threshold else torch.tanh(self.right(self.right(h)))

    return Forward(body, left=nn.Linear(3, 3), right=nn.Linear(3, 3))


def _coin(self: Any, h: Tensor) -> Tensor:
    """One way or the other by a digit of one data point."""
    return self.a(h) if int(h.detach()[2].sum().abs() * 1e4) % 2 else torch.relu(self.a(self.a(h)))


def on_meta(model: nn.Module) -> tuple[nn.Module, Likelihood, Iterable[Any]]:
    return model.to("meta"), Categorical(), [batch()]


WRONG = [
    # data
    Wrong("no batch", lambda: (net(), Categorical(), []), DataError, ("no batch", "expected at least one", "Check")),
    Wrong("used up", lambda: (net(), Categorical(), iter(())), DataError, ("no batch", "expected", "Check")),
    Wrong(
        "an empty batch",
        lambda: (net(), Categorical(), three((torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64)))),
        DataError,
        ("batch 1:", "empty", "0 rows", "expected at least one", "Drop"),
    ),
    *(
        Wrong(
            f"an input that is {value}",
            lambda value=value: (net(), Categorical(), three((spoiled(value), batch(1)[1]))),
            DataError,
            ("batch 1:", "NaN or infinite", "data point 2", "expected finite", "Remove or impute"),
        )
        for value in (float("nan"), float("inf"), -float("inf"))
    ),
    Wrong(
        "one pair instead of a list of pairs",
        lambda: (net(), Categorical(), batch()),
        DataError,
        ("batch 0:", "a Tensor", "expected a pair", "[(x, y)]"),
    ),
    Wrong(
        "a batch of three",
        lambda: (net(), Categorical(), three((*batch(), None))),
        DataError,
        ("batch 1:", "a tuple of length 3", "expected a pair (inputs, targets)"),
    ),
    Wrong(
        "a batch that is a mapping",
        lambda: (net(), Categorical(), three({"x": batch()[0]})),
        DataError,
        ("batch 1:", "a dict", "expected a pair (inputs, targets)"),
    ),
    Wrong(
        "an input that is no tensor",
        lambda: (net(), Categorical(), three(([[0.0, 1.0]], batch()[1]))),
        DataError,
        ("batch 1:", "no tensor", "list", "expected a tensor"),
    ),
    Wrong(
        "a target that is no tensor",
        lambda: (net(), Categorical(), three((batch()[0], [0, 1, 2, 0]))),
        DataError,
        ("batch 1:", "list", "expected a tensor", "torch.as_tensor"),
    ),
    Wrong(
        "data on another device",
        lambda: (net(), Categorical(), three((batch()[0].to("meta"), batch()[1]))),
        ModelError,
        ("batch 1:", "meta", "cpu", "expected one device", "Move"),
    ),
    Wrong(
        "a model without values",
        lambda: on_meta(net()),
        ModelError,
        ("parameters lie on meta", "no values", "expected", "device", "to_empty"),
    ),
    Wrong(
        "targets on another device",
        lambda: (net(), Categorical(), three((batch()[0], batch()[1].to("meta")))),
        LikelihoodError,
        ("batch 1:", "targets on meta", "expected one device", "remedy"),
    ),
    Wrong(
        "inputs in another precision",
        lambda: (net(), Categorical(), three((batch()[0].double(), batch()[1]))),
        ModelError,
        ("batch 1:", "forward pass of Sequential failed", "(4, 2) torch.float64", "expected", "Check its shape, dtype"),
    ),
    Wrong(
        "inputs of another width",
        lambda: (net(), Categorical(), three((torch.randn(4, 5), batch()[1]))),
        ModelError,
        ("batch 1:", "forward pass of Sequential failed", "(4, 5)", "expected", "Check its shape"),
    ),
    # targets
    Wrong(
        "float labels",
        lambda: with_target(Categorical(), torch.tensor([0, 1, 2, 0]), torch.tensor([0.0, 1, 2, 0]), 3),
        LikelihoodError,
        ("batch 1:", "float32", "expected", "int64", "remedy", "y.long()"),
    ),
    Wrong(
        "labels out of range",
        lambda: with_target(Categorical(), torch.tensor([0, 1, 2, 0]), torch.tensor([0, 1, 3, 0]), 3),
        LikelihoodError,
        ("batch 1:", "target 3 at index [2]", "expected", "0 to 2", "remedy"),
    ),
    Wrong(
        "negative labels",
        lambda: with_target(Categorical(), torch.tensor([0, 1, 2, 0]), torch.tensor([0, 1, -1, 0]), 3),
        LikelihoodError,
        ("batch 1:", "target -1", "expected", "0 to 2", "remedy", "ignore_index"),
    ),
    Wrong(
        "[B] targets for [B, 1] outputs",
        lambda: with_target(Gaussian(), torch.zeros(4, 1), torch.zeros(4)),
        LikelihoodError,
        ("batch 1:", "(4,)", "(4, 1)", "expected", "remedy", "y.unsqueeze(1)"),
    ),
    Wrong(
        "targets for other points",
        lambda: with_target(Gaussian(), torch.zeros(4, 1), torch.zeros(3, 1)),
        LikelihoodError,
        ("batch 1:", "(3, 1)", "expected (4, 1)", "remedy"),
    ),
    Wrong(
        "a missing target",
        lambda: with_target(Gaussian(), torch.zeros(4, 1), torch.full((4, 1), float("nan"))),
        DataError,
        ("batch 1:", "target nan", "expected finite", "remedy", "impute"),
    ),
    Wrong(
        "Bernoulli targets of two",
        lambda: with_target(Bernoulli(), torch.zeros(4, 1), torch.full((4, 1), 2.0)),
        LikelihoodError,
        ("batch 1:", "target 2.0", "expected 0, 1", "remedy", "0 and 1"),
    ),
    Wrong(
        "negative counts",
        lambda: with_target(Poisson(), torch.zeros(4, 1), torch.full((4, 1), -1.0)),
        LikelihoodError,
        ("batch 1:", "target -1.0", "expected", "remedy"),
    ),
    # outputs and losses
    Wrong(
        "weights that are NaN",
        lambda: with_model(nan_weights()),
        DataError,
        ("batch 0:", "output", "NaN or infinite", "expected finite", "Check the weights"),
    ),
    *(
        Wrong(
            f"a loss that is {value}",
            lambda value=value: (
                net(outputs=1),
                from_function(
                    lambda f, y: torch.where(y.sum() > 0, value, (f - y).square().sum()),
                    lambda f, g: torch.zeros_like(f),
                ),
                [(batch()[0], torch.zeros(4, 1)), (batch()[0], torch.tensor([[0.0], [0.0], [1.0], [0.0]]))],
            ),
            DataError,
            ("batch 1:", "data point 2", str(-value), "expected finite", "Check"),
        )
        for value in (float("nan"), float("inf"))
    ),
    Wrong(
        "outputs without an output axis",
        lambda: with_model(Forward(lambda self, h: h.sum(1))),
        ModelError,
        ("batch 0:", "output has shape (4,)", "expected [batch, outputs]", "unsqueeze(-1)"),
    ),
    Wrong(
        "one output for the batch",
        lambda: with_model(Forward(lambda self, h: h.mean(0, keepdim=True))),
        ModelError,
        ("batch 0:", "expected"),
    ),
    Wrong(
        "outputs that are no tensor",
        lambda: with_model(Forward(lambda self, h: (h, h))),
        ModelError,
        ("batch 0:", "returns tuple", "expected a tensor", "Wrap"),
    ),
    # models
    Wrong(
        "no trainable parameter",
        lambda: with_model(net().requires_grad_(False)),
        ModelError,
        ("no trainable parameter", "needs at least one", "requires_grad_(True)"),
    ),
    Wrong(
        "a lazy module",
        lambda: with_model(nn.Sequential(nn.LazyLinear(3))),
        ModelError,
        ("'0.weight' is not initialised", "expected", "run the model once"),
    ),
    Wrong(
        "complex parameters",
        lambda: with_model(nn.Sequential(nn.Linear(2, 3, dtype=torch.complex64))),
        ModelError,
        ("'0.weight' has dtype torch.complex64", "expected a real", "view_as_real"),
    ),
    Wrong(
        "batch norm in train mode",
        lambda: with_model(net(nn.BatchNorm1d(4))),
        ModelError,
        ("batch 0:", "batch_norm", "train mode", "expected running statistics", "model.eval()"),
    ),
    Wrong(
        "batch norm without running statistics",
        lambda: with_model(batch_norm_alone()),
        ModelError,
        ("batch 0:", "batch_norm", "expected running statistics", "track_running_stats"),
    ),
    *(
        Wrong(
            f"{type(layer).__name__} in train mode",
            lambda layer=layer: with_model(net(layer)),
            ModelError,
            ("batch 0:", "dropout", "train mode", "expected a deterministic", "model.eval()"),
        )
        for layer in (nn.Dropout(0.5), nn.AlphaDropout(0.5), nn.FeatureAlphaDropout(0.5))
    ),
    Wrong(
        "dropout in attention",
        lambda: with_model(attention(0.5)),
        ModelError,
        ("batch 0:", "dropout", "expected a deterministic", "model.eval()"),
    ),
    Wrong(
        "dropout between recurrent layers",
        lambda: with_model(Recurrent(0.5)),
        ModelError,
        ("batch 0:", "dropout in lstm", "expected a deterministic", "model.eval()"),
    ),
    *(
        Wrong(
            f"noise in the forward pass, {size} points",
            lambda size=size: (
                Forward(lambda self, h: h + 0.1 * torch.randn_like(h)),
                Categorical(),
                [batch(size=size)],
            ),
            ModelError,
            ("batch 0:", "expected", "deterministic", "model.eval()", "random"),
        )
        for size in (1, 2, 4)
    ),
    Wrong(
        "random leaky slopes in train mode",
        lambda: with_model(net(nn.RReLU())),
        ModelError,
        ("batch 0:", "expected", "deterministic", "model.eval()"),
    ),
    Wrong(
        "points that are normalised together",
        lambda: with_model(Forward(lambda self, h: h - h.mean(0))),
        ModelError,
        ("batch 0:", "data point", "expected independent samples", "model.eval()", "over the batch axis"),
    ),
    Wrong(
        "points that attend to each other",
        lambda: with_model(Forward(lambda self, h: torch.softmax(h @ h.mT, -1) @ h)),
        ModelError,
        ("batch 0:", "data point", "expected independent samples", "model.eval()", "over the batch axis"),
    ),
    Wrong(
        "a choice made in Python",
        lambda: with_model(
            Forward(_coin, a=nn.Linear(3, 3)),
        ),
        ModelError,
        ("batch 0:", "control flow", "expected the same operations", "torch.where"),
    ),
    Wrong(
        "an embedding that renormalises",
        lambda: (
            nn.Sequential(nn.Embedding(5, 3, max_norm=0.1)),
            Categorical(),
            [(torch.arange(4), batch()[1])],
        ),
        UnsupportedOperationError,
        ("batch 0:", "max_norm", "expected", "without max_norm"),
    ),
    # operations that form no Kronecker product
    Wrong(
        "a custom function",
        lambda: with_model(hidden()),
        UnsupportedOperationError,
        ("'w'", "no Kronecker product", "expected", "full or diagonal"),
        STRICT,
    ),
    Wrong(
        "a scripted model",
        lambda: with_model(scripted()),
        UnsupportedOperationError,
        ("'0.weight'", "cannot be seen", "no Kronecker product", "expected", "full or diagonal"),
        STRICT,
    ),
    Wrong(
        "a weight that runs through a cumulative sum with data",
        lambda: with_model(
            Forward(lambda self, h: torch.hstack([h, self.w.expand(len(h), -1)]).cumsum(1)[:, 3:], w=parameter(3))
        ),
        UnsupportedOperationError,
        ("'w'", "'hstack'", "no Kronecker product", "expected", "full or diagonal"),
        STRICT,
    ),
    Wrong(
        "a product of weights that is too large for a dense block",
        lambda: with_model(Forward(lambda self, h: h @ (self.u @ self.v), u=parameter(3, 400), v=parameter(400, 3))),
        UnsupportedOperationError,
        ("'u'", "matmul", "1200 entries", "limit of 1024", "expected", "full or diagonal"),
        STRICT,
    ),
]


def holds(message: str, words: Iterable[str]) -> None:
    at = 0
    for word in words:
        found = message.find(word, at)
        assert found >= 0, f"no {word!r} (in this order) in: {message}"
        at = found + len(word)


@pytest.mark.parametrize(
    ("estimator", "wrong"),
    [pytest.param(name, wrong, id=f"{wrong.name}-{name}") for wrong in WRONG for name in wrong.only],
)
def test_a_mistake_is_named_and_leaves_the_model_alone(estimator: str, wrong: Wrong) -> None:
    torch.manual_seed(3)
    model, likelihood, batches = wrong.make()
    readable = not any(nn.parameter.is_lazy(p) or p.is_meta for p in model.parameters())
    estimate_it = (EVERY | REFUSING)[estimator]
    with unchanged(model) if readable else nullcontext(), pytest.raises(wrong.error) as caught:
        estimate_it(Tangent(model), likelihood, batches, generator=torch.Generator().manual_seed(0))
    holds(str(caught.value), wrong.words)


@pytest.mark.parametrize("estimator", EVERY)
@pytest.mark.parametrize("model", [Recurrent, hidden, scripted], ids=["recurrent", "custom function", "scripted"])
def test_what_no_rule_covers_every_structure_takes(estimator: str, model: Callable[[], nn.Module]) -> None:
    made = model().double()
    x, y = batch()
    found = EVERY[estimator](Tangent(made), Categorical(), [(x.double(), y)])
    assert bool((found.diagonal() != 0).all())


# -- exceptions that are not ours -----------------------------------------------------------------------------------


class Stops(nn.Module):
    """Counts its calls in a buffer, mixes a running mean, and raises in call number `at`, half way."""

    def __init__(self, at: int, error: BaseException) -> None:
        super().__init__()
        self.first, self.attend, self.last = (
            nn.Linear(2, 4),
            nn.MultiheadAttention(4, 2, batch_first=True),
            nn.Linear(4, 3),
        )
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(4))
        self.at, self.error = at, error
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(1)
        self.calls += 1
        h = self.first(x)
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        tokens = h.unsqueeze(1)
        self.eval()
        h = self.attend(tokens, tokens, tokens)[0][:, 0]
        if len(self.seen) == self.at:
            raise self.error
        self.train()
        return self.last(h)


@pytest.mark.parametrize("estimator", EVERY)
@pytest.mark.parametrize("error", [ZeroDivisionError("mine"), KeyboardInterrupt(), AssertionError("mine")], ids=repr)
@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_exception_half_way_leaves_no_trace(estimator: str, error: BaseException, at: int) -> None:
    """Buffers written before it, train flags, the fast path of attention and torch's own switches are put back."""
    model = Stops(at, error)
    with unchanged(model), pytest.raises(type(error)) as caught:
        EVERY[estimator](Tangent(model), Categorical(), [batch(), batch(1), batch(2, size=3)])
    assert caught.value is error


@pytest.mark.parametrize("estimator", EVERY)
@pytest.mark.parametrize("at", [1, 4])
def test_a_torch_error_in_the_forward_pass_is_wrapped_and_leaves_no_trace(estimator: str, at: int) -> None:
    model = Stops(at, RuntimeError("sizes"))
    with unchanged(model), pytest.raises(ModelError, match=r"forward pass of Stops failed.*sizes"):
        EVERY[estimator](Tangent(model), Categorical(), [batch(), batch(1)])


@pytest.mark.parametrize("estimator", EVERY)
def test_a_choice_made_by_a_whole_batch_is_followed(estimator: str) -> None:
    """The first batch and its probe go one way, the second of the same shape goes the other, with other parameters."""
    torch.manual_seed(1)
    x, y = batch()[0], torch.zeros(4, 3)
    model, pairs = branching(50.0), [(x, y), (1000 * x, y)]
    both = EVERY[estimator](Tangent(model), Gaussian(), pairs, generator=torch.Generator().manual_seed(0))
    g = torch.Generator().manual_seed(0)
    each = [EVERY[estimator](Tangent(model), Gaussian(), [pair], generator=g) for pair in pairs]
    left, right = (Tangent(model).space.segment(f"{side}.weight") for side in ("left", "right"))
    for part, alone in ((left, each[1]), (right, each[0])):
        assert bool((alone.diagonal()[part] != 0).any())
        torch.testing.assert_close(both.diagonal()[part], alone.diagonal()[part])


@pytest.mark.parametrize("estimator", EVERY)
def test_a_loader_that_fails_half_way_leaves_no_trace(estimator: str) -> None:
    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        yield batch()
        raise OSError("disk")

    model = net()
    with unchanged(model), pytest.raises(OSError, match="disk"):
        EVERY[estimator](Tangent(model), Categorical(), batches())


@pytest.mark.parametrize("estimator", EVERY)
def test_gradients_modes_and_hooks_survive_a_good_pass(estimator: str) -> None:
    model = Stops(0, RuntimeError())
    model.last.weight.grad = torch.ones_like(model.last.weight)
    model.first.register_forward_hook(lambda module, inputs, output: output * 1.0)
    model.first.bias.requires_grad_(False)
    with unchanged(model):
        EVERY[estimator](Tangent(model), Categorical(), [batch(), batch(1)])


@pytest.mark.parametrize("estimator", EVERY)
def test_the_mode_of_the_caller_makes_no_difference(estimator: str) -> None:
    model = net()
    expected = EVERY[estimator](
        Tangent(model), Categorical(), [batch()], generator=torch.Generator().manual_seed(0)
    ).diagonal()
    with torch.no_grad():
        found = EVERY[estimator](Tangent(model), Categorical(), [batch()], generator=torch.Generator().manual_seed(0))
    assert torch.equal(found.diagonal(), expected)
    with torch.inference_mode():
        found = EVERY[estimator](Tangent(model), Categorical(), [batch()], generator=torch.Generator().manual_seed(0))
        assert torch.equal(found.diagonal(), expected)


# -- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda *a: estimate.empirical(*a, structure="round"), ("'round'", "expected one of", "diagonal", "kron")),
        (lambda *a: estimate.hessian(*a, structure="round"), ("'round'", "expected 'full', 'diagonal' or 'blocks'")),
        (lambda *a: estimate.kflr(*a, sharing="half"), ("'half'", "expected 'expand' or 'reduce'")),
        (lambda *a: estimate.kfac(*a, sharing="half"), ("'half'", "expected 'expand' or 'reduce'")),
        (lambda *a: estimate.blocks(*a, by="colour"), ("'colour'", "expected 'tensor' or 'layer'")),
        (lambda *a: estimate.kfac(*a, samples=-1), ("samples is -1", "expected at least 1")),
        (lambda *a: estimate.kfac(*a, samples=0), ("samples is 0", "expected at least 1")),
        (lambda *a: estimate.kflr(*a, dense_limit=-1), ("dense_limit is -1", "expected")),
        (lambda *a: estimate.kflr(*a, damping=True), ("'damping'", "expected", "factored_damping")),
        (lambda *a: estimate.empirical(*a, structure="kron", colour=1), ("'colour'", "expected", "sharing")),
        (lambda *a: estimate.empirical(*a, structure="diagonal", by="layer"), ("'by'", "expected")),
    ],
)
def test_unknown_options_are_refused(call: Callable[..., Any], words: tuple[str, ...]) -> None:
    model = net()
    with unchanged(model), pytest.raises((DataError, ParameterError)) as caught:
        call(Tangent(model), Categorical(), [batch()])
    holds(str(caught.value), words)


def test_a_sub_network_by_mask_has_no_kronecker_blocks() -> None:
    tangent = Tangent(net())
    smaller = Tangent(tangent.model, tangent.space.select(mask=torch.arange(5)))
    with pytest.raises(ParameterError, match=r"mask cuts through.*expected whole tensors. Select by name.*diagonal"):
        estimate.kflr(smaller, Categorical(), [batch()])


def test_a_space_of_another_model_is_refused() -> None:
    other = Tangent(nn.Linear(2, 3)).space
    with pytest.raises(ParameterError, match=r"'weight'.*expected.*0\.weight"):
        Tangent(net(), other)
    with pytest.raises(ParameterError, match=r"'0\.weight' has shape.*expected"):
        Tangent(net(), Tangent(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Tanh(), nn.Linear(4, 3))).space)


def test_vectors_that_do_not_fit_a_linearisation_are_refused() -> None:
    linear_map = Tangent(net()).at(batch()[0])
    with pytest.raises(ParameterError, match=r"shape \(3,\); expected last axis 27"):
        linear_map.mv(torch.ones(3))
    with pytest.raises(DataError, match=r"cotangent.*\(4, 2\).*expected.*\(4, 3\)"):
        linear_map.rmv(torch.ones(4, 2))


def test_every_message_has_been_looked_at() -> None:
    """No row may be satisfied by a message that torch wrote: each looks for an expectation."""
    assert all(any(re.search("expect|needs|no Kronecker|limit", word) for word in wrong.words) for wrong in WRONG)
