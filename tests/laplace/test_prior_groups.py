"""Priors with one precision per scale-invariant group: claim C21, every structure, files, and what is refused."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing
from lapwing import Laplace, PriorGroups, scale_invariant_groups
from lapwing.errors import DataError, OptionError, ParameterError
from lapwing.laplace.names import PriorStructure
from unchanged import unchanged

EPS = 1e-13
STRUCTURES = ["full", "diag", "kron", "ekfac", "blocks", "gp"]
GROUPS = (("2.weight", "2.bias"), ("0.weight", "0.bias"))


@pytest.fixture(autouse=True)
def _float64() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)


def network(batch: bool = False) -> nn.Sequential:
    """Two layers before norms, of batches or of layers, and a head."""
    norms = [nn.BatchNorm1d(4, EPS), nn.BatchNorm1d(3, EPS)] if batch else [nn.LayerNorm(4, EPS), nn.LayerNorm(3, EPS)]
    return nn.Sequential(nn.Linear(2, 4), norms[0], nn.Linear(4, 3), norms[1], nn.Tanh(), nn.Linear(3, 1))


def data(n: int = 24) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 2)
    return x, torch.sin(2 * x[:, :1]) + 0.1 * torch.randn(n, 1)


def trained(batch: bool = False) -> tuple[nn.Sequential, Tensor, Tensor]:
    (x, y), model = data(), network(batch)
    optimiser = torch.optim.Adam(model.parameters(), 0.03)
    for _ in range(60):
        optimiser.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimiser.step()
    return model.eval(), x, y


def scaled(model: nn.Sequential, k: float, batch: bool) -> nn.Sequential:
    """The same function, with the first layer k times as large and the second 1 / k^2 times."""
    copy = deepcopy(model)
    with torch.no_grad():
        for layer, norm, factor in ((copy[0], copy[1], k), (copy[2], copy[3], k**-2)):
            for parameter in layer.parameters():
                parameter *= factor
            if batch:
                assert isinstance(norm, nn.BatchNorm1d)
                assert norm.running_mean is not None
                assert norm.running_var is not None
                norm.running_mean *= factor
                norm.running_var *= factor**2
    return copy


def tuned(model: nn.Module, x: Tensor, y: Tensor, structure: str, prior_structure: str, method: str) -> Any:
    la = Laplace(model, "regression", "all", structure, sigma_noise=0.2)
    la.fit([(x, y)])
    la.optimize_prior_precision(method=method, prior_structure=prior_structure)
    return la


@pytest.mark.parametrize(
    ("structure", "method", "batch"),
    [
        ("full", "mackay", True), ("kron", "marglik", False), ("ekfac", "mackay", True), ("diag", "marglik", False),
    ],
)  # fmt: skip
def test_c21_predictive_variance_does_not_depend_on_the_scale_of_normalised_weights(
    structure: str, method: str, batch: bool
) -> None:
    """Tutorial, proposition 3: with a precision per group it is the same for any k; with a single one it is not."""
    model, x, y = trained(batch)
    new = torch.randn(7, 2) * 2
    with torch.no_grad():
        expected = model(new)
    variances: dict[str, list[Tensor]] = {"scale_invariant": [], "scalar": []}
    precisions = []
    for k in (0.1, 1.0, 10.0):
        copy = scaled(model, k, batch)
        with torch.no_grad():
            torch.testing.assert_close(copy(new), expected, rtol=1e-7, atol=1e-8)
        for prior_structure, found in variances.items():
            la = tuned(copy, x, y, structure, prior_structure, method)
            found.append(la(new)[1].flatten())
            if prior_structure == "scale_invariant":
                assert la.prior_groups.members[:2] == GROUPS
                # k^2 lambda_first and k^-4 lambda_second, lambda of the rest
                precisions.append(la.prior_precision * torch.tensor([k**-4, k**2, 1.0]))
    for other in (0, 2):
        torch.testing.assert_close(
            variances["scale_invariant"][other], variances["scale_invariant"][1], rtol=1e-5, atol=0
        )
        torch.testing.assert_close(precisions[other], precisions[1], rtol=1e-4, atol=0)
        change = (variances["scalar"][other] / variances["scalar"][1] - 1).abs().max()
        assert float(change) > 0.05


def test_precisions_are_a_fixed_point_of_the_evidence_by_hand() -> None:
    """gamma_g = lambda_g |theta_g|^2, with gamma from a dense inverse."""
    model, x, y = trained()
    la = tuned(model, x, y, "full", "scale_invariant", "marglik")
    names = [name for name, _ in model.named_parameters()]
    rest = tuple(name for name in names if name not in GROUPS[0] + GROUPS[1])
    number = {name: i for i, group in enumerate((*GROUPS, rest)) for name in group}
    groups = torch.cat([torch.full((p.numel(),), number[name]) for name, p in model.named_parameters()])
    theta = torch.cat([p.detach().flatten() for p in model.parameters()])
    prior = la.prior_precision[groups]
    rows = torch.autograd.functional.jacobian(
        lambda *p: torch.func.functional_call(model, dict(zip(names, p, strict=True)), (x,)).squeeze(1),
        tuple(model.parameters()),
    )
    jacobian = torch.cat([row.reshape(len(x), -1) for row in rows], 1)
    covariance = torch.linalg.inv(jacobian.T @ jacobian / 0.2**2 + torch.diag(prior))
    for g in range(3):
        mine = groups == g
        gamma = mine.sum() - la.prior_precision[g] * covariance.diagonal()[mine].sum()
        torch.testing.assert_close(gamma, la.prior_precision[g] * theta[mine].square().sum(), rtol=1e-4, atol=1e-4)
    new = torch.randn(3, 2)
    torch.testing.assert_close(la.prior_precision_diag, prior)
    torch.testing.assert_close(la.posterior_covariance, covariance, rtol=1e-7, atol=1e-9)
    assert la(new)[1].shape == (3, 1, 1)


# -- every structure ---------------------------------------------------------------------------------------------------


def by_hand(space: Any, members: tuple[tuple[str, ...], ...], precisions: list[float]) -> Tensor:
    each = {name: value for group, value in zip(members, precisions, strict=True) for name in group}
    whole = torch.cat(
        [torch.full((shape.numel(),), each[name]) for name, shape in zip(space.names, space.shapes, strict=True)]
    )
    return whole if space.index is None else whole[space.index]


@pytest.mark.parametrize("structure", [*STRUCTURES, "lowrank", "propagated_diag"])
def test_whole_tensors_have_their_precision_in_every_structure(structure: str) -> None:
    """H + prior, the one entry by entry of the other, in the posterior precision and in the evidence."""
    model, x, y = trained()
    found = scale_invariant_groups(model, x)
    numbers = [3.0, 0.5, 2.0, 7.0, 4.0, 0.1, 0.9, 0.9]  # the last two alike: others part weight and bias of a block
    groups = found.partition("tensor")
    la = Laplace(model, "regression", "all", structure, prior_groups=groups, prior_precision=torch.tensor(numbers))
    la.fit([(x, y)])
    expected = by_hand(la.space, groups.members, numbers)
    torch.testing.assert_close(la.prior_precision_diag, expected)
    ones = torch.ones(len(expected))
    torch.testing.assert_close(la.precision.mv(ones) - la.curvature.mv(ones), expected)
    if structure in ("full", "diag", "blocks", "gp"):  # which carry any diagonal
        prior = lapwing.Prior.diagonal(la.space, expected)
        torch.testing.assert_close(la.log_marginal_likelihood(), la.evidence.log_marginal(prior))
    assert len(la.effective_parameters()) == 8
    la.optimize_prior_precision(prior_structure="scale_invariant", n_steps=3, method="adam")
    assert len(la.prior_precision) == 8
    assert la.prior.structure == "scale_invariant"


def test_a_part_of_the_parameters() -> None:
    """A last layer and a sub-network have a precision for every group that they touch."""
    model, x, y = trained()
    found = scale_invariant_groups(model, x)
    last = Laplace(model, "regression", "last_layer", "full", prior_groups=found.partition("tensor"))
    last.fit([(x, y)])
    last.prior_precision = torch.tensor([2.0, 3.0])  # weight and bias of the head
    torch.testing.assert_close(last.prior_precision_diag, torch.tensor([2.0] * 3 + [3.0]))
    chosen = torch.tensor([0, 5, 13, 30, 34, 44])  # of 0.weight, 0.weight, 1.weight, 2.bias, 3.weight, 5.bias
    part = Laplace(model, "regression", "subnetwork", "full", subnetwork_indices=chosen)
    part.fit([(x, y)])
    part.prior_groups = found
    part.prior_precision = torch.tensor([1.0, 2.0, 3.0])
    names = [n for n, p in model.named_parameters() for _ in range(p.numel())]
    of = {
        name: value for group, value in zip(found.partition().members, (1.0, 2.0, 3.0), strict=True) for name in group
    }
    torch.testing.assert_close(part.prior_precision_diag, torch.tensor([of[names[int(i)]] for i in chosen]))
    few = Laplace(model, "regression", "subnetwork", "diag", subnetwork_indices=torch.tensor([0, 44]))
    few.fit([(x, y)])
    few.optimize_prior_precision(prior_structure="scale_invariant")
    assert len(few.prior_precision) == 2  # nothing of 2.weight and 2.bias is in it


# -- how it is asked for -----------------------------------------------------------------------------------------------


def test_groups_come_from_the_fit_or_from_the_user() -> None:
    model, x, y = trained()
    la = Laplace(model, "regression", "all", "kron")
    with pytest.raises(OptionError, match=r"lapwing\.scale_invariant_groups\(model, x\)"):
        la.optimize_prior_precision(prior_structure="scale_invariant")
    assert "groups" not in repr(la)
    with unchanged(model):
        la.fit(iter([(x, y)]))
        la.optimize_prior_precision(prior_structure=PriorStructure.SCALE_INVARIANT)
    assert la.prior_groups == scale_invariant_groups(model, x).partition()
    assert len(la.prior_precision) == 3
    assert "in 3 groups (scale_invariant)" in repr(la)
    own = [[name for name, _ in model.named_parameters() if name.startswith("5")], ["0.weight", "0.bias"]]
    own.append([name for name, _ in model.named_parameters() if name not in own[0] + own[1]])
    la.prior_precision = 1.0
    la.prior_groups = own
    assert la.prior.structure == "isotropic"
    la.prior_precision = torch.tensor([1.0, 2.0, 3.0])
    assert la.prior.structure == "grouped"
    members = tuple(map(tuple, own))
    torch.testing.assert_close(la.prior_precision_diag, by_hand(la.space, members, [1.0, 2.0, 3.0]))
    la.optimize_prior_precision(prior_structure="layerwise", method="adam", n_steps=2)
    assert la.prior_groups is None
    assert len(la.prior_precision) == la.n_layers


def test_a_single_precision_leaves_the_groups_for_later() -> None:
    model, x, y = trained()
    la = Laplace(model, "regression", "all", "diag", prior_groups=scale_invariant_groups(model, x))
    la.fit([(x, y)])
    la.optimize_prior_precision(method="adam", n_steps=2)
    assert len(la.prior_precision) == 1
    assert la.prior_groups is not None
    before = la(x)[1]
    la.prior_precision = la.prior_precision.expand(3) * torch.tensor([1.0, 1.0, 5.0])
    numbers = la.prior_precision
    assert bool((la(x)[1] < before).any())
    narrow = la(x)[1]
    # other groups with as many precisions: the posterior is another one
    la.prior_groups = [list(group) for group in la.prior_groups.members[::-1]]
    torch.testing.assert_close(la.prior_precision, numbers)
    assert not torch.allclose(la(x)[1], narrow)


def test_equal_counts_are_told_apart_by_names() -> None:
    """Three groups of a network with three modules: the numbers go to the groups, also after a file."""
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3, EPS), nn.Linear(3, 1))
    (x, y) = data(10)
    modules = Laplace(model, "regression", "all", "diag", prior_precision=torch.tensor([1.0, 2.0, 3.0]))
    named = Laplace(
        model, "regression", "all", "diag", prior_precision=torch.tensor([1.0, 2.0, 3.0]),
        prior_groups=[["2.weight"], ["0.weight", "0.bias"], ["1.weight", "1.bias", "2.bias"]],
    )  # fmt: skip
    assert modules.prior_precision_diag.tolist() == [1.0] * 9 + [2.0] * 6 + [3.0] * 4
    assert named.prior_precision_diag.tolist() == [2.0] * 9 + [3.0] * 6 + [1.0] * 3 + [3.0]
    named.fit([(x, y)])
    modules.load_state_dict(named.state_dict())
    assert modules.prior_precision_diag.tolist() == named.prior_precision_diag.tolist()
    assert modules.prior_groups == named.prior_groups


def test_marglik_training_by_groups() -> None:
    (x, y), model = data(), network()
    la, *_ = lapwing.marglik_training(
        model, [(x, y)], "regression", "diag", n_epochs=2, n_hypersteps=2, prior_structure="scale_invariant"
    )
    assert la.prior_groups is not None
    assert la.prior_groups.members[:2] == GROUPS
    assert len(la.prior_precision) == 3
    with pytest.raises(OptionError, match="no scale-invariant group"):
        lapwing.marglik_training(nn.Linear(2, 1), [(x, y)], "regression", prior_structure="scale_invariant")


# -- files -------------------------------------------------------------------------------------------------------------


def test_files_carry_the_groups(tmp_path: Path) -> None:
    model, x, y = trained(batch=True)
    la = Laplace(model, "regression", "all", "kron")
    la.fit([(x, y)])
    plain = la.state_dict()
    assert plain["version"] == 1
    assert "prior_groups" not in plain
    la.optimize_prior_precision(prior_structure="scale_invariant")
    assert la.state_dict()["version"] == 2  # earlier versions would take three numbers for those of modules
    la.save(tmp_path / "posterior")
    back = lapwing.load(tmp_path / "posterior", network(batch=True).eval())
    assert back.prior_groups == la.prior_groups
    assert back.prior.structure == "scale_invariant"
    torch.testing.assert_close(back.prior_precision_diag, la.prior_precision_diag, rtol=0, atol=0)
    torch.testing.assert_close(back(x)[1], la(x)[1])
    back.optimize_prior_precision(prior_structure="scale_invariant", method="adam", n_steps=1)
    back.load_state_dict(plain)
    assert back.prior_groups is None
    with pytest.raises(OptionError, match="seen no inputs"):
        back.optimize_prior_precision(prior_structure="scale_invariant")
    broken = {**la.state_dict(), "prior_groups": "[1, 2"}
    with pytest.raises(DataError, match="prior_groups that cannot be read"):
        back.load_state_dict(broken)
    assert back.prior_groups is None


# -- errors ------------------------------------------------------------------------------------------------------------


def test_what_is_refused() -> None:
    model, x, y = trained()
    names = [name for name, _ in model.named_parameters()]
    la = Laplace(model, "regression", "all", "full")
    la.fit([(x, y)])
    for groups, words in (
        ([["0.weight"], ["0.weight"]], "'0.weight' is in several groups"),
        ([["0.weight", "nothing"]], "'nothing', which is no trainable parameter"),
        ([["0.weight"]], "'0.bias' is in no group"),
        ([names, []], "expected names of parameters in each"),
        ([], "expected names of parameters"),
        ("0.weight", "prior_groups is '0.weight'"),
    ):
        with pytest.raises(ParameterError, match=words):
            la.prior_groups = groups
        assert la.prior_groups is None
    la.prior_groups = [names[:3], names[3:]]
    with pytest.raises(ParameterError, match=r"10 entries; expected 1, or 2 \(one per group of prior_groups\)"):
        la.prior_precision = torch.ones(10)
    la.prior_precision = torch.tensor([1.0, 2.0])
    with pytest.raises(ParameterError, match="has 2 entries"):
        la.prior_groups = None
    with pytest.raises(ParameterError, match="has 2 entries; expected 1, or 3"):
        la.prior_groups = scale_invariant_groups(model, x)
    with pytest.raises(ParameterError, match="init_prior_prec has 5 entries; expected 1 or 2"):
        la.optimize_prior_precision(prior_structure="scale_invariant", init_prior_prec=torch.ones(5))
    with pytest.raises(OptionError, match="searches one number"):
        la.optimize_prior_precision(prior_structure="scale_invariant", method="gridsearch", val_loader=[(x, y)])
    plain = Laplace(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), "regression", "all", "full")
    plain.fit([(x, y)])
    with pytest.raises(OptionError, match=r"no scale-invariant group \(0\.weight: its scale reaches the outputs"):
        plain.optimize_prior_precision(prior_structure="scale_invariant")


def test_groups_of_a_prior() -> None:
    """Numbers of entries, where a part of the tensors is touched."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    space = lapwing.ParamSpace.of(model)
    groups = PriorGroups.of([["1.weight", "0.bias"], ["0.weight"], ["1.bias"]])
    assert groups.numbers(space).tolist() == [1, 1, 1, 1, 0, 0, 0, 0, 2]
    part = space.select(mask=torch.tensor([1, 2, 8]))
    assert groups.touched(part) == (("0.weight",), ("1.bias",))
    assert groups.numbers(part).tolist() == [0, 0, 1]
    prior = lapwing.Prior.by_name(space, groups, [1.0, 2.0, 3.0])
    assert prior.precision().tolist() == [2.0] * 4 + [1.0] * 4 + [3.0]
    assert prior.structure == "grouped"
