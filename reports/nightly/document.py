"""Fields of run.json that follow from the code: tolerances and known differences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from parity.engine.measure.measurement import Kind, Measurement, Verdict
from reports.store.manifest import Manifest
from reports.subject import suites_of_known_differences, tables
from reports.verdict.replays import suite_of


def with_tables(manifest: Manifest, rows: Sequence[Measurement]) -> Manifest:
    """Return the manifest with the current tolerance tables and all known differences.

    After merging shards it is called again: a shard has the known differences of its own rows only.

    Args:
        manifest: Manifest of the run.
        rows: Measurements of the run, from which known differences take their values.
    """
    tolerances = tuple(
        {"edge": row.edge, "kind": kind, "bound": row.bound, "reason": row.reason}
        for row in tables().tolerances
        for kind in row.kinds
    )
    return replace(manifest, tolerances=tolerances, seams=known_differences(rows))


def known_differences(measurements: Sequence[Measurement]) -> tuple[dict[str, Any], ...]:
    """Return the fields of every known difference, for run.json.

    "holds" is present only if the difference is among `measurements`, "value" only if its measured
    value is finite, too.
    """
    suites = suites_of_known_differences()
    values = {
        m.quantity: m
        for m in measurements
        if m.kind is Kind.KNOWN_DIFFERENCE and suite_of(m) in suites.get(m.quantity, ())
    }
    entries = []
    for difference in tables().known_differences:
        m = values.get(difference.id)
        entry = {name: getattr(difference, name) for name in ("id", "reason", "bound", "measured")}
        if m is not None and math.isfinite(m.value):
            entry["value"] = m.value
        # A known difference without a measurement neither holds nor fails.
        if m is not None:
            entry["holds"] = m.verdict is Verdict.PASS
        entries.append(entry)
    return tuple(entries)
