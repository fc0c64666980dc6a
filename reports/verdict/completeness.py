"""Completeness of a run: every gate of its contract (plan) was measured, and each only once.

Source: docs/verdicts.md "Contract".
"""

from __future__ import annotations

from collections import Counter

from parity.engine.measure.contract import Breaches, breaches
from reports.store.manifest import Manifest
from reports.store.runs import Run
from reports.store.schema import RunKind
from reports.text import count, label

FIRST_SCHEMA = 5
"""First schema whose runs store a contract (list of the planned gates)."""
BOUND = frozenset((RunKind.NIGHTLY, RunKind.SHARD, RunKind.PORT))
"""Kinds of run that plan their gates before they measure; a session of tests does not."""
WITHOUT_GATES = frozenset(("stability", "controls"))
"""Suites of a night that produce findings and counts but no gates."""


def breaches_of(run: Run) -> Breaches:
    """Return how a run's gates differ from its contract (planned gates); empty without one."""
    if run.manifest.kind not in BOUND or _stored_before_contracts(run.manifest):
        return Breaches()
    return breaches(run.manifest.contract, run.measurements)


def lacking(run: Run, found: Breaches, old_schema_may_pass: bool = False) -> str:
    """Return a sentence on why a run without failures is incomplete; empty if it is complete.

    Args:
        run: The measured run.
        found: `breaches_of` that run.
        old_schema_may_pass: Whether a run that was stored before runs had a contract counts as
            complete.
    """
    manifest = run.manifest
    if manifest.fault:
        return (
            f"Nothing failed, but the bug {label(manifest.fault, 60)} was planted in this run: no "
            "gate found it, and the run says nothing about the program without it."
        )
    if twice := [key for key, n in Counter(m.key for m in run.measurements).items() if n > 1]:
        case, edge, quantity, metric = twice[0]
        were = "was" if len(twice) == 1 else "were"
        return (
            f"Nothing failed, but {count(len(twice), 'measurement')} {were} stored more than once, "
            "first: "
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
                f"{manifest.migrated_from}): the gates that it should have measured are unknown. "
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
        what = "has no gate in the contract" if without else "is in the contract but not in the run"
        return f"Nothing failed, but suite {names} {what}. Measure again."
    return ""


def _stored_before_contracts(manifest: Manifest) -> bool:
    return manifest.migrated_from is not None and manifest.migrated_from < FIRST_SCHEMA
