"""What a file holds, as plain values and as lines for people: a fitted table, or a posterior of one's own network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from lapwing.cli.console import comparison, notes, visible
from lapwing.serialize.files import describe

Found = dict[str, Any]


def inspected(path: Path) -> Found:
    """Everything about the file that a person may want to know."""
    described = describe(path)
    metadata = described["metadata"]
    found: Found = {
        "file": str(path),
        "bytes": path.stat().st_size,
        "kind": metadata.get("kind"),
        "written_by": described.get("library"),
    }
    if metadata.get("kind") != "table":
        model = metadata.get("model", {})
        return found | {
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
    return found | {
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


def lines(found: Found) -> list[str | Table | Text]:
    """The same for people."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")

    def row(name: str, value: object) -> None:
        table.add_row(name, Text(visible(str(value))))

    size = f"{found['bytes'] / 1e6:.1f} MB" if found["bytes"] >= 1e5 else f"{found['bytes'] / 1e3:.1f} kB"
    row("File", f"{found['file']} ({size}, written by lapwing {found['written_by']})")
    if found["kind"] != "table":
        row("Posterior", f"{found['posterior']} of a {found['network']}; read it with lapwing.load(path, model)")
        row("Likelihood", ", ".join(f"{value}" for value in (found["likelihood"] or {}).values()))
        if found["reason"]:
            row("Structure", found["reason"])
        row("Parameters", ", ".join(f"{name} {shape}" for name, shape in found["entries"].items()))
        return [table]
    from lapwing.tables.scoring import Summary

    network, classes = found["network"], found["classes"]
    what = f"{found['task']} of {found['target']!r}"
    row("Task", f"{what}, {len(classes)} classes: {', '.join(classes[:10])}" if classes else what)
    used = [column for column in found["columns"] if column["kind"] != "left out"]
    kinds = {kind: sum(column["kind"] == kind for column in used) for kind in dict.fromkeys(c["kind"] for c in used)}
    row(
        "Columns",
        f"{len(used)} used ({', '.join(f'{n} {kind}' for kind, n in kinds.items())}), {network['inputs']} inputs",
    )
    row(
        "Network",
        f"{network['kind']}, {network['depth']} layers of {network['width']}, {network['parameters']:,} weights",
    )
    row("Posterior", f"{found['structure']}; {found['effective_parameters']:,.0f} weights are determined by the data")
    precisions = found["prior_precision"]
    span = f"{min(precisions):.3g} to {max(precisions):.3g}" if len(precisions) > 1 else f"{precisions[0]:.3g}"
    warmth = f" at temperature {found['temperature']:.3g}" if found["temperature"] != 1 else ""
    row("Prior", f"precision {span}; log evidence {found['log_evidence']:,.1f}{warmth}")
    if found["noise"] is not None:
        around = "varies with the inputs, around " if found["noise_varies"] else ""
        row("Noise", f"{around}standard deviation {found['noise']:.4g}")
    row("Calibration", f"{found['calibration_rows']:,} rows; out of distribution above {found['threshold']:.4g}")
    summary = Summary.from_dict(found["summary"])
    return [table, Text(""), comparison(summary), *notes(found["notes"]), *notes(found["explained"], "In words")]
