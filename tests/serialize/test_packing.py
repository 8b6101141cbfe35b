"""Every structure and every likelihood as plain data and back; nothing but what is registered can be made."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from lapwing import estimate, likelihoods
from lapwing.errors import CurvatureError, DataError
from lapwing.linalg import Curvature, Dense, Diagonal
from lapwing.serialize import KINDS, compact, pack, register, unpack
from lapwing.tangent import Tangent

D, C = 3, 2


def curvature(name: str) -> Curvature:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(D, 4), torch.nn.Tanh(), torch.nn.Linear(4, C)).double()
    data = [(torch.randn(5, D, dtype=torch.float64), torch.randint(C, (5,))) for _ in range(2)]
    options = {"rank": 3} if name == "low_rank" else {}
    return getattr(estimate, name)(Tangent(model), likelihoods.Categorical(), data, **options)


def through_json(value: object) -> object:
    description, tensors = pack(value)
    return unpack(json.loads(json.dumps(description)), tensors)


every = pytest.mark.parametrize("name", ["full", "diagonal", "blocks", "kflr", "ekfac", "low_rank", "dual"])


@every
def test_a_curvature_comes_back(name: str) -> None:
    found = curvature(name)
    again = through_json(found)
    assert isinstance(again, type(found))
    assert torch.equal(again.dense(), found.dense())
    assert torch.equal(again.with_prior(0.5).logdet(), found.with_prior(0.5).logdet())


@every
def test_a_multiple_comes_back_with_its_scale(name: str) -> None:
    found = curvature(name) * 3.0
    again = through_json(found)
    assert isinstance(again, Curvature)
    torch.testing.assert_close(again.dense(), 3 * curvature(name).dense(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(again.with_prior(0.5).logdet(), found.with_prior(0.5).logdet(), rtol=1e-12, atol=0)


def test_a_weighted_sum_of_rows_comes_back_with_its_scale() -> None:
    found = (curvature("dual") * 2.0 + curvature("dual")) * 5.0
    again = through_json(found)
    assert isinstance(again, Curvature)
    torch.testing.assert_close(again.dense(), 15 * curvature("dual").dense(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "likelihood",
    [
        likelihoods.Gaussian(sigma=0.25),
        likelihoods.Gaussian(sigma=torch.tensor([0.1, 0.3], dtype=torch.float64), class_axis=1),
        likelihoods.Categorical(ignore_index=-1),
        likelihoods.Bernoulli(),
        likelihoods.Poisson(),
        likelihoods.HeteroscedasticGaussian(),
        likelihoods.BernoulliMixture(),
        likelihoods.Preference(),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_likelihood_comes_back(likelihood: likelihoods.Likelihood) -> None:
    again = through_json(likelihood)
    assert type(again) is type(likelihood)
    for name, value in vars(likelihood).items():
        found = getattr(again, name)
        assert torch.equal(found, value) if isinstance(value, Tensor) else found == value


def test_what_is_not_registered_is_not_packed() -> None:
    function = likelihoods.from_function(lambda f, y: (f - y).square().sum())
    with pytest.raises(DataError, match="Register its class"):
        pack(function)
    with pytest.raises(DataError, match="is a Generator"):
        pack((1, torch.Generator()))


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ({"kind": "os.system", "fields": {}}, "unknown kind 'os.system'"),
        ({"kind": "subprocess.Popen", "fields": {"args": "ls"}}, "unknown kind"),
        ({"kind": ["Dense"], "fields": {}}, "unknown kind"),
        ({}, "unknown kind None"),
        ([], "found list"),
        ({"tensor": "y"}, "tensor 'y' is missing"),
        ({"tensor": ["x"]}, "is missing"),
        ({"items": "abc"}, "items are a str"),
        ({"kind": "Dense", "fields": [1]}, "fields of Dense are a list"),
        ({"kind": "Dense"}, "fields of Dense are a NoneType"),
        ({"kind": "Dense", "fields": {"matrix": {"tensor": "x"}, "more": 1}}, "fields of Dense do not fit"),
        ({"kind": "Dense", "fields": {}}, "fields of Dense do not fit"),
        ({"kind": "Dense", "fields": {"__class__": 1}}, "fields of Dense do not fit"),
    ],
)
def test_a_made_up_description_makes_nothing(description: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        unpack(description, {"x": torch.eye(2)})


def test_sizes_that_are_only_claimed_make_nothing() -> None:
    segments = {"kind": "Segments", "fields": {"intervals": {"items": [{"items": [0, 10**15]}]}}}
    diagonal = {"kind": "Diagonal", "fields": {"values": {"tensor": "x"}}}
    block = {"kind": "Block", "fields": {"name": "w", "segments": segments, "curvature": diagonal}}
    with pytest.raises(CurvatureError, match="size 2"):
        unpack({"kind": "Blocks", "fields": {"params": 10**15, "blocks": {"items": [block]}}}, {"x": torch.ones(2)})


def test_a_class_of_ones_own_can_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(KINDS, "Diagonal")
    with pytest.raises(DataError, match="is a Diagonal, which cannot be stored"):
        pack(Diagonal(torch.ones(1)))
    register(Diagonal)
    assert KINDS["Diagonal"] is Diagonal
    assert isinstance(through_json((Diagonal(torch.ones(1)), Dense(torch.eye(1)))), tuple)


@every
def test_compact_tensors_are_row_major_and_aligned(name: str) -> None:
    found = curvature(name)
    again = compact(found)
    description, tensors = pack(again)
    assert description == pack(found)[0]
    assert all(torch.equal(value, tensors[key]) for key, value in pack(found)[1].items())
    assert all(value.is_contiguous() and value.storage_offset() == 0 for value in tensors.values())
    assert compact(again) is again
