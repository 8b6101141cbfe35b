"""C22: the evidence at theta* and one precision per scale-invariant group, on four kinds of network.

A transformer, a CNN, a ResNet and one without normalisation (fixup), about 46,000 weights each, on MNIST with early
stopping. Exact posterior over all weights by kernels of the training outputs, linearised predictions by Monte Carlo.
The evidence is taken at the trained weights and at the linear mode theta*, with a single precision and with several;
and all of it by a Kronecker posterior as well. Every seed has images, initial weights and batches of its own.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, replace
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
from lapwing.evidence import EvidenceAtMode, ExactEvidence, em
from lapwing.evidence.function_space import FunctionSpace
from lapwing.evidence.tuners import AnyEvidence
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


@dataclass(frozen=True, eq=False)
class Kernels:
    """Of test inputs, by group of the prior: J' J'^T [N, C, C] of each, J' J^T [N C, M] with all training inputs."""

    own: list[Tensor]
    cross: list[Tensor]

    @staticmethod
    def of(la: BaseLaplace, training: Tensor, x: Tensor, finest: Prior, batch: int) -> Kernels:
        """Jacobians spelled out, a few test inputs at a time."""
        assert finest.groups is not None
        columns = [(finest.groups == number).nonzero()[:, 0] for number in range(len(finest.precisions))]
        own: list[list[Tensor]] = [[] for _ in columns]
        cross: list[list[Tensor]] = [[] for _ in columns]
        with torch.no_grad():
            rows = torch.cat([la.linearise(part).rows().flatten(0, 1) for part in training.split(batch)])
            by_group = [rows[:, each] for each in columns]
            del rows
            for part in x.split(batch):
                test = la.linearise(part).rows()
                for number, each in enumerate(columns):
                    chosen = test[..., each]
                    own[number].append(chosen @ chosen.mT)
                    cross[number].append(chosen.flatten(0, 1) @ by_group[number].mT)
        return Kernels([torch.cat(each) for each in own], [torch.cat(each) for each in cross])

    def covariance(self, functions: FunctionSpace, finest: Prior, prior: Prior) -> Tensor:
        """Of the logits of every test input [N, C, C], by the exact posterior."""
        assert finest.groups is not None
        delta = prior.precision().expand(prior.size).double()
        each = [1 / delta[(finest.groups == number).nonzero()[0, 0]] for number in range(len(self.own))]
        own = sum(weight * kernel.double() for weight, kernel in zip(each, self.own, strict=True))
        cross = sum(weight * kernel.double() for weight, kernel in zip(each, self.cross, strict=True))
        assert isinstance(own, Tensor)
        assert isinstance(cross, Tensor)
        inputs, outputs, _ = own.shape
        _, core = functions.core(prior)
        seen = (cross @ core).view(inputs, outputs, -1) @ cross.view(inputs, outputs, -1).mT
        return own - seen


def expected(value: Tensor, covariance: Tensor, config: dict[str, Any]) -> Tensor:
    """Probabilities [N, C]: the mean of softmax over draws of each input's logits."""
    generator = torch.Generator().manual_seed(config["seed"])
    values, vectors = torch.linalg.eigh((covariance + covariance.mT).double() / 2)
    root = (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)).to(value.dtype)
    found = []
    for mean, each in zip(value.split(config["predict_batch"]), root.split(config["predict_batch"]), strict=True):
        noise = torch.randn(config["draws"], *mean.shape, generator=generator)
        found.append((mean + torch.einsum("bcd, nbd -> nbc", each, noise)).softmax(-1).mean(0))
    return torch.cat(found)


def by_kronecker(la: BaseLaplace, x: Tensor) -> Tensor:
    """Covariance of the logits of every test input [N, C, C], by the Kronecker posterior."""
    with torch.no_grad():
        return torch.cat([la.posterior.covariance(la.linearise(part)) for part in x.split(250)])


def searched(at: AnyEvidence, prior: Prior, rounds: int, config: dict[str, Any]) -> tuple[Prior, Figures]:
    """The prior by the evidence, to a hundredth, or as far as it comes in so many rounds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LapwingWarning)  # that it had not come to rest is among the figures
        tuned = em(at, prior, rounds=rounds, tolerance=config["tolerance"])
    assert tuned.pruned is not None
    found: Figures = {
        "precisions": tuned.prior.precisions,
        "rounds": tuned.rounds,
        "at_rest": float(tuned.converged),
        "evidence": float(tuned.log_marginal),
        "pruned": float(tuned.pruned.sum()),
    }
    if isinstance(at, EvidenceAtMode):
        mode = at.mode(tuned.prior)
        found |= {"squared_norm": float(mode.weights.square().sum()), "residual": mode.relative, "passes": mode.passes}
    return tuned.prior, found


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
        "kronecker_nll": {},
        "squared_norm": sum(float(each.detach().square().sum()) for each in model.parameters()),
    }
    loader = list(zip(*(each.split(250) for each in training), strict=True))
    la = Laplace(model, "classification", "all", "kron")
    la.fit(loader)
    groups = la._groups_for("scale_invariant") if name in NORMALISED else None

    def prior(precision: Tensor, number: str) -> Prior:
        if number == "single":
            return Prior.isotropic(la.space, precision)
        return Prior.layerwise(la.space, precision) if groups is None else Prior.by_name(la.space, groups, precision)

    one = torch.tensor([config["start"]])
    finest = prior(one, "several")
    exact = la.evidence_at_mode(loader, max_passes=config["passes"], curvature="exact")
    assert exact.functions is not None
    found["groups"] = len(finest.precisions)
    exact.functions.kernel(finest)  # of all groups: that of a single precision is their sum
    kernels = Kernels.of(la, training[0], x, finest, config["rows_batch"])
    for kind, measured in (("", True), ("kronecker_", False)):
        # the same kernels find theta*; what differs is whose log-determinant the evidence has
        at = replace(exact, exactly=measured, point=exact.start)
        trained = ExactEvidence(la.evidence, exact.functions) if measured else la.evidence
        for place, evidence in (("trained", trained), ("mode", at)):
            start = one
            for number, rounds in zip(("single", "several"), config["rounds"], strict=True):
                chosen, figures = searched(evidence, prior(start, number), rounds, config)
                start = chosen.precisions[:1]
                if measured:
                    covariance = kernels.covariance(exact.functions, finest, chosen)
                else:
                    la.prior_precision = 1.0
                    la.prior_groups = groups if number == "several" else None
                    la.prior_precision = chosen.precisions
                    covariance = by_kronecker(la, x)
                found[f"{kind}{place}_{number}"] = figures
                found[f"{kind}nll"][f"{place}_{number}"] = nll(expected(plain, covariance, config), y)
    return found


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


def gain(seeds: dict[str, Any], name: str, better: str, worse: str, kind: str = "nll") -> tuple[float, float]:
    """NLL of `worse` minus that of `better`: its mean over seeds, and the standard error of that."""
    each = [found[name][kind][worse] - found[name][kind][better] for found in seeds.values()]
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
    for kind in ("", "kronecker_"):
        ours[f"{kind}gains"] = {
            name: {
                label: dict(zip(("mean", "error"), gain(seeds, name, *each, f"{kind}nll"), strict=True))
                for label, each in pairs.items()
            }
            for name in NETWORKS
        }
    source = {"nll": SOURCE, "claim": "recommendation 1 + recommendation 2 is best in all cases"}
    rows = experiment.config["training_rows"]
    reduced = (
        f"{rows} images of MNIST, averaged 2 x 2 to 14 x 14, in float32; a search for the prior has at most "
        f"{experiment.config['rounds']} rounds; four of six networks"
    )
    experiment.write(ours, source, claims(seeds), reduced=reduced)


if __name__ == "__main__":
    main(Experiment.of(__file__))
