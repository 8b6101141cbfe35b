"""compare([...]): several fitted posteriors side by side, by evidence and by held-out data; one row each.

    log evidence   log p(y) of the Laplace approximation, every constant included: larger is better, no held-out data
    effective      gamma: how many of the parameters the data determine
    held-out NLL   mean over targets of -log p(y | x) under the posterior, and of the network alone (MAP)

Evidences compare networks only for the same targets under the same kind of likelihood; anything else is refused. What
makes them differ though the networks do not (another structure of the curvature, another choice of random weights) is
said in `notes`. MacKay's plateau (1992, "A practical Bayesian framework", section 4): with a prior that is tuned per
group, evidence and held-out error stop changing as networks grow, and the effective parameters with them. Cost: one
decomposition of each curvature, and one pass over the held-out data for each posterior.

>>> import torch
>>> from torch import nn
>>> from lapwing import Laplace
>>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
>>> y = 2 * x + 0.1 * torch.sin(90 * x)
>>> def fitted(features):
...     model = nn.Sequential(features, nn.LazyLinear(1))
...     columns = torch.cat([features(x), torch.ones_like(x)], 1)
...     _ = model(x)
...     with torch.no_grad():
...         found = torch.linalg.lstsq(columns, y).solution
...         _ = model[1].weight.copy_(found[:-1].T), model[1].bias.copy_(found[-1])
...     la = Laplace(model, "regression", "all", "full")
...     la.fit([(x, y)])
...     la.optimize_prior_precision(optimize_sigma_noise=True)
...     return la
>>> found = compare({"line": fitted(nn.Identity()), "constant": fitted(nn.Threshold(9, 0))})
>>> found.best.name, found["line"].parameters
('line', 2)
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from math import isfinite
from typing import Any

import torch

from lapwing.errors import CurvatureError, DataError, NotFittedError, OptionError
from lapwing.estimate.data_pass import one_shot
from lapwing.laplace import BaseLaplace, LLLaplace, SubnetLaplace
from lapwing.laplace.calibration import gathered
from lapwing.likelihoods import Gaussian, HeteroscedasticGaussian
from lapwing.linalg.autocast import outside_autocast
from lapwing.params import ParamSpace
from lapwing.reporting.pictures import GREY, LAPLACE, NETWORK, style

AXES = {"effective_parameters": "effective parameters", "parameters": "parameters"}
"""What the horizontal axis of the picture may be, and its label."""
SERIES = (LAPLACE, "#6b8e23", "#b8860b", "#7a4988", "#2f8f83", NETWORK)
"""Colours of the series of the picture."""


@dataclass(frozen=True)
class ComparedRow:
    """One posterior. `parameters` are those treated as random; `nll` is None without held-out data or a closed form."""

    name: str
    parameters: int
    network_parameters: int
    effective_parameters: float | None
    """None where outputs have posteriors of their own (`independent_outputs`), and no number belongs to all."""
    log_evidence: float
    log_evidence_per_point: float
    log_likelihood: float
    """Of the mode: log evidence less this is the log of MacKay's Occam factor."""
    nll: float | None
    network_nll: float | None
    prior_precision: tuple[float, ...]
    sigma_noise: float | None
    structure: str
    random: str


@dataclass(frozen=True)
class Comparison:
    """Rows in the order that they were given in; `str()` is a table, and so is a notebook's display."""

    rows: tuple[ComparedRow, ...]
    n_data: int
    n_held_out: int
    """Targets of the held-out data; zero without them."""
    notes: tuple[str, ...]

    @property
    def best(self) -> ComparedRow:
        """The row with the largest evidence, the first of equals."""
        return max(self.rows, key=lambda row: row.log_evidence)

    @property
    def best_held_out(self) -> ComparedRow | None:
        """The row with the smallest held-out NLL, the first of equals; None without held-out data."""
        scored = [row for row in self.rows if row.nll is not None]
        return min(scored, key=lambda row: row.nll or 0.0) if scored else None

    def __getitem__(self, name: str) -> ComparedRow:
        for row in self.rows:
            if row.name == name:
                return row
        raise OptionError(f"no posterior {name!r} was compared; expected one of {[row.name for row in self.rows]}.")

    def __iter__(self) -> Iterator[ComparedRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        heads, cells = self._cells()
        table = [["", *heads], *([row.name, *cell] for row, cell in zip(self.rows, cells, strict=True))]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = []
        for line in table:
            first, *rest = (f"{text:{side}{width}}" for text, side, width in zip(line, _sides(), widths, strict=False))
            lines.append("  ".join([first, *rest]).rstrip())
        return "\n".join([*lines, self._legend(), *self.notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        heads, cells = self._cells()
        lines = ["<table>", "<tr><th></th>" + "".join(f"<th>{escape(head)}</th>" for head in heads) + "</tr>"]
        for row, texts in zip(self.rows, cells, strict=True):
            inside = "".join(f"<td style='text-align: right'>{escape(text)}</td>" for text in texts)
            name = f"<b>{escape(row.name)}</b>" if row is self.best else escape(row.name)
            lines.append(f"<tr><td style='text-align: left'>{name}</td>{inside}</tr>")
        said = "<br>".join(map(escape, [self._legend(), *self.notes]))
        return "\n".join([*lines, "</table>", f"<p>{said}</p>"])

    def to_pandas(self) -> Any:
        """A data frame with a column for every field of a row, by name."""
        try:
            import pandas as pd
        except ImportError as error:
            raise OptionError(
                "to_pandas needs pandas, which is not installed; expected it. Install it with pip install "
                "'lapwing[tabular]', or read `rows`."
            ) from error
        return pd.DataFrame([asdict(row) for row in self.rows]).set_index("name")

    def plot(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        x: str = "effective_parameters",
        series: Mapping[str, str] | None = None,
    ) -> Any:
        """Evidence against effective parameters, or against x="parameters"; the held-out NLL beside it where known.

        `series` gives rows, by name, to lines: {"tanh 8": "tanh", "tanh 16": "tanh", ...}; without it all rows are one
        line. Returns matplotlib's figure, and writes it to `path` if given.
        """
        with style():
            from matplotlib.figure import Figure

            groups = self._series(x, series)
            scored = self.best_held_out
            figure = Figure(figsize=(5.2 if scored is None else 10, 4), layout="constrained")
            panels = figure.subplots(1, 1 if scored is None else 2, squeeze=False)[0]
            _draw_evidence(panels[0], groups, x, self.best)
            if scored is not None:
                _draw_held_out(panels[1], groups, x, scored)
            if path is not None:
                figure.savefig(os.fspath(path))
        return figure

    def _series(self, x: str, series: Mapping[str, str] | None) -> dict[str, list[ComparedRow]]:
        if x not in AXES:
            raise OptionError(f"x is {x!r}; expected one of {list(AXES)}.")
        groups: dict[str, list[ComparedRow]] = {}
        for row in self.rows:
            if getattr(row, x) is None:
                raise OptionError(
                    f"{row.name!r} has no {AXES[x]} (independent outputs); expected some. Use x='parameters'."
                )
            if series is not None and row.name not in series:
                raise OptionError(f"series has no entry for {row.name!r}; expected one for every row.")
            groups.setdefault("" if series is None else series[row.name], []).append(row)
        return {name: sorted(rows, key=lambda row: getattr(row, x)) for name, rows in groups.items()}

    def _legend(self) -> str:
        held_out = f", smallest NLL on {self.n_held_out:,} held-out targets" if self.n_held_out else ""
        return f"* largest evidence of {self.n_data:,} data points{held_out}"

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        """Heads of the columns and the texts below them, without the column of names."""
        scored, noisy = self.best_held_out, any(row.sigma_noise is not None for row in self.rows)
        heads = ["parameters", "effective", "log evidence", "per point"]
        heads += ["held-out NLL", "network alone"] if scored else []
        heads += ["prior precision", *(["noise"] if noisy else [])]
        cells = []
        for row in self.rows:
            of = f" of {row.network_parameters:,}" if row.network_parameters != row.parameters else ""
            effective = "-" if row.effective_parameters is None else f"{row.effective_parameters:,.1f}"
            texts = [f"{row.parameters:,}{of}", effective, f"{row.log_evidence:,.2f}{_star(row is self.best)}"]
            texts.append(f"{row.log_evidence_per_point:.4f} ")
            if scored:
                texts += [f"{_number(row.nll)}{_star(row is scored)}", f"{_number(row.network_nll)} "]
            texts.append(_span(row.prior_precision))
            if noisy:
                texts.append("-" if row.sigma_noise is None else f"{row.sigma_noise:.4g}")
            cells.append(texts)
        return heads, cells


def compare(
    posteriors: Mapping[str, BaseLaplace] | Iterable[BaseLaplace], val_loader: Iterable[Any] | None = None
) -> Comparison:
    """Tabulates fitted posteriors: evidence, effective parameters, and the held-out NLL where `val_loader` is given.

    `posteriors` is a mapping from names, or a list. They are compared at the prior and noise that they have: tune them
    first (`optimize_prior_precision`), as evidence at a prior that nobody chose says little. Nothing is changed.
    """
    named = _named(posteriors)
    notes = _checked(named)
    batches = list(val_loader) if val_loader is not None and one_shot(val_loader) else val_loader
    rows, counts = [], set()
    for name, la in named.items():
        row, count = _row(name, la, batches)
        rows.append(row)
        counts.add(count)
    if len(counts) > 1:
        raise DataError(
            f"val_loader gave {sorted(counts)} targets to different posteriors; expected the same data in every pass."
        )
    if val_loader is not None and not any(counts):
        kind = type(next(iter(named.values())).distribution).__name__
        notes.append(f"No held-out NLL: predictions of {kind} have no closed form.")
    return Comparison(tuple(rows), next(iter(named.values())).n_data, max(counts), tuple(notes))


# -- what may be compared ----------------------------------------------------------------------------------------------


def _named(posteriors: Any) -> dict[str, BaseLaplace]:
    if isinstance(posteriors, Mapping):
        named = {str(name): la for name, la in posteriors.items()}
    elif isinstance(posteriors, Iterable) and not isinstance(posteriors, (str, bytes)):
        found = list(posteriors)
        kinds = [type(getattr(la, "model", la)).__name__ for la in found]
        alone = len(set(kinds)) == len(kinds)
        named = {kind if alone else f"{kind} {i}": la for i, (kind, la) in enumerate(zip(kinds, found, strict=True), 1)}
    else:
        raise OptionError(
            f"posteriors are a {type(posteriors).__name__}; expected a list of fitted Laplace objects, or a mapping "
            "from names to them."
        )
    if not named:
        raise OptionError("there is nothing to compare; expected at least one fitted Laplace object.")
    for name, la in named.items():
        if not isinstance(la, BaseLaplace):
            raise OptionError(
                f"{name!r} is a {type(la).__name__}; expected a fitted Laplace object. Fit one: "
                "la = Laplace(model, ...); la.fit(train_loader)."
            )
        if la.n_data == 0:
            raise NotFittedError(f"the posterior {name!r} has seen no data; expected fit(train_loader) to be called.")
    return named


def _checked(named: Mapping[str, BaseLaplace]) -> list[str]:
    """Refuses what has no meaning, and says what has less of it."""
    one, *others = named.items()
    for other in others:
        _check_pair(one, other)
    notes = []
    parts = _by(named, _random)
    if set(parts) != {"all weights"}:
        notes.append(
            f"Random are {_listed(parts)}: weights that are not random count as given, and the evidence does not pay "
            "for having learnt them. Compare such evidences only where the same weights are random."
        )
    structures = _by(named, _structure)
    if len(structures) > 1:
        notes.append(
            f"The curvature is {_listed(structures)}: log determinants of different approximations differ by more than "
            "the networks may."
        )
    likelihoods = _by(named, lambda la: type(la.distribution).__name__)
    if len(likelihoods) > 1:
        notes.append(f"The noise is {_listed(likelihoods)}: both are densities of the same targets.")
    heat = float(one[1].temperature)
    if heat != 1:
        notes.append(f"The temperature is {heat:.4g}: the evidence is that of a tempered likelihood.")
    unknown = [repr(name) for name, la in named.items() if la.fitted.fingerprint is None]
    if unknown and others:
        notes.append(
            f"Which targets {', '.join(unknown)} was fitted to is not known (an older file); they are taken to be the "
            "same."
        )
    return notes


def _check_pair(one: tuple[str, BaseLaplace], other: tuple[str, BaseLaplace]) -> None:
    (a, first), (b, second) = one, other
    both = f"{a!r} and {b!r}"
    kinds = [_kind(la) for la in (first, second)]
    if kinds[0] != kinds[1]:
        raise OptionError(
            f"{both} have the likelihoods {kinds[0]} and {kinds[1]}; expected the same, as probabilities of different "
            "kinds of targets do not compare."
        )
    counts = [la.n_data for la in (first, second)]
    prints = [la.fitted.fingerprint for la in (first, second)]
    if counts[0] != counts[1]:
        raise DataError(
            f"{both} were fitted to {counts[0]:,} and {counts[1]:,} data points; expected the same data, as "
            "evidence is the probability of all of them. Fit both to one loader."
        )
    if None not in prints and prints[0] != prints[1]:
        raise DataError(
            f"{both} were fitted to other targets, as many as they are; expected the same, in the same unit: evidence "
            "is the probability of the targets. Fit both to one loader, without a random choice of rows."
        )
    heats = [float(la.temperature) for la in (first, second)]
    if heats[0] != heats[1]:
        raise OptionError(
            f"{both} have the temperatures {heats[0]:.4g} and {heats[1]:.4g}; expected one, as a temperature divides "
            "the log-likelihood in the evidence. Set la.temperature = 1."
        )


def _kind(la: BaseLaplace) -> str:
    """What kind of targets the likelihood is of: densities of numbers compare, however their noise is modelled."""
    if isinstance(la.distribution, (Gaussian, HeteroscedasticGaussian)):
        return "Gaussian noise"
    return type(la.distribution).__name__


def _random(la: BaseLaplace) -> str:
    if isinstance(la, LLLaplace):
        return "the last layer"
    return "a sub-network" if isinstance(la, SubnetLaplace) else "all weights"


def _structure(la: BaseLaplace) -> str:
    name = la.structure if la.recipe.source == "exact" else f"{la.structure} ({la.recipe.source})"
    return f"{name} with independent outputs" if la.recipe.options.get("independent_outputs") else name


def _by(named: Mapping[str, BaseLaplace], what: Any) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, la in named.items():
        found.setdefault(what(la), []).append(name)
    return found


def _listed(found: Mapping[str, Sequence[str]]) -> str:
    if len(found) == 1:
        return next(iter(found))
    return ", ".join(f"{what} in {', '.join(map(repr, names))}" for what, names in found.items())


# -- the figures -------------------------------------------------------------------------------------------------------


@outside_autocast
@torch.no_grad()
def _row(name: str, la: BaseLaplace, batches: Iterable[Any] | None) -> tuple[ComparedRow, int]:
    """The row, and the number of held-out targets."""
    value = float(la.evidence.log_marginal(la.prior, la.sigma_noise, la.temperature))
    if not isfinite(value):
        raise CurvatureError(
            f"the log evidence of {name!r} is {value}; expected a finite number. A prior precision of zero has no "
            "density: tune it with optimize_prior_precision."
        )
    held_out = None if batches is None else gathered(la, batches)
    nll, alone = (None, None) if held_out is None else (-float(held_out.log_prob(c).mean()) for c in (1.0, 0.0))
    row = ComparedRow(
        name=name,
        parameters=la.space.size,
        network_parameters=ParamSpace.of(la.model).size,
        effective_parameters=_effective(la),
        log_evidence=value,
        log_evidence_per_point=value / la.n_data,
        log_likelihood=float(la.log_likelihood),
        nll=nll,
        network_nll=alone,
        prior_precision=tuple(la.prior_precision.tolist()),
        sigma_noise=float(la.sigma_noise) if la.has_noise else None,
        structure=_structure(la),
        random=_random(la),
    )
    return row, 0 if held_out is None else held_out.count


def _effective(la: BaseLaplace) -> float | None:
    if la.recipe.options.get("independent_outputs") and la.n_outputs > 1:
        return None
    return float(la.effective_parameters().clamp_min(0).sum())


# -- the table and the picture -----------------------------------------------------------------------------------------


def _sides() -> Iterator[str]:
    yield "<"
    while True:
        yield ">"


def _star(best: bool) -> str:
    return "*" if best else " "


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _span(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"


def _draw_evidence(axes: Any, groups: Mapping[str, Sequence[ComparedRow]], x: str, best: ComparedRow) -> None:
    for (name, rows), colour in zip(groups.items(), _colours(), strict=False):
        at, values = [getattr(row, x) for row in rows], [row.log_evidence for row in rows]
        axes.plot(at, values, "o-" if name else "o", color=colour, linewidth=1.4, label=name)
        shown = [row for row in rows if row is best or not name]  # lines have their names in the legend
        _names(axes, shown, x, "log_evidence", colour)
    _ring(axes, getattr(best, x), best.log_evidence, "largest evidence")
    _finish(axes, x, "log evidence")


def _draw_held_out(axes: Any, groups: Mapping[str, Sequence[ComparedRow]], x: str, best: ComparedRow) -> None:
    for (name, rows), colour in zip(groups.items(), _colours(), strict=False):
        scored = [(getattr(row, x), row.nll, row.network_nll) for row in rows if row.nll is not None]
        at, nll, alone = zip(*scored, strict=True) if scored else ((), (), ())
        axes.plot(at, alone, "x--" if name else "x", color=colour if name else NETWORK, linewidth=1, alpha=0.7)
        label = name or "with error bars (Laplace)"
        axes.plot(at, nll, "o-" if name else "o", color=colour, linewidth=1.4, label=label)
        shown = [row for row in rows if row.nll is not None and (row is best or not name)]
        _names(axes, shown, x, "nll", colour, below=True)
    together = "" in groups
    line, colour = ("x", NETWORK) if together else ("x--", GREY)
    axes.plot([], [], line, color=colour, linewidth=1, label="network alone (MAP)")
    _ring(axes, getattr(best, x), best.nll, "smallest NLL")
    _finish(axes, x, "held-out NLL per target")


def _names(axes: Any, rows: Sequence[ComparedRow], x: str, y: str, colour: str, below: bool = False) -> None:
    """Above and below in turn, so that neighbours have room."""
    from matplotlib.patheffects import withStroke

    for i, row in enumerate(rows):
        axes.annotate(
            row.name.replace("$", r"\$"),  # a dollar begins a formula
            (getattr(row, x), getattr(row, y)),
            xytext=(0, 9 if (i % 2 == 1) == below else -15),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color=colour,
            path_effects=[withStroke(linewidth=2.5, foreground="white")],
        )


def _colours() -> Iterator[str]:
    while True:
        yield from SERIES


def _ring(axes: Any, x: float | int, y: float | None, label: str) -> None:
    axes.plot([x], [y], "o", markersize=13, markerfacecolor="none", markeredgecolor=GREY, label=label)


def _finish(axes: Any, x: str, what: str) -> None:
    axes.set(xlabel=AXES[x], ylabel=what)
    if x == "parameters":
        axes.set_xscale("log")
    axes.margins(x=0.1, y=0.15)
    axes.legend(loc="best")
