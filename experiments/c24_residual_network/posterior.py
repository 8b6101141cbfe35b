"""One measurement of C24 in a process of its own: `python posterior.py <job> <seed> <folder> <configuration>`.

    train     the network of a seed, to <folder>/weights.safetensors
    gp        covariances of the inputs, also between them, and the log-determinant by the rows that are kept: exact
    free      covariances, error bounds and draws by hessian_structure="matrix_free"
    weights   one variance by conjugate gradients among the weights, as matrix_free has it for many outputs

Prints processor seconds and the peak of resident memory, whole and above what was there before the fit, as JSON
(Linux); writes the rest to <folder>/<job>.safetensors.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from network import images, network, trained
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lapwing import Laplace
from lapwing.linalg import DualPrecision, MatrixFreePrecision, RowSet

Found = tuple[dict[str, Any], dict[str, Tensor]]


def resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))


def fitted(model: nn.Module, structure: str, config: dict[str, Any], seed: int, **options: Any) -> tuple[Any, Tensor]:
    found = images(config, seed)
    x, y = found["fit"]
    la = Laplace(model, "classification", "all", structure, prior_precision=config["prior_precision"], **options)
    la.fit(list(zip(x.split(config["batch"]), y.split(config["batch"]), strict=True)))
    return la, found["predict"][0]


def gp(model: nn.Module, config: dict[str, Any], seed: int) -> Found:
    la, x = fitted(model, "gp", config, seed)
    start = time.process_time()
    covariance = la.predict_moments(x)[1]
    seconds = time.process_time() - start
    precision = la.posterior.precision
    assert isinstance(precision, DualPrecision)
    # covariances between all inputs, without rows that are spelled out
    pieces = la.linearise(x).pieces()
    rows = RowSet.in_order(precision.size, [[part.of_points(slice(0, len(x))) for part in pieces]])
    prior = torch.stack(list(rows.block_grams(rows.stacks))).sum(0) / config["prior_precision"]
    white = torch.cat([precision.core.whiten(cross).flatten(0, 1) for _, cross in precision.crossed(pieces)])
    joint = prior - precision.scale * white @ white.mT
    return {"prediction": seconds, "rows": precision.rows.count}, {
        "covariance": covariance.double(),
        "joint": (joint + joint.mT) / 2,
        "logdet": precision.logdet().double().reshape(1),
    }


def free(model: nn.Module, config: dict[str, Any], seed: int) -> Found:
    la, x = fitted(model, "matrix_free", config, seed, solve_in=config["solve_in"])
    start = time.process_time()
    covariance = la.predict_moments(x)[1]
    first = time.process_time() - start
    precision = la.posterior.precision
    assert isinstance(precision, MatrixFreePrecision)
    linear = la.linearise(x)
    start = time.process_time()
    bounded = precision.bounded_variances(linear)
    again = time.process_time() - start
    start = time.process_time()
    draws = la.sample(config["draws"], generator=torch.Generator().manual_seed(seed))
    drawing = time.process_time() - start
    mean = la.mean
    moved = torch.stack([linear.mv(draw.sub_(mean)).flatten() for draw in draws])
    assert precision.few is not None
    times = {"prediction": first, "prediction_again": again, "draws": drawing, "rows": precision.few.rows.count}
    return times, {
        "covariance": covariance.double(),
        "value": bounded.value.double(),
        "excess": bounded.excess.double(),
        "moved": moved.double(),
        "logdet": precision.logdet().double().reshape(1),
    }


def weights(model: nn.Module, config: dict[str, Any], seed: int) -> Found:
    options = {"tolerance": config["tolerance"], "iterations": config["iterations"]}
    la, x = fitted(model, "matrix_free", config, seed, solve_in="weights", **options)
    precision = la.posterior.precision
    assert isinstance(precision, MatrixFreePrecision)
    linear = la.linearise(x[:1])
    row = linear.rmv(nn.functional.one_hot(torch.tensor([0]), linear.outputs).to(linear.value))
    start = time.process_time()
    found = precision.checked(row.unsqueeze(0), "a variance")
    seconds = time.process_time() - start
    b, value, rest = (each.double().flatten() for each in (row, found.value, found.residual))
    times = {"solve": seconds, "products": found.products, "residual": found.worst}
    return times, {
        "value": (b @ value + value @ rest).reshape(1),
        "excess": (rest @ rest / config["prior_precision"]).reshape(1),
    }


def main(job: str, seed: int, folder: Path, config: dict[str, Any]) -> None:
    torch.set_num_threads(config["threads"])
    start = time.process_time()
    if job == "train":
        model = trained(config, seed)
        save_file(model.state_dict(), folder / "weights.safetensors")
        x, y = images(config, seed)["predict"]
        accuracy = float((model(x).argmax(1) == y).float().mean())
        print(json.dumps({"seconds": time.process_time() - start, "accuracy": accuracy}))
        return
    model = network(config["widths"], config["blocks"], config["classes"])
    model.load_state_dict(load_file(folder / "weights.safetensors"))
    model.eval()
    before = resident("VmRSS")
    start = time.process_time()
    figures, arrays = {"gp": gp, "free": free, "weights": weights}[job](model, config, seed)
    figures |= {
        "seconds": time.process_time() - start,
        "weights": sum(each.numel() for each in model.parameters()),
        "gigabytes": resident("VmHWM") / 1e9,
        "gigabytes_above_start": (resident("VmHWM") - before) / 1e9,
    }
    save_file(arrays, folder / f"{job}.safetensors")
    print(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4]))
