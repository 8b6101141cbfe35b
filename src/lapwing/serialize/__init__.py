"""Objects as tensors, numbers and strings (`packing`), and those as one checked file (`files`). No pickle anywhere."""

from lapwing.serialize.files import describe, read, replacing, write
from lapwing.serialize.packing import KINDS, compact, pack, pack_tree, register, unpack, unpack_tree

__all__ = [
    "KINDS",
    "compact",
    "describe",
    "pack",
    "pack_tree",
    "read",
    "register",
    "replacing",
    "unpack",
    "unpack_tree",
    "write",
]
