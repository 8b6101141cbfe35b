"""A posterior in one file, and back: `la.save(path)`, `lapwing.load(path, model)`. Memory: the posterior, once more.

In the file are the class and its options, the likelihood, the state (`state_dict`), and the model's parameters and
buffers by name, shape, dtype and hash; with their numbers unless `weights=False`. The model itself is code, and stays
the user's: `load` takes one that is built the same way, checks it before anything is changed, and fills it.

Only classes in `POSTERIORS` and `lapwing.serialize.KINDS` are made from a file; nothing in it can run code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lapwing.errors import LapwingError, OptionError, StorageError
from lapwing.laplace.options import Likelihood as Task
from lapwing.likelihoods import Likelihood
from lapwing.linalg import Curvature
from lapwing.serialize import KINDS, pack, read, unpack, write
from lapwing.serialize.files import AnyPath, sha256
from lapwing.tangent.features import FeatureTangent

if TYPE_CHECKING:
    from lapwing.laplace.base import BaseLaplace

POSTERIORS: dict[str, type] = {}
"""Classes that a file may name."""

_ATTRIBUTES = (
    "enable_backprop",
    "dict_key_x",
    "dict_key_y",
    "damping",
    "last_layer_name",
    "feature_reduction",
    "n_subset",
    "seed",
    "subnetwork_indices",
)
_NOTE = 20_000  # characters of a model's own description


def register(*classes: type) -> None:
    """Classes that can be saved and loaded: their constructors take by name the options that are their attributes."""
    POSTERIORS.update({each.__name__: each for each in classes})


# -- saving ------------------------------------------------------------------------------------------------------------


def save(laplace: BaseLaplace, path: AnyPath, weights: bool = True) -> None:
    """One file, written atomically; with `weights=False` without the model's numbers, of which hashes are kept."""
    write(path, *stored(laplace, weights))


def stored(laplace: BaseLaplace, weights: bool = True) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and metadata of a posterior, as `serialize.write` takes them: for files that hold more than it."""
    if POSTERIORS.get(type(laplace).__name__) is not type(laplace):
        raise StorageError(
            f"a {type(laplace).__name__} cannot be saved; expected one of {sorted(POSTERIORS)}. Register the class "
            "with lapwing.laplace.files.register, or keep its state_dict()."
        )
    laplace._check_weights()
    metadata, tensors = described(laplace)
    state = laplace.state_dict()
    tensors |= {f"state.{name}": value for name, value in state.items() if isinstance(value, Tensor)}
    entries = laplace.model.state_dict()
    strange = [name for name, value in entries.items() if not isinstance(value, Tensor)]
    if weights and strange:
        raise StorageError(
            f"the model's state has {strange[0]!r}, which is no tensor; expected parameters and buffers alone. Save "
            "the model yourself, and the posterior with weights=False."
        )
    entries = {name: value for name, value in entries.items() if isinstance(value, Tensor)}
    if weights:
        tensors |= {f"model.{name}": value for name, value in entries.items()}
    metadata |= {
        "kind": "posterior",
        "state": {name: value for name, value in state.items() if not isinstance(value, Tensor)},
        "reason": laplace.reason,
        "weights": weights,
        "model": {
            "class": type(laplace.model).__qualname__,
            "note": note(laplace.model),
            "entries": {
                name: {"shape": list(value.shape), "dtype": str(value.dtype), "sha256": sha256(value)}
                for name, value in entries.items()
            },
        },
    }
    return tensors, metadata


def described(laplace: BaseLaplace) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a posterior is made with: class, options and likelihood."""
    made, tensors = pack([list(item) for item in options(laplace).items()])
    tensors = {f"options.{name}": value for name, value in tensors.items()}
    given = laplace.likelihood
    if not isinstance(given, Likelihood):
        likelihood: dict[str, Any] = {"task": str(Task(given).value)}
    elif KINDS.get(type(given).__name__) is type(given):
        description, parts = pack(given)
        likelihood = {"object": description}
        tensors |= {f"likelihood.{name}": value for name, value in parts.items()}
    else:
        likelihood = {"own": type(given).__name__}
    return {"class": type(laplace).__name__, "options": made, "likelihood": likelihood}, tensors


def options(laplace: BaseLaplace) -> dict[str, Any]:
    """Options of the constructor by name; `draws` is the number of draws of a Monte-Carlo estimator."""
    own = {name: getattr(laplace, name) for name in _ATTRIBUTES if hasattr(laplace, name)}
    recipe = laplace.recipe
    drawn = {"distribution": recipe.distribution} if recipe.source == "projection" else {}
    return own | {"estimator": recipe.source, "draws": recipe.draws, **drawn, **recipe.options}


def note(model: nn.Module) -> str:
    """How the model describes itself, without addresses in memory and names of devices."""
    return re.sub(r"0x[0-9a-fA-F]+| \((?:GPU \d+|\w+:\d+)\)", "", repr(model))[:_NOTE]


# -- loading -----------------------------------------------------------------------------------------------------------


def load(
    path: AnyPath,
    model: nn.Module,
    map_location: str | torch.device | None = None,
    *,
    likelihood: Likelihood | None = None,
    strict: bool = True,
) -> BaseLaplace:
    """The posterior in a file, over `model`, which gets the weights and buffers that it was fitted at.

    `model` must have the parameters and buffers of the saved one, by name, shape and dtype, and (`strict`) describe
    itself alike: its activations, say, are not in its weights. Where anything differs it is left as it is. Model and
    posterior are moved to `map_location`, if given. A `likelihood` of one's own is not in the file, and given again.
    """
    return restored(*read(path), model, map_location, likelihood=likelihood, strict=strict)


def restored(
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, Any],
    model: nn.Module,
    map_location: str | torch.device | None = None,
    *,
    likelihood: Likelihood | None = None,
    strict: bool = True,
) -> BaseLaplace:
    """The posterior that `stored` described; the arguments are those of `load`."""
    if metadata.get("kind") != "posterior":
        raise StorageError(f"the file holds {metadata.get('kind')!r}; expected a 'posterior', as la.save writes one.")
    try:
        has_weights = bool(metadata["weights"])
        weights = _part(tensors, "model.")
        entries = metadata["model"]["entries"]
        expected = {name: (tuple(entry["shape"]), entry["dtype"]) for name, entry in entries.items()}
        if has_weights:  # what is copied is what is checked
            expected = {name: (tuple(value.shape), str(value.dtype)) for name, value in weights.items()}
        _check_entries(model, expected)
        if strict:
            _check_note(model, metadata["model"])
        if not has_weights:
            _check_numbers(model, entries)
        with _moved(model, map_location):
            laplace = _made(tensors, metadata, model, likelihood)
            if has_weights:
                model.load_state_dict(weights)
    except LapwingError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise StorageError(
            f"the file holds no posterior of this version of lapwing ({type(error).__name__}: {error}); expected one "
            "that la.save has written."
        ) from error
    return laplace


def _made(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, Any], model: nn.Module, likelihood: Likelihood | None
) -> BaseLaplace:
    """The posterior over the model, checked; the model is not changed."""
    kind = POSTERIORS.get(metadata["class"])
    if kind is None:
        raise StorageError(f"the file has the class {metadata['class']!r}; expected one of {sorted(POSTERIORS)}.")
    given = dict(unpack(metadata["options"], _part(tensors, "options.")))
    draws = {"mc_samples": given.pop("draws")}
    laplace = kind(model, _likelihood(metadata["likelihood"], tensors, likelihood), backend_kwargs=draws, **given)
    state = {**metadata["state"], **_part(tensors, "state.")}
    if "features" in state and laplace.last_layer_name is not None:
        # a layer that was named is taken for any parameters until data come; fitted by features, it predicts by them
        reduction, graph = laplace.feature_reduction, laplace.enable_backprop
        laplace._bind(FeatureTangent(model, laplace.last_layer_name, reduction, differentiable=graph))
    laplace.load_state_dict(state)
    found = None if laplace._fitted is None else laplace._fitted.curvature
    if found is not None and (not isinstance(found, Curvature) or found.size != laplace.space.size):
        raise StorageError(f"the file has no curvature of {laplace.space.size} parameters; expected one.")
    laplace.reason = str(metadata["reason"])
    return laplace


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _likelihood(
    description: Mapping[str, Any], tensors: Mapping[str, Tensor], given: Likelihood | None
) -> str | Likelihood:
    own = description.get("own")
    if given is not None and type(given).__name__ != own:
        raise OptionError(
            f"a likelihood {type(given).__name__} was given, and the file has {own or 'one'}; expected "
            f"{'the same' if own else 'none'}."
        )
    if given is not None:
        return given
    if own is not None:
        raise OptionError(
            f"the posterior has a likelihood of one's own ({own}), which no file can hold; expected it again: "
            "load(path, model, likelihood=...)."
        )
    if "task" in description:
        return str(description["task"])
    found = unpack(description["object"], _part(tensors, "likelihood."))
    if not isinstance(found, Likelihood):
        raise StorageError(f"the file has a {type(found).__name__}; expected a likelihood of lapwing.likelihoods.")
    return found


# -- the model ---------------------------------------------------------------------------------------------------------


def _check_entries(model: nn.Module, expected: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
    """The same parameters and buffers, by name, shape and dtype."""
    tensors = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    ours = {name: (tuple(value.shape), str(value.dtype)) for name, value in tensors.items()}
    if any(value.is_meta for value in tensors.values()):
        raise StorageError("the model has no memory (device 'meta'); expected one on a device: build it there.")
    found = [f"{name!r} is not in the model" for name in expected if name not in ours]
    found += [f"{name!r} is not in the file" for name in ours if name not in expected]
    shared = [name for name in expected if name in ours]
    found += [
        f"{name!r} has shape {list(expected[name][0])} in the file and {list(ours[name][0])} in the model"
        for name in shared
        if expected[name][0] != ours[name][0]
    ]
    if found:
        more = f", and {len(found) - 6} more" if len(found) > 6 else ""
        raise StorageError(
            f"the file is of another network: {'; '.join(found[:6])}{more}. Expected the same parameters and buffers. "
            "Build the model as it was when it was saved."
        )
    other = [name for name in shared if expected[name][1] != ours[name][1]]
    if other:
        theirs, own = expected[other[0]][1], ours[other[0]][1]
        raise StorageError(
            f"{other[0]!r} has dtype {theirs} in the file and {own} in the model; expected the same. Convert the "
            f"model: model.to({theirs})."
        )


def _check_note(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """The same class, and the same description of what is inside."""
    ours, theirs = note(model).splitlines(), str(saved["note"]).splitlines()
    pairs = zip(ours, theirs, strict=False)
    line = next((f"{a.strip()!r}, and the file {b.strip()!r}" for a, b in pairs if a != b), "")
    if type(model).__qualname__ != saved["class"]:
        line = f"class {type(model).__qualname__!r}, and the file {saved['class']!r}"
    if line or len(ours) != len(theirs):
        raise StorageError(
            f"the model has {line or f'{len(ours)} lines of description, and the file {len(theirs)}'}; expected the "
            "same network: its names and shapes fit, but it may compute something else. Build it as it was, or load "
            "with strict=False if you know that it computes the same."
        )


def _check_numbers(model: nn.Module, entries: Mapping[str, Any]) -> None:
    """The weights and buffers that the posterior was fitted at, where the file does not bring them."""
    state = model.state_dict()
    other = [name for name, entry in entries.items() if sha256(state[name]) != entry["sha256"]]
    if other:
        raise StorageError(
            f"{other[0]!r} (and {len(other) - 1} more) of the model has other numbers than when the posterior was "
            "saved, and the file has none; expected the same. Load the model's weights first, or save with "
            "weights=True."
        )


@contextmanager
def _moved(model: nn.Module, place: str | torch.device | None) -> Iterator[None]:
    """The model on another device, if given; back on its own where the body fails."""
    if place is None:
        yield
        return
    before = next(model.parameters()).device
    try:
        torch.empty(0, device=place).numpy(force=True)  # a device that exists, and has memory
        model.to(place)
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:
        model.to(before)
        raise OptionError(
            f"map_location is {place!r}: {error}. Expected a device of this machine, as 'cpu'."
        ) from error
    try:
        yield
    except BaseException:
        model.to(before)
        raise
