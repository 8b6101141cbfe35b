"""C20: with BatchNorm the evidence at the trained weights takes too small a prior precision; at theta* it does not.

A regression in one dimension with a gap in the inputs, a network with two hidden layers and BatchNorm, the full
posterior over its weights. Precision and noise by the evidence, taken at the trained weights and at the linear mode
theta*, and the pair with the best held-out likelihood as the yardstick. Every seed has a function, data and initial
weights of its own.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import log10, pi
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import COLOURS, Checks, Experiment, Figures

from lapwing import Laplace
from lapwing.laplace import BaseLaplace

DOUBLE = torch.float64
FACTOR = 10
"""What "far too small" is taken for: the source's pictures go from a precision of 100 down to 0.1, the evidence's."""


@dataclass(frozen=True)
class Data:
    """Inputs [N, 1] and targets [N, 1] for training; held-out inputs over the whole range, and a line to draw.

    `test` and `line` are the means and variances of the function there, given the data: the function was drawn from a
    Gaussian process that is known, so that the held-out likelihood is to be had for all functions that fit the data,
    and does not depend on which one was drawn.
    """

    x: Tensor
    y: Tensor
    x_test: Tensor
    test: tuple[Tensor, Tensor]
    inside: Tensor
    """Which of the held-out inputs lie in the gap."""
    x_line: Tensor
    line: tuple[Tensor, Tensor]


def kernel(a: Tensor, b: Tensor, length: float) -> Tensor:
    """Matern-5/2 of unit variance."""
    distance = 5**0.5 * torch.cdist(a, b) / length
    return (1 + distance + distance.square() / 3) * torch.exp(-distance)


def data(config: dict[str, Any], generator: torch.Generator) -> Data:
    (low, left), (right, high) = config["clusters"]
    each, length = config["points"] // 2, config["length"]
    uniform = torch.rand(2 * each, 1, generator=generator, dtype=DOUBLE)
    x = torch.cat([low + (left - low) * uniform[:each], right + (high - right) * uniform[each:]])
    covariance = kernel(x, x, length) + config["noise"] ** 2 * torch.eye(len(x), dtype=DOUBLE)
    root = torch.linalg.cholesky(covariance)
    y = root @ torch.randn(len(x), 1, generator=generator, dtype=DOUBLE)

    def given_data(where: Tensor) -> tuple[Tensor, Tensor]:
        cross = kernel(where, x, length)
        explained = torch.linalg.solve_triangular(root, cross.T, upper=False).square().sum(0)
        return cross @ torch.cholesky_solve(y, root), (1 - explained).unsqueeze(1)

    x_test = torch.linspace(low, high, config["test_points"], dtype=DOUBLE).unsqueeze(1)
    line = torch.linspace(low - 0.5, high + 0.5, 241, dtype=DOUBLE).unsqueeze(1)
    inside = ((x_test > left) & (x_test < right)).flatten()
    return Data(x, y, x_test, given_data(x_test), inside, line, given_data(line))


def network(hidden: int, activation: str) -> nn.Sequential:
    """1-hidden-hidden-1. BatchNorm follows the hidden layers, which therefore have no bias."""
    layers = [
        *(nn.Linear(1, hidden, bias=False), nn.BatchNorm1d(hidden), getattr(nn, activation)()),
        *(nn.Linear(hidden, hidden, bias=False), nn.BatchNorm1d(hidden), getattr(nn, activation)()),
        nn.Linear(hidden, 1),
    ]
    return nn.Sequential(*layers).double()


def train(model: nn.Module, x: Tensor, y: Tensor, config: dict[str, Any]) -> None:
    """Adam on the squared error of all data, without weight decay; then running statistics that are the data's."""
    optimiser = torch.optim.Adam(model.parameters(), config["learning_rate"])
    model.train()
    for _ in range(config["steps"]):
        optimiser.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimiser.step()
    optimiser.zero_grad()
    with torch.no_grad():
        for _ in range(200):
            model(x)
    model.eval()


def expected_nll(mean: Tensor, variance: Tensor, d: Data, noise: float) -> Tensor:
    """-log N(y | mean, variance) at the held-out inputs [N], in expectation over the targets that fit the data."""
    centre, spread = d.test
    squares = (mean - centre).square() + spread + noise**2
    return (0.5 * (2 * pi * variance).log() + squares / (2 * variance)).flatten()


def predicted(la: BaseLaplace, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean [N, 1] and variance [N, 1] of new targets, the noise included."""
    mean, variance = la(x)
    return mean, variance.squeeze(-1) + float(la.sigma_noise) ** 2


def scores(la: BaseLaplace, d: Data, noise: float) -> dict[str, float]:
    mean, variance = predicted(la, d.x_test)
    nll = expected_nll(mean, variance, d, noise)
    deviation = variance.sqrt().flatten()
    return {
        "nll": float(nll.mean()),
        "nll_in_gap": float(nll[d.inside].mean()),
        "nll_in_clusters": float(nll[~d.inside].mean()),
        "deviation_in_gap": float(deviation[d.inside].mean()),
        "deviation_in_clusters": float(deviation[~d.inside].mean()),
    }


def grid(la: BaseLaplace, d: Data, config: dict[str, Any]) -> list[dict[str, float]]:
    """Held-out NLL of every precision, each with the best of several noise levels around the true one.

    With precision lambda and noise sigma the variance of the function is sigma^2 J (H + sigma^2 lambda)^-1 J^T. So the
    posterior at unit noise and precision a has it for all pairs with sigma^2 lambda = a.
    """
    step = 1 / config["grid_per_decade"]
    low, high = (round(each / step) for each in config["grid_exponents"])
    noises = {
        k: config["noise"] * 10 ** (k * step / 2) for k in range(-config["grid_noises"], config["grid_noises"] + 1)
    }
    shift = round(2 * log10(config["noise"]) / step)
    la.sigma_noise = 1.0
    found: dict[int, list[tuple[float, float]]] = {k: [] for k in range(low, high + 1)}
    for k in range(low + shift - config["grid_noises"], high + shift + config["grid_noises"] + 1):
        la.prior_precision = 10 ** (k * step)
        mean, variance = la(d.x_test)
        for number, noise in noises.items():
            if (row := k - shift - number) in found:
                spread = noise**2 * (1 + variance.squeeze(-1))
                found[row].append((float(expected_nll(mean, spread, d, config["noise"]).mean()), noise))
    best = {k: min(pairs) for k, pairs in found.items()}
    return [{"precision": 10 ** (k * step), "noise": noise, "nll": nll} for k, (nll, noise) in best.items()]


def picture(d: Data, found: dict[str, dict[str, Any]], curves: dict[str, tuple[Tensor, Tensor]], rows: list) -> Figure:
    """Two deviations of the predictive with each precision, and the held-out NLL of all precisions."""
    figure, axes = plt.subplots(1, 3, figsize=(12.5, 4.3), width_ratios=(1.2, 1.2, 1))
    names = {"trained": r"the trained weights $\tilde{\theta}$", "linear_mode": r"the linear mode $\theta_*$"}
    colours = {"trained": COLOURS["sampled"], "linear_mode": COLOURS["laplace"]}
    axes[1].sharey(axes[0])
    line = d.x_line.flatten()
    centre, between = d.line[0].flatten(), 2 * d.line[1].flatten().sqrt()
    for axis, (name, title) in zip(axes, names.items(), strict=False):
        mean, variance = (each.flatten() for each in curves[name])
        spread, colour, row = 2 * variance.sqrt(), colours[name], found[name]
        axis.fill_between(line, mean - spread, mean + spread, color=colour, alpha=0.25, lw=0, label="two deviations")
        axis.plot(line, mean, color=colour, label="network")
        for edge in (centre - between, centre + between):
            label = "functions that fit the data" if edge[0] > centre[0] else None
            axis.plot(line, edge, color=COLOURS["exact"], ls="--", lw=1.1, label=label)
        axis.scatter(d.x, d.y, s=7, color=COLOURS["data"], label="data", zorder=3)
        chosen = f"precision {row['precision']:.2g}, noise {row['noise']:.2f}, NLL {row['nll']:.2f}"
        axis.set(title=f"evidence at {title}\n{chosen}", xlabel="$x$")
    axes[0].set_ylabel("$y$")
    low, high = float((centre - between).min()), float((centre + between).max())
    axes[0].set_ylim(low - 1.2 * (high - low), high + 0.8 * (high - low))
    axes[0].legend(loc="lower left", ncols=2)
    last = axes[2]
    last.plot([row["precision"] for row in rows], [row["nll"] for row in rows], color=COLOURS["data"])
    for name, marker in (("trained", "v"), ("linear_mode", "o")):
        place, label = ([found[name]["precision"]], [found[name]["nll"]]), "chosen at " + names[name].split()[-1]
        last.scatter(*place, color=colours[name], marker=marker, s=45, zorder=3, label=label)
    place = [found["best"]["precision"]], [found["best"]["nll"]]
    last.scatter(*place, color=COLOURS["exact"], marker="*", s=90, zorder=2, label="best of the grid")
    last.set(
        xscale="log", xlabel="prior precision", ylabel="held-out NLL", title="every precision,\nwith its best noise"
    )
    last.legend()
    return figure


def one_seed(experiment: Experiment) -> tuple[Figures, Checks]:
    config = experiment.config
    d = data(config, torch.Generator().manual_seed(config["seed"]))
    model = network(config["hidden"], config["activation"])
    train(model, d.x, d.y, config)

    loader = [(d.x, d.y)]
    la = Laplace(model, "regression", "all", "full", sigma_noise=config["noise"])
    la.fit(loader)
    found: dict[str, dict[str, Any]] = {}
    curves: dict[str, tuple[Tensor, Tensor]] = {}
    for place in ("trained", "linear_mode"):
        la.sigma_noise = config["noise"]  # both searches start at the same place
        data_of_the_fit = None if place == "trained" else loader
        la.optimize_prior_precision(optimize_sigma_noise=True, at=place, train_loader=data_of_the_fit)
        assert la.tuned is not None
        weights = la.mean if la.tuned.mode is None else la.tuned.mode.weights
        found[place] = {
            "precision": float(la.prior_precision),
            "noise": float(la.sigma_noise),
            "log_evidence": float(la.tuned.log_marginal),
            "squared_norm": float(weights.square().sum()),
            "converged": la.tuned.converged,
            **scores(la, d, config["noise"]),
        }
        curves[place] = predicted(la, d.x_line)
    if la.tuned is not None and la.tuned.mode is not None:
        found["linear_mode"]["residual"] = la.tuned.mode.relative
    rows = grid(la, d, config)
    found["best"] = min(rows, key=lambda row: row["nll"])
    away = {name: abs(log10(found[name]["precision"] / found["best"]["precision"])) for name in curves}
    trained, mode = found["trained"], found["linear_mode"]
    with torch.no_grad():
        mean = model(d.x)
    ours = {
        "parameters": la.n_params,
        "training_error": float((mean - d.y).square().mean().sqrt()),
        **found,
        "factor": mode["precision"] / trained["precision"],
        "decades_from_best": away,
        "nll_at_precision": {f"{row['precision']:g}": row["nll"] for row in rows[:: config["grid_per_decade"]]},
    }
    small = f"the evidence at the trained weights takes a precision at least {FACTOR} times smaller than at theta*"
    wide = "its precision is below that of the best held-out NLL: uncertainty is overestimated"
    near = "the precision from theta* is at less than half the distance to the best one, in decades"
    held = {
        small: mode["precision"] >= FACTOR * trained["precision"],
        wide: trained["precision"] < found["best"]["precision"],
        "error bars with precision and noise from theta* have the lower held-out NLL": mode["nll"] < trained["nll"],
        near: away["linear_mode"] < away["trained"] / 2,
    }
    if config["seed"] == config["seeds"][0]:
        experiment.save(picture(d, found, curves, rows))
    return ours, held


def main(experiment: Experiment) -> None:
    ours, held = experiment.over_seeds(one_seed)
    source = {
        "claim": "the evidence consistently chose prior precisions that overestimated uncertainty; recommendation 1, "
        "the evidence at the linear model's own optimum, improves error bars",
        "precisions": "pictures at 100, 10, 5, 1 and 0.1; the last has the largest evidence at the trained weights",
        "figures": "none beside the precisions of the pictures: the source does not name its data",
    }
    experiment.write(ours, source, held)


if __name__ == "__main__":
    main(Experiment.of(__file__))
