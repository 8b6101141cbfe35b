"""likelihood="reward_modeling": fitted to choices in pairs, asked for the rewards of single inputs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import lapwing
from lapwing.errors import LikelihoodError
from lapwing.laplace import BaseLaplace, Laplace
from lapwing.laplace.factory import CLASSES
from lapwing.likelihoods import Preference
from unchanged import unchanged


class Reward(nn.Module):
    """A model as laplace-torch asks for it: [B, 2, 3] -> [B, 2], and [B, 3] -> [B, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        rewards = self.net(x.reshape(-1, 3))
        return rewards.reshape(len(x), 2) if x.dim() == 3 else rewards


def model() -> Reward:
    torch.manual_seed(0)
    return Reward().double()


def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(12, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return x, torch.arange(12) % 2


def batches() -> list[tuple[Tensor, Tensor]]:
    x, y = data()
    return [(x[:7], y[:7]), (x[7:], y[7:])]


def jacobian(network: nn.Module, x: Tensor) -> Tensor:
    """Of all outputs by all weights, [B, C, P]."""
    named = dict(network.named_parameters())
    found = jacrev(lambda weights: functional_call(network, weights, (x,)))(named)
    return torch.cat([part.flatten(2) for part in found.values()], -1).detach()


def test_the_curvature_is_that_of_the_bradley_terry_likelihood() -> None:
    """log p = log sigmoid(r_y - r_other): the difference of two rewards is the logit of one event."""
    network, (x, y) = model(), data()
    la = Laplace(network, "reward_modeling", "all", "full", prior_precision=0.7)
    with unchanged(network):
        la.fit(batches())
    rows = jacobian(network, x)
    rewards = network(x).detach()
    p = torch.sigmoid(rewards[:, 1] - rewards[:, 0])
    away = rows[:, 1] - rows[:, 0]
    expected = torch.einsum("n, n p, n q -> p q", p * (1 - p), away, away)
    torch.testing.assert_close(la.H, expected)
    torch.testing.assert_close(la.log_likelihood, torch.where(y == 1, p, 1 - p).log().sum())
    precision = expected + 0.7 * torch.eye(21, dtype=torch.float64)
    single = x[:5, 0]
    mean, covariance = la(single)
    alone = jacobian(network, single)
    torch.testing.assert_close(mean, network(single).detach())
    torch.testing.assert_close(covariance, alone @ torch.linalg.solve(precision, alone.mT))


@pytest.mark.parametrize(("subset", "structure"), [key for key in CLASSES if key[0] != "subnetwork"])
def test_every_structure_predicts_rewards_as_numbers(subset: str, structure: str) -> None:
    options = {"rank": 5} if structure == "lowrank" else {}
    la = Laplace(model(), "reward_modeling", subset, structure, **options)
    la.fit(batches())
    la.optimize_prior_precision()
    x, single = data()[0], data()[0][:5, 0]
    mean, covariance = la(single)
    assert (mean.shape, covariance.shape) == ((5, 1), (5, 1, 1))
    assert bool((covariance > 0).all())
    draws = la.predictive_samples(single, n_samples=7)
    assert draws.shape == (7, 5, 1)
    assert bool((draws < 0).any())
    mean, variance = la(single, pred_type="nn", n_samples=5)
    assert mean.shape == variance.shape == (5, 1)
    choice = la(x, fitting=True)
    torch.testing.assert_close(choice.sum(-1), torch.ones(12, dtype=torch.float64))


def test_held_out_pairs_choose_the_prior() -> None:
    la = Laplace(model(), "reward_modeling", "all", "full")
    la.fit(batches())
    seen: list[Tensor] = []

    def loss(probabilities: Tensor, y: Tensor) -> float:
        seen.append(probabilities)
        return float(-probabilities.gather(1, y.unsqueeze(1)).log().mean())

    la.optimize_prior_precision(method="gridsearch", val_loader=batches(), grid_size=4)
    best = la.prior_precision
    la.optimize_prior_precision(method="gridsearch", val_loader=batches(), grid_size=4, loss=loss)
    torch.testing.assert_close(la.prior_precision, best)
    assert seen[0].shape == (7, 2)


def test_a_file_keeps_what_it_predicts(tmp_path: Path) -> None:
    la = Laplace(model(), "reward_modeling", "all", "kron")
    la.fit(batches())
    la.save(tmp_path / "la.safetensors")
    again = lapwing.load(tmp_path / "la.safetensors", model())
    assert isinstance(again, BaseLaplace)
    single = data()[0][:3, 1]
    for ours, theirs in zip(again(single), la(single), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_rewards_that_are_no_pairs_are_refused_with_the_remedy() -> None:
    plain = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    with pytest.raises(LikelihoodError, match=r"rewards of shape \(7, 2, 1\).*nn.Flatten"):
        Laplace(plain, "reward_modeling", "all", "full").fit(batches())
    flat = nn.Sequential(plain, nn.Flatten())
    la = Laplace(flat, Preference(), "all", "kron")
    la.fit(batches())
    assert la(data()[0][:, 0])[0].shape == (12, 1)
