"""What memory an operation takes, counted tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import finalize

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Largest(TorchDispatchMode):
    """The number of entries of the largest tensor that any operation returned, views of smaller ones left out."""

    def __init__(self) -> None:
        super().__init__()
        self.numel, self.where = 0, ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, Tensor) and value.untyped_storage().nbytes() // value.element_size() > self.numel:
                self.numel = value.untyped_storage().nbytes() // value.element_size()
                self.where = f"{func} -> {tuple(value.shape)}"
        return out


@dataclass
class Allocations:
    """Bytes of the storages that operations returned and that were alive at the same time, at most."""

    now: int = 0
    peak: int = 0


class _Storages(TorchDispatchMode):
    """Counts every storage once, from the operation that returns it to the end of the tensor that it returns."""

    def __init__(self, made: Allocations) -> None:
        super().__init__()
        self.made, self.alive = made, set[int]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        known = self.alive | {each.untyped_storage().data_ptr() for each in given}
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                if storage.data_ptr() not in known:
                    self._count(storage.data_ptr(), storage.nbytes(), value)
        return out

    def _count(self, pointer: int, size: int, value: Tensor) -> None:
        self.alive.add(pointer)
        self.made.now += size
        self.made.peak = max(self.made.peak, self.made.now)
        finalize(value, self._gone, pointer, size)

    def _gone(self, pointer: int, size: int) -> None:
        self.alive.discard(pointer)
        self.made.now -= size


@contextmanager
def allocations() -> Iterator[Allocations]:
    """What is allocated inside, by operations that torch dispatches; what an operation needs within is not seen."""
    made = Allocations()
    with _Storages(made):
        yield made
