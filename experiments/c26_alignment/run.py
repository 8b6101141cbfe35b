"""C26: how KFAC and KFRA directions are aligned with those of the exact GGN blocks and of the full GGN, along training.

An autoencoder on MNIST, 200 second-order updates. At several of them the damped directions of one batch are compared,
all with the same damping: Kronecker factors with exact inversion (the starred ones, by eigenvectors) and with the
damping split between the factors; the exact blocks and the full GGN by conjugate gradients; and the gradient itself.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from autoencoder import LIKELIHOOD, autoencoder, train
from common import COLOURS, Experiment, idx_images

from lapwing import estimate
from lapwing.directions import Alignment, alignment
from lapwing.linalg import Block, Blocks, Curvature, Diagonal, Kronecker
from lapwing.linalg.contracts import Multiple
from lapwing.tangent import Tangent

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


def measure(model: nn.Module, x: Tensor, config: dict[str, Any], generator: torch.Generator) -> Alignment:
    tangent = Tangent(model)
    return alignment(
        tangent,
        LIKELIHOOD,
        [(x, x)],
        approximations(tangent, x, config["samples"], generator),
        len(x) * config["damping"],
        preconditioner=SAMPLED,
        tolerance=config["tolerance"],
        iterations=config["iterations"],
    )


def series(found: dict[int, Alignment]) -> dict[str, dict[str, Any]]:
    """Cosines along the updates: by layer with the exact blocks, and of the whole vector with both references."""
    first = next(iter(found.values()))
    out: dict[str, dict[str, Any]] = {
        name: {
            "layers": [[at.with_blocks[name].layers[layer] for at in found.values()] for layer in first.layers],
            "whole_with_blocks": [at.with_blocks[name].whole for at in found.values()],
            "whole_with_full": [at.with_full[name].whole for at in found.values()],
        }
        for name in first.with_blocks
    }
    out["exact blocks"] = {"whole_with_full": [at.blocks_with_full.whole for at in found.values()]}
    return out


def means(cosines: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Over the updates."""
    return {
        name: {key: [mean(each) for each in value] if key == "layers" else mean(value) for key, value in entry.items()}
        for name, entry in cosines.items()
    }


def claims(along: dict[str, dict[str, Any]]) -> dict[str, bool]:
    """The claims of 4.5.2 for MNIST, on means over the updates; those on layers with exact inversion."""
    over = means(along)
    layers = {name: over[name]["layers"] for name in ("KFAC*", "KFRA*", "KFAC", "KFRA")}
    full = {name: entry["whole_with_full"] for name, entry in over.items()}
    kfra, blocks, count = layers["KFRA*"], along["exact blocks"]["whole_with_full"], len(layers["KFRA*"])
    middle, rest = kfra[count // 2 - 1 : count // 2 + 1], kfra[: count // 2 - 1] + kfra[count // 2 + 1 :]
    return {
        "KFRA* is better aligned with the exact blocks than KFAC*, mean over layers": mean(kfra)
        > mean(layers["KFAC*"]),
        "KFRA is better aligned with the exact blocks than KFAC, mean over layers": mean(layers["KFRA"])
        > mean(layers["KFAC"]),
        "KFRA* is better aligned with the full GGN than KFAC*": full["KFRA*"] > full["KFAC*"],
        "KFRA is better aligned with the full GGN than KFAC": full["KFRA"] > full["KFAC"],
        "KFRA*: the first half of the layers is less aligned than the second": mean(kfra[: count // 2])
        < mean(kfra[count // 2 :]),
        "KFRA*: both layers at the bottleneck are better aligned than the mean of the others": min(middle) > mean(rest),
        "the exact blocks are less aligned with the full GGN than some approximation": full["exact blocks"]
        < max(full[name] for name in ("KFAC*", "KFAC", "KFRA*", "KFRA")),
        "the alignment of the exact blocks with the full GGN is lower at the end than at the start": blocks[-1]
        < blocks[0],
        "split damping is better aligned with the full GGN than exact inversion, KFAC": full["KFAC"] > full["KFAC*"],
        "split damping is better aligned with the full GGN than exact inversion, KFRA": full["KFRA"] > full["KFRA*"],
    }


def picture(along: dict[str, dict[str, Any]], updates: list[int], sizes: list[int]) -> Figure:
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


def main(experiment: Experiment) -> None:
    config = experiment.config
    images = idx_images("mnist", "train", config["train"])[0].flatten(1)
    model = autoencoder(images.shape[1], config["hidden"])
    sizes = [model[0].in_features, *(layer.out_features for layer in model if isinstance(layer, nn.Linear))]
    kept, losses = train(model, images, config)

    generator = torch.Generator().manual_seed(1 + config["seed"])
    x = images[torch.randperm(len(images), generator=generator)[: config["measured"]]]
    found: dict[int, Alignment] = {}
    seconds: dict[int, float] = {}
    for update, state in kept.items():
        model.load_state_dict(state)
        started = time.process_time()
        found[update] = measure(model, x, config, generator)
        seconds[update] = time.process_time() - started
        solves = [found[update].full_solve, *found[update].block_solves.values()]
        residuals = ", ".join(f"{solve.residual:.3g} ({solve.iterations})" for solve in solves)
        print(f"after {update} updates, {seconds[update]:.0f} s: residuals (products) {residuals}", flush=True)
        for row in found[update].rows():
            print("  ", {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)

    along = series(found)
    ours = {
        "updates": list(found),
        "means_over_updates": means(along),
        "along_updates": along,
        "training_losses": losses,
        "conjugate_gradients": {
            update: {
                "full": asdict(at.full_solve),
                "blocks": {layer: asdict(solve) for layer, solve in at.block_solves.items()},
            }
            for update, at in found.items()
        },
        "processor_seconds_of_measurements": seconds,
    }
    experiment.save(picture(along, list(found), sizes))
    experiment.write(
        ours,
        SOURCE,
        claims(along),
        reduced=f"MNIST alone, {config['updates']} updates and {len(found)} measurements, on one batch of "
        f"{config['measured']} images; conjugate gradients to a residual of {config['tolerance']} or "
        f"{config['iterations']} products",
        notes="one damping for all directions, here that of a mean curvature; tanh is assumed, as the source names no "
        "activation",
    )


if __name__ == "__main__":
    main(Experiment.of(__file__))
