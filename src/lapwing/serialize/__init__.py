"""Objects as tensors, numbers and strings (`packing`), and those as one checked file (`files`). No pickle anywhere."""

from lapwing.serialize.files import describe, read, replacing, write
from lapwing.serialize.packing import KINDS, compact, pack, register, unpack

__all__ = ["KINDS", "compact", "describe", "pack", "read", "register", "replacing", "unpack", "write"]
