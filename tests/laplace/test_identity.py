"""A model that is no longer the one that was fitted is noticed, however it was changed; what changes nothing is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters

from lapwing import Laplace, load
from lapwing.errors import ParameterError
from lapwing.laplace import BaseLaplace, identity
from lapwing.laplace.identity import Kept, numbers, structure


class Net(nn.Module):
    """A network with something of every kind that decides what it computes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.norm, self.two = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.middle: nn.Module = nn.Tanh()
        self.register_buffer("shift", torch.linspace(-1, 1, 6), persistent=False)
        self.register_buffer("order", torch.arange(6))
        self.scale, self.name, self.twice, self.powers = 1.0, "tanh", False, (1, 2)
        self.function: Callable[[Tensor], Tensor] = torch.sin
        self.weight = torch.tensor([0.5, 1.0, 2.0])
        self.calls, self.last = 0, None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.middle(self.norm(self.one(x)) + self.shift)[:, self.order]
        self.last = h.detach()
        h = torch.tanh(h) if self.name == "tanh" else h
        return self.weight * self.function(self.scale * self.two(h)) * (2 if self.twice else 1)


def data(rows: int = 30) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(rows, 4, generator=g), torch.randint(3, (rows,), generator=g))]


@cache
def _fitted() -> BaseLaplace:
    la = Laplace(Net(), "classification", "all", "diag")
    la.fit(data())
    return la


def fitted() -> BaseLaplace:
    la = copy.deepcopy(_fitted())
    la(data()[0][0])
    return la


def scrambled(p: Tensor) -> None:
    p.data.copy_(p.data.flatten().flip(0).view_as(p))


def through_numpy(p: Tensor) -> None:
    p.detach().numpy()[...] *= 1.5


def swapped(p: Tensor) -> None:
    p.data = p.data * 1.5


CHANGES: dict[str, Callable[[Net], object]] = {
    "vector_to_parameters": lambda m: vector_to_parameters(1.1 * parameters_to_vector(m.parameters()), m.parameters()),
    "data.mul_": lambda m: m.one.weight.data.mul_(1.1),
    "data = ": lambda m: swapped(m.two.weight),
    "foreach on data": lambda m: torch._foreach_mul_([p.data for p in m.parameters()], 1.1),
    "a numpy view": lambda m: through_numpy(m.one.bias),
    "a permutation": lambda m: scrambled(m.one.weight),
    "signs": lambda m: m.two.weight.data.neg_(),
    "two entries": lambda m: m.two.bias.data.copy_(m.two.bias.data[[1, 0, 2]]),
    "a new parameter": lambda m: setattr(m.one, "bias", nn.Parameter(m.one.bias.detach() + 1)),
    "load_state_dict": lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}),
    "a running mean": lambda m: m.norm.running_mean.data.add_(0.1),
    "a buffer that is not saved": lambda m: m.shift.data.mul_(2),
    "a buffer of whole numbers": lambda m: m.order.data.copy_(torch.arange(5, -1, -1)),
    "a tensor that is no buffer": lambda m: m.weight.data.mul_(2),
    "another activation": lambda m: setattr(m, "middle", nn.ReLU()),
    "a setting of an activation": lambda m: setattr(m, "middle", nn.Softplus(beta=2.0)),
    "eps": lambda m: setattr(m.norm, "eps", 0.1),
    "a number": lambda m: setattr(m, "scale", 1.01),
    "a string": lambda m: setattr(m, "name", "none"),
    "a truth value": lambda m: setattr(m, "twice", True),
    "a tuple": lambda m: setattr(m, "powers", (1, 3)),
    "a function": lambda m: setattr(m, "function", torch.cos),
    "a lambda": lambda m: setattr(m, "function", lambda x: x),
    "a partial": lambda m: setattr(m, "function", partial(torch.clamp, min=0.0)),
    "a forward of its own": lambda m: setattr(m, "forward", lambda x: Net.forward(m, x) * 2),
    "a new attribute": lambda m: setattr(m, "more", 3),
    "NaN": lambda m: m.two.bias.data.fill_(torch.nan),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_a_changed_model_is_refused_at_prediction_and_by_save(tmp_path: Path, change: str) -> None:
    la = fitted()
    CHANGES[change](la.model)
    for use in (la, partial(la, pred_type="nn", n_samples=2), la.functional_samples):
        with pytest.raises(ParameterError, match="not those that this posterior was fitted at"):
            use(data()[0][0])
    with pytest.raises(ParameterError, match="not those that this posterior was fitted at"):
        la.save(tmp_path / "a")
    assert not list(tmp_path.iterdir())


HARMLESS: dict[str, Callable[[Net], object]] = {
    "train mode": lambda m: m.train(),
    "eval mode": lambda m: m.eval(),
    "a call": lambda m: m.eval()(data()[0][0]),
    "a gradient": lambda m: m.eval()(data()[0][0]).sum().backward(),
    "a hook that looks": lambda m: m.register_forward_hook(lambda *_: None),
    "the same numbers again": lambda m: m.load_state_dict(copy.deepcopy(m.state_dict())),
    "the same activation again": lambda m: setattr(m, "middle", nn.Tanh()),
    "the same number again": lambda m: setattr(m, "scale", float("1.0")),
    "a write that changes nothing": lambda m: m.one.weight.data.mul_(1.0),
    "memory of another kind": lambda m: setattr(m.one.weight, "data", m.one.weight.data.t().clone().t()),
}


@pytest.mark.parametrize("change", list(HARMLESS))
def test_what_changes_nothing_is_allowed(tmp_path: Path, change: str) -> None:
    la = fitted()
    before = la(data()[0][0])
    HARMLESS[change](la.model)
    assert torch.equal(la(data()[0][0]), before)
    la.save(tmp_path / "a")
    assert torch.equal(la(data()[0][0]), before)


def test_layers_may_be_frozen_that_are_not_random() -> None:
    la = Laplace(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), "classification")
    la.fit(data())
    before = la(data()[0][0])
    la.model[0].requires_grad_(requires_grad=False)
    assert torch.equal(la(data()[0][0]), before)


class Holds(nn.Module):
    """A model with something more: as an attribute, or as a buffer that is not saved."""

    def __init__(self, held: object, buffer: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        if buffer:
            self.register_buffer("held", held, persistent=False)  # pyright: ignore[reportArgumentType]
        else:
            self.held = held

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def sparse() -> Tensor:
    return torch.tensor([[0.0, 2.0], [3.0, 0.0]])


KINDS: dict[str, tuple[Callable[[], object], Callable[..., object] | None]] = {
    "sparse": (lambda: sparse().to_sparse(), lambda held: held._values().mul_(2)),
    "by rows": (lambda: sparse().to_sparse_csr(), lambda held: held.values().mul_(2)),
    "by columns": (lambda: sparse().to_sparse_csc(), lambda held: held.values().mul_(2)),
    "complex": (lambda: torch.tensor([1 + 2j, 3j]), lambda held: held.mul_(2)),
    "conjugate": (lambda: torch.tensor([1 + 2j, 3j]).conj(), lambda held: held.mul_(2)),
    "swapped": (lambda: torch.tensor([1 + 2j, 3j]), lambda held: setattr(held, "data", 2 * held.data)),
    "eight bits": (lambda: torch.ones(3).to(torch.float8_e4m3fn), lambda held: held.fill_(2)),
    "expanded": (lambda: torch.ones(1).expand(3), None),
    "without values": (lambda: torch.empty(3, device="meta"), None),
    "an array": (lambda: np.arange(3.0), lambda held: np.multiply(held, 2, out=held)),
    "an array backwards": (lambda: np.arange(3.0)[::-1], lambda held: np.multiply(held, 2, out=held)),
    "an array of other bytes": (lambda: np.arange(3, dtype=">f8"), lambda held: held.__setitem__(0, 5)),
    "a long array": (lambda: np.arange(3, dtype=np.longdouble), lambda held: held.__setitem__(0, 5)),
    "an array to read": (lambda: np.broadcast_to(np.arange(3.0), (2, 3)), None),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("buffer", [False, True])
def test_tensors_and_arrays_of_every_kind(tmp_path: Path, kind: str, buffer: bool) -> None:
    make, change = KINDS[kind]
    if buffer and not isinstance(make(), Tensor):
        pytest.skip("no tensor")
    la = Laplace(Holds(make(), buffer), "classification", "all", "diag")
    la.fit(data())
    x = data()[0][0]
    before = la(x)
    la.save(tmp_path / "a")
    assert torch.equal(load(tmp_path / "a", Holds(make(), buffer))(x), before)
    if change is None:
        return
    change(la.model.held)
    with pytest.raises(ParameterError, match=r"'held.* has other numbers"):
        la(x)


COMPUTED: dict[str, Callable[[nn.Module], object]] = {
    "weight_norm": nn.utils.weight_norm,
    "spectral_norm": lambda layer: nn.utils.spectral_norm(layer).eval(),
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("how", list(COMPUTED))
def test_a_weight_that_is_computed_before_every_pass_is_no_part_of_it(tmp_path: Path, how: str) -> None:
    def build() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        COMPUTED[how](model[0])
        return model

    x = data()[0][0]
    la = Laplace(build(), "classification", "all", "diag")
    la.fit(data())
    before = la(x)
    la.save(tmp_path / "a")
    for each in (la, load(tmp_path / "a", build())):
        torch.testing.assert_close(each(x), before)
        with torch.no_grad():
            each.model(x)
        torch.testing.assert_close(each(x), before)
    next(la.model[0].parameters()).data.mul_(1.5)
    with pytest.raises(ParameterError, match="has other numbers"):
        la(x)


class Lazy(nn.Module):
    """Makes its table when it needs one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.arange(4.0), persistent=False)
        setattr(self, "last", x)  # noqa: B010
        return self.layer(x + self.table)


def test_what_a_forward_pass_makes_for_itself_is_no_change() -> None:
    x = data()[0][0]
    la = Laplace(Lazy(), "classification", "all", "diag")
    la.fit(data())
    before = la(x)
    la.model(x)
    assert torch.equal(la(x), before)
    la.model(2 * x)
    assert torch.equal(la(x), before)
    la.model.layer.weight.data.mul_(2)
    with pytest.raises(ParameterError, match=r"'layer.weight' has other numbers"):
        la(x)


@pytest.mark.parametrize("change", ["a running mean", "another activation", "data.mul_"])
def test_data_are_not_added_to_those_of_another_model(change: str) -> None:
    la = fitted()
    before = la.H.clone()
    CHANGES[change](la.model)
    with pytest.raises(ParameterError, match="not those that this posterior was fitted at"):
        la.fit(data(), override=False)
    assert torch.equal(la.H, before)


def test_a_copy_has_an_identity_of_its_own() -> None:
    la = fitted()
    other = copy.deepcopy(la)
    with torch.no_grad():
        other.model.one.weight.add_(1)
    la(data()[0][0])
    with pytest.raises(ParameterError, match=r"'one.weight' has other numbers"):
        other(data()[0][0])


def test_numbers_that_are_none_are_the_same_ones() -> None:
    model = nn.Linear(2, 1)
    model.weight.data[0, 0] = torch.nan
    kept = Kept.of(model)
    assert not kept.difference(model)
    assert not kept.difference(model, whole=True)


def test_modules_that_are_shared_are_told_from_copies() -> None:
    layer = nn.Linear(2, 2)
    shared, apart = nn.Sequential(layer, layer), nn.Sequential(layer, copy.deepcopy(layer))
    assert structure(shared) != structure(apart)
    assert list(numbers(shared)) == ["0.weight", "0.bias"]


class TestLarge:
    """More numbers than a window holds."""

    @pytest.fixture(autouse=True)
    def _small_windows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(identity, "WINDOW", 64)

    def model(self) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 20), nn.Linear(20, 5))

    def test_windows_hold_every_number_once(self) -> None:
        kept = Kept.of(self.model())
        parts = [part for window in kept.windows for part in window]
        assert sum(own.numel() if part is None else part.stop - part.start for own, _, part in parts) == 589
        sizes = [sum(o.numel() if p is None else p.stop - p.start for o, _, p in window) for window in kept.windows]
        assert max(sizes) <= 64
        assert len(sizes) <= 14

    def test_a_write_that_leaves_no_trace_is_seen_within_one_round(self) -> None:
        for name, tensor in numbers(self.model()).items():
            for place in (0, tensor.numel() - 1):
                model = self.model()
                kept = Kept.of(model)
                numbers(model)[name].data.view(-1)[place] += 1
                found = [kept.difference(model) for _ in kept.windows]
                assert any(found), (name, place)
                assert kept.difference(model, whole=True) == f"{name!r} has other numbers"

    def test_a_write_of_every_number_that_leaves_no_trace_is_seen_at_once(self) -> None:
        model = nn.Linear(16, 16, bias=False)
        kept = Kept.of(model)
        assert len(kept.windows) > 1
        assert not any(kept.difference(model) for _ in kept.windows)
        model.weight.data += 1
        assert kept.difference(model) == "'weight' has other numbers"

    def test_a_write_that_torch_counts_is_seen_at_once(self) -> None:
        for change in (lambda p: p.add_(1), swapped, lambda p: vector_to_parameters(torch.ones(p.numel()), [p])):
            for name in numbers(self.model()):
                model = self.model()
                kept = Kept.of(model)
                with torch.no_grad():
                    change(numbers(model)[name])
                assert kept.difference(model) == f"{name!r} has other numbers", name


class Doubled(Net):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Late(nn.Module):
    """A module whose class gets another forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x)


def test_another_class_and_another_forward_of_the_class_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    la = fitted()
    la.model.__class__ = Doubled
    with pytest.raises(ParameterError, match="not those that this posterior was fitted at"):
        la(data()[0][0])
    la = Laplace(Late(), "classification", "all", "diag")
    la.fit(data())
    la(data()[0][0])
    kept = Kept.of(la.model)
    assert not kept.difference(la.model)
    assert all(fact.stands(kept.skipped) for fact in kept.facts)
    monkeypatch.setattr(Late, "forward", lambda self, x: 2 * self.inside(x))
    assert [fact.stands(kept.skipped) for fact in kept.facts] == [False, True]
    assert kept.difference(la.model, whole=True) == kept.difference(la.model)


def test_a_copy_of_the_model_that_holds_the_same_is_the_same() -> None:
    model = Net()
    kept, other = Kept.of(model), copy.deepcopy(model)
    assert not kept.difference(other)
    with torch.no_grad():
        other.two.bias += 1
    assert "two.bias" in Kept.of(model).difference(other)


@pytest.mark.parametrize("dtype", [np.longdouble, np.clongdouble, np.float64, np.complex128, np.float32, ">f8", ">i4"])
def test_arrays_become_tensors_of_the_same_numbers(dtype: object) -> None:
    """Of more digits than torch knows, the nearest that it does; in the same memory wherever that can be."""
    value = np.arange(6).reshape(2, 3).astype(dtype)  # pyright: ignore[reportArgumentType, reportCallIssue]
    found = identity._array(value)
    digits = {np.longdouble: torch.float64, np.clongdouble: torch.complex128, np.complex128: torch.complex128}
    assert found.dtype == digits.get(dtype, found.dtype)  # pyright: ignore[reportArgumentType, reportCallIssue]
    assert found.dtype.itemsize == min(value.dtype.itemsize, 16 if value.dtype.kind == "c" else 8)
    np.testing.assert_array_equal(found.numpy(), value)
    alike = value.dtype.isnative and value.dtype.itemsize <= (16 if value.dtype.kind == "c" else 8)
    value[0, 0] = 7
    assert (found.numpy()[0, 0] == 7) == alike


def test_parts_of_other_types_and_shapes_do_not_stand() -> None:
    own = torch.arange(6.0)
    part = slice(2, 4)
    assert identity._stands([(own, own.clone(), None), (own, own.clone(), part)])
    for other in (own.double(), own[:5].clone(), own.view(2, 3).clone(), own + torch.eye(6)[3]):
        assert not identity._stands([(own, other, part)])
    assert identity._stands([(own, own + torch.eye(6)[4], part)])  # which is not looked at
    assert not identity._stands([(own, own + torch.eye(6)[4], None)])
    spread = torch.arange(12.0)[::2]
    assert not identity._stands([(spread, spread.clone(), part)])
    assert not identity._stands([(own, torch.empty(6, device="meta"), None)])
