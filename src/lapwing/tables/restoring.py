"""A network for a table and its posterior from plain tensors and numbers, as bundles and estimators keep them.

The number of layers and their shapes are compared with the tensors before anything is allocated, so that a description
cannot ask for more memory or time than its file takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lapwing.errors import StorageError
from lapwing.laplace import BaseLaplace
from lapwing.laplace.factory import CLASSES
from lapwing.laplace.state import check_curvature
from lapwing.tables.network import Spec, blank

POSTERIORS = {CLASSES["all", structure].__name__: CLASSES["all", structure] for structure in ("full", "kron", "diag")}
"""Classes that the training of a table makes."""


def restored(
    spec: Spec, task: str, weights: Mapping[str, Tensor], state: Mapping[str, Any]
) -> tuple[nn.Module, BaseLaplace]:
    """The network with these weights (the tensors themselves, no copies), and the posterior of a `state_dict`."""
    if len(weights) != spec.tensors:
        raise StorageError(
            f"there are {len(weights)} tensors of weights; expected {spec.tensors} for {spec.depth} layers."
        )
    dtypes = {str(weight.dtype): weight.dtype for weight in weights.values()}
    if len(dtypes) != 1 or not next(iter(dtypes.values())).is_floating_point:
        raise StorageError(f"the weights have the dtypes {sorted(dtypes)}; expected one floating type.")
    (dtype,) = dtypes.values()
    model = blank(spec, dtype)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    given = {name: tuple(value.shape) for name, value in weights.items()}
    if given != shapes:
        name = next(name for name in {**given, **shapes} if given.get(name) != shapes.get(name))
        raise StorageError(f"{name!r} has shape {given.get(name)}; expected {shapes.get(name)}, as the network has.")
    model.load_state_dict(weights, assign=True)
    kind = POSTERIORS.get(state["cls_name"])
    if kind is None:
        raise StorageError(f"the posterior is a {state['cls_name']!r}; expected one of {sorted(POSTERIORS)}.")
    laplace = kind(model, spec.likelihood(task), estimator=state["source"])
    laplace.load_state_dict(state)
    check_curvature(laplace._fitted, laplace.space.size)
    return model, laplace
