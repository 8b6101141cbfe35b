"""What memory an operation takes, counted tensor by tensor."""

from __future__ import annotations

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
