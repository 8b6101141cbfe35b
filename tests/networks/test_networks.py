"""Networks of other packages, tiny and with random weights, against brute force: right or refused, never wrong.

Of every row of the table, in two batches of unequal size, to the rounding of float64, or of float32 for a network that
leaves float64 on the way:

full        the Jacobian; and the Gauss-Newton matrix, for up to 600 weights
diag        its diagonal
kron        blocks that are dense or diagonal equal those of the matrix; a weight that matters has curvature
ekfac       the same, and the trace of every block is exact
last layer  Jacobian and matrix of the layer that was found, and its Kronecker factors

Predictions are finite and the model is as before. `refused` in the table names the structures in which a refusal is
right; anything else than that is a failure, also a network that works where a refusal is listed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import oracle
from lapwing import Laplace
from lapwing.errors import LapwingError
from lapwing.likelihoods import Categorical, Gaussian, Likelihood
from lapwing.linalg import Dense, Diagonal
from networks import plain, text, vision
from networks.table import Row
from unchanged import unchanged

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # what others warn of is theirs

SMALL = 600
TABLE = [*plain.ROWS, *text.ROWS, *vision.ROWS]


@dataclass(frozen=True)
class Case:
    """A network with its data, and what brute force says of them."""

    model: nn.Module
    likelihood: Likelihood
    batches: list[tuple[Any, Tensor]]
    jacobian: Tensor  # [B, C, P]
    rows: Tensor  # [R, P]: their outer products sum to the Gauss-Newton matrix
    single: bool  # whether float32 is used inside

    def fitted(self, structure: str, subset: str = "all") -> Any:
        la = Laplace(self.model, self.likelihood, subset, structure)
        la.fit(self.batches)
        return la

    def same_jacobian(self, la: Any, where: Tensor) -> None:
        found = torch.cat([la.linearise(x).rows() for x, _ in self.batches])
        same(found, self.jacobian[..., where], self.jacobian.abs().max(), self.single, "the Jacobian")

    def same_curvature(self, found: Tensor, expected: Tensor, what: str) -> None:
        same(found, expected, self.rows.square().sum(0).max(), self.single, what)

    def predicts(self, la: Any) -> None:
        for x, _ in self.batches:
            found = la(x)
            for each in found if isinstance(found, tuple) else (found,):
                assert torch.isfinite(each).all(), "a prediction is not finite"


class Single(TorchDispatchMode):
    """Sees whether a model leaves float64: several take the softmax or the norm in float32, whatever they are given."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.seen = self.seen or (isinstance(out, Tensor) and out.dtype == torch.float32)
        return out


def same(found: Tensor, expected: Tensor, scale: Tensor, single: bool, what: str) -> None:
    """Equal to rounding. `scale` is the largest entry of the whole network, as some gradients cancel."""
    rtol, atol = (1e-4, 1e-6) if single else (1e-8, 1e-12)
    torch.testing.assert_close(
        found, expected, rtol=rtol, atol=atol * float(scale), msg=lambda found: f"{what}: {found}"
    )


def case(row: Row) -> Case:
    model, x, kind = row.build()
    model = model.double().eval()
    for p in model.parameters():
        if p.requires_grad:
            p.data += 0.1 * torch.randn_like(p)  # zeros of an initialisation would hide mistakes
    likelihood = Gaussian() if kind == "regression" else Categorical()
    with Single() as mode:
        f = oracle.forward(model, x).detach()
    last = likelihood.to_last(f)
    y = torch.randn_like(f) if kind == "regression" else torch.randint(last.shape[-1], last.shape[:-1])
    jacobian = oracle.jacobian(model, x)
    values, vectors = torch.linalg.eigh(oracle.output_hessian(likelihood, f, y))
    roots = vectors * values.clamp_min(0).sqrt().unsqueeze(1)  # [B, C, R]
    rows = torch.einsum("bcp,bcr->brp", jacobian, roots).flatten(0, 1)
    batches = [(pick(x, slice(0, -1)), y[:-1]), (pick(x, slice(len(f) - 1, None)), y[-1:])]
    return Case(model, likelihood, batches, jacobian, rows, mode.seen)


def pick(x: Any, rows: slice) -> Any:
    if isinstance(x, Tensor):
        return x[rows]
    if isinstance(x, tuple):
        return tuple(pick(value, rows) for value in x)
    return {key: pick(value, rows) for key, value in x.items()}


def full(case: Case) -> None:
    small = case.rows.shape[1] <= SMALL
    la = case.fitted("full" if small else "gp")
    case.same_jacobian(la, torch.arange(case.rows.shape[1]))
    if small:
        case.same_curvature(la.H, case.rows.mT @ case.rows, "the matrix")
    case.predicts(la)


def diag(case: Case) -> None:
    la = case.fitted("diag")
    case.same_curvature(la.H, case.rows.square().sum(0), "the diagonal")
    case.predicts(la)


def kron(case: Case) -> None:
    la = case.fitted("kron")
    blocks(la, case)
    case.predicts(la)


def ekfac(case: Case) -> None:
    la = case.fitted("ekfac")
    blocks(la, case)
    for block in la.H.blocks:
        part = case.rows[:, block.segments.gather(torch.arange(case.rows.shape[1]))]
        case.same_curvature(block.curvature.diagonal().sum(), part.square().sum(), f"the trace of {block.name}")
    case.predicts(la)


def blocks(la: Any, case: Case) -> None:
    for block in la.H.blocks:
        part = case.rows[:, block.segments.gather(torch.arange(case.rows.shape[1]))]
        if isinstance(block.curvature, Dense):
            case.same_curvature(block.curvature.dense(), part.mT @ part, f"the block {block.name}")
        elif isinstance(block.curvature, Diagonal):
            case.same_curvature(block.curvature.diagonal(), part.square().sum(0), f"the diagonal of {block.name}")
        elif bool(part.square().sum() > 1e-12):
            assert bool(block.curvature.diagonal().sum() > 0), f"{block.name} has no curvature"


def last_layer(case: Case) -> None:
    la = case.fitted("full", "last_layer")
    sizes = {name: p.numel() for name, p in oracle.parameters(case.model).items()}
    places = dict(zip(sizes, torch.arange(sum(sizes.values())).split(list(sizes.values())), strict=True))
    where = torch.cat([places[name] for name in la.space.names])
    case.same_jacobian(la, where)
    case.same_curvature(la.H, case.rows[:, where].mT @ case.rows[:, where], "the matrix")
    case.predicts(la)
    case.predicts(case.fitted("kron", "last_layer"))


STRUCTURES: dict[str, Callable[[Case], None]] = {
    "full": full,
    "diag": diag,
    "kron": kron,
    "ekfac": ekfac,
    "last layer": last_layer,
}


def outcome(check: Callable[[Case], None], case: Case) -> tuple[str, str]:
    try:
        with unchanged(case.model):
            check(case)
    except LapwingError as refusal:
        return "refused", f"{type(refusal).__name__}: {refusal}"
    except Exception as error:  # a crash counts as wrong, and the other structures are still tried
        return "wrong", " ".join(f"{type(error).__name__}: {error}".split())
    return "ok", ""


@pytest.mark.parametrize("row", [pytest.param(row, id=f"{row.package}-{row.name}") for row in TABLE])
def test_network(row: Row, record_property: Callable[[str, object], None]) -> None:
    if row.package not in sys.modules and find_spec(row.package) is None:  # a stand-in for a package has no spec
        pytest.skip(f"{row.package} is not installed")
    torch.set_default_dtype(torch.float64)
    tried = case(row)
    problems = []
    for structure, check in STRUCTURES.items():
        found, reason = outcome(check, tried)
        record_property("network", (structure, found, reason))
        expected = "refused" if structure in row.refused else "ok"
        if found != expected:
            problems.append(f"{structure}: {found}, expected {expected}. {reason}")
    assert not problems, "\n".join(problems)
