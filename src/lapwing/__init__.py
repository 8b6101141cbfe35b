"""lapwing: a Laplace posterior for any PyTorch network.

Curvature, uncertainty, evidence, and the training procedures that use them. Symbols are listed in
`docs/notation.md`; imports inside the package point one way, and `tests/test_imports.py` holds the order.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from lapwing import curvature
from lapwing.laplace import *  # noqa: F403
from lapwing.laplace import __all__ as _face

try:
    __version__ = version("lapwing")
except PackageNotFoundError:  # a source tree on the path that was never installed has no metadata to read
    __version__ = "0+unknown"

__all__ = ["__version__", "curvature", *_face]
