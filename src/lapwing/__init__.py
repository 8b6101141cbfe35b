"""lapwing: a Laplace posterior for any PyTorch network.

Curvature, uncertainty, evidence, and the training procedures that use them. Symbols are listed in
`docs/notation.md`; imports inside the package point one way, and `tests/test_imports.py` holds the order.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from lapwing import curvature
from lapwing.directions import alignment
from lapwing.laplace import *  # noqa: F403
from lapwing.laplace import __all__ as _face

if TYPE_CHECKING:
    from lapwing.laplace.attach import attach
    from lapwing.reporting import report

try:
    __version__ = version("lapwing")
except PackageNotFoundError:  # a source tree on the path that was never installed has no metadata to read
    __version__ = "0+unknown"

__all__ = ["__version__", "alignment", "attach", "curvature", "report", *_face]

# What people run is imported when it is first used, so that the library stays quick to import.
_LATER = {"attach": "lapwing.laplace.attach", "report": "lapwing.reporting"}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LATER])
