"""Whether a run measured what its contract says, and nothing twice.

Source: docs/verdicts.md "Contract".
"""

from __future__ import annotations

from collections import Counter

from parity.engine.contract import Breaches, breaches
from reports.store.manifest import Manifest
from reports.store.runs import Run
from reports.store.schema import RunKind
from reports.text import label

FIRST_SCHEMA = 5
"""The first schema whose runs hold a contract."""
BOUND = frozenset((RunKind.NIGHTLY, RunKind.SHARD, RunKind.PORT))
"""Kinds of run that know before they measure what they will measure; tests do not."""
WITHOUT_GATES = frozenset(("stability", "controls"))
"""Suites of a night that give findings and counts, no gates."""


def breaches_of(run: Run) -> Breaches:
    """Return where a run's gates differ from its contract; empty for kinds that have none."""
    if run.manifest.kind not in BOUND or _stored_before_contracts(run.manifest):
        return Breaches()
    return breaches(run.manifest.contract, run.measurements)


def lacking(run: Run, found: Breaches, old_schema_may_pass: bool = False) -> str:
    """Return why a run is not whole by its contract, as a sentence; empty where it is.

    Args:
        run: what was measured.
        found: `breaches_of` it.
        old_schema_may_pass: whether a run without a contract, of an older schema, counts as whole.
    """
    manifest = run.manifest
    if manifest.fault:
        return (
            f"Nothing failed, but the bug {label(manifest.fault, 60)} was planted in this run: no "
            "gate found it, and the run says nothing about the program without it."
        )
    if twice := [key for key, n in Counter(m.key for m in run.measurements).items() if n > 1]:
        case, edge, quantity, metric = twice[0]
        return (
            f"Nothing failed, but {len(twice):,} measurements are there more than once, first: "
            f"{label(quantity, 60)} ({label(metric, 40)}) of case {label(case, 40)} "
            f"({label(edge, 40)}). Measure again."
        )
    if manifest.kind not in BOUND:
        return ""
    if _stored_before_contracts(manifest):
        return (
            ""
            if old_schema_may_pass
            else (
                "Nothing failed, but this run was stored by a version without contracts (schema "
                f"{manifest.migrated_from}): which gates it should have measured is not known. "
                "Measure again with this version."
            )
        )
    if found:
        return f"Nothing failed, but {label(found.sentence(), 400)}."
    planned = {line.suite for line in manifest.contract}
    known = {suite.name for suite in manifest.suites}
    without = sorted(known - planned - WITHOUT_GATES)
    if without or not planned <= known:
        names = ", ".join(label(name, 40) for name in without or sorted(planned - known))
        what = "has no gate in the contract" if without else "is in the contract alone"
        return f"Nothing failed, but suite {names} {what}. Measure again."
    return ""


def _stored_before_contracts(manifest: Manifest) -> bool:
    return manifest.migrated_from is not None and manifest.migrated_from < FIRST_SCHEMA
