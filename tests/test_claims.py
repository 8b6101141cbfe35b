"""The exact claims C01 and C03 to C08 as tests: lapwing's estimators against what the sources spell out.

Sources: an exercise sheet on the Laplace approximation (C01), and a thesis on Kronecker-factored curvature (C03 to
C08: lemmas 3.15 to 3.23 and 4.1, sections 4.3 and 4.4.2). The thesis stacks weights by columns, so that a layer's block
is A (x) H; flat order here is by rows, and the same block is H (x) A.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev

from lapwing import estimate
from lapwing.errors import ParameterError
from lapwing.estimate import fisher
from lapwing.likelihoods import (
    Bernoulli,
    BernoulliMixture,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
)
from lapwing.linalg import Blocks, Kronecker, MatrixLayout, Term
from lapwing.tangent import Tangent

Batch = list[tuple[Tensor, Tensor]]
Activation = tuple[type[nn.Module], Callable[[Tensor], Tensor]]
TANH: Activation = (nn.Tanh, torch.tanh)
SOFTPLUS: Activation = (nn.Softplus, nn.functional.softplus)
RELU: Activation = (nn.ReLU, torch.relu)
LEAKY: Activation = (nn.LeakyReLU, nn.functional.leaky_relu)


@pytest.fixture(autouse=True)
def _float64() -> None:
    torch.set_default_dtype(torch.float64)  # given back by the fixture of the whole suite


def close(actual: Tensor, expected: Tensor, rtol: float = 1e-9) -> None:
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=rtol * float(expected.abs().max()))


def mlp(*widths: int, activation: Activation = TANH, bias: bool = True) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs, bias=bias), activation[0]()]
    return nn.Sequential(*layers[:-1])


def linears(model: nn.Sequential) -> list[nn.Linear]:
    return [layer for layer in model if isinstance(layer, nn.Linear)]


def outputs_and_targets(likelihood: Likelihood) -> tuple[int, Callable[[int], Tensor]]:
    """Number of network outputs, and targets for n data points."""
    if isinstance(likelihood, Categorical):
        return 3, lambda n: torch.arange(n) % 3
    if isinstance(likelihood, Bernoulli):
        return 2, lambda n: torch.arange(2.0 * n).reshape(n, 2) % 2
    if isinstance(likelihood, Poisson):
        return 2, lambda n: torch.arange(2.0 * n).reshape(n, 2) % 3
    if isinstance(likelihood, BernoulliMixture):
        return 3, lambda n: torch.arange(n) % 2
    if isinstance(likelihood, HeteroscedasticGaussian):
        return 4, lambda n: torch.randn(n, 2)
    return 2, lambda n: torch.randn(n, 2)


def flat_loss(model: nn.Module, likelihood: Likelihood, x: Tensor, y: Tensor) -> Callable[[Tensor], Tensor]:
    """The summed negative log-likelihood as a function of the flat parameters."""
    return lambda theta: -likelihood.log_prob(flat_model(model, x)(theta), y).sum()


def flat_model(model: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
    space = Tangent(model).space
    return lambda theta: functional_call(model, space.unravel(theta), (x,))


def theta_of(model: nn.Module) -> Tensor:
    return Tangent(model).space.values(model)


def layer_slices(model: nn.Module) -> list[slice]:
    space = Tangent(model).space
    groups = space.groups("layer")
    found = [(groups == k).nonzero().squeeze(1) for k in range(len(space.layers))]
    return [slice(int(where[0]), int(where[-1]) + 1) for where in found]


def block_diagonal(matrix: Tensor, parts: list[slice]) -> Tensor:
    out = torch.zeros_like(matrix)
    for part in parts:
        out[part, part] = matrix[part, part]
    return out


# -- C01: the Hessian is J H J^T + L F + the regulariser's ------------------------------------------------------------


@pytest.mark.parametrize("kind", ["square", "cross-entropy"])
def test_c01a_the_hessian_is_ggn_plus_residual_curvature_plus_regulariser(kind: str) -> None:
    """Psi = sum_i J_i H_i J_i^T + L_i F_i + grad grad^T r, with r = alpha / 2 |theta|^2 and one output."""
    model, alpha = mlp(2, 3, 1), 0.7
    x = torch.randn(5, 2)
    y = torch.randn(5, 1) if kind == "square" else torch.tensor([[0.0], [1.0], [1.0], [0.0], [1.0]])
    likelihood = Gaussian() if kind == "square" else Bernoulli()
    theta = theta_of(model)
    f = model(x).detach()
    jacobian = jacrev(flat_model(model, x))(theta)[:, 0]
    own = jacrev(jacrev(flat_model(model, x)))(theta)[:, 0]  # F_i, the network's own second derivatives
    slope, curvature = likelihood.grad(f, y)[:, 0], likelihood.hessian(f, y)[:, 0, 0]
    first = torch.einsum("n p, n, n q -> p q", jacobian, curvature, jacobian)
    second = torch.einsum("n, n p q -> p q", slope, own)
    loss = flat_loss(model, likelihood, x, y)
    whole = jacrev(grad(lambda t: loss(t) + alpha / 2 * (t @ t)))(theta)
    close(first + second + alpha * torch.eye(len(theta)), whole)
    # lapwing: `full` is the first term, `hessian` the first two, and the prior adds the third
    tangent = Tangent(model)
    close(estimate.full(tangent, likelihood, [(x, y)]).dense(), first)
    close(estimate.hessian(tangent, likelihood, [(x, y)]).dense(), first + second)
    strong = alpha + 10.0  # away from a minimum the Hessian is indefinite
    precision = estimate.hessian(tangent, likelihood, [(x, y)]).with_prior(strong)
    close(precision.logdet(), torch.linalg.slogdet(whole + 10 * torch.eye(len(theta))).logabsdet)


def test_c01b_slope_and_curvature_of_the_two_losses_with_the_right_sign() -> None:
    """Square: L = f - y, H = 1. Cross-entropy +log(1 + exp(-y f)): L = -y s(-y f), H = s(y f) s(-y f) > 0.

    The sheet prints the cross-entropy with a minus, whose curvature would be negative.
    """
    f = torch.linspace(-4, 4, 9).reshape(-1, 1)
    y = torch.randn(9, 1)
    close(Gaussian().grad(f, y), f - y)
    close(Gaussian().hessian(f, y)[:, 0], torch.ones(9, 1))
    for sign in (-1.0, 1.0):
        target = torch.full_like(f, (sign + 1) / 2)
        close(-Bernoulli().log_prob(f, target), torch.log1p(torch.exp(-sign * f))[:, 0])
        close(Bernoulli().grad(f, target), -sign * torch.sigmoid(-sign * f))
        close(Bernoulli().hessian(f, target)[:, 0], torch.sigmoid(sign * f) * torch.sigmoid(-sign * f))
        assert bool((Bernoulli().hessian(f, target) > 0).all())


def fitted(likelihood: Likelihood, x: Tensor, y: Tensor, steps: int) -> nn.Sequential:
    """A small network after damped Gauss-Newton steps on all data: deterministic, and fast to an optimum."""
    model = mlp(x.shape[1], 12, 1)
    tangent = Tangent(model)
    damping = 1.0
    loss = float(-likelihood.log_prob(model(x).detach(), y).sum())
    for _ in range(steps):
        theta = tangent.space.values(model)
        gradient = tangent.at(x).rmv(likelihood.grad(model(x).detach(), y))
        step = estimate.full(tangent, likelihood, [(x, y)]).with_prior(damping).solve(gradient)
        nn.utils.vector_to_parameters(theta - step, model.parameters())
        after = float(-likelihood.log_prob(model(x).detach(), y).sum())
        if after < loss:
            loss, damping = after, max(damping / 4, 1e-12)
        else:
            nn.utils.vector_to_parameters(theta, model.parameters())
            damping *= 4
    return model


def test_c01b_at_a_well_fit_optimum_of_the_square_loss_the_ggn_is_the_hessian() -> None:
    """L ~ 0 for every point, so that the second term vanishes and the Hessian is positive semi-definite."""
    x = torch.linspace(-2, 2, 8).unsqueeze(1)
    y = torch.sin(2 * x)
    likelihood = Gaussian()

    def share(model: nn.Module) -> float:
        """|L F| / |J H J^T|, in Frobenius norm."""
        ggn = estimate.full(Tangent(model), likelihood, [(x, y)]).dense()
        return float((estimate.hessian(Tangent(model), likelihood, [(x, y)]).dense() - ggn).norm() / ggn.norm())

    torch.manual_seed(0)
    assert share(mlp(1, 12, 1)) > 0.1
    torch.manual_seed(0)
    model = fitted(likelihood, x, y, 60)
    assert float(likelihood.grad(model(x).detach(), y).abs().max()) < 1e-8
    assert share(model) < 1e-7
    found = estimate.hessian(Tangent(model), likelihood, [(x, y)]).dense()
    assert float(torch.linalg.eigvalsh(found).min()) > -1e-7 * float(found.norm())


def test_c01b_at_a_well_fit_optimum_of_the_cross_entropy_slope_and_curvature_vanish_together() -> None:
    """L ~ 0 and H >= 0, as claimed. But H ~ 0 as well: on data that are fitted, H = s(m) s(-m) and |L| = s(-m) agree to
    first order, so the second term is small in absolute terms (beside a prior, say) and not beside the first term.
    """
    x = torch.tensor([[-2.0], [-1.0], [0.0], [1.0], [2.0], [3.0]])
    y = torch.tensor([[0.0], [0.0], [1.0], [1.0], [0.0], [0.0]])
    likelihood = Bernoulli()
    model = fitted(likelihood, x, y, 40)
    f = model(x).detach()
    slope, curvature = likelihood.grad(f, y), likelihood.hessian(f, y)[:, 0]
    assert float(slope.abs().max()) < 1e-4
    assert bool((curvature >= 0).all())
    close(curvature / slope.abs(), torch.ones_like(curvature), rtol=1e-4)
    ggn = estimate.full(Tangent(model), likelihood, [(x, y)]).dense()
    rest = estimate.hessian(Tangent(model), likelihood, [(x, y)]).dense() - ggn
    assert float(rest.norm()) < 1e-2  # a prior precision of one drowns it
    assert float(torch.linalg.eigvalsh(ggn).min()) > -1e-12
    assert float(rest.norm() / ggn.norm()) > 1e-3  # though the GGN does not: both shrink together


# -- the feed-forward network of the thesis, spelled out -------------------------------------------------------------


@dataclass(frozen=True)
class Unrolled:
    """One data point through h_l = W_l [a_{l-1}; 1], a_l = phi(h_l): all that the lemmas name, layer by layer."""

    inputs: list[Tensor]  # a_{l-1} with a one for the bias, if there is one
    hidden: list[Tensor]  # h_l
    slopes: list[Tensor]  # dL/dh_l
    output_hessian: Tensor  # d^2 L / dh_L^2
    weights: list[Tensor]  # W_l, without the bias
    first: list[Tensor]  # phi'(h_l)
    second: list[Tensor]  # phi''(h_l)

    @property
    def depth(self) -> int:
        return len(self.hidden)

    def between(self, later: int, earlier: int) -> Tensor:
        """dh_later / dh_earlier."""
        out = torch.eye(len(self.hidden[earlier]))
        for layer in range(earlier, later):
            out = self.weights[layer + 1] @ (self.first[layer][:, None] * out)
        return out

    def hessians(self) -> list[Tensor]:
        """Lemma 3.16: H_l = B_l W_{l+1}^T H_{l+1} W_{l+1} B_l + D_l, D_l = diag(dL/da_l * phi''(h_l))."""
        found = [self.output_hessian]
        for layer in reversed(range(self.depth - 1)):
            b, w = self.first[layer], self.weights[layer + 1]
            d = (w.mT @ self.slopes[layer + 1]) * self.second[layer]
            found.insert(0, b[:, None] * (w.mT @ found[0] @ w) * b + d.diag())
        return found

    def gauss_newtons(self) -> list[Tensor]:
        """Lemma 3.22: G_l = B_l W_{l+1}^T G_{l+1} W_{l+1} B_l, from the Hessian at the outputs."""
        found = [self.output_hessian]
        for layer in reversed(range(self.depth - 1)):
            b, w = self.first[layer], self.weights[layer + 1]
            found.insert(0, b[:, None] * (w.mT @ found[0] @ w) * b)
        return found


def unroll(model: nn.Sequential, activation: Activation, likelihood: Likelihood, x: Tensor, y: Tensor) -> Unrolled:
    phi = activation[1]
    layers = linears(model)
    a, inputs, hidden = x, [], []
    for number, layer in enumerate(layers):
        inputs.append(a if layer.bias is None else torch.cat([a, torch.ones(1)]))
        h = layer.weight.detach() @ a + (0 if layer.bias is None else layer.bias.detach())
        hidden.append(h)
        a = phi(h) if number < len(layers) - 1 else h
    tails = [tail(layers[number + 1 :], phi, likelihood, y) for number in range(len(layers))]
    derivative = torch.func.vmap(grad(phi))
    return Unrolled(
        inputs,
        hidden,
        [grad(rest)(h) for rest, h in zip(tails, hidden, strict=True)],
        likelihood.hessian(hidden[-1].unsqueeze(0), y.unsqueeze(0))[0],
        [layer.weight.detach() for layer in layers],
        [derivative(h) for h in hidden[:-1]],
        [torch.func.vmap(grad(grad(phi)))(h) for h in hidden[:-1]],
    )


def tail(layers: list[nn.Linear], phi: Callable, likelihood: Likelihood, y: Tensor) -> Callable[[Tensor], Tensor]:
    """The loss as a function of one layer's pre-activations."""

    def loss(h: Tensor) -> Tensor:
        for layer in layers:
            h = layer.weight.detach() @ phi(h) + (0 if layer.bias is None else layer.bias.detach())
        return -likelihood.log_prob(h.unsqueeze(0), y.unsqueeze(0)).sum()

    return loss


def by_layer(block: Tensor) -> Tensor:
    """[O, I (+1), O', I' (+1)] -> a matrix in flat order: the weight row-major, then the bias."""

    def flat(rows: Tensor, bias: bool) -> Tensor:
        if not bias:
            return rows.flatten(0, 1)
        return torch.cat([rows[:, :-1].flatten(0, 1), rows[:, -1]])

    rows = flat(block, True)
    return flat(rows.permute(1, 2, 0), True).mT


def khatri_rao(a: list[Tensor], pairs: list[list[Tensor]]) -> list[list[Tensor]]:
    """Block (k, l) is pairs[k][l] (x) a_k a_l^T, as [O, I, O', I']."""
    count = range(len(a))
    return [[torch.einsum("o p, i, j -> o i p j", pairs[k][m], a[k], a[m]) for m in count] for k in count]


def first_order(u: Unrolled) -> list[list[Tensor]]:
    """H^FO of Lemma 3.15: a_{l-1} (x) da_{k-1}/dh_l (x) dL/dh_k for k > l, its transpose for k < l, zero for k = l."""
    found = [[torch.zeros(len(h), len(a), len(g), len(b)) for g, b in zip(u.hidden, u.inputs, strict=True)]
             for h, a in zip(u.hidden, u.inputs, strict=True)]  # fmt: skip
    for k in range(u.depth):
        for m in range(k):
            moved = u.first[k - 1][:, None] * u.between(k - 1, m)  # da_{k-1} / dh_m, and zero for the bias's one
            moved = torch.cat([moved, torch.zeros(1, moved.shape[1])])
            found[k][m] = torch.einsum("o, i p, j -> o i p j", u.slopes[k], moved, u.inputs[m])
            found[m][k] = found[k][m].permute(2, 3, 0, 1)
    return found


def stacked(blocks: list[list[Tensor]]) -> Tensor:
    return torch.cat([torch.cat([by_layer(block) for block in row], dim=1) for row in blocks])


def pre_activation_pairs(u: Unrolled, of: list[Tensor]) -> list[list[Tensor]]:
    """d^2 L / dh_k dh_l = M_k dh_k/dh_l for k >= l (3.18), and the transpose."""
    return [
        [of[k] @ u.between(k, m) if k >= m else (of[m] @ u.between(m, k)).mT for m in range(u.depth)]
        for k in range(u.depth)
    ]


SMOOTH = [pytest.param(TANH, id="tanh"), pytest.param(SOFTPLUS, id="softplus")]
PIECEWISE = [pytest.param(RELU, id="relu"), pytest.param(LEAKY, id="leaky relu")]
CONVEX = [Gaussian(0.8), Categorical(), Bernoulli(), Poisson()]
by_likelihood = pytest.mark.parametrize("likelihood", CONVEX, ids=lambda each: type(each).__name__)


def problem(likelihood: Likelihood, activation: Activation, points: int = 1) -> tuple[nn.Sequential, Batch]:
    outputs, targets = outputs_and_targets(likelihood)
    return mlp(2, 6, 5, outputs, activation=activation), [(torch.randn(points, 2), targets(points))]


# -- C03 ------------------------------------------------------------------------------------------------------------


@by_likelihood
@pytest.mark.parametrize("activation", [*SMOOTH, *PIECEWISE])
def test_c03_lemma_3_16_recursion_of_pre_activation_hessians(likelihood: Likelihood, activation: Activation) -> None:
    model, [(x, y)] = problem(likelihood, activation)
    u = unroll(model, activation, likelihood, x[0], y[0])
    layers = linears(model)
    for number, found in enumerate(u.hessians()):
        loss = tail(layers[number + 1 :], activation[1], likelihood, y[0])
        close(found, jacrev(grad(loss))(u.hidden[number]))


@by_likelihood
@pytest.mark.parametrize("activation", SMOOTH)
def test_c03_lemma_3_15_the_sample_hessian_is_khatri_rao_plus_a_first_order_component(
    likelihood: Likelihood, activation: Activation
) -> None:
    """H = (a a^T) * d^2 L / dh^2 + H^FO, against lapwing's exact Hessian of one data point."""
    model, data = problem(likelihood, activation)
    u = unroll(model, activation, likelihood, data[0][0][0], data[0][1][0])
    product = stacked(khatri_rao(u.inputs, pre_activation_pairs(u, u.hessians())))
    rest = stacked(first_order(u))
    close(estimate.hessian(Tangent(model), likelihood, data).dense(), product + rest)
    assert float(rest.norm()) > 1e-3 * float(product.norm())  # the claim is not about zeros
    assert float(block_diagonal(rest, layer_slices(model)).norm()) == 0


# -- C04 ------------------------------------------------------------------------------------------------------------


@by_likelihood
@pytest.mark.parametrize("activation", PIECEWISE)
def test_c04_lemma_3_17_and_3_18_layers_are_convex_and_the_trace_is_not_negative(
    likelihood: Likelihood, activation: Activation
) -> None:
    """Piecewise-linear networks: every layer's block of the Hessian is PSD, so no smooth point is a strict maximum."""
    model, data = problem(likelihood, activation, points=5)
    found = estimate.hessian(Tangent(model), likelihood, data, structure="blocks")
    assert isinstance(found, Blocks)
    assert len(found.blocks) == 3
    for block in found.blocks:
        values = torch.linalg.eigvalsh(block.curvature.dense())
        assert float(values.min()) > -1e-12 * float(values.max())
        assert float(values.max()) > 0
    whole = estimate.hessian(Tangent(model), likelihood, data).dense()
    assert float(whole.trace()) >= 0
    assert float(torch.linalg.eigvalsh(whole).min()) < -1e-6  # the whole is indefinite all the same


@by_likelihood
@pytest.mark.parametrize("activation", PIECEWISE)
def test_c04_lemma_3_23_the_hessian_is_the_ggn_plus_the_first_order_component(
    likelihood: Likelihood, activation: Activation
) -> None:
    model, data = problem(likelihood, activation)
    tangent = Tangent(model)
    u = unroll(model, activation, likelihood, data[0][0][0], data[0][1][0])
    for ours, theirs in zip(u.hessians(), u.gauss_newtons(), strict=True):
        close(ours, theirs)
    rest = stacked(first_order(u))
    ggn = estimate.full(tangent, likelihood, data).dense()
    close(estimate.hessian(tangent, likelihood, data).dense(), ggn + rest)
    assert float(rest.norm()) > 1e-3 * float(ggn.norm())


@by_likelihood
@pytest.mark.parametrize("activation", [*PIECEWISE, *SMOOTH])
def test_c04_diagonal_blocks_of_hessian_and_ggn_are_equal_for_piecewise_linear_networks_only(
    likelihood: Likelihood, activation: Activation
) -> None:
    """Over a data set, since the first-order component has no diagonal blocks; and entry by entry on the diagonal."""
    model, data = problem(likelihood, activation, points=5)
    tangent = Tangent(model)
    exact = estimate.hessian(tangent, likelihood, data, structure="blocks").dense()
    ggn = estimate.blocks(tangent, likelihood, data).dense()
    diagonals = estimate.hessian(tangent, likelihood, data, structure="diagonal").diagonal()
    if activation in (RELU, LEAKY):
        close(exact, ggn)
        close(diagonals, estimate.diagonal(tangent, likelihood, data).diagonal())
    else:
        assert float((exact - ggn).norm()) > 1e-3 * float(ggn.norm())


def test_c04_needs_a_loss_that_is_convex_in_the_outputs() -> None:
    """For the mixture of two coins a layer's block is indefinite, with the same network."""
    model, data = problem(BernoulliMixture(), RELU, points=5)
    found = estimate.hessian(Tangent(model), BernoulliMixture(), data, structure="blocks")
    assert float(torch.linalg.eigvalsh(found.dense()).min()) < -1e-3


# -- C05 ------------------------------------------------------------------------------------------------------------


@by_likelihood
@pytest.mark.parametrize("activation", [*SMOOTH, *PIECEWISE])
def test_c05_lemma_3_21_and_3_22_the_sample_ggn_is_khatri_rao_with_recursive_factors(
    likelihood: Likelihood, activation: Activation
) -> None:
    """The whole from `full`, each layer's G_l and a a^T from `kflr`, which is exact for one data point."""
    model, data = problem(likelihood, activation)
    u = unroll(model, activation, likelihood, data[0][0][0], data[0][1][0])
    pairs = [
        [u.between(u.depth - 1, k).mT @ u.output_hessian @ u.between(u.depth - 1, m) for m in range(u.depth)]
        for k in range(u.depth)
    ]
    close(estimate.full(Tangent(model), likelihood, data).dense(), stacked(khatri_rao(u.inputs, pairs)))
    found = estimate.kflr(Tangent(model), likelihood, data)
    for block, expected, a in zip(found.blocks, u.gauss_newtons(), u.inputs, strict=True):
        assert isinstance(block.curvature, Kronecker)
        cols, rows = block.curvature.factors
        close(rows[0], expected)
        close(cols[0], torch.outer(a, a))
    close(found.dense(), estimate.blocks(Tangent(model), likelihood, data).dense())


def score_covariance(model: nn.Module, likelihood: Likelihood, x: Tensor, support: list[Tensor]) -> Tensor:
    """The Fisher by its definition (3.35): sum over data and targets of p(y | x) grad log p grad log p^T."""
    total = torch.zeros(len(theta_of(model)), len(theta_of(model)))
    for n in range(len(x)):
        for y in support:
            loss = flat_loss(model, likelihood, x[n : n + 1], y.unsqueeze(0))
            gradient = grad(loss)(theta_of(model))
            total += torch.exp(-loss(theta_of(model))) * torch.outer(gradient, gradient)
    return total


@pytest.mark.parametrize(
    ("likelihood", "support"),
    [
        (Categorical(), [torch.tensor(k) for k in range(3)]),
        (Bernoulli(), [torch.tensor([float(i), float(j)]) for i in range(2) for j in range(2)]),
        (BernoulliMixture(), [torch.tensor(k) for k in range(2)]),
    ],
    ids=["categorical", "bernoulli", "mixture of two coins"],
)
def test_c05_the_fisher_estimate_is_the_covariance_of_scores(likelihood: Likelihood, support: list[Tensor]) -> None:
    model, data = problem(likelihood, TANH, points=4)
    expected = score_covariance(model, likelihood, data[0][0], support)
    close(estimate.full(Tangent(model), likelihood, data, cotangents=fisher).dense(), expected)


@by_likelihood
def test_c05_the_ggn_is_the_fisher_for_exponential_families_in_natural_parameters(likelihood: Likelihood) -> None:
    """Their Hessian does not depend on y (3.38), so neither does the GGN."""
    model, [(x, y)] = problem(likelihood, TANH, points=6)
    tangent = Tangent(model)
    ggn = estimate.full(tangent, likelihood, [(x, y)]).dense()
    close(estimate.full(tangent, likelihood, [(x, y)], cotangents=fisher).dense(), ggn)
    other = likelihood.sample(model(x).detach(), torch.Generator().manual_seed(5))
    assert not torch.equal(other, y)
    close(estimate.full(tangent, likelihood, [(x, other)]).dense(), ggn)


@pytest.mark.parametrize("likelihood", [BernoulliMixture(), HeteroscedasticGaussian()], ids=["mixture", "variance"])
def test_c05_the_ggn_is_not_the_fisher_otherwise(likelihood: Likelihood) -> None:
    """Equation 4.28, and a Gaussian whose second output is a log-variance: no natural parameters, and the Hessian in f
    depends on y. The exact Hessian at the outputs is what the GGN would take; lapwing takes its PSD part or substitute.
    """
    model, [(x, y)] = problem(likelihood, TANH, points=6)
    f = model(x).detach()
    jacobian = jacrev(flat_model(model, x))(theta_of(model))
    ggn = torch.einsum("n c p, n c d, n d q -> p q", jacobian, likelihood.hessian(f, y), jacobian)
    scores = estimate.full(Tangent(model), likelihood, [(x, y)], cotangents=fisher).dense()
    assert float((ggn - scores).norm()) > 0.05 * float(scores.norm())
    if isinstance(likelihood, BernoulliMixture):
        ours = estimate.full(Tangent(model), likelihood, [(x, y)]).dense()
        psd = torch.einsum("n c p, n c d, n d q -> p q", jacobian, likelihood.psd_hessian(f, y), jacobian)
        close(ours, psd)
        assert float((ours - scores).norm()) > 0.05 * float(scores.norm())


@pytest.mark.parametrize(
    ("likelihood", "each"),
    [(Gaussian(), 2), (Bernoulli(), 2), (Categorical(), 2), (BernoulliMixture(), 1)],
    ids=["gaussian: C", "bernoulli: C", "categorical: C - 1", "fisher of the mixture: 1"],
)
def test_c05_the_rank_is_at_most_points_times_outputs(likelihood: Likelihood, each: int) -> None:
    """3.39: rank(G) <= N rank(G_L) <= N C; attained here, where the network has more parameters than that."""
    model, data = problem(likelihood, TANH, points=4)
    found = estimate.full(Tangent(model), likelihood, data, cotangents=fisher).dense()
    values = torch.linalg.eigvalsh(found)
    assert int((values > 1e-12 * values.max()).sum()) == 4 * each < len(found)


# -- C06 ------------------------------------------------------------------------------------------------------------


def deep_linear(depth: int, width: int, activation: Activation = (nn.Identity, lambda h: h)) -> nn.Sequential:
    model = mlp(*[width] * (depth + 1), activation=activation, bias=False)
    with torch.no_grad():
        for layer in linears(model):
            layer.weight += torch.eye(width)  # well away from singular
    return model


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_c06_lemma_4_1_block_directions_of_a_deep_linear_network(depth: int) -> None:
    """G^-1 V = G_diag^-1 V / L, for square invertible weights, no bias, constant loss curvature and full-rank inputs.

    Read as the proof shows it: U = G_diag^-1 V satisfies G U = L V, so that U / L solves G X = V. For L > 1 the inverse
    that the statement writes does not exist: the network has d^2 degrees of freedom and L d^2 weights, and G has rank
    d^2. The solution is then one of many, and not the one of least norm.
    """
    width, likelihood = 3, Gaussian(0.7)
    model = deep_linear(depth, width)
    x, y = torch.randn(8, width), torch.randn(8, width)
    tangent = Tangent(model)
    gradient = tangent.at(x).rmv(torch.randn(8, width))  # V = sum_n (dh_L / dtheta)^T v(x, y, theta), any v
    whole = estimate.full(tangent, likelihood, [(x, y)])
    blocks = estimate.blocks(tangent, likelihood, [(x, y)])
    direction = blocks.with_prior(0.0).solve(gradient)
    close(whole.mv(direction), depth * gradient, rtol=1e-8)
    values = torch.linalg.eigvalsh(whole.dense())
    assert int((values > 1e-10 * values.max()).sum()) == width**2
    least = torch.linalg.pinv(whole.dense(), rtol=1e-10, hermitian=True) @ gradient
    if depth == 1:
        close(least, direction, rtol=1e-7)
    else:
        close(whole.dense() @ least, gradient, rtol=1e-7)
        assert float((least - direction / depth).norm()) > 1e-2 * float(least.norm())


def test_c06_needs_the_network_to_be_linear() -> None:
    model = deep_linear(3, 3, TANH)
    x, y = torch.randn(40, 3), torch.randn(40, 3)
    tangent, likelihood = Tangent(model), Gaussian()
    gradient = tangent.at(x).rmv(torch.randn(40, 3))
    direction = estimate.blocks(tangent, likelihood, [(x, y)]).with_prior(0.0).solve(gradient)
    product = estimate.full(tangent, likelihood, [(x, y)]).mv(direction)
    assert float((product - 3 * gradient).norm()) > 0.05 * float(gradient.norm())


def test_c06_under_the_lemmas_conditions_the_kronecker_blocks_are_exact() -> None:
    """Section 4.2: G_l does not depend on the data, so that the expectation of the product is the product."""
    model, likelihood = deep_linear(3, 3), Gaussian(0.7)
    data = [(torch.randn(8, 3), torch.randn(8, 3))]
    found = estimate.kflr(Tangent(model), likelihood, data).dense()
    close(found, estimate.blocks(Tangent(model), likelihood, data).dense())


# -- C07 ------------------------------------------------------------------------------------------------------------


def output_factors(curvature: Blocks) -> list[Tensor]:
    found = []
    for block in curvature.blocks:
        assert isinstance(block.curvature, Kronecker)
        found.append(block.curvature.factors[1][0])
    return found


@by_likelihood
def test_c07_kflr_has_the_exact_sums_of_pre_activation_ggns_and_of_inputs(likelihood: Likelihood) -> None:
    """4.3.1 and 4.3: the output factor is sum_n G_l, the input factor the mean of a a^T, however the data are split."""
    model, [(x, y)] = problem(likelihood, TANH, points=7)
    points = [unroll(model, TANH, likelihood, x[n], y[n]) for n in range(7)]
    for data in ([(x, y)], [(x[:3], y[:3]), (x[3:4], y[3:4]), (x[4:], y[4:])]):
        found = estimate.kflr(Tangent(model), likelihood, data)
        for layer, rows in enumerate(output_factors(found)):
            close(rows, torch.stack([u.gauss_newtons()[layer] for u in points]).sum(0))
            block = found.blocks[layer].curvature
            assert isinstance(block, Kronecker)
            close(
                block.factors[0][0],
                torch.stack([torch.outer(u.inputs[layer], u.inputs[layer]) for u in points]).mean(0),
            )


@pytest.mark.parametrize("samples", [1, 4, 32])
def test_c07_kfac_converges_to_kflr_as_one_over_root_samples(samples: int) -> None:
    """4.9: unbiased, with a mean squared error of v / samples, v = sum_n E|g g^T|^2 - |E g g^T|^2 by enumeration.

    The mean over 30 repetitions lies within four of its standard errors, for every layer.
    """
    likelihood, repeats = Categorical(), 30
    model, [(x, y)] = problem(likelihood, TANH, points=6)
    exact = output_factors(estimate.kflr(Tangent(model), likelihood, [(x, y)]))
    probabilities = model(x).detach().softmax(1)
    single = [0.0] * len(exact)  # v of each layer
    for n in range(len(x)):
        u = unroll(model, TANH, likelihood, x[n], y[n])
        for layer in range(u.depth):
            pulled = u.between(u.depth - 1, layer).mT @ (probabilities[n] - torch.eye(3)).mT  # one column per target
            fourth = (probabilities[n] * pulled.square().sum(0).square()).sum()
            single[layer] += float(fourth - u.gauss_newtons()[layer].square().sum())
    g = torch.Generator().manual_seed(0)
    estimates = [
        output_factors(estimate.kfac(Tangent(model), likelihood, [(x, y)], samples=samples, generator=g))
        for _ in range(repeats)
    ]
    for layer, expected in enumerate(exact):
        errors = torch.stack([found[layer] - expected for found in estimates])
        squares = errors.square().sum((1, 2))
        assert abs(float(squares.mean()) - single[layer] / samples) < 4 * float(squares.std()) / sqrt(repeats)
        # unbiased: the mean error has a mean square of v / samples / repeats, and spreads about as much
        assert float(errors.mean(0).square().sum()) < 9 * single[layer] / samples / repeats


# -- C08 ------------------------------------------------------------------------------------------------------------


def factors_of(found: Blocks) -> list[tuple[Tensor, Tensor]]:
    """(A, G) of every layer, [a; 1] with the bias last."""
    out = []
    for block in found.blocks:
        assert isinstance(block.curvature, Kronecker)
        cols, rows = block.curvature.factors
        out.append((cols[0], rows[0]))
    return out


def in_flat_order(product: Tensor, rows: int, width: int) -> Tensor:
    return by_layer(product.reshape(rows, width, rows, width))


def test_c08_the_eigenbasis_inverts_the_damped_product_exactly() -> None:
    """(A (x) G + delta I)^-1 by two small eigendecompositions, from a fitted Kronecker curvature."""
    likelihood = Categorical()
    model, data = problem(likelihood, TANH, points=7)
    found = estimate.kflr(Tangent(model), likelihood, data)
    v = torch.randn(found.size)
    for delta in (1e-3, 1.0, 30.0):
        precision = found.with_prior(delta)
        inverses = []
        for a, g in factors_of(found):
            block = in_flat_order(torch.kron(g, a), len(g), len(a))
            inverses.append(torch.linalg.inv(block + delta * torch.eye(len(block))))
        expected = torch.block_diag(*inverses)
        close(precision.solve(v), expected @ v)
        close(precision.solve(torch.eye(found.size)), expected)
        close(precision.logdet(), -torch.linalg.slogdet(expected).logabsdet)


def test_c08_factored_damping_is_a_product_of_damped_factors() -> None:
    """(A + w sqrt(d) I) (x) (G + sqrt(d) / w I), w = sqrt(tr A dim G / (tr G dim A)): 4.25, and 4.27 in trace norm."""
    likelihood, delta = Categorical(), 0.3
    model, data = problem(likelihood, TANH, points=7)
    found = estimate.kflr(Tangent(model), likelihood, data, factored_damping=True)
    blocks = []
    for a, g in factors_of(found):
        omega = sqrt(float(a.trace()) * len(g) / (float(g.trace()) * len(a)))
        product = torch.kron(g + sqrt(delta) / omega * torch.eye(len(g)), a + omega * sqrt(delta) * torch.eye(len(a)))
        blocks.append(in_flat_order(product, len(g), len(a)))
    expected = torch.block_diag(*blocks)
    precision = found.with_prior(delta)
    v = torch.randn(found.size)
    close(precision.solve(v), torch.linalg.solve(expected, v))
    close(precision.logdet(), torch.linalg.slogdet(expected).logabsdet)
    exact = estimate.kflr(Tangent(model), likelihood, data).with_prior(delta)
    assert float(precision.logdet()) > float(exact.logdet())  # the cross terms only add


def test_c08_plain_damping_adds_the_root_of_the_prior_to_both_factors() -> None:
    """(A + sqrt(d) I) (x) (G + sqrt(d) I): 4.4.2 without omega."""
    likelihood, delta = Categorical(), 0.3
    model, data = problem(likelihood, TANH, points=7)
    found = estimate.kflr(Tangent(model), likelihood, data, factored_damping="plain")
    blocks = []
    for a, g in factors_of(found):
        product = torch.kron(g + sqrt(delta) * torch.eye(len(g)), a + sqrt(delta) * torch.eye(len(a)))
        blocks.append(in_flat_order(product, len(g), len(a)))
    expected = torch.block_diag(*blocks)
    precision = found.with_prior(delta)
    v = torch.randn(found.size)
    close(precision.solve(v), torch.linalg.solve(expected, v))
    close(precision.logdet(), torch.linalg.slogdet(expected).logabsdet)
    with pytest.raises(ParameterError, match="factored_damping is 'trace'; expected False, True or 'plain'"):
        estimate.kflr(Tangent(model), likelihood, data, factored_damping="trace")


def test_c08_omega_minimises_the_bound_on_the_residual() -> None:
    """4.26: |R(w)| <= sqrt(d) (|A (x) I| / w + w |I (x) G|), least at w* = sqrt(|A (x) I| / |I (x) G|).

    In the trace norm of PSD factors the bound is the residual itself.
    """
    likelihood, delta = Categorical(), 0.3
    model, data = problem(likelihood, TANH, points=7)
    for a, g in factors_of(estimate.kflr(Tangent(model), likelihood, data)):
        eye_a, eye_g = torch.eye(len(a)), torch.eye(len(g))

        def bound(omega: float, a=a, g=g, eye_a=eye_a, eye_g=eye_g) -> float:
            norms = float(torch.kron(a, eye_g).trace()), float(torch.kron(eye_a, g).trace())
            return sqrt(delta) * (norms[0] / omega + omega * norms[1])

        best = sqrt(float(a.trace()) * len(g) / (float(g.trace()) * len(a)))
        for factor in (0.01, 0.5, 0.9, 0.999, 1.001, 1.1, 2.0, 100.0):
            assert bound(best * factor) > bound(best)
        damped = torch.kron(a + best * sqrt(delta) * eye_a, g + sqrt(delta) / best * eye_g)
        residual = torch.kron(a, g) + delta * torch.eye(len(damped)) - damped
        assert float(torch.linalg.svdvals(residual).sum()) == pytest.approx(bound(best), rel=1e-9)


@pytest.mark.parametrize("scale", [1e-4, 0.1, 7.0, 1e4])
def test_c08_damping_does_not_depend_on_how_scale_is_divided_between_the_factors(scale: float) -> None:
    root_a, root_g = torch.randn(3, 3), torch.randn(2, 2)
    a, g = root_a @ root_a.mT, root_g @ root_g.mT
    layout = MatrixLayout(0, (2, 3), (0, 1), 1, 2, 3)
    v = torch.randn(6)

    def solved(a: Tensor, g: Tensor, count: float) -> Tensor:
        curvature = Kronecker(layout, (Term(a[None], g[None], count),), factored_damping=True)
        return curvature.with_prior(0.4).solve(v)

    close(solved(scale * a, g / scale, 1.0), solved(a, g, 1.0))
    close(solved(5 * a, g, 5.0), solved(a, g, 1.0))  # the count is such a scale
