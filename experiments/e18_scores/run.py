"""E18: scores of the exact posterior (matrix-free) and of a sketched basis, beside cheaper ones, for strange images.

A small convolutional network is trained on Fashion-MNIST; images of MNIST are strange to it. A score is the sum of the
variances of an image's logits; AUROC says how well it tells the two sets apart. The exact posterior is affordable for
few data points: all structures are fitted to the same few, and those that can be to many more. Every prior precision
is the one that the evidence of the structure itself prefers; the sketched score has none.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import COLOURS, Checks, Experiment, Figures, idx_images

from lapwing import Laplace, estimate
from lapwing.likelihoods import Categorical
from lapwing.metrics import auroc
from lapwing.tangent import Tangent

Data = tuple[Tensor, Tensor]
Score = Callable[[Tensor], Tensor]
STRUCTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "kron": ("all", "kron", {}),
    "diag": ("all", "diag", {}),
    "last layer": ("last_layer", "full", {}),
}
TITLES = {
    "map": "largest probability",
    "matrix-free": "matrix-free",
    "sketched": "sketched",
    "kron": "kron",
    "diag": "diag",
    "last layer": "last layer",
}


def network(channels: list[int], hidden: int) -> nn.Sequential:
    first, second = channels
    return nn.Sequential(
        nn.Conv2d(1, first, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(first, second, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(16 * second, hidden), nn.ReLU(), nn.Linear(hidden, 10),
    )  # fmt: skip


def trained(config: dict[str, Any], data: Data) -> nn.Sequential:
    torch.manual_seed(config["seed"])
    model, (x, y) = network(config["channels"], config["hidden"]), data
    steps = config["epochs"] * len(x) // config["batch"]
    optimiser = torch.optim.Adam(model.parameters(), config["rate"], weight_decay=config["decay"])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(1, steps))
    for _ in range(steps):
        chosen = torch.randint(len(x), (config["batch"],))
        loss = nn.functional.cross_entropy(model(x[chosen]), y[chosen])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    return model.eval()


def batches(data: Data, count: int) -> list[Data]:
    x, y = data
    return list(zip(x[:count].split(100), y[:count].split(100), strict=True))


def of_posterior(la: Any) -> Score:
    """The sum of the variances of an image's logits."""

    def score(x: Tensor) -> Tensor:
        parts = [la.posterior.variances(la.linearise(part)).sum(1) for part in x.split(100)]
        return torch.cat(parts).detach()

    return score


def posterior(model: nn.Module, data: list[Data], subset: str, structure: str, options: dict[str, Any]) -> Any:
    la = Laplace(model, "classification", subset, structure, **options)
    la.fit(data)
    la.optimize_prior_precision()
    return la


def measured(score: Score, inside: Tensor, outside: Tensor) -> Figures:
    start = time.process_time()
    found = score(inside), score(outside)
    return {"auroc": auroc(*found), "scoring_seconds": time.process_time() - start}


def scored(config: dict[str, Any], model: nn.Module, train: Data, inside: Tensor, outside: Tensor) -> Figures:
    """By size of the data of the fit, "few" or "many": AUROC, processor seconds and the prior precision of each."""
    found: Figures = {"few": {}, "many": {}}
    for size in found:
        data = batches(train, config[size])
        for name, (subset, structure, options) in STRUCTURES.items():
            start = time.process_time()
            la = posterior(model, data, subset, structure, options)
            own = {"fit_seconds": time.process_time() - start, "precision": float(la.prior_precision)}
            found[size][name] = own | measured(of_posterior(la), inside, outside)
        start = time.process_time()
        score = estimate.sketched(Tangent(model), Categorical(), data, steps=config["steps"][size], rows=config["rows"])
        own = {"fit_seconds": time.process_time() - start, "rank": score.rank}
        found[size]["sketched"] = own | measured(score, inside, outside)
    start = time.process_time()
    la = posterior(model, batches(train, config["few"]), "all", "matrix_free", {"solve_in": "outputs"})
    own = {"fit_seconds": time.process_time() - start, "precision": float(la.prior_precision)}
    found["few"]["matrix-free"] = own | measured(of_posterior(la), inside, outside)
    return found


def checks(found: Figures) -> Checks:
    few, many = found["few"], found["many"]
    held = {"sketched, many data: AUROC at least 0.90 (published: 0.94)": many["sketched"]["auroc"] >= 0.90}
    held["matrix-free: AUROC at least 0.90"] = few["matrix-free"]["auroc"] >= 0.90
    for name in STRUCTURES:
        above = few["matrix-free"]["auroc"] >= few[name]["auroc"] - 0.02
        held[f"same few data: matrix-free is at most 0.02 below {name}"] = above
    close = abs(few["matrix-free"]["auroc"] - few["sketched"]["auroc"]) <= 0.05
    held["same few data: sketched within 0.05 of matrix-free"] = close
    held["matrix-free is above the largest probability"] = few["matrix-free"]["auroc"] > found["map"]["auroc"]
    return held


def one_seed(experiment: Experiment) -> tuple[Figures, Checks]:
    config = experiment.config
    images, labels = idx_images("fashion-mnist", "train")
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(config["seed"]))[: config["train"]]
    train = images[order], labels[order]
    inside, outside = (test(name, config) for name in ("fashion-mnist", "mnist"))
    start = time.process_time()
    model = trained(config, train)
    seconds = time.process_time() - start
    with torch.no_grad():
        right = float((model(inside[0]).argmax(1) == inside[1]).float().mean())
        least = [1 - model(x).softmax(1).amax(1) for x, _ in (inside, outside)]
    found: Figures = {
        "weights": sum(each.numel() for each in model.parameters()),
        "accuracy": right,
        "training_seconds": seconds,
        "map": {"auroc": auroc(*least)},
        **scored(config, model, train, inside[0], outside[0]),
    }
    return found, checks(found)


def test(name: str, config: dict[str, Any]) -> Data:
    x, y = idx_images(name, "test")
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(config["seed"] + 1))[: config["test"]]
    return x[order], y[order]


def picture(by_seed: dict[str, Figures]) -> Any:
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    for panel, size in zip(panels, ("few", "many"), strict=True):
        names = [name for name in TITLES if name == "map" or name in next(iter(by_seed.values()))[size]]
        for place, name in enumerate(names):
            values = [(each if name == "map" else each[size])[name]["auroc"] for each in by_seed.values()]
            colour = COLOURS["map" if name == "map" else "laplace" if name in ("matrix-free", "sketched") else "other"]
            panel.plot([place] * len(values), values, "o", color=colour, alpha=0.6)
        panel.set_xticks(range(len(names)), [TITLES[name] for name in names], rotation=20, ha="right")
        panel.grid(alpha=0.3)
        panel.set_title(f"fitted to {size} images")
    panels[0].set_ylabel("AUROC, Fashion-MNIST against MNIST")
    return figure


def main(experiment: Experiment) -> None:
    ours, held = experiment.over_seeds(one_seed)
    experiment.save(picture(ours["by_seed"]))
    experiment.write(ours, {"sketched": {"auroc": 0.94, "note": "Miani et al. 2024, another network"}}, held)


if __name__ == "__main__":
    main(Experiment.of(__file__))
