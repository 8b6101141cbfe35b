"""A probe of a few samples holds for many: every architecture of the zoo, on batches larger than the probe looks at."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import oracle
import problems
from lapwing.tangent import Tangent
from lapwing.tangent import model as tangent_model
from lapwing.tangent.inputs import map_tensors, take


def enlarged(x, batch: int):
    """Data points repeated, and floating-point ones moved a little, until there are `batch`."""
    size = oracle.size(x)

    def grow(t: Tensor) -> Tensor:
        if not t.dim() or t.shape[0] != size:
            return t
        many = torch.cat([t] * (batch // size + 1))[:batch]
        generator = torch.Generator().manual_seed(1)
        noise = 0.1 * torch.randn(many.shape, generator=generator, dtype=torch.float64)
        return many + noise.to(t.dtype) if t.is_floating_point() else many

    return map_tensors(grow, x)


@pytest.mark.parametrize(
    "name", problems.thinned([n for n in problems.NAMES if problems._OPTIONS[n].get("select") is None], every=2)
)
def test_rows_of_a_large_batch(name: str) -> None:
    problem = problems.build(name)
    x = enlarged(problem.x, 13)
    try:
        problems.call_detached(problem.model, x)
    except RuntimeError as error:
        pytest.skip(f"made for one batch size: {error}")
    tangent = Tangent(problem.model)
    found = tangent.at(x).rows()
    expected = oracle.jacobian(problem.model, x)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12 * float(expected.abs().max()))
    again = tangent.at(take(x, slice(0, 9))).rows()  # the probe of few samples serves another size too
    torch.testing.assert_close(again, expected[:9], rtol=1e-9, atol=1e-12 * float(expected.abs().max()))


def test_a_probe_of_few_samples_is_made_once_for_all_batch_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    probe = tangent_model.probe
    monkeypatch.setattr(tangent_model, "probe", lambda *args: calls.append(oracle.size(args[3])) or probe(*args))
    tangent = Tangent(nn.Linear(2, 3))
    for batch in (50, 50, 20, 7):
        tangent.at(torch.randn(batch, 2))
    assert calls == [5]


def test_a_model_made_for_one_batch_size_is_probed_as_a_whole() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.reshape(8, 2)).reshape(8, 3)

    model, x = Fixed(), torch.randn(8, 2)
    rows = Tangent(model).at(x).rows()
    torch.testing.assert_close(rows[:, 0, :2], x)


@pytest.mark.parametrize("other", [4, 11, 15])
def test_two_samples_that_change_places_are_told_apart(other: int) -> None:
    """A batch of 16 in which two samples pass the layer in each other's place: neither has the other's rows."""
    order = torch.arange(16)
    order[3], order[other] = other, 3

    def body(m: nn.Module, x: Tensor) -> Tensor:
        h = m.layer(x) if len(x) == 1 else m.layer(x.reshape(16, 2)[order])[order]
        return m.out(torch.tanh(h))

    model = problems.Net(body, layer=nn.Linear(2, 3), out=nn.Linear(3, 2)).double()
    x = torch.randn(16, 2, dtype=torch.float64)
    straight = nn.Sequential(model.layer, nn.Tanh(), model.out)
    torch.testing.assert_close(Tangent(model).at(x).rows(), oracle.jacobian(straight, x), rtol=1e-9, atol=1e-12)


def test_ways_that_differ_in_their_axes_alone() -> None:
    """As many positions as samples, and samples now on the first axis of the layer's input, now on the second."""
    order = [(0, 1, 2)]
    model = problems.Net(
        lambda m, x: torch.tanh(m.layer(x.permute(order[0]))).permute(order[0]).sum(1), layer=nn.Linear(3, 2)
    ).double()
    x, tangent = torch.randn(4, 4, 3, dtype=torch.float64), Tangent(model)
    expected = oracle.jacobian(model, x)
    for axes in ((0, 1, 2), (1, 0, 2)):
        order[0] = axes
        torch.testing.assert_close(tangent.at(x).rows(), expected, rtol=1e-9, atol=1e-12)


class SamplesSecond(nn.Module):
    """As many samples as tokens, samples along the second axis, and no sign of either while the unit is off."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix, self.out = nn.Embedding(3, 2), nn.Linear(2, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.mix(self.table(x).transpose(0, 1)))  # [T, N, 3]
        return self.out((h * torch.arange(1.0, 5, dtype=h.dtype)[:, None, None]).sum(0))


def test_a_first_batch_that_does_not_tell_samples_from_positions() -> None:
    """All units are off and all tokens the same: both axes may be that of the samples, and the next batch decides."""
    model = SamplesSecond().double()
    with torch.no_grad():
        model.table.weight.copy_(torch.tensor([[-9.0, -9.0], [0.3, 1.0], [1.2, 0.4]]))
        model.mix.weight.copy_(torch.tensor([[1.0, 0.2], [0.3, 1.0], [0.5, 0.5]]))
        model.mix.bias.zero_()
    tangent = Tangent(model)
    blank, telling = (
        torch.zeros(4, 4, dtype=torch.long),
        torch.tensor([[0, 1, 2, 2], [1, 1, 1, 2], [2, 0, 1, 0], [1, 2, 2, 2]]),
    )
    for x in (blank, telling, blank, telling):
        expected = oracle.jacobian(model, x)
        torch.testing.assert_close(tangent.at(x).rows(), expected, rtol=1e-9, atol=1e-12)
