"""1-d regression with a gap: which of the uncertainty between the data a sub-network keeps."""

from __future__ import annotations

from typing import Any

import torch
from common import Figures, minimise, squared_norm
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lapwing import Laplace
from lapwing.laplace import BaseLaplace
from lapwing.metrics import gaussian_nll
from lapwing.subnetwork import (
    LargestVarianceDiagLaplaceSubnetMask,
    LargestVarianceSWAGSubnetMask,
    RandomSubnetMask,
)

DOUBLE = torch.float64
Pair = tuple[Tensor, Tensor]


def truth(x: Tensor) -> Tensor:
    return torch.sin(2.5 * x) + 0.3 * x


def observe(regions: list[list[float]], count: int, noise: float, generator: torch.Generator) -> Pair:
    """Inputs [n, 1] evenly shared by the regions, and noisy targets [n, 1]."""
    share = count // len(regions)
    parts = [low + (high - low) * torch.rand(share, 1, dtype=DOUBLE, generator=generator) for low, high in regions]
    x = torch.cat(parts)
    return x, truth(x) + noise * torch.randn(x.shape, dtype=DOUBLE, generator=generator)


def network(hidden: list[int], activation: str) -> nn.Sequential:
    layers: list[nn.Module] = []
    inputs = 1
    for width in hidden:
        layers += [nn.Linear(inputs, width), getattr(nn, activation)()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, 1)).to(DOUBLE)


def trained(model: nn.Module, data: Pair, config: dict[str, Any]) -> tuple[BaseLaplace, float, float]:
    """Training to the mode and the evidence in turn; the exact posterior over all weights, its prior and noise.

    By the rows of the data ("gp"), which is the full covariance, and cheaper than that of 2,701 weights.
    """
    x, y = data
    precision, sigma = config["start_precision"], config["noise"]

    def loss() -> Tensor:
        return (model(x) - y).square().sum() / (2 * sigma**2) + precision / 2 * squared_norm(model)

    la = None
    for cycle in range(config["cycles"] + 1):
        minimise(model, loss, config["training_rounds"])
        la = Laplace(model, "regression", "all", "gp", prior_precision=precision, sigma_noise=sigma)
        la.fit([data])
        if cycle < config["cycles"]:
            la.optimize_prior_precision(method="marglik", init_prior_prec=precision, optimize_sigma_noise=True)
            precision, sigma = float(la.prior_precision), float(la.sigma_noise)
    assert la is not None
    return la, precision, sigma


def posteriors(
    model: nn.Module, data: Pair, precision: float, sigma: float, config: dict[str, Any]
) -> dict[str, list[BaseLaplace]]:
    """Diagonal over all weights, and full over some of them; several choices where they are random."""
    how: dict[str, Any] = {"prior_precision": precision, "sigma_noise": sigma}
    count, seed = config["chosen_weights"], config["seed"]
    diagonal = Laplace(model, "regression", "all", "diag", **how)
    order = torch.Generator().manual_seed(seed)
    batches = DataLoader(TensorDataset(*data), config["swag_batch"], shuffle=True, generator=order)
    swag = LargestVarianceSWAGSubnetMask(
        model, count, "regression", swag_n_snapshots=config["swag_snapshots"], swag_lr=config["swag_rate"]
    )
    by_laplace = LargestVarianceDiagLaplaceSubnetMask(model, count, diagonal)
    generator = torch.Generator().manual_seed(seed)
    chosen = {
        "by_swag": [swag.select(batches)],
        "by_laplace": [by_laplace.select([data])],
        "random": [RandomSubnetMask(model, count, generator).select() for _ in range(config["random_choices"])],
    }
    found: dict[str, list[BaseLaplace]] = {"diagonal": [diagonal]}
    for name, choices in chosen.items():
        found[name] = [
            Laplace(model, "regression", "subnetwork", "full", subnetwork_indices=indices, **how) for indices in choices
        ]
    for each in (la for several in found.values() for la in several):
        each.fit([data])
    return found


def scored(all_of: list[BaseLaplace], places: dict[str, Pair], sigma: float) -> dict[str, float]:
    """NLL and mean deviation (without the noise) at the data and in the gap; means over several posteriors."""
    found: dict[str, float] = {}
    for where, (x, y) in places.items():
        predictions = [la(x, diagonal_output=True) for la in all_of]
        nll = [gaussian_nll(mean, variance + sigma**2, y) for mean, variance in predictions]
        deviations = [float(variance.sqrt().mean()) for _, variance in predictions]
        found[f"nll_{where}"] = sum(nll) / len(nll)
        found[f"deviation_{where}"] = sum(deviations) / len(deviations)
    # a choice of dead units' weights has no deviation anywhere, and a share of 0
    both = found["deviation_gap"] + found["deviation_data"]
    found["share_in_gap"] = found["deviation_gap"] / max(both, 1e-12)
    return found


def study(activation: str, config: dict[str, Any]) -> tuple[Figures, dict[str, Any]]:
    """Figures of one activation, and the curves for the picture."""
    generator = torch.Generator().manual_seed(config["seed"])
    data = observe(config["regions"], config["points"], config["noise"], generator)
    places = {
        "data": observe(config["regions"], config["held_out"], config["noise"], generator),
        "gap": observe([config["gap"]], config["held_out"], config["noise"], generator),
    }
    torch.manual_seed(config["seed"])
    model = network(config["hidden"], activation)
    full, precision, sigma = trained(model, data, config)
    found = {"full": [full], **posteriors(model, data, precision, sigma, config)}
    edge = 1.5 * config["regions"][-1][1]
    x = torch.linspace(-edge, edge, config["grid"], dtype=DOUBLE).unsqueeze(1)
    curves: dict[str, Any] = {"x": x, "data": data, "truth": truth(x), "sigma": sigma, "activation": activation}
    for name, several in found.items():
        curves[name] = several[0](x, diagonal_output=True)

    with torch.no_grad():
        at_mode = {where: gaussian_nll(model(x), torch.full_like(y, sigma**2), y) for where, (x, y) in places.items()}
    same = {name: scored(several, places, sigma) for name, several in found.items()}
    for several in list(found.values())[1:]:
        for la in several:
            la.optimize_prior_precision(method="marglik", init_prior_prec=precision)
    own = {name: scored(several, places, sigma) for name, several in found.items()}
    for each in (*same.values(), *own.values()):
        for where in ("data", "gap"):
            each[f"deviation_{where}_of_full"] = each[f"deviation_{where}"] / same["full"][f"deviation_{where}"]
    for name, several in found.items():
        own[name]["prior_precision"] = sum(float(la.prior_precision) for la in several) / len(several)
    figures = {
        "weights": full.n_params,
        "prior_precision": precision,
        "sigma_noise": sigma,
        "map": {f"nll_{where}": value for where, value in at_mode.items()},
        "same_prior": same,
        "own_prior": own,
    }
    return figures, curves


def claims(activation: str, figures: Figures) -> dict[str, bool]:
    """With the prior of the trained network for all; the source speaks of no other."""
    found = figures["same_prior"]
    held = {}
    for name, words in (("by_swag", "SWAG"), ("by_laplace", "diagonal Laplace")):
        start = f"{activation}, deviation of the sub-network by the variance of {words}"
        held[f"{start}: more in the gap than the diagonal over all weights, and in proportion to that at the data"] = (
            found[name]["deviation_gap"] > found["diagonal"]["deviation_gap"]
            and found[name]["share_in_gap"] > found["diagonal"]["share_in_gap"]
        )
        held[f"{start}: more in the gap than weights chosen at random"] = (
            found[name]["deviation_gap"] > found["random"]["deviation_gap"]
        )
    return held
