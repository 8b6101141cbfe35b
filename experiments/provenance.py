"""Where figures come from: a commit, whether everything was as in that commit, and the machine.

For experiments and benchmarks alike. `committed` is asked at the start of a run, before it has written anything.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]


def committed(outputs: Iterable[str], root: Path = ROOT) -> dict[str, Any]:
    """The commit of the tree at `root`; `clean` if no file of it was changed, added or removed, and lapwing is its own.

    `outputs` are what the run itself writes, as paths from `root`: they may differ. Ignored files do not count.
    `changed` names what was not as committed.
    """
    commit = _git(root, "rev-parse", "HEAD").strip()
    # Without renames every entry is "XY path", ended by a zero byte.
    entries = _git(root, "status", "--porcelain", "--no-renames", "--untracked-files=all", "-z").split("\0")
    changed = sorted({entry[3:] for entry in entries if entry} - set(outputs))
    library = importlib.util.find_spec("lapwing")
    if library is None or library.origin is None or not Path(library.origin).resolve().is_relative_to(root / "src"):
        changed.append("src: lapwing was imported from another place")
    return {"commit": commit, "clean": not changed, "changed": changed}


def machine() -> dict[str, Any]:
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True).stdout


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
