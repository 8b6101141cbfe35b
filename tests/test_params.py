"""ParamSpace: one flat order for everything, round trips, groups, and smaller spaces."""

from __future__ import annotations

from types import SimpleNamespace

import jaxtyping
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lapwing.errors import ModelError, ParameterError
from lapwing.params import ParamSpace

fast = settings(deadline=None, max_examples=50, derandomize=True)


class Bag(nn.Module):
    """Parameters of any shape, in the order given."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        for number, shape in enumerate(shapes):
            self.register_parameter(f"p{number}", nn.Parameter(torch.randn(shape, dtype=torch.float64)))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1, bias=False))


shapes = st.lists(st.lists(st.integers(1, 3), max_size=3).map(tuple), min_size=1, max_size=4)
leads = st.lists(st.integers(0, 3), max_size=2).map(tuple)


# -- order and round trips ------------------------------------------------------------------------------------------


def test_the_order_is_that_of_named_parameters_each_row_major() -> None:
    model = mlp()
    space = ParamSpace.of(model)
    assert space.names == tuple(name for name, _ in model.named_parameters())
    assert space.size == space.total == sum(p.numel() for p in model.parameters())
    assert torch.equal(space.values(model), nn.utils.parameters_to_vector(model.parameters()))
    weight = model[0].weight
    for o in range(3):
        for i in range(2):
            assert space.values(model)[o * 2 + i] == weight[o, i]


def test_values_are_a_copy() -> None:
    model = mlp()
    space = ParamSpace.of(model)
    values = space.values(model)
    assert not values.requires_grad
    values.zero_()
    assert all(bool(p.abs().sum()) for p in model[0].parameters())
    one = nn.Linear(2, 1, bias=False)  # a single tensor needs no concatenation, and is a copy all the same
    ParamSpace.of(one).values(one).zero_()
    assert bool(one.weight.abs().sum())


@fast
@given(shapes, leads)
def test_ravel_and_unravel_are_inverse(found: list[tuple[int, ...]], lead: tuple[int, ...]) -> None:
    space = ParamSpace.of(Bag(found))
    v = torch.arange(float(torch.Size(lead).numel() * space.size)).double().reshape(*lead, space.size)
    tree = space.unravel(v)
    assert {name: value.shape for name, value in tree.items()} == {
        f"p{number}": torch.Size((*lead, *shape)) for number, shape in enumerate(found)
    }
    assert torch.equal(space.ravel(tree), v)


@fast
@given(shapes, st.data())
def test_a_mask_restricts_and_expands(found: list[tuple[int, ...]], data: st.DataObject) -> None:
    """restrict(expand(v)) = v, and expand puts zeros outside."""
    space = ParamSpace.of(Bag(found))
    keep = data.draw(st.lists(st.booleans(), min_size=space.size, max_size=space.size).filter(any))
    mask = torch.tensor(keep)
    smaller = space.select(mask=mask)
    assert smaller.size == int(mask.sum())
    assert smaller.total == space.size
    v = torch.arange(1.0, smaller.size + 1).double()
    whole = space.ravel(smaller.unravel(v))
    assert torch.equal(whole[mask], v)
    assert not bool(whole[~mask].any())
    assert torch.equal(smaller.ravel(smaller.unravel(v)), v)
    positions = mask.nonzero().squeeze(1)
    assert torch.equal(space.select(mask=positions.flip(0)).restrict(whole), v)  # the order is always the flat one


def test_unravel_carries_gradients() -> None:
    space = ParamSpace.of(mlp())
    for chosen in (space, space.select(mask=torch.arange(3))):
        v = torch.ones(chosen.size, requires_grad=True)
        total = sum((k + 1) * value.sum() for k, value in enumerate(chosen.unravel(v).values()))
        assert isinstance(total, Tensor)
        assert float(torch.autograd.grad(total, v)[0].min()) >= 1


def test_segments_are_where_ravel_puts_a_tensor() -> None:
    space = ParamSpace.of(mlp())
    v = torch.arange(float(space.size))
    for name, value in space.unravel(v).items():
        assert torch.equal(v[space.segment(name)], value.flatten())
        assert space.shape(name) == value.shape
        assert space.starts[name] == space.segment(name).start


# -- which parameters -----------------------------------------------------------------------------------------------


def test_frozen_parameters_are_left_out() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    assert ParamSpace.of(model).names == ("2.weight", "2.bias", "3.weight", "3.bias", "4.weight")


def test_a_tied_parameter_counts_once_under_its_first_name() -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5))
    model[1].weight = model[0].weight
    space = ParamSpace.of(model)
    assert space.names == ("0.weight", "1.bias")
    assert space.size == 20


def test_buffers_are_no_parameters() -> None:
    assert ParamSpace.of(nn.BatchNorm1d(3)).names == ("weight", "bias")


def test_a_parameter_without_entries_takes_no_room() -> None:
    space = ParamSpace.of(Bag([(0,), (2,), (0, 3)]))
    assert space.size == 2
    assert space.unravel(torch.ones(2))["p2"].shape == (0, 3)
    assert torch.equal(space.groups(), torch.ones(2, dtype=torch.int64))


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ((torch.float16,), torch.float32),
        ((torch.bfloat16,), torch.float32),
        ((torch.float32,), torch.float32),
        ((torch.float64,), torch.float64),
        ((torch.float16, torch.float64), torch.float64),
        ((torch.float32, torch.bfloat16), torch.float32),
    ],
)
def test_curvature_is_accumulated_in_the_widest_dtype(dtypes: tuple[torch.dtype, ...], expected: torch.dtype) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2, dtype=dtype) for dtype in dtypes))
    space = ParamSpace.of(model)
    assert space.dtype == expected
    assert space.values(model).dtype == expected


# -- groups ---------------------------------------------------------------------------------------------------------


def test_groups_number_tensors_and_layers_in_order() -> None:
    space = ParamSpace.of(mlp())
    assert space.layers == ("0", "2", "3", "4")
    by_tensor = [0] * 6 + [1] * 3 + [2] * 12 + [3] * 4 + [4] * 4 + [5] * 4 + [6] * 4
    assert space.groups().tolist() == space.groups("tensor").tolist() == by_tensor
    assert space.groups("layer").tolist() == [0] * 9 + [1] * 16 + [2] * 8 + [3] * 4


def test_groups_of_a_sub_network_are_those_of_its_entries() -> None:
    space = ParamSpace.of(mlp())
    mask = torch.arange(space.size) % 3 == 0
    assert torch.equal(space.select(mask=mask).groups("layer"), space.groups("layer")[mask])


def test_parameters_of_the_model_itself_form_a_layer() -> None:
    assert ParamSpace.of(Bag([(2,), (3,)])).groups("layer").tolist() == [0] * 5


# -- smaller spaces -------------------------------------------------------------------------------------------------


def test_selection_by_names_keeps_the_flat_order() -> None:
    space = ParamSpace.of(mlp())
    assert space.select(["4.weight", "0.bias"]).names == ("0.bias", "4.weight")
    assert space.select(name for name in space.names if "bias" in name).size == 3 + 4 + 4


def test_selection_by_module_takes_all_below_it_and_nothing_that_only_begins_alike() -> None:
    model = nn.ModuleDict({"head": mlp(), "head2": nn.Linear(2, 2), "h": nn.Linear(1, 1)})
    space = ParamSpace.of(model)
    assert space.select(module="head").size == 37
    assert space.select(module="head.0").names == ("head.0.weight", "head.0.bias")
    assert space.select(module="h").names == ("h.weight", "h.bias")
    assert space.select(module="") == space


def test_selections_nest() -> None:
    space = ParamSpace.of(mlp())
    v = torch.arange(float(space.size))
    mask = torch.arange(space.size) % 2 == 0
    odd = space.select(mask=mask)
    again = odd.select(mask=torch.arange(odd.size) % 5 == 0)
    assert torch.equal(again.restrict(v), v[mask][::5])
    assert again.whole == space
    layer = odd.select(module="2")
    assert layer.names == ("2.weight", "2.bias")
    inside = space.segment("2.weight").start, space.segment("2.bias").stop
    expected = [p for p in range(*inside) if p % 2 == 0]
    assert torch.equal(layer.restrict(v[inside[0] : inside[1]]), v[expected])
    cut = space.select(module="2").select(mask=torch.tensor([0, 15]))
    assert cut.restrict(v[inside[0] : inside[1]]).tolist() == [inside[0], inside[1] - 1]


def test_spaces_are_equal_where_they_hold_the_same_entries() -> None:
    space = ParamSpace.of(mlp())
    assert space == ParamSpace.of(mlp())
    assert hash(space) == hash(ParamSpace.of(mlp()))
    assert space != space.select(module="0")
    one, other = space.select(mask=torch.tensor([0, 1])), space.select(mask=torch.tensor([0, 2]))
    assert one == space.select(mask=torch.tensor([1, 0]))
    assert one != other
    assert one != space
    assert one != "a space"


# -- errors ---------------------------------------------------------------------------------------------------------


def test_a_model_without_trainable_parameters_is_refused() -> None:
    for model in (nn.ReLU(), mlp().requires_grad_(False)):
        with pytest.raises(ModelError, match=r"no trainable parameter; a curvature needs at least one.*requires_grad_"):
            ParamSpace.of(model)


def test_a_lazy_module_is_refused() -> None:
    with pytest.raises(ModelError, match=r"'0.weight' is not initialised.*expected.*run the model once"):
        ParamSpace.of(nn.Sequential(nn.LazyLinear(3)))


def test_complex_parameters_are_refused() -> None:
    with pytest.raises(ModelError, match=r"'weight' has dtype torch.complex64; expected a real.*view_as_real"):
        ParamSpace.of(nn.Linear(2, 2, dtype=torch.complex64))


def test_parameters_on_several_devices_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ModelError, match=r"several devices.*cpu.*meta.*expected one. Move"):
        ParamSpace.of(model)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({}, r"exactly one of names, module, mask"),
        ({"names": ["0.bias"], "module": "0"}, r"exactly one of names, module, mask"),
        ({"names": "0.bias"}, r"names is the string '0.bias'; expected an iterable"),
        ({"names": ["0.bias", "nope"]}, r"no parameter 'nope' in this space; there are .*0.weight"),
        ({"names": []}, r"selection is empty; expected at least one"),
        ({"module": "1"}, r"module '1' owns no parameter here; layers are .*'0'"),
        ({"module": "nope"}, r"module 'nope' owns no parameter"),
        ({"mask": torch.ones(3, dtype=torch.bool)}, r"shape \(3,\); expected last axis 37"),
        ({"mask": torch.zeros(37, dtype=torch.bool)}, r"selects nothing; expected at least one"),
        ({"mask": torch.tensor([], dtype=torch.int64)}, r"selects nothing; expected at least one"),
        ({"mask": torch.tensor([0, 37])}, r"outside 0..36"),
        ({"mask": torch.tensor([-1])}, r"outside 0..36"),
        ({"mask": torch.tensor([1, 1])}, r"twice; expected distinct"),
    ],
)
def test_wrong_selections_are_refused(choice: dict, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        ParamSpace.of(mlp()).select(**choice)


def test_a_selection_that_a_mask_left_empty_is_refused() -> None:
    space = ParamSpace.of(mlp()).select(mask=torch.tensor([0, 1]))
    with pytest.raises(ParameterError, match=r"selects nothing"):
        space.select(module="4")


def test_unknown_groupings_and_names_are_refused() -> None:
    space = ParamSpace.of(mlp())
    with pytest.raises(ParameterError, match=r"unknown grouping 'colour'; expected 'tensor' or 'layer'"):
        space.groups("colour")
    for ask in (space.segment, space.shape):
        with pytest.raises(ParameterError, match=r"no parameter 'x' in this space; there are"):
            ask("x")


def test_vectors_and_trees_of_the_wrong_shape_are_refused() -> None:
    space = ParamSpace.of(mlp())
    for shape in ((36,), (38,), (37, 1)):
        with pytest.raises(ParameterError, match=r"expected last axis 37"):
            space.unravel(torch.ones(shape))
    with pytest.raises(ParameterError, match=r"expected last axis 37"):
        space.check(torch.ones(()))
    tree = space.unravel(torch.ones(37))
    with pytest.raises(ParameterError, match=r"no entry for parameter '2.bias'; expected one for each"):
        space.ravel({name: value for name, value in tree.items() if name != "2.bias"})
    for wrong in (torch.ones(2, 3), torch.ones(3), torch.ones(3, 2, 1), torch.ones(())):
        with pytest.raises(ParameterError, match=r"entry '0.weight' has shape .*expected \(\*batch, 3, 2\)"):
            space.ravel(tree | {"0.weight": wrong})
    with pytest.raises(ParameterError, match=r"entry '0.bias' has batch axes \(5,\).*expected \(4,\)"):
        space.ravel(space.unravel(torch.ones(4, 37)) | {"0.bias": torch.ones(5, 3)})


@pytest.mark.parametrize("name", ["module_", "module", "model"])
def test_a_network_inside_what_is_none_is_named(name, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as for users
    with pytest.raises(ModelError, match=f"is a SimpleNamespace; expected a torch.nn.Module. Give its {name}, which"):
        ParamSpace.of(SimpleNamespace(**{name: nn.Linear(2, 1)}))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ModelError, match="Give the network itself"):
        ParamSpace.of(SimpleNamespace(**{name: "linear"}))  # pyright: ignore[reportArgumentType]
