"""`hessian_structure="propagated_diag"` and `"mixed_diag"`: diagonals for many outputs behind the public face."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing import DiagLaplace, Laplace, MixedDiagLaplace, PropagatedDiagLaplace, estimate, marglik_training
from lapwing.errors import DataError, OptionError, UnsupportedOperationError
from lapwing.likelihoods import Bernoulli, Categorical, Gaussian
from lapwing.tangent import Tangent
from unchanged import unchanged

STRUCTURES = ("propagated_diag", "mixed_diag")
ESTIMATORS = {
    "propagated_diag": estimate.propagated_diagonal,
    "mixed_diag": partial(estimate.mixed_diagonal, columns=2),
}
OPTIONS = {"propagated_diag": {}, "mixed_diag": {"columns": 2}}


def autoencoder() -> nn.Module:
    """36 pixels through 2 numbers."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(36, 6), nn.Tanh(), nn.Linear(6, 2), nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 36),
        nn.Unflatten(1, (1, 6, 6)),
    ).double()  # fmt: skip


def images(count: int = 20) -> Tensor:
    return torch.randn(count, 1, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def pairs() -> list[tuple[Tensor, Tensor]]:
    x = images()
    return [(x[:12], x[:12]), (x[12:], x[12:])]


def posterior(structure: str, subset: str = "all", **options) -> DiagLaplace:
    """Not fitted yet."""
    la = Laplace(autoencoder(), Gaussian(0.5), subset, structure, **(OPTIONS.get(structure, {}) | options))
    assert isinstance(la, DiagLaplace)
    return la


def made(structure: str, **options) -> DiagLaplace:
    la = posterior(structure, **options)
    la.fit(pairs())
    return la


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_name_is_the_estimator(structure: str) -> None:
    la = posterior(structure)
    with unchanged(la.model):
        la.fit(pairs(), progress_bar=True)
    # the noise level is applied when the precision is formed
    expected = ESTIMATORS[structure](Tangent(autoencoder()), Gaussian(1.0), pairs())
    torch.testing.assert_close(la.H, expected.diagonal(), rtol=1e-9, atol=0)
    torch.testing.assert_close(la.posterior_precision, la.H / 0.5**2 + 1, rtol=1e-9, atol=0)
    assert la.n_data == 20
    assert isinstance(la, {"propagated_diag": PropagatedDiagLaplace, "mixed_diag": MixedDiagLaplace}[structure])


@pytest.mark.parametrize("structure", STRUCTURES)
def test_evidence_tuning_and_predictions(structure: str) -> None:
    la = made(structure)
    before = float(la.log_marginal_likelihood())
    la.optimize_prior_precision()
    assert float(la.log_marginal_likelihood()) > before
    x = images(3)
    mean, variance = la(x, diagonal_output=True)
    torch.testing.assert_close(mean.reshape(3, 1, 6, 6), la.model(x).detach())
    assert bool((variance >= 0).all())
    samples = la.predictive_samples(x, n_samples=4, generator=torch.Generator().manual_seed(0))
    assert samples.shape[:2] == (4, 3)


def test_a_posterior_from_them_is_that_of_an_ordinary_diagonal() -> None:
    """Everything after the fit knows only the diagonal: the same numbers as `diag` where nothing is approximate."""
    found, exact = (posterior("mixed_diag", columns=36) if mixed else posterior("diag") for mixed in (True, False))
    found.fit(pairs())
    exact.fit(pairs())
    torch.testing.assert_close(found.log_marginal_likelihood(), exact.log_marginal_likelihood())
    for one, other in zip(found(images(3)), exact(images(3)), strict=True):
        torch.testing.assert_close(one, other)


def test_the_exact_bottleneck_is_an_option() -> None:
    la, exact = made("mixed_diag", exact_bottleneck=True), made("diag")
    count = 36 * 6 + 6 + 6 * 2 + 2
    torch.testing.assert_close(la.H[:count], exact.H[:count], rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_saved_posterior_comes_back(structure: str, tmp_path: Path) -> None:
    la = made(structure)
    la.save(tmp_path / "a")
    again = lapwing.load(tmp_path / "a", autoencoder())
    assert isinstance(again, DiagLaplace)
    assert type(again) is type(la)
    assert again.recipe == la.recipe
    assert torch.equal(again.H, la.H)
    again.fit(pairs(), override=False)
    torch.testing.assert_close(again.H, 2 * la.H)
    fresh = posterior(structure)
    fresh.load_state_dict(la.state_dict())
    assert torch.equal(fresh.H, la.H)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_fit_with_a_checkpoint_is_the_same(structure: str, tmp_path: Path) -> None:
    la = posterior(structure)
    la.fit(pairs(), checkpoint=tmp_path / "c", checkpoint_every=1)
    torch.testing.assert_close(la.H, made(structure).H, rtol=1e-9, atol=0)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_sub_network(structure: str) -> None:
    index = torch.tensor([0, 7, 100, 230, 300])
    la = posterior(structure, "subnetwork", subnetwork_indices=index)
    la.fit(pairs())
    torch.testing.assert_close(la.H, made(structure).H[index], rtol=1e-9, atol=0)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("estimator", ["fisher", "mc", "projection", "empirical"])
def test_sources(structure: str, estimator: str) -> None:
    la = posterior(structure, estimator=estimator)
    la.fit(pairs(), generator=torch.Generator().manual_seed(0))
    assert bool((la.H >= 0).all())
    assert bool(la.H.any())


def test_classification_and_many_binary_outputs() -> None:
    torch.manual_seed(0)
    x = torch.randn(10, 4).double()
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 50)).double()
    for likelihood, y in (
        (Categorical(), torch.randint(50, (10,))),
        (Bernoulli(), torch.randint(2, (10, 50)).double()),
    ):
        la = Laplace(model, likelihood, "all", "propagated_diag")
        la.fit([(x, y)])
        assert bool(torch.isfinite(la.log_marginal_likelihood()))


def test_training_by_the_evidence() -> None:
    torch.manual_seed(0)
    x = torch.randn(30, 3)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=10)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    la, trained, evidences, _ = marglik_training(
        model, loader, likelihood="regression", hessian_structure="propagated_diag", n_epochs=3, marglik_frequency=1
    )
    assert isinstance(la, PropagatedDiagLaplace)
    assert trained is model
    assert evidences[-1] < evidences[0]  # negative log evidence per step


# -- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_last_layer_has_no_need_of_them(structure: str) -> None:
    with pytest.raises(OptionError, match=f"'last_layer' has no structure '{structure}'; expected one of .*'diag'"):
        Laplace(autoencoder(), "regression", "last_layer", structure)


def test_the_hessian_and_the_recursion_are_refused() -> None:
    for estimator in ("hessian", "recursive"):
        with pytest.raises(OptionError, match="has no 'mixed_diag' structure"):
            Laplace(autoencoder(), "regression", "all", "mixed_diag", estimator=estimator)


def test_options_of_the_one_are_not_those_of_the_other() -> None:
    with pytest.raises(OptionError, match="unknown option of the structure 'propagated_diag'"):
        Laplace(autoencoder(), "regression", "all", "propagated_diag", columns=2)
    with pytest.raises(OptionError, match="Did you mean 'columns'"):
        Laplace(autoencoder(), "regression", "all", "mixed_diag", column=2)
    with pytest.raises(OptionError, match="Did you mean 'propagated_diag'"):
        Laplace(autoencoder(), "regression", "all", "propagated")


def test_a_network_without_a_rule_names_the_way_out() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRU(3, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, torch.full((len(x),), x.shape[1]), batch_first=True)
            return self.cell(packed)[1][-1]

    la = Laplace(Recurrent(), "regression", "all", "propagated_diag")
    with unchanged(la.model), pytest.raises(UnsupportedOperationError, match=r"'gru' has no rule.*'diag'"):
        la.fit([(torch.randn(2, 5, 3), torch.randn(2, 4))])
    with pytest.raises(DataError, match="cotangents=exact"):
        made("mixed_diag", exact_bottleneck=True, estimator="mc")
