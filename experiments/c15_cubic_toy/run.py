"""C15: x^3 from 20 points with a 1-7-7-1 network; Laplace posteriors of three structures against HMC.

The network itself at sampled weights (`pred_type="nn"`), with the posterior as it is, and with the pair (N, lambda)
that 20 validation points prefer (`method="pseudo_data"`), which the source calls regularised. Linearised predictions of
the same posteriors are an extra. The HMC reference is hmc.json, made by hmc.py from the same data, network, prior and
noise.
"""

from __future__ import annotations

import json
import sys
from math import pi
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from common import COLOURS, Checks, Experiment, Figures, minimise, squared_norm
from data import draws, grid, truth

from lapwing import Laplace
from lapwing.laplace import BaseLaplace

DOUBLE = torch.float64
# The source adds the prior to the factors (its equation 5.14); the library's own way adds it to their product.
STRUCTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "diagonal": ("diag", {}),
    "kronecker": ("kron", {"damping": True}),
    "full": ("full", {}),
    "kronecker_exact_prior": ("kron", {}),
}
SOURCES = ("diagonal", "kronecker", "full")
Pair = tuple[Tensor, Tensor]


def column(values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=DOUBLE).reshape(-1, 1)


def network(config: dict[str, Any]) -> nn.Sequential:
    layers: list[nn.Module] = []
    inputs = 1
    for width in config["hidden"]:
        layers += [nn.Linear(inputs, width), getattr(nn, config["activation"])()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, 1)).to(DOUBLE)


def trained(data: Pair, config: dict[str, Any]) -> tuple[nn.Module, float]:
    """The best mode of the posterior from several starts, and its loss."""
    x, y = data
    found: list[tuple[float, nn.Module]] = []
    for start in range(config["starts"]):
        torch.manual_seed(1000 * config["seed"] + start)
        model = network(config)

        def loss(model: nn.Module = model) -> Tensor:
            misfit = (model(x) - y).square().sum() / (2 * config["noise"] ** 2)
            return misfit + config["prior_precision"] / 2 * squared_norm(model)

        found.append((minimise(model, loss, config["training_rounds"]), model))
    best = min(range(len(found)), key=lambda number: found[number][0])
    return found[best][1], found[best][0]


def reference(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """hmc.json for this seed; refused if it belongs to another posterior."""
    stored = json.loads((folder / "hmc.json").read_text())
    for name, value in stored["config"].items():
        if name != "hmc" and value != config[name]:
            raise ValueError(f"hmc.json was made with {name} = {value}, config.json has {config[name]}; run hmc.py.")
    return stored["seeds"][str(config["seed"])]


def moments(la: BaseLaplace, x: Tensor, kind: str, config: dict[str, Any]) -> Pair:
    """Mean and deviation [N] of the network's output under the posterior, without the noise."""
    if kind == "glm":
        mean, variance = la(x, diagonal_output=True)
        return mean.squeeze(1), variance.squeeze(1).sqrt()
    generator = torch.Generator().manual_seed(config["seed"])
    outputs = la.functional_samples(x, "nn", config["samples"], generator=generator).squeeze(-1)
    return outputs.mean(0), outputs.std(0)


def scores(found: Pair, target: Pair, test: dict[str, Tensor], config: dict[str, Any]) -> dict[str, float]:
    """Of mean and deviation on the grid against HMC's; "at data" is the range the data are drawn from."""
    x = column(grid(config)).squeeze(1)
    inside, noise = x.abs() <= config["edge"], config["noise"]
    (mean, deviation), (hmc_mean, hmc_deviation) = found, target
    total, hmc_total = ((each.square() + noise**2).sqrt() for each in (deviation, hmc_deviation))
    variance = test["deviation"].square() + noise**2
    return {
        "deviation_at_data": float(deviation[inside].mean()),
        "deviation_outside": float(deviation[~inside].mean()),
        "predictive_deviation_at_data": float(total[inside].mean()),
        "predictive_deviation_over_hmc": float(total[inside].mean() / hmc_total[inside].mean()),
        "difference_of_predictive_deviation": float(
            (total - hmc_total).abs()[inside].mean() / hmc_total[inside].mean()
        ),
        "difference_of_deviation": float(
            (deviation - hmc_deviation).abs()[inside].mean() / hmc_deviation[inside].mean()
        ),
        "difference_of_mean": float(((mean - hmc_mean).abs() / hmc_total)[inside].mean()),
        "error_of_mean": float((mean - x**3)[inside].square().mean().sqrt()),
        "test_nll": float(((test["y"] - test["mean"]).square() / variance + torch.log(2 * pi * variance)).mean() / 2),
    }


def regularise(la: BaseLaplace, validation: Pair, config: dict[str, Any]) -> dict[str, Any]:
    """(N, lambda) by the likelihood of the validation points under sampled networks; whether at an edge of the grid."""
    low, high, size = config["log_counts"]
    counts = config["points"] * torch.logspace(low, high, size, dtype=DOUBLE)
    first, last, steps = config["log_precisions"]
    la.optimize_prior_precision(
        "nn",
        method="pseudo_data",
        val_loader=[validation],
        counts=counts,
        log_prior_prec_min=first,
        log_prior_prec_max=last,
        grid_size=steps,
        n_samples=config["search_samples"],
        generator=torch.Generator().manual_seed(config["seed"]),
    )
    count, precision = config["points"] / float(la.temperature), float(la.prior_precision)
    edges = float(counts.min()), float(counts.max()), 10.0**first, 10.0**last
    return {
        "N": count,
        "lambda": precision,
        "N_times_lambda": count * precision,
        "at_edge": any(abs(each / edge - 1) < 1e-6 for each in (count, precision) for edge in edges),
    }


def study(config: dict[str, Any], folder: Path) -> tuple[dict[str, Any], dict[str, Pair], nn.Module]:
    data = {name: (column(x), column(y)) for name, (x, y) in draws(config, config["seed"]).items()}
    model, loss = trained(data["points"], config)
    x, (x_test, y_test) = column(grid(config)), data["test"]
    stored = reference(config, folder)
    target = torch.tensor(stored["mean"], dtype=DOUBLE), torch.tensor(stored["deviation"], dtype=DOUBLE)
    curves: dict[str, Pair] = {"hmc": target}

    def scored(found: Pair, at_test: Pair) -> dict[str, float]:
        test = {"y": y_test.squeeze(1), "mean": at_test[0], "deviation": at_test[1]}
        return scores(found, target, test, config)

    places = x_test.squeeze(1).numpy(), x.squeeze(1).numpy()
    at_test = tuple(torch.from_numpy(np.interp(*places, each.numpy())) for each in target)
    methods = {"hmc": scored(target, (at_test[0], at_test[1]))}
    chosen = {}
    for name, (structure, options) in STRUCTURES.items():
        la = Laplace(
            model,
            "regression",
            "all",
            structure,
            prior_precision=config["prior_precision"],
            sigma_noise=config["noise"],
            **options,
        )
        la.fit([data["points"]])
        for kind in ("", "_regularised"):
            if kind:
                chosen[name] = regularise(la, data["validation"], config)
            curves[name + kind] = moments(la, x, "nn", config)
            methods[name + kind] = scored(curves[name + kind], moments(la, x_test, "nn", config))
            if not kind:
                curves[f"{name}_linearised"] = moments(la, x, "glm", config)
                methods[f"{name}_linearised"] = scored(curves[f"{name}_linearised"], moments(la, x_test, "glm", config))
    figures = {
        "loss_at_mode": loss,
        "methods": methods,
        "chosen": chosen,
        "hmc_diagnostics": stored["diagnostics"],
    }
    return figures, curves, model


def claims(ours: Figures) -> Checks:
    found, chosen = ours["methods"], ours["chosen"]
    regularised = [f"{name}_regularised" for name in SOURCES]

    def largest(key: str, name: str, others: tuple[str, ...]) -> bool:
        return all(found[name][key] > found[other][key] for other in others)

    others = ("diagonal", "kronecker")
    return {
        "uncertainty grows away from the data, for HMC and every Laplace posterior": all(
            found[name]["deviation_outside"] > found[name]["deviation_at_data"]
            for name in ("hmc", *SOURCES, *regularised)
        ),
        "unregularised, all three overestimate: predictive deviation at the data at least 1.5 times HMC's": all(
            found[name]["predictive_deviation_over_hmc"] > 1.5 for name in SOURCES
        ),
        "unregularised, full is the worst: largest deviation at the data": largest("deviation_at_data", "full", others),
        "unregularised, full has the worst mean: largest error against x^3 at the data": largest(
            "error_of_mean", "full", others
        ),
        "unregularised, diagonal has a larger deviation at the data than Kronecker": largest(
            "deviation_at_data", "diagonal", ("kronecker",)
        ),
        "regularised, all three are close to HMC: predictive deviations differ by less than 25 % at the data": all(
            found[name]["difference_of_predictive_deviation"] < 0.25 for name in regularised
        ),
        "regularised, means are within half of HMC's predictive deviation at the data, on average": all(
            found[name]["difference_of_mean"] < 0.5 for name in regularised
        ),
        "regularised, each is nearer to HMC's deviation than without": all(
            found[f"{name}_regularised"]["difference_of_deviation"] < found[name]["difference_of_deviation"]
            for name in SOURCES
        ),
        "full needs the strongest regularisation, the largest N x lambda; diagonal a larger one than Kronecker": (
            chosen["full"]["N_times_lambda"] > chosen["diagonal"]["N_times_lambda"]
            and chosen["diagonal"]["N_times_lambda"] > chosen["kronecker"]["N_times_lambda"]
        ),
    }


def picture(curves: dict[str, Pair], model: nn.Module, ours: Figures, config: dict[str, Any]) -> Figure:
    figure, rows = plt.subplots(2, 4, figsize=(13, 6.4), sharex=True, sharey=True)
    panels = {
        "hmc": "HMC",
        "diagonal": "diagonal, sampled",
        "kronecker": "Kronecker, sampled",
        "full": "full, sampled",
        "full_linearised": "full, linearised",
        "diagonal_regularised": "diagonal, regularised",
        "kronecker_regularised": "Kronecker, regularised",
        "full_regularised": "full, regularised",
    }
    x = column(grid(config))
    with torch.no_grad():
        at_mode = model(x).squeeze(1)
    for axes, (name, title) in zip(rows.flatten(), panels.items(), strict=True):
        panel(axes, x.squeeze(1), curves[name], name, at_mode, config)
        axes.set_title(f"{title}\ndeviation at the data {ours['methods'][name]['deviation_at_data']:.1f}")
    for axes in rows[-1]:
        axes.set_xlabel("x")
    for axes in rows[:, 0]:
        axes.set_ylabel("y")
    rows[0, 0].set(ylim=(-160, 160), xlim=(-config["extent"], config["extent"]))
    handles, labels = rows[0, 1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5)
    return figure


def panel(axes: Axes, x: Tensor, found: Pair, name: str, at_mode: Tensor, config: dict[str, Any]) -> None:
    mean, deviation = found
    colour = COLOURS["exact"] if name == "hmc" else COLOURS["laplace"]
    colour = colour if "linearised" in name or name == "hmc" else COLOURS["sampled"]
    for count in (3, 2, 1):
        label = "1, 2 and 3 deviations of the output" if count == 1 else None
        low, high = mean - count * deviation, mean + count * deviation
        axes.fill_between(x, low, high, color=colour, alpha=0.17, lw=0, label=label)
    axes.plot(x, truth(x.numpy()), ":", color=COLOURS["other"], label="$x^3$")
    axes.plot(x, at_mode, "--", color=COLOURS["map"], lw=1, label="network at the mode")
    axes.plot(x, mean, color=colour, label="mean")
    axes.scatter(*draws(config, config["seed"])["points"], s=9, color=COLOURS["data"], zorder=3, label="data")


def one_seed(experiment: Experiment) -> tuple[Figures, Checks]:
    config = experiment.config
    ours, curves, model = study(config, experiment.folder)
    if config["seed"] == config["seeds"][0]:
        experiment.save(picture(curves, model, ours, config))
    return ours, claims(ours)


def main(experiment: Experiment) -> None:
    ours, held = experiment.over_seeds(one_seed)
    source = {
        "unregularised": "all of them significantly overestimate the uncertainty in the vicinity of the training data",
        "full": "overestimates the uncertainty significantly more and has a much worse predictive mean; requires much "
        "stronger regularisation parameters N and lambda",
        "diagonal": "hyperparameters larger than those of the Kronecker factored; higher variance",
        "regularised": "all approximations give an overall good fit to the HMC predictive posterior",
        "figures": "none: the source shows a picture (Fig. 5.1)",
    }
    notes = (
        "The source names neither the activation nor the prior precision; ReLU is what its other experiments use. It "
        "takes diagonal and full curvature from one draw per data point, here they are exact."
    )
    experiment.write(ours, source, held, notes=notes)


if __name__ == "__main__":
    main(Experiment.of(__file__))
