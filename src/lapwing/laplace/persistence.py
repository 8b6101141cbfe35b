"""A posterior in one file: `la.save(path)`. Memory: the posterior, once more. (`loading` is the way back.)

In the file are the class and its options, the likelihood, the state (`state_dict`), what the model's modules are
(`identity.structure`), and its parameters and buffers by name, shape, dtype and hash; with their numbers unless
`weights=False`. The model itself is code, and stays the user's.

Only classes in `POSTERIORS` and `lapwing.serialize.KINDS` are made from a file; nothing in it can run code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lapwing.errors import StorageError
from lapwing.laplace.identity import further, structure
from lapwing.laplace.names import Task
from lapwing.laplace.setup import Setup
from lapwing.likelihoods import Likelihood
from lapwing.serialize import KINDS, pack, write
from lapwing.serialize.files import AnyPath, sha256

POSTERIORS: dict[str, type] = {}
"""Classes that a file may name."""

_NOTE = 20_000  # characters of a model's own description


def register(*classes: type) -> None:
    """Classes that can be saved and loaded: their constructors take by name the options that are their attributes."""
    POSTERIORS.update({each.__name__: each for each in classes})


def save(setup: Setup, state: Mapping[str, Any], reason: str, path: AnyPath, weights: bool = True) -> None:
    """One file, written atomically; with `weights=False` without the model's numbers, of which hashes are kept.

    `state` is what `state_dict` returns.
    """
    if POSTERIORS.get(setup.name) is not setup.kind:
        raise StorageError(
            f"a {setup.name} cannot be saved; expected one of {sorted(POSTERIORS)}. Register the class with "
            "lapwing.laplace.persistence.register, or keep its state_dict()."
        )
    metadata, tensors = described(setup)
    tensors |= {f"state.{name}": value for name, value in state.items() if isinstance(value, Tensor)}
    entries = setup.model.state_dict()
    strange = [name for name, value in entries.items() if not isinstance(value, Tensor)]
    if weights and strange:
        raise StorageError(
            f"the model's state has {strange[0]!r}, which is no tensor; expected parameters and buffers alone. Save "
            "the model yourself, and the posterior with weights=False."
        )
    entries = {name: value for name, value in entries.items() if isinstance(value, Tensor)}
    left_out = further(setup.model)
    if weights:
        tensors |= {f"model.{name}": value for name, value in entries.items()}
        tensors |= {f"further.{name}": value for name, value in left_out.items()}
    metadata |= {
        "kind": "posterior",
        "state": {name: value for name, value in state.items() if not isinstance(value, Tensor)},
        "reason": reason,
        "weights": weights,
        "model": {
            "class": type(setup.model).__qualname__,
            "note": note(setup.model),
            "structure": structure(setup.model),
            "entries": _listed(entries),
            "further": _listed(left_out),
        },
    }
    write(path, tensors, metadata)


def _listed(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    return {
        name: {"shape": list(value.shape), "dtype": str(value.dtype), "sha256": sha256(value)}
        for name, value in tensors.items()
    }


def described(setup: Setup) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a posterior is made with: class, options and likelihood."""
    made, tensors = pack([list(item) for item in setup.options.items()])
    tensors = {f"options.{name}": value for name, value in tensors.items()}
    given = setup.likelihood
    if not isinstance(given, Likelihood):
        likelihood: dict[str, Any] = {"task": str(Task(given).value)}
    elif KINDS.get(type(given).__name__) is type(given):
        description, parts = pack(given)
        likelihood = {"object": description}
        tensors |= {f"likelihood.{name}": value for name, value in parts.items()}
    else:
        likelihood = {"own": type(given).__name__}
    return {"class": setup.name, "options": made, "likelihood": likelihood}, tensors


def note(model: nn.Module) -> str:
    """How the model describes itself, for people, without addresses in memory and names of devices."""
    return re.sub(r"0x[0-9a-fA-F]+| \((?:GPU \d+|\w+:\d+)\)", "", repr(model))[:_NOTE]
