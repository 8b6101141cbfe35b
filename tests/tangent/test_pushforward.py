"""J v by tangents: against the rows of J and the derivative of J^T u, and what has no rule goes the other way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lapwing.params import ParamSpace
from lapwing.tangent import Tangent
from lapwing.tangent.pushforward import pushed

ACTIVATIONS: list[Callable[[Tensor], Tensor]] = [
    torch.tanh, torch.sigmoid, F.relu, F.gelu, F.silu, F.elu, F.leaky_relu, F.softplus, F.mish, F.hardtanh, F.hardswish,
    F.logsigmoid, torch.sin, torch.cos, torch.exp, torch.erf, torch.neg, torch.square, F.selu, F.relu6,
    lambda z: z**3, lambda z: (z * z + 1).sqrt(), lambda z: (z * z + 1).log(), lambda z: F.softmax(z, -1),
    lambda z: 2.0 * z - 1.0, lambda z: z * torch.tanh(z), lambda z: z.clone().relu_(), torch.relu_,
    lambda z: torch.sub(z, z.exp(), alpha=0.5), lambda z: torch.add(z, z.exp(), alpha=0.5),
    lambda z: z.unsqueeze(1).squeeze(1), lambda z: z.unsqueeze(0).squeeze(),
]  # fmt: skip


class Sandwich(nn.Module):
    """Two linear layers with a function between them."""

    def __init__(self, function: Callable[[Tensor], Tensor], bias: bool = True) -> None:
        super().__init__()
        self.first, self.function, self.second = nn.Linear(3, 4, bias=bias), function, nn.Linear(4, 2, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.function(self.first(x)))


class Products(nn.Module):
    """Weights that meet data in other ways: with factors, broadcast, alone, and more than once."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(3))
        self.scale = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.addmm(self.bias, x, self.weight, beta=2, alpha=0.5)
        h = h + F.linear(h.tanh(), self.weight) * self.scale - self.bias
        h = torch.addmm(h, torch.ones(len(x), 3, dtype=x.dtype), self.weight)
        h = torch.addmm(self.bias, h.detach(), torch.eye(3, dtype=x.dtype)) + h
        return torch.mm(h, torch.ones(3, 3, dtype=x.dtype)) + torch.addmm(x, h, torch.ones(3, 3, dtype=x.dtype))


class Unruly(nn.Module):
    """An operation that has no rule on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).cumsum(1))


def check(model: nn.Module, x: Tensor, space: ParamSpace | None = None, followed: bool = True) -> None:
    """Against J spelled out, and against the derivative of J^T u, in float64."""
    model = model.double()
    tangent = Tangent(model, space or ParamSpace.of(model))
    linear = tangent.at(x)
    v = torch.randn(tangent.space.size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = linear._by_tangents(v)
    assert (found is not None) == followed
    expected = (linear.rows() @ v).reshape(linear.output.shape)
    torch.testing.assert_close(linear.mv(v), expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(linear._derivative_along(v), expected, rtol=1e-9, atol=1e-12)
    if found is not None:
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
        assert not found.requires_grad


@pytest.mark.parametrize("function", ACTIVATIONS)
def test_tangents_are_the_jacobian_times_a_vector(function: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    check(Sandwich(function), torch.randn(5, 3).double())


def test_layers_without_a_bias() -> None:
    torch.manual_seed(0)
    check(Sandwich(torch.tanh, bias=False), torch.randn(5, 3).double())


def test_linear_layers_of_sequences_of_vectors() -> None:
    torch.manual_seed(0)
    check(Sandwich(torch.tanh), torch.randn(5, 6, 3).double())
    check(Sandwich(torch.tanh, bias=False), torch.randn(5, 6, 3).double())


@pytest.mark.parametrize("options", [{}, {"stride": 2, "padding": 1}, {"dilation": 2, "padding": 2, "bias": False}])
def test_convolutions_and_their_maxima(options: dict) -> None:
    torch.manual_seed(0)
    first, second = nn.Conv2d(2, 4, 3, **options), nn.Conv2d(4, 4, 2, groups=2)
    model = nn.Sequential(first, nn.ReLU(inplace=True), second, nn.MaxPool2d(2), nn.Flatten(), nn.LazyLinear(2))
    model(torch.randn(1, 2, 12, 12))
    check(model, torch.randn(3, 2, 12, 12).double())


@pytest.mark.parametrize("kind", [nn.ConvTranspose1d, nn.Conv1d])
def test_convolutions_along_one_axis(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(kind(2, 3, 3, stride=2), nn.Tanh(), kind(3, 2, 2), nn.Flatten())
    check(model, torch.randn(3, 2, 9).double())


def test_products_of_other_forms() -> None:
    torch.manual_seed(0)
    model, x = Products().double(), torch.randn(5, 3).double()
    parameters = list(model.parameters())
    directions = [torch.randn_like(each) for each in parameters]
    output = model(x)
    found = pushed(output, parameters, directions)
    assert found is not None
    expected = torch.zeros_like(output)
    for row in range(output.numel()):
        grads = torch.autograd.grad(output.flatten()[row], parameters, retain_graph=True)
        terms = [(grad * along).sum() for grad, along in zip(grads, directions, strict=True)]
        expected.view(-1)[row] = torch.stack(terms).sum()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_some_of_the_parameters_alone() -> None:
    """Frozen ones have no tangent: of the first layer, of the last, of a bias; and entries of a mask."""
    torch.manual_seed(0)
    for names in (
        ["first.weight"],
        ["second.weight"],
        ["first.bias"],
        ["second.bias"],
        ["first.bias", "second.weight"],
    ):
        model = Sandwich(torch.tanh).double()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in names)
        check(model, torch.randn(5, 3).double())
        everything = Sandwich(torch.tanh).double()
        check(everything, torch.randn(5, 3).double(), ParamSpace.of(everything).select(names))
    model = Sandwich(torch.tanh).double()
    check(model, torch.randn(5, 3).double(), ParamSpace.of(model).select(mask=torch.tensor([0, 3, 12, 20])))


def test_an_operation_without_a_rule_goes_the_other_way() -> None:
    torch.manual_seed(0)
    check(Unruly(), torch.randn(5, 3).double(), followed=False)


def test_a_parameter_that_was_computed_goes_the_other_way() -> None:
    weight = torch.randn(2, 3, requires_grad=True)
    doubled = weight * 2
    assert pushed(F.linear(torch.ones(1, 3), doubled), [doubled], [torch.ones(2, 3)]) is None
    found = pushed(F.linear(torch.ones(1, 3), doubled), [weight], [torch.ones(2, 3)])
    assert found is not None
    assert found.tolist() == [[6.0, 6.0]]


def test_an_output_that_no_parameter_reaches_does_not_move() -> None:
    weight, other = torch.ones(1, 1, requires_grad=True), torch.ones(1, 1, requires_grad=True)
    found = pushed(F.linear(torch.ones(4, 1), weight), [other], [torch.ones(1, 1)])
    assert found is not None
    assert found.tolist() == [[0.0]] * 4


def test_inside_a_backward_pass_the_product_is_the_same() -> None:
    """Nodes of a graph give nothing there that the pass has not asked for, and a tangent would end at the first."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    linear = Tangent(model).at(torch.randn(5, 3, dtype=torch.float64))
    v = torch.randn(linear.space.size, dtype=torch.float64)
    expected, found = linear.mv(v), []

    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx, slope: Tensor) -> Tensor:
            found.append(linear.mv(v))
            return slope

    x = torch.ones(2, requires_grad=True)
    torch.autograd.grad(Asks.apply(x).sum(), x)
    torch.testing.assert_close(found[0], expected, rtol=1e-12, atol=1e-14)
