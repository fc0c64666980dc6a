"""What the run document says beyond the environment.

Cases, tolerances, known differences and replay commands.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from parity.engine.measurement import Kind, Measurement, Verdict
from parity.megalodon.cases import Case
from parity.megalodon.known_differences import KNOWN_DIFFERENCES
from parity.tolerances import PORT_EDGES, PORTS, PRODUCTS, TABLE
from reports.verdict.changes import What
from reports.verdict.decide import Decision


def derived(rows: Sequence[Measurement], fault: str | None) -> dict[str, Any]:
    """Return the parts of the document that follow from a run's measurements.

    A merged run has them made anew: each shard knows only its own.
    """
    return {
        "tolerances": _tolerances(),
        "seams": known_differences(rows),
        "replay": _replay(rows, fault),
    }


def suite_of(m: Measurement) -> str:
    """Return the suite a measurement came from."""
    if m.edge == PRODUCTS:
        return "products"
    if m.edge in PORT_EDGES:
        return "mla-moe"
    return "seams" if m.kind is Kind.KNOWN_DIFFERENCE else "parity"


def case_entry(case: Case) -> dict[str, Any]:
    """Return what the document says of a case."""
    return {
        "name": case.name,
        "title": case.why,
        "why": case.why,
        "hash": case.hash,
        "batch": case.batch_size,
        "length": case.length,
        "config": case.config.to_dict(),
    }


def known_differences(measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    """Return every deliberate difference, and its value where it was measured."""
    values = {m.quantity: m for m in measurements if m.kind is Kind.KNOWN_DIFFERENCE}
    entries = []
    for difference in KNOWN_DIFFERENCES:
        found = values.get(difference.id)
        entry = {name: getattr(difference, name) for name in ("id", "reason", "bound", "measured")}
        if found is not None and math.isfinite(found.value):
            entry["value"] = found.value
        entry["holds"] = found is None or found.verdict is Verdict.PASS
        entries.append(entry)
    return entries


def _tolerances() -> list[dict[str, str]]:
    return [
        {"edge": row.edge, "kind": kind, "bound": row.bound, "reason": row.reason}
        for row in (*TABLE, *PORTS)
        for kind in row.kinds
    ]


def _replay(measurements: Sequence[Measurement], planted: str | None) -> list[dict[str, str]]:
    entries = [{"label": "everything", "command": "make nightly"}]
    failed = [m for m in measurements if m.verdict is Verdict.FAIL]
    fault = f" --fault {planted}" if planted else ""
    # A deliberate difference is asked for by its own name; its case is what it was measured on.
    broken = {m.quantity if m.kind is Kind.KNOWN_DIFFERENCE else m.case for m in failed}
    return entries + [alone(name, fault) for name in sorted(broken)]


def replays(manifest: Mapping[str, Any], decision: Decision) -> list[dict[str, str]]:
    """Return the commands of a run, and one for each case that its history or machine disowns."""
    known = list(manifest.get("replay") or [])
    labels = {entry["label"] for entry in known}
    left = {c.case for c in decision.changes if c.what in (What.WORSE, What.DRIFTED)}
    fault = f" --fault {manifest['fault']}" if manifest.get("fault") else ""
    return known + [alone(name, fault) for name in sorted(left - labels)]


def alone(name: str, options: str = "") -> dict[str, str]:
    """Return the label and the command that measures one case, of any suite, alone."""
    command = f".venv/bin/megalodon-numerics nightly --case {shlex.quote(name)}{options}"
    return {"label": name, "command": command}
