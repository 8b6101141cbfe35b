"""C34: a posterior over an autoencoder's weights, learned while it trains against found afterwards, on MNIST.

The same weights to begin with and as many epochs for every arm, in a dense and in a convolutional network with codes of
two numbers. log p(x) of test images by sampled networks, squared errors, and the variance of codes and outputs near the
data and away from them.
"""

from __future__ import annotations

import sys
from math import log, pi
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from autoencoders import SETTINGS, Architecture, Images, Shuffled, by_validation, images, with_prior
from common import Checks, Experiment, Figures

from lapwing.training import LaplacianAutoencoder

POSTHOC, EVIDENCE, VALIDATION = "post-hoc, prior 1", "post-hoc, prior by evidence", "post-hoc, prior by validation"
PAPER, RELEASED = "online, paper", "online, released"
ARMS = (POSTHOC, EVIDENCE, VALIDATION, *SETTINGS)
CONSTANT = 784 * log(2 * pi) / 2
"""What a Gaussian of unit variance takes from log p(x) of 784 pixels at the least."""
SOURCE = {
    "claim": "post-hoc: a low squared error of the mean reconstruction, but sampled networks do not reconstruct well, "
    "so log p(x) is low; online: much higher log p(x) at a similar error; variance grows away from the data",
    "note": "table 2 (dense, diagonals) and figures 1 and 8; the numbers of table 2 are not in our "
    "copy of the text. 55,000 images, until the validation loss comes to rest",
}


def shapes(config: dict[str, Any]) -> dict[str, Architecture]:
    wide = tuple(config["channels"])
    return {
        "dense": Architecture("dense", tuple(config["hidden"])),
        "convolutional": Architecture("convolutional", tuple(config["hidden_of_convolutional"]), wide),
    }


def made(shape: Architecture, config: dict[str, Any], setting: str = PAPER) -> LaplacianAutoencoder:
    torch.manual_seed(config["seed"])
    generator = torch.Generator().manual_seed(config["seed"])
    return SETTINGS[setting](shape.encoder(), shape.decoder(), generator=generator)


def batches(shape: Architecture, data: Images, config: dict[str, Any]) -> Shuffled:
    return Shuffled(data.train, config["batch"][shape.kind], torch.Generator().manual_seed(config["seed"]))


# -- what is measured -------------------------------------------------------------------------------------------------


def measured(model: LaplacianAutoencoder, data: Images, config: dict[str, Any]) -> Figures:
    """Of test images. Squared errors are summed over the pixels, as are variances."""
    x, n = data.test, config["samples"]
    generator = torch.Generator().manual_seed(config["seed"])
    log_prob = model.log_prob(x, n, generator)
    mean = model.reconstruct(x, n, generator=generator)
    with torch.no_grad():
        codes = model.whole.encode(x)
        of_weights = model.whole.decode(codes)
    centre = codes.mean(0)
    away = centre + config["away"] * (codes - centre)
    scrambled = torch.stack([each.flatten()[_order(each, generator)].view_as(each) for each in x])
    near_code, far_code = (model.latent(each, n, generator=generator).variance.sum(1) for each in (x, scrambled))
    near, far = (_summed(model.decode(each, n, generator=generator).variance) for each in (codes, away))
    assert model.running is not None
    assert model.running.curvature is not None
    return {
        "prior_precision": model.schedule.prior_precision,
        "log_prob": float(log_prob.value.mean()) + CONSTANT,
        "standard_error": float(log_prob.standard_error.mean()),
        "bound": float(log_prob.bound.mean()) + CONSTANT,
        "bound_error": float(log_prob.bound_error.mean()),
        "error_of_weights": float(_summed((x - of_weights).square()).mean()),
        "error_of_mean": float(_summed((x - mean.mean).square()).mean()),
        "error_of_a_draw": -2 * (float(log_prob.bound.mean()) + CONSTANT),
        "variance": float(_summed(mean.variance).mean()),
        "output_near": float(near.median()),
        "output_far": float(far.median()),
        "output_growth": float(far.median() / near.median()),
        "latent_near": float(near_code.median()),
        "latent_far": float(far_code.median()),
        "latent_growth": float(far_code.median() / near_code.median()),
        "curvature": float(model.running.curvature.diagonal().sum()),
    }


def _order(x: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randperm(x.numel(), generator=generator)


def _summed(x: Tensor) -> Tensor:
    return x.flatten(1).sum(1)


def plane(model: LaplacianAutoencoder, data: Images, config: dict[str, Any]) -> dict[str, Any]:
    """The standard deviation of a pixel over a square of the latent plane, and the codes of test images."""
    with torch.no_grad():
        codes = model.whole.encode(data.test)
    centre = (codes.amax(0) + codes.amin(0)) / 2
    half = config["plane"] * float((codes - centre).abs().max())
    ticks = torch.linspace(-half, half, config["ticks"])
    grid = torch.stack(torch.meshgrid(ticks, ticks, indexing="xy"), -1).flatten(0, 1) + centre
    generator = torch.Generator().manual_seed(config["seed"])
    found = model.decode(grid, config["samples"], generator=generator).variance.flatten(1).mean(1).sqrt()
    extent = [float(c) + s * half for c in centre for s in (-1, 1)]
    seen = model.reconstruct(data.test[:4], config["samples"], generator=generator)
    return {"codes": codes, "deviation": found.view(len(ticks), -1), "extent": extent, "seen": seen}


# -- a seed -----------------------------------------------------------------------------------------------------------


def one_network(shape: Architecture, data: Images, config: dict[str, Any], shown: bool) -> tuple[Figures, Figures]:
    """Figures of every arm, and what a picture of it needs."""
    found: Figures = {}
    planes: Figures = {}

    def take(arm: str, model: LaplacianAutoencoder) -> None:
        found[arm] = measured(model, data, config)
        if shown:
            planes[arm] = plane(model, data, config)

    model = made(shape, config)
    epochs = config["epochs"][shape.kind]
    model.fit_posthoc(batches(shape, data, config), epochs, tune_prior=True)
    take(EVIDENCE, model)
    take(POSTHOC, with_prior(model, 1.0))
    held = data.validation
    take(VALIDATION, by_validation(model, held, config["precisions"], config["samples_in_tuning"], config["seed"]))
    for arm in SETTINGS:
        model = made(shape, config, arm)
        model.fit(batches(shape, data, config), epochs)
        take(arm, model)
    return {arm: found[arm] for arm in ARMS}, planes


def study(experiment: Experiment) -> tuple[Figures, Checks]:
    config = experiment.config
    data = images("mnist", config["seed"], config["train"], config["validation"], config["test"])
    first = config["seed"] == config["seeds"][0]
    found: Figures = {}
    pictures: Figures = {}
    for name, shape in shapes(config).items():
        found[name], pictures[name] = one_network(shape, data, config, first)
        print(config["seed"], name, {arm: round(each["log_prob"], 2) for arm, each in found[name].items()}, flush=True)
    if first:
        experiment.save(picture(pictures, data))
    return found, claims(found)


def claims(found: Figures) -> Checks:
    held: Checks = {}
    for name, arms in found.items():
        for ours in (PAPER, RELEASED):
            for arm in (POSTHOC, EVIDENCE, VALIDATION):
                noise = 2 * (arms[ours]["standard_error"] + arms[arm]["standard_error"])
                held[f"{name}: log p(x) of {ours} is above {arm}, by more than twice the Monte-Carlo errors"] = (
                    arms[ours]["log_prob"] > arms[arm]["log_prob"] + noise
                )
            held[f"{name}: the mean reconstruction of {ours} has at most 1.1 times the error of {EVIDENCE}"] = (
                arms[ours]["error_of_mean"] < 1.1 * arms[EVIDENCE]["error_of_mean"]
            )
        for arm in SETTINGS:
            held[f"{name}, {arm}: output variance at codes away from the data is above that at codes of digits"] = (
                arms[arm]["output_growth"] > 1
            )
            held[f"{name}, {arm}: latent variance of scrambled digits is above that of digits"] = (
                arms[arm]["latent_growth"] > 1
            )
    return held


def picture(pictures: Figures, data: Images) -> Figure:
    """Latent planes; below each, mean and deviation of reconstructions of test digits."""
    figure, axes = plt.subplots(4, len(ARMS), figsize=(17, 10), height_ratios=[3, 1, 3, 1])
    for row, (name, planes) in enumerate(pictures.items()):
        for column, arm in enumerate(ARMS):
            shown, axis = planes[arm], axes[2 * row, column]
            image = axis.imshow(
                shown["deviation"].log10(), extent=shown["extent"], origin="lower", aspect="auto", cmap="viridis"
            )
            axis.scatter(*shown["codes"].T, c=data.test_labels, cmap="tab10", s=2)
            axis.set(title=f"{name}: {arm}" if column == 0 else arm)
            axis.title.set_fontsize(9)
            figure.colorbar(image, ax=axis, label="log10 deviation of a pixel" if column == len(ARMS) - 1 else None)
            seen = shown["seen"]
            strip = torch.cat([torch.cat(list(each[:, 0]), 1) for each in (seen.mean.clamp(0, 1), _scaled(seen))])
            axes[2 * row + 1, column].imshow(strip, cmap="gray", vmin=0, vmax=1)
            axes[2 * row + 1, column].axis("off")
            if column == 0:
                axes[2 * row + 1, column].set_title("means; deviations, scaled to their largest", fontsize=8)
    return figure


def _scaled(seen: Any) -> Tensor:
    deviation = seen.variance.sqrt()
    return deviation / deviation.flatten(1).amax(1)[:, None, None, None]


def main(experiment: Experiment) -> None:
    config = experiment.config
    figures, held = experiment.over_seeds(study)
    epochs = " and ".join(str(config["epochs"][name]) for name in shapes(config))
    experiment.write(
        figures,
        SOURCE,
        held,
        reduced=f"{config['train']:,} images of 55,000, {epochs} epochs at a constant rate, {config['test']:,} test "
        "images, a sampled diagonal",
    )


if __name__ == "__main__":
    main(Experiment.of(__file__))
