"""theta* among the outputs is theta* among the weights: Newton's method with kernels, and with a dense Jacobian."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import linearised
import oracle
from lapwing.errors import OptionError
from lapwing.evidence import em, function_space
from lapwing.laplace import BaseLaplace, Laplace, linear_modes
from lapwing.laplace.hyper import prior_of
from lapwing.likelihoods import Categorical, HeteroscedasticGaussian
from lapwing.priors import Prior
from linearised import DOUBLE, Dense

Batches = list[tuple[Tensor, Tensor]]


def with_norm() -> nn.Sequential:
    """Two scale-invariant weights, one of a convolution; 4 x 4 images in, three classes out."""
    torch.manual_seed(2)
    layers = [nn.Conv2d(1, 3, 3, bias=False), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 5, bias=False)]
    return nn.Sequential(*layers, nn.LayerNorm(5), nn.Linear(5, 3)).double()


def fitted(likelihood: Any = "classification", structure: str = "kron", **options: Any) -> tuple[BaseLaplace, Batches]:
    """24 or 36 outputs, 75 or so weights far from their mode, and batches of 7 and 5 data points."""
    name = likelihood if isinstance(likelihood, str) else "regression"
    outputs = 1 if name == "regression" else 2
    x, y = linearised.data(name, outputs=outputs)
    model = linearised.network(2, 15, 2 if not isinstance(likelihood, str) else outputs)
    with torch.no_grad():
        model[0].weight.mul_(3)
    la = Laplace(model, likelihood, "all", structure, **{"prior_precision": 0.7, **options})
    batches = [(x[:7], y[:7]), (x[7:], y[7:])]
    la.fit(batches)
    return la, batches


def normalised(**options: Any) -> tuple[BaseLaplace, Batches]:
    x = torch.randn(12, 1, 4, 4, dtype=DOUBLE, generator=torch.Generator().manual_seed(3))
    la = Laplace(with_norm().eval(), "classification", "all", "kron", **options)
    y = x.flatten(1)[:, :15].reshape(12, 3, 5).mean(2).argmax(1)
    batches = [(x[:7], y[:7]), (x[7:], y[7:])]
    la.fit(batches)
    return la, batches


def joined(batches: Batches) -> tuple[Tensor, Tensor]:
    xs, ys = zip(*batches, strict=True)
    return torch.cat(xs), torch.cat(ys)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * float(expected.abs().max()))


def meets_the_oracle(la: BaseLaplace, batches: Batches) -> None:
    mode = la.linear_mode(batches, tolerance=1e-12)
    close(mode.weights, Dense.of(la, *joined(batches)).mode())
    assert mode.converged
    assert mode.products == 0  # no conjugate gradients
    assert mode.passes == 3  # at the trained weights, for the kernels, and to verify
    assert 0 < mode.rounds < 20


@pytest.mark.parametrize("likelihood", ["classification", "binary", "poisson"])
def test_under_one_precision(likelihood: str) -> None:
    meets_the_oracle(*fitted(likelihood, prior_mean=0.1, temperature=0.8))


@pytest.mark.parametrize(("structure", "size"), [("kron", 4), ("diag", 77)])
def test_under_a_precision_per_tensor_and_per_entry(structure: str, size: int) -> None:
    precision, mean = torch.logspace(-1, 1, size, dtype=DOUBLE), torch.linspace(-1, 1, 77, dtype=DOUBLE)
    meets_the_oracle(*fitted(structure=structure, prior_precision=precision, prior_mean=mean))


def test_under_a_precision_per_scale_invariant_group() -> None:
    la, batches = normalised(prior_mean=0.05)
    la.prior_groups = la._groups_for("scale_invariant")
    assert len(la.prior_groups) == 3
    la.prior_precision = torch.tensor([0.2, 3.0, 0.8], dtype=DOUBLE)
    meets_the_oracle(la, batches)


def test_with_gaussian_noise_and_many_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_modes, "FEW", 1)
    meets_the_oracle(*fitted("regression", sigma_noise=0.3, temperature=1.2))


def test_of_a_likelihood_that_is_not_convex_it_is_a_stationary_point() -> None:
    la, batches = fitted(HeteroscedasticGaussian(), prior_precision=5.0)
    mode = la.linear_mode(batches, tolerance=1e-6)
    assert mode.products == 0
    assert float(Dense.of(la, *joined(batches)).gradient(mode.weights).norm()) <= 1.01e-6 * mode.scale


def test_of_a_subnetwork() -> None:
    chosen = torch.cat([torch.arange(0, 30, 2), torch.arange(31, 77, 2)])
    la, batches = fitted()
    la = Laplace(la.model, "classification", "subnetwork", "full", subnetwork_indices=chosen, prior_precision=0.4)
    la.fit(batches)
    meets_the_oracle(la, batches)


class PerPixel(nn.Module):
    """Classes at every pixel, on axis 1, from a convolution and a map that all pixels share."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(1, 6, 2).double(), nn.Conv2d(6, 2, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def test_of_pixels_and_of_batches_of_several_sizes() -> None:
    """Outputs [B, C, H, W], whose class axis is not the last; images of two sizes."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for points, size in ((1, 3), (2, 4)):
        x = torch.randn(points, 1, size, size, dtype=DOUBLE, generator=generator)
        batches.append((x, torch.randint(2, (points, size - 1, size - 1), generator=generator)))
    la = Laplace(PerPixel(), Categorical(), "all", "kron", prior_precision=0.3)
    la.fit(batches)
    at_mode = la.evidence_at_mode(batches, tolerance=1e-12)
    data = at_mode.data
    functions = function_space.FunctionSpace.of(data, 2 * (4 + 2 * 9))
    assert functions is not None
    at_mode.functions = functions
    prior = la.hyper.base(la.space)
    mode = at_mode.mode(prior)
    # the oracle goes from batch to batch
    parts = [Dense.of(la, x, y) for x, y in batches]
    gradient = sum(part.gradient(mode.weights) for part in parts) - 0.3 * mode.weights
    assert float(gradient.norm()) <= 1e-11 * mode.scale
    assert mode.products == 0


@pytest.mark.parametrize("structure", ["scalar", "layerwise", "diag", "scale_invariant"])
def test_the_kernel_is_that_of_the_dense_jacobian(structure: str) -> None:
    la, batches = normalised()
    groups = la._groups_for(structure)
    at_mode = la.evidence_at_mode(batches)
    size = {"scalar": 1, "layerwise": len(la.space.names), "diag": la.n_params, "scale_invariant": 3}[structure]
    precision = torch.logspace(-1, 1, size, dtype=DOUBLE)
    prior = linear_prior(la, precision, groups)
    assert at_mode.functions is not None
    rows = oracle.jacobian(la.model, joined(batches)[0]).flatten(0, 1)
    close(at_mode.functions.kernel(prior), (rows / prior.precision()) @ rows.mT)


def test_the_log_determinant_is_that_of_the_exact_curvature() -> None:
    la, batches = normalised()
    at_mode = la.evidence_at_mode(batches)
    exact = Laplace(la.model, "classification", "all", "full", temperature=0.7)
    exact.fit(batches)
    prior = linear_prior(la, torch.logspace(-1, 1, len(la.space.names), dtype=DOUBLE), None)
    expected = exact.evidence.precision(prior, 1.0, 0.7).logdet() - prior.precision().log().sum()
    assert at_mode.functions is not None
    assert at_mode.functions.logdet(prior, 1 / 0.7) == pytest.approx(float(expected), rel=1e-9)


def linear_prior(la: BaseLaplace, precision: Tensor, groups: Any) -> Prior:
    return prior_of(la.space, precision, torch.zeros((), dtype=DOUBLE), groups)


def test_further_priors_cost_no_pass_and_the_finer_groups_serve_the_coarser() -> None:
    la, batches = normalised()
    at_mode = la.evidence_at_mode(batches, tolerance=1e-12)
    functions = at_mode.functions
    assert functions is not None
    priors = [linear_prior(la, torch.tensor([p], dtype=DOUBLE), None) for p in (0.5, 3.0)]
    priors.append(linear_prior(la, torch.logspace(-1, 1, len(la.space.names), dtype=DOUBLE), None))
    priors.append(priors[0])
    passes, dense = at_mode.data.passes, Dense.of(la, *joined(batches))
    counts = []
    for prior in priors:
        dense.precision = prior.precision()
        at_mode.settled(prior)
        close(at_mode.settled(prior).mean, dense.mode())
        counts.append(len(functions._kernels))
    assert at_mode.data.passes == passes == 2
    assert counts == [1, 1, len(la.space.names), len(la.space.names)]


def test_kernels_that_do_not_fit_are_summed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    la, batches = normalised()
    at_mode = la.evidence_at_mode(batches, tolerance=1e-12)
    assert at_mode.functions is not None
    monkeypatch.setattr(function_space, "KEPT", 11 * 36**2 * 8)  # of eight kernels, and four to work with
    prior = linear_prior(la, torch.logspace(-1, 1, len(la.space.names), dtype=DOUBLE), None)
    dense = Dense.of(la, *joined(batches))
    dense.precision = prior.precision()
    close(at_mode.mode(prior).weights, dense.mode())
    assert not at_mode.functions._kernels


@pytest.mark.parametrize(("name", "value"), [("OUTPUTS", 23), ("KEPT", 10_000), ("KEPT", 30_000)])
def test_where_outputs_are_too_many_the_passes_of_before_are_taken(
    monkeypatch: pytest.MonkeyPatch, name: str, value: int
) -> None:
    la, batches = fitted()
    expected = la.linear_mode(batches, tolerance=1e-10)
    monkeypatch.setattr(function_space, name, value)
    mode = la.linear_mode(batches, tolerance=1e-10)
    assert expected.products == 0
    assert mode.products > 0
    close(mode.weights, expected.weights, 1e-7)
    with pytest.raises(OptionError, match=r"solver='exact' for 24 outputs .* and 77 weights; expected .*structure"):
        la.linear_mode(batches, solver="exact")


def test_the_joint_fixed_point_is_that_of_passes_over_the_data() -> None:
    x, y = linearised.data("classification", points=30)
    la = Laplace(linearised.network(2, 15, 2), "classification", "all", "kron")
    la.fit([(x, y)])
    found = []
    for solver in ("auto", "structure"):
        at_mode = la.evidence_at_mode([(x, y)], solver=solver)
        assert (at_mode.functions is not None) == (solver == "auto")
        tuned = em(at_mode, la.hyper.base(la.space))
        assert tuned.converged
        assert 0.01 < float(tuned.prior.precisions) < 100
        found.append(tuned.prior.precisions)
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=0)
    la.optimize_prior_precision(method="em", at="linear_mode", train_loader=[(x, y)])
    torch.testing.assert_close(la.prior_precision, found[0], rtol=1e-5, atol=0)
    assert la.tuned is not None
    assert la.tuned.mode is not None
    assert la.tuned.mode.products == 0


def test_float32_meets_float64() -> None:
    la, batches = normalised(prior_precision=0.5)
    expected = la.linear_mode(batches)
    short = Laplace(with_norm().eval().float(), "classification", "all", "kron", prior_precision=0.5)
    batches = [(x.float(), y) for x, y in batches]
    short.fit(batches)
    mode = short.linear_mode(batches)
    assert mode.converged
    assert mode.products == 0
    close(mode.weights.double(), expected.weights, 1e-3)
