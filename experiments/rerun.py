"""Experiments and benchmarks again, from a clone of the last commit, one after the other.

    python experiments/rerun.py                                        all experiments
    python experiments/rerun.py c12 c14                                experiments whose folders begin so
    python experiments/rerun.py benchmarks/resolution.py               a benchmark
    python experiments/rerun.py "benchmarks/uci.py --jobs 2" c11       with arguments of its own

The clone is a temporary folder; what a run writes there is copied back here when it has ended well. Uncommitted changes
have no part in it, so `clean` is true in what it writes. Runs with the Python that runs this, and the clone's library.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def scripts(asked: list[str], root: Path) -> list[list[str]]:
    """Commands, as paths from `root` and arguments; a name stands for the experiments that begin with it."""
    every = sorted(path.relative_to(root).as_posix() for path in (root / "experiments").glob("*/run.py"))
    commands = [] if asked else [[each] for each in every]
    for name in asked:
        script, *arguments = shlex.split(name)
        found = (
            [script] if script.endswith(".py") else [each for each in every if each.split("/")[1].startswith(script)]
        )
        if not found or not (root / found[0]).is_file():
            sys.exit(f"{script!r} is no experiment or script of this commit; expected one of {every} or a path.")
        commands += [[each, *arguments] for each in found]
    return commands


def written(clone: Path) -> list[str]:
    """Files of the clone that are not as committed."""
    status = ["git", "-C", str(clone), "status", "--porcelain", "--no-renames", "--untracked-files=all", "-z"]
    entries = subprocess.run(status, check=True, capture_output=True, text=True).stdout.split("\0")
    return [entry[3:] for entry in entries if entry]


def rerun(command: list[str], clone: Path, into: Path) -> bool:
    """One run in the clone, its files copied `into`; the clone is then as it was. Whether it ended well."""
    environment = os.environ | {"PYTHONPATH": str(clone / "src")}
    started = time.perf_counter()
    ended = subprocess.run([sys.executable, *command], cwd=clone, env=environment)
    seconds = time.perf_counter() - started
    files = written(clone)
    if ended.returncode == 0:
        for name in files:
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(clone / name, into / name)
    for undo in (["reset", "--quiet", "--hard"], ["clean", "--quiet", "-ffd"]):
        subprocess.run(["git", "-C", str(clone), *undo], check=True)
    outcome = f"wrote {', '.join(files) or 'nothing'}" if ended.returncode == 0 else f"FAILED ({ended.returncode})"
    print(f"== {shlex.join(command)}: {seconds:.0f} s, {outcome}", flush=True)
    return ended.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="experiments, or paths of scripts; all experiments if none is given")
    asked = parser.parse_args().names
    with tempfile.TemporaryDirectory(prefix="lapwing-") as folder:
        clone = Path(folder) / "lapwing"
        subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(clone)], check=True)
        head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
        subprocess.run(["git", "-C", str(clone), "checkout", "--quiet", "--detach", head.stdout.strip()], check=True)
        commands = scripts(asked, clone)
        print(f"== {len(commands)} runs of commit {head.stdout.strip()[:10]}", flush=True)
        good = [rerun(command, clone, ROOT) for command in commands]
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
