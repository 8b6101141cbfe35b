"""Curvatures and likelihoods as plain data, and back: tensors by name, and a description of numbers and strings.

    pack(object)            -> (description, {name: tensor})
    unpack(description, tensors) -> the object

Only the classes in KINDS can be made, by their public constructors; nothing that is read can run code. Structures of
curvature are entered by their table, `laplace.structures`.

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
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from lapwing import likelihoods
from lapwing.errors import DataError, StorageError
from lapwing.evidence import GaussianFit
from lapwing.linalg import MatrixFree, dual, rows

KINDS: dict[str, type] = {}
_FIELDS: dict[type, tuple[str, ...]] = {}
_PLAIN = (type(None), bool, int, float, str)


def register(*kinds: type) -> None:
    """Classes that can be packed: dataclasses whose fields are tensors, numbers, strings, None, and each other."""
    for kind in kinds:
        KINDS[kind.__name__] = kind
        # how a curvature is scaled is packed with its numbers, and what it shares is no part of it
        _FIELDS[kind] = tuple(f.name for f in fields(kind) if f.init and f.name not in ("multiple", "sharing"))


register(
    rows.MatrixLayout,
    rows.Segments,
    rows.OuterRows,
    rows.LookupRows,
    rows.DenseRows,
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
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, MatrixFree):
        raise StorageError(
            "a matrix_free posterior keeps the data and the network that it goes over, and no numbers of its own, so "
            "that it cannot be stored; expected another structure. Store the network's weights, and fit again where "
            "the data are: that is one pass."
        )
    if isinstance(value, dual.Dual) and value.multiple is not None:  # the one structure whose scale stands apart
        root = value.scale.detach().sqrt().expand(value.rows.count)
        value = dual.Dual(value.rows, root if value.roots is None else value.roots * root)
    if isinstance(value, (tuple, list)):
        return {"items": [_pack(item, _join(path, str(i)), tensors) for i, item in enumerate(value)]}
    if KINDS.get(type(value).__name__) is type(value):
        names = _FIELDS[type(value)]
        parts = {name: _pack(getattr(value, name), _join(path, name), tensors) for name in names}
        return {"kind": type(value).__name__, "fields": parts}
    raise DataError(
        f"{path or 'the object'} is a {type(value).__name__}, which cannot be stored; expected one of {sorted(KINDS)}, "
        "tensors, numbers and strings. Register its class with lapwing.serialize.register."
    )


def unpack(description: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The object that `pack` described."""
    if not isinstance(description, dict):
        if isinstance(description, _PLAIN):
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


def pack_tree(value: Any) -> tuple[Any, dict[str, Tensor]]:
    """Mappings, lists and tuples of tensors, numbers and strings, as states of optimisers are; for `unpack_tree`."""
    tensors: dict[str, Tensor] = {}
    return _tree(value, "", tensors), tensors


def _tree(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors[path] = value.detach()
        return {"tensor": path}
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Mapping):
        pairs = enumerate(value.items())
        return {"mapping": [[key, _tree(item, _join(path, str(i)), tensors)] for i, (key, item) in pairs]}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_tree(item, _join(path, str(i)), tensors) for i, item in enumerate(value)]}
    raise DataError(
        f"{path or 'the state'} is a {type(value).__name__}, which cannot be stored; expected tensors, numbers and "
        "strings, in lists and mappings."
    )


def unpack_tree(description: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `pack_tree` described; of a kind of mapping of its own a plain one."""
    if not isinstance(description, dict):
        return description
    ((kind, inside),) = description.items()
    if kind == "tensor":
        return tensors[inside]
    if kind == "mapping":
        return {key: unpack_tree(item, tensors) for key, item in inside}
    items = [unpack_tree(item, tensors) for item in inside]
    return items if kind == "list" else tuple(items)


def compact(value: Any) -> Any:
    """The same object with all tensors row-major and aligned, as they are when they come from a file.

    Products of the same numbers in another layout may round in another way.
    """
    if isinstance(value, MatrixFree) or _is_compact(value):
        return value
    description, tensors = pack(value)
    for name, tensor in tensors.items():
        if _is_spread(tensor):
            tensors[name] = tensor.clone(memory_format=torch.contiguous_format)
    return unpack(description, tensors)


def _is_compact(value: Any) -> bool:
    """Whether no tensor has to be laid out anew, found without a description."""
    ahead = [value]
    for part in ahead:
        if isinstance(part, Tensor):
            if _is_spread(part):
                return False
        elif isinstance(part, (tuple, list)):
            ahead += part
        elif not isinstance(part, _PLAIN):
            if type(part) not in _FIELDS or (isinstance(part, dual.Dual) and part.multiple is not None):
                return False
            ahead += [getattr(part, name) for name in _FIELDS[type(part)]]
    return True


def _is_spread(tensor: Tensor) -> bool:
    return not tensor.is_contiguous() or tensor.storage_offset() != 0


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
