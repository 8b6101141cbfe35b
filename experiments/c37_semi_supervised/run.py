"""C37: few labels, many stochastic embeddings: nearest neighbours of MNIST's codes by autoencoders.

An autoencoder sees digits without labels. Of a pool of others, n of each class have labels; every one of them is
embedded 100 times by stochastic encoders (once by the plain one), and test digits are classified by the nearest of
these codes. All autoencoders of a seed have the same digits, and the same labels in every repetition.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from sklearn.neighbors import KDTree
from torch import Tensor
from torch.nn.functional import one_hot

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "c36_missing_halves"))
from autoencoders import Images, images
from common import COLOURS, Checks, Experiment, Figures
from trained import ONLINE, POSTHOC, RELEASED, STARTED, trained

AE = "AE"
STYLE: dict[str, dict[str, Any]] = {
    AE: {"color": COLOURS["map"]},
    "VAE": {"color": COLOURS["other"]},
    "MC-dropout AE": {"color": COLOURS["exact"]},
    POSTHOC: {"color": COLOURS["sampled"]},
    ONLINE: {"color": COLOURS["laplace"]},
    STARTED: {"color": COLOURS["laplace"], "linestyle": ":"},
    RELEASED: {"color": COLOURS["laplace"], "linestyle": "--"},
}
CLASSES = 10
SOURCE = {
    "claim": "with 1 to 20 labels a class the LAE is clearly above all other models, stochastic and deterministic; "
    "beyond 100 the AE and the LAE are equal, and the AE is above it in the end",
    "note": "figure 12, a curve without numbers in the text; five repetitions with one trained model each",
}


# -- nearest neighbours -----------------------------------------------------------------------------------------------


def predictions(codes: Tensor, labels: Tensor, asked: Tensor, counts: list[int]) -> Tensor:
    """Classes [len(counts), M] of codes [M, d] that are asked for, by the votes of so many nearest; ties to the nearer.

    Of classes with as many votes the one wins whose votes came first, as its sum with weights just below 1 is larger.
    """
    most = max(counts)
    nearest = torch.from_numpy(KDTree(codes.numpy()).query(asked.numpy(), most, return_distance=False))
    votes = one_hot(labels[nearest], CLASSES) * (1 - 1e-6 * torch.arange(most, dtype=torch.float64))[:, None]
    summed = votes.cumsum(1)
    return torch.stack([summed[:, count - 1].argmax(1) for count in counts])


def best_count(codes: Tensor, labels: Tensor, config: dict[str, Any], generator: torch.Generator) -> int:
    """The number of neighbours by cross-validation with two folds over the embedded points, as in the source.

    Those are considered that a class has points for in a fold; at most `held_out` points of a fold are asked.
    """
    half = int(torch.bincount(labels, minlength=CLASSES).min()) // 2
    counts = [count for count in config["neighbours"] if count <= half]
    if len(counts) < 2:
        return config["neighbours"][0]
    order = torch.randperm(len(codes), generator=generator)
    order = order[labels[order].argsort(stable=True)]  # class by class, each in a random order: folds take turns
    right = torch.zeros(len(counts))
    for fold in (0, 1):
        held, rest = order[fold::2], order[1 - fold :: 2]
        held = held[torch.randperm(len(held), generator=generator)[: config["held_out"]]]
        said = predictions(codes[rest], labels[rest], codes[held], counts)
        right += (said == labels[held]).double().mean(1)
    return counts[int(right.argmax())]


def classified(pool: Tensor, labels: Tensor, asked: Tensor, truth: Tensor, n: int, config: Any, seed: int) -> float:
    """Accuracy with n labelled images a class out of the pool, whose codes are [embeddings, P, d]."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=generator)
    chosen = torch.cat([order[labels[order] == each][:n] for each in range(CLASSES)])
    codes, known = pool[:, chosen].flatten(0, 1), labels[chosen].repeat(len(pool))
    count = best_count(codes, known, config, generator)
    return float((predictions(codes, known, asked, [count])[0] == truth).double().mean())


# -- a seed -----------------------------------------------------------------------------------------------------------


def accuracies(name: str, data: Images, config: dict[str, Any]) -> Figures:
    """For every number of labels, the mean over the repetitions."""
    model = trained(name, data, config)
    generator = torch.Generator().manual_seed(config["seed"])
    pool = model.embed(data.validation, config["embeddings"], generator)
    asked = model.embed(data.test, config["embeddings"], generator).mean(0)
    found = {}
    for n in config["labels"]:
        each = [
            classified(pool, data.validation_labels, asked, data.test_labels, n, config, seed)
            for seed in range(config["repetitions"])
        ]
        found[str(n)] = 100 * fmean(each)
    print(config["seed"], name, {n: round(each, 1) for n, each in found.items()}, flush=True)
    return found


def one_seed(experiment: Experiment) -> tuple[Figures, Checks]:
    config = experiment.config
    data = images("mnist", config["seed"], config["train"], config["pool"], config["test"])
    found = {name: accuracies(name, data, config) for name in STYLE}
    return found, claims(found, config)


def claims(found: Figures, config: dict[str, Any]) -> Checks:
    few = [str(n) for n in config["labels"] if n <= config["few"]]
    held = {f"{ONLINE} is above {AE} with {n} labels a class": found[ONLINE][n] > found[AE][n] for n in few}
    for name in list(STYLE)[1:4]:
        held[f"{ONLINE} is above {name}, in the mean over {few[0]} to {few[-1]} labels a class"] = fmean(
            found[ONLINE][n] for n in few
        ) > fmean(found[name][n] for n in few)
    first, last = str(config["labels"][0]), str(config["labels"][-1])
    gains = [found[ONLINE][n] - found[AE][n] for n in (first, last)]
    held[f"what {ONLINE} gains over {AE} is less with {last} labels a class than with {first}"] = gains[1] < gains[0]
    return held


def picture(seeds: list[Figures], config: dict[str, Any]) -> Figure:
    """Means over seeds with the range; what is gained over the plain autoencoder on the right."""
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.8))
    for name, style in STYLE.items():
        rows = [[seed[name][str(n)] for seed in seeds] for n in config["labels"]]
        gains = [[seed[name][str(n)] - seed[AE][str(n)] for seed in seeds] for n in config["labels"]]
        for axis, each in ((axes[0], rows), (axes[1], gains)):
            axis.plot(config["labels"], [fmean(row) for row in each], label=name, marker="o", ms=3, **style)
            if name in (AE, ONLINE):
                low, high = ([pick(row) for row in each] for pick in (min, max))
                axis.fill_between(config["labels"], low, high, color=style["color"], alpha=0.12, lw=0)
    for axis, label in ((axes[0], "accuracy (%)"), (axes[1], f"points above {AE}")):
        axis.set(xscale="log", xlabel="labels a class", ylabel=label)
        axis.set_xticks(config["labels"], [str(n) for n in config["labels"]])
        axis.set_xticks([], minor=True)
        axis.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(STYLE))
    return figure


def main(experiment: Experiment) -> None:
    config = experiment.config
    ours, held = experiment.over_seeds(one_seed)
    experiment.save(picture(list(ours["by_seed"].values()), config))
    experiment.write(
        ours,
        SOURCE,
        held,
        reduced=f"hidden layers {config['hidden']} of [512, 256], {config['train']:,} images of 55,000, "
        f"{config['epochs']} epochs at a constant rate, {config['test']:,} test images, a sampled diagonal",
    )


if __name__ == "__main__":
    main(Experiment.of(__file__))
