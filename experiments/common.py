"""What every experiment shares: arguments, configuration, seeds, results with their provenance, data files, pictures.

An experiment is a folder `experiments/<claim>_<name>/` with run.py, config.json, results.json, a picture,
README.md, and the template of its figures, figures.md.

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from common import Experiment

    def main(experiment: Experiment) -> None:
        config = experiment.config
        ...
        experiment.save(figure)
        experiment.write(ours={...}, source={...}, held={"the claim in words": True})

    if __name__ == "__main__":
        main(Experiment.of(__file__))

`python run.py` writes results.json and the picture next to run.py, and the figures in README.md (see `readme`).
`python run.py --smoke` lays the entries of config["smoke"] over the configuration and writes to a temporary folder, so
a quick check never replaces results. Checks, seeds and splits are in the configuration and the code: `clean` in
results.json says that both were committed before the run. `python experiments/rerun.py` runs in a clone.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import matplotlib

matplotlib.use("Agg")
import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from provenance import committed, machine
from readme import rendered

STYLE: dict[Any, Any] = {
    "figure.dpi": 110,
    "savefig.dpi": 110,
    "figure.constrained_layout.use": True,
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.labelsize": 10,
    "legend.fontsize": 8.5,
    "legend.framealpha": 0.9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.6,
}
# One colour per role in every picture, distinguishable without colour vision (Okabe and Ito's palette).
COLOURS = {
    "map": "#000000",
    "laplace": "#0072B2",
    "sampled": "#D55E00",
    "exact": "#009E73",
    "other": "#CC79A7",
    "data": "#555555",
}


Figures = dict[str, Any]
Checks = dict[str, bool]


@dataclass(frozen=True, eq=False)
class Experiment:
    """One run: its folder, its configuration, where it writes, and the commit it started from."""

    folder: Path
    config: dict[str, Any]
    out: Path
    smoke: bool
    commit: dict[str, Any]
    started: float = field(default_factory=time.perf_counter)

    @classmethod
    def of(cls, file: str, arguments: list[str] | None = None) -> Experiment:
        """The run of `file` (its __file__) asked for on the command line; seeds torch with config["seed"]."""
        folder = Path(file).resolve().parent
        parser = argparse.ArgumentParser(description=f"Experiment {folder.name}; its claim is in README.md.")
        parser.add_argument("--smoke", action="store_true", help="a tiny run into a temporary folder")
        asked = parser.parse_args(arguments)
        config = json.loads((folder / "config.json").read_text())
        smaller = config.pop("smoke", {})
        unknown = set(smaller) - set(config)
        if unknown:
            raise KeyError(f"config['smoke'] has {sorted(unknown)}, which config.json of {folder.name} does not have")
        if asked.smoke:
            config |= smaller
        out = Path(tempfile.mkdtemp(prefix=f"{folder.name}-")) if asked.smoke else folder
        outputs = [f"experiments/{folder.name}/{name}" for name in ("results.json", "picture.png", "README.md")]
        begun = cls(folder, config, out, asked.smoke, committed(outputs))
        begun.prepare()
        return begun

    def prepare(self) -> None:
        matplotlib.rcParams.update(STYLE)
        if "seed" in self.config:
            torch.manual_seed(self.config["seed"])

    def over_seeds(
        self, study: Callable[[Experiment], tuple[Figures, Checks]]
    ) -> tuple[Figures, dict[str, list[bool]]]:
        """`study` for each of config["seeds"], given as config["seed"], in processes of one thread each.

        Its figures as "over_seeds" (see `spread`) and "by_seed", and every check as a list with one entry a seed. Only
        the first seed may save a picture. `study` has to be a function of the module that is run.
        """
        torch.set_num_threads(1)
        seeds = self.config["seeds"]
        runs = [replace(self, config=self.config | {"seed": seed}) for seed in seeds]
        if self.smoke:
            found = [_one(study, each) for each in runs]
        else:
            jobs = min(len(seeds), os.cpu_count() or 1)
            with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
                found = list(pool.map(_one, [study] * len(runs), runs))
        figures = [plain(each) for each, _ in found]
        held = {name: [checks[name] for _, checks in found] for name in found[0][1]}
        by_seed = {str(seed): each for seed, each in zip(seeds, figures, strict=True)}
        return {"over_seeds": spread(figures), "by_seed": by_seed}, held

    def write(
        self,
        ours: Mapping[str, Any],
        source: Mapping[str, Any],
        held: Mapping[str, bool] | Mapping[str, list[bool]],
        *,
        reduced: str | None = None,
        notes: str | None = None,
    ) -> Path:
        """results.json: our figures next to the source's, whether each claim held, and how the run can be had again.

        A check made on several seeds holds if it holds on every one of them. `reduced` says in words what was made
        smaller than in the source; None where nothing was. The figures in README.md follow.
        """
        seeds = {name: each for name, each in held.items() if isinstance(each, list)}
        results = plain(
            {
                "experiment": self.folder.name,
                "held": {name: all(each) if isinstance(each, list) else each for name, each in held.items()},
                **({"held_on_seeds": seeds} if seeds else {}),
                "ours": dict(ours),
                "source": dict(source),
                "reduced": reduced is not None,
                "reduction": reduced,
                "notes": notes,
                "smoke": self.smoke,
                "seconds": round(time.perf_counter() - self.started, 1),
                **self.commit,
                "machine": machine(),
            }
        )
        results["config"] = self.config  # with all digits
        path = self.out / "results.json"
        path.write_text(as_text(results))
        (self.out / "README.md").write_text(rendered(self.folder, results))
        print(as_text({name: results[name] for name in ("held", "ours")}))
        if not self.commit["clean"]:
            print(f"not clean, these were not as committed: {', '.join(self.commit['changed'][:10])}")
        print(f"results in {path}")
        return path

    def save(self, figure: Figure) -> Path:
        path = self.out / "picture.png"
        figure.savefig(path)
        return path


Study = Callable[[Experiment], tuple[Figures, Checks]]


def _one(study: Study, experiment: Experiment) -> tuple[Figures, Checks]:
    torch.set_num_threads(1)  # figures then depend on no number of cores
    experiment.prepare()
    return study(experiment)


# -- figures ----------------------------------------------------------------------------------------------------------


def spread(found: Sequence[Any]) -> Any:
    """The same figures of several seeds, with median, mean, deviation, smallest and largest at each number.

    What is not a number is kept where all seeds agree on it; lists are compared place by place, or left out where their
    lengths differ.
    """
    first = found[0]
    if isinstance(first, Mapping):
        return {key: spread([each[key] for each in found]) for key in first}
    if isinstance(first, list):
        same = all(len(each) == len(first) for each in found)
        return [spread(column) for column in zip(*found, strict=True)] if same else None
    if any(isinstance(each, (str, bool)) or each is None for each in found):
        return first if all(each == first for each in found) else None
    if all(each == first for each in found):
        return first
    return plain(
        {
            "median": median(found),
            "mean": fmean(found),
            "deviation": stdev(found),
            "min": min(found),
            "max": max(found),
        }
    )


def as_text(results: Mapping[str, Any]) -> str:
    """JSON with a line for every entry, and lists of numbers on one line."""
    text = json.dumps(results, indent=2, allow_nan=False)
    return re.sub(r"\[[^\[\]{}\"]*\]", lambda found: " ".join(found[0].split()), text) + "\n"


def plain(value: Any) -> Any:
    """Numbers, lists and text only; floats at 6 digits; a number that is not finite becomes its name."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        return plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    return value


# -- training small networks ------------------------------------------------------------------------------------------


def minimise(model: torch.nn.Module, loss: Callable[[], torch.Tensor], rounds: int = 1000) -> float:
    """Full-batch L-BFGS on the trainable parameters until it comes to rest; the final loss.

    For the modes of small problems in float64, which Laplace's method takes as given and Adam does not reach.
    """
    parameters = [each for each in model.parameters() if each.requires_grad]
    optimiser = torch.optim.LBFGS(
        parameters,
        max_iter=rounds,
        history_size=50,
        tolerance_grad=1e-9,
        tolerance_change=1e-14,
        line_search_fn="strong_wolfe",
    )

    def closure() -> float:
        optimiser.zero_grad()
        value = loss()
        value.backward()
        return float(value.detach())

    optimiser.step(closure)
    optimiser.zero_grad()
    with torch.no_grad():
        return float(loss())


def squared_norm(model: torch.nn.Module) -> torch.Tensor:
    """theta^T theta over the trainable parameters."""
    return torch.stack([each.square().sum() for each in model.parameters() if each.requires_grad]).sum()


# -- data -------------------------------------------------------------------------------------------------------------


def data_folder() -> Path:
    """The folder that LAPWING_DATA names."""
    named = os.environ.get("LAPWING_DATA")
    if named is None or not Path(named).is_dir():
        sys.exit(f"LAPWING_DATA is {named!r}; expected the folder that holds mnist/, uci/ and the other data sets.")
    return Path(named)


def read_idx(path: Path) -> NDArray[np.uint8]:
    """A gzipped idx file of bytes (the MNIST family)."""
    raw = gzip.decompress(path.read_bytes())
    dimensions = raw[3]
    shape = np.frombuffer(raw, ">i4", dimensions, 4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def idx_images(
    name: str, split: str = "train", limit: int | None = None, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Images [N, 1, 28, 28] in [0, 1] and labels [N] of "mnist", "fashion-mnist", "kmnist" or "notmnist".

    `split` is "train" or "test". kmnist has 7,000 training images, notmnist only a test split.
    """
    prefix = {"train": "train7000" if name == "kmnist" else "train", "test": "t10k"}[split]
    folder = data_folder() / name
    images = read_idx(folder / f"{prefix}-images-idx3-ubyte.gz")[:limit]
    labels = read_idx(folder / f"{prefix}-labels-idx1-ubyte.gz")[:limit]
    return torch.tensor(images).unsqueeze(1).to(dtype) / 255, torch.tensor(labels).long()


def colour_images(
    name: str, split: str = "train", limit: int | None = None, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Images [N, 3, 32, 32] in [0, 1] and labels [N] of the subsets of "cifar10" or "svhn"."""
    (path,) = (data_folder() / name).glob(f"{name}_{split}_first*.npz")
    with np.load(path) as arrays:
        images, labels = arrays["images"][:limit], arrays["labels"][:limit]
    return torch.tensor(images).permute(0, 3, 1, 2).to(dtype) / 255, torch.tensor(labels).long()


def uci(name: str) -> dict[str, NDArray[Any]]:
    """X, y and the split indices (as int64) of "boston", "concrete", "energy", "naval" or "wine"."""
    with np.load(data_folder() / "uci" / f"{name}.npz") as arrays:
        return {key: arrays[key].astype(np.int64) if key.endswith("_idx") else arrays[key] for key in arrays.files}
