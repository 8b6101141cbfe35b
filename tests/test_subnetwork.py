"""Sub-networks: the chosen positions are the right ones, in flat order; SWAG's variance is that of an SGD trajectory;
and the masks choose what the functions do."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from lapwing import estimate, subnetwork
from lapwing.errors import DataError, LikelihoodError, ModelError, ParameterError
from lapwing.likelihoods import Categorical, Gaussian, Likelihood
from lapwing.params import ParamSpace
from lapwing.tangent import Tangent
from memory import Largest
from unchanged import unchanged


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()  # 8 + 4 + 12 + 3 = 27


def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 2, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (20,), generator=generator)
    return [(x[:8], y[:8]), (x[8:16], y[8:16]), (x[16:], y[16:])]


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


# -- choices --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 7, 27])
def test_largest_scores(n: int) -> None:
    model = network()
    space = ParamSpace.of(model)
    expected = flat(model).abs().topk(n).indices.sort().values
    assert torch.equal(subnetwork.largest_magnitude(space, model, n).index, expected)
    scores = torch.rand(27, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    chosen = subnetwork.largest_variance(space, scores, n)
    assert torch.equal(chosen.index, scores.topk(n).indices.sort().values)
    assert torch.equal(subnetwork.positions(space, chosen), chosen.index)


def test_equal_scores_go_in_flat_order() -> None:
    space = ParamSpace.of(network())
    assert subnetwork.largest_variance(space, torch.ones(27, dtype=torch.float64), 4).index.tolist() == [0, 1, 2, 3]


def test_random_is_uniform_and_follows_its_generator(generator: torch.Generator) -> None:
    space = ParamSpace.of(network())
    draws, n = 2000, 5
    counts = torch.zeros(27)
    for _ in range(draws):
        index = subnetwork.random(space, n, generator).index
        assert len(index.unique()) == n
        counts[index] += 1
    share = n / 27
    error = (draws * share * (1 - share)) ** 0.5
    assert float((counts - draws * share).abs().max()) < 4 * error
    seeded = [subnetwork.random(space, n, torch.Generator().manual_seed(s)).index.tolist() for s in (3, 3, 4)]
    assert seeded[0] == seeded[1] != seeded[2]


def test_choices_within_a_choice() -> None:
    """Positions are those of the larger space, which may be a sub-network itself."""
    model = network()
    space = ParamSpace.of(model)
    last = subnetwork.by_modules(space, ["2"])
    few = subnetwork.largest_magnitude(last, model, 4)
    assert torch.equal(subnetwork.positions(space, few), 12 + few.index)
    assert torch.equal(subnetwork.positions(last, few), few.index)
    inner = subnetwork.random(few, 2, torch.Generator().manual_seed(0))
    assert set(subnetwork.positions(space, inner).tolist()) < set((12 + few.index).tolist())
    with pytest.raises(ParameterError, match=r"\d+ entries of the sub-network are not in the larger space"):
        subnetwork.positions(few, last)


@pytest.mark.parametrize(
    ("names", "expected"), [(["0.bias"], range(8, 12)), (["2.bias", "0.weight"], [*range(8), *range(24, 27)])]
)
def test_by_parameter_names(names: list[str], expected: Iterable[int]) -> None:
    space = ParamSpace.of(network())
    assert subnetwork.positions(space, subnetwork.by_parameters(space, names)).tolist() == list(expected)


def test_by_module_names() -> None:
    model = nn.Sequential(network(), nn.Tanh(), nn.Linear(3, 1).double())
    space = ParamSpace.of(model)
    assert subnetwork.by_modules(space, ["0"]).size == 27
    assert subnetwork.by_modules(space, ["0.2", "2"]).names == ("0.2.weight", "0.2.bias", "2.weight", "2.bias")
    assert subnetwork.by_modules(space, [""]) == space


class Raw(nn.Module):
    """A last layer of bare tensors, and one tensor that is used before it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.w = nn.Parameter(torch.ones(2, 3, dtype=torch.float64))
        self.b = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.scale) @ self.w + self.b


class Backwards(nn.Module):
    """The layer that is registered first is used last."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3).double()
        self.body = nn.Linear(2, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (network, ("2.weight", "2.bias")),
        (Backwards, ("head.weight", "head.bias")),
        (Raw, ("w", "b")),
        (
            lambda: nn.Sequential(
                nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 3, bias=False)
            ).double(),
            ("3.weight",),
        ),
        (
            lambda: nn.Sequential(nn.Linear(2, 4), parametrizations.weight_norm(nn.Linear(4, 3))).double(),
            ("1.bias", "1.parametrizations.weight.original0", "1.parametrizations.weight.original1"),
        ),
    ],
)
def test_the_last_layer_is_the_one_used_last(build: Callable[[], nn.Module], expected: tuple[str, ...]) -> None:
    model = build()
    x, _ = data()[0]
    with unchanged(model):
        assert subnetwork.last_layer(ParamSpace.of(model), model, x).names == expected


def test_a_model_without_a_last_layer() -> None:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.b = nn.Parameter(torch.zeros(2, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.b

    model = Shift()
    with pytest.raises(ModelError, match=r"no operation of Shift multiplies.*by_modules"):
        subnetwork.last_layer(ParamSpace.of(model), model, data()[0][0])


def test_bad_choices() -> None:
    model = network()
    space = ParamSpace.of(model)
    for n in (0, -1, 28):
        for choose in (
            lambda n=n: subnetwork.largest_magnitude(space, model, n),
            lambda n=n: subnetwork.largest_variance(space, torch.ones(27, dtype=torch.float64), n),
            lambda n=n: subnetwork.random(space, n),
        ):
            with pytest.raises(ParameterError, match=rf"of {n} weights; expected a number from 1 to 27"):
                choose()
    with pytest.raises(ParameterError, match="expected last axis 27"):
        subnetwork.largest_variance(space, torch.ones(5), 2)
    with pytest.raises(ParameterError, match="variance of weight 3 is NaN"):
        subnetwork.largest_variance(space, torch.tensor([1.0, 1, 1, float("nan")] + [1.0] * 23), 2)
    with pytest.raises(ParameterError, match=r"no parameter '0.wieght' here; did you mean '0.weight'\?"):
        subnetwork.by_parameters(space, ["0.bias", "0.wieght"])
    with pytest.raises(ParameterError, match=r"no module with parameters '1' here; expected some of \['0', '2'\]"):
        subnetwork.by_modules(space, ["1"])
    for wrong in ("0.weight", []):
        with pytest.raises(ParameterError, match="expected a list with at least one name"):
            subnetwork.by_parameters(space, wrong)


# -- SWAG -----------------------------------------------------------------------------------------------------------


def trajectory(model: nn.Module, likelihood: Likelihood, loader: list, snapshots: int, every: int, lr: float) -> Tensor:
    """The plain way: a copy of the model, torch's SGD, all snapshots kept."""
    model = copy.deepcopy(model)
    optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr, 0.9, weight_decay=3e-4)
    kept = []
    for epoch in range(1, snapshots * every + 1):
        for x, y in loader:
            optimiser.zero_grad()
            (-likelihood.log_prob(model(*x) if isinstance(x, tuple) else model(x), y).mean()).backward()
            optimiser.step()
        if epoch % every == 0:
            kept.append(flat(model))
    return torch.stack(kept).var(0, unbiased=False)


class Tied(nn.Module):
    """Two inputs, one weight used under two names, one parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2).double()
        self.second = nn.Linear(2, 2).double()
        self.second.weight = self.first.weight
        self.head = nn.Linear(2, 3).double()
        self.idle = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(left)) + torch.tanh(self.second(right)))


@pytest.mark.parametrize(("snapshots", "every"), [(5, 1), (3, 2)])
def test_swag_variance_is_that_of_a_plain_trajectory(snapshots: int, every: int) -> None:
    model = network()
    with unchanged(model):
        found = subnetwork.swag_variance(model, data(), Categorical(), snapshots, every, 0.05)
    expected = trajectory(model, Categorical(), data(), snapshots, every, 0.05)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-18)
    assert bool((found > 0).all())


def test_swag_takes_forty_snapshots_one_after_each_epoch() -> None:
    """Unless told otherwise, at a rate of 0.01."""

    class Counted(list):
        passes = 0

        def __iter__(self) -> Iterator[Any]:
            self.passes += 1
            return super().__iter__()

    model, loader = network(), Counted(data())
    found = subnetwork.swag_variance(model, loader, Categorical())
    assert loader.passes == 40
    expected = trajectory(model, Categorical(), data(), 40, 1, 0.01)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-18)
    loader.passes = 0
    mask = subnetwork.LargestVarianceSWAGSubnetMask(model, 6)
    assert torch.equal(mask.select(loader), expected.topk(6).indices.sort().values)
    assert loader.passes == 40


def test_swag_with_batch_norm_in_train_mode_leaves_its_statistics_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    for mode in (True, False):
        model.train(mode)
        with unchanged(model):
            found = subnetwork.swag_variance(model, data(), Categorical(), 4, 1, 0.05)
        torch.testing.assert_close(found, trajectory(model, Categorical(), data(), 4, 1, 0.05), rtol=1e-9, atol=1e-18)


def test_swag_with_tied_weights_frozen_weights_and_tuple_inputs() -> None:
    model = Tied()
    model.head.weight.requires_grad_(False)
    loader = [((x, x.square()), y) for x, y in data()]
    with unchanged(model):
        found = subnetwork.swag_variance(model, loader, Categorical(), 4, 1, 0.05)
    expected = trajectory(model, Categorical(), loader, 4, 1, 0.05)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-18)
    space = ParamSpace.of(model)
    assert found[space.segment("idle")].tolist() == [0.0, 0.0]


def test_swag_leaves_the_model_alone_after_an_error() -> None:
    model = network()
    x, y = data()[0]
    with unchanged(model), pytest.raises(LikelihoodError, match=r"batch 1: .*target 5"):
        subnetwork.swag_variance(model, [(x, y), (x, y + 3)], Categorical(), 2)
    line = nn.Linear(2, 1).double()
    with unchanged(line), pytest.raises(DataError, match=r"loss of batch 0 is .* in epoch \d+ of SGD.*smaller lr"):
        subnetwork.swag_variance(line, [(x, x[:, :1])], Gaussian(), 40, lr=1e100)
    with pytest.raises(DataError, match="yields no batch"):
        subnetwork.swag_variance(model, [], Categorical())
    with pytest.raises(DataError, match="batch 0 is a Tensor; expected a pair"):
        subnetwork.swag_variance(model, [x], Categorical())
    for wrong in ({"snapshots": 1}, {"every": 0}, {"lr": -0.1}, {"lr": 0}, {"momentum": 1}, {"decay": -1.0}):
        with pytest.raises(ParameterError, match="expected"):
            subnetwork.swag_variance(model, data(), Categorical(), **wrong)


# -- masks ----------------------------------------------------------------------------------------------------------


class Diagonal:
    """What a mask asks of a diagonal posterior."""

    def __init__(self, model: nn.Module) -> None:
        self.tangent = Tangent(model)
        self.posterior_variance: Tensor | None = None

    def fit(self, loader: Any) -> None:
        self.posterior_variance = estimate.diagonal(self.tangent, Categorical(), loader).with_prior(1.0).variance()


def masks(model: nn.Module) -> dict[str, tuple[subnetwork.SubnetMask, ParamSpace]]:
    """Every mask, and the space that it must choose."""
    space = ParamSpace.of(model)
    fitted = Diagonal(model)
    fitted.fit(data())
    swag = subnetwork.swag_variance(model, data(), Categorical(), 3, 2, 0.02)
    return {
        "random": (
            subnetwork.RandomSubnetMask(model, 6, torch.Generator().manual_seed(5)),
            subnetwork.random(space, 6, torch.Generator().manual_seed(5)),
        ),
        "magnitude": (
            subnetwork.LargestMagnitudeSubnetMask(model, 6),
            subnetwork.largest_magnitude(space, model, 6),
        ),
        "variance": (
            subnetwork.LargestVarianceDiagLaplaceSubnetMask(model, 6, Diagonal(model)),
            subnetwork.largest_variance(space, fitted.posterior_variance, 6),
        ),
        "swag": (
            subnetwork.LargestVarianceSWAGSubnetMask(model, 6, "classification", 3, 2, 0.02),
            subnetwork.largest_variance(space, swag, 6),
        ),
        "parameters": (subnetwork.ParamNameSubnetMask(model, ["2.bias", "0.bias"]), space.select(["0.bias", "2.bias"])),
        "modules": (subnetwork.ModuleNameSubnetMask(model, ["0"]), space.select(module="0")),
        "last layer": (subnetwork.LastLayerSubnetMask(model), space.select(module="2")),
        "last layer by name": (subnetwork.LastLayerSubnetMask(model, "0"), space.select(module="0")),
    }


@pytest.mark.parametrize(
    "name",
    ["random", "magnitude", "variance", "swag", "parameters", "modules", "last layer", "last layer by name"],
)
def test_masks_choose_what_the_functions_do(name: str) -> None:
    model = network()
    mask, expected = masks(model)[name]
    space = ParamSpace.of(model)
    with pytest.raises(ParameterError, match=r"not selected yet; expected a call of select\(\)"):
        _ = mask.indices
    with unchanged(model):
        found = mask.select(data())
    assert found.dtype == torch.int64
    assert torch.equal(found, subnetwork.positions(space, expected))
    assert torch.equal(mask.indices, found)
    assert mask.n_params_subnet == len(found)
    assert torch.equal(found, found.sort().values)
    with pytest.raises(ParameterError, match="selected already"):
        mask.select(data())


def test_masks_that_need_no_data_take_none() -> None:
    model = network()
    for name in ("random", "magnitude", "parameters", "modules", "last layer by name"):
        assert len(masks(model)[name][0].select()) > 0
    for name in ("variance", "swag", "last layer"):
        mask = masks(model)[name][0]
        with pytest.raises(DataError, match=rf"{type(mask).__name__} needs data"):
            mask.select()
        assert len(mask.select(data())) > 0  # a failed select is none


def test_a_choice_of_ones_own() -> None:
    class Even(subnetwork.SubnetMask):
        def get_subnet_mask(self, train_loader: Any) -> Tensor:
            return torch.arange(self.space.size) % 2 == 0

    assert Even(network()).select().tolist() == list(range(0, 27, 2))


def test_bad_masks() -> None:
    model = network()
    for n in (0, 28, None):
        with pytest.raises(ParameterError, match=f"of {n} weights"):
            subnetwork.RandomSubnetMask(model, n)
    for mask in (subnetwork.ParamNameSubnetMask, subnetwork.ModuleNameSubnetMask, subnetwork.LastLayerSubnetMask):
        with pytest.raises(TypeError, match="argument"):
            mask(model=model, n_params_subnet=3)
    with pytest.raises(ParameterError, match=r"did you mean '2.bias'\?"):
        subnetwork.ParamNameSubnetMask(model, ["2.bais"])
    with pytest.raises(ParameterError, match="no module with parameters 'head'"):
        subnetwork.LastLayerSubnetMask(model, "head")
    with pytest.raises(ParameterError, match=r"no likelihood 'clasification' here; did you mean 'classification'\?"):
        subnetwork.LargestVarianceSWAGSubnetMask(model, 3, "clasification")
    with pytest.raises(ParameterError, match=r"SimpleNamespace without fit\(\).*hessian_structure='diag'"):
        subnetwork.LargestVarianceDiagLaplaceSubnetMask(model, 3, SimpleNamespace())
    with pytest.raises(DataError, match="yields no batch"):
        subnetwork.LastLayerSubnetMask(model).select([])


class Large(nn.Module):
    """Sixty million weights in 150 tensors, in memory that is never touched."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.empty(400_000)) for _ in range(150)])


def test_a_few_weights_of_many_millions_take_the_memory_of_a_few() -> None:
    """A network of 68 million weights took 88 GB: an index of all of them for each of its tensors."""
    model = Large()
    space = ParamSpace.of(model)
    with Largest() as most:
        found = subnetwork.RandomSubnetMask(model, 10, torch.Generator().manual_seed(0)).select()
        chosen = space.select(mask=found)
        assert torch.equal(subnetwork.positions(space, chosen), found)
        assert len(chosen.groups("tensor")) == 10
        last = subnetwork.by_parameters(space, ["weights.149"])
        assert int(subnetwork.positions(space, last)[0]) == 149 * 400_000
        few = subnetwork.random(last, 5)
        inner = subnetwork.positions(space, few)
    assert bool((inner >= 149 * 400_000).all())
    assert most.numel <= 400_000, most.where


def test_a_likelihood_may_be_a_name_an_enum_or_an_object() -> None:
    class Kind(str, Enum):  # noqa: UP042 - str() of it is not its value, unlike that of a StrEnum
        REGRESSION = "regression"

    model = nn.Linear(2, 2).double()
    loader = [(x, x.cos()) for x, _ in data()]
    choices = [
        subnetwork.LargestVarianceSWAGSubnetMask(model, 2, likelihood, 3).select(loader)
        for likelihood in ("regression", Kind.REGRESSION, Gaussian())
    ]
    assert torch.equal(choices[0], choices[1])
    assert torch.equal(choices[0], choices[2])


def test_a_module_whose_name_begins_as_another_is_another() -> None:
    model = nn.Module()
    for name in ("layer1", "layer10", "layer1_norm"):
        model.add_module(name, nn.Linear(2, 2))
    model.register_parameter("layer1x", nn.Parameter(torch.zeros(3)))
    space = ParamSpace.of(model)
    assert subnetwork.by_modules(space, ["layer1"]).names == ("layer1.weight", "layer1.bias")
    assert subnetwork.by_modules(space, ["layer10"]).names == ("layer10.weight", "layer10.bias")
    mask = subnetwork.ModuleNameSubnetMask(model, ["layer1"])
    assert mask.select().tolist() == list(range(3, 9))  # behind the model's own parameter of three entries
    assert subnetwork.ParamNameSubnetMask(model, ["layer1.bias"]).select().tolist() == [7, 8]


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.5, 0.1)])
def test_swag_takes_its_momentum_and_decay(momentum: float, decay: float) -> None:
    """By torch's own SGD."""
    model = network()
    found = subnetwork.swag_variance(model, data(), Categorical(), 3, 1, 0.05, momentum, decay)
    own = copy.deepcopy(model)
    optimiser = torch.optim.SGD(own.parameters(), lr=0.05, momentum=momentum, weight_decay=decay)
    states = []
    for _ in range(3):
        for x, y in data():
            optimiser.zero_grad()
            nn.functional.cross_entropy(own(x), y).backward()
            optimiser.step()
        states.append(flat(own))
    torch.testing.assert_close(found, torch.stack(states).var(0, correction=0), rtol=1e-9, atol=1e-18)


def test_a_mask_by_swag_of_a_regression() -> None:
    model = network()
    loader = [(x, torch.sin(x @ torch.ones(2, 3, dtype=torch.float64))) for x, _ in data()]
    mask = subnetwork.LargestVarianceSWAGSubnetMask(model, 6, "regression", 3, 1, 0.02)
    variance = subnetwork.swag_variance(model, loader, Gaussian(), 3, 1, 0.02)
    assert torch.equal(mask.select(loader), variance.topk(6).indices.sort().values)


def test_random_is_uniform_where_most_are_drawn(generator: torch.Generator) -> None:
    """20 of 27, by a permutation: each as often as 20 / 27 of 1000 draws, within 4.5 standard errors."""
    space, counts = ParamSpace.of(network()), torch.zeros(27)
    for _ in range(1000):
        counts[subnetwork.random(space, 20, generator).index] += 1
    share = 20 / 27
    assert float((counts / 1000 - share).abs().max()) < 4.5 * (share * (1 - share) / 1000) ** 0.5


@pytest.mark.parametrize("name", ["random", "magnitude", "variance", "swag", "parameters", "modules", "last layer"])
def test_the_mask_itself_is_true_at_what_is_chosen(name: str) -> None:
    model = network()
    mask, expected = masks(model)[name]
    found = mask.get_subnet_mask(data())
    assert found.dtype == torch.bool
    assert found.shape == (27,)
    assert torch.equal(found.nonzero()[:, 0], subnetwork.positions(ParamSpace.of(model), expected))
