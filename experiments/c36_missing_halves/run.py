"""C36: the upper half of a digit is missing: five completions by each autoencoder, and what a classifier says of them.

A chain begins with noise in the missing half, and several times puts the reconstruction by a drawn network there; in
the end the half is the mean of five more reconstructions. Probabilities of a classifier of whole digits are averaged
over five chains: an autoencoder that keeps several digits open should give calibrated ones.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from autoencoders import Baseline, Images, images
from common import Checks, Experiment, Figures
from trained import ONLINE, POSTHOC, RELEASED, trained

from lapwing.metrics import accuracy, calibration_error
from lapwing.training import LaplacianAutoencoder

CLASSIFIER, VAE, DROPOUT, ENSEMBLE = "classifier alone", "VAE", "MC-dropout AE", "ensemble"
ARMS = (VAE, DROPOUT, ENSEMBLE, POSTHOC, ONLINE, RELEASED)
LESS = (CLASSIFIER, VAE, DROPOUT, POSTHOC)
"""What the source has online training above; an ensemble is as good there."""
SOURCE: dict[str, Any] = {
    "table 3": {
        CLASSIFIER: {"accuracy": 0.53, "ece": 0.16, "mce": 0.25, "rmsce": 0.18},
        VAE: {"error": 104.73, "log_prob": -104.75, "accuracy": 0.22, "ece": 0.18, "mce": 0.34, "rmsce": 0.19},
        DROPOUT: {"error": 106.05, "log_prob": -106.05, "accuracy": 0.45, "ece": 0.28, "mce": 0.38, "rmsce": 0.29},
        ENSEMBLE: {"error": 96.23, "log_prob": -100.94, "accuracy": 0.53, "ece": 0.12, "mce": 0.20, "rmsce": 0.13},
        POSTHOC: {"error": 101.62, "log_prob": -107.25, "accuracy": 0.51, "ece": 0.16, "mce": 0.27, "rmsce": 0.18},
        ONLINE: {"error": 99.59, "log_prob": -106.29, "accuracy": 0.53, "ece": 0.12, "mce": 0.16, "rmsce": 0.13},
    },
    "note": "the source does not say what its error and log p(x) are summed over, nor what its classifier is",
}


# -- completions ------------------------------------------------------------------------------------------------------


def noise(x: Tensor, generator: torch.Generator) -> Tensor:
    return torch.rand(x.shape, generator=generator)


@torch.no_grad()
def completions(
    model: Baseline | LaplacianAutoencoder, x: Tensor, observed: Tensor, config: Any, generator: torch.Generator
) -> Tensor:
    """[chains, N, 1, 28, 28] with the observed part as it is; `LaplacianAutoencoder.impute`, and the same of baselines.

    A member of an ensemble goes through a chain alone, and all members make the reconstructions that are averaged.
    """
    chains, steps, average = config["chains"], config["steps"], config["average"]
    if isinstance(model, LaplacianAutoencoder):
        return model.impute(x, observed, chains, steps, average, generator=generator)
    found = []
    for chain in range(chains):
        state = torch.where(observed, x, noise(x, generator))
        for _ in range(steps):
            state = torch.where(observed, x, model.draw(state, chain, generator).mean)
        ends = [model.draw(state, number, generator).mean for number in range(average)]
        found.append(torch.where(observed, x, torch.stack(ends).mean(0)))
    return torch.stack(found)


# -- what is measured -------------------------------------------------------------------------------------------------


def classifier(data: Images, config: dict[str, Any]) -> nn.Module:
    """Of whole digits."""
    torch.manual_seed(config["seed"])
    width, generator = config["classifier_hidden"], torch.Generator().manual_seed(config["seed"])
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, width), nn.ReLU(), nn.Linear(width, 10))
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(config["epochs"]):
        for rows in torch.randperm(len(data.train), generator=generator).split(config["batch"]):
            adam.zero_grad()
            nn.functional.cross_entropy(model(data.train[rows]), data.train_labels[rows]).backward()
            adam.step()
    return model


def calibration(probabilities: Tensor, labels: Tensor, bins: int) -> Figures:
    """Accuracy; and the gap of confidence and accuracy over bins: its mean (ECE), maximum (MCE), root mean square."""
    confidence, said = probabilities.max(1)
    right = (said == labels).double()
    of = (confidence * bins).long().clamp(max=bins - 1)
    filled = [of == each for each in range(bins) if bool((of == each).any())]
    gaps = torch.stack([(confidence[each].double().mean() - right[each].mean()).abs() for each in filled])
    share = torch.stack([each.double().mean() for each in filled])
    return {
        "accuracy": accuracy(probabilities, labels),
        "ece": calibration_error(probabilities, labels, bins),
        "mce": float(gaps.max()),
        "rmsce": float((share * gaps.square()).sum().sqrt()),
    }


def likeness(found: Tensor, x: Tensor, observed: Tensor) -> Figures:
    """Of the missing pixels: the squared error of the mean completion, and log mean_s exp(-|x - x_s|^2 / 2)."""
    missing = (~observed).expand(x.shape[1:])
    away = (found - x)[:, :, missing]
    value = (-away.square().sum(2) / 2).logsumexp(0) - torch.tensor(float(len(found))).log()
    return {"error": float(away.mean(0).square().sum(1).mean()), "log_prob": float(value.mean())}


@torch.no_grad()
def measured(found: Tensor, judge: nn.Module, data: Images, observed: Tensor, bins: int) -> Figures:
    """Of completions [chains, N, ...]; `classes` is how many digits the classifier sees in the chains of one image."""
    probabilities = judge(found.flatten(0, 1)).softmax(1).unflatten(0, found.shape[:2])
    seen = [len(set(column)) for column in probabilities.argmax(2).T.tolist()]
    figures = likeness(found, data.test, observed) | calibration(probabilities.mean(0), data.test_labels, bins)
    return figures | {"classes": fmean(seen)}


# -- a seed -----------------------------------------------------------------------------------------------------------


def one_seed(experiment: Experiment) -> tuple[Figures, Checks]:
    config = experiment.config
    data = images("mnist", config["seed"], config["train"], config["validation"], config["test"])
    observed = torch.zeros(1, 28, 28, dtype=torch.bool)
    observed[:, 14:] = True  # the lower half
    judge = classifier(data, config)
    generator = torch.Generator().manual_seed(config["seed"])
    x = data.test
    black = torch.where(observed, x, 0.0).unsqueeze(0)
    found: Figures = {CLASSIFIER: measured(black, judge, data, observed, config["bins"])}
    pictures: dict[str, Tensor] = {}
    for name in ARMS:
        made = completions(trained(name, data, config), x, observed, config, generator)
        found[name] = measured(made, judge, data, observed, config["bins"])
        pictures[name] = made[:, : config["shown"]]
        print(config["seed"], name, {key: round(each, 3) for key, each in found[name].items()}, flush=True)
    if config["seed"] == config["seeds"][0]:
        experiment.save(picture(pictures, x[: config["shown"]], observed))
    return found, claims(found)


def claims(found: Figures) -> Checks:
    ours = found[ONLINE]
    held = {f"ECE of {ONLINE} is below that of {name}": ours["ece"] < found[name]["ece"] for name in LESS}
    held |= {
        f"accuracy by {ONLINE} is at least that of {name}": ours["accuracy"] >= found[name]["accuracy"] for name in LESS
    }
    held |= {
        f"the mean completion of {ONLINE} has a smaller error than that of {name}": ours["error"] < found[name]["error"]
        for name in (VAE, DROPOUT, POSTHOC)
    }
    held |= {
        f"the classifier sees more digits in the five completions of {ONLINE} than in those of {name}": ours["classes"]
        > found[name]["classes"]
        for name in (VAE, POSTHOC)
    }
    return held


def picture(found: dict[str, Tensor], x: Tensor, observed: Tensor) -> Figure:
    """For every autoencoder a row per digit: what is seen, the five completions, and the digit."""
    figure, axes = plt.subplots(2, 3, figsize=(12, 6.6))
    for axis in axes.flat:
        axis.axis("off")
    for axis, (name, made) in zip(axes.flat, found.items(), strict=False):
        seen = torch.where(observed, x, 0.3)
        columns = [seen, *made, x]
        axis.imshow(torch.cat([torch.cat(list(each[:, 0]), 0) for each in columns], 1), cmap="gray", vmin=0, vmax=1)
        axis.set_title(f"{name}: seen, completions, digit")
    return figure


def main(experiment: Experiment) -> None:
    config = experiment.config
    ours, held = experiment.over_seeds(one_seed)
    experiment.write(
        ours,
        SOURCE,
        held,
        reduced=f"hidden layers {config['hidden']} of [512, 256], {config['train']:,} images of 55,000, "
        f"{config['epochs']} epochs at a constant rate, {config['test']:,} test images, a sampled diagonal",
        notes="error and log p(x) are of the missing pixels; the latter without the constant of a Gaussian of unit "
        "variance",
    )


if __name__ == "__main__":
    main(Experiment.of(__file__))
