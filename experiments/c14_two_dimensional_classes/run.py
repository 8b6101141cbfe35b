"""C14: three classes in the plane. MAP is over-confident far from the data, linearised Laplace is not; probit meets MC.

Three arms of a pinwheel that overlap a little, a small network with softmax, the full posterior over all weights.
Training and the prior precision by the evidence alternate, as in the source's "practical implementation". Every seed
has data, initial weights and draws of its own.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from math import pi
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import Checks, Experiment, Figures, minimise, squared_norm

from lapwing import Laplace
from lapwing.laplace import BaseLaplace
from lapwing.metrics import accuracy, calibration_error, nll

CLASSES = 3
DOUBLE = torch.float64
CLASS_COLOURS = ("#D55E00", "#0072B2", "#009E73")


def pinwheel(n: int, config: dict[str, Any], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Points [n, 2] on three twisted arms of length about 4, and their classes."""
    y = torch.arange(n) % CLASSES
    along = 1 + config["radial"] * torch.randn(n, generator=generator, dtype=DOUBLE)
    across = config["tangential"] * torch.randn(n, generator=generator, dtype=DOUBLE)
    angle = 2 * pi * y / CLASSES + config["twist"] * torch.exp(along)
    cos, sin = angle.cos(), angle.sin()
    return 2 * torch.stack([along * cos - across * sin, along * sin + across * cos], dim=1), y


def network(hidden: list[int], activation: str) -> nn.Sequential:
    sizes = [2, *hidden]
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), getattr(nn, activation)()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], CLASSES)).double()


def trained(model: nn.Module, x: Tensor, y: Tensor, rounds: int) -> tuple[BaseLaplace, list[float]]:
    """The network at the mode of a prior whose precision the evidence has chosen; the precisions on the way."""
    la = Laplace(model, "classification", "all", "full")
    precisions = [1.0]
    for _ in range(rounds):
        minimise(model, lambda: cross_entropy(model(x), y, reduction="sum") + precisions[-1] / 2 * squared_norm(model))
        la.fit([(x, y)])
        la.optimize_prior_precision(method="marglik", init_prior_prec=precisions[-1])
        precisions.append(float(la.prior_precision))
    return la, precisions


def probabilities(la: BaseLaplace, x: Tensor, **arguments: Any) -> Tensor:
    found = la(x, **arguments)
    assert isinstance(found, Tensor)
    return found


def predictions(la: BaseLaplace, x: Tensor, config: dict[str, Any]) -> dict[str, Tensor]:
    """Class probabilities [N, 3] of MAP, of the closed forms, and of Monte Carlo."""
    generator = torch.Generator().manual_seed(config["seed"])
    found: dict[str, list[Tensor]] = {"map": [], "probit": [], "probit_full": [], "mc": []}
    for part in x.split(config["batch"]):
        with torch.no_grad():
            found["map"].append(la.model(part).softmax(-1))
        for link in ("probit", "probit_full"):
            found[link].append(probabilities(la, part, link_approx=link))
        draws = {"n_samples": config["samples"], "generator": generator}
        found["mc"].append(probabilities(la, part, link_approx="mc", **draws))
    return {name: torch.cat(parts) for name, parts in found.items()}


def disagreement(a: Tensor, b: Tensor) -> dict[str, float]:
    gap = (a - b).abs()
    return {
        "max": float(gap.max()),
        "mean": float(gap.mean()),
        "same_class": float((a.argmax(-1) == b.argmax(-1)).double().mean()),
    }


def common_share(la: BaseLaplace, x: Tensor) -> float:
    """Share of the logits' variance that moves all of them together, which no data can see and softmax ignores."""
    with torch.no_grad():
        covariance = la.posterior.covariance(la.linearise(x))
    together = covariance.sum((-2, -1)) / CLASSES
    return float((together / covariance.diagonal(dim1=-2, dim2=-1).sum(-1)).mean())


def picture(x: Tensor, y: Tensor, plane: dict[str, Tensor], far: float, config: dict[str, Any]) -> Figure:
    """Confidence max_c p(c) of MAP, probit and Monte Carlo."""
    figure, axes = plt.subplots(1, 3, figsize=(12, 4.3), sharey=True)
    size, extent = config["grid"], config["extent"]
    titles = {"map": "MAP", "probit": "Laplace, probit", "mc": f"Laplace, Monte Carlo ({config['samples']:,} draws)"}
    image = None
    for axis, (name, title) in zip(axes, titles.items(), strict=True):
        confidence = plane[name].amax(-1).reshape(size, size).T
        image = axis.imshow(
            confidence, origin="lower", extent=(-extent, extent) * 2, vmin=1 / CLASSES, vmax=1, cmap="cividis"
        )
        for c, colour in enumerate(CLASS_COLOURS):
            of_class = x[y == c]
            axis.scatter(*of_class.T, s=7, color=colour, edgecolors="white", linewidths=0.25, label=f"class {c + 1}")
        mean = float(plane[name].amax(-1)[plane["distance"] > far].mean())
        axis.set(title=f"{title}\nmean confidence far from data {mean:.2f}", xlabel="$x_1$")
    axes[0].set_ylabel("$x_2$")
    axes[0].legend(loc="upper left", markerscale=2)
    assert image is not None
    figure.colorbar(image, ax=axes, label="confidence: largest class probability", pad=0.01)
    return figure


def one_seed(experiment: Experiment) -> tuple[Figures, Checks]:
    config = experiment.config
    generator = torch.Generator().manual_seed(config["seed"])
    x, y = pinwheel(config["points"], config, generator)
    x_test, y_test = pinwheel(config["test_points"], config, generator)
    la, precisions = trained(network(config["hidden"], config["activation"]), x, y, config["rounds"])

    side = torch.linspace(-config["extent"], config["extent"], config["grid"], dtype=DOUBLE)
    points = torch.cartesian_prod(side, side)
    plane = predictions(la, points, config)
    test = predictions(la, x_test, config)
    distance = torch.cdist(points, x).amin(-1)
    far, near = distance > config["far"], distance < config["near"]

    names = list(plane)
    confidence = {
        name: {
            "near": float(plane[name][near].amax(-1).mean()),
            "far": float(plane[name][far].amax(-1).mean()),
            "far_share_above_0.95": float((plane[name][far].amax(-1) > 0.95).double().mean()),
        }
        for name in names
    }
    scores = {
        name: {
            "accuracy": accuracy(test[name], y_test),
            "nll": nll(test[name], y_test),
            "ece": calibration_error(test[name], y_test),
        }
        for name in names
    }
    gaps = {
        link: {
            "plane": disagreement(plane[link], plane["mc"]),
            "test_points": disagreement(test[link], test["mc"]),
        }
        for link in ("probit", "probit_full")
    }
    ours = {
        "parameters": la.n_params,
        "prior_precisions": precisions,
        "log_marginal_likelihood": float(la.log_marginal_likelihood()),
        "confidence": confidence,
        "test": scores,
        "difference_to_monte_carlo": gaps,
        "share_of_variance_that_moves_all_logits": {
            "test_points": common_share(la, x_test),
            "far": common_share(la, points[far]),
        },
        "largest_standard_error_of_monte_carlo": 0.5 / config["samples"] ** 0.5,
    }
    held = {
        "MAP is over-confident far away: mean confidence above 0.9": confidence["map"]["far"] > 0.9,
        "Laplace is more conservative far away: probit and Monte Carlo at least 0.1 below MAP": all(
            confidence[name]["far"] < confidence["map"]["far"] - 0.1 for name in ("probit", "mc")
        ),
        "probit and Monte Carlo name the same class on at least 95 % of the plane": gaps["probit"]["plane"][
            "same_class"
        ]
        >= 0.95,
        "probit and Monte Carlo agree: mean difference below 0.05 on the plane": gaps["probit"]["plane"]["mean"] < 0.05,
        "probit of differences and Monte Carlo agree: mean difference below 0.05": gaps["probit_full"]["plane"]["mean"]
        < 0.05,
    }
    if config["seed"] == config["seeds"][0]:
        experiment.save(picture(x, y, plane | {"distance": distance}, config["far"], config))
    return ours, held


def main(experiment: Experiment) -> None:
    ours, held = experiment.over_seeds(one_seed)
    source = {
        "claim": "MAP solution is overly confident far from data. Laplace approximation is more conservative.",
        "probit": "We could use sampling, but this is less expensive and works well in practice.",
        "figures": "none: the source shows pictures only, and does not name its data",
    }
    experiment.write(ours, source, held)


if __name__ == "__main__":
    main(Experiment.of(__file__))
