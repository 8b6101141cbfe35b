"""A private copy of a model computes what the model does, with the model's parameters, and nothing it does is seen."""

from __future__ import annotations

import warnings
import weakref
from collections import namedtuple
from functools import partial
from types import MethodType

import pytest
import torch
from torch import Tensor, nn

from lapwing.tangent.private import private
from unchanged import unchanged

Pair = namedtuple("Pair", "first second")


class Entangled(nn.Module):
    """Modules that refer to each other in every way that is followed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))
        self.constant = torch.ones(3)
        self.log: list[int] = []
        self.others = [self.drop, {"b": self.b}]
        self.pair = Pair(self.a, (self.drop,))
        self.by_module = {self.a: "a"}
        self.bound, self.part, self.closed = self.once, partial(nn.Module.__call__, self.drop), self._closed()
        self.b.parent = weakref.ref(self)
        self.shared_a = self.shared_b = []

    def _closed(self):
        return lambda h: self.drop(h)

    def once(self, h: Tensor) -> Tensor:
        return self.drop(h)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.constant += 1
        self.log.append(len(x))
        self.last = x
        self.shared_a.append(1)
        assert self.shared_b
        assert self.pair.first is self.a
        assert self.by_module[self.a] == "a"
        assert self.b.parent() is self
        h = self.others[1]["b"](self.a(x))
        for each in (self.others[0], self.pair.second[0], self.bound, self.part, self.closed):
            h = each(h)
        return h * (self.constant - self.calls)


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that TorchScript is old
        inner = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.BatchNorm1d(3), nn.Dropout())))
    return nn.Sequential(nn.Linear(3, 3), inner)


def normed() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is old
        old = nn.utils.weight_norm(nn.Linear(3, 3))
    new = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    return nn.Sequential(old, nn.BatchNorm1d(3), new, nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)))


class Frozen(nn.Module):
    """Dropout that stays on when asked for, as modules that decide their modes do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)

    def train(self, mode: bool = True):
        super().train(mode)
        self.norm.training = False
        self.a.training = True
        return self

    def forward(self, x: Tensor) -> Tensor:
        assert self.a.training
        assert not self.norm.training
        return self.norm(self.a(x))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(3, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cells(x.unsqueeze(1))[0].squeeze(1)


def patched() -> nn.Module:
    """A method of its own, as wrappers of modules set it."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout())
    model.forward = MethodType(lambda self, x: self[1](self[0](x)) + 1, model)
    return model


def compiled() -> nn.Module:
    return torch.compile(nn.Sequential(nn.Linear(3, 3), nn.Dropout()), backend="eager")  # pyright: ignore


def in_place_compiled() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout())
    model.compile(backend="eager")
    return model


MODELS = {
    "entangled": Entangled,
    "scripted": scripted,
    "normed": normed,
    "own modes": Frozen,
    "recurrent": Recurrent,
    "patched": patched,
    "compiled": compiled,
    "compiled in place": in_place_compiled,
}


@pytest.mark.parametrize("name", MODELS)
def test_a_copy_computes_the_same_and_leaves_the_model_alone(name: str) -> None:
    torch.manual_seed(0)
    model, x = MODELS[name](), torch.randn(5, 3)
    model.train()
    before = {key: value.clone() for key, value in vars(model).items() if type(value) is Tensor}
    plain = name != "scripted"  # whose modules have no attributes to look at
    if plain:
        with unchanged(model):
            found, copy = private(model, evaluate=True)(x), private(model)
    else:
        found, copy = private(model, evaluate=True)(x), private(model)
    assert [module.training for module in copy.modules()] == [module.training for module in model.modules()]
    assert all(a is b for a, b in zip(copy.parameters(), model.parameters(), strict=True))
    assert not {id(buffer) for buffer in copy.buffers()} & {id(buffer) for buffer in model.buffers()}
    assert all(torch.equal(vars(model)[key], value) for key, value in before.items())
    expected = model.eval()(x)
    assert torch.equal(found, expected)


def test_what_forward_writes_is_seen_by_no_one() -> None:
    model = Entangled().eval()
    names = set(vars(model))
    private(model)(torch.randn(5, 3))
    assert float(model.calls) == 0
    assert model.constant.tolist() == [1, 1, 1]
    assert model.log == model.shared_a == []
    assert set(vars(model)) == names


def test_a_module_outside_the_tree_keeps_its_mode_and_its_buffers() -> None:
    outside = nn.BatchNorm1d(3)
    model = nn.Sequential(nn.Linear(3, 3))
    model.helpers = [outside]
    copy = private(model, evaluate=True)
    copy.helpers[0](torch.randn(5, 3))
    assert copy.helpers[0].training
    assert int(outside.num_batches_tracked) == 0


def test_a_lock_or_another_object_is_shared() -> None:
    model = nn.Linear(3, 2)
    model.held = held = object()
    assert private(model).held is held


def test_inference_buffers_become_ordinary() -> None:
    with torch.inference_mode():
        buffer = torch.ones(3)
    model = nn.Linear(3, 3)
    model.register_buffer("scale", buffer)
    assert not private(model).scale.is_inference()
