"""All figures of a report as one dictionary: what the page shows, and has inside it as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from lapwing.errors import DataError
from lapwing.laplace import BaseLaplace
from lapwing.reporting import statistics
from lapwing.reporting.observations import SHOWN_COLUMNS, Observations
from lapwing.reporting.predictions import Classes, Counts, Numbers
from lapwing.reporting.words import Figures, number


def collect(
    la: BaseLaplace,
    observed: Observations,
    *,
    names: Sequence[str] | None = None,
    classes: Sequence[str] | None = None,
    title: str | None = None,
    conformal: Figures | None = None,
    facts: Sequence[str] = (),
    noise: float | None = None,
    choices: Sequence[str] = (),
    held_out: bool = False,
) -> Figures:
    """All figures of a report, ready for JSON. `noise` is the level of constant noise in the unit of the targets;
    `held_out` says that the rows are known not to have been used for training."""
    data = observed.data
    if not len(data.targets):
        raise DataError("the loader has no row with a target; expected at least one. Check the dataset.")
    if not bool(data.uncertainty.isfinite().all()):
        raise DataError("a prediction is not finite; expected numbers. Check the inputs for missing or huge values.")
    if isinstance(data, Numbers) and not bool((known := data.deviation.square().isfinite()).all()):
        at = int(observed.row[~known][0])
        raise DataError(
            f"the predicted noise of row {at}, counted from 0 among those looked at, is too large to be a number; "
            "expected inputs less far from those that were learnt from. Leave it out, or fit with constant noise."
        )
    task = "classification" if isinstance(data, Classes) else "regression"
    calibration = (
        {"reliability": statistics.reliability(data)}
        if isinstance(data, Classes)
        else {"transform": statistics.transform(data)}
    )
    rows = statistics.uncertain(observed)
    if observed.columns is not None:
        rows = [row | {"columns": [number(v) for v in observed.columns[row["row"]].tolist()]} for row in rows]
    spread = statistics.noise(observed)
    own = [f"Structure: {la.reason}."] if la.reason and not la.choices else []
    return {
        "title": title or f"{type(la.model).__name__} with error bars",
        "version": _version(),
        "task": task,
        "counts": isinstance(data, Counts),
        "rows": observed.rows,
        "held_out": held_out,
        "facts": [*facts, *_facts(la, observed, spread, noise)],
        "noise": spread,
        "summary": statistics.summary(data),
        **calibration,
        "coverage": statistics.coverage(data, conformal),
        "errors": statistics.errors(data),
        "unfamiliar": statistics.unfamiliar(observed),
        "evidence": statistics.evidence(la),
        "effective": statistics.effective(la),
        "uncertain": rows,
        "columns": [str(name) for name in (names or ())][: SHOWN_COLUMNS if observed.columns is not None else 0],
        "classes": [str(name) for name in classes] if classes is not None else None,
        "choices": [*choices, *la.choices, *own],
    }


def _facts(la: BaseLaplace, observed: Observations, spread: Figures | None, noise: float | None) -> list[str]:
    facts = [
        f"{observed.rows:,} rows looked at, {la.n_data:,} learnt from",
        f"{type(la.model).__name__} with {sum(p.numel() for p in la.model.parameters()):,} parameters",
        f"{type(la).__name__} over {la.space.size:,} of them",
    ]
    if spread is not None and spread["varies"]:
        low, high = number(spread["low"]), number(spread["high"])
        facts.append(f"noise varies with the inputs: standard deviation {low} to {high} (middle 90% of rows)")
    elif la.has_noise:
        facts.append(f"noise level {number(float(la.sigma_noise) if noise is None else noise)}")
    return facts


def _version() -> str:
    try:
        return version("lapwing")
    except PackageNotFoundError:
        return "0+unknown"
