"""One table registers a structure: a toy structure, registered here, can do whatever the others can."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing import Laplace, estimate
from lapwing.errors import OptionError
from lapwing.laplace.factory import CLASSES
from lapwing.laplace.persistence import POSTERIORS
from lapwing.laplace.structures import STRUCTURES, HessianStructure, Structure, markdown, register
from lapwing.linalg import Curvature, Diagonal, Precision
from lapwing.serialize import KINDS

DOCS = Path(__file__).parents[2] / "docs"


@dataclass(frozen=True, eq=False)
class Isotropic(Curvature):
    """value * I: the mean of the diagonal, for every parameter."""

    value: Tensor
    count: int

    @property
    def size(self) -> int:
        return self.count

    def __add__(self, other: Curvature) -> Isotropic:
        assert isinstance(other, Isotropic)
        return Isotropic(self.value + other.value, self.count)

    def __mul__(self, scale: float | Tensor) -> Isotropic:
        return Isotropic(self.value * scale, self.count)

    def mv(self, v: Tensor) -> Tensor:
        return self.value * v

    def diagonal(self) -> Tensor:
        return self.value.expand(self.count)

    def dense(self) -> Tensor:
        return torch.diag(self.diagonal())

    def with_prior(self, precision: float | Tensor) -> Precision:
        return Diagonal(self.diagonal()).with_prior(precision)


def isotropic(tangent: Any, likelihood: Any, batches: Any, *, share: float = 1.0, **how: Any) -> Isotropic:
    diagonal = estimate.diagonal(tangent, likelihood, batches, **how).diagonal()
    return Isotropic(share * diagonal.mean(), len(diagonal))


@pytest.fixture
def toy() -> Iterator[Structure]:
    tables: list[dict] = [STRUCTURES, CLASSES, POSTERIORS, KINDS]
    before = [dict(table) for table in tables]
    row = Structure("isotropic", "Isotropic", "one variance", isotropic, (Isotropic,), options=("share",))
    register(row)
    yield row
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def data() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    x = torch.randn(12, 2, dtype=torch.float64)
    return [(x[:7], x[:7, :1].sin()), (x[7:], x[7:, :1].sin())]


def test_a_registered_structure_is_fitted_tuned_and_predicts(toy: Structure) -> None:
    model, pairs = network(), data()
    la = Laplace(model, "regression", "all", "isotropic", share=0.5, sigma_noise=0.3, prior_precision=2.0)  # pyright: ignore[reportCallIssue]
    assert type(la).__name__ == "IsotropicLaplace"
    la.fit(pairs)
    full = Laplace(model, "regression", "all", "full", sigma_noise=0.3, prior_precision=2.0)
    full.fit(pairs)
    assert isinstance(full.H, Tensor)
    expected = 0.5 * full.H.diagonal().mean() / 0.3**2 + 2.0
    x = pairs[0][0]
    rows = full.linearise(x).rows()
    mean, variance = la(x)
    torch.testing.assert_close(mean, model(x).detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(variance, rows @ rows.mT / expected, rtol=1e-9, atol=0)
    la.optimize_prior_precision(method="marglik")
    assert float(la.prior_precision) != 2.0


def test_a_registered_structure_is_saved_checkpointed_and_added_to(toy: Structure, tmp_path: Path) -> None:
    la = Laplace(network(), "regression", "all", "isotropic")
    la.fit(data(), checkpoint=tmp_path / "c", checkpoint_every=1)
    parts = Laplace(network(), "regression", "all", "isotropic")
    for pair in data():
        parts.fit([pair], override=False)
    x = data()[0][0]
    torch.testing.assert_close(la(x), parts(x), rtol=1e-12, atol=0)
    la.save(tmp_path / "a")
    again = lapwing.load(tmp_path / "a", network(3))
    assert isinstance(again.curvature, Isotropic)
    assert torch.equal(again(x)[1], la(x)[1])


def test_a_registered_structure_is_in_what_is_made_from_the_table(toy: Structure) -> None:
    assert "| `isotropic` | one variance | `share` | all |" in markdown()
    with pytest.raises(OptionError, match=r"option of the structure 'isotropic': 'chair'.*Did you mean 'share'"):
        Laplace(network(), "regression", "all", "isotropic", chair=1)  # pyright: ignore[reportCallIssue]
    with pytest.raises(OptionError, match=r"'last_layer' has no structure 'isotropic'; expected one of \['full'"):
        Laplace(network(), "regression", "last_layer", "isotropic")
    with pytest.raises(OptionError, match="already"):
        register(toy)


def test_names_and_classes_come_from_the_table() -> None:
    assert [each.value for each in HessianStructure] == list(STRUCTURES)
    assert {(s, row.name) for row in STRUCTURES.values() for s in row.subsets} == set(CLASSES)
    for (_, structure), kind in CLASSES.items():
        assert kind.structure == structure
        assert kind.__name__.startswith(STRUCTURES[structure].title)
        assert kind.__doc__
        assert POSTERIORS[kind.__name__] is kind


def test_the_table_in_the_docs_is_the_table() -> None:
    assert markdown() in (DOCS / "structures.md").read_text(encoding="utf-8")
