"""attach: what it chooses and says, what calibration does to the posterior, and what it never does to the model."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import jaxtyping
import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing import FullLaplace, KronLaplace, Laplace, attach
from lapwing.errors import DataError, LapwingWarning, ModelError, OptionError, ParameterError, UnsupportedOperationError
from lapwing.laplace.calibration import COVARIANCE, calibrate
from lapwing.laplace.factory import FULL_LIMIT
from lapwing.likelihoods import Categorical, Gaussian, from_function
from unchanged import unchanged


def network(width: int = 5, outputs: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Dropout(0.3), nn.Linear(width, outputs)).double()


def regression(n: int, seed: int, noise: float = 0.3) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, generator=generator, dtype=torch.float64)
    y = x.sum(1, keepdim=True).sin() + noise * torch.randn(n, 1, generator=generator, dtype=torch.float64)
    return list(zip(x.split(20), y.split(20), strict=True))


def classes(n: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    return [(x, (y[:, 0] > 0).long() + (x[:, 0] > 1).long()) for x, y in regression(n, seed)]


class Token(nn.Module):
    """A parameter that forms no Kronecker product, and more weights than a full matrix is kept for."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.body = nn.Parameter(torch.randn(2)), nn.Linear(4, 700)
        self.head = nn.Linear(700, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(torch.hstack([x, self.token.expand(len(x), -1)]))))


@pytest.mark.parametrize("task", ["regression", "classification"])
def test_a_network_gets_error_bars_in_one_call(task: str) -> None:
    model = network(outputs=3 if task == "classification" else 1)
    data = classes if task == "classification" else regression
    with unchanged(model):
        la = attach(model, data(60, 0), task, val_loader=data(40, 1))
        out = la(data(20, 2)[0][0])
    assert isinstance(la, FullLaplace)
    assert la.n_data == 60
    assert [line.split(":")[0] for line in la.choices] == [
        "Structure",
        "Prior precision",
        *["Noise"] * (task == "regression"),
        "Calibration",
    ]
    assert isinstance(out, tuple) == (task == "regression")


def test_it_is_fit_and_tuning_by_the_evidence() -> None:
    model = network()
    la = attach(model, regression(60, 0), "regression")
    other = Laplace(model, "regression", "all", "full")
    other.fit(regression(60, 0))
    other.optimize_prior_precision(optimize_sigma_noise=True)
    torch.testing.assert_close(la.prior_precision, other.prior_precision)
    torch.testing.assert_close(la.sigma_noise, other.sigma_noise)
    assert la.temperature == 1
    assert la.choices[-1] == "Calibration: none, as no val_loader was given."


def test_the_structure_follows_the_size() -> None:
    assert Laplace(network(), "regression", "all", "auto").reason.startswith("full: 21 weights")
    big = network(width=900)
    assert sum(p.numel() for p in big.parameters()) > FULL_LIMIT
    la = Laplace(big, "regression", "all", "auto")
    assert type(la) is KronLaplace
    assert la.reason == "kron: 3,601 weights, more than the 3,000 that a full matrix is kept for"
    some = Laplace(big, "regression", "subnetwork", "auto", subnetwork_indices=torch.arange(7))
    assert some.structure == "full"
    many = Laplace(big, "regression", "subnetwork", "auto", subnetwork_indices=torch.arange(3100))
    assert many.structure == "diag"
    last = Laplace(big, "regression", "last_layer", "auto")
    assert last.reason == "full: 901 weights, so every covariance fits (up to 3,000)"
    wide = nn.Sequential(nn.Linear(2, 60), nn.Tanh(), nn.Linear(60, 60), nn.Tanh(), nn.Linear(60, 1))
    named = Laplace(wide, "regression", "last_layer", "auto", last_layer_name="2")
    assert named.reason.startswith("kron: 3,660 weights")
    assert Laplace(nn.Conv2d(1, 4000, 1), "regression", "last_layer", "auto").structure == "kron"
    assert Laplace(network(), "regression", "all", "kron").reason == ""
    with pytest.raises(OptionError, match="'auto'"):
        Laplace(big, "regression", "all", "automatic")


def test_exact_blocks_serve_where_there_are_no_kronecker_factors() -> None:
    model = Token()
    data = [(x.float(), y.float()) for x, y in regression(20, 0)]
    with unchanged(model):
        la = attach(model, iter(data), "regression")
    assert type(la) is KronLaplace
    assert la.n_data == 20
    assert la.choices[1] == la.exact_blocks
    assert la.choices[1].startswith(
        "Exact blocks instead of Kronecker factors: 'token' (dense), used by 'hstack' in a way"
    )
    with pytest.raises(UnsupportedOperationError, match="'token'"):
        attach(model, data, "regression", structure="kron", on_unsupported="error")


# -- approximations learn their width from the exact posterior of some rows ------------------------------------------


def variances(la: lapwing.BaseLaplace, loader: list[tuple[Tensor, Tensor]]) -> Tensor:
    return torch.cat([la(x, diagonal_output=True)[1] for x, _ in loader])


@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_prior_noise_and_mean_variance_are_those_of_the_exact_posterior(structure: str, subset: str) -> None:
    model, data = network(), regression(60, 0)
    with unchanged(model):
        la = attach(model, data, "regression", structure=structure, subset_of_weights=subset)
    exact = attach(model, data, "regression", structure="full", subset_of_weights=subset)
    torch.testing.assert_close(la.sigma_noise, exact.sigma_noise, rtol=1e-5, atol=0)
    factor = la.temperature
    assert factor != 1
    torch.testing.assert_close(la.prior_precision * factor, exact.prior_precision, rtol=1e-5, atol=0)
    torch.testing.assert_close(variances(la, data).mean(), variances(exact, data).mean(), rtol=1e-4, atol=0)
    assert la.choices[1].startswith("Width: prior and noise by the exact evidence of all 60 rows, in function space")
    assert la.choices[-2].startswith("Noise: standard deviation")


def test_some_rows_give_the_factor_of_the_structure_on_the_same_rows() -> None:
    """Not the ratio to the exact posterior of fewer rows, which is wider for another reason."""
    model, data = network(), regression(60, 0)

    def made() -> lapwing.BaseLaplace:
        return attach(model, data, "regression", structure="kron", rows=20, generator=torch.Generator().manual_seed(3))

    la = made()
    torch.testing.assert_close(made().temperature, la.temperature)
    assert "20 of 60 rows, drawn at random" in la.choices[1]
    some = lapwing.estimate.subset(data, 20, torch.Generator().manual_seed(3))
    exact, kron = Laplace(model, "regression", "all", "full"), Laplace(model, "regression", "all", "kron")
    exact.fit(some)
    exact.optimize_prior_precision(optimize_sigma_noise=True)
    kron.fit(some)
    kron.prior_precision, kron.sigma_noise = exact.prior_precision, exact.sigma_noise
    torch.testing.assert_close(la.sigma_noise, exact.sigma_noise, rtol=1e-4, atol=0)
    factor = variances(exact, some).sum() / variances(kron, some).sum()
    torch.testing.assert_close(la.temperature, factor, rtol=1e-3, atol=0)
    assert la.n_data == 60


def test_without_rows_the_structure_tunes_itself() -> None:
    model, data = network(), regression(60, 0)
    la = attach(model, data, "regression", structure="kron", rows=0)
    other = Laplace(model, "regression", "all", "kron")
    other.fit(data)
    other.optimize_prior_precision(optimize_sigma_noise=True)
    torch.testing.assert_close(la.sigma_noise, other.sigma_noise)
    assert la.temperature == 1
    for wrong in (-1, True):
        with pytest.raises(ParameterError, match="rows is"):
            attach(model, data, "regression", rows=wrong)


@pytest.mark.parametrize("structure", ["kron", "ekfac"])
def test_a_known_noise_is_found_and_intervals_cover(structure: str) -> None:
    """Noise of 0.1, 100 rows, 3,200 weights. By the evidence of Kronecker factors: 0.6, and all rows covered."""
    generator = torch.Generator().manual_seed(0)

    def rows(n: int) -> tuple[Tensor, Tensor]:
        x = 4 * torch.rand(n, 2, generator=generator) - 2
        return x, torch.sin(2 * x[:, :1]) + 0.3 * x[:, 1:] + 0.1 * torch.randn(n, 1, generator=generator)

    (x, y), (new, truth) = rows(100), rows(1000)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 54), nn.Tanh(), nn.Linear(54, 54), nn.Tanh(), nn.Linear(54, 1))
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(400):
        optimiser.zero_grad()
        (model(x) - y).square().mean().backward()
        optimiser.step()
    la = attach(model, [(x, y)], "regression", structure=structure)
    assert 0.08 < float(la.sigma_noise) < 0.13
    law = la.predict_distribution(new)
    low, high = law.interval(0.9)
    covered = ((truth[:, 0] > low) & (truth[:, 0] < high)).double().mean()
    assert 0.85 < float(covered) < 0.97
    alone = attach(model, [(x, y)], "regression", structure=structure, rows=0)
    assert float(alone.sigma_noise) > 0.2


def shrunk(la: lapwing.BaseLaplace, factor: float) -> None:
    """The same posterior with its covariance multiplied."""
    la.temperature = la.temperature * factor
    la.prior_precision = la.prior_precision / factor


@pytest.mark.parametrize("kind", ["classification", "binary", "fixed noise"])
def test_calibration_undoes_a_wrong_scale(kind: str) -> None:
    """Targets drawn from the posterior predictive are best explained by the covariance that made them."""
    generator = torch.Generator().manual_seed(0)
    outputs = 3 if kind == "classification" else 1
    likelihood = {"classification": Categorical(), "binary": "binary", "fixed noise": Gaussian(torch.full((1,), 0.1))}
    model = network(outputs=outputs)
    x = 3 * torch.randn(4000, 2, generator=generator, dtype=torch.float64)
    first = torch.zeros(20, 1, dtype=torch.float64) if kind != "classification" else torch.zeros(20).long()
    la = Laplace(model, likelihood[kind], "all", "full", prior_precision=2.0)
    la.fit([(x[:20] / 3, first)])
    if kind == "fixed noise":
        mean, variance = la(x, diagonal_output=True)
        assert isinstance(variance, Tensor)
        noise = torch.randn(mean.shape, generator=generator, dtype=torch.float64)
        y = mean + (variance + 0.01).sqrt() * noise
    else:
        p = la(x)
        assert isinstance(p, Tensor)
        y = (
            torch.bernoulli(p, generator=generator)
            if kind == "binary"
            else torch.multinomial(p, 1, generator=generator)[:, 0]
        )
    before = la(x[:5])
    variance = la.posterior_variance.clone()
    shrunk(la, 0.1)
    torch.testing.assert_close(la.posterior_variance, variance / 10)
    with unchanged(model):
        said = calibrate(la, [(x, y)])
    assert "was multiplied by" in said
    scale = la.posterior_variance / variance
    assert 0.6 < float(scale.mean()) < 1.7
    torch.testing.assert_close(la(x[:5]), before, rtol=0.3, atol=0.1)


def test_calibration_finds_the_noise_of_a_regression() -> None:
    la = attach(network(), regression(80, 0), "regression")
    variance = la.posterior_variance.clone()
    x = torch.cat([x for x, _ in regression(2000, 3)])
    mean, spread = la(x, diagonal_output=True)
    assert isinstance(spread, Tensor)
    sigma = float(la.sigma_noise)
    noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = mean + (spread + (2 * sigma) ** 2).sqrt() * noise
    said = calibrate(la, [(x, y)])
    assert "and the noise by" in said
    assert float(la.sigma_noise) == pytest.approx(2 * sigma, rel=0.1)
    # the noise has changed, and the covariance of the weights only by the factor that is named
    factor = float(said.split("multiplied by ")[1].split(" ")[0])
    torch.testing.assert_close(la.posterior_variance, variance * factor, rtol=1e-2, atol=0)


def test_calibration_leaves_what_is_right() -> None:
    la = attach(network(), regression(80, 0), "regression")
    x = torch.cat([x for x, _ in regression(200, 3)])
    mean, spread = la(x, diagonal_output=True)
    assert isinstance(spread, Tensor)
    noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = mean + (spread + la.sigma_noise**2).sqrt() * noise
    before = la.prior_precision.clone(), la.sigma_noise.clone(), la.temperature.clone()
    assert "left as the evidence chose it" in calibrate(la, [(x, y)])
    assert (la.prior_precision, la.sigma_noise, la.temperature) == before
    assert bool((COVARIANCE == 1).any())


def test_other_likelihoods_are_not_calibrated() -> None:
    rows = regression(40, 0)
    la = attach(network(), rows, from_function(lambda f, y: (f - y).pow(4).sum()), val_loader=rows)
    assert la.choices[-1].startswith("Calibration: none, as predictions of FromFunction")
    assert la.temperature == 1


def test_bad_input_is_named() -> None:
    la = attach(network(), regression(40, 0), "regression")
    with pytest.raises(DataError, match="no target"):
        calibrate(la, [])
    with pytest.raises(DataError, match="expected a pair"):
        calibrate(la, [torch.zeros(3, 2)])
    with pytest.raises(OptionError, match="unknown hessian_structure"):
        attach(network(), regression(40, 0), "regression", structure="fll")


def test_what_is_no_module_is_named_with_the_one_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as for users

    class Skorch:
        module_ = nn.Linear(2, 3)

    given: list[Any] = [Skorch(), 3]
    with pytest.raises(ModelError) as first:
        lapwing.attach(given[0], [], "classification")
    assert str(first.value) == "the model is a Skorch; expected a torch.nn.Module. Give its module_, which is one."
    with pytest.raises(ModelError) as second:
        lapwing.Laplace(given[1], "classification")
    assert str(second.value) == "the model is a int; expected a torch.nn.Module. Give the network itself."


def test_probabilities_are_not_taken_for_logits() -> None:
    data = classes(40, 0)
    width, count = data[0][0].shape[1], 1 + max(int(y.max()) for _, y in data)
    inner = nn.Linear(width, count, dtype=torch.float64)
    with pytest.raises(DataError, match=r"outputs are probabilities.*Leave out the softmax"):
        lapwing.attach(nn.Sequential(inner, nn.Softmax(1)), data, "classification")
    logs = lapwing.attach(nn.Sequential(inner, nn.LogSoftmax(1)), data, "classification")  # these are logits as well
    plain = lapwing.attach(inner, data, "classification")
    assert float(logs.log_marginal_likelihood()) == pytest.approx(float(plain.log_marginal_likelihood()), rel=1e-6)
    binary = [(x, (y[:, None] == torch.arange(count)).float()) for x, y in data]
    with pytest.warns(LapwingWarning, match="lie between 0 and 1; expected logits"):
        lapwing.attach(nn.Sequential(inner, nn.Sigmoid()), binary, "binary")


def test_a_posterior_says_what_it_is() -> None:
    data = regression(40, 0)
    width = data[0][0].shape[1]
    la = lapwing.Laplace(
        nn.Sequential(nn.Linear(width, 1, dtype=torch.float64)), "regression", "all", "full", prior_precision=2.0
    )
    assert str(la) == (
        f"FullLaplace: full posterior over {width + 1} parameters of Sequential, Gaussian likelihood, not fitted; "
        "prior_precision 2, sigma_noise 1, temperature 1"
    )
    la.fit(data)
    assert "fitted to 40 points" in repr(la)
    assert "not fitted" in str(lapwing.Laplace(nn.Linear(width, 1), "regression", "last_layer", "kron"))


def test_importing_lapwing_imports_no_pictures_and_no_tables() -> None:
    code = (
        "import sys, lapwing; assert not {'matplotlib', 'pandas', 'sklearn'} & set(sys.modules); "
        "lapwing.attach, lapwing.report; assert 'attach' in dir(lapwing); "
        "assert not {'matplotlib', 'pandas', 'sklearn'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    with pytest.raises(AttributeError, match="no attribute 'attached'"):
        _ = lapwing.attached
