"""C24: the exact posterior of a residual network of ResNet-50's size, without its rows in memory, beside `gp`.

Variances of 16 inputs and 8 draws of the weights by hessian_structure="matrix_free", each measurement in a process of
its own (`posterior.py`), compared with the posterior that keeps the rows of all data (`gp`, exact), and one variance
with conjugate gradients among the weights.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from safetensors.torch import load_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import COLOURS, Checks, Experiment, Figures

CLAIMED = 4.0
"""GB of resident memory, the whole process."""


def job(name: str, config: dict[str, Any], folder: Path) -> tuple[Figures, dict[str, Tensor]]:
    """One measurement: its figures and its arrays."""
    script = str(Path(__file__).with_name("posterior.py"))
    command = [sys.executable, script, name, str(config["seed"]), str(folder), json.dumps(config)]
    environment = os.environ | {"OMP_NUM_THREADS": str(config["threads"])}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    if ended.returncode:
        raise RuntimeError(f"{name} of seed {config['seed']} failed: {ended.stderr[-2000:]}")
    arrays = folder / f"{name}.safetensors"
    return json.loads(ended.stdout.splitlines()[-1]), load_file(arrays) if arrays.exists() else {}


def compared(exact: dict[str, Tensor], free: dict[str, Tensor], solved: dict[str, Tensor]) -> Figures:
    """Errors against gp, relative; the draws' squared length in units of gp's joint covariance, standardised."""
    variance = exact["covariance"].diagonal(dim1=1, dim2=2)
    largest = exact["covariance"].abs().amax((1, 2), keepdim=True)
    moved, joint = free["moved"], exact["joint"]
    squares = float((moved * torch.linalg.solve(joint, moved.mT).mT).sum())
    number = moved.numel()
    one = variance[0, 0]
    return {
        "variance_error": float(((free["value"] - variance) / variance).abs().max()),
        "covariance_error": float(((free["covariance"] - exact["covariance"]) / largest).abs().max()),
        "joint_and_single_of_gp": float((joint.diagonal() / variance.flatten() - 1).abs().max()),
        "stated_excess": float((free["excess"] / variance).abs().max()),
        "logdet_error": float(((free["logdet"] - exact["logdet"]) / exact["logdet"]).abs()),
        "draws_squared_length": squares / number,
        "draws_standardised": (squares - number) / (2 * number) ** 0.5,
        "weights_value_error": float((solved["value"] - one) / one),
        "weights_stated_excess": float(solved["excess"] / one),
    }


def checks(found: Figures) -> Checks:
    errors, free = found["errors"], found["free"]
    below = -errors["weights_value_error"]
    return {
        "matrix_free: 16 inputs and 8 draws below 4 GB": free["gigabytes"] < CLAIMED,
        "variances within a relative 1e-3 of gp": errors["variance_error"] < 1e-3,
        "covariances within 1e-3 of the largest entry of gp": errors["covariance_error"] < 1e-3,
        "stated error of a variance below a relative 1e-6": errors["stated_excess"] < 1e-6,
        "log-determinant within a relative 1e-6 of gp": errors["logdet_error"] < 1e-6,
        "draws: squared length within four standard errors of gp's law": abs(errors["draws_standardised"]) < 4,
        "conjugate gradients among the weights: gp within the stated error": -1e-3
        <= below
        <= errors["weights_stated_excess"] + 1e-3,
    }


def one_seed(experiment: Experiment) -> tuple[Figures, Checks]:
    config = experiment.config
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found: Figures = {"training": job("train", config, folder)[0]}
        found["gp"], exact = job("gp", config, folder)
        found["free"], free = job("free", config, folder)
        found["weights"], solved = job("weights", config, folder)
    found["errors"] = compared(exact, free, solved)
    if config["seed"] == config["seeds"][0]:
        draw(experiment, found, exact, free)
    return found, checks(found)


def draw(experiment: Experiment, found: Figures, exact: dict[str, Tensor], free: dict[str, Tensor]) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8))
    one, two = exact["covariance"].diagonal(dim1=1, dim2=2).flatten(), free["value"].flatten()
    left.plot(one, two, "o", color=COLOURS["laplace"], markersize=3)
    ends = [float(one.min()), float(one.max())]
    left.plot(ends, ends, color=COLOURS["exact"], linewidth=0.8)
    left.set(xlabel="variance by gp", ylabel="variance by matrix_free", title="16 inputs")
    names = {"gp": "gp", "free": "matrix_free", "weights": "matrix_free,\namong the weights"}
    for place, name in enumerate(names):
        right.bar(place, found[name]["gigabytes"], 0.6, color=COLOURS["exact" if name == "gp" else "laplace"])
        right.text(place, found[name]["gigabytes"], f"{found[name]['seconds']:.0f} s", ha="center", va="bottom")
    right.axhline(CLAIMED, color=COLOURS["data"], linewidth=0.8, linestyle=":")
    right.set_xticks(range(len(names)), list(names.values()))
    right.set(ylabel="peak memory of the process, GB", title=f"{found['free']['weights']:,} weights")
    experiment.save(figure)


def main(experiment: Experiment) -> None:
    ours, held = experiment.over_seeds(one_seed)
    experiment.write(ours, {}, held)


if __name__ == "__main__":
    main(Experiment.of(__file__))
