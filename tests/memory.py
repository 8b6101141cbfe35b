"""What memory an operation takes, counted tensor by tensor."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.profiler import ProfilerActivity, profile
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


class Peak:
    """Bytes that torch's allocator held at the same time, beyond what it held before, as its own profiler counts them.

    Includes what no operation returns: columns of a convolution, workspaces of a decomposition.
    """

    def __init__(self) -> None:
        self.bytes = 0

    def __enter__(self) -> Peak:
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._profile.__exit__(None, None, None)
        results: Any = self._profile.profiler.kineto_results  # pyright: ignore[reportOptionalMemberAccess]
        found = sorted((e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]")
        held = 0
        for _, change in found:
            held += change
            self.bytes = max(self.bytes, held)
