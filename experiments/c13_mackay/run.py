"""C13: MacKay's updates of prior precision alpha and noise precision beta, in alternation with training.

alpha = gamma / theta^T theta and beta = (N - gamma) / SSE, with gamma = sum lambda / (lambda + alpha) over the
eigenvalues of the Gauss-Newton matrix. A 1-6-1 network with and without them, whether they end where the gradient of
the evidence vanishes, and gamma as the network grows. Every seed has data and initial weights of its own. Without a
prior the training has no mode to come to, and where it ends depends on the last digit: errors are compared as medians
over restarts.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from math import log
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import COLOURS, Checks, Experiment, Figures, minimise, squared_norm

from lapwing import Laplace
from lapwing.laplace import BaseLaplace

DOUBLE = torch.float64
GRID = torch.linspace(-1, 1, 401, dtype=DOUBLE).unsqueeze(1)


def network(width: int, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 1)).to(DOUBLE)


def observe(config: dict[str, Any], count: int, seed: int) -> tuple[Tensor, Tensor]:
    x = torch.linspace(-1, 1, count, dtype=DOUBLE).unsqueeze(1)
    noise = torch.randn(x.shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))
    return x, torch.sin(config["frequency"] * x) + config["noise"] * noise


@dataclass
class Run:
    """A network under training: its hyper-parameters, and what each cycle found before it changed them."""

    model: nn.Sequential
    data: tuple[Tensor, Tensor]
    precision: float
    sigma: float
    rounds: int
    history: list[dict[str, float]] = field(default_factory=list)
    at_rest: bool = False

    def train(self) -> BaseLaplace:
        """To the mode for these hyper-parameters; the posterior there."""
        x, y = self.data
        minimise(
            self.model,
            lambda: (
                (self.model(x) - y).square().sum() / (2 * self.sigma**2) + self.precision / 2 * squared_norm(self.model)
            ),
            self.rounds,
        )
        la = Laplace(self.model, "regression", "all", "full", prior_precision=self.precision, sigma_noise=self.sigma)
        la.fit([self.data])
        return la

    def note(self, la: BaseLaplace) -> None:
        logs = torch.tensor([log(self.precision), -2 * log(self.sigma)], dtype=DOUBLE, requires_grad=True)
        value = la.log_marginal_likelihood(logs[0].exp(), (-logs[1] / 2).exp())
        (slope,) = torch.autograd.grad(value, logs)
        self.history.append(
            {
                "alpha": self.precision,
                "beta": self.sigma**-2,
                "gamma": float(la.effective_parameters().sum()),
                "log_evidence": float(value.detach()),
                "gradient_norm": float(slope.norm()),
            }
        )

    def one_update(self, la: BaseLaplace) -> tuple[float, float]:
        """The source's step, written out."""
        x, y = self.data
        gamma = float(la.effective_parameters().sum())
        with torch.no_grad():
            squares = float((self.model(x) - y).square().sum())
            return gamma / float(squared_norm(self.model)), (squares / (len(y) - gamma)) ** 0.5

    def fixed_point(self, la: BaseLaplace) -> tuple[float, float]:
        """The library's: the updates repeated until they stand still at this curvature."""
        la.optimize_prior_precision(method="mackay", init_prior_prec=self.precision, optimize_sigma_noise=True)
        return float(la.prior_precision), float(la.sigma_noise)

    def until_rest(self, cycles: int, rest: float, library: bool = True) -> BaseLaplace:
        for _ in range(cycles):
            la = self.train()
            self.note(la)
            precision, sigma = self.fixed_point(la) if library else self.one_update(la)
            change = max(abs(log(precision / self.precision)), abs(log(sigma / self.sigma)))
            self.precision, self.sigma = precision, sigma
            if change < rest:
                self.at_rest = True
                break
        la = self.train()
        self.note(la)
        return la


def starts(config: dict[str, Any], restarts: int) -> range:
    """Seeds of initial weights, another lot for every seed of the run."""
    return range(100 * config["seed"], 100 * config["seed"] + restarts)


def new_run(config: dict[str, Any], width: int, seed: int, data: tuple[Tensor, Tensor]) -> Run:
    model = network(width, seed)
    return Run(model, data, config["start_precision"], config["start_sigma"], config["training_rounds"])


def error(config: dict[str, Any], model: nn.Module) -> float:
    """Root mean square distance from the truth, without noise."""
    with torch.no_grad():
        return float((model(GRID) - torch.sin(config["frequency"] * GRID)).square().mean().sqrt())


def slope_with_training(run: Run, step: float = 0.02) -> list[float]:
    """d log evidence / d (log alpha, log beta) when the weights follow: by retraining on both sides."""
    slopes = []
    start = {name: value.clone() for name, value in run.model.state_dict().items()}
    for which in ("alpha", "beta"):
        values = []
        for sign in (1, -1):
            run.model.load_state_dict(start)
            factor = torch.tensor(sign * step).exp().item()
            precision = run.precision * (factor if which == "alpha" else 1)
            sigma = run.sigma * (factor**-0.5 if which == "beta" else 1)
            moved = Run(run.model, run.data, precision, sigma, run.rounds)
            values.append(float(moved.train().log_marginal_likelihood()))
        slopes.append((values[0] - values[1]) / (2 * step))
    run.model.load_state_dict(start)
    return slopes


def small(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The 1-6-1 network: without regularisation, and with it in two schedules."""
    data = observe(config, config["small_points"], config["seed"])
    x, y = data
    width, seeds = config["small_width"], starts(config, config["small_restarts"])

    plain = {seed: network(width, seed) for seed in seeds}
    losses = {
        seed: minimise(model, lambda model=model: (model(x) - y).square().sum(), 5 * config["training_rounds"])
        for seed, model in plain.items()
    }
    unregularised = plain[min(losses, key=lambda seed: losses[seed])]

    runs = {seed: new_run(config, width, seed, data) for seed in seeds}
    posteriors = {seed: run.until_rest(config["cycles"], config["rest"]) for seed, run in runs.items()}
    best = max(seeds, key=lambda seed: runs[seed].history[-1]["log_evidence"])
    run, la = runs[best], posteriors[best]
    by_hand = new_run(config, width, best, data)
    by_hand.until_rest(config["cycles"], config["rest"], library=False)
    mean, variance = la(GRID, diagonal_output=True)
    figures = {
        "points": len(y),
        "weights": la.n_params,
        "unregularised_smallest_train_squares": min(losses.values()),
        "unregularised_median_error_over_restarts": float(
            torch.tensor([error(config, model) for model in plain.values()]).median()
        ),
        "regularised": {
            "train_squares": float((run.model(x) - y).detach().square().sum()),
            "error": error(config, run.model),
            "gamma": run.history[-1]["gamma"],
            "alpha": run.precision,
            "sigma": run.sigma,
            "cycles": len(run.history),
            "at_rest": run.at_rest,
        },
        "regularised_median_error_over_restarts": float(
            torch.tensor([error(config, each.model) for each in runs.values()]).median()
        ),
        "gradient_norm_first_last": [run.history[0]["gradient_norm"], run.history[-1]["gradient_norm"]],
        "gradient_norm_first_last_one_update_per_cycle": [
            by_hand.history[0]["gradient_norm"],
            by_hand.history[-1]["gradient_norm"],
        ],
        "cycles_one_update_per_cycle": len(by_hand.history),
        "alpha_sigma_one_update_per_cycle": [by_hand.precision, by_hand.sigma],
        "slope_when_weights_follow": slope_with_training(run),
        "runs_at_rest": sum(each.at_rest for each in runs.values()),
    }
    with torch.no_grad():
        shown = {"data": data, "plain": unregularised(GRID), "mean": mean, "variance": variance + run.sigma**2}
    return figures, shown | {"library": run.history, "by hand": by_hand.history}


def by_width(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The run of highest evidence for each width, and gamma of all."""
    data = observe(config, config["points"], 1000 + config["seed"])
    rows = []
    for width in config["widths"]:
        runs = [new_run(config, width, seed, data) for seed in starts(config, config["restarts"])]
        for run in runs:
            run.until_rest(config["cycles"], config["rest"])
        best = max(runs, key=lambda run: run.history[-1]["log_evidence"])
        rows.append(
            {
                "width": width,
                "weights": 3 * width + 1,
                **best.history[-1],
                "error": error(config, best.model),
                "at_rest": best.at_rest,
                "gamma_of_all_runs": [run.history[-1]["gamma"] for run in runs],
                "evidence_of_all_runs": [run.history[-1]["log_evidence"] for run in runs],
            }
        )
        print(f"width {width}: gamma {rows[-1]['gamma']:.2f} of {rows[-1]['weights']}", flush=True)
    return rows


def one_seed(experiment: Experiment) -> tuple[Figures, Checks]:
    config = experiment.config
    figures, shown = small(config)
    rows = by_width(config)
    wide = [row for row in rows if row["width"] >= 8]
    last = figures["gradient_norm_first_last"][1]
    hand = figures["gradient_norm_first_last_one_update_per_cycle"][1]
    held = {
        "the updates end at a stationary point of the evidence (gradient norm below 1e-3)": last < 1e-3 and hand < 1e-3,
        "the 1-6-1 network is regularised: closer to the truth than without (medians over restarts)": figures[
            "regularised_median_error_over_restarts"
        ]
        < figures["unregularised_median_error_over_restarts"],
        "gamma stops growing: from width 8 on it stays within 10%": max(row["gamma"] for row in wide)
        < 1.1 * min(row["gamma"] for row in wide),
        "a network that is too small uses most of its weights (gamma above 75% of them)": max(
            row["gamma"] / row["weights"] for row in rows
        )
        > 0.75,
    }
    if config["seed"] == config["seeds"][0]:
        draw(experiment, shown, rows)
    return {"1-6-1": figures, "by_width": {str(row["width"]): row for row in rows}}, held


def main(experiment: Experiment) -> None:
    ours, held = experiment.over_seeds(one_seed)
    source = {
        "1-6-1": "smooth with Bayesian regularisation, over-fitted without (picture)",
        "gamma": "near the number of weights: too small a network; the same in a larger network: it was enough",
    }
    notes = "The source gives neither its data nor its figures; a sine with noise stands in for its picture."
    experiment.write(ours, source, held, notes=notes)


def draw(experiment: Experiment, shown: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.6))
    x = GRID.squeeze(1)
    mean, deviation = shown["mean"].squeeze(1), shown["variance"].sqrt().squeeze(1)
    frequency = experiment.config["frequency"]
    left.fill_between(x, mean - 2 * deviation, mean + 2 * deviation, color=COLOURS["laplace"], alpha=0.2, lw=0)
    left.plot(x, shown["plain"].squeeze(1), color=COLOURS["sampled"], label="without regularisation")
    left.plot(x, mean, color=COLOURS["laplace"], label="MacKay's updates (2 deviations)")
    left.plot(x, torch.sin(frequency * x), ":", color=COLOURS["exact"], label="truth")
    left.scatter(*shown["data"], s=14, color=COLOURS["data"], zorder=3, label="data")
    left.set(xlabel="x", ylabel="y", ylim=(-2.2, 3.2), title="1-6-1 network")
    left.legend(loc="upper center", ncols=2)

    for name, label, colour in (
        ("by hand", "one update per cycle", "other"),
        ("library", "updates to rest per cycle", "laplace"),
    ):
        norms = [each["gradient_norm"] for each in shown[name]]
        middle.semilogy(range(len(norms)), norms, "o-", markersize=3, color=COLOURS[colour], label=label)
    middle.set(xlabel="cycles of training and updates", title="gradient of the evidence")
    middle.set_ylabel(r"norm of d log Z / d (log $\alpha$, log $\beta$)")
    middle.legend()

    weights = [row["weights"] for row in rows]
    right.plot(weights, weights, "--", color="0.6", label="all weights determined")
    for row in rows:
        right.plot(
            [row["weights"]] * len(row["gamma_of_all_runs"]), row["gamma_of_all_runs"], ".", color="0.6", markersize=5
        )
    right.plot([], [], ".", color="0.6", label="every restart")
    right.plot(weights, [row["gamma"] for row in rows], "o-", color=COLOURS["laplace"], label="highest evidence")
    right.set(xlabel="weights of the network", ylabel=r"$\gamma$, effective parameters", title="growing the network")
    right.set_ylim(0, 1.6 * max(row["gamma"] for row in rows))
    right.legend(loc="upper right")
    experiment.save(figure)


if __name__ == "__main__":
    main(Experiment.of(__file__))
