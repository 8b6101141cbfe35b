"""C18: training by the marginal likelihood against a weight decay that a validation split has chosen.

Both arms have the same images, initial weights, optimiser and number of epochs. The grid trains one network per weight
decay on a part of the images, takes the decay with the best likelihood of the rest, and trains on all of them again.
Marginal-likelihood training has all images from the start, and tunes one precision per parameter tensor on the way.
Every seed has images and initial weights of its own.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "c17_fashion_mnist"))
from common import COLOURS, Checks, Experiment, Figures, idx_images
from network import Normalise
from study import linearised, outputs, temperature, timed

from lapwing import Laplace, marglik_training
from lapwing.laplace import BaseLaplace
from lapwing.metrics import accuracy, calibration_error, nll

SOURCE = {
    "mnist": {
        "mlp": {"grid": {"accuracy": 0.9822, "log_lik": -0.061}, "marglik": {"accuracy": 0.9838, "log_lik": -0.053}},
        "cnn": {"grid": {"accuracy": 0.9940, "log_lik": -0.017}, "marglik": {"accuracy": 0.9946, "log_lik": -0.016}},
    },
    "fashion-mnist": {
        "mlp": {"grid": {"accuracy": 0.8809, "log_lik": -0.347}, "marglik": {"accuracy": 0.8983, "log_lik": -0.305}},
        "cnn": {"grid": {"accuracy": 0.9139, "log_lik": -0.258}, "marglik": {"accuracy": 0.9206, "log_lik": -0.233}},
    },
    "note": "all 60,000 images; cross-validation against KFAC marginal likelihood; the grid, the sizes of the networks "
    "and the number of epochs are not named. CIFAR10, a CNN and a ResNet, was not run here",
}
KINDS = ("mlp", "cnn")
PIXELS = {"mnist": (0.1307, 0.3081), "fashion-mnist": (0.2860, 0.3530)}
TITLES = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "mlp": "MLP", "cnn": "CNN"}
METHODS = {
    "grid": "grid",
    "grid_scaled": "grid, scaled",
    "marglik": "marginal likelihood",
    "marglik_linearised": "the same, linearised",
}


@dataclass(frozen=True, eq=False)
class Shuffled:
    """Batches of all images, in a new order every time."""

    x: Tensor
    y: Tensor
    batch: int
    generator: torch.Generator

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in torch.randperm(len(self.x), generator=self.generator).split(self.batch):
            yield self.x[index], self.y[index]


def shuffled(x: Tensor, y: Tensor, config: dict[str, Any]) -> Shuffled:
    return Shuffled(x, y, config["batch"], torch.Generator().manual_seed(config["seed"]))


def initial(kind: str, data: str, config: dict[str, Any]) -> nn.Module:
    """The network of a seed: the same weights whoever trains it."""
    torch.manual_seed(config["seed"])
    start = Normalise(*PIXELS[data])
    if kind == "mlp":
        a, b = config["mlp"]
        layers = (nn.Linear(784, a), nn.ReLU(), nn.Linear(a, b), nn.ReLU(), nn.Linear(b, 10))
        return nn.Sequential(start, nn.Flatten(), *layers)
    (a, b, c), (d, e) = config["channels"], config["hidden"]
    return nn.Sequential(
        start,
        *(nn.Conv2d(1, a, 5, stride=2), nn.ReLU()),
        *(nn.Conv2d(a, b, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(b, c, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(4 * c, d), nn.ReLU(), nn.Linear(d, e), nn.ReLU(), nn.Linear(e, 10)),
    )


# -- the two arms -----------------------------------------------------------------------------------------------------


def plain(model: nn.Module, loader: Shuffled, precision: float, epochs: int, config: dict[str, Any]) -> nn.Module:
    """Adam on -log p(y | x) + precision/2 |theta|^2, per image."""
    decay = precision / len(loader.x)
    optimiser = torch.optim.Adam(model.parameters(), lr=config["rate"], weight_decay=decay)
    for _ in range(epochs):
        for x, y in loader:
            optimiser.zero_grad()
            cross_entropy(model(x), y).backward()
            optimiser.step()
    return model


def by_evidence(
    model: nn.Module, loader: Shuffled, epochs: int, config: dict[str, Any], callback: Any = None
) -> BaseLaplace:
    """Marginal-likelihood training; the posterior of the network it leaves in `model`."""
    posterior, *_ = marglik_training(
        model,
        loader,
        "classification",
        "kron",
        optimizer_kwargs={"lr": config["rate"]},
        n_epochs=epochs,
        n_epochs_burnin=config["burn_in"],
        marglik_frequency=config["every"],
        n_hypersteps=config["hyper_steps"],
        lr_hyp=config["hyper_rate"],
        prior_structure="layerwise",  # one precision per parameter tensor
        estimator=config["estimator"],
        generator=torch.Generator().manual_seed(config["seed"]),
        callback=callback,
    )
    return posterior


def by_grid(kind: str, data: str, x: Tensor, y: Tensor, config: dict[str, Any]) -> tuple[nn.Module, Figures]:
    """The network of the weight decay with the best validation likelihood, trained again on all images."""
    part = len(x) - config["validation"]
    found, best = [], (inf, 0.0, 1.0)
    for precision in config["grid"][kind]:
        model = initial(kind, data, config)
        plain(model, shuffled(x[:part], y[:part], config), precision, config["epochs"], config)
        logits = outputs(model, x[part:])
        found.append(float(cross_entropy(logits, y[part:])))
        best = min(best, (found[-1], precision, temperature(logits, y[part:])))
    _, precision, scale = best
    model, once = timed(
        lambda: plain(initial(kind, data, config), shuffled(x, y, config), precision, config["epochs"], config)
    )
    return model, {
        "precision": precision,
        "temperature": scale,
        "validation_nll": found,
        "training_again_seconds": once,
    }


def scores(probabilities: Tensor, y: Tensor) -> dict[str, float]:
    return {
        "accuracy": accuracy(probabilities, y),
        "log_lik": -nll(probabilities, y),
        "ece": calibration_error(probabilities, y),
    }


Pair = tuple[Tensor, Tensor]


def images_of(data: str, config: dict[str, Any]) -> tuple[Pair, Pair]:
    """The training images of a seed, and all test images."""
    images, labels = idx_images(data, "train", config["pool"])
    generator = torch.Generator().manual_seed(config["seed"])
    chosen = torch.randperm(len(images), generator=generator)[: config["train"]]
    return (images[chosen], labels[chosen]), idx_images(data, "test", config["test"])


def compared(kind: str, data: str, train: Pair, test: Pair, config: dict[str, Any]) -> Figures:
    """Both arms on the same images, and their scores on the test images."""
    (x, y), (x_test, y_test) = train, test
    (model, grid), grid_seconds = timed(lambda: by_grid(kind, data, x, y, config))
    logits = outputs(model, x_test)
    found: Figures = {
        "grid": scores(logits.softmax(-1), y_test),
        "grid_scaled": scores((logits / grid["temperature"]).softmax(-1), y_test),
    }
    model, looks = initial(kind, data, config), []
    posterior, seconds = timed(
        lambda: by_evidence(model, shuffled(x, y, config), config["epochs"], config, looks.append)
    )
    found["marglik"] = scores(outputs(model, x_test).softmax(-1), y_test)
    found["marglik_linearised"] = scores(linearised(posterior, x_test, config)["linearised"], y_test)
    print(config["seed"], data, kind, grid, posterior.prior_precision.tolist(), found, flush=True)
    return found | {
        "chosen_by_grid": grid,
        "precisions_by_evidence": dict(zip(posterior.space.names, posterior.prior_precision.tolist(), strict=True)),
        "log_evidence_by_look": [float(each.tuned.log_marginal) for each in looks if each.tuned is not None],
        "best_epoch": max(each.number for each in looks if each.best),
        "parameters": posterior.n_params,
        "processor_seconds": {
            "plain": grid["training_again_seconds"],
            "grid_and_training_again": grid_seconds,
            "marglik": seconds,
        },
    }


# -- what it costs ----------------------------------------------------------------------------------------------------


def cost(kind: str, config: dict[str, Any]) -> Figures:
    """Processor seconds of an epoch, plain and by the marginal likelihood, and of a look at the evidence."""
    data, epochs = "fashion-mnist", 3
    config = config | {"seed": config["seeds"][0], "batch": config["cost_batch"], "burn_in": epochs, "every": epochs}
    x, y = idx_images(data, "train", config["cost_rows"][kind])
    loader = shuffled(x, y, config)
    model = initial(kind, data, config)
    without = [timed(lambda: plain(model, loader, 1.0, 1, config))[1] for _ in range(epochs - 1)]
    model, ends = initial(kind, data, config), []
    by_evidence(model, loader, epochs, config, lambda epoch: ends.append(time.process_time()))
    final = time.process_time() - ends[-1]
    epoch = min(b - a for a, b in pairwise(ends[:-1]))  # the first has the checks before training, the last the look
    exact, few = Laplace(model, "classification", "all", "kron"), -(-len(x) // 6)
    _, exact_pass = timed(lambda: exact.fit(shuffled(x[:few], y[:few], config)))
    return {
        "plain_epoch": min(without),
        "marglik_epoch": epoch,
        "look": ends[-1] - ends[-2] - epoch,
        "posterior_at_the_end": final,
        "exact_factors": exact_pass * len(x) / few,
    }


def costs(config: dict[str, Any]) -> Figures:
    """The best of several measurements; `every` epochs and a look, in parts of as many plain epochs."""
    found = {}
    for kind in KINDS:
        runs = [cost(kind, config) for _ in range(config["cost_repeats"])]
        best = {key: min(run[key] for run in runs) for key in runs[0]}
        look, every = best["look"], config["every"]
        exact = look + best["exact_factors"] - best["posterior_at_the_end"]
        found[kind] = best | {
            "rows": config["cost_rows"][kind],
            "look_in_plain_epochs": look / best["plain_epoch"],
            "ratio": (every * best["marglik_epoch"] + look) / (every * best["plain_epoch"]),
            "ratio_with_exact_factors": (every * best["marglik_epoch"] + exact) / (every * best["plain_epoch"]),
        }
    return found


# -- all seeds --------------------------------------------------------------------------------------------------------


def one_seed(experiment: Experiment) -> tuple[Figures, Checks]:
    config, found = experiment.config, {}
    for data in PIXELS:
        images = images_of(data, config)
        found[data] = {kind: compared(kind, data, *images, config) for kind in KINDS}
    return found, {}


def mean(values: list[float]) -> dict[str, float]:
    """The mean over seeds and its standard error."""
    error = stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return {"mean": fmean(values), "standard_error": error}


def summary(seeds: list[Figures]) -> tuple[Figures, Figures]:
    """By data set and network: means of all methods, and of the marginal likelihood's gain over the grid."""
    means: Figures = {}
    gains: Figures = {}
    for data in PIXELS:
        means[data], gains[data] = {}, {}
        for kind in KINDS:
            runs = [seed[data][kind] for seed in seeds]
            means[data][kind] = {
                method: {key: mean([run[method][key] for run in runs]) for key in ("accuracy", "log_lik", "ece")}
                for method in METHODS
            }
            gains[data][kind] = {
                f"{key}{'' if against == 'grid' else '_over_scaled'}": mean(
                    [run["marglik"][key] - run[against][key] for run in runs]
                )
                for against in ("grid", "grid_scaled")
                for key in ("accuracy", "log_lik")
            }
            seconds = [run["processor_seconds"] for run in runs]
            means[data][kind]["in_plain_trainings"] = {
                key: min(each[key] for each in seconds) / min(each["plain"] for each in seconds)
                for key in ("marglik", "grid_and_training_again")
            }
    return means, gains


def picture(seeds: list[Figures]) -> Figure:
    """Log-likelihood and accuracy of every method, a line a seed; the source's two figures beside them."""
    figure, axes = plt.subplots(2, 4, figsize=(13, 6.4))
    columns = [(data, kind) for data in PIXELS for kind in KINDS]
    labels = ["grid", "grid,\nscaled", "marginal\nlikelihood", "the same,\nlinearised"]
    for row, key, name in ((0, "log_lik", "test log-likelihood"), (1, "accuracy", "test accuracy")):
        for axis, (data, kind) in zip(axes[row], columns, strict=True):
            for number, seed in enumerate(seeds):
                values = [seed[data][kind][method][key] for method in METHODS]
                label = "ours, a line a seed" if number == 0 else None
                axis.plot(range(4), values, "o-", color=COLOURS["laplace"], lw=0.8, ms=4, alpha=0.7, label=label)
            middle = [fmean(seed[data][kind][method][key] for seed in seeds) for method in METHODS]
            axis.plot(range(4), middle, "_", color=COLOURS["sampled"], ms=22, mew=2, label="mean")
            source = [SOURCE[data][kind][method][key] for method in ("grid", "marglik")]
            axis.plot((0, 2), source, "D", color="black", mfc="none", label="source (60,000 images)")
            axis.set_xticks(range(4), labels, fontsize=8)
            axis.set_xlim(-0.5, 3.5)
            axis.set(title=f"{TITLES[data]}, {TITLES[kind]}")
            axis.grid(axis="y", alpha=0.3)
        axes[row, 0].set_ylabel(name)
    handles, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=3)
    return figure


def main(experiment: Experiment) -> None:
    config = experiment.config
    ours, _ = experiment.over_seeds(one_seed)
    seeds = list(ours["by_seed"].values())
    means, gains = summary(seeds)
    paid = costs(config)
    held: Checks = {}
    for data in PIXELS:
        for kind in KINDS:
            where, gain = f"{TITLES[data]}, {TITLES[kind]}", gains[data][kind]
            held[f"{where}: mean accuracy not lower than the grid's, by 0.2 points"] = gain["accuracy"]["mean"] > -0.002
            held[f"{where}: mean log-likelihood higher than the grid's, by more than its standard error"] = (
                gain["log_lik"]["mean"] > gain["log_lik"]["standard_error"]
            )
    for kind in KINDS:
        what = f"a look every {config['every']} epochs costs at most 1.5 times plain training"
        held[f"{TITLES[kind]}: training with {what}"] = paid[kind]["ratio"] <= 1.5
    experiment.save(picture(seeds))
    experiment.write(
        {"means": means, "gains": gains, "cost": paid, **ours},
        SOURCE,
        held,
        reduced=f"{config['train']:,} of 60,000 training images and {config['epochs']} epochs a run, narrow networks, "
        "MNIST and Fashion-MNIST only",
        notes="log_lik is the mean log-likelihood of a test image; times are processor seconds on one thread; the cost "
        "is the best of several measurements; ratio_with_exact_factors has a pass of exact factors, measured on a "
        "sixth of the images, in the place of that of drawn ones",
    )


if __name__ == "__main__":
    main(Experiment.of(__file__))
