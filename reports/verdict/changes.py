"""Differences from the baseline: one `Change` per measurement or finding of an error that differs.

Source: docs/verdicts.md "Comparability", docs/parity.md "Fail closed".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from parity.engine.measure.measurement import Key, Measurement, Verdict
from parity.tolerances import NOISE_FLOOR
from reports.provenance.host import processor
from reports.store.manifest import Environment
from reports.store.runs import Run
from reports.text import contrast, count, edge_rank, label
from reports.verdict.drift import UNSEEN, Drift, PinComparison, Rescaled
from reports.verdict.history import Past
from reports.verdict.levels import Group
from reports.verdict.noise import step
from stability.core.findings import DIFFERENCES, Finding, Severity


class What(StrEnum):
    """Kind of difference from the baseline, the history or a pinned level, most severe first."""

    NEW = "new failure"
    PERSISTING = "persisting failure"
    WORSE = "worse than its history"
    DRIFTED = "drifted from its level"
    FIXED = "fixed"
    GONE = "no longer measured"
    CHANGED = "changed"
    BETTER = "better than before"
    NOT_COMPARABLE = "not comparable with baseline"

    def wording(self, baseline: bool) -> str:
        """Return the name shown to people; without a `baseline` a failure is not called new."""
        return "failure" if self is What.NEW and not baseline else self.value


@dataclass(frozen=True, slots=True)
class Change:
    """One difference of a run from its baseline, from earlier values, or from a pinned error level.

    `before` and `now` are measured values or, for a drift, error levels of a group of gates; None
    if there is no such value. `tolerance` is the tolerance of the gate, the threshold of the
    finding or, for a level that grew, the largest level within its limit; NaN without one.
    """

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
    kind: str = ""
    """Kind of quantity, for the level of a group of gates; empty for a single gate or finding."""
    excess: float = 0.0
    """Severity, 0 for most changes. Of a drift: |ln ratio| / ln limit. Of a value that left its
    history: |ln ratio| / ln `NOISE_FLOOR`, where ratio is value / median of earlier values."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of gates, changes and missing checks of a run.

    `new`, `persisting` and `fixed` count failures: failed gates and findings of severity error.
    `skipped` counts the planned checks of skipped suites, `not_run` those that other incomplete
    suites did not execute.
    """

    gates: int
    passed: int
    new: int
    persisting: int
    fixed: int
    changed: int
    worse: int
    """Gates within tolerance but above their history, plus levels that grew beyond their limits."""
    not_comparable: int
    not_run: int
    skipped: int
    warnings: int


def _same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def _change(what: What, m: Measurement, before: Measurement | None, note: str = "") -> Change:
    if before is not None and not _same(before.tolerance, m.tolerance):
        note = tolerance_note(before.tolerance, m.tolerance)
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
    """Compare a measurement with that of the baseline; return None if no change is to be reported.

    Args:
        m: Measurement of the run.
        old: The same measurement in the baseline; None if it has none.
        exact: Whether a passing value must equal the baseline's bit by bit.
    """
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
    alike = exact and old.deterministic is not False and m.device == old.device
    if alike and not _same(m.value, old.value):
        return _change(What.CHANGED, m, old)
    return None


def _step(m: Measurement, past: Past) -> Change | None:
    """Return a `Change` if the value of a passing gate is an outlier among its earlier values.

    None otherwise. Used for gates whose value does not repeat bit by bit
    (`reports.verdict.noise.step`).
    """
    ratio = step(m.value, past.values) if m.verdict is Verdict.PASS else None
    if ratio is None:
        return None
    what = What.WORSE if ratio > 1 else What.BETTER
    note = f"{ratio:.2f} times the median of {count(len(past.values), 'run')}"
    excess = abs(math.log(ratio)) / math.log(NOISE_FLOOR)
    return replace(_change(what, m, None, note), before=m.value / ratio, excess=excess)


def tolerance_note(before: float, now: float) -> str:
    """Return a note about a tolerance that changed from `before` to `now`."""
    then, after = contrast(before, now)
    return f"tolerance changed from {then} to {after}"


def rescaled_change(rescaled: Rescaled, comparison: PinComparison) -> Change:
    """Return the change "not comparable" for gates whose tolerances changed since the pinned run.

    The error level of a group of gates depends on their tolerances, because each gate counts with
    at least `DRIFT_SHARE` of its tolerance: the level may change although no error did.
    """
    note = f"{tolerance_note(rescaled.before, rescaled.now)} since {pin_name(comparison)}"
    return _group_change(What.NOT_COMPARABLE, rescaled.group, note=note)


def drift_change(drift: Drift, comparison: PinComparison, run: Run) -> Change:
    """Return the change for a group of gates of `run` whose error level left the pinned one."""
    note = f"{drift.what} of these gates, {drift.ratio:.2f} times that of {pin_name(comparison)}"
    if not comparison.same:
        here = machine_name(run.manifest.environment)
        note += f"; here {here}; rounding between them explains {drift.limit:.2f}"
    grew = drift.ratio > 1
    return replace(
        _group_change(What.DRIFTED if grew else What.BETTER, drift.group, note),
        before=drift.before,
        now=drift.now,
        tolerance=drift.before * drift.limit if grew else math.nan,
        excess=drift.excess,
    )


def unseen_change(drift: Drift, comparison: PinComparison) -> Change:
    """Return the change "not comparable" for gates whose level grew by a factor above `UNSEEN`.

    The factor is within its limit: rounding of another machine may explain it.
    """
    note = (
        f"not comparable yet: {drift.what} of these gates, {drift.ratio:.2f} times that of "
        f"{pin_name(comparison)}; rounding between the machines explains {drift.limit:.2f}, and "
        f"{UNSEEN:g} over {count(drift.draws, 'pooled draw')}"
    )
    change = _group_change(What.NOT_COMPARABLE, drift.group, note)
    return replace(change, before=drift.before, now=drift.now, excess=drift.excess)


def _group_change(what: What, group: Group, note: str) -> Change:
    case, edge, kind, metric = group
    return Change(
        what, case, edge, f"all {kind} gates", metric, None, None, math.nan, note=note, kind=kind
    )


def pin_name(comparison: PinComparison) -> str:
    """Return text that names a pinned run and its machine, such as "run X on this machine"."""
    pin = comparison.pin
    run = f"run {label(pin.run, 60)}"
    if comparison.same:
        return f"{run} on this machine"
    return f"{run} on {machine_name(pin.environment)}"


def machine_name(environment: Environment) -> str:
    """Return text that names the processor and the kind of reference of a run."""
    reference = environment.reference.kind or "absent"
    return f"{label(processor(environment), 140)}, reference {label(reference, 20)}"


def _measurement_changes(
    rows: Sequence[Measurement],
    before: dict[Key, Measurement],
    past: Mapping[Key, Past],
    equal: Callable[[str], bool],
) -> list[Change]:
    def placed(m: Measurement) -> Change | None:
        key = m.key
        # Equal bits in one replay do not prove repeatability: a value that ever varied is noisy.
        repeats = m.deterministic is True and not (key in past and past[key].varied)
        change = _compare_one(m, before.get(key), repeats and equal(m.case))
        return change or (None if repeats or key not in past else _step(m, past[key]))

    changes = [placed(m) for m in rows]
    measured = {m.key for m in rows}
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
    compared = {(f.probe, f.source) for f in run.findings if f.metric == DIFFERENCES}
    for key, f in then.items():
        if key not in now:
            # If the probe did not run, a missing error does not mean that it was fixed.
            ran = key in present or (f.probe, f.source) in compared
            out.append(change(What.FIXED if ran else What.GONE, f, f.value, None))
    return out


def find_changes(
    run: Run,
    baseline: Run | None,
    past: Mapping[Key, Past],
    equal: Callable[[str], bool],
) -> tuple[Change, ...]:
    """Return the changes of a run's measurements and findings, most severe first.

    Args:
        run: The judged run.
        baseline: Run to compare with; None if there is none.
        past: Earlier values of the gates that do not repeat; each such gate is compared with its
            own.
        equal: Function that returns whether both runs measured a case on the same host. Only then
            must a value that a replay repeated bit by bit equal the baseline's.
    """
    before = {m.key: m for m in baseline.measurements} if baseline else {}
    changes = _measurement_changes(run.measurements, before, past, equal)
    return gravest_first(changes + _finding_changes(run, baseline))


def gravest_first(changes: Iterable[Change], cases: Iterable[str] = ()) -> tuple[Change, ...]:
    """Sort changes, most severe first: by kind (`What`), then by `excess`, the largest first.

    Among equal ones, those with a tolerance precede those without. Then `cases`, in their order,
    precede other cases, so that a list begins with the case that the verdict's sentence names. Then
    come the orders of edges (`edge_rank`), cases and stages.
    """
    rank = {what: i for i, what in enumerate(What)}
    turn = {case: i for i, case in enumerate(dict.fromkeys(cases))}
    return tuple(
        sorted(
            changes,
            key=lambda c: (
                rank[c.what],
                -c.excess,
                math.isnan(c.tolerance),
                turn.get(c.case, len(turn)),
                edge_rank(c.edge),
                c.case,
                c.stage < 0,
                c.stage,
            ),
        )
    )


def count_changes(run: Run, changes: Sequence[Change]) -> Counts:
    """Count a run's gates, its changes by kind, and the checks that its suites did not execute."""

    def of(what: What) -> int:
        return sum(c.what is what for c in changes)

    def missing(skipped: bool) -> int:
        # A suite that did not run is at least one thing not run, even if it planned none.
        return sum(
            max(1, suite.planned - suite.executed)
            for suite in run.manifest.suites
            if not suite.whole and (suite.status == "skipped") is skipped
        )

    verdicts = [m.verdict for m in run.measurements]
    return Counts(
        gates=sum(v is not Verdict.INFO for v in verdicts),
        passed=sum(v is Verdict.PASS for v in verdicts),
        new=of(What.NEW),
        persisting=of(What.PERSISTING),
        fixed=of(What.FIXED),
        changed=of(What.CHANGED),
        worse=of(What.WORSE) + of(What.DRIFTED),
        not_comparable=sum(v is Verdict.NOT_COMPARABLE for v in verdicts),
        not_run=missing(skipped=False),
        skipped=missing(skipped=True),
        warnings=sum(f.severity is Severity.WARNING for f in run.findings),
    )
