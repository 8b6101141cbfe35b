"""Rotated digits: NLL of a convolutional network by angle, with posteriors over all of its weights or some."""

from __future__ import annotations

from math import cos, radians, sin
from typing import Any

import torch
from common import Figures, idx_images
from torch import Tensor, nn
from torch.nn.functional import affine_grid, cross_entropy, grid_sample
from torch.utils.data import DataLoader, TensorDataset

from lapwing import Laplace
from lapwing.laplace import BaseLaplace
from lapwing.metrics import accuracy, nll
from lapwing.subnetwork import (
    LargestVarianceDiagLaplaceSubnetMask,
    LargestVarianceSWAGSubnetMask,
    RandomSubnetMask,
)

Pair = tuple[Tensor, Tensor]


def network() -> nn.Sequential:
    """11,978 weights."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


def rotated(images: Tensor, degrees: float) -> Tensor:
    """Images [N, 1, 28, 28] turned about their middle; bilinear, black beyond the border."""
    c, s = cos(radians(degrees)), sin(radians(degrees))
    matrix = torch.tensor([[c, -s, 0.0], [s, c, 0.0]], dtype=images.dtype).expand(len(images), 2, 3)
    return grid_sample(images, affine_grid(matrix, list(images.shape), align_corners=False), align_corners=False)


def split(config: dict[str, Any]) -> dict[str, Pair]:
    """Training, validation and test images, drawn for each seed from MNIST's training and test files."""
    generator = torch.Generator().manual_seed(config["seed"])
    images, labels = idx_images("mnist")
    train, validation = config["digits"], config["digits_validation"]
    order = torch.randperm(len(images), generator=generator)
    found = {
        name: (images[part], labels[part])
        for name, part in (("train", order[:train]), ("validation", order[train : train + validation]))
    }
    images, labels = idx_images("mnist", "test")
    part = torch.randperm(len(images), generator=generator)[: config["digits_test"]]
    return found | {"test": (images[part], labels[part])}


def train(model: nn.Module, data: Pair, config: dict[str, Any]) -> None:
    """Adam with a falling rate on the negative log posterior over N."""
    generator = torch.Generator().manual_seed(config["seed"])
    batches = DataLoader(TensorDataset(*data), config["digits_batch"], shuffle=True, generator=generator)
    optimiser = torch.optim.Adam(model.parameters(), config["digits_rate"])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, config["digits_epochs"] * len(batches))
    for _ in range(config["digits_epochs"]):
        for x, y in batches:
            optimiser.zero_grad()
            norm = torch.stack([each.square().sum() for each in model.parameters()]).sum()
            loss = cross_entropy(model(x), y) + config["digits_precision"] / 2 * norm / len(data[0])
            loss.backward()
            optimiser.step()
            schedule.step()
    model.eval()


def temperature(logits: Tensor, y: Tensor) -> float:
    """The T with the smallest NLL of softmax(logits / T)."""
    candidates = torch.logspace(-1, 1, 401)
    return float(min(candidates, key=lambda t: float(cross_entropy(logits / t, y))))


def posteriors(model: nn.Module, data: Pair, config: dict[str, Any]) -> dict[str, BaseLaplace]:
    count, seed = config["digits_chosen_weights"], config["seed"]
    batches = list(zip(*(each.split(250) for each in data), strict=True))
    diagonal = Laplace(model, "classification", "all", "diag")
    few = TensorDataset(*(each[: config["digits_swag_images"]] for each in data))
    order = torch.Generator().manual_seed(seed)
    swag = LargestVarianceSWAGSubnetMask(
        model, count, "classification", config["digits_swag_snapshots"], swag_lr=config["digits_swag_rate"]
    )
    chosen = {
        "by_swag": swag.select(DataLoader(few, config["digits_batch"], shuffle=True, generator=order)),
        "by_laplace": LargestVarianceDiagLaplaceSubnetMask(model, count, diagonal).select(batches),
        "random": RandomSubnetMask(model, count, torch.Generator().manual_seed(seed)).select(),
    }
    found: dict[str, BaseLaplace] = {"diagonal": diagonal}
    for name, indices in chosen.items():
        found[name] = Laplace(model, "classification", "subnetwork", "full", subnetwork_indices=indices)
        found[name].fit(batches)
    return found


def probabilities(la: BaseLaplace, x: Tensor) -> Tensor:
    return torch.cat([torch.as_tensor(la(part, link_approx="probit")) for part in x.split(200)])


def study(config: dict[str, Any]) -> Figures:
    data = split(config)
    torch.manual_seed(config["seed"])
    model = network()
    train(model, data["train"], config)
    x, y = data["test"]
    angles = config["angles"]
    turned = torch.cat([rotated(x, angle) for angle in angles])

    def logits(of: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.cat([model(part) for part in of.split(500)])

    cooled = temperature(logits(data["validation"][0]), data["validation"][1])
    at_mode = logits(turned)
    found = {"map": at_mode.softmax(-1), "map_temperature": (at_mode / cooled).softmax(-1)}
    low, high, size = config["log_precisions"]
    precisions: dict[str, dict[str, float]] = {"validation": {}, "evidence": {}}
    for name, la in posteriors(model, data["train"], config).items():
        la.optimize_prior_precision(
            method="gridsearch",
            val_loader=[data["validation"]],
            log_prior_prec_min=low,
            log_prior_prec_max=high,
            grid_size=size,
        )
        precisions["validation"][name] = float(la.prior_precision)
        found[name] = probabilities(la, turned)
        la.optimize_prior_precision(method="marglik")
        precisions["evidence"][name] = float(la.prior_precision)
        found[f"{name}_evidence"] = probabilities(la, turned)
    methods = {name: by_angle(each, y, angles, config["rotated_from"]) for name, each in found.items()}
    return {
        "weights": sum(each.numel() for each in model.parameters()),
        "temperature": cooled,
        "precisions": precisions,
        "methods": methods,
    }


def by_angle(probabilities: Tensor, y: Tensor, angles: list[int], start: int) -> Figures:
    parts = probabilities.split(len(y))
    scores = [nll(part, y) for part in parts]
    turned = [score for angle, score in zip(angles, scores, strict=True) if angle >= start]
    return {
        "nll_by_angle": scores,
        "accuracy_by_angle": [accuracy(part, y) for part in parts],
        "nll_upright": scores[angles.index(0)],
        "nll_rotated": sum(turned) / len(turned),
    }


def claims(figures: Figures, start: int) -> dict[str, bool]:
    """With each method's prior precision by the NLL of upright validation images, as the temperature."""
    found = {name: each["nll_rotated"] for name, each in figures["methods"].items()}
    return {
        f"rotated digits, sub-network by the variance of {words}: lower NLL from {start} degrees on than {other}": (
            found[name] < found[against]
        )
        for name, words in (("by_swag", "SWAG"), ("by_laplace", "diagonal Laplace"))
        for against, other in (("map", "MAP"), ("diagonal", "the diagonal over all weights"))
    }
