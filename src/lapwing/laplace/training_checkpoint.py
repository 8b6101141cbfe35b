"""The file of a training run of `marglik_training`: what must be the same for another attempt to go on from it.

The file has weights, optimiser, schedule, prior and noise with their own optimiser, the best weights so far, and the
state of every generator of torch's random numbers (the run's, the loader's, the global one), as `training.resume`
gathers them. It is tensors and JSON: nothing that is read can run code. It is removed in the end.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from lapwing.laplace.descriptions import text
from lapwing.laplace.identity import structure
from lapwing.laplace.persistence import described
from lapwing.laplace.setup import Setup
from lapwing.serialize.files import AnyPath
from lapwing.training.run_file import RunFile


def training_file(path: AnyPath, setup: Setup, every: int, **options: Any) -> RunFile:
    """For a run of this posterior with these options."""
    return RunFile.of(path, every, {**_identity(setup), **{n: text(v) for n, v in options.items()}})


def _identity(setup: Setup) -> dict[str, Any]:
    """The network by its modules, tensors and types, the likelihood, and how curvature is estimated."""
    made, _ = described(setup)
    model: nn.Module = setup.model
    entries = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found = {f"tensor {name}": f"{tuple(value.shape)} {value.dtype}" for name, value in entries.items()}
    found |= {f"module {name}": str(facts) for name, facts in structure(model).items()}
    found |= {"posterior": text(tuple(sorted(setup.options.items()))), "class": str(made["class"])}
    return found | {"likelihood": str(made["likelihood"])}
