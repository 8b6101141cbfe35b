"""C17 on CIFAR10: a convolutional network with a Kronecker posterior over all weights, SVHN out of distribution.

The study is that of `c17_fashion_mnist`: MAP, the network at sampled weights and the linearised network, at the prior
precision by validation and by the evidence, after two lengths of training; here also MAP with a tuned temperature.
Every seed has a split, initial weights and draws of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "c17_fashion_mnist"))
from common import COLOURS, Checks, Experiment, Figures, colour_images
from network import network
from study import claims, network_study

SOURCE = {
    "map": {"accuracy": 0.8092, "nll": 0.605, "ece": 0.066, "auroc_entropy": 0.792},
    "sampled": {"accuracy": 0.2174, "nll": 2.114, "ece": 0.095, "auroc_entropy": 0.689},
    "linearised": {"accuracy": 0.8137, "nll": 0.601, "ece": 0.084, "auroc_entropy": 0.843},
    "note": "all of CIFAR10, nine convolutional blocks and average pooling, KF posterior, mean over runs; the prior "
    "was tuned on a validation set; neither the images out of distribution nor their score are named. The source's own "
    "ECE of the linearised network is above MAP's",
}
MEAN, DEVIATION = 0.473, 0.252  # of the training pixels, all colours together
RULES = {"gridsearch": "validation", "marglik": "evidence"}


def one_seed(experiment: Experiment) -> tuple[Figures, Checks]:
    config = experiment.config
    images, labels = colour_images("cifar10", "train")
    generator = torch.Generator().manual_seed(config["seed"])
    train, validation = torch.randperm(len(images), generator=generator)[
        : config["train"] + config["validation"]
    ].split([config["train"], config["validation"]])
    data = {
        "train": (images[train], labels[train]),
        "validation": (images[validation], labels[validation]),
        "test": colour_images("cifar10", "test", config["test"]),
        "out": colour_images("svhn", "test", config["test"]),
    }

    def build() -> torch.nn.Module:
        return network(config["channels"], config["hidden"], 3, 32, MEAN, DEVIATION)

    found: Figures = {}
    held: Checks = {}
    for epochs in config["epochs"]:
        found[str(epochs)], _ = network_study(data, config, epochs, build, scaled=True)
        for rule, name in RULES.items():
            held |= claims(found[str(epochs)][rule], f"{epochs} epochs, {name}")
    return {"by_epochs": found}, held


def picture(by_seed: dict[str, Any]) -> Figure:
    """By length of training and score: every method next to the source's figure, a point a seed."""
    names = {"accuracy": "accuracy", "nll": "NLL", "ece": "ECE", "auroc_entropy": "OOD-AUROC (entropy)"}
    methods = {"map": "MAP", "map_scaled": "MAP,\nscaled", "sampled": "sampled", "linearised": "linearised"}
    rules = {"gridsearch": (COLOURS["laplace"], "o", -0.15), "marglik": (COLOURS["sampled"], "s", 0.15)}
    lengths = list(next(iter(by_seed.values()))["by_epochs"])
    figure, axes = plt.subplots(len(lengths), 4, figsize=(13, 3.3 * len(lengths)), squeeze=False, sharey="col")
    for row, epochs in zip(axes, lengths, strict=True):
        for axis, (key, title) in zip(row, names.items(), strict=True):
            for column, method in enumerate(methods):
                for rule, (colour, marker, shift) in rules.items():
                    values = [each["by_epochs"][epochs][rule][method][key] for each in by_seed.values()]
                    axis.plot(
                        [column + shift] * len(values),
                        values,
                        marker,
                        color=colour,
                        alpha=0.7,
                        label=f"ours, precision by {RULES[rule]}" if column == 0 else None,
                    )
                if method in SOURCE:
                    label = "source (all of CIFAR10)" if column == 0 else None
                    axis.plot(column, SOURCE[method][key], "D", color="black", mfc="none", label=label)
            axis.set_xticks(range(len(methods)), list(methods.values()), fontsize=9)
            axis.set_xlim(-0.5, len(methods) - 0.5)
            axis.set(title=f"{title}, {epochs} epochs", ylabel=title)
            axis.grid(axis="y", alpha=0.3)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3)
    return figure


def main(experiment: Experiment) -> None:
    config = experiment.config
    ours, held = experiment.over_seeds(one_seed)
    experiment.save(picture(ours["by_seed"]))
    first = ours["by_seed"][str(config["seeds"][0])]["by_epochs"][str(config["epochs"][0])]
    experiment.write(
        ours,
        SOURCE,
        held,
        reduced=f"{config['train']:,} of 50,000 training and {config['test']:,} of 10,000 test images, "
        f"{' and '.join(map(str, config['epochs']))} epochs, three convolutions and three fully connected layers "
        f"({first['parameters']:,} weights) instead of nine convolutional blocks",
        notes="times are processor seconds on one thread; the temperature of MAP is tuned on the validation images",
    )


if __name__ == "__main__":
    main(Experiment.of(__file__))
