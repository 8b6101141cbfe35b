"""C22: the evidence at theta* and one precision per scale-invariant group, on four kinds of network.

A transformer, a CNN, a ResNet and one without normalisation (fixup), about 46,000 weights each, on MNIST with early
stopping. Kronecker posterior over all weights, linearised predictions by Monte Carlo. The evidence is taken at the
trained weights and at the linear mode theta*, with a single precision and with several. Every seed has images, initial
weights and batches of its own.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy

sys.path.insert(0, str(Path(__file__).parents[1]))
from architectures import Transformer, cnn, fixup, resnet
from common import COLOURS, Checks, Experiment, Figures, idx_images, plain, spread

from lapwing import Laplace
from lapwing.errors import LapwingWarning
from lapwing.evidence import EvidenceAtMode, em
from lapwing.laplace import BaseLaplace
from lapwing.metrics import accuracy, nll
from lapwing.priors import Prior

NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "transformer": Transformer,
    "cnn": lambda *channels: cnn(channels),
    "resnet": resnet,
    "fixup": fixup,
}
NORMALISED = ("transformer", "cnn", "resnet")
RULES = ("trained_single", "trained_several", "mode_single", "mode_several")
SOURCE = {
    "transformer": dict(zip(RULES, (0.310, 0.162, 0.162, 0.162), strict=True)),
    "cnn": dict(zip(RULES, (0.253, 0.205, 0.025, 0.025), strict=True)),
    "resnet": dict(zip(RULES, (0.252, 0.236, 0.017, 0.016), strict=True)),
    "fixup": dict(zip(RULES, (0.153, 0.200, 0.055, 0.061), strict=True)),
}
MEAN, DEVIATION = 0.131, 0.289  # of pixels of MNIST, averaged 2 x 2
Pair = tuple[Tensor, Tensor]


def images(config: dict[str, Any]) -> tuple[Pair, Pair, Pair]:
    """Images [N, 1, 14, 14] and labels [N] for training, validation and test, drawn from a pool for every seed."""
    generator = torch.Generator().manual_seed(config["seed"])

    def drawn(split: str, rows: int) -> Pair:
        x, y = idx_images("mnist", split, config["pool"])
        chosen = torch.randperm(len(x), generator=generator)[:rows]
        return (avg_pool2d(x[chosen], 2) - MEAN) / DEVIATION, y[chosen]

    rows = config["training_rows"]
    x, y = drawn("train", rows + config["validation_rows"])
    return (x[:rows], y[:rows]), (x[rows:], y[rows:]), drawn("test", config["test_rows"])


def logits(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(part) for part in x.split(500)])


def train(model: nn.Module, training: Pair, validation: Pair, config: dict[str, Any]) -> int:
    """Adam without weight decay, stopped at the epoch with the best validation likelihood; that epoch."""
    x, y = training
    optimiser = torch.optim.Adam(model.parameters(), config["rate"])
    best, kept, epoch = float("inf"), deepcopy(model.state_dict()), 0
    for number in range(1, config["epochs"] + 1):
        model.train()
        for rows in torch.randperm(len(x)).split(config["batch"]):
            optimiser.zero_grad()
            cross_entropy(model(x[rows]), y[rows]).backward()
            optimiser.step()
        model.eval()
        loss = float(cross_entropy(logits(model, validation[0]), validation[1]))
        if loss < best:
            best, kept, epoch = loss, deepcopy(model.state_dict()), number
    model.load_state_dict(kept)
    optimiser.zero_grad()
    return epoch


def temperature(found: Tensor, y: Tensor) -> float:
    """The temperature of softmax(f / T) with the best likelihood on the validation rows."""
    grid = 10 ** torch.linspace(-1, 1, 401)
    return float(min(grid, key=lambda t: float(cross_entropy(found / t, y))))


def predicted(la: BaseLaplace, x: Tensor, config: dict[str, Any]) -> Tensor:
    """Probabilities [N, 10] of the linearised network: the mean of softmax over draws of each input's logits."""
    generator = torch.Generator().manual_seed(config["seed"])
    found = []
    for part in x.split(config["predict_batch"]):
        with torch.no_grad():
            linear = la.linearise(part)
            covariance = la.posterior.covariance(linear).double()
            largest = covariance.diagonal(dim1=-2, dim2=-1).amax(-1)[:, None, None]
            covariance = covariance + 1e-6 * largest * torch.eye(covariance.shape[-1])
            root = torch.linalg.cholesky(covariance).to(linear.value.dtype)
            noise = torch.randn(config["draws"], *linear.value.shape, generator=generator)
            found.append((linear.value + torch.einsum("bcd, nbd -> nbc", root, noise)).softmax(-1).mean(0))
    return torch.cat(found)


def at_trained(la: BaseLaplace, structure: str) -> Figures:
    """Sets the prior by the evidence at the trained weights."""
    la.optimize_prior_precision(prior_structure=structure)
    return {"precisions": la.prior_precision, "squared_norm": float(la.mean.square().sum())}


def at_theta_star(la: BaseLaplace, at: EvidenceAtMode, prior: Prior, rounds: int, config: dict[str, Any]) -> Figures:
    """Sets the prior by the evidence at theta*, to a hundredth, or as far as it comes in so many rounds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LapwingWarning)  # that it had not come to rest is among the figures
        tuned = em(at, prior, rounds=rounds, tolerance=config["tolerance"])
    mode = at.mode(tuned.prior)
    la.prior_precision = tuned.prior.precisions
    found = {
        "precisions": tuned.prior.precisions,
        "squared_norm": float(mode.weights.square().sum()),
        "residual": mode.relative,
        "rounds": tuned.rounds,
        "at_rest": float(tuned.converged),
        "passes": mode.passes,
        "evidence": float(mode.log_marginal),
    }
    if at.functions is not None:
        scatter = float((tuned.prior.sums(mode.weights.square()) * tuned.prior.precisions).sum())
        assert isinstance(mode.evidence.fit, Tensor)
        found["exact_evidence"] = float(mode.evidence.fit) - (scatter + at.functions.logdet(tuned.prior)) / 2
    return found


def one_network(name: str, data: tuple[Pair, Pair, Pair], config: dict[str, Any]) -> Figures:
    training, (x_validation, y_validation), (x, y) = data
    model = NETWORKS[name](*config[name])
    epoch = train(model, training, (x_validation, y_validation), config)
    scale = temperature(logits(model, x_validation), y_validation)
    plain = logits(model, x)
    found: dict[str, Any] = {
        "weights": sum(each.numel() for each in model.parameters()),
        "epoch": epoch,
        "temperature": scale,
        "accuracy": accuracy(plain.softmax(-1), y),
        "nll": {"map": nll(plain.softmax(-1), y), "map_scaled": nll((plain / scale).softmax(-1), y)},
    }
    loader = list(zip(*(each.split(250) for each in training), strict=True))
    la = Laplace(model, "classification", "all", "kron")
    la.fit(loader)
    for number, structure in (("single", "scalar"), ("several", several(name))):
        found[f"trained_{number}"] = at_trained(la, structure)
        found["nll"][f"trained_{number}"] = nll(predicted(la, x, config), y)

    at, groups = la.evidence_at_mode(loader, max_passes=config["passes"]), la.prior_groups

    def prior(precision: Tensor) -> Prior:
        if groups is not None and len(precision) > 1:
            return Prior.by_name(la.space, groups, precision)
        return Prior.isotropic(la.space, precision) if len(precision) == 1 else Prior.layerwise(la.space, precision)

    count, start = len(la.prior_precision), torch.tensor([config["start"]])
    if at.functions is not None:  # the kernels of all groups: that of a single precision is their sum
        at.functions.kernel(prior(start.expand(count)))
    for number, rounds in zip(("single", "several"), config["rounds"], strict=True):
        begin = prior(start.expand(1 if number == "single" else count))
        found[f"mode_{number}"] = at_theta_star(la, at, begin, rounds, config)
        found["nll"][f"mode_{number}"] = nll(predicted(la, x, config), y)
        start = la.prior_precision[:1]
    return found


def several(name: str) -> str:
    """The structure of a prior with several precisions."""
    return "scale_invariant" if name in NORMALISED else "module"


def one_task(task: tuple[int, str], config: dict[str, Any]) -> Figures:
    """One network on the images of one seed."""
    seed, name = task
    config = config | {"seed": seed}
    torch.manual_seed(seed)
    found = one_network(name, images(config), config)
    print(seed, name, found["nll"], flush=True)
    return found


def every_task(experiment: Experiment) -> dict[str, Any]:
    """By seed and network, in two processes of one thread each: networks with kernels need 3 GiB."""
    config, names = experiment.config, list(NETWORKS)
    tasks = [(seed, name) for seed in config["seeds"] for name in names]
    if experiment.smoke:
        torch.set_num_threads(1)
        found = [one_task(task, config) for task in tasks]
    else:
        jobs = min(2, os.cpu_count() or 1)
        with ProcessPoolExecutor(jobs, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
            found = list(pool.map(one_task, tasks, [config] * len(tasks)))
    by_task = dict(zip(tasks, found, strict=True))
    return {str(seed): {name: plain(by_task[seed, name]) for name in names} for seed in config["seeds"]}


def gain(seeds: dict[str, Any], name: str, better: str, worse: str) -> tuple[float, float]:
    """NLL of `worse` minus that of `better`: its mean over seeds, and the standard error of that."""
    each = [found[name]["nll"][worse] - found[name]["nll"][better] for found in seeds.values()]
    return fmean(each), stdev(each) / len(each) ** 0.5


def claims(seeds: dict[str, Any]) -> Checks:
    """A gain is more than two standard errors over seeds above zero; best or tied is no more than two below it."""
    held = {}
    for name in NETWORKS:
        mean, error = gain(seeds, name, "mode_single", "trained_single")
        held[f"{name}: with a single precision, the NLL is lower with the evidence at theta*"] = mean > 2 * error
    for name in NORMALISED:
        mean, error = gain(seeds, name, "trained_several", "trained_single")
        held[f"{name}: at the trained weights, a precision for each group lowers the NLL"] = mean > 2 * error
    for name in NORMALISED:
        gains = [gain(seeds, name, "mode_several", rule) for rule in RULES[:-1]]
        held[f"{name}: theta* with a precision for each group is best or tied"] = all(m >= -2 * e for m, e in gains)
    return held


def picture(seeds: dict[str, Any]) -> Figure:
    """NLL of the four rules, and of MAP, for every network; the source's table below."""
    titles = {"transformer": "Transformer", "cnn": "CNN", "resnet": "ResNet", "fixup": "Fixup ResNet"}
    rows = {
        "trained_single": ("trained, single", COLOURS["sampled"], ""),
        "trained_several": ("trained, several", COLOURS["sampled"], "//"),
        "mode_single": (r"$\theta_*$, single", COLOURS["laplace"], ""),
        "mode_several": (r"$\theta_*$, several", COLOURS["laplace"], "//"),
        "map": ("MAP", COLOURS["map"], ""),
        "map_scaled": ("MAP, scaled", COLOURS["data"], ""),
    }
    figure, axes = plt.subplots(2, 4, figsize=(12.5, 6.4), height_ratios=(1.4, 1), sharey="row")
    for column, (name, title) in enumerate(titles.items()):
        ours, theirs = axes[:, column]
        for place, (rule, (_, colour, hatch)) in enumerate(rows.items()):
            each = [found[name]["nll"][rule] for found in seeds.values()]
            look: dict[str, Any] = {"color": colour, "hatch": hatch, "edgecolor": "white", "alpha": 0.75}
            ours.bar(place, fmean(each), 0.8, **look)
            ours.annotate(
                f"{fmean(each):.3f}", (place, max(each)), (0, 4), textcoords="offset points", ha="center", fontsize=7.5
            )
            ours.scatter([place] * len(each), each, s=8, color="black", zorder=3)
            if rule in SOURCE[name]:
                theirs.bar_label(theirs.bar(place, SOURCE[name][rule], 0.8, **look), fmt="%.3f", fontsize=7.5)
        labels = [label for label, _, _ in rows.values()]
        ours.set_title(title)
        ours.set_xticks(range(6), labels, rotation=40, ha="right", fontsize=8)
        theirs.set_xticks(range(4), labels[:4], rotation=40, ha="right", fontsize=8)
        theirs.set_xlim(*ours.get_xlim())
    axes[0, 0].set_ylabel("test NLL: mean, and seeds")
    axes[1, 0].set_ylabel("test NLL, source")
    axes[0, 0].margins(y=0.12)
    axes[1, 0].margins(y=0.12)
    return figure


def main(experiment: Experiment) -> None:
    seeds = every_task(experiment)
    ours: Figures = {"over_seeds": spread(list(seeds.values())), "by_seed": seeds}
    experiment.save(picture(seeds))
    pairs = {
        "theta*_single": ("mode_single", "trained_single"),
        "theta*_several": ("mode_several", "trained_several"),
        "groups_at_trained": ("trained_several", "trained_single"),
        "groups_at_theta*": ("mode_several", "mode_single"),
    }
    ours["gains"] = {
        name: {
            label: dict(zip(("mean", "error"), gain(seeds, name, *each), strict=True)) for label, each in pairs.items()
        }
        for name in NETWORKS
    }
    source = {"nll": SOURCE, "claim": "recommendation 1 + recommendation 2 is best in all cases"}
    rows = experiment.config["training_rows"]
    reduced = (
        f"{rows} images of MNIST, averaged 2 x 2 to 14 x 14, in float32; Kronecker curvature; a search for the prior "
        f"has at most {experiment.config['rounds']} rounds; four of six networks"
    )
    experiment.write(ours, source, claims(seeds), reduced=reduced)


if __name__ == "__main__":
    main(Experiment.of(__file__))
