"""private(model): the model's modules once more, so that nothing a pass does reaches the user's own.

Every module is copied, not what it computes with: the parameters in the copy are the model's own tensors, so that
derivatives are taken at them; buffers and other tensors are cloned, lists and mappings copied. Train and eval flags,
buffers and attributes that `forward` writes, hooks that a pass sets, and weights that are put in place of the
parameters all stay in the copy: any number of threads may run the model at once, also the user's. A few microseconds
per module, and the memory of the buffers.

References from module to module are followed through attributes, lists, mappings, bound methods, partial functions,
closures and weak references. An object of another kind is shared with the user's model; a module that only such an
object leads to is the user's own, in the user's mode.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.jit._recursive import wrap_cpp_module
from torch.nn.parameter import is_lazy


def private(model: nn.Module, evaluate: bool = False) -> nn.Module:
    """A copy of the model's modules with the model's own parameters; in eval mode if `evaluate`, else as the model."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return private(model, evaluate)
    copy = _Copies().module(model)
    if evaluate:
        _evaluate(copy)
    return copy


def all_modules(model: nn.Module) -> list[nn.Module]:
    """As `model.modules()`, by one loop; that has a generator for every module."""
    modules, known = [model], {id(model)}
    for module in modules:
        for child in module._modules.values():
            if child is not None and id(child) not in known:
                known.add(id(child))
                modules.append(child)
    return modules


def _evaluate(model: nn.Module) -> None:
    """model.eval(), without a call and an assignment to an attribute, both slow, for every module."""
    modules = all_modules(model)
    for module in modules:
        kind = type(module)
        if kind not in _PLAIN_MODES:
            if kind.train is not nn.Module.train or kind.eval is not nn.Module.eval or issubclass(kind, ScriptModule):
                model.eval()  # a module that decides itself what the modes mean
                return
            _PLAIN_MODES.add(kind)
    for module in modules:
        module.__dict__["training"] = False


_PLAIN_MODES: set[type] = set()
"""Kinds of modules that leave train and eval mode to nn.Module."""


class _Copies:
    """What has been copied, by the identity of the original: what was one object stays one."""

    def __init__(self) -> None:
        self._made: dict[int, Any] = {}

    def of(self, value: Any) -> Any:
        kind = type(value)
        return value if kind in _SHARED else (_HOW.get(kind) or _how(kind))(self, value)

    def module(self, module: nn.Module) -> nn.Module:
        if id(module) in self._made:
            return self._made[id(module)]
        if isinstance(module, ScriptModule):
            return self._kept(module, wrap_cpp_module(self._script_object(module)))
        copy = self._made[id(module)] = object.__new__(type(module))
        state = module.__dict__.copy()
        object.__setattr__(copy, "__dict__", state)
        for name, value in state.items():
            kind = type(value)
            if kind in _SHARED:
                continue
            # most of the mappings that every module has are empty
            state[name] = kind() if name in _EVERYWHERE and not value else (_HOW.get(kind) or _how(kind))(self, value)
        # compiled code is tied to the modules it was made from, and hides its operations
        state.pop("_compiled_call_impl", None)
        if "dynamo_ctx" in state and "_orig_mod" in state["_modules"]:
            state["forward"] = state["_modules"]["_orig_mod"]
        return copy

    def _kept(self, original: Any, copy: Any) -> Any:
        self._made[id(original)] = copy
        return copy

    def _script_object(self, module: Any) -> Any:
        """TorchScript keeps flags and tensors outside Python: an object of its own for every module."""
        copy = module._c.__copy__()
        for name, child in module.named_children():
            copy.setattr(name, self._script_object(child))
        for name, buffer in module.named_buffers(recurse=False):
            copy.setattr(name, self.tensor(buffer))
        return copy

    def tensor(self, tensor: Tensor) -> Tensor:
        if tensor.requires_grad or isinstance(tensor, nn.Parameter) or is_lazy(tensor):
            return tensor
        return self._made[id(tensor)] if id(tensor) in self._made else self._kept(tensor, tensor.detach().clone())

    def mapping(self, mapping: dict) -> dict:
        if id(mapping) in self._made:
            return self._made[id(mapping)]
        copy = self._made[id(mapping)] = mapping.copy()
        if not _SHARED.issuperset(map(type, copy.values())):
            for key, value in copy.items():
                kind = type(value)
                copy[key] = value if kind in _SHARED else (_HOW.get(kind) or _how(kind))(self, value)
        if not _SHARED.issuperset(map(type, copy)):
            entries = [(self.of(key), value) for key, value in copy.items()]
            copy.clear()
            copy.update(entries)
        return copy

    def sequence(self, values: Any) -> Any:
        """A list, deque or set."""
        if id(values) in self._made:
            return self._made[id(values)]
        copy = self._made[id(values)] = values.copy()
        if not _SHARED.issuperset(map(type, values)):
            entries = [self.of(value) for value in values]
            copy.clear()
            (copy.update if isinstance(copy, set) else copy.extend)(entries)
        return copy

    def fixed(self, values: tuple) -> tuple:
        entries = [self.of(value) for value in values]
        if all(a is b for a, b in zip(entries, values, strict=True)):
            return values
        return type(values)(*entries) if hasattr(values, "_fields") else type(values)(entries)

    def method(self, method: MethodType) -> MethodType:
        owner = method.__self__
        return MethodType(method.__func__, self.module(owner)) if isinstance(owner, nn.Module) else method

    def bound(self, function: partial) -> partial:
        given, named = self.fixed(function.args), {key: self.of(value) for key, value in function.keywords.items()}
        inner = self.of(function.func)
        same = inner is function.func and given is function.args
        if same and all(named[key] is value for key, value in function.keywords.items()):
            return function
        return self._with_attributes(function, partial(inner, *given, **named))

    def function(self, function: FunctionType) -> FunctionType:
        """With closures over the copies, where it closes over modules or lists of them; other variables stay shared."""
        if not function.__closure__:
            return function
        if id(function) in self._made:
            return self._made[id(function)]
        self._made[id(function)] = function  # one that closes over itself
        cells = tuple(self._cell(cell) for cell in function.__closure__)
        if all(a is b for a, b in zip(cells, function.__closure__, strict=True)):
            return function
        copy = FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, closure=cells
        )
        copy.__kwdefaults__ = function.__kwdefaults__
        return self._kept(function, self._with_attributes(function, copy))

    def _cell(self, cell: CellType) -> CellType:
        try:
            held = cell.cell_contents
        except ValueError:  # not assigned yet
            return cell
        inside = held.values() if isinstance(held, dict) else held if isinstance(held, (list, tuple)) else (held,)
        if not any(isinstance(each, (nn.Module, MethodType, FunctionType, partial)) for each in inside):
            return cell
        copy = self.of(held)
        return cell if copy is held else CellType(copy)

    @staticmethod
    def _with_attributes(original: Any, copy: Any) -> Any:
        copy.__dict__.update(original.__dict__)
        return copy

    def reference(self, reference: weakref.ref) -> weakref.ref:
        target = reference()
        return weakref.ref(self.module(target)) if isinstance(target, nn.Module) else reference


def _shared(copies: _Copies, value: Any) -> Any:
    return value


_HOW: dict[type, Callable[[_Copies, Any], Any]] = {
    **dict.fromkeys((dict, OrderedDict, defaultdict), _Copies.mapping),
    **dict.fromkeys((list, set, deque), _Copies.sequence),
    tuple: _Copies.fixed,
    MethodType: _Copies.method,
    FunctionType: _Copies.function,
    partial: _Copies.bound,
    weakref.ref: _Copies.reference,
}
"""How values of a kind are copied; kinds that are met are added."""
_SHARED: set[type] = {bool, int, float, complex, str, bytes, type(None), type, BuiltinFunctionType, torch.Size}
_SHARED.add(nn.Parameter)
_HOW.update(dict.fromkeys(_SHARED, _shared))
_EVERYWHERE = frozenset(vars(nn.Module()))
"""What every module has, parameters, buffers and hooks of each kind: mostly empty."""


def _how(kind: type) -> Callable[[_Copies, Any], Any]:
    if issubclass(kind, nn.Module):
        how = _Copies.module
    elif issubclass(kind, Tensor):
        how = _Copies.tensor
    elif issubclass(kind, tuple) and hasattr(kind, "_fields"):
        how = _Copies.fixed
    else:
        how = _shared
        _SHARED.add(kind)
    _HOW[kind] = how
    return how
