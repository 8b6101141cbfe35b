"""A posterior from its file: `lapwing.load(path, model)`. The model is checked first, and filled where it fits.

`load` takes a model that is built as the saved one was: the same parameters and buffers, and the same modules with the
same settings, as far as the file knows them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.errors import OptionError, StorageError
from lapwing.laplace.base import BaseLaplace
from lapwing.laplace.identity import difference, further, numbers, structure
from lapwing.laplace.persistence import POSTERIORS, note
from lapwing.laplace.state import check_curvature
from lapwing.laplace.wrapped import unwrapped
from lapwing.likelihoods import Likelihood
from lapwing.serialize import read, unpack
from lapwing.serialize.files import AnyPath, sha256


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
    model = unwrapped(model)
    tensors, metadata = read(path)
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
    laplace.load_state_dict({**metadata["state"], **_part(tensors, "state.")})
    check_curvature(laplace._fitted, laplace.space.size if laplace._fitted else 0)
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
