"""Posteriors over sub-networks: dense matrices at the chosen entries, with the rest of the network as trained."""

from __future__ import annotations

import json
from math import log, pi
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kron_oracle
import oracle
from lapwing import Laplace, subnetwork
from lapwing.errors import OptionError, ParameterError
from lapwing.laplace import BaseLaplace, EkfacSubnetLaplace, KronSubnetLaplace
from lapwing.laplace.factory import automatic
from lapwing.likelihoods import Categorical, Poisson
from lapwing.params import ParamSpace
from unchanged import unchanged

DOUBLE = {"dtype": torch.float64}
SOME, WHOLE = [0, 5, 17, 18, 30, 36, 44], [*range(12), *range(16, 28)]
"""Entries of `mlp`: cut through tensors, and all of two weights."""


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3), nn.LayerNorm(3), nn.Tanh(), nn.Linear(3, 2)
    return nn.Sequential(*layers).double()


def cnn() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Conv2d(2, 2, 2), nn.Flatten(), nn.Tanh(), nn.Linear(8, 3)
    return nn.Sequential(*layers).double()


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **DOUBLE)


IMAGES, CLASSES = normal(12, 1, 4, 4), torch.arange(12) % 3
ROWS, COUNTS = normal(30, 3), normal(30, 2, seed=2).abs().round()


def check_posterior(la: BaseLaplace, curvature: Tensor, at: Tensor, fit: Tensor, x: Tensor, prior: Tensor) -> None:
    """Evidence and linearised prediction by dense matrices; `curvature` is at the entries `at` of the flat vector."""
    theta = torch.cat([p.detach().flatten() for p in la.model.parameters()])
    precision = curvature + prior.diag()
    constants = (
        (prior.log() - log(2 * pi)).sum() / 2 - (prior * theta[at].square()).sum() / 2 + len(at) / 2 * log(2 * pi)
    )
    evidence = fit + constants - torch.logdet(precision) / 2
    torch.testing.assert_close(la.log_marginal_likelihood(), evidence, rtol=1e-9, atol=0)
    rows = oracle.jacobian(la.model, x)[..., at]
    expected = torch.einsum("ncp, pq, ndq -> ncd", rows, torch.linalg.inv(precision), rows)
    mean, covariance = la.predict_moments(x)
    torch.testing.assert_close(mean, la.model(x).detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(covariance, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(la.posterior_covariance, torch.linalg.inv(precision), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(la.mean, theta, rtol=0, atol=0)
    drawn = la.sample(3, generator=torch.Generator().manual_seed(0))
    rest = torch.ones(len(theta), dtype=torch.bool)
    rest[at] = False
    assert torch.equal(drawn[:, rest], theta[rest].expand(3, -1))
    assert bool((drawn[:, at] != theta[at]).all())


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize(
    "names", [["2.weight", "2.bias", "5.weight", "5.bias"], ["0.weight", "5.weight"], ["2.weight"]]
)
def test_kron_of_whole_tensors_is_that_of_all_weights_at_these(names: list[str], sharing: str) -> None:
    model = cnn()
    space = ParamSpace.of(model)
    at = subnetwork.positions(space, subnetwork.by_parameters(space, names))
    whole = kron_oracle.kron(model, Categorical(), IMAGES, CLASSES, sharing=sharing)
    la = KronSubnetLaplace(model, "classification", at, sharing=sharing, prior_precision=0.7)
    with unchanged(model):
        la.fit([(IMAGES[:5], CLASSES[:5]), (IMAGES[5:], CLASSES[5:])])
    torch.testing.assert_close(la.H.dense(), whole[at][:, at], rtol=1e-9, atol=1e-12)
    fit = Categorical().log_prob(model(IMAGES), CLASSES).sum().detach()
    check_posterior(la, whole[at][:, at], at, fit, IMAGES[:4], torch.full((len(at),), 0.7, **DOUBLE))


def test_ekfac_of_whole_layers_is_the_exact_diagonal_in_the_eigenbasis() -> None:
    model = mlp()
    del model[3]  # a layer before one that normalises has directions without curvature, and no basis there
    space = ParamSpace.of(model)
    at = subnetwork.positions(space, subnetwork.last_layers(space, model, ROWS, 2))
    kron = kron_oracle.kron(model, Poisson(), ROWS, COUNTS)[at][:, at]
    exact = oracle.ggn(model, Poisson(), ROWS, COUNTS)[at][:, at]
    curvature = torch.zeros_like(exact)
    for block in (slice(0, 15), slice(15, 23)):
        values, vectors = torch.linalg.eigh(kron[block, block])
        assert float(values.diff().min() / values.max()) > 1e-9  # all different, so that the basis is what it is
        inside = (vectors.mT @ exact[block, block] @ vectors).diagonal()
        curvature[block, block] = vectors @ inside.diag() @ vectors.mT
    la = EkfacSubnetLaplace(model, "poisson", at)
    la.prior_precision = torch.tensor([0.5, 0.5, 2.0, 2.0])  # one per tensor; those of a layer alike
    la.fit([(ROWS, COUNTS)])
    prior = torch.cat([torch.full((15,), 0.5, **DOUBLE), torch.full((8,), 2.0, **DOUBLE)])
    check_posterior(la, curvature, at, Poisson().log_prob(model(ROWS), COUNTS).sum().detach(), ROWS[:4], prior)


@pytest.mark.parametrize("structure", ["full", "blocks", "diag", "lowrank"])
@pytest.mark.parametrize("kind", ["cut", "whole"])
def test_other_structures_take_any_entries(structure: str, kind: str) -> None:
    model = mlp()
    at = (
        torch.tensor([0, 5, 17, 18, 30, 36, 44])
        if kind == "cut"
        else torch.cat([torch.arange(12), torch.arange(16, 28)])
    )
    exact = oracle.ggn(model, Poisson(), ROWS, COUNTS)[at][:, at]
    owner = torch.bucketize(at, torch.tensor([16, 31, 37]), right=True)
    if structure == "blocks":
        exact = exact * (owner[:, None] == owner)
    if structure == "diag":
        exact = exact.diagonal().diag()
    options: dict[str, Any] = {"rank": len(at)} if structure == "lowrank" else {}
    order = torch.randperm(len(at), generator=torch.Generator().manual_seed(0))  # any order means the same
    la = Laplace(model, "poisson", "subnetwork", structure, subnetwork_indices=at[order], **options)
    la.fit([(ROWS[:9], COUNTS[:9]), (ROWS[9:], COUNTS[9:])])
    fit = Poisson().log_prob(model(ROWS), COUNTS).sum().detach()
    check_posterior(la, exact, at, fit, ROWS[:4], torch.ones(len(at), **DOUBLE))


def test_the_rest_of_the_network_is_not_pulled_back() -> None:
    model = mlp()
    la = Laplace(model, "poisson", "subnetwork", "full", subnetwork_indices=torch.tensor([31, 33, 40]))
    assert la.space.names == ("3.weight", "5.weight")
    whole = Laplace(model, "poisson", "subnetwork", "full", subnetwork_indices=torch.arange(31, 37))
    assert (whole.space.names, whole.space.index) == (("3.weight", "3.bias"), None)


def test_kron_refuses_parts_of_tensors() -> None:
    for structure in ("kron", "ekfac"):
        with pytest.raises(ParameterError, match=r"some entries of '0\.weight' and not others.*last_layers.*'full'"):
            Laplace(mlp(), "poisson", "subnetwork", structure, subnetwork_indices=torch.tensor([0, 1]))
    with pytest.raises(OptionError, match="'subnetwork' has no structure 'gp'"):
        Laplace(mlp(), "poisson", "subnetwork", "gp", subnetwork_indices=torch.tensor([0, 1]))


def test_auto_takes_kron_where_tensors_are_whole() -> None:
    model = nn.Sequential(nn.Linear(10, 400), nn.Linear(400, 1))
    assert automatic(model, "subnetwork", torch.arange(4400))[0] == "kron"
    assert automatic(model, "subnetwork", torch.arange(4399))[0] == "diag"
    assert automatic(model, "subnetwork", torch.arange(2999))[0] == "full"


def test_a_state_that_names_all_tensors_is_the_same_sub_network() -> None:
    """As files of earlier versions do."""
    model, at = mlp(), torch.arange(31, 37)
    la = Laplace(model, "poisson", "subnetwork", "full", subnetwork_indices=at)
    la.fit([(ROWS, COUNTS)])
    state = la.state_dict()
    state["parameters"] = json.dumps([[name, list(p.shape)] for name, p in model.named_parameters()])
    state["index"] = at
    again = Laplace(model, "poisson", "subnetwork", "full", subnetwork_indices=at)
    again.load_state_dict(state)
    assert torch.equal(again.predict_moments(ROWS)[1], la.predict_moments(ROWS)[1])
    state["index"] = torch.arange(30, 36)
    with pytest.raises(ParameterError, match="another sub-network"):
        again.load_state_dict(state)


# -- the last layers ---------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """The first weight is used again at the end, and the layer that is registered first comes second."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(4, 4)
        self.outer = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.middle(torch.tanh(self.outer(x)))) @ self.outer.weight


@pytest.mark.parametrize(
    ("build", "n", "expected"),
    [
        (mlp, 1, ["5.weight", "5.bias"]),
        (mlp, 2, ["2.weight", "2.bias", "5.weight", "5.bias"]),
        (mlp, 3, ["0.weight", "0.bias", "2.weight", "2.bias", "5.weight", "5.bias"]),
        (Tied, 1, ["outer.weight"]),
        (Tied, 2, ["middle.weight", "middle.bias", "outer.weight"]),
        (cnn, 2, ["2.weight", "2.bias", "5.weight", "5.bias"]),
    ],
)
def test_the_last_layers_are_those_used_last(build: Any, n: int, expected: list[str]) -> None:
    model = build().double()
    space, x = ParamSpace.of(model), IMAGES if build is cnn else ROWS
    with unchanged(model):
        found = subnetwork.last_layers(space, model, x, n)
    assert list(found.names) == expected
    mask = subnetwork.LastLayerSubnetMask(model, n_layers=n)
    assert torch.equal(mask.select([(x, x)]), subnetwork.positions(space, found))


def test_last_layers_that_are_not_there() -> None:
    model = mlp()
    space = ParamSpace.of(model)
    with pytest.raises(ParameterError, match=r"the last 4 layers.* has 3: \['0', '2', '5'\]"):
        subnetwork.last_layers(space, model, ROWS, 4)
    for bad in (0, -1):
        with pytest.raises(ParameterError, match="expected a number >= 1"):
            subnetwork.last_layers(space, model, ROWS, bad)
    with pytest.raises(ParameterError, match="n_layers is 2 with the layer '5'"):
        subnetwork.LastLayerSubnetMask(model, "5", n_layers=2)


# -- spaces ------------------------------------------------------------------------------------------------------------


def test_a_tightened_space_has_the_same_entries() -> None:
    space = ParamSpace.of(mlp())
    flat = torch.arange(space.size, **DOUBLE)
    tree = space.unravel(flat)
    for at in (
        [0],
        [0, 5, 17, 18, 30, 36, 44],
        list(range(16, 28)),
        [*range(12), *range(16, 28)],
        list(range(space.size)),
    ):
        chosen = space.select(mask=torch.tensor(at))
        tight = chosen.tightened()
        assert torch.equal(tight.ravel({name: tree[name] for name in tight.names}), flat[at])
        assert torch.equal(subnetwork.positions(space, tight), torch.tensor(at))
        assert set(tight.names) == {space.names[i] for i in space.tensor_of(torch.tensor(at)).tolist()}
        assert (tight.index is None) == (not chosen.cut())
        assert tight.tightened() == tight
    assert space.tightened() is space
    assert space.select(mask=torch.tensor([0, 12, 13, 14, 15])).cut() == ("0.weight",)
