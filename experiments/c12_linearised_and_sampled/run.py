"""C12: linearised and sampled predictions of a Laplace posterior in 1-d regression with a gap in the data.

Two networks (one hidden layer of 50 tanh units; two of 50 ReLU units), trained to the mode of the posterior, prior
precision and noise by the evidence in alternation with training. Then, from one and the same Gaussian over the weights,
the linearised network (`pred_type="glm"`) and the network itself (`pred_type="nn"`). Every seed has data, initial
weights and draws of its own.
"""

from __future__ import annotations

import sys
from math import pi
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import COLOURS, Checks, Experiment, Figures, minimise, squared_norm

from lapwing import Laplace
from lapwing.laplace import BaseLaplace

DOUBLE = torch.float64


def truth(x: Tensor) -> Tensor:
    return torch.sin(2.5 * x) + 0.3 * x


def network(hidden: list[int], activation: str) -> nn.Sequential:
    layers: list[nn.Module] = []
    inputs = 1
    for width in hidden:
        layers += [nn.Linear(inputs, width), {"tanh": nn.Tanh, "relu": nn.ReLU}[activation]()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, 1)).to(DOUBLE)


def observe(config: dict[str, Any], count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs [n, 1] evenly shared by the regions, and noisy targets [n, 1]."""
    share = count // len(config["regions"])
    x = torch.cat(
        [
            low + (high - low) * torch.rand(share, 1, dtype=DOUBLE, generator=generator)
            for low, high in config["regions"]
        ]
    )
    return x, truth(x) + config["noise"] * torch.randn(x.shape, dtype=DOUBLE, generator=generator)


def trained(
    model: nn.Module, data: tuple[Tensor, Tensor], config: dict[str, Any]
) -> tuple[BaseLaplace, list[dict[str, float]]]:
    """Training to the mode and the evidence in turn; the posterior at the end."""
    x, y = data
    precision, sigma, history = config["start_precision"], config["noise"], []

    def loss() -> Tensor:
        return (model(x) - y).square().sum() / (2 * sigma**2) + precision / 2 * squared_norm(model)

    la = None
    for cycle in range(config["cycles"] + 1):
        minimise(model, loss, config["training_rounds"])
        la = Laplace(model, "regression", "all", "full", prior_precision=precision, sigma_noise=sigma)
        la.fit([(x, y)])
        history.append({"precision": precision, "sigma": sigma, "log_evidence": float(la.log_marginal_likelihood())})
        if cycle < config["cycles"]:
            la.optimize_prior_precision(method="mackay", init_prior_prec=precision, optimize_sigma_noise=True)
            precision, sigma = float(la.prior_precision), float(la.sigma_noise)
    assert la is not None
    return la, history


def scores(mean: Tensor, variance: Tensor, y: Tensor, sigma: float) -> dict[str, float]:
    """Error and negative log density per point of N(mean, variance + sigma^2)."""
    total = variance + sigma**2
    density = ((y - mean).square() / total + torch.log(2 * pi * total)).mean() / 2
    return {"rmse": float((y - mean).square().mean().sqrt()), "nll": float(density)}


def study(which: dict[str, Any], config: dict[str, Any], data: dict[str, tuple[Tensor, Tensor]]) -> dict[str, Any]:
    torch.manual_seed(config["seed"])
    model = network(which["hidden"], which["activation"])
    la, history = trained(model, data["train"], config)
    sigma = float(la.sigma_noise)
    generator = torch.Generator().manual_seed(config["seed"] + 1)
    x, y = data["held_out"]
    (low, high), edge = config["gap"], config["regions"][-1][1] * 1.5
    grid = torch.linspace(-edge, edge, config["grid"], dtype=DOUBLE).unsqueeze(1)

    mean, variance = la(grid, diagonal_output=True)
    draws = la.functional_samples(grid, "glm", config["samples"], generator=generator)
    sampled = la.functional_samples(grid, "nn", config["samples"], generator=generator)
    at_data = torch.zeros(len(grid), dtype=torch.bool)
    for start, stop in config["regions"]:
        at_data |= ((grid >= start) & (grid <= stop)).squeeze(1)
    in_gap = ((grid >= low) & (grid <= high)).squeeze(1)
    deviation = variance.sqrt().squeeze(1)
    total = (variance + sigma**2).sqrt()
    # "off scale": away from the truth by more than `off_scale` times the spread of the training targets
    far = config["off_scale"] * float(data["train"][1].std())

    inputs = data["train"][0]

    def off_scale(kind: str) -> float:
        away = la.functional_samples(inputs, kind, config["samples"], generator=generator) - truth(inputs)
        return float((away.squeeze(-1).abs().amax(1) > far).double().mean())

    def off_scale_between(functions: Tensor) -> float:
        away = (functions - truth(grid)).squeeze(-1)[:, at_data].abs().amax(1)
        return float((away > far).double().mean())

    mean_glm, variance_glm = la(x, diagonal_output=True)
    linear_scores = scores(mean_glm, variance_glm, y, sigma)
    mean_nn, variance_nn = la(x, "nn", n_samples=config["samples"], generator=generator)
    sampled_scores = scores(mean_nn, variance_nn, y, sigma)
    sampled_deviation = sampled.std(0).squeeze(1)
    figures = {
        "parameters": la.n_params,
        "prior_precision": float(la.prior_precision),
        "sigma_noise": sigma,
        "effective_parameters": float(la.effective_parameters().sum()),
        "log_evidence": history[-1]["log_evidence"],
        "training_and_evidence": history,
        "linearised": linear_scores
        | {
            "deviation_at_data": float(deviation[at_data].median()),
            "deviation_in_gap": float(deviation[in_gap].max()),
            "growth_in_gap": float(deviation[in_gap].max() / deviation[at_data].median()),
            "truth_within_two_deviations_in_gap": float(
                ((mean - truth(grid)).abs() <= 2 * total).squeeze(1)[in_gap].double().mean()
            ),
            "functions_off_scale_at_data": off_scale("glm"),
            "functions_off_scale_anywhere_in_regions": off_scale_between(draws),
        },
        "sampled": sampled_scores
        | {
            "deviation_at_data": float(sampled_deviation[at_data].median()),
            "deviation_in_gap": float(sampled_deviation[in_gap].max()),
            "growth_in_gap": float(sampled_deviation[in_gap].max() / sampled_deviation[at_data].median()),
            "functions_off_scale_at_data": off_scale("nn"),
            "functions_off_scale_anywhere_in_regions": off_scale_between(sampled),
        },
        "ratio_of_variances_at_data": float((sampled.var(0) / variance).squeeze(1)[at_data].median()),
    }
    return {"figures": figures, "grid": grid, "mean": mean, "total": total, "draws": draws, "sampled": sampled}


def claims(ours: Figures) -> Checks:
    held = {}
    for name, each in ours.items():
        linear, sampled = each["linearised"], each["sampled"]
        held[f"{name}: linearised error bars grow in the gap (more than twice)"] = linear["growth_in_gap"] > 2
        held[f"{name}: sampled functions are off scale at the data (most of them), linearised are not"] = (
            sampled["functions_off_scale_at_data"] > 0.5 and linear["functions_off_scale_at_data"] < 0.01
        )
        held[f"{name}: linearised functions stay on scale everywhere in the regions with data"] = (
            linear["functions_off_scale_anywhere_in_regions"] < 0.01
        )
        held[f"{name}: linearised has the better held-out NLL"] = linear["nll"] < sampled["nll"]
        held[f"{name}: linearised has the better held-out RMSE"] = linear["rmse"] < sampled["rmse"]
    return held


def one_seed(experiment: Experiment) -> tuple[Figures, Checks]:
    config = experiment.config
    generator = torch.Generator().manual_seed(config["seed"])
    data = {"train": observe(config, config["points"], generator)}
    data["held_out"] = observe(config, config["held_out"], generator)
    studies = {each["name"]: study(each, config, data) for each in config["networks"]}
    if config["seed"] == config["seeds"][0]:
        draw(experiment, studies, data["train"])
    ours = {name: each["figures"] for name, each in studies.items()}
    return ours, claims(ours)


def main(experiment: Experiment) -> None:
    ours, held = experiment.over_seeds(one_seed)
    source = {"linearised": "uncertainty high where training data are lacking", "sampled": "most of it is off scale"}
    notes = "The source gives the two networks but neither data nor hyper-parameters; both are ours."
    experiment.write(ours, source, held, notes=notes)


def draw(experiment: Experiment, studies: dict[str, Any], train: tuple[Tensor, Tensor]) -> None:
    figure, rows = plt.subplots(
        2, len(studies), figsize=(5.6 * len(studies), 8), sharex=True, sharey=True, squeeze=False
    )
    for (name, found), (above, below) in zip(studies.items(), rows.T, strict=True):
        grid, mean = found["grid"].squeeze(1), found["mean"].squeeze(1)
        total = found["total"].squeeze(1)
        for deviations in (2, 1):
            above.fill_between(
                grid, mean - deviations * total, mean + deviations * total, color=COLOURS["laplace"], alpha=0.18, lw=0
            )
        above.plot(grid, found["draws"][:12].squeeze(-1).mT, color=COLOURS["laplace"], lw=0.5, alpha=0.6)
        above.set_title(f"{name}: linearised (1 and 2 deviations)")
        below.plot(grid, found["sampled"][:25].squeeze(-1).mT, color=COLOURS["sampled"], lw=0.6, alpha=0.55)
        below.plot([], [], color=COLOURS["sampled"], lw=0.8, label="network at sampled weights")
        below.plot(grid, found["sampled"].mean(0).squeeze(1), color=COLOURS["sampled"], lw=2.4, label="their average")
        below.set_title(f"{name}: the network itself, sampled")
        above.plot([], [], color=COLOURS["laplace"], lw=0.8, label="samples of the linearised network")
        for axes in (above, below):
            decorate(axes, grid, mean, train)
    for row in rows:
        row[0].set_ylabel("y")
    for axes in rows[-1]:
        axes.set_xlabel("x")
    rows[0, 0].set(ylim=(-5, 7))
    experiment.save(figure)


def decorate(axes: Axes, grid: Tensor, mean: Tensor, train: tuple[Tensor, Tensor]) -> None:
    axes.plot(grid, mean, color=COLOURS["map"], label="network at the mode")
    axes.plot(grid, truth(grid), ":", color=COLOURS["exact"], label="truth")
    axes.scatter(*train, s=9, color=COLOURS["data"], zorder=3, label="data")
    axes.legend(loc="upper left", ncols=2)


if __name__ == "__main__":
    main(Experiment.of(__file__))
