"""Runs the scripts with laplace-torch and stores what they print, with the versions, in `recorded/`.

    python tests/compat/record.py path/to/peers/bin/python

Needs an environment of its own for laplace-torch (see `benchmarks/`); the tests read the stored figures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SCRIPTS = ("regression", "classification", "surface")


def run(python: str | Path, script: str, *arguments: str) -> dict[str, Any]:
    """What a script prints, run by another interpreter in a process of its own."""
    command = [str(python), "-W", "ignore", str(HERE / "scripts" / f"{script}.py"), *arguments]
    answer = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    if answer.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {answer.returncode}:\n{answer.stderr[-2000:]}")
    return json.loads(answer.stdout)


def rounded(value: Any) -> Any:
    """Nine digits: far beyond the tolerance of the tests, and a third of the size."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def write(python: str, script: str) -> None:
    code = "import json, torch; from importlib.metadata import version as v; " + (
        "print(json.dumps({'laplace-torch': v('laplace-torch'), 'torch': torch.__version__}))"
    )
    versions = subprocess.run([python, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True).stdout
    figures = {key: value for key, value in run(python, script, "laplace").items() if not key.endswith("_restored")}
    lines = [f"  {json.dumps(key)}: {json.dumps(rounded(value))}" for key, value in figures.items()]
    text = '{"versions": ' + versions.strip() + ',\n "figures": {\n' + ",\n".join(lines) + "\n}}\n"
    (HERE / "recorded" / f"{script}.json").write_text(text)


if __name__ == "__main__":
    for name in SCRIPTS:
        write(sys.argv[1], name)
