"""Section of the page about meshes: one device compared with several. Source: docs/sharding.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parity.engine.measure.measurement import Measurement, Verdict
from reports.page.sections.tables import rank_of
from reports.store.runs import Run
from reports.text import edge_name, edge_rank, label, number, share
from reports.verdict.replays import suite_of

SUITE = "mesh"
"""Name of the suite. A copy: importing it from `parity.mesh.suite` would import JAX."""


def meshes(run: Run) -> dict[str, Any] | None:
    """Return a row per compared program and mesh, or None for a run without mesh comparisons."""
    cases: dict[str, list[Measurement]] = {}
    for m in run.measurements:
        if suite_of(m) == SUITE and m.verdict is not Verdict.INFO:
            cases.setdefault(m.case, []).append(m)
    if not cases:
        return None
    edges = sorted({m.edge for rows in cases.values() for m in rows}, key=edge_rank)
    rows = [_row(case, gates, edges) for case, gates in cases.items()]
    return {
        "edges": [edge_name(edge) for edge in edges],
        "rows": sorted(rows, key=lambda row: row["state"] == "pass"),
        "failing": sum(row["state"] == "fail" for row in rows),
    }


def _row(case: str, gates: Sequence[Measurement], edges: Sequence[str]) -> dict[str, Any]:
    words = case.split()
    failing = [m for m in gates if m.verdict is not Verdict.PASS]
    copies = [m for m in gates if m.metric == "replicas"]
    measured = [m for m in gates if m.metric != "replicas"]
    start = max(failing, key=lambda m: (m.note.startswith("starts at"), bool(m.note)), default=None)
    return {
        "subject": label(" ".join(w for w in words if "=" not in w), 60),
        "mesh": label(" × ".join(w for w in words if "=" in w and not w.endswith("=1")), 80),
        "state": "fail" if failing else "pass",
        "held": f"{len(gates) - len(failing):,} / {len(gates):,}",
        "cells": [_cell([m for m in measured if m.edge == edge]) for edge in edges],
        "copies": f"{sum(m.value == 0 for m in copies):,} / {len(copies):,}",
        "start": label(start.quantity) if start else "",
        "note": label(start.note, 600) if start else "",
    }


def _cell(gates: Sequence[Measurement]) -> dict[str, Any] | None:
    """Return the gate with the largest share of its tolerance as a cell; None without gates."""
    if not gates:
        return None
    worst = max(gates, key=rank_of)
    return {
        "state": "pass" if worst.verdict is Verdict.PASS else "fail",
        "value": number(worst.value),
        "quantity": label(worst.quantity),
        "percent": f"{min(100.0, 100 * worst.fraction):.1f}" if worst.fraction >= 0 else "100.0",
        "share": share(worst.fraction),
    }
