"""What users do with a posterior: shapes, unchanged models, adding data, state, and input of every bad kind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import chosen
import lapwing
from lapwing import Laplace, estimate
from lapwing.errors import (
    CurvatureError,
    DataError,
    LikelihoodError,
    ModelError,
    NotFittedError,
    OptionError,
    ParameterError,
)
from lapwing.laplace import BaseLaplace
from lapwing.laplace.factory import CLASSES
from lapwing.laplace.structures import STRUCTURES
from lapwing.likelihoods import Bernoulli, Categorical, Gaussian, Poisson
from lapwing.tangent import Tangent
from unchanged import unchanged

B, D, C = 6, 4, 3


def mlp(outputs: int = C) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Dropout(0.3), nn.BatchNorm1d(5), nn.Linear(5, outputs)).double()


def inputs(n: int = B, seed: int = 1) -> Tensor:
    return torch.randn(n, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def batches(task: str) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    if task == "classification":
        return [(inputs(8, s), torch.randint(C, (8,), generator=generator)) for s in range(3)]
    return [(inputs(8, s), torch.randn(8, C, generator=generator, dtype=torch.float64)) for s in range(3)]


def made(subset: str, structure: str, task: str = "classification", **options: object) -> BaseLaplace:
    if subset == "subnetwork":
        options["subnetwork_indices"] = chosen.positions(mlp(), structure)
    if structure == "lowrank":
        options["rank"] = 5
    return Laplace(mlp(), task, subset, structure, **options)


every_class = pytest.mark.parametrize(("subset", "structure"), list(CLASSES))
every_task = pytest.mark.parametrize("task", ["classification", "regression"])


@every_class
@every_task
def test_a_posterior_from_fit_to_prediction(subset: str, structure: str, task: str) -> None:
    la = made(subset, structure, task)
    model = la.model
    x = inputs()
    with unchanged(model):
        la.fit(batches(task))
        la.optimize_prior_precision()
        out = la(x)
        samples = [la.functional_samples(x, kind, n_samples=7) for kind in ("glm", "nn")]
        draws = [la.predictive_samples(x, kind, n_samples=7) for kind in ("glm", "nn")]
        weights = la.sample(4)
    assert type(la) is CLASSES[subset, structure]
    assert la.n_data == 24
    assert all(each.shape == (7, B, C) for each in [*samples, *draws])
    assert weights.shape == (4, la.n_params)
    assert bool(torch.isfinite(la.log_marginal_likelihood()))
    if task == "regression":
        assert isinstance(out, tuple)
        assert out[0].shape == (B, C)
        assert out[1].shape == (B, C, C)
        assert bool((torch.linalg.eigvalsh(out[1]) > -1e-10).all())
    else:
        assert isinstance(out, Tensor)
        torch.testing.assert_close(out.sum(1), torch.ones(B, dtype=torch.float64))
        for each in draws:
            torch.testing.assert_close(each.sum(2), torch.ones(7, B, dtype=torch.float64))


@pytest.mark.parametrize(("subset", "structure"), [key for key in CLASSES if STRUCTURES[key[1]].stored])
def test_the_state_is_plain_and_brings_the_posterior_back(subset: str, structure: str) -> None:
    la = made(subset, structure, prior_precision=2.0)
    la.fit(batches("classification"))
    state = la.state_dict()
    assert all(isinstance(value, (Tensor, int, float, str)) for value in state.values())
    again = made(subset, structure)
    again.load_state_dict(state)
    torch.testing.assert_close(again(inputs()), la(inputs()), rtol=1e-12, atol=0)
    torch.testing.assert_close(again.log_marginal_likelihood(), la.log_marginal_likelihood(), rtol=1e-12, atol=0)
    assert again.n_data == la.n_data


def test_the_state_of_another_sub_network_of_the_same_size_is_refused() -> None:
    def of(*indices: int) -> BaseLaplace:
        return Laplace(mlp(), "classification", "subnetwork", "diag", subnetwork_indices=torch.tensor(indices))

    la = of(0, 3, 7)
    la.fit(batches("classification"))
    with pytest.raises(ParameterError, match="another sub-network"):
        of(0, 3, 8).load_state_dict(la.state_dict())
    of(0, 3, 7).load_state_dict(la.state_dict())


def test_an_evidence_that_cannot_be_computed_leaves_prior_and_noise_as_they_were() -> None:
    la = made("all", "diag", "regression", prior_precision=2.0, sigma_noise=0.5)
    la.fit(batches("regression"))
    with pytest.raises(ParameterError, match="prior_precision"):
        la.log_marginal_likelihood(prior_precision=-1.0, sigma_noise=0.7)
    assert (float(la.prior_precision), float(la.sigma_noise)) == (2.0, 0.5)


def test_a_state_of_something_else_is_refused() -> None:
    la = made("all", "diag")
    la.fit(batches("classification"))
    state = la.state_dict()
    with pytest.raises(ParameterError, match="cls_name 'DiagLaplace'"):
        made("all", "full").load_state_dict(state)
    with pytest.raises(ParameterError, match="likelihood"):
        made("all", "diag", "regression").load_state_dict(state)
    with pytest.raises(ParameterError, match="same network"):
        Laplace(nn.Linear(D, C).double(), "classification", "all", "diag").load_state_dict(state)
    with pytest.raises(DataError, match="later lapwing"):
        made("all", "diag").load_state_dict(state | {"version": 99})
    with pytest.raises(DataError, match="expected what state_dict"):
        made("all", "diag").load_state_dict({})
    broken = json.loads(str(state["structure"])) | {"kind": "os.system"}
    with pytest.raises(DataError, match="unknown kind"):
        made("all", "diag").load_state_dict(state | {"structure": json.dumps(broken)})


class Interrupted:
    """A loader that is interrupted in the second batch."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield batches("classification")[0]
        raise KeyboardInterrupt


@every_class
def test_an_interrupted_fit_leaves_model_and_posterior_as_they_were(subset: str, structure: str) -> None:
    la = made(subset, structure)
    with unchanged(la.model), pytest.raises(KeyboardInterrupt):
        la.fit(Interrupted())
    with pytest.raises(NotFittedError):
        la(inputs())
    la.fit(batches("classification"))
    before, evidence = la(inputs()), la.log_marginal_likelihood()
    with unchanged(la.model), pytest.raises(KeyboardInterrupt):
        la.fit(Interrupted(), override=False)
    torch.testing.assert_close(la(inputs()), before, rtol=0, atol=0)
    torch.testing.assert_close(la.log_marginal_likelihood(), evidence, rtol=0, atol=0)


def test_added_data_need_the_same_weights() -> None:
    la = made("all", "full")
    la.fit(batches("classification"))
    with torch.no_grad():
        la.model[0].weight.add_(1)
    with pytest.raises(ParameterError, match="weights are not those that this posterior was fitted at"):
        la.fit(batches("classification"), override=False)


@pytest.mark.parametrize("progress_bar", [False, True])
def test_a_generator_as_loader_loses_no_batch(progress_bar: bool) -> None:
    for subset in ("all", "last_layer"):
        la = made(subset, "kron")
        la.fit((batch for batch in batches("classification")), progress_bar=progress_bar)
        assert la.n_data == 24


# -- corrected eigenvalues and projections --------------------------------------------------------------------------


def test_ekfac_by_name_is_the_estimator() -> None:
    data, tangent = batches("classification"), Tangent(mlp().eval())
    for progress_bar in (False, True):
        la = made("all", "ekfac", sharing="reduce", bias="separate")
        la.fit(data, progress_bar=progress_bar)
        expected = estimate.ekfac(tangent, Categorical(), data, sharing="reduce", joint_bias=False)
        torch.testing.assert_close(la.fitted.curvature.dense(), expected.dense(), rtol=1e-12, atol=1e-14)
        assert la.n_data == 24
    assert float(la.fitted.curvature.diagonal().sum()) == pytest.approx(float(expected.diagonal().sum()), rel=1e-12)


def test_ekfac_adds_data_in_the_basis_of_the_first_fit() -> None:
    data, tangent = batches("classification"), Tangent(mlp().eval())
    la = made("all", "ekfac")
    la.fit(data[:1])
    la.fit(iter(data[1:]), override=False)
    basis = estimate.kflr(tangent, Categorical(), data[:1])
    expected = estimate.ekfac(tangent, Categorical(), data, basis=basis)
    torch.testing.assert_close(la.fitted.curvature.dense(), expected.dense(), rtol=1e-9, atol=1e-12)
    assert la.n_data == 24


def test_ekfac_needs_data_for_two_passes() -> None:
    la = made("all", "ekfac")
    with unchanged(la.model), pytest.raises(DataError, match="list of batches or a DataLoader"):
        la.fit(batch for batch in batches("classification"))
    with pytest.raises(NotFittedError):
        la(inputs())


@pytest.mark.parametrize("structure", ["layerwise", "module"])
def test_ekfac_with_a_prior_per_tensor_or_module(structure: str) -> None:
    la = made("all", "ekfac")
    la.fit(batches("classification"))
    before = la.log_marginal_likelihood()
    la.optimize_prior_precision(prior_structure=structure)
    assert float(la.log_marginal_likelihood()) > float(before)


@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("distribution", ["rademacher", "gaussian"])
def test_projections_by_name_are_the_estimator(subset: str, distribution: str) -> None:
    data, generator = batches("classification"), torch.Generator()
    options = {"mc_samples": 3, "distribution": distribution}
    la = made(subset, "full", estimator="projection", backend_kwargs=options)
    la.fit(data, generator=generator.manual_seed(5))
    tangent = Tangent(la.model.eval(), la.space)
    expected = estimate.full(
        tangent,
        Categorical(),
        data,
        cotangents=estimate.projections(3, distribution),
        generator=generator.manual_seed(5),
    )
    torch.testing.assert_close(la.fitted.curvature.dense(), expected.dense(), rtol=1e-9, atol=1e-12)


def test_a_saved_posterior_remembers_its_projections(tmp_path: Path) -> None:
    la = made("all", "kron", estimator="projection", distribution="gaussian", backend_kwargs={"mc_samples": 4})
    la.fit(batches("classification"), generator=torch.Generator().manual_seed(0))
    la.save(tmp_path / "a")
    again = lapwing.load(tmp_path / "a", mlp())
    assert again.recipe == la.recipe
    assert torch.equal(again(inputs()), la(inputs()))


def test_links_agree_where_they_should() -> None:
    la = made("all", "full", prior_precision=50.0)
    la.fit(batches("classification"))
    x = inputs()
    many = la(x, link_approx="mc", n_samples=20_000, generator=torch.Generator().manual_seed(0))
    for link in ("probit", "probit_full"):
        assert float((la(x, link_approx=link) - many).abs().max()) < 0.05


def test_binary_quadrature_meets_monte_carlo() -> None:
    la = Laplace(mlp(1), Bernoulli(), "all", "full")
    la.fit([(inputs(20), (torch.arange(20) % 2).double().unsqueeze(1))])
    x = inputs()
    exact = la(x, link_approx="quadrature")
    assert exact.shape == (B, 1)
    assert float((la(x, link_approx="probit") - exact).abs().max()) < 0.02
    draws = la.predictive_samples(x, n_samples=20_000, generator=torch.Generator().manual_seed(0))
    assert bool(((draws.mean(0) - exact).abs() < 4 * draws.std(0) / 20_000**0.5).all())


def test_outputs_of_a_sequence_and_of_images() -> None:
    torch.manual_seed(0)
    sequence = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, C)).double()
    x, y = torch.randn(6, 4, 2, dtype=torch.float64), torch.randint(C, (6, 4))
    la = Laplace(sequence, "classification", "all", "kron")
    la.fit([(x, y)])
    found = la(x)
    assert found.shape == (6, 4, C)
    torch.testing.assert_close(found.sum(-1), torch.ones(6, 4, dtype=torch.float64))
    assert la.predictive_samples(x, n_samples=3).shape == (3, 6, 4, C)
    images = nn.Conv2d(1, 2, 3, padding=1).double()
    x = torch.randn(3, 1, 5, 5, dtype=torch.float64)
    la = Laplace(images, "classification", "all", "diag")
    la.fit([(x, torch.randint(2, (3, 5, 5)))])
    assert la(x).shape == (3, 2, 5, 5)
    la = Laplace(images, "regression", "all", "diag")
    la.fit([(x, torch.randn(3, 2, 5, 5, dtype=torch.float64))])
    mean, variance = la(x, diagonal_output=True)
    assert mean.shape == variance.shape == (3, 2, 5, 5)
    assert la(x)[1].shape == (3, 50, 50)


def test_batches_as_mappings() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(D, C).double()

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.layer(input_ids)

    la = Laplace(Reader(), "classification", "all", "full")
    data = [{"input_ids": x, "labels": y} for x, y in batches("classification")]
    la.fit(data)
    assert la({"input_ids": inputs()}).shape == (B, C)
    assert la(data[0]).shape == (8, C)
    with pytest.raises(DataError, match="dict_key_y"):
        la.fit([{"input_ids": inputs()}])


def test_a_fixed_noise_level_per_output() -> None:
    sigma = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    la = Laplace(mlp(), Gaussian(sigma=sigma), "all", "full")
    la.fit(batches("regression"))
    with pytest.raises(OptionError, match="without a free noise level"):
        la.sigma_noise = 2.0
    assert bool(torch.isfinite(la.log_marginal_likelihood()))


def test_counts_have_a_posterior_too() -> None:
    la = Laplace(mlp(1), Poisson(), "all", "kron")
    la.fit([(inputs(10), torch.arange(10).double().unsqueeze(1))])
    mean, variance = la(inputs())
    assert mean.shape == (B, 1)
    assert variance.shape == (B, 1, 1)


# -- bad input --------------------------------------------------------------------------------------------------------


@every_class
def test_before_fitting(subset: str, structure: str) -> None:
    la = made(subset, structure)
    for ask in (
        lambda: la(inputs()),
        lambda: la.log_marginal_likelihood(),
        lambda: la.optimize_prior_precision(),
        lambda: la.functional_samples(inputs()),
    ):
        with pytest.raises(NotFittedError, match="fit"):
            ask()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("classificaton", "all", "full"), "Did you mean 'classification'"),
        (("classification", "al", "full"), "Did you mean 'all'"),
        (("classification", "last_layr", "full"), "Did you mean 'last_layer'"),
        (("classification", "all", "krone"), "Did you mean 'kron'"),
        (("classification", "subnetwork", "gp"), "expected one of"),
        (("classification", "subnetwork", "full"), "subnetwork_indices"),
    ],
)
def test_unknown_choices_name_the_nearest(arguments: tuple, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Laplace(mlp(), *arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"estimator": "exakt"}, "Did you mean 'exact'"),
        ({"shareing": "reduce"}, "Did you mean 'sharing'"),
        ({"bias": "apart"}, "expected one of"),
        ({"backend": dict}, "lapwing.curvature"),
        ({"prior_precision": -1.0}, "expected finite numbers >= 0"),
        ({"prior_precision": float("nan")}, "expected finite numbers >= 0"),
        ({"prior_precision": torch.ones(5)}, "expected 1, 6 .* 3 "),
        ({"sigma_noise": 2.0}, "without a free noise level"),
        ({"temperature": 0.0}, "> 0"),
        ({"estimator": "hessian"}, "no 'kron' structure"),
        ({"estimator": "projections"}, "Did you mean 'projection'"),
        ({"distribution": "gaussian"}, "goes with estimator='projection'; found the exact"),
        ({"estimator": "projection", "distribution": "gausian"}, "Did you mean 'gaussian'"),
        ({"estimator": "projection", "backend_kwargs": {"mc_samples": 0}}, "mc_samples is 0"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    with pytest.raises((OptionError, ParameterError), match=message):
        Laplace(mlp(), "classification", "all", "kron", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pred_type": "glmm"}, "Did you mean 'glm'"),
        ({"pred_type": "gp"}, "FunctionalLaplace"),
        ({"link_approx": "probitt"}, "Did you mean 'probit'"),
        ({"n_samples": 0, "link_approx": "mc"}, "n_samples"),
        ({"link_approx": "quadrature"}, "expected 'probit' or 'mc'"),
        ({"pred_type": "nn", "joint": True}, "joint=True"),
    ],
)
def test_bad_predictions(options: dict, message: str) -> None:
    la = made("all", "kron")
    la.fit(batches("classification"))
    with pytest.raises((OptionError, ParameterError), match=message):
        la(inputs(), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "marglic"}, "Did you mean 'marglik'"),
        ({"prior_structure": "layerwize"}, "Did you mean 'layerwise'"),
        ({"prior_structure": "diag"}, "Kronecker"),
        ({"init_prior_prec": -1.0}, "> 0"),
        ({"init_prior_prec": torch.ones(2)}, "init_prior_prec has 2 entries"),
        ({"method": "gridsearch"}, "val_loader"),
        ({"method": "gridsearch", "grid_size": 0}, "at least one"),
        ({"method": "gridsearch", "prior_structure": "layerwise"}, "expected 'scalar'"),
        ({"optimize_sigma_noise": True}, "without a noise level"),
    ],
)
def test_bad_tuning(options: dict, message: str) -> None:
    la = made("all", "kron")
    la.fit(batches("classification"))
    before = la.prior_precision
    with pytest.raises((CurvatureError, OptionError, ParameterError), match=message):
        la.optimize_prior_precision(**options)
    assert torch.equal(la.prior_precision, before)


def test_bad_data() -> None:
    la = made("all", "kron")
    with pytest.raises(DataError, match="no batch"):
        la.fit([])
    with pytest.raises(DataError, match="no batch"):
        made("last_layer", "kron").fit([])
    with pytest.raises(ModelError, match="batch 0"):
        la.fit([(inputs()[:, :2], torch.zeros(B, dtype=torch.long))])
    with pytest.raises(LikelihoodError, match="batch 0"):
        la.fit([(inputs(), torch.full((B,), 7))])
    la.fit(batches("classification"))
    with pytest.raises(ModelError, match="forward pass"):
        la(inputs()[:, :2])
    with pytest.raises(DataError, match="NaN"):
        la(inputs() * float("nan"))


def test_a_failed_evidence_keeps_the_hyper_parameters() -> None:
    la = made("all", "kron")
    la.fit(batches("classification"))
    with pytest.raises(ParameterError):
        la.log_marginal_likelihood(torch.tensor(-1.0))
    with pytest.raises(OptionError, match="noise level"):
        la.log_marginal_likelihood(torch.tensor(2.0), torch.tensor(1.0))
    assert la.prior_precision.tolist() == [1.0]


def test_every_public_name_is_there() -> None:
    for name in lapwing.__all__:
        assert hasattr(lapwing, name)


@pytest.mark.parametrize("outputs", [3, 70], ids=["few outputs", "many outputs"])
def test_probabilities_by_draws_meet_their_mean(outputs: int) -> None:
    """Softmax of correlated logits, by draws of the weights put into the linearised network one by one."""
    torch.manual_seed(0)
    model = nn.Linear(D, outputs).double()
    la = Laplace(model, "classification", "all", "full", prior_precision=0.2)
    la.fit([(inputs(40, 7), torch.arange(40) % outputs)])
    x, count = inputs(2), 4000
    weights = la.sample(count, generator=torch.Generator().manual_seed(1))
    w, b = weights[:, : D * outputs].unflatten(1, (outputs, D)), weights[:, D * outputs :]
    drawn = (torch.einsum("bd,scd->sbc", x, w) + b.unsqueeze(1)).softmax(-1)
    found = la(x, link_approx="mc", n_samples=count, generator=torch.Generator().manual_seed(2))
    error = drawn.std(0) * (2 / count) ** 0.5  # of the difference of two means
    assert bool(((found - drawn.mean(0)).abs() < 4.5 * error).all())
