"""The state of a posterior as a flat mapping of tensors, numbers and strings: no data, no model, no pickle.

Tensors of the curvature stand under "curvature.<name>"; "structure" describes them as JSON. A posterior is loaded into
one of the same class over the same parameters; the model's weights are the user's to save.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lapwing.errors import DataError, ParameterError, StorageError
from lapwing.evidence import GaussianFit
from lapwing.laplace.fitted import Fitted
from lapwing.laplace.hyper import NAMES, HyperParameters
from lapwing.laplace.setup import Setup
from lapwing.linalg import Curvature, Independent
from lapwing.params import ParamSpace
from lapwing.priors import PriorGroups
from lapwing.serialize import pack, unpack

VERSION = 3
"""Of states whose prior is a previous posterior; 2 where it has groups; 1 for the rest, as earlier versions read it."""
ALWAYS = (
    "version",
    "cls_name",
    "likelihood",
    "source",
    "free_noise",
    "prior_precision",
    "prior_mean",
    "sigma_noise",
    "temperature",
    "n_data",
)
FITTED = ("parameters", "structure", "mean", "output_shape")


def state_dict(
    setup: Setup, hyper: HyperParameters, fitted: Fitted | None, space: ParamSpace | None, features: bool
) -> dict[str, Tensor | int | float | str]:
    """Everything that `load` needs: hyper-parameters, and the fit where there is one.

    `features` says that the fit was made from the features of a last layer.
    """
    state: dict[str, Tensor | int | float | str] = {
        "version": VERSION if hyper.earlier is not None else 1 if hyper.prior_groups is None else 2,
        **_fixed(setup),
        **{name: getattr(hyper, name).detach().clone() for name in NAMES},
        "n_data": 0 if fitted is None else fitted.n_data,
    }
    if hyper.prior_groups is not None:
        members = [list(group) for group in hyper.prior_groups.members]
        state["prior_groups"] = json.dumps({"structure": hyper.prior_groups.structure, "members": members})
    if hyper.earlier is not None:
        description, tensors = pack(hyper.earlier)
        state["earlier"] = json.dumps(description)
        state |= {f"earlier.{name}": tensor.clone() for name, tensor in tensors.items()}
    if fitted is None or space is None:
        return state
    description, tensors = pack(fitted.curvature)
    state |= {
        "parameters": json.dumps([[n, list(s)] for n, s in zip(space.names, space.shapes, strict=True)]),
        "structure": json.dumps(description),
        "mean": fitted.mean.clone(),
        "output_shape": json.dumps(list(fitted.output_shape)),
    }
    if space.index is not None:
        state["index"] = space.index.cpu().clone()
    if features:
        state["features"] = 1
    if fitted.fingerprint is not None:
        state["fingerprint"] = fitted.fingerprint
    if isinstance(fitted.fit, GaussianFit):
        state |= {"targets": fitted.fit.targets, "squares": fitted.fit.squares.clone()}
    else:
        state["log_likelihood"] = fitted.fit.clone()
    return state | {f"curvature.{name}": tensor.clone() for name, tensor in tensors.items()}


def _fixed(setup: Setup) -> dict[str, int | str]:
    """What must be the same in a posterior that a state is loaded into."""
    return {
        "cls_name": setup.name,
        "likelihood": type(setup.distribution).__name__,
        "source": setup.recipe.source,
        "free_noise": int(setup.has_noise),
    }


def load(
    setup: Setup, place: tuple[torch.dtype, torch.device], state: Mapping[str, Any]
) -> tuple[dict[str, Tensor], Fitted | None]:
    """Hyper-parameters and fit of a state, checked against the posterior that it is loaded into."""
    missing = [name for name in (*ALWAYS, *(FITTED if "structure" in state else ())) if name not in state]
    if missing:
        raise DataError(f"the state has no {missing[0]!r}; expected what state_dict() returns.")
    if int(state["version"]) > VERSION:
        raise DataError(
            f"the state has version {state['version']}; expected at most {VERSION}. It was written by a later lapwing: "
            "upgrade to read it."
        )
    for name, ours in _fixed(setup).items():
        if state[name] != ours:
            raise ParameterError(
                f"the state has {name} {state[name]!r} and this posterior {ours!r}; expected the same. Build the "
                "posterior as it was when the state was taken."
            )
    dtype, device = place
    hyper = {name: torch.as_tensor(state[name]).to(device, dtype) for name in NAMES}
    if "structure" not in state:
        return hyper, None
    tensors = {
        name.removeprefix("curvature."): tensor.to(device)
        for name, tensor in state.items()
        if name.startswith("curvature.")
    }
    curvature = unpack(json.loads(state["structure"]), tensors)
    independent = bool(setup.recipe.options.get("independent_outputs", False))
    shape = torch.Size(json.loads(state["output_shape"]))
    if isinstance(curvature, Independent) != (independent and shape.numel() > 1):
        raise ParameterError(
            f"the state has independent_outputs={not independent} and this posterior {independent}; expected the same. "
            "Build the posterior as it was when the state was taken."
        )
    mean = state["mean"].to(device)
    if mean.dtype != dtype:
        raise ParameterError(
            f"the state has dtype {mean.dtype} and the model's curvature {dtype}; expected the same. Convert the "
            f"model, for example with model.to({mean.dtype})."
        )
    fit = state.get("log_likelihood")
    fit = GaussianFit(int(state["targets"]), state["squares"].to(device)) if fit is None else fit.to(device)
    known = state.get("fingerprint")
    return hyper, Fitted(curvature, mean, fit, int(state["n_data"]), shape, None if known is None else int(known))


def groups(state: Mapping[str, Any]) -> PriorGroups | None:
    """Which parameters share a precision, where a state says so by name."""
    if "prior_groups" not in state:
        return None
    try:
        stored = json.loads(state["prior_groups"])
        return PriorGroups.of(stored["members"], str(stored["structure"]))
    except (TypeError, ValueError, KeyError) as error:
        raise DataError(
            f"the state has prior_groups that cannot be read ({error}); expected what state_dict() returns."
        ) from error


def earlier(state: Mapping[str, Any], device: torch.device) -> Curvature | None:
    """The curvature of earlier data, where the prior is a previous posterior."""
    if "earlier" not in state:
        return None
    tensors = {n.removeprefix("earlier."): t.to(device) for n, t in state.items() if n.startswith("earlier.")}
    found = unpack(json.loads(state["earlier"]), tensors)
    if not isinstance(found, Curvature):
        raise DataError(f"the prior of the state is a {type(found).__name__}; expected a curvature.")
    return found


def check_parameters(space: ParamSpace, state: Mapping[str, Any]) -> None:
    """The same parameters, by name and shape."""
    stored = [(name, tuple(shape)) for name, shape in json.loads(state["parameters"])]
    index = state.get("index")
    if index is not None:  # files may name all tensors of the network, also those that no entry is of
        names, shapes = [name for name, _ in stored], [torch.Size(shape) for _, shape in stored]
        tight = ParamSpace(tuple(names), tuple(shapes), space.dtype, index.device, index).tightened()
        stored, index = _listed(tight), tight.index
    tight = space.tightened()
    ours, own = _listed(tight), tight.index
    if (index is None) != (own is None) or (
        index is not None and own is not None and not torch.equal(index.cpu(), own.cpu())
    ):
        raise ParameterError("the state is of another sub-network; expected the same subnetwork_indices.")
    if stored != ours or len(state["mean"]) != space.size:
        different = next((a for a, b in zip(stored, ours, strict=False) if a != b), None)
        raise ParameterError(
            f"the state is of {len(state['mean'])} parameters in {len(stored)} tensors, this posterior of "
            f"{space.size} in {len(ours)}{f'; first difference: {different}' if different else ''}; expected "
            "the same network and the same choice of weights."
        )


def _listed(space: ParamSpace) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(shape)) for name, shape in zip(space.names, space.shapes, strict=True)]


def check_curvature(fitted: Fitted | None, size: int) -> None:
    """A curvature of as many parameters as there are, whose parts fit together: of what comes from a file."""
    if fitted is None:
        return
    curvature = fitted.curvature
    if not isinstance(curvature, Curvature) or curvature.size != size:
        raise StorageError(f"there is no curvature of {size} parameters; expected one.")
    matrix = curvature.whole if isinstance(curvature, Independent) else curvature
    if matrix.mv(fitted.mean).shape != (size,):
        raise StorageError("the parts of the curvature do not fit together; expected a square matrix.")
