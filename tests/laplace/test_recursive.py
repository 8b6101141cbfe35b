"""`estimator="recursive"`: kfra behind the public face."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing import Laplace, estimate
from lapwing.errors import OptionError
from lapwing.likelihoods import Bernoulli, Categorical
from lapwing.tangent import Tangent
from unchanged import unchanged


def mlp(outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


def data(outputs: int = 3) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(20, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(outputs, (20,), generator=generator)
    return [(x[:15], y[:15]), (x[15:], y[15:])]


def test_the_name_is_the_estimator() -> None:
    for progress_bar in (False, True):
        la = Laplace(mlp(), "classification", "all", "kron", estimator="recursive", sharing="reduce", bias="separate")
        with unchanged(la.model):
            la.fit(data(), progress_bar=progress_bar)
        expected = estimate.kfra(Tangent(mlp()), Categorical(), data(), sharing="reduce", joint_bias=False)
        assert torch.equal(la.fitted.curvature.dense(), expected.dense())
        assert la.n_data == 20
    la.optimize_prior_precision()
    probabilities = la(data()[0][0])
    assert isinstance(probabilities, Tensor)
    torch.testing.assert_close(probabilities.sum(1), torch.ones(15).double())


def test_a_last_layer_starts_the_recursion_and_is_exact() -> None:
    found, exact = (Laplace(mlp(), "classification", estimator=estimator) for estimator in ("recursive", "exact"))
    found.fit(data())
    exact.fit(data())
    assert torch.equal(found.fitted.curvature.dense(), exact.fitted.curvature.dense())


def test_many_outputs() -> None:
    torch.manual_seed(0)
    x = torch.randn(10, 4).double()
    la = Laplace(mlp(50), Bernoulli(), "all", "kron", estimator="recursive")
    la.fit([(x, torch.bernoulli(torch.full((10, 50), 0.5)).double())])
    assert bool(torch.isfinite(la.log_marginal_likelihood()))


def test_a_saved_posterior_remembers_it(tmp_path: Path) -> None:
    la = Laplace(mlp(), "classification", "all", "kron", estimator="recursive")
    la.fit(data())
    la.save(tmp_path / "a")
    again = lapwing.load(tmp_path / "a", mlp())
    assert again.recipe == la.recipe
    torch.testing.assert_close(again(data()[0][0]), la(data()[0][0]), rtol=0, atol=0)


@pytest.mark.parametrize("structure", ["full", "diag", "ekfac", "blocks", "gp"])
def test_other_structures_are_refused(structure: str) -> None:
    with pytest.raises(OptionError, match=f"recursive estimator has no '{structure}' structure; expected 'kron'"):
        Laplace(mlp(), "classification", "all", structure, estimator="recursive")


def test_checkpoints_and_misspellings_are_refused(tmp_path: Path) -> None:
    la = Laplace(mlp(), "classification", "all", "kron", estimator="recursive")
    with pytest.raises(OptionError, match="recursive curvature cannot be fitted with a checkpoint"):
        la.fit(data(), checkpoint=tmp_path / "c")
    assert not list(tmp_path.iterdir())
    with pytest.raises(OptionError, match="Did you mean 'recursive'"):
        Laplace(mlp(), "classification", "all", "kron", estimator="recursiv")
