"""What a file holds, as plain values and as lines to print: a fitted table, or a posterior of the user's network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from lapwing.cli.console import comparison, notes, visible
from lapwing.serialize.files import describe

Facts = dict[str, Any]


def inspected(path: Path) -> Facts:
    """What there is to know about the file."""
    described = describe(path)
    metadata = described["metadata"]
    facts: Facts = {
        "file": str(path),
        "bytes": path.stat().st_size,
        "kind": metadata.get("kind"),
        "written_by": described.get("library"),
    }
    if metadata.get("kind") != "table":
        model = metadata.get("model", {})
        return facts | {
            "posterior": metadata.get("class"),
            "likelihood": metadata.get("likelihood"),
            "network": model.get("class"),
            "note": model.get("note"),
            "entries": {name: entry["shape"] for name, entry in model.get("entries", {}).items()},
            "reason": metadata.get("reason", ""),
        }
    from lapwing.tables.bundle import Bundle

    bundle = Bundle.load(path)
    la, spec = bundle.la, bundle.spec
    return facts | {
        "task": bundle.task,
        "target": bundle.target.name,
        "classes": list(bundle.classes),
        "columns": [
            {"name": column.name, "kind": column.kind, "inputs": len(column.inputs), "note": column.note}
            for column in bundle.encoder.columns
        ],
        "network": {
            "kind": spec.kind,
            "inputs": spec.inputs,
            "width": spec.width,
            "depth": spec.depth,
            "outputs": spec.outputs,
            "parameters": la.n_params,
        },
        "posterior": type(la).__name__,
        "structure": la.structure,
        "prior_precision": la.prior_precision.tolist(),
        "noise": bundle.noise if bundle.task == "regression" else None,
        "noise_varies": spec.varying,
        "log_evidence": float(la.log_marginal_likelihood()),
        "temperature": float(la.temperature),
        "effective_parameters": float(la.effective_parameters().sum()),
        "calibration_rows": len(bundle.conformal.scores),
        "threshold": bundle.ood.threshold,
        "explained": bundle.explain(),
        "summary": bundle.summary.to_dict(),
        "notes": list(bundle.notes),
    }


def lines(facts: Facts) -> list[str | Table | Text]:
    """The same as lines to print."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")

    def row(name: str, value: object) -> None:
        table.add_row(name, Text(visible(str(value))))

    size = f"{facts['bytes'] / 1e6:.1f} MB" if facts["bytes"] >= 1e5 else f"{facts['bytes'] / 1e3:.1f} kB"
    row("File", f"{facts['file']} ({size}, written by lapwing {facts['written_by']})")
    if facts["kind"] != "table":
        row("Posterior", f"{facts['posterior']} of a {facts['network']}; read it with lapwing.load(path, model)")
        row("Likelihood", ", ".join(f"{value}" for value in (facts["likelihood"] or {}).values()))
        if facts["reason"]:
            row("Structure", facts["reason"])
        row("Parameters", ", ".join(f"{name} {shape}" for name, shape in facts["entries"].items()))
        return [table]
    from lapwing.tables.scoring import Summary

    network, classes = facts["network"], facts["classes"]
    what = f"{facts['task']} of {facts['target']!r}"
    row("Task", f"{what}, {len(classes)} classes: {', '.join(classes[:10])}" if classes else what)
    used = [column for column in facts["columns"] if column["kind"] != "left out"]
    kinds = {kind: sum(column["kind"] == kind for column in used) for kind in dict.fromkeys(c["kind"] for c in used)}
    row(
        "Columns",
        f"{len(used)} used ({', '.join(f'{n} {kind}' for kind, n in kinds.items())}), {network['inputs']} inputs",
    )
    row(
        "Network",
        f"{network['kind']}, {network['depth']} layers of {network['width']}, {network['parameters']:,} weights",
    )
    row("Posterior", f"{facts['structure']}; {facts['effective_parameters']:,.0f} weights are determined by the data")
    precisions = facts["prior_precision"]
    span = f"{min(precisions):.3g} to {max(precisions):.3g}" if len(precisions) > 1 else f"{precisions[0]:.3g}"
    warmth = f" at temperature {facts['temperature']:.3g}" if facts["temperature"] != 1 else ""
    row("Prior", f"precision {span}; log evidence {facts['log_evidence']:,.1f}{warmth}")
    if facts["noise"] is not None:
        around = "varies with the inputs, around " if facts["noise_varies"] else ""
        row("Noise", f"{around}standard deviation {facts['noise']:.4g}")
    row("Calibration", f"{facts['calibration_rows']:,} rows; out of distribution above {facts['threshold']:.4g}")
    summary = Summary.from_dict(facts["summary"])
    return [table, Text(""), comparison(summary), *notes(facts["notes"]), *notes(facts["explained"], "In words")]
