"""With `differentiable=True`, outputs and covariances are functions of the inputs, and autograd finds their slopes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

import problems
from lapwing.errors import UnsupportedOperationError
from lapwing.estimate import blocks, diagonal, full, kflr
from lapwing.likelihoods import Gaussian
from lapwing.params import ParamSpace
from lapwing.tangent import Tangent
from unchanged import unchanged

ESTIMATORS = {"full": full, "diagonal": diagonal, "kron": kflr, "blocks": blocks}


class Scaled(nn.Module):
    """A parameter that meets the data in an in-place product, a shift, and a tied pair of linear maps."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.rand(3) + 0.5), nn.Parameter(torch.rand(3))
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(x)
        h = h.clone().mul_(self.scale) + self.shift.sin()
        return self.layer(torch.sigmoid(self.layer(h)) ** 2)[:, :2]


def networks() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    torch.manual_seed(0)
    return {
        "linear": (nn.Linear(3, 2), (4, 3)),
        "mlp": (nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), (4, 3)),
        "norm": (nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.SiLU(), nn.Linear(4, 2)), (4, 3)),
        "conv": (
            nn.Sequential(
                nn.Conv2d(1, 2, 3, padding=1), nn.GroupNorm(1, 2), nn.Softplus(), nn.Flatten(), nn.Linear(32, 2)
            ),
            (3, 1, 4, 4),
        ),
        "transposed": (
            nn.Sequential(nn.ConvTranspose1d(1, 2, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(14, 2)),
            (3, 1, 3),
        ),
        "batchnorm": (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).eval(), (4, 3)),
        "attention": (
            nn.Sequential(
                nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, activation="gelu", batch_first=True),
                nn.Flatten(),
                nn.Linear(8, 2),
            ).eval(),
            (3, 2, 4),
        ),
        "weight norm": (nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)), nn.Tanh()), (4, 3)),
        "scaled": (Scaled(), (4, 3)),
    }


def problem(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    model, shape = networks()[name]
    model = model.double()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, dtype=torch.float64, generator=generator)
    return model, x, torch.randn(shape[0], 2, dtype=torch.float64, generator=generator)


def oracle(model: nn.Module, x: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """f and J Sigma J^T, differentiable in x: one plain backward pass for every row of every data point."""
    parameters = {name: p.detach().requires_grad_() for name, p in model.named_parameters()}
    values, rows = [], []
    for point in x.split(1):
        with sdpa_kernel(SDPBackend.MATH):
            output = functional_call(model, parameters, (point,))
        values.append(output)
        for entry in output.flatten():
            grads = torch.autograd.grad(entry, list(parameters.values()), create_graph=True)
            rows.append(torch.cat([grad.flatten() for grad in grads]))
    value, jacobian = torch.cat(values), torch.stack(rows).unflatten(0, (len(x), -1))
    return value, jacobian @ covariance @ jacobian.mT


@pytest.mark.parametrize("structure", ESTIMATORS)
@pytest.mark.parametrize("network", networks())
def test_slopes_of_mean_and_covariance_are_those_of_spelled_out_rows(network: str, structure: str) -> None:
    model, x, y = problem(network)
    tangent = Tangent(model, differentiable=True)
    precision = ESTIMATORS[structure](tangent, Gaussian(), [(x, y)]).with_prior(0.7)
    sigma = precision.solve(torch.eye(precision.size, dtype=torch.float64))
    weights = torch.randn(len(x), 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    ours = x.clone().requires_grad_()
    with unchanged(model):
        linear_map = tangent.at(ours)
        value, covariance = linear_map.value, precision.covariance(linear_map)
        slope = torch.autograd.grad((covariance * weights).sum() + (value.sin() * weights[:, 0]).sum(), ours)[0]
    theirs = x.clone().requires_grad_()
    expected_value, expected = oracle(model, theirs, sigma)
    expected_slope = torch.autograd.grad(
        (expected * weights).sum() + (expected_value.sin() * weights[:, 0]).sum(), theirs
    )[0]

    torch.testing.assert_close(value, expected_value, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(covariance, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(slope, expected_slope, rtol=1e-9, atol=1e-10)


def test_slope_of_the_variance_is_its_finite_difference() -> None:
    model, x, y = problem("conv")
    tangent = Tangent(model, differentiable=True)
    precision = kflr(tangent, Gaussian(), [(x, y)]).with_prior(1.0)

    def total(x: Tensor) -> Tensor:
        return precision.covariance(tangent.at(x)).diagonal(dim1=1, dim2=2).log().sum()

    point = x.clone().requires_grad_()
    slope = torch.autograd.grad(total(point), point)[0]
    direction = torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    step = 1e-5 * direction
    difference = (total(x + step) - total(x - step)) / 2e-5
    torch.testing.assert_close((slope * direction).sum(), difference.detach(), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("network", ["mlp", "conv", "attention", "scaled"])
def test_products_and_rows_have_slopes_too(network: str) -> None:
    model, x, _ = problem(network)
    tangent = Tangent(model, differentiable=True)
    size = tangent.space.size
    v = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    u = torch.randn(len(x), 2, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    slopes = []
    for product in (
        lambda m: (m.mv(v) * u).sum(),
        lambda m: (m.rmv(u) * v).sum(),
        lambda m: torch.einsum("n c p, n c, p ->", m.rows(), u, v),
    ):
        point = x.clone().requires_grad_()
        slopes.append(torch.autograd.grad(product(tangent.at(point)), point)[0])
    assert slopes[0].abs().max() > 0
    torch.testing.assert_close(slopes[0], slopes[1], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(slopes[0], slopes[2], rtol=1e-9, atol=1e-12)


def test_backward_adds_nothing_to_the_parameters_gradients() -> None:
    model, x, y = problem("mlp")
    tangent = Tangent(model, differentiable=True)
    precision = diagonal(tangent, Gaussian(), [(x, y)]).with_prior(1.0)
    first = x.clone().requires_grad_()
    point = 2 * first  # not a leaf itself: the way back goes on
    linear_map = tangent.at(point)
    (linear_map.value.sum() + precision.covariance(linear_map).sum()).backward()
    assert first.grad is not None
    assert first.grad.abs().max() > 0
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("budget", [1, 2**28])
def test_cutting_the_batch_to_a_budget_keeps_the_slopes(budget: int) -> None:
    model, x, y = problem("conv")
    tangent = Tangent(model, budget=budget, differentiable=True)
    precision = diagonal(Tangent(model), Gaussian(), [(x, y)]).with_prior(1.0)
    point = x.clone().requires_grad_()
    slope = torch.autograd.grad(precision.covariance(tangent.at(point)).sum(), point)[0]
    theirs = x.clone().requires_grad_()
    expected = oracle(model, theirs, torch.diag(precision.variance()))[1].sum()
    torch.testing.assert_close(slope, torch.autograd.grad(expected, theirs)[0], rtol=1e-9, atol=1e-12)


def test_only_what_is_asked_for_has_a_graph() -> None:
    model, x, y = problem("mlp")
    precision = diagonal(Tangent(model), Gaussian(), [(x, y)]).with_prior(1.0)
    wanted = x.clone().requires_grad_()
    for tangent, point in ((Tangent(model), wanted), (Tangent(model, differentiable=True), x)):
        linear_map = tangent.at(point)
        assert not linear_map.value.requires_grad
        assert not linear_map.rows().requires_grad
        assert not precision.covariance(linear_map).requires_grad


@pytest.mark.parametrize("name", problems.NAMES)
def test_rows_hold_no_graph_unless_asked(name: str) -> None:
    problem = problems.build(name)
    held = [value for piece in Tangent(problem.model).at(problem.x).pieces() for value in vars(piece).values()]
    assert not any(value.requires_grad for value in held if isinstance(value, Tensor))


def test_a_curvature_is_no_function_of_its_inputs() -> None:
    model, x, y = problem("mlp")
    tangent = Tangent(model, differentiable=True)
    fitted = kflr(tangent, Gaussian(), [(x.clone().requires_grad_(), y)])
    assert not fitted.diagonal().requires_grad
    torch.testing.assert_close(fitted.diagonal(), kflr(tangent, Gaussian(), [(x, y)]).diagonal())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(2, 3, batch_first=True), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])


class Token(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.head = nn.Parameter(torch.randn(1, 1, 2)), nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.token.expand(len(x), -1, -1)
        return self.head(torch.stack([x.sum(1, keepdim=True), tokens], 1).square().sum((1, 2)))


def test_parameters_without_a_rule_are_named_in_an_error() -> None:
    torch.manual_seed(0)
    model = Token().double()
    x = torch.randn(3, 4, 2, dtype=torch.float64)
    with unchanged(model):
        linear_map = Tangent(model, differentiable=True).at(x.clone().requires_grad_())
        assert linear_map.value.requires_grad
        with pytest.raises(UnsupportedOperationError, match=r"'token'.*'stack'.*require no gradient"):
            linear_map.rows()
        rows = Tangent(model, differentiable=True).at(x).rows()
    torch.testing.assert_close(rows, Tangent(model).at(x).rows())


@pytest.mark.parametrize("module", ["cell", "head"])
def test_a_recurrent_network_has_slopes(module: str) -> None:
    torch.manual_seed(0)
    model = Recurrent().double()
    tangent = Tangent(model, ParamSpace.of(model).select(module=module), differentiable=True)
    x = torch.randn(3, 4, 2, dtype=torch.float64)
    precision = full(tangent, Gaussian(), [(x, torch.zeros(3, 1, dtype=torch.float64))]).with_prior(1.0)
    point = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(precision.covariance(tangent.at(point)).sum(), point)
    direction = torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    ahead, behind = (precision.covariance(tangent.at(x + sign * 1e-5 * direction)).sum() for sign in (1, -1))
    torch.testing.assert_close((slope * direction).sum(), (ahead - behind) / 2e-5, rtol=1e-6, atol=1e-9)
