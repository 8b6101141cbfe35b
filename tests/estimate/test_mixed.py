"""The mixed diagonal: exact up to a bottleneck, propagated behind it, and what decides where it switches."""

from __future__ import annotations

from math import ceil

import pytest
import torch
from torch import Tensor, nn

import machine
import oracle
import problems
from lapwing.errors import DataError, UnsupportedOperationError
from lapwing.estimate import diagonal, exact, fisher, mixed_diagonal, monte_carlo, propagated_diagonal
from lapwing.likelihoods import Categorical, Gaussian
from lapwing.params import ParamSpace
from lapwing.tangent import Tangent
from lapwing.tape.cuts import Cut, find_cut, record_both
from problems import Net
from unchanged import unchanged

RTOL = 1e-9
REFUSED = ("lstm_packed", "custom_function", "custom_function_first")
ALL = 10**6


def mixed(problem: problems.Problem, **options) -> Tensor:
    tangent = Tangent(problem.model, problem.space)
    return mixed_diagonal(tangent, problem.likelihood, problem.batches, **options).diagonal()


def autoencoder(latent: int = 2) -> nn.Sequential:
    """1 x 8 x 8 -> latent -> 1 x 8 x 8."""
    encoder = nn.Sequential(
        nn.Conv2d(1, 3, 3, stride=2, padding=1), nn.Tanh(), nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.Tanh(),
        nn.Flatten(), nn.Linear(16, latent),
    )  # fmt: skip
    decoder = nn.Sequential(
        nn.Linear(latent, 16), nn.Tanh(), nn.Unflatten(1, (4, 2, 2)), nn.Upsample(scale_factor=2),
        nn.Conv2d(4, 3, 3, padding=1), nn.Tanh(), nn.ConvTranspose2d(3, 1, 2, stride=2),
    )  # fmt: skip
    return nn.Sequential(encoder, decoder).double()


def images(count: int = 6) -> Tensor:
    return torch.randn(count, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def trained(model: nn.Sequential, x: Tensor, steps: int = 200) -> nn.Sequential:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        optimizer.step()
    model.zero_grad(set_to_none=True)
    return model


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


# -- the two ends ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", problems.thinned(problems.NAMES))
def test_with_columns_for_everything_it_is_the_exact_diagonal(name):
    """Also where nothing could be propagated: recurrent layers, custom functions."""
    problem = problems.build(name)
    expected = diagonal(Tangent(problem.model, problem.space), problem.likelihood, problem.batches).diagonal()
    with unchanged(problem.model):
        found = mixed(problem, columns=ALL)
    torch.testing.assert_close(found, expected, rtol=RTOL, atol=1e-12)


@pytest.mark.parametrize("name", problems.thinned(name for name in problems.NAMES if name not in REFUSED))
def test_without_columns_it_is_the_propagated_diagonal(name):
    problem = problems.build(name)
    expected = propagated_diagonal(Tangent(problem.model, problem.space), problem.likelihood, problem.batches)
    with unchanged(problem.model):
        found = mixed(problem, columns=0)
    torch.testing.assert_close(found, expected.diagonal(), rtol=RTOL, atol=1e-12)


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_be_neither_is_refused(name):
    problem = problems.build(name)
    with unchanged(problem.model), pytest.raises(UnsupportedOperationError, match=r"no rule|cannot be seen"):
        mixed(problem, columns=0)


# -- in between -----------------------------------------------------------------------------------------------------


def dense_jacobian(function, x: Tensor) -> Tensor:
    """[outputs, inputs] of one data point."""
    return torch.autograd.functional.jacobian(function, x).reshape(-1, x.numel())


def propagated_by_hand(decoder: nn.Sequential, z: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    """Variances m [n, outputs] taken back module by module, m_in = (J * J)^T m_out with dense Jacobians.

    Returns the diagonal of the decoder's parameters, sum_n (dy/dw * dy/dw)^T m, and the variances of the code [n, d].
    """
    given = [z]
    for layer in decoder:
        given.append(layer(given[-1]).detach())
    found = []
    for layer, h in zip(reversed(decoder), reversed(given[:-1]), strict=True):
        for name, p in reversed(list(layer.named_parameters())):

            def call(value: Tensor, n: int, layer=layer, name=name, h=h) -> Tensor:
                return torch.func.functional_call(layer, {name: value}, (h[n : n + 1],))

            rows = [dense_jacobian(lambda v, n=n, call=call: call(v, n), p.detach()) for n in range(len(h))]
            found.append(sum(J.square().mT @ own for J, own in zip(rows, m, strict=True)))
        back = [dense_jacobian(layer, h[n : n + 1]) for n in range(len(h))]
        m = torch.stack([J.square().mT @ own for J, own in zip(back, m, strict=True)])
    return torch.cat(found[::-1]), m


def split_oracle(model: nn.Sequential, likelihood, x: Tensor, y: Tensor, whole: bool) -> Tensor:
    """Encoder and decoder apart: M of the latent code from the decoder, and the encoder's rows one by one."""
    encoder, decoder = model
    z = encoder(x).detach()
    f = decoder(z).detach()
    hessian = oracle.output_hessian(likelihood, f, y)
    last, variances = propagated_by_hand(decoder, z, hessian.diagonal(dim1=1, dim2=2))
    rows = oracle.jacobian(encoder, x)  # [B, d, P of the encoder]
    if whole:
        in_z = torch.stack([dense_jacobian(decoder, z[n : n + 1]) for n in range(len(z))])
        m = torch.einsum("n c i, n c d, n d j -> n i j", in_z, hessian, in_z)
    else:
        m = torch.diag_embed(variances)
    return torch.cat([torch.einsum("n i p, n i j, n j p -> p", rows, m, rows), last])


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("latent", [1, 2, 5])
def test_an_autoencoder_agrees_with_its_halves(latent, whole):
    model, x = autoencoder(latent), images()
    expected = split_oracle(model, Gaussian(0.7), x, x, whole)
    with unchanged(model):
        options = {"columns": latent, "exact_bottleneck": whole}
        found = mixed_diagonal(Tangent(model), Gaussian(0.7), [(x, x)], **options).diagonal()
    torch.testing.assert_close(found, expected, rtol=1e-7 if whole else RTOL, atol=1e-12)


def test_the_error_of_an_encoder_falls_and_then_vanishes():
    """Variances that come back through a trained decoder are far too small; only the exact matrix makes up for that."""
    x = images(24)
    model = trained(autoencoder(2), x)
    count = sum(p.numel() for p in model[0].parameters())
    tangent, likelihood, batches = Tangent(model), Gaussian(1.0), [(x, x)]
    expected = diagonal(tangent, likelihood, batches).diagonal()
    propagated = propagated_diagonal(tangent, likelihood, batches).diagonal()
    found = mixed_diagonal(tangent, likelihood, batches, columns=2).diagonal()
    best = mixed_diagonal(tangent, likelihood, batches, columns=2, exact_bottleneck=True).diagonal()
    assert error(found[:count], expected[:count]) < error(propagated[:count], expected[:count])
    torch.testing.assert_close(best[:count], expected[:count], rtol=1e-7, atol=1e-12)
    torch.testing.assert_close(best[count:], propagated[count:], rtol=RTOL, atol=0)
    torch.testing.assert_close(found[count:], propagated[count:], rtol=RTOL, atol=0)


def test_cost_is_one_pass_per_entry_of_the_bottleneck(monkeypatch):
    """Columns that are pulled back in all: d of them, however many outputs there are, and in parts for a budget."""
    counted: list[int] = []
    pull = Cut.pull

    def counting(self, linearisation, columns):
        counted.append(len(columns))
        return pull(self, linearisation, columns)

    monkeypatch.setattr(Cut, "pull", counting)
    model, x = autoencoder(5), images()
    found = mixed_diagonal(Tangent(model), Gaussian(), [(x, x)], columns=8).diagonal()
    assert counted == [5]
    counted.clear()
    small = mixed_diagonal(Tangent(model, budget=2**16), Gaussian(), [(x, x)], columns=8).diagonal()
    assert sum(counted) == 5
    assert len(counted) == ceil(5 / counted[0]) > 1
    torch.testing.assert_close(small, found, rtol=RTOL, atol=0)


def test_the_limit_decides():
    model, x = autoencoder(5), images()
    tangent, likelihood, batches = Tangent(model), Gaussian(), [(x, x)]
    propagated = propagated_diagonal(tangent, likelihood, batches).diagonal()
    below, at = (mixed_diagonal(tangent, likelihood, batches, columns=columns).diagonal() for columns in (4, 5))
    torch.testing.assert_close(below, propagated, rtol=RTOL, atol=0)
    assert error(at, propagated) > 1e-3
    # 64 outputs: with so many columns it starts exact
    torch.testing.assert_close(
        mixed_diagonal(tangent, likelihood, batches, columns=64).diagonal(),
        diagonal(tangent, likelihood, batches).diagonal(), rtol=RTOL, atol=1e-12,
    )  # fmt: skip


def cut_of(model: nn.Module, x: Tensor, columns: int) -> Cut | None:
    linearisation, tape = record_both(Tangent(model), x)
    return find_cut(linearisation, tape, columns, {})


def test_the_bottleneck_nearest_to_the_outputs_is_taken():
    model = nn.Sequential(
        nn.Linear(9, 3), nn.Tanh(), nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2), nn.Tanh(), nn.Linear(2, 9)
    ).double()
    x = torch.randn(4, 9, dtype=torch.float64)
    cut = cut_of(model, x, 3)
    assert cut is not None
    assert (cut.position, cut.width) == (5, 2)  # after its tanh
    assert cut_of(model, x, 1) is None


def test_a_residual_connection_around_the_bottleneck_leaves_none():
    """All is then propagated: no value on the way has all of the data."""

    def body(m, x):
        h = m.first(x)
        return m.last(h + m.up(torch.tanh(m.down(h))))

    model = Net(body, first=nn.Linear(6, 6), down=nn.Linear(6, 1), up=nn.Linear(1, 6), last=nn.Linear(6, 8)).double()
    x = torch.randn(5, 6, dtype=torch.float64)
    batches = [(x, torch.randn(5, 8, dtype=torch.float64))]
    assert cut_of(model, x, 4) is None
    found, expected = (
        f(Tangent(model), Gaussian(), batches).diagonal()
        for f in (lambda *given: mixed_diagonal(*given, columns=4), propagated_diagonal)
    )
    torch.testing.assert_close(found, expected, rtol=RTOL, atol=0)


def test_branches_that_end_before_the_outputs_are_no_obstacle():
    """A decoder that also reads data of its own: z is still all that the encoder's data pass through."""

    def body(m, x):
        z = m.encode(x)
        return m.decode(torch.cat([z, m.side(x[:, :2])], 1))

    model = Net(body, encode=nn.Linear(6, 2), side=nn.Linear(2, 3), decode=nn.Linear(5, 8)).double()
    x = torch.randn(5, 6, dtype=torch.float64)
    cut = cut_of(model, x, 2)
    assert cut is not None
    assert cut.width == 2


# -- parameters on both sides, and unusual layouts ------------------------------------------------------------------


def test_tied_weights_in_closed_form():
    """y = W^T tanh(W x): the decoder's share is propagated, the encoder's exact, and they add."""
    w = nn.Parameter(torch.randn(2, 5, dtype=torch.float64))
    model = Net(lambda m, x: torch.tanh(x @ m.w.T) @ m.w, w=w)
    x = torch.randn(6, 5, dtype=torch.float64)
    z = torch.tanh(x @ w.T).detach()
    decoder = torch.einsum("n i -> i", z.square()).unsqueeze(1).expand(2, 5)  # unit variances at the outputs
    m = w.detach().square().sum(1)  # of z
    slope = 1 - z.square()
    encoder = torch.einsum("n i, n j -> i j", m * slope.square(), x.square())
    found = mixed_diagonal(Tangent(model), Gaussian(1.0), [(x, x)], columns=2).diagonal()
    torch.testing.assert_close(found, (decoder + encoder).flatten(), rtol=RTOL, atol=0)


def test_functions_of_parameters_reach_across_the_bottleneck():
    """A weight is normalised before the encoder runs and used after it."""

    def body(m, x):
        weight = nn.functional.normalize(m.v, dim=0)
        return torch.tanh(m.encode(x)) @ weight

    model = Net(body, v=problems.parameter(2, 7), encode=nn.Linear(5, 2)).double()
    x = torch.randn(6, 5, dtype=torch.float64)
    batches = [(x, torch.randn(6, 7, dtype=torch.float64))]
    cut = cut_of(model, x, 2)
    assert cut is not None
    found, expected = (
        f(Tangent(model), Gaussian(), batches).diagonal()
        for f in (lambda *given: mixed_diagonal(*given, columns=2), propagated_diagonal)
    )
    # one hidden layer: no wide layer before the bottleneck, so that nothing changes
    torch.testing.assert_close(found, expected, rtol=RTOL, atol=1e-12)


@pytest.mark.parametrize("layout", ["samples last", "time first", "folded"])
def test_samples_may_lie_anywhere_in_the_bottleneck(layout):
    a, b, c = (problems.parameter(*shape) for shape in ((3, 4), (4, 1), (1, 6)))

    def body(m, x):  # [B, 2, 3] -> [B, 2, 6] through [B, 2, 1] in some order
        if layout == "time first":
            x = x.transpose(0, 1)
        if layout == "folded":
            x = x.flatten(0, 1)
        z = torch.tanh(x @ m.a) @ m.b
        if layout == "samples last":
            z = z.permute(2, 1, 0).clone()
            return torch.tanh(z).permute(2, 1, 0) @ m.c
        if layout == "folded":
            return (torch.tanh(z) @ m.c).unflatten(0, (-1, 2))
        return (torch.tanh(z) @ m.c).transpose(0, 1)

    model = Net(body, a=a, b=b, c=c).double()
    plain = Net(lambda m, x: torch.tanh(torch.tanh(x @ m.a) @ m.b) @ m.c, a=a, b=b, c=c).double()
    x = torch.randn(2, 2, 3, dtype=torch.float64)
    x = torch.cat([x, torch.randn(1, 2, 3, dtype=torch.float64)]) if layout != "time first" else x  # T = B there
    batches = [(x, torch.randn(len(x), 2, 6, dtype=torch.float64))]
    found, expected = (
        mixed_diagonal(Tangent(each), Gaussian(), batches, columns=2).diagonal() for each in (model, plain)
    )
    cut = cut_of(model, x, 2)
    assert cut is not None
    assert cut.width == 2
    torch.testing.assert_close(found, expected, rtol=RTOL, atol=1e-12)


@pytest.mark.parametrize("name", ["one_by_one", "micro_batches"])
def test_a_part_of_the_data_is_no_bottleneck(name):
    problem = problems.build(name)
    expected = propagated_diagonal(Tangent(problem.model), problem.likelihood, problem.batches).diagonal()
    torch.testing.assert_close(mixed(problem, columns=1), expected, rtol=RTOL, atol=1e-12)


def test_parameters_that_no_rule_for_rows_covers_stay_propagated():
    def body(m, x):
        return m.decode(torch.tanh(torch.addmm(m.b, torch.tanh(m.second(torch.tanh(m.first(x)))), m.w, alpha=0.5)))

    model = Net(
        body,
        first=nn.Linear(5, 4),
        second=nn.Linear(4, 4),
        w=problems.parameter(4, 2),
        b=problems.parameter(2),
        decode=nn.Linear(2, 9),
    ).double()
    x = torch.randn(6, 5, dtype=torch.float64)
    batches = [(x, torch.randn(6, 9, dtype=torch.float64))]
    tangent = Tangent(model)
    assert set(tangent.at(x).record.opaque) == {"w", "b"}
    found = mixed_diagonal(tangent, Gaussian(), batches, columns=2).diagonal()
    expected = propagated_diagonal(tangent, Gaussian(), batches).diagonal()
    space = ParamSpace.of(model)
    for name, start in space.starts.items():
        part = slice(start, start + space.shape(name).numel())
        if name.startswith("first"):
            assert error(found[part], expected[part]) > 1e-3
        else:
            torch.testing.assert_close(found[part], expected[part], rtol=RTOL, atol=1e-12)


def test_parameters_without_a_rule_behind_the_bottleneck_count_once():
    def body(m, x):
        return torch.addmm(m.b, torch.tanh(m.encode(x)), m.w, alpha=0.5)

    members = {"encode": nn.Linear(5, 2), "w": problems.parameter(2, 9), "b": problems.parameter(9)}
    model, x = Net(body, **members).double(), torch.randn(6, 5, dtype=torch.float64)
    tangent = Tangent(model)
    assert set(tangent.at(x).record.opaque) == {"w", "b"}
    found = mixed_diagonal(tangent, Gaussian(), [(x, torch.randn(6, 9, dtype=torch.float64))], columns=2)
    by_name = ParamSpace.of(model).unravel(found.diagonal())
    # y = h W / 2 + b at unit noise: sum_n (h_i / 2)^2 for every entry of row i, and N
    squares = (torch.tanh(model.encode(x)) / 2).square().sum(0).detach()
    torch.testing.assert_close(by_name["w"], squares.unsqueeze(1).expand(2, 9), rtol=RTOL, atol=0)
    torch.testing.assert_close(by_name["b"], torch.full_like(model.b.detach(), 6.0), rtol=RTOL, atol=0)


def test_a_sub_network_is_part_of_the_whole():
    model, x = autoencoder(2), images()
    mask = torch.tensor([0, 3, 40, 100, 140, 160, 200])
    part = ParamSpace.of(model).select(mask=mask)
    found, whole = (
        mixed_diagonal(Tangent(model, space), Gaussian(), [(x, x)]).diagonal() for space in (part, ParamSpace.of(model))
    )
    torch.testing.assert_close(found, whole[mask], rtol=RTOL, atol=0)


# -- the pass over the data -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [False, True])
def test_any_split_into_batches_gives_the_same(whole):
    model, x = autoencoder(2), images()
    batches = [(x[:1], x[:1]), (x[1:3], x[1:3]), (x[3:], x[3:])]
    tangent = Tangent(model)
    found, expected = (
        mixed_diagonal(tangent, Gaussian(), data, exact_bottleneck=whole).diagonal() for data in (batches, [(x, x)])
    )
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-12)


def test_batches_may_differ_in_their_outputs():
    """Positions with few columns in one batch and many in the next."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    short, long = (torch.randn(3, t, 2, dtype=torch.float64) for t in (1, 9))
    batches = [(x, torch.randn_like(x)) for x in (short, long, short)]
    tangent = Tangent(model)
    found = mixed_diagonal(tangent, Gaussian(), batches, columns=4).diagonal()
    expected = sum(mixed_diagonal(tangent, Gaussian(), [batch], columns=4).diagonal() for batch in batches)
    torch.testing.assert_close(found, expected, rtol=RTOL, atol=0)


def test_draws_are_few_enough_to_be_exact():
    """One draw is one column: the Monte-Carlo Fisher needs no bottleneck."""
    problem = problems.build("image_categorical")
    draws = {"cotangents": monte_carlo(3)}
    found = mixed(problem, **draws, generator=torch.Generator().manual_seed(0), columns=4)
    expected = diagonal(
        Tangent(problem.model), problem.likelihood, problem.batches, **draws, generator=torch.Generator().manual_seed(0)
    )
    torch.testing.assert_close(found, expected.diagonal(), rtol=RTOL, atol=1e-12)


def test_fisher_and_exact_agree_for_an_exponential_family():
    model = nn.Sequential(nn.Linear(5, 2), nn.Tanh(), nn.Linear(2, 8)).double()
    batches = [(torch.randn(4, 5, dtype=torch.float64), torch.tensor([0, 7, 3, 3]))]
    found, expected = (
        mixed_diagonal(Tangent(model), Categorical(), batches, cotangents=kind, columns=3).diagonal()
        for kind in (fisher, exact)
    )
    torch.testing.assert_close(found, expected, rtol=RTOL, atol=1e-12)


def in_bfloat16(kind):
    model, x = autoencoder(2).to(torch.bfloat16), images().to(torch.bfloat16)
    return mixed_diagonal(Tangent(model), Gaussian(), [(x, x)], exact_bottleneck=kind == "whole").diagonal()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("whole", [False, True])
def test_lower_precisions_run(dtype, whole):
    if dtype == torch.bfloat16:
        machine.need("estimate/test_mixed.py", "in_bfloat16", "whole" if whole else "propagated")
    x = images()
    model = autoencoder(2)
    expected = mixed_diagonal(Tangent(model), Gaussian(), [(x, x)], exact_bottleneck=whole).diagonal()
    model, x = model.to(dtype), x.to(dtype)
    found = mixed_diagonal(Tangent(model), Gaussian(), [(x, x)], exact_bottleneck=whole).diagonal()
    assert error(found.double(), expected) < (1e-4 if dtype == torch.float32 else 0.2)


def test_inputs_from_inference_mode():
    model, x = autoencoder(2), images()
    expected = mixed_diagonal(Tangent(model), Gaussian(), [(x, x)]).diagonal()
    with torch.inference_mode():
        given = x.clone()
        found = mixed_diagonal(Tangent(model), Gaussian(), [(given, given)]).diagonal()
    torch.testing.assert_close(found.clone(), expected)


def test_what_is_asked_for_must_make_sense():
    model, x = autoencoder(2), images()
    tangent = Tangent(model)
    with pytest.raises(DataError, match="columns is -1"):
        mixed_diagonal(tangent, Gaussian(), [(x, x)], columns=-1)
    with pytest.raises(DataError, match="cotangents=exact"):
        mixed_diagonal(tangent, Gaussian(), [(x, x)], cotangents=fisher, exact_bottleneck=True)
    with pytest.raises(DataError, match="yields no batch"):
        mixed_diagonal(tangent, Gaussian(), [])
    with unchanged(model), pytest.raises(DataError, match="batch 1"):
        mixed_diagonal(tangent, Gaussian(), [(x, x), (x, x * float("nan"))])
