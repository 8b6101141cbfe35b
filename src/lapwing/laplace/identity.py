"""Which model it is: what its modules are, and the numbers in them. One answer for predictions, files and checkpoints.

    structure   of every module, by its path: the class, and the attributes that are plain values or functions
    numbers     parameters, all buffers (also those that `state_dict` leaves out), and tensors that are attributes

Left out, as it changes nothing or is the forward pass's own: train or eval mode, `requires_grad`, hooks, devices,
private attributes of torch's modules, attributes that `forward` assigns to (`words.written`) or that a hook of torch
computes before it (the weight of a pruned or normalised layer), and what is in lists and dictionaries. Code is not
looked at, except by checkpoints.

`Kept` holds a copy of the numbers, and says at every prediction whether the model is still the one that was fitted. A
write through `.data` or a NumPy view leaves no trace but the numbers, so these are compared: all of them up to `WINDOW`
(under half a millisecond); of more, all where torch has counted a write or memory was exchanged, and else one window,
the next one at the next prediction. `save` compares everything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lapwing.errors import StorageError
from lapwing.laplace.descriptions import code_of, of_torch, text, written
from lapwing.serialize.files import DTYPES

WINDOW = 2**20
"""Numbers that are compared at every prediction."""
_SMALL = 2**12
"""Up to so many, torch compares faster than NumPy."""
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROWS, _COLUMNS = (torch.sparse_csr, torch.sparse_bsr), (torch.sparse_csc, torch.sparse_bsc)
_OWN = frozenset(vars(nn.Module())) | {"inplace", "_is_hf_initialized", "_compiled_call_impl"}
"""What every module has, besides the mode, and what changes no result."""


@dataclass(frozen=True, eq=False)
class Fact:
    """One module as it was: its class, its children, and its own attributes."""

    path: str
    module: nn.Module
    kind: type
    forward: Any
    children: tuple[nn.Module | None, ...]
    tensors: tuple[Tensor | None, ...]
    attributes: dict[str, Any]
    made: frozenset[str]
    """Attributes that are computed anew before every forward pass."""
    same: str | None = None
    """The path under which the same module was met before, if it was."""

    @staticmethod
    def of(path: str, module: nn.Module, skipped: frozenset[str], same: str | None) -> Fact:
        kind, made = type(module), _made(module)
        inside = {name: value for name, value in vars(module).items() if name not in skipped and name not in made}
        if of_torch(kind):
            inside = {name: value for name, value in inside.items() if not name.startswith("_")}
        children, tensors = tuple(module._modules.values()), (*module._parameters.values(), *module._buffers.values())
        return Fact(path, module, kind, _forward(kind), children, tensors, inside, made, same)

    def stands(self, skipped: frozenset[str]) -> bool:
        """Whether everything is still the very same object."""
        now = vars(self.module)
        if type(self.module) is not self.kind:
            return False
        for base in self.kind.__mro__:  # as `_forward`, without a call for every module
            if "forward" in base.__dict__:
                if base.__dict__["forward"] is not self.forward:
                    return False
                break
        if tuple(self.module._modules.values()) != self.children:
            return False
        held = (*self.module._parameters.values(), *self.module._buffers.values())
        if len(held) != len(self.tensors):
            return False
        for own, kept in zip(held, self.tensors, strict=True):
            if own is not kept:
                return False
        kept, count = self.attributes, 0
        for name, value in now.items():
            if name in skipped or name in self.made:
                continue
            if name in kept:
                if kept[name] is not value:
                    return False
                count += 1
            elif not (name[0] == "_" and of_torch(self.kind)):
                return False
        return count == len(kept)

    def described(self, code: bool) -> dict[str, Any]:
        if self.same is not None:
            return {"same": self.same}
        plain = {name: text(value, code) for name, value in self.attributes.items() if not _is_numbers(value)}
        found: dict[str, Any] = {"class": self.kind.__qualname__, "attributes": plain}
        if code:
            found["code"] = code_of(self.kind)
        return found


def _forward(kind: type) -> Any:
    """The class's `forward` as it is stored: that of a scripted module cannot be asked for without an instance."""
    for base in kind.__mro__:
        if "forward" in base.__dict__:
            return base.__dict__["forward"]
    return None


def _made(module: nn.Module) -> frozenset[str]:
    """What torch's own hooks compute from parameters before every pass: `weight_norm`, `spectral_norm`, `prune`."""
    hooks = vars(module).get("_forward_pre_hooks", {}).values()
    names = (getattr(hook, "name", getattr(hook, "_tensor_name", None)) for hook in hooks if of_torch(type(hook)))
    return frozenset(name for name in names if isinstance(name, str))


def _is_numbers(value: Any) -> bool:
    """Tensors and arrays are compared by number; a device is a place."""
    return isinstance(value, (Tensor, np.ndarray, torch.device))


def _skipped(model: nn.Module) -> frozenset[str]:
    return _OWN.union(*(written(kind) for kind in {type(module) for module in model.modules()}))


def facts(model: nn.Module, skipped: frozenset[str] | None = None) -> list[Fact]:
    """All modules, parents first; one that is met again is named, not entered."""
    skipped = _skipped(model) if skipped is None else skipped
    seen: dict[nn.Module, str] = {}
    found: list[Fact] = []
    ahead = [("", model)]
    while ahead:
        path, module = ahead.pop()
        found.append(Fact.of(path, module, skipped, seen.get(module)))
        if module in seen:
            continue
        seen[module] = path
        children = [(f"{path}.{name}" if path else name, each) for name, each in module._modules.items() if each]
        ahead += reversed(children)
    return found


def structure(model: nn.Module, code: bool = False) -> dict[str, dict[str, Any]]:
    """What the modules are, by their paths, as JSON can hold it; with `code` also what the functions in them do."""
    return {fact.path: fact.described(code) for fact in facts(model)}


def difference(model: nn.Module, ours: Mapping[str, Any], theirs: Any, where: str = "the file") -> str:
    """The first thing in which two structures differ, in words; empty where they are the same.

    Attributes of torch's modules that only one of them has are those of another version of torch.
    """
    if not isinstance(theirs, Mapping) or not all(isinstance(each, Mapping) for each in theirs.values()):
        raise StorageError("the description of the model is no mapping of modules; expected one that lapwing writes.")
    kinds = {fact.path: fact.kind for fact in facts(model)}
    for path, own in ours.items():
        at = f" at {path!r}" if path else ""
        other = theirs.get(path)
        if other is None:
            return f"a module{at}, and {where} none"
        for entry in ("class", "same"):
            if own.get(entry) != other.get(entry):
                return f"{entry} {own.get(entry)!r}{at}, and {where} {other.get(entry)!r}"
        a, b = own.get("attributes", {}), other.get("attributes", {})
        if not isinstance(b, Mapping):
            raise StorageError(f"the attributes of the module {path!r} are no mapping; expected one.")
        names = [name for name in (*a, *b) if not of_torch(kinds[path]) or (name in a and name in b)]
        for name in names:
            if a.get(name) != b.get(name):
                return f"{name} = {a.get(name)}{at}, and {where} {b.get(name)}"
        if own.get("code") != other.get("code"):
            return f"other code in the class {own.get('class')!r}{at} than {where}"
    missing = [path for path in theirs if path not in ours]
    return f"no module at {missing[0]!r}, and {where} one" if missing else ""


def numbers(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor of the model by its path, in the same memory: parameters, buffers, attributes. Shared ones once.

    Sparse tensors by their parts, numbers that a file has no name for as others of the same bits.
    """
    held = _held(model)
    return {at: each for name, value in held.items() for at, each in _plain(name, value).items()}


def _held(model: nn.Module) -> dict[str, Tensor | np.ndarray]:
    """The same as the modules hold them."""
    found, seen = {}, set()
    for fact in facts(model):
        for name, value in _tensors(fact):
            if id(value) not in seen:
                seen.add(id(value))
                found[f"{fact.path}.{name}" if fact.path else name] = value
    return found


def further(model: nn.Module) -> dict[str, Tensor]:
    """Those of the numbers that `state_dict` leaves out."""
    known = model.state_dict()
    return {name: value for name, value in numbers(model).items() if name not in known}


def _tensors(fact: Fact) -> Iterator[tuple[str, Tensor | np.ndarray]]:
    for held in (fact.module._parameters, fact.module._buffers):
        yield from ((name, tensor) for name, tensor in held.items() if tensor is not None)
    for name, value in fact.attributes.items():
        if isinstance(value, Tensor) or (isinstance(value, np.ndarray) and value.dtype.kind in "fiubc"):
            yield name, value


def _array(value: np.ndarray) -> Tensor:
    """An array as a tensor in the same memory; a copy where torch has none like it."""
    native = value.dtype.newbyteorder("=")
    if native.itemsize > (16 if native.kind == "c" else 8):  # of more digits than torch knows
        native = np.dtype(complex if native.kind == "c" else float)
    alike = value.flags.writeable and native == value.dtype and min(value.strides, default=0) >= 0
    return torch.from_numpy(value if alike else np.array(value, dtype=native, order="C"))


def _plain(name: str, held: Tensor | np.ndarray) -> dict[str, Tensor]:
    """A tensor as dense ones of real numbers, by names; none of one without numbers, or of a layout of its own."""
    tensor = _array(held) if isinstance(held, np.ndarray) else held
    if tensor.is_meta or tensor.is_nested:
        return {}
    if tensor.layout == torch.sparse_coo:
        parts = {"indices": tensor._indices(), "values": tensor._values()}
    elif tensor.layout in _ROWS:
        parts = {"ends": tensor.crow_indices(), "places": tensor.col_indices(), "values": tensor.values()}
    elif tensor.layout in _COLUMNS:
        parts = {"ends": tensor.ccol_indices(), "places": tensor.row_indices(), "values": tensor.values()}
    elif tensor.layout != torch.strided:
        return {}
    elif tensor.is_complex():
        return _plain(name, torch.view_as_real(tensor.detach().resolve_conj()))
    elif tensor.dtype in DTYPES or tensor.is_quantized:
        return {name: tensor}
    else:
        return {name: tensor.detach().reshape(-1).view(torch.uint8)}
    parts["shape"] = torch.tensor(tensor.shape)
    return {at: each for part, value in parts.items() for at, each in _plain(f"{name}.{part}", value).items()}


# -- the model that was fitted -----------------------------------------------------------------------------------------

_Part = tuple[Tensor, Tensor, slice | None]
"""A tensor of the model, its copy, and which of its numbers; None for all."""


@dataclass(eq=False)
class Kept:
    """A model as it was. Memory: its numbers, once more."""

    facts: list[Fact]
    skipped: frozenset[str]
    copies: dict[str, Tensor]
    marks: list[tuple[Tensor, int, int]]
    windows: list[list[_Part]]
    strange: dict[str, Tensor | np.ndarray]
    """Arrays, sparse tensors and the like: always compared whole."""
    turn: int = 0

    @staticmethod
    def of(model: nn.Module) -> Kept:
        with torch.inference_mode(False), torch.no_grad():
            return Kept._of(model, {name: own.detach().clone() for name, own in numbers(model).items()})

    @staticmethod
    def _of(model: nn.Module, copies: dict[str, Tensor]) -> Kept:
        skipped = _skipped(model)
        held = _held(model)
        own = {name: each for name, each in held.items() if isinstance(each, Tensor) and name in copies}
        own = {name: each for name, each in own.items() if _plain(name, each).get(name) is each}
        strange = {name: each for name, each in held.items() if name not in own}
        marks = [(each, *_mark(each)) for each in own.values()]
        return Kept(facts(model, skipped), skipped, copies, marks, _windows(own, copies), strange)

    def difference(self, model: nn.Module, whole: bool = False) -> str:
        """What has changed, in words; empty where nothing has, as far as is looked (see above)."""
        if not whole and self._all_stand(model):
            moved = len(self.windows) > 1 and any(_mark(own) != (v, at) for own, v, at in self.marks)
            turn = self.turn = (self.turn + 1) % len(self.windows)
            if not moved and _stands(self.windows[turn]) and self._strange_stand():
                return ""
        found = self._compared(model)
        if not found:  # other objects that hold the same, or writes that changed nothing
            vars(self).update(vars(self._of(model, self.copies)))
        return found

    def _all_stand(self, model: nn.Module) -> bool:
        if self.facts[0].module is not model:
            return False
        return all(map(Fact.stands, self.facts, repeat(self.skipped)))

    def _strange_stand(self) -> bool:
        if not self.strange:
            return True
        parts = (part for name, each in self.strange.items() for part in _plain(name, each).items())
        return all(at not in self.copies or _same(part, self.copies[at]) for at, part in parts)

    def _compared(self, model: nn.Module) -> str:
        """Everything, by name."""
        was = {fact.path: fact.described(code=False) for fact in self.facts}
        now = {fact.path: fact.described(code=False) for fact in facts(model, self.skipped)}
        if found := difference(model, now, was, "had"):
            return found
        functions = (
            f"another {name} at {old.path!r}"
            for old, new in zip(self.facts, facts(model, self.skipped), strict=True)
            for name, value in old.attributes.items()
            if isinstance(value, FunctionType) and text(value, True) != text(new.attributes.get(name), True)
        )
        if found := next(functions, ""):
            return found
        own = numbers(model)
        # what a forward pass has made for itself meanwhile, as a cache, is no part of what was fitted
        new = (name for name in own if name not in self.copies and name.rpartition(".")[2] not in self.skipped)
        name = next(new, None) or next((name for name in self.copies if name not in own), None)
        if name is not None:
            return f"{name!r} is {'new' if name in own else 'missing'}"
        other = [name for name, copy in self.copies.items() if not _same(own[name], copy)]
        more = f", and so have {len(other) - 1} more" if len(other) > 1 else ""
        return f"{other[0]!r} has other numbers{more}" if other else ""


def _mark(tensor: Tensor) -> tuple[int, int]:
    """How often torch has counted a write, and where the numbers are: sees what goes through torch, and only that."""
    return -1 if tensor.is_inference() else tensor._version, tensor.data_ptr()


def _windows(own: Mapping[str, Tensor], copies: Mapping[str, Tensor]) -> list[list[_Part]]:
    """All numbers in windows of about the same size; what is small, or not row-major in main memory, is not cut."""
    windows: list[list[_Part]] = [[]]
    room, step = WINDOW, max(1, WINDOW // 4)
    for name, tensor in own.items():
        size = tensor.numel()
        whole = size <= min(_SMALL, step) or not tensor.is_contiguous()
        for start in [None] if whole or tensor.device.type != "cpu" else range(0, size, step):
            part = None if start is None else slice(start, min(start + step, size))
            count = size if part is None else part.stop - part.start
            if count > room and windows[-1]:
                windows.append([])
                room = WINDOW
            windows[-1].append((tensor, copies[name], part))
            room -= count
    return windows


def _stands(parts: list[_Part]) -> bool:
    """Whether parts are the same bit for bit, in the fewest steps; a no may be wrong (NaN, another layout)."""
    try:
        for own, copy, part in parts:
            if part is None:
                if not torch.equal(own, copy):
                    return False
            elif (
                own.dtype != copy.dtype
                or own.shape != copy.shape
                or not own.is_contiguous()
                or not (_bits(own.detach().view(-1)[part]) == _bits(copy.view(-1)[part])).all()
            ):
                return False
    except RuntimeError:  # of other types or on other devices
        return False
    return True


def _same(own: Tensor, copy: Tensor) -> bool:
    """The same numbers, bit for bit."""
    if own.shape != copy.shape or own.dtype != copy.dtype:
        return False
    own, copy = own.detach(), copy.to(own.device)
    if torch.equal(own, copy):
        return True
    # a number that is none (NaN) is not equal to itself
    return not own.is_quantized and torch.equal(_whole(own), _whole(copy))


def _whole(tensor: Tensor) -> Tensor:
    """The bits of the numbers, as whole numbers."""
    return tensor.view(_WHOLE[tensor.itemsize]) if tensor.is_floating_point() else tensor


def _bits(tensor: Tensor) -> np.ndarray:
    """The same as an array; by eights, which is twice as fast as by fours, where they fit."""
    whole = _whole(tensor)
    if whole.nbytes % 8 == 0 and whole.is_contiguous() and whole.storage_offset() * whole.itemsize % 8 == 0:
        whole = whole.view(-1).view(torch.int64)
    return whole.numpy()
