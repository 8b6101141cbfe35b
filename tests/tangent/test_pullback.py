"""V^T J with all cotangents at once: against autograd, one cotangent at a time; and what autograd alone can do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from lapwing.tangent import Tangent, pullback
from lapwing.tangent.pullback import RULES, pulled_back

torch.manual_seed(7)
WEIGHT, FACTOR = torch.randn(6, 6).double(), torch.randn(6).double()
INDEX = torch.tensor([[0, 2, 1], [1, 1, 0]])

VECTORS: dict[str, Callable[[Tensor], Tensor]] = {  # of [4, 6]
    "relu": F.relu,
    "relu_": lambda z: z.clone().relu_(),
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "square": torch.square,
    "neg": torch.neg,
    "leaky_relu": F.leaky_relu,
    "prelu": lambda z: F.prelu(z, FACTOR.abs()[:1]),
    "clamp": lambda z: z.clamp(-0.5, 0.5),
    "abs": torch.abs,
    "glu": F.glu,
    "cumsum": lambda z: z.cumsum(1),
    "amax": lambda z: z.amax(1),
    "softmax": lambda z: z.softmax(-1),
    "softmax of data points": lambda z: z.softmax(0),
    "log_softmax": lambda z: z.log_softmax(1),
    "layer_norm": lambda z: F.layer_norm(z, (6,), FACTOR, FACTOR),
    "rms_norm": lambda z: F.rms_norm(z, (6,), FACTOR),
    "linear": lambda z: F.linear(z, WEIGHT, FACTOR),
    "mm": lambda z: z @ WEIGHT,
    "addmm": lambda z: torch.addmm(FACTOR, z, WEIGHT, beta=2, alpha=0.5),
    "addmm of all": lambda z: torch.addmm(z.exp(), z, z.t() @ z, beta=2, alpha=0.5),
    "product on the left": lambda z: WEIGHT[:, :4] @ z,
    "einsum": lambda z: torch.einsum("n i, j i -> j n", z, WEIGHT),
    "t": lambda z: z.t(),
    "mul": lambda z: z * FACTOR,
    "number": lambda z: 2.5 * z,
    "mul by itself": lambda z: z * z,
    "mul by a column": lambda z: z * z[:, :1],
    "mul of more": lambda z: z[0] * z,
    "add": lambda z: torch.add(z, z.exp(), alpha=0.5),
    "add a number": lambda z: z + 1,
    "add a row": lambda z: z + z[1],
    "sub": lambda z: torch.sub(z, z.exp(), alpha=0.5),
    "1 - z": lambda z: 1 - z,
    "div": lambda z: z / (2 + z.tanh()),
    "div by a number": lambda z: z / 3,
    "pow": lambda z: z**3,
    "sum": torch.sum,
    "sum of an axis": lambda z: z.sum(-1),
    "sum kept": lambda z: z.sum(0, keepdim=True),
    "mean": torch.mean,
    "mean of an axis": lambda z: z.mean(1),
    "means": lambda z: z.mean((0, -1), keepdim=True),
    "var": lambda z: z.var(1),
    "select": lambda z: z[:, -2],
    "slice": lambda z: z[1:, 1:-1:2],
    "index": lambda z: z[[2, 0, 0]],
    "gather": lambda z: z.gather(1, INDEX),
    "where": lambda z: torch.where(z > 0, z, z.exp()),
    "masked_fill": lambda z: z.masked_fill(z > 0, 0.0),
    "cat": lambda z: torch.cat([z, z.exp()], -1),
    "cat with data": lambda z: torch.cat([WEIGHT[:4], z], 1),
    "cat with two of data": lambda z: torch.cat([WEIGHT[:4], z, WEIGHT[:4]], 1),
    "stack": lambda z: torch.stack([z, z.exp()], 1),
    "split": lambda z: z.split(4, 1)[1] * z.split(4, -1)[0][:, :2],
    "sizes": lambda z: z.split([1, 5], 1)[1],
    "chunk": lambda z: torch.mul(*z.chunk(2, 1)),
    "unbind": lambda z: z.unbind(1)[2] * z.unbind(-1)[0],
    "one of unbind": lambda z: z.unbind(0)[1],
    "view": lambda z: z.view(2, 2, 6),
    "flatten": lambda z: z.t().flatten(),
    "unsqueeze": lambda z: z.unsqueeze(1),
    "squeeze": lambda z: z[:, :1].squeeze(1),
    "squeeze all": lambda z: z[:1].squeeze(),
    "expand": lambda z: z.unsqueeze(1).expand(4, 3, 6),
    "repeat": lambda z: z.repeat(2, 1),
    "transpose": lambda z: z.view(4, 2, 3).transpose(-1, 0),
    "permute": lambda z: z.view(4, 2, 3).permute(2, 0, 1),
    "movedim": lambda z: z.view(4, 2, 3).movedim(-1, 0),
    "flip": lambda z: z.flip(1),
    "roll": lambda z: z.roll(1, 1),
    "pad": lambda z: F.pad(z, (1, 2)),
    "to float": lambda z: z.float(),
    "and back": lambda z: z.float().double(),
    "used twice": lambda z: z.exp() + z.sin() * z,
    "added three times": lambda z: (z + z + z).tanh(),
    "a way around a way around": lambda z: (z + (z + z.sin())).tanh(),
    "and the other way about": lambda z: ((z + z.sin()) + z).tanh(),
    "with itself, turned": lambda z: torch.cat([z[:, :4] + z[:, :4].t(), WEIGHT[:4]], 1).tanh(),
    "side by side with itself, shifted": lambda z: (torch.cat([z, z.sin()], 1) + torch.cat([z.sin(), z], 1)).tanh(),
    "parts of one tensor": lambda z: (torch.cat([WEIGHT[:4], z.exp()], 1) + torch.cat([z.exp(), WEIGHT[:4]], 1)).tanh(),
    "of one number": lambda z: z.sum().sum(0) + z.mean().mean(-1) * z.sum().softmax(0) + z.sum().sum(0, keepdim=True),
    "slice without ends": lambda z: torch.ops.aten.slice(z, 1, None, None, 2),
    "in memory of its own": lambda z: (z + 1).mul_(FACTOR).add_(z),
    "normalize": lambda z: F.normalize(z, dim=1),
    "tril": torch.tril,
    "topk": lambda z: z.topk(2, 1)[0],
    "sort": lambda z: z.sort(1)[0],
}
IMAGES: dict[str, Callable[[Tensor], Tensor]] = {  # of [2, 4, 6, 6]
    "conv": lambda z: F.conv2d(z, WEIGHT[:, :4, None, None].expand(6, 4, 3, 3), FACTOR, stride=2, padding=1),
    "conv of one size": lambda z: F.conv2d(z, WEIGHT[:4, :4, None, None].expand(4, 4, 3, 3), padding=1),
    "conv in groups": lambda z: F.conv2d(z, WEIGHT[:, :2, None, None].expand(6, 2, 3, 3), groups=2, dilation=2),
    "conv_transpose": lambda z: F.conv_transpose2d(z, WEIGHT[:4, :, None, None].expand(4, 6, 3, 3), stride=2),
    "conv along an axis": lambda z: F.conv1d(z.flatten(2), WEIGHT[:, :4, None].expand(6, 4, 5), padding=2),
    "batch_norm": lambda z: F.batch_norm(z, FACTOR[:4], FACTOR[:4].exp(), FACTOR[1:5], FACTOR[2:], eps=0.1),
    "plain batch_norm": lambda z: F.batch_norm(z, FACTOR[:4], FACTOR[:4].exp()),
    "batch_norm of vectors": lambda z: F.batch_norm(z[:, :, 0, 0], FACTOR[:4], FACTOR[:4].exp(), FACTOR[1:5]),
    "batch's own statistics": lambda z: F.batch_norm(z, None, None, training=True),
    "group_norm": lambda z: F.group_norm(z, 2, FACTOR[:4], FACTOR[1:5]),
    "instance_norm": F.instance_norm,
    "max_pool": lambda z: F.max_pool2d(z, 2),
    "max_pool with windows that overlap": lambda z: F.max_pool2d(z, 3, 2),
    "max_pool with gaps": lambda z: F.max_pool2d(z, 2, 3, 1),
    "max_pool of one image": lambda z: F.max_pool2d(z[0], (2, 3)),
    "max_pool, one number for both sides": lambda z: F.max_pool2d(z, [2], [3]),
    "conv of no images": lambda z: F.conv2d(z[:0], WEIGHT[:4, :4, None, None]),
    "max_pool, channels last": lambda z: F.max_pool2d(z.to(memory_format=torch.channels_last), 2),
    "max_pool of all kinds": lambda z: F.max_pool2d(z, 3, 2, 1, 2, True),
    "max_pool1d": lambda z: F.max_pool1d(z.flatten(2), 3),
    "max_pool3d": lambda z: F.max_pool3d(z, 2),
    "avg_pool": lambda z: F.avg_pool2d(z, 2),
    "adaptive": lambda z: F.adaptive_avg_pool2d(z, 4),
    "adaptive to one": lambda z: F.adaptive_avg_pool2d(z, 1),
    "adaptive_max": lambda z: F.adaptive_max_pool2d(z, 3),
    "interpolate": lambda z: F.interpolate(z, scale_factor=2, mode="bilinear"),
    "unfold": lambda z: F.unfold(z, 3),
    "channels last": lambda z: F.relu(F.conv2d(z.to(memory_format=torch.channels_last), WEIGHT[:4, :4, None, None])),
    "pixel_shuffle": lambda z: F.pixel_shuffle(z, 2),
    "reflect": lambda z: F.pad(z, (1, 1, 1, 1), mode="reflect"),
    "bmm": lambda z: torch.bmm(z[:, 0], z[:, 1].mT),
    "matmul": lambda z: z @ z.mT,
    "data on the left": lambda z: WEIGHT @ z,
    "baddbmm": lambda z: torch.baddbmm(z[:, 0], z[:, 1], z[:, 2], beta=2, alpha=0.5),
    "attention": lambda z: F.scaled_dot_product_attention(z, z.exp(), z + 1),
    "plain attention": lambda z: (
        (z @ z.mT / 2).masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf).softmax(-1) @ z
    ),
}


def placed(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """A place in the middle of a graph, and the output that a function of it leads to."""
    place = x.requires_grad_() * 1.5
    return place, function(place)


def check(function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    place, output = placed(function, x)
    cotangents = torch.randn(3, *output.shape, generator=torch.Generator().manual_seed(1), dtype=output.dtype)
    before = cotangents.clone()
    expected = [torch.autograd.grad(output, place, u, retain_graph=True)[0] for u in cotangents]
    found: list[Tensor] = []
    assert pulled_back(output, [get_gradient_edge(place)], cotangents, lambda _, values: found.append(values) or True)
    assert len(found) == 1
    torch.testing.assert_close(found[0], torch.stack(expected), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(cotangents, before, rtol=0, atol=0)


@pytest.mark.parametrize("name", VECTORS)
def test_operations_on_vectors(name: str) -> None:
    check(VECTORS[name], torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).double())


@pytest.mark.parametrize("name", IMAGES)
def test_operations_on_images(name: str) -> None:
    check(IMAGES[name], torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(0)).double())


@pytest.mark.parametrize("name", [name for name in IMAGES if name.startswith("conv") and "no images" not in name])
def test_convolutions_a_few_data_points_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, back = [], pullback.aten.convolution_backward

    def seen(some: Tensor, *rest: object) -> object:
        sizes.append(len(some))
        return back(some, *rest)

    monkeypatch.setattr(pullback, "CACHE", 4 * 4 * 36 * 8)  # an image twice, in bytes, and that twice
    monkeypatch.setattr(pullback.aten, "convolution_backward", seen)
    check(IMAGES[name], torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(0)).double())
    assert len(sizes) > 1
    assert sum(sizes) == 6


def test_every_rule_is_met() -> None:
    """Names change with torch's versions; a rule that nothing meets is dead, or a slower way is taken in its place."""
    met = set()
    for functions, shape in ((VECTORS, (4, 6)), (IMAGES, (2, 4, 6, 6))):
        for function in functions.values():
            stack = [placed(function, torch.randn(shape).double())[1].grad_fn]
            while stack:
                node = stack.pop()
                met.add(node.name())
                stack += [below for below, _ in node.next_functions if below is not None]
    elementwise = {name for name, rule in RULES.items() if rule is RULES["TanhBackward0"]}
    spare = {
        "AddBackward1",
        "SubBackward1",
        "MulBackward1",
        "SqueezeBackward0",
        "AliasBackward0",
        "SafeSoftmaxBackward0",
    }
    assert set(RULES) - met - elementwise - spare == set()


SQUARES: list[Callable[[Tensor, Tensor], Tensor]] = [  # of [5, 5] each
    lambda a, b: a + b,
    lambda a, b: a - b,
    lambda a, b: a * b,
    lambda a, b: a + b.t(),
    lambda a, b: a @ b,
    lambda a, b: torch.cat([a, b], 1)[:, 2:7],
    lambda a, b: torch.stack([a, b]).sum(0),
    lambda a, b: torch.maximum(a, b),
    lambda a, b: a.tanh(),
    lambda a, b: a.relu() + b,
    lambda a, b: a.softmax(1),
    lambda a, b: a.flip(0).view(25).view(5, 5),
    lambda a, b: a[:, :1].expand(5, 5) - b[0],
]
STEPS = st.lists(st.tuples(st.integers(0, len(SQUARES) - 1), *[st.integers(-3, -1)] * 2), min_size=1, max_size=8)


@given(STEPS, st.integers(0, 8), st.booleans())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_any_graph(steps: list[tuple[int, int, int]], other: int, keep: bool) -> None:
    """Ways around ways around, tensors used again and again, parts that overlap: whose memory may be written to?"""
    values = [torch.randn(5, 5, generator=torch.Generator().manual_seed(0)).double().requires_grad_() * 1.5]
    for number, first, second in steps:
        values.append(SQUARES[number](values[max(first, -len(values))], values[max(second, -len(values))]))
    places, output = [values[0], values[min(other, len(values) - 1)]], values[-1].tanh() + values[-1]
    cotangents = torch.randn(3, 5, 5, generator=torch.Generator().manual_seed(1)).double()
    before, found = cotangents.clone(), {}

    def take(number: int, given: Tensor) -> bool:
        found[number] = given if keep else given.clone()
        return keep

    expected = [torch.autograd.grad(output, places, u, retain_graph=True, allow_unused=True) for u in cotangents]
    assert pulled_back(output, [get_gradient_edge(place) for place in places], cotangents, take)
    for number, grads in enumerate(zip(*expected, strict=True)):
        if grads[0] is None:
            assert number not in found
        else:
            torch.testing.assert_close(found[number], torch.stack(grads), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(cotangents, before, rtol=0, atol=0)


def test_what_is_kept_stays_and_what_is_not_may_be_written_over() -> None:
    """Two places with nothing but an activation between them: the later one's memory would do for the earlier one."""
    x = torch.randn(4, 6, requires_grad=True)
    first = 2 * x
    second = first.tanh()
    output = second.exp()
    edges, cotangents = [get_gradient_edge(first), get_gradient_edge(second)], torch.randn(3, 4, 6)
    expected = {
        number: torch.stack([torch.autograd.grad(output, place, u, retain_graph=True)[0] for u in cotangents])
        for number, place in enumerate((first, second))
    }
    for keep in (True, False):
        found: dict[int, Tensor] = {}
        memory: dict[int, int] = {}

        def take(number: int, values: Tensor, keep=keep, found=found, memory=memory) -> bool:
            found[number], memory[number] = values if keep else values.clone(), values.data_ptr()
            return keep

        assert pulled_back(output, edges, cotangents, take)
        torch.testing.assert_close(found, expected)
        assert (memory[0] == memory[1]) == (not keep)


def test_a_place_without_a_way_to_the_output_is_not_met() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    aside, output = x.tanh(), x.exp()
    met: list[int] = []
    assert pulled_back(output, [get_gradient_edge(aside)], torch.randn(2, 4, 6), lambda number, _: met.append(number))
    assert met == []


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return 2 * grad


@pytest.mark.parametrize(
    "function", [Doubled.apply, lambda z: torch.fft.fft(z).abs(), lambda z: z.clone().index_put_((INDEX[0],), z[:3])]
)
def test_custom_functions_complex_numbers_and_writing_are_left_to_autograd(function: Callable) -> None:
    place, output = placed(function, torch.randn(4, 6))
    taken: list[Tensor] = []
    done = pulled_back(output, [get_gradient_edge(place)], torch.randn(2, *output.shape), lambda _, v: taken.append(v))
    assert done == (function(torch.randn(4, 6, requires_grad=True)).grad_fn.name() == "IndexPutBackward0")
    assert done or not taken


class Hooked(nn.Module):
    """A hook of the model's own, which halves what comes back."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.first, self.second, self.mode = nn.Linear(6, 4), nn.Linear(4, 3), mode

    def forward(self, x: Tensor) -> Tensor:
        if self.mode == "checkpoint":
            hidden = checkpoint(lambda z: self.first(z).tanh(), x, use_reentrant=False)
            assert isinstance(hidden, Tensor)
            return self.second(hidden)
        hidden = self.first(x).tanh()
        if self.mode == "hook":
            hidden.register_hook(lambda grad: grad / 2)
        if self.mode == "node" and hidden.grad_fn is not None:
            hidden.grad_fn.register_hook(lambda grads, _: (grads[0] / 2,))
        if self.mode == "before a node" and hidden.grad_fn is not None:
            hidden.grad_fn.register_prehook(lambda grads: (grads[0] / 2,))
        return self.second(hidden)


def test_instance_norm_of_one_image_whose_channels_come_last() -> None:
    """Where torch's own kernel is wrong, with a step between images that no image has: the truth is by hand."""

    def by_hand(h: Tensor) -> Tensor:
        return (h - h.mean((2, 3), keepdim=True)) / (h.var((2, 3), unbiased=False, keepdim=True) + 1e-5).sqrt()

    x = torch.randn(1, 4, 3, 3, generator=torch.Generator().manual_seed(0)).double()
    cotangents = torch.randn(3, 1, 9, 2, generator=torch.Generator().manual_seed(1)).double()
    place, output = placed(lambda z: by_hand(z).flatten(2).mT @ WEIGHT[:4, :2], x)
    expected = torch.stack([torch.autograd.grad(output, place, u, retain_graph=True)[0] for u in cotangents])
    place, output = placed(lambda z: F.instance_norm(z).flatten(2).mT @ WEIGHT[:4, :2], x)
    found: list[Tensor] = []
    assert pulled_back(output, [get_gradient_edge(place)], cotangents, lambda _, values: found.append(values) or True)
    torch.testing.assert_close(found[0], expected, rtol=1e-9, atol=1e-12)


def test_hooks_are_called_as_autograd_calls_them() -> None:
    torch.manual_seed(0)
    x, plain = torch.randn(5, 6).double(), Hooked("none").double()
    expected = Tangent(plain).at(x).rows()
    for mode, factor in (("hook", 0.5), ("node", 0.5), ("before a node", 0.5), ("checkpoint", 1.0)):
        model = Hooked(mode).double()
        model.load_state_dict(plain.state_dict())
        linear = Tangent(model).at(x)
        assert linear.record.watched
        rows = linear.rows()
        torch.testing.assert_close(rows[..., :28], factor * expected[..., :28], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(rows[..., 28:], expected[..., 28:], rtol=1e-9, atol=1e-12)


def test_inside_a_backward_pass_nothing_is_done() -> None:
    place, output = placed(torch.tanh, torch.randn(4, 6))
    done: list[bool] = []
    outer = torch.ones(1, requires_grad=True)
    watched = outer * 2
    watched.register_hook(
        lambda _: done.append(pulled_back(output, [get_gradient_edge(place)], torch.randn(2, 4, 6), lambda *_: None))
    )
    watched.sum().backward()
    assert done == [False]
