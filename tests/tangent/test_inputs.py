"""Inputs of every kind reach the arguments of `forward` as a user would pass them: to linearise, to fit, to draw."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import oracle
from lapwing import Laplace
from lapwing.errors import DataError
from lapwing.tangent import Tangent
from lapwing.tangent.inputs import Called, check_input, map_tensors, take


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 3), nn.Linear(3, 2)

    def of(self, a: Tensor, b: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(a)) * b)


class AnyByName(Base):
    """A forward that hands on whatever it is given, as wrappers do."""

    def forward(self, **kwargs: Tensor) -> Tensor:
        return self.of(kwargs["a"], kwargs["b"])


class OneAndAnyByName(Base):
    def forward(self, a: Tensor, **kwargs: Tensor) -> Tensor:
        return self.of(a, kwargs["b"])


class OnlyByName(Base):
    def forward(self, *, b: Tensor, a: Tensor) -> Tensor:
        return self.of(a, b)


class AnyByPlace(Base):
    def forward(self, *args: Tensor) -> Tensor:
        return self.of(*args)


class TwoByPlace(Base):
    def forward(self, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
        assert c is None
        return self.of(a, b)


class OnlyPlace(Base):
    def forward(self, a: Tensor, b: Tensor, /) -> Tensor:
        return self.of(a, b)


class Whole(Base):
    """Takes the pair, or the mapping, as one argument."""

    def forward(self, batch: Any) -> Tensor:
        return self.of(*batch) if isinstance(batch, (tuple, list)) else self.of(batch["a"], batch["b"])


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


def tensors() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(4, n, generator=generator, dtype=torch.float64) for n in (2, 3))


def mapping() -> dict[str, Tensor]:
    return dict(zip("ab", tensors(), strict=True))


CASES: list[tuple[type[Base], Callable[[], Any]]] = [
    (AnyByName, mapping),
    (OneAndAnyByName, mapping),
    (OnlyByName, mapping),
    (TwoByPlace, mapping),
    (Whole, mapping),
    (AnyByName, lambda: UserDict(mapping())),
    (Whole, lambda: UserDict(mapping())),
    (AnyByPlace, tensors),
    (TwoByPlace, tensors),
    (OnlyPlace, tensors),
    (Whole, tensors),
    (TwoByPlace, lambda: list(tensors())),
    (TwoByPlace, lambda: Pair(*tensors())),
]


@pytest.mark.parametrize(("kind", "given"), CASES, ids=[kind.__name__ for kind, _ in CASES])
def test_inputs_are_spread_over_the_arguments_of_forward(kind: type[Base], given: Callable[[], Any]) -> None:
    """Values, Jacobians and the predictions of drawn networks are those of the plain call of two tensors."""
    torch.manual_seed(0)
    model, plain = kind().double(), TwoByPlace().double()
    plain.load_state_dict(model.state_dict())
    found = Tangent(model).at(given())
    torch.testing.assert_close(found.value, plain(*tensors()).detach())
    torch.testing.assert_close(found.rows(), oracle.jacobian(plain, tensors()), rtol=1e-9, atol=1e-12)
    predictions = []
    for network, x in ((model, given()), (plain, tensors())):
        la = Laplace(network, "classification", "all", "diag")
        la.fit([(x, torch.tensor([0, 1, 1, 0]))])
        drawn = la.functional_samples(x, "nn", 3, generator=torch.Generator().manual_seed(0))
        predictions.append((la(x), drawn))
    torch.testing.assert_close(*predictions)


def test_a_tuple_of_one_is_that_one() -> None:
    model = nn.Linear(2, 1).double()
    x = tensors()[0]
    for given in ((x,), [x]):
        torch.testing.assert_close(Tangent(model).at(given).value, model(x).detach())


def test_parts_of_nested_inputs() -> None:
    """Tensors with the batch size along axis 0 are cut, others stay; containers keep their kinds."""
    a, b = tensors()
    nested = {"pair": Pair(a, b), "list": [a, {"b": b}], "mask": torch.ones(2, 3), "number": torch.tensor(2.0), "k": 3}
    part = take(nested, slice(1, 3))
    assert isinstance(part["pair"], Pair)
    assert torch.equal(part["pair"].b, b[1:3])
    assert torch.equal(part["list"][1]["b"], b[1:3])
    assert torch.equal(part["mask"], torch.ones(2, 3))
    assert (part["number"].item(), part["k"]) == (2.0, 3)
    doubled = map_tensors(lambda t: 2 * t, nested)
    assert torch.equal(doubled["list"][0], 2 * a)


@pytest.mark.parametrize(("dtype", "value"), [(torch.float16, 6e4), (torch.float32, 3e38)])
def test_large_numbers_whose_sum_overflows_are_finite(dtype: torch.dtype, value: float) -> None:
    x = torch.full((4, 2), value, dtype=dtype)
    assert not bool(x.sum().isfinite())
    assert check_input(x, x.device) == 4
    x[2, 1] = float("nan")
    with pytest.raises(DataError, match=r"NaN or infinite values, data point 2 "):
        check_input(x, x.device)


def test_a_model_that_is_called_keeps_its_own_mode() -> None:
    for training in (True, False):
        model = nn.Linear(2, 1).train(training)
        called = Called(model)
        assert called.train() is called
        assert called.eval() is called
        assert model.training is training
