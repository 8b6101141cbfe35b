"""compare: the figures against closed forms, what is refused, what is said, and the table and picture."""

from __future__ import annotations

import re
import sys
from math import log, pi
from pathlib import Path

import jaxtyping
import pytest
import torch
from torch import Tensor, nn

import lapwing
import oracle
from lapwing import Laplace, compare
from lapwing.errors import CurvatureError, DataError, NotFittedError, OptionError
from lapwing.evidence.seen import fingerprint, joint_fingerprint
from lapwing.laplace import BaseLaplace
from lapwing.likelihoods import Categorical, from_function
from lapwing.reporting import Comparison
from unchanged import unchanged

N, D = 30, 3
DOUBLE = {"dtype": torch.float64}


def numbers(n: int = N, seed: int = 0, outputs: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, D, generator=generator, **DOUBLE)
    return x, torch.sin(x[:, :outputs]) + 0.3 * torch.randn(n, outputs, generator=generator, **DOUBLE)


def classes(n: int = N, seed: int = 0) -> tuple[Tensor, Tensor]:
    x, y = numbers(n, seed)
    return x, (y[:, 0] > 0.3).long() + (y[:, 0] > -0.3).long()


def network(width: int, outputs: int = 1, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(D, width), nn.Tanh(), nn.Linear(width, outputs)).double()


def fitted(
    width: int = 4, task: str = "regression", structure: str = "full", subset: str = "all", **options
) -> BaseLaplace:
    x, y = classes() if task == "classification" else numbers()
    la = Laplace(
        network(width, {"classification": 3, "heteroscedastic": 2}.get(task, 1)), task, subset, structure, **options
    )
    la.fit([(x[:11], y[:11]), (x[11:], y[11:])])
    return la


def test_a_linear_gaussian_model_has_its_exact_evidence_and_predictions() -> None:
    (x, y), (xv, yv), alpha, sigma = numbers(), numbers(50, 1), 0.7, 0.4
    model = nn.Linear(D, 1, bias=False).double()
    precision = x.T @ x / sigma**2 + alpha * torch.eye(D, **DOUBLE)
    with torch.no_grad():
        model.weight.copy_(torch.linalg.solve(precision, x.T @ y / sigma**2).T)
    la = Laplace(model, "regression", "all", "full", prior_precision=alpha, sigma_noise=sigma)
    la.fit([(x, y)])
    (row,) = compare({"line": la}, [(xv[:20], yv[:20]), (xv[20:], yv[20:])]).rows
    marginal = sigma**2 * torch.eye(N, **DOUBLE) + x @ x.T / alpha
    exact = torch.distributions.MultivariateNormal(torch.zeros(N, **DOUBLE), marginal).log_prob(y[:, 0])
    eigenvalues = torch.linalg.eigvalsh(x.T @ x / sigma**2)
    variance = sigma**2 + torch.einsum("ni, ij, nj -> n", xv, torch.linalg.inv(precision), xv)
    error = (yv - xv @ model.weight.detach().T)[:, 0].square()
    assert row.log_evidence == pytest.approx(float(exact), rel=1e-9)
    assert row.log_evidence_per_point == pytest.approx(float(exact) / N, rel=1e-9)
    assert row.effective_parameters == pytest.approx(float((eigenvalues / (eigenvalues + alpha)).sum()), rel=1e-9)
    assert row.nll == pytest.approx(float((error / variance + torch.log(2 * pi * variance)).mean() / 2), rel=1e-9)
    assert row.network_nll == pytest.approx(float(error.mean() / sigma**2 + log(2 * pi * sigma**2)) / 2, rel=1e-9)
    assert (row.parameters, row.prior_precision, row.sigma_noise) == (D, (alpha,), sigma)


def test_classes_have_the_evidence_and_probabilities_of_dense_matrices() -> None:
    (x, y), (xv, yv), alpha = classes(), classes(40, 1), 2.0
    la = fitted(4, "classification", prior_precision=alpha)
    (row,) = compare([la], [(xv, yv)]).rows
    curvature = oracle.ggn(la.model, Categorical(), x, y)
    theta = torch.cat([p.detach().flatten() for p in la.model.parameters()])
    precision = curvature + alpha * torch.eye(len(theta), **DOUBLE)
    fit = -nn.functional.cross_entropy(la.model(x), y, reduction="sum").detach()
    prior = len(theta) / 2 * log(alpha / (2 * pi)) - alpha / 2 * theta @ theta
    exact = fit + prior + len(theta) / 2 * log(2 * pi) - torch.logdet(precision) / 2
    jacobian = oracle.jacobian(la.model, xv)
    variance = torch.einsum("ncp, pq, ncq -> nc", jacobian, torch.linalg.inv(precision), jacobian)
    logits = la.model(xv).detach()
    scaled = logits / (1 + pi / 8 * variance).sqrt()
    assert row.log_evidence == pytest.approx(float(exact), rel=1e-9)
    assert row.log_likelihood == pytest.approx(float(fit), rel=1e-9)
    assert row.effective_parameters == pytest.approx(
        float(torch.trace(curvature @ torch.linalg.inv(precision))), rel=1e-9
    )
    assert row.nll == pytest.approx(float(nn.functional.cross_entropy(scaled, yv)), rel=1e-9)
    assert row.network_nll == pytest.approx(float(nn.functional.cross_entropy(logits, yv)), rel=1e-9)
    assert row.sigma_noise is None


def test_best_is_by_evidence_and_the_held_out_best_is_its_own() -> None:
    las = {"stiff": fitted(prior_precision=1e4), "loose": fitted(prior_precision=1e-4), "middle": fitted()}
    found = compare(las, [numbers(40, 1)])
    values = {row.name: row.log_evidence for row in found}
    assert found.best.name == max(values, key=values.__getitem__)
    assert found.best_held_out is not None
    assert found.best_held_out.nll == min(row.nll for row in found)
    assert [row.name for row in found] == list(las)
    assert len(found) == 3
    assert found["loose"] is found.rows[1]
    with pytest.raises(OptionError, match=r"'tight' was compared; expected one of \['stiff', 'loose', 'middle'\]"):
        found["tight"]


def test_nothing_is_changed_and_a_generator_serves_all() -> None:
    las = [fitted(2, sigma_noise=0.5), fitted(3)]
    before = [la.hyper for la in las]
    x, y = numbers(20, 1)
    with unchanged(las[0].model), unchanged(las[1].model):
        once = compare(las, (pair for pair in [(x[:9], y[:9]), (x[9:], y[9:])]))
    assert [la.hyper for la in las] == before
    assert once.rows == compare(las, [(x, y)]).rows
    assert [row.name for row in once] == ["Sequential 1", "Sequential 2"]
    assert once.n_held_out == 20


@pytest.mark.parametrize("task", ["heteroscedastic", "poisson", "binary"])
def test_other_likelihoods_have_rows(task: str) -> None:
    x, y = numbers()
    y = {"poisson": y.abs().round(), "binary": (y > 0).double()}.get(task, y)
    la = Laplace(network(3, 2 if task == "heteroscedastic" else 1), task, "all", "diag")
    la.fit([(x, y)])
    (row,) = compare([la], [(x, y)]).rows
    # without spread there is no difference between the two
    la.prior_precision = 1e12
    (narrow,) = compare([la], [(x, y)]).rows
    assert row.nll != pytest.approx(row.network_nll, rel=1e-6)
    assert narrow.nll == pytest.approx(narrow.network_nll, rel=1e-6)
    assert narrow.network_nll == pytest.approx(row.network_nll, rel=1e-12)


def test_a_likelihood_without_closed_form_has_no_held_out_column() -> None:
    own = from_function(lambda f, y: (f - y).abs().pow(1.5).sum(-1))
    la = Laplace(network(3), own, "all", "diag")
    la.fit([numbers()])
    found = compare([la], [numbers(20, 1)])
    assert found.rows[0].nll is None
    assert found.best_held_out is None
    assert "no closed form" in found.notes[0]
    assert "NLL on" not in str(found)


def test_outputs_of_their_own_have_no_effective_parameters() -> None:
    x, y = classes()
    la = Laplace(network(3, 3), "classification", "all", "gp", independent_outputs=True)
    la.fit([(x, y)])
    found = compare([la, fitted(3, "classification", "gp")], [classes(20, 1)])
    assert found.rows[0].effective_parameters is None
    assert "gp with independent outputs in" in found.notes[0]
    with pytest.raises(OptionError, match="x='parameters'"):
        found.plot()
    assert found.plot(x="parameters") is not None


# -- what may not be compared ------------------------------------------------------------------------------------------


def test_other_data_and_other_likelihoods_are_refused() -> None:
    one = fitted()
    x, y = numbers()
    other = Laplace(network(4), "regression", "all", "full")
    other.fit([(x[1:], y[1:])])
    with pytest.raises(DataError, match="'a' and 'b' were fitted to 30 and 29 data points"):
        compare({"a": one, "b": other})
    other.fit([(x, 2 * y)])
    with pytest.raises(DataError, match=r"other targets.* in the same unit"):
        compare({"a": one, "b": other})
    with pytest.raises(OptionError, match="likelihoods Gaussian noise and Categorical"):
        compare([one, fitted(task="classification")])
    with pytest.raises(OptionError, match=r"temperatures 1 and 0\.5"):
        compare([one, fitted(temperature=0.5)])


def test_the_same_targets_in_another_order_batch_and_precision_are_the_same() -> None:
    x, y = numbers()
    order = torch.randperm(N, generator=torch.Generator().manual_seed(3))
    single = Laplace(network(4).float(), "regression", "all", "full")
    single.fit([(x[order[:7]].float(), y[order[:7]].float())])
    single.fit([(x[order[7:]].float(), y[order[7:]].float())], override=False)
    again = Laplace(network(4), "regression", "all", "ekfac")  # two passes
    again.fit([(x, y)])
    assert len(compare([fitted(), single, again])) == 3


def test_a_fingerprint_is_of_rows_as_a_set() -> None:
    y = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1))
    whole = int(fingerprint(y))
    assert int(fingerprint(y[order])) == whole
    assert joint_fingerprint(int(fingerprint(y[:20])), int(fingerprint(y[20:]))) == whole
    mixed = y.clone()
    mixed[:, 1] = y[order, 1]  # the same columns, other rows
    assert int(fingerprint(mixed)) != whole
    assert int(fingerprint(y.flip(1))) != whole
    labels = torch.tensor([0, 1, 2, 3])
    assert int(fingerprint(labels)) == int(fingerprint(labels.double())) == int(fingerprint(labels.unsqueeze(1)))
    assert int(fingerprint(torch.tensor([1, 1, 1, 3]))) != int(fingerprint(labels))
    assert int(fingerprint(torch.tensor([-0.0]))) == int(fingerprint(torch.tensor([0.0])))


def test_a_fingerprint_is_the_same_in_every_release() -> None:
    """Files hold it, and posteriors from files are compared with others."""
    assert int(fingerprint(torch.tensor([[0.5, -1.25], [2.0, 3.0]]))) == -5527438024628214756
    assert int(fingerprint(torch.tensor([0, 1, 2, 1]))) == 7125265930169284764


def test_files_and_checkpoints_keep_the_fingerprint(tmp_path: Path) -> None:
    one = fitted()
    one.save(tmp_path / "la.lapwing")
    loaded = lapwing.load(tmp_path / "la.lapwing", network(4))
    found = compare({"one": one, "loaded": loaded})
    assert found["one"].log_evidence == found["loaded"].log_evidence
    assert not found.notes
    state = loaded.state_dict()
    del state["fingerprint"]
    loaded.load_state_dict(state)
    (note,) = compare({"one": one, "older": loaded}).notes
    assert "'older'" in note
    x, y = numbers()

    def broken():
        yield x[:5], y[:5]
        yield x[5:10], y[5:10]
        raise KeyboardInterrupt

    rest = [(x[i : i + 5], y[i : i + 5]) for i in range(0, N, 5)]
    again = Laplace(network(4), "regression", "all", "full")
    with pytest.raises(KeyboardInterrupt):
        again.fit(broken(), checkpoint=tmp_path / "fit", checkpoint_every=1)
    again.fit(rest, checkpoint=tmp_path / "fit", checkpoint_every=1)
    assert again.fitted.fingerprint == one.fitted.fingerprint


def test_what_no_comparison_is_made_of() -> None:
    jaxtyping.config.update("jaxtyping_disable", True)  # the library's own words, as users read them
    la = fitted()
    for bad, error, message in (
        ([], OptionError, "at least one"),
        ({}, OptionError, "at least one"),
        ("la", OptionError, "a str; expected a list"),
        (la, OptionError, "expected a list"),
        ([la.model], OptionError, "'Sequential' is a Sequential; expected a fitted Laplace object"),
        ([la, Laplace(la.model, "regression", "all", "full")], NotFittedError, "'Sequential 2' has seen no data"),
        ([fitted(prior_precision=0.0)], CurvatureError, "log evidence of 'Sequential' is -inf"),
    ):
        with pytest.raises(error, match=re.escape(message)):
            compare(bad)
    with pytest.raises(DataError, match="val_loader"):
        compare([la], [])
    counts = iter([10, 20])

    class Fickle:
        def __iter__(self):
            return iter([numbers(next(counts))])

    with pytest.raises(DataError, match=r"\[10, 20\] targets"):
        compare([la, la], Fickle())


# -- what is said ------------------------------------------------------------------------------------------------------


def test_differences_that_are_not_the_networks_are_said() -> None:
    assert compare([fitted(2), fitted(3)]).notes == ()
    (note,) = compare({"a": fitted(structure="kron"), "b": fitted(), "c": fitted(estimator="fisher")}).notes
    assert "kron in 'a', full in 'b', full (fisher) in 'c'" in note
    chosen = torch.tensor([0, 3])
    las = {"a": fitted(subset="last_layer"), "b": fitted(), "c": fitted(subset="subnetwork", subnetwork_indices=chosen)}
    found = compare(las)
    assert "the last layer in 'a', all weights in 'b', a sub-network in 'c'" in found.notes[0]
    assert [row.parameters for row in found] == [5, 21, 2]
    assert {row.network_parameters for row in found} == {21}
    assert "5 of 21" in str(found)
    (note,) = compare([las["a"], las["a"]]).notes
    assert "Random are the last layer:" in note
    (note,) = compare({"a": fitted(), "b": fitted(task="heteroscedastic")}).notes
    assert "Gaussian in 'a', HeteroscedasticGaussian in 'b'" in note
    (note,) = compare([fitted(temperature=0.5), fitted(temperature=0.5)]).notes
    assert "temperature is 0.5" in note


def test_the_table_marks_the_best(generator: torch.Generator) -> None:
    las = {"stiff <b>": fitted(prior_precision=1e4), "fine": fitted(2, prior_precision=torch.tensor([1.0, 2, 1, 1]))}
    found = compare(las, [numbers(40, 1)])
    head, *lines = str(found).splitlines()
    assert repr(found) == str(found)
    assert head.split("  ")[-1] == "noise"
    assert [line[: len("stiff <b>")].strip() for line in lines[:2]] == ["stiff <b>", "fine"]
    assert len({len(line) for line in (head, *lines[:2])}) == 1
    marked = {row.name: line.count("*") for row, line in zip(found, lines, strict=False)}
    assert marked[found.best.name] >= 1
    assert sum(marked.values()) == 2
    assert "1 to 2" in lines[1]
    assert "30 data points" in lines[2]
    html = found._repr_html_()
    assert "stiff &lt;b&gt;" in html
    assert html.count("<tr>") == 3
    assert "held-out" not in str(compare(las))
    assert "noise" not in str(compare([fitted(task="classification")]))


def test_pandas_has_a_row_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    found = compare({"a": fitted(2), "b": fitted(3)})
    frame = found.to_pandas()
    assert list(frame.index) == ["a", "b"]
    assert frame.loc["b", "log_evidence"] == found["b"].log_evidence
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(OptionError, match=r"lapwing\[tabular\]"):
        found.to_pandas()


def test_the_picture_shows_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    las = {f"width ${w}": fitted(w) for w in (1, 2, 4)}
    found = compare(las, [numbers(20, 1)])
    path = tmp_path / "plateau.png"
    figure = found.plot(path, x="parameters", series=dict.fromkeys(las, "tanh"))
    assert path.read_bytes()[:4] == b"\x89PNG"
    evidence, held_out = figure.axes
    line = evidence.lines[0]
    assert list(line.get_xdata()) == [row.parameters for row in found]
    assert list(line.get_ydata()) == [row.log_evidence for row in found]
    lines = {each.get_label(): each for each in held_out.lines}
    assert list(lines["tanh"].get_ydata()) == [row.nll for row in found]
    alone = compare(las).plot()
    assert len(alone.axes) == 1
    assert sorted(t.get_text() for t in alone.axes[0].texts) == [rf"width \${w}" for w in (1, 2, 4)]
    ordered = list(alone.axes[0].lines[0].get_xdata())
    assert ordered == sorted(row.effective_parameters for row in found)
    with pytest.raises(OptionError, match="x is 'size'"):
        found.plot(x="size")
    with pytest.raises(OptionError, match="no entry for"):
        found.plot(series={"width $1": "tanh"})
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(OptionError, match=r"lapwing\[plots\]"):
        found.plot()


def test_it_is_found_in_the_package_and_pandas_is_not_imported_for_it() -> None:
    assert lapwing.compare is compare
    assert isinstance(compare([fitted()]), Comparison)
