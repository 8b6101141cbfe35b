"""C17: a convolutional network on Fashion-MNIST with a Kronecker posterior over all weights.

MAP, the network at sampled weights, and the linearised network (Monte Carlo as in the source, and probit), at the prior
precision with the best validation likelihood, which is how the source chooses it, and at that of the evidence. Two
lengths of training, as the order of the methods depends on it. MNIST is out of distribution.
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
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import COLOURS, Experiment, idx_images
from network import network, train

from lapwing import Laplace
from lapwing.laplace import BaseLaplace
from lapwing.metrics import accuracy, auroc, calibration_error, entropy, nll
from lapwing.predictive import probit, probit_full

SOURCE = {
    "map": {"accuracy": 0.9139, "nll": 0.258, "ece": 0.017, "auroc_entropy": 0.864},
    "sampled": {"accuracy": 0.8442, "nll": 0.942, "ece": 0.411, "auroc_entropy": 0.945},
    "linearised": {"accuracy": 0.9225, "nll": 0.244, "ece": 0.012, "auroc_entropy": 0.955},
    "note": "KF posterior, mean over runs; the precision was tuned on a validation set; the OOD score is not named",
}
METHODS = ("map", "sampled", "linearised", "probit", "probit_full")
Pair = tuple[Tensor, Tensor]


def loader(x: Tensor, y: Tensor, batch: int) -> list[Pair]:
    return list(zip(x.split(batch), y.split(batch), strict=True))


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """A result and the processor seconds it took, which do not depend on what else the machine does."""
    started = time.process_time()
    return work(), time.process_time() - started


def mode(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(part).softmax(-1) for part in x.split(1000)])


def sampled(la: BaseLaplace, x: Tensor, config: dict[str, Any]) -> Tensor:
    """Probabilities [N, 10]: the mean over networks at sampled weights."""
    generator = torch.Generator().manual_seed(config["seed"])
    draws = {"n_samples": config["network_samples"], "generator": generator}
    return torch.cat([la(part, "nn", **draws) for part in x.split(config["predict_batch"])])  # pyright: ignore[reportArgumentType]


def linearised(la: BaseLaplace, x: Tensor, config: dict[str, Any]) -> dict[str, Tensor]:
    """Probabilities [N, 10] of the linearised network: Monte Carlo as in the source, and the two closed forms.

    The covariance of an input's logits is all that its probabilities depend on: it is formed once for the three.
    Calling `la(x, link_approx="mc")` draws from the same distribution through the weights, at a higher cost.
    """
    generator = torch.Generator().manual_seed(config["seed"])
    found: dict[str, list[Tensor]] = {"linearised": [], "probit": [], "probit_full": []}
    for part in x.split(config["predict_batch"]):
        with torch.no_grad():
            linear = la.linearise(part)
            mean, covariance = linear.value, la.posterior.covariance(linear)
            root = torch.linalg.cholesky(covariance.double()).to(mean.dtype)
            noise = torch.randn(config["samples"], *mean.shape, generator=generator)
            logits = mean + torch.einsum("b c d, n b d -> n b c", root, noise)
            found["linearised"].append(logits.softmax(-1).mean(0))
            found["probit"].append(probit(mean, covariance.diagonal(dim1=-2, dim2=-1)))
            found["probit_full"].append(probit_full(mean, covariance))
    return {name: torch.cat(parts) for name, parts in found.items()}


def scores(inside: Tensor, targets: Tensor, outside: Tensor) -> dict[str, float]:
    return {
        "accuracy": accuracy(inside, targets),
        "nll": nll(inside, targets),
        "ece": calibration_error(inside, targets),
        "auroc_entropy": auroc(entropy(inside), entropy(outside)),
        "auroc_confidence": auroc(-inside.amax(-1), -outside.amax(-1)),
    }


def claims(found: dict[str, dict[str, float]], where: str) -> dict[str, bool]:
    start, sampled, linear = found["map"], found["sampled"], found["linearised"]
    return {
        f"{where}: linearised has a lower NLL than MAP": linear["nll"] < start["nll"],
        f"{where}: linearised has a lower ECE than MAP": linear["ece"] < start["ece"],
        f"{where}: linearised has a higher OOD-AUROC than MAP": linear["auroc_entropy"] > start["auroc_entropy"],
        f"{where}: linearised is not less accurate than MAP, by 0.2 points": linear["accuracy"]
        > start["accuracy"] - 0.002,
        f"{where}: sampled is clearly worse than linearised in accuracy and NLL": sampled["accuracy"]
        < linear["accuracy"] - 0.01
        and sampled["nll"] > 1.2 * linear["nll"],
    }


def sweep(la: BaseLaplace, x: Tensor, y: Tensor, config: dict[str, Any]) -> list[dict[str, float]]:
    """Accuracy and NLL of the sampled and the linearised network at each of several precisions."""
    found = []
    for precision in config["sweep"]:
        la.prior_precision = precision
        row = {"precision": precision}
        for name, p in (("sampled", sampled(la, x, config)), ("linearised", linearised(la, x, config)["linearised"])):
            row |= {f"{name}_accuracy": accuracy(p, y), f"{name}_nll": nll(p, y)}
        found.append(row)
        print(row, flush=True)
    return found


def picture(studies: dict[str, dict[str, Any]], outside: dict[str, dict[str, Tensor]]) -> Figure:
    """By length of training: scores of the methods next to the source's; entropies outside; NLL and the precision."""
    figure, axes = plt.subplots(2 * len(studies), 3, figsize=(12, 6.6 * len(studies)), squeeze=False)
    names = {"accuracy": "accuracy", "nll": "NLL", "ece": "ECE", "auroc_entropy": "OOD-AUROC (entropy)"}
    methods = {"map": "MAP", "sampled": "sampled", "linearised": "linearised"}
    colours = {"map": COLOURS["map"], "sampled": COLOURS["sampled"], "linearised": COLOURS["laplace"]}
    series = {"source": ("", 0.35), "marglik": ("", 1.0), "gridsearch": ("//", 0.7)}
    tables = [SOURCE, *(study[rule] for study in studies.values() for rule in ("marglik", "gridsearch"))]
    for number, (epochs, study) in enumerate(studies.items()):
        length = f"{epochs} epoch{'s' if epochs != '1' else ''}"
        six = axes[2 * number : 2 * number + 2].flatten()
        for axis, (key, title) in zip(six, names.items(), strict=False):
            for place, (label, (hatch, alpha)) in enumerate(series.items()):
                table = SOURCE if label == "source" else study[label]
                for column, method in enumerate(methods):
                    bar = axis.bar(
                        column + 0.27 * (place - 1),
                        table[method][key],
                        0.25,
                        color=colours[method],
                        alpha=alpha,
                        hatch=hatch,
                        edgecolor="white",
                    )
                    axis.bar_label(bar, fmt="%.3f", fontsize=6.5, padding=1)
            axis.set_title(f"{title}, {length}")
            axis.set_xticks(range(3), list(methods.values()))
            every = [table[method][key] for table in tables for method in methods]
            if key in ("accuracy", "auroc_entropy"):
                axis.set_ylim(max(0.0, min(every) - 0.05), 1)
            else:
                axis.set_ylim(0, 1.1 * max(every))
        axis = six[4]
        for method, label in methods.items():
            axis.hist(
                entropy(outside[epochs][method]).numpy(),
                torch.linspace(0, 2.31, 40).tolist(),
                density=True,
                histtype="step",
                color=colours[method],
                label=label,
            )
        axis.set(title=f"MNIST: entropy at the evidence's precision, {length}", xlabel="nats", ylabel="density")
        axis.set_yscale("log")
        axis.legend(loc="lower left")
        axis, swept = six[5], study["sweep"]
        at = [row["precision"] for row in swept["at"]]
        axis.axhline(swept["map_nll"], color=colours["map"], label="MAP")
        for method in ("sampled", "linearised"):
            axis.plot(at, [row[f"{method}_nll"] for row in swept["at"]], "o-", color=colours[method], label=method)
        for rule, style, label in (("marglik", "--", "by evidence"), ("gridsearch", ":", "by validation")):
            axis.axvline(study["prior_precision"][rule], color="grey", linestyle=style, label=label)
        axis.set(title=f"NLL against the prior precision, {length}", xlabel="prior precision", xscale="log")
        axis.set_yscale("log")
        axis.set_yticks([0.25, 0.5, 1, 2, 4], ["0.25", "0.5", "1", "2", "4"])
        axis.minorticks_off()
        axis.legend(loc="upper right")
    figure.legend(
        [plt.Rectangle((0, 0), 1, 1, fc="grey", alpha=a, hatch=h, ec="white") for h, a in series.values()],
        ["source", "ours, precision by evidence", "ours, precision by validation"],
        loc="outside upper center",
        ncols=3,
    )
    return figure


def study(data: dict[str, Pair], config: dict[str, Any], epochs: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Everything of a network that was trained for so many epochs; and probabilities out of distribution."""
    torch.manual_seed(config["seed"])
    x, y = data["train"]
    x_test, y_test = data["test"]
    x_out, _ = data["out"]
    model = network(config["channels"], config["hidden"])
    losses, epoch = train(model, x, y, config, epochs)
    la = Laplace(model, "classification", "all", "kron")
    _, fit_seconds = timed(lambda: la.fit(loader(x, y, config["fit_batch"])))
    _, marglik_seconds = timed(lambda: la.optimize_prior_precision(method="marglik"))
    precisions = {"marglik": float(la.prior_precision)}
    tuning = {
        "method": "gridsearch",
        "val_loader": loader(*data["validation"], config["predict_batch"]),
        "log_prior_prec_min": config["log_precision"][0],
        "log_prior_prec_max": config["log_precision"][1],
        "grid_size": config["grid_size"],
    }
    _, grid_seconds = timed(lambda: la.optimize_prior_precision(**tuning))
    precisions["gridsearch"] = float(la.prior_precision)

    found: dict[str, Any] = {}
    seconds: dict[str, float] = {"fit_kron_exact": fit_seconds, "marglik": marglik_seconds, "gridsearch": grid_seconds}
    kept: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    start = mode(model, x_test), mode(model, x_out)
    for name, precision in precisions.items():
        la.prior_precision = precision
        inside, seconds["predict_test_linearised_three_ways"] = timed(lambda: linearised(la, x_test, config))
        outside = linearised(la, x_out, config)
        inside["sampled"], seconds["predict_test_sampled"] = timed(lambda: sampled(la, x_test, config))
        outside["sampled"] = sampled(la, x_out, config)
        inside["map"], outside["map"] = start
        found[name] = {method: scores(inside[method], y_test, outside[method]) for method in METHODS}
        print(epochs, name, precision, found[name], flush=True)
        if name == "marglik":
            kept = inside, outside
    la.prior_precision = precisions["marglik"]
    public, seconds["predict_test_probit"] = timed(lambda: [la(part) for part in x_test.split(config["predict_batch"])])
    few = x_test[: config["predict_batch"]]
    generator = torch.Generator().manual_seed(1 + config["seed"])
    by_weights, one = timed(lambda: la(few, link_approx="mc", n_samples=config["samples"], generator=generator))
    seconds["predict_test_mc_by_weights_extrapolated"] = one * len(x_test) / len(few)
    some = x_test[: config["sweep_points"]], y_test[: config["sweep_points"]]
    found |= {
        "prior_precision": precisions,
        "log_marginal_likelihood": float(la.log_marginal_likelihood(torch.tensor(precisions["marglik"]))),
        "parameters": la.n_params,
        "training_losses": losses,
        "checks": {
            "probit, called directly, largest difference": float((torch.cat(public) - kept[0]["probit"]).abs().max()),
            "mc by draws of weights, mean difference": float(
                (by_weights - kept[0]["linearised"][: len(few)]).abs().mean()
            ),
        },
        "sweep": {
            "map_nll": nll(start[0][: config["sweep_points"]], some[1]),
            "points": config["sweep_points"],
            "at": sweep(la, *some, config),
        },
        "processor_seconds": {"training_epoch": epoch, **seconds},
        "epochs_of_training_that_it_costs": {key: value / epoch for key, value in seconds.items()},
    }
    return found, kept[1]


def main(experiment: Experiment) -> None:
    config = experiment.config
    torch.set_num_threads(1)  # processor seconds are compared
    images, labels = idx_images("fashion-mnist", "train")
    data = {
        "train": (images[: config["train"]], labels[: config["train"]]),
        "validation": (images[-config["validation"] :], labels[-config["validation"] :]),
        "test": idx_images("fashion-mnist", "test", config["test"]),
        "out": idx_images("mnist", "test", config["test"]),
    }
    found: dict[str, dict[str, Any]] = {}
    outside: dict[str, dict[str, Tensor]] = {}
    held: dict[str, bool] = {}
    for epochs in config["epochs"]:
        found[str(epochs)], outside[str(epochs)] = study(data, config, epochs)
        for rule, name in (("gridsearch", "validation"), ("marglik", "evidence")):
            held |= claims(found[str(epochs)][rule], f"{epochs} epochs, {name}")
    experiment.save(picture(found, outside))
    weights = found[str(config["epochs"][0])]["parameters"]
    experiment.write(
        {"by_epochs": found},
        SOURCE,
        held,
        reduced=f"{' and '.join(map(str, config['epochs']))} epochs, {weights:,} weights (three convolutions and three "
        "fully connected layers as in the source, narrower), one run of each instead of several",
        notes="times are processor seconds on one thread; the sampled network averages network_samples draws; the "
        "posterior's precision is tuned after training at training_precision",
    )


if __name__ == "__main__":
    main(Experiment.of(__file__))
