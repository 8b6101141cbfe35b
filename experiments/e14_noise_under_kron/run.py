"""E14: intervals of a regression under Kronecker factors. What `lapwing.attach` makes of a noise that is known.

Tables of three kinds with a noise of 0.10, networks of two hidden layers trained with Adam and no weight decay.
`attach(..., structure="kron")` takes prior, noise and width from the exact evidence of up to 1,000 rows.
Beside it: the evidence of the Kronecker factors themselves (a plain `Laplace`, `optimize_prior_precision`), the exact
posterior of all rows in function space, and MAP with the noise of its training residuals or of a validation split.
Every seed has tables, initial weights and batches of its own.
"""

from __future__ import annotations

import sys
from math import log, pi
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import COLOURS, Checks, Experiment, Figures

from lapwing import Laplace, attach
from lapwing.laplace import BaseLaplace

LEVEL = 0.9
QUANTILE = 1.6448536
"""Of a standard normal distribution at 95 %."""
COVERAGE = (0.85, 0.95)
SIGMA = (0.08, 0.13)
METHODS = {
    "attach": ("attach", "laplace"),
    "exact": ("exact", "exact"),
    "kron_alone": ("kron alone", "sampled"),
    "map_training": ("MAP, training", "map"),
    "map_validation": ("MAP, validation", "other"),
}


def truth(kind: str, x: Tensor) -> Tensor:
    """Of order one, for inputs in [-1, 1]."""
    if kind == "waves":
        return torch.sin(4 * x[:, :1]) + 0.6 * x[:, 1:2]
    if kind == "interactions":  # Friedman's, divided by 5
        u = (x + 1) / 2
        value = 10 * torch.sin(pi * u[:, 0] * u[:, 1]) + 20 * (u[:, 2] - 0.5) ** 2 + 10 * u[:, 3] + 5 * u[:, 4]
        return value.unsqueeze(1) / 5 - 2.9
    assert kind == "kinks"
    return 2 * x[:, :1].abs() + torch.maximum(x[:, 1:2], x[:, 2:3]) - 1.3


def observe(kind: dict[str, Any], rows: int, noise: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = 2 * torch.rand(rows, kind["inputs"], generator=generator) - 1
    return x, truth(kind["name"], x) + noise * torch.randn(rows, 1, generator=generator)


def trained(kind: dict[str, Any], x: Tensor, y: Tensor, config: dict[str, Any]) -> nn.Sequential:
    """As users do it: default rate of Adam, batches, no weight decay."""
    torch.manual_seed(config["seed"])
    width, unit = kind["width"], getattr(nn, kind["activation"])
    model = nn.Sequential(nn.Linear(x.shape[1], width), unit(), nn.Linear(width, width), unit(), nn.Linear(width, 1))
    optimiser = torch.optim.Adam(model.parameters())
    done = 0
    while done < config["steps"]:
        for batch in torch.randperm(len(x)).split(config["batch"]):
            optimiser.zero_grad()
            mse_loss(model(x[batch]), y[batch]).backward()
            optimiser.step()
            done += 1
    return model


def score(mean: Tensor, variance: Tensor, sigma: float, y: Tensor) -> dict[str, float]:
    total = variance + sigma**2
    away = (y - mean).square() / total
    return {
        "sigma": sigma,
        "coverage": float((away < QUANTILE**2).double().mean()),
        "nll": float((away + total.log()).mean() + log(2 * pi)) / 2,
        "width": 2 * QUANTILE * float(total.sqrt().mean()),
    }


def of_posterior(la: BaseLaplace, x: Tensor, y: Tensor) -> dict[str, float]:
    mean, variance = la(x, diagonal_output=True)
    assert isinstance(variance, Tensor)
    return score(mean, variance, float(la.sigma_noise), y)


def tuned(model: nn.Module, data: list[tuple[Tensor, Tensor]], structure: str) -> BaseLaplace:
    la = Laplace(model, "regression", "all", structure)
    la.fit(data)
    la.optimize_prior_precision(optimize_sigma_noise=True)
    return la


def residual(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float((model(x) - y).square().mean().sqrt())


def of_map(model: nn.Module, sigma: float, x: Tensor, y: Tensor) -> dict[str, float]:
    with torch.no_grad():
        mean = model(x)
    return score(mean, torch.zeros_like(mean), sigma, y)


def one_table(kind: dict[str, Any], config: dict[str, Any]) -> Figures:
    generator = torch.Generator().manual_seed(config["seed"])
    x, y = observe(kind, kind["rows"], config["noise"], generator)
    new, targets = observe(kind, config["new_rows"], config["noise"], generator)
    model = trained(kind, x, y, config)
    data = list(zip(x.split(config["pass"]), y.split(config["pass"]), strict=True))
    la = attach(model, data, "regression", structure="kron", generator=generator)
    kept = round(0.8 * len(x))
    apart = trained(kind, x[:kept], y[:kept], config)
    with torch.no_grad():
        error = float((model(new) - truth(kind["name"], new)).square().mean().sqrt())
    return {
        "weights": la.n_params,
        "error_of_the_mean": error,
        "temperature": float(la.temperature),
        "attach": of_posterior(la, new, targets),
        "exact": of_posterior(tuned(model, data, "gp"), new, targets),
        "kron_alone": of_posterior(tuned(model, data, "kron"), new, targets),
        "map_training": of_map(model, residual(model, x, y), new, targets),
        "map_validation": of_map(apart, residual(apart, x[kept:], y[kept:]), new, targets),
    }


def within(value: float, bounds: tuple[float, float]) -> bool:
    return bounds[0] <= value <= bounds[1]


def one_seed(experiment: Experiment) -> tuple[Figures, Checks]:
    config = experiment.config
    ours = {kind["name"]: one_table(kind, config) for kind in config["kinds"]}
    held = {}
    for name, found in ours.items():
        low, high = COVERAGE
        held[f"{name}: 90 % intervals of attach cover {low:.0%} to {high:.0%} of new rows, on every fit"] = within(
            found["attach"]["coverage"], COVERAGE
        )
    for name, found in ours.items():
        held[f"{name}: attach finds a noise of {SIGMA[0]} to {SIGMA[1]} where it is 0.10, on every fit"] = within(
            found["attach"]["sigma"], SIGMA
        )
    return ours, held


def main(experiment: Experiment) -> None:
    ours, by_fit = experiment.over_seeds(one_seed)
    low, high = COVERAGE
    held: dict[str, Any] = {}
    for kind in experiment.config["kinds"]:
        name = kind["name"]
        mean = fmean(found[name]["attach"]["coverage"] for found in ours["by_seed"].values())
        claim = f"{name}: 90 % intervals of attach cover {low:.0%} to {high:.0%} of new rows in the mean over seeds"
        held[claim] = within(mean, COVERAGE)
    draw(experiment, ours)
    source = {"claim": "none: this is about lapwing.attach, not a claim of the sources"}
    experiment.write(ours, source, held | by_fit)


def draw(experiment: Experiment, ours: Figures) -> None:
    kinds = [kind["name"] for kind in experiment.config["kinds"]]
    figure, rows = plt.subplots(2, len(kinds), figsize=(4.3 * len(kinds), 7), sharex=True, sharey="row")
    for column, name in zip(rows.T, kinds, strict=True):
        for axes, figure_of in zip(column, ("coverage", "sigma"), strict=True):
            for at, (method, (_, colour)) in enumerate(METHODS.items()):
                values = np.array([found[name][method][figure_of] for found in ours["by_seed"].values()])
                across = at + np.linspace(-0.2, 0.2, len(values))
                axes.plot(across, values, "o", color=COLOURS[colour], markersize=5, alpha=0.7, mew=0)
                axes.plot([at - 0.3, at + 0.3], [values.mean()] * 2, color=COLOURS[colour])
        top, bottom = column
        top.axhspan(*COVERAGE, color="0.9", zorder=0, label="85 to 95 %")
        top.axhline(LEVEL, color="0.5", lw=1, ls=":")
        bottom.axhspan(*SIGMA, color="0.9", zorder=0, label="0.08 to 0.13")
        bottom.axhline(experiment.config["noise"], color="0.5", lw=1, ls=":", label="true noise")
        bottom.set_xticks(range(len(METHODS)), [label for label, _ in METHODS.values()], rotation=25, ha="right")
        top.set_title(f"{name}, {next(k['rows'] for k in experiment.config['kinds'] if k['name'] == name):,} rows")
    rows[0, 0].set_ylabel("share of new rows in 90 % intervals")
    rows[1, 0].set_ylabel("noise (standard deviation)")
    rows[0, 0].legend(loc="lower left")
    rows[1, -1].legend(loc="upper right")
    experiment.save(figure)


if __name__ == "__main__":
    main(Experiment.of(__file__))
