"""What differs from the baseline: one `Change` per measurement or error that stands otherwise.

Source: spec/reports.md "Comparability", spec/parity.md "Fail closed".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from parity.results import Measurement, Verdict
from reports.history import Key
from reports.store import Run
from reports.text import edge_rank, label, number
from stability.findings import Finding, Severity


class What(StrEnum):
    """How one measurement or finding stands against the baseline, gravest first."""

    NEW = "new failure"
    PERSISTING = "persisting failure"
    FIXED = "fixed"
    GONE = "no longer measured"
    CHANGED = "changed"
    NOT_COMPARABLE = "not comparable with baseline"


@dataclass(frozen=True, slots=True)
class Change:
    """One difference from the baseline; `before` is None where there is nothing to compare with."""

    what: What
    case: str
    edge: str
    quantity: str
    metric: str
    before: float | None
    now: float | None
    tolerance: float
    stage: int = -1
    note: str = ""


def settle(m: Measurement) -> Measurement:
    """Return `m` with the verdict its numbers support: fail closed (spec/parity.md).

    A gate passes only on a finite value within its tolerance, and a pass without a tolerance is a
    gate that nothing checked.
    """
    gated = m.verdict is Verdict.PASS or (m.verdict is Verdict.INFO and not math.isnan(m.tolerance))
    if gated and not (math.isfinite(m.value) and m.value <= m.tolerance):
        return replace(m, verdict=Verdict.FAIL)
    return replace(m, verdict=Verdict.PASS) if gated else m


def key_of(m: Measurement) -> Key:
    """Return what names a measurement across runs."""
    return (m.case, m.edge, m.quantity, m.metric)


def _same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def environment_diff(run: Run, baseline: Run) -> tuple[str, ...]:
    """Name what differs between the two environments, such as "jax 0.10.1 → 0.10.2"."""
    now, then = run.manifest, baseline.manifest
    pairs: list[tuple[str, object, object]] = []
    for part in ("versions", "device", "flags"):
        a, b = then.get(part) or {}, now.get(part) or {}
        pairs += [(name, a.get(name), b.get(name)) for name in sorted({*a, *b})]
    pairs.append(("threads", then.get("threads"), now.get("threads")))
    for part in ("kind", "commit"):
        a, b = then.get("reference") or {}, now.get("reference") or {}
        pairs.append((f"reference {part}", a.get(part), b.get(part)))
    absent = "absent"
    return tuple(
        f"{label(name, 60)} {label(str(absent if a is None else a), 60)} → "
        f"{label(str(absent if b is None else b), 60)}"
        for name, a, b in pairs
        if a != b
    )


def _change(what: What, m: Measurement, before: Measurement | None, note: str = "") -> Change:
    if before is not None and not note and not _same(before.tolerance, m.tolerance):
        note = f"tolerance was {number(before.tolerance)}"
    return Change(
        what=what,
        case=m.case,
        edge=m.edge,
        quantity=m.quantity,
        metric=m.metric,
        before=None if before is None else before.value,
        now=m.value,
        tolerance=m.tolerance,
        stage=m.stage,
        note=note or m.note,
    )


def _compare_one(m: Measurement, old: Measurement | None, exact: bool) -> Change | None:
    """Place one measurement against the baseline; None where there is nothing to say."""
    failed = m.verdict is Verdict.FAIL
    if old is None:
        return _change(What.NEW, m, None, "not in the baseline") if failed else None
    if old.identity != m.identity:
        if m.verdict is Verdict.INFO:
            return None
        return _change(What.NEW if failed else What.NOT_COMPARABLE, m, None, "another identity")
    if failed:
        persists = old.verdict is Verdict.FAIL
        return _change(What.PERSISTING if persists else What.NEW, m, old)
    if old.verdict is Verdict.FAIL and m.verdict is Verdict.PASS:
        return _change(What.FIXED, m, old)
    if exact and m.device == old.device and not _same(m.value, old.value):
        return _change(What.CHANGED, m, old)
    return None


def _measurement_changes(
    rows: Sequence[Measurement], before: dict[Key, Measurement], exact: bool
) -> list[Change]:
    changes = [_compare_one(m, before.get(key_of(m)), exact) for m in rows]
    measured = {key_of(m) for m in rows}
    changes += [
        replace(_change(What.GONE, old, None), before=old.value, now=None)
        for key, old in before.items()
        if key not in measured and old.verdict is not Verdict.INFO
    ]
    return [c for c in changes if c is not None]


def _finding_changes(run: Run, baseline: Run | None) -> list[Change]:
    def errors(findings: Iterable[Finding]) -> dict[tuple[str, str, str], Finding]:
        return {(f.probe, f.subject, f.metric): f for f in findings if f.severity is Severity.ERROR}

    now, then = errors(run.findings), errors(baseline.findings if baseline else ())
    present = {(f.probe, f.subject, f.metric) for f in run.findings}

    def change(what: What, f: Finding, before: float | None, value: float | None) -> Change:
        probe = f"probe {f.probe}"
        return Change(
            what, probe, "", f.subject, f.metric, before, value, f.threshold, note=f.message
        )

    out = [
        change(What.PERSISTING, f, then[key].value, f.value)
        if key in then
        else change(What.NEW, f, None, f.value)
        for key, f in now.items()
    ]
    fixed = [key for key in then if key in present and key not in now]
    return out + [change(What.FIXED, then[key], then[key].value, None) for key in fixed]


def find_changes(
    run: Run, rows: Sequence[Measurement], baseline: Run | None, exact: bool
) -> tuple[Change, ...]:
    """Compare the settled `rows` and the findings of `run` with the baseline, gravest first.

    Values are compared exactly where `exact` says that equal work must give equal bits.
    """
    before = {key_of(m): settle(m) for m in baseline.measurements} if baseline else {}
    changes = _measurement_changes(rows, before, exact) + _finding_changes(run, baseline)
    rank = {what: i for i, what in enumerate(What)}
    return tuple(
        sorted(
            changes,
            key=lambda c: (
                rank[c.what],
                math.isnan(c.tolerance),
                edge_rank(c.edge),
                c.case,
                c.stage < 0,
                c.stage,
            ),
        )
    )
