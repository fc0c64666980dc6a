"""What a run means: one word, one exit code, one sentence, and what changed since the baseline.

Source: spec/reports.md "Comparability" and its exit codes, spec/parity.md "Fail closed" and "First
divergence".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum

from parity.localize import first_divergence
from parity.results import Measurement, Verdict
from reports.changes import Change, What, environment_diff, find_changes, settle
from reports.history import Key
from reports.store import Run
from reports.text import contrast, count, edge_name, edge_rank, label, metric_name, number, share
from stability.findings import Severity


class Word(StrEnum):
    """The verdict of a run, in the words of the page."""

    PASS = "PASS"
    REGRESSED = "REGRESSED"
    CHANGED = "CHANGED"
    INCOMPLETE = "INCOMPLETE"
    NOT_COMPARABLE = "NOT COMPARABLE"


class ExitCode(IntEnum):
    """What the command line returns."""

    PASS = 0
    REGRESSION = 1
    USAGE = 2
    INCOMPLETE = 3
    NOT_COMPARABLE = 4
    NOTHING_SELECTED = 5
    INTERNAL_ERROR = 6


@dataclass(frozen=True, slots=True)
class Counts:
    """How many of what; failures are broken gates and findings of severity error together."""

    gates: int
    passed: int
    new: int
    persisting: int
    fixed: int
    changed: int
    not_comparable: int
    not_run: int
    skipped: int
    warnings: int


@dataclass(frozen=True)
class Decision:
    """The verdict of a run against its baseline."""

    word: Word
    exit_code: ExitCode
    sentence: str
    counts: Counts
    changes: tuple[Change, ...]
    starts: tuple[Measurement, ...]
    """First divergence of each failing (case, edge), the one to look at first in front."""
    baseline_id: str | None
    environment: tuple[str, ...]
    """What differs from the baseline's environment: while anything does, no value is CHANGED."""


def _is_cpu(run: Run) -> bool:
    return (run.manifest.get("device") or {}).get("kind") == "cpu"


def _starts(rows: Sequence[Measurement], new: set[Key]) -> tuple[Measurement, ...]:
    groups: dict[tuple[str, str], list[Measurement]] = {}
    for m in rows:
        groups.setdefault((m.case, m.edge), []).append(m)
    found = [start for group in groups.values() if (start := first_divergence(group))]

    def importance(m: Measurement) -> tuple[object, ...]:
        fraction = m.fraction
        return (
            m.verdict is not Verdict.FAIL,
            not any(case == m.case and edge == m.edge for case, edge, _, _ in new),
            edge_rank(m.edge),
            math.isfinite(fraction),
            -fraction if math.isfinite(fraction) else 0.0,
            m.case,
        )

    return tuple(sorted(found, key=importance))


def _place(m: Measurement | Change) -> str:
    return f"{label(m.quantity, 60)} in case {label(m.case, 40)} ({edge_name(m.edge)})"


def _size(m: Measurement) -> str:
    text = f"{metric_name(m.metric)} {number(m.value)}"
    if math.isnan(m.tolerance):
        return f"{text} with no tolerance to hold it against"
    over = m.fraction
    times = ""
    if math.isfinite(over) and over > 1:
        times = f", {over:,.1f} times over" if over < 1e4 else f", {number(over)} times over"
    return f"{text} against a tolerance of {number(m.tolerance)}{times}"


def _regressed(run: Run, counts: Counts, starts: Sequence[Measurement]) -> str:
    total = counts.new + counts.persisting
    new = "all new" if not counts.persisting else f"{counts.new:,} new"
    head = (
        f"{count(total, 'failure')}, {new}."
        if total > 1
        else f"1 {'new' if counts.new else 'persisting'} failure."
    )
    failing = [m for m in starts if m.verdict is Verdict.FAIL]
    if failing:
        more = len(failing) - 1
        others = f"; {count(more, 'other comparison', 'other comparisons')} fail" + (
            "s" if more == 1 else ""
        )
        return f"{head} It starts at {_place(failing[0])}: {_size(failing[0])}" + (
            f"{others}." if more else "."
        )
    errors = [f for f in run.findings if f.severity is Severity.ERROR]
    if errors:
        f = errors[0]
        return f"{head} Probe {label(f.probe, 40)} on {label(f.subject, 60)}: {label(f.message)}."
    blocked = starts[0] if starts else None
    return head + (f" It starts at {_place(blocked)}: not comparable." if blocked else "")


def _incomplete(run: Run) -> str:
    suites = run.manifest.get("suites") or []
    if not suites:
        return "The run does not say which suites it planned, so nothing shows that it is whole."
    partial = [s for s in suites if not _ran(s)]
    first = partial[0]
    reason = f": {label(str(first['reason']), 120)}" if first.get("reason") else ""
    more = f" {count(len(partial) - 1, 'more suite')} did not finish." if len(partial) > 1 else ""
    name, status = label(str(first.get("name")), 40), label(str(first.get("status")), 40)
    executed, planned = first.get("executed"), first.get("planned")
    return (
        f"Nothing failed, but suite {name} is not whole ({status}): {executed} of {planned} checks "
        f"executed{reason}.{more}"
    )


def _tightest(rows: Sequence[Measurement]) -> str:
    gates = [m for m in rows if m.verdict is Verdict.PASS]
    worst = max(gates, key=lambda m: m.fraction)
    return f"the closest is {_place(worst)} at {share(worst.fraction)} of its tolerance"


def _since(baseline: Run | None, environment: Sequence[str], changes: Sequence[Change]) -> str:
    if baseline is None:
        return "There is no earlier comparable run."
    name = f"run {label(baseline.id, 60)}"
    if environment:
        more = f" and {len(environment) - 1} more" if len(environment) > 1 else ""
        return f"The environment differs from {name}: {environment[0]}{more}."
    if changes:
        kinds = [(what, sum(c.what is what for c in changes)) for what in What]
        listed = ", ".join(f"{number_of:,} {what}" for what, number_of in kinds if number_of)
        return f"Since {name}: {listed}."
    return f"Nothing changed since {name}."


def _changed(changes: Sequence[Change], baseline: Run, rows: Sequence[Measurement]) -> str:
    moved = [c for c in changes if c.what in (What.CHANGED, What.FIXED)]
    first = min(
        moved,
        key=lambda c: (math.isnan(c.tolerance), edge_rank(c.edge), c.stage < 0, c.stage, c.case),
    )
    fixed = sum(c.what is What.FIXED for c in moved)
    then, now = contrast(first.before, first.now)
    repaired = f"; {count(fixed, 'failure')} fixed" if fixed else ""
    return (
        f"All gates hold, but {count(len(moved), 'value')} that should repeat exactly "
        f"differ{'s' if len(moved) == 1 else ''} from run {label(baseline.id, 60)}{repaired}. "
        f"It starts at {_place(first)}: {metric_name(first.metric)} {then} → {now}; "
        f"{_tightest(rows)}."
    )


def _ran(suite: dict[str, object]) -> bool:
    executed, planned = suite.get("executed"), suite.get("planned")
    whole = isinstance(executed, int) and isinstance(planned, int) and executed >= planned
    return whole and suite.get("status") == "ran"


def _count(run: Run, rows: Sequence[Measurement], changes: Sequence[Change]) -> Counts:
    def of(what: What) -> int:
        return sum(c.what is what for c in changes)

    def missing(skipped: bool) -> int:
        # A suite that did not run is at least one thing not run, even if it planned none.
        return sum(
            max(1, int(s.get("planned") or 0) - int(s.get("executed") or 0))
            for s in run.manifest.get("suites") or []
            if not _ran(s) and (s.get("status") == "skipped") is skipped
        )

    verdicts = [m.verdict for m in rows]
    return Counts(
        gates=sum(v is not Verdict.INFO for v in verdicts),
        passed=sum(v is Verdict.PASS for v in verdicts),
        new=of(What.NEW),
        persisting=of(What.PERSISTING),
        fixed=of(What.FIXED),
        changed=of(What.CHANGED),
        not_comparable=sum(v is Verdict.NOT_COMPARABLE for v in verdicts),
        not_run=missing(skipped=False),
        skipped=missing(skipped=True),
        warnings=sum(f.severity is Severity.WARNING for f in run.findings),
    )


def decide(run: Run, baseline: Run | None) -> Decision:
    """Judge a run, fail closed: failures first, then what did not run, then what is incomparable.

    `baseline` is the newest earlier run with comparable measurements, or None. A value that differs
    from it makes the run CHANGED only where both ran on the CPU in equal environments, where equal
    work must give equal bits; it still exits 0, since every tolerance holds.
    """
    rows = [settle(m) for m in run.measurements]
    environment = environment_diff(run, baseline) if baseline else ()
    exact = not environment and _is_cpu(run)
    changes = find_changes(run, rows, baseline, exact)
    counts = _count(run, rows, changes)
    new = {(c.case, c.edge, c.quantity, c.metric) for c in changes if c.what is What.NEW}
    starts = _starts(rows, new)
    suites = run.manifest.get("suites") or []
    whole = bool(suites) and all(_ran(s) for s in suites)

    if counts.new + counts.persisting:
        verdict = Word.REGRESSED, ExitCode.REGRESSION, _regressed(run, counts, starts)
    elif not whole and (suites or counts.gates):
        verdict = Word.INCOMPLETE, ExitCode.INCOMPLETE, _incomplete(run)
    elif counts.not_comparable:
        first = starts[0]
        reason = f": {label(first.note)}" if first.note else ""
        several = count(counts.not_comparable, "measurement")
        sentence = f"{several} could not be compared. It starts at {_place(first)}{reason}."
        verdict = Word.NOT_COMPARABLE, ExitCode.NOT_COMPARABLE, sentence
    elif not counts.gates:
        sentence = "Nothing was measured against a tolerance, and that is never a pass."
        verdict = Word.INCOMPLETE, ExitCode.NOTHING_SELECTED, sentence
    elif baseline and exact and (counts.changed or counts.fixed):
        verdict = Word.CHANGED, ExitCode.PASS, _changed(changes, baseline, rows)
    else:
        sentence = (
            f"All {count(counts.gates, 'gate')} hold; {_tightest(rows)}. "
            f"{_since(baseline, environment, changes)}"
        )
        verdict = Word.PASS, ExitCode.PASS, sentence
    word, exit_code, sentence = verdict
    return Decision(
        word=word,
        exit_code=exit_code,
        sentence=sentence,
        counts=counts,
        changes=tuple(changes),
        starts=starts,
        baseline_id=baseline.id if baseline else None,
        environment=environment,
    )
