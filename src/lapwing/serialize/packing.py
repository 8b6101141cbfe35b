"""Curvatures and likelihoods as plain data, and back: tensors by name, and a description of numbers and strings.

    pack(object)            -> (description, {name: tensor})
    unpack(description, tensors) -> the object

Only the classes listed in KINDS can be made, by their public constructors; nothing that is read can run code.

>>> import torch
>>> from lapwing.linalg import Diagonal
>>> description, tensors = pack(Diagonal(torch.ones(2)))
>>> description["kind"], list(tensors)
('Diagonal', ['values'])
>>> unpack(description, tensors).diagonal()
tensor([1., 1.])
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from lapwing import likelihoods, linalg
from lapwing.errors import DataError
from lapwing.evidence import GaussianFit
from lapwing.linalg import dual, low_rank, row_set, rows
from lapwing.linalg.kronecker import factors

KINDS: dict[str, type] = {}


def register(*kinds: type) -> None:
    """Classes that can be packed: dataclasses whose fields are tensors, numbers, strings, None, and each other."""
    KINDS.update({kind.__name__: kind for kind in kinds})


register(
    linalg.Dense,
    linalg.Diagonal,
    linalg.Blocks,
    linalg.Block,
    linalg.Kronecker,
    linalg.KroneckerSum,
    linalg.CorrectedKronecker,
    linalg.EigenColumns,
    factors.Term,
    rows.MatrixLayout,
    rows.Segments,
    rows.OuterRows,
    rows.LookupRows,
    rows.DenseRows,
    low_rank.LowRank,
    dual.Dual,
    linalg.Independent,
    row_set.RowSet,
    GaussianFit,
    *likelihoods.FINAL,
)


def pack(value: Any) -> tuple[Any, dict[str, Tensor]]:
    """A description that JSON can hold, and the tensors it refers to by name."""
    tensors: dict[str, Tensor] = {}
    return _pack(value, "", tensors), tensors


def _pack(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors[path] = value.detach()
        return {"tensor": path}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dual.Dual) and value.multiple is not None:  # the one structure whose scale stands apart
        root = value.scale.detach().sqrt().expand(value.rows.count)
        value = dual.Dual(value.rows, root if value.roots is None else value.roots * root)
    if isinstance(value, (tuple, list)):
        return {"items": [_pack(item, _join(path, str(i)), tensors) for i, item in enumerate(value)]}
    if is_dataclass(value) and KINDS.get(type(value).__name__) is type(value):
        parts = {
            each.name: _pack(getattr(value, each.name), _join(path, each.name), tensors)
            for each in fields(value)
            if each.init and each.name not in ("multiple", "sharing")
        }
        return {"kind": type(value).__name__, "fields": parts}
    raise DataError(
        f"{path or 'the object'} is a {type(value).__name__}, which cannot be stored; expected one of {sorted(KINDS)}, "
        "tensors, numbers and strings. Register its class with lapwing.serialize.register."
    )


def unpack(description: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The object that `pack` described."""
    if not isinstance(description, dict):
        if description is None or isinstance(description, (bool, int, float, str)):
            return description
        raise DataError(f"found {type(description).__name__} in a description; expected what `pack` returns.")
    if "tensor" in description:
        name = description["tensor"]
        if not isinstance(name, str) or name not in tensors:
            raise DataError(f"the tensor {name!r} is missing; expected all that the description names.")
        return tensors[name]
    if "items" in description:
        items = description["items"]
        if not isinstance(items, list):
            raise DataError(f"the items are a {type(items).__name__}; expected a list, as `pack` returns.")
        return tuple(unpack(item, tensors) for item in items)
    kind, inside = KINDS.get(str(description.get("kind"))), description.get("fields")
    if kind is None:
        raise DataError(f"unknown kind {description.get('kind')!r}; expected one of {sorted(KINDS)}.")
    if not isinstance(inside, dict):
        raise DataError(f"the fields of {kind.__name__} are a {type(inside).__name__}; expected a mapping.")
    parts = {name: unpack(part, tensors) for name, part in inside.items()}
    try:
        return kind(**parts)
    except TypeError as error:
        raise DataError(
            f"the fields of {kind.__name__} do not fit: {error}; expected those of this version."
        ) from error


def compact(value: Any) -> Any:
    """The same object with all tensors row-major and aligned, as they are when they come from a file.

    Products of the same numbers in another layout may round in another way.
    """
    description, tensors = pack(value)
    spread = {name for name, each in tensors.items() if not each.is_contiguous() or each.storage_offset()}
    if not spread:
        return value
    for name in spread:
        tensors[name] = tensors[name].clone(memory_format=torch.contiguous_format)
    return unpack(description, tensors)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
