"""C17: a convolutional network on Fashion-MNIST with a Kronecker posterior over all weights.

MAP, the network at sampled weights, and the linearised network (Monte Carlo as in the source, and probit), at the prior
precision with the best validation likelihood, which is how the source chooses it, and at that of the evidence. Two
lengths of training, as the order of the methods depends on it. MNIST is out of distribution.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import COLOURS, Experiment, idx_images
from network import network
from study import claims, network_study

from lapwing.metrics import entropy

SOURCE = {
    "map": {"accuracy": 0.9139, "nll": 0.258, "ece": 0.017, "auroc_entropy": 0.864},
    "sampled": {"accuracy": 0.8442, "nll": 0.942, "ece": 0.411, "auroc_entropy": 0.945},
    "linearised": {"accuracy": 0.9225, "nll": 0.244, "ece": 0.012, "auroc_entropy": 0.955},
    "note": "KF posterior, mean over runs; the precision was tuned on a validation set; the OOD score is not named",
}


def picture(studies: dict[str, dict[str, Any]], outside: dict[str, dict[str, Tensor]]) -> Figure:
    """By length of training: scores of the methods next to the source's; entropies outside; NLL and the precision."""
    figure, axes = plt.subplots(2 * len(studies), 3, figsize=(12, 6.6 * len(studies)), squeeze=False)
    names = {"accuracy": "accuracy", "nll": "NLL", "ece": "ECE", "auroc_entropy": "OOD-AUROC (entropy)"}
    methods = {"map": "MAP", "sampled": "sampled", "linearised": "linearised"}
    colours = {"map": COLOURS["map"], "sampled": COLOURS["sampled"], "linearised": COLOURS["laplace"]}
    series = {"source": ("", 0.35), "marglik": ("", 1.0), "gridsearch": ("//", 0.7)}
    tables = [SOURCE, *(study[rule] for study in studies.values() for rule in ("marglik", "gridsearch"))]
    for number, (epochs, study) in enumerate(studies.items()):
        length = f"{epochs} epoch{'s' if epochs != '1' else ''}"
        six = axes[2 * number : 2 * number + 2].flatten()
        for axis, (key, title) in zip(six, names.items(), strict=False):
            for place, (label, (hatch, alpha)) in enumerate(series.items()):
                table = SOURCE if label == "source" else study[label]
                for column, method in enumerate(methods):
                    bar = axis.bar(
                        column + 0.27 * (place - 1),
                        table[method][key],
                        0.25,
                        color=colours[method],
                        alpha=alpha,
                        hatch=hatch,
                        edgecolor="white",
                    )
                    axis.bar_label(bar, fmt="%.3f", fontsize=6.5, padding=1)
            axis.set_title(f"{title}, {length}")
            axis.set_xticks(range(3), list(methods.values()))
            every = [table[method][key] for table in tables for method in methods]
            if key in ("accuracy", "auroc_entropy"):
                axis.set_ylim(max(0.0, min(every) - 0.05), 1)
            else:
                axis.set_ylim(0, 1.1 * max(every))
        axis = six[4]
        for method, label in methods.items():
            axis.hist(
                entropy(outside[epochs][method]).numpy(),
                torch.linspace(0, 2.31, 40).tolist(),
                density=True,
                histtype="step",
                color=colours[method],
                label=label,
            )
        axis.set(title=f"MNIST: entropy at the evidence's precision, {length}", xlabel="nats", ylabel="density")
        axis.set_yscale("log")
        axis.legend(loc="lower left")
        axis, swept = six[5], study["sweep"]
        at = [row["precision"] for row in swept["at"]]
        axis.axhline(swept["map_nll"], color=colours["map"], label="MAP")
        for method in ("sampled", "linearised"):
            axis.plot(at, [row[f"{method}_nll"] for row in swept["at"]], "o-", color=colours[method], label=method)
        for rule, style, label in (("marglik", "--", "by evidence"), ("gridsearch", ":", "by validation")):
            axis.axvline(study["prior_precision"][rule], color="grey", linestyle=style, label=label)
        axis.set(title=f"NLL against the prior precision, {length}", xlabel="prior precision", xscale="log")
        axis.set_yscale("log")
        axis.set_yticks([0.25, 0.5, 1, 2, 4], ["0.25", "0.5", "1", "2", "4"])
        axis.minorticks_off()
        axis.legend(loc="upper right")
    figure.legend(
        [plt.Rectangle((0, 0), 1, 1, fc="grey", alpha=a, hatch=h, ec="white") for h, a in series.values()],
        ["source", "ours, precision by evidence", "ours, precision by validation"],
        loc="outside upper center",
        ncols=3,
    )
    return figure


def main(experiment: Experiment) -> None:
    config = experiment.config
    torch.set_num_threads(1)  # processor seconds are compared
    images, labels = idx_images("fashion-mnist", "train")
    data = {
        "train": (images[: config["train"]], labels[: config["train"]]),
        "validation": (images[-config["validation"] :], labels[-config["validation"] :]),
        "test": idx_images("fashion-mnist", "test", config["test"]),
        "out": idx_images("mnist", "test", config["test"]),
    }
    found: dict[str, dict[str, Any]] = {}
    outside: dict[str, dict[str, Tensor]] = {}
    held: dict[str, bool] = {}
    for epochs in config["epochs"]:
        found[str(epochs)], outside[str(epochs)] = network_study(
            data, config, epochs, lambda: network(config["channels"], config["hidden"])
        )
        for rule, name in (("gridsearch", "validation"), ("marglik", "evidence")):
            held |= claims(found[str(epochs)][rule], f"{epochs} epochs, {name}")
    experiment.save(picture(found, outside))
    weights = found[str(config["epochs"][0])]["parameters"]
    experiment.write(
        {"by_epochs": found},
        SOURCE,
        held,
        reduced=f"{' and '.join(map(str, config['epochs']))} epochs, {weights:,} weights (three convolutions and three "
        "fully connected layers as in the source, narrower), one run of each instead of several",
        notes="times are processor seconds on one thread; the sampled network averages network_samples draws; the "
        "posterior's precision is tuned after training at training_precision",
    )


if __name__ == "__main__":
    main(Experiment.of(__file__))
