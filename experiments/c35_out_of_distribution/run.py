"""C35: clothes against digits by what an autoencoder does not know: four scores of the Laplacian one and its rivals.

Trained on Fashion-MNIST, asked of MNIST: convolutional networks with codes of two numbers, the same epochs for every
method. A score is worth what its AUROC is; larger scores are taken for strangers, whatever they turn out to be.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from autoencoders import (
    BASELINES,
    SCORES,
    SETTINGS,
    SURPRISE,
    Architecture,
    Baseline,
    Ensemble,
    Images,
    Plain,
    Shuffled,
    images,
    scores,
    scores_of,
    train,
    with_prior,
)
from common import COLOURS, Checks, Experiment, Figures

from lapwing.metrics import auroc
from lapwing.training import LaplacianAutoencoder

PLAIN, ENSEMBLE = "AE", "ensemble"
POSTHOC, EVIDENCE = "LAE post-hoc, prior 1", "LAE post-hoc, prior by evidence"
ONLINE = tuple(f"LAE {setting}" for setting in SETTINGS)
PAPER = ONLINE[0]
ARMS = (*BASELINES, POSTHOC, EVIDENCE, *ONLINE)
SOURCE = {
    "claim": "online LAE is above AE (constant, learned variance), VAE, MC-dropout AE and an ensemble in AUROC of "
    "log-likelihood, typicality, latent and output variance (figure 9)",
    "released code, MNIST against KMNIST": {
        "LAE": {"latent variance": 0.9989, "output variance": 0.9993, "log-likelihood": 0.9910, "typicality": 0.9880},
        "VAE": {"latent variance": 0.566, "output variance": 0.921, "log-likelihood": 0.744, "typicality": 0.609},
    },
    "note": "figure 9 has no numbers in the text; 55,000 images, until the validation loss comes to rest",
}

Scored = Callable[[Tensor], dict[str, Tensor]]


def fresh(config: dict[str, Any], data: Images, member: int = 0) -> tuple[Shuffled, torch.Generator]:
    """Batches and random numbers of a seed; members of an ensemble have their own, and their own weights."""
    seed = 1000 * member + config["seed"]
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    return Shuffled(data.train, config["batch"], torch.Generator().manual_seed(seed)), generator


def trained(arm: str, shape: Architecture, data: Images, config: dict[str, Any], member: int = 0) -> Baseline:
    batches, generator = fresh(config, data, member)
    return train(BASELINES[arm](shape), batches, config["epochs"], config["rate"], generator)


def online(arm: str, shape: Architecture, data: Images, config: dict[str, Any]) -> LaplacianAutoencoder:
    batches, generator = fresh(config, data)
    model = SETTINGS[arm.removeprefix("LAE ")](shape.encoder(), shape.decoder(), generator=generator)
    model.fit(batches, config["epochs"], optimizer=torch.optim.Adam(model.whole.parameters(), lr=config["rate"]))
    return model


# -- what is measured -------------------------------------------------------------------------------------------------


def of_baseline(model: Baseline, data: Images, config: dict[str, Any]) -> tuple[Scored, Callable[[Tensor], Tensor]]:
    """Scores, and the mean reconstruction."""
    generator = torch.Generator().manual_seed(config["seed"])
    n = config["samples"]
    entropy = float(scores(model, data.train[: config["entropy"]], n, generator)[SURPRISE].mean())

    @torch.no_grad()
    def mean(x: Tensor) -> Tensor:
        return torch.stack([model.draw(x, each, generator).mean for each in range(model.count(n))]).mean(0)

    return lambda x: scores(model, x, n, generator, entropy), mean


def of_laplacian(
    model: LaplacianAutoencoder, data: Images, config: dict[str, Any]
) -> tuple[Scored, Callable[[Tensor], Tensor]]:
    generator = torch.Generator().manual_seed(config["seed"])
    n = config["samples"]
    model.measure_entropy([data.train[: config["entropy"]]], n, generator)
    return lambda x: scores_of(model, x, n, generator), lambda x: model.reconstruct(x, n, generator=generator).mean


def measured(
    given: tuple[Scored, Callable[[Tensor], Tensor]], known: Tensor, strange: Tensor, config: dict[str, Any]
) -> Figures:
    scored, mean = given
    inside, outside = scored(known), scored(strange)
    few = known[: config["reconstructed"]]
    return {
        "auroc": {name: auroc(inside[name], outside[name]) for name in SCORES if name in inside},
        "medians": {name: [float(each[name].median()) for each in (inside, outside)] for name in inside},
        "error": float((few - mean(few)).square().flatten(1).sum(1).mean()),
    }


def study(experiment: Experiment) -> tuple[Figures, Checks]:
    config = experiment.config
    data = images("fashion-mnist", config["seed"], config["train"], 1, config["test"])
    strange = images("mnist", config["seed"], 1, 1, config["test"]).test
    shape = Architecture("convolutional", tuple(config["hidden"]), tuple(config["channels"]))
    found: Figures = {}

    def take(arm: str, model: Baseline | LaplacianAutoencoder) -> None:
        given = (of_baseline if isinstance(model, Baseline) else of_laplacian)(model, data, config)
        found[arm] = measured(given, data.test, strange, config)
        shown = {name: round(each, 3) for name, each in found[arm]["auroc"].items()}
        print(config["seed"], arm, shown, f"{time.process_time():.0f} s", flush=True)

    plain = trained(PLAIN, shape, data, config)
    assert isinstance(plain, Plain)
    take(PLAIN, plain)
    for arm in BASELINES:
        if arm not in (PLAIN, ENSEMBLE):
            take(arm, trained(arm, shape, data, config))
    take(ENSEMBLE, Ensemble([plain, *(trained(PLAIN, shape, data, config, member) for member in range(1, 5))]))
    batches, generator = fresh(config, data)
    model = LaplacianAutoencoder(plain.encoder, plain.decoder, generator=generator)
    take(EVIDENCE, model.fit_posthoc(batches, tune_prior=True))
    found[EVIDENCE]["prior_precision"] = model.schedule.prior_precision
    take(POSTHOC, with_prior(model, 1.0))
    for arm in ONLINE:
        take(arm, online(arm, shape, data, config))
    return {arm: found[arm] for arm in ARMS}, claims(found)


def claims(found: Figures) -> Checks:
    held: Checks = {}
    area = {arm: each["auroc"] for arm, each in found.items()}
    for arm in ONLINE:
        for score in SCORES:
            rivals = [area[each][score] for each in BASELINES if score in area[each]]
            held[f"{arm}: {score} is above that of every baseline that has it"] = area[arm][score] > max(rivals)
    for score in SCORES:
        held[f"{PAPER}: {score} is above that of {EVIDENCE}"] = area[PAPER][score] > area[EVIDENCE][score]
    return held


def ink(config: dict[str, Any]) -> float:
    """AUROC of the sum of an image's pixels, which knows nothing of what was learned."""
    known, strange = (images(name, 0, 1, 1, config["test"]).test for name in ("fashion-mnist", "mnist"))
    return auroc(known.flatten(1).sum(1), strange.flatten(1).sum(1))


def picture(by_seed: Figures) -> Figure:
    figure, axes = plt.subplots(1, len(SCORES), figsize=(15, 4), sharey=True)
    for axis, score in zip(axes, SCORES, strict=True):
        for row, arm in enumerate(ARMS):
            points = [seed[arm]["auroc"][score] for seed in by_seed.values() if score in seed[arm]["auroc"]]
            colour = COLOURS["data"] if arm in BASELINES else COLOURS["laplace" if "online" in arm else "sampled"]
            axis.plot(points, [row] * len(points), "o", color=colour, alpha=0.7)
        axis.axvline(0.5, color="black", lw=0.8, linestyle=":")
        axis.set(title=score, xlabel="AUROC", xlim=(-0.02, 1.02), yticks=range(len(ARMS)), yticklabels=ARMS)
        axis.grid(alpha=0.3)
    axes[0].invert_yaxis()
    return figure


def main(experiment: Experiment) -> None:
    config = experiment.config
    figures, held = experiment.over_seeds(study)
    experiment.save(picture(figures["by_seed"]))
    experiment.write(
        figures | {"ink": ink(config)},
        SOURCE,
        held,
        reduced=f"{config['train']:,} images of 55,000, {config['epochs']} epochs at a constant rate, "
        f"{config['test']:,} test images of each kind, {config['samples']} draws of 100, a sampled diagonal",
        notes="every point of the picture is a seed",
    )


if __name__ == "__main__":
    main(Experiment.of(__file__))
