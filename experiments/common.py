"""What every experiment shares: arguments, configuration, results with their provenance, data files, pictures.

An experiment is a folder `experiments/<claim>_<name>/` with run.py, config.json, results.json, one picture, README.md.

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from common import Experiment

    def main(experiment: Experiment) -> None:
        config = experiment.config
        ...
        experiment.save(figure)
        experiment.write(ours={...}, source={...}, held={"the claim in words": True})

    if __name__ == "__main__":
        main(Experiment.of(__file__))

`python run.py` writes results.json and the picture next to run.py. `python run.py --smoke` lays the entries of
config["smoke"] over the configuration and writes to a temporary folder, so a quick check never replaces results.
`--seed` replaces config["seed"].
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray

from lapwing.serialize import read, write

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


@dataclass(frozen=True, eq=False)
class Experiment:
    """One run: its folder, its configuration, and where it writes."""

    folder: Path
    config: dict[str, Any]
    out: Path
    smoke: bool
    started: float = field(default_factory=time.perf_counter)

    @classmethod
    def of(cls, file: str, arguments: list[str] | None = None) -> Experiment:
        """The run of `file` (its __file__) asked for on the command line; seeds torch with config["seed"]."""
        folder = Path(file).resolve().parent
        parser = argparse.ArgumentParser(description=f"Experiment {folder.name}; its claim is in README.md.")
        parser.add_argument("--smoke", action="store_true", help="a tiny run into a temporary folder")
        parser.add_argument("--seed", type=int, help="instead of the seed in config.json")
        asked = parser.parse_args(arguments)
        config = json.loads((folder / "config.json").read_text())
        smaller = config.pop("smoke", {})
        unknown = set(smaller) - set(config)
        if unknown:
            raise KeyError(f"config['smoke'] has {sorted(unknown)}, which config.json of {folder.name} does not have")
        if asked.smoke:
            config |= smaller
        if asked.seed is not None:
            config["seed"] = asked.seed
        out = Path(tempfile.mkdtemp(prefix=f"{folder.name}-")) if asked.smoke else folder
        matplotlib.rcParams.update(STYLE)
        torch.manual_seed(config["seed"])
        return cls(folder, config, out, asked.smoke)

    def write(
        self,
        ours: Mapping[str, Any],
        source: Mapping[str, Any],
        held: Mapping[str, bool],
        *,
        reduced: str | None = None,
        notes: str | None = None,
    ) -> Path:
        """results.json: our figures next to the source's, whether each claim held, and how the run can be had again.

        `reduced` says in words what was made smaller than in the source; None where nothing was.
        """
        results = {
            "experiment": self.folder.name,
            "held": dict(held),
            "ours": dict(ours),
            "source": dict(source),
            "reduced": reduced is not None,
            "reduction": reduced,
            "notes": notes,
            "smoke": self.smoke,
            "config": self.config,
            "seed": self.config["seed"],
            "seconds": round(time.perf_counter() - self.started, 1),
            **provenance(self.folder),
        }
        path = self.out / "results.json"
        path.write_text(json.dumps(plain(results), indent=2) + "\n")
        print(json.dumps(plain({"held": held, "ours": ours}), indent=2))
        print(f"results in {path}")
        return path

    def save(self, figure: Figure, name: str = "picture.png") -> Path:
        path = self.out / name
        figure.savefig(path)
        return path


Stored = tuple[dict[str, torch.Tensor], dict[str, Any]]


def cached(make: Callable[[], Stored], file: str, config: Mapping[str, Any]) -> Stored:
    """Tensors by name and plain figures from `make`; where LAPWING_CACHE names a folder, they are kept there.

    They are found again by `config` and the code in `file` (its __file__) that made them.
    """
    folder = os.environ.get("LAPWING_CACHE")
    if folder is None:
        return make()
    text = json.dumps(config, sort_keys=True) + Path(file).read_text()
    path = Path(folder) / f"{Path(file).parent.name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.lapwing"
    if not path.exists():
        write(path, *make())
    return read(path)


def provenance(folder: Path) -> dict[str, Any]:
    """Commit, whether library and experiment were as committed, and the machine."""
    return {
        "commit": _git(folder, "rev-parse", "HEAD"),
        "clean": not _git(folder, "status", "--porcelain", "--", ":/src", str(folder / "run.py")),
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "system": platform.system(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
    }


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True).stdout.strip()


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


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
