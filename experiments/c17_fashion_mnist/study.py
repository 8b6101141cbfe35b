"""The study of C17: a trained network, its Kronecker posterior over all weights, and predictions by several methods.

    map                  the network
    map_scaled           MAP with one temperature, that of the best validation likelihood; where asked for
    sampled              the mean over networks at sampled weights
    linearised           the linearised network, by Monte Carlo as in the source; probit and probit_full in closed form

each at the prior precision of the best validation likelihood, which is how the source chooses it, and at that of the
evidence. Shared by the experiments on Fashion-MNIST and on CIFAR10.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from network import train
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lapwing import Laplace
from lapwing.laplace import BaseLaplace
from lapwing.metrics import accuracy, auroc, calibration_error, entropy, nll
from lapwing.predictive import probit, probit_full

METHODS = ("map", "map_scaled", "sampled", "linearised", "probit", "probit_full")
Pair = tuple[Tensor, Tensor]


def loader(x: Tensor, y: Tensor, batch: int) -> list[Pair]:
    return list(zip(x.split(batch), y.split(batch), strict=True))


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """A result and the processor seconds it took, which do not depend on what else the machine does."""
    started = time.process_time()
    return work(), time.process_time() - started


def outputs(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(part) for part in x.split(1000)])


def mode(model: nn.Module, x: Tensor) -> Tensor:
    return outputs(model, x).softmax(-1)


def temperature(logits: Tensor, y: Tensor) -> float:
    """That of the largest likelihood of softmax(logits / T)."""
    logits, log = logits.detach().double(), torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS([log], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = cross_entropy(logits / log.exp(), y)
        loss.backward()
        return loss

    optimiser.step(closure)  # pyright: ignore[reportArgumentType]
    return float(log.detach().exp())


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


def network_study(
    data: dict[str, Pair], config: dict[str, Any], epochs: int, build: Callable[[], nn.Module], scaled: bool = False
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Everything of a network that was trained for so many epochs; and probabilities out of distribution.

    `scaled` also gives MAP a temperature that is tuned on the validation images.
    """
    torch.manual_seed(config["seed"])
    x, y = data["train"]
    x_test, y_test = data["test"]
    x_out, _ = data["out"]
    model = build()
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
    start = {"map": (mode(model, x_test), mode(model, x_out))}
    if scaled:
        x_val, y_val = data["validation"]
        found["temperature"] = temperature(outputs(model, x_val), y_val)
        start["map_scaled"] = (
            (outputs(model, x_test) / found["temperature"]).softmax(-1),
            (outputs(model, x_out) / found["temperature"]).softmax(-1),
        )
    for name, precision in precisions.items():
        la.prior_precision = precision
        inside, seconds["predict_test_linearised_three_ways"] = timed(lambda: linearised(la, x_test, config))
        outside = linearised(la, x_out, config)
        inside["sampled"], seconds["predict_test_sampled"] = timed(lambda: sampled(la, x_test, config))
        outside["sampled"] = sampled(la, x_out, config)
        for method, (of_test, of_out) in start.items():
            inside[method], outside[method] = of_test, of_out
        found[name] = {
            method: scores(inside[method], y_test, outside[method]) for method in METHODS if method in inside
        }
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
            "map_nll": nll(start["map"][0][: config["sweep_points"]], some[1]),
            "points": config["sweep_points"],
            "at": sweep(la, *some, config),
        },
        "processor_seconds": {"training_epoch": epoch, **seconds},
        "epochs_of_training_that_it_costs": {key: value / epoch for key, value in seconds.items()},
    }
    return found, kept[1]
