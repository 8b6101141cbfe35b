"""The figures in a README come from results.json: run.py fills the fields of figures.md in, and puts it between marks.

    | NLL | {ours/test/nll:.3f} |

    {checks}

A field is a path of keys in results.json, and a format; `#2` is the third entry of a list or of a mapping. A figure
over several seeds (see `common.spread`) is written as its median, with the smallest and the largest. `{verdict}`,
`{checks}` and `{run}` stand for how many checks hold, for the list of them, and for where the figures come from.
Results of another configuration than the one in config.json are not shown. `python experiments/readme.py` does it for
all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

START, END = "<!-- figures.md, filled in from results.json -->\n", "<!-- end of figures -->"
FIELD = re.compile(r"\{([^{}:]+)(?::([^{}]*))?\}")
NOT_RUN = "Not run yet: the checks are committed before the run.\n"
"""Stands for the figures of an experiment that has no results.json."""
STALE = "The last run had another configuration than the one here; its figures are not shown."


def stored(folder: Path) -> dict[str, Any] | None:
    """The results of an experiment; None before its first run."""
    path = folder / "results.json"
    return json.loads(path.read_text()) if path.exists() else None


def rendered(folder: Path, results: Mapping[str, Any] | None) -> str:
    """README.md of an experiment's `folder` with the figures of `results`."""
    before, found, rest = (folder / "README.md").read_text().partition(START)
    _, ended, after = rest.partition(END)
    if not found or not ended:
        raise ValueError(f"README.md of {folder.name} has no place for figures: {START.strip()} and {END}")
    if results is None:
        return before + START + NOT_RUN + END + after
    config = json.loads((folder / "config.json").read_text())
    config.pop("smoke", None)
    shown = results["smoke"] or results["config"] == config
    figures = filled((folder / "figures.md").read_text(), results) if shown else f"{STALE}\n"
    return before + START + figures + END + after


def filled(template: str, results: Mapping[str, Any]) -> str:
    special = {"verdict": verdict, "checks": checks, "run": run}

    def field(found: re.Match[str]) -> str:
        path, form = found[1], found[2] or ""
        return special[path](results) if path in special else shown(at(results, path), form)

    return FIELD.sub(field, template)


def at(results: Any, path: str) -> Any:
    value = results
    for key in path.split("/"):
        if key.startswith("#"):
            value = list(value.values() if isinstance(value, Mapping) else value)[int(key[1:])]
        elif key in value:
            value = value[key]
        else:
            raise KeyError(f"results.json has no {path!r}: {key!r} is not among {sorted(value)}")
    return value


def shown(value: Any, form: str) -> str:
    if isinstance(value, Mapping):
        low, middle, high = (format(value[key], form) for key in ("min", "median", "max"))
        return f"{middle} ({low} to {high})"
    return format(value, form)


def verdict(results: Mapping[str, Any]) -> str:
    held = results["held"].values()
    if all(held):
        return f"**Held**: all {len(held)} checks"
    return (
        f"**Held in part**: {sum(held)} of {len(held)} checks"
        if any(held)
        else f"**Not held**: 0 of {len(held)} checks"
    )


def checks(results: Mapping[str, Any]) -> str:
    """One line a check; with several seeds, on how many of them it holds."""
    seeds = results.get("held_on_seeds", {})
    lines = []
    for name, held in results["held"].items():
        on = f" ({sum(seeds[name])} of {len(seeds[name])} seeds)" if name in seeds else ""
        lines.append(f"- {'held' if held else '**not held**'}{on}: {name}")
    return "\n".join(lines)


def run(results: Mapping[str, Any]) -> str:
    tree = "" if results["clean"] else ", with changes that were not committed"
    machine = results["machine"]
    return (
        f"Commit {results['commit'][:10]}{tree}; {results['seconds'] / 60:.1f} minutes on {machine['processor']}, "
        f"{machine['threads']} thread{'s' if machine['threads'] > 1 else ''}, torch {machine['torch']}."
    )


if __name__ == "__main__":
    for template in sorted(Path(__file__).resolve().parent.glob("*/figures.md")):
        (template.parent / "README.md").write_text(rendered(template.parent, stored(template.parent)))
