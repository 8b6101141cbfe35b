"""A posterior in one file, and back: `la.save(path)`, `lapwing.load(path, model)`. Memory: the posterior, once more.

In the file are the class and its options, the likelihood, the state (`state_dict`), what the model's modules are
(`identity.structure`), and its parameters and buffers by name, shape, dtype and hash; with their numbers unless
`weights=False`. The model itself is code, and stays the user's: `load` takes one that is built the same way, checks it
before anything is changed, and fills it.

Only classes in `POSTERIORS` and `lapwing.serialize.KINDS` are made from a file; nothing in it can run code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lapwing.errors import OptionError, StorageError
from lapwing.laplace.identity import difference, further, numbers, structure
from lapwing.laplace.names import Likelihood as Task
from lapwing.laplace.state import check_curvature
from lapwing.likelihoods import Likelihood
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
            "with lapwing.laplace.persistence.register, or keep its state_dict()."
        )
    laplace._check_weights(whole=True)
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
    left_out = further(laplace.model)
    if weights:
        tensors |= {f"model.{name}": value for name, value in entries.items()}
        tensors |= {f"further.{name}": value for name, value in left_out.items()}
    metadata |= {
        "kind": "posterior",
        "state": {name: value for name, value in state.items() if not isinstance(value, Tensor)},
        "reason": laplace.reason,
        "weights": weights,
        "model": {
            "class": type(laplace.model).__qualname__,
            "note": note(laplace.model),
            "structure": structure(laplace.model),
            "entries": _listed(entries),
            "further": _listed(left_out),
        },
    }
    return tensors, metadata


def _listed(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    return {
        name: {"shape": list(value.shape), "dtype": str(value.dtype), "sha256": sha256(value)}
        for name, value in tensors.items()
    }


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
    """How the model describes itself, for people, without addresses in memory and names of devices."""
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

    `model` must have the parameters and buffers of the saved one, by name, shape and dtype, and (`strict`) the same
    modules with the same settings (`lapwing.laplace.identity`): activations, say, are not in the weights. Where it
    differs it is left as it is. Model and posterior are moved to `map_location`, if given. A `likelihood` of one's own
    is not in the file, and given again.
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
    _check_given(metadata, likelihood)
    _check_place(map_location)
    try:
        has_weights = bool(metadata["weights"])
        weights, left_out = _part(tensors, "model."), _part(tensors, "further.")
        saved = metadata["model"]
        expected = {name: (tuple(entry["shape"]), entry["dtype"]) for name, entry in saved["entries"].items()}
        if has_weights:  # what is copied is what is checked
            expected = {name: (tuple(value.shape), str(value.dtype)) for name, value in weights.items()}
        _check_entries(model, expected)
        if strict and "structure" not in saved:  # an older file, which knows a model by its repr
            _check_note(model, saved)
        elif strict:
            _check_structure(model, saved["structure"])
            _check_further(model, left_out, saved["further"])
        if not has_weights:
            _check_numbers(model, saved["entries"])
        with _moved(model, map_location):
            laplace = _made(tensors, metadata, model, likelihood)
            if has_weights:
                model.load_state_dict(weights)
                if strict:
                    _fill(model, left_out)
    except StorageError:
        raise
    except Exception as error:  # whatever somebody may have put into a file
        raise StorageError(
            f"the file holds no posterior that fits this model and version of lapwing ({type(error).__name__}: "
            f"{error}); expected one that la.save has written."
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
        name, reduction, graph = laplace.last_layer_name, laplace.feature_reduction, laplace.enable_backprop
        laplace._bind(FeatureTangent(model, name, reduction, differentiable=graph, evaluate=True))
    laplace.load_state_dict(state)
    check_curvature(laplace)
    laplace.reason = str(metadata["reason"])
    return laplace


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _check_given(metadata: Mapping[str, Any], given: Likelihood | None) -> None:
    """A likelihood of one's own is given where the file says so, and only there."""
    description = metadata.get("likelihood")
    own = description.get("own") if isinstance(description, Mapping) else None
    if given is not None and type(given).__name__ != own:
        raise OptionError(
            f"a likelihood {type(given).__name__} was given, and the file has {own or 'one'}; expected "
            f"{'the same' if own else 'none'}."
        )
    if given is None and own is not None:
        raise OptionError(
            f"the posterior has a likelihood of one's own ({own}), which no file can hold; expected it again: "
            "load(path, model, likelihood=...)."
        )


def _likelihood(
    description: Mapping[str, Any], tensors: Mapping[str, Tensor], given: Likelihood | None
) -> str | Likelihood:
    if given is not None:
        return given
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


def _check_structure(model: nn.Module, saved: Any) -> None:
    """The same modules, with the same settings."""
    found = difference(model, structure(model), saved)
    if found:
        raise StorageError(
            f"the model has {found}; expected the same network: its names and shapes fit, but it may compute something "
            "else. Build it as it was, or load with strict=False if you know that it computes the same."
        )


def _check_further(model: nn.Module, given: Mapping[str, Tensor], saved: Mapping[str, Any]) -> None:
    """Tensors that `state_dict` leaves out: buffers are filled like others; an attribute must have its numbers."""
    ours, buffers = further(model), dict(model.named_buffers())
    problem = next((f"{name!r} is not in the {where}" for name, where in _lacking(ours, saved)), "")
    for name, entry in saved.items():
        if problem:
            break
        own, other = ours[name], given.get(name)
        shape, dtype = (entry["shape"], entry["dtype"]) if other is None else (list(other.shape), str(other.dtype))
        if list(own.shape) != shape or str(own.dtype) != dtype:
            problem = (
                f"{name!r} has shape {shape} and {dtype} in the file, {list(own.shape)} and {own.dtype} in the model"
            )
        elif (other is None and sha256(own) != entry["sha256"]) or (
            other is not None and name not in buffers and not _close(own, other)
        ):
            problem = f"{name!r} has other numbers than in the file"
    if problem:
        raise StorageError(
            f"{problem}; expected the same: it is part of what the model computes, though not of its state_dict. Build "
            "the model as it was, or load with strict=False if you know that it computes the same."
        )


def _lacking(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield from ((name, "model") for name in theirs if name not in ours)
    yield from ((name, "file") for name in ours if name not in theirs)


def _close(a: Tensor, b: Tensor) -> bool:
    """Equal, or to rounding where made anew, perhaps on another machine."""
    a, b = a.detach().cpu(), b.cpu()
    if not a.is_floating_point() or torch.equal(a, b):
        return torch.equal(a, b)
    size = float(b.double().abs().nan_to_num(0, 0, 0).max()) if b.numel() else 0.0
    return torch.allclose(a.double(), b.double(), rtol=1e-5, atol=1e-5 * size, equal_nan=True)


@torch.no_grad()
def _fill(model: nn.Module, given: Mapping[str, Tensor]) -> None:
    ours = numbers(model)
    for name, _ in model.named_buffers():
        if name in given and not torch.equal(ours[name].cpu(), given[name]):
            ours[name].copy_(given[name])


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
    before = next(model.parameters()).device
    try:
        if place is not None:
            model.to(place)
        yield
    except BaseException:
        if place is not None:
            model.to(before)
        raise


def _check_place(place: str | torch.device | None) -> None:
    try:
        torch.empty(0, device=place).numpy(force=True)  # a device that exists, and has memory
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:
        raise OptionError(
            f"map_location is {place!r}: {error}. Expected a device of this machine, as 'cpu'."
        ) from error
