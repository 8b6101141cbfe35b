"""C26: how KFAC and KFRA directions are aligned with those of the exact GGN blocks and of the full GGN, along training.

An autoencoder on MNIST, on its way downhill by `GaussNewton`, once with KFAC and once with KFRA. At several updates the
damped directions of one batch are compared: Kronecker factors with exact inversion (the starred ones, by eigenvectors)
and with the damping split between the factors; the exact blocks and the full GGN by conjugate gradients; the gradient.

    zeta    the source's: exact directions at lambda + tau, the approximations at lambda + zeta, both of the optimiser
    tau     all at lambda + tau
    one     all at config["damping"]

Means are over updates and both ways down; a check is made on each seed, at "zeta" and at "one".
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "c25_autoencoders"))
from arms import autoencoder, drawn
from common import COLOURS, Checks, Experiment, Figures
from images import mnist

from lapwing import estimate
from lapwing.directions import Alignment, alignment
from lapwing.likelihoods import Bernoulli
from lapwing.linalg import Block, Blocks, Curvature, Diagonal, Kronecker, Precision
from lapwing.linalg.contracts import Multiple
from lapwing.tangent import Tangent
from lapwing.training import GaussNewton

LIKELIHOOD = Bernoulli()
WAYS = {"KFAC": "mc", "KFRA": "recursive"}
PROTOCOLS = {"zeta": "zeta of their own", "one": "one damping for all"}
SAMPLED = "KFAC*, more samples"
STYLE: dict[str, dict[str, Any]] = {
    "KFAC*": {"color": COLOURS["laplace"], "linestyle": "-", "marker": "o"},
    "KFAC": {"color": COLOURS["laplace"], "linestyle": "--", "marker": "o", "markerfacecolor": "white"},
    SAMPLED: {"color": COLOURS["other"], "linestyle": "-", "marker": "."},
    "KFRA*": {"color": COLOURS["sampled"], "linestyle": "-", "marker": "s"},
    "KFRA": {"color": COLOURS["sampled"], "linestyle": "--", "marker": "s", "markerfacecolor": "white"},
    "gradient": {"color": COLOURS["data"], "linestyle": ":", "marker": ""},
    "exact blocks": {"color": COLOURS["exact"], "linestyle": "-", "marker": "^"},
}
SOURCE = {
    "per layer": "KFRA is in general better aligned with the exact blocks than KFAC; the further a layer is from the "
    "output, the lower the similarity; layers 4 and 5, at the bottleneck, always have a relatively high one",
    "whole": "KFRA outperforms KFAC on average; on MNIST the exact block diagonal is lower than expected and gets "
    "worse along training, and the approximate inversions perform better",
    "note": "figures 4.2 and 4.3, without numbers in the text; there the approximations have a further damping zeta, "
    "which the exact directions do not have",
}


def split_damping(exact: Blocks) -> Blocks:
    """The same factors with the damping split between them (4.25), and the same eigenvectors, which are found once."""

    def of(block: Block) -> Block:
        curvature = block.curvature
        if isinstance(curvature, Kronecker):
            curvature = replace(curvature, factored_damping=True, multiple=Multiple(curvature, 1))
        return replace(block, curvature=curvature)

    return replace(exact, blocks=tuple(of(block) for block in exact.blocks))


def approximations(tangent: Tangent, x: Tensor, samples: int, generator: torch.Generator) -> dict[str, Curvature]:
    data = tangent, LIKELIHOOD, [(x, x)]
    kfac = estimate.kfac(*data, generator=generator)
    kfra = estimate.kfra(*data)
    return {
        "KFAC*": kfac,
        "KFAC": split_damping(kfac),
        SAMPLED: estimate.kfac(*data, samples=samples, generator=generator),
        "KFRA*": kfra,
        "KFRA": split_damping(kfra),
        "gradient": Diagonal(torch.zeros(tangent.space.size)),
    }


@dataclass(frozen=True, eq=False)
class Damped:
    """What `alignment` asks of a curvature, at a damping of its own instead of that of the exact directions."""

    inner: Curvature
    damping: float

    @property
    def size(self) -> int:
        return self.inner.size

    def with_prior(self, precision: float) -> Precision:
        return self.inner.with_prior(self.damping)


def measure(
    optimiser: GaussNewton, x: Tensor, config: dict[str, Any], generator: torch.Generator
) -> dict[str, Alignment]:
    """By protocol, at the weights and dampings that the optimiser has now."""
    tangent, count, decay = Tangent(optimiser.tangent.model), len(x), config["weight_decay"]
    found = approximations(tangent, x, config["samples"], generator)
    own = count * (decay + optimiser.damping.of_curvature)
    both = found | {f"own {name}": cast(Curvature, Damped(each, own)) for name, each in found.items()}

    def aligned(curvatures: dict[str, Curvature], damping: float) -> Alignment:
        return alignment(
            tangent,
            LIKELIHOOD,
            [(x, x)],
            curvatures,
            count * damping,
            preconditioner=SAMPLED,
            tolerance=config["tolerance"],
            iterations=config["iterations"],
        )

    exact = aligned(both, decay + optimiser.damping.tau)

    def only(prefix: str) -> Alignment:
        blocks, full = (
            {name: given[prefix + name] for name in found} for given in (exact.with_blocks, exact.with_full)
        )
        return replace(exact, with_blocks=blocks, with_full=full)

    return {"zeta": only("own "), "tau": only(""), "one": aligned(found, config["damping"])}


def series(found: list[Alignment]) -> Figures:
    """Cosines along the updates: by layer with the exact blocks, and of the whole vector with both references."""
    out: Figures = {
        name: {
            "layers": [[at.with_blocks[name].layers[layer] for at in found] for layer in found[0].layers],
            "whole_with_blocks": [at.with_blocks[name].whole for at in found],
            "whole_with_full": [at.with_full[name].whole for at in found],
        }
        for name in found[0].with_blocks
    }
    out["exact blocks"] = {"whole_with_full": [at.blocks_with_full.whole for at in found]}
    return out


def average(found: list[Any]) -> Any:
    """The same figures of several runs, place by place."""
    first = found[0]
    if isinstance(first, dict):
        return {key: average([each[key] for each in found]) for key in first}
    if isinstance(first, list):
        return [average(list(column)) for column in zip(*found, strict=True)]
    return fmean(found)


def means(cosines: Figures) -> Figures:
    """Over the updates."""
    return {
        name: {
            key: [fmean(each) for each in value] if key == "layers" else fmean(value) for key, value in entry.items()
        }
        for name, entry in cosines.items()
    }


def claims(along: Figures) -> Checks:
    """The claims of 4.5.2 for MNIST, on means over the updates; those on layers with exact inversion."""
    over = means(along)
    layers = {name: over[name]["layers"] for name in ("KFAC*", "KFRA*", "KFAC", "KFRA")}
    full = {name: entry["whole_with_full"] for name, entry in over.items()}
    kfra, blocks, count = layers["KFRA*"], along["exact blocks"]["whole_with_full"], len(layers["KFRA*"])
    middle, rest = kfra[count // 2 - 1 : count // 2 + 1], kfra[: count // 2 - 1] + kfra[count // 2 + 1 :]
    others = fmean(rest)
    return {
        "KFRA* is better aligned with the exact blocks than KFAC*, mean over layers": fmean(kfra)
        > fmean(layers["KFAC*"]),
        "KFRA is better aligned with the exact blocks than KFAC, mean over layers": fmean(layers["KFRA"])
        > fmean(layers["KFAC"]),
        "KFRA* is better aligned with the full GGN than KFAC*": full["KFRA*"] > full["KFAC*"],
        "KFRA is better aligned with the full GGN than KFAC": full["KFRA"] > full["KFAC"],
        "KFRA*: the first half of the layers is less aligned than the second": fmean(kfra[: count // 2])
        < fmean(kfra[count // 2 :]),
        "KFRA*: both layers at the bottleneck are better aligned than the mean of the others": min(middle) > others,
        "the exact blocks are less aligned with the full GGN than some approximation": full["exact blocks"]
        < max(full[name] for name in ("KFAC*", "KFAC", "KFRA*", "KFRA")),
        "the alignment of the exact blocks with the full GGN is lower at the end than at the start": blocks[-1]
        < blocks[0],
        "split damping is better aligned with the full GGN than exact inversion, KFAC": full["KFAC"] > full["KFAC*"],
        "split damping is better aligned with the full GGN than exact inversion, KFRA": full["KFRA"] > full["KFRA*"],
    }


def picture(along: Figures, updates: list[int], sizes: list[int]) -> Figure:
    """Eight layers with the exact blocks, and the whole vector with the full GGN."""
    figure, axes = plt.subplots(3, 3, figsize=(11, 9), sharex=True, sharey=True)
    for number, axis in enumerate(axes.flat):
        last = number == len(sizes) - 1
        for name, style in STYLE.items():
            entry = along[name]
            if last or "layers" in entry:
                values = entry["whole_with_full"] if last else entry["layers"][number]
                axis.plot(updates, values, label=name, markersize=4, **style)
        at = f"layer {number + 1}: {sizes[number]} to {sizes[number + 1]}" if not last else ""
        axis.set_title("all layers, with the full GGN" if last else at)
        axis.grid(alpha=0.3)
        axis.set_ylim(min(0.0, axis.get_ylim()[0]), 1.02)
    for axis in axes[-1]:
        axis.set_xlabel("updates")
    for axis in axes[:, 0]:
        axis.set_ylabel("cosine similarity")
    figure.legend(*axes[-1, -1].get_legend_handles_labels(), loc="outside upper center", ncols=len(STYLE))
    return figure


def way_down(estimator: str, images: Tensor, x: Tensor, config: dict[str, Any]) -> Figures:
    """The trajectory of one optimiser, measured at config["measure_at"] updates on the batch x."""
    torch.manual_seed(config["seed"])
    model = autoencoder(images.shape[1], config["hidden"])
    generator = torch.Generator().manual_seed(config["seed"])
    optimiser = GaussNewton(
        model, LIKELIHOOD, estimator=estimator, weight_decay=config["weight_decay"], generator=generator
    )
    batches = drawn(images, images, config["batch"], config["seed"])
    found: dict[str, list[Alignment]] = {"zeta": [], "tau": [], "one": []}
    losses, dampings, seconds = [], [], []
    for number in range(1, config["measure_at"][-1] + 1):
        losses.append(optimiser.step(*next(batches)).loss)
        if number in config["measure_at"]:
            started = time.process_time()
            for name, each in measure(optimiser, x, config, generator).items():
                found[name].append(each)
            seconds.append(time.process_time() - started)
            dampings.append({"tau": optimiser.damping.tau, "zeta": optimiser.damping.of_curvature})
            print(config["seed"], estimator, number, losses[-1], dampings[-1], seconds[-1], flush=True)
            for name in ("zeta", "one"):
                solved = [found[name][-1].full_solve, *found[name][-1].block_solves.values()]
                said = ", ".join(f"{each.residual:.3g} ({each.iterations})" for each in solved)
                print(f"   {name}: residuals (products) {said}", flush=True)
    return {
        "along_updates": {name: series(each) for name, each in found.items()},
        "losses": [losses[0], *(losses[at - 1] for at in config["measure_at"])],
        "dampings": dampings,
        "worst_residuals": {
            name: [max(solve["residual"] for solve in _solves(at)) for at in found[name]] for name in PROTOCOLS
        },
        "processor_seconds_of_measurements": seconds,
    }


def _solves(found: Alignment) -> list[dict[str, Any]]:
    return [asdict(found.full_solve), *(asdict(each) for each in found.block_solves.values())]


def one_seed(experiment: Experiment) -> tuple[Figures, Checks]:
    config = experiment.config
    images = mnist(config["train"], torch.Generator().manual_seed(config["seed"]))
    x = images[: config["measured"]]
    found = {name: way_down(estimator, images, x, config) for name, estimator in WAYS.items()}
    held: Checks = {}
    for protocol, title in PROTOCOLS.items():
        along = average([each["along_updates"][protocol] for each in found.values()])
        held |= {f"{title}: {name}": value for name, value in claims(along).items()}
    return found, held


def main(experiment: Experiment) -> None:
    config = experiment.config
    ours, held = experiment.over_seeds(one_seed)
    ways = [way for seed in ours["by_seed"].values() for way in seed.values()]
    along = average([way["along_updates"] for way in ways])
    experiment.save(picture(along["zeta"], config["measure_at"], sizes_of(config)))
    experiment.write(
        {
            "updates": config["measure_at"],
            "means": {name: means(each) for name, each in along.items()},
            "along_updates": along,
            "first_loss": fmean(way["losses"][0] for way in ways),
            "last_loss": fmean(way["losses"][-1] for way in ways),
            **ours,
        },
        SOURCE,
        held,
        reduced=f"MNIST alone, hidden layers {config['hidden']} and back, {config['measure_at'][-1]} updates and "
        f"{len(config['measure_at'])} measurements, on one batch of {config['measured']} images; conjugate gradients "
        f"to a residual of {config['tolerance']} or {config['iterations']} products",
        notes="dampings are those of a mean curvature; tanh is assumed, as the source names no activation",
    )


def sizes_of(config: dict[str, Any]) -> list[int]:
    hidden = config["hidden"]
    return [784, *hidden, *hidden[-2::-1], 784]


if __name__ == "__main__":
    main(Experiment.of(__file__))
