"""What laplace-torch 0.3 gets wrong, done right: predictions, draws, and the user's model (D8 to D14).

Each test is named after what is right and has an oracle of its own. Curvature and evidence are in
`test_what_is_right.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lapwing import Laplace, marglik_training
from lapwing.errors import DataError, LapwingError, LapwingWarning, ModelError, OptionError
from unchanged import unchanged


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def network(outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Dropout(0.3), nn.Linear(5, outputs))


def data(kind: str, points: int = 24) -> DataLoader[Any]:
    y = torch.randn(points, 2) if kind == "regression" else torch.randint(3, (points,))
    return DataLoader(TensorDataset(torch.randn(points, 2), y), batch_size=7)


def fitted(kind: str, subset: str = "all", structure: str = "full", **options: Any) -> Any:
    model = network(2 if kind == "regression" else 3).eval()
    if subset == "subnetwork":
        options["subnetwork_indices"] = torch.tensor([0, 3, 7, 11, 16])
    la = Laplace(model, kind, subset, structure, **options)
    la.fit(data(kind))
    return la


def first(answer: Tensor | tuple[Tensor, ...]) -> Tensor:
    return answer if isinstance(answer, Tensor) else answer[0]


# -- D8 ----------------------------------------------------------------------------------------------------------------

DRAWN = [
    ("classification", {"link_approx": "mc"}),
    ("classification", {"pred_type": "nn", "link_approx": "mc"}),
    ("regression", {"pred_type": "nn", "link_approx": "mc"}),
]


@pytest.mark.parametrize("subset", ["all", "last_layer", "subnetwork"])
@pytest.mark.parametrize(("kind", "options"), DRAWN)
def test_a_generator_decides_what_a_prediction_draws(kind: str, options: dict[str, Any], subset: str) -> None:
    la, x = fitted(kind, subset), torch.randn(4, 2)

    def predict(seed: int) -> Tensor:
        return first(la(x, n_samples=5, generator=torch.Generator().manual_seed(seed), **options))

    before = torch.get_rng_state()
    assert torch.equal(predict(0), predict(0))
    assert not torch.allclose(predict(0), predict(1))
    assert torch.equal(torch.get_rng_state(), before)  # and nothing else is drawn from


# -- D9 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_draws_of_a_linear_function_have_its_correlation_between_inputs(structure: str) -> None:
    """f = w x with a unit prior on two weights and few data: inputs at right angles are nearly uncorrelated."""
    model = nn.Linear(2, 1, bias=False)
    x = torch.tensor([[1.0, 0.3], [0.2, 1.0]])
    loader = DataLoader(TensorDataset(x, torch.zeros(2, 1)))
    at = torch.tensor([[1.0, 0.0], [0.3, 1.0], [-1.0, 0.2]])
    la = Laplace(model, "regression", "all", structure)
    la.fit(loader)
    precision = x.T @ x + torch.eye(2)
    if structure == "diag":
        precision = torch.diag(precision.diagonal())
    covariance = at @ precision.inverse() @ at.T
    scale = covariance.diagonal().sqrt()
    expected = covariance / scale[:, None] / scale
    count = 20_000
    for sampler in (la.functional_samples, la.predictive_samples):
        draws = sampler(at, n_samples=count, generator=torch.Generator().manual_seed(3)).squeeze(-1)
        found = torch.corrcoef(draws.T)
        error = (1 - expected**2) / count**0.5
        assert bool(((found - expected).abs() <= 4 * error + 1e-9).all())
        spread = draws.var(0) / covariance.diagonal()
        assert bool(((spread - 1).abs() < 4 * (2 / count) ** 0.5).all())


# -- D10 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_a_gaussian_process_prediction_is_refused_where_there_is_none(structure: str) -> None:
    la, x = fitted("regression", structure=structure), torch.randn(3, 2)
    for ask in (la, la.functional_samples, la.predictive_samples):
        with pytest.raises(OptionError, match=r"gp.*expected 'glm'.*hessian_structure='gp'"):
            ask(x, pred_type="gp")


# -- D11 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_the_last_layer_can_be_sampled_as_a_network(structure: str) -> None:
    """The outputs are linear in the last layer, so that the network's draws have the linearised moments."""
    la, x, count = fitted("regression", "last_layer", structure), torch.randn(4, 2), 4000
    with unchanged(la.model):
        draws = la.functional_samples(x, pred_type="nn", n_samples=count, generator=torch.Generator().manual_seed(0))
    mean, covariance = la(x)
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    assert draws.shape == (count, 4, 2)
    assert bool(((draws.mean(0) - mean).abs() <= 4 * (variance / count).sqrt()).all())
    assert bool(((draws.var(0) / variance - 1).abs() <= 4 * (2 / count) ** 0.5).all())


# -- D12 ---------------------------------------------------------------------------------------------------------------


@dataclass
class Patience:
    """How often a module may still be called; an object, which private copies of the module share."""

    left: int = 10**9


class Breaks(nn.Module):
    """Passes its input on until it has been asked a number of times."""

    def __init__(self) -> None:
        super().__init__()
        self.patience = Patience()

    def forward(self, x: Tensor) -> Tensor:
        self.patience.left -= 1
        if self.patience.left < 0:
            raise RuntimeError("broken on purpose")
        return x


@pytest.mark.parametrize("subset", ["all", "last_layer", "subnetwork"])
@pytest.mark.parametrize("method", ["__call__", "functional_samples", "predictive_samples"])
def test_a_prediction_that_fails_half_way_leaves_the_model_bit_for_bit(method: str, subset: str) -> None:
    model = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3), Breaks())
    breaks = model[-1]
    assert isinstance(breaks, Breaks)
    options: dict[str, Any] = {"subnetwork_indices": torch.tensor([0, 4, 9])} if subset == "subnetwork" else {}
    la = Laplace(model, "classification", subset, "diag", **options)
    la.fit(data("classification"))
    breaks.patience.left = 3
    ask = {"pred_type": "nn", "n_samples": 50} | ({"link_approx": "mc"} if method == "__call__" else {})
    with unchanged(model), pytest.raises(ModelError, match="broken on purpose"):
        getattr(la, method)(torch.randn(4, 2), **ask)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_a_fit_leaves_modes_and_attributes_of_the_model_as_they_were(
    subset: str, structure: str, training: bool
) -> None:
    model = network(3).train(training)
    model[0].train(not training)  # modes need not agree
    with unchanged(model):
        la = Laplace(model, "classification", subset, structure)
        la.fit(data("classification"))
        la(torch.randn(3, 2))
        la.optimize_prior_precision()
        la(torch.randn(3, 2), pred_type="nn", link_approx="mc", n_samples=3)


# -- D13 ---------------------------------------------------------------------------------------------------------------


class Notes(list[bool]):
    """Shared with private copies of the module that holds it, which have plain lists of their own."""


class Spy(nn.Module):
    """Notes in which mode it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Notes()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.training)
        return x


def test_training_by_the_evidence_trains_in_training_mode_in_every_epoch() -> None:
    spy = Spy()
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Dropout(0.5), spy, nn.Linear(4, 3))
    loader, epochs = data("classification"), 4
    la, trained, _, losses = marglik_training(
        model, loader, hessian_structure="diag", n_epochs=epochs, n_hypersteps=2, backend=None
    )
    assert trained is model
    assert len(losses) == epochs
    assert sum(spy.seen) == epochs * len(loader)  # every step, and no fit
    assert spy.seen.count(False) >= epochs  # each epoch's fit
    assert all(module.training for module in model.modules())
    assert la.n_data == 24


# -- D14 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_the_number_of_data_is_what_was_seen(subset: str, structure: str) -> None:
    dataset = TensorDataset(torch.randn(10, 2), torch.randn(10, 2))
    la = Laplace(network(2), "regression", subset, structure)
    la.fit(DataLoader(dataset, batch_size=4, drop_last=True))
    assert la.n_data == 8
    whole = Laplace(la.model, "regression", subset, structure)
    whole.fit(DataLoader(TensorDataset(*dataset[:8]), batch_size=8))
    assert float(la.log_marginal_likelihood()) == pytest.approx(float(whole.log_marginal_likelihood()), rel=1e-10)


@pytest.mark.parametrize("subset", ["all", "last_layer"])
def test_half_precision_either_works_or_says_why_not(subset: str) -> None:
    """Where it works, it is right to the digits of bfloat16; nothing may end the process."""
    model = network(3).eval()
    loader, x = data("classification"), torch.randn(4, 2)
    exact = Laplace(model, "classification", subset, "kron")
    exact.fit(loader)
    half = deepcopy(model).bfloat16()
    with torch.no_grad():
        reference = exact(x)
    try:
        la = Laplace(half, "classification", subset, "kron")
        la.fit([(batch.bfloat16(), y) for batch, y in loader])
        found = la(x.bfloat16())
    except LapwingError as error:
        assert "bfloat16" in str(error)  # noqa: PT017
    else:
        torch.testing.assert_close(first(found).double(), reference, rtol=0.1, atol=0.05)


def test_a_loss_that_is_not_a_number_never_wins_a_grid_search() -> None:
    la, held = fitted("classification"), data("classification")
    whole = DataLoader(held.dataset, batch_size=24)
    (x, _), *_ = whole

    def sureness(probabilities: Tensor) -> Tensor:
        return probabilities.square().sum(-1).mean()

    def loss(probabilities: Tensor, y: Tensor) -> Tensor:
        """Smallest where the prior is vaguest, but broken for the vaguer half."""
        return torch.where(sureness(probabilities) < threshold, torch.nan, sureness(probabilities))

    grid = torch.logspace(-2, 2, 9)
    sure = []
    for each in grid:
        la.prior_precision = float(each)
        sure.append(float(sureness(la(x))))
    assert sure == sorted(sure)
    threshold = (sure[3] + sure[4]) / 2
    options = {"log_prior_prec_min": -2.0, "log_prior_prec_max": 2.0, "grid_size": 9}
    with pytest.warns(LapwingWarning, match="the score is nan"):
        la.optimize_prior_precision(method="gridsearch", val_loader=whole, loss=loss, **options)
    assert float(la.prior_precision) == pytest.approx(float(grid[4]), rel=1e-6)
    with pytest.raises(DataError), warnings.catch_warnings(action="ignore"):
        la.optimize_prior_precision(
            method="gridsearch", val_loader=whole, loss=lambda *_: torch.tensor(torch.nan), **options
        )


EVERY = [
    *[("all", structure, {}) for structure in ("full", "kron", "diag")],
    ("all", "lowrank", {"rank": 8}),
    *[("last_layer", structure, {}) for structure in ("full", "kron", "diag")],
    *[("subnetwork", structure, {}) for structure in ("full", "diag")],
    ("all", "gp", {"n_subset": 20}),
    ("last_layer", "gp", {"n_subset": 20}),
]


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        assert all(isinstance(key, str) for key in value)
        for item in value.values():
            yield from leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)
    else:
        yield value


@pytest.mark.parametrize(("subset", "structure", "options"), EVERY, ids=[f"{a}-{b}" for a, b, _ in EVERY])
def test_a_state_dict_holds_only_tensors_numbers_and_strings(
    subset: str, structure: str, options: dict[str, Any]
) -> None:
    la: Any = fitted("classification", subset, structure, **options)
    la.prior_precision = 0.7
    x = torch.randn(3, 2)
    state = la.state_dict()
    strange = [type(leaf) for leaf in leaves(state) if not isinstance(leaf, Tensor | int | float | str | None)]
    assert not strange
    file = BytesIO()
    torch.save(state, file)
    file.seek(0)
    if subset == "subnetwork":
        options = {"subnetwork_indices": torch.tensor([0, 3, 7, 11, 16])}
    again = Laplace(la.model, "classification", subset, structure, **options)
    again.load_state_dict(torch.load(file, weights_only=True))
    torch.testing.assert_close(again(x), la(x), rtol=1e-12, atol=1e-14)
    assert float(again.log_marginal_likelihood()) == pytest.approx(float(la.log_marginal_likelihood()), rel=1e-12)
    assert again.n_data == la.n_data
