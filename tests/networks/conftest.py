"""The count per structure, after the networks were tried."""

from __future__ import annotations

from collections import Counter
from typing import Any

OUTCOMES = ("ok", "refused", "wrong")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """A table of outcomes by structure, from what each test recorded; the reasons of those that are not ok below it."""
    counts: dict[str, Counter[str]] = {}
    reasons = []
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", "") != "call":
                continue
            for name, (structure, outcome, reason) in report.user_properties:
                if name != "network":
                    continue
                counts.setdefault(structure, Counter())[outcome] += 1
                if outcome != "ok":
                    network = report.nodeid.rpartition("[")[2].rstrip("]")
                    reasons.append(f"{network}, {structure}: {outcome}: {reason}")
    if not counts:
        return
    terminalreporter.section("networks of other packages")
    terminalreporter.line(f"{'structure':<12}" + "".join(f"{outcome:>9}" for outcome in OUTCOMES))
    for structure, found in counts.items():
        terminalreporter.line(f"{structure:<12}" + "".join(f"{found[outcome]:>9}" for outcome in OUTCOMES))
    for reason in sorted(reasons):
        terminalreporter.line(reason)
